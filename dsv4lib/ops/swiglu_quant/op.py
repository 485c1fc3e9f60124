"""Gate rows and quantise them to FP8, as a torch op.

`swiglu_quant` calls `torch.ops.dsv4.swiglu_quant`, which writes in place: one launch, no value of a tensor read by the
host. The oracle is `dsv4lib.reference.swiglu_quant`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common import compile_cache, launching
from dsv4lib.ops.common.schema import op
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.moe_gemm.operands import Operand
from dsv4lib.ops.quantize.config import RECIPES
from dsv4lib.ops.swiglu_quant import arguments
from dsv4lib.ops.swiglu_quant.kernel import SwigluQuant

BLOCK = RECIPES["fp8"].block
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@typed
def swiglu_quant(
    x: Tensor, *, limit: float = 10.0, out: tuple[Tensor, Tensor] | None = None, backend: str = "auto"
) -> Operand:
    """Gate rows and quantise h in blocks of 128. h = silu(min(gate, limit)) * clip(up, -limit, limit) in fp32.

    Args:
        x: fp32 or bf16 [T, 2 I], gate then up, I a multiple of 128, rows on 16 bytes.
        limit: of the clamp, above 0; infinite: none.
        out: uint8 codes [T, I] (E4M3) and scales [T, I / 128] (E8M0) to write into; None: new ones.
        backend: "native", "emulator", "reference", or "auto": native, else emulator.

    Returns:
        codes and scales, as `linear` reads them in mode "fp8_block".

    Raises:
        ArgumentError: an argument of the wrong type, shape, stride, value or device.
        BackendUnavailable: the back end cannot run here.
    """
    if out is None:
        if x.dim() != 2:
            raise ArgumentError("x.shape", tuple(x.shape), f"[T, 2 I], I a multiple of {BLOCK}")
        rows, width = len(x), x.shape[1] // 2
        sizes = (rows, width), (rows, width // BLOCK)
        out = tuple(torch.empty(size, dtype=torch.uint8, device=x.device) for size in sizes)
    Call.op(x, *out, limit, backend)
    return Operand(*out)


@op("swiglu_quant", mutates=("codes", "scales"))
class Call(NamedTuple):
    """A call of `swiglu_quant`."""

    x: Tensor
    codes: Tensor
    scales: Tensor
    limit: float
    backend: str

    def check(self) -> None:
        """Check types, shapes, devices and the limit."""
        x, u8 = self.x, torch.uint8
        if x.dtype not in DTYPES:
            raise ArgumentError("x.dtype", x.dtype, "float32 or bfloat16")
        if x.dim() != 2 or x.shape[1] % (2 * BLOCK) or not x.shape[1]:
            raise ArgumentError("x.shape", tuple(x.shape), f"[T, 2 I], I a multiple of {BLOCK}")
        if math.isnan(self.limit) or self.limit <= 0:
            raise ArgumentError("limit", self.limit, "above 0")
        rows, width = len(x), x.shape[1] // 2
        shapes = {"codes": (self.codes, u8, (rows, width)), "scales": (self.scales, u8, (rows, width // BLOCK))}
        launching.check({"x": (x, x.dtype, tuple(x.shape)), **shapes})

    def run(self, backend: str) -> None:
        """Launch the kernel, or ask the oracle."""
        if self.x.numel() == 0:
            return
        if backend == "reference":
            codes, scales = backends.oracle("swiglu_quant").swiglu_quant(self.x, self.limit)
            self.codes.copy_(codes)
            self.scales.copy_(scales)
            return
        arch, settings = launching.arch(backend), {"dtype": DTYPES[self.x.dtype]}
        kernel, code = compile_cache.default().get(SwigluQuant, settings, arguments.fake_args, arch)
        launching.enqueue(backend, code, arguments.launch_args(kernel, self, launching.stream(backend, self.x)))
