"""Manage the caches of all requests: hits, steps, drafts, forks, preemption.

See README.md for the design. The manager moves no values: it decides where they are, and lists the pages to copy.
An executor keeps this contract:

* `copies()` are made in their order, before the values of the next step are written.
* A step writes, for each part and group, positions `extent .. part.write_end(group) - 1` (`request.extents`).
* A step that reads at position t reads window values t - reach + 1 .. t, rows of its compressor's windows, and entries
  below floor((t + 1) / rate): by position, never by what a block happens to hold.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence

from dsv4lib.cache.errors import PoolExhausted, RequestExists, UnknownRequest, WrongState
from dsv4lib.cache.groups import Group, best_page_bytes, check_groups, granularity
from dsv4lib.cache.metrics import Metrics
from dsv4lib.cache.pool import Block, Pool
from dsv4lib.cache.prefix import Key
from dsv4lib.cache.request import Copy, Part, Request, Step, Swapped, Work
from dsv4lib.errors import ArgumentError

Found = dict[str, list[Block]]


class Manager:
    """Allocate, share, find, save and evict the blocks of requests.

    Args:
        groups: of the model's caches.
        pages: of the pool.
        page_bytes: bytes of a page, at least the largest layer of a block; None: `best_page_bytes`.
        save_every: tokens between points of a long request that are kept; a multiple of `unit`, or 0: only the last
            point of a prompt and the last point reached.
        host_pages: pages of the host for swapped requests.
        prefix_caching: find and save prefixes.

    Raises:
        ArgumentError: groups that do not fit, a page smaller than a layer, a distance that is no multiple of the unit.
    """

    def __init__(
        self,
        groups: tuple[Group, ...],
        pages: int,
        page_bytes: int | None = None,
        *,
        save_every: int = 0,
        host_pages: int = 0,
        prefix_caching: bool = True,
    ):
        check_groups(groups)
        largest = max(g.layer_bytes for g in groups)
        page_bytes = best_page_bytes(groups) if page_bytes is None else page_bytes
        if page_bytes < largest:
            raise ArgumentError("page_bytes", page_bytes, f"{largest} or more: a page holds whole layers")
        self.groups, self.unit = groups, granularity(groups)
        if save_every < 0 or save_every % self.unit:
            raise ArgumentError("save_every", save_every, f"0 or a multiple of {self.unit}")
        if host_pages < 0:
            raise ArgumentError("host_pages", host_pages, "0 or more")
        self.pool, self.save_every, self.prefix_caching = Pool(pages, page_bytes), save_every, prefix_caching
        self.host_pages, self.host_unused = host_pages, list(range(host_pages - 1, -1, -1))
        self.requests: dict[Hashable, Request] = {}
        self.metrics = Metrics()
        self.rings = tuple(g for g in groups if g.kind == "ring")
        self.paged = tuple(g for g in groups if g.kind != "ring")
        self.lookahead = max(g.lookahead for g in groups)
        self.most_drafts = min((g.most_drafts for g in self.rings), default=1 << 30)
        self._link = math.gcd(*(g.block_tokens for g in groups))
        self._copies: list[Copy] = []

    @property
    def shortest_hit(self) -> int:
        """Count tokens of the shortest prompt that can hit. A unit, and what must be run or looked ahead to."""
        return self.unit + max(1, self.lookahead)

    # Requests

    def add(self, request: Hashable, tokens: Sequence[int], salt: bytes = b"") -> int:
        """Take a request and find the longest prefix of it that is cached.

        Args:
            request: its name.
            tokens: the prompt, 1 or more.
            salt: whatever else values depend on (adapter, tenant, images): only requests of the same salt share.

        Returns:
            Tokens that need not be run; at least one is left.

        Raises:
            RequestExists: the name is in use.
            PoolExhausted: there are no pages for its rings; nothing was changed.
        """
        if request in self.requests:
            raise RequestExists(request)
        if len(tokens) < 1:
            raise ArgumentError("tokens", tokens, "one token or more")
        new = Request(request, tokens, self.groups, self._link, salt)
        self._start(new)
        self.requests[request] = new
        return new.hit

    def append(self, request: Hashable, tokens: Sequence[int]) -> None:
        """Add known tokens, what was sampled, to be run by later steps."""
        self.get(request, "running", "waiting", "swapped").tokens += tokens

    def get(self, request: Hashable, *states: str) -> Request:
        """Return a request that is in one of these states, or in any.

        Raises:
            UnknownRequest: there is none of this name.
            WrongState: it is in another state.
        """
        if request not in self.requests:
            raise UnknownRequest(request, len(self.requests))
        found = self.requests[request]
        if states and found.state not in states:
            raise WrongState(request, found.state, " or ".join(states))
        return found

    def finish(self, request: Hashable) -> None:
        """Forget a request; what of its blocks is named stays cached."""
        one = self.get(request, "running", "waiting", "swapped")
        self._release(one)
        for row in one.swapped.values():
            self.host_unused += [page for block in row if block for page in block.pages]
        del self.requests[request]

    def fork(self, request: Hashable, new: Hashable) -> None:
        """Make a second continuation of a request. Blocks are shared until one of them writes, rings are copied.

        Raises:
            PoolExhausted: no pages for its rings; nothing was changed.
        """
        old = self.get(request, "running")
        if new in self.requests:
            raise RequestExists(new)
        other, eager = old.copy(new, self.groups), {g.name: self._written_between_steps(old, g) for g in self.paged}
        wanted = sum(g.pages(self.pool.page_bytes) * len(eager[g.name]) for g in self.paged)
        self.pool.require(wanted + sum(g.pages(self.pool.page_bytes) for g in self.rings))
        for g in self.groups:
            row: list[Block | None] = []
            for i, block in enumerate(old.held[g.name]):
                if block is not None:
                    alone = g.kind == "ring" or i in eager[g.name]
                    block = self._duplicate(block) if alone else self.pool.share(block)
                row.append(block)
            other.held[g.name], other.changed[g.name] = row, set(range(len(row)))
        other.state = "running"
        self.requests[new] = other
        self.metrics.forks += 1

    def _written_between_steps(self, request: Request, group: Group) -> set[int]:
        """Number the blocks that drafting writes without a step: those from the extent on of a group with a reserve."""
        if not group.reserve:
            return set()
        return set(range(request.extents[group.name] // group.block_tokens, len(request.held[group.name])))

    def preempt(self, request: Hashable, how: str = "recompute") -> None:
        """Give a request's pages up.

        Args:
            request: its name.
            how: "recompute" (what is named may be found again) or "swap" (to pages of the host).

        Raises:
            PoolExhausted: too few pages of the host; nothing was changed.
        """
        if how not in ("recompute", "swap"):
            raise ArgumentError("how", how, "'recompute' or 'swap'")
        one = self.get(request, "running")
        if how == "swap":
            self._swap_out(one)
        self._release(one)
        one.held = {g.name: [] for g in self.groups}
        one.state = "swapped" if how == "swap" else "waiting"
        self.metrics.preemptions += 1

    def resume(self, request: Hashable) -> int:
        """Let a preempted request go on.

        Returns:
            Tokens that are cached; the others are run again.

        Raises:
            PoolExhausted: too few pages; nothing was changed.
        """
        one = self.get(request, "waiting", "swapped")
        if one.state == "swapped":
            self._swap_in(one)
        else:
            self._start(one)
        return one.length

    # Steps

    def cut(self, request: Hashable, count: int) -> int:
        """Shorten a chunk so that it ends where a state is to be saved."""
        one = self.get(request)
        stops = [one.prompt_point, (one.length // self.save_every + 1) * self.save_every if self.save_every else 0]
        stops = [stop - one.length for stop in stops if stop > one.length and self.prefix_caching]
        return min([count, *stops])

    def begin(self, batch: Sequence[Work]) -> Step:
        """Provide blocks for a step of several requests, for all or for none.

        Raises:
            PoolExhausted: too few pages; nothing was changed.
            WrongState: a request is preempted or in a step.
            ArgumentError: a request twice, tokens that are not known, drafts before them or more than the rings bear.
        """
        parts = [self._part(work) for work in batch]
        if len({part.request.id for part in parts}) != len(parts):
            raise ArgumentError("batch", [work.request for work in batch], "each request at most once")
        self.pool.require(self._wanted(parts))
        for part in parts:
            for g in self.groups:
                self._provide(part, g)
            part.request.state = "in a step"
        return Step(parts)

    def commit(self, step: Step, accepted: Sequence[int] | None = None) -> None:
        """Keep what a step wrote, up to the accepted drafts of each part.

        Args:
            step: that was begun and run.
            accepted: drafts accepted of each part, in their order; None: no part has drafts.

        Raises:
            ArgumentError: a step that is over, a count of another length, or more than were drafted.
        """
        counts = [0] * len(step.parts) if accepted is None else list(accepted)
        if not step.open:
            raise ArgumentError("step", step, "a step that was neither committed nor aborted")
        if len(counts) != len(step.parts) or (accepted is None and any(part.drafts for part in step.parts)):
            raise ArgumentError("accepted", accepted, f"{len(step.parts)} numbers, one a part")
        for count, part in zip(counts, step.parts, strict=True):
            if not 0 <= count <= len(part.drafts):
                raise ArgumentError("accepted", counts, f"0..{len(part.drafts)} for request {part.request.id!r}")
        step.open = False
        for number, part in enumerate(step.parts):
            self._settle(part, self._accepted(counts, number))

    def abort(self, step: Step) -> None:
        """Take a step back that was not run."""
        if not step.open:
            raise ArgumentError("step", step, "a step that was neither committed nor aborted")
        step.open = False
        for part in step.parts:
            part.request.state = "running"
            self._trim(part.request)

    def copies(self) -> list[Copy]:
        """Return the pages to copy since the last call, in order."""
        taken, self._copies = self._copies, []
        return taken

    def evict(self, pages: int | None = None) -> int:
        """Evict cached blocks until `pages` are unused (None: all); count the blocks."""
        count = 0
        while (pages is None or len(self.pool.unused) < pages) and self.pool.evict():
            count += 1
        return count

    def block(self, request: Hashable, group: Group, position: int) -> Block:
        """Return the block of a value at a position (of an entry: its first token's)."""
        row = self.get(request).held[group.name]
        block = row[0 if group.kind == "ring" else position // group.block_tokens]
        if block is None:
            raise ArgumentError("position", position, f"one that is still cached in {group.name}")
        return block

    # Starting, and what is found

    def key(self, request: Request, group: Group, end: int) -> Key:
        """Name a request's block of a group that ends before token `end`."""
        return request.chain.key(group.name, end, request.tokens[end : end + group.lookahead])

    def _start(self, request: Request) -> None:
        rings = sum(g.pages(self.pool.page_bytes) for g in self.rings)
        fitting = (one for one in self._candidates(request) if self._leaves(one[1]) >= rings)
        point, found = next(fitting, (0, None))
        if found is None:
            raise PoolExhausted(rings, self.pool.available, self.pool.page_bytes)
        for row in found.values():
            for block in row:
                self.pool.share(block).hits += 1
        held: dict[str, list[Block | None]] = {}
        for g in self.paged:
            row = found.get(g.name, [])
            held[g.name] = [None] * (point // g.block_tokens - len(row)) + row
        for g in self.rings:
            held[g.name] = [self.pool.allocate(g)]
            for saved in found.get(g.name, []):
                self._restore(saved, held[g.name][0])
                self.pool.release(saved)
        request.reset(self.groups, held, point)
        request.prompt_point = self._last_point(len(request.tokens))
        request.points = [p for p in range(self.unit, point + 1, self.unit)]
        request.state = "running"
        self.metrics.count_start(len(request.tokens), point)

    def _leaves(self, found: Found) -> int:
        """Count the pages that can be had when these blocks are shared."""
        idle = {b for row in found.values() for b in row if b.references == 0}
        return self.pool.available - sum(len(b.pages) for b in idle)

    def _last_point(self, length: int) -> int:
        """Return the last point at which `length` known tokens can be resumed."""
        return max(0, length - max(1, self.lookahead)) // self.unit * self.unit

    def _candidates(self, request: Request) -> Iterator[tuple[int, Found]]:
        """List the points at which all that resuming needs is cached, the longest first, and 0."""
        last = self._last_point(len(request.tokens)) if self.prefix_caching else 0
        request.chain.extend(request.tokens, last)
        found = self._entries_up_to(request, last)
        top = min((len(row) * g.block_tokens for g, row in found), default=last)
        for point in range(top // self.unit * self.unit, 0, -self.unit):
            rows = {g.name: row[: point // g.block_tokens] for g, row in found}
            if self._add_state(request, point, rows):
                yield point, rows
            else:
                self.metrics.points_without_state += 1
        yield 0, {}

    def _entries_up_to(self, request: Request, last: int) -> list[tuple[Group, list[Block]]]:
        rows = []
        for g in self.groups:
            if g.kind != "entries":
                continue
            row: list[Block] = []
            for end in range(g.block_tokens, last + 1, g.block_tokens):
                block = self.pool.index.get(self.key(request, g, end))
                if block is None:
                    break
                row.append(block)
            rows.append((g, row))
        return rows

    def _add_state(self, request: Request, point: int, rows: Found) -> bool:
        """Add the window blocks and saved rings that resuming at a point needs; False: one is missing."""
        for g in self.groups:
            if g.kind == "entries":
                continue
            row = [self.pool.index.get(self.key(request, g, end)) for end in self._ends(g, point)]
            if None in row:
                return False
            rows[g.name] = row
        return True

    def _ends(self, group: Group, point: int) -> list[int]:
        """List where the named blocks end that resuming at a point needs of a window, or of a saved ring."""
        needed = group.needed(point)
        if group.kind == "ring":
            return [point] if needed else []
        first = (point - needed) // group.block_tokens
        return [(i + 1) * group.block_tokens for i in range(first, point // group.block_tokens)]

    def _restore(self, saved: Block, ring: Block) -> None:
        """Fill a new ring from a saved one."""
        self._copy_block(saved, ring)

    def _copy_block(self, source: Block, target: Block) -> None:
        self._copies += [Copy("device", a, b) for a, b in zip(source.pages, target.pages, strict=True)]
        self.metrics.pages_copied += len(source.pages)

    def _duplicate(self, block: Block) -> Block:
        copy = self.pool.allocate(block.group)
        self._copy_block(block, copy)
        return copy

    # Steps: blocks before, names after

    def _part(self, work: Work) -> Part:
        one = self.get(work.request, "running")
        known, drafts = len(one.tokens), tuple(work.drafts)
        if not 1 <= work.count <= known - one.length:
            raise ArgumentError("count", work.count, f"1..{known - one.length}, tokens of {work.request!r} not yet run")
        if drafts and one.length + work.count != known:
            raise ArgumentError("drafts", drafts, f"none before the known tokens of {work.request!r} are run")
        if len(drafts) > self.most_drafts:
            raise ArgumentError("drafts", drafts, f"{self.most_drafts} or fewer: rings keep no more rows")
        return Part(one, one.length, work.count, drafts, known)

    def _blocks_of(self, part: Part, group: Group) -> tuple[int, int]:
        """Return the first block that a part writes, and how many blocks its request has then."""
        first = part.request.extents[group.name] // group.block_tokens
        return first, max(-(-(part.write_end(group) + group.reserve) // group.block_tokens), first)

    def _wanted(self, parts: list[Part]) -> int:
        wanted, gone = 0, {}
        for part in parts:
            for g in self.paged:
                row, (first, count) = part.request.held[g.name], self._blocks_of(part, g)
                new = max(0, count - len(row))
                for block in row[first:count]:
                    if block.references - gone.get(block, 0) > 1:
                        gone[block] = gone.get(block, 0) + 1
                        new += 1
                wanted += new * g.pages(self.pool.page_bytes)
        return wanted

    def _provide(self, part: Part, group: Group) -> None:
        """Give a part the blocks it writes, none of them shared."""
        one = part.request
        one.written[group.name] = max(one.written[group.name], part.write_end(group) + group.reserve)
        if group.kind == "ring":
            return
        row, (first, count) = one.held[group.name], self._blocks_of(part, group)
        for i in range(first, min(count, len(row))):
            if row[i].references > 1:
                self._unshare(row, i)
                one.changed[group.name].add(i)
        while len(row) < count:
            one.changed[group.name].add(len(row))
            row.append(self.pool.allocate(group))

    def _unshare(self, row: list[Block | None], i: int) -> None:
        """Copy a block before it is written (copy on write)."""
        shared = row[i]
        row[i] = self._duplicate(shared)
        self.pool.release(shared)
        self.metrics.copies_on_write += 1

    def _accepted(self, counts: list[int], number: int) -> int:
        return counts[number]

    def _settle(self, part: Part, accepted: int) -> None:
        """Commit one part: extents, names, saved states, blocks that are not read any more."""
        one = part.request
        one.tokens += part.drafts[:accepted]
        before, one.length, one.state = one.length, part.start + part.count + accepted, "running"
        for g in self.groups:
            one.extents[g.name] = max(one.extents[g.name], min(one.length, len(one.tokens) - g.lookahead))
        if self.prefix_caching:
            final = self._final(part)
            one.chain.extend(one.tokens, final)
            for g in self.paged:
                self._name_blocks(one, g)
            first = before // self.unit + 1
            for point in range(first * self.unit, one.length + 1, self.unit):
                one.pending += [(point, g) for g in self.groups]
            self._save_points(one)
        for g in self.paged:
            if g.kind == "window":
                self._release_passed(one, g)
        self._trim(one)

    def _final(self, part: Part) -> int:
        """Return how many tokens are final: those that are committed."""
        return part.request.length

    def _name_blocks(self, request: Request, group: Group) -> None:
        """Name the blocks that are complete; of a window those that a point needs."""
        row, size = request.held[group.name], group.block_tokens
        for i in range(request.named[group.name], request.extents[group.name] // size):
            end = (i + 1) * size
            point = -(-end // self.unit) * self.unit
            if row[i] is not None and (group.kind == "entries" or end in self._ends(group, point)):
                self.pool.name(row[i], self.key(request, group, end))
            request.named[group.name] = i + 1

    def _save_points(self, request: Request) -> None:
        """Save the rings of points that were reached; a point is usable when all groups are done with it."""
        waiting = []
        for point, g in request.pending:
            if request.extents[g.name] < point:
                waiting.append((point, g))
            elif g.kind == "ring" and g.needed(point):
                self._save_ring(request, g, point)
        request.pending = waiting
        open_points = {point for point, _ in waiting}
        last = request.points[-1] if request.points else 0
        for point in range(last + self.unit, request.length + 1, self.unit):
            if point in open_points:
                break
            request.points.append(point)
            self._supersede(request, point - self.unit, point)

    def _save_ring(self, request: Request, group: Group, point: int) -> None:
        """Copy a ring while it still holds the rows that resuming at a point reads."""
        key = self.key(request, group, point)
        if self.pool.index.get(key):
            return self.pool.touch(key)
        if request.written[group.name] - (point - group.needed(point)) > group.rows:
            self.metrics.points_lost += 1
            return None
        if self.pool.available < group.pages(self.pool.page_bytes):
            self.metrics.saves_skipped += 1
            return None
        saved = self._duplicate(request.held[group.name][0])
        self.pool.name(saved, key)
        self.pool.release(saved)
        self.metrics.saves += 1
        return None

    def _kept(self, request: Request, point: int) -> bool:
        """Say whether a point stays when the request has passed it."""
        return point == request.prompt_point or bool(self.save_every and point % self.save_every == 0)

    def _supersede(self, request: Request, old: int, new: int) -> None:
        """Forget the windows and rings of the point before, unless it is kept."""
        if old <= request.hit or self._kept(request, old):
            return
        for g in self.groups:
            if g.kind != "entries":
                for end in set(self._ends(g, old)) - set(self._ends(g, new)):
                    self.pool.forget(self.key(request, g, end))

    # Blocks that are not needed any more

    def _release_passed(self, request: Request, group: Group) -> None:
        """Release window blocks that the next position does not read."""
        row = request.held[group.name]
        passed = max(0, request.extents[group.name] - group.reach + 1) // group.block_tokens
        for i in range(min(passed, len(row)) - 1, -1, -1):
            if row[i] is None:
                break
            self.pool.release(row[i])
            row[i] = None
            request.changed[group.name].add(i)

    def _trim(self, request: Request) -> None:
        """Release blocks past what is committed and reserved."""
        for g in self.paged:
            row, count = request.held[g.name], -(-(request.extents[g.name] + request.reserve(g)) // g.block_tokens)
            while len(row) > count:
                request.changed[g.name].add(len(row) - 1)
                self.pool.release(row.pop())

    def _release(self, request: Request) -> None:
        """Release all blocks, the last tokens' first, so that prefixes stay longest."""
        order: list[tuple[int, int, Block | Key]] = []
        for g in self.groups:
            for i, block in enumerate(request.held[g.name]):
                if block is not None:
                    order.append(((i + 1) * g.block_tokens, 0, block))
        for point in request.points:
            for g in self.groups:
                if g.kind != "entries":
                    order += [(end, 1, self.key(request, g, end)) for end in self._ends(g, point)]
        for _, _, one in self._release_order(order):
            if isinstance(one, Block):
                self.pool.release(one)
            else:
                self.pool.touch(one)

    def _release_order(self, order: list[tuple[int, int, Block | Key]]) -> list[tuple[int, int, Block | Key]]:
        return sorted(order, key=lambda one: one[:2], reverse=True)

    def _swap_out(self, request: Request) -> None:
        wanted = sum(len(b.pages) for b in request.blocks())
        if wanted > len(self.host_unused):
            raise PoolExhausted(wanted, len(self.host_unused), self.pool.page_bytes, "host")
        for g in self.groups:
            row: list[Swapped | None] = []
            for block in request.held[g.name]:
                if block is not None:
                    pages = tuple(self.host_unused.pop() for _ in block.pages)
                    self._copies += [Copy("out", a, b) for a, b in zip(block.pages, pages, strict=True)]
                    row.append(Swapped(block.key, pages))
                else:
                    row.append(None)
            request.swapped[g.name] = row

    def _swap_in(self, request: Request) -> None:
        """Bring blocks back; those still cached under their names are shared instead."""
        wanted, idle = 0, set()
        for g in self.groups:
            for block in request.swapped[g.name]:
                cached = block and block.key and self.pool.index.get(block.key)
                if cached and cached.references == 0:
                    idle.add(cached)
                wanted += 0 if block is None or cached else g.pages(self.pool.page_bytes)
        self.pool.require(wanted + sum(len(b.pages) for b in idle))
        rows = {g.name: self._shared_of(request.swapped[g.name]) for g in self.groups}
        for g in self.groups:
            for i, block in enumerate(request.swapped[g.name]):
                if block is None:
                    continue
                if rows[g.name][i] is None:
                    new = rows[g.name][i] = self.pool.allocate(g)
                    self._copies += [Copy("in", a, b) for a, b in zip(block.pages, new.pages, strict=True)]
                    if block.key:
                        self.pool.name(new, block.key)
                self.host_unused += block.pages
            request.changed[g.name] = set(range(len(rows[g.name])))
        request.held, request.swapped, request.state = rows, {}, "running"

    def _shared_of(self, row: list[Swapped | None]) -> list[Block | None]:
        found = [one.key and self.pool.index.get(one.key) if one else None for one in row]
        return [self.pool.share(block) if block else None for block in found]
