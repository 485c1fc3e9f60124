"""Add rows to the residual stream, normalise and quantise them, as a torch op.

    h = bf16(x + residual); y = bf16(weight * h / sqrt(mean(h^2) + eps)); codes, scales = recipe(y)

One launch of `dsv4::add_rmsnorm_quant`. Outputs are written in place; the host reads nothing. Bits are those of
`add_rmsnorm` and `quantize`, but y does not pass through memory. NVFP4 takes a calibrated global scale: one derived
from y would need all rows first. The oracles are `dsv4lib.reference.add_rmsnorm` and `.quantize`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.add_rmsnorm_quant import arguments
from dsv4lib.ops.add_rmsnorm_quant.kernel import AddRmsnormQuant
from dsv4lib.ops.common import launching
from dsv4lib.ops.common.schema import op
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.quantize.config import RECIPES, ROW_RECIPES, has_fp4_conversion
from dsv4lib.ops.quantize.op import output_shapes
from dsv4lib.ops.rmsnorm.kernel import MAX_D


class Normed(NamedTuple):
    """What the op writes.

    Attributes:
        h: bf16 [T, d], the residual stream.
        codes: uint8 [T, d] (E4M3) or [T, d/2] (E2M1, low nibble first).
        scales: uint8 [T, d/block], row-major; or the bytes of the 128x4 image (`formats.scale_swizzle`).
        y: bf16 [T, d], or None where it was not asked for.
    """

    h: Tensor
    codes: Tensor
    scales: Tensor
    y: Tensor | None = None


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
    out: Normed | None = None,
    backend: str = "auto",
) -> Normed:
    """Add rows to the residual stream, norm the sum, quantise.

    Args:
        x, residual: bf16 [T, d], d a multiple of the recipe's block up to 8192, rows on 16 bytes.
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
    if x.dim() != 2:
        raise ArgumentError("x", tuple(x.shape), "a tensor [T, d]")
    if recipe not in ROW_RECIPES:
        raise ArgumentError("recipe", recipe, "one of " + ", ".join(ROW_RECIPES))
    if out is None:
        codes, scales = (
            torch.empty(shape, dtype=torch.uint8, device=x.device)
            for shape in output_shapes(recipe, *x.shape, swizzled=swizzled)
        )
        out = Normed(torch.empty_like(x), codes, scales, torch.empty_like(x) if keep else None)
    launching.check_eps(eps=eps)
    Call.op(x, residual, weight, global_scale, out, recipe, eps, swizzled, backend)
    return out


@op("add_rmsnorm_quant", mutates=("out",))
class Call(NamedTuple):
    """A call of `add_rmsnorm_quant`."""

    x: Tensor
    residual: Tensor
    weight: Tensor | None
    global_scale: Tensor | None
    out: Normed
    recipe: str
    eps: float
    swizzled: bool
    backend: str

    def check(self) -> None:
        """Check types, shapes and devices."""
        x, bf16, u8 = self.x, torch.bfloat16, torch.uint8
        if self.recipe not in ROW_RECIPES:
            raise ArgumentError("recipe", self.recipe, "one of " + ", ".join(ROW_RECIPES))
        block = RECIPES[self.recipe].block
        if x.dim() != 2 or not 0 < x.shape[1] <= MAX_D or x.shape[1] % block:
            raise ArgumentError("x.shape", tuple(x.shape), f"[T, d] with d a multiple of {block}, at most {MAX_D}")
        if (self.global_scale is None) == (self.recipe == "nvfp4"):
            allowed = "an fp32 tensor [1]" if self.recipe == "nvfp4" else f"None for {self.recipe}"
            raise ArgumentError("global_scale", self.global_scale, allowed)
        codes, scales = output_shapes(self.recipe, *x.shape, swizzled=self.swizzled)
        launching.check(
            {
                "x": (x, bf16, tuple(x.shape)),
                "residual": (self.residual, bf16, tuple(x.shape)),
                "weight": (self.weight, torch.float32, tuple(x.shape[1:])),
                "global_scale": (self.global_scale, torch.float32, (1,)),
                "out.h": (self.out.h, bf16, tuple(x.shape)),
                "out.codes": (self.out.codes, u8, codes),
                "out.scales": (self.out.scales, u8, scales),
                "out.y": (self.out.y, bf16, tuple(x.shape)),
            }
        )

    def check_values(self) -> None:
        """Check the global scale."""
        if self.global_scale is not None and not 0 < float(self.global_scale) < float("inf"):
            raise ArgumentError("global_scale", float(self.global_scale), "positive and finite")

    def run(self, backend: str) -> None:
        """Launch the kernel, or ask the oracle."""
        if len(self.x) == 0:
            return
        if backend == "reference":
            return _reference(self)
        settings = {"recipe": self.recipe, "d": self.x.shape[1], "weighted": self.weight is not None}
        settings |= {"keep": self.out.y is not None, "fp4_conversion": has_fp4_conversion(launching.arch(backend))}
        settings["swizzled"] = self.swizzled
        given = *self[:4], self.out.h, self.out.y, self.out.codes, self.out.scales, self.eps
        launching.launch(backend, AddRmsnormQuant, settings, arguments.fake_args, arguments.launch_args, *given)


def _reference(call: Call) -> None:
    """Ask the oracles, y rounded to bf16 in between."""
    weight = None if call.weight is None else call.weight.double()
    add = backends.oracle("add_rmsnorm").add_rmsnorm
    h, y = add(call.x.double(), call.residual.double(), weight, call.eps, torch.bfloat16)
    call.out.h.copy_(h)
    y = y.bfloat16()
    if call.out.y is not None:
        call.out.y.copy_(y)
    options = {"global_scale": call.global_scale, "swizzled": call.swizzled}
    codes, scales, _ = backends.oracle("quantize").quantize(y, call.recipe, **options)
    call.out.codes.copy_(codes[0])
    call.out.scales.copy_(scales[0])
