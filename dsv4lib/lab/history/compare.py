"""Lay two runs side by side: verdicts, gated metrics and their distance to the bound, times, figures."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4lib import env
from dsv4lib.errors import ArgumentError
from dsv4lib.lab.history import store
from dsv4lib.lab.history.series import LESS, MORE, job_name
from dsv4lib.lab.run.files import read_own

NOTEBOOK_BYTES = 1 << 28
SHOWN_FIGURES = 40


@dataclass(frozen=True)
class Line:
    """One thing that both runs or one of them have.

    Attributes:
        what: verdict, metric, seconds.
        name: of the notebook and metric. a, b: as text, "" where a run lacks it.
        change: b against a, None where one is no number.
        left: of the way from its bound to zero that b is inside, None without a gate: 0 at the bound, negative outside.
        differs: whether they differ.
    """

    what: str
    name: str
    a: str
    b: str
    change: float | None = None
    left: float | None = None
    differs: bool = False


def find(runs: Path, name: str) -> str:
    """Return the run that a word names: its name or the start of it, a commit's start, ``last`` or ``previous``.

    Raises:
        ArgumentError: none or several are called so.
    """
    rows = store.records_table(runs).select(["run_id", "commit", "started"]).to_pylist()
    known = sorted({row["run_id"] for row in rows})
    if name in ("last", "previous"):
        if len(known) < 1 + (name == "previous"):
            raise ArgumentError("run", name, f"one of {len(known)} runs; {env.front_door()} run makes them")
        return known[-1 if name == "last" else -2]
    found = [run for run in known if run.startswith(name)]
    if not found and len(name) >= 4:
        of_commit = sorted({row["run_id"] for row in rows if (row["commit"] or "").startswith(name)})
        found = of_commit[-1:]
    if not name or len(found) != 1:
        several = f"{len(found)} runs start so; " if len(found) > 1 else ""
        newest = ", ".join(known[-3:]) or "none yet"
        raise ArgumentError(
            "run", name, f"{several}last, previous, a commit or a run, the newest of which are {newest}"
        )
    return found[0]


def lines(runs: Path, a: str, b: str) -> list[Line]:
    """Return what the runs ``a`` and ``b`` (names as `find` gives them) say of the same things."""
    both = [_by_job(runs, name) for name in (a, b)]
    found: list[Line] = []
    for job in sorted({*both[0], *both[1]}):
        rows = [side.get(job) for side in both]
        verdicts = [str(row["verdict"]) if row else "" for row in rows]
        found.append(Line("verdict", job, *verdicts, differs=verdicts[0] != verdicts[1]))
        found += _numbers(job, rows)
    return found


def _by_job(runs: Path, run_id: str) -> dict[str, dict[str, Any]]:
    found = {}
    for row in store.records_table(runs).to_pylist():
        if row["run_id"] == run_id and row["last"]:
            fault = f", fault {row['negative']}" if row["negative"] else ""
            found[f"{job_name(row)} in {row['plan']}{fault}"] = row
    return found


def _numbers(job: str, rows: list[dict[str, Any] | None]) -> Iterator[Line]:
    gates = {gate["metric"]: gate for row in rows if row for gate in row["gates"] or []}
    metrics = [dict(row["metrics"] or []) if row else {} for row in rows]
    for name in sorted({*metrics[0], *metrics[1]}):
        pair = [side.get(name) for side in metrics]
        gate, left = gates.get(name), None
        if gate is not None and pair[1] is not None:
            left = _room(gate["op"], gate["bound"], pair[1])
        yield _line("metric", f"{job}: {name}", pair, left, pair[0] != pair[1])
    seconds = [(row["counted_s"] or row["cpu_s"] or row["seconds"]) if row else None for row in rows]
    yield _line("seconds", f"{job}: CPU time", seconds, None, False)


def _room(op: str, bound: float, value: float) -> float | None:
    """The part of the bound that is left: 0 at it, negative past it; None where there is no such part."""
    if op not in (*LESS, *MORE):
        return -abs(value - bound) / (abs(bound) or 1.0) or None
    room = (bound - value) * (1 if op in LESS else -1)
    return room / abs(bound) if bound else (room if room < 0 else None)


def _line(what: str, name: str, pair: list[float | None], left: float | None, differs: bool) -> Line:
    change = pair[1] / pair[0] - 1 if pair[0] and pair[1] is not None else None
    a, b = ("" if value is None else f"{value:.6g}" for value in pair)
    return Line(what, name, a, b, change, left, differs)


# ------------------------------------------------------------------- figures


def figures(runs: Path, a: str, b: str) -> Iterator[tuple[str, bytes | None, bytes | None]]:
    """Return (notebook and number, PNG in a, PNG in b) of all figures that differ; None where a run lacks it."""
    both = [_by_job(runs, name) for name in (a, b)]
    for job in sorted({*both[0], *both[1]}):
        images = [
            _images(runs / side[job]["part"] / side[job]["notebook"]) if job in side and side[job]["notebook"] else []
            for side in both
        ]
        for i in range(max(map(len, images))):
            pair = [side[i] if i < len(side) else None for side in images]
            if pair[0] != pair[1]:
                yield f"{job}, figure {i + 1}", *pair


def _images(notebook: Path) -> list[bytes]:
    try:
        cells = json.loads(read_own(notebook, NOTEBOOK_BYTES, anybody=True))["cells"]
        outputs = [output for cell in cells for output in cell.get("outputs", [])]
        texts = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
        return [base64.b64decode("".join(text)) for text in texts]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []


STYLE = """:root{color-scheme:light dark;font:15px/1.4 system-ui,sans-serif}
body{margin:1rem auto;max-width:80rem;padding:0 1rem}
table{border-collapse:collapse;width:100%}
td,th{padding:.2rem .5rem;text-align:left;border-bottom:1px solid #8884;overflow-wrap:anywhere}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(20rem,100%),1fr));gap:1rem}img{max-width:100%;background:#fff}"""


def page(runs: Path, a: str, b: str) -> str:
    """Return one page without any request: what differs as a table, and the figures that differ side by side."""
    rows = "".join(
        f"<tr><td>{html.escape(one.name)}<td>{html.escape(one.a)}<td>{html.escape(one.b)}<td>{_percent(one.change)}"
        for one in lines(runs, a, b)
        if one.differs
    )
    shown, left, seen = [], 0, set()
    for name, old, new in figures(runs, a, b):
        digest = hashlib.sha256((old or b"") + (new or b"")).hexdigest()
        if digest in seen or len(shown) == SHOWN_FIGURES:
            left += digest not in seen
            continue
        seen.add(digest)
        pair = "".join(
            f"<figure><figcaption>{side}</figcaption>{_image(png, name)}</figure>"
            for side, png in (("A", old), ("B", new))
        )
        shown.append(f"<h3>{html.escape(name)}</h3><div class=pair>{pair}</div>")
    more = f"<p>{left} more figures differ.</p>" if left else ""
    title = f"A {html.escape(a)}, B {html.escape(b)}"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>Compared: {title}</title><style>{STYLE}</style><h1>What differs</h1><p>{title}</p>"
        f"<table><tr><th>What<th>A<th>B<th>change{rows or '<tr><td>nothing'}</table>{''.join(shown)}{more}</html>"
    )


def _image(png: bytes | None, name: str) -> str:
    if png is None:
        return "<p>not there</p>"
    return f"<img alt='{html.escape(name, quote=True)}' src='data:image/png;base64,{base64.b64encode(png).decode()}'>"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:+.1%}"
