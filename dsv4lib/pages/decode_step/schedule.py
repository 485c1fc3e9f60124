"""Read from the model itself what a decode step calls, and which line of the bench each call belongs to.

A model of one SWA, one CSA and one HCA layer, of small sizes, runs a step on the oracles of a Hopper's ops. Every call
of an op is noted with the module that makes it. A layer's calls times the layers of its kind are those of Flash;
`COVERS` says which lines they are. A call is not always one launch: attention with splits launches twice. A call that
is in no line must be in `BESIDE`, with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4lib import backends
from dsv4lib.bench.decode_step import whole
from dsv4lib.bench.decode_step.rows import ARCH
from dsv4lib.config import FLASH, TINY, LayerKind, ModelConfig

SWA, CSA, HCA = LayerKind
SMALL = replace(
    TINY,
    n_layers=3,
    compress_ratios=(0, 4, 128, 0),
    hidden=256,
    n_heads=8,
    head_dim=512,
    rope_dim=64,
    q_lora_rank=128,
    o_lora_rank=128,
    window=128,
    hca_rate=128,
    index_heads=64,
    index_dim=128,
    index_topk=24,
    n_experts=5,
    experts_per_token=2,
    expert_width=128,
    max_positions=2048,
    yarn=None,
)
BATCH, CONTEXT = 2, 256
FORMS = {"compressor": ("kv", "fp8")}  # an argument that tells calls of one op in one module apart


class Place(NamedTuple):
    """Where a call is made: module within its layer ("": outside of the layers), and op."""

    module: str
    op: str

    def __str__(self) -> str:
        return f"{self.module or 'model'}: {self.op}"


class Covers(NamedTuple):
    """What a call does: lines of layers of all kinds or of one; ``counts``: it is what a line is counted by."""

    lines: tuple[str, ...]
    by_kind: dict[LayerKind, tuple[str, ...]] = {}
    counts: bool = True

    def of(self, kind: LayerKind | None) -> tuple[str, ...]:
        """Return the lines of a call in a layer of a kind."""
        return (*self.lines, *self.by_kind.get(kind, ()))


ROUTED, SHARED, SITE = ("routed MoE MXFP4",), ("shared expert fp8",), ("mHC post, pre, norm",)
EXACT = {CSA: ("CSA compressor GEMM", "indexer compressor+weights GEMM"), HCA: ("HCA compressor GEMM",)}
COVERS = {
    Place("attn_site", "mhc_site"): Covers(SITE),
    Place("attn.inputs", "linear"): Covers(("wq_a+wkv fp8",)),
    Place("attn", "rmsnorm_quant"): Covers(("q_norm, kv_norm",)),
    Place("attn.queries", "linear"): Covers(("wq_b fp8",), {CSA: ("indexer wq_b fp8",)}),
    Place("attn", "qnorm_rope_kv"): Covers(("qnorm_rope_kv",)),
    Place("attn.exact", "linear"): Covers((), EXACT),
    Place("attn", "compressor kv"): Covers((), {CSA: ("CSA compressor",), HCA: ("HCA compressor",)}),
    Place("attn", "compressor fp8"): Covers(("indexer key compressor",)),
    Place("attn", "indexer_q"): Covers(("indexer_q",)),
    Place("attn", "indexer_logits"): Covers(("indexer logits fp8",)),
    Place("attn", "topk"): Covers(("top-k",)),
    Place("attn", "fmha"): Covers((), {kind: (f"attention {kind}",) for kind in LayerKind}),
    Place("attn", "inv_rope_quant"): Covers(("inv_rope_quant",)),
    Place("attn.wo_a", "linear"): Covers(("wo_a fp8",)),
    Place("attn.wo_b", "quantize"): Covers(("activation cast to FP8",)),
    Place("attn.wo_b", "linear"): Covers(("wo_b fp8",)),
    Place("ffn_site", "mhc_site"): Covers(SITE),
    Place("ffn", "router"): Covers(("router",)),
    Place("ffn", "moe_dispatch"): Covers(ROUTED),
    Place("ffn.experts", "quantize"): Covers(ROUTED, counts=False),
    Place("ffn.experts", "moe_gemm"): Covers(ROUTED, counts=False),
    Place("ffn", "moe_combine"): Covers(ROUTED, counts=False),
    Place("ffn.shared.first", "linear"): Covers(SHARED, counts=False),
    Place("ffn.shared", "swiglu_quant"): Covers(SHARED),
    Place("ffn.shared.second", "linear"): Covers(SHARED, counts=False),
    Place("head", "linear"): Covers(("LM head",)),
}
BESIDE = {
    Place("", "embedding"): "a row of the table for each request",
    Place("", "mhc_site"): "the head mixes the four streams once a step",
}


@dataclass(frozen=True)
class Schedule:
    """What a step calls.

    Attributes:
        config: whose layers are counted. calls: by place and kind of layer (None: outside of the layers), of one layer.
    """

    config: ModelConfig
    calls: dict[tuple[Place, LayerKind | None], int]

    def layers(self, kind: LayerKind | None) -> int:
        """Count the layers of a kind; what is outside of them is there once."""
        return 1 if kind is None else len(self.config.layers_of(kind))

    @property
    def calls_a_step(self) -> int:
        """Calls of ops in a step."""
        return sum(count * self.layers(kind) for (_, kind), count in self.calls.items())

    @property
    def counts(self) -> dict[str, int]:
        """How often a step has each line."""
        found: Counter[str] = Counter()
        for (place, kind), count in self.calls.items():
            covers = COVERS.get(place)
            for line in covers.of(kind) if covers and covers.counts else ():
                found[line] += count * self.layers(kind)
        return dict(found)

    @property
    def unnamed(self) -> list[Place]:
        """Places whose calls are in no line, without a reason."""
        every = dict.fromkeys(place for place, kind in self.calls if not (place in COVERS and COVERS[place].of(kind)))
        return [place for place in every if place not in BESIDE]

    def places_of(self, line: str) -> list[Place]:
        """Return the places whose calls do a line's work."""
        return [
            place for place, covers in COVERS.items() if any(line in covers.of(kind) for kind in (None, *LayerKind))
        ]

    def a_layer(self, line: str, kind: LayerKind | None) -> int:
        """Count the calls that do a line's work in a layer of a kind."""
        own = [(place, n) for (place, of), n in self.calls.items() if of is kind and place in COVERS]
        return sum(n for place, n in own if line in COVERS[place].of(kind))


class _Noted(TorchDispatchMode):
    """Notes every call of an op of this lab with the module that is running."""

    def __init__(self) -> None:
        super().__init__()
        self.modules, self.found = [""], list[tuple[str, str]]()

    def __torch_dispatch__(self, call: Any, types: Any, args: Sequence = (), kwargs: Any = None) -> Any:
        """Note and run a call."""
        name = call.name()
        if name.startswith("dsv4::"):
            op = name.removeprefix("dsv4::").removesuffix("_hopper").removesuffix("_tiled")
            form = next((one for one in FORMS.get(op, ()) if one in args), "")
            self.found.append((self.modules[-1], f"{op} {form}".strip()))
        return call(*args, **(kwargs or {}))


@contextmanager
def _named(model: torch.nn.Module, stack: list[str]) -> Iterator[None]:
    """Keep the names of the modules that are running on ``stack``."""

    def enter(name: str) -> Any:
        return lambda *_: stack.append(name)

    hooks = []
    for name, module in model.named_modules():
        hooks += [module.register_forward_pre_hook(enter(name)), module.register_forward_hook(lambda *_: _pop(stack))]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _pop(stack: list[str]) -> None:
    stack.pop()


def of_a_step(config: ModelConfig = FLASH) -> Schedule:
    """Run a step of the small model and count its calls for the layers of ``config``."""
    noted, calls = _Noted(), Counter[tuple[Place, LayerKind | None]]()
    with backends.emulating(ARCH):
        model = whole.model_of(SMALL, BATCH, CONTEXT, "cpu", "reference")
        step = whole.step_of(model, BATCH, CONTEXT)
        with _named(model, noted.modules), noted:
            step()
    for module, op in noted.found:
        kind = None
        if module.startswith("layers."):
            _, number, *rest = module.split(".")
            kind, module = SMALL.layer_kinds[int(number)], ".".join(rest)
        calls[Place(module, op), kind] += 1
    return Schedule(config, dict(calls))
