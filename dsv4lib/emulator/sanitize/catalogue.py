"""Write the table of findings in other people's kernels, and name the reproduction of each.

``data/emulator/findings.csv`` is the source: a row a finding. ``data/emulator/findings/`` holds a kernel a cause:
``NAME.ptx`` with ``NAME.toml`` that launches it and ``NAME_repaired.toml`` that launches its repaired twin. What it
shows, and the schedule that shows it, is in ``reproductions.csv`` there. ``python -m
dsv4lib.emulator.sanitize.catalogue`` writes the table into ``findings.md``.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from dsv4lib.emulator.checks import KINDS

_PACKAGE = Path(__file__).parents[2]  # in a clone data lies beside the package, in a wheel inside it
_ROOTS = (_PACKAGE.parent, _PACKAGE / "workspace")
DATA = next((root / "data" / "emulator" for root in _ROOTS if (root / "data" / "emulator").is_dir()), Path("data"))
FOLDER = DATA / "findings"
PAGE = DATA / "findings.md"
BEGIN = "<!-- table: written by python -m dsv4lib.emulator.sanitize.catalogue -->"
END = "<!-- /table -->"
# What a reproduction does beside what is reported, under a schedule of its own.
CHANGES = ("", "numbers", "hang", "stops")
# How the consequence of a finding begins, as seen in the package's kernel.
CONSEQUENCES = ("wrong numbers", "hang", "stops", "harmless", "none seen", "none")


@dataclass(frozen=True)
class Row:
    """One finding.

    Attributes:
        finding: what goes wrong, in words. package, version: where. case: of corpus.csv or examples.csv, or how it ran.
        place: file and line. kind: as the checks report it, "" if none does.
        consequence: begins with one of `CONSEQUENCES`. schedule: that showed it, "" if none changed anything.
        upstream: whether it is known to the package's authors. section: heading of findings.md that argues it.
        reproduction: file name in `FOLDER`, "" if there is none; without: why.
    """

    finding: str
    package: str
    version: str
    case: str
    place: str
    kind: str
    consequence: str
    schedule: str
    upstream: str
    section: str
    reproduction: str
    without: str

    @property
    def packages(self) -> str:
        """Name each package with its version."""
        both = zip(self.package.split(", "), self.version.split(", "), strict=True)
        return ", ".join(f"{package} {version}" for package, version in both)

    @property
    def anchor(self) -> str:
        """Name the section's anchor, as GitHub and the site do."""
        return re.sub(r"[^\w\- ]", "", self.section.lower()).replace(" ", "-")

    @property
    def severity(self) -> str:
        """Name the severity of its kind."""
        return KINDS[self.kind].severity if self.kind in KINDS else "error"


@dataclass(frozen=True)
class Reproduction:
    """One kernel of `FOLDER`.

    Attributes:
        name: of its files. kinds: that are reported under ``schedule`` and ``seed``.
        changes: one of `CHANGES`, under ``changed_by`` and ``changed_seed``.
    """

    name: str
    kinds: tuple[str, ...]
    schedule: str
    seed: int
    changes: str
    changed_by: str
    changed_seed: int

    @property
    def source(self) -> Path:
        """Name its PTX."""
        return FOLDER / f"{self.name}.ptx"

    def description(self, repaired: bool = False) -> Path:
        """Name its launch description, or that of its repaired twin."""
        return FOLDER / f"{self.name}{'_repaired' if repaired else ''}.toml"

    @property
    def command(self) -> str:
        """Write the command that shows it, with what it changes if anything."""
        schedule, seed = (self.changed_by, self.changed_seed) if self.changes else (self.schedule, self.seed)
        options = "" if schedule == "round_robin" else f" --schedule {schedule}"
        options += f" --seed {seed}" if seed else ""
        return f"./dsv4 sanitize{options} data/emulator/findings/{self.name}.toml"

    def marked(self) -> dict[str, set[int]]:
        """Read the lines that its PTX says are reported (``// <-- kind, kind``), by kind."""
        found: dict[str, set[int]] = {}
        for number, line in enumerate(self.source.read_text().splitlines(), 1):
            for kind in line.partition("// <-- ")[2].split(","):
                if kind.strip():
                    found.setdefault(kind.strip(), set()).add(number)
        return found


def findings() -> list[Row]:
    """Read the findings, in the order of the page's sections."""
    with (DATA / "findings.csv").open(newline="") as file:
        return [Row(**{field.name: row[field.name] for field in fields(Row)}) for row in csv.DictReader(file)]


def reproductions() -> dict[str, Reproduction]:
    """Read the reproductions, by name."""
    with (FOLDER / "reproductions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        row["reproduction"]: Reproduction(
            row["reproduction"],
            tuple(row["kinds"].split()),
            row["schedule"],
            int(row["seed"]),
            row["changes"],
            row["changed_by"],
            int(row["changed_seed"] or 0),
        )
        for row in rows
    }


def table(rows: Sequence[Row]) -> str:
    """Make the table as Markdown."""
    known = reproductions()
    lines = [
        "| finding | kind | consequence | file:line | reproduction | schedule | package | case |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        kind = f"`{row.kind}` ({row.severity})" if row.kind else "no report"
        again = _shown(known[row.reproduction]) if row.reproduction else row.without
        link = f"[{row.finding}](#{row.anchor})"
        cells = (link, kind, row.consequence, row.place, again, row.schedule, row.packages, row.case)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _shown(one: Reproduction) -> str:
    """Link a reproduction, with the schedule under which it changes something."""
    link = f"[{one.name}](findings/{one.name}.ptx)"
    if not one.changes:
        return link
    seed = f", seed {one.changed_seed}" if one.changed_seed else ""
    return f"{link}: {one.changes} under `{one.changed_by}`{seed}"


def summary(rows: Sequence[Row]) -> str:
    """Count the rows in a few sentences."""
    errors = sum(row.severity == "error" and bool(row.kind) for row in rows)
    changed = sum(row.consequence.startswith(("wrong numbers", "hang", "stops")) for row in rows)
    known, used = reproductions(), {row.reproduction for row in rows if row.reproduction}
    wrong = sum(known[name].changes == "numbers" for name in used)
    told = sum(row.upstream != "not known" for row in rows)
    return (
        f"{len(rows)} findings, {errors} of them errors; {changed} were seen to give wrong numbers, a hang or a stop "
        f"in the package's own kernel.\n{len(used)} reproductions, of which {wrong} give wrong numbers. "
        f"Known to the package's authors, as far as we know: {told}."
    )


def updated(text: str) -> str:
    """Put the table between its markers in a page.

    Raises:
        ValueError: the page has no markers.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {BEGIN} and {END}")
    rows = findings()
    return f"{before}{BEGIN}\n{summary(rows)}\n\n{table(rows)}\n{END}{after}"


def main() -> None:
    """Write the table into the page."""
    PAGE.write_text(updated(PAGE.read_text()))


if __name__ == "__main__":
    main()
