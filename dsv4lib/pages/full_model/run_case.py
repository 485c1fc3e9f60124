"""Run the trained nano model on the kernels beside its oracle, layer by layer; for notebook and stage `full_model`.

The oracle computes in fp32 and rounds what the caches store to their formats, as the kernels do. An injected fault is a
change of the model on kernels: what it does is in the docstring of its function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dsv4lib import backends, emulator, env
from dsv4lib.config import LayerKind
from dsv4lib.formats import hadamard, kv_entry, mxfp4
from dsv4lib.loader.checkpoint import Checkpoint
from dsv4lib.loader.model import transformer
from dsv4lib.loader.whole import Listed, load_into
from dsv4lib.model.generate import Request
from dsv4lib.model.sampler import SamplingParams
from dsv4lib.model.tokenizer import ByteTokenizer
from dsv4lib.model.transformer import Transformer
from dsv4lib.reference.model import ReferenceModel

ARCH = "sm_100a"
BOS = ByteTokenizer.BOS


class Run(NamedTuple):
    """A text through the kernels and through the oracle.

    Attributes:
        tokens: int64 [T + 1], BOS first. logits, wanted: fp32 [T, vocab], kernels' and oracle's, of all but the last.
        streams, wanted_streams: fp32 [layers, T, 4, d], after each layer. capture: the oracle's tensors.
        hazards: of all launches; only the emulator sees them.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    wanted: torch.Tensor
    streams: torch.Tensor
    wanted_streams: torch.Tensor
    capture: dict[str, torch.Tensor]
    hazards: int


# ------------------------------------------------------------------ models


def folder() -> Path:
    """Folder of the trained model."""
    return env.root() / "data" / "nano"


def listed() -> Listed:
    """Its checkpoint, complete by its headers."""
    return Listed.of(Checkpoint(folder()))


def text(count: int) -> torch.Tensor:
    """The first bytes of the held-out speeches as tokens, BOS first: int64 [count + 1]."""
    data = (folder() / "heldout.txt").read_bytes()[:count]
    return torch.tensor([BOS, *data])


def model(found: Listed, backend: str, capacity: int = 256, mtp: bool = False, fault: str = "none") -> Transformer:
    """The model on ops, with a fault of `FAULTS` if wanted."""
    made = transformer(found, capacity=capacity, mtp=mtp, backend=backend).to(backends.device(backend))
    FAULTS[fault](made)
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
        return found._replace(visible={kind: seen + 1 for kind, seen in found.visible.items()})

    made.step = step


def _experts_of_the_next(made: Transformer) -> None:
    """Look the experts of a token up under the token after it, in the layer that has a table."""
    hashed = next(layer.ffn for layer in made.layers if layer.ffn.table is not None)
    hashed.register_forward_pre_hook(lambda ffn, given: (given[0], given[1].roll(-1)))


FAULTS: dict[str, Callable[[Transformer], None]] = {
    "none": _right,
    "CombTransposed": _comb_transposed,
    "SinkForgotten": _sink_forgotten,
    "OneEntryEarly": _one_entry_early,
    "ExpertsOfTheNext": _experts_of_the_next,
}


# ------------------------------------------------------------------ runs


@torch.no_grad()
def run(found: Listed, count: int, backend: str, fault: str = "none") -> Run:
    """Read ``count`` bytes in one chunk on the kernels and on the oracle."""
    made, tokens, seen = model(found, backend, fault=fault), text(count), []
    hooks = [
        layer.attn_site.register_forward_hook(lambda site, given, out: seen.append(out[0].float().cpu()))
        for layer in made.layers
    ]
    (hidden, last), hazards = _watched(
        backend, lambda: made.hidden(made.step([tokens[:-1].tolist()], [0], [0]), keep_streams=True)
    )
    for hook in hooks:
        hook.remove()
    logits = made.head(hidden)[0][:, : found.config.vocab].float().cpu()
    capture: dict[str, torch.Tensor] = {}
    wanted = oracle(found)(tokens[None, :-1], capture=capture)[0]
    streams = torch.stack([*seen[1:], last.float().cpu()])
    want = torch.stack([capture[f"layers.{n}.streams"][0] for n in range(found.config.n_layers)])
    return Run(tokens, logits, wanted, streams, want, capture, hazards)


@torch.no_grad()
def chunk_differences(found: Listed, sizes: list[int], backend: str, fault: str = "none") -> int:
    """Count logits that differ in a bit when the first bytes come in chunks instead of one."""
    tokens, results = text(sum(sizes))[: sum(sizes)].tolist(), []
    for chunks in ([sum(sizes)], sizes):
        made, start, parts = model(found, backend, fault=fault), 0, []
        for size in chunks:
            parts.append(made([tokens[start : start + size]], [0], [start], all_logits=True).cpu())
            start += size
        results.append(torch.cat(parts))
    return int((results[0] != results[1]).sum())


def continued(found: Listed, prompt: str, count: int, drafts: int, backend: str) -> Request:
    """Continue a prompt greedily; the request has the tokens and counts of drafts."""
    made = model(found, backend, capacity=128, mtp=drafts > 0)
    request = Request(made, ByteTokenizer().encode(prompt), SamplingParams(temperature=0.0, seed=0), drafts=drafts)
    for _ in request.tokens(count):
        pass
    return request


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
    """Relative errors after each layer: (of the streams, of what tells the four from each other)."""
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


def cache_bytes(found: Listed, capacity: int) -> list[tuple[str, str, int, int, int]]:
    """Rows (layer, kind, bytes of window, of entries and keys, of compressor states) for one request."""
    made, rows = transformer(found, capacity=capacity, backend="reference"), []
    made.allocate()
    for number, (kind, caches) in enumerate(zip(found.config.layer_kinds, made.caches, strict=True)):
        pools = [caches.window.data], [one.data for one in (caches.entries, caches.keys) if one]
        states = [x for one in (caches.state, caches.key_state) if one for x in one.kept]
        sizes = (sum(t.numel() * t.element_size() for t in part) for part in (*pools, states))
        rows.append((str(number), str(kind), *sizes))
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
    return {"apart_error": float(layer_errors(one)[1].max()), "divergence": divergence(one)}
