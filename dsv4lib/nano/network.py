"""Compute the nano model over whole windows. It is what `reference.model` computes, fast enough to train.

Weights are a dict under the released names, with one difference: routed experts are stacked, ``ffn.experts.w1`` being
``[E, width, d]`` (`stack`, `unstack`). Every window starts at position 0; nothing is cached. What makes it fast:

* window attention in blocks of one window: queries of a block see its keys and those of the block before;
* compressed entries by a mask over all of them, whichever the indexer picks;
* the sink as a factor: softmax without it, times sigmoid(lse - sink);
* experts as one wide SwiGLU: hidden units are multiplied by the routing weight of their expert, 0 if not chosen;
* Sinkhorn with the tokens innermost, ``[n, n, B, T]``.

The language-model loss has no gradient for the indexer, whose top-k is a hard choice. Its own loss is the KL divergence
to the attention it selects for: head-summed weights of all visible entries, detached (the DSA recipe of DeepSeek-V3.2).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F

from dsv4lib.config import LayerKind, ModelConfig
from dsv4lib.errors import ArgumentError
from dsv4lib.reference import rope

Tensors = Mapping[str, torch.Tensor]
TINY = 1e-20  # keeps logarithms and quotients of empty sums finite


class Angles(NamedTuple):
    """RoPE tables ``[T, rope_dim / 2]``."""

    cos: torch.Tensor
    sin: torch.Tensor


class Tables(NamedTuple):
    """What depends on the length of a window only.

    plain, compressed: angles of SWA layers and of the others. near: bool ``[T / W, W, 2 W]``, keys of a block and of
    the block before that a query sees. visible: bool ``[T, T / rate]`` for each rate, entries that are complete.
    """

    plain: Angles
    compressed: Angles
    near: torch.Tensor
    visible: dict[int, torch.Tensor]


def tables(config: ModelConfig, length: int, device: torch.device) -> Tables:
    """Build the tables. Raises ArgumentError for a length that windows and entries do not divide."""
    c = config
    step = math.lcm(c.window, c.csa_rate, c.hca_rate)
    if length < 1 or length % step:
        raise ArgumentError("length", length, f"a multiple of {step}")
    positions = torch.arange(length)
    angles = [
        Angles(*(t.to(device) for t in rope.cos_sin(positions, rope.layer_freqs(c, kind), torch.float32)))
        for kind in (LayerKind.SWA, LayerKind.CSA)
    ]
    back = torch.arange(c.window)[:, None] + c.window - torch.arange(2 * c.window)
    seen = (back >= 0) & (back < c.window)
    first = seen & (torch.arange(2 * c.window) >= c.window)
    near = torch.stack([first] + [seen] * (length // c.window - 1))
    visible = {
        rate: (torch.arange(length // rate) < (positions[:, None] + 1) // rate).to(device)
        for rate in (c.csa_rate, c.hca_rate)
    }
    return Tables(*angles, near.to(device), visible)


def exact(x: torch.Tensor) -> torch.autocast:
    """Return a context without autocast."""
    return torch.autocast(x.device.type, enabled=False)


def rms(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Compute RMSNorm over the last dim in fp32, in the dtype of x."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight).to(x.dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the last dims in fp32; cos and sin broadcast against the leading ones."""
    keep = x.shape[-1] - 2 * cos.shape[-1]
    tail = rope.rotate(x[..., keep:].float(), cos, sin).to(x.dtype)
    return torch.cat((x[..., :keep], tail), -1)


def _mixes(streams: torch.Tensor, fn: torch.Tensor, eps: float) -> torch.Tensor:
    z = streams.flatten(-2)
    return F.linear(z, fn) * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)


def mhc_in(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm: torch.Tensor,
    config: ModelConfig,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the input of a sublayer ``[B, T, d]``, normed.

    Also fp32 post ``[B, T, n]``, comb ``[n, n, B, T]`` of its site.
    """
    n, eps = config.hc_mult, config.hc_eps
    with exact(streams):
        wide = streams.float()
        m = _mixes(wide, fn, config.rms_eps)
        pre = torch.sigmoid(scale[0] * m[..., :n] + base[:n]) + eps
        post = 2 * torch.sigmoid(scale[1] * m[..., n : 2 * n] + base[n : 2 * n])
        comb = (scale[2] * m[..., 2 * n :] + base[2 * n :]).movedim(-1, 0).unflatten(0, (n, n))
        comb = comb.softmax(1) + eps
        comb = comb / (comb.sum(0, keepdim=True) + eps)
        for _ in range(config.sinkhorn_iters - 1):
            comb = comb / (comb.sum(1, keepdim=True) + eps)
            comb = comb / (comb.sum(0, keepdim=True) + eps)
        x = (pre[..., None] * wide).sum(-2).to(streams.dtype)
        return rms(x, norm, config.rms_eps), post, comb


def mhc_out(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """Compute the streams ``[B, T, n, d]`` after a sublayer. X'_j = post_j y + sum_i comb[i, j] X_i."""
    with exact(streams):
        mixed = (comb.permute(2, 3, 0, 1)[..., None] * streams.float()[..., :, None, :]).sum(-3)
        return (post[..., None] * y.float()[..., None, :] + mixed).to(streams.dtype)


def collapse(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm: torch.Tensor,
    config: ModelConfig,
) -> torch.Tensor:
    """Collapse streams to one normed vector ``[B, T, d]`` before the head."""
    with exact(streams):
        wide = streams.float()
        weights = torch.sigmoid(scale * _mixes(wide, fn, config.rms_eps) + base) + config.hc_eps
        return rms((weights[..., None] * wide).sum(-2).to(streams.dtype), norm, config.rms_eps)


def compress(x: torch.Tensor, w: Tensors, stem: str, rate: int, overlap: bool, at: Angles, eps: float) -> torch.Tensor:
    """Compute the entries ``[B, T / rate, D]`` of a compressor. `reference.compressor` has the equation."""
    batch, length, _ = x.shape
    k = F.linear(x, w[f"{stem}wkv.weight"]).float().view(batch, length // rate, rate, -1)
    z = F.linear(x, w[f"{stem}wgate.weight"]).float().view_as(k) + w[f"{stem}ape"]
    if overlap:
        dim = k.shape[-1] // 2
        k = torch.cat((F.pad(k[:, :-1, :, :dim], (0, 0, 0, 0, 1, 0)), k[..., dim:]), 2)
        z = torch.cat((F.pad(z[:, :-1, :, :dim], (0, 0, 0, 0, 1, 0), value=-math.inf), z[..., dim:]), 2)
    pooled = rms((z.softmax(2) * k).sum(2), w[f"{stem}norm.weight"], eps)
    return rotated(pooled, at.cos[::rate], at.sin[::rate]).to(x.dtype)


def index_scores(x: torch.Tensor, qr: torch.Tensor, w: Tensors, at: Angles, config: ModelConfig) -> torch.Tensor:
    """Scores of the indexer for all entries, fp32 ``[B, T, T / rate]``. The rotation by Hadamard changes none."""
    c = config
    q = F.linear(qr, w["indexer.wq_b.weight"]).unflatten(-1, (c.index_heads, c.index_dim))
    q = rotated(q, at.cos[:, None], at.sin[:, None])
    keys = compress(x, w, "indexer.compressor.", c.csa_rate, True, at, c.rms_eps)
    heads = F.linear(x, w["indexer.weights_proj.weight"]).float() * (c.index_dim * c.index_heads) ** -0.5
    dots = (q.flatten(1, 2) @ keys.mT).unflatten(1, (-1, c.index_heads))
    return (dots.relu().float() * heads[..., None]).sum(2)


def index_loss(
    scores: torch.Tensor, near: torch.Tensor, entries: torch.Tensor, sink: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """Compute the KL divergence from the scores' softmax to the entries' attention.

    Args:
        scores: fp32 ``[B, T, S]``, with a gradient.
        near, entries: logits of attention ``[B, T, H, .]``; of these the target is made, without a gradient.
        sink: ``[H]``.
        visible: bool ``[T, S]``.

    Returns:
        Mean over the positions that see an entry, in nats.
    """
    with torch.no_grad():
        full = entries.masked_fill(~visible[:, None], -math.inf)
        lse = torch.logaddexp(near.logsumexp(-1), full.logsumexp(-1))
        share = torch.sigmoid(lse - sink)[..., None]
        target = ((full - lse[..., None]).exp() * share).sum(2)
        target = target / (target.sum(-1, keepdim=True) + TINY)
    logs = scores.masked_fill(~visible, -1e30).log_softmax(-1)
    kl = (target * ((target + TINY).log() - logs)).masked_fill(~visible, 0.0).sum(-1)
    seeing = visible.any(-1)
    return (kl * seeing).sum() / (scores.shape[0] * seeing.sum())


def attention(
    x: torch.Tensor, w: Tensors, at: Angles, near: torch.Tensor, visible: torch.Tensor | None, dense: torch.Tensor,
    config: ModelConfig, kind: LayerKind,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Compute the attention of one layer.

    Args:
        x: ``[B, T, d]``, normed.
        w: the layer's tensors, names after ``attn.``.
        at: angles. near: see `Tables`. visible: bool ``[T, entries]``, None for SWA.
        dense: 1 (a scalar tensor): CSA attends to all visible entries; 0: to the indexer's choice.
        config, kind: dimensions and kind of the layer.

    Returns:
        ``[B, T, d]``, and the indexer's loss for CSA.
    """
    c, (batch, length, _) = config, x.shape
    heads, dim, blocks = c.n_heads, c.head_dim, length // c.window
    qr = rms(F.linear(x, w["wq_a.weight"]), w["q_norm.weight"], c.rms_eps)
    q = rms(F.linear(qr, w["wq_b.weight"]).unflatten(-1, (heads, dim)), None, c.rms_eps)
    q = rotated(q, at.cos[:, None], at.sin[:, None])
    kv = rotated(rms(F.linear(x, w["wkv.weight"]), w["kv_norm.weight"], c.rms_eps), at.cos, at.sin)
    own = kv.unflatten(1, (blocks, c.window))
    keys = torch.cat((F.pad(own[:, :-1], (0, 0, 0, 0, 1, 0)), own), 2)  # [B, blocks, 2 W, D]
    logits = (q.view(batch, blocks, c.window * heads, dim) @ keys.mT).float() * dim**-0.5
    logits = logits.view(batch, blocks, c.window, heads, -1).masked_fill(~near[:, :, None], -math.inf)
    logits = logits.view(batch, length, heads, -1)
    loss = entries = None
    if visible is not None:
        entries = compress(x, w, "compressor.", c.rate(kind), kind is LayerKind.CSA, at, c.rms_eps)
        far = (q.flatten(1, 2) @ entries.mT).float().unflatten(1, (length, heads)) * dim**-0.5
        seen = visible
        if kind is LayerKind.CSA:
            scores = index_scores(x.detach(), qr.detach(), w, at, c)
            loss = index_loss(scores, logits, far, w["attn_sink"], visible)
            top = scores.detach().masked_fill(~visible, -math.inf).topk(min(c.index_topk, scores.shape[-1]), -1).indices
            picked = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, top, True)
            seen = (visible & (picked | dense.bool()))[:, :, None]
        else:
            seen = visible[:, None]
        logits = torch.cat((logits, far.masked_fill(~seen, -math.inf)), -1)
    weights = logits.softmax(-1) * torch.sigmoid(logits.logsumexp(-1) - w["attn_sink"])[..., None]
    weights = weights.to(kv.dtype)
    o = weights[..., : 2 * c.window].reshape(batch, blocks, c.window * heads, -1) @ keys
    o = o.view(batch, length, heads, dim)
    if entries is not None:
        o = o + (weights[..., 2 * c.window :].reshape(batch, length * heads, -1) @ entries).view_as(o)
    o = rotated(o, at.cos[:, None], -at.sin[:, None]).reshape(batch, length, c.o_groups, -1)
    grouped = torch.einsum("btgi,gri->btgr", o, w["wo_a.weight"].unflatten(0, (c.o_groups, -1)))
    return F.linear(grouped.flatten(-2), w["wo_b.weight"]), loss


def moe(x: torch.Tensor, tokens: torch.Tensor, w: Tensors, config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the experts of one layer. Returns ``[B, T, d]``, and each expert's share of the tokens ``[E]``.

    w: names after ``ffn.``. The router is computed in fp32.
    """
    c = config
    with exact(x):
        affinity = F.softplus(F.linear(x.float(), w["gate.weight"].float())).sqrt()
    with torch.no_grad():
        if "gate.tid2eid" in w:
            chosen = w["gate.tid2eid"][tokens]
        else:
            chosen = (affinity + w["gate.bias"]).topk(c.experts_per_token, -1).indices
        mask = torch.zeros_like(affinity).scatter(-1, chosen, 1.0)
    routing = affinity * mask
    routing = routing / routing.sum(-1, keepdim=True) * c.routed_scaling
    shared = c.n_shared_experts * c.expert_width
    w1 = torch.cat((w["experts.w1"].flatten(0, 1), w["shared_experts.w1.weight"]))
    w3 = torch.cat((w["experts.w3"].flatten(0, 1), w["shared_experts.w3.weight"]))
    w2 = torch.cat((w["experts.w2"].transpose(0, 1).flatten(1), w["shared_experts.w2.weight"]), 1)
    gate = F.linear(x, w1).float().clamp(max=c.swiglu_limit)
    up = F.linear(x, w3).float().clamp(-c.swiglu_limit, c.swiglu_limit)
    factors = F.pad(routing.repeat_interleave(c.expert_width, -1), (0, shared), value=1.0)
    return F.linear((F.silu(gate) * up * factors).to(x.dtype), w2), mask.mean((0, 1))


OPERATORS: dict[str, Callable] = {
    "mhc_in": mhc_in,
    "mhc_out": mhc_out,
    "collapse": collapse,
    "attention": attention,
    "moe": moe,
}


@functools.cache
def compiled() -> dict[str, Callable]:
    """Compile the operators by torch.compile, one graph each. All sites of the model share them."""
    return {name: torch.compile(function, dynamic=False) for name, function in OPERATORS.items()}


class Output(NamedTuple):
    """Result of a forward pass.

    logits fp32 ``[B, T, vocab]``; mtp: logits of the token after the next, None if no next tokens were given; index:
    sum of the indexers' losses; load: share of the tokens of each expert, by prefix of the layer.
    """

    logits: torch.Tensor
    mtp: torch.Tensor | None
    index: torch.Tensor
    load: dict[str, torch.Tensor]


class Network:
    """The model over a dict of weights. The caller may change it in place between calls.

    Args:
        config: dimensions.
        weights: stacked, see `stack`.
        operators: `OPERATORS` or `compiled()`.
        dtype: of the residual streams.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Tensors,
        operators: Mapping[str, Callable] = OPERATORS,
        dtype: torch.dtype = torch.float32,
    ):
        self.config, self.weights, self.operators, self.dtype = config, weights, operators, dtype
        self.device = weights["embed.weight"].device
        self.dense = torch.zeros((), device=self.device)
        self._tables: dict[int, Tables] = {}
        self.prefixes = [f"layers.{layer}." for layer in range(config.n_layers)] + ["mtp.0."]
        self._parts = {
            prefix: {part: _below(weights, prefix + part) for part in ("", "attn.", "ffn.")} for prefix in self.prefixes
        }

    def __call__(self, tokens: torch.Tensor, following: torch.Tensor | None = None) -> Output:
        """Compute the logits of every position of windows int64 ``[B, T]``. ``following``: the next token of each."""
        w, length = self.weights, tokens.shape[1]
        if length not in self._tables:
            self._tables[length] = tables(self.config, length, self.device)
        kinds = self.config.layer_kinds
        losses: list[torch.Tensor] = []
        load: dict[str, torch.Tensor] = {}
        embedded = F.embedding(tokens, w["embed.weight"]).to(self.dtype)
        streams = embedded[:, :, None].expand(-1, -1, self.config.hc_mult, -1).contiguous()
        for prefix, kind in zip(self.prefixes, kinds, strict=False):
            streams = self._layer(prefix, kind, streams, tokens, losses, load)
        logits = self._head("", streams)
        mtp = None
        if following is not None:
            eps = self.config.rms_eps
            e = rms(F.embedding(following, w["embed.weight"]).to(self.dtype), w["mtp.0.enorm.weight"], eps)
            h = rms(streams, w["mtp.0.hnorm.weight"], eps)
            combined = F.linear(h, w["mtp.0.h_proj.weight"]) + F.linear(e, w["mtp.0.e_proj.weight"])[:, :, None]
            drafted = self._layer("mtp.0.", self.config.mtp_kind, combined.to(self.dtype), following, losses, load)
            mtp = self._head("mtp.0.", drafted)
        return Output(logits, mtp, sum(losses, torch.zeros((), device=self.device)), load)

    def _layer(
        self,
        prefix: str,
        kind: LayerKind,
        streams: torch.Tensor,
        tokens: torch.Tensor,
        losses: list[torch.Tensor],
        load: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        c, op, part = self.config, self.operators, self._parts[prefix]
        table = self._tables[tokens.shape[1]]
        swa = kind is LayerKind.SWA
        at, visible = (table.plain, None) if swa else (table.compressed, table.visible[c.rate(kind)])
        x, post, comb = op["mhc_in"](streams, *self._site(part[""], "attn"), c)
        y, loss = op["attention"](x, part["attn."], at, table.near, visible, self.dense, c, kind)
        if loss is not None:
            losses.append(loss)
        streams = op["mhc_out"](y, streams, post, comb)
        x, post, comb = op["mhc_in"](streams, *self._site(part[""], "ffn"), c)
        y, load[prefix] = op["moe"](x, tokens, part["ffn."], c)
        return op["mhc_out"](y, streams, post, comb)

    @staticmethod
    def _site(w: Tensors, site: str) -> list[torch.Tensor]:
        return [w[f"hc_{site}_{name}"] for name in ("fn", "base", "scale")] + [w[f"{site}_norm.weight"]]

    def _head(self, prefix: str, streams: torch.Tensor) -> torch.Tensor:
        names = ("hc_head_fn", "hc_head_base", "hc_head_scale", "norm.weight")
        h = self.operators["collapse"](streams, *(self.weights[prefix + n] for n in names), self.config)
        return F.linear(h, self.weights["head.weight"]).float()


def _below(weights: Tensors, prefix: str) -> dict[str, torch.Tensor]:
    return {name[len(prefix) :]: tensor for name, tensor in weights.items() if name.startswith(prefix)}


def unstack(weights: Tensors) -> dict[str, torch.Tensor]:
    """Unstack to released names: one tensor for each expert."""
    out = {}
    for name, tensor in weights.items():
        head, _, last = name.rpartition(".")
        if head.endswith(".experts"):
            out.update({f"{head}.{e}.{last}.weight": one for e, one in enumerate(tensor)})
        else:
            out[name] = tensor
    return out


def stack(weights: Tensors) -> dict[str, torch.Tensor]:
    """Invert `unstack`."""
    out: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in weights.items():
        if ".ffn.experts." in name:
            head, number, last, _ = name.rsplit(".", 3)
            experts.setdefault(f"{head}.{last}", {})[int(number)] = tensor
        else:
            out[name] = tensor
    return out | {name: torch.stack([found[e] for e in range(len(found))]) for name, found in experts.items()}
