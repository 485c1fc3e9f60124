"""Choose next tokens for a batch of requests with different settings.

Runs on the device, without a host sync.

The order of the steps is fixed:

    logits + bias -> repetition, frequency, presence penalties -> 1/temperature -> top-k -> top-p -> min-p -> softmax

and a token is drawn by the exponential race, argmax_i p_i / E_i. The noise E is a hash of (seed, position, purpose,
token id), so a request draws the same tokens whatever its batch, after a preemption and on every device. A row at
temperature 0 has all its probability on the largest logit (of equal ones the lowest id), and needs no path of its own.

Padded rows (``None`` in `Settings.of`) may hold anything, NaN included; they yield token 0. A row of a request whose
logits are NaN or that has no token left is marked in `Sampled.broken`, which the host reads when it reads the tokens.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from dsv4lib.errors import ArgumentError, DSV4Error
from dsv4lib.model.noise import exponential

MAX_LOGPROBS = 64


class NoDistribution(DSV4Error):
    """Logits from which no token can be drawn: NaN, +Inf, or every token forbidden."""


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one request; building one checks them.

    Attributes:
        temperature: >= 0; 0 is greedy.
        top_p: in (0, 1]: the smallest set of top tokens that holds at least this much stays.
        top_k: so many top tokens stay; 0: all.
        min_p: in [0, 1]: tokens below ``min_p`` times the largest probability go.
        presence, frequency: taken from the logit of a token of the output: once, and for each time it occurs.
        repetition: > 0: positive logits of tokens of prompt and output are divided by it, negative ones multiplied.
        bias: added to logits, by token id.
        seed: in [0, 2^63); None draws one.
        logprobs: how many top tokens are reported with the chosen one, 0 to 64; None: no log-probabilities.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "presence", "frequency", "repetition"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ArgumentError(name, value, "a finite number")
        if self.temperature < 0:
            raise ArgumentError("temperature", self.temperature, "a number >= 0 (0: greedy)")
        if not 0 < self.top_p <= 1:
            raise ArgumentError("top_p", self.top_p, "a number in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise ArgumentError("min_p", self.min_p, "a number in [0, 1]")
        if self.repetition <= 0:
            raise ArgumentError("repetition", self.repetition, "a number > 0 (1: none)")
        _check_whole("top_k", self.top_k, 2**31)
        if self.seed is None:
            object.__setattr__(self, "seed", secrets.randbits(63))
        _check_whole("seed", self.seed, 2**63)
        if self.logprobs is not None:
            _check_whole("logprobs", self.logprobs, MAX_LOGPROBS + 1)
        if not isinstance(self.bias, Mapping):
            raise ArgumentError("bias", self.bias, "a mapping from token id to number")
        for token, value in self.bias.items():
            _check_whole("bias token", token, 2**31)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or math.isnan(value) or value == math.inf:
                raise ArgumentError(f"bias[{token}]", value, "a finite number, or -inf to forbid the token")


def _check_whole(name: str, value: object, end: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < end:
        raise ArgumentError(name, value, f"an integer from 0 to {end - 1}")


@dataclass(frozen=True)
class Settings:
    """Settings of a batch of B rows as tensors on one device.

    Attributes:
        temperature, top_p, min_p, presence, frequency, repetition: float32 [B].
        top_k: int64 [B], the vocabulary where a request has none. seed: int64 [B].
        bias_ids: int64 [B, n]; bias_values: float32 [B, n], 0 where a row has fewer.
        active: bool [B], False for padding.
        logprobs: the most top tokens a row asks for; None if no row wants log-probabilities. Known to the host.
        vocab: size of the vocabulary.
    """

    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    repetition: torch.Tensor
    top_k: torch.Tensor
    seed: torch.Tensor
    bias_ids: torch.Tensor
    bias_values: torch.Tensor
    active: torch.Tensor
    logprobs: int | None
    vocab: int

    @classmethod
    def of(cls, rows: Sequence[SamplingParams | None], vocab: int, device: torch.device | str = "cpu") -> Settings:
        """Build the tensors of a batch; None is a padded row.

        Raises:
            ArgumentError: no rows, something else than settings, a bias for a token outside the vocabulary.
        """
        if not rows:
            raise ArgumentError("rows", rows, "at least one row")
        for row in rows:
            if row is not None and not isinstance(row, SamplingParams):
                raise ArgumentError("rows", row, "SamplingParams, or None for padding")
            outside = [token for token in (row.bias if row else ()) if token >= vocab]
            if outside:
                raise ArgumentError("bias", outside, f"token ids below vocab={vocab}")
        filled = [row or SamplingParams(temperature=0.0, seed=0) for row in rows]

        def numbers(name: str) -> torch.Tensor:
            return torch.tensor([float(getattr(row, name)) for row in filled], dtype=torch.float32, device=device)

        width = max(len(row.bias) for row in filled)
        pairs = [list(row.bias.items()) + [(0, 0.0)] * (width - len(row.bias)) for row in filled]
        wanted = [row.logprobs for row in filled if row.logprobs is not None]
        return cls(
            *(numbers(name) for name in ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")),
            top_k=torch.tensor([min(row.top_k or vocab, vocab) for row in filled], device=device),
            seed=torch.tensor([row.seed for row in filled], device=device),
            bias_ids=torch.tensor([[t for t, _ in p] for p in pairs], dtype=torch.int64, device=device),
            bias_values=torch.tensor([[v for _, v in p] for p in pairs], dtype=torch.float32, device=device),
            active=torch.tensor([row is not None for row in rows], device=device),
            logprobs=max(wanted) if wanted else None,
            vocab=vocab,
        )


@dataclass
class History:
    """Which tokens each row has seen, for the penalties.

    Attributes:
        prompt: bool [B, V]. output: int32 [B, V], how often each token was drawn.
    """

    prompt: torch.Tensor
    output: torch.Tensor

    @classmethod
    def empty(cls, batch: int, vocab: int, device: torch.device | str = "cpu") -> History:
        """Build a history of nothing."""
        return cls(
            torch.zeros(batch, vocab, dtype=torch.bool, device=device),
            torch.zeros(batch, vocab, dtype=torch.int32, device=device),
        )

    def start(self, row: int, prompt: torch.Tensor) -> None:
        """Begin a request in a row: forget what was there; ``prompt`` int64 [T]."""
        self.output[row].zero_()
        self.prompt[row].zero_()
        self.prompt[row, prompt] = True

    def add(self, tokens: torch.Tensor) -> None:
        """Count one drawn token a row: int64 [B], a negative one counts for nothing."""
        drawn = (tokens >= 0).to(torch.int32)[:, None]
        self.output.scatter_add_(1, tokens.clamp(min=0)[:, None], drawn)

    def copy(self) -> History:
        """Copy, so that drafts can be counted and forgotten."""
        return History(self.prompt, self.output.clone())


def process(logits: torch.Tensor, settings: Settings, history: History | None = None) -> torch.Tensor:
    """Add bias and penalties: logits [B, V] -> [B, V], at least float32.

    Raises:
        ArgumentError: shapes that do not fit the settings.
    """
    _check_logits(logits, settings)
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    x = torch.where(settings.active[:, None], x, 0.0)
    x = x.scatter_add(1, settings.bias_ids, settings.bias_values.to(x.dtype))
    if history is None:
        return x
    if history.output.shape != x.shape:
        raise ArgumentError("history.output.shape", tuple(history.output.shape), f"{tuple(x.shape)}, as the logits'")
    factor = settings.repetition[:, None].to(x.dtype)
    seen = history.prompt | (history.output > 0)
    x = torch.where(seen, torch.where(x > 0, x / factor, x * factor), x)
    counts = history.output.to(x.dtype)
    x = x - settings.frequency[:, None].to(x.dtype) * counts
    return x - settings.presence[:, None].to(x.dtype) * (counts > 0)


def _check_logits(logits: torch.Tensor, settings: Settings) -> None:
    shape = (len(settings.active), settings.vocab)
    if tuple(logits.shape) != shape:
        raise ArgumentError("logits.shape", tuple(logits.shape), f"[B, V] = {shape}")
    if not logits.is_floating_point():
        raise ArgumentError("logits.dtype", logits.dtype, "a floating-point type")


def probabilities(logits: torch.Tensor, settings: Settings, history: History | None = None) -> torch.Tensor:
    """Return the distribution that each row is drawn from.

    [B, V] -> [B, V], at least float32; greedy rows have a single 1.

    Of equal logits the lower id ranks first, so exactly ``top_k`` tokens stay.
    """
    x = process(logits, settings, history)
    greedy = settings.temperature == 0
    x = x / torch.where(greedy, 1.0, settings.temperature)[:, None].to(x.dtype)
    ranked, order = x.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(settings.vocab, device=x.device)
    kept = rank < torch.where(greedy, 1, settings.top_k)[:, None]
    p = torch.softmax(ranked.masked_fill(~kept, -math.inf), dim=-1)
    before = p.cumsum(-1) - p
    kept &= (before < settings.top_p[:, None].to(p.dtype)) | (rank == 0)
    kept &= p >= settings.min_p[:, None].to(p.dtype) * p[:, :1]
    p = torch.where(kept, p, 0.0)
    p = p / p.sum(-1, keepdim=True)
    return torch.zeros_like(p).scatter(-1, order, p)


class Logprobs(NamedTuple):
    """Log-probabilities of the model itself, before bias, penalties and temperature.

    Attributes:
        token: float [B], of the chosen token. rank: int64 [B], 0 for the likeliest.
        top_ids, top: int64 and float [B, n], largest first.
    """

    token: torch.Tensor
    rank: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor


class Sampled(NamedTuple):
    """Tokens of one step.

    Attributes:
        tokens: int64 [B], 0 in padded rows.
        broken: bool [B]: the logits hold NaN or +Inf, or no token is left; the token means nothing.
        logprobs: None if no request wants them.
    """

    tokens: torch.Tensor
    broken: torch.Tensor
    logprobs: Logprobs | None

    def check(self) -> Sampled:
        """Raise NoDistribution if a row is broken (this reads from the device)."""
        if bool(self.broken.any()):
            rows = self.broken.nonzero().flatten().tolist()
            raise NoDistribution(f"rows {rows} have no distribution to sample from: NaN, +Inf, or nothing allowed")
        return self


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor, n: int) -> Logprobs:
    """Compute log-probabilities of chosen and of the likeliest tokens.

    The chosen are int64 [B]; the ``n`` likeliest are those under logits [B, V].
    """
    _check_whole("n", n, logits.shape[-1] + 1)
    found = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
    chosen = found.gather(-1, tokens[:, None])
    top, ids = found.sort(dim=-1, descending=True, stable=True)
    return Logprobs(chosen[:, 0], (found > chosen).sum(-1), ids[:, :n], top[:, :n])


def sample(
    logits: torch.Tensor, settings: Settings, positions: torch.Tensor, history: History | None = None
) -> Sampled:
    """Draw one token a row.

    Args:
        logits: [B, V].
        settings: of the rows.
        positions: int64 [B]: place of the drawn token in its sequence; the noise depends on it.
        history: needed if a row has penalties; not changed.

    Returns:
        The tokens; nothing is read back by the host.
    """
    p = probabilities(logits, settings, history)
    broken = settings.active & ~p.isfinite().all(-1)
    noise = exponential(settings.seed, positions, "token", settings.vocab)
    tokens = torch.where(settings.active & ~broken, (p.to(torch.float64) / noise).argmax(-1), 0)
    wanted = settings.logprobs
    return Sampled(tokens, broken, None if wanted is None else logprobs_of(logits, tokens, wanted))
