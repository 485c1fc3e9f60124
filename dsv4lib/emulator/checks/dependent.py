"""Find what a programmatic dependent launch touches before its wait.

It has to wait for the launch in front of it.

Such a launch may start while the one before it on its stream still runs; ``griddepcontrol.wait`` returns when that one
has ended and its writes can be seen. Launches here run one after the other, so the numbers come out right whatever a
kernel does. But the race detector knows which words the launch before wrote and read, and its clocks say whether an
access is ordered after a wait: of the warp itself, or of another one through barriers.

The launch before the last counts too where the last one let its dependents come before it had waited itself.

What this cannot know: whether the host, or a torch operation, did something between the two launches (a launch that
follows it does not overlap the kernel before); a synchronisation is known. So the finding is a lint. Clusters that
learn of a wait of another cluster count as not having waited.

Source: PTX ISA, "griddepcontrol"; CUDA programming guide, "Programmatic Dependent Launch".
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4lib.emulator.checks.clocks import CARRIED, Clocks
from dsv4lib.emulator.native import abi
from dsv4lib.emulator.native.access_log import BYTES, GENERIC, GLOBAL, WRITE
from dsv4lib.emulator.native.race_log import ALL_BYTES

if TYPE_CHECKING:
    from dsv4lib.emulator.checks.global_memory import GlobalRaces, Region
    from dsv4lib.emulator.errors import Place
    from dsv4lib.emulator.machine.async_units import AsyncOp
    from dsv4lib.emulator.machine.warp import Warp

KIND = "dependent_launch_early"
_LANES = np.arange(abi.LANES)


class Dependence:
    """One launch; nothing is looked at unless it is a programmatic dependent launch.

    Args:
        machine: of the launch.
        earlier: global memory of the launches that may still run when it begins, the latest first; none: it waits.
    """

    def __init__(self, machine: Any, earlier: tuple[GlobalRaces, ...]):
        self.earlier = earlier
        self._machine = machine
        self._waits: dict[int, list[tuple[int, int]]] = {}  # by cluster: entry and epoch of the warps that have waited
        self._after: set[int] = set()  # warps that are known to be ordered after a wait
        self.triggers = {True: 0, False: 0}  # by: ordered after a wait
        self._found: dict[tuple[int, int], Any] = {}

    @property
    def hasty(self) -> bool:
        """Tell whether every ``.launch_dependents`` has come before the wait."""
        return self.triggers[False] > 0 and not self.triggers[True]

    def waited(self, clocks: Clocks, warp: Warp) -> None:
        """Record that the warp has executed ``griddepcontrol.wait``."""
        me = warp.agent - clocks.first_agent
        self._waits.setdefault(clocks.first_agent, []).append((me, clocks.epochs[me]))

    def triggered(self, clocks: Clocks, warp: Warp) -> None:
        """Record that the warp has executed ``griddepcontrol.launch_dependents``."""
        self.triggers[self._ordered(clocks, clocks.of(warp))] += 1

    def _ordered(self, clocks: Clocks, clock: np.ndarray) -> bool:
        """Does a clock cover a wait of its cluster?"""
        row = clock[CARRIED]
        return any(row[entry] >= epoch for entry, epoch in self._waits.get(clocks.first_agent, ()))

    # --- accesses ---------------------------------------------------------------------------------------------------

    def logged(self, clocks: Clocks, warp: Warp, entries: np.ndarray) -> None:
        """Check accesses of a warp, from the log of native code."""
        if not self.earlier or warp.agent in self._after:
            return
        if self._ordered(clocks, clocks.of(warp)):
            self._after.add(warp.agent)
            return
        for entry in entries[entries["code"] & (GLOBAL | GENERIC) != 0]:
            code, lanes = int(entry["code"]), _LANES[(int(entry["mask"]) >> _LANES & 1) != 0]
            addresses = entry["addresses"][lanes]
            far = addresses >> np.uint64(56) == 0  # a generic address may be of shared memory
            if far.any():
                at = addresses[far].astype(np.int64), lanes[far], int(entry["pc"])
                self._look(warp, None, *at, code & BYTES, bool(code & WRITE))

    def ranges(self, clocks: Clocks, op: AsyncOp, starts: np.ndarray, nbytes: int, write: bool) -> None:
        """Check accesses of an asynchronous operation, which knows what its issuer knew."""
        if self.earlier and op.warp.agent not in self._after and len(starts) and not self._ordered(clocks, op.clock):
            self._look(op.warp, op, starts, None, op.instr.index, nbytes, write)

    def _look(
        self,
        warp: Warp,
        op: AsyncOp | None,
        starts: np.ndarray,
        lanes: np.ndarray | None,
        pc: int,
        nbytes: int,
        write: bool,
    ) -> None:
        """Report the first of some accesses that an earlier launch conflicts with."""
        holder = self._machine.gmem.find(int(starts.min()))
        if holder is None:
            return
        for far in self.earlier:
            region = far.regions.get(holder.start)
            if region is None or region.allocation is not holder:
                continue
            words = (starts >> 2)[:, None] + np.arange(-(-nbytes // 4)) - region.base
            inside = (words >= 0) & (words < region.words)
            mask = ALL_BYTES if nbytes >= 4 else ((1 << nbytes) - 1) << (starts & 3)[:, None]
            found = _conflict(far, region, np.where(inside, words, 0), inside, mask, write)
            if found is not None:
                number, position, what = found
                row, column = divmod(position, words.shape[1])
                lane = None if lanes is None else int(lanes[row])
                address = 4 * (region.base + int(words[row, column]))
                self._report(warp, op, pc, lane, what, f"{address - holder.start:#x} of {holder.label}", far, number)
                return

    def _report(
        self, warp: Warp, op: AsyncOp | None, pc: int, lane: int | None, what: str, where: str, far: Any, number: int
    ) -> None:
        key = pc, int(far.accesses.pc[number])
        if key in self._found:
            self._found[key].count += 1
            return
        place: Place = op.where() if op is not None else warp.place(warp.program.instruction(pc))
        if lane is not None:
            place = dataclasses.replace(place, lanes=1 << lane)
        actor = str(warp) if op is None else f"{op.label} of {warp}"
        text = (
            f"{what} in global memory at {where}: {actor} is not ordered after griddepcontrol.wait, and the launch of "
            f"{far.machine.program.kernel.name} in front of this one may still run"
        )
        found = self._machine.report(KIND, text, place, owner=far.place_of(number), order=what)
        if found is not None:
            self._found[key] = found


def _conflict(
    far: GlobalRaces, region: Region, words: np.ndarray, inside: np.ndarray, mask: Any, write: bool
) -> tuple[int, int, str] | None:
    """(access of the earlier launch, flat position, what) of the first word that it wrote, or read if this writes."""
    kinds = [(region.writer, "write after write" if write else "read after write")]
    if write:
        far.fold(region)
        kinds += [(region.first, "write after read"), (region.latest, "write after read")]
    for numbers, what in kinds:
        ids = np.where(inside, numbers[words], 0)
        clash = (ids != 0) & (far.accesses.mask[ids] & mask & ALL_BYTES != 0)
        if clash.any():
            position = int(clash.reshape(-1).argmax())
            return int(ids.reshape(-1)[position]), position, what
    return None
