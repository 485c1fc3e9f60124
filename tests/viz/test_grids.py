"""Pictures of formats: what they claim in words is what the arrays hold, and bad input is named."""

from __future__ import annotations

import numpy as np
import pytest

from dsv4lib.errors import ArgumentError
from dsv4lib.viz import grids
from dsv4lib.viz.style import alt_text, to_png


def test_number_lines_draw_every_positive_value_once():
    fig = grids.number_lines({"a": [0.0, -1.0, 1.0, 2.0, 2.0, np.inf, np.nan], "b": [4.0]})
    linear, powers = fig.axes
    assert [len(c.get_segments()) for c in linear.collections] == [2, 1]
    assert [s[0][0] for s in powers.collections[0].get_segments()] == [0.0, 1.0]
    assert "a: 2 from 1 to 2" in alt_text(fig) and to_png(fig)


def test_value_map_writes_each_cell():
    values = np.array([[0.0, 1.5, 2.0], [0.25, 0.0, 4.0]])
    fig = grids.value_map(values, ["x", "y"], ["p", "q", "r"], ("row", "column", "unit"), "title")
    assert [t.get_text() for t in fig.axes[0].texts] == ["0", "1.5", "2", "0.25", "0", "4"]
    assert "2 of 6 cells are 0; largest 4, at y and r" in alt_text(fig) and to_png(fig)
    assert to_png(grids.value_map(np.zeros((1, 1)), ["x"], ["p"], ("a", "b", "c"), "nothing wrong"))


def test_block_maps_share_one_scale():
    maps = {"bad": np.array([[1.0, 0.5]]), "good": np.array([[0.0, 0.001]])}
    fig = grids.block_maps(maps, ("row", "block", "error"), "title")
    norms = {id(ax.images[0].norm) for ax in fig.axes if ax.images}
    assert len(norms) == 1 and "good: median 0.0005, largest 0.001" in alt_text(fig) and to_png(fig)
    assert to_png(grids.block_maps({"exact": np.zeros((2, 3))}, ("row", "block", "error"), "title"))


def test_histograms_share_one_axis():
    fig = grids.histograms({"one": {"a": [1.0, 1.0, 3.0]}, "two": {"b": [2.0]}}, "x", "title", mark=(1.0, "right"))
    heights = [p.get_xy()[:, 1].max() for p in fig.axes[0].patches]
    assert max(heights) == pytest.approx(200 / 3)
    assert fig.axes[0].get_xlim() == fig.axes[1].get_xlim()
    assert "one, a: median 1, 1 to 3" in alt_text(fig) and to_png(fig)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: grids.number_lines({}), "formats"),
        (lambda: grids.number_lines({"a": [0.0, -2.0]}), "a="),
        (lambda: grids.value_map(np.ones((2, 2)), ["x"], ["p", "q"], ("a", "b", "c"), ""), r"\[1, 2\]"),
        (lambda: grids.value_map(np.ones((17, 1)), ["x"] * 17, ["p"], ("a", "b", "c"), ""), "at most 16"),
        (lambda: grids.block_maps({"a": np.ones((1, 2)), "b": np.ones((2, 2))}, ("a", "b", "c"), ""), "one shape"),
        (lambda: grids.histograms({"one": {"a": [np.nan]}}, "x", ""), "finite"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


def test_byte_map_counts_what_it_draws():
    fig = grids.byte_map([0] * 5 + [1, 1, -1], ["a", "b"], "page", per_row=4)
    image = np.asarray(fig.axes[0].images[0].get_array())
    assert image.tolist() == [[1, 1, 1, 1], [1, 2, 2, 0]]
    assert "8 bytes: 5 a, 2 b, 1 nothing" in alt_text(fig) and to_png(fig)
    with pytest.raises(ArgumentError, match="codes"):
        grids.byte_map([2], ["a", "b"], "page")


def test_category_map_counts_what_it_draws():
    fig = grids.category_map([[0, 0, 1], [-1, 1, 0]], ["a", "b"], ("rings", "slot"), "owner", ["x", "y"], "empty")
    image = np.asarray(fig.axes[0].images[0].get_array())
    assert image.tolist() == [[1, 1, 2], [0, 2, 1]]
    assert [label.get_text() for label in fig.axes[0].get_yticklabels()] == ["x", "y"]
    assert "2 x 3 cells: 3 a, 2 b, 1 empty" in alt_text(fig) and to_png(fig)
    assert [text.get_text() for text in fig.legends[0].get_texts()] == ["a", "b", "empty"]
    for codes, rows, name in (([[2]], (), "codes"), ([0], (), "codes"), ([[0]], ("x", "y"), "rows")):
        with pytest.raises(ArgumentError, match=name):
            grids.category_map(codes, ["a", "b"], ("", ""), "owner", rows)
