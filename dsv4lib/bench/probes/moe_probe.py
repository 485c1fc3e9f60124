"""Time the E4M3 GEMM of many tokens without parts of its work: what a part costs where others hide it (Hopper).

Each variant is the kernel of ``dsv4lib.ops.moe_gemm.sm90.wide.e4m3`` with one thing left out, so its results are wrong:

    whole         all of it; checked against fp64 before it is timed
    mixed         expansion may be issued between MMAs (results are right)
    no_expansion  A is what was loaded, without tables
    no_promotion  sums of eight columns are added up
    no_tokens     tokens are not copied to shared memory; no_weights: nor are weights
    no_scales     tokens' scales are not read from global memory
    no_loads      all three
    no_ends       sums are not finished

    python -m dsv4lib.bench.probes.moe_probe --record moe_times.csv        (on the GPU)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from dsv4lib.bench.ops import harness
from dsv4lib.bench.ops.case import Given, Row
from dsv4lib.bench.ops.inputs import PREFILL
from dsv4lib.bench.ops.timing import GpuClock
from dsv4lib.bench.probes import common as probes
from dsv4lib.ops.common import launching
from dsv4lib.ops.moe_gemm import bench as moe_bench
from dsv4lib.ops.moe_gemm.sm90 import arguments, op
from dsv4lib.ops.moe_gemm.sm90.epilogue import Ends
from dsv4lib.ops.moe_gemm.sm90.groups import Tile
from dsv4lib.ops.moe_gemm.sm90.layout import tiled_shape
from dsv4lib.ops.moe_gemm.sm90.load import Sources, Stages
from dsv4lib.ops.moe_gemm.sm90.mma import HALF_BYTES, THREAD_BYTES, load
from dsv4lib.ops.moe_gemm.sm90.wide.e4m3 import WideE4m3MoeGemm

MODE = "w4a8_row"


class NoExpansion(WideE4m3MoeGemm):
    """A is what was loaded."""

    def expanded(self, w: Int32, chunk: Int32) -> list:
        """See `WideE4m3MoeGemm.expanded`."""
        tidx, _, _ = cute.arch.thread_idx()
        words = [x for half in range(2) for x in load(w + half * HALF_BYTES + tidx % 128 * THREAD_BYTES, 4)]
        return words * 2


class NoPromotion(WideE4m3MoeGemm):
    """Sums of eight columns are added up."""

    def promote(self, sums: list, own: int, sfx: Int32, rSum: cute.Tensor, waits: int) -> None:
        """See `WideE4m3MoeGemm.promote`."""
        super().promote(sums[:4], own, sfx, rSum, waits)


class NoTokens(WideE4m3MoeGemm):
    """Tokens are not copied."""

    @cute.jit
    def load_tokens(self, mX: cute.Tensor, tile: Tile, warp: Int32, chunk: Int32, target: Int32):
        """See `Load.load_tokens`."""


class NoWeights(WideE4m3MoeGemm):
    """Weights are not copied."""

    @cute.jit
    def load_weights(self, mW: cute.Tensor, tile: Tile, chunk: Int32, target: cute.Pointer, full: cute.Pointer):
        """See `Load.load_weights`."""
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(full)


class NoScales(WideE4m3MoeGemm):
    """Tokens' scales are 1."""

    @cute.jit
    def token_scale(self, sources: Sources, tile: Tile, warp: Int32, chunk: Int32) -> Float32:
        """See `Load.token_scale`."""
        return Float32(1.0)


class NoLoads(NoTokens, NoWeights, NoScales):
    """Nothing comes from global memory."""


class NoEnds(WideE4m3MoeGemm):
    """Sums are not finished."""

    @cute.jit
    def finish_blocks(
        self, mW: cute.Tensor, tile: Tile, group: Int32, sSum: cute.Tensor, ends: Ends, rSum: cute.Tensor
    ):
        """See `WideE4m3MoeGemm.finish_blocks`."""
        if mW.shape[1] < 0:  # never
            WideE4m3MoeGemm.finish_blocks(self, mW, tile, group, sSum, ends, rSum)


class Mixed(WideE4m3MoeGemm):
    """The assembler may issue expansion between MMAs."""

    def part(self, stages: Stages, stage: Int32, parity: Int32) -> None:
        """See `WideE4m3MoeGemm.part`."""


VARIANTS = {
    "whole": WideE4m3MoeGemm,
    "mixed": Mixed,
    "no_expansion": NoExpansion,
    "no_promotion": NoPromotion,
    "no_tokens": NoTokens,
    "no_weights": NoWeights,
    "no_scales": NoScales,
    "no_loads": NoLoads,
    "no_ends": NoEnds,
}
GEMMS = ("Flash gate/up", "Flash down", "Pro gate/up", "Pro down")


@dataclass
class GemmTimes:
    """A variant's times of one GEMM, and the products that the whole one does in that time."""

    gemm: str
    variant: str
    cold_us: float
    warm_us: float
    tflops: float


def call_of(given: Given, outputs: Mapping[str, Any], plan: Any, code: Any) -> Callable[[], None]:
    """Return a call of a variant that writes ``outputs``. ``plan`` is its kernel, ``code`` what it was compiled to."""
    first = given["routing"] is not None
    call = SimpleNamespace(
        x=given["x"],
        x_scales=given["x_scales"],
        w=given["w"],
        out=outputs["h" if first else "y"],
        out_scales=outputs.get("h_scales"),
        offsets=given["offsets"],
        counts=given["counts"],
        routing=given["routing"],
        limit=moe_bench.LIMIT,
    )
    args = arguments.launch_args(plan, call, launching.sm_count(given["x"].device))[:-1]
    return lambda: code.function(*args, probes.stream())


def settings_of(row: Row, given: Given) -> dict[str, Any]:
    """Return the options of a row's kernel."""
    first = given["routing"] is not None
    _, _, step = tiled_shape(tuple(given["w"].shape), MODE)
    tile_n = op.tile_of(given["expected"], MODE, False)
    ends = {"swiglu": first, "routed": first, "out": "mxfp8" if first else "bf16"}
    return {"tile_n": tile_n, "step_k": step, "alpha": False, **ends}


def run(processes: int) -> list[GemmTimes]:
    """Measure all variants of all GEMMs on the GPU here; the whole one is checked before."""
    rows = {row.shape: row for row in moe_bench.rows()}
    clock, found = GpuClock(), []
    for gemm in GEMMS:
        row = rows[f"{gemm} {MODE} T {PREFILL}"]
        given = harness.inputs(row, "cuda")
        outputs = moe_bench.new_outputs(given)
        wanted = [(kind, settings_of(row, given), arguments.fake_args, "sm_90a") for kind in VARIANTS.values()]
        codes = probes.get_all(wanted, processes)
        plans = [kind(**settings_of(row, given)) for kind in VARIANTS.values()]
        calls = [call_of(given, outputs, *one) for one in zip(plans, codes, strict=True)]
        calls[0]()
        row.check(given, outputs)
        cold, warm = clock.cold(calls), clock.warm(calls)
        for name, one, graph in zip(VARIANTS, cold, warm, strict=True):
            found.append(GemmTimes(gemm, name, one.median, graph, row.flops / one.median / 1e6))
            print(probes.line(found[-1]), flush=True)
    return found


if __name__ == "__main__":
    from dsv4lib.bench.probes import moe_probe  # what another process compiles must not be of __main__

    probes.main(__doc__, moe_probe.GemmTimes, moe_probe.run)
