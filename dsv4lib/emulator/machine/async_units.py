"""Queue asynchronous operations, which complete when the scheduler says so.

TMA, tensor cores, bulk copies, cp.async and tcgen05 loads run beside the warps. An `AsyncOp` is issued by a service and
does its work (reads its sources, writes, signals) in ``complete``, at a time that the scheduler chooses; nothing
happens earlier. Everything the PTX ISA leaves open between issue and completion is thereby the scheduler's choice.

Order: operations of a unit in `ORDERED` complete in issue order; all others in any order. Further constraints (a bulk
group completes after the groups before it) are the operation's ``ready``.

Source: PTX ISA, "Asynchronous Operations" (memory consistency model) and "Completion Mechanisms for Asynchronous Copy
Operations".
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsv4lib.emulator.errors import EmulatorError, Place

if TYPE_CHECKING:
    from dsv4lib.emulator.machine.cta import Cta
    from dsv4lib.emulator.machine.warp import Warp
    from dsv4lib.emulator.ptx.ir import Instr

# How the names of units begin that complete in issue order: the tensor pipe of a CTA pair executes mma,
# cp, shift and commit one after another (PTX ISA, "tcgen05: pipelined instructions").
ORDERED = ("tensor:",)

_MASK_64 = (1 << 64) - 1
_PRIME, _BASIS = 0x100000001B3, 0xCBF29CE484222325  # of FNV-1a


@dataclass(eq=False, slots=True)
class AsyncOp:
    """One asynchronous operation.

    Attributes:
        unit: "tma", "tensor:<cta pair>", "bulk:<warp>", "cp.async:<warp>", "ldst:<warp>", ...
        complete: does everything: reads the sources, writes, signals.
        label: for traces and deadlock reports, anything printable: "bulk store of 64 bytes".
        warp, instr: the issuer, None for operations that the machine starts itself.
        ready: may it complete now, beside the order of its unit? None = always. No side effects.
        start: called at issue (capture of operands), None = nothing.
        order: issue number, set by `AsyncUnits.issue`; a follow-up operation keeps the number it is given.
        reads, writes: the CTA whose shared memory is read or written; checked when that CTA exits.
        lanes: mask of the issuing lanes, set at issue; pending: issued and not complete.
        signals: the mbarrier that counts its bytes.
        clock, entry, epoch: of the race detector; clock_address: of ``clock``, 0: not looked up yet.
    """

    unit: str
    complete: Callable[[], None]
    label: Any = ""
    warp: Warp | None = None
    instr: Instr | None = None
    ready: Callable[[], bool] | None = None
    start: Callable[[], None] | None = None
    order: int = -1
    reads: Cta | None = None
    writes: Cta | None = None
    lanes: int = 0
    pending: bool = False
    signals: Any = None
    clock: Any = None
    clock_address: int = 0
    entry: int = -1
    epoch: int = 0

    @property
    def place(self) -> Place | None:
        """Find the instruction that issued it."""
        return self.where()

    def where(self) -> Place | None:
        """Find `place` on demand: it is needed only for a report."""
        if self.warp is None or self.instr is None:
            return None
        return dataclasses.replace(self.warp.place(self.instr), lanes=self.lanes)

    def __str__(self) -> str:
        issuer = f" by {self.warp}" if self.warp is not None else ""
        return f"#{self.order} {self.unit}: {self.label}{issuer}"


class AsyncUnits:
    """All pending operations of a launch.

    Attributes:
        issued, completed: counts.
        reordered: operations completed after a later-issued one.
        hash: of the order of completions and of their position between the warps' instructions, since `fold`.
        groups: async groups by (agent, kind), see units/groups.py.
        descriptors: tensor maps in global memory that were changed and not fenced yet, see units/tensormap_ops.py.
    """

    def __init__(self, machine: Any):
        self.machine = machine
        self.issued = 0
        self.completed = 0
        self.reordered = 0
        self.hash = _BASIS
        self._before = 0, 0  # operations issued, and time, when nothing was in flight for the last time
        self.groups: dict[tuple[int, str], Any] = {}
        self.descriptors: dict[int, str] = {}
        self._latest = -1  # highest issue number that has completed
        self._queues: dict[str, dict[int, AsyncOp]] = {}
        self._mixed: set[str] = set()  # units whose queue is not in order of age: a follow-up is older than its place

    def __len__(self) -> int:
        return self.issued - self.completed

    def __iter__(self) -> Iterator[AsyncOp]:
        """Go through pending operations, oldest first."""
        return iter(sorted((op for queue in self._queues.values() for op in queue.values()), key=_order))

    def issue(self, op: AsyncOp) -> AsyncOp:
        """Queue an operation.

        An operation that already has an ``order`` is the follow-up of a completed one (a store's write after its
        read): it keeps its age.
        """
        if op.order < 0:
            op.order = self.issued + 1
        else:
            self._mixed.add(op.unit)
        if op.warp is not None and not op.lanes:
            op.lanes = op.warp.mask()
        self.issued += 1
        queue = self._queues.setdefault(op.unit, {})
        if op.order in queue:
            raise EmulatorError(f"operation {op} is queued already", op.place)
        queue[op.order] = op
        op.pending = True
        if self.machine.trace is not None:
            self.machine.trace.issued(op)
        if self.machine.race is not None:
            self.machine.race.issued(op)
        if op.start is not None:
            op.start()
        return op

    def candidates(self) -> list[AsyncOp]:
        """List operations that may complete now, oldest first."""
        found: list[AsyncOp] = []
        for unit, queue in self._queues.items():
            if unit.startswith(ORDERED):
                head = next(iter(queue.values()))
                if head.ready is None or head.ready():
                    found.append(head)
            else:
                found += [op for op in queue.values() if op.ready is None or op.ready()]
        found.sort(key=_order)
        return found

    def oldest(self) -> list[AsyncOp]:
        """List each unit's oldest operation that may complete now, oldest first."""
        found: list[AsyncOp] = []
        for unit, queue in self._queues.items():
            operations = self.pending(unit) if unit in self._mixed else queue.values()
            for op in operations:
                if op.ready is None or op.ready():
                    found.append(op)
                    break
                if unit.startswith(ORDERED):
                    break
        found.sort(key=_order)
        return found

    def pending(self, unit: str) -> list[AsyncOp]:
        """List pending operations of one unit, oldest first."""
        return sorted(self._queues.get(unit, {}).values(), key=_order)

    def complete(self, op: AsyncOp) -> None:
        """Let one operation happen.

        Raises:
            EmulatorError: it is not pending, or what it did wrong, with the place of the instruction that issued it.
        """
        queue = self._queues.get(op.unit, {})
        if queue.get(op.order) is not op:
            raise EmulatorError(f"operation {op} is not pending", op.place)
        del queue[op.order]
        if not queue:  # units of warps come and go: only those with work are kept
            del self._queues[op.unit]
            self._mixed.discard(op.unit)
        self.completed += 1
        op.pending = False
        if op.order < self._latest:
            self.reordered += 1
        else:
            self._latest = op.order
        issued, time = self._before
        for value in (op.order - issued, _code(op.unit), self.machine.time - time):
            self.hash = ((self.hash ^ value) * _PRIME) & _MASK_64
        trace, race = self.machine.trace, self.machine.race
        if race is not None:
            outer, race.op = race.op, op
        if trace is not None:
            trace.completing(op)
        try:
            op.complete()
        except EmulatorError as error:
            if error.place is not None:
                raise
            raise type(error)(str(error), op.place) from error
        if trace is not None:
            trace.completed()
        if race is not None:
            race.op = outer
        self.machine.changed()

    def fold(self) -> int:
        """Begin the hash anew while nothing is in flight; return what it was."""
        value, self.hash = self.hash, _BASIS
        self._before = self.issued, self.machine.time
        return value

    def absorb(self, issued: int, reordered: int) -> None:
        """Count operations that have been issued and completed elsewhere, while nothing is in flight here."""
        self.issued += issued
        self.completed += issued
        self.reordered += reordered
        self._latest = max(self._latest, self.issued)
        self._before = self.issued, self.machine.time

    def drain(self, choose: Callable[[list[AsyncOp]], AsyncOp] | None = None) -> None:
        """Complete everything, oldest first or as ``choose`` picks from the candidates.

        Raises:
            EmulatorError: operations are left that can never complete.
        """
        while len(self):
            candidates = self.candidates()
            if not candidates:
                raise EmulatorError("asynchronous operations cannot complete: " + "; ".join(map(str, self)))
            self.complete(choose(candidates) if choose else candidates[0])

    def cta_exited(self, cta: Cta) -> None:
        """Report what is in flight into the shared memory of a CTA that has exited.

        A pending write into it is an error; a pending read (a bulk store without a wait) is reported as its own
        kind, because hardware keeps the memory until bulk reads are done in practice, but nothing promises that.
        """
        for warp in cta.warps:
            for kind in ("bulk", "cp.async"):
                self.groups.pop((warp.agent, kind), None)
        for op in self:
            if op.writes is cta:
                self.machine.report(
                    "async_write_after_exit",
                    f"{cta} exited while {op.label} into its shared memory was in flight",
                    op.place,
                )
            elif op.reads is cta:
                self.machine.report(
                    "async_read_after_exit",
                    f"{cta} exited while {op.label} was still reading its shared memory: wait_group is missing",
                    op.place,
                )


@functools.lru_cache(1 << 12)
def _code(unit: str) -> int:
    """A number for a unit, the same in every process."""
    return zlib.crc32(unit.encode())


def _order(op: AsyncOp) -> int:
    return op.order
