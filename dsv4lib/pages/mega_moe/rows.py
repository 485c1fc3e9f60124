"""Read the table of features that a public text asks of a fused MoE: where each is, and what verifies it."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import NamedTuple

from dsv4lib import env

TABLE = "data/neighbours/mega_rows.csv"
STATES = ("emulator", "CPU", "assembler", "not built", "needs a B200")  # how ``verified`` begins


class Row(NamedTuple):
    """One feature.

    Attributes:
        row: its number in the text. feature: what it asks. where: paths of this repository, or "-".
        verified: how (one of `STATES`), then the tests.
    """

    row: str
    feature: str
    where: str
    verified: str

    def paths(self) -> list[str]:
        """List the files that the row names, tests without the names of their functions."""
        return re.findall(r"[\w./-]+/[\w.-]+\.(?:py|ipynb|csv|md)", f"{self.where} {self.verified}")

    def tests(self) -> list[tuple[str, str]]:
        """List the test functions that the row names: (file, function)."""
        return re.findall(r"([\w./-]+\.py)::(\w+)", self.verified)


def table() -> list[Row]:
    """Read it."""
    with (Path(env.root()) / TABLE).open() as file:
        return [Row(**line) for line in csv.DictReader(file)]
