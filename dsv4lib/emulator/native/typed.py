"""Load and store operands by PTX type name, for the integer and bit-size families."""

from __future__ import annotations

from dsv4lib.emulator.native.irtools import BITS, Emitter, Value

INTEGERS = "u16|u32|u64|s16|s32|s64"
BIT_SIZES = "b16|b32|b64"
SCALARS = f"{BIT_SIZES}|{INTEGERS}|f32|f64"


def bits_of(ptx: str) -> int:
    """Get the bits of a scalar PTX type or an element of a packed one.

    b32, s16, f64, ...
    """
    return 16 if ptx == "bf16" else int(ptx.removesuffix("x2").removesuffix("x4")[1:])


def signed(ptx: str) -> bool:
    """Tell whether a type is s16, s32, s64 or s16x2."""
    return ptx.startswith("s")


def load_int(e: Emitter, i: int, ptx: str) -> Value:
    """Load operand ``i`` of an integer or bit-size type; a packed pair is 64 lanes."""
    if ptx.endswith("x2"):
        return e.bitcast(e.load(i, "i32"), "i16")
    return e.load(i, f"i{bits_of(ptx)}")


def store_int(e: Emitter, i: int, value: Value) -> None:
    """Store an integer, the inverse of ``load_int``. 64 lanes of i16 go into one 32-bit register."""
    e.store(i, e.bitcast(value, "i32") if (value.kind, value.n) == ("i16", 64) else value)


def extend(e: Emitter, a: Value, ptx: str, kind: str) -> Value:
    """Widen an integer of PTX type ``ptx`` by its signedness."""
    return e.resize(a, kind, signed=signed(ptx))


def minmax(e: Emitter, name: str, ptx: str, a: Value, b: Value) -> Value:
    """Compute an integer minimum or maximum ("min", "max")."""
    return e.intrinsic(f"llvm.{'s' if signed(ptx) else 'u'}{name}", a, b)


def shift_amount(e: Emitter, amount: Value, kind: str) -> tuple[Value, Value]:
    """Load a u32 shift amount as ``kind`` and the flag that it is in range."""
    inside = e.icmp("ult", amount, BITS[kind])
    return e.resize(e.select(inside, amount, 0), kind), inside
