"""Compress windows of tokens to entries in pages, in one launch.

The rows that the next call needs are kept.

    z(t)  = gate(t) + ape[t mod rate]
    e_w   = sum_t softmax_t(z(t)) kv(t)         per channel, over the rows that entry w pools
    entry = packed(hadamard(rope(norm * e_w / sqrt(mean(e_w^2) + eps), position w rate)))

HCA pools the ``rate`` rows of window w. CSA and its indexer pool 2 ``rate``: window w - 1 through the first half of its
columns, window w through the second; before position 0 the gate is -inf and the value 0. All fp32, but for entries of
a quantised format: these are rounded to bf16 wherever the released code stores them (e_w, after the norm, after RoPE,
after the rotation), then quantised with the bits of `formats.kv_entry` and `.indexer_key`. Dense rows are rounded once.

**Rows** come from this call (kv, gate) from its start on and from the request's state before: a ring of ``rows`` rows
of (k, z), row of position p at p mod rows, z with its bias. The newest ``pooled`` rows go there. A byte of the
ring is read by one thread at most, and that one writes it, after the read: no second launch, no copy, no wait.

`running`: the state is the softmax of the open window so far, (row_max, row_sum, weighted sum) by channel [3, dim],
6 KiB instead of 512 for HCA: a decode step reads and writes that and never again the rows. It is read by the first item
of a request, which also pools the rows after the last closed window and writes it.

**Work.** An item is an entry; request b has the items from (its first row) / rate + b on, as many as it can ever need,
so the grid follows from shapes alone. A warp finds its item's request by a ballot over a lane a request. The first item
of a request updates its state, but for the half that a second item reads (CSA: the window that was open is the one
before of the second).

**Threads.** A thread has 4 channels (16 bytes) of up to 8 rows, all their loads in flight before the first is used.

    CSA      128 threads an entry, no sharing of rows: every byte of kv and gate is read by one thread
    HCA      `slices` CTAs (a cluster) x (quads x `split`) threads: partial softmaxes (row_max, row_sum, weighted sum)
             are merged in a warp, then in shared memory; of the cluster only the sum of squares, by ``st.async``: a
             barrier of the cluster waits for all of a CTA's accesses to memory
    indexer  a warp an entry, 4 a CTA; the rotation by butterflies

    SMEM     HCA: warps x quads x 12 fp32 partials (6 KiB with 8 x 16); sums of squares

**Limits.** Bytes: an entry reads 32 KiB (CSA), 512 KiB (HCA) or 8 KiB (indexer). A decode step is a request's row,
then all loads at once, then shuffles: two latencies of memory. On an H200 a prefill of CSA reaches about half of the
memory's rate. Rows of 512 channels are evicted from L2 first, but for a decode step. What was measured on the way:
data/bench/compressor.md.

Source: DSV4 paper, CSA and HCA; released inference code; the oracle is `dsv4lib.reference.compressor`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, memory

from dsv4lib.dsl import hadamard
from dsv4lib.dsl.requests import fetch_request, find_request
from dsv4lib.dsl.tensors import Divisor
from dsv4lib.ops.compressor.access import MINUS_INF, ZERO, evict_first, load4, store4
from dsv4lib.ops.compressor.config import CHANNELS, LANES, ROPE, Sizes
from dsv4lib.ops.compressor.pack import Pages, pack, rounded

LOG2E = 1.4426950408889634
FLOAT_BYTES = 4


class Rows(NamedTuple):
    """Hold kv, gate [T, width], state k, z [S, rows, width], ape; fp32.

    ape is [rate, width].

    Running: k is the state [S, 3, dim], z is None.
    """

    kv: cute.Tensor
    gate: cute.Tensor
    k: cute.Tensor
    z: Any
    ape: cute.Tensor


class Ends(NamedTuple):
    """Hold norm, angles (fp32), requests int32 [B, 4] and slots int32 [T].

    norm [dim], cos and sin [windows, 32].
    """

    norm: cute.Tensor
    cos: cute.Tensor
    sin: cute.Tensor
    requests: cute.Tensor
    slots: cute.Tensor


class Item(NamedTuple):
    """Describe an entry to make.

    Attributes:
        row, count, start, place: as of `requests.Request`. window: its number. first: the request's first item.
    """

    row: Int32
    count: Int32
    start: Int32
    place: Int32
    window: Int32
    first: Boolean


class Factors(NamedTuple):
    """Registers that end an entry: norm and angles of this thread's channels."""

    norm: cute.Tensor
    cos: cute.Tensor
    sin: cute.Tensor


class Compressor(Sizes):
    """Compress; see the module docstring and `config.Sizes` for the arguments."""

    @cute.jit
    def __call__(
        self, rows: Rows, ends: Ends, out: Pages, page: Divisor, eps: Float32, items: Int32, stream: cuda.CUstream
    ):
        """Launch.

        Args:
            rows, ends, out: see there.
            page: entries of a page.
            eps: added to the mean of squares.
            items: B if single, else T / rate + B.
            stream: where the launch is queued.
        """

        @cute.struct
        class Storage:
            softmaxes: cute.struct.Align[
                cute.struct.MemRange[Float32, 3 * CHANNELS * self.quads * self.warps if self.split > 1 else 4], 16
            ]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, max(self.slices, self.warps)], 16]
            sent: cute.struct.MemRange[Int64, 1]

        self.storage = Storage
        self.kernel(rows, ends, out, page, eps).launch(
            grid=(self.slices, cute.ceil_div(items, self.items), 1),
            block=(self.threads, 1, 1),
            cluster=(self.slices, 1, 1) if self.slices > 1 else None,
            stream=stream,
            use_pdl=True,
            # Two CTAs an SM, with as many registers as that leaves: with fewer, loads wait for others.
            min_blocks_per_mp=2 if self.slices > 1 else 0,
            preferred_smem_carveout=20 if self.slices > 1 else None,
        )

    @cute.kernel
    def kernel(self, rows: Rows, ends: Ends, out: Pages, page: Divisor, eps: Float32):
        """Find the item, pool and store its entry, update the state."""
        rank, cta, _ = cute.arch.block_idx()
        tidx, _, _ = cute.arch.thread_idx()
        storage = memory.SmemAllocator().allocate(self.storage)
        quad = tidx % self.quads  # of this CTA
        group = tidx % self.team // self.quads
        channel = (rank * self.quads + quad) * CHANNELS
        rNorm = cute.make_rmem_tensor(CHANNELS, Float32)
        cute.autovec_copy(cute.local_tile(ends.norm, (CHANNELS,), (channel // CHANNELS,)), rNorm)
        if cutlass.const_expr(self.slices > 1):
            if tidx == 0:
                cute.arch.mbarrier_init(storage.sent.data_ptr(), 1)
                cute.arch.mbarrier_init_fence()
            cute.arch.sync_warp()
            cute.arch.cluster_arrive_relaxed()  # this CTA's shared memory is there
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()  # after the wait: this kernel ends after the one before
        item = self.find(ends.requests, cta * self.items + tidx // self.team)
        end = item.start + item.count
        closes = item.count > 0 and (item.window + 1) * self.rate <= end
        rNew = cute.make_rmem_tensor((CHANNELS, 3, 1 + self.overlap), Float32)
        if cutlass.const_expr(self.single and not self.running):
            self.fetch_newest(rows, item, channel, self.holds(item, group), rNew)
        if closes:
            self.compress(rows, ends, out, page, eps, item, channel, group, rNorm, storage)
        elif cutlass.const_expr(self.slices > 1):
            cute.arch.cluster_wait()
        if cutlass.const_expr(self.running):
            if item.first and item.count > 0 and end % self.rate != 0:
                self.keep(rows, item, channel, group, storage)
        elif cutlass.const_expr(self.single):
            self.store_newest(rows, item, channel, self.holds(item, group), rNew)
        else:
            self.update(rows, item, channel, group, closes)

    # ------------------------------------------------------------------ work

    @cute.jit
    def find(self, requests: cute.Tensor, number: Int32) -> Item:
        """Return the item of this number; no rows where there is none."""
        if cutlass.const_expr(self.single):
            row, count, start, place = fetch_request(requests, number)
            base = number
        else:
            row, count, start, place, base = find_request(requests, number, self.rate, 1)
        if (start < 0) | (place < 0):
            count = Int32(0)
            start = Int32(0)
        return Item(row, count, start, place, start // self.rate + number - base, number == base)

    # ------------------------------------------------------------------ rows

    def half_of(self, j: int) -> int:
        """Return which half of the columns row ``j`` is pooled through. The window before goes through the first."""
        return int(self.overlap and j >= self.rate)

    def exists(self, position: Int32) -> Boolean:
        """Return whether there is a row to pool."""
        return position >= 0

    def table_row(self, item: Item) -> Int32:
        """Return the row of cos and sin, a window apart. An entry rotates by its window's first position."""
        return item.window

    @cute.jit
    def place_of(self, tensor: cute.Tensor, row: Int32, column: Int32) -> Int64:
        """Return the address of a column of a row of kv, gate or ape."""
        return tensor.iterator.toint() + (Int64(row) * tensor.stride[0] + column) * FLOAT_BYTES

    @cute.jit
    def slot_of(self, tensor: cute.Tensor, item: Item, slot: Int32, column: Int32) -> Int64:
        """Return the address of a column of a row of the request's state."""
        offset = Int64(item.place) * tensor.stride[0] + Int64(slot) * tensor.stride[1] + column
        return tensor.iterator.toint() + offset * FLOAT_BYTES

    @cute.jit
    def fetch(self, rows: Rows, item: Item, channel: Int32, group: Int32, rK: cute.Tensor, rZ: cute.Tensor):
        """Load the rows that this thread pools, from this call or the state."""
        rApe = cute.make_rmem_tensor((CHANNELS, self.depth), Float32)
        first, end = (item.window + 1) * self.rate - self.pooled + group * self.depth, item.start + item.count
        if cutlass.const_expr(self.fetched == 1):
            first = item.start
        row, policy = item.row + first - item.start, self.policy()
        new_k, new_z = (self.neighbours(x, self.place_of(x, row, channel)) for x in (rows.kv, rows.gate))
        biases = self.neighbours(rows.ape, self.place_of(rows.ape, first & (self.rate - 1), channel))
        olds = self.olds(rows, item, first, channel)
        for j in cutlass.range_constexpr(self.depth):
            bytes, position = self.half_of(j) * self.dim * FLOAT_BYTES, first + j
            new, there = position >= item.start, self.exists(position)
            k, z = new_k[j], new_z[j]
            if cutlass.const_expr(self.running):
                there = new & (position < end)
            else:
                k, z = (Int64(cutlass.select_(new, x, old)) for x, old in zip((k, z), olds[j], strict=True))
            rZ[0, j], rZ[1, j], rZ[2, j], rZ[3, j] = load4(z + bytes, there, MINUS_INF, policy)
            rK[0, j], rK[1, j], rK[2, j], rK[3, j] = load4(k + bytes, there, ZERO, policy)
            bias = biases[j % self.rate] + bytes
            rApe[0, j], rApe[1, j], rApe[2, j], rApe[3, j] = load4(bias, there & new, ZERO)
        rZ.store(rZ.load() + rApe.load())

    def policy(self) -> Int64 | None:
        """Make the L2 policy of rows that are read once."""
        return evict_first() if self.once else None

    def neighbours(self, tensor: cute.Tensor, address: Int64) -> list:
        """Return addresses of as many rows of kv, gate, ape or one state as a thread has. Products are made once."""
        step = Int64(tensor.stride[cute.rank(tensor) - 2]) * FLOAT_BYTES
        return [address + step * j for j in range(self.depth)]

    def olds(self, rows: Rows, item: Item, first: Int32, channel: Int32) -> list:
        """Return addresses of (k, z) of a thread's rows in the ring, where neighbours."""
        found = []
        for j in range(0, 0 if self.running else self.depth, self.rate):
            slot = first + j & (self.rows - 1)
            both = [self.neighbours(x, self.slot_of(x, item, slot, channel)) for x in (rows.k, rows.z)]
            found += list(zip(*both, strict=True))[: self.rate]
        return found

    @cute.jit
    def pool(self, rK: cute.Tensor, rZ: cute.Tensor, rSoftmax: cute.Tensor):
        """Pool this thread's rows to (row_max, row_sum, weighted sum) by channel."""
        for c in cutlass.range_constexpr(CHANNELS):
            row_max = rZ[c, 0]
            for j in cutlass.range_constexpr(1, self.depth):
                row_max = cute.arch.fmax(row_max, rZ[c, j], nan=True)
            base = self.finite(row_max)
            row_sum, acc = Float32(0.0), Float32(0.0)
            for j in cutlass.range_constexpr(self.depth):
                # p = exp(z - row_max), row_sum += p, acc += p * k
                p = cute.math.exp2((rZ[c, j] - base) * LOG2E, fastmath=True)
                row_sum += p
                acc = cute.math.fma(p, rK[c, j], acc)
            rSoftmax[c, 0], rSoftmax[c, 1], rSoftmax[c, 2] = row_max, row_sum, acc

    @cute.jit
    def finite(self, row_max: Float32) -> Float32:
        """Return what to subtract from gates whose maximum is ``row_max``. It is 0 where there are none."""
        return Float32(cutlass.select_(row_max == -Float32.inf, Float32(0.0), row_max))

    @cute.jit
    def merge(self, rSoftmax: cute.Tensor, c: cutlass.Constexpr, row_max: Float32, row_sum: Float32, acc: Float32):
        """Merge another softmax of channel ``c``. The one with the smaller row_max is rescaled, by an explicit FMA.

        Left to the compiler, which of two products it fuses differs from kernel to kernel, and so do the bits.
        """
        ahead, most = rSoftmax[c, 0] >= row_max, cute.arch.fmax(rSoftmax[c, 0], row_max, nan=True)
        least = Float32(cutlass.select_(ahead, row_max, rSoftmax[c, 0]))
        acc_scale = cute.math.exp2((least - self.finite(most)) * LOG2E, fastmath=True)
        rSoftmax[c, 0] = most
        for i, other in ((1, row_sum), (2, acc)):
            kept = Float32(cutlass.select_(ahead, rSoftmax[c, i], other))
            rSoftmax[c, i] = cute.math.fma(Float32(cutlass.select_(ahead, other, rSoftmax[c, i])), acc_scale, kept)

    @cute.jit
    def gather(self, rSoftmax: cute.Tensor, quad: Int32, storage: cutlass.Constexpr):
        """Merge the softmaxes of all threads of a channel, in the first warp."""
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        for step in cutlass.range_constexpr((LANES // self.quads).bit_length() - 1):
            self.add_lanes(rSoftmax, self.quads << step)
        sSoftmax = storage.softmaxes.get_tensor(
            cute.make_layout((CHANNELS, 3, self.quads, self.warps), stride=(1, 4 * self.quads, 4, 12 * self.quads))
        )
        if lane < self.quads and warp > 0:
            for i in cutlass.range_constexpr(3):
                cute.autovec_copy(rSoftmax[None, i], sSoftmax[None, i, quad, warp])
        self.sync()
        if warp == 0:
            self.add_warps(rSoftmax, quad, sSoftmax)

    def sync(self) -> None:
        """Wait until all warps have stored their softmaxes."""
        cute.arch.barrier()

    @cute.jit
    def add_warps(self, rSoftmax: cute.Tensor, quad: Int32, sSoftmax: cute.Tensor):
        """Merge the warps' softmaxes; lanes that repeat others take half of them."""
        halves = 2 if self.quads == LANES // 2 and self.warps > 1 else 1
        each, half = self.warps // halves, cute.arch.lane_idx() // self.quads
        if cutlass.const_expr(halves > 1):
            if half == 1:
                for i in cutlass.range_constexpr(3):
                    cute.autovec_copy(sSoftmax[None, i, quad, each], rSoftmax[None, i])
            self.add_softmaxes(rSoftmax, [sSoftmax[None, None, quad, half * each + w] for w in range(each)])
            self.add_lanes(rSoftmax, self.quads)
        else:
            self.add_softmaxes(rSoftmax, [sSoftmax[None, None, quad, w] for w in range(each)])

    @cute.jit
    def add_lanes(self, rSoftmax: cute.Tensor, step: cutlass.Constexpr):
        """Merge the softmax of the lane that is ``step`` away."""
        other = [cute.arch.shuffle_sync_bfly(rSoftmax[i], step) for i in range(3 * CHANNELS)]
        for c in cutlass.range_constexpr(CHANNELS):
            self.merge(rSoftmax, c, other[c], other[CHANNELS + c], other[2 * CHANNELS + c])

    @cute.jit
    def add_softmaxes(self, rSoftmax: cute.Tensor, softmaxes: cutlass.Constexpr):
        """Merge softmaxes, a power of two, into this thread's own, the first.

        Neighbours first, then neighbours of these.

        The others are in shared memory, [4, 3].
        """
        if cutlass.const_expr(len(softmaxes) > 1):
            half = len(softmaxes) // 2
            rOther = cute.make_rmem_tensor((CHANNELS, 3), Float32)
            self.add_softmaxes(rSoftmax, softmaxes[:half])
            for i in cutlass.range_constexpr(3):
                cute.autovec_copy(softmaxes[half][None, i], rOther[None, i])
            self.add_softmaxes(rOther, softmaxes[half:])
            self.add(rSoftmax, rOther)

    @cute.jit
    def add(self, rSoftmax: cute.Tensor, rOther: cute.Tensor):
        """Merge one softmax into another."""
        for c in cutlass.range_constexpr(CHANNELS):
            self.merge(rSoftmax, c, rOther[c, 0], rOther[c, 1], rOther[c, 2])

    @cute.jit
    def softmax(
        self, rows: Rows, item: Item, channel: Int32, group: Int32, rSoftmax: cute.Tensor, storage: cutlass.Constexpr
    ):
        """Compute the softmax over the item's rows and a running state of its window.

        Its finishers hold the state.
        """
        rK = cute.make_rmem_tensor((CHANNELS, self.depth), Float32)
        rZ = cute.make_rmem_tensor((CHANNELS, self.depth), Float32)
        rOld = cute.make_rmem_tensor((CHANNELS, 3), Float32)
        if cutlass.const_expr(self.running):
            old = item.window * self.rate < item.start
            for i in cutlass.range_constexpr(3):
                at, default = self.slot_of(rows.k, item, Int32(i), channel), ZERO if i else MINUS_INF
                rOld[0, i], rOld[1, i], rOld[2, i], rOld[3, i] = load4(at, old, default)
        self.fetch(rows, item, channel, group, rK, rZ)
        self.pool(rK, rZ, rSoftmax)
        if cutlass.const_expr(self.split > 1):
            self.gather(rSoftmax, channel // CHANNELS % self.quads, storage)
        if cutlass.const_expr(self.running):
            if item.window * self.rate < item.start:
                for c in cutlass.range_constexpr(CHANNELS):
                    self.merge(rSoftmax, c, rOld[c, 0], rOld[c, 1], rOld[c, 2])

    # ----------------------------------------------------------------- entry

    @cute.jit
    def compress(
        self,
        rows: Rows,
        ends: Ends,
        out: Pages,
        page: Divisor,
        eps: Float32,
        item: Item,
        channel: Int32,
        group: Int32,
        rNorm: cute.Tensor,
        storage: cutlass.Constexpr,
    ):
        """Make the item's entry."""
        tidx, _, _ = cute.arch.thread_idx()
        position = item.window * self.rate
        slot = ends.slots[item.row + position + self.rate - 1 - item.start]
        rCos, rSin = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        rCos.fill(1.0)
        rSin.fill(0.0)
        rotated = channel - (self.dim - ROPE)
        if rotated >= 0:
            for table, rTable in ((ends.cos, rCos), (ends.sin, rSin)):
                cute.autovec_copy(
                    cute.local_tile(table[self.table_row(item), None], (2,), (rotated // CHANNELS,)), rTable
                )
        rSoftmax = cute.make_rmem_tensor((CHANNELS, 3), Float32)
        self.softmax(rows, item, channel, group, rSoftmax, storage)
        if self.ends(group):
            self.end(out, page, eps, slot, channel, rSoftmax, Factors(rNorm, rCos, rSin), storage)

    def ends(self, group: Int32) -> bool:
        """Return whether this thread goes on when the softmax is done."""
        return True

    @cute.jit
    def end(
        self,
        out: Pages,
        page: Divisor,
        eps: Float32,
        slot: Int32,
        channel: Int32,
        rSoftmax: cute.Tensor,
        factors: Factors,
        storage: cutlass.Constexpr,
    ):
        """Norm, rotate and store an entry whose softmax is ``rSoftmax``."""
        tidx, _, _ = cute.arch.thread_idx()
        rNorm, rCos, rSin = factors
        values = rounded(self, [rSoftmax[c, 2] * cute.arch.rcp_approx(rSoftmax[c, 1]) for c in range(CHANNELS)])
        scale = cute.math.rsqrt(self.sum_of_squares(values, storage) * (1.0 / self.dim) + eps, fastmath=True)
        values = rounded(self, [values[c] * scale * rNorm[c] for c in range(CHANNELS)])
        values = [
            values[c] * rCos[c // 2] - values[c + 1] * rSin[c // 2]
            if c % 2 == 0
            else values[c - 1] * rSin[c // 2] + values[c] * rCos[c // 2]
            for c in range(CHANNELS)
        ]
        values = rounded(self, values)
        if tidx % self.team < self.finishers:
            if cutlass.const_expr(self.rotate):
                values = rounded(self, hadamard.rotate(values, cute.arch.lane_idx(), self.dim))
            entries = out.words.shape[0] * (1 if self.layout is None else page.number)
            kept = slot >= 0 and slot < entries and tidx % self.team < self.quads
            pack(self, out, page, slot, kept, channel, values)

    @cute.jit
    def sum_of_squares(self, values: list, storage: cutlass.Constexpr) -> Float32:
        """Sum the squares of the entry, in its finishers."""
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        rank = cute.arch.block_idx()[0]
        total = Float32(0.0)
        for c in cutlass.range_constexpr(CHANNELS):
            total = cute.math.fma(values[c], values[c], total)
        for step in cutlass.range_constexpr(min(LANES, self.quads).bit_length() - 1):
            total += cute.arch.shuffle_sync_bfly(total, 1 << step)
        if cutlass.const_expr(self.slices > 1):
            sSums = storage.sums.get_tensor(cute.make_layout(self.slices))
            cute.arch.cluster_wait()
            if warp == 0:
                sent = storage.sent.data_ptr()
                if lane == 0:  # some may be here already
                    cute.arch.mbarrier_arrive_and_expect_tx(sent, self.slices * FLOAT_BYTES)
                if lane < self.slices:
                    to = [cute.arch.map_dsmem_ptr(x, lane).toint() for x in (sSums.iterator + rank, sent)]
                    text = "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [{$r0}], {$r2}, [{$r1}];"
                    cute.arch.inline_ptx(text, read_only_args=[*to, total])
                cute.arch.mbarrier_wait(sent, 0)
                total = self.add_up(sSums, self.slices)
        elif cutlass.const_expr(self.quads > LANES):
            sSums = storage.sums.get_tensor(cute.make_layout(self.warps))
            if lane == 0:
                sSums[warp] = total
            cute.arch.barrier()
            total = self.add_up(sSums, self.warps)
        return total

    @cute.jit
    def add_up(self, sSums: cute.Tensor, count: cutlass.Constexpr) -> Float32:
        """Sum the first ``count``, in order."""
        total = Float32(0.0)
        for i in cutlass.range_constexpr(count):
            total += sSums[Int32(i)]
        return total

    # ----------------------------------------------------------------- state

    @cute.jit
    def keep(self, rows: Rows, item: Item, channel: Int32, group: Int32, storage: cutlass.Constexpr):
        """Store the softmax of the window that stays open into the running state."""
        tidx, _, _ = cute.arch.thread_idx()
        last = Item(item.row, item.count, item.start, item.place, (item.start + item.count) // self.rate, item.first)
        rSoftmax = cute.make_rmem_tensor((CHANNELS, 3), Float32)
        if cutlass.const_expr(self.split > 1):
            cute.arch.barrier()  # the softmaxes of an entry have been read
        self.softmax(rows, last, channel, group, rSoftmax, storage)
        for i in cutlass.range_constexpr(3):
            values = [rSoftmax[c, i] for c in range(CHANNELS)]
            store4(self.slot_of(rows.k, item, Int32(i), channel), tidx < self.quads, values)

    @cute.jit
    def holds(self, item: Item, group: Int32) -> Boolean:
        """Return whether the one row of a request is this thread's. As the state's row, it is that of its group."""
        return item.count > 0 and (item.start & (self.pooled - 1)) // self.depth == group

    @cute.jit
    def fetch_newest(self, rows: Rows, item: Item, channel: Int32, mine: Boolean, rNew: cute.Tensor):
        """Load the one row of a request: kv, gate and bias of both halves."""
        for half in cutlass.range_constexpr(1 + self.overlap):
            column = channel + half * self.dim
            for i, (tensor, row) in enumerate(
                ((rows.kv, item.row), (rows.gate, item.row), (rows.ape, item.start & (self.rate - 1)))
            ):
                found = load4(self.place_of(tensor, row, column), mine, ZERO)
                for c in cutlass.range_constexpr(CHANNELS):
                    rNew[c, i, half] = found[c]

    @cute.jit
    def store_newest(self, rows: Rows, item: Item, channel: Int32, mine: Boolean, rNew: cute.Tensor):
        """Store the one row of a request into the state."""
        slot = item.start & (self.rows - 1)
        for half in cutlass.range_constexpr(1 + self.overlap):
            column = channel + half * self.dim
            k = [rNew[c, 0, half] for c in range(CHANNELS)]
            z = [rNew[c, 1, half] + rNew[c, 2, half] for c in range(CHANNELS)]
            store4(self.slot_of(rows.k, item, slot, column), mine, k)
            store4(self.slot_of(rows.z, item, slot, column), mine, z)

    @cute.jit
    def update(self, rows: Rows, item: Item, channel: Int32, group: Int32, closes: Boolean):
        """Store the newest rows into the state, by the items that read it.

        See the module docstring.
        """
        opened = item.start // self.rate
        second = closes and item.window == opened + 1
        if item.count > 0 and (item.first or (second if cutlass.const_expr(self.overlap) else item.first)):
            for half in cutlass.range_constexpr(1 + self.overlap):
                self.update_half(rows, item, channel, group, half, opened)

    @cute.jit
    def update_half(self, rows: Rows, item: Item, channel: Int32, group: Int32, half: cutlass.Constexpr, opened: Int32):
        """Update one half of the columns."""
        column, end = channel + half * self.dim, item.start + item.count
        rK = cute.make_rmem_tensor((CHANNELS, self.depth), Float32)
        rZ = cute.make_rmem_tensor((CHANNELS, self.depth), Float32)
        rApe = cute.make_rmem_tensor((CHANNELS, self.depth), Float32)
        mine = [Boolean(False)] * self.depth
        for j in cutlass.range_constexpr(self.depth):
            slot = group * self.depth + j
            newest = end - 1 - (end - 1 - slot & (self.pooled - 1))
            wanted = newest >= item.start
            if cutlass.const_expr(self.overlap):
                # What the second item reads: the first half of the window that was open.
                shared = (half == 0) & ((j // self.rate) == (opened & 1)) & ((opened + 2) * self.rate <= end)
                wanted = wanted & (item.first != shared)
            mine[j] = wanted
            row = item.row + newest - item.start
            rK[0, j], rK[1, j], rK[2, j], rK[3, j] = load4(self.place_of(rows.kv, row, column), wanted, ZERO)
            rZ[0, j], rZ[1, j], rZ[2, j], rZ[3, j] = load4(self.place_of(rows.gate, row, column), wanted, ZERO)
            bias = self.place_of(rows.ape, slot & (self.rate - 1), column)
            rApe[0, j], rApe[1, j], rApe[2, j], rApe[3, j] = load4(bias, wanted, ZERO)
        rZ.store(rZ.load() + rApe.load())
        for j in cutlass.range_constexpr(self.depth):
            slot = group * self.depth + j
            if cutlass.const_expr(self.rows > self.pooled):
                slot = end - 1 - (end - 1 - slot & (self.pooled - 1)) & (self.rows - 1)
            k, z = [rK[c, j] for c in range(CHANNELS)], [rZ[c, j] for c in range(CHANNELS)]
            store4(self.slot_of(rows.k, item, slot, column), mine[j], k)
            store4(self.slot_of(rows.z, item, slot, column), mine[j], z)
