"""Implement logic, shifts, counts, bit fields and byte permutes.

PTX ISA: logic, shift and integer instructions.

Predicates are one bit per lane in a 32-bit word, so predicate logic is scalar.
"""

from __future__ import annotations

from dsv4lib.emulator import isa
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.native.irtools import BITS, Emitter, Value
from dsv4lib.emulator.native.typed import BIT_SIZES, INTEGERS, bits_of, shift_amount, signed

OPERATORS = {"and": Value.__and__, "or": Value.__or__, "xor": Value.__xor__}


def logic(e: Emitter, form: Form, name: str) -> None:
    """Emit and, or, xor of registers or predicates."""
    if form.get("type") == "pred":
        e.store_pred(0, OPERATORS[name](e.pred(1), e.pred(2)))
        return
    kind = f"i{bits_of(form.get('type'))}"
    e.store(0, OPERATORS[name](e.load(1, kind), e.load(2, kind)))


@isa.native(f"and.<type:pred|{BIT_SIZES}>")
def bit_and(e: Emitter, form: Form) -> None:
    """d = a & b."""
    logic(e, form, "and")


@isa.native(f"or.<type:pred|{BIT_SIZES}>")
def bit_or(e: Emitter, form: Form) -> None:
    """d = a | b."""
    logic(e, form, "or")


@isa.native(f"xor.<type:pred|{BIT_SIZES}>")
def bit_xor(e: Emitter, form: Form) -> None:
    """d = a ^ b."""
    logic(e, form, "xor")


@isa.native(f"not.<type:pred|{BIT_SIZES}>")
def bit_not(e: Emitter, form: Form) -> None:
    """d = ~a."""
    if form.get("type") == "pred":
        e.store_pred(0, ~e.pred(1))
    else:
        e.store(0, ~e.load(1, f"i{bits_of(form.get('type'))}"))


@isa.native(f"cnot.<type:{BIT_SIZES}>")
def cnot(e: Emitter, form: Form) -> None:
    """d = a == 0."""
    a = e.load(1, f"i{bits_of(form.get('type'))}")
    e.store(0, e.cast("zext", e.icmp("eq", a, 0), a.kind))


def lookup3(e: Emitter, a: Value, b: Value, c: Value, table: Value) -> Value:
    """Compute a bitwise function of three inputs. Bit 4a + 2b + c of ``table``, by multiplexers."""
    level = [(table << (31 - k)).sar(31) for k in range(8)]
    for selector in (c, b, a):
        level = [(low & ~selector) | (high & selector) for low, high in zip(level[::2], level[1::2], strict=True)]
    return level[0]


@isa.native("lop3.b32")
def lop3(e: Emitter, form: Form) -> None:
    """d = table lookup of the bits of a, b, c."""
    e.store(0, lookup3(e, *(e.load(i, "i32") for i in (1, 2, 3, 4))))


@isa.native("lop3.<bool:or|and>.b32")
def lop3_bool(e: Emitter, form: Form) -> None:
    """d|p: the lookup, and p = (d != 0) BoolOp q."""
    d = lookup3(e, *(e.load(i, "i32") for i in (2, 3, 4, 5)))
    q = e.pred(6)
    e.store(0, d)
    e.store_pred(1, OPERATORS[form.get("bool")](e.bits(e.icmp("ne", d, 0)), q))


@isa.native("shf.<dir:l|r>.<mode:wrap|clamp>.b32")
def shf(e: Emitter, form: Form) -> None:
    """Shift {b, a}. The high 32 bits of a left shift, the low 32 bits of a right shift."""
    a, b, c = e.load(1, "i32"), e.load(2, "i32"), e.load(3, "i32")
    left = form.get("dir") == "l"
    d = e.intrinsic("llvm.fshl" if left else "llvm.fshr", b, a, c)
    if form.get("mode") == "clamp":
        d = e.select(e.icmp("ult", c, 32), d, a if left else b)
    e.store(0, d)


@isa.native(f"shl.<type:{BIT_SIZES}>")
def shl(e: Emitter, form: Form) -> None:
    """d = a << b; amounts beyond the width give 0."""
    kind = f"i{bits_of(form.get('type'))}"
    a = e.load(1, kind)
    amount, inside = shift_amount(e, e.load(2, "i32"), kind)
    e.store(0, e.select(inside, a << amount, 0))


@isa.native(f"shr.<type:{BIT_SIZES}|{INTEGERS}>")
def shr(e: Emitter, form: Form) -> None:
    """d = a >> b, with the sign for signed types; amounts are clamped to the width."""
    t = form.get("type")
    kind = f"i{bits_of(t)}"
    a, b = e.load(1, kind), e.load(2, "i32")
    if signed(t):
        e.store(0, a.sar(e.resize(e.intrinsic("llvm.umin", b, b.like(BITS[kind] - 1)), kind)))
        return
    amount, inside = shift_amount(e, b, kind)
    e.store(0, e.select(inside, a >> amount, 0))


# --- counts ---------------------------------------------------------------------------------------------------------


@isa.native("popc.<type:b32|b64>")
def popc(e: Emitter, form: Form) -> None:
    """d = number of one bits."""
    e.store(0, e.resize(e.intrinsic("llvm.ctpop", e.load(1, f"i{bits_of(form.get('type'))}")), "i32"))


def leading_zeros(e: Emitter, a: Value) -> Value:
    """Count leading zeros, i32; the width for 0."""
    return e.resize(e.intrinsic("llvm.ctlz", a, e.flag(False)), "i32")


@isa.native("clz.<type:b32|b64>")
def clz(e: Emitter, form: Form) -> None:
    """d = leading zeros."""
    e.store(0, leading_zeros(e, e.load(1, f"i{bits_of(form.get('type'))}")))


@isa.native("bfind[.<shift:shiftamt>].<type:u32|s32|u64|s64>")
def bfind(e: Emitter, form: Form) -> None:
    """Find the highest bit that is not sign; -1 if none.

    d is its position, or the left shift that brings it to the top.
    """
    t = form.get("type")
    width = bits_of(t)
    a = e.load(1, f"i{width}")
    if signed(t):
        a = a ^ a.sar(width - 1)
    zeros = leading_zeros(e, a)
    e.store(0, e.select(e.icmp("eq", a, 0), zeros.like(-1), zeros if form.has("shift") else (width - 1) - zeros))


@isa.native("brev.<type:b32|b64>")
def brev(e: Emitter, form: Form) -> None:
    """d = bits of a in reverse order."""
    e.store(0, e.intrinsic("llvm.bitreverse", e.load(1, f"i{bits_of(form.get('type'))}")))


@isa.native("fns.b32")
def fns(e: Emitter, form: Form) -> None:
    """Find the n-th set bit from ``base`` on; -1 if none.

    Upwards (offset > 0) or downwards (offset < 0).
    """
    mask, base, offset = e.load(1, "i32"), e.load(2, "i32") & 31, e.load(3, "i32")
    down = e.icmp("slt", offset, 0)
    # Downwards is upwards in the reversed mask.
    bits = e.select(down, e.intrinsic("llvm.bitreverse", mask), mask)
    start = e.select(down, 31 - base, base)
    bits = bits & (base.like(-1) << start)
    skip = e.intrinsic("llvm.abs", offset, e.flag(False)) - 1
    for k in range(31):
        bits = e.select(e.icmp("ugt", skip, k), bits & (bits - 1), bits)
    bits = e.select(e.icmp("ugt", skip, 31), bits.like(0), bits)
    found = e.resize(e.intrinsic("llvm.cttz", bits, e.flag(False)), "i32")
    found = e.select(down, 31 - found, found)
    found = e.select(e.icmp("eq", bits, 0), found.like(-1), found)
    here = e.select(e.icmp("ne", (mask >> base) & 1, 0), base, -1)
    e.store(0, e.select(e.icmp("eq", offset, 0), here, found))


# --- fields ---------------------------------------------------------------------------------------------------------


def low_bits(e: Emitter, count: Value, kind: str) -> Value:
    """``count`` (i32) one bits from bit 0; all ones from the width on."""
    amount, inside = shift_amount(e, count, kind)
    one = e.const(1, kind)
    return e.select(inside, (one << amount) - 1, -1)


@isa.native("bfe.<type:u32|s32|u64|s64>")
def bfe(e: Emitter, form: Form) -> None:
    """d = ``c`` bits of a from bit b, zero or sign extended. Bits beyond the top count as sign."""
    t = form.get("type")
    kind = f"i{bits_of(t)}"
    a = e.load(1, kind)
    if kind == "i64":  # a software routine, in which positions beyond 255 do not wrap (seen on an H200)
        pos, count = (e.intrinsic("llvm.umin", x, x.like(0xFF)) for x in (e.load(2, "i32"), e.load(3, "i32")))
    else:
        pos, count = e.load(2, "i32") & 0xFF, e.load(3, "i32") & 0xFF
    mask = low_bits(e, count, kind)
    if not signed(t):
        amount, inside = shift_amount(e, pos, kind)
        e.store(0, e.select(inside, a >> amount, 0) & mask)
        return
    last = BITS[kind] - 1
    shifted = a.sar(e.resize(e.intrinsic("llvm.umin", pos, pos.like(last)), kind))
    # The sign is bit count - 1 of what was shifted down; count 0 has none.
    top = e.intrinsic("llvm.umin", e.intrinsic("llvm.usub.sat", count, count.like(1)), count.like(last))
    sign = e.icmp("ne", (shifted >> e.resize(top, kind)) & 1, 0)
    extended = e.select(sign, shifted | ~mask, shifted & mask)
    e.store(0, e.select(e.icmp("eq", count, 0), extended.like(0), extended))


@isa.native("bfi.<type:b32|b64>")
def bfi(e: Emitter, form: Form) -> None:
    """f = b with ``d`` bits from bit c replaced by the low bits of a."""
    kind = f"i{bits_of(form.get('type'))}"
    a, b = e.load(1, kind), e.load(2, kind)
    pos, count = e.load(3, "i32") & 0xFF, e.load(4, "i32") & 0xFF
    amount, inside = shift_amount(e, pos, kind)
    mask = e.select(inside, low_bits(e, count, kind) << amount, 0)
    e.store(0, (b & ~mask) | ((a << amount) & mask))


@isa.native("bmsk.<mode:clamp|wrap>.b32")
def bmsk(e: Emitter, form: Form) -> None:
    """d = ``b`` one bits from bit ``a``."""
    a, b = e.load(1, "i32"), e.load(2, "i32")
    start, count = a & 31, b & 31
    if form.get("mode") == "clamp":
        count = e.select(e.icmp("ult", b, 32), count, 32)
    mask = low_bits(e, count, "i32") << start
    if form.get("mode") == "clamp":
        mask = e.select(e.icmp("ult", a, 32), mask, 0)
    e.store(0, mask)


@isa.native("szext.<mode:clamp|wrap>.<type:u32|s32>")
def szext(e: Emitter, form: Form) -> None:
    """d = low ``b`` bits of a, sign or zero extended."""
    a, b = e.load(1, "i32"), e.load(2, "i32")
    low = b & 31
    mask = (a.like(1) << low) - 1
    d = a & mask
    if signed(form.get("type")):
        sign = e.icmp("ne", (a >> ((low - 1) & 31)) & e.cast("zext", e.icmp("ne", low, 0), "i32"), 0)
        d = e.select(sign, d | ~mask, d)
    if form.get("mode") == "clamp":
        d = e.select(e.icmp("ult", b, 32), d, a)
    e.store(0, d)


# Selectors of the special modes of prmt for the control values 0..3, one nibble per destination byte.
PERMUTES = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}


@isa.native("prmt.b32[.<mode:f4e|b4e|rc8|ecl|ecr|rc16>]")
def prmt(e: Emitter, form: Form) -> None:
    """d = four bytes picked from {b, a}. In the general mode bit 3 of a selector replicates the byte's sign."""
    a, b, control = e.load(1, "i32"), e.load(2, "i32"), e.load(3, "i32")
    if form.has("mode"):
        table = PERMUTES[form.get("mode")]
        choice = control & 3
        control = choice.like(table[0])
        for k in (1, 2, 3):
            control = e.select(e.icmp("eq", choice, k), control.like(table[k]), control)
    d = None
    for k in range(4):
        selector = control >> (4 * k) if k else control
        word = e.select(e.icmp("ne", selector & 4, 0), b, a)
        byte = word >> ((selector & 3) << 3)
        if not form.has("mode"):
            sign = (byte << 24).sar(31)
            byte = e.select(e.icmp("ne", selector & 8, 0), sign, byte)
        byte = (byte & 0xFF) << (8 * k)
        d = byte if d is None else d | byte
    e.store(0, d)
