"""One tile of 32 tokens by a warp: loads, S = Q' C_k^T, online softmax, O'^T += C_v^T (P n_v)^T.

`m16n8k16`: heads are rows of S, but columns of O'^T, for then a lane's sums of S are its words of P, and 8 heads leave
no row of O' unused. Which token is which column, and which dim is which k, is free as long as both operands agree; so
every lane (g = lane / 4, t = lane % 4) loads neighbouring bytes:

    K   column g of block j is token 8 (g / 2) + 2 j + g % 2; lane t has a quarter of its dims, 16 bytes of 128 dims
    S   columns 2 t, 2 t + 1 of block j are tokens 8 t + 2 j, + 1: a lane has 8 neighbouring tokens, 16 bytes of norms
    V   the same 8 tokens are k of P; lane g has an eighth of the dims of each, 8 bytes: rows g, g + 8 of blocks of O'^T

Codes of two tokens are put side by side before they are looked up, so a word of V is (token, next token) of one dim.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32

from dsv4lib.dsl import warp_mma
from dsv4lib.dsl.asm import asm
from dsv4lib.ops.turbo4_decode import dequant
from dsv4lib.ops.turbo4_decode.config import BLOCK, BLOCKS, MMA_TYPE, TILE, WARP, Config

K_STEPS = TILE // 16  # of P V


class Place(NamedTuple):
    """A warp's share of the work.

    Attributes:
        row, column: g and t of the lane. slice: which 128 dims. number: of the token group.
        table: row of the block table. pairs: address of the table of pairs in SMEM.
        query: address of the lane's dims of q' of head g in SMEM. exchange: of this token group's S in SMEM.
    """

    row: Int32
    column: Int32
    slice: Int32
    number: Int32
    table: cute.Tensor
    pairs: Int32
    query: Int32
    exchange: Int32


class Tile(NamedTuple):
    """Registers of a tile: words of K [words, blocks] and of V [words, tokens], norms fp16 [8] of both."""

    rK: cute.Tensor
    rV: cute.Tensor
    rKNorm: cute.Tensor
    rVNorm: cute.Tensor


class Softmax(NamedTuple):
    """Running softmax of the lane's one or two rows: row_max (all lanes of the row), row_sum (this lane's)."""

    row_max: cute.Tensor
    row_sum: cute.Tensor


def pack(low: Float32, high: Float32) -> Int32:
    """Round two numbers to a word of fp16."""
    return asm("cvt.rn.f16x2.f32 $0, $2, $1;", [Int32], [low, high], pure=True)


def store_four(address: Int32, values: list) -> None:
    """Store four numbers in shared memory."""
    text = "st.shared.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"
    cute.arch.inline_ptx(text, read_only_args=[address, *values])


def load_four(address: Int32) -> list:
    """Load four numbers from shared memory."""
    text = "ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
    return list(cute.arch.inline_ptx(text, write_only_types=[Float32] * 4, read_only_args=[address]))


def load_words(address: Int32) -> list:
    """Load four words from shared memory, here and now: the compiler does not keep them."""
    text = "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
    return list(cute.arch.inline_ptx(text, write_only_types=[Int32] * 4, read_only_args=[address]))


class Attend(Config):
    """The work on a tile; see the module docstring."""

    def new_tile(self) -> Tile:
        """Make the registers of a tile, zeros."""
        shapes = (self.k_words, BLOCKS), (self.v_words, BLOCK)
        words = [cute.make_rmem_tensor(shape, Int32) for shape in shapes]
        norms = [cute.make_rmem_tensor(BLOCK, Float16) for _ in range(2)]
        for one in (*words, *norms):
            one.fill(0)
        return Tile(*words, *norms)

    @cute.jit
    def page_of(self, place: Place, token: Int32, stop: Int32):
        """Load the page of a token; 0 where there is none."""
        page = Int32(0)
        if token < stop:
            page = place.table[self.page_column(token)]
        return page

    @cute.jit
    def load_keys(self, mPages: cute.Tensor, place: Place, tile: Tile, first: Int32, stop: Int32):
        """Start the loads of this lane's keys and their norms; tokens from ``stop`` on stay as they are."""
        near, own = first + BLOCK * (place.row // 2), first + BLOCK * place.column
        page, own_page = self.page_of(place, near, stop), self.page_of(place, own, stop)
        if near < stop:
            slot = near % self.page_size + place.row % 2
            for j in cutlass.range_constexpr(BLOCKS):
                unit = (slot + 2 * j) * (4 * self.dim_warps) + 4 * place.slice + place.column
                cute.autovec_copy(cute.local_tile(mPages[page, None], (self.k_words,), (unit,)), tile.rK[None, j])
        self.load_norms(mPages, tile.rKNorm, own, own_page, stop)

    @cute.jit
    def load_values(self, mPages: cute.Tensor, place: Place, tile: Tile, first: Int32, stop: Int32):
        """Start the loads of this lane's values and their norms; tokens from ``stop`` on stay as they are."""
        own = first + BLOCK * place.column
        page = self.page_of(place, own, stop)
        if own < stop:
            slot = own % self.page_size
            for i in cutlass.range_constexpr(BLOCK):
                unit = (slot + i) * (8 * self.dim_warps) + 8 * place.slice + place.row
                cute.autovec_copy(cute.local_tile(mPages[page, None], (self.v_words,), (unit,)), tile.rV[None, i])
        self.load_norms(mPages, tile.rVNorm, own, page, stop)

    @cute.jit
    def load_norms(self, mPages: cute.Tensor, rNorm: cute.Tensor, token: Int32, page: Int32, stop: Int32):
        """Start the load of 8 norms."""
        if token < stop:
            unit = self.page_size * self.head_dim // 32 + token % self.page_size // BLOCK
            words = cute.recast_tensor(rNorm, Int32)
            cute.autovec_copy(cute.local_tile(mPages[page, None], (BLOCK // 2,), (unit,)), words)

    def words_of(self, codes: Int32, place: Place) -> list:
        """Convert 8 codes to 4 words."""
        if self.table == "shared":
            return dequant.by_shared_table(codes, place.pairs, 4 * cute.arch.lane_idx())
        return dequant.by_registers(codes, self.words)

    def scores(self, place: Place, tile: Tile, rS: cute.Tensor) -> None:
        """S = Q' C_k^T of this warp's dims: rS [4, blocks] in the layout of an MMA's sums.

        q' is two fp16 numbers, high and low. Up to 8 heads leave half of the rows of an MMA free: low parts are there,
        and added afterwards; with more heads they take a second MMA. Words of q' come from SMEM every time: registers
        are what limits how many warps an SM has.
        """
        rS.fill(0.0)
        for j in range(BLOCKS):
            for i in range(self.k_words):
                places = [place.query + 16 * i + half * 16 * self.q_stride for half in range(2 * self.halves)]
                rows = [load_words(at) for at in places]  # of q' high and low, 8 heads each
                words = self.words_of(tile.rK[i, j], place)
                for k in (0, 2):
                    for first, second in (rows[:2], rows[2:])[: self.halves]:
                        a = [first[k], second[k], first[k + 1], second[k + 1]]
                        warp_mma.mma(a, words[k : k + 2], rS[None, j], MMA_TYPE)
            if self.halves == 1:
                for c in range(2):
                    rS[c, j] = rS[c, j] + rS[2 + c, j]

    @cute.jit
    def add_slices(self, place: Place, rS: cute.Tensor, parity: Int32):
        """Sum S over the warps that share a tile, through SMEM, in order: all of them have the same bits then."""
        used = 2 * self.halves  # of 4 sums
        size = WARP * BLOCKS * used * 4
        base = place.exchange + parity * (self.dim_warps * size)
        lane = cute.arch.lane_idx() * 16
        rows = [rS[r, j] for j in range(BLOCKS) for r in range(used)]
        for i in cutlass.range_constexpr(len(rows) // 4):
            store_four(base + place.slice * size + i * (16 * WARP) + lane, rows[4 * i : 4 * i + 4])
        cute.arch.barrier(barrier_id=1 + place.number, number_of_threads=WARP * self.dim_warps)
        sums = None
        for w in cutlass.range_constexpr(self.dim_warps):
            found = []
            for i in cutlass.range_constexpr(len(rows) // 4):
                found += load_four(base + w * size + i * (16 * WARP) + lane)
            sums = found if w == 0 else [a + b for a, b in zip(sums, found, strict=True)]
        for j in cutlass.range_constexpr(BLOCKS):
            for r in cutlass.range_constexpr(used):
                rS[r, j] = sums[j * used + r]

    @cute.jit
    def softmax(
        self,
        tile: Tile,
        state: Softmax,
        rS: cute.Tensor,
        rO: cute.Tensor,
        rScale: cute.Tensor,
        left: Int32,
    ):
        """S to P in place, O' and row_sum rescaled where row_max grows; column c of the lane counts if c < ``left``.

        Args:
            rScale: of the logits of the lane's rows.
        """
        norms = [self.key_norm(tile.rKNorm[c].to(Float32)) for c in range(BLOCK)]
        for half in cutlass.range_constexpr(self.halves):
            places = [(2 * half + c % 2, c // 2) for c in range(BLOCK)]
            # s = scale n_k (q' . c_k), base 2
            s = [rS[r, j] * norms[c] * rScale[half] for c, (r, j) in enumerate(places)]
            s = [Float32(cutlass.select_(left > c, one, -Float32.inf)) for c, one in enumerate(s)]
            largest = state.row_max[half]
            for c in cutlass.range_constexpr(BLOCK):
                largest = cute.arch.fmax(largest, s[c])
            for i in cutlass.range_constexpr(2):
                largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, 1 << i))
            finite = Float32(cutlass.select_(largest > -Float32.inf, largest, Float32(0.0)))
            acc_scale = cute.math.exp2(state.row_max[half] - finite, fastmath=True)
            if cute.arch.vote_any_sync(largest > state.row_max[half]):
                self.rescale(rO[None, None, half], acc_scale)
            row_sum = state.row_sum[half] * acc_scale
            for c in cutlass.range_constexpr(BLOCK):
                p = cute.math.exp2(s[c] - finite, fastmath=True)
                row_sum += p
                rS[places[c][0], places[c][1]] = p
            state.row_sum[half] = row_sum
            state.row_max[half] = largest

    @cute.jit
    def rescale(self, rO: cute.Tensor, acc_scale: Float32):
        """O' *= acc_scale; the lane has it of head g, and O' of heads 2 t and 2 t + 1."""
        first = 8 * (cute.arch.lane_idx() % 4)  # a lane of head 2 t
        scales = [cute.arch.shuffle_sync(acc_scale, first + 4 * c) for c in range(2)]
        for m in cutlass.range_constexpr(self.m_blocks):
            for r in cutlass.range_constexpr(4):
                rO[r, m] = rO[r, m] * scales[r % 2]

    def add_values(self, place: Place, tile: Tile, rP: cute.Tensor, rO: cute.Tensor, left: Int32) -> None:
        """O'^T += C_v^T (P n_v)^T; tokens from ``left`` on have norm 0, whatever memory holds."""
        norms = [self.value_norm(tile.rVNorm[c].to(Float32)) for c in range(BLOCK)]
        norms = [Float32(cutlass.select_(left > c, one, Float32(0.0))) for c, one in enumerate(norms)]
        for k in range(K_STEPS):
            b = []
            for half in range(self.halves):
                pairs = [[rP[2 * half + c, j] * norms[2 * j + c] for c in range(2)] for j in (2 * k, 2 * k + 1)]
                b.append([pack(*pair) for pair in pairs])
            for i in range(self.v_words):
                sides = [dequant.pairs_of(*(tile.rV[i, 4 * k + 2 * s + c] for c in range(2))) for s in range(2)]
                (even, odd), (even_8, odd_8) = [[self.words_of(one, place) for one in side] for side in sides]
                for w in range(4):
                    a = [even[w], odd[w], even_8[w], odd_8[w]]
                    for half in range(self.halves):
                        warp_mma.mma(a, b[half], rO[None, 4 * i + w, half], MMA_TYPE)
