"""Hold the default limits of a launch and a device.

Also the queue of a huge grid's CTAs.

The defaults are far above what kernels in tests and examples need; they stop a loop that never ends and an allocation
that this machine could only answer by thrashing. Each can be raised for one device by an argument, for one script on
the command line of `dsv4 emulate`, for a whole process by an environment variable.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dsv4lib.errors import ArgumentError

Dim3 = tuple[int, int, int]


@dataclass(frozen=True)
class Limit:
    """One limit: the argument of `device`, the option of `dsv4 emulate`. Also the variable, the default, its unit."""

    argument: str
    option: str
    variable: str
    default: float
    unit: str

    @property
    def how(self) -> str:
        """Say how to raise it, for error messages."""
        return f"raise it with {self.argument}=, dsv4 emulate {self.option}, or {self.variable}"

    def value(self) -> float:
        """Read the variable, else take the default.

        Raises:
            ArgumentError: the variable is not a positive number of the default's type (a time may be inf).
        """
        text = os.environ.get(self.variable, "")
        if not text:
            return self.default
        try:
            found = type(self.default)(text)
        except ValueError:
            found = 0
        if not found > 0:
            raise ArgumentError(self.variable, text, f"a positive number of {self.unit}")
        return found


INSTRUCTIONS = Limit(
    "instruction_limit", "--instruction-limit", "DSV4_EMULATOR_INSTRUCTIONS", 10_000_000_000, "warp-instructions"
)
SECONDS = Limit("time_limit", "--time-limit", "DSV4_EMULATOR_SECONDS", 1800.0, "seconds of processor time")
BYTES = Limit(
    "memory_limit",
    "--memory-limit",
    "DSV4_EMULATOR_BYTES",
    os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    "bytes",
)

CORES = Limit("cores", "--cores", "DSV4_EMULATOR_CORES", 1, "processes")


def command_cores() -> int:
    """Take the processes of a launch of a command: the variable, else every core that this process may use.

    A command has its machine to itself; a test, a notebook or a program may run beside others, so there it is 1.
    """
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return int(CORES.value()) if os.environ.get(CORES.variable) else usable


class ClusterQueue:
    """First CTAs of the clusters of a grid, x fastest, made when they are taken. A grid of 10^9 costs nothing.

    Args:
        grid, cluster: dimensions; the grid is a multiple of the cluster.
        chosen: run only these, by their first CTAs; None = all.
    """

    def __init__(self, grid: Dim3, cluster: Dim3, chosen: Iterable[Dim3] | None = None):
        self._cluster = cluster
        self._shape = tuple(g // c for g, c in zip(grid, cluster, strict=True))
        self._chosen = None if chosen is None else sorted(chosen, key=lambda place: place[::-1])
        self._next = 0
        x, y, z = self._shape
        self._count = x * y * z if self._chosen is None else len(self._chosen)

    def __len__(self) -> int:
        return self._count - self._next

    def popleft(self) -> Dim3:
        """Take the next one.

        Raises:
            IndexError: there is none.
        """
        i = self._next
        if i >= self._count:
            raise IndexError("no cluster is left")
        self._next += 1
        if self._chosen is not None:
            return self._chosen[i]
        (x, y, _), (cx, cy, cz) = self._shape, self._cluster
        return i % x * cx, i // x % y * cy, i // (x * y) * cz


def default_settings() -> dict[str, Any]:
    """Make the default limits of a launch, and its processes, by the name of their setting."""
    return {limit.argument: limit.value() for limit in (INSTRUCTIONS, SECONDS, BYTES, CORES)}
