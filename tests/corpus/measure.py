"""Write the tables of `data/emulator`: what running other people's kernels gave.

`python tests/corpus/measure.py corpus TABLE [--names NAME...]` runs the cases of this folder.
`python tests/corpus/measure.py examples TABLE --checkout FOLDER [--names NAME...]` runs example scripts of a CUTLASS
checkout that `examples.txt` lists, as they are: their own main and their own comparison decide.

Each run is a process of its own. A table that exists is updated row by row, so a part can be measured anew.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import run_case
import run_example

HERE = Path(__file__).resolve().parent
ARCHITECTURES = {"hopper": "sm_90a", "ampere": "sm_80", "sm103": "sm_103a"}  # by the beginning of a folder or file
COLUMNS = (
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
    *run_example.MODES,
    "note",
)


def run_process(command: list[str], arch: str, limit: float) -> dict[str, Any]:
    """The row that a process prints as its last line, or why there is none."""
    paths = [str(HERE.parent.parent), *sys.path]
    environment = {
        **os.environ,
        **run_case.SWITCHES,
        "CUTE_DSL_ARCH": arch,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(p for p in paths if p),
    }
    try:
        done = subprocess.run(
            [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return {"result": "timeout", "note": f"more than {limit:g} s"}
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines and lines[-1].startswith("{"):
        return json.loads(lines[-1])
    return {"result": "stopped", "note": (done.stderr.strip().splitlines() or ["no output"])[-1][:300]}


def as_row(name: str, arch: str, seen: dict[str, Any]) -> dict[str, Any]:
    """A row of the table."""
    failures = seen.get("failures", [])
    row = {key: seen.get(key, "") for key in COLUMNS}
    row["configuration"], row["arch"] = name, arch
    row["result"] = seen.get("result") or ("fail" if failures else "pass")
    row["hazards"] = " ".join(f"{kind}:{count}" for kind, count in sorted(seen.get("hazards", {}).items()))
    row["note"] = seen.get("note") or " | ".join(failures)[:300]
    for key in ("max_err", "max_ref", "rel_l2"):
        row[key] = f"{row[key]:.4g}" if isinstance(row[key], float) else row[key]
    return row


def corpus() -> dict[str, tuple[str, list[str]]]:
    """Name -> architecture and command of every case."""
    return {case.name: (case.arch, [str(HERE / "run_case.py"), case.name]) for case in run_case.all_cases()}


def examples(checkout: Path) -> dict[str, tuple[str, list[str]]]:
    """Name -> architecture and command of every listed example; the architecture follows from the folder or name."""
    found = {}
    for line in (HERE / "examples.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        name, script, arguments, *version = line.split("|")
        arch = next((a for part, a in ARCHITECTURES.items() if f"/{part}" in script), "sm_100a")
        path = checkout / "examples" / "python" / "CuTeDSL" / script
        found[name] = (
            arch,
            [str(HERE / "run_example.py"), arch, version[0] if version else "", str(path), *arguments.split()],
        )
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("corpus", "examples"))
    parser.add_argument("table", type=Path)
    parser.add_argument("--checkout", type=Path, help="of CUTLASS")
    parser.add_argument("--names", nargs="*", help="only these")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds of one run")
    options = parser.parse_args()
    if options.what == "examples" and options.checkout is None:
        parser.error("examples needs --checkout")
    todo = corpus() if options.what == "corpus" else examples(options.checkout)
    rows = {}
    if options.table.exists():
        with options.table.open(newline="") as file:
            rows = {row["configuration"]: row for row in csv.DictReader(file)}
    for name, (arch, command) in todo.items():
        if options.names and name not in options.names:
            continue
        rows[name] = as_row(name, arch, run_process(command, arch, options.limit))
        print({key: value for key, value in rows[name].items() if value != ""}, flush=True)
        with options.table.open("w", newline="") as file:
            columns = [c for c in COLUMNS if options.what == "examples" or c not in run_example.MODES]
            writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows[n] for n in todo if n in rows)


if __name__ == "__main__":
    main()
