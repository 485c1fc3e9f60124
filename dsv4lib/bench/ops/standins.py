"""Without the CuTe DSL our ops cannot be imported: stand-ins, so that rows, inputs, checks and peers are there."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from dsv4lib.bench.ops.case import Absent

OPS = "dsv4lib.ops."


class _StandIn(ModuleType):
    """A module whose every name is a function that cannot be called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*args: Any, **kwargs: Any) -> NoReturn:
            raise Absent(f"{self.__name__}.{name} needs the CuTe DSL, or a pack of compiled kernels")

        return absent


class _Finder(MetaPathFinder, Loader):
    """Finds a stand-in for every module of `dsv4lib.ops`."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """A stand-in, if it is for one of ours."""
        return ModuleSpec(name, self) if name.startswith(OPS) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The stand-in."""
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def install() -> bool:
    """Let stand-ins take the place of ops that are imported from now on, if the DSL is missing; whether it is."""
    try:
        missing = importlib.util.find_spec("cutlass") is None
    except ValueError:  # somebody has blocked it
        missing = True
    if missing and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    return missing
