"""Define a row of the bench of ops. It has inputs, providers (ours and the peers'), and the check before timing.

The module `bench` beside each op lists its rows in `rows()`. The harness makes the inputs, checks every provider
against the reference, and only then times them, alternating.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Given = Mapping[str, Any]  # inputs by name, tensors on the GPU; normals with scales that differ by row
Call = Callable[[], None]  # queues work on the current stream: no host sync, outputs allocated before, graph-safe


class Absent(Exception):
    """A peer cannot run here. The message is the reason that the table shows (package missing, sm_100 only, ...)."""


@dataclass(frozen=True)
class Provider:
    """One implementation of a row.

    Attributes:
        name: "ours" (a second one: "ours, ..."), or a peer as the table calls it ("vLLM Triton", "torch.compile", ...).
        bind: allocates outputs and returns the call and its outputs by name, under the names that `Row.check` reads.
            Outputs are looked up by name after a call: a mapping may convert another layout then, outside
            the time (`peers.Late`). Raises `Absent` if it cannot run here.
        hosted: the call is what a caller would write, so its host time counts; False where a recording is replayed.
    """

    name: str
    bind: Callable[[Given], tuple[Call, Mapping[str, torch.Tensor]]]
    hosted: bool = True


@dataclass(frozen=True)
class Row:
    """One shape of one op.

    Attributes:
        op: the op's one name (`mhc`, `topk`, ...).
        shape: the rest of the row's name, "Flash T 128".
        bytes: HBM bytes that the work needs at least, each input read once, each output written once.
        flops: of the useful work, 0 where none count.
        given: makes the inputs from a seeded generator of the device.
        check: raises AssertionError, naming what differs, unless a provider's outputs are right for these inputs.
        providers: ours first, then the peers.
        goal: bound of (our time / best peer's time), both with a cold L2; None: nothing was promised.
        copy_goal: bound from below of (time of a copy of the same bytes / our time); None: nothing was promised.
        no_cold: why its calls have no time with a cold L2, only as nodes of a graph and of the host; "": they have one.
    """

    op: str
    shape: str
    bytes: int
    flops: int
    given: Callable[[torch.Generator], Given]
    check: Callable[[Given, Mapping[str, torch.Tensor]], None]
    providers: tuple[Provider, ...]
    goal: float | None = None
    copy_goal: float | None = None
    no_cold: str = ""


def tensors(given: Given) -> dict[str, torch.Tensor]:
    """Return every tensor among the inputs by name. Those in tuples and lists are "name[0]"."""
    found = {}
    for key, value in given.items():
        parts = {key: value} if not isinstance(value, tuple | list) else {f"{key}[{i}]": x for i, x in enumerate(value)}
        found |= {name: x for name, x in parts.items() if isinstance(x, torch.Tensor)}
    return found
