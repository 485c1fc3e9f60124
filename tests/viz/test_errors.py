"""Error maps show the errors they were given: content first, then the picture."""

import numpy as np
import pytest
import torch

from dsv4lib import check
from dsv4lib.errors import ArgumentError
from dsv4lib.viz import errors, style
from dsv4lib.viz.arrays import compact


def injected(shape=(300, 200)) -> tuple[np.ndarray, np.ndarray]:
    """(expected with rows of different scale, a copy with small errors everywhere)."""
    rng = np.random.default_rng(0)
    expected = rng.standard_normal(shape) * np.exp2(rng.uniform(-6, 6, shape[:-1]))[..., None]
    return expected, expected * (1 + 1e-3 * rng.standard_normal(shape))


def in_row_units(actual, expected):
    return (actual - expected) / np.sqrt((expected**2).mean(axis=-1, keepdims=True))


def image(fig, axes=0):
    return np.asarray(fig.axes[axes].images[0].get_array())


def test_element_map_draws_every_error_in_units_of_its_row():
    expected, actual = injected()
    actual[0, 0] = expected[0, 0]
    fig = errors.error_map(actual, expected)
    drawn, norm = image(fig), fig.axes[0].images[0].norm
    want = np.abs(in_row_units(actual, expected))
    inside = want > norm.vmin
    np.testing.assert_allclose(drawn[inside], want[inside], rtol=1e-12)
    assert drawn[0, 0] < norm.vmin, "an exact element must look different from a small error"
    assert inside.mean() > 0.99 and norm.vmax == want.max()


def test_worst_element_is_named_in_title_and_alt_text():
    expected, actual = injected((2, 3, 90, 70))
    actual[1, 2, 60, 33] += 5 * np.sqrt((expected[1, 2, 60] ** 2).mean())
    fig = errors.error_map(actual, expected)
    assert "[1, 2, 60, 33]" in fig._suptitle.get_text()
    assert "row 60, column 33 of matrix [1, 2]" in style.alt_text(fig)
    np.testing.assert_allclose(image(fig)[60, 33], abs(in_row_units(actual, expected)[1, 2, 60, 33]))


def test_a_single_wrong_element_survives_the_folding_of_a_large_array():
    expected, _ = injected((3000, 2000))
    actual = expected.copy()
    actual[2718, 1414] *= -3
    drawn = image(errors.error_map(actual, expected, zoom=None))
    assert max(drawn.shape) <= errors.MAX_PIXELS
    peak = np.unravel_index(drawn.argmax(), drawn.shape)
    assert abs(peak[0] - 2718 * 512 // 3000) <= 1 and abs(peak[1] - 1414 * 512 // 2000) <= 1
    np.testing.assert_allclose(drawn.max(), abs(in_row_units(actual, expected)).max())
    assert (drawn > drawn.max() / 2).sum() == 1


def test_tile_map_holds_the_relative_error_of_each_tile_and_names_the_worst():
    expected, _ = injected((100, 96))
    actual = expected.copy()
    actual[64:100, 32:64] *= 0.75
    grid = errors.error_grid(actual, expected, by="tile", tile=(64, 32))
    np.testing.assert_allclose(grid.values, [[0, 0, 0], [0, 0.25, 0]], atol=1e-12)
    assert grid.worst_cell == (1, 1)
    fig = errors.error_map(actual, expected, by="tile", tile=(64, 32))
    assert "tile (1, 1) of 64 x 32" in style.alt_text(fig)
    assert sorted(t.get_text() for t in fig.axes[0].texts) == [".25"] + ["0"] * 5


def test_lane_map_shows_one_broken_lane_of_every_tile():
    expected, actual = injected((2, 300, 200))
    actual[:, 41::128] = 0
    grid = errors.error_grid(actual, expected, by="lane")
    assert grid.values.shape == (128, 128)
    assert grid.worst_cell[0] == 41
    assert (grid.values.mean(axis=1) > 0.5).nonzero()[0].tolist() == [41]


def test_kv_iteration_map_shows_where_it_starts():
    expected, _ = injected((9, 20, 64))
    actual = expected.copy()
    actual[5:, 3] += 1.0
    grid = errors.error_grid(actual, expected, by="kv_iteration")
    assert grid.values.shape == (20, 9)
    assert (grid.values > 0).nonzero()[1].tolist() == [5, 6, 7, 8] and set((grid.values > 0).nonzero()[0]) == {3}
    assert "iteration" in style.alt_text(errors.error_map(actual, expected, by="kv_iteration"))


@pytest.mark.parametrize("zoom,origin", [("worst", (282, 0)), ("corner", (0, 0)), ((17, 5), (17, 5))])
def test_zoom_shows_signed_numbers_of_the_chosen_corner(zoom, origin):
    expected, actual = injected()
    actual[290, 3] -= 9 * np.sqrt((expected[290] ** 2).mean())
    fig = errors.error_map(actual, expected, zoom=zoom)
    panel = next(i for i, ax in enumerate(fig.axes) if "signed" in ax.get_title(loc="left"))
    top, left = origin
    want = in_row_units(actual, expected)[top : top + 16, left : left + 16]
    np.testing.assert_allclose(image(fig, panel), want, rtol=1e-12)
    assert len(fig.axes[panel].texts) == 256
    if zoom == "worst":
        assert "-9.0" in {t.get_text() for t in fig.axes[panel].texts}


@pytest.mark.parametrize("by", errors.WAYS)
def test_nan_difference_is_the_worst_and_has_its_own_colour(by):
    expected, actual = injected((4, 40, 50))
    actual[2, 30, 20] = np.nan
    grid = errors.error_grid(actual, expected, by=by, tile=(16, 16))
    assert grid.worst == (2, 30, 20) and np.isnan(grid.worst_error)
    assert np.isnan(grid.values[grid.worst_cell]) and np.isnan(grid.values).sum() == 1
    fig = errors.error_map(actual, expected, by=by, tile=(16, 16))
    assert "NaN/Inf differs" in style.alt_text(fig)
    assert np.ma.is_masked(fig.axes[0].images[0].get_array())


def test_equal_nonfinite_values_and_equal_arrays_are_no_error():
    expected, _ = injected()
    expected[3, 4], expected[5, 6] = np.nan, -np.inf
    grid = errors.error_grid(expected.copy(), expected)
    assert not grid.values.any() and grid.worst_error == 0
    assert style.to_png(errors.error_map(expected.copy(), expected))


def test_record_goes_into_the_title():
    expected, actual = injected()
    record = check.compare(actual, expected)
    title = errors.error_map(actual, expected, record=record, name="q")._suptitle.get_text()
    assert title.startswith("q: worst element") and "FAILED: elements" in title
    assert (
        "passed" in errors.error_map(expected, expected, record=check.compare(expected, expected))._suptitle.get_text()
    )


@pytest.mark.parametrize("by", errors.WAYS)
def test_png_is_reproducible_and_takes_torch(by):
    expected, actual = injected((30, 40))
    pictures = {
        style.to_png(errors.error_map(torch.from_numpy(actual).float(), torch.from_numpy(expected), by=by, tile=(8, 8)))
        for _ in range(2)
    }
    assert len(pictures) == 1


@pytest.mark.parametrize(
    "options,named",
    [
        ({"by": "warp"}, "by"),
        ({"tile": (0, 4)}, "tile"),
        ({"zoom": (300, 0)}, "zoom"),
        ({"zoom": "left"}, "zoom"),
        ({"actual": np.zeros((3, 4))}, "actual.shape"),
        ({"actual": "text"}, "actual"),
    ],
)
def test_bad_input_names_the_argument(options, named):
    expected, actual = injected()
    with pytest.raises(ArgumentError) as caught:
        errors.error_map(**{"actual": actual, "expected": expected, **options})
    assert caught.value.name == named


def test_axes_are_named_as_asked():
    expected, actual = injected((30, 40))
    fig = errors.error_map(actual, expected, axes=("position", "token id"))
    named = [(ax.get_ylabel(), ax.get_xlabel()) for ax in fig.axes if ax.get_title(loc="left")]
    assert named == [("position", "token id")] * 2


@pytest.mark.parametrize("value", [0.0, 0.25, -0.999, 0.0951, -1.64, 9.96, 12.0, -3e-4, 1e-12, float("inf"), 4e17])
def test_numbers_of_cells_are_short_and_close(value):
    text = compact(value)
    assert len(text) <= 6
    assert float(text) == pytest.approx(value, rel=0.5) and (text.startswith("-") == (value < 0))
