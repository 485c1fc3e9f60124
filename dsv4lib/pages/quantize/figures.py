"""Draw figures and tables of the page on 4-bit weights. From formats, samples and the compiler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from matplotlib.figure import Figure

from dsv4lib import viz
from dsv4lib.dsl import block_scale_probe
from dsv4lib.formats import e2m1, e4m3, nvfp4, ue8m0, weight_modes
from dsv4lib.formats.floatcodec import E2M1, E2M3, E3M2, E4M3, E5M2
from dsv4lib.formats.nvfp4 import NVFP4Tensor
from dsv4lib.formats.weight_modes import MODES, MX_GROUP
from dsv4lib.pages.quantize import run_case
from dsv4lib.pages.quantize.run_case import Conversion, Error, Expert, Sample
from dsv4lib.viz.bars import Panel, side_by_side
from dsv4lib.viz.table import show_table

TARGETS = ("sm_100a", "sm_100f", "sm_103a")


def code_grids() -> Figure:
    """Draw the values of every element and scale format of the lab."""
    grids = {f.name: f.values().numpy() for f in (E2M1, E2M3, E3M2, E4M3, E5M2)}
    grids["E8M0"] = ue8m0.decode(torch.arange(255).to(torch.uint8), torch.float64).numpy()
    return viz.grids.number_lines(grids, "every format: how many positive values, and where")


def product_map() -> Figure:
    """Draw the relative rounding error of E4M3(c * s). Code by mantissa of the block scale, far from underflow."""
    codes = E2M1.values()[1:8]
    mantissas = 1 + torch.arange(8, dtype=torch.float64) / 8
    exact = codes[:, None] * mantissas
    off = (e4m3.decode(e4m3.encode(exact), torch.float64) - exact).abs() / exact
    names = [f"{v:g}" for v in codes.tolist()], [f"{v:g}" for v in mantissas.tolist()]
    labels = ("code c", "mantissa of the block scale s", "percent")
    return viz.grids.value_map(100 * off, *names, labels, "rounding of c * s to E4M3, percent of the value", "{:.1f}")


def block_errors(sample: Sample, modes: Sequence[str], rows: int = 32, blocks: int = 112) -> Figure:
    """Draw the relative error of each block of 32 in some modes, one raster a mode."""
    exact = sample.values[:rows, : blocks * MX_GROUP].unflatten(-1, (-1, MX_GROUP))
    maps = {}
    for mode in modes:
        got = weight_modes.dequantize(weight_modes.convert(sample.quantized, mode), torch.float64)
        got = got[:rows, : blocks * MX_GROUP].unflatten(-1, (-1, MX_GROUP))
        maps[mode] = ((got - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(min=1e-30)).numpy()
    return viz.grids.block_maps(maps, ("row", "block of 32", "relative error"), "error of every block")


def error_by_code(sample: Sample, modes: Sequence[str]) -> Figure:
    """Share of the squared error that falls on each code's magnitude, a panel a mode."""
    codes = e2m1.unpack(sample.quantized.packed).to(torch.int64) & 7
    names = [f"{v:g}" for v in E2M1.values()[:8].tolist()]
    panels = []
    for mode in modes:
        got = weight_modes.dequantize(weight_modes.convert(sample.quantized, mode), torch.float64)
        squared = (got - sample.values).square()
        shares = torch.zeros(8, dtype=torch.float64).index_add(0, codes.flatten(), squared.flatten())
        panels.append(Panel(f"{mode}: % of squared error", (100 * shares / shares.sum()).tolist(), "{:.1f}"))
    return side_by_side(
        [f"|c| = {n}" for n in names], panels, [n in ("1.5", "3", "6") for n in names], "which codes", 3
    )


def scale_ratios(sample: Sample) -> Figure:
    """Draw the factor by which the naive conversion changes each block of 16."""
    q = sample.quantized
    was = e4m3.decode(q.scales, torch.float64) * q.global_scale.to(torch.float64)
    pair = was.unflatten(-1, (-1, 2))
    merged = pair.amax(-1, keepdim=True).expand_as(pair).flatten(-2)
    naive = ue8m0.decode(weight_modes.naive_ue8m0(q).scales, torch.float64).repeat_interleave(2, -1)
    good = was > 0
    cut = torch.exp2(torch.floor(torch.log2(was[good]))) / was[good]
    panels = {
        "the exponent alone": {"cut / was": cut},
        "the maximum of two": {"larger / was": (merged / was)[good].clamp(max=4)},
        "both": {"used / was": (naive / was)[good].clamp(max=4)},
    }
    title = "what becomes of a block's scale while its codes stay"
    return viz.grids.histograms(panels, "new scale / old scale", title, 60, (1.0, "right"))


def modes_table(sample: Sample) -> dict[str, Error]:
    """Show every mode with what it stores, reads and loses; returns mode -> error."""
    errors = {}
    for name in MODES:
        values = weight_modes.dequantize(weight_modes.convert(sample.quantized, name), torch.float64)
        errors[name] = run_case.error(values, sample.values)
    rows = [
        (
            m.name,
            f"{m.bytes_per_weight:.3f}",
            m.activations,
            m.mma,
            m.planes,
            f"{errors[m.name].db:.2f}",
            f"{errors[m.name].cos:.5f}",
        )
        for m in MODES.values()
    ]
    show_table(("mode", "bytes a weight", "activations", "instruction", "planes", "dB", "cos"), rows)
    return errors


def conversions(done: Sequence[Conversion]) -> None:
    """Show the table of conversions beside the recorded one."""
    known = run_case.recorded()

    def cell(db: float, row: str, column: str) -> str:
        was = known.get(row, {}).get(column)
        shown = "exact" if db == np.inf else f"{db:.2f}"
        return shown if was is None else f"{shown} ({'exact' if was == np.inf else f'{was:g}'})"

    names = [n for n in done[0].errors if run_case.OTHER not in n]
    first = names[0]
    rows = [
        (
            row.name,
            row.bits,
            *(cell(row.errors[n].db, row.name, n) for n in names),
            cell(row.original[first].db, row.name, f"{first}, original"),
            f"{row.errors[first].cos:.4f}",
            f"{row.errors[first].gain:.3f}",
            f"{row.errors[first].relative:.4f}",
        )
        for row in done
    ]
    heads = (*(f"{n}, dB" for n in names), "original, dB", "cos", "gain", "relative error")
    show_table(("conversion", "bits", *heads), rows)


def expert_table(one: Expert, rows: Sequence[str], activations: Sequence[str]) -> dict[tuple[str, str], Error]:
    """Show one expert's error by weights and activations. Returns (row, activations) -> error.

    The reference has exact NVFP4 weights and bf16 activations; the cosine is against the unquantised fp32 expert.
    """
    convert = {row.name: row.convert for row in run_case.ROWS}
    original = one.run(one.original, "fp32")
    reference = one.run(one.weights(convert["nvfp4"]), "bf16")
    out, shown = {}, []
    for row in rows:
        weights = one.weights(convert[row])
        line = [row]
        for kind in activations:
            y = one.run(weights, kind)
            out[row, kind] = run_case.error(y, reference)
            line.append(f"{out[row, kind].relative:.3f} (cos {run_case.error(y, original).cos:.4f})")
        shown.append(line)
    show_table(("weights", *activations), shown)
    return out


def instruction_variants(targets: Mapping[str, str]) -> int:
    """Show which MMA variants ptxas accepts for each target. Return how many answers are not as recorded.

    Args:
        targets: heading -> target.
    """
    rows, wrong = [], 0
    for kind, blocks in block_scale_probe.KINDS.items():
        for block in blocks:
            line = [f"kind::{kind}", f".{block}"]
            for heading, target in targets.items():
                said = block_scale_probe.refusal(kind, block, target)
                expected = heading.endswith("f") and block.startswith("scale_vec")
                wrong += (said is not None) != expected
                line.append("takes it" if said is None else said)
            rows.append(line)
    show_table(("kind", "block of a scale", *targets), rows)
    return wrong


def exact_difference(mode: str, lo: bool = True, twice: bool = False) -> float:
    """Return the largest |difference| between a mode and NVFP4. All 16 codes under all 127 x 127 pairs of block scales.

    Args:
        mode: key of `MODES`.
        lo: False injects a fault: only the first plane is multiplied.
        twice: True injects another: through E4M3 on the way.
    """
    first, second = torch.meshgrid(torch.arange(127), torch.arange(127), indexing="ij")
    scales = torch.stack([first.flatten(), second.flatten()], dim=-1).to(torch.uint8)
    packed = e2m1.pack(torch.arange(16).to(torch.uint8).repeat(2))[None].expand(len(scales), MX_GROUP // 2)
    q = NVFP4Tensor(packed, scales, torch.tensor(1.0))
    weight = weight_modes.convert(q, mode)
    planes = weight.planes if lo else weight.planes[:1]
    values = sum(weight_modes.plane_values(plane) for plane in planes)
    values = e4m3.decode(e4m3.encode(values), torch.float64) if twice else values
    return float((values - nvfp4.dequantize(q, torch.float64)).abs().max())


def frontier(done: Sequence[Conversion]) -> Figure:
    """Draw the bits a weight and what is lost, conversion by conversion. Lost against the weights before NVFP4."""
    names = [row.name for row in done]
    loss = [max(row.original["gaussian"].db, 0.0) for row in done]
    panels = [
        Panel("bits a weight", [row.bits for row in done], "{:.2f}"),
        Panel("signal over noise against the original weights, dB", loss, "{:.1f}"),
    ]
    return side_by_side(names, panels, [n in MODES for n in names], "what is stored, and what is left of the weights")


def operand_differences(sample: Sample, scales_in_order: bool = False) -> int:
    """Return the elements of a gate/up operand that differ. They do not come back as the weights that went in.

    Two halves of the sample are gate and up; the operand is read as the GEMM reads it: row, nibble, place of the scale.

    Args:
        sample: at least 16 rows; the first 2 I of them are used, I a multiple of 8.
        scales_in_order: an injected fault: the scales do not follow their rows.
    """
    from dsv4lib.formats import scale_swizzle
    from dsv4lib.loader import operands
    from dsv4lib.loader.experts import Experts

    q, half = sample.quantized, len(sample.values) // 16 * 8
    gate, up = (NVFP4Tensor(q.packed[s], q.scales[s], q.global_scale) for s in (slice(half), slice(half, 2 * half)))
    first, _ = operands.gemm_weights(Experts("nvfp4", (gate,), (up,), (gate,), None), "nvfp4")
    (plane,) = first.planes
    codes, image = plane.codes[0], plane.scales[0]
    if scales_in_order:
        image = scale_swizzle.swizzle(torch.cat([gate.scales, up.scales]))
    cols = codes.shape[1] * 2
    rows = torch.arange(2 * half)
    at = torch.tensor([[scale_swizzle.byte_offset(r, c, cols // 16) for c in range(cols // 16)] for r in rows.tolist()])
    values = e2m1.decode(e2m1.unpack(codes), torch.float64)
    values = values * e4m3.decode(image[at], torch.float64).repeat_interleave(nvfp4.BLOCK, -1)
    runs = rows // 8
    source = torch.where(runs % 2 == 0, 0, half) + runs // 2 * 8 + rows % 8
    alphas = first.alphas[0].to(torch.float64)[runs % 2, None]
    return int((values * alphas != sample.values[source]).sum())
