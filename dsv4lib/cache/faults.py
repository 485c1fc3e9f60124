"""Inject one fault of a cache manager at a time, by a context manager.

The faults are those that engines shipped.

    with inject("stale_ring"):
        ...

`FAULTS` says of each which public bug it is, what is replaced, and which property of `conformance` finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from dsv4lib.cache import accounting
from dsv4lib.cache.groups import Group, Shape
from dsv4lib.cache.manager import Manager
from dsv4lib.cache.pool import Pool
from dsv4lib.cache.tables import Tables


class Fault(NamedTuple):
    """One fault.

    Attributes:
        bug: where it was met.
        owner, name: the attribute that is replaced.
        make: makes the replacement of the original.
        found_by: the property that finds it.
    """

    bug: str
    owner: Any
    name: str
    make: Callable[[Any], Any]
    found_by: str


@contextmanager
def inject(name: str) -> Iterator[Fault]:
    """Replace what a fault replaces, and put it back."""
    fault = FAULTS[name]
    original = vars(fault.owner)[fault.name]
    setattr(fault.owner, fault.name, fault.make(original))
    try:
        yield fault
    finally:
        setattr(fault.owner, fault.name, original)


def _one_block_more(original: Callable) -> Callable:
    def add_state(self: Manager, request: Any, point: int, rows: Any) -> bool:
        windows = [g for g in self.groups if g.reach]
        found = [self.pool.index.get(self.key(request, g, point - g.needed(point) // 2 - 1)) for g in windows]
        return all(found) and original(self, request, point, rows)

    return add_state


def _without_first(original: Callable) -> Callable:
    def name(self: Pool, block: Any, key: Any) -> None:
        if key[1] > block.group.block_tokens:
            original(self, block, key)

    return name


def _least_rows(original: Callable) -> Callable:
    def row(self: Group, position: int) -> int:
        if self.kind != "ring":
            return original(self, position)
        return position % (self.reach or self.rate * (1 + self.overlap))

    return row


def _neighbour(original: Callable) -> Callable:
    def index(self: Shape, layer: int) -> dict[str, int]:
        return {name: max(0, own - 1) for name, own in original(self, layer).items()}

    return index


def _drafts_named(original: Callable) -> Callable:
    def final(self: Manager, part: Any) -> int:
        one, drafts = part.request, len(part.drafts)
        tokens, chain, named = one.tokens, one.chain.copy(), dict(one.named)
        one.tokens = tokens[: part.start + part.count] + list(part.drafts)
        one.chain.extend(one.tokens, part.end)
        for g in self.groups:
            if g.kind == "entries" and drafts:
                for i in range(one.named[g.name], part.end // g.block_tokens):
                    if i < len(one.held[g.name]):
                        self.pool.name(one.held[g.name][i], self.key(one, g, (i + 1) * g.block_tokens))
        one.tokens, one.chain, one.named = tokens, chain, named
        return original(self, part)

    return final


def _not_shared(original: Callable) -> Callable:
    return lambda self, row, i: None


def _doubled(original: Callable) -> Callable:
    return lambda self, length: original(self, length) // (4 * self.unit) * 4 * self.unit


def _any_time(original: Callable) -> Callable:
    def save(self: Manager, request: Any, group: Group, point: int) -> None:
        written, request.written = request.written, dict.fromkeys(request.written, 0)
        original(self, request, group, point)
        request.written = written

    return save


def _kept_on_the_host(original: Callable) -> Callable:
    def swap_in(self: Manager, request: Any) -> None:
        unused = list(self.host_unused)
        original(self, request)
        self.host_unused[:] = unused

    return swap_in


FAULTS = {
    "reads_one_block_more": Fault(
        "vllm #42258: what is read on a hit and what is written for it are disjoint",
        Manager,
        "_add_state",
        _one_block_more,
        "check_hits",
    ),
    "first_block_lost": Fault("vllm #42948: keys of first blocks are lost", Pool, "name", _without_first, "check_hits"),
    "stale_ring": Fault(
        "ATOM #1417: a hit goes on with the ring of another request",
        Manager,
        "_restore",
        lambda original: lambda self, saved, ring: None,
        "check_edges",
    ),
    "coarse_hits": Fault("vllm-ascend #16270: short prompts never hit", Manager, "_last_point", _doubled, "check_hits"),
    "rows_without_drafts": Fault(
        "vllm-ascend #9111, mlx-vlm #1225: drafts overwrite rows of the state that a rejection still needs",
        Group,
        "row",
        _least_rows,
        "check_accepts",
    ),
    "neighbours_layer": Fault(
        "ds4 #411: a layer uses its neighbour's cache", Shape, "index", _neighbour, "check_edges"
    ),
    "first_count_for_all": Fault(
        "llama.cpp #26741: all requests of a batch go back by the first one's count",
        Manager,
        "_accepted",
        lambda original: lambda self, counts, number: counts[0],
        "check_accepts",
    ),
    "drafts_named": Fault("rule: hash only committed tokens", Manager, "_final", _drafts_named, "check_rejected"),
    "fork_writes_shared": Fault("copy on write is left out", Manager, "_unshare", _not_shared, "run_machine"),
    "saves_overwritten_rows": Fault(
        "a state is saved after later rows overwrote it", Manager, "_save_ring", _any_time, "check_uncut"
    ),
    "kept_on_the_host": Fault(
        "rule: a request that comes back gives its host pages back",
        Manager,
        "_swap_in",
        _kept_on_the_host,
        "run_machine",
    ),
    "padding_not_counted": Fault(
        "vllm #51041: capacity by values, not by pages",
        accounting,
        "block_bytes",
        lambda original: lambda group, page_bytes: (group.payload_bytes, 0),
        "run_machine",
    ),
    "padding_keeps_tokens": Fault(
        "vllm #56389: padded rows hold what an earlier step had there",
        Tables,
        "_clear",
        lambda original: lambda self, flat: None,
        "test_tables",
    ),
    "captured_lengths": Fault(
        "vllm PR #52492: a graph keeps what the captured step had",
        Tables,
        "_send",
        lambda original: lambda self, flat: setattr(self, "device", flat.clone()),
        "test_tables",
    ),
    "one_staging_buffer": Fault(
        "vllm #41834: a buffer is used again before its copy is over",
        Tables,
        "_staging",
        lambda original: lambda self: self.stagings[0].numpy,
        "test_tables",
    ),
}
