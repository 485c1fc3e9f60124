"""Run the whole model. Parameters under their checkpoint names, prefill, chunked prefill and decode over one cache.

:class:`ReferenceModel` only wires the operators of this package; every equation is in an operator's module. Parameter
and buffer names are those of the released checkpoints (``layers.3.attn.wkv.weight``, ``mtp.0.hc_head_fn``, ...), after
dequantisation: no ``.scale`` tensors. One code path serves every chunk size; without a cache it
starts an empty one.

A dict given as ``capture`` is filled with these tensors, each name after ``layers.N.`` or ``mtp.0.`` (B requests, T
new tokens, n streams):

* ``hc_attn_post`` ``[B, T, n]``, ``hc_attn_comb`` ``[B, T, n, n]``: mHC coefficients; ``hc_ffn_post``, ``hc_ffn_comb``
* ``attn_in`` ``[B, T, d]``: input of attention, after its norm
* ``q`` ``[B, T, H, D]``, ``kv`` ``[B, T, D]``: rotated queries and KV vectors of the new tokens
* ``compressed`` ``[B, entries, D]``: all compressed entries so far (CSA, HCA)
* ``index_scores`` ``[B, T, entries]``: indexer scores, not masked; ``topk`` int64 ``[B, T, index_topk]``: chosen
  entries, -1 padded (CSA)
* ``attn_core`` ``[B, T, H, D]``, ``lse`` ``[B, T, H]``: attention before the output path, log-sum without the sink
* ``attn_out`` ``[B, T, d]``: output of attention
* ``ffn_in``, ``ffn_out`` ``[B, T, d]``: input of the MoE, after its norm, and output
* ``router_experts``, ``router_weights`` ``[B, T, k]``
* ``streams`` ``[B, T, n, d]``: residual streams after the layer

and, without a layer, ``collapsed`` and ``hidden`` ``[B, T, d]`` (streams collapsed, then normed; the MTP block has
``mtp.0.hidden``), and ``mtp_logits`` ``[B, T, vocab]`` if next tokens were given as ``mtp``.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear

from dsv4lib.config import LayerKind, ModelConfig
from dsv4lib.errors import ArgumentError
from dsv4lib.reference import cache as cache_
from dsv4lib.reference import (
    compressor,
    embedding,
    fmha,
    indexer,
    lm_head,
    mhc,
    moe_gemm,
    output_proj,
    qnorm_rope_kv,
    randomize,
    rmsnorm,
    rope,
    router,
    sampler,
)
from dsv4lib.reference import mtp as mtp_
from dsv4lib.reference.cache import Cache, LayerCache
from dsv4lib.reference.qnorm_rope_kv import Codec


class _Record:
    """Writes tensors of one layer into the capture dict, if there is one."""

    def __init__(self, capture: dict[str, torch.Tensor] | None, prefix: str):
        self.capture, self.prefix = capture, prefix

    def __call__(self, **tensors: torch.Tensor) -> None:
        if self.capture is not None:
            self.capture.update({f"{self.prefix}.{name}": tensor for name, tensor in tensors.items()})


def _parameter(*shape: int) -> nn.Parameter:
    # NaN until weights are loaded or drawn, so that a forgotten tensor cannot pass for a trained one.
    return nn.Parameter(torch.full(shape, float("nan")))


class Weight(nn.Module):
    """A tensor that the checkpoint calls ``<name>.weight``."""

    def __init__(self, *shape: int):
        super().__init__()
        self.weight = _parameter(*shape)


class CompressorWeights(nn.Module):
    """Checkpoint names of a compressor: ``wkv``, ``wgate``, ``ape``, ``norm``."""

    def __init__(self, hidden: int, dim: int, rate: int, overlap: bool):
        super().__init__()
        width = 2 * dim if overlap else dim
        self.wkv, self.wgate = Weight(width, hidden), Weight(width, hidden)
        self.ape = _parameter(rate, width)
        self.norm = Weight(dim)

    def tensors(self) -> compressor.Weights:
        """The four tensors as the operator takes them."""
        return compressor.Weights(self.wkv.weight, self.wgate.weight, self.ape, self.norm.weight)


class Indexer(nn.Module):
    """The lightning indexer of one CSA layer."""

    def __init__(self, config: ModelConfig, codec: Codec | None):
        super().__init__()
        self.config, self.codec = config, codec
        self.wq_b = Weight(config.index_heads * config.index_dim, config.q_lora_rank)
        self.weights_proj = Weight(config.index_heads, config.hidden)
        self.compressor = CompressorWeights(config.hidden, config.index_dim, config.csa_rate, overlap=True)

    def forward(
        self,
        x: torch.Tensor,
        qr: torch.Tensor,
        start: int,
        positions: torch.Tensor,
        freqs: torch.Tensor,
        cache: LayerCache,
        record: _Record,
    ) -> torch.Tensor:
        """Choose entries of every query, int64 ``[B, T, index_topk]``.

        Extends the cached keys.
        """
        c = self.config
        keys, cache.index_state = compressor.compress(
            x, cache.index_state, start, self.compressor.tensors(), freqs, c.rms_eps, overlap=True, codec=self.codec
        )
        cache.index_keys = torch.cat((cache.index_keys, keys), dim=1)
        iq = indexer.queries(qr, self.wq_b.weight, c.index_heads, positions, freqs, self.codec)
        w = indexer.head_weights(x, self.weights_proj.weight, c.index_dim)
        scores = indexer.scores(iq, cache.index_keys, w)
        picks = indexer.select(scores, positions, c.csa_rate, c.index_topk)
        record(index_scores=scores, topk=picks)
        return picks


class Attention(nn.Module):
    """Attention of one layer, of any kind."""

    def __init__(self, config: ModelConfig, kind: LayerKind, kv_codec: Codec | None, index_codec: Codec | None):
        super().__init__()
        c = self.config = config
        self.kind, self.kv_codec = kind, kv_codec
        self.wq_a, self.q_norm = Weight(c.q_lora_rank, c.hidden), Weight(c.q_lora_rank)
        self.wq_b = Weight(c.n_heads * c.head_dim, c.q_lora_rank)
        self.wkv, self.kv_norm = Weight(c.head_dim, c.hidden), Weight(c.head_dim)
        self.attn_sink = _parameter(c.n_heads)
        self.wo_a = Weight(c.o_groups * c.o_lora_rank, c.group_width)
        self.wo_b = Weight(c.hidden, c.o_groups * c.o_lora_rank)
        if kind is not LayerKind.SWA:
            self.compressor = CompressorWeights(c.hidden, c.head_dim, c.rate(kind), overlap=kind is LayerKind.CSA)
        if kind is LayerKind.CSA:
            self.indexer = Indexer(c, index_codec)

    def forward(self, x: torch.Tensor, start: int, cache: LayerCache, record: _Record) -> torch.Tensor:
        """Attend from positions ``start ..`` on and move the cache on.

        x ``[B, T, d]`` (normed) -> ``[B, T, d]``.
        """
        c = self.config
        positions = torch.arange(start, start + x.shape[1], device=x.device)
        freqs = rope.layer_freqs(c, self.kind).to(x.device)
        qr = qnorm_rope_kv.q_latent(x, self.wq_a.weight, self.q_norm.weight, c.rms_eps)
        q, kv = qnorm_rope_kv.qnorm_rope_kv(
            qnorm_rope_kv.split_heads(linear(qr, self.wq_b.weight), c.n_heads),
            linear(x, self.wkv.weight),
            self.kv_norm.weight,
            positions,
            freqs,
            c.rms_eps,
            self.kv_codec,
        )
        keys, key_positions, cache.window = cache_.append_window(cache.window, kv, start)
        window_mask = fmha.window_visible(positions, key_positions, c.window)
        entries_mask = self._entries(x, qr, start, positions, freqs, cache, record)
        o, lse = fmha.fmha(q, keys, window_mask, cache.entries, entries_mask, self.attn_sink, scale=c.head_dim**-0.5)
        y = output_proj.output_proj(o, positions, freqs, self.wo_a.weight, self.wo_b.weight, c.o_groups)
        record(q=q, kv=kv, attn_core=o, lse=lse, attn_out=y)
        return y

    def _entries(
        self,
        x: torch.Tensor,
        qr: torch.Tensor,
        start: int,
        positions: torch.Tensor,
        freqs: torch.Tensor,
        cache: LayerCache,
        record: _Record,
    ) -> torch.Tensor | None:
        """Add the entries these tokens complete; which entries each query sees, bool ``[.., T, n]``, None for SWA."""
        if self.kind is LayerKind.SWA:
            return None
        c = self.config
        entries, cache.state = compressor.compress(
            x,
            cache.state,
            start,
            self.compressor.tensors(),
            freqs,
            c.rms_eps,
            overlap=self.kind is LayerKind.CSA,
            codec=self.kv_codec,
        )
        cache.entries = torch.cat((cache.entries, entries), dim=1)
        record(compressed=cache.entries)
        size = cache.entries.shape[1]
        if self.kind is LayerKind.HCA:
            return fmha.visible_from_limit(compressor.visible_count(positions, c.hca_rate), size)
        picks = self.indexer(x, qr, start, positions, freqs, cache, record)
        return fmha.visible_from_indices(picks, size)


class Gate(nn.Module):
    """The router: by score (``bias``) or by token id (``tid2eid``)."""

    def __init__(self, config: ModelConfig, by_hash: bool):
        super().__init__()
        self.config, self.by_hash = config, by_hash
        self.weight = _parameter(config.n_experts, config.hidden)
        if by_hash:
            unset = torch.full((config.vocab, config.experts_per_token), -1, dtype=torch.int64)
            self.register_buffer("tid2eid", unset)
        else:
            self.bias = _parameter(config.n_experts)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x ``[B, T, d]``, tokens ``[B, T]`` -> experts and weights ``[B, T, k]``."""
        c = self.config
        if self.by_hash:
            return router.hash_route(x, self.weight, self.tid2eid, tokens, c.routed_scaling)
        return router.score_route(x, self.weight, self.bias, c.experts_per_token, c.routed_scaling)


class Expert(nn.Module):
    """w1 = gate, w3 = up, w2 = down."""

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.w1, self.w2, self.w3 = Weight(width, hidden), Weight(hidden, width), Weight(width, hidden)


class MoE(nn.Module):
    """Routed and shared experts of one layer."""

    def __init__(self, config: ModelConfig, by_hash: bool):
        super().__init__()
        c = self.config = config
        self.gate = Gate(c, by_hash)
        self.experts = nn.ModuleList(Expert(c.hidden, c.expert_width) for _ in range(c.n_experts))
        self.shared_experts = Expert(c.hidden, c.n_shared_experts * c.expert_width)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, record: _Record) -> torch.Tensor:
        """x ``[B, T, d]`` (normed) -> ``[B, T, d]``."""
        experts, weights = self.gate(x, tokens)
        routed = moe_gemm.moe_gemm(
            x.flatten(0, 1),
            experts.flatten(0, 1),
            weights.flatten(0, 1),
            *([getattr(e, name).weight for e in self.experts] for name in ("w1", "w2", "w3")),
            self.config.swiglu_limit,
        ).view_as(x)
        s = self.shared_experts
        y = routed + moe_gemm.expert(x, s.w1.weight, s.w2.weight, s.w3.weight, self.config.swiglu_limit)
        record(router_experts=experts, router_weights=weights, ffn_out=y)
        return y


class Layer(nn.Module):
    """One layer: attention and MoE, each inside an mHC site."""

    def __init__(
        self, config: ModelConfig, kind: LayerKind, by_hash: bool, kv_codec: Codec | None, index_codec: Codec | None
    ):
        super().__init__()
        c = self.config = config
        self.attn_norm, self.ffn_norm = Weight(c.hidden), Weight(c.hidden)
        self.attn = Attention(c, kind, kv_codec, index_codec)
        self.ffn = MoE(c, by_hash)
        for site in ("attn", "ffn"):
            self.register_parameter(f"hc_{site}_fn", _parameter(c.mix_width, c.hc_mult * c.hidden))
            self.register_parameter(f"hc_{site}_base", _parameter(c.mix_width))
            self.register_parameter(f"hc_{site}_scale", _parameter(3))

    def forward(
        self, streams: torch.Tensor, tokens: torch.Tensor, start: int, cache: LayerCache, record: _Record
    ) -> torch.Tensor:
        """Streams ``[B, T, n, d]`` -> ``[B, T, n, d]``."""
        eps = self.config.rms_eps
        x, post_w, comb = self._pre(streams, self.hc_attn_fn, self.hc_attn_scale, self.hc_attn_base)
        x = rmsnorm.rmsnorm(x, self.attn_norm.weight, eps)
        record(hc_attn_post=post_w, hc_attn_comb=comb, attn_in=x)
        streams = mhc.post(self.attn(x, start, cache, record), streams, post_w, comb)
        x, post_w, comb = self._pre(streams, self.hc_ffn_fn, self.hc_ffn_scale, self.hc_ffn_base)
        x = rmsnorm.rmsnorm(x, self.ffn_norm.weight, eps)
        record(hc_ffn_post=post_w, hc_ffn_comb=comb, ffn_in=x)
        streams = mhc.post(self.ffn(x, tokens, record), streams, post_w, comb)
        record(streams=streams)
        return streams

    def _pre(
        self, streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        c = self.config
        pre_w, post_w, comb = mhc.coefficients(
            streams, fn, scale, base, iters=c.sinkhorn_iters, hc_eps=c.hc_eps, rms_eps=c.rms_eps
        )
        return mhc.pre(streams, pre_w), post_w, comb


def _add_collapse(module: nn.Module, config: ModelConfig) -> None:
    module.hc_head_fn = _parameter(config.hc_mult, config.hc_mult * config.hidden)
    module.hc_head_base = _parameter(config.hc_mult)
    module.hc_head_scale = _parameter(1)


class MTPBlock(Layer):
    """The multi-token-prediction block. It is one SWA layer with an input and a head collapse of its own."""

    def __init__(self, config: ModelConfig, kv_codec: Codec | None):
        super().__init__(config, config.mtp_kind, False, kv_codec, None)
        d = config.hidden
        self.e_proj, self.h_proj = Weight(d, d), Weight(d, d)
        self.enorm, self.hnorm, self.norm = Weight(d), Weight(d), Weight(d)
        _add_collapse(self, config)


class ReferenceModel(nn.Module):
    """DeepSeek-V4 with its MTP block; see the module docstring for names and captures.

    Weights are NaN (and ``tid2eid`` -1) until ``load_state_dict`` or :meth:`randomize_`.

    Args:
        config: dimensions.
        dtype: torch.float32 or torch.float64, of weights and arithmetic.
        kv_codec: rounds KV vectors and compressed entries ``[..., head_dim]`` as their storage would; None: not at all.
        index_codec: rounds indexer queries and keys ``[..., index_dim]`` (Hadamard and FP4 in the released code).
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype = torch.float32,
        kv_codec: Codec | None = None,
        index_codec: Codec | None = None,
    ):
        super().__init__()
        if dtype not in (torch.float32, torch.float64):
            raise ArgumentError("dtype", dtype, "torch.float32 or torch.float64 (an oracle does not round)")
        self.config = config
        self.embed, self.head = Weight(config.vocab, config.hidden), Weight(config.vocab, config.hidden)
        self.norm = Weight(config.hidden)
        _add_collapse(self, config)
        self.layers = nn.ModuleList(
            Layer(config, kind, config.is_hash_layer(i), kv_codec, index_codec)
            for i, kind in enumerate(config.layer_kinds)
        )
        self.mtp = nn.ModuleList([MTPBlock(config, kv_codec)])
        self.to(dtype)

    def randomize_(self, seed: int) -> ReferenceModel:
        """Draw every parameter and table from ``seed``.

        The same for fp32 and fp64; logits get a std of about 1.
        """
        randomize.randomize_(self, self.config, seed)
        return self

    def new_cache(self, batch: int) -> Cache:
        """Empty cache for ``batch`` requests in this model's dtype."""
        weight = self.embed.weight
        return cache_.new_cache(self.config, batch, weight.dtype, weight.device)

    def forward(
        self,
        tokens: torch.Tensor,
        cache: Cache | None = None,
        capture: dict[str, torch.Tensor] | None = None,
        mtp: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits of the next token after each given token.

        Args:
            tokens: int64 ``[B, T]``, T >= 1, at positions ``cache.position ..``.
            cache: moved on by T tokens; None starts at position 0 and keeps nothing.
            capture: filled with intermediate tensors; see the module docstring.
            mtp: next tokens int64 ``[B, T]`` (token t + 1 at t): also runs the MTP block, whose logits go to
                ``capture["mtp_logits"]``.

        Returns:
            ``[B, T, vocab]``.

        Raises:
            ArgumentError: tokens of a wrong shape, dtype or id, a cache of another model or batch, too many positions.
        """
        self._check_tokens("tokens", tokens)
        cache = self.new_cache(tokens.shape[0]) if cache is None else cache
        self._check_cache(cache, tokens, cache.position)
        if mtp is not None:
            if capture is None:
                raise ArgumentError("capture", None, "a dict when mtp is given: it receives mtp_logits")
            self._check_next(mtp, tokens.shape, cache)
        # Work on a fork: whatever interrupts a forward, the caller's cache is still the one before it.
        step = cache.fork()
        streams = embedding.init_streams(embedding.embedding(tokens, self.embed.weight), self.config.hc_mult)
        for i, (layer, layer_cache) in enumerate(zip(self.layers, step.layers, strict=True)):
            streams = layer(streams, tokens, step.position, layer_cache, _Record(capture, f"layers.{i}"))
        step.position += tokens.shape[1]
        h = self._collapse(self, streams)
        hidden = rmsnorm.rmsnorm(h, self.norm.weight, self.config.rms_eps)
        if capture is not None:
            capture.update(collapsed=h, hidden=hidden)
        if mtp is not None:
            capture["mtp_logits"] = self.mtp_logits(streams, mtp, step, capture)
        logits = lm_head.lm_head(hidden, self.head.weight)
        cache.adopt(step)
        return logits

    def mtp_logits(
        self,
        streams: torch.Tensor,
        next_tokens: torch.Tensor,
        cache: Cache | None = None,
        capture: dict[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Logits of token t + 2 from the streams at t and token t + 1.

        Args:
            streams: ``[B, T, n, d]`` after the last layer, before the collapse (``capture["layers.<last>.streams"]``);
                for a second draft step, ``capture["mtp.0.streams"]`` of the first.
            next_tokens: int64 ``[B, T]``, the token after each position.
            cache: its MTP side is moved on by T; None starts at position 0.
            capture: filled under ``mtp.0``.

        Returns:
            ``[B, T, vocab]``.
        """
        c, block = self.config, self.mtp[0]
        self._check_tokens("next_tokens", next_tokens)
        if streams.shape != (*next_tokens.shape, c.hc_mult, c.hidden):
            allowed = f"[B, T, n, d] = {(*next_tokens.shape, c.hc_mult, c.hidden)}"
            raise ArgumentError("streams.shape", tuple(streams.shape), allowed)
        cache = self.new_cache(next_tokens.shape[0]) if cache is None else cache
        self._check_cache(cache, next_tokens, cache.mtp_position)
        step, record = cache.fork(), _Record(capture, "mtp.0")
        x = mtp_.combine(
            streams,
            embedding.embedding(next_tokens, self.embed.weight),
            block.hnorm.weight,
            block.enorm.weight,
            block.h_proj.weight,
            block.e_proj.weight,
            c.rms_eps,
        )
        x = block(x, next_tokens, step.mtp_position, step.mtp, record)
        step.mtp_position += next_tokens.shape[1]
        hidden = rmsnorm.rmsnorm(self._collapse(block, x), block.norm.weight, c.rms_eps)
        record(hidden=hidden)
        logits = lm_head.lm_head(hidden, self.head.weight)
        cache.adopt(step)
        return logits

    @torch.no_grad()
    def generate(
        self,
        tokens: torch.Tensor,
        max_new: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Continue prompts ``[B, T]`` by ``max_new`` tokens: int64 ``[B, T + max_new]``.

        Greedy at temperature 0, else sampled (see :mod:`dsv4lib.reference.sampler`); no token ends a row early.
        """
        if max_new < 0:
            raise ArgumentError("max_new", max_new, "an integer >= 0")
        self._check_tokens("tokens", tokens)
        cache = self.new_cache(tokens.shape[0])
        fed = tokens
        for _ in range(max_new):
            logits = self(fed, cache)[:, -1]
            fed = sampler.sample(logits, temperature, top_p, generator)[:, None]
            tokens = torch.cat((tokens, fed), dim=1)
        return tokens

    def _collapse(self, owner: nn.Module, streams: torch.Tensor) -> torch.Tensor:
        c = self.config
        return mhc.head_collapse(
            streams, owner.hc_head_fn, owner.hc_head_scale, owner.hc_head_base, hc_eps=c.hc_eps, rms_eps=c.rms_eps
        )

    def _check_tokens(self, name: str, tokens: torch.Tensor) -> None:
        if tokens.dim() != 2 or tokens.numel() == 0:
            raise ArgumentError(f"{name}.shape", tuple(tokens.shape), "[B, T] with B, T >= 1")
        if tokens.dtype != torch.int64:
            raise ArgumentError(f"{name}.dtype", tokens.dtype, "torch.int64")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.config.vocab:
            raise ArgumentError(name, low if low < 0 else high, f"ids 0..{self.config.vocab - 1}")
        if torch.isnan(self.embed.weight.detach().flatten()[0]):
            raise ArgumentError("embed.weight", "NaN", "weights set by load_state_dict or randomize_ before use")

    def _check_cache(self, cache: Cache, tokens: torch.Tensor, position: int) -> None:
        if cache.config != self.config or cache.dtype != self.embed.weight.dtype:
            raise ArgumentError("cache", cache.dtype, "a cache made by this model's new_cache")
        if cache.batch != tokens.shape[0]:
            raise ArgumentError("cache.batch", cache.batch, f"the batch of the tokens, {tokens.shape[0]}")
        if position + tokens.shape[1] > self.config.max_positions:
            allowed = f"at most max_positions={self.config.max_positions}"
            raise ArgumentError("positions", position + tokens.shape[1], allowed)

    def _check_next(self, mtp: torch.Tensor, shape: torch.Size, cache: Cache) -> None:
        self._check_tokens("mtp", mtp)
        if mtp.shape != shape:
            raise ArgumentError("mtp.shape", tuple(mtp.shape), f"the shape of tokens, {tuple(shape)}")
        if cache.mtp_position != cache.position:
            allowed = f"cache.position={cache.position}: the MTP block must see every token the backbone saw"
            raise ArgumentError("cache.mtp_position", cache.mtp_position, allowed)
