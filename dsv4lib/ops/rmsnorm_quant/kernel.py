"""Norm and quantise a row that stays in registers; what it computes is in `op`.

The sums have the order of `rmsnorm.kernel`, and y is rounded to bf16 before it is quantised. With ``swizzled`` there
is a CTA for each row of the padding, too, which stores zero bytes and nothing else. The scales of fp8 stand in the
image four times, as 1x32 scales.

**Threads** as in `rmsnorm.kernel`: a CTA owns a row, which stays in registers. A thread has whole pieces of 8 columns,
so a block is 2, 4 or 16 neighbouring lanes of one piece, and its amax 1, 2 or 4 shuffles.

**Bytes** of an element: 2 in and 1.01 (fp8), 1.03 (mxfp8), 0.56 (nvfp4) out; `add` 4 more, `keep` 2. Two launches would
read and write y besides. Limited by memory, nvfp4 without the conversion of sm_100 by issue.

Source: DSV4 released inference code.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint8, memory

from dsv4lib.errors import ConfigError
from dsv4lib.formats import scale_swizzle
from dsv4lib.ops.quantize import codes
from dsv4lib.ops.quantize.config import RECIPES, ROW_RECIPES
from dsv4lib.ops.quantize.kernel import store_in_image, store_words, values_of, words_of
from dsv4lib.ops.rmsnorm.kernel import COLUMNS, MAX_THREADS, RmsNorm


class Tensors(NamedTuple):
    """What a launch reads and writes, as in `RmsnormQuant.__call__`."""

    x: cute.Tensor
    residual: Any
    weight: Any
    global_scale: Any
    total: Any
    y: Any
    codes: cute.Tensor
    scales: cute.Tensor


class RmsnormQuant(RmsNorm):
    """Norm and quantise; see the module docstring.

    Args:
        recipe: one of `ROW_RECIPES`; nvfp4 with a given global scale.
        d: columns, a multiple of the recipe's block up to 8192.
        weighted, most_threads: as in `RmsNorm`.
        keep: write y, too.
        fp4_conversion: cvt to e2m1x2 is there (`quantize.config.has_fp4_conversion`).
        swizzled: scales in 128x4 blocks; else row-major.
        add: add a residual first.

    Raises:
        ConfigError: a value that is not allowed.
    """

    def __init__(
        self,
        recipe: str = "fp8",
        d: int = 4096,
        weighted: bool = True,
        keep: bool = False,
        most_threads: int = MAX_THREADS,
        fp4_conversion: bool = True,
        swizzled: bool = False,
        add: bool = False,
    ):
        if recipe not in ROW_RECIPES:
            raise ConfigError("recipe", recipe, "one of " + ", ".join(ROW_RECIPES))
        super().__init__(d, add, weighted, most_threads)
        self.recipe, self.keep, self.fp4_conversion, self.format = recipe, keep, fp4_conversion, RECIPES[recipe]
        if d % self.format.block:
            raise ConfigError("d", d, f"a multiple of {self.format.block} for {recipe}")
        self.lanes = self.format.block // COLUMNS  # that share a scale
        self.words = COLUMNS * self.format.bits // 32  # of codes, of a piece
        self.swizzled, self.blocks = swizzled, d // self.format.block
        self.across = -(-self.blocks * self.format.repeats // scale_swizzle.COLS)  # 128x4 blocks side by side

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        flags = [name for name in ("add", "weighted", "keep", "fp4_conversion", "swizzled") if vars(self)[name]]
        return f"RmsnormQuant({', '.join([self.recipe, str(self.d), str(self.threads), *flags])})"

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,
        mResidual: Any,
        mWeight: Any,
        mGlobal: Any,
        mSum: Any,
        mY: Any,
        mCodes: cute.Tensor,
        mScales: cute.Tensor,
        eps: Float32,
        stream: cuda.CUstream,
    ):
        """Launch a CTA a row.

        Args:
            mX: [T, d] bf16.
            mResidual: [T, d] bf16, or None unless ``add``.
            mWeight: [d] fp32 or None.
            mGlobal: [1] fp32 of nvfp4, else None.
            mSum: [T, d] bf16, or None unless ``add``: h; may be ``mResidual`` or ``mX`` itself.
            mY: [T, d] bf16, or None unless ``keep``.
            mCodes: [T, words] int32. mScales: [T, blocks] uint8, or [bytes] where swizzled, of fp8 [words] int32.
            eps: added to the mean.
            stream: where the launch is queued.
        """

        @cute.struct
        class Storage:
            sums: cute.struct.MemRange[Float32, self.warps]

        self.storage = Storage
        rows = mX.shape[0]
        if cutlass.const_expr(self.swizzled):
            rows = cute.ceil_div(rows, scale_swizzle.ROWS) * scale_swizzle.ROWS
        self.kernel(mX, mResidual, mWeight, mGlobal, mSum, mY, mCodes, mScales, eps).launch(
            grid=(rows, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        mResidual: Any,
        mWeight: Any,
        mGlobal: Any,
        mSum: Any,
        mY: Any,
        mCodes: cute.Tensor,
        mScales: cute.Tensor,
        eps: Float32,
    ):
        """A row, or a row of the scales' padding."""
        row, _, _ = cute.arch.block_idx()
        storage = memory.SmemAllocator().allocate(self.storage)
        sSums = storage.sums.get_tensor(cute.make_layout(self.warps))
        tensors = Tensors(mX, mResidual, mWeight, mGlobal, mSum, mY, mCodes, mScales)
        if cutlass.const_expr(not self.swizzled):
            self.one_row(tensors, eps, row, sSums)
        elif row < mX.shape[0]:
            self.one_row(tensors, eps, row, sSums)
            self.pad(mScales, row, self.blocks)
        else:
            self.pad(mScales, row, 0)

    @cute.jit
    def one_row(self, tensors: Tensors, eps: Float32, row: Int32, sSums: cute.Tensor):
        """Fetch, add, sum up, scale, then one piece after the other to its codes."""
        rWeight = cute.make_rmem_tensor((COLUMNS, self.pieces), Float32)
        rX = cute.make_rmem_tensor((COLUMNS, self.pieces), BFloat16)
        rX.fill(0.0)
        g = factors = None
        if cutlass.const_expr(self.weighted):
            self.fetch(tensors.weight, rWeight)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()  # after the wait: this kernel ends after the one before
        self.fetch(tensors.x[row, None], rX)
        if cutlass.const_expr(self.add):
            rResidual = cute.make_rmem_tensor((COLUMNS, self.pieces), BFloat16)
            rResidual.fill(0.0)
            self.fetch(tensors.residual[row, None], rResidual)
        if cutlass.const_expr(self.recipe == "nvfp4"):
            g = tensors.global_scale[0]  # unlike the weight it may be new: the kernel before may have written it
            factors = codes.scale_factors(g)
        if cutlass.const_expr(self.add):
            self.add_residual(rX, rResidual, tensors.total, row)
        self.normalise(rX, rWeight, sSums, eps)
        if cutlass.const_expr(self.keep):
            self.put(rX, tensors.y[row, None])
        for i in cutlass.range_constexpr(self.pieces):
            self.convert(rX[None, i], i, row, tensors.codes[row, None], tensors.scales, g, factors)

    @cute.jit
    def pad(self, mScales: cute.Tensor, row: Int32, first: cutlass.Constexpr):
        """Store zeros for a row's scales from ``first`` to the end of its last block.

        ``first`` counts blocks; the last is one of 128x4.
        """
        tidx, _, _ = cute.arch.thread_idx()
        cute.arch.griddepcontrol_wait()
        end = self.across * scale_swizzle.COLS // self.format.repeats
        for block in cutlass.range(first + tidx, end, self.threads, unroll=1):
            store_in_image(self.format, mScales, row, block, self.across, Int32(0))

    @cute.jit
    def convert(
        self,
        rPiece: cute.Tensor,
        i: cutlass.Constexpr,
        row: Int32,
        codes_line: cute.Tensor,
        mScales: cute.Tensor,
        g: Any,
        factors: Any,
    ):
        """Compute and store scale and codes of this thread's ``i``-th piece.

        All lanes of a warp call it.
        """
        tidx, _, _ = cute.arch.thread_idx()
        place = tidx + self.threads * i
        amax = codes.over_lanes(codes.largest(words_of(rPiece), True), self.lanes)
        byte, words = codes.encoded(self.format, values_of(rPiece), amax, g, factors, self.fp4_conversion)
        if place * COLUMNS < self.d:
            store_words(codes_line, place, words)
            if place % self.lanes == 0:
                block = place // self.lanes
                if cutlass.const_expr(self.swizzled):
                    store_in_image(self.format, mScales, row, block, self.across, Int32(byte))
                else:
                    mScales[row, block] = Uint8(Int32(byte))
