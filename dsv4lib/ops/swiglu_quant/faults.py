"""Inject faults into the kernel, one at a time: each class replaces one thing. `FAULTS` holds them by name."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

from dsv4lib.ops.swiglu_quant import kernel as swiglu_quant_kernel


class BaseTwo(swiglu_quant_kernel.SwigluQuant):
    """Takes 2^-x for e^-x: the gate is too soft."""

    def silu(self, x: Float32) -> Float32:
        """Forget the factor log2(e)."""
        return x * cute.arch.rcp_approx(1.0 + cute.math.exp2(-x, fastmath=True))


class OneSided(swiglu_quant_kernel.SwigluQuant):
    """Clamps up from above only, as the gate: right for all that is above -limit."""

    def at_least(self, x: Float32, limit: Float32) -> Float32:
        """Forget the lower bound."""
        return x


class OneScaleARow(swiglu_quant_kernel.SwigluQuant):
    """Stores all scales of a row over each other: right for rows of one block."""

    def block_of(self, place: Int32) -> Int32:
        """The first."""
        return Int32(0)


FAULTS = {kernel.__name__: kernel for kernel in (BaseTwo, OneSided, OneScaleARow)}
