"""Check strict rules of the PTX ISA, off by default.

Shipped kernels violate them without harm.

tcgen05.fence: tensor memory that another thread's instruction has used is used again after a barrier. The PTX ISA
requires ``tcgen05.fence::before_thread_sync`` before the barrier and ``::after_thread_sync`` after it. Only the second
is looked for; CuTeDSL emits neither.

Proxies: stores of threads that an asynchronous copy overwrites need a proxy fence as those that it reads do. That reads
of threads come before the copy that overwrites them is a matter of barriers alone (race.py): every shipped pipeline
hands buffers back that way.

Source: PTX ISA, "tcgen05 memory consistency model", "Async proxy".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4lib.emulator.checks.shadow import Actor, Cells, Shadow
from dsv4lib.emulator.machine.warp import PC

if TYPE_CHECKING:
    from dsv4lib.emulator.checks.clocks import Clocks
    from dsv4lib.emulator.machine.async_units import AsyncOp
    from dsv4lib.emulator.machine.warp import Warp

_ALLOCATION = ("tcgen05.alloc", "tcgen05.dealloc")  # not of the asynchronous instructions that the fence is for


class TensorFences:
    """tcgen05.fence::after_thread_sync of one launch."""

    def __init__(self, machine: Any):
        self.machine = machine
        self._passed: set[int] = set()  # agents that have passed a barrier since their last fence
        self._issued: set[int] = set()  # issue numbers of operations by such warps

    def passed(self, warp: Warp) -> None:
        """Record that the warp has passed a barrier."""
        self._passed.add(warp.agent)

    def fenced(self, warp: Warp) -> None:
        """Record that the warp has executed the fence."""
        self._passed.discard(warp.agent)

    def issued(self, op: AsyncOp) -> None:
        """Record that a warp issues an operation."""
        if op.warp.agent in self._passed:
            self._issued.add(op.order)

    def look(
        self, shadow: Shadow, cells: Cells, write: bool, actor: Actor, op: AsyncOp | None, warp: Warp, clocks: Clocks
    ) -> int | None:
        """Find another thread's earlier access that lacks the fence before this one."""
        if op.order not in self._issued if op is not None else warp.agent not in self._passed:
            return None
        instructions = self.machine.program.instructions
        if op is None and instructions[warp.words[PC]].opcode.startswith(_ALLOCATION):
            return None
        old = np.array(cells.get(shadow.writer))
        before = [old]
        if write:
            before += [np.where(since > old, since, 0) for since in map(cells.get, self._reads(shadow))]
        table = shadow.accesses
        for ids in before:
            for number in np.unique(ids).tolist():
                entry = int(table.entry[number])
                if not number or entry == actor.entry or clocks.owners[entry] is warp:
                    continue
                if not instructions[table.pc[number]].opcode.startswith(_ALLOCATION):
                    return number
        return None

    @staticmethod
    def _reads(shadow: Shadow) -> list[np.ndarray]:
        return list(shadow.readers.values())
