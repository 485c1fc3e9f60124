"""Time a decode step of DSV4-Flash on a Hopper, and print where the time is.

    python -m dsv4lib.bench.decode_step.run [--batch 1,8] [--context 32768] [--only attention,moe] [--providers ours]
        [--seconds 540] [--ahead 15] [--record DIR]

Every row that the wanted steps need is measured once, by the harness of the ops: inputs from a seed, every provider
checked before it is timed, all of a row in turns, cold L2. A step's table is then a sum over its lines. A folder of
``--record`` gets the rows (`rows.csv`, `runs.csv`) and the lines of the steps (`table.FILE`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from dsv4lib import backends
from dsv4lib.bench import history
from dsv4lib.bench.decode_step import table
from dsv4lib.bench.decode_step.lines import BATCHES, CLASSES, CONTEXTS, KEYS, Line, key_of, known_rows, lines
from dsv4lib.bench.decode_step.rows import ARCH
from dsv4lib.bench.ops import harness, results, timing
from dsv4lib.bench.ops.case import Row
from dsv4lib.errors import ArgumentError, DSV4Error

NAME = "dsv4lib.bench.decode_step.run"
Steps = dict[tuple[int, int], list[Line]]


def steps(batches: Sequence[int], contexts: Sequence[int], groups: Sequence[str] = CLASSES) -> Steps:
    """List the lines of every wanted step by (batch, context)."""
    known = known_rows()
    return {(batch, context): lines(batch, context, known, groups) for batch in batches for context in contexts}


def rows_of(wanted: Steps) -> list[Row]:
    """Return the rows that steps need, each once."""
    return list({key_of(row): row for own in wanted.values() for line in own for row in line.rows}.values())


def numbers(text: str, name: str, allowed: Sequence[int]) -> list[int]:
    """Read numbers between commas.

    Raises:
        ArgumentError: one is not allowed.
    """
    words = {str(one): one for one in allowed}
    if not set(harness.parts(text)) <= set(words) or not harness.parts(text):
        raise ArgumentError(name, text, f"of {', '.join(words)}, with commas between them")
    return [words[part] for part in harness.parts(text)]


def classes(text: str) -> list[str]:
    """Read keys of classes between commas; none: all.

    Raises:
        ArgumentError: an unknown one.
    """
    unknown = [part for part in harness.parts(text) if part not in KEYS]
    if unknown:
        raise ArgumentError("only", ", ".join(unknown), "of " + ", ".join(KEYS))
    return [KEYS[part] for part in harness.parts(text)] or list(CLASSES)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        the exit code: 0; 1 where one of ours is wrong or failed; 2 for bad arguments; `harness.NOTHING_TIMED` without
        such a GPU.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="python -m dsv4lib.bench.decode_step.run", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--batch", default=",".join(map(str, BATCHES)), help="requests, with commas between them")
    parser.add_argument("--context", default="32768", help=f"tokens of each, of {', '.join(map(str, CONTEXTS))}")
    parser.add_argument("--only", default="", help="classes, of " + ", ".join(KEYS))
    parser.add_argument("--providers", default="", help="peers whose name contains one of these (commas)")
    parser.add_argument("--seconds", type=float, default=1e9, help="no row starts later")
    parser.add_argument("--ahead", type=int, default=0, help="first make all first calls, in so many processes at once")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)  # of `ahead`: which rows
    parser.add_argument("--record", type=Path, help="write rows and lines into this folder")
    parser.add_argument("--history", type=Path, help="add the times to the history in this folder")
    given = parser.parse_args(arguments)
    status = backends.status("native", ARCH)
    try:
        groups = classes(given.only)
        sizes = numbers(given.batch, "batch", BATCHES), numbers(given.context, "context", CONTEXTS)
        wanted = steps(*sizes, groups) if status.available else {}
    except DSV4Error as error:
        print(error)
        return 2
    if not status.available:
        print(f"nothing timed: a decode step is timed on an H200, and here {status.reason}")
        return harness.NOTHING_TIMED
    rows, peers = rows_of(wanted), harness.parts(given.providers)
    with torch.no_grad():
        if given.part:
            one, count = map(int, given.part.split("/"))
            harness.first_calls(rows[one::count], peers)
            return 0
        if given.ahead:
            harness.ahead(min(given.ahead, len(rows)), arguments, NAME)
        found = harness.run(rows, timing.GpuClock(), providers=peers, seconds=given.seconds)
    by_row = {(one.op, one.shape): one for one in found}
    entries = {step: [table.entry(line, by_row) for line in own] for step, own in wanted.items()}
    for step, own in entries.items():
        print("\n" + table.page(*step, own, torch.cuda.get_device_name()), flush=True)
    facts = harness.facts(harness.command_line(arguments, given.record, given.history, module=NAME))
    if given.history is not None:
        history.append(history.of_results("decode_step", found), given.history, facts)
    if given.record is not None:
        results.record(found, facts, given.record)
        table.record(entries, facts["run"], given.record)
    bad = {one.state for own in entries.values() for one in own} & {results.WRONG, results.FAILED}
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
