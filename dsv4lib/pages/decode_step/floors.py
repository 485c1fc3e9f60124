"""Derive from a model's sizes what each line of a decode step must move, for any batch and any context.

The bench counts the same bytes from the operands of its rows (`bench.decode_step.lines`); a gate of the page compares
the two. T requests of L tokens each add one token, and a line moves

    weights     read once a step, however many requests there are; of the routed experts those that routing reaches
    cache       entries, keys and states of every request: T times, longer with L where all entries are read
    tokens      activations in and out: T times

A floor is these bytes at the memory's bandwidth, or the MMAs at the data sheet's peak where that takes longer.
"""

from __future__ import annotations

from typing import NamedTuple

from dsv4lib.bench.decode_step.lines import ATTENTION, BF16, FP8, GEMMS, HEAD, INDEXER, MHC, MOE, SMALL
from dsv4lib.config import LayerKind, ModelConfig, index_key_bytes, kv_row_bytes

BLOCK = 128  # FP8: a scale for 128 x 128 weights, for 128 numbers of an activation
MXFP4 = 0.5 + 1 / 32  # bytes of a weight: E2M1, and a scale for 32


class Need(NamedTuple):
    """What one call of a line needs.

    Attributes:
        group, name: class and line. count: lines a step.
        weights, cache, tokens: bytes that must cross the memory. flops: of its MMAs; peak: FLOP/s that these can reach.
    """

    group: str
    name: str
    count: int
    weights: float
    cache: float
    tokens: float
    flops: float = 0
    peak: float = BF16

    @property
    def bytes(self) -> int:
        """All bytes of one call."""
        return round(self.weights + self.cache + self.tokens)

    def floor_us(self, bandwidth: float) -> float:
        """Return the least time of one call in us; ``bandwidth`` in bytes/s."""
        return max(self.bytes / bandwidth, self.flops / self.peak) * 1e6


def reached(experts: int, per_token: int, tokens: int) -> float:
    """Count the experts that ``tokens`` tokens reach if each takes any ``per_token`` of them alike."""
    return experts * (1 - (1 - per_token / experts) ** tokens)


def needs(config: ModelConfig, batch: int, context: int, fault: str = "none") -> list[Need]:
    """List what every line of a step needs.

    Args:
        config: of the model. batch: requests, a token each. context: tokens that each of them has.
        fault: "every_expert": as if a step read all experts.
    """
    moe = _routed(config, batch, fault == "every_expert")
    return [moe, *_gemms(config, batch), *_attention(config, batch, context), *_small(config, batch)]


def _routed(c: ModelConfig, t: int, every: bool) -> Need:
    expert = 3 * c.hidden * c.expert_width  # gate, up and down
    read = c.n_experts if every else reached(c.n_experts, c.experts_per_token, t)
    flops = 2 * t * c.experts_per_token * expert
    return Need(MOE, "routed MoE MXFP4", c.n_layers, read * expert * MXFP4, 0, 0, flops, FP8)


def _fp8(name: str, count: int, t: int, n: int, k: int, groups: int = 1) -> Need:
    """Multiply FP8 activations [T, K] by FP8 weights [N, K]; bf16 out."""
    weights = groups * (n * k + -(-n // BLOCK) * (k // BLOCK))
    tokens = groups * t * (k + k // BLOCK + 2 * n)
    return Need(GEMMS, f"{name} fp8", count, weights, 0, tokens, 2 * groups * t * n * k, FP8)


def _bf16(group: str, name: str, count: int, t: int, n: int, k: int) -> Need:
    return Need(group, name, count, 2 * n * k, 0, 2 * t * (k + n), 2 * t * n * k)


def _gemms(c: ModelConfig, t: int) -> list[Need]:
    """Products of few tokens: weights, whatever the batch."""
    layers, csa, hca = c.n_layers, len(c.layers_of(LayerKind.CSA)), len(c.layers_of(LayerKind.HCA))
    d, width, index = c.hidden, c.expert_width, c.index_heads * c.index_dim
    expert = 3 * d * width
    shared = t * (d + width) // BLOCK + t * (d + width + 2 * (2 * width + d))  # scales; codes in, bf16 out of both
    return [
        _fp8("wq_a+wkv", layers, t, c.q_lora_rank + c.head_dim, d),
        _fp8("wq_b", layers, t, c.n_heads * c.head_dim, c.q_lora_rank),
        _bf16(GEMMS, "CSA compressor GEMM", csa, t, 4 * c.head_dim, d),  # keys and gates of two windows
        _bf16(GEMMS, "HCA compressor GEMM", hca, t, 2 * c.head_dim, d),
        _fp8("indexer wq_b", csa, t, index, c.q_lora_rank),
        _bf16(GEMMS, "indexer compressor+weights GEMM", csa, t, 4 * c.index_dim + c.index_heads, d),
        _fp8("wo_a", layers, t, c.o_lora_rank, c.group_width, c.o_groups),
        _fp8("wo_b", layers, t, d, c.o_groups * c.o_lora_rank),
        Need(GEMMS, "shared expert fp8", layers, expert + expert // BLOCK**2, 0, shared, 2 * t * expert, FP8),
        _bf16(HEAD, "LM head", 1, t, c.vocab, d),
    ]


def keys_of(c: ModelConfig, kind: LayerKind, context: int) -> int:
    """Count the keys that a token attends to: the window, and entries (CSA: those that the indexer picks)."""
    if kind is LayerKind.SWA:
        return c.window
    entries = context // c.rate(kind)
    return c.window + (min(entries, c.index_topk) if kind is LayerKind.CSA else entries)


def _attention(c: ModelConfig, t: int, context: int) -> list[Need]:
    found = []
    for kind in LayerKind:
        keys, numbers = keys_of(c, kind, context), c.n_heads * c.head_dim
        cache, tokens = t * keys * kv_row_bytes(c), t * 4 * numbers  # Q in, O out
        count = len(c.layers_of(kind))
        found.append(Need(ATTENTION, f"attention {kind}", count, 0, cache, tokens, 4 * t * keys * numbers))
    length, csa = context // c.csa_rate, len(c.layers_of(LayerKind.CSA))
    flops = 2 * t * c.index_heads * length * c.index_dim
    scores = 4 * t * length
    keys = t * length * index_key_bytes(c)
    return [
        *found,
        Need(INDEXER, "indexer logits fp8", csa, 0, keys, scores, flops, FP8),
        Need(INDEXER, "top-k", csa, 0, 0, scores + 4 * t * (1 + c.index_topk)),
    ]


def _small(c: ModelConfig, t: int) -> list[Need]:
    """Everything that only moves activations, states and a few weights."""
    layers, csa, hca = c.n_layers, len(c.layers_of(LayerKind.CSA)), len(c.layers_of(LayerKind.HCA))
    d, n, dim, rope = c.hidden, c.hc_mult, c.head_dim, 4 * c.rope_dim  # cosines and sines of a position, fp32
    heads = c.n_heads * dim

    def small(name: str, count: int, tokens: float, cache: float = 0, weights: float = 0) -> Need:
        return Need(SMALL, name, count, weights, t * cache, t * tokens)

    def overlapping(size: int, entry: int) -> float:
        """Two windows of keys and gates pooled, a row of both added, an entry written; fp32."""
        return 2 * c.csa_rate * 2 * size * 4 + 2 * 2 * size * 4 + entry

    streams = t * ((2 * n + 2) * d * 2 + 2 * (n + n * n) * 4)  # streams in and out, f, y; post and comb in and out
    mixing = c.mix_width * n * d * 4 + d * 4
    return [
        Need(MHC, "mHC post, pre, norm", 2 * layers, mixing, 0, streams),
        small("activation cast to FP8", 3 * layers, 3 * d + d // BLOCK),
        small("q_norm, kv_norm", layers, 4 * (c.q_lora_rank + dim)),
        small("qnorm_rope_kv", layers, 4 * heads + 2 * dim + rope + 12, kv_row_bytes(c)),  # position and slot
        small("CSA compressor", csa, 0, overlapping(dim, kv_row_bytes(c))),
        small("HCA compressor", hca, 0, (2 + 3) * dim * 4 + kv_row_bytes(c)),  # key, gate; maximum, sum, weighted sum
        small("indexer_q", csa, c.index_heads * (3 * c.index_dim + 6) + rope + 8),
        small("indexer key compressor", csa, 0, overlapping(c.index_dim, index_key_bytes(c, "fp4"))),
        small("inv_rope_quant", layers, 3 * heads + heads // BLOCK + rope + 8),
        small("router", layers, 2 * d + 8 * c.experts_per_token, weights=2 * d * c.n_experts + 4 * c.n_experts),
    ]
