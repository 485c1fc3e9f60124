"""Run the trained nano model on the kernels beside its oracle. Layer by layer, for notebook and stage `full_model`.

The oracle computes in fp32 and rounds what the caches store to their formats, as the kernels do. An injected fault is a
change of the model on kernels: what it does is in the docstring of its function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from dsv4lib import backends, emulator, env
from dsv4lib.cache import Shape, held_blocks
from dsv4lib.config import LayerKind
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import hadamard, kv_entry, mxfp4
from dsv4lib.loader.checkpoint import Checkpoint
from dsv4lib.loader.model import transformer
from dsv4lib.loader.whole import Listed, load_into
from dsv4lib.model import scheduler as scheduler_of
from dsv4lib.model.paged import PagedCaches, groups_of
from dsv4lib.model.sampler import SamplingParams
from dsv4lib.model.scheduler import Scheduler
from dsv4lib.model.tokenizer import ByteTokenizer
from dsv4lib.model.transformer import Transformer
from dsv4lib.ops.fmha import faults as fmha_faults
from dsv4lib.ops.fmha import op as fmha_op
from dsv4lib.ops.fmha.sm100 import Fmha
from dsv4lib.reference.model import ReferenceModel

ARCH = "sm_100a"
BOS = ByteTokenizer.BOS


class Run(NamedTuple):
    """A text through the kernels and through the oracle.

    Attributes:
        tokens: int64 [T + 1], BOS first. logits, wanted: fp32 [T, vocab], kernels' and oracle's, of all but the last.
        streams, wanted_streams: fp32 [layers, T, 4, d], after each layer. capture: the oracle's tensors.
        embedding_differences: numbers of the streams before the first layer that are not the table's.
        hazards: of all launches; only the emulator sees them.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    wanted: torch.Tensor
    streams: torch.Tensor
    wanted_streams: torch.Tensor
    capture: dict[str, torch.Tensor]
    embedding_differences: int
    hazards: int


# ------------------------------------------------------------------ models


def folder() -> Path:
    """Folder of the trained model."""
    return env.root() / "data" / "nano"


def listed() -> Listed:
    """Its checkpoint, complete by its headers."""
    return Listed.of(Checkpoint(folder()))


def text(count: int) -> torch.Tensor:
    """Return the first bytes of the held-out speeches as tokens, BOS first. int64 [count + 1]."""
    data = (folder() / "heldout.txt").read_bytes()[:count]
    return torch.tensor([BOS, *data])


def model(found: Listed, backend: str, capacity: int = 256, mtp: bool = False, fault: str = "none") -> Transformer:
    """The model on ops, with a fault of `FAULTS` if wanted.

    Raises:
        ArgumentError: an unknown fault.
    """
    known = [*FAULTS, *RACES, *OF_DRAFTS]
    if fault not in known:
        raise ArgumentError("fault", fault, "one of " + ", ".join(known))
    made = transformer(found, capacity=capacity, mtp=mtp, backend=backend).to(backends.device(backend))
    FAULTS.get(fault, _right)(made)
    return made


def oracle(found: Listed) -> ReferenceModel:
    """The oracle in fp32, its caches rounded to their formats."""

    def key(x: torch.Tensor) -> torch.Tensor:
        return mxfp4.dequantize(mxfp4.quantize(hadamard.transform(x.bfloat16().float())))

    made = ReferenceModel(found.config, kv_codec=kv_entry.fake_quantize, index_codec=key)
    load_into(made, found)
    return made


# ------------------------------------------------------------------ faults


def _right(made: Transformer) -> None:
    """Nothing is wrong."""


def _comb_transposed(made: Transformer) -> None:
    """Write back with the transposed mixing matrix: streams swap what they keep of each other."""

    def hook(layer: Any, given: tuple, pending: Any) -> Any:
        return pending._replace(comb=pending.comb.mT.contiguous())

    for layer in made.layers:
        layer.register_forward_hook(hook)


def _sink_forgotten(made: Transformer) -> None:
    """Leave the sink out: heads that want to attend to nothing cannot."""
    for layer in made.layers:
        layer.attn.sink.fill_(-math.inf)


def _one_entry_early(made: Transformer) -> None:
    """Let every token see one entry more, which is not finished yet."""
    right = made.step

    def step(*given: Any, **options: Any) -> Any:
        found = right(*given, **options)
        seen = {kind: count + 1 for kind, count in found.visible.items()}
        return found._replace(visible=seen, selected=seen[LayerKind.CSA].clamp(max=made.config.index_topk))

    made.step = step


def _experts_of_the_next(made: Transformer) -> None:
    """Look the experts of a token up under the token after it, in the layer that has a table."""
    hashed = next(layer.ffn for layer in made.layers if layer.ffn.table is not None)
    hashed.register_forward_pre_hook(lambda ffn, given: (given[0], given[1].roll(-1), *given[2:]))


def _row_of_the_next(made: Transformer) -> None:
    """Count the embedding's rows from 1."""
    made.embed.copy_(made.embed.roll(-1, 0))


FAULTS: dict[str, Callable[[Transformer], None]] = {
    "none": _right,
    "CombTransposed": _comb_transposed,
    "SinkForgotten": _sink_forgotten,
    "OneEntryEarly": _one_entry_early,
    "ExpertsOfTheNext": _experts_of_the_next,
    "RowOfTheNext": _row_of_the_next,
}
RACES = {"HastyQ": fmha_faults.HastyQ}  # of a kernel: numbers may be right
OF_DRAFTS = ("VerifiesARowLate",)  # of `continued`: the model itself is right


def verifies_a_row_late() -> AbstractContextManager:
    """Compare a draft with the logits after it, not with those after the token before it."""
    right = scheduler_of.target_probabilities
    late = lambda logits, *given: right(logits.roll(-1, dims=1), *given)  # noqa: E731
    return patch.object(scheduler_of, "target_probabilities", late)


# ------------------------------------------------------------------ runs


@torch.no_grad()
def run(found: Listed, count: int, backend: str, fault: str = "none") -> Run:
    """Read ``count`` bytes in one chunk on the kernels and on the oracle."""
    made, tokens, seen = model(found, backend, fault=fault), text(count), []
    hooks = [
        layer.attn_site.register_forward_hook(lambda site, given, out: seen.append(out[0].float().cpu()))
        for layer in made.layers
    ]
    with patch.object(fmha_op, "Fmha", RACES.get(fault, Fmha)):
        (hidden, last), hazards = _watched(
            backend, lambda: made.hidden(made.step([tokens[:-1].tolist()], [0], [0]), keep_streams=True)
        )
    for hook in hooks:
        hook.remove()
    logits = made.head(hidden)[0][:, : found.config.vocab].float().cpu()
    capture: dict[str, torch.Tensor] = {}
    judge = oracle(found)
    wanted = judge(tokens[None, :-1], capture=capture)[0]
    rows = judge.embed.weight[tokens[:-1]].bfloat16().float()[:, None]
    streams = torch.stack([*seen[1:], last.float().cpu()])
    want = torch.stack([capture[f"layers.{n}.streams"][0] for n in range(found.config.n_layers)])
    return Run(tokens, logits, wanted, streams, want, capture, int((seen[0] != rows).sum()), hazards)


@torch.no_grad()
def chunk_differences(found: Listed, sizes: list[int], backend: str, fault: str = "none") -> int:
    """Count logits that differ in a bit when the first bytes come in chunks. Instead of one chunk."""
    tokens, results = text(sum(sizes))[: sum(sizes)].tolist(), []
    for chunks in ([sum(sizes)], sizes):
        made, start, parts = model(found, backend, fault=fault), 0, []
        for size in chunks:
            parts.append(made([tokens[start : start + size]], [0], [start], all_logits=True).cpu())
            start += size
        results.append(torch.cat(parts))
    return int((results[0] != results[1]).sum())


class Continued(NamedTuple):
    """A text that the model wrote. ``sequence``: the prompt's tokens and its own. Also drafts made, drafts accepted."""

    sequence: list[int]
    drafted: int
    accepted: int


def continued(found: Listed, prompt: str, count: int, drafts: int, backend: str, fault: str = "none") -> Continued:
    """Continue a prompt greedily; ``fault``: "VerifiesARowLate", of the drafts, or "none"."""
    made, tokens = model(found, backend, mtp=drafts > 0), ByteTokenizer().encode(prompt)
    caches = PagedCaches(made, requests=1, tokens=128, positions=128, drafts=drafts)
    scheduler = Scheduler(made, caches, drafts=drafts)
    scheduler.add("text", tokens, SamplingParams(temperature=0.0, seed=0), count)
    one = scheduler.known["text"]
    with verifies_a_row_late() if fault in OF_DRAFTS else nullcontext():
        return Continued(tokens + [token for _, token, _ in scheduler.run()], one.drafted, one.accepted)


def _watched(backend: str, call: Callable[[], Any]) -> tuple[Any, int]:
    """(result, hazards of the race detector, which only the emulator has)."""
    if backend != "emulator":
        return call(), 0
    with emulator.device(ARCH, checks="race") as gpu:
        return call(), len(gpu.hazards)


# ------------------------------------------------------------------ judgement


def _rms(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean((1, 2, 3)).sqrt()


def layer_errors(one: Run) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute relative errors after each layer. Returns (of the streams, of the differences between the four)."""
    apart, want_apart = (x - x.mean(2, keepdim=True) for x in (one.streams, one.wanted_streams))
    whole = _rms(one.streams - one.wanted_streams) / _rms(one.wanted_streams)
    return whole, _rms(apart - want_apart) / _rms(want_apart)


def bits(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Bits that each byte of the text costs: fp64 [T]."""
    return torch.nn.functional.cross_entropy(logits.double(), tokens[1:], reduction="none") / math.log(2)


def divergence(one: Run) -> float:
    """Mean KL divergence of the kernels' distributions from the oracle's, bits a byte."""
    want, found = (torch.log_softmax(x.double(), -1) for x in (one.wanted, one.logits))
    return float((want.exp() * (want - found)).sum(-1).mean() / math.log(2))


def cache_bytes(found: Listed, length: int) -> list[tuple[str, str, int, int, int]]:
    """Return the cache's rows of one request, from its pages.

    (layer, kind, bytes of window, of entries and keys, of states).

    ``length``: tokens that it has cached, without drafts.
    """
    c = found.config
    groups = {g.name: g for g in groups_of(c, "fp4", mtp=False, drafts=0)}
    shape, rows = Shape(c.layer_kinds, c.window, c.csa_rate, c.hca_rate), []
    for layer, kind in enumerate(c.layer_kinds):
        of = {"window": 0, "entries": 0, "ring": 0}
        for name in shape.index(layer):
            of[groups[name].kind] += held_blocks(groups[name], length) * groups[name].layer_bytes
        rows.append((str(layer), str(kind), *of.values()))
    return rows


def sees(found: Listed, position: int) -> list[tuple[str, int, int]]:
    """Rows (kind, window keys, entries) that a token at ``position`` attends to."""
    c = found.config
    rows = []
    for kind in LayerKind:
        entries = (position + 1) // c.rate(kind) if c.rate(kind) else 0
        entries = min(entries, c.index_topk) if kind is LayerKind.CSA else entries
        rows.append((str(kind), min(position + 1, c.window), entries))
    return rows


def judged(count: int, backend: str, fault: str) -> dict[str, float]:
    """Checks of the page that a fault must turn red."""
    one = run(listed(), count, backend, fault)
    return {
        "apart_error": float(layer_errors(one)[1].max()),
        "divergence": divergence(one),
        "embedding_differences": one.embedding_differences,
    }
