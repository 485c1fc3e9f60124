"""Stand in for our ops where the CuTe DSL is missing, so that rows, inputs, checks and peers are there."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from dsv4lib.bench.ops.case import Absent

HOST_SIDE = re.compile(r"dsv4lib\.ops\.(?:\w+(?:(?:\.\w+)?\.op)?|common\.\w+)")
ROOT = Path(__file__).resolve().parents[3]


class _StandIn(ModuleType):
    """A module whose every name is a function that cannot be called."""

    def __getattr__(self, name: str) -> Any:
        beside = ROOT.joinpath(*self.__name__.split("."), f"{name}.py")
        if name.startswith("__") or beside.is_file():  # a module of this package, to be imported
            raise AttributeError(name)

        def absent(*args: Any, **kwargs: Any) -> NoReturn:
            raise Absent(f"{self.__name__}.{name} needs the CuTe DSL, or a pack of compiled kernels")

        return absent


class _Finder(MetaPathFinder, Loader):
    """Finds a stand-in for every op; modules beside an op that need no DSL (its sizes and variants) stay importable."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """A stand-in, if it is for one of ours."""
        if not HOST_SIDE.fullmatch(name):
            return None
        folder = ROOT.joinpath(*name.split("."))
        spec = ModuleSpec(name, self, is_package=folder.is_dir())
        if folder.is_dir():
            spec.submodule_search_locations = [str(folder)]
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The stand-in."""
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def install() -> bool:
    """Let stand-ins take the place of ops that are imported from now on, if the DSL is missing; whether it is."""
    try:
        missing = importlib.util.find_spec("cutlass") is None
    except ValueError:  # its import is blocked
        missing = True
    if missing and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    return missing
