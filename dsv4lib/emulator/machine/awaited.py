"""Read from a polling loop which value ends it: load, compare, branch back.

Only what the code shows: the loaded register, or one of a vector, is compared with an immediate or a register, and the
branch that the comparison guards leaves the loop or goes round again. Anything else says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dsv4lib.emulator.ptx.ir import Imm, Instr, Operand, Pair, Reg, Symbol, Vector

# What the operator of a setp tests, and the same negated: as words before the other operand's value.
_UNTIL = {
    "eq": ("it is", "it is not"),
    "ne": ("it is not", "it is"),
    "lt": ("it is below", "it is at least"),
    "lo": ("it is below", "it is at least"),
    "le": ("it is at most", "it is above"),
    "ls": ("it is at most", "it is above"),
    "gt": ("it is above", "it is at most"),
    "hi": ("it is above", "it is at most"),
    "ge": ("it is at least", "it is below"),
    "hs": ("it is at least", "it is below"),
}
_SWAPPED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "lo": "hi", "hi": "lo", "ls": "hs", "hs": "ls"}


def awaited(warp: Any, loop: Sequence[Instr], load: Instr) -> str:
    """Say until when a loop repeats, such as ``until it is not 0x0``; "" if the code does not show it."""
    loaded = {r.index for r in _items(load.operands[0]) if isinstance(r, Reg)}
    for compare in loop:
        base, operator, *_ = [*compare.opcode.split("."), ""]
        if base != "setp" or operator not in _UNTIL or len(compare.operands) != 3:
            continue
        target, left, right = compare.operands
        if isinstance(right, Reg) and right.index in loaded:
            left, right, operator = right, left, _SWAPPED.get(operator, operator)
        if not isinstance(left, Reg) or left.index not in loaded:
            continue
        value, again = _value(warp, right), _repeats(warp, loop, target)
        if value is not None and again is not None:
            return f"until {_UNTIL[operator][again]} {value:#x}"
    return ""


def _items(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vector) else (operand,)


def _value(warp: Any, operand: Operand) -> int | None:
    """Of an immediate, or of a register in the first active lane."""
    if isinstance(operand, Imm):
        return operand.bits
    if not isinstance(operand, Reg):
        return None
    wide = warp.program.bits[operand.index] == 64
    return int(warp.read(operand, np.uint64 if wide else np.uint32)[warp.lanes()[0]])


def _repeats(warp: Any, loop: Sequence[Instr], target: Operand) -> bool | None:
    """Does the loop go on where the predicate holds? None: no branch of the loop shows it."""
    predicate = target.first if isinstance(target, Pair) else target
    if not isinstance(predicate, Reg):
        return None
    inside = {instr.index for instr in loop}
    for branch in loop:
        guard, to = branch.guard, branch.operands[0] if branch.operands else None
        if guard is None or guard.index != predicate.index or not branch.opcode.startswith("bra"):
            continue
        if isinstance(to, Symbol):
            back = warp.program.kernel.labels[to.name] in inside
            return back != guard.negated
    return None
