"""Add up a token's experts and the shared expert, as a torch op.

`moe_combine` calls `torch.ops.dsv4.moe_combine`, which writes the sum in place: one launch, no value of a tensor read
by the host. The oracle is `dsv4lib.reference.moe_combine`.
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
from dsv4lib.ops.moe_combine import arguments
from dsv4lib.ops.moe_combine.kernel import COLUMNS, MAX_K, MoeCombine


@typed
def moe_combine(
    y: Tensor,
    row_of: Tensor,
    weights: Tensor | None = None,
    shared: Tensor | None = None,
    *,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Add up a token's experts, slots in order, in fp32, rounded once.

    ``out[t] = sum_s weights[t, s] y[row_of[t, s]] + shared[t]``

    Args:
        y: bf16 [R, d], d a multiple of 8, rows on 16 bytes; a row that no route names may hold anything.
        row_of: int32 [T, k]; a number outside 0 .. R - 1 (-1) is skipped.
        weights: fp32 [T, k]; None: ones.
        shared: bf16 [T, d] or None.
        out: bf16 [T, d] to write into, other memory than the inputs or ``shared`` itself; None: a new tensor.
        backend: "native", "emulator", "reference", or "auto": native, else emulator.

    Returns:
        out.

    Raises:
        ArgumentError: an argument of the wrong type, shape, stride or device.
        BackendUnavailable: the back end cannot run here.
    """
    for name, x in (("y", y), ("row_of", row_of)):
        if x.dim() != 2:
            raise ArgumentError(f"{name}.shape", tuple(x.shape), "two dimensions")
    if out is None:
        out = torch.empty(row_of.shape[0], y.shape[1], dtype=y.dtype, device=y.device)
    Call.op(y, row_of, weights, shared, out, backend)
    return out


@op("moe_combine", mutates=("out",), in_place=[("out", "shared")])
class Call(NamedTuple):
    """A call of `moe_combine`."""

    y: Tensor
    row_of: Tensor
    weights: Tensor | None
    shared: Tensor | None
    out: Tensor
    backend: str

    def check(self) -> None:
        """Check types, shapes and devices."""
        for name, x in (("y", self.y), ("row_of", self.row_of), ("out", self.out)):
            if x.dim() != 2:
                raise ArgumentError(f"{name}.shape", tuple(x.shape), "two dimensions")
        bf16, shape, (tokens, d) = torch.bfloat16, tuple(self.row_of.shape), self.out.shape
        launching.check(
            {
                "y": (self.y, bf16, (None, d)),
                "row_of": (self.row_of, torch.int32, (tokens, None)),
                "weights": (self.weights, torch.float32, shape),
                "shared": (self.shared, bf16, (tokens, d)),
                "out": (self.out, bf16, (tokens, d)),
            }
        )
        if not 1 <= shape[1] <= MAX_K:
            raise ArgumentError("row_of.shape", shape, f"[T, k] with k 1 to {MAX_K}")
        if d % COLUMNS or d == 0:
            raise ArgumentError("y.shape", tuple(self.y.shape), f"[R, d] with d a multiple of {COLUMNS}")

    def run(self, backend: str) -> None:
        """Launch the kernel, or ask the oracle."""
        y, row_of, weights, shared, out, _ = self
        if out.shape[0] == 0:
            return
        if y.shape[0] == 0:  # no expert has a row here
            out.zero_() if shared is None else out.copy_(shared)
            return
        settings = {"k": row_of.shape[1], "weighted": weights is not None, "shared": shared is not None}
        if backend == "reference":
            arguments.launch_args(MoeCombine(**settings), self)  # checks: what one back end takes all take
            wide = (None if x is None else x.double() for x in (weights, shared))
            out.copy_(backends.oracle("moe_combine").moe_combine(y.double(), row_of, *wide))
        else:
            launching.launch(backend, MoeCombine, settings, arguments.fake_args, arguments.launch_args, self)
