"""Run `linear` on a Hopper: FP8, or bf16. FP8 has a scale for 128 of K of a token and for 128 x 128 of the weights.

    y = linear((codes, scales), (w, w_scales), mode="fp8_block")
    y = linear((x, None), (w, None), mode="bf16")

Weights and scales are those of DSV4's checkpoints; activations as `quantize(x, "fp8")`, `add_rmsnorm_quant(.., "fp8")`
and `inv_rope_quant` (row-major) write them. Mode "fp8_block" is a Hopper's; Blackwell computes the same numbers in mode
"mxfp8" (`linear.mxfp8_of`). Mode "bf16" is both's; a Hopper has no alpha, no SwiGLU and no output but bf16 and fp32.
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
from dsv4lib.ops.common.splits import HOPPER_SM_COUNT
from dsv4lib.ops.linear.sm90 import arguments
from dsv4lib.ops.linear.sm90.config import BLOCK, OUTPUTS, PIECE, plan
from dsv4lib.ops.linear.sm90.kernel import HopperLinear
from dsv4lib.ops.moe_gemm.operands import Operand, check_devices, new_output

ARCHS = ("sm_90a",)
MODE = "fp8_block"
SCALES = {torch.uint8: "e8m0", torch.float32: "fp32"}
OUT = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_BYTES = (torch.float8_e4m3fn, torch.float8_e8m0fnu)


def here(mode: str, backend: str) -> bool:
    """Tell whether a call of `linear` is for this kernel. It follows from its mode, or from the back end's GPU."""
    return mode == MODE or (mode == "bf16" and launching.arch(backend) in ARCHS)


def linear_hopper(
    x: Operand, w: Operand, mode: str, unwanted: dict[str, Any], out_format: str, out: Operand | None, backend: str
) -> Operand:
    """Call the op; arguments as of `linear`, whose other ones are ``unwanted``.

    Raises:
        ArgumentError: see `linear`.
    """
    where = f"in mode {mode} on a Hopper"
    if out_format not in OUTPUTS:
        raise ArgumentError("out_format", out_format, f"one of {', '.join(OUTPUTS)} {where}")
    for name, value in unwanted.items():
        if value is not None and value is not False:
            raise ArgumentError(name, "given", f"not {where}")
    for name, one in (("x.scales", x.scales), ("w.scales", w.scales)):
        if (one is None) == (mode == MODE):
            raise ArgumentError(name, None if one is None else "given", f"{'' if one is None else 'not '}given {where}")
    if x.codes.dim() != w.codes.dim() or x.codes.dim() not in (2, 3):
        raise ArgumentError("x, w", (tuple(x.codes.shape), tuple(w.codes.shape)), "[T, K], [N, K] or both with [G, ..]")
    if out is None:
        out = new_output(x.codes, w.codes.shape[-2], out_format)
    given = (t.view(torch.uint8) if t is not None and t.dtype in _BYTES else t for t in (*x, *w))
    Call.op(*given, out.codes, out_format, backend)
    return out


@op("linear_hopper", mutates=("out",), archs=ARCHS)
@dataclass(kw_only=True)
class Call:
    """A call of `linear` on a Hopper, with or without a dimension of groups. FP8 comes with scales, bf16 without."""

    x: Tensor
    x_scales: Tensor | None
    w: Tensor
    w_scales: Tensor | None
    out: Tensor
    out_format: str
    backend: str

    def check(self) -> None:
        """Check types, shapes and devices."""
        check_devices(vars(self))
        groups, (tokens, k), features = self.x.shape[:-2], self.x.shape[-2:], self.w.shape[-2]
        blocks, scaled = -(-k // BLOCK), self.x_scales is not None
        operands, of_piece = (torch.uint8, PIECE) if scaled else (torch.bfloat16, PIECE // 2)
        if k % of_piece or k == 0:
            raise ArgumentError("K", k, f"a multiple of {of_piece} above 0")
        wanted = {
            "x": (self.x, operands, (*groups, tokens, k)),
            "w": (self.w, operands, (*groups, features, k)),
            "out": (
                self.out,
                torch.bfloat16 if self.out_format == "bf16" else torch.float32,
                (*groups, tokens, features),
            ),
        }
        if scaled:
            for name, scales in (("x_scales", self.x_scales), ("w_scales", self.w_scales)):
                if scales is None or scales.dtype not in SCALES:
                    found = None if scales is None else scales.dtype
                    raise ArgumentError(f"{name}.dtype", found, "uint8 (E8M0 bytes) or float32")
            wanted["x_scales"] = (self.x_scales, self.x_scales.dtype, (*groups, tokens, blocks))
            wanted["w_scales"] = (self.w_scales, self.w_scales.dtype, (*groups, -(-features // BLOCK), blocks))
        launching.check(wanted)

    def run(self, backend: str) -> None:
        """Launch the kernel, or ask the oracle."""
        names = "x", "x_scales", "w", "w_scales", "out"
        given = {name: getattr(self, name) for name in names}
        grouped = {n: t if t is None or t.dim() == 3 else t[None] for n, t in given.items()}
        launch(Grouped(**grouped), self.out_format, backend)


class Grouped:
    """Tensors of a call with a dimension of groups."""

    def __init__(self, x: Tensor, x_scales: Tensor | None, w: Tensor, w_scales: Tensor | None, out: Tensor):
        self.x, self.x_scales, self.w, self.w_scales, self.out = x, x_scales, w, w_scales, out

    def bytes(self) -> Grouped:
        """The same with operands as bytes [.., K] as the kernel reads them."""
        x, w = (bytes_of(name, t) for name, t in (("x", self.x), ("w", self.w)))
        return Grouped(x, self.x_scales, w, self.w_scales, self.out)


def bytes_of(name: str, operand: Tensor) -> Tensor:
    """View rows of elements as rows of bytes.

    Raises:
        ArgumentError: elements of a row that are apart.
    """
    if operand.dtype == torch.uint8:
        return operand
    if operand.stride(-1) != 1:
        raise ArgumentError(f"{name}.stride", tuple(operand.stride()), "1 in the last dimension")
    return operand.view(torch.uint8)


def launch(call: Grouped, out_format: str, backend: str) -> None:
    """Check and launch a call with a dimension of groups."""
    scaled, call = call.x_scales is not None, call.bytes()
    (groups, tokens, k), features = call.x.shape, call.w.shape[1]
    if not (groups and tokens and features):
        return
    sms = launching.sm_count(call.x.device) if backend == "native" else HOPPER_SM_COUNT
    settings = plan(groups, tokens, features, k, sms)._asdict() | {"out": out_format}
    if scaled:
        settings["x_scales"], settings["w_scales"] = SCALES[call.x_scales.dtype], SCALES[call.w_scales.dtype]
    else:
        settings["operands"] = "bf16"
    grid = settings.pop("grid")
    kernel = HopperLinear(**settings)
    given = arguments.launch_args(kernel, call, grid, launching.stream(backend, call.x))  # refused: not compiled
    if backend == "reference":
        call.out.copy_(_truth(call, scaled))
        return
    _, code = compile_cache.default().get(HopperLinear, settings, arguments.fake_args, launching.arch(backend, ARCHS))
    launching.enqueue(backend, code, given)


def _truth(call: Grouped, scaled: bool) -> Tensor:
    """Ask the oracle, in fp64."""
    oracle = backends.oracle("linear")
    if not scaled:
        return oracle.linear(*(t.view(torch.bfloat16).double() for t in (call.x, call.w)))
    x = fp8_block.FP8Tensor(call.x, call.x_scales, (1, BLOCK))
    return oracle.linear_fp8(x, fp8_block.FP8Tensor(call.w, call.w_scales, (BLOCK, BLOCK)))
