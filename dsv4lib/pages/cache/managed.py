"""Serve a few requests from one pool by the cache manager. A hit, an eviction, a preemption, every byte counted.

The groups are nano's, in small blocks. Each value is made of all tokens before it, so a stale or foreign one has other
bits. The window of layer 0 is written by `quantize_kv_entries` and read by `kv_gather`, in the released format; the
other values are marks, copied as bytes. All that a step needs is compared with recomputing it from the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from dsv4lib import backends
from dsv4lib.cache import Group, Manager, PoolExhausted, Storage, Tables, Work, deepseek_v4, faults
from dsv4lib.cache import accounting as accounts
from dsv4lib.cache.request import Part, Step
from dsv4lib.formats import kv_entry
from dsv4lib.ops.kv_gather.op import kv_gather
from dsv4lib.ops.quantize.op import quantize_kv_entries
from dsv4lib.pages.full_model import run_case as whole

BANK, DIM = 1021, kv_entry.HEAD_DIM  # vectors that values are chosen from
BLOCK, WINDOW_BLOCK = 128, 32  # tokens of a block
PAGES, HOST, CHUNK = 46, 40, 96
FAULTS = {
    "StaleRing": "stale_ring",
    "FirstBlockLost": "first_block_lost",
    "PaddingNotCounted": "padding_not_counted",
    "KeptOnTheHost": "kept_on_the_host",
}


class Moment(NamedTuple):
    """The pool after an event.

    Attributes:
        event: in words. live: pages by group that requests hold. cached: pages kept without a request.
        unused: pages. unaccounted: bytes by which the account misses the pool.
    """

    event: str
    live: dict[str, int]
    cached: int
    unused: int
    unaccounted: int


class Story(NamedTuple):
    """What came of serving.

    Attributes:
        moments: after each event. hits: tokens found by request. wrong: values needed that recomputing does not give.
        compared: values needed. evicted: blocks. preempted: requests. leaked: pages that are not unused in the end.
        rows: (group, kind, layers, tokens of a block, payload and padding of a block, most blocks at once).
        page_bytes, total: bytes of a page and of the pool.
    """

    moments: list[Moment]
    hits: dict[str, int]
    wrong: int
    compared: int
    evicted: int
    preempted: int
    leaked: int
    rows: list[tuple[str, str, int, int, int, int, int]]
    page_bytes: int
    total: int


class _Server:
    """Requests, their tokens, and one pool with its bytes."""

    def __init__(self, backend: str, seed: int):
        groups = deepseek_v4(whole.listed().config, block=BLOCK, window_block=WINDOW_BLOCK, running=True)
        self.manager = Manager(groups, PAGES, host_pages=HOST)
        self.where = backends.device(backend)
        self.storage, self.tables = Storage(self.manager, self.where), Tables(self.manager, 1, CHUNK, 512, self.where)
        self.storage.pages.fill_(0xA5)
        generator = torch.Generator().manual_seed(seed)
        self.bank = torch.randn(BANK, DIM, generator=generator).bfloat16()
        self.backend, self.moments, self.hits = backend, [], {}
        self.wrong = self.compared = self.preempted = 0
        self.most = dict.fromkeys((g.name for g in groups), 0)

    def note(self, event: str) -> None:
        """Make the copies that wait, and note where the pages are."""
        self.storage.run(self.manager.copies())
        pool, found = self.manager.pool, accounts.account(self.manager)
        live = {g.name: 0 for g in self.manager.groups}
        for block in pool.live:
            live[block.group.name] += len(block.pages)
        for name, row in found.groups.items():
            self.most[name] = max(self.most[name], row.live + row.cached)
        unaccounted = abs(found.used + found.unused - self.storage.pages.numel())
        unaccounted += len(found.faults) * pool.page_bytes
        cached = sum(len(block.pages) for block in pool.cached)
        self.moments.append(Moment(event, live, cached, len(pool.unused), unaccounted))

    def add(self, name: str, tokens: list[int]) -> None:
        """Take a request and run its prompt, preempting the oldest other one where the pool is full."""
        self.hits[name] = self._tried(name, lambda: self.manager.add(name, tokens))
        hit = f", {self.hits[name]} found" if self.hits[name] else ""
        self.note(f"{name} comes: {len(tokens)}{hit}")
        self.run(name)
        self.note(f"{name} was run")

    def _tried(self, name: str, call: Callable[[], Any]) -> Any:
        while True:
            try:
                return call()
            except PoolExhausted:
                other = next(n for n, one in self.manager.requests.items() if n != name and one.state == "running")
                self.manager.preempt(other, "swap")
                self.preempted += 1
                self.note(f"{other} to the host")

    def run(self, name: str) -> None:
        """Run all tokens that are known, in chunks."""
        one = self.manager.get(name)
        while left := len(one.tokens) - one.length:
            count = self.manager.cut(name, min(left, CHUNK))
            step: Step = self._tried(name, lambda count=count: self.manager.begin([Work(name, count)]))
            self.storage.run(self.manager.copies())
            self.tables.fill(step)
            self._read(name, one.length)
            self._write(step.parts[0])
            self.manager.commit(step)
            self.storage.run(self.manager.copies())
        self._read(name, one.length)

    def decode(self, name: str, tokens: list[int]) -> None:
        """Run a few tokens one by one."""
        for token in tokens:
            self.manager.append(name, [token])
            self.run(name)
        self.note(f"{name} + {len(tokens)}")

    # Values

    def values(self, tokens: list[int], group: Group, layer: int) -> torch.Tensor:
        """Compute the value of each position from all tokens up to it, bf16 [T, 512]."""
        places, state = [], hash((group.name, layer))
        for token in tokens:
            state = hash((state, token))
            places.append(state % BANK)
        return self.bank[torch.tensor(places)]

    def _cells(self, name: str, group: Group, layer: int, positions: list[int]) -> tuple[torch.Tensor, list, int]:
        """Locate values of positions: a layer's bytes of all pages, (page, first byte) of each, bytes to copy."""
        index, data = self.storage.layer(group, layer)
        size = group.layer_bytes // group.entries
        at = [(self.manager.block(name, group, p).pages[index], group.row(p) * size) for p in positions]
        return data, at, min(size, 2 * DIM)

    def _write(self, part: Part) -> None:
        for g in self.manager.groups:
            for layer in range(g.layers):
                made = self.values(part.request.tokens[: part.end], g, layer)
                if g.name == "window" and not layer:
                    index, data = self.storage.layer(g, layer)
                    pages = data[:, : kv_entry.LAYOUT.page_bytes(g.entries)]
                    slots = self.tables["slots.window"][index][: part.count].contiguous()
                    quantize_kv_entries(made[part.start :].to(self.where), pages, g.entries, slots, self.backend)
                    continue
                first = max(part.start, part.end - g.rows) if g.kind == "ring" else part.start
                ends = [p for p in range(first, part.end) if g.kind == "ring" or (p + 1) % g.rate == 0]
                data, at, size = self._cells(part.request.id, g, layer, ends)
                for p, (page, byte) in zip(ends, at, strict=True):
                    data[page, byte : byte + size] = made[p].view(torch.uint8)[:size]

    def _read(self, name: str, length: int) -> None:
        """Compare all that a request's step at ``length`` needs of the tokens before it with values made anew."""
        tokens = self.manager.get(name).tokens[:length]
        for g in self.manager.groups:
            reads = [
                p for p in range(length - g.needed(length), length) if g.kind != "entries" or (p + 1) % g.rate == 0
            ]
            reads = reads[-1:] if g.running else reads
            for layer in range(g.layers) if reads else ():
                made = self.values(tokens, g, layer)[reads]
                self.compared += len(reads)
                if g.name == "window" and not layer:
                    self.wrong += self._gathered_wrong(name, g, reads, made)
                    continue
                data, at, size = self._cells(name, g, layer, reads)
                found = torch.stack([data[page, byte : byte + size] for page, byte in at]).cpu()
                self.wrong += int((found != made.view(torch.uint8)[:, :size]).any(-1).sum())

    def _gathered_wrong(self, name: str, group: Group, reads: list[int], made: torch.Tensor) -> int:
        index, data = self.storage.layer(group, 0)
        blocks = [self.manager.block(name, group, p).pages[index] for p in reads]
        rows = [page * group.entries + group.row(p) for page, p in zip(blocks, reads, strict=True)]
        pages = data[:, : kv_entry.LAYOUT.page_bytes(group.entries)]
        index = torch.tensor(rows, dtype=torch.int32, device=self.where)
        found = kv_gather(pages, group.entries, index, backend=self.backend).cpu()
        want = kv_entry.fake_quantize(made)
        return int((found.view(torch.int16) != want.view(torch.int16)).any(-1).sum())


def _text(count: int, seed: int) -> list[int]:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def story(backend: str, seed: int = 0, fault: str = "none") -> Story:
    """Serve five requests. B shares A's first 150 tokens, C and D fill the pool, A's prompt comes again."""
    injected: AbstractContextManager = faults.inject(FAULTS[fault]) if fault in FAULTS else nullcontext()
    with injected:
        return _story(_Server(backend, seed), seed)


def _story(served: _Server, seed: int) -> Story:
    manager, a = served.manager, _text(200, seed)
    served.note("empty")
    served.add("A", a)
    served.decode("A", [1, 2])
    served.add("B", a[:150] + _text(30, seed + 1))
    manager.finish("A")
    served.note("A is done")
    served.add("C", _text(250, seed + 2))
    served.add("D", _text(200, seed + 3))
    manager.finish("C")
    served.note("C is done")
    if manager.get("B").state == "swapped":
        manager.resume("B")
        served.note("B is back")
    served.decode("B", [3, 4])
    manager.finish("D")
    served.add("A again", a)
    for name in list(manager.requests):
        manager.finish(name)
    served.note("all are done")
    evicted = manager.pool.evictions
    manager.evict()
    served.note("emptied")
    leaked = manager.pool.count - len(manager.pool.unused) + manager.host_pages - len(manager.host_unused)
    rows = []
    for g in manager.groups:
        payload, padding = accounts.block_bytes(g, manager.pool.page_bytes)
        rows.append((g.name, g.kind, g.layers, g.block_tokens, payload, padding, served.most[g.name]))
    counts = served.wrong, served.compared, evicted, served.preempted, leaked
    return Story(served.moments, served.hits, *counts, rows, manager.pool.page_bytes, served.storage.pages.numel())
