"""Hold how nano is trained. Initial weights, optimisers, schedule, and rounding to the shipped formats.

| what        | rule                                                                                               |
|-------------|----------------------------------------------------------------------------------------------------|
| start       | a plain residual net: sublayers add zero, comb near the identity, each site reads one stream most  |
| Muon        | matrices of attention, compressors, indexer queries, experts, ``e_proj``, ``h_proj``                 |
| AdamW       | everything else: embedding, head, norms, gates, mHC, ``ape``, sinks                                  |
| balance     | a router's bias moves by a fixed step against the sign of its expert's excess load                 |
| hash table  | frequent bytes first, each to the experts with the least traffic so far                            |
| rounding    | from a point of the decay phase on, the network sees FP8 128x128 linears and MXFP4 experts, while  |
|             | the optimiser moves the exact weights (straight-through gradient)                                  |
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from dsv4lib.config import ModelConfig
from dsv4lib.loader import names
from dsv4lib.nano.network import stack
from dsv4lib.nano.settings import Run

MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients of Muon's quintic (Keller Jordan, 2024)
FIXED = ("tid2eid", "gate.bias")  # not trained by gradient


def hash_table(counts: torch.Tensor, experts: int, per_token: int, generator: torch.Generator) -> torch.Tensor:
    """Return a table int64 ``[vocab, per_token]`` that balances traffic. Tokens occur ``counts`` times.

    A random permutation does not: a few bytes make up most of a text. Frequent tokens come first, each goes to the
    experts with the least traffic; the generator breaks ties.
    """
    load = torch.rand(experts, generator=generator, dtype=torch.float64)
    table = torch.zeros(len(counts), per_token, dtype=torch.int64)
    for token in counts.argsort(descending=True, stable=True).tolist():
        chosen = load.argsort()[:per_token]
        table[token] = chosen
        load[chosen] += float(counts[token]) + 1
    return table


def initial_weights(config: ModelConfig, counts: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    """Weights before training, fp32, stacked (`network.stack`). ``counts``: occurrences of each token ``[vocab]``."""
    c = config
    generator = torch.Generator().manual_seed(seed)
    out: dict[str, torch.Tensor] = {}
    site = 0
    for weight in names.weights(c):
        name, shape = weight.name, weight.shape
        leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
        if leaf == "tid2eid":
            value = hash_table(counts, c.n_experts, c.experts_per_token, generator)
        elif "norm" in leaf:
            value = torch.ones(shape)
        elif leaf in ("bias", "attn_sink", "ape", "hc_head_base", "wo_b", "w2"):
            value = torch.zeros(shape)
        elif leaf.endswith("_base"):
            value = _site_base(c.hc_mult, site)
            site += 1
        elif leaf.endswith("_scale"):
            value = torch.full(shape, 0.1)
        else:
            std = {"embed": 1.0, "head": 0.02}.get(leaf, shape[-1] ** -0.5)
            value = torch.randn(shape, generator=generator) * std
        out[name] = value
    return stack(out)


def _site_base(n: int, site: int) -> torch.Tensor:
    """Base of an mHC site: reads stream ``site mod n`` most, writes to all, mixes hardly."""
    pre = torch.full((n,), -1.0)
    pre[site % n] = 1.0
    return torch.cat((pre, torch.zeros(n), 4.0 * torch.eye(n).flatten()))


def round_mxfp4(x: torch.Tensor) -> torch.Tensor:
    """Round fp32 ``[..., K]`` to values in MXFP4. As `formats.mxfp4.fake_quantize`, in few launches."""
    blocks = x.unflatten(-1, (-1, 32))
    scale = _power_above(blocks.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-126) / 6)
    v = blocks / scale
    step = torch.where(v.abs() < 2, 0.5, torch.where(v.abs() < 4, 1.0, 2.0))
    return ((v / step).round() * step * scale).flatten(-2)


def round_fp8(x: torch.Tensor) -> torch.Tensor:
    """Round fp32 ``[..., N, K]`` to FP8 with E8M0 scales for 128 x 128. As `formats.fp8_block` does."""
    rows, cols = x.shape[-2:]
    padded = F.pad(x, (0, -cols % names.TILE, 0, -rows % names.TILE))
    tiles = padded.unflatten(-1, (-1, names.TILE)).unflatten(-3, (-1, names.TILE))  # [..., n, 128, k, 128]
    scale = _power_above(tiles.abs().amax((-3, -1), keepdim=True).clamp(min=1e-4) / 448)
    rounded = (tiles / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale
    return rounded.flatten(-2).flatten(-3, -2)[..., :rows, :cols]


def _power_above(x: torch.Tensor) -> torch.Tensor:
    """The least power of two that is not below x > 0."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), torch.where(mantissa == 0.5, exponent - 1, exponent))


def roundings(config: ModelConfig) -> dict[str, Callable[[torch.Tensor], torch.Tensor] | None]:
    """Rounding of every matrix that Muon trains, by its stacked name. None: it is not quantised (compressors)."""
    out: dict[str, Callable[[torch.Tensor], torch.Tensor] | None] = {}
    for weight in names.weights(config):
        if weight.role == "expert":
            head, _, last, _ = weight.name.rsplit(".", 3)
            out[f"{head}.{last}"] = round_mxfp4
        elif weight.role == "linear":
            out[weight.name] = round_fp8
        elif ".compressor.w" in weight.name:
            out[weight.name] = None
    return out


class Muon:
    """Momentum, orthogonalised by Newton-Schulz. Matrices of one shape and one rounding are updated together.

    The exact weights are kept here. What the network reads and has gradients of are leaves that `publish` fills.

    Args:
        weights: by name; the entries of ``rounding`` are replaced by the leaves.
        rounding: of each matrix.
        run: rates.
    """

    def __init__(
        self,
        weights: dict[str, torch.Tensor],
        rounding: dict[str, Callable[[torch.Tensor], torch.Tensor] | None],
        run: Run,
    ):
        self.run = run
        groups: dict[tuple, list[str]] = {}
        for name, function in rounding.items():
            groups.setdefault((tuple(weights[name].shape), function), []).append(name)
        self.groups = []
        for (_, function), members in groups.items():
            exact = torch.stack([weights[name] for name in members])
            seen = exact.clone()
            for name, leaf in zip(members, seen, strict=True):
                weights[name] = leaf.detach().requires_grad_()
            self.groups.append((members, function, exact, seen, torch.zeros_like(exact)))

    @torch.no_grad()
    def publish(self, rounded: bool) -> None:
        """Copy the exact weights into the leaves, rounded to the shipped formats or not."""
        for _, function, exact, seen, _ in self.groups:
            seen.copy_(function(exact) if rounded and function is not None else exact)

    @torch.no_grad()
    def step(self, weights: dict[str, torch.Tensor], factor: float) -> None:
        """Move the exact weights by the leaves' gradients; ``factor`` scales the rate."""
        for members, _, exact, _, momentum in self.groups:
            gradient = torch.stack([weights[name].grad for name in members])
            momentum.lerp_(gradient, 1 - MOMENTUM)
            update = orthogonal(gradient.lerp(momentum, MOMENTUM).flatten(0, -3)).view_as(exact)
            rate = self.run.muon_rate * factor
            rows, cols = exact.shape[-2:]
            exact.mul_(1 - rate * self.run.muon_decay)
            exact.add_(update, alpha=-rate * max(1.0, rows / cols) ** 0.5)

    def exact(self) -> dict[str, torch.Tensor]:
        """Return the exact weights by name."""
        return {name: one for members, _, exact, _, _ in self.groups for name, one in zip(members, exact, strict=True)}


def orthogonal(updates: torch.Tensor) -> torch.Tensor:
    """Orthogonalise nearly, keeping the singular vectors. ``[n, rows, cols]``, in bf16 on a GPU, fp32 out."""
    a, b, c = NEWTON_SCHULZ
    tall = updates.shape[-2] > updates.shape[-1]
    x = (updates.mT if tall else updates).to(torch.bfloat16 if updates.is_cuda else torch.float32)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).float()


def rate_factor(step: int, progress: float, run: Run) -> float:
    """Return the factor of all learning rates. Warm-up by steps, constant, then linear to 0 at ``progress`` 1."""
    rising = min(1.0, (step + 1) / run.warmup)
    if progress < run.decay_from:
        return rising
    return rising * max(0.0, 1 - progress) / max(1 - run.decay_from, TINY_SPAN)


TINY_SPAN = 1e-9


@torch.no_grad()
def balance(bias: torch.Tensor, load: torch.Tensor, per_token: int, step: float) -> None:
    """Move a router's bias ``[E]`` against the excess of each expert's load, in place.

    Load: share of tokens ``[E]``.
    """
    bias.add_((per_token / len(bias) - load).sign(), alpha=step)
