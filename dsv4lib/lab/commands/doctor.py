"""Run `dsv4 doctor`. It says what is installed, which back ends work here, and the exact fix for what does not.

Facts are gathered once (`gather`) and judged by a pure function (`diagnose`), so every diagnosis is tested without the
machine that would show it.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dsv4lib import backends, env

GIB = 2**30
MIN_FREE_GIB = 2.0  # compile caches, run records and reports
# NVIDIA's compatibility table: the first driver branch that runs each CUDA major version.
MIN_DRIVER = {12: "525", 13: "580"}
INSTALL = "pip install -r requirements.lock"
CUDA_TORCH = "pip install --force-reinstall torch==2.13.0 from the default index (its Linux build is for CUDA 13)"


@dataclass(frozen=True)
class Facts:
    """What doctor looked at. CUDA versions are (major, minor); None means not found.

    ``locked`` is of a clone, ``extras`` (what each lacks) of an installed wheel; "" is what it always needs.
    """

    python: tuple[int, int]
    platform: str
    free_gib: float
    installed: dict[str, str]
    locked: dict[str, str]
    driver_cuda: tuple[int, int] | None
    torch_cuda: tuple[int, int] | None
    torch_sees_gpu: bool
    dsl_flavors: tuple[int, ...]
    extras: dict[str, tuple[str, ...]] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    chromium: str | None = None
    kernel_backends: dict[str, tuple[backends.Status, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis. ``level`` is ok, note (works, could be better) or problem (something fails)."""

    level: str
    what: str
    detail: str
    fix: str = ""


def read_lock(path: Path) -> dict[str, str]:
    """Read the pins of a lock file as {normalised name: version}. Comments and extras are ignored."""
    pins = {}
    for line in path.read_text().splitlines():
        found = re.match(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^\s;]+)", line)
        if found:
            pins[normal(found[1])] = found[2]
    return pins


def normal(name: str) -> str:
    """Normalise a package name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def missing_by_extra(requires: Iterable[str], installed: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return for each extra of a wheel the packages that are not installed. Versions are pip's business."""
    found: dict[str, list[str]] = {"": []}
    includes: list[tuple[list[str], str]] = []
    for text in requires:
        name = normal(re.match(r"[A-Za-z0-9._-]+", text)[0])
        extra = re.search(r"""extra == ['"]([^'"]+)""", text)
        lacks = found.setdefault(extra[1] if extra else "", [])
        if own := re.match(r"dsv4lab\[([a-z]+)\]", text):  # an extra that holds another
            includes.append((lacks, own[1]))
        elif name not in installed:
            lacks.append(name)
    for lacks, other in includes:
        lacks += found.get(other, [])
    return {extra: tuple(sorted(lacks)) for extra, lacks in found.items()}


def gather() -> Facts:
    """Look at this machine. Never raises: what cannot be found is None or empty."""
    from importlib import metadata

    installed = {normal(d.name): d.version for d in metadata.distributions() if d.name}
    torch_cuda, sees_gpu, statuses = None, False, {}
    if has_torch := importlib.util.find_spec("torch") is not None:
        import torch

        torch_cuda, sees_gpu = _version(torch.version.cuda), torch.cuda.is_available()
        for arch in ("sm_100a", "sm_90a"):
            statuses[arch] = (backends.status("native", arch), backends.status("emulator", arch))
    return Facts(
        python=sys.version_info[:2],
        platform=f"{platform.system()} {platform.machine()}",
        free_gib=shutil.disk_usage(env.root()).free / GIB,
        installed=installed,
        locked={} if env.is_installed() else read_lock(env.root() / "requirements.lock"),
        extras=missing_by_extra(metadata.requires("dsv4lab") or (), installed) if env.is_installed() else {},
        driver_cuda=env.driver_cuda(),
        torch_cuda=torch_cuda,
        torch_sees_gpu=sees_gpu,
        dsl_flavors=tuple(m for m in (12, 13) if f"nvidia-cutlass-dsl-libs-cu{m}" in installed),
        gpus=tuple(env.gpu_names()) if has_torch else (),
        chromium=chromium_version(),
        kernel_backends=statuses,
    )


def find_chromium() -> str | None:
    """Find the browser of the browser tests: DSV4_CHROMIUM, else one on PATH."""
    chosen = os.environ.get("DSV4_CHROMIUM")
    if chosen:
        return chosen if shutil.which(chosen) else None
    return next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)


def chromium_version() -> str | None:
    """Ask the browser of the browser tests what it is, None without one. No lock pins it, so runs record it."""
    path = find_chromium()
    if path is None:
        return None
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return f"{Path(path).name} does not run"
    found = re.match(r"[A-Za-z ]+ [\d.]+", done.stdout)
    return found[0] if found else f"{Path(path).name} does not run"


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
        Finding("ok", "browser tests", facts.chromium)
        if facts.chromium
        else Finding("note", "browser tests", "no Chromium; they are skipped", "install one or set DSV4_CHROMIUM"),
    ]


def _diagnose_install(facts: Facts) -> list[Finding]:
    found = []
    if facts.python < (3, 11):
        found.append(_problem("python", f"{_dotted(facts.python)} is too old", "install Python 3.11 or newer"))
    if facts.extras:
        return found + _diagnose_wheel(facts.extras)
    missing = sorted(n for n in facts.locked if n not in facts.installed)
    # A local label (2.13.0+cpu) is the same release built differently; the CUDA findings judge that.
    wrong = sorted(
        f"{n} {facts.installed[n]} (lock: {v})"
        for n, v in facts.locked.items()
        if n in facts.installed and facts.installed[n].split("+")[0] != v
    )
    if missing:
        found.append(_problem("packages", "missing: " + ", ".join(missing), INSTALL))
    if wrong:
        found.append(_problem("packages", "not as locked: " + ", ".join(wrong), INSTALL))
    return found or [Finding("ok", "packages", f"all {len(facts.locked)} pins of requirements.lock are installed")]


def _diagnose_wheel(extras: dict[str, tuple[str, ...]]) -> list[Finding]:
    """Say which parts of an installed wheel have their packages; the emulator has none but those of every install."""
    if extras[""]:
        fix = "pip install dsv4lab, with its dependencies"
        return [_problem("packages", "missing: " + ", ".join(extras[""]), fix)]
    found = [Finding("ok", "emulator", "its packages are installed")]
    for extra in ("ops", "lab", "nightly"):
        if lacks := extras.get(extra, ()):
            fix = f"pip install 'dsv4lab[{extra}]'"
            found.append(Finding("note", f"extra {extra}", "missing: " + ", ".join(lacks), fix))
        else:
            found.append(Finding("ok", f"extra {extra}", "its packages are installed"))
    return found


def _diagnose_cuda(facts: Facts) -> list[Finding]:
    driver, built = facts.driver_cuda, facts.torch_cuda
    if facts.extras and facts.extras["ops"]:
        return []  # no torch to fit to a driver
    if driver is None and built is None:
        return [Finding("ok", "gpu", "no NVIDIA driver, CPU build of torch: kernels compile, none runs natively")]
    if driver is None:
        fix = f"nothing without a GPU; with one, NVIDIA driver {MIN_DRIVER.get(built[0], 'newest')} or newer"
        return [Finding("note", "gpu", f"torch is built for CUDA {_dotted(built)}, but there is no NVIDIA driver", fix)]
    if built is None:
        detail = f"the driver supports CUDA {_dotted(driver)}, but torch is a CPU build"
        return [_problem("gpu", detail, CUDA_TORCH)]
    if driver[0] < built[0]:
        detail = f"the driver supports CUDA {_dotted(driver)}, torch needs {_dotted(built)}"
        return [_problem("gpu", detail, f"update the NVIDIA driver to {MIN_DRIVER.get(built[0], 'newest')} or newer")]
    found = _diagnose_dsl(facts, driver, built)
    if not facts.torch_sees_gpu:
        fix = "check nvidia-smi, CUDA_VISIBLE_DEVICES and the container's --gpus option"
        found.append(_problem("gpu", "driver and torch fit, but torch sees no GPU", fix))
    return found or [Finding("ok", "gpu", f"{', '.join(facts.gpus)}; driver for CUDA {_dotted(driver)}")]


def _diagnose_dsl(facts: Facts, driver: tuple[int, int], built: tuple[int, int]) -> list[Finding]:
    """cutlass-dsl takes the newest of its installed CUDA runtimes that the driver supports; it should be torch's."""
    usable = [m for m in facts.dsl_flavors if m <= driver[0]]
    if not usable:
        have = ", ".join(f"cu{m}" for m in facts.dsl_flavors) or "none"
        detail = f"its CUDA runtimes ({have}) do not fit a driver for CUDA {_dotted(driver)}"
        return [_problem("cutlass-dsl", detail, f"{INSTALL} (it brings cu12 and cu13), or update the driver")]
    if usable[-1] != built[0]:
        detail = f"it will use its cu{usable[-1]} runtime, torch is built for CUDA {built[0]}"
        version = facts.locked.get("nvidia-cutlass-dsl", facts.installed.get("nvidia-cutlass-dsl", "4.8.1"))
        fix = f"pip install 'nvidia-cutlass-dsl[cu{built[0]}]=={version}', or {CUDA_TORCH}"
        return [_problem("cutlass-dsl", detail, fix)]
    return []


def _diagnose_backends(facts: Facts) -> list[Finding]:
    if facts.extras and facts.extras["ops"]:
        return [Finding("note", "kernels", "the emulator runs PTX; CuTeDSL kernels need the extra ops")]
    found = []
    for arch, kind in (("sm_100a", "Blackwell"), ("sm_90a", "Hopper")):
        able = [s.name for s in facts.kernel_backends.get(arch, ()) if s.available]
        if able:
            found.append(Finding("ok", f"{kind} kernels", f"run here: {', '.join(able)}"))
        else:
            why = "; ".join(f"{s.name}: {s.reason}" for s in facts.kernel_backends.get(arch, ()))
            found.append(Finding("note", f"{kind} kernels", f"compile here but do not run ({why})"))
    return found


def _diagnose_disk(facts: Facts) -> Finding:
    if facts.free_gib < MIN_FREE_GIB:
        return _problem("disk", f"{facts.free_gib:.1f} GiB free", f"free {MIN_FREE_GIB:.0f} GiB")
    return Finding("ok", "disk", f"{facts.free_gib:.0f} GiB free")


def _problem(what: str, detail: str, fix: str) -> Finding:
    return Finding("problem", what, detail, fix)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def ending(facts: Facts, problems: int) -> str:
    """Say what can be called now. A wheel without its extras has the emulator alone."""
    run = f"`{env.front_door()} run`"
    if problems:
        return f"{run} should wait for the fixes above."
    if not (lacking := [extra for extra in ("ops", "lab") if facts.extras.get(extra)]):
        return f"{run} is ready."
    able = "`dsv4 emulate` runs PTX files" if "ops" in lacking else "The operators and `dsv4 emulate` are ready"
    return f"{able}; {run} needs the extra lab."


def main() -> int:
    """Print versions and the diagnosis; returns 0 without a problem, else 1."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(soft_wrap=True, highlight=False)
    facts = gather()
    console.print("  ".join(f"{name} [bold]{version}[/]" for name, version in env.versions().items()))
    console.print(f"{facts.platform}, {len(facts.gpus)} GPU(s), sources {env.source_fingerprint()}")
    findings = diagnose(facts)
    colours = {"ok": "green", "note": "yellow", "problem": "red"}
    for f in findings:
        console.print(f"[{colours[f.level]}]{f.level:8}[/] {f.what:18} {escape(f.detail)}")
        if f.fix:
            console.print(f"{'':27} fix: {escape(f.fix)}")
    problems = sum(f.level == "problem" for f in findings)
    console.print(f"{problems} problem(s). {ending(facts, problems)}")
    return 1 if problems else 0
