"""Run the whole suite of faults and write what was caught: ``python -m tests.emulator.suite.table``."""

from __future__ import annotations

import csv
from pathlib import Path

from dsv4lib.emulator.machine.policies import POLICIES
from tests.emulator.suite.harness import Case, caught, in_place, run
from tests.emulator.suite.test_suite import CASES

PATH = Path(__file__).parents[3] / "data" / "emulator" / "hazard_suite.csv"
COLUMNS = ("kind", "table", "variant", "architecture", "caught", "line right", "twin silent")


def row(name: str, case: Case) -> tuple[str, ...]:
    """Run a fault under its schedules and its twin under all of them."""
    runs = [run(case, False, schedule) for schedule in case.schedules]
    twins = [run(case, True, schedule) for schedule in POLICIES]
    facts = (
        all(caught(case, outcome) for outcome in runs),
        all(in_place(case, outcome) for outcome in runs),
        all(outcome.error is None and not outcome.hazards for outcome in twins),
    )
    table, _, variant = name.partition(": ")
    return case.kind.replace("|", " or "), table, variant, case.arch, *("yes" if fact else "no" for fact in facts)


def main() -> None:
    """Write the table."""
    with PATH.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(sorted(row(name, case) for name, case in CASES.items()))


if __name__ == "__main__":
    main()
