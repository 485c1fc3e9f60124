"""Run the compressor op on one request from position 0. What went in, what came out, and what speaks against it.

For the notebook and its stage. A state is NaN before the first token: nothing of it may reach an entry. Every count is
of a kernel that ran; an injected fault is a class of `ops.compressor.faults` in place of the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple
from unittest.mock import patch

import torch

from dsv4lib import backends, emulator
from dsv4lib.config import FLASH, LayerKind
from dsv4lib.formats import hadamard, indexer_key, kv_entry
from dsv4lib.ops.common import launching, plans
from dsv4lib.ops.common.requests import plan
from dsv4lib.ops.compressor import faults, op
from dsv4lib.ops.compressor.kernel import Compressor
from dsv4lib.ops.kv_gather.op import kv_gather
from dsv4lib.reference import compressor as oracle
from dsv4lib.reference import rope
from dsv4lib.viz.model import OWN, PREVIOUS

EPS, PAGE = 1e-6, 3  # entries of a page, few enough to draw one
APART = 64  # channels between the marks of the two halves in `fed`


class Kind(NamedTuple):
    """A compressor: tokens of a window, dims of an entry. Also whether it pools two windows."""

    rate: int
    dim: int
    overlap: bool

    @property
    def width(self) -> int:
        """Count the columns of a row."""
        return self.dim * (1 + self.overlap)

    @property
    def pooled(self) -> int:
        """Count the rows of an entry, and of a ring."""
        return self.rate * (1 + self.overlap)


CSA, HCA, INDEXER = Kind(4, 512, True), Kind(128, 512, False), Kind(4, 128, True)


class Tokens(NamedTuple):
    """kv, gate fp32 ``[T, width]`` of positions 0 to T - 1, with the weights."""

    kind: Kind
    kv: torch.Tensor
    gate: torch.Tensor
    weights: op.Weights

    @property
    def entries(self) -> int:
        """Count the windows that are complete."""
        return len(self.kv) // self.kind.rate


class Run(NamedTuple):
    """Pages; the state's first tensor after every call. Also the last state, both of one request; hazards."""

    pages: torch.Tensor
    history: list[torch.Tensor]
    state: op.Ring | op.Running
    hazards: int


def draw(kind: Kind, tokens: int, seed: int) -> Tokens:
    """Return rows whose sizes differ, and gates. They reach far enough for one row to decide some channels."""
    generator = torch.Generator().manual_seed(seed)
    kv, gate = (torch.randn(tokens, kind.width, generator=generator) for _ in range(2))
    ape, norm = torch.randn(kind.rate, kind.width, generator=generator), torch.randn(kind.dim, generator=generator)
    sizes = torch.logspace(-0.5, 0.7, tokens)[:, None]
    return Tokens(kind, kv * sizes, 2 * gate, op.Weights(ape, 1 + 0.3 * norm, *_tables(tokens)))


def _tables(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin; one window more than the entries are rotated by, for the fault that reads it."""
    positions = torch.arange(tokens + 2 * HCA.rate)
    return rope.cos_sin(positions, rope.layer_freqs(FLASH, LayerKind.CSA), torch.float32)


def kernel_of(fault: str, kind: Kind) -> type:
    """Return the kernel for a kind of compressor. It is the faulty one where the fault is about it."""
    wrong = faults.FAULTS.get(fault)
    return Compressor if wrong is None or kind == INDEXER or (wrong in faults.RUNNING) == kind.overlap else wrong


def blank(kind: Kind, form: str, entries: int) -> torch.Tensor:
    """Return pages, or rows, for so many entries and one more: noise."""
    if form == "fp32":
        return torch.full((entries + 1, kind.dim), 7.0)
    layout = op.LAYOUTS[form]
    return layout.allocate(-(-(entries + 1) // PAGE), PAGE).fill_(0xA5)


def run(
    tokens: Tokens,
    form: str,
    pieces: Sequence[int] = (),
    *,
    kernel: type = Compressor,
    backend: str = "emulator",
    rotate: bool | None = None,
) -> Run:
    """Compress the tokens, in one call or in calls of so many each. A call of one token is a decode step.

    CSA and indexer keep a ring, HCA a running state, in place 1 of 2. Entry w goes to slot w.
    """
    kind, where = tokens.kind, backends.device(backend)
    rows = (2, 3, kind.dim) if not kind.overlap else (2, kind.pooled, kind.width)
    empty = [torch.full(rows, float("nan"), device=where) for _ in range(1 + kind.overlap)]
    state = op.Ring(*empty) if kind.overlap else op.Running(*empty)
    pages, first, history, hazards = blank(kind, form, tokens.entries).to(where), 0, [], 0
    weights = op.Weights(*(x.to(where) for x in tokens.weights))
    with ExitStack() as stack:
        arch = launching.arch(backend)
        gpu = stack.enter_context(emulator.device(arch, checks="race")) if backend == "emulator" else None
        if backend == "native":  # plans replay what they have seen, not what is injected
            plans.forget()
            stack.callback(plans.forget)
        stack.enter_context(patch.object(op, "Compressor", kernel))
        for count in pieces or (len(tokens.kv),):
            part = slice(first, first + count)
            positions = torch.arange(first, first + count)
            slots = torch.where((positions + 1) % kind.rate == 0, positions // kind.rate, -1).int()
            table = plan(torch.tensor([0, count]), torch.tensor([first]), torch.tensor([1]))
            batch = op.Batch(table.to(where), slots.to(where), count == 1)
            given = (x[part].to(where) for x in (tokens.kv, tokens.gate))
            out = op.Pages(pages, PAGE, form)
            op.compressor(*given, weights, batch, state, out, eps=EPS, rotate=rotate, backend=backend)
            history.append(state[0][1].cpu().clone())
            first += count
        hazards = len(gpu.hazards) if gpu is not None else 0
    return Run(pages.cpu(), history, type(state)(*(x[1].cpu() for x in state)), hazards)


def truth(tokens: Tokens, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, oracle.State]:
    """Return (entries ``[n, dim]``, rows of the ring) of the oracle in fp64.

    No running state; indexer keys are rotated.

    dtype: what entries are rounded to after every step, bf16 before they are quantised; None: nothing.
    """
    kind, count = tokens.kind, len(tokens.kv)
    wide = [x.double() for x in (tokens.kv, tokens.gate, *tokens.weights)]
    table = torch.tensor([[0, count, 0, 0]], dtype=torch.int32)
    batch = oracle.Packed(*wide, table, torch.arange(count) // kind.rate)
    state = oracle.new_state(1, kind.rate, kind.width, kind.overlap, torch.float64, torch.device("cpu"))
    entries, _, state = oracle.compress_packed(batch, state, EPS, dtype)
    return oracle.rounded(hadamard.transform(entries), dtype) if kind == INDEXER else entries, state


def shares(tokens: Tokens, entry: int) -> torch.Tensor:
    """Compute the softmax over the rows that an entry pools, fp64 ``[pooled, dim]``. All its windows exist."""
    kind, rate = tokens.kind, tokens.kind.rate
    positions = torch.arange((entry + 1) * rate - kind.pooled, (entry + 1) * rate)
    z = tokens.gate.double()[positions] + tokens.weights.ape.double()[positions % rate]
    if kind.overlap:
        z = torch.cat((z[:rate, : kind.dim], z[rate:, kind.dim :]))
    return torch.softmax(z, 0)


# ------------------------------------------------------------------ what feeds what


def fed(kind: Kind, tokens: int, kernel: type = Compressor, backend: str = "emulator") -> torch.Tensor:
    """Find which positions the kernel pools into which entry.

    Codes of `viz.model.compressor_windows`, [entries, tokens].

    Every position carries a 1 in a channel of its own, a second one in the other half: what is not 0 has been pooled.
    """
    kv, zero = torch.zeros(tokens, kind.width), torch.zeros(kind.rate, kind.width)
    place = torch.arange(tokens)
    kv[place, place] = 1.0
    if kind.overlap:
        kv[place, kind.dim + APART + place] = 1.0
    marked = Tokens(kind, kv, torch.zeros_like(kv), op.Weights(zero, torch.ones(kind.dim), *_tables(tokens)))
    found = run(marked, "fp32", kernel=kernel, backend=backend).pages[: marked.entries] != 0
    if not kind.overlap:
        return found[:, :tokens] * OWN
    before, own = found[:, :tokens], found[:, APART : APART + tokens]
    return torch.where(own, OWN, before * PREVIOUS)


def intended(kind: Kind, tokens: int) -> torch.Tensor:
    """Return the same map from positions alone."""
    window, entry = torch.arange(tokens) // kind.rate, torch.arange(tokens // kind.rate)[:, None]
    return (window == entry) * OWN + ((window == entry - 1) & kind.overlap) * PREVIOUS


# ------------------------------------------------------------------ counts


def error(found: torch.Tensor, entries: torch.Tensor) -> float:
    """Return the largest difference in units of its entry's largest value. Infinite if one is not finite."""
    ratio = (found[: len(entries)].double() - entries).abs().amax(-1) / entries.abs().amax(-1)
    return float(ratio.nan_to_num(float("inf")).max())


def state_wrong(found: op.Ring, state: oracle.State) -> int:
    """Return the elements of a ring that are not the fp32 sums that they should be."""
    wrong = 0
    for new, (want,) in zip(found, state, strict=True):
        near = (new.double() - want).abs() <= 1.2e-7 * want.abs().amax(-1, keepdim=True)
        wrong += int((~near).sum())  # NaN is not near
    return wrong


def encoded(tokens: Tokens, form: str, entries: torch.Tensor) -> torch.Tensor:
    """Return pages as `formats` write these entries."""
    pages = blank(tokens.kind, form, tokens.entries)
    slots, rows = torch.arange(tokens.entries), entries[: tokens.entries].float()
    if form == "kv":
        kv_entry.append(pages, PAGE, slots, rows)
    else:
        indexer_key.append(pages, PAGE, slots, rows, form)
    return pages


def gathered(pages: torch.Tensor, indices: torch.Tensor, backend: str, adjacent: bool = False) -> torch.Tensor:
    """Gather bf16 ``[n, 512]`` by the op. ``adjacent`` injects a reader's error: 584 bytes in a row are an entry."""
    if not adjacent:
        where = backends.device(backend)
        return kv_gather(pages.to(where), PAGE, indices.to(where), backend=backend).cpu()
    size = kv_entry.LAYOUT.entry_bytes
    rows = pages[:, : PAGE * size].reshape(-1, size)[indices.clamp_min(0).long()]
    found = kv_entry.decode(rows[:, : kv_entry.LAYOUT.data_bytes], rows[:, kv_entry.LAYOUT.data_bytes :])
    return found.masked_fill((indices < 0)[:, None], 0.0)
