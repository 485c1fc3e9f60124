"""Forms of the mHC kernel, and which one a call uses. It needs no DSL: the bench lists its rows without one."""

from __future__ import annotations

from contextlib import suppress
from enum import Enum

from dsv4lib.errors import ConfigError
from dsv4lib.ops.mhc.config import BULK_WARPS, GROUPS, ROWS_N, UNIT, BulkConfig, Config

SM_COUNT = 132  # of an H200; a B200 has 148
ROUND = 7  # clusters of 16 CTAs that an H200 holds
TWO_GROUPS = 2 * ROWS_N  # tokens of a cluster in the plain form


class Form(Enum):
    """Which kernel: `plain.MhcPlain` or `bulk.MhcBulk`."""

    PLAIN = "plain"
    BULK = "bulk"


CONFIGS = {Form.PLAIN: Config, Form.BULK: BulkConfig}


def form_of(tokens: int, d: int) -> Form:
    """The form that a call of so many tokens uses: the only place that chooses.

    Timed on an H200 (us). d 4096: `PLAIN` 6.3, 6.8, 7.3, 9.4, 10.6, 13.1 and 14.1 with 1, 32, 48, 64, 96, 128 and 160
    tokens, 18.1 with 192; `BULK` 9.7 and 10.4 with 1 and 33, 12.3 with 128, a tile of every group, 16.0 with 144, two;
    16.3, 18.0, 27.1, 44.1 and 145 with 176, 256, 512, 1024 and 4096. d 7168: `PLAIN` 8.1, 9.5, 10.7, 15.5 and 22.1 with
    1, 32, 48, 64 and 128; `BULK` 10.3, 11.3, 11.9, 14.7, 16.5, 24.8, 38.8, 66.7 and 236 with 1, 32, 48, 65, 128, 256,
    512, 1024 and 4096.

    ``python -m dsv4lib.bench.ops.harness --only mhc --providers ours --ahead 8`` times all.
    streams, post and comb are the
    same to fp32; to choose another form changes y by about what the rounding of x does. With `BULK`, some streams (2 of
    100,000) round to the other side, and y, post and comb follow.
    """
    if Form.BULK not in forms(d):
        return Form.PLAIN
    tile = tile_of(Form.PLAIN, d)
    at_once = SM_COUNT // cluster_of(d, Form.BULK) * tile_of(Form.BULK, d)
    if ROUND * min(tile, TWO_GROUPS) < tokens <= at_once:  # a tile each is less than three groups of warps
        return Form.BULK
    return Form.PLAIN if tokens <= ROUND * tile else Form.BULK


def forms(d: int) -> list[Form]:
    """The forms that fit an SM at this width."""
    found = []
    for form, config in CONFIGS.items():
        with suppress(ConfigError):
            config(d=d, cluster=cluster_of(d, form))
            found.append(form)
    return found


def tile_of(form: Form, d: int) -> int:
    """Tokens that a cluster takes at most at once."""
    kind, cluster = CONFIGS[form], cluster_of(d, form)
    for groups in range(GROUPS if form is Form.PLAIN else 1, 1, -1):
        with suppress(ConfigError):
            return kind(d=d, cluster=cluster, groups=groups).tile
    return kind(d=d, cluster=cluster).tile


def cluster_of(d: int, form: Form = Form.PLAIN) -> int:
    """CTAs that share a token: the largest cluster that divides ``d``, as a CTA then fetches and keeps least of fn;
    of the grid as few as two parts of fn in their registers allow."""
    if form is Form.BULK:
        fit = (size for size in BulkConfig.sizes if d % (UNIT * size) == 0 and d <= UNIT * BULK_WARPS * size)
        return next(fit, BulkConfig.sizes[-1])
    return next(size for size in (16, 8, 4) if d % (UNIT * size) == 0)
