"""Named barriers, warp barriers, cluster barriers: counts, phases, misuse; the instructions that only order."""

from __future__ import annotations

import numpy as np
import pytest

from dsv4lib.emulator.errors import Deadlock, EmulatorError, HazardError
from dsv4lib.emulator.machine.policies import POLICIES
from dsv4lib.emulator.machine.request import Settings
from tests.emulator.launching import aligned, entry, launch

# %r1 = thread, %r2 = warp, %rd1 = &out[thread]
FRAME = """
ld.param.b64 %rd1, [out]; mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; mul.wide.u32 %rd3, %r1, 4; add.s64 %rd1, %rd1, %rd3;
"""
SHARED = ".shared .align 4 .b8 s[1024];"


def run(body: str, threads: int = 128, **options):
    out = aligned(max(threads, 256), np.int32)
    result = launch(entry("u64 out", FRAME + body, shared=SHARED), out, block=threads, **options)
    return out[:threads], result


@pytest.mark.parametrize("schedule", POLICIES)
def test_producer_consumer_with_sync_and_arrive(schedule):
    """Warp 0 produces eight values for warps 1..3; arrive and sync on two barriers."""
    body = """
    mov.u32 %r9, 0; mov.u32 %r10, 0; setp.eq.u32 %p1, %r2, 0; @%p1 bra PRODUCE;
    barrier.cta.arrive 2, 128;
    CONSUME: bar.sync 1, 128; ld.shared.b32 %r5, [s]; mad.lo.s32 %r9, %r9, 3, %r5; barrier.cta.arrive 2, 128;
    add.s32 %r10, %r10, 1; setp.lt.u32 %p2, %r10, 8; @%p2 bra CONSUME; bra DONE;
    PRODUCE: bar.sync 2, 128; st.shared.b32 [s], %r10; mad.lo.s32 %r9, %r9, 3, %r10; bar.arrive 1, 128;
    add.s32 %r10, %r10, 1; setp.lt.u32 %p2, %r10, 8; @%p2 bra PRODUCE; bar.sync 2, 128;
    DONE: st.global.b32 [%rd1], %r9;
    """
    out, _ = run(body, settings=Settings(schedule=schedule))
    want = 0
    for i in range(8):
        want = 3 * want + i
    assert (out == want).all()


def test_barrier_orders_all_warps():
    """Every warp reads what the next one wrote before the barrier."""
    body = """
    mov.u32 %r3, s; shl.b32 %r4, %r1, 2; add.s32 %r5, %r3, %r4; st.shared.b32 [%r5], %r1; bar.sync 0;
    add.s32 %r6, %r1, 32; and.b32 %r6, %r6, 127; shl.b32 %r6, %r6, 2; add.s32 %r6, %r3, %r6; ld.shared.b32 %r7, [%r6];
    st.global.b32 [%rd1], %r7;
    """
    for schedule in POLICIES:
        out, result = run(body, settings=Settings(schedule=schedule))
        np.testing.assert_array_equal(out, (np.arange(128) + 32) % 128)
        assert not result.hazards


@pytest.mark.parametrize(
    ("op", "want"), [("popc.u32 %r5", 43), ("and.pred %p5", 0), ("or.pred %p5", 1)], ids=["popc", "and", "or"]
)
def test_reductions(op, want):
    """43 of 128 threads have a multiple of three."""
    take = "" if op.startswith("popc") else "selp.u32 %r5, 1, 0, %p5;"
    body = f"""
    rem.u32 %r3, %r1, 3; setp.eq.u32 %p1, %r3, 0;
    bar.red.{op}, 0, %p1; {take} st.global.b32 [%rd1], %r5;
    bar.red.{op}, 0, %p1; {take} bar.red.{op}, 1, 128, !%p1;
    """
    for name in ("bar.red", "barrier.cta.red", "barrier.red.aligned"):
        out, _ = run(body.replace("bar.red", name))
        assert (out == want).all()


def test_reduction_over_some_warps():
    """All 64 threads of warps 0 and 1 vote true; the other warps do not take part."""
    body = """
    setp.lt.u32 %p1, %r2, 2; mov.u32 %r5, 7;
    @%p1 bar.red.and.pred %p5, 3, 64, %p1; @%p1 selp.u32 %r5, 1, 0, %p5; st.global.b32 [%rd1], %r5;
    """
    out, _ = run(body)
    assert out.tolist() == [1] * 64 + [7] * 64


def test_reduction_by_divergent_lanes():
    """The unaligned form in both branches: 64 threads, 21 multiples of three and one more."""
    body = """
    rem.u32 %r3, %r1, 3; setp.eq.u32 %p1, %r3, 0; and.b32 %r4, %r1, 1; setp.eq.u32 %p2, %r4, 0; @%p2 bra EVEN;
    barrier.cta.red.popc.u32 %r5, 0, %p1; bra JOIN; EVEN: barrier.red.popc.u32 %r5, 0, %p1;
    JOIN: st.global.b32 [%rd1], %r5;
    """
    for schedule in POLICIES:
        out, _ = run(body, threads=64, settings=Settings(schedule=schedule))
        assert (out == 22).all()


@pytest.mark.parametrize("opcode", ["bar.sync 0;", "barrier.sync 0;", "barrier.sync 1, 64;"])
def test_partial_warps_count_in_full(opcode):
    """40 threads: the second warp has eight lanes; in the unaligned forms its lanes arrive in two groups."""
    out, _ = run(f"{opcode} st.global.b32 [%rd1], 1;", threads=40)
    assert (out == 1).all()
    if opcode.startswith("barrier"):
        body = f"and.b32 %r3, %r1, 1; setp.eq.u32 %p1, %r3, 0; @%p1 bra A; {opcode} bra B; A: {opcode} B:"
        out, _ = run(f"{body} st.global.b32 [%rd1], 1;", threads=40)
        assert (out == 1).all()


def test_exited_warps_are_not_waited_for():
    out, _ = run("setp.eq.u32 %p1, %r2, 3; @%p1 exit; bar.sync 0; st.global.b32 [%rd1], 1;")
    assert out.tolist() == [1] * 96 + [0] * 32
    body = "setp.eq.u32 %p1, %r2, 3; @!%p1 bar.sync 0; st.global.b32 [%rd1], 1;"
    assert (run(body)[0] == 1).all()


LATE_EXIT = "mov.u32 %r4, 0; SPIN: add.s32 %r4, %r4, 1; setp.lt.u32 %p2, %r4, 3000; @%p2 bra SPIN; exit;"


@pytest.mark.parametrize("schedule", POLICIES)
@pytest.mark.parametrize(
    "wait",
    [
        "barrier.sync 0;",
        "barrier.sync 0, 64;",
        "bar.warp.sync 0xffffffff;",
        "barrier.cluster.arrive; barrier.cluster.wait;",
        "barrier.red.popc.u32 %r5, 0, %p1;",
    ],
)
def test_lanes_that_exit_later_are_not_waited_for(wait, schedule):
    """The first half of warp 0 waits while its other half still runs, and then exits; warp 1 waits too."""
    body = f"""
    ld.param.b64 %rd1, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 4; add.s64 %rd1, %rd1, %rd3;
    sub.u32 %r2, %r1, 16; setp.ge.u32 %p1, %r2, 16; @%p1 bra WAIT; {LATE_EXIT}
    WAIT: {wait} mov.u32 %r9, 5; st.global.b32 [%rd1], %r9;
    """
    out = aligned(64, np.int32)
    result = launch(entry("u64 out", body), out, block=64, settings=Settings(schedule=schedule))
    assert out.tolist() == [5] * 16 + [0] * 16 + [5] * 32 and not result.hazards


@pytest.mark.parametrize("wait", ["bar.sync 1, 128;", "bar.red.or.pred %p5, 1, 128, %p2;", "barrier.sync 1, 128;"])
def test_a_warp_may_wait_after_it_has_arrived(wait):
    """Two pairs of warps alternate, as FlashAttention's warp groups: the first pair begins by its own arrival."""
    body = f"""
    setp.lt.u32 %p1, %r2, 2; setp.eq.u32 %p2, %r2, 9;
    @!%p1 bra SECOND;
    bar.arrive 1, 128;
    {wait}
    st.shared.b32 [s], 7;
    bar.arrive 2, 128;
    {wait}
    ld.shared.b32 %r5, [s];
    bra OUT;
SECOND:
    bar.sync 2, 128;
    ld.shared.b32 %r5, [s];
    bar.sync 3, 64;
    st.shared.b32 [s], 8;
    bar.arrive 1, 128;
OUT:
    st.global.b32 [%rd1], %r5;
    """
    out, _ = run(body)
    assert out.tolist() == [8] * 64 + [7] * 64


@pytest.mark.parametrize("schedule", POLICIES)
@pytest.mark.parametrize("form", ["bar", "barrier"])
@pytest.mark.parametrize(
    ("count", "arrivals", "late", "needed"),
    [(96, 2, False, 0), (96, 2, True, 0), (128, 3, False, 0), (128, 2, True, 1), (64, 2, False, 1)],
)
def test_further_arrivals_of_a_warp_count(count, arrivals, late, needed, form, schedule):
    """Warp 0 arrives again and again, before warp 1 waits or after; warps 2 and 3 arrive until warp 1 is through.

    As many of these are needed as an H200 needed: two arrivals and a wait make 96, two of 64 are a phase of their own.
    """
    delay = "mov.u32 %r8, 0; L{0}: add.s32 %r8, %r8, 1; setp.lt.u32 %p2, %r8, {1}; @%p2 bra L{0};"
    arrive = f"{form}.arrive 1, {count};"
    body = f"""
    mov.u32 %r4, s; setp.eq.u32 %p1, %r1, 0; @%p1 st.volatile.shared.b32 [%r4], 0; bar.sync 0;
    setp.eq.u32 %p1, %r2, 0; @%p1 bra ZERO; setp.eq.u32 %p1, %r2, 1; @%p1 bra ONE;
    mul.lo.u32 %r7, %r2, 4000; mov.u32 %r8, 0; L2: add.s32 %r8, %r8, 1; setp.lt.u32 %p2, %r8, %r7; @%p2 bra L2;
    ld.volatile.shared.b32 %r5, [%r4]; setp.ne.u32 %p1, %r5, 0; @%p1 bra OUT; {arrive} st.global.b32 [%rd1], 1; bra OUT;
    ZERO: {delay.format(0, 1500 if late else 1)} {arrive * arrivals} bra OUT;
    ONE: {delay.format(1, 1 if late else 1500)} {form}.sync 1, {count}; st.volatile.shared.b32 [%r4], 1;
    OUT:
    """
    out, result = run(body, settings=Settings(schedule=schedule))
    assert out.reshape(4, 32)[:, 0].sum() == needed
    assert "barrier_double_arrive" in {h.kind for h in result.hazards}


@pytest.mark.parametrize(
    ("body", "match"),
    [
        ("bar.sync 16;", "barrier 16: a CTA has 16"),
        ("bar.sync 1, 100;", "thread count 100 is not a positive multiple of 32"),
        ("setp.lt.u32 %p1, %r1, 5; @%p1 bar.sync 1, 64;", "aligned barrier needs all live lanes"),
        ("setp.eq.u32 %p1, %r2, 0; @%p1 bar.arrive 1, 64; @!%p1 bar.arrive 1, 96;", "used with 96 threads while"),
        ("mov.u32 %r3, %r1; bar.sync %r3;", "must be the same in all active lanes"),
        ("setp.eq.u32 %p1, %r1, 3; @%p1 bar.warp.sync 1;", "not in its own member mask"),
        ("setmaxnreg.inc.sync.aligned.u32 20;", "setmaxnreg 20"),
        ("barrier.cluster.wait.aligned;", "without an arrive"),
    ],
)
def test_misuse(body, match):
    with pytest.raises(EmulatorError, match=match) as error:
        run(body)
    assert error.value.place is not None


def test_deadlock_names_barrier_counts_and_lines():
    body = """
    setp.eq.u32 %p1, %r2, 2;
    @%p1 bra OTHER;
    bar.sync 3, 128;
    exit;
    OTHER: bar.sync 4, 64;
    """
    with pytest.raises(Deadlock) as error:
        run(body)
    text = str(error.value)
    assert "warp 0: barrier 3: 96 of 128 threads arrived (warps [0, 1, 3])" in text
    assert "warp 2: barrier 4: 32 of 64 threads arrived (warps [2])" in text
    assert text.count("PTX line") == 4


def test_warp_barrier_in_different_places():
    """Both sides of a branch meet at two different bar.warp.sync with the same mask."""
    body = """
    and.b32 %r3, %r1, 31; mov.u32 %r4, s; mad.lo.s32 %r4, %r2, 4, %r4; setp.eq.u32 %p1, %r3, 0; @%p1 bra ZERO;
    bar.warp.sync 0xffffffff; ld.shared.b32 %r9, [%r4]; bra DONE;
    ZERO: st.shared.b32 [%r4], 42; bar.warp.sync 0xffffffff; mov.u32 %r9, 43; DONE: st.global.b32 [%rd1], %r9;
    """
    for schedule in POLICIES:
        out, result = run(body, settings=Settings(schedule=schedule))
        np.testing.assert_array_equal(out, np.where(np.arange(128) % 32 == 0, 43, 42))
        assert not result.hazards


def test_warp_barrier_is_not_passed_by_some_lanes():
    """Lane 0 waits for a barrier that never completes; its warp must not get past bar.warp.sync without it."""
    body = """
    and.b32 %r3, %r1, 31; setp.eq.u32 %p1, %r3, 0; @%p1 bra ZERO; bar.warp.sync 0xffffffff;
    st.global.b32 [%rd1], 1; exit;
    ZERO: barrier.sync 1, 64; bar.warp.sync 0xffffffff;
    """
    out = aligned(256, np.int32)
    with pytest.raises(Deadlock, match="bar.warp.sync"):
        launch(entry("u64 out", FRAME + body), out, block=32)
    assert not out.any()


CLUSTER = """
mov.u32 %r3, %cluster_ctarank; mov.u32 %r4, %ctaid.x; mad.lo.u32 %r5, %r4, 64, %r1; mul.wide.u32 %rd2, %r1, 4;
sub.s64 %rd1, %rd1, %rd2; mul.wide.u32 %rd2, %r5, 4; add.s64 %rd1, %rd1, %rd2;
mov.u32 %r6, s; mad.lo.u32 %r6, %r1, 4, %r6; st.shared.b32 [%r6], %r5; barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned; xor.b32 %r7, %r6, 0x1000000; ld.shared::cluster.b32 %r9, [%r7];
barrier.cluster.arrive.release.aligned; st.global.b32 [%rd1], %r9; barrier.cluster.wait.acquire.aligned;
"""


@pytest.mark.parametrize("schedule", POLICIES)
def test_cluster_barrier_and_peer_memory(schedule):
    """Each CTA of a pair reads its peer's shared memory between two cluster barriers."""
    out = aligned(4 * 64, np.int32)
    text = entry("u64 out", FRAME + CLUSTER, shared=SHARED)
    settings = Settings(schedule=schedule)
    result = launch(text, out, grid=4, block=64, cluster=(2, 1, 1), settings=settings)
    np.testing.assert_array_equal(out, np.arange(256) ^ 64)
    assert not result.hazards


@pytest.mark.parametrize("schedule", POLICIES)
def test_diverged_lanes_wait_at_the_cluster_barrier_one_group_after_the_other(schedule):
    """Both halves of each warp arrive and wait on their own, twice; afterwards every store before it is visible."""
    half = "barrier.cluster.arrive; barrier.cluster.wait;"
    body = f"""
    st.global.b32 [%rd1], 5;
    and.b32 %r3, %r1, 16; setp.eq.u32 %p1, %r3, 0; @%p1 bra A; {half} {half} bra B; A: {half} {half} B:
    xor.b32 %r4, %r1, 48; mul.wide.u32 %rd3, %r4, 4; ld.param.b64 %rd4, [out]; add.s64 %rd4, %rd4, %rd3;
    ld.global.b32 %r5, [%rd4]; barrier.cluster.arrive; barrier.cluster.wait; add.s32 %r5, %r5, 1;
    st.global.b32 [%rd1], %r5;
    """
    out, _ = run(body, threads=64, settings=Settings(schedule=schedule))
    assert (out == 6).all()


def test_cluster_barrier_without_aligned_counts_lanes():
    body = """
    setp.lt.u32 %p1, %r1, 40; @%p1 barrier.cluster.arrive; @!%p1 barrier.cluster.arrive.relaxed;
    barrier.cluster.wait; st.global.b32 [%rd1], 1;
    """
    assert (run(body)[0] == 1).all()


@pytest.mark.parametrize("schedule", POLICIES)
def test_double_arrive_is_reported_and_waits_for_both(schedule):
    """CTA 0 arrives twice, CTA 1 sets a flag before each of its arrivals: measured on an H200, CTA 0 sees both flags
    already after its first wait."""
    look = "ld.volatile.global.b32 %r4, [%rd9]; ld.volatile.global.b32 %r5, [%rd9+4];"
    look += " st.global.v2.b32 [%rd9+{0}], {{%r4, %r5}};"
    delay = "mov.u32 %r8, 0; L{0}: add.s32 %r8, %r8, 1; setp.lt.s32 %p2, %r8, 3000; @%p2 bra L{0};"
    body = f"""
    ld.param.b64 %rd9, [out]; mov.u32 %r3, %cluster_ctarank; setp.eq.u32 %p1, %r3, 0; @%p1 bra FIRST;
    {delay.format(1)} st.volatile.global.b32 [%rd9], 1; barrier.cluster.arrive.aligned;
    {delay.format(2)} st.volatile.global.b32 [%rd9+4], 1; barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned; barrier.cluster.wait.aligned; exit;
    FIRST: barrier.cluster.arrive.aligned; barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned; {look.format(16)} barrier.cluster.wait.aligned; {look.format(24)}
    """
    out = aligned(64, np.int32)
    settings = Settings(schedule=schedule)
    result = launch(entry("u64 out", body), out, grid=2, block=32, cluster=(2, 1, 1), settings=settings)
    assert out[4:8].tolist() == [1, 1, 1, 1]
    assert {h.kind for h in result.hazards} == {"cluster_double_arrive"}


def test_cluster_deadlock_names_the_missing_warps():
    body = """
    mov.u32 %r3, %cluster_ctarank; setp.eq.u32 %p1, %r3, 0; @%p1 bra W; bar.sync 1, 64;
    W: barrier.cluster.arrive; barrier.cluster.wait;
    """
    with pytest.raises(Deadlock, match="not arrived: rank 1 warp 0"):
        text = entry("u64 out", FRAME + body, shared=SHARED)
        launch(text, aligned(64, np.int32), grid=2, block=32, cluster=(2, 1, 1))


def test_instructions_that_only_order():
    body = """
    membar.cta; membar.gl; membar.sys; fence.acq_rel.gpu; fence.sc.cta; fence.acquire.sys; fence.release.cluster;
    fence.mbarrier_init.release.cluster; griddepcontrol.wait; griddepcontrol.launch_dependents; nanosleep.u32 100;
    fence.release.sync_restrict::shared::cta.cluster; membar.proxy.alias;
    fence.acquire.sync_restrict::shared::cluster.cluster; setmaxnreg.dec.sync.aligned.u32 40; pmevent 3;
    st.global.b32 [%rd1], 1;
    """
    assert (run(body)[0] == 1).all()


@pytest.mark.parametrize("opcode", ["fence.sc", "membar.cluster", "bar.sync.aligned 0", "barrier.cluster.wait.release"])
def test_wrong_variants_are_refused(opcode):
    with pytest.raises(EmulatorError, match="is not implemented"):
        run(f"{opcode};")


def test_hazard_errors_carry_the_place():
    with pytest.raises(HazardError) as error:
        run("bar.sync 1, 100;")
    assert error.value.place.ptx == "bar.sync 1, 100"


WORKSPACE = "mov.u32 %r20, %envreg1; mov.u32 %r21, %envreg2; mov.b64 %rd9, {%r21, %r20};"
# CUDA's cooperative_groups: the first CTA adds 2^31 - (CTAs - 1), each other 1; the top bit changes when all have.
MEET = """
mov.u32 %r4, %ctaid.x; mov.u32 %r5, %nctaid.x; setp.ne.u32 %p1, %r1, 0; @%p1 bra WAIT;
sub.u32 %r6, 0x80000001, %r5; setp.eq.u32 %p2, %r4, 0; selp.b32 %r6, %r6, 1, %p2; fence.acq_rel.gpu;
atom.add.relaxed.gpu.global.u32 %r7, [%rd9+4], %r6;
LOOK: ld.acquire.gpu.global.u32 %r8, [%rd9+4]; xor.b32 %r8, %r8, %r7; setp.ge.s32 %p3, %r8, 0; @%p3 bra LOOK;
WAIT: bar.sync 0;
"""


@pytest.mark.parametrize("schedule", POLICIES)
def test_a_cooperative_grid_meets_in_its_workspace(schedule):
    """Every CTA writes, all meet, every CTA reads what the next one wrote; the workspace says that it has 8 bytes."""
    body = (
        WORKSPACE
        + "ld.global.b32 %r19, [%rd9]; mov.u32 %r4, %ctaid.x; mul.wide.u32 %rd4, %r4, 4; ld.param.b64 %rd2, [out];"
        + "add.s64 %rd5, %rd2, %rd4; add.u32 %r10, %r4, 70; st.global.b32 [%rd5], %r10;"
        + MEET
        + "add.u32 %r11, %r4, 1; rem.u32 %r11, %r11, %r5; mul.wide.u32 %rd6, %r11, 4; add.s64 %rd6, %rd2, %rd6;"
        + "ld.global.b32 %r12, [%rd6]; add.u32 %r12, %r12, %r19; st.global.b32 [%rd5+64], %r12;"
    )
    settings, attributes = Settings(schedule=schedule, seed=1, native_checks=7), {"cooperative": True}
    out, result = run(body, 32, grid=5, settings=settings, attributes=attributes)
    assert out[:5].tolist() == [70 + n for n in range(5)] and not result.hazards
    assert out[16:21].tolist() == [8 + 70 + (n + 1) % 5 for n in range(5)]


def test_other_grids_have_no_workspace():
    out, _ = run(WORKSPACE + "cvt.u32.u64 %r3, %rd9; add.u32 %r3, %r3, 5; st.global.b32 [%rd1], %r3;", 32)
    assert out.tolist() == [5] * 32


def test_the_reserved_shared_memory_of_cooperative_groups():
    """288 bytes of zeros of the CTA's own, from %reserved_smem_offset_1 on."""
    body = """
    mov.u32 %r3, %reserved_smem_offset_1; mov.u32 %r4, %reserved_smem_offset_begin; setp.ge.u32 %p1, %r3, %r4;
    add.u32 %r5, %r3, 288; mov.u32 %r6, %reserved_smem_offset_end; setp.le.and.u32 %p1, %r5, %r6, %p1;
    mad.lo.u32 %r7, %r1, 4, %r3; ld.shared.b32 %r8, [%r7]; red.shared.add.u32 [%r7], %r1; ld.shared.b32 %r9, [%r7];
    add.u32 %r9, %r9, %r8; mov.u32 %r10, s; setp.le.and.u32 %p1, %r6, %r10, %p1; selp.b32 %r9, %r9, -1, %p1;
    st.global.b32 [%rd1], %r9;
    """
    out, result = run(body, 72)
    assert out.tolist() == list(range(72)) and not result.hazards
