"""Litmus tests: what the emulator shows is allowed by the PTX memory model, races are reported, the rest is silent."""

from __future__ import annotations

import numpy as np
import pytest

from dsv4lib.emulator.checks.selection import select
from dsv4lib.emulator.machine.policies import POLICIES
from dsv4lib.emulator.machine.request import Settings
from tests.cases import cases
from tests.emulator.launching import entry, launch
from tests.emulator.suite.harness import SMEM, START, numbers
from tests.emulator.suite.litmus import TESTS, WEAK, Litmus, outcomes, program

SCOPES = ("cta", "cluster", "gpu", "sys")
SCHEDULES = [(name, 0) for name in POLICIES] + [("random", seed) for seed in range(1, 5)]


def run(test: Litmus, scope: str, schedule: str, seed: int, weak: bool = False) -> tuple[tuple[int, ...], set[str]]:
    """The outcome of one run, and what was reported."""
    n, loads = len(test.threads), sum(e.word != "" and e.value < 0 for thread in test.threads for e in thread)
    shape = {"cta": (1, 32 * n, 1), "cluster": (n, 32, n)}.get(scope, (n, 32, 1))
    chosen, data = select("sanitize"), numbers()
    settings = Settings(native_checks=chosen.bits, muted=chosen.muted, schedule=schedule, seed=seed)
    more = {"cluster": (shape[2], 1, 1)} if shape[2] > 1 else {}
    if scope != "cta":
        more["attributes"] = {"cooperative": True}  # all CTAs run side by side
    text = entry("u64 data", START + program(test, scope, weak), shared=SMEM)
    found = launch(text, data, grid=shape[0], block=shape[1], settings=settings, **more).hazards
    flags = 12288 // 4
    seen = (data[flags], data[flags + 16]) if test.final else data[1024 : 1024 + 32 * loads : 32]
    return tuple(int(v) for v in seen), {h.kind for h in found}


@pytest.mark.parametrize("name", TESTS)
def test_the_oracle_tells_strong_programs_from_weak_ones(name):
    assert (TESTS[name].weak in outcomes(TESTS[name])) == WEAK[name]


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("name", TESTS)
def test_outcomes_are_allowed_and_nothing_is_reported(name, scope):
    """Relaxed accesses of a scope that includes both threads do not race, whatever they order."""
    test = TESTS[name]
    allowed, seen = outcomes(test), set()
    for schedule, seed in SCHEDULES:
        outcome, kinds = run(test, scope, schedule, seed)
        assert kinds == set(), (schedule, seed)
        seen.add(outcome)
    assert seen <= allowed
    # The emulator is sequentially consistent: it shows no outcome that only a weak memory has (README.md).
    assert test.weak not in seen


@pytest.mark.parametrize(
    ("name", "scope"),
    cases(("MP", "gpu"), ("CoRR", "cta"), full=[(n, s) for n in TESTS for s in SCOPES if (n, s) != ("MP", "gpu")]),
)
def test_weak_accesses_race(name, scope):
    for schedule, seed in SCHEDULES:
        _, kinds = run(TESTS[name], scope, schedule, seed, weak=True)
        assert kinds & {"race_global", "race_global_same_value"}, (schedule, seed)


def test_schedules_show_several_outcomes():
    """Else the tests above would prove nothing."""
    for name, least in (("MP", 3), ("SB", 3), ("IRIW", 3), ("2+2W", 2)):
        runs = [("random", seed) for seed in range(24)] + SCHEDULES
        seen = {run(TESTS[name], "gpu", schedule, seed)[0] for schedule, seed in runs}
        assert len(seen) >= least, (name, seen)


def test_a_model_that_forbids_too_little_is_noticed():
    """The oracle without its fences, releases and acquires allows every outcome that it forbids with them."""
    for name, allowed in WEAK.items():
        if allowed or name == "CoRR":
            continue
        plain = tuple(tuple(e._replace(order="relaxed") for e in thread if e.word) for thread in TESTS[name].threads)
        assert TESTS[name].weak in outcomes(Litmus(plain, final=TESTS[name].final)), name
    assert np.all([WEAK[name] == (TESTS[name].weak in outcomes(TESTS[name])) for name in TESTS])
