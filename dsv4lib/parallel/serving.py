"""Serve requests on several ranks: each group of tensor ranks has its own, and all share the experts.

    with joined(plan, Place.here(), "cpu", timeout=600) as ranks:
        model = divided(listed, ranks, capacity=2048, backend="emulator")
        scheduler = RankScheduler(model, PagedCaches(model, requests=8, tokens=256, positions=2048), ranks)
        tokens = serve(scheduler, [Request(prompt, SamplingParams(), 32), ...])       all of them, on every rank

The ranks of a tensor group run the same steps of the same requests, and compare the bits of what the head reads before
they draw. Where experts are shared
between groups with different requests, all ranks run step by step together: a rank without work runs an empty step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4lib.cache.request import Step as Batch
from dsv4lib.errors import ArgumentError, DSV4Error
from dsv4lib.layers.dense import target
from dsv4lib.loader.model import transformer
from dsv4lib.loader.whole import Listed
from dsv4lib.model.paged import PagedCaches
from dsv4lib.model.sampler import SamplingParams
from dsv4lib.model.scheduler import Scheduler, Token
from dsv4lib.model.transformer import Transformer
from dsv4lib.parallel.group import Ranks
from dsv4lib.parallel.plan import Plan, PlanError
from dsv4lib.parallel.watch import RESULTS


class RanksDiffer(DSV4Error, RuntimeError):
    """Ranks of one tensor group whose hidden values have different bits.

    Attributes:
        ranks: those that differ from the first.
    """

    def __init__(self, ranks: Sequence[int]):
        self.ranks = list(ranks)
        super().__init__(f"ranks {self.ranks} have other bits than the first rank of their tensor group")


class Request(NamedTuple):
    """A request: token ids, how it is sampled, most tokens to draw, ids after which it ends."""

    prompt: Sequence[int]
    params: SamplingParams
    tokens: int
    stop: Sequence[int] = ()


def require_drafts(plan: Plan, drafts: int) -> None:
    """Refuse drafts where ranks with different requests share experts: their numbers of draft steps differ.

    Raises:
        PlanError: drafts on such a plan.
    """
    if drafts and plan.lockstep:
        allowed = (
            f"0 with data={plan.data} and experts={plan.experts}: groups of requests that share no experts can draft"
        )
        raise PlanError("drafts", drafts, allowed)


def divided(listed: Listed, ranks: Ranks, *, backend: str = "auto", **options: Any) -> Transformer:
    """Read what a rank holds of a checkpoint into a model on the rank's device. ``options``: of `transformer`."""
    share = ranks.plan.share(ranks.rank, target(options.get("arch"), backend))
    return transformer(listed, backend=backend, share=share, groups=ranks.groups, **options).to(ranks.device)


class RankScheduler(Scheduler):
    """A `Scheduler` on one of several ranks.

    Args:
        model: this rank's. caches: of it. ranks: this rank and its groups. options: of `Scheduler`.

    Raises:
        PlanError: drafts that the plan does not allow. As of `Scheduler`.
    """

    def __init__(self, model: Transformer, caches: PagedCaches, ranks: Ranks, **options: Any) -> None:
        require_drafts(ranks.plan, options.get("drafts", 0))
        super().__init__(model, caches, **options)
        self.ranks, self.ran = ranks, False

    def going(self) -> bool:
        """Tell whether there is a step to run: on this rank, or on one that it must keep step with."""
        return self.ranks.world.any(bool(self.known)) if self.ranks.plan.lockstep else bool(self.known)

    @torch.no_grad()
    def step(self) -> list[Token]:
        """Run a step; where ranks keep step and this one has nothing to run, an empty one.

        Raises:
            RanksDiffer: the bits of the tensor group's ranks are not the same. As of `Scheduler.step`.
        """
        self.ran = False
        found = super().step() if self.known else []
        if self.ranks.plan.lockstep and not self.ran:
            self._run(Batch([]))
        return found

    def _run(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        self.ran = True
        if batch.parts:
            return super()._run(batch)
        self.caches.fill(batch)
        return self.model.hidden(self.caches.decode_arrays(1))

    def _draw(self, batch: Batch, hidden: Tensor) -> list[list[int]]:
        group = self.ranks.groups.tensor
        if group.size > 1:
            every = group.all(checksum(hidden[: batch.tokens])).tolist()
            first = self.ranks.plan.tensor_ranks(self.ranks.rank).start
            if others := [first + n for n, one in enumerate(every) if one != every[0]]:
                raise RanksDiffer(others)
        return super()._draw(batch, hidden)


def checksum(x: Tensor) -> Tensor:
    """Add the bits of bf16 numbers up, plain and by their place: int64 [2]."""
    numbers = x.contiguous().view(torch.int16).flatten().long()
    return torch.stack([numbers.sum(), (numbers * torch.arange(1, len(numbers) + 1, device=x.device)).sum()])


def serve(scheduler: RankScheduler, requests: Sequence[Request]) -> list[list[int]]:
    """Divide requests between the groups of ranks, and run them. Request n is of group n mod ``data``.

    Returns:
        the tokens of all requests, on every rank.
    """
    plan, ranks = scheduler.ranks.plan, scheduler.ranks
    index = plan.data_index(ranks.rank)
    for number, one in enumerate(requests):
        if one.tokens < 1:
            raise ArgumentError("tokens", one.tokens, "at least 1")
        if number % plan.data == index:
            scheduler.add(number, one.prompt, one.params, one.tokens, one.stop)
    most = max((one.tokens for one in requests), default=0)
    found = torch.full((len(requests), most), -1, dtype=torch.int64, device=ranks.device)
    lengths = [0] * len(requests)
    for number, token, _ in scheduler.run():
        found[number, lengths[number]] = token
        lengths[number] += 1
    if ranks.world.size > 1:
        found = ranks.world.all(found, RESULTS).amax(0)
    return [[t for t in row if t >= 0] for row in found.tolist()]


def held(model: Transformer) -> dict[str, int]:
    """Count the bytes that a rank holds: of weights, by what divides them, and of caches."""
    found = {"experts": 0, "attention": 0, "vocabulary": 0, "other": 0}
    for name, x in model.named_buffers():
        kind = "experts" if ".experts." in name else "attention" if ".attn." in name else "other"
        kind = "vocabulary" if name.split(".")[0] in ("embed", "head") else kind
        found[kind] += x.numel() * x.element_size()
    return found
