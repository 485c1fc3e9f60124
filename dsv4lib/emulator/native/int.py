"""Implement integer arithmetic. Add to mad24, division, dot products and extended precision (PTX ISA).

Division by zero is "machine-specific" in the PTX ISA; quotient and remainder have all bits set, as on an H200.
The condition code of ``add.cc`` and friends is one bit per lane: ``carry`` of the warp context.
"""

from __future__ import annotations

from dsv4lib.emulator import isa
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.native.irtools import BITS, Emitter, Value
from dsv4lib.emulator.native.typed import INTEGERS, bits_of, extend, load_int, minmax, signed, store_int

WIDER = {"i16": "i32", "i32": "i64", "i64": "i128"}
CARRY_TYPES = "u32|s32|u64|s64"


@isa.native(f"add.<type:{INTEGERS}|u16x2|s16x2>")
def add(e: Emitter, form: Form) -> None:
    """d = a + b, wrapping."""
    t = form.get("type")
    store_int(e, 0, load_int(e, 1, t) + load_int(e, 2, t))


@isa.native(f"sub.<type:{INTEGERS}>")
def sub(e: Emitter, form: Form) -> None:
    """d = a - b, wrapping."""
    t = form.get("type")
    store_int(e, 0, load_int(e, 1, t) - load_int(e, 2, t))


@isa.native("add.sat.s32")
def add_sat(e: Emitter, form: Form) -> None:
    """d = a + b, clamped to the range of s32."""
    e.store(0, e.intrinsic("llvm.sadd.sat", e.load(1, "i32"), e.load(2, "i32")))


@isa.native("sub.sat.s32")
def sub_sat(e: Emitter, form: Form) -> None:
    """d = a - b, clamped to the range of s32."""
    e.store(0, e.intrinsic("llvm.ssub.sat", e.load(1, "i32"), e.load(2, "i32")))


def product(e: Emitter, form: Form, mode: str) -> Value:
    """Multiply operands 1 and 2: the low half, the high half, or all of it (wide)."""
    t = form.get("type")
    a, b = load_int(e, 1, t), load_int(e, 2, t)
    if mode == "lo":
        return a * b
    wide = WIDER[a.kind]
    both = extend(e, a, t, wide) * extend(e, b, t, wide)
    return both if mode == "wide" else e.resize(both >> BITS[a.kind], a.kind)


@isa.native(f"mul.<mode:lo|hi>.<type:{INTEGERS}>", "mul.<mode:wide>.<type:u16|s16|u32|s32>")
def mul(e: Emitter, form: Form) -> None:
    """d = a * b."""
    e.store(0, product(e, form, form.get("mode")))


@isa.native(f"mad.<mode:lo|hi>.<type:{INTEGERS}>", "mad.<mode:wide>.<type:u16|s16|u32|s32>")
def mad(e: Emitter, form: Form) -> None:
    """d = a * b + c."""
    p = product(e, form, form.get("mode"))
    e.store(0, p + e.load(3, p.kind))


@isa.native("mad.hi.sat.<type:s32>")
def mad_hi_sat(e: Emitter, form: Form) -> None:
    """d = high half of a * b + c, clamped."""
    e.store(0, e.intrinsic("llvm.sadd.sat", product(e, form, "hi"), e.load(3, "i32")))


def product24(e: Emitter, form: Form, mode: str) -> Value:
    """Multiply the low 24 bits of operands 1 and 2: bits 47..16 (hi) or 31..0 (lo)."""

    def low24(i: int) -> Value:
        top = e.load(i, "i32") << 8
        return extend(e, top.sar(8) if signed(form.get("type")) else top >> 8, form.get("type"), "i64")

    p = low24(1) * low24(2)
    return e.resize(p >> 16 if mode == "hi" else p, "i32")


@isa.native("mul24.<mode:lo|hi>.<type:u32|s32>")
def mul24(e: Emitter, form: Form) -> None:
    """d = 24-bit product."""
    e.store(0, product24(e, form, form.get("mode")))


@isa.native("mad24.<mode:lo|hi>.<type:u32|s32>")
def mad24(e: Emitter, form: Form) -> None:
    """d = 24-bit product + c."""
    e.store(0, product24(e, form, form.get("mode")) + e.load(3, "i32"))


@isa.native("mad24.hi.sat.<type:s32>")
def mad24_hi_sat(e: Emitter, form: Form) -> None:
    """d = high 24-bit product + c, clamped."""
    e.store(0, e.intrinsic("llvm.sadd.sat", product24(e, form, "hi"), e.load(3, "i32")))


@isa.native(f"sad.<type:{INTEGERS}>")
def sad(e: Emitter, form: Form) -> None:
    """d = c + |a - b|."""
    t = form.get("type")
    a, b = load_int(e, 1, t), load_int(e, 2, t)
    e.store(0, load_int(e, 3, t) + (minmax(e, "max", t, a, b) - minmax(e, "min", t, a, b)))


def magnitude(e: Emitter, a: Value, ptx: str) -> Value:
    """Compute |a| as an unsigned number of the same width. The most negative value becomes 2**(n-1)."""
    return e.intrinsic("llvm.abs", a, e.flag(False)) if signed(ptx) else a


def quotient(e: Emitter, a: Value, b: Value, ptx: str) -> Value:
    """Divide a by b towards zero, all ones for b = 0. The most negative value over -1 wraps."""
    zero = e.icmp("eq", b, 0)
    n, d = magnitude(e, a, ptx), magnitude(e, e.select(zero, b.like(1), b), ptx)
    if a.kind == "i64":
        q = e.binary("udiv", n, d)
    else:
        # Exact: for |a|, b < 2**32 a quotient that is no integer is at least 1/b away from one, further than the
        # rounding error a/b * 2**-53 of the division in double precision.
        ratio = e.cast("uitofp", n, "f64") / e.cast("uitofp", d, "f64")
        q = e.resize(e.cast("fptosi", ratio, "i64"), a.kind)
    if signed(ptx):
        q = e.select(e.icmp("slt", a ^ b, 0), -q, q)
    return e.select(zero, q.like(-1), q)


@isa.native(f"div.<type:{INTEGERS}>", note="division by zero gives all ones")
def div(e: Emitter, form: Form) -> None:
    """d = a / b, towards zero."""
    t = form.get("type")
    e.store(0, quotient(e, load_int(e, 1, t), load_int(e, 2, t), t))


@isa.native(f"rem.<type:{INTEGERS}>", note="the remainder of a division by zero is all ones")
def rem(e: Emitter, form: Form) -> None:
    """d = a mod b with the sign of a."""
    t = form.get("type")
    a, b = load_int(e, 1, t), load_int(e, 2, t)
    rest = a - quotient(e, a, b, t) * b
    e.store(0, e.select(e.icmp("eq", b, 0), rest.like(-1), rest))


@isa.native("abs.<type:s16|s32|s64>")
def absolute(e: Emitter, form: Form) -> None:
    """d = |a|; the most negative value stays."""
    t = form.get("type")
    e.store(0, magnitude(e, load_int(e, 1, t), t))


@isa.native("neg.<type:s16|s32|s64>")
def neg(e: Emitter, form: Form) -> None:
    """d = -a."""
    e.store(0, -load_int(e, 1, form.get("type")))


@isa.native("min[.<relu:relu>].<type:s32|s16x2>", "min.<type:u16|u32|u64|s16|s64|u16x2>")
def minimum(e: Emitter, form: Form) -> None:
    """d = min(a, b), at least 0 with .relu."""
    clamp(e, form, "min")


@isa.native("max[.<relu:relu>].<type:s32|s16x2>", "max.<type:u16|u32|u64|s16|s64|u16x2>")
def maximum(e: Emitter, form: Form) -> None:
    """d = max(a, b), at least 0 with .relu."""
    clamp(e, form, "max")


def clamp(e: Emitter, form: Form, name: str) -> None:
    """Clamp by min and max."""
    t = form.get("type")
    result = minmax(e, name, t, load_int(e, 1, t), load_int(e, 2, t))
    if form.has("relu"):
        result = e.intrinsic("llvm.smax", result, result.like(0))
    store_int(e, 0, result)


@isa.native("dp4a.<atype:u32|s32>.<btype:u32|s32>")
def dp4a(e: Emitter, form: Form) -> None:
    """d = c + sum of four byte products."""
    a, b, total = e.load(1, "i32"), e.load(2, "i32"), e.load(3, "i32")
    for k in range(4):
        total = total + field(a, form.get("atype"), 8, k) * field(b, form.get("btype"), 8, k)
    e.store(0, total)


@isa.native("dp2a.<mode:lo|hi>.<atype:u32|s32>.<btype:u32|s32>")
def dp2a(e: Emitter, form: Form) -> None:
    """d = c + two products of 16-bit halves of a with the low or high two bytes of b."""
    a, b, total = e.load(1, "i32"), e.load(2, "i32"), e.load(3, "i32")
    first = 2 if form.get("mode") == "hi" else 0
    for k in range(2):
        total = total + field(a, form.get("atype"), 16, k) * field(b, form.get("btype"), 8, first + k)
    e.store(0, total)


def field(a: Value, ptx: str, bits: int, k: int) -> Value:
    """Extract field ``k`` of ``bits`` bits of a 32-bit value, sign or zero extended."""
    top = a << (32 - bits * (k + 1)) if bits * (k + 1) < 32 else a
    return top.sar(32 - bits) if signed(ptx) else top >> (32 - bits)


# --- extended precision ---------------------------------------------------------------------------------------------


def carry_in(e: Emitter, kind: str) -> Value:
    """Load the condition code as 0 or 1 per lane."""
    return e.cast("zext", e.lanes(e.context("carry")), kind)


def set_carry(e: Emitter, flags: Value) -> None:
    """Write the condition code of the active lanes."""
    old = e.context("carry")
    e.set_context("carry", (e.bits(flags) & e.mask()) | (old & ~e.mask()))


def add_with_carry(e: Emitter, form: Form, a: Value, b: Value, use: bool) -> None:
    """d = a + b [+ carry]; the carry out is written if the form has .cc."""
    total = a + b
    out = e.icmp("ult", total, a)
    if use:
        first = total
        total = first + carry_in(e, a.kind)
        out = out | e.icmp("ult", total, first)
    e.store(0, total)
    if form.has("cc"):
        set_carry(e, out)


@isa.native(f"add.<cc:cc>.<type:{CARRY_TYPES}>")
def add_cc(e: Emitter, form: Form) -> None:
    """d = a + b, carry out."""
    t = form.get("type")
    add_with_carry(e, form, load_int(e, 1, t), load_int(e, 2, t), use=False)


@isa.native(f"addc[.<cc:cc>].<type:{CARRY_TYPES}>")
def addc(e: Emitter, form: Form) -> None:
    """d = a + b + carry."""
    t = form.get("type")
    add_with_carry(e, form, load_int(e, 1, t), load_int(e, 2, t), use=True)


@isa.native(f"mad.<mode:lo|hi>.<cc:cc>.<type:{CARRY_TYPES}>")
def mad_cc(e: Emitter, form: Form) -> None:
    """d = half of a * b + c, carry out."""
    p = product(e, form, form.get("mode"))
    add_with_carry(e, form, p, e.load(3, p.kind), use=False)


@isa.native(f"madc.<mode:lo|hi>[.<cc:cc>].<type:{CARRY_TYPES}>")
def madc(e: Emitter, form: Form) -> None:
    """d = half of a * b + c + carry."""
    p = product(e, form, form.get("mode"))
    add_with_carry(e, form, p, e.load(3, p.kind), use=True)


def sub_with_borrow(e: Emitter, form: Form, use: bool) -> None:
    """d = a - b [- borrow], as a + ~b + 1 [or + carry]. The carry out of that sum, 1 for *no* borrow, is kept by .cc.

    There is one flag: CUDA's division of 128 bits reads with addc what sub.cc wrote, and ptxas hands IADD3's carry on.
    """
    kind = f"i{bits_of(form.get('type'))}"
    a, b = e.load(1, kind), e.load(2, kind)
    if use:
        add_with_carry(e, form, a, ~b, use=True)
        return
    e.store(0, a - b)
    if form.has("cc"):
        set_carry(e, e.icmp("uge", a, b))


@isa.native(f"sub.<cc:cc>.<type:{CARRY_TYPES}>")
def sub_cc(e: Emitter, form: Form) -> None:
    """d = a - b, no borrow out."""
    sub_with_borrow(e, form, use=False)


@isa.native(f"subc[.<cc:cc>].<type:{CARRY_TYPES}>")
def subc(e: Emitter, form: Form) -> None:
    """d = a - (b + borrow)."""
    sub_with_borrow(e, form, use=True)
