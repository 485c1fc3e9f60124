"""Store vectors as turbo4 in a paged KV cache: signs, Hadamard rotation, norm, nearest centroid, in one launch.

    y = H (s * x) / sqrt(D)        norm = fp16(|y|)        code = nearest of norm c_0 .. norm c_15 to y

A lane has 32 neighbouring dims: one word of signs, 64 bytes in, 16 bytes of nibbles out by one store. D / 32 lanes
share a vector, so strides 1 .. 16 of the rotation are inside a lane and log2(D / 32) exchanges of 32 values follow; the
squares are added in the same order. No shared memory, no barrier.

The nearest centroid is a search among 7 boundaries of |y|, each a product of a constant and the fp16 norm: 3 compares
and 4 selects. A value on a boundary takes the upper code, so of negative values |y| is made one ulp smaller.

    page of one head | D / 2 bytes of nibbles an entry, page_size of them | 2 bytes of norm an entry | padding to 16 |

An index outside the pool stores nothing. Bytes: 2 D in, D / 2 + 2 out.

Source: `dsv4lib.formats.turbo4`; the oracle is `dsv4lib.reference.turbo4_encode`, the bits are the same.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from dsv4lib.dsl import convert, hadamard
from dsv4lib.dsl.tensors import Divisor
from dsv4lib.errors import ConfigError
from dsv4lib.formats import turbo4
from dsv4lib.ops.quantize.kernel import divide, store_words

HEAD_DIMS = (64, 128, 256, 512)
ELEMENTS = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}
RUN = turbo4.WORD  # dims of a lane
PIECE = 8  # elements of a 16-byte load
CODES = 8  # of a word


@dsl_user_op
def square(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """x^2, rounded before anything is added: never part of an fma."""
    return cute.arch.inline_ptx(
        "mul.rn.f32 {$w0}, {$r0}, {$r0};", write_only_types=[Float32], read_only_args=[x], loc=loc, ip=ip
    )


@dsl_user_op
def square_root(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """The square root, rounded to nearest."""
    return cute.arch.inline_ptx(
        "sqrt.rn.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x], loc=loc, ip=ip
    )


@cute.jit
def sign_word(seed: Int32, word: Int32):
    """32 random bits, see `formats.turbo4.sign_word`."""
    x = Uint32(seed) + Uint32(0x9E3779B9) * Uint32(word + 1)
    x = (x ^ (x >> 16)) * Uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * Uint32(0xC2B2AE35)
    return Int32(x ^ (x >> 16))


@cute.jit
def flip_signs(values: list, word: Int32):
    """Negate value i where bit i of ``word`` is set."""
    signs = [word << (RUN - 1 - i) & Int32(-(2**31)) for i in range(len(values))]
    return [convert.from_bits(convert.bits(x) ^ sign) for x, sign in zip(values, signs, strict=True)]


class Row(NamedTuple):
    """Where a vector goes: page, head and slot, and the lane of those that share it; page -1: nowhere."""

    page: Int32
    head: Int32
    slot: Int32
    lane: Int32


class Turbo4Encode:
    """Rotate, quantise and store; see the module docstring.

    Args:
        dtype: of x, "bf16" or "fp16".
        head_dim: D, one of `HEAD_DIMS`.
        threads: of a CTA, a multiple of 32 up to 1024.

    Raises:
        ConfigError: a value that is not allowed.
    """

    def __init__(self, dtype: str = "bf16", head_dim: int = 128, threads: int = 128):
        if dtype not in ELEMENTS:
            raise ConfigError("dtype", dtype, "one of " + ", ".join(ELEMENTS))
        if head_dim not in HEAD_DIMS:
            raise ConfigError("head_dim", head_dim, "one of " + ", ".join(map(str, HEAD_DIMS)))
        if threads % 32 or not 32 <= threads <= 1024:
            raise ConfigError("threads", threads, "a multiple of 32 from 32 to 1024")
        self.dtype, self.element, self.head_dim, self.threads = dtype, ELEMENTS[dtype], head_dim, threads
        # ---- what follows
        self.lanes = head_dim // RUN  # that share a vector
        self.bounds = [float(b) for b in turbo4.boundaries(head_dim)[turbo4.HALF :]]

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        return f"Turbo4Encode({self.dtype}, {self.head_dim}, {self.threads})"

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,
        mIndex: cute.Tensor,
        mWords: cute.Tensor,
        mNorms: cute.Tensor,
        page: Divisor,
        heads: Divisor,
        seed: Int32,
        stream: cuda.CUstream,
    ):
        """Launch D / 32 threads a vector.

        Args:
            mX: [T, H, D] of ``dtype``. mIndex: int32 [T], page * page_size + slot.
            mWords, mNorms: the same pages, int32 [P, H, S / 4] and fp16 [P, H, S / 2].
            page: entries of a page. heads: H.
            seed: of the signs.
            stream: where the launch is queued.
        """
        ctas = cute.ceil_div(mX.shape[0] * heads.number * self.lanes, self.threads)
        self.kernel(mX, mIndex, mWords, mNorms, page, heads, seed).launch(
            grid=(ctas, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        mIndex: cute.Tensor,
        mWords: cute.Tensor,
        mNorms: cute.Tensor,
        page: Divisor,
        heads: Divisor,
        seed: Int32,
    ):
        """Load this lane's dims, rotate, quantise and store."""
        cta, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        number, lane = (cta * self.threads + thread) // self.lanes, thread % self.lanes
        token, head = divide(number, heads)
        flips = self.signs(seed, lane)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()  # after the wait: this kernel ends after the one before
        rX = cute.make_rmem_tensor((PIECE, RUN // PIECE), self.element)
        rX.fill(0.0)
        index = Int32(-1)
        if token < mX.shape[0]:
            index = mIndex[token]
            for i in cutlass.range_constexpr(RUN // PIECE):
                source = cute.local_tile(mX[token, head, None], (PIECE,), (lane * (RUN // PIECE) + i,))
                cute.autovec_copy(source, rX[None, i])
        y = self.rotated(rX, flips, lane)
        norm = self.norm_of(y)
        words = self.words_of(y, norm.to(Float32))
        if (index >= 0) & (index < mWords.shape[0] * page.number):
            where, slot = self.place_of(index, page)
            self.store(mWords, mNorms, Row(where, head, slot, lane), page.number, words, norm)

    def place_of(self, index: Int32, page: Divisor) -> tuple[Int32, Int32]:
        """Return page and slot of an entry."""
        return divide(index, page)

    @cute.jit
    def signs(self, seed: Int32, lane: Int32):
        """Return the word of signs of this lane's dims."""
        return sign_word(seed, lane)

    @cute.jit
    def rotated(self, rX: cute.Tensor, flips: Int32, lane: Int32):
        """Flip signs and multiply by the Hadamard matrix, in fp32."""
        x = rX.load().to(Float32)
        return hadamard.rotate(flip_signs([x[i] for i in range(RUN)], flips), lane, self.head_dim)

    @cute.jit
    def norm_of(self, y: list):
        """|y| in fp16; neighbours are added first, then neighbouring sums."""
        sums = [square(one) for one in y]
        for _ in cutlass.range_constexpr(RUN.bit_length() - 1):
            sums = [sums[i] + sums[i + 1] for i in range(0, len(sums), 2)]
        total = sums[0]
        for i in cutlass.range_constexpr(self.lanes.bit_length() - 1):
            total = total + cute.arch.shuffle_sync_bfly(total, 1 << i)
        return square_root(total).to(Float16)

    def words_of(self, y: list, norm: Float32) -> list:
        """Codes of 32 values as 4 words, the first dim in the lowest nibble."""
        bounds, words = [norm * Float32(b) for b in self.bounds], []
        for i in range(RUN // CODES):
            found = [self.code(y[CODES * i + j], bounds) << 4 * j for j in range(CODES)]
            words.append(functools.reduce(operator.or_, found))
        return words

    def code(self, y: Float32, bounds: list) -> Int32:
        """Find the nearest centroid of a value: 8 + boundaries that |y| has reached, mirrored where y < 0."""
        negative = Int32(cutlass.select_(y < 0.0, Int32(1), Int32(0)))
        size = convert.from_bits((convert.bits(y) & Int32(0x7FFFFFFF)) - negative)
        t1, t2, t3, t4, t5, t6, t7 = bounds
        upper = size >= t4
        middle = size >= Float32(cutlass.select_(upper, t6, t2))
        high = Float32(cutlass.select_(middle, t7, t5))
        low = Float32(cutlass.select_(middle, t3, t1))
        last = size >= Float32(cutlass.select_(upper, high, low))
        bit4, bit2 = (Int32(cutlass.select_(one, Int32(n), Int32(0))) for one, n in ((upper, 4), (middle, 2)))
        reached = bit4 | bit2 | Int32(cutlass.select_(last, Int32(1), Int32(0)))
        return (reached | 8) ^ (negative * 15)

    @cute.jit
    def store(self, mWords: cute.Tensor, mNorms: cute.Tensor, row: Row, page_size: Int32, words: list, norm: Float16):
        """Store 16 bytes of nibbles; the first lane of a vector stores its norm."""
        store_words(mWords[row.page, row.head, None], row.slot * self.lanes + row.lane, words)
        if row.lane == 0:
            first = page_size * (self.head_dim // 2 // turbo4.NORM_BYTES)
            mNorms[row.page, row.head, first + self.norm_slot(row.slot)] = norm

    def norm_slot(self, slot: Int32) -> Int32:
        """Return which norm of the page is that of an entry."""
        return slot
