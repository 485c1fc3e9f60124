"""Account for every byte of the pool, and say how many tokens fit."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from dsv4lib.cache.errors import CacheError
from dsv4lib.cache.groups import Group, granularity
from dsv4lib.cache.manager import Manager

POINTS = 2  # that a request keeps: the last of its prompt, and the last that it has reached


class GroupBytes(NamedTuple):
    """Bytes of one group's blocks.

    Attributes:
        live, cached: blocks that requests hold, and blocks kept without one.
        payload: bytes that can hold values.
        padding: bytes of alignment, and of pages that whole layers do not fill.
    """

    live: int
    cached: int
    payload: int
    padding: int


class Account(NamedTuple):
    """Where the bytes of a pool are.

    Attributes:
        groups: bytes by group.
        unused: bytes of unused pages.
        total: bytes of the pool.
        faults: what does not add up, in words.
    """

    groups: dict[str, GroupBytes]
    unused: int
    total: int
    faults: list[str]

    @property
    def used(self) -> int:
        """Count the bytes of all groups."""
        return sum(g.payload + g.padding for g in self.groups.values())

    def check(self) -> None:
        """Check that groups and unused pages make up the pool, to the byte.

        References must be those of requests.

        Raises:
            CacheError: something does not add up.
        """
        faults = list(self.faults)
        if self.used + self.unused != self.total:
            faults.append(f"{self.used} used and {self.unused} unused bytes are not the pool's {self.total}")
        if faults:
            raise CacheError("; ".join(faults))


def block_bytes(group: Group, page_bytes: int) -> tuple[int, int]:
    """Count payload and padding of one block."""
    payload = group.payload_bytes
    return payload, group.pages(page_bytes) * page_bytes - payload


def account(manager: Manager) -> Account:
    """Account for a manager's pool and compare references with requests."""
    pool, faults = manager.pool, []
    rows = {}
    for g in manager.groups:
        live, cached = (sum(b.group is g for b in blocks) for blocks in (pool.live, pool.cached))
        payload, padding = block_bytes(g, pool.page_bytes)
        rows[g.name] = GroupBytes(live, cached, (live + cached) * payload, (live + cached) * padding)
    held = Counter(b for request in manager.requests.values() for b in request.blocks())
    if held != Counter({b: b.references for b in pool.live}):
        faults.append("references are not those that requests hold")
    pages = Counter(page for blocks in (pool.live, pool.cached) for b in blocks for page in b.pages)
    pages.update(pool.unused)
    if len(pages) != pool.count or max(pages.values()) > 1:
        faults.append("a page is lost, or in two blocks")
    if any(b.key is None or pool.index.get(b.key) is not b for b in pool.cached):
        faults.append("a cached block cannot be found by its name")
    host = [p for r in manager.requests.values() for row in r.swapped.values() for b in row if b for p in b.pages]
    if sorted(host + manager.host_unused) != list(range(manager.host_pages)):
        faults.append("a page of the host is lost, or in two blocks")
    for request in manager.requests.values():
        expected = 0
        if request.state == "running":
            begun = request.length > request.hit
            expected = request_bytes(manager, request.length, request.extents, begun)
        found = sum(len(b.pages) for b in request.blocks()) * pool.page_bytes
        if request.state != "in a step" and expected != found:
            faults.append(f"request {request.id!r} of {request.length} tokens holds {found} bytes, not {expected}")
    return Account(rows, len(pool.unused) * pool.page_bytes, pool.count * pool.page_bytes, faults)


def request_bytes(manager: Manager, length: int, extents: dict[str, int] | None = None, begun: bool = True) -> int:
    """Count the bytes of the pages that a request holds.

    The request has `length` cached tokens; shared pages count.

    Args:
        manager: whose groups and pages.
        length: tokens.
        extents: final positions by group; None: `length` less the group's lookahead.
        begun: it has run a step since it was started, so that drafts have blocks.
    """
    pages = 0
    for g in manager.groups:
        extent = max(0, length - g.lookahead) if extents is None else extents[g.name]
        pages += held_blocks(g, extent, begun) * g.pages(manager.pool.page_bytes)
    return pages * manager.pool.page_bytes


def held_blocks(group: Group, extent: int, begun: bool = True) -> int:
    """Count the blocks of a group that a request holds between steps.

    Args:
        group: whose. extent: positions that hold final values. begun: as of `request_bytes`.
    """
    if group.kind == "ring":
        return 1
    blocks = -(-(extent + group.reserve * begun) // group.block_tokens)
    if group.kind == "window":
        blocks -= max(0, extent - group.reach + 1) // group.block_tokens
    return blocks


def most_blocks(group: Group, length: int, tokens: int) -> int:
    """Count the blocks of a group that a request holds at most.

    Args:
        group: whose. length: most positions of the request, drafts counted. tokens: most of a step, which has blocks
            for all of them before a window's blocks that they pass are released.
    """
    if group.kind == "ring":
        return 1
    whole = -(-(length + group.reserve) // group.block_tokens)
    if group.kind == "entries":
        return whole
    span = group.reach - 1 + tokens + group.lookahead + group.reserve
    return min(whole, -(-span // group.block_tokens) + 1)


def point_blocks(group: Group, unit: int) -> int:
    """Count the blocks of a group that are kept for one point, besides entries.

    They are of a window, or a ring's copy.
    """
    if group.kind == "entries":
        return 0
    needed = group.needed(unit)
    return int(needed > 0) if group.kind == "ring" else -(-needed // group.block_tokens)


def pool_pages(
    groups: tuple[Group, ...],
    page_bytes: int,
    *,
    requests: int,
    positions: int,
    tokens: int,
    points: int = POINTS,
) -> int:
    """Count the pages of a pool in which so many requests run at once and save points.

    Args:
        groups: of the caches. page_bytes: bytes of a page.
        requests: at once. positions: most of each, drafts counted. tokens: most of a step.
        points: saved of each request.
    """
    unit = granularity(groups)
    blocks = ((g, most_blocks(g, positions, tokens) + points * point_blocks(g, unit)) for g in groups)
    return requests * sum(count * g.pages(page_bytes) for g, count in blocks)


def capacity(manager: Manager, requests: int) -> int:
    """Count the tokens that each of several equal requests can cache at once.

    -1: not even their rings fit.
    """
    pages = manager.pool.count // requests * manager.pool.page_bytes
    if request_bytes(manager, 0) > pages:
        return -1
    low, high = 0, 1
    while request_bytes(manager, high) <= pages:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if request_bytes(manager, middle) <= pages else (low, middle)
    return low
