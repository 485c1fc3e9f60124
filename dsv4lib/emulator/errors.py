"""Name what can go wrong in an emulated launch, with its place. That is PTX line, Python line, CTA, warp and lanes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsv4lib.errors import DSV4Error


@dataclass(frozen=True)
class Place:
    """Where in a kernel something happened.

    Attributes:
        kernel: entry name.
        ptx_line: 1-based line of the PTX text.
        ptx: the instruction's text.
        python: ``file:line`` of the Python source through line info, or "" if the kernel was compiled without it.
        cta: (x, y, z) of the CTA, or None.
        warp: warp index in the CTA, or None.
        lanes: active lane mask, or 0.
        device: number of the device where there are several, else None.
    """

    kernel: str
    ptx_line: int
    ptx: str
    python: str = ""
    cta: tuple[int, int, int] | None = None
    warp: int | None = None
    lanes: int = 0
    device: int | None = None

    def __str__(self) -> str:
        where = "" if self.device is None else f" device {self.device}"
        where += "" if self.cta is None else f" cta {self.cta}"
        where += "" if self.warp is None else f" warp {self.warp}"
        where += f" lanes {self.lanes:#010x}" if self.lanes else ""
        at = f" at {self.python}" if self.python else ""
        return f"{self.kernel}{where}{at}, PTX line {self.ptx_line}: {self.ptx}"


class EmulatorError(DSV4Error):
    """Base of everything an emulated launch raises.

    Attributes:
        place: None where no instruction is to blame.
        hazards: what the checks had reported when the launch was stopped; often the cause.
    """

    def __init__(self, message: str, place: Place | None = None):
        self.place = place
        self.hazards: list[Any] = []
        super().__init__(message if place is None else f"{message}\n  in {place}")


class PtxSyntaxError(EmulatorError):
    """The PTX text could not be read."""


class UnsupportedInstruction(EmulatorError):
    """An opcode or modifier without an implementation. Never ignored, never guessed."""


class MemoryFault(EmulatorError):
    """An access outside every allocation, misaligned, or in the wrong state space."""


class HazardError(EmulatorError):
    """A check that stops the launch: what the kernel did is undefined on hardware."""


class Deadlock(EmulatorError):
    """All warps wait, or repeat the same loop; the message lists what each waits on."""


class LimitExceeded(EmulatorError):
    """The instruction or time limit of the launch was reached."""


class LaunchError(EmulatorError):
    """A launch that the architecture does not allow. Grid, block, cluster, shared memory, attributes."""
