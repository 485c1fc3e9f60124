"""Name the contents of blocks. A name is a hash chained over tokens; an index leads from names to blocks."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Generic, TypeVar

B = TypeVar("B")

Key = tuple[str, int, bytes]
"""Name of a block: its group, the token it ends before, the hash of all tokens that its values depend on."""


class Chain:
    """Hash the prefixes of one request's tokens, one link for each `unit` tokens.

    Link i names tokens 0 .. i*unit - 1 and everything else that values depend on (`salt`: model, formats, tenant).
    """

    def __init__(self, unit: int, salt: bytes):
        self.unit = unit
        self.links = [hashlib.sha256(b"dsv4 cache\0" + salt).digest()]

    def extend(self, tokens: Sequence[int], length: int) -> None:
        """Add links up to `length` tokens."""
        while len(self.links) * self.unit <= length:
            start = (len(self.links) - 1) * self.unit
            text = array("q", tokens[start : start + self.unit]).tobytes()
            self.links.append(hashlib.sha256(self.links[-1] + text).digest())

    def key(self, group: str, end: int, ahead: Sequence[int] = ()) -> Key:
        """Name the block of a group that ends before token `end`.

        `ahead` are the tokens its values look ahead to.
        """
        link = self.links[end // self.unit]
        return group, end, hashlib.sha256(link + array("q", ahead).tobytes()).digest() if ahead else link

    def copy(self) -> Chain:
        """Copy for a fork."""
        other = object.__new__(Chain)
        other.unit, other.links = self.unit, list(self.links)
        return other


class Index(Generic[B]):
    """Map names to blocks."""

    def __init__(self) -> None:
        self.blocks: dict[Key, B] = {}

    def get(self, key: Key) -> B | None:
        """Return the block of this name, or None."""
        return self.blocks.get(key)

    def add(self, key: Key, block: B) -> bool:
        """Name a block, if no other has the name."""
        return self.blocks.setdefault(key, block) is block

    def drop(self, key: Key) -> None:
        """Forget a name."""
        del self.blocks[key]
