"""Read the 584-byte KV entry on the device. It is found in its page, fetched, converted to bf16 in shared memory.

A warp takes 8 entries at a time, 4 lanes each. A lane fetches 16 of every 64 bytes of its entry: 16 of the 64 dims that
share a scale, which become two 16-byte pieces of a row of the 128-byte swizzle:

    global   | 7 x 64 E4M3: lane i of 4 has bytes 16 i .. of each | 64 bf16: bytes 32 i ..  |      7 scales, elsewhere
    SMEM     chunk 0 .. 6, row = key, pieces 2 i and 2 i + 1        chunk 7, the same pieces       of 8 (16 bytes each)

The pieces of the two entries of 8 neighbouring lanes lie in 8 different columns of 16 bytes, whatever the swizzle does
(a test shows it): the stores have no bank conflict. A conversion is one instruction for two dims, scale
included, so 8 entries cost 56 conversions, 10 loads and 16 stores of a warp.

Entries are read by plain loads, so a page may have any number of entries and any stride that is a multiple of 16 bytes.
Not by `ld.global.nc`: a kernel may be launched while the one before still writes entries, which are not read-only then
for as long as it runs.

Source: `dsv4lib.formats.kv_entry`, `.paged`; PTX ISA, "cvt" (``.scaled::n2::ue8m0``), "Shared memory swizzling modes".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from dsv4lib.errors import ArgumentError
from dsv4lib.formats.kv_entry import GROUPS, LAYOUT, NOPE

ENTRIES_AT_ONCE = 8  # of a warp, 4 lanes each
CHUNKS = GROUPS + 1  # of 64 dims; the last one, the rope dims, is bf16
ROW_BYTES = 128  # of one row of the swizzle: 64 dims
_ADDRESSES = f"""{{ .reg .b32 page, slot; .reg .b64 start;
    shl.b32 page, {{$r0}}, 1;
    mul.hi.u32 page, page, {{$r1}};
    shr.u32 page, page, {{$r2}};
    mad.lo.s32 slot, page, {{$r3}}, {{$r0}};
    mad.wide.u32 start, page, {{$r4}}, {{$r5}};
    mad.wide.u32 {{$w0}}, slot, {LAYOUT.data_bytes}, start;
    mad.wide.u32 start, page, {{$r4}}, {{$r6}};
    mad.wide.u32 {{$w1}}, slot, {LAYOUT.scale_bytes}, start; }}"""


MAX_PAGE = 1 << 24  # entries


class Chunks(NamedTuple):
    """Chunks ``first`` .. ``end - 1`` of an entry, 64 dims each."""

    first: int = 0
    end: int = CHUNKS


WHOLE = Chunks()


class Pool(NamedTuple):
    """Pages of entries: address of the first, bytes from page to page. Also entries a page, with its `page_divisor`."""

    address: Int64
    page_size: Int32
    multiplier: Uint32
    shift: Int32
    stride: Uint32


class LanePool(NamedTuple):
    """What a lane needs to find its share of any entry of a pool, for `fetch`.

    Attributes:
        multiplier, shift: of the page size. minus_size: its negative. stride: bytes from page to page.
        data, scales: addresses in the first page, of this lane's bytes and of the scales. piece: byte in 64.
    """

    multiplier: Uint32
    shift: Int32
    minus_size: Int32
    stride: Uint32
    data: Int64
    scales: Int64
    piece: Int64


def page_divisor(page_size: int) -> tuple[int, int]:
    """Return (multiplier, shift) that divide by the page size.

    i // page_size == (2 i * multiplier >> 32) >> shift for 0 <= i < 2^31.

    Source: Granlund and Montgomery, "Division by invariant integers using multiplication" (1994).

    Raises:
        ArgumentError: a page size outside 1 .. 2^24.
    """
    if not isinstance(page_size, int) or not 1 <= page_size <= MAX_PAGE:
        raise ArgumentError("page_size", page_size, "an integer from 1 to 2^24")
    shift = (page_size - 1).bit_length()
    return (1 << 31 + shift) // page_size + 1, shift


@dsl_user_op
def _addresses(index: Int32, lane: LanePool, *, loc: Any = None, ip: Any = None) -> tuple[Int64, Int64]:
    args = [index, *lane[:6]]
    return cute.arch.inline_ptx(_ADDRESSES, read_only_args=args, write_only_types=[Int64, Int64], loc=loc, ip=ip)


@dsl_user_op
def _kept(value: Int64, *, loc: Any = None, ip: Any = None) -> Int64:
    """Keep ``value`` in a register: the compiler would compute it anew for every entry."""
    return cute.arch.inline_ptx(
        "mov.b64 {$w0}, {$r0};", read_only_args=[value], write_only_types=[Int64], loc=loc, ip=ip
    )


@cute.jit
def lane_of(pool: Pool):
    """Return the `LanePool` of this lane."""
    base, size, multiplier, shift, stride = pool
    piece = _kept(Int64(cute.arch.lane_idx() % 4 * 16))
    scales = _kept(base + Int64(size * LAYOUT.data_bytes))
    return LanePool(multiplier, shift, -size, stride, _kept(base + piece), scales, piece)


@dsl_user_op
def _load16(address: Int64, offset: int, *, loc: Any = None, ip: Any = None) -> tuple:
    text = f"ld.global.v2.b64 {{{{$w0}}, {{$w1}}}}, [{{$r0}} + {offset}];"
    return cute.arch.inline_ptx(text, read_only_args=[address], write_only_types=[Int64, Int64], loc=loc, ip=ip)


@dsl_user_op
def _load8(address: Int64, *, loc: Any = None, ip: Any = None) -> tuple:
    text = "ld.global.v2.b32 {{$w0}, {$w1}}, [{$r0}];"
    return cute.arch.inline_ptx(text, read_only_args=[address], write_only_types=[Int32, Int32], loc=loc, ip=ip)


def raw_words(chunks: Chunks = WHOLE) -> int:
    """Count the 64-bit words of an entry's chunks that a lane holds.

    They are 16 bytes of a group, 32 of the rope dims.
    """
    first, end = chunks
    return 2 * (end - first + int(end == CHUNKS))


@cute.jit
def fetch(lane: LanePool, index: Int32, raw: cute.Tensor, scales: cute.Tensor, chunks: cutlass.Constexpr = WHOLE):
    """Start the loads of this lane's share of entry ``index``; -1 loads nothing.

    Args:
        lane: from `lane_of`.
        index: of the entry of this lane, page * page_size + slot, the same in its 4 lanes.
        raw: Int64 registers, `raw_words` of them; scales: Int32 registers [2].
        chunks: `Chunks` of the entry.
    """
    first, end = chunks
    data, scale_at = _addresses(index, lane)
    if index >= 0:
        scales[0], scales[1] = _load8(scale_at)
        for group in cutlass.range_constexpr(first, min(end, GROUPS)):
            raw[2 * (group - first)], raw[2 * (group - first) + 1] = _load16(data, 64 * group)
        if cutlass.const_expr(end == CHUNKS):
            rope = data + lane.piece
            for i in cutlass.range_constexpr(2):
                word = 2 * (GROUPS - first + i)
                raw[word], raw[word + 1] = _load16(rope, NOPE + 16 * i)


def smem_offset(row: Any, lane: Any) -> Any:
    """Return the byte offset of a lane's first piece in a chunk.

    Its second is 16 bytes away, by XOR.

    Args:
        row: key of the lane's entry in its tile. lane: 0 .. 31.
    """
    return row * ROW_BYTES + (lane % 4 * 2 ^ row % 8) * 16


def _groups_text(group: int, count: int, offset: int, chunk_bytes: int) -> str:
    """Convert and store ``count`` groups (1 or 2) from ``offset`` on: their scale bytes are doubled to pairs by one
    permutation."""
    byte = group % 4
    lines = [
        "{ .reg .b16 a<8>, s<2>; .reg .b32 d<8>, pairs;",
        f"prmt.b32 pairs, {{$r2}}, 0, {0x11 * byte | 0x11 * (byte + count - 1) << 8};",
        "mov.b32 {s0, s1}, pairs;",
    ]
    for i in range(count):
        low, high, at = f"{{$r{3 + 2 * i}}}", f"{{$r{4 + 2 * i}}}", offset + i * chunk_bytes
        lines += [f"mov.b64 {{a0, a1, a2, a3}}, {low};", f"mov.b64 {{a4, a5, a6, a7}}, {high};"]
        lines += [f"cvt.rn.scaled::n2::ue8m0.bf16x2.e4m3x2 d{j}, a{j}, s{i};" for j in range(8)]
        lines += [f"st.shared.v4.b32 [{{$r0}} + {at}], {{d0, d1, d2, d3}};"]
        lines += [f"st.shared.v4.b32 [{{$r1}} + {at}], {{d4, d5, d6, d7}};"]
    return "\n".join([*lines, "}"])


@dsl_user_op
def _convert_groups(
    group: int,
    chunks: Chunks,
    chunk_bytes: int,
    raw: Any,
    word: Int32,
    smem: Int32,
    second: Int32,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    place, count = group - chunks[0], min(2, chunks[1] - group, GROUPS - group)
    args = [smem, second, word, *(raw[i] for i in range(2 * place, 2 * (place + count)))]
    text = _groups_text(group, count, place * chunk_bytes, chunk_bytes)
    cute.arch.inline_ptx(text, read_only_args=args, loc=loc, ip=ip)


@dsl_user_op
def _store16(address: Int32, offset: int, low: Int64, high: Int64, *, loc: Any = None, ip: Any = None) -> None:
    text = f"st.shared.v2.b64 [{{$r0}} + {offset}], {{{{$r1}}, {{$r2}}}};"
    cute.arch.inline_ptx(text, read_only_args=[address, low, high], loc=loc, ip=ip)


@cute.jit
def convert(
    index: Int32,
    raw: cute.Tensor,
    scales: cute.Tensor,
    smem: Int32,
    chunk_bytes: cutlass.Constexpr,
    chunks: cutlass.Constexpr = WHOLE,
):
    """Dequantise what `fetch` brought into 8 rows of a tile.

    The tile has the 128-byte swizzle; a row of -1 becomes zeros.

    Args:
        index, raw, scales, chunks: as in `fetch`.
        smem: address of this lane's first piece in the first chunk: the tile's + `smem_offset`.
        chunk_bytes: from one chunk of 64 dims to the next.
    """
    second = smem ^ 16
    first, end = chunks
    for group in cutlass.range_constexpr(first, min(end, GROUPS), 2):
        _convert_groups(group, chunks, chunk_bytes, raw, scales[group // 4], smem, second)
    if cutlass.const_expr(end == CHUNKS):
        rope = 2 * (GROUPS - first)
        _store16(smem, (GROUPS - first) * chunk_bytes, raw[rope], raw[rope + 1])
        _store16(second, (GROUPS - first) * chunk_bytes, raw[rope + 2], raw[rope + 3])
    if index < 0:  # over what stale registers gave: a branch that is rarely taken, none around the conversions
        for chunk in cutlass.range_constexpr(end - first):
            _store16(smem, chunk * chunk_bytes, Int64(0), Int64(0))
            _store16(second, chunk * chunk_bytes, Int64(0), Int64(0))
