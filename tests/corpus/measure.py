"""Write the tables of `data/emulator`: what running other people's kernels gave.

`python tests/corpus/measure.py corpus TABLE [--names NAME...]` runs the cases of this folder.
`python tests/corpus/measure.py examples TABLE --checkout FOLDER [--names NAME...]` runs example scripts of a CUTLASS
checkout that `examples.txt` lists, as they are: their own main and their own comparison decide. With `--modes` every
launch is repeated in these modes; without, the row keeps what they gave before. `commit` and `replay_commit` say which
commit of this repository ran a row, and its other modes ("+": with changes).

Each example is a process of its own; cases share one for each architecture. A table that exists is updated row by row,
so a part can be measured anew.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import run_case
from run_example import MODES

HERE = Path(__file__).resolve().parent
ARCHITECTURES = {"hopper": "sm_90a", "ampere": "sm_80", "sm103": "sm_103a"}  # by the beginning of a folder or file
COMMON = (
    "configuration",
    "arch",
    "result",
    "max_err",
    "max_ref",
    "rel_l2",
    "instructions",
    "seconds",
    "launches",
    "hazards",
)
COLUMNS = {
    "examples": (*COMMON, *MODES, "devices", "commit", "replay_commit", "note"),
    "corpus": (*COMMON, "lints", "race_hazards", "race_lints", "schedules", "note"),
}


def environment(arch: str) -> dict[str, str]:
    """Make the environment of a process that runs other packages' kernels."""
    paths = [str(HERE.parent.parent), *sys.path]
    return {
        **os.environ,
        **run_case.SWITCHES,
        "CUTE_DSL_ARCH": arch,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(p for p in paths if p),
    }


def commit() -> str:
    """Of this repository, with "+" if tracked files have changed since."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*", "--abbrev=9"],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=True,
    )
    return found.stdout.strip()


@dataclasses.dataclass(frozen=True)
class Example:
    """A line of `examples.txt`: a script below examples/python/CuTeDSL of a CUTLASS checkout, and how it is run."""

    name: str
    script: str
    arguments: str
    version: str = ""  # that torch claims
    devices: str = "1"
    defect: str = ""  # why it does not pass, where that is known

    @property
    def arch(self) -> str:
        """Follows from the folder or the name."""
        return next((arch for part, arch in ARCHITECTURES.items() if f"/{part}" in self.script), "sm_100a")

    def command(self, checkout: Path, modes: list[str]) -> list[str]:
        """Of the process that runs it."""
        how = [self.arch, self.version, self.devices, ",".join(modes)]
        path = checkout / "examples" / "python" / "CuTeDSL" / self.script
        return [sys.executable, str(HERE / "run_example.py"), *how, str(path), *self.arguments.split()]


def run_script(command: list[str], arch: str, limit: float) -> dict[str, Any]:
    """The row that a process prints as its last line, or why there is none."""
    try:
        done = subprocess.run(
            command, env=environment(arch), capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return {"result": "timeout", "note": f"more than {limit:g} s"}
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines and lines[-1].startswith("{"):
        return json.loads(lines[-1])
    return {"result": "stopped", "note": (done.stderr.strip().splitlines() or ["no output"])[-1][:300]}


def run_cases(arch: str, names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of the cases, which share a process until one of them ends it."""
    left = list(names)
    while left:
        command = [sys.executable, str(HERE / "run_case.py"), "--all", *left]
        with subprocess.Popen(command, env=environment(arch), stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                if line.startswith('{"name"'):
                    row = json.loads(line)
                    left.remove(row["name"])
                    yield row["name"], row
        if left and process.returncode:
            yield left.pop(0), {"result": "stopped", "note": f"the process ended with code {process.returncode}"}


def as_row(name: str, arch: str, seen: dict[str, Any]) -> dict[str, Any]:
    """A row of the table."""
    failures = seen.get("failures", [])
    row = {key: seen.get(key, "") for columns in COLUMNS.values() for key in columns}
    row["configuration"], row["arch"] = name, arch
    row["result"] = seen.get("result") or ("fail" if failures else "pass")
    for key in ("hazards", "lints", "race_hazards", "race_lints"):
        row[key] = " ".join(f"{kind}:{count}" for kind, count in sorted(seen.get(key, {}).items()))
    if "unstable" in seen:
        row["schedules"] = {"": "same bits", "bits": f"differ: {', '.join(seen['differ'])}"}.get(
            seen["unstable"], f"wrong: {', '.join(seen['wrong'])}"
        )
    row["note"] = seen.get("note") or " | ".join(failures)[:300]
    for key in ("max_err", "max_ref", "rel_l2"):
        row[key] = f"{row[key]:.4g}" if isinstance(row[key], float) else row[key]
    return row


def corpus(names: list[str] | None) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, architecture and row of the cases, one process for each architecture."""
    chosen = [case for case in run_case.all_cases() if not names or case.name in names]
    for arch in dict.fromkeys(case.arch for case in chosen):
        for name, row in run_cases(arch, [case.name for case in chosen if case.arch == arch]):
            yield name, arch, row


def without_paths(note: str, checkout: Path) -> str:
    """A note without the folders of the machine that ran it."""
    note = note.replace(f"{checkout.resolve()}/", "")
    return re.sub(rf"{re.escape(tempfile.gettempdir())}/[^\s',]+", "...", note)


def all_examples() -> list[Example]:
    """Those of `examples.txt`."""
    lines = (HERE / "examples.txt").read_text().splitlines()
    return [Example(*line.split("|")) for line in lines if line and not line.startswith("#")]


def examples(
    checkout: Path, names: list[str] | None, modes: list[str], limit: float, before: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, architecture and row of the examples, one process for each; what was seen in other modes stays."""
    now = commit()
    for example in all_examples():
        if names and example.name not in names:
            continue
        row = run_script(example.command(checkout, modes), example.arch, limit)
        row["note"] = without_paths(row.get("note", ""), checkout)
        kept = {} if modes else {k: before.get(example.name, {}).get(k, "") for k in (*MODES, "replay_commit")}
        if row["result"] != "pass" and example.defect:
            row["note"] = f"{example.defect} [{row['note']}]" if row["note"] else example.defect
        mark = {"devices": example.devices, "commit": now, "replay_commit": now if modes else ""}
        yield example.name, example.arch, {**mark, **kept, **row}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("corpus", "examples"))
    parser.add_argument("table", type=Path)
    parser.add_argument("--checkout", type=Path, help="of CUTLASS")
    parser.add_argument("--names", nargs="*", help="only these")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds of one run")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=[], help="in which examples run as well")
    options = parser.parse_args()
    if options.what == "examples" and options.checkout is None:
        parser.error("examples needs --checkout")
    rows: dict[str, dict[str, Any]] = {}
    if options.table.exists():
        with options.table.open(newline="") as file:
            rows = {row["configuration"]: row for row in csv.DictReader(file)}
    if options.what == "corpus":
        order, seen = [case.name for case in run_case.all_cases()], corpus(options.names)
    else:
        order = [example.name for example in all_examples()]
        seen = examples(options.checkout, options.names, options.modes, options.limit, rows)
    for name, arch, found in seen:
        rows[name] = as_row(name, arch, found)
        print({key: value for key, value in rows[name].items() if value != ""}, flush=True)
        with options.table.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS[options.what], extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows[n] for n in order if n in rows)


if __name__ == "__main__":
    main()
