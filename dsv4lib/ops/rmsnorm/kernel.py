"""Normalise a row in registers, alone or after the residual's addition.

What it computes is in `op`.

h is rounded once and its norm is that of the rounded h; y is fp32 until its one rounding.

A CTA owns a row. A thread has 8 columns (16 bytes) in a piece, up to 4 pieces, all loads on their way before the first
is used; the row stays in registers between the sum and the scaling, so every byte moves once. The sum of squares: a
thread's columns in order, lanes by a butterfly, warps in order; it depends on nothing but the row. The weight does not
depend on the kernel before and is fetched ahead of `griddepcontrol.wait`.

    d 4096: 256 threads x 2 pieces; 7168: 256 x 4 (the last one half empty)
    bytes a row: 4 d (add: 8 d); SMEM 32 bytes

Source: DSV4 released inference code.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, memory

from dsv4lib.errors import ConfigError

COLUMNS = 8  # of a piece
LANES, MAX_THREADS, MAX_PIECES = 32, 256, 4
MAX_D = COLUMNS * MAX_THREADS * MAX_PIECES


class RmsNorm:
    """Normalise rows; see the module docstring.

    Args:
        d: columns, a multiple of 8 up to 8192.
        add: add a residual first.
        weighted: multiply by a weight a column.
        most_threads: of a CTA, 256, 512 or 1024. It decides how a row is summed up, and with it the last bits.

    Raises:
        ConfigError: a value that is not allowed.
    """

    def __init__(self, d: int = 4096, add: bool = False, weighted: bool = True, most_threads: int = MAX_THREADS):
        if not 0 < d <= MAX_D or d % COLUMNS:
            raise ConfigError("d", d, f"a multiple of {COLUMNS}, at most {MAX_D}")
        if most_threads not in (MAX_THREADS, 2 * MAX_THREADS, 4 * MAX_THREADS):
            raise ConfigError("most_threads", most_threads, "256, 512 or 1024")
        self.d, self.add, self.weighted = d, add, weighted
        self.threads = min(most_threads, LANES * -(-d // (COLUMNS * LANES)))
        self.pieces = -(-d // (COLUMNS * self.threads))
        self.warps = self.threads // LANES

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        flags = [name for name in ("add", "weighted") if vars(self)[name]]
        return f"RmsNorm({', '.join([str(self.d), str(self.threads), *flags])})"

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,
        mResidual: Any,
        mWeight: Any,
        mSum: Any,
        mY: cute.Tensor,
        eps: Float32,
        stream: cuda.CUstream,
    ):
        """Launch a CTA a row.

        Args:
            mX: [T, d] bf16.
            mResidual: [T, d] bf16 or None.
            mWeight: [d] fp32 or None.
            mSum: [T, d] bf16 or None: h; may be ``mResidual`` or ``mX`` itself.
            mY: [T, d] bf16; may be ``mX`` itself.
            eps: added to the mean.
            stream: where the launch is queued.
        """

        @cute.struct
        class Storage:
            sums: cute.struct.MemRange[Float32, self.warps]

        self.storage = Storage
        self.kernel(mX, mResidual, mWeight, mSum, mY, eps).launch(
            grid=(mX.shape[0], 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mResidual: Any, mWeight: Any, mSum: Any, mY: cute.Tensor, eps: Float32):
        """Fetch, add, sum up, scale, store."""
        row, _, _ = cute.arch.block_idx()
        storage = memory.SmemAllocator().allocate(self.storage)
        sSums = storage.sums.get_tensor(cute.make_layout(self.warps))
        rWeight = cute.make_rmem_tensor((COLUMNS, self.pieces), Float32)
        rX = cute.make_rmem_tensor((COLUMNS, self.pieces), BFloat16)
        rX.fill(0.0)
        if cutlass.const_expr(self.weighted):
            self.fetch(mWeight, rWeight)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()  # after the wait: this kernel ends after the one before
        self.fetch(mX[row, None], rX)
        if cutlass.const_expr(self.add):
            rResidual = cute.make_rmem_tensor((COLUMNS, self.pieces), BFloat16)
            rResidual.fill(0.0)
            self.fetch(mResidual[row, None], rResidual)
            self.add_residual(rX, rResidual, mSum, row)
        self.normalise(rX, rWeight, sSums, eps)
        self.put(rX, mY[row, None])

    @cute.jit
    def add_residual(self, rX: cute.Tensor, rResidual: cute.Tensor, mSum: cute.Tensor, row: Int32):
        """Compute h = bf16(x + residual), in place of x and in ``mSum``."""
        rX.store((rX.load().to(Float32) + rResidual.load().to(Float32)).to(BFloat16))
        self.put(rX, mSum[row, None])

    @cute.jit
    def normalise(self, rX: cute.Tensor, rWeight: cute.Tensor, sSums: cute.Tensor, eps: Float32):
        """Compute y = bf16(weight * h / sqrt(mean(h^2) + eps)), in place of h."""
        scale = cute.math.rsqrt(self.sum_of_squares(rX, sSums) * (1.0 / self.d) + eps, fastmath=True)
        y = rX.load().to(Float32) * scale
        if cutlass.const_expr(self.weighted):
            y = y * rWeight.load()
        rX.store(y.to(BFloat16))

    @cute.jit
    def fetch(self, line: cute.Tensor, rLine: cute.Tensor):
        """This thread's pieces of a row; past its end ``rLine`` stays as it is."""
        tidx, _, _ = cute.arch.thread_idx()
        for i in cutlass.range_constexpr(self.pieces):
            place = tidx + self.threads * i
            if place * COLUMNS < self.d:
                cute.autovec_copy(cute.local_tile(line, (COLUMNS,), (place,)), rLine[None, i])

    @cute.jit
    def put(self, rLine: cute.Tensor, line: cute.Tensor):
        """This thread's pieces into a row."""
        tidx, _, _ = cute.arch.thread_idx()
        for i in cutlass.range_constexpr(self.pieces):
            place = tidx + self.threads * i
            if place * COLUMNS < self.d:
                cute.autovec_copy(rLine[None, i], cute.local_tile(line, (COLUMNS,), (place,)))

    def sync(self) -> None:
        """Wait until all warps have stored their sums."""
        cute.arch.barrier()

    @cute.jit
    def sum_of_squares(self, rX: cute.Tensor, sSums: cute.Tensor) -> Float32:
        """Of the whole row, in all threads."""
        warp, mine = cute.arch.warp_idx(), Float32(0.0)
        for i in cutlass.range_constexpr(cute.size(rX)):
            x = rX[i].to(Float32)
            mine = cute.math.fma(x, x, mine)
        mine = cute.arch.warp_reduction_sum(mine)
        if cute.arch.lane_idx() == 0:
            sSums[warp] = mine
        self.sync()
        total = Float32(0.0)
        for w in cutlass.range_constexpr(self.warps):
            total += sSums[Int32(w)]
        return total
