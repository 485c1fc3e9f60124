"""Implement mbarrier objects: phases, pending arrivals and transaction bytes.

A barrier's 64 bits in shared memory are opaque. The state is kept beside them; while a barrier is live its bytes count
as *not written*, so a generic load of them is reported like any uninitialised read, and a store (which marks bytes as
written) is noticed at the next operation on the barrier.

Waiting: ``try_wait`` suspends the warp. It resumes when the phase completes or, as on hardware, when time is up
(`Suspension.expire`), and then answers False. ``test_wait`` never suspends.

Source: PTX ISA, "mbarrier" (9.7.14.16 in version 9.3), layout v0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dsv4lib.emulator import isa
from dsv4lib.emulator.checks import flags
from dsv4lib.emulator.errors import HazardError, Place, UnsupportedInstruction
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.machine.cta import CTA_EXITED
from dsv4lib.emulator.machine.warp import Block, Warp
from dsv4lib.emulator.memory.addressing import OFFSET_MASK, RANK_SHIFT, shared_address
from dsv4lib.emulator.native.abi import FULL_MASK, LANES
from dsv4lib.emulator.ptx.ir import Instr, Memory, Operand, Pair, Sink
from dsv4lib.emulator.units.shared import (
    Where,
    agreed_address,
    lane_array,
    lane_groups,
    lane_list,
    locate,
    shared_addresses,
)

if TYPE_CHECKING:
    from dsv4lib.emulator.machine.cta import Cluster, Cta

MAX_COUNT = (1 << 20) - 1  # of arrivals; also the limit of |transaction count|
NBYTES = 8
PHASE_SHIFT = 32  # of the opaque state: phase << 32 | pending count before the arrival

# A suspended try_wait gives up after this many warp-instructions of the whole machine ("system-dependent time limit").
TIME_LIMIT = 200_000


class MBarrier:
    """One barrier object.

    Attributes:
        cta, offset: where it lies; expected: arrivals a phase; pending: arrivals still missing in this phase.
        tx: bytes expected minus bytes completed; phase: number of the current, incomplete phase.
        waiters: suspended waits; sync, origin: clocks of the race detector.
    """

    __slots__ = (
        "_written",
        "cta",
        "expected",
        "offset",
        "origin",
        "pending",
        "phase",
        "place",
        "sync",
        "tx",
        "waiters",
    )

    def __init__(self, cta: Cta, offset: int, count: int, place: Place | None = None):
        self.cta, self.offset, self.place = cta, offset, place
        self.expected = self.pending = count
        self.tx = 0
        self.phase = 0
        self.waiters: set[Any] = set()
        self.sync: Any = None
        self.origin: Any = None
        self._written = memoryview(cta.smem.init[offset : offset + NBYTES].view(np.uint64))
        self._written[0] = 0
        cta.smem.written.clear()

    @property
    def name(self) -> str:
        """Name the barrier with its shared address."""
        return f"mbarrier {shared_address(self.cta.rank, self.offset):#x}"

    def __str__(self) -> str:
        return (
            f"{self.name}: phase {self.phase}, "
            f"{self.expected - self.pending} of {self.expected} arrived, {self.tx} bytes outstanding"
        )

    def arrive(self, count: int, where: Where, expect: int = 0, drop: bool = False, relaxed: int | None = None) -> int:
        """Expect bytes and arrive ``count`` times, in one step. Returns the opaque state before it.

        ``drop`` lowers the expected count of this and all later phases as well; ``relaxed``: see `Order.arrived`.
        """
        state = self.phase << PHASE_SHIFT | self.pending
        if expect:
            self.tx += expect
            self._check_tx(where)
        if drop:
            self.expected = max(self.expected - count, 0)
        if count > self.pending:
            self.report("mbarrier_over_arrival", f"{count} more arrivals, but {self.pending} are pending", where)
            count = self.pending
        self.pending -= count
        if self.cta.machine.race is not None:
            self.cta.machine.race.arrived(self, relaxed)
        self._advance()
        return state

    def add_pending(self, count: int, where: Where) -> None:
        """Raise the pending count of this phase. ``cp.async.mbarrier.arrive`` without noinc pays for its arrivals."""
        self.pending += count
        if self.pending > MAX_COUNT:
            self.report("mbarrier_count_overflow", f"the pending count exceeds {MAX_COUNT}", where)

    def expect_tx(self, nbytes: int, where: Where) -> None:
        """Expect more bytes in this phase."""
        self.tx += nbytes
        self._check_tx(where)
        self._advance()

    def complete_tx(self, nbytes: int, where: Where) -> None:
        """Count bytes that have arrived."""
        self.tx -= nbytes
        if self.cta.machine.race is not None:
            self.cta.machine.race.delivered(self)
        self._check_tx(where)
        self._advance()

    def completed(self, parity: int) -> bool:
        """Tell whether the phase of this parity, current or just before, is complete."""
        return (self.phase ^ parity) & 1 == 1

    def waited(self) -> bool:
        """Tell whether a warp is waiting for a phase."""
        return any(wait.goes_on() for wait in self.waiters)

    def _advance(self) -> None:
        machine = self.cta.machine
        if machine.trace is not None:
            machine.trace.mbarrier(self)
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.expected
            if self.sync is not None:
                self.sync.complete()
            for wait in self.waiters:
                wait.passed(self)
            machine.changed()

    def _check_tx(self, where: Where) -> None:
        if abs(self.tx) > MAX_COUNT:
            self.report("mbarrier_tx_overflow", f"the transaction count leaves +-{MAX_COUNT}", where)

    def check_image(self, where: Where) -> None:
        """Report a store over the barrier since the last look."""
        if self._written[0]:
            race = self.cta.machine.race
            owner = None if race is None else race.writer_at(self.cta, self.offset >> 2, 2)
            text = "its memory was written by something that is no mbarrier"
            self.report("mbarrier_overwritten", text, where, owner)
            self._written[0] = 0
            self.cta.smem.written.clear()

    def same_init(self, warp: Warp, instr: Instr, count: int) -> bool:
        """Tell whether other lanes of the warp did this, and the barrier is unused since."""
        place = self.place
        same = place is not None and (place.ptx_line, place.warp) == (instr.line, warp.warp_id)
        unused = self.phase == 0 and self.expected == self.pending == count and not self.tx and not self.waited()
        return same and unused and self.cta is warp.cta

    def report(self, kind: str, message: str, where: Where, owner: Place | None = None) -> None:
        """Report a hazard of this barrier against ``owner``.

        By default its initialisation.
        """
        facts = {"barrier": self.offset, "cta": self.cta.ctaid}
        self.cta.machine.report(kind, f"{message} ({self})", where(), owner=owner or self.place, **facts)


@dataclass(frozen=True)
class Suspension(Block):
    """A `Block` that may end early. ``expire()`` makes ``ready`` true and the wait answer False.

    The scheduler calls ``expire`` when nothing else can happen, before it declares a deadlock: a suspended ``try_wait``
    resumes after a time limit even if its phase is not complete, so kernels may poll. ``deadline`` is the logical time
    (`Machine.time`) after which it resumes by itself, for machines that are kept busy by other warps. ``barrier`` is
    the shared address of the (first) mbarrier, for traces.
    """

    expire: Callable[[], None] = lambda: None
    deadline: int = 0
    barrier: int = -1


def find(cluster: Cluster, address: int, where: Where) -> MBarrier:
    """Find the live barrier at a shared address.

    Raises:
        MemoryFault: outside shared memory or misaligned.
        HazardError: there is none.
    """
    rank, offset = address >> RANK_SHIFT, address & OFFSET_MASK
    barrier = cluster.ctas[rank].mbarriers.get(offset) if rank < len(cluster.ctas) else None
    if barrier is None:
        cta, offset = locate(cluster, address, NBYTES, where, align=NBYTES)
        known = ", ".join(f"{o:#x}" for o in sorted(cta.mbarriers)[:8]) or "none"
        raise HazardError(
            f"no mbarrier was initialised at {shared_address(cta.rank, offset):#x} of {cta} (live ones: {known})",
            where(),
        )
    barrier.check_image(where)
    if barrier.cta.machine.race is not None:
        barrier.cta.machine.race.used(barrier, where)
    return barrier


def _groups(
    warp: Warp, memory: Memory, operand: Operand | None, width: int, form: Form
) -> list[tuple[np.ndarray, tuple[int, int]]]:
    """Lanes, shared address and amount (``operand`` of ``width`` bytes; 1 if None) of each distinct request."""
    address, amount = agreed_address(warp, memory, form), 1 if operand is None else warp.agreed(operand, width)
    if address is not None and amount is not None:
        return [(lane_array(warp.mask()), (address, amount))]
    addresses = shared_addresses(warp, memory, form)
    amounts = np.ones(LANES, np.uint32) if operand is None else warp.read(operand, f"<u{width}")
    return lane_groups(warp.mask(), addresses, amounts)


@functools.cache
def _before(count: int, lanes: int) -> np.ndarray:
    """uint64[lanes]: how many arrivals come before each lane's, if each arrives ``count`` times."""
    return np.arange(0, count * lanes, count, dtype=np.uint64)


def check_exit(cta: Cta) -> None:
    """Report barriers of an exiting CTA that expect bytes or got unexpected bytes."""
    for barrier in cta.mbarriers.values():
        barrier.check_image(lambda: None)
        if barrier.tx:
            kind = "mbarrier_tx_leftover" if barrier.tx > 0 else "mbarrier_tx_unexpected"
            cta.machine.report(kind, f"at exit of {cta}: {barrier}", barrier.place)


CTA_EXITED.append(check_exit)


def _check_count(count: int, where: Where) -> None:
    if not 1 <= count <= MAX_COUNT:
        raise HazardError(f"arrival count {count} must be in [1, {MAX_COUNT}]", where())


@isa.service("mbarrier.init[.layout::v0][.<space:shared|shared::cta>].b64", note="layout v0 only")
def init(warp: Warp, instr: Instr, form: Form) -> None:
    """``mbarrier.init [addr], count``. Lanes that give one barrier the same count initialise it once.

    That holds for the lanes of a warp that reach the instruction one group after the other, too.
    """
    memory, count = instr.operands
    addresses, counts = shared_addresses(warp, memory, form), warp.read(count, np.uint32)
    where = warp.place
    first = {(int(addresses[lane]), int(counts[lane])): lane for lane in reversed(lane_list(warp.mask()))}
    for lane in sorted(first.values()):
        cta, offset = locate(warp.cta.cluster, int(addresses[lane]), NBYTES, where, align=NBYTES)
        if cta is not warp.cta:
            raise HazardError("mbarrier.init of a barrier in another CTA", where())
        _check_count(int(counts[lane]), where)
        old = cta.mbarriers.get(offset)
        if old is not None and old.same_init(warp, instr, int(counts[lane])):
            continue
        if old is not None:
            waited = ", which warps are waiting on," if old.waited() else ""
            kind = "mbarrier_reinit_waited" if old.waited() else "mbarrier_reinit"
            cta.machine.report(kind, f"init of a live barrier{waited} without mbarrier.inval ({old})", where())
        cta.mbarriers[offset] = MBarrier(cta, offset, int(counts[lane]), where())
        if cta.machine.race is not None:
            cta.machine.race.initialised(cta.mbarriers[offset])
    warp.cta.machine.changed()


@isa.service("mbarrier.inval[.<space:shared|shared::cta>].b64")
def inval(warp: Warp, instr: Instr, form: Form) -> None:
    """``mbarrier.inval [addr]``."""
    addresses = shared_addresses(warp, instr.operands[0], form)
    for lane in lane_list(warp.mask()):
        barrier = find(warp.cta.cluster, int(addresses[lane]), warp.place)
        if barrier.cta is not warp.cta:
            raise HazardError("mbarrier.inval of a barrier in another CTA", warp.place())
        if barrier.waited() or barrier.tx:
            barrier.report("mbarrier_inval_in_use", "invalidated while it is in use", warp.place)
        del barrier.cta.mbarriers[barrier.offset]


@isa.service(
    "mbarrier.<op:expect_tx|complete_tx>[.<sem:relaxed>.<scope:cta|cluster>]"
    "[.<space:shared|shared::cta|shared::cluster>].b64",
)
def transactions(warp: Warp, instr: Instr, form: Form) -> None:
    """``mbarrier.expect_tx`` and ``mbarrier.complete_tx [addr], txCount``."""
    memory, amount = instr.operands
    addresses, amounts = shared_addresses(warp, memory, form), warp.read(amount, np.uint32)
    for lane in lane_list(warp.mask()):
        barrier = find(warp.cta.cluster, int(addresses[lane]), warp.place)
        update = barrier.complete_tx if form.get("op") == "complete_tx" else barrier.expect_tx
        update(int(amounts[lane]), warp.place)


_SEM = "[.<sem:release|relaxed>.<scope:cta|cluster>]"
_SPACE = "[.<space:shared|shared::cta|shared::cluster>]"
_OWN = "[.<space:shared|shared::cta>]"


def _relaxed(warp: Warp, barrier: MBarrier, form: Form) -> int | None:
    """How far a fence must reach for an arrival to release what is before it; None: the arrival does so itself.

    A scope that names the CTA leaves out the waiters of another one, release or not. Without a scope that is not held
    against a kernel, although it defaults to the CTA: shipped kernels arrive at their peers like that.
    """
    peer = barrier.cta is not warp.cta
    if peer and form.get("scope") == "cta":
        return flags.NEVER
    if form.get("sem") != "relaxed":
        return None
    return flags.CLUSTER if peer else flags.CTA


@isa.service(
    f"mbarrier.<op:arrive|arrive_drop>[.<expect:expect_tx>]{_SEM}{_SPACE}.b64",
    f"mbarrier.<op:arrive|arrive_drop>.<nocomplete:noComplete>[.<sem:release>.<scope:cta>]{_OWN}.b64",
)
def arrive(warp: Warp, instr: Instr, form: Form) -> None:
    """Arrive at an mbarrier.

    ``mbarrier.arrive{_drop} state, [addr]{, count}`` and ``.expect_tx state, [addr], txCount``.
    """
    target, memory, *rest = instr.operands
    where, wanted = warp.place, not isinstance(target, Sink)
    states = np.zeros(LANES, np.uint64) if wanted else None
    for members, (address, amount) in _groups(warp, memory, rest[0] if rest else None, 4, form):
        barrier = find(warp.cta.cluster, address, where)
        if barrier.cta is not warp.cta and wanted:
            raise HazardError("an arrive on another CTA's barrier returns no state: the destination must be _", where())
        expected = amount if form.has("expect") else 0
        count = 1 if form.has("expect") else amount
        _check_count(count, where)
        drop, relaxed = form.get("op") == "arrive_drop", _relaxed(warp, barrier, form)
        arrivals = len(members) * count
        if arrivals <= barrier.pending and not expected and not form.has("nocomplete"):  # one phase for all: no loop
            if wanted:
                states[members] = np.uint64(barrier.phase << PHASE_SHIFT | barrier.pending) - _before(
                    count, len(members)
                )
            barrier.arrive(arrivals, where, drop=drop, relaxed=relaxed)
            continue
        for lane in members:
            if form.has("nocomplete") and count >= barrier.pending and barrier.tx == 0:
                barrier.report("mbarrier_no_complete", f"arrive.noComplete of {count} completes the phase", where)
            state = barrier.arrive(count, where, expected, drop, relaxed)
            if wanted:
                states[lane] = state
    if wanted:
        warp.write(target, states)


@isa.service("mbarrier.pending_count[.layout::v0].b64")
def pending_count(warp: Warp, instr: Instr, form: Form) -> None:
    """``mbarrier.pending_count count, state``."""
    target, state = instr.operands
    warp.write(target, (warp.read(state, np.uint64) & np.uint64(MAX_COUNT)).astype(np.uint32))


@isa.service("mbarrier.check_layout.<layout:layout::v0|layout::v1>[.<space:shared::cta>].b64")
def check_layout(warp: Warp, instr: Instr, form: Form) -> None:
    """``mbarrier.check_layout p, [addr]``: every barrier here has layout v0."""
    target, memory = instr.operands
    addresses = shared_addresses(warp, memory, form)
    for lane in lane_list(warp.mask()):
        find(warp.cta.cluster, int(addresses[lane]), warp.place)
    warp.write(target, form.get("layout") == "layout::v0")


class WaitGroup(NamedTuple):
    """Lanes (int64) that wait for one phase of one barrier."""

    lanes: np.ndarray
    barrier: MBarrier
    parity: int


class Wait:
    """State of a wait: which phase of which barrier each group of lanes waits for."""

    __slots__ = ("deadline", "expired", "groups", "machine", "phases", "warp")

    def __init__(self, warp: Warp, groups: list[WaitGroup]):
        machine = warp.cta.machine
        self.machine, self.groups, self.warp = machine, groups, warp
        self.phases = [barrier.phase for _, barrier, _ in groups]
        self.expired = False
        self.deadline = machine.time + TIME_LIMIT

    def complete(self) -> bool:
        """Tell whether any of the phases is complete."""
        for _, barrier, parity in self.groups:
            if (barrier.phase ^ parity) & 1:
                return True
        return False

    def ready(self) -> bool:
        """Tell whether any phase is complete or time is up."""
        return self.complete() or self.expired or self.machine.time >= self.deadline

    def passed(self, barrier: MBarrier) -> None:
        """Report a wait whose barrier has completed the phase after its own too."""
        for (_, mine, parity), phase in zip(self.groups, self.phases, strict=True):
            if mine is barrier and barrier.phase == phase + 2 and self.goes_on():
                text = f"a wait for parity {parity} has not seen its phase, and the next one is complete too"
                barrier.report("mbarrier_phase_lapped", text, self.warp.place)

    def goes_on(self) -> bool:
        """Tell whether the warp resumes it. Of lane groups that merge at a wait only one's state goes on."""
        warp = self.warp
        return self in (warp.pending, *warp.resume.values(), *(p.pending for p in warp.parked))

    def expire(self) -> None:
        """Time is up."""
        self.expired = True

    def detail(self) -> str:
        """Say what the wait is for, for deadlock reports."""
        return "; ".join(f"parity {parity} of {barrier}" for _, barrier, parity in self.groups)

    def suspend(self) -> Suspension:
        """Register with the barriers."""
        for _, barrier, _ in self.groups:
            barrier.waiters.add(self)
        first = self.groups[0][1]
        address = shared_address(first.cta.rank, first.offset)
        return Suspension("mbarrier", self.ready, self.detail, self.expire, self.deadline, address)

    def answer(self) -> int:
        """Make the mask of the lanes whose phase is complete; the wait is over."""
        done = 0
        for members, barrier, parity in self.groups:
            barrier.waiters.discard(self)
            if barrier.completed(parity):
                done |= sum(1 << lane for lane in members.tolist()) if len(self.groups) > 1 else FULL_MASK
        return done


def _parity(barrier: MBarrier, value: int, by_parity: bool, where: Where) -> int:
    """Parity of the phase that a wait names.

    A parity is its lowest bit, whatever is above: measured on an H200 (0 to 5, 0x80000000, 0xffffffff). The ISA allows
    0 and 1 alone, so more is reported.

    Raises:
        HazardError: a state that is no longer valid.
    """
    if by_parity:
        if value > 1:
            barrier.report("mbarrier_parity_range", f"a wait for phase parity {value}", where)
        return value & 1
    phase = value >> PHASE_SHIFT
    if phase not in (barrier.phase, barrier.phase - 1):
        raise HazardError(f"the state is of phase {phase}, neither the current nor the one before ({barrier})", where())
    return phase & 1


@isa.service(
    f"mbarrier.<op:test_wait|try_wait>[.<parity:parity>][.phase_type::primary]"
    f"[.<sem:acquire|relaxed>.<scope:cta|cluster>]{_OWN}.b64",
    note="a suspended try_wait resumes when its phase completes or nothing else can happen; the time hint is not used",
)
def wait(warp: Warp, instr: Instr, form: Form) -> Block | None:
    """Wait for an mbarrier's phase.

    ``mbarrier.{test,try}_wait{.parity} waitComplete, [addr], state or phaseParity {, timeHint}``.

    A try_wait of lanes that name different phases resumes with the first of them.
    """
    target, memory, wanted, *_ = instr.operands
    query = warp.pending
    if query is None:
        if isinstance(target, Pair):
            raise UnsupportedInstruction("mbarrier payload reports (layout v1) are not implemented", warp.place())
        query = _query(warp, memory, wanted, form)
        if form.get("op") == "try_wait" and not query.complete():
            warp.pending = query
            return query.suspend()
    elif not query.ready():
        return query.suspend()
    warp.pending = None
    answer = query.answer()
    race = warp.cta.machine.race
    if race is not None:
        for members, barrier, _ in query.groups:
            if answer >> int(members[0]) & 1:
                race.acquired(warp, barrier, form.get("sem") == "relaxed")
                race.looked(warp, barrier)
    warp.decide(target, answer)
    return None


def _query(warp: Warp, memory: Memory, wanted: Operand, form: Form) -> Wait:
    """Look up the phases that the lanes of a wait name."""
    by_parity = form.has("parity")
    groups = []
    for members, (address, value) in _groups(warp, memory, wanted, 4 if by_parity else 8, form):
        barrier = find(warp.cta.cluster, address, warp.place)
        if barrier.cta is not warp.cta:
            raise HazardError(f"wait on a barrier of another CTA ({barrier})", warp.place())
        groups.append(WaitGroup(members, barrier, _parity(barrier, value, by_parity, warp.place)))
    return Wait(warp, groups)
