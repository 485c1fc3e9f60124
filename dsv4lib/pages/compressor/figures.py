"""Figures and tables of the page on the KV compressor, from runs of `run_case`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from matplotlib.figure import Figure

from dsv4lib import viz
from dsv4lib.config import FLASH, PRO, LayerKind, fixed_cache_bytes
from dsv4lib.formats import kv_entry
from dsv4lib.ops.compressor import faults
from dsv4lib.pages.compressor import run_case
from dsv4lib.pages.compressor.run_case import CSA, HCA, INDEXER, PAGE, Run, Tokens
from dsv4lib.viz.bars import Panel, side_by_side
from dsv4lib.viz.diagram import pipeline
from dsv4lib.viz.kinds import colour
from dsv4lib.viz.table import show_table

FP32 = 4  # bytes
STATES = {  # what is kept of a request and layer: (layers that keep it, bytes)
    "CSA: ring of 8 rows": (LayerKind.CSA, 2 * CSA.pooled * CSA.width * FP32),
    "indexer: ring of 8 rows": (LayerKind.CSA, 2 * INDEXER.pooled * INDEXER.width * FP32),
    "HCA: ring of 128 rows": (LayerKind.HCA, 2 * HCA.pooled * HCA.width * FP32),
    "HCA: running softmax": (LayerKind.HCA, 3 * HCA.dim * FP32),
}
BYTES = ("E4M3, dims 0..447", "bf16, dims 448..511 (RoPE)", "UE8M0 scale", "padding of the scales")


def flow() -> Figure:
    """Draw the flow from projected rows to bytes in a page, for the three compressors."""
    end = [
        ("RMSNorm", "over the entry", colour("transform")),
        ("RoPE", "last 64 dims, position w rate", colour("transform")),
    ]
    kv = ("584 bytes", "FP8 and bf16", colour("storage"))
    lanes = {
        "CSA, a window of 4 tokens": [
            ("kv | gate", "1024 columns: Ca, Cb", colour("given")),
            ("+ ape", "by place in the window", colour("transform")),
            ("softmax", "8 slots: Ca of w-1, Cb of w", colour("transform")),
            *end,
            kv,
        ],
        "HCA, a window of 128 tokens": [
            ("kv | gate", "512 columns", colour("given")),
            ("+ ape", "by place in the window", colour("transform")),
            ("softmax", "128 slots of window w", colour("transform")),
            *end,
            kv,
        ],
        "indexer, a window of 4 tokens": [
            ("kv | gate", "256 columns: Ca, Cb", colour("given")),
            ("+ ape", "by place in the window", colour("transform")),
            ("softmax", "8 slots: Ca of w-1, Cb of w", colour("transform")),
            *end,
            ("Hadamard", "128 dims mixed", colour("transform")),
            ("68 bytes", "FP4, a scale per 32", colour("storage")),
        ],
    }
    return pipeline(lanes, "one launch: projected rows in, packed entries out")


def channels(tokens: Tokens, entry: int, count: int = 12) -> Figure:
    """Draw how the first channels of an entry with overlap share themselves. They share among its slots."""
    rate = tokens.kind.rate
    part = run_case.shares(tokens, entry)[:, :count]
    names = [f"t {(entry - 1) * rate + i} {'Ca' if i < rate else 'Cb'}" for i in range(2 * rate)]
    title = f"CSA, entry {entry}: softmax over its slots, in each channel anew"
    columns = [str(i) for i in range(count)]
    return viz.grids.value_map(part, names, columns, ("slot", "channel", "share"), title, "{:.2f}")


def leaders(kinds: dict[str, tuple[Tokens, int]]) -> Figure:
    """Draw the histogram over channels of the largest share that one position has."""
    panels = {name: {"channels": run_case.shares(*given).amax(0)} for name, given in kinds.items()}
    return viz.grids.histograms(panels, "largest share of one slot", "largest weight of each channel", 32)


def held(tokens: Tokens, steps: Run) -> torch.Tensor:
    """Which position's row each slot of the ring holds after every step, -1: none. Read from the states themselves."""
    same = torch.stack([(state[:, None] == tokens.kv).all(-1) for state in steps.history])
    return torch.where(same.any(-1), same.int().argmax(-1), -1)


def state_bytes() -> Figure:
    """Draw what a request keeps between calls: a layer's, and a model's."""
    layer = [size / 1024 for _, size in STATES.values()]
    panels = [Panel("KiB a layer", layer, "{:,.0f}")]
    for name, config in (("Flash", FLASH), ("Pro", PRO)):
        total = [len(config.layers_of(kind)) * size / 2**20 for kind, size in STATES.values()]
        panels.append(Panel(f"MiB a request of {name}", total, "{:.2f}"))
    marked = ["running" in name for name in STATES]
    return side_by_side(list(STATES), panels, marked, "state of the compressors, fp32", 3)


def state_table() -> int:
    """Show the totals of both models with either state of HCA. Returns by how many bytes they miss `dsv4lib.config`."""
    lines, missed = [], 0
    for name, config in (("Flash", FLASH), ("Pro", PRO)):
        sums = {key: len(config.layers_of(kind)) * size for key, (kind, size) in STATES.items()}
        running = sums.pop("HCA: running softmax")
        rows = sum(sums.values())
        lean = rows - sums["HCA: ring of 128 rows"] + running
        missed += abs(rows - fixed_cache_bytes(config)["state"])
        lines.append((name, f"{rows / 2**20:.2f}", f"{lean / 2**20:.2f}", f"{rows / lean:.1f}"))
    show_table(("model", "rows, MiB a request", "HCA running, MiB", "factor"), lines)
    return missed


def page_map() -> Figure:
    """Draw a page of entries, byte by byte, as `formats.kv_entry.LAYOUT` cuts it."""
    size = kv_entry.LAYOUT.page_bytes(PAGE)
    offsets = torch.arange(size)
    codes = torch.full((size,), -1)
    data, scales = kv_entry.LAYOUT.data_bytes, kv_entry.LAYOUT.scale_bytes
    past = offsets - PAGE * data
    codes = torch.where(past < 0, (offsets % data >= kv_entry.NOPE).int(), codes)
    inside = (past >= 0) & (past < PAGE * scales)
    codes = torch.where(inside, 2 + (past % scales >= kv_entry.GROUPS).int(), codes)
    return viz.grids.byte_map(codes, BYTES, f"a page of {PAGE} entries: {size:,} bytes")


def entry_bytes(pages: torch.Tensor, entry: int, values: torch.Tensor) -> None:
    """Show one stored entry group by group. First bytes, scale, and what they stand for beside what went in."""
    data, scales, _ = kv_entry.LAYOUT.read(pages, PAGE, torch.tensor([entry]))
    back = kv_entry.decode(data, scales, torch.float32)[0]
    rows = []
    for group in range(kv_entry.GROUPS + 1):
        dim = group * kv_entry.GROUP
        rope = group == kv_entry.GROUPS
        scale = "none" if rope else f"{int(scales[0, group]):#04x} = 2^{int(scales[0, group]) - 127}"
        codes = " ".join(f"{int(b):02x}" for b in data[0, dim : dim + 4])
        count = 2 if rope else 4
        shown = [", ".join(f"{float(v):.5g}" for v in x[dim : dim + count]) for x in (values, back)]
        rows.append((f"{dim}..{dim + 63}", "bf16" if rope else "E4M3", f"{dim}", codes, scale, *shown))
    show_table(("dims", "as", "from byte", "first bytes", "scale", "went in", "comes back"), rows)


def step_bytes() -> dict[str, int]:
    """Show what a decode step of one request that closes a window must move. Weights are left out; returns the sums."""
    entry, part, sums, lines = kv_entry.LAYOUT.entry_bytes, 3 * HCA.dim * FP32, {}, []
    for name, kind, running in (
        ("CSA", CSA, False),
        ("HCA, state of rows", HCA, False),
        ("HCA", HCA, True),
    ):
        row = 2 * kind.width * FP32  # of kv and gate
        rows = row if running else kind.pooled * 2 * kind.dim * FP32  # the newest one is the call's
        parts = rows, part if running else 0, 0 if running else row, entry
        sums[name] = sum(parts)
        lines.append((name, *(f"{n:,}" for n in (*parts, sums[name]))))
    show_table(("step", "rows read", "running state read", "row written", "entry", "bytes"), lines)
    return sums


def show_faults(kernels: Sequence[type], tokens: int, seed: int, backend: str) -> int:
    """Show what faulty kernels do to CSA (of the running state: to HCA). Returns how many go unnoticed.

    A race's numbers may come out right, and only the emulator reports it: natively that fault is left out.
    """
    lines, unseen = [], 0
    if backend == "native" and faults.WarpsNotAwaited in kernels:
        kernels = [kernel for kernel in kernels if kernel is not faults.WarpsNotAwaited]
        print("WarpsNotAwaited is left out: its numbers may come out right, and only the emulator reports the race")
    for kernel in kernels:
        kind = HCA if kernel in faults.RUNNING else CSA
        given = run_case.draw(kind, 2 * HCA.rate if kind == HCA else tokens, seed)
        found = run_case.run(given, "fp32", kernel=kernel, backend=backend)
        entries, state = run_case.truth(given)
        off = run_case.error(found.pages, entries)
        fed = run_case.fed(kind, len(given.kv) if kind == HCA else min(tokens, run_case.APART), kernel, backend)
        wrong = int((fed != run_case.intended(kind, fed.shape[1])).sum())
        kept = run_case.state_wrong(found.state, state) if kind.overlap else 0
        unseen += off < 1e-4 and not wrong and not kept
        lines.append((kernel.__name__, (kernel.__doc__ or "").split("\n")[0], wrong, f"{off:.2g}", kept))
    show_table(("kernel", "what it does", "cells of the map", "error", "elements of the state"), lines)
    return unseen
