"""Run the experts' grouped GEMM on Hopper. Packed MXFP4 weights from HBM, expanded in registers, tokens as N.

    y[r] = alpha_e (x[r] @ W_e^T)                                     rows r of group e
    h[r] = silu(min(g, limit)) clip(u, -limit, limit) routing_r       swiglu: g, u = alpha_e, alpha_up_e x gate, up sums

For few tokens an expert the time is that of reading the weights. They stay packed up to the registers: 0.53 bytes a
weight, in tiles whose order is that of the reads (`layout`). A and B are swapped: 64 rows of weights are M of a wgmma,
tokens are N, 8, 16 or 32; A comes from registers.

Tile picture (w4a8, tile_n 8, step_k 512; `budget` computes the numbers of any configuration)

    one stage = 64 rows x 512 K                        SMEM                                     registers of a warpgroup
    weights, tiled  17,408 B  --cp.async.bulk-->  +---------------------------------+
    tokens     8 x 512 B      --cp.async------->  | X         8 x 8 tokens x 512 B  | --desc--> wgmma m64n8k32, A =
    scales     8 x 4 x 4 B    --cp.async------->  | W         8 x 17,408 B          | --lds---> masks and shifts
                                                  | X scales  8 x 128 B             | --lds---> fp32: sum += MMA x 2^s
                                                  | sums  2 x 4 x 8 tokens x 68 fp32| <-------> 4 warpgroups' sums
                                                  | groups, 16 mbarriers            |
                                                  +---------------------------------+

Roles (5 warpgroups, 640 threads)

    warps 0-15   consumers   warpgroup w takes stages w, w + 4 of the ring: expands, multiplies, adds up; at the end of
                             a tile the sums of the four meet in SMEM
    warp  16     load        a stage: waits until it is empty, copies (`load`)
    warps 17-19  finish      a tile's tokens, each by a warp (`epilogue`)

setmaxnreg is of whole warpgroups: 640 threads start with 96 registers; consumers take 104, the last warpgroup keeps 56.

Pipelines  bulk copy and cp.async -> consumers    8 stages or 4

    full     the bytes of the bulk copy, and 32 lanes' cp.async; consumers then fence the proxies
    empty    an arrival a warp, after its MMAs have read the tokens

           sums -> finish warps    2 buffers or 1

    stored   an arrival a consumer warp
    free     an arrival a finish warp, after it has read its tokens' sums

Stages are a multiple of the warpgroups. Otherwise a warpgroup waits for a phase whose predecessor it never saw, which a
parity cannot tell apart.

Steps of K are counted through all tiles of a CTA; warpgroup w has those that are w modulo 4, whatever K is.

Registers. The launch names a minimum of one CTA an SM: without it ptxas ignores setmaxnreg, finds too few registers and
waits for every MMA by itself.

What should limit it (computed, not measured). Up to 16 tokens an expert: HBM; issuing takes about 136 instructions a
warp for 16 rows x 128 K at 8 tokens. Above: a tile of 32 tokens reads its weights from L2 once for each 32.
Launches overlap (`griddepcontrol`): all of it waits before the counts are read; with ``early`` the load warp waits once
the weights of the first stages are under way, the consumers before they begin.

Source: PTX ISA, "wgmma", "cp.async.bulk"; OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, memory

from dsv4lib.dsl.budget import SMEM_ALIGN
from dsv4lib.ops.moe_gemm.schedule import Ranges
from dsv4lib.ops.moe_gemm.sm90.config import (
    CONSUMER_REGISTERS,
    CONSUMER_WARPS,
    CONSUMERS,
    FINISH_WARPS,
    LOAD_REGISTERS,
    LOAD_WARP,
    MAX_EXPERTS,
    PITCH,
    SUM_BUFFERS,
    THREADS,
)
from dsv4lib.ops.moe_gemm.sm90.epilogue import Ends, Epilogue, Outputs, Sums
from dsv4lib.ops.moe_gemm.sm90.groups import Groups
from dsv4lib.ops.moe_gemm.sm90.load import Load, Sources, Stages, Tokens
from dsv4lib.ops.moe_gemm.sm90.mma import Mma


class TiledMoeGemm(Load, Mma, Epilogue):
    """Grouped GEMM of experts on Hopper. Options as `Config`, a role of the module docstring a base class."""

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
        """Host side: the launch.

        Args:
            tokens: rows sorted by expert.
            mW: uint8 [E, N / 64, K / step_k, bytes], see `layout`.
            groups: offsets are multiples of 8; E up to 512.
            alpha, alpha_up: [E] fp32 or None: factors of the sums, with SwiGLU of gate and of up.
            routing: [R] fp32 or None.
            outputs: rows and their scales.
            limit: of the SwiGLU clamp.
            grid: CTAs to launch.
            stream: where the launch is queued.
        """

        @cute.struct
        class Storage:
            x: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.stages * self.x_bytes], SMEM_ALIGN]
            w: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.stages * self.w_bytes], 128]
            sfx: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.stages * self.sfx_bytes], 128]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, self.sum_buffers * self.sum_words], 128]
            groups: cute.struct.MemRange[Int32, 3 * MAX_EXPERTS]
            scan: cute.struct.MemRange[Int32, 32]
            full: cute.struct.MemRange[cutlass.Int64, self.stages]
            empty: cute.struct.MemRange[cutlass.Int64, self.stages]
            stored: cute.struct.MemRange[cutlass.Int64, SUM_BUFFERS]
            free: cute.struct.MemRange[cutlass.Int64, SUM_BUFFERS]

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
        shape = cute.make_layout((PITCH, self.tile_n, CONSUMERS, self.sum_buffers))
        sums = Sums(storage.sums.get_tensor(shape), storage.stored.data_ptr(), storage.free.data_ptr())
        if tidx == 0:
            for i in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(full + i, 33)  # the bulk copy's bytes, and a lane each
                cute.arch.mbarrier_init(empty + i, 4)  # a warp each of the warpgroup that has the stage
            for i in cutlass.range_constexpr(SUM_BUFFERS):
                cute.arch.mbarrier_init(sums.stored + i, CONSUMER_WARPS)
                cute.arch.mbarrier_init(sums.free + i, FINISH_WARPS)
            cute.arch.mbarrier_init_fence()
        table = storage.groups.get_tensor(cute.make_layout((MAX_EXPERTS, 3)))
        groups = Groups(table[None, 0], table[None, 1], table[None, 2], sources.w.shape[1])
        if cutlass.const_expr(not self.early):
            cute.arch.griddepcontrol_wait()
        self.find_groups(*ranges, groups, storage.scan.get_tensor(cute.make_layout(32)))
        cute.arch.barrier(barrier_id=0, number_of_threads=THREADS)
        total = groups.ends[MAX_EXPERTS - 1]
        stages = Stages(
            storage.x.data_ptr().toint(),
            storage.w.data_ptr(),
            storage.sfx.data_ptr().toint() if self.scaled else Int32(0),
            full,
            empty,
        )
        if warp >= LOAD_WARP:
            cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
            if warp == LOAD_WARP:
                self.load(sources, groups, total, stages)
            else:
                if cutlass.const_expr(self.early):
                    cute.arch.griddepcontrol_wait()
                self.finish_tiles(sources, groups, total, sums, ends)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            if cutlass.const_expr(self.early):
                cute.arch.griddepcontrol_wait()
            self.consume(sources, total, stages, sums)

    @cute.jit
    def consume(self, sources: Sources, total: Int32, stages: Stages, sums: Sums):
        """Run the consumer warps: tile after tile, whose ends are of other warps.

        Args:
            total: number of tiles.
        """
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        tidx, _, _ = cute.arch.thread_idx()
        steps = sources.w.shape[2]
        due = stage = cute.arch.make_warp_uniform(tidx // 128)
        buffer, free, parity = Int32(0), Int32(1), Int32(0)
        rSum = cute.make_rmem_tensor(self.tile_n // 2, Float32)
        for _index in cutlass.range(block, total, grid, unroll=1):
            due, stage, parity = self.sum_up(steps, due, stage, parity, stages, rSum)
            self.wait_for_room(sums.free + buffer, free)
            self.store_sums(buffer, sums.sums, rSum)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(sums.stored + buffer)
            buffer, free = self.next_buffer(buffer, free)

    @cute.jit
    def finish_tiles(self, sources: Sources, groups: Groups, total: Int32, sums: Sums, ends: Ends):
        """Run the finish warps: tile after tile, a token a warp."""
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        steps = sources.w.shape[2]
        first, buffer, parity = Int32(0), Int32(0), Int32(0)
        for index in cutlass.range(block, total, grid, unroll=1):
            tile = self.tile(groups, index)
            scales = self.scales_of(tile, ends)  # in flight during the wait
            self.wait_for_sums(sums.stored + buffer, parity)
            self.finish(tile, first, buffer, sums.sums, ends, scales)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(sums.free + buffer)
            first = (first + steps) % CONSUMERS
            buffer, parity = self.next_buffer(buffer, parity)

    def next_buffer(self, buffer: Int32, parity: Int32) -> tuple[Int32, Int32]:
        """Return the buffer of sums of the next tile, and the parity of its barriers."""
        return (buffer, parity ^ 1) if self.sum_buffers == 1 else (buffer ^ 1, parity ^ buffer)

    def wait_for_room(self, free: cute.Pointer, parity: Int32) -> None:
        """Wait until a buffer of sums has been read."""
        cute.arch.mbarrier_wait(free, parity)

    def wait_for_sums(self, stored: cute.Pointer, parity: Int32) -> None:
        """Wait until all consumers have stored their sums of a tile."""
        cute.arch.mbarrier_wait(stored, parity)
