"""The figure of splits: its addends are the formula's, its optimum is what the op chooses, and it moves."""

from __future__ import annotations

import pytest

from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common import splits
from dsv4lib.pages.fmha.split_figure import BATCHES, Launch, split_times
from dsv4lib.viz.style import alt_text
from dsv4lib.viz.widgets import explore

LAUNCHES = [Launch(t, h, e) for t in (1, 7, 32, 70) for h, e in ((64, 130), (64, 1024), (128, 8192))]


def op_choice(one: Launch) -> splits.Splits:
    tile = splits.mean_tile("index", one.blocks, one.tiles, 2)
    return splits.choose(one.tokens, one.tiles, splits.SM_COUNT // one.blocks, one.blocks, tile, True)


@pytest.mark.parametrize("one", LAUNCHES, ids=str)
def test_addends_make_the_formula_and_the_optimum_is_the_op_s_choice(one: Launch) -> None:
    tile = splits.mean_tile("index", one.blocks, one.tiles, 2)
    for s, dims in ((1, 1), (2, 1), (3, 2)):
        whole = splits.cost(s, one.tokens * one.blocks, one.tiles, tile, dims)
        assert sum(one.times(s, dims).values()) == pytest.approx(whole)
        dearer = one._replace(combine=splits.COMBINE + 1).times(s, dims)
        assert sum(dearer.values()) == pytest.approx(whole + (s > 1))
    chosen = op_choice(one)
    s, dims, us = one.best()
    cost = splits.cost(chosen.keys, one.tokens * one.blocks, one.tiles, tile, chosen.dims)
    assert (s, dims) == (chosen.keys, chosen.dims) and us == pytest.approx(cost)


def test_the_optimum_moves_with_tokens_and_with_what_combining_costs() -> None:
    best = [Launch(n, 64, 1024).best()[0] for n in BATCHES]
    assert best == sorted(best, reverse=True) and best[0] > 8 and best[-1] == 1
    assert Launch(1, 64, 1024, 40.0).best()[0] == 1 < Launch(1, 64, 1024, 0.3).best()[0]


def test_the_figure_says_and_marks_its_optimum() -> None:
    fig, line = split_times(4, 64, 1024)
    s, dims, us = Launch(4, 64, 1024).best()
    assert line.startswith(f"{s} splits") and f"{us:.2f} us" in line and (dims == 2) == ("half" in line)
    (marker,) = (a for a in fig.axes[0].lines if a.get_label() == "optimum")
    assert marker.get_xydata().tolist() == [[s, us]]
    assert f"Best: {line}" in alt_text(fig)
    other, _ = split_times(32, 64, 1024)
    (moved,) = (a for a in other.axes[0].lines if a.get_label() == "optimum")
    assert moved.get_xydata()[0, 0] < s


def test_the_static_twin_shows_every_state(capsys, monkeypatch) -> None:
    shown = []
    monkeypatch.setenv("DSV4_HEADLESS", "1")
    monkeypatch.setattr("dsv4lib.viz.widgets.show", shown.append)
    controls = {"tokens": [1, 32], "heads": [64, 128], "entries": [1024]}
    explore(split_times, controls, states=[{"tokens": 32}], tokens=1)
    assert len(shown) == 2 and "tokens 32" in alt_text(shown[1]) and "splits" in capsys.readouterr().out
    with pytest.raises(ArgumentError):
        explore(split_times, controls, states=[{"tokens": 3}])
