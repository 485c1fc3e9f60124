"""Forms of the mHC kernel, and which one a call uses. It needs no DSL: the bench lists its rows without one."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

from dsv4lib.errors import ConfigError
from dsv4lib.kernels.mhc.config import UNIT, Config


class Form(NamedTuple):
    """Which form of the kernel: settings ``gram`` and ``groups`` of `config.Config`."""

    gram: bool = False
    groups: int = 1

    def __str__(self) -> str:
        return ", ".join(["gram"] * self.gram + [f"{self.groups} groups"] * (self.groups > 1)) or "plain"


PLAIN, GRAM, GROUPS = Form(), Form(True), Form(True, 2)


def form_of(tokens: int, d: int) -> Form:
    """The form that a call of so many tokens uses: the only place that chooses.

    `PLAIN` is the one that was timed on a GPU; the others were not. A tile of 16 tokens costs them 5 % (`GRAM`) and 7 %
    (`GROUPS`) more PTX instructions in the emulator, and one wait for the cluster and one barrier of the workers
    instead of two. So `GRAM` is expected to pay where waits count, with few tokens and where `GROUPS` does not fit
    (Pro), and `GROUPS`, which has a second tile at work while one waits, from about 128 tokens.

    ``python -m dsv4lib.bench.ops.harness --only mhc --ways ours --ahead 8`` times them side by side ("ours",
    "ours, gram", "ours, gram, 2 groups"). y of the last two has the same bits, but not those of the first: to choose
    another form changes y by about what the rounding of x does.
    """
    return PLAIN


def forms(d: int) -> list[Form]:
    """The forms that fit an SM at this width."""
    found = []
    for form in (PLAIN, GRAM, GROUPS):
        with suppress(ConfigError):
            Config(d=d, cluster=cluster_of(d), **form._asdict())
            found.append(form)
    return found


def cluster_of(d: int) -> int:
    """The largest cluster that divides ``d``: a CTA then fetches and keeps least of fn."""
    return next(size for size in (16, 8, 4) if d % (UNIT * size) == 0)
