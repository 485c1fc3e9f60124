"""Inject faults into the kernel, one at a time: each class replaces one thing. `FAULTS` holds them by name."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32

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


FAULTS = {kernel.__name__: kernel for kernel in (BaseTwo, OneSided)}
