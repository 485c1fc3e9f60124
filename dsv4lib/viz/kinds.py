"""Give one colour to one kind of thing, on every page: the only table from kinds to colours.

The hue says whose work it is: threads blue, copies green, the tensor core purple, waiting orange, what is wrong
vermilion. Tensors and parts of the model have rows of their own. A colour may serve two kinds that no figure shows
together.

A name that is no kind of the table takes a colour by its letters, not by its place: `colours` gives the same set of
names the same colours in any order.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable

from dsv4lib.errors import ArgumentError
from dsv4lib.viz.style import GRID, PALETTE

BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, YELLOW, GREY = PALETTE
PALE_PURPLE, DARK_PURPLE, DEEP_PURPLE = "#e9cbdd", "#9c4f80", "#5e2a4c"
PALE_SKY, PALE_YELLOW = "#bfe1f6", "#f8f2a8"

TABLE = {
    # what a unit of an SM does, and what it did to a memory
    "runs": BLUE,
    "stored": BLUE,
    "written by threads": BLUE,
    "loaded by threads": SKY,
    "read by threads": SKY,
    "waits: mbarrier": ORANGE,
    "a warp waits for it": ORANGE,
    "waits: barrier": GRID,
    "copy in flight": GREEN,
    "copied": GREEN,
    "written by TMA": GREEN,
    "written by bulk copies": "#7fcfb9",
    "written by cp.async": "#c5eadf",
    "read by TMA": YELLOW,
    "read by bulk copies": PALE_YELLOW,
    "read by tcgen05.cp": DEEP_PURPLE,
    "MMA": PURPLE,
    "written by an MMA": PURPLE,
    "read as A": DARK_PURPLE,
    "read as B": PALE_PURPLE,
    "commit": DEEP_PURPLE,
    "even phase": SKY,
    "odd phase": PALE_SKY,
    "wrong": VERMILION,
    "bound": VERMILION,
    "marked thread": VERMILION,
    "right": BLUE,
    "ours": BLUE,
    "kernels": BLUE,
    "oracle": GREY,
    "others": GREY,
    "loaded once": BLUE,
    "whole": SKY,
    "inner": BLUE,
    "other": ORANGE,
    # units, of instructions
    "tensor core": PURPLE,
    "TMEM": SKY,
    "TMA": GREEN,
    "barriers": ORANGE,
    "warp": BLUE,
    "memory": YELLOW,
    "scalar": GREY,
    # tensors of a product and where they lie
    "Q": SKY,
    "KV": PURPLE,
    "S": BLUE,
    "P": GREEN,
    "O": ORANGE,
    "X": SKY,
    "W": PURPLE,
    "D": ORANGE,
    "scales of W": YELLOW,
    "scales of X": PALE_YELLOW,
    "exchange": GREY,
    "rounding": GRID,
    # layers, their parts and the kernels of a layer
    "SWA": SKY,
    "CSA": BLUE,
    "HCA": ORANGE,
    "indexer keys": PURPLE,
    "csa_state": GREEN,
    "keys_state": "#7fcfb9",
    "hca_state": "#c5eadf",
    "cached": GREY,
    "entry": BLUE,
    "entry not selected": YELLOW,
    "own window": BLUE,
    "window before": ORANGE,
    "newest key": VERMILION,
    "mHC": PURPLE,
    "attention": BLUE,
    "experts": GREEN,
    "choice": YELLOW,
    "projection": SKY,
    "norm": GRID,
    # tokens of speculation
    "old": GREY,
    "known": BLUE,
    "target": BLUE,
    "draft": ORANGE,
    "accepted": GREEN,
    "rejected": VERMILION,
    # phases of experts on several devices
    "routes and counts": YELLOW,
    "tokens pulled": GREEN,
    "L1": PURPLE,
    "L2": DARK_PURPLE,
    "results returned": SKY,
    # addends of a time
    "tiles of keys": BLUE,
    "starts": SKY,
    "first wave": BLUE,
    "later waves": ORANGE,
    "combine": ORANGE,
    # numbers over runs
    "a run": BLUE,
    "noise": SKY,
    "worse": VERMILION,
    "better": GREEN,
    "open": YELLOW,
    "passed": GREEN,
    "failed": VERMILION,
    "error": PURPLE,
    "skipped": SKY,
    "not judged": GREY,
    # verdicts on what a GPU said
    "same": GREEN,
    "rounds differently": SKY,
    "differs": VERMILION,
    "crashed": PURPLE,
    "hung": ORANGE,
    "refused": YELLOW,
    "damaged": DEEP_PURPLE,
    "another kernel": GREY,
    "not run": GRID,
    # steps of a diagram
    "given": SKY,
    "product": PURPLE,
    "transform": ORANGE,
    "storage": BLUE,
    "result": GREEN,
}
_SAME = {  # other names of a kind
    "kv": "KV", "K^T": "KV", "V (= K)": "KV", "K": "KV", "V": "KV", "A": "X", "B": "W", "C": "D", "C tile": "D",
    "sums": "D", "accumulator": "D", "X^T": "X", "W scales": "scales of W", "X scales": "scales of X",
    "window": "SWA", "csa": "CSA", "hca": "HCA", "keys": "indexer keys", "CSA entries": "CSA", "HCA entries": "HCA",
    "CSA indexer keys": "indexer keys", "entries": "entry", "window keys": "SWA", "row exchange": "exchange",
    "score exchange": "exchange", "scores": "S", "S, P": "S",
}  # fmt: skip
_SPARE = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, GREY, YELLOW)  # in the order of their contrast with paper


def kind_of(name: str) -> str | None:
    """Find the kind that a name is of, whatever number or comma follows; None: of no kind in the table."""
    for text in (name, re.sub(r"[\s\d.,-]+$", "", name), name.split(",")[0]):
        text = _SAME.get(text, text)
        if text in TABLE:
            return text
    return None


def colour(kind: str) -> str:
    """Return the colour of a kind.

    Raises:
        ArgumentError: it is not in the table.
    """
    found = kind_of(kind)
    if found is None:
        raise ArgumentError("kind", kind, "one of " + ", ".join(TABLE))
    return TABLE[found]


def colours(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each name: its kind's, else one that its letters pick among those not taken.

    The order of the names does not matter.
    """
    known = {name: kind_of(name) for name in dict.fromkeys(names)}
    out = {name: TABLE[kind] for name, kind in known.items() if kind is not None}
    for name in sorted(name for name, kind in known.items() if kind is None):
        start = zlib.crc32(name.encode()) % 6  # grey and yellow last
        order = [*_SPARE[start:6], *_SPARE[:start], *_SPARE[6:]]
        out[name] = next((c for c in order if c not in out.values()), order[0])
    return {name: out[name] for name in known}


def number(i: int) -> str:
    """Return the colour of a thing that is its number, such as a group of banks."""
    return PALETTE[i % len(PALETTE)]
