"""Draw what every page of the attention ladder shows. It comes from a kernel's configuration and a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from dsv4lib import viz
from dsv4lib.dsl.budget import SMEM_LIMIT
from dsv4lib.dsl.compile import CompileError
from dsv4lib.ops.fmha import config, faults, ladder
from dsv4lib.ops.fmha.ladder import Ladder
from dsv4lib.pages.emulator import figures
from dsv4lib.pages.fmha.run_case import Outcome, bits
from dsv4lib.viz import kinds
from dsv4lib.viz.style import show
from dsv4lib.viz.table import show_table
from dsv4lib.viz.tile import Part
from dsv4lib.viz.tmem import LANES, Region

SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
NOT_FOUND = "not found"
_Q, _S, _P, _O = (kinds.colour(tensor) for tensor in "QSPO")


def tmem_plan(kernel: Any) -> list[Region]:
    """List the owners of the columns and lanes of tensor memory."""
    if isinstance(kernel, Ladder):
        n, half = ladder.TILE_N, ladder.TILE_N // 2
        plan = [Region(f"S {i}", 0, LANES, i * n, n, _S) for i in range(ladder.S_STAGES)]
        if kernel.stage != "a":
            for i in range(ladder.S_STAGES):  # P over the first half of its S
                plan[2 * i : 2 * i + 1] = [
                    Region(f"S {i}\nthen\nP {i}", 0, LANES, i * n, half, _P),
                    Region(f"S {i}", 0, LANES, i * n + half, half, _S),
                ]
            plan.append(Region("O, fp32", 0, LANES, ladder.O_COLUMN, kernel.head_dim, _O))
        return plan
    half, width, m = LANES // 2, kernel.pv_n // 2, config.TILE_M
    plan = []
    for part in range(kernel.head_dim // kernel.pv_n):
        for i in range(2):
            first = part * kernel.pv_n + i * width
            plan.append(Region(f"O {first}-{first + width - 1}", i * half, m, part * width, width, _O))
    q, s = kernel.q_column, kernel.s_column
    for i, name in enumerate(("even", "odd")):
        plan.append(Region(f"Q {name}", i * half, m, q, s - q, _Q))
        for slot in range(config.S_STAGES):
            plan.append(Region(f"S {slot} {name}", i * half, m, s + slot * config.TILE_N, config.TILE_N, _S))
    return plan


def o_places(kernel: Any) -> np.ndarray:
    """Return the (lane, column) of each element of O of a production kernel, int [64, head_dim, 2]."""
    out = np.full((config.TILE_M, kernel.head_dim, 2), -1)
    for region in tmem_plan(kernel):
        if region.name.startswith("O "):
            first, last = map(int, region.name[2:].split("-"))
            out[:, first : last + 1, 0] = region.lane0 + np.arange(region.lanes)[:, None]
            out[:, first : last + 1, 1] = region.col0 + np.arange(region.cols)
    return out


def columns(kernel: Any) -> list[tuple[str, int, int]]:
    """(name, first column, end) of what the columns of tensor memory are for."""
    if isinstance(kernel, Ladder):
        n, stages = ladder.TILE_N, ladder.S_STAGES
        names = [(f"S {i}" if kernel.stage == "a" else f"S, P {i}", i * n, (i + 1) * n) for i in range(stages)]
        return names if kernel.stage == "a" else [*names, ("O", ladder.O_COLUMN, ladder.O_COLUMN + kernel.head_dim)]
    n, s = config.TILE_N, kernel.s_column
    slots = [(f"S {i}", s + i * n, s + (i + 1) * n) for i in range(config.S_STAGES)]
    return [("O", 0, kernel.q_column), ("Q", kernel.q_column, s), *slots]


def tile_picture(kernel: Any) -> Figure:
    """Draw the products of a CTA and the memories of their operands. They come from the kernel's configuration."""
    if isinstance(kernel, Ladder):
        (m, n), q_in, p_in = (ladder.TILE_M, ladder.TILE_N), "SMEM", "TMEM"
    else:
        (m, n), q_in, p_in = (config.TILE_M, config.TILE_N), "TMEM", "SMEM"
    d = kernel.head_dim
    products = [(Part("Q", m, d, q_in), Part("K^T", d, n, "SMEM"), Part("S", m, n, "TMEM"))]
    if getattr(kernel, "stage", "") != "a":
        products.append((Part("P", m, n, p_in), Part("V (= K)", n, d, "SMEM"), Part("O", m, d, "TMEM")))
    title = f"{kernel!r}: what a CTA computes for one KV tile, and where"
    return viz.tile.tile_picture(products, kernel.buffers(), SMEM_LIMIT, tmem_plan(kernel), title)


def gathers(trace: Any, kernel: Any, case: Any, cta: int = 0) -> Figure:
    """Draw the which rows of the pool and of the window one CTA gathers, tile by tile."""
    wanted = [("entries", case.pool)] * (kernel.entries != "none") + [("window keys", case.span)] * kernel.window
    found = [(name, figures.gathered(trace, operand, cta)) for name, operand in wanted]
    found = [(name, rows) for name, rows in found if len(rows)]
    rows = np.concatenate([rows for _, rows in found])
    groups = [(name, len(mine)) for name, mine in found]
    return viz.tma.gathers(
        rows, groups, config.TILE_N, f"CTA {cta}: rows loaded, 4 rows x 128 B a chunk, or 64 of a whole tile"
    )


def memories(trace: Any, kernel: Any, cta: int = 0) -> None:
    """Show a CTA's shared memory and its tensor memory over time. Also the swizzle of its first tile."""
    show(figures.smem_map(trace, kernel, cta))
    show(figures.swizzle(trace, ladder.TILE_N if isinstance(kernel, Ladder) else config.TILE_N))
    show(figures.tmem_columns(trace, columns(kernel), cta))


def budget(kernel: Any, compiled: Any) -> None:
    """Show what a CTA uses of each resource, and what the compiler says."""
    rows = [(r.resource, r.used, r.limit, r.unit, r.derivation) for r in kernel.budget()]
    rows += [
        ("registers", compiled.registers, 65_536 // compiled.threads // 8 * 8, "a thread", "the compiler's number"),
        ("spilled", compiled.local_bytes, 0, "B a thread", "the cubin's local memory"),
        ("SMEM at launch", compiled.smem_bytes, SMEM_LIMIT, "B", "the launch asks for it"),
    ]
    show_table(("resource", "used", "of", "unit", "why"), rows)
    print(f"compiled in {compiled.seconds:.1f} s")


def schedules(run: Callable[[str], Outcome]) -> list[Outcome]:
    """Run under every schedule of the emulator. Shows what came out, and returns the outcomes."""
    runs = [run(name) for name in SCHEDULES]
    hashes = [f"{r.result.schedule_hash & 0xFFFFFFFF:08x}" if r.result else "" for r in runs]
    same = [r.error is None and bits(r.output) == bits(runs[0].output) for r in runs]
    table = [(name, h, r.right, s, len(r.hazards)) for name, h, r, s in zip(SCHEDULES, hashes, runs, same, strict=True)]
    show_table(("schedule", "interleaving", "right", "bits as the first", "hazards"), table)
    return runs


def different(runs: Iterable[Outcome]) -> int:
    """Count how many results differ from the first in any bit."""
    first, *rest = (bits(run.output) for run in runs)
    return sum(other != first for other in rest)


def show_faults(
    stage: str,
    run: Callable[[type], Outcome],
    sound: type | None = None,
    others: Mapping[str, tuple[Outcome, str]] | None = None,
) -> int:
    """Run every injected fault of a stage, show what finds it. Returns how many were found as they should be.

    Args:
        stage: as in `faults.CAUGHT_BY`.
        run: from a kernel class to an outcome.
        sound: run this class instead of the faulty ones: nothing may be found.
        others: further faults, of the caller's: name -> (outcome, what finds it).
    """
    table = []
    for name, (owner, kind) in {**faults.CAUGHT_BY, **faults.REFUSED}.items():
        if owner == stage:
            table.append(_tried(name, kind, run, sound or faults.FAULTS[name]))
    for name, (outcome, kind) in (others or {}).items():
        table.append(_tried(name, kind, lambda _, outcome=outcome: outcome, Ladder))
    show_table(("fault", "numbers right", "found as", "where", "what the lab says"), table)
    return sum(row[2] != NOT_FOUND for row in table)


def _tried(name: str, kind: str, run: Callable[[type], Outcome], kernel_type: type) -> tuple:
    """(fault, numbers right, found as, where, what) of one fault; ``kind`` of one that is refused: words of it."""
    try:
        outcome = run(kernel_type)
    except CompileError as error:
        message, _, place = str(error).rpartition(" (")
        found = [("CompileError", place.rstrip(")"), message)] if kind in message else []
        return name, "does not compile", *(found or [(NOT_FOUND, "", str(error))])[0]
    found = [finding for finding in outcome.findings() if finding[0] == kind]
    return name, outcome.right, *(found or [(NOT_FOUND, "", "")])[0]
