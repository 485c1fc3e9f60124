"""Implement alloca, stacksave and stackrestore. They are local memory whose size is known at run time.

A kernel that has one of these gets a further local variable, `calls.STACK`. Its first 8 bytes hold how much of the rest
a lane has taken. Source: PTX ISA, "Stack Manipulation Instructions".
"""

from __future__ import annotations

import numpy as np

from dsv4lib.emulator import isa
from dsv4lib.emulator.errors import MemoryFault
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.isa.calls import STACK, local
from dsv4lib.emulator.machine.warp import Warp
from dsv4lib.emulator.native.abi import LANES
from dsv4lib.emulator.ptx.ir import Imm, Instr

_TYPES = {"u32": np.uint32, "u64": np.uint64}
_NOTE = f"a lane has {STACK.size >> 10} KiB"


@isa.service("alloca.<type:u32|u64>", note=_NOTE)
def alloca(warp: Warp, instr: Instr, form: Form) -> None:
    """``alloca address, size [, alignment]``: more of the lane's stack.

    Raises:
        MemoryFault: it is full.
    """
    target, size, *rest = instr.operands
    dtype = _TYPES[form.get("type")]
    align = rest[0].bits if rest and isinstance(rest[0], Imm) else 8
    sizes, found = warp.read(size, dtype), np.zeros(LANES, dtype)
    for lane in warp.lanes().tolist():
        top = _top(warp, lane)
        found[lane] = -(-top // align) * align
        _set_top(warp, lane, int(found[lane]) + int(sizes[lane]))
    warp.write(target, found)


@isa.service("stacksave.<type:u32|u64>")
def stacksave(warp: Warp, instr: Instr, form: Form) -> None:
    """``stacksave address``: where the next `alloca` begins."""
    found = np.zeros(LANES, np.uint64)
    for lane in warp.lanes().tolist():
        found[lane] = _top(warp, lane)
    warp.write(instr.operands[0], found.astype(_TYPES[form.get("type")]))


@isa.service("stackrestore.<type:u32|u64>")
def stackrestore(warp: Warp, instr: Instr, form: Form) -> None:
    """``stackrestore address``: give back what was taken since."""
    found = warp.read(instr.operands[0], _TYPES[form.get("type")])
    for lane in warp.lanes().tolist():
        _set_top(warp, lane, int(found[lane]))


def _top(warp: Warp, lane: int) -> int:
    """First free byte of a lane's stack; its first 8 bytes hold the size of what follows them."""
    start = warp.program.symbol(STACK.name)[1]
    return start + 8 + int.from_bytes(local(warp, lane, start, 8), "little")


def _set_top(warp: Warp, lane: int, top: int) -> None:
    start = warp.program.symbol(STACK.name)[1]
    if not start + 8 <= top <= start + STACK.size:
        raise MemoryFault(f"the stack of lane {lane} has {STACK.size} bytes", warp.place())
    local(warp, lane, start, 8)[:] = (top - start - 8).to_bytes(8, "little")
