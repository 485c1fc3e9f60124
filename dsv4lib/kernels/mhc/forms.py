"""Forms of the mHC kernel, and which one a call uses. It needs no DSL: the bench lists its rows without one."""

from __future__ import annotations

from contextlib import suppress
from enum import Enum

from dsv4lib.errors import ConfigError
from dsv4lib.kernels.mhc.config import UNIT, BulkConfig, Config, SplitConfig, StreamConfig

FEW = 64  # tokens


class Form(Enum):
    """Which kernel: `simt.Mhc`, `stream.MhcStream`, `split.MhcSplit`, or `bulk.MhcBulk`."""

    PLAIN = "plain"
    STREAM = "stream"
    SPLIT = "split"
    BULK = "bulk"


def form_of(tokens: int, d: int) -> Form:
    """The form that a call of so many tokens uses: the only place that chooses.

    Timed on an H200: with 4096 tokens `STREAM` takes 169 us (d 4096) and 355 us (d 7168) where `PLAIN` takes 210 and
    398, with 128 tokens 16 and 21 where it takes 16 and 26; with 1 to 32 `PLAIN` is 0.6 to 1.6 us faster. `SPLIT` and
    `BULK` have not been timed, so they are never chosen.

    ``python -m dsv4lib.bench.ops.harness --only mhc --ways ours --ahead 8`` times all. streams, post and comb are the
    same to fp32; to choose another form changes y by about what the rounding of x does. With `BULK`, some streams (2 of
    100,000) round to the other side, and y, post and comb follow.
    """
    return Form.STREAM if tokens > FEW and Form.STREAM in forms(d) else Form.PLAIN


def forms(d: int) -> list[Form]:
    """The forms that fit an SM at this width."""
    found = []
    for form, config in zip(Form, (Config, StreamConfig, SplitConfig, BulkConfig), strict=True):
        with suppress(ConfigError):
            config(d=d, cluster=cluster_of(d))
            found.append(form)
    return found


def cluster_of(d: int) -> int:
    """The largest cluster that divides ``d``: a CTA then fetches and keeps least of fn."""
    return next(size for size in (16, 8, 4) if d % (UNIT * size) == 0)
