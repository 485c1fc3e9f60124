"""Inject one fault into grouped block-scaled GEMMs, marked ``WRONG``.

Every class is the `MoeGemm` kernel with one thing replaced. They compile without a word. `CAUGHT_BY` says what finds
each: a kind of the emulator's reports, "stray bytes" (the output holds a sentinel where no token is) or "wrong numbers"
(the comparison with fp64).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, pipeline

from dsv4lib.ops.moe_gemm.epilogue import Ends, Factors, swiglu
from dsv4lib.ops.moe_gemm.load import W_BYTES, Rings, Sources
from dsv4lib.ops.moe_gemm.schedule import Tile
from dsv4lib.ops.moe_gemm.sm100 import MoeGemm


class FirstScales(MoeGemm):
    """The scales of the ring's first stage serve every K step: right with one step, and where scales are alike."""

    @cute.jit
    def scales_to_tmem(self, base: Int32, rings: Rings, stage: Int32):
        """See `Mma.scales_to_tmem`."""
        MoeGemm.scales_to_tmem(self, base, rings, Int32(0))  # WRONG: not the stage of the operands


class HastyStep(MoeGemm):
    """A K step is multiplied before its operands and scales have arrived."""

    def wait_for_step(self, ab: pipeline.PipelineTmaUmma, state: pipeline.PipelineState) -> None:
        """See `Mma.wait_for_step`."""
        # WRONG: nothing


class OneScaleId(MoeGemm):
    """The 4 MMAs of a step take the same of the 4 scales in a word: right where neighbouring blocks are alike."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.instructions = self.instructions[:1] * len(self.instructions)  # WRONG: no scale data id


class FirstRows(MoeGemm):
    """Scales of tokens start at the block's first row: right for the first tile of a group."""

    @cute.jit
    def token_scales(self, base: Int32, tile: Tile):
        """See `Mma.token_scales`."""
        return base + self.sfx_column  # WRONG: not the column of the tile's first row


class NoTailMask(MoeGemm):
    """Rows after a group's last token are written."""

    @cute.jit
    def inside(self, tile: Tile, token: Int32):
        """See `Epilogue.inside`."""
        return token < tile.n  # WRONG: what the MMA has, not what the group has


class GateUpSwapped(MoeGemm):
    """Gate and up change places: as large, as smooth, and wrong."""

    def activate(self, gate: Float32, up: Float32, limit: Float32):
        """See `Epilogue.activate`."""
        return swiglu(up, gate, limit)  # WRONG


class FirstAlpha(MoeGemm):
    """All experts take the factor of the first: right with one expert, or one global scale for all."""

    @cute.jit
    def factors(self, ends: Ends, tile: Tile):
        """See `Epilogue.factors`."""
        return Factors(ends.alpha[0], ends.alpha_up[0])  # WRONG: the factors of the tile's expert


class FirstAccumulates(MoeGemm):
    """The first MMA of a tile adds to what tensor memory held."""

    @cute.jit
    def multiply(self, d: Int32, base: Int32, tile: Tile, rings: Rings, stage: Int32, step: Int32, blocks_left: Int32):
        """See `Mma.multiply`."""
        MoeGemm.multiply(self, d, base, tile, rings, stage, step + 1, blocks_left)  # WRONG: step 0 must overwrite


class OneBuffer(MoeGemm):
    """The exchange has one buffer, and one barrier a chunk: a fast warp overwrites what a slow one still reads."""

    @cute.jit
    def transpose(self, source: Int32, there: Int32, sH: cute.Tensor, buffer: Int32, factors: Factors, limit: Float32):
        """See `Epilogue.transpose`."""
        MoeGemm.transpose(self, source, there, sH, Int32(0), factors, limit)  # WRONG

    @cute.jit
    def store(self, sH: cute.Tensor, buffer: Int32, ends: Ends, tile: Tile, first: Int32):
        """See `Epilogue.store`."""
        MoeGemm.store(self, sH, Int32(0), ends, tile, first)  # WRONG


class ScaleOfWholeRow(MoeGemm):
    """Scales go where an unswizzled matrix has them: right in the first block's first row."""

    @cute.jit
    def store_scale(self, ends: Ends, tile: Tile, row: Int32, column: Int32, code: Int32):
        """See `Epilogue.store_scale`."""
        blocks = ends.scales.shape[0] // cute.ceil_div(ends.out.shape[0], 128)
        at = row * (4 * blocks) + column  # WRONG: row by row
        ends.scales[at // 512, at % 512] = cutlass.Uint8(code)


class WeightsTwice(MoeGemm):
    """Weights are fetched twice, to the same place: right in every number, dear in bytes."""

    @cute.jit
    def load_operands(
        self,
        sources: Sources,
        tile: Tile,
        token_boxes: Int32,
        step: Int32,
        rings: Rings,
        stage: Int32,
        barrier: cute.Pointer,
    ):
        """See `Load.load_operands`."""
        for boxes_of_tokens in (token_boxes, Int32(0)):  # WRONG: once
            MoeGemm.load_operands(self, sources, tile, boxes_of_tokens, step, rings, stage, barrier)

    def step_bytes(self, token_boxes: Int32) -> Int32:
        """See `Load.step_bytes`."""
        return super().step_bytes(token_boxes) + W_BYTES * self.mode.w_bits // self.mode.x_bits * self.ctas


_ALL = (
    (FirstScales, "wrong numbers"),
    (OneScaleId, "wrong numbers"),
    (FirstRows, "wrong numbers"),
    (NoTailMask, "stray bytes"),
    (GateUpSwapped, "wrong numbers"),
    (FirstAlpha, "wrong numbers"),
    (FirstAccumulates, "uninitialised_tmem"),
    (HastyStep, "uninitialised_smem"),
    (OneBuffer, "race_shared"),
    (ScaleOfWholeRow, "wrong numbers"),
)
FAULTS = {kind.__name__: kind for kind, _ in _ALL}
CAUGHT_BY = {kind.__name__: found for kind, found in _ALL}
WASTEFUL = {WeightsTwice.__name__: WeightsTwice}  # nothing finds it but a count of bytes
