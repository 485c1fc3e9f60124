"""Litmus tests through the async proxy: message passing whose data goes by bulk copies and st.async.

CTA 0 writes a word and raises a flag; CTA 1 looks at the flag once and, if it is raised, reads the word. An outcome is
(flag, word); of the word 0 is the old value and 7 the new one. What is late here is really late in the emulator, so a
weak outcome is not only reported but seen. Source: PTX ISA, "Async proxy", "Async operations", "Memory Consistency
Model"; completion mechanisms publish the writes of their own operation.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from dsv4lib.emulator.checks.selection import select
from dsv4lib.emulator.machine.policies import POLICIES
from dsv4lib.emulator.machine.request import Settings
from tests.emulator.launching import entry, launch
from tests.emulator.suite.common import BULK, STORE, wait
from tests.emulator.suite.harness import SMEM, START, numbers

OLD, NEW = 0, 7
X = "[%rd1+2048]"
SCHEDULES = [(name, 0) for name in POLICIES] + [("random", seed) for seed in range(1, 5)]
SEVEN = "mov.u32 %r20, 7;\nst.shared.v4.b32 [%r2], {%r20, %r20, %r20, %r20};\n"
FENCE = "fence.proxy.async.shared::cta;\n"
SEND = f"{STORE} {X}, [%r2], 16;\ncp.async.bulk.commit_group;\ncp.async.bulk.wait_group{{}} 0;\n"
FETCH = (
    "mbarrier.init.shared.b64 [%r8], 1;\n{}mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 16;\n"
    + f"{BULK} [%r2], {X}, 16, [%r8];\n"
    + wait("%r8", 0, "W")
    + "ld.shared.b32 %r21, [%r2];\n"
)
LOAD = f"ld.global.b32 %r21, {X};\n"


class Program(NamedTuple):
    """Two threads.

    ``put``: before CTA 0 raises the flag with ``raised``; ``get``: to %r21, by CTA 1 after it has seen it.

    Attributes:
        kinds: what is reported under every schedule that sees the flag; empty: nothing under any.
        weak: the old word may be read though the flag is raised, and is, under some schedule.
    """

    put: str
    get: str
    kinds: frozenset[str] = frozenset()
    weak: bool = False
    raised: str = "release"
    last: str = ""


PROGRAMS = {
    "a bulk store": Program(SEVEN + FENCE + SEND.format(""), LOAD),
    "a bulk store of which the reading is waited for": Program(
        SEVEN + FENCE + SEND.format(".read"), LOAD, frozenset({"race_global"}), True,
        last="cp.async.bulk.wait_group 0;\n",
    ),
    "a bulk store and a relaxed flag": Program(
        SEVEN + FENCE + SEND.format(""), LOAD, frozenset({"race_global"}), raised="relaxed"
    ),
    "a bulk store of what no fence has handed over": Program(
        SEVEN + SEND.format(""), LOAD, frozenset({"missing_proxy_fence"})
    ),
    "a fence before the store that it is for": Program(
        FENCE + SEVEN + SEND.format(""), LOAD, frozenset({"missing_proxy_fence"})
    ),
    "a bulk copy of a word": Program(f"st.global.b32 {X}, 7;\n", FETCH.format("fence.proxy.async.global;\n")),
    "a bulk copy without a fence": Program(
        f"st.global.b32 {X}, 7;\n", FETCH.format(""), frozenset({"missing_proxy_fence_global"})
    ),
    "a bulk store, then a bulk copy": Program(
        SEVEN + FENCE + SEND.format(""), FETCH.format("fence.proxy.async.global;\n")
    ),
    "a bulk reduction": Program(
        SEVEN + FENCE + SEND.format("").replace("cp.async.bulk.global.shared::cta.bulk_group",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32"), LOAD,
    ),
}  # fmt: skip


def text(program: Program) -> str:
    """Write the PTX."""
    return (
        "@!%p2 bra END;\n@!%p4 bra OTHER;\n"
        + program.put
        + f"st.{program.raised}.gpu.global.b32 [%rd4], 1;\n{program.last}bra END;\n"
        "OTHER: mov.u32 %r31, 0;\nL: add.u32 %r31, %r31, 1;\nsetp.lt.u32 %p7, %r31, 30;\n"
        "ld.acquire.gpu.global.b32 %r30, [%rd4];\nsetp.eq.u32 %p6, %r30, 0;\n@!%p6 bra SEEN;\n@%p7 bra L;\nbra END;\n"
        "SEEN:\n" + program.get + "st.global.b32 [%rd1+4096], %r30;\nst.global.b32 [%rd1+4100], %r21;\nEND:\n"
    )


def run(program: Program, schedule: str, seed: int) -> tuple[tuple[int, int], set[str]]:
    """The outcome of one run, and what was reported."""
    chosen, data = select("sanitize"), numbers()
    data[512:516] = OLD
    settings = Settings(native_checks=chosen.bits, muted=chosen.muted, schedule=schedule, seed=seed)
    made = entry("u64 data", START + text(program), shared=SMEM)
    more = {"attributes": {"cooperative": True}}
    found = launch(made, data, grid=2, block=32, settings=settings, **more).hazards
    return (int(data[1024]), int(data[1025])), {h.kind for h in found}


@pytest.mark.parametrize("name", PROGRAMS)
def test_outcomes_and_reports(name):
    program = PROGRAMS[name]
    seen = set()
    for schedule, seed in SCHEDULES:
        outcome, kinds = run(program, schedule, seed)
        if outcome[0] or not program.kinds:
            assert kinds == program.kinds, (schedule, seed, kinds)
        seen.add(outcome)
    assert (1, NEW) in seen
    assert ((1, OLD) in seen) == program.weak, seen
    assert seen <= {(0, 0), (1, OLD), (1, NEW)}
