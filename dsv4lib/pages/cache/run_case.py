"""Bring keys into the window's rings and the paged pool and back. Inputs, runs of the ops, what speaks against them.

For the notebook and its stage. Every count is of kernels that ran; an injected fault is a class of one of the three
`faults` modules in place of its kernel. Rings are NaN and pages noise before anything is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dsv4lib import backends
from dsv4lib.formats import kv_entry
from dsv4lib.ops.common.requests import plan
from dsv4lib.ops.kv_append import arguments as append_arguments
from dsv4lib.ops.kv_append import faults as kv_append_faults
from dsv4lib.ops.kv_append import op as append_op
from dsv4lib.ops.kv_append.kernel import KvAppend
from dsv4lib.ops.kv_gather import arguments as gather_arguments
from dsv4lib.ops.kv_gather import faults as kv_gather_faults
from dsv4lib.ops.kv_gather import op as gather_op
from dsv4lib.ops.kv_gather.kernel import KvGather
from dsv4lib.ops.quantize import arguments as entry_arguments
from dsv4lib.ops.quantize import faults as quantize_faults
from dsv4lib.ops.quantize import op as entry_op
from dsv4lib.ops.quantize.entries import KvEntries
from dsv4lib.pages.common import faults as injected
from dsv4lib.pages.common.faults import ARCH, ARCHS, SECTOR, Traffic
from dsv4lib.reference.cache import append_window

WINDOW, DIM, NOPE, GROUP, GROUPS = 128, kv_entry.HEAD_DIM, kv_entry.NOPE, kv_entry.GROUP, kv_entry.GROUPS
PAGE, STALE = 8, 0xA5  # entries of a page, few enough to draw some; what pages hold before
MARK = 8  # first dims of a row, by which it is recognised


class Kernels(NamedTuple):
    """The three kernels of this page. A fault takes the place of one, or of two that agree with each other."""

    append: type = KvAppend
    store: type = KvEntries
    gather: type = KvGather


RIGHT = Kernels()
FAULTS = {
    **{name: Kernels(append=kernel) for name, kernel in kv_append_faults.FAULTS.items()},
    **{name: Kernels(store=kernel) for name, kernel in quantize_faults.FAULTS.items()},
    **{name: Kernels(gather=kernel) for name, kernel in kv_gather_faults.FAULTS.items()},
    "PagesTransposed": Kernels(store=quantize_faults.PagesTransposed, gather=kv_gather_faults.PagesTransposed),
}


def kernels_of(fault: str) -> Kernels:
    """The kernels to run; the right ones where the fault is none of theirs."""
    return FAULTS.get(fault, RIGHT)


def keys(tokens: int, seed: int, octaves: float = 0) -> torch.Tensor:
    """Make keys bf16 ``[tokens, 512]`` as they come from the projection. Tokens and groups of 64 dims differ in scale.

    Args:
        octaves: 0: normals; otherwise magnitudes of a group spread evenly over so many powers of two.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, DIM, generator=generator)
    if octaves:
        x = x.sign() * torch.exp2(-octaves * torch.rand(x.shape, generator=generator))
    sizes = torch.logspace(-2, 2, tokens)[torch.randperm(tokens, generator=generator)]
    groups = torch.exp2(4 * torch.rand(tokens, GROUPS + 1, generator=generator) - 2)
    return (x * sizes[:, None] * groups.repeat_interleave(GROUP, 1)).bfloat16()


# ------------------------------------------------------------------ the ring


class Batch(NamedTuple):
    """A packed batch: bf16 keys ``[T, 512]``, rings. For each request (name, rows, position of the first, ring)."""

    kv: torch.Tensor
    requests: tuple[tuple[str, int, int, int], ...]
    rings: int

    @property
    def table(self) -> torch.Tensor:
        """What the op takes."""
        counts, starts, places = (torch.tensor(column) for column in list(zip(*self.requests, strict=True))[1:])
        return plan(torch.cat((counts.new_zeros(1), counts.cumsum(0))), starts, places)


def ragged(prefill: int, seed: int) -> Batch:
    """Make a step of a server. Decode, a chunk over the end of the ring, a prefill longer than it, one left out."""
    requests = (
        ("decode", 1, 1000, 3),
        ("chunk of 20 at 120", 20, 120, 0),
        (f"prefill of {prefill}", prefill, 0, 5),
        ("left out", 5, -1, 6),
        ("chunk of 64 at 4,090", 64, 4090, 2),
    )
    return Batch(keys(sum(count for _, count, _, _ in requests), seed), requests, 7)


def empty(rings: int) -> torch.Tensor:
    """Rings that were never written."""
    return torch.full((rings, WINDOW, DIM), float("nan"), dtype=torch.bfloat16)


def append(batch: Batch, backend: str, kernel: type = KvAppend) -> tuple[torch.Tensor, int]:
    """(rings ``[R, 128, 512]`` after one launch of the batch, hazards)."""
    where = backends.device(backend)
    ring, kv, table = (x.to(where) for x in (empty(batch.rings), batch.kv, batch.table))
    hazards = injected.run(
        backend, lambda: append_op.kv_append(kv, ring, table, backend=backend), (append_op, "KvAppend", kernel)
    )
    return ring.cpu(), hazards


def grown(kv: torch.Tensor, pieces: Sequence[int], backend: str, kernel: type = KvAppend) -> tuple[torch.Tensor, int]:
    """A request from position 0 on, so many tokens a call.

    Returns:
        int64 ``[calls, 128]``: the position whose key a slot holds after each call, -1: none; hazards.
    """
    where = backends.device(backend)
    ring, rows, held = empty(1).to(where), kv.to(where), []

    def calls() -> None:
        first = 0
        for count in pieces:
            table = plan(torch.tensor([0, count]), torch.tensor([first]), torch.tensor([0])).to(where)
            append_op.kv_append(rows[first : first + count], ring, table, backend=backend)
            held.append(recognised(ring[0].cpu(), kv))
            first += count

    hazards = injected.run(backend, calls, (append_op, "KvAppend", kernel))
    return torch.stack(held), hazards


def recognised(rows: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """Which row of ``kv`` each of ``rows`` is, by its first dims; -1: none."""
    same = (rows[..., None, :MARK] == kv[:, :MARK]).all(-1)
    return torch.where(same.any(-1), same.int().argmax(-1), -1)


def newest(pieces: Sequence[int]) -> torch.Tensor:
    """Return what `grown` must find, from positions alone. It is the last position of each slot so far."""
    ends, slots = torch.tensor(pieces).cumsum(0)[:, None], torch.arange(WINDOW)
    last = ends - 1 - (ends - 1 - slots) % WINDOW
    return torch.where(last >= 0, last, -1)


def slots_wrong(batch: Batch, ring: torch.Tensor) -> int:
    """Count slots whose bits are not those of `reference.cache.append_window`. NaN of unwritten slots are included."""
    want = empty(batch.rings)
    for row, count, start, place in batch.table.tolist():
        if start >= 0:
            want[place] = append_window(want[place : place + 1], batch.kv[None, row : row + count], start)[2][0]
    return int((ring.view(torch.int16) != want.view(torch.int16)).any(-1).sum())


# ------------------------------------------------------------------ the pool


class Pool(NamedTuple):
    """Entries of several requests in pages of one pool.

    Attributes:
        kv: bf16 ``[T, 512]``, request after request. indices: int32 ``[T]``, page * PAGE + slot of each.
        counts: entries of each request; tables: of each, the pages of its entries in order. pages: of the pool.
    """

    kv: torch.Tensor
    indices: torch.Tensor
    counts: tuple[int, ...]
    tables: tuple[torch.Tensor, ...]
    pages: int


def pool_of(counts: Sequence[int], seed: int, spare: int = 3) -> Pool:
    """Make requests with so many entries each. Pages come in any order, ``spare`` of the pool belong to no request."""
    needed = [-(-count // PAGE) for count in counts]
    order = torch.randperm(sum(needed) + spare, generator=torch.Generator().manual_seed(seed))
    tables = order[: sum(needed)].split(needed)
    places = [index_of(table, torch.arange(count)) for table, count in zip(tables, counts, strict=True)]
    return Pool(keys(sum(counts), seed), torch.cat(places), tuple(counts), tables, len(order))


def index_of(table: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """int32: where entries of a request lie, by its page table."""
    return (table[entries // PAGE] * PAGE + entries % PAGE).int()


def blank(pages: int) -> torch.Tensor:
    """Pages of noise."""
    return kv_entry.LAYOUT.allocate(pages, PAGE).fill_(STALE)


def store(pool: Pool, backend: str, kernel: type = KvEntries) -> tuple[torch.Tensor, int]:
    """(pages after the op has stored all entries, hazards)."""
    where = backends.device(backend)
    pages, kv, indices = (x.to(where) for x in (blank(pool.pages), pool.kv, pool.indices))
    hazards = injected.run(
        backend,
        lambda: entry_op.quantize_kv_entries(kv, pages, PAGE, indices, backend),
        (entry_op, "KvEntries", kernel),
    )
    return pages.cpu(), hazards


def gather(
    pages: torch.Tensor, indices: torch.Tensor, backend: str, kernel: type = KvGather, page: int = PAGE
) -> tuple[torch.Tensor, int]:
    """(bf16 ``[*indices.shape, 512]`` by the op, hazards)."""
    where = backends.device(backend)
    out = torch.full((*indices.shape, DIM), 7.0, dtype=torch.bfloat16, device=where)
    given = pages.to(where), page, indices.to(where)
    hazards = injected.run(
        backend,
        lambda: gather_op.kv_gather(*given, out=out, backend=backend),
        (gather_op, "KvGather", kernel),
    )
    return out.cpu(), hazards


def page_bytes(pool: Pool, pages: torch.Tensor) -> int:
    """Count bytes of the whole pool that are not what the format writes. Noise between entries is included."""
    want = blank(pool.pages)
    kv_entry.append(want, PAGE, pool.indices, pool.kv)
    return int((pages != want).sum())


def half_steps(found: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """Return the error of nope dims, fp64 ``[T, 448]``. In units of half the distance of two E4M3 numbers there."""
    x, got = kv[:, :NOPE].double(), found[:, :NOPE].double()
    _, scales = kv_entry.encode(kv)
    step = torch.exp2(scales[:, :GROUPS].double() - 127).repeat_interleave(GROUP, 1)
    octave = torch.frexp((x / step).abs().clamp_min(2.0**-6))[1].double() - 1  # subnormals have the last octave's
    return (got - x).abs() / (step * torch.exp2(octave - 4))


def same_bits(found: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Whether bf16 numbers are the same, a NaN equal to any NaN."""
    return (found.view(torch.int16) == want.view(torch.int16)) | (found.isnan() & want.isnan())


def moved(pages: torch.Tensor, indices: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pool with its pages in another order. Also the indices that name the same entries there; -1 stays."""
    order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(seed + 1))
    shuffled = torch.empty_like(pages)
    shuffled[order] = pages
    there = order[indices.clamp_min(0) // PAGE] * PAGE + indices % PAGE
    return shuffled, torch.where(indices < 0, -1, there).int()


def selection(pool: Pool, request: int, count: int, seed: int) -> torch.Tensor:
    """Select int32 ``[count]`` entries of a request as top-k picks them.

    They are in any order, every sixth place -1.
    """
    entries = torch.randint(pool.counts[request], (count,), generator=torch.Generator().manual_seed(seed))
    picked = index_of(pool.tables[request], entries)
    picked[5::6] = -1
    return picked


def all_pairs() -> tuple[torch.Tensor, torch.Tensor]:
    """Return pages of entries with every E4M3 code under every scale. An entry has one scale; their indices come, too.

    Codes 0 to 255 are in dims 0 to 255 of entry s, whose scale bytes are all s.
    """
    data = torch.zeros(256, kv_entry.LAYOUT.data_bytes, dtype=torch.uint8)
    data[:, :256] = torch.arange(256, dtype=torch.uint8)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(-1, kv_entry.LAYOUT.scale_bytes).contiguous()
    pages, indices = kv_entry.LAYOUT.allocate(256 // PAGE, PAGE), torch.arange(256, dtype=torch.int32)
    kv_entry.LAYOUT.write(pages, PAGE, indices, data, scales)
    return pages, indices


def no_numbers(seed: int) -> Pool:
    """Four entries: NaN among nope dims, Inf there, NaN among rope dims, and none."""
    pool = pool_of((4,), seed, 0)
    pool.kv[0, 130], pool.kv[1, 447], pool.kv[2, 500] = float("nan"), float("inf"), float("nan")
    return pool


def not_finite_wrong(found: torch.Tensor, kv: torch.Tensor) -> int:
    """Elements that are NaN or Inf and should not be, or should be and are not."""
    want = kv_entry.fake_quantize(kv)
    return int(((found.isnan() != want.isnan()) | (found.isinf() != want.isinf())).sum())


# ------------------------------------------------------------------ everything at once


def judged(kernels: Kernels, prefill: int, seed: int, backend: str) -> dict[str, float]:
    """Judge a small case by every check of the page. What does not belong to a fault is 0, `nope_error` at most 1."""
    batch, pool, odd = ragged(prefill, seed), pool_of((19, 5, 33), seed), no_numbers(seed)
    ring, first = append(batch, backend, kernels.append)
    pages, second = store(pool, backend, kernels.store)
    picked = selection(pool, 2, 24, seed)
    found, third = gather(pages, picked, backend, kernels.gather)
    back, _ = gather(pages, pool.indices, backend, kernels.gather)
    stored = kv_entry.gather(pages, PAGE, pool.indices)[0]
    elsewhere, _ = gather(*moved(pages, picked, seed), backend, kernels.gather)
    wanted = kv_entry.gather(pages, PAGE, picked)[0]
    pair_pages, every = all_pairs()
    pairs, _ = gather(pair_pages, every, backend, kernels.gather)
    odd_found, _ = gather(store(odd, backend, kernels.store)[0], odd.indices, backend, kernels.gather)
    return {
        "slots_wrong": slots_wrong(batch, ring),
        "hazards": first + second + third,
        "page_bytes": page_bytes(pool, pages),
        "nope_error": float(half_steps(stored, pool.kv).max()),
        "rope_wrong": int((stored[:, NOPE:] != pool.kv[:, NOPE:]).sum()),
        "gathered_wrong": int((~same_bits(found, wanted))[picked >= 0].sum()),
        "skipped_wrong": int((found[picked < 0] != 0).sum()),
        "round_trip": int((~same_bits(back, kv_entry.fake_quantize(pool.kv))).sum()),
        "moved_wrong": int((~same_bits(elsewhere, found)).sum()),
        "pairs_wrong": int((~same_bits(pairs, kv_entry.gather(pair_pages, PAGE, every)[0])).sum()),
        "nan_wrong": not_finite_wrong(odd_found, odd.kv),
    }


# ------------------------------------------------------------------ bytes, and the other architecture


def _appended(arch: str, batch: Batch, kernel: type = KvAppend, **changed: bool) -> tuple[torch.Tensor, int]:
    ring, table = empty(batch.rings), batch.table
    settings = append_op.settings_for(len(batch.kv), len(table), WINDOW) | changed
    call = append_op.Call(batch.kv, ring, table, "emulator")
    given = settings, append_arguments.fake_args, append_arguments.launch_args
    return ring, injected.sectors(arch, kernel, *given, call)


def _stored(arch: str, pool: Pool, kernel: type = KvEntries) -> tuple[torch.Tensor, int]:
    pages = blank(pool.pages)
    given = {"dtype": "bf16"}, entry_arguments.fake_args, entry_arguments.entry_args
    return pages, injected.sectors(arch, kernel, *given, pool.kv, entry_op.Slots(pages, PAGE, pool.indices))


def _gathered(arch: str, pages: torch.Tensor, indices: torch.Tensor, kernel: type = KvGather) -> tuple:
    out = torch.empty(len(indices), DIM, dtype=torch.bfloat16)
    given = {}, gather_arguments.fake_args, gather_arguments.launch_args
    return out, injected.sectors(arch, kernel, *given, gather_op.Call(pages, indices, out, PAGE, "emulator"))


def traffic(prefill: int, seed: int, by_row: bool = False) -> dict[str, Traffic]:
    """Bytes of five launches, counted in sectors by the emulator. ``by_row``: the prefill by the kernel for decode."""
    step = Batch(keys(8, seed), tuple((f"r{i}", 1, 97 * i, i) for i in range(8)), 8)
    long = Batch(keys(prefill, seed), (("r0", prefill, 0, 0),), 1)
    pool = pool_of((64,), seed)
    pages, stored = _stored(ARCH, pool)
    skipped = pool.indices.clone()
    skipped[::8] = -1
    row, entry, picked = 2 * DIM, kv_entry.LAYOUT.entry_bytes, int((skipped >= 0).sum())
    options = {"by_slot": False} if by_row else {}
    launches = {
        "append, 8 requests, a token each": (2 * 8 * row + 8 * 16, _appended(ARCH, step)[1], 8),
        f"append, a prefill of {prefill}": (2 * WINDOW * row + 16, _appended(ARCH, long, **options)[1], WINDOW),
        "quantise and store 64": (64 * (row + entry + 4), stored, 64),
        "gather 64": (64 * (entry + 4 + row), _gathered(ARCH, pages, pool.indices)[1], 64),
        "gather 64, 8 of them skipped": (picked * entry + 64 * (4 + row), _gathered(ARCH, pages, skipped)[1], 64),
    }
    return {name: Traffic(floor, sectors * SECTOR, rows) for name, (floor, sectors, rows) in launches.items()}


def arch_bytes(prefill: int, seed: int, hopper: Kernels = RIGHT) -> int:
    """Count bytes that differ between kernels compiled for Blackwell and for Hopper.

    ``hopper``: those of the latter.
    """
    batch, pool, results = ragged(prefill, seed), pool_of((19, 5), seed), []
    for arch, kernels in zip(ARCHS, (RIGHT, hopper), strict=True):
        pages, _ = _stored(arch, pool, kernels.store)
        ring, _ = _appended(arch, batch, kernels.append)
        rows, _ = _gathered(arch, pages, pool.indices, kernels.gather)
        results.append([x.view(torch.uint8) for x in (ring, pages, rows)])
    return sum(int((a != b).sum()) for a, b in zip(*results, strict=True))
