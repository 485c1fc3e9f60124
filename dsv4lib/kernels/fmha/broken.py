"""The mistakes that cost days on real attention kernels, planted one at a time; each is marked ``WRONG``.

Every class is the `Ladder`, the `Fmha` or the `Combine` kernel with one thing replaced. They compile without a word.
`CAUGHT_BY` says what finds each: a kind of the emulator's reports, "MemoryFault" (an access that stops it), "boxes
never loaded" (a trace), "pad rows leaked" (guard rows) or "wrong numbers" (the comparison).
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, pipeline

from dsv4lib.kernels.common import tmem, umma
from dsv4lib.kernels.fmha.combine import Combine
from dsv4lib.kernels.fmha.ladder import CHUNK, CHUNK_BYTES, LOG2_E, O_COLUMN, TILE_N, Ladder
from dsv4lib.kernels.fmha.sm100 import Q_READY, SOFTMAX_THREADS, Fmha
from dsv4lib.kernels.fmha.softmax import TILE_N as FMHA_TILE_N


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
                    umma.mma_ss(d, a, b, self.qk_instruction, chunk + k > 0)


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
                umma.mma_ts(base + O_COLUMN, a, b, self.pv_instruction, add)


class FirstAccumulates(Ladder):
    """The first P V adds to what tensor memory held."""

    @cute.jit
    def mma_pv(self, base: Int32, slot: Int32, stage: Int32, accumulate: cutlass.Boolean):
        """See `Ladder.mma_pv`."""
        with cute.arch.elect_one():
            for k in cutlass.range_constexpr(TILE_N // 16):
                b = umma.at(self.v_descriptor, stage + k * (16 * 128))
                umma.mma_ts(base + O_COLUMN, base + slot + k * 8, b, self.pv_instruction, True)  # WRONG: on tile 0


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
                umma.mma_ts(base + O_COLUMN, base + slot + k * 8, b, instruction, add)


class NoStoreWait(Ladder):
    """P is handed over before it has arrived in tensor memory."""

    @cute.jit
    def store_weights(
        self, rS: cute.Tensor, address: cute.Pointer, column: Int32, lane: Int32, scale: Float32, maximum: Float32
    ):
        """See `Ladder.store_weights`."""
        rP = cute.make_rmem_tensor((TILE_N // 2, 2), self.element)
        weights = rS.load() * scale
        total = Float32(0.0)
        if cutlass.const_expr(self.stage == "c"):
            weights = cute.math.exp2(weights - maximum, fastmath=True)
            total = weights.reduce(cute.ReductionOp.ADD, total, 0)
        rP.store(weights.reshape((TILE_N // 2, 2)).to(self.element))
        for part in cutlass.range_constexpr(2):
            tmem.store(address, column + 32 * part, lane, cute.recast_tensor(rP[None, part], Float32))
        return total  # WRONG: no wait for the asynchronous stores


class OneMaximum(Ladder):
    """One maximum for all rows of a warp: right while rows are of one scale, else small rows vanish."""

    @cute.jit
    def row_maximum(self, rS: cute.Tensor, left: Int32, scale: Float32):
        """See `Ladder.row_maximum`."""
        if left < TILE_N:
            for j in cutlass.range_constexpr(TILE_N):
                rS[j] = cutlass.select_(j < left, rS[j], -Float32.inf)
        largest = rS.load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
        largest = cute.arch.warp_reduction(largest, cute.arch.fmax)  # WRONG: over the rows of 32 threads
        return largest * (scale * LOG2_E)


class NoRescale(Ladder):
    """O keeps the scale of the first tile: right while the maximum does not move."""

    @cute.jit
    def rescale(self, address: cute.Pointer, lane: Int32, factor: Float32):
        """See `Ladder.rescale`."""
        # WRONG: nothing


class EarlyRescale(Ladder):
    """O is rescaled while the tensor core may still add the tile before to it."""

    @cute.jit
    def wait_for_o(self, p: pipeline.PipelineAsyncUmma, weights: pipeline.PipelineState):
        """See `Ladder.wait_for_o`."""
        p.producer_acquire(weights)  # WRONG: the slot of this tile, free one tile earlier
        umma.fence_after_thread_sync()


class BaseTwoLse(Ladder):
    """The log-sum-exp mixes logarithms: the maximum is in log2, the sum is taken in ln."""

    @cute.jit
    def epilogue(
        self, mOut: cute.Tensor, mLse: Any, address: cute.Pointer, lane: Int32, maximum: Float32, total: Float32
    ):
        """See `Ladder.epilogue`."""
        # WRONG: (maximum + log2 total) ln 2 becomes maximum + ln total
        Ladder.epilogue(self, mOut, mLse, address, lane, maximum, total)
        block, _, _ = cute.arch.block_idx()
        if block * 128 + lane < mOut.shape[0]:
            mLse[block * 128 + lane] = maximum + cute.math.log2(total) * math.log(2.0)


class SumOverMaximum(Fmha):
    """The sums of a row go where its maxima were, while the partner may still be reading the last one.

    The same race was found in a published decode kernel: a slot for an exchange between warps is written again with no
    barrier after the read. It shows only under an unlucky order.
    """

    sum_slot = 0  # WRONG: 1


class SwappedHalves(Fmha):
    """Q's odd chunks lie in the lanes that meet the even chunks of K, and the other way round."""

    @cute.jit
    def stage_q(self, mQ: cute.Tensor, address: cute.Pointer, head: Int32, half: Int32, tidx: Int32):
        """See `Fmha.stage_q`."""
        Fmha.stage_q(self, mQ, address, head, 1 - half, tidx)  # WRONG: half


class NoHeadGuard(Fmha):
    """Q is staged without asking whether the head exists: pad rows read what lies behind, the last token's nothing."""

    @cute.jit
    def stage_q(self, mQ: cute.Tensor, address: cute.Pointer, head: Int32, half: Int32, tidx: Int32):
        """See `Fmha.stage_q`."""
        token, _, _ = cute.arch.block_idx()
        for pair in cutlass.range_constexpr(self.chunks // 2):
            rQ = cute.make_rmem_tensor((8, CHUNK // 8), self.element)
            gQ = cute.local_tile(mQ[token, head, None], (CHUNK,), (2 * pair + half,))
            cute.autovec_copy(cute.logical_divide(gQ, (8,)), rQ)  # WRONG: no `if head < mQ.shape[1]`
            column = self.q_column + pair * (CHUNK // 2)
            tmem.store(address, column, tidx, cute.recast_tensor(rQ, Float32))
        cute.arch.fence_view_async_tmem_store()
        umma.fence_before_thread_sync()
        pipeline.NamedBarrier(Q_READY, SOFTMAX_THREADS + 32).arrive()


class PadLse(Fmha):
    """The log-sum-exp is stored for one row too many: behind the last head of every token."""

    @cute.jit
    def epilogue(
        self,
        mSink: Any,
        rope: Any,
        mO: cute.Tensor,
        mLse: cute.Tensor,
        address: cute.Pointer,
        head: Int32,
        half: Int32,
        tidx: Int32,
        reference: Float32,
        total: Float32,
        any_tile: cutlass.Boolean,
    ):
        """See `Fmha.epilogue`."""
        Fmha.epilogue(self, mSink, rope, mO, mLse, address, head, half, tidx, reference, total, any_tile)
        token, _, _ = cute.arch.block_idx()
        if half == 0 and total > 0.0 and head <= mO.shape[1]:  # WRONG: <, by one row
            mLse[token, head] = (reference + cute.math.log2(total)) * math.log(2.0)


class SharedSelection(Fmha):
    """Two tokens go by the list of the first: right where neighbours select the same entries."""

    @cute.jit
    def rows(self, mIndex: Any, mFirst: Any, token: Int32, position: Int32, count: Int32):
        """See `Fmha.rows`."""
        return Fmha.rows(self, mIndex, mFirst, token // 2 * 2, position, count)  # WRONG: token


class EveryKeyCounts(Fmha):
    """Places of a tile behind the last key are not masked: TMA fills them with zeros, and a zero key has weight e^0."""

    @cute.jit
    def valid_keys(self, lists: tuple, work: tuple, tile: Int32, half: Int32):
        """See `Fmha.valid_keys`."""
        return Int32(-1)  # WRONG: a bit only where there is a key


class OneLimit(Fmha):
    """Every query of the chunk has the limit of the last one: it sees entries of its own future."""

    @cute.jit
    def work(self, lists: tuple, splits: Int32):
        """See `Fmha.work`."""
        token, _, _ = cute.arch.block_idx()
        last = lists[0][2].shape[0] - 1
        entries, window = lists[0][2][last], lists[1][1][token]  # WRONG: lists[0][2][token]
        entry_tiles = cute.ceil_div(entries, FMHA_TILE_N)
        return entries, window, Int32(0), entry_tiles + cute.ceil_div(window, FMHA_TILE_N), entry_tiles


class SinkInLse(Fmha):
    """The log-sum-exp contains the sink: O is right, and whoever merges this part counts the sink twice."""

    @cute.jit
    def epilogue(
        self,
        mSink: Any,
        rope: Any,
        mO: cute.Tensor,
        mLse: cute.Tensor,
        address: cute.Pointer,
        head: Int32,
        half: Int32,
        tidx: Int32,
        reference: Float32,
        total: Float32,
        any_tile: cutlass.Boolean,
    ):
        """See `Fmha.epilogue`."""
        Fmha.epilogue(self, mSink, rope, mO, mLse, address, head, half, tidx, reference, total, any_tile)
        token, _, _ = cute.arch.block_idx()
        if head < mO.shape[1] and half == 0 and total > 0.0:
            sum_with_sink = total + cute.math.exp2(mSink[head] * LOG2_E - reference, fastmath=True)  # WRONG: total
            mLse[token, head] = (reference + cute.math.log2(sum_with_sink)) * math.log(2.0)


class SwappedTables(Fmha):
    """cos and sin of the inverse rotation are taken for each other: 448 of 512 dimensions stay right."""

    @cute.jit
    def epilogue(
        self,
        mSink: Any,
        rope: Any,
        mO: cute.Tensor,
        mLse: cute.Tensor,
        address: cute.Pointer,
        head: Int32,
        half: Int32,
        tidx: Int32,
        reference: Float32,
        total: Float32,
        any_tile: cutlass.Boolean,
    ):
        """See `Fmha.epilogue`."""
        tables = rope[1], rope[0]  # WRONG: cos, sin
        Fmha.epilogue(self, mSink, tables, mO, mLse, address, head, half, tidx, reference, total, any_tile)


class FirstPartLeads(Combine):
    """Weights are relative to the first part, not to the largest: right until that part is empty or far below."""

    @cute.jit
    def weights(self, mLses: cute.Tensor, token: Int32, head: Int32):
        """See `Combine.weights`."""
        first = mLses[0, token, head]
        total = Float32(0.0)
        for i in cutlass.range(mLses.shape[0], unroll=1):
            total += cute.math.exp2((mLses[i, token, head] - first) * LOG2_E, fastmath=True)
        return first, total  # WRONG: the largest


def last_keys_only(first: torch.Tensor, count: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of windows [R T] as a mask over only the last 128 rows of each chunk of ``tokens`` queries leaves them.

    Right for one token; the earlier a query of a longer chunk, the more of its old keys are silently gone.
    """
    end = first + count
    oldest = end.view(-1, tokens)[:, -1:] - 128  # WRONG: each query has its own end
    kept = torch.maximum(first.view(-1, tokens), oldest).flatten()
    return torch.minimum(kept, end).int(), (end - kept).clamp_min(0).int()


CAUGHT_BY = {  # break -> (stage it belongs to, what finds it)
    "PinnedTile": ("a", "boxes never loaded"),
    "HalfProduct": ("a", "wrong numbers"),
    "ShiftedWeights": ("b", "uninitialised_tmem"),
    "FirstAccumulates": ("b", "uninitialised_tmem"),
    "TransposedV": ("b", "wrong numbers"),
    "NoStoreWait": ("b", "missing_tcgen05_wait"),
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
    "OneLimit": ("d4", "wrong numbers"),
    "SinkInLse": ("d5", "wrong numbers"),
    "SwappedTables": ("d5", "wrong numbers"),
    "FirstPartLeads": ("d5", "wrong numbers"),
}
BROKEN = {name: globals()[name] for name in CAUGHT_BY}
