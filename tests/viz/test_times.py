"""Times over bytes: points and limits are where they should be, and what cannot be shown is refused."""

import numpy as np
import pytest

from dsv4lib.errors import ArgumentError
from dsv4lib.viz import times
from dsv4lib.viz.style import alt_text, to_png

SERIES = {"a": [(1e6, 3.0), (1e8, 40.0)], "b": [(1e4, 1.5)]}


def test_points_and_limits_are_where_they_should_be():
    fig = times.over_bytes(SERIES, {"sheet": 4.0}, {"launch": 1.1}, "title")
    sheet, launch, a, b = fig.axes[0].lines
    x, y = sheet.get_data()
    np.testing.assert_allclose(y, x / 4e6)
    assert set(launch.get_ydata()) == {1.1}
    assert list(a.get_xdata()) == [1e6, 1e8] and list(a.get_ydata()) == [3, 40] and list(b.get_ydata()) == [1.5]
    assert "2 of a, 1 of b" in alt_text(fig) and to_png(fig).startswith(b"\x89PNG")


def test_what_a_logarithm_cannot_show_is_refused():
    for bad in ({}, {"a": []}, {"a": [(0.0, 1.0)]}, {"a": [(1.0, -1.0)]}):
        with pytest.raises(ArgumentError, match="series"):
            times.over_bytes(bad, {}, {}, "title")
