"""Run the ops of the 4-bit KV cache, with a fault if wanted, and compare with fp64; for notebook and stage."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsv4lib import backends
from dsv4lib.formats import turbo4
from dsv4lib.ops.turbo4_encode import op as encode_op
from dsv4lib.ops.turbo4_encode.faults import FAULTS as ENCODE_FAULTS
from dsv4lib.ops.turbo4_encode.kernel import Turbo4Encode
from dsv4lib.pages.common import faults as injected
from dsv4lib.reference import turbo4_decode as oracle
from dsv4lib.reference.turbo4_encode import append

OUTLIERS, GAIN = (3, 41), 20.0  # channels that are larger than the others, and by how much


def vectors(tokens: int, heads: int, dim: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normals [T, H, D] whose rows differ in scale, two channels 20 times as large."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, heads, dim, generator=generator)
    x *= torch.exp2(4 * torch.rand(tokens, heads, 1, generator=generator) - 2)
    x[..., OUTLIERS] *= GAIN
    return x.to(dtype)


class Stored(NamedTuple):
    """Pages after `turbo4_encode`.

    Attributes:
        pages: uint8 [P, H, bytes]. given, back: x and what the cache makes of it, fp64 [T, H, D].
        error_db: signal over error of ``back``. differing: bytes that are not the oracle's.
        hazards: of the launch.
    """

    pages: torch.Tensor
    given: torch.Tensor
    back: torch.Tensor
    error_db: float
    differing: int
    hazards: int


def store(
    x: torch.Tensor, page_size: int, indices: torch.Tensor, backend: str, seed: int = 0, fault: str = "none"
) -> Stored:
    """Run `turbo4_encode` into pages that hold 0xA5; ``fault``: a name of its `FAULTS`, or "none"."""
    where, (_, heads, dim) = backends.device(backend), x.shape
    count = -(-(int(indices.max()) + 1) // page_size)
    pages = torch.full((count, heads, turbo4.layout(dim).page_bytes(page_size)), 0xA5, dtype=torch.uint8)
    found, want = pages.clone().to(where), pages
    hazards = injected.run(
        backend,
        lambda: encode_op.turbo4_encode(x.to(where), found, page_size, indices.to(where), seed=seed, backend=backend),
        (encode_op, "Turbo4Encode", ENCODE_FAULTS.get(fault, Turbo4Encode)),
    )
    found = found.cpu()
    append(want, page_size, indices.clamp_min(-1), x, seed)
    stored = indices >= 0
    back = decoded(found, dim, page_size, indices[stored], seed)
    given = x[stored].double()
    error = float((back - given).square().sum() / given.square().sum())
    decibels = -10 * float(torch.tensor(error).log10())
    return Stored(found, given, back, decibels, int((found != want).sum()), hazards)


def decoded(pages: torch.Tensor, dim: int, page_size: int, indices: torch.Tensor, seed: int) -> torch.Tensor:
    """Entries of a cache, fp64 [T, H, D]."""
    every = torch.arange(len(pages))
    found = oracle.entries(pages, dim, page_size, every, len(pages) * page_size)
    return turbo4.decode(found, seed, torch.float64).transpose(0, 1)[indices.long()]
