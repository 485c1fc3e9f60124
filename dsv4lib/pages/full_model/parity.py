"""Compare the whole model on ops with transformers. By error of logits, over that of transformers run in bf16.

`python -m dsv4lib.pages.full_model.parity` measures the rows of data/model/parity.csv anew and rewrites their table in
README.md; `--only CASE` some of them.

Both have the same weights, those of a checkpoint in DeepSeek's format. What is judged is rounding: ours (bf16 GEMMs, no
quantised activations) against our oracle in fp32, and transformers in bf16 against transformers in fp32.

**Storage.** Our caches hold KV in FP8, 584 bytes. Where bf16 noise moves a value past the border of an FP8 code, the
error is a step of FP8. So the oracle stores KV so, and transformers in both its runs, too: like is compared with like.
`unstored` is ours over transformers that keeps KV in bf16. Without storage the oracle is transformers in fp32, see
`reference.transformers_parity`.

**Flips.** Where rounding moves a router's score past the next one, a token gets another expert: its error is that of a
choice and not of rounding. So tokens whose experts differ from the exact ones in any layer, in ours or in theirs, are
counted and not judged. Of the other tokens the median and the root mean square of the error are judged.
"""

from __future__ import annotations

import argparse
import copy
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dsv4lib import env
from dsv4lib.config import TINY, ModelConfig, YarnConfig, schedule
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import kv_entry
from dsv4lib.loader.checkpoint import Checkpoint
from dsv4lib.loader.convert import save
from dsv4lib.loader.model import transformer
from dsv4lib.loader.whole import Listed
from dsv4lib.model.transformer import Transformer
from dsv4lib.ops.router.op import Hashed, router
from dsv4lib.pages.common import peers as peer_pages
from dsv4lib.pages.full_model import run_case
from dsv4lib.predict import table
from dsv4lib.reference import transformers_parity

TABLE = env.root() / "data" / "model" / "parity.csv"
README = env.root() / "README.md"
MODULE = "full_model.parity"
BOUND = 1.5
FIRST = {"flash": (0, 0), "pro": (128, 128)}  # released schedules: what the first layers are


@dataclass(frozen=True)
class Case:
    """One comparison. It has a schedule, and how so many sequences of so many tokens reach the model.

    Attributes:
        schedule: "flash" or "pro". sequences: at a time, each at a place of its own.
        chunks: tokens of the steps.
    """

    schedule: str
    sequences: int
    chunks: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of a sequence."""
        return sum(self.chunks)


# Chunks end in and at windows of 4 and 128, and at 256, where a page of 64 entries does; single tokens cross 128.
_RING = 1, 2, 3, 120, *[1] * 6
_LONG = 3, 125, 60, 68, 2, 254, 188
CASES = {
    f"{kind} {name}": Case(kind, sequences, chunks)
    for kind in FIRST
    for name, sequences, chunks in (
        ("1 token", 24, (1,)),
        ("5 tokens", 8, (5,)),
        ("132 tokens, ring", 1, _RING),
        ("258 tokens, page", 1, (250, 5, 1, 1, 1)),
        ("700 tokens, chunks", 1, _LONG),
    )
}


@dataclass(frozen=True)
class Row:
    """What a case gave.

    Attributes:
        case: its name. tokens: compared. flipped, theirs_flipped: tokens with other experts than the exact ones.
        judged: tokens that flipped in neither. error, theirs: median error of a logit of those.
        median, rms: ours over theirs. bound: of both. unstored: median of all tokens, over transformers without FP8 KV.
    """

    case: str
    tokens: int
    flipped: int
    theirs_flipped: int
    judged: int
    error: float
    theirs: float
    median: float
    rms: float
    bound: float
    unstored: float

    @property
    def ok(self) -> bool:
        """Within the bound, NaN is not; most tokens were judged."""
        return max(self.median, self.rms) <= self.bound and 2 * self.judged > self.tokens


def config_of(kind: str) -> ModelConfig:
    """Configure four layers of a schedule.

    A head of the released 512, window and rates; the first selects by token id.
    """
    if kind not in FIRST:
        raise ArgumentError("schedule", kind, "one of " + ", ".join(FIRST))
    return replace(
        TINY,
        n_layers=4,
        compress_ratios=schedule(4, FIRST[kind], 4, 128),
        hidden=256,
        n_heads=6,
        head_dim=512,
        rope_dim=64,
        q_lora_rank=128,
        o_groups=2,
        o_lora_rank=48,
        window=128,
        csa_rate=4,
        hca_rate=128,
        index_heads=64,
        index_dim=128,
        index_topk=24,
        n_experts=5,
        experts_per_token=2,
        expert_width=128,
        vocab=328,
        n_hash_layers=1,
        max_positions=2048,
        yarn=YarnConfig(),
    )


@dataclass(frozen=True)
class Pair:
    """transformers' model in fp32, and a checkpoint of the same weights."""

    peer: Any
    listed: Listed


def pair_of(kind: str, folder: Path, seed: int = 1) -> Pair:
    """Draw weights and write them as a checkpoint. Transformers gets what the checkpoint holds."""
    config = config_of(kind)
    model = transformers_parity.build_model(config, torch.Generator().manual_seed(seed))
    peer = transformers_parity.Peer(kind, seed, config, model, torch.zeros(1, 1, dtype=torch.int64))
    save(transformers_parity.reference_of(peer).state_dict(), config, folder / kind, "mxfp4")
    listed = Listed.of(Checkpoint(folder / kind))
    targets = transformers_parity.checkpoint_state(model.state_dict())  # views of its tensors
    for weight, value in listed.values():
        if weight.name in targets:
            targets[weight.name].copy_(value)
    return Pair(model, listed)


@torch.no_grad()
def measure(name: str, pair: Pair, backend: str = "reference") -> Row:
    """Run a case.

    Raises:
        ArgumentError: an unknown case.
    """
    if name not in CASES:
        raise ArgumentError("name", name, "one of " + "; ".join(CASES))
    case = CASES[name]
    rng = torch.Generator().manual_seed(len(name))
    tokens = torch.randint(pair.listed.config.vocab, (case.sequences, case.tokens), generator=rng)
    models = pair.peer, copy.deepcopy(pair.peer).bfloat16()
    unstored = _errors(*(_of_peer(one, tokens)[0] for one in models))
    with _stored():
        (exact, experts), (rounded, moved) = (_of_peer(one, tokens) for one in models)
    capture: dict[str, torch.Tensor] = {}
    want = run_case.oracle(pair.listed)(tokens, capture=capture)
    wanted = [capture[f"layers.{n}.router_experts"] for n in range(pair.listed.config.n_layers)]
    options = {"precision": "bf16", "experts": "bf16", "backend": backend}
    model = transformer(pair.listed, places=case.sequences, capacity=max(case.tokens, 4), **options)
    found, chosen = _of_ours(model, tokens, case.chunks)
    flips, their_flips = _flipped(chosen, wanted), _flipped(moved, experts)
    judged = ~(flips | their_flips)
    ours, theirs = _errors(found, want), _errors(rounded, exact)
    medians = [float(one[judged].median()) for one in (ours, theirs)]
    rms = [float(one[judged].square().mean().sqrt()) for one in (ours, theirs)]
    counts = tokens.numel(), int(flips.sum()), int(their_flips.sum()), int(judged.sum())
    ratios = medians[0] / medians[1], rms[0] / rms[1], BOUND, float(ours.median() / unstored.median())
    return Row(name, *counts, *medians, *ratios)


def _errors(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Root mean square error of a token's logits: [B, T]."""
    return (found - wanted).square().mean(-1).sqrt()


@contextmanager
def _stored() -> Iterator[None]:
    """Let transformers' attention read KV and entries as our caches store them."""
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as peer

    eager = peer.eager_attention_forward

    def attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *given: Any, **named: Any):
        kept = kv_entry.fake_quantize(key)
        return eager(module, query, kept, kept if value is key else kv_entry.fake_quantize(value), *given, **named)

    peer.eager_attention_forward = attention
    try:
        yield
    finally:
        peer.eager_attention_forward = eager


def _of_peer(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run transformers in one call: (logits fp32 [B, T, vocab], experts [B, T, k] by layer)."""
    seen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda gate, given, out: seen.append(out[2].view(*tokens.shape, -1)))
        for layer in model.model.layers
    ]
    logits = model(input_ids=tokens, use_cache=False).logits.float()
    for hook in hooks:
        hook.remove()
    return logits, seen


def _of_ours(
    model: Transformer, tokens: torch.Tensor, chunks: Sequence[int]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run the model on ops in steps: (logits fp32 [B, T, vocab], experts [B, T, k] by layer)."""
    count, places = len(tokens), list(range(len(tokens)))
    seen: list[list[torch.Tensor]] = [[] for _ in model.layers]

    def note(number: int) -> Any:
        def hook(ffn: Any, given: tuple) -> None:
            hashed = Hashed(ffn.table, given[1]) if ffn.table is not None else None
            settings = {"k": ffn.k, "factor": ffn.factor, "bias": ffn.bias, "hashed": hashed, "backend": ffn.backend}
            seen[number].append(router(given[0], ffn.gate, **settings)[0].unflatten(0, (count, -1)))

        return hook

    hooks = [layer.ffn.register_forward_pre_hook(note(n)) for n, layer in enumerate(model.layers)]
    logits, start = [], 0
    for size in chunks:
        part = tokens[:, start : start + size].tolist()
        found = model(part, places, [start] * count, all_logits=True)[:, : model.config.vocab]
        logits.append(found.unflatten(0, (count, -1)))
        start += size
    for hook in hooks:
        hook.remove()
    return torch.cat(logits, 1), [torch.cat(one, 1) for one in seen]


def _flipped(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> torch.Tensor:
    """Tokens that have another set of experts in any layer: bool [B, T]."""
    pairs = zip(found, wanted, strict=True)
    return torch.stack([(a.long().sort(-1).values != b.sort(-1).values).any(-1) for a, b in pairs]).any(0)


def greedy(pair: Pair, prompt: list[int], count: int) -> tuple[list[int], list[int], float]:
    """Continue a prompt with both models in fp32, token by token over their caches.

    Returns:
        (transformers' tokens, ours after the same ones, the smallest gap of transformers' two largest logits).
    """
    from transformers import DynamicCache

    model, cache = oracle_of(pair), DynamicCache(config=pair.peer.config)
    own, given, theirs, ours, gap = model.new_cache(1), torch.tensor([prompt]), [], [], math.inf
    with torch.no_grad():
        for _ in range(count):
            logits = pair.peer(input_ids=given, past_key_values=cache, use_cache=True).logits[0, -1]
            top = logits.topk(2).values
            gap = min(gap, float(top[0] - top[1]))
            theirs.append(int(logits.argmax()))
            ours.append(int(model(given, own)[0, -1].argmax()))
            given = torch.tensor([theirs[-1:]])
    return theirs, ours, gap


def oracle_of(pair: Pair) -> Any:
    """Return our reference model in fp32 with transformers' weights. Its caches round nothing."""
    peer = transformers_parity.Peer("", 1, pair.listed.config, pair.peer, torch.zeros(1, 1, dtype=torch.int64))
    return transformers_parity.reference_of(peer)


def readme(rows: Sequence[Row]) -> str:
    """Show the rows by schedule as a Markdown table. It has the worst case of each prompt's length."""
    lines = ["| logits against transformers 5.23 | tokens judged | error over bf16's, median | rms | bound |"]
    lines.append("| --- | ---: | ---: | ---: | ---: |")
    for kind in FIRST:
        own = [row for row in rows if row.case.startswith(kind)]
        judged, flipped = sum(r.judged for r in own), sum(r.tokens - r.judged for r in own)
        worst = [f"{min(vs):.2f} to {max(vs):.2f}" for vs in ([r.median for r in own], [r.rms for r in own])]
        name = f"{kind.capitalize()}'s schedule, prompts of 1 to {max(CASES[r.case].tokens for r in own)}"
        lines.append(f"| {name} | {judged} ({flipped} with other experts) | {worst[0]} | {worst[1]} | {BOUND:g} |")
    return "\n".join(lines)


def main(given: Sequence[str] | None = None) -> None:
    """Measure, write the table and its summary."""
    parser = argparse.ArgumentParser(prog=f"python -m dsv4lib.pages.{MODULE}", description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, default=TABLE, help="the table; README changes with the default alone")
    parser.add_argument("--only", choices=CASES, nargs="+", metavar="CASE", help="the other cases keep their rows")
    chosen = parser.parse_args(given)
    old = {row.case: row for row in table.recorded(Row, chosen.record)} if chosen.record.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        pairs: dict[str, Pair] = {}
        for name in chosen.only or CASES:
            kind = CASES[name].schedule
            if kind not in pairs:
                pairs[kind] = pair_of(kind, Path(folder))
            old[name] = measure(name, pairs[kind])
            print(old[name], flush=True)
            chosen.record.parent.mkdir(exist_ok=True)
            table.record([old[name] for name in CASES if name in old], chosen.record)
    if chosen.record == TABLE:
        peer_pages.replace(README, MODULE, readme(table.recorded(Row, TABLE)))


if __name__ == "__main__":
    main()
