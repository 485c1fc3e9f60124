"""The peer is what we think it is: names as the released checkpoints', nothing left at its default, no near-ties."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from dsv4lib.config import FLASH, PRO
from dsv4lib.errors import ArgumentError
from dsv4lib.reference import transformers_parity as tp


@pytest.mark.parametrize("variant", tp.VARIANTS)
def test_checkpoint_names_load_into_transformers(variant, tmp_path):
    """Our names, written to a file, must load through transformers' own table for released checkpoints."""
    from transformers import DeepseekV4ForCausalLM

    peer = tp.build_peer(variant, seed=1)
    named = tp.checkpoint_state(peer.model.state_dict())
    save_file({name: tensor.contiguous().clone() for name, tensor in named.items()}, tmp_path / "model.safetensors")
    peer.model.config.save_pretrained(tmp_path)
    loaded, info = DeepseekV4ForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    want, got = peer.model.state_dict(), loaded.state_dict()
    assert want.keys() == got.keys()
    assert [name for name in want if not torch.equal(want[name], got[name])] == []


def test_every_parameter_and_buffer_is_redrawn():
    first, second = (tp.build_peer("tiny", seed=s).model.state_dict() for s in (1, 2))
    for name, tensor in first.items():
        assert not torch.equal(tensor, second[name]), name
        assert tensor.unique().numel() > 1 or tensor.numel() == 1, name


@pytest.mark.parametrize("variant", tp.VARIANTS)
def test_no_decision_hangs_on_rounding(variant):
    # fp32 noise of the scores is about 1e-6; a top-k decision closer than that could go either way in either model.
    assert tp.decision_margin(tp.build_peer(variant)) > 2e-5


def test_clamp_and_selection_are_exercised():
    """Limits that no value reaches, or a top-k that takes everything, would leave code untested."""
    peer = tp.build_peer("tiny")
    hits = []
    for layer in peer.model.model.layers:
        layer.mlp.shared_experts.gate_proj.register_forward_hook(
            lambda _m, _a, out: hits.append((out.abs() > peer.config.swiglu_limit).float().mean().item())
        )
    trace = tp.peer_trace(peer, tp.call_sizes("tiny", "one-shot"))
    assert min(hits) > 0.05
    visible = (torch.arange(53) + 1) // peer.config.csa_rate
    assert (trace["layers.2.selected"].sum(-1) < visible).float().mean() > 0.5


def test_bad_input_is_refused():
    with pytest.raises(ArgumentError, match="variant='small'"):
        tp.build_peer("small")
    with pytest.raises(ArgumentError, match="mode='backwards'"):
        tp.call_sizes("tiny", "backwards")
    with pytest.raises(ArgumentError, match="peer_state"):
        tp.checkpoint_state({"model.layers.0.self_attn.q_proj.weight": torch.zeros(1)})
    with pytest.raises(ArgumentError, match="sizes"):
        tp.peer_trace(tp.build_peer("tiny"), (50, 4))


def test_flash_has_the_dimensions_transformers_knows():
    """transformers' defaults are Flash's; only its default schedule is not released: those ratios are passed."""
    from transformers import DeepseekV4Config

    yarn = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 65536}
    yarn |= {"beta_fast": 32.0, "beta_slow": 1.0}
    ratios = [0, 0, *(r for _ in range(20) for r in (4, 128)), 4, 0]
    theirs = DeepseekV4Config(compress_ratios=ratios, rope_parameters=yarn, attn_implementation="eager").to_dict()
    ours = tp.peer_config(FLASH).to_dict()
    assert theirs["layer_types"] != DeepseekV4Config().layer_types
    assert {name: (ours[name], theirs[name]) for name in theirs if ours[name] != theirs[name]} == {}


@pytest.mark.parametrize(
    ("field", "pro_value"),
    [("n_heads", PRO.n_heads), ("n_experts", PRO.n_experts), ("routed_scaling", PRO.routed_scaling)]
    + [("index_topk", PRO.index_topk), ("o_groups", PRO.o_groups), ("q_lora_rank", PRO.q_lora_rank)],
)
def test_pro_value_in_flash_is_noticed(field, pro_value):
    right, wrong = (tp.peer_config(c).to_dict() for c in (FLASH, replace(FLASH, **{field: pro_value})))
    assert sum(right[name] != wrong[name] for name in right) == 1
