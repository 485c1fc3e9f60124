"""Oracles shared by the format tests: rounding by comparison with midpoints, and all the places where it turns."""

from __future__ import annotations

import pytest
import torch

from dsv4lib.formats.floatcodec import MiniFloat

INT_VIEW = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
INT_VIEW[torch.float64] = torch.int64


def _round_by_midpoints(fmt: MiniFloat, x: torch.Tensor) -> torch.Tensor:
    """Saturating nearest-even code of each x (no NaN), by counting the midpoints below |x|: no arithmetic on bits."""
    values = fmt.values()[: fmt.max_code + 1]
    mids = (values[1:] + values[:-1]) / 2  # exact in fp64
    magnitude = x.to(torch.float64).abs()
    code = torch.searchsorted(mids, magnitude.contiguous())
    tie = (code < len(mids)) & (mids[code.clamp(max=len(mids) - 1)] == magnitude)
    code = code + (tie & (code % 2 == 1))
    return (code + torch.signbit(x) * 2 ** (fmt.bits - 1)).to(torch.uint8)


def _ulp_neighbours(x: torch.Tensor) -> torch.Tensor:
    """x > 0 with the value one ulp below and one above."""
    bits = x.view(INT_VIEW[x.dtype])
    return torch.cat([bits - 1, bits, bits + 1]).view(x.dtype)


def _boundaries(fmt: MiniFloat, dtype: torch.dtype) -> torch.Tensor:
    """Every value and every midpoint of the format with its two neighbours of ``dtype``, both signs."""
    values = fmt.values()[1 : fmt.max_code + 1]
    mids = (fmt.values()[: fmt.max_code] + values) / 2
    last_step = values[-1] - values[-2]
    points = torch.cat([values, mids, (values[-1] + last_step / 2)[None], (values[-1] + last_step)[None]])
    if dtype == torch.float16:
        points = points[points <= 65504]
    exact = points.to(dtype)
    assert torch.equal(exact.to(torch.float64), points), "the boundaries themselves must be representable"
    near = _ulp_neighbours(exact)
    return torch.cat([near, -near, torch.tensor([0.0, -0.0], dtype=dtype)])


@pytest.fixture
def round_by_midpoints():
    return _round_by_midpoints


@pytest.fixture
def ulp_neighbours():
    return _ulp_neighbours


@pytest.fixture
def boundaries():
    return _boundaries


@pytest.fixture
def all_bf16() -> torch.Tensor:
    """Every bf16 value that is not NaN, Inf included."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return x[~x.isnan()]


def _scaled_normals(rows: int, cols: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normals whose rows differ in scale by up to 2^24, so that no shared scale hides a fault."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp2(torch.rand(rows, 1, generator=generator) * 24 - 12)
    return (torch.randn(rows, cols, generator=generator) * scale).to(dtype)


@pytest.fixture
def scaled_normals():
    return _scaled_normals
