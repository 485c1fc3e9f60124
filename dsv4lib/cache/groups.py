"""Describe the groups of a request's cache: tokens, entries, bytes and what resuming needs of them."""

from __future__ import annotations

import math
from typing import NamedTuple

from dsv4lib.errors import ArgumentError

KINDS = ("entries", "window", "ring")


class Group(NamedTuple):
    """One group of cached values, for all layers that have it.

    Attributes:
        name: its name in plans, tables and accounts.
        kind: "entries" (one value for `rate` tokens, kept for the whole request), "window" (one value a token in
            pages by absolute position, the last `reach` are read) or "ring" (one block a request, position p is at
            row p mod `rows`).
        layers: how many layers have such values.
        block_tokens: tokens that a block covers; for a ring how far apart its saved copies may lie.
        entry_bytes: bytes of one value of one layer.
        rate: tokens an entry; for a ring the tokens of the compressor's window (m).
        reach: values that a step reads, with its own (window).
        rows: rows of a ring; more than the compressor reads leaves room for drafts.
        overlap: a ring's compressor reads the window before too (CSA).
        lookahead: tokens after its own that a value depends on (MTP of depth k: k).
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
    lookahead: int = 0
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
        """Count the bytes of a block that hold values."""
        return self.layers * self.entries * self.entry_bytes

    def pages(self, page_bytes: int) -> int:
        """Count the pages of a block: a page holds whole layers, or a layer takes whole pages."""
        if self.layer_bytes > page_bytes:
            return self.layers * -(-self.layer_bytes // page_bytes)
        return -(-self.layers // (page_bytes // self.layer_bytes))

    def needed(self, length: int) -> int:
        """Count the tokens before `length` whose values are read when a request goes on there."""
        if self.kind == "entries":
            return length
        if self.kind == "window":
            return min(length, self.reach - 1)
        return length % self.rate + (self.rate if self.overlap and length >= self.rate else 0)


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
        if g.block_tokens % g.rate:
            raise ArgumentError(f"{g.name}.block_tokens", g.block_tokens, f"a multiple of the rate, {g.rate}")
        if g.kind == "window" and g.reach < 1:
            raise ArgumentError(f"{g.name}.reach", g.reach, "positive")
        least = g.rate * (2 if g.overlap else 1)
        if g.kind == "ring" and g.rows < least:
            raise ArgumentError(f"{g.name}.rows", g.rows, f"at least {least}")


def granularity(groups: tuple[Group, ...]) -> int:
    """Return the tokens to whose multiples a hit is cut: the least common multiple of the groups' blocks."""
    return math.lcm(*(g.block_tokens for g in groups))


KV_BYTES = {"fp8": 584, "bf16": 1024, "nvfp4": 384, "mxfp4": 368}
KEY_BYTES = {"fp8": 132, "fp4": 68, "bf16": 256}


def deepseek_v4(
    swa: int,
    csa: int,
    hca: int,
    *,
    mtp: int = 0,
    drafts: int = 0,
    kv: str = "fp8",
    keys: str = "fp8",
    block: int = 256,
    save_every: int = 256,
) -> tuple[Group, ...]:
    """List the groups of a DeepSeek-V4.

    Args:
        swa, csa, hca: layers of each kind.
        mtp: draft layers.
        drafts: most drafts of a step; the rings have so many more rows.
        kv: format of window values and entries.
        keys: format of indexer keys.
        block: tokens of a block of entries, a multiple of 128.
        save_every: tokens between saved states, a multiple of 128: what a hit is cut to, with `block`.
    """
    for name, value in (("block", block), ("save_every", save_every)):
        if value < 1 or value % 128:
            raise ArgumentError(name, value, "a positive multiple of 128")
    for name, value, table in (("kv", kv, KV_BYTES), ("keys", keys, KEY_BYTES)):
        if value not in table:
            raise ArgumentError(name, value, f"one of {sorted(table)}")
    entry, key, align = KV_BYTES[kv], KEY_BYTES[keys], 576 if kv == "fp8" else 1
    groups = [Group("window", "window", swa + csa + hca, 64, entry, reach=128, align=align)]
    if csa:
        ring = {"rate": 4, "rows": 8 + drafts, "overlap": True}
        groups += [
            Group("csa", "entries", csa, block, entry, rate=4, align=align),
            Group("keys", "entries", csa, block, key, rate=4),
            Group("csa_state", "ring", csa, save_every, 2 * 1024 * 4, **ring),
            Group("keys_state", "ring", csa, save_every, 2 * 256 * 4, **ring),
        ]
    if hca:
        groups += [
            Group("hca", "entries", hca, block, entry, rate=128, align=align),
            Group("hca_state", "ring", hca, save_every, 2 * 512 * 4, rate=128, rows=128 + drafts),
        ]
    if mtp:
        groups.append(Group("mtp_window", "window", mtp, 64, entry, reach=128, lookahead=1, align=align))
    return tuple(groups)
