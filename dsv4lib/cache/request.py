"""Keep what the manager knows of a request, and of a step that is under way."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from dsv4lib.cache.groups import Group
from dsv4lib.cache.pool import Block
from dsv4lib.cache.prefix import Chain


class Request:
    """A sequence of tokens and the blocks that hold its values.

    Attributes:
        id: its name.
        tokens: all that are known: the prompt, what was appended, accepted drafts.
        length: tokens whose values are cached; the next step starts at this position.
        hit: tokens that the last start found in the cache.
        held: of each group its blocks, in order; None where a window has passed. A ring has one.
        extents: of each group the positions that hold final values, 0 .. extent - 1.
        written: of each group the first position never written, also by what was rejected.
        chain: hashes of the tokens' prefixes, of committed ones only.
        points: where resuming is possible, of those that this request saved, in order.
        pending: points whose saving waits for tokens that a group looks ahead to.
        prompt_point: the last point in the prompt, kept for later requests with the same prompt; 0: none.
        named: of each group how many blocks have been considered for a name.
        changed: of each group the numbers of blocks that changed since tables were filled.
        state: "running", "in a step", "waiting" (to be recomputed) or "swapped".
        swapped: of each group what is on the host.
    """

    def __init__(self, name: Hashable, tokens: Sequence[int], groups: tuple[Group, ...], unit: int, salt: bytes):
        self.id, self.tokens, self.salt = name, list(tokens), salt
        self.chain = Chain(unit, salt)
        self.state = "waiting"
        self.swapped: dict[str, list[Swapped | None]] = {}
        self.reset(groups, {}, 0)

    def reset(self, groups: tuple[Group, ...], held: dict[str, list[Block | None]], length: int) -> None:
        """Start at `length` with these blocks."""
        self.length = self.hit = length
        self.held = {g.name: held.get(g.name, []) for g in groups}
        self.extents = {g.name: length for g in groups}
        self.written = dict(self.extents)
        self.named = {g.name: length // g.block_tokens for g in groups}
        self.points: list[int] = []
        self.pending: list[tuple[int, Group]] = []
        self.prompt_point = 0
        self.changed = {name: set(range(len(row))) for name, row in self.held.items()}

    def reserve(self, group: Group) -> int:
        """Count the tokens past the extent for which a group keeps blocks. There are none before the first step."""
        return group.reserve if self.length > self.hit else 0

    def blocks(self) -> list[Block]:
        """List the blocks that are held."""
        return [b for row in self.held.values() for b in row if b is not None]

    def copy(self, name: Hashable, groups: tuple[Group, ...]) -> Request:
        """Copy for a fork, without blocks."""
        other = Request(name, self.tokens, groups, self.chain.unit, self.salt)
        other.chain = self.chain.copy()
        other.length, other.hit = self.length, self.hit
        other.extents, other.written, other.named = dict(self.extents), dict(self.written), dict(self.named)
        other.prompt_point, other.points, other.pending = self.prompt_point, list(self.points), list(self.pending)
        return other


class Swapped(NamedTuple):
    """A block on the host: its name, if it had one, and its pages there."""

    key: tuple[str, int, bytes] | None
    pages: tuple[int, ...]


class Copy(NamedTuple):
    """A page to copy, before anything that later steps do.

    Attributes:
        kind: "device" (page to page), "out" (device to host) or "in" (host to device).
        source, target: numbers of pages.
    """

    kind: str
    source: int
    target: int


class Work(NamedTuple):
    """What a step does for a request. It runs `count` known tokens, then `drafts`, of which some may be rejected."""

    request: Hashable
    count: int
    drafts: Sequence[int] = ()


class Part(NamedTuple):
    """One request's part of a step.

    Attributes:
        request: whose it is.
        start: position of its first token.
        count: known tokens.
        drafts: tokens after them that may be rejected.
        known: tokens of the request that were known when the step began, drafts not counted.
    """

    request: Request
    start: int
    count: int
    drafts: tuple[int, ...]
    known: int

    @property
    def end(self) -> int:
        """Position after the last token, drafts counted."""
        return self.start + self.count + len(self.drafts)

    @property
    def tokens(self) -> list[int]:
        """Tokens at positions start .. end - 1."""
        return self.request.tokens[self.start : self.start + self.count] + list(self.drafts)

    def write_end(self, group: Group) -> int:
        """Position before which the step writes values of a group. Their lookahead is known or drafted."""
        return min(self.end, self.known + len(self.drafts) - group.lookahead)


class Step:
    """A batch that was begun: its parts, in order, until it is committed or aborted."""

    def __init__(self, parts: list[Part]):
        self.parts = parts
        self.open = True

    @property
    def tokens(self) -> int:
        """Count the tokens of all parts."""
        return sum(part.end - part.start for part in self.parts)
