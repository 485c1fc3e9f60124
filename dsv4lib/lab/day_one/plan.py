"""List the steps of a day one: micro-kernels by form, every stage natively, every op's times, the GPU's counters."""

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

# A process with its context, a probe in it and a stage took this on an H200; an op's rows and counters are estimates.
PROCESS_S, PROBE_S, STAGE_S, OP_S, COUNTERS_S = 1.0, 0.03, 30.0, 30.0, 60.0
PROBE_LIMIT_S, STAGE_LIMIT_S, OP_LIMIT_S, COUNTERS_LIMIT_S = 30.0, 180.0, 300.0, 300.0
AHEAD = 8  # processes that compile an op's kernels
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
    """

    name: str
    kind: str
    about: str
    seconds: float
    limit_s: float
    probes: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    skipped: str = ""


def steps(arch: str, only: Iterable[str] = ()) -> list[Step]:
    """Make the plan for a GPU.

    Args:
        arch: "sm_100a" (B200) or "sm_90a" (H100, H200). only: patterns of names of steps or probes; none: everything.

    Raises:
        ArgumentError: another architecture, or a pattern that nothing matches.
    """
    if arch not in SETS:
        raise ArgumentError("arch", arch, ", ".join(SETS))
    found = [*_probes(arch), *_stages(arch), *_times(arch), _counters()]
    return chosen(found, list(only))


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
        found.append(Step(name, "command", one.title, STAGE_S, limit, command=command))
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
            reason = f"its kernels are for {' and '.join(archs)}"
            found.append(Step(name, "command", about, 0.0, 0.0, skipped=reason))
            continue
        options = (f"--only={op}", "--providers=none", f"--ahead={AHEAD}", f"--record={OUT}")
        command = (sys.executable, "-m", "dsv4lib.bench.ops.harness", *options)
        found.append(Step(name, "command", about, OP_S, OP_LIMIT_S, command=command))
    return found


def _archs_of(place: str) -> tuple[str, ...]:
    """List the architectures that the op beside a bench module names; () if it names none, or the DSL is missing."""
    try:
        return getattr(importlib.import_module(f"{place.rpartition('.')[0]}.op"), "ARCHS", ())
    except ImportError:
        return ()


def _counters() -> Step:
    command = (sys.executable, "-m", "dsv4lib.bench.ops.counters", f"--record={OUT}")
    about = "bytes, issue slots and stalls of ours, by Nsight Compute"
    return Step("counters", "command", about, COUNTERS_S, COUNTERS_LIMIT_S, command=command)
