"""Groups of tokens and experts that make a wrong grouped GEMM visible.

Rows of tokens and features of weights differ in scale, so none stands in for another; every expert has factors of its
own. Rows after a group's last token hold values, and the output holds `SENTINEL` wherever nothing is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dsv4lib.formats import e2m1, e4m3, fp8_block, mxfp4, nvfp4, scale_swizzle, ue8m0
from dsv4lib.ops.moe_gemm.arguments import BLOCK_ROWS, Call
from dsv4lib.ops.moe_gemm.config import Config

SENTINEL = 119  # of every byte of an output
LIMIT = 10.0  # DSV4's swiglu_limit
PAST_END = 20.0  # rows after a group's last token: larger than most, yet they do not take all of the range
SPREAD = 4.3  # of the sums, times alpha: some reach the clamp


@dataclass
class Case:
    """A call, and its operands as numbers.

    Attributes:
        call: tensors for the kernel.
        x, w: the dequantised operands [R, K], [E, N, K] in fp64, without alpha.
        step: K of an MMA.
    """

    call: Call
    x: torch.Tensor
    w: torch.Tensor
    step: int

    def rows(self) -> torch.Tensor:
        """Numbers of the rows that hold tokens."""
        pairs = zip(self.call.offsets.tolist(), self.call.counts.tolist(), strict=True)
        return torch.cat([torch.arange(o, o + c) for o, c in pairs])


def _quantised(values: torch.Tensor, bits: int, block: int) -> tuple[torch.Tensor, Any, torch.Tensor]:
    """Return (codes, scale bytes or None, the numbers they stand for in fp64, without a global scale)."""
    if block == 0:
        codes = values.to(torch.bfloat16)
        return codes, None, codes.double()
    if block == 16:
        q = nvfp4.quantize(values)
        numbers = e2m1.decode(e2m1.unpack(q.packed), torch.float64)
        return q.packed, q.scales, numbers * e4m3.decode(q.scales, torch.float64).repeat_interleave(block, -1)
    if bits == 4:
        q = mxfp4.quantize(values)
        return q.packed, q.scales, mxfp4.dequantize(q, torch.float64)
    q = fp8_block.quantize_activation(values, block)
    numbers = e4m3.decode(q.codes, torch.float64) * ue8m0.decode(q.scales, torch.float64).repeat_interleave(block, -1)
    return q.codes, q.scales, numbers


def case(kernel: Config, counts: list[int], features: int, k: int, seed: int = 0, max_rows: int = 0) -> Case:
    """Groups of ``counts`` tokens, ``features`` = N of the weights, ``k`` = K.

    Args:
        kernel: its options say formats and which factors there are.
        max_rows: of a group in the masked layout, a multiple of 128; 0: groups follow each other (contiguous layout).
    """
    generator = torch.Generator().manual_seed(seed)
    room = [max_rows or -(-n // BLOCK_ROWS) * BLOCK_ROWS for n in counts]
    offsets = torch.tensor([0, *room]).cumsum(0)
    rows, experts, m = max(int(offsets[-1]), 1), len(counts), kernel.mode
    x = (
        torch.randn(rows, k, generator=generator)
        * torch.logspace(-2, 2, rows, base=2.0)[torch.randperm(rows, generator=generator), None]
    )
    w = torch.randn(experts, features, k, generator=generator)
    w = w * torch.logspace(-1, 1, features, base=2.0)[torch.randperm(features, generator=generator), None]
    for o, n, space in zip(offsets.tolist(), counts, room, strict=False):
        x[o + n : o + space] = PAST_END
    x_codes, x_scales, x_numbers = _quantised(x, m.x_bits, m.block)
    w_codes, w_scales, w_numbers = _quantised(w, m.w_bits, m.block)
    call = Call(x_codes, w_codes, torch.empty(0))
    call.offsets, call.counts = offsets[:-1].to(torch.int32), torch.tensor(counts, dtype=torch.int32)
    call.limit = LIMIT
    if m.block:
        call.x_scales, call.w_scales = scale_swizzle.swizzle(x_scales), scale_swizzle.swizzle(w_scales)
    made = Case(call, x_numbers, w_numbers, m.k)
    size = x_numbers[made.rows()].square().mean().sqrt() * w_numbers.square().mean().sqrt() * k**0.5  # of a sum
    own = torch.logspace(0, 1, experts + 1, base=2.0)[:-1]
    if kernel.alpha:
        call.alpha = SPREAD / float(size) * own
        if kernel.swiglu:
            call.alpha_up = 2 * call.alpha.flip(0)
    if kernel.routed:
        call.routing = 0.1 + torch.rand(rows, generator=generator)
    outputs(kernel, call, rows, features)
    if kernel.out == "nvfp4":
        call.out_global = LIMIT * LIMIT / nvfp4.RANGE * (0.2 + 0.2 * own)  # some blocks of the first saturate
    return made


def outputs(kernel: Config, call: Call, rows: int, features: int) -> None:
    """New outputs, every byte `SENTINEL`."""
    width = features // 2 if kernel.swiglu else features
    size = {"fp32": 4 * width, "bf16": 2 * width, "mxfp8": width, "nvfp4": width // 2}[kernel.out]
    call.out = torch.full((rows, size), SENTINEL, dtype=torch.uint8)
    if not kernel.quantised:
        call.out = call.out.view(torch.bfloat16 if kernel.out == "bf16" else torch.float32)
        return
    columns = width // (16 if kernel.out == "nvfp4" else 32)
    call.out_scales = torch.full((scale_swizzle.swizzled_bytes(rows, columns),), SENTINEL, dtype=torch.uint8)
