"""Make the kernel's arguments: fake tensors to compile, checked ones to launch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from dsv4lib.emulator.machine.request import Dim3
from dsv4lib.errors import ArgumentError


def is_whole(value: Any) -> bool:
    """Tell whether ``value`` is a Python int that is no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Check that ``value`` is a whole number from ``least`` to ``most``."""
    if not is_whole(value) or value < least or (most is not None and value > most):
        raise ArgumentError(name, value, f"a whole number from {least}" + ("" if most is None else f" to {most}"))
    return value


def one_of(name: str, value: Any, allowed: Iterable[str]) -> str:
    """Check that ``value`` is one of some strings."""
    allowed = list(allowed)
    if not isinstance(value, str) or value not in allowed:
        raise ArgumentError(name, value, "one of " + ", ".join(allowed))
    return value


def flag(name: str, value: Any) -> bool:
    """Check that ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ArgumentError(name, value, "True or False")
    return value


def seconds(name: str, value: Any) -> float:
    """Check that ``value`` is a positive number; infinity is one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value) or value <= 0:
        raise ArgumentError(name, value, "a positive number of seconds")
    return value


def names(name: str, value: Any, allowed: Iterable[str], what: str) -> frozenset[str]:
    """Check one string or several against ``allowed``, which ``what`` describes."""
    given = (value,) if isinstance(value, str) else value
    if not isinstance(given, list | tuple | set | frozenset) or not all(isinstance(item, str) for item in given):
        raise ArgumentError(name, value, what)
    if unknown := frozenset(given) - set(allowed):
        raise ArgumentError(name, sorted(unknown), what)
    return frozenset(given)


def coordinates(name: str, value: Any) -> frozenset[Dim3]:
    """Check CTAs given as (x, y, z)."""
    allowed = "one or more CTAs as (x, y, z), whole numbers from 0"
    if isinstance(value, str | bytes | dict) or not isinstance(value, Iterable):
        raise ArgumentError(name, value, allowed)
    found = list(value)
    for item in found:
        if not isinstance(item, tuple | list) or len(item) != 3 or not all(is_whole(n) and n >= 0 for n in item):
            raise ArgumentError(name, item, allowed)
    if not found:
        raise ArgumentError(name, value, allowed)
    return frozenset((x, y, z) for x, y, z in found)
