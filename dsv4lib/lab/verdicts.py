"""Verdict classes, their exit codes and colours, and how gates are judged. One table for runner, records and report.

A run is green only if its notebook finished, reported every gated metric, and every gate passed. Whatever else
happened has its own class, so that a crash, a timeout or a full disk never reads like a wrong number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from dsv4lib.lab.stage import Gate


class Verdict(StrEnum):
    """What became of one run of a notebook."""

    PASSED = "passed"
    SKIPPED = "skipped"
    GATE_FAILED = "gate_failed"
    STAYED_GREEN = "stayed_green"
    ASSERTION = "assertion"
    ERROR = "error"
    NO_VERDICT = "no_verdict"
    MISSING_KERNEL = "missing_kernel"
    TIMEOUT = "timeout"
    OOM = "oom"
    CRASH = "crash"
    DISK_FULL = "disk_full"
    BAD_ARGUMENTS = "bad_arguments"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Look:
    """How a class is shown. Exit code, words, terminal style, and text and paper colours (contrast >= 4.5:1)."""

    code: int
    label: str
    meaning: str
    terminal: str
    ink: str
    paper: str


LOOKS: dict[Verdict, Look] = {
    Verdict.PASSED: Look(0, "passed", "every gate passed", "green", "#0b5d33", "#dcf3e5"),
    Verdict.SKIPPED: Look(20, "skipped", "nothing was verified, for a stated reason", "cyan", "#0b4f71", "#dbeef8"),
    Verdict.GATE_FAILED: Look(10, "gate failed", "a metric is outside its bound", "red", "#8f1d14", "#fbe3e0"),
    Verdict.STAYED_GREEN: Look(
        21, "stayed green", "an injected fault did not turn its gate red", "magenta", "#86195f", "#fae1f1"
    ),
    Verdict.ASSERTION: Look(11, "assertion", "an assertion in a cell failed", "red", "#8a2f00", "#fde6da"),
    Verdict.ERROR: Look(12, "error", "a cell raised an exception", "red", "#7d1128", "#fbe1e7"),
    Verdict.NO_VERDICT: Look(
        18, "no verdict", "the notebook ended without a usable verdict", "yellow", "#5f4b00", "#fbf0c5"
    ),
    Verdict.MISSING_KERNEL: Look(
        16, "missing kernel", "the notebook's Jupyter kernel is not installed", "yellow", "#6a4300", "#fcebd0"
    ),
    Verdict.TIMEOUT: Look(13, "timeout", "it ran past its time limit", "magenta", "#5b2a86", "#eee3f8"),
    Verdict.OOM: Look(15, "out of memory", "it needed more memory than there was", "magenta", "#3d3a94", "#e5e4fa"),
    Verdict.CRASH: Look(14, "crash", "the kernel process died", "bold white on red", "#ffffff", "#a3123a"),
    Verdict.DISK_FULL: Look(17, "disk full", "no space was left for its files", "bold red", "#ffffff", "#7a4a1d"),
    Verdict.BAD_ARGUMENTS: Look(2, "bad arguments", "refused before the start", "yellow", "#3f4650", "#e8ebef"),
    Verdict.INTERRUPTED: Look(130, "interrupted", "stopped by a signal", "yellow", "#ffffff", "#4b5563"),
}

# The command's exit code is that of the worst class, in this order; else the manifest's, else all-skipped, else 0.
SEVERITY = (
    Verdict.INTERRUPTED,
    Verdict.DISK_FULL,
    Verdict.CRASH,
    Verdict.OOM,
    Verdict.TIMEOUT,
    Verdict.ERROR,
    Verdict.ASSERTION,
    Verdict.GATE_FAILED,
    Verdict.STAYED_GREEN,
    Verdict.NO_VERDICT,
    Verdict.MISSING_KERNEL,
    Verdict.BAD_ARGUMENTS,
)
MANIFEST_SHRANK = 19
NO_GPU = 22
NOT_REPEATABLE = 23
NOT_NATIVE = 24
UNFINISHED = 25
GOT_WORSE = 26  # of `dsv4 trends`


@dataclass(frozen=True)
class GateResult:
    """One gate and the value it judged. ``state`` is passed, failed, skipped or missing."""

    metric: str
    op: str
    bound: float
    last_seen: float
    reason: str
    value: float | None
    state: str


def judge(gates: Iterable[Gate], metrics: Mapping[str, float], skipped: Mapping[str, str]) -> list[GateResult]:
    """Judge every gate.

    Args:
        gates: the stage's gates.
        metrics: reported values.
        skipped: checks that did not run, with the reason; a gate on such a metric is skipped, never passed.
    """
    results = []
    for gate in gates:
        value = metrics.get(gate.metric)
        reason = gate.reason
        if gate.metric in skipped:
            state, reason = "skipped", skipped[gate.metric]
        elif value is None:
            state = "missing"
        else:
            state = "passed" if gate.passes(value) else "failed"
        results.append(GateResult(gate.metric, gate.op, gate.bound, gate.last_seen, reason, value, state))
    return results


def overall(results: Iterable[GateResult]) -> tuple[Verdict, str]:
    """Judge a notebook that finished and reported these gates. Returns class and one-sentence reason."""
    results = list(results)
    failed = [r for r in results if r.state == "failed"]
    missing = [r.metric for r in results if r.state == "missing"]
    left_out = [r for r in results if r.state == "skipped"]
    if failed:
        shown = "; ".join(f"{r.metric} = {r.value:.6g}, required {r.op} {r.bound:g}" for r in failed)
        return Verdict.GATE_FAILED, shown
    if missing:
        return Verdict.NO_VERDICT, "no value for the gated metrics " + ", ".join(missing)
    if left_out:
        return Verdict.SKIPPED, "; ".join(f"{r.metric}: {r.reason}" for r in left_out)
    return Verdict.PASSED, f"{len(results)} gate{'s' if len(results) != 1 else ''} passed"


def exit_code(
    verdicts: Iterable[Verdict], shrank: bool = False, *, not_native: bool = False, unfinished: bool = False
) -> int:
    """Choose the exit code of a run.

    The worst class, else 24 if a kernel that had to run natively did not, else 25 if jobs are left, else 19 if it
    shrank, else 20 if all were skipped, else 0.
    """
    seen = set(verdicts)
    for verdict in SEVERITY:
        if verdict in seen:
            return LOOKS[verdict].code
    for happened, code in ((not_native, NOT_NATIVE), (unfinished, UNFINISHED), (shrank, MANIFEST_SHRANK)):
        if happened:
            return code
    return 0 if Verdict.PASSED in seen else LOOKS[Verdict.SKIPPED].code


def exit_code_table() -> list[tuple[int, str, str]]:
    """List (code, class, meaning) of every exit code of `./dsv4 run`."""
    rows = [(look.code, look.label, look.meaning) for look in LOOKS.values()]
    rows.append((MANIFEST_SHRANK, "shrunk run", "a whole set executed less than the last time"))
    rows.append((NO_GPU, "no GPU", "the set names a GPU that is not here, refused before the start"))
    rows.append((NOT_NATIVE, "not native", "a kernel that had to run on a GPU did not (--require native)"))
    rows.append((UNFINISHED, "unfinished", "jobs are left: out of time budget, or without a shard or a machine"))
    rows.append((NOT_REPEATABLE, "not repeatable", "a second run showed other numbers or figures (--twice)"))
    return sorted(rows)
