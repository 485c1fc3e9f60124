"""Options of `dsv4 day-one`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dsv4lib.errors import ArgumentError
from dsv4lib.lab.stage import runs_folder


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
    out: Annotated[Path | None, typer.Option(help="folder of results and archive [default: in data/runs]")] = None,
    read: Annotated[Path | None, typer.Option(help="compare this archive with the emulator")] = None,
    figure: Annotated[Path | None, typer.Option(help="draw what differs into this PNG file")] = None,
    record: Annotated[bool, typer.Option("--record", help="--read: make recordings that tests replay")] = False,
    into: Annotated[Path | None, typer.Option(help="--record: folder [default: data/emulator/<gpu>]")] = None,
) -> None:
    """Ask a B200 (or H200) what no GPU has confirmed: one archive to send back. A second call goes on with the first.

    Every instruction form as micro-kernels, every stage natively, every op's times, counters where Nsight Compute is.
    Exit codes: 0; 1 where something differs in meaning or failed; 22 without such a GPU.
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
        figure=figure,
        record=record,
        into=into,
    )
    if (record or into) and read is None:
        raise ArgumentError("record", record, "with --read ARCHIVE")
    if plan:
        raise typer.Exit(command.show_plan(wish, console))
    if read is not None:
        raise typer.Exit(command.read(read, wish, console))
    raise typer.Exit(command.run(wish, console, runs_folder()))
