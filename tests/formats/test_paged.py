"""Pages of entries: where every byte goes, skipping, refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4lib.errors import ArgumentError
from dsv4lib.formats.paged import PageLayout

LAYOUT = PageLayout(data_bytes=5, scale_bytes=3, stride_multiple=16)


def random_bytes(*shape: int, seed: int = 51) -> torch.Tensor:
    return torch.randint(1, 256, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def test_sizes():
    assert LAYOUT.entry_bytes == 8
    assert [LAYOUT.page_bytes(n) for n in (1, 2, 3, 4)] == [16, 16, 32, 32]
    assert PageLayout(5, 3).page_bytes(3) == 24


def test_every_byte_of_a_page_has_its_place():
    """data of slot s at s * 5, its scales at n * 5 + s * 3, the rest untouched."""
    pages = torch.full((2, LAYOUT.page_bytes(3)), 0xEE, dtype=torch.uint8)
    data, scales = random_bytes(2, 5), random_bytes(2, 3, seed=52)
    LAYOUT.write(pages, 3, torch.tensor([4, 2]), data, scales)  # page 1 slot 1, page 0 slot 2
    expected = torch.full((2, 32), 0xEE, dtype=torch.uint8)
    expected[1, 5:10], expected[1, 15 + 3 : 15 + 6] = data[0], scales[0]
    expected[0, 10:15], expected[0, 15 + 6 : 15 + 9] = data[1], scales[1]
    assert torch.equal(pages, expected)


def test_scale_offset_names_the_place():
    pages = torch.arange(32, dtype=torch.uint8)[None]
    _, scales = LAYOUT.views(pages, 3)
    offsets = [[LAYOUT.scale_offset(3, slot, i) for i in range(3)] for slot in range(3)]
    assert scales[0].tolist() == offsets


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_minus_one_is_skipped_both_ways(dtype):
    pages = LAYOUT.allocate(2, 3)
    data, scales = random_bytes(4, 5), random_bytes(4, 3, seed=53)
    LAYOUT.write(pages, 3, torch.tensor([0, -1, 5, -1], dtype=dtype), data, scales)
    assert int((pages != 0).sum()) == 2 * 8
    got_data, got_scales, valid = LAYOUT.read(pages, 3, torch.tensor([[-1, 5], [0, -1]], dtype=dtype))
    assert valid.tolist() == [[False, True], [True, False]]
    assert torch.equal(got_data[valid], data[[2, 0]]) and torch.equal(got_scales[valid], scales[[2, 0]])
    assert not got_data[~valid].any() and not got_scales[~valid].any()


@settings(derandomize=True, max_examples=60, deadline=None)
@given(pages=st.integers(1, 4), page_size=st.integers(1, 9), picks=st.randoms(use_true_random=False))
def test_round_trip_of_any_pages(pages, page_size, picks):
    order = list(range(pages * page_size))
    picks.shuffle(order)
    kept = torch.tensor(order[: max(1, len(order) * 2 // 3)])
    data, scales = random_bytes(len(kept), 5), random_bytes(len(kept), 3, seed=54)
    store = LAYOUT.allocate(pages, page_size)
    LAYOUT.write(store, page_size, kept, data, scales)
    got_data, got_scales, valid = LAYOUT.read(store, page_size, kept)
    assert bool(valid.all()) and torch.equal(got_data, data) and torch.equal(got_scales, scales)
    assert int((store != 0).sum()) == len(kept) * 8


def test_entries_may_be_read_twice_and_lists_be_empty():
    pages = LAYOUT.allocate(1, 3)
    LAYOUT.write(pages, 3, torch.tensor([1]), random_bytes(1, 5), random_bytes(1, 3))
    data, _, _ = LAYOUT.read(pages, 3, torch.tensor([1, 1]))
    assert torch.equal(data[0], data[1]) and data.any()
    none = torch.empty(0, dtype=torch.int64)
    LAYOUT.write(pages, 3, none, torch.empty(0, 5, dtype=torch.uint8), torch.empty(0, 3, dtype=torch.uint8))
    assert LAYOUT.read(pages, 3, none)[0].shape == (0, 5)
    assert LAYOUT.read(LAYOUT.allocate(0, 3), 3, torch.tensor([-1]))[2].tolist() == [False]


def test_pages_inside_a_larger_buffer():
    """A pool may hold other layers between its pages: the page stride is the tensor's own."""
    pool = torch.zeros(3, 2, LAYOUT.page_bytes(3), dtype=torch.uint8)
    LAYOUT.write(pool[:, 1], 3, torch.tensor([8]), random_bytes(1, 5), random_bytes(1, 3))
    assert not pool[:, 0].any() and int((pool[2, 1] != 0).sum()) == 8


PAGES = LAYOUT.allocate(2, 3)
DATA, SCALES = random_bytes(2, 5), random_bytes(2, 3)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: LAYOUT.page_bytes(0), "page_size=0"),
        (lambda: LAYOUT.allocate(-1, 3), "num_pages=-1"),
        (lambda: LAYOUT.read(PAGES, 5, torch.tensor([0])), r"pages=.*\[P, 48\]"),
        (lambda: LAYOUT.read(PAGES.int(), 3, torch.tensor([0])), "pages=torch.int32"),
        (lambda: LAYOUT.read(PAGES.t().contiguous().t(), 3, torch.tensor([0])), "pages=.*adjacent"),
        (lambda: LAYOUT.read(PAGES, 3, torch.tensor([0, 6])), r"indices=\[6\].*0..5"),
        (lambda: LAYOUT.read(PAGES, 3, torch.tensor([-2])), r"indices=\[-2\]"),
        (lambda: LAYOUT.read(PAGES, 3, torch.tensor([0.0])), "indices=torch.float32"),
        (lambda: LAYOUT.read(PAGES, 3, [0]), "indices='list'"),
        (lambda: LAYOUT.read(PAGES, 3, torch.tensor([0], device="meta")), "indices.device"),
        (lambda: LAYOUT.write(PAGES, 3, torch.tensor([1, 1]), DATA, SCALES), r"indices=\[1, 1\].*once"),
        (lambda: LAYOUT.write(PAGES, 3, torch.tensor([[1, 2]]), DATA, SCALES), "indices.shape"),
        (lambda: LAYOUT.write(PAGES, 3, torch.tensor([1, 6]), DATA, SCALES), r"indices=\[6\]"),
        (lambda: LAYOUT.write(PAGES, 3, torch.tensor([1, 2]), DATA[:, :4], SCALES), r"data.shape.*\(2, 5\)"),
        (lambda: LAYOUT.write(PAGES, 3, torch.tensor([1, 2]), DATA, SCALES[:1]), r"scales.shape.*\(2, 3\)"),
        (lambda: LAYOUT.write(PAGES, 3, torch.tensor([1, 2]), DATA.int(), SCALES), "data.dtype"),
        (lambda: LAYOUT.write(PAGES, 3, torch.tensor([1, 2]), DATA, SCALES.to("meta")), "scales.device"),
    ],
)
def test_refusals_write_nothing(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()
    assert not PAGES.any()
