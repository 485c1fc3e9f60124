"""Find kernels that wait for ever without blocking. They loop on a flag that no warp will set.

A warp that polls memory always can run, so the scheduler never runs out of warps. What it can see is that a launch
stops making progress: no arrival, completion or exit. When that has lasted, the warps are watched for a while. If every
warp that can run comes back to a state that it was in (program counter, lanes, registers, local memory), it is followed
instruction by instruction once around. If all do that with loads and compares alone, or with stores and atomics that
leave every byte as it is (an exchange of the value that is there, an addition of 0), and no byte of shared or global
memory has changed, then nothing ever will: what a warp does next depends on nothing else. That holds for one launch and
for several that run at once and share memory (`driver.multi_device`).

Loops that count, read a clock or change memory are not judged; the limits of the launch end those.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dsv4lib.emulator.errors import Deadlock, MemoryFault
from dsv4lib.emulator.machine.awaited import awaited
from dsv4lib.emulator.machine.interfaces import MachineView
from dsv4lib.emulator.machine.warp import GROUP, GROUP_MASK, GROUP_PC, GROUPS, MASK, PC, Warp
from dsv4lib.emulator.memory.addressing import is_local, is_shared
from dsv4lib.emulator.ptx.ir import Instr, Memory

FIRST = 8  # fruitless rounds (scheduler) of every launch before the first look; then twice as many, and so on
_SLICES = 64  # that a look lasts, for every warp that can run
_LONGEST = 20_000  # instructions of a loop
SLEEPS = "nanosleep"  # reason of a wait that ends by itself
_SHOWN = 16  # warps of a launch that the report names
# Loops of these and of instructions without a memory operand leave memory as it is. A compare-and-swap that succeeds
# changes it, which the comparison of memory shows.
_HARMLESS = ("ld", "ldu", "atom", "mbarrier", "multimem", "prefetch")
_MAY_BE_SILENT = ("st", "atom", "red")  # compared with memory before them
_COMPARED = 2 << 30  # bytes at most that are compared for the writes of one look's loops
_HARMLESS_WITH = {"atom": ("cas",), "mbarrier": ("test_wait", "try_wait"), "multimem": ("ld_reduce",)}


@dataclass
class _Seen:
    """What has been seen of a warp: its states, and whether one came back."""

    executed: int
    states: set[int] = field(default_factory=set)
    again: bool = False


class Watch:
    """Looks after one launch, or several at once, slice by slice."""

    def __init__(self) -> None:
        self._next = FIRST
        self._memory: int | None = None  # while a look lasts
        self._slices: Counter[MachineView] = Counter()
        self._warps: dict[Warp, _Seen] = {}

    def look(self, stepped: MachineView, running: Sequence[MachineView]) -> None:
        """Watch one of the ``running`` machines after a slice of ``stepped``.

        Raises:
            Deadlock: nothing will ever change any more.
        """
        if self._memory is None and stepped.scheduler.fruitless < self._next:
            return
        fruitless = min(m.scheduler.fruitless for m in running)
        if self._memory is None:
            if fruitless >= self._next:
                self._open(running)
            return
        if fruitless == 0:
            self._close(FIRST)
            return
        ready = [w for m in running for w in m.scheduler.ready]
        for warp in stepped.scheduler.ready:
            self._observe(warp)
        self._slices[stepped] += 1
        if all((seen := self._warps.get(w)) is not None and seen.again for w in ready):
            self._judge(running)
        elif all(self._slices[m] > _SLICES * max(1, len(m.scheduler.ready)) for m in running):
            self._close(2 * fruitless)

    def _open(self, running: Sequence[MachineView]) -> None:
        self._memory = memory_of(running)
        self._slices.clear()
        self._warps.clear()
        for machine in running:
            machine.scheduler.expire_waits()
            for warp in machine.scheduler.ready:
                self._observe(warp)

    def _close(self, following: int) -> None:
        self._memory, self._next = None, following
        self._warps.clear()

    def _observe(self, warp: Warp) -> None:
        executed = int(warp.ctx["executed"])
        seen = self._warps.get(warp)
        if seen is None:
            seen = self._warps[warp] = _Seen(-1)
        if executed == seen.executed:
            return
        seen.executed = executed
        state = state_of(warp)
        seen.again |= state in seen.states
        seen.states.add(state)

    def _judge(self, running: Sequence[MachineView]) -> None:
        """All warps repeat themselves.

        Raises:
            Deadlock: and memory is as it was.
        """
        silence = _Silence(running)
        loops = {warp: loop_of(warp, silence) for machine in running for warp in list(machine.scheduler.ready)}
        if not all(loops.values()) or memory_of(running) != self._memory:
            self._close(2 * min(m.scheduler.fruitless for m in running))
        elif any([m.scheduler.force_stalled() for m in running]):
            self._close(FIRST)
        else:
            raise Deadlock(report(running, loops))


def memory_of(machines: Iterable[MachineView]) -> int:
    """Hash all memory that kernels can change. It is global, and shared of the resident CTAs."""
    total, known = 0, set()
    for machine in machines:
        for allocation in machine.gmem:
            if allocation.writable and allocation.start not in known:
                known.add(allocation.start)
                total = zlib.crc32(machine.gmem.view(allocation.start, allocation.nbytes), total)
        for cluster in machine.clusters:
            for cta in cluster.ctas:
                total = zlib.crc32(cta.smem.data, total)
    return total


def state_of(warp: Warp) -> int:
    """Hash everything but memory that decides what a warp does next."""
    words = warp.words
    n = words[GROUPS]
    pcs, masks = words[GROUP_PC : GROUP_PC + n].tolist(), words[GROUP_MASK : GROUP_MASK + n].tolist()
    groups = tuple(sorted(zip((words[PC], *pcs), (words[GROUP], *masks), strict=True)))
    files, local, *_ = warp.cta.storage
    mine = np.array_split(local, len(warp.cta.warps))[warp.warp_id] if warp.program.local_bytes else local[:0]
    return hash((groups, files[warp.warp_id].tobytes(), mine.tobytes()))


class _Silence:
    """Whether instructions of loops leave the memory of these machines as it is."""

    def __init__(self, running: Sequence[MachineView]) -> None:
        self._running = running
        self._left = _COMPARED

    def broken_by(self, warp: Warp) -> bool:
        """Run the next instruction of ``warp``; True if it changed memory, or may yet do so."""
        scheduler, instr = warp.cta.machine.scheduler, warp.program.instruction(warp.words[PC])
        if _harmless(instr):
            scheduler.single_step(warp)
            return False
        if instr.opcode.partition(".")[0] not in _MAY_BE_SILENT or ".async" in instr.opcode or self._left <= 0:
            return True
        self._left -= 2 * sum(a.nbytes for m in self._running for a in m.gmem if a.writable)
        before = memory_of(self._running)
        scheduler.single_step(warp)
        return memory_of(self._running) != before


def loop_of(warp: Warp, silence: _Silence) -> list[Instr]:
    """List the instructions that bring a warp back to its present state.

    [] if it waits, exits or changes memory on the way, or takes too many.
    """
    start = state_of(warp)
    pcs: set[int] = set()
    for _ in range(_LONGEST):
        pcs.add(warp.words[PC])
        if silence.broken_by(warp) or warp.exited:
            return []
        if warp.block is not None:
            waits = [parked.block for parked in warp.parked] or [warp.block]  # of the lane groups
            if all(block.reason != SLEEPS for block in waits):
                return []
            warp.cta.machine.scheduler.wake()  # a sleep in a loop ends, whatever happens
        if state_of(warp) == start:
            return [warp.program.instruction(i) for i in sorted(pcs)]
    return []


def _harmless(instr: Instr) -> bool:
    """Whether an instruction leaves memory as it is."""
    if not any(isinstance(operand, Memory) for operand in instr.operands):
        return True
    base, *modifiers = instr.opcode.split(".")
    return base in _HARMLESS and (base not in _HARMLESS_WITH or any(m in modifiers for m in _HARMLESS_WITH[base]))


def report(running: Sequence[MachineView], loops: dict[Warp, list[Instr]]) -> str:
    """List what each warp repeats, reads or waits on."""
    lines = ["deadlock: every warp that can run repeats the same loop, and no memory changes"]
    for machine in running:
        spinning = machine.scheduler.ready
        device = "" if machine.device is None else f"device {machine.device}, "
        lines.append(f"  {device}kernel {machine.program.kernel.name}: {len(spinning)} warps spin")
        for warp in spinning[:_SHOWN]:
            place = warp.place(polled(loops[warp]))
            where = f" ({place.python})" if place.python else ""
            lines.append(f"  CTA {place.cta} warp {place.warp}: PTX line {place.ptx_line}{where}: {place.ptx}")
            lines += [f"    reads {text}" for text in values(warp, loops[warp])]
        if len(spinning) > _SHOWN:
            lines.append(f"  ... and {len(spinning) - _SHOWN} more warps")
        if machine.scheduler.blocked:
            lines += machine.scheduler.report().splitlines()[1:]
    return "\n".join(lines)


def polled(loop: Sequence[Instr]) -> Instr:
    """Find the load of a loop, else its first instruction."""
    return next((i for i in loop if any(isinstance(operand, Memory) for operand in i.operands)), loop[0])


def values(warp: Warp, loop: Sequence[Instr]) -> list[str]:
    """List what the loads of a loop read: address, value, allocation, the value that ends it; one line each."""
    out: list[str] = []
    words = warp.words
    mask, words[MASK] = words[MASK], words[GROUP]
    for instr in loop:
        memory = next((operand for operand in instr.operands if isinstance(operand, Memory)), None)
        if memory is None or ".shared" in instr.opcode or ".param" in instr.opcode:
            continue
        addresses = warp.address(memory)[warp.lanes()]
        if not len(addresses) or is_shared(addresses).any() or is_local(addresses).any():
            continue
        until = awaited(warp, loop, instr)
        text = _value(warp.cta.machine, int(addresses[0]), 8 if instr.opcode.endswith("64") else 4)
        text += f"; waits {until}" if until else ""
        if text not in out:
            out.append(text)
    words[MASK] = mask
    return out


def _value(machine: MachineView, address: int, nbytes: int) -> str:
    try:
        value = int.from_bytes(machine.gmem.view(address, nbytes).tobytes(), "little")
    except MemoryFault:
        return f"{address:#x}"
    allocation = machine.gmem.find(address)
    return f"{address:#x} = {value:#x}, byte {address - allocation.start} of {allocation.label}"
