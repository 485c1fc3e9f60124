"""Hold operands of the experts' GEMMs.

Their type, checks that both kernels share, new outputs, and what oracles need.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import e2m1, e4m3, fp8_block, nvfp4, scale_swizzle, ue8m0
from dsv4lib.ops.common import launching
from dsv4lib.ops.moe_gemm.arguments import BLOCK_ROWS
from dsv4lib.ops.moe_gemm.config import MODES, PLAIN


class Operand(NamedTuple):
    """Numbers in a small format.

    Attributes:
        codes: uint8, E2M1 packed by two (low nibble first) or E4M3; bf16 in mode "bf16".
        scales: their scales, swizzled (`formats.scale_swizzle`), uint8; None for bf16.
    """

    codes: Tensor
    scales: Tensor | None = None


Pair = tuple[Tensor, Tensor | None]  # what an `Operand` has, without the name


def check_devices(values: dict[str, Any]) -> None:
    """Check that all tensors are where the first is.

    Raises:
        ArgumentError: one is elsewhere.
    """
    first, x = next(iter(values.items()))
    for name, one in values.items():
        if isinstance(one, Tensor) and one.device != x.device:
            raise ArgumentError(f"{name}.device", str(one.device), f"that of {first}, {x.device}")


def check_global(scale: Tensor | None) -> None:
    """Check the global scales of an output, where reading them costs no wait.

    Raises:
        ArgumentError: one is not positive and finite.
    """
    if scale is not None and not bool((scale.isfinite() & (scale > 0)).all()):
        raise ArgumentError("out_global", scale.tolist(), "positive and finite")


def check_groups(offsets: Tensor, counts: Tensor, rows: int, align: int = BLOCK_ROWS) -> None:
    """Check that groups start at multiples of ``align``, lie apart and among the rows.

    Raises:
        ArgumentError: they do not.
    """
    i32 = torch.int32
    launching.check({"offsets": (offsets, i32, (None,)), "counts": (counts, i32, (None,))})
    offsets, counts = offsets.long(), counts.long()
    if offsets.shape != counts.shape:
        raise ArgumentError("offsets.shape", tuple(offsets.shape), f"that of counts, {tuple(counts.shape)}")
    if bool((counts < 0).any()):
        raise ArgumentError("counts", counts.tolist(), "0 or more")
    if bool(((offsets < 0) | (offsets % align != 0) | (offsets + counts > rows))[counts > 0].any()):
        raise ArgumentError("offsets", offsets.tolist(), f"multiples of {align}, groups among {rows} rows")
    first, order = offsets[counts > 0].sort()
    if bool((first[:-1] + counts[counts > 0][order][:-1] > first[1:]).any()):
        raise ArgumentError("offsets", offsets.tolist(), "groups that do not overlap")


def new_output(x: Tensor, width: int, out_format: str, cleared: bool = True) -> Operand:
    """Allocate ``width`` features of every row of x [.., R, K]. Scales are zeros, if ``cleared``."""
    *lead, rows, _ = x.shape
    if out_format in PLAIN:
        dtype = torch.bfloat16 if out_format == "bf16" else torch.float32
        return Operand(torch.empty(*lead, rows, width, dtype=dtype, device=x.device))
    per_byte, block = (2, nvfp4.BLOCK) if out_format == "nvfp4" else (1, 32)
    size = scale_swizzle.swizzled_bytes(rows, -(-width // block))
    codes = torch.empty(*lead, rows, width // per_byte, dtype=torch.uint8, device=x.device)
    make = torch.zeros if cleared else torch.empty
    return Operand(codes, make(*lead, size, dtype=torch.uint8, device=x.device))


def numbers(codes: Tensor, scales: Tensor | None, mode: str, weights: bool) -> Tensor:
    """Decode [.., rows, K] and their swizzled scales to fp64, without a global scale."""
    m = MODES[mode]
    if not m.block:
        return codes.double()
    packed = (m.w_bits if weights else m.x_bits) == 4
    values = e2m1.decode(e2m1.unpack(codes), torch.float64) if packed else e4m3.decode(codes, torch.float64)
    factors = scale_swizzle.unswizzle(scales, values.shape[-2], -(-values.shape[-1] // m.block))
    factors = (e4m3.decode if m.block == nvfp4.BLOCK else ue8m0.decode)(factors, torch.float64)
    if values.shape[-1] % m.block:
        return values * factors.repeat_interleave(m.block, -1)[..., : values.shape[-1]]
    return (values.unflatten(-1, (-1, m.block)) * factors[..., None]).flatten(-2)


def finished(
    y: Tensor, call: Any, e: int, routing: Tensor | None = None, block: int = 32
) -> tuple[Tensor, Tensor | None]:
    """Finish the fp64 sums y of group e: codes, and scales where the output has any.

    Args:
        call: of `moe_gemm` or of `dsv4lib.ops.linear`: its factors and its output's format.
        routing: weights of the rows. block: features that share a scale of "mxfp8", 32, or 128: it comes four times.
    """
    if call.swiglu:
        gate, up = y.unflatten(1, (-1, 2, 8)).unbind(2)
        if call.alpha is not None:
            gate, up = gate * call.alpha[e].double(), up * call.alpha_up[e].double()
        y = backends.oracle("moe_gemm").swiglu(gate, up, call.limit).flatten(1)
    elif call.alpha is not None:
        y = y * call.alpha[e].double()
    if routing is not None:
        y = y * routing[:, None].double()
    if call.out_format == "nvfp4":
        q = nvfp4.quantize(y, call.out_global[e])
        return q.packed, q.scales
    if call.out_format == "mxfp8":
        q = fp8_block.quantize_activation(y, block)
        return q.codes, q.scales.repeat_interleave(block // 32, -1)[:, : -(-y.shape[1] // 32)]
    return y.to(call.out.dtype), None
