"""Make the tables that kernels read, without waiting for the device.

They are device tensors of fixed addresses.

One int32 buffer holds all tables of a step; it is filled in pinned memory and copied once. Several pinned buffers take
turns, each with an event, so the host waits only if it is `BUFFERS` steps ahead. Parts of a group are its pages of a
block: layer l reads part l // layers_per_page, through the view of `Storage.layer`.

Padded rows: token 0, position 0, request -1, slot -1, length 0, no rows at start -1 and place -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from dsv4lib.cache.groups import Group
from dsv4lib.cache.manager import Manager
from dsv4lib.cache.request import Copy, Step
from dsv4lib.errors import ArgumentError

BUFFERS = 3
ALIGN = 4  # int32 of a table's alignment: kernels read 16 bytes at a time


class Staging:
    """A host buffer, pinned for a GPU, and the copy from it that may be under way."""

    def __init__(self, size: int, device: torch.device):
        self.host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")  # gaps between tables, too
        self.numpy = self.host.numpy()
        self.event = torch.cuda.Event() if device.type == "cuda" else None

    def wait(self) -> None:
        """Wait until an earlier copy is over."""
        if self.event is not None:
            self.event.synchronize()

    def copy_to(self, target: torch.Tensor) -> None:
        """Copy to the device in stream order."""
        target.copy_(self.host, non_blocking=True)
        if self.event is not None:
            self.event.record()


class Field(NamedTuple):
    """A table's place in the buffer, its shape and what padding is."""

    offset: int
    shape: tuple[int, ...]
    padding: int


class Tables:
    """Hold the tables of a step's requests and tokens.

    A step has at most `requests` requests and `tokens` tokens, up to `positions` positions.

    `groups`: those that have tables; None: all.

    Fields, int32: tokens, positions, request_ids ``[T]``; lengths, starts ``[B]`` (lengths count the step's tokens);
    of each entries or window group `slots.<group>` ``[parts, T]`` (page * entries + entry of what a token writes or
    closes, or -1) and `blocks.<group>` ``[parts, B, M]`` (pages by block; a window's block i at i mod M); of each ring
    `requests.<group>` ``[parts, B, 4]``, as `ops.common.requests.plan` makes it, the place a page.
    """

    def __init__(
        self,
        manager: Manager,
        requests: int,
        tokens: int,
        positions: int,
        device: torch.device | str = "cpu",
        groups: Sequence[Group] | None = None,
    ):
        for name, value in (("requests", requests), ("tokens", tokens), ("positions", positions)):
            if value < 1:
                raise ArgumentError(name, value, "positive")
        self.manager, self.requests, self.tokens, self.positions = manager, requests, tokens, positions
        self.groups = manager.groups if groups is None else tuple(groups)
        self.fields: dict[str, Field] = {}
        self.size = 0
        for name, count, padding in (("tokens", tokens, 0), ("positions", tokens, 0), ("request_ids", tokens, -1)):
            self._field(name, (count,), padding)
        self._field("lengths", (requests,), 0)
        self._field("starts", (requests,), -1)
        for g in self.groups:
            parts = g.pages(manager.pool.page_bytes)
            if g.kind == "ring":
                self._field(f"requests.{g.name}", (parts, requests, 4), -1)
            else:
                self._field(f"slots.{g.name}", (parts, tokens), -1)
                self._field(f"blocks.{g.name}", (parts, requests, self.width(g)), -1)
        # Negative before the first step: no request, no slot and no key, so that a graph may be captured by then.
        self.device = torch.full((self.size,), -1, dtype=torch.int32, device=device)
        self.stagings = [Staging(self.size, self.device.device) for _ in range(BUFFERS)]
        self.turn = 0

    def width(self, group: Group) -> int:
        """Count the blocks of a request in a table."""
        span = self.positions
        if group.kind == "window":
            span = min(span, group.reach + self.tokens + group.reserve + group.block_tokens)
        return -(-span // group.block_tokens)

    def _field(self, name: str, shape: tuple[int, ...], padding: int) -> None:
        self.fields[name] = Field(self.size, shape, padding)
        self.size += -(-int(np.prod(shape)) // ALIGN) * ALIGN

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a table on the device: always the same memory."""
        field = self.fields[name]
        return self.device[field.offset : field.offset + int(np.prod(field.shape))].view(field.shape)

    def _staging(self) -> np.ndarray:
        self.turn = (self.turn + 1) % BUFFERS
        self.stagings[self.turn].wait()
        return self.stagings[self.turn].numpy

    def _clear(self, flat: np.ndarray) -> None:
        for field in self.fields.values():
            flat[field.offset : field.offset + int(np.prod(field.shape))] = field.padding

    def _send(self, flat: torch.Tensor) -> None:
        self.stagings[self.turn].copy_to(self.device)

    def fill(self, step: Step) -> None:
        """Fill the tables for a step and start their copy.

        Raises:
            ArgumentError: more requests, tokens or positions than there are rows.
        """
        last = max((part.end for part in step.parts), default=0)
        for name, value, most in (
            ("requests", len(step.parts), self.requests),
            ("tokens", step.tokens, self.tokens),
            ("positions", last, self.positions),
        ):
            if value > most:
                raise ArgumentError(name, value, f"{most} or fewer")
        flat = self._staging()
        self._clear(flat)
        views = {
            name: flat[f.offset : f.offset + int(np.prod(f.shape))].reshape(f.shape) for name, f in self.fields.items()
        }
        row = 0
        for number, part in enumerate(step.parts):
            count = part.end - part.start
            own, positions = slice(row, row + count), np.arange(part.start, part.end)
            views["tokens"][own], views["positions"][own], views["request_ids"][own] = part.tokens, positions, number
            views["lengths"][number], views["starts"][number] = part.end, part.start
            for g in self.groups:
                held = part.request.held[g.name]
                if g.kind == "ring":
                    plan = views[f"requests.{g.name}"]
                    plan[:, number, :3] = row, count, part.start
                    plan[:, number, 3] = held[0].pages
                    continue
                first = next((i for i, block in enumerate(held) if block), len(held))
                pages = np.array([block.pages for block in held[first:]], dtype=np.int32)
                width = self.width(g)
                views[f"blocks.{g.name}"][:, number, np.arange(first, len(held)) % width] = pages.T
                there = (positions + 1) % g.rate == 0
                there &= positions < len(held) * g.block_tokens  # the last token's value waits for the token ahead
                at = positions[there]
                slots = pages.T[:, at // g.block_tokens - first] * g.entries + at % g.block_tokens // g.rate
                views[f"slots.{g.name}"][:, np.arange(row, row + count)[there]] = slots
            row += count
        self._send(torch.from_numpy(flat))


def read_slots(blocks: torch.Tensor, request_ids: torch.Tensor, values: torch.Tensor, group: Group) -> torch.Tensor:
    """Turn positions of a window, or numbers of entries, into slots, on the device.

    Args:
        blocks: int32 ``[B, M]``, one part of a table `blocks.<group>`.
        request_ids: int32 ``[T]``, negative: padding.
        values: int32 ``[T, K]``, entry numbers (picks of `topk`) or positions; negative: none.
        group: whose.

    Returns:
        int32 ``[T, K]``: page * entries + entry; -1 for none.
    """
    each = group.block_tokens // group.rate
    there = (values >= 0) & (request_ids >= 0)[:, None]
    safe = torch.where(there, values, 0).long()
    pages = blocks[request_ids.clamp_min(0).long()[:, None], safe // each % blocks.shape[1]]
    return torch.where(there & (pages >= 0), pages * group.entries + safe % each, -1).to(torch.int32)


def window_positions(positions: torch.Tensor, reach: int) -> torch.Tensor:
    """List the positions that tokens read of a window.

    Tokens are at ``[T]``; int32 ``[T, reach]``, -1 before the first.
    """
    back = torch.arange(reach - 1, -1, -1, device=positions.device, dtype=positions.dtype)
    return (positions[:, None] - back).clamp_min(-1)


class Storage:
    """The pool's bytes on a device, and the host's pages, pinned for a GPU."""

    def __init__(self, manager: Manager, device: torch.device | str = "cpu"):
        pool = manager.pool
        self.manager, self.device = manager, torch.device(device)
        self.pages = torch.zeros(pool.count, pool.page_bytes, dtype=torch.uint8, device=device)
        pinned = self.device.type == "cuda" and manager.host_pages > 0
        self.host = torch.zeros(manager.host_pages, pool.page_bytes, dtype=torch.uint8, pin_memory=pinned)

    def layer(self, group: Group, layer: int) -> tuple[int, torch.Tensor]:
        """Return a layer's part of its group and its bytes of all pages.

        The bytes are uint8 ``[P, bytes]``.
        """
        per_page = group.layers_per_page(self.manager.pool.page_bytes)
        offset = layer % per_page * group.layer_bytes
        return layer // per_page, self.pages[:, offset : offset + group.layer_bytes]

    def run(self, copies: list[Copy]) -> None:
        """Make copies in their order, on the current stream."""
        spaces = {"device": (self.pages, self.pages), "out": (self.pages, self.host), "in": (self.host, self.pages)}
        for kind, source, target in copies:
            spaces[kind][1][target].copy_(spaces[kind][0][source], non_blocking=True)
