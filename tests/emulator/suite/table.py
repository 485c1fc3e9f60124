"""Run the whole suite of faults and write what was caught: ``python -m tests.emulator.suite.table``."""

from __future__ import annotations

import csv
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from dsv4lib.emulator.machine.policies import POLICIES
from tests.emulator.suite import cuda
from tests.emulator.suite.cutedsl import barriers, common, far, rings, shared, tensor  # noqa: F401  they list their kernels
from tests.emulator.suite.harness import Outcome, caught, in_place, run
from tests.emulator.suite.test_suite import CASES

PATH = Path(__file__).parents[3] / "data" / "emulator" / "hazard_suite.csv"
COLUMNS = ("language", "kind", "table", "variant", "architecture", "caught", "line right", "twin silent")


def row(
    language: str, name: str, case: Any, launched: Callable[[bool, str], Outcome], placed: Callable[[Outcome], bool]
) -> tuple[str, ...]:
    """Run a fault under its schedules and its twin under all of them."""
    runs = [launched(False, schedule) for schedule in case.schedules]
    twins = [launched(True, schedule) for schedule in POLICIES]
    facts = (
        all(caught(case, outcome) for outcome in runs),
        all(placed(outcome) for outcome in runs),
        all(outcome.error is None and not outcome.hazards for outcome in twins),
    )
    table, _, variant = name.partition(": ")
    kind = case.kind.replace("|", " or ")
    return language, kind, table, variant, _arch(case), *("yes" if fact else "no" for fact in facts)


def _arch(case: Any) -> str:
    return case.arches[0] if isinstance(case, cuda.Case) else case.arch


def rows() -> list[tuple[str, ...]]:
    """Run everything, each on the first of its architectures."""
    found = []
    for name, case in CASES.items():
        found.append(row("PTX", name, case, partial(run, case), partial(in_place, case)))
    for name, case in cuda.cases().items():
        found.append(row("CUDA C++", name, case, partial(cuda.run, case), partial(cuda.in_place, case)))
    for name, case in common.LISTED.items():
        found.append(
            row("CuTeDSL", name, case, partial(common.run, name), partial(cuda.in_place, case, file=case.file))
        )
    return sorted(found)


def main() -> None:
    """Write the table."""
    with PATH.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows())


if __name__ == "__main__":
    main()
