"""Tiny checkpoints as the two publishers lay them out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dsv4lib.formats import mxfp4, nvfp4

HIDDEN, WIDTH, EXPERTS = 256, 160, 3


def _projections() -> dict[str, tuple[int, int]]:
    return {"w1": (WIDTH, HIDDEN), "w3": (WIDTH, HIDDEN), "w2": (HIDDEN, WIDTH)}


def _weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.02 * torch.randn(shape, generator=generator) for name, shape in _projections().items()}


def _mxfp4_tensors(prefix: str) -> dict[str, torch.Tensor]:
    out = {}
    for e in range(EXPERTS):
        for name, w in _weights(e).items():
            q = mxfp4.quantize(w)
            out[f"{prefix}.ffn.experts.{e}.{name}.weight"] = q.packed.view(torch.int8)
            out[f"{prefix}.ffn.experts.{e}.{name}.scale"] = q.scales.view(torch.float8_e8m0fnu)
    return out


def _nvfp4_tensors(prefix: str) -> dict[str, torch.Tensor]:
    out = {}
    for e in range(EXPERTS):
        weights = _weights(10 + e)
        shared = nvfp4.shared_global_scale(weights["w1"], weights["w3"])
        for name, w in weights.items():
            q = nvfp4.quantize(w, None if name == "w2" else shared)
            stem = f"{prefix}.ffn.experts.{e}.{name}"
            out[f"{stem}.weight"] = q.packed
            out[f"{stem}.weight_scale"] = q.scales.view(torch.float8_e4m3fn)
            out[f"{stem}.weight_scale_2"] = q.global_scale.clone()
            out[f"{stem}.input_scale"] = torch.tensor((e + 1) / 1024 if name == "w2" else (e + 1) / 2048)
    return out


def _write(folder: Path, tensors: dict[str, torch.Tensor], config: dict | None = None, shards: int = 2) -> Path:
    """Files, index and configuration."""
    folder.mkdir(exist_ok=True)
    names = sorted(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        mine = {name: tensors[name].contiguous() for name in names[shard::shards]}
        save_file(mine, folder / file)
        weight_map |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


NVFP4_CONFIG = {"quantization_config": {"quant_method": "fp8", "moe_quant_algo": "NVFP4"}}


@pytest.fixture
def sizes() -> tuple[int, int, int]:
    """(hidden, width, experts) of the checkpoints."""
    return HIDDEN, WIDTH, EXPERTS


@pytest.fixture
def write():
    return _write


@pytest.fixture
def mxfp4_tensors():
    return _mxfp4_tensors


@pytest.fixture
def nvfp4_tensors():
    return _nvfp4_tensors


@pytest.fixture
def deepseek(tmp_path: Path) -> Path:
    """A layer in DeepSeek's format."""
    return _write(tmp_path / "deepseek", _mxfp4_tensors("layers.3"))


@pytest.fixture
def nvidia(tmp_path: Path) -> Path:
    """A layer in NVIDIA's format and the MTP block, which stays MXFP4."""
    return _write(tmp_path / "nvidia", _nvfp4_tensors("layers.3") | _mxfp4_tensors("mtp.0"), NVFP4_CONFIG)
