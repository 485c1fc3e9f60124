"""Measure what a run uses: CPU time, time asleep and memory of all its processes.

Limits must not depend on other users of the machine, so they count what the run does, not what the clock shows:

- computing: CPU seconds; threads that run side by side count once, so on a quiet machine this is wall time.
- asleep: wall seconds in which the run used no CPU although no thread of it waited for a core,
  for a disk or to be continued.

A busy loop ends at its limit, a hang that sleeps at `ASLEEP` times its limit (it may wait for another run, such as for
a kernel that one compiles), and a run that others starve or stop goes on: for it alone counts `WALL` times its limit.
"""

from __future__ import annotations

import contextlib
import os
import resource
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ASLEEP = 5.0  # a run may sleep this many times its limit
WALL = 30.0  # and last this many times its limit in all
IDLE = 0.05  # share of a core below which a run makes no progress; a kernel's heartbeat takes a tenth of it
WAITING = frozenset("RDTt")  # states in /proc of threads that would go on if the machine let them


@dataclass
class Meter:
    """What the processes from ``pid`` down have used since ``began``.

    Attributes:
        pid: of the run's first process.
        began: monotonic time of its start.
        at: monotonic time of the last sample.
        cpu_s: CPU seconds of all processes, ended ones included once their parent has waited for them.
        computing_s, asleep_s: see the module.
        resident_mb, peak_mb: resident memory now and at most, in MB (10**6 bytes).
    """

    pid: int
    began: float
    at: float = 0.0
    cpu_s: float = 0.0
    computing_s: float = 0.0
    asleep_s: float = 0.0
    resident_mb: float = 0.0
    peak_mb: float = 0.0
    _total: float = 0.0
    _known: dict[int, psutil.Process] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.at = self.began

    def sample(self, now: float) -> None:
        """Look at every process of the run; ``now`` is monotonic time."""
        passed, self.at = now - self.at, now
        total = self._look()
        used, self._total = max(0.0, total - self._total), total
        self.cpu_s += used
        self.computing_s += min(used, passed)
        if used < IDLE * passed and not any(_waits(pid) for pid in self._known):
            self.asleep_s += passed

    def exceeded(self, limit_s: float) -> str:
        """Return why a run with this limit has to end, or "" if it may go on."""
        if self.computing_s > limit_s:
            return f"it computed past its limit of {limit_s:g} s"
        if self.asleep_s > ASLEEP * limit_s:
            return f"it slept for {self.asleep_s:.0f} s, {ASLEEP:g} times its limit of {limit_s:g} s"
        if self.at - self.began > WALL * limit_s:
            return f"it was not over after {WALL:g} times its limit of {limit_s:g} s"
        return ""

    def _look(self) -> float:
        """CPU seconds of the living processes and of the children that they have waited for."""
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self.pid)
            # A process seen once is known from then on, even if it lost its parent.
            self._known |= {process.pid: process for process in [root, *root.children(recursive=True)]}
        total = resident = 0.0
        for pid, process in list(self._known.items()):
            try:
                if not process.is_running():
                    raise psutil.NoSuchProcess(pid)
                total += sum(process.cpu_times()[:4])  # user, system, and both of children waited for
                resident += process.memory_info().rss
            except psutil.Error:
                del self._known[pid]
        self.resident_mb = resident / 1e6
        self.peak_mb = max(self.peak_mb, self.resident_mb)
        return total


def own_cpu_s() -> float:
    """Return CPU seconds of this process and of the children that it has waited for."""
    uses = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses)


def _waits(pid: int) -> bool:
    """True if a thread of ``pid`` waits for a core, for a disk or to be continued."""
    with contextlib.suppress(OSError, IndexError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError, IndexError):
                if Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()[0] in WAITING:
                    return True
    return False
