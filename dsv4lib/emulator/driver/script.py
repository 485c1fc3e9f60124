"""Run any CuTeDSL script as if this machine had the GPU. `dsv4 emulate script.py --its args`.

The script runs with all rights of its caller: the emulator protects from mistakes of kernels, not from the script. It
runs in a fresh process whose environment is set before anything is imported: packages read the architecture
and their cache switches at import. With ``arch="auto"`` it starts as sm_100a; if the script needs another
architecture (the DSL refuses the one at hand and names the wanted one), it is started again with that one.

Exit code: the script's own; `HAZARD` if the script succeeded but a check reported an error (lints are printed only);
`FAILED` if the emulator stopped a launch (the message is on standard error); `REFUSED` if the script cannot be run.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dsv4lib.emulator.driver import arguments
from dsv4lib.emulator.driver.arch import ARCHITECTURES
from dsv4lib.emulator.driver.termination import unwinding
from dsv4lib.errors import ArgumentError

HAZARD, FAILED, REFUSED, INTERRUPTED = 90, 91, 92, 130
FIRST = "sm_100a"
STOP_SECONDS = 3.0  # between an interrupt and a stronger one
_ROOT = Path(__file__).resolve().parents[3]  # where this dsv4lib lies: the child must run the same one
_START = """
import json, sys
root = sys.argv[1]
sys.path.insert(0, root)
from dsv4lib.emulator.driver.run_script import main
sys.path.remove(root)
sys.exit(main(json.loads(sys.argv[2])))
"""
# "expects arch to be one of [...], but got sm_100a", "... requires sm_90a" and their like.
_WANTED = re.compile(r"sm_?(\d{2,3})([af]?)", re.I)
_REFUSAL = re.compile(r"arch|compute capability|target|support|requires|compatible", re.I)


def emulate(
    script: str | os.PathLike[str],
    args: Sequence[str] = (),
    arch: str = "auto",
    seed: int = 0,
    schedule: str = "round_robin",
    checks: str = "default",
    sm_count: int | None = None,
    time_limit: float | None = None,
    instruction_limit: int | None = None,
    memory_limit: int | None = None,
    cores: int | None = None,
    report: Mapping[str, Any] | None = None,
) -> int:
    """Run ``script`` with ``args`` in a process with an emulated device.

    Args:
        arch: an architecture of the emulator, or "auto".
        seed, schedule, checks, sm_count, time_limit, instruction_limit, memory_limit, cores: as `device` takes them.
        report: how findings are written: ``form`` ("text", "json", "sarif"), ``output`` (a file, None: standard error)
            ``command``, the name in front of messages, and ``page``, an HTML file that shows the launches.

    Returns:
        the exit code (see the module).

    Raises:
        ArgumentError: the script is not there, or an argument is wrong.
        BackendUnavailable: torch is missing.
    """
    from dsv4lib.emulator.driver.device import make, need_packages  # here, because it takes a while to import

    path = Path(script) if isinstance(script, str | os.PathLike) else None
    if path is None or not path.is_file():
        raise ArgumentError("script", script, "the path of a Python or .ptx file")
    if not isinstance(args, list | tuple) or not all(isinstance(arg, str) for arg in args):
        raise ArgumentError("args", args, "a list of strings")
    arguments.one_of("arch", arch, ("auto", *ARCHITECTURES))
    settings = {
        "seed": seed,
        "schedule": schedule,
        "checks": checks,
        "sm_count": sm_count,
        "time_limit": time_limit,
        "instruction_limit": instruction_limit,
        "memory_limit": memory_limit,
        "cores": cores,
    }
    target = FIRST if arch == "auto" else arch
    make(target, **settings)  # refuses bad settings before anything is started
    need_packages()
    findings = {"form": "text", "output": None, "command": "dsv4 emulate", "page": None, **(report or {})}
    tried: list[str] = []
    while True:
        tried.append(target)
        code, error = _attempt(path, args, target, {**settings, "findings": findings})
        wanted = wanted_arch(error) if arch == "auto" and code != 0 else None
        if wanted is None or wanted in tried:
            missing = missing_arch(error) if code != 0 else None
            if missing is not None:
                known = ", ".join(ARCHITECTURES)
                print(f"{findings['command']}: {missing} is not emulated: {known} are", file=sys.stderr)
            return code
        print(f"{findings['command']}: the script needs {wanted}; starting again", file=sys.stderr)
        target = wanted


def wanted_arch(error: str) -> str | None:
    """Read from an error message the architecture that it requires. None if it is about something else.

    >>> wanted_arch("OpError: expects arch to be Arch.sm_90a, but got Arch.sm_100a")
    'sm_90a'
    """
    for name in _named(error):
        for candidate in (name, name + "a"):
            if candidate in ARCHITECTURES and candidate != FIRST:
                return candidate
    return None


def missing_arch(error: str) -> str | None:
    """Read from an error message the architecture that it requires and that is not emulated. None if it is another.

    >>> missing_arch("OpError: expects arch to be one of [Arch.sm_120a, Arch.sm_121a], but got Arch.sm_100a")
    'sm_120a'
    """
    found = [name for name in _named(error) if name != FIRST]
    here = any(candidate in ARCHITECTURES for name in found for candidate in (name, name + "a"))
    return None if here or not found else found[0]


def _named(error: str) -> list[str]:
    """The architectures in an error message, if it is about such."""
    if not _REFUSAL.search(error):
        return []
    return [f"sm_{number}{suffix.lower()}" for number, suffix in _WANTED.findall(error)]


def _attempt(path: Path, args: Sequence[str], arch: str, settings: dict[str, Any]) -> tuple[int, str]:
    """One run; returns the exit code and the last exception's message ("" if there was none)."""
    with unwinding(), tempfile.TemporaryDirectory(prefix="dsv4-emulate-") as folder:
        report = Path(folder) / "error"
        job = json.dumps({"script": str(path), "args": list(args), "arch": arch, "report": str(report), **settings})
        environment = {
            **os.environ,
            "CUTE_DSL_ARCH": arch,
            "CUTE_DSL_DISABLE_FILE_CACHING": "1",
            "CUTE_DSL_LINEINFO": "1",
            "CUTE_DSL_CACHE_DIR": folder,
            "QUACK_CACHE_ENABLED": "0",
            "FLASHINFER_CUTE_DSL_DISABLE_CACHE": "1",
            "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0",
            "TORCHDYNAMO_DISABLE": os.environ.get("TORCHDYNAMO_DISABLE", "1"),  # 0: torch.compile compiles
            "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor"),
            # By function, not by file: a kernel from Triton's cache could name the lines of another script.
            "TRITON_CACHE_DIR": str(Path(folder) / "triton"),
            "WARP_CACHE_PATH": str(Path(folder) / "warp"),
        }
        command = [sys.executable, "-c", _START, str(_ROOT), job]
        with _interruptible():
            process = subprocess.Popen(command, env=environment)
            try:
                code = process.wait()
            except KeyboardInterrupt:
                _stop(process)
                return INTERRUPTED, ""
            except SystemExit:  # SIGTERM
                process.terminate()
                _stop(process)
                raise
        return (128 - code if code < 0 else code), report.read_text() if report.exists() else ""


@contextmanager
def _interruptible() -> Iterator[None]:
    """Inside, an interrupt is a KeyboardInterrupt: a command line may have left SIGINT to the system, which would end
    this process at once and leave the script running."""
    if threading.current_thread() is not threading.main_thread():  # only that one may set handlers
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _stop(process: subprocess.Popen) -> None:
    """Let an interrupted script end by itself; a signal from the keyboard has reached it too, another may have not."""
    for signal_number in (None, signal.SIGINT, signal.SIGKILL):
        if signal_number is not None:
            process.send_signal(signal_number)
        try:
            process.wait(STOP_SECONDS)
            return
        except subprocess.TimeoutExpired:
            continue
