"""Forms of the mHC kernel, and which one a call uses. It needs no DSL: the bench lists its rows without one."""

from __future__ import annotations

from contextlib import suppress
from enum import Enum

from dsv4lib.errors import ConfigError
from dsv4lib.kernels.mhc.config import UNIT, BulkConfig, Config, StreamConfig

FEW, MANY = 64, 256  # tokens: up to FEW `PLAIN`, from MANY on `BULK`


class Form(Enum):
    """Which kernel: `simt.Mhc`, `stream.MhcStream`, or `bulk.MhcBulk`."""

    PLAIN = "plain"
    STREAM = "stream"
    BULK = "bulk"


CONFIGS = {Form.PLAIN: Config, Form.STREAM: StreamConfig, Form.BULK: BulkConfig}


def form_of(tokens: int, d: int) -> Form:
    """The form that a call of so many tokens uses: the only place that chooses.

    Timed on an H200: with 4096 tokens of d 4096 `BULK` takes 158 us where `STREAM` takes 168 and `PLAIN` 210; with 1024
    48.1 and 50.7, with 256 20.2 and 20.6. With d 7168, where `BULK` does not fit, `STREAM` takes 355 us and `PLAIN`
    398. With 1 to 32 tokens `PLAIN` is 0.6 to 1.6 us faster than either.

    ``python -m dsv4lib.bench.ops.harness --only mhc --ways ours --ahead 8`` times all. streams, post and comb are the
    same to fp32; to choose another form changes y by about what the rounding of x does. With `BULK`, some streams (2 of
    100,000) round to the other side, and y, post and comb follow.
    """
    fit = forms(d)
    if tokens >= MANY and Form.BULK in fit:
        return Form.BULK
    return Form.STREAM if tokens > FEW and Form.STREAM in fit else Form.PLAIN


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
    return CONFIGS[form](d=d, cluster=cluster_of(d)).tile


def cluster_of(d: int) -> int:
    """The largest cluster that divides ``d``: a CTA then fetches and keeps least of fn."""
    return next(size for size in (16, 8, 4) if d % (UNIT * size) == 0)
