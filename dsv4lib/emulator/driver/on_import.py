"""Act on modules of optional packages when a script imports them, without importing them ourselves."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]


def installed(name: str) -> bool:
    """Tell whether a module can be imported; its packages are imported, it is not."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a package that holds it
        return False


def _nothing(*_args: Any) -> None:
    """Do nothing."""


class _Loader:
    """A module's own loader; ``before`` is called ahead of it, and afterwards the module is handed to ``after``."""

    def __init__(self, original: Any, before: Callable[[], None], after: Action):
        self._original, self._before, self._after = original, before, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Make the module as its own loader does; compiled modules load their libraries here."""
        self._before()
        return self._original.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then the action."""
        self._original.exec_module(module)
        self._after(module)


class _Finder:
    """Finds modules where the other finders do; ``before`` they are made and ``after`` they ran, actions are called.

    To look for a module, without importing it, calls nothing.
    """

    def __init__(self, before: Mapping[str, Callable[[], None]], after: Mapping[str, Action]):
        self._before, self._after = before, after
        self._looking: set[str] = set()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find a module, or leave it to the finders after this one."""
        if name in self._looking or not (name in self._before or name in self._after):
            return None
        self._looking.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking.discard(name)
        if spec is not None and spec.loader is not None:
            before, after = self._before.get(name, _nothing), self._after.get(name, _nothing)
            spec.loader = _Loader(spec.loader, before, after)
        return spec


@contextmanager
def when_imported(actions: Mapping[str, Action]) -> Iterator[None]:
    """Call ``actions[name](module)`` once for each module, now or when it is imported inside the context."""
    for name, action in actions.items():
        module = sys.modules.get(name)
        if module is not None:
            action(module)
    with _finding(_Finder({}, {name: action for name, action in actions.items() if name not in sys.modules})):
        yield


@contextmanager
def before_import(actions: Mapping[str, Callable[[], None]]) -> Iterator[None]:
    """Call ``actions[name]()`` before a module is imported inside the context, if there is such a module."""
    with _finding(_Finder(actions, {})):
        yield


@contextmanager
def _finding(finder: _Finder) -> Iterator[None]:
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
