"""Multiply ragged groups of tokens by block-scaled weights on SM100.

DeepSeek-V4's experts, in one launch.

    y[r] = alpha_e * (x[r] @ W_e^T)                                  rows r of expert e; L2, and any linear (E = 1)
    h[r] = silu(min(g, limit)) * clip(u, -limit, limit) * weight_r   L1: g = alpha_e * gate sum, u = alpha_up_e * up sum

Source: DSV4's released code (clamped SwiGLU, routing weight before w2); the oracle is `dsv4lib.reference.moe_gemm`.
h is written as bf16, or quantised in the same kernel to what L2 reads: NVFP4 with a given global scale, or MXFP8.

    mode     weights               activations           MMA                                    K of an MMA, of a step
    nvfp4    E2M1, UE4M3 / 16      E2M1, UE4M3 / 16      kind::mxf4nvf4.block_scale.block16     64, 256
    w4a8     E2M1, UE8M0 / 32      E4M3, UE8M0 / 32      kind::mxf8f6f4.block_scale.block32     32, 128
    mxfp8    E4M3, UE8M0 / 32      E4M3, UE8M0 / 32      kind::mxf8f6f4.block_scale.block32     32, 128
    bf16     bf16                  bf16                  kind::f16                              16, 64

Layout. Tokens come sorted by expert: a group starts at a row that is a multiple of 128, so that the scales of its rows
are whole blocks (`formats.scale_swizzle`); its count may be 0. The masked layout is the same with offset e * max_m.
Weights are [E, N, K]; of L1 their rows are gate and up, alternating by 8.

Tile picture (nvfp4, tile_n 64). A and B are swapped: features are M, the lanes of the accumulator, tokens are N, its
columns. A K step is 128 bytes of a row, 4 MMAs; the numbers of any configuration are in `MoeGemm.budget`.

    SMEM                                        TMEM: 128 lanes (features) x 512 columns
  +-------------------------------------+       0          64         128          144          160  256
  | W         7 x 128 features x 128 B  |       +----------+----------+------------+------------+----+
  | X         7 x  64 tokens   x 128 B  |       | tokens,  | tokens,  | scales of  | scales of  |    |
  | W scales  7 x 4 blocks of 512 B     |       | tile i   | tile i+1 | W, 4 x 4   | X, 4 x 4   |    |
  | X scales  7 x 4 blocks of 512 B     |       +----------+----------+------------+------------+----+
  | exchange  2 x 16 tokens x 128 fp32  |
  | mbarriers, TMEM address             |       192 tokens: 2 accumulators and two blocks of 128 rows' scales;
  +-------------------------------------+       256 tokens: one accumulator

Roles (6 warps, 192 threads); each finds the tiles of its CTA by itself from the counts (`schedule`)

    warps 0-3   epilogue  a tile: 16 (L1: 32) tokens at a time TMEM -> registers -> exchange -> registers -> global
    warp  4     mma       a K step: tcgen05.cp of its scales to TMEM, then its 4 MMAs with N = tokens, up to 16s
    warp  5     load      a K step: a box of 128 features, 8 boxes or fewer of tokens, boxes of scales

Pipelines

    ab    TMA -> UMMA        7 stages or what fits   full: all boxes have landed    empty: commit after the MMAs
    acc   UMMA -> epilogue   2 tiles                 full: commit after the last    empty: an arrival a warp

Scales of tokens. Row r of a block of 128 is in lane r mod 32, column r div 32 of 4 columns. A tile starts at a row that
is a multiple of 64, so its scales start 0 or 2 columns into the block: the only starts that CUTLASS's kernels use.

Why swapped. An MMA with block scales has M 128. With tokens as M an expert with one token would load 128 rows of X,
as many bytes as of W, and of 128 epilogue threads one would work through 64 features. Swapped, N follows the count:
16 rows of X a K step (2 KiB beside 16 KiB of weights), and every thread has 8 sums. The price is that blocks of the
next GEMM's K run along lanes. Three transposes, in warp instructions for 512 outputs of L1 (32 tokens of one warp's 16
features; a thread has 16 outputs), counted by hand, without the SwiGLU, which all share:

    in lanes     amax of 16 lanes by 3 shuffles for each of 8 tokens a thread: 24 + 24 max, 8 scales (each in 8 lanes),
                 8 shuffles and 16 selects to pair nibbles, 8 conversions, 8 byte stores to SMEM and back: 140 and more
    exchange     16 st.shared, 4 ld.shared (16 B), 1 scale, 16 max, 8 conversions, 1 store of 8 B: about 75, without
                 bank conflicts; any block size, any output type
    unswapped    no exchange at all, but 128 rows a tile

So: the exchange. Measured (emulator, PTX): a warp's chunk of 512 outputs takes 266 instructions to bf16, 390 to NVFP4,
392 to MXFP8; 92 without SwiGLU. `tcgen05.ld.16x256b` puts rows r and r + 8, gate and up of a feature, in one thread.

A pair (`ctas` 2, `cta_group::2`) takes 256 features x tile_n tokens: each CTA loads its 128 features, half of the
tokens and all of the tokens' scales. X comes from L2 once for 256 features: for tiles of 128 tokens and more, whose
rows are as many bytes as the weights' (`ops.moe_gemm.tile_of`).

Launches overlap (`griddepcontrol`): barriers and TMEM are made while the kernel before ends, and each role waits for it
before it reads the counts. `Linear` knows its first tile without them and brings the tile's weights to L2 meanwhile.

Ragged edges. TMA fills with zeros what is outside; scales past the last feature are zero bytes. An MMA multiplies rows
past the group's last one, up to 16s, whatever is there: a column of its own, never stored.

What limits it. Few tokens an expert: the weights from HBM, 18 KiB a K step and tile in nvfp4; up to 8 stages are in
flight. Many: MMAs of 128 x N x 64 in 4 a step against N + 128 rows of 128 B from SMEM.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, memory, pipeline

from dsv4lib.dsl import pipelines, tmem, umma
from dsv4lib.ops.moe_gemm.config import (
    EPILOGUE_THREADS,
    EPILOGUE_WARPS,
    LOAD_WARP,
    MMA_WARP,
    ROW_BYTES,
    THREADS,
    TMEM_READY,
    W_BYTES,
)
from dsv4lib.ops.moe_gemm.epilogue import Ends, Epilogue, Outputs
from dsv4lib.ops.moe_gemm.load import Depth, Load, Rings, Sources
from dsv4lib.ops.moe_gemm.mma import Mma
from dsv4lib.ops.moe_gemm.schedule import Groups


class Operand(NamedTuple):
    """One operand: codes uint8, and their scales [.., blocks, 512] uint8, or None."""

    codes: cute.Tensor
    scales: Any


class MoeGemm(Load, Mma, Epilogue):
    """Grouped GEMM of experts. Options as `Config`, a role of the module docstring a base class."""

    # ------------------------------------------------------------------ host

    @cute.jit
    def __call__(
        self,
        tokens: Operand,
        weights: Operand,
        groups: Any,
        alpha: Any,
        alpha_up: Any,
        routing: Any,
        outputs: Outputs,
        limit: Float32,
        grid: Int32,
        stream: cuda.CUstream,
    ):
        """Host side: TMA descriptors and the launch.

        Args:
            tokens: [R, bytes of K], rows sorted by expert.
            weights: [E, N, bytes of K].
            groups: `schedule.Ranges`, offsets multiples of 128; for `Linear` None.
            alpha, alpha_up: [E] fp32 or None: factors of the sums, with SwiGLU of gate and of up.
            routing: [R] fp32 or None.
            outputs: rows, their scales and global scale.
            limit: of the SwiGLU clamp.
            grid: clusters to launch.
            stream: where the launch is queued.
        """
        (mX, mXs), (mW, mWs) = tokens, weights
        sources = self.sources(mW, mWs, mX, mXs)
        # 16-bit elements come as bytes too: K is what a row of the activations has of it.
        steps = cute.ceil_div(mX.shape[-1], ROW_BYTES)
        blocks = Int32(0)
        if cutlass.const_expr(self.mode.block):
            blocks = cute.ceil_div(mX.shape[-1] * 8 // self.mode.x_bits, 4 * self.mode.block)

        @cute.struct
        class Storage:
            sW: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.stages * W_BYTES], umma.SWIZZLE_ATOM]
            sX: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.stages * self.x_bytes], umma.SWIZZLE_ATOM]
            sWs: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.stages * self.sfw_bytes], 128]
            sXs: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.stages * self.sfx_bytes], 128]
            sH: cute.struct.Align[cute.struct.MemRange[Float32, 2 * self.exchange_words], 128]
            ab_barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.stages]
            acc_barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.acc_stages]
            free_barrier: cute.struct.MemRange[cutlass.Int64, self.ctas - 1]
            tmem_address: cutlass.Int32

        self.storage = Storage
        ends = Ends(alpha, alpha_up, routing, *outputs, limit)
        self.kernel(sources, self.groups(groups, mX, mW), Depth(steps, blocks), ends).launch(
            grid=(grid * self.ctas, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(self.ctas, 1, 1) if self.ctas > 1 else None,
            stream=stream,
            use_pdl=True,
        )

    # ---------------------------------------------------------------- device

    @cute.kernel
    def kernel(self, sources: Sources, groups: Groups, depth: Depth, ends: Ends):
        """Set-up shared by all warps, then one role each."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = memory.SmemAllocator().allocate(self.storage)
        ab = pipelines.tma_to_umma(self.stages, self.stage_bytes, storage.ab_barriers.data_ptr(), 1, self.ctas)
        acc = pipelines.umma_to_warps(self.acc_stages, len(EPILOGUE_WARPS), storage.acc_barriers.data_ptr(), self.ctas)
        free = storage.free_barrier.data_ptr() if self.ctas > 1 else None
        allocator = tmem.allocator(storage.tmem_address.ptr, TMEM_READY, EPILOGUE_THREADS + 32, EPILOGUE_WARPS[0], free)
        cluster = pipelines.cluster_layout(self.ctas)
        pipeline.pipeline_init_arrive(cluster, is_relaxed=True)
        pipeline.pipeline_init_wait(cluster)

        scaled = bool(self.mode.block)
        rings = Rings(
            storage.sW.data_ptr().toint(),
            storage.sX.data_ptr().toint(),
            storage.sWs.data_ptr().toint() if scaled else None,
            storage.sXs.data_ptr().toint() if scaled else None,
        )
        if warp == LOAD_WARP:
            self.load(sources, groups, depth, rings, ab)
        elif warp == MMA_WARP:
            self.mma(groups, depth, rings, allocator, ab, acc)
        else:
            layout = cute.make_layout((self.exchange_words, 2))
            self.epilogue(groups, ends, storage.sH.get_tensor(layout), allocator, acc)
