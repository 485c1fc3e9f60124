"""Gate rows and quantise them to E4M3 codes. h = silu(min(gate, limit)) * clip(up, -limit, limit) in fp32.

What stands between the two GEMMs of a shared expert on a Hopper: the first one's output [T, 2 I], gate then up, becomes
what the second one reads, in one launch instead of five. Codes and scales, 1 x 128, are those that `quantize` with
recipe "fp8" makes of h in fp32.

A thread has 8 columns of h, so a block of 128 is 16 neighbouring lanes and its maximum 4 shuffles; a CTA of 128 threads
has 1,024 columns. No shared memory, no barrier. Bytes of fp32: 8 read and 1.01 written an element of h.

Source: DSV4's released code (`Expert.forward`, `act_quant`); the oracle is `dsv4lib.reference.swiglu_quant`.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from dsv4lib.errors import ConfigError
from dsv4lib.ops.quantize import codes
from dsv4lib.ops.quantize.codes import PIECE
from dsv4lib.ops.quantize.config import DTYPES, RECIPES
from dsv4lib.ops.quantize.kernel import ELEMENTS, in_fp32, store_words

LOG2_E = 1.4426950408889634
FORMAT = RECIPES["fp8"]
LANES = FORMAT.block // PIECE  # that share a block


class SwigluQuant:
    """Gate and quantise rows; see the module docstring.

    Args:
        dtype: of gate and up, "bf16" or "fp32".
        threads: of a CTA, a multiple of 32 up to 1024.

    Raises:
        ConfigError: a value that is not allowed.
    """

    def __init__(self, dtype: str = "fp32", threads: int = 128):
        if dtype not in DTYPES:
            raise ConfigError("dtype", dtype, "one of " + ", ".join(DTYPES))
        if threads % 32 or not 32 <= threads <= 1024:
            raise ConfigError("threads", threads, "a multiple of 32 from 32 to 1024")
        self.dtype, self.element, self.threads = dtype, ELEMENTS[dtype], threads

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        return f"SwigluQuant({self.dtype}, {self.threads})"

    @cute.jit
    def __call__(
        self,
        mGate: cute.Tensor,
        mUp: cute.Tensor,
        mCodes: cute.Tensor,
        mScales: cute.Tensor,
        limit: Float32,
        stream: cuda.CUstream,
    ):
        """Launch a CTA for 8 columns a thread of a row.

        Args:
            mGate, mUp: [T, I] of ``dtype``, I a multiple of 128.
            mCodes: int32 [T, I / 4]. mScales: uint8 [T, I / 128].
            limit: of the clamp.
            stream: where the launch is queued.
        """
        grid = (mGate.shape[0], cute.ceil_div(mGate.shape[1], self.threads * PIECE), 1)
        block = (self.threads, 1, 1)
        self.kernel(mGate, mUp, mCodes, mScales, limit).launch(grid=grid, block=block, stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, mGate: cute.Tensor, mUp: cute.Tensor, mCodes: cute.Tensor, mScales: cute.Tensor, limit: Float32):
        """Load 8 columns of gate and up, compute, quantise, store."""
        row, part, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        place = part * self.threads + thread
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()  # after the wait: this kernel ends after the one before
        rGate, rUp = (cute.make_rmem_tensor(PIECE, self.element) for _ in range(2))
        rGate.fill(0.0)
        rUp.fill(0.0)
        exists = place * PIECE < mGate.shape[1]
        if exists:
            cute.autovec_copy(cute.local_tile(mGate[row, None], (PIECE,), (place,)), rGate)
            cute.autovec_copy(cute.local_tile(mUp[row, None], (PIECE,), (place,)), rUp)
        gates, ups = in_fp32(rGate), in_fp32(rUp)
        h = [self.gated(gates[i], ups[i], limit) for i in range(PIECE)]
        amax = codes.over_lanes(codes.largest([one.bitcast(Int32) for one in h], False), LANES)
        byte, words = codes.encoded(FORMAT, h, amax, None, None, False)
        if exists:
            store_words(mCodes[row, None], place, words)
            if place % LANES == 0:
                mScales[row, self.block_of(place)] = cutlass.Uint8(byte)

    def block_of(self, place: Int32) -> Int32:
        """Number of the block of 128 columns that a thread's 8 are in."""
        return place // LANES

    def gated(self, gate: Float32, up: Float32, limit: Float32) -> Float32:
        """One element of h; NaN passes."""
        return self.silu(self.at_most(gate, limit)) * self.at_most(self.at_least(up, -limit), limit)

    def at_most(self, x: Float32, limit: Float32) -> Float32:
        """The smaller of both, x where it is NaN."""
        return Float32(cutlass.select_(x > limit, limit, x))

    def at_least(self, x: Float32, limit: Float32) -> Float32:
        """The larger of both, x where it is NaN."""
        return Float32(cutlass.select_(x < limit, limit, x))

    def silu(self, x: Float32) -> Float32:
        """x / (1 + e^-x)."""
        return x * cute.arch.rcp_approx(1.0 + cute.math.exp2(x * -LOG2_E, fastmath=True))
