"""Make queries of the lightning indexer in one pass. RoPE, Hadamard, quantisation and head weights of a projection.

    x = rope(q[t, h]) H / sqrt(128)        last 64 of 128 dims rotate; H natural order, left out without ``hadamard``

| variant | codes            | scale                                           | weights'[t, h]             |
|---------|------------------|-------------------------------------------------|----------------------------|
| fp8     | E4M3 [T, H, 128] | 2^ceil(log2(max(amax, 1e-4) / 448)) of a head   | weights x factor x scale   |
| fp4     | E2M1 [T, H, 64]  | UE8M0 [T, H, 4], one for 32 dims                | weights x factor           |

factor = (128 H)^-0.5. Sums are fp32. What RoPE changed is rounded to bf16, and so is x after the Hadamard rotation: the
released code stores both in bf16. The bits are those of `reference.indexer.rotated`, `formats.hadamard` (same order of
sums), `formats.fp8_block` and `.mxfp4`; weights stay fp32. FP8 has no scales of its own because the score is a sum over
heads of weight x ReLU(q . k), and a positive scale moves out of the ReLU.

**Threads.** ``lanes`` lanes share a head; lane l has the pieces (8 dims, 16 bytes) l, l + lanes, ... So the strides 1,
2, 4 of the rotation are inside a lane, then come log2(lanes) exchanges of everything, then the rest is inside a lane.
Exchanges are what limits: a warp's takes 4 issue slots of its scheduler.

| lanes | heads a warp at once | exchanges a head of a warp | bytes side by side, of loads |
|-------|----------------------|----------------------------|------------------------------|
| 16    | 2                    | 16                         | 256                          |
| 8     | 4                    | 12                         | 128                          |
| 4     | 8                    | 8                          | 64                           |

A warp takes ``passes`` times as many heads of one token, their loads on their way before the first is used, and does
so ``rounds`` times: what is converted makes room for the loads of the next round. It has the cosines and sines of its
dims once. No shared memory, no barrier.

**Bytes** of a head: 256 in; 128 out (fp8) or 68 (fp4), and 6 for the weight. Limited by memory (fp8), where E2M1 has no
conversion (sm_90a) by issue.

Source: DSV4 paper, CSA section; DSV4 released inference code.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from dsv4lib.dsl import rope
from dsv4lib.dsl.tensors import Divisor
from dsv4lib.errors import ConfigError
from dsv4lib.formats.indexer_key import DIM
from dsv4lib.ops.quantize import codes
from dsv4lib.ops.quantize.codes import PIECE
from dsv4lib.ops.quantize.config import RECIPES
from dsv4lib.ops.quantize.kernel import ELEMENTS, divide, in_fp32, store_words

WARP = 32
ROW_PIECES = DIM // PIECE
FIRST_ROPE = ROW_PIECES - rope.PIECES  # the first piece that rotates
FORMATS = {"fp8": RECIPES["fp8"], "fp4": RECIPES["mxfp4"]}
BLOCK_LANES = FORMATS["fp4"].block // PIECE


class Token(NamedTuple):
    """A token of a launch.

    Attributes:
        mQ, mWeights: what is read, as in `IndexerQ.__call__`. mCodes, mScales, mOut: what is written.
        factor: of the weights. token: its row.
    """

    mQ: cute.Tensor
    mWeights: cute.Tensor
    mCodes: cute.Tensor
    mScales: Any
    mOut: cute.Tensor
    factor: Float32
    token: Int32


class IndexerQ:
    """Rotate and quantise queries; see the module docstring.

    Args:
        variant: "fp8" or "fp4".
        hadamard: rotate by the Hadamard matrix, too.
        lanes: that share a head, 4, 8 or 16. passes: of a warp at once, 1, 2 or 4. warps: of a CTA, 1 to 16.
        rounds: how often a warp goes through its passes, 1, 2, 4 or 8.
        gathered: rows of the table are chosen by positions; else row t is token t's.
        weights: type of the head weights, "bf16" or "fp32".
        fp4_conversion: cvt to e2m1x2 is there (`quantize.config.has_fp4_conversion`).

    Raises:
        ConfigError: a value that is not allowed.
    """

    def __init__(
        self,
        variant: str = "fp8",
        hadamard: bool = True,
        lanes: int = 8,
        passes: int = 2,
        warps: int = 4,
        rounds: int = 1,
        gathered: bool = True,
        weights: str = "bf16",
        fp4_conversion: bool = True,
    ):
        for name, value, allowed in (
            ("variant", variant, tuple(FORMATS)),
            ("lanes", lanes, (4, 8, 16)),
            ("passes", passes, (1, 2, 4)),
            ("warps", warps, tuple(range(1, 17))),
            ("rounds", rounds, (1, 2, 4, 8)),
            ("weights", weights, tuple(ELEMENTS)),
        ):
            if value not in allowed:
                raise ConfigError(name, value, "one of " + ", ".join(map(str, allowed)))
        self.variant, self.hadamard, self.lanes, self.passes, self.warps = variant, hadamard, lanes, passes, warps
        self.rounds, self.gathered, self.weights, self.fp4_conversion = rounds, gathered, weights, fp4_conversion
        # ---- what follows
        self.format, self.weight_element = FORMATS[variant], ELEMENTS[weights]
        self.pieces = ROW_PIECES // lanes  # of a lane, of a head
        self.rotating = [j for j in range(self.pieces) if (j + 1) * lanes > FIRST_ROPE]  # in some lanes at least
        self.heads_at_once = WARP // lanes
        self.warp_heads = self.heads_at_once * passes * rounds
        self.threads = WARP * warps

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        flags = [name for name in ("hadamard", "gathered", "fp4_conversion") if vars(self)[name]]
        sizes = map(str, (self.lanes, self.passes, self.warps, self.rounds))
        return f"IndexerQ({', '.join([self.variant, *sizes, self.weights, *flags])})"

    def blocks(self, heads: int) -> int:
        """CTAs a token."""
        return -(-heads // (self.warp_heads * self.warps))

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mWeights: cute.Tensor,
        mPositions: Any,
        mTable: cute.Tensor,
        mCodes: cute.Tensor,
        mScales: Any,
        mOut: cute.Tensor,
        factor: Float32,
        blocks: Divisor,
        stream: cuda.CUstream,
    ):
        """Launch.

        Args:
            mQ: [T, H, 128] bf16. mWeights: [T, H].
            mPositions: [T] int64, or None unless ``gathered``.
            mTable: [P, 64] fp32, 32 cosines and 32 sines a row.
            mCodes: [T, H, 32 or 16] int32. mScales: [T, H] int32, 4 bytes of UE8M0, or None for fp8.
            mOut: [T, H] fp32.
            factor: of the weights.
            blocks: CTAs of a token.
            stream: where the launch is queued.
        """
        self.kernel(mQ, mWeights, mPositions, mTable, mCodes, mScales, mOut, factor, blocks).launch(
            grid=(mQ.shape[0] * blocks.number, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mWeights: cute.Tensor,
        mPositions: Any,
        mTable: cute.Tensor,
        mCodes: cute.Tensor,
        mScales: Any,
        mOut: cute.Tensor,
        factor: Float32,
        blocks: Divisor,
    ):
        """Fetch the first heads and the angles. Then run one pass after the other, each fetching what follows it."""
        cta, _, _ = cute.arch.block_idx()
        token, block = divide(cta, blocks)
        lane, warp = cute.arch.lane_idx(), block * self.warps + cute.arch.warp_idx()
        first = warp * self.warp_heads + lane // self.lanes
        place = lane % self.lanes
        rQ = cute.make_rmem_tensor((PIECE, self.pieces, self.passes), BFloat16)
        rWeights = cute.make_rmem_tensor(self.passes, self.weight_element)
        rQ.fill(0.0)
        rWeights.fill(0.0)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()  # after the wait: this kernel ends after the one before
        for i in cutlass.range_constexpr(self.passes):
            self.fetch(mQ, mWeights, token, first + i * self.heads_at_once, place, rQ[None, None, i], rWeights, i)
        angles = self.angles(mTable, mPositions, token, place)
        given = Token(mQ, mWeights, mCodes, mScales, mOut, factor, token)
        if cutlass.const_expr(self.rounds == 1):
            self.round(given, first, True, place, angles, rQ, rWeights)
        else:
            for r in cutlass.range(self.rounds, unroll=1):
                head = first + r * (self.passes * self.heads_at_once)
                self.round(given, head, r + 1 == self.rounds, place, angles, rQ, rWeights)

    @cute.jit
    def round(
        self, given: Token, first: Int32, last: Any, place: Int32, angles: list, rQ: cute.Tensor, rWeights: cute.Tensor
    ):
        """Run one pass after the other. Each fetches its successor of the next round unless this is the last."""
        mQ, mWeights, mCodes, mScales, mOut, factor, token = given
        for i in cutlass.range_constexpr(self.passes):
            head = first + i * self.heads_at_once
            rX = cute.make_rmem_tensor((PIECE, self.pieces), Float32)
            for j in cutlass.range_constexpr(self.pieces):
                rX[None, j].store(in_fp32(rQ[None, j, i]).load())
            weight = rWeights[i].to(Float32) * factor
            if cutlass.const_expr(self.rounds > 1):
                if not last:
                    following = head + self.passes * self.heads_at_once
                    self.fetch(mQ, mWeights, token, following, place, rQ[None, None, i], rWeights, i)
            self.apply_rope(rX, angles, place)
            if cutlass.const_expr(self.hadamard):
                self.rotate(rX, place)
            inside = head < mQ.shape[1]
            if cutlass.const_expr(self.variant == "fp8"):
                self.store_fp8(rX, mCodes, mOut, token, head, inside, place, weight)
            else:
                self.store_fp4(rX, mCodes, mScales, mOut, token, head, inside, place, weight)

    @cute.jit
    def fetch(
        self,
        mQ: cute.Tensor,
        mWeights: cute.Tensor,
        token: Int32,
        head: Int32,
        place: Int32,
        rHead: cute.Tensor,
        rWeights: cute.Tensor,
        i: cutlass.Constexpr,
    ):
        """Start the loads of this lane's part of a head, if there is such a head."""
        if head < mQ.shape[1]:
            for j in cutlass.range_constexpr(self.pieces):
                source = cute.local_tile(mQ[token, head, None], (PIECE,), (place + j * self.lanes,))
                cute.autovec_copy(source, rHead[None, j])
            rWeights[i] = mWeights[token, head]

    @cute.jit
    def angles(self, mTable: cute.Tensor, mPositions: Any, token: Int32, place: Int32):
        """Cosines and sines of each of this lane's ``rotating`` pieces."""
        pieces = [place + (j * self.lanes - FIRST_ROPE) for j in self.rotating]
        return [rope.angles(mTable, mPositions, token, piece, piece >= 0) for piece in pieces]

    @cute.jit
    def apply_rope(self, rX: cute.Tensor, angles: list, place: Int32):
        """RoPE in place, rounded to bf16, in the lanes whose dims rotate."""
        for i in cutlass.range_constexpr(len(self.rotating)):
            j = self.rotating[i]
            if place >= FIRST_ROPE - j * self.lanes:
                found = rope.rotate([rX[k, j] for k in range(PIECE)], *angles[i], False)
                for k in cutlass.range_constexpr(PIECE):
                    rX[k, j] = found[k]
                self.store_bf16(rX, j)

    @cute.jit
    def store_bf16(self, rX: cute.Tensor, j: cutlass.Constexpr):
        """Round a piece as the released code does where it stores it."""
        rHalf = cute.make_rmem_tensor(PIECE, BFloat16)
        rHalf.store(rX[None, j].load().to(BFloat16))
        rX[None, j].store(in_fp32(rHalf).load())

    @cute.jit
    def rotate(self, rX: cute.Tensor, place: Int32):
        """Apply Hadamard in place, rounded to bf16.

        The order is that of `formats.hadamard.transform`: strides 1, 2, 4, ... 64.
        """
        x = [rX[i] for i in range(PIECE * self.pieces)]
        inside = PIECE * self.lanes  # the stride of this lane's pieces
        for i in cutlass.range_constexpr(DIM.bit_length() - 1):
            stride = 1 << i
            if cutlass.const_expr(stride < PIECE or stride >= inside):
                near = stride if stride < PIECE else stride // self.lanes
                x = [x[k - near] - x[k] if k & near else x[k] + x[k + near] for k in range(len(x))]
            else:
                apart = stride // PIECE
                sign = Float32(cutlass.select_(place & apart == 0, Float32(1.0), Float32(-1.0)))
                x = [cute.math.fma(own, sign, cute.arch.shuffle_sync_bfly(own, apart)) for own in x]
        for i in cutlass.range_constexpr(PIECE * self.pieces):
            rX[i] = x[i] * Float32(DIM**-0.5)
        for j in cutlass.range_constexpr(self.pieces):
            self.store_bf16(rX, j)

    @cute.jit
    def store_fp8(
        self,
        rX: cute.Tensor,
        mCodes: cute.Tensor,
        mOut: cute.Tensor,
        token: Int32,
        head: Int32,
        inside: Any,
        place: Int32,
        weight: Float32,
    ):
        """One scale a head, which goes into the weight."""
        x = [rX[i] for i in range(PIECE * self.pieces)]
        amax = codes.over_lanes(codes.largest(x, False), self.lanes)
        byte = codes.ue8m0(amax, self.format.divisor, self.format.floor)
        words = codes.e4m3(x, codes.inverse_power(byte))
        if inside:
            for j in cutlass.range_constexpr(self.pieces):
                target = place + j * self.lanes
                store_words(mCodes[token, head, None], target, list(words[2 * j : 2 * j + 2]))
            if place == 0:
                mOut[token, head] = weight * codes.power(byte)

    @cute.jit
    def store_fp4(
        self,
        rX: cute.Tensor,
        mCodes: cute.Tensor,
        mScales: cute.Tensor,
        mOut: cute.Tensor,
        token: Int32,
        head: Int32,
        inside: Any,
        place: Int32,
        weight: Float32,
    ):
        """Store four scales a head: a block is 4 lanes of a piece. Their bytes come together in one word."""
        scales = Int32(0)
        for j in cutlass.range_constexpr(self.pieces):
            x = [rX[k, j] for k in range(PIECE)]
            amax = codes.over_lanes(codes.largest(x, False), BLOCK_LANES)
            byte = codes.ue8m0(amax, self.format.divisor, self.format.floor)
            word = codes.e2m1_of_power(x, byte, self.fp4_conversion)
            if inside:
                store_words(mCodes[token, head, None], place + j * self.lanes, [word])
            scales |= byte << 8 * (place // BLOCK_LANES + j * (self.lanes // BLOCK_LANES))
        for i in cutlass.range_constexpr((self.lanes // BLOCK_LANES).bit_length() - 1):
            scales |= cute.arch.shuffle_sync_bfly(scales, BLOCK_LANES << i)
        if inside & (place == 0):
            mScales[token, head] = scales
            mOut[token, head] = weight
