"""Our reference model against transformers' DeepseekV4, same random weights, fp32, logits and every layer.

Inner tensors are held to a fraction of their own RMS (``LAYER_BOUND``), logits of standard deviation 1 to an absolute
bound: a fault in one layer shows at that layer, before later layers blur it.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch

from dsv4lib.config import LayerKind
from dsv4lib.errors import ArgumentError
from dsv4lib.reference import transformers_parity as tp


@cache
def peer_of(variant: str) -> tp.Peer:
    return tp.build_peer(variant)


@cache
def model_of(variant: str):
    return tp.reference_of(peer_of(variant))


@cache
def reference_trace(variant: str, mode: str) -> tp.Trace:
    return tp.reference_trace(model_of(variant), peer_of(variant).tokens, tp.call_sizes(variant, mode))


def expected_tensors(config) -> set[str]:
    """What must have been compared, so that an empty comparison cannot pass."""
    per_layer = [
        "attn",
        "ffn",
        "streams",
        "routing",
        *(f"hc_{s}_{w}" for s in ("attn", "ffn") for w in ("post", "comb")),
    ]
    names = {"logits", "head"} | {f"layers.{n}.{name}" for n in range(config.n_layers) for name in per_layer}
    for kind, extra in ((LayerKind.HCA, ["entries"]), (LayerKind.CSA, ["entries", "index_keys", "selected"])):
        names |= {f"layers.{n}.{name}" for n in config.layers_of(kind) for name in extra}
    return names


@pytest.mark.parametrize("mode", tp.MODES)
@pytest.mark.parametrize("variant", tp.VARIANTS)
def test_logits_and_layers(variant, mode):
    peer = peer_of(variant)
    peer_trace = tp.peer_trace(peer, tp.call_sizes(variant, mode))
    rows = tp.compare(variant, mode, reference_trace(variant, mode), peer_trace)
    assert {row.tensor for row in rows} == expected_tensors(peer.config)
    assert peer_trace["logits"].shape == (*peer.tokens.shape, peer.config.vocab)
    assert 0.5 < peer_trace["logits"].std() < 2
    assert rows[0].tensor == "logits" and rows[0].bound == 5e-5
    assert [row for row in rows if not row.ok] == []


@pytest.mark.parametrize("mode", tp.MODES)
@pytest.mark.parametrize("variant", tp.VARIANTS)
def test_every_mode_gives_what_the_peer_gives_without_a_cache(variant, mode):
    """A fault that both caches share would not show when each mode is compared with itself."""
    peer = peer_of(variant)
    with torch.no_grad():
        whole = peer.model(input_ids=peer.tokens, use_cache=False).logits
    assert (reference_trace(variant, mode)["logits"] - whole).abs().max() <= tp.LOGITS_BOUND


def test_calls_cover_the_sequence():
    for variant, v in tp.VARIANTS.items():
        for mode in tp.MODES:
            assert sum(tp.call_sizes(variant, mode)) == v.tokens
    assert tp.call_sizes("tiny", "chunked") == (7, 1, 13, 2, 5, 11, 3, 11)
    assert tp.VARIANTS["real_rates"].config.hca_rate == tp.VARIANTS["real_rates"].config.window == 128


def test_fp64_agrees_too():
    """Against fp64 only the peer's own rounding is left, so the difference must not grow."""
    peer = peer_of("tiny_yarn")
    sizes = tp.call_sizes("tiny_yarn", "one-shot")
    exact = tp.reference_trace(tp.reference_of(peer, torch.float64), peer.tokens, sizes)
    rows = tp.compare("tiny_yarn", "fp64", exact, tp.peer_trace(peer, sizes))
    assert [row for row in rows if not row.ok] == []


FAULTS = {
    "one element": ("layers.0.ffn", lambda value: value + 1e-4),
    "nan": ("layers.4.attn", lambda value: value * float("nan")),
    "one pick": ("layers.2.selected", lambda value: ~value),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_notices(fault):
    name, spoil = FAULTS[fault]
    peers = reference_trace("tiny", "one-shot")
    ours = dict(peers, **{name: peers[name].clone()})
    assert all(row.ok for row in tp.compare("tiny", "one-shot", ours, peers))
    ours[name][1, 30, 4] = spoil(ours[name][1, 30, 4])
    rows = tp.compare("tiny", "one-shot", ours, peers)
    assert [row.tensor for row in rows if not row.ok] == [name]
    assert name in [row.tensor for row in tp.worst(rows)]


def test_a_missing_tensor_is_refused():
    peers = reference_trace("tiny", "one-shot")
    ours = {name: tensor for name, tensor in peers.items() if name != "layers.3.entries"}
    with pytest.raises(ArgumentError, match="layers.3.entries"):
        tp.compare("tiny", "one-shot", ours, peers)


def test_worst_keeps_the_row_closest_to_its_bound():
    row = tp.ParityRow("tiny", "one-shot", "layers.0.attn", 1e-6, 1e-5)
    closer = replace(row, tensor="layers.1.attn", max_abs=5e-6, bound=2e-5)
    other = replace(row, tensor="layers.0.ffn")
    assert tp.worst([row, closer, other]) == [closer, other]
    broken = replace(row, tensor="layers.2.attn", max_abs=float("nan"))
    assert tp.worst([closer, broken, row]) == [broken]


def test_a_peer_with_a_missing_weight_is_refused(monkeypatch):
    state = tp.checkpoint_state(peer_of("tiny").model.state_dict())
    del state["layers.1.attn.attn_sink"]
    monkeypatch.setattr(tp, "checkpoint_state", lambda _: state)
    with pytest.raises(ArgumentError, match="attn_sink"):
        tp.reference_of(peer_of("tiny"))
