"""Faults of the Hopper GEMM, injected one at a time; each is marked ``WRONG``.

Every class is the kernel with one thing replaced. They compile without a word. `CAUGHT_BY` says what finds each: a kind
of the emulator's reports, "stray bytes" (the output holds a sentinel where no token is), "stopped" (a launch that does
not end) or "wrong numbers" (the comparison with fp64).
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from dsv4lib.ops.moe_gemm.epilogue import swiglu
from dsv4lib.ops.moe_gemm.sm90.epilogue import Ends, Epilogue, Scales
from dsv4lib.ops.moe_gemm.sm90.groups import Tile
from dsv4lib.ops.moe_gemm.sm90.kernel import TiledMoeGemm
from dsv4lib.ops.moe_gemm.sm90.load import Sources
from dsv4lib.ops.moe_gemm.sm90.wide.e4m3 import WideE4m3MoeGemm
from dsv4lib.ops.moe_gemm.sm90.wide.kernel import WideMoeGemm


class OddRing(TiledMoeGemm):
    """The ring has 6 stages for 4 warpgroups, that take stages of each other: a parity is that of two phases."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.stages = 6  # WRONG: not a multiple of the warpgroups


class NoProxyFence(TiledMoeGemm):
    """The tensor core reads what `cp.async` wrote without a proxy fence: most often right."""

    def copied_by_threads(self) -> None:
        """See `Mma.copied_by_threads`."""  # WRONG: no fence


class FirstScales(TiledMoeGemm):
    """The first block's scales serve all four of 128 K: right where neighbouring blocks are alike."""

    def factors(self, rows: list, tokens: list, blocks: Any) -> list:
        """See `Mma.factors`."""
        return super().factors(rows, tokens, [0] * len(blocks))  # WRONG


class NoTailMask(TiledMoeGemm):
    """Rows after a group's last token are written."""

    def stored(self, tile: Tile) -> Int32:
        """See `Epilogue.stored`."""
        return Int32(self.tile_n)  # WRONG: what the MMA has, not what the group has


class GateUpSwapped(TiledMoeGemm):
    """Gate and up change places: as large, as smooth, and wrong."""

    def activate(self, gate: Float32, up: Float32, limit: Float32) -> Float32:
        """See `Epilogue.activate`."""
        return swiglu(up, gate, limit)  # WRONG


class OneBuffer(TiledMoeGemm):
    """Sums of all tiles share a buffer: a fast warpgroup overwrites what a slow warp still reads."""

    @cute.jit
    def finish(self, tile: Tile, first: Int32, buffer: Int32, sSum: cute.Tensor, ends: Ends, scales: Scales):
        """See `Epilogue.finish`."""
        Epilogue.finish(self, tile, first, Int32(0), sSum, ends, scales)  # WRONG

    @cute.jit
    def store_sums(self, buffer: Int32, sSum: cute.Tensor, rSum: cute.Tensor):
        """See `Epilogue.store_sums`."""
        Epilogue.store_sums(self, Int32(0), sSum, rSum)  # WRONG


class HastySums(TiledMoeGemm):
    """A tile is finished without a wait for its sums: finish warps are early, and `free` is phases ahead."""

    def wait_for_sums(self, stored: cute.Pointer, parity: Int32) -> None:
        """See `TiledMoeGemm.wait_for_sums`."""  # WRONG: no wait


class FullBuffer(TiledMoeGemm):
    """Sums are stored without a look whether those before have been read: most often they have."""

    def wait_for_room(self, free: cute.Pointer, parity: Int32) -> None:
        """See `TiledMoeGemm.wait_for_room`."""  # WRONG: no wait


class WideNoProxyFence(WideMoeGemm):
    """As `NoProxyFence`, with many tokens."""

    def copied_by_threads(self) -> None:
        """See `Mma.copied_by_threads`."""  # WRONG: no fence


class WideFirstScales(WideMoeGemm):
    """The scales of the first 128 of a tile's K serve all of it."""

    def expanded(self, w: Int32, chunk: Int32) -> list:
        """See `WideMoeGemm.expanded`."""
        return super().expanded(w, Int32(0))  # WRONG


class WideFewColumns(WideMoeGemm):
    """MMAs have the columns of a smaller tile: the last tokens of a full one get nothing."""

    def add_columns(self, columns: int, w: Int32, operand: Any, sfx: Int32, chunk: Int32, rSum: cute.Tensor) -> None:
        """See `WideMoeGemm.add_columns`."""
        super().add_columns(min(columns, self.tile_n - 8), w, operand, sfx, chunk, rSum)  # WRONG


class WideHastySums(WideMoeGemm):
    """Warps do not wait for each other where sums pass through shared memory."""

    def sync_group(self, group: Int32) -> None:
        """See `WideMoeGemm.sync_group`."""  # WRONG: no barrier


class E4m3FirstScale(WideE4m3MoeGemm):
    """Tokens' scales of the first columns serve all: right where tokens are alike."""

    def token_scales(self, sfx: Int32, sixteen: int) -> list:
        """See `WideE4m3MoeGemm.token_scales`."""
        return super().token_scales(sfx, 0)  # WRONG


class E4m3StaleScale(WideE4m3MoeGemm):
    """Tokens' scales of the first 128 of K serve all, as if the load a stage ahead were not repeated."""

    @cute.jit
    def token_scale(self, sources: Sources, tile: Tile, warp: Int32, chunk: Int32) -> Float32:
        """See `Load.token_scale`."""
        return WideE4m3MoeGemm.token_scale(self, sources, tile, warp, Int32(0))  # WRONG


class E4m3HastyPromotion(WideE4m3MoeGemm):
    """Sums are added while their MMAs may be in flight."""

    def promote(self, sums: list, own: int, sfx: Int32, rSum: cute.Tensor, waits: int) -> None:
        """See `WideE4m3MoeGemm.promote`."""
        super().promote(sums, own, sfx, rSum, waits + 1)  # WRONG


class E4m3NoTailMask(WideE4m3MoeGemm):
    """Rows after a group's last token are written."""

    def stored(self, tile: Tile) -> Int32:
        """See `Epilogue.stored`."""
        return Int32(self.tile_n)  # WRONG


class E4m3OneBase(WideE4m3MoeGemm):
    """Blocks are taken for those of the row's largest scale: right where a row's scales are alike."""

    def halves_of(self, stored: Int32, base: Int32) -> Int32:
        """See `WideE4m3MoeGemm.halves_of`."""
        return super().halves_of(base * 0x01010101, base)  # WRONG: stored


class E4m3HastySums(WideE4m3MoeGemm):
    """Warpgroups do not wait for each other where a tile's sums meet."""

    def sync_groups(self) -> None:
        """See `WideE4m3MoeGemm.sync_groups`."""  # WRONG: no barrier


_ALL = (
    (OddRing, "stopped"),
    (NoProxyFence, "missing_proxy_fence_cp_async"),
    (FirstScales, "wrong numbers"),
    (NoTailMask, "stray bytes"),
    (GateUpSwapped, "wrong numbers"),
    (OneBuffer, "race_shared"),
    (HastySums, "stopped"),
    (FullBuffer, "race_shared"),
)
_WIDE = (
    (WideNoProxyFence, "missing_proxy_fence_cp_async"),
    (WideFirstScales, "wrong numbers"),
    (WideFewColumns, "wrong numbers"),
    (WideHastySums, "race_shared"),
)
_E4M3 = (
    (E4m3FirstScale, "wrong numbers"),
    (E4m3StaleScale, "wrong numbers"),
    (E4m3HastyPromotion, "wrong numbers"),
    (E4m3NoTailMask, "stray bytes"),
    (E4m3OneBase, "wrong numbers"),
    (E4m3HastySums, "race_shared"),
)
FAULTS = {kind.__name__: kind for kind, _ in _ALL}
CAUGHT_BY = {kind.__name__: found for kind, found in _ALL}
WIDE_FAULTS = {kind.__name__: kind for kind, _ in _WIDE}
WIDE_CAUGHT_BY = {kind.__name__: found for kind, found in _WIDE}
E4M3_FAULTS = {kind.__name__: kind for kind, _ in _E4M3}
E4M3_CAUGHT_BY = {kind.__name__: found for kind, found in _E4M3}
