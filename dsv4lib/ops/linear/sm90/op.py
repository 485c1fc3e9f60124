"""Run `linear` in mode "fp8_block": FP8 with a scale for 128 of K of a token, and for 128 x 128 of the weights.

    y = linear((codes, scales), (w, w_scales), mode="fp8_block")

Weights and scales are those of DSV4's checkpoints; activations as `quantize(x, "fp8")`, `add_rmsnorm_quant(.., "fp8")`
and `inv_rope_quant` (row-major) write them. The kernel is a Hopper's; Blackwell computes the same numbers in mode
"mxfp8" (`linear.mxfp8_of`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import fp8_block
from dsv4lib.ops.common import compile_cache, launching
from dsv4lib.ops.common.schema import op
from dsv4lib.ops.linear.sm90 import arguments
from dsv4lib.ops.linear.sm90.config import BLOCK, OUTPUTS, PIECE, plan
from dsv4lib.ops.linear.sm90.kernel import LinearFp8
from dsv4lib.ops.moe_gemm.operands import Operand, check_devices, new_output

ARCHS = ("sm_90a",)
MODE = "fp8_block"
H200_SMS = 132  # that the emulator's launches are planned for
SCALES = {torch.uint8: "e8m0", torch.float32: "fp32"}
OUT = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_BYTES = (torch.float8_e4m3fn, torch.float8_e8m0fnu)


def linear_fp8(
    x: Operand, w: Operand, unwanted: dict[str, Any], out_format: str, out: Operand | None, backend: str
) -> Operand:
    """Call the op; arguments as of `linear`, whose other ones are ``unwanted``.

    Raises:
        ArgumentError: see `linear`.
    """
    if out_format not in OUTPUTS:
        raise ArgumentError("out_format", out_format, f"one of {', '.join(OUTPUTS)} in mode {MODE}")
    for name, value in unwanted.items():
        if value is not None and value is not False:
            raise ArgumentError(name, "given", f"not in mode {MODE}")
    for name, one in (("x.scales", x.scales), ("w.scales", w.scales)):
        if one is None:
            raise ArgumentError(name, None, "E8M0 bytes or fp32")
    if x.codes.dim() != w.codes.dim() or x.codes.dim() not in (2, 3):
        raise ArgumentError("x, w", (tuple(x.codes.shape), tuple(w.codes.shape)), "[T, K], [N, K] or both with [G, ..]")
    if out is None:
        out = new_output(x.codes, w.codes.shape[-2], out_format)
    tensors = (t.view(torch.uint8) if t.dtype in _BYTES else t for t in (*x, *w))
    Call.op(*tensors, out.codes, out_format, backend)
    return out


@op("linear_fp8", mutates=("out",), archs=ARCHS)
@dataclass(kw_only=True)
class Call:
    """A call of `linear` in mode "fp8_block", with or without a dimension of groups."""

    x: Tensor
    x_scales: Tensor
    w: Tensor
    w_scales: Tensor
    out: Tensor
    out_format: str
    backend: str

    def check(self) -> None:
        """Check types, shapes and devices."""
        check_devices(vars(self))
        groups, (tokens, k), features = self.x.shape[:-2], self.x.shape[-2:], self.w.shape[-2]
        blocks = -(-k // BLOCK)
        if k % PIECE or k == 0:
            raise ArgumentError("K", k, f"a multiple of {PIECE} above 0")
        for name, scales in (("x_scales", self.x_scales), ("w_scales", self.w_scales)):
            if scales.dtype not in SCALES:
                raise ArgumentError(f"{name}.dtype", scales.dtype, "uint8 (E8M0 bytes) or float32")
        u8, out = torch.uint8, torch.bfloat16 if self.out_format == "bf16" else torch.float32
        launching.check(
            {
                "x": (self.x, u8, (*groups, tokens, k)),
                "w": (self.w, u8, (*groups, features, k)),
                "x_scales": (self.x_scales, self.x_scales.dtype, (*groups, tokens, blocks)),
                "w_scales": (self.w_scales, self.w_scales.dtype, (*groups, -(-features // BLOCK), blocks)),
                "out": (self.out, out, (*groups, tokens, features)),
            }
        )

    def run(self, backend: str) -> None:
        """Launch the kernel, or ask the oracle."""
        names = "x", "x_scales", "w", "w_scales", "out"
        tensors = {name: getattr(self, name) for name in names}
        launch({n: t if t.dim() == 3 else t[None] for n, t in tensors.items()}, self.out_format, backend)


class Grouped:
    """Tensors of a call with a dimension of groups."""

    def __init__(self, x: Tensor, x_scales: Tensor, w: Tensor, w_scales: Tensor, out: Tensor):
        self.x, self.x_scales, self.w, self.w_scales, self.out = x, x_scales, w, w_scales, out


def launch(tensors: dict[str, Tensor], out_format: str, backend: str) -> None:
    """Check and launch a call with a dimension of groups."""
    call = Grouped(**tensors)
    (groups, tokens, k), features = call.x.shape, call.w.shape[1]
    if not (groups and tokens and features):
        return
    sms = launching.sm_count(call.x.device) if backend == "native" else H200_SMS
    chosen = plan(groups, tokens, features, k, sms)
    settings = chosen._asdict() | {"out": out_format, "x_scales": SCALES[call.x_scales.dtype]}
    settings["w_scales"] = SCALES[call.w_scales.dtype]
    grid = settings.pop("grid")
    kernel = LinearFp8(**settings)
    given = arguments.launch_args(kernel, call, grid, launching.stream(backend, call.x))  # refused: not compiled
    if backend == "reference":
        x = fp8_block.FP8Tensor(call.x, call.x_scales, (1, BLOCK))
        w = fp8_block.FP8Tensor(call.w, call.w_scales, (BLOCK, BLOCK))
        call.out.copy_(backends.oracle("linear").linear_fp8(x, w))
        return
    _, code = compile_cache.default().get(LinearFp8, settings, arguments.fake_args, launching.arch(backend, ARCHS))
    launching.enqueue(backend, code, given)
