"""Keep the table that comparisons with other people's kernels share. Also run kernels in processes."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv4lib import env
from dsv4lib.errors import DSV4Error

DATA = env.root() / "data" / "bench"
_LIMIT = 900  # seconds of one process, all runs


def run_alone(module: str, arguments: list[str], packages: Path | None = None) -> list[dict[str, Any]]:
    """Return what `python -m module ARGUMENTS` prints, a line of JSON for each kernel.

    Args:
        arguments: options, then names of kernels.
        packages: folder of other people's packages (`bench.peers.corpus`); None for ours.

    Raises:
        DSV4Error: it stopped; the message ends with the last line it printed.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(env.package().parent), os.environ.get("PYTHONPATH")])),
        **({} if packages is None else {"DSV4_CORPUS_SITE": str(packages)}),
    }
    names = [argument for argument in arguments if not argument.startswith("--")]
    command, shown = [sys.executable, "-m", module, *arguments], ", ".join(names)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LIMIT, check=False)
    except subprocess.TimeoutExpired:
        raise DSV4Error(f"{shown}: more than {_LIMIT} s") from None
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"kernel"')]
    if done.returncode or len(rows) != len(names):
        raise DSV4Error(f"{shown}: {(done.stderr.strip().splitlines() or ['no output'])[-1][:300]}")
    return rows


def commit() -> str:
    """Find the last commit that changed a kernel, with "+" if they have changed since."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments, "--", "dsv4lib/dsl", "dsv4lib/ops"]
        return subprocess.run(command, cwd=env.root(), capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("log", "-1", "--format=%h", "--abbrev=9") + ("+" if changed else "")


@dataclass(frozen=True)
class PeerTable:
    """A committed table, one row a kernel.

    Attributes:
        path: of the CSV file; columns: in this order; text: those that are no numbers.
        digits: format of a number by column, 12 digits where it has none.
        op: what `./dsv4 bench peers` calls it.
    """

    path: Path
    columns: tuple[str, ...]
    text: tuple[str, ...]
    digits: dict[str, str] = field(default_factory=dict)
    op: str = ""

    def load(self, path: Path | None = None) -> list[dict[str, Any]]:
        """Return the rows, numbers as numbers and None where a cell is empty. Needs none of the packages.

        Raises:
            DSV4Error: the file is missing or has other columns.
        """
        path = path or self.path
        if not path.is_file():
            raise DSV4Error(f"{path} is missing: ./dsv4 bench peers {self.op} --record {path} writes it")
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != self.columns:
                raise DSV4Error(f"{path} has other columns than this version writes: record it anew")
            return [{key: self._read(key, value) for key, value in row.items()} for row in reader]

    def record(self, rows: Iterable[dict[str, Any]], path: Path, order: Iterable[str]) -> None:
        """Write rows into a table; rows of other kernels that it has stay. ``order``: names of the kernels."""
        known = {row["kernel"]: row for row in self.load(path)} if path.is_file() else {}
        known |= {row["kernel"]: row for row in rows}
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self._shown(known[name]) for name in order if name in known)

    def _read(self, key: str, value: str) -> Any:
        if key in self.text:
            return value
        return float(value) if value else None

    def _shown(self, row: dict[str, Any]) -> dict[str, str]:
        out = {}
        for key in self.columns:
            value = row[key]
            out[key] = value if key in self.text else "" if value is None else f"{value:{self.digits.get(key, '.12g')}}"
        return out
