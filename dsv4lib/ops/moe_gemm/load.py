"""Load operands and their scales to shared memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline

from dsv4lib.dsl import boxes, umma
from dsv4lib.ops.moe_gemm.config import ROW_BYTES, TILE_M, W_BYTES
from dsv4lib.ops.moe_gemm.schedule import Groups, Schedule, Tile

SCALE_WORDS = umma.SCALE_BLOCK // 4


class Rings(NamedTuple):
    """Hold SMEM addresses of each ring's first stage.

    Those of the scales may not exist.
    """

    w: Int32
    x: Int32
    sfw: Any
    sfx: Any


class Sources(NamedTuple):
    """TMA atoms of weights, tokens and their scales, or None."""

    w: cute.CopyAtom
    x: cute.CopyAtom
    sfw: Any
    sfx: Any


class Depth(NamedTuple):
    """How deep K is: steps, and blocks of scales of a row."""

    steps: Int32
    blocks: Int32


class Load(Schedule):
    """The load warp."""

    def sources(self, mW: cute.Tensor, mWs: Any, mX: cute.Tensor, mXs: Any) -> Sources:
        """Host side: make TMA atoms."""
        w, x = (cute.make_tensor(t.iterator, self.outwards(t)) for t in (mW, mX))
        padded = self.mode.w_bits != self.mode.x_bits
        if padded:
            w = self.nibbles(w)
        lead = (1,) * self.batched
        atoms = [
            boxes.box_atom(w, (ROW_BYTES, TILE_M, 1), padded=padded),
            boxes.box_atom(x, (ROW_BYTES, self.box_rows, *lead)),
        ]
        if not self.mode.block:
            return Sources(*atoms, None, None)
        box = SCALE_WORDS, self.scale_blocks
        for scales, before in ((mWs, (1,)), (mXs, lead)):
            words = cute.make_tensor(
                cute.recast_ptr(scales.iterator, dtype=Int32),
                cute.make_layout(
                    (SCALE_WORDS, scales.shape[-2], *scales.shape[:-2]),
                    stride=(1, SCALE_WORDS, *(stride // 4 for stride in scales.stride[:-2])),
                ),
            )
            atoms.append(boxes.box_atom(words, (*box, *before), swizzle=False))
        return Sources(*atoms)

    def outwards(self, t: cute.Tensor) -> cute.Layout:
        """Return the layout of a row-major tensor, its contiguous mode first."""
        return cute.make_layout(tuple(reversed(t.shape)), stride=(1, *reversed(t.stride[:-1])))

    def nibbles(self, packed: cute.Tensor) -> cute.Tensor:
        """View bytes as E2M1 elements, two a byte."""
        k, *shape = packed.shape
        _, *strides = packed.stride
        layout = cute.make_layout((k * 2, *shape), stride=(1, *(stride * 2 for stride in strides)))
        return cute.make_tensor(cute.recast_ptr(packed.iterator, dtype=cutlass.Float4E2M1FN), layout)

    @cute.jit
    def load(self, sources: Sources, groups: Groups, depth: Depth, rings: Rings, ab: pipeline.PipelineTmaUmma):
        """Run the load warp: tile after tile, step after step. Lane l issues the l-th box of tokens."""
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        self.prefetch(sources, groups, depth.steps, ab.producer_get_barrier(state))
        cute.arch.griddepcontrol_wait()
        place = self.first_place(groups)
        while place.expert < groups.experts:
            state = self.load_tile(sources, self.tile(groups, place), depth, rings, ab, state)
            place = self.next_place(groups, place)
        cute.arch.griddepcontrol_launch_dependents()  # a successor may start, where there is room
        ab.producer_tail(state)  # stay until every stage is empty: MMAs signal in here

    @cute.jit
    def load_tile(
        self,
        sources: Sources,
        tile: Tile,
        depth: Depth,
        rings: Rings,
        ab: pipeline.PipelineTmaUmma,
        state: pipeline.PipelineState,
    ):
        """Load all K steps of a tile; returns the state of the ring after them."""
        token_boxes = cute.ceil_div(tile.n // self.ctas, self.box_rows)
        expected = self.step_bytes(token_boxes)
        for step in cutlass.range(depth.steps, unroll=1):
            ab.producer_acquire(state, expected_tx=expected)
            barrier = ab.producer_get_barrier(state)
            self.load_operands(sources, tile, token_boxes, step, rings, state.index, barrier)
            if cutlass.const_expr(self.mode.block):
                self.load_scales(sources, tile, step, depth.blocks, rings, state.index, barrier)
            state.advance()
        return state

    def step_bytes(self, token_boxes: Int32) -> Int32:
        """Count the bytes that TMA brings for a K step, to both CTAs of a pair."""
        fixed = W_BYTES * self.mode.w_bits // self.mode.x_bits + self.sfw_bytes + self.sfx_bytes
        return (fixed + token_boxes * (self.box_rows * ROW_BYTES)) * self.ctas

    def prefetch(self, sources: Sources, groups: Groups, steps: Int32, barrier: cute.Pointer):
        """Fetch what is known while the kernel before still runs. Without the groups' counts that is nothing."""

    @cute.jit
    def load_operands(
        self,
        sources: Sources,
        tile: Tile,
        token_boxes: Int32,
        step: Int32,
        rings: Rings,
        stage: Int32,
        barrier: cute.Pointer,
    ):
        """Load 128 features and this CTA's tokens of a K step."""
        pair = self.ctas > 1
        lane = cute.arch.lane_idx()
        k = step * ROW_BYTES
        if lane < token_boxes:
            row = tile.row + lane * self.box_rows
            if cutlass.const_expr(pair):
                row = row + cute.arch.block_idx_in_cluster() * (tile.n // self.ctas)
            target = rings.x + stage * self.x_bytes + lane * (self.box_rows * ROW_BYTES)
            boxes.load_box(sources.x, target, barrier, (k, row, *self.lead(tile)), pair)
        with cute.arch.elect_one():
            boxes.load_box(sources.w, rings.w + stage * W_BYTES, barrier, (k, tile.feature, tile.expert), pair)

    @cute.jit
    def load_scales(
        self,
        sources: Sources,
        tile: Tile,
        step: Int32,
        blocks: Int32,
        rings: Rings,
        stage: Int32,
        barrier: cute.Pointer,
    ):
        """Load the scales of a K step. What is past the last block of a row is loaded too, and not used."""
        pair = self.ctas > 1
        first = step * self.scale_blocks
        with cute.arch.elect_one():
            block = tile.feature // 128 * blocks + first
            boxes.load_box(sources.sfw, rings.sfw + stage * self.sfw_bytes, barrier, (0, block, tile.expert), pair)
            for i in cutlass.range_constexpr(self.token_blocks):
                block = (tile.row // 128 + i) * blocks + first
                target = rings.sfx + stage * self.sfx_bytes + i * self.sfw_bytes
                boxes.load_box(sources.sfx, target, barrier, (0, block, *self.lead(tile)), pair)
