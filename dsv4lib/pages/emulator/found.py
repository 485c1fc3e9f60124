"""Run the reproductions of what the checks found in other people's kernels, for a notebook."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4lib.emulator.sanitize import catalogue, command, description, launching
from dsv4lib.emulator.sanitize.catalogue import Reproduction
from dsv4lib.emulator.sanitize.findings import group

HEADER = ("package", "where", "seen in its kernel", "reproduction", "result", "repaired")
SEEN = ("wrong numbers", "hang", "stops")


@dataclass(frozen=True)
class Result:
    """What a reproduction did: kinds reported, elements that are wrong, kind of what stopped it."""

    kinds: tuple[str, ...]
    wrong: int
    stopped: str

    def __str__(self) -> str:
        """Say it in a few words."""
        if self.stopped:
            return self.stopped
        return f"{self.wrong:,} wrong" if self.wrong else "right, reported" if self.kinds else "right, silent"


def reproduce(one: Reproduction, repaired: bool = False) -> Result:
    """Run a reproduction, or its repaired twin, under the schedule that changes its result, with the race detector."""
    wanted = description.read(one.description(repaired))
    schedule, seed = (one.changed_by, one.changed_seed) if one.changes else (one.schedule, one.seed)
    ptx = command.text_of(wanted.source, wanted.arch, wanted.options)
    outcome = launching.run(wanted, ptx, None, None, checks="race", schedule=schedule, seed=seed)
    kinds = dict.fromkeys(found.kind for found in group(outcome.hazards, outcome.stopped))
    wrong = sum(found.wrong for found in outcome.wrong.values())
    return Result(tuple(kinds), wrong, next(iter(kinds)) if outcome.stopped else "")


def rows(repair: bool = True) -> list[tuple[str, ...]]:
    """List the findings that were seen to change a result, each beside what its reproduction does now.

    Args:
        repair: False runs the defect in place of its repaired twin, a fault that a verdict must find.
    """
    known, out = catalogue.reproductions(), []
    for row in catalogue.findings():
        if row.reproduction and row.consequence.startswith(SEEN):
            one = known[row.reproduction]
            results = (str(reproduce(one, repaired)) for repaired in (False, repair))
            where = row.place.partition(", ")[0].rpartition("/")[2]
            out.append((row.package, where, row.consequence.partition(":")[0], one.name, *results))
    return out
