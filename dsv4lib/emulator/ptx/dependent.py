"""Find global accesses that a programmatic dependent launch makes too early.

The analysis is static.

Such a kernel may start while the one before still runs; ``griddepcontrol.wait`` returns when that one has ended and its
writes are visible. Until then a read may find old values, and a write may overtake a read. Here every path from the
entry is followed up to its first wait, whatever runs before it.

What does not depend on the kernel before may be touched earlier on purpose (weights); this only says what is. In a run
of both launches the race detector distinguishes them (checks/dependent.py).
Source: PTX ISA, "griddepcontrol".
"""

from __future__ import annotations

import re

from dsv4lib.emulator.ptx.ir import Instr, Kernel
from dsv4lib.emulator.ptx.pending import blocks

WAIT = "griddepcontrol.wait"
# Without a state space, ld, st, atom and red are generic. A prefetch brings no values to a register and changes none.
_GENERIC = re.compile(r"(?:ld|ldu|st|atom|red)\.(?!.*(?:shared|param|local|const)\b)")
_GLOBAL = re.compile(r"(?:ld|ldu|st|atom|red|multimem|cp)\.(?!.*\bprefetch\b).*\bglobal\b")


def touches_global(opcode: str) -> bool:
    """Tell whether the instruction reads or writes global memory, or may.

    >>> [touches_global(op) for op in ("ld.global.nc.b32", "ld.b64", "st.shared.b32", "cp.async.bulk.commit_group")]
    [True, True, False, False]
    """
    return bool(_GLOBAL.match(opcode) or _GENERIC.match(opcode))


def ahead_of_wait(kernel: Kernel) -> list[Instr]:
    """List instructions that may touch global memory before any wait.

    A wait under a guard counts as none. Of a kernel that never waits these are all.
    """
    graph, found, seen, work = blocks(kernel), [], {0}, [0]
    while work:
        start, end, successors = graph[work.pop()]
        for i in range(start, end):
            instr = kernel.instructions[i]
            if instr.opcode == WAIT and instr.guard is None:
                break
            if touches_global(instr.opcode):
                found.append(instr)
        else:
            work += [j for j in successors if j not in seen]
            seen.update(successors)
    return sorted(found, key=lambda instr: instr.index)
