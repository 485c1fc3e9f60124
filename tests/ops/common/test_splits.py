"""Choose splits: a function of shapes with the properties that its module promises."""

import itertools

import pytest

from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common import splits
from dsv4lib.ops.fmha.op import choose_splits, workspace_size

TOKENS = [*range(1, 40), 64, 74, 75, 148, 149, 512, 4096]
TILE = splits.Tile(0.86, 0.6, 0.15)
TILES = [0, 1, 2, 3, 10, 18, 34, 130]
CASES = [(u, t, s) for u, t, s in itertools.product(TOKENS, TILES, (1, 74, 132, 148))]


@pytest.mark.parametrize(("units", "tiles", "slots"), CASES[:: max(1, len(CASES) // 400)])
def test_bounds(units, tiles, slots):
    chosen = splits.choose(units, tiles, slots).keys
    assert 1 <= chosen <= max(tiles, 1)
    assert chosen == 1 or chosen * units <= slots  # all splits run at once
    if chosen > 1:
        share = -(-tiles // chosen)
        assert (chosen - 1) * share < tiles  # no part of the longest list is empty
        assert splits.cost(chosen, units, tiles) < splits.cost(1, units, tiles)


@pytest.mark.parametrize("slots", [74, 148])
@pytest.mark.parametrize("tiles", TILES)
def test_more_tokens_never_mean_more_splits(tiles, slots):
    chosen = [splits.choose(units, tiles, slots).keys for units in TOKENS]
    assert chosen == sorted(chosen, reverse=True)
    assert all(n == 1 for n, units in zip(chosen, TOKENS, strict=True) if 2 * units > slots)


@pytest.mark.parametrize("units", [1, 2, 4, 9, 30])
def test_longer_lists_never_get_longer_to_wait_for(units):
    """Splits are not monotone in the tiles (10 tiles: 5 splits of 2; 11: 4 of 3); the time is."""
    times = [splits.cost(splits.choose(units, tiles, 148).keys, units, tiles) for tiles in range(200)]
    assert times == sorted(times)
    chosen = [splits.choose(units, tiles, 148, tile=TILE, halves=True) for tiles in range(200)]
    times = [time(one, units, tiles) for tiles, one in enumerate(chosen)]
    assert times[1:] == sorted(times[1:])  # without keys there is no first product to save a part of
    assert {one.dims for one in chosen} == {1, 2}


def time(one, units, tiles):
    return splits.cost(one.keys, units, tiles, TILE, one.dims)


def test_it_is_the_best_of_all():
    for units, tiles, slots in CASES:
        most = max(1, min(tiles, slots // units))
        keys = [splits.Splits(s, 1) for s in range(1, most + 1)]
        chosen = splits.choose(units, tiles, slots, tile=TILE)
        assert chosen.dims == 1 and time(chosen, units, tiles) == min(time(one, units, tiles) for one in keys)
        both = keys + [splits.Splits(s, 2) for s in range(1, most + 1) if tiles and 2 * units * s <= slots]
        chosen = splits.choose(units, tiles, slots, tile=TILE, halves=True)
        assert chosen in both and time(chosen, units, tiles) == min(time(one, units, tiles) for one in both)


def test_dimensions_are_split_where_sms_idle():
    """Not of groups, nor of shorter heads; with splits of the keys that are given, too."""
    whole, half, three = splits.Splits(1, 1), splits.Splits(1, 2), splits.Splits(3, 1)
    assert choose_splits(1, 64, 0, 128) == half == choose_splits(48, 64, 0, 128)
    assert choose_splits(75, 64, 0, 128) == whole == choose_splits(1, 64, 0, 128, head_dim=256)
    assert choose_splits(1, 64, 0, 128, groups=1) == whole
    assert choose_splits(1, 64, 512, 128, splits=1) == half and choose_splits(30, 64, 512, 128, splits=3) == three
    for tokens in TOKENS:
        for heads in (64, 128):
            chosen = choose_splits(tokens, heads, 512, 128)
            assert chosen == whole or chosen.keys * chosen.dims * tokens * heads // 64 <= splits.SM_COUNT


@pytest.mark.parametrize(("tokens", "heads"), [(128, 64), (32, 64), (32, 128)])
def test_a_last_part_of_another_length(tokens, heads):
    """Where 130 tiles of 584-byte entries would leave few SMs idle: all splits run at once and end together."""
    n, dims, (last, share) = choose_splits(tokens, heads, 8192, 128, fp8=True)
    tail = 130 * share // splits.SHARES
    body, turns = -(-(130 - tail) // (n - 1)), -(-tokens // last)
    assert dims == 1 and 0 < last < tokens and heads // 64 * (tokens * (n - 1) + last) == splits.SM_COUNT
    assert 0 < tail < body < -(-130 // (n - 1))  # shorter than without it
    assert turns * tail <= body < turns * (tail + 1) + turns  # a tile more would be longer, the turns are one more


def test_all_splits_are_equal_elsewhere():
    """Bound by HBM, too short, whole splits on all SMs, or splits that are given."""
    assert {choose_splits(t, 64, 8192, 128).tail for t in (1, 8, 32, 128)} == {(0, 0)}
    assert {choose_splits(t, 64, 512, 128, fp8=True).tail for t in TOKENS} == {(0, 0)}
    assert {choose_splits(t, 64, 8192, 128, fp8=True).tail for t in (1, 37, 74, 148, 4096)} == {(0, 0)}
    assert {choose_splits(t, 64, 8192, 128, fp8=True, splits=2).tail for t in TOKENS} == {(0, 0)}


def test_the_models_shapes():
    """One token is split, a batch that fills the GPU is not, the window alone never is."""
    assert choose_splits(1, 128, 1024, 128).keys > choose_splits(8, 128, 1024, 128).keys > 1
    assert choose_splits(1, 128, 8192, 128).keys > choose_splits(1, 128, 1024, 128).keys
    assert [choose_splits(t, 128, 1024, 128).keys for t in (128, 4096)] == [1, 1]
    assert choose_splits(1, 64, 0, 128).keys == 1
    assert choose_splits(8, 64, 512, 128, sm_count=8).keys == 1


def test_a_tile_of_a_pair_is_shorter():
    """Four tiles in one CTA are worth a join, in a pair they are not; 160 keys of one token never."""
    chosen = [splits.choose(1, 4, 74, 2, splits.TILES["index"][ctas]).keys for ctas in (1, 2)]
    assert chosen[0] > 1 == chosen[1]
    shapes = (1, 64, 32, 128), (32, 64, 256, 128), (8, 128, 256, 128)
    assert [choose_splits(*shape).keys for shape in shapes] == [1, 1, 1]


def test_workspace_holds_the_splits():
    assert workspace_size(4, 128, 512, 1) == 0
    assert workspace_size(4, 128, 512, 9) == 9 * 4 * 128 * 513


@pytest.mark.parametrize("bad", [{"units": 0}, {"tiles": -1}, {"slots": 0}, {"blocks": 0}])
def test_bad_numbers_are_named(bad):
    with pytest.raises(ArgumentError, match=next(iter(bad))):
        splits.choose(**{"units": 1, "tiles": 1, "slots": 1, **bad})


@pytest.mark.parametrize(("tokens", "heads", "most"), [(4, 256, 1143549), (9, 130, 1097225)])
def test_a_last_part_of_another_length_needs_all_heads_in_one_cluster(tokens, heads, most):
    """The kernel counts tokens of a last part, which are its CTAs where a token is one of them."""
    assert choose_splits(tokens, heads, most, 1, 132, fp8=True).tail == (0, 0)
    assert choose_splits(tokens, 128, most, 1, 132, fp8=True).keys >= 1


def test_other_head_dimensions_have_splits_of_their_own():
    """Their dimensions are not split, so their keys are."""
    assert choose_splits(20, 64, 200, 128, head_dim=256).keys > choose_splits(20, 64, 200, 128).keys == 1
