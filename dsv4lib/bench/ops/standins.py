"""Stand in for our ops where the CuTe DSL is missing. So rows, inputs, checks and peers are there."""

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


class _Inert(type):
    """A class whose every attribute, call and index is another, and which decorates to what it decorates."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Inert(name, (), {"width": 8})
        setattr(cls, name, made)
        return made

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], _Inert):
            return args[0]
        return cls if cls.__init__ is object.__init__ else super().__call__(*args, **kwargs)

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


class _InertModule(ModuleType):
    """A module, and a package, of inert classes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_Inert(self.__name__, (), {}), name) if name.startswith("__") else self._made(name)

    def _made(self, name: str) -> Any:
        made = _Inert(name, (), {"width": 8})
        setattr(self, name, made)
        return made


class _InertFinder(MetaPathFinder, Loader):
    """Finds inert modules for the DSL and CUDA's bindings."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """An inert one, if nothing else has it."""
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ("cutlass", "cuda") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module."""
        return _InertModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def inert() -> None:
    """Let ops be imported without the DSL. What a kernel or its arguments would be made of does nothing.

    Their public functions, checks and plans are real then, and compile and launch nothing by themselves.
    """
    sys.meta_path.append(_InertFinder())


def install() -> bool:
    """Let stand-ins take the place of ops imported from now on, if the DSL is missing. Returns whether it is."""
    try:
        missing = importlib.util.find_spec("cutlass") is None
    except ValueError:  # its import is blocked
        missing = True
    if missing and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    return missing
