"""Share one pool of equal pages among all groups: counts of references, an LRU list of what is cached, errors."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from dsv4lib.cache.groups import Group
from dsv4lib.cache.prefix import Index
from dsv4lib.errors import ArgumentError, DSV4Error


class PoolError(DSV4Error):
    """The pool was used wrongly."""


class PoolExhausted(PoolError):
    """Not enough pages: nothing was changed; preempt or free a request and try again."""

    def __init__(self, wanted: int, free: int, page_bytes: int):
        self.wanted, self.free = wanted, free
        super().__init__(
            f"{wanted} pages ({wanted * page_bytes} bytes) are needed, {free} are free or can be evicted; "
            "preempt or free a request"
        )


class DoubleFree(PoolError):
    """A reference was given back that nothing held."""


class Block:
    """A block of one group: its pages, its references and, once its content is final, its name."""

    __slots__ = ("group", "key", "pages", "references")

    def __init__(self, group: Group, pages: tuple[int, ...]):
        self.group, self.pages, self.references, self.key = group, pages, 1, None

    def __repr__(self) -> str:
        return f"Block({self.group.name}, pages {self.pages}, {self.references} references)"


class Pool:
    """Hand out blocks of `count` pages of `page_bytes` bytes.

    A block without references keeps its content, and is found by its name, until its pages are needed. Those released
    longest ago go first; a request releases its blocks in reverse order, so its first tokens stay longest.
    """

    def __init__(self, count: int, page_bytes: int):
        for name, value in (("count", count), ("page_bytes", page_bytes)):
            if value < 1:
                raise ArgumentError(name, value, "positive")
        self.count, self.page_bytes = count, page_bytes
        self.unused = list(range(count - 1, -1, -1))
        self.cached: OrderedDict[Block, None] = OrderedDict()
        self.live: set[Block] = set()
        self.index = Index()
        self.evictions = 0
        self._cached_pages = 0

    @property
    def available(self) -> int:
        """Count the pages that are unused or can be evicted."""
        return len(self.unused) + self._cached_pages

    def require(self, pages: int) -> None:
        """Check that so many pages could be had.

        Raises:
            PoolExhausted: they could not.
        """
        if pages > self.available:
            raise PoolExhausted(pages, self.available, self.page_bytes)

    def allocate(self, group: Group) -> Block:
        """Take a block, evicting what was released longest ago.

        Raises:
            PoolExhausted: too few pages.
        """
        pages = group.pages(self.page_bytes)
        self.require(pages)
        while len(self.unused) < pages:
            self._evict()
        block = Block(group, tuple(self.unused.pop() for _ in range(pages)))
        self.live.add(block)
        return block

    def _evict(self) -> None:
        block, _ = self.cached.popitem(last=False)
        self._cached_pages -= len(block.pages)
        self.index.drop(block.key)
        self.unused += block.pages
        self.evictions += 1

    def share(self, block: Block) -> Block:
        """Add a reference."""
        if block.references == 0:
            if block not in self.cached:
                raise PoolError(f"{block} was evicted and cannot be shared")
            del self.cached[block]
            self._cached_pages -= len(block.pages)
            self.live.add(block)
        block.references += 1
        return block

    def release(self, block: Block) -> None:
        """Give a reference back.

        Raises:
            DoubleFree: there is none.
        """
        if block.references < 1:
            raise DoubleFree(f"{block} was released more often than it was shared")
        block.references -= 1
        if block.references:
            return
        self.live.remove(block)
        if block.key is None:
            self.unused += block.pages
        else:
            self.cached[block] = None
            self._cached_pages += len(block.pages)

    def name(self, block: Block, key: Any) -> None:
        """Let a block whose content is final be found; a second one of the same content stays without a name."""
        if block.key is None and self.index.add(key, block):
            block.key = key
