"""Run the ops of a CSA layer's indexer, for notebook and stage. Inputs, runs, and what speaks against them.

Queries, keys, scores and picks go through the kernels (`indexer_q`, `quantize_indexer_keys`, `indexer_logits`,
`topk`). An injected fault is a class of one of the `faults` modules in place of its kernel, or keys that were stored
without their rotation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from dsv4lib import backends
from dsv4lib.config import FLASH, LayerKind
from dsv4lib.emulator.driver.device import make
from dsv4lib.emulator.driver.host import launch
from dsv4lib.formats import e4m3, hadamard, indexer_key, mxfp4
from dsv4lib.ops.common import compile_cache
from dsv4lib.ops.indexer_logits import faults as logits_faults
from dsv4lib.ops.indexer_logits.sm100 import IndexerLogits
from dsv4lib.ops.indexer_q import arguments as query_arguments
from dsv4lib.ops.indexer_q import faults as indexer_q_faults
from dsv4lib.ops.indexer_q import op as query_op
from dsv4lib.ops.indexer_q.kernel import IndexerQ
from dsv4lib.ops.indexer_q.op import IndexerQueries
from dsv4lib.ops.topk import arguments as pick_arguments
from dsv4lib.ops.topk import faults as topk_faults
from dsv4lib.ops.topk import op as pick_op
from dsv4lib.ops.topk.cluster import ClusterTopK
from dsv4lib.ops.topk.kernel import TopK
from dsv4lib.pages.common import faults as injected
from dsv4lib.pages.common.faults import ARCH, ARCHS, SECTOR, Traffic
from dsv4lib.pages.indexer import scoring
from dsv4lib.pages.indexer.scoring import Scored, Stored
from dsv4lib.reference import indexer, rope
from dsv4lib.reference import topk as oracle

DIM, HEADS, RATE = indexer_key.DIM, FLASH.index_heads, 4
OUTLIERS = (3, 40, 70, 99)  # dims in which queries and keys are large, as trained ones are
LOUD = 12.0
BLOCK = mxfp4.BLOCK
HARD, HARD_K = 2000, 75  # scores of a hard row, and how many are picked


class Kernels(NamedTuple):
    """The kernels of this page. `rotate_keys`: keys are rotated as queries are.

    One for picks is that of a CTA a row or of a cluster; the other one is the right one then.
    """

    queries: type = IndexerQ
    picks: type = TopK
    scores: type = IndexerLogits
    rotate_keys: bool = True


RIGHT = Kernels()
SCORE_FAULTS = "NoRelu", "PagesInOrder", "OneScoreTooMany", "KeyScalesInRows"  # those that one FP4 request shows
FAULTS = {
    **{name: Kernels(queries=kernel) for name, kernel in indexer_q_faults.FAULTS.items()},
    **{name: Kernels(picks=kernel) for name, kernel in topk_faults.FAULTS.items()},
    **{name: Kernels(scores=logits_faults.FAULTS[name]) for name in SCORE_FAULTS},
    "KeysNotRotated": Kernels(rotate_keys=False),
}


def kernels_of(fault: str) -> Kernels:
    """Return the kernels to run; the right ones where the fault is none of theirs."""
    return FAULTS.get(fault, RIGHT)


# ------------------------------------------------------------------ inputs


class Step(NamedTuple):
    """Some queries of a request, and the keys of its entries.

    Attributes:
        q: bf16 ``[T, 64, 128]``, weights: bf16 ``[T, 64]``, both as projected. positions: int64 ``[T]``.
        keys: bf16 ``[S, 128]``, RoPE applied, one for four tokens. table: fp32 ``[4 S, 64]``, cosines and sines.
    """

    q: torch.Tensor
    weights: torch.Tensor
    positions: torch.Tensor
    keys: torch.Tensor
    table: torch.Tensor

    @property
    def visible(self) -> torch.Tensor:
        """Count entries whose four tokens are all there, up to the query's own. int64 ``[T]``."""
        return (self.positions + 1) // RATE


def step(entries: int, k: int, seed: int) -> Step:
    """Return a request of 4 ``entries`` tokens. Its first queries, those around k entries, and its last ones."""
    generator = torch.Generator().manual_seed(seed)
    loud = torch.ones(DIM)
    loud[list(OUTLIERS)] = LOUD
    tokens = RATE * entries
    places = [0, 2, 3, 2 * k, RATE * k - 1, RATE * k + 3, tokens // 2, tokens - 2, tokens - 1]
    topics = torch.randn(8, DIM, generator=generator)
    raw = torch.randn(entries, DIM, generator=generator) + topics[torch.randint(8, (entries,), generator=generator)]
    about = topics[torch.randint(8, (len(places), HEADS), generator=generator)]
    q = (torch.randn(len(places), HEADS, DIM, generator=generator) + about) * loud.sqrt()
    weights = torch.randn(len(places), HEADS, generator=generator) + 0.5
    freqs = rope.layer_freqs(FLASH, LayerKind.CSA)
    keys = rope.apply(raw * loud.sqrt(), RATE * torch.arange(entries), freqs).bfloat16()
    table = torch.cat(rope.cos_sin(torch.arange(tokens), freqs, torch.float32), -1)
    return Step(q.bfloat16(), weights.bfloat16(), torch.tensor(places), keys, table)


def turned(one: Step) -> torch.Tensor:
    """Rotate queries by RoPE, fp64 ``[T, 64, 128]``, nothing rounded."""
    half = one.table.shape[1] // 2
    rows = one.table[one.positions].double()[:, None]
    return rope.apply_tables(one.q.double(), rows[..., :half], rows[..., half:])


def head_weights(one: Step) -> torch.Tensor:
    """Return fp64 ``[T, 64]``: weights as the score takes them."""
    return one.weights.double() * (DIM * HEADS) ** -0.5


# ------------------------------------------------------------------ queries and keys


def queries(
    one: Step, variant: str, backend: str, kernel: type = IndexerQ, hadamard: bool = True
) -> tuple[IndexerQueries, int]:
    """Return (what `dsv4::indexer_q` leaves, hazards)."""
    where, found = backends.device(backend), []
    given = [x.to(where) for x in (one.q, one.weights, one.positions, one.table)]

    def call() -> None:
        found.append(query_op.indexer_q(*given, variant=variant, hadamard=hadamard, backend=backend))

    hazards = injected.run(backend, call, (query_op, "IndexerQ", kernel))
    return IndexerQueries(*(None if x is None else x.cpu() for x in found[0])), hazards


def bytes_wrong(found: IndexerQueries, want: IndexerQueries) -> tuple[int, int]:
    """Return (codes and scales, weights) that are not the bits they should be."""
    parts = [(a != b).sum() for a, b in zip(found[:2], want[:2], strict=True) if a is not None]
    return int(sum(parts)), int((found.weights.view(torch.int32) != want.weights.view(torch.int32)).sum())


def values(found: IndexerQueries) -> torch.Tensor:
    """Return fp64 ``[T, H, 128]``: what the codes say. Of FP8 without the scale, which is in the weights."""
    if found.scales is None:
        return e4m3.decode(found.codes, torch.float64)
    return mxfp4.dequantize(mxfp4.MXFP4Tensor(found.codes, found.scales), torch.float64)


def stored_keys(one: Step, backend: str, rotate: bool = True) -> Stored:
    """Return keys through `dsv4::quantize_indexer_keys` into pages."""
    return scoring.stored(one.keys, backend, rotate)


def block_error(x: torch.Tensor, rotate: bool) -> torch.Tensor:
    """Return FP4's root mean square error over that of x, of each block of 32 dims. ``[..., 128]`` -> ``[4]``."""
    wide = hadamard.transform(x) if rotate else x
    error = mxfp4.dequantize(mxfp4.quantize(wide), torch.float64) - wide
    size = wide.unflatten(-1, (-1, BLOCK)).square().mean((*range(x.dim() - 1), -1))
    return (error.unflatten(-1, (-1, BLOCK)).square().mean((*range(x.dim() - 1), -1)) / size).sqrt()


# ------------------------------------------------------------------ scores


def scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return fp64 ``[T, S]`` by the oracle: a weighted sum over heads of ReLU(q . k)."""
    return indexer.scores(q[None], keys[None].double(), weights[None].double())[0]


def kernel_scores(one: Step, found: IndexerQueries, keys: Stored, backend: str, kernel: type = IndexerLogits) -> Scored:
    """Return the scores of FP4 queries by `dsv4::indexer_logits`."""
    return scoring.scored(found, values(found), keys, one.visible, backend, kernel)


def exact_scores(one: Step) -> torch.Tensor:
    """Score with nothing quantised."""
    return scores(turned(one), one.keys, head_weights(one))


def score_error(found: torch.Tensor, want: torch.Tensor) -> float:
    """Return the worst query's root mean square difference of scores. It is over the spread of the right ones."""
    return float(((found - want).square().mean(-1).sqrt() / want.std(-1)).max())


def folded_error(one: Step, found: IndexerQueries, keys: torch.Tensor) -> float:
    """Return the error of FP8's scores by codes and folded weights.

    Against values and plain weights, relative to the largest.
    """
    cos, sin = one.table[one.positions][:, None].chunk(2, -1)
    stored = indexer.rotated(one.q.float(), cos, sin, hadamard.transform, torch.bfloat16)
    largest = stored.double().abs().amax(-1)
    scale = torch.exp2(torch.ceil(torch.log2(largest / 448)))
    by_value = scores(values(found) * scale[..., None], keys, head_weights(one))
    folded = scores(values(found), keys, found.weights)
    return float((folded - by_value).abs().max() / by_value.abs().max())


# ------------------------------------------------------------------ picks


def picks(
    score: torch.Tensor, visible: torch.Tensor, k: int, backend: str, kernel: type = TopK
) -> tuple[torch.Tensor, int]:
    """Return (int32 ``[T, k]`` by `dsv4::topk`, hazards) of fp32 scores."""
    where, found = backends.device(backend), []
    given = score.float().contiguous().to(where), k, visible.int().to(where)
    name = "ClusterTopK" if issubclass(kernel, ClusterTopK) else "TopK"
    hazards = injected.run(
        backend, lambda: found.append(pick_op.topk(*given, backend=backend)), (pick_op, name, kernel)
    )
    return found[0].cpu(), hazards


def ascending(best: torch.Tensor) -> torch.Tensor:
    """Return the oracle's picks in the order of their indices, int32."""
    ranked = torch.where(best < 0, 1 << 30, best).sort(-1).values
    return torch.where(ranked == 1 << 30, -1, ranked).int()


def wanted_picks(score: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    """Return what `picks` must find: exact, of equal scores the lower index."""
    return ascending(oracle.topk(score.float(), k, visible))


def unseen_picked(found: torch.Tensor, visible: torch.Tensor) -> int:
    """Return the picks of entries that the query cannot see yet."""
    return int((found >= visible[:, None]).sum())


def padding_wrong(found: torch.Tensor, visible: torch.Tensor) -> int:
    """Count places past a row's last entry that are not -1."""
    past = torch.arange(found.shape[1]) >= visible[:, None]
    return int((found[past] != -1).sum())


def recall(found: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Share of the right picks that were found, a row; of rows with picks."""
    rows = [
        len(set(a[a >= 0].tolist()) & set(b[b >= 0].tolist())) / int((b >= 0).sum())
        for a, b in zip(found, want, strict=True)
        if (b >= 0).any()
    ]
    return torch.tensor(rows)


def hard_rows(seed: int) -> dict[str, torch.Tensor]:
    """Return the rows of `HARD` scores that are hard in different ways, by name."""
    x = torch.randn(HARD, generator=torch.Generator().manual_seed(seed))
    rising = torch.arange(HARD).float()
    return {
        "normal": x,
        "all equal": torch.full((HARD,), 0.5),
        "0 and -0": torch.where(x > 0, 0.0, -0.0),
        "three values": x.sign() * (x.abs() > 0.5),
        "forty values": rising % 40,
        "rising": rising,
        "falling": -rising,
        "one octave": 10 + 1e-3 * x,
        "denormal": x * 1e-40,
        "infinite": torch.where(x > 1, torch.inf, torch.where(x < 0, -torch.inf, x)),
        "mostly zero": x.clamp_min(1.5) - 1.5,
    }


# The op's variants, made for rows of 2,048 scores, so that all of them have something to do.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "one CTA": {"threads": 128, "vectors": 4, "bins": 1024},
    "one CTA, maxima first": {"threads": 128, "vectors": 4, "bins": 1024, "maxima": 2},
    "a cluster of 4": {"threads": 64, "vectors": 2, "ctas": 4},
    "tile after tile": {
        "threads": 64,
        "vectors": 2,
        "bins": 1024,
        "maxima": 2,
        "stream": True,
        "capacity": 2048,
        "keep": 512,
    },
}


def _kernel_of(variant: str, kernel: type = TopK) -> type:
    """``kernel`` if it is of that variant's kind, the right one of that kind otherwise."""
    right = ClusterTopK if "ctas" in VARIANTS[variant] else TopK
    return kernel if issubclass(kernel, ClusterTopK) == (right is ClusterTopK) else right


def hard_picks(variant: str, rows: torch.Tensor, kernel: type = TopK, arch: str = ARCH) -> tuple[torch.Tensor, int]:
    """Return (int32 picks of a variant of the kernel, hazards). It runs in the emulator, wherever this page runs."""
    fake = pick_arguments.fake_args
    made, code = compile_cache.default().get(_kernel_of(variant, kernel), dict(VARIANTS[variant]), fake, arch)
    gpu, found = make(arch, checks="race"), torch.full((len(rows), HARD_K), -7, dtype=torch.int32)
    lengths = torch.full((len(rows),), rows.shape[1], dtype=torch.int32)
    launch(code, *pick_arguments.launch_args(made, _pick(rows, lengths, found)), gpu=gpu)
    return found, len(gpu.hazards)


def hard_wrong(seed: int, kernel: type = TopK) -> tuple[dict[str, dict[str, int]], int]:
    """Return ({variant: {row: picks that are wrong}}, hazards)."""
    rows = hard_rows(seed)
    stacked, wrong, hazards = torch.stack(list(rows.values())), {}, 0
    want = wanted_picks(stacked, torch.full((len(rows),), HARD), HARD_K)
    for variant in VARIANTS:
        found, reported = hard_picks(variant, stacked, kernel)
        wrong[variant] = dict(zip(rows, (found != want).sum(-1).tolist(), strict=True))
        hazards += reported
    return wrong, hazards


def wrong_in(table: Mapping[str, Mapping[str, int]]) -> int:
    """Count all of `hard_wrong`'s."""
    return sum(sum(line.values()) for line in table.values())


def bins_of(score: torch.Tensor, bins: int = 1024) -> torch.Tensor:
    """Return int64: the bin of each score, 0 the best.

    It has 5 bits of exponent and some of the mantissa, for either sign.
    """
    half, bits = bins // 2, (score.float() + 0.0).view(torch.int32).long()  # the sum makes 0 of -0
    mantissa = half.bit_length() - 1 - 5
    magnitude = ((bits & 0x7FFFFFFF) >> 23 - mantissa) - (127 - 16 << mantissa)
    inside = magnitude.clamp(0, half - 1)
    return torch.where(bits < 0, half + inside, half - 1 - inside)


# ------------------------------------------------------------------ everything at once


def judged(kernels: Kernels, entries: int, k: int, seed: int, backend: str) -> dict[str, float]:
    """Judge every check of the page. What does not belong to a fault is 0, or at most as `figures.ALLOWED` has it."""
    one = step(entries, k, seed)
    found, hazards = {}, 0
    for variant in ("fp4", "fp8"):
        found[variant], reported = queries(one, variant, backend, kernels.queries)
        hazards += reported
    wrong = [bytes_wrong(q, queries(one, variant, "reference")[0]) for variant, q in found.items()]
    keys = stored_keys(one, backend, kernels.rotate_keys)
    exact, coded = exact_scores(one), scores(values(found["fp4"]), keys.values, found["fp4"].weights)
    ours = kernel_scores(one, found["fp4"], keys, backend, kernels.scores)
    picked, reported = picks(ours.scores, one.visible, k, backend, kernels.picks)
    table, raced = hard_wrong(seed, kernels.picks)
    return {
        "codes_wrong": sum(a for a, _ in wrong),
        "weights_wrong": sum(b for _, b in wrong),
        "score_error": score_error(coded, exact),
        "folded_error": folded_error(one, found["fp8"], keys.values),
        "logits_over_torch": ours.over_torch,
        "logits_stray": ours.stray,
        "lost": 1 - float(recall(picked, wanted_picks(exact, one.visible, k)).mean()),
        "picks_wrong": int((picked != wanted_picks(ours.scores, one.visible, k)).sum()),
        "unseen_picked": unseen_picked(picked, one.visible),
        "padding_wrong": padding_wrong(picked, one.visible),
        "hard_wrong": wrong_in(table),
        "hazards": hazards + ours.hazards + reported + raced,
    }


# ------------------------------------------------------------------ bytes, and the other architecture


def _asked_queries(one: Step, variant: str) -> Traffic:
    tokens, fp4 = len(one.q), variant == "fp4"
    settings = {"variant": variant, **query_op.shape_of(tokens, HEADS, fp4, True)}
    call = _query(one, variant)
    fake, args = query_arguments.fake_args, query_arguments.launch_args
    requested = injected.sectors(ARCH, IndexerQ, settings, fake, args, call)
    head = 2 * DIM + 2 + call.out.codes.shape[-1] + (DIM // BLOCK if fp4 else 0) + 4
    return Traffic(tokens * (HEADS * head + 8 + 4 * one.table.shape[1]), requested * SECTOR, tokens * HEADS)


def _requested_picks(variant: str, rows: torch.Tensor, kernel: type) -> Traffic:
    found = torch.empty(len(rows), HARD_K, dtype=torch.int32)
    lengths = torch.full((len(rows),), rows.shape[1], dtype=torch.int32)
    fake, args = pick_arguments.fake_args, pick_arguments.launch_args
    call = _pick(rows, lengths, found)
    requested = injected.sectors(ARCH, _kernel_of(variant, kernel), VARIANTS[variant], fake, args, call)
    return Traffic(4 * (rows.numel() + len(rows) * (HARD_K + 1)), requested * SECTOR, rows.numel())


def traffic(one: Step, seed: int, kernel: type = TopK) -> tuple[dict[str, Traffic], dict[str, Traffic]]:
    """Return bytes of launches, counted in sectors by the emulator: (queries, picks).

    Picks: of four such rows a variant.
    """
    rows = hard_rows(seed)["normal"].expand(4, -1).contiguous()
    coded = {f"queries, {variant}": _asked_queries(one, variant) for variant in ("fp4", "fp8")}
    return coded, {f"picks, {variant}": _requested_picks(variant, rows, kernel) for variant in VARIANTS}


def arch_bytes(one: Step, seed: int, hopper: Kernels = RIGHT) -> int:
    """Bytes that differ between kernels compiled for Blackwell and for Hopper. ``hopper``: those of the latter."""
    results = []
    rows = torch.stack(list(hard_rows(seed).values()))
    for arch, kernels in zip(ARCHS, (RIGHT, hopper), strict=True):
        left = []
        for variant in ("fp4", "fp8"):
            left += _coded(arch, one, variant, kernels.queries)
        left += [hard_picks(variant, rows, kernels.picks, arch)[0] for variant in ("one CTA", "tile after tile")]
        results.append([x.contiguous().view(torch.uint8) for x in left])
    return sum(int((a != b).sum()) for a, b in zip(*results, strict=True))


def _query(one: Step, variant: str) -> query_op.Call:
    """Make a call on the queries of a step."""
    tokens, fp4 = len(one.q), variant == "fp4"
    out = IndexerQueries(
        torch.empty(tokens, HEADS, DIM // (2 if fp4 else 1), dtype=torch.uint8),
        torch.empty(tokens, HEADS, DIM // BLOCK, dtype=torch.uint8) if fp4 else None,
        torch.empty(tokens, HEADS),
    )
    return query_op.Call(one.q, one.weights, one.positions, one.table, out, variant, True, "emulator")


def _pick(rows: torch.Tensor, lengths: torch.Tensor, found: torch.Tensor) -> pick_op.Call:
    """Make a call that picks from rows of scores."""
    return pick_op.Call(rows, lengths, found, None, None, 0, False, "emulator")


def _coded(arch: str, one: Step, variant: str, kernel: type) -> list[torch.Tensor]:
    """Codes and weights of a kernel compiled for ``arch``; FP4 by cvt where the architecture has one."""
    settings = {"variant": variant, "fp4_conversion": query_op.has_fp4_conversion(arch)}
    made, code = compile_cache.default().get(kernel, settings, query_arguments.fake_args, arch)
    call = _query(one, variant)
    launch(code, *query_arguments.launch_args(made, call), gpu=make(arch))
    codes, scales, weights = call.out
    return [codes, weights, *([] if scales is None else [scales])]
