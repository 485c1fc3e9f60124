"""Waterfalls: bars start where the one above ended, what is missing is in no sum, bad input is refused."""

import pytest

from dsv4lib.errors import ArgumentError
from dsv4lib.viz import waterfall as viz
from dsv4lib.viz.style import alt_text, to_png

WORDS = viz.Words("ours", "floor", "public")
PARTS = [viz.Part("a", 2.0, 0.5, 3.0), viz.Part("b", None, None, None, "not timed"), viz.Part("c", 1.0, 1.0, None)]


def boxes(fig, panel=0):
    """(left, width) of every bar, by place from the top; outlined ones apart."""
    found = {"bars": [], "outlined": []}
    for patch in fig.axes[panel].patches:
        where = "outlined" if patch.get_height() < 0.3 else "bars"
        found[where].append((round(patch.get_y() + 0.35), patch.get_x(), patch.get_width()))
    return found


def test_bars_start_where_the_one_above_ended():
    found = boxes(viz.waterfall({"one": PARTS}, WORDS, "title"))
    assert found["bars"] == [(0, 0.0, 2.0), (0, 0.0, 0.5), (2, 2.0, 1.0), (2, 2.0, 1.0), (3, 0.0, 3.0), (3, 0.0, 1.5)]
    assert [box[1:] for box in found["outlined"]] == [(0.0, 3.0)]  # no sum: not every part has one


def test_the_sum_has_an_outlined_bar_if_every_part_has_one():
    whole = [viz.Part("a", 2.0, None, 3.0), viz.Part("b", 1.0, None, 0.5)]
    assert [box[1:] for box in boxes(viz.waterfall({"one": whole}, WORDS, "title"))["outlined"]] == [
        (0.0, 3.0),
        (2.0, 0.5),
        (0.0, 3.5),
    ]
    assert viz.total(whole) == viz.Part("sum", 3.0, 0.0, 3.5) and viz.total(PARTS).other is None


def test_words_say_every_number():
    fig = viz.waterfall({"one": PARTS, "two": PARTS}, WORDS, "title", {"one": "of\nthree"})
    text = alt_text(fig)
    assert "ms of ours, floor, public" in text and "one: a 2 / 0.5 / 3; b - / - / - not timed; c 1 / 1 / -" in text
    assert "sum 3 / 1.5 / - of three. two: a" in text and to_png(fig).startswith(b"\x89PNG")
    assert viz.said(PARTS[0], viz.Words("floor", "weights")) == "2 / 0.5"


def test_what_cannot_be_drawn_is_refused():
    for bad in ({}, {"one": []}, {"one": PARTS[1:2]}, {"one": PARTS, "two": PARTS[:2]}):
        with pytest.raises(ArgumentError, match="panels"):
            viz.waterfall(bad, WORDS, "title")
