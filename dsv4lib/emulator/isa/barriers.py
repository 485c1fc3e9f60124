"""Implement barriers of a warp, a CTA and a cluster, and ordering instructions.

Also those that only hint or end.

Named barriers count threads. A barrier completes when the expected number has arrived; warps that only arrive go on.
Source: PTX ISA, "Parallel Synchronization and Communication Instructions": barrier{.cta}, bar.warp.sync,
barrier.cluster, membar/fence; "Miscellaneous Instructions"; "griddepcontrol".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dsv4lib.emulator import isa
from dsv4lib.emulator.errors import EmulatorError, HazardError, UnsupportedInstruction
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.machine.cta import Cta
from dsv4lib.emulator.machine.warp import LIVE, Block, Warp, lanes_of
from dsv4lib.emulator.native.abi import FULL_MASK, LANES
from dsv4lib.emulator.ptx.ir import Instr, Operand

NAMED_BARRIERS = 16


@dataclass
class NamedBarrier:
    """One of a CTA's 16 named barriers.

    Attributes:
        phase: completed uses; expected: threads of the current use, 0: none has arrived yet.
        arrived: threads that have arrived; lanes: which lanes of each warp. A warp whose live lanes have all arrived
            counts as 32 threads, whatever its number of live lanes, and has the full mask here.
        explicit: the current use gave its thread count.
        votes: [number of true predicates, number of predicates] of barrier.red; results: of the last completed use.
        sync: clocks of the race detector.
    """

    number: int
    phase: int = 0
    expected: int = 0
    arrived: int = 0
    explicit: bool = False
    lanes: dict[int, int] = field(default_factory=dict)
    votes: list[int] = field(default_factory=lambda: [0, 0])
    results: tuple[int, int] = (0, 0)
    sync: Any = None

    def complete(self) -> None:
        """Start the next use."""
        self.phase += 1
        self.results = (self.votes[0], self.votes[1])
        self.expected = self.arrived = 0
        self.lanes, self.votes = {}, [0, 0]
        if self.sync is not None:
            self.sync.complete()

    def detail(self) -> str:
        """Describe the barrier for the deadlock report."""
        return f"{self.arrived} of {self.expected} threads arrived (warps {sorted(self.lanes)})"


def _all_threads(cta: Cta) -> int:
    """Threads that a barrier without a count waits for: whole warps, without those that have exited."""
    return sum(LANES for warp in cta.warps if not warp.exited)


def _barrier(warp: Warp, number: Operand, instr: Instr) -> NamedBarrier:
    index = warp.uniform(number, np.uint32)
    if index >= NAMED_BARRIERS:
        raise EmulatorError(f"barrier {index}: a CTA has {NAMED_BARRIERS} named barriers", warp.place(instr))
    return warp.cta.barriers.setdefault(index, NamedBarrier(index))


def _arrive(
    warp: Warp, barrier: NamedBarrier, count: Operand | None, aligned: bool, instr: Instr, waits: bool = False
) -> None:
    """Count the warp in. An aligned instruction counts whole warps, as hardware does.

    Barriers count arrivals without their origin: a warp that has arrived may still ``waits`` (sync, red) in the same
    phase, and counts twice then. FlashAttention's warp groups start that way: the one that runs first arrives for
    the other. Further arrivals of a warp in one phase count too, all of them, also towards a phase that no other warp
    has come to; measured on an H200, with and without ``aligned``, before and after a warp that waits. They are
    reported: one may stand for a warp that is missing.

    Raises:
        HazardError: more threads than expected, differing counts, or not whole warps.
    """
    explicit = count is not None
    expected = warp.uniform(count, np.uint32) if explicit else _all_threads(warp.cta)
    mask = warp.mask()
    problem = ""
    if explicit and (expected == 0 or expected % LANES):
        problem = f"thread count {expected} is not a positive multiple of 32"
    elif aligned and mask != warp.words[LIVE]:
        problem = f"an aligned barrier needs all live lanes {warp.words[LIVE]:#010x} of the warp"
    elif barrier.arrived and (barrier.expected, barrier.explicit) != (expected, explicit):
        if explicit or barrier.explicit:
            problem = f"used with {expected} threads while warps {sorted(barrier.lanes)} use it with {barrier.expected}"
    if problem:
        raise HazardError(f"barrier {barrier.number}: {problem}", warp.place(instr))
    barrier.expected, barrier.explicit = expected, explicit
    before = barrier.lanes.get(warp.warp_id, 0)
    if before & mask:  # counted already; now the same lanes count again
        before = 0
        if not waits:
            message = f"barrier {barrier.number}: warp {warp.warp_id} arrives twice in one phase: {barrier.detail()}"
            warp.cta.machine.report("barrier_double_arrive", message, warp.place(instr))
    seen = before | mask
    if not warp.words[LIVE] & ~seen:
        seen = FULL_MASK
    barrier.lanes[warp.warp_id] = seen
    barrier.arrived += seen.bit_count() - before.bit_count()
    if barrier.arrived > expected:
        raise HazardError(
            f"barrier {barrier.number}: more threads than expected: {barrier.detail()}", warp.place(instr)
        )
    _trace(warp, "named", barrier.number, barrier.arrived, expected)
    if warp.cta.machine.race is not None:
        warp.cta.machine.race.arrived(barrier)
    if barrier.arrived == expected:
        barrier.complete()
    warp.cta.machine.changed(lasting=False)


def _trace(warp: Warp, kind: str, number: int, arrived: int, expected: int) -> None:
    trace = warp.cta.machine.trace
    if trace is not None:
        trace.barrier(warp, kind, number, arrived, expected)


def _passed(warp: Warp, barrier: NamedBarrier) -> None:
    """The wait is over."""
    if warp.cta.machine.race is not None:
        warp.cta.machine.race.acquired(warp, barrier)


def _wait_for(barrier: NamedBarrier, phase: int, what: str) -> Block:
    return Block(f"{what} {barrier.number}", lambda: barrier.phase != phase, barrier.detail)


@isa.service("bar[.cta].sync", "barrier[.cta].sync[.<aligned:aligned>]")
def bar_sync(warp: Warp, instr: Instr, form: Form) -> Block | None:
    """Arrive at a named barrier and wait until it completes."""
    if warp.pending is None:
        barrier = _barrier(warp, instr.operands[0], instr)
        phase = barrier.phase
        warp.pending = barrier, phase
        _arrive(
            warp, barrier, instr.operands[1] if len(instr.operands) > 1 else None, _aligned(form), instr, waits=True
        )
    else:
        barrier, phase = warp.pending
    return _wait_for(barrier, phase, "barrier") if barrier.phase == phase else _passed(warp, barrier)


@isa.service("bar[.cta].arrive", "barrier[.cta].arrive[.<aligned:aligned>]")
def bar_arrive(warp: Warp, instr: Instr, form: Form) -> None:
    """Arrive at a named barrier and go on."""
    _arrive(warp, _barrier(warp, instr.operands[0], instr), instr.operands[1], _aligned(form), instr)


@isa.service(
    "bar[.cta].red.<op:popc>.u32",
    "bar[.cta].red.<op:and|or>.pred",
    "barrier[.cta].red.<op:popc>[.<aligned:aligned>].u32",
    "barrier[.cta].red.<op:and|or>[.<aligned:aligned>].pred",
)
def bar_red(warp: Warp, instr: Instr, form: Form) -> Block | None:
    """Reduce one predicate per thread at a barrier."""
    target, number, *count, predicate = instr.operands
    if warp.pending is None:
        barrier = _barrier(warp, number, instr)
        active = lanes_of(warp.mask())
        barrier.votes[0] += int((warp.read(predicate, bool) & active).sum())
        barrier.votes[1] += int(active.sum())
        warp.pending = barrier, barrier.phase
        _arrive(warp, barrier, count[0] if count else None, _aligned(form), instr, waits=True)
    barrier, phase = warp.pending
    if barrier.phase == phase:
        return _wait_for(barrier, phase, "barrier.red")
    _passed(warp, barrier)
    true, total = barrier.results
    op = form.get("op")
    warp.write(target, np.uint32(true) if op == "popc" else np.bool_(true == total if op == "and" else true > 0))
    return None


def _aligned(form: Form) -> bool:
    """``bar`` means ``barrier.aligned``."""
    return form.opcode.startswith("bar.") or form.has("aligned")


@isa.service("bar.warp.sync")
def bar_warp_sync(warp: Warp, instr: Instr, form: Form) -> Block | None:
    """Synchronise the lanes of the member mask. The driver has run the other groups first (FLAG_CONVERGE)."""
    lanes = warp.lanes()
    members = warp.read(instr.operands[0], np.uint32)[lanes]
    if any(not int(m) >> int(lane) & 1 for m, lane in zip(members, lanes, strict=True)):
        raise HazardError("bar.warp.sync by a lane that is not in its own member mask", warp.place(instr))
    if not int(np.bitwise_or.reduce(members)) & warp.words[LIVE] & ~warp.mask():
        for mask in set(members.tolist()):
            _synchronised(warp, mask)
        return None
    if (members != members[0]).any():
        raise UnsupportedInstruction("bar.warp.sync of lanes with different member masks, some incomplete")
    key = warp.warp_id, int(members[0])
    return warp.cta.barriers.setdefault(key, WarpBarrier()).arrive(warp, int(members[0]))


def _synchronised(warp: Warp, members: int) -> None:
    if warp.cta.machine.race is not None:
        warp.cta.machine.race.warp_synchronised(warp, members)


@dataclass
class WarpBarrier:
    """bar.warp.sync reached by lane groups at different places. The member mask pairs them."""

    phase: int = 0
    arrived: int = 0

    def arrive(self, warp: Warp, members: int) -> Block | None:
        """Arrive with the active lanes, wait for the other live members."""
        if warp.pending is None:
            warp.pending = self.phase
            self.arrived |= warp.mask()
            self.check(warp, members)
        if warp.pending != self.phase:
            return None
        phase = self.phase
        return Block(
            "bar.warp.sync", lambda: self.phase != phase, lambda: f"lanes {self.arrived:#010x} of {members:#010x}"
        )

    def check(self, warp: Warp, members: int) -> None:
        """Complete if all live members have arrived."""
        if self.arrived and not members & warp.words[LIVE] & ~self.arrived:
            self.phase, self.arrived = self.phase + 1, 0
            _synchronised(warp, members)
            warp.cta.machine.changed(lasting=False)


@dataclass
class ClusterBarrier:
    """The hardware barrier of a cluster, counted per warp.

    A phase completes when every live warp has arrived once more. Some shipped kernels arrive twice before they wait
    twice, so arrivals run ahead of the phase instead of being lost; the first wait then waits for both phases, as an
    H200 does.

    Attributes:
        arrivals, waits: completed arrive and wait instructions per warp (key: rank, warp).
        lanes: those of a diverged warp that have arrived when others have not; waited: completed waits by lane.
        left: clocks of the race detector by phase.
    """

    arrivals: dict[tuple[int, int], int] = field(default_factory=dict)
    lanes: dict[tuple[int, int], int] = field(default_factory=dict)
    waits: dict[tuple[int, int], int] = field(default_factory=dict)
    waited: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    left: dict[int, Any] = field(default_factory=dict)

    def phase(self, warp: Warp) -> int:
        """Count the phases that every live warp of the cluster has arrived at."""
        counts = [
            self.arrivals.get((cta.rank, w.warp_id), 0)
            for cta in warp.cta.cluster.ctas
            for w in cta.warps
            if not w.exited
        ]
        return min(counts, default=0)

    def detail(self, warp: Warp) -> str:
        """Describe the barrier for the deadlock report."""
        phase = self.phase(warp)
        late = [
            f"rank {cta.rank} warp {w.warp_id}"
            for cta in warp.cta.cluster.ctas
            for w in cta.warps
            if not w.exited and self.arrivals.get((cta.rank, w.warp_id), 0) == phase
        ]
        return f"phase {phase}, not arrived: {', '.join(late[:8])}{' ...' if len(late) > 8 else ''}"


def _cluster_barrier(warp: Warp) -> ClusterBarrier:
    cluster = warp.cta.cluster
    if cluster.barrier is None:
        cluster.barrier = ClusterBarrier()
    return cluster.barrier


@isa.service("barrier.cluster.arrive[.<sem:release|relaxed>][.<aligned:aligned>]")
def cluster_arrive(warp: Warp, instr: Instr, form: Form) -> None:
    """Arrive at the cluster barrier; a second arrival without a wait is reported."""
    barrier = _cluster_barrier(warp)
    key = (warp.cta.rank, warp.warp_id)
    barrier.lanes[key] = barrier.lanes.get(key, 0) | warp.mask()
    _count_in_cluster(warp, barrier, instr, form.get("sem") == "relaxed")


def _count_in_cluster(warp: Warp, barrier: ClusterBarrier, instr: Instr | None, relaxed: bool = False) -> None:
    """Count the warp's arrival if all its live lanes have arrived; without aligned they may do so one by one."""
    key = (warp.cta.rank, warp.warp_id)
    if warp.words[LIVE] & ~barrier.lanes[key]:
        return
    barrier.lanes[key] = 0
    barrier.arrivals[key] = count = barrier.arrivals.get(key, 0) + 1
    if count > barrier.waits.get(key, 0) + 1:
        message = "barrier.cluster.arrive again without a barrier.cluster.wait in between"
        warp.cta.machine.report("cluster_double_arrive", message, warp.place(instr))
    if warp.cta.machine.race is not None:
        warp.cta.machine.race.cluster_arrived(warp, barrier, count, relaxed)
    _trace(warp, "cluster", 0, count, barrier.phase(warp))
    warp.cta.machine.changed(lasting=False)


@isa.service("barrier.cluster.wait[.<sem:acquire>][.<aligned:aligned>]")
def cluster_wait(warp: Warp, instr: Instr, form: Form) -> Block | None:
    """Wait until all live threads of the cluster have arrived."""
    barrier = _cluster_barrier(warp)
    key = (warp.cta.rank, warp.warp_id)
    live = lanes_of(warp.words[LIVE])
    mine = live if form.has("aligned") else warp.lanes()
    waited = barrier.waited.setdefault(key, np.zeros(LANES, np.int64))
    # An arrival of a diverged warp's lanes is counted when its last lanes arrive; theirs to wait for it is there now.
    target = barrier.arrivals.get(key, 0) + bool(barrier.lanes.get(key, 0) & warp.mask())
    if target <= waited[mine].max():
        raise HazardError("barrier.cluster.wait without an arrive before it", warp.place(instr))
    if barrier.phase(warp) < target:
        return Block("barrier.cluster", lambda: barrier.phase(warp) >= target, lambda: barrier.detail(warp))
    waited[mine] += 1
    barrier.waits[key] = int(waited[live].min())
    if warp.cta.machine.race is not None:
        warp.cta.machine.race.cluster_passed(warp, barrier, target)
    return None


def warp_exited(warp: Warp) -> None:
    """Recount the threads of barriers without a count after this warp has exited."""
    for barrier in warp.cta.barriers.values():
        if isinstance(barrier, NamedBarrier) and barrier.arrived and not barrier.explicit:
            barrier.expected = _all_threads(warp.cta)
            if barrier.arrived >= barrier.expected:
                barrier.complete()


def lanes_exited(warp: Warp) -> None:
    """Count a warp as arrived where all its live lanes wait after the others' exit."""
    for key, barrier in warp.cta.barriers.items():
        if isinstance(barrier, WarpBarrier):
            if key[0] == warp.warp_id:
                barrier.check(warp, key[1])
            continue
        seen = barrier.lanes.get(warp.warp_id, 0)
        if seen and not warp.words[LIVE] & ~seen:
            barrier.lanes[warp.warp_id] = FULL_MASK
            barrier.arrived += LANES - seen.bit_count()
            if barrier.arrived >= barrier.expected:
                barrier.complete()
            warp.cta.machine.changed()
    barrier = warp.cta.cluster.barrier
    if barrier is not None and barrier.lanes.get((warp.cta.rank, warp.warp_id)):
        _count_in_cluster(warp, barrier, None)


# --- order only -----------------------------------------------------------------------------------------------------


@isa.service(
    "membar.<scope:cta|gl|sys>",
    "fence[.<sem:sc|acq_rel|acquire|release>].<scope:cta|cluster|gpu|sys>",
    "fence.acquire.sync_restrict::shared::cluster.cluster",
    "fence.release.sync_restrict::shared::cta.cluster",
    "fence.mbarrier_init.release.cluster",
    note="memory operations of a warp are performed in program order: a fence matters to the race detector only",
)
def fence(warp: Warp, instr: Instr, form: Form) -> None:
    """Order generic accesses. Proxy fences are elsewhere."""
    race = warp.cta.machine.race
    if race is None:
        return
    if instr.opcode.startswith("fence.mbarrier_init"):
        race.init_fenced(warp)
    else:
        race.memory_fenced(warp, instr.opcode)


@isa.service(
    "griddepcontrol.<what:launch_dependents|wait>",
    note="launches run one after another: a dependent grid never starts early; the race detector knows where it could",
)
def griddepcontrol(warp: Warp, instr: Instr, form: Form) -> None:
    """Wait for, or release, programmatic dependent launches."""
    race = warp.cta.machine.race
    if race is not None:
        race.grid_dependency(warp, form.get("what") == "wait")


@isa.service("setmaxnreg.<direction:inc|dec>.sync.aligned.u32", note="register counts have no effect on results")
def setmaxnreg(warp: Warp, instr: Instr, form: Form) -> None:
    """Check the count: a multiple of 8 from 24 to 256."""
    count = warp.uniform(instr.operands[0], np.uint32)
    if not 24 <= count <= 256 or count % 8:
        raise HazardError(f"setmaxnreg {count}: a multiple of 8 from 24 to 256 is needed", warp.place(instr))
    warp.cta.machine.stats[f"setmaxnreg.{form.get('direction')}"] += 1


@isa.service("nanosleep.u32", note="yields to the other warps; sleeping takes no emulated time")
def nanosleep(warp: Warp, instr: Instr, form: Form) -> Block | None:
    """Let the other warps run."""
    if warp.pending is None:
        warp.pending = True
        return Block("nanosleep", lambda: True)
    return None


@isa.service("trap")
def trap(warp: Warp, instr: Instr, form: Form) -> Any:
    """Stop the launch."""
    raise EmulatorError("the kernel executed trap", warp.place(instr))


@isa.service("brkpt")
def brkpt(warp: Warp, instr: Instr, form: Form) -> Any:
    """Stop the launch at a breakpoint."""
    raise EmulatorError("the kernel executed brkpt", warp.place(instr))


@isa.service("pmevent[.<mask:mask>]", note="triggers a hardware counter only")
def pmevent(warp: Warp, instr: Instr, form: Form) -> None:
    """Ignore a performance-monitor event."""
