"""Run cases of `dsv4lib.bench.cpp_peers` under every schedule with the race detector, and print a row each.

`--record` writes the rows to data/emulator/cpp_peers.csv. A case whose checkout, CUTLASS or nvcc is missing is said to
be skipped, with the reason. Exit code 1 if a result is wrong or depends on the schedule, or if what is reported is not
what the case says, or a case does not compile; such cases are not recorded.
"""

from __future__ import annotations

import argparse
import csv
import sys
from dataclasses import replace
from typing import Any

from dsv4lib.bench.cpp_peers import deep_gemm, deep_gemm_matmul, flash_mla, flash_mla_dense, mega_moe
from dsv4lib.bench.cpp_peers.build import CUTLASS
from dsv4lib.bench.cpp_peers.cases import SCHEDULES, Case, run
from dsv4lib.bench.peers.table import DATA
from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.errors import BackendUnavailable, DSV4Error

TABLE = DATA.parent / "emulator" / "cpp_peers.csv"
COLUMNS = (
    "case",
    "package",
    "commit",
    "cutlass",
    "arch",
    "operands",
    "rel_l2",
    "instructions",
    "ours",
    "errors",
    "lints",
    "schedules",
)
CASES = {
    case.name: case
    for case in (*flash_mla.CASES, *flash_mla_dense.CASES, *deep_gemm.CASES, *deep_gemm_matmul.CASES, *mega_moe.CASES)
}


def row(case: Case) -> dict[str, Any]:
    """Run a case under every schedule.

    Returns:
        a row of the table; under "problems" what is not as the case says, and under "texts" examples of its hazards.
    """
    chosen, problems, texts = None, [], []
    errors: set[str] = set()
    lints: set[str] = set()
    bits: dict[str, str] = {}
    wrong = []
    for schedule, seed in SCHEDULES:
        name = f"{schedule} {seed}" if schedule == "random" else schedule
        try:
            seen = run(case, schedule, seed, "default" if case.slow and schedule != case.right else "race")
        except EmulatorError as error:
            problems.append(f"{name}: {error}")
            continue
        chosen = seen if schedule == case.right else chosen
        errors |= set(seen.hazards)
        lints |= set(seen.lints)
        texts += [text for text in seen.texts if text not in texts]
        bits[name] = seen.bits
        if seen.wrong:
            wrong.append(f"{name} ({', '.join(f'{output} {seen.errors[output]:.3g}' for output in seen.wrong)})")
    differ = [name for name in bits if chosen is None or bits[name] != chosen.bits]
    if case.unstable:
        problems += [] if wrong else ["no schedule gives wrong numbers any more"]
        problems += [f"{case.right} is not right"] if chosen is None or chosen.wrong else []
    else:
        problems += [f"{name}: wrong" for name in wrong] + ([f"{', '.join(differ)}: other bits"] if differ else [])
    problems += [f"{kind}: not expected" for kind in sorted((errors - case.errors) | (lints - case.lints))]
    problems += [f"{kind}: no longer reported" for kind in sorted((case.errors - errors) | (case.lints - lints))]
    beside = "" if case.ours is None else _ours(case, problems)
    measured = {} if chosen is None else chosen.errors
    counts = {} if chosen is None else chosen.instructions
    return {
        "case": case.name,
        "package": case.checkout.name,
        "commit": case.checkout.commit(),
        "cutlass": CUTLASS.commit(),
        "arch": case.arch,
        "operands": case.operands,
        "rel_l2": " ".join(f"{name}:{value:.3g}" for name, value in measured.items()),
        "instructions": " ".join(f"{name}:{count}" for name, count in counts.items()),
        "ours": beside,
        "errors": " ".join(sorted(errors)),
        "lints": " ".join(sorted(lints)),
        "schedules": "wrong: " + ", ".join(wrong)
        if wrong
        else "other bits: " + ", ".join(differ)
        if differ
        else "same bits",
        "problems": problems,
        "texts": texts,
    }


def _ours(case: Case, problems: list[str]) -> str:
    """Run our op on the same operands: its warp-instructions by kernel; what is wrong goes to ``problems``."""
    seen = run(replace(case, run=case.ours, entries=()))
    problems += [f"ours: {output} has relative error {seen.errors[output]:.3g}" for output in seen.wrong]
    problems += [f"ours: {kind}" for kind in seen.hazards]
    return " ".join(f"{name}:{count}" for name, count in seen.instructions.items())


def record(rows: list[dict[str, Any]]) -> None:
    """Update the table's rows of these cases."""
    kept = {}
    if TABLE.is_file():
        with TABLE.open() as file:
            kept = {one["case"]: one for one in csv.DictReader(file)}
    kept |= {one["case"]: {name: one[name] for name in COLUMNS} for one in rows}
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept[name] for name in CASES if name in kept)


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m dsv4lib.bench.cpp_peers", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--record", action="store_true", help="write data/emulator/cpp_peers.csv")
    parser.add_argument("--texts", action="store_true", help="print hazards with their places")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    rows, failed = [], False
    for name in options.names or CASES:
        try:
            one = row(CASES[name])
        except BackendUnavailable as error:
            print(f"{name}: skipped, {error}", flush=True)
            continue
        except DSV4Error as error:
            print(f"{name}: {error}", flush=True)
            failed = True
            continue
        print(f"{name}: {one['schedules']}; {one['rel_l2']}; {one['instructions']}", flush=True)
        print(f"    errors: {one['errors'] or 'none'}; lints: {one['lints'] or 'none'}")
        for text in [*one["problems"], *(one["texts"] if options.texts else [])]:
            print("    " + text.replace("\n", "\n    "), flush=True)
        failed |= bool(one["problems"])
        rows += [] if one["problems"] else [one]
    if options.record and rows:
        record(rows)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
