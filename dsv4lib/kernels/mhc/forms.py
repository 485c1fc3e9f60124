"""Forms of the mHC kernel, and which one a call uses. It needs no DSL: the bench lists its rows without one."""

from __future__ import annotations

from contextlib import suppress
from enum import Enum

from dsv4lib.errors import ConfigError
from dsv4lib.kernels.mhc.config import GROUPS, UNIT, BulkConfig, Config, StreamConfig

ROUND = 7  # clusters of 16 CTAs that an H200 holds


class Form(Enum):
    """Which kernel: `plain.MhcPlain`, `stream.MhcStream`, or `bulk.MhcBulk`."""

    PLAIN = "plain"
    STREAM = "stream"
    BULK = "bulk"


CONFIGS = {Form.PLAIN: Config, Form.STREAM: StreamConfig, Form.BULK: BulkConfig}


def form_of(tokens: int, d: int, keep: bool = True) -> Form:
    """The form that a call of so many tokens uses: the only place that chooses. ``keep``: the streams are stored.

    Timed on an H200 (us). d 4096: `PLAIN` 6.3, 6.8, 7.3, 9.4, 13.1 and 14.1 with 1, 32, 48, 64, 128 and 160 tokens,
    where `STREAM` takes 9.4, 9.9, 10.1, 10.5, 15.2 and 15.6, and `BULK` with 128 and 160 14.7 and 15.2; `BULK` 15.4,
    18.8 and 147 with 192, 256 and 4096, `PLAIN` 18.1 and 22.3 with 192 and 256. d 7168, where `BULK` does not fit and
    `PLAIN` has eight tokens a cluster: `PLAIN` 8.1, 9.5, 10.7, 15.5 and 22.1 with 1, 32, 48, 64 and 128, `STREAM` 14.6,
    19.7 and 312 with 64, 128 and 4096.

    ``python -m dsv4lib.bench.ops.harness --only mhc --ways ours --ahead 8`` times all. streams, post and comb are the
    same to fp32; to choose another form changes y by about what the rounding of x does. With `BULK`, some streams (2 of
    100,000) round to the other side, and y, post and comb follow.
    """
    fit = forms(d)
    if tokens <= ROUND * tile_of(Form.PLAIN, d):
        return Form.PLAIN
    if Form.BULK in fit:
        return Form.BULK
    return Form.STREAM if keep and Form.STREAM in fit else Form.PLAIN


def forms(d: int) -> list[Form]:
    """The forms that fit an SM at this width."""
    found = []
    for form, config in CONFIGS.items():
        with suppress(ConfigError):
            config(d=d, cluster=cluster_of(d))
            found.append(form)
    return found


def tile_of(form: Form, d: int) -> int:
    """Tokens that a cluster takes at most at once."""
    kind, cluster = CONFIGS[form], cluster_of(d)
    for groups in range(GROUPS if form is Form.PLAIN else 1, 1, -1):
        with suppress(ConfigError):
            return kind(d=d, cluster=cluster, groups=groups).tile
    return kind(d=d, cluster=cluster).tile


def cluster_of(d: int) -> int:
    """The largest cluster that divides ``d``: a CTA then fetches and keeps least of fn."""
    return next(size for size in (16, 8, 4) if d % (UNIT * size) == 0)
