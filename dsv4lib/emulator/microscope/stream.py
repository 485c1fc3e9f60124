"""Make a compact event stream of a trace: what a page needs to show any moment of a launch.

An event is a row of one of `TABLES`. A stream has at most ``limit`` of them. Where a launch has more, whole CTAs are
left out, those without findings first. Where not even one CTA fits, a span of it stays, around its first finding if it
has one, with the rows before it that still show: the last access to each cell, the last state of each barrier; where
those alone are too many, the newest of them. ``cut`` says what is left; ``lost`` counts what shows and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dsv4lib.emulator.checks.report import Hazard
from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.emulator.gpu.names import shortened
from dsv4lib.emulator.microscope import code
from dsv4lib.emulator.microscope.columns import encode, encode_words
from dsv4lib.emulator.sanitize.findings import Finding, clean, group
from dsv4lib.emulator.trace.trace import Trace, unpack_lanes
from dsv4lib.errors import ArgumentError

FORMAT = 1
LIMIT = 20_000  # events of a page
TABLES = ("states", "ops", "boxes", "mmas", "tmem", "smem", "mbarriers", "named", "fences", "peers", "marks")
_WORDS = ("unit", "kind", "mode", "what", "state", "reason")  # columns of words
_DROPPED = ("coords", "lanes", "address", "flops", "tensor")  # coded otherwise, or an address of this run
_LEAST = 0.1  # share of the limit that a span has at least
_LEAD = 0.25  # share of a cut CTA's rows that come after its first finding


def stream(
    trace: Trace,
    hazards: Sequence[Hazard] = (),
    stopped: EmulatorError | None = None,
    limit: int = LIMIT,
    most_ptx: int | None = None,
    **facts: Any,
) -> dict[str, Any]:
    """Make plain data, for JSON, of one launch.

    Args:
        hazards: of the launch's result, in its order. stopped: what ended it.
        limit: events, at least 100.
        most_ptx: characters of PTX up to which it is listed whole.
        facts: further entries, such as ``arch`` or ``schedule``.

    Raises:
        ArgumentError: a limit below 100.
    """
    if limit < 100:
        raise ArgumentError("limit", limit, "at least 100 events")
    kept, cut = _cut(trace, limit)
    place = np.full(len(trace.ops) + 1, -1, np.int64)  # of an operation among those kept; the last is for none
    place[kept["ops"]] = np.arange(len(kept["ops"]))
    tables = {name: _table(trace, name, rows, place) for name, rows in kept.items()}
    chunk_sets: dict[tuple[int, ...], int] = {}
    smem = [_numbered(chunk_sets, _runs(trace.chunks[row])) for row in kept["smem"]]
    tables["smem"]["columns"]["chunks"] = encode(smem)
    lane_sets: dict[tuple[int, ...], int] = {}
    lanes = [
        _numbered(lane_sets, _runs(np.nonzero(mask)[0])) for mask in unpack_lanes(trace.tmem["lanes"][kept["tmem"]])
    ]
    tables["tmem"]["columns"]["lanes"] = encode(lanes)
    tables["ops"]["columns"]["label"] = encode_words([clean(trace.labels[row]) for row in kept["ops"]])
    boxes = [_box(trace, row) for row in kept["boxes"]]
    tables["boxes"]["columns"]["box"] = encode_words(boxes)
    found = group(hazards, stopped)
    lines = _lines(trace, kept, found)
    return {
        "format": FORMAT,
        "kernel": clean(shortened(trace.kernel)),
        "grid": list(map(int, trace.grid)),
        "smem_bytes": int(trace.smem_bytes),
        "time": int(trace.time),
        "events": int(trace.events),
        "dropped": int(trace.dropped),
        "cut": cut,
        "tables": tables,
        "chunks": [list(runs) for runs in chunk_sets],
        "lanes": [list(runs) for runs in lane_sets],
        **code.listing(trace, lines, [(s.file, s.line) for f in found for s in (f.place, f.against) if s], most_ptx),
        "findings": [_finding(one, trace) for one in found],
        **facts,
    }


def _numbered(known: dict[tuple[int, ...], int], key: tuple[int, ...]) -> int:
    return known.setdefault(key, len(known))


def _runs(numbers: np.ndarray) -> tuple[int, ...]:
    """First and length of each run of consecutive numbers, ascending."""
    ordered = np.unique(np.asarray(numbers, np.int64))
    if not len(ordered):
        return ()
    starts = np.append(0, np.nonzero(np.diff(ordered) != 1)[0] + 1)
    lengths = np.diff(np.append(starts, len(ordered)))
    return tuple(np.stack([ordered[starts], lengths], 1).ravel().tolist())


def _box(trace: Trace, row: int) -> str:
    """A tensor copy in words: coordinates and the tensor map."""
    box = trace.boxes[row]
    tensor = trace.tensors[box["tensor"]]
    rank = len(tensor.dims)
    return f"({', '.join(map(str, box['coords'][:rank]))}) of a tensor {tuple(tensor.dims)}, box {tuple(tensor.box)}"


def _table(trace: Trace, name: str, rows: np.ndarray, place: np.ndarray) -> dict[str, Any]:
    """Columns of some rows; ``op`` becomes the row among the operations that are kept, else -1."""
    table = getattr(trace, name)
    columns = {}
    for column in table.dtype.names:
        if column in _DROPPED:
            continue
        values = table[column][rows] if column != "op" else place[table["op"][rows]]
        columns[column] = encode_words(values.tolist()) if column in _WORDS else encode(values)
    return {"rows": len(rows), "columns": columns}


# ---- what is left out ------------------------------------------------------------------------------------------------


def _cut(trace: Trace, limit: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Choose the rows of each table, and say what was left out."""
    tables = {name: getattr(trace, name) for name in TABLES}
    total = sum(map(len, tables.values()))
    ctas = np.unique(np.concatenate([table["cta"] for table in tables.values()] or [[0]]))
    counts = {int(cta): sum(int((t["cta"] == cta).sum()) for t in tables.values()) for cta in ctas}
    first = {int(cta): int(np.nonzero(trace.hazards["cta"] == cta)[0][0]) for cta in np.unique(trace.hazards["cta"])}
    ordered = sorted(counts, key=lambda cta: (first.get(cta, len(trace.hazards)), cta))
    whole: list[int] = []
    room = limit
    for cta in ordered:
        if counts[cta] > room:
            break
        whole.append(cta)
        room -= counts[cta]
    kept = {name: np.nonzero(np.isin(t["cta"], whole))[0] for name, t in tables.items()}
    left: dict[str, Any] = {"limit": limit, "events": total, "ctas": len(ordered), "shown": sorted(whole), "part": None}
    if len(whole) < len(ordered) and not whole:  # not even one CTA fits
        cta = ordered[0]
        kept, span, lost = _window(trace, tables, cta, room)
        left |= {"shown": [cta], "part": {"cta": cta, "first": span[0], "last": span[1], "lost": lost}}
    left["kept"] = sum(map(len, kept.values()))
    return kept, left


def _window(
    trace: Trace, tables: dict[str, np.ndarray], cta: int, limit: int
) -> tuple[dict[str, np.ndarray], tuple[int, int], int]:
    """Rows of one CTA within a span of time, and those before that are still visible when it begins.

    Where these alone are too many, the newest stay; the last number counts the others.
    """
    mine = {name: np.nonzero(table["cta"] == cta)[0] for name, table in tables.items()}
    times = np.sort(np.concatenate([tables[name]["time"][rows] for name, rows in mine.items()]))
    at = trace.hazards["time"][trace.hazards["cta"] == cta]
    size = limit
    while True:
        middle = int(np.searchsorted(times, at[0], side="right")) if len(at) else 0
        end = min(max(middle + int(size * _LEAD), size), len(times))
        first, last = int(times[max(end - size, 0)]), int(times[end - 1])
        kept = {}
        for name, rows in mine.items():
            time = tables[name]["time"][rows]
            inside = (time <= last) & (tables[name]["end"][rows] > first if name == "states" else time >= first)
            kept[name] = np.unique(np.append(rows[inside], _visible(trace, name, rows, first)))
        count = sum(map(len, kept.values()))
        if count <= limit:
            return kept, (first, last), 0
        if size <= _LEAST * limit:
            return _newest(tables, kept, limit), (first, last), count - limit
        size = int(size * 0.9)


def _newest(tables: dict[str, np.ndarray], kept: dict[str, np.ndarray], limit: int) -> dict[str, np.ndarray]:
    """The ``limit`` rows with the highest times."""
    times = np.concatenate([tables[name]["time"][rows] for name, rows in kept.items()])
    chosen = np.zeros(len(times), bool)
    chosen[np.argsort(times, kind="stable")[len(times) - limit :]] = True
    ends = np.cumsum([len(rows) for rows in kept.values()])[:-1]
    return {name: rows[part] for (name, rows), part in zip(kept.items(), np.split(chosen, ends), strict=True)}


def _visible(trace: Trace, name: str, rows: np.ndarray, first: int) -> np.ndarray:
    """Rows before a time that still show at it."""
    table = getattr(trace, name)
    before = rows[table["time"][rows] < first]
    if not len(before):
        return np.empty(0, np.int64)
    if name == "mbarriers":
        return _latest(before, [table["offset"][before]])
    if name == "marks":
        return _latest(before, [table["warp"][before]])
    if name == "tmem":
        return _latest(before, [table["column"][before], table["end"][before], table["lanes"][before]])
    if name == "smem":
        return _latest(before, [table["first"][before], table["end"][before]])
    if name == "ops":
        return before[(table["done_time"][before] < 0) | (table["done_time"][before] >= first)]
    return np.empty(0, np.int64)


def _latest(rows: np.ndarray, keys: list[np.ndarray]) -> np.ndarray:
    """The last of the rows that agree in all keys."""
    last = {}
    columns = [key.tolist() if key.ndim == 1 else [bytes(one) for one in key] for key in keys]
    for row, key in zip(rows.tolist(), zip(*columns, strict=True), strict=True):
        last[key] = row
    return np.array(sorted(last.values()), np.int64)


# ---- findings --------------------------------------------------------------------------------------------------------


def _lines(trace: Trace, kept: dict[str, np.ndarray], found: Sequence[Finding]) -> set[int]:
    """PTX lines that the kept rows and the findings name."""
    tables = (getattr(trace, name)[rows] for name, rows in kept.items())
    lines = {line for t in tables if "line" in t.dtype.names for line in np.unique(t["line"]).tolist()}
    return lines | {line for one in found for pair in one.instructions for line in pair}


def _finding(one: Finding, trace: Trace) -> dict[str, Any]:
    """Plain data with the moment: the first report of the same kind and pair of instructions, else the end."""
    pairs = {(line, owner) for line, owner in one.instructions}
    rows = [row for row in trace.hazards if (int(row["line"]), int(row["owner"])) in pairs and row["kind"] == one.kind]
    moment = {"event": trace.events, "time": trace.time, "cta": -1, "warp": -1}
    if rows:
        moment = {name: int(rows[0][name]) for name in moment}
    out = one.as_dict() | moment
    for side in ("place", "against"):
        if out[side] is not None:
            out[side]["file"] = code.shown(out[side]["file"])
    return out
