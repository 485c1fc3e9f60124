"""Choose which warps run for how long, and which asynchronous work completes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dsv4lib.emulator.machine.async_units import AsyncOp, AsyncUnits
    from dsv4lib.emulator.machine.warp import Warp


class Policy:
    """Round robin: every ready warp in turn, then each unit completes its oldest operation.

    Attributes:
        quantum: instructions of a slice between two services.
        services: services of a slice.
        clusters: clusters that run at the same time unless the kernel needs more.
    """

    quantum = 1000
    services = 16
    clusters = 1

    def __init__(self, rng: np.random.Generator):
        self.random = random.Random(int(rng.integers(1 << 62)))  # one number at a time: faster than numpy

    def slices(self, ready: list[Warp]) -> list[tuple[Warp, int]]:
        """Choose warps to run next, each with its quantum."""
        quantum = self.quantum
        return [(warp, quantum) for warp in ready]

    def completions(self, units: AsyncUnits, can_run: bool) -> list[AsyncOp]:
        """Choose operations to complete. ``can_run``: some warp is ready, else the launch waits for them."""
        return units.oldest()

    def counts(self) -> dict[str, int]:
        """Return what the policy adds to the counts of a launch."""
        return {}

    def device_order(self, count: int) -> Sequence[int]:
        """Choose the order in which a sum over ``count`` devices is formed: ascending."""
        return range(count)


class OldestFirst(Policy):
    """The lowest-numbered ready warp until it blocks. Operations complete at once, in the order of issue."""

    limit = 16  # full slices after which a warp that never blocks (it may spin) goes to the end of the queue

    def __init__(self, rng: np.random.Generator):
        super().__init__(rng)
        self.worn: dict[Warp, int] = {}

    def key(self, warp: Warp) -> int:
        """Rank a warp; the lowest runs."""
        return warp.agent

    def slices(self, ready: list[Warp]) -> list[tuple[Warp, int]]:
        """Choose one warp; those that spin give way now and then."""
        if not ready:
            return []
        warp = min(ready, key=lambda w: (self.worn.get(w, 0) // self.limit, self.key(w)))
        self.worn[warp] = self.worn.get(warp, 0) + 1
        return [(warp, self.quantum)]

    def completions(self, units: AsyncUnits, can_run: bool) -> list[AsyncOp]:
        """Choose the oldest operation."""
        candidates = units.candidates()
        return [min(candidates, key=lambda op: op.order)] if candidates else []


class NewestFirst(OldestFirst):
    """The highest-numbered ready warp until it blocks. The newest operation completes first."""

    clusters = 2

    def key(self, warp: Warp) -> int:
        """Rank the highest-numbered warp first."""
        return -warp.agent

    def completions(self, units: AsyncUnits, can_run: bool) -> list[AsyncOp]:
        """Choose the newest operation."""
        candidates = units.candidates()
        return [max(candidates, key=lambda op: op.order)] if candidates else []

    def device_order(self, count: int) -> Sequence[int]:
        """Choose descending order."""
        return range(count)[::-1]


class Random(Policy):
    """Seeded: a random warp, a random quantum, now and then a random operation."""

    services = 2
    clusters = 4

    def slices(self, ready: list[Warp]) -> list[tuple[Warp, int]]:
        """Choose one warp, any."""
        if not ready:
            return []
        return [(self.random.choice(ready), 1 + int(self.random.expovariate(1 / 64)))]

    def completions(self, units: AsyncUnits, can_run: bool) -> list[AsyncOp]:
        """Choose every fourth time one operation, any."""
        if can_run and self.random.random() > 0.25:
            return []
        candidates = units.candidates()
        return [self.random.choice(candidates)] if candidates else []

    def device_order(self, count: int) -> Sequence[int]:
        """Choose any order."""
        return self.random.sample(range(count), count)


class Adversarial(Random):
    """Warps in shuffled order and small slices. Operations as late as possible, in random order."""

    services = 1

    def slices(self, ready: list[Warp]) -> list[tuple[Warp, int]]:
        """Choose all warps, shuffled."""
        order = ready.copy()
        self.random.shuffle(order)
        return [(warp, self.random.randrange(1, 40)) for warp in order]

    def completions(self, units: AsyncUnits, can_run: bool) -> list[AsyncOp]:
        """Choose nothing as long as a warp can run."""
        if can_run:
            return []
        candidates = units.candidates()
        return [self.random.choice(candidates)] if candidates else []


POLICIES: dict[str, type[Policy]] = {
    "round_robin": Policy,
    "oldest_first": OldestFirst,
    "newest_first": NewestFirst,
    "adversarial": Adversarial,
    "random": Random,
}
