"""Figures and tables of the page on the whole model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from matplotlib.figure import Figure

from dsv4lib import viz
from dsv4lib.loader.whole import Listed
from dsv4lib.pages.common import faults as injected
from dsv4lib.pages.full_model import run_case
from dsv4lib.pages.full_model.run_case import Run
from dsv4lib.viz.diagram import pipeline
from dsv4lib.viz.kinds import colour
from dsv4lib.viz.table import show_table

ALLOWED = {"apart_error": 0.075, "divergence": 0.01}  # the stage's bounds: up to them a check has found nothing


def flow() -> Figure:
    """A token through one layer, op by op."""
    lanes = {
        "attention": [
            ("mhc", "read the streams", colour("mHC")),
            ("linear", "latent q, kv", colour("projection")),
            ("qnorm_rope_kv", "cache the key", colour("attention")),
            ("compressor", "cache entries", colour("attention")),
            ("indexer, topk", "choose entries", colour("choice")),
            ("fmha", "window, entries, sink", colour("attention")),
            ("projections", "back to d", colour("projection")),
        ],
        "experts": [
            ("mhc", "write back, read", colour("mHC")),
            ("router", "by score or table", colour("choice")),
            ("moe_dispatch", "rows by expert", colour("choice")),
            ("moe_gemm", "SwiGLU, MXFP4", colour("experts")),
            ("moe_gemm", "down", colour("experts")),
            ("moe_combine", "with the shared one", colour("experts")),
        ],
    }
    return pipeline(lanes, "one layer of DeepSeek-V4 in ops of this lab")


def error_growth(one: Run, kinds: list[str]) -> Figure:
    """Relative errors after each layer."""
    whole, apart = run_case.layer_errors(one)
    lines = {"the streams": 100 * whole, "their differences": 100 * apart}
    title = "after layers " + ", ".join(f"{n} {kind}" for n, kind in enumerate(kinds))
    return viz.model.curves(torch.arange(len(whole)), {title: lines}, "layer", "error, %")


def bits_of_bytes(one: Run) -> Figure:
    """What each byte of the text costs, on the kernels and on the oracle."""
    lines = {"oracle": run_case.bits(one.wanted, one.tokens), "kernels": run_case.bits(one.logits, one.tokens)}
    mean = {name: f"{name} {float(x.mean()):.3f}" for name, x in lines.items()}
    title = "bits a byte: " + ", ".join(mean.values())
    return viz.model.curves(torch.arange(1, len(one.tokens)), {title: lines}, "byte", "bits")


def router_load(one: Run, found: Listed) -> None:
    """Show how many tokens each expert got, layer by layer."""
    rows = []
    for layer in range(found.config.n_layers):
        experts = one.capture[f"layers.{layer}.router_experts"].flatten()
        how = "token id" if found.config.is_hash_layer(layer) else "score"
        rows.append((layer, how, *torch.bincount(experts, minlength=found.config.n_experts).tolist()))
    show_table(("layer", "chosen by", *(f"expert {e}" for e in range(found.config.n_experts))), rows)


def cache_table(found: Listed, length: int) -> None:
    """Show the bytes that one request's caches take, ``length`` tokens of it cached."""
    head = "layer", "kind", "window", "entries and keys", "compressor state"
    show_table(head, [(*row[:2], *(f"{x:,}" for x in row[2:])) for row in run_case.cache_bytes(found, length)])


def sees_table(found: Listed, positions: list[int]) -> None:
    """Show how many keys a token attends to, by kind of layer."""
    rows = []
    for position in positions:
        rows += [(f"{position:,}", *row) for row in run_case.sees(found, position)]
    show_table(("position", "kind", "window keys", "entries"), rows)


def faults_table(names: Sequence[str], count: int = 16) -> int:
    """Show what sees each fault of ``names`` in a model on the reference back end. Returns how many nothing sees.

    Args:
        names: of `run_case.FAULTS`. count: bytes that the model reads.
    """

    def said(name: str) -> str:
        return run_case.FAULTS[name].__doc__.split("\n")[0]

    def judged(name: str) -> dict[str, float]:
        return run_case.judged(count, "reference", name)

    return injected.seen_by({name: name for name in names}, said, judged, ALLOWED)
