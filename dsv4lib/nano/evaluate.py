"""Measure variants against the base, with intervals. Bits per byte, KL divergence and greedy agreement.

    base  = evaluate(config, values, found)                    # values: weights, dequantised
    rows  = table(config, values, found, VARIANTS)
    fails = gates(rows)

Differences are paired: the same bytes under two precisions. Windows are the independent units that the bootstrap
resamples; an interval covers the text, not the noise of training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dsv4lib.config import ModelConfig
from dsv4lib.loader import whole
from dsv4lib.loader.checkpoint import Checkpoint
from dsv4lib.nano import variants
from dsv4lib.nano.corpus import IGNORED, Windows
from dsv4lib.nano.variants import Values, Variant

LN2 = math.log(2)
DRAWS = 2000  # of the bootstrap
NAIVE_LEAST, MXFP4_MOST, KV_FP8_MOST = 0.05, 0.02, 0.001
MXFP4_WINDOWS = 16


@dataclass(frozen=True)
class Measured:
    """Sums over each window, fp64 ``[n]`` on the CPU. bits, KL to the base in bits, bytes of the same greedy choice."""

    bits: torch.Tensor
    kl: torch.Tensor
    same: torch.Tensor


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name, group: of the variant. windows, judged: windows and bytes. bpb: bits per byte.
        difference, low, high: to the base, in bits per byte, with a 95 % interval. kl: bits per byte. same: greedy
            agreement, 0 to 1.
    """

    name: str
    group: str
    windows: int
    judged: int
    bpb: float
    difference: float
    low: float
    high: float
    kl: float
    same: float


def load(folder: Path | str, device: str = "cpu") -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Read a checkpoint of any format. Dimensions and weights, fp32 (tables int64) on ``device``."""
    listed = whole.Listed.of(Checkpoint(folder))
    values = {
        weight.name: (value.float() if value.is_floating_point() else value).to(device)
        for weight, value in listed.values()
    }
    return listed.config, values


@torch.no_grad()
def log_probabilities(
    config: ModelConfig, values: Values, found: Windows, variant: Variant | None = None
) -> list[torch.Tensor]:
    """Return natural logarithms of the next-byte distribution. ``[T, vocab]`` for each window, on the CPU."""
    model = variants.model_of(config, values, variant)
    device = next(iter(values.values())).device
    out = []
    for tokens in found.tokens.to(device).split(1):
        with variants.applied(model, variant, tokens):
            out.append(model(tokens)[0].log_softmax(-1).cpu())
    return out


def measured(logs: Sequence[torch.Tensor], base: Sequence[torch.Tensor], found: Windows) -> Measured:
    """Compare distributions with the base's on the judged bytes."""
    sums = []
    for own, other, targets in zip(logs, base, found.targets.cpu(), strict=True):
        judged = targets != IGNORED
        own, other, targets = own[judged].double(), other[judged].double(), targets[judged]
        bits = -own.gather(-1, targets[:, None]).sum() / LN2
        kl = (other.exp() * (other - own)).sum() / LN2
        sums.append(torch.stack((bits, kl, (own.argmax(-1) == other.argmax(-1)).sum().double())))
    return Measured(*torch.stack(sums).T)


def interval(differences: torch.Tensor, judged: torch.Tensor, seed: int = 0) -> tuple[float, float]:
    """Compute a 95 % bootstrap interval over resampled windows. It is of ``sum(differences) / sum(judged)``."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(judged), (DRAWS, len(judged)), generator=generator)
    drawn = differences.double()[picks].sum(1) / judged.double()[picks].sum(1)
    low, high = drawn.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def row(name: str, group: str, own: Measured, base: Measured, found: Windows) -> Row:
    """Return one line from the sums of a variant and of the base."""
    judged = found.judged.cpu()
    total = int(judged.sum())
    difference = own.bits - base.bits
    values = (own.bits, difference, own.kl, own.same)
    bpb, mean, kl, same = (v.sum().item() / total for v in values)
    return Row(name, group, len(judged), total, bpb, mean, *interval(difference, judged), kl, same)


def table(
    config: ModelConfig,
    values: Values,
    found: Windows,
    wanted: Sequence[Variant] = variants.VARIANTS,
    progress: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Evaluate the base, then every variant. ``progress`` receives each row when it is known."""
    logs = log_probabilities(config, values, found)
    base = measured(logs, logs, found)
    rows = [row("base", "base", base, base, found)]
    progress(rows[0])
    for variant in wanted:
        own = measured(log_probabilities(config, values, found, variant), logs, found)
        rows.append(row(variant.name, variant.group, own, base, found))
        progress(rows[-1])
    return rows


def gates(rows: Sequence[Row]) -> list[str]:
    """List the faults of a table, [] if none. The naive conversion must show, MXFP4 and FP8 KV must not.

    MXFP4 is judged on 16 windows or more.
    """
    found = {r.name: r for r in rows}
    faults = []
    naive, mx, kv = (found.get(n) for n in ("experts nvfp4 as ue8m0_naive", "experts mxfp4", "kv fp8, 584 bytes"))
    if naive and not naive.difference > NAIVE_LEAST:
        faults.append(f"{naive.name}: {naive.difference:+.4f} bits per byte, not above +{NAIVE_LEAST}")
    if mx and mx.windows >= MXFP4_WINDOWS and not mx.difference < MXFP4_MOST:
        faults.append(f"{mx.name}: {mx.difference:+.4f} bits per byte, not below +{MXFP4_MOST}")
    if kv and not kv.kl < KV_FP8_MOST:
        faults.append(f"{kv.name}: KL {kv.kl:.5f} bits per byte, not below {KV_FP8_MOST}")
    return faults
