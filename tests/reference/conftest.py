"""Random inputs for the operator tests."""

import pytest
import torch


@pytest.fixture
def randn():
    """``randn(2, 3)``: fp64 normals, seeded per test."""
    generator = torch.Generator().manual_seed(20)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)
