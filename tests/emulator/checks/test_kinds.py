"""A twin for every other kind of hazard: the bug is reported at its instruction, the repaired kernel is silent."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from dsv4lib.emulator import checks as hazards
from dsv4lib.emulator.checks import KINDS, Hazard, errors, table
from dsv4lib.emulator.driver.device import CHECKS, make
from dsv4lib.emulator.errors import EmulatorError, HazardError
from dsv4lib.emulator.machine.request import Settings
from dsv4lib.emulator.native import abi
from dsv4lib.errors import ArgumentError
from tests.emulator.checks.test_race import FILL, INIT, SMEM, START, TWINS, wait
from tests.emulator.launching import aligned, entry, launch, prepare
from tests.emulator.suite.test_suite import CASES

ALLOC = (
    "@!%p1 bra SKIP; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2+4096], 64; SKIP: bar.sync 0;"
    "ld.shared.b32 %r20, [%r2+4096];"
    # %r22: the warp's own quarter, 32 lanes << 16
    "and.b32 %r21, %r3, 3; shl.b32 %r21, %r21, 21; add.s32 %r22, %r20, %r21;"
)
FREE = "bar.sync 0; @!%p1 bra KEEP; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 64; KEEP:"
ST, LD = (
    "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r22{}], {{%r0}};",
    "tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r30}}, [%r22{}];",
)
WST, WLD = "tcgen05.wait::st.sync.aligned;", "tcgen05.wait::ld.sync.aligned;"
USE = ST.format("") + WST + LD.format("") + WLD
BULK = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 256, [%r8];"
STORE = "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], 256; cp.async.bulk.commit_group;"
FENCE = "fence.proxy.async.shared::cta;"
# A request when no cluster is left: it fails. {} asks whether it did.
CANCEL = (
    INIT.format(1, 1)
    + "@%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 16; @%p2 clusterlaunchcontrol.try_cancel.async"
    ".shared::cta.mbarrier::complete_tx::bytes.b128 [%r2], [%r8];" + wait("%r8", 0, "W") + "{{ .reg .b128 %h;"
    "ld.shared.v2.b64 {{%rd4, %rd5}}, [%r2]; mov.b128 %h, {{%rd4, %rd5}}; {}"
    "clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r5, %h; }}"
)


@dataclass(frozen=True)
class Pair:
    """Bodies of the broken and the repaired kernel, and what is reported where."""

    broken: str
    repaired: str
    at: str
    threads: int = 64
    cluster: int = 1


PAIRS = {
    "uninitialised_smem": Pair(
        "ld.shared.b32 %r5, [%r1]; st.shared.b32 [%r1+4096], %r5;",
        "st.shared.b32 [%r1], 1; ld.shared.b32 %r5, [%r1]; st.shared.b32 [%r1+4096], %r5;",
        "ld.sh",
    ),
    "uninitialised_tmem": Pair(ALLOC + LD.format("") + WLD + FREE, ALLOC + USE + FREE, "tcgen05.ld"),
    "tmem_outside_allocation": Pair(
        ALLOC + ST.format("+64") + WST + FREE, ALLOC + ST.format("+63") + WST + FREE, "tcgen05.st"
    ),
    "tmem_after_free": Pair(ALLOC + FREE + "bar.sync 0;" + ST.format("") + WST, ALLOC + USE + FREE, "tcgen05.st"),
    "tmem_lane_quarter": Pair(
        ALLOC + "mov.u32 %r22, %r20;" + ST.format("") + WST + FREE, ALLOC + ST.format("") + WST + FREE, "tcgen05.st"
    ),
    "tmem_leak": Pair(ALLOC + USE, ALLOC + USE + FREE, "ret"),
    "missing_tcgen05_wait": Pair(
        ALLOC + ST.format("") + LD.format("") + WLD + WST + FREE, ALLOC + USE + FREE, "tcgen05"
    ),
    "race_tensor": Pair(  # both warps of a quarter pair: warp 4 has the quarter of warp 0
        ALLOC + USE + FREE,
        ALLOC
        + "setp.lt.u32 %p4, %r3, 4; @!%p4 bra LATE;"
        + USE
        + "LATE: bar.sync 0; @%p4 bra DONE;"
        + USE
        + "DONE:"
        + FREE,
        "tcgen05",
        threads=160,
    ),
    "async_write_after_exit": Pair(
        INIT.format(1, 1) + FILL,
        INIT.format(1, 1)
        + "@%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 256; @%p2 "
        + BULK
        + wait("%r8", 0, "W"),
        "cp.async.bulk",
    ),
    "async_read_after_exit": Pair(
        "st.shared.b32 [%r1], %r0;" + FENCE + "bar.sync 0; @!%p2 bra END;" + STORE + "END:",
        "st.shared.b32 [%r1], %r0;"
        + FENCE
        + "bar.sync 0; @!%p2 bra END;"
        + STORE
        + "cp.async.bulk.wait_group.read 0; END:",
        "cp.async.bulk",
    ),
    "missing_proxy_fence": Pair(
        "st.shared.b32 [%r1], %r0; bar.sync 0; @!%p2 bra END;" + STORE + "cp.async.bulk.wait_group 0; END:",
        # The fence of a later thread counts: it is ordered after the stores by the barrier.
        "st.shared.b32 [%r1], %r0; bar.sync 0; @!%p2 bra END;" + FENCE + STORE + "cp.async.bulk.wait_group 0; END:",
        "cp.async.bulk.global",
    ),
    "missing_proxy_fence_cp_async": Pair(
        "cvt.u64.u32 %rd2, %r0; mad.lo.u64 %rd2, %rd2, 4, %rd1; cp.async.ca.shared.global [%r1], [%rd2], 4;"
        "cp.async.wait_all; bar.sync 0; @!%p2 bra END;" + STORE + "cp.async.bulk.wait_group 0; END:",
        "cvt.u64.u32 %rd2, %r0; mad.lo.u64 %rd2, %rd2, 4, %rd1; cp.async.ca.shared.global [%r1], [%rd2], 4;"
        "cp.async.wait_all;" + FENCE + "bar.sync 0; @!%p2 bra END;" + STORE + "cp.async.bulk.wait_group 0; END:",
        "cp.async.bulk.global",
    ),
    "mbarrier_over_arrival": Pair(
        INIT.format(64, 1) + "@%p2 mbarrier.arrive.shared.b64 _, [%r8], 65;",
        INIT.format(64, 1) + "@%p2 mbarrier.arrive.shared.b64 _, [%r8], 64;",
        "mbarrier.arrive",
    ),
    "mbarrier_count_overflow": Pair(
        INIT.format(1048575, 1) + "cp.async.mbarrier.arrive.shared.b64 [%r8];",
        INIT.format(1, 1) + "cp.async.mbarrier.arrive.shared.b64 [%r8];",
        "cp.async.mbarrier.arrive",
    ),
    "mbarrier_tx_overflow": Pair(
        INIT.format(1, 1)
        + "@%p2 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r8], 1048575;" * 2
        + "@%p2 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r8], 1048575;" * 2,
        INIT.format(1, 1)
        + (
            "@%p2 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r8], 1048575;"
            "@%p2 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r8], 1048575;"
        ),
        "mbarrier.expect_tx",
    ),
    "mbarrier_tx_leftover": Pair(
        INIT.format(1, 1)
        + "@%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 260; @!%p2 bra END;"
        + BULK
        + "POLL: mbarrier.test_wait.parity.shared.b64 %p3, [%r8], 0; ld.volatile.shared.b32 %r5, [%r2+252];"
        "setp.eq.u32 %p4, %r5, 0; @%p4 bra POLL; END:",
        INIT.format(1, 1)
        + "@%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 256; @%p2 "
        + BULK
        + wait("%r8", 0, "W"),
        "mbarrier.init",
    ),
    "mbarrier_overwritten": Pair(
        INIT.format(64, 1) + "@%p2 st.shared.b32 [%r8], 0; mbarrier.arrive.shared.b64 _, [%r8];",
        INIT.format(64, 1) + "@%p2 st.shared.b32 [%r2], 0; mbarrier.arrive.shared.b64 _, [%r8];",
        "mbarrier.arrive",
    ),
    "mbarrier_reinit": Pair(
        INIT.format(64, 1) + "@%p2 mbarrier.init.shared.b64 [%r8], 32;",
        INIT.format(64, 1) + "@%p2 mbarrier.inval.shared.b64 [%r8]; @%p2 mbarrier.init.shared.b64 [%r8], 32;",
        "mbarrier.init",
    ),
    "mbarrier_parity_range": Pair(  # a number of phases where its lowest bit is wanted
        INIT.format(64, 1) + "mbarrier.test_wait.parity.shared.b64 %p3, [%r8], 3;",
        INIT.format(64, 1) + "mbarrier.test_wait.parity.shared.b64 %p3, [%r8], 1;",
        "mbarrier.test_wait",
    ),
    "mbarrier_inval_in_use": Pair(
        INIT.format(1, 1) + "@%p2 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r8], 16;"
        "@%p2 mbarrier.inval.shared.b64 [%r8];",
        INIT.format(1, 1) + "@%p2 mbarrier.inval.shared.b64 [%r8];",
        "mbarrier.inval",
    ),
    "mbarrier_no_complete": Pair(
        INIT.format(1, 1) + "@%p2 mbarrier.arrive.noComplete.shared.b64 %rd5, [%r8], 1;",
        INIT.format(2, 1) + "@%p2 mbarrier.arrive.noComplete.shared.b64 %rd5, [%r8], 1;",
        "mbarrier.arrive",
    ),
    "mbarrier_tx_unexpected": Pair(  # two copies, bytes of one: the phase completes when the first is there
        INIT.format(1, 1)
        + "@%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 256; @!%p2 bra END;"
        + BULK
        + BULK.replace("[%r2]", "[%r2+256]")
        + "POLL: mbarrier.test_wait.parity.shared.b64 %p3, [%r8], 0; ld.volatile.shared.b32 %r5, [%r2+508];"
        "setp.eq.u32 %p4, %r5, 0; @%p4 bra POLL; END:",
        INIT.format(1, 1)
        + "@%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 512; @!%p2 bra END;"
        + BULK
        + BULK.replace("[%r2]", "[%r2+256]")
        + wait("%r8", 0, "W")
        + "END:",
        "mbarrier.init",
    ),
    "clc_failed_response": Pair(
        CANCEL.format(""),
        CANCEL.format("clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p3, %h;"),
        "get_first_ctaid",
    ),
    "barrier_double_arrive": Pair(
        "@%p1 bar.arrive 1, 96; @%p1 bar.arrive 1, 96; @!%p1 bar.sync 1, 96;",
        "@%p1 bar.arrive 1, 64; @!%p1 bar.sync 1, 64;",
        "bar.arrive",
    ),
    "cluster_double_arrive": Pair(
        "barrier.cluster.arrive.aligned; barrier.cluster.arrive.aligned;"
        "barrier.cluster.wait.aligned; barrier.cluster.wait.aligned;",
        "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" * 2,
        "barrier.cluster.arrive",
        cluster=2,
    ),
}


def run(body: str, pair: Pair, checks: str = "race", schedule: str = "adversarial"):
    settings = Settings(native_checks=CHECKS[checks], schedule=schedule, instruction_limit=200_000)
    shape = {"cluster": (pair.cluster, 1, 1)} if pair.cluster > 1 else {}
    data = aligned(1024, np.uint32)
    data[:] = np.arange(1, 1025)
    text = entry("u64 data", START + body, shared=SMEM)
    return launch(text, data, grid=pair.cluster, block=pair.threads, settings=settings, **shape)


@pytest.mark.parametrize("kind", PAIRS)
def test_the_bug_is_reported(kind):
    pair = PAIRS[kind]
    found = [h for h in run(pair.broken, pair).hazards if h.kind == kind]
    assert found, run(pair.broken, pair).hazards
    assert pair.at in found[0].place.ptx and found[0].place.ptx_line > 0
    assert found[0].fix and found[0].severity == KINDS[kind].severity


@pytest.mark.parametrize(
    ("kind", "owner"),
    [
        ("tmem_after_free", "tcgen05.dealloc"),
        ("mbarrier_overwritten", "st.shared"),
        ("mbarrier_over_arrival", "mbarrier.init"),
        ("missing_proxy_fence", "st.shared"),
        ("race_tensor", "tcgen05"),
    ],
)
def test_reports_name_the_other_instruction(kind, owner):
    found = next(h for h in run(PAIRS[kind].broken, PAIRS[kind]).hazards if h.kind == kind)
    assert owner in found.owner.ptx and found.owner.cta == (0, 0, 0)


@pytest.mark.parametrize("kind", PAIRS)
def test_the_repaired_twin_is_silent(kind):
    pair = PAIRS[kind]
    for schedule in ("round_robin", "adversarial", "newest_first"):
        assert run(pair.repaired, pair, schedule=schedule).hazards == [], schedule


def test_every_kind_has_a_twin():
    """Here, in the race tests, in the suite, or in a test of the unit that reports it, which must name the kind."""
    suite = {kind for case in CASES.values() for kind in case.kind.split("|")}
    here = {*PAIRS, *(twin.kind for twin in TWINS.values()), *suite}
    folder = Path(__file__).parent.parent
    texts = "\n".join(p.read_text() for p in folder.rglob("test_*.py") if p != Path(__file__))
    missing = [kind for kind in KINDS if kind not in here and f'"{kind}"' not in texts]
    assert missing == []


def test_what_the_code_reports_is_listed():
    """Every literal kind in the emulator's sources is in the table."""
    sources = "\n".join(p.read_text() for p in Path(hazards.__file__).parent.parent.rglob("*.py"))
    used = set(re.findall(r'report\(\s*"(\w+)"', sources))
    assert used and used <= set(KINDS), used - set(KINDS)


@pytest.mark.parametrize("checks", ["default", "race"])
def test_a_later_threads_fence_counts(checks):
    """With and without the race detector; a fence that comes before the stores does not count."""
    pair = PAIRS["missing_proxy_fence"]
    assert run(pair.repaired, pair, checks=checks).hazards == []
    (hazard,) = run(pair.broken, pair, checks=checks).hazards
    assert hazard.owner is None if checks == "default" else "st.shared" in hazard.owner.ptx
    early = pair.broken.replace("st.shared.b32 [%r1], %r0;", f"@%p2 {FENCE} st.shared.b32 [%r1], %r0;")
    assert {h.kind for h in run(early, pair, checks=checks).hazards} == {"missing_proxy_fence"}


@pytest.mark.parametrize("checks", ["default", "race"])
def test_warps_that_share_a_chunk_fence_their_own_words(checks):
    """Two warps write words of the same 16 bytes; each fences, and neither is ordered after the other."""
    body = "and.b32 %r4, %r0, 31; mad.lo.u32 %r4, %r4, 8, %r2; mad.lo.u32 %r4, %r3, 4, %r4; st.shared.b32 [%r4], %r0;"
    end = "bar.sync 0; @!%p2 bra END;" + STORE + "cp.async.bulk.wait_group 0; END:"
    pair = Pair(body + end, body + FENCE + end, "")
    for schedule in ("round_robin", "oldest_first", "newest_first", "adversarial"):
        assert run(pair.repaired, pair, checks, schedule).hazards == []
        assert {h.kind for h in run(pair.broken, pair, checks, schedule).hazards} == {"missing_proxy_fence"}


@pytest.mark.parametrize("checks", ["default", "race"])
def test_the_last_bytes_of_shared_memory(checks):
    """A fence covers them too."""
    head = "mov.u32 %r0, %tid.x; mov.u32 %r2, sm; setp.eq.u32 %p2, %r0, 0; ld.param.u64 %rd1, [data];"
    body = "@%p2 st.shared.v4.b32 [%r2+1008], {%r0, %r0, %r0, %r0};" + FENCE + "bar.sync 0; @!%p2 bra END;"
    body += "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2+1008], 16; cp.async.bulk.commit_group;"
    text = entry(
        "u64 data", head + body + "cp.async.bulk.wait_group 0; END:", shared=".shared .align 128 .b8 sm[1024];"
    )
    settings, data = Settings(native_checks=CHECKS[checks]), aligned(4, np.uint32)
    assert prepare(text, data, block=64).smem_bytes == 2048
    assert launch(text, data, block=64, settings=settings).hazards == []
    found = launch(text.replace(FENCE, ""), data, block=64, settings=settings).hazards
    assert {h.kind for h in found} == {"missing_proxy_fence"}


@pytest.mark.parametrize("schedule", ["round_robin", "newest_first", "adversarial"])
def test_lanes_may_initialise_a_barrier_one_group_after_the_other(schedule):
    """All lanes of a warp execute one mbarrier.init, half of them later; not after an arrival, not another count."""
    half = "setp.gt.u32 %p4, %r0, 15; selp.u32 %r5, {}, 1, %p4; @%p4 bra ON; nanosleep.u32 20;"
    body = half + "ON: mbarrier.init.shared.b64 [%r8], %r5; {} bar.sync 0;"
    alone = Pair("", "", "", threads=32)
    assert run(body.format(1, ""), alone, schedule=schedule).hazards == []
    for count, more in ((2, ""), (1, "mbarrier.arrive.shared.b64 _, [%r8], 1;")):
        found = run(body.format(count, more), alone, schedule=schedule).hazards
        assert "mbarrier_reinit" in {h.kind for h in found}


def test_off_reports_nothing():
    assert run(PAIRS["tmem_leak"].broken, PAIRS["tmem_leak"], checks="off").hazards == []


def test_fatal_kinds_stop_the_launch():
    pair = PAIRS["uninitialised_smem"]
    text = entry("u64 data", START + pair.broken, shared=SMEM)
    for fatal in ("uninitialised_smem", "error", "all"):
        with pytest.raises(HazardError, match="uninitialised_smem") as caught:
            launch(text, aligned(4, np.uint32), block=64, settings=Settings(fatal=frozenset((fatal,))))
        assert [h.kind for h in caught.value.hazards] == ["uninitialised_smem"]
    assert launch(text, aligned(4, np.uint32), block=64, settings=Settings(fatal=frozenset(("lint",)))).hazards


def test_unknown_kinds_are_refused():
    with pytest.raises(ArgumentError, match="no_such_kind"):
        make(fatal=["no_such_kind"])
    with pytest.raises(ArgumentError, match="checks"):
        make(checks="everything")


def test_table_and_severity():
    lint, error = Hazard("tmem_lane_quarter", "a", None), Hazard("tmem_leak", "b", None, count=3)
    assert errors([lint, error]) == [error]
    assert [row["kind"] for row in table([lint, error])] == ["tmem_leak", "tmem_lane_quarter"]
    assert "[lint]" in str(lint) and "(3 times)" in str(error)


@pytest.mark.parametrize(("stride", "conflicts", "sectors"), [(1, 0, 4), (32, 31, 32)])
def test_bank_conflicts_and_sectors_are_counted(stride, conflicts, sectors):
    """A column of a row-major 32 x 32 matrix: every lane in the same bank, every lane its own sector."""
    body = (
        START
        + f"mul.lo.u32 %r4, %r0, {4 * stride}; add.s32 %r5, %r4, %r2; st.shared.b32 [%r5], %r0;"
        + ("cvt.u64.u32 %rd2, %r4; add.s64 %rd2, %rd2, %rd1; st.global.b32 [%rd2], %r0;")
    )
    text = entry("u64 data", body, shared=SMEM)
    settings = Settings(native_checks=CHECKS["race"] | abi.CHECK_COUNTERS)
    result = launch(text, aligned(1024, np.uint32), block=32, settings=settings)
    assert (result.stats["bank_conflicts"], result.stats["global_sectors"]) == (conflicts, sectors)
    assert result.hazards == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.global.b32 %r5, [%rd1+4096];", "outside every allocation"),
        ("ld.global.b32 %r5, [%rd1+2];", "not a multiple of 4"),
        ("st.shared.b32 [%r2+1000000], 1;", "outside shared memory"),
        ("@%p1 bar.sync 1, 33;", "multiple of 32"),
        ("mbarrier.arrive.shared.b64 _, [%r8];", "no mbarrier was initialised"),
    ],
)
def test_impossible_accesses_stop_with_their_place(body, message):
    pair = Pair(body, "", "")
    with pytest.raises(EmulatorError) as caught:
        run(body, pair, checks="default", schedule="round_robin")
        pytest.fail("nothing was raised")
    assert re.search(message, str(caught.value)) and caught.value.place.ptx_line > 0


MEET = """
mov.u32 %r1, %tid.x; mov.u32 %r2, bar; setp.ne.u32 %p1, %r1, 0; @!%p1 mbarrier.init.shared.b64 [%r2], 32; bar.sync 0;
setp.ge.u32 %p2, %r1, 32; @%p2 bra OTHER; and.b32 %r3, %r1, 1; setp.eq.u32 %p3, %r3, 1; @%p3 bra LATE;
WAIT: mbarrier.try_wait.parity.shared.b64 %p4, [%r2], 0; @!%p4 bra WAIT;
bra JOIN;
LATE: bra WAIT;
OTHER: mbarrier.arrive.shared.b64 _, [%r2];
JOIN: bar.sync 0; @!%p1 mbarrier.inval.shared.b64 [%r2];
"""


@pytest.mark.parametrize("schedule", ["round_robin", "newest_first", "adversarial"])
def test_no_lane_waits_on_after_lanes_merged_at_a_wait(schedule):
    """Half of a warp waits, the other half comes to the same wait: when both have passed, no lane waits any more."""
    text = entry("u64 data", MEET, shared=".shared .align 8 .b8 bar[8];")
    found = launch(text, aligned(1, np.uint64), block=64, settings=Settings(schedule=schedule)).hazards
    assert not found
