"""Forms of the mHC kernel, and which one a call uses. It needs no DSL: the bench lists its rows without one."""

from __future__ import annotations

from contextlib import suppress
from enum import Enum

from dsv4lib.errors import ConfigError
from dsv4lib.kernels.mhc.config import BULK_WARPS, TILE, UNIT, BulkConfig, Config

FEW = 64  # tokens of a call for `PLAIN`; with its wide tiles as many as clusters take at once:
ROUND = 7  # clusters of 16 CTAs that an H200 holds


class Form(Enum):
    """Which kernel: `simt.Mhc` or `bulk.MhcBulk`."""

    PLAIN = "plain"
    BULK = "bulk"


CONFIGS = {Form.PLAIN: Config, Form.BULK: BulkConfig}


def form_of(tokens: int, d: int) -> Form:
    """The form that a call of so many tokens uses: the only place that chooses.

    Timed on an H200 (us). d 4096: `PLAIN` 7.8, 9.1, 14.0 and 14.3 with 1, 32, 128 and 160 tokens, 19.4 with 176; `BULK`
    9.8 and 10.4 with 1 and 33, 16.0, 18.0, 27.1, 44.1 and 145 with 169, 256, 512, 1024 and 4096. d 7168: `PLAIN` 11.9,
    16.9 and 25.8 with 33, 65 and 128 tokens; `BULK` 11.6, 14.9, 16.5, 24.8, 38.8, 66.7 and 236 with 33, 65, 128, 256,
    512, 1024 and 4096.

    ``python -m dsv4lib.bench.ops.harness --only mhc --ways ours --ahead 8`` times all. streams, post and comb are the
    same to fp32; to choose another form changes y by about what the rounding of x does. With `BULK`, some streams (2 of
    100,000) round to the other side, and y, post and comb follow.
    """
    fit, tile = forms(d), tile_of(Form.PLAIN, d)
    few = FEW if tile == TILE else ROUND * tile
    return Form.BULK if tokens > few and Form.BULK in fit else Form.PLAIN


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
    return CONFIGS[form](d=d, cluster=cluster_of(d, form)).tile


def cluster_of(d: int, form: Form = Form.PLAIN) -> int:
    """CTAs that share a token: the largest cluster that divides ``d``, as a CTA then fetches and keeps least of fn;
    of the grid as few as two parts of fn in their registers allow."""
    if form is Form.BULK:
        fit = (size for size in BulkConfig.sizes if d % (UNIT * size) == 0 and d <= UNIT * BULK_WARPS * size)
        return next(fit, BulkConfig.sizes[-1])
    return next(size for size in (16, 8, 4) if d % (UNIT * size) == 0)
