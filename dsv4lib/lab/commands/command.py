"""Run `./dsv4 run`. It leads from wishes to jobs, from records to a table, a report and an exit code."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dsv4lib.errors import ArgumentError, DSV4Error
from dsv4lib.lab import ledger
from dsv4lib.lab.commands import outcome
from dsv4lib.lab.records import Record
from dsv4lib.lab.records import load as load_records
from dsv4lib.lab.run import plan, repeat, runner
from dsv4lib.lab.run.progress import ConsoleProgress
from dsv4lib.lab.stage import GPU_SETS, NEEDED_SETS, SETS, Stage, discover, load, names, runs_folder, workspace
from dsv4lib.lab.verdicts import LOOKS, NO_GPU, NOT_REPEATABLE, Verdict


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
    require: str | None = None  # by default `native` in a set for a GPU


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
    required = requirement(wish)
    stages = chosen(wish.stages, root, wish.set_name)
    jobs = plan.make(stages, wish.set_name, texts=wish.texts, backend=wish.backend, negatives=wish.negatives)
    want_gpu(jobs, stages, wish)
    flaky = ledger.living(root)
    if wish.plan:
        console.print(planned(jobs, load_records(wish.out or runs_folder(root))))
        return 0
    options = runner.Options(
        out=wish.out, workers=wish.workers, memory_mb=wish.memory_gb * 1000 if wish.memory_gb else None
    )
    whole = not wish.stages and not wish.texts and wish.backend is None
    set_name = "negatives" if wish.negatives else wish.set_name
    result = runner.run(
        jobs, root, set_name, options, whole=whole, resume=wish.resume, progress=ConsoleProgress(console)
    )  # fmt: skip
    chosen_by_hand = bool(wish.texts) or wish.backend is not None
    came_to = outcome.Outcome(
        result,
        planned=[job.name for job in jobs],
        missing=[] if chosen_by_hand else outcome.lost(result, [stage.name for stage in stages], wish.accept_shrink),
        required=required,
        known=outcome.known_flaky(result.records, flaky),
    )
    code = outcome.conclude(came_to, console, root)
    if wish.twice and code in (0, LOOKS[Verdict.SKIPPED].code):
        second = runner.run(jobs, root, "twice", options, progress=ConsoleProgress(console))
        return _compare(result, second, console) or code
    return code


def chosen(wanted: Sequence[str], root: Path, set_name: str = "quick") -> list[Stage]:
    """Return the stages of these names, where "fmha_*" is all that match; all that have the set where none is named.

    Raises:
        UnknownStage: a name that no stage has, or a pattern that matches none.
        ArgumentError: there is no such set.
        DSV4Error: there is no stage, or none with this set.
    """
    if set_name not in SETS:
        raise ArgumentError("--set", set_name, "one of " + ", ".join(SETS))
    if not wanted:
        found = discover(root)
        having = [stage for stage in found if set_name in NEEDED_SETS or set_name in stage.sets]
        if not having:
            raise DSV4Error(f"no stage has a set {set_name}" if found else "there are no stages under stages/")
        return having
    known, named = names(root), {}
    for name in wanted:
        matching = [one for one in known if fnmatch.fnmatchcase(one, name)] if set(name) & set("*?[") else [name]
        named |= dict.fromkeys(matching or [name])
    return [load(name, root) for name in named]


def requirement(wish: Wish) -> str:
    """Return what a run's kernels must run on: `native` in a set for a GPU unless it is run without one, or `none`.

    Raises:
        ArgumentError: --require names something else.
    """
    if wish.require is not None:
        if wish.require not in outcome.REQUIREMENTS:
            raise ArgumentError("--require", wish.require, " or ".join(outcome.REQUIREMENTS))
        return wish.require
    free = not wish.without_gpu and wish.backend is None and "backend" not in wish.texts
    return outcome.NATIVE if free and wish.set_name in GPU_SETS else outcome.NOTHING


def planned(jobs: Sequence[plan.Job], last: Sequence[Record]) -> Table:
    """Show what would run: back end (or why none), the limit and what the run took last, in seconds of CPU time."""
    took = {record.job: record for record in sorted(last, key=lambda r: r.started)}
    shown = Table("run", "back end", "limit s", "last s", box=None)
    for job in jobs:
        record = took.get(job.name)
        seconds = "" if record is None else f"{record.cpu_s:.0f}"
        shown.add_row(job.name, Text(job.unavailable or job.backend or "none needed"), f"{job.time_limit_s:g}", seconds)
    return shown


def want_gpu(jobs: Sequence[plan.Job], stages: Sequence[Stage], wish: Wish) -> None:
    """Refuse a set that names a GPU where kernels that it leaves the choice would not run on one.

    Those of another architecture run where they can: no GPU runs both.

    Raises:
        MissingGpu: see there.
    """
    if wish.set_name not in GPU_SETS or wish.without_gpu or wish.backend is not None or "backend" in wish.texts:
        return
    if wish.require == outcome.NOTHING:
        return
    kernels = {one.name: one for one in stages if one.kernel}

    def there(job: plan.Job) -> bool:
        archs = kernels[job.stage].archs_in(job.set, bool(job.negative)) if job.stage in kernels else ()
        return not {*archs}.isdisjoint(GPU_SETS[wish.set_name])

    free = [job for job in jobs if there(job) and job.parameters.get("backend", "auto") in ("auto", "native")]
    lacking = sorted({job.stage for job in free if job.backend != "native"})
    if lacking:
        why = next((job.unavailable for job in free if job.unavailable), "their kernels would run in the emulator")
        raise MissingGpu(
            f"set {wish.set_name} needs a GPU for {', '.join(lacking)}: {why}; "
            "--without-gpu runs what can be run without, --backend chooses another back end"
        )


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
