"""Known faults in DSV4 implementations, injected one at a time: does the end-to-end check notice each of them?

Every trap replaces one function of the reference package by a wrong one that somebody has written or will write. The
judge is transformers' model on the same weights: logits of standard deviation 1 must agree to ``LOGITS_BOUND``, and a
injected fault must exceed three times that. Run with ``-s`` to see how loud each fault is: with bf16 rounding in the
way, the quiet ones would pass unseen. What is too quiet even for fp32 is in ``test_operator_traps.py``.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from torch.nn.functional import pad, silu

from dsv4lib.config import LayerKind
from dsv4lib.formats import rotary
from dsv4lib.reference import (
    compressor,
    fmha,
    indexer,
    mhc,
    moe_gemm,
    output_proj,
    qnorm_rope_kv,
    rmsnorm,
    rope,
    router,
)
from dsv4lib.reference import transformers_parity as tp

VARIANT = "tiny_yarn"
CONFIG = tp.VARIANTS[VARIANT].config
MARGIN = 3  # an injected fault must exceed the bound by this factor

Patch = tuple[ModuleType, str, Callable]


@dataclass(frozen=True)
class Trap:
    """One fault: functions to replace (each wrong one gets the right one as first argument), and where to look."""

    name: str
    patches: tuple[Patch, ...]
    mode: str

    def inject(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module, attribute, wrong in self.patches:
            monkeypatch.setattr(module, attribute, functools.partial(wrong, getattr(module, attribute)))


TRAPS: list[Trap] = []


def trap(name: str, module: ModuleType, *attributes: str, mode: str = "one-shot") -> Callable[[Callable], Callable]:
    """Register the decorated function as a wrong ``module.attribute``."""

    def register(wrong: Callable) -> Callable:
        TRAPS.append(Trap(name, tuple((module, attribute, wrong) for attribute in attributes), mode))
        return wrong

    return register


# ---------------------------------------------------------------------------------------------------------------------
# mHC


@trap("Sinkhorn: 5 iterations instead of 20", mhc, "sinkhorn")
def five_iterations(original, logits, iters, eps):
    return original(logits, 5, eps)


@trap("final collapse = mean of streams", mhc, "head_collapse")
def mean_collapse(original, streams, *args, **kwargs):
    return streams.mean(-2)


@trap("comb not transposed", mhc, "post")
def comb_not_transposed(original, y, streams, post_w, comb):
    return original(y, streams, post_w, comb.mT)


@trap("post without the factor 2", mhc, "post_weights")
def post_without_two(original, logits):
    return torch.sigmoid(logits)


@trap("24-vector read as pre, comb, post", mhc, "split")
def pre_comb_post(original, values, n):
    pre, comb, post = values.split((n, n * n, n), dim=-1)
    return pre, post, comb.unflatten(-1, (n, n))


# ---------------------------------------------------------------------------------------------------------------------
# Rope


@trap("no YaRN on CSA and HCA", rotary, "yarn_freqs")
def no_yarn(original, freqs, theta, yarn):
    return freqs


@trap("theta 10000 everywhere", rotary, "base_freqs")
def theta_everywhere(original, dim, theta):
    return original(dim, CONFIG.rope_theta)


@trap("YaRN and 160000 also on SWA-only layers", rope, "layer_freqs")
def compress_rope_everywhere(original, config, kind):
    return original(config, LayerKind.CSA)


@trap("no inverse rope", rope, "apply_inverse")
def no_inverse(original, x, positions, freqs):
    return x


@trap("inverse rope with the plain 10000 frequencies", rope, "apply_inverse")
def inverse_with_plain(original, x, positions, freqs):
    return original(x, positions, rope.layer_freqs(CONFIG, LayerKind.SWA))


@trap("half-split rope", rope, "rotate")
def half_split(original, x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


@trap("rope on the first dims", rope, "apply", "apply_inverse")
def first_dims(original, x, positions, freqs):
    width = 2 * freqs.shape[0]
    return original(x.roll(-width, -1), positions, freqs).roll(width, -1)


@trap("YaRN amplitude on cos and sin", rope, "cos_sin")
def yarn_amplitude(original, positions, freqs, dtype):
    plain = torch.equal(freqs, rope.layer_freqs(CONFIG, LayerKind.SWA))
    amplitude = 1.0 if plain else 0.1 * math.log(CONFIG.yarn.factor) + 1
    return tuple(amplitude * part for part in original(positions, freqs, dtype))


@trap("bf16 cos and sin", rope, "cos_sin")
def bf16_tables(original, positions, freqs, dtype):
    return tuple(part.bfloat16().to(dtype) for part in original(positions, freqs, dtype))


@trap("compressed entry roped at its index", compressor, "entry_positions")
def entry_at_index(original, index, rate):
    return index


@trap("compressed entry roped at its last token", compressor, "entry_positions")
def entry_at_last(original, index, rate):
    return index * rate + rate - 1


# ---------------------------------------------------------------------------------------------------------------------
# Queries, keys, output path


@trap("no per-head q norm", qnorm_rope_kv, "q_heads")
def no_q_norm(original, q, positions, freqs, eps):
    return rope.apply(q, positions[:, None], freqs)


@trap("kv normed after rope", qnorm_rope_kv, "kv_vector")
def kv_norm_last(original, kv, kv_norm, positions, freqs, eps, kv_codec=None):
    return rmsnorm.rmsnorm(rope.apply(kv, positions, freqs), kv_norm, eps)


@trap("output groups of strided instead of consecutive heads", output_proj, "group_heads")
def strided_groups(original, o, groups):
    return original(o.unflatten(-2, (-1, groups)).transpose(-3, -2).flatten(-3, -2), groups)


# ---------------------------------------------------------------------------------------------------------------------
# Compressor


@trap("CSA overlap forgotten", compressor, "overlap_slots")
def no_overlap(original, previous, current):
    return current[..., current.shape[-1] // 2 :]


@trap("Ca and Cb swapped", compressor, "overlap_slots")
def halves_swapped(original, previous, current):
    half = current.shape[-1] // 2
    return torch.cat((previous[..., half:], current[..., :half]), dim=-2)


@trap("one softmax per token instead of per channel", compressor, "pool")
def scalar_softmax(original, k, z):
    return original(k, z.mean(-1, keepdim=True))


@trap("ape forgotten", compressor, "project")
def no_ape(original, x, positions, weights):
    return original(x, positions, weights._replace(ape=torch.zeros_like(weights.ape)))


@trap("ape by place in the call", compressor, "project", mode="chunked")
def ape_by_call(original, x, positions, weights):
    return original(x, positions - positions[0], weights)


def _ape_not_stored() -> tuple[Patch, ...]:
    bias = {}

    def project(original, x, positions, weights):
        bias["z"] = weights.ape[positions % weights.ape.shape[0]]
        return original(x, positions, weights)

    def update(original, state, k, z, start):
        return original(state, k, z - bias["z"], start)

    return (compressor, "project", project), (compressor, "update", update)


TRAPS.append(Trap("state stored without ape", _ape_not_stored(), "chunked"))


@trap("previous window's Ca lost between calls", compressor, "history", mode="chunked")
def overlap_lost(original, state, start, rate, overlap):
    k, z = original(state, start, rate, overlap)
    if overlap:
        k, z = k.clone(), z.clone()
        k[:, :rate], z[:, :rate] = 0, float("-inf")
    return k, z


@trap("open window's tail lost between calls", compressor, "history", mode="chunked")
def tail_lost(original, state, start, rate, overlap):
    k, z = (rows.clone() for rows in original(state, start, rate, overlap))
    first = rate if overlap else 0
    k[:, first:], z[:, first:] = 0, -1e9
    return k, z


@trap("compressor state not updated while decoding", compressor, "update", mode="prefill+decode")
def no_decode_update(original, state, k, z, start):
    return state if k.shape[1] == 1 else original(state, k, z, start)


# ---------------------------------------------------------------------------------------------------------------------
# Visibility, indexer, core attention


@trap("HCA visibility s < floor(t / m') with 0-based t", compressor, "visible_count")
def hca_one_late(original, positions, rate):
    return original(positions - int(rate == CONFIG.hca_rate), rate)


@trap("CSA visibility s < floor(t / m) with 0-based t", compressor, "visible_count")
def csa_one_late(original, positions, rate):
    return original(positions - int(rate == CONFIG.csa_rate), rate)


@trap("entry closed by t hidden from t, in decode only", compressor, "visible_count", mode="prefill+decode")
def decode_one_late(original, positions, rate):
    return original(positions - int(positions.numel() == 1), rate)


@trap("padding -1 clamped to entry 0", fmha, "visible_from_indices")
def padding_is_entry_zero(original, indices, size):
    return original(indices.clamp_min(0), size) if size else original(indices, size)


@trap("indexer without ReLU", indexer, "scores")
def no_relu(original, iq, ik, w):
    return torch.einsum("bthd,bsd,bth->bts", iq, ik, w)


@trap("indexer: ReLU after the sum over heads", indexer, "scores")
def relu_last(original, iq, ik, w):
    return no_relu(original, iq, ik, w).relu()


@trap("indexer: q normed per head", indexer, "queries")
def index_q_norm(original, qr, wq_b, n_heads, positions, freqs, codec=None):
    iq = qnorm_rope_kv.split_heads(qr @ wq_b.mT, n_heads)
    return rope.apply(rmsnorm.rmsnorm(iq, None, CONFIG.rms_eps), positions[:, None], freqs)


@trap("indexer: Hadamard on queries only", indexer, "queries")
def hadamard_on_q(original, *args):
    return hadamard(original(*args))


@trap("window one short", fmha, "window_visible")
def window_short(original, query_positions, key_positions, window):
    return original(query_positions, key_positions, window - 1)


@trap("sink ignored", fmha, "sink_softmax")
def no_sink(original, s, sink):
    return original(s, None)


@trap("sink as a bias on the window's logits", fmha, "fmha")
def sink_as_bias(original, q, window_kv, window_mask, entries, entries_mask, sink, scale):
    # A key dimension of value 1 for window keys and 0 for entries carries the bias; the output drops it again.
    biased = torch.cat((q, (sink / scale)[:, None].expand(*q.shape[:-1], 1)), dim=-1)
    window_kv = pad(window_kv, (0, 1), value=1.0)
    entries = None if entries is None else pad(entries, (0, 1))
    o, lse = original(biased, window_kv, window_mask, entries, entries_mask, None, scale)
    return o[..., :-1], lse


@trap("YaRN mscale on the softmax scale", fmha, "fmha")
def mscale(original, q, window_kv, window_mask, entries, entries_mask, sink, scale):
    factor = 1.0 if entries is None else (0.1 * math.log(CONFIG.yarn.factor) + 1) ** 2
    return original(q, window_kv, window_mask, entries, entries_mask, sink, scale * factor)


# ---------------------------------------------------------------------------------------------------------------------
# MoE


@trap("router bias leaks into the weights", router, "score_route")
def bias_leaks(original, x, weight, bias, k, routed_scaling):
    a = router.affinity(x, weight) + bias
    experts = router.select_by_score(a, torch.zeros_like(bias), k)
    return experts, router.expert_weights(a, experts, routed_scaling)


@trap("hash layers with uniform weights", router, "hash_route")
def uniform_hash(original, *args):
    experts, weights = original(*args)
    return experts, weights.mean(-1, keepdim=True).expand_as(weights)


@trap("routed_scaling_factor forgotten", router, "expert_weights")
def no_scaling(original, a, experts, routed_scaling):
    return original(a, experts, 1.0)


@trap("clamp after silu", moe_gemm, "swiglu")
def clamp_last(original, gate, up, limit):
    return silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


@trap("gate clamped on both sides", moe_gemm, "swiglu")
def gate_both_sides(original, gate, up, limit):
    return original(gate.clamp(min=-limit), up, limit)


@trap("up clamped only from above", moe_gemm, "swiglu")
def up_one_side(original, gate, up, limit):
    return silu(gate.clamp(max=limit)) * up.clamp(max=limit)


@trap("shared expert not clamped", moe_gemm, "expert")
def shared_unclamped(original, x, w1, w2, w3, limit, routing_weight=None):
    return original(x, w1, w2, w3, float("inf") if routing_weight is None else limit, routing_weight)


# ---------------------------------------------------------------------------------------------------------------------
# Changes that are no faults in exact arithmetic: they must stay silent, or the check would cry wolf

HARMLESS: list[Trap] = []


def _hadamard_on_both() -> tuple[Patch, ...]:
    def queries(original, *args):
        return hadamard(original(*args))

    def finish(original, pooled, *args):
        entries = original(pooled, *args)
        return hadamard(entries) if pooled.shape[-1] == CONFIG.index_dim else entries

    return (indexer, "queries", queries), (compressor, "finish", finish)


def _weight_after_w2(original, x, w1, w2, w3, limit, routing_weight=None):
    y = original(x, w1, w2, w3, limit)
    return y if routing_weight is None else y * routing_weight.unsqueeze(-1)


HARMLESS.append(Trap("indexer: Hadamard on queries and keys", _hadamard_on_both(), "prefill+decode"))
HARMLESS.append(Trap("routing weight after w2", ((moe_gemm, "expert", _weight_after_w2),), "one-shot"))


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Orthonormal Sylvester Hadamard transform of the last dim, a power of two."""
    n = x.shape[-1]
    index = torch.arange(n)
    bits = (index[:, None] & index[None, :]).unsqueeze(-1).bitwise_right_shift(torch.arange(n.bit_length())) & 1
    return x @ ((-1.0) ** bits.sum(-1)).to(x.dtype) * n**-0.5


# ---------------------------------------------------------------------------------------------------------------------
# The judge


@functools.cache
def peer() -> tp.Peer:
    return tp.build_peer(VARIANT)


@functools.cache
@torch.no_grad()
def truth() -> torch.Tensor:
    """transformers' logits without any cache [B, T, vocab]."""
    return peer().model(input_ids=peer().tokens, use_cache=False).logits


@dataclass(frozen=True)
class Loudness:
    """How far logits are from the truth."""

    max_abs: float
    rel_l2: float
    min_cos: float
    argmax_agree: float


def loudness(logits: torch.Tensor) -> Loudness:
    want = truth()
    return Loudness(
        (logits - want).abs().max().item(),
        ((logits - want).norm() / want.norm()).item(),
        torch.cosine_similarity(logits, want, dim=-1).min().item(),
        (logits.argmax(-1) == want.argmax(-1)).float().mean().item(),
    )


@functools.cache
def model():
    return tp.reference_of(peer())


def run(mode: str) -> Loudness:
    """Our model as it is now, possibly with a fault in it."""
    return loudness(tp.reference_trace(model(), peer().tokens, tp.call_sizes(VARIANT, mode))["logits"])


@pytest.fixture(scope="module")
def table():
    rows: list[tuple[str, str, Loudness]] = []
    yield rows
    print(f"\n{'injected fault':53} {'mode':14} {'max abs':>8} {'rel-L2':>8} {'min cos':>8} argmax")
    for name, mode, seen in sorted(rows, key=lambda row: row[2].rel_l2):
        figures = f"{seen.max_abs:8.1e} {seen.rel_l2:8.1e} {seen.min_cos:8.4f} {seen.argmax_agree:6.2f}"
        print(f"{name:53} {mode:14} {figures}")


@pytest.mark.parametrize("mode", tp.MODES)
def test_without_a_fault_nothing_is_reported(mode, table):
    seen = run(mode)
    table.append(("(none)", mode, seen))
    assert seen.max_abs <= tp.LOGITS_BOUND


@pytest.mark.parametrize("fault", TRAPS, ids=lambda fault: fault.name)
def test_fault_is_noticed(fault, monkeypatch, table):
    fault.inject(monkeypatch)
    seen = run(fault.mode)
    table.append((fault.name, fault.mode, seen))
    assert seen.max_abs > MARGIN * tp.LOGITS_BOUND


@pytest.mark.parametrize("change", HARMLESS, ids=lambda change: change.name)
def test_harmless_change_stays_silent(change, monkeypatch, table):
    change.inject(monkeypatch)
    seen = run(change.mode)
    table.append((f"(harmless) {change.name}", change.mode, seen))
    assert seen.max_abs <= tp.LOGITS_BOUND


# Faults with a state that only several calls have: where each of them hides.
STATE_TRAPS = [t for t in TRAPS if t.mode == "chunked"]


@pytest.mark.parametrize("fault", STATE_TRAPS, ids=lambda fault: fault.name)
def test_state_faults_hide_from_a_one_shot_test(fault, monkeypatch):
    """Why parity is measured in chunks too: one call never reads the state."""
    fault.inject(monkeypatch)
    assert run("one-shot").max_abs <= tp.LOGITS_BOUND


@pytest.mark.one_in(3)
@pytest.mark.parametrize("forgotten", [None, "window", "state", "entries", "index_state", "index_keys"])
def test_rollback_must_restore_every_part_of_the_cache(forgotten, table):
    """Speculative decoding: five drafted tokens are rejected. Whatever is not rolled back spoils the next tokens."""
    tokens, keep = peer().tokens, 19  # 19 + 5 closes a CSA and an HCA window during the draft
    cache = model().new_cache(tokens.shape[0])
    with torch.no_grad():
        before = model()(tokens[:, :keep], cache)
        drafted = cache.fork()
        model()((tokens[:, keep : keep + 5] + 1) % CONFIG.vocab, drafted)
        if forgotten is not None:
            for layer, stale in zip(cache.layers, drafted.layers, strict=True):
                setattr(layer, forgotten, getattr(stale, forgotten))
        after = [model()(token, cache) for token in tokens[:, keep:].split(1, dim=1)]
    seen = loudness(torch.cat([before, *after], dim=1))
    table.append((f"rollback forgets {forgotten}" if forgotten else "(rollback of everything)", "draft", seen))
    if forgotten is None:
        assert seen.max_abs <= tp.LOGITS_BOUND
    else:
        assert seen.max_abs > MARGIN * tp.LOGITS_BOUND
