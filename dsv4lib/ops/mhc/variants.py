"""Choose the variant of the mHC kernel. Needs no DSL: the bench lists its rows without one."""

from __future__ import annotations

from contextlib import suppress
from enum import Enum

from dsv4lib.errors import ConfigError
from dsv4lib.ops.mhc.config import GROUPS, MANY_WARPS, ROWS_N, UNIT, FewConfig, ManyConfig

SM_COUNT = 132  # of an H200; a B200 has 148
ROUND = 7  # clusters of 16 CTAs that an H200 holds
TWO_GROUPS = 2 * ROWS_N  # tokens of a cluster with two groups of warps, `FEW_TOKENS`


class Variant(Enum):
    """Which kernel: `few_tokens.MhcFewTokens` or `many_tokens.MhcManyTokens`."""

    FEW_TOKENS = "few_tokens"
    MANY_TOKENS = "many_tokens"


CONFIGS = {Variant.FEW_TOKENS: FewConfig, Variant.MANY_TOKENS: ManyConfig}


def variant_of(tokens: int, d: int) -> Variant:
    """Choose the variant for so many tokens, by times on an H200.

    The times are in data/bench/mhc.md.

    Streams, post and comb of both are the same to fp32; y differs by about what the rounding of x does. With
    `MANY_TOKENS` some streams (2 of 100,000) round to the other side, and y, post and comb follow.
    """
    if Variant.MANY_TOKENS not in variants(d):
        return Variant.FEW_TOKENS
    tile = tile_of(Variant.FEW_TOKENS, d)
    at_once = SM_COUNT // cluster_of(d, Variant.MANY_TOKENS) * tile_of(Variant.MANY_TOKENS, d)
    if ROUND * min(tile, TWO_GROUPS) < tokens <= at_once:  # a tile each is less than three groups of warps
        return Variant.MANY_TOKENS
    return Variant.FEW_TOKENS if tokens <= ROUND * tile else Variant.MANY_TOKENS


def variants(d: int) -> list[Variant]:
    """List the variants that fit an SM at this width."""
    found = []
    for variant, config in CONFIGS.items():
        with suppress(ConfigError):
            config(d=d, cluster=cluster_of(d, variant))
            found.append(variant)
    return found


def tile_of(variant: Variant, d: int) -> int:
    """Return how many tokens a cluster takes at most at once."""
    kind, cluster = CONFIGS[variant], cluster_of(d, variant)
    for groups in range(GROUPS if variant is Variant.FEW_TOKENS else 1, 1, -1):
        with suppress(ConfigError):
            return kind(d=d, cluster=cluster, groups=groups).tile
    return kind(d=d, cluster=cluster).tile


def cluster_of(d: int, variant: Variant = Variant.FEW_TOKENS) -> int:
    """Return how many CTAs share a token.

    `FEW_TOKENS`: the largest cluster that divides ``d``, as a CTA then fetches and keeps least of fn. `MANY_TOKENS`: as
    few as two limbs of fn in their registers allow.
    """
    if variant is Variant.MANY_TOKENS:
        fit = (size for size in ManyConfig.sizes if d % (UNIT * size) == 0 and d <= UNIT * MANY_WARPS * size)
        return next(fit, ManyConfig.sizes[-1])
    return next(size for size in (16, 8, 4) if d % (UNIT * size) == 0)
