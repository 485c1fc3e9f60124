"""Find the largest magnitude of a matrix, one number a CTA. NVFP4's global scale derives from it without a host wait.

    partials[c] = bits of max |x| over the pieces of CTA c        Inf and NaN are larger than what is finite

`Quantize` with scale "derived" takes the maximum of them. A thread loads 4 pieces of 8 elements before it looks at one;
a warp's maximum comes from shuffles, that of its CTA through 16 words of shared memory. It reads x once, 2 bytes an
element, and is limited by that. There are at most 256 CTAs (of 512 threads), so that what the next kernel reads again
stays small; a maximum has no order, so the bits do not depend on any.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, memory

from dsv4lib.dsl.tensors import Divisor
from dsv4lib.errors import ConfigError
from dsv4lib.ops.quantize import codes
from dsv4lib.ops.quantize.codes import PIECE
from dsv4lib.ops.quantize.config import DTYPES
from dsv4lib.ops.quantize.kernel import ELEMENTS, divide, words_of

THREADS = 512
WARPS = THREADS // 32
AT_ONCE = 4  # pieces of a thread and round
MOST_CTAS = 256


class Amax:
    """Find one maximum a CTA of a matrix; see the module docstring.

    Args:
        dtype: of x: "bf16" or "fp32".

    Raises:
        ConfigError: another dtype.
    """

    def __init__(self, dtype: str = "bf16"):
        if dtype not in DTYPES:
            raise ConfigError("dtype", dtype, "one of " + ", ".join(DTYPES))
        self.dtype, self.element = dtype, ELEMENTS[dtype]

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        return f"Amax({self.dtype})"

    @staticmethod
    def ctas(pieces: int) -> int:
        """Count the CTAs, and numbers they leave, for a matrix of so many pieces."""
        return max(1, min(MOST_CTAS, -(-pieces // (THREADS * AT_ONCE))))

    @cute.jit
    def __call__(self, mX: cute.Tensor, mPartials: cute.Tensor, pieces: Int32, divisor: Divisor, stream: cuda.CUstream):
        """Launch one CTA for each number.

        Args:
            mX: [T, K].
            mPartials: int32 [G].
            pieces: of 8 elements in mX.
            divisor: of the pieces of a row.
            stream: where the launch is queued.
        """
        self.kernel(mX, mPartials, pieces, divisor).launch(
            grid=(mPartials.shape[0], 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mPartials: cute.Tensor, pieces: Int32, divisor: Divisor):
        """Fetch and take the maximum, round after round; then over lanes and warps."""
        cta, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        sLargest = memory.SmemAllocator().allocate_tensor(Int32, cute.make_layout(WARPS), byte_alignment=16)
        cute.arch.griddepcontrol_wait()
        rIn = cute.make_rmem_tensor((PIECE, AT_ONCE), self.element)
        step = mPartials.shape[0] * THREADS
        amax = Int32(0)
        for first in cutlass.range(cta * THREADS + thread, pieces, step * AT_ONCE, unroll=1):
            rIn.fill(0.0)
            for i in cutlass.range_constexpr(AT_ONCE):
                if first + i * step < pieces:
                    row, piece = divide(first + i * step, divisor)
                    cute.autovec_copy(cute.local_tile(mX[row, None], (PIECE,), (piece,)), rIn[None, i])
            amax = codes.larger(amax, codes.largest(words_of(rIn), self.dtype == "bf16"))
        amax = codes.over_lanes(amax, 32)
        if thread % 32 == 0:
            sLargest[thread // 32] = amax
        cute.arch.sync_threads()
        if thread < 32:
            amax = codes.over_lanes(sLargest[thread % WARPS], 32)
            if thread == 0:
                mPartials[cta] = amax
