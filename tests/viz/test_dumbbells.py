"""Times of providers: panels stack evenly, and a line has one height in all of them."""

import pytest

from dsv4lib.errors import ArgumentError
from dsv4lib.viz.dumbbells import Case, dumbbells
from dsv4lib.viz.style import alt_text, to_png


def panel(name: str, count: int) -> list[Case]:
    return [Case(f"{name} {i}", 1.0, 2.0 + i, 3.0, "peer") for i in range(count)]


def test_a_line_has_one_height_in_every_panel() -> None:
    counts = {"long": 24, "a": 4, "b": 6}
    fig = dumbbells({name: panel(name, count) for name, count in counts.items()}, "title")
    to_png(fig)  # places the axes
    shown = {ax.get_title(loc="left"): ax for ax in fig.axes if ax.axison}
    assert shown.keys() == counts.keys()
    heights = [shown[name].get_window_extent().height / count for name, count in counts.items()]
    assert max(heights) < 1.6 * min(heights)
    left, *right = (shown[name].get_window_extent().x0 for name in counts)
    assert right[0] == pytest.approx(right[1], abs=40) and right[0] > left + 100
    assert "a: a 0 floor 1, ours 2, peer 3" in alt_text(fig)


def test_panels_without_a_time_are_refused() -> None:
    for bad in ({}, {"a": [Case("x", None, None, None)]}):
        with pytest.raises(ArgumentError):
            dumbbells(bad, "title")
