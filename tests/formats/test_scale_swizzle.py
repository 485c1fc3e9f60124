"""The 128x4 scale-factor layout against its index formula, spelled out digit by digit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import scale_swizzle

SHAPES = [(128, 4), (1, 1), (129, 5), (300, 7), (31, 12), (256, 16), (97, 3)]


def random_scales(rows: int, cols: int) -> torch.Tensor:
    """Bytes 1..255: zero is left to the padding."""
    generator = torch.Generator().manual_seed(rows * 1000 + cols)
    return torch.randint(1, 256, (rows, cols), generator=generator).to(torch.uint8)


def place_by_loops(scales: torch.Tensor) -> list[int]:
    """Walk the image in its own order and fetch what belongs there: the inverse direction of the codec's formula."""
    rows, cols = scales.shape
    image = []
    for row_block in range((rows + 127) // 128):
        for col_block in range((cols + 3) // 4):
            for lane in range(32):
                for word in range(4):
                    for byte in range(4):
                        r, c = row_block * 128 + word * 32 + lane, col_block * 4 + byte
                        image.append(int(scales[r, c]) if r < rows and c < cols else 0)
    return image


@pytest.mark.parametrize("rows, cols", SHAPES)
def test_against_a_walk_through_the_image(rows, cols):
    scales = random_scales(rows, cols)
    image = scale_swizzle.swizzle(scales)
    assert image.tolist() == place_by_loops(scales)
    assert len(image) == scale_swizzle.swizzled_bytes(rows, cols)


@pytest.mark.parametrize("rows, cols", SHAPES)
def test_byte_offset_names_the_place(rows, cols):
    scales = random_scales(rows, cols)
    image = scale_swizzle.swizzle(scales)
    offsets = [scale_swizzle.byte_offset(r, c, cols) for r in range(rows) for c in range(cols)]
    assert torch.equal(image[offsets], scales.flatten())
    assert len(set(offsets)) == rows * cols
    rest = torch.ones(len(image), dtype=torch.bool)
    rest[offsets] = False
    assert not image[rest].any(), "padding must be zero"


def test_offsets_worked_by_hand():
    """Rows 0, 1, 32, 96 of one block; the next column block; the next row block of a matrix with 8 columns."""
    by_hand = {(0, 0): 0, (0, 3): 3, (1, 0): 16, (32, 0): 4, (96, 1): 13, (127, 3): 511, (0, 4): 512, (128, 0): 1024}
    assert {at: scale_swizzle.byte_offset(*at, 8) for at in by_hand} == by_hand


@pytest.mark.parametrize("rows, cols", SHAPES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu])
def test_inverse(rows, cols, dtype):
    scales = random_scales(rows, cols).view(dtype)
    image = scale_swizzle.swizzle(scales)
    assert image.dtype == dtype
    back = scale_swizzle.unswizzle(image, rows, cols)
    assert back.dtype == dtype and torch.equal(back.view(torch.uint8), scales.view(torch.uint8))


@settings(derandomize=True, max_examples=40, deadline=None)
@given(rows=st.integers(1, 300), cols=st.integers(1, 20))
def test_inverse_for_any_shape(rows, cols):
    scales = random_scales(rows, cols)
    assert torch.equal(scale_swizzle.unswizzle(scale_swizzle.swizzle(scales), rows, cols), scales)


def test_unswizzle_then_swizzle_is_the_identity_on_whole_blocks():
    image = random_scales(1, 2 * 3 * 512)[0]
    assert torch.equal(scale_swizzle.swizzle(scale_swizzle.unswizzle(image, 256, 12)), image)


def test_experts_are_swizzled_separately_and_strides_do_not_matter():
    scales = random_scales(3 * 130, 6).reshape(3, 130, 6)
    image = scale_swizzle.swizzle(scales)
    assert image.shape == (3, scale_swizzle.swizzled_bytes(130, 6))
    for expert in range(3):
        assert torch.equal(image[expert], scale_swizzle.swizzle(scales[expert]))
    assert torch.equal(scale_swizzle.unswizzle(image, 130, 6), scales)
    strided = random_scales(12, 260).t()[::2]
    assert torch.equal(scale_swizzle.swizzle(strided), scale_swizzle.swizzle(strided.contiguous()))


def test_empty():
    for rows, cols in [(0, 4), (5, 0)]:
        image = scale_swizzle.swizzle(torch.empty(rows, cols, dtype=torch.uint8))
        assert image.shape == (0,)
        assert scale_swizzle.unswizzle(image, rows, cols).shape == (rows, cols)


BYTES = torch.zeros(512, dtype=torch.uint8)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: scale_swizzle.swizzle(BYTES), "scales.shape"),
        (lambda: scale_swizzle.swizzle(BYTES.float()[None]), "scales.dtype"),
        (lambda: scale_swizzle.unswizzle(BYTES, 129, 4), "image.shape.*1024"),
        (lambda: scale_swizzle.unswizzle(BYTES, -1, 4), "rows=-1"),
        (lambda: scale_swizzle.unswizzle(BYTES, 1, 2.0), "cols=2.0"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()
