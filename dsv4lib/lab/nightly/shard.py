"""Divide a plan into shards. Every machine computes the same division from the plan alone, without the others.

Jobs go, those with the largest time limit first, to the shard that has the least to do so far (longest processing
time first): no shard's sum of limits is above the mean by more than one job.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dsv4lib.errors import ArgumentError
from dsv4lib.lab.run.plan import Job

MOST = 10_000


@dataclass(frozen=True)
class Shard:
    """Part ``number`` of ``count``; both count from 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read ``i/n``. ArgumentError unless 1 <= i <= n."""
        match = re.fullmatch(r"([0-9]{1,5})/([0-9]{1,5})", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]) <= MOST:
            raise ArgumentError("--shard", text, f"i/n with 1 <= i <= n <= {MOST}, such as 1/4")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def of(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs of this shard, in the plan's order. A plan of fewer jobs than shards leaves some empty."""
        loads, mine = [0.0] * self.count, set()
        for job in sorted(jobs, key=lambda job: (-job.time_limit_s, job.name)):
            place = loads.index(min(loads))
            loads[place] += job.time_limit_s
            if place == self.number - 1:
                mine.add(job.name)
        return [job for job in jobs if job.name in mine]
