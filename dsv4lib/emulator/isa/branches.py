"""Implement brx.idx: a branch to one of a table of labels, by lanes.

Lanes with different indices become groups of their own, as at a conditional branch (native/driver_ir.py); they
reconverge where their paths meet. Source: PTX ISA, "brx.idx" and ".branchtargets".
"""

from __future__ import annotations

import numpy as np

from dsv4lib.emulator import isa
from dsv4lib.emulator.errors import HazardError
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.machine.warp import GROUP, MASK, PC, Warp, mask_of
from dsv4lib.emulator.ptx.ir import Instr, Symbol


@isa.service("brx.idx[.<uni:uni>]")
def branch(warp: Warp, instr: Instr, form: Form) -> None:
    """``index, table``.

    Raises:
        HazardError: an index past the end of the table, or ``.uni`` with different indices: undefined on hardware.
    """
    index, table = instr.operands
    assert isinstance(table, Symbol)
    kernel, words = warp.program.kernel, warp.words
    labels = kernel.tables[table.name]
    wanted = warp.read(index, np.uint32)
    active = wanted[warp.lanes()]
    count = len(labels)
    if (active >= count).any():
        raise HazardError(f"{form.opcode} with index {active.max()}: {table.name} has {count} labels", warp.place())
    if form.has("uni") and (active != active[0]).any():
        raise HazardError(f"{form.opcode} with indices {sorted(set(active.tolist()))}: they must agree", warp.place())
    groups: dict[int, int] = {}
    if stay := words[GROUP] & ~words[MASK]:
        groups[words[PC] + 1] = stay
    for number in sorted(set(active.tolist())):
        pc = kernel.labels[labels[number]]
        groups[pc] = groups.get(pc, 0) | mask_of(wanted == number) & words[MASK]
    first, *others = sorted(groups)  # the scheduler steps over this instruction: to `first`
    words[PC], words[GROUP] = first - 1, groups[first]
    for pc in others:
        warp.push(pc, groups[pc])
