"""The numbers of Flash and Pro, derived counts and sizes against published ones, and loud refusals."""

from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch

from dsv4lib.config import (
    FLASH,
    PRO,
    TINY,
    LayerKind,
    YarnConfig,
    fixed_cache_bytes,
    index_key_bytes,
    kinds_of,
    kv_bytes_per_token,
    kv_row_bytes,
    schedule,
)
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.reference.model import ReferenceModel

GIB, MIB, MILLION_TOKENS = 2**30, 2**20, 2**20


def test_flash_schedule():
    assert FLASH.compress_ratios == (0, 0, *(4, 128) * 20, 4, 0)
    assert FLASH.layers_of(LayerKind.SWA) == (0, 1)
    assert FLASH.layers_of(LayerKind.CSA) == tuple(range(2, 43, 2))
    assert FLASH.layers_of(LayerKind.HCA) == tuple(range(3, 42, 2))
    assert FLASH.mtp_kind is LayerKind.SWA


def test_pro_schedule():
    assert PRO.compress_ratios == (128, 128, *(4, 128) * 29, 4, 0)
    assert PRO.layers_of(LayerKind.SWA) == ()
    assert PRO.layers_of(LayerKind.HCA) == (0, 1, *range(3, 60, 2))
    assert len(PRO.layers_of(LayerKind.CSA)) == 30
    assert PRO.mtp_kind is LayerKind.SWA


def test_tiny_has_every_kind_and_both_routers():
    assert TINY.layer_kinds == ("SWA", "SWA", "CSA", "HCA", "CSA", "HCA")
    assert [TINY.is_hash_layer(i) for i in range(6)] == [True, True, True, False, False, False]


def test_flash_and_pro_differ_only_where_they_should():
    differing = {f.name for f in fields(FLASH) if getattr(FLASH, f.name) != getattr(PRO, f.name)}
    sizes = {"n_layers", "hidden", "n_heads", "q_lora_rank", "o_groups", "index_topk", "n_experts", "expert_width"}
    assert differing == sizes | {"routed_scaling", "compress_ratios"}


@pytest.mark.parametrize(
    ("config", "total", "active", "with_mtp"),
    [(FLASH, 284.33, 13.27, 290.94), (PRO, 1573.00, 48.85, 1598.84)],
    ids=["flash", "pro"],
)
def test_parameter_counts(config, total, active, with_mtp):
    assert round(config.total_params / 1e9, 2) == total
    assert round(config.active_params / 1e9, 2) == active
    assert round((config.total_params + config.mtp_params) / 1e9, 2) == with_mtp


def test_counts_agree_with_the_tensors_of_a_model():
    """TINY and a Flash-sized shell without memory: the closed formula against what is really allocated."""
    for config in (TINY, replace(FLASH, n_experts=6)):
        with torch.device("meta"):
            model = ReferenceModel(config)
        counts = {name: p.numel() for name, p in model.named_parameters()}
        mtp = sum(n for name, n in counts.items() if name.startswith("mtp."))
        assert config.mtp_params == mtp
        assert config.total_params == sum(counts.values()) - mtp


def test_derived_sizes():
    assert (FLASH.nope_dim, FLASH.group_width, FLASH.mix_width) == (448, 4096, 24)
    assert PRO.group_width == 4096
    assert [FLASH.rate(kind) for kind in LayerKind] == [0, 4, 128]


def test_row_bytes():
    assert kv_row_bytes(FLASH) == 584
    assert kv_row_bytes(FLASH, "bf16") == 1024
    assert [index_key_bytes(FLASH, index) for index in ("fp8", "fp4", "bf16")] == [132, 68, 256]


@pytest.mark.parametrize(
    ("config", "fp8", "fp4", "gib"),
    [(FLASH, 3850, 3514, (3.76, 3.43, 6.72)), (PRO, 5511, 5031, (5.38, 4.91, 9.62))],
    ids=["flash", "pro"],
)
def test_growing_cache(config, fp8, fp4, gib):
    assert int(kv_bytes_per_token(config)) == fp8
    assert int(kv_bytes_per_token(config, index="fp4")) == fp4
    sizes = [kv_bytes_per_token(config, kv, index) for kv, index in (("fp8", "fp8"), ("fp8", "fp4"), ("bf16", "bf16"))]
    assert tuple(round(s * MILLION_TOKENS / GIB, 2) for s in sizes) == gib


@pytest.mark.parametrize(("config", "window", "state"), [(FLASH, 3.1, 11.6), (PRO, 4.4, 17.8)], ids=["flash", "pro"])
def test_fixed_cache(config, window, state):
    sizes = fixed_cache_bytes(config)
    assert round(sizes["window"] / MIB, 1) == window
    assert round(sizes["state"] / MIB, 1) == state


CONTRADICTIONS = [
    (FLASH, {"n_layers": 44}, "compress_ratios", "n_layers + 1 = 45"),
    (FLASH, {"n_layers": 0}, "n_layers", ">= 1"),
    (FLASH, {"n_heads": 64.0}, "n_heads", "an integer"),
    (FLASH, {"n_heads": True}, "n_heads", "an integer"),
    (FLASH, {"window": -1}, "window", ">= 1"),
    (FLASH, {"o_groups": 7}, "o_groups", "a divisor of n_heads=64"),
    (FLASH, {"rope_dim": 63}, "rope_dim", "even"),
    (FLASH, {"rope_dim": 256}, "rope_dim", "index_dim=128"),
    (FLASH, {"experts_per_token": 257}, "experts_per_token", "n_experts=256"),
    (FLASH, {"n_hash_layers": 44}, "n_hash_layers", "n_layers=43"),
    (FLASH, {"n_hash_layers": -1}, "n_hash_layers", ">= 0"),
    (FLASH, {"routed_scaling": 0.0}, "routed_scaling", "> 0"),
    (FLASH, {"rms_eps": float("nan")}, "rms_eps", "finite"),
    (FLASH, {"swiglu_limit": float("inf")}, "swiglu_limit", "finite"),
    (FLASH, {"hc_mult": 1}, "hc_mult", "2 residual streams"),
    (FLASH, {"yarn": {"factor": 16}}, "yarn", "YarnConfig or None"),
    (FLASH, {"max_positions": 1048577}, "max_positions", "1.04858e+06"),
    (FLASH, {"compress_ratios": list(FLASH.compress_ratios)}, "compress_ratios", "a tuple"),
    (FLASH, {"csa_rate": 8}, "compress_ratios[2]", "csa_rate=8"),
    (FLASH, {"hca_rate": 4}, "hca_rate", "differs from csa_rate=4"),
    (TINY, {"compress_ratios": (0, 0, 4, 8, 4, 5, 0)}, "compress_ratios[5]", "hca_rate=8"),
    (TINY, {"compress_ratios": (0, 0, 4, 8, 4, 8, 4)}, "compress_ratios[-1]", "no compressor"),
]


@pytest.mark.parametrize(("config", "change", "name", "allowed"), CONTRADICTIONS, ids=lambda v: str(v)[:24])
def test_contradictions_are_refused(config, change, name, allowed):
    with pytest.raises(ConfigError) as error:
        replace(config, **change)
    assert error.value.name == name
    assert allowed in str(error.value)


@pytest.mark.parametrize(
    ("change", "name"),
    [({"factor": 0.5}, "yarn.factor"), ({"original_positions": 0}, "yarn.original_positions"),
     ({"beta_fast": 1.0}, "yarn.beta_fast"), ({"beta_slow": 0.0}, "yarn.beta_fast")],
)  # fmt: skip
def test_yarn_contradictions_are_refused(change, name):
    with pytest.raises(ConfigError) as error:
        YarnConfig(**change)
    assert error.value.name == name


def test_schedule_refuses():
    with pytest.raises(ConfigError, match=r"compress_ratios\[1\]=5"):
        schedule(4, (0, 5), 4, 128)
    with pytest.raises(ConfigError, match="at most n_layers=1"):
        schedule(1, (0, 0), 4, 128)
    with pytest.raises(ConfigError, match="n_layers=0"):
        schedule(0, (), 4, 128)
    with pytest.raises(ConfigError, match="csa_rate=0"):
        kinds_of((0,), 0, 128)


def test_sizes_refuse_unknown_formats():
    with pytest.raises(ArgumentError, match="kv='fp4'"):
        kv_bytes_per_token(FLASH, kv="fp4")
    with pytest.raises(ArgumentError, match="index='int8'"):
        kv_bytes_per_token(FLASH, index="int8")


def test_a_config_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        FLASH.n_layers = 44
