"""Describe this workspace. Its root, versions, source fingerprint and machine, without private detail.

Everything here may be printed in a notebook card or written to a record, so nothing names a user, a host or a path
outside the workspace.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

HOST_SIDE = ("__init__.py", "op.py", "bench", "peers")  # beginnings of names of an op: no kernel depends on it
PACKAGES = (
    "torch",
    "nvidia-cutlass-dsl",
    "cuda-python",
    "numpy",
    "jupyterlab",
    "papermill",
    "matplotlib",
    "ipywidgets",
    "nbstripout",
    "transformers",
    "tensor-layouts",
)


@functools.cache
def root() -> Path:
    """The workspace: the folder that holds `dsv4lib/`, `stages/` and `notebooks/`."""
    return Path(__file__).resolve().parent.parent


def versions() -> dict[str, str]:
    """Return installed versions of Python and of each package results depend on. "missing": it is not installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def version() -> str:
    """Return the version of the lab, as `pyproject.toml` has it.

    "unknown" where it is not installed and not beside it.
    """
    path = root() / "pyproject.toml"
    if path.is_file():
        return str(tomllib.loads(path.read_text())["project"]["version"])
    try:
        return metadata.version("dsv4lab")
    except metadata.PackageNotFoundError:
        return "unknown"


def source_fingerprint(*folders: str) -> str:
    """12 hex digits over the Python sources a result depends on (names and contents).

    Args:
        folders: paths relative to the workspace; default `dsv4lib`.
    """
    return _digest(path for folder in folders or ("dsv4lib",) for path in sorted((root() / folder).rglob("*.py")))


def is_kernel_source(path: Path) -> bool:
    """Tell whether a compiled kernel may depend on this file. It is in `dsl`, `formats` or an op, not its host side."""
    if not path.is_relative_to(root() / "dsv4lib"):
        return False
    room, *rest = path.relative_to(root() / "dsv4lib").parts
    if room != "ops":
        return room in ("dsl", "formats")
    return len(rest) > 1 and rest[0] != "common" and not any(part.startswith(HOST_SIDE) for part in rest[1:])


def kernel_fingerprint() -> str:
    """Return 12 hex digits over sources of compiled kernels, see `is_kernel_source`."""
    return _digest(path for path in sorted((root() / "dsv4lib").rglob("*.py")) if is_kernel_source(path))


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(str(path.relative_to(root())).encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def machine() -> dict[str, str]:
    """Processor kind, usable cores, memory and GPU names. No host name, user or path."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    facts = {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory:.0f} GiB",
        "python": sys.implementation.name,
    }
    gpus = gpu_names()
    facts["gpu"] = ", ".join(gpus) if gpus else "none"
    return facts


def free_memory() -> int:
    """Return bytes of memory that this process can still take.

    The machine's, or its control group's if that has less.
    """
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group, or one without a limit ("max")
        return free
    return max(0, min(free, limit - used + int(stat.get("inactive_file", 0))))


def gpu_names() -> list[str]:
    """Return names of the GPUs torch can use. Empty without a GPU or with a CPU build of torch."""
    if driver_cuda() is None:  # spares a machine without a GPU the import of torch
        return []
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


@functools.cache
def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA version the NVIDIA driver supports, or None without a driver."""
    try:
        libcuda = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int(0)
        if libcuda.cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10
