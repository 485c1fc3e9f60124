"""Implement cvt between integer and floating-point types, and cvt.pack. ``cvt_packed.py`` has the packed formats.

Registers may be wider than the type of the instruction: sources are read by their low bits, results are sign or zero
extended to the register, as the PTX ISA lays down for cvt.
"""

from __future__ import annotations

from collections.abc import Iterator

from dsv4lib.emulator import isa
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.native import fp, narrow
from dsv4lib.emulator.native.irtools import BITS, Emitter, Value
from dsv4lib.emulator.native.typed import bits_of, signed

INTEGERS = "u8|u16|u32|u64|s8|s16|s32|s64"
ROUND = "rn|rz|rm|rp"
TO_INTEGER = "rni|rzi|rmi|rpi"
ROUNDING = {"rni": "llvm.roundeven", "rzi": "llvm.trunc", "rmi": "llvm.floor", "rpi": "llvm.ceil"}


def load_wide(e: Emitter, i: int, bits: int) -> Value:
    """Load the low ``bits`` of operand ``i``, whose register may be wider."""
    return e.resize(e.load(i, f"i{max(bits, e.register_bits(i, bits))}"), f"i{bits}")


def store_wide(e: Emitter, i: int, value: Value, extend_sign: bool = False) -> None:
    """Write an integer result, extended to the register."""
    bits = e.register_bits(i, BITS[value.kind])
    e.store(i, e.resize(value, f"i{bits}", signed=extend_sign) if bits > BITS[value.kind] else value)


def load_float(e: Emitter, form: Form, i: int, ptx: str) -> Value:
    """Load operand ``i`` as f32 or f64; .ftz flushes f32 alone."""
    x = fp.widen(e, load_wide(e, i, bits_of(ptx)), ptx)
    return fp.flush(e, x, fp.SMALLEST_NORMAL["f32"]) if form.has("ftz") and ptx == "f32" else x


def _saturating() -> Iterator[str]:
    """Conversions that .sat applies to: from types with values that the destination does not have."""
    types = INTEGERS.split("|")
    for dtype in types:
        wider = [t for t in types if bits_of(t) > bits_of(dtype) or (bits_of(t) == bits_of(dtype) and t != dtype)]
        if not signed(dtype):
            wider += [t for t in types if signed(t) and bits_of(t) < bits_of(dtype)]
        yield f"cvt.<sat:sat>.<dtype:{dtype}>.<atype:{'|'.join(wider)}>"


@isa.native(f"cvt.<dtype:{INTEGERS}>.<atype:{INTEGERS}>", *_saturating())
def integer_to_integer(e: Emitter, form: Form) -> None:
    """Truncate or extend; .sat clamps to the destination's range."""
    dtype, atype = form.get("dtype"), form.get("atype")
    a = load_wide(e, 1, bits_of(atype))
    if form.has("sat"):
        a = clamp(e, a, atype, dtype)
    store_wide(e, 0, e.resize(a, f"i{bits_of(dtype)}", signed=signed(atype)), signed(dtype))


def clamp(e: Emitter, a: Value, atype: str, dtype: str) -> Value:
    """Clamp ``a`` to the values that ``dtype`` has in common with ``atype``."""
    width, target = bits_of(atype), bits_of(dtype)
    top = (1 << (target - 1 if signed(dtype) else target)) - 1
    if not signed(atype):
        return e.intrinsic("llvm.umin", a, a.like(top)) if top < (1 << width) - 1 else a
    bottom = -(1 << (target - 1)) if signed(dtype) else 0
    if bottom > -(1 << (width - 1)):
        a = e.intrinsic("llvm.smax", a, a.like(bottom))
    return e.intrinsic("llvm.smin", a, a.like(top)) if top < (1 << (width - 1)) - 1 else a


@isa.native(
    f"cvt.<round:{TO_INTEGER}>[.<ftz:ftz>][.<sat:sat>].<dtype:{INTEGERS}>.<atype:f32>",
    f"cvt.<round:{TO_INTEGER}>[.<sat:sat>].<dtype:{INTEGERS}>.<atype:f16|f64>",
    f"cvt.<round:{TO_INTEGER}>.<dtype:{INTEGERS}>.<atype:bf16>",
)
def float_to_integer(e: Emitter, form: Form) -> None:
    """Round to an integer and clamp. NaN gives 0, or the top bit alone if f64 or a 64-bit integer is involved."""
    dtype, atype = form.get("dtype"), form.get("atype")
    x = e.intrinsic(ROUNDING[form.get("round")], load_float(e, form, 1, atype))
    kind = f"i{bits_of(dtype)}"
    top = 2.0 ** (BITS[kind] - signed(dtype))
    bottom = -top if signed(dtype) else 0.0
    inside = e.fcmp("oge", x, bottom) & e.fcmp("olt", x, top)
    d = e.cast("fptosi" if signed(dtype) else "fptoui", e.select(inside, x, 0.0), kind)
    if signed(dtype):
        d = e.select(e.fcmp("olt", x, bottom), d.like(1 << (BITS[kind] - 1)), d)
    d = e.select(e.fcmp("oge", x, top), d.like((1 << (BITS[kind] - signed(dtype))) - 1), d)
    if atype == "f64" or kind == "i64":
        d = e.select(fp.is_nan(e, x), d.like(1 << (BITS[kind] - 1)), d)
    store_wide(e, 0, d, signed(dtype))


@isa.native(
    f"cvt.<round:{ROUND}>[.<ftz:ftz>][.<sat:sat>].<dtype:f32>.<atype:{INTEGERS}>",
    f"cvt.<round:{ROUND}>[.<sat:sat>].<dtype:f16|f64>.<atype:{INTEGERS}>",
    f"cvt.<round:{ROUND}>.<dtype:bf16>.<atype:{INTEGERS}>",
)
def integer_to_float(e: Emitter, form: Form) -> None:
    """Round an integer to a floating-point type."""
    dtype, atype, mode = form.get("dtype"), form.get("atype"), form.get("round")
    a = load_wide(e, 1, bits_of(atype))
    if dtype == "f64":
        x = integer_to_f64(e, a, atype, mode)
    elif mode == "rn" and dtype == "f32":
        x = e.cast("sitofp" if signed(atype) else "uitofp", a, "f32")
    else:
        x = integer_to_odd_f64(e, a, atype)
    store_float(e, form, x, dtype, mode)


def integer_to_f64(e: Emitter, a: Value, atype: str, mode: str) -> Value:
    """Round correctly in any mode. The high and low words are exact, their sum rounds once."""
    op = "sitofp" if signed(atype) else "uitofp"
    if a.kind != "i64" or mode == "rn":
        return e.cast(op, a, "f64")
    high = e.cast(op, a.sar(32) if signed(atype) else a >> 32, "f64") * 2.0**32
    return e.rounded("fadd", mode, high, e.cast("uitofp", a & 0xFFFFFFFF, "f64"))


def integer_to_odd_f64(e: Emitter, a: Value, atype: str) -> Value:
    """Convert to f64, exact or rounded to odd. A later rounding to a narrower type is then right."""
    op = "sitofp" if signed(atype) else "uitofp"
    if a.kind != "i64":
        return e.cast(op, a, "f64")
    size = e.intrinsic("llvm.abs", a, e.flag(False)) if signed(atype) else a
    large = e.icmp("uge", size, 1 << 53)
    sticky = e.cast("zext", e.icmp("ne", size & 0x7FF, 0), "i64")
    compressed = e.cast("uitofp", (size >> 11) | sticky, "f64") * 2048.0
    x = e.select(large, compressed, e.cast("uitofp", e.select(large, size.like(0), size), "f64"))
    return e.select(e.icmp("slt", a, 0), -x, x) if signed(atype) else x


def store_float(e: Emitter, form: Form, x: Value, dtype: str, mode: str) -> None:
    """Round f32 or f64 lanes to ``dtype`` and write operand 0.

    Applies .ftz, .sat, .relu and .satfinite.
    """
    sat, satfinite, relu = form.has("sat"), form.has("satfinite"), form.has("relu")
    if dtype == "f64":
        x = x if x.kind == "f64" else e.cast("fpext", x, "f64")
        store_wide(e, 0, e.bitcast(fp.saturate(e, x) if sat else x, "i64"))
    elif dtype == "f32":
        y = x if x.kind == "f32" else e.rounded("fptrunc", mode, x, kind="f32")
        if form.has("ftz"):
            scale = fp.SCALE["f32"]
            scaled = None if x.kind == "f32" else e.rounded("fptrunc", mode, x * scale, kind="f32")
            y = fp.flush(e, y, fp.SMALLEST_NORMAL["f32"], scaled, scale)
        if sat:
            y = fp.saturate(e, y)
        elif x.kind == "f32":  # of an f64 NaN the top of the payload survives
            y = fp.canonical(e, y)
        store_wide(e, 0, e.bitcast(y, "i32"))
    else:
        y = x if x.kind == "f32" else fp.odd_f32(e, x)
        y = fp.saturate(e, y) if sat else y  # 0 and 1 are exact: clamping before rounding changes nothing
        code = narrow16(e, y, dtype, mode, satfinite, relu)
        if x.kind == "f64" and not sat:
            code = e.select(fp.is_nan(e, x), truncated_nan(e, y, dtype), code)
        store_wide(e, 0, code)


def truncated_nan(e: Emitter, x: Value, ptx: str) -> Value:
    """Convert a quiet f32 NaN to f16 or bf16 with its sign and the top of its payload."""
    bits = e.bitcast(x, "i32")
    if ptx == "bf16":
        return e.cast("trunc", bits >> 16, "i16")
    return e.cast("trunc", ((bits >> 16) & 0x8000) | ((bits >> 13) & 0x3FF) | 0x7C00, "i16")


def narrow16(e: Emitter, x: Value, ptx: str, mode: str, satfinite: bool = False, relu: bool = False) -> Value:
    """Convert f32 to the 16-bit codes of f16 or bf16, i16 lanes."""
    if mode in ("", "rn"):
        code = fp.narrow(e, fp.relu(e, x) if relu else x, ptx)
        form = narrow.FORMATS[ptx]
        return e.select(e.icmp("eq", code & 0x7FFF, form.infinity), code - 1, code) if satfinite else code
    return e.cast("trunc", narrow.encode(e, x, ptx, mode or "rn", satfinite, relu), "i16")


@isa.native(
    "cvt[.<ftz:ftz>][.<sat:sat>].<dtype:f32>.<atype:f16>",
    "cvt.<ftz:ftz>[.<sat:sat>].<dtype:f32>.<atype:f32>",
    "cvt.<sat:sat>.<dtype:f32>.<atype:f32>",
    "cvt.<ftz:ftz>.<dtype:f32>.<atype:bf16>",
    "cvt[.<ftz:ftz>][.<sat:sat>].<dtype:f64>.<atype:f32>",
    "cvt[.<sat:sat>].<dtype:f64>.<atype:f16|f64>",
    "cvt.<dtype:f64>.<atype:bf16>",
    "cvt[.<sat:sat>].<dtype:f16>.<atype:f16>",
    "cvt.<dtype:bf16>.<atype:bf16>",
    "cvt.<dtype:bf16>.<atype:f16>",
    "cvt.<dtype:f16>.<atype:bf16>",
)
def widening(e: Emitter, form: Form) -> None:
    """Convert without rounding. Between f16 and bf16 to nearest, as ptxas reads what has no rounding modifier."""
    store_float(e, form, load_float(e, form, 1, form.get("atype")), form.get("dtype"), "rn")


@isa.native("cvt.f32.f32", "cvt.f32.<atype:bf16>")
def same_number(e: Emitter, form: Form) -> None:
    """Convert f32 or bf16 to f32: the bits stay, those of a NaN too."""
    if form.has("atype"):
        store_wide(e, 0, e.cast("zext", load_wide(e, 1, 16), "i32") << 16)
    else:
        store_wide(e, 0, load_wide(e, 1, 32))


@isa.native(
    f"cvt.<round:{ROUND}>[.<ftz:ftz>][.<sat:sat>].<dtype:f32>.<atype:f64>",
    f"cvt.<round:{ROUND}>[.<ftz:ftz>][.<sat:sat>].<dtype:f16>.<atype:f32>",
    f"cvt.<round:{ROUND}>[.<ftz:ftz>].<dtype:bf16>.<atype:f32>",
    f"cvt.<round:{ROUND}>[.<sat:sat>].<dtype:f16>.<atype:f64>",
    f"cvt.<round:{ROUND}>.<dtype:f16>.<atype:bf16>",
    f"cvt.<round:{ROUND}>.<dtype:bf16>.<atype:f64|f16>",
    "cvt.<round:rn|rz>.<relu:relu>[.<satfinite:satfinite>].<dtype:f16|bf16>.<atype:f32>",
    "cvt.<round:rn|rz>.<satfinite:satfinite>.<dtype:f16|bf16>.<atype:f32>",
)
def narrowing(e: Emitter, form: Form) -> None:
    """Convert to a narrower (or the other 16-bit) format."""
    x = load_float(e, form, 1, form.get("atype"))
    store_float(e, form, x, form.get("dtype"), form.get("round"))


@isa.native(
    f"cvt.<round:{TO_INTEGER}>[.<ftz:ftz>][.<sat:sat>].<dtype:f32>.f32",
    f"cvt.<round:{TO_INTEGER}>[.<sat:sat>].<dtype:f64>.f64",
    f"cvt.<round:{TO_INTEGER}>[.<sat:sat>].<dtype:f16>.f16",
    f"cvt.<round:{TO_INTEGER}>.<dtype:bf16>.bf16",
)
def round_to_integer(e: Emitter, form: Form) -> None:
    """Round to an integral value in the same type."""
    dtype = form.get("dtype")
    x = e.intrinsic(ROUNDING[form.get("round")], load_float(e, form, 1, dtype))
    store_float(e, form, x, dtype, "rn")


@isa.native(
    "cvt.<round:rna>[.<satfinite:satfinite>].tf32.f32",
    "cvt.<round:rn|rz>[.<satfinite:satfinite>][.<relu:relu>].tf32.f32",
)
def tf32(e: Emitter, form: Form) -> None:
    """f32 to tf32: 10 fraction bits, the low 13 bits of the register are 0. A NaN becomes 0x7fffe000; .rna, which is an
    addition to the bits on hardware, merely cuts it off, so that it may end as infinity."""
    x = fp.load(e, 1, "f32")
    code = narrow.encode(e, x, "tf32", form.get("round"), form.has("satfinite"), form.has("relu")) << 13
    if form.get("round") == "rna":
        code = e.select(fp.is_nan(e, x), e.bitcast(x, "i32") & ~0x1FFF, code)
    e.store(0, code)


@isa.native("cvt.pack.sat.<to:u16|s16>.s32", "cvt.pack.sat.<to:u2|s2|u4|s4|u8|s8>.s32.b32")
def pack(e: Emitter, form: Form) -> None:
    """d = saturated a and b next to each other, b lower. Below 16 bits c is shifted up above them."""
    to = form.get("to")
    bits = bits_of(to)
    a, b = (clamp(e, e.load(i, "i32"), "s32", to) & ((1 << bits) - 1) for i in (1, 2))
    d = (a << bits) | b
    e.store(0, d if bits == 16 else d | (e.load(3, "i32") << (2 * bits)))
