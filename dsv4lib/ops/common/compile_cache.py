"""Compile a kernel once: in memory for this process, on disk for the next.

The key is everything static that the code depends on: kernel class and settings, architecture, compiler options, the
sources of all kernels (and of the class, where it is somebody else's), versions of Python and of the DSL, the DSL's
environment variables, this machine's kind, and where the workspace is, because line info names its files. What leaves
all of these as they are compiles nothing.

A file a kernel, `<key>.kernel` (`dsv4lib.dsl.binary`: no Python objects), in a folder that others cannot write
(`dsv4lib.folders`); any other is refused. A file appears whole, by a rename, or not at all. Processes that want the
same kernel at once wait for the first one's. A damaged file is counted, compiled again and replaced.
DSV4_CACHE=off keeps kernels in memory only. Beyond DSV4_CACHE_GB (4 by default) those not used for longest go.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import inspect
import json
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from dsv4lib import backends, env
from dsv4lib.dsl import binary
from dsv4lib.dsl.compile import ARCHS, OPTIONS, Compiled, compile_for
from dsv4lib.errors import ArgumentError
from dsv4lib.folders import cache_root, own_folder

LIMIT = "DSV4_CACHE_GB"
DEFAULT_GB = 4.0
EVERY = 32  # stores of a process between two looks at the folder's size
STALE_SECONDS = 24 * 3600  # a temporary file that old has no owner any more
_STATIC = (type(None), bool, int, float, str)


@dataclass
class Counts:
    """Count compilations, reads from disk, hits in memory and damaged files."""

    compiled: int = 0
    from_disk: int = 0
    from_memory: int = 0
    damaged: int = 0


@dataclass
class CompileCache:
    """Kernels by what they depend on.

    Attributes:
        folder: where files are kept; None: memory only. It is made (mode 0700) when the first kernel is stored.
        counts: what happened so far.
    """

    folder: Path | None
    counts: Counts = field(default_factory=Counts)
    _memory: dict[tuple, tuple[Any, Compiled]] = field(default_factory=dict, repr=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)
    _stored: int = field(default=0, repr=False)

    def get(
        self,
        kernel_type: type,
        settings: Mapping[str, Any],
        fake_args: Callable[[Any], tuple],
        arch: str = "sm_100a",
    ) -> tuple[Any, Compiled]:
        """The kernel ``kernel_type(**settings)`` and its code.

        Args:
            kernel_type: a class whose objects `compile_for` takes.
            settings: its arguments by name: None, bool, int, float or str.
            fake_args: makes the fake arguments of a kernel; a function of the kernel alone.
            arch: one of `ARCHS`.

        Raises:
            ArgumentError: settings that are not static, or an unknown architecture.
            CacheError: the folder may not be used.
            CompileError: the DSL refuses the kernel.
        """
        place = _place(kernel_type, settings, arch)
        found = self._memory.get(place)
        if found is None:
            whole = _place(kernel_type, _bound(kernel_type, settings), arch)  # defaults written out or not: one kernel
            with self._lock:  # the DSL's compiler holds global state: one thread at a time
                found = self._memory.get(whole)
                if found is None:
                    found = self._outside(kernel_type, settings, fake_args, arch)
                    self._memory[place] = self._memory[whole] = found
                    return found
                self._memory[place] = found
        self.counts.from_memory += 1
        return found

    def loaded(self) -> list[str]:
        """Names of the kernels' classes that this process has compiled or read, in order."""
        with self._lock:
            return sorted({type(kernel).__name__ for kernel, _ in self._memory.values()})

    def warm_up(self, wanted: Iterable[tuple], arch: str = "sm_100a") -> dict[str, float]:
        """Get many kernels ahead of their first call.

        Args:
            wanted: (kernel_type, settings, fake_args) of each.

        Returns:
            seconds by the kernel's name, near 0 where it was there already.
        """
        seconds = {}
        for kernel_type, settings, fake_args in wanted:
            start = time.perf_counter()
            kernel, _ = self.get(kernel_type, settings, fake_args, arch)
            seconds[repr(kernel)] = time.perf_counter() - start
        return seconds

    def kernels(self) -> list[Compiled]:
        """All that is in memory."""
        return [code for _, code in self._memory.values()]

    def clear(self) -> None:
        """Forget what is in memory; files stay."""
        with self._lock:
            self._memory.clear()

    def _outside(
        self, kernel_type: type, settings: Mapping[str, Any], fake_args: Callable, arch: str
    ) -> tuple[Any, Compiled]:
        """From disk, or compiled and stored."""
        name = key(kernel_type, settings, arch)
        kernel = kernel_type(**settings)
        arguments = fake_args(kernel)
        if self.folder is None or name is None:
            self.counts.compiled += 1
            return kernel, _loaded(compile_for(kernel, arguments, arch))
        path = own_folder(self.folder) / f"{name}.kernel"
        with one_process(path.with_suffix(".lock")):
            try:
                done = binary.from_bytes(path.read_bytes(), kernel, arguments, _runs_here(arch))
                self.counts.from_disk += 1
                with suppress(OSError):  # a folder that is only read: nothing is evicted there
                    os.utime(path)
                return kernel, _loaded(done)
            except FileNotFoundError:
                pass
            except ArgumentError:
                self.counts.damaged += 1
            done = compile_for(kernel, arguments, arch)
            self.counts.compiled += 1
            write(path, binary.to_bytes(done))
        if self._stored % EVERY == 0:
            evict(path.parent, limit())
        self._stored += 1
        return kernel, _loaded(done)


@functools.cache
def default() -> CompileCache:
    """The cache of this process, in the folder that the environment names."""
    return CompileCache(cache_root())


def limit() -> float:
    """Return the most bytes that the folder keeps.

    Raises:
        ArgumentError: DSV4_CACHE_GB is no positive number.
    """
    text = os.environ.get(LIMIT, "")
    try:
        gigabytes = float(text) if text else DEFAULT_GB
    except ValueError:
        gigabytes = 0.0
    if not gigabytes > 0:
        raise ArgumentError(LIMIT, text, "a positive number of gigabytes, inf: no limit")
    return gigabytes * 1e9


def evict(folder: Path, most: float) -> int:
    """Remove the kernels not used for longest until the rest has at most ``most`` bytes. Return how many went.

    A process that reads one meanwhile has it whole, or finds none and compiles. A lock goes with its kernel, unless
    a process holds it.
    """
    found = []
    for path in folder.glob("*.kernel"):
        with suppress(FileNotFoundError):
            facts = path.stat()
            found.append((facts.st_mtime, facts.st_size, path))
    held, gone = sum(size for _, size, _ in found), 0
    for _, size, path in sorted(found):
        if held <= most:
            break
        path.unlink(missing_ok=True)
        _remove_lock(path.with_suffix(".lock"))
        held, gone = held - size, gone + 1
    return gone


def _remove_lock(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except OSError:  # held
        pass
    finally:
        os.close(descriptor)


def key(kernel_type: type, settings: Mapping[str, Any], arch: str) -> str | None:
    """Hash all that the code of a kernel depends on.

    64 hex digits; None if its source cannot be read.

    Raises:
        ArgumentError: settings that are not static, or an unknown architecture.
    """
    if arch not in ARCHS:
        raise ArgumentError("arch", arch, "one of " + ", ".join(ARCHS))
    bound = _bound(kernel_type, settings)
    own = _own_sources(kernel_type)
    if own is None:
        return None
    facts = {
        "kernel": f"{kernel_type.__module__}.{kernel_type.__qualname__}",
        "settings": bound,
        "arch": arch,
        "options": OPTIONS,
        "sources": [env.kernel_fingerprint(), *own],
        "format": binary.MAGIC.decode(),
        "dsl": metadata.version("nvidia-cutlass-dsl"),
        "python": platform.python_version(),
        "machine": f"{sys.platform} {platform.machine()}",
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("CUTE_DSL_", "CUTLASS_"))},
        "workspace": str(env.root()),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _place(kernel_type: type, settings: Mapping[str, Any], arch: str) -> tuple:
    """Where a kernel is in memory."""
    return kernel_type, tuple(sorted((name, repr(value)) for name, value in settings.items())), arch


def _bound(kernel_type: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a kernel by name, its defaults among them; they must be static."""
    try:
        bound = inspect.signature(kernel_type).bind(**settings)
    except TypeError as error:
        raise ArgumentError("settings", dict(settings), f"arguments of {kernel_type.__name__}: {error}") from None
    bound.apply_defaults()
    for name, value in bound.arguments.items():
        if not isinstance(value, _STATIC):
            raise ArgumentError(f"settings[{name!r}]", value, "None, bool, int, float or str")
    return dict(bound.arguments)


def _own_sources(kernel_type: type) -> list[str] | None:
    """Digests of the files of the class and its bases that are not among the lab's kernels; None: one has no file."""
    digests = []
    for base in kernel_type.__mro__[:-1]:
        try:
            path = Path(inspect.getsourcefile(base) or "")
            if not env.is_kernel_source(path):
                digests.append(hashlib.sha256(path.read_bytes()).hexdigest())
        except (OSError, TypeError):  # written in a notebook, or built in
            return None
    return digests


@contextmanager
def one_process(path: Path) -> Iterator[None]:
    """Hold the lock of a file; a second process waits.

    The lock goes with its process, however that ends; its empty file stays.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write(path: Path, data: bytes) -> None:
    """Write a file that appears whole or not at all; what interrupted writers left long ago is removed."""
    for left in path.parent.glob("*.part"):
        with suppress(FileNotFoundError):  # somebody else removed it
            if time.time() - left.stat().st_mtime > STALE_SECONDS:
                left.unlink()
    descriptor, name = tempfile.mkstemp(suffix=".part", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _loaded(done: Compiled) -> Compiled:
    """Put a kernel that runs here on the GPU now: a first call that is being captured could not."""
    if _runs_here(done.arch):
        done.function.to(None)
    return done


@functools.cache
def _runs_here(arch: str) -> bool:
    """A GPU of this machine can run code for ``arch``."""
    return backends.status("native", arch).available
