"""Implement mma.sync, warp-level matrix multiply-accumulate.

All but Volta's m8n8k4 f16 and mma.sp of kind::mx*. Sparse A is multiplied with its zeros.

Synchronous: the result is there when the instruction is done. On sm_90 floats are added as Hopper does, bit for bit
(hopper_sums.py; only the fp8 forms with K = 16 or f16 accumulators have not been compared). Elsewhere products are
exact, they and the accumulator are added in float64, in the same order wherever an element stands in the tile, and
the sum is rounded once (dense 16-bit and tf32 forms with float32 results: native/warp_mma.py); fp64 is a chain of
fused multiply-adds everywhere. Integers are exact. Only rounding to nearest is implemented for fp64.

Source: PTX ISA, "mma" and "Block Scaling for mma.sync".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dsv4lib.emulator import isa
from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.machine.warp import Warp
from dsv4lib.emulator.native import warp_mma
from dsv4lib.emulator.native.abi import FULL_MASK, LANES
from dsv4lib.emulator.ptx.ir import Instr, Operand, Reg, Vector
from dsv4lib.emulator.units.fragments import (
    accumulator,
    columns_of_b,
    registers_of,
    rows_of_a,
    unpack_bits,
    unpack_nibbles,
)
from dsv4lib.emulator.units.hopper_sums import chained_fma, fp8_mma_sum, fused_sum
from dsv4lib.emulator.units.numeric import SCALES, accumulate_int32, decode
from dsv4lib.emulator.units.registers import read_rows, write_rows
from dsv4lib.emulator.units.sparse import codes_of, expand_bytes

_HEAD = "mma.sync.aligned."
_SPARSE = "mma.<sp:sp|sp::ordered_metadata>.sync.aligned."
_ORDERED = "mma.<sp:sp::ordered_metadata>.sync.aligned."
_F8 = "e4m3|e5m2"
_F8F6F4 = "e4m3|e5m2|e3m2|e2m3|e2m1"

# What a program keeps: the native function of an instruction and the offsets of its registers, by its identity.
_KEPT = "native mma.sync"
Known = dict[int, tuple[Instr, Callable[[int, int], int] | None, np.ndarray, int]]


def _items(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vector) else (operand,)


def _read(warp: Warp, instr: Instr, operand: Operand, count: int) -> np.ndarray:
    items = _items(operand)
    if len(items) != count:
        raise EmulatorError(f"{instr.opcode}: an operand has {len(items)} registers, the shape needs {count}")
    return read_rows(warp, instr, items)


def _check_lanes(warp: Warp, instr: Instr) -> None:
    if warp.mask() != FULL_MASK:
        raise EmulatorError(f"{instr.opcode} needs all 32 lanes, active: {warp.mask():#010x}")
    warp.cta.machine.stats["mma_sync"] += 1


def _operands(warp: Warp, instr: Instr, form: Form, rows: int, k_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """uint8 A (rows, K bytes) and B (8, K bytes)."""
    a, b = instr.operands[1:3]
    count = k_bytes // 16
    columns = columns_of_b(_read(warp, instr, b, count))
    if not form.has("sp"):
        return rows_of_a(_read(warp, instr, a, count * rows // 8)), columns
    kind = form.get("a")
    metadata, selector = instr.operands[4:]
    codes = codes_of(warp.read(metadata, np.uint32), warp.uniform(selector, np.uint32), kind, k_bytes)
    stored = rows_of_a(_read(warp, instr, a, count))
    return expand_bytes(stored, codes, kind, form.get("sp") != "sp"), columns


def _accumulator(warp: Warp, instr: Instr, rows: int, fmt: str) -> np.ndarray:
    """C, (rows, 8)."""
    count = rows * 8 // LANES // (2 if fmt == "f16" else 1)
    return accumulator(_read(warp, instr, instr.operands[3], count), fmt, rows)


def _write(warp: Warp, instr: Instr, result: np.ndarray, fmt: str) -> None:
    write_rows(warp, instr, _items(instr.operands[0]), registers_of(result, fmt))


def _multiplied(warp: Warp, instr: Instr, form: Form) -> bool:
    """Multiply in native code. False if this form, or one with such operands, has none."""
    known: Known = warp.program.kept.setdefault(_KEPT, {})
    found = known.get(id(instr))
    if found is None or found[0] is not instr:
        found = known[id(instr)] = (instr, *_native(warp, instr, form))
    _, function, _, offsets = found
    if function is None:
        return False
    function(warp.context_address, offsets)
    return True


def _native(warp: Warp, instr: Instr, form: Form) -> tuple[Callable[[int, int], int] | None, np.ndarray, int]:
    """Native function, offsets of all registers, and their address; no function unless all are registers of 32 bits."""
    kind, program, k = form.get("a"), warp.program, int(form.get("k"))
    blocks = k * (4 if kind == "tf32" else 2) // 16
    d, a, b, c = (_items(operand) for operand in instr.operands[:4])
    items = [*a, *b, *c, *d]
    fits = [len(x) for x in (a, b, c, d)] == [2 * blocks, blocks, 4, 4]
    if fits and form.get("d") == "f32" and kind in ("f16", "bf16", "tf32") and not form.has("sp") and not _hopper(warp):
        if all(isinstance(item, Reg) and program.bits[item.index] == 32 for item in items):
            offsets = np.array([program.offset[item.index] for item in items], np.int64)
            return warp_mma.multiply(kind, k), offsets, offsets.ctypes.data
    return None, np.empty(0, np.int64), 0


def _hopper(warp: Warp) -> bool:
    return str(warp.cta.machine.arch).startswith("sm_90")


def _float_result(a: np.ndarray, b: np.ndarray, c: np.ndarray, form: Form, hopper: bool) -> np.ndarray:
    """D of the float forms: float32, or float16."""
    d, kind = form.get("d"), form.get("a")
    if hopper and kind in ("f16", "bf16", "tf32"):
        return fused_sum(a, b, c, kind, form.get("b"), d)
    if hopper and d == "f32" and form.get("k") in ("32", "64"):
        return fp8_mma_sum(a, b, c)
    return _sums(a, b, c, np.float32 if d == "f32" else np.float16)


def _sums(a: np.ndarray, b: np.ndarray, c: np.ndarray, dtype: type) -> np.ndarray:
    """A B^T + C, added in float64 and rounded once to ``dtype``; A (M, K), B (N, K), C (M, N).

    Not by BLAS, whose order of summation depends on the row: a row's bits are those of the row, wherever it stands.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.einsum("mk,nk->mn", np.ascontiguousarray(a, np.float64), np.ascontiguousarray(b, np.float64))
        return (total + c).astype(dtype)


@isa.service(
    f"{_HEAD}m16n8k<k:8|16>.row.col.<d:f16>.<a:f16>.<b:f16>.f16",
    f"{_HEAD}m16n8k<k:8|16>.row.col.<d:f32>.<a:f16>.<b:f16>.f32",
    f"{_HEAD}m16n8k<k:8|16>.row.col.<d:f32>.<a:bf16>.<b:bf16>.f32",
    f"{_HEAD}m16n8k<k:4|8>.row.col.<d:f32>.<a:tf32>.<b:tf32>.f32",
    f"{_HEAD}m16n8k<k:16|32>.row.col.<d:f32>.<a:{_F8}>.<b:{_F8}>.f32",
    f"{_HEAD}m16n8k<k:16|32>.row.col.<d:f16>.<a:{_F8}>.<b:{_F8}>.f16",
    f"{_HEAD}m16n8k<k:32>.row.col.kind::f8f6f4.<d:f32>.<a:{_F8F6F4}>.<b:{_F8F6F4}>.f32",
    f"{_HEAD}m16n8k<k:32>.row.col.kind::f8f6f4.<d:f16>.<a:{_F8F6F4}>.<b:{_F8F6F4}>.f16",
    f"{_SPARSE}m16n8k<k:16|32>.row.col.<d:f16>.<a:f16>.<b:f16>.f16",
    f"{_SPARSE}m16n8k<k:16|32>.row.col.<d:f32>.<a:f16>.<b:f16>.f32",
    f"{_SPARSE}m16n8k<k:16|32>.row.col.<d:f32>.<a:bf16>.<b:bf16>.f32",
    f"{_SPARSE}m16n8k<k:8|16>.row.col.<d:f32>.<a:tf32>.<b:tf32>.f32",
    f"{_SPARSE}m16n8k<k:64>.row.col.<d:f32>.<a:{_F8}>.<b:{_F8}>.f32",
    f"{_ORDERED}m16n8k<k:64>.row.col.<d:f16>.<a:{_F8}>.<b:{_F8}>.f16",
    f"{_ORDERED}m16n8k<k:64>.row.col.kind::f8f6f4.<d:f32>.<a:{_F8F6F4}>.<b:{_F8F6F4}>.f32",
    f"{_ORDERED}m16n8k<k:64>.row.col.kind::f8f6f4.<d:f16>.<a:{_F8F6F4}>.<b:{_F8F6F4}>.f16",
    note="bit-equal to an H200 on sm_90; elsewhere the accumulation order is not that of hardware",
)
def mma_float(warp: Warp, instr: Instr, form: Form) -> None:
    """Multiply 8-, 16- and 32-bit floats on the warp's tensor core.

    ``mma.sync d, a, b, c{, metadata, selector}``; 4- and 6-bit types sit in bytes.
    """
    _check_lanes(warp, instr)
    if _multiplied(warp, instr, form):
        return
    width = {"f16": 2, "bf16": 2, "tf32": 4}.get(form.get("a"), 1)
    a, b = _operands(warp, instr, form, 16, width * int(form.get("k")))
    c = _accumulator(warp, instr, 16, form.get("d"))
    hopper = _hopper(warp) and "kind::" not in form.opcode
    result = _float_result(decode(a, form.get("a")), decode(b, form.get("b")), c, form, hopper)
    _write(warp, instr, result, form.get("d"))


@isa.service(
    f"{_HEAD}m<m:8>n8k<k:16>.row.col[.<sat:satfinite>].s32.<a:s8|u8>.<b:s8|u8>.s32",
    f"{_HEAD}m<m:16>n8k<k:16|32>.row.col[.<sat:satfinite>].s32.<a:s8|u8>.<b:s8|u8>.s32",
    f"{_HEAD}m<m:8>n8k<k:32>.row.col[.<sat:satfinite>].s32.<a:s4|u4>.<b:s4|u4>.s32",
    f"{_HEAD}m<m:16>n8k<k:32|64>.row.col[.<sat:satfinite>].s32.<a:s4|u4>.<b:s4|u4>.s32",
    f"{_SPARSE}m<m:16>n8k<k:32|64>.row.col[.<sat:satfinite>].s32.<a:s8|u8>.<b:s8|u8>.s32",
    f"{_SPARSE}m<m:16>n8k<k:64|128>.row.col[.<sat:satfinite>].s32.<a:s4|u4>.<b:s4|u4>.s32",
)
def mma_integer(warp: Warp, instr: Instr, form: Form) -> None:
    """``mma.sync d, a, b, c{, metadata, selector}`` of 8- and 4-bit integers."""
    _check_lanes(warp, instr)
    bits = int(form.get("a")[1:])
    values = []
    matrices = _operands(warp, instr, form, int(form.get("m")), int(form.get("k")) * bits // 8)
    for name, raw in zip("ab", matrices, strict=True):
        kind = form.get(name)
        values.append(decode(raw, kind) if bits == 8 else unpack_nibbles(raw, kind == "s4"))
    c = _accumulator(warp, instr, int(form.get("m")), "s32")
    _write(warp, instr, accumulate_int32(values[0] @ values[1].T, c, form.has("sat")), "s32")


@isa.service(
    f"{_HEAD}m<m:8>n8k<k:128>.row.col.s32.b1.b1.s32.<op:xor|and>.popc",
    f"{_HEAD}m<m:16>n8k<k:128|256>.row.col.s32.b1.b1.s32.<op:xor|and>.popc",
)
def mma_bits(warp: Warp, instr: Instr, form: Form) -> None:
    """``mma.sync d, a, b, c`` of bits: population counts of the rows and columns combined."""
    _check_lanes(warp, instr)
    a, b = (unpack_bits(raw) for raw in _operands(warp, instr, form, int(form.get("m")), int(form.get("k")) // 8))
    both = a @ b.T
    count = both if form.get("op") == "and" else a.sum(1)[:, None] + b.sum(1)[None, :] - 2 * both
    c = _accumulator(warp, instr, int(form.get("m")), "s32")
    _write(warp, instr, accumulate_int32(count, c, False), "s32")


@isa.service(
    f"{_HEAD}m<m:8>n8k<k:4>.row.col.f64.f64.f64.f64[.rn]",
    f"{_HEAD}m<m:16>n8k<k:4|8|16>.row.col.f64.f64.f64.f64[.rn]",
    note="round to nearest only",
)
def mma_double(warp: Warp, instr: Instr, form: Form) -> None:
    """``mma.sync d, a, b, c`` of f64."""
    _check_lanes(warp, instr)
    d, a, b, c = (_items(operand) for operand in instr.operands)
    rows, k = int(form.get("m")), int(form.get("k"))
    for items, needed in ((a, rows * k), (b, 8 * k), (c, 8 * rows), (d, 8 * rows)):
        if len(items) != needed // LANES:
            raise EmulatorError(f"{instr.opcode}: an operand has {len(items)} registers, needs {needed // LANES}")
    left, right, old = (np.stack([warp.read(x, np.float64) for x in items]) for items in (a, b, c))
    halves = rows // 8
    # [k / 4, row half, row, k % 4] and [k / 4, column, k % 4]
    left = left.reshape(-1, halves, 8, 4).transpose(1, 2, 0, 3).reshape(rows, k)
    right = right.reshape(-1, 8, 4).transpose(1, 0, 2).reshape(8, k)
    result = chained_fma(left, right, accumulator(old, "f64", rows))
    for item, values in zip(d, registers_of(result, "f64"), strict=True):
        warp.write(item, values)


@isa.service(
    f"{_HEAD}m16n8k<k:64>.row.col.kind::<kind:mxf4>.block_scale[.scale_vec::<vec:2X>].f32.<a:e2m1>.<b:e2m1>.f32.<s:ue8m0>",
    f"{_HEAD}m16n8k<k:64>.row.col.kind::<kind:mxf4nvf4>.block_scale.scale_vec::<vec:2X>.f32.<a:e2m1>.<b:e2m1>.f32.<s:ue8m0>",
    f"{_HEAD}m16n8k<k:64>.row.col.kind::<kind:mxf4nvf4>.block_scale.scale_vec::<vec:4X>"
    ".f32.<a:e2m1>.<b:e2m1>.f32.<s:ue8m0|ue4m3>",
    f"{_HEAD}m16n8k<k:32>.row.col.kind::<kind:mxf8f6f4>.block_scale[.scale_vec::<vec:1X>]"
    f".f32.<a:{_F8F6F4}>.<b:{_F8F6F4}>.f32.<s:ue8m0>",
    note="sm_120a and its family",
)
def mma_block_scale(warp: Warp, instr: Instr, form: Form) -> None:
    """Multiply block-scaled operands on the warp's tensor core.

    ``mma.sync d, a, b, c, scale-a, {byte-a, thread-a}, scale-b, {byte-b, thread-b}``.
    """
    _check_lanes(warp, instr)
    k, kind = int(form.get("k")), form.get("kind")
    count = {"mxf8f6f4": 1, "mxf4": 2}.get(kind) or int(form.get("vec")[0])
    a, b = _operands(warp, instr, form, 16, 32)
    names = [form.get("a"), form.get("b")] if kind == "mxf8f6f4" else ["e2m1x2", "e2m1x2"]
    scale_a, select_a, scale_b, select_b = instr.operands[4:]
    lane = np.arange(LANES)
    byte, thread = _selector(warp, select_a, count, 2)
    # Of every four lanes, two give the factors of rows g and g + 8.
    lanes_a = np.concatenate([4 * np.arange(8) + 2 * thread, 4 * np.arange(8) + 2 * thread + 1])
    factors_a = _factors(warp, scale_a, lanes_a, byte, count, form.get("s"))
    byte, thread = _selector(warp, select_b, count, 4)
    factors_b = _factors(warp, scale_b, lane[thread::4], byte, count, form.get("s"))
    # float64: two scale factors can leave float32 before they cancel.
    left = decode(a, names[0]).reshape(16, count, -1) * factors_a[:, :, None]
    right = decode(b, names[1]).reshape(8, count, -1) * factors_b[:, :, None]
    result = _sums(left.reshape(16, k), right.reshape(8, k), _accumulator(warp, instr, 16, "f32"), np.float32)
    _write(warp, instr, result, "f32")


def _selector(warp: Warp, operand: Operand, count: int, threads: int) -> tuple[int, int]:
    """(byte id, thread id) of a scale operand."""
    byte, thread = (warp.uniform(item, np.uint16) for item in _items(operand))
    if byte not in {1: (0, 1, 2, 3), 2: (0, 2), 4: (0,)}[count] or thread >= threads:
        raise EmulatorError(f"scale selector {{{byte}, {thread}}} with {count} scale factors per row")
    return byte, thread


def _factors(warp: Warp, operand: Operand, lanes: np.ndarray, byte: int, count: int, kind: str) -> np.ndarray:
    """float64 (rows, count) of the scale factors in the given lanes."""
    codes = np.ascontiguousarray(warp.read(operand, np.uint32)[lanes]).view(np.uint8).reshape(-1, 4)
    return SCALES[kind].take(codes[:, byte : byte + count]).astype(np.float64)
