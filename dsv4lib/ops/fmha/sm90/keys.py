"""How 584-byte entries become bf16 tiles on Hopper. Loads to registers, conversion, stores to shared memory.

A warp has 8 keys of a tile (`dsl.kv_entry`: 4 lanes an entry). They live in registers from their loads to their
conversion, so the loads of tile j + 1 are under way while its stage is waited for. Hopper has no
conversion that scales, and one to bf16 takes three steps. So the bits of a code are moved to where bf16 has them:

    E4M3  s eeee mmm    ->    bf16  s 0000eeee mmm0000    is 2^-120 as large, also where it is subnormal

and a multiplication by 2^(e + 120) in bf16 makes the value, rounded once. Scales above 2^7, which no number below
57,344 needs, have no such factor: what 2^7 made, exactly, is multiplied by the rest in shared memory, NaN included. A
code of NaN beside another scale, which `formats.kv_entry` does not write, counts as 480.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from dsv4lib.dsl import kv_entry
from dsv4lib.dsl.asm import asm
from dsv4lib.formats.kv_entry import GROUPS, LAYOUT
from dsv4lib.ops.fmha.config import CHUNK_BYTES, TILE_N
from dsv4lib.ops.fmha.sm90.config import MATH_WARPS, STAGE_BYTES, STAGES, Config
from dsv4lib.ops.fmha.work import Items, KeyLists, KeyRows, KeySplits, Work

LARGEST = 134  # byte of a scale whose 2^(e + 120) is a number of bf16


class KeySources(NamedTuple):
    """The `kv_entry.Pool` of compressed entries and of the window. None: there are no such keys."""

    entries: Any
    window: Any


class Ring(NamedTuple):
    """Stages of keys in shared memory: address of the first, barriers. Also bits of keys that are there."""

    keys: Int32
    valid: cute.Tensor  # Int32 [2, stages]
    full: cute.Pointer
    empty: cute.Pointer


class KeyPlace(NamedTuple):
    """Where an index is: at an address, if ``listed`` is not 0; else ``index`` is it.

    The address is one of the list's even where nothing is read there. Whether to read is a number of its own and not an
    address of 0: ptxas was seen to compare an address with 0 before a predicated instruction had written it.
    """

    index: Int32
    listed: Int32
    address: Int64


class Guess(NamedTuple):
    """An index that was loaded, if ``listed`` is not 0, from ``address`` before it was known to be needed."""

    index: Int32
    listed: Int32
    address: Int64


class Keys(Config):
    """What the producer warps do."""

    def key_sources(self, entries: KeyRows, window: KeyRows) -> KeySources:
        """Host side: find the pages."""
        found = []
        for there, keys in ((self.entries != "none", entries), (self.window, window)):
            if there:
                pages, *paging = keys.pool
                found.append(kv_entry.Pool(pages.iterator.toint(), *paging, Uint32(pages.stride[0])))
            else:
                found.append(None)
        return KeySources(*found)

    @cute.jit
    def produce(self, sources: KeySources, lists: KeyLists, work: Work, ring: Ring, guess: Any):
        """Producer warps: tile after tile."""
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx() - MATH_WARPS
        first_key, batches = warp * self.keys, self.keys // kv_entry.ENTRIES_AT_ONCE
        own = first_key + lane % self.keys  # the key of a tile whose index this lane reads
        key = first_key + lane // 4  # the one of batch 0 of which it brings a quarter
        offset = ring.keys + kv_entry.smem_offset(key, lane)
        held = cute.make_rmem_tensor(batches, Int32)
        raw = cute.make_rmem_tensor((kv_entry.raw_words(), batches), Int64)
        scales = cute.make_rmem_tensor((2, batches), Int32)
        pools = self.lane_pools(sources)
        index = self.entry(lists, work, work.first, own, guess)
        place = work.first * TILE_N + key
        for batch in cutlass.range_constexpr(batches):
            self.fetch(pools, work, place, index, batch, held, raw, scales)
        ahead = self.entry(lists, work, work.first + 1, own)
        stage, parity = Int32(0), Int32(1)
        for tile in cutlass.range(work.first, work.end, unroll=1):
            there = cute.arch.vote_ballot_sync(index >= 0)
            index, ahead = ahead, self.entry(lists, work, tile + 2, own)
            place = (tile + 1) * TILE_N + key
            cute.arch.mbarrier_wait(ring.empty + stage, parity)
            for batch in cutlass.range_constexpr(batches):
                rows = offset + stage * STAGE_BYTES + batch * (kv_entry.ENTRIES_AT_ONCE * kv_entry.ROW_BYTES)
                convert(held[batch], raw[None, batch], scales[None, batch], rows)
                self.fetch(pools, work, place, index, batch, held, raw, scales)
            if lane == 0:
                self.store_valid(ring, stage, warp, there)
            cute.arch.mbarrier_arrive(ring.full + stage)
            stage = stage + 1
            if stage == STAGES:
                stage, parity = Int32(0), parity ^ 1

    def lane_pools(self, sources: KeySources) -> list:
        """Return the `LanePool` of each source, None where there is none.

        A producer thread has few registers: what is the same in all lanes is not kept in them, nor anything twice.
        """
        pools = []
        for source in sources:
            if source is None:
                pools.append(None)
            else:
                size = source.page_size * LAYOUT.data_bytes
                pools.append(kv_entry.lane_of(source)._replace(scales=source.address + Int64(size)))
        if None not in pools:
            pools[1] = pools[1]._replace(piece=pools[0].piece)
        return pools

    @cute.jit
    def store_valid(self, ring: Ring, stage: Int32, warp: Int32, there: Int32):
        """Store a warp's bits of the keys that are there."""
        bits = cutlass.Uint16 if cutlass.const_expr(self.keys == 16) else cutlass.Uint8
        own = cute.make_tensor(cute.recast_ptr(ring.valid.iterator, dtype=bits), self.producer_warps * STAGES)
        own[stage * self.producer_warps + warp] = bits(there & (1 << self.keys) - 1)

    @cute.jit
    def entry(self, lists: KeyLists, work: Work, tile: Int32, key: Int32, guess: Any = None):
        """Return the index of the ``key``-th entry of a tile; -1: none."""
        found, place = self.nowhere(lists, work.token), tile * TILE_N + key
        if tile < work.end:
            if cutlass.const_expr(self.entries != "none"):
                if place < work.window_at and place < work.entries:
                    found = self.named(lists.entries.index, work.token, place, work.entry_row, found)
            if cutlass.const_expr(self.window):
                place = place - work.window_at
                if place >= 0 and place < work.window:
                    found = self.named(lists.window.index, work.token, place, work.window_row, found)
        return self.known(found, guess)

    @cute.jit
    def known(self, place: KeyPlace, guess: Any):
        """Return the index of a `KeyPlace`, loaded unless the `Guess` has it."""
        index, listed, address = place
        if cutlass.const_expr(guess is not None):
            if listed != 0 and guess.listed != 0 and address == guess.address:
                index, listed = guess.index, Int32(0)
        return loaded(index, listed, address)

    def nowhere(self, lists: KeyLists, token: Int32) -> KeyPlace:
        """Return the `KeyPlace` of no key."""
        for keys in lists:
            if keys is not None and keys.index is not None:
                return KeyPlace(Int32(-1), Int32(0), keys.index[token, None].iterator.toint())
        return KeyPlace(Int32(-1), Int32(0), Int64(0))

    def tiles_of_split(self, tiles: Int32, splits: KeySplits) -> Int32:
        """Return how many tiles of a token a split has, but for the last ones."""
        return cute.ceil_div(tiles, splits.splits)

    @cute.jit
    def guess(self, lists: KeyLists, items: Items):
        """Load the index that this lane needs first if every list is as long as it can be, beside the lists' lengths.

        It is of the entries where there are any: the first of a split begins with window keys rarely.
        """
        keys = lists.entries if cutlass.const_expr(self.entries == "index") else lists.window
        if cutlass.const_expr(self.entries == "range" or keys.index is None):
            return None
        width = keys.index.shape[1]
        tile = Int32(0)
        if cutlass.const_expr(self.partial):
            most = [Int32(0) if one is None or one.index is None else one.index.shape[1] for one in lists]
            _, tiles = self.places(*most)
            tile = items.split * self.tiles_of_split(tiles, items.splits)
        thread = cute.arch.thread_idx()[0] - 32 * MATH_WARPS
        place = tile * TILE_N + (thread >> 5) * self.keys + (thread & self.keys - 1)
        token, listed = cutlass.min(items.first, items.end - 1), Int32(0)
        if thread >= 0 and place >= 0 and place < width:  # math threads have no keys
            listed = Int32(1)
        address = keys.index[token, None].iterator.toint() + Int64(cutlass.max(place * listed, 0)) * 4
        return Guess(loaded(Int32(-1), listed, address), listed, address)

    def named(self, mIndex: Any, token: Int32, place: Int32, first: Int32, nowhere: KeyPlace) -> KeyPlace:
        """Return the `KeyPlace` of a key: the row itself of a range, else where a list has it."""
        if mIndex is None:
            return KeyPlace(first + place, Int32(0), nowhere.address)
        return KeyPlace(Int32(-1), Int32(1), mIndex[token, None].iterator.toint() + Int64(first + place) * 4)

    @cute.jit
    def fetch(
        self,
        pools: list,
        work: Work,
        place: Int32,
        index: Int32,
        batch: cutlass.Constexpr,
        held: cute.Tensor,
        raw: cute.Tensor,
        scales: cute.Tensor,
    ):
        """Start the loads of a batch. Lane l loads of the entry at ``place`` whose index lane 8 batch + l / 4 has."""
        own = cute.arch.shuffle_sync(index, batch * kv_entry.ENTRIES_AT_ONCE + cute.arch.lane_idx() // 4)
        held[batch] = own
        if cutlass.const_expr(self.entries != "none" and self.window):
            if place + batch * kv_entry.ENTRIES_AT_ONCE < work.window_at:
                self.load(pools[0], own, raw[None, batch], scales[None, batch])
            else:
                self.load(pools[1], own, raw[None, batch], scales[None, batch])
        else:
            pool = pools[0] if self.entries != "none" else pools[1]
            self.load(pool, own, raw[None, batch], scales[None, batch])

    @cute.jit
    def load(self, pool: kv_entry.LanePool, index: Int32, raw: cute.Tensor, scales: cute.Tensor):
        """Start the loads of this lane's share of an entry, or take zeros: what was there need not be kept then."""
        if index >= 0:
            kv_entry.fetch(pool, index, raw, scales)
        else:
            raw.fill(0)
            scales[0] = Int32(0)
            scales[1] = Int32(0)


def loaded(default: Int32, there: Int32, address: Int64) -> Int32:
    """Load a word, or take ``default`` where ``there`` is 0. Nothing writes its register later, so nothing waits."""
    text = "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, $1; @p ld.global.b32 $0, [$3]; }"
    return asm(text, [Int32], [default, there, address], early=True)


@dsl_user_op
def _factor(scales: Int32, byte: int, *, loc: Any = None, ip: Any = None) -> Int32:
    """Two bf16 of 2^(e - 127 + 120), e a byte of a word, or 134 if that is less."""
    text = f"""{{ .reg .b32 e;
        bfe.u32 e, {{$r0}}, {8 * byte}, 8;
        min.u32 e, e, {LARGEST};
        mad.lo.u32 {{$w0}}, e, 0x800080, 0x3C003C00; }}"""
    return cute.arch.inline_ptx(text, read_only_args=[scales], write_only_types=[Int32], loc=loc, ip=ip)


@dsl_user_op
def _large(first: Int32, second: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Not 0 where one of 7 scale bytes is above 134."""
    text = """{ .reg .b32 x, y;
        and.b32 x, {$r0}, 0x7F7F7F7F; add.u32 x, x, 0x79797979; and.b32 x, x, {$r0}; and.b32 x, x, 0x80808080;
        and.b32 y, {$r1}, 0x7F7F7F; add.u32 y, y, 0x797979; and.b32 y, y, {$r1}; and.b32 y, y, 0x808080;
        or.b32 {$w0}, x, y; }"""
    return cute.arch.inline_ptx(text, read_only_args=[first, second], write_only_types=[Int32], loc=loc, ip=ip)


@dsl_user_op
def _convert_group(
    group: int, low: Int64, high: Int64, factor: Int32, smem: Int32, second: Int32, *, loc: Any = None, ip: Any = None
) -> None:
    lines = ["{ .reg .b32 d<8>, w<4>, u;", "mov.b64 {w0, w1}, {$r0};", "mov.b64 {w2, w3}, {$r1};"]
    for j in range(8):  # of bytes 2 j and 2 j + 1 the sign to bit 15, the rest to bits 4 - 10
        lines += [
            f"prmt.b32 d{j}, w{j // 2}, 0, {0x4342 if j % 2 else 0x4140:#x};",
            f"and.b32 u, d{j}, 0x800080;",
            "mul.lo.u32 u, u, 240;",
            f"mad.lo.u32 d{j}, d{j}, 16, u;",
            f"mul.rn.bf16x2 d{j}, d{j}, {{$r2}};",
        ]
    at = group * CHUNK_BYTES
    lines += [f"st.shared.v4.b32 [{{$r3}} + {at}], {{d0, d1, d2, d3}};"]
    lines += [f"st.shared.v4.b32 [{{$r4}} + {at}], {{d4, d5, d6, d7}};", "}"]
    args = [low, high, factor, smem, second]
    cute.arch.inline_ptx("\n".join(lines), read_only_args=args, loc=loc, ip=ip)


@dsl_user_op
def _enlarge(at: Int32, scales: Int32, group: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Multiply 8 values in shared memory by 2^(e - 134), e the byte of a group of 4: by 1 if less, by NaN for 255."""
    text = f"""{{ .reg .b32 e, f, d<4>; .reg .pred nan;
        shl.b32 e, {{$r2}}, 3; shr.u32 e, {{$r1}}, e; and.b32 e, e, 255;
        setp.eq.u32 nan, e, 255;
        max.u32 e, e, {LARGEST};
        mad.lo.u32 f, e, 0x800080, {-(LARGEST - 127) * 0x800080};
        @nan mov.b32 f, 0x7FC07FC0;
        ld.shared.v4.b32 {{d0, d1, d2, d3}}, [{{$r0}}];
        mul.rn.bf16x2 d0, d0, f; mul.rn.bf16x2 d1, d1, f; mul.rn.bf16x2 d2, d2, f; mul.rn.bf16x2 d3, d3, f;
        st.shared.v4.b32 [{{$r0}}], {{d0, d1, d2, d3}}; }}"""
    cute.arch.inline_ptx(text, read_only_args=[at, scales, group], loc=loc, ip=ip)


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
    chunks: cutlass.Constexpr = kv_entry.WHOLE,
):
    """Dequantise what `kv_entry.fetch` brought into 8 rows of a tile. A row of -1 becomes zeros.

    Args:
        index, raw, scales: as in `kv_entry.fetch`, of whole entries.
        smem: address of this lane's first piece in the first chunk: the tile's + `kv_entry.smem_offset`.
        chunks: those to write.
    """
    second = smem ^ 16
    first, end = chunks
    if index >= 0:
        for group in cutlass.range_constexpr(first, min(end, GROUPS)):
            factor = _factor(scales[group // 4], group % 4)
            _convert_group(group, raw[2 * group], raw[2 * group + 1], factor, smem, second)
        if _large(scales[0], scales[1]) != 0:
            for group in cutlass.range(first, min(end, GROUPS), unroll=1):
                word = cutlass.select_(group < 4, scales[0], scales[1])
                _enlarge(smem + group * CHUNK_BYTES, word, group & 3)
                _enlarge(second + group * CHUNK_BYTES, word, group & 3)
        if cutlass.const_expr(end > GROUPS):
            rope = 2 * GROUPS
            _store16(smem, GROUPS * CHUNK_BYTES, raw[rope], raw[rope + 1])
            _store16(second, GROUPS * CHUNK_BYTES, raw[rope + 2], raw[rope + 3])
    else:
        for chunk in cutlass.range_constexpr(first, end):
            _store16(smem, chunk * CHUNK_BYTES, Int64(0), Int64(0))
            _store16(second, chunk * CHUNK_BYTES, Int64(0), Int64(0))
