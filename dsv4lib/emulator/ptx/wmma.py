"""Expand wmma.load, wmma.mma and wmma.store to loads, mma.sync and stores.

A warp holds a matrix in fragments whose form PTX leaves open. Here it is that of the operands of `mma.sync`: tiles of
16 x 8 (8 x 8 for m8n8) of the accumulator, along N, or along M for m32n8k16; m8n32k16 is m32n8k16 transposed. The f16
fragments of A and B have more registers than that takes: they are repeated.

Every instruction becomes text, which the parser reads in its place: so accesses are checked like any others, and sums
are those of mma.sync. Source: PTX ISA, "Warp-level matrix instructions using wmma", "Matrix Fragments for mma".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from dsv4lib.emulator.ptx.operands import OperandError

_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f32": 32, "s32": 32, "f64": 64}
_BITS |= {"s8": 8, "u8": 8, "s4": 4, "u4": 4, "b1": 1}
_ACCESS = re.compile(
    r"wmma\.(?P<what>load\.[abc]|store\.d)\.sync\.aligned\.(?P<layout>row|col)\.m(?P<m>\d+)n(?P<n>\d+)k(?P<k>\d+)"
    r"(?P<space>\.(?:global|shared(?:::cta)?))?\.(?P<type>\w+)"
)
_MMA = re.compile(
    r"wmma\.mma\.(?:(?P<op>xor|and)\.popc\.)?sync\.aligned\.(?:row|col)\.(?:row|col)\.m(?P<m>\d+)n(?P<n>\d+)k(?P<k>\d+)"
    r"\.(?P<types>[\w.]+?)(?P<sat>\.satfinite)?"
)
_SHAPES = {  # by the type of A
    **dict.fromkeys(("f16", "bf16", "s8", "u8"), ((16, 16, 16), (32, 8, 16), (8, 32, 16))),
    "tf32": ((16, 16, 8),),
    "f64": ((8, 8, 4),),
    **dict.fromkeys(("s4", "u4"), ((8, 8, 32),)),
    "b1": ((8, 8, 128),),
}
_DECLARED = (
    ".reg .b32 %wmma_lane, %wmma_g, %wmma_t, %wmma_i, %wmma_j, %wmma_o, %wmma_x, %wmma_v<16>",
    ".reg .b16 %wmma_h<2>",
    ".reg .b64 %wmma_p, %wmma_q, %wmma_w<2>",
)

_PLACE = "mov.u32 %wmma_lane, %laneid", "shr.u32 %wmma_g, %wmma_lane, 2", "and.b32 %wmma_t, %wmma_lane, 3"


class Piece(NamedTuple):
    """What one register of a fragment holds, in lane 4 g + t. ``count`` elements from (g + first, scale t + second) on.

    They follow each other in the second index, that of the matrix's columns, or with ``transposed`` of its rows.
    """

    first: int
    second: int
    scale: int
    count: int
    transposed: bool


def expand(opcode: str, operands: Sequence[str], base: Sequence[str]) -> list[str]:
    """Write the statements that implement an instruction.

    They have a scope of their own.

    Args:
        opcode, operands: as they are written.
        base: statements that compute the address into ``%wmma_p``; of wmma.mma nothing.

    Raises:
        OperandError: a form that PTX does not have, or other numbers of registers than it has.
    """
    if match := _MMA.fullmatch(re.sub(r"\.rn(?=\.|$)", "", opcode)):  # f64, which has it before or after the types
        return _multiply(match, [_registers(text) for text in operands])
    match = _ACCESS.fullmatch(opcode)
    if match is None:
        raise OperandError(f"{opcode} is no form of wmma that is known")
    store = match["what"] == "store.d"
    values, stride = operands[1 if store else 0], operands[2] if len(operands) > 2 else None
    return _access(match, store, _registers(values), stride, base)


def _registers(text: str) -> list[str]:
    return [item.strip() for item in text.strip("{} \n\t").split(",")]


def _pieces(matrix: str, shape: tuple[int, int, int], kind: str) -> list[Piece]:
    """The registers of a fragment in order, each of them once."""
    m, n, k = shape
    bits, swapped = _BITS[kind], m == 8 and n == 32
    if matrix in "cd":
        rows, columns = (n, m) if swapped else (m, n)
        tall = min(rows, 16)
        starts = [(i, j) for i in range(0, rows, tall) for j in range(0, columns, 8)]
        pairs = [(i + high, j) for i, j in starts for high in range(0, tall, 8)]
        if bits == 16:
            return [Piece(i, j, 2, 2, swapped) for i, j in pairs]
        return [Piece(i, j + low, 2, 1, swapped) for i, j in pairs for low in (0, 1)]
    each = max(1, 32 // bits)  # of a register, along K
    halves = range(0, k, 4 * each)
    extent = m if matrix == "a" else n
    if (matrix == "a") != swapped and extent >= 16:  # the operand with rows of 16
        found = [(i + high, at) for i in range(0, extent, 16) for at in halves for high in (0, 8)]
    else:
        found = [(i, at) for i in range(0, extent, 8) for at in halves]
    return [Piece(i, at, each, each, matrix == "b") for i, at in found]


def _count(matrix: str, kind: str, pieces: list[Piece]) -> int:
    """Registers of a fragment."""
    return 8 if matrix in "ab" and kind == "f16" else len(pieces)


def _shape(match: re.Match[str], kind: str) -> tuple[int, int, int]:
    shape = int(match["m"]), int(match["n"]), int(match["k"])
    if shape not in _SHAPES.get(kind, ()):
        raise OperandError(f"wmma has no m{shape[0]}n{shape[1]}k{shape[2]} of {kind}")
    return shape


def _access(match: re.Match[str], store: bool, values: list[str], stride: str | None, base: Sequence[str]) -> list[str]:
    """wmma.load or wmma.store."""
    matrix, kind, space = match["what"][-1], match["type"], match["space"] or ""
    shape = int(match["m"]), int(match["n"]), int(match["k"])
    if kind not in _BITS or (matrix in "ab") != (kind not in ("f32", "s32")) and kind not in ("f16", "f64"):
        raise OperandError(f"wmma.{match['what']} of {kind}")
    if matrix in "ab":
        _shape(match, kind)
    elif shape not in {known for shapes in _SHAPES.values() for known in shapes}:
        raise OperandError(f"wmma has no m{shape[0]}n{shape[1]}k{shape[2]}")
    pieces = _pieces(matrix, shape, kind)
    if len(values) != (count := _count(matrix, kind, pieces)):
        raise OperandError(f"{match[0]} has {count} registers, not {len(values)}")
    m, n, k = shape
    rows, columns = {"a": (m, k), "b": (k, n)}.get(matrix, (m, n))
    stride = stride or str(columns if match["layout"] == "row" else rows)
    bits = _BITS[kind]
    temporary = "%wmma_w" if bits == 64 else "%wmma_v"
    word = f".b{max(bits, 32)}"
    out = [*_DECLARED, *_PLACE, *base]
    for number, piece in enumerate(pieces):
        register = f"{temporary}{number}"
        if store:
            out.append(f"mov{word} {register}, {values[number]}")
        # Do the elements of the register follow each other in memory?
        contiguous = piece.transposed == (match["layout"] == "col")
        out += [f"add.u32 %wmma_i, %wmma_g, {piece.first}"]
        parts = 1 if contiguous else piece.count
        for part in range(parts):
            out += [f"mad.lo.u32 %wmma_j, %wmma_t, {piece.scale}, {piece.second + part}"]
            major, minor = ("i", "j") if contiguous else ("j", "i")
            out += [
                f"mad.lo.u32 %wmma_o, %wmma_{major}, {stride}, %wmma_{minor}",
                f"mul.wide.u32 %wmma_q, %wmma_o, {bits}",
                "shr.u64 %wmma_q, %wmma_q, 3",
                "add.s64 %wmma_q, %wmma_q, %wmma_p",
            ]
            width = min(64, bits * piece.count) if contiguous else bits
            out += _store(space, register, width, part) if store else _load(space, register, width, part)
    if not store:
        out += [f"mov{word} {value}, {temporary}{i % len(pieces)}" for i, value in enumerate(values)]
    return out


def _load(space: str, register: str, width: int, part: int) -> list[str]:
    """Element ``part`` of a register."""
    if width >= 32:
        return [f"ld{space}.b{width} {register}, [%wmma_q]"]
    if width < 8:
        raise OperandError("elements of less than a byte follow each other in memory")
    loaded = [f"ld{space}.u{width} %wmma_x, [%wmma_q]"]
    if part == 0:
        return [*loaded, f"mov.b32 {register}, %wmma_x"]
    return [*loaded, f"shl.b32 %wmma_x, %wmma_x, {width * part}", f"or.b32 {register}, {register}, %wmma_x"]


def _store(space: str, register: str, width: int, part: int) -> list[str]:
    if width >= 32:
        return [f"st{space}.b{width} [%wmma_q], {register}"]
    return [f"shr.u32 %wmma_x, {register}, {width * part}", f"st{space}.u{width} [%wmma_q], %wmma_x"]


def _multiply(match: re.Match[str], operands: list[list[str]]) -> list[str]:
    """wmma.mma as one mma.sync a tile of the accumulator."""
    types = match["types"].split(".")
    dtype, ctype = types[0], types[-1]
    atype, btype = ("f16", "f16") if len(types) == 2 else (types[1], types[2]) if len(types) == 4 else ("", "")
    m, n, k = shape = _shape(match, atype)
    if match["sat"] and dtype != "s32":
        raise OperandError("satfinite of floats is not implemented for wmma")
    if (match["op"] is not None) != (atype == "b1"):
        raise OperandError("xor.popc and and.popc are of b1, which has one of them")
    pieces = {x: _pieces(x, shape, kind) for x, kind in zip("abcd", (atype, btype, ctype, dtype), strict=True)}
    d, a, b, c = operands
    for name, values in zip("dabc", operands, strict=True):
        if len(values) != (count := _count(name, atype if name in "ab" else "", pieces[name])):
            raise OperandError(f"{match[0]} has {count} registers of {name}, not {len(values)}")
    if m == 8 and n == 32:
        m, n, a, b, atype, btype = n, m, b, a, btype, atype
    sum_type = dtype if dtype == ctype else "f32"
    word = ".b64" if dtype == "f64" else ".b32"
    temporary = "%wmma_w" if dtype == "f64" else "%wmma_v"
    each = {"f16": 2, "f32": 4, "s32": 4, "f64": 2}[sum_type] if m > 8 else 2  # registers of a tile's sums
    out = [*_DECLARED, *_summands(c, ctype, sum_type, word, temporary)]
    rows = min(m, 16)
    end = {"b1": f".{match['op']}.popc"}.get(atype, "")
    opcode = f"mma.sync.aligned.m{rows}n8k{k}.row.col{match['sat'] or ''}.{sum_type}.{atype}.{btype}.{sum_type}{end}"
    tiles = [(i, j) for i in range(m // rows) for j in range(n // 8)]
    a_each = len(_pieces("a", (16, 16, k), atype)) if m > 8 else 1
    b_each = len(_pieces("b", (16, 16, k), btype)) // 2 if m > 8 else 1
    for number, (i, j) in enumerate(tiles):
        sums = ", ".join(f"{temporary}{number * each + r}" for r in range(each))
        left, right = ", ".join(a[i * a_each :][:a_each]), ", ".join(b[j * b_each :][:b_each])
        out.append(f"{opcode} {{{sums}}}, {{{left}}}, {{{right}}}, {{{sums}}}")
    return out + _results(d, dtype, sum_type, word, temporary)


def _summands(c: list[str], ctype: str, sum_type: str, word: str, temporary: str) -> list[str]:
    """The accumulator into temporary registers, in the type that is added in."""
    if ctype == sum_type:
        return [f"mov{word} {temporary}{i}, {value}" for i, value in enumerate(c)]
    out = []
    for i, value in enumerate(c):
        out += [f"mov.b32 {{%wmma_h0, %wmma_h1}}, {value}"]
        out += [f"cvt.f32.f16 %wmma_v{2 * i + h}, %wmma_h{h}" for h in (0, 1)]
    return out


def _results(d: list[str], dtype: str, sum_type: str, word: str, temporary: str) -> list[str]:
    """The sums from temporary registers, all of them after the last operand was read."""
    if dtype == sum_type:
        return [f"mov{word} {value}, {temporary}{i}" for i, value in enumerate(d)]
    return [f"cvt.rn.f16x2.f32 {value}, %wmma_v{2 * i + 1}, %wmma_v{2 * i}" for i, value in enumerate(d)]
