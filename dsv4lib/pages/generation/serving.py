"""Make a scheduler of one request at a time from a checkpoint. Its options and the memory are checked before."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from dsv4lib import backends, env
from dsv4lib.errors import ArgumentError, DSV4Error
from dsv4lib.layers.attention import MOST_DRAFTS
from dsv4lib.layers.dense import target
from dsv4lib.loader.checkpoint import Checkpoint
from dsv4lib.loader.model import key_format, model_bytes, reading_bytes, transformer
from dsv4lib.loader.whole import Listed
from dsv4lib.model.paged import PagedCaches, pool_bytes
from dsv4lib.model.sampler import SamplingParams
from dsv4lib.model.scheduler import Scheduler
from dsv4lib.model.tokenizer import Tokenizer, tokenizer_of
from dsv4lib.parallel import serving as parallel
from dsv4lib.parallel.group import Ranks

CHUNK = 256  # tokens of a prefill step
UNIT = 256  # positions are rounded up to a multiple: fewer shapes to compile for
INTERRUPTED = 130  # exit code after ctrl-C: 128 and the signal's number


class Sizes(NamedTuple):
    """Ranks: see `parallel.plan.Plan`. expert 0: all. wait: seconds that a rank waits for another in a call."""

    tensor: int = 1
    expert: int = 0
    data: int = 1
    wait: float = 600.0


class Options(NamedTuple):
    """What the commands have in common: see `./dsv4 generate --help`."""

    model: Path
    tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    backend: str = "auto"
    speculate: int = 0
    sizes: Sizes = Sizes()

    def checked(self) -> SamplingParams:
        """Check the numbers; return those of the sampler.

        Raises:
            ArgumentError: a number out of range, or an unknown back end.
        """
        if self.tokens < 1:
            raise ArgumentError("tokens", self.tokens, "at least 1")
        if not 0 <= self.speculate <= MOST_DRAFTS:
            raise ArgumentError("speculate", self.speculate, f"0 to {MOST_DRAFTS} drafts a step")
        if self.backend not in backends.NAMES:
            raise ArgumentError("backend", self.backend, "one of " + ", ".join(backends.NAMES))
        return SamplingParams(temperature=self.temperature, top_p=self.top_p, seed=self.seed)


class NotEnoughMemory(DSV4Error):
    """A model and its caches do not fit.

    Attributes:
        wanted, free: bytes. where: "this machine" or "the GPU".
    """

    def __init__(self, parts: dict[str, int], free: int, where: str):
        self.wanted, self.free, self.where = sum(parts.values()), free, where
        each = ", ".join(f"{name} {size:,}" for name, size in parts.items())
        super().__init__(f"{self.wanted:,} bytes are needed ({each}), {free:,} bytes of {where} are free")


def chosen(backend: str) -> str:
    """Choose the back end for kernels of the GPU here, a Blackwell's or a Hopper's; without a GPU for those of sm_100a.

    Raises:
        ArgumentError: no such back end. BackendUnavailable: it cannot run here.
    """
    return backends.resolve(backend, target(None, backend))


def opened(folder: Path) -> tuple[Listed, Tokenizer]:
    """Read the headers and the tokenizer of a checkpoint.

    Raises:
        CheckpointError: no checkpoint there, or one that cannot be read. ArgumentError: no tokenizer that fits.
    """
    listed = Listed.of(Checkpoint(folder))
    return listed, tokenizer_of(folder, listed.config.vocab)


def capacity(listed: Listed, positions: int) -> int:
    """Round positions of a request up to whole units, as far as the model goes."""
    return min(listed.config.max_positions, -(-positions // UNIT) * UNIT)


def require_memory(listed: Listed, positions: int, options: Options, backend: str, ranks: Ranks | None = None) -> None:
    """Compare what weights and caches take with what is free. That is before either is allocated.

    Of several ranks on this machine each has its part of the free memory.

    Raises:
        NotEnoughMemory: with the bytes of both.
    """
    drafts, arch = options.speculate, target(None, backend)
    share = None if ranks is None else ranks.plan.share(ranks.rank, arch)
    weights = model_bytes(listed, positions, drafts > 0, arch, share)
    sizes = {"requests": 1, "tokens": CHUNK, "positions": positions, "drafts": drafts}
    pool = pool_bytes(listed.config, **sizes, keys=key_format(arch))
    reading = {"weights": weights, "a layer as it is read": reading_bytes(listed, drafts > 0, share)}
    caches = {"caches": pool}
    free_here = env.free_memory() // (1 if ranks is None else ranks.beside)
    rooms = [("this machine", free_here, reading if backend == "native" else reading | caches)]
    if backend == "native":
        rooms.append(("the GPU", torch.cuda.mem_get_info()[0], {"weights": weights} | caches))
    for where, free, parts in rooms:
        if sum(parts.values()) > free:
            raise NotEnoughMemory(parts, free, where)


def scheduler(
    listed: Listed, positions: int, options: Options, backend: str, console: Console, ranks: Ranks | None = None
) -> Scheduler:
    """Read a checkpoint and serve it on a pool for one request. A terminal gets a line of progress.

    Args:
        ranks: this rank and its groups, which reads its share; None: one rank.

    Raises:
        NotEnoughMemory: weights and caches do not fit. CheckpointError: values that cannot be.
    """
    require_memory(listed, positions, options, backend, ranks)
    drafts = options.speculate
    sizes = {"requests": 1, "tokens": CHUNK, "positions": positions, "drafts": drafts}
    if ranks is not None:
        parallel.require_drafts(ranks.plan, drafts)
        model = parallel.divided(listed, ranks, capacity=positions, mtp=drafts > 0, backend=backend)
        return parallel.RankScheduler(model, PagedCaches(model, **sizes), ranks, drafts=drafts)
    with console.status(f"reading {listed.nbytes / 1e6:,.0f} MB"):
        model = transformer(listed, capacity=positions, mtp=drafts > 0, backend=backend)
    model = model.to(backends.device(backend))
    return Scheduler(model, PagedCaches(model, **sizes), drafts=drafts)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let ctrl-C inside end the command with its own exit code. First what is on the terminal is put in order."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        print(flush=True)
        sys.exit(INTERRUPTED)
    finally:
        signal.signal(signal.SIGINT, before)


def shown(text: str) -> None:
    """Write text to stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
