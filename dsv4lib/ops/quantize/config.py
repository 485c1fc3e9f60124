"""Configure the quantising kernels: recipes, and the numbers that follow from one."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4lib.formats import mxfp4, nvfp4

_E4M3_LARGEST = 0x600000, 8  # 448 = 1.75 x 2^8: mantissa field and exponent
_E2M1_LARGEST = 0x400000, 2  # 6 = 1.5 x 2^2
FP8_FLOOR = 105  # byte of 2^ceil(log2(1e-4 / 448)), the scale of an all-zero block (`formats.fp8_block.AMAX_FLOOR`)
MXFP4_FLOOR = 1  # of 6 x 2^-126 / 6 (`formats.mxfp4.AMAX_FLOOR`)


@dataclass(frozen=True)
class Recipe:
    """A block format.

    Attributes:
        block: elements that share a scale. bits: of a code.
        scale: "ue8m0" or "e4m3".
        divisor: largest element value as (mantissa field, exponent); floor: least scale byte. Of UE8M0 only.
        repeats: how often a scale stands in a row of a swizzled image: no block-scaled MMA has blocks above 32.
    """

    block: int
    bits: int
    scale: str
    divisor: tuple[int, int] = (0, 0)
    floor: int = 0
    repeats: int = 1


RECIPES = {
    "nvfp4": Recipe(nvfp4.BLOCK, 4, "e4m3"),
    "mxfp4": Recipe(mxfp4.BLOCK, 4, "ue8m0", _E2M1_LARGEST, MXFP4_FLOOR),
    "mxfp8": Recipe(32, 8, "ue8m0", _E4M3_LARGEST, FP8_FLOOR),
    "fp8": Recipe(128, 8, "ue8m0", _E4M3_LARGEST, FP8_FLOOR, 4),
    "kv": Recipe(64, 8, "ue8m0", _E4M3_LARGEST, FP8_FLOOR),  # nope dims of an entry; `entries` alone
}
ROW_RECIPES = ("nvfp4", "mxfp4", "mxfp8", "fp8")
DTYPES = ("bf16", "fp32")


def has_fp4_conversion(arch: str) -> bool:
    """Return whether ``arch`` has cvt to e2m1x2: the sm_100 family alone."""
    return arch.startswith("sm_10")
