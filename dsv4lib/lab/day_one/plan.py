"""List the steps of a day one: micro-kernels by form, every stage natively, every op's times, the GPU's counters.

Nothing of a stage is timed, nor of first calls, which compile what later steps time: these run side by side.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from dsv4lib.errors import ArgumentError
from dsv4lib.lab.day_one import forms

if TYPE_CHECKING:
    from dsv4lib.lab.stage import Stage

# What a process with its context, a probe in it, a stage and an op's rows took on an H200; the rest are estimates.
PROCESS_S, PROBE_S, STAGE_S, OP_S, COMPILE_S, COUNTERS_S = 1.0, 0.03, 37.0, 9.0, 60.0, 60.0
PROBE_LIMIT_S, STAGE_LIMIT_S, OP_LIMIT_S, COMPILE_LIMIT_S, COUNTERS_LIMIT_S = 30.0, 180.0, 120.0, 180.0, 120.0
ROWS_S, COUNTED_S = 30, 40  # after which an op starts no further row, and the profiler none
AHEAD = 12  # processes that compile kernels of ops
BESIDE = 4  # steps side by side, for the estimate
HARNESS = "dsv4lib.bench.ops.harness"
OUT = "{out}"  # in a command: the step's own folder
SETS = {"sm_100a": "b200", "sm_90a": "hopper"}  # set of parameters that stages of this architecture run with
# Files that a command leaves in its folder and that are sent back.
KEPT = ("rows.csv", "runs.csv", "counters.csv")


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        name: unique. kind: "probes" or "command".
        about: in words. seconds: estimated. limit_s: of one probe or of the command.
        probes: names, of a step of probes. command: argument vector, where `OUT` stands for a folder.
        skipped: why it has nothing to run, "" if it has.
        beside: it may run beside others of its kind, as it times nothing. waits: its process, started early, waits
            with all imports done until `dsv4lib.bench.ops.harness.TURN` gives it the GPU.
        prepares: it runs in every call in which a step that waits will: what it compiles is of one machine.
    """

    name: str
    kind: str
    about: str
    seconds: float
    limit_s: float
    probes: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    skipped: str = ""
    beside: bool = False
    waits: bool = False
    prepares: bool = False


def seconds(found: Iterable[Step]) -> float:
    """Estimate the seconds of steps, of those side by side as many at once as most machines run."""
    found = list(found)
    together = [step.seconds for step in found if step.beside]
    return sum(step.seconds for step in found if not step.beside) + max(
        sum(together) / BESIDE, max(together, default=0.0)
    )


def steps(arch: str, only: Iterable[str] = ()) -> list[Step]:
    """Make the plan for a GPU.

    Args:
        arch: "sm_100a" (B200) or "sm_90a" (H100, H200). only: patterns of names of steps or probes; none: everything.

    Raises:
        ArgumentError: another architecture, or a pattern that nothing matches.
    """
    if arch not in SETS:
        raise ArgumentError("arch", arch, ", ".join(SETS))
    found = chosen([*_probes(arch), *_stages(arch), *_times(arch), _counters()], list(only))
    at = next((i for i, step in enumerate(found) if step.kind == "command" and not step.skipped), len(found))
    return [*found[:at], *_first_calls(found), *found[at:]]


def chosen(found: list[Step], only: list[str]) -> list[Step]:
    """Steps, and parts of steps of probes, whose names match a pattern."""
    if not only:
        return found
    kept, used = [], set()
    for step in found:
        whole = {pattern for pattern in only if fnmatchcase(step.name, pattern)}
        parts = {name: {p for p in only if fnmatchcase(name, p)} for name in step.probes}
        used |= whole.union(*parts.values())
        some = tuple(name for name in step.probes if parts[name])
        if whole:
            kept.append(step)
        elif some:
            kept.append(of_probes(step.name, step.about, some))
    if missing := [pattern for pattern in only if pattern not in used]:
        raise ArgumentError("only", missing[0], "a pattern of names of steps or probes; --plan lists them")
    return kept


def of_probes(name: str, about: str, probes: tuple[str, ...]) -> Step:
    """A step of probes."""
    return Step(name, "probes", about, PROCESS_S + PROBE_S * len(probes), PROBE_LIMIT_S, probes=probes)


def _probes(arch: str) -> list[Step]:
    every, found = list(forms.probes()), []
    for form in forms.forms():
        mine = tuple(probe.name for probe in forms.of_form(form.name, every) if probe.arch == arch)
        if mine:
            found.append(of_probes(f"form.{form.name}", form.question, mine))
        elif form.arch == arch or form.instead:
            reason = form.instead or "no micro-kernel"
            found.append(Step(f"form.{form.name}", "probes", form.question, 0.0, 0.0, skipped=reason))
    return found


def _stages(arch: str) -> list[Step]:
    from dsv4lib.lab import stage

    found = []
    for one in sorted(stage.discover(), key=lambda spec: spec.notebook):
        if not one.kernel:
            continue
        name = f"stage.{one.name}"
        if reason := _left_out(one, arch):
            found.append(Step(name, "command", one.title, 0.0, 0.0, skipped=reason))
            continue
        chosen = one.parameter_set(SETS[arch])
        limit = max(STAGE_LIMIT_S, len(chosen.runs) * chosen.time_limit_s)
        options = (f"--stage={one.name}", f"--set={SETS[arch]}", "--backend=native", f"--out={OUT}")
        command = (sys.executable, "-m", "dsv4lib.lab.cli", "run", *options)
        found.append(Step(name, "command", one.title, STAGE_S, limit, command=command, beside=True))
    return found


def _left_out(one: Stage, arch: str) -> str:
    """Say why a stage with a kernel has nothing to run on this GPU; "" if it has."""
    chosen = one.sets.get(SETS[arch])
    if arch not in one.archs:
        return f"its kernels are for {' and '.join(one.archs)}"
    if chosen is None:
        return f"it has no set {SETS[arch]}"
    if any(run.get("backend", "auto") not in ("auto", "native") for run in chosen.runs):
        return "a page about the emulator"
    return ""


def _times(arch: str) -> list[Step]:
    from dsv4lib.bench.ops import modules

    found = []
    for op, place in sorted(modules.known().items()):
        name, about = f"time.{op}", f"times of {op} on this GPU, beside floors"
        if (archs := _archs_of(place)) and arch not in archs:
            reason = f"its rows are for {' and '.join(archs)}"
            found.append(Step(name, "command", about, 0.0, 0.0, skipped=reason))
            continue
        options = (f"--only={op}", "--providers=none", f"--seconds={ROWS_S}", f"--record={OUT}")
        command = (sys.executable, "-m", HARNESS, *options)
        found.append(Step(name, "command", about, OP_S, OP_LIMIT_S, command=command, waits=True))
    return found


def _archs_of(place: str) -> tuple[str, ...]:
    """List the architectures that rows of a bench module are for: its own, else those of the op beside it.

    () if neither names any, or where the DSL is missing.
    """
    for module in (place, f"{place.rpartition('.')[0]}.op"):
        try:
            return importlib.import_module(module).ARCHS
        except (ImportError, AttributeError):
            continue
    return ()


def _first_calls(found: Iterable[Step]) -> list[Step]:
    """A step that compiles what several others time, so that their time on the GPU goes to rows."""
    timed = [step.name.removeprefix("time.") for step in found if step.waits]
    if len(timed) < 2:
        return []
    options = (f"--only={','.join(timed)}", "--providers=none", f"--ahead={AHEAD}", "--first-calls")
    about = "first calls of the ops: kernels that later steps time"
    command = (sys.executable, "-m", HARNESS, *options)
    limit = COMPILE_LIMIT_S
    return [Step("compile", "command", about, COMPILE_S, limit, command=command, beside=True, prepares=True)]


def _counters() -> Step:
    command = (sys.executable, "-m", "dsv4lib.bench.ops.counters", f"--seconds={COUNTED_S}", f"--record={OUT}")
    about = "bytes, issue slots and stalls of ours, by Nsight Compute"
    return Step("counters", "command", about, COUNTERS_S, COUNTERS_LIMIT_S, command=command)
