"""Train nano for a given time. The loop, the loss curve, and the checkpoint in DeepSeek's formats.

    outcome = train(load_corpus(), NANO, Run(), "cuda", log=print)
    write(outcome, folder)            # config.json, model.safetensors, curve.csv, heldout.csv: all or nothing

Losses are in bits per byte. Nothing is written before a run has ended, so an interrupted one leaves no files.
"""

from __future__ import annotations

import csv
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F

from dsv4lib.config import ModelConfig
from dsv4lib.errors import ArgumentError, DSV4Error
from dsv4lib.loader import convert
from dsv4lib.nano import corpus, far, recipe
from dsv4lib.nano.corpus import Corpus, Windows
from dsv4lib.nano.network import OPERATORS, Network, compiled, unstack
from dsv4lib.nano.settings import BOS, Run

LN2 = math.log(2)
CURVE = ("step", "seconds", "train_bpb", "mtp_bpb", "index_kl_nats", "gradient_norm", "rate", "rounded")
CHECKS = ("step", "seconds", "heldout_bpb", "heldout_mtp_bpb", "windows", "rounded")
SETTLE = 20  # steps, compilation among them, before speed is measured


class Diverged(DSV4Error, RuntimeError):
    """A loss that is not finite; nothing is written."""


@dataclass
class Outcome:
    """What a run gives.

    Attributes:
        config: dimensions. run: settings.
        exact, shipped: weights under released names, fp32 on the CPU: as the optimiser left them, and rounded to FP8
            and MXFP4 (equal to what the checkpoint dequantises to, but for the bf16 of the rest).
        curve: rows of `CURVE`. checks: rows of `CHECKS`.
        heldout: rows ``window, bytes, bits_bf16, bits_shipped``: of each held-out window, in fp32 arithmetic.
        load: share of tokens of each expert over the run, by layer.
        steps, seconds, peak: counted steps, time of the loop, bytes of the device at the peak.
    """

    config: ModelConfig
    run: Run
    exact: dict[str, torch.Tensor]
    shipped: dict[str, torch.Tensor]
    curve: list[tuple] = field(default_factory=list)
    checks: list[tuple] = field(default_factory=list)
    heldout: list[tuple] = field(default_factory=list)
    load: dict[str, list[float]] = field(default_factory=dict)
    steps: int = 0
    seconds: float = 0.0
    peak: int = 0


class Sampler:
    """Draw batches of training windows, real and synthetic. They are on the device, from one seed."""

    def __init__(self, stream: torch.Tensor, run: Run, device: torch.device):
        self.stream, self.run = stream.to(device), run
        self.generator = torch.Generator(device=device).manual_seed(run.seed)

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draw tokens, next tokens, and the tokens after those. int64 ``[batch, length]`` each."""
        run, device = self.run, self.stream.device
        real, length = run.batch - run.far, run.length + 1
        at = torch.randint(len(self.stream) - length, (real, 1), device=device, generator=self.generator)
        parts = [self.stream[at + torch.arange(length, device=device)].long()] if real else []
        for make, count in ((far.repeats, run.far // 2), (far.key_values, run.far - run.far // 2)):
            if count:
                parts.append(make(self.stream, count, length, self.generator)[0])
        text = torch.cat(parts)
        tokens = F.pad(text[:, : run.length - 1], (1, 0), value=BOS)
        return tokens, text[:, : run.length], text[:, 1:]


@torch.no_grad()
def bits(network: Network, found: Windows, batch: int, mtp: bool, autocast: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bits of each window, fp64 ``[n]`` on the CPU.

    Of its bytes, and of those drafted by MTP (zeros without).
    """
    sums: list[tuple[torch.Tensor, torch.Tensor]] = []
    for tokens, targets in zip(found.tokens.split(batch), found.targets.split(batch), strict=True):
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
            out = network(tokens, targets.clamp(min=0) if mtp else None)
        later = F.pad(targets[:, 1:], (0, 1), value=corpus.IGNORED)
        pair = [_window_bits(out.logits, targets), _window_bits(out.mtp, later) if mtp else targets[:, 0] * 0.0]
        sums.append(tuple(t.double().cpu() for t in pair))
    return torch.cat([a for a, _ in sums]), torch.cat([b for _, b in sums])


def _window_bits(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=corpus.IGNORED, reduction="none")
    return loss.double().sum(-1) / LN2


class Trainer:
    """One run; see `train`."""

    def __init__(self, text: Corpus, config: ModelConfig, run: Run, device: torch.device, log: Callable[[str], None]):
        self.config, self.run, self.device, self.log = config, run, device, log
        stream = text.stream()
        counts = torch.bincount(stream.long(), minlength=config.vocab)
        self.weights = {n: t.to(device) for n, t in recipe.initial_weights(config, counts, run.seed).items()}
        rounding = recipe.roundings(config)
        self.muon = recipe.Muon(self.weights, rounding, run)
        self.rest = [n for n in self.weights if n not in rounding and not n.endswith(recipe.FIXED)]
        for name in self.rest:
            self.weights[name] = self.weights[name].detach().clone().requires_grad_()
        self.trained = [*rounding, *self.rest]
        self.adam = torch.optim.AdamW(
            [self.weights[n] for n in self.rest],
            lr=run.adam_rate,
            betas=(0.9, 0.95),
            eps=1e-10,
            weight_decay=0.0,
            fused=device.type == "cuda",
        )
        self.sampler = Sampler(stream, run, device)
        held = corpus.windows(text.held, run.length)
        self.held = (held.some(run.final_windows) if run.final_windows else held).to(device)
        self.settle = SETTLE if run.compiled else 1
        self.mixed = device.type == "cuda"  # bf16 is slower than fp32 on most CPUs
        dtype = torch.bfloat16 if self.mixed else torch.float32
        self.network = Network(config, self.weights, compiled() if run.compiled else OPERATORS, dtype)
        self.plain = Network(config, self.weights, dtype=dtype)
        self.outcome = Outcome(config, run, {}, {})
        self.sums = torch.zeros(4, device=device)
        self.load = {p: torch.zeros(config.n_experts, device=device) for p in self.network.prefixes}
        self.began = self.settled = time.monotonic()

    def progress(self, step: int) -> float:
        """Return the part of the run that is done, 0 to 1."""
        if self.run.steps:
            return min(1.0, step / self.run.steps)
        left = self.run.seconds - (self.settled - self.began)
        return min(1.0, (time.monotonic() - self.settled) / max(left, 1e-3)) if step >= self.settle else 0.0

    def go(self) -> Outcome:
        """Train to the end of the budget."""
        step, checked, progress, rounded = 0, 0, 0.0, False
        while progress < 1.0:
            rounded = progress >= self.run.round_from
            self.network.dense.fill_(float(progress < self.run.dense_until))
            factor = recipe.rate_factor(step, progress, self.run)
            self._step(factor, rounded)
            step += 1
            if step == self.settle:
                self._wait()
                self.settled = time.monotonic()
                self.log(f"first {self.settle} steps, compilation included: {self.settled - self.began:.1f} s")
            progress = self.progress(step)
            if step % self.run.log_every == 0:
                self._row(step, factor, rounded, progress)
            if int(progress * self.run.evaluations) > checked and progress < 1.0:
                checked = int(progress * self.run.evaluations)
                self._check(step, self.held.some(self.run.eval_windows), rounded)
        self._wait()
        self.outcome.steps, self.outcome.seconds = step, time.monotonic() - self.began
        return self._finish(step)

    def _step(self, factor: float, rounded: bool) -> None:
        tokens, following, later = self.sampler()
        self.muon.publish(rounded)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.mixed):
            out = self.network(tokens, following)
        loss = F.cross_entropy(out.logits.flatten(0, 1), following.flatten())
        drafts = F.cross_entropy(out.mtp.flatten(0, 1), later.flatten())
        (loss + self.run.mtp_weight * drafts + self.run.index_weight * out.index).backward()
        norm = torch.nn.utils.clip_grad_norm_([self.weights[n] for n in self.rest], 1.0)
        for group in self.adam.param_groups:
            group["lr"] = self.run.adam_rate * factor
        self.adam.step()
        self.muon.step(self.weights, factor)
        for name in self.trained:
            self.weights[name].grad = None
        with torch.no_grad():
            for prefix, load in out.load.items():
                self.load[prefix] += load
                bias = self.weights.get(f"{prefix}ffn.gate.bias")
                if bias is not None:
                    recipe.balance(bias, load, self.config.experts_per_token, self.run.bias_step)
            self.sums += torch.stack([loss, drafts, out.index, norm]).detach()

    def _row(self, step: int, factor: float, rounded: bool, progress: float) -> None:
        means = (self.sums / self.run.log_every).tolist()
        self.sums.zero_()
        if not all(math.isfinite(v) for v in means):
            raise Diverged(f"step {step}: losses {means}: not finite")
        seconds = time.monotonic() - self.began
        row = (step, seconds, means[0] / LN2, means[1] / LN2, means[2], means[3], factor, int(rounded))
        self.outcome.curve.append(tuple(round(v, 5) for v in row))
        each = (time.monotonic() - self.settled) / max(step - self.settle, 1)
        self.log(
            f"{progress:4.0%}  step {step}  {seconds:.0f} s  {row[2]:.4f} bits per byte  MTP {row[3]:.4f}  "
            f"indexer KL {row[4]:.3f} nats  {1e3 * each:.0f} ms a step"
        )

    def _check(self, step: int, found: Windows, rounded: bool) -> None:
        self.plain.dense = self.network.dense
        own, drafted = bits(self.plain, found, self.run.batch, mtp=True, autocast=self.mixed)
        total = found.judged.sum().item()
        drafts = (found.targets[:, 1:] != corpus.IGNORED).sum().item()
        values = (own.sum().item() / total, drafted.sum().item() / drafts)
        row = (step, round(time.monotonic() - self.began, 1), *(round(v, 5) for v in values), len(own), int(rounded))
        self.outcome.checks.append(row)
        self.log(f"      held-out, {len(own)} windows: {values[0]:.4f} bits per byte, MTP {values[1]:.4f}")

    def _finish(self, step: int) -> Outcome:
        """Judge the exact weights (as bf16) and the rounded ones on all held-out windows, in fp32 arithmetic."""
        out = self.outcome
        self.network.dense.zero_()
        self.muon.publish(rounded=True)
        self._check(step, self.held, rounded=True)
        base = {n: t.detach() for n, t in self.weights.items()}
        full = {n: t if _is_exact(n) else t.bfloat16().to(t.dtype) for n, t in (base | self.muon.exact()).items()}
        ship = {n: base[n] if n in recipe.roundings(self.config) and "compressor" not in n else full[n] for n in base}
        both = []
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        for weights in (full, ship):
            both.append(bits(Network(self.config, weights), self.held, 4, mtp=False, autocast=False)[0])
        torch.set_float32_matmul_precision(precision)
        judged = self.held.judged.tolist()
        out.heldout = [
            (i, n, a, b) for i, (n, a, b) in enumerate(zip(judged, *(t.tolist() for t in both), strict=True))
        ]
        out.exact, out.shipped = ({n: t.cpu() for n, t in unstack(w).items()} for w in (full, ship))
        out.load = {p: [round(v, 4) for v in (t / step).tolist()] for p, t in self.load.items()}
        out.peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        total = sum(judged)
        values = [t.sum().item() / total for t in both]
        self.log(f"held-out, fp32 arithmetic: {values[0]:.4f} bits per byte in bf16, {values[1]:.4f} as shipped")
        return out

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _is_exact(name: str) -> bool:
    """Whether a checkpoint stores this tensor as fp32 or int64."""
    return "hc_" in name or name.endswith(("attn_sink", "ape", "gate.bias", "tid2eid"))


def train(
    text: Corpus, config: ModelConfig, run: Run, device: str, log: Callable[[str], None] = lambda text: None
) -> Outcome:
    """Train a model.

    Args:
        text: to train on and to judge.
        config: dimensions; ``run.length`` must be a multiple of its window and rates.
        run: settings.
        device: ``cuda`` or ``cpu``.
        log: receives lines of progress.

    Raises:
        ArgumentError: a device that is not there, a length that does not fit.
        Diverged: a loss that is not finite.
    """
    if device not in ("cuda", "cpu") or (device == "cuda" and not torch.cuda.is_available()):
        raise ArgumentError("device", device, "cpu, or cuda where torch finds a GPU")
    torch.manual_seed(run.seed)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        return Trainer(text, config, run, torch.device(device), log).go()
    finally:
        torch.set_float32_matmul_precision(before)


def write(outcome: Outcome, folder: Path, exact: bool = False) -> None:
    """Write the checkpoint and the tables as a new folder, all of it or nothing.

    Args:
        outcome: of `train`.
        folder: to make; its parent must exist.
        exact: write the exact weights as a bf16 checkpoint instead of the shipped ones.
    """
    if os.path.lexists(folder) or not folder.parent.is_dir():
        raise ArgumentError("folder", str(folder), "a name that is not taken, in a folder that exists")
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        made = partial / "checkpoint"
        # Rounded weights quantise to themselves: the codecs are idempotent.
        convert.save(outcome.exact if exact else outcome.shipped, outcome.config, made, "bf16" if exact else "mxfp4")
        _table(made / "curve.csv", CURVE, outcome.curve)
        _table(made / "checks.csv", CHECKS, outcome.checks)
        rows = [(i, n, f"{a:.6f}", f"{b:.6f}") for i, n, a, b in outcome.heldout]
        _table(made / "heldout.csv", ("window", "bytes", "bits_bf16", "bits_shipped"), rows)
        facts = asdict(outcome.run) | {"trained_steps": outcome.steps, "trained_seconds": round(outcome.seconds, 1)}
        facts |= {"peak_bytes": outcome.peak} | {f"load {p[:-1]}": v for p, v in outcome.load.items()}
        _table(made / "run.csv", ("setting", "value"), facts.items())
        os.rename(made, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _table(path: Path, names: tuple[str, ...], rows: object) -> None:
    with open(path, "x", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(names)
        writer.writerows(rows)
