"""Read from a polling loop which value ends it: load, compare, branch back.

Only what the code shows: the loaded register, one of a vector, or half of a register that a ``mov`` takes apart, is
compared with an immediate or a register, and the branch that the comparison guards leaves the loop or goes round again.
Anything else says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dsv4lib.emulator.ptx.ir import Imm, Instr, Operand, Pair, Reg, Symbol, Vector

# What the operator of a setp tests, and the same negated: as words before the other operand's value.
_UNTIL = {
    "eq": ("is", "is not"),
    "ne": ("is not", "is"),
    "lt": ("is below", "is at least"),
    "lo": ("is below", "is at least"),
    "le": ("is at most", "is above"),
    "ls": ("is at most", "is above"),
    "gt": ("is above", "is at most"),
    "hi": ("is above", "is at most"),
    "ge": ("is at least", "is below"),
    "hs": ("is at least", "is below"),
}
_SWAPPED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "lo": "hi", "hi": "lo", "ls": "hs", "hs": "ls"}


def awaited(warp: Any, loop: Sequence[Instr], load: Instr) -> str:
    """Say until when a loop repeats, such as ``until it is not 0x0``; "" if the code does not show it."""
    loaded = _loaded(loop, load)
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
            return f"until {loaded[left.index]} {_UNTIL[operator][again]} {value:#x}"
    return ""


def _loaded(loop: Sequence[Instr], load: Instr) -> dict[int, str]:
    """Registers that hold what was loaded, or a half of it, by number: what to call them."""
    found = {r.index: "it" for r in _items(load.operands[0]) if isinstance(r, Reg)}
    for move in loop:
        if move.opcode != "mov.b64" or not isinstance(move.operands[0], Vector):
            continue
        source, halves = move.operands[1], move.operands[0].items
        if isinstance(source, Reg) and source.index in found and len(halves) == 2:
            names = "its lower word", "its upper word"
            found |= {r.index: name for r, name in zip(halves, names, strict=True) if isinstance(r, Reg)}
    return found


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
