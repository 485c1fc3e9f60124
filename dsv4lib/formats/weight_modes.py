"""Define precision modes of the experts. What a checkpoint's weights become before a GEMM reads them.

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

The checkpoints' other formats, MXFP4 (E2M1, E8M0 per 32) and FP8 in tiles (E4M3, a scale for 128 x 128), convert only
where no bit is lost, with the exception of FP8 scales that are no powers of two. What is lost is refused, by position.

| mode          | MXFP4                                           | FP8 in tiles                                      |
|---------------|-------------------------------------------------|---------------------------------------------------|
| `nvfp4`       | exact if scales of blocks with a number that is | refused: E2M1 has 2 of E4M3's 4 significant bits  |
|               | not 0 span at most 2^17, else refused           |                                                   |
| `mxfp4`       | as it is                                        | refused, likewise                                 |
| `e4m3_expand` | exact: every E2M1 value is an E4M3 value        | exact: codes as they are, a scale repeated for    |
|               |                                                 | each 32; refused if a scale is no power of two    |
| `e4m3_split`  | exact; the second plane is zeros                | as `e4m3_expand`; the second plane is zeros       |
| `bf16`        | exact; `alpha` is 4 if a scale is above 2^125   | exact; rounded once if scales are no powers of    |
|               |                                                 | two; refused where bf16's range ends              |
| `ue8m0_naive` | refused: the fault is one of NVFP4's scales   | refused, likewise                                 |
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
_FLOAT32_LOW = -126  # exponent of the smallest normal number
_E4M3_LOW, _E4M3_HIGH = -9, 8  # exponents of the powers of two that E4M3 has
_BF16_SCALE = 252  # the largest E8M0 byte under which 6 is a bf16 number


@dataclass(frozen=True)
class Mode:
    """One precision mode, as data.

    Attributes:
        name: key of `MODES`.
        bits: stored bits a weight, scales included (the global scale is one number a matrix).
        activations: ``nvfp4`` (E4M3 scale per 16), ``mxfp8`` (E8M0 per 32) or ``bf16``.
        mma: instruction kind and scale granularity of the GEMM; the variant that every SM10x target takes.
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
        """Return the stored bytes a weight, scales included."""
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
    """Look up the mode ``name``; ArgumentError for any other word."""
    if not isinstance(name, str) or name not in MODES:
        raise ArgumentError("precision", name, "one of " + ", ".join(MODES))
    return MODES[name]


def convert(q: NVFP4Tensor | MXFP4Tensor | FP8Tensor, precision: str) -> ModeWeight:
    """Convert a checkpoint's weight to mode ``precision``; see the tables above.

    Args:
        q: [..., N, K]. NVFP4: K a multiple of 32 unless the mode is ``nvfp4``. MXFP4. FP8 with tiles of whole groups
            of 32 columns, scales E8M0 bytes or fp32.
        precision: key of `MODES`.

    Raises:
        ArgumentError: unknown mode, a conversion that does not exist or would lose something, a shape that does not
            fit.
    """
    mode_named(precision)
    if isinstance(q, MXFP4Tensor):
        return _convert_mxfp4(q, precision)
    if isinstance(q, FP8Tensor):
        return _convert_fp8(q, precision)
    if not isinstance(q, NVFP4Tensor):
        raise ArgumentError("q", type(q).__name__, "an NVFP4Tensor, an MXFP4Tensor or an FP8Tensor")
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


def _convert_mxfp4(q: MXFP4Tensor, precision: str) -> ModeWeight:
    codes, scales = mxfp4.checked(q)
    if precision == "mxfp4":
        return ModeWeight(precision, (q,), _power(0, codes))
    if precision == "nvfp4":
        return _mxfp4_as_nvfp4(q)
    if precision == "bf16":
        shift = 2 if bool(((scales > _BF16_SCALE) & (scales != ue8m0.NAN)).any()) else 0
        values = (mxfp4.dequantize(q, torch.float64) * 2.0**-shift).to(torch.bfloat16)
        return ModeWeight(precision, (values,), _power(shift, codes))
    if precision == "ue8m0_naive":
        raise ArgumentError("precision", precision, "mxfp4 for an MXFP4 weight: its scales are E8M0 already")
    hi = FP8Tensor(e4m3.encode(e2m1.decode(codes)), scales, _MX_TILE)
    return ModeWeight(precision, _with_zeros(hi, precision), _power(0, codes))


def _mxfp4_as_nvfp4(q: MXFP4Tensor) -> ModeWeight:
    """Two blocks of 16 take the scale of one of 32, as a power of two in E4M3: 2^-9 to 2^8 times a global one."""
    codes, scales = mxfp4.checked(q)
    counted = (codes.unflatten(-1, (-1, mxfp4.BLOCK)) & 7 != 0).any(-1) & (scales != ue8m0.NAN)
    used = scales[counted].to(torch.int32)
    low, high = (int(used.min()), int(used.max())) if len(used) else (ue8m0.BIAS, ue8m0.BIAS)
    if high - low > _E4M3_HIGH - _E4M3_LOW:
        allowed = f"scales within 2^{_E4M3_HIGH - _E4M3_LOW} of each other, as far as E4M3 scales reach, in mode nvfp4"
        raise ArgumentError("q.scales", f"2^{low - ue8m0.BIAS} to 2^{high - ue8m0.BIAS}", allowed)
    shift = max(high - ue8m0.BIAS - _E4M3_HIGH, _FLOAT32_LOW)  # exponent of the global scale, a normal number
    exponents = (scales.to(torch.int32) - ue8m0.BIAS - shift).clamp(_E4M3_LOW, _E4M3_HIGH)
    found = e4m3.encode(torch.exp2(exponents.to(torch.float64)))
    found = torch.where(scales == ue8m0.NAN, e4m3.NAN, found).to(torch.uint8).repeat_interleave(2, -1)
    plane = NVFP4Tensor(q.packed.view(torch.uint8), found, _power(0, codes))
    return ModeWeight("nvfp4", (plane,), _power(shift, codes))


def _convert_fp8(q: FP8Tensor, precision: str) -> ModeWeight:
    codes = _checks.as_bytes("q.codes", q.codes, torch.float8_e4m3fn)
    exact = fp8_block.dequantize(q, torch.float64)  # checks the shapes, too
    if precision == "bf16":
        values = exact.to(torch.bfloat16)
        powers = q.scales.dtype != torch.float32 or bool((torch.frexp(q.scales)[0].abs() == 0.5).all())
        lost = exact.isfinite() & ((values.double() != exact) if powers else ~values.isfinite())
        if bool(lost.any()):
            at = lost.nonzero()[0].tolist()
            raise ArgumentError(f"q[{', '.join(map(str, at))}]", float(exact[tuple(at)]), "a number that bf16 has")
        return ModeWeight(precision, (values,), _power(0, codes))
    if precision not in ("e4m3_expand", "e4m3_split"):
        allowed = "e4m3_expand, e4m3_split or bf16 for an FP8 weight: E2M1 has 2 of E4M3's 4 significant bits"
        raise ArgumentError("precision", precision, allowed)
    if codes.shape[-1] % MX_GROUP or q.tile[1] % MX_GROUP:
        found = f"{tuple(codes.shape)} in tiles {tuple(q.tile)}"
        raise ArgumentError("q.codes.shape", found, f"K and columns of a tile multiples of {MX_GROUP}")
    tile = q.tile[0], q.tile[1] // MX_GROUP
    each = fp8_block.spread_scales(
        power_bytes("q.scales", q.scales), tile, codes.shape[-2], codes.shape[-1] // MX_GROUP
    )
    hi = FP8Tensor(codes, each, _MX_TILE)
    return ModeWeight(precision, _with_zeros(hi, precision), _power(0, codes))


def power_bytes(name: str, scales: torch.Tensor) -> torch.Tensor:
    """Return E8M0 bytes of scales that are powers of two. They come as bytes, or as fp32 numbers.

    Raises:
        ArgumentError: an fp32 scale that is no power of two from 2^-127 to 2^127, with its place.
    """
    if scales.dtype != torch.float32:
        return _checks.as_bytes(name, scales, torch.float8_e8m0fnu)
    found = ue8m0.encode_ceil(scales.clamp(min=0))  # a negative one becomes 0, which is no power of two
    wrong = ue8m0.decode(found, torch.float64) != scales.to(torch.float64)
    if bool(wrong.any()):
        at = wrong.nonzero()[0].tolist()
        allowed = "a power of two, 2^-127 to 2^127, for E8M0 scales; bf16 takes any"
        raise ArgumentError(f"{name}[{', '.join(map(str, at))}]", float(scales[tuple(at)]), allowed)
    return found


def _with_zeros(hi: FP8Tensor, precision: str) -> tuple[FP8Tensor, ...]:
    """One plane, or with a second of zeros that ``e4m3_split`` has: what is left over is nothing."""
    if precision == "e4m3_expand":
        return (hi,)
    return hi, FP8Tensor(torch.zeros_like(hi.codes), torch.full_like(hi.scales, ue8m0.BIAS), _MX_TILE)


def _power(exponent: int, like: torch.Tensor) -> torch.Tensor:
    """2^exponent, float32."""
    return torch.tensor(2.0**exponent, dtype=torch.float32, device=like.device)


def dequantize(w: ModeWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(sum of the planes) * alpha in fp64, rounded once to ``dtype``; [..., N, K]."""
    total = sum(plane_values(plane) for plane in w.planes)
    return (total * w.alpha.to(torch.float64)).to(_checks.output_dtype(dtype))


def plane_values(plane: Plane) -> torch.Tensor:
    """Return what one operand stands for, fp64."""
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
    """Round activations [T, K] as a mode's GEMM reads them, back in fp32.

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
    """Return c * s of every element, without the global scale. It is exact, float32 [..., K]."""
    return nvfp4.dequantize(NVFP4Tensor(q.packed, q.scales, torch.ones_like(q.global_scale)))


def requantize_mxfp4(x: torch.Tensor) -> MXFP4Tensor:
    """Requantise [..., K] to MXFP4 with the best of four scales per block of 32. The smallest squared error decides.

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
    """Convert by the formula that circulates and must not be used: the known-bad case.

    The global scale is folded into the block scales as E4M3, two neighbours become their maximum, the exponent is cut
    out of the float32 bits (rounding down), and the codes stay. So a code that stood for c * s now stands for c * s',
    with s' up to twice too small (exponent cut) or any factor too large (the smaller of the two blocks).
    """
    _checks.last_dim("packed", q.packed, multiple_of=MX_GROUP // 2)
    folded = e4m3.decode(e4m3.encode(e4m3.decode(q.scales) * q.global_scale))
    merged = folded.unflatten(-1, (-1, 2)).amax(-1)
    return MXFP4Tensor(q.packed, (merged.view(torch.int32) >> _FLOAT32_EXPONENT & 0xFF).to(torch.uint8))
