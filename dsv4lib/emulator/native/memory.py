"""Implement ld, ldu and st with bounds and alignment checks.

Of every state space, type and vector.

Memory operations of a warp are performed in program order and become visible at once, which is one of the executions
that every ordering semantics (weak, relaxed, acquire, release, volatile, mmio) allows. Cache operators, eviction
priorities, prefetch sizes and cache policies are hints; all are accepted by name, none by accident.
Source: PTX ISA, "Data Movement and Conversion Instructions": ld, ld.global.nc, ldu, st.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from dsv4lib.emulator import isa
from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.native import abi
from dsv4lib.emulator.native.access import Checked, addresses, check_all, finish, lane_of, pointer_of, space_of, spill
from dsv4lib.emulator.native.access_log import READ, STRONG, WRITE, log, unchanged
from dsv4lib.emulator.native.counters import count
from dsv4lib.emulator.native.irtools import BITS, Emitter, Value

TYPES = "b8|b16|b32|b64|b128|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64"
_GLOBAL = "[.<space:global>]"  # or generic
_SHARED = "<space:shared|shared::cta|shared::cluster>"
_OTHER = "<space:const|local|param|param::entry>"
_SCOPE = "<scope:cta|cluster|gpu|sys>"
_L1 = "<l1:L1::evict_normal|L1::evict_unchanged|L1::evict_first|L1::evict_last|L1::no_allocate>"
_L2 = "<l2:L2::evict_normal|L2::evict_first|L2::evict_last>"
_HINT = "[.<hint:L2::cache_hint>]"
_FETCH = "[.<prefetch:L2::64B|L2::128B|L2::256B>]"
_TAIL = f"[.<vec:v2|v4|v8>].<type:{TYPES}>"
_NARROW = f"[.<vec:v2|v4>].<type:{TYPES}>"
# L2 eviction priorities exist for 32-byte accesses only.
_WIDE = (".<vec:v8>.<type:b32|u32|s32|f32>", ".<vec:v4>.<type:b64|u64|s64|f64>")


def _evicting(head: str, tail: str) -> list[str]:
    """List the variants with eviction priorities: ``head``, L1 priority and, for wide accesses, L2 priority."""
    return [f"{head}[.{_L1}]{_HINT}{tail}{_TAIL}", *(f"{head}[.{_L1}].{_L2}{_HINT}{tail}{wide}" for wide in _WIDE)]


LOADS = (
    *_evicting(f"ld[.<weak:weak>]{_GLOBAL}", _FETCH),
    f"ld[.<weak:weak>]{_GLOBAL}.<cop:ca|cg|cs|lu|cv>{_HINT}{_FETCH}{_TAIL}",
    f"ld[.<weak:weak>].{_SHARED}[.<cop:ca|cg|cs|lu|cv>]{_NARROW}",
    f"ld[.<weak:weak>].{_OTHER}[.<cop:ca|cg|cs|lu|cv>]{_NARROW}",
    f"ld.volatile{_GLOBAL}{_FETCH}{_TAIL}",
    f"ld.volatile.{_SHARED}{_NARROW}",
    f"ld.volatile.<space:local>{_NARROW}",
    *_evicting(f"ld.<sem:relaxed|acquire>.{_SCOPE}{_GLOBAL}", _FETCH),
    f"ld.<sem:relaxed|acquire>.{_SCOPE}.{_SHARED}{_NARROW}",
    f"ld.mmio.<sem:relaxed>.sys{_GLOBAL}.<type:{TYPES}>",
    *_evicting("ld.<space:global>.nc", _FETCH),
    f"ld.<space:global>.<cop:ca|cg|cs>.nc{_HINT}{_FETCH}{_TAIL}",
    f"ldu{_GLOBAL}{_NARROW}",
)
STORES = (
    *_evicting(f"st[.<weak:weak>]{_GLOBAL}", ""),
    f"st[.<weak:weak>]{_GLOBAL}.<cop:wb|cg|cs|wt>{_HINT}{_TAIL}",
    f"st[.<weak:weak>].{_SHARED}[.<cop:wb|cg|cs|wt>]{_NARROW}",
    f"st[.<weak:weak>].<space:local>[.<cop:wb|cg|cs|wt>]{_NARROW}",
    f"st.volatile{_GLOBAL}{_TAIL}",
    f"st.volatile.{_SHARED}{_NARROW}",
    f"st.volatile.<space:local>{_NARROW}",
    *_evicting(f"st.<sem:relaxed|release>.{_SCOPE}{_GLOBAL}", ""),
    f"st.<sem:relaxed|release>.{_SCOPE}.{_SHARED}{_NARROW}",
    f"st.mmio.<sem:relaxed>.sys{_GLOBAL}.<type:{TYPES}>",
)


def element_bits(ptx: str) -> int:
    """Get the width of a PTX type."""
    return int(ptx.lstrip("bufsx"))


def vector_length(form: Form, bits: int, operands: range, e: Emitter) -> int:
    """Count elements per lane, checked against the operand list and the widest access.

    Raises:
        EmulatorError: the vector is too wide or does not match its operands.
    """
    n = int(form.get("vec", "v1")[1:])
    # 32-byte accesses exist for global memory only: v8 of 32 bits and v4 of 64 bits (sm_100+).
    wide = form.get("space", "global") == "global" and bits in (32, 64) and not form.opcode.startswith("ldu")
    widest = 256 if wide else 128
    if n * bits > widest or (n == 8 and bits != 32):
        raise EmulatorError(f"{form.opcode}: {n} elements of {bits} bits are not an access of this state space")
    if len(operands) != n:
        raise EmulatorError(f"{form.opcode} needs {n} registers, not {len(operands)}")
    return n


def strength(form: Form) -> int:
    """Choose STRONG for accesses that may synchronise, 0 for weak ones."""
    opcode = form.opcode.split(".")
    return STRONG if {"volatile", "mmio", "relaxed", "acquire", "release"}.intersection(opcode) else 0


@isa.native(*LOADS)
def load(e: Emitter, form: Form) -> None:
    """Load; narrow values are sign- or zero-extended into wider registers."""
    bits, space = element_bits(form.get("type")), space_of(form.get("space"))
    targets, base = e.groups[0], e.groups[1][0]
    n = vector_length(form, bits, targets, e)
    if e.leaves[base] == "i" and space != "local":  # local memory is the lane's own
        _load_uniform(e, form, space, bits, base)
        return
    nbytes = n * bits // 8
    lanes = addresses(e, base)
    staging, slot = buffer(e, nbytes), spill(e, lanes)
    checked = check_all(e, space, False, lanes, nbytes, e.mask())
    if checked is not None:
        copy_all_in(e, checked, staging, nbytes)
    with e.each_lane() as lane:
        pointer = pointer_of(e, space, False, lane_of(e, slot, lane, "i64"), nbytes, lane)
        copy(e, pointer, row(e, staging, lane, nbytes), nbytes)
    if checked is not None:
        e.raw("br label %loaded")
        e.label("loaded")
    spread(e, staging, targets, bits, form.get("type"))
    count(e, space, slot, nbytes, e.mask())
    log(e, space, slot, nbytes, e.mask(), READ | strength(form))
    finish(e, space)


def _load_uniform(e: Emitter, form: Form, space: str, bits: int, base: int) -> None:
    """All lanes read the same address (a parameter, a variable): one access, broadcast."""
    targets = e.groups[0]
    address = e.load_from(e.address(base), 0, "i64") + e.imm()
    e.widths[base] = 64
    lane = e.intrinsic("llvm.cttz", e.mask(), e.flag(True))
    pointer = pointer_of(e, space, False, address, len(targets) * bits // 8, lane)
    first = e.mask() & -e.mask()
    log(e, space, spill(e, e.splat(address)), len(targets) * bits // 8, first, READ | strength(form))
    for k, t in enumerate(targets):
        if e.leaves[t] == "_":
            continue
        width = e.register_bits(t, bits)
        check_width(e, width, bits)
        if bits == 128:
            low, high = (e.splat(e.load_from(pointer, 16 * k + 8 * h, "i64", align=8)) for h in range(2))
            e.store(t, e.shuffle(low, range(64), high))
            continue
        value = element(e, pointer, k, bits)
        if width > bits:
            value = e.resize(value, f"i{width}", form.get("type").startswith("s"))
        e.store(t, e.splat(value))
    finish(e, space)


@isa.native(*STORES)
def store(e: Emitter, form: Form) -> None:
    """Store; wider registers are truncated. Of lanes that store to the same address the highest one wins."""
    bits, space = element_bits(form.get("type")), space_of(form.get("space"))
    base, sources = e.groups[0][0], e.groups[1]
    n = vector_length(form, bits, sources, e)
    nbytes = n * bits // 8
    lanes = addresses(e, base)
    staging, slot = buffer(e, nbytes), spill(e, lanes)
    collect(e, staging, sources, bits)
    same = unchanged(e, space, slot, staging, nbytes, e.mask())
    checked = check_all(e, space, True, lanes, nbytes, e.mask())
    if checked is not None:
        copy_all_out(e, checked, staging, nbytes, e.mask())
    with e.each_lane() as lane:
        pointer = pointer_of(e, space, True, lane_of(e, slot, lane, "i64"), nbytes, lane)
        copy(e, row(e, staging, lane, nbytes), pointer, nbytes)
    if checked is not None:
        e.raw("br label %stored")
        e.label("stored")
    count(e, space, slot, nbytes, e.mask())
    log(e, space, slot, nbytes, e.mask(), WRITE | strength(form), same)
    e.ret(abi.CONTINUE)


# --- lanes through a buffer -------------------------------------------------------------------------------------------

# One lane's bytes as one machine value.
_COPY_TYPE = {1: "i8", 2: "i16", 4: "i32", 8: "i64", 16: "<4 x i32>", 32: "<8 x i32>"}


def buffer(e: Emitter, nbytes: int) -> Value:
    """Get room for ``nbytes`` of every lane, lane after lane."""
    return e.line(f"alloca [{abi.LANES * nbytes} x i8], align 64", "ptr", 0)


def row(e: Emitter, staging: Value, lane: Value, nbytes: int) -> Value:
    """Get a lane's place in the buffer."""
    return e.line(f"getelementptr [{nbytes} x i8], ptr {staging.ref}, {lane.typed}", "ptr", 0)


def copy(e: Emitter, source_at: Value, target_at: Value, nbytes: int) -> None:
    """Move one lane's bytes."""
    kind, align = _COPY_TYPE[nbytes], min(nbytes, 16)
    name = e.fresh()
    e.raw(f"{name} = load {kind}, ptr {source_at.ref}, align {align}")
    e.raw(f"store {kind} {name}, ptr {target_at.ref}, align {align}")


def spread(e: Emitter, staging: Value, targets: range, bits: int, ptx: str) -> None:
    """Write the buffer's elements to registers, extended to their widths."""
    n = len(targets)
    if bits == 128:
        halves = e.line(f"load <{64 * n} x i64>, ptr {staging.ref}, align 64", "i64", 64 * n)
        for k, t in enumerate(targets):
            low, high = (range(2 * k + h, 64 * n, 2 * n) for h in range(2))
            check_width(e, e.register_bits(t, 128), 128)
            if e.leaves[t] != "_":
                e.store(t, e.shuffle(halves, [*low, *high]))
        return
    everything = e.line(f"load <{32 * n} x i{bits}>, ptr {staging.ref}, align 64", f"i{bits}", 32 * n)
    for t, value in zip(targets, e.unpack(everything, f"i{bits}", n), strict=True):
        if e.leaves[t] != "_":
            width = e.register_bits(t, bits)
            check_width(e, width, bits)
            e.store(t, e.resize(value, f"i{width}", ptx.startswith("s")) if width > bits else value)


def collect(e: Emitter, staging: Value, sources: range, bits: int) -> None:
    """Fill the buffer from registers or constants, cut to the type's width."""
    parts = []
    for s in sources:
        width = e.register_bits(s, bits)
        check_width(e, width, bits)
        value = e.load(s, f"i{width}")
        parts.append(e.shuffle(value, [i // 2 + 32 * (i % 2) for i in range(64)]) if bits == 128 else value)
    if bits == 128 and len(parts) == 2:
        order = [i for lane in range(32) for i in (2 * lane, 2 * lane + 1, 64 + 2 * lane, 65 + 2 * lane)]
        everything = e.shuffle(parts[0], order, parts[1])
    elif bits == 128:
        everything = parts[0]
    else:
        narrow = [e.resize(p, f"i{bits}") if p.kind != f"i{bits}" else p for p in parts]
        everything = e.pack(narrow, f"i{bits}")
    e.raw(f"store {everything.typed}, ptr {staging.ref}, align 64")


_UNROLL = 4


@contextmanager
def _every_lane(e: Emitter, carried: Value | None = None) -> Iterator[tuple[list[Value], list[Value]]]:
    """A loop over all 32 lanes, `_UNROLL` at a time; yields the lanes (i64) and the carried value in a list.

    The body replaces the list's element by the value of the next round; after the loop it is the final one.
    """
    before, carry = e.block, [] if carried is None else [carried]
    e.raw("br label %turn")
    e.label("turn")
    index = Value(e, "%turn.i", "i64", 0)
    e.raw(f"%turn.i = phi i64 [ 0, %{before} ], [ %turn.next, %turn ]")
    if carried is not None:
        e.raw(f"%turn.c = phi {carried.type} [ {carried.ref}, %{before} ], [ %turn.d, %turn ]")
        carry[0] = Value(e, "%turn.c", carried.kind, carried.n)
    yield [index if k == 0 else index + k for k in range(_UNROLL)], carry
    if carried is not None:
        e.raw(f"%turn.d = freeze {carry[0].typed}")
        carry[0] = Value(e, "%turn.d", carried.kind, carried.n)
    e.raw(f"%turn.next = add i64 %turn.i, {_UNROLL}")
    e.raw(f"%turn.more = icmp ult i64 %turn.next, {abi.LANES}")
    e.raw("br i1 %turn.more, label %turn, label %turned")
    e.label("turned")


def _lane_pointer(e: Emitter, slot: Value, lane: Value) -> Value:
    """Pointer number ``lane`` of a spilled vector of host addresses."""
    at = e.line(f"getelementptr ptr, ptr {slot.ref}, {lane.typed}", "ptr", 0)
    return e.line(f"load ptr, ptr {at.ref}, align 8", "ptr", 0)


def copy_all_in(e: Emitter, checked: Checked, staging: Value, nbytes: int) -> None:
    """Fill the buffer and go to ``loaded`` if every lane can read initialised memory."""
    slot = spill(e, checked.pointers)
    e.raw(f"br i1 {checked.ok.ref}, label %fast, label %slow")
    e.label("fast")
    wide = f"i{8 * nbytes}"
    ones = Value(e, str(int.from_bytes(b"\1" * nbytes, "little")), wide, 0)
    with _every_lane(e, None if checked.init is None else ones) as (lanes, written):
        for lane in lanes:
            pointer = _lane_pointer(e, slot, lane)
            copy(e, pointer, row(e, staging, lane, nbytes), nbytes)
            if written:
                flags = e.load_from(e.pointer(pointer, checked.init), 0, wide, align=min(nbytes, 16))
                written[0] = written[0] & flags
    if not written:
        e.raw("br label %loaded")
    else:
        unchecked = e.icmp("eq", e.context("checks") & abi.CHECK_INIT, 0)
        fine = e.icmp("eq", written[0], ones) | unchecked
        e.raw(f"br i1 {fine.ref}, label %loaded, label %slow")
    e.label("slow")


def copy_all_out(e: Emitter, checked: Checked, staging: Value, nbytes: int, mask: Value) -> None:
    """Store the buffer, mark it written and go to ``stored`` if every lane can write."""
    slot = spill(e, checked.pointers)
    dirty = None if checked.dirty is None else spill(e, checked.dirty)
    writer = e.cast("trunc", e.context("warp") + 1, "i16")

    def one(lane: Value) -> None:
        pointer = _lane_pointer(e, slot, lane)
        copy(e, row(e, staging, lane, nbytes), pointer, nbytes)
        if dirty is not None:
            ones = Value(e, str(int.from_bytes(b"\1" * nbytes, "little")), f"i{8 * nbytes}", 0)
            e.store_to(pointer, checked.init, ones, align=min(nbytes, 16))
            e.raw(f"store {writer.typed}, ptr {_lane_pointer(e, dirty, lane).ref}, align 2")

    e.raw(f"br i1 {checked.ok.ref}, label %fast, label %slow")
    e.label("fast")
    full = e.icmp("eq", mask, -1)
    e.raw(f"br i1 {full.ref}, label %all, label %some")
    e.label("all")
    with _every_lane(e) as (lanes, _):
        for lane in lanes:
            one(lane)
    e.raw("br label %stored")
    e.label("some")
    with e.each_lane(mask) as lane:
        one(lane)
    e.raw("br label %stored")
    e.label("slow")


# --- lanes of registers -----------------------------------------------------------------------------------------------


def check_width(e: Emitter, width: int, bits: int) -> None:
    """Refuse registers narrower than the type.

    Raises:
        EmulatorError: the register cannot hold the value.
    """
    if width < bits:
        raise EmulatorError(f"{e.form.opcode}: a {width}-bit register for {bits} bits")


class RegisterRef(NamedTuple):
    """A register in the register file: a pointer to its lanes, and its width in bits."""

    at: Value
    width: int


def target(e: Emitter, i: int, bits: int) -> RegisterRef:
    """Get address and width of a destination register."""
    width = e.register_bits(i, bits)
    check_width(e, width, bits)
    e.widths[i] = width
    e.stores.add(i)
    return RegisterRef(e.address(i), width)


def source(e: Emitter, i: int, bits: int) -> RegisterRef:
    """Get address and width of a source register or constant."""
    width = e.register_bits(i, bits)
    check_width(e, width, bits)
    e.widths[i] = width
    return RegisterRef(e.address(i), width)


def element(e: Emitter, pointer: Value, k: int, bits: int) -> Value:
    """Get element ``k`` at a checked pointer, a scalar."""
    kind = f"i{bits}"
    at = e.pointer(pointer, k * bits // 8)
    return e.line(f"load {kind}, ptr {at.ref}, align {bits // 8}", kind, 0)


def put(e: Emitter, register: RegisterRef, lane: Value, value: Value, ptx: str) -> None:
    """Write one lane of a register, extended to its width."""
    at, width = register
    bits = BITS[value.kind]
    if width == 128:
        low = e.cast("trunc", value, "i64")
        high = e.cast("trunc", value >> 64, "i64")
        for part, offset in ((low, 0), (high, 8 * abi.LANES)):
            half = e.pointer(at, offset)
            q = e.line(f"getelementptr i64, ptr {half.ref}, {lane.typed}", "ptr", 0)
            e.raw(f"store {part.typed}, ptr {q.ref}, align 8")
        return
    if width > bits:
        value = e.resize(value, f"i{width}", ptx.startswith("s"))
    q = e.line(f"getelementptr i{width}, ptr {at.ref}, {lane.typed}", "ptr", 0)
    e.raw(f"store {value.typed}, ptr {q.ref}, align {width // 8}")


def get(e: Emitter, register: RegisterRef, lane: Value, bits: int) -> Value:
    """Get the low ``bits`` of one lane of a register."""
    at, width = register
    if width == 128:
        low = lane_of(e, at, lane, "i64")
        high = lane_of(e, e.pointer(at, 8 * abi.LANES), lane, "i64")
        return e.cast("zext", low, "i128") | (e.cast("zext", high, "i128") << 64)
    return e.resize(lane_of(e, at, lane, f"i{width}"), f"i{bits}")
