"""Read what was recorded of a decode step, put public kernels beside it, and check it.

Three records are read, all of one kind of GPU but the last:

| record                 | what                                                   | public kernels                   |
|------------------------|--------------------------------------------------------|----------------------------------|
| `bench/decode_step`    | every line by itself, cold L2, ours                    | those installed for that run     |
| `bench/ops`            | the ops' own rows, of other days                       | more of them: vLLM, FlashMLA ... |
| `decode_step/whole`    | whole layers as one CUDA graph, on the GPU that it names | none                           |

A public kernel is one of a package. What PyTorch makes of its own operators (torch.compile, torch.topk) is not: a
server that has nothing else would not be called fast. The faster of the two records counts.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from dsv4lib import backends, env
from dsv4lib.bench.decode_step import lines as step
from dsv4lib.bench.decode_step import run as bench
from dsv4lib.bench.decode_step import table
from dsv4lib.bench.decode_step.rows import ARCH
from dsv4lib.bench.ops import harness, results, timing
from dsv4lib.bench.ops.results import COPY, OURS, TIMED, Result
from dsv4lib.config import FLASH, ModelConfig
from dsv4lib.errors import ArgumentError, DSV4Error
from dsv4lib.pages.common import peers as peer_pages
from dsv4lib.pages.decode_step.floors import needs
from dsv4lib.pages.decode_step.schedule import Schedule
from dsv4lib.pages.hopper import ops_table, step_table

FOLDER, CONTEXT, BATCHES = step_table.FOLDER, step_table.CONTEXT, step.BATCHES
CARD = "NVIDIA H200"  # that the lines, and the goals, are of
OTHER_CARD = "NVIDIA H100 80GB HBM3"  # whose times the fault "any_card" judges
PYTORCH = "torch"  # in the names of its own code: no package's kernel
SEVERAL = ", "  # between the names of several GPUs
WHOLE = "whole step"
UNEQUAL = {"HCA compressor": "packages read 128 rows of each request at the step that closes a window, 1 in 128"}
"""Line -> why packages' kernels do other work than ours; it has no public time."""
FAULTS = {
    "none": "everything as it was recorded",
    "line_dropped": "a line is lost from the record",
    "layer_miscounted": "HCA layers are counted once too often",
    "every_expert": "floors read all experts",
    "too_fast": "a time is shorter than its bytes take",
    "class_moved": "a line stands in another class",
    "torch_counted": "PyTorch's own code counts as a public kernel",
    "any_card": "goals of one card are judged by times of another",
    "doubled": "all times are twice as long",
    "pretended": "times are shown that no kernel was launched for",
}


class Public(NamedTuple):
    """The fastest public kernel of a line: us of one, whose, of which runs."""

    us: float
    provider: str
    runs: tuple[str, ...]


class Recorded(NamedTuple):
    """One line of a step of a batch. us are of one call; None: not timed.

    Attributes:
        group, name: class and line. count: of others, and of the floor, a step; ours_count: of ours.
        bytes: it must move. floor_us: at the data sheet's bandwidth. ours_us: cold; graph_us: as a node of a graph.
        state: of ours, as `bench.decode_step.table` names it. run: that ours is from.
    """

    batch: int
    group: str
    name: str
    count: int
    ours_count: int
    bytes: int
    floor_us: float
    ours_us: float | None
    graph_us: float | None
    state: str
    run: str
    public: Public | None

    @property
    def ours_ms(self) -> float | None:
        """A step's time of ours."""
        return None if self.ours_us is None else self.ours_us * self.ours_count / 1e3

    @property
    def floor_ms(self) -> float:
        """A step's floor."""
        return self.floor_us * self.count / 1e3

    @property
    def public_ms(self) -> float | None:
        """A step's time of the public kernel."""
        return None if self.public is None else self.public.us * self.count / 1e3

    @property
    def lost_ms(self) -> float:
        """What a step loses to the floor here."""
        return 0.0 if self.ours_ms is None else self.ours_ms - self.floor_ms


class Sum(NamedTuple):
    """ms a step of some lines.

    Attributes:
        ours, floor: of the ``timed`` of all ``lines`` that ours has a time for.
        public, public_ours: of the ``compared`` lines that both have a time for.
    """

    ours: float
    floor: float
    timed: int
    lines: int
    public: float
    public_ours: float
    compared: int


class Whole(NamedTuple):
    """Whole layers as one CUDA graph: ms of a step, and the GPU."""

    batch: int
    ms: float
    gpu: str


def gpu_of(run: str) -> str:
    """Return the GPU of a run, which its key ends with."""
    return run.split(maxsplit=2)[2]


def card(rows: Iterable[Recorded]) -> str:
    """Name the GPUs that lines were timed on."""
    return SEVERAL.join(sorted({gpu_of(one.run) for one in rows}))


def bandwidth(gpu: str) -> float:
    """Return bytes/s of a GPU's memory by its data sheet.

    Raises:
        ArgumentError: a GPU that the table of rates does not have.
    """
    found = harness.peak(gpu)
    if found is None:
        raise ArgumentError("gpu", gpu, "one whose bandwidth is in data/bench/rates.csv")
    return found


# -------------------------------------------------------------------- records


@cache
def _known() -> dict:
    return step.known_rows()


def _best(key: tuple[str, str], records: Sequence[Mapping[tuple[str, str], Result]], pytorch: bool) -> Public | None:
    """Return the fastest provider of others for a row of op and shape in some records."""
    found = [
        Public(one.us, one.provider, (record[key].run,))
        for record in records
        if key in record and gpu_of(record[key].run) == CARD
        for one in record[key].found
        if one.state == TIMED and one.us and not one.provider.startswith((OURS, COPY))
        if pytorch or PYTORCH not in one.provider
    ]
    return min(found, default=None)


def _public(line: step.Line, batch: int, records: Sequence, pytorch: bool) -> Public | None:
    """Add up the rows of others that do a line's work; attention's are among the ops' own rows alone."""
    if line.name in UNEQUAL:
        return None
    keys = [step.key_of(row) for row in line.others]
    if line.group == step.ATTENTION:
        keys = [("fmha", f"Flash {line.name.split()[-1]} T {batch}")]
        if any(record[key].bytes != line.bytes for record in records for key in keys if key in record):
            raise DSV4Error(f"{keys[0][1]} of data/bench/ops is not a step of {CONTEXT} tokens")
    found = [_best(key, records, pytorch) for key in keys]
    if not found or None in found:
        return None
    names = " + ".join(dict.fromkeys(one.provider for one in found))
    runs = tuple(sorted({run for one in found for run in one.runs}))
    return Public(sum(one.us for one in found), names, runs)


def recorded(fault: str = "none") -> list[Recorded]:
    """Read every line of every batch, context `CONTEXT`.

    Args:
        fault: of `FAULTS`.

    Raises:
        DSV4Error: a record is missing, has other columns, or times of attention of other work.
    """
    records = [{(one.op, one.shape): one for one in results.load(folder)} for folder in (FOLDER, results.FOLDER)]
    wanted = {
        (line.name, batch): _public(line, batch, records, fault == "torch_counted")
        for batch in BATCHES
        for line in step.lines(batch, CONTEXT, _known())
    }
    found = []
    for row in step_table.load():
        ours, graph = (float(row[name]) if row[name] else None for name in ("ours_us", "graph_us"))
        one = Recorded(
            batch=int(row["batch"]),
            group=row["class"],
            name=row["line"],
            count=int(row["count"]),
            ours_count=int(row["ours_count"]),
            bytes=int(row["bytes"]),
            floor_us=float(row["floor_us"]),
            ours_us=ours,
            graph_us=graph,
            state=row["ours"],
            run=row["run"],
            public=wanted.get((row["line"], int(row["batch"]))),
        )
        found.append(_with_fault(one, fault))
    return [one for one in found if not (fault == "line_dropped" and (one.name, one.batch) == ("top-k", 8))]


def _with_fault(one: Recorded, fault: str) -> Recorded:
    """Change a line as a fault would."""
    if fault == "layer_miscounted" and one.name == "HCA compressor":
        return one._replace(count=one.count + 1, ours_count=one.ours_count + 1)
    if fault == "too_fast" and one.name == "LM head":
        return one._replace(ours_us=0.9 * one.floor_us)
    if fault == "class_moved" and one.name == "router":
        return one._replace(group=step.MOE)
    if fault == "doubled" and one.ours_us is not None:
        return one._replace(ours_us=2 * one.ours_us)
    return one


def sources(rows: Iterable[Recorded]) -> list[str]:
    """Say which runs times are from, and whether kernels have changed since."""
    facts, now = results.runs(FOLDER), env.kernel_fingerprint()
    found = []
    for run in sorted({row.run for row in rows}):
        then = facts[run]["kernels"]
        found.append(
            f"{run}, kernels {then}: " + ("those of this source" if then == now else f"changed since, {now} now")
        )
    return found


def whole_steps() -> list[Whole]:
    """Read what whole layers took as one CUDA graph, by batch."""
    return [
        Whole(int(row["batch"]), float(row["step_us"]) / 1e3, gpu_of(row["run"])) for row in step_table.load_whole()
    ]


def total(lines: Iterable[Recorded]) -> Sum:
    """Add up lines; what was not timed is in no sum, and is counted."""
    own = list(lines)
    timed = [one for one in own if one.ours_ms is not None]
    both = [one for one in timed if one.public_ms is not None]
    return Sum(
        sum(one.ours_ms for one in timed),
        sum(one.floor_ms for one in timed),
        len(timed),
        len(own),
        sum(one.public_ms for one in both),
        sum(one.ours_ms for one in both),
        len(both),
    )


def by_class(rows: Iterable[Recorded], batch: int) -> dict[str, Sum]:
    """Add up a batch's lines by class, in the order of the bench."""
    own = [one for one in rows if one.batch == batch]
    return {group: total(one for one in own if one.group == group) for group in step.CLASSES}


def over_floor(rows: Iterable[Recorded], batch: int) -> float:
    """Return how many times its floor a step takes, of the lines that were timed, added up."""
    found = total(one for one in rows if one.batch == batch)
    return found.ours / found.floor


def same_kernels() -> tuple[int, float]:
    """Compare providers that both records timed on `CARD`, on the same row: (how many, largest ratio of their times).

    Where there is none, the ratio is 1.
    """
    first, second = (
        {(one.op, one.shape): one for one in results.load(folder) if gpu_of(one.run) == CARD}
        for folder in (FOLDER, results.FOLDER)
    )
    ratios = []
    for key in first.keys() & second.keys():
        for one in first[key].found:
            other = second[key].named(one.provider)
            package = not one.provider.startswith((OURS, COPY)) and PYTORCH not in one.provider
            if package and one.us and other is not None and other.us:
                ratios.append(max(one.us / other.us, other.us / one.us))
    return len(ratios), max(ratios, default=1.0)


# --------------------------------------------------------------------- checks


def unaccounted(rows: Sequence[Recorded], scheduled: Schedule) -> list[str]:
    """Name what is missing: a line of the model's step without a row or a state, a call that is in no line."""
    there = {(one.name, one.batch) for one in rows if one.ours_us is not None or (one.state and one.state != TIMED)}
    lost = [f"{name}, b {batch}" for batch in BATCHES for name in scheduled.counts if (name, batch) not in there]
    known = [f"{one.name}: no call of the model" for one in rows if one.name not in scheduled.counts]
    return [*lost, *dict.fromkeys(known), *map(str, scheduled.unnamed)]


def counts_off(rows: Sequence[Recorded], scheduled: Schedule) -> list[str]:
    """Name lines that ours counts otherwise than the model calls them."""
    off = (one.name for one in rows if one.ours_count != scheduled.counts.get(one.name, one.ours_count))
    return list(dict.fromkeys(off))


def floors_off(rows: Sequence[Recorded], fault: str = "none") -> list[str]:
    """Name recorded bytes, counts and floors that differ from what the model's sizes give; floors have 5 digits."""
    found = []
    for batch in BATCHES:
        derived = {one.name: one for one in needs(FLASH, batch, CONTEXT, fault)}
        for one in (row for row in rows if row.batch == batch):
            need = derived.get(one.name)
            floor = None if need is None else float(f"{need.floor_us(bandwidth(CARD)):.5g}")
            if need is None or (need.bytes, floor) != (one.bytes, one.floor_us):
                found.append(f"{one.name}, b {batch}")
    return found


def impossible(rows: Sequence[Recorded]) -> list[str]:
    """Name cold times of ours and of others that are shorter than the floor."""
    return [
        f"{one.name}, b {one.batch}"
        for one in rows
        for us in (one.ours_us, one.public and one.public.us)
        if us is not None and us < one.floor_us
    ]


def readme_off(rows: Sequence[Recorded]) -> list[str]:
    """Name cells of README's table that are not the sums of these lines."""
    table = {}
    for text in peer_pages.written(step_table.README, step_table.MODULE).splitlines()[2:]:
        name, *cells = (cell.strip() for cell in text.strip("|").split("|"))
        table[name] = cells
    found = []
    for place, batch in enumerate(BATCHES):
        own = [one for one in rows if one.batch == batch]
        sums = {**by_class(rows, batch), "sum": total(own)}
        for name, one in sums.items():
            part = f" ({one.timed} of {one.lines})" if one.timed < one.lines else ""
            if table.get(name, [""] * len(BATCHES))[place] != f"{one.ours:.3g} / {one.floor:.3g}{part}":
                found.append(f"{name}, b {batch}")
    return found


def not_packages(rows: Sequence[Recorded]) -> list[str]:
    """Name lines whose public kernel is code that PyTorch made."""
    return [f"{one.name}, b {one.batch}" for one in rows if one.public and PYTORCH in one.public.provider]


def half_of_experts(config: ModelConfig) -> int:
    """Return the smallest batch that is expected to reach half of a model's experts: (1 - k/E)^T <= 1/2."""
    return math.ceil(math.log(2) / -math.log(1 - config.experts_per_token / config.n_experts))


# ------------------------------------------------------------- goals and limits


class Goal(NamedTuple):
    """A promise: us of a line, of lines together ("a & b"), or of the whole step, on `CARD`."""

    what: str
    batch: int
    us: float


class Judged(NamedTuple):
    """A goal beside what was measured: us (None: nothing was), on which GPU, and the verdict.

    The verdict is "reached" or "missed" by a time of `CARD`. By another GPU's, it is "reached on a slower card", or
    "missed at any bandwidth" if scaling by bandwidths, as if all of it were bytes, is not enough; else "open". Lines of
    several kinds of GPUs have a sum of none: "open".
    """

    goal: Goal
    us: float | None
    gpu: str
    verdict: str


def _read(name: str, columns: Sequence[str]) -> list[dict[str, str]]:
    path = FOLDER / name
    with Path(path).open(newline="") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != list(columns):
            raise DSV4Error(f"{path} has other columns than {', '.join(columns)}")
        return list(reader)


def goals() -> list[Goal]:
    """Read the promises.

    Raises:
        DSV4Error: the file has other columns.
    """
    return [Goal(one["what"], int(one["batch"]), float(one["us"])) for one in _read("goals.csv", Goal._fields)]


def verdict(goal_us: float, us: float, gpu: str, fault: str = "none") -> str:
    """Judge a time by a goal on `CARD`, see `Judged`."""
    if gpu == CARD or fault == "any_card":
        return "reached" if us <= goal_us else "missed"
    scale = bandwidth(gpu) / bandwidth(CARD)
    if scale <= 1 and us <= goal_us:
        return "reached on a slower card"
    if us * min(scale, 1) > goal_us:
        return "missed at any bandwidth"
    return "open"


def judged(rows: Sequence[Recorded], steps: Sequence[Whole], fault: str = "none") -> list[Judged]:
    """Put what was measured beside every promise."""
    by_line = {(one.name, one.batch): one for one in rows}
    by_batch = {one.batch: one for one in steps}
    found = []
    for goal in goals():
        if goal.what == WHOLE:
            one = by_batch.get(goal.batch)
            us, gpu = (None, CARD) if one is None else (1e3 * one.ms, OTHER_CARD if fault == "any_card" else one.gpu)
        else:
            lines = [by_line.get((name, goal.batch)) for name in goal.what.split(" & ")]
            known = [one for one in lines if one is not None]
            times = [one.ours_us for one in known if one.ours_us is not None]
            us, gpu = sum(times) if len(times) == len(lines) else None, card(known)
        if us is None:
            said = "not measured"
        else:
            said = "open" if SEVERAL in gpu else verdict(goal.us, us, gpu, fault)
        found.append(Judged(goal, us, gpu, said))
    return found


def judged_elsewhere(found: Iterable[Judged]) -> list[Judged]:
    """Return goals that another GPU's time was said to reach or to miss."""
    return [one for one in found if one.gpu != CARD and one.verdict in ("reached", "missed")]


class Limit(NamedTuple):
    """What bounds a line now, and the page that measured it."""

    limit: str
    source: str


@cache
def _limits() -> dict[str, Limit]:
    columns = ("line", *Limit._fields)
    return {one["line"]: Limit(one["limit"], one["source"]) for one in _read("limits.csv", columns)}


def limit(one: Recorded) -> Limit:
    """Say what bounds a line: a note of this batch's row if there is one, else of the line, else that none is known."""
    row = next(line for line in step.lines(one.batch, CONTEXT, _known()) if line.name == one.name).others
    note = ops_table.notes().get(step.key_of(row[0])) if row else None
    return Limit(note.limit, "ops.md") if note else _limits().get(one.name, Limit(ops_table.UNKNOWN.limit, ""))


# ----------------------------------------------------------------------- here


class Here(NamedTuple):
    """A line timed on this machine: us of one (None: not timed), its calls, the GPU, and what was recorded."""

    name: str
    us: float | None
    calls: int
    gpu: str
    recorded: Recorded


class Live(NamedTuple):
    """Lines timed here; ``skipped``: why none was, empty if some were."""

    lines: list[Here]
    skipped: str


def live(rows: Sequence[Recorded], groups: Sequence[str], batch: int = 1, fault: str = "none") -> Live:
    """Time the lines of some classes with `bench.decode_step` where a Hopper is here.

    Args:
        rows: `recorded`. groups: of `bench.decode_step.lines.CLASSES`. batch: of the step.
        fault: "pretended" shows recorded times as if they were of this machine.
    """
    past = {one.name: one for one in rows if one.batch == batch and one.group in groups}
    if fault == "pretended":
        return Live([Here(one.name, one.ours_us, 0, gpu_of(one.run), one) for one in past.values()], "")
    status = backends.status("native", ARCH)
    if not status.available:
        return Live([], f"no Hopper GPU here: {status.reason}")
    return Live(_timed(past, groups, batch), "")


def _timed(past: Mapping[str, Recorded], groups: Sequence[str], batch: int) -> list[Here]:
    """Measure with the bench's own harness, cuBLAS the only other."""
    wanted = bench.steps([batch], [CONTEXT], groups)
    with torch.no_grad():
        found = harness.run(bench.rows_of(wanted), timing.GpuClock(), providers=("cuBLAS",))
    by_row, gpu = {(one.op, one.shape): one for one in found}, torch.cuda.get_device_name()
    lines = []
    for line in wanted[batch, CONTEXT]:
        calls = [by_row[key].named(OURS) for row in line.ours if (key := step.key_of(row)) in by_row]
        least = min((one.calls for one in calls if one is not None), default=0)
        lines.append(Here(line.name, table.entry(line, by_row).ours_us, least, gpu, past[line.name]))
    return lines


def pretended(found: Live) -> list[str]:
    """Name lines that have a time without a call, and "silent" if no line has a time and no reason is given."""
    times = [one for one in found.lines if one.us is not None]
    silent = [] if times or found.skipped else ["silent"]
    return [*(one.name for one in times if not one.calls), *silent]
