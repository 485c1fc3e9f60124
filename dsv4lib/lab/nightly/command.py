"""Run `./dsv4 nightly`: plan, shard, execute, conclude, keep. Or gather shards, or list unsteady checks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

from dsv4lib import env
from dsv4lib.errors import ArgumentError, DSV4Error
from dsv4lib.lab import ledger as excused
from dsv4lib.lab.commands import command, outcome
from dsv4lib.lab.nightly import cluster, gather, ledger, local, retention
from dsv4lib.lab.nightly import plan as plans
from dsv4lib.lab.nightly.retention import Limits
from dsv4lib.lab.nightly.shard import Shard
from dsv4lib.lab.records import load as load_records
from dsv4lib.lab.run import manifest, runner
from dsv4lib.lab.run.plan import Job
from dsv4lib.lab.run.progress import ConsoleProgress
from dsv4lib.lab.stage import GPU_SETS, Stage, runs_folder, workspace

NIGHT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Wish:
    """What the command line asks for; empty or None means the default."""

    set_name: str = "nightly"
    stages: list[str] = field(default_factory=list)
    sweep: dict[str, list[str]] = field(default_factory=dict)
    backends: list[str] = field(default_factory=list)
    negatives: bool = False
    shard: str = ""
    night: str = ""
    scheduler: str = ""
    budget: str = ""
    workers: int | None = None
    memory_gb: float | None = None
    resume: bool = False
    require: str | None = None
    accept_shrink: bool = False
    limits: Limits = field(default_factory=Limits)
    out: Path | None = None
    plan: bool = False


def values(words: Sequence[str]) -> dict[str, list[str]]:
    """Read ``name=value`` words, of which several may have one name: its values. ArgumentError for anything else."""
    found: dict[str, list[str]] = {}
    for word in words:
        for name, value in command.assignments([word]).items():
            if value in found.setdefault(name, []):
                raise ArgumentError("-p", word, f"each value of {name} once")
            found[name].append(value)
    if "backend" in found:
        raise ArgumentError("-p", f"backend={found['backend'][0]}", "parameters; back ends are chosen with --backends")
    return found


def run(wish: Wish, console: Console, root: Path | None = None) -> int:
    """Run a night or a shard of one. Returns the exit code.

    Raises:
        DSV4Error: anything that is refused before the start.
    """
    root = root or workspace()
    _check_night(wish.night)
    shard = Shard.parse(wish.shard) if wish.shard else None
    budget_s = plans.budget(wish.budget) if wish.budget else None
    asked = _asked(wish)
    required = command.requirement(asked)
    stages = command.chosen(wish.stages, root, wish.set_name)
    whole = plans.make(
        stages, wish.set_name, narrowed=bool(wish.stages), sweep=wish.sweep, chosen=wish.backends,
        negatives=wish.negatives,
    )  # fmt: skip
    jobs = shard.of(whole.jobs) if shard else whole.jobs
    if not wish.scheduler:
        command.want_gpu(jobs, stages, asked)
    runs = wish.out or runs_folder(root)
    if wish.plan:
        console.print(command.planned(jobs, load_records(runs)))
        return 0
    flaky = excused.living(root)
    described = {
        "whole": whole.whole and shard is None, "divided": whole.whole, "shard": str(shard or ""), "night": wish.night,
        "digest": whole.digest, "planned": [job.name for job in whole.jobs],
    }  # fmt: skip
    options = runner.Options(
        out=wish.out, workers=wish.workers, memory_mb=wish.memory_gb * 1000 if wish.memory_gb else None
    )
    given = {
        "budget_s": budget_s,
        "resume": resumes(runs, whole, jobs, wish),
        "progress": ConsoleProgress(console),
        "described": described,
    }
    ordered = plans.oldest_first(jobs, load_records(runs)) if budget_s else jobs
    if wish.scheduler:
        gpu_jobs = _need_gpu(jobs, stages, required)
        result = cluster.run(
            ordered, root, whole.set, options, scheduler=wish.scheduler, gpu_jobs=gpu_jobs, **given
        )  # fmt: skip
    else:
        result = local.run(ordered, root, whole.set, options, **given)
    place = {job.name: number for number, job in enumerate(jobs)}
    result.records.sort(key=lambda record: place[record.job])
    comparable = not shard and not wish.sweep
    came_to = outcome.Outcome(
        result,
        planned=[job.name for job in jobs],
        missing=outcome.lost(result, whole.stages, wish.accept_shrink) if comparable else [],
        required=required,
        known=outcome.known_flaky(result.records, flaky),
        flaky=_unsteady(result, console),
    )
    code = outcome.conclude(came_to, console, root)
    _keep(runs, wish.limits, result, console)
    return code


def resumes(runs: Path, whole: plans.Plan, jobs: Sequence[Job], wish: Wish) -> bool:
    """Tell whether there is a run to go on with: the last of this plan and night, if it was not finished.

    Raises:
        DSV4Error: the night has a name and this part of it was run already, or is not to be gone on with.
    """
    shard = str(Shard.parse(wish.shard)) if wish.shard else ""  # of two empty shards each is run
    same = [
        one for one in manifest.alike(runs, whole.set, env.source_fingerprint(), jobs, wish.night) if one.shard == shard
    ]
    over = bool(same) and same[-1].state == "complete"
    if wish.night and over:
        raise DSV4Error(f"the night {wish.night} has run this already: {same[-1].run_id} is complete")
    if wish.night and same and not wish.resume:
        raise DSV4Error(f"the night {wish.night} has begun this already: --resume goes on with {same[-1].run_id}")
    return wish.resume and bool(same) and not over


def run_gather(folders: Sequence[Path], wish: Wish, console: Console, root: Path | None = None) -> int:
    """Read the shards in ``folders`` as one run and conclude it. Returns the exit code.

    Raises:
        GatherError: they are not the shards of one night.
    """
    root = root or workspace()
    _check_night(wish.night)
    runs = wish.out or runs_folder(root)
    night = gather.gather(folders, wish.night, runs)
    asked = _asked(wish, set_name=next((r.set for r in night.result.records), wish.set_name))
    came_to = outcome.Outcome(
        night.result,
        planned=night.result.manifest.planned,
        missing=outcome.lost(night.result, night.stages, wish.accept_shrink) if night.result.manifest.whole else [],
        required=command.requirement(asked),
        known=outcome.known_flaky(night.result.records, excused.living(root)),
        flaky=_unsteady(night.result, console),
        sources=night.sources,
    )
    code = outcome.conclude(came_to, console, root)
    for shard in night.missing_shards:
        console.print(Text(f"shard {shard} is missing", style="red"))
    _keep(runs, wish.limits, night.result, console)
    return code


def run_ledger(wish: Wish, console: Console, root: Path | None = None) -> int:
    """Print all checks with several verdicts on one commit. Returns 0: they were red when they ran."""
    found = ledger.find(load_records(wish.out or runs_folder(root or workspace())))
    for one in found:
        console.print(Text(str(one), style="yellow"), soft_wrap=True)
    if not found:
        console.print("no check had several verdicts on one commit")
    return 0


def _check_night(name: str) -> None:
    if name and not NIGHT.fullmatch(name):
        raise ArgumentError("--night", name, "1 to 64 letters, digits, dots, dashes or underscores")


def _asked(wish: Wish, set_name: str | None = None) -> command.Wish:
    """The wish as that of `./dsv4 run`, for the rules that they share."""
    chosen = wish.backends[0] if wish.backends else None
    return command.Wish(set_name=set_name or wish.set_name, backend=chosen, require=wish.require)


def _need_gpu(jobs: Sequence[Job], stages: Sequence[Stage], required: str) -> set[str]:
    """Names of the jobs that need a worker with a GPU: by their back end, or because their kernels must run on one."""
    kernels = {stage.name: stage for stage in stages if stage.kernel}
    need = set()
    for job in jobs:
        backend = job.parameters.get("backend", "auto")
        must = required == outcome.NATIVE and backend == "auto" and job.stage in kernels
        own = kernels[job.stage].archs_in(job.set, bool(job.negative)) if must else ()
        if backend == outcome.NATIVE or (must and {*own} & {*GPU_SETS.get(job.set, own)}):
            need.add(job.name)
    return need


def _unsteady(result: runner.Result, console: Console) -> list[dict[str, object]]:
    """What this run's commit has of checks with several verdicts, printed."""
    now = result.manifest
    found = ledger.of_commit(now.folder.parent, now.commit, now.fingerprint, result.records)
    for one in found:
        console.print(Text(str(one), style="yellow"), soft_wrap=True)
    return [one.as_dict() for one in found]


def _keep(runs: Path, limits: Limits, result: runner.Result, console: Console) -> None:
    gone = retention.apply(runs, limits, current=result.manifest.run_id)
    if gone:
        what = "removed" if limits.forget else "kept only records and summary of"
        console.print(f"{what} {len(gone)} older run{'' if len(gone) == 1 else 's'}")
