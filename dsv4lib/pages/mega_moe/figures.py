"""Figures and tables of the page on the fused MoE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure

from dsv4lib import viz
from dsv4lib.dsl import block_scale_probe
from dsv4lib.formats import weight_modes
from dsv4lib.pages.mega_moe import page, rows, traffic
from dsv4lib.pages.mega_moe.run_case import Outcome
from dsv4lib.pages.quantize import run_case as conversions
from dsv4lib.predict import overlap
from dsv4lib.predict.moe import MODELS, TOP
from dsv4lib.viz.bars import Panel, side_by_side
from dsv4lib.viz.table import show_table
from dsv4lib.viz.timeline import Track

LITERAL = "ue8m0_naive"
# Conversions of the page: the one that changes scales and keeps codes, and three that are right; with activations.
SHOWN = {LITERAL: "mxfp8", "e4m3_expand": "mxfp8", "e4m3_split": "mxfp8", "bf16": "bf16"}
_ANSWERS = ("takes it", "refuses it")
_PHASES = ("routes and counts", "tokens pulled", "L1", "L2", "results returned")


def variants(targets: Mapping[str, str]) -> tuple[Figure, int]:
    """Draw which targets assemble which block-scaled MMA; returns also how many answers are not as recorded.

    Args:
        targets: heading -> target, asked again of the assembler.
    """
    known = block_scale_probe.recorded()
    names, codes, wrong = [], [], 0
    for kind, blocks in block_scale_probe.KINDS.items():
        for block in blocks:
            said = [block_scale_probe.refusal(kind, block, target) for target in targets.values()]
            expected = [known[kind, block, heading] for heading in targets]
            wrong += sum((one or block_scale_probe.TAKEN) != want for one, want in zip(said, expected, strict=True))
            names.append(f"{kind}  .{block}")
            codes.append([int(one is not None) for one in said])
    labels = "kind and block of a scale", "target"
    figure = viz.grids.category_map(np.array(codes), _ANSWERS, labels, "block-scaled MMAs: what ptxas says", names)
    figure.axes[0].set_xticks(range(len(targets)), list(targets))
    return figure, wrong


def _values(sample: conversions.Sample, mode: str, planes: int | None = None) -> torch.Tensor:
    made = weight_modes.convert(sample.quantized, mode)
    return weight_modes.dequantize(replace(made, planes=made.planes[:planes]), torch.float64)


def weights_error(sample: conversions.Sample, mode: str, planes: int | None = None) -> conversions.Error:
    """Compute what a conversion loses of exact NVFP4 weights. planes: how many of its operands are added; None: all."""
    return conversions.error(_values(sample, mode, planes), sample.values)


def ratios(sample: conversions.Sample) -> Figure:
    """Draw what each conversion makes of a weight, as a multiple of the weight."""
    exact = sample.values
    there = exact != 0
    panels = {mode: {mode: (_values(sample, mode)[there] / exact[there]).clamp(0, 2.5)} for mode in SHOWN}
    title = "converted weight over exact NVFP4 weight"
    return viz.grids.histograms(panels, "ratio, cut at 2.5", title, 60, (1.0, "right"))


def losses(
    sample: conversions.Sample, one: conversions.Expert, modes: Mapping[str, str] = SHOWN
) -> tuple[Figure, dict[str, conversions.Error], dict[str, conversions.Error]]:
    """Draw what each conversion loses and costs; returns errors of weights and of an expert's output by mode.

    Args:
        sample: weights. one: an expert. modes: conversion -> activations that it runs with.
    """
    convert = {row.name: row.convert for row in conversions.ROWS}
    reference = one.run(one.weights(convert["nvfp4"]), "bf16")
    weights = {mode: weights_error(sample, mode) for mode in modes}
    outputs = {m: conversions.error(one.run(one.weights(convert[m]), kind), reference) for m, kind in modes.items()}
    panels = [
        Panel("error of weights / weights", [weights[m].relative for m in modes], "{:.4f}"),
        Panel("error of an expert's output / output", [outputs[m].relative for m in modes], "{:.3f}"),
        Panel("bits a weight", [weight_modes.MODES[m].bits for m in modes], "{:.2f}"),
    ]
    names = [f"{mode}, {kind} activations" for mode, kind in modes.items()]
    marked = [mode == LITERAL for mode in modes]
    title = "against exact NVFP4 weights and bf16 activations"
    return side_by_side(names, panels, marked, title, 3), weights, outputs


def bytes_a_token() -> Figure:
    """Draw the bytes that cross NVLink for a token of six remote experts, by model and activations."""
    names, parts = [], {"codes and scales": [], "weight": [], "results, bf16": []}
    for model, one in MODELS.items():
        for kind in ("mxfp8", "nvfp4", "bf16"):
            names.append(f"{model}, {kind}")
            pulled = overlap.dispatch_bytes(one.hidden, kind)
            parts["codes and scales"].append(TOP * (pulled - 4) / 1e3)
            parts["weight"].append(TOP * 4 / 1e3)
            parts["results, bf16"].append(TOP * overlap.combine_bytes(one.hidden) / 1e3)
    totals = [sum(values) for values in zip(*parts.values(), strict=True)]
    panel = Panel("kB a token and layer", totals, "{:.1f}", parts)
    return side_by_side(names, [panel], ["mxfp8" in name for name in names], "what crosses devices", 1)


def crossing_table(made: traffic.Case, found: Outcome) -> int:
    """Show bytes that crossed beside those that must; returns the difference."""
    seen, needed = traffic.crossed_bytes(found), traffic.needed_bytes(made)
    routes = traffic.remote_routes(made)
    table = [(name, seen.get(name, 0), needed.get(name, "by tiles")) for name in seen]
    show_table(("region", "bytes crossed", "bytes needed"), table)
    print(f"{routes} routes lead to another rank")
    return traffic.difference(made, found)


def formats(runs: Mapping[str, page.Run]) -> Figure:
    """Draw what tokens in each format cost in these runs: bytes that a remote route pulls, and the error of outputs."""
    found = [page.rounded(run) for run in runs.values()]
    panels = [
        Panel("bytes of a row that crosses", [one.pulled for one in found], "{:.0f}"),
        Panel("error of the outputs / outputs", [one.error for one in found], "{:.3f}"),
        Panel("of it, by the weights alone", [one.of_weights for one in found], "{:.3f}"),
    ]
    title = f"the same tokens and experts, H {page.HIDDEN}, I {page.WIDTH}, against fp64 of unquantised ones"
    return side_by_side(list(runs), panels, [name == "nvfp4" for name in runs], title, 3)


def timeline(made: traffic.Case, found: Outcome) -> Figure:
    """Draw what crosses devices and when the tensor cores work, of all ranks on one clock."""
    kinds = {"counts": "routes and counts", "routes": "routes and counts"}
    kinds |= dict.fromkeys(traffic.DISPATCH, "tokens pulled") | dict.fromkeys(
        ("combine", "combined"), "results returned"
    )
    times: dict[tuple[int, str], list[np.ndarray]] = {}
    for one in traffic.crossings(found):
        times.setdefault((one.rank, kinds[one.region]), []).append(one.times)
    for product in traffic.products(made, found):
        times.setdefault((product.rank, product.layer), []).append(product.times)
    everything = np.concatenate([x for parts in times.values() for x in parts])
    width = max(1, int((everything.max() - everything.min()) / 250))
    tracks = []
    for rank in range(len(found.traces)):
        for kind in _PHASES:
            if (rank, kind) in times:
                start = np.sort(np.concatenate(times[rank, kind]))
                tracks.append(Track(f"rank {rank}: {kind}", start, start + width, [kind] * len(start)))
    return viz.timeline.timeline(tracks, "one launch a device, all devices on one clock")


class Shares(NamedTuple):
    """What crossed devices while a rank's tensor cores had work, as shares.

    Attributes:
        pulled: of the pulled rows, those that came after the first product of their rank.
        returned: of the writes of results, those before the last product of their rank. Each 0.0 if nothing crossed.
    """

    pulled: float
    returned: float


def shares(made: traffic.Case, found: Outcome) -> Shares:
    """Count how much of dispatch and of combine lies under the products of its rank."""
    products, crossed = traffic.products(made, found), traffic.crossings(found)
    first = {one.rank: one.times.min() for one in products if one.layer == "L1"}
    last = {one.rank: one.times.max() for one in products if one.layer == "L2"}
    pulled = [one.times > first[one.rank] for one in crossed if one.region == "x" and one.rank in first]
    returned = [one.times < last[one.rank] for one in crossed if one.region == "combine" and one.rank in last]
    return Shares(*(float(np.concatenate(one).mean()) if one else 0.0 for one in (pulled, returned)))


def overlap_said(made: traffic.Case, found: Outcome) -> str:
    """Say in two lines what the timeline shows of overlap, for any case."""
    said = []
    names = ("pulled rows came after the first product", "writes of results were before the last product")
    for share, what in zip(shares(made, found), names, strict=True):
        hidden = "nothing of it is hidden here" if share == 0 else "hidden" if share == 1 else "the rest is not hidden"
        said.append(f"{share:.0%} of the {what} of their rank: {hidden}")
    return "\n".join(said)


def predicted(
    model: str, ranks: int, tokens: Sequence[int] = (1, 64, 512, 2048, 8192, 32768), activations: str = "mxfp8"
) -> Figure:
    """Draw the predicted time of a layer: GEMMs and what nothing hides, beside communication in all."""
    found = [overlap.predict(model, n, ranks, activations=activations) for n in tokens]
    parts = {
        "dispatch that GEMM 1 waits for": [p.exposed_dispatch / p.total for p in found],
        "GEMMs": [p.compute / p.total for p in found],
        "combine after the last GEMM": [p.exposed_combine / p.total for p in found],
    }
    panels = [
        Panel("share of the layer (predicted)", [1.0] * len(found), " ", parts),
        Panel("share of communication that is hidden (predicted)", [p.hidden for p in found], "{:.2f}"),
    ]
    names = [f"{n:,} token{'s' * (n > 1)} a rank" for n in tokens]
    title = f"{model} on {ranks} ranks, {activations}: predicted, not measured"
    return side_by_side(names, panels, [False] * len(names), title, 2)


def published() -> None:
    """Show predicted times beside those that DeepGEMM published for its kernel on eight B200; NVFP4's beside them."""
    table = []
    for (model, tokens), us in overlap.PUBLISHED.items():
        one = overlap.predict(model, tokens)
        cells = f"{one.compute:.0f}", f"{one.dispatch + one.combine:.0f}", f"{100 * one.hidden:.0f} %"
        four = overlap.predict(model, tokens, activations="nvfp4").total
        table.append((model, tokens, *cells, f"{one.total:.0f}", f"{us:g}", f"{four:.0f}"))
    heads = "GEMMs, us", "communication, us", "of it hidden", "layer, us (all predicted)", "published, us"
    heads = *heads, "layer in NVFP4, us (predicted)"
    show_table(("model", "tokens a rank", *heads), table)


def faults_table(found: Sequence[tuple[str, str, str, bool]]) -> int:
    """Show faults, what they do and what found them; returns how many nothing found."""
    show_table(("fault", "what it does", "what finds it", "found"), [(*x[:3], "yes" if x[3] else "NO") for x in found])
    return sum(not one[3] for one in found)


def features() -> None:
    """Show the features of a public text on such a kernel, and where each is here."""
    show_table(("row", "feature", "where", "verified"), [tuple(row) for row in rows.table()])
