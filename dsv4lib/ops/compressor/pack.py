"""Store an entry from registers to its place in a page or a dense row.

A thread has 4 neighbouring channels.

The bits are those of `formats.kv_entry` and `.indexer_key` for the same vector. Scales are shared by neighbouring
lanes: 16 (kv, 64 dims), 32 (fp8, 128) or 8 (fp4, 32).

Source: `dsv4lib.ops.quantize.codes`, `.entries`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32

from dsv4lib.dsl.tensors import Divisor
from dsv4lib.formats import kv_entry
from dsv4lib.ops.compressor.config import CHANNELS, LANES
from dsv4lib.ops.quantize import codes
from dsv4lib.ops.quantize.config import RECIPES
from dsv4lib.ops.quantize.kernel import divide, store_words

KV_LANES, FP4_LANES = 16, 8  # that share a scale


class Pages(NamedTuple):
    """Where entries go: int32 [P, S / 4] and uint8 [P, S] of the same pages. Dense: rows [N, dim] and None."""

    words: cute.Tensor
    bytes: Any


class Target(NamedTuple):
    """Where an entry goes: its page and slot. Also whether this thread stores, and the first of its channels."""

    page: Int32
    slot: Int32
    kept: Boolean
    channel: Int32


@cute.jit
def rounded(sizes: cutlass.Constexpr, values: list):
    """Round ``values`` to bf16, for entries of a quantised format.

    Others stay as they are.
    """
    if cutlass.const_expr(sizes.layout is not None):
        pairs = [(word << 16, word & Int32(-65536)) for word in words(values, BFloat16)]
        values = [half.bitcast(Float32) for pair in pairs for half in pair]
    return values


@cute.jit
def pack(sizes: cutlass.Constexpr, out: Pages, page: Divisor, slot: Int32, kept: Boolean, channel: Int32, values: list):
    """Round and store; all lanes of a warp come here.

    Args:
        sizes: `config.Sizes`.
        out, page: pages, and entries of one.
        slot: of the entry. kept: this thread stores.
        channel: of the first of ``values``, 4 Float32.
    """
    form = sizes.form
    if cutlass.const_expr(form in ("bf16", "fp32")):
        element = BFloat16 if cutlass.const_expr(form == "bf16") else Float32
        if kept:
            store_words(cute.recast_tensor(out.words, Int32)[slot, None], channel // CHANNELS, words(values, element))
    else:
        place = (Int32(0), Int32(0))
        if kept:
            place = divide(slot, page)
        to = Target(*place, kept, channel)
        bits = codes.largest([x.bitcast(Int32) for x in values], False)
        if cutlass.const_expr(form == "kv"):
            pack_kv(sizes, out, page, to, values, codes.over_lanes(bits, KV_LANES))
        elif cutlass.const_expr(form == "fp8"):
            pack_fp8(sizes, out, page, to, values, codes.over_lanes(bits, LANES))
        else:
            pack_fp4(sizes, out, page, to, values, codes.over_lanes(bits, FP4_LANES))


@cute.jit
def words(values: list, element: cutlass.Constexpr):
    """Convert values to an element type, in words."""
    rX, rOut = cute.make_rmem_tensor(CHANNELS, Float32), cute.make_rmem_tensor(CHANNELS, element)
    for c in cutlass.range_constexpr(CHANNELS):
        rX[c] = values[c]
    rOut.store(rX.load().to(element))
    rWords = cute.recast_tensor(rOut, Int32)
    return [rWords[i] for i in range(cute.size(rWords))]


@cute.jit
def store_scale(sizes: cutlass.Constexpr, mBytes: cute.Tensor, page: Divisor, to: Target, group: Int32, byte: Int32):
    """Scale byte ``group`` of an entry."""
    mBytes[to.page, sizes.layout.scale_offset(page.number, to.slot, group)] = cutlass.Uint8(byte)


@cute.jit
def pack_kv(sizes: cutlass.Constexpr, out: Pages, page: Divisor, to: Target, values: list, amax: Int32):
    """Pack 448 E4M3, 64 bf16, 7 scales and a zero."""
    recipe = RECIPES["kv"]
    byte = codes.ue8m0(amax, recipe.divisor, recipe.floor)
    nope = to.channel < kv_entry.NOPE
    if to.kept:
        line, row = out.words[to.page, None], to.slot * (sizes.layout.data_bytes // CHANNELS)
        if nope:
            store_words(line, row + to.channel // CHANNELS, [codes.e4m3(values, codes.inverse_power(byte))])
        else:
            pair = (row + kv_entry.NOPE // CHANNELS) // 2 + (to.channel - kv_entry.NOPE) // CHANNELS
            store_words(line, pair, words(values, BFloat16))
        if to.channel % (KV_LANES * CHANNELS) == 0:
            byte = Int32(cutlass.select_(nope, byte, Int32(0)))
            store_scale(sizes, out.bytes, page, to, to.channel // (KV_LANES * CHANNELS), byte)


@cute.jit
def pack_fp8(sizes: cutlass.Constexpr, out: Pages, page: Divisor, to: Target, values: list, amax: Int32):
    """Pack 128 E4M3 and an fp32 scale."""
    recipe = RECIPES["kv"]
    byte = codes.ue8m0(amax, recipe.divisor, recipe.floor)
    if to.kept:
        line = out.words[to.page, None]
        store_words(
            line, (to.slot * sizes.dim + to.channel) // CHANNELS, [codes.e4m3(values, codes.inverse_power(byte))]
        )
        if to.channel == 0:
            line[page.number * (sizes.dim // CHANNELS) + to.slot] = codes.power(byte).bitcast(Int32)


@cute.jit
def pack_fp4(sizes: cutlass.Constexpr, out: Pages, page: Divisor, to: Target, values: list, amax: Int32):
    """Pack 128 E2M1 and 4 scales; an even lane stores its neighbour's too."""
    recipe = RECIPES["mxfp4"]
    byte = codes.ue8m0(amax, recipe.divisor, recipe.floor)
    both = [*values, *(cute.arch.shuffle_sync_bfly(x, 1) for x in values)]
    word = codes.e2m1_of_power(both, byte, sizes.fp4_conversion)
    if to.kept and to.channel % codes.PIECE == 0:
        line = out.words[to.page, None]
        store_words(line, (to.slot * sizes.dim + to.channel) // codes.PIECE, [word])
        if to.channel % (FP4_LANES * CHANNELS) == 0:
            store_scale(sizes, out.bytes, page, to, to.channel // (FP4_LANES * CHANNELS), byte)
