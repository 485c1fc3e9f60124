"""Rows of rings and spans against the reference's masks, at chunk starts around the window's edge."""

from dataclasses import replace

import pytest
import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.ops.fmha.faults import last_keys_only
from dsv4lib.ops.fmha.inputs import decode_case, prefill_case
from dsv4lib.ops.fmha.sm100 import Fmha
from dsv4lib.ops.fmha.window import append, entry_limit, ring_rows, span, span_rows
from dsv4lib.pages.fmha.run_case import run_fmha
from dsv4lib.reference import compressor, fmha

STARTS = [0, 1, 127, 128, 5000]


def filled(positions):
    """A ring whose rows are the positions they hold, after 0 .. positions - 1 came in uneven pieces."""
    ring, at = torch.full((128, 1), -1), 0
    while at < positions:
        step = min(positions - at, 1 + at % 300)
        append(ring, torch.arange(at, at + step)[:, None], at)
        at += step
    return ring


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("tokens", [1, 2, 127, 300])
def test_a_span_shows_each_query_its_window(start, tokens):
    """By the positions that the rows hold, through a wrapped ring."""
    rows = span(filled(start), torch.arange(start, start + tokens)[:, None], start)[:, 0]
    assert len(rows) == 127 + tokens
    positions = torch.arange(start, start + tokens)
    visible = fmha.window_visible(positions, torch.arange(start + tokens), 128)
    for first, count, seen in zip(*span_rows(start, tokens), visible, strict=True):
        assert torch.equal(rows[first : first + count], seen.nonzero()[:, 0])


@pytest.mark.parametrize("position", [0, 1, 126, 127, 128, 5000])
def test_a_ring_holds_the_window(position):
    first, count = ring_rows(torch.tensor([3, position]))
    assert int(first[1]) == 128 and first.dtype == count.dtype == torch.int32
    held = filled(position + 1)[: int(count[1]), 0].sort().values
    assert torch.equal(held, torch.arange(max(0, position - 127), position + 1))


def test_entries_complete_at_a_position():
    positions = torch.tensor([0, 126, 127, 128, 255, 5000, 2**20 - 1])
    for rate in (4, 128):
        assert torch.equal(entry_limit(positions, rate).long(), compressor.visible_count(positions, rate))


def test_bad_arguments_are_named():
    for call, name in (
        (lambda: span_rows(-1, 3), "start"),
        (lambda: span_rows(5, 0), "tokens"),
        (lambda: ring_rows(torch.tensor([-1])), "positions"),
        (lambda: ring_rows(torch.tensor([1.0])), "positions"),
        (lambda: entry_limit(torch.tensor(3)), "positions"),
    ):
        with pytest.raises(ArgumentError, match=name):
            call()


def test_prefill_and_decode_in_the_kernel():
    """Chunks at all starts in one launch; rings of every fill in one launch."""
    outcome = run_fmha(Fmha, (512, "bf16", "range"), prefill_case(64, STARTS, 2))
    assert outcome.clean, outcome.findings()
    outcome = run_fmha(Fmha, (512, "bf16", "none"), decode_case(64, [-1, 0, 49, 126, 127, 5000]))
    assert outcome.clean, outcome.findings()


@pytest.mark.parametrize(("tokens", "right"), [(1, True), (2, False), (200, False)])
def test_a_mask_over_the_last_keys_is_right_for_one_token_only(tokens, right):
    first, count = span_rows(5000, tokens)
    kept_first, kept = last_keys_only(first, count, tokens)
    assert (torch.equal(kept_first, first) and torch.equal(kept, count)) == right
    assert int(kept[-1]) == 128 and int(kept[0]) == max(0, 128 - (tokens - 1))
    assert torch.equal((kept_first + kept)[kept > 0], (first + count)[kept > 0])


def test_dropped_keys_are_found():
    """The kernel runs what it is given; the oracle of the right rows disagrees."""
    one = prefill_case(64, [300], 3)
    first, count = last_keys_only(one.window_first, one.window_count, 3)
    cut = replace(one, window_first=first, window_count=count)
    settings = (512, "bf16", "range")
    assert run_fmha(Fmha, settings, cut).clean
    assert not run_fmha(Fmha, settings, cut, judge_by=one).right
