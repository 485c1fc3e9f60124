"""Selected 584-byte entries of a paged pool to dense bf16 rows.

    out[n] = dequantised(entry indices[n])          zeros where the index is -1 or outside the pool

The bits are those of `formats.kv_entry.gather`: E4M3 times a power of two is exact in fp32, and in bf16 unless it is
smaller than its normal numbers; rope dims are copied.

**Threads.** A piece is 8 elements of a row, 16 bytes to store: 8 bytes of codes and a scale byte to load, or 16 of
rope dims. A row is 64 pieces, so two warps load 512 and store 1024 bytes side by side. A thread has the same piece of
`at_once` entries: their indices, then their bytes are on the way together. No shared memory.

**Limit.** Bytes: 588 read and 1024 written an entry.

Source: FlashMLA's DSV4 layout (`formats.kv_entry`, `.paged`); PTX ISA, "cvt".
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cutlass_dsl import dsl_user_op

from dsv4lib.dsl.tensors import Divisor
from dsv4lib.errors import ConfigError
from dsv4lib.formats.kv_entry import GROUP, HEAD_DIM, LAYOUT, NOPE
from dsv4lib.ops.quantize.codes import PIECE
from dsv4lib.ops.quantize.kernel import divide, store_words

THREADS = 256
PIECES, NOPE_PIECES = HEAD_DIM // PIECE, NOPE // PIECE
SIDE = THREADS // PIECES  # entries next to each other
WORDS = LAYOUT.data_bytes // 4


@dsl_user_op
def scale_of(byte: Int32, *, loc: Any = None, ip: Any = None) -> Float32:
    """Value of a UE8M0 byte: 2^(byte - 127), NaN for 255."""
    text = """{ .reg .pred p; .reg .b32 x; shl.b32 x, {$r0}, 23; setp.eq.s32 p, {$r0}, 0; selp.b32 x, 0x400000, x, p;
        setp.eq.s32 p, {$r0}, 255; selp.b32 x, 0x7fc00000, x, p; mov.b32 {$w0}, x; }"""
    return cute.arch.inline_ptx(text, read_only_args=[byte], write_only_types=[Float32], loc=loc, ip=ip)


@dsl_user_op
def to_bf16(low: Int32, high: Int32, scale: Float32, *, loc: Any = None, ip: Any = None) -> tuple:
    """Convert 8 E4M3 codes times ``scale`` to 4 words of bf16 pairs."""
    lines = ["{ .reg .b16 a<4>, h<8>; .reg .b32 p; .reg .f32 f<8>;"]
    lines += ["mov.b32 {a0, a1}, {$r0}; mov.b32 {a2, a3}, {$r1};"]
    for i in range(4):
        lines += [f"cvt.rn.f16x2.e4m3x2 p, a{i}; mov.b32 {{h{2 * i}, h{2 * i + 1}}}, p;"]
        lines += [f"cvt.f32.f16 f{j}, h{j}; mul.rn.f32 f{j}, f{j}, {{$r2}};" for j in (2 * i, 2 * i + 1)]
        lines += [f"cvt.rn.bf16x2.f32 {{$w{i}}}, f{2 * i + 1}, f{2 * i};"]
    text, out = "\n".join([*lines, "}"]), [Int32] * 4
    return cute.arch.inline_ptx(text, read_only_args=[low, high, scale], write_only_types=out, loc=loc, ip=ip)


class KvGather:
    """Gather and dequantise; see the module docstring.

    Args:
        at_once: entries of a thread, 1 to 8.

    Raises:
        ConfigError: another number.
    """

    def __init__(self, at_once: int = 4):
        if not 1 <= at_once <= 8:
            raise ConfigError("at_once", at_once, "1 to 8")
        self.at_once = at_once
        self.rows = SIDE * at_once  # of a CTA

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        return f"KvGather({self.at_once})"

    def entry_of(self, index: Int32, entries: Int32) -> Int32:
        """Return ``index`` if it is one of so many entries, otherwise a negative number."""
        return Int32(cutlass.select_(index < entries, index, Int32(-1)))

    def place_of(self, index: Int32, page: Divisor, pages: Int32) -> tuple[Int32, Int32]:
        """Return (page, slot) of an entry of a pool of so many pages."""
        return divide(index, page)

    def scale_at(self, piece: Int32) -> Int32:
        """Return which scale byte of the entry is that of a piece."""
        return piece // (GROUP // PIECE)

    def value_of(self, byte: Int32) -> Float32:
        """Return what a scale byte stands for."""
        return scale_of(byte)

    @cute.jit
    def __call__(
        self,
        mWords: cute.Tensor,
        mBytes: cute.Tensor,
        mIndex: cute.Tensor,
        mOut: cute.Tensor,
        page: Divisor,
        stream: cuda.CUstream,
    ):
        """Launch.

        Args:
            mWords, mBytes: the same pages, int32 [P, S / 4] and uint8 [P, S].
            mIndex: int32 [N]: page * page size + slot.
            mOut: int32 [N, 256], rows of 512 bf16.
            page: entries of a page.
            stream: where the launch is queued.
        """
        self.kernel(mWords, mBytes, mIndex, mOut, page).launch(
            grid=(cute.ceil_div(mIndex.shape[0], self.rows), 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, mWords: cute.Tensor, mBytes: cute.Tensor, mIndex: cute.Tensor, mOut: cute.Tensor, page: Divisor):
        """Indices, then bytes, then rows."""
        cta, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        first, piece = cta * self.rows + thread // PIECES, thread % PIECES
        cute.arch.griddepcontrol_wait()
        entries = mWords.shape[0] * page.number
        rIndex = cute.make_rmem_tensor(self.at_once, Int32)
        for i in cutlass.range_constexpr(self.at_once):
            rIndex[i] = Int32(-1)
            if first + SIDE * i < mIndex.shape[0]:
                rIndex[i] = mIndex[first + SIDE * i]
            rIndex[i] = self.entry_of(rIndex[i], entries)
        rRaw = cute.make_rmem_tensor((4, self.at_once), Int32)
        rScale = cute.make_rmem_tensor(self.at_once, Int32)
        rRaw.fill(0)
        rScale.fill(127)
        for i in cutlass.range_constexpr(self.at_once):
            self.fetch(mWords, mBytes, page, rIndex[i], piece, rRaw[None, i], rScale, i)
        for i in cutlass.range_constexpr(self.at_once):
            words = [rRaw[j, i] for j in range(4)]
            if piece < NOPE_PIECES:
                words = list(to_bf16(words[0], words[1], self.value_of(rScale[i])))
            if first + SIDE * i < mIndex.shape[0]:
                store_words(mOut[first + SIDE * i, None], piece, words)

    @cute.jit
    def fetch(
        self,
        mWords: cute.Tensor,
        mBytes: cute.Tensor,
        page: Divisor,
        index: Int32,
        piece: Int32,
        rRaw: cute.Tensor,
        rScale: cute.Tensor,
        i: cutlass.Constexpr,
    ):
        """Start the loads of a piece; zeros where there is no entry."""
        if index >= 0:
            where, slot = self.place_of(index, page, mWords.shape[0])
            line = mWords[where, None]
            if piece < NOPE_PIECES:
                codes = cute.local_tile(rRaw, (2,), (0,))
                cute.autovec_copy(cute.local_tile(line, (2,), (slot * (WORDS // 2) + piece,)), codes)
                rScale[i] = Int32(mBytes[where, LAYOUT.scale_offset(page.number, slot, self.scale_at(piece))])
            else:
                place = slot * (WORDS // 4) + NOPE // 16 + piece - NOPE_PIECES
                cute.autovec_copy(cute.local_tile(line, (4,), (place,)), rRaw)
