"""Send this rank's routes to the owners of their experts; pull the tokens that peers have for this rank's experts.

A warp has an expert at a time: it reads all routes of this rank, 32 at once, and numbers those to its expert by a
ballot, so that their order is that of (token, slot). It stores their numbers to the owner's `routes`, then releases
their count, with the epoch beside it, as one 64-bit word. `routes` has room for max_tokens of a rank to an expert; more
there are only where a token names an expert twice. Those are lost: they are counted, and the rank's output is NaN.

An owner numbers its rows by expert, then rank, then route: so a result does not depend on who came first. Row n of all
is pulled by lane n mod 4 of the dispatch warp of CTA n / 4 mod g: codes and scales come by bulk copies from the peer to
shared memory; codes leave by a bulk copy, scales by words to where tcgen05.cp reads them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from dsv4lib.dsl import bulk
from dsv4lib.ops.mega_moe import symmetric
from dsv4lib.ops.mega_moe.layers import Memory, Routed
from dsv4lib.ops.mega_moe.layout import HALVES, LOST, ROW_BLOCK, WORD, Layout

LANES = 32
SLOTS = 4  # rows that a dispatch warp has in flight


class Rows(NamedTuple):
    """The workspace that dispatch fills.

    Attributes:
        codes: uint8 [R, bytes of H]. scales: int32 [blocks, 128], 4 scales a word. sources: int32 [R].
        weights: fp32 [R].
    """

    codes: cute.Tensor
    scales: cute.Tensor
    sources: cute.Tensor
    weights: cute.Tensor


class Staging(NamedTuple):
    """Shared memory of the dispatch warp: address of the first slot, an mbarrier a slot."""

    rows: Int32
    barriers: cute.Pointer


class Dispatch:
    """Roles that move routes and tokens. ``layout`` is of the class that has them."""

    layout: Layout

    # ------------------------------------------------------------------ send

    @cute.jit
    def publish(self, mem: Memory, warp: Int32, warps: Int32):
        """Send the routes of experts ``warp``, ``warp`` + ``warps``, .. of all."""
        for expert in cutlass.range(warp, self.layout.experts, warps, unroll=1):
            self.publish_expert(mem, expert)

    @cute.jit
    def publish_expert(self, mem: Memory, expert: Int32):
        """Send the routes to one expert, and their count."""
        layout, offsets = self.layout, self.layout.offsets()
        most = layout.max_tokens
        lane = cute.arch.lane_idx()
        owner, own = expert // layout.local, expert % layout.local
        peer, half = mem.peers[owner], self.half(mem)
        line = (half * layout.local + own) * layout.world + mem.rank
        target = peer + offsets["routes"] + Int64(line) * (4 * most)
        count, routes = Int32(0), mem.tokens * layout.topk
        for first in cutlass.range(0, routes, LANES, unroll=1):
            route, here = first + lane, Int32(0)
            if route < routes:
                index = symmetric.load_long(mem.own + offsets["topk_idx"] + Int64(route) * 8)
                here = cutlass.select_(self.goes_to(index, expert), Int32(1), Int32(0))
            found = cute.arch.vote_ballot_sync(here != 0)
            place = count + cute.arch.popc(found & cute.arch.lanemask_lt())
            if here != 0 and place < most:
                symmetric.store_word(target + Int64(place) * 4, route)
            count = count + cute.arch.popc(found)
        lost = cutlass.max(count - most, Int32(0))
        count = count - lost
        cute.arch.sync_warp()
        if lane == 0:
            if lost > 0:
                symmetric.add(mem.state + Int64(4 * layout.lost), lost, "relaxed.gpu")
            sent = mem.state + Int64(4 * layout.sent) + Int64(expert) * 8
            symmetric.store_flag(sent, self.marked(count, lost), mem.epoch, "relaxed.gpu")  # all it says is in it
            word = (half * layout.world + mem.rank) * layout.local + own
            flag = peer + offsets["counts"] + Int64(word) * 8
            symmetric.store_flag(flag, count, mem.epoch, self.count_semantics())

    def marked(self, count: Int32, lost: Int32) -> Int32:
        """Return the count of routes that were sent, with a mark if others found no room."""
        return count + cutlass.select_(lost > 0, Int32(LOST), Int32(0))

    def goes_to(self, index: Int64, expert: Int32) -> cutlass.Boolean:
        """Tell whether a route is to this expert; -1 is to none."""
        return index == Int64(expert)

    def count_semantics(self) -> str:
        """Return semantics and scope of the store of a count."""
        return "release.sys"

    def half(self, mem: Memory) -> Int32:
        """Return the half of counts and routes that an epoch uses."""
        return mem.epoch % HALVES

    # --------------------------------------------------------------- receive

    @cute.jit
    def receive(self, mem: Memory, routed: Routed):
        """Wait for the counts of all ranks; one warp fills ``routed``, a lane an expert. CTA 0 adds them up."""
        layout = self.layout
        lane = cute.arch.lane_idx()
        block, _, _ = cute.arch.block_idx()
        counts = mem.own + layout.offsets()["counts"]
        row = Int32(0)
        for first in cutlass.range_constexpr(0, layout.local, LANES):
            expert, total = first + lane, Int32(0)
            if expert < layout.local:
                for rank in cutlass.range(layout.world, unroll=1):
                    routed.before[expert, rank] = total
                    word = (self.half(mem) * layout.world + rank) * layout.local + expert
                    total = total + symmetric.wait_flag(counts + Int64(word) * 8, mem.epoch, "acquire.sys")
                routed.before[expert, layout.world] = total
            blocks = cute.ceil_div(total, ROW_BLOCK) * ROW_BLOCK
            upto = blocks
            for i in cutlass.range_constexpr(5):  # a prefix sum over 32 lanes
                other = cute.arch.shuffle_sync_up(upto, 1 << i, mask_and_clamp=0)
                if lane >= 1 << i:
                    upto = upto + other
            if expert < layout.local:
                routed.offsets[expert] = row + upto - blocks
                if block == 0:
                    symmetric.add(mem.state + Int64(4 * (layout.received + expert)), total, "relaxed.gpu")
            row = row + cute.arch.shuffle_sync(upto, LANES - 1)

    # ------------------------------------------------------------------ pull

    @cute.jit
    def pull(self, mem: Memory, routed: Routed, rows: Rows, staging: Staging):
        """Run the dispatch warp: `SLOTS` rows at a time, expert after expert."""
        block, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        layout, lane = self.layout, cute.arch.lane_idx()
        total = Int32(0)
        for e in cutlass.range(layout.local, unroll=1):
            total = total + routed.before[e, layout.world]
        symmetric.proxy_fence()  # peers' threads wrote the tokens; bulk copies read them
        expert, before, phase = Int32(0), Int32(0), Int32(0)
        for first in cutlass.range(block * SLOTS, total, ctas * SLOTS, unroll=1):
            there = cutlass.min(total - first, Int32(SLOTS))
            number = first + lane
            row = Int32(0)
            if lane < there:
                left = routed.before[expert, layout.world]
                while number >= before + left:
                    before = before + left
                    expert = expert + 1
                    left = routed.before[expert, layout.world]
                row = routed.offsets[expert] + number - before
                self.fetch(mem, routed, rows, staging, expert, number - before, row)
            for slot in cutlass.range_constexpr(SLOTS):
                if slot < there:
                    cute.arch.mbarrier_wait(staging.barriers + slot, phase)
                    self.place_scales(rows, staging, slot, cute.arch.shuffle_sync(row, slot))
            cute.arch.sync_warp()
            if lane < there:
                self.place_codes(rows, staging, row)
                symmetric.add(mem.state + Int64(4 * (layout.ARRIVED + expert)), Int32(1), "release.gpu")
            cute.arch.sync_warp()
            phase = phase ^ 1

    @cute.jit
    def fetch(
        self, mem: Memory, routed: Routed, rows: Rows, staging: Staging, expert: Int32, inside: Int32, row: Int32
    ):
        """Start the copies of one row to this lane's slot; note where it comes from and its weight."""
        layout, offsets = self.layout, self.layout.offsets()
        rank = Int32(0)
        while inside >= routed.before[expert, rank + 1]:
            rank = rank + 1
        line = (self.half(mem) * layout.local + expert) * layout.world + rank
        place = Int64(line) * layout.max_tokens + Int64(inside - routed.before[expert, rank])
        route = symmetric.load_word(mem.own + offsets["routes"] + place * 4)
        token, peer = Int64(route // layout.topk), mem.peers[rank]
        lane = cute.arch.lane_idx()
        barrier, slot = staging.barriers + lane, self.slot(staging, lane)
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.row_bytes)
        codes = peer + offsets["x"] + token * self.code_bytes
        bulk.load_bulk(pointer(slot), codes, Int32(self.code_bytes), barrier)
        scales = peer + offsets["x_scales"] + token * layout.pitch
        bulk.load_bulk(pointer(slot + self.code_bytes), scales, Int32(layout.pitch), barrier)
        rows.sources[row] = rank * (layout.max_tokens * layout.topk) + route
        rows.weights[row] = self.weight_of(peer, route)

    def weight_of(self, peer: Int64, route: Int32) -> Float32:
        """Load the weight of a route from the rank of its token."""
        return symmetric.load_float(peer + self.layout.offsets()["topk_weights"] + Int64(route) * 4)

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of a row."""
        return self.layout.code_bytes(self.layout.hidden)

    @property
    def row_bytes(self) -> int:
        """Bytes of a slot: codes and scales of a row."""
        return self.code_bytes + self.layout.pitch

    def slot(self, staging: Staging, number: Any) -> Int32:
        """Return the address of a slot."""
        return staging.rows + number * self.slot_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes from a slot to the next."""
        return -(-self.row_bytes // 128) * 128

    @property
    def words(self) -> int:
        """Words of scales of a row."""
        return self.layout.scales(self.layout.hidden) // WORD

    @cute.jit
    def place_scales(self, rows: Rows, staging: Staging, slot: cutlass.Constexpr, row: Int32):
        """Store the scales of a row: word j to block j of its 128 rows. All lanes call it."""
        words = self.words
        address = self.slot(staging, slot) + self.code_bytes
        pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=4)
        source = cute.make_tensor(pointer, cute.make_layout(words))
        for word in cutlass.range(cute.arch.lane_idx(), words, LANES, unroll=1):
            rows.scales[row // ROW_BLOCK * words + word, row % 32 * 4 + row % ROW_BLOCK // 32] = source[word]

    @cute.jit
    def place_codes(self, rows: Rows, staging: Staging, row: Int32):
        """Copy the codes of this lane's row to the workspace, and wait until they are there."""
        target = rows.codes.iterator.toint() + Int64(row) * self.code_bytes
        bulk.store_bulk(target, self.slot(staging, cute.arch.lane_idx()), Int32(self.code_bytes))
        symmetric.commit_bulk()
        symmetric.wait_bulk()  # written, not only read: the count below lets others read it


def pointer(address: Int32) -> cute.Pointer:
    """Return a pointer to bytes of shared memory."""
    return cute.make_ptr(cutlass.Uint8, address, cute.AddressSpace.smem, assumed_align=16)
