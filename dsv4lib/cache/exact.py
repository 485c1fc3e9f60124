"""Model a DeepSeek-V4 exactly in integers. Every value is a hash of all that the real value depends on.

A stale, missing or foreign value anywhere changes the hash of every token that reads it, so a comparison with `Oracle`
finds it. Layers, windows, compressors, indexer and the MTP layer read and write a `Store` at the positions that the
real ones do; the numbers alone are hashes.
"""

from __future__ import annotations

from typing import Protocol

from dsv4lib.cache.groups import Shape
from dsv4lib.config import LayerKind

PICKS = 2  # entries that the indexer selects


class Store(Protocol):
    """Where values are. By group, layer of the model, and position (of entries: their number)."""

    def get(self, group: str, layer: int, index: int) -> int:
        """Read a value."""

    def put(self, group: str, layer: int, index: int, value: int) -> None:
        """Write a value."""


def run_token(shape: Shape, token: int, position: int, store: Store) -> int:
    """Run one token through all layers; returns its last hidden value."""
    x = hash((0, token))
    for layer, kind in enumerate(shape.kinds):
        store.put("window", layer, position, hash((x, layer, 1)))
        seen = _window(shape, "window", layer, position, store)
        if kind is LayerKind.CSA:
            for name in ("csa", "keys"):
                _compress(name, layer, x, position, shape.csa_rate, True, store)
            count = (position + 1) // shape.csa_rate
            keys = [store.get("keys", layer, s) for s in range(count)]
            picks = sorted(range(count), key=lambda s, x=x, keys=keys: hash((x, keys[s])))[:PICKS]
            seen += keys + [store.get("csa", layer, s) for s in picks]
        elif kind is LayerKind.HCA:
            _compress("hca", layer, x, position, shape.hca_rate, False, store)
            seen += [store.get("hca", layer, s) for s in range((position + 1) // shape.hca_rate)]
        x = hash((x, layer, *seen))
    return x


def run_draft_layer(shape: Shape, hidden: int, following: int, position: int, store: Store) -> int:
    """Run the MTP layer at a position, with the token after it; returns its value."""
    at = len(shape.kinds)
    store.put("mtp_window", at, position, hash((hidden, following, 2)))
    return hash((hidden, following, *_window(shape, "mtp_window", at, position, store)))


def _window(shape: Shape, group: str, layer: int, position: int, store: Store) -> list[int]:
    return [store.get(group, layer, p) for p in range(max(0, position - shape.window + 1), position + 1)]


def _compress(name: str, layer: int, x: int, position: int, rate: int, overlap: bool, store: Store) -> None:
    state = f"{name}_state"
    store.put(state, layer, position, hash((x, name, position % rate)))
    if (position + 1) % rate == 0:
        first = max(0, position + 1 - rate * (1 + overlap))
        rows = [store.get(state, layer, p) for p in range(first, position + 1)]
        store.put(name, layer, position // rate, hash((name, position // rate, *rows)))


class _Node:
    """What all tokens up to one give: values so far, hidden values, values of the MTP layer."""

    def __init__(self, values: dict, hidden: list[int], drafts: list[int]):
        self.values, self.hidden, self.drafts = values, hidden, drafts
        self.next: dict[int, _Node] = {}

    def get(self, group: str, layer: int, index: int) -> int:
        """Read a value."""
        return self.values[group, layer, index]

    def put(self, group: str, layer: int, index: int, value: int) -> None:
        """Write a value."""
        self.values[group, layer, index] = value


class Oracle:
    """Recompute sequences from their first token, without any cache.

    Prefixes are computed once.
    """

    def __init__(self, shape: Shape):
        self.shape, self.root = shape, _Node({}, [], [])

    def run(self, tokens: list[int]) -> tuple[list[int], list[int]]:
        """Return the hidden values of all tokens and the values of the MTP layer.

        The MTP layer has values of all tokens but the last.
        """
        node = self.root
        for position, token in enumerate(tokens):
            if token not in node.next:
                new = _Node(dict(node.values), list(node.hidden), list(node.drafts))
                new.hidden.append(run_token(self.shape, token, position, new))
                if position and self.shape.mtp:
                    new.drafts.append(run_draft_layer(self.shape, new.hidden[-2], token, position - 1, new))
                node.next[token] = new
            node = node.next[token]
        return node.hidden, node.drafts
