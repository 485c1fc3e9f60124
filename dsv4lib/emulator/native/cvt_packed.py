"""Implement cvt of packed pairs. f16x2, bf16x2, 8-, 6- and 4-bit floats, ue8m0 scales, s2f6 fixed point.

The first source (or the upper half of a packed one) becomes the upper half of the result. Registers of the 4-bit pair
types have 8 bits, all others 16 or 32. ``.scaled::n2::ue8m0`` brings a pair of power-of-two scales as last operand.
"""

from __future__ import annotations

from dsv4lib.emulator import isa
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.native import fp, narrow
from dsv4lib.emulator.native.cvt import load_wide, narrow16, store_wide
from dsv4lib.emulator.native.irtools import Emitter, Value

SMALL = "e4m3x2|e5m2x2|e2m3x2|e3m2x2|e2m1x2"
CLAMPS = "[.<relu:relu>][.<satfinite:satfinite>]"
SCALED = "[.<scaled:scaled::n2::ue8m0>]"


def store_pair(e: Emitter, high: Value, low: Value, step: int, bits: int) -> None:
    """Write operand 0: two i32 codes, ``step`` bits apart, in ``bits`` bits."""
    store_wide(e, 0, e.resize((high << step) | low, f"i{bits}"))


def halves(e: Emitter, i: int, ptx: str) -> list[Value]:
    """Load an f16x2 or bf16x2 operand ``i`` as two f32 values, the upper first."""
    pair = e.load(i, "i32")
    return [fp.widen(e, e.cast("trunc", half, "i16"), ptx) for half in (pair >> 16, pair)]


def codes(e: Emitter, i: int, ptx: str) -> list[Value]:
    """Load operand ``i`` of a small packed type as two i32 codes, the upper one first."""
    step = 4 if ptx == "e2m1x2" else 8
    pair = e.resize(load_wide(e, i, 2 * step), "i32")
    return [pair >> step, pair & ((1 << step) - 1)]


def scales(e: Emitter, form: Form, i: int) -> list[Value | None]:
    """Load the pair of scale factors of a scaled form as f32."""
    if not form.has("scaled"):
        return [None, None]
    return [narrow.decode_ue8m0(e, code) for code in codes(e, i, "ue8m0x2")]


@isa.native(f"cvt.<round:rn|rz>{CLAMPS}.<dtype:f16x2|bf16x2>.f32")
def to_half_pair(e: Emitter, form: Form) -> None:
    """Convert two f32 to f16x2 or bf16x2."""
    flags = form.get("round"), form.has("satfinite"), form.has("relu")
    a, b = (narrow16(e, fp.load(e, i, "f32"), fp.element(form.get("dtype")), *flags) for i in (1, 2))
    e.store(0, e.pack([b, a], "i32"))


@isa.native(
    f"cvt.rs{CLAMPS}.<dtype:f16x2|bf16x2>.f32",
    note="subnormal results add the random bits to the highest that are dropped (the ISA does not say); to four small "
    "values: refused, the ISA shows which random bits each takes in a figure alone",
)
def to_random_pair(e: Emitter, form: Form) -> None:
    """Round two f32 to f16x2 or bf16x2 stochastically.

    Away from zero if the random bits and the dropped bits carry.

    The upper half of the random number rounds the upper value; of each half f16 takes the low 13 bits, bf16 all.
    """
    name, random = fp.element(form.get("dtype")), e.load(3, "i32")
    flags = name, "rs", form.has("satfinite"), form.has("relu")
    high, low = (narrow.encode(e, fp.load(e, i, "f32"), *flags, bits) for i, bits in ((1, random >> 16), (2, random)))
    e.store(0, (high << 16) | low)


def to_small(e: Emitter, form: Form, values: list[Value]) -> None:
    """Convert two f32 values to a pair of a small format."""
    dtype = form.get("dtype")
    high, low = (narrow.encode(e, x, fp.element(dtype), "rn", True, form.has("relu")) for x in values)
    step = 4 if dtype == "e2m1x2" else 8
    store_pair(e, high, low, step, 2 * step)


@isa.native(f"cvt.rn.satfinite[.<relu:relu>].<dtype:{SMALL}>.f32")
def f32_to_small(e: Emitter, form: Form) -> None:
    """Convert two f32 to two codes, saturating."""
    to_small(e, form, [fp.load(e, i, "f32") for i in (1, 2)])


@isa.native(f"cvt.rn.satfinite[.<relu:relu>].<dtype:{SMALL}>.<atype:f16x2|bf16x2>")
def half_pair_to_small(e: Emitter, form: Form) -> None:
    """Convert f16x2 or bf16x2 to two codes, saturating."""
    to_small(e, form, halves(e, 1, form.get("atype")))


@isa.native(f"cvt.rn[.<relu:relu>].f16x2.<atype:{SMALL}>")
def small_to_f16(e: Emitter, form: Form) -> None:
    """Convert two codes to f16x2; exact."""
    high, low = (narrow.decode(e, c, fp.element(form.get("atype"))) for c in codes(e, 1, form.get("atype")))
    flags = "rn", False, form.has("relu")
    e.store(0, e.pack([narrow16(e, low, "f16", *flags), narrow16(e, high, "f16", *flags)], "i32"))


@isa.native(f"cvt.rn{CLAMPS}{SCALED}.bf16x2.<atype:{SMALL}|s2f6x2>")
def small_to_bf16(e: Emitter, form: Form) -> None:
    """Convert two codes, times their scales, to bf16x2."""
    atype = form.get("atype")
    results = []
    for code, scale in zip(codes(e, 1, atype), scales(e, form, 2), strict=True):
        x = narrow.decode_s2f6(e, code) if atype == "s2f6x2" else narrow.decode(e, code, fp.element(atype))
        x = x if scale is None else x * scale
        results.append(narrow16(e, x, "bf16", "rn", form.has("satfinite"), form.has("relu")))
    e.store(0, e.pack(results[::-1], "i32"))


@isa.native(f"cvt.rn.satfinite[.<relu:relu>]{SCALED}.s2f6x2.<atype:f32|bf16x2>")
def to_s2f6(e: Emitter, form: Form) -> None:
    """Convert two values, divided by their scales, to signed bytes in units of 1/64."""
    if form.get("atype") == "f32":
        values, last = [fp.load(e, i, "f32") for i in (1, 2)], 3
    else:
        values, last = halves(e, 1, "bf16x2"), 2
    factors = scales(e, form, last)
    high, low = (narrow.encode_s2f6(e, x, s, form.has("relu")) for x, s in zip(values, factors, strict=True))
    store_pair(e, high, low, 8, 16)


@isa.native("cvt.<round:rz|rp>[.<satfinite:satfinite>].ue8m0x2.<atype:f32|bf16x2>")
def to_ue8m0(e: Emitter, form: Form) -> None:
    """Convert two magnitudes to powers of two."""
    values = [fp.load(e, i, "f32") for i in (1, 2)] if form.get("atype") == "f32" else halves(e, 1, "bf16x2")
    high, low = (narrow.encode_ue8m0(e, x, form.get("round"), form.has("satfinite")) for x in values)
    store_pair(e, high, low, 8, 16)


@isa.native("cvt.rn.bf16x2.ue8m0x2")
def from_ue8m0(e: Emitter, form: Form) -> None:
    """Convert two scales to bf16x2; exact."""
    high, low = (narrow16(e, narrow.decode_ue8m0(e, c), "bf16", "rn") for c in codes(e, 1, "ue8m0x2"))
    e.store(0, e.pack([low, high], "i32"))
