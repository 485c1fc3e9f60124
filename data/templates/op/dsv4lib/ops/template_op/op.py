"""Gate rows, as a torch op.

`template_op` calls `torch.ops.dsv4.template_op`, which writes in place: one launch, no value of a tensor read by the
host. The oracle is `dsv4lib.reference.template_op`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common import launching
from dsv4lib.ops.common.schema import op
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.template_op import arguments
from dsv4lib.ops.template_op.kernel import COLUMNS, TemplateOp


@typed
def template_op(gate: Tensor, up: Tensor, *, out: Tensor | None = None, backend: str = "auto") -> Tensor:
    """Gate rows: ``out = silu(gate) * up`` in fp32, rounded once.

    Args:
        gate, up: bf16 [T, d], d a multiple of 8, rows on 16 bytes.
        out: bf16 [T, d] to write into, other memory than the inputs; None: a new tensor.
        backend: "native", "emulator", "reference", or "auto": native, else emulator.

    Returns:
        out.

    Raises:
        ArgumentError: an argument of the wrong type, shape, stride or device.
        BackendUnavailable: the back end cannot run here.
    """
    out = torch.empty_like(up, memory_format=torch.contiguous_format) if out is None else out
    Call.op(gate, up, out, backend)
    return out


@op("template_op", mutates=("out",))
class Call(NamedTuple):
    """A call of `template_op`."""

    gate: Tensor
    up: Tensor
    out: Tensor
    backend: str

    def check(self) -> None:
        """Check types, shapes and devices."""
        if self.out.dim() != 2 or self.out.shape[1] % COLUMNS:
            raise ArgumentError("out.shape", tuple(self.out.shape), f"[T, d] with d a multiple of {COLUMNS}")
        shape, bf16 = tuple(self.out.shape), torch.bfloat16
        launching.check(
            {"out": (self.out, bf16, shape), "gate": (self.gate, bf16, shape), "up": (self.up, bf16, shape)}
        )

    def run(self, backend: str) -> None:
        """Launch the kernel, or ask the oracle."""
        if self.out.numel() == 0:
            return
        if backend == "reference":
            self.out.copy_(backends.oracle("template_op").template_op(self.gate.double(), self.up.double()))
            return
        launching.launch(backend, TemplateOp, {}, arguments.fake_args, arguments.launch_args, self)
