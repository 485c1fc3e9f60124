"""Numbers over runs: what is drawn where, words that name every change, input that cannot be drawn."""

import numpy as np
import pytest

from dsv4lib.errors import ArgumentError
from dsv4lib.viz import over_runs as viz
from dsv4lib.viz.style import alt_text, to_png

WORSE = viz.Change(1, 2, True, "aaa..bbb")


def track(**changed):
    """Four runs whose level moves between the second and the third."""
    given = {"title": "a, us", "places": [0, 1, 2, 4], "values": [1.0, 1.1, 2.0, 2.1], "changes": [WORSE]}
    given |= {"low": [0.9, 0.9, 1.9, 1.9], "high": [1.2, 1.2, 2.2, 2.2]} | changed
    return viz.Track(**given)


def test_a_change_stands_between_its_two_runs():
    fig = viz.tracks([track()], "title", {0.0: "first"})
    ax = fig.axes[0]
    spans = [patch.get_bbox().intervalx.tolist() for patch in ax.patches]
    assert spans == [[1.0, 2.0]] and ax.patches[0].get_facecolor()[:3] == pytest.approx((213 / 255, 94 / 255, 0))
    assert alt_text(fig) == "title. 1 numbers over runs. Changes: a, us: worse aaa..bbb."
    assert to_png(fig).startswith(b"\x89PNG")
    better = viz.tracks([track(changes=[WORSE._replace(worse=False)])], "title", {})
    assert "better aaa" in alt_text(better) and better.axes[0].patches[0].get_facecolor()[1] > 0.6


def test_the_band_is_of_each_run_and_a_near_bound_is_drawn():
    near, far = (viz.tracks([track(bound=bound)], "title", {}).axes[0] for bound in (2.5, 50.0))
    assert len(near.lines) == len(far.lines) + 1 and near.get_ylim()[1] > 2.5 > far.get_ylim()[1] - 0.5
    heights = near.collections[0].get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (0.9, 2.2)


def test_what_is_constant_looks_constant():
    same, below, above = ([value] * 4 for value in (3.0, 3.0 - 1e-8, 3.0 + 1e-8))
    low, high = viz.tracks([track(values=same, low=below, high=above, changes=[])], "title", {}).axes[0].get_ylim()
    assert low < 3 < high and high - low > 0.01


def test_ways_end_where_they_end():
    shown = {"a": ([0, 1, 2], [0.0, 0.5, 1.5]), "b": ([0, 1, 2], [0.0, 0.0, -0.2])}
    fig = viz.ways(shown, ["a"], "title")
    assert alt_text(fig) == "title: 2 numbers; those marked end at a 1.50; 1 is the bound."
    assert any(text.get_text() == "1.5" for text in fig.axes[0].texts)  # past the axis: written
    assert "none" in alt_text(viz.ways(shown, [], "title"))


def test_states_are_counted():
    fig = viz.states(
        np.array([[0, 1, -1], [0, 0, 0]]), ["a", "b"], ["passed", "failed"], "title", ["#00ff00", "#ff0000"]
    )
    assert alt_text(fig) == "title: 2 rows over 3 runs: 4 passed, 1 failed."


def test_shares_are_said():
    fig = viz.shares({"ours": [(2, 0.0), (4, 1.0)], "theirs": [(2, 0.5), (4, 1.0)]}, "title", "x", "y", "ours")
    assert alt_text(fig) == "title. ours: 0% at 2, 100% at 4; theirs: 50% at 2, 100% at 4."
    assert [line.get_linewidth() for line in fig.axes[0].lines] == [2.2, 1.0]


def test_what_cannot_be_drawn_is_refused():
    for draw in (
        lambda: viz.tracks([], "title", {}),
        lambda: viz.tracks([track(low=[1.0])], "title", {}),
        lambda: viz.tracks([track(places=[], values=[], low=[], high=[])], "title", {}),
        lambda: viz.ways({}, [], "title"),
        lambda: viz.states(np.zeros((1, 2), int), ["a", "b"], ["passed"], "title", ["#00ff00"]),
        lambda: viz.states(np.zeros((1, 2), int), ["a"], ["passed"], "title", []),
        lambda: viz.shares({"a": []}, "title", "x", "y"),
        lambda: viz.shares({}, "title", "x", "y"),
    ):
        with pytest.raises(ArgumentError):
            draw()
