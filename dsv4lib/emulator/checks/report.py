"""Report a hazard, and make a table of many.

One record per kind and pair of instructions (the one that went wrong, the one it conflicts with), with a count: a race
in a loop is one finding, not ten thousand.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dsv4lib.emulator.checks.kinds import KINDS, severity
from dsv4lib.emulator.errors import Place


@dataclass
class Hazard:
    """Something the kernel did that the PTX ISA leaves undefined, or a lint.

    Attributes:
        kind: one of `kinds.KINDS`; message: what happened at the first time.
        place: the instruction, with its PTX and Python line, CTA, warp and lanes; None if none is to blame.
        facts: numbers by name, such as ``address``.
        owner: the instruction it conflicts with, usually the one that wrote the data; None if unknown.
        count: how often it happened.
    """

    kind: str
    message: str
    place: Place | None
    facts: dict[str, Any] = field(default_factory=dict)
    owner: Place | None = None
    count: int = 1

    @property
    def severity(self) -> str:
        """Look up ``error`` or ``lint``."""
        return severity(self.kind)

    @property
    def fix(self) -> str:
        """Look up what usually repairs it."""
        return KINDS[self.kind].fix if self.kind in KINDS else ""

    def key(self) -> tuple[str, int, int]:
        """Make the key by which two hazards are the same finding."""
        return self.kind, _line(self.place), _line(self.owner)

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        level = "" if self.severity == "error" else f" [{self.severity}]"
        where = f"\n  in {self.place}" if self.place else ""
        against = f"\n  against {self.owner}" if self.owner else ""
        return f"{self.kind}{level}: {self.message}{times}{where}{against}"


def place_at(program: Any, pc: int, cta: Any, warp: int | None, lanes: int, device: int | None = None) -> Place:
    """Make the place of an access by the number of its instruction."""
    instr = program.instruction(pc)
    python = program.python_line(instr)
    return Place(program.kernel.name, instr.line, instr.text, python, cta, warp, lanes, device)


def _line(place: Place | None) -> int:
    return place.ptx_line if place else 0


def errors(hazards: Iterable[Hazard]) -> list[Hazard]:
    """Select those that are no lints."""
    return [h for h in hazards if h.severity == "error"]


def table(hazards: Iterable[Hazard]) -> list[dict[str, Any]]:
    """Make a row per hazard, errors first. Columns: severity, kind, count, lines, owner's lines, message, fix."""
    ordered = sorted(hazards, key=lambda h: (h.severity != "error", _line(h.place)))
    return [
        {
            "severity": h.severity,
            "kind": h.kind,
            "count": h.count,
            "python": h.place.python if h.place else "",
            "ptx_line": _line(h.place),
            "owner_python": h.owner.python if h.owner else "",
            "owner_ptx_line": _line(h.owner),
            "message": h.message,
            "fix": h.fix,
        }
        for h in ordered
    ]
