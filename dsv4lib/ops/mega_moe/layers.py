"""Run both GEMMs of the experts by the roles of `moe_gemm`: what waits for rows, and where results go.

A role walks through the tiles of L1, then through those of L2, and keeps its pipelines' states. CTA c of g has tiles c,
c + g, .. of both layers in one numbering, so that no CTA idles between them. L1 needs nothing of L2: no wait is for a
tile that comes later in any CTA's order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, memory, pipeline

from dsv4lib.ops.mega_moe import symmetric
from dsv4lib.ops.mega_moe.layout import QUANTISED, TILE, WORD, Layout
from dsv4lib.ops.moe_gemm.config import EPILOGUE_THREADS
from dsv4lib.ops.moe_gemm.epilogue import Ends, swiglu
from dsv4lib.ops.moe_gemm.load import Depth, Rings, Sources
from dsv4lib.ops.moe_gemm.schedule import Groups, Place, Tile
from dsv4lib.ops.moe_gemm.sm100 import MoeGemm


class Memory(NamedTuple):
    """Addresses and numbers that every role has.

    Attributes:
        own: address of this rank's symmetric buffer. peers: [W] int64, those of all ranks.
        state: address of the state. rank: of this device. tokens: T. epoch: of this call, from 1.
    """

    own: Int64
    peers: cute.Tensor
    state: Int64
    rank: Int32
    tokens: Int32
    epoch: Int32


class Routed(NamedTuple):
    """What this rank's experts got, in shared memory.

    Attributes:
        before: int32 [E/W, W + 1], routes to an expert of the ranks before; last, of all ranks.
        offsets: int32 [E/W], first row of each expert.
    """

    before: cute.Tensor
    offsets: cute.Tensor


class Far(NamedTuple):
    """Arguments of L2's epilogue.

    Attributes:
        sources: int32 [R], rank * M k + route of each row. memory: see `Memory`. before: see `Routed`.
        out: bf16, for its type. limit: not used. alpha: fp32 [E/W], factor of the sums, or None.
        routing: fp32 [R], weights of rows.
    """

    sources: cute.Tensor
    memory: Memory
    before: cute.Tensor
    out: cute.Tensor
    limit: Float32
    alpha: Any
    routing: cute.Tensor


class Layer(MoeGemm):
    """A GEMM of the fused kernel.

    Args:
        layout: of the group's memory. extra: bytes of SMEM that other roles take. options: of `Config`.
    """

    def __init__(self, layout: Layout, extra: int, **options: Any):
        self.layout, self.extra = layout, extra
        super().__init__(mode=layout.mode, alpha=layout.mode == "nvfp4", **options)

    def buffers(self, stages: int | None = None) -> list[tuple[str, int]]:
        """Return (name, bytes) of what is in SMEM, with that of the other roles."""
        return [*MoeGemm.buffers(self, stages), ("dispatch", self.extra)]

    # ---- set by the layer ----

    features: int
    depth_k: int

    def depth(self) -> Depth:
        """Return the K steps, and the blocks of scales of a row; `Layout` sees to it that steps are whole."""
        return Depth(Int32(self.depth_k // self.step_k), Int32(self.layout.scales(self.depth_k) // WORD))

    def groups_of(self, routed: Routed) -> Groups:
        """Describe the groups of this rank's experts."""
        ranks, local = self.layout.world, self.layout.local
        counts = cute.make_tensor(routed.before.iterator + ranks, cute.make_layout(local, stride=ranks + 1))
        return Groups(Int32(local), Int32(self.features // TILE), routed.offsets, counts)

    @cute.jit
    def start(self, groups: Groups, place: Place):
        """Return the first tile of this CTA in a layer, where ``place`` is past the end of the one before."""
        return self.find(groups, place.index - place.before, Int32(0), Int32(0))

    # ---- roles: all tiles of this layer from ``place`` on; they return place and states ----

    @cute.jit
    def load_layer(
        self,
        sources: Sources,
        groups: Groups,
        place: Place,
        mem: Memory,
        rings: Rings,
        ab: pipeline.PipelineTmaUmma,
        state: pipeline.PipelineState,
    ):
        """Load all tiles; each when its rows are there."""
        depth = self.depth()
        while place.expert < groups.experts:
            self.wait_rows(groups, place, mem)
            symmetric.proxy_fence()  # rows were written by threads; TMA reads them
            state = self.load_tile(sources, self.tile(groups, place), depth, rings, ab, state)
            place = self.next_place(groups, place)
        return place, state

    @cute.jit
    def mma_layer(
        self,
        groups: Groups,
        place: Place,
        rings: Rings,
        base: Int32,
        ab: pipeline.PipelineTmaUmma,
        acc: pipeline.PipelineUmmaAsync,
        ab_state: pipeline.PipelineState,
        acc_state: pipeline.PipelineState,
    ):
        """Multiply all tiles."""
        depth = self.depth()
        while place.expert < groups.experts:
            tile = self.tile(groups, place)
            ab_state, acc_state = self.mma_tile(tile, depth, rings, base, ab, acc, ab_state, acc_state)
            place = self.next_place(groups, place)
        return place, ab_state, acc_state

    @cute.jit
    def epilogue_layer(
        self,
        ends: Any,
        groups: Groups,
        place: Place,
        mem: Memory,
        lanes: Int32,
        sH: cute.Tensor,
        acc: pipeline.PipelineUmmaAsync,
        state: pipeline.PipelineState,
        buffer: Int32,
    ):
        """Finish all tiles, and signal each."""
        while place.expert < groups.experts:
            acc.consumer_wait(state)  # rows have arrived by then: the next wait only acquires weights and sources
            self.wait_arrived(groups, place, mem)
            tile = self.tile(groups, place)
            state, buffer = self.epilogue_tile(ends, tile, lanes, sH, acc, state, buffer)
            self.exchanged().arrive_and_wait()  # all have stored
            self.signal(ends, groups, tile, mem)
            place = self.next_place(groups, place)
        return place, state, buffer

    @cute.jit
    def wait_arrived(self, groups: Groups, place: Place, mem: Memory):
        """Wait until all rows of the tile's expert have been pulled."""
        counter = mem.state + Int64(4 * (self.layout.ARRIVED + place.expert))
        symmetric.wait_counter(counter, groups.counts[place.expert], "acquire.gpu")


class First(Layer):
    """L1: gate and up, SwiGLU, routing weight, MXFP8 or NVFP4."""

    fast_math = True

    def __init__(self, layout: Layout, extra: int, tile_n: int, weighted: bool = True):
        self.features, self.depth_k = 2 * layout.intermediate, layout.hidden
        super().__init__(layout, extra, tile_n=tile_n, swiglu=True, out=QUANTISED[layout.mode], routed=weighted)

    def activate(self, gate: Float32, up: Float32, limit: Float32):
        """Combine gate and up of a feature."""
        return swiglu(gate, up, limit, self.fast_math)

    @cute.jit
    def wait_rows(self, groups: Groups, place: Place, mem: Memory):
        """Wait for the tokens of the tile's expert."""
        self.wait_arrived(groups, place, mem)

    @cute.jit
    def signal(self, ends: Ends, groups: Groups, tile: Tile, mem: Memory):
        """Count the tile as done, for L2 of this device."""
        tidx, _, _ = cute.arch.thread_idx()
        if tidx == 0:
            symmetric.add(mem.state + Int64(4 * (self.layout.done + tile.expert)), Int32(1), "release.gpu")


class Second(Layer):
    """L2: down, bf16 results into the slots of the ranks that the tokens came from."""

    def __init__(self, layout: Layout, extra: int, tile_n: int, weighted: bool = False):
        self.features, self.depth_k = layout.hidden, layout.intermediate
        super().__init__(layout, extra, tile_n=tile_n, out="bf16")
        self.routed = weighted

    @cute.jit
    def wait_rows(self, groups: Groups, place: Place, mem: Memory):
        """Wait for all tiles of L1 of the tile's expert."""
        tiles = cute.ceil_div(groups.counts[place.expert], self.tile_n) * (2 * self.layout.intermediate // TILE)
        symmetric.wait_counter(mem.state + Int64(4 * (self.layout.done + place.expert)), tiles, "acquire.gpu")

    def features_of(self, ends: Far) -> Int32:
        """Count the features of a row of the output."""
        return Int32(self.layout.hidden)

    @cute.jit
    def row_of(self, ends: Far, tile: Tile, row: Int32):
        """Return where the result of a row goes: its slot and token, at the rank of the token."""
        layout = self.layout
        per_rank = layout.max_tokens * layout.topk
        source = ends.sources[row]
        route = source % per_rank
        slot_row = route % layout.topk * layout.max_tokens + route // layout.topk
        base = self.home(ends, source // per_rank) + layout.offsets()["combine"]
        address = base + Int64(slot_row) * (2 * layout.hidden)
        pointer = cute.make_ptr(BFloat16, address, cute.AddressSpace.gmem, assumed_align=16)
        return cute.make_tensor(pointer, cute.make_layout(layout.hidden))

    def home(self, ends: Far, rank: Int32) -> Int64:
        """Return the address of the buffer where a rank waits for results."""
        return ends.memory.peers[rank]

    @cute.jit
    def signal(self, ends: Far, groups: Groups, tile: Tile, mem: Memory):
        """Tell each rank how many of its rows the tile had. Lane r does rank r."""
        tidx, _, _ = cute.arch.thread_idx()
        if tidx < self.layout.world:
            first = tile.row - groups.offsets[tile.expert]
            start = cutlass.max(ends.before[tile.expert, tidx], first)
            stop = cutlass.min(ends.before[tile.expert, tidx + 1], first + tile.rows)
            if start < stop:
                symmetric.add(
                    mem.peers[tidx] + self.layout.offsets()["combined"], stop - start, self.result_semantics()
                )

    def result_semantics(self) -> str:
        """Return semantics and scope of the count of results."""
        return "release.sys"


@cute.jit
def accumulators(allocator: memory.TmemAllocator):
    """Return the address of this warp's lanes of TMEM."""
    allocator.wait_for_alloc()
    address = allocator.retrieve_ptr(Float32)
    tidx, _, _ = cute.arch.thread_idx()
    return address, address.toint() + (tidx % EPILOGUE_THREADS // 32 * 32 << 16)
