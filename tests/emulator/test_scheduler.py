"""Residency, waves, asynchronous operations under each policy, waiting on flags, limits, clean interruption."""

from __future__ import annotations

import numpy as np
import pytest

from dsv4lib.emulator import isa
from dsv4lib.emulator.errors import Deadlock, LimitExceeded
from dsv4lib.emulator.machine import livelock
from dsv4lib.emulator.machine.async_units import AsyncOp
from dsv4lib.emulator.machine.policies import POLICIES
from dsv4lib.emulator.machine.request import Settings
from dsv4lib.emulator.machine.scheduler import Scheduler
from dsv4lib.emulator.machine.warp import Block
from dsv4lib.errors import ArgumentError
from tests.emulator.launching import aligned, entry, launch, prepare

LOG: list[int] = []


@isa.service("testissue.u32", "testwait.u32", "testinterrupt", note="instructions of the tests")
def _probe(warp, instr, form):
    """testissue queues an operation that logs its operand; testwait blocks until that many have completed."""
    if form.opcode == "testinterrupt":
        raise KeyboardInterrupt
    value = warp.uniform(instr.operands[0], np.uint32)
    if form.opcode == "testissue.u32":
        warp.cta.machine.units.issue(AsyncOp("tma", lambda: LOG.append(value), f"probe {value}", warp, instr))
        return None
    if len(LOG) >= value:
        return None
    return Block("probe", lambda: len(LOG) >= value, lambda: f"{len(LOG)} of {value} completed")


ISSUE = entry("", "".join(f"testissue.u32 {i}; mov.u32 %r1, {i};" for i in range(8)) + "testwait.u32 8;")


@pytest.mark.parametrize("schedule", POLICIES)
def test_completions_follow_the_policy(schedule):
    LOG.clear()
    result = launch(ISSUE, settings=Settings(schedule=schedule))
    assert sorted(LOG) == list(range(8))
    if schedule in ("round_robin", "oldest_first"):
        assert list(range(8)) == LOG and result.reordered == 0
    if schedule == "newest_first":
        assert list(range(7, -1, -1)) == LOG and result.reordered == 7
    if schedule == "adversarial":
        assert list(range(8)) != LOG and result.reordered > 0


def test_policies_choose_the_warp():
    """Each of four warps queues its number three times; completions at once show the order in which they ran."""
    text = entry("", "mov.u32 %r1, %warpid; testissue.u32 %r1; testissue.u32 %r1; testissue.u32 %r1; testwait.u32 12;")
    first = {}
    for schedule in ("oldest_first", "newest_first"):
        LOG.clear()
        launch(text, block=128, settings=Settings(schedule=schedule))
        first[schedule] = LOG[0]
    assert first == {"oldest_first": 0, "newest_first": 3}


def test_same_seed_same_order():
    orders = []
    for seed in (1, 1, 2):
        LOG.clear()
        launch(ISSUE, settings=Settings(schedule="random", seed=seed))
        orders.append(tuple(LOG))
    assert orders[0] == orders[1] != orders[2]


def test_late_operations_are_released_to_a_polling_warp():
    """The adversary holds operations back while a warp can run; a warp that only polls gets them all the same."""
    LOG.clear()
    text = entry(
        "u64 a",
        """
        ld.param.b64 %rd1, [a]; testissue.u32 0;
        SPIN: ld.volatile.global.b32 %r1, [%rd1]; setp.eq.u32 %p1, %r1, 0; @%p1 bra SPIN;
        """,
    )
    flag = aligned(1, np.uint32)
    machine = prepare(text, flag, settings=Settings(schedule="adversarial", instruction_limit=5_000_000))
    issue = machine.units.issue

    def set_flag(op):
        op.complete = lambda: flag.__setitem__(0, 1)
        return issue(op)

    machine.units.issue = set_flag
    assert machine.run().instructions < 1_000_000


def test_deadlock_reports_the_block():
    LOG.clear()
    with pytest.raises(Deadlock, match=r"warp 0: probe: 1 of 5 completed, PTX line \d+: testwait.u32 5"):
        launch(entry("", "testissue.u32 0; testwait.u32 5;"))


@pytest.mark.parametrize("progress", [0, 5])
def test_waits_that_expire_again_and_again_are_a_deadlock(progress):
    """Suspensions end in sixteen rounds without progress; after progress in round 5 they are counted anew."""
    machine = prepare(entry("", "testwait.u32 99;"))
    scheduler, rounds = Scheduler(machine), []

    def expire():
        rounds.append(machine.progress)
        if len(rounds) == progress:
            machine.changed()
        return True

    scheduler.expire_waits = expire
    with pytest.raises(Deadlock, match="of 99 completed"):
        scheduler.run()
    assert len(rounds) == progress + 16


# Each CTA waits for the flag of the next one: they must all be resident at the same time.
CHAIN = entry(
    "u64 a, u32 last",
    """
    ld.param.b64 %rd1, [a]; ld.param.b32 %r9, [last]; mov.u32 %r1, %ctaid.x; mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd1, %rd1, %rd2; setp.eq.u32 %p1, %r1, %r9; @%p1 bra SET;
    SPIN: ld.acquire.gpu.global.b32 %r2, [%rd1+4]; setp.eq.u32 %p2, %r2, 0; @%p2 bra SPIN;
    SET: st.release.gpu.global.b32 [%rd1], 1;
    """,
)


@pytest.mark.parametrize("schedule", POLICIES)
def test_ctas_that_wait_for_later_ones(schedule):
    flags = aligned(6, np.uint32)
    settings = Settings(schedule=schedule, sm_count=8, instruction_limit=20_000_000)
    launch(CHAIN, flags, 5, grid=6, settings=settings)
    assert (flags == 1).all()
    launch(CHAIN, aligned(6, np.uint32), 5, grid=6, settings=settings, attributes={"cooperative": True})


def test_more_ctas_than_fit_run_in_waves():
    counter = aligned(1, np.uint32)
    text = entry("u64 a", "ld.param.b64 %rd1, [a]; red.global.add.u32 [%rd1], 1;")
    machine = prepare(text, counter, grid=300, block=64, settings=Settings(sm_count=1, schedule="random"))
    alive, most = set(), []
    started, finished = machine.cluster_started, machine.cluster_finished
    machine.cluster_started = lambda c: (started(c), alive.add(c), most.append(len(alive)))
    machine.cluster_finished = lambda c: (finished(c), alive.discard(c))
    result = machine.run()
    assert counter[0] == 300 * 64 and result.stats["ctas"] == 300 and max(most) <= 32 and not alive


def test_cancelled_clusters_are_those_that_are_not_resident():
    machine = prepare(entry("", ""), grid=(4, 3, 1), block=1024, settings=Settings(sm_count=1))
    from dsv4lib.emulator.machine.scheduler import Scheduler

    Scheduler(machine)
    assert [machine.cancel_cluster() for _ in range(11)] == [
        *[(x, 0, 0) for x in (2, 3)],
        *[(x, y, 0) for y in (1, 2) for x in range(4)],
        None,
    ]


def test_interrupt_leaves_nothing_behind():
    machine = prepare(entry("", "testinterrupt;"))
    before = len(machine.gmem)
    with pytest.raises(KeyboardInterrupt):
        machine.run()
    assert len(machine.gmem) == before


def test_unknown_schedule():
    with pytest.raises(ArgumentError, match="round_robin, oldest_first"):
        launch(entry("", ""), settings=Settings(schedule="fair"))


def test_statistics():
    result = launch(entry("", "mov.u32 %r1, 1; @%p1 mov.u32 %r1, 2;"), grid=3, block=64)
    assert (result.instructions, result.stats["ctas"], result.stats["warps"]) == (3 * 2 * 3, 3, 6)


@pytest.mark.parametrize("schedule", POLICIES)
def test_waiting_for_a_phase_that_never_ends_is_a_deadlock(schedule):
    """try_wait may give up and be repeated for ever: that is still a deadlock once nothing else can happen."""
    text = entry(
        "",
        """
        mov.u32 %r1, bar; mov.u32 %r2, %tid.x; setp.eq.u32 %p1, %r2, 0;
        @%p1 mbarrier.init.shared.b64 [%r1], 2; bar.sync 0;
        @%p1 mbarrier.arrive.shared.b64 _, [%r1];
        WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0; @!%p2 bra WAIT;
        """,
        shared=".shared .align 8 .b8 bar[8];",
    )
    with pytest.raises(Deadlock, match=r"warp 1: mbarrier.*try_wait") as error:
        launch(text, grid=2, block=64, settings=Settings(schedule=schedule, instruction_limit=3_000_000))
    assert "warp 0" in str(error.value)


# --- loops that never end ---------------------------------------------------------------------------------------------

_SPIN = """
    ld.param.u64 %rd1, [flag]; mov.u32 %r9, %ctaid.x; mov.u32 %r8, 0;
    setp.ne.u32 %p3, %r9, 2; @%p3 bra L;
    D: add.u32 %r8, %r8, 1; setp.lt.u32 %p4, %r8, COUNT; @%p4 bra D;
    @%p3 bra L;
    LAST
    L: ld.acquire.gpu.global.u32 %r1, [%rd1+4]; setp.eq.u32 %p1, %r1, 0; @%p1 bra L;
    atom.global.add.u32 %r2, [%rd1], 1;
"""


@pytest.mark.parametrize("schedule", POLICIES)
def test_a_flag_that_no_warp_sets(schedule):
    flag = aligned(4, np.uint32)
    text = entry("u64 flag", _SPIN.replace("COUNT", "100").replace("LAST", ""))
    with pytest.raises(Deadlock, match="every warp that can run repeats the same loop") as error:
        launch(text, flag, grid=(3, 1, 1), block=64, settings=Settings(schedule=schedule))
    assert "6 warps spin" in str(error.value) and "= 0x0, byte 4 of argument 0" in str(error.value)


@pytest.mark.parametrize("schedule", POLICIES)
def test_a_flag_that_is_set_late_is_waited_for(schedule):
    flag = aligned(4, np.uint32)
    last = "st.release.gpu.global.u32 [%rd1+4], 1;"
    text = entry("u64 flag", _SPIN.replace("COUNT", "1000000").replace("LAST", last))
    launch(text, flag, grid=(3, 1, 1), block=64, settings=Settings(schedule=schedule))
    assert flag[0] == 3 * 64


@pytest.mark.parametrize("schedule", POLICIES)
@pytest.mark.parametrize(
    "poll",
    [
        "atom.acquire.gpu.global.exch.b32 %r1, [%rd1], 1;",  # a lock that is never released
        "atom.global.add.u32 %r1, [%rd1], 0;",  # an atomic read
        "atom.global.or.b32 %r1, [%rd1], 1;",
        "st.volatile.global.u32 [%rd1], 1; ld.volatile.global.u32 %r1, [%rd1];",
        "st.volatile.shared.u32 [seen], %r9; ld.volatile.global.u32 %r1, [%rd1];",
    ],
)
def test_a_loop_whose_writes_change_nothing_is_a_deadlock(poll, schedule):
    lock = aligned(4, np.uint32)
    lock[0] = 1
    body = f"ld.param.u64 %rd1, [lock]; mov.u32 %r9, 7; L: {poll} setp.ne.u32 %p1, %r1, 0; @%p1 bra L;"
    with pytest.raises(Deadlock, match="every warp that can run repeats the same loop") as error:
        launch(
            entry("u64 lock", body, shared=".shared .align 4 .b8 seen[4];"),
            lock,
            grid=(2, 1, 1),
            block=64,
            settings=Settings(schedule=schedule, instruction_limit=20_000_000),
        )
    assert "4 warps spin" in str(error.value) and "= 0x1, byte 0 of argument 0" in str(error.value)


def test_a_lock_that_is_released_late_is_waited_for():
    """Others exchange the value that is there, in vain, while its holder counts; then it goes from one to the next."""
    body = """
    ld.param.u64 %rd1, [lock]; mov.u32 %r9, %ctaid.x; mov.u32 %r8, 0; setp.ne.u32 %p3, %r9, 0; @%p3 bra L;
    D: add.u32 %r8, %r8, 1; setp.lt.u32 %p4, %r8, 1000000; @%p4 bra D;
    st.release.gpu.global.u32 [%rd1], 0; bra END;
    L: atom.acquire.gpu.global.exch.b32 %r1, [%rd1], 1; setp.ne.u32 %p1, %r1, 0; @%p1 bra L;
    ld.volatile.global.u32 %r2, [%rd1+4]; add.u32 %r2, %r2, 1; st.volatile.global.u32 [%rd1+4], %r2;
    st.release.gpu.global.u32 [%rd1], 0;
    END:
    """
    lock = aligned(4, np.uint32)
    lock[0] = 1
    launch(entry("u64 lock", body), lock, grid=(4, 1, 1), block=1)
    assert list(lock[:2]) == [0, 3]


WRITES = "ld.param.u64 %rd1, [lock]; mov.u32 %r3, 0; L: {} setp.eq.u32 %p1, %r2, 0; @%p1 bra L;"
FLAG = "ld.global.u32 %r2, [%rd1+4];"
LOOPS = {  # what they do, and whether they can end
    "a lock changes hands": ("atom.global.exch.b32 %r1, [%rd1], 1; st.global.u32 [%rd1], 0;" + FLAG, False),
    "turns are counted": ("add.u32 %r3, %r3, 1; st.global.u32 [%rd1], %r3;" + FLAG, False),
    "the flag itself is written": (
        FLAG + "add.u32 %r2, %r2, 2; shr.u32 %r2, %r2, 30; st.global.u32 [%rd1+4], %r2;", False,
    ),
    "turns are limited": ("add.u32 %r3, %r3, 1; shr.u32 %r2, %r3, 31;", True),
    "turns are counted and limited in memory": (
        "atom.global.add.u32 %r2, [%rd1], 1; shr.u32 %r2, %r2, 31;", True,
    ),
    "the clock decides": ("mov.u32 %r2, %clock; shr.u32 %r2, %r2, 31;", True),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_writes_is_judged_by_what_decides_it(name):
    body, ends = LOOPS[name]
    error = LimitExceeded if ends else Deadlock
    with pytest.raises(error, match="instruction limit" if ends else "nothing that it depends on changes"):
        text = entry("u64 lock", WRITES.format(body))
        launch(text, aligned(4, np.uint32), settings=Settings(instruction_limit=3_000_000))


def test_a_service_reads_a_variable_with_its_offset():
    LOG.clear()
    body = "testissue.u32 s; testissue.u32 s+16; testwait.u32 2;"
    launch(entry("u64 out", body, shared=".shared .align 16 .b8 s[32];"), aligned(1, np.uint32))
    assert LOG[1] - LOG[0] == 16


# Loops with barriers that end: by a register, by a word that a thread counts up, by an atomic, by another CTA.
COUNTS = {
    "a register": "add.u32 %r6, %r6, 1;",
    "a word of shared memory": "@%p1 ld.shared.u32 %r5, [%r9]; @%p1 add.u32 %r5, %r5, 1; @%p1 st.shared.u32 [%r9], %r5;"
    "bar.sync 0; ld.shared.u32 %r6, [%r9];",
    "an atomic": "@%p1 atom.global.add.u32 %r5, [%rd1], 1; @%p1 st.shared.u32 [%r9], %r5; bar.sync 0;"
    "ld.shared.u32 %r6, [%r9];",
    "the other block": "@%p1 atom.global.add.u32 %r5, [%rd1], %r7; @%p1 st.shared.u32 [%r9], %r5; bar.sync 0;"
    "ld.shared.u32 %r6, [%r9];",
}


@pytest.mark.parametrize("name", COUNTS)
def test_long_loops_with_barriers_are_no_deadlock(name, monkeypatch):
    monkeypatch.setattr(livelock, "CIRCLES", 50)
    looks = []
    monkeypatch.setattr(livelock.Watch, "_go_around", count(livelock.Watch._go_around, looks))
    body = (
        "mov.u32 %r0, %tid.x; setp.eq.u32 %p1, %r0, 0; mov.u32 %r9, sm; ld.param.u64 %rd1, [data]; mov.u32 %r6, 0;"
        "mov.u32 %r7, %ctaid.x; @%p1 st.shared.u32 [%r9], 0; bar.sync 0; L: " + COUNTS[name] + "bar.sync 0;"
        "setp.lt.u32 %p2, %r6, 200; @%p2 bra L;"
    )
    data = aligned(4, np.uint32)
    text = entry("u64 data", body, shared=".shared .align 4 .b8 sm[16];")
    for schedule in POLICIES:
        data[:] = 0
        launch(text, data, grid=2, block=64, settings=Settings(schedule=schedule, instruction_limit=200_000))
    assert looks


def count(function, calls):
    def counted(*args):
        calls.append(args)
        return function(*args)

    return counted
