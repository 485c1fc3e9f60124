"""Time decode steps of whole layers of DSV4-Flash. Real sizes, random weights, one CUDA graph a step.

    python -m dsv4lib.bench.decode_step.whole [--batch 1,8] [--context 32768] [--pairs 1,3] [--kernels] [--record DIR]

The table of a step adds up ops, each by itself. Here they follow one another as they serve: a model of Flash's two SWA
layers and some pairs of a CSA and an HCA layer, with embedding and head, is captured as a graph and replayed. Two
models of different length give the time of a pair, and so that of all 43 layers:

    us of the step = us of the long model + pairs that it lacks x us of a pair          a CSA layer more: half a pair

Caches hold random entries and keys (equal scores would be the slowest to choose from), routing follows random gates,
and every request stands at the end of ``--context`` tokens: bytes and launches are those of serving, numbers mean
nothing. What makes the arrays of a step is not in it.

``--kernels`` lists by kernel how far each moved the end of the work (overlapping kernels share no time), of the long
model. A folder of ``--record`` gets `whole.csv`.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.bench import history
from dsv4lib.bench.decode_step.lines import BATCHES, CONTEXTS
from dsv4lib.bench.decode_step.rows import ARCH, BACKEND
from dsv4lib.bench.decode_step.run import numbers
from dsv4lib.bench.ops import harness, timing
from dsv4lib.config import FLASH, LayerKind, ModelConfig
from dsv4lib.errors import ArgumentError, DSV4Error
from dsv4lib.formats import indexer_key, kv_entry
from dsv4lib.layers.attention import KEYS
from dsv4lib.loader import names
from dsv4lib.loader.model import transformer
from dsv4lib.loader.safetensors import Cut
from dsv4lib.loader.whole import Listed
from dsv4lib.model.transformer import Transformer
from dsv4lib.ops.common.graph_capture import capture

NAME = "dsv4lib.bench.decode_step.whole"
FILE = "whole.csv"
COLUMNS = ("batch", "context", "pairs", "short_us", "long_us", "pair_us", "step_us", "run")
PAIRS = (1, 2, 3, 4)
REPLAYS = 21
ROWS_AT_ONCE = 1 << 16  # of a cache, drawn together
SMALL_SCALE = 121  # E8M0 byte of all scales: 2^-6, so that sums of a few thousand products stay near 1


class Drawn:
    """A checkpoint of random tensors, drawn when they are read. It has what `loader` asks of a `Checkpoint`.

    Args:
        config: sizes. form: one of `names.FORMATS`. device: of the tensors. seed: of all of them.
    """

    def __init__(self, config: ModelConfig, form: str, device: str, seed: int = 0) -> None:
        self.specs, self.sizes, self.config = names.listing(config, form), config, {}
        self.generator = torch.Generator(device).manual_seed(seed)

    def __contains__(self, name: str) -> bool:
        return name in self.specs

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def entry(self, name: str) -> DrawnEntry:
        """Return type and size of a tensor."""
        spec = self.specs[name]
        return DrawnEntry(spec.dtypes[0], spec.shape)

    def get(self, name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], cut: Cut | None = None) -> Tensor:
        """Draw a tensor: bytes of codes, equal scales, or normals. Their size keeps sums near 1.

        Raises:
            ArgumentError: a part of it is wanted.
        """
        if cut is not None:
            raise ArgumentError("cut", cut, "None: tensors are drawn whole")
        dtype, options = self.entry(name).dtype, {"generator": self.generator, "device": self.generator.device}
        if dtype == torch.float8_e8m0fnu:
            return torch.full(shape, SMALL_SCALE, dtype=torch.uint8, device=options["device"]).view(dtype)
        if dtype == torch.int8:
            return torch.randint(-128, 128, shape, dtype=dtype, **options)
        if dtype == torch.int64:
            return torch.randint(0, self.sizes.n_experts, shape, dtype=dtype, **options)
        drawn = torch.randn(shape, **options)
        if dtype == torch.float8_e4m3fn:
            return drawn.to(dtype)
        return (1 + 0.1 * drawn if len(shape) < 2 else drawn * shape[-1] ** -0.5).to(dtype)


class DrawnEntry(NamedTuple):
    """Type and size of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Count its bytes."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Timed:
    """What a step of a batch takes.

    Attributes:
        batch, context: requests, tokens of each. pairs: of both models. us: of both. kernels: us by kernel, of the long
            one.
    """

    batch: int
    context: int
    pairs: tuple[int, int]
    us: tuple[float, float]
    kernels: dict[str, float]

    @property
    def pair_us(self) -> float:
        """Time of a CSA and an HCA layer."""
        return (self.us[1] - self.us[0]) / (self.pairs[1] - self.pairs[0])

    @property
    def step_us(self) -> float:
        """Time of all layers of Flash."""
        csa, hca = (len(FLASH.layers_of(kind)) for kind in (LayerKind.CSA, LayerKind.HCA))
        return self.us[1] + ((csa + hca) / 2 - self.pairs[1]) * self.pair_us


def cut(config: ModelConfig, pairs: int) -> ModelConfig:
    """Keep the first SWA layers and so many pairs of a CSA and an HCA layer."""
    swa = len(config.layers_of(LayerKind.SWA))
    count = swa + 2 * pairs
    if config.layer_kinds[swa:count] != (LayerKind.CSA, LayerKind.HCA) * pairs:
        raise ArgumentError("pairs", pairs, "pairs of a CSA and an HCA layer after the SWA layers")
    return replace(config, n_layers=count, compress_ratios=(*config.compress_ratios[:count], 0))


def model_of(
    config: ModelConfig, batch: int, context: int, device: str, backend: str, keys: str | None = None
) -> Transformer:
    """Make a model with random weights and caches. ``keys`` is the format of indexer keys, None: the default."""
    listed = Listed(Drawn(config, "mxfp4", device), config, "mxfp4")
    made = transformer(listed, places=batch, capacity=context, backend=backend, arch=ARCH, keys=keys).to(device)
    made.allocate()
    fill(made, torch.Generator(device).manual_seed(1))
    return made


def fill(model: Transformer, generator: torch.Generator) -> None:
    """Fill window, entries and indexer keys of all layers. They are normals in their formats."""
    for caches in model.caches:
        pools = [(pool, FLASH.head_dim, kv_entry.append, ()) for pool in (caches.window, caches.entries) if pool]
        if caches.keys:
            pools.append((caches.keys, FLASH.index_dim, indexer_key.append, (model.keys,)))
        for pool, width, append, variant in pools:
            rows, device = len(pool.data) * pool.page, pool.data.device
            for start in range(0, rows, ROWS_AT_ONCE):
                indices = torch.arange(start, min(start + ROWS_AT_ONCE, rows), device=device)
                drawn = torch.randn(len(indices), width, generator=generator, device=device)
                append(pool.data, pool.page, indices, drawn, *variant)


def step_of(model: Transformer, batch: int, context: int) -> Any:
    """Return a call. It makes one more token of each request, a position before the last of the context."""
    step = model.step([[1 + n % 200] for n in range(batch)], list(range(batch)), [context - 2] * batch)

    @torch.no_grad()
    def run() -> Tensor:
        return model.head(model.hidden(step)[0])[0]

    return run


def advances(works: Sequence[timing.Work]) -> dict[str, float]:
    """Return by kernel how far each moved the end of all work, in us. Of works that overlap the later end counts."""
    found: Counter[str] = Counter()
    end = None
    for work in sorted(works, key=lambda one: one.end):
        found[short(work.name)] += (work.end - (work.start if end is None else end)) / 1e3
        end = work.end
    return dict(found.most_common())


def short(name: str) -> str:
    """Shorten a kernel's name: what follows its options is the types of its arguments."""
    found = re.match(r"kernel_cutlass_kernel_(.*?)_?(tensor|Sources|None|KeyR|Tokens|Tables)", name)
    return (found[1] if found else name)[:60]


def timed(run: Any, kernels: bool) -> tuple[float, dict[str, float]]:
    """Capture and replay a step: (us, us by kernel)."""
    replay = capture(run).replay
    times = []
    for _ in range(REPLAYS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(100_000)
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    found: dict[str, float] = {}
    if kernels:
        with torch.profiler.profile(activities=timing.KINDS, acc_events=True) as session:
            replay()
            torch.cuda.synchronize()
        found = advances(timing.works_of(session))
    return statistics.median(times[2:]), found


def measure(batch: int, context: int, pairs: tuple[int, int], kernels: bool, keys: str | None = None) -> Timed:
    """Time both models."""
    found = []
    for count in pairs:
        model = model_of(cut(FLASH, count), batch, context, "cuda", BACKEND, keys)
        found.append(timed(step_of(model, batch, context), kernels and count == pairs[1]))
        del model
        torch.cuda.empty_cache()
    return Timed(batch, context, pairs, tuple(us for us, _ in found), found[1][1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        the exit code: 0; 2 for bad arguments; `harness.NOTHING_TIMED` without such a GPU.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {NAME}", description=__doc__.splitlines()[0])
    parser.add_argument("--batch", default=",".join(map(str, BATCHES)), help="requests, with commas between them")
    parser.add_argument("--context", default="32768", help=f"tokens of each, of {', '.join(map(str, CONTEXTS))}")
    parser.add_argument("--pairs", default="1,3", help="of layers, of the short and the long model")
    parser.add_argument(
        "--keys", choices=sorted(KEYS), help="format of indexer keys, not recorded [default: the model's]"
    )
    parser.add_argument("--kernels", action="store_true", help="list what each kernel takes")
    parser.add_argument("--record", type=Path, help="folder to write to")
    parser.add_argument("--history", type=Path, help="add the times to the history in this folder")
    given = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    try:
        batches, contexts = numbers(given.batch, "batch", BATCHES), numbers(given.context, "context", CONTEXTS)
        pairs = numbers(given.pairs, "pairs", PAIRS)
        if len(pairs) != 2 or pairs[0] >= pairs[1]:
            raise ArgumentError("pairs", given.pairs, "two numbers, the smaller one first")
        if given.keys and (given.record or given.history):
            raise ArgumentError("keys", given.keys, "nothing with --record or --history: they hold the default's times")
    except DSV4Error as error:
        print(error, file=sys.stderr)
        return 2
    status = backends.status("native", ARCH)
    if not status.available:
        print(f"nothing is timed: {status.reason}")
        return harness.NOTHING_TIMED
    rows = []
    for context in contexts:
        for batch in batches:
            found = measure(batch, context, (pairs[0], pairs[1]), given.kernels, given.keys)
            rows.append(found)
            short_us, long_us = found.us
            print(f"b {batch}, {context} tokens: {short_us:.0f} and {long_us:.0f} us, a pair {found.pair_us:.1f}")
            print(f"    all {FLASH.n_layers} layers, embedding and head: {found.step_us / 1e3:.2f} ms", flush=True)
            for name, us in found.kernels.items():
                print(f"    {us:9.1f}  {name}", flush=True)
    if given.record is not None:
        write(rows, given.record)
    if given.history is not None:
        names = [f"whole step b {one.batch}, {one.context} tokens" for one in rows]
        shown = [
            history.Measured("decode_step", name, "ours", "step", one.step_us)
            for name, one in zip(names, rows, strict=True)
        ]
        history.append(shown, given.history, harness.facts(f"python -m {NAME}"))
    return 0


def write(rows: Sequence[Timed], folder: Path) -> None:
    """Write what was measured to a folder. Steps of other batches and contexts that it has stay."""
    folder.mkdir(parents=True, exist_ok=True)
    run, path, known = harness.facts(f"python -m {NAME}")["run"], folder / FILE, {}
    if path.is_file():
        with path.open(newline="") as file:
            known = {(int(row["context"]), int(row["batch"])): tuple(row.values()) for row in csv.DictReader(file)}
    for one in rows:
        times = (f"{us:.1f}" for us in (*one.us, one.pair_us, one.step_us))
        known[one.context, one.batch] = (one.batch, one.context, "{} and {}".format(*one.pairs), *times, run)
    with path.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(COLUMNS)
        out.writerows(known[key] for key in sorted(known))


if __name__ == "__main__":
    sys.exit(main())
