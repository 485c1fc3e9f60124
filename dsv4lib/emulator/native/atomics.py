"""Implement atom and red. Read, combine, write, lane by lane in ascending order, one that hardware may take.

Floating-point sums round to nearest even. f32 sums in global memory flush subnormal operands and results to zero, in
shared memory they do not. NaN results are canonical, but f64 sums return the operand that is NaN (the instruction's
before memory's), made quiet in shared memory only. Source: PTX ISA, "Parallel Synchronization and Communication
Instructions": atom, red; what it leaves open (NaN bits, signed zeros) as measured on an H200.
"""

from __future__ import annotations

from dsv4lib.emulator import isa
from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.native import abi
from dsv4lib.emulator.native.access import addresses, finish, lane_of, pointer_of, space_of, spill
from dsv4lib.emulator.native.access_log import COUNTS, READ, STRONG, WRITE, log
from dsv4lib.emulator.native.irtools import Emitter, Value
from dsv4lib.emulator.native.memory import element_bits, get, put, source, target

_SHARED = "<space:shared|shared::cta|shared::cluster>"
_SCOPE = "<scope:cta|cluster|gpu|sys>"
_HINT = "[.<hint:L2::cache_hint>]"
# What follows the state space; HINT stands where cache policies are allowed, in global memory. So are vectors.
_SCALAR = (
    "<op:and|or|xor>HINT.<type:b32|b64>",
    "<op:add>HINT.<type:u32|s32|u64|f32|f64>",
    "<op:add>.noftzHINT.<type:f16|f16x2|bf16|bf16x2>",
    "<op:inc|dec>HINT.<type:u32>",
    "<op:min|max>HINT.<type:u32|s32|u64|s64>",
)
_VECTOR = (
    "<op:add>HINT.<vec:v2|v4>.<type:f32>",
    "<op:add|min|max>.noftzHINT.<vec:v2|v4|v8>.<type:f16|bf16>",
    "<op:add|min|max>.noftzHINT.<vec:v2|v4>.<type:f16x2|bf16x2>",
)
_EXCHANGE = ("<op:exch>HINT.<type:b32|b64|b128>",)
_COMPARE = ("<op:cas>.<type:b16|b32|b64|b128>",)


def _variants(base: str, semantics: str, tails: tuple[str, ...], vectors: tuple[str, ...]) -> list[str]:
    head = f"{base}[.<sem:{semantics}>][.{_SCOPE}]"
    out = [f"{head}[.<space:global>].{tail.replace('HINT', _HINT)}" for tail in (*tails, *vectors)]
    return out + [f"{head}.{_SHARED}.{tail.replace('HINT', '')}" for tail in tails]


ATOMS = _variants("atom", "relaxed|acquire|release|acq_rel", _SCALAR + _EXCHANGE + _COMPARE, _VECTOR)
REDS = _variants("red", "relaxed|release", _SCALAR, _VECTOR)


@isa.native(*ATOMS)
def atom(e: Emitter, form: Form) -> None:
    """Update memory atomically; d = the old value."""
    _atomic(e, form, e.groups[0], e.groups[1][0], e.groups[2:])


@isa.native(*REDS)
def red(e: Emitter, form: Form) -> None:
    """Update memory atomically, without a result."""
    _atomic(e, form, None, e.groups[0][0], e.groups[1:])


def _atomic(e: Emitter, form: Form, old: range | None, base: int, inputs: list[range]) -> None:
    ptx, op = form.get("type"), form.get("op")
    bits, n = element_bits(ptx.removesuffix("x2")) * (2 if ptx.endswith("x2") else 1), int(form.get("vec", "v1")[1:])
    space = space_of(form.get("space"))
    inputs = inputs[: 2 if op == "cas" else 1]
    for group in [*inputs, *([old] if old is not None else [])]:
        if len(group) != n and not (len(group) == 1 and e.leaves[group[0]] == "_"):
            raise EmulatorError(f"{form.opcode} needs {n} registers, not {len(group)}")
    slot = spill(e, addresses(e, base))
    sources = [[source(e, i, bits) for i in group] for group in inputs]
    targets = [None if e.leaves[i] == "_" else target(e, i, bits) for i in old or []]
    with e.each_lane() as lane:
        address = lane_of(e, slot, lane, "i64")
        if space != "global":  # an atomic also reads: the bytes must have been written
            pointer_of(e, space, False, address, n * bits // 8, lane)
        pointer = pointer_of(e, space, True, address, n * bits // 8, lane)
        in_global = _in_global(e, space, address) if ptx in ("f32", "f64") else None
        for k in range(n):
            at = e.pointer(pointer, k * bits // 8)
            before = e.line(f"load i{bits}, ptr {at.ref}, align {bits // 8}", f"i{bits}", 0)
            values = [get(e, group[k], lane, bits) for group in sources]
            after = combine(e, op, ptx, before, values, in_global)
            e.raw(f"store {after.typed}, ptr {at.ref}, align {bits // 8}")
            if k < len(targets) and targets[k] is not None:
                put(e, targets[k], lane, before, "b")
    sums = COUNTS if ptx.startswith(("f", "bf")) else 0
    log(e, space, slot, n * bits // 8, e.mask(), READ | WRITE | STRONG | sums)
    finish(e, space)


def _in_global(e: Emitter, space: str, address: Value) -> Value:
    """Scalar i1: the access goes to global memory."""
    if space != "generic":
        return e.const(int(space == "global"), "i1", 0)
    return e.icmp("ne", address >> 56, abi.SHARED_WINDOW >> 56)


def combine(e: Emitter, op: str, ptx: str, a: Value, values: list[Value], in_global: Value | None) -> Value:
    """Compute the new memory contents of scalar ``a`` and the operands. ``in_global`` is needed for f32 and f64."""
    b = values[0]
    if op == "cas":
        return e.select(e.icmp("eq", a, b), values[1], a)
    if op == "exch":
        return b
    if op in ("and", "or", "xor"):
        return e.binary(op, a, b)
    if op == "inc":  # counts 0 .. b, then 0 again
        return e.select(e.icmp("uge", a, b), a.like(0), a + 1)
    if op == "dec":
        reload = e.icmp("eq", a, 0) | e.icmp("ugt", a, b)
        return e.select(reload, b, a - 1)
    if ptx.endswith("x2"):
        low = _half(e, op, ptx[:-2], e.cast("trunc", a, "i16"), e.cast("trunc", b, "i16"))
        high = _half(e, op, ptx[:-2], e.cast("trunc", a >> 16, "i16"), e.cast("trunc", b >> 16, "i16"))
        return e.cast("zext", low, "i32") | (e.cast("zext", high, "i32") << 16)
    if ptx in ("f16", "bf16"):
        return _half(e, op, ptx, a, b)
    if ptx in ("f32", "f64"):
        assert in_global is not None
        return (_sum32 if ptx == "f32" else _sum64)(e, a, b, in_global)
    if op == "add":
        return a + b
    signed = "s" if ptx.startswith("s") else "u"
    return e.intrinsic(f"llvm.{signed}{op}", a, b)


def _sum32(e: Emitter, a: Value, b: Value, in_global: Value) -> Value:
    """f32 addition on bit patterns."""

    def flushed(x: Value) -> Value:
        small = e.icmp("eq", x & 0x7F800000, 0) & in_global
        return e.select(small, x & 0x80000000, x)

    total = e.bitcast(flushed(a), "f32") + e.bitcast(flushed(b), "f32")
    bits = flushed(e.bitcast(total, "i32"))
    return e.select(e.fcmp("uno", total, total), e.const(0x7FFFFFFF, "i32", 0), bits)


def _sum64(e: Emitter, a: Value, b: Value, in_global: Value) -> Value:
    """f64 addition on bit patterns."""
    x, y = e.bitcast(a, "f64"), e.bitcast(b, "f64")
    quiet = e.select(in_global, a.like(0), 1 << 51)
    bits = e.select(e.fcmp("uno", x, x), a | quiet, e.bitcast(x + y, "i64"))
    return e.select(e.fcmp("uno", y, y), b | quiet, bits)


def _half(e: Emitter, op: str, ptx: str, a: Value, b: Value) -> Value:
    """f16 or bf16 on bit patterns, computed in f32 and rounded once."""

    def widen(x: Value) -> Value:
        if ptx == "f16":
            return e.cast("fpext", e.bitcast(x, "f16", 0), "f32")
        return e.bitcast(e.cast("zext", x, "i32") << 16, "f32")

    x, y = widen(a), widen(b)
    value = x + y if op == "add" else e.intrinsic(f"llvm.{op}imumnum", x, y)
    if ptx == "f16":
        bits = e.bitcast(e.cast("fptrunc", value, "f16"), "i16")
    else:
        wide = e.bitcast(value, "i32", 0)
        rounded = wide + 0x7FFF + ((wide >> 16) & 1)
        bits = e.cast("trunc", rounded >> 16, "i16")
    return e.select(e.fcmp("uno", value, value), e.const(0x7FFF, "i16", 0), bits)
