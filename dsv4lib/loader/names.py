"""List every tensor of a DeepSeek-V4 checkpoint by name, shape and type.

Roles decide how a weight is stored (sources: the released Pro listing; NVIDIA's NVFP4 checkpoints):

| role   | which                                                             | mxfp4, nvfp4 | fp8 (``-Base``) | bf16 |
|--------|-------------------------------------------------------------------|--------------|-----------------|------|
| linear | attention, indexer queries, shared experts, ``e_proj``, ``h_proj``  | FP8 + scale  | FP8 + scale     | bf16 |
| expert | routed experts                                                    | see `stored` | FP8 + scale     | bf16 |
| plain  | embedding, head, norms, gate, compressors, ``weights_proj``         | bf16         | bf16            | bf16 |
| exact  | mHC, sinks, ``ape``, gate bias                                      | fp32         | fp32            | fp32 |
| table  | ``tid2eid``                                                         | int64        | int64           | int64|

NVFP4 is the format of the backbone's routed experts only: those of ``mtp.*`` stay MXFP4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from dsv4lib.config import LayerKind, ModelConfig
from dsv4lib.errors import ArgumentError

FORMATS = ("mxfp4", "nvfp4", "fp8", "bf16")
TILE = 128
MTP = "mtp.0"


class Weight(NamedTuple):
    """One tensor of the model, whatever it is stored as.

    Attributes:
        name: as in the checkpoint, ``.weight`` included. shape: of the values. role: see the module.
    """

    name: str
    shape: tuple[int, ...]
    role: str


class Spec(NamedTuple):
    """What one stored tensor must be.

    Attributes:
        dtypes: allowed, the first one is written. shape: sizes; a scalar may also have the shape (1,).
    """

    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensor in its first dtype."""
        return math.prod(self.shape) * self.dtypes[0].itemsize


def weights(config: ModelConfig) -> Iterator[Weight]:
    """Yield all tensors of a model, MTP block included."""
    c = config
    yield Weight("embed.weight", (c.vocab, c.hidden), "plain")
    yield Weight("head.weight", (c.vocab, c.hidden), "plain")
    yield Weight("norm.weight", (c.hidden,), "plain")
    yield from _collapse(c, "")
    for layer, kind in enumerate(c.layer_kinds):
        yield from _layer(c, f"layers.{layer}", kind, c.is_hash_layer(layer))
    yield from _layer(c, MTP, c.mtp_kind, False)
    for name in ("e_proj", "h_proj"):
        yield Weight(f"{MTP}.{name}.weight", (c.hidden, c.hidden), "linear")
    for name in ("enorm", "hnorm", "norm"):
        yield Weight(f"{MTP}.{name}.weight", (c.hidden,), "plain")
    yield from _collapse(c, f"{MTP}.")


def _collapse(c: ModelConfig, prefix: str) -> Iterator[Weight]:
    yield Weight(f"{prefix}hc_head_fn", (c.hc_mult, c.hc_mult * c.hidden), "exact")
    yield Weight(f"{prefix}hc_head_base", (c.hc_mult,), "exact")
    yield Weight(f"{prefix}hc_head_scale", (1,), "exact")


def _layer(c: ModelConfig, prefix: str, kind: LayerKind, by_hash: bool) -> Iterator[Weight]:
    for site in ("attn", "ffn"):
        yield Weight(f"{prefix}.{site}_norm.weight", (c.hidden,), "plain")
        yield Weight(f"{prefix}.hc_{site}_fn", (c.mix_width, c.hc_mult * c.hidden), "exact")
        yield Weight(f"{prefix}.hc_{site}_base", (c.mix_width,), "exact")
        yield Weight(f"{prefix}.hc_{site}_scale", (3,), "exact")
    yield from _attention(c, f"{prefix}.attn", kind)
    gate = f"{prefix}.ffn.gate"
    yield Weight(f"{gate}.weight", (c.n_experts, c.hidden), "plain")
    if by_hash:
        yield Weight(f"{gate}.tid2eid", (c.vocab, c.experts_per_token), "table")
    else:
        yield Weight(f"{gate}.bias", (c.n_experts,), "exact")
    yield from _expert(f"{prefix}.ffn.shared_experts", c.hidden, c.n_shared_experts * c.expert_width, "linear")
    for expert in range(c.n_experts):
        yield from _expert(f"{prefix}.ffn.experts.{expert}", c.hidden, c.expert_width, "expert")


def _expert(stem: str, hidden: int, width: int, role: str) -> Iterator[Weight]:
    yield Weight(f"{stem}.w1.weight", (width, hidden), role)
    yield Weight(f"{stem}.w3.weight", (width, hidden), role)
    yield Weight(f"{stem}.w2.weight", (hidden, width), role)


def _attention(c: ModelConfig, stem: str, kind: LayerKind) -> Iterator[Weight]:
    outputs = c.o_groups * c.o_lora_rank
    linears = {
        "wq_a": (c.q_lora_rank, c.hidden),
        "wq_b": (c.n_heads * c.head_dim, c.q_lora_rank),
        "wkv": (c.head_dim, c.hidden),
        "wo_a": (outputs, c.group_width),
        "wo_b": (c.hidden, outputs),
    }
    for name, shape in linears.items():
        yield Weight(f"{stem}.{name}.weight", shape, "linear")
    yield Weight(f"{stem}.q_norm.weight", (c.q_lora_rank,), "plain")
    yield Weight(f"{stem}.kv_norm.weight", (c.head_dim,), "plain")
    yield Weight(f"{stem}.attn_sink", (c.n_heads,), "exact")
    overlap = 2 if kind is LayerKind.CSA else 1
    if kind is not LayerKind.SWA:
        yield from _compressor(c, f"{stem}.compressor", c.head_dim, overlap, c.rate(kind))
    if kind is LayerKind.CSA:
        yield Weight(f"{stem}.indexer.wq_b.weight", (c.index_heads * c.index_dim, c.q_lora_rank), "linear")
        yield Weight(f"{stem}.indexer.weights_proj.weight", (c.index_heads, c.hidden), "plain")
        yield from _compressor(c, f"{stem}.indexer.compressor", c.index_dim, overlap, c.csa_rate)


def _compressor(c: ModelConfig, stem: str, dim: int, overlap: int, rate: int) -> Iterator[Weight]:
    for name in ("wkv", "wgate"):
        yield Weight(f"{stem}.{name}.weight", (overlap * dim, c.hidden), "plain")
    yield Weight(f"{stem}.ape", (rate, overlap * dim), "exact")
    yield Weight(f"{stem}.norm.weight", (dim,), "plain")


def stored_as(weight: Weight, form: str) -> str:
    """Return how a weight is stored in checkpoint format ``form``. It is mxfp4, nvfp4, fp8, bf16, fp32 or int64."""
    if form not in FORMATS:
        raise ArgumentError("form", form, "one of " + ", ".join(FORMATS))
    if weight.role in ("plain", "exact", "table"):
        return {"plain": "bf16", "exact": "fp32", "table": "int64"}[weight.role]
    if form == "bf16":
        return "bf16"
    if weight.role == "linear" or form == "fp8":
        return "fp8"
    return "mxfp4" if weight.name.startswith("mtp.") else form


def specs(weight: Weight, stored: str) -> dict[str, Spec]:
    """Return the stored tensors of one weight by name.

    Raises:
        ArgumentError: a width that the format's blocks do not divide.
    """
    name, shape = weight.name, weight.shape
    if stored in ("bf16", "fp32", "int64"):
        return {name: Spec(({"bf16": torch.bfloat16, "fp32": torch.float32, "int64": torch.int64}[stored],), shape)}
    stem, (rows, cols) = name.removesuffix(".weight"), shape
    if stored == "fp8":
        tiles = (-(-rows // TILE), -(-cols // TILE))
        return {
            name: Spec((torch.float8_e4m3fn,), shape),
            f"{stem}.scale": Spec((torch.float8_e8m0fnu, torch.float32), tiles),
        }
    block = 32 if stored == "mxfp4" else 16
    if cols % block:
        raise ArgumentError(name, shape, f"columns that are a multiple of {block}, for {stored}")
    if stored == "mxfp4":
        return {
            name: Spec((torch.int8,), (rows, cols // 2)),
            f"{stem}.scale": Spec((torch.float8_e8m0fnu,), (rows, cols // block)),
        }
    return {
        name: Spec((torch.uint8,), (rows, cols // 2)),
        f"{stem}.weight_scale": Spec((torch.float8_e4m3fn,), (rows, cols // block)),
        f"{stem}.weight_scale_2": Spec((torch.float32,), ()),
        f"{stem}.input_scale": Spec((torch.float32,), ()),
    }


def listing(config: ModelConfig, form: str) -> dict[str, Spec]:
    """Return all stored tensors of a checkpoint in format ``form``, by name."""
    return {n: spec for w in weights(config) for n, spec in specs(w, stored_as(w, form)).items()}
