"""Implement set and setp of every type.

Includes the Boolean combination and the pair of results.
"""

from __future__ import annotations

from dsv4lib.emulator import isa
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.native import fp
from dsv4lib.emulator.native.irtools import Emitter, Value
from dsv4lib.emulator.native.logic import OPERATORS
from dsv4lib.emulator.native.typed import bits_of, signed

INTEGER = "eq|ne|lt|le|gt|ge"
UNSIGNED = "lo|ls|hi|hs"
FLOAT = "eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan"
BOOL = "[.<bool:and|or|xor>]"
ALIASES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
FLOAT_TYPES = "f16|bf16|f32|f64"
PAIRS = "f16x2|bf16x2"


def float_condition(name: str) -> str:
    """Choose the fcmp condition of a PTX comparison: ordered unless it ends in u."""
    if name in ("num", "nan"):
        return {"num": "ord", "nan": "uno"}[name]
    return f"u{name[:-1]}" if name.endswith("u") else f"o{name}"


def comparison(e: Emitter, form: Form, first: int) -> Value:
    """Compare operands ``first`` and ``first + 1`` as i1 lanes (64 for packed types)."""
    t, name = form.get("stype"), form.get("cmp")
    if t in (*FLOAT_TYPES.split("|"), *PAIRS.split("|")):
        a, b = (fp.load(e, i, t, ftz=form.has("ftz")) for i in (first, first + 1))
        return e.fcmp(float_condition(name), a, b)
    kind = f"i{bits_of(t)}"
    name = ALIASES.get(name, name)
    if name not in ("eq", "ne"):
        name = ("s" if signed(t) else "u") + name
    return e.icmp(name, e.load(first, kind), e.load(first + 1, kind))


def combine(e: Emitter, form: Form, flags: Value, i: int) -> Value:
    """Combine a lane mask with predicate operand ``i`` if there is a Boolean operator."""
    return OPERATORS[form.get("bool")](flags, e.pred(i)) if form.has("bool") else flags


def source_patterns(head: str, tail: str = "") -> tuple[str, ...]:
    """List the variants of integer and 32- and 64-bit float sources. ``tail`` stands before the source type."""
    return (
        f"{head}.<cmp:{INTEGER}>{BOOL}{tail}.<stype:u16|u32|u64|s16|s32|s64>",
        f"{head}.<cmp:{UNSIGNED}>{BOOL}{tail}.<stype:u16|u32|u64>",
        f"{head}.<cmp:eq|ne>{BOOL}{tail}.<stype:b16|b32|b64>",
        f"{head}.<cmp:{FLOAT}>{BOOL}[.<ftz:ftz>]{tail}.<stype:f32>",
        f"{head}.<cmp:{FLOAT}>{BOOL}{tail}.<stype:f64>",
    )


@isa.native(
    *source_patterns("setp"),
    f"setp.<cmp:{FLOAT}>{BOOL}[.<ftz:ftz>].<stype:f16>",
    f"setp.<cmp:{FLOAT}>{BOOL}.<stype:bf16>",
)
def setp(e: Emitter, form: Form) -> None:
    """p[|q] = (a cmp b) BoolOp c; q has the comparison inverted."""
    pair = len(e.groups[0]) == 2
    first = 2 if pair else 1
    flags = e.bits(comparison(e, form, first))
    p = combine(e, form, flags, first + 2)
    q = combine(e, form, ~flags, first + 2) if pair else None
    e.store_pred(0, p)
    if q is not None:
        e.store_pred(1, q)


@isa.native(
    f"setp.<cmp:{FLOAT}>{BOOL}[.<ftz:ftz>].<stype:f16x2>",
    f"setp.<cmp:{FLOAT}>{BOOL}.<stype:bf16x2>",
)
def setp_packed(e: Emitter, form: Form) -> None:
    """p|q = comparison of the low halves | of the high halves, each combined with c."""
    flags = comparison(e, form, 2)
    halves = [e.bits(e.shuffle(flags, range(k, 64, 2))) for k in (0, 1)]
    p, q = (combine(e, form, half, 4) for half in halves)
    e.store_pred(0, p)
    e.store_pred(1, q)


def truth(e: Emitter, flags: Value, dtype: str) -> Value:
    """Convert true lanes to 1.0 or all ones, false ones to 0."""
    bits = {"f32": 32, "f16": 16, "bf16": 16}.get(dtype) or bits_of(dtype)
    one = {"f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80}.get(dtype, -1)
    value = e.const(one, f"i{bits}", flags.n)
    return e.select(flags, value, 0)


@isa.native(
    *source_patterns("set", ".<dtype:u32|s32|f32>"),
    *source_patterns("set", ".<dtype:f16>"),
    *(pattern.replace("[.<ftz:ftz>]", "") for pattern in source_patterns("set", ".<dtype:bf16>")),
    f"set.<cmp:{FLOAT}>{BOOL}[.<ftz:ftz>].<dtype:u16|s16|u32|s32|f16>.<stype:f16>",
    f"set.<cmp:{FLOAT}>{BOOL}.<dtype:u16|s16|u32|s32|bf16>.<stype:bf16>",
)
def set_scalar(e: Emitter, form: Form) -> None:
    """d = (a cmp b) BoolOp c as all ones or 1.0."""
    flags = combine(e, form, e.bits(comparison(e, form, 1)), 3)
    e.store(0, truth(e, e.lanes(flags), form.get("dtype")))


@isa.native(
    f"set.<cmp:{FLOAT}>{BOOL}[.<ftz:ftz>].<dtype:f16x2|u32|s32>.<stype:f16x2>",
    f"set.<cmp:{FLOAT}>{BOOL}.<dtype:bf16x2|u32|s32>.<stype:bf16x2>",
)
def set_packed(e: Emitter, form: Form) -> None:
    """d = comparison of each half as 1.0 or 0xffff in that half."""
    flags = comparison(e, form, 1)
    if form.has("bool"):
        other = e.lanes(e.pred(3))
        doubled = e.shuffle(other, [k // 2 for k in range(64)])
        flags = OPERATORS[form.get("bool")](flags, doubled)
    dtype = form.get("dtype")
    fp.store_bits(e, 0, truth(e, flags, fp.element(dtype) if dtype.endswith("x2") else "s16"))
