"""Options of `dsv4 day-one`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dsv4lib.errors import ArgumentError
from dsv4lib.lab.stage import runs_folder

if TYPE_CHECKING:
    from dsv4lib.lab.day_one.command import Wish


def day_one(
    plan: Annotated[
        bool, typer.Option("--plan", help="show the steps and their estimated seconds; run nothing")
    ] = False,
    only: Annotated[list[str] | None, typer.Option(help="steps or micro-kernels that match, 'form.cp*'")] = None,
    arch: Annotated[str, typer.Option(help="sm_100a or sm_90a [default: this machine's GPU's]")] = "",
    fresh: Annotated[bool, typer.Option("--fresh", help="forget earlier results instead of going on")] = False,
    fake: Annotated[bool, typer.Option("--fake", help="no GPU: run the micro-kernels in the emulator")] = False,
    difference: Annotated[
        list[str] | None, typer.Option(help="--fake: how the device differs (warp_pairs, flip:cp.*, ...)")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0, help="end after so many; a later call goes on [default: any]")] = 0.0,
    out: Annotated[Path | None, typer.Option(help="folder of results and archive [default: in data/runs]")] = None,
    read: Annotated[Path | None, typer.Option(help="compare this archive with the emulator")] = None,
    figure: Annotated[Path | None, typer.Option(help="draw what differs into this PNG file")] = None,
    record: Annotated[bool, typer.Option("--record", help="--read: make recordings that tests replay")] = False,
    into: Annotated[Path | None, typer.Option(help="--record: folder [default: data/emulator/<gpu>]")] = None,
) -> None:
    """Ask a B200 (or H200) what no GPU has confirmed: one archive to send back. A second call goes on with the first.

    Every instruction form as micro-kernels, every stage natively, every op's times, counters where Nsight Compute is.
    Exit codes: 0; 1 where something differs in meaning or failed; 22 without such a GPU; 25 where --minutes left steps.
    """
    from dsv4lib.lab.day_one import command

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    wish = command.Wish(
        only=only or [],
        arch=arch,
        fake=fake,
        differences=difference or [],
        fresh=fresh,
        out=out,
        minutes=minutes,
        figure=figure,
        record=record,
        into=into,
    )
    check(wish, plan, read)
    if plan:
        raise typer.Exit(command.show_plan(wish, console))
    if read is not None:
        raise typer.Exit(command.read(read, wish, console))
    raise typer.Exit(command.run(wish, console, runs_folder()))


def check(wish: Wish, plan: bool, read: Path | None) -> None:
    """Refuse options that would be ignored.

    Raises:
        ArgumentError: of the first of them.
    """
    if read is None:
        if wish.record or wish.into is not None:
            raise ArgumentError("record", wish.record, "with --read ARCHIVE")
        return
    if plan:
        raise ArgumentError("plan", plan, "without --read: an archive has no steps left to show")
    of_run = ("only", "arch", "fake", "fresh", "out", "minutes")
    given = {**{name: getattr(wish, name) for name in of_run}, "difference": wish.differences}
    for name, value in given.items():
        if value:
            raise ArgumentError(name, str(value), "without --read: it is of a run, and an archive is read whole")
    if wish.into is not None and not wish.record:
        raise ArgumentError("into", str(wish.into), "with --record: nothing else is written there")
