"""Normalise rows and quantise them: `dsv4::rmsnorm_quant`. After an addition: `dsv4::add_rmsnorm_quant`.

    h = bf16(x + residual)                        `add_rmsnorm_quant` only, written too
    y = bf16(weight * h / sqrt(mean(h^2) + eps)); codes, scales = recipe(y)

One launch. Outputs are written in place; the host reads nothing. Bits are those of `rmsnorm` or `add_rmsnorm`, then
`quantize`, but y does not pass through memory. NVFP4 takes a calibrated global scale: one derived from y would need all
rows first. The oracles are `dsv4lib.reference.rmsnorm`, `.add_rmsnorm` and `.quantize`.

    qr = rmsnorm_quant(x, q_norm, "fp8", swizzled=True)
    q  = linear(Operand(qr.codes, qr.scales), wq_b, mode="mxfp8")
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common import launching
from dsv4lib.ops.common.schema import op
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.quantize.config import RECIPES, ROW_RECIPES, has_fp4_conversion
from dsv4lib.ops.quantize.op import output_shapes
from dsv4lib.ops.rmsnorm.kernel import MAX_D
from dsv4lib.ops.rmsnorm_quant import arguments
from dsv4lib.ops.rmsnorm_quant.kernel import RmsnormQuant


class Normed(NamedTuple):
    """Rows that were normalised and quantised.

    Attributes:
        codes: uint8 [T, d] (E4M3) or [T, d/2] (E2M1, low nibble first).
        scales: uint8 [T, d/block], row-major; or the bytes of the 128x4 image (`formats.scale_swizzle`).
        y: bf16 [T, d], or None where it was not asked for.
    """

    codes: Tensor
    scales: Tensor
    y: Tensor | None = None


class AddNormed(NamedTuple):
    """What `add_rmsnorm_quant` writes: h bf16 [T, d], the residual stream. The rest as in `Normed`."""

    h: Tensor
    codes: Tensor
    scales: Tensor
    y: Tensor | None = None


@typed
def rmsnorm_quant(
    x: Tensor,
    weight: Tensor | None,
    recipe: str,
    *,
    eps: float = 1e-6,
    global_scale: Tensor | None = None,
    keep: bool = False,
    swizzled: bool = False,
    out: Normed | None = None,
    backend: str = "auto",
) -> Normed:
    """Normalise rows and quantise them.

    Args:
        x: bf16 [T, d], d a multiple of the recipe's block up to 8192, rows on 16 bytes.
        weight: fp32 [d]; None: ones.
        recipe: "fp8" (1x128), "mxfp8", "mxfp4" or "nvfp4".
        eps: added to the mean of squares.
        global_scale: fp32 [1] of nvfp4, else None.
        keep: y is wanted, too. Ignored with ``out``.
        swizzled: scales in the 128x4 blocks of `formats.scale_swizzle`, as `linear` reads them (fp8 with mode "mxfp8");
            else row-major.
        out: to write into; None: new tensors.
        backend: "native", "emulator", "reference", or "auto": native, else emulator.

    Returns:
        out.

    Raises:
        ArgumentError: an argument of the wrong type, shape, stride, device or (on the CPU) value.
        BackendUnavailable: the back end cannot run here.
    """
    out = Normed(*_new(x, recipe, keep, swizzled)) if out is None else out
    launching.check_eps(eps=eps)
    Norm.op(x, weight, global_scale, out, recipe, eps, swizzled, backend)
    return out


@typed
def add_rmsnorm_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    recipe: str,
    *,
    eps: float = 1e-6,
    global_scale: Tensor | None = None,
    keep: bool = False,
    swizzled: bool = False,
    out: AddNormed | None = None,
    backend: str = "auto",
) -> AddNormed:
    """Add rows to the residual stream, normalise the sum, quantise.

    Args:
        residual: bf16 [T, d], rows on 16 bytes.
        x, weight, recipe, eps, global_scale, keep, swizzled, out, backend: as in `rmsnorm_quant`, which also says what
            is raised.

    Returns:
        out.
    """
    out = AddNormed(torch.empty_like(x), *_new(x, recipe, keep, swizzled)) if out is None else out
    launching.check_eps(eps=eps)
    AddNorm.op(x, residual, weight, global_scale, out, recipe, eps, swizzled, backend)
    return out


def _new(x: Tensor, recipe: str, keep: bool, swizzled: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Make codes, scales, and y where it is kept."""
    if x.dim() != 2:
        raise ArgumentError("x", tuple(x.shape), "a tensor [T, d]")
    if recipe not in ROW_RECIPES:
        raise ArgumentError("recipe", recipe, "one of " + ", ".join(ROW_RECIPES))
    shapes = output_shapes(recipe, *x.shape, swizzled=swizzled)
    codes, scales = (torch.empty(shape, dtype=torch.uint8, device=x.device) for shape in shapes)
    return codes, scales, x.new_empty(x.shape) if keep else None


@op("rmsnorm_quant", mutates=("out",))
class Norm(NamedTuple):
    """A call of `rmsnorm_quant`."""

    x: Tensor
    weight: Tensor | None
    global_scale: Tensor | None
    out: Normed
    recipe: str
    eps: float
    swizzled: bool
    backend: str

    def check(self) -> None:
        """Check types, shapes and devices."""
        launching.check(_wanted(self))

    def check_values(self) -> None:
        """Check the global scale."""
        _check_scale(self.global_scale)

    def run(self, backend: str) -> None:
        """Launch the kernel, or ask the oracles."""
        _run(self, backend)


@op("add_rmsnorm_quant", mutates=("out",))
class AddNorm(NamedTuple):
    """A call of `add_rmsnorm_quant`."""

    x: Tensor
    residual: Tensor
    weight: Tensor | None
    global_scale: Tensor | None
    out: AddNormed
    recipe: str
    eps: float
    swizzled: bool
    backend: str

    def check(self) -> None:
        """Check types, shapes and devices."""
        wanted, like = _wanted(self), (torch.bfloat16, tuple(self.x.shape))
        added = {"residual": (self.residual, *like), "out.h": (self.out.h, *like)}
        launching.check({"x": wanted["x"], **added, **wanted})

    def check_values(self) -> None:
        """Check the global scale."""
        _check_scale(self.global_scale)

    def run(self, backend: str) -> None:
        """Launch the kernel, or ask the oracles."""
        _run(self, backend)


def _wanted(call: Norm | AddNorm) -> dict[str, tuple]:
    """List what both ops have, for `launching.check`.

    Raises:
        ArgumentError: an unknown recipe, a width that it has no blocks for, a global scale that it does not take.
    """
    x, bf16, u8 = call.x, torch.bfloat16, torch.uint8
    if call.recipe not in ROW_RECIPES:
        raise ArgumentError("recipe", call.recipe, "one of " + ", ".join(ROW_RECIPES))
    block = RECIPES[call.recipe].block
    if x.dim() != 2 or not 0 < x.shape[1] <= MAX_D or x.shape[1] % block:
        raise ArgumentError("x.shape", tuple(x.shape), f"[T, d] with d a multiple of {block}, at most {MAX_D}")
    if (call.global_scale is None) == (call.recipe == "nvfp4"):
        allowed = "an fp32 tensor [1]" if call.recipe == "nvfp4" else f"None for {call.recipe}"
        raise ArgumentError("global_scale", call.global_scale, allowed)
    codes, scales = output_shapes(call.recipe, *x.shape, swizzled=call.swizzled)
    return {
        "x": (x, bf16, tuple(x.shape)),
        "weight": (call.weight, torch.float32, tuple(x.shape[1:])),
        "global_scale": (call.global_scale, torch.float32, (1,)),
        "out.codes": (call.out.codes, u8, codes),
        "out.scales": (call.out.scales, u8, scales),
        "out.y": (call.out.y, bf16, tuple(x.shape)),
    }


def _check_scale(scale: Tensor | None) -> None:
    if scale is not None and not 0 < float(scale) < float("inf"):
        raise ArgumentError("global_scale", float(scale), "positive and finite")


def _run(call: Norm | AddNorm, backend: str) -> None:
    if len(call.x) == 0:
        return
    if backend == "reference":
        return _reference(call)
    settings: dict[str, Any] = {"recipe": call.recipe, "d": call.x.shape[1], "weighted": call.weight is not None}
    settings |= {"keep": call.out.y is not None, "fp4_conversion": has_fp4_conversion(launching.arch(backend))}
    settings |= {"swizzled": call.swizzled, "add": isinstance(call, AddNorm)}
    launching.launch(backend, RmsnormQuant, settings, arguments.fake_args, arguments.launch_args, call)


def _reference(call: Norm | AddNorm) -> None:
    """Ask the oracles: norm in fp64, then quantise y after its rounding to bf16."""
    x, weight = call.x.double(), None if call.weight is None else call.weight.double()
    if isinstance(call, AddNorm):
        add = backends.oracle("add_rmsnorm").add_rmsnorm
        h, y = add(x, call.residual.double(), weight, call.eps, torch.bfloat16)
        call.out.h.copy_(h)
    else:
        y = backends.oracle("rmsnorm").rmsnorm(x, weight, call.eps)
    y = y.bfloat16()
    if call.out.y is not None:
        call.out.y.copy_(y)
    options = {"global_scale": call.global_scale, "swizzled": call.swizzled}
    codes, scales, _ = backends.oracle("quantize").quantize(y, call.recipe, **options)
    call.out.codes.copy_(codes[0])
    call.out.scales.copy_(scales[0])
