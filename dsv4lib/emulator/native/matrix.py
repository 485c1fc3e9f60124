"""Implement ldmatrix and stmatrix. Matrices between shared memory and register fragments.

Rows are gathered into (or scattered from) a buffer that holds the matrices one after another, 16 bytes a row; the
fragment is then a fixed permutation of the buffer's elements. Thread t of a fragment holds

* 8x8 of 16 bits: row t / 4, elements 2 (t mod 4) and the next (.trans: of the transpose);
* 8x16 of bytes: row t / 4, elements 4 (t mod 4) .. + 3;
* 16x16 of bytes, transposed, two registers: rows t / 4 and t / 4 + 8 of the transpose, elements 4 (t mod 4) .. + 3;
* 16x8 of bytes (stmatrix, transposed): rows t / 4 and t / 4 + 8, elements 2 (t mod 4) and the next of each.

Source: PTX ISA, "Warp-level Matrix Instructions": ldmatrix, stmatrix. The byte fragments agree with the thread-value
layouts of CUTLASS's SM100 copy atoms.
"""

from __future__ import annotations

from dsv4lib.emulator import isa
from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.native import abi
from dsv4lib.emulator.native.access import addresses, check_all, finish, lane_of, pointer_of, space_of, spill
from dsv4lib.emulator.native.access_log import READ, WRITE, log, unchanged
from dsv4lib.emulator.native.counters import count
from dsv4lib.emulator.native.irtools import Emitter, Value
from dsv4lib.emulator.native.memory import buffer, copy, copy_all_in, copy_all_out, row
from dsv4lib.emulator.native.warp import absent, note

_SHARED = "[.<space:shared|shared::cta>]"
_ROW = 16  # bytes


def _count(form: Form, registers: range, each: int) -> int:
    """Number of matrices, checked against the register list.

    Raises:
        EmulatorError: the fragment does not have that many registers.
    """
    n = int(form.get("num")[1:])
    if len(registers) != n * each:
        raise EmulatorError(f"{form.opcode} needs {n * each} registers, not {len(registers)}")
    return n


def _check_aligned(e: Emitter) -> None:
    """Note live lanes that do not execute."""
    missing = absent(e, e.const(-1, "i32", 0))
    with e.when(e.icmp("ne", missing, 0)):
        note(e, missing)


def _gather(e: Emitter, form: Form, base: int, rows: int) -> Value:
    """Read one row from each of the first ``rows`` lanes' addresses; returns the buffer."""
    _check_aligned(e)
    space, lanes = space_of(form.get("space")), addresses(e, base)
    staging, slot, mask = buffer(e, _ROW), spill(e, lanes), e.const((1 << rows) - 1, "i32", 0)
    checked = check_all(e, space, False, lanes, _ROW, mask)
    if checked is not None:
        copy_all_in(e, checked, staging, _ROW)
    with e.each_lane(mask) as lane:
        pointer = pointer_of(e, space, False, lane_of(e, slot, lane, "i64"), _ROW, lane)
        copy(e, pointer, row(e, staging, lane, _ROW), _ROW)
    if checked is not None:
        e.raw("br label %loaded")
        e.label("loaded")
    count(e, space, slot, _ROW, mask)
    log(e, space, slot, _ROW, mask, READ)
    return staging


def _scatter(e: Emitter, form: Form, base: int, staging: Value, rows: int) -> None:
    """Store one row of the buffer at each of the first ``rows`` lanes' addresses; returns to the driver."""
    _check_aligned(e)
    space, lanes = space_of(form.get("space")), addresses(e, base)
    slot, mask = spill(e, lanes), e.const((1 << rows) - 1, "i32", 0)
    same = unchanged(e, space, slot, staging, _ROW, mask)
    checked = check_all(e, space, True, lanes, _ROW, mask)
    if checked is not None:
        copy_all_out(e, checked, staging, _ROW, mask)
    with e.each_lane(mask) as lane:
        pointer = pointer_of(e, space, True, lane_of(e, slot, lane, "i64"), _ROW, lane)
        copy(e, row(e, staging, lane, _ROW), pointer, _ROW)
    if checked is not None:
        e.raw("br label %stored")
        e.label("stored")
    count(e, space, slot, _ROW, mask)
    log(e, space, slot, _ROW, mask, WRITE, same)
    finish(e, space)


def _vector(e: Emitter, staging: Value, offset: int, kind: str, n: int) -> Value:
    """``n`` elements of the buffer from byte ``offset``."""
    at = e.pointer(staging, offset)
    return e.line(f"load <{n} x {kind}>, ptr {at.ref}, align 16", kind, n)


@isa.native(f"ldmatrix.sync.aligned.<shape:m8n8>.<num:x1|x2|x4>[.<trans:trans>]{_SHARED}.b16")
def ldmatrix(e: Emitter, form: Form) -> None:
    """Load 8x8 matrices of 16 bits; lanes 8 k .. 8 k + 7 hold the row addresses of matrix k."""
    targets, base = e.groups[0], e.groups[1][0]
    n = _count(form, targets, 1)
    staging = _gather(e, form, base, 8 * n)
    for k, t in enumerate(targets):
        if form.has("trans"):
            elements = _vector(e, staging, 8 * _ROW * k, "i16", 64)
            order = [8 * (2 * (lane % 4) + half) + lane // 4 for lane in range(abi.LANES) for half in range(2)]
            value = e.bitcast(e.shuffle(elements, order), "i32")
        else:
            value = _vector(e, staging, 8 * _ROW * k, "i32", abi.LANES)
        e.store(t, value)
    finish(e, space_of(form.get("space")))


@isa.native(f"ldmatrix.sync.aligned.m16n16.<num:x1|x2>.trans{_SHARED}.b8")
def ldmatrix_b8(e: Emitter, form: Form) -> None:
    """Load and transpose 16x16 matrices of bytes. Lanes 16 k .. 16 k + 15 hold the row addresses of matrix k."""
    targets, base = e.groups[0], e.groups[1][0]
    n = _count(form, targets, 2)
    staging = _gather(e, form, base, 16 * n)
    for k in range(n):
        _store_transposed(e, targets[2 * k : 2 * k + 2], _vector(e, staging, 16 * _ROW * k, "i8", 256))
    finish(e, space_of(form.get("space")))


def _store_transposed(e: Emitter, targets: range, elements: Value) -> None:
    """Two fragment registers of a 16x16 byte matrix: rows t / 4 and t / 4 + 8 of its transpose."""
    for half, t in enumerate(targets):
        order = [16 * (4 * (lane % 4) + q) + lane // 4 + 8 * half for lane in range(abi.LANES) for q in range(4)]
        e.store(t, e.bitcast(e.shuffle(elements, order), "i32"))


def _expand(e: Emitter, packed: Value, source_format: str, rows: int) -> Value:
    """Rows of 16 packed 4- or 6-bit elements (padded to 16 bytes) as one byte per element, in its low bits."""
    if source_format == "b4x16_p64":
        kept = e.shuffle(packed, [_ROW * r + i for r in range(rows) for i in range(8)])
        low, high = kept & 0xF, kept >> 4
        n = 8 * rows
        return e.shuffle(low, [i // 2 + (i % 2) * n for i in range(2 * n)], high)
    # 12 bytes a row: element i starts at bit 6 i, so it lies in bytes 6 i / 8 and the next one.
    first = e.shuffle(packed, [_ROW * r + 6 * i // 8 for r in range(rows) for i in range(16)])
    second = e.shuffle(packed, [_ROW * r + 6 * i // 8 + 1 for r in range(rows) for i in range(16)])
    both = e.cast("zext", first, "i16") | (e.cast("zext", second, "i16") << 8)
    amounts = ", ".join(f"i16 {6 * i % 8}" for _ in range(rows) for i in range(16))
    shift = Value(e, f"<{amounts}>", "i16", 16 * rows)
    return e.cast("trunc", (both >> shift) & 0x3F, "i8")


@isa.native(
    f"ldmatrix.sync.aligned.m8n16.<num:x1|x2|x4>{_SHARED}.b8x16.<source:b6x16_p32|b4x16_p64>",
    note="packed elements land in the low bits of their bytes",
)
def ldmatrix_unpack(e: Emitter, form: Form) -> None:
    """Load 8x16 matrices of packed 4- or 6-bit elements, a byte each in the fragment."""
    targets, base = e.groups[0], e.groups[1][0]
    n = _count(form, targets, 1)
    staging = _gather(e, form, base, 8 * n)
    for k, t in enumerate(targets):
        elements = _expand(e, _vector(e, staging, 8 * _ROW * k, "i8", 8 * _ROW), form.get("source"), 8)
        e.store(t, e.bitcast(elements, "i32"))
    finish(e, space_of(form.get("space")))


@isa.native(
    f"ldmatrix.sync.aligned.m16n16.<num:x1|x2>.trans{_SHARED}.b8x16.<source:b6x16_p32|b4x16_p64>",
    note="packed elements land in the low bits of their bytes",
)
def ldmatrix_unpack_b8(e: Emitter, form: Form) -> None:
    """Load and transpose 16x16 matrices of packed 4- or 6-bit elements."""
    targets, base = e.groups[0], e.groups[1][0]
    n = _count(form, targets, 2)
    staging = _gather(e, form, base, 16 * n)
    for k in range(n):
        packed = _vector(e, staging, 16 * _ROW * k, "i8", 16 * _ROW)
        _store_transposed(e, targets[2 * k : 2 * k + 2], _expand(e, packed, form.get("source"), 16))
    finish(e, space_of(form.get("space")))


@isa.native(
    f"stmatrix.sync.aligned.m8n8.<num:x1|x2|x4>[.<trans:trans>]{_SHARED}.<type:b16>",
    f"stmatrix.sync.aligned.m16n8.<num:x1|x2|x4>.<trans:trans>{_SHARED}.<type:b8>",
)
def stmatrix(e: Emitter, form: Form) -> None:
    """Store 8x8 matrices of 16 bits, or 16x8 of bytes transposed. Either way 8 rows of 16 bytes."""
    base, sources = e.groups[0][0], e.groups[1]
    n = _count(form, sources, 1)
    staging = buffer(e, _ROW)
    for k, s in enumerate(sources):
        fragment = e.load(s, "i32")
        if form.get("type") == "b8":
            # Byte q of thread t is element (t / 4 + 8 (q / 2), 2 (t mod 4) + q mod 2) of the 16x8 matrix.
            order = [0] * 128
            for lane in range(abi.LANES):
                for q in range(4):
                    order[16 * (2 * (lane % 4) + q % 2) + lane // 4 + 8 * (q // 2)] = 4 * lane + q
            fragment = e.shuffle(e.bitcast(fragment, "i8"), order)
        elif form.has("trans"):
            order = [0] * 64
            for lane in range(abi.LANES):
                for half in range(2):
                    order[8 * (2 * (lane % 4) + half) + lane // 4] = 2 * lane + half
            fragment = e.shuffle(e.bitcast(fragment, "i16"), order)
        at = e.pointer(staging, 8 * _ROW * k)
        e.raw(f"store {fragment.typed}, ptr {at.ref}, align 16")
    _scatter(e, form, base, staging, 8 * n)
