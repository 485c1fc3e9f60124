"""Share between rows what they have in common. Models' sizes, inputs, and comparisons that name what differs."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dsv4lib.check import compare
from dsv4lib.config import FLASH, PRO

MODELS = {"Flash": FLASH, "Pro": PRO}
DECODE = (1, 8, 32, 128)  # tokens
PREFILL = 4096


def normals(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return normals whose rows differ in scale by up to 64."""
    device = generator.device
    scales = torch.rand(*shape[:-1], 1, generator=generator, device=device) * 6 - 3
    return (torch.randn(*shape, generator=generator, device=device) * scales.exp2()).to(dtype)


def close(outputs: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Compare outputs with an oracle in a finer type, by the table of tolerances.

    Raises:
        AssertionError: one differs; the text says which, by how much and where.
    """
    for name, want in expected.items():
        record = compare(outputs[name], want)
        assert record.passed, f"{name}: {'; '.join(record.reasons)}"


def same_bytes(outputs: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], allowed: float = 0) -> None:
    """Compare outputs byte for byte. At most the part ``allowed`` of an output's bytes may differ.

    Raises:
        AssertionError: one differs; the text says which, in how many bytes.
    """
    for name, want in expected.items():
        have, want = (x.contiguous().reshape(-1).view(torch.uint8) for x in (outputs[name], want))
        assert len(have) == len(want), f"{name}: {len(have)} bytes, not {len(want)}"
        wrong = int((have != want).sum())
        assert wrong <= allowed * len(want), f"{name}: {wrong} of {len(want)} bytes differ"
