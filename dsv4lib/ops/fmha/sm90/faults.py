"""Faults of Hopper's attention, injected one at a time. Each is marked ``WRONG``.

Every class is the kernel with one thing replaced. They compile without a word. `CAUGHT_BY` says what finds each: a kind
of the emulator's reports, or "wrong numbers" (the comparison with fp64).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from dsv4lib.ops.fmha.sm90.attend import Place
from dsv4lib.ops.fmha.sm90.kernel import DecodeFmha
from dsv4lib.ops.fmha.sm90.keys import KeyPlace, Ring, loaded


class NoProxyFence(DecodeFmha):
    """The tensor core reads what threads stored without a proxy fence: most often right."""

    def visible_to_mma(self) -> None:
        """See `Attend.visible_to_mma`."""  # WRONG: no fence


class EveryKeyCounts(DecodeFmha):
    """Keys that are not there have a score of 0: a row of zeros is taken for a key."""

    @cute.jit
    def store_valid(self, ring: Ring, stage: Int32, warp: Int32, there: Int32):
        """See `Keys.store_valid`."""
        super().store_valid(ring, stage, warp, Int32(-1))  # WRONG


class HastyEnd(DecodeFmha):
    """Warpgroups do not wait for each other: O overwrites keys and queries that the other one still reads."""

    def sync_math(self) -> None:
        """See `Attend.sync_math`."""  # WRONG: no barrier


class OwnSum(DecodeFmha):
    """A lane's share of a row's sum is taken for the sum."""

    def over_quad(self, value: Float32, combine: object) -> Float32:
        """See `Attend.over_quad`."""
        return value  # WRONG


class FirstAngles(DecodeFmha):
    """All lanes of a row rotate by the first one's angle."""

    @cute.jit
    def rotated(self, rope: object, place: Place, first: cutlass.Constexpr, total: Float32, two: list):
        """See `Attend.rotated`."""
        a, b = two
        if place.group == 1 and total != 0.0:
            cos, sin = (table[place.token, first] for table in rope)  # WRONG: + place.pair
            a, b = a * cos + b * sin, b * cos - a * sin
        return a, b


class BlindGuess(DecodeFmha):
    """The index that was loaded before the lists' lengths were known is taken for the first one whatever they are."""

    @cute.jit
    def known(self, place: KeyPlace, guess: object):
        """See `Keys.known`."""
        if cutlass.const_expr(guess is not None):
            return guess.index  # WRONG
        return loaded(*place)


KINDS = (NoProxyFence, EveryKeyCounts, HastyEnd, OwnSum, FirstAngles, BlindGuess)
FAULTS = {kind.__name__: kind for kind in KINDS}
CAUGHT_BY = {
    "NoProxyFence": "missing_proxy_fence",
    "EveryKeyCounts": "wrong numbers",
    "HastyEnd": "race_shared",
    "OwnSum": "wrong numbers",
    "FirstAngles": "wrong numbers",
    "BlindGuess": "wrong numbers",
}
