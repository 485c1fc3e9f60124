"""Implement SIMD video instructions on two halves or four bytes.

Without operand selectors and masks.

CUDA's ``__vabsdiffs4``, ``__vsadu4`` and their relatives become these. Source: PTX ISA, "SIMD Video Instructions".
"""

from __future__ import annotations

from collections.abc import Callable

from dsv4lib.emulator import isa
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.native.int import field, signed
from dsv4lib.emulator.native.irtools import Emitter, Value

_TYPES = "<dtype:u32|s32>.<atype:u32|s32>.<btype:u32|s32>"
_COMPARED = "<atype:u32|s32>.<btype:u32|s32>.<cmp:eq|ne|lt|le|gt|ge>"


def _average(e: Emitter, a: Value, b: Value) -> Value:
    """Half the sum, rounded up where that is not negative."""
    total = a + b
    return (total + e.cast("zext", e.icmp("sge", total, 0), "i32")).sar(1)


# Of two fields, extended to 32 bits.
_OPERATIONS: dict[str, Callable[[Emitter, Value, Value], Value]] = {
    "add": lambda e, a, b: a + b,
    "sub": lambda e, a, b: a - b,
    "avrg": _average,
    "absdiff": lambda e, a, b: e.select(e.icmp("slt", a, b), b - a, a - b),
    "min": lambda e, a, b: e.intrinsic("llvm.smin", a, b),
    "max": lambda e, a, b: e.intrinsic("llvm.smax", a, b),
}
_CONDITIONS = {"eq": "eq", "ne": "ne", "lt": "slt", "le": "sle", "gt": "sgt", "ge": "sge"}


def _fields(e: Emitter, form: Form, one: Callable[[Value, Value], Value], dtype: str) -> None:
    """d = the fields that ``one`` makes of a's and b's, or with .add c and their sum."""
    count = 4 if form.opcode.split(".")[0].endswith("4") else 2
    bits = 32 // count
    a, b = e.load(1, "i32"), e.load(2, "i32")
    total, word = e.load(3, "i32"), a.like(0)
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed(dtype) else (0, (1 << bits) - 1)
    for k in range(count):
        result = one(field(a, form.get("atype"), bits, k), field(b, form.get("btype"), bits, k))
        if form.has("sat"):
            result = e.intrinsic("llvm.smin", e.intrinsic("llvm.smax", result, result.like(low)), result.like(high))
        word = word | (result & (1 << bits) - 1) << bits * k
        total = total + field(result, dtype, bits, 0)
    e.store(0, total if form.has("sum") else word)


@isa.native(
    *(f"v{op}{n}.{_TYPES}{end}" for op in _OPERATIONS for n in (2, 4) for end in ("[.<sat:sat>]", ".<sum:add>"))
)
def arithmetic(e: Emitter, form: Form) -> None:
    """``d, a, b, c``: every field of a and b."""
    operation = _OPERATIONS[form.opcode.split(".")[0][1:-1]]
    _fields(e, form, lambda a, b: operation(e, a, b), form.get("dtype"))


@isa.native(f"vset2.{_COMPARED}[.<sum:add>]", f"vset4.{_COMPARED}[.<sum:add>]")
def compare(e: Emitter, form: Form) -> None:
    """``d, a, b, c``: 1 in every field of a and b where the comparison holds."""
    condition = _CONDITIONS[form.get("cmp")]
    _fields(e, form, lambda a, b: e.cast("zext", e.icmp(condition, a, b), "i32"), "u32")
