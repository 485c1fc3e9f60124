"""Describe the groups of a request's cache. Tokens, values, bytes and what resuming needs of them.

A group holds one kind of value for all layers that have it. Its blocks are the unit of allocation: a block covers
`block_tokens` tokens in every layer of the group, and lies in one or more pages of the pool, whole layers in each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from dsv4lib import config as sizes_of
from dsv4lib.config import LayerKind, ModelConfig
from dsv4lib.errors import ArgumentError

KINDS = ("entries", "window", "ring")


class Group(NamedTuple):
    """One group of cached values, for all layers that have it.

    Attributes:
        name: its name in tables and accounts.
        kind: "entries" (a value for `rate` tokens, kept for the whole request), "window" (a value a token, in blocks by
            absolute position, of which the last `reach` are read) or "ring" (one block a request, position p at row
            p mod `rows`).
        layers: how many layers have such values.
        block_tokens: tokens that a block covers; for a ring the distance at which copies of it may be saved.
        entry_bytes: bytes of one value of one layer.
        rate: tokens an entry; for a compressor's ring the tokens of its window (m).
        reach: values that a token reads of a window, its own among them; 0 for a compressor's ring.
        rows: rows of a ring.
        overlap: a compressor's ring is also read for the window before (CSA).
        running: the ring is one row that is overwritten in place (a running softmax); it cannot go back.
        lookahead: tokens after its own that a value depends on (MTP: 1).
        reserve: tokens past the end of a step for which a window has blocks (drafts of the MTP layer).
        align: bytes to whose multiple a layer's part of a block is rounded up.
    """

    name: str
    kind: str
    layers: int
    block_tokens: int
    entry_bytes: int
    rate: int = 1
    reach: int = 0
    rows: int = 0
    overlap: bool = False
    running: bool = False
    lookahead: int = 0
    reserve: int = 0
    align: int = 1

    @property
    def entries(self) -> int:
        """Count the values of a block and layer."""
        return self.rows if self.kind == "ring" else self.block_tokens // self.rate

    @property
    def layer_bytes(self) -> int:
        """Count the bytes of a block in one layer, aligned."""
        return -(-self.entries * self.entry_bytes // self.align) * self.align

    @property
    def payload_bytes(self) -> int:
        """Count the bytes of a block that can hold values."""
        return self.layers * self.entries * self.entry_bytes

    @property
    def most_needed(self) -> int:
        """Count the tokens before any position whose ring rows a step there reads."""
        return self.reach - 1 if self.reach else self.rate - 1 + self.rate * self.overlap

    @property
    def most_drafts(self) -> int:
        """Count the drafts that may be rejected at once.

        With more, a ring would lose a row that is still read.
        """
        kept = self.rows if self.reach else self.rate * (1 + self.overlap)  # of a step's rows
        return 0 if self.running else min(self.rows - self.most_needed, max(kept - 1, 1))

    def layers_per_page(self, page_bytes: int) -> int:
        """Count the layers that a page holds."""
        return page_bytes // self.layer_bytes

    def pages(self, page_bytes: int) -> int:
        """Count the pages of a block; a page holds whole layers."""
        return -(-self.layers // self.layers_per_page(page_bytes))

    def needed(self, length: int) -> int:
        """Count the tokens before `length` that a request reads when it goes on there."""
        if self.kind == "entries":
            return length
        if self.reach:
            return min(length, self.reach - 1)
        return length % self.rate + (self.rate if self.overlap and length >= self.rate else 0)

    def row(self, position: int) -> int:
        """Locate a position in its block. It is a row of the ring, or an entry of the block that the position is in."""
        if self.kind == "ring":
            return position % self.rows
        return position % self.block_tokens // self.rate


def check_groups(groups: tuple[Group, ...]) -> None:
    """Check that groups fit together.

    Raises:
        ArgumentError: the first field that is wrong.
    """
    if not groups or len({g.name for g in groups}) != len(groups):
        raise ArgumentError("groups", [g.name for g in groups], "one or more groups of different names")
    for g in groups:
        if g.kind not in KINDS:
            raise ArgumentError(f"{g.name}.kind", g.kind, f"one of {KINDS}")
        for field in ("layers", "block_tokens", "entry_bytes", "rate", "align"):
            if getattr(g, field) < 1:
                raise ArgumentError(f"{g.name}.{field}", getattr(g, field), "positive")
        for field in ("reach", "rows", "lookahead", "reserve"):
            if getattr(g, field) < 0:
                raise ArgumentError(f"{g.name}.{field}", getattr(g, field), "0 or more")
        if g.block_tokens % g.rate:
            raise ArgumentError(f"{g.name}.block_tokens", g.block_tokens, f"a multiple of the rate, {g.rate}")
        if g.kind == "window" and g.reach < 1:
            raise ArgumentError(f"{g.name}.reach", g.reach, "positive")
        least = 1 if g.running else g.reach or g.rate * (1 + g.overlap)
        if g.kind == "ring" and (g.rows < least or (g.running and g.rows != 1)):
            raise ArgumentError(f"{g.name}.rows", g.rows, "1" if g.running else f"at least {least}")


def granularity(groups: tuple[Group, ...]) -> int:
    """Return the tokens to whose multiples a hit is cut. It is the least common multiple of the groups' blocks."""
    return math.lcm(*(g.block_tokens for g in groups))


def best_page_bytes(groups: tuple[Group, ...], most: int = 8) -> int:
    """Choose a page that wastes the least of a block a group.

    It is a multiple, 1 to `most` times, of the largest layer.

    Entries weigh by the tokens of their blocks, so that what grows with a request counts most; rings of live requests
    are left out unless there is nothing else.
    """
    largest = max(g.layer_bytes for g in groups)
    grown = [g for g in groups if g.kind == "entries"] or groups

    def share(page: int) -> float:
        used = sum(g.payload_bytes / g.block_tokens for g in grown)
        return used / sum(g.pages(page) * page / g.block_tokens for g in grown)

    return max((largest * n for n in range(1, most + 1)), key=lambda page: (share(page), -page))


class Shape(NamedTuple):
    """What of a DeepSeek-V4 decides how its caches are grouped.

    Attributes:
        kinds: of the layers, in order.
        window: tokens that the sliding window reads.
        csa_rate, hca_rate: tokens an entry.
        mtp: draft layers.
    """

    kinds: Sequence[LayerKind]
    window: int = 128
    csa_rate: int = 4
    hca_rate: int = 128
    mtp: int = 0

    def count(self, kind: LayerKind) -> int:
        """Count the layers of a kind."""
        return sum(one is kind for one in self.kinds)

    def index(self, layer: int) -> dict[str, int]:
        """Map a layer of the model to its number in each group.

        Layer len(kinds) is the first draft layer.
        """
        if layer >= len(self.kinds):
            return {"mtp_window": layer - len(self.kinds)}
        kind = self.kinds[layer]
        own = sum(one is kind for one in self.kinds[:layer])
        names = {LayerKind.SWA: (), LayerKind.CSA: ("csa", "keys", "csa_state", "keys_state")}
        return {"window": layer} | {name: own for name in names.get(kind, ("hca", "hca_state"))}


class ValueBytes(NamedTuple):
    """Bytes of one value of one layer. KV row or entry, indexer key, and rows (k and z) of the three states."""

    kv: int
    key: int
    csa_row: int
    keys_row: int
    hca_row: int
    align: int = 1


def arrange(
    shape: Shape,
    size: ValueBytes,
    *,
    block: int,
    window_block: int | None = None,
    drafts: int = 0,
    running: bool = False,
) -> tuple[Group, ...]:
    """List the groups of a model.

    Args:
        shape: layers and rates.
        size: bytes of values.
        block: tokens of a block of entries.
        window_block: tokens of a block of window values; None: a ring a request.
        drafts: most drafts of a step.
        running: HCA's state is a running softmax (`ops.compressor.Running`), not rows.

    Raises:
        ArgumentError: a block that is no multiple of both rates, a window block that does not divide it, drafts with a
            running state.
    """
    unit = math.lcm(shape.csa_rate, shape.hca_rate)
    if block < 1 or block % unit:
        raise ArgumentError("block", block, f"a positive multiple of {unit}")
    if window_block is not None and (window_block < 1 or block % window_block):
        raise ArgumentError("window_block", window_block, f"a divisor of the block, {block}, or None")
    if drafts < 0 or (drafts and running):
        allowed = "0 with a running state, which cannot go back" if running else "0 or more"
        raise ArgumentError("drafts", drafts, allowed)

    def windows(name: str, layers: int, lookahead: int = 0) -> Group:
        if window_block is None:
            rows = shape.window + max(0, drafts + (drafts if lookahead else 0) - 1)
            given = {"rows": rows, "reach": shape.window, "lookahead": lookahead}
            given["reserve"] = drafts if lookahead else 0
            return Group(name, "ring", layers, block, size.kv, align=size.align, **given)
        given = {"reach": shape.window, "lookahead": lookahead, "reserve": drafts if lookahead else 0}
        return Group(name, "window", layers, window_block, size.kv, align=size.align, **given)

    groups = [windows("window", len(shape.kinds))]

    def ring_rows(rows: int) -> int:  # `ops.compressor` takes powers of two
        return 1 << (rows + max(0, drafts - 1) - 1).bit_length()

    if csa := shape.count(LayerKind.CSA):
        ring = {"rate": shape.csa_rate, "rows": ring_rows(2 * shape.csa_rate), "overlap": True}
        groups += [
            Group("csa", "entries", csa, block, size.kv, rate=shape.csa_rate, align=size.align),
            Group("keys", "entries", csa, block, size.key, rate=shape.csa_rate),
            Group("csa_state", "ring", csa, block, size.csa_row, **ring),
            Group("keys_state", "ring", csa, block, size.keys_row, **ring),
        ]
    if hca := shape.count(LayerKind.HCA):
        rows = 1 if running else ring_rows(shape.hca_rate)
        groups += [
            Group("hca", "entries", hca, block, size.kv, rate=shape.hca_rate, align=size.align),
            Group("hca_state", "ring", hca, block, size.hca_row, rate=shape.hca_rate, rows=rows, running=running),
        ]
    if shape.mtp:
        groups.append(windows("mtp_window", shape.mtp, lookahead=1))
    return tuple(groups)


def deepseek_v4(
    config: ModelConfig,
    *,
    mtp: int = 0,
    kv: str = "fp8",
    keys: str = "fp8",
    block: int = 256,
    window_block: int | None = 64,
    drafts: int = 0,
    running: bool = False,
) -> tuple[Group, ...]:
    """List the groups of a DeepSeek-V4 in its formats.

    Args:
        config: of the model.
        mtp: draft layers, 0 or 1.
        kv, keys: formats of KV rows and indexer keys, as in `dsv4lib.config`.
        block, window_block, drafts, running: as in `arrange`.
    """
    row, c = 4 * 2, config  # k and z, fp32
    size = ValueBytes(
        kv=sizes_of.kv_row_bytes(c, kv),
        key=sizes_of.index_key_bytes(c, keys),
        csa_row=row * 2 * c.head_dim,
        keys_row=row * 2 * c.index_dim,
        hca_row=4 * 3 * c.head_dim if running else row * c.head_dim,
        align=c.nope_dim + 2 * c.rope_dim if kv == "fp8" else 1,
    )
    shape = Shape(c.layer_kinds, c.window, c.csa_rate, c.hca_rate, mtp)
    return arrange(shape, size, block=block, window_block=window_block, drafts=drafts, running=running)
