"""Keep CUDA graphs of decode steps by batch size, and report the memory that each took."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common.graph_capture import Captured, capture

SIZES = 1, 2, 4, 8, 16, 32, 64


class GraphMemory(NamedTuple):
    """Memory of a graph.

    Attributes:
        size: requests. captured: whether it has been. held_bytes: that torch's allocator took for it while it was
            captured. out_bytes: of its result.
    """

    size: int
    captured: bool
    held_bytes: int
    out_bytes: int


def held_bytes() -> int:
    """Count the bytes that torch's CUDA allocator needs to hold; 0 without a GPU.

    What is garbage or free goes first, as it does when a capture begins: the difference is then of the graph alone.
    """
    if not torch.cuda.is_available():
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


class CudaGraphPool:
    """Graphs of decode steps: a batch runs in the smallest that fits, or eagerly if none does.

    Args:
        make: makes of a size what is captured: a function that launches a whole step and returns its result.
        sizes: batch sizes, ascending. captured_by: captures; a test's stand-in where there is no GPU.
        held: counts bytes before and after a capture.

    Raises:
        ArgumentError: sizes that are not ascending.
    """

    def __init__(
        self,
        make: Callable[[int], Callable[[], Tensor]],
        sizes: Sequence[int] = SIZES,
        captured_by: Callable[[Callable[[], Tensor]], Captured] = capture,
        held: Callable[[], int] = held_bytes,
    ) -> None:
        if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
            raise ArgumentError("sizes", tuple(sizes), "ascending batch sizes, at least one")
        self.make, self.sizes, self.captured_by, self.held = make, tuple(sizes), captured_by, held
        self.graphs: dict[int, Captured] = {}
        self.memory: dict[int, int] = {}

    def size_of(self, batch: int) -> int | None:
        """Return the smallest size for a batch; None: none fits, run it eagerly."""
        return next((size for size in self.sizes if 1 <= batch <= size), None)

    def graph(self, size: int) -> Captured:
        """Return the graph of a size, captured when it is first wanted."""
        if size not in self.sizes:
            raise ArgumentError("size", size, f"one of {self.sizes}")
        if size not in self.graphs:
            before = self.held()
            self.graphs[size] = self.captured_by(self.make(size))
            self.memory[size] = self.held() - before
        return self.graphs[size]

    def capture_all(self) -> None:
        """Capture every size, the largest first, so that smaller ones find its memory free."""
        for size in reversed(self.sizes):
            self.graph(size)

    def replay(self, batch: int) -> Tensor | None:
        """Replay the graph of a batch, whose metadata has been refreshed. Returns its rows; None: run it eagerly."""
        size = self.size_of(batch)
        if size is None:
            return None
        graph = self.graph(size)
        graph.replay()
        return graph.out[:batch]

    def report(self) -> list[GraphMemory]:
        """List sizes and their memory."""
        found = []
        for size in self.sizes:
            out = self.graphs[size].out.nbytes if size in self.graphs else 0
            found.append(GraphMemory(size, size in self.graphs, self.memory.get(size, 0), out))
        return found
