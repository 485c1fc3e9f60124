"""Capture what a function launches as a CUDA graph that can be replayed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

WARM = 2  # calls before a capture: ops compile at their first and plan at their second


class Captured(NamedTuple):
    """A graph: ``replay`` runs it again, ``out`` is what it writes, at one address."""

    replay: Callable[[], None]
    out: Tensor


def capture(run: Callable[[], Tensor]) -> Captured:
    """Capture what ``run`` launches on the current CUDA device.

    Warm-up runs first, on the stream of the capture: what ops keep for a stream (zeros that a call leaves as zeros) is
    there then, where a capture would record that they are cleared. Graphs may share it: replay one at a time.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = run()
    return Captured(graph.replay, out)


class Beside:
    """Queue launches as a branch of the graph that is captured, beside what follows them. Elsewhere they are in order.

        branch = Beside(x.device)
        with branch:
            y = f(x)
        z = g(x)
        branch.join()       before y is read

    A branch starts after all that was queued before it.

    Args:
        device: whose stream may be captured. allowed: False: in order.
    """

    _streams: dict[torch.device, torch.cuda.Stream] = {}

    def __init__(self, device: torch.device, allowed: bool = True) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._inside: AbstractContextManager | None = None
        self._device = device
        if allowed and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            self._stream = self._streams[device]

    @property
    def apart(self) -> bool:
        """Tell whether there is a branch."""
        return self._stream is not None

    def __enter__(self) -> Beside:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            self._inside = torch.cuda.stream(self._stream)
            self._inside.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._inside is not None:
            self._inside.__exit__(*error)
            self._inside = None

    def join(self) -> None:
        """Have what follows wait for the branch."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
