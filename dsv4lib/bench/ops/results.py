"""Store and print what was measured of a row. Times of its providers, ratios, verdict.

A folder has two files: `rows.csv`, a line for each provider of each row, and `runs.csv`, a line for each run that rows
are from (machine, versions, command). Reading them needs neither torch nor a GPU.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from dsv4lib import env
from dsv4lib.errors import DSV4Error

OURS = "ours"
COPY = "copy of the same bytes"
TIMED, ABSENT, WRONG, FAILED = "timed", "absent", "wrong", "failed"
FOLDER = env.root() / "data" / "bench" / "ops"


@dataclass(frozen=True)
class Found:
    """What became of one provider of a row.

    Attributes:
        provider: its name. state: "timed", "absent", "wrong" or "failed".
        us: median with a cold L2 of ``calls`` calls, None where not timed so; low_us, high_us: least and largest.
        kernels: that a call launches, copies and memsets among them.
        warm_us: as a node of a graph, None where not timed.
        host_us: of the caller's thread to queue one more call, None where not timed.
        detail: why it was not timed, or what is missing of its times.
    """

    provider: str
    state: str
    us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    calls: int = 0
    kernels: int = 0
    warm_us: float | None = None
    host_us: float | None = None
    detail: str = ""


@dataclass(frozen=True)
class Result:
    """A row with its times; what the attributes mean says `case.Row`.

    Attributes:
        floor_us: the bytes at the data sheet's bandwidth; None where that is not known.
        found: its providers, ours first. run: which one it is from, a key of `runs.csv`.
    """

    op: str
    shape: str
    bytes: int
    flops: int
    goal: float | None
    copy_goal: float | None
    floor_us: float | None
    found: tuple[Found, ...]
    run: str = ""

    def named(self, provider: str) -> Found | None:
        """Return the provider of this name."""
        return next((one for one in self.found if one.provider == provider), None)

    @property
    def ours_us(self) -> float | None:
        """Return our time with a cold L2."""
        ours = self.named(OURS)
        return None if ours is None else ours.us

    def _others(self) -> list[Found]:
        """Providers of others that were timed; further providers of ours ("ours, ...") are not among them."""
        return [one for one in self.found if one.state == TIMED and not one.provider.startswith((OURS, COPY))]

    @property
    def peer(self) -> Found | None:
        """Return the fastest of the others, with a cold L2."""
        return min((one for one in self._others() if one.us), key=lambda one: one.us, default=None)

    @property
    def graph_peer(self) -> Found | None:
        """Return the fastest of the others as a node of a graph."""
        return min((one for one in self._others() if one.warm_us), key=lambda one: one.warm_us, default=None)

    @property
    def ratio(self) -> float | None:
        """Return our time / the best peer's, both with a cold L2."""
        return self.ours_us / self.peer.us if self.ours_us and self.peer else None

    @property
    def graph_ratio(self) -> float | None:
        """Return our time / the best peer's, both as nodes of a graph."""
        ours, peer = self.named(OURS), self.graph_peer
        return ours.warm_us / peer.warm_us if ours and ours.warm_us and peer else None

    @property
    def copy_ratio(self) -> float | None:
        """Time of a copy of the same bytes / our time, both with a cold L2."""
        copied = self.named(COPY)
        return copied.us / self.ours_us if self.ours_us and copied and copied.us else None

    @property
    def graph_copy_ratio(self) -> float | None:
        """Time of a copy of the same bytes / our time, both as nodes of a graph."""
        ours, copied = self.named(OURS), self.named(COPY)
        return copied.warm_us / ours.warm_us if ours and ours.warm_us and copied and copied.warm_us else None

    @property
    def verdict(self) -> str:
        """Judge by cold times, in a word.

        "reached"; "missed", which a provider of ours that is wrong has too; "not judged": a time is missing, or the
        goal would be reached but a peer failed, which might be faster; "" where nothing was promised.
        """
        return self._verdict(self.ratio, self.copy_ratio)

    @property
    def graph_verdict(self) -> str:
        """Judge as `verdict`, by times as nodes of a graph. There peers pay no gaps between kernels."""
        return self._verdict(self.graph_ratio, self.graph_copy_ratio)

    def _verdict(self, ratio: float | None, copy_ratio: float | None) -> str:
        if self.goal is None and self.copy_goal is None:
            return ""
        ours, judged = self.named(OURS), []
        if ours is None or ours.state in (WRONG, FAILED):
            return "missed"
        if self.goal is not None:
            unknown = any(one.state == FAILED for one in self.found)
            judged.append(None if ratio is None or (unknown and ratio <= self.goal) else ratio <= self.goal)
        if self.copy_goal is not None:
            judged.append(None if copy_ratio is None else copy_ratio >= self.copy_goal)
        return "missed" if False in judged else "not judged" if None in judged else "reached"

    @property
    def promise(self) -> str:
        """Return what was promised, in words."""
        parts = [] if self.goal is None else [f"<= {self.goal:g}x"]
        return ", ".join(parts + ([] if self.copy_goal is None else [f">= {self.copy_goal:g} of a copy"]))

    @property
    def summary(self) -> str:
        """Return the ratios and verdict in a line."""
        parts = [] if self.ratio is None else [f"{self.ratio:.2f}x of {self.peer.provider}"]
        if self.graph_ratio is not None:
            parts.append(f"{self.graph_ratio:.2f}x of {self.graph_peer.provider} in a graph")
        if self.copy_ratio is not None:
            parts.append(f"{self.copy_ratio:.2f} of a copy")
        said = f"{self.verdict}, in a graph {self.graph_verdict} (goal {self.promise})" if self.promise else ""
        return ", ".join(parts + [said] * bool(said)) or "no peer"


HEAD = f"  {'provider':<32}{'cold us':>9}{'graph us':>9}{'host us':>9}{'GB/s':>7}{'TFLOPS':>8}{'x floor':>9}  kernels"


def lines(result: Result) -> list[str]:
    """Return a row as text. It has its title, a line a provider, and what became of its goals."""
    floor = result.floor_us
    shown = "" if floor is None else f", floor {floor:.2f} us"
    out = [f"{result.op} {result.shape}: {result.bytes / 1e6:.3g} MB{shown}"]
    for one in result.found:
        if one.state != TIMED:
            out.append(f"  {one.provider:<32}  {one.state}: {one.detail}")
            continue
        warm, host = ("-" if us is None else f"{us:.2f}" for us in (one.warm_us, one.host_us))
        if one.us is None:
            out.append(f"  {one.provider:<32}{'-':>9}{warm:>9}{host:>9}  {one.detail}".rstrip())
            continue
        tera = f"{result.flops / one.us / 1e6:.1f}" if result.flops else ""
        ratio = "" if floor is None else f"{one.us / floor:.2f}"
        speed = f"{result.bytes / one.us / 1e3:.0f}"
        times = f"{one.us:>9.2f}{warm:>9}{host:>9}{speed:>7}{tera:>8}{ratio:>9}"
        out.append(f"  {one.provider:<32}{times}  {one.kernels} {one.detail}".rstrip())
    return [*out, f"  => {result.summary}"]


# ------------------------------------------------------------------- files

_OF_ROW = tuple(field.name for field in fields(Result) if field.name not in ("found", "run"))
_OF_PROVIDER = tuple(field.name for field in fields(Found))
COLUMNS = (*_OF_ROW, *_OF_PROVIDER, "run")
_COUNTS = ("bytes", "flops", "calls", "kernels")
_NUMBERS = ("goal", "copy_goal", "floor_us", "us", "low_us", "high_us", "warm_us", "host_us")


def load(folder: Path = FOLDER) -> list[Result]:
    """Return the rows of a folder.

    Raises:
        DSV4Error: the file is missing or has other columns.
    """
    path, results = folder / "rows.csv", {}
    for line in _read(path, COLUMNS):
        values = {key: _value(key, text) for key, text in line.items()}
        one = Found(**{key: values[key] for key in _OF_PROVIDER})
        key = values["op"], values["shape"]
        if key not in results:
            results[key] = Result(**{name: values[name] for name in (*_OF_ROW, "run")}, found=(one,))
        else:
            results[key] = dataclasses.replace(results[key], found=(*results[key].found, one))
    return list(results.values())


def runs(folder: Path = FOLDER) -> dict[str, dict[str, str]]:
    """Return the facts of the runs by key, as `harness.facts` names them.

    Raises:
        DSV4Error: the file is missing.
    """
    return {line["run"]: line for line in _read(folder / "runs.csv")}


def record(results: Iterable[Result], facts: dict[str, str], folder: Path) -> None:
    """Write rows of one run into a folder. Other rows that it has stay, and so do the runs that these are from.

    Args:
        facts: of the run; its key is "run".
    """
    folder.mkdir(exist_ok=True)
    there = (folder / "rows.csv").is_file()
    known = {(one.op, one.shape): one for one in (load(folder) if there else [])}
    past = runs(folder) if there else {}
    for one in results:
        known[one.op, one.shape] = dataclasses.replace(one, run=facts["run"])
    kept = sorted(known.values(), key=lambda one: one.op)  # rows of an op in the order in which they came
    table = []
    for one in kept:
        base = {name: getattr(one, name) for name in (*_OF_ROW, "run")}
        table += [{name: _text(name, ({**base, **vars(provider)})[name]) for name in COLUMNS} for provider in one.found]
    _write(folder / "rows.csv", COLUMNS, table)
    past[facts["run"]] = facts
    used = {one.run for one in kept}
    _write(folder / "runs.csv", tuple(facts), [past[key] for key in sorted(past) if key in used])


def _read(path: Path, columns: tuple[str, ...] = ()) -> list[dict[str, str]]:
    if not path.is_file():
        raise DSV4Error(
            f"{path} is missing: ./dsv4 bench ops --record {path.parent} writes it, on a machine with a GPU"
        )
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if columns and tuple(reader.fieldnames or ()) != columns:
            raise DSV4Error(f"{path} has other columns than this version writes: record it anew")
        return list(reader)


def _write(path: Path, columns: tuple[str, ...], table: list[dict[str, str]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n", restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(table)


def _value(key: str, text: str) -> object:
    if key in _COUNTS:
        return int(text)
    return (float(text) if text else None) if key in _NUMBERS else text


def _text(key: str, value: object) -> str:
    if value is None:
        return ""
    return f"{value:.5g}" if key in _NUMBERS else str(value)
