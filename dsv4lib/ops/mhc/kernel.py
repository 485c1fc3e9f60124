"""Compute the boundary between two sublayers in one launch.

    X'_j = bf16(post_j f + sum_i comb_ij X_i)                `post`; else X' = X
    m    = (fn z) / sqrt(mean(z^2) + eps),  z = flatten(X')  4 pre, 4 post, 16 comb (`head`: 4 pre)
    x    = bf16(sum_i pre_i X'_i),  pre = sigmoid(s_pre m + b) + hc_eps
    y    = bf16((weight x) / sqrt(mean(x^2) + eps))          and, with a `recipe`, as E4M3 codes and UE8M0 scales of y
    post = 2 sigmoid(s_post m + b),  comb = sinkhorn(s_comb m + b)       for the write-back after the sublayer

Variants: `few_tokens` (clusters of CTAs) and `many_tokens` (groups of CTAs that are no cluster); here is what they
share. The CTAs of a group share a tile of tokens. A CTA has a slice of the columns of all four streams, a warp 32 of
them, a lane 8: 16 bytes. Of the sums over all columns, every CTA needs pre and the squares of a token; only the CTA
that owns the token needs post and comb.

**FP8.** Codes and scales of y have the bits of `quantize` of y. A block of 32 columns is four lanes, one of 128 four
warps, whose maxima go through shared memory. In `few_tokens` the largest |y| follows from the largest |weight x|: y is
a monotone function of it, the same for all columns of a token. All workers write the zeros that pad the scales' image.

Source: DSV4 paper, mHC section; `dsv4lib.reference.mhc`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32, memory

from dsv4lib.formats import scale_swizzle
from dsv4lib.ops.mhc.config import COEFFICIENTS, COLUMNS, Config, N
from dsv4lib.ops.mhc.ptx import pack, unpack
from dsv4lib.ops.quantize import codes
from dsv4lib.ops.quantize.kernel import store_in_image, store_words

LOG2_E = 1.4426950408889634
RECIPE_COLUMNS = 128  # of an image's 128x4 block: four scales of 32, or one of 128 four times


class Gmem(NamedTuple):
    """Tensors of a boundary in global memory.

    Attributes:
        x: [T, 4 d] bf16, a token's streams side by side.
        f, post, comb: [T, d] bf16, [T, 4] and [T, 16] fp32; None without `post`.
        fn, scale, base, weight: [24, 4 d], [3], [24], [d] fp32; with `head` fn [4, 4 d], scale [1], base [4].
        x_new: [T, 4 d] bf16, X'; may be ``x`` itself; None: not written.
        y: [T, d] bf16; may be ``f`` itself; None unless `keep_y`.
        codes: [T, d/4] int32, four codes a word; None without `recipe`.
        scales: uint8 [T, blocks]; an image where swizzled, int32 words of "fp8", bytes of "mxfp8"; None likewise.
        post_new, comb_new: [T, 4] and [T, 16] fp32, other memory than ``post``, ``comb``; None with `head`.
        workspace: [`space`] fp32, zeros before and after; None for `few_tokens`.
    """

    x: cute.Tensor
    f: Any
    post: Any
    comb: Any
    fn: cute.Tensor
    scale: cute.Tensor
    base: cute.Tensor
    weight: cute.Tensor
    x_new: Any
    y: Any
    codes: Any
    scales: Any
    post_new: Any
    comb_new: Any
    workspace: Any


class Affine(NamedTuple):
    """Parameters of a logit, scale m + base."""

    scale: Float32
    base: Float32

    def __call__(self, m: Float32) -> Float32:
        """Return the logit."""
        return cute.math.fma(self.scale, m, self.base)


class Cta(NamedTuple):
    """What a CTA works with.

    Attributes:
        gmem: see `Gmem`. bar: the variant's mbarriers. slots: of the group in the workspace; None for `few_tokens`.
        rank: of the CTA in its group.
        first: token of its first tile. step: tokens from a tile to the next. rows: tokens a tile. tokens: T.
        hc_eps, rms_eps: of pre and Sinkhorn; of both norms.
    """

    gmem: Gmem
    bar: Any
    slots: Any
    rank: Int32
    first: Int32
    step: Int32
    rows: Int32
    tokens: Int32
    hc_eps: Float32
    rms_eps: Float32


class Mhc(Config):
    """Compute a site boundary; see the module docstring. Settings: `config.Config`."""

    barriers: Any = None  # a NamedTuple, of each kind (how many, arrivals)
    in_cluster = False  # whether a group of CTAs is a cluster

    @cute.jit
    def __call__(
        self, gmem: Gmem, rows: Int32, groups: Int32, hc_eps: Float32, rms_eps: Float32, stream: cuda.CUstream
    ):
        """Launch ``groups`` groups of CTAs.

        Args:
            gmem: see there.
            rows: tokens a tile, 1 to `tile`.
            groups: at most the number of tiles.
            hc_eps, rms_eps: eps of pre and Sinkhorn; of both norms.
            stream: where the launch is queued.
        """

        self.kernel(gmem, rows, hc_eps, rms_eps).launch(
            grid=(self.cluster, groups, 1),
            block=(self.threads, 1, 1),
            cluster=(self.cluster, 1, 1) if self.in_cluster else None,
            stream=stream,
            use_pdl=True,
        )

    def storage(self) -> Any:
        """Lay out shared memory, a field a region."""
        fields, aligns = {}, {"fn": 128, "held": self.held_align}
        for name, (floats, _) in self.floats().items():
            if floats:
                region = cute.struct.Align[cute.struct.MemRange[Float32, floats], aligns.get(name, 16)]
                fields[name] = cute.struct.MemRange[Int64, floats // 2] if name == "barriers" else region
        return cute.struct(type("Storage", (), {"__annotations__": fields}))

    @cute.kernel
    def kernel(self, gmem: Gmem, rows: Int32, hc_eps: Float32, rms_eps: Float32):
        """Set up, then start the roles of the variant's warps."""
        rank, group, _ = cute.arch.block_idx()
        _, groups, _ = cute.arch.grid_dim()
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = memory.SmemAllocator().allocate(self.storage())
        counts = [count for count, _ in self.barriers]
        places = [storage.barriers.data_ptr() + k for k in range(sum(counts))]
        arrivals = [each for count, each in self.barriers for _ in range(count)]
        if tidx == 0:
            for place, each in zip(places, arrivals, strict=True):
                cute.arch.mbarrier_init(place, each)
            cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        if cutlass.const_expr(self.in_cluster):
            cute.arch.cluster_arrive_relaxed()  # a CTA is sent to only after all of them waited
        bar = type(self.barriers)(*(places[sum(counts[:k])] for k in range(len(counts))))
        cta = Cta(
            gmem,
            bar,
            self.slots_of(gmem, group, groups),
            rank,
            group * rows,
            groups * rows,
            rows,
            gmem.x.shape[0],
            hc_eps,
            rms_eps,
        )
        self.roles(cta, storage, warp)

    def slots_of(self, gmem: Gmem, group: Int32, groups: Int32) -> Any:
        """Locate the group's slots in the workspace."""
        return None

    def rsqrt_mean(self, squares: Float32, count: int, eps: Float32) -> Float32:
        """Return 1 / sqrt(squares / count + eps)."""
        return cute.math.rsqrt(squares * (1.0 / count) + eps, fastmath=True)

    def post_comb_logit(self, gmem: Gmem) -> Affine:
        """Load scale and base of logit ``lane`` of post and comb.

        Further lanes those of the last.
        """
        value = cutlass.min(cute.arch.lane_idx(), Int32(COEFFICIENTS - 1))
        return Affine(gmem.scale[cutlass.select_(value < N, Int32(1), Int32(2))], gmem.base[N + value])

    def stream_columns(self, mRow: cute.Tensor, column: Int32, stream: int = 0) -> cute.Tensor:
        """View eight columns of a token's stream from ``8 column``."""
        return cute.local_tile(mRow, (COLUMNS,), (column + stream * (self.d // COLUMNS),))

    @cute.jit
    def softmax(self, rRow: cute.Tensor, eps: Float32):
        """Replace a row of four by softmax + eps."""
        row_max = cute.arch.fmax(cute.arch.fmax(rRow[0], rRow[1]), cute.arch.fmax(rRow[2], rRow[3]))
        for j in cutlass.range_constexpr(N):
            rRow[j] = cute.math.exp2((rRow[j] - row_max) * LOG2_E, fastmath=True)
        inverse = cute.arch.rcp_approx((rRow[0] + rRow[1]) + (rRow[2] + rRow[3]))
        for j in cutlass.range_constexpr(N):
            rRow[j] = cute.math.fma(rRow[j], inverse, eps)

    @cute.jit
    def arrive(self, barrier: cute.Pointer):
        """Arrive once for this warp, after all of its lanes."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def sum_warps(self, sLines: cute.Tensor, four: Int32, rSum: cute.Tensor):
        """Add four values of each warp in order."""
        cute.autovec_copy(cute.local_tile(sLines[0, None], (N,), (four,)), rSum)
        for w in cutlass.range_constexpr(1, self.warps):
            rOne = cute.make_rmem_tensor(N, Float32)
            cute.autovec_copy(cute.local_tile(sLines[w, None], (N,), (four,)), rOne)
            rSum.store(rSum.load() + rOne.load())

    @cute.jit
    def pad_scales(self, cta: Cta):
        """Store zeros for rows of the scales' image past the last token.

        Every worker of the launch stores a part of them.
        """
        if cutlass.const_expr(self.recipe is not None and self.swizzled):
            rank, group, _ = cute.arch.block_idx()
            _, groups, _ = cute.arch.grid_dim()
            tidx, _, _ = cute.arch.thread_idx()
            blocks, step = self.d // self.format.block, groups * (self.cluster * self.workers)
            rows = (scale_swizzle.ROWS - 1) & -cta.tokens
            first = (group * self.cluster + rank) * self.workers + tidx
            for i in cutlass.range(first, rows * blocks, step, unroll=1):
                self.store_scale(cta.gmem, cta.tokens + i // blocks, i % blocks, Int32(0))

    @cute.jit
    def store_scale(self, gmem: Gmem, token: Int32, block: Int32, byte: Int32):
        """Store a scale."""
        if cutlass.const_expr(self.swizzled):
            across = self.d // RECIPE_COLUMNS
            store_in_image(self.format, gmem.scales, token, block, across, byte)
        else:
            gmem.scales[token, block] = Uint8(byte)

    @cute.jit
    def store_y(self, cta: Cta, token: Int32, column: Int32, rWords: cute.Tensor, amax: Int32):
        """Store a lane's eight columns of y. ``amax``: bits of the largest |y| of their block."""
        if cutlass.const_expr(self.keep_y):
            line = self.stream_columns(cta.gmem.y[token, None], column)
            cute.autovec_copy(cute.recast_tensor(rWords, BFloat16), line)
        if cutlass.const_expr(self.recipe is not None):
            y = [value for w in range(COLUMNS // 2) for value in unpack(rWords[w])]
            byte, words = codes.encoded(self.format, y, amax, None, None, False)
            store_words(cta.gmem.codes[token, None], column, words)
            if column % (self.format.block // COLUMNS) == 0:
                self.store_scale(cta.gmem, token, column // (self.format.block // COLUMNS), Int32(byte))

    @cute.jit
    def largest_of_unit(self, products: list) -> Int32:
        """Return the largest |weight x| of four lanes, as bits, in all of them."""
        amax = codes.largest([product.bitcast(Int32) for product in products], False)
        return codes.over_lanes(amax, 4)

    @cute.jit
    def store_post(self, cta: Cta, rLogit: cute.Tensor, begin: Int32, owned: Int32):
        """Store post = 2 sigmoid(logit) from lanes 0 to 3. ``owned``: the CTA's first token of the tile."""
        lane = cute.arch.lane_idx()
        for s in cutlass.range_constexpr(self.owned_tokens):
            t = s * self.cluster + owned
            if lane < N and t < cta.rows and begin + t < cta.tokens:
                cta.gmem.post_new[begin + t, lane] = 2.0 * sigmoid(rLogit[s])


def to_bf16(bits: Int32, factor: Float32) -> Int32:
    """Return the bits, as fp32, of a value times ``factor`` rounded to bf16."""
    return Int32(pack(bits.bitcast(Float32) * factor, Float32(0.0)) << Uint32(16))


def sigmoid(x: Float32) -> Float32:
    """Return 1 / (1 + exp(-x))."""
    return cute.arch.rcp_approx(1.0 + cute.math.exp2(x * -LOG2_E, fastmath=True))


def fragment_place() -> tuple[Int32, Int32]:
    """Return (group, member) of this lane in MMA fragments: lane = 4 group + member."""
    return cute.arch.lane_idx() // 4, cute.arch.lane_idx() % 4


def view(region: Any, shape: tuple[int, ...], stride: tuple[int, ...] | None = None) -> cute.Tensor:
    """View a region of shared memory as a tensor.

    Row-major unless ``stride`` says otherwise.
    """
    compact = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return region.get_tensor(cute.make_layout(shape, stride=stride or tuple(compact)))
