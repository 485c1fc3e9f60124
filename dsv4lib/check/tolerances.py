"""Hold the one table of tolerances. It says per format how wrong a right kernel may be, and why.

A kernel is judged against an oracle that sees the *same* inputs (already quantised, then dequantised exactly) and works
in fp64. What is left is the rounding of the output format and the accumulation in the kernel, and that is all the table
allows. Input quantisation is not an excuse: it is in the oracle too.

Units. Rows of real activations differ in scale by orders of magnitude, so an absolute bound in the data's own unit is
blind on small rows and angry on large ones. `Tolerance.abs` is therefore in units of the RMS of the element's row (last
axis). The other three numbers have no unit.

Notation of the reasons: u is the unit roundoff of the format (half a step at 1.0), one step is 2u.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4lib.errors import ArgumentError


@dataclass(frozen=True)
class Tolerance:
    """What one comparison allows.

    Attributes:
        name: format name, the key in `TOLERANCES`.
        abs: an element passes if its error is at most ``abs`` x RMS of its row, or ...
        rel: ... at most ``rel`` x the larger magnitude of the two values.
        cosine: largest ``1 - 2<x,y>/(<x,x>+<y,y>)`` over the whole array.
        tile: largest ``|error|_2 / |expected|_2`` of any tile.
        reason: why these numbers.
        floor: error that always passes, in the data's unit: one step of the format's smallest subnormal.
    """

    name: str
    abs: float
    rel: float
    cosine: float
    tile: float
    reason: str
    floor: float = 0.0

    def __post_init__(self) -> None:
        for field in ("abs", "rel", "cosine", "tile", "floor"):
            value = getattr(self, field)
            if not (isinstance(value, (int, float)) and 0.0 <= value < float("inf")):
                raise ArgumentError(field, value, "a finite number >= 0")


# Ordered from the finest format to the coarsest: comparing two formats is judged as the coarser one.
TOLERANCES: dict[str, Tolerance] = {
    t.name: t
    for t in (
        Tolerance("int", 0.0, 0.0, 0.0, 0.0, "indices, codes and packed bytes are right or wrong"),
        Tolerance(
            "fp64",
            abs=1e-12,
            rel=1e-12,
            cosine=1e-14,
            tile=1e-12,
            floor=5e-324,
            reason="u = 1.1e-16; sums of up to 1e4 terms in any order lose at most a few hundred u of the row's RMS",
        ),
        Tolerance(
            "fp32",
            abs=2e-5,
            rel=2e-6,
            cosine=1e-11,
            tile=4e-6,
            floor=1.5e-45,
            reason="u = 6e-8; a serial sum of 4096 products drifts by up to ~1e-5 of the row's RMS at cancelled "
            "elements, any split sum by less; a tile's RMS error stays below 70 u",
        ),
        Tolerance(
            "fp16",
            abs=1.25e-3,
            rel=2.0**-9,
            cosine=2e-7,
            tile=1e-3,
            floor=2.0**-24,
            reason="u = 2^-11; rel is two steps (one for P or another operand rounded to fp16, one for the output); "
            "abs is that same rounding where the sum cancels",
        ),
        Tolerance(
            "bf16",
            abs=1e-2,
            rel=2.0**-6,
            cosine=1e-5,
            tile=6e-3,
            floor=1e-40,
            reason="u = 2^-8; as fp16: two steps relative, the operand rounding where the sum cancels; FlashMLA "
            "accepts 2.01/128 relative and 5e-6 to 7e-6 cosine for the same reason",
        ),
        Tolerance(
            "e4m3",
            abs=2.0**-6,
            rel=2.0**-3,
            cosine=1e-3,
            tile=5e-2,
            floor=1e-40,
            reason="u = 2^-4: one step (2^-3), so a value near a rounding boundary may land on either side; the "
            "rounding itself is 2.6 % RMS; DeepGEMM accepts 1e-3 cosine for FP8",
        ),
        Tolerance(
            "e5m2",
            abs=2.0**-5,
            rel=2.0**-2,
            cosine=4e-3,
            tile=9e-2,
            floor=1e-40,
            reason="u = 2^-3: one step; the rounding itself is 5.2 % RMS, twice E4M3's",
        ),
        Tolerance(
            "nvfp4",
            abs=0.40,
            rel=0.34,
            cosine=1e-2,
            tile=0.14,
            floor=1e-40,
            reason="E2M1 codes under a block-16 scale amax/6: one step is a third of the larger value (2 to 3, 4 to 6) "
            "and near zero amax/12, up to 0.4 of the row's RMS; DeepGEMM accepts 1e-2 cosine with one FP4 operand",
        ),
        Tolerance(
            "e2m1",
            abs=0.60,
            rel=0.34,
            cosine=2e-2,
            tile=0.18,
            floor=1e-40,
            reason="E2M1 codes under a power-of-two block-32 scale (MXFP4): as nvfp4, but the scale is rounded up by "
            "as much as a factor two, so the step near zero reaches 0.6 of the row's RMS",
        ),
    )
}

_TORCH_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}

# (explicit mantissa bits, exponent of the smallest normal) of formats whose step depends on the value alone.
_GRID = {"fp64": (52, -1022), "fp32": (23, -126), "fp16": (10, -14), "bf16": (7, -126)}
# Compared after dequantisation, so the step is taken at the value's own exponent and never runs into subnormals.
_SCALED_GRID = {"e4m3": 3, "e5m2": 2}


def format_name(dtype: torch.dtype | str) -> str:
    """Return the table's name of a dtype.

    ``dtype`` is a torch dtype or one of the keys of `TOLERANCES`.

    Raises:
        ArgumentError: nothing in the table fits.
    """
    if isinstance(dtype, str) and dtype in TOLERANCES:
        return dtype
    if isinstance(dtype, torch.dtype):
        if dtype in _TORCH_NAMES:
            return _TORCH_NAMES[dtype]
        if dtype == torch.bool or not (dtype.is_floating_point or dtype.is_complex):
            return "int"
    known = ", ".join([*TOLERANCES, *(str(d) for d in _TORCH_NAMES)])
    raise ArgumentError("dtype", dtype, f"one of {known}, or an integer torch dtype (unpack packed formats first)")


def coarser(first: str, second: str) -> str:
    """Return the coarser of two format names."""
    order = list(TOLERANCES)
    return max(first, second, key=order.index)


def tolerance(dtype: torch.dtype | str) -> Tolerance:
    """Return the row of the table for ``dtype``."""
    return TOLERANCES[format_name(dtype)]


def spacing(magnitude: torch.Tensor, name: str) -> torch.Tensor | None:
    """The step of format ``name`` at each |value| (fp64 in, fp64 out). None where a block scale decides it (FP4)."""
    if name == "int":
        return torch.ones_like(magnitude)
    if name in _GRID:
        bits, emin = _GRID[name]
    elif name in _SCALED_GRID:
        bits, emin = _SCALED_GRID[name], -1022
    else:
        return None
    exponent = torch.frexp(magnitude).exponent - 1  # frexp gives a mantissa in [0.5, 1)
    exponent = exponent.clamp(min=emin).to(torch.float64) - bits
    return torch.exp2(exponent.clamp(min=-1074))
