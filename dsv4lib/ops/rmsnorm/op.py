"""Normalise bf16 rows: `dsv4::rmsnorm`; after an addition: `dsv4::add_rmsnorm`.

    h = bf16(x + residual)                        `add_rmsnorm` only, written too
    y = bf16(weight * h / sqrt(mean(h^2) + eps))

Sums are fp32, as in the released code: of a row above 1e19 the mean is infinite, and y is 0.

One launch, outputs written in place, nothing read by the host. `add_rmsnorm` gives the bits of an addition and
`rmsnorm`. The oracles are `dsv4lib.reference.rmsnorm` and `.add_rmsnorm`.
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
from dsv4lib.ops.rmsnorm import arguments
from dsv4lib.ops.rmsnorm.kernel import COLUMNS, MAX_D, RmsNorm


@typed
def rmsnorm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, out: Tensor | None = None, backend: str = "auto"
) -> Tensor:
    """Normalise rows.

    Args:
        x: bf16 [T, d], d a multiple of 8 up to 8192, rows on 16 bytes.
        weight: fp32 [d]; None: ones.
        eps: added to the mean of squares.
        out: bf16 [T, d] to write into, x itself or other memory; None: a new tensor.
        backend: "native", "emulator", "reference", or "auto": native, else emulator.

    Returns:
        out.

    Raises:
        ArgumentError: an argument of the wrong type, shape, stride or device.
        BackendUnavailable: the back end cannot run here.
    """
    out = torch.empty_like(x) if out is None else out
    launching.check_eps(eps=eps)
    Norm.op(x, weight, out, eps, backend)
    return out


@typed
def add_rmsnorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Add rows to the residual stream and normalise the sum.

    Args:
        residual: bf16 [T, d].
        out: (h, y), bf16 [T, d] each, other memory than the inputs, or x or the residual itself; None: new tensors.
        x, weight, eps, backend: as in `rmsnorm`, which also says what is raised.

    Returns:
        (h, y).
    """
    out = (torch.empty_like(x), torch.empty_like(x)) if out is None else out
    launching.check_eps(eps=eps)
    AddNorm.op(x, residual, weight, out, eps, backend)
    return out


@op("rmsnorm", mutates=("out",), in_place=[("out", "x")])
class Norm(NamedTuple):
    """A call of `rmsnorm`."""

    x: Tensor
    weight: Tensor | None
    out: Tensor
    eps: float
    backend: str

    def check(self) -> None:
        """Check types, shapes and devices."""
        launching.check(_wanted(self.x, self.weight) | {"out": _like(self.out, self.x)})

    def run(self, backend: str) -> None:
        """Launch the kernel, or ask the oracle."""
        x, weight = self.x, self.weight
        if backend != "reference":
            return _launch(backend, self)
        wide = None if weight is None else weight.double()
        self.out.copy_(backends.oracle("rmsnorm").rmsnorm(x.double(), wide, self.eps))
        return None


@op("add_rmsnorm", mutates=("out",), in_place=[("out", "x"), ("out", "residual")])
class AddNorm(NamedTuple):
    """A call of `add_rmsnorm`."""

    x: Tensor
    residual: Tensor
    weight: Tensor | None
    out: tuple[Tensor, Tensor]
    eps: float
    backend: str

    def check(self) -> None:
        """Check types, shapes and devices."""
        outputs = {f"out[{i}]": _like(one, self.x) for i, one in reversed([*enumerate(self.out)])}
        launching.check(_wanted(self.x, self.weight, residual=self.residual) | outputs)

    def run(self, backend: str) -> None:
        """Launch the kernel, or ask the oracle."""
        x, residual, weight = self.x, self.residual, self.weight
        if backend != "reference":
            return _launch(backend, self)
        wide = None if weight is None else weight.double()
        add = backends.oracle("add_rmsnorm").add_rmsnorm
        for target, source in zip(
            self.out, add(x.double(), residual.double(), wide, self.eps, torch.bfloat16), strict=True
        ):
            target.copy_(source)
        return None


def _like(y: Tensor, x: Tensor) -> tuple:
    return y, torch.bfloat16, tuple(x.shape)


def _wanted(x: Tensor, weight: Tensor | None, **others: Tensor) -> dict[str, tuple]:
    """What `launching.check` is to find of the inputs; ``others`` are like x."""
    if x.dim() != 2 or not 0 < x.shape[1] <= MAX_D or x.shape[1] % COLUMNS:
        raise ArgumentError("x.shape", tuple(x.shape), f"[T, d] with d a multiple of {COLUMNS}, at most {MAX_D}")
    like = {name: _like(one, x) for name, one in others.items()}
    return {"x": _like(x, x), **like, "weight": (weight, torch.float32, tuple(x.shape[1:]))}


def _launch(backend: str, call: Norm | AddNorm) -> None:
    rows, d = call.x.shape
    if rows:
        settings = {"d": d, "add": isinstance(call, AddNorm), "weighted": call.weight is not None}
        launching.launch(backend, RmsNorm, settings, arguments.fake_args, arguments.launch_args, call)
