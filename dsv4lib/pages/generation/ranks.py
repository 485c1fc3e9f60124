"""Run a command on the ranks of a plan: it starts them here, or is one of those that torchrun has started."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from rich.console import Console

from dsv4lib import backends, env
from dsv4lib.errors import DSV4Error
from dsv4lib.loader.whole import Listed
from dsv4lib.model.scheduler import Scheduler
from dsv4lib.pages.generation.serving import Options
from dsv4lib.parallel.group import Ranks, joined
from dsv4lib.parallel.launch import launch
from dsv4lib.parallel.place import Place
from dsv4lib.parallel.plan import Plan
from dsv4lib.parallel.serving import held, require_drafts


@contextmanager
def speaking(console: Console) -> Iterator[Console]:
    """Give a console that prints on rank 0 alone; the others say nothing of errors, either."""
    place = Place.here()
    if place is None or place.rank == 0:
        yield console
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 ends all
    try:
        yield Console(quiet=True)
    except DSV4Error as error:
        sys.exit(getattr(error, "exit_code", 2))


@contextmanager
def of(listed: Listed, options: Options, backend: str, command: Sequence[str], text: str) -> Iterator[Ranks | None]:
    """Give this rank of the plan; None: one process is enough. Where ranks are still to be started it exits with them.

    Args:
        command: words of the command line, which the ranks run with the same options and ``text``.

    Raises:
        PlanError: sizes that the model does not allow. ArgumentError: another number of processes than ranks.
    """
    sizes, place = options.sizes, Place.here()
    plan = Plan.of(listed.config, sizes.tensor, sizes.expert, sizes.data)
    require_drafts(plan, options.speculate)
    if place is None and plan.world == 1:
        yield None
    elif place is None:
        path = {"PYTHONPATH": os.pathsep.join(filter(None, (str(env.package().parent), os.environ.get("PYTHONPATH"))))}
        sys.exit(
            launch(["-m", "dsv4lib.lab.cli", *command, *_arguments(options, backend), "--", text], plan.world, path)
        )
    else:
        with joined(plan, place, backends.device(backend), sizes.wait) as ranks:
            yield ranks


def _arguments(options: Options, backend: str) -> list[str]:
    sizes = options.sizes
    given = {
        "model": options.model,
        "tokens": options.tokens,
        "temperature": options.temperature,
        "top-p": options.top_p,
        "seed": options.seed,
        "backend": backend,
        "speculate": options.speculate,
        "tensor-parallel": sizes.tensor,
        "expert-parallel": sizes.expert,
        "data-parallel": sizes.data,
        "rank-timeout": sizes.wait,
    }
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]


def memory(ranks: Ranks, scheduler: Scheduler) -> str:
    """Say what each rank holds, a line a rank. Every rank takes part."""
    parts = {**held(scheduler.model), "caches": scheduler.caches.storage.pages.numel()}
    own = torch.tensor(list(parts.values()), device=ranks.device)
    every = ranks.world.all(own).tolist() if ranks.world.size > 1 else [own.tolist()]
    lines = []
    for rank, sizes in enumerate(every):
        each = ", ".join(f"{name} {size:,}" for name, size in zip(parts, sizes, strict=True))
        lines.append(f"rank {rank} holds {sum(sizes):,} bytes: {each}")
    return "\n".join(lines)
