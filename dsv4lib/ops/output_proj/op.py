"""Project groups of heads of attention, each with weights of its own: a torch op.

    u[t, g] = wo_a[g] @ concat(heads of group g of o[t])           8 heads of 512 a group in DSV4

One launch of the kernel of `linear`: a group is a range of columns of o and of u, so nothing is copied. The inverse
rope comes before (`ops.fmha` applies it to its output), and `wo_b`, a `linear` over u, after.

Source: DSV4 paper, grouped output projection; the oracle is `dsv4lib.reference.output_proj.grouped`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common.schema import op
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.linear import op as linear
from dsv4lib.ops.linear.sm90 import op as hopper
from dsv4lib.ops.moe_gemm import op as moe_gemm
from dsv4lib.ops.moe_gemm.op import Operand, Pair


@typed
def output_proj(
    o: Operand | Pair, w: Operand | Pair, *, mode: str = "bf16", out: Tensor | None = None, backend: str = "auto"
) -> Tensor:
    """Project groups of heads.

    Args:
        o: [T, H * D], heads of a group next to each other; or [T, H, D], heads side by side. Scales (not of bf16): an
            image a group, [G, bytes], of [T, H * D / G], as `inv_rope_quant` with layout "swizzled" writes them.
            Of mode "fp8_block" rows, [T, H * D / 128] or [T, H, D / 128], as its layout "rowmajor" has them.
        w: wo_a, [G, R, H * D / G].
        mode: formats: "bf16", "mxfp8" (FP8: `linear.mxfp8_of`), "nvfp4", "w4a8"; or "fp8_block" (FP8 on a Hopper).
        out: bf16 [T, G * R] to write into; None: new.
        backend: as for `linear`, which also says what is raised.

    Returns:
        u, bf16 [T, G * R].
    """
    if mode != hopper.MODE:
        moe_gemm.check_formats(mode, "bf16")
    o, w = Operand(*o), Operand(*w)
    if o.codes.dim() == 3:
        o = o._replace(codes=_side_by_side(o.codes))
    groups = w.codes.shape[0] if w.codes.dim() == 3 else 0
    if o.codes.dim() != 2 or groups == 0 or o.codes.shape[1] % groups:
        found = tuple(o.codes.shape), tuple(w.codes.shape)
        raise ArgumentError("o, w", found, "[T, H * D] or [T, H, D], [G, R, H * D / G]")
    if out is None:
        width = w.codes.shape[0] * w.codes.shape[1]
        out = torch.empty(o.codes.shape[0], width, dtype=torch.bfloat16, device=o.codes.device)
    if hopper.here(mode, backend):
        _on_a_hopper(o, w, mode, out, backend)
    else:
        Call.op(*o, *w, out, mode, backend)
    return out


def _on_a_hopper(o: Operand, w: Operand, mode: str, out: Tensor, backend: str) -> None:
    """Make groups a dimension of views, also of the scales, which lie beside each other as the heads do."""
    groups, rows, k = w.codes.shape
    scales = o.scales if o.scales is None or o.scales.dim() == 2 else o.scales.flatten(1)
    if mode == hopper.MODE and (
        scales is None or scales.shape != (o.codes.shape[0], groups * k // hopper.BLOCK) or k % hopper.BLOCK
    ):
        found = None if o.scales is None else tuple(o.scales.shape)
        raise ArgumentError("o.scales", found, f"a scale for {hopper.BLOCK} of the {groups * k} columns of every row")
    if tuple(out.shape) != (o.codes.shape[0], groups * rows):
        raise ArgumentError("out.shape", tuple(out.shape), (o.codes.shape[0], groups * rows))
    x, scales, u = (None if t is None else t.unflatten(1, (groups, -1)).transpose(0, 1) for t in (o.codes, scales, out))
    linear.linear((x, scales), w, mode=mode, out=(u, None), backend=backend)


def _side_by_side(codes: Tensor) -> Tensor:
    """View [T, H, D] as [T, H * D], never a copy."""
    tokens, heads, dim = codes.shape
    if heads > 1 and dim and (codes.stride(1) != dim * codes.stride(2) or codes.stride(2) != 1):
        raise ArgumentError("o.stride()", codes.stride(), f"heads side by side: strides {dim} and 1")
    return codes.view(tokens, heads * dim)


@op("output_proj", mutates=("out",), names={"formats": "mode"}, archs=moe_gemm.ARCHS)
class Call(NamedTuple):
    """A call of `output_proj`, o [T, H * D]."""

    o: Tensor
    o_scales: Tensor | None
    w: Tensor
    w_scales: Tensor | None
    out: Tensor
    formats: str  # `mode`: torch.compile has an argument of that name
    backend: str

    def check(self) -> None:
        """Check the output's shape, and devices."""
        o, w, out = self.o, self.w, self.out
        if tuple(out.shape) != (o.shape[0], w.shape[0] * w.shape[1]):
            raise ArgumentError("out.shape", tuple(out.shape), (o.shape[0], w.shape[0] * w.shape[1]))
        moe_gemm.check_devices(self._asdict())

    def run(self, backend: str) -> None:
        """Make groups a dimension, then launch `linear`."""
        x, u = (t.unflatten(1, (self.w.shape[0], -1)).transpose(0, 1) for t in (self.o, self.out))
        scales = {"x_scales": self.o_scales, "w_scales": self.w_scales}
        flags = {"formats": self.formats, "out_format": "bf16", "swiglu": False, "backend": backend}
        try:
            linear.launch(linear.Call(x, self.w, u, **scales, **flags), backend)
        except ArgumentError as error:  # what `linear` calls x is o here
            name = "o" + error.name.removeprefix("x") if error.name.startswith("x") else error.name
            raise ArgumentError(name, error.value, error.allowed) from None
