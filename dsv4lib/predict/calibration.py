"""Measure the error of the static model on Hopper kernels whose times are known.

data/bench/hopper_work.csv: what a CTA of each kernel does per tile and once, counted in the emulator on the compiled
SM90 code (two launches of different length subtracted). data/bench/hopper_times.csv: launches of the same code, timed
on an H200. ``clocks`` is sm__cycles_elapsed.max of Nsight Compute, caches cold, clocks not locked; for the combine
it is the time added after a kernel that writes the splits (`combine_probe`, combine_times.csv), times 1.98 GHz.
Clocks are compared, not seconds: under load the power limit lowers the clock of this card to 1.1-1.7 GHz.

A regime is what limits a launch; the error of a regime stands beside the predictions of the same regime.
"""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import dataclass, fields
from functools import lru_cache

from dsv4lib.errors import ArgumentError
from dsv4lib.predict import static_model
from dsv4lib.predict.rates import TABLE, Gpu, gpu
from dsv4lib.predict.static_model import Kernel
from dsv4lib.predict.work import NUMBERS, Form, Work

WORK, TIMES = TABLE.with_name("hopper_work.csv"), TABLE.with_name("hopper_times.csv")
REGIMES = ("gemm", "attention", "short attention", "memory", "combine")
FITTED = (
    "fa4 16x128x128",
    "fa4 512",
    "fmha 4k",
    "combine 2 parts, 8 x 64",
    "combine 16 parts, 8 x 64",
    "combine 2 parts, 1 x 64",
    "combine 16 parts, 1 x 64",
    "combine 44 parts, 1 x 64",
    "combine 8 parts, 4 x 64",
    "combine 8 parts, 4 x 128",
    "combine 2 parts, 64 x 64",
)  # launches that constants of the table were fitted to


@dataclass(frozen=True)
class Case:
    """A timed launch: its kernel, grid, tiles a CTA, bytes that cross HBM, and clocks."""

    case: str
    kernel: str
    regime: str
    ctas: int
    tiles: int
    hbm_bytes: float
    persistent: int
    clocks: float
    us: float


@dataclass(frozen=True)
class Checked:
    """A case with its modelled clocks."""

    case: Case
    clocks: float

    @property
    def error(self) -> float:
        """Return the modelled over measured clocks, minus 1. It is negative where the model is too fast."""
        return self.clocks / self.case.clocks - 1


def form_name(form: Form) -> str:
    """Name a form in the table; `form_of` reads it."""
    values = (getattr(form, f.name) for f in fields(form))
    return "mma:" + ":".join(str(int(v) if isinstance(v, bool) else v) for v in values)


def form_of(name: str) -> Form:
    """Return the form that `form_name` wrote.

    >>> form_of(form_name(Form("wgmma", 64, 128, 16, a="registers")))
    Form(kind='wgmma', m=64, n=128, k=16, group=1, ws=False, a='registers')
    """
    _, kind, m, n, k, group, ws, a = name.split(":")
    return Form(kind, int(m), int(n), int(k), int(group), ws == "1", a)


@lru_cache(maxsize=1)
def works() -> dict[tuple[str, str], Work]:
    """(kernel, "tile" or "once") -> what a CTA does.

    Raises:
        ArgumentError: a quantity that `Work` does not have.
    """
    mma: dict[tuple[str, str], Counter[Form]] = {}
    rest: dict[tuple[str, str], dict[str, float]] = {}
    with WORK.open(newline="") as file:
        for line in csv.DictReader(file):
            key, name, value = (line["kernel"], line["part"]), line["quantity"], float(line["value"])
            mma.setdefault(key, Counter())
            rest.setdefault(key, {})
            if name.startswith("mma:"):
                mma[key][form_of(name)] = value
            elif name in NUMBERS:
                rest[key][name] = value
            else:
                raise ArgumentError("quantity", name, ", ".join(NUMBERS))
    return {key: Work(mma[key], **rest[key]) for key in mma}


@lru_cache(maxsize=1)
def cases() -> tuple[Case, ...]:
    """Return every timed launch."""
    with TIMES.open(newline="") as file:
        rows = list(csv.DictReader(file))
    kinds = {f.name: {"str": str, "int": int, "float": float}[str(f.type)] for f in fields(Case)}
    return tuple(Case(**{name: kind(row[name]) for name, kind in kinds.items()}) for row in rows)


def kernel(name: str, h200: Gpu, active: int) -> Kernel:
    """Return the model of one of the kernels.

    Raises:
        ArgumentError: there is no such kernel.
    """
    if (name, "tile") not in works():
        raise ArgumentError("kernel", name, "one of " + ", ".join(sorted({key for key, _ in works()})))
    tile, once = works()[name, "tile"], works()[name, "once"]
    if not name.startswith(("fa4", "fmha")):
        return static_model.gemm(name, tile, once, 4, h200)
    roles = {}
    for role, a in (("qk", "smem"), ("pv", "registers")):
        mma = Counter({form: n for form, n in tile.mma.items() if form.a == a})
        roles[role] = Work(mma, smem_mma_bytes=sum(form.operand_bytes() * n for form, n in mma.items()))
    return static_model.attention(
        name,
        tile,
        once,
        **roles,
        stages=2,
        gpu=h200,
        scores=1,
        groups=2,
        separate=True,
        ahead=name == "fa4",
        active=active,
        shared=True,
    )


def check(h200: Gpu | None = None) -> list[Checked]:
    """Model every case: the cases with their modelled times."""
    card = h200 or gpu("H200")
    out = []
    for case in cases():
        if case.regime == "combine":  # tiles: parts
            clocks = static_model.combine_clocks(card, case.tiles, case.hbm_bytes)
        else:
            model = kernel(case.kernel, card, min(case.ctas, int(card["sms"])))
            stays = bool(case.persistent)
            time = static_model.modelled(model, card, case.ctas, case.tiles, case.hbm_bytes, persistent=stays)
            clocks = time.clocks
        out.append(Checked(case, clocks))
    return out


def error(regime: str, checked: list[Checked] | None = None) -> tuple[float, float]:
    """Return (smallest, largest) error of a regime. No constant was fitted to its launches.

    Raises:
        ArgumentError: an unknown regime.
    """
    if regime not in REGIMES:
        raise ArgumentError("regime", regime, ", ".join(REGIMES))
    errors = [c.error for c in checked or check() if c.case.regime == regime and c.case.case not in FITTED]
    return min(errors), max(errors)


def flashmla() -> tuple[float, float]:
    """Return (modelled, published) TFLOP/s of FlashMLA's sparse prefill on a B200. 128 heads, 576/512 dims, top-k 2048.

    The one SM100 kernel of this kind with a published rate. Its tile is read from its public source (deepseek-ai/
    FlashMLA, csrc/sm100/prefill/sparse/fwd/head128): a CTA pair, Q 384 dims in TMEM, K of own keys and V of own dims
    loaded apart, one buffer each in two halves. Not counted but assumed: 8 instructions a score in the softmax.
    """
    card = gpu("B200")
    qk = Counter({Form("f16", 128, 128, 16, 2, a="tmem"): 24, Form("f16", 128, 128, 16, 2): 12})
    pv = Counter({Form("f16", 128, 256, 16, 2): 16})
    roles = [Work(mma, smem_mma_bytes=sum(f.operand_bytes() * n for f, n in mma.items())) for mma in (qk, pv)]
    scores, loaded = 64 * 128 / 32, 64 * 576 * 2 + 128 * 256 * 2
    softmax = Work(exp=scores, instructions=8 * scores, smem_thread_bytes=64 * 128 * 2, syncs=4 * 6)
    tile = roles[0] + roles[1] + softmax + Work(load_bytes=loaded, l2_bytes=loaded)
    once = Work(plain_load_bytes=64 * 576 * 2, tma_store_bytes=64 * 512 * 2)
    tokens, keys = 4096, 2048
    model = static_model.attention("FlashMLA", tile, once, *roles, 2, card, scores=1, cluster=2, separate=True)
    time = static_model.modelled(model, card, 2 * tokens, keys // 128)
    return 2 * 128 * tokens * keys * (576 + 512) / time.us / 1e6, 1450.0
