"""The lab's own exceptions. Bad input always names the argument, the value and what is allowed."""

from __future__ import annotations

from typing import Any


class DSV4Error(Exception):
    """Base of every error the lab raises on purpose."""


class ArgumentError(DSV4Error, ValueError):
    """A wrong argument.

    Args:
        name: the argument as the caller wrote it.
        value: what was passed (shown by ``repr``, shortened).
        allowed: what would have been accepted, in words.
    """

    def __init__(self, name: str, value: Any, allowed: str):
        self.name, self.value, self.allowed = name, value, allowed
        try:
            shown = repr(value)
        except RecursionError:
            shown = f"<{type(value).__name__}, nested too deeply to show>"
        if len(shown) > 120:
            shown = shown[:117] + "..."
        super().__init__(f"{name}={shown} is not allowed: {allowed}")


class ConfigError(ArgumentError):
    """A model or kernel configuration that contradicts itself."""


class BackendUnavailable(DSV4Error, RuntimeError):
    """The chosen back end cannot run here; the message says why and what would fix it."""
