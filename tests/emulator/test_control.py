"""Divergence and reconvergence, loops, exits, spinning groups, special registers, whole kernels."""

from __future__ import annotations

import numpy as np
import pytest

from dsv4lib.emulator.errors import EmulatorError, HazardError, LaunchError, LimitExceeded, PtxSyntaxError
from dsv4lib.emulator.machine.policies import POLICIES
from dsv4lib.emulator.machine.request import Settings
from tests.emulator.launching import aligned, copy, entry, launch

LANES = np.arange(32)
RNG = np.random.default_rng(11)
# out[lane] for each test below; %r1 = lane, results in %r9.
FRAME = "ld.param.b64 %rd1, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 4; add.s64 %rd1, %rd1, %rd3;\n"
STORE = "\nst.global.b32 [%rd1], %r9;"


def run(body: str, n: int = 32, **options) -> np.ndarray:
    out = aligned(n, np.int32)
    launch(entry("u64 out", FRAME + body + STORE), out, block=n, **options)
    return out


def test_if_else_reconverges():
    """After the join the whole warp votes together."""
    body = """
    mov.u32 %r9, 0; and.b32 %r2, %r1, 1; setp.eq.u32 %p1, %r2, 0; @%p1 bra EVEN;
    add.s32 %r9, %r9, 100; bra JOIN; EVEN: add.s32 %r9, %r9, 200; JOIN:
    activemask.b32 %r5; popc.b32 %r5, %r5; add.s32 %r9, %r9, %r5;
    """
    np.testing.assert_array_equal(run(body), np.where(LANES & 1, 132, 232))


def test_nested_ifs():
    body = """
    mov.u32 %r9, 1; setp.lt.u32 %p1, %r1, 20; @!%p1 bra OUT; setp.gt.u32 %p2, %r1, 4; @!%p2 bra INNER;
    rem.u32 %r3, %r1, 3; setp.eq.u32 %p3, %r3, 0; @%p3 bra THIRD; add.s32 %r9, %r9, 10; bra INNER;
    THIRD: add.s32 %r9, %r9, 20; INNER: add.s32 %r9, %r9, 300; OUT: add.s32 %r9, %r9, 4000;
    """
    want = np.full(32, 1)
    want += np.where(LANES < 20, np.where(LANES > 4, np.where(LANES % 3 == 0, 20, 10), 0) + 300, 0) + 4000
    np.testing.assert_array_equal(run(body), want)


def test_loops_with_different_trip_counts():
    """Lane i sums 0..i, in an inner and an outer loop."""
    body = """
    mov.u32 %r9, 0; mov.u32 %r2, 0;
    OUTER: mov.u32 %r3, 0;
    INNER: add.s32 %r9, %r9, 1; add.s32 %r3, %r3, 1; setp.le.u32 %p1, %r3, %r2; @%p1 bra INNER;
    add.s32 %r2, %r2, 1; setp.le.u32 %p2, %r2, %r1; @%p2 bra OUTER;
    """
    np.testing.assert_array_equal(run(body), (LANES + 1) * (LANES + 2) // 2)


def test_every_lane_to_its_own_target():
    """A decision tree with 32 leaves: the largest number of waiting groups."""
    lines = ["mov.u32 %r9, 0;"]
    lines += [f"setp.eq.u32 %p1, %r1, {i}; @%p1 bra L{i};" for i in range(32)]
    lines += [f"L{i}: add.s32 %r9, %r9, {1000 + i}; bra END;" for i in range(31, -1, -1)]
    np.testing.assert_array_equal(run("\n".join([*lines, "END:"])), 1000 + LANES)


_TABLE = """
    TABLE: .branchtargets A, B, {C}, B;
    {brx}
    mov.u32 %r9, 5; bra END;
    A: mov.u32 %r9, 10; bra JOIN;
    B: mov.u32 %r9, 20; bra JOIN;
    C: mov.u32 %r9, 30;
    JOIN: add.u32 %r9, %r9, 1; shfl.sync.bfly.b32 %r5, %r9, 0, 31, 0xffffffff;
    END:
"""


def test_indexed_branches_split_and_meet_again():
    """Lane i goes to entry i % 4; the shuffle needs all of them."""
    body = "and.b32 %r2, %r1, 3;" + _TABLE.format(C="C", brx="brx.idx %r2, TABLE;")
    np.testing.assert_array_equal(run(body), np.array([11, 21, 31, 21])[LANES % 4])


def test_lanes_that_do_not_branch_fall_through():
    brx = "setp.lt.u32 %p1, %r1, 8; @%p1 brx.idx %r2, TABLE;"
    body = "and.b32 %r2, %r1, 3;" + _TABLE.format(C="C", brx=brx).replace("bra END", "bra JOIN")
    np.testing.assert_array_equal(run(body), np.where(LANES < 8, np.array([11, 21, 31, 21])[LANES % 4], 6))


def test_indexed_branch_backwards_and_uniform():
    """A loop whose back edge is in a table: the index is 0 three times."""
    body = """
    mov.u32 %r9, 0; T: .branchtargets LOOP, OUT;
    LOOP: add.u32 %r9, %r9, 1; setp.ge.u32 %p1, %r9, 4; selp.u32 %r2, 1, 0, %p1; brx.idx.uni %r2, T;
    OUT: add.u32 %r9, %r9, 100;
    """
    assert (run(body) == 104).all()


@pytest.mark.parametrize("schedule", POLICIES)
def test_indexed_branches_under_every_schedule(schedule):
    body = "and.b32 %r2, %r1, 3;" + _TABLE.format(C="C", brx="brx.idx %r2, TABLE;")
    out = aligned(96, np.int32)
    launch(entry("u64 out", FRAME + body + STORE), out, block=96, settings=Settings(schedule=schedule))
    np.testing.assert_array_equal(out, np.array([11, 21, 31, 21])[np.arange(96) % 4])


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (_TABLE.format(C="C", brx="brx.idx %r1, TABLE;"), HazardError, "brx.idx with index 31: TABLE.* has 4 labels"),
        ("and.b32 %r2, %r1, 1;" + _TABLE.format(C="C", brx="brx.idx.uni %r2, TABLE;"), HazardError, "they must agree"),
        (_TABLE.format(C="NOWHERE", brx="brx.idx %r1, TABLE;"), PtxSyntaxError, "unknown label"),
        (_TABLE.format(C="C", brx="brx.idx %r1, JOIN;"), PtxSyntaxError, "unknown label"),
        (_TABLE.format(C="C", brx="brx.idx TABLE;"), PtxSyntaxError, "unknown label"),
        (".branchtargets END; END:", PtxSyntaxError, "without a label"),
    ],
)
def test_wrong_indexed_branches(body, error, message):
    with pytest.raises(error, match=message):
        run(body)


def test_early_exit_and_guarded_return():
    body = """
    mov.u32 %r9, 7; st.global.b32 [%rd1], %r9; setp.ge.u32 %p1, %r1, 10; @%p1 exit; setp.eq.u32 %p2, %r1, 3; @%p2 ret;
    activemask.b32 %r5; popc.b32 %r9, %r5;
    """
    np.testing.assert_array_equal(run(body), np.where((LANES < 10) & (LANES != 3), 9, 7))


def test_partial_last_warp():
    body = "activemask.b32 %r5; popc.b32 %r9, %r5;"
    np.testing.assert_array_equal(run(body, 40), np.where(np.arange(40) < 32, 32, 8))


@pytest.mark.parametrize("schedule", POLICIES)
@pytest.mark.parametrize("first", ["spin_low", "spin_high"])
def test_spinning_lanes_do_not_starve_their_warp(schedule, first):
    """Lane 0 spins on a flag that lane 1 of the same warp sets; the spin is the lower or the higher pc."""
    spin = "SPIN: ld.volatile.shared.b32 %r3, [s]; setp.eq.u32 %p3, %r3, 0; @%p3 bra SPIN; mov.u32 %r9, 5; bra JOIN;"
    work = "WORK: setp.eq.u32 %p2, %r1, 1; @%p2 st.volatile.shared.b32 [s], 1; mov.u32 %r9, 6; bra JOIN;"
    head = "mov.u32 %r4, 0; st.shared.b32 [s], %r4; setp.eq.u32 %p1, %r1, 0;"
    if first == "spin_low":
        body = f"{head} @!%p1 bra WORK; {spin} {work} JOIN:"
    else:
        body = f"{head} @%p1 bra SPIN; {work} {spin} JOIN:"
    out = aligned(32, np.int32)
    text = entry("u64 out", FRAME + body + STORE, shared=".shared .align 4 .b8 s[4];")
    launch(text, out, settings=Settings(schedule=schedule, instruction_limit=1_000_000))
    assert out.tolist() == [5] + [6] * 31


def test_converging_instruction_waits_for_lanes_placed_behind_it():
    """The branch body lies after the shuffle and jumps back: all lanes must take part in the shuffle."""
    body = """
    mov.u32 %r9, %r1; setp.eq.u32 %p1, %r1, 31; @%p1 bra FAR;
    BACK: shfl.sync.idx.b32 %r9, %r9, 31, 31, 0xffffffff; bra END;
    FAR: mov.u32 %r9, 77; bra BACK; END:
    """
    assert (run(body) == 77).all()


def test_shuffles_in_both_branches_of_an_if():
    """Each half shuffles with its own member mask; neither half waits for the other for ever."""
    body = """
    setp.lt.u32 %p1, %r1, 16; @%p1 bra LOW;
    shfl.sync.idx.b32 %r9, %r1, 20, 31, 0xffff0000; bra END;
    LOW: shfl.sync.idx.b32 %r9, %r1, 3, 31, 0x0000ffff; END:
    """
    np.testing.assert_array_equal(run(body), np.where(LANES < 16, 3, 20))


def test_lanes_wait_for_members_that_stand_at_an_instruction_of_their_own():
    """The body after the join has a barrier for its own lanes: they go first, although the join comes before it."""
    body = """
    setp.lt.u32 %p1, %r1, 16; @%p1 bra FAR;
    JOIN: redux.sync.add.u32 %r9, %r1, 0xffffffff; bra END;
    FAR: bar.warp.sync 0x0000ffff; bra JOIN; END:
    """
    assert (run(body) == 496).all()


TWO_MASKS = {  # instruction -> result of each lane; %r2 is the member mask of the lane's half, %r3 = lane / 10
    "redux.sync.add.u32 %r9, %r1, %r2;": np.where(LANES < 16, 120, 376),
    "redux.sync.add.u32 %r2, %r1, %r2; mov.u32 %r9, %r2;": np.where(LANES < 16, 120, 376),
    "redux.sync.max.f32 %f1, %f1, %r2; cvt.rzi.s32.f32 %r9, %f1;": np.where(LANES < 16, 15, 31),
    "vote.sync.ballot.b32 %r9, %p2, %r2;": np.where(LANES < 16, 0xFFFF, 0xF << 16),
    "vote.sync.all.pred %p3, %p2, %r2; selp.b32 %r9, 1, 0, %p3;": np.where(LANES < 16, 1, 0),
    "match.any.sync.b32 %r9, %r3, %r2;": np.repeat((0x3FF, 0xFC00, 0xF << 16, 0x3FF << 20, 3 << 30), (10, 6, 4, 10, 2)),
    "match.all.sync.b32 %r9|%p3, %r4, %r2;": np.where(LANES < 16, 0xFFFF, 0xFFFF << 16),
    "elect.sync %r9|%p3, %r2; @%p3 add.s32 %r9, %r9, 100;": np.where(LANES % 16, LANES // 16 * 16, LANES + 100),
    "shfl.sync.idx.b32 %r9, %r1, 3, 0x101f, %r2;": LANES // 16 * 16 + 3,
}  # fmt: skip


@pytest.mark.parametrize("instruction", TWO_MASKS)
def test_halves_of_a_warp_come_together_with_their_own_masks(instruction):
    """As the tiles of cooperative groups do: one instruction, executed by all lanes, with a mask for each half."""
    body = """
    setp.lt.u32 %p1, %r1, 16; selp.b32 %r2, 0x0000ffff, 0xffff0000, %p1; setp.lt.u32 %p2, %r1, 20;
    div.u32 %r3, %r1, 10; selp.b32 %r4, 5, 6, %p1; cvt.rn.f32.u32 %f1, %r1;
    """
    want = np.array(TWO_MASKS[instruction], np.int64).astype(np.uint32).view(np.int32)
    np.testing.assert_array_equal(run(body + instruction), want)


FEW = "setp.lt.u32 %p1, %r1, 4; mov.u32 %r2, s; mov.u32 %r9, 0; st.shared.v4.b32 [%r2], {%r9, %r9, %r9, %r9};"
WITHOUT_LANES = (  # an instruction that only some lanes get to, and one that those lanes may execute alone
    ("shfl.sync.idx.b32 %r9, %r1, 0, 31, 0xffffffff;", "shfl.sync.idx.b32 %r9, %r1, 0, 31, 15;"),
    ("vote.sync.any.pred %p2, %p1, -1;", "vote.sync.any.pred %p2, %p1, 0xf;"),
    ("elect.sync _|%p2, 0x8000000f;", "elect.sync _|%p2, 15;"),
    ("redux.sync.add.u32 %r9, %r1, -1;", "activemask.b32 %r3; redux.sync.add.u32 %r9, %r1, %r3;"),
    ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r9}, [%r2];", "ld.shared.b32 %r9, [%r2];"),
    ("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r2], {%r9};", "st.shared.b32 [%r2], %r9;"),
    ("movmatrix.sync.aligned.m8n8.trans.b16 %r9, %r1;", "mov.b32 %r9, %r1;"),
    ("wgmma.commit_group.sync.aligned;", "cp.async.bulk.commit_group;"),
)


@pytest.mark.parametrize("alone", [a for pair in WITHOUT_LANES for a in pair])
@pytest.mark.parametrize("guarded", [False, True])
def test_an_instruction_without_lanes_that_it_needs_is_reported(alone, guarded):
    """The others are on another path, or do not pass the guard."""
    last = alone.rstrip(";").rpartition("; ")[2]
    branch = alone.replace(last, f"@%p1 {last}") if guarded else f"@!%p1 bra END; {alone} END:"
    branch += " bar.warp.sync -1;"  # keeps the other lanes alive
    if guarded and "activemask" in branch:
        branch = branch.replace("activemask.b32 %r3;", "mov.u32 %r3, 15;")
    out = aligned(32, np.int32)
    text = entry("u64 out", FRAME + FEW + branch, shared=".shared .align 16 .b8 s[16];")
    found = launch(text, out).hazards
    if alone in [broken for broken, _ in WITHOUT_LANES]:
        assert [h.kind for h in found] == ["diverged_sync"] and found[0].place.ptx.endswith(last)
    else:
        assert not found


def test_lanes_that_have_exited_are_not_missed():
    body = "setp.ge.u32 %p1, %r1, 36; @%p1 exit; redux.sync.add.u32 %r9, %r1, 0xffffffff; mov.u32 %r3, 7;"
    out = aligned(40, np.int32)
    assert not launch(entry("u64 out", FRAME + body + STORE), out, block=40).hazards
    np.testing.assert_array_equal(out, [496] * 32 + [134] * 4 + [0] * 4)


def test_lanes_blocked_in_a_service_do_not_hold_the_others():
    """Lane 0 waits at a named barrier that only the other warp completes after lane 1 has set a flag."""
    body = """
    mov.u32 %r4, 0; setp.eq.u32 %p4, %r1, 0; @%p4 st.shared.b32 [s], %r4; bar.sync 0;
    setp.ge.u32 %p1, %r1, 32; @%p1 bra OTHER;
    setp.eq.u32 %p2, %r1, 0; @!%p2 bra REST; barrier.sync 1, 64; mov.u32 %r9, 1; bra END;
    REST: setp.eq.u32 %p3, %r1, 1; @%p3 st.volatile.shared.b32 [s], 1; barrier.sync 1, 64; mov.u32 %r9, 2; bra END;
    OTHER: ld.volatile.shared.b32 %r3, [s]; setp.eq.u32 %p3, %r3, 0; @%p3 bra OTHER; barrier.sync 1, 64; mov.u32 %r9, 3;
    END:
    """
    out = aligned(64, np.int32)
    text = entry("u64 out", FRAME + body + STORE, shared=".shared .align 4 .b8 s[4];")
    for schedule in POLICIES:
        launch(text, out, block=64, settings=Settings(schedule=schedule, instruction_limit=1_000_000))
        np.testing.assert_array_equal(out, [1] + [2] * 31 + [3] * 32)


def test_parked_lanes_converge_again():
    """Lane 0 waits at a barrier; later both halves of the warp stand at different shuffles at the same time."""
    body = """
    setp.ge.u32 %p1, %r1, 32; @%p1 bra OTHER; setp.eq.u32 %p2, %r1, 0; @!%p2 bra REST; barrier.sync 1, 64; bra JOIN;
    REST: barrier.sync 1, 64;
    JOIN: setp.lt.u32 %p3, %r1, 16; @%p3 bra LOW; shfl.sync.idx.b32 %r9, %r1, 20, 31, 0xffff0000; bra END;
    LOW: shfl.sync.idx.b32 %r9, %r1, 3, 31, 0x0000ffff; bra END;
    OTHER: mov.u32 %r3, 0; W: add.s32 %r3, %r3, 1; setp.lt.u32 %p3, %r3, 4000; @%p3 bra W;
    barrier.sync 1, 64; mov.u32 %r9, 9; END:
    """
    for schedule in POLICIES:
        out = run(body, 64, settings=Settings(schedule=schedule))
        np.testing.assert_array_equal(out, np.r_[np.where(LANES < 16, 3, 20), np.full(32, 9)])


def test_multiprocessor_numbers():
    out = aligned(8, np.int32)
    text = entry(
        "u64 out",
        """
    ld.param.b64 %rd1, [out]; mov.u32 %r1, %ctaid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd1, %rd1, %rd2;
    mov.u32 %r2, %smid; mov.u32 %r3, %nsmid; mad.lo.u32 %r2, %r3, 100, %r2; st.global.b32 [%rd1], %r2;
    """,
    )
    launch(text, out, grid=8, settings=Settings(sm_count=3))
    assert out.tolist() == [300 + i % 3 for i in range(8)]


def test_infinite_loop_hits_the_instruction_limit():
    with pytest.raises(LimitExceeded, match="instruction limit of 10,000 reached") as error:
        run("L: add.s32 %r9, %r9, 1; bra L;", settings=Settings(instruction_limit=10_000))
    assert "PTX line" in str(error.value)
    with pytest.raises(LimitExceeded, match="time limit of 0.2 s"):
        loop = "L: add.s32 %r9, %r9, 1; setp.ne.s32 %p1, %r9, -1; @%p1 bra L;"  # decided by a count: no deadlock
        run("mov.u32 %r9, 0;" + loop, settings=Settings(time_limit=0.2))


def test_special_registers():
    names = ["tid.x", "tid.y", "tid.z", "ctaid.x", "ctaid.y", "cluster_ctarank", "cluster_ctaid.x", "clusterid.x"]
    names += [
        "laneid",
        "warpid",
        "ntid.y",
        "nctaid.x",
        "nclusterid.x",
        "lanemask_lt",
        "lanemask_ge",
        "cluster_nctarank",
    ]
    block, grid, cluster = (5, 4, 3), (4, 2, 1), (2, 1, 1)
    threads = 60
    out = aligned((8, threads, len(names)), np.uint32)
    loads = "".join(f"mov.u32 %r9, %{n}; st.global.b32 [%rd1+{4 * i}], %r9;" for i, n in enumerate(names))
    body = f"""
    ld.param.b64 %rd1, [out]; mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z;
    mad.lo.u32 %r2, %r3, 4, %r2; mad.lo.u32 %r1, %r2, 5, %r1; mov.u32 %r4, %ctaid.y; mov.u32 %r5, %ctaid.x;
    mad.lo.u32 %r4, %r4, 4, %r5; mad.lo.u32 %r1, %r4, {threads}, %r1; mul.wide.u32 %rd2, %r1, {4 * len(names)};
    add.s64 %rd1, %rd1, %rd2; {loads}
    """
    launch(entry("u64 out", body), out, grid=grid, block=block, cluster=cluster)
    for cta in range(8):
        x, y = cta % 4, cta // 4
        for t in range(threads):
            lane = t % 32
            want = [t % 5, t // 5 % 4, t // 20, x, y, x % 2, x % 2, x // 2, lane, t // 32, 4, 4, 2]
            want += [(1 << lane) - 1, 0xFFFFFFFF & ~((1 << lane) - 1), 2]
            assert out[cta, t].tolist() == want


@pytest.mark.parametrize(
    ("options", "explicit"),
    [({}, 0), ({"cluster": (2, 1, 1)}, 1), ({"attributes": {"cluster": True}}, 1)],
)
def test_explicit_clusters(options, explicit):
    """A launch may name clusters of one CTA."""
    body = "mov.pred %p1, %is_explicit_cluster; selp.b32 %r9, 1, 0, %p1;"
    assert (run(body, grid=2, **options) == explicit).all()


def test_clock_advances():
    body = "mov.u32 %r2, %clock; mov.u32 %r3, 0; L: add.s32 %r3, %r3, 1; setp.lt.s32 %p1, %r3, 50; @%p1 bra L;"
    assert (run(body + "mov.u32 %r4, %clock; sub.s32 %r9, %r4, %r2;") >= 150).all()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"block": 1056}, "at most 1024 threads"),
        ({"grid": 3, "cluster": (2, 1, 1)}, "not a multiple"),
        ({"grid": 32, "cluster": (32, 1, 1)}, "at most 16 CTAs"),
        ({"dynamic_smem": 240 * 1024}, "bytes of shared memory"),
        ({"ctas": frozenset([(5, 0, 0)])}, "CTAs of the grid"),
    ],
)
def test_impossible_launches(options, match):
    with pytest.raises(LaunchError, match=match):
        launch(entry("u64 out", ""), aligned(32, np.int32), **options)


@pytest.mark.parametrize(
    ("directive", "options", "match"),
    [
        (".reqntid 64", {"block": 32}, "has .reqntid"),
        (".maxntid 32, 2", {"block": 65}, "has .maxntid: at most 64 threads"),
        (".maxntid 32, 2", {"block": 64}, None),
        (".reqnctapercluster 2", {"grid": 2}, "has .reqnctapercluster"),
        (".maxclusterrank 2", {"grid": 4, "cluster": (2, 2, 1)}, "not a multiple"),
        (".maxclusterrank 2", {"grid": 4, "cluster": (4, 1, 1)}, "has .maxclusterrank 2"),
        (".maxclusterrank 2", {"grid": 4, "cluster": (2, 1, 1)}, None),
    ],
)
def test_launches_that_the_kernel_rules_out(directive, options, match):
    text = entry("u64 out", "").replace(")\n{", f")\n{directive}\n{{")
    assert directive in text
    if match is None:
        launch(text, aligned(1, np.int32), **options)
        return
    with pytest.raises(LaunchError, match=match):
        launch(text, aligned(1, np.int32), **options)


def test_shared_memory_can_be_used_to_the_last_byte():
    """Static variables take their bytes, not a whole KiB."""
    body = "mov.u32 %r2, a; mov.u32 %r3, d; sub.u32 %r9, %r3, %r2; st.shared.b32 [%r3+232428], %r9;"
    text = entry("u64 out", FRAME + body + STORE, shared=".shared .align 16 .b8 a[16];")
    text = text.replace(".visible .entry", ".extern .shared .align 16 .b8 d[];\n.visible .entry")
    out = aligned(32, np.int32)
    launch(text, out, dynamic_smem=227 * 1024 - 16)
    assert (out == 16).all()
    with pytest.raises(LaunchError, match="232,464 bytes of shared memory"):
        launch(text, out, dynamic_smem=227 * 1024)


def test_subset_of_the_grid_runs_whole_clusters():
    body = "ld.param.b64 %rd1, [out]; mov.u32 %r1, %ctaid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd1, %rd1, %rd2;"
    out = aligned(8, np.int32)
    text = entry("u64 out", body + "st.global.b32 [%rd1], 1;")
    launch(text, out, grid=8, block=32, cluster=(2, 1, 1), ctas=frozenset([(3, 0, 0), (6, 0, 0)]))
    assert out.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize("opcode", ["trap", "brkpt"])
def test_trap_stops_with_its_place(opcode):
    with pytest.raises(EmulatorError, match=f"executed {opcode}") as error:
        run(f"setp.eq.u32 %p1, %r1, 5; @%p1 {opcode};")
    assert error.value.place.lanes == 1 << 5


# --- whole kernels ---------------------------------------------------------------------------------------------------

VECTOR_ADD = entry(
    "u64 a, u64 b, u64 c, u32 n",
    """
    ld.param.b64 %rd1, [a]; ld.param.b64 %rd2, [b]; ld.param.b64 %rd3, [c]; ld.param.b32 %r9, [n];
    mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x; mad.lo.s32 %r4, %r1, %r2, %r3;
    setp.ge.s32 %p1, %r4, %r9; @%p1 bra DONE; mul.wide.s32 %rd4, %r4, 4;
    add.s64 %rd5, %rd1, %rd4; add.s64 %rd6, %rd2, %rd4; add.s64 %rd7, %rd3, %rd4;
    ld.global.f32 %f1, [%rd5]; ld.global.f32 %f2, [%rd6]; add.f32 %f3, %f1, %f2; st.global.f32 [%rd7], %f3; DONE:
    """,
)

# Sum of 256 floats per CTA: tree in shared memory, then one atomic.
REDUCTION = entry(
    "u64 a, u64 out",
    """
    ld.param.b64 %rd1, [a]; ld.param.b64 %rd2, [out]; mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x;
    mad.lo.s32 %r3, %r2, 256, %r1; mul.wide.s32 %rd3, %r3, 4; add.s64 %rd1, %rd1, %rd3; ld.global.u32 %r4, [%rd1];
    mov.u32 %r5, s; mad.lo.s32 %r6, %r1, 4, %r5; st.shared.b32 [%r6], %r4; mov.u32 %r7, 128;
    LOOP: bar.sync 0; setp.ge.u32 %p1, %r1, %r7; @%p1 bra SKIP;
    shl.b32 %r8, %r7, 2; add.s32 %r8, %r8, %r6; ld.shared.b32 %r9, [%r8]; ld.shared.b32 %r10, [%r6];
    add.s32 %r10, %r10, %r9; st.shared.b32 [%r6], %r10;
    SKIP: shr.u32 %r7, %r7, 1; setp.gt.u32 %p2, %r7, 0; @%p2 bra LOOP;
    setp.eq.u32 %p3, %r1, 0; @%p3 ld.shared.b32 %r11, [%r6]; @%p3 red.global.add.u32 [%rd2], %r11;
    """,
    shared=".shared .align 4 .b8 s[1024];",
)

# 32x32 tiles through shared memory with a pitch of 33 words; blocks of 32x8 threads.
TRANSPOSE = entry(
    "u64 a, u64 b, u32 rows, u32 columns",
    """
    ld.param.b64 %rd1, [a]; ld.param.b64 %rd2, [b]; ld.param.u32 %r20, [rows]; ld.param.u32 %r21, [columns];
    mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ctaid.y;
    shl.b32 %r3, %r3, 5; shl.b32 %r4, %r4, 5; mov.u32 %r5, 0;
    IN: add.s32 %r6, %r2, %r5; add.s32 %r7, %r4, %r6; add.s32 %r8, %r3, %r1;
    setp.lt.u32 %p1, %r7, %r20; setp.lt.u32 %p2, %r8, %r21; and.pred %p1, %p1, %p2;
    mad.lo.s32 %r9, %r7, %r21, %r8; mul.wide.u32 %rd3, %r9, 4; add.s64 %rd4, %rd1, %rd3;
    @%p1 ld.global.b32 %r10, [%rd4];
    mov.u32 %r11, s; mad.lo.s32 %r12, %r6, 33, %r1; mad.lo.s32 %r11, %r12, 4, %r11; @%p1 st.shared.b32 [%r11], %r10;
    add.s32 %r5, %r5, 8; setp.lt.u32 %p3, %r5, 32; @%p3 bra IN;
    bar.sync 0; mov.u32 %r5, 0;
    OUT: add.s32 %r6, %r2, %r5; add.s32 %r7, %r3, %r6; add.s32 %r8, %r4, %r1;
    setp.lt.u32 %p1, %r7, %r21; setp.lt.u32 %p2, %r8, %r20; and.pred %p1, %p1, %p2;
    mov.u32 %r11, s; mad.lo.s32 %r12, %r1, 33, %r6; mad.lo.s32 %r11, %r12, 4, %r11; @%p1 ld.shared.b32 %r10, [%r11];
    mad.lo.s32 %r9, %r7, %r20, %r8; mul.wide.u32 %rd3, %r9, 4; add.s64 %rd4, %rd2, %rd3;
    @%p1 st.global.b32 [%rd4], %r10;
    add.s32 %r5, %r5, 8; setp.lt.u32 %p3, %r5, 32; @%p3 bra OUT;
    """,
    shared=".shared .align 4 .b8 s[4224];",
)


@pytest.mark.parametrize("schedule", POLICIES)
def test_whole_kernels_under_every_schedule(schedule):
    settings = Settings(schedule=schedule, seed=3)
    n = 1000
    a, b, c = copy(RNG.normal(size=n).astype(np.float32)), copy(RNG.normal(size=n).astype(np.float32)), aligned(n, "f4")
    launch(VECTOR_ADD, a, b, c, n, grid=8, block=128, settings=settings)
    np.testing.assert_array_equal(c, a + b)

    values, total = copy(RNG.integers(0, 1 << 30, 5 * 256, dtype=np.uint32)), aligned(1, np.uint32)
    result = launch(REDUCTION, values, total, grid=5, block=256, settings=settings)
    assert total[0] == values.sum(dtype=np.uint32) and not result.hazards

    rows, columns = 77, 45
    matrix, out = copy(RNG.integers(0, 1 << 30, (rows, columns), dtype=np.uint32)), aligned((columns, rows), np.uint32)
    result = launch(TRANSPOSE, matrix, out, rows, columns, grid=(2, 3, 1), block=(32, 8, 1), settings=settings)
    np.testing.assert_array_equal(out, matrix.T)
    assert not result.hazards


def test_same_schedule_same_hash_other_schedule_other_hash():
    def interleaving(**settings) -> int:
        values, total = copy(RNG.integers(0, 9, 5 * 256, dtype=np.uint32)), aligned(1, np.uint32)
        return launch(REDUCTION, values, total, grid=5, block=256, settings=Settings(**settings)).schedule_hash

    seen = {name: interleaving(schedule=name) for name in POLICIES}
    assert all(interleaving(schedule=name) == value for name, value in seen.items())
    assert len(set(seen.values())) >= 4
    assert interleaving(schedule="random", seed=1) != seen["random"]
