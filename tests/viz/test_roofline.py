"""The roofline: what it draws, and what it refuses."""

import pytest

from dsv4lib.errors import ArgumentError
from dsv4lib.viz import roofline
from dsv4lib.viz.style import alt_text, to_png

POINTS = {"one": {"a": [(10.0, 40.0, "x")], "b": [(1000.0, 1500.0, "")]}, "two": {"a": [(50.0, 300.0, "y")]}}


def test_points_and_roofs_are_where_they_should_be():
    fig = roofline.roofline(POINTS, 2250, {"HBM": 8.0}, "title")
    one, two = fig.axes
    roof, a, b = one.lines
    xs, ys = roof.get_data()
    assert max(ys) == 2250 and ys[0] == pytest.approx(8 * xs[0])
    assert (a.get_xdata()[0], a.get_ydata()[0]) == (10, 40) and b.get_ydata()[0] == 1500
    assert a.get_color() == two.lines[1].get_color() != b.get_color()
    assert "3 points" in alt_text(fig) and "1500" in alt_text(fig)
    assert to_png(fig).startswith(b"\x89PNG")


def test_what_a_logarithm_cannot_show_is_refused():
    for bad in ({}, {"one": {"a": [(0.0, 1.0, "")]}}, {"one": {"a": [(1.0, -1.0, "")]}}):
        with pytest.raises(ArgumentError):
            roofline.roofline(bad, 2250, {"HBM": 8.0})


def test_labels_of_close_points_do_not_cover_each_other():
    close = {"one": {"a": [(10.0, 40.0, "first"), (10.5, 42.0, "second"), (11.0, 40.0, "third")]}}
    fig = roofline.roofline(close, 2250, {"HBM": 8.0})
    fig.draw_without_rendering()
    texts = [text for text in fig.axes[0].texts if text.get_text() in ("first", "second", "third")]
    boxes = [text.get_window_extent() for text in texts]
    assert len(boxes) == 3
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
