"""Attention kernels that are right and dear: one thing costs more than it has to, marked ``WRONG``.

Comparisons and checks of the emulator find nothing in them. `UnrolledTiles` shows in the size of the code, `EveryTile`
in the instructions of a tile, `FetchedTwice` in its bytes.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, memory, pipeline

from dsv4lib.dsl import umma
from dsv4lib.ops.fmha.ladder import KV_STAGES, S_STAGES, TILE_N, Ladder
from dsv4lib.ops.fmha.sm100 import Fmha
from dsv4lib.ops.fmha.softmax import Maxima, rescale


class UnrolledTiles(Ladder):
    """The MMA warp's loop over KV tiles runs in Python: right for exactly ``tiles`` tiles, the code grows with them."""

    tiles = 3

    @cute.jit
    def mma(
        self,
        sQ: Int32,
        sKV: Int32,
        allocator: memory.TmemAllocator,
        q: pipeline.PipelineTmaUmma,
        kv: pipeline.PipelineTmaUmma,
        s: pipeline.PipelineUmmaAsync,
        p: pipeline.PipelineAsyncUmma,
        tiles: Int32,
    ):
        """See `Ladder.mma`."""
        allocator.wait_for_alloc()
        base = allocator.retrieve_ptr(Float32).toint()
        self.wait_for_q(q)
        consumer = pipeline.PipelineUserType.Consumer
        kv_state, kv_release_state = (pipeline.make_pipeline_state(consumer, KV_STAGES) for _ in range(2))
        s_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, S_STAGES)
        p_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, S_STAGES)
        for tile in cutlass.range_constexpr(self.tiles + 1):  # WRONG: cutlass.range, over the tiles there are
            if cutlass.const_expr(tile < self.tiles):
                kv.consumer_wait(kv_state)
                umma.fence_after_thread_sync()
                self.mma_qk(base + s_state.index * TILE_N, sQ, sKV + kv_state.index * self.tile_bytes)
                s.producer_commit(s_state)
                kv_state.advance()
                s_state.advance()
            if cutlass.const_expr(tile > 0):
                p.consumer_wait(p_state)
                umma.fence_after_thread_sync()
                stage = sKV + kv_release_state.index * self.tile_bytes
                self.mma_pv(base, p_state.index * TILE_N, stage, cutlass.Boolean(tile > 1))
                kv.consumer_release(kv_release_state)
                p.consumer_release(p_state)
                kv_release_state.advance()
                p_state.advance()


class UnrolledTwice(UnrolledTiles):
    """The same with twice the tiles, to see what grows."""

    tiles = 6


class EveryTile(Fmha):
    """O is corrected in every tile, as in the textbook, whether its row_max has grown or not."""

    @cute.jit
    def correct(
        self,
        maxima: Maxima,
        row_sum: Float32,
        has_o: cutlass.Boolean,
        address: cute.Pointer,
        tidx: Int32,
        p: pipeline.PipelineAsyncUmma,
        p_state: pipeline.PipelineState,
    ):
        """See `Softmax.correct`."""
        row_max, tile_max = maxima
        new_max = cute.arch.fmax(row_max, tile_max)
        acc_scale = Float32(1.0)
        if new_max != row_max:
            acc_scale = cute.math.exp2(row_max - new_max, fastmath=True)
        if has_o:  # WRONG: and only where a row_max of the warp has grown by more than 2^4
            self.wait_for_o(p, p_state)
            rescale(address, self.q_column, tidx, acc_scale)
        return new_max, row_sum * acc_scale


class FetchedTwice(Fmha):
    """A tile of keys is fetched for Q K^T, and again for P V, to the same place: it has arrived with both."""

    @cute.jit
    def gather_keys(self, *given: Any):
        """See `Load.gather_keys`."""
        for _ in cutlass.range_constexpr(2):  # WRONG: once
            Fmha.gather_keys(self, *given)

    @cute.jit
    def load_tile(self, *given: Any):
        """See `Load.load_tile`."""
        for _ in cutlass.range_constexpr(2):  # WRONG: once
            Fmha.load_tile(self, *given)

    @cute.jit
    def expected_bytes(self, of_entries: Int32):
        """See `Load.expected_bytes`."""
        return 2 * Fmha.expected_bytes(self, of_entries)


FAULTS = {kernel.__name__: kernel for kernel in (EveryTile, FetchedTwice)}
