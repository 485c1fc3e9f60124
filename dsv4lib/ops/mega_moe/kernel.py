"""Run an MoE layer over several devices in one launch a device, on SM100: dispatch, two GEMMs, combine.

    h[r]      = silu(min(g, c)) * clip(u, -c, c) * w[t, s]     g, u = W1_e x[t], W3_e x[t] for e = topk_idx[t, s]
    y[t, s]   = bf16(W2_e q(h[r]))
    out[t]    = bf16(sum_s y[t, s])                            slots in order, fp32; slots with topk_idx -1 are skipped

Every rank owns E / W experts and brings T tokens, a number of its own. Source: DeepSeek's "mega MoE" (DeepGEMM) for
the idea; the oracle is `dsv4lib.reference.mega_moe`. Modes are two of `moe_gemm`'s:

    mode     weights, activations, q     factors of the sums                     K of a step
    w4a8     MXFP4, MXFP8, MXFP8         none                                    128
    nvfp4    NVFP4, all three            gate and up, down; global scale of q    256

With ``weighted`` "l2" h goes to q without w[t, s], and y[t, s] takes it instead: h is then what q was calibrated for.

What crosses devices, and how it is known to be there

    publish   routes to an expert -> owner's `routes`      then st.release.sys   64 bits: count | epoch
    pull      codes, scales, weight of a token <- source   after ld.acquire.sys  of the counts of all ranks
    return    bf16 results -> source's `combine`           then red.release.sys  rows x tiles, into `combined`

Between CTAs of a device: rows that have been pulled, by expert (`ARRIVED`), and tiles of L1, by expert (`done`), each
released and acquired at .gpu scope. The last CTA to leave sets all counters back to 0 and the epoch to this call's.

Order. All warps publish; a warp a CTA waits for the counts; then each goes by its role. The dispatch warps pull the
rows expert after expert, ahead of the GEMMs, which wait for one expert at a time: pulling e + 1 is hidden under the
products of e. L1 of all experts comes before L2 of the first; no tile waits for a later one, so with all CTAs
resident nothing can hang but on a rank that does not take part. The launch is cooperative: a grid that the device
cannot hold at once is refused, and no CTA starts before all can.

Roles (7 warps, 224 threads)

    warps 0-3   epilogue   L1: SwiGLU, q -> workspace;  L2: bf16 -> rank of the token;  then the sum over slots
    warp  4     mma        as `moe_gemm`: features x tokens, scales copied to TMEM
    warp  5     load       TMA of weights, rows and scales, each tile when its rows are there
    warp  6     dispatch   4 rows at a time: bulk copies peer -> SMEM -> workspace

    SMEM: the rings and the exchange of `moe_gemm` (fewer stages), 4 slots of a row, routes by expert and rank
    TMEM: as `moe_gemm`

What limits it now. A CTA's publishing warps read all T k routes for each expert. L1 waits for all rows of an expert,
not only for those of its tile. Not measured: no such machine has run it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, memory, pipeline

from dsv4lib.dsl import pipelines, tmem, umma
from dsv4lib.dsl.budget import BudgetRow
from dsv4lib.errors import ConfigError
from dsv4lib.ops.mega_moe import symmetric
from dsv4lib.ops.mega_moe.combine import Combine
from dsv4lib.ops.mega_moe.dispatch import SLOTS, Dispatch, Rows, Staging
from dsv4lib.ops.mega_moe.layers import Far, First, Memory, Routed, Second
from dsv4lib.ops.mega_moe.layout import ROW_BLOCK, Layout
from dsv4lib.ops.moe_gemm.config import (
    EPILOGUE_THREADS,
    EPILOGUE_WARPS,
    LOAD_WARP,
    MMA_WARP,
    TMEM_READY,
    W_BYTES,
)
from dsv4lib.ops.moe_gemm.epilogue import Ends
from dsv4lib.ops.moe_gemm.load import Rings, Sources
from dsv4lib.ops.moe_gemm.sm100 import Operand

DISPATCH_WARP = 6
WARPS = 7
TILES = (64, 128)
WEIGHTED = ("l1", "l2")  # layer whose results take the routing weights
THREADS = 32 * WARPS


class Workspace(NamedTuple):
    """Rows between the phases, of this device alone; shapes as in `Layout.workspace`.

    Attributes:
        x, h: codes and scales of what L1 and L2 read. sources: int32 [R]. weights: fp32 [R].
    """

    x: Operand
    h: Operand
    sources: cute.Tensor
    weights: cute.Tensor


class Scaling(NamedTuple):
    """Factors of NVFP4 by expert, fp32.

    Attributes:
        l1: [E/W, 2], of the sums of gate and of up. l2: [E/W], of those of down. h: [E/W], global scales of h.
    """

    l1: cute.Tensor
    l2: cute.Tensor
    h: cute.Tensor


class Factors(NamedTuple):
    """What an epilogue reads of `Scaling`, each fp32 [E/W]; without NVFP4 None."""

    gate: Any
    up: Any
    down: Any
    h: Any


class Here(NamedTuple):
    """Which rank this is, and how much it brings.

    Attributes:
        buffer: uint8, this rank's symmetric buffer. peers: int64 [W], addresses of all ranks'. state: int32.
        rank, tokens: of this device.
    """

    buffer: cute.Tensor
    peers: cute.Tensor
    state: cute.Tensor
    rank: Int32
    tokens: Int32


class MegaMoe(Dispatch, Combine):
    """The fused kernel; see the module docstring.

    Args:
        world, experts, max_tokens, topk, hidden, intermediate, mode: of `Layout`.
        tile_n: tokens of a tile, one of `TILES`: their boxes and blocks of scales end where an expert's rows do. A
            larger tile of `moe_gemm` would read rows of the next expert, which may still be arriving.
        weighted: "l1" or "l2", the layer whose results take the routing weights.
        fast_math: of the SwiGLU, see `moe_gemm.epilogue.swiglu`.

    Raises:
        ConfigError: a value that is not allowed.
    """

    first_type, second_type = First, Second

    def __init__(
        self,
        world: int = 1,
        experts: int = 8,
        max_tokens: int = 64,
        topk: int = 2,
        hidden: int = 512,
        intermediate: int = 256,
        tile_n: int = 64,
        mode: str = "w4a8",
        weighted: str = "l1",
        fast_math: bool = True,
    ):
        if tile_n not in TILES:
            raise ConfigError("tile_n", tile_n, "one of " + ", ".join(map(str, TILES)))
        if weighted not in WEIGHTED:
            raise ConfigError("weighted", weighted, "one of " + ", ".join(WEIGHTED))
        self.layout = layout = Layout(world, experts, max_tokens, topk, hidden, intermediate, mode)
        self.before_words = layout.local * (world + 1)
        extra = SLOTS * self.slot_bytes + 8 * SLOTS + 4 * (self.before_words + layout.local)
        kinds = self.first_type, self.second_type
        self.first, self.second = (
            kind(layout, extra, tile_n, weighted == name) for kind, name in zip(kinds, WEIGHTED, strict=True)
        )
        self.first.fast_math = fast_math
        self.tile_n, self.weighted, self.stages = tile_n, weighted, self.first.stages

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        one = self.layout
        sizes = one.world, one.experts, one.max_tokens, one.topk, one.hidden, one.intermediate, self.tile_n
        sizes = *sizes, one.mode, f"weighted_{self.weighted}", "fast" if self.first.fast_math else "exact"
        return f"{type(self).__name__}({', '.join(map(str, sizes))})"

    def budget(self) -> list[BudgetRow]:
        """Compute shared memory, tensor memory and threads of one CTA."""
        rows = [row for row in self.first.budget() if row.resource not in ("threads", "SMEM: total")]
        total = next(row for row in self.first.budget() if row.resource == "SMEM: total")
        dispatch = BudgetRow(
            "SMEM: dispatch",
            self.first.extra,
            total.limit,
            "B",
            f"{SLOTS} rows, their mbarriers, routes of the experts",
        )
        roles = "4 epilogue + 1 MMA + 1 load + 1 dispatch warp"
        return [*rows, dispatch, total, BudgetRow("threads", THREADS, 1024, "threads", roles)]

    # ------------------------------------------------------------------ host

    @cute.jit
    def __call__(
        self,
        l1: Operand,
        l2: Operand,
        scaling: Any,
        workspace: Workspace,
        here: Here,
        mOut: cute.Tensor,
        limit: Float32,
        grid: Int32,
        stream: cuda.CUstream,
    ):
        """Host side: TMA descriptors and the launch.

        Args:
            l1: [E/W, 2 I, H / 2], gate and up alternating by 8 rows, and scales. l2: [E/W, H, I / 2] and scales.
            scaling: `Scaling`, or None. workspace, here: see there.
            mOut: bf16 [T, H], written.
            limit: of the SwiGLU clamp.
            grid: CTAs to launch; all must be resident together.
            stream: where the launch is queued.
        """
        one = self.first

        @cute.struct
        class Storage:
            sW: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, one.stages * W_BYTES], umma.SWIZZLE_ATOM]
            sX: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, one.stages * one.x_bytes], umma.SWIZZLE_ATOM]
            sWs: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, one.stages * one.sfw_bytes], 128]
            sXs: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, one.stages * one.sfx_bytes], 128]
            sH: cute.struct.Align[cute.struct.MemRange[Float32, 2 * one.exchange_words], 128]
            sRows: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, SLOTS * self.slot_bytes], 128]
            ab_barriers: cute.struct.MemRange[cutlass.Int64, 2 * one.stages]
            acc_barriers: cute.struct.MemRange[cutlass.Int64, 2 * one.acc_stages]
            slot_barriers: cute.struct.MemRange[cutlass.Int64, SLOTS]
            before: cute.struct.MemRange[Int32, self.before_words]
            offsets: cute.struct.MemRange[Int32, self.layout.local]
            tmem_address: Int32

        self.storage = Storage
        (mX, mXs), (mH, mHs) = workspace.x, workspace.h
        first = self.first.sources(*l1, mX, mXs)
        second = self.second.sources(*l2, mH, mHs)
        self.kernel(first, second, scaling, workspace, here, mOut, limit).launch(
            grid=(grid, 1, 1), block=(THREADS, 1, 1), stream=stream, cooperative=True
        )

    # ---------------------------------------------------------------- device

    @cute.kernel
    def kernel(
        self,
        first: Sources,
        second: Sources,
        scaling: Any,
        workspace: Workspace,
        here: Here,
        mOut: cute.Tensor,
        limit: Float32,
    ):
        """Set-up and publishing by all warps, then one role each, then the end of the call."""
        one = self.first
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        storage = memory.SmemAllocator().allocate(self.storage)
        ab = pipelines.tma_to_umma(one.stages, one.stage_bytes, storage.ab_barriers.data_ptr())
        acc = pipelines.umma_to_warps(one.acc_stages, len(EPILOGUE_WARPS), storage.acc_barriers.data_ptr())
        allocator = tmem.allocator(storage.tmem_address.ptr, TMEM_READY, EPILOGUE_THREADS + 32, EPILOGUE_WARPS[0])
        staging = Staging(storage.sRows.data_ptr().toint(), storage.slot_barriers.data_ptr())
        if warp == DISPATCH_WARP:
            with cute.arch.elect_one():
                for slot in cutlass.range_constexpr(SLOTS):
                    cute.arch.mbarrier_init(staging.barriers + slot, 1)
        pipeline.pipeline_init_arrive(pipelines.cluster_layout(1), is_relaxed=True)
        pipeline.pipeline_init_wait(pipelines.cluster_layout(1))

        state = here.state.iterator.toint()
        epoch = here.state[self.layout.EPOCH] + 1
        mem = Memory(here.buffer.iterator.toint(), here.peers, state, here.rank, here.tokens, epoch)
        self.publish(mem, block * WARPS + warp, ctas * WARPS)
        local, ranks = self.layout.local, self.layout.world
        routed = Routed(
            storage.before.get_tensor(cute.make_layout((local, ranks + 1), stride=(ranks + 1, 1))),
            storage.offsets.get_tensor(cute.make_layout(local)),
        )
        if warp == 0:
            self.receive(mem, routed)
        cute.arch.barrier()

        rings = Rings(
            storage.sW.data_ptr().toint(),
            storage.sX.data_ptr().toint(),
            storage.sWs.data_ptr().toint(),
            storage.sXs.data_ptr().toint(),
        )
        if warp == LOAD_WARP:
            self.load(first, second, mem, routed, rings, ab)
        elif warp == MMA_WARP:
            self.mma(routed, rings, allocator, ab, acc)
        elif warp == DISPATCH_WARP:
            self.pull(mem, routed, self.rows(workspace), staging)
        else:
            sH = storage.sH.get_tensor(cute.make_layout((one.exchange_words, 2)))
            self.epilogue(scaling, workspace, mem, routed, sH, allocator, acc, mOut, limit)
        cute.arch.barrier()
        if warp == 0:
            self.finish(mem)

    def rows(self, workspace: Workspace) -> Rows:
        """View the workspace as dispatch fills it, 4 scales a word."""
        blocks = workspace.x.scales.shape[0]
        words = cute.make_tensor(
            cute.recast_ptr(workspace.x.scales.iterator, dtype=Int32),
            cute.make_layout((blocks, ROW_BLOCK), stride=(ROW_BLOCK, 1)),
        )
        return Rows(workspace.x.codes, words, workspace.sources, workspace.weights)

    @cute.jit
    def load(
        self,
        first: Sources,
        second: Sources,
        mem: Memory,
        routed: Routed,
        rings: Rings,
        ab: pipeline.PipelineTmaUmma,
    ):
        """Run the load warp over both layers."""
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        groups = self.first.groups_of(routed)
        place = self.first.first_place(groups)
        place, state = self.first.load_layer(first, groups, place, mem, rings, ab, state)
        groups = self.second.groups_of(routed)
        place = self.second.start(groups, place)
        place, state = self.second.load_layer(second, groups, place, mem, rings, ab, state)
        ab.producer_tail(state)  # stay until every stage is empty: MMAs signal in here

    @cute.jit
    def mma(
        self,
        routed: Routed,
        rings: Rings,
        allocator: memory.TmemAllocator,
        ab: pipeline.PipelineTmaUmma,
        acc: pipeline.PipelineUmmaAsync,
    ):
        """Run the MMA warp over both layers."""
        allocator.wait_for_alloc()
        base = allocator.retrieve_ptr(Float32).toint()
        ab_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        acc_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.first.acc_stages)
        groups = self.first.groups_of(routed)
        place = self.first.first_place(groups)
        place, ab_state, acc_state = self.first.mma_layer(groups, place, rings, base, ab, acc, ab_state, acc_state)
        groups = self.second.groups_of(routed)
        place = self.second.start(groups, place)
        self.second.mma_layer(groups, place, rings, base, ab, acc, ab_state, acc_state)

    @cute.jit
    def epilogue(
        self,
        scaling: Any,
        workspace: Workspace,
        mem: Memory,
        routed: Routed,
        sH: cute.Tensor,
        allocator: memory.TmemAllocator,
        acc: pipeline.PipelineUmmaAsync,
        mOut: cute.Tensor,
        limit: Float32,
    ):
        """Run the epilogue warps over both layers, then the sum over slots."""
        allocator.allocate(self.first.tmem_columns)
        allocator.relinquish_alloc_permit()
        allocator.wait_for_alloc()
        address = allocator.retrieve_ptr(Float32)
        tidx, _, _ = cute.arch.thread_idx()
        lanes = address.toint() + (tidx // 32 * 32 << 16)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.first.acc_stages)
        buffer = Int32(0)
        groups = self.first.groups_of(routed)
        place = self.first.first_place(groups)
        factors = self.factors(scaling)
        ends = Ends(factors.gate, factors.up, workspace.weights, *workspace.h, factors.h, limit)
        place, state, buffer = self.first.epilogue_layer(ends, groups, place, mem, lanes, sH, acc, state, buffer)
        groups = self.second.groups_of(routed)
        place = self.second.start(groups, place)
        far = Far(workspace.sources, mem, routed.before, mOut, limit, factors.down, workspace.weights)
        self.second.epilogue_layer(far, groups, place, mem, lanes, sH, acc, state, buffer)
        self.first.exchanged().arrive_and_wait()  # TMEM has been read
        allocator.free(address)
        self.combine(mOut, mem)

    def factors(self, scaling: Any) -> Factors:
        """View the factors as the epilogues read them."""
        if scaling is None:
            return Factors(None, None, None, None)
        by_expert = cute.make_layout(self.layout.local, stride=scaling.l1.stride[0])
        gate, up = (cute.make_tensor(scaling.l1.iterator + i, by_expert) for i in (0, 1))
        return Factors(gate, up, scaling.l2, scaling.h)

    @cute.jit
    def finish(self, mem: Memory):
        """Set counters back and the epoch forward, by one warp of the last CTA."""
        layout, lane = self.layout, cute.arch.lane_idx()
        ctas, _, _ = cute.arch.grid_dim()
        before = Int32(0)
        if lane == 0:
            before = symmetric.add_and_get(mem.state + Int64(4 * layout.FINISHED), Int32(1), "acq_rel.gpu")
        cute.arch.sync_warp()
        if cute.arch.shuffle_sync(before, 0) == ctas - 1:
            self.reset(mem)
            if lane == 0:
                symmetric.store_word(mem.state + Int64(4 * layout.FINISHED), Int32(0))
                symmetric.store_word(mem.state + Int64(4 * layout.EPOCH), self.next_epoch(mem))

    @cute.jit
    def reset(self, mem: Memory):
        """Set the counters of rows, tiles and results back: all of this call have come, and none of the next can."""
        layout, lane = self.layout, cute.arch.lane_idx()
        for i in cutlass.range(lane, 2 * layout.local, 32, unroll=1):
            symmetric.store_word(mem.state + Int64(4 * layout.ARRIVED) + Int64(i) * 4, Int32(0))
        if lane == 0:
            symmetric.store_word(mem.own + layout.offsets()["combined"], Int32(0))

    def next_epoch(self, mem: Memory) -> Int32:
        """Return what the epoch is set to at the end of a call: the one after it counts up from there."""
        return mem.epoch
