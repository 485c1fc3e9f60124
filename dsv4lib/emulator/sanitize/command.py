"""Run a target with the checks on: PTX or CUDA C++ with a launch description, or any Python script.

Exit codes: 0 clean, lints included; 2 wrong arguments or description; 90 a check reported an error; 91 a launch was
stopped (an impossible access, a deadlock, a limit); 92 the target cannot be run: PTX that is not understood, no
architecture for it, CUDA C++ that does not compile; 93 a tensor is not as expected. A script's own code comes first.
With ``replay`` a run that was clean gets 91 or 93 if one under another schedule was stopped or is not as expected. What
only differs from the first run, with nothing expected of it, is reported and changes no code, nor does a run that
reached a limit.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsv4lib import nvrtc
from dsv4lib.emulator import gpu
from dsv4lib.emulator.checks import errors
from dsv4lib.emulator.driver import arguments
from dsv4lib.emulator.driver.arch import ARCHITECTURES
from dsv4lib.emulator.driver.script import FAILED, HAZARD, REFUSED, emulate
from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.emulator.gpu.module import read_text
from dsv4lib.emulator.machine import directed
from dsv4lib.emulator.microscope.page import write_page
from dsv4lib.emulator.sanitize import description, launching, replay, skeleton
from dsv4lib.emulator.sanitize.findings import clean, group
from dsv4lib.emulator.sanitize.report import FORMATS, Report, plain
from dsv4lib.errors import ArgumentError, BackendUnavailable

WRONG = 93
DEFAULT_CHECKS = "sanitize"  # of the command that replays
DEFAULT_ARCH = "sm_100a"  # of a .cu file whose description names none
SUFFIXES = (".ptx", ".cu", ".toml")


@dataclass(frozen=True)
class Wish:
    """What the command line asked for.

    Attributes:
        command: the command's name, for messages.
        target: a .ptx, .cu or .toml file, or a script with its ``arguments``.
        arch: or "auto". settings: of the device, as `emulator.device` takes them.
        launch: description of a .ptx or .cu file, default: the .toml file beside it. save: .npz for the tensors.
        form: one of `FORMATS`; output: file of the report. page: HTML file that shows the launches.
        replay: run a description under other schedules too, to see which change a result.
    """

    command: str
    target: str
    arguments: Sequence[str]
    arch: str
    settings: dict[str, Any]
    launch: Path | None = None
    save: Path | None = None
    form: str = "text"
    output: Path | None = None
    page: Path | None = None
    replay: bool = False


def run(wish: Wish) -> int:
    """Run the target and write the report; returns the exit code.

    Raises:
        ArgumentError: a bad argument or description.
    """
    arguments.one_of("format", wish.form, FORMATS)
    arguments.one_of("arch", wish.arch, ("auto", *ARCHITECTURES))
    for name, path in (("output", wish.output), ("save", wish.save), ("report", wish.page)):
        if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
            raise ArgumentError(name, str(path), "a file in a folder that exists")
    suffix = Path(wish.target).suffix
    if suffix not in SUFFIXES:
        for name, given in (("launch", wish.launch), ("save", wish.save), ("replay", wish.replay or None)):
            if given is not None:
                raise ArgumentError(name, str(given), "given with a .ptx, .cu or .toml file only")
        if wish.form != "text" and wish.output is None:
            raise ArgumentError("output", None, f"a file: the script writes to standard output, not {wish.form}")
        report = {"form": wish.form, "output": None if wish.output is None else str(wish.output.resolve())}
        label = {"command": wish.command, "page": None if wish.page is None else str(wish.page.resolve())}
        return emulate(wish.target, list(wish.arguments), wish.arch, **wish.settings, report=report | label)
    if wish.arguments:
        raise ArgumentError(
            "arguments", list(wish.arguments), "none: options stand before the file, and only a script takes arguments"
        )
    return _described(wish, suffix)


def _described(wish: Wish, suffix: str) -> int:
    target = Path(wish.target)
    if not target.is_file():
        raise ArgumentError("target", wish.target, "the path of a .ptx, .cu, .toml or Python file")
    path = target if suffix == ".toml" else wish.launch or target.with_suffix(".toml")
    if not path.is_file():
        how = f"a launch description; {wish.command} --describe {target} > {path.name} writes one to fill in"
        raise ArgumentError("launch", str(path), how)
    wanted = description.read(path)
    source = wanted.source if suffix == ".toml" else target
    arch = None if wish.arch == "auto" else wish.arch
    try:
        ptx = text_of(source, arch or wanted.arch, wanted.options)
        outcome = launching.run(wanted, ptx, arch, wish.save, wish.page is not None, **wish.settings)
        again = replay.trials(wanted, ptx, arch, outcome, **wish.settings) if wish.replay else []
    except (EmulatorError, BackendUnavailable, nvrtc.CompileError) as error:
        refused = Report(wish.target, [], REFUSED, refusal=f"{type(error).__name__}: {error}")
        refused.write(wish.form, wish.output, wish.command)
        return REFUSED
    code = FAILED if outcome.stopped else HAZARD if errors(outcome.hazards) else WRONG if outcome.wrong else 0
    if code == 0 and any(one.stopped or one.wrong for one in again):  # an unfinished trial says nothing
        code = FAILED if any(one.stopped for one in again) else WRONG
    report = Report(
        wish.target,
        group(outcome.hazards, outcome.stopped),
        code,
        outcome.arch,
        str(wish.settings.get("checks", "default")),
        os.path.relpath(source) if source.suffix == ".ptx" else "",
        plain(outcome.launches),
        outcome.tensors,
        {name: asdict(found) for name, found in outcome.wrong.items()},
        replay=again,
        options=_options(wish),
    )
    report.write(wish.form, wish.output, wish.command)
    if outcome.stopped is None:
        say_idle(wish.command, wish.settings.get("schedule", ""), outcome.stats)
    if outcome.collector is not None and wish.page is not None:
        write_page(wish.page, outcome.collector, wish.target, wish.command, report.checks)
    return code


def say_idle(command: str, schedule: str, stats: Iterable[Mapping[str, int]]) -> None:
    """Say which lines a schedule holds that no launch came to: a wrong line or warp holds nothing."""
    for one in directed.idle(schedule, stats):
        print(f"{command}: schedule: no launch came to {directed.PREFIX}{clean(one)}", file=sys.stderr)


def _options(wish: Wish) -> str:
    """Write the options that choose how a target runs, without schedule and seed, as a shell takes them."""
    chosen: dict[str, Any] = {"arch": None if wish.arch == "auto" else wish.arch, "launch": wish.launch}
    chosen["checks"] = None if wish.settings.get("checks") == DEFAULT_CHECKS else wish.settings.get("checks")
    chosen |= {name: wish.settings.get(name) for name in ("time_limit", "instruction_limit", "memory_limit")}
    given = [(name.replace("_", "-"), str(value)) for name, value in chosen.items() if value is not None]
    return " ".join(f"--{name} {clean(shlex.quote(value))}" for name, value in given)


def text_of(source: Path, arch: str | None, options: Sequence[str] = ()) -> str:
    """Read PTX, or compile CUDA C++ to it.

    Raises:
        ArgumentError: no such file.
        BackendUnavailable: CUDA C++, and NVRTC is not installed.
        CompileError: CUDA C++ with errors.
    """
    if source.suffix == ".cu":
        return nvrtc.compile_file(source, arch or DEFAULT_ARCH, options)
    return read_text(source)


def describe(command: str, target: str, arch: str) -> int:
    """Print the skeleton of a launch description for a .ptx or .cu file; returns the exit code."""
    path = Path(target)
    if path.suffix not in (".ptx", ".cu") or not path.is_file():
        raise ArgumentError("target", target, "the path of a .ptx or .cu file")
    try:
        module = gpu.load(text_of(path, None if arch == "auto" else arch))
    except (EmulatorError, BackendUnavailable, nvrtc.CompileError) as error:
        print(f"{command}: {type(error).__name__}: {error}", file=sys.stderr)
        return REFUSED
    print(skeleton.describe(module, path.name), end="")
    return 0
