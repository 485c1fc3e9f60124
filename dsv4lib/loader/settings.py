"""Translate config.json to a ModelConfig and back, naming all faults at once.

Source of the names: the released Flash and Pro config.json. A field that would change the arithmetic may only have the
value that this lab implements; a field that says nothing about it (``transformers_version``) is let through by name;
any other field is refused, since it may say something.
"""

from __future__ import annotations

from typing import Any

from dsv4lib.config import ModelConfig, YarnConfig
from dsv4lib.errors import ConfigError
from dsv4lib.loader.names import FORMATS, TILE
from dsv4lib.loader.safetensors import CheckpointError

FIELDS = {
    "num_hidden_layers": "n_layers",
    "hidden_size": "hidden",
    "vocab_size": "vocab",
    "num_attention_heads": "n_heads",
    "head_dim": "head_dim",
    "qk_rope_head_dim": "rope_dim",
    "q_lora_rank": "q_lora_rank",
    "o_groups": "o_groups",
    "o_lora_rank": "o_lora_rank",
    "sliding_window": "window",
    "index_n_heads": "index_heads",
    "index_head_dim": "index_dim",
    "index_topk": "index_topk",
    "n_routed_experts": "n_experts",
    "num_experts_per_tok": "experts_per_token",
    "n_shared_experts": "n_shared_experts",
    "moe_intermediate_size": "expert_width",
    "routed_scaling_factor": "routed_scaling",
    "num_hash_layers": "n_hash_layers",
    "swiglu_limit": "swiglu_limit",
    "hc_mult": "hc_mult",
    "hc_sinkhorn_iters": "sinkhorn_iters",
    "hc_eps": "hc_eps",
    "rms_norm_eps": "rms_eps",
    "rope_theta": "rope_theta",
    "compress_rope_theta": "compress_rope_theta",
    "max_position_embeddings": "max_positions",
}
"""Field of config.json -> field of ModelConfig; all must be there."""

FIXED = {
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "scoring_func": "sqrtsoftplus",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
}
"""Fields with the one value that is implemented; they may be missing, except ``model_type``."""

IGNORED = {
    "_name_or_path", "bos_token_id", "dtype", "eos_token_id", "initializer_range", "pad_token_id", "torch_dtype",
    "transformers_version", "use_cache",
}  # fmt: skip

YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_positions",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}
RATES = {"compressed_sparse_attention": "csa_rate", "heavily_compressed_attention": "hca_rate"}
DEFAULT_RATES = {"csa_rate": 4, "hca_rate": 128}
EXPERT_DTYPES = {"mxfp4": "fp4", "nvfp4": "fp4", "fp8": "fp8", "bf16": "bf16"}
QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "weight_block_size": [TILE, TILE],
}
NVFP4 = {
    "moe_quant_algo": "NVFP4",
    "quant_algo": "MIXED_PRECISION",
    "group_size": 16,
    "kv_cache_quant_algo": None,
    "ignore": ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"],
}
QUANTIZATION_IGNORED = {"producer", "quantized_layers", "config_groups", "expert_dtype"}


class ConfigFaults(CheckpointError):
    """A config.json with faults: all of them, one a line."""

    def __init__(self, faults: list[str]):
        self.faults = faults
        super().__init__("config.json", f"{len(faults)} faults", "a DeepSeek-V4 configuration")
        self.args = ("config.json has " + f"{len(faults)} fault(s):" + "".join(f"\n  {fault}" for fault in faults),)


def read_config(found: dict[str, Any]) -> ModelConfig:
    """Translate the contents of config.json.

    Raises:
        ConfigFaults: every field that is unknown, missing, of a wrong type, or contradicts another.
    """
    faults = [f"{name}: unknown field" for name in sorted(found.keys() - _known())]
    faults += [f"{name}: missing" for name in (*FIELDS, "model_type", "compress_ratios") if name not in found]
    for name, wanted in FIXED.items():
        if name in found and not _same(found[name], wanted):
            faults.append(f"{name}={found[name]!r}: only {wanted!r} is implemented")
    values: dict[str, Any] = {ours: found[name] for name, ours in FIELDS.items() if name in found}
    rates = _rates(found.get("compress_rates"), faults)
    values |= rates
    values["compress_ratios"] = _ratios(found.get("compress_ratios"), faults) if "compress_ratios" in found else None
    values["yarn"] = _yarn(found.get("rope_scaling"), faults)
    _expert_dtype(found, faults)
    missing = {name for name in ModelConfig.__annotations__ if values.get(name) is None} - {"yarn"}
    types = {name: kind for name, kind in ModelConfig.__annotations__.items() if kind in ("int", "float")}
    for ours, kind in types.items():
        value, name = values.get(ours), next((n for n, o in FIELDS.items() if o == ours), ours)
        if name in found and (isinstance(value, bool) or not isinstance(value, int if kind == "int" else int | float)):
            faults.append(f"{name}={value!r}: not {'an integer' if kind == 'int' else 'a number'}")
            missing.add(ours)
    if not missing:
        try:
            return _finish(ModelConfig(**values), faults)
        except ConfigError as error:
            faults.append(str(error))
    raise ConfigFaults(faults)


def _finish(config: ModelConfig, faults: list[str]) -> ModelConfig:
    if faults:
        raise ConfigFaults(faults)
    return config


def _known() -> set[str]:
    more = {"compress_ratios", "compress_rates", "rope_scaling", "expert_dtype", "quantization_config"}
    return FIELDS.keys() | FIXED.keys() | IGNORED | more


def _same(value: Any, wanted: Any) -> bool:
    return value == wanted and isinstance(value, bool) == isinstance(wanted, bool)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _rates(given: Any, faults: list[str]) -> dict[str, int]:
    if given is None:
        return dict(DEFAULT_RATES)
    if not isinstance(given, dict) or given.keys() != RATES.keys() or not all(map(_whole, given.values())):
        faults.append(f"compress_rates={given!r}: not integers under {', '.join(RATES)}")
        return dict(DEFAULT_RATES)
    return {ours: given[name] for name, ours in RATES.items()}


def _ratios(given: Any, faults: list[str]) -> tuple[int, ...] | None:
    if not isinstance(given, list) or not all(map(_whole, given)):
        faults.append(f"compress_ratios={given!r}: not a list of integers")
        return None
    return tuple(given)


def _yarn(given: Any, faults: list[str]) -> YarnConfig | None:
    if given is None:
        return None
    if not isinstance(given, dict):
        faults.append(f"rope_scaling={given!r}: not an object")
        return None
    kinds = [given[name] for name in ("type", "rope_type") if name in given]
    if not kinds or any(kind != "yarn" for kind in kinds):
        faults.append(f"rope_scaling.type={kinds}: only 'yarn' is implemented")
    unknown = given.keys() - YARN.keys() - {"type", "rope_type"}
    faults += [f"rope_scaling.{name}: unknown field" for name in sorted(unknown)]
    faults += [f"rope_scaling.{name}: missing" for name in YARN if name not in given]
    numbers = {ours: given[name] for name, ours in YARN.items() if name in given}
    wrong = [name for name, value in numbers.items() if isinstance(value, bool) or not isinstance(value, int | float)]
    faults += [f"rope_scaling.{name}={numbers[name]!r}: not a number" for name in wrong]
    if wrong or numbers.keys() != set(YARN.values()):
        return None
    try:
        return YarnConfig(**numbers)
    except ConfigError as error:
        faults.append(str(error))
    return None


def _expert_dtype(found: dict[str, Any], faults: list[str]) -> None:
    try:
        declared_format(found)
    except CheckpointError as error:
        faults.append(f"{error}")


def declared_format(found: dict[str, Any]) -> str | None:
    """Read the checkpoint format that config.json declares, one of `FORMATS`. None if it says nothing.

    Raises:
        CheckpointError: fields that contradict each other, or declare what is not known.
    """
    settings, experts = found.get("quantization_config"), found.get("expert_dtype")
    if experts is not None and experts not in EXPERT_DTYPES.values():
        raise CheckpointError("expert_dtype", repr(experts), "one of " + ", ".join(sorted({*EXPERT_DTYPES.values()})))
    if settings is None:
        if experts in ("fp4", "fp8"):
            raise CheckpointError("expert_dtype", repr(experts), "bf16, or a quantization_config")
        return "bf16" if experts == "bf16" else None
    if not isinstance(settings, dict):
        raise CheckpointError("quantization_config", settings, "an object")
    known = QUANTIZATION | (NVFP4 if settings.get("moe_quant_algo") is not None else {})
    wrong = {
        name: value
        for name, value in settings.items()
        if name not in QUANTIZATION_IGNORED | {"moe_quant_algo"} and (name not in known or value != known[name])
    }
    if wrong:
        raise CheckpointError("quantization_config", wrong, f"{known}")
    algorithm = settings.get("moe_quant_algo")
    if algorithm not in (None, "NVFP4") or settings.get("quant_method") != "fp8":
        raise CheckpointError("quantization_config", settings, "quant_method fp8, moe_quant_algo NVFP4 or none")
    if experts == "bf16" or (algorithm and experts == "fp8"):
        raise CheckpointError("expert_dtype", experts, "what agrees with quantization_config")
    if algorithm == "NVFP4":
        return "nvfp4"
    return {"fp4": "mxfp4", "fp8": "fp8", None: None}[experts]


def write_config(config: ModelConfig, form: str) -> dict[str, Any]:
    """Make config.json for a model in checkpoint format ``form``.

    Under the released names.
    """
    if form not in FORMATS:
        raise CheckpointError("form", form, "one of " + ", ".join(FORMATS))
    found: dict[str, Any] = dict(FIXED)
    found |= {name: getattr(config, ours) for name, ours in FIELDS.items()}
    found["compress_ratios"] = list(config.compress_ratios)
    rates = {name: getattr(config, ours) for name, ours in RATES.items()}
    if rates != {name: DEFAULT_RATES[ours] for name, ours in RATES.items()}:
        found["compress_rates"] = rates
    found["rope_scaling"] = None
    if config.yarn is not None:
        found["rope_scaling"] = {"type": "yarn"} | {name: getattr(config.yarn, ours) for name, ours in YARN.items()}
    found["torch_dtype"] = "bfloat16"
    return found | format_fields(form)


def format_fields(form: str) -> dict[str, Any]:
    """Make the fields of config.json that depend on the checkpoint's format."""
    found: dict[str, Any] = {"expert_dtype": EXPERT_DTYPES[form]}
    if form != "bf16":
        found["quantization_config"] = QUANTIZATION | (NVFP4 if form == "nvfp4" else {})
    return found
