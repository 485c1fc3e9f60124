"""Group hazards by cause: one finding for a kind and a pair of source lines, whatever PTX the compiler made of them.

A finding has both accesses with their source text, what the kernel did, and what usually repairs it.
"""

from __future__ import annotations

import functools
import linecache
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dsv4lib.emulator.checks import KINDS, Hazard
from dsv4lib.emulator.errors import (
    Deadlock,
    EmulatorError,
    HazardError,
    LimitExceeded,
    MemoryFault,
    Place,
)
from dsv4lib.emulator.gpu.names import shortened
from dsv4lib.emulator.sanitize.fixes import language_of, named

# What stops a launch: name, meaning, what usually repairs it.
_STOPS: tuple[tuple[type[EmulatorError], str, str, str], ...] = (
    (MemoryFault, "memory_fault", "an access outside every allocation, misaligned, or in the wrong state space",
     "guard the access, correct the index or the size of the allocation"),
    (Deadlock, "deadlock", "all warps wait, or repeat the same loop",
     "make arrivals and expected counts agree; let every thread that a barrier counts arrive"),
    (LimitExceeded, "limit_exceeded", "the limit of instructions or time was reached",
     "look for a loop that does not end, take a smaller shape, or raise the limit"),
    (HazardError, "stopped", "the kernel did what is undefined on hardware", "see the message"),
)  # fmt: skip
_SOURCES = frozenset((".py", ".cu", ".cuh", ".c", ".cc", ".cpp", ".cxx", ".h", ".hh", ".hpp", ".inl", ".ptx"))
_MAX_SOURCE = 16 << 20
_ORDER = re.compile(r"(\w+) after (\w+)")
_VERBS = {"read": "reads", "write": "writes"}


@dataclass(frozen=True)
class Site:
    """One access: where it is in the source and in the PTX, and which threads made it first.

    Attributes:
        file, line: of the source, "" and 0 without line info. text: that line.
        ptx_line, ptx: the instruction. threads: device, CTA, warp and lanes in words.
    """

    file: str
    line: int
    text: str
    ptx_line: int
    ptx: str
    threads: str

    @property
    def where(self) -> str:
        """Name the source line, else the PTX line."""
        return f"{self.file}:{self.line}" if self.file else f"PTX line {self.ptx_line}"


@dataclass
class Finding:
    """One cause.

    Attributes:
        kind, severity, meaning, fix: as `checks.kinds` has them. kernel: its name in the file, title: for readers.
        message: what happened the first time. count: how often it happened.
        place: the access that went wrong; against: the one it conflicts with. verbs: what each did, "" if not known.
        instructions: PTX lines of all pairs of instructions.
    """

    kind: str
    severity: str
    meaning: str
    fix: str
    kernel: str
    title: str
    message: str
    count: int
    place: Site | None
    against: Site | None
    verbs: tuple[str, str] = ("", "")
    instructions: list[tuple[int, int]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


def group(hazards: Iterable[Hazard], stopped: EmulatorError | None = None) -> list[Finding]:
    """Group hazards to findings: what stopped a launch first, then errors, then lints, each by line."""
    found: dict[Any, Finding] = {}
    for hazard in hazards:
        place, against = site(hazard.place), site(hazard.owner)
        kernel = hazard.place.kernel if hazard.place else ""
        both = tuple(sorted((_key(place), _key(against))))  # which of two racing accesses came first is chance
        key = hazard.kind, kernel, both, "" if place else hazard.message
        pair = (place.ptx_line if place else 0, against.ptx_line if against else 0)
        if key in found:
            known = found[key]
            known.count += hazard.count
            if pair not in known.instructions:
                known.instructions.append(pair)
            continue
        kind = KINDS.get(hazard.kind)
        order = _ORDER.fullmatch(str(hazard.facts.get("order", "")))
        found[key] = Finding(
            hazard.kind,
            hazard.severity,
            kind.meaning if kind else "",
            named(hazard.fix, hazard.kind, language_of(place.file, source_lines(place.file)) if place else ""),
            kernel,
            clean(shortened(kernel)),
            clean(hazard.message),
            hazard.count,
            place,
            against,
            (_VERBS.get(order[1], ""), _VERBS.get(order[2], "")) if order else ("", ""),
            [pair],
        )
    ordered = sorted(found.values(), key=lambda one: (one.severity != "error", one.kernel, _key(one.place), one.kind))
    return ([] if stopped is None else [stop(stopped)]) + ordered


def stop(error: EmulatorError) -> Finding:
    """Make the finding of what stopped a launch."""
    kind, meaning, fix = next((row[1:] for row in _STOPS if isinstance(error, row[0])), ("stopped", "", ""))
    message = str(error)
    if isinstance(error, HazardError) and message.partition(":")[0] in KINDS:
        known = KINDS[message.partition(":")[0]]
        kind, meaning, fix = known.name, known.meaning, known.fix
        message = message.partition(":")[2].strip()
    place = site(error.place)
    if error.place is not None:
        message = message.removesuffix(f"\n  in {error.place}")
    kernel = error.place.kernel if error.place else ""
    pair = [(place.ptx_line, 0)] if place else []
    return Finding(
        kind, "error", meaning, fix, kernel, clean(shortened(kernel)), clean(message), 1, place, None, ("", ""), pair
    )


def site(place: Place | None) -> Site | None:
    """Look up the source line of a place."""
    if place is None:
        return None
    file, _, number = place.python.rpartition(":")
    line = int(number) if file and number.isdigit() else 0
    threads = [] if place.device is None else [f"device {place.device}"]
    threads += [] if place.cta is None else [f"CTA {place.cta}"]
    threads += [] if place.warp is None else [f"warp {place.warp}"]
    threads += [_lanes(place.lanes)] if place.lanes else []
    text = source_line(file, line) if line else ""
    return Site(clean(file) if line else "", line, text, place.ptx_line, clean(place.ptx), ", ".join(threads))


def _lanes(mask: int) -> str:
    count = mask.bit_count()
    if count == 32:
        return "all lanes"
    first = (mask & -mask).bit_length() - 1
    return f"lane {first}" if count == 1 else f"{count} lanes from {first}"


def _key(place: Site | None) -> tuple[str, int]:
    """What makes two places one: the source line, else the PTX line."""
    if place is None:
        return "", 0
    return (place.file, place.line) if place.file else ("", place.ptx_line)


def clean(text: str) -> str:
    """Take control characters out of a text, which a file may have put there to steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


@functools.lru_cache(64)
def source_lines(file: str) -> tuple[str, ...]:
    """Read the lines of a source file, or of a notebook's cell; none of anything else: its name comes from the PTX."""
    path = Path(file)
    if path.parent.name.startswith("ipykernel_"):  # a cell has no file: IPython keeps its lines here
        known = linecache.cache.get(file, ())
        return tuple(line.rstrip("\n") for line in known[2]) if len(known) == 4 else ()
    try:
        if path.suffix not in _SOURCES or not path.is_file() or path.stat().st_size > _MAX_SOURCE:
            return ()
        return tuple(path.read_text(errors="replace").splitlines())
    except (OSError, ValueError):
        return ()


def source_line(file: str, line: int) -> str:
    """Read one line of a source file, "" if it cannot be read."""
    lines = source_lines(file)
    return clean(lines[line - 1].strip())[:200] if 1 <= line <= len(lines) else ""
