"""Share one pool of equal pages among all groups. It keeps references, and an LRU list of what is cached."""

from __future__ import annotations

from collections import OrderedDict

from dsv4lib.cache.errors import CacheError, DoubleFree, PoolExhausted
from dsv4lib.cache.groups import Group
from dsv4lib.cache.prefix import Index, Key
from dsv4lib.errors import ArgumentError


class Block:
    """A block of one group: its pages and references. Once its content is final it has a name.

    Attributes:
        group: whose values it holds.
        pages: their numbers; layer l is in page l // layers_per_page of them.
        references: requests that hold it.
        key: its name in the index, or None.
        hits: how often a request found it by its name.
    """

    __slots__ = ("group", "hits", "key", "pages", "references")

    def __init__(self, group: Group, pages: tuple[int, ...]):
        self.group, self.pages, self.references, self.hits = group, pages, 1, 0
        self.key: Key | None = None

    def __repr__(self) -> str:
        return f"Block({self.group.name}, pages {self.pages}, {self.references} references)"


class Pool:
    """Hand out blocks of `count` pages of `page_bytes` bytes.

    A block without references keeps its content, and is found by its name, until its pages are needed. Those released
    longest ago go first; a request releases its blocks in reverse order, so its first tokens stay longest.

    Raises:
        ArgumentError: a size that is not positive.
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
        """Check that so many pages can be had.

        Raises:
            PoolExhausted: they cannot.
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
            self.evict()
        block = Block(group, tuple(self.unused.pop() for _ in range(pages)))
        self.live.add(block)
        return block

    def evict(self) -> bool:
        """Evict the block that was released longest ago; False: there is none."""
        if not self.cached:
            return False
        block = self._victim()
        self._uncache(block)
        self._recycle(block)
        self.evictions += 1
        return True

    def _victim(self) -> Block:
        return next(iter(self.cached))

    def _uncache(self, block: Block) -> None:
        del self.cached[block]
        self._cached_pages -= len(block.pages)

    def _recycle(self, block: Block) -> None:
        if block.key is not None:
            self.index.drop(block.key)
            block.key = None
        self.unused += block.pages

    def share(self, block: Block) -> Block:
        """Add a reference.

        Raises:
            CacheError: the block was evicted.
        """
        if block.references == 0:
            if block not in self.cached:
                raise CacheError(f"{block} was evicted and cannot be shared")
            self._uncache(block)
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
            self._recycle(block)
        else:
            self.cached[block] = None
            self._cached_pages += len(block.pages)

    def name(self, block: Block, key: Key) -> None:
        """Make a block whose content is final findable.

        A second block of the same content stays without a name.
        """
        if block.key is None and self.index.add(key, block):
            block.key = key

    def touch(self, key: Key) -> None:
        """Count a cached block of this name as released just now."""
        block = self.index.get(key)
        if block in self.cached:
            self.cached.move_to_end(block)

    def forget(self, key: Key) -> None:
        """Take a block's name away, unless a request found it by that name."""
        block = self.index.get(key)
        if block is None or block.hits:
            return
        self.index.drop(key)
        block.key = None
        if block in self.cached:
            self._uncache(block)
            self._recycle(block)
