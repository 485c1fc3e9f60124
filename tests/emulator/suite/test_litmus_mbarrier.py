"""Litmus tests of mbarriers: message passing whose flag is a phase, by every order and scope of arrival and wait.

One thread stores a word and arrives, another waits for the phase and loads the word. The oracle of litmus.py says of
the same program with a flag whether the old word may be read; if and only if it may, a race is reported. What lies
between is judged, not the numbers, so that holds under every schedule.
"""

from __future__ import annotations

import itertools

import pytest

from dsv4lib.emulator.machine.policies import POLICIES
from tests.emulator.suite.common import CLUSTER, INIT, PEER
from tests.emulator.suite.harness import Case, run
from tests.emulator.suite.litmus import ACQ_REL, Litmus, get, outcomes, put

WEAK = (1, 0)  # the flag is seen, the word is old
PROGRAMS = list(itertools.product(("release", "relaxed"), (False, True), ("acquire", "relaxed"), (False, True)))
LOOP = "W: mbarrier.try_wait.parity.{}.{}.shared.b64 %p9, [%r8], 0;\n@!%p9 bra W;\n"
LOADED = "ld.shared.b32 %r20, [%r2];\nst.global.b32 [%rd5], %r20;\n"


def allowed(release: str, before: bool, acquire: str, after: bool) -> set[tuple[int, ...]]:
    """Enumerate what may be seen of the flag and of the word."""
    first = (put("x"), *([ACQ_REL] if before else []), put("y", 1, release))
    second = (get("y", acquire), *([ACQ_REL] if after else []), get("x"))
    return outcomes(Litmus((first, second)))


def warps(release: str, before: bool, acquire: str, after: bool, scope: str = "cta") -> Case:
    """Write the program for two warps of a CTA."""
    fence = f"fence.acq_rel.{scope};\n"
    text = (
        INIT.format(1, 1) + "@!%p3 bra END;\n@!%p1 bra OTHER;\nst.shared.b32 [%r2], %r0;\n" + fence * before
        + f"mbarrier.arrive.{release}.{scope}.shared.b64 _, [%r8];\nbra END;\nOTHER:\n"
        + LOOP.format(acquire, scope) + fence * after + LOADED + "END:\n"
    )  # fmt: skip
    return Case("race_shared", text)


def peers(release: str, before: bool, acquire: str, after: bool, scope: str = "cluster") -> Case:
    """Write the program for two CTAs of a cluster: the first stores into the second, and arrives there."""
    fence = f"fence.acq_rel.{scope};\n"
    text = (
        INIT.format(1, 1) + "fence.mbarrier_init.release.cluster;\n" + CLUSTER + PEER.format("%r8")
        + "mapa.shared::cluster.u32 %r14, %r2, %r12;\n@!%p3 bra END;\n@!%p4 bra OTHER;\n"
        "st.shared::cluster.b32 [%r14], %r0;\n" + fence * before
        + f"mbarrier.arrive.{release}.{scope}.shared::cluster.b64 _, [%r13];\nbra END;\nOTHER:\n"
        + LOOP.format(acquire, "cluster") + "fence.acq_rel.cluster;\n" * after + LOADED + "END:\n" + CLUSTER
    )  # fmt: skip
    return Case("race_shared", text, threads=32, grid=2, cluster=2)


def reported(case: Case) -> list[set[str]]:
    """List the kinds of hazards under every schedule."""
    return [run(case, False, schedule).kinds for schedule in POLICIES]


@pytest.mark.parametrize("threads", [warps, peers])
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_a_race_is_reported_where_the_old_word_may_be_read(program, threads):
    expected = {"race_shared"} if WEAK in allowed(*program) else set()
    assert reported(threads(*program)) == [expected] * len(POLICIES)


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_a_scope_that_ends_at_the_cta_orders_nothing_for_a_peer(program):
    assert reported(peers(*program, scope="cta")) == [{"race_shared"}] * len(POLICIES)


def test_the_oracle_tells_the_programs_apart():
    weak = {program for program in PROGRAMS if WEAK in allowed(*program)}
    ordered = {p for p in PROGRAMS if (p[0] == "release" or p[1]) and (p[2] == "acquire" or p[3])}
    assert len(PROGRAMS) == 16 and len(ordered) == 9 and weak == set(PROGRAMS) - ordered
