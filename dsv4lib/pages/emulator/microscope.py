"""Show the microscope in a notebook: the page of `dsv4 sanitize --report` in a frame, or fixed figures of moments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from dsv4lib.emulator.checks.report import Hazard
from dsv4lib.emulator.microscope.page import page, within
from dsv4lib.emulator.microscope.stream import stream
from dsv4lib.emulator.trace.trace import Trace
from dsv4lib.pages.emulator import figures
from dsv4lib.viz.widgets import framed, small_multiples

_SHARES = (0.1, 0.24, 0.9, 1.0)  # of a CTA's events, drawn small


def document(
    trace: Trace, hazards: Sequence[Hazard] = (), names: Mapping[int, str] | None = None, title: str = "", **facts: Any
) -> str:
    """Return the HTML of a launch's page.

    Args:
        names: of mbarriers, by their offsets. facts: as `stream` takes them.
    """
    named = {"barriers": {str(offset): name for offset, name in (names or {}).items()}} | facts
    return within(lambda limit: page([stream(trace, hazards, limit=limit, **named)], title or trace.kernel, title))


def moments(trace: Trace, names: Mapping[int, str], cta: int = 0) -> list[Figure]:
    """Draw a CTA half way through its events, and small at four other moments."""
    events = trace.events_of(cta)
    middle = figures.moment(trace, dict(names), int(events[len(events) // 2]), cta)[0]
    panels = []
    for share in _SHARES:
        event = int(events[int(share * (len(events) - 1))])
        panels.append((f"event {event}", *figures.moment(trace, dict(names), event, cta)))
    return [middle, small_multiples(panels)]


def show_microscope(
    trace: Trace,
    hazards: Sequence[Hazard] = (),
    names: Mapping[int, str] | None = None,
    title: str = "",
    twin: Callable[[Trace], Figure] | None = None,
) -> None:
    """Show a launch's page, or without a reader the figure of ``twin``, by default `moments`."""
    held = document(trace, hazards, names, title)
    framed(held, f"microscope: {title}", lambda: moments(trace, names or {}) if twin is None else [twin(trace)])


def hazard_chart(trace: Trace, cta: int = 0) -> Figure:
    """Draw the timeline of a CTA with a line where a check reported first."""
    rows = trace.hazards[trace.hazards["cta"] == cta]
    now = float(np.min(rows["time"])) - trace.life(cta)[0] if len(rows) else None
    return figures.warp_timeline(trace, cta, now, {})
