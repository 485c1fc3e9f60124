"""The whole model: names, chunking, causality, what each layer kind attends to, gradients, refusals."""

import math
from dataclasses import replace

import pytest
import torch

from dsv4lib.config import TINY, LayerKind, schedule
from dsv4lib.errors import ArgumentError
from dsv4lib.reference import compressor, mhc, output_proj, rmsnorm, rope
from dsv4lib.reference.model import ReferenceModel

LENGTH = 53
# Activations of unit scale never reach the released limit of 10, and the clamp would go untested.
CONFIG = replace(TINY, swiglu_limit=0.5)
REAL_RATES = replace(CONFIG, window=128, hca_rate=128, index_topk=40, compress_ratios=schedule(6, (0, 0), 4, 128))


def tokens_of(batch=2, length=LENGTH, seed=0):
    return torch.randint(0, TINY.vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def run(model, tokens, chunks):
    """Logits of tokens fed in chunks through one cache."""
    cache, pieces, start = model.new_cache(tokens.shape[0]), [], 0
    for size in chunks:
        pieces.append(model(tokens[:, start : start + size], cache))
        start += size
    assert start == tokens.shape[1] == cache.position
    return torch.cat(pieces, dim=1)


@pytest.fixture(scope="module")
def model():
    return ReferenceModel(CONFIG, torch.float64).randomize_(1).requires_grad_(False)


@pytest.fixture(scope="module")
def captured(model):
    """One forward of 53 tokens with everything captured."""
    capture = {}
    capture["logits"] = model(tokens_of(), capture=capture)
    return capture


def expected_names(config):
    """Checkpoint names, written out by kind of layer."""
    attention = ["wq_a.weight", "q_norm.weight", "wq_b.weight", "wkv.weight", "kv_norm.weight", "attn_sink"]
    attention += ["wo_a.weight", "wo_b.weight"]
    compressor = ["wkv.weight", "wgate.weight", "ape", "norm.weight"]
    hc = [f"hc_{site}_{part}" for site in ("attn", "ffn") for part in ("fn", "base", "scale")]
    collapse = ["hc_head_fn", "hc_head_base", "hc_head_scale"]
    expert = ["w1.weight", "w2.weight", "w3.weight"]
    names = {"embed.weight", "head.weight", "norm.weight", *collapse}
    names |= {f"mtp.0.{n}.weight" for n in ("e_proj", "h_proj", "enorm", "hnorm", "norm")}
    names |= {f"mtp.0.{n}" for n in collapse}
    blocks = [(f"layers.{i}", kind, i < 3) for i, kind in enumerate(config.layer_kinds)]
    for prefix, kind, by_hash in [*blocks, ("mtp.0", LayerKind.SWA, False)]:
        names |= {f"{prefix}.{n}" for n in (*hc, "attn_norm.weight", "ffn_norm.weight")}
        names |= {f"{prefix}.attn.{n}" for n in attention}
        if kind != LayerKind.SWA:
            names |= {f"{prefix}.attn.compressor.{n}" for n in compressor}
        if kind == LayerKind.CSA:
            names |= {f"{prefix}.attn.indexer.{n}.weight" for n in ("wq_b", "weights_proj")}
            names |= {f"{prefix}.attn.indexer.compressor.{n}" for n in compressor}
        names |= {f"{prefix}.ffn.gate.weight", f"{prefix}.ffn.gate.{'tid2eid' if by_hash else 'bias'}"}
        experts = [f"experts.{e}" for e in range(config.n_experts)] + ["shared_experts"]
        names |= {f"{prefix}.ffn.{e}.{w}" for e in experts for w in expert}
    return names


def test_names_are_those_of_the_checkpoint(model):
    assert set(model.state_dict()) == expected_names(CONFIG)


def test_shapes_follow_the_checkpoint(model):
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    assert shapes["layers.2.attn.compressor.wkv.weight"] == (64, 64)  # CSA: twice head_dim
    assert shapes["layers.3.attn.compressor.wkv.weight"] == (32, 64)
    assert shapes["layers.2.attn.compressor.ape"] == (4, 64)
    assert shapes["layers.3.attn.compressor.ape"] == (8, 32)
    assert shapes["layers.2.attn.indexer.compressor.wgate.weight"] == (32, 64)
    assert shapes["layers.0.attn.wo_a.weight"] == (32, 64)
    assert shapes["layers.0.hc_attn_fn"] == (24, 256)
    assert shapes["hc_head_fn"] == (4, 256)
    assert shapes["layers.0.ffn.gate.tid2eid"] == (320, 3)


def test_random_weights_leave_nothing_at_its_default(model):
    other = ReferenceModel(CONFIG, torch.float64).randomize_(2).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.isfinite(tensor).all() and not torch.equal(tensor, other[name]), name
    table = model.layers[0].ffn.gate.tid2eid
    assert all(len(set(row)) == 3 and 0 <= min(row) and max(row) < 8 for row in table.tolist())
    again = ReferenceModel(CONFIG, torch.float64).randomize_(1).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_logits_have_unit_scale(seed):
    with torch.no_grad():
        assert 0.8 < ReferenceModel(CONFIG).randomize_(seed)(tokens_of()).std() < 1.25


CHUNKS = pytest.mark.parametrize(
    "chunks",
    [[1] * 53, [7, 1, 13, 2, 5, 11, 3, 11], [19] + [1] * 34, [3, 50], [4, 8, 41], [52, 1]],
    ids=lambda c: "-".join(map(str, c[:4])),
)


@CHUNKS
def test_chunks_equal_one_piece_fp64(model, captured, chunks):
    assert (run(model, tokens_of(), chunks) - captured["logits"]).abs().max() <= 1e-10


@CHUNKS
def test_chunks_equal_one_piece_fp32(chunks):
    model = ReferenceModel(CONFIG).randomize_(1).requires_grad_(False)
    assert (run(model, tokens_of(), chunks) - model(tokens_of())).abs().max() <= 3e-5


def test_single_precision_is_near_double(captured):
    model = ReferenceModel(CONFIG).randomize_(1).requires_grad_(False)
    assert (model(tokens_of()).double() - captured["logits"]).abs().max() <= 3e-5


def test_real_window_and_rates():
    """Window 128, HCA 128, 300 tokens: two entries, windows that slide, a ring that wraps twice."""
    model = ReferenceModel(REAL_RATES, torch.float64).randomize_(4).requires_grad_(False)
    tokens = tokens_of(1, 300)
    whole = model(tokens)
    for chunks in ([141, 1, 113, 1, 1, 43], [5] * 60):
        assert (run(model, tokens, chunks) - whole).abs().max() <= 1e-10


def test_the_past_does_not_see_the_future(model, captured):
    tokens = tokens_of()
    for cut in (1, 7, 31, 52):
        changed = tokens.clone()
        changed[:, cut:] = (changed[:, cut:] + 1) % TINY.vocab
        logits = model(changed)
        assert (logits[:, :cut] - captured["logits"][:, :cut]).abs().max() <= 1e-12
        assert (logits[:, cut] - captured["logits"][:, cut]).abs().max() > 1e-2


def test_the_far_past_matters(model, captured):
    """Token 0 reaches token 52 through the compressed entries: six windows of 8 alone reach back 42 tokens."""
    tokens = tokens_of()
    tokens[:, 0] = (tokens[:, 0] + 1) % TINY.vocab
    assert (model(tokens)[:, -1] - captured["logits"][:, -1]).abs().max() > 1e-4


def test_requests_of_a_batch_are_independent(model, captured):
    alone = model(tokens_of()[1:])
    assert (alone - captured["logits"][1:]).abs().max() <= 1e-12


@pytest.mark.parametrize("index", [0, 2, 3])  # SWA, CSA, HCA
def test_attention_inputs_come_from_the_normed_input(captured, model, index):
    """Queries, KV vectors, entries and indexer scores again from ``attn_in`` with the layer's own weights and rope."""
    w, kind = model.layers[index].attn, CONFIG.layer_kinds[index]
    x, positions, freqs = captured[f"layers.{index}.attn_in"], torch.arange(LENGTH), rope.layer_freqs(CONFIG, kind)

    def entries(weights, overlap):
        state = compressor.new_state(2, weights.ape.shape[0], weights.ape.shape[1], overlap, x.dtype, x.device)
        return compressor.compress(x, state, 0, weights.tensors(), freqs, 1e-6, overlap=overlap)[0]

    qr = rmsnorm.rmsnorm(x @ w.wq_a.weight.mT, w.q_norm.weight, 1e-6)
    q = rmsnorm.rmsnorm((qr @ w.wq_b.weight.mT).reshape(2, LENGTH, 4, 32), None, 1e-6)
    kv = rmsnorm.rmsnorm(x @ w.wkv.weight.mT, w.kv_norm.weight, 1e-6)
    want = {"q": rope.apply(q, positions[:, None], freqs), "kv": rope.apply(kv, positions, freqs)}
    if kind != LayerKind.SWA:
        want["compressed"] = entries(w.compressor, kind == LayerKind.CSA)
    if kind == LayerKind.CSA:
        iq = (qr @ w.indexer.wq_b.weight.mT).reshape(2, LENGTH, 16, 16)
        per_head = torch.relu(
            rope.apply(iq, positions[:, None], freqs) @ entries(w.indexer.compressor, True).mT[:, None]
        )
        head_weights = x @ w.indexer.weights_proj.weight.mT / 16
        want["index_scores"] = (head_weights.unsqueeze(-1) * per_head).sum(-2)
    got = {name: captured[f"layers.{index}.{name}"] for name in want}
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)  # names the tensor that differs
    o = captured[f"layers.{index}.attn_core"]
    out = output_proj.output_proj(o, positions, freqs, w.wo_a.weight, w.wo_b.weight, 2)
    torch.testing.assert_close(captured[f"layers.{index}.attn_out"], out, rtol=0, atol=1e-11)


@pytest.mark.parametrize("layer", range(6))
def test_each_query_attends_to_what_its_layer_kind_says(captured, model, layer):
    """Core attention again, key by key: window of 8, chosen or visible entries, sink in the denominator."""
    q, kv = captured[f"layers.{layer}.q"][0], captured[f"layers.{layer}.kv"][0]
    kind, sink = TINY.layer_kinds[layer], model.layers[layer].attn.attn_sink
    for t in range(LENGTH):
        keys = [kv[s] for s in range(max(0, t - 7), t + 1)]
        if kind == LayerKind.HCA:
            keys += [captured[f"layers.{layer}.compressed"][0, s] for s in range((t + 1) // 8)]
        if kind == LayerKind.CSA:
            scores = captured[f"layers.{layer}.index_scores"][0, t]
            best = sorted(range((t + 1) // 4), key=lambda s: -scores[s])[:3]
            assert [s for s in captured[f"layers.{layer}.topk"][0, t].tolist() if s >= 0] == best
            keys += [captured[f"layers.{layer}.compressed"][0, s] for s in best]
        for h in range(4):
            e = [math.exp((q[t, h] @ key).item() / math.sqrt(32)) for key in keys]
            want = sum(w * key for w, key in zip(e, keys, strict=True)) / (sum(e) + math.exp(sink[h].item()))
            torch.testing.assert_close(captured[f"layers.{layer}.attn_core"][0, t, h], want, rtol=0, atol=1e-11)


def naive_expert(x, weights):
    gate, up = weights.w1.weight @ x, weights.w3.weight @ x
    assert gate.max() > 0.5 and up.abs().max() > 0.5
    gate, up = gate.clamp(max=0.5), up.clamp(-0.5, 0.5)
    return weights.w2.weight @ (gate * torch.sigmoid(gate) * up)


@pytest.mark.parametrize("index", [2, 3])  # one hash layer, one score layer
def test_a_layer_is_two_sites_around_attention_and_experts(captured, model, index):
    """One token's way through a layer, from the streams before it and the captured sublayer outputs."""
    layer, at = model.layers[index], (1, 29)
    got = {name: captured[f"layers.{index}.{name}"][at] for name in ("attn_in", "attn_out", "ffn_in", "ffn_out")}
    streams = captured[f"layers.{index - 1}.streams"][at]
    for site in ("attn", "ffn"):
        fn, scale, base = (getattr(layer, f"hc_{site}_{part}") for part in ("fn", "scale", "base"))
        pre, post, comb = mhc.coefficients(streams, fn, scale, base, iters=20, hc_eps=1e-6, rms_eps=1e-6)
        x = pre @ streams
        x = getattr(layer, f"{site}_norm").weight * x / (x.square().mean() + 1e-6).sqrt()
        torch.testing.assert_close(got[f"{site}_in"], x, rtol=0, atol=1e-11)
        torch.testing.assert_close(captured[f"layers.{index}.hc_{site}_post"][at], post, rtol=0, atol=1e-12)
        torch.testing.assert_close(captured[f"layers.{index}.hc_{site}_comb"][at], comb, rtol=0, atol=1e-12)
        streams = torch.stack([post[j] * got[f"{site}_out"] + comb[:, j] @ streams for j in range(4)])
    torch.testing.assert_close(captured[f"layers.{index}.streams"][at], streams, rtol=0, atol=1e-11)

    experts, weights = (captured[f"layers.{index}.router_{name}"][at].tolist() for name in ("experts", "weights"))
    if index < 3:
        assert experts == layer.ffn.gate.tid2eid[tokens_of()[at]].tolist()
    assert sum(weights) == pytest.approx(1.5)
    want = naive_expert(got["ffn_in"], layer.ffn.shared_experts)
    for e, weight in zip(experts, weights, strict=True):
        want = want + weight * naive_expert(got["ffn_in"], layer.ffn.experts[e])
    torch.testing.assert_close(got["ffn_out"], want, rtol=0, atol=1e-11)


def test_captured_names(captured, model):
    every = ["hc_attn_post", "hc_attn_comb", "hc_ffn_post", "hc_ffn_comb", "attn_in", "q", "kv", "attn_core", "lse"]
    every += ["attn_out", "ffn_in", "ffn_out", "router_experts", "router_weights", "streams"]
    more = {LayerKind.SWA: [], LayerKind.HCA: ["compressed"], LayerKind.CSA: ["compressed", "index_scores", "topk"]}
    want = {f"layers.{i}.{name}" for i, kind in enumerate(CONFIG.layer_kinds) for name in every + more[kind]}
    assert set(captured) == want | {"collapsed", "hidden", "logits"}
    torch.testing.assert_close(captured["hidden"] @ model.head.weight.mT, captured["logits"])


def test_short_prompts_have_no_entries(model):
    for length in (1, 3):
        capture, cache = {}, model.new_cache(1)
        model(tokens_of(1, length), cache, capture)
        assert capture["layers.2.compressed"].shape == (1, 0, 32)
        assert (capture["layers.2.topk"] == -1).all() and capture["layers.2.topk"].shape == (1, length, 3)
    model(tokens_of(1, 1), cache, capture)  # token 3 completes the first CSA window and sees it at once
    assert capture["layers.2.topk"].tolist() == [[[0, -1, -1]]]


def test_generate_is_repeated_argmax(model):
    prompt = tokens_of(2, 6)
    got, want = model.generate(prompt, 12), prompt
    for _ in range(12):
        want = torch.cat((want, model(want)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(got, want)
    assert torch.equal(model.generate(prompt, 0), prompt)


def test_generate_samples_from_its_generator(model):
    def draw(seed):
        return model.generate(tokens_of(1, 4), 20, 1.0, 0.9, torch.Generator().manual_seed(seed))

    assert torch.equal(draw(5), draw(5))
    assert not torch.equal(draw(5), draw(6))


def test_codecs_see_what_is_stored(captured):
    """The KV codec gets every window vector and entry, the index codec queries and keys; each is what is used."""
    widths = []

    def kv_codec(x):
        widths.append(x.shape[-1])
        return x.to(torch.bfloat16).to(x.dtype)

    turn = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    turned = ReferenceModel(CONFIG, torch.float64, index_codec=lambda x: x @ turn).randomize_(1).requires_grad_(False)
    assert (turned(tokens_of()) - captured["logits"]).abs().max() <= 1e-10
    rounded = ReferenceModel(CONFIG, torch.float64, kv_codec=kv_codec).randomize_(1).requires_grad_(False)
    capture, cache = {}, rounded.new_cache(2)
    logits = rounded(tokens_of(), cache, capture)
    assert widths == [32] * (6 + 4)
    assert 1e-4 < (logits - captured["logits"]).abs().max() < 2
    for layer in cache.layers:
        for stored in (layer.window, layer.entries):
            assert stored is None or torch.equal(stored, stored.to(torch.bfloat16).double())
    assert (run(rounded, tokens_of(), [20] + [1] * 33) - logits).abs().max() <= 1e-10


def test_gradients_reach_every_parameter():
    """All but the router bias and the indexer, which only select."""
    model = ReferenceModel(CONFIG, torch.float64).randomize_(3)
    capture = {}
    logits = model(tokens_of(), capture=capture, mtp=tokens_of(seed=1))
    (logits.square().mean() + capture["mtp_logits"].square().mean()).backward()
    for name, parameter in model.named_parameters():
        selects_only = name.endswith("gate.bias") or ".indexer." in name
        if selects_only:
            assert parameter.grad is None or (parameter.grad == 0).all(), name
        else:
            assert torch.isfinite(parameter.grad).all() and parameter.grad.abs().max() > 0, name


def test_gradient_flows_through_a_chunked_forward():
    model, grads = ReferenceModel(CONFIG, torch.float64).randomize_(3), []
    for chunks in ([23], [9, 1, 13]):
        model.zero_grad()
        run(model, tokens_of(2, 23), chunks)[:, -1].square().sum().backward()
        grads.append(model.layers[2].attn.compressor.wkv.weight.grad.clone())
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-12)
    assert grads[0].abs().max() > 1e-6


def refused(call, name):
    with pytest.raises(ArgumentError) as error:
        call()
    assert error.value.name == name


def test_refusals(model):
    refused(lambda: model(tokens_of()[0]), "tokens.shape")
    refused(lambda: model(tokens_of()[:, :0]), "tokens.shape")
    refused(lambda: model(tokens_of().int()), "tokens.dtype")
    refused(lambda: model(torch.tensor([[0, 320]])), "tokens")
    refused(lambda: model(torch.tensor([[0, -1]])), "tokens")
    refused(lambda: model(tokens_of(), model.new_cache(1)), "cache.batch")
    refused(lambda: model(tokens_of(), ReferenceModel(CONFIG).new_cache(2)), "cache")
    refused(lambda: model(tokens_of(), ReferenceModel(REAL_RATES, torch.float64).new_cache(2)), "cache")
    refused(lambda: model.new_cache(0), "batch")
    refused(lambda: model.generate(tokens_of(), -1), "max_new")
    refused(lambda: ReferenceModel(CONFIG, torch.bfloat16), "dtype")
    refused(lambda: ReferenceModel(CONFIG)(tokens_of()), "embed.weight")


def test_positions_end_at_the_maximum(model):
    cache = model.new_cache(1)
    cache.position = TINY.max_positions - 2
    refused(lambda: model(tokens_of(1, 3), cache), "positions")
    assert cache.position == TINY.max_positions - 2
    model(tokens_of(1, 2), cache)
