"""Capture what a function launches as a CUDA graph that can be replayed."""

from __future__ import annotations

from collections.abc import Callable
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
