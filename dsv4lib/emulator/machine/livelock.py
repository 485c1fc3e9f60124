"""Find kernels that wait for ever without blocking. They loop on a flag that no warp will set.

A warp that polls memory always can run, so the scheduler never runs out of warps. What it can see is that a launch
stops making progress: no arrival, completion or exit. When that has lasted, the warps are watched for a while. If every
warp that can run comes back to where it was, it is followed instruction by instruction (loops.py). If what leads each
of them around comes back to values that it had, and depends on no word of memory that any of them changes, then nothing
ever will: the loops may write and count as they like. That holds for one launch and for several that run at once and
share memory (`driver.multi_device`).

A loop with a barrier makes progress by its own arrivals. If nothing else has happened for long, the warps of each
cluster are followed side by side (rounds.py). If they go around for ever, what the policy holds back is let go first.

Loops that decide by a count, a clock or what they write are not judged; the limits of the launch end those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dsv4lib.emulator.errors import Deadlock, MemoryFault
from dsv4lib.emulator.machine.awaited import awaited
from dsv4lib.emulator.machine.interfaces import MachineView
from dsv4lib.emulator.machine.loops import Loop, Slices, endless, follow, groups_of
from dsv4lib.emulator.machine.rounds import Rounds
from dsv4lib.emulator.machine.warp import GROUP, MASK, Warp
from dsv4lib.emulator.memory.addressing import is_local, is_shared
from dsv4lib.emulator.ptx.ir import Instr, Memory

FIRST = 8  # fruitless rounds (scheduler) of every launch before the first look; then twice as many, and so on
CIRCLES = 10_000  # arrivals at barriers, and nothing else, before the first look at rounds
_SLICES = 64  # that a look lasts, for every warp that can run
_SHOWN = 16  # warps of a launch that the report names


@dataclass
class _Seen:
    """What has been seen of a warp: where its lanes were, and whether they came back."""

    executed: int
    places: set[Any] = field(default_factory=set)
    again: bool = False


class Watch:
    """Looks after one launch, or several at once, slice by slice."""

    def __init__(self) -> None:
        self._next, self._circles = FIRST, CIRCLES
        self._looking = False
        self._slices: Counter[MachineView] = Counter()
        self._warps: dict[Warp, _Seen] = {}

    @property
    def fresh(self) -> bool:
        """Tell whether it has found nothing to look at."""
        return not self._looking and self._next == FIRST

    def look(self, stepped: MachineView, running: Sequence[MachineView]) -> None:
        """Watch one of the ``running`` machines after a slice of ``stepped``.

        Raises:
            Deadlock: nothing will ever change any more.
        """
        if stepped.scheduler.circling < CIRCLES:
            self._circles = CIRCLES
        elif stepped.scheduler.circling >= self._circles:
            self._go_around(running)
        if not self._looking and stepped.scheduler.fruitless < self._next:
            return
        fruitless = min(m.scheduler.fruitless for m in running)
        if not self._looking:
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
        self._looking = True
        self._slices.clear()
        self._warps.clear()
        for machine in running:
            machine.scheduler.expire_waits()
            for warp in machine.scheduler.ready:
                self._observe(warp)

    def _close(self, following: int) -> None:
        self._looking, self._next = False, following
        self._warps.clear()

    def _observe(self, warp: Warp) -> None:
        executed = int(warp.ctx["executed"])
        seen = self._warps.get(warp)
        if seen is None:
            seen = self._warps[warp] = _Seen(-1)
        if executed == seen.executed:
            return
        seen.executed = executed
        place = groups_of(warp)
        seen.again |= place in seen.places
        seen.places.add(place)

    def _judge(self, running: Sequence[MachineView]) -> None:
        """All warps come back to where they were.

        Raises:
            Deadlock: and nothing that leads them there changes.
        """
        loops: dict[Warp, Loop] = {}
        slices = {id(m.program): Slices(m.program) for m in running}
        for warp in [w for m in running for w in list(m.scheduler.ready)]:
            loop = follow(warp, slices[id(warp.program)])
            if loop is None:
                break
            loops[warp] = loop
        else:
            if endless(loops.values()):
                if any([m.scheduler.force_stalled() for m in running]):
                    self._close(FIRST)
                    return
                raise Deadlock(report(running, loops))
        self._close(2 * max(1, min(m.scheduler.fruitless for m in running)))

    def _go_around(self, running: Sequence[MachineView]) -> None:
        """Follow every cluster around the loop that it may be in, barriers and all.

        Raises:
            Deadlock: all go around for ever, and nothing is held back.
        """
        circling = min(m.scheduler.circling for m in running)
        if circling < self._circles:
            return
        self._circles = 2 * circling
        loops: dict[Warp, Loop] = {}
        for machine in running:
            slices = Slices(machine.program)
            for cluster in [c for c in machine.clusters if not all(w.exited for cta in c.ctas for w in cta.warps)]:
                found = Rounds(cluster, slices).follow()
                if found is None:
                    return
                loops.update(found)
        if not endless(loops.values()) or any([m.scheduler.release() for m in running]):
            return
        if not any([m.scheduler.force_stalled() for m in running]):
            raise Deadlock(report(running, loops))


def report(running: Sequence[MachineView], loops: dict[Warp, Loop]) -> str:
    """List what each warp repeats, reads or waits on."""
    lines = ["deadlock: every warp that can run repeats the same loop, and nothing that it depends on changes"]
    for machine in running:
        spinning = [warp for warp in loops if warp.cta.machine is machine]
        device = "" if machine.device is None else f"device {machine.device}, "
        lines.append(f"  {device}kernel {machine.program.kernel.name}: {len(spinning)} warps spin")
        for warp in spinning[:_SHOWN]:
            place = warp.place(polled(loops[warp]))
            where = f" ({place.python})" if place.python else ""
            lines.append(f"  CTA {place.cta} warp {place.warp}: PTX line {place.ptx_line}{where}: {place.ptx}")
            lines += [f"    reads {text}" for text in values(warp, loops[warp])]
        if len(spinning) > _SHOWN:
            lines.append(f"  ... and {len(spinning) - _SHOWN} more warps")
        if any(warp not in loops for warp in machine.scheduler.blocked):
            lines += machine.scheduler.report(without=loops).splitlines()[1:]
    return "\n".join(lines)


def polled(loop: Loop) -> Instr:
    """Find what a loop waits on: a load that decides whether it goes on, else its first access or instruction."""
    code = loop.instructions
    accesses = [i for i in code if any(isinstance(operand, Memory) for operand in i.operands)]
    return [*loop.polls, *accesses, *code][0]


def values(warp: Warp, loop: Loop) -> list[str]:
    """List what the loads that decide a loop read.

    Address, value, allocation and the value that ends it, one line each.
    """
    out: list[str] = []
    words = warp.words
    mask, words[MASK] = words[MASK], words[GROUP]
    for instr in loop.polls or loop.instructions:
        memory = next((operand for operand in instr.operands if isinstance(operand, Memory)), None)
        if memory is None or ".shared" in instr.opcode or ".param" in instr.opcode:
            continue
        addresses = warp.address(memory)[warp.lanes()]
        if not len(addresses) or is_shared(addresses).any() or is_local(addresses).any():
            continue
        until = awaited(warp, loop.instructions, instr)
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
