"""Quantise rows to blocks of E2M1 or E4M3 codes and their scales. Rows are gathered, columns deinterleaved on the way.

    codes[h, r, :], scales[h, r, :] = recipe(x[rows[r], columns of half h])      rows[r] = -1: zero codes, zero scales

| recipe | elements, block | scale                                                    |
|--------|-----------------|----------------------------------------------------------|
| nvfp4  | E2M1, 16        | E4M3(amax / (6 g)), g fp32 of the tensor                 |
| mxfp4  | E2M1, 32        | UE8M0, 2^ceil(log2(max(amax, 6 x 2^-126) / 6))           |
| mxfp8  | E4M3, 32        | UE8M0, 2^ceil(log2(max(amax, 1e-4) / 448))               |
| fp8    | E4M3, 128       | the same                                                 |

The bits are those of `dsv4lib.formats`, ties, subnormals, NaN and Inf included: `codes` says how.

Columns of ``deinterleave`` come as the MoE's first GEMM has them, 8 of gate, 8 of up, and so on: half 0 is gate, half 1
up, each quantised as a matrix of its own. ``swizzled`` scales are the image of `formats.scale_swizzle` of each half,
padding included (zero bytes), so that a block-scaled MMA can read it at once; those of fp8 stand in it four times, as
1x32 scales.

**Threads.** A piece is 8 elements of a row: one load of 16 bytes (two of fp32), one store of 4 or 8. Pieces are counted
through the rows (those of the padding, too), lane after lane, so a block of 16 to 128 elements is 2 to 16 neighbouring
lanes and never crosses a warp: its amax is 1 to 4 shuffles. A thread takes ``bytes_at_once`` of x, a CTA of 128 threads
8 KiB where that is 64; all its loads are in flight before the first is used. With ``deinterleave`` a lane takes a
piece of gate and the piece of up after it, 32 bytes together. No shared memory, no barrier.

**Bytes.** 2 read and 0.56 (nvfp4), 0.53, 1.03 or 1.01 written per bf16 element. Machine instructions an element, as
counted in compiled code: 12.8 mxfp8 and 13.3 fp8 (sm_90a), 13.6 mxfp4 (sm_100a), 29 nvfp4 on sm_90a, 19 on sm_100a
besides the path that ties take. What memory leaves time for: on an H200 (4.8 TB/s, 132 SMs, 1.75 GHz, 128 lanes) 18 at
3 bytes an element and 16 at 2.56; on a B200 (8 TB/s, 148 SMs, 1.9 GHz) 13 and 11.5. So FP8 is limited by memory, mxfp4
by memory and issue alike, and nvfp4 by issue, at 0.6 of a B200's memory rate by this count. Its block scale, 30
instructions, is found by both lanes of a block: a lane with 16 elements would find it once.

**Global scale of nvfp4**, two ways: "given" (fp32 on the device, calibrated); "derived" from x: `Amax` leaves one
maximum a CTA, and every warp here reduces those few (1 KiB at most, from L2), so nothing has to be zeroed before, there
is no atomic, and the host never waits. Both kernels are launched early and wait themselves (programmatic dependent
launch).

Source: DSV4 released inference code (recipes), NVIDIA's NVFP4 checkpoints, DeepGEMM (gate/up interleaved by 8), cuBLAS
documentation (128x4 scales); the oracle is `dsv4lib.reference.quantize`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from dsv4lib.dsl.tensors import Divisor
from dsv4lib.errors import ConfigError
from dsv4lib.formats import scale_swizzle
from dsv4lib.ops.quantize import codes
from dsv4lib.ops.quantize.codes import PIECE
from dsv4lib.ops.quantize.config import DTYPES, RECIPES, ROW_RECIPES

THREADS = 128
BYTES_AT_ONCE = (16, 32, 64)  # that a thread may load before it looks at any
MOST_CTA_PIECES = THREADS * max(BYTES_AT_ONCE) // (2 * PIECE)
ELEMENTS = {"bf16": cutlass.BFloat16, "fp32": Float32}


@dsl_user_op
def divide(index: Int32, divisor: Divisor, *, loc: Any = None, ip: Any = None) -> tuple[Int32, Int32]:
    """Return (index // number, index % number) for index >= 0."""
    size, multiplier, shift = divisor
    text = """{ .reg .b32 q, n; shl.b32 q, {$r0}, 1; mul.hi.u32 q, q, {$r2}; shr.u32 q, q, {$r3};
        neg.s32 n, q; mad.lo.s32 {$w1}, n, {$r1}, {$r0}; mov.b32 {$w0}, q; }"""
    args = [index, size, multiplier, shift]
    return cute.arch.inline_ptx(text, read_only_args=args, write_only_types=[Int32, Int32], loc=loc, ip=ip)


@cute.jit
def words_of(rIn: cute.Tensor):
    """Return the words that hold a piece in registers."""
    words = cute.recast_tensor(rIn, Int32)
    return [words[i] for i in range(cute.size(words))]


@cute.jit
def values_of(rIn: cute.Tensor):
    """Convert a piece in registers to 8 Float32; exact."""
    if cutlass.const_expr(rIn.element_type is cutlass.BFloat16):  # the upper half of a word is a Float32 but for a mask
        words = words_of(rIn)
        halves = [(word << 16, word & Int32(-65536)) for word in words]
        return [half.bitcast(Float32) for pair in halves for half in pair]
    rX = cute.make_rmem_tensor(PIECE, Float32)
    rX.store(rIn.load().to(Float32))
    return [rX[i] for i in range(PIECE)]


@cute.jit
def in_fp32(rIn: cute.Tensor) -> cute.Tensor:
    """Convert a piece to registers of Float32."""
    values = values_of(rIn)
    rX = cute.make_rmem_tensor(PIECE, Float32)
    for i in cutlass.range_constexpr(PIECE):
        rX[i] = values[i]
    return rX


@cute.jit
def store_words(mRow: cute.Tensor, place: Int32, words: list):
    """Store ``words`` by one instruction as a row's ``place``-th run of as many."""
    rWords = cute.make_rmem_tensor(len(words), Int32)
    for i in cutlass.range_constexpr(len(words)):
        rWords[i] = words[i]
    cute.autovec_copy(rWords, cute.local_tile(mRow, (len(words),), (place,)))


@cute.jit
def store_in_image(
    form: cutlass.Constexpr, line: cute.Tensor, row: Int32, block: Int32, across: cutlass.Constexpr, byte: Int32
):
    """Store a scale into an image of bytes.

    It is ``across`` 128x4 blocks wide; one that is repeated, of words.
    """
    at = scale_swizzle.offset_of(row, block * form.repeats, across)
    if cutlass.const_expr(form.repeats == 1):
        line[at] = cutlass.Uint8(byte)
    else:
        line[at // scale_swizzle.COLS] = byte * 0x01010101


class Counts(NamedTuple):
    """Pieces of a half.

    Attributes:
        all: of the padding too. row: of a row. padded_row: of a row with its padding.
    """

    all: Int32
    row: Int32
    padded_row: Divisor


class Quantize:
    """Quantise rows; see the module docstring.

    Args:
        recipe: one of `ROW_RECIPES`.
        dtype: of x: "bf16" or "fp32".
        scale: of nvfp4: "given" or "derived"; None otherwise.
        gather: source rows come as a list.
        deinterleave: columns alternate, 8 of gate and 8 of up.
        swizzled: scales in 128x4 blocks; else row-major.
        fp4_conversion: cvt to e2m1x2 is there (`config.has_fp4_conversion`).
        bytes_at_once: of x that a thread takes, one of `BYTES_AT_ONCE`: few bytes make a short chain of instructions on
            many SMs, many keep more loads under way; at least a piece of each half.

    Raises:
        ConfigError: a value that is not one of these.
    """

    def __init__(
        self,
        recipe: str = "nvfp4",
        dtype: str = "bf16",
        scale: str | None = None,
        gather: bool = False,
        deinterleave: bool = False,
        swizzled: bool = False,
        fp4_conversion: bool = True,
        bytes_at_once: int = 64,
    ):
        if recipe not in ROW_RECIPES:
            raise ConfigError("recipe", recipe, "one of " + ", ".join(ROW_RECIPES))
        if dtype not in DTYPES:
            raise ConfigError("dtype", dtype, "one of " + ", ".join(DTYPES))
        scales = ("given", "derived") if recipe == "nvfp4" else (None,)
        if scale not in scales:
            raise ConfigError("scale", scale, " or ".join(map(str, scales)) + f" for {recipe}")
        self.recipe, self.dtype, self.scale = recipe, dtype, scale
        self.gather, self.deinterleave, self.swizzled, self.fp4_conversion = (
            gather,
            deinterleave,
            swizzled,
            fp4_conversion,
        )
        self.format, self.element = RECIPES[recipe], ELEMENTS[dtype]
        # ---- what follows
        self.halves = 2 if deinterleave else 1
        self.lanes = self.format.block // PIECE  # that share a block
        self.words = PIECE * self.format.bits // 32  # of codes, of a piece
        self.at_once = bytes_at_once * 8 // (PIECE * self.element.width)  # pieces of a thread
        if bytes_at_once not in BYTES_AT_ONCE or self.at_once < self.halves:
            raise ConfigError("bytes_at_once", bytes_at_once, f"one of {BYTES_AT_ONCE}, at least a piece of each half")
        self.cta_pieces = THREADS * self.at_once // self.halves  # of one half

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        flags = [name for name in ("gather", "deinterleave", "swizzled", "fp4_conversion") if vars(self)[name]]
        flags += [str(self.at_once)]
        scale = [self.scale] if self.scale else []
        return f"Quantize({', '.join([self.recipe, self.dtype, *scale, *flags])})"

    def padded(self, rows: int, columns: int) -> tuple[int, int]:
        """Return (rows, pieces of a row) of a half, with the scales' padding.

        The half is of [rows, columns].
        """
        blocks = columns // self.format.block
        if self.swizzled:
            rows += -rows % scale_swizzle.ROWS
            blocks += -blocks % (scale_swizzle.COLS // self.format.repeats)
        return rows, blocks * self.lanes

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,
        mRows: Any,
        mPartials: Any,
        mGlobal: Any,
        mCodes: cute.Tensor,
        mScales: cute.Tensor,
        counts: Counts,
        stream: cuda.CUstream,
    ):
        """Launch one CTA for each 128 times ``bytes_at_once`` of x.

        Args:
            mX: [T, columns of all halves].
            mRows: int32 [R] or None.
            mPartials: int32 [G], bits of maxima, where the scale is derived, else None.
            mGlobal: fp32 [1], read where the scale is given, written where it is derived; None but for nvfp4.
            mCodes: int32 [halves, R, words of a row of a half].
            mScales: uint8 [halves, R, blocks], or [halves, bytes] where swizzled; there of fp8 int32 [halves, words].
            counts: of pieces.
            stream: where the launch is queued.
        """
        ctas = cute.ceil_div(counts.all, self.cta_pieces)
        self.kernel(mX, mRows, mPartials, mGlobal, mCodes, mScales, counts).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        mRows: Any,
        mPartials: Any,
        mGlobal: Any,
        mCodes: cute.Tensor,
        mScales: cute.Tensor,
        counts: Counts,
    ):
        """Fetch the pieces of this thread, then one after the other: scale, codes, stores."""
        cta, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        first = cta * self.cta_pieces + thread
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()  # after the wait: this kernel ends after the one before
        rIn = cute.make_rmem_tensor((PIECE, self.at_once), self.element)
        rIn.fill(0.0)
        numbers = [first + i // self.halves * THREADS for i in range(self.at_once)]
        sources = [self.fetch(mX, mRows, mCodes, numbers[i], i, counts, rIn[None, i]) for i in range(self.at_once)]
        g, factors = self.tensor_scale(mPartials, mGlobal)
        for i in cutlass.range_constexpr(self.at_once):
            self.convert(mCodes, mScales, numbers[i], sources[i], i, rIn[None, i], g, factors, counts)

    @cute.jit
    def fetch(
        self,
        mX: cute.Tensor,
        mRows: Any,
        mCodes: cute.Tensor,
        number: Int32,
        i: cutlass.Constexpr,
        counts: Counts,
        rPiece: cute.Tensor,
    ):
        """Start the load of this thread's ``i``-th piece.

        It stays zero where there is none.

        Returns:
            the source row, or -1. Row and piece are divided out again later: that is cheaper than to keep them.
        """
        row, piece = divide(number, counts.padded_row)
        source = Int32(-1)
        if row < mCodes.shape[1] and piece < counts.row:
            source = row
            if cutlass.const_expr(self.gather):
                source = mRows[row]
                if Uint32(source) >= Uint32(mX.shape[0]):  # -1, and what is no row at all
                    source = Int32(-1)
        if source >= 0:
            column = piece * self.halves + i % self.halves
            cute.autovec_copy(cute.local_tile(mX[source, None], (PIECE,), (column,)), rPiece)
        return source

    @cute.jit
    def tensor_scale(self, mPartials: Any, mGlobal: Any):
        """Return (g, what `codes.e4m3_scale` needs of it).

        None, None without a global scale.
        """
        g = factors = None
        if cutlass.const_expr(self.scale is not None):
            if cutlass.const_expr(self.scale == "derived"):
                amax = Int32(0)
                for i in cutlass.range(cute.arch.lane_idx(), mPartials.shape[0], 32, unroll=1):
                    other = mPartials[i]
                    amax = codes.larger(amax, other)
                g = codes.global_scale(codes.over_lanes(amax, 32))
                thread, _, _ = cute.arch.thread_idx()
                if cute.arch.block_idx()[0] == 0 and thread == 0:
                    mGlobal[0] = g
            else:
                g = mGlobal[0]
            factors = codes.scale_factors(g)
        return g, factors

    @cute.jit
    def convert(
        self,
        mCodes: cute.Tensor,
        mScales: cute.Tensor,
        number: Int32,
        source: Int32,
        i: cutlass.Constexpr,
        rPiece: cute.Tensor,
        g: Any,
        factors: Any,
        counts: Counts,
    ):
        """Convert and store a piece, scale and codes; all lanes of a warp come here."""
        row, piece = divide(number, counts.padded_row)
        amax = codes.largest(words_of(rPiece), self.dtype == "bf16")
        amax = codes.over_lanes(amax, self.lanes)
        byte, words = codes.encoded(self.format, values_of(rPiece), amax, g, factors, self.fp4_conversion)
        half = i % self.halves
        if row < mCodes.shape[1] and piece < counts.row:
            store_words(mCodes[half, row, None], piece, words)
        if number < counts.all and piece % self.lanes == 0:
            byte = Int32(cutlass.select_(source < 0, Int32(0), byte))
            self.store_scale(mScales, half, row, piece // self.lanes, byte, counts.padded_row.number)

    @cute.jit
    def store_scale(
        self, mScales: cute.Tensor, half: cutlass.Constexpr, row: Int32, block: Int32, byte: Int32, row_pieces: Int32
    ):
        """Store the scale of a block where it belongs."""
        if cutlass.const_expr(self.swizzled):
            across = row_pieces * self.format.repeats // (self.lanes * scale_swizzle.COLS)
            store_in_image(self.format, mScales[half, None], row, block, across, byte)
        else:
            mScales[half, row, block] = cutlass.Uint8(byte)
