"""Finish rows of an attention over rotated values: rotate back and store, or combine splits of the keys first.

    o = s * (H o') / sqrt(D)            once a head, after everything was added
    o' = sum_i 2^(lse_i - lse) o'_i     over splits i in order; an empty one, lse -inf, is not read

A warp has a row: lane l dims l D / 32 and up. Combining is a second launch, which starts early and waits.

Source: `dsv4lib.formats.turbo4`, `dsv4lib.ops.fmha.combine`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from dsv4lib.dsl import convert, hadamard
from dsv4lib.errors import ConfigError
from dsv4lib.formats import turbo4
from dsv4lib.ops.turbo4_encode.kernel import ELEMENTS, HEAD_DIMS, sign_word

WARP, WARPS = 32, 4
LN_2 = math.log(2.0)


class Lane(NamedTuple):
    """Lane ``number`` of a row and its signs: bit i is set where dim ``number`` D / 32 + i is negated."""

    number: Int32
    signs: Int32


@cute.jit
def lane_of(seed: Int32, number: Int32, dim: cutlass.Constexpr):
    """Return the `Lane` of a row of ``dim``."""
    run = dim // WARP
    first = number * run
    return Lane(number, sign_word(seed, first // turbo4.WORD) >> (first % turbo4.WORD))


def flip(values: list, signs: Int32) -> list:
    """Negate value i where bit i of ``signs`` is set."""
    top = Int32(-(2**31))
    return [convert.from_bits(convert.bits(x) ^ (signs << (31 - i) & top)) for i, x in enumerate(values)]


@cute.jit
def store_rotated_back(values: list, lane: Lane, mRow: cute.Tensor, element: cutlass.Constexpr):
    """Rotate a row back and store it."""
    run = len(values)
    back = flip(hadamard.rotate(values, lane.number, run * WARP), lane.signs)
    rX = cute.make_rmem_tensor(run, Float32)
    for i in cutlass.range_constexpr(run):
        rX[i] = back[i]
    rOut = cute.make_rmem_tensor(run, element)
    rOut.store(rX.load().to(element))
    cute.autovec_copy(rOut, cute.local_tile(mRow, (run,), (lane.number,)))


class Turbo4Combine:
    """Combine splits; see the module docstring.

    Args:
        dtype: of O, "bf16" or "fp16". head_dim: D, one of `HEAD_DIMS`.

    Raises:
        ConfigError: a value that is not allowed.
    """

    def __init__(self, dtype: str = "bf16", head_dim: int = 128):
        if dtype not in ELEMENTS:
            raise ConfigError("dtype", dtype, "one of " + ", ".join(ELEMENTS))
        if head_dim not in HEAD_DIMS:
            raise ConfigError("head_dim", head_dim, "one of " + ", ".join(map(str, HEAD_DIMS)))
        self.dtype, self.element, self.head_dim = dtype, ELEMENTS[dtype], head_dim
        self.run = head_dim // WARP  # dims of a lane

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        return f"Turbo4Combine({self.dtype}, {self.head_dim})"

    @cute.jit
    def __call__(
        self,
        mOPartial: cute.Tensor,
        mLsePartial: cute.Tensor,
        mO: cute.Tensor,
        mLse: cute.Tensor,
        seed: Int32,
        stream: cuda.CUstream,
    ):
        """Launch a warp a head.

        Args:
            mOPartial: fp32 [splits, B, H, D], rotated. mLsePartial: fp32 [splits, B, H], base 2.
            mO: [B, H, D]. mLse: fp32 [B, H].
            seed: of the signs. stream: where the launch is queued.
        """
        self.kernel(mOPartial, mLsePartial, mO, mLse, seed).launch(
            grid=(mO.shape[0], cute.ceil_div(mO.shape[1], WARPS), 1),
            block=(WARP * WARPS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        mOPartial: cute.Tensor,
        mLsePartial: cute.Tensor,
        mO: cute.Tensor,
        mLse: cute.Tensor,
        seed: Int32,
    ):
        """Combine one head."""
        request, block, _ = cute.arch.block_idx()
        head = block * WARPS + cute.arch.warp_idx()
        lane = lane_of(seed, cute.arch.lane_idx(), self.head_dim)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()  # after the wait: this kernel ends after the one before
        if head < mO.shape[1]:
            largest, total = self.sums(mLsePartial, request, head)
            scale = cutlass.select_(total != 0.0, cute.arch.rcp_approx(total), Float32(0.0))  # NaN stays
            rO = cute.make_rmem_tensor(self.run, Float32)
            rPart = cute.make_rmem_tensor(self.run, Float32)
            rO.fill(0.0)
            for split in cutlass.range(mLsePartial.shape[0], unroll=1):
                lse = mLsePartial[split, request, head]
                if lse != -Float32.inf:  # also NaN
                    row = mOPartial[split, request, head, None]
                    cute.autovec_copy(cute.local_tile(row, (self.run,), (lane.number,)), rPart)
                    share = cute.math.exp2(lse - largest, fastmath=True) * scale
                    rO.store(rO.load() + rPart.load() * share)
            values = [rO[i] for i in range(self.run)]
            store_rotated_back(values, lane, mO[request, head, None], self.element)
            if lane.number == 0:
                mLse[request, head] = (largest + cute.math.log2(total)) * LN_2

    @cute.jit
    def sums(self, mLsePartial: cute.Tensor, request: Int32, head: Int32):
        """Return the largest LSE, 0 if all are -inf, and the sum of 2^(lse_i - largest)."""
        largest = -Float32.inf
        for split in cutlass.range(mLsePartial.shape[0], unroll=1):
            largest = cute.arch.fmax(largest, mLsePartial[split, request, head])
        largest = Float32(cutlass.select_(largest > -Float32.inf, largest, Float32(0.0)))
        total = Float32(0.0)
        for split in cutlass.range(mLsePartial.shape[0], unroll=1):
            total += cute.math.exp2(mLsePartial[split, request, head] - largest, fastmath=True)
        return largest, total
