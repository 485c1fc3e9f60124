"""Read the list of features of paged MLA: where each is, and what has verified it."""

from __future__ import annotations

import csv
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from dsv4lib import env
from dsv4lib.errors import DSV4Error
from dsv4lib.viz.table import show_table

PATH = Path("data") / "neighbours" / "mla_rows.csv"
STATES = {
    "test": "a test that runs on any CPU",
    "emulator": "a test or a stage that runs the compiled kernel in the emulator",
    "native": "a test or a row that needs a GPU, skipped elsewhere",
    "partly": "some of it; the feature says what is missing",
    "open": "nothing",
}


class Feature(NamedTuple):
    """A line. row: its number. feature: in words. where: files, or tests as file::name. verified: see `STATES`."""

    row: str
    feature: str
    where: tuple[str, ...]
    verified: str


def read(path: Path | None = None) -> list[Feature]:
    """Read the list.

    Raises:
        DSV4Error: a state that is not one of `STATES`.
    """
    path = env.root() / PATH if path is None else path
    found = []
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            where = tuple(part for part in line["where"].split() if part)
            if line["verified"] not in STATES:
                raise DSV4Error(
                    f"{PATH.name}, row {line['row']}: verified is {line['verified']!r}, not one of {STATES}"
                )
            found.append(Feature(line["row"], line["feature"], where, line["verified"]))
    return found


def missing(features: list[Feature]) -> list[str]:
    """List the files and tests that are named and do not exist; what is not open must name one."""
    absent = []
    for one in features:
        if not one.where and one.verified != "open":
            absent.append(f"{one.row}: names nothing")
        for name in one.where:
            file, _, test = name.partition("::")
            path = env.root() / file
            if not path.exists():
                absent.append(f"{one.row}: {file}")
            elif test and not re.search(rf"^(?:    )?(?:def|class) {re.escape(test)}\b", path.read_text(), re.M):
                absent.append(f"{one.row}: {name}")
    return absent


def table(fault: str = "none") -> int:
    """Show all lines; returns how many names do not exist. ``fault``: "LostTest" renames a test that a line names."""
    features = read()
    if fault == "LostTest":
        i, name = next((i, x) for i, one in enumerate(features) for x in one.where if "::" in x)
        features[i] = features[i]._replace(where=(name + "_of_yesterday",))
    show_table(
        ("row", "feature", "verified by", "where"),
        [(f.row, f.feature, f.verified, " ".join(f.where)) for f in features],
    )
    counts = Counter(f.verified for f in features)
    print(", ".join(f"{state}: {counts[state]}" for state in STATES))
    return len(missing(features))
