"""Time the launches of a routed MoE layer of few tokens, and its GEMMs without parts of their work (Hopper).

Of the layer: how far each launch moves the end of the work, in us (overlapping kernels share no time), after a flush
of L2 and as a node of a CUDA graph. The layer is checked against fp64 before. Then variants of both GEMMs, kernels of
``dsv4lib.ops.moe_gemm.sm90.kernel`` with one thing left out, so that results are wrong:

    whole      all of it; checked against fp64 before it is timed
    no_ends    sums are not finished
    no_mma     stages are waited for and given back
    no_tokens  tokens are not copied to shared memory

    python -m dsv4lib.bench.probes.routed_probe --record routed_times.csv        (on the GPU)
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
import torch
from cutlass import Int32

from dsv4lib.bench.decode_step import rows as layer_rows
from dsv4lib.bench.decode_step.whole import advances
from dsv4lib.bench.ops import harness, timing
from dsv4lib.bench.ops.inputs import DECODE
from dsv4lib.bench.probes import common as probes
from dsv4lib.bench.probes import moe_probe
from dsv4lib.ops.moe_gemm import bench as moe_bench
from dsv4lib.ops.moe_gemm.sm90 import arguments, op
from dsv4lib.ops.moe_gemm.sm90.epilogue import Ends, Scales
from dsv4lib.ops.moe_gemm.sm90.groups import Tile
from dsv4lib.ops.moe_gemm.sm90.kernel import TiledMoeGemm
from dsv4lib.ops.moe_gemm.sm90.layout import tiled_shape
from dsv4lib.ops.moe_gemm.sm90.load import Stages

MODE = "w4a8"
ROUNDS = 11
SPIN_US = 4000.0  # before a call: what the host needs for it under the profiler, and more


class NoEnds(TiledMoeGemm):
    """Sums are not finished."""

    @cute.jit
    def finish(self, tile: Tile, first: Int32, buffer: Int32, sSum: cute.Tensor, ends: Ends, scales: Scales):
        """See `Epilogue.finish`."""
        if tile.expert < 0:  # never
            TiledMoeGemm.finish(self, tile, first, buffer, sSum, ends, scales)


class NoMma(TiledMoeGemm):
    """Stages are waited for and given back."""

    def multiply(self, stages: Stages, stage: Int32, rSum: cute.Tensor) -> None:
        """See `Mma.multiply`."""


class NoTokens(TiledMoeGemm):
    """Tokens are not copied."""

    @cute.jit
    def load_tokens(self, mX: cute.Tensor, tile: Tile, rows: cute.Tensor, step: Int32, target: Int32):
        """See `Load.load_tokens`."""


VARIANTS = {"whole": TiledMoeGemm, "no_ends": NoEnds, "no_mma": NoMma, "no_tokens": NoTokens}


@dataclass
class LaunchTimes:
    """Times of one launch of the layer, of the layer (part "all"), or of a GEMM alone."""

    tokens: int
    part: str
    variant: str
    cold_us: float
    warm_us: float


def shown(row: LaunchTimes) -> str:
    """Return a row for the screen."""
    return f"T {row.tokens:3}  cold {row.cold_us:8.2f}  in a graph {row.warm_us:8.2f}  {row.variant:9} {row.part}"


def by_launch(clock: timing.GpuClock, call: Callable[[], Any]) -> dict[str, tuple[float, float]]:
    """Return by kernel (cold us, us in a graph), and of "all"."""
    call()
    works = clock._session([call], [SPIN_US], [[0]] * ROUNDS)
    cold: dict[str, list[float]] = defaultdict(list)
    for one in timing.split(sorted(works, key=lambda work: work.start)):
        moved = advances(one)
        for name, us in [*moved.items(), ("all", sum(moved.values()))]:
            cold[name].append(us)
    graph = clock._capture(call)
    with torch.profiler.profile(activities=timing.KINDS, acc_events=True) as session:
        graph.replay()
        torch.cuda.synchronize()
    warm = {name: us / timing.NODES for name, us in advances(timing.works_of(session)).items()}
    warm["all"] = clock.warm([call])[0]
    return {name: (statistics.median(us), warm.get(name, float("nan"))) for name, us in cold.items()}


def settings_of(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a GEMM's kernel."""
    first = given["routing"] is not None
    _, _, step = tiled_shape(tuple(given["w"].shape), MODE)
    tile_n = op.tile_of(given["expected"], MODE, False)
    ends = {"swiglu": first, "routed": first, "out": "mxfp8" if first else "bf16"}
    return {"mode": MODE, "tile_n": tile_n, "step_k": step, "alpha": False, **ends}


def gemms(clock: timing.GpuClock, tokens: int, processes: int) -> list[LaunchTimes]:
    """Measure the variants of both GEMMs of Flash."""
    rows, found = {row.shape: row for row in moe_bench.rows()}, []
    for part in ("gate/up", "down"):
        row = rows[f"Flash {part} {MODE} T {tokens}"]
        given = harness.inputs(row, "cuda")
        outputs = moe_bench.new_outputs(given)
        wanted = [(kind, settings_of(given), arguments.fake_args, "sm_90a") for kind in VARIANTS.values()]
        codes = probes.get_all(wanted, processes)
        plans = [kind(**settings_of(given)) for kind in VARIANTS.values()]
        calls = [moe_probe.call_of(given, outputs, *one) for one in zip(plans, codes, strict=True)]
        print(f"T {tokens} {part}: {int((given['counts'] > 0).sum())} experts have tokens")
        calls[0]()
        row.check(given, outputs)
        for name, cold, warm in zip(VARIANTS, clock.cold(calls), clock.warm(calls), strict=True):
            found.append(LaunchTimes(tokens, part, name, cold.median, warm))
            print(shown(found[-1]), flush=True)
    return found


def layer(clock: timing.GpuClock, tokens: int) -> list[LaunchTimes]:
    """Measure the launches of the routed layer."""
    row = layer_rows.routed_moe(tokens)
    given = harness.inputs(row, "cuda")
    call, outputs = row.providers[0].bind(given)
    call()
    row.check(given, outputs)
    print(f"T {tokens}, layer: {len(given['picks'].unique())} experts have tokens")
    found = [LaunchTimes(tokens, name, "whole", *us) for name, us in by_launch(clock, call).items()]
    for one in found:
        print(shown(one), flush=True)
    return found


def run(processes: int) -> list[LaunchTimes]:
    """Measure layers and GEMMs on the GPU here."""
    clock, found = timing.GpuClock(), []
    for tokens in DECODE:
        found += layer(clock, tokens)
        torch.cuda.empty_cache()
        found += gemms(clock, tokens, processes)
        torch.cuda.empty_cache()
    return found


if __name__ == "__main__":
    from dsv4lib.bench.probes import routed_probe  # what another process compiles must not be of __main__

    probes.main(__doc__, routed_probe.LaunchTimes, routed_probe.run)
