"""Figures of the architecture draw what they are given and say it in words."""

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex

from dsv4lib.errors import ArgumentError
from dsv4lib.viz import model, style

KINDS = {"A": ("SWA", "SWA", "CSA", "HCA", "CSA"), "B": ("HCA",) + ("CSA", "HCA") * 8}


def image(fig, axes=0):
    return np.asarray(fig.axes[axes].images[0].get_array())


def window_maps() -> dict[str, np.ndarray]:
    csa = np.zeros((3, 14), dtype=int)
    for entry in range(3):
        csa[entry, 4 * entry : 4 * entry + 4] = model.OWN
        csa[entry, max(0, 4 * entry - 4) : 4 * entry] = model.PREVIOUS
    return {"CSA": csa, "HCA": np.repeat([[model.OWN, 0]], 7, axis=1).reshape(1, 14)}


def visibility_maps() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"SWA": rng.integers(0, 2, (9, 9)), "CSA": rng.integers(0, 4, (9, 11))}


FIGURES = {
    "schedule_map": lambda: model.schedule_map(KINDS, hash_layers=3),
    "mixing_matrices": lambda: model.mixing_matrices(torch.full((7, 4, 4), 0.25), list("abcdefg"), "title"),
    "compressor_windows": lambda: model.compressor_windows(window_maps()),
    "visibility": lambda: model.visibility(visibility_maps(), tokens=9),
    "curves": lambda: model.curves([1, 2, 4], {"p": {"a": [1, 2, 3], "b": [3, 2, 1]}}, "x", "y", "x", {"here": 2}),
    "kv_bytes": lambda: model.kv_bytes({"M": {"csa": 30.0, "hca": 10.0}}, [1024, 2048], {"M": 1e6}),
    "parity": lambda: model.parity([("logits", 1e-5, 5e-5), ("picks", 0.0, 0.0), ("streams", 1e-3, 1e-4)]),
}


@pytest.mark.parametrize("name", FIGURES)
def test_png_is_reproducible_and_has_alt_text(name):
    first, second = FIGURES[name](), FIGURES[name]()
    assert style.to_png(first) == style.to_png(second)
    assert len(style.alt_text(first)) > 40


def test_schedule_has_one_cell_per_layer_in_the_colour_of_its_kind():
    fig = model.schedule_map(KINDS, hash_layers=3)
    cells = fig.axes[0].patches
    for row, kinds in enumerate(KINDS.values()):
        mine = sorted((p for p in cells if round(p.get_y() + 0.36) == row), key=lambda p: p.get_x())
        colours = [to_hex(p.get_facecolor()).upper() for p in mine]
        assert colours == [model.KIND_COLOURS[kind].upper() for kind in (*kinds, "SWA")]
    alt = style.alt_text(fig)
    assert "A: 5 layers, 2 SWA, 2 CSA, 1 HCA" in alt and "B: 17 layers, 8 CSA, 9 HCA" in alt


def test_mixing_matrices_draw_each_matrix_and_name_the_error_of_its_sums():
    rng = np.random.default_rng(0)
    values = rng.uniform(size=(7, 4, 4))
    fig = model.mixing_matrices(values, [f"layer {i}" for i in range(7)])
    for index in range(7):
        np.testing.assert_array_equal(image(fig, index), values[index])
        assert fig.axes[index].get_title(loc="left") == f"layer {index}"
        assert len(fig.axes[index].texts) == 16
    off = max(np.abs(values.sum(axis=axis) - 1).max() for axis in (1, 2))
    assert f"within {off:.1e} of 1" in style.alt_text(fig)


def test_compressor_windows_draw_the_given_codes():
    maps = window_maps()
    fig = model.compressor_windows(maps)
    for index, values in enumerate(maps.values()):
        np.testing.assert_array_equal(image(fig, index), values)
    assert "CSA: 3 entries, each of 4 to 8 tokens" in style.alt_text(fig)
    assert [t.get_text() for t in fig.legends[0].get_texts()] == [label for label, _ in model.POOLING.values()]


def test_visibility_draws_the_given_codes_and_counts_the_last_query():
    maps = visibility_maps()
    fig = model.visibility(maps, tokens=9)
    for index, values in enumerate(maps.values()):
        np.testing.assert_array_equal(image(fig, index), values)
    last = maps["CSA"][-1]
    want = f"CSA: the last query sees {(last == 1).sum()} tokens and attends {(last == 3).sum()} of {(last >= 2).sum()}"
    assert want in style.alt_text(fig)


@pytest.mark.parametrize(
    "looks,draw",
    [
        (model.VISIBILITY, lambda: model.visibility({"CSA": [[0, 1, 2, 3]]}, tokens=2)),
        (model.POOLING, lambda: model.compressor_windows({"CSA": [[0, 1, 2]]})),
    ],
)
def test_codes_have_the_colours_of_their_legend(looks, draw):
    fig = draw()
    raster = fig.axes[0].images[0]
    legend = fig.legends[0].get_patches(), fig.legends[0].get_texts()
    for code, (label, colour) in looks.items():
        assert to_hex(raster.cmap(raster.norm(code))) == colour.lower()
        (patch,) = [p for p, t in zip(*legend, strict=True) if t.get_text() == label]
        assert to_hex(patch.get_facecolor()) == colour.lower()
    assert to_hex(raster.cmap(raster.norm(0))) == model.EMPTY


def test_curves_draw_every_line():
    fig = model.curves([1, 2, 4], {"p": {"a": [1, 2, 3]}, "q": {"b": torch.tensor([5.0, 6.0, 7.0])}}, "x", "y")
    np.testing.assert_array_equal(fig.axes[1].lines[0].get_xydata(), [[1, 5], [2, 6], [4, 7]])
    assert "b goes from 5 to 7" in style.alt_text(fig)


def test_kv_bytes_add_up():
    fig = model.kv_bytes({"M": {"csa": 30.0, "hca": 10.0}}, [1024, 2**30], {"M": 2.0**31})
    assert sum(bar.get_width() for bar in fig.axes[0].patches) == 40
    np.testing.assert_allclose(fig.axes[1].lines[0].get_ydata(), [2 + 40 * 2**-20, 42])
    assert "M: 40 bytes per token, 42.00 GiB at 1,073,741,824 tokens" in style.alt_text(fig)


@pytest.mark.parametrize("value,count", [(1e-3, 1), (float("nan"), 1), (1e-5, 2)])
def test_parity_tells_what_is_beyond_its_bound(value, count):
    fig = model.parity([("logits", 1e-6, 5e-5), ("streams", value, 1e-4)])
    assert style.alt_text(fig).startswith(f"{count} of 2 compared tensors")
    assert "streams" in style.alt_text(fig).split("beyond it: ")[1]
    assert ("difference, too large" in [t.get_text() for t in fig.legends[0].get_texts()]) == (count == 1)


@pytest.mark.parametrize(
    "call,named",
    [
        (lambda: model.schedule_map({}), "schedules"),
        (lambda: model.schedule_map({"A": ("MHA",)}), "schedules"),
        (lambda: model.mixing_matrices(np.zeros((2, 3, 4)), ["a", "b"]), "matrices"),
        (lambda: model.mixing_matrices(np.zeros((2, 3, 3)), ["a"]), "labels"),
        (lambda: model.compressor_windows({"CSA": np.full((2, 3), 3)}), "maps"),
        (lambda: model.visibility({"CSA": np.full((2, 3), 4)}, tokens=2), "maps"),
        (lambda: model.visibility({"CSA": np.zeros((2, 3), dtype=int)}, tokens=4), "maps['CSA']"),
        (lambda: model.curves([1, 2], {"p": {"a": [1]}}, "x", "y"), "panels['p']['a']"),
        (lambda: model.curves([1], {"p": {"a": [1]}}, "x", "y", log="z"), "log"),
        (lambda: model.curves([1], {}, "x", "y"), "panels"),
        (lambda: model.kv_bytes({"M": {"csa": 1.0}}, [1], {"N": 0.0}), "fixed"),
        (lambda: model.parity([]), "rows"),
    ],
)
def test_bad_input_names_the_argument(call, named):
    with pytest.raises(ArgumentError) as caught:
        call()
    assert caught.value.name == named
