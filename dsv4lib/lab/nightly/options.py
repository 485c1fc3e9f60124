"""Hold the options of `./dsv4 nightly`. The command itself is imported only when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dsv4lib.errors import ArgumentError


def nightly(
    set_name: Annotated[str, typer.Option("--set", help="quick, nightly, b200 or hopper")] = "nightly",
    stage: Annotated[
        list[str] | None, typer.Option("--stage", "-s", help="only this stage, or all that match 'fmha_*'")
    ] = None,
    parameter: Annotated[
        list[str] | None, typer.Option("-p", help="name=value, for every chosen stage; of several values all are run")
    ] = None,
    backends: Annotated[str, typer.Option(help="back ends, with commas between them, each of which runs all")] = "",
    negatives: Annotated[bool, typer.Option("--negatives", help="run the injected faults, too")] = False,
    shard: Annotated[str, typer.Option(help="i/n: only this part of the plan")] = "",
    night: Annotated[str, typer.Option(help="name of the night, by which its shards are gathered")] = "",
    scheduler: Annotated[str, typer.Option(help="dask.distributed scheduler: address or file [default: here]")] = "",
    budget: Annotated[str, typer.Option(help="no job starts later than this: 90m, 2h, 1h30m")] = "",
    jobs: Annotated[int | None, typer.Option(min=1, help="notebooks at a time here [default: usable cores]")] = None,
    memory_gb: Annotated[float | None, typer.Option(min=0.1, help="memory limit of a run [default: 90 %]")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on with the last one if it was killed or ran out of time")
    ] = False,
    require: Annotated[
        str | None,
        typer.Option(help="native: a kernel that does not run on a GPU fails the run [default in b200, hopper]; none"),
    ] = None,
    accept_shrink: Annotated[bool, typer.Option("--accept-shrink", help="it may execute less than last time")] = False,
    gather: Annotated[
        list[Path] | None, typer.Option(help="read the shards in this folder (repeatable) as one run; run nothing")
    ] = None,
    flaky: Annotated[bool, typer.Option("--flaky", help="list checks with several verdicts on one commit")] = False,
    keep_days: Annotated[float | None, typer.Option(help="keep runs of so many days whole")] = None,
    keep_runs: Annotated[int | None, typer.Option(help="keep the newest so many runs whole")] = None,
    forget: Annotated[bool, typer.Option("--forget", help="of the others, remove records and summary, too")] = False,
    out: Annotated[Path | None, typer.Option(help="folder for the runs [default: data/runs]")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="show what would run, and where; run nothing")] = False,
) -> None:
    """Run a whole plan on this machine or on many, with shards, a time budget and retention.

    Ends like `run`, with a report, summary.json and junit.xml; dsv4lib/lab/nightly/README.md has recipes for cron,
    systemd, GitHub Actions, Slurm and Kubernetes.
    """
    from dsv4lib.lab.nightly import command

    console = Console(highlight=False)
    if gather and (shard or scheduler or resume or flaky or plan):
        raise ArgumentError("--gather", str(gather[0]), "alone: it runs nothing")
    wish = command.Wish(
        set_name=set_name,
        stages=list(dict.fromkeys(stage or [])),
        sweep=command.values(parameter or []),
        backends=[name.strip() for name in backends.split(",") if name.strip()],
        negatives=negatives,
        shard=shard,
        night=night,
        scheduler=scheduler,
        budget=budget,
        workers=jobs,
        memory_gb=memory_gb,
        resume=resume,
        require=require,
        accept_shrink=accept_shrink,
        limits=command.Limits(keep_days, keep_runs, forget),
        out=out.resolve() if out else None,
        plan=plan,
    )
    if flaky:
        raise typer.Exit(command.run_ledger(wish, console))
    if gather:
        raise typer.Exit(command.run_gather(gather, wish, console))
    raise typer.Exit(command.run(wish, console))
