"""Timelines and memories over time: they show what they were given, and refuse what does not fit."""

import numpy as np
import pytest

from dsv4lib.errors import ArgumentError
from dsv4lib.viz import history, model, style, tile, timeline, tma
from dsv4lib.viz.tile import Part
from dsv4lib.viz.timeline import Phases, Track
from dsv4lib.viz.tmem import Region

CELLS = np.full((2, 128, 512), -1)
CELLS[1, 32:64, :128] = 1
CHUNKS = np.full((256, 5), -1)
CHUNKS[64:128, 2:] = 0
COLUMNS = np.full((512, 5), -1)
COLUMNS[256:384, 1:] = 1
PRODUCT = Part("Q", 64, 512, "TMEM"), Part("K^T", 512, 32, "SMEM"), Part("S", 64, 32, "TMEM")
RING = np.array([[0, -1, -1], [0, 1, -1], [0, 1, 2], [3, 1, 2]])
FIGURES = {
    "tmem columns": lambda: history.tmem_against_time(COLUMNS, np.arange(5), ["a", "b"], "lane 0", [("O", 256, 384)]),
    "gathers": lambda: tma.gathers(np.array([7, -1, 3, 0, 1, 2]), [("pool", 4), ("window", 2)], 4, "CTA 0"),
    "tile": lambda: tile.tile_picture(
        [PRODUCT], [("kv 0", 65536), ("P", 8192)], 232448, [Region("S", 0, 128, 0, 64)], "K"
    ),
    "ring": lambda: model.ring(RING, "three slots"),
    "timeline": lambda: timeline.timeline(
        [Track("warp 0", [0, 5], [5, 9], ["run", "wait"]), Track("TMA", [2], [4], ["copy"])], "two actors", now=3
    ),
    "phases": lambda: timeline.barrier_phases(
        [Phases("full", [10, 30], [[2, 10]]), Phases("empty", [])], 40, "a pipeline", now=12
    ),
    "tmem": lambda: history.tmem_over_time(CELLS, ["a", "b"], ["before", "after"], "CTA 0", np.ones(CELLS.shape)),
    "smem": lambda: history.smem_over_time(CHUNKS, np.arange(5), ["tma"], "CTA 0", [("A", 1024, 2048)], now=2),
    "moment": lambda: history.moment(
        (CELLS[1], ["a", "b"]), (CHUNKS[:, 4], ["tma"]), [history.Barrier("full", 1, 1, 1, 512)], "event 7"
    ),
    "iterations": lambda: tma.iterations((128, 256), (128, 64), np.array([[0, 0], [0, 64], [0, 64]]), "A"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_alt_text_size_and_bytes(name):
    figure = FIGURES[name]()
    alt = style.alt_text(figure)
    assert len(alt) > 40 and any(c.isdigit() for c in alt)
    png = style.to_png(figure)
    assert png == style.to_png(FIGURES[name]()), "equal figures, equal bytes"
    assert len(png) < 250_000


def test_timeline_bars_are_the_stretches():
    figure = FIGURES["timeline"]()
    assert "warp 0: run 5, wait 4." in style.alt_text(figure) and "TMA: copy 2." in style.alt_text(figure)
    bars = [c.get_paths()[0].vertices for c in figure.axes[0].collections]
    assert sorted((b[:, 0].min(), b[:, 0].max()) for b in bars) == [(0, 5), (2, 4), (5, 9)]
    with pytest.raises(ArgumentError, match="as many kinds as stretches"):
        timeline.timeline([Track("x", [3], [2], ["run"])], "backwards")
    with pytest.raises(ArgumentError, match="at least one track"):
        timeline.timeline([], "nothing")


def test_phases_alternate_and_are_counted():
    alt = style.alt_text(FIGURES["phases"]())
    assert "full: 2 phases, waited on for 8." in alt and "empty: 0 phases" in alt
    with pytest.raises(ArgumentError, match="ascending"):
        timeline.barrier_phases([Phases("full", [30, 10])], 40, "t")
    with pytest.raises(ArgumentError, match="ascending"):
        timeline.barrier_phases([Phases("full", [50])], 40, "t")


def test_codes_become_colours_and_fade():
    codes = np.array([-1, 0, 1])
    colours = history.colour_codes(codes, ["a", "b"])
    assert len(np.unique(colours, axis=0)) == 3
    faded = history.colour_codes(codes, ["a", "b"], np.zeros(3))
    assert np.array_equal(faded[0], colours[0]), "empty does not fade"
    assert (faded[1:] >= colours[1:]).all() and (faded[1:].sum(1) > colours[1:].sum(1)).all()
    with pytest.raises(ArgumentError, match="codes"):
        history.colour_codes(np.array([2]), ["a", "b"])


def test_amounts_in_the_alt_text():
    assert "after: b 4096" in style.alt_text(FIGURES["tmem"]()) and "before: none" in style.alt_text(FIGURES["tmem"]())
    assert "at the end: tma 64." in style.alt_text(FIGURES["smem"]())
    assert "b 4096" in style.alt_text(FIGURES["moment"]()) and "missing 1 and 512 bytes" in style.alt_text(
        FIGURES["moment"]()
    )
    with pytest.raises(ArgumentError, match="128, 512"):
        history.tmem_over_time(CELLS, ["a", "b"], ["one moment"], "t")
    with pytest.raises(ArgumentError, match="two times"):
        history.smem_over_time(CHUNKS[:, :1], [0], ["tma"], "t")


def test_iterations_count_what_is_loaded_again_and_never():
    figure = FIGURES["iterations"]()
    assert "3 boxes loaded, 1 of them again; 2 of 4 boxes never loaded" in style.alt_text(figure)
    picture = np.asarray(figure.axes[0].images[0].get_array())
    assert picture.tolist() == [[1, 0, 0], [0, 1, 2], [3, 3, 3], [3, 3, 3]]
    with pytest.raises(ArgumentError, match="multiples of"):
        tma.iterations((128, 256), (128, 64), np.array([[0, 32]]), "t")


def test_columns_of_tensor_memory_against_time():
    figure = FIGURES["tmem columns"]()
    assert "at the end: b 128." in style.alt_text(figure)
    pixels = np.asarray(figure.axes[0].images[0].get_array())
    assert pixels.shape[:2] == (512, 5) and len(np.unique(pixels.reshape(-1, 3), axis=0)) == 2
    assert (pixels[300, 0] == pixels[0, 0]).all() and (pixels[300, 1] != pixels[0, 1]).any()
    with pytest.raises(ArgumentError, match="integers \\[512, times\\]"):
        history.tmem_against_time(COLUMNS[:100], np.arange(5), ["a", "b"], "t")


def test_gathered_rows_by_place():
    figure = FIGURES["gathers"]()
    assert "2 tiles of 4; 3 rows of pool, 2 rows of window; 1 places empty" in style.alt_text(figure)
    pool, window, absent = (np.asarray(c.get_offsets()).tolist() for c in figure.axes[0].collections)
    assert (pool, window) == ([[0, 7], [2, 3], [3, 0]], [[4, 1], [5, 2]]) and [x for x, _ in absent] == [1]
    with pytest.raises(ArgumentError, match="one for each key"):
        tma.gathers(np.array([1, 2]), [("pool", 3)], 4, "t")


def test_tile_pictures_refuse_what_does_not_multiply():
    assert "Q [64, 512] x K^T = S" in style.alt_text(FIGURES["tile"]())
    a, b, d = PRODUCT
    for wrong in ((a, a, d), (a, b, a), (a, b, Part("S", 64, 32, "disk"))):
        with pytest.raises(ArgumentError, match="products"):
            tile.tile_picture([wrong], [], 1, [], "t")
    with pytest.raises(ArgumentError, match="one or more"):
        tile.tile_picture([], [], 1, [], "t")


def test_a_ring_names_its_newest_keys():
    figure = FIGURES["ring"]()
    assert "3 slots over 4 steps; all are written from step 2 on" in style.alt_text(figure)
    (newest,) = figure.axes[0].collections
    assert np.asarray(newest.get_offsets()).tolist() == [[0, 0], [1, 1], [2, 2], [0, 3]]
    with pytest.raises(ArgumentError, match="held"):
        model.ring(np.full((2, 2), -1))
