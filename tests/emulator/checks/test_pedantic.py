"""What the code shows without running, what only the PTX ISA asks for, and how checks are chosen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from dsv4lib.emulator.checks import KINDS, clauses
from dsv4lib.emulator.checks.kinds import GROUPS
from dsv4lib.emulator.checks.selection import PRESETS, select
from dsv4lib.emulator.driver.device import make
from dsv4lib.emulator.machine.request import Settings
from dsv4lib.emulator.native import abi
from dsv4lib.errors import ArgumentError
from tests.emulator.checks.test_kinds import ALLOC, FENCE, FREE, LD, USE, WLD
from tests.emulator.checks.test_phases import HAND_OVER
from tests.emulator.checks.test_race import FILL, INIT, SMEM, START, WAIT_GROUP, WGMMA, wait
from tests.emulator.launching import HEADER, aligned, entry, launch

AFTER = "tcgen05.fence::after_thread_sync;"


@dataclass(frozen=True)
class Twin:
    """Bodies of the broken and the repaired kernel; what is reported and at which instruction."""

    broken: str
    repaired: str
    at: str
    threads: int = 64
    arch: str = "sm_100a"
    head: str = START


TWINS = {
    "missing_tcgen05_fence": Twin(
        ALLOC + HAND_OVER.format(USE, "", LD.format("") + WLD) + FREE,
        ALLOC + HAND_OVER.format(USE, "", AFTER + LD.format("") + WLD) + FREE,
        "tcgen05.ld",
        threads=160,
    ),
    "tcgen05_ld_used_early": Twin(
        ALLOC + USE + LD.format("") + "add.u32 %r31, %r30, 1;" + WLD + FREE,
        ALLOC + USE + LD.format("") + WLD + "add.u32 %r31, %r30, 1;" + FREE,
        "add.u32",
    ),
    "missing_proxy_fence_overwrite": Twin(
        INIT.format(1, 1) + "st.shared.b32 [%r1], %r0; bar.sync 0;" + FILL + wait("%r8", 0, "W"),
        INIT.format(1, 1) + "st.shared.b32 [%r1], %r0;" + FENCE + "bar.sync 0;" + FILL + wait("%r8", 0, "W"),
        "cp.async.bulk",
    ),
    "uninitialised_register": Twin(
        "@%p2 bra ON; mov.u32 %r51, 1; bra OUT; ON: add.u32 %r50, %r51, 1; st.shared.b32 [%r1], %r50; OUT:",
        "mov.u32 %r51, 1; @%p2 bra ON; bra OUT; ON: add.u32 %r50, %r51, 1; st.shared.b32 [%r1], %r50; OUT:",
        "add.u32",
    ),
    "missing_wgmma_wait": Twin(
        WGMMA.format("wgmma.fence.sync.aligned;", "add.f32 %f5, %f1, %f2;" + WAIT_GROUP),
        WGMMA.format("wgmma.fence.sync.aligned;", WAIT_GROUP + "add.f32 %f5, %f1, %f2;"),
        "add.f32",
        threads=128,
        arch="sm_90a",
        head="",
    ),
    "missing_wgmma_fence": Twin(
        WGMMA.format("", WAIT_GROUP),
        WGMMA.format("wgmma.fence.sync.aligned;", WAIT_GROUP),
        "wgmma.mma_async",
        threads=128,
        arch="sm_90a",
        head="",
    ),
}


def run(body: str, twin: Twin, checks: str = "race,pedantic,code"):
    chosen = select(checks)
    settings = Settings(
        arch=twin.arch, native_checks=chosen.bits, muted=chosen.muted, schedule="adversarial", instruction_limit=200_000
    )
    text = entry("u64 data", twin.head + body, shared=SMEM).replace("sm_100a", twin.arch)
    assert HEADER.splitlines()[1] == ".target sm_100a"
    return launch(text, aligned(1024, np.uint32), block=twin.threads, settings=settings)


@pytest.mark.parametrize("kind", TWINS)
def test_the_bug_is_reported(kind):
    twin = TWINS[kind]
    found = [h for h in run(twin.broken, twin).hazards if h.kind == kind]
    assert found and twin.at in found[0].place.ptx and found[0].place.ptx_line > 0
    if kind != "uninitialised_register":
        assert found[0].place.warp is not None
    if kind not in ("uninitialised_register", "missing_wgmma_fence"):
        assert found[0].owner is not None and found[0].owner.ptx != found[0].place.ptx


@pytest.mark.parametrize("kind", TWINS)
def test_the_repaired_twin_is_silent(kind):
    assert kind not in {h.kind for h in run(TWINS[kind].repaired, TWINS[kind]).hazards}


@pytest.mark.parametrize("kind", [kind for kind in TWINS if KINDS[kind].check == "pedantic"])
def test_pedantic_checks_are_off_by_default(kind):
    assert kind not in {h.kind for h in run(TWINS[kind].broken, TWINS[kind], "race,counters").hazards}
    for checks in (kind, "all"):
        assert kind in {h.kind for h in run(TWINS[kind].broken, TWINS[kind], checks).hazards}


def test_a_register_whose_value_does_not_matter_is_not_reported():
    """What nothing sets goes into a sum that nothing stores; with a store, a branch or an address it does."""
    twin = TWINS["uninitialised_register"]
    for use, reported in (
        ("", False),
        ("mul.lo.u32 %r52, %r50, 3;", False),
        ("st.shared.b32 [%r1], %r50;", True),
        ("setp.eq.u32 %p5, %r50, 3; @%p5 bra OUT; OUT:", True),
        ("and.b32 %r52, %r50, 60; add.u32 %r52, %r52, %r2; st.shared.b32 [%r52], 1;", True),
    ):
        kinds = {h.kind for h in run(f"add.u32 %r50, %r51, 1; {use}", twin).hazards}
        assert ("uninitialised_register" in kinds) == reported, use


def test_registers_touched_between_two_wgmma_need_a_fence():
    fence, again = "wgmma.fence.sync.aligned;", WGMMA[WGMMA.index("wgmma.mma_async") : WGMMA.index("wgmma.commit")]
    again = again.replace("{{", "{").replace("}}", "}")
    for repair, expected in (("", {"missing_wgmma_fence"}), (fence, set())):
        body = WGMMA.format(fence, WAIT_GROUP + "add.f32 %f1, %f1, %f2;" + repair + again)
        body += "wgmma.commit_group.sync.aligned;" + WAIT_GROUP
        kinds = {h.kind for h in run(body, TWINS["missing_wgmma_fence"]).hazards}
        assert kinds & {"missing_wgmma_fence", "missing_wgmma_wait"} == expected


def test_accumulators_pass_from_one_wgmma_to_the_next_without_a_fence():
    again = WGMMA[WGMMA.index("wgmma.mma_async") : WGMMA.index("wgmma.commit")].replace("{{", "{").replace("}}", "}")
    body = WGMMA.format("wgmma.fence.sync.aligned;", again + "wgmma.commit_group.sync.aligned;" + WAIT_GROUP)
    kinds = {h.kind for h in run(body, TWINS["missing_wgmma_fence"]).hazards}
    assert not kinds & {"missing_wgmma_fence", "missing_wgmma_wait"}


def test_a_group_that_may_still_be_pending_counts():
    """wait_group 1 leaves the last of two groups."""
    again = WGMMA[WGMMA.index("wgmma.mma_async") : WGMMA.index("wgmma.commit")].replace("{{", "{").replace("}}", "}")
    body = again + "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned {}; add.f32 %f5, %f1, %f2;"
    body += WAIT_GROUP
    for left, expected in ((1, True), (0, False)):
        whole = WGMMA.format("wgmma.fence.sync.aligned;", body.replace("{}", str(left)))
        kinds = {h.kind for h in run(whole, TWINS["missing_wgmma_fence"]).hazards}
        assert ("missing_wgmma_wait" in kinds) == expected


def test_a_copy_in_front_of_the_wait_is_another_name_of_the_result():
    """As NVVM places the bits of a pinned accumulator; a copy that is used there is not (test_wgmma_copies.py)."""
    twin, fence = TWINS["missing_wgmma_wait"], "wgmma.fence.sync.aligned;"
    store = "ld.param.u64 %rd40, [data]; st.global.v2.b32 [%rd40], {%r50, %r51};"
    body = "mov.f32 %f1, 0f3F800000;" + WGMMA.format(fence, "mov.b32 %r50, %f1;" + WAIT_GROUP + "mov.b32 %r51, %f1;")
    data = aligned(2, np.uint32)
    text = entry("u64 data", body + store, shared=SMEM).replace("sm_100a", twin.arch)
    found = launch(text, data, block=128, settings=Settings(arch=twin.arch, schedule="adversarial"))
    assert "missing_wgmma_wait" not in {h.kind for h in found.hazards}
    assert data[0] == data[1] and not np.isnan(data.view(np.float32)[0])


def test_a_copy_that_is_used_before_the_wait_gets_the_result_and_is_reported():
    """ptxas waits after such a wgmma: loops of CUTLASS's kind carry accumulators in copies."""
    twin, fence = TWINS["missing_wgmma_wait"], "wgmma.fence.sync.aligned;"
    body = "mov.f32 %f1, 0f3F800000;" + WGMMA.format(fence, "mov.b32 %r50, %f1; add.u32 %r51, %r50, 0;" + WAIT_GROUP)
    body += "mov.b32 %r52, %f1; ld.param.u64 %rd40, [data]; st.global.v2.b32 [%rd40], {%r51, %r52};"
    data = aligned(2, np.uint32)
    text = entry("u64 data", body, shared=SMEM).replace("sm_100a", twin.arch)
    chosen = select("race")
    settings = Settings(arch=twin.arch, schedule="adversarial", native_checks=chosen.bits, muted=chosen.muted)
    found = launch(text, data, block=128, settings=settings)
    assert "missing_wgmma_wait" in {h.kind for h in found.hazards}
    assert data[0] == data[1] and not np.isnan(data.view(np.float32)[0])


# --- how checks are chosen --------------------------------------------------------------------------------------------


def test_presets_and_names():
    assert select("off").bits == 0 and select("off").muted == frozenset(KINDS)
    default = abi.CHECK_INIT | abi.CHECK_PROXY | abi.CHECK_REPORT
    assert select("default").bits == default and select("race").bits == default | abi.CHECK_RACE
    assert select("race,counters").bits == default | abi.CHECK_RACE | abi.CHECK_COUNTERS
    more = abi.CHECK_CODE | abi.CHECK_LANES
    assert select("sanitize").bits == default | abi.CHECK_RACE | more
    assert select("all").bits == default | abi.CHECK_RACE | abi.CHECK_COUNTERS | abi.CHECK_PEDANTIC | more
    assert select("all").muted == frozenset()
    assert select("race,-tmem_lane_quarter").muted == select("race").muted | {"tmem_lane_quarter"}
    assert select("race,-race").muted == select("default").muted
    assert select("tmem_leak").bits == abi.CHECK_REPORT
    for name in (*PRESETS, *GROUPS, *KINDS):
        assert make(checks=name).settings.muted == select(name).muted
    for wrong in ("everything", "race,nonsense", "-nonsense", ""):
        with pytest.raises(ArgumentError, match="checks"):
            select(wrong)


@pytest.mark.parametrize("kind", [kind for kind in TWINS if kind.startswith("missing")])
def test_each_kind_can_be_taken_away(kind):
    assert kind not in {h.kind for h in run(TWINS[kind].broken, TWINS[kind], f"race,pedantic,code,-{kind}").hazards}


# --- the table of demands ---------------------------------------------------------------------------------------------


def test_every_kind_answers_a_demand():
    assert {kind for clause in clauses.CLAUSES for kind in clause.kinds} == set(KINDS)


def test_the_page_is_up_to_date():
    assert clauses.PAGE.read_text() == clauses.page(), "run python -m dsv4lib.emulator.checks.clauses"


def test_every_twin_that_is_named_exists():
    folder = Path(__file__).parent.parent
    missing = []
    for twin in (twin for clause in clauses.CLAUSES for twin in clause.twins):
        file, name = twin.split("::")
        name, _, parameter = name.partition("[")
        text = (folder / file).read_text()
        wanted = f'    "{parameter.removesuffix("]")}": ' if parameter else f"def {name}("
        if wanted not in text or name not in text:
            missing.append(twin)
    assert missing == []
