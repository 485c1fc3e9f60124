"""Implement isspacep.const. It tells whether a generic address is one of the file's ``.const`` variables.

Constant memory is read-only global memory here, so ``isspacep.global`` holds for it too; hardware's window of it is not
global. ``__isConstant`` of CUDA, and with it libcu++'s ``memcpy_async`` without optimisation, use it.
Source: PTX ISA, "isspacep".
"""

from __future__ import annotations

import numpy as np

from dsv4lib.emulator import isa
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.machine.warp import Warp
from dsv4lib.emulator.ptx.ir import Instr


@isa.service("isspacep.const")
def isspacep_const(warp: Warp, instr: Instr, form: Form) -> None:
    """``isspacep.const p, address``."""
    target, address = instr.operands
    found, inside = warp.read(address, np.uint64), 0
    machine = warp.cta.machine
    for variable in warp.program.module.variables:
        start = machine.variables.get(variable.name) if variable.space == "const" else None
        if start is not None:
            hits = np.flatnonzero((found >= start) & (found < start + variable.size))
            inside |= sum(1 << int(lane) for lane in hits)
    warp.decide(target, inside)
