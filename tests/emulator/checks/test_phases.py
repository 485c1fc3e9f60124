"""Barriers whose phases can mix, wrong counts, what completions publish: bugs are reported, their twins are silent."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from dsv4lib.emulator.driver.device import CHECKS
from dsv4lib.emulator.errors import Deadlock, HazardError
from dsv4lib.emulator.machine.policies import POLICIES
from dsv4lib.emulator.machine.request import Settings
from tests.emulator.checks.test_kinds import ALLOC, FREE, LD, ST, USE, WLD, WST
from tests.emulator.checks.test_race import INIT, SMEM, START, wait
from tests.emulator.launching import aligned, entry, launch

LEADERS = "and.b32 %r5, %r0, 31; setp.eq.u32 %p3, %r5, 0;"  # %p3: first lane of a warp
ARRIVE, ANSWER = "mbarrier.arrive.shared.b64 _, [%r8];", "mbarrier.arrive.shared.b64 _, [%r9];"
# Thread 0 completes two phases; between them it takes longer than a slice. Warp 1 waits for both.
TWO_PHASES = (
    INIT.format(1, 32)
    + "@!%p1 bra OTHER; @!%p2 bra END;"
    + ARRIVE
    + "mov.u32 %r6, 0; LONG: add.u32 %r6, %r6, 1; setp.lt.u32 %p4, %r6, 3000; @%p4 bra LONG; {}"
    + ARRIVE
    + "bra END; OTHER:"
    + wait("%r8", 0, "W0")
    + ANSWER
    + wait("%r8", 1, "W1")
    + "END:"
)
COMMIT = (
    INIT.format("{}", 1) + "setp.eq.u32 %p3, %r3, 1; @!%p2 bra W; st.shared.b32 [%r2], 5;"
    "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r8]; {}"
    + wait("%r8", 0, "W")
    + "@%p3 ld.shared.b32 %r6, [%r2];"
)
# Warps 0 and 4 share a lane quarter; warps 1 to 3 have their own.
HAND_OVER = (
    "setp.lt.u32 %p4, %r3, 4; @!%p4 bra SECOND; {} bar.sync 1, 160; {} bra DONE; SECOND: bar.sync 1, 160; {} DONE:"
)


@dataclass(frozen=True)
class Twin:
    """Bodies of the broken and the repaired kernel; what is reported and at which instruction."""

    broken: str
    repaired: str
    kind: str
    at: str
    threads: int = 64
    own: bool = True  # reported together with the other instruction


TWINS = {
    "two arrivals where one is expected": Twin(
        INIT.format(1, 1) + LEADERS + "@%p3 " + ARRIVE,
        INIT.format(2, 1) + LEADERS + "@%p3 " + ARRIVE,
        "barrier_phase_mixed",
        "mbarrier.arrive",
    ),
    "a named barrier of half the warps": Twin(
        "bar.sync 1, 64;", "bar.sync 1, 128;", "barrier_phase_mixed", "bar.sync", threads=128, own=False
    ),
    "one named barrier for two groups": Twin(
        "setp.lt.u32 %p4, %r3, 2; @%p4 bra FIRST; bar.sync 1, 64; bra END; FIRST: bar.sync 1, 64; END:",
        "setp.lt.u32 %p4, %r3, 2; @%p4 bra FIRST; bar.sync 2, 64; bra END; FIRST: bar.sync 1, 64; END:",
        "barrier_phase_mixed",
        "bar.sync",
        threads=128,
        own=False,
    ),
    "the next phase does not wait for the waiting warps": Twin(
        TWO_PHASES.format(""),
        TWO_PHASES.format(wait("%r9", 0, "V")),
        "mbarrier_phase_unordered",
        "mbarrier.try_wait",
    ),
    "a commit publishes nothing but its own": Twin(
        COMMIT.format(1, ""), COMMIT.format(2, ARRIVE), "race_through_completion", "ld.shared"
    ),
    "stores to tensor memory that are handed over before they are waited for": Twin(
        ALLOC + HAND_OVER.format(ST.format(""), WST, LD.format("") + WLD) + FREE,
        ALLOC + HAND_OVER.format(ST.format("") + WST, "", LD.format("") + WLD) + FREE,
        "missing_tcgen05_wait|race_tensor",  # the latter if the wait has come late when the conflict is found
        "tcgen05",
        threads=160,
    ),
    "loads of tensor memory that are handed over before they are waited for": Twin(
        ALLOC + HAND_OVER.format(USE + LD.format(""), WLD, ST.format("") + WST) + FREE,
        ALLOC + HAND_OVER.format(USE + LD.format("") + WLD, "", ST.format("") + WST) + FREE,
        "missing_tcgen05_wait|race_tensor",  # the latter if the wait has come late when the conflict is found
        "tcgen05",
        threads=160,
    ),
}


def run(body: str, threads: int = 64, schedule: str = "round_robin", seed: int = 0, checks: str = "race"):
    settings = Settings(schedule=schedule, seed=seed, native_checks=CHECKS[checks], instruction_limit=200_000)
    return launch(
        entry("u64 data", START + body, shared=SMEM), aligned(64, np.uint32), block=threads, settings=settings
    )


SCHEDULES = [(name, 0) for name in POLICIES] + [("random", 1), ("adversarial", 1)]


@pytest.mark.parametrize("name", TWINS)
def test_the_repaired_twin_is_silent(name):
    for schedule, seed in SCHEDULES:
        assert run(TWINS[name].repaired, TWINS[name].threads, schedule, seed).hazards == [], schedule


@pytest.mark.parametrize("name", TWINS)
def test_the_bug_is_reported_under_every_schedule(name):
    twin = TWINS[name]
    for schedule, seed in SCHEDULES:
        try:
            hazards = run(twin.broken, twin.threads, schedule, seed).hazards
        except Deadlock:  # a phase came and went before its waiters looked: what the check warns of
            assert twin.kind == "mbarrier_phase_unordered" and schedule != "round_robin"
            continue
        found = [h for h in hazards if h.kind in twin.kind.split("|")[: 1 if schedule == "round_robin" else 2]]
        assert found, (schedule, hazards)
        assert twin.at in found[0].place.ptx and found[0].place.cta is not None and found[0].place.warp is not None
        assert (found[0].owner is not None) == twin.own


@pytest.mark.parametrize(
    ("body", "threads", "error", "message"),
    [
        ("bar.sync 1, 64;", 96, Deadlock, r"barrier 1: 32 of 64 threads arrived"),
        ("bar.sync 1, 128;", 96, Deadlock, r"barrier 1: 96 of 128 threads arrived"),
        ("setp.lt.u32 %p4, %r3, 2; @%p4 bar.sync 1, 128; @!%p4 bar.sync 1, 96;", 128, HazardError, r"used with"),
        ("@%p1 bar.arrive 1, 96; @!%p1 bar.arrive 1, 32;", 64, HazardError, r"used with"),
        ("@%p1 bar.arrive 1, 128; @%p1 bar.arrive 1, 128; @!%p1 bar.sync 1, 128;", 64, Deadlock, r"96 of 128 threads"),
        ("bar.sync 1, 48;", 64, HazardError, r"not a positive multiple of 32"),
    ],
)
def test_barriers_of_the_wrong_number_of_threads_stop_the_launch(body, threads, error, message):
    with pytest.raises(error, match=message) as caught:
        run(body, threads)
    assert "bar." in str(caught.value)


@pytest.mark.parametrize("count", [3, 1])
def test_a_wrong_arrival_count(count):
    """Too many expected: all warps wait. Too few: the second arrival is too many, or of the next phase."""
    body = INIT.format(count, 1) + LEADERS + "@%p3 " + ARRIVE + wait("%r8", 0, "W")
    if count == 3:
        with pytest.raises(Deadlock, match=r"2 of 3 arrived") as caught:
            run(body)
        assert "mbarrier.try_wait" in str(caught.value)
    else:
        try:
            found = {h.kind for h in run(body).hazards}
        except Deadlock as error:
            found = {h.kind for h in error.hazards}
        assert "barrier_phase_mixed" in found


def test_too_many_bytes_are_expected():
    body = INIT.format(1, 1) + "@%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 272; @%p2 cp.async.bulk.shared::cta"
    body += ".global.mbarrier::complete_tx::bytes [%r2], [%rd1], 256, [%r8];" + wait("%r8", 0, "W")
    with pytest.raises(Deadlock, match=r"16 bytes outstanding"):
        run(body)
    assert run(body.replace("272", "256")).hazards == []
