"""Add up the lines of a decode step to classes, print them, and store them.

A sum says how many of its lines it is of: what was not timed is not guessed. "no kernel" is an op's own word that it
has none for this GPU.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dsv4lib.bench.decode_step.lines import BANDWIDTH, CLASSES, Line, key_of
from dsv4lib.bench.ops.results import ABSENT, OURS, TIMED, Result
from dsv4lib.errors import DSV4Error

NO_KERNEL, NOT_RUN = "no kernel", "not run"
FILE = "decode_step.csv"
COLUMNS = ("batch", "context", "class", "line", "count", "ours_count", "bytes", "floor_us", "public_us", "public")
COLUMNS += ("ours_us", "graph_us", "host_us", "ours", "run")
Results = Mapping[tuple[str, str], Result]


class Entry(NamedTuple):
    """A line with its times, us of one; None: not timed.

    Attributes:
        public: names of the others, or "". state: "timed", "no kernel", "wrong", "failed" or "not run", of ours.
        graph_us, host_us: of ours, as a node of a graph, and of the host.
    """

    line: Line
    public_us: float | None
    public: str
    ours_us: float | None
    graph_us: float | None
    host_us: float | None
    state: str


class Sum(NamedTuple):
    """ms a step of a class, or of all: `value` adds up ``timed`` of ``lines`` lines."""

    value: float
    timed: int
    lines: int

    def __str__(self) -> str:
        """As the table shows it."""
        if not self.timed:
            return "-"
        return f"{self.value:.3g}" + (f" ({self.timed} of {self.lines})" if self.timed < self.lines else "")


def entry(line: Line, results: Results) -> Entry:
    """Take the times of a line's rows."""
    peers = [result.peer if (result := results.get(key_of(row))) else None for row in line.others]
    public = None if not peers or None in peers else sum(one.us for one in peers)
    names = " + ".join(dict.fromkeys(one.provider for one in peers)) if public is not None else ""
    ours = [result.named(OURS) if (result := results.get(key_of(row))) else None for row in line.ours]
    state = _state(ours)
    times: list[float | None] = [None] * 3
    if state == TIMED:
        for i, name in enumerate(("us", "warm_us", "host_us")):
            found = [getattr(one, name) for one in ours]
            times[i] = None if None in found else sum(found)
    return Entry(line, public, names, *times, state)


def _state(ours: Sequence) -> str:
    """What became of ours: the worst of its rows."""
    if not ours or None in ours:
        return NOT_RUN
    other = next((one.state for one in ours if one.state != TIMED), TIMED)
    return NO_KERNEL if other == ABSENT else other


def total(entries: Iterable[Entry], us: Callable[[Entry], float | None], own: bool = False) -> Sum:
    """Add up ms a step. ``us``: of one; ``own``: counted as often as ours has the line."""
    found = [(us(one), one.line.ours_count if own else one.line.count) for one in entries]
    known = [(value, count) for value, count in found if value is not None]
    return Sum(sum(value * count for value, count in known) / 1e3, len(known), len(found))


def classes(entries: Sequence[Entry]) -> list[list[str]]:
    """Make the table of classes, a row each and their sum: ms a step."""
    rows = []
    groups = [(group, [one for one in entries if one.line.group == group]) for group in CLASSES]
    for group, own in [*groups, ("sum", list(entries))]:
        if not own:
            continue
        lacking = [one.line.name for one in own if one.state == NO_KERNEL] if group != "sum" else []
        ours = total(own, lambda one: one.ours_us, own=True)
        said = NO_KERNEL if lacking and not ours.timed else str(ours)
        rest = total(own, lambda one: one.public_us), total(own, lambda one: one.line.floor_us)
        host = total(own, lambda one: one.host_us, own=True)
        rows.append([group, said, str(rest[0]), str(rest[1]), str(host), ", ".join(lacking)])
    return rows


HEAD = ["class", "ours ms", "public ms", "floor ms", "host ms", "no kernel"]
LINES = ["line", "a step", "ours us", "in a graph", "public us", "floor us", "host us", "public"]


def lines(entries: Sequence[Entry]) -> list[list[str]]:
    """Make the table of lines, us of one."""

    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.3g}"

    found = []
    for one in entries:
        count = str(one.line.count)
        if one.line.ours_count != one.line.count:
            count += f" (ours {one.line.ours_count})"
        ours = shown(one.ours_us) if one.state == TIMED else one.state
        times = ours, shown(one.graph_us), shown(one.public_us), shown(one.line.floor_us), shown(one.host_us)
        found.append([one.line.name, count, *times, one.public])
    return found


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table."""
    body = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(body)


def page(tokens: int, context: int, entries: Sequence[Entry], gpu: str) -> str:
    """Write both tables of a step."""
    title = (
        f"Decode step of DSV4-Flash, b {tokens}, context {context >> 10}K, on {gpu}: "
        f"every op by itself with a cold L2, without the gaps between launches; floors at {BANDWIDTH / 1e12:g} TB/s"
    )
    return "\n\n".join((title, markdown(HEAD, classes(entries)), markdown(LINES, lines(entries)))) + "\n"


def record(steps: Mapping[tuple[int, int], Sequence[Entry]], run: str, folder: Path) -> None:
    """Write the lines of steps (batch, context) into ``folder / FILE``. Those of other steps stay.

    Raises:
        DSV4Error: the file has other columns.
    """
    folder.mkdir(exist_ok=True)
    path = folder / FILE
    table = []
    if path.is_file():
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != COLUMNS:
                raise DSV4Error(f"{path} has other columns than this version writes: record it anew")
            table = [row for row in reader if (int(row["batch"]), int(row["context"])) not in steps]
    for (batch, context), entries in steps.items():
        for one in entries:
            line = one.line
            times = line.floor_us, one.public_us, one.public, one.ours_us, one.graph_us, one.host_us
            texts = [f"{value:.5g}" if isinstance(value, float) else value or "" for value in times]
            front = batch, context, line.group, line.name, line.count, line.ours_count, line.bytes
            table.append(dict(zip(COLUMNS, (*front, *texts, one.state, run), strict=True)))
    table.sort(key=lambda row: (int(row["batch"]), int(row["context"])))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
