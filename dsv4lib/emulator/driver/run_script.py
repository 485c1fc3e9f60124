"""Run one script under one device, in the process that `script.emulate` starts. Not for direct use."""

from __future__ import annotations

import ctypes
import dataclasses
import runpy
import signal
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dsv4lib.emulator.driver.script import FAILED, HAZARD, INTERRUPTED, REFUSED
from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.errors import DSV4Error

# Where the frames lie that are neither the script's nor those of modules beside it.
_NOT_THEIRS = (
    str(Path(__file__).resolve().parents[1]),
    sysconfig.get_path("purelib"),
    sysconfig.get_path("stdlib"),
    "<",
)


def main(job: dict[str, Any]) -> int:
    """Run ``job["script"]`` as ``__main__``; returns the exit code."""
    script, report = Path(job.pop("script")), Path(job.pop("report"))
    args, arch = job.pop("args"), job.pop("arch")
    from dsv4lib.emulator.checks import errors
    from dsv4lib.emulator.driver.device import device

    _end_with_parent()
    sys.argv = [str(script), *args]
    sys.path[0] = str(script.resolve().parent)  # as `python script.py` does
    code = 0
    try:
        with device(arch, default_device="cpu", **job) as gpu:
            try:
                runpy.run_path(str(script), run_name="__main__")
            except SystemExit as stop:
                code = _exit_code(stop)
            found = merged(gpu.hazards)
            for hazard in found:
                print(f"dsv4 emulate: {hazard}", file=sys.stderr)
            if code == 0 and errors(found):
                code = HAZARD
    except KeyboardInterrupt:
        print("dsv4 emulate: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BaseException as error:
        report.write_text(_messages(error))
        _print(error)
        cause = _chain(error)
        if any(isinstance(e, EmulatorError) for e in cause):
            return FAILED
        return REFUSED if isinstance(error, DSV4Error) else 1
    return code


def merged(hazards: Iterable[Any]) -> list[Any]:
    """Merge equal findings, counted over all launches."""
    found: dict[Any, Any] = {}
    for hazard in hazards:
        key = (hazard.key(), hazard.place.kernel if hazard.place else "")
        if key in found:
            hazard = dataclasses.replace(found[key], count=found[key].count + hazard.count)
        found[key] = hazard
    return list(found.values())


def _end_with_parent() -> None:
    """Let the operating system terminate this process when its parent ends (prctl(2): PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _print(error: BaseException) -> None:
    """The traceback as `python script.py` would print it; of what stops a launch only the frames of the script.

    The rest would be two dozen frames of the DSL and of the emulator between the call and the message, which names the
    line of the kernel.
    """
    report = traceback.TracebackException.from_exception(error)
    for part in _parts(report):
        if part.stack and part.stack[0].filename == __file__:
            del part.stack[0]
        while part.stack and (part.stack[0].filename.startswith("<frozen runpy>")):
            del part.stack[0]
    if isinstance(error, EmulatorError):
        own = [frame for frame in report.stack if not frame.filename.startswith(_NOT_THEIRS)]
        report.stack = traceback.StackSummary.from_list(own)
        report.__cause__ = report.__context__ = None
    print("".join(report.format()), end="", file=sys.stderr)


def _parts(report: traceback.TracebackException | None) -> Iterator[traceback.TracebackException]:
    """A traceback and those of its causes."""
    while report is not None:
        yield report
        report = report.__cause__ or report.__context__


def _exit_code(stop: SystemExit) -> int:
    """What the interpreter would exit with."""
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    print(stop.code, file=sys.stderr)
    return 1


def _chain(error: BaseException | None) -> list[BaseException]:
    """An exception and its causes."""
    out: list[BaseException] = []
    while error is not None and error not in out:
        out.append(error)
        error = error.__cause__ or error.__context__
    return out


def _messages(error: BaseException) -> str:
    return "\n".join(f"{type(e).__name__}: {e}" for e in _chain(error))
