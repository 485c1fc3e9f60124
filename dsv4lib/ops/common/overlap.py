"""Refuse outputs in memory that a launch reads or writes elsewhere. Every CTA would see what another has written.

An output whose own elements share memory (an expanded one) is refused too: which of them stays is not defined. Inputs
may be so.

Two tensors overlap if they have a byte in common. The answer is exact where their extents are apart, and for rows of
the same pitch at other columns of one buffer (of a fused projection, of pages that layers share). Anything else whose
extents have bytes in common counts as overlapping.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from dsv4lib.errors import ArgumentError


class Span(NamedTuple):
    """Memory of a tensor: first byte and bytes to the last. Rows have ``block`` bytes each, ``pitch`` apart.

    pitch 0: it is no such matrix.
    """

    start: int
    size: int
    block: int
    pitch: int


def span(x: Tensor) -> Span:
    """Return the span of a strided tensor."""
    item, start = x.element_size(), x.data_ptr()
    if x.numel() == 0:
        return Span(start, 0, 0, 0)
    dims = sorted((s, n) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1 and s)  # the closest first
    size = block = item
    for stride, extent in dims:
        size += (extent - 1) * stride * item
    rest = list(dims)
    while rest and rest[0][0] * item == block:  # what follows without a gap belongs to the block
        block *= rest.pop(0)[1]
    if not rest:
        return Span(start, size, size, size)
    pitch, reach = rest[0][0] * item, rest[0][0] * item * rest[0][1]
    for stride, extent in rest[1:]:  # rows of rows: whole multiples of the pitch
        if stride * item % pitch or stride * item < reach:
            return Span(start, size, block, 0)
        reach = stride * item * extent
    return Span(start, size, block, pitch)


def meets_itself(x: Tensor) -> bool:
    """Return whether two elements of a tensor have, or may have, memory in common.

    Each dimension must step over all that the closer ones reach; anything else counts as overlapping.
    """
    reach = 0  # of the dimensions so far, in elements from the first to the last
    for stride, extent in sorted((s, n) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1):
        if stride <= reach:
            return x.numel() > 0
        reach += (extent - 1) * stride
    return False


def meet(a: Span, b: Span) -> bool:
    """Return whether two spans have, or may have, a byte in common."""
    if not a.size or not b.size or a.start + a.size <= b.start or b.start + b.size <= a.start:
        return False
    rows = [x for x in (a, b) if x.block < x.size]
    pitch = rows[0].pitch if rows else 0
    if not pitch or any(x.pitch != pitch for x in rows) or max(a.block, b.block) > pitch:
        return True
    ahead = (b.start - a.start) % pitch  # of b's columns, on a circle of one pitch
    return ahead < a.block or ahead + b.block > pitch


class Overlaps:
    """What may lie where, of the tensors of an op.

    Args:
        names: of all arguments. written: places of the outputs.
        in_place: (output, input) that may be the same memory: the kernel reads all of an element's row before it
            writes there.
        one_pool: sets of arguments that are pages or rows by number. Those of different sets may be of one pool, the
            same pitch apart: which of them a launch touches is in its tables, and the caller's to keep apart.
    """

    def __init__(
        self,
        names: Sequence[str],
        written: Sequence[int],
        in_place: Iterable[tuple[int, int]] = (),
        one_pool: Iterable[Iterable[int]] = (),
    ):
        self._names, self._written, self._in_place = names, written, frozenset(in_place)
        self._of_pool = {place: number for number, places in enumerate(one_pool) for place in places}

    def pairs(self, args: Sequence[Any]) -> list[tuple[int, int]]:
        """Places of the tensors that must not overlap, an output first."""
        tensors = [i for i, x in enumerate(args) if isinstance(x, Tensor) and x.numel()]
        found = []
        for out in (i for i in tensors if i in self._written):
            found += [(out, i) for i in tensors if i != out and not (i in self._written and i < out)]
        return found

    def _pages(self, a: int, b: int) -> bool:
        return a in self._of_pool and b in self._of_pool and self._of_pool[a] != self._of_pool[b]

    def check(self, args: Sequence[Any]) -> None:
        """Refuse outputs that overlap.

        Raises:
            ArgumentError: an output overlaps another argument, which the op does not allow, or itself.
        """
        for out in self._written:
            x = args[out]
            if isinstance(x, Tensor) and not x.is_contiguous() and meets_itself(x):
                allowed = "a stride past what closer dimensions reach: elements with memory of their own"
                raise ArgumentError(f"{self._names[out]}.stride()", x.stride(), allowed)
        spans: dict[int, Span] = {}
        for out, other in self.pairs(args):
            a, b = args[out], args[other]
            if a.device != b.device:
                continue
            for i in (out, other):
                if i not in spans:
                    spans[i] = span(args[i])
            if not meet(spans[out], spans[other]):
                continue
            if self._pages(out, other) and 0 < spans[out].pitch == spans[other].pitch:
                continue
            same = a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.shape == b.shape
            if same and a.dtype == b.dtype and (out, other) in self._in_place:
                continue
            late, early = (other, out) if other in self._written else (out, other)
            raise ArgumentError(self._names[late], f"memory of {self._names[early]}", "memory of its own")
