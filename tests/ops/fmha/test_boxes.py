"""Tiles of 64 consecutive rows come in boxes of 64 rows, all others row by row: how many copies, and the same bits."""

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Int32

from dsv4lib.ops.fmha.config import REGION, TILE_N, count_tiles
from dsv4lib.ops.fmha.inputs import case, decode_case, paged, prefill_case
from dsv4lib.ops.fmha.load import KeySources
from dsv4lib.ops.fmha.sm100 import Fmha
from dsv4lib.ops.fmha.work import Work
from dsv4lib.pages.fmha.run_case import bits, run_fmha
from tests.cases import cases

BOX, GATHERED, Q = 8, 128, 8  # copies of a tile in boxes, of one row by row, and of Q: 512 dims in 64s
ENDS = [0, 1, 63, 64, 65, 128, 200]


def settings(entries, cluster=1, groups=False, fp8=(False, False)):
    return (512, "bf16", entries, True, True, True, False, *fp8, cluster, groups)


def whole(entries, window, by_range):
    """Tiles of 64 consecutive rows, by listing places."""
    apart = -(-entries // TILE_N) + -(-window // TILE_N)
    tiles = count_tiles(entries, window)
    at = -(-entries // TILE_N) * TILE_N if tiles == apart else -(-entries // REGION) * REGION
    owner = {place: "entries" for place in range(entries)} | {at + i: "window" for i in range(window)}
    kinds = [{owner.get(place) for place in range(TILE_N * t, TILE_N * (t + 1))} for t in range(tiles)]
    return kinds.count({"window"}) + (kinds.count({"entries"}) if by_range else 0), tiles


def copies(one, by_range):
    """Of a launch over tokens of up to 64 heads."""
    total = 0
    for entries, window in zip(one.count.tolist(), one.window_count.tolist(), strict=True):
        boxes, tiles = whole(entries, window, by_range)
        total += bool(tiles) * Q + boxes * BOX + (tiles - boxes) * GATHERED
    return total


@pytest.mark.full
@pytest.mark.parametrize("entries", cases("index", full=["range"]))
def test_copies_of_every_length(entries):
    """Entries and window keys of 0, 1, 63, 64, 65, 128 and 200 in all combinations, rows that start anywhere."""
    pairs = [(n, w) for n in ENDS for w in ENDS]
    one = case(64, [n for n, _ in pairs], [w for _, w in pairs])
    outcome = run_fmha(Fmha, settings(entries), one)
    assert outcome.clean, outcome.findings()
    assert outcome.result.stats["tma_loads"] == copies(one, entries == "range")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("cluster", [1, 2])
def test_a_ring_in_boxes(cluster):
    """Full and half-filled rings of 128 slots, wrapped too; of a pair each CTA brings its half of every tile."""
    one = decode_case(64 * cluster, [49, 100, 127, 5000])
    outcome = run_fmha(Fmha, settings("none", cluster), one)
    assert outcome.clean, outcome.findings()
    q = Q * cluster  # 64 heads a CTA
    assert outcome.result.stats["tma_loads"] == 4 * q + GATHERED + (BOX + GATHERED) + 2 * (BOX + BOX)


@pytest.mark.parametrize("cluster", cases(2, full=[1]))
def test_the_bits_of_gathered_rows(cluster):
    """The same rows as a range and as a list."""
    one = case(40, [200, 64, 63, 130], [128, 0, 65, 64])
    listed = one.first[:, None] + torch.arange(int(one.count.max())).int()
    listed = replace(one, index=torch.where(torch.arange(listed.shape[1]) < one.count[:, None], listed, -1))
    outcomes = [run_fmha(Fmha, settings(entries, cluster), listed) for entries in ("range", "index")]
    assert all(outcome.clean for outcome in outcomes), [outcome.findings() for outcome in outcomes]
    assert bits(outcomes[0].output) == bits(outcomes[1].output) and bits(outcomes[0].lse) == bits(outcomes[1].lse)
    loads = [outcome.result.stats["tma_loads"] for outcome in outcomes]
    assert loads[0] < loads[1]


@pytest.mark.full
@pytest.mark.parametrize("cluster", cases(2, full=[1]))
def test_a_window_beside_entries_in_pages(cluster):
    """One warp brings it: 16 copies of a full window and none of the entries."""
    one = paged(case(64 * cluster, [128, 64], [128, 128]), 48)
    outcome = run_fmha(Fmha, settings("index", cluster, False, (True, False)), one)
    assert outcome.clean, outcome.findings()
    assert outcome.result.stats["tma_loads"] == 2 * (Q * cluster + 2 * BOX)


@pytest.mark.full
def test_groups_in_boxes():
    """Two tokens in a pair: the union of their windows, 129 keys, is two boxed tiles and one that is not."""
    one = prefill_case(64, [300], 4)
    outcome = run_fmha(Fmha, settings("range", 2, True), one)
    assert outcome.clean, outcome.findings()
    gathered_q = 2 * GATHERED
    unions = [(int(one.count[i + 1]), 129) for i in (0, 2)]
    found = [whole(*union, True) for union in unions]
    expected = sum(gathered_q + boxes * BOX + (tiles - boxes) * GATHERED for boxes, tiles in found)
    assert outcome.result.stats["tma_loads"] == expected and any(boxes for boxes, _ in found)


class BehindTheEnd(Fmha):
    """A tile that keys begin but do not fill comes in boxes too: rows past the end, which must not be read."""

    @cute.jit
    def first_row(self, work: Work, tile: Int32):
        """See `Load.first_row`."""
        up = work.entries + TILE_N - 1, work.window + TILE_N - 1
        return Fmha.first_row(self, work._replace(entries=up[0] & -TILE_N, window=up[1] & -TILE_N), tile)  # WRONG


class OtherPool(Fmha):
    """Boxes of entries come from the window's rows."""

    @cute.jit
    def load_tile(self, sources: KeySources, of_entries: cutlass.Boolean, *rest: Any):
        """See `Load.load_tile`."""
        Fmha.load_tile(self, sources, cutlass.Boolean(False), *rest)  # WRONG: of_entries


@pytest.mark.one_in(2)
@pytest.mark.parametrize("fault", [BehindTheEnd, OtherPool])
def test_faults_are_found(fault):
    one = case(64, [64, 100], [128, 100])
    assert run_fmha(Fmha, settings("range"), one).clean
    assert "wrong numbers" in {f[0] for f in run_fmha(fault, settings("range"), one).findings()}
