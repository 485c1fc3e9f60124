"""Quantise cache entries into a paged pool. They are the 584-byte KV entry and the 68-byte FP4 indexer key.

    entry at indices[t] = quantised(x[t])        index = page x page size + slot; -1 drops it; entry t alone decides

| entry   | from a row of | data bytes, in a page at slot x             | scales, after all data, at slot x        |
|---------|---------------|---------------------------------------------|------------------------------------------|
| KV      | 512           | 576: 448 E4M3, then 64 bf16 as they are     | 8: UE8M0 of each 64 nope dims, then 0    |
| indexer | 128           | 64: 128 E2M1                                | 4: UE8M0 of each 32 dims                 |

The bits are those of `formats.kv_entry` and `.indexer_key`; a NaN or Inf spoils what shares its scale. rope dims keep
their bits, a NaN its payload.

**Hadamard** (indexer): `dsl.hadamard` in fp32, strides 1, 2, 4 inside a lane, 8 to 64 by exchange with lanes 1, 2, 4
and 8 away; then one rounding to the type of x.

**Threads.** A piece is 8 elements, one load of 16 bytes (two of fp32). A KV entry is 64 lanes, a scale 8 of them (3
shuffles); an indexer key is 16 lanes, a scale 4, 4 x 8 shuffles for the rotation. Stores are 8 (nope), 16 (rope) or 4
(E2M1) bytes a lane, neighbours side by side, and one byte a scale. A thread takes 2 pieces, so that the few tokens of a
decode step spread over SMs. No shared memory.

**Bytes.** KV: 1024 read and 584 written a token; indexer: 256 and 68. A prefill is limited by memory, a decode step by
the latency of an index, a row and a store, about 2 us with the launch.

Source: FlashMLA's DSV4 layout; DSV4 released inference code; the oracle is `dsv4lib.reference.quantize`.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from dsv4lib.dsl import hadamard
from dsv4lib.dsl.tensors import Divisor
from dsv4lib.errors import ConfigError
from dsv4lib.formats import indexer_key, kv_entry
from dsv4lib.formats.paged import PageLayout
from dsv4lib.ops.quantize import codes
from dsv4lib.ops.quantize.codes import PIECE
from dsv4lib.ops.quantize.config import DTYPES, RECIPES, Recipe
from dsv4lib.ops.quantize.kernel import ELEMENTS, divide, store_words, values_of, words_of

THREADS = 128
AT_ONCE = 2  # pieces of a thread


class Entries:
    """Share rows to pieces and places in pages between both kinds.

    See the module docstring.

    Args:
        dtype: of x: "bf16" or "fp32".

    Raises:
        ConfigError: another dtype.
    """

    dim: int  # of a row
    given: str  # name of the rows in errors
    layout: PageLayout
    format: Recipe

    def __init__(self, dtype: str = "bf16"):
        if dtype not in DTYPES:
            raise ConfigError("dtype", dtype, "one of " + ", ".join(DTYPES))
        self.dtype, self.element = dtype, ELEMENTS[dtype]
        self.row_pieces = self.dim // PIECE
        self.lanes = self.format.block // PIECE  # that share a scale

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,
        mIndex: cute.Tensor,
        mWords: cute.Tensor,
        mBytes: cute.Tensor,
        page: Divisor,
        stream: cuda.CUstream,
    ):
        """Launch one CTA for each 2048 elements.

        Args:
            mX: [T, dim]. mIndex: int32 [T].
            mWords, mBytes: the same pages, int32 [P, S / 4] and uint8 [P, S].
            page: entries of a page.
            stream: where the launch is queued.
        """
        ctas = cute.ceil_div(mX.shape[0] * self.row_pieces, THREADS * AT_ONCE)
        self.kernel(mX, mIndex, mWords, mBytes, page).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mIndex: cute.Tensor, mWords: cute.Tensor, mBytes: cute.Tensor, page: Divisor):
        """Fetch this thread's pieces and indices, then quantise and store each."""
        cta, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        cute.arch.griddepcontrol_wait()
        rIn = cute.make_rmem_tensor((PIECE, AT_ONCE), self.element)
        rIn.fill(0.0)
        entries = mWords.shape[0] * page.number
        first = cta * (THREADS * AT_ONCE) + thread
        indices = [self.fetch(mX, mIndex, first + i * THREADS, entries, rIn[None, i]) for i in range(AT_ONCE)]
        for i in cutlass.range_constexpr(AT_ONCE):
            piece = (first + i * THREADS) % self.row_pieces
            self.convert(mWords, mBytes, page, indices[i], piece, rIn[None, i])

    @cute.jit
    def fetch(self, mX: cute.Tensor, mIndex: cute.Tensor, number: Int32, entries: Int32, rPiece: cute.Tensor):
        """Start the load of a piece and return its entry's index.

        -1 where nothing is to be stored.
        """
        row = number // self.row_pieces
        index = Int32(-1)
        if row < mX.shape[0]:
            index = mIndex[row]
            if Uint32(index) >= Uint32(entries):  # -1, and what lies outside the pool
                index = Int32(-1)
            cute.autovec_copy(cute.local_tile(mX[row, None], (PIECE,), (number % self.row_pieces,)), rPiece)
        return index

    def place_of(self, index: Int32, page: Divisor, pages: Int32) -> tuple[Int32, Int32]:
        """Return (page, slot) of an entry of a pool of so many pages."""
        return divide(index, page)

    @cute.jit
    def store_scale(self, mBytes: cute.Tensor, page: Divisor, index: Int32, group: Int32, byte: Int32):
        """Store scale ``group`` of an entry."""
        where, slot = self.place_of(index, page, mBytes.shape[0])
        mBytes[where, self.layout.scale_offset(page.number, slot, group)] = cutlass.Uint8(byte)

    @cute.jit
    def store_data(self, mWords: cute.Tensor, page: Divisor, index: Int32, byte: Int32, words: list):
        """Store words ``byte`` bytes from the start of an entry on.

        ``byte`` is a multiple of what is stored.
        """
        where, slot = self.place_of(index, page, mWords.shape[0])
        size = 4 * len(words)
        store_words(mWords[where, None], slot * (self.layout.data_bytes // size) + byte // size, words)


class KvEntries(Entries):
    """The 584-byte entry of 448 nope and 64 rope dims."""

    dim, layout, format, given = kv_entry.HEAD_DIM, kv_entry.LAYOUT, RECIPES["kv"], "kv"

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        return f"KvEntries({self.dtype})"

    def scale_byte(self, amax: Int32) -> Int32:
        """Return the scale of a group whose largest magnitude has these bits."""
        return codes.ue8m0(amax, self.format.divisor, self.format.floor)

    def scale_at(self, piece: Int32) -> Int32:
        """Return which scale byte of the entry is that of a piece."""
        return piece // self.lanes

    @cute.jit
    def rope_words(self, rPiece: cute.Tensor):
        """Convert a piece of rope dims to bf16."""
        rRope = cute.make_rmem_tensor(PIECE, cutlass.BFloat16)
        rRope.store(rPiece.load().to(cutlass.BFloat16))
        return words_of(rRope)

    @cute.jit
    def convert(
        self, mWords: cute.Tensor, mBytes: cute.Tensor, page: Divisor, index: Int32, piece: Int32, rPiece: cute.Tensor
    ):
        """Convert a piece: E4M3 codes, or rope dims as they are. Lane 0 of 8 stores the scale, 0 past the last."""
        amax = codes.over_lanes(codes.largest(words_of(rPiece), self.dtype == "bf16"), self.lanes)
        byte = self.scale_byte(amax)
        nope = piece < kv_entry.NOPE // PIECE
        if index >= 0:
            if nope:
                words = list(codes.e4m3(values_of(rPiece), codes.inverse_power(byte)))
                self.store_data(mWords, page, index, piece * PIECE, words)
            else:
                first = kv_entry.NOPE + 2 * (piece * PIECE - kv_entry.NOPE)
                self.store_data(mWords, page, index, first, self.rope_words(rPiece))
            if piece % self.lanes == 0:
                byte = Int32(cutlass.select_(nope, byte, Int32(0)))
                self.store_scale(mBytes, page, index, self.scale_at(piece), byte)


class IndexerKeys(Entries):
    """The 68-byte FP4 indexer key.

    Args:
        dtype: of x. rotate: apply the Hadamard rotation. fp4_conversion: as in `kernel.Quantize`.
    """

    dim, layout, format, given = indexer_key.DIM, indexer_key.FP4_LAYOUT, RECIPES["mxfp4"], "keys"

    def __init__(self, dtype: str = "bf16", rotate: bool = True, fp4_conversion: bool = True):
        super().__init__(dtype)
        self.rotate, self.fp4_conversion = rotate, fp4_conversion

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        flags = [name for name in ("rotate", "fp4_conversion") if vars(self)[name]]
        return f"IndexerKeys({', '.join([self.dtype, *flags])})"

    @cute.jit
    def convert(
        self, mWords: cute.Tensor, mBytes: cute.Tensor, page: Divisor, index: Int32, piece: Int32, rPiece: cute.Tensor
    ):
        """Convert a piece: rotated with its 15 neighbours, then MXFP4."""
        if cutlass.const_expr(self.rotate):
            rX = cute.make_rmem_tensor(PIECE, Float32)
            for i, x in enumerate(hadamard.rotate(values_of(rPiece), piece, self.dim)):
                rX[i] = x
            rPiece.store(rX.load().to(self.element))
        amax = codes.over_lanes(codes.largest(words_of(rPiece), self.dtype == "bf16"), self.lanes)
        byte = codes.ue8m0(amax, self.format.divisor, self.format.floor)
        word = codes.e2m1_of_power(values_of(rPiece), byte, self.fp4_conversion)
        if index >= 0:
            self.store_data(mWords, page, index, piece * (PIECE // 2), [word])
            if piece % self.lanes == 0:
                self.store_scale(mBytes, page, index, piece // self.lanes, byte)
