"""Gate rows: y = silu(gate) * up, element by element, in fp32, rounded once.

A thread has 8 columns of a row (16 bytes), a CTA of 128 threads 1,024 columns. Bytes: 6 an element, read and written
once.

Source: say where the formula comes from; the oracle is `dsv4lib.reference.template_op`.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32

from dsv4lib.errors import ConfigError

COLUMNS = 8  # of a thread
LOG2_E = 1.4426950408889634


class TemplateOp:
    """Gate rows; see the module docstring.

    Args:
        threads: of a CTA, a multiple of 32 up to 1024.

    Raises:
        ConfigError: a value that is not allowed.
    """

    def __init__(self, threads: int = 128):
        if threads % 32 or not 32 <= threads <= 1024:
            raise ConfigError("threads", threads, "a multiple of 32 from 32 to 1024")
        self.threads = threads

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        return f"TemplateOp({self.threads})"

    @cute.jit
    def __call__(self, mGate: cute.Tensor, mUp: cute.Tensor, mOut: cute.Tensor, stream: cuda.CUstream):
        """Launch a CTA for 8 columns a thread of a row.

        Args:
            mGate, mUp, mOut: [T, d] bf16, d a multiple of 8.
            stream: where the launch is queued.
        """
        grid = (mOut.shape[0], cute.ceil_div(mOut.shape[1], self.threads * COLUMNS), 1)
        block = (self.threads, 1, 1)
        self.kernel(mGate, mUp, mOut).launch(grid=grid, block=block, stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, mGate: cute.Tensor, mUp: cute.Tensor, mOut: cute.Tensor):
        """Load 8 columns of both rows, compute, store."""
        row, part, _ = cute.arch.block_idx()
        tidx, _, _ = cute.arch.thread_idx()
        place = part * self.threads + tidx
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if place * COLUMNS < mOut.shape[1]:
            rGate = cute.make_rmem_tensor(COLUMNS, BFloat16)
            rUp = cute.make_rmem_tensor(COLUMNS, BFloat16)
            cute.autovec_copy(cute.local_tile(mGate[row, None], (COLUMNS,), (place,)), rGate)
            cute.autovec_copy(cute.local_tile(mUp[row, None], (COLUMNS,), (place,)), rUp)
            rOut = cute.make_rmem_tensor(COLUMNS, BFloat16)
            for i in cutlass.range_constexpr(COLUMNS):
                rOut[i] = (self.silu(rGate[i].to(Float32)) * rUp[i].to(Float32)).to(BFloat16)
            cute.autovec_copy(rOut, cute.local_tile(mOut[row, None], (COLUMNS,), (place,)))

    def silu(self, x: Float32) -> Float32:
        """x / (1 + e^-x)."""
        return x * cute.arch.rcp_approx(1.0 + cute.math.exp2(x * -LOG2_E, fastmath=True))
