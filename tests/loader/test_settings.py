"""config.json: the released files become FLASH and PRO, and every fault of a wrong one is named at once."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dsv4lib.config import FLASH, PRO, TINY
from dsv4lib.loader.safetensors import CheckpointError
from dsv4lib.loader.settings import ConfigFaults, declared_format, read_config, write_config


def released(**changes):
    """Fields and values of the released Flash config.json."""
    found = {
        "architectures": ["DeepseekV4ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 0, "eos_token_id": 1, "expert_dtype": "fp4", "hc_eps": 1e-06, "hc_mult": 4,
        "hc_sinkhorn_iters": 20, "head_dim": 512, "hidden_act": "silu", "hidden_size": 4096, "index_head_dim": 128,
        "index_n_heads": 64, "index_topk": 512, "initializer_range": 0.02, "max_position_embeddings": 1048576,
        "model_type": "deepseek_v4", "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 6, "num_hidden_layers": 43,
        "num_hash_layers": 3, "num_key_value_heads": 1, "num_nextn_predict_layers": 1, "o_groups": 8,
        "o_lora_rank": 1024, "q_lora_rank": 1024, "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 65536, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "sliding_window": 128,
        "swiglu_limit": 10.0, "tie_word_embeddings": False, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
        "transformers_version": "4.57.1", "use_cache": True, "vocab_size": 129280, "compress_rope_theta": 160000,
        "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    }  # fmt: skip
    return found | changes


PRO_CHANGES = {
    "hidden_size": 7168, "num_attention_heads": 128, "q_lora_rank": 1536, "o_groups": 16, "index_topk": 1024,
    "n_routed_experts": 384, "moe_intermediate_size": 3072, "routed_scaling_factor": 2.5, "num_hidden_layers": 61,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
}  # fmt: skip


def test_the_released_files_are_flash_and_pro():
    assert read_config(released()) == FLASH
    assert read_config(released(**PRO_CHANGES)) == PRO
    assert declared_format(released()) == "mxfp4"


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4", "fp8", "bf16"])
def test_what_is_written_is_read(form):
    for config in (FLASH, PRO, TINY, replace(TINY, yarn=None, max_positions=100)):
        found = json.loads(json.dumps(write_config(config, form)))
        assert read_config(found) == config and declared_format(found) == form


def test_all_faults_are_named_at_once():
    wrong = released(
        engram_layer_ids=[1], dspark_markov_rank=256, hidden_act="gelu", norm_topk_prob=1, hc_mult="4", vocab_size=True,
        compress_ratios=[0, "4"], rope_scaling={"type": "linear", "factor": 16, "mscale": 1}, expert_dtype="int4",
    )  # fmt: skip
    del wrong["o_groups"], wrong["model_type"]
    with pytest.raises(ConfigFaults) as error:
        read_config(wrong)
    for name in (
        "engram_layer_ids: unknown", "dspark_markov_rank: unknown", "hidden_act='gelu'", "norm_topk_prob=1",
        "hc_mult='4'", "vocab_size=True", "compress_ratios=", "rope_scaling.type", "rope_scaling.mscale: unknown",
        "rope_scaling.beta_fast: missing", "o_groups: missing", "model_type: missing", "expert_dtype",
    ):  # fmt: skip
        assert name in str(error.value)
    assert len(error.value.faults) == 15  # and rope_scaling's beta_slow and original_max_position_embeddings
    assert str(error.value).count("\n") == 15


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"o_groups": 7}, "o_groups"),
        ({"compress_ratios": [0, 0, *[4, 128] * 20, 4, 0, 0, 0]}, "compress_ratios"),
        ({"compress_ratios": [0, 0, *[4, 64] * 20, 4, 0]}, "compress_ratios"),
        ({"max_position_embeddings": 2**21}, "max_positions"),
        ({"num_hash_layers": 44}, "n_hash_layers"),
        ({"rope_scaling": {**released()["rope_scaling"], "factor": 0.5}}, "factor"),
        ({"expert_dtype": "bf16"}, "expert_dtype"),
        ({"quantization_config": {**released()["quantization_config"], "weight_block_size": [32, 32]}}, "32, 32"),
        ({"quantization_config": {**released()["quantization_config"], "moe_quant_algo": "INT4"}}, "moe_quant_algo"),
        ({"quantization_config": None}, "expert_dtype"),
        ({"compress_rates": {"compressed_sparse_attention": 4}}, "compress_rates"),
    ],
)
def test_contradictions_are_named(changes, message):
    with pytest.raises(ConfigFaults, match=message):
        read_config(released(**changes))


def test_formats_that_are_declared():
    base = {**released()["quantization_config"]}
    nvfp4 = {**base, "moe_quant_algo": "NVFP4", "quant_algo": "MIXED_PRECISION", "group_size": 16, "producer": {}}
    assert declared_format(released(quantization_config=nvfp4)) == "nvfp4"
    assert declared_format({"quantization_config": base, "expert_dtype": "fp8"}) == "fp8"
    assert declared_format({}) is None
    with pytest.raises(CheckpointError, match="group_size"):
        declared_format({"quantization_config": {**nvfp4, "group_size": 32}})
