"""`dsv4 doctor`: what is installed, which back ends work here, and the exact fix for what does not.

Facts are gathered once (`gather`) and judged by a pure function (`diagnose`), so every diagnosis is tested without the
machine that would show it.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

from dsv4lib import backends, env

GIB = 2**30
MIN_FREE_GIB = 2.0  # compile caches, run records and reports
# NVIDIA's compatibility table: the first driver branch that runs each CUDA major version.
MIN_DRIVER = {12: "525", 13: "580"}
CUDA_INDEX_HINT = (
    "pip install --force-reinstall torch==2.13.0 from the default index (its Linux build is the CUDA 13 one)"
)


@dataclass(frozen=True)
class Facts:
    """What doctor looked at. CUDA versions are (major, minor); None means not found."""

    python: tuple[int, int]
    platform: str
    free_gib: float
    installed: dict[str, str]
    locked: dict[str, str]
    driver_cuda: tuple[int, int] | None
    torch_cuda: tuple[int, int] | None
    torch_sees_gpu: bool
    dsl_flavors: tuple[int, ...]
    gpus: tuple[str, ...] = ()
    chromium: str | None = None
    kernel_backends: tuple[backends.Status, ...] = field(default=())


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis: ``level`` is ok, note (works, could be better) or problem (something fails)."""

    level: str
    what: str
    detail: str
    fix: str = ""


def read_lock(path: Path) -> dict[str, str]:
    """Pins of a lock file as {normalised name: version}; comments and extras are ignored."""
    pins = {}
    for line in path.read_text().splitlines():
        found = re.match(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^\s;]+)", line)
        if found:
            pins[normal(found[1])] = found[2]
    return pins


def normal(name: str) -> str:
    """A package name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def gather() -> Facts:
    """Look at this machine. Never raises: what cannot be found is None or empty."""
    from importlib import metadata

    installed = {normal(d.name): d.version for d in metadata.distributions() if d.name}
    try:
        import torch

        torch_cuda = _version(torch.version.cuda)
        sees_gpu = torch.cuda.is_available()
        gpus = tuple(env.gpu_names())
    except ImportError:
        torch_cuda, sees_gpu, gpus = None, False, ()
    found = []
    for arch in ("sm_100a", "sm_90a"):
        found += [backends.status("native", arch), backends.status("emulator", arch)] if torch_importable() else []
    return Facts(
        python=sys.version_info[:2],
        platform=env.machine()["system"] if torch_importable() else sys.platform,
        free_gib=shutil.disk_usage(env.root()).free / GIB,
        installed=installed,
        locked=read_lock(env.root() / "requirements.lock"),
        driver_cuda=driver_cuda(),
        torch_cuda=torch_cuda,
        torch_sees_gpu=sees_gpu,
        dsl_flavors=tuple(m for m in (12, 13) if f"nvidia-cutlass-dsl-libs-cu{m}" in installed),
        gpus=gpus,
        chromium=find_chromium(),
        kernel_backends=tuple(found),
    )


def torch_importable() -> bool:
    """True if `import torch` works; everything that asks about GPUs needs it."""
    try:
        import torch  # noqa: F401
    except ImportError:
        return False
    return True


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


def find_chromium() -> str | None:
    """The browser the browser tests use: DSV4_CHROMIUM, else one on PATH."""
    import os

    chosen = os.environ.get("DSV4_CHROMIUM")
    if chosen:
        return chosen if shutil.which(chosen) else None
    return next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)


def _version(text: str | None) -> tuple[int, int] | None:
    if not text:
        return None
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def diagnose(facts: Facts) -> list[Finding]:
    """Judge ``facts``: one finding per topic, problems with the exact fix."""
    return [
        *_diagnose_install(facts),
        *_diagnose_cuda(facts),
        *_diagnose_backends(facts),
        _diagnose_disk(facts),
        Finding("ok", "browser tests", "Chromium found")
        if facts.chromium
        else Finding("note", "browser tests", "no Chromium; they are skipped", "install one or set DSV4_CHROMIUM"),
    ]


def _diagnose_install(facts: Facts) -> list[Finding]:
    found = []
    if facts.python < (3, 11):
        found.append(Finding("problem", "python", f"{facts.python} is too old", "install Python 3.11 or newer"))
    missing = sorted(n for n in facts.locked if n not in facts.installed)
    # A local label (2.13.0+cpu) is the same release built differently; the CUDA findings judge that.
    wrong = sorted(
        f"{n} {facts.installed[n]} (lock: {v})"
        for n, v in facts.locked.items()
        if n in facts.installed and facts.installed[n].split("+")[0] != v
    )
    if missing:
        found.append(
            Finding("problem", "packages", "missing: " + ", ".join(missing), "pip install -r requirements.lock")
        )
    if wrong:
        found.append(
            Finding("problem", "packages", "not as locked: " + ", ".join(wrong), "pip install -r requirements.lock")
        )
    if not missing and not wrong:
        found.append(Finding("ok", "packages", f"all {len(facts.locked)} pins of requirements.lock are installed"))
    return found


def _diagnose_cuda(facts: Facts) -> list[Finding]:
    if facts.torch_cuda is None and facts.driver_cuda is None:
        return [
            Finding("ok", "gpu", "no NVIDIA driver and a CPU build of torch: kernels compile, nothing runs natively")
        ]
    if facts.torch_cuda is None:
        return [
            Finding(
                "problem",
                "gpu",
                f"the driver supports CUDA {_dotted(facts.driver_cuda)} but torch is a CPU build",
                CUDA_INDEX_HINT,
            )
        ]
    if facts.driver_cuda is None:
        return [
            Finding(
                "note",
                "gpu",
                f"torch is built for CUDA {_dotted(facts.torch_cuda)} but there is no NVIDIA driver",
                f"on a machine with a GPU install driver {MIN_DRIVER.get(facts.torch_cuda[0], 'newest')} or newer; "
                "without a GPU nothing is needed",
            )
        ]
    if facts.driver_cuda[0] < facts.torch_cuda[0]:
        return [
            Finding(
                "problem",
                "gpu",
                f"the driver supports CUDA {_dotted(facts.driver_cuda)}, torch needs {_dotted(facts.torch_cuda)}",
                f"update the NVIDIA driver to {MIN_DRIVER.get(facts.torch_cuda[0], 'the newest')} or newer",
            )
        ]
    found = []
    usable = [m for m in facts.dsl_flavors if m <= facts.driver_cuda[0]]
    if not usable:
        have = ", ".join(f"cu{m}" for m in facts.dsl_flavors) or "none"
        found.append(
            Finding(
                "problem",
                "cutlass-dsl",
                f"its CUDA runtimes ({have}) do not fit a driver for CUDA {_dotted(facts.driver_cuda)}",
                f"pip install 'nvidia-cutlass-dsl[cu13]=={facts.locked.get('nvidia-cutlass-dsl', '')}', or update the driver",
            )
        )
    elif usable[-1] != facts.torch_cuda[0]:
        found.append(
            Finding(
                "problem",
                "cutlass-dsl",
                f"cutlass-dsl will use its cu{usable[-1]} runtime, torch is built for CUDA {facts.torch_cuda[0]}",
                f"install the same major version of both: pip install 'nvidia-cutlass-dsl[cu{facts.torch_cuda[0]}]' "
                "or the matching build of torch",
            )
        )
    if not facts.torch_sees_gpu:
        found.append(
            Finding(
                "problem",
                "gpu",
                "driver and torch fit, but torch sees no GPU",
                "check nvidia-smi, CUDA_VISIBLE_DEVICES and the container's --gpus option",
            )
        )
    return found or [Finding("ok", "gpu", ", ".join(facts.gpus) + f"; driver for CUDA {_dotted(facts.driver_cuda)}")]


def _diagnose_backends(facts: Facts) -> list[Finding]:
    found = []
    for arch, kind in (("sm_100a", "Blackwell"), ("sm_90a", "Hopper")):
        able = [s.name for s in facts.kernel_backends if s.available and (arch in s.reason)]
        if able:
            found.append(Finding("ok", f"{kind} kernels", f"run here: {', '.join(able)}"))
        else:
            found.append(
                Finding("note", f"{kind} kernels", "compile here, cannot run", "a GPU of that kind; notebooks say so")
            )
    return found


def _diagnose_disk(facts: Facts) -> Finding:
    if facts.free_gib < MIN_FREE_GIB:
        return Finding(
            "problem", "disk", f"{facts.free_gib:.1f} GiB free", f"free {MIN_FREE_GIB:.0f} GiB: data/runs grows"
        )
    return Finding("ok", "disk", f"{facts.free_gib:.0f} GiB free")


def _dotted(version: tuple[int, int] | None) -> str:
    return "none" if version is None else f"{version[0]}.{version[1]}"


def main() -> int:
    """Print versions and the diagnosis; returns 0 without a problem, else 1."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    facts = gather()
    console.print("  ".join(f"{escape(name)} [bold]{version}[/]" for name, version in env.versions().items()))
    console.print(f"{facts.platform}, {len(facts.gpus)} GPU(s), sources {env.source_fingerprint()}")
    colours = {"ok": "green", "note": "yellow", "problem": "red"}
    table = Table("", "topic", "finding", "fix", title="Diagnosis", title_justify="left")
    findings = diagnose(facts)
    for f in findings:
        table.add_row(f"[{colours[f.level]}]{f.level}[/]", f.what, escape(f.detail), escape(f.fix))
    console.print(table)
    problems = sum(f.level == "problem" for f in findings)
    console.print(f"{problems} problem(s). `./dsv4 run` {'needs the fixes above' if problems else 'is ready'}.")
    return 1 if problems else 0
