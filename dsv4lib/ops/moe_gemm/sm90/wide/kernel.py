"""Grouped GEMM of experts on Hopper for many tokens an expert: MXFP4 weights, bf16 MMAs, sums in the tensor core.

    y[r] = alpha_e (x[r] @ W_e^T)                                     rows r of group e
    h[r] = silu(min(g, limit)) clip(u, -limit, limit) routing_r       swiglu: g, u = alpha_e, alpha_up_e x gate, up sums

It reads the tiled weights of `sm90.kernel`, of either mode, and bf16 tokens. There a tile has 64 rows of weights and up
to 32 tokens, and reading them is the time; here it has 256 rows and up to 128 tokens, and MMAs are. A warpgroup has two
blocks of 64 rows: while MMAs of one run, it expands the weights of the other.

Weights become bf16, exactly, their scales included, so that fp32 sums need none. E4M3 MMAs take half the time, but
of MXFP8 tokens every 32 of K would cost each sum a multiplication by two scales, more than that. `wide.e4m3` has them
for tokens with a scale a 128 of K (data/bench/moe_gemm.md).

Tile picture (tile_n 128; `budget` computes the numbers of any configuration)

    one stage = 256 rows x 128 K                        SMEM                              registers of a warpgroup
    weights  4 x 4,096 B  --cp.async.bulk--->  +----------------------------+
    scales   4 x 1,024 B  --cp.async.bulk--->  | X    4 x 128 tokens x 256 B | --desc--> wgmma m64n128k16, A = masks,
    tokens   128 x 256 B  --cp.async-------->  | W    4 x 20,480 B           | --lds---> shifts and a multiplication
                                               | sums 2 x 16 tokens x 68     | <-------> 2 x 64 fp32 a thread
                                               | groups, 8 mbarriers         |
                                               +----------------------------+

Roles (3 warpgroups, 384 threads)

    warps 0-7    consumers   warpgroup w has blocks 2 w and 2 w + 1 of a tile's four: all of K, 8 MMAs a block and
                             stage; at the end of a tile 16 tokens at a time pass through SMEM (`finish_block`)
    warps 8-11   load        each a quarter of the tokens (`load`); warp 8 starts the copies of the weights, too.
                             384 threads start with 168 registers; consumers take 232, these keep 40

Pipeline   copies -> consumers   as many stages as fit, 4 to 8

    full     the bytes of the bulk copies, and 128 lanes' cp.async; consumers then fence the proxies
    empty    an arrival a consumer warp, after its MMAs have read the tokens

A warpgroup waits for its MMAs at the end of a stage; the other one's fill that time. MMAs have as few columns as a
tile's rows need, of three numbers (`COLUMNS`).

What limits it (computed, not measured): MMAs, 2,048 cycles a stage at 128 tokens. L2 gives such a stage 53,248 bytes,
26 a cycle. Shared memory is read for B four times a stage: half of what it can give in that time.

Source: PTX ISA, "wgmma", "cp.async.bulk"; OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, memory

from dsv4lib.dsl import wgmma
from dsv4lib.dsl.asm import asm
from dsv4lib.dsl.budget import SMEM_ALIGN
from dsv4lib.ops.moe_gemm.schedule import Ranges
from dsv4lib.ops.moe_gemm.sm90.config import HALF, MAX_EXPERTS, PITCH, REDUCE
from dsv4lib.ops.moe_gemm.sm90.epilogue import Ends, Epilogue, Outputs, Pair, Scales
from dsv4lib.ops.moe_gemm.sm90.groups import Groups, Tile
from dsv4lib.ops.moe_gemm.sm90.layout import BLOCK, CHUNK_K, FORMS
from dsv4lib.ops.moe_gemm.sm90.load import Sources, Stages, Tokens
from dsv4lib.ops.moe_gemm.sm90.mma import CHUNK_BYTES, HALF_BYTES, THREAD_BYTES, Mma, load, pure, to_e4m3
from dsv4lib.ops.moe_gemm.sm90.wide.config import (
    BLOCKS,
    FIRST_LOAD_WARP,
    GROUPS,
    THREADS,
    TILE_BLOCKS,
    TOKENS,
    WideConfig,
)
from dsv4lib.ops.moe_gemm.sm90.wide.load import Load

TWO_BYTES = (0x1404, 0x3424)  # selectors of prmt: bytes 0 and 1, or 2 and 3, of a word become upper bytes of halves


class WideMoeGemm(Load, Mma, Epilogue, WideConfig):
    """Grouped GEMM of many tokens an expert on Hopper: options as `WideConfig`."""

    # ------------------------------------------------------------------ host

    @cute.jit
    def __call__(
        self,
        tokens: Tokens,
        mW: cute.Tensor,
        groups: Ranges,
        alpha: Any,
        alpha_up: Any,
        routing: Any,
        outputs: Outputs,
        limit: Float32,
        grid: Int32,
        stream: cuda.CUstream,
    ):
        """Host side: the launch. Arguments as of `TiledMoeGemm`."""

        @cute.struct
        class Storage:
            x: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.stages * self.x_bytes], SMEM_ALIGN]
            w: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.stages * self.w_bytes], 128]
            sfx: cute.struct.Align[cute.struct.MemRange[Float32, max(1, self.stages * self.sfx_bytes // 4)], 16]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, self.sum_slots * TOKENS * PITCH], 128]
            groups: cute.struct.MemRange[Int32, 3 * MAX_EXPERTS]
            scan: cute.struct.MemRange[Int32, 32]
            full: cute.struct.MemRange[cutlass.Int64, self.stages]
            empty: cute.struct.MemRange[cutlass.Int64, self.stages]

        self.storage = Storage
        sources, ends = Sources(mW, *tokens), Ends(alpha, alpha_up, routing, *outputs, limit)
        self.kernel(sources, groups, ends).launch(
            grid=(grid, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True, min_blocks_per_mp=1
        )

    # ---------------------------------------------------------------- device

    @cute.kernel
    def kernel(self, sources: Sources, ranges: Ranges, ends: Ends):
        """Set-up shared by all warps, then one role each."""
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = memory.SmemAllocator().allocate(self.storage)
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
        if tidx == 0:
            for i in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(full + i, self.arrivals)
                cute.arch.mbarrier_init(empty + i, 4 * GROUPS)
            cute.arch.mbarrier_init_fence()
        table = storage.groups.get_tensor(cute.make_layout((MAX_EXPERTS, 3)))
        wide = cute.ceil_div(sources.w.shape[1], TILE_BLOCKS)
        groups = Groups(table[None, 0], table[None, 1], table[None, 2], wide)
        cute.arch.griddepcontrol_wait()
        self.find_groups(*ranges, groups, storage.scan.get_tensor(cute.make_layout(32)))
        cute.arch.barrier(barrier_id=0, number_of_threads=THREADS)
        total = groups.ends[MAX_EXPERTS - 1]
        sfx = storage.sfx.data_ptr().toint()
        stages = Stages(storage.x.data_ptr().toint(), storage.w.data_ptr(), sfx, full, empty)
        if warp >= FIRST_LOAD_WARP:
            cute.arch.setmaxregister_decrease(self.load_registers)
            self.load(sources, groups, total, stages)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            shape = cute.make_layout((PITCH, TOKENS, self.sum_slots))
            self.consume(sources, groups, total, stages, storage.sums.get_tensor(shape), ends)

    # --------------------------------------------------------------- consume

    @cute.jit
    def consume(self, sources: Sources, groups: Groups, total: Int32, stages: Stages, sSum: cute.Tensor, ends: Ends):
        """Run the consumer warps: tile after tile."""
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        tidx, _, _ = cute.arch.thread_idx()
        group = cute.arch.make_warp_uniform(tidx // 128)
        chunks = sources.w.shape[2] * (self.step_k // CHUNK_K)
        stage, parity = Int32(0), Int32(0)
        rSum = cute.make_rmem_tensor(BLOCKS * self.tile_n // 2, Float32)
        for index in cutlass.range(block, total, grid, unroll=1):
            tile = self.tile(groups, index)
            rSum.fill(0.0)
            for chunk in cutlass.range(chunks, unroll=1):
                cute.arch.mbarrier_wait(stages.full + stage, parity)
                self.copied_by_threads()
                self.add_stage(tile.rows, stages, stage, group, chunk % (self.step_k // CHUNK_K), rSum)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(stages.empty + stage)
                stage = stage + 1
                if stage == self.stages:
                    stage, parity = Int32(0), parity ^ 1
            self.finish_blocks(sources.w, tile, group, sSum, ends, rSum)

    @cute.jit
    def finish_blocks(
        self, mW: cute.Tensor, tile: Tile, group: Int32, sSum: cute.Tensor, ends: Ends, rSum: cute.Tensor
    ):
        """Store the sums of both blocks of a warpgroup."""
        scales = self.scales_of(tile, ends)
        for own in cutlass.range_constexpr(BLOCKS):
            feature = tile.feature * TILE_BLOCKS + group * BLOCKS + own
            if feature < mW.shape[1]:
                mine = Tile(tile.expert, feature, tile.row, tile.rows)
                self.finish_block(mine, own, group, sSum, ends, scales, rSum)

    @cute.jit
    def add_stage(self, rows: Int32, stages: Stages, stage: Int32, group: Int32, chunk: Int32, rSum: cute.Tensor):
        """Add the products of a stage to the sums of both blocks, of as many columns as ``rows`` need."""
        w = stages.w.toint() + stage * self.w_bytes + group * (BLOCKS * self.block_bytes)
        operand, sfx = wgmma.operand(stages.x + stage * self.x_bytes), stages.sfx + stage * self.sfx_bytes
        if cutlass.const_expr(len(self.columns) == 1):
            self.add_columns(self.tile_n, w, operand, sfx, chunk, rSum)
        elif rows <= self.columns[0]:
            self.add_columns(self.columns[0], w, operand, sfx, chunk, rSum)
        elif rows <= self.columns[1]:
            self.add_columns(self.columns[1], w, operand, sfx, chunk, rSum)
        else:
            self.add_columns(self.tile_n, w, operand, sfx, chunk, rSum)

    def add_columns(self, columns: int, w: Int32, operand: Int64, sfx: Int32, chunk: Int32, rSum: cute.Tensor) -> None:
        """Add the products of the first ``columns`` tokens of a stage."""
        each, used, sums = self.tile_n // 2, columns // 2, []
        for own in range(BLOCKS):
            a = self.expanded(w + own * self.block_bytes, chunk)
            wgmma.fence()
            before = [rSum[own * each + c] for c in range(used)]
            sums += wgmma.accumulate(before, a, operand, self.offsets(0, range(CHUNK_K // BLOCK)), rows_are_k=False)
            wgmma.commit()
        for i, value in enumerate(wgmma.wait_for(sums)):
            rSum[i // used * each + i % used] = value

    def expanded(self, w: Int32, chunk: Int32) -> list:
        """Make words of A of a block of rows: 128 K."""
        tidx, _, _ = cute.arch.thread_idx()
        lane, warp = tidx % 32, tidx % 128 // 32
        row = w + CHUNK_BYTES + (warp * 16 + lane // 4) * self.blocks + chunk * (CHUNK_K // BLOCK)
        scales = [load(row + half * (8 * self.blocks), 1)[0] for half in range(2)]
        halves = [self.words(w + half * HALF_BYTES, tidx % 128) for half in range(2)]
        blocks = range(CHUNK_K // BLOCK)
        return [word for block in blocks for word in self.fragments([half[block] for half in halves], scales, block)]

    def words(self, w: Int32, thread: Int32) -> list:
        """Load the packed weights of a row of A fragments in bf16: a word for 32 of K.

        Mode "w4a8" has them as fragments of E4M3, 4 of K a byte each: bf16 wants two of one thread of the quad, t / 2,
        and two of 2 + t / 2.
        """
        if self.mode_name == "w4a16":
            return load(w + thread * THREAD_BYTES, 4)
        first = thread // 4 * 4 + thread % 4 // 2
        low, high = (load(w + (first + 2 * i) * THREAD_BYTES, 4) for i in range(2))
        selector = cutlass.select_(thread % 2 == 0, Int32(0x5410), Int32(0x7632))
        return [
            asm("prmt.b32 $0, $1, $2, $3;", [Int32], [*pair, selector], pure=True)
            for pair in zip(low, high, strict=True)
        ]

    def fragments(self, words: list, scales: list, block: int) -> list:
        """Return words of A of a block's MMAs, of the packed words of rows g and g + 8."""
        if self.mode_name == "w4a16":
            return super().fragments(words, scales, block)
        rows = []
        for word, stored in zip(words, scales, strict=True):
            factor = scale_of(stored, block)
            both = [bits_of(codes, selector) for codes in to_e4m3(word) for selector in TWO_BYTES]
            rows.append([pure("mul.bf16x2 $0, $1, $2;", one, factor) for one in both])
        return [rows[half][2 * mma + i] for mma in range(2) for i in range(2) for half in range(2)]

    @cute.jit
    def finish_block(
        self,
        tile: Tile,
        own: cutlass.Constexpr,
        group: Int32,
        sSum: cute.Tensor,
        ends: Ends,
        scales: Scales,
        rSum: cute.Tensor,
    ):
        """Store the sums of a block of rows, 16 tokens at a time.

        Args:
            own: which of the warpgroup's blocks.
            sSum: fp32 [position, token, warpgroup].
        """
        tidx, _, _ = cute.arch.thread_idx()
        warp, lane = tidx % 128 // 32, cute.arch.lane_idx()
        place, column = warp * 8 + lane // 4, lane % 4 * 2
        low, high = self.places()
        for part in cutlass.range_constexpr(self.tile_n // TOKENS):
            first = part * TOKENS
            if first < tile.rows:
                for c in cutlass.range_constexpr(TOKENS // 2):
                    value = rSum[own * self.tile_n // 2 + first // 2 + c]
                    sSum[place + c // 2 % 2 * HALF, c // 4 * 8 + column + c % 2, group] = value
                self.sync_group(group)
                for token in cutlass.range(warp, cutlass.min(self.stored(tile) - first, TOKENS), 4, unroll=1):
                    sums = Pair(sSum[low, token, group], sSum[high, token, group])
                    self.finish_token(tile, first + token, sums, ends, scales)
                self.sync_group(group)

    def sync_group(self, group: Int32) -> None:
        """Wait for the warps of a warpgroup: sums are there, or have been read."""
        cute.arch.barrier(barrier_id=REDUCE + group, number_of_threads=128)


def scale_of(stored: Int32, block: int) -> Int32:
    """Make two bf16 that a scale of E2M1 is, where that lies as bits of bf16; infinity where it does not fit."""
    shift = FORMS["w4a16"].bias - FORMS["w4a8"].bias
    text = f"{{ .reg .b32 a; bfe.u32 a, $1, {8 * block}, 8; add.s32 a, a, {shift}; min.s32 a, a, 255;"
    return pure(text + " shl.b32 a, a, 7; mad.lo.s32 $0, a, 65536, a; }", stored)


def bits_of(codes: Int32, selector: int) -> Int32:
    """Move two bytes of E4M3 that E2M1 codes are to bf16, value x 2^-126: signs to bit 15, magnitudes to 8 to 6."""
    halves = pure(f"prmt.b32 $0, $1, 0, {selector:#x};", codes)
    moved = pure("{ .reg .b32 a; shr.b32 a, $1, 4; and.b32 $0, a, 0x01C001C0; }", halves)
    return pure("lop3.b32 $0, $1, 0x80008000, $2, 0xEA;", halves, moved)
