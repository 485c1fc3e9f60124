"""The tile that holds the end of the entries and the beginning of the window: where there is one, and what is in it."""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Int32

from dsv4lib.ops.fmha.config import REGION, TILE_N, count_tiles
from dsv4lib.ops.fmha.inputs import case, decode_case, paged, prefill_case
from dsv4lib.ops.fmha.sm100 import Fmha
from dsv4lib.ops.fmha.work import KeyLists, Row, Work
from dsv4lib.pages.fmha.run_case import bits, run_fmha, run_split
from tests.cases import cases

SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
MMAS = 24  # a tile of one CTA or pair, D 512: 16 of Q K^T, 8 of P V
LENGTHS = range(0, 201, 13)
ENTRIES, KEYS = [100, 3, 61, 60, 0, 70], [28, 60, 3, 4, 9, 56]  # joint: all but the third and the fifth


def settings(entries, cluster=1, groups=False, fp8=(False, False)):
    return (512, "bf16", entries, True, True, True, False, *fp8, cluster, groups)


def test_how_many_tiles():
    """By listing places: the joint form never takes more tiles than apart, and is taken where it takes fewer."""
    for entries in range(260):
        for window in range(132):
            apart = len(range(0, entries, TILE_N)) + len(range(0, window, TILE_N))
            start = next(place for place in range(entries, entries + REGION) if place % REGION == 0)
            joint = len({place // TILE_N for place in (*range(entries), *range(start, start + window))})
            assert count_tiles(entries, window) == min(apart, joint)
    assert all(count_tiles(64 * n, 128) == n + 2 for n in range(40))
    assert [count_tiles(n, 129) - count_tiles(n, 128) for n in (0, 1, 60, 61, 64)] == [1, 0, 0, 1, 1]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("entries", cases("index", full=["range"]))
@pytest.mark.parametrize("window", cases(37, 128, full=[0, 4, 65]))
def test_any_number_of_entries_beside_any_window(entries, window):
    """One launch over lists of 0, 13, .. 195 entries; as many tiles as `count_tiles` says."""
    one = case(5, list(LENGTHS), [window] * len(LENGTHS), seed=window)
    outcome = run_fmha(Fmha, settings(entries), one)
    assert outcome.clean, outcome.findings()
    assert outcome.result.stats["mma"] == MMAS * sum(count_tiles(n, window) for n in LENGTHS)


@pytest.mark.parametrize("positions", [[40, 126, 127, 128], [129, 190, 255, 5000]])
@pytest.mark.parametrize("cluster", cases(2, full=[1]))
def test_rings_at_any_rotation_behind_selected_entries(positions, cluster):
    """Decode: the ring of 128 slots, not full, full, wrapped; slots never written are NaN."""
    counts = [100, 23, 61, 64]
    rings, lists = decode_case(37, positions), case(37, counts, [0] * 4, top_k=103)
    one = replace(lists, span=rings.span, window_first=rings.window_first, window_count=rings.window_count)
    outcome = run_fmha(Fmha, settings("index", cluster), one)
    assert outcome.clean, outcome.findings()
    expected = sum(count_tiles(n, int(w)) for n, w in zip(counts, rings.window_count, strict=True))
    assert outcome.result.stats["mma"] == MMAS * expected


@pytest.mark.one_in(2)
@pytest.mark.parametrize("starts", [[0, 1, 127], [128, 5000, 8190]])
def test_a_pair_of_tokens_takes_a_tile_less(starts):
    """HCA prefill, two tokens of 64 heads in a pair: 129 window keys, after entries under a limit a query."""
    one = prefill_case(64, starts, 6)
    outcome = run_fmha(Fmha, settings("range", 2, True), one)
    assert outcome.clean, outcome.findings()
    union = (one.window_first[1::2] + one.window_count[1::2] - one.window_first[::2]).tolist()
    entries = one.count[1::2].tolist()
    assert max(union) == 129
    tiles = [count_tiles(n, w) for n, w in zip(entries, union, strict=True)]
    assert outcome.result.stats["mma"] == MMAS * sum(tiles)
    assert sum(tiles) < sum(-(-n // TILE_N) - (-w // TILE_N) for n, w in zip(entries, union, strict=True)) or not any(
        entries
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sms", cases(1, full=[2, None]))
@pytest.mark.parametrize("cluster", [1, 2])
def test_tokens_with_and_without_it_in_turn(sms, cluster):
    one = case(37 * cluster, ENTRIES, KEYS)
    few, many = (run_fmha(Fmha, settings("index", cluster), one, sms=n and n * cluster) for n in (sms, None))
    assert few.clean, few.findings()
    assert bits(few.output) == bits(many.output)
    assert few.result.stats["mma"] == MMAS * sum(map(count_tiles, ENTRIES, KEYS))


def test_neighbours_with_disjoint_selections_get_their_own_keys():
    one = case(64, [40, 40], [20, 20])
    half = torch.arange(one.pool.shape[0] - 8)
    one.index[0], one.index[1] = half[:20].repeat(2), half[-20:].repeat(2)
    outcome = run_fmha(Fmha, settings("index"), one)
    assert outcome.clean and outcome.result.stats["mma"] == 2 * MMAS, outcome.findings()


def test_no_entry_is_there():
    """A list of -1 alone beside window keys of the same tile, and a list of -1 alone."""
    one = case(64, [40, 40], [20, 0])
    outcome = run_fmha(Fmha, settings("index"), replace(one, index=torch.full_like(one.index, -1)))
    assert outcome.clean, outcome.findings()
    assert not outcome.output[1].any() and bool((outcome.lse[1] == -float("inf")).all())


@pytest.mark.full
@pytest.mark.parametrize(
    ("which", "one"),
    cases(
        (settings("range", 2, True), prefill_case(64, [300], 4)),
        (settings("index", 1, False, (True, False)), paged(case(37, [100, 61], [28, 3]), 48)),
        full=[
            (settings("index"), case(64, [100, 61], [128, 3])),
            (settings("index", 2, False, (False, True)), paged(case(100, [100, 61], [28, 3]), 48)),
        ],
    ),
)
def test_every_schedule_gives_the_same_bits(which, one):
    outcomes = [run_fmha(Fmha, which, one, schedule=s) for s in SCHEDULES]
    assert all(outcome.clean for outcome in outcomes), [outcome.findings() for outcome in outcomes]
    assert len({bits(outcome.output) for outcome in outcomes}) == 1
    assert len({outcome.result.schedule_hash for outcome in outcomes}) >= 4


@pytest.mark.one_in(3)
@pytest.mark.parametrize("cluster", cases(2, full=[1]))
@pytest.mark.parametrize("switches", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("page", cases(48, full=[1]))
def test_the_bits_of_the_dequantised_rows(switches, cluster, page):
    """Of a tile of which TMA brings one part and dequantising warps the other, or these both from two pools."""
    one = paged(case(40, ENTRIES, KEYS), page, 64)
    outcome, plain = (run_fmha(Fmha, settings("index", cluster, False, fp8), one) for fp8 in (switches, (False,) * 2))
    assert outcome.clean, outcome.findings()
    assert bits(outcome.output) == bits(plain.output) and bits(outcome.lse) == bits(plain.lse)


@pytest.mark.parametrize("splits", cases(3, full=[2, 5]))
@pytest.mark.parametrize("sharing", cases((1,), full=[((2, True),)]))
def test_parts_join_to_the_whole(splits, sharing):
    """It is the last tile of a part, the first, one of its own."""
    one = case(64, ENTRIES, KEYS) if len(sharing) == 1 else prefill_case(64, [127, 5000], 4)
    outcome = run_split(one, "index" if len(sharing) == 1 else "range", True, splits, sharing=sharing)
    assert outcome.clean, outcome.findings()


class OneMoreEntry(Fmha):
    """The limit is off by one: the zeros between the last entry and the window count as a key."""

    @cute.jit
    def valid_entries(self, lists: KeyLists, work: Work, row: Row, position: Int32):
        """See `Plan.valid_entries`."""
        first, end = row.entries
        row = row._replace(entries=(first, end + 1))  # WRONG: end
        return Fmha.valid_entries(self, lists, work._replace(entries=work.entries + 1), row, position)


class LateRegion(Fmha):
    """The window's rows are fetched as if it began 4 places later than the softmax warps think."""

    @cute.jit
    def tile_rows(self, lists: KeyLists, work: Work, place: Int32):
        """See `Load.tile_rows`."""
        later = work._replace(window_at=work.window_at + 4)  # WRONG: work
        return Fmha.tile_rows(self, lists, later, place)


class AnyPlace(Fmha):
    """The window begins directly after the last entry: four rows of a gather may then be of both pools."""

    @cute.jit
    def places(self, entries: Int32, window: Int32):
        """See `Plan.places`."""
        _, tiles = Fmha.places(self, entries, window)
        return entries, tiles  # WRONG: a multiple of 4


class WindowOfNextTile(Fmha):
    """Window keys of the joint tile are masked: right where the window begins with a tile."""

    @cute.jit
    def valid_keys(self, lists: KeyLists, work: Work, row: Row, tile: Int32):
        """See `Plan.valid_keys`."""
        valid = Int32(0)
        if tile * TILE_N < work.window_at:
            valid = self.valid_entries(lists, work, row, tile * TILE_N + row.half * (TILE_N // 2))
        else:
            valid = Fmha.valid_keys(self, lists, work, row, tile)
        return valid  # WRONG: both in the tile where the window begins


class TooManyBytes(Fmha):
    """A stage waits for the bytes of a whole tile from TMA, of which dequantising warps bring a part."""

    @cute.jit
    def expected_bytes(self, of_entries: Int32):
        """See `Load.expected_bytes`."""
        return Int32(self.key_bytes * self.cluster) * cutlass.select_(of_entries > 0, 0, 1)  # WRONG: by rows


FAULTS = {
    OneMoreEntry: "wrong numbers",
    LateRegion: "wrong numbers",
    AnyPlace: "wrong numbers",
    WindowOfNextTile: "wrong numbers",
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("entries", cases("index", full=["range"]))
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault, entries):
    one = case(64, [41, 9], [20, 30])
    found = run_fmha(fault, settings(entries), one).findings()
    assert FAULTS[fault] in {f[0] for f in found}, found


@pytest.mark.full
def test_bytes_of_a_mixed_tile_are_counted():
    """Window keys from TMA, entries from pages: a stage that counts no byte is full before the window is there."""
    one = paged(case(64, [41, 9], [20, 30]), 48)
    found = run_fmha(TooManyBytes, settings("index", 1, False, (True, False)), one).findings()
    assert found and not run_fmha(Fmha, settings("index", 1, False, (True, False)), one).findings()
