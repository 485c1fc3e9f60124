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
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from dsv4lib.errors import ArgumentError

LABEL = "DSV4_MACHINE"  # a name that the owner gives this machine; without it, records name none
DRIVER = Path("/proc/driver/nvidia/version")
INSTALLED = "workspace"  # in the package of a wheel, made by setup.py
KERNEL_ROOMS = ("dsl", "formats", "ops")  # folders of sources that compiled kernels may depend on
HOST_SIDE = ("__init__.py", "op.py", "cpp", "bench", "peers")  # beginnings of names of an op: no kernel depends on it
SOURCES = ("*.py", "*.cu", "*.cuh")
CLOCKS = ("clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem", "power.limit")  # as nvidia-smi calls them
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
def package() -> Path:
    """Return the folder of `dsv4lib` itself. Its parent is what Python's path must hold."""
    return Path(__file__).resolve().parent


@functools.cache
def root() -> Path:
    """Return the workspace: the folder that holds `stages/`, `notebooks/` and `data/`.

    In a clone it is beside `dsv4lib`. A wheel carries one inside the package, which is only read.
    """
    inside = package() / INSTALLED
    return inside if inside.is_dir() else package().parent


def is_installed() -> bool:
    """Tell whether this is an installed wheel and not a clone: nothing may be written to its workspace."""
    return root().is_relative_to(package())


def front_door() -> str:
    """Return how a user calls the command line here: `dsv4` of a wheel, `./dsv4` of a clone."""
    return "dsv4" if is_installed() else "./dsv4"


def install(extra: str = "lab") -> str:
    """Return the command that installs what is missing here: an extra of a wheel, the lock of a clone."""
    return f"pip install 'dsv4lab[{extra}]'" if is_installed() else "pip install -r requirements.lock"


def own_data() -> Path:
    """Return the folder for what a user of an installed wheel makes: `dsv4` in XDG_DATA_HOME or ~/.local/share."""
    base = os.environ.get("XDG_DATA_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "share") / "dsv4"


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
    """12 hex digits over the sources a result depends on, Python and CUDA C++ (names and contents).

    Args:
        folders: paths relative to the parent of `dsv4lib`; default `dsv4lib`.
    """
    places = [package().parent / folder for folder in folders or ("dsv4lib",)]
    return _digest(path for place in places for path in sorted(p for kind in SOURCES for p in place.rglob(kind)))


def is_kernel_source(path: Path) -> bool:
    """Tell whether a compiled kernel may depend on this file. It is in `dsl`, `formats` or an op, not its host side."""
    try:
        room, *rest = path.relative_to(package()).parts
    except ValueError:  # elsewhere
        return False
    if room != "ops":
        return room in KERNEL_ROOMS
    return len(rest) > 1 and rest[0] != "common" and not any(part.startswith(HOST_SIDE) for part in rest[1:])


def kernel_fingerprint() -> str:
    """Return 12 hex digits over sources of compiled kernels, see `is_kernel_source`."""
    walked = [found for room in KERNEL_ROOMS for found in os.walk(package() / room)]
    paths = sorted(Path(folder, name) for folder, _, names in walked for name in names if name.endswith(".py"))
    return _digest(path for path in paths if is_kernel_source(path))


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(str(path.relative_to(package().parent)).encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


class Revision(NamedTuple):
    """The git commit of the sources (40 hex digits, "" where unknown) and whether anything differs from it."""

    commit: str = ""
    dirty: bool | None = None


def revision(folder: Path | None = None) -> Revision:
    """Return the commit of ``folder``, by default of the clone this package lies in.

    Dirty are changed files as well as new ones that git does not ignore. Nothing is known of a wheel, of a folder
    inside another repository or without git.
    """
    place = (folder or package().parent).resolve()
    said = (_git(place, "rev-parse", "--show-toplevel", "HEAD") or "").splitlines()
    if len(said) != 2 or Path(said[0]).resolve() != place or not re.fullmatch(r"[0-9a-f]{40,64}", said[1]):
        return Revision()
    changed = _git(place, "status", "--porcelain", "--untracked-files=normal")
    return Revision(said[1], None if changed is None else bool(changed.strip()))


def _git(folder: Path, *words: str) -> str | None:
    """What git prints, None where it fails. It takes no lock and starts no monitor: a run disturbs no other command."""
    # Without the filter that strips notebooks: a Python for each is a minute a run. One with outputs counts as changed.
    plain = ("-c", "core.fsmonitor=false", "-c", "filter.nbstripout.clean=", "--no-optional-locks")
    command = ["git", *plain, "-C", str(folder), *words]
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=own)
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return done.stdout if done.returncode == 0 else None


def machine_label() -> str:
    """Return the name that DSV4_MACHINE gives this machine, or an empty string: a host name is never looked up.

    Raises:
        ArgumentError: it is no short name.
    """
    label = os.environ.get(LABEL, "").strip()
    if label and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,39}", label):
        raise ArgumentError(LABEL, label, "1 to 40 letters, digits, spaces, dots, dashes or underscores")
    return label


def driver() -> str:
    """Return the NVIDIA driver's version and the newest CUDA it supports, or "none"."""
    cuda = driver_cuda()
    try:
        found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", DRIVER.read_text())
    except (OSError, UnicodeDecodeError):
        found = None
    known = [found[1]] if found else []
    return " ".join(known + ([f"CUDA {cuda[0]}.{cuda[1]}"] if cuda else [])) or "none"


def clocks() -> str:
    """Return clocks of the GPUs as found, beside their maxima, and the power limit.

    "none" without a driver, "unknown" where `nvidia-smi` does not say. Equal GPUs appear once.
    """
    if driver_cuda() is None:
        return "none"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "")
    chosen = ["-i", visible] if visible else []
    command = ["nvidia-smi", *chosen, f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return "unknown"
    if not rows or any(len(row) != len(CLOCKS) for row in rows):
        return "unknown"
    told = dict.fromkeys(_clocks_of([_number(cell) for cell in row]) for row in rows)
    return "; ".join(told)


def _number(cell: str) -> str:
    return cell if re.fullmatch(r"\d+(\.\d+)?", cell) else "?"


def _clocks_of(row: list[str]) -> str:
    sm, sm_most, memory, memory_most, power = row
    return f"SM {sm} of {sm_most} MHz, memory {memory} of {memory_most} MHz, power limit {power} W"


def machine() -> dict[str, str]:
    """Processor kind, usable cores, memory, GPUs, driver and clocks as found. No host name, user or path."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    facts = {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory:.0f} GiB",
        "python": sys.implementation.name,
    }
    gpus = gpu_names()
    facts["gpu"] = ", ".join(gpus) if gpus else "none"
    facts["driver"] = driver()
    facts["clocks"] = clocks()
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
