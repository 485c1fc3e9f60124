"""Take over what the race detector of a worker process learned about global memory (machine/cores.py).

A worker's clusters touched no word that others have written, wrote none that others have touched, and reported nothing.
So their detector differs from one that ran all clusters only by what it added: accesses, clusters, shadows of the words
they touched. Added here with new numbers, that is what the next clusters, and a launch that overlaps this one, have to
know. Where the order of additions would show (reads that wait for a first write), nothing is taken over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsv4lib.emulator.checks.global_memory import RANGES, Region
from dsv4lib.emulator.checks.launches import Member
from dsv4lib.emulator.memory.marks import Touched
from dsv4lib.emulator.native.race_log import Area


@dataclass(frozen=True)
class Before:
    """How much a detector knew when workers began. ``waiting``, ``written``: of each region, by its start."""

    accesses: int
    agents: int
    members: int
    words: int
    triggers: dict[bool, int]
    waiting: dict[int, int]
    written: dict[int, bool]


@dataclass
class Shadowed:
    """What a worker added to the shadow of an allocation: at ``words``, and the reads that wait for a first write."""

    words: np.ndarray
    writer: np.ndarray
    first: np.ndarray
    latest: np.ndarray
    ranges: list[tuple[np.ndarray, int, int]]
    written: bool
    read_from: bool


@dataclass
class Learned:
    """What a worker added: accesses by column, clusters, shadows by the allocation's start, fences, triggers."""

    accesses: np.ndarray
    members: list[dict[str, Any]]
    shadows: dict[int, Shadowed]
    fenced: dict[int, np.ndarray]
    aliased: dict[int, np.ndarray]
    triggers: dict[bool, int]


def before(detector: Any) -> Before:
    """Note how much a detector knows."""
    far = detector.far
    regions = far.regions.items()
    return Before(
        far.accesses.count,
        far.shared.count,
        len(far.shared.members),
        len(far.words),
        dict(detector.dependence.triggers),
        {start: len(region.ranges) for start, region in regions},
        {start: region.written for start, region in regions},
    )


def learned(detector: Any, old: Before, touched: Sequence[Touched]) -> Learned | None:
    """Collect what a worker's detector has added; None: it cannot be added to another's."""
    far = detector.far
    shared, starts = far.shared, [allocation.start for allocation in far.gmem]
    members = shared.members[old.members :]
    if len(far.words) != old.words or any(len(member.learned) > 1 for member in members):
        return None
    words = {starts[one.index]: one.accessed() for one in touched}
    shadows = {}
    for start, region in far.regions.items():
        if (waiting := old.waiting.get(start, 0)) > len(region.ranges):
            return None
        where = words.get(start, np.zeros(0, np.int64))
        arrays = (array[where] for array in (region.writer, region.first, region.latest))
        shadows[start] = Shadowed(where, *arrays, region.ranges[waiting:], region.written, region.read_from)
    ends = [*shared.bases[old.members + 1 :], shared.count]
    descriptions = [member.description(end - member.base) for member, end in zip(members, ends, strict=True)]
    rows = ({k - old.members: row for k, row in rows.items() if k >= old.members} for rows in far.fences())
    triggers = {key: n - old.triggers[key] for key, n in detector.dependence.triggers.items()}
    return Learned(far.accesses.rows(old.accesses), descriptions, shadows, *rows, triggers)


def fits(detector: Any, old: Before, new: Learned) -> bool:
    """Tell whether it makes no difference in which order two detectors have added what they know."""
    far = detector.far
    for start, shadow in new.shadows.items():
        region = far.regions.get(start)
        written, waiting = (False, []) if region is None else (region.written, region.ranges)
        if len(waiting) < old.waiting.get(start, 0) or len(waiting) + len(shadow.ranges) > RANGES:
            return False
        reads = shadow.ranges or waiting or shadow.read_from or (region is not None and region.read_from)
        if (written or shadow.written) and not old.written.get(start, False) and reads:
            return False
    return True


def absorb(detector: Any, old: Before, new: Learned) -> None:
    """Add what a worker's detector has learned, after the data that its clusters wrote."""
    far = detector.far
    shared = far.shared
    numbers, agents, clusters = far.accesses.count, shared.count, len(shared.members)
    rows = new.accesses.copy()
    rows[0] += np.uint32(agents - old.agents)
    far.accesses.extend(rows)
    for description in new.members:
        description = dict(description)
        size = description.pop("agents")
        far.join(Member.described(shared.count, detector.machine, **description), size)
    for rows_here, rows_there in zip(far.fences(), (new.fenced, new.aliased), strict=True):
        rows_here.update({clusters + k: row for k, row in rows_there.items()})
    for key, count in new.triggers.items():
        detector.dependence.triggers[key] += count
    for start, shadow in new.shadows.items():
        region = far.region_of(start)
        if region is not None:
            _add(region, shadow, old.accesses, numbers - old.accesses)


def _add(region: Region, shadow: Shadowed, known: int, more: int) -> None:
    """Add to a shadow. Accesses from ``known`` on are new and have their numbers increased by ``more``."""
    if shadow.written:
        region.block.values[Area.WRITTEN] = 1
    if shadow.read_from:
        region.block.values[Area.READ_FROM] = 1
    region.ranges += [(starts, nbytes, number + more) for starts, nbytes, number in shadow.ranges]
    words = shadow.words
    if not len(words):
        return
    fresh = [ids >= known for ids in (shadow.writer, shadow.first, shadow.latest)]
    writer, first, latest = (
        np.where(new, ids + np.uint32(more), ids).astype(np.uint32)
        for new, ids in zip(fresh, (shadow.writer, shadow.first, shadow.latest), strict=True)
    )
    wrote = fresh[0]
    begun = region.first[words] <= region.writer[words]  # no read since the last write
    region.first[words] = np.where(wrote | fresh[1] & begun, first, region.first[words])
    region.latest[words] = np.where(wrote | fresh[2], latest, region.latest[words])
    region.writer[words] = np.where(wrote, writer, region.writer[words])
    region.values[words[wrote]] = region.memory[words[wrote]]
