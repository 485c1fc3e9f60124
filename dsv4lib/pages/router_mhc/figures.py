"""Show the boundary between two sublayers and the router after it. Run in the emulator, judged in fp64, drawn.

An injected fault (one of `FAULTS`) is made either in what an op is given or in the rule it is judged by: both differ by
exactly what a kernel with that fault would be wrong by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple
from unittest.mock import patch

import torch
from matplotlib.figure import Figure

from dsv4lib import emulator
from dsv4lib.bench.ops.results import Result
from dsv4lib.config import FLASH
from dsv4lib.ops.mhc import op as mhc_op
from dsv4lib.ops.mhc.faults import FAULTS as MHC_FAULTS
from dsv4lib.ops.mhc.few_tokens import MhcFewTokens
from dsv4lib.ops.mhc.op import ITERS, NORMAL, Site, mhc_post_pre, new_fp8
from dsv4lib.ops.quantize.op import quantize
from dsv4lib.ops.rmsnorm import op as rmsnorm_op
from dsv4lib.ops.rmsnorm.faults import FAULTS as NORM_FAULTS
from dsv4lib.ops.rmsnorm.kernel import RmsNorm
from dsv4lib.ops.rmsnorm.op import add_rmsnorm
from dsv4lib.ops.rmsnorm_quant.op import AddNormed, add_rmsnorm_quant
from dsv4lib.ops.router.op import Hashed, router
from dsv4lib.pages.common.faults import expected
from dsv4lib.reference import mhc as oracle
from dsv4lib.reference import quantize as quantize_oracle
from dsv4lib.reference import router as router_oracle
from dsv4lib.reference.rmsnorm import rmsnorm
from dsv4lib.viz import diagram, grids, model
from dsv4lib.viz.bars import Panel, side_by_side
from dsv4lib.viz.kinds import colour
from dsv4lib.viz.table import show_table

N, K, FACTOR, EPS = 4, 6, FLASH.routed_scaling, NORMAL.hc
VOCABULARY = 64  # rows of the small hash table
BF16, FP32 = 2.0**-8, 2.0**-24  # half of what separates two numbers, relative, at most
TWINS = 3, 11  # two experts with one gate row and one bias: their scores tie for every token
LIKED = 2.5  # that bias: more than any difference of affinities
ARCH = "sm_100a"
OPS = "mhc", "router", "add_rmsnorm_quant", "qnorm_rope_kv", "inv_rope_quant"  # whose times were recorded
FAULTS = (
    "none",
    "comb_plain",
    "normed_copy",
    "post_without_2",
    "few_pairs",
    "weight_forgotten",
    "y_unrounded",
    "bias_forgotten",
    "bias_in_weights",
    "ties_high",
    "uniform_hash",
    "fn_uncounted",
    *MHC_FAULTS,
    *NORM_FAULTS,
)


@dataclass(frozen=True)
class Boundary:
    """Everything that crosses one boundary.

    Attributes:
        streams: bf16 [T, 4, d]. f: bf16 [T, d], the sublayer's output. post, comb: fp32, of the site before it.
        site: parameters of the next site.
        gate: bf16 [E, d]. bias: fp32 [E]. hashed: the table's way.
    """

    streams: torch.Tensor
    f: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor
    site: Site
    gate: torch.Tensor
    bias: torch.Tensor
    hashed: Hashed


class Found(NamedTuple):
    """What the ops gave. It is of the boundary, of the router by score, of the router by table; and hazards."""

    streams: torch.Tensor
    y: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor
    logits: torch.Tensor
    hash_experts: torch.Tensor
    hash_weights: torch.Tensor
    hazards: int


class Judged(NamedTuple):
    """fp64 values, and errors. Streams, y in units of their bound, the others absolute or relative as named."""

    streams: torch.Tensor
    y: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor
    affinity: torch.Tensor
    metrics: dict[str, float]


def case(tokens: int, d: int, experts: int, seed: int) -> Boundary:
    """Make normals. Tokens, streams and outputs have different scales, two experts are alike and liked."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    sizes = torch.logspace(-2, 2, tokens)[:, None, None] * torch.tensor([1.0, 3.0, 0.5, 2.0])[:, None]
    gate, bias = (normal(experts, d) * d**-0.5).bfloat16(), 0.3 * normal(experts)
    first, second = TWINS
    gate[second], bias[first], bias[second] = gate[first], LIKED, LIKED
    table = torch.stack([torch.randperm(experts, generator=generator)[:K] for _ in range(VOCABULARY)])
    return Boundary(
        streams=(normal(tokens, N, d) * sizes).bfloat16(),
        f=(normal(tokens, d) * sizes[:, 1].flip(0)).bfloat16(),
        post=2 * torch.sigmoid(normal(tokens, N)),
        comb=oracle.sinkhorn(normal(tokens, N, N), ITERS, EPS).contiguous(),
        site=Site(normal(24, N * d) * (N * d) ** -0.5, 1 + 0.3 * normal(3), normal(24), 1 + 0.3 * normal(d)),
        gate=gate,
        bias=bias,
        hashed=Hashed(table, torch.randint(VOCABULARY, (tokens,), generator=generator)),
    )


def run(given: Boundary, fault: str = "none") -> Found:
    """Run the boundary, then both routers on its y. In the emulator with the race detector on."""
    comb = given.comb.mT.contiguous() if fault == "comb_plain" else given.comb
    site, bias = given.site, given.bias
    if fault == "weight_forgotten":
        site = site._replace(weight=torch.ones_like(site.weight))
    if fault == "bias_forgotten":
        bias = torch.zeros_like(bias)
    pairs = 3 if fault == "few_pairs" else ITERS
    kernel = MHC_FAULTS.get(fault, MhcFewTokens)
    with patch.object(mhc_op, "MhcFewTokens", kernel), expected(), emulator.device(ARCH, checks="race") as gpu:
        before = given.streams, given.f, given.post, comb
        boundary = mhc_post_pre(*before, site, iters=pairs, backend="emulator")
        y = boundary[1]
        experts, weights = router(y, given.gate, k=K, factor=FACTOR, bias=bias, backend="emulator")
        logits = y.float() @ given.gate.float().T
        by_table = router(logits, k=K, factor=FACTOR, hashed=given.hashed, backend="emulator")
    return Found(*boundary, experts, weights, logits, *by_table, len(gpu.hazards))


def judge(given: Boundary, found: Found, fault: str = "none") -> Judged:
    """Compare with fp64, each step on what the op itself handed on."""
    streams, f, post, comb = (x.double() for x in (given.streams, given.f, given.post, given.comb))
    exact = oracle.post(f, streams, post, comb)
    sums = oracle.post(f.abs(), streams.abs(), post, comb)
    z, site = found.streams.double(), Site(*(x.double() for x in given.site))
    pre_w, post_w, comb_w = oracle.coefficients(z, *site[:3], iters=ITERS, hc_eps=EPS, rms_eps=EPS)
    if fault == "post_without_2":
        post_w = post_w / 2
    if fault == "normed_copy":
        normed = rmsnorm(z.flatten(-2), None, EPS).bfloat16().double().view_as(z)
        pre_w, post_w, comb_w = oracle.coefficients(normed, *site[:3], iters=ITERS, hc_eps=EPS, rms_eps=EPS)
    x = oracle.pre(z, pre_w)
    y = rmsnorm(x, site.weight, EPS)
    root = x.square().mean(-1, keepdim=True).sqrt().clamp_min(EPS)
    y_size = y.abs() + site.weight.abs() * 2.0**-17 * oracle.pre(z.abs(), pre_w) / root
    a, metrics = _judge_router(given, found, fault)
    metrics |= {
        "stream_error": _worst(found.streams, exact, BF16 * exact.abs() + 8 * FP32 * sums),
        "coefficient_error": max(_far(found.post, post_w), _far(found.comb, comb_w)),
        "row_sum_error": _far(found.comb.double().sum(-1), comb_w.sum(-1)),  # 20 pairs need not have reached 1
        "column_sum_error": float((found.comb.double().sum(-2) - 1).abs().max()),
        "y_error": _worst(found.y, y, 2.02 * BF16 * y_size),
        "hazards": found.hazards,
    }
    return Judged(exact, y, post_w, comb_w, a, metrics)


def _judge_router(given: Boundary, found: Found, fault: str) -> tuple[torch.Tensor, dict[str, float]]:
    a = router_oracle.affinity(found.y.double(), given.gate.double())
    scores = a + given.bias.double()
    experts = router_oracle.select_by_score(a, given.bias.double(), K)
    if fault == "ties_high":  # the higher number first
        experts = a.shape[1] - 1 - router_oracle.select_by_score(a.flip(-1), given.bias.double().flip(-1), K)
    taken = found.experts.long()
    weights = router_oracle.expert_weights(scores if fault == "bias_in_weights" else a, taken, FACTOR)
    by_table = router_oracle.select_by_hash(given.hashed.tokens, given.hashed.table)
    b = torch.nn.functional.softplus(found.logits.double()).sqrt()
    table_weights = router_oracle.expert_weights(b, by_table, FACTOR)
    if fault == "uniform_hash":
        table_weights = torch.full_like(table_weights, FACTOR / K)
    return a, {
        "experts_wrong": int((taken != experts).sum()) + int((found.hash_experts != by_table).sum()),
        "weight_error": float((found.weights.double() / weights - 1).abs().max()),
        "hash_weight_error": float((found.hash_weights.double() / table_weights - 1).abs().max()),
    }


def _worst(found: torch.Tensor, want: torch.Tensor, bound: torch.Tensor) -> float:
    return float(((found.double() - want).abs() / bound).max())


def _far(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.double() - want).abs().max())


class Fusion(NamedTuple):
    """The fused norm beside the two ops. How many of their bytes differ, and how many of mHC's FP8 from a cast of y."""

    fused: AddNormed
    h: torch.Tensor
    y: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor
    differ: int
    mhc_differ: int
    hazards: int


def fusion(given: Boundary, fault: str = "none") -> Fusion:
    """Add sublayer output and one stream, norm and quantise to FP8. It is done in one launch, and in two."""
    x, residual, weight = given.f, given.streams[:, 0].contiguous(), given.site.weight
    norm = patch.object(rmsnorm_op, "RmsNorm", NORM_FAULTS.get(fault, RmsNorm))
    with norm, expected(), emulator.device(ARCH, checks="race") as gpu:
        fused = add_rmsnorm_quant(x, residual, weight, "fp8", keep=True, backend="emulator")
        h, y = add_rmsnorm(x, residual, weight, backend="emulator")
        codes, scales, _ = quantize(y, "fp8", backend="emulator")
        fp8 = new_fp8(given.streams)
        before = given.streams, given.f, given.post, given.comb
        mixed = mhc_post_pre(*before, given.site, fp8=fp8, backend="emulator")[1]
        cast = quantize(mixed, "fp8", swizzled=True, backend="emulator")
    if fault == "y_unrounded":  # a chain that keeps y in registers, in fp32
        wide = rmsnorm(h.float(), weight, NORMAL.rms)
        codes, scales, _ = quantize_oracle.quantize(wide, "fp8")
        codes, scales = codes[0], scales[0]
    pairs = (fused.h, h), (fused.y, y), (fused.codes, codes), (fused.scales, scales)
    differ = sum(int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in pairs)
    mhc_differ = int((fp8.codes != cast.codes).sum() + (fp8.scales != cast.scales).sum())
    return Fusion(fused, h, y, codes, scales, differ, mhc_differ, len(gpu.hazards))


def flow() -> Figure:
    """Draw three launches as boxes."""
    return diagram.pipeline(
        {
            "mhc_post_pre, one launch: from the streams after one sublayer to the input of the next": [
                ("X, F", "4 streams, last output", colour("given")),
                ("write-back", "post F + comb^T X", colour("transform")),
                ("project", "24 rows of fn on all 4 d values", colour("product")),
                ("rsqrt", "of mean z^2, after it", colour("transform")),
                ("three maps", "sigmoids and Sinkhorn", colour("transform")),
                ("mixture", "x = sum of pre X", colour("transform")),
                ("RMSNorm", "y, what F reads", colour("result")),
            ],
            "router: one launch up to 32 tokens": [
                ("y", "bf16 [T, d]", colour("given")),
                ("gate", "W y, sums in fp32", colour("product")),
                ("affinity", "a = sqrt of softplus", colour("transform")),
                ("select", "6 of a + bias, or a table", colour("choice")),
                ("weights", "a / sum of a, times factor", colour("result")),
            ],
            "add_rmsnorm_quant, one launch: where a residual is one stream": [
                ("x, residual", "bf16 [T, d]", colour("given")),
                ("add", "h, to bf16", colour("transform")),
                ("RMSNorm", "y, to bf16", colour("transform")),
                ("quantise", "amax of 128, codes and scales", colour("storage")),
            ],
        },
        "one boundary between two sublayers",
    )


def coefficient_map(found: Found) -> Figure:
    """Draw the post of each token as numbers: 1 is what an ordinary residual has."""
    names = [f"token {t}" for t in range(len(found.post))]
    labels = "", "stream that takes the output", "post"
    return grids.value_map(found.post[:16], names[:16], list("0123"), labels, "post = 2 sigmoid(...)", "{:.2f}")


def combs(found: Found, count: int = 5) -> Figure:
    """Draw the comb of the first tokens."""
    shown = found.comb[:count]
    return model.mixing_matrices(shown, [f"token {t}" for t in range(len(shown))], "comb: from row to column")


def pairs(logits: torch.Tensor, iters: int = ITERS, eps: float = EPS) -> torch.Tensor:
    """Return the matrix after each row/column pair of `reference.mhc.sinkhorn`. [..., n, n] -> [iters, ..., n, n]."""
    return torch.stack([oracle.sinkhorn(logits, done, eps) for done in range(1, iters + 1)])


def comb_logits(given: Boundary, found: Found) -> torch.Tensor:
    """Return what Sinkhorn starts from, fp64 [T, 4, 4]."""
    fn, scale, base, _ = (x.double() for x in given.site)
    m = oracle.split(oracle.mixes(found.streams.double(), fn, EPS), N)[2]
    return scale[2] * m + oracle.split(base, N)[2]


def convergence(given: Boundary, found: Found) -> Figure:
    """Draw how far row and column sums are from 1, pair by pair. Largest of all tokens."""
    start = comb_logits(given, found)
    lines: dict[str, dict[str, torch.Tensor]] = {"row sums": {}, "column sums": {}}
    for name, times in (("these logits", 1), ("3 times as large", 3)):
        steps = pairs(times * start)
        for title, axis in (("row sums", -1), ("column sums", -2)):
            lines[title][name] = (steps.sum(axis) - 1).abs().flatten(1).max(1).values
    return model.curves(range(1, ITERS + 1), lines, "row/column pairs done", "largest |sum - 1|", "y")


def gains(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the product of write-backs so far, [sites], by what holds the matrices.

    As its largest absolute row sum.
    """
    generator, sites = torch.Generator().manual_seed(seed), 2 * FLASH.n_layers
    logits = torch.randn(sites, N, N, generator=generator, dtype=torch.float64)
    kinds = {
        "20 pairs": oracle.sinkhorn(logits, ITERS, EPS),
        "softmax of rows only": torch.softmax(logits, -1),
        "1 + 0.1 normal, unconstrained": torch.eye(N) + 0.1 * logits,
    }
    out = {}
    for name, matrices in kinds.items():
        total, sizes = torch.eye(N, dtype=torch.float64), []
        for matrix in matrices:
            total = matrix.mT @ total
            sizes.append(total.abs().sum(-1).max())
        out[name] = torch.stack(sizes)
    return out


def growth(seed: int = 0) -> Figure:
    """Draw `gains`."""
    found = gains(seed)
    sites = range(1, 2 * FLASH.n_layers + 1)
    return model.curves(sites, {"what the mixing does to a stream": found}, "sites", "largest gain", "y")


def scores(given: Boundary, found: Found, judged: Judged, token: int = 0, count: int = 10) -> Figure:
    """Draw the best experts of one token by a + bias: what selects, what weighs."""
    a = judged.affinity[token]
    order = (a + given.bias).argsort(descending=True, stable=True)[:count].tolist()
    weight = dict(zip(found.experts[token].tolist(), found.weights[token].tolist(), strict=True))
    panels = [
        Panel("a + bias: selects", [float(a[e] + given.bias[e]) for e in order], "{:.3f}"),
        Panel("a: weighs", [float(a[e]) for e in order], "{:.3f}"),
        Panel("weight", [weight.get(e, 0.0) for e in order], "{:.3f}"),
    ]
    names = [f"expert {e}" for e in order]
    return side_by_side(
        names, panels, [e in weight for e in order], f"token {token}: the chosen experts, and the next", 3
    )


def loads(tokens: int = 1024, experts: int = 64, steps: int = 150, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the tokens of each expert over the mean, largest first. Without bias, with one that was trained, by table.

    The bias grows where an expert has fewer tokens than the mean and shrinks where it has more, by a fixed step.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=generator) + 0.7 * torch.randn(experts, generator=generator)
    a, bias = torch.nn.functional.softplus(logits).sqrt(), torch.zeros(experts)
    mean = tokens * K / experts

    def load(chosen: torch.Tensor) -> torch.Tensor:
        return torch.bincount(chosen.flatten(), minlength=experts) / mean

    out = {"no bias": load(router_oracle.select_by_score(a, bias, K))}
    for _ in range(steps):
        bias += 0.01 * (1 - load((a + bias).topk(K).indices)).sign()
    out["a trained bias"] = load(router_oracle.select_by_score(a, bias, K))
    out["random table"] = load(torch.rand(tokens, experts, generator=generator).topk(K).indices)
    return {name: line.sort(descending=True).values for name, line in out.items()}


def load_figure(found: Mapping[str, torch.Tensor]) -> Figure:
    """Draw `loads`."""
    experts = len(next(iter(found.values())))
    return model.curves(
        range(experts), {"load of every expert": found}, "expert, the busiest first", "tokens over the mean"
    )


class Step(NamedTuple):
    """One launch of a chain. It has a name, and the tensors it reads and writes, by name, in bytes."""

    name: str
    reads: dict[str, int]
    writes: dict[str, int]


def mhc_chain(tokens: int, d: int) -> tuple[list[Step], set[str]]:
    """List the four launches of the boundary, and what later launches still read."""
    wide, row, mat, vec = tokens * N * d * 2, tokens * d * 2, tokens * N * N * 4, tokens * N * 4
    return [
        Step("write-back", {"X": wide, "F": row, "post": vec, "comb": mat}, {"X'": wide}),
        Step(
            "project, Sinkhorn",
            {"X'": wide, "fn": 24 * N * d * 4},
            {"pre": vec, "post'": vec, "comb'": mat},
        ),
        Step("mixture", {"X'": wide, "pre": vec}, {"x": row}),
        Step("norm", {"x": row, "weight": d * 4}, {"y": row}),
    ], {"X'", "post'", "comb'", "y"}


def norm_chain(tokens: int, d: int) -> tuple[list[Step], set[str]]:
    """List addition with norm, then quantisation to FP8, and what later launches read."""
    row = tokens * d * 2
    return [
        Step("add, norm", {"x": row, "residual": row, "weight": d * 4}, {"h": row, "y": row}),
        Step("quantise", {"y": row}, {"codes": tokens * d, "scales": tokens * d // 128}),
    ], {"h", "codes", "scales"}


def chain_bytes(steps: list[Step]) -> int:
    """Count what each launch moves."""
    return sum(sum(step.reads.values()) + sum(step.writes.values()) for step in steps)


def fused_bytes(steps: list[Step], wanted: set[str]) -> int:
    """Count what one launch moves: each input once, and only what later launches read."""
    made = {name: size for step in steps for name, size in step.writes.items()}
    read = {name: size for step in steps for name, size in step.reads.items() if name not in made}
    return sum(read.values()) + sum(size for name, size in made.items() if name in wanted)


def traffic(rows: list[Result], fault: str = "none") -> int:
    """A table of chain and fused bytes at Flash's size. Returns how many bytes the recorded rows count otherwise."""
    lines, off = [], 0
    for op, shape, chain in (("mhc", "Flash", mhc_chain), ("add_rmsnorm_quant", "Flash fp8", norm_chain)):
        for tokens in (1, 8, 32, 128, 4096):
            steps, wanted = chain(tokens, FLASH.hidden)
            if fault == "fn_uncounted":
                steps = [step._replace(reads={k: v for k, v in step.reads.items() if k != "fn"}) for step in steps]
            apart, fused = chain_bytes(steps), fused_bytes(steps, wanted)
            row = next(row for row in rows if (row.op, row.shape) == (op, f"{shape} T {tokens}"))
            off += abs(fused - row.bytes)
            ours = f"{row.ours_us:.1f}" if row.ours_us else ""
            lines.append((op, tokens, len(steps), f"{apart:,}", f"{fused:,}", f"{apart / fused:.2f}", ours))
    show_table(("op", "tokens", "launches", "bytes apart", "bytes fused", "ratio", "H200, us (fused)"), lines)
    return off
