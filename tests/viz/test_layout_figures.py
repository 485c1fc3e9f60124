"""Layout figures: what they show is what they were given, large ones are rasters, every one has alt text."""

import numpy as np
import pytest

from dsv4lib.errors import ArgumentError
from dsv4lib.viz import layout, panels, smem, style, tma, tmem, tv

ROW_MAJOR = np.arange(128 * 64).reshape(128, 64)
CHUNK_XOR = (np.arange(128)[:, None] * 64 + ((np.arange(64) // 8) ^ (np.arange(128)[:, None] % 8)) * 8) + np.arange(
    64
) % 8


T, V = np.indices((128, 64))
LANES = (np.arange(64) // 16 * 32 + np.arange(64) % 16)[:, None]
M64 = LANES << 16 | np.arange(96)
FIGURES = {
    "small grid": lambda: layout.grid(np.arange(12).reshape(3, 4), "(3,4):(4,1)"),
    "large grid": lambda: layout.grid(CHUNK_XOR, "swizzled"),
    "difference": lambda: layout.difference(ROW_MAJOR, CHUNK_XOR, "swizzled"),
    "swizzle map": lambda: smem.swizzle_map(CHUNK_XOR, 2, "after", ROW_MAJOR, "before"),
    "columns": lambda: smem.swizzle_map(CHUNK_XOR.T, 2, "MN-major"),
    "conflicts": lambda: smem.bank_conflicts({"a": np.arange(8) * 128, "b": np.arange(8) * 144}, "8 lanes"),
    "tmem map": lambda: tmem.tmem_map([tmem.Region("S", 0, 128, 0, 128), tmem.Region("P", 0, 128, 96, 64)], "plan"),
    "accumulator": lambda: tmem.accumulator(M64, "M 64"),
    "thread values": lambda: tv.thread_value_map(T, V, (128, 64), "32x32b"),
    "round trip": lambda: tv.round_trip(T, V, T[::-1], V, (128, 64), "upside down"),
    "boxes": lambda: tma.boxes((300, 200), (128, 64), np.array([[0, 0], [128, 0], [256, 192]]), "three boxes"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_alt_text_size_and_bytes(name):
    fig = FIGURES[name]()
    alt = style.alt_text(fig)
    assert len(alt) > 40 and any(c.isdigit() for c in alt)
    png = style.to_png(fig)
    assert png == style.to_png(FIGURES[name]()), "equal figures, equal bytes"
    assert len(png) < 250_000
    objects = sum(len(ax.patches) + len(ax.texts) for ax in fig.axes)
    assert objects <= 2 * 32 + 8, "large layouts are rasters, not patches"


def raster(fig, axis=0):
    return np.asarray(fig.axes[axis].images[0].get_array())


def test_grid_shows_the_offsets_it_was_given():
    assert np.array_equal(raster(layout.grid(CHUNK_XOR, "t")), CHUNK_XOR)
    corner = layout.grid(CHUNK_XOR, "t", corner=(40, 100))
    assert np.array_equal(raster(corner, 1), CHUNK_XOR[40:56, 48:64])
    assert "begins 0, 1, 2, 3" in style.alt_text(layout.grid(CHUNK_XOR, "t"))


def test_difference_counts():
    fig = layout.difference(ROW_MAJOR, CHUNK_XOR, "t")
    assert raster(fig).sum() == 7168 and "7168 of 8192" in style.alt_text(fig)
    assert "0 of 8192" in style.alt_text(layout.difference(ROW_MAJOR, ROW_MAJOR, "t"))
    assert "16384 of 16384" in style.alt_text(layout.difference(ROW_MAJOR, ROW_MAJOR.T, "t"))


def test_chunk_groups_of_both_majors():
    groups, by_rows = smem.chunk_groups(CHUNK_XOR, 2)
    r, c = np.indices((128, 8))
    assert by_rows and np.array_equal(groups, c ^ r % 8)
    groups, by_rows = smem.chunk_groups(CHUNK_XOR.T, 2)
    assert not by_rows and np.array_equal(groups, c ^ r % 8)
    groups, _ = smem.chunk_groups(np.arange(4 * 256).reshape(4, 256), 0.5)
    assert np.array_equal(groups, np.tile(np.arange(8), (4, 1)))


def test_bank_words_against_counting():
    rng = np.random.default_rng(0)
    for size in (4, 8, 16):
        addresses = rng.integers(0, 256, 8) * 16
        words = {w for a in addresses.tolist() for w in range(a // 4, (a + size) // 4)}
        expected = [sum(w % 32 == bank for w in words) for bank in range(32)]
        assert smem.bank_words(addresses, size).tolist() == expected
    assert smem.bank_words(np.zeros(8, dtype=int)).max() == 1, "equal words are one broadcast"
    assert smem.bank_words(np.arange(8) * 128).max() == 8
    assert "a: 8-way over 4 banks" in style.alt_text(FIGURES["conflicts"]())


def test_tmem_map_marks_what_is_claimed_twice():
    fig = FIGURES["tmem map"]()
    assert f"{128 * 32} cells are claimed twice" in style.alt_text(fig)
    assert "160 of 512 columns used" in fig.axes[0].get_title(loc="left")
    clean = tmem.tmem_map([tmem.Region("S", 0, 128, 0, 128), tmem.Region("P", 64, 64, 128, 64)], "plan")
    assert "0 cells are claimed twice" in style.alt_text(clean)
    shown = raster(clean)
    assert shown[70, 130] == 2 and shown[10, 130] == 0 and shown[127, 127] == 1


def test_cells_invert_addresses():
    row, column = tmem.cells(M64)
    assert row[32 + 5, 7] == 21 and column[32 + 5, 7] == 7
    assert row[16, 0] == -1 and (row >= 0).sum() == 64 * 96


def test_owners_and_displaced():
    thread, value = tv.owners(T, V, (128, 64))
    assert np.array_equal(thread, T) and np.array_equal(value, V)
    assert tv.displaced(T, V, T, V, (128, 64)) == 0
    assert tv.displaced(T, V, T[::-1], V, (128, 64)) == 128 * 64
    moved = T.copy()
    moved[[3, 4], 5] = moved[[4, 3], 5]
    assert tv.displaced(T, V, moved, V, (128, 64)) == 2
    source_row = raster(FIGURES["round trip"]())
    assert np.array_equal(source_row, T[::-1])


def test_coverage_against_counting():
    starts = np.array([[0, 0], [3, 4], [3, 4], [6, 8], [100, 100]])
    counts = tma.coverage((8, 10), (4, 5), starts)
    brute = np.zeros((8, 10), dtype=int)
    for r, c in starts:
        for i in range(r, r + 4):
            for j in range(c, c + 5):
                if i < 8 and j < 10:
                    brute[i, j] += 1
    assert np.array_equal(counts, brute)
    assert tma.filled((8, 10), (4, 5), starts) == 5 * 20 - brute.sum()
    never, again = (brute == 0).sum(), (brute > 1).sum()
    alt = style.alt_text(tma.boxes((8, 10), (4, 5), starts, "t"))
    assert f"{never} never loaded, {again} loaded more than once" in alt


@pytest.mark.parametrize("colour", [*style.PALETTE, *tma._LIGHT, "#000000", "#ffffff", "#777777"])
def test_text_is_readable_on_every_colour(colour):
    def luminance(c):
        rgb = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in panels.to_rgb(c)]
        return np.dot(rgb, (0.2126, 0.7152, 0.0722))

    low, high = sorted((luminance(colour), luminance(panels.ink_on(colour))))
    assert (high + 0.05) / (low + 0.05) >= 4.0


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: layout.grid(np.arange(4), "t"), "offsets"),
        (lambda: layout.grid(np.zeros((0, 3), dtype=int), "t"), "offsets"),
        (lambda: layout.grid(np.ones((2, 2)), "t"), "offsets"),
        (lambda: smem.chunk_groups(ROW_MAJOR, 3), "element_bytes"),
        (lambda: smem.chunk_groups(ROW_MAJOR * 2, 2), "offsets"),
        (lambda: smem.bank_words(np.zeros((2, 2), dtype=int)), "addresses"),
        (lambda: smem.bank_conflicts({}, "t"), "accesses"),
        (lambda: tmem.tmem_map([tmem.Region("S", 0, 129, 0, 1)], "t"), "regions"),
        (lambda: tmem.tmem_map([tmem.Region("S", 0, 1, 512, 1)], "t"), "regions"),
        (lambda: tmem.cells(np.array([[0, 0]])), "addresses"),
        (lambda: tmem.cells(np.array([[128 << 16]])), "addresses"),
        (lambda: tv.owners(np.zeros((2, 2), int), np.zeros((2, 3), int), (4, 4)), "columns"),
        (lambda: tv.owners(np.full((2, 2), 4), np.zeros((2, 2), int), (4, 4)), "tile"),
        (lambda: tv.thread_value_map(np.zeros((2, 1), int), np.zeros((2, 1), int), (4, 4), "t", 2), "thread"),
        (lambda: tma.coverage((4, 4), (2, 2), np.zeros((3, 3), int)), "coords"),
    ],
)
def test_bad_arguments_are_named(call, name):
    with pytest.raises(ArgumentError) as error:
        call()
    assert error.value.name == name
