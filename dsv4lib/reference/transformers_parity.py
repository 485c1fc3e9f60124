"""Check parity with a model that we did not write. It is transformers' ``DeepseekV4ForCausalLM``.

Why it exists: an oracle that is only compared with itself proves nothing. Here the same random weights go into
transformers' implementation (the *peer*) and into :class:`dsv4lib.reference.model.ReferenceModel`, and logits and
per-layer tensors are compared in fp32: one-shot, prefill + decode, and chunks of odd sizes, each with its own cache.

Sources: tensor names as in the released DeepSeek-V4 checkpoints; transformers 5.23.0 ``models/deepseek_v4``. What to
know of the peer:

* its default ``layer_types`` are not the released schedules, so the schedule is always written out here;
* its default init leaves sinks, position biases, router bias, mHC bases and the hash table at zero, which hides bugs:
  every parameter and every persistent buffer is drawn anew;
* with few index heads all ReLUs of a score are often zero, and the order of such exact ties is unspecified: many heads
  are used, and :func:`decision_margin` measures how far the closest top-k decision is from a tie;
* in bf16 it rounds in other places than the released code, so everything here is fp32, where both are the same math.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsv4lib.config import TINY, LayerKind, ModelConfig, YarnConfig, schedule
from dsv4lib.errors import ArgumentError
from dsv4lib.reference.model import ReferenceModel

LOGITS_BOUND = 5e-5
"""Max abs difference allowed on fp32 logits of standard deviation 1."""

LAYER_BOUND = 2e-5
"""Max abs difference allowed on an inner tensor, as a fraction of its RMS: rounding is relative to magnitude, and the
streams grow from layer to layer while sublayer outputs stay small, so one absolute bound would be loose for some and
too tight for others. Two correct fp32 implementations differ by up to 6e-6 of the RMS after six layers."""

_BASE = replace(
    TINY,
    # Every dimension differs from the others wherever the architecture allows it: a swapped axis cannot go unnoticed.
    hidden=72,
    n_heads=6,
    o_groups=3,
    o_lora_rank=20,
    index_heads=18,
    index_topk=5,
    n_experts=10,
    expert_width=44,
    # Released models clamp at 10; activations of unit scale never get there, and the clamp would go untested.
    swiglu_limit=1.0,
)


@dataclass(frozen=True)
class Variant:
    """What one parity run fixes. It is the model's dimensions and the token counts of its modes.

    Attributes:
        config: dimensions, windows, compression rates and rope of both models.
        tokens: sequence length.
        prefill: tokens of the first call in mode ``prefill+decode``; the rest goes one by one.
        chunks: call sizes of mode ``chunked``.
    """

    config: ModelConfig
    tokens: int
    prefill: int
    chunks: tuple[int, ...]


_ODD_CHUNKS = (7, 1, 13, 2, 5, 11, 3, 11)
VARIANTS: dict[str, Variant] = {
    "tiny": Variant(replace(_BASE, yarn=None), 53, 19, _ODD_CHUNKS),
    "tiny_yarn": Variant(_BASE, 53, 19, _ODD_CHUNKS),
    # Window and rates of the released models. The prefill ends 13 tokens into the second HCA window; the last two
    # chunks close one HCA window each.
    "real_rates": Variant(
        replace(_BASE, window=128, hca_rate=128, compress_ratios=schedule(6, (0, 0), 4, 128)),
        300,
        141,
        (*_ODD_CHUNKS, 129, 118),
    ),
}
MODES = ("one-shot", "prefill+decode", "chunked")


def call_sizes(variant: str, mode: str) -> tuple[int, ...]:
    """List token counts of the successive calls of one mode.

    They add up to ``VARIANTS[variant].tokens``.

    Raises:
        ArgumentError: unknown variant or mode.
    """
    v = _variant(variant)
    if mode not in MODES:
        raise ArgumentError("mode", mode, f"one of {', '.join(MODES)}")
    if mode == "one-shot":
        return (v.tokens,)
    if mode == "chunked":
        return v.chunks
    return (v.prefill,) + (1,) * (v.tokens - v.prefill)


def _variant(name: str) -> Variant:
    if name not in VARIANTS:
        raise ArgumentError("variant", name, f"one of {', '.join(VARIANTS)}")
    return VARIANTS[name]


# ---------------------------------------------------------------------------------------------------------------------
# The peer and its weights


@dataclass(frozen=True)
class Peer:
    """Hold transformers' model with random weights, its dimensions and tokens.

    It is compared on the tokens [B, T] int64.
    """

    variant: str
    seed: int
    config: ModelConfig
    model: Any
    tokens: Tensor


def build_peer(variant: str = "tiny", seed: int = 0, batch: int = 2) -> Peer:
    """Build transformers' ``DeepseekV4ForCausalLM`` in fp32 from ``seed``.

    Every parameter and buffer is redrawn.

    Raises:
        ArgumentError: unknown variant.
    """
    v = _variant(variant)
    rng = torch.Generator().manual_seed(seed)
    model = build_model(v.config, rng)
    return Peer(variant, seed, v.config, model, torch.randint(v.config.vocab, (batch, v.tokens), generator=rng))


def build_model(config: ModelConfig, rng: torch.Generator) -> Any:
    """Build transformers' model of these dimensions in fp32.

    Every parameter and buffer is drawn from ``rng``.
    """
    from transformers import DeepseekV4ForCausalLM  # seconds of import time, paid only when used

    model = DeepseekV4ForCausalLM(peer_config(config)).to(torch.float32).eval()
    _redraw(model, rng)
    return model


_PEER_KINDS = {
    LayerKind.SWA: "sliding_attention",
    LayerKind.CSA: "compressed_sparse_attention",
    LayerKind.HCA: "heavily_compressed_attention",
}


def peer_config(config: ModelConfig) -> Any:
    """Convert ``config`` to a ``DeepseekV4Config``.

    The layer schedule is written out.
    """
    from transformers import DeepseekV4Config

    return DeepseekV4Config(
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        moe_intermediate_size=config.expert_width,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=1,
        head_dim=config.head_dim,
        partial_rotary_factor=config.rope_dim / config.head_dim,
        q_lora_rank=config.q_lora_rank,
        o_groups=config.o_groups,
        o_lora_rank=config.o_lora_rank,
        n_routed_experts=config.n_experts,
        num_experts_per_tok=config.experts_per_token,
        n_shared_experts=config.n_shared_experts,
        scoring_func="sqrtsoftplus",
        routed_scaling_factor=config.routed_scaling,
        swiglu_limit=config.swiglu_limit,
        layer_types=[_PEER_KINDS[kind] for kind in config.layer_kinds],
        mlp_layer_types=["hash_moe" if config.is_hash_layer(n) else "moe" for n in range(config.n_layers)],
        compress_rates={_PEER_KINDS[kind]: config.rate(kind) for kind in (LayerKind.CSA, LayerKind.HCA)},
        sliding_window=config.window,
        index_n_heads=config.index_heads,
        index_head_dim=config.index_dim,
        index_topk=config.index_topk,
        hc_mult=config.hc_mult,
        hc_sinkhorn_iters=config.sinkhorn_iters,
        hc_eps=config.hc_eps,
        rms_norm_eps=config.rms_eps,
        rope_theta=config.rope_theta,
        compress_rope_theta=config.compress_rope_theta,
        rope_parameters=None if config.yarn is None else _peer_yarn(config.yarn),
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=False,
        attn_implementation="eager",  # the only one that has the sink
    )


def _peer_yarn(yarn: YarnConfig) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_positions,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
    }


@torch.no_grad()
def _redraw(model: Any, rng: torch.Generator) -> None:
    """Draw every parameter and persistent buffer so that activations, attention scores and logits have unit scale.

    Matrices get variance 1 / fan_in (the last axis of every one of them); what is added to a logit (sinks, position
    biases, router bias, mHC bases) gets a spread comparable with the logit, so that leaving it out is visible; norm
    weights stay near 1.
    """
    state = model.state_dict()
    for name, tensor in state.items():
        leaf = name.rsplit(".", 1)[-1]

        def normal(mean: float, std: float, shape: torch.Size = tensor.shape) -> Tensor:
            return torch.randn(shape, generator=rng) * std + mean

        if leaf == "tid2eid":  # distinct experts per token, as in the released tables
            experts = model.config.n_routed_experts
            tensor.copy_(torch.rand(tensor.shape[0], experts, generator=rng).argsort(-1)[:, : tensor.shape[1]])
        elif leaf in ("sinks", "position_bias"):
            tensor.copy_(normal(0.0, 1.0))
        elif leaf == "e_score_correction_bias":
            tensor.copy_(normal(0.0, 0.3))
        elif leaf in ("base", "hc_base"):
            tensor.copy_(normal(0.0, 0.5))
        elif leaf in ("scale", "hc_scale"):
            tensor.copy_(normal(1.0, 0.2))
        elif tensor.ndim == 1:  # norm weights
            tensor.copy_(normal(1.0, 0.2))
        elif name == "model.embed_tokens.weight":
            tensor.copy_(normal(0.0, 1.0))
        else:
            tensor.copy_(normal(0.0, tensor.shape[-1] ** -0.5))


_TOP_NAMES = {
    "model.embed_tokens.weight": "embed.weight",
    "lm_head.weight": "head.weight",
    "model.norm.weight": "norm.weight",
    "model.hc_head.hc_fn": "hc_head_fn",
    "model.hc_head.hc_base": "hc_head_base",
    "model.hc_head.hc_scale": "hc_head_scale",
}
_COMPRESSOR_NAMES = {
    "kv_proj.weight": "wkv.weight",
    "gate_proj.weight": "wgate.weight",
    "position_bias": "ape",
    "kv_norm.weight": "norm.weight",
}
_LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    **{f"{site}_hc.{leaf}": f"hc_{site}_{leaf}" for site in ("attn", "ffn") for leaf in ("fn", "base", "scale")},
    "self_attn.q_a_proj.weight": "attn.wq_a.weight",
    "self_attn.q_a_norm.weight": "attn.q_norm.weight",
    "self_attn.q_b_proj.weight": "attn.wq_b.weight",
    "self_attn.kv_proj.weight": "attn.wkv.weight",
    "self_attn.kv_norm.weight": "attn.kv_norm.weight",
    "self_attn.o_a_proj.weight": "attn.wo_a.weight",
    "self_attn.o_b_proj.weight": "attn.wo_b.weight",
    "self_attn.sinks": "attn.attn_sink",
    **{f"self_attn.compressor.{a}": f"attn.compressor.{b}" for a, b in _COMPRESSOR_NAMES.items()},
    **{f"self_attn.compressor.indexer.{a}": f"attn.indexer.compressor.{b}" for a, b in _COMPRESSOR_NAMES.items()},
    "self_attn.compressor.indexer.q_b_proj.weight": "attn.indexer.wq_b.weight",
    "self_attn.compressor.indexer.scorer.weights_proj.weight": "attn.indexer.weights_proj.weight",
    "mlp.gate.weight": "ffn.gate.weight",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "mlp.gate.tid2eid": "ffn.gate.tid2eid",
    "mlp.shared_experts.gate_proj.weight": "ffn.shared_experts.w1.weight",
    "mlp.shared_experts.down_proj.weight": "ffn.shared_experts.w2.weight",
    "mlp.shared_experts.up_proj.weight": "ffn.shared_experts.w3.weight",
}


def checkpoint_state(peer_state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename a transformers state dict to the released checkpoint's names.

    Its fused experts become w1 (gate), w2 (down), w3 (up). Values are views, nothing is copied.

    Raises:
        ArgumentError: a name that no released checkpoint has.
    """
    out: dict[str, Tensor] = {}
    for name, tensor in peer_state.items():
        if name in _TOP_NAMES:
            out[_TOP_NAMES[name]] = tensor
            continue
        parts = name.split(".", 3)  # model . layers . N . rest
        prefix, rest = f"layers.{parts[2]}." if len(parts) == 4 else "", parts[-1]
        if parts[:2] != ["model", "layers"]:
            raise ArgumentError("peer_state", name, "names of transformers' DeepseekV4ForCausalLM")
        if rest == "mlp.experts.gate_up_proj":
            for e, fused in enumerate(tensor):
                gate, up = fused.chunk(2, dim=0)
                out[f"{prefix}ffn.experts.{e}.w1.weight"], out[f"{prefix}ffn.experts.{e}.w3.weight"] = gate, up
        elif rest == "mlp.experts.down_proj":
            out.update({f"{prefix}ffn.experts.{e}.w2.weight": down for e, down in enumerate(tensor)})
        elif rest in _LAYER_NAMES:
            out[prefix + _LAYER_NAMES[rest]] = tensor
        else:
            raise ArgumentError("peer_state", name, "names of transformers' DeepseekV4ForCausalLM")
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Running the peer and looking inside

Trace = dict[str, Tensor]
"""Tensors by name, the same names for both models (N layer, B batch, T tokens, n entries, E experts, d hidden):

=========================  ================  =========================================================================
``logits``                 [B, T, vocab]
``head``                   [B, T, d]         collapsed streams, before the final norm
``layers.N.attn``          [B, T, d]         output of the attention sublayer
``layers.N.ffn``           [B, T, d]         output of the MoE sublayer
``layers.N.streams``       [B, T, 4, d]      residual streams after the layer
``layers.N.entries``       [B, n, head_dim]  compressed entries, normed and roped
``layers.N.index_keys``    [B, n, index_dim] the indexer's compressed keys
``layers.N.selected``      [B, T, n] bool    the indexer's picks, as a set
``layers.N.hc_attn_post``  [B, T, 4]         mHC write-back weights (``hc_ffn_post`` alike)
``layers.N.hc_attn_comb``  [B, T, 4, 4]      mHC mixing matrix (``hc_ffn_comb`` alike)
``layers.N.routing``       [B, T, E]         routing weights, zero where a token is not routed
=========================  ================  =========================================================================
"""


@torch.no_grad()
def peer_trace(peer: Peer, sizes: Sequence[int]) -> Trace:
    """Run the peer in calls of ``sizes`` tokens and collect a :data:`Trace`.

    With its own cache.
    """
    pieces, cache = _run_peer(peer, sizes)
    entries = sum(sizes) // peer.config.csa_rate
    trace: Trace = {}
    for name, parts in pieces.items():
        layer, _, leaf = name.rpartition(".")
        if leaf == "picks":
            trace[f"{layer}.selected"] = torch.cat([selection_mask(p, entries) for p in parts], dim=1)
        elif leaf not in ("index_scores", "router_scores"):
            trace[name] = torch.cat(parts, dim=1)
    for n, layer_cache in enumerate(cache.layers):
        for ours, theirs in (("entries", "compressor"), ("index_keys", "indexer")):
            if theirs in getattr(layer_cache, "compressed_kv", {}):
                trace[f"layers.{n}.{ours}"] = layer_cache.compressed_kv[theirs]
    return trace


@torch.no_grad()
def decision_margin(peer: Peer) -> float:
    """Find the smallest distance of the last score taken to the first left.

    Over all experts and index picks.

    Where it is not far above the fp32 noise of the scores (about 1e-6), two correct implementations may decide
    differently, and a parity failure would not be a defect.
    """
    pieces, _ = _run_peer(peer, (peer.tokens.shape[1],))
    margin = float("inf")
    for name, (scores,) in pieces.items():
        if name.endswith("index_scores"):
            entries = torch.arange(scores.shape[-1])
            visible = (torch.arange(scores.shape[1])[:, None] + 1) // peer.config.csa_rate
            k, scores = peer.config.index_topk, scores.masked_fill(entries >= visible, float("-inf"))
        elif name.endswith("router_scores"):
            k = peer.config.experts_per_token
        else:
            continue
        ranked = scores.sort(dim=-1, descending=True).values
        gap = ranked[..., k - 1] - ranked[..., k]
        margin = min(margin, gap[ranked[..., k].isfinite()].min().item())  # fewer than k + 1 visible: nothing to decide
    return margin


def _run_peer(peer: Peer, sizes: Sequence[int]) -> tuple[dict[str, list[Tensor]], Any]:
    """All hooked tensors, one per call, and the cache at the end."""
    from transformers import DynamicCache

    if sum(sizes) > peer.tokens.shape[1]:
        raise ArgumentError("sizes", tuple(sizes), f"call sizes that add up to at most {peer.tokens.shape[1]} tokens")
    cache = DynamicCache(config=peer.model.config)
    pieces: dict[str, list[Tensor]] = {"logits": []}
    with _hooks(peer.model, pieces):
        for chunk in peer.tokens[:, : sum(sizes)].split(list(sizes), dim=1):
            pieces["logits"].append(peer.model(input_ids=chunk, past_key_values=cache, use_cache=True).logits)
    return pieces, cache


def selection_mask(indices: Tensor, entries: int) -> Tensor:
    """Picks [..., k] int64 (-1 = none) as a set: bool [..., entries]."""
    hit = torch.zeros(*indices.shape[:-1], entries + 1, dtype=torch.bool)
    return hit.scatter_(-1, torch.where(indices < 0, entries, indices), True)[..., :entries]


@contextmanager
def _hooks(model: Any, pieces: dict[str, list[Tensor]]) -> Iterator[None]:
    """Forward hooks that append every call's tensors to ``pieces`` while the context is open."""
    handles = []

    def record(module: Any, name: str, pick: Callable[[tuple, Any], Tensor]) -> None:
        def hook(_module: Any, args: tuple, output: Any) -> None:
            pieces.setdefault(name, []).append(pick(args, output).detach())

        handles.append(module.register_forward_hook(hook))

    def dense(args: tuple, output: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        logits, weights, chosen = output
        return torch.zeros_like(logits).scatter_(-1, chosen, weights).view(*args[0].shape[:2], -1)

    def routed(gate: Any) -> Callable[[tuple, Any], Tensor]:
        return lambda args, out: (gate.score_fn(out[0]) + gate.e_score_correction_bias).view(*args[0].shape[:2], -1)

    record(model.model.hc_head, "head", lambda _, out: out)
    for n, layer in enumerate(model.model.layers):
        record(layer, f"layers.{n}.streams", lambda _, out: out)
        for site, connection in (("attn", layer.attn_hc), ("ffn", layer.ffn_hc)):
            record(connection, f"layers.{n}.hc_{site}_post", lambda _, out: out[0])
            record(connection, f"layers.{n}.hc_{site}_comb", lambda _, out: out[1])
        record(layer.self_attn, f"layers.{n}.attn", lambda _, out: out[0])
        record(layer.mlp, f"layers.{n}.ffn", lambda _, out: out)
        record(layer.mlp.gate, f"layers.{n}.routing", dense)
        if not layer.mlp.is_hash:
            record(layer.mlp.gate, f"layers.{n}.router_scores", routed(layer.mlp.gate))
        indexer = getattr(layer.self_attn.compressor, "indexer", None)
        if indexer is not None:
            record(indexer.scorer, f"layers.{n}.index_scores", lambda _, out: out)
            record(indexer, f"layers.{n}.picks", lambda _, out: out)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# ---------------------------------------------------------------------------------------------------------------------
# Our side, and the comparison


def reference_of(peer: Peer, dtype: torch.dtype = torch.float32) -> ReferenceModel:
    """Make our model with the peer's weights.

    Its MTP block, which the peer does not have, is drawn from the peer's seed.
    """
    model = ReferenceModel(peer.config, dtype).randomize_(peer.seed)
    result = model.load_state_dict(checkpoint_state(peer.model.state_dict()), strict=False)
    odd = [*result.unexpected_keys, *(name for name in result.missing_keys if not name.startswith("mtp."))]
    if odd:
        raise ArgumentError("peer", odd, "a model whose weights have the released names, all of them")
    return model


# Names of our captures, where they differ from those of a Trace.
_CAPTURED = {"attn_out": "attn", "ffn_out": "ffn"}
_AS_CAPTURED = ("streams", *(f"hc_{site}_{what}" for site in ("attn", "ffn") for what in ("post", "comb")))


@torch.no_grad()
def reference_trace(model: ReferenceModel, tokens: Tensor, sizes: Sequence[int]) -> Trace:
    """Run our model in calls of ``sizes`` tokens and collect a :data:`Trace`.

    Over ``tokens`` [B, T], with its cache.
    """
    if sum(sizes) > tokens.shape[1]:
        raise ArgumentError("sizes", tuple(sizes), f"call sizes that add up to at most {tokens.shape[1]} tokens")
    config, cache = model.config, model.new_cache(tokens.shape[0])
    entries = sum(sizes) // config.csa_rate
    pieces: dict[str, list[Tensor]] = {}
    for chunk in tokens[:, : sum(sizes)].split(list(sizes), dim=1):
        capture: dict[str, Tensor] = {}
        logits = model(chunk, cache=cache, capture=capture)
        pieces.setdefault("logits", []).append(logits)
        pieces.setdefault("head", []).append(capture["collapsed"])
        for n in range(config.n_layers):
            for name, tensor in _layer_pieces(capture, n, config, entries):
                pieces.setdefault(f"layers.{n}.{name}", []).append(tensor)
    trace = {name: torch.cat(parts, dim=1) for name, parts in pieces.items()}
    for n, layer in enumerate(cache.layers):
        for name in ("entries", "index_keys"):
            if getattr(layer, name) is not None:
                trace[f"layers.{n}.{name}"] = getattr(layer, name)
    return trace


def _layer_pieces(
    capture: dict[str, Tensor], layer: int, config: ModelConfig, entries: int
) -> Iterator[tuple[str, Tensor]]:
    """One call's tensors of one layer under their Trace names."""
    for name in (*_CAPTURED, *_AS_CAPTURED):
        yield _CAPTURED.get(name, name), capture[f"layers.{layer}.{name}"]
    experts, weights = (capture[f"layers.{layer}.router_{name}"] for name in ("experts", "weights"))
    yield "routing", weights.new_zeros(*experts.shape[:-1], config.n_experts).scatter_(-1, experts, weights)
    if f"layers.{layer}.topk" in capture:
        yield "selected", selection_mask(capture[f"layers.{layer}.topk"], entries)


@dataclass(frozen=True)
class ParityRow:
    """One compared tensor.

    ``max_abs`` is the largest absolute difference, for ``selected`` the number of entries picked by one model alone;
    ``bound`` is what is allowed.
    """

    variant: str
    mode: str
    tensor: str
    max_abs: float
    bound: float

    @property
    def ok(self) -> bool:
        """Within the bound (NaN is not)."""
        return self.max_abs <= self.bound


def compare(variant: str, mode: str, ours: Trace, peers: Trace) -> list[ParityRow]:
    """Compare two traces tensor by tensor; logits first.

    Raises:
        ArgumentError: the traces do not hold the same tensors in the same shapes.
    """
    shapes = [{name: tuple(tensor.shape) for name, tensor in trace.items()} for trace in (ours, peers)]
    if shapes[0] != shapes[1]:
        odd = dict(set(shapes[0].items()) ^ set(shapes[1].items()))
        raise ArgumentError("ours", odd, "the same tensors in the same shapes as the peer's")
    rows = []
    for name in sorted(peers, key=lambda name: (name != "logits", name)):
        a, b = ours[name], peers[name]
        if b.dtype is torch.bool:
            rows.append(ParityRow(variant, mode, name, float((a ^ b).sum()), 0.0))
            continue
        bound = LOGITS_BOUND if name == "logits" else LAYER_BOUND * b.square().mean().sqrt().item()
        rows.append(ParityRow(variant, mode, name, (a - b).abs().max().item(), bound))
    return rows


def parity_table(
    variants: Sequence[str] = ("tiny", "tiny_yarn"), modes: Sequence[str] = MODES, seed: int = 0
) -> list[ParityRow]:
    """Compare our model with the peer on every tensor of a :data:`Trace`.

    For each variant in each mode.

    Both run in the same calls, each over its own cache. :func:`worst` makes a table that fits a screen of it.

    Raises:
        ArgumentError: unknown variant or mode.
    """
    rows = []
    for variant in variants:
        peer = build_peer(variant, seed)
        model = reference_of(peer)
        for mode in modes:
            sizes = call_sizes(variant, mode)
            rows += compare(variant, mode, reference_trace(model, peer.tokens, sizes), peer_trace(peer, sizes))
    return rows


def worst(rows: Sequence[ParityRow]) -> list[ParityRow]:
    """Return the worst row of each kind of tensor, variant and mode.

    That of the largest ``max_abs / bound`` (``layers.N.`` dropped).
    """
    best: dict[tuple[str, str, str], ParityRow] = {}
    for row in rows:
        key = (row.variant, row.mode, row.tensor.rsplit(".", 1)[-1])
        if key not in best or _strain(row) > _strain(best[key]):
            best[key] = row
    return list(best.values())


def _strain(row: ParityRow) -> float:
    """max_abs / bound; infinite when NaN, or when anything exceeds a bound of zero."""
    if row.ok:
        return row.max_abs / row.bound if row.bound else 0.0
    return row.max_abs / row.bound if row.bound and row.max_abs == row.max_abs else float("inf")
