"""Run one script under one device, in the process that `script.emulate` starts. Not for direct use."""

from __future__ import annotations

import ctypes
import runpy
import signal
import sys
import sysconfig
import traceback
from collections.abc import Iterator
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
    args, arch, findings = job.pop("args"), job.pop("arch"), job.pop("findings")
    from dsv4lib.emulator.checks import errors
    from dsv4lib.emulator.driver.device import device
    from dsv4lib.emulator.microscope.collect import Collector
    from dsv4lib.emulator.microscope.page import write_page

    _end_with_parent()
    sys.argv = [str(script), *args]
    sys.path[0] = str(script.resolve().parent)  # as `python script.py` does
    code, hazards, stats, stopped, collector = 0, [], [], None, None
    try:
        with device(arch, default_device="cpu", **job) as gpu:
            if findings["page"] is not None:
                collector = Collector(gpu)
            try:
                runpy.run_path(str(script), run_name="__main__")
            except SystemExit as stop:
                code = _exit_code(stop)
            finally:
                hazards += gpu.hazards
                stats += [one.result.stats for one in gpu.launches]
            if code == 0 and errors(hazards):
                code = HAZARD
    except KeyboardInterrupt:
        print(f"{findings['command']}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BaseException as error:
        report.write_text(_messages(error))
        stopped = next((e for e in _chain(error) if isinstance(e, EmulatorError)), None)
        if stopped is not None:
            stopped.__notes__ = []  # what was reported before is among the findings
            hazards += stopped.hazards
            if collector is not None:
                collector.stopped(stopped)
        _print(error)
        code = FAILED if stopped is not None else REFUSED if isinstance(error, DSV4Error) else 1
    _write(findings, str(script), hazards, stopped, code, arch, job["checks"])
    if stats and stopped is None:
        from dsv4lib.emulator.sanitize.command import say_idle

        say_idle(findings["command"], job["schedule"], stats)
    if collector is not None:
        write_page(Path(findings["page"]), collector, str(script), findings["command"], job["checks"])
    return code


def _write(
    findings: dict[str, Any],
    script: str,
    hazards: list[Any],
    stopped: EmulatorError | None,
    code: int,
    arch: str,
    checks: str,
) -> None:
    """Write the report. In text the traceback before it has said what stopped the script."""
    from dsv4lib.emulator.sanitize.findings import group
    from dsv4lib.emulator.sanitize.report import Report

    found = group(hazards, None if findings["form"] == "text" else stopped)
    output = None if findings["output"] is None else Path(findings["output"])
    Report(script, found, code, arch, checks).write(findings["form"], output, findings["command"])


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
    for part, cause in zip(_parts(report), _chain(error), strict=False):
        if isinstance(cause, EmulatorError):
            own = [frame for frame in part.stack if not frame.filename.startswith(_NOT_THEIRS)]
            part.stack = traceback.StackSummary.from_list(own)
    if isinstance(error, EmulatorError):
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
