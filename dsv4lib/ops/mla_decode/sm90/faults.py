"""Faults of Hopper's MLA decode, injected one at a time. Each is marked ``WRONG``.

Every class is the kernel with one thing replaced. They compile without a word. `CAUGHT_BY` says what finds each: a kind
of the emulator's reports, or "wrong numbers" (the comparison with fp64).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from dsv4lib.ops.mla_decode.sm90.attend import Place, State
from dsv4lib.ops.mla_decode.sm90.config import HALF_CHUNKS, ROPE_CHUNK, TILE_N, V_DIM
from dsv4lib.ops.mla_decode.sm90.dequant import Row
from dsv4lib.ops.mla_decode.sm90.kernel import MlaDecode
from dsv4lib.ops.mla_decode.sm90.load import Ring, Work


class NoProxyFence(MlaDecode):
    """The tensor core reads P that threads stored without a proxy fence. It is most often right."""

    def visible_to_mma(self) -> None:
        """See `Attend.visible_to_mma`."""  # WRONG: no fence


class WrongHalf(MlaDecode):
    """A warpgroup hands back the half of a stage that the other one multiplies by."""

    @cute.jit
    def release(self, ring: Ring, place: Place, stage: Int32):
        """See `Attend.release`."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(ring.empty + (stage * 2 + 1 - place.group))  # WRONG: group


class HastyEnd(MlaDecode):
    """Warpgroups do not wait for each other. O overwrites what the other one still reads."""

    def sync_math(self) -> None:
        """See `Attend.sync_math`."""  # WRONG: no barrier


class OwnMaximum(MlaDecode):
    """A warpgroup adds the other's P V at its own scale. That is right as long as no maximum grows."""

    @cute.jit
    def follow(self, ring: Ring, place: Place, sMax: cute.Tensor, state: State, number: Int32):
        """See `Attend.follow`."""
        other = 1 - place.group
        cute.arch.mbarrier_wait(ring.weighed + other, number // 2 % 2)
        for j in range(2):
            state.row_max[j] = sMax[place.row + 8 * j, other]  # WRONG: O and row_sum stay


class TailNotCleared(MlaDecode):
    """V of tokens past the end is multiplied by 0: NaN where their memory holds NaN."""

    @cute.jit
    def clear_tail(self, work: Work, ring: Ring, place: Place, number: Int32):
        """See `Attend.clear_tail`."""  # WRONG: nothing


class TailCounts(MlaDecode):
    """Tokens past the end of a request, in its last page, count."""

    @cute.jit
    def weigh(self, place: Place, state: State, rS: cute.Tensor, left: Int32, scale_log2: Float32):
        """See `Attend.weigh`."""
        return super().weigh(place, state, rS, Int32(64), scale_log2)  # WRONG: left


class NoRope(MlaDecode):
    """Logits without the 64 dimensions of RoPE."""

    def chunks(self, group: Int32) -> list:
        """See `Attend.chunks`."""
        return super().chunks(group)[:-1]  # WRONG


class FirstPageAlone(MlaDecode):
    """Reads the first page of a request for all: right for requests of one page."""

    def page_column(self, token: Int32) -> Int32:
        """See `Load.page_column`."""
        return Int32(0)  # WRONG


class ConvertedUnseen(MlaDecode):
    """The tensor core reads tiles that were converted from FP8 without a proxy fence."""

    def wait_full(self, full: cute.Pointer, slot: int, chunk: Int32, parity: Int32) -> None:
        """See `Attend.wait_full`."""
        if slot % HALF_CHUNKS == 0 and slot != ROPE_CHUNK:
            cute.arch.mbarrier_wait(full + chunk, parity)  # WRONG: no fence


class TailConverted(MlaDecode):
    """Tokens past the end of a request, in its last page, are converted from FP8. 0 x NaN is not 0."""

    @cute.jit
    def token_row(self, mCache: cute.Tensor, work: Work, page: Int32, tile: Int32, batch: cutlass.Constexpr):
        """See `Dequant.token_row`."""
        latent, token = Int64(0), tile * TILE_N + self.row_of(batch)
        if page >= 0:  # WRONG: and token < length
            latent = mCache[page, token % self.page, None].iterator.toint() + self.piece()
        return Row(latent, latent + V_DIM)


FAULTS = {
    kind.__name__: kind
    for kind in (
        NoProxyFence,
        WrongHalf,
        HastyEnd,
        OwnMaximum,
        TailNotCleared,
        TailCounts,
        NoRope,
        FirstPageAlone,
        ConvertedUnseen,
        TailConverted,
    )
}
CAUGHT_BY = {
    "NoProxyFence": "missing_proxy_fence",
    "WrongHalf": "race_shared",
    "HastyEnd": "race_shared",
    "OwnMaximum": "wrong numbers",
    "TailNotCleared": "wrong numbers",
    "TailCounts": "wrong numbers",
    "NoRope": "wrong numbers",
    "FirstPageAlone": "wrong numbers",
    "ConvertedUnseen": "missing_proxy_fence",
    "TailConverted": "wrong numbers",
}
