"""Inject faults into the kernel, one at a time: each class replaces one thing. `FAULTS` holds them by name."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32

from dsv4lib.ops.template_op import kernel as template_op_kernel


class BaseTwo(template_op_kernel.TemplateOp):
    """Takes 2^-x for e^-x: the gate is too soft."""

    def silu(self, x: Float32) -> Float32:
        """Forget the factor log2(e)."""
        return x * cute.arch.rcp_approx(1.0 + cute.math.exp2(-x, fastmath=True))


FAULTS = {kernel.__name__: kernel for kernel in (BaseTwo,)}
