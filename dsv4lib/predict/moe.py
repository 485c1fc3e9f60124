"""Predict the MoE layer on a B200: `dsv4 bench moe`. How fast it would be, token by token, beside the physical floor.

What the GEMMs do is counted on their compiled code in the emulator, a K step and a tile at a time (`counted`); how long
that takes is modelled with the rates of data/bench/rates.csv:

    GEMM    = launch + set-up + the longest CTA: walk to its first tile + load latency + its tiles + the last epilogue
              at least what HBM needs
    tile    = the longest of: its K steps as load and MMA follow each other, its epilogue, any resource for both
    layer   = router + dispatch + quantise + GEMM 1 + GEMM 2 + combine, one after the other

Which CTA gets which tile is computed (`tiles`), for the loads that experts have when every expert is as likely
(`loads`). Of the other four launches only latency and bytes are modelled, not what they compute.

Floors: weights of the experts that have a token, x and y over 8 TB/s, or FLOPs over the rate of the mode's MMA.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dsv4lib.errors import ArgumentError
from dsv4lib.ops.moe_gemm.config import EPILOGUE_WARPS, N_STEP, ROW_STEP
from dsv4lib.ops.moe_gemm.op import largest, tile_of
from dsv4lib.ops.moe_gemm.schedule import WINDOW
from dsv4lib.predict import calibration, static_model, table
from dsv4lib.predict.rates import TABLE, Gpu, gpu
from dsv4lib.predict.schedule import Task
from dsv4lib.predict.static_model import Kernel, chain, l2_share, longest, resources, slope
from dsv4lib.predict.work import Work, count

RESULTS = TABLE.with_name("moe.csv")
BANDWIDTH = 8e12  # of the floors
TOP = 6
TOKENS = (1, 8, 32, 128, 512, 4096)
MIXED = 37  # experts in an order in which large and small loads alternate: e 37 mod E, no divisor of 256 or 384


class Model(NamedTuple):
    """Experts, hidden size, width of an expert."""

    experts: int
    hidden: int
    width: int


MODELS = {"Flash": Model(256, 4096, 2048), "Pro": Model(384, 7168, 3072)}


class Recipe(NamedTuple):
    """A precision mode: of the GEMM, of h.

    Also bytes a weight, bytes an activation, FLOP/s of its MMA (for the floor).
    """

    product: str
    h: str
    weight: float
    activation: float
    peak: float


RECIPES = {
    "nvfp4": Recipe("nvfp4", "nvfp4", 0.5 + 1 / 16, 0.5 + 1 / 16, 9e15),
    "mxfp4": Recipe("w4a8", "mxfp8", 0.5 + 1 / 32, 1 + 1 / 32, 4.5e15),
}
# The other launches: loads one after the other, counted by hand in kernels/{router,moe_dispatch,quantize,moe_combine}.
# The router's are its operands, the splits' path into L2, and the poll that finds them there.
WAITS = {"router": 3, "dispatch": 4, "quantise": 3, "combine": 3}


@dataclass(frozen=True)
class Shape:
    """A layer and its tokens.

    Raises:
        ArgumentError: an unknown model or mode, or no token.
    """

    model: str
    mode: str
    tokens: int

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ArgumentError("model", self.model, ", ".join(MODELS))
        if self.mode not in RECIPES:
            raise ArgumentError("mode", self.mode, ", ".join(RECIPES))
        if self.tokens < 1:
            raise ArgumentError("tokens", self.tokens, "at least 1")

    @property
    def active(self) -> float:
        """Return the experts that have a token, on average."""
        experts = MODELS[self.model].experts
        return experts * (1 - (1 - TOP / experts) ** self.tokens)

    @property
    def nbytes(self) -> float:
        """Count the bytes that must cross HBM: weights, and tokens in and out in bf16."""
        _, hidden, width = MODELS[self.model]
        return self.active * 3 * hidden * width * RECIPES[self.mode].weight + self.tokens * hidden * 4

    @property
    def flops(self) -> float:
        """Count the FLOPs of the routed experts."""
        _, hidden, width = MODELS[self.model]
        return 2.0 * 3 * hidden * width * TOP * self.tokens

    @property
    def floor_us(self) -> float:
        """Return the physical floor (performance.md section 2)."""
        return 1e6 * max(self.flops / RECIPES[self.mode].peak, self.nbytes / BANDWIDTH)

    def gemms(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return (features, K) of both."""
        _, hidden, width = MODELS[self.model]
        return (2 * width, hidden), (hidden, width)


def loads(experts: int, tokens: int, k: int = TOP) -> list[int]:
    """Return tokens of each expert when every choice is as likely.

    Quantiles of the binomial distribution, k T together.
    """
    share = k / experts
    logs = [math.lgamma(tokens + 1) - math.lgamma(c + 1) - math.lgamma(tokens - c + 1) for c in range(tokens + 1)]
    places = np.arange(tokens + 1)
    mass = np.exp(np.array(logs) + places * math.log(share) + (tokens - places) * math.log1p(-share))
    found = np.searchsorted(np.cumsum(mass), (np.arange(experts) + 0.5) / experts)
    missing = k * tokens - int(found.sum())  # of rounding: one each, from the most loaded down
    step = 1 if missing > 0 else -1
    for i in range(abs(missing)):
        found[experts - 1 - i % experts] += step
    return [int(found[e * MIXED % experts]) for e in range(experts)]


class Tile(NamedTuple):
    """A tile of the schedule: expert, number of its features' tile.

    Also rows, and the first of them within the expert.
    """

    expert: int
    feature: int
    row: int
    rows: int


def tiles(counts: Sequence[int], features: int, tile_n: int, tile_m: int) -> list[Tile]:
    """Every tile in the order of its number: CTA (or pair) c of g takes c, c + g, .. (`ops.moe_gemm.schedule`)."""
    out: list[Tile] = []
    for expert, rows in enumerate(counts):
        if rows:
            even = -(-rows // -(-rows // tile_n))
            share = -(-even // ROW_STEP) * ROW_STEP
            starts = range(0, rows, share)
            pairs = ((feature, row) for feature in range(-(-features // tile_m)) for row in starts)
            out += [Tile(expert, feature, row, min(share, rows - row)) for feature, row in pairs]
    return out


# ------------------------------------------------------------- what it does


@dataclass(frozen=True)
class Counted:
    """What a configuration of the GEMM does.

    Attributes:
        step: work of a CTA a K step, with 16 rows and with a full tile; transition: the same a tile, besides its steps.
        once: besides, of a launch.
        tile_n, tile_m, step_k: of a tile (of a pair), of a step; chunk: rows that the epilogue takes at once.
        ctas, stages, accumulators: of the configuration.
    """

    step: tuple[Work, Work]
    transition: tuple[Work, Work]
    once: Work
    tile_n: int
    tile_m: int
    step_k: int
    chunk: int
    ctas: int
    stages: int
    accumulators: int

    def step_of(self, rows: int) -> Work:
        """Model the step of a tile of so many rows. Everything grows with N, which is a multiple of 16."""
        n = -(-rows // N_STEP) * N_STEP
        few, full = self.step
        work = _between(few, full, (n - N_STEP) / max(1, self.tile_n - N_STEP))
        return replace(work, mma=Counter({replace(form, n=n): many for form, many in few.mma.items()}))

    def transition_of(self, rows: int) -> Work:
        """Model the epilogue, which goes by chunks of rows."""
        chunks, all_chunks = -(-rows // self.chunk), -(-self.tile_n // self.chunk)
        return _between(*self.transition, (chunks - 1) / max(1, all_chunks - 1))


def _between(low: Work, high: Work, share: float) -> Work:
    return low * (1 - share) + high * share


@lru_cache(maxsize=32)
def counted(kernel_type: type | None = None, **options: Any) -> Counted:
    """Count a configuration of a kernel in the emulator, by default of `ops.moe_gemm.sm100.MoeGemm`."""
    from dsv4lib.emulator.driver.device import make
    from dsv4lib.emulator.driver.host import launch
    from dsv4lib.ops.common import compile_cache
    from dsv4lib.ops.moe_gemm.arguments import fake_args, launch_args
    from dsv4lib.ops.moe_gemm.inputs import case
    from dsv4lib.ops.moe_gemm.sm100 import MoeGemm

    kernel, code = compile_cache.default().get(kernel_type or MoeGemm, options, fake_args)
    device = make("sm_100a", checks="off", trace=True)
    short, long = 2, 4

    def work(rows: int, feature_tiles: int, k_steps: int) -> Work:
        """Of one CTA (or pair) with one expert: tiles beside each other, of so many K steps."""
        made = case(kernel, [rows], feature_tiles * kernel.pair_m, k_steps * kernel.step_k)
        launch(code, *launch_args(kernel, made.call, 1), gpu=device)
        return count(device.trace)

    steps, transitions = [], []
    for rows in (N_STEP, kernel.tile_n):
        one = work(rows, 1, short)
        steps.append((work(rows, 1, long) - one) * (1 / (long - short)))
        transitions.append(work(rows, 2, short) - one - steps[-1] * short)
    once = one - steps[1] * short - transitions[1]
    sizes = kernel.tile_n, kernel.pair_m, kernel.step_k, kernel.chunk, kernel.ctas, kernel.stages, kernel.acc_stages
    return Counted(tuple(steps), tuple(transitions), once, *sizes)


def configurations(shape: Shape, shared: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of both GEMMs as `layers.moe` and `ops.moe_gemm` choose them."""
    model, recipe = MODELS[shape.model], RECIPES[shape.mode]
    most = shape.tokens if shared else largest(-(-shape.tokens * TOP // model.experts))
    out = []
    for number, (features, _) in enumerate(shape.gemms()):
        tile_n, ctas = tile_of(most, features)
        options: dict[str, Any] = {"mode": recipe.product, "tile_n": tile_n, "ctas": ctas}
        if number == 0:  # the routing weight is in h where it does not take range from a calibrated scale
            options |= {"swiglu": True, "out": recipe.h, "routed": shape.mode != "nvfp4" and not shared}
        out.append(options)
    return out[0], out[1]


# ---------------------------------------------------------- how long it takes


class Time(NamedTuple):
    """A modelled launch: us of all. Of HBM; of the longest CTA's tiles; what of it no tile hides; what limits it."""

    us: float
    hbm_us: float
    tiles_us: float
    fixed_us: float
    bound: str


def tile_clocks(c: Counted, rows: int, steps: int, card: Gpu, l2: float) -> tuple[float, float, str]:
    """Return (clocks of a tile among others, of its epilogue alone, what limits it).

    Args:
        rows: tokens of the tile; steps: of K; l2: B a clock that an SM gets.
    """
    step, transition = c.step_of(rows), c.transition_of(rows)
    needs = resources(step, card, l2)
    tasks = (
        Task("mma", "tensor core", max(needs["tensor core"], needs["SMEM"]), 0, (("load", 0),)),
        Task(
            "load", "TMA", max(needs["TMA in"], needs["L2"]), card["load_latency_clk"], (("mma", c.stages),), c.stages
        ),
    )
    loop = slope(Kernel("k", step, transition, tasks))
    epilogue = chain(replace(transition, mma=Counter()), card, len(EPILOGUE_WARPS))
    both = resources(step * steps + transition, card, l2)
    both |= {"latency of loads": loop * steps, "epilogue": epilogue}
    if loop <= longest(needs)[1] * 1.001:
        del both["latency of loads"]
    what, clocks = longest(both)
    if c.accumulators == 1:  # the next tile's MMAs wait until the epilogue has read the sums
        clocks = max(clocks, max(loop, longest(needs)[1]) * steps + epilogue)
    return clocks, epilogue, what


def timed(c: Counted, counts: Sequence[int], features: int, k: int, card: Gpu, hbm_bytes: float) -> Time:
    """Predict the time of one GEMM.

    Args:
        counts: tokens of each expert; features, k: of its weights; hbm_bytes: that must cross HBM.
    """
    steps, grid = -(-k // c.step_k), int(card["sms"]) // c.ctas
    work = tiles(counts, features, c.tile_n, c.tile_m)
    l2 = l2_share(card, min(len(work), grid) * c.ctas)
    costs = {rows: tile_clocks(c, rows, steps, card, l2) for rows in {tile.rows for tile in work}}
    latest, its_tiles, what = 0.0, 0.0, ""
    for first in range(min(grid, len(work))):
        mine = work[first::grid]
        # Each role finds its first tile by walking through windows of experts, one load after the other.
        walk = (mine[0].expert // WINDOW + 1) * card["load_wait_clk"]
        body = sum(costs[tile.rows][0] for tile in mine)
        _, epilogue, limit = costs[mine[-1].rows]
        end = walk + card["load_latency_clk"] + body + epilogue
        if end > latest:
            latest, its_tiles, what = end, body, limit
    hbm = hbm_bytes / card.hbm_clk_bytes
    clocks = card["first_byte_clk"] + max(latest, hbm)
    us = card.microseconds(clocks) + card["launch_us"]
    fixed = us - card.microseconds(max(its_tiles, hbm))
    parts = {what: card.microseconds(its_tiles), "HBM": card.microseconds(hbm), "launch and latency": fixed}
    return Time(us, card.microseconds(hbm), card.microseconds(its_tiles), fixed, longest(parts)[0])


def gemm_bytes(shape: Shape, number: int, card: Gpu, experts: float, rows: int) -> float:
    """Return the bytes that cross HBM in GEMM ``number``. Weights of ``experts``, and rows that L2 cannot hold."""
    recipe, (features, k) = RECIPES[shape.mode], shape.gemms()[number]
    out = rows * (features / 2 * recipe.activation if number == 0 else features * 2)
    held = (rows * k * recipe.activation, out)
    return experts * features * k * recipe.weight + sum(b for b in held if b > card["l2_size"])


def others_us(shape: Shape, card: Gpu) -> dict[str, float]:
    """Predict the four launches that are no GEMMs. Each has a dependent launch, its waits and its bytes.

    The router reads its weights from HBM before.
    """
    model, recipe = MODELS[shape.model], RECIPES[shape.mode]
    rows, row = shape.tokens * TOP, model.hidden * 2
    nbytes = {
        "router": (model.experts + shape.tokens) * row,
        "dispatch": rows * 24,
        "quantise": rows * (row + model.hidden * recipe.activation),
        "combine": (rows + shape.tokens) * row,
    }
    clocks = {name: static_model.short_clocks(card, waits, nbytes[name]) for name, waits in WAITS.items()}
    clocks["router"] += model.experts * row / card.hbm_clk_bytes
    return {name: card.microseconds(count) for name, count in clocks.items()}


# ------------------------------------------------------------------ the table


@dataclass(frozen=True)
class Row:
    """One line: a shape, its modelled time, and what stands beside it.

    ``fixed_us`` is the part of the GEMMs' time that no tile and no byte of HBM takes: launch, set-up, walk, latencies;
    ``others_us`` the other four launches; ``shared_us`` three more for a shared expert, not in ``modelled_us``.
    """

    model: str
    mode: str
    tokens: int
    active: int
    tile_n: int
    ctas: int
    tiles: int
    gemm1_us: float
    gemm2_us: float
    fixed_us: float
    others_us: float
    modelled_us: float
    error_low: float
    error_high: float
    bound: str
    floor_us: float
    fraction: float
    tflops: float
    shared_us: float
    published: str


def predict(shape: Shape, card: Gpu, errors: dict[str, tuple[float, float]]) -> Row:
    """Predict the line of a shape. ``errors``: (smallest, largest) of the calibration, by regime."""
    counts = loads(MODELS[shape.model].experts, shape.tokens)
    active = sum(n > 0 for n in counts)
    chosen = [counted(**options) for options in configurations(shape)]
    times = []
    for number, c in enumerate(chosen):
        nbytes = gemm_bytes(shape, number, card, active, TOP * shape.tokens)
        times.append(timed(c, counts, *shape.gemms()[number], card, nbytes))
    rest = sum(others_us(shape, card).values())
    total = times[0].us + times[1].us + rest
    fixed = times[0].fixed_us + times[1].fixed_us
    slowest = max(times, key=lambda time: time.us)
    bound = "launches" if 2 * (fixed + rest) > total else slowest.bound
    low, high = errors["memory" if bound == "HBM" else "gemm"]
    features = shape.gemms()[0][0]
    return Row(
        shape.model,
        shape.mode,
        shape.tokens,
        active,
        chosen[0].tile_n,
        chosen[0].ctas,
        len(tiles(counts, features, chosen[0].tile_n, chosen[0].tile_m)),
        times[0].us,
        times[1].us,
        fixed,
        rest,
        total,
        low,
        high,
        bound,
        shape.floor_us,
        shape.floor_us / total,
        shape.flops / total / 1e6,
        shared_us(shape, card),
        published(shape),
    )


def shared_us(shape: Shape, card: Gpu) -> float:
    """Predict the shared expert: all tokens, one expert, three launches of its own."""
    model, recipe = MODELS[shape.model], RECIPES[shape.mode]
    total = 0.0
    for number, options in enumerate(configurations(shape, shared=True)):
        nbytes = gemm_bytes(shape, number, card, 1, shape.tokens)
        total += timed(counted(**options), [shape.tokens], *shape.gemms()[number], card, nbytes).us
    moved = shape.tokens * model.hidden * (2 + recipe.activation)
    return total + card.microseconds(static_model.short_clocks(card, WAITS["quantise"], moved))


# Published numbers of SM100 kernels (performance.md section 1 b): their authors', on the machines they state.
_PUBLISHED = {
    ("Flash", "mxfp4", 1): "DeepGEMM mega MoE, 8 GPUs: 56 us",
    ("Flash", "mxfp4", 512): "DeepGEMM mega MoE, 8 GPUs, 512 a GPU: 146 us, 1056 TFLOP/s",
    ("Flash", "mxfp4", 4096): "DeepGEMM mega MoE, 8 GPUs, 8192 a GPU: 1928 TFLOP/s",
    ("Pro", "mxfp4", 4096): "DeepGEMM mega MoE, 8 GPUs, 8192 a GPU: 3144 us",
    ("Pro", "nvfp4", 4096): "NVFP4 mega MoE, 8 GPUs, 8192 a GPU: 1717 us",
    ("Flash", "nvfp4", 1): "FlashInfer PR 5301: 26 us (shape not stated)",
    ("Flash", "nvfp4", 128): "FlashInfer PR 5301: 144 us (a smaller shape: below this floor)",
    ("Flash", "nvfp4", 512): "FlashInfer PR 5301, 1024 tokens: 553 TFLOP/s (shape not stated)",
}


def published(shape: Shape) -> str:
    """Return what others have published next to a shape, "" where nothing is near."""
    return _PUBLISHED.get((shape.model, shape.mode, shape.tokens), "")


def shapes() -> list[Shape]:
    """List every line of the table."""
    return [Shape(model, mode, tokens) for model in MODELS for mode in RECIPES for tokens in TOKENS]


def run(card: Gpu | None = None) -> list[Row]:
    """Count the kernel and predict every shape."""
    card = card or gpu("B200")
    checked = calibration.check()
    errors = {regime: calibration.error(regime, checked) for regime in calibration.REGIMES}
    return [predict(shape, card, errors) for shape in shapes()]


def points(rows: list[Row]) -> dict[str, dict[str, list[tuple[float, float, str]]]]:
    """Return points for a roofline. model -> mode -> (FLOP a byte of weights, modelled TFLOP/s, "T ...")."""
    out: dict[str, dict[str, list[tuple[float, float, str]]]] = {model: {} for model in MODELS}
    for row in rows:
        shape = Shape(row.model, row.mode, row.tokens)
        label = f"T {row.tokens}" if row.mode == "mxfp4" else ""
        out[row.model].setdefault(row.mode, []).append((shape.flops / shape.nbytes, row.tflops, label))
    return out


def record(rows: list[Row], path: Path = RESULTS) -> None:
    """Write the table."""
    table.record(rows, path)


def recorded(path: Path = RESULTS) -> list[Row]:
    """Read the table as it was written."""
    return table.recorded(Row, path)
