"""Precision modes of the routed experts: what a checkpoint's 4-bit weights become before a GEMM reads them.

An NVFP4 weight is e2m1 code c x E4M3 block scale s x fp32 global scale. The product c * s has at most six significant
bits and is a multiple of 2^-10, at most 2688, whatever the checkpoint holds. The modes differ in what they make of it:

| mode          | operand                        | activations | c * s                                                 |
|---------------|--------------------------------|-------------|-------------------------------------------------------|
| `nvfp4`       | c and s as they are            | NVFP4       | exact, multiplied by the tensor core                  |
| `mxfp4`       | E2M1, E8M0 per 32              | MXFP8       | DeepSeek's own format; from NVFP4 requantised: lossy  |
| `e4m3_expand` | E4M3(c * s), E8M0 per 32       | MXFP8       | 4 of 6 bits: exact or at most half a step off         |
| `e4m3_split`  | E4M3 hi + E4M3 lo, E8M0 per 32 | MXFP8       | exact, two MMAs                                       |
| `bf16`        | bf16(c * s)                    | bf16        | exact                                                 |
| `ue8m0_naive` | c kept, E8M0 per 32            | MXFP8       | **known bad**: the scale changes, the codes do not    |

The global scale stays out of the operand in every mode but the last: it is the epilogue's factor (`alpha`). Folded into
the operand its mantissa leaves the grid of E4M3, and folded into an E4M3 scale it is a subnormal for real weights.

Why `e4m3_split` is exact: hi rounds to nearest, so what is left has at most three significant bits; lo's own scale is
at most 1/2 (the largest remainder is 128), and then its subnormal step, 2^-9 / 2, still divides every remainder.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import _checks, e2m1, e4m3, fp8_block, mxfp4, nvfp4, ue8m0
from dsv4lib.formats.fp8_block import FP8Tensor
from dsv4lib.formats.mxfp4 import MXFP4Tensor
from dsv4lib.formats.nvfp4 import NVFP4Tensor

Plane = NVFP4Tensor | MXFP4Tensor | FP8Tensor | torch.Tensor

MX_GROUP = 32  # elements that share an E8M0 scale in an MX operand
_MX_TILE = (1, MX_GROUP)
_FLOAT32_EXPONENT = 23  # place of the exponent field


@dataclass(frozen=True)
class Mode:
    """One precision mode, as data.

    Attributes:
        name: key of `MODES`.
        bits: stored bits a weight, scales included (the global scale is one number a matrix).
        activations: ``nvfp4`` (E4M3 scale per 16), ``mxfp8`` (E8M0 per 32) or ``bf16``.
        mma: instruction kind and scale granularity of the GEMM; the spelling that every SM10x target takes.
        planes: operands that are multiplied one after the other into one accumulator.
        exact: dequantises to exactly the NVFP4 weights that it was made from.
    """

    name: str
    bits: float
    activations: str
    mma: str
    planes: int
    exact: bool

    @property
    def bytes_per_weight(self) -> float:
        """Stored bytes a weight, scales included."""
        return self.bits / 8


MODES = {
    mode.name: mode
    for mode in (
        Mode("nvfp4", 4 + 8 / 16, "nvfp4", "kind::mxf4nvf4.block_scale.block16", 1, True),
        Mode("mxfp4", 4 + 8 / 32, "mxfp8", "kind::mxf8f6f4.block_scale.block32", 1, False),
        Mode("e4m3_expand", 8 + 8 / 32, "mxfp8", "kind::mxf8f6f4.block_scale.block32", 1, False),
        Mode("e4m3_split", 2 * (8 + 8 / 32), "mxfp8", "kind::mxf8f6f4.block_scale.block32", 2, True),
        Mode("bf16", 16, "bf16", "kind::f16", 1, True),
        Mode("ue8m0_naive", 4 + 8 / 32, "mxfp8", "kind::mxf8f6f4.block_scale.block32", 1, False),
    )
}


@dataclass(frozen=True)
class ModeWeight:
    """A weight in one mode: sum of its planes, times ``alpha``.

    Attributes:
        mode: key of `MODES`.
        planes: operands [..., N, K] in their own formats (an NVFP4 plane has the global scale 1).
        alpha: float32 scalar, the factor that the epilogue applies.
    """

    mode: str
    planes: tuple[Plane, ...]
    alpha: torch.Tensor


def mode_named(name: str) -> Mode:
    """The mode ``name``; ArgumentError for any other word."""
    if name not in MODES:
        raise ArgumentError("precision", name, "one of " + ", ".join(MODES))
    return MODES[name]


def convert(q: NVFP4Tensor | MXFP4Tensor, precision: str) -> ModeWeight:
    """A checkpoint's weight in mode ``precision``.

    Args:
        q: [..., N, K]. NVFP4 converts to every mode (K a multiple of 32 unless the mode is ``nvfp4``); MXFP4 to
            ``mxfp4`` (as it is) and ``bf16``.
        precision: key of `MODES`.

    Raises:
        ArgumentError: unknown mode, a conversion that does not exist, a shape that does not fit.
    """
    mode_named(precision)
    if isinstance(q, MXFP4Tensor):
        one = torch.ones((), dtype=torch.float32, device=q.packed.device)
        if precision == "mxfp4":
            return ModeWeight(precision, (q,), one)
        if precision == "bf16":
            return ModeWeight(precision, (mxfp4.dequantize(q, torch.bfloat16),), one)
        raise ArgumentError("precision", precision, "mxfp4 or bf16 for an MXFP4 weight")
    if not isinstance(q, NVFP4Tensor):
        raise ArgumentError("q", type(q).__name__, "an NVFP4Tensor or an MXFP4Tensor")
    alpha = q.global_scale.reshape(())
    if precision == "ue8m0_naive":
        return ModeWeight(precision, (naive_ue8m0(q),), torch.ones_like(alpha))
    if precision == "nvfp4":
        return ModeWeight(precision, (NVFP4Tensor(q.packed, q.scales, torch.ones_like(alpha)),), alpha)
    product = scaled_codes(q)
    if precision == "bf16":
        return ModeWeight(precision, (product.to(torch.bfloat16),), alpha)
    if precision == "mxfp4":
        return ModeWeight(precision, (requantize_mxfp4(product),), alpha)
    hi = fp8_block.quantize(product, _MX_TILE)
    if precision == "e4m3_expand":
        return ModeWeight(precision, (hi,), alpha)
    rest = product - fp8_block.dequantize(hi)
    return ModeWeight(precision, (hi, fp8_block.quantize(rest, _MX_TILE)), alpha)


def dequantize(w: ModeWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(sum of the planes) * alpha in fp64, rounded once to ``dtype``; [..., N, K]."""
    total = sum(plane_values(plane) for plane in w.planes)
    return (total * w.alpha.to(torch.float64)).to(_checks.output_dtype(dtype))


def plane_values(plane: Plane) -> torch.Tensor:
    """What one operand stands for, fp64."""
    if isinstance(plane, NVFP4Tensor):
        return nvfp4.dequantize(plane, torch.float64)
    if isinstance(plane, MXFP4Tensor):
        return mxfp4.dequantize(plane, torch.float64)
    if isinstance(plane, FP8Tensor):
        return fp8_block.dequantize(plane, torch.float64)
    return plane.to(torch.float64)


def fake_quantize_activation(
    x: torch.Tensor, activations: str, global_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Activations [T, K] as a mode's GEMM reads them, back in fp32.

    Args:
        x: bf16, fp16, fp32 or fp64 [T, K].
        activations: ``bf16``, ``mxfp8`` (E4M3, E8M0 per 32), ``nvfp4`` or ``mxfp4``.
        global_scale: calibrated scale of ``nvfp4`` (``input_scale``); None: one per token, from its own amax.
    """
    if activations == "bf16":
        return x.to(torch.bfloat16).to(torch.float32)
    if activations == "mxfp8":
        return fp8_block.fake_quantize(x.to(torch.float32), MX_GROUP)
    if activations == "mxfp4":
        return mxfp4.fake_quantize(x.to(torch.float32))
    if activations != "nvfp4":
        raise ArgumentError("activations", activations, "bf16, mxfp8, nvfp4 or mxfp4")
    if global_scale is not None:
        return nvfp4.fake_quantize(x.to(torch.float32), global_scale)
    per_token = (x.to(torch.float64).abs().amax(-1, keepdim=True) / nvfp4.RANGE).clamp(min=nvfp4.MIN_GLOBAL_SCALE)
    per_token = per_token.to(torch.float32).to(torch.float64)
    return (nvfp4.fake_quantize(x.to(torch.float64) / per_token, 1.0) * per_token).to(torch.float32)


def scaled_codes(q: NVFP4Tensor) -> torch.Tensor:
    """c * s of every element, without the global scale: exact, float32 [..., K]."""
    return nvfp4.dequantize(NVFP4Tensor(q.packed, q.scales, torch.ones_like(q.global_scale)))


def requantize_mxfp4(x: torch.Tensor) -> MXFP4Tensor:
    """MXFP4 of [..., K] with the best of four scales per block of 32: the smallest squared error decides.

    The candidates are 2^ceil(log2(amax / 6)), at which nothing saturates, twice that, and a half and a quarter of it.
    """
    work = _checks.working_copy("x", x)
    _checks.last_dim("x", work, multiple_of=mxfp4.BLOCK)
    blocks = work.reshape(*work.shape[:-1], work.shape[-1] // mxfp4.BLOCK, mxfp4.BLOCK)
    ceil = ue8m0.encode_ceil(blocks.abs().amax(-1).clamp(min=mxfp4.AMAX_FLOOR), e2m1.MAX).to(torch.int32)
    best = codes = scales = None
    for step in (0, -1, 1, -2):  # ties go to the first
        byte = torch.where(ceil == ue8m0.NAN, ceil, (ceil + step).clamp(1, ue8m0.NAN - 1)).to(torch.uint8)
        unit = ue8m0.decode(byte, work.dtype)[..., None]
        tried = e2m1.encode(torch.where(unit.isnan(), 0.0, blocks / unit))
        error = (e2m1.decode(tried, work.dtype) * unit - blocks).square().sum(-1)
        if best is None:
            best, codes, scales = error, tried, byte
            continue
        better = error < best
        best = torch.where(better, error, best)
        codes = torch.where(better[..., None], tried, codes)
        scales = torch.where(better, byte, scales)
    return MXFP4Tensor(e2m1.pack(codes.reshape(work.shape)), scales)


def naive_ue8m0(q: NVFP4Tensor) -> MXFP4Tensor:
    """The conversion that circulates and must not be used, kept as the known-bad case.

    The global scale is folded into the block scales as E4M3, two neighbours become their maximum, the exponent is cut
    out of the float32 bits (rounding down), and the codes stay. So a code that stood for c * s now stands for c * s',
    with s' up to twice too small (exponent cut) or any factor too large (the smaller of the two blocks).
    """
    _checks.last_dim("packed", q.packed, multiple_of=MX_GROUP // 2)
    folded = e4m3.decode(e4m3.encode(e4m3.decode(q.scales) * q.global_scale))
    merged = folded.unflatten(-1, (-1, 2)).amax(-1)
    return MXFP4Tensor(q.packed, (merged.view(torch.int32) >> _FLOAT32_EXPONENT & 0xFF).to(torch.uint8))
