"""Write the stage ladder of the README from the stage contracts. One row a stage, with the number it reached.

`python -m dsv4lib.lab.ladder` rewrites the table in README.md; a test fails when it is out of date.
"""

from __future__ import annotations

import re
from pathlib import Path

from dsv4lib import env
from dsv4lib.errors import DSV4Error
from dsv4lib.lab import stage as contract

BEGIN, END = "<!-- ladder: written by python -m dsv4lib.lab.ladder -->", "<!-- /ladder -->"


def markdown(stages: list[contract.Stage]) -> str:
    """Return the ladder as a Markdown table, in reading order of the notebooks."""
    rows = ["| stage | what it shows | number reached | bound |", "| --- | --- | --- | --- |"]
    for stage in sorted(stages, key=lambda s: s.notebook):
        gate = stage.gates[0]
        what = stage.summary.rstrip(".").replace("|", "\\|")
        reached = f"`{gate.metric}` {gate.last_seen:g} | {gate.op} {gate.bound:g}"
        rows.append(f"| [{stage.name}]({stage.notebook}) | {what} | {reached} |")
    return "\n".join(rows)


def updated(readme: str, table: str) -> str:
    """Return ``readme`` with the text between the two markers replaced by ``table``.

    Raises:
        DSV4Error: the markers are missing.
    """
    pattern = re.compile(re.escape(BEGIN) + r".*?" + re.escape(END), re.S)
    if not pattern.search(readme):
        raise DSV4Error(f"README.md needs the lines {BEGIN} and {END}")
    return pattern.sub(lambda _: f"{BEGIN}\n{table}\n{END}", readme)


def main(path: Path | None = None) -> None:
    """Rewrite the table in README.md."""
    path = path or env.root() / "README.md"
    path.write_text(updated(path.read_text(), markdown(contract.discover())))


if __name__ == "__main__":
    main()
