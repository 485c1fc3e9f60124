"""Check that the tensors of a call are those that the function was compiled for.

Compiled host code trusts its arguments blindly. A tensor is a pointer and those extents and strides that were dynamic
at compile time, in order: one whose dynamic extents are others is misread without a word, one of another element type
or with another static extent gives wrong numbers.

The DSL keeps of a compiled function's tensors only how many extents and strides are dynamic (the types of the host
function's parameters), so that is all that can be checked of a bare function. A dsv4lib ``Compiled`` keeps the
arguments it was compiled with, and with them element types and static extents.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from dsv4lib.errors import ArgumentError

# LLVM type of a tensor: a pointer, then its shape and its strides, one value alone or a struct without the static ones.
_TENSOR = re.compile(r"struct<\(ptr, struct<\((i\d+|struct<\(.*?\)>), (i\d+|struct<\(.*?\)>)\)>\)>")


def check_layout(name: str, tensor: Any, kind: str) -> None:
    """Refuse a tensor whose number of dynamic extents or strides differs.

    The compiled function reads a fixed number.

    Static code reads none, whatever it is given.

    Args:
        kind: LLVM type of the parameter.

    Raises:
        ArgumentError: of ``name``.
    """
    found = _TENSOR.fullmatch(kind)
    if found is None or not hasattr(tensor, "dynamic_shapes_mask"):
        return
    wanted = tuple(len(re.findall(r"\bi\d+", part)) for part in found.groups())
    given = sum(tensor.dynamic_shapes_mask), sum(tensor.dynamic_strides_mask)
    if any(wanted) and wanted != given:
        allowed = f"a tensor with {wanted[0]} dynamic extents and {wanted[1]} dynamic strides, as it was compiled for"
        raise ArgumentError(name, f"{tensor} with {given[0]} and {given[1]}", allowed)


def check_types(names: list[str], given: tuple[Any, ...], compiled: tuple[Any, ...]) -> None:
    """Refuse tensors that differ from those at compile time.

    Element type, rank and static extents must agree.

    Args:
        given, compiled: the arguments now and then, in the order of ``names``.

    Raises:
        ArgumentError: of the first argument that differs.
    """
    for name, mine, theirs in zip(names, given, compiled, strict=False):
        for tensor, like in zip(_tensors(mine), _tensors(theirs), strict=False):
            want = _described(like, like)
            if (have := _described(tensor, like)) != want:
                raise ArgumentError(name, have, f"{want}, as it was compiled for")


def _tensors(argument: Any) -> Iterator[Any]:
    """CuTe tensors in tuples, lists and dictionaries."""
    if isinstance(argument, tuple | list | dict):
        for item in argument.values() if isinstance(argument, dict) else argument:
            yield from _tensors(item)
    elif hasattr(argument, "element_type") and hasattr(argument, "stride"):
        yield argument


def _described(tensor: Any, like: Any) -> str:
    """Element type, extents and strides of a tensor, "?" where those of ``like`` are dynamic."""
    parts = []
    for values, mask in ((tensor.shape, like.dynamic_shapes_mask), (tensor.stride, like.dynamic_strides_mask)):
        dynamic = mask if len(mask) == len(values) else (False,) * len(values)  # of another rank: show all of it
        parts.append(", ".join("?" if free else str(n) for n, free in zip(values, dynamic, strict=True)))
    return f"{tensor.element_type} ({parts[0]}):({parts[1]})"
