"""Convert words of eight 4-bit codes to pairs of fp16 centroids: a table in registers, or one in shared memory.

Word i of the result has the codes of byte i, low nibble first. Centroids are odd in the code, so 8 magnitudes are
enough: their low bytes are two registers, their high bytes two more, and `prmt` looks four codes up at once.

    registers   magnitude and sign of a code (5), shifts (2), 4 lookups, 4 of signs, 4 words put together: 19 a word
    shared      256 pairs by byte, a column of its own for each lane (no bank conflict, 32 KB): 3 for two codes,
                one of them the load

Magnitudes are rounded to 11 significant bits. They are multiplied by a gain before, one that makes all of them round
well, which the caller takes out of its scale. bf16, with 8 bits, would cost more than rounding O.

Source: PTX ISA, "prmt"; `dsv4lib.formats.turbo4`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import cutlass.cute as cute
import torch
from cutlass import Int32
from cutlass.cutlass_dsl import dsl_user_op

from dsv4lib.dsl.asm import asm
from dsv4lib.formats import turbo4

TRIED = 1 << 16  # gains from 1 to 2
PAIRS = 256  # of codes
TABLE_BYTES = PAIRS * 32 * 4  # of the table in shared memory
EVEN, SIGNS, MAGNITUDES = 0x0F0F0F0F, 0x88888888, 0x77777777


class Levels(NamedTuple):
    """Magnitudes of the centroids of N(0, 1) times ``gain`` as bit patterns of 16 bits."""

    gain: float
    bits: tuple[int, ...]


@functools.cache
def levels() -> Levels:
    """Choose the gain at which the magnitudes lose least by rounding to fp16."""
    exact = torch.tensor(turbo4.levels(), dtype=torch.float64)
    gains = 1 + torch.arange(TRIED, dtype=torch.float64)[:, None] / TRIED
    rounded = (exact * gains).half()
    lost = ((rounded.double() / gains - exact) / exact).square().sum(1)
    best = int(lost.argmin())
    return Levels(float(gains[best]), tuple(int(x) & 0xFFFF for x in rounded[best].view(torch.int16)))


def table_of(levels: Levels) -> tuple[int, int, int, int]:
    """Low bytes of magnitudes 0 to 3 and 4 to 7, and their high bytes, as words."""
    parts = [[value >> shift & 0xFF for value in levels.bits] for shift in (0, 8)]
    return tuple(int.from_bytes(part[i : i + 4], "little") for part in parts for i in (0, 4))


def word(value: int) -> Int32:
    """Return a constant of 32 bits."""
    return Int32(value - (1 << 32) if value >= 1 << 31 else value)


def prmt(low: Int32, high: Int32, selector: Int32) -> Int32:
    """Choose 4 of 8 bytes by the nibbles of the selector's lower half."""
    return asm("prmt.b32 $0, $1, $2, $3;", [Int32], [low, high, selector], pure=True)


def shifted(x: Int32, count: int) -> Int32:
    """X >> count, filled with zeros."""
    return asm(f"shr.u32 $0, $1, {count};", [Int32], [x], pure=True)


def by_registers(codes: Int32, table: tuple[int, int, int, int]) -> list:
    """Convert 8 codes to 4 words with tables in registers."""
    low0, low1, high0, high1 = (word(x) for x in table)
    negative = ~codes & word(SIGNS)
    index = (codes ^ (negative - shifted(negative, 3))) & word(MAGNITUDES)  # 7 - code where negative, else code - 8
    sign = shifted(negative, 1)  # 4 or 0: which half of (0, 0x80808080)
    words = []
    for half in range(2):
        own, signs = (shifted(x, 16) if half else x for x in (index, sign))
        low = prmt(low0, low1, own)
        high = prmt(high0, high1, own) ^ prmt(word(0), word(0x80808080), signs)
        words += [prmt(low, high, word(0x5140)), prmt(low, high, word(0x7362))]
    return words


@dsl_user_op
def load_pair(base: Int32, pair: Int32, column: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Load a word of the table in shared memory; ``pair``: of codes, in bits 7 to 14, others are ignored.

    Mask and column are one instruction; the assembler knows the base and puts it into the load.
    """
    text = f"""{{ .reg .b32 at; lop3.b32 at, {{$r1}}, {0xFF << 7}, {{$r2}}, 0xEA;
        add.s32 at, at, {{$r0}}; ld.shared.b32 {{$w0}}, [at]; }}"""
    args = [base, pair, column]
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=args, loc=loc, ip=ip)


@dsl_user_op
def store_pair(address: Int32, value: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Store a word of the table in shared memory."""
    cute.arch.inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[address, value], loc=loc, ip=ip)


def by_shared_table(codes: Int32, base: Int32, column: Int32) -> list:
    """Convert 8 codes to 4 words.

    Args:
        codes: of 8 dims.
        base: address of the table, 128 bytes for each pair of codes. column: byte of this lane's word in them.
    """
    found = []
    for i in range(4):
        at = codes << 7 if i == 0 else shifted(codes, 8 * i - 7)
        found.append(load_pair(base, at, column))
    return found


def pairs_of(first: Int32, second: Int32) -> tuple[Int32, Int32]:
    """Put codes of two words of 8 dims side by side, ``first`` in low nibbles: of even dims, of odd ones."""
    even = (first & word(EVEN)) | ((second & word(EVEN)) << 4)
    odd = (shifted(first, 4) & word(EVEN)) | (second & word(0xF0F0F0F0))
    return even, odd
