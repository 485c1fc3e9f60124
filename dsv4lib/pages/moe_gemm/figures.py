"""Draw figures and tables of the pages on the experts. From a configuration, a trace, or the static model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from dsv4lib import viz
from dsv4lib.dsl import umma
from dsv4lib.dsl.budget import SMEM_LIMIT
from dsv4lib.emulator.trace.trace import Trace
from dsv4lib.formats import e2m1, e4m3, nvfp4, scale_swizzle, weight_modes
from dsv4lib.layers.experts import FORMS
from dsv4lib.ops.moe_gemm import config, faults
from dsv4lib.ops.moe_gemm.inputs import Case, case
from dsv4lib.ops.moe_gemm.sm100 import MoeGemm
from dsv4lib.pages.moe_gemm.run_case import Outcome, expected, mode_case, run_moe_gemm
from dsv4lib.predict import moe
from dsv4lib.reference.router import score_route
from dsv4lib.viz.bars import Panel
from dsv4lib.viz.table import show_table
from dsv4lib.viz.tile import Part
from dsv4lib.viz.timeline import Track
from dsv4lib.viz.tmem import LANES, Region

SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
NOT_FOUND = "not found"
L1 = {"swiglu": True, "routed": True, "out": "nvfp4"}
L2 = {"mode": "w4a8", "out": "fp32"}
# Of the product and of the launch around it; one of each kind of report first.
PRODUCT_FAULTS = ("FirstAccumulates", "FirstScales", "OneScaleId", "FirstRows", "HastyStep")
LAUNCH_FAULTS = ("NoTailMask", "OneBuffer", "GateUpSwapped", "FirstAlpha", "ScaleOfWholeRow")
# Where each injected fault shows: scales and rows in the plain GEMM, whose output is not quantised.
FAULT_SHAPES = {
    name: L2 if name in ("FirstScales", "OneScaleId", "FirstRows", "NoTailMask") else L1 for name in faults.FAULTS
}


# ------------------------------------------------------------------- routing


def routed(model: str, tokens: Sequence[int], seed: int = 0, skew: float = 0.0) -> dict[int, torch.Tensor]:
    """Count tokens of each expert, int64 [E], for batches of so many random tokens. T -> counts.

    Args:
        model: "Flash" or "Pro". skew: size of a component that all tokens share, beside their own: it makes some
            experts the favourites of all tokens.
    """
    experts, width = moe.MODELS[model].experts, 256  # scores of random tokens hardly depend on their width
    generator = torch.Generator().manual_seed(seed)
    gate = torch.nn.functional.normalize(torch.randn(experts, width, generator=generator)).bfloat16()
    common = torch.randn(width, generator=generator)
    out = {}
    for count in tokens:
        x = (torch.randn(count, width, generator=generator) + skew * common).bfloat16()
        picks, _ = score_route(x.float(), gate.float(), torch.zeros(experts), moe.TOP, 1.0)
        out[count] = torch.bincount(picks.flatten(), minlength=experts)
    return out


def load_table(model: str, found: Mapping[int, torch.Tensor]) -> float:
    """Show the loads of each batch. Returns by what share the active experts of all of them differ from the formula."""
    rows, features, seen, formula = [], 2 * moe.MODELS[model].width, 0, 0.0
    for tokens, counts in found.items():
        shape = moe.Shape(model, "nvfp4", tokens)
        tile_n = moe.configurations(shape)[0]["tile_n"]
        tiles = moe.tiles(counts.tolist(), features, tile_n, config.TILE_M)
        multiplied = sum(-(-tile.rows // config.N_STEP) * config.N_STEP for tile in tiles) / (features // config.TILE_M)
        active = int((counts > 0).sum())
        seen, formula = seen + active, formula + shape.active
        line = f"{active} ({shape.active:.1f})", int(counts.max()), tile_n, len(tiles)
        rows.append((tokens, *line, multiplied / (moe.TOP * tokens), 128 * active / (moe.TOP * tokens)))
    heads = "active experts (expected)", "largest load", "tile_n", "tiles of GEMM 1"
    show_table(("tokens", *heads, "rows multiplied a route", "with tokens as M: at least"), rows)
    return abs(seen / formula - 1)


def load_histogram(found: Mapping[int, torch.Tensor], title: str) -> Figure:
    """Draw how many experts have how many tokens, a panel a batch. Beside it what equal chances would give."""
    panels = {}
    for tokens, counts in found.items():
        mean = moe.TOP * tokens / len(counts)
        even = np.array(moe.loads(len(counts), tokens))
        panels[f"{tokens:,} tokens"] = {"routed": counts.numpy() / mean, "equal chances": even / mean}
    return viz.grids.histograms(panels, "load / mean load", title, 40)


# ---------------------------------------------------------- the configuration


def tmem_plan(kernel: MoeGemm) -> list[Region]:
    """List the owners of the columns of tensor memory."""
    n = kernel.tile_n
    plan = [Region(f"sums {i}", 0, LANES, i * n, n) for i in range(kernel.acc_stages)]
    for name, column, width in (
        ("scales of W", kernel.sfw_column, kernel.sfw_columns),
        ("scales of X", kernel.sfx_column, kernel.sfx_columns),
    ):
        if width:
            plan.append(Region(name, 0, LANES, column, width))
    return plan


def columns(kernel: MoeGemm) -> list[tuple[str, int, int]]:
    """(name, first column, end) of what the columns of tensor memory are for."""
    return [(region.name, region.col0, region.col0 + region.cols) for region in tmem_plan(kernel)]


def tile_picture(kernel: MoeGemm) -> Figure:
    """Draw the product of a K step, and the memories. The stages of each ring are one."""
    product = Part("W", config.TILE_M, kernel.step_k, "SMEM"), Part("X^T", kernel.step_k, kernel.tile_n, "SMEM")
    sizes: dict[str, int] = {}
    for name, size in kernel.buffers():
        ring = name.rstrip(" 0123456789")
        sizes[ring] = sizes.get(ring, 0) + size
    title = f"{kernel!r}: a K step of a tile, features x tokens"
    sums = Part("D", config.TILE_M, kernel.tile_n, "TMEM")
    return viz.tile.tile_picture([(*product, sums)], list(sizes.items()), SMEM_LIMIT, tmem_plan(kernel), title)


def scale_block() -> Figure:
    """Draw the byte of each scale in a block of 128 rows x 4. It is as the GEMM reads it from global memory."""
    offsets = [[scale_swizzle.byte_offset(row, col, 4) for col in range(4)] for row in range(128)]
    title = "a block of scales: byte of (row, scale); rows 32 apart are neighbours"
    return viz.layout.grid(np.array(offsets), title, ("row", "scale of the row"), what="byte")


def scales_in_tmem(trace: Trace) -> Figure:
    """Draw the row whose scales each cell of the first copied block holds.

    Also its 16-byte chunks as the trace has them.
    """
    first, picture = copied_rows(trace)
    title = f"columns {first} to {first + umma.SCALE_COLUMNS - 1}: the row of W whose 4 scales a cell holds"
    return viz.layout.grid(picture, title, ("lane", "column"), what="row of W")


def copied_rows(trace: Trace) -> tuple[int, np.ndarray]:
    """Return (first column, the row of W whose scales each cell holds [lane, column]) of the first copied block."""
    copy = trace.tmem[int(np.nonzero(trace.tmem["what"] == "cp")[0][0])]
    source = int(np.nonzero((trace.smem["op"] == copy["op"]) & ~trace.smem["write"])[0][0])
    chunks = np.sort(trace.chunks[source])
    words = (chunks - chunks[0])[:, None] * 16 + 4 * np.arange(umma.SCALE_COLUMNS)  # byte of the block
    held = words // 16 + words % 16 // 4 * 32  # `scale_swizzle`: (row mod 32) * 16 + (row div 32) * 4
    return int(copy["column"]), np.tile(held, (LANES // len(held), 1))


def budget(kernel: MoeGemm, compiled: Any) -> None:
    """Show what a CTA uses of each resource, and what the compiler says."""
    rows = [(r.resource, r.used, r.limit, r.unit, r.derivation) for r in kernel.budget()]
    rows += [
        ("registers", compiled.registers, 65_536 // compiled.threads // 8 * 8, "a thread", "the compiler's number"),
        ("spilled", compiled.local_bytes, 0, "B a thread", "the cubin's local memory"),
    ]
    show_table(("resource", "used", "of", "unit", "why"), rows)


# ------------------------------------------------------------------- schedule


def loaded_tiles(trace: Trace, made: Case, kernel: MoeGemm) -> dict[int, list[moe.Tile]]:
    """Return the tiles of each CTA in the order of loads. From the boxes of its first K steps; rows are 0."""
    found: dict[int, list[moe.Tile]] = {}
    address = {t.address: i for i, t in enumerate(trace.tensors)}
    w, x = address[made.call.w.data_ptr()], address[made.call.x.data_ptr()]
    boxes = trace.boxes[trace.boxes["coords"][:, 0] == 0]
    issued = trace.ops["event"][boxes["op"]]
    offsets = made.call.offsets.tolist()
    for cta in sorted(set(boxes["cta"].tolist())):
        mine = np.nonzero((boxes["cta"] == cta) & np.isin(boxes["tensor"], (w, x)))[0]
        rows: list[int] = []
        for i in mine[np.argsort(issued[mine], kind="stable")]:  # of a tile: boxes of tokens, then one of weights
            _, row, expert, *_ = boxes["coords"][i].tolist()
            if boxes["tensor"][i] == x:
                rows.append(row)
                continue
            found.setdefault(cta, []).append(moe.Tile(expert, row // kernel.pair_m, min(rows) - offsets[expert], 0))
            rows = []
    return found


def schedule_mismatches(trace: Trace, made: Case, kernel: MoeGemm, grid: int, tile_n: int = 0) -> int:
    """Return tiles that a CTA does not load when `predict.moe.tiles` says so. ``tile_n``: another than the kernel's."""
    want = moe.tiles(made.call.counts.tolist(), made.w.shape[1], tile_n or kernel.tile_n, kernel.pair_m)
    found = loaded_tiles(trace, made, kernel)
    wrong = 0
    for cta in range(grid):
        given, should = found.get(cta, []), [tile._replace(rows=0) for tile in want[cta::grid]]
        wrong += sum(a != b for a, b in zip(given, should, strict=False)) + abs(len(given) - len(should))
    return wrong


def schedule_timeline(trace: Trace, made: Case, kernel: MoeGemm) -> Figure:
    """Draw whose tile each CTA multiplies, over time. It goes from the first MMA of a tile to its last."""
    tracks = []
    for cta, order in loaded_tiles(trace, made, kernel).items():
        born = trace.life(cta)[0]
        mine = trace.mmas[trace.mmas["cta"] == cta]
        starts = np.append(np.nonzero(~mine["accumulate"])[0], len(mine))  # the first MMA of a tile overwrites
        first = trace.ops["time"][mine["op"][starts[:-1]]] - born
        last = mine["time"][starts[1:] - 1] - born
        kinds = [f"expert {tile.expert}, {made.call.counts[tile.expert]} tokens" for tile in order]
        tracks.append(Track(f"CTA {cta}", first, last, kinds))
    return viz.timeline.timeline(tracks, "tiles of a persistent launch, by expert")


# ------------------------------------------------------------------- numbers


def hidden(kernel: MoeGemm, made: Case) -> torch.Tensor:
    """Return what the NVFP4 output of the first GEMM stands for. fp64, rows with a token."""
    call, out = made.call, []
    scales = scale_swizzle.unswizzle(call.out_scales, len(made.x), made.w.shape[1] // 2 // nvfp4.BLOCK)
    values = e2m1.decode(e2m1.unpack(call.out), torch.float64)
    values = values * e4m3.decode(scales, torch.float64).repeat_interleave(nvfp4.BLOCK, -1)
    for e, (first, n) in enumerate(zip(call.offsets.tolist(), call.counts.tolist(), strict=True)):
        out.append(values[first : first + n] * call.out_global[e].double())
    return torch.cat(out)


def swiglu_curves(limit: float) -> Figure:
    """Draw silu with and without the clamp, and what the clamp makes of up."""
    gate = torch.linspace(-2 * limit, 2 * limit, 121, dtype=torch.float64)
    silu = torch.nn.functional.silu
    panels = {
        "gate": {"silu(gate)": silu(gate), f"silu(min(gate, {limit:g}))": silu(gate.clamp(max=limit))},
        "up": {"up": gate, f"clip(up, -{limit:g}, {limit:g})": gate.clamp(-limit, limit)},
    }
    return viz.model.curves(gate, panels, "sum times alpha", "factor of h")


def modes(
    counts: list[int], features: int, k: int, seed: int, backend: str, mode_type: type = MoeGemm
) -> dict[str, tuple[Outcome, Case, float]]:
    """Run every precision mode on the same tokens and weights. mode -> (outcome, its case, error of the format)."""
    out = {}
    for mode in FORMS:
        settings, made, exact = mode_case(mode, counts, features, k, seed)
        outcome = run_moe_gemm(mode_type if settings["mode"] == "w4a8" else MoeGemm, settings, made, backend=backend)
        rows = made.rows()
        truth, exact = expected(outcome.kernel, made)[rows], exact[rows]
        out[mode] = outcome, made, float((truth - exact).norm() / exact.norm())
    return out


def modes_table(done: Mapping[str, tuple[Outcome, Case, float]]) -> None:
    """Show what each mode multiplies, and both of its errors."""
    rows = []
    for name, (outcome, _, format_error) in done.items():
        mode = weight_modes.MODES[name]
        line = mode.activations, outcome.kernel.mode.kind, mode.planes, f"{mode.bytes_per_weight:.3f}"
        rows.append((name, *line, f"{outcome.error_over_fp32:.2f}", outcome.clean, f"{format_error:.3f}"))
    heads = "activations", "MMA", "planes", "bytes a weight", "kernel error / fp32's", "clean", "format's error"
    show_table(("mode", *heads), rows)


def mode_errors(done: Mapping[str, tuple[Outcome, Case, float]]) -> Figure:
    """Draw errors of the largest group against fp64 of the same operands. Mode by mode, in units of each row's size."""
    maps = {}
    for name, (outcome, made, _) in done.items():
        counts = made.call.counts
        first, n = (int(x[counts.argmax()]) for x in (made.call.offsets, counts))
        truth = expected(outcome.kernel, made)[first : first + n]
        size = truth.square().mean(1, keepdim=True).sqrt()
        maps[name] = ((made.call.out[first : first + n].double() - truth).abs() / size).numpy()
    return viz.grids.block_maps(maps, ("token", "feature", "error / row RMS"), "against fp64 of the same operands")


def output_bytes(made: Case) -> bytes:
    """List all that a launch wrote."""
    call = made.call
    return b"".join(x.view(torch.uint8).numpy().tobytes() for x in (call.out, call.out_scales) if x is not None)


def schedules(run: Callable[[str], Outcome], made: Case) -> tuple[list[Outcome], int]:
    """Run under every schedule of the emulator. Shows and returns (outcomes, outputs that differ from the first)."""
    runs, outputs = [], []
    for name in SCHEDULES:
        runs.append(run(name))
        outputs.append(output_bytes(made))
    hashes = [f"{r.result.schedule_hash & 0xFFFFFFFF:08x}" if r.result else "" for r in runs]
    same = [out == outputs[0] for out in outputs]
    rows = zip(SCHEDULES, hashes, (r.right for r in runs), same, (len(r.hazards) for r in runs), strict=True)
    show_table(("schedule", "interleaving", "right", "bytes as the first", "hazards"), list(rows))
    return runs, same.count(False)


def show_faults(names: Sequence[str], sound: bool = False) -> int:
    """Run injected faults, show what finds them, and return how many were missed.

    Args:
        sound: run the kernel without the fault instead: nothing may be found.
    """
    table = []
    for name in names:
        options = FAULT_SHAPES[name]
        made = case(MoeGemm(**options), [33, 0, 1, 2], 128, 384)  # a second tile, an empty group, one token
        outcome = run_moe_gemm(MoeGemm if sound else faults.FAULTS[name], options, made, schedule="adversarial")
        found = [finding for finding in outcome.findings() if finding[0] == faults.CAUGHT_BY[name]]
        table.append((name, outcome.right, *(found or [(NOT_FOUND, "", "")])[0]))
    show_table(("fault", "numbers right", "found as", "where", "what the lab says"), table)
    return sum(row[2] == NOT_FOUND for row in table)


# ---------------------------------------------------------------------- costs


def costs(configurations: Mapping[str, dict[str, Any]], kernel_type: type = MoeGemm) -> dict[str, moe.Counted]:
    """Show what K steps and tiles of configurations cost, counted in traces. name -> counts."""
    found = {name: moe.counted(kernel_type, **options) for name, options in configurations.items()}
    table = []
    for name, c in found.items():
        for rows in (1, c.tile_n):
            step, transition = c.step_of(rows), c.transition_of(rows)
            (form, mmas), *_ = step.mma.items()
            line = [step.load_bytes / 1024, step.smem_mma_bytes / 1024, step.instructions, transition.instructions]
            line += [transition.tmem_load_bytes / 1024, transition.smem_thread_bytes / 1024, transition.convert]
            table.append((name, rows, f"{mmas:g} x {form.n}", *map(round, line)))
    heads = ["MMAs x N a step", "TMA KiB", "SMEM read KiB", "instructions"]
    heads += ["instructions a tile", "TMEM KiB", "exchange KiB", "conversions"]
    show_table(("kernel", "tokens of the tile", *heads), table)
    return found


def bytes_off(found: Mapping[str, moe.Counted], configurations: Mapping[str, dict[str, Any]]) -> int:
    """Return how many bytes TMA's loads differ from what the configurations say. For K steps of full tiles."""
    off = 0.0
    for name, options in configurations.items():
        kernel = MoeGemm(**options)
        of_w = config.W_BYTES * kernel.mode.w_bits // kernel.mode.x_bits
        said = of_w + kernel.x_bytes + kernel.sfw_bytes + kernel.sfx_bytes
        off += abs(found[name].step_of(kernel.tile_n).load_bytes - said)
    return round(off)


def cost_bars(found: Mapping[str, moe.Counted], gpu: Any) -> Figure:
    """Draw the clocks that resources of an SM need for a K step. Of 16 tokens and of a full tile."""
    names = [f"{name}, {rows} tokens" for name, c in found.items() for rows in (16, c.tile_n)]
    needs = [moe.resources(c.step_of(rows), gpu) for c in found.values() for rows in (16, c.tile_n)]
    whats = "tensor core", "SMEM", "TMA in", "L2"
    panels = [Panel(f"{what}, clocks a K step", [need[what] for need in needs], "{:.0f}") for what in whats]
    return viz.bars.side_by_side(
        names, panels, ["16 tok" in n for n in names], "what a K step needs of an SM of a B200"
    )


PREDICTED = (
    "model",
    "mode",
    "tokens",
    "active",
    "tile_n",
    "GEMM 1 us",
    "GEMM 2 us",
    "of them fixed",
    "other launches",
    "layer us",
    "model's error",
    "bound",
    "floor us",
    "of the floor",
    "shared us",
    "published",
)


def predicted(rows: Sequence[moe.Row]) -> list[tuple]:
    """Return the cells of the static model's table, see `PREDICTED`."""
    return [
        (
            row.model,
            row.mode,
            row.tokens,
            row.active,
            f"{row.tile_n}{' pair' * (row.ctas > 1)}",
            *(f"{us:.1f}" for us in (row.gemm1_us, row.gemm2_us, row.fixed_us, row.others_us, row.modelled_us)),
            f"{row.error_low:+.0%} .. {row.error_high:+.0%}",
            row.bound,
            f"{row.floor_us:.1f}",
            f"{row.fraction:.0%}",
            f"{row.shared_us:.1f}",
            row.published,
        )
        for row in rows
    ]


def predictions(rows: Sequence[moe.Row]) -> None:
    """Show the table of one model, and what others have published next to it."""
    show_table(PREDICTED[1:-1], [line[1:-1] for line in predicted(rows)])
    known = [(row.mode, row.tokens, f"{row.modelled_us:.1f}", row.published) for row in rows if row.published]
    show_table(("mode", "tokens", "modelled us", "published"), known)


def rooflines(rows: Sequence[moe.Row]) -> Figure:
    """Draw the static model's rates under the roofs."""
    title = "Routed experts on a B200: modelled, not measured"
    return viz.roofline.roofline(moe.points(list(rows)), moe.RECIPES["nvfp4"].peak / 1e12, {"HBM 8 TB/s": 8.0}, title)
