"""Sum up the results of a token's experts, which their owners have written to this rank's symmetric buffer.

    out[t] = sum_s combine[s, t]       slots in order, fp32, rounded once to bf16; slots without an expert are skipped

If a route of this rank found no room (`dispatch`), its slot has another call's result: all of the rank's output is NaN.
The order is that of the slots, not of arrival: the bits are the same in every run and for any number of ranks.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, pipeline

from dsv4lib.ops.mega_moe import symmetric
from dsv4lib.ops.mega_moe.layers import Memory
from dsv4lib.ops.mega_moe.layout import LOST, TILE, Layout
from dsv4lib.ops.moe_gemm.config import EPILOGUE_THREADS, EXCHANGE

COLUMNS = 8  # of a thread: 16 bytes


class Combine:
    """The epilogue warps' last task. ``layout`` is of the class that has it."""

    layout: Layout

    @cute.jit
    def wait_results(self, mem: Memory):
        """Wait until every route that this rank sent has its result here; one warp calls it."""
        layout, lane = self.layout, cute.arch.lane_idx()
        routes = Int32(0)
        for expert in cutlass.range(lane, layout.experts, 32, unroll=1):
            flag = mem.state + Int64(4 * layout.sent) + Int64(expert) * 8
            routes = routes + symmetric.wait_flag(flag, mem.epoch, "relaxed.gpu") % LOST
        routes = cute.arch.warp_redux_sync(routes, kind="add")
        wanted = routes * (layout.hidden // TILE)  # a tile of L2 counts its rows
        symmetric.wait_counter(mem.own + layout.offsets()["combined"], wanted, "acquire.sys")

    @cute.jit
    def start_of_sums(self, mem: Memory):
        """Return what sums start from, after `wait_results`: 0, or NaN if a route of this rank found no room."""
        layout, lane = self.layout, cute.arch.lane_idx()
        lost = Int32(0)
        for expert in cutlass.range(lane, layout.experts, 32, unroll=1):
            flag = mem.state + Int64(4 * layout.sent) + Int64(expert) * 8
            lost = lost + symmetric.wait_flag(flag, mem.epoch, "relaxed.gpu") // LOST
        lost = cute.arch.warp_redux_sync(lost, kind="add")
        return cutlass.select_(lost > 0, Float32(float("nan")), Float32(0.0))

    @cute.jit
    def combine(self, mOut: cute.Tensor, mem: Memory):
        """Add the slots of tokens c, c + g, .. of CTA c, by the epilogue's threads.

        Args:
            mOut: bf16 [T, H].
        """
        block, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        tidx, _, _ = cute.arch.thread_idx()
        if block < mem.tokens:
            if tidx < 32:
                self.wait_results(mem)
            pipeline.NamedBarrier(EXCHANGE, EPILOGUE_THREADS).arrive_and_wait()
        start = Float32(0.0)
        if block < mem.tokens:
            start = self.start_of_sums(mem)
        for token in cutlass.range(block, mem.tokens, ctas, unroll=1):
            for place in cutlass.range(tidx, self.layout.hidden // COLUMNS, EPILOGUE_THREADS, unroll=1):
                self.add_slots(mOut, mem, token, place, start)

    @cute.jit
    def add_slots(self, mOut: cute.Tensor, mem: Memory, token: Int32, place: Int32, start: Float32):
        """Add 8 columns of a token to ``start``."""
        layout, offsets = self.layout, self.layout.offsets()
        rSum = cute.make_rmem_tensor(COLUMNS, Float32)
        rSum.fill(start)
        for slot in cutlass.range_constexpr(layout.topk):
            index = symmetric.load_long(mem.own + offsets["topk_idx"] + Int64(token * layout.topk + slot) * 8)
            if index >= 0 and index < layout.experts:
                line = Int64(slot * layout.max_tokens + token) * layout.hidden + Int64(place * COLUMNS)
                address = mem.own + offsets["combine"] + line * 2
                source = cute.make_ptr(BFloat16, address, cute.AddressSpace.gmem, assumed_align=16)
                rY = cute.make_rmem_tensor(COLUMNS, BFloat16)
                cute.autovec_copy(cute.make_tensor(source, cute.make_layout(COLUMNS)), rY)
                rSum.store(rSum.load() + rY.load().to(Float32))
        rOut = cute.make_rmem_tensor(COLUMNS, BFloat16)
        rOut.store(rSum.load().to(BFloat16))
        cute.autovec_copy(rOut, cute.local_tile(mOut[token, None], (COLUMNS,), (place,)))
