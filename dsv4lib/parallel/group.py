"""Speak to the other ranks of a group over torch.distributed.

Tensors travel as bytes, so every type does. Sums are not left to the library: addends are gathered and added in the
order of the ranks, so that they have the same bits on every rank, back end and run.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dsv4lib.errors import ArgumentError
from dsv4lib.layers.communicator import ALONE, Communicator, Groups, part_of
from dsv4lib.parallel.place import Place
from dsv4lib.parallel.plan import Plan
from dsv4lib.parallel.watch import LEAVING, Watch

NEVER = datetime.timedelta(days=7)
GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13


class Group(Communicator):
    """Some ranks of all.

    Args:
        name: in messages. ranks: of the group. rank: this process, among all. watch: counts every call.
        process_group: of torch.distributed. device: where tensors travel from.
    """

    def __init__(
        self,
        name: str,
        ranks: range,
        rank: int,
        watch: Watch,
        process_group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self.name, self.ranks, self.rank, self.size = name, ranks, rank - ranks.start, len(ranks)
        self.watch, self.process_group, self.device = watch, process_group, device

    def sum(self, x: Tensor) -> Tensor:
        """Add what the ranks give, fp32 [T, N], in their order."""
        if x.dtype != torch.float32:
            raise ArgumentError("x.dtype", x.dtype, "torch.float32: an addend is not rounded")
        first, *others = self._all("sum", x)
        return sum(others, first)

    def columns(self, x: Tensor, total: int) -> Tensor:
        """Put the ranks' columns side by side: [T, total]."""
        width = -(-total // self.size)
        found = self._all("columns", torch.nn.functional.pad(x, (0, width - x.shape[1])))
        parts = zip(found, (part_of(total, r, self.size) for r in range(self.size)), strict=True)
        return torch.cat([one[:, : len(part)] for one, part in parts], 1)

    def rows(self, x: Tensor, total: int) -> Tensor:
        """Put the ranks' rows one after the other: [total, ..]."""
        height = -(-total // self.size)
        padded = torch.cat((x, x.new_zeros(height - len(x), *x.shape[1:])))
        parts = zip(self._all("rows", padded), (part_of(total, r, self.size) for r in range(self.size)), strict=True)
        return torch.cat([one[: len(part)] for one, part in parts])

    def pick(self, x: Tensor, owner: Tensor) -> Tensor:
        """Take each row [T, N] of the rank ``owner`` [T]; of rank 0 where that is negative."""
        return self._all("pick", x)[owner.clamp(min=0), torch.arange(len(x), device=x.device)]

    def counts(self, *send: Sequence[int]) -> list[list[int]]:
        """Give each rank a number of every sequence; get those of each."""
        given = torch.tensor(list(zip(*send, strict=True)), device=self.device)
        return self._exchange("counts", given, [1] * self.size, [1] * self.size).T.tolist()

    def exchange(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send rows: the first ``send[0]`` to rank 0 and so on. Returns those received, ``receive[r]`` of rank r."""
        return self._exchange("exchange", x, send, receive)

    def any(self, value: bool, what: str = "any") -> bool:
        """Tell whether a rank gives True. ``what``: the call's name; one of `watch.PATIENT` waits without a limit."""
        return bool(self._all(what, torch.tensor([int(value)], device=self.device)).any())

    def all(self, x: Tensor, what: str = "all") -> Tensor:
        """Gather a tensor of one shape and type of each rank: [ranks, ..]. ``what``: see `any`."""
        return self._all(what, x)

    def _all(self, what: str, x: Tensor) -> Tensor:
        out = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            with self.watch.call(self.name, what, self.ranks):
                GATHER(_bytes(out), _bytes(x.contiguous()), group=self.process_group)
        return out

    def _exchange(self, what: str, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        out = torch.empty(sum(receive), *x.shape[1:], dtype=x.dtype, device=x.device)
        each = x.element_size() * (x[0].numel() if len(x) else out[0].numel() if len(out) else 1)
        sizes = [n * each for n in receive], [n * each for n in send]
        with self.watch.call(self.name, what, self.ranks):
            dist.all_to_all_single(_bytes(out), _bytes(x.contiguous()), *sizes, group=self.process_group)
        return out


def _bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8) if x.numel() else torch.empty(0, dtype=torch.uint8, device=x.device)


@dataclass(frozen=True)
class Ranks:
    """A rank and its groups.

    Attributes:
        plan: of all ranks. rank: of this process. device: where its tensors are.
        groups: those of its layers. world: all ranks. beside: ranks on this machine.
    """

    plan: Plan
    rank: int = 0
    device: torch.device = torch.device("cpu")
    groups: Groups = Groups()
    world: Communicator = ALONE
    beside: int = 1


@contextmanager
def joined(plan: Plan, place: Place, device: str, timeout: float) -> Iterator[Ranks]:
    """Join the other ranks, and leave them at the end. Whatever ends inside ends on all of them.

    Args:
        plan: of all ranks. place: of this process, see `Place.here`. device: "cpu" (Gloo) or "cuda" (NCCL).
        timeout: seconds that a rank waits for another in a call.

    Raises:
        ArgumentError: another number of processes than the plan has ranks.
    """
    if place.world != plan.world:
        raise ArgumentError("processes", place.world, f"{plan.world}, the ranks of the plan (tensor x data)")
    if plan.world == 1:
        yield Ranks(plan, device=torch.device(device))
        return
    if place.loopback:  # Gloo listens where the host's name points to, if it is not told
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    here = torch.device(device, place.local) if device == "cuda" else torch.device(device)
    if here.type == "cuda":
        torch.cuda.set_device(here)
    store, limit = place.store(timeout), NEVER  # the watch ends what hangs
    watch = Watch(place, store, timeout)
    with watch.running():
        backend, options = ("nccl", {"device_id": here}) if here.type == "cuda" else ("gloo", {})
        with watch.call("join", "joining"):
            where = {"rank": place.rank, "world_size": place.world, "timeout": limit}
            dist.init_process_group(backend, store=dist.PrefixStore("torch", store), **where, **options)
        ranks = _ranks(plan, place, here, watch)
        watch.tell()
        yield ranks
        ranks.world.any(False, LEAVING)  # all have what was sent to them before one leaves
        watch.leave()
        dist.destroy_process_group()


def _ranks(plan: Plan, place: Place, device: torch.device, watch: Watch) -> Ranks:
    """Make the groups: every rank takes part in the making of all of them, in one order."""
    rank = place.rank
    made: dict[range, dist.ProcessGroup] = {range(plan.world): dist.group.WORLD}
    for find in (plan.tensor_ranks, plan.expert_ranks):
        for ranks in sorted({find(r) for r in range(plan.world)}, key=lambda one: one.start):
            if len(ranks) > 1 and ranks not in made:
                made[ranks] = dist.new_group(list(ranks))

    def group(name: str, ranks: range) -> Communicator:
        return Group(name, ranks, rank, watch, made[ranks], device) if len(ranks) > 1 else ALONE

    groups = Groups(group("tensor", plan.tensor_ranks(rank)), group("expert", plan.expert_ranks(rank)))
    return Ranks(plan, rank, device, groups, group("world", range(plan.world)), place.beside)
