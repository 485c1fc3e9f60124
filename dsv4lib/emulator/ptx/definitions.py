"""Find registers that are used although no path to the use sets them.

A forward data-flow analysis over the control-flow graph: the state is the set of registers that may have been set, as
bits of an integer. A register counts as used only where it is known to be read, so nothing is claimed of operands
whose direction is not known.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from dsv4lib.emulator.ptx.ir import Kernel
from dsv4lib.emulator.ptx.pending import blocks


def undefined_uses(kernel: Kernel, uses: Sequence[Set[int]], defs: Sequence[Set[int]]) -> list[tuple[int, int]]:
    """List (instruction, register) of every use that no definition reaches.

    Args:
        uses: registers that each instruction certainly reads; defs: those it may write.
    """
    graph = blocks(kernel)
    made = []
    for start, end, _ in graph:
        mask = 0
        for i in range(start, end):
            for register in defs[i]:
                mask |= 1 << register
        made.append(mask)
    entry: list[int | None] = [None] * len(graph)
    entry[0] = 0
    work = [0]
    while work:
        i = work.pop()
        leaving = entry[i] | made[i]
        for j in graph[i][2]:
            if entry[j] is None or leaving | entry[j] != entry[j]:
                entry[j] = leaving | (entry[j] or 0)
                work.append(j)
    found = []
    for (start, end, _), known in zip(graph, entry, strict=True):
        if known is None:  # never reached
            continue
        for i in range(start, end):
            found += [(i, register) for register in sorted(uses[i]) if not known >> register & 1]
            for register in defs[i]:
                known |= 1 << register
    return found
