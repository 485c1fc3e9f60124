"""Inject one fault into the fused MoE, marked ``WRONG``.

Every class is the `MegaMoe` kernel with one thing replaced. They compile without a word. `CAUGHT_BY` says what finds
each: a kind of the emulator's reports, an error's type, "stray bytes" (a result where no route goes) or "wrong numbers"
(the comparison with fp64). Faults of the second call need two calls on the same memory (`TWO_CALLS`); `OneHalf` needs a
rank that is a call ahead of another, which then waits for ever.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from dsv4lib.dsl import bulk
from dsv4lib.ops.mega_moe import symmetric
from dsv4lib.ops.mega_moe.dispatch import LANES, Rows, Staging
from dsv4lib.ops.mega_moe.kernel import Factors, MegaMoe
from dsv4lib.ops.mega_moe.layers import Far, First, Memory, Second
from dsv4lib.ops.mega_moe.layout import ROW_BLOCK, Layout
from dsv4lib.ops.moe_gemm.schedule import Groups, Place


class RelaxedCount(MegaMoe):
    """The count of routes is not released: a peer may read the routes before they are there."""

    def count_semantics(self) -> str:
        """See `Dispatch.count_semantics`."""
        return "relaxed.sys"  # WRONG


class CountOfOneDevice(MegaMoe):
    """The count is released at .gpu scope, while those who wait are on other devices."""

    def count_semantics(self) -> str:
        """See `Dispatch.count_semantics`."""
        return "release.gpu"  # WRONG


class OneEpoch(MegaMoe):
    """The epoch stays: the second call takes the first one's counts for its own."""

    def next_epoch(self, mem: Memory) -> Int32:
        """See `MegaMoe.next_epoch`."""
        return mem.epoch - 1  # WRONG


class OneHalf(MegaMoe):
    """Counts and routes have one half: a fast rank overwrites what a slow one has not read."""

    def half(self, mem: Memory) -> Int32:
        """See `Dispatch.half`."""
        return Int32(0)  # WRONG


class NoReset(MegaMoe):
    """Counters keep the first call's numbers."""

    @cute.jit
    def reset(self, mem: Memory):
        """See `MegaMoe.reset`."""
        # WRONG: nothing


class MaskedGoesFirst(MegaMoe):
    """Routes of -1 go to expert 0."""

    def goes_to(self, index: Int64, expert: Int32) -> cutlass.Boolean:
        """See `Dispatch.goes_to`."""
        return cutlass.max(index, Int64(0)) == Int64(expert)  # WRONG


class FirstWeight(MegaMoe):
    """All slots of a token have the weight of its first."""

    def weight_of(self, peer: Int64, route: Int32) -> Float32:
        """See `Dispatch.weight_of`."""
        return MegaMoe.weight_of(self, peer, route // self.layout.topk * self.layout.topk)  # WRONG


class ReadAlone(MegaMoe):
    """Rows count as there when their copy has read shared memory, before it has written global memory."""

    @cute.jit
    def place_codes(self, rows: Rows, staging: Staging, row: Int32):
        """See `Dispatch.place_codes`."""
        target = rows.codes.iterator.toint() + Int64(row) * self.code_bytes
        bulk.store_bulk(target, self.slot(staging, cute.arch.lane_idx()), Int32(self.code_bytes))
        symmetric.commit_bulk()
        symmetric.wait_bulk(read_alone=True)  # WRONG


class ScalesInRows(MegaMoe):
    """Scales go where an unswizzled matrix has them."""

    @cute.jit
    def place_scales(self, rows: Rows, staging: Staging, slot: cutlass.Constexpr, row: Int32):
        """See `Dispatch.place_scales`."""
        words = self.words
        address = self.slot(staging, slot) + self.code_bytes
        pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=4)
        source = cute.make_tensor(pointer, cute.make_layout(words))
        for word in cutlass.range(cute.arch.lane_idx(), words, LANES, unroll=1):
            rows.scales[row // ROW_BLOCK * words + word, row % ROW_BLOCK] = source[word]  # WRONG: row by row


class SumsEarly(MegaMoe):
    """The sum over slots does not wait for the results."""

    @cute.jit
    def wait_results(self, mem: Memory):
        """See `Combine.wait_results`."""
        # WRONG: nothing


class _NoRows(First):
    @cute.jit
    def wait_rows(self, groups: Groups, place: Place, mem: Memory):
        """See `First.wait_rows`."""
        # WRONG: nothing


class RowsEarly(MegaMoe):
    """L1 does not wait for its rows."""

    first_type = _NoRows


class _NoTiles(Second):
    @cute.jit
    def wait_rows(self, groups: Groups, place: Place, mem: Memory):
        """See `Second.wait_rows`."""
        # WRONG: nothing


class TilesEarly(MegaMoe):
    """L2 does not wait for L1."""

    second_type = _NoTiles


class _Unreleased(Second):
    def result_semantics(self) -> str:
        """See `Second.result_semantics`."""
        return "relaxed.sys"  # WRONG


class RelaxedResults(MegaMoe):
    """The count of results is not released: a rank may add slots that are not there."""

    second_type = _Unreleased


class _AtHome(Second):
    def home(self, ends: Far, rank: Int32) -> Int64:
        """See `Second.home`."""
        return ends.memory.own  # WRONG: not the token's rank


class SlotOfOwner(MegaMoe):
    """Results go to the slots of the expert's rank: right with one rank."""

    second_type = _AtHome


class SwappedFactors(MegaMoe):
    """Gate has the factor of up, and up that of gate."""

    def factors(self, scaling: Any) -> Factors:
        """See `MegaMoe.factors`."""
        right = MegaMoe.factors(self, scaling)
        return right._replace(gate=right.up, up=right.gate)  # WRONG


class FactorsOfFirst(MegaMoe):
    """All experts of a rank have the factor of down of its first."""

    def factors(self, scaling: Any) -> Factors:
        """See `MegaMoe.factors`."""
        right = MegaMoe.factors(self, scaling)
        same = cute.make_layout(self.layout.local, stride=0)
        return right._replace(down=cute.make_tensor(right.down.iterator, same))  # WRONG


class ReversedScales(MegaMoe):
    """The scales of h of the experts are in the reverse order."""

    def factors(self, scaling: Any) -> Factors:
        """See `MegaMoe.factors`."""
        right = MegaMoe.factors(self, scaling)
        last = self.layout.local - 1
        order = cute.make_layout(self.layout.local, stride=-1)
        return right._replace(h=cute.make_tensor(right.h.iterator + last, order))  # WRONG


class _Unweighted(First):
    def __init__(self, layout: Layout, extra: int, tile_n: int, weighted: bool = True):
        First.__init__(self, layout, extra, tile_n, False)  # WRONG: nor does L2


class NoWeight(MegaMoe):
    """No layer multiplies by the routing weights."""

    first_type = _Unweighted


_ALL: tuple[tuple[type[MegaMoe], str], ...] = (
    (RelaxedCount, "race_global"),
    (CountOfOneDevice, "scope_between_devices"),
    (OneEpoch, "wrong numbers"),
    (OneHalf, "LimitExceeded"),
    (NoReset, "MemoryFault"),
    (MaskedGoesFirst, "stray bytes"),
    (FirstWeight, "wrong numbers"),
    (ReadAlone, "race_global"),
    (ScalesInRows, "wrong numbers"),
    (SumsEarly, "race_global"),
    (RowsEarly, "race_global"),
    (TilesEarly, "race_global"),
    (RelaxedResults, "race_global"),
    (SlotOfOwner, "stray bytes"),
    (NoWeight, "wrong numbers"),
    (SwappedFactors, "wrong numbers"),
    (FactorsOfFirst, "wrong numbers"),
    (ReversedScales, "wrong numbers"),
)
FAULTS: dict[str, Any] = {kind.__name__: kind for kind, _ in _ALL}
CAUGHT_BY = {kind.__name__: found for kind, found in _ALL}
TWO_CALLS = {"OneEpoch", "NoReset"}
SCHEDULE = {"NoReset": "newest_first", "OneHalf": "newest_first"}  # that shows it soonest
NVFP4 = {"SwappedFactors", "FactorsOfFirst", "ReversedScales"}  # what only that mode has
NEEDS = {"CountOfOneDevice": "scope_between_devices"}  # a check that the emulator must have
