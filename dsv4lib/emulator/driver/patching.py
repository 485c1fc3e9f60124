"""Replace attributes and environment variables for a while, then restore them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_MISSING = object()


class Patches:
    """Changes that are undone together, the last one first."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name``.

        Descriptors and attributes inherited from a base come back as they were.
        """
        own = vars(owner) if hasattr(owner, "__dict__") else {}
        self._undo.append((owner, name, own.get(name, _MISSING)))
        setattr(owner, name, value)

    def around(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Replace a method by ``wrapper(original, self, ...)``."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        self.set(owner, name, method)

    def env(self, name: str, value: str) -> None:
        """Set an environment variable."""
        self._undo.append((os.environ, name, os.environ.get(name, _MISSING)))
        os.environ[name] = value

    def undo(self) -> None:
        """Put everything back."""
        while self._undo:
            owner, name, old = self._undo.pop()
            if owner is os.environ:
                os.environ.pop(name, None) if old is _MISSING else os.environ.__setitem__(name, old)
            elif old is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, old)


@contextmanager
def patches() -> Iterator[Patches]:
    """Make patches that are undone when the block is left, whatever happens in it."""
    made = Patches()
    try:
        yield made
    finally:
        made.undo()
