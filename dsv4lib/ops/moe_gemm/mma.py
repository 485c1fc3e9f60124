"""Issue products; of a pair the first CTA's warp issues for both."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, memory, pipeline

from dsv4lib.dsl import umma
from dsv4lib.ops.moe_gemm.config import MMAS, ROW_STEP, W_BYTES
from dsv4lib.ops.moe_gemm.load import Depth, Rings
from dsv4lib.ops.moe_gemm.schedule import Groups, Schedule, Tile


class Mma(Schedule):
    """The MMA warp: features x tokens, scales copied to TMEM in between."""

    @cute.jit
    def mma(
        self,
        groups: Groups,
        depth: Depth,
        rings: Rings,
        allocator: memory.TmemAllocator,
        ab: pipeline.PipelineTmaUmma,
        acc: pipeline.PipelineUmmaAsync,
    ):
        """Run the MMA warp: tile after tile into alternating accumulators."""
        cute.arch.griddepcontrol_wait()
        allocator.wait_for_alloc()
        base = allocator.retrieve_ptr(Float32).toint()
        if cutlass.const_expr(self.ctas == 1):
            self.mma_tiles(groups, depth, rings, base, ab, acc)
        elif cute.arch.block_idx_in_cluster() == 0:
            self.mma_tiles(groups, depth, rings, base, ab, acc)

    @cute.jit
    def mma_tiles(
        self,
        groups: Groups,
        depth: Depth,
        rings: Rings,
        base: Int32,
        ab: pipeline.PipelineTmaUmma,
        acc: pipeline.PipelineUmmaAsync,
    ):
        """Loop over tiles and K steps."""
        ab_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        acc_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.acc_stages)
        place = self.first_place(groups)
        while place.expert < groups.experts:
            tile = self.tile(groups, place)
            ab_state, acc_state = self.mma_tile(tile, depth, rings, base, ab, acc, ab_state, acc_state)
            place = self.next_place(groups, place)

    @cute.jit
    def mma_tile(
        self,
        tile: Tile,
        depth: Depth,
        rings: Rings,
        base: Int32,
        ab: pipeline.PipelineTmaUmma,
        acc: pipeline.PipelineUmmaAsync,
        ab_state: pipeline.PipelineState,
        acc_state: pipeline.PipelineState,
    ):
        """Multiply all K steps of a tile; returns the states of both pipelines after it."""
        steps, blocks = depth
        acc.producer_acquire(acc_state)
        umma.fence_after_thread_sync()
        d = base + acc_state.index * self.tile_n
        for step in cutlass.range(steps, unroll=1):
            self.wait_for_step(ab, ab_state)
            with cute.arch.elect_one():
                if cutlass.const_expr(self.mode.block):
                    self.scales_to_tmem(base, rings, ab_state.index)
                # D += W @ X^T
                self.multiply(d, base, tile, rings, ab_state.index, step, blocks - step * self.scale_blocks)
            ab.consumer_release(ab_state)
            ab_state.advance()
        acc.producer_commit(acc_state)
        acc_state.advance()
        return ab_state, acc_state

    @cute.jit
    def wait_for_step(self, ab: pipeline.PipelineTmaUmma, state: pipeline.PipelineState):
        """Wait until the operands and scales of a K step are in shared memory."""
        ab.consumer_wait(state)
        umma.fence_after_thread_sync()

    @cute.jit
    def scales_to_tmem(self, base: Int32, rings: Rings, stage: Int32):
        """Copy a K step's scales.

        Block j of the weights goes to columns 4 j, the tokens' i-th 128 rows after each other.

        Copies and MMAs run in the order of their issue, so the same columns serve every step.
        """
        for j in cutlass.range_constexpr(self.scale_blocks):
            source = rings.sfw + stage * self.sfw_bytes + j * umma.SCALE_BLOCK
            column = base + self.sfw_column + j * umma.SCALE_COLUMNS
            umma.copy_scales(column, umma.at(umma.scales_descriptor(), source), self.ctas)
            for i in cutlass.range_constexpr(self.token_blocks):
                source = rings.sfx + stage * self.sfx_bytes + i * self.sfw_bytes + j * umma.SCALE_BLOCK
                column = base + self.sfx_column + (j * self.token_blocks + i) * umma.SCALE_COLUMNS
                umma.copy_scales(column, umma.at(umma.scales_descriptor(), source), self.ctas)

    @cute.jit
    def multiply(self, d: Int32, base: Int32, tile: Tile, rings: Rings, stage: Int32, step: Int32, blocks_left: Int32):
        """Issue the 4 MMAs of a K step.

        Where each has its own block of scales, those past the end of K are left out.

        Only where each has its block of scales.
        """
        w = umma.at(self.operand, rings.w + stage * W_BYTES)
        x = umma.at(self.operand, rings.x + stage * self.x_bytes)
        own = self.token_scales(base, tile)
        for i in cutlass.range_constexpr(MMAS):
            a, b = umma.advanced(w, 32 * i), umma.advanced(x, 32 * i)
            instruction = umma.of_n(self.instructions[i], tile.n)
            more = step > 0 if i == 0 else cutlass.Boolean(True)
            if cutlass.const_expr(not self.mode.block):
                umma.mma(d, a, b, instruction, more, ctas=self.ctas)
            else:
                j = i if self.scale_blocks == MMAS else 0  # else one block has the scales of all four
                sfa = base + self.sfw_column + j * umma.SCALE_COLUMNS
                sfb = own + j * self.token_blocks * umma.SCALE_COLUMNS
                if cutlass.const_expr(self.scale_blocks == 1 or i == 0):
                    umma.scaled_mma(d, a, b, instruction, sfa, sfb, more, self.mode.kind, self.ctas)
                elif blocks_left > i:
                    umma.scaled_mma(d, a, b, instruction, sfa, sfb, more, self.mode.kind, self.ctas)

    @cute.jit
    def token_scales(self, base: Int32, tile: Tile):
        """Return the column of the scales of the tile's first row. Row r mod 128 is in column r div 32.

        A tile starts at row 0 or 64 of its block, so its scales start 0 or 2 columns on: all that CUTLASS relies on.
        """
        return base + self.sfx_column + tile.row % 128 // ROW_STEP * (ROW_STEP // 32)
