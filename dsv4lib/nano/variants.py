"""Change the reference model by precisions and selections. Weights, activations, KV entries, indexer, picks.

Every variant changes one thing; arithmetic stays fp32. Base is a checkpoint's weights, dequantised. NVFP4 variants
start from those values by NVIDIA's recipe, w1 and w3 of an expert sharing a global scale. So on a checkpoint in MXFP4
the MXFP4 rows are exactly 0, and the NVFP4 rows show what a second rounding costs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from dsv4lib.config import LayerKind, ModelConfig
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import fp8_block, hadamard, indexer_key, kv_entry, mxfp4, nvfp4, turbo4, weight_modes
from dsv4lib.loader import names
from dsv4lib.reference import compressor, topk
from dsv4lib.reference.model import ReferenceModel

Values = Mapping[str, torch.Tensor]
KV_GLOBAL = 2.0**-6  # of NVFP4 entries: normed values stay below 2688 / 64 = 42


@dataclass(frozen=True)
class Variant:
    """One row of the evaluation.

    Attributes:
        name, group: as shown. weights: makes the weights from the base. kv, index: codecs of `ReferenceModel`.
        activations: round inputs of linears and experts to FP8. select: a key of `SELECTIONS`, "" for the indexer.
    """

    name: str
    group: str
    weights: Callable[[ModelConfig, Values], dict[str, torch.Tensor]] | None = None
    kv: Callable[[torch.Tensor], torch.Tensor] | None = None
    index: Callable[[torch.Tensor], torch.Tensor] | None = None
    activations: bool = False
    select: str = ""


def fp8_linears(config: ModelConfig, base: Values) -> dict[str, torch.Tensor]:
    """Return the linears of attention, shared experts and MTP in FP8, 128 x 128."""
    roles = {weight.name: weight.role for weight in names.weights(config)}
    return {
        name: fp8_block.dequantize(fp8_block.quantize(value)) if roles[name] == "linear" else value
        for name, value in base.items()
    }


def experts_in(mode: str) -> Callable[[ModelConfig, Values], dict[str, torch.Tensor]]:
    """Return the routed experts in ``mode``. It is mxfp4, or a mode of `weight_modes` made from NVFP4."""

    def change(config: ModelConfig, base: Values) -> dict[str, torch.Tensor]:
        out = dict(base)
        for name in (weight.name for weight in names.weights(config) if weight.role == "expert"):
            if mode == "mxfp4":
                out[name] = mxfp4.fake_quantize(base[name])
                continue
            pair = [base[name]]
            if ".w2." not in name:
                pair.append(base[name.replace(".w1.", ".w3.") if ".w1." in name else name.replace(".w3.", ".w1.")])
            stored = nvfp4.quantize(base[name], nvfp4.shared_global_scale(*pair))
            out[name] = weight_modes.dequantize(weight_modes.convert(stored, mode))
        return out

    return change


def _shipped(config: ModelConfig, base: Values) -> dict[str, torch.Tensor]:
    return experts_in("mxfp4")(config, fp8_linears(config, base))


def _kv_bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def _kv_nvfp4(x: torch.Tensor) -> torch.Tensor:
    nope = nvfp4.fake_quantize(x[..., : kv_entry.NOPE].contiguous(), KV_GLOBAL)
    return torch.cat((nope, _kv_bf16(x[..., kv_entry.NOPE :])), -1)


def _kv_turbo4(kind: turbo4.Latent) -> Callable[[torch.Tensor], torch.Tensor]:
    def codec(x: torch.Tensor) -> torch.Tensor:
        return turbo4.decode_latent(turbo4.encode_latent(x, kind), kind, dtype=x.dtype)

    return codec


def _index_fp8(x: torch.Tensor) -> torch.Tensor:
    return indexer_key.decode_fp8(*indexer_key.encode_fp8(hadamard.transform(x)))


def _index_fp4(x: torch.Tensor) -> torch.Tensor:
    return indexer_key.decode_fp4(*indexer_key.encode_fp4(hadamard.transform(x)))


VARIANTS = (
    Variant("fp8 linears", "weights", fp8_linears),
    Variant("fp8 activations", "activations", activations=True),
    Variant("experts mxfp4", "weights", experts_in("mxfp4")),
    Variant("experts nvfp4", "weights", experts_in("nvfp4")),
    Variant("experts nvfp4 as e4m3_expand", "weights", experts_in("e4m3_expand")),
    Variant("experts nvfp4 as ue8m0_naive", "weights", experts_in("ue8m0_naive")),
    Variant("fp8 linears, experts mxfp4", "weights", _shipped),
    Variant("kv bf16", "kv", kv=_kv_bf16),
    Variant("kv fp8, 584 bytes", "kv", kv=kv_entry.fake_quantize),
    Variant("kv nvfp4", "kv", kv=_kv_nvfp4),
    Variant("kv turbo4, 354 bytes", "kv", kv=_kv_turbo4(turbo4.Latent.MIXED)),
    Variant("kv turbo4, 258 bytes", "kv", kv=_kv_turbo4(turbo4.Latent.ROTATED)),
    Variant("indexer fp8", "indexer", index=_index_fp8),
    Variant("indexer fp4", "indexer", index=_index_fp4),
    Variant("select none", "selection", select="none"),
    Variant("select random", "selection", select="random"),
    Variant("select recent", "selection", select="recent"),
    Variant("select oracle", "selection", select="oracle"),
)


def named(wanted: str) -> Variant:
    """Look up the variant of a name; ArgumentError for any other word."""
    for variant in VARIANTS:
        if variant.name == wanted:
            return variant
    raise ArgumentError("variant", wanted, "one of " + ", ".join(v.name for v in VARIANTS))


class _RoundedInputs(TorchFunctionMode):
    """Rounds the input of every product with one of the given weights to FP8, 1 x 128."""

    def __init__(self, weights: set[int]):
        super().__init__()
        self.weights = weights

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is linear and args[1].data_ptr() in self.weights:
            args = (fp8_block.fake_quantize(args[0].contiguous()), *args[1:])
        elif func is torch.einsum and args[-1].data_ptr() in self.weights:  # the grouped output projection
            args = (args[0], fp8_block.fake_quantize(args[1].contiguous()), *args[2:])
        return func(*args, **(kwargs or {}))


def model_of(config: ModelConfig, values: Values, variant: Variant | None = None) -> ReferenceModel:
    """Return the reference model of a variant, on the device of the values. None: the base."""
    changed = variant.weights(config, values) if variant and variant.weights else values
    model = ReferenceModel(config, kv_codec=variant and variant.kv, index_codec=variant and variant.index)
    model.load_state_dict(dict(changed))
    return model.to(next(iter(values.values())).device)


@contextlib.contextmanager
def applied(model: ReferenceModel, variant: Variant | None, tokens: torch.Tensor) -> Iterator[None]:
    """Install what a variant changes during a forward pass. It has ``tokens`` from position 0."""
    with contextlib.ExitStack() as stack:
        if variant is not None and variant.activations:
            roles = {weight.name: weight.role for weight in names.weights(model.config)}
            pointers = {p.data_ptr() for n, p in model.named_parameters() if roles[n] in ("linear", "expert")}
            stack.enter_context(_RoundedInputs(pointers))
        if variant is not None and variant.select:
            for layer in model.config.layers_of(LayerKind.CSA):
                hook = _selection(model, layer, variant.select, tokens)
                stack.callback(model.layers[layer].attn.indexer.register_forward_hook(hook).remove)
        yield


def _selection(model: ReferenceModel, layer: int, how: str, tokens: torch.Tensor) -> Callable:
    """Forward hook of an indexer that replaces its picks ``[B, T, k]``.

    The oracle picks by attention with all entries visible, from a pass of its own; with several CSA layers the later
    ones see streams in which the earlier ones selected by the indexer.
    """
    c = model.config
    mass = _attention_mass(model, layer, tokens) if how == "oracle" else None
    seeded = torch.Generator().manual_seed(7)

    def hook(module: torch.nn.Module, inputs: tuple, picks: torch.Tensor) -> torch.Tensor:
        x, _, _, positions, *_ = inputs
        if how == "none":
            return torch.full_like(picks, -1)
        count = (int(positions[-1]) + 1) // c.csa_rate
        shape = (*x.shape[:2], count)
        if how == "recent":
            scores = torch.arange(count, device=x.device, dtype=torch.float32).expand(shape).contiguous()
        elif how == "random":
            scores = torch.rand(shape, generator=seeded).to(x.device)
        else:
            scores = mass
        return topk.topk(scores, c.index_topk, compressor.visible_count(positions, c.csa_rate))

    return hook


def _attention_mass(model: ReferenceModel, layer: int, tokens: torch.Tensor) -> torch.Tensor:
    """Share of each head's attention to compressed entries, summed over heads: ``[B, T, entries]``."""
    c, seen = model.config, {}
    model(tokens, capture=seen)
    q, entries = seen[f"layers.{layer}.q"], seen[f"layers.{layer}.compressed"]
    limit = compressor.visible_count(torch.arange(tokens.shape[1], device=q.device), c.csa_rate)
    hidden = torch.arange(entries.shape[1], device=q.device) >= limit[:, None]
    logits = torch.einsum("bthd,bsd->bths", q, entries) * c.head_dim**-0.5
    return logits.masked_fill(hidden[:, None], -math.inf).softmax(-1).nan_to_num(0.0).sum(2)
