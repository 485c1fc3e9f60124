"""Run `./dsv4 run`. It leads from wishes to jobs, from records to a table, a report and an exit code."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dsv4lib.errors import ArgumentError, DSV4Error
from dsv4lib.lab import ledger
from dsv4lib.lab.records import Record
from dsv4lib.lab.records import load as load_records
from dsv4lib.lab.run import manifest, plan, repeat, runner
from dsv4lib.lab.run.progress import ConsoleProgress
from dsv4lib.lab.stage import SETS, Stage, discover, load, names, runs_folder, workspace
from dsv4lib.lab.verdicts import LOOKS, NO_GPU, NOT_REPEATABLE, Verdict, exit_code

GPU_SETS = ("b200",)  # sets whose kernels are to run on a GPU, and nowhere else


@dataclass(frozen=True)
class Wish:
    """What the command line asks for; empty or None means the default."""

    set_name: str = "quick"
    stages: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    backend: str | None = None
    workers: int | None = None
    memory_gb: float | None = None
    negatives: bool = False
    resume: bool = False
    accept_shrink: bool = False
    without_gpu: bool = False
    twice: bool = False
    out: Path | None = None
    plan: bool = False


def assignments(words: Sequence[str]) -> dict[str, str]:
    """Read ``name=value`` words as a dict. ArgumentError for anything else or a name given twice."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ArgumentError("-p", word, "name=value")
        if name in found:
            raise ArgumentError("-p", word, f"each name once; {name} was already set to {found[name]!r}")
        found[name] = value
    return found


class MissingGpu(DSV4Error):
    """A set that names a GPU, on a machine that cannot run its kernels. Green would mean that nothing was checked."""

    exit_code = NO_GPU


def run(wish: Wish, console: Console, root: Path | None = None) -> int:
    """Run what is wished for, print the table and the report's path. Returns the exit code.

    Raises:
        DSV4Error: anything that is refused before the start.
        MissingGpu: see there.
    """
    root = root or workspace()
    if wish.set_name not in SETS:
        raise ArgumentError("--set", wish.set_name, "one of " + ", ".join(SETS))
    stages = chosen(wish.stages, root)
    if not stages:
        raise DSV4Error("there are no stages under stages/")
    jobs = plan.make(stages, wish.set_name, texts=wish.texts, backend=wish.backend, negatives=wish.negatives)
    _want_gpu(jobs, stages, wish)
    if wish.plan:
        console.print(planned(jobs, load_records(wish.out or runs_folder(root))))
        return 0
    flaky = ledger.living(root)
    options = runner.Options(
        out=wish.out, workers=wish.workers, memory_mb=wish.memory_gb * 1000 if wish.memory_gb else None
    )
    whole = not wish.stages and not wish.texts and wish.backend is None
    set_name = "negatives" if wish.negatives else wish.set_name
    result = runner.run(
        jobs, root, set_name, options, whole=whole, resume=wish.resume, progress=ConsoleProgress(console)
    )  # fmt: skip
    missing = _missing(result, [stage.name for stage in stages], wish)
    console.print(table(result.records))
    not_started = [job.name for job in jobs if job.name not in {r.job for r in result.records}]
    if not_started:
        console.print(Text("not started: " + ", ".join(not_started), style="yellow"))
    again = [record.job for record in result.records if not record.finished]
    if again and not result.interrupted:
        text = f"not finished: {', '.join(again)}; run them again with the same command and --resume"
        console.print(Text(text, style="yellow"))
    for key in missing:
        console.print(Text(f"missing since the last {set_name}: {key}", style="red"))
    console.print(Text(f"report: {os.path.relpath(_report(result, missing, root))}"), soft_wrap=True)
    if result.interrupted:
        console.print(Text("interrupted; go on with the same command and --resume", style="yellow"))
        return 130
    code = exit_code(_counting(result.records, flaky, console), bool(missing))
    if wish.twice and code in (0, LOOKS[Verdict.SKIPPED].code):
        second = runner.run(jobs, root, "twice", options, progress=ConsoleProgress(console))
        return _compare(result, second, console) or code
    return code


def chosen(wanted: Sequence[str], root: Path) -> list[Stage]:
    """Return the stages of these names, where "fmha_*" is all that match; all stages where none is named.

    Raises:
        UnknownStage: a name that no stage has, or a pattern that matches none.
    """
    if not wanted:
        return discover(root)
    known, found = names(root), {}
    for name in wanted:
        matching = [one for one in known if fnmatch.fnmatchcase(one, name)] if set(name) & set("*?[") else [name]
        found |= dict.fromkeys(matching or [name])
    return [load(name, root) for name in found]


def planned(jobs: Sequence[plan.Job], last: Sequence[Record]) -> Table:
    """Show what would run: back end (or why none), the limit and what the run took last, in seconds of CPU time."""
    took = {record.job: record for record in sorted(last, key=lambda r: r.started)}
    shown = Table("run", "back end", "limit s", "last s", box=None)
    for job in jobs:
        record = took.get(job.name)
        seconds = "" if record is None else f"{record.cpu_s:.0f}"
        shown.add_row(job.name, Text(job.unavailable or job.backend or "none needed"), f"{job.time_limit_s:g}", seconds)
    return shown


def _want_gpu(jobs: Sequence[plan.Job], stages: Sequence[Stage], wish: Wish) -> None:
    """Refuse a set that names a GPU where kernels that it leaves the choice would not run on one."""
    if wish.set_name not in GPU_SETS or wish.without_gpu or wish.backend is not None or "backend" in wish.texts:
        return
    kernels = {stage.name for stage in stages if stage.kernel}
    free = [job for job in jobs if job.stage in kernels and job.parameters.get("backend", "auto") in ("auto", "native")]
    lacking = sorted({job.stage for job in free if job.backend != "native"})
    if lacking:
        why = next((job.unavailable for job in free if job.unavailable), "their kernels would run in the emulator")
        raise MissingGpu(
            f"set {wish.set_name} needs a GPU for {', '.join(lacking)}: {why}; "
            "--without-gpu runs what can be run without, --backend chooses another back end"
        )


def _missing(result: runner.Result, stages: Sequence[str], wish: Wish) -> list[str]:
    """What this run lost against the set's last baseline; makes it the next one if it is whole and lost nothing.

    A run of which a part crashed, or ended before its gates were judged, has checked less: it is no baseline.
    """
    if result.interrupted or wish.texts or wish.backend is not None:
        return []
    runs, now = result.manifest.folder.parent, result.manifest
    missing = []
    if not wish.accept_shrink:
        missing = manifest.shrinkage(runs, now.set, now.executed, stages, now.run_id, now.whole)
    judged = all(record.gates or record.verdict is Verdict.SKIPPED for record in result.records)
    if now.whole and not missing and judged:
        now.save(baseline=True)
    return missing


def _counting(records: Sequence[Record], flaky: Mapping[str, ledger.Entry], console: Console) -> list[Verdict]:
    """The verdicts that count for the exit code: not the red ones of stages that the ledger knows, which are named."""
    counting = []
    for record in records:
        entry = flaky.get(f"stage {record.stage}")
        if entry is None or record.verdict in (Verdict.PASSED, Verdict.SKIPPED):
            counting.append(record.verdict)
            continue
        text = f"known to be flaky: {record.job} ({record.verdict}), until {entry.expires}, issue {entry.issue}"
        console.print(Text(text, style="yellow"))
    return counting


def _compare(first: runner.Result, second: runner.Result, console: Console) -> int:
    """Print what the second run showed differently; the exit code, 0 if it showed the same."""
    seen = {record.job: record for record in second.records}
    found = []
    for record in first.records:
        other = seen.get(record.job)
        if other is None or other.verdict is not record.verdict:
            found.append(f"{record.job}: {record.verdict}, then {other.verdict if other else 'nothing'}")
            continue
        shown = [repeat.shown(one, r.manifest.folder) for one, r in ((record, first), (other, second))]
        found += [f"{record.job}: {name}" for name in repeat.differences(*shown)]
    for line in found:
        console.print(Text(f"not the same twice: {line}", style="red"))
    if not found:
        console.print(Text(f"the same twice: {len(first.records)} runs, every number and figure"))
    return NOT_REPEATABLE if found else 0


def _report(result: runner.Result, missing: Sequence[str], root: Path) -> Path:
    from dsv4lib.lab.report.build import write_report

    return write_report(result.manifest.folder, result.records, root, missing=missing, interrupted=result.interrupted)


def table(records: Sequence[Record]) -> Table:
    """Return the closing table: one row for each job."""
    out = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("stage", "verdict", "back end", "time", "key metric"):
        out.add_column(heading, no_wrap=heading != "key metric", justify="right" if heading == "time" else "left")
    for record in records:
        look = LOOKS[record.verdict]
        out.add_row(
            record.job,
            Text(look.label, style=look.terminal),
            record.backend or "-",
            f"{record.seconds:.1f} s",
            Text(key_metric(record)),
        )
    return out


def ladder(stages: Sequence[Stage], last: Mapping[str, Record]) -> Table:
    """List the stages in reading order, with the number each reached.

    It is that of the last run here, else by contract.
    """
    out = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("stage", "what it shows", "number reached", "last run here"):
        out.add_column(heading, no_wrap=heading in ("stage", "last run here"), overflow="fold")
    for stage in stages:
        gate, record = stage.gates[0], last.get(stage.name)
        value = next((g.value for g in record.gates if g.metric == gate.metric), None) if record else None
        number = f"{gate.last_seen if value is None else value:.3g}"
        reached = Text(f"{gate.metric} {number} ({gate.op} {gate.bound:g})", style="dim" if value is None else "")
        look = LOOKS[record.verdict] if record else None
        verdict = Text(f"{look.label}, {record.seconds:.0f} s", style=look.terminal) if look else Text("-", style="dim")
        out.add_row(stage.name, Text(stage.summary), reached, verdict)
    out.caption_justify = "left"
    out.caption = "a dim number was not measured here: it is the one committed with the stage"
    return out


def key_metric(record: Record) -> str:
    """Choose the gate that decides: the first one not passed, else the stage's first. Without one, the reason."""
    if record.verdict not in (Verdict.PASSED, Verdict.GATE_FAILED) or not record.gates or record.negative:
        return record.reason
    shown = next((gate for gate in record.gates if gate.state != "passed"), record.gates[0])
    if shown.value is None:
        return f"{shown.metric}: {shown.reason}"
    return f"{shown.metric} = {shown.value:.6g} ({shown.op} {shown.bound:g})"
