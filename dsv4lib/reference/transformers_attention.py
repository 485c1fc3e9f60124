"""Capture inputs and outputs of attention in transformers' DeepSeek-V4.

Attention has its real dimensions.

What it attends to in layers, and what it makes of it.

`transformers_parity` compares whole models; this module stops the peer inside its attention layers, so that a kernel
can be given exactly what the peer's attention function was given. Head count, head dimension, rotation, window and
rates are the released ones; only what does not reach attention (hidden size, experts, vocabulary) is small, and top-k
is below the number of entries, so that the indexer really selects.

Source: transformers 5.23.0 ``models/deepseek_v4``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsv4lib.config import FLASH, LayerKind, ModelConfig
from dsv4lib.reference.transformers_parity import build_model

SCHEDULE = (LayerKind.SWA, LayerKind.CSA, LayerKind.HCA)


@dataclass(frozen=True)
class AttentionCall:
    """One call of one layer's attention, one sequence.

    Attributes:
        kind: of the layer.
        q: [T, H, D]; kv: [S, D], window keys first, then compressed entries, both keys and values.
        window_keys: how many of S are window keys.
        visible: bool [T, S].
        sinks: [H]; scale: of the dot products; cos, sin: [T, 32] of the queries' positions.
        output: [T, H, D], the peer's in fp32. rotated: the same after its inverse RoPE.
        again: the peer's attention function with this mask and these sinks, of other q and kv.
    """

    kind: LayerKind
    q: Tensor
    kv: Tensor
    window_keys: int
    visible: Tensor
    sinks: Tensor
    scale: float
    cos: Tensor
    sin: Tensor
    output: Tensor
    rotated: Tensor
    again: Any

    def peer(self, dtype: torch.dtype, rounded: torch.dtype) -> Tensor:
        """Call the peer's attention function in ``dtype``: [T, H, D].

        q and kv were rounded to ``rounded``.
        """
        return self.again(self.q.to(rounded).to(dtype), self.kv.to(rounded).to(dtype))


def real_attention(heads: int = 64, top_k: int = 48) -> ModelConfig:
    """Make dimensions of DeepSeek-V4-Flash wherever attention sees them.

    Small ones elsewhere.
    """
    return replace(
        FLASH,
        n_layers=3,
        hidden=128,
        vocab=64,
        n_heads=heads,
        q_lora_rank=48,
        o_lora_rank=16,
        index_heads=16,
        index_dim=64,
        index_topk=top_k,
        n_experts=4,
        experts_per_token=2,
        expert_width=32,
        n_hash_layers=1,
        compress_ratios=(0, 4, 128, 0),
    )


def attention_calls(config: ModelConfig, sizes: Sequence[int], seed: int = 0) -> list[list[AttentionCall]]:
    """Run the peer on one random sequence, cut into calls of ``sizes`` tokens.

    Returns its layers' attention of each call.
    """
    from transformers import DynamicCache

    rng = torch.Generator().manual_seed(seed)
    model = build_model(config, rng)
    tokens = torch.randint(config.vocab, (1, sum(sizes)), generator=rng)
    cache = DynamicCache(config=model.config)
    calls: list[list[AttentionCall]] = []
    with torch.no_grad():
        for chunk in tokens.split(list(sizes), dim=1):
            with _recorded(model, calls := [*calls, []]):
                model(input_ids=chunk, past_key_values=cache, use_cache=True)
    return calls


@contextmanager
def _recorded(model: Any, calls: list[list[AttentionCall]]) -> Iterator[None]:
    """The peer's attention function notes what it is given; hooks note the rotation and the number of entries."""
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as peer

    eager, kinds, handles, seen = peer.eager_attention_forward, iter(SCHEDULE), [], {}

    def before(layer: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        seen["cos"], seen["sin"] = kwargs["position_embeddings"][layer.rope_layer_type]
        seen["entries"] = 0

    def compressed(_module: Any, _args: tuple, output: tuple[Tensor, Tensor]) -> None:
        seen["entries"] = output[0].shape[2]

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **others: Any
    ) -> tuple[Tensor, Tensor]:
        out = eager(module, query, key, value, mask, scaling, **others)
        cos, sin = seen["cos"], seen["sin"]
        rotated = peer.apply_rotary_pos_emb(out[0].transpose(1, 2), cos, -sin).transpose(1, 2)

        def again(q: Tensor, kv: Tensor) -> Tensor:
            sinks = module.sinks.data
            module.sinks.data = sinks.to(q.dtype)
            try:
                keys = kv[None, None]
                with torch.no_grad():
                    return eager(module, q.transpose(0, 1)[None], keys, keys, mask.to(q.dtype), scaling)[0][0]
            finally:
                module.sinks.data = sinks

        calls[-1].append(
            AttentionCall(
                kind=next(kinds),
                q=query[0].transpose(0, 1).contiguous(),
                kv=key[0, 0],
                window_keys=key.shape[2] - seen["entries"],
                visible=mask[0, 0] > torch.finfo(mask.dtype).min / 2,
                sinks=module.sinks.detach().clone(),
                scale=scaling,
                cos=cos[0, :, :32].contiguous(),
                sin=sin[0, :, :32].contiguous(),
                output=out[0][0],
                rotated=rotated[0],
                again=again,
            )
        )
        return out

    for layer in model.model.layers:
        handles.append(layer.self_attn.register_forward_pre_hook(before, with_kwargs=True))
        if layer.self_attn.compressor is not None:
            handles.append(layer.self_attn.compressor.register_forward_hook(compressed))
    peer.eager_attention_forward = attention
    try:
        yield
    finally:
        peer.eager_attention_forward = eager
        for handle in handles:
            handle.remove()
