"""Read ``shape:stride`` as a person types it. It is strict and bounded; an error says what is accepted.

Nothing is evaluated as Python: the text is tokens of digits, commas and parentheses.
Source: CuTe's notation ``S<bits,base,shift> o offset o shape:stride``.
"""

from __future__ import annotations

import math
import re
from typing import Any

from dsv4lib.errors import ArgumentError

MAX_ELEMENTS = 1 << 17  # of one grid; a 128 x 512 accumulator has 65,536
_LAYOUT = re.compile(
    r"\s*(?:S<\s*(\d+)\s*,\s*(\d+)\s*,\s*(-?\d+)\s*>\s*o\s*(?:(\d+)\s*o\s*)?)?([\d(),\s]+):([\d(),\s]+)"
)
_HELP = "shape:stride such as '(8,8):(8,1)', optionally after a swizzle: 'S<3,4,3> o 0 o (8,64):(64,1)'"


def _nested(name: str, whole: str, text: str) -> Any:
    """Nested tuples of non-negative integers from their text, nothing else."""
    tokens = re.findall(r"\d+|[(),]", text)

    def parse() -> Any:
        token = tokens.pop(0) if tokens else ""
        if token.isdigit() and len(token) <= 12:
            return int(token)
        if token != "(":
            raise ArgumentError(name, whole, _HELP)
        items = [parse()]
        while tokens and tokens[0] == ",":
            tokens.pop(0)
            items.append(parse())
        if not tokens or tokens.pop(0) != ")":
            raise ArgumentError(name, whole, _HELP)
        return tuple(items)

    if text.count("(") > 32:
        raise ArgumentError(name, whole, "at most 32 pairs of parentheses")
    value = parse()
    if tokens:
        raise ArgumentError(name, whole, _HELP)
    return value


def _congruent(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_congruent, a, b))
    return isinstance(a, int) and isinstance(b, int)


def size_of(shape: Any) -> int:
    """Return the number of elements of a nested shape."""
    return math.prod(map(size_of, shape)) if isinstance(shape, tuple) else shape


def parse_layout(name: str, text: Any) -> tuple[Any, Any, tuple[int, int, int] | None, int]:
    """Return (shape, stride, swizzle, shift) of a layout's text.

    ArgumentError for anything that is not one.
    """
    found = _LAYOUT.fullmatch(text) if isinstance(text, str) and len(text) <= 400 else None
    if found is None:
        raise ArgumentError(name, text, _HELP)
    shape, stride = (_nested(name, text, part) for part in found.groups()[4:])
    if not _congruent(shape, stride):
        raise ArgumentError(name, text, "a stride with the same nesting as the shape")
    if not 1 <= size_of(shape) <= MAX_ELEMENTS:
        raise ArgumentError(name, text, f"a shape of 1 to {MAX_ELEMENTS} elements, not {size_of(shape)}")
    swizzle, shift = None, int(found[4] or 0)
    if found[1] is not None:
        bits, base, distance = (int(g) for g in found.groups()[:3])
        if bits > 8 or base > 16 or not bits <= abs(distance) <= 16:
            raise ArgumentError(name, text, "a swizzle with bits <= 8, base <= 16 and bits <= |shift| <= 16")
        swizzle = (bits, base, distance) if bits else None
    return shape, stride, swizzle, shift
