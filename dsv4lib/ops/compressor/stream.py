"""Run a decode step of a compressor that keeps rows (HCA). A window comes through shared memory, by bulk copies.

Where a window closes, 512 KiB a request are read. `kernel` has them in registers, in as many CTAs as fit, one after the
other. Here a warp issues copies of rows, `stages` groups of them ahead; no other warp waits for memory.

    slices   CTAs (a cluster) share a request's rows; each has neighbouring ones, of all channels
    fetcher  a warp: a group of 8 neighbouring rows is a stage, a copy of 16 KiB for k and one for z where the state's
             rows are neighbours in memory, else a copy a row. It starts ahead of the other warps
    teams    128 threads each, 4 channels a thread: a group makes a partial softmax; a team has neighbouring groups, and
             stages of its own (a team that skipped a stage's phase would take one for another)
    finish   the first team adds up those of the others, the first CTA those of the others, which they send by
             ``st.async``, and ends the entry as `kernel` does

Sums have the order of `kernel` with the same ``split`` and 8 slices, whatever slices, teams and stages are: within a
group, then neighbours, and neighbours of these; of squares, those of 64 channels, then these. All cuts, and `kernel`,
give the same bits.

The newest row does not come from the state: the last team has it in registers and writes it there, and no copy reads
that row.

    SMEM     stages x 32 KiB, 6 KiB for each other team and each other CTA

**What is read is evicted from L2 first** (``evict_first``): it is not read again before it is written. Otherwise 64 MiB
evict what other kernels left in L2, and what they wrote must go to memory meanwhile.

**Measured** on an H200, us, L2 flushed by writing 384 MiB (in brackets: by reading them, nothing is left to write)::

    requests                       1      8       32      64      96      128
    2 CTAs, 3 stages, 1 team      6.5    7.1     8.9    13.3    18.3    21.8 (18.7)   one in 128 closes: 6.9
    4 CTAs, 4 stages, 2 teams     4.4    5.5    11.0    15.7    20.4    24.8 (23.1)                      9.8
    1 CTA, 6 stages, 2 teams      8.1    8.7     9.6    13.5    18.2    21.5 (18.3)                      8.5
    2 CTAs, without the policy    6.5    7.2     9.2    14.5    20.1    24.4 (18.8)                      6.9
    `kernel`, 8 slices            4.7    5.6    12.2    19.7    27.1    34.7 (28.8)                      9.6
    copies alone, 16 KiB, 2 CTAs                 6.6                    19.3 (15.2 to 16.1)

Copies of 16 KiB alone are the memory's rate. Beyond them are the request's row (0.9 us) and the end of an entry after
its last group (1.2 us), both by %globaltimer. What else was measured: data/bench/compressor.md.

Source: as `kernel`; PTX ISA, "cp.async.bulk", "st.async".
"""

from __future__ import annotations

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, memory

from dsv4lib.dsl.bulk import load_bulk
from dsv4lib.dsl.tensors import Divisor
from dsv4lib.ops.compressor.config import CHANNELS, LANES, PIECE
from dsv4lib.ops.compressor.kernel import FLOAT_BYTES, Compressor, Ends, Item, Rows
from dsv4lib.ops.compressor.pack import Pages

READY, TEAMS, ENDS = 1, 2, 3  # named barriers: mbarriers are there; all threads but the fetcher's; the first team's


class StreamedCompressor(Compressor):
    """Compress a decode step; see the module docstring.

    Arguments as in `config.Sizes` (``stages`` > 0).
    """

    @cute.jit
    def __call__(
        self, rows: Rows, ends: Ends, out: Pages, page: Divisor, eps: Float32, items: Int32, stream: cuda.CUstream
    ):
        """Launch; arguments as of `Compressor`."""

        @cute.struct
        class Storage:
            rows: cute.struct.Align[cute.struct.MemRange[Float32, self.stages * 2 * self.depth * self.dim], 128]
            softmaxes: cute.struct.Align[cute.struct.MemRange[Float32, max(CHANNELS, self.others * 3 * self.dim)], 16]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, self.dim // PIECE], 16]
            barriers: cute.struct.MemRange[Int64, 2 * self.stages + 1]

        self.storage = Storage
        self.kernel(rows, ends, out, page, eps).launch(
            grid=(self.slices, items, 1),
            block=(self.threads, 1, 1),
            cluster=(self.slices, 1, 1) if self.slices > 1 else None,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, rows: Rows, ends: Ends, out: Pages, page: Divisor, eps: Float32):
        """Fetch a request's rows and pool them, or only keep the newest. A cluster has one request."""
        rank, cta, _ = cute.arch.block_idx()
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = memory.SmemAllocator().allocate(self.storage)
        shape = self.dim, self.depth, 2, self.stages
        sRows = storage.rows.get_tensor(cute.make_ordered_layout(shape, order=(0, 1, 2, 3)))
        shape = CHANNELS, self.quads, 3, max(1, self.others)
        sSoftmax = storage.softmaxes.get_tensor(cute.make_ordered_layout(shape, order=(0, 1, 2, 3)))
        full = storage.barriers.data_ptr()
        empty, sent = full + self.stages, full + 2 * self.stages
        if warp == self.team // LANES:
            self.fetch_rows(rows, ends.requests, sRows, full, empty, sent)
        else:
            team, channel = tidx // self.quads, tidx % self.quads * CHANNELS
            rNorm = cute.make_rmem_tensor(CHANNELS, Float32)
            cute.autovec_copy(cute.local_tile(ends.norm, (CHANNELS,), (channel // CHANNELS,)), rNorm)
            cute.arch.griddepcontrol_wait()
            item = self.find(ends.requests, cta)
            rNew = cute.make_rmem_tensor((CHANNELS, 3, 1), Float32)
            mine = item.count > 0 and rank * self.teams + team == self.slices * self.teams - 1
            self.fetch_newest(rows, item, channel, mine, rNew)
            cute.arch.barrier(barrier_id=READY, number_of_threads=self.threads)
            if cutlass.const_expr(self.slices > 1):
                cute.arch.cluster_arrive_relaxed()
            if self.closes(item):
                places = SimpleNamespace(
                    rows=sRows, softmaxes=sSoftmax, sums=storage.sums, full=full, empty=empty, sent=sent, new=rNew
                )
                self.compress(rows, ends, out, page, eps, item, channel, team, rNorm, places)
            elif cutlass.const_expr(self.slices > 1):
                cute.arch.cluster_wait()
            self.store_newest(rows, item, channel, mine, rNew)

    def closes(self, item: Item) -> Boolean:
        """Return whether the request's one row ends a window."""
        return (item.count > 0) & ((item.window + 1) * self.rate <= item.start + item.count)

    @cute.jit
    def fetch_rows(
        self,
        rows: Rows,
        requests: cute.Tensor,
        sRows: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        sent: cute.Pointer,
    ):
        """Run the fetcher: barriers, then groups in order, teams round robin. Half the lanes are for k, half for z."""
        rank, cta, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        if lane < self.stages:
            cute.arch.mbarrier_init(full + lane, 1)
            cute.arch.mbarrier_init(empty + lane, self.quads // LANES)
        if cutlass.const_expr(self.slices > 1):
            if lane == self.stages:
                cute.arch.mbarrier_init(sent, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()
        cute.arch.barrier_arrive(barrier_id=READY, number_of_threads=self.threads)
        if cutlass.const_expr(self.slices > 1):
            cute.arch.cluster_arrive_relaxed()  # this CTA's shared memory is there
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()  # after the wait: this kernel ends after the one before
        item = self.find(requests, cta)
        if self.closes(item):
            self.fetch_window(rows, item, rank, sRows, full, empty)
        if cutlass.const_expr(self.slices > 1):
            cute.arch.cluster_wait()

    @cute.jit
    def fetch_window(
        self, rows: Rows, item: Item, rank: Int32, sRows: cute.Tensor, full: cute.Pointer, empty: cute.Pointer
    ):
        """Copy this CTA's rows."""
        lane = cute.arch.lane_idx()
        j, size = lane % self.depth, self.dim * FLOAT_BYTES
        dense = rows.k.stride[1] == self.dim and rows.z.stride[1] == self.dim
        many = Int32(cutlass.select_(dense, Int32(self.depth), Int32(1)))  # rows of a copy
        for number in cutlass.range(self.groups_of_team * self.teams, unroll=1):
            team, own = number % self.teams, number // self.teams
            group = self.group_of(rank, team, own)
            stage, phase = self.stage_of(team, own)
            if phase > 0:
                self.wait_until_read(empty + stage, phase)
            count = Int32(cutlass.select_(group == self.split - 1, Int32(self.depth - 1), Int32(self.depth)))
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, 2 * count * size)
            cute.arch.sync_warp()
            slot = group * self.depth + j
            if cutlass.const_expr(self.rows > self.pooled):
                slot += item.window * self.rate & (self.rows - 1)
            k, z = self.slot_of(rows.k, item, slot, Int32(0)), self.slot_of(rows.z, item, slot, Int32(0))
            source = Int64(cutlass.select_(lane < self.depth, k, z))
            if lane < 2 * self.depth and j < count and (j & (many - 1)) == 0:
                to = sRows[None, j, lane // self.depth, stage].iterator
                load_bulk(to, source, cutlass.min(many, count - j) * size, full + stage, once=True)

    def wait_until_read(self, empty: cute.Pointer, phase: Int32) -> None:
        """Wait until a stage may be filled for the ``phase``-th time again."""
        cute.arch.mbarrier_wait(empty, (phase + 1) & 1)

    def group_of(self, rank: Int32, team: Int32, own: Int32) -> Int32:
        """Return the number of a team's ``own``-th group in its window."""
        return (rank * self.teams + team) * self.groups_of_team + own

    def stage_of(self, team: Int32, own: Int32) -> tuple[Int32, Int32]:
        """Return (stage, how often it was used before) of a team's ``own``-th group. Teams have their own stages."""
        each = self.stages // self.teams
        return team * each + own % each, own // each

    @cute.jit
    def softmax(
        self, rows: Rows, item: Item, channel: Int32, group: Int32, rSoftmax: cute.Tensor, storage: cutlass.Constexpr
    ):
        """Compute the softmax over the item's rows, where `ends` says so.

        ``group`` is the team's number.
        """
        rank, quad = cute.arch.block_idx()[0], channel // CHANNELS
        rHeld = [cute.make_rmem_tensor((CHANNELS, 3), Float32) for _ in range(self.groups_of_team.bit_length() - 1)]
        for own in cutlass.range(self.groups_of_team, unroll=1):
            self.pool_group(self.group_of(rank, group, own), *self.stage_of(group, own), quad, rSoftmax, storage)
            for level in cutlass.range_constexpr(len(rHeld)):  # like bits of a counter: held, or carried
                below = (1 << level) - 1
                if own & (2 * below + 1) == below:
                    rHeld[level].store(rSoftmax.load())
                elif own & below == below:
                    self.add(rSoftmax, rHeld[level])
        if cutlass.const_expr(self.teams > 1):
            if group > 0:
                for i in cutlass.range_constexpr(3):
                    cute.autovec_copy(rSoftmax[None, i], storage.softmaxes[None, quad, i, group - 1])
            cute.arch.barrier(barrier_id=TEAMS, number_of_threads=self.team)
            if group == 0:
                others = (storage.softmaxes[None, quad, None, i] for i in range(self.teams - 1))
                self.add_softmaxes(rSoftmax, [None, *others])
        if cutlass.const_expr(self.slices > 1):
            cute.arch.cluster_wait()
            first = self.teams - 1
            if group == 0:
                if rank > 0:
                    for i in cutlass.range_constexpr(3):
                        place = storage.softmaxes[None, quad, i, first + rank - 1].iterator
                        self.send(place, storage.sent, [rSoftmax[c, i] for c in range(CHANNELS)])
                else:
                    if quad == 0:  # some may be here already
                        size = 3 * self.dim * FLOAT_BYTES
                        cute.arch.mbarrier_arrive_and_expect_tx(storage.sent, (self.slices - 1) * size)
                    cute.arch.mbarrier_wait(storage.sent, 0)
                    others = (storage.softmaxes[None, quad, None, first + i] for i in range(self.slices - 1))
                    self.add_softmaxes(rSoftmax, [None, *others])

    def ends(self, group: Int32) -> Boolean:
        """Return whether this is the first team of the first CTA."""
        return (group == 0) & (cute.arch.block_idx()[0] == 0)

    def send(self, place: cute.Pointer, barrier: cute.Pointer, values: list) -> None:
        """Send 4 floats to the first CTA of the cluster, whose barrier counts them."""
        text = "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [{$r0}], {{$r2}, {$r3}, {$r4}, {$r5}}, "
        to = [cute.arch.map_dsmem_ptr(x, 0).toint() for x in (place, barrier)]
        cute.arch.inline_ptx(text + "[{$r1}];", read_only_args=[*to, *values])

    @cute.jit
    def pool_group(
        self, group: Int32, stage: Int32, phase: Int32, quad: Int32, rSoftmax: cute.Tensor, storage: cutlass.Constexpr
    ):
        """Pool a group once its rows are there.

        The newest row is the last one of the last group.
        """
        rK = cute.make_rmem_tensor((CHANNELS, self.depth), Float32)
        rZ = cute.make_rmem_tensor((CHANNELS, self.depth), Float32)
        rNew, last = storage.new, self.depth - 1
        cute.arch.mbarrier_wait(storage.full + stage, phase & 1)
        for j in cutlass.range_constexpr(last):
            self.take_row(storage.rows[None, j, None, stage], quad, rK[None, j], rZ[None, j])
        if group < self.split - 1:
            self.take_row(storage.rows[None, last, None, stage], quad, rK[None, last], rZ[None, last])
        else:
            for c in cutlass.range_constexpr(CHANNELS):
                rK[c, last], rZ[c, last] = rNew[c, 0, 0], rNew[c, 1, 0] + rNew[c, 2, 0]
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(storage.empty + stage)
        self.pool(rK, rZ, rSoftmax)

    @cute.jit
    def take_row(self, sRow: cute.Tensor, quad: Int32, rK: cute.Tensor, rZ: cute.Tensor):
        """Read this thread's channels of a row of k and z."""
        cute.autovec_copy(cute.local_tile(sRow[None, 0], (CHANNELS,), (quad,)), rK)
        cute.autovec_copy(cute.local_tile(sRow[None, 1], (CHANNELS,), (quad,)), rZ)

    @cute.jit
    def sum_of_squares(self, values: list, storage: cutlass.Constexpr) -> Float32:
        """Sum the squares of the entry, in its finishers. First of 64 channels, then these in order."""
        tidx, _, _ = cute.arch.thread_idx()
        lanes, pieces = PIECE // CHANNELS, self.dim // PIECE
        total = Float32(0.0)
        for c in cutlass.range_constexpr(CHANNELS):
            total = cute.math.fma(values[c], values[c], total)
        for step in cutlass.range_constexpr(lanes.bit_length() - 1):
            total += cute.arch.shuffle_sync_bfly(total, 1 << step)
        sSums = storage.sums.get_tensor(cute.make_layout(pieces))
        if tidx % lanes == 0:
            sSums[tidx // lanes] = total
        cute.arch.barrier(barrier_id=ENDS, number_of_threads=self.quads)
        return self.add_up(sSums, pieces)
