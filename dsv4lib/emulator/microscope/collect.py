"""Keep the traces of a program's launches for a page. A program may launch thousands; those that matter are few."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dsv4lib.emulator.checks import Hazard, errors
from dsv4lib.emulator.driver.device import Device
from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.emulator.machine.request import LaunchRequest, LaunchResult
from dsv4lib.emulator.microscope import code
from dsv4lib.emulator.microscope.stream import LIMIT, stream
from dsv4lib.emulator.trace.trace import Trace

LAUNCHES = 8  # of a page
MAX_BYTES = 1 << 27  # of the records of a launch, about: 400,000 without copies


@dataclass
class Kept:
    """One launch: its number from 1, its trace, what was reported, and what stopped it."""

    number: int
    trace: Trace
    hazards: Sequence[Hazard]
    block: tuple[int, ...] = ()
    stopped: EmulatorError | None = None

    @property
    def matters(self) -> bool:
        """Tell whether a check reported an error, or the launch was stopped."""
        return self.stopped is not None or bool(errors(self.hazards))


class Collector:
    """The launches of one device that a page shows: the first ones, and before them those with errors.

    Attributes:
        launches: how many there were.
        kept: at most `LAUNCHES`, in order.
    """

    def __init__(self, device: Device):
        self.device, self.launches = device, 0
        self.kept: list[Kept] = []
        device.tracing, device.observer = MAX_BYTES, self.ran

    def ran(self, request: LaunchRequest, result: LaunchResult) -> None:
        """Take the trace of a launch that has ended."""
        if result.trace is not None:
            self._keep(Kept(self.launches + 1, result.trace, result.hazards, request.block))
            result.trace = self.device.trace = None
        self.launches += 1

    def stopped(self, error: EmulatorError) -> None:
        """Take the trace of a launch that was stopped; of an error before it began there is none."""
        trace = self.device.trace
        if trace is not None:
            self._keep(Kept(self.launches + 1, trace, error.hazards, stopped=error))
            self.device.trace = None
            self.launches += 1

    def _keep(self, new: Kept) -> None:
        self.kept.append(new)
        if len(self.kept) > LAUNCHES:
            clean = [one for one in self.kept if not one.matters]
            self.kept.remove(clean[-1] if clean else self.kept[-2])

    def streams(self, limit: int = LIMIT, **facts: Any) -> list[dict[str, Any]]:
        """Make the streams of the kept launches; together they have at most ``limit`` events, and PTX in proportion."""
        settings = self.device.settings
        facts = {"arch": settings.arch, "schedule": settings.schedule, "seed": settings.seed} | facts
        sizes = shares([one.trace.events + len(one.trace.marks) + len(one.trace.states) for one in self.kept], limit)
        ptx = int(code.MAX_PTX * min(1.0, limit / LIMIT)) // max(len(self.kept), 1)
        return [
            stream(
                one.trace,
                one.hazards,
                one.stopped,
                max(size, 100),
                ptx,
                number=one.number,
                left_out=self.launches - len(self.kept),
                block=list(one.block),
                **facts,
            )
            for one, size in zip(self.kept, sizes, strict=True)
        ]


def shares(wanted: Sequence[int], limit: int) -> list[int]:
    """Divide a limit: who wants less than an equal part gets it, the others share what is left.

    >>> shares([10, 500, 700], 610)
    [10, 300, 300]
    """
    out = [0] * len(wanted)
    left = limit
    ordered = sorted(range(len(wanted)), key=lambda i: wanted[i])
    for done, i in enumerate(ordered):
        out[i] = min(wanted[i], left // (len(ordered) - done))
        left -= out[i]
    return out
