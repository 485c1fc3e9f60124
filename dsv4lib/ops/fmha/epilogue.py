"""Run the epilogue: O from tensor memory to global memory, and the log-sum-exp. O is normalised, rotated, converted.

    O = O / (row_sum + exp2(sink - row_max))            LSE = (row_max + log2(row_sum)) * ln 2

Thread t of 128 owns lane t of tensor memory: head t % 64, and half t / 64 of the dimensions of each block of O. A block
is released to the tensor core as soon as it is in registers, before it is stored: the next item's first P V may follow
while O is stored to global memory.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, memory, pipeline

from dsv4lib.dsl import tmem, umma
from dsv4lib.dsl.rope import Tables, rotate_back
from dsv4lib.ops.fmha.config import LOG2_E, TILE_M, TMEM_DONE
from dsv4lib.ops.fmha.work import Items, KeyLists, Outputs, Plan, Row, Work


class EpilogueRings(NamedTuple):
    """Pipelines of the epilogue warps: blocks of O from the tensor core. row_sum and row_max of an item."""

    o: pipeline.PipelineUmmaAsync
    sums: pipeline.PipelineAsync


class EpilogueStates(NamedTuple):
    """Where the epilogue warps are in the blocks of O and in the sums."""

    o: pipeline.PipelineState
    sums: pipeline.PipelineState


@cute.jit
def multiply(registers: cute.Tensor, scale: Float32):
    """Multiply an even number of fp32 registers by ``scale``, two at a time."""
    for i in cutlass.range_constexpr(0, cute.size(registers), 2):
        both = cute.arch.mul_packed_f32x2((registers[i], registers[i + 1]), (scale, scale))
        registers[i], registers[i + 1] = both


class Epilogue(Plan):
    """The epilogue warps: they store an item while the softmax warps are at the next."""

    @cute.jit
    def epilogue(
        self,
        mQ: cute.Tensor,
        lists: KeyLists,
        items: Items,
        outputs: Outputs,
        sRow: cute.Tensor,
        allocator: memory.TmemAllocator,
        rings: EpilogueRings,
    ):
        """Run the epilogue warps. Thread t owns head t % 64 and half t / 64 of the dimensions of a block.

        Args:
            sRow: [thread, slot]; slots of the softmax warps' row_sum and row_max.
        """
        address, work, row = self.begin(mQ, lists, items, allocator)
        states = self.epilogue_states()
        for item in cutlass.range(items.first, items.end, items.step, unroll=1):
            work_after = self.work(lists, items, item + items.step)  # asked for a whole item ahead
            row_after = self.tile_row(mQ, lists, work_after)
            states = self.finish_item(outputs, work, row, address, sRow, rings, states)
            work, row = work_after, row_after
        pipeline.NamedBarrier(TMEM_DONE, self.tmem_threads).arrive()

    @cute.jit
    def begin(self, mQ: cute.Tensor, lists: KeyLists, items: Items, allocator: memory.TmemAllocator):
        """Return (tensor memory, `Work` and `Row` of the first item).

        Once it is allocated and the predecessor done.

        The kernel before may have written the lists, and may still read what O and LSE overwrite.
        """
        allocator.wait_for_alloc()
        cute.arch.griddepcontrol_wait()
        address = allocator.retrieve_ptr(Float32)
        work = self.work(lists, items, items.first)
        return address, work, self.tile_row(mQ, lists, work)

    def epilogue_states(self) -> EpilogueStates:
        """Return where the epilogue warps begin."""
        consumer = pipeline.PipelineUserType.Consumer
        return EpilogueStates(*(pipeline.make_pipeline_state(consumer, n) for n in (self.o_blocks, 1)))

    @cute.jit
    def finish_item(
        self,
        outputs: Outputs,
        work: Work,
        row: Row,
        address: cute.Pointer,
        sRow: cute.Tensor,
        rings: EpilogueRings,
        states: EpilogueStates,
    ):
        """Store LSE and O of one item and return the states of the pipelines.

        -inf and zeros without keys.
        """
        o, sums = rings
        o_state, sums_state = (state.clone() for state in states)
        sink = self.sink_logit(outputs, row)  # in flight while the sums are
        any_tile = work.end > work.first
        row_max, row_sum = -Float32.inf, Float32(0.0)
        if any_tile:
            sums.consumer_wait(sums_state)
            row_max = sRow[row.tidx, self.row_max_slot]
            row_sum = sRow[row.tidx, self.sum_slot] + sRow[row.tidx ^ TILE_M, self.sum_slot]
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                sums.consumer_release(sums_state)
            sums_state.advance()
        o_scale, denominator = self.final_scale(sink, row_max, row_sum)
        if self.is_first(row):
            self.store_lse(outputs.lse, row, row_max, row_sum, denominator)
        for block in cutlass.range_constexpr(self.o_blocks):
            if any_tile:
                o.consumer_wait(o_state)
                umma.fence_after_thread_sync()
            for i in cutlass.range_constexpr(0, self.pv_n // 64, self.lines_at_once):
                first = block * (self.pv_n // 64) + i
                rO = self.read_lines(outputs, address, row, o_scale, any_tile, row_sum != 0.0, first)
                if cutlass.const_expr(i + self.lines_at_once == self.pv_n // 64):
                    if any_tile:
                        self.release_o(o, o_state)
                        o_state.advance()
                self.store_lines(outputs, row, rO, first)
        return EpilogueStates(o_state, sums_state)

    @cute.jit
    def is_first(self, row: Row):
        """Return whether this thread stores the LSE.

        One of the threads and CTAs that share a row of O does.
        """
        first = row.half == 0
        if cutlass.const_expr(self.dim_splits > 1):
            first = first & (self.dim_split() == 0)
        return first

    @cute.jit
    def release_o(self, o: pipeline.PipelineUmmaAsync, block: pipeline.PipelineState):
        """Release a block of O of which this warp has read its lanes: one arrival."""
        umma.fence_before_thread_sync()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            o.consumer_release(block)

    @cute.jit
    def of_split(self, outputs: Outputs, items: Items):
        """Return the outputs of this CTA's split of the keys."""
        mSink, rope, mO, mLse = outputs
        if cutlass.const_expr(self.partial):
            split = items.split
            mO, mLse = mO[split, None, None, None], cute.slice_(mLse, (split, *(None,) * (cute.rank(mLse) - 1)))
        return Outputs(mSink, rope, mO, mLse)

    @cute.jit
    def sink_logit(self, outputs: Outputs, row: Row):
        """Return the sink of this thread's head as a power of two; -inf: there is none."""
        logit = -Float32.inf
        if cutlass.const_expr(self.sink):
            if row.inside:
                logit = outputs.sink[row.head] * LOG2_E
        return logit

    @cute.jit
    def final_scale(self, sink: Float32, row_max: Float32, row_sum: Float32):
        """Return (what O is multiplied by, row_sum with the sink)."""
        denominator, o_scale = row_sum, Float32(1.0)
        if cutlass.const_expr(self.sink):
            denominator = row_sum + cute.math.exp2(sink - row_max, fastmath=True)
        if cutlass.const_expr(not self.raw):
            o_scale = cutlass.select_(row_sum != 0.0, cute.arch.rcp_approx(denominator), Float32(0.0))  # NaN stays
        return o_scale, denominator

    def place_of(self, line: int) -> tuple[int, int]:
        """Return where a line of O is in a head, in units of 32 dimensions.

        A line is 32 columns of a lane.

        It is of the first split of the dimensions; `lines_of_split` leads to the next one's.

        Returns:
            its place for lanes 0-63; and how much further it is for lanes 64-127.
        """
        lines = (self.pv_n if self.cluster == 1 else self.head_dim) // 64  # of a P V instruction, in a pair all
        return 2 * (line // lines) * lines + line % lines, lines

    def lines_of_split(self) -> int:
        """Return how much further, in units of 32 dimensions, the next split's lines are."""
        return self.place_of(self.o_blocks * self.pv_n // 64)[0]

    @cute.jit
    def read_lines(
        self,
        outputs: Outputs,
        address: cute.Pointer,
        row: Row,
        o_scale: Float32,
        any_tile: Boolean,
        any_key: Boolean,
        line: cutlass.Constexpr,
    ):
        """Read `lines_at_once` lines of O from ``line`` on, as they are stored. Returns registers [8, 4, lines].

        Args:
            address: of tensor memory.
            o_scale: O is multiplied by it.
            any_tile: whether there was a tile, else O was never written.
            any_key: whether this row had a key, else O is zeros whatever its angles and its neighbours' keys are.
        """
        rO = cute.make_rmem_tensor(32, Float32)
        rOut = cute.make_rmem_tensor((8, 4, self.lines_at_once), outputs.o.element_type)
        # The last line first: rotating takes most registers, and the two that are rotated are the last of a block.
        for i in cutlass.range_constexpr(self.lines_at_once - 1, -1, -1):
            if any_tile:
                tmem.load(address, 32 * (line + i), row.tidx, rO)
                cute.arch.fence_view_async_tmem_load()
                multiply(rO, o_scale)
            else:
                rO.fill(0.0)
            place, further = self.place_of(line + i)
            first = place + further + 2 - self.head_dim // 32  # of the two that are rotated; below 0: none in this line
            most = first + (self.dim_splits - 1) * self.lines_of_split()
            if cutlass.const_expr(self.inverse_rope and most >= 0):
                own = first + self.dim_split() * self.lines_of_split() - (1 - row.half) * further
                if row.inside and any_key and own >= 0:
                    self.rotate(rO, outputs.rope, row.token, own * 16)
            rOut[None, None, i].store(rO.load().reshape((8, 4)).to(rOut.element_type))
        return rOut

    @cute.jit
    def store_lines(self, outputs: Outputs, row: Row, rOut: cute.Tensor, line: cutlass.Constexpr):
        """Store registers [8, 4, lines] to global memory, lines from ``line`` on.

        Addresses differ by constants.
        """
        mO = outputs.o
        _, further = self.place_of(0)
        start = (row.half * further + self.dim_split() * self.lines_of_split()) * 32
        gRow = cute.domain_offset((cute.assume(start, divby=32),), mO[row.token, row.head, None])
        if row.inside:
            for i in cutlass.range_constexpr(self.lines_at_once):
                place, _ = self.place_of(line + i)
                gO = cute.logical_divide(cute.local_tile(gRow, (32,), (place,)), (8,))
                cute.autovec_copy(rOut[None, None, i], gO)
        cute.arch.sync_warp()

    @cute.jit
    def rotate(self, rO: cute.Tensor, rope: Tables, token: Int32, first: Int32):
        """Rotate the 32 dimensions in ``rO`` back (inverse RoPE), pairs ``first`` .. of the rotated 64."""
        rotate_back(rO, rope, token, first)

    @cute.jit
    def store_lse(self, mLse: cute.Tensor, row: Row, row_max: Float32, row_sum: Float32, with_sink: Float32):
        """Store LSE = (row_max + log2(row_sum)) ln 2, without the sink.

        The sink belongs to the union of the splits.

        Raw: row_max (as a natural logarithm) and row_sum.
        """
        if row.inside:
            if cutlass.const_expr(self.raw):
                mLse[row.token, row.head, 0] = row_max * math.log(2.0)
                mLse[row.token, row.head, 1] = row_sum
            else:
                mLse[row.token, row.head] = (row_max + cute.math.log2(row_sum)) * math.log(2.0)
