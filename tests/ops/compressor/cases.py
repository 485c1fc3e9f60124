"""Batches for the compressor: requests at any positions, with histories, and what the oracle makes of them."""

from typing import NamedTuple

import torch

from dsv4lib.formats import hadamard, indexer_key, kv_entry
from dsv4lib.ops.common.requests import plan
from dsv4lib.ops.compressor.op import Batch, Pages, Ring, Running, Weights, compressor
from dsv4lib.reference import compressor as oracle
from dsv4lib.reference.rope import base_freqs, cos_sin

EPS, PAGE = 1e-6, 3  # entries of a page: pages are not filled evenly
LAYOUTS = {"kv": kv_entry.LAYOUT, "fp8": indexer_key.FP8_LAYOUT, "fp4": indexer_key.FP4_LAYOUT}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Case(NamedTuple):
    """Arguments of the op, but for the outputs."""

    kv: torch.Tensor
    gate: torch.Tensor
    weights: Weights
    batch: Batch
    state: Ring | Running
    dim: int

    def to(self, device):
        move = [type(x)(*(y.to(device) if hasattr(y, "to") else y for y in x)) for x in self[2:5]]
        return Case(self.kv.to(device), self.gate.to(device), *move, self.dim)


def make(rate, counts, starts, *, dim=512, running=False, single=False, drop=(), rows=0, seed=0):
    """Requests of so many rows at these positions, in states of their own order; slots in no order, ``drop`` closed
    windows of them without one. Gates reach far enough that some channels are decided by one row."""
    generator = torch.Generator().manual_seed(seed)
    overlap = rate == 4
    width, ring = dim * (1 + overlap), rows or rate * (1 + overlap)
    counts, starts = torch.tensor(counts), torch.tensor(starts)
    batch, tokens = len(counts), int(counts.sum())
    offsets = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    given = torch.randn(tokens, 2 * width, generator=generator)
    given *= torch.logspace(-0.5, 0.7, max(tokens, 1))[:tokens, None]
    places = torch.randperm(batch + 2, generator=generator)[:batch]
    request = torch.arange(batch).repeat_interleave(counts)
    positions = torch.arange(tokens) - offsets[request] + starts[request]
    closes = ((positions + 1) % rate == 0) & (starts[request] >= 0)
    entries = int(closes.sum())
    slots = torch.full((tokens,), -1, dtype=torch.int32)
    slots[closes] = torch.randperm(entries + 4, generator=generator)[:entries].int()
    for i in drop:
        slots[closes.nonzero()[i]] = -1
    length = max(int((starts + counts).max()), 1)
    used = torch.cat([p // rate * rate for p in (positions, starts)]).clamp_min(0).unique()
    cos, sin = torch.full((length, 32), float("nan")), torch.full((length, 32), float("nan"))  # 1M rows cost nothing
    cos[used], sin[used] = cos_sin(used, base_freqs(64, 160000.0), torch.float32)
    weights = Weights(
        torch.randn(rate, width, generator=generator), 1 + 0.3 * torch.randn(dim, generator=generator), cos, sin
    )
    history = [torch.randn(batch + 2, ring, width, generator=generator) for _ in range(2)]
    if running:
        parts = torch.full((batch + 2, 3, dim), float("nan"))  # what no open window has
        for start, place in zip(starts.tolist(), places.tolist(), strict=True):
            if start % rate:
                parts[place] = oracle.running_part(*(x[place, : start % rate] for x in history))
        state = Running(parts)
    else:
        for one, place in zip(starts.tolist(), places.tolist(), strict=True):
            written = [p % ring for p in range(max(0, one - ring), one)]
            unwritten = [s for s in range(ring) if s not in written]
            for x in history:
                x[place, unwritten] = float("nan")  # a state that is recycled, not cleared
        state = Ring(*history)
    table = plan(offsets, starts, places)
    return Case(given[:, :width], given[:, width:], weights, Batch(table, slots, single), state, dim)


def run(case, form, backend, **options):
    """(pages, state) after the op; pages begin as noise."""
    entries = max(int(case.batch.slots.max()) + 1 if len(case.batch.slots) else 1, 1)
    pages = blank(form, entries, case.dim).to(case.kv.device)
    state = type(case.state)(*(x.clone() for x in case.state))
    compressor(
        case.kv,
        case.gate,
        case.weights,
        case.batch,
        state,
        Pages(pages, PAGE, form),
        eps=EPS,
        backend=backend,
        **options,
    )
    return pages, state


def blank(form, entries, dim):
    """Pages for so many entries, full of a pattern that must survive where nothing is stored."""
    if form in DTYPES:
        return torch.full((entries, dim), 7.0, dtype=DTYPES[form])
    layout = LAYOUTS[form]
    pages = layout.allocate(-(-entries // PAGE), PAGE)
    return pages.fill_(0xA5)


def expected(case, dtype=None):
    """(entries [n, dim], slots, state) of the oracle in fp64; entries of 128 dims are rotated.

    dtype: what entries are rounded to after every step; None: nothing.
    """
    wide = (x.double() for x in (case.kv, case.gate, *case.weights))
    batch = oracle.Packed(*wide, case.batch.requests, case.batch.slots)
    if isinstance(case.state, Running):
        entries, slots, parts = oracle.compress_running(batch, case.state.parts.double(), EPS, dtype)
        state = Running(parts)
    else:
        state = oracle.State(*(x.double() for x in case.state))
        entries, slots, state = oracle.compress_packed(batch, state, EPS, dtype)
        state = Ring(*state)
    return oracle.rounded(hadamard.transform(entries), dtype) if case.dim == 128 else entries, slots, state


def verify_stored(case, form, pages):
    """Quantised pages against the oracle with the released code's roundings, byte by byte.

    An fp32 sum that lies within its error of a tie may round to the other neighbour: one byte in 500 at most, where
    rounding to bf16 once less changes at least 10.
    """
    entries, slots, _ = expected(case, torch.bfloat16)
    want = blank(form, max(int(case.batch.slots.max()) + 1, 1), case.dim)
    if form == "kv":
        kv_entry.append(want, PAGE, slots, entries)
    else:
        indexer_key.append(want, PAGE, slots, entries, form)
    written = len(slots) * LAYOUTS[form].entry_bytes
    wrong = int((pages.cpu() != want).sum())
    assert wrong <= written // 500, f"{wrong} of {written} bytes of {form}"


def verify(case, run_form):
    """Entries to fp32 bounds, the state exactly (rows) or to fp32 bounds, nothing else touched.

    Args:
        run_form: calls the op, form -> (pages, state).

    Returns:
        the fp32 pages.
    """
    entries, slots, state = expected(case)
    found, after = run_form("fp32")
    got = found.cpu()[slots.long()].double()
    error = (got - entries).abs().amax(-1) / entries.abs().amax(-1).clamp_min(1e-30)
    assert not len(slots) or float(error.max()) < 4e-6, float(error.max())
    untouched = torch.ones(len(found), dtype=torch.bool)
    untouched[slots.long()] = False
    assert bool((found.cpu()[untouched] == 7.0).all())
    for new, want in zip(after, state, strict=True):
        error = (new.cpu().double() - want).abs() / want.abs().amax(-1, keepdim=True)
        bound = 2e-6 if isinstance(after, Running) else 1.2e-7  # a row of a ring is one fp32 sum
        assert torch.equal(new.cpu().isnan(), want.isnan()) and float(error.nan_to_num().max()) < bound
    return found.cpu(), slots
