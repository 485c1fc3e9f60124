"""Races in small kernels: the bug is reported with its kind and both PTX lines, the repaired twin is silent.

Every kernel runs under every schedule: what is ordered does not depend on which warp ran first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from dsv4lib.emulator.checks.clocks import rows
from dsv4lib.emulator.checks.shadow import Accesses, Actor, Shadow, Words
from dsv4lib.emulator.driver.device import CHECKS
from dsv4lib.emulator.errors import Deadlock
from dsv4lib.emulator.machine.policies import POLICIES
from dsv4lib.emulator.machine.request import Settings
from dsv4lib.emulator.native.race_log import ALL_BYTES, SYNC
from tests.emulator.launching import aligned, entry, launch

SMEM = ".shared .align 1024 .b8 sm[8192]; .shared .align 8 .b64 bar; .shared .align 8 .b64 bar2;"
# %r0 thread, %r1 its word in shared memory, %r2 sm, %r3 warp, %r8 bar, %r9 bar2; warp 0 has %p1, thread 0 %p2.
START = """
mov.u32 %r0, %tid.x; mov.u32 %r2, sm; mov.u32 %r8, bar; mov.u32 %r9, bar2; ld.param.u64 %rd1, [data];
shl.b32 %r1, %r0, 2; add.s32 %r1, %r1, %r2; shr.u32 %r3, %r0, 5;
setp.eq.u32 %p1, %r3, 0; setp.eq.u32 %p2, %r0, 0;
"""
INIT = "@%p2 mbarrier.init.shared.b64 [%r8], {0}; @%p2 mbarrier.init.shared.b64 [%r9], {1}; bar.sync 0;"
NEIGHBOUR = "xor.b32 %r4, %r0, 32; shl.b32 %r4, %r4, 2; add.s32 %r4, %r4, %r2;"  # the other warp's word
BULK = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes"


FILL = f"@%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 256; @%p2 {BULK} [%r2], [%rd1], 256, [%r8];"


WAIT_GROUP = "wgmma.wait_group.sync.aligned 0;"
# 16 rows a warp of a 64 x 8 product of zeros; %rd1 describes both operands, 8 rows of 16 bytes at a time.
WGMMA = """
mov.u32 %r2, sm; shl.b32 %r1, %tid.x, 4; add.s32 %r1, %r1, %r2; mov.u32 %r9, 0; mov.b32 %f1, 0f00000000;
mov.b32 %f2, %f1; mov.b32 %f3, %f1; mov.b32 %f4, %f1; st.shared.v4.b32 [%r1], {{%r9, %r9, %r9, %r9}};
fence.proxy.async.shared::cta; bar.sync 0; shr.u32 %r3, %r2, 4; cvt.u64.u32 %rd1, %r3;
or.b64 %rd1, %rd1, 0x0000001000080000;
setp.eq.u32 %p1, %r9, %r9; {}
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{%f1, %f2, %f3, %f4}}, %rd1, %rd1, %p1, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned; {}
"""


def wait(barrier: str, parity: int, label: str) -> str:
    return f"{label}: mbarrier.try_wait.parity.shared.b64 %p9, [{barrier}], {parity}; @!%p9 bra {label};"


@dataclass(frozen=True)
class Twin:
    """A kernel with ``@``: replaced by the repair or by nothing. ``kind`` is reported without it, at ``at``."""

    body: str
    repair: str
    kind: str
    at: str
    owner: str
    threads: int = 64
    cluster: int = 1
    broken: str = ""


TWINS = {
    "read before it is written": Twin(
        NEIGHBOUR + "st.shared.b32 [%r1], %r0; ## ld.shared.b32 %r5, [%r4];",
        "bar.sync 0;",
        "race_shared",
        "ld.shared|st.shared",
        "ld.shared|st.shared",
    ),
    "written while it may be read": Twin(  # the row-maximum exchange: next round's write needs a second barrier
        NEIGHBOUR + "st.shared.b32 [%r1], %r0; bar.sync 0; ld.shared.b32 %r5, [%r4]; ## st.shared.b32 [%r1], %r5;",
        "bar.sync 0;",
        "race_shared",
        "st.shared|ld.shared",
        "ld.shared|st.shared",
    ),
    "two writers": Twin(
        "@%p2 st.shared.b32 [%r2], 1; ## setp.eq.u32 %p3, %r0, 32; @%p3 st.shared.b32 [%r2], 2;",
        "bar.sync 0;",
        "race_shared",
        "st.shared",
        "st.shared",
    ),
    "two writers of one value": Twin(
        "and.b32 %r6, %r0, 31; shl.b32 %r6, %r6, 2; add.s32 %r6, %r6, %r2; @%p1 st.shared.b32 [%r6], %r6;"
        "## @!%p1 st.shared.b32 [%r6], %r6;",
        "bar.sync 0;",
        "race_shared_same_value",
        "st.shared",
        "st.shared",
    ),
    "two writers of a matrix": Twin(
        "and.b32 %r6, %r0, 31; shl.b32 %r6, %r6, 4; add.s32 %r6, %r6, %r2; mov.u32 %r5, %r0;"
        "@%p1 stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r6], {%r5};"
        "## @!%p1 stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r6], {%r5};",
        "bar.sync 0;",
        "race_shared",
        "stmatrix",
        "stmatrix",
    ),
    "two writers of one matrix": Twin(
        "and.b32 %r6, %r0, 31; shl.b32 %r6, %r6, 4; add.s32 %r6, %r6, %r2; mov.u32 %r5, 7;"
        "@%p1 stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r6], {%r5};"
        "## @!%p1 stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r6], {%r5};",
        "bar.sync 0;",
        "race_shared_same_value",
        "stmatrix",
        "stmatrix",
    ),
    "wide accesses overlap": Twin(
        "shl.b32 %r6, %r0, 4; add.s32 %r6, %r6, %r2; st.shared.v4.b32 [%r6], {%r0, %r0, %r0, %r0}; ##"
        "xor.b32 %r7, %r0, 32; shl.b32 %r7, %r7, 4; add.s32 %r7, %r7, %r2; ld.shared.v2.b32 {%r10, %r11}, [%r7+8];",
        "bar.sync 0;",
        "race_shared",
        "ld.shared|st.shared",
        "ld.shared|st.shared",
    ),
    "generic addresses too": Twin(
        NEIGHBOUR + "cvta.shared.u64 %rd2, sm; cvt.u64.u32 %rd3, %r4; mov.u32 %r12, sm; cvt.u64.u32 %rd4, %r12;"
        "sub.s64 %rd3, %rd3, %rd4; add.s64 %rd2, %rd2, %rd3; st.shared.b32 [%r1], %r0; ## ld.b32 %r5, [%rd2];",
        "bar.sync 0;",
        "race_shared",
        "ld.b32|st.shared",
        "ld.b32|st.shared",
    ),
    "an arrival before the write": Twin(
        INIT.format(32, 32)
        + "@!%p1 bra OTHER; st.shared.b32 [%r1], %r0; ## bra END; OTHER:"
        + wait("%r8", 0, "W")
        + NEIGHBOUR
        + "ld.shared.b32 %r5, [%r4]; END:",
        "mbarrier.arrive.shared.b64 _, [%r8];",
        "race_shared",
        "ld.shared|st.shared",
        "ld.shared|st.shared",
        broken="mbarrier.arrive.shared.b64 _, [%r8]; st.shared.b32 [%r1], 7;",
    ),
    "a copy that is not waited for": Twin(
        INIT.format(1, 1) + FILL + "## ld.shared.b32 %r5, [%r1];" + wait("%r8", 0, "LATE"),
        wait("%r8", 0, "W"),
        "race_shared",
        "ld.shared|cp.async.bulk",
        "ld.shared|cp.async.bulk",
    ),
    "a buffer filled again while it is read": Twin(
        INIT.format(1, 64)
        + FILL
        + wait("%r8", 0, "W")
        + "ld.shared.b32 %r5, [%r1]; mbarrier.arrive.shared.b64 _, [%r9]; ##"
        + FILL
        + wait("%r8", 1, "V"),
        wait("%r9", 0, "U"),
        "race_shared",
        "cp.async.bulk|ld.shared",
        "ld.shared|cp.async.bulk",
    ),
    "a bulk store still reads": Twin(
        "st.shared.b32 [%r1], %r0; fence.proxy.async.shared::cta; bar.sync 0; @!%p2 bra END;"
        "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], 256; cp.async.bulk.commit_group; ##"
        "st.shared.b32 [%r2], 5; cp.async.bulk.wait_group 0; END:",
        "cp.async.bulk.wait_group.read 0;",
        "missing_bulk_wait",
        "st.shared|cp.async.bulk",
        "st.shared|cp.async.bulk",
    ),
    "cp.async not waited for": Twin(
        "cvt.u64.u32 %rd2, %r0; shl.b64 %rd2, %rd2, 2; add.s64 %rd2, %rd2, %rd1;"
        "cp.async.ca.shared.global [%r1], [%rd2], 4; cp.async.commit_group; ## ld.shared.b32 %r5, [%r1];"
        "cp.async.wait_group 0;",
        "cp.async.wait_group 0;",
        "missing_cp_async_wait",
        "ld.shared|cp.async",
        "ld.shared|cp.async",
        threads=32,
    ),
    "another CTA's memory": Twin(
        "mov.u32 %r20, %cluster_ctarank; xor.b32 %r21, %r20, 1; mapa.shared::cluster.u32 %r22, %r1, %r21;"
        "st.shared::cluster.b32 [%r22], %r0; ## ld.shared.b32 %r5, [%r1];"
        "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;",
        "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;",
        "race_shared",
        "ld.shared|st.shared",
        "ld.shared|st.shared",
        threads=32,
        cluster=2,
    ),
    "ordered by a completion alone": Twin(  # warp 1 waits for a copy that warp 0 issued after its store
        INIT.format(1, 1)
        + "setp.eq.u32 %p3, %r0, 32; @%p3 mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 256;"
        + f"@%p2 st.shared.b32 [%r2+4096], 1; @%p2 {BULK} [%r2], [%rd1], 256, [%r8];"
        + wait("%r8", 0, "W")
        + "## @%p3 ld.shared.b32 %r5, [%r2+4096];",
        "bar.sync 0;",
        "race_through_completion",
        "ld.shared",
        "st.shared",
    ),
    "initialised too late": Twin(
        "@%p2 mbarrier.init.shared.b64 [%r8], 64; ## mbarrier.arrive.shared.b64 _, [%r8];" + wait("%r8", 0, "W"),
        "bar.sync 0;",
        "mbarrier_init_unordered",
        "mbarrier.arrive",
        "mbarrier.init",
    ),
}


def run(twin: Twin, repaired: bool, schedule: str = "oldest_first", seed: int = 0):
    assert twin.body.count("##") == 1
    body = START + twin.body.replace("##", twin.repair if repaired else twin.broken)
    data = aligned(1024, np.uint32)
    settings = Settings(schedule=schedule, seed=seed, native_checks=CHECKS["race"], instruction_limit=200_000)
    shape = {"cluster": (twin.cluster, 1, 1)} if twin.cluster > 1 else {}
    text = entry("u64 data", body, shared=SMEM)
    return launch(text, data, grid=twin.cluster, block=twin.threads, settings=settings, **shape)


SCHEDULES = [(name, 0) for name in POLICIES] + [("random", 1), ("adversarial", 1)]


@pytest.mark.parametrize("name", TWINS)
def test_the_repaired_twin_is_silent(name):
    for schedule, seed in SCHEDULES:
        assert run(TWINS[name], True, schedule, seed).hazards == [], schedule


@pytest.mark.parametrize("name", TWINS)
def test_the_bug_is_reported_under_every_schedule(name):
    twin = TWINS[name]
    for schedule, seed in SCHEDULES:
        if twin.kind == "mbarrier_init_unordered" and schedule not in ("round_robin", "oldest_first"):
            continue  # the barrier may not even be there
        try:
            hazards = run(twin, False, schedule, seed).hazards
        except Deadlock as error:  # the second fill may complete the phase that others still wait for
            assert "mbarrier_phase_lapped" in {h.kind for h in error.hazards}
            continue
        found = [h for h in hazards if h.kind == twin.kind]
        assert found, schedule
        assert any(text in found[0].place.ptx for text in twin.at.split("|"))
        assert any(text in found[0].owner.ptx for text in twin.owner.split("|"))
        assert found[0].place.warp is not None and found[0].place.ptx_line > 0


def test_one_finding_per_pair_of_instructions():
    """A race in a loop is one entry with a count."""
    body = START + NEIGHBOUR + "mov.u32 %r30, 0; LOOP: st.shared.b32 [%r1], %r0; ld.shared.b32 %r5, [%r4];"
    body += "add.s32 %r30, %r30, 1; setp.lt.u32 %p3, %r30, 20; @%p3 bra LOOP;"
    settings = Settings(native_checks=CHECKS["race"], schedule="random")
    hazards = launch(entry("u64 data", body, shared=SMEM), aligned(4, np.uint32), block=64, settings=settings).hazards
    assert len({h.key() for h in hazards}) == len(hazards) <= 4
    assert max(h.count for h in hazards) > 1


def test_bytes_of_one_word_do_not_race():
    """Two warps write the two halves of the same words; then both the same half."""
    halves = "and.b32 %r4, %r0, 31; mad.lo.u32 %r4, %r4, 4, %r2; mad.lo.u32 %r4, %r3, 2, %r4;"
    body = START + halves + "cvt.u16.u32 %h1, %r0; st.shared.b16 [%r4], %h1; ld.shared.b16 %h2, [%r4];"
    settings, data = Settings(native_checks=CHECKS["race"]), aligned(4, np.uint32)
    assert launch(entry("u64 data", body, shared=SMEM), data, block=64, settings=settings).hazards == []
    clash = body.replace("mad.lo.u32 %r4, %r3, 2, %r4;", "")
    found = launch(entry("u64 data", clash, shared=SMEM), data, block=64, settings=settings).hazards
    assert {h.kind for h in found} == {"race_shared"}


def test_atomics_and_flags_synchronise():
    """Data handed over by a release store and an acquire load of a flag; the same with weak accesses is a race."""
    body = START + (
        "@%p2 st.shared.b32 [%r2+4096], 0; bar.sync 0; @!%p1 bra OTHER; st.shared.b32 [%r1], %r0; bar.warp.sync -1;"
        "@%p2 st.release.cta.shared.b32 [%r2+4096], 1; bra END;"
        "OTHER: ld.acquire.cta.shared.b32 %r6, [%r2+4096]; setp.eq.u32 %p3, %r6, 0; @%p3 bra OTHER;"
        + NEIGHBOUR
        + "ld.shared.b32 %r5, [%r4]; END:"
    )
    for schedule, seed in SCHEDULES:
        settings = Settings(native_checks=CHECKS["race"], schedule=schedule, seed=seed)
        result = launch(entry("u64 data", body, shared=SMEM), aligned(4, np.uint32), block=64, settings=settings)
        assert result.hazards == [], schedule
    weak = body.replace("st.release.cta.shared", "st.shared").replace("ld.acquire.cta.shared", "ld.shared")
    settings = Settings(native_checks=CHECKS["race"])
    result = launch(entry("u64 data", weak, shared=SMEM), aligned(4, np.uint32), block=64, settings=settings)
    assert {h.kind for h in result.hazards} == {"race_shared"}


@pytest.mark.parametrize("used", [False, True])
def test_a_word_of_a_vector_that_nothing_uses_is_not_read(used):
    """Compilers widen loads; the last word of this one is another warp's counter."""
    body = START + "@%p2 st.shared.v4.b32 [%r2], {%r0, %r0, %r0, %r0}; bar.sync 0; @!%p1 bra OTHER;"
    body += "atom.shared.add.u32 %r20, [%r2+12], 1; bra END; OTHER: ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r2];"
    body += "add.u32 %r14, %r10, %r11;"
    body += f"add.u32 %r14, %r14, %r{13 if used else 12}; st.shared.b32 [%r1+4096], %r14; END:"
    for schedule, seed in SCHEDULES:
        settings = Settings(native_checks=CHECKS["race"], schedule=schedule, seed=seed)
        found = launch(entry("u64 data", body, shared=SMEM), aligned(4, np.uint32), block=64, settings=settings).hazards
        assert {h.kind for h in found} == ({"race_shared"} if used else set()), schedule


def test_off_by_default():
    twin = TWINS["read before it is written"]
    body = START + twin.body.replace("##", "")
    result = launch(entry("u64 data", body, shared=SMEM), aligned(4, np.uint32), block=64)
    assert "race_shared" not in {h.kind for h in result.hazards}


def wgmma(tail: str, head: str = "", **settings):
    """A product of ones on sm_90a; thread t leaves element (t / 4, 2 (t mod 4)) of a warp at data[t]."""
    body = WGMMA.replace("mov.u32 %r9, 0;", "mov.u32 %r9, 0x3c003c00; mov.u32 %r10, 0;")
    out = "ld.param.u64 %rd3, [data]; mov.u32 %r0, %tid.x; mul.wide.u32 %rd4, %r0, 4; add.s64 %rd3, %rd3, %rd4;"
    text = body.format(head + "wgmma.fence.sync.aligned;", tail + WAIT_GROUP + out + "st.global.f32 [%rd3], %f1;")
    data = aligned(1024, np.uint32)
    chosen = Settings(arch="sm_90a", native_checks=CHECKS["race"], instruction_limit=200_000, **settings)
    text = entry("u64 data", text, shared=SMEM).replace("sm_100a", "sm_90a")
    return launch(text, data, block=128, settings=chosen), data[:128].view(np.float32)


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_a_wait_for_wgmma_covers_the_whole_warpgroup(schedule, seed):
    """Warp 0 overwrites the rows of A that warp 3 multiplies, after a wait of its own alone."""
    overwrite = "setp.lt.u32 %p3, %tid.x, 32; @%p3 st.shared.v4.b32 [%r1+1536], {%r10, %r10, %r10, %r10};"
    result, product = wgmma(WAIT_GROUP + overwrite, schedule=schedule, seed=seed)
    assert result.hazards == [] and (product == 16).all()
    result, _ = wgmma(WAIT_GROUP.replace("0", "1") + overwrite, schedule=schedule, seed=seed)
    kinds = {h.kind for h in result.hazards}  # a product that comes later reads a store without a fence, too
    assert "race_shared" in kinds and kinds <= {"race_shared", "missing_proxy_fence"}


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_a_wait_for_wgmma_is_behind_what_the_warpgroup_did_before_it(schedule, seed):
    """Thread 0 completes the next phase of a barrier at which all four warps have waited before they multiply."""
    first = "setp.eq.u32 %p4, %tid.x, 0; @%p4 "
    arrive = first + "mbarrier.arrive.shared.b64 _, [%r8];"
    head = "mov.u32 %r8, sm+4080; " + first + "mbarrier.init.shared.b64 [%r8], 1; bar.sync 0;" + arrive
    head += wait("%r8", 0, "W")
    result, _ = wgmma(WAIT_GROUP + arrive, head, schedule=schedule, seed=seed)
    assert result.hazards == []
    try:
        seen = {h.kind for h in wgmma(arrive, head, schedule=schedule, seed=seed)[0].hazards}
    except Deadlock as error:  # a warp did come too late
        assert "mbarrier.try_wait" in str(error)
        return
    assert seen == {"mbarrier_phase_unordered"}


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_no_part_of_a_wgmma_begins_before_all_four_are_issued(schedule, seed):
    """Warp 3 comes late and doubles the rows that warp 0 multiplies, and B: a race, but all have what it left."""
    late = "setp.ge.u32 %p4, %tid.x, 96; @!%p4 bra GO; mov.u32 %r7, 0; SPIN: add.u32 %r7, %r7, 1;"
    late += "setp.lt.u32 %p5, %r7, 500; @%p5 bra SPIN; mov.u32 %r12, 0x40004000; and.b32 %r7, %tid.x, 31;"
    late += "mad.lo.u32 %r7, %r7, 16, %r2; st.shared.v4.b32 [%r7], {%r12, %r12, %r12, %r12};"
    late += "fence.proxy.async.shared::cta; GO:"
    result, product = wgmma(WAIT_GROUP, late, schedule=schedule, seed=seed)
    assert product.reshape(4, 32).tolist() == [[64.0] * 32, *[[32.0] * 32] * 3]
    assert {h.kind for h in result.hazards} == {"race_shared"}


def test_a_wait_for_wgmma_does_not_publish_data():
    """Warp 0 loads what warp 3 has stored before it multiplied."""
    store = "setp.eq.u32 %p4, %tid.x, 96; mov.u32 %r7, sm; @%p4 st.shared.b32 [%r7+4096], 5;"
    load = "setp.eq.u32 %p4, %tid.x, 0; @%p4 ld.shared.b32 %r11, [%r7+4096];"
    result, _ = wgmma(WAIT_GROUP + load, store)
    assert {h.kind for h in result.hazards} == {"race_through_completion"}


def test_a_warpgroup_that_does_not_commit_together():
    with pytest.raises(Deadlock, match="warp 3 of CTA .* committed fewer than 2 groups"):
        wgmma("setp.lt.u32 %p3, %tid.x, 96; @%p3 wgmma.commit_group.sync.aligned;" + WAIT_GROUP + "bar.sync 0;")


def test_a_read_that_completes_later_does_not_hide_one_of_a_later_group():
    """Of one agent group 1 reads first and is not waited for; group 0 has been."""
    shadow = Shadow((8,), Accesses(), 2)
    clock = np.full((2, 2), 0, np.uint32)
    for epoch, words in ((1, slice(0, 4)), (0, slice(4, 8))):
        actor = Actor(1, epoch, np.full((2, 2), 9, np.uint32))
        assert shadow.read(Words(words), actor, shadow.accesses.add(1, epoch, epoch)) is None
    found = shadow.write(Words(slice(0, 8)), Actor(0, 1, clock), shadow.accesses.add(0, 1, 2))
    assert found is not None and (found.what, found.position) == ("write after read", 0)


@pytest.mark.parametrize("write", [True, False])
def test_a_strong_access_is_compared_with_the_weak_write_that_a_strong_one_hides(write):
    table = Accesses()
    shadow = Shadow((8,), table, 3)
    cells, word, atomic = Words(np.array([5])), ALL_BYTES, ALL_BYTES | SYNC
    first, second = (Actor(entry, 1, rows(3)) for entry in (0, 1))
    for actor in (first, second):
        actor.clock[:, actor.entry] = 1
    weak = table.add(0, 1, 10, word)
    assert shadow.write(cells, first, weak, word) is None
    for _ in range(2):  # the second hides it as the first does
        assert shadow.write(cells, first, table.add(0, 1, 11, atomic), atomic) is None
    access, what = (shadow.write, "write") if write else (shadow.read, "read")
    found = access(cells, second, table.add(1, 1, 12, atomic), atomic)
    assert (found.earlier, found.position, found.what) == (weak, 0, f"{what} after write")
    second.clock[:, 0] = 1
    assert access(cells, second, table.add(1, 1, 13, atomic), atomic) is None
