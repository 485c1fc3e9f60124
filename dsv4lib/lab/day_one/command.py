"""Run `./dsv4 day-one`. It makes an archive where there is a GPU, and reads one anywhere."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dsv4lib import env
from dsv4lib.errors import ArgumentError, DSV4Error
from dsv4lib.lab.day_one import archive as archives
from dsv4lib.lab.day_one import differences, forms, gpu, plan, reading, runner
from dsv4lib.lab.verdicts import NO_GPU, UNFINISHED

ARCHIVE = "day_one.tar.gz"
NO_TIME = "not run, no time left: "  # `bench.ops.harness.NO_TIME`, which imports torch
SHOWN = 4  # lines of a form and verdict


class MissingGpu(DSV4Error):
    """No GPU that a day one is for."""

    exit_code = NO_GPU


@dataclass(frozen=True)
class Wish:
    """Options of the command.

    Attributes:
        only: patterns of steps or probes. arch: "" for this machine's GPU's.
        fake: run in the emulator; differences: of the fake device.
        fresh: forget earlier results. out: folder, None for the default. minutes: of the whole run, 0 for any.
        figure: PNG file to draw into. record: write a recording; into: its folder, None for data/emulator/<gpu>.
    """

    only: list[str] = field(default_factory=list)
    arch: str = ""
    fake: bool = False
    differences: list[str] = field(default_factory=list)
    fresh: bool = False
    out: Path | None = None
    minutes: float = 0.0
    figure: Path | None = None
    record: bool = False
    into: Path | None = None


def show_plan(wish: Wish, console: Console) -> int:
    """Print the steps with their estimated seconds."""
    found = gpu.find()
    arch = wish.arch or (found.arch if found else None) or "sm_100a"
    steps = plan.steps(arch, wish.only)
    known = {line.probe for folder in reading.recordings() for line in reading.recorded(folder)}
    ran = any(probe.name in known for probe in forms.probes() if probe.arch == arch)
    proven = "" if ran else "; no such GPU has run it yet"
    table = Table("step", "what", "seconds", "runs")
    for step in steps:
        runs = step.skipped or (f"{len(step.probes)} micro-kernels" if step.probes else "a command")
        table.add_row(step.name, escape(step.about), f"{step.seconds:.0f}", escape(runs))
    console.print(table)
    minutes = plan.seconds(steps) / 60
    console.print(f"{len(steps)} steps, about {minutes:.0f} minutes with a GPU (an estimate{proven})", soft_wrap=True)
    return 0


def run(wish: Wish, console: Console, runs: Path) -> int:
    """Run the steps, write the archive after each, and say what it shows.

    Returns:
        0; 1 where a probe differs in meaning or failed, or a command failed, or the run had to stop; 25 where nothing
        of this happened and ``minutes`` left steps.

    Raises:
        MissingGpu: no GPU of the lab's, and no ``fake``.
        ArgumentError: the folder has results of another device.
    """
    for name in wish.differences:
        differences.check(name)
    if wish.differences and not wish.fake:
        raise ArgumentError("difference", wish.differences[0], "with --fake alone: a GPU differs by itself")
    found = None if wish.fake else _gpu(wish.arch)
    arch = wish.arch or (found.arch if found else "sm_100a")
    every = plan.steps(arch)
    steps = plan.steps(arch, wish.only)
    folder = wish.out or runs / ("day_one_fake" if wish.fake else "day_one") / arch
    folder.mkdir(parents=True, exist_ok=True)
    if wish.fresh:
        runner.fresh(folder)
    codes = {step.name: runner.code_of(step) for step in [*every, *steps] if step.kind == "command"}
    path = folder / ARCHIVE

    def pack() -> None:
        archives.pack(folder, manifest(arch, found, wish, steps, running.finished(arch)), path, codes)

    running = runner.Runner(
        folder,
        fake=wish.differences if wish.fake else None,
        gpu={"name": found.name, "cuda": found.cuda} if found else {},
        tell=lambda line: console.print(escape(line)),
        seconds=60 * wish.minutes or math.inf,
        after=pack,
    )
    whole = running.run(steps)
    pack()
    code = read(path, Wish(figure=wish.figure), console)
    if running.left:
        text = f"{len(running.left)} steps left after {wish.minutes:g} minutes, call again: {', '.join(running.left)}"
        console.print(text, soft_wrap=True)
    console.print(f"archive: {os.path.relpath(path)} ({path.stat().st_size / 1e6:.1f} MB)", soft_wrap=True)
    if code or not whole:
        return code or 1
    return UNFINISHED if running.left else 0


def _gpu(arch: str) -> gpu.Gpu:
    found = gpu.find()
    fix = "run it where one is, or in the emulator: --fake"
    if found is None:
        raise MissingGpu(f"no GPU: a day one needs an NVIDIA driver with a B200 (or H100, H200); {fix}")
    if found.arch not in plan.SETS:
        major, minor = found.capability
        raise MissingGpu(f"{found.name} has compute capability {major}.{minor}, a day one needs 10.0 or 9.0; {fix}")
    if arch and arch != found.arch:
        raise MissingGpu(f"{found.name} runs {found.arch} kernels, not {arch}; {fix}")
    return found


def manifest(
    arch: str, found: gpu.Gpu | None, wish: Wish, steps: Sequence[plan.Step], finished: Iterable[str] = ()
) -> dict[str, Any]:
    """What the archive says of the machine and the plan: no host, user or path.

    Args:
        arch, found, wish: of this run. steps: of its plan. finished: probes with a result, of earlier plans too.
    """
    revision = env.revision()
    probes = dict.fromkeys([*(name for step in steps for name in step.probes), *finished])
    return {
        "arch": arch,
        "gpu": found.name if found else "fake device",
        "cuda": found.cuda if found else "",
        "fake": wish.differences if wish.fake else None,
        "label": env.machine_label(),
        "version": env.version(),
        "fingerprint": env.source_fingerprint(),
        "commit": revision.commit,
        "versions": env.versions(),
        "probes": list(probes),
        "steps": [{"name": step.name, "kind": step.kind, "skipped": step.skipped} for step in steps],
    }


def read(path: Path, wish: Wish, console: Console) -> int:
    """Compare an archive with the emulator, print what differs, draw and record it.

    Returns:
        0; 1 where a probe differs in meaning or failed, or a command failed.
    """
    archive = archives.read(path)
    compared = list(reading.compare(archive))
    name = f"{archive.manifest.get('gpu')}, {archive.manifest.get('arch')}"
    console.print(escape(name))
    console.print(_summary(compared))
    _details(compared, console)
    failed = _commands(archive, console)
    if wish.figure is not None:
        from dsv4lib.lab.day_one import figures
        from dsv4lib.viz.style import to_png

        wish.figure.write_bytes(to_png(figures.overview(compared, name)))
    if wish.record:
        into = wish.into or env.root() / "data" / "emulator" / reading.folder_of(archive.manifest)
        lines = reading.record(archive, compared, into)
        console.print(f"recorded: {len(lines)} micro-kernels in {os.path.relpath(into)}", soft_wrap=True)
    return 1 if failed or any(one.verdict in reading.BAD for one in compared) else 0


def _summary(compared: list[reading.Compared]) -> Table:
    questions = {form.name: form.question for form in forms.forms()}
    seen = [verdict for verdict in reading.VERDICTS if any(one.verdict == verdict for one in compared)]
    table = Table("form", *seen, "question")
    for name, of_form in reading.counts(compared).items():
        numbers = [str(of_form[verdict] or "") for verdict in seen]
        table.add_row(name, *numbers, escape(questions.get(name, "")))
    return table


def _details(compared: list[reading.Compared], console: Console) -> None:
    """Print the first lines of each form and verdict, meaning before rounding."""
    said: dict[tuple[str, str], list[str]] = {}
    for one in sorted(compared, key=lambda one: -reading.VERDICTS.index(one.verdict)):
        if one.verdict not in (reading.SAME, reading.MISSING):
            said.setdefault((one.verdict, one.form), []).append(_line(one))
    for lines in said.values():
        for line in lines[:SHOWN]:
            console.print(escape(line), soft_wrap=True)
        if len(lines) > SHOWN:
            console.print(f"    and {len(lines) - SHOWN} more of this form", soft_wrap=True)


def _line(one: reading.Compared) -> str:
    text = f"{one.verdict}: {one.name} ({one.form})"
    if one.words:
        far = f", at most {one.max_ulp} ulp" if one.verdict == reading.ROUNDS and one.max_ulp >= 0 else ""
        text += f": {one.words} words{far}, first {one.first}: {one.got}, emulator {one.want}"
    return text + (f": {one.detail.splitlines()[-1]}" if one.detail.strip() else "")


def _commands(archive: archives.Archive, console: Console) -> int:
    """Print what became of commands, and times beside floor and model. Returns how many failed."""
    failed = 0
    for step, files in sorted(archive.commands.items()):
        found = archives.parsed(f"{step}/result.json", files.get("result.json", b"{}"))
        status, detail = str(found.get("status", "damaged")), str(found.get("detail", ""))
        lines = detail.strip().splitlines()
        if status != runner.RAN:
            failed += status not in (runner.ABSENT, runner.UNFINISHED)
            console.print(escape(f"{step}: {status} {lines[-1] if lines else ''}"), soft_wrap=True)
        for line in lines:
            if line.startswith(NO_TIME):
                console.print(escape(f"{step}: {line}"), soft_wrap=True)
    if rows := reading.times(archive):
        table = Table("op", "shape", "measured us", "floor us", "modelled us", "measured / modelled")
        for row in rows:
            ratio = "" if not row.modelled_us else f"{row.us / row.modelled_us:.2f}"
            numbers = ["" if x is None else f"{x:.3g}" for x in (row.us, row.floor_us, row.modelled_us)]
            table.add_row(escape(row.op), escape(row.shape), *numbers, ratio)
        console.print(table)
    return failed
