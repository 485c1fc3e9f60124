"""A decode step of a compressor that keeps rows (HCA): a window comes through shared memory, by bulk copies.

Where a window closes, 512 KiB a request are read. `simt` has them in registers, in as many CTAs as fit, one behind the
other: few loads are on their way. Here a warp asks for rows, `stages` groups of them ahead; nobody else waits for
memory.

    fetcher  a warp: a group of rows (those that are `split` apart) is a stage, a copy a row of k and one of z
    teams    quads threads each, 4 channels a thread: two groups in turn make a pair's part of the softmax; a team has
             neighbouring pairs, and stages of its own (who skips a stage's phase would take one for another)
    finish   the first team adds up its pairs, then those of the others, in order, and ends the entry as `simt` does

Sums have the order of `simt` with the same ``split`` and 8 slices, whatever slices, teams and stages are: within a
group, the two groups of a pair, the pairs; of squares, those of 64 channels, then these. All cuts, and `simt`, give the
same bits.

The newest row does not come from the state: the last team has it in registers and writes it there, and no copy reads
that row.

    SMEM     stages x 2 x 8 rows, pairs of other teams: 192 + 24 KiB with 6 stages, 2 teams and all channels in a CTA

On an H200 with a cold L2, 128 requests took 24.1 us where `simt` took 36.0; 32 took 12.8 and 12.6, 8 and fewer 12
where `simt` took 6 to 10.

Source: as `simt`; PTX ISA, "cp.async.bulk".
"""

from __future__ import annotations

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, memory

from dsv4lib.kernels.common.bulk import load_bulk
from dsv4lib.kernels.compressor.config import CHANNELS, LANES, PIECE
from dsv4lib.kernels.compressor.simt import FLOAT_BYTES, Compressor, Ends, Item, Rows

TEAMS = 1  # the named barrier of all threads but the fetcher's


class StreamedCompressor(Compressor):
    """Compress a decode step; see the module docstring, and `config.Sizes` for the arguments (``stages`` > 0)."""

    @cute.jit
    def __call__(
        self, rows: Rows, ends: Ends, out: tuple, page: tuple, eps: Float32, items: Int32, stream: cuda.CUstream
    ):
        """Launch; arguments as of `Compressor`."""
        floats = CHANNELS * self.quads

        @cute.struct
        class Storage:
            rows: cute.struct.Align[cute.struct.MemRange[Float32, self.stages * 2 * self.depth * floats], 128]
            parts: cute.struct.Align[cute.struct.MemRange[Float32, max(CHANNELS, self.left * 3 * floats)], 16]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, self.dim // PIECE], 16]
            barriers: cute.struct.MemRange[Int64, 2 * self.stages]

        self.storage = Storage
        self.kernel(rows, ends, out, page, eps).launch(
            grid=(self.slices, items, 1),
            block=(self.threads, 1, 1),
            cluster=(self.slices, 1, 1) if self.slices > 1 else None,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, rows: Rows, ends: Ends, out: tuple, page: tuple, eps: Float32):
        """A request a cluster: fetch its rows and pool them, or only keep the newest."""
        rank, cta, _ = cute.arch.block_idx()
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = memory.SmemAllocator().allocate(self.storage)
        shape = CHANNELS * self.quads, self.depth, 2, self.stages
        sRows = storage.rows.get_tensor(cute.make_ordered_layout(shape, order=(0, 1, 2, 3)))
        shape = CHANNELS * self.quads, 3, max(1, self.left)
        sParts = storage.parts.get_tensor(cute.make_ordered_layout(shape, order=(0, 1, 2)))
        full = storage.barriers.data_ptr()
        empty = full + self.stages
        if tidx < self.stages:
            cute.arch.mbarrier_init(full + tidx, 1)
            cute.arch.mbarrier_init(empty + tidx, self.quads // LANES)
        cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        if cutlass.const_expr(self.slices > 1):
            cute.arch.cluster_arrive_relaxed()  # this CTA's shared memory is there
        cute.arch.griddepcontrol_wait()
        item = self.find(ends.requests, cta)
        closes = item.count > 0 and (item.window + 1) * self.rate <= item.start + item.count
        if warp == self.team // LANES:
            if closes:
                self.fetch_rows(rows, item, rank * self.quads * CHANNELS, sRows, full, empty)
            if cutlass.const_expr(self.slices > 1):
                cute.arch.cluster_wait()
                if closes:
                    cute.arch.cluster_arrive_relaxed()
                    cute.arch.cluster_wait()
        else:
            team, channel = tidx // self.quads, (rank * self.quads + tidx % self.quads) * CHANNELS
            rNorm = cute.make_rmem_tensor(CHANNELS, Float32)
            cute.autovec_copy(cute.local_tile(ends.norm, (CHANNELS,), (channel // CHANNELS,)), rNorm)
            rNew = cute.make_rmem_tensor((CHANNELS, 3, 1), Float32)
            # Who has the newest row: of the last team those that `split` threads of a channel would leave it to.
            keeper = Int32(
                cutlass.select_(team == self.teams - 1, (item.start & (self.pooled - 1)) % self.split, Int32(-1))
            )
            self.fetch_newest(rows, item, channel, keeper, rNew)
            if closes:
                places = SimpleNamespace(rows=sRows, parts=sParts, sums=storage.sums, full=full, empty=empty, new=rNew)
                self.compress(rows, ends, out, page, eps, item, channel, team, rNorm, places)
            elif cutlass.const_expr(self.slices > 1):
                cute.arch.cluster_wait()
            self.store_newest(rows, item, channel, keeper, rNew)

    @cute.jit
    def fetch_rows(
        self, rows: Rows, item: Item, channel: Int32, sRows: cute.Tensor, full: cute.Pointer, empty: cute.Pointer
    ):
        """Role of the fetcher: groups in order, a lane a row of k or z."""
        lane = cute.arch.lane_idx()
        j, size = lane % self.depth, CHANNELS * self.quads * FLOAT_BYTES
        for number in cutlass.range(self.split, unroll=1):
            team, own = number // 2 % self.teams, number // (2 * self.teams) * 2 + number % 2
            group = team * self.turns + own
            stage, turn = self.stage_of(team, own)
            if turn > 0:
                self.wait_until_read(empty + stage, turn)
            count = Int32(cutlass.select_(group == self.split - 1, Int32(self.depth - 1), Int32(self.depth)))
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, 2 * count * size)
            cute.arch.sync_warp()
            slot = j * self.split + group
            k, z = self.slot_of(rows.k, item, slot, channel), self.slot_of(rows.z, item, slot, channel)
            source = Int64(cutlass.select_(lane < self.depth, k, z))
            if lane < 2 * self.depth and j < count:
                load_bulk(sRows[None, j, lane // self.depth, stage].iterator, source, Int32(size), full + stage)

    def wait_until_read(self, empty: cute.Pointer, turn: Int32) -> None:
        """Wait until a stage may be filled for the ``turn``-th time again."""
        cute.arch.mbarrier_wait(empty, (turn + 1) & 1)

    @cute.jit
    def soften(
        self, rows: Rows, item: Item, channel: Int32, group: Int32, rPart: cute.Tensor, storage: cutlass.Constexpr
    ):
        """The softmax over the item's rows, in the first team; ``group`` is the team's number."""
        tidx, _, _ = cute.arch.thread_idx()
        quad = tidx % self.quads
        rPair = cute.make_rmem_tensor((CHANNELS, 3), Float32)
        rOther = cute.make_rmem_tensor((CHANNELS, 3), Float32)
        rPart.fill(0.0)
        for own in cutlass.range(0, self.turns, 2, unroll=1):
            self.pool_group(group, own, quad, rPair, storage)
            self.pool_group(group, own + 1, quad, rOther, storage)
            self.add(rPair, rOther)
            if group > 0:  # in order: when the first team is done
                for i in cutlass.range_constexpr(3):
                    sPart = storage.parts[None, i, ((group - 1) * self.turns + own) // 2]
                    cute.autovec_copy(rPair[None, i], cute.local_tile(sPart, (CHANNELS,), (quad,)))
            elif own == 0:
                rPart.store(rPair.load())
            else:
                self.add(rPart, rPair)
        if cutlass.const_expr(self.teams > 1):
            cute.arch.barrier(barrier_id=TEAMS, number_of_threads=self.team)
        if group == 0:
            for left in cutlass.range(self.left, unroll=4):
                for i in cutlass.range_constexpr(3):
                    sPart = cute.local_tile(storage.parts[None, i, left], (CHANNELS,), (quad,))
                    cute.autovec_copy(sPart, rOther[None, i])
                self.add(rPart, rOther)

    @cute.jit
    def add(self, rPart: cute.Tensor, rOther: cute.Tensor):
        """Another part into one."""
        for c in cutlass.range_constexpr(CHANNELS):
            self.merge(rPart, c, rOther[c, 0], rOther[c, 1], rOther[c, 2])

    def stage_of(self, team: Int32, own: Int32) -> tuple:
        """(stage, how often it was used before) of a team's ``own``-th group: teams have stages of their own."""
        each = self.stages // self.teams
        return team * each + own % each, own // each

    @cute.jit
    def pool_group(self, team: Int32, own: Int32, quad: Int32, rPart: cute.Tensor, storage: cutlass.Constexpr):
        """The part of a team's group, once its rows are there; the newest row is the last one of the last group."""
        rK = cute.make_rmem_tensor((CHANNELS, self.depth), Float32)
        rZ = cute.make_rmem_tensor((CHANNELS, self.depth), Float32)
        (stage, turn), rNew = self.stage_of(team, own), storage.new
        cute.arch.mbarrier_wait(storage.full + stage, turn & 1)
        for j in cutlass.range_constexpr(self.depth - 1):
            self.take_row(storage.rows[None, j, None, stage], quad, rK[None, j], rZ[None, j])
        last = self.depth - 1
        if team * self.turns + own < self.split - 1:
            self.take_row(storage.rows[None, last, None, stage], quad, rK[None, last], rZ[None, last])
        else:
            for c in cutlass.range_constexpr(CHANNELS):
                rK[c, last], rZ[c, last] = rNew[c, 0, 0], rNew[c, 1, 0] + rNew[c, 2, 0]
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(storage.empty + stage)
        self.pool(rK, rZ, rPart)

    @cute.jit
    def take_row(self, sRow: cute.Tensor, quad: Int32, rK: cute.Tensor, rZ: cute.Tensor):
        """This thread's channels of a row of k and z."""
        cute.autovec_copy(cute.local_tile(sRow[None, 0], (CHANNELS,), (quad,)), rK)
        cute.autovec_copy(cute.local_tile(sRow[None, 1], (CHANNELS,), (quad,)), rZ)

    @cute.jit
    def squares(self, values: list, storage: cutlass.Constexpr) -> Float32:
        """Sum of squares of the entry, in its finishers: of 64 channels, then these in order."""
        tidx, _, _ = cute.arch.thread_idx()
        rank = cute.arch.block_idx()[0]
        lanes, pieces = PIECE // CHANNELS, self.dim // PIECE
        total = Float32(0.0)
        for c in cutlass.range_constexpr(CHANNELS):
            total = cute.math.fma(values[c], values[c], total)
        for step in cutlass.range_constexpr(lanes.bit_length() - 1):
            total += cute.arch.shuffle_sync_bfly(total, 1 << step)
        sSums = storage.sums.get_tensor(cute.make_layout(pieces))
        piece = rank * (pieces // self.slices) + tidx // lanes
        if cutlass.const_expr(self.slices > 1):
            cute.arch.cluster_wait()
            if tidx < self.quads and tidx % lanes < self.slices:
                remote = cute.arch.map_dsmem_ptr(sSums.iterator + piece, tidx % lanes)
                cute.arch.inline_ptx("st.shared::cluster.f32 [{$r0}], {$r1};", read_only_args=[remote, total])
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            if tidx < self.quads and tidx % lanes == 0:
                sSums[piece] = total
            cute.arch.barrier(barrier_id=TEAMS, number_of_threads=self.team)
        return self.add_up(sSums, pieces)
