"""Inject one fault of attention kernels at a time, each marked ``WRONG``.

Every class is the `Ladder`, the `Fmha` or the `Combine` kernel with one thing replaced. They compile without a word.
`CAUGHT_BY` says what finds each: a kind of the emulator's reports, "MemoryFault" (an access that stops it), "boxes
never loaded", "bytes never read" and "element moved" (a trace), "pad rows leaked" (guard rows), "ahead of the wait"
(the compiled code) or "wrong numbers" (the comparison). Those of `REFUSED` do not compile; it says in which words.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Uint32, pipeline
from cutlass.cute.nvgpu import tcgen05

from dsv4lib.dsl import tmem, umma
from dsv4lib.dsl.rope import Tables
from dsv4lib.ops.fmha.combine import Combine
from dsv4lib.ops.fmha.dequant import LanePools, Registers
from dsv4lib.ops.fmha.ladder import CHUNK, CHUNK_BYTES, LOG2_E, O_COLUMN, TILE_N, Ladder
from dsv4lib.ops.fmha.load import KeySources
from dsv4lib.ops.fmha.sm100 import Fmha
from dsv4lib.ops.fmha.work import KeyList, KeyLists, Outputs, Row, Span, Work


class PinnedTile(Ladder):
    """Every KV tile is tile 0: right with one tile, plausible with more."""

    def kv_box(self, tKgK: cute.Tensor, tile: Int32, chunk: int) -> cute.Tensor:
        """See `Ladder.kv_box`."""
        return tKgK[None, 0, chunk]  # WRONG: the mode of the tiles is pinned


class HalfProduct(Ladder):
    """The product stops after the first 64 dimensions: right at head dimension 64."""

    @cute.jit
    def mma_qk(self, d: Int32, sQ: Int32, stage: Int32):
        """See `Ladder.mma_qk`."""
        with cute.arch.elect_one():
            for chunk in cutlass.range_constexpr(1):  # WRONG: one chunk instead of all of head_dim
                for k in cutlass.range_constexpr(CHUNK // 16):
                    offset = chunk * CHUNK_BYTES + k * 32
                    a, b = umma.at(self.k_descriptor, sQ + offset), umma.at(self.k_descriptor, stage + offset)
                    umma.mma(d, a, b, self.qk_instruction, chunk + k > 0)


class HastyProduct(Ladder):
    """The tensor core multiplies Q before it has arrived in shared memory."""

    def wait_for_q(self, q: pipeline.PipelineTmaUmma) -> None:
        """See `Ladder.wait_for_q`."""
        # WRONG: nothing


class ShiftedWeights(Ladder):
    """The second MMA looks for P where the softmax warps did not put it."""

    @cute.jit
    def mma_pv(self, base: Int32, slot: Int32, stage: Int32, accumulate: cutlass.Boolean):
        """See `Ladder.mma_pv`."""
        with cute.arch.elect_one():
            for k in cutlass.range_constexpr(TILE_N // 16):
                b = umma.at(self.v_descriptor, stage + k * (16 * 128))
                add = accumulate if k == 0 else cutlass.Boolean(True)
                a = base + 448 + k * 8  # WRONG: P is in the columns of S
                umma.mma(base + O_COLUMN, a, b, self.pv_instruction, add)


class FirstAccumulates(Ladder):
    """The first P V adds to what tensor memory held."""

    @cute.jit
    def mma_pv(self, base: Int32, slot: Int32, stage: Int32, accumulate: cutlass.Boolean):
        """See `Ladder.mma_pv`."""
        with cute.arch.elect_one():
            for k in cutlass.range_constexpr(TILE_N // 16):
                b = umma.at(self.v_descriptor, stage + k * (16 * 128))
                umma.mma(base + O_COLUMN, base + slot + k * 8, b, self.pv_instruction, True)  # WRONG: on tile 0


class TransposedV(Ladder):
    """V is read with the rows of kv as N: a square tile hides it, nothing faults."""

    @cute.jit
    def mma_pv(self, base: Int32, slot: Int32, stage: Int32, accumulate: cutlass.Boolean):
        """See `Ladder.mma_pv`."""
        instruction = umma.instruction_descriptor(128, self.head_dim, self.dtype)  # WRONG: B is MN-major
        with cute.arch.elect_one():
            for k in cutlass.range_constexpr(TILE_N // 16):
                b = umma.at(self.k_descriptor, stage + (k % 4) * 32 + (k // 4 % self.chunks) * CHUNK_BYTES)
                add = accumulate if k == 0 else cutlass.Boolean(True)
                umma.mma(base + O_COLUMN, base + slot + k * 8, b, instruction, add)


class NoStoreWait(Ladder):
    """P is handed over before it has arrived in tensor memory."""

    @cute.jit
    def store_p(
        self, rS: cute.Tensor, address: cute.Pointer, column: Int32, lane: Int32, scale: Float32, row_max: Float32
    ):
        """See `Ladder.store_p`."""
        rP = cute.make_rmem_tensor((TILE_N // 2, 2), self.element)
        p = rS.load() * scale
        row_sum = Float32(0.0)
        if cutlass.const_expr(self.stage == "c"):
            p = cute.math.exp2(p - row_max, fastmath=True)
            row_sum = p.reduce(cute.ReductionOp.ADD, row_sum, 0)
        rP.store(p.reshape((TILE_N // 2, 2)).to(self.element))
        for i in cutlass.range_constexpr(2):
            tmem.store(address, column + 32 * i, lane, cute.recast_tensor(rP[None, i], Float32))
        return row_sum  # WRONG: no wait for the asynchronous stores


class OverlappingO(Ladder):
    """O begins at column 192, where S and P end, not where S of odd tiles ends."""

    @cute.jit
    def mma_pv(self, base: Int32, slot: Int32, stage: Int32, accumulate: cutlass.Boolean):
        """See `Ladder.mma_pv`."""
        Ladder.mma_pv(self, base - 64, slot + 64, stage, accumulate)  # WRONG: O at 192, over S of odd tiles

    @cute.jit
    def epilogue(
        self, mOut: cute.Tensor, mLse: Any, address: cute.Pointer, lane: Int32, row_max: Float32, row_sum: Float32
    ):
        """See `Ladder.epilogue`."""
        Ladder.epilogue(self, mOut, mLse, address + (-64), lane, row_max, row_sum)  # reads O where it is


class CrossedAtoms(Ladder):
    """O comes back by another map than it went: the threads and columns of a load and a store that do not match."""

    @cute.jit
    def rescale(self, address: cute.Pointer, lane: Int32, acc_scale: Float32):
        """See `Ladder.rescale`."""
        rO = cute.make_rmem_tensor(32, Float32)
        layout = cute.make_layout((128, 32), stride=(1 << 16, 1))
        for part in cutlass.range_constexpr(self.head_dim // 32):
            column = O_COLUMN + 32 * part
            tmem.load(address, column, lane, rO)
            cute.arch.fence_view_async_tmem_load()
            rO.store(rO.load() * acc_scale)
            cells = cute.make_tensor(address + column, layout)
            atom = cute.make_copy_atom(tcgen05.St16x64bOp(tcgen05.Repetition(16)), Float32)  # WRONG: St32x32bOp
            tiled = tcgen05.make_tmem_copy(atom, cells)
            thread = tiled.get_slice(lane)
            own = cute.make_tensor(rO.iterator, thread.partition_S(cute.make_identity_tensor(layout.shape)).shape)
            cute.copy(tiled, own, thread.partition_D(cells))
        cute.arch.fence_view_async_tmem_store()


class OneMaximum(Ladder):
    """One maximum for all rows of a warp: right while rows are of one scale, else small rows vanish."""

    @cute.jit
    def tile_row_max(self, rS: cute.Tensor, left: Int32, scale: Float32):
        """See `Ladder.tile_row_max`."""
        if left < TILE_N:
            for j in cutlass.range_constexpr(TILE_N):
                rS[j] = cutlass.select_(j < left, rS[j], -Float32.inf)
        tile_max = rS.load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
        tile_max = cute.arch.warp_reduction(tile_max, cute.arch.fmax)  # WRONG: over the rows of 32 threads
        return tile_max * (scale * LOG2_E)


class NoRescale(Ladder):
    """O keeps the scale of the first tile: right while row_max does not move."""

    @cute.jit
    def rescale(self, address: cute.Pointer, lane: Int32, acc_scale: Float32):
        """See `Ladder.rescale`."""
        # WRONG: nothing


class EarlyRescale(Ladder):
    """O is rescaled while the tensor core may still add the tile before to it."""

    @cute.jit
    def wait_for_o(self, p: pipeline.PipelineAsyncUmma, p_state: pipeline.PipelineState):
        """See `Ladder.wait_for_o`."""
        p.producer_acquire(p_state)  # WRONG: the slot of this tile, free one tile earlier
        umma.fence_after_thread_sync()


class BaseTwoLse(Ladder):
    """The log-sum-exp mixes logarithms: row_max is in log2, the sum is taken in ln."""

    @cute.jit
    def epilogue(
        self, mOut: cute.Tensor, mLse: Any, address: cute.Pointer, lane: Int32, row_max: Float32, row_sum: Float32
    ):
        """See `Ladder.epilogue`."""
        # WRONG: (row_max + log2 row_sum) ln 2 becomes row_max + ln row_sum
        Ladder.epilogue(self, mOut, mLse, address, lane, row_max, row_sum)
        block, _, _ = cute.arch.block_idx()
        if block * 128 + lane < mOut.shape[0]:
            mLse[block * 128 + lane] = row_max + cute.math.log2(row_sum) * math.log(2.0)


class SumOverMaximum(Fmha):
    """row_sum overwrites row_max while the partner may still be reading it.

    The same race was found in a published decode kernel: a slot for an exchange between warps is written again with no
    barrier after the read. It shows only under an unlucky order.
    """

    sum_slot = 0  # WRONG: 1


class SwappedHalves(Fmha):
    """Q's odd chunks lie in the lanes of K's even chunks, and the reverse."""

    def __init__(self, *settings: Any):
        super().__init__(*settings)
        self.q_order = tuple(self.q_order[i ^ 1] for i in range(self.chunks))  # WRONG: as it was


class NoHeadGuard(Fmha):
    """O is stored without a check that the head exists: pad rows go after it, the last token's past the end."""

    @cute.jit
    def store_lines(self, outputs: Outputs, row: Row, rOut: cute.Tensor, line: cutlass.Constexpr):
        """See `Fmha.store_lines`."""
        there = row._replace(inside=cutlass.Boolean(True))  # WRONG: row
        Fmha.store_lines(self, outputs, there, rOut, line)


class PadLse(Fmha):
    """The log-sum-exp is stored for one row too many: after the last head of every token."""

    @cute.jit
    def store_lse(self, mLse: cute.Tensor, row: Row, row_max: Float32, row_sum: Float32, with_sink: Float32):
        """See `Fmha.store_lse`."""
        there = row.head <= mLse.shape[1]  # WRONG: <, by one row
        Fmha.store_lse(self, mLse, row._replace(inside=there), row_max, row_sum, with_sink)


class SharedSelection(Fmha):
    """Two tokens go by the list of the first: right where neighbours select the same entries."""

    @cute.jit
    def rows(self, mIndex: Any, first: Int32, token: Int32, position: Int32, count: Int32):
        """See `Fmha.rows`."""
        return Fmha.rows(self, mIndex, first, token // 2 * 2, position, count)  # WRONG: token


class EveryKeyCounts(Fmha):
    """Places of a tile past the last key are not masked: TMA fills them with zeros, and a zero key has P = e^0."""

    @cute.jit
    def valid_keys(self, lists: KeyLists, work: Work, row: Row, tile: Int32):
        """See `Fmha.valid_keys`."""
        return Int32(-1)  # WRONG: a bit only where there is a key


class NoKeysNoLse(Fmha):
    """The log-sum-exp of a request without keys is not stored: what was there before stays."""

    @cute.jit
    def store_lse(self, mLse: cute.Tensor, row: Row, row_max: Float32, row_sum: Float32, with_sink: Float32):
        """See `Fmha.store_lse`."""
        some = row.inside & (row_sum > 0.0)  # WRONG: row.inside
        Fmha.store_lse(self, mLse, row._replace(inside=some), row_max, row_sum, with_sink)


class OneLimit(Fmha):
    """Every query of the chunk has the limit of the last one: it sees entries of its own future."""

    @cute.jit
    def ranges(self, lists: KeyLists, token: Int32, tokens: Int32):
        """See `Fmha.ranges`."""
        (first, _), window = Fmha.ranges(self, lists, token, tokens)
        count = lists.entries.count
        return (first, count[count.shape[0] - 1]), window  # WRONG: count[token]


class SinkInLse(Fmha):
    """The log-sum-exp contains the sink: O is right, and a union with other keys counts the sink twice."""

    @cute.jit
    def store_lse(self, mLse: cute.Tensor, row: Row, row_max: Float32, row_sum: Float32, with_sink: Float32):
        """See `Fmha.store_lse`."""
        Fmha.store_lse(self, mLse, row, row_max, with_sink, with_sink)  # WRONG: row_sum


class SwappedTables(Fmha):
    """cos and sin of the inverse rotation are taken for each other: 448 of 512 dimensions stay right."""

    @cute.jit
    def rotate(self, rO: cute.Tensor, rope: Tables, token: Int32, first: Int32):
        """See `Fmha.rotate`."""
        Fmha.rotate(self, rO, Tables(rope.sin, rope.cos), token, first)  # WRONG: cos, sin


class NoProxyFence(Fmha):
    """Dequantised keys are committed without the fence before the tensor core reads."""

    @cute.jit
    def commit_keys(self, kv: pipeline.PipelineTmaUmma, state: pipeline.PipelineState):
        """See `Dequant.commit_keys`."""
        cute.arch.sync_warp()  # WRONG: no cute.arch.fence_view_async_shared() before
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(kv.producer_get_barrier(state))


class NextScale(Fmha):
    """Every group of 64 dims is multiplied by the scale of the next: right where neighbours have one scale."""

    @cute.jit
    def fetch(
        self,
        pools: LanePools,
        work: Work,
        place: Int32,
        index: Int32,
        batch: cutlass.Constexpr,
        registers: Registers,
        chunks: cutlass.Constexpr,
    ):
        """See `Dequant.fetch`."""
        Fmha.fetch(self, pools, work, place, index, batch, registers, chunks)
        scales = registers.scales
        low, high = Uint32(scales[0, batch]), Uint32(scales[1, batch])
        scales[0, batch] = Int32(low >> 8 | high << 24)  # WRONG: byte g is the scale of group g
        scales[1, batch] = Int32(high >> 8)


class ScalesBehindEntry(Fmha):
    """Scales are read after the page's first entry, not after its last: right with one entry a page."""

    @cute.jit
    def lane_pools(self, sources: KeySources):
        """See `Dequant.lane_pools`."""
        first_only = [None if s is None else s._replace(page_size=Int32(1)) for s in sources]  # WRONG: page_size
        right, wrong = Fmha.lane_pools(self, sources), Fmha.lane_pools(self, KeySources(*first_only))
        return LanePools(
            *(None if r is None else r._replace(scales=w.scales) for r, w in zip(right, wrong, strict=True))
        )


class HalfOfTheBytes(Fmha):
    """A pair's stage counts as full after as many bytes as one CTA gets: the other's may be in flight."""

    @cute.jit
    def expected_bytes(self, of_entries: Int32):
        """See `Fmha.expected_bytes`."""
        return Int32(self.stage_bytes)  # WRONG: * self.cluster


class OwnStageOnly(Fmha):
    """The MMA warp of a pair signals an empty stage in its own CTA only: the other waits for ever."""

    def kv_pipeline(self, barriers: cute.Pointer) -> pipeline.PipelineTmaUmma:
        """See `Fmha.kv_pipeline`."""
        return replace(Fmha.kv_pipeline(self, barriers), consumer_mask=Int32(1))  # WRONG: both


class EvenAndOdd(Fmha):
    """A pair's Q in even and odd chunks of 64 dimensions, as alone: the keys lie there in two halves of 256."""

    def __init__(self, *settings: Any):
        super().__init__(*settings)
        self.q_order = tuple(range(self.chunks))  # WRONG: chunk i, then chunk i of the other half


class HalfOfTheWarps(Fmha):
    """A pair's stage of FP8 keys counts as full when one CTA's warps have arrived."""

    def __init__(self, *settings: Any):
        super().__init__(*settings)
        self.producers -= len(self.dequant_warps)  # WRONG: those of both CTAs arrive


class HastyQ(Fmha):
    """Q is copied to tensor memory before it has arrived in shared memory."""

    @cute.jit
    def take_q(
        self,
        base: Int32,
        sKV: Int32,
        kv: pipeline.PipelineTmaUmma,
        kv_state: pipeline.PipelineState,
        q_stage: cutlass.Constexpr,
    ):
        """See `Fmha.take_q`."""
        self.place_q(base, sKV + kv_state.index * self.stage_bytes, q_stage)  # WRONG: after the wait
        kv.consumer_wait(kv_state)
        umma.fence_after_thread_sync()
        kv.consumer_release(kv_state)


class FreedQ(Fmha):
    """A stage of Q is released as soon as its copy is issued: the next keys may land before it is read."""

    @cute.jit
    def take_q(
        self,
        base: Int32,
        sKV: Int32,
        kv: pipeline.PipelineTmaUmma,
        kv_state: pipeline.PipelineState,
        q_stage: cutlass.Constexpr,
    ):
        """See `Fmha.take_q`."""
        kv.consumer_wait(kv_state)
        umma.fence_after_thread_sync()
        self.place_q(base, sKV + kv_state.index * self.stage_bytes, q_stage)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(kv.sync_object_empty.get_barrier(kv_state.index))  # WRONG: consumer_release


class OneSpeaksForAll(Fmha):
    """One epilogue warp releases O for all four: the others may still be reading when the next token's P V comes."""

    @cute.jit
    def release_o(self, o: pipeline.PipelineUmmaAsync, block: pipeline.PipelineState):
        """See `Fmha.release_o`."""
        umma.fence_before_thread_sync()
        warp = cute.arch.warp_idx()
        if warp == self.epilogue_warps[0]:  # WRONG: each warp for itself
            for _ in cutlass.range_constexpr(len(self.epilogue_warps)):
                with cute.arch.elect_one():
                    o.consumer_release(block)


class GroupSeesAll(Fmha):
    """Tokens of a group see the union of their keys: the first sees the future, the last more than its window."""

    @cute.jit
    def own(self, keys: KeyList, token: Int32, inside: cutlass.Boolean, start: Int32):
        """See `Fmha.own`."""
        return Span(Int32(0), Int32(1 << 30))  # WRONG: each token its own


class FirstPartLeads(Combine):
    """Scales are relative to the first split, not to the largest: right until that split is empty or far below."""

    @cute.jit
    def max_and_sum(self, mLsePartial: cute.Tensor, token: Int32, head: Int32, lse: Float32):
        """See `Combine.max_and_sum`."""
        first = mLsePartial[0, token, head]
        lse_sum = Float32(0.0)
        for i in cutlass.range(mLsePartial.shape[0], unroll=1):
            lse_sum += cute.math.exp2((mLsePartial[i, token, head] - first) * LOG2_E, fastmath=True)
        return first, lse_sum  # WRONG: the largest


class OddAllocation(Ladder):
    """Tensor memory without the 32 columns that S of odd tiles ends with: an allocation is a power of two."""

    def softmax(self, mOut: Any, mLse: Any, allocator: Any, s: Any, p: Any, scale: Any, rows: Any) -> None:
        """See `Ladder.softmax`."""
        allocate = allocator.allocate
        allocator.allocate = lambda columns: allocate(O_COLUMN - 32 + self.head_dim)  # WRONG: up to a power of two
        Ladder.softmax(self, mOut, mLse, allocator, s, p, scale, rows)


class NarrowStore(Ladder):
    """P is stored as 16-bit elements through an atom for 32-bit cells."""

    @cute.jit
    def store_p(
        self, rS: cute.Tensor, address: cute.Pointer, column: Int32, lane: Int32, scale: Float32, row_max: Float32
    ):
        """See `Ladder.store_p`."""
        cells = cute.make_tensor(address + column, cute.make_layout((128, 32), stride=(1 << 16, 1)))
        atom = cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(32)), self.element)  # WRONG: Float32
        tcgen05.make_tmem_copy(atom, cells)
        return Float32(0.0)


class LateVariable(Ladder):
    """A value is first set inside one dynamic `if` and read in another: where the first is false it has none."""

    @cute.jit
    def tile_row_max(self, rS: cute.Tensor, left: Int32, scale: Float32):
        """See `Ladder.tile_row_max`."""
        if left < TILE_N:
            last = left - 1  # WRONG: set before the `if`
        if left > 1:
            rS[0] = rS[0] * (last - last + 1)
        return Ladder.tile_row_max(self, rS, left, scale)


def last_keys_only(first: torch.Tensor, count: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask windows' rows [R T] to the last 128 of each chunk of ``tokens`` queries.

    Right for one token; the earlier a query of a longer chunk, the more of its old keys are silently gone.
    """
    end = first + count
    oldest = end.view(-1, tokens)[:, -1:] - 128  # WRONG: each query has its own end
    kept = torch.maximum(first.view(-1, tokens), oldest).flatten()
    return torch.minimum(kept, end).int(), (end - kept).clamp_min(0).int()


def unwrapped(first: torch.Tensor, count: torch.Tensor, newest: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Read rings as far as the slot of their newest token (-1: none): right until a ring wraps."""
    slot = torch.tensor([-1 if p < 0 else p % 128 for p in newest])  # WRONG: a full ring has 128 keys
    return first, torch.minimum(count, slot + 1).int()


class HastyLoad(Fmha):
    """The load warp does not wait for the kernel before, which may still write."""

    def wait_for_inputs(self) -> None:
        """WRONG: no `griddepcontrol.wait`; see `Load.wait_for_inputs`."""


CAUGHT_BY = {  # break -> (stage it belongs to, what finds it)
    "PinnedTile": ("a", "boxes never loaded"),
    "HalfProduct": ("a", "bytes never read"),
    "HastyProduct": ("a", "race_shared"),
    "ShiftedWeights": ("b", "uninitialised_tmem"),
    "FirstAccumulates": ("b", "uninitialised_tmem"),
    "TransposedV": ("b", "wrong numbers"),
    "OverlappingO": ("b", "race_tensor"),
    "NoStoreWait": ("b", "missing_tcgen05_wait"),
    "CrossedAtoms": ("c", "element moved"),
    "OneMaximum": ("c", "wrong numbers"),
    "NoRescale": ("c", "wrong numbers"),
    "EarlyRescale": ("c", "race_tensor"),
    "BaseTwoLse": ("c", "wrong numbers"),
    "SumOverMaximum": ("d1", "race_shared"),
    "SwappedHalves": ("d1", "wrong numbers"),
    "NoHeadGuard": ("d2", "MemoryFault"),
    "PadLse": ("d2", "pad rows leaked"),
    "SharedSelection": ("d2", "wrong numbers"),
    "EveryKeyCounts": ("d3", "wrong numbers"),
    "NoKeysNoLse": ("d3", "wrong numbers"),
    "OneLimit": ("d4", "wrong numbers"),
    "SinkInLse": ("d5", "wrong numbers"),
    "SwappedTables": ("d5", "wrong numbers"),
    "FirstPartLeads": ("d5", "wrong numbers"),
    "NoProxyFence": ("fp8", "missing_proxy_fence"),
    "NextScale": ("fp8", "wrong numbers"),
    "ScalesBehindEntry": ("fp8", "wrong numbers"),
    "HalfOfTheWarps": ("fp8", "mbarrier_over_arrival"),
    "HalfOfTheBytes": ("e", "uninitialised_smem"),
    "OwnStageOnly": ("e", "Deadlock"),
    "EvenAndOdd": ("e", "wrong numbers"),
    "HastyQ": ("e", "uninitialised_smem"),
    "FreedQ": ("e", "race_shared"),
    "OneSpeaksForAll": ("e", "race_tensor"),
    "GroupSeesAll": ("e", "wrong numbers"),
    "HastyLoad": ("e", "ahead of the wait"),
}
REFUSED = {  # break -> (stage, words of the compiler)
    "OddAllocation": ("b", "power of two"),
    "NarrowStore": ("b", "same element size"),
    "LateVariable": ("c", "last"),
}
FAULTS = {name: globals()[name] for name in (*CAUGHT_BY, *REFUSED)}
