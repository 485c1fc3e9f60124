"""Faults of Hopper's attention of many tokens, injected one at a time. Each is marked ``WRONG``.

Every class is the kernel with one thing replaced. They compile without a word. `CAUGHT_BY` says what finds each: a kind
of the emulator's reports, or "wrong numbers" (the comparison with fp64).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from dsv4lib.ops.fmha.sm90.attend import ROWS
from dsv4lib.ops.fmha.sm90.prefill.attend import Exchange, Softmax
from dsv4lib.ops.fmha.sm90.prefill.kernel import PrefillFmha
from dsv4lib.ops.fmha.sm90.prefill.keys import Queries
from dsv4lib.ops.fmha.work import KeySplits


class NoProxyFence(PrefillFmha):
    """The tensor core reads what threads stored without a proxy fence: most often right."""

    def visible_to_mma(self) -> None:
        """See `Attend.visible_to_mma`."""  # WRONG: no fence


class HastyP(PrefillFmha):
    """Warpgroups do not wait for each other's P."""

    def arrive(self, barrier: int) -> None:
        """See `PrefillAttend.arrive`."""
        self.visible_to_mma()  # WRONG: no arrival

    def wait(self, barrier: int) -> None:
        """See `PrefillAttend.wait`."""  # WRONG: no barrier


class HastyQueries(PrefillFmha):
    """Q of the next token is copied over that of this one, which may still be read."""

    def wait_for_room(self, queries: Queries, parity: Int32) -> None:
        """See `PrefillKeys.wait_for_room`."""  # WRONG: no wait


class OwnMaximum(PrefillFmha):
    """Each warpgroup goes on from its own row_max and row_sum, while O has tiles of both."""

    @cute.jit
    def receive(self, exchange: Exchange, tile: cutlass.Constexpr, softmax: Softmax):
        """See `PrefillAttend.receive`."""
        acc_scale = cute.make_rmem_tensor(ROWS, Float32)
        acc_scale.fill(1.0)
        return cutlass.Boolean(False), acc_scale  # WRONG


class LastTileLost(PrefillFmha):
    """An odd number of tiles is rounded down, to 2 or more."""

    def even(self, tiles: Int32) -> Int32:
        """See `PrefillKeys.even`."""
        return cutlass.max(tiles & -2, 2)  # WRONG


class OddSplits(PrefillFmha):
    """Splits have an odd number of tiles, which is made even with the first of the next split's."""

    def tiles_of_split(self, tiles: Int32, splits: KeySplits) -> Int32:
        """See `PrefillKeys.tiles_of_split`."""
        return cute.ceil_div(tiles, splits.splits)  # WRONG


KINDS = (NoProxyFence, HastyP, HastyQueries, OwnMaximum, LastTileLost, OddSplits)
FAULTS = {kind.__name__: kind for kind in KINDS}
CAUGHT_BY = {
    "NoProxyFence": "missing_proxy_fence",
    "HastyP": "race_shared",
    "HastyQueries": "race_shared",
    "OwnMaximum": "wrong numbers",
    "LastTileLost": "wrong numbers",
    "OddSplits": "wrong numbers",
}
