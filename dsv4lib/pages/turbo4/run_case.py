"""Run the ops of the 4-bit KV cache, with a fault if wanted, and compare with fp64; for notebook and stage."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsv4lib import backends
from dsv4lib.check import Comparison, compare
from dsv4lib.formats import turbo4
from dsv4lib.ops.turbo4_decode import op as decode_op
from dsv4lib.ops.turbo4_decode.faults import FAULTS as DECODE_FAULTS
from dsv4lib.ops.turbo4_decode.faults import RACES
from dsv4lib.ops.turbo4_decode.kernel import Turbo4Decode
from dsv4lib.ops.turbo4_encode import op as encode_op
from dsv4lib.ops.turbo4_encode.faults import FAULTS as ENCODE_FAULTS
from dsv4lib.ops.turbo4_encode.kernel import Turbo4Encode
from dsv4lib.pages.common import faults as injected
from dsv4lib.reference import turbo4_decode as oracle
from dsv4lib.reference.turbo4_encode import append

ARCH = "sm_90a"  # that is emulated
OWN_FAULTS = "NeverRotated", "AlwaysRotated", "ThreeBits", "WideNorms", "Harmless"  # of `figures`, and of `faults`
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
    x: torch.Tensor,
    page_size: int,
    indices: torch.Tensor,
    backend: str,
    seed: int = 0,
    fault: str = "none",
    arch: str = ARCH,
) -> Stored:
    """Run `turbo4_encode` into pages that hold 0xA5; ``fault``: a name of its `FAULTS`, or "none"."""
    where, (_, heads, dim) = backends.device(backend), x.shape
    count = -(-(int(indices.max()) + 1) // page_size)
    pages = torch.full((count, heads, turbo4.layout(dim).page_bytes(page_size)), 0xA5, dtype=torch.uint8)
    found, want = pages.clone().to(where), pages
    passed = x.to(where), found, page_size, indices.to(where)
    with backends.emulating(arch):
        hazards = injected.run(
            backend,
            lambda: encode_op.turbo4_encode(*passed, seed=seed, backend=backend),
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


class Case(NamedTuple):
    """Arguments of an attention.

    Attributes:
        q: [B, H, D]. pages: uint8 [P, 2 K, bytes], heads of keys and then of values.
        page_size: entries of a page. block_table: int32 [B, W]. lengths: int32 [B].
    """

    q: torch.Tensor
    pages: torch.Tensor
    page_size: int
    block_table: torch.Tensor
    lengths: torch.Tensor

    @property
    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages of keys and of values."""
        return self.pages.chunk(2, 1)


def case(
    lengths: list[int],
    heads: int,
    kv_heads: int,
    dim: int,
    *,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    spread: float = 1.0,
    width: int | None = None,
) -> Case:
    """Make a cache of random vectors in pages of random order, all of them full, and queries.

    Args:
        lengths: of requests. heads, kv_heads, dim: H, K and D.
        page_size, dtype: of the cache and of q. seed: of numbers and rotation.
        spread: standard deviation of q. width: pages of a request in the table; None: as many as are needed.
    """
    generator = torch.Generator().manual_seed(seed)
    width = max(1, -(-max(lengths) // page_size)) if width is None else width
    count = len(lengths) * width + 1
    x = vectors(count * page_size, 2 * kv_heads, dim, seed, dtype)
    x[..., OUTLIERS] /= GAIN  # attention of keys with outliers would see one token alone
    pages = torch.zeros(count, 2 * kv_heads, turbo4.layout(dim).page_bytes(page_size), dtype=torch.uint8)
    append(pages, page_size, torch.arange(count * page_size), x, seed)
    table = torch.randperm(count, generator=generator)[: len(lengths) * width].view(len(lengths), width).int()
    q = spread * torch.randn(len(lengths), heads, dim, generator=generator)
    return Case(q.to(dtype), pages, page_size, table, torch.tensor(lengths, dtype=torch.int32))


class Attended(NamedTuple):
    """Output of `turbo4_decode`.

    Attributes:
        o, lse: found. want: of the oracle, fp64. record: comparison of O.
        lse_error: largest of requests with tokens. hazards: of the launches.
    """

    o: torch.Tensor
    lse: torch.Tensor
    want: oracle.Attention
    record: Comparison
    lse_error: float
    hazards: int


def attend(
    one: Case,
    backend: str,
    seed: int = 0,
    *,
    splits: int = 1,
    lookup: str = "registers",
    fault: str = "none",
    arch: str = ARCH,
) -> Attended:
    """Run `turbo4_decode`; ``fault``: a name of its `FAULTS` or `RACES`, or "none"."""
    where, outputs = backends.device(backend), []
    q, pages, table, lengths = (x.to(where) for x in (one.q, one.pages, one.block_table, one.lengths))
    given = q, *pages.chunk(2, 1), one.page_size, table, lengths
    options = {"seed": seed, "splits": splits, "lookup": lookup, "backend": backend}
    with backends.emulating(arch):
        hazards = injected.run(
            backend,
            lambda: outputs.extend(decode_op.turbo4_decode(*given, **options)),
            (decode_op, "Turbo4Decode", {**DECODE_FAULTS, **RACES}.get(fault, Turbo4Decode)),
        )
    o, lse = (x.cpu() for x in outputs)
    scale = one.q.shape[2] ** -0.5
    want = oracle.turbo4_decode(one.q, *one.caches, one.block_table, one.lengths, one.page_size, scale, seed)
    apart = torch.where(want.lse == lse, 0.0, (want.lse - lse).abs())  # -inf is -inf
    return Attended(o, lse, want, compare(o, want.o), float(apart.max()), hazards)


def error_of_torch(one: Case, want: torch.Tensor, seed: int) -> float:
    """RMS error of torch's attention in the dtype of q over what the caches hold, requests with tokens alone.

    Args:
        one: the case. want: O of the oracle, fp64. seed: of the rotation.
    """
    errors, dim = [], one.q.shape[2]
    for b, length in enumerate(one.lengths.tolist()):
        if length > 0:
            found = oracle.entries(one.pages, dim, one.page_size, one.block_table[b], length)
            k, v = turbo4.decode(found, seed, torch.float32).to(one.q.dtype).chunk(2)
            q = one.q[b].unflatten(0, (len(k), -1))
            o = torch.nn.functional.scaled_dot_product_attention(q, k, v).flatten(0, 1)
            errors.append((o.double() - want[b]).square().mean())
    return float(torch.stack(errors).mean().sqrt())


def error_over_torch(one: Case, found: Attended, seed: int) -> float:
    """RMS error of O over that of torch's attention in the same dtype, requests with tokens alone."""
    live = one.lengths > 0
    ours = float((found.o[live].double() - found.want.o[live]).square().mean().sqrt())
    return ours / error_of_torch(one, found.want.o, seed)


def distributions(dim: int, seed: int, rows: int = 2048) -> dict[str, torch.Tensor]:
    """Vectors [rows, D] in fp64 by name: normals, two large channels, heavy tails, a channel with a large mean."""
    generator = torch.Generator().manual_seed(seed)

    def normals() -> torch.Tensor:
        return torch.randn(rows, dim, generator=generator, dtype=torch.float64)

    large, mean = normals(), normals()
    large[:, OUTLIERS] *= GAIN
    mean[:, OUTLIERS[0]] += 8.0
    tails = normals() / torch.stack([normals().square() for _ in range(3)]).mean(0).sqrt()  # Student t, 3 degrees
    return {"normals": normals(), "two channels x 20": large, "one channel + 8": mean, "Student t, 3": tails}


def decibels(x: torch.Tensor, back: torch.Tensor) -> float:
    """Signal over error."""
    return -10 * float(((back - x).square().sum() / x.square().sum()).log10())


class Found(NamedTuple):
    """An injected fault: its op, its name, what shows it, and whether the page's gates do."""

    op: str
    name: str
    shown: str
    seen: bool


def faults(backend: str, fault: str = "none") -> list[Found]:
    """Run every fault of both ops on a small case; ``fault`` "Harmless": as one of them the kernel as it is."""
    found, indices = [], torch.tensor([9, -1, 30, 4, 11]).int()
    for name in ENCODE_FAULTS:
        stored = store(vectors(5, 2, 64, 1), 16, indices, backend, fault=name)
        found.append(Found("turbo4_encode", name, f"{stored.differing} bytes differ", stored.differing > 0))
    one = case([37, 100], 4, 2, 64, seed=3)
    for name in (*DECODE_FAULTS, *(["Harmless"] if fault == "Harmless" else [])):
        ratio = error_over_torch(one, attend(one, backend, 3, fault=name), 3)
        found.append(Found("turbo4_decode", name, f"error {ratio:.1f} times torch's", ratio > 2))
    return found
