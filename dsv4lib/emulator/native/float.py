"""Implement floating-point add, sub, mul, fma, mad, min, max, neg and abs.

Also the exactly rounded div, rcp, sqrt.

All rounding modes are exact to the bit; see ``fp.py`` for how the 16-bit formats get there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from dsv4lib.emulator import isa
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.native import fp
from dsv4lib.emulator.native.irtools import Emitter, Value

ROUND = "rn|rz|rm|rp"
NAN_FILL = 0x7FF7  # of tensor maps that fill with NaN, either sign (units/tma_box.py)


def finish(e: Emitter, form: Form, x: Value, ptx: str | None = None, scaled: Value | None = None) -> None:
    """Store a result with the form's .ftz, .sat and .relu. ``scaled`` as in ``fp.store``."""
    t = ptx or form.get("type")
    fp.store(e, 0, x, t, ftz=form.has("ftz"), sat=form.has("sat"), positive=form.has("relu"), scaled=scaled)


def compute(e: Emitter, form: Form, op: str, values: Sequence[Value], scale: Sequence[int]) -> None:
    """One rounded operation and its store. To flush an f32 result it is computed a second time with the operands
    ``scale`` (their indices) times a power of two that makes it as much larger."""
    mode = form.get("round")
    scaled = None
    if form.has("ftz") and fp.element(form.get("type")) == "f32":
        larger = [v * fp.SCALE["f32"] if i in scale else v for i, v in enumerate(values)]
        scaled = e.rounded(op, mode, *larger)
    finish(e, form, e.rounded(op, mode, *values), scaled=scaled)


def operand(e: Emitter, form: Form, i: int) -> Value:
    """Load a source operand with the form's .ftz applied."""
    return fp.load(e, i, form.get("type"), ftz=form.has("ftz"))


def patterns(op: str) -> tuple[str, ...]:
    """List the variants of add, sub and mul."""
    return (
        f"{op}[.<round:{ROUND}>][.<ftz:ftz>][.<sat:sat>].<type:f32>",
        f"{op}[.<round:{ROUND}>][.<ftz:ftz>].<type:f32x2>",
        f"{op}[.<round:{ROUND}>].<type:f64>",
        f"{op}[.<round:rn>][.<ftz:ftz>][.<sat:sat>].<type:f16|f16x2>",
        f"{op}[.<round:rn>].<type:bf16|bf16x2>",
    )


@isa.native(*patterns("add"))
def add(e: Emitter, form: Form) -> None:
    """d = a + b."""
    finish(e, form, e.rounded("fadd", form.get("round"), operand(e, form, 1), operand(e, form, 2)))


@isa.native(*patterns("sub"))
def sub(e: Emitter, form: Form) -> None:
    """d = a - b."""
    finish(e, form, e.rounded("fsub", form.get("round"), operand(e, form, 1), operand(e, form, 2)))


@isa.native(*patterns("mul"))
def mul(e: Emitter, form: Form) -> None:
    """d = a * b.

    An f32 product of bf16 numbers is exact down to 2**-134, the tie between 0 and the smallest bf16; below it rounds
    to at most that tie, which goes to 0 as well. So rounding it again is as good as rounding once.
    """
    compute(e, form, "fmul", [operand(e, form, 1), operand(e, form, 2)], scale=[0])


@contextmanager
def inexact_product(e: Emitter, product: Value, a: Value, b: Value) -> Iterator[None]:
    """Open the block for warps with an inexact f32 product of bf16 numbers."""
    e.address(0), e.active()  # both paths store
    size = fp.magnitude(e, product)
    tiny = e.fcmp("olt", size, fp.SMALLEST_NORMAL["f32"]) & e.fcmp("one", a, 0.0) & e.fcmp("one", b, 0.0)
    rare = tiny | e.fcmp("oeq", size, float("inf"))
    with e.when(e.icmp("ne", e.bitcast(rare, f"i{rare.n}", 0), 0)):
        yield


def mixed(e: Emitter, form: Form, op: str) -> None:
    """add and sub of a 16-bit a and an f32 c."""
    a = fp.load(e, 1, form.get("type"))
    finish(e, form, e.rounded(op, form.get("round"), a, fp.load(e, 2, "f32")), "f32")


@isa.native(f"add[.<round:{ROUND}>][.<sat:sat>].f32.<type:f16|bf16>")
def add_mixed(e: Emitter, form: Form) -> None:
    """d = convert(a) + c."""
    mixed(e, form, "fadd")


@isa.native(f"sub[.<round:{ROUND}>][.<sat:sat>].f32.<type:f16|bf16>")
def sub_mixed(e: Emitter, form: Form) -> None:
    """d = convert(a) - c."""
    mixed(e, form, "fsub")


@isa.native(f"fma.<round:{ROUND}>[.<sat:sat>].f32.<type:f16|bf16>")
def fma_mixed(e: Emitter, form: Form) -> None:
    """d = convert(a) * convert(b) + c."""
    a, b = (fp.load(e, i, form.get("type")) for i in (1, 2))
    finish(e, form, e.rounded("fma", form.get("round"), a, b, fp.load(e, 3, "f32")), "f32")


@isa.native(
    f"fma.<round:{ROUND}>[.<ftz:ftz>][.<sat:sat>].<type:f32>",
    f"fma.<round:{ROUND}>[.<ftz:ftz>].<type:f32x2>",
    f"fma.<round:{ROUND}>.<type:f64>",
    f"mad.<round:{ROUND}>[.<ftz:ftz>][.<sat:sat>].<type:f32>",
    f"mad.<round:{ROUND}>.<type:f64>",
    note="mad.f32 and mad.f64 are fma, as on every sm_20 and later",
)
def fma(e: Emitter, form: Form) -> None:
    """d = a * b + c with one rounding."""
    compute(e, form, "fma", [operand(e, form, i) for i in (1, 2, 3)], scale=[0, 2])


@isa.native(
    "fma.rn[.<ftz:ftz>][.<sat:sat>].<type:f16|f16x2>",
    "fma.rn[.<ftz:ftz>].<relu:relu>.<type:f16|f16x2>",
    "fma.rn[.<relu:relu>].<type:bf16|bf16x2>",
    "fma.rn.<oob:oob>[.<relu:relu>].<type:f16|f16x2|bf16|bf16x2>",
    "fma.rn.<oob:oob>.<sat:sat>.<type:f16|f16x2>",
)
def fma_half(e: Emitter, form: Form) -> None:
    """d = a * b + c with one rounding, in a 16-bit format. f32 holds all bits of the product.

    ``.oob``: +0 if a or b is what a tensor copy fills in out of bounds; c does not count, and with ``.sat`` nothing
    does (both measured on an H200).
    """
    a, b, c = (operand(e, form, i) for i in (1, 2, 3))
    if form.has("oob") and not form.has("sat"):
        bits = [fp.load_bits(e, i, form.get("type")) & 0x7FFF for i in (1, 2)]
        outside = e.icmp("eq", bits[0], NAN_FILL) | e.icmp("eq", bits[1], NAN_FILL)
        a, b, c = (e.select(outside, x.like(0.0), x) for x in (a, b, c))
    product = a * b
    if fp.element(form.get("type")) == "bf16":
        with inexact_product(e, product, a, b):
            x, y, z = (e.cast("fpext", v, "f64") for v in (a, b, c))
            finish(e, form, fp.odd_f32(e, fp.to_odd(e, *fp.two_sum(e, x * y, z))))
            e.ret()
    finish(e, form, fp.to_odd(e, *fp.two_sum(e, product, c)))


# --- sign, minimum, maximum -----------------------------------------------------------------------------------------


@isa.native("neg[.<ftz:ftz>].<type:f32|f16|f16x2>", "neg.<type:f64|bf16|bf16x2>")
def neg(e: Emitter, form: Form) -> None:
    """d = -a."""
    sign_operation(e, form, lambda x: x ^ (1 << (int(x.kind[1:]) - 1)))


@isa.native("abs[.<ftz:ftz>].<type:f32|f16|f16x2>", "abs.<type:f64|bf16|bf16x2>")
def absolute(e: Emitter, form: Form) -> None:
    """d = |a|."""
    sign_operation(e, form, lambda x: x & ((1 << (int(x.kind[1:]) - 1)) - 1))


def sign_operation(e: Emitter, form: Form, change: Callable[[Value], Value]) -> None:
    """Compute neg and abs on the bits. With .ftz a fraction at exponent 0 is cleared; NaN is canonical (f64: kept)."""
    t = form.get("type")
    bits = fp.load_bits(e, 1, t)
    sign = 1 << (int(bits.kind[1:]) - 1)
    exponent = {"f32": 0x7F800000, "f16": 0x7C00, "bf16": 0x7F80, "f64": 0x7FF << 52}[fp.element(t)]
    if form.has("ftz"):
        bits = e.select(e.icmp("eq", bits & exponent, 0), bits & sign, bits)
    result = change(bits)
    if t != "f64":
        result = e.select(e.icmp("ugt", bits & (sign - 1), exponent), result.like(sign - 1), result)
    fp.store_bits(e, 0, result)


def extremum_patterns(op: str) -> tuple[str, ...]:
    """List the variants of min and max."""
    return (
        f"{op}[.<ftz:ftz>][.<nan:NaN>][.<xorsign:xorsign>.<abs:abs>].<type:f32|f16|f16x2>",
        f"{op}[.<ftz:ftz>][.<nan:NaN>].<abs:abs>.<type:f32>",
        f"{op}[.<nan:NaN>][.<xorsign:xorsign>.<abs:abs>].<type:bf16|bf16x2>",
        f"{op}.<type:f64>",
    )


def extremum(e: Emitter, form: Form, name: str) -> None:
    """Compute min and max of two or (f32) three operands. -0 < +0; a number wins over NaN unless .NaN is there."""
    count = 3 if len(e.leaves) == 4 and form.get("type") == "f32" and not form.has("xorsign") else 2
    values = [operand(e, form, i) for i in range(1, count + 1)]
    sign = None
    if form.has("xorsign"):
        kind = {"f32": "i32", "f64": "i64"}[values[0].kind]
        sign = e.bitcast(e.bitcast(values[0], kind) ^ e.bitcast(values[1], kind), values[0].kind)
    if form.has("abs"):
        values = [fp.magnitude(e, x) for x in values]
    intrinsic = f"llvm.{name}imum" + ("" if form.has("nan") else "num")
    result = values[0]
    for x in values[1:]:
        result = e.intrinsic(intrinsic, result, x)
    if sign is not None:
        result = e.intrinsic("llvm.copysign", result, sign)
    finish(e, form, result)


@isa.native(*extremum_patterns("min"))
def minimum(e: Emitter, form: Form) -> None:
    """d = min(a, b[, c])."""
    extremum(e, form, "min")


@isa.native(*extremum_patterns("max"))
def maximum(e: Emitter, form: Form) -> None:
    """d = max(a, b[, c])."""
    extremum(e, form, "max")


@isa.native("copysign.<type:f32|f64>")
def copysign(e: Emitter, form: Form) -> None:
    """d = magnitude of b with the sign of a."""
    t = form.get("type")
    a, b = fp.load_bits(e, 1, t), fp.load_bits(e, 2, t)
    sign = 1 << (int(a.kind[1:]) - 1)
    fp.store_bits(e, 0, (a & sign) | (b & (sign - 1)))


# --- exactly rounded division and roots -----------------------------------------------------------------------------


@isa.native(f"div.<round:{ROUND}>[.<ftz:ftz>].<type:f32>", f"div.<round:{ROUND}>.<type:f64>")
def div(e: Emitter, form: Form) -> None:
    """d = a / b."""
    compute(e, form, "fdiv", [operand(e, form, 1), operand(e, form, 2)], scale=[0])


@isa.native(f"rcp.<round:{ROUND}>[.<ftz:ftz>].<type:f32>", f"rcp.<round:{ROUND}>.<type:f64>")
def rcp(e: Emitter, form: Form) -> None:
    """d = 1 / a."""
    a = operand(e, form, 1)
    compute(e, form, "fdiv", [a.like(1.0), a], scale=[0])


@isa.native(f"sqrt.<round:{ROUND}>[.<ftz:ftz>].<type:f32>", f"sqrt.<round:{ROUND}>.<type:f64>")
def sqrt(e: Emitter, form: Form) -> None:
    """d = sqrt(a)."""
    finish(e, form, e.rounded("sqrt", form.get("round"), operand(e, form, 1)))


@isa.native("testp.<test:finite|infinite|number|notanumber|normal|subnormal>.<type:f32|f64>")
def testp(e: Emitter, form: Form) -> None:
    """p = class of a; zeros count as normal."""
    t = form.get("type")
    bits = fp.load_bits(e, 1, t)
    exponent, top = (0x7F800000, 0x7FFFFFFF) if t == "f32" else (0x7FF << 52, (1 << 63) - 1)
    size = bits & top
    unbounded = e.icmp("uge", size, exponent)
    nan = e.icmp("ugt", size, exponent)
    subnormal = e.icmp("eq", size & exponent, 0) & e.icmp("ne", size, 0)
    answers = {
        "finite": lambda: unbounded ^ 1,
        "infinite": lambda: e.icmp("eq", size, exponent),
        "number": lambda: nan ^ 1,
        "notanumber": lambda: nan,
        "normal": lambda: (unbounded | subnormal) ^ 1,
        "subnormal": lambda: subnormal,
    }
    e.store_pred(0, answers[form.get("test")]())
