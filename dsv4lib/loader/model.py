"""A whole checkpoint as a model on ops, one tensor after the other.

model = transformer(Listed.of(Checkpoint(folder)), places=1, capacity=512, backend="emulator")
"""

from __future__ import annotations

import torch

from dsv4lib import backends
from dsv4lib.config import LayerKind, ModelConfig
from dsv4lib.layers.attention import Attention
from dsv4lib.layers.decoder_layer import DecoderLayer, MhcSite
from dsv4lib.layers.step import Layout
from dsv4lib.loader import names
from dsv4lib.loader.moe import moe_layer
from dsv4lib.loader.whole import Listed, Progress, Stored
from dsv4lib.model.mtp import MtpBlock
from dsv4lib.model.transformer import Transformer
from dsv4lib.ops.mhc.op import Site


def transformer(
    listed: Listed,
    *,
    places: int = 1,
    capacity: int = 2048,
    precision: str = "fp8",
    experts: str | None = None,
    keys: str = "fp4",
    mtp: bool = False,
    backend: str = "auto",
    progress: Progress | None = None,
) -> Transformer:
    """Read a checkpoint into a model on the CPU; ``.to`` moves it.

    Args:
        listed: the checkpoint. places, capacity: requests at a time, and tokens of each.
        precision: of linear layers stored in FP8, see `layers.dense`.
        experts: mode of routed experts, a key of `layers.moe.FORMS`; None: that of their format, without loss. Shared
            experts are never rounded: bf16 with bf16, else the mode of their format.
        keys: format of indexer keys, "fp4" or "fp8".
        mtp: read the draft block, too. backend: of every op. progress: called after each layer.

    Raises:
        CheckpointError: a tensor that cannot be read. ArgumentError: a size that the kernels do not take.
    """
    config, checkpoint, done = listed.config, listed.checkpoint, 0
    by_prefix: dict[str, list[names.Weight]] = {}
    for weight in names.weights(config):
        parts = weight.name.split(".")
        prefix = ".".join(parts[:2]) if parts[0] in ("layers", "mtp") else ""
        by_prefix.setdefault(prefix, []).append(weight)

    def read(prefix: str) -> dict[str, Stored]:
        skipped = (f"{prefix}.ffn.experts.", f"{prefix}.ffn.shared_experts.", f"{prefix}.ffn.gate.")
        own = [w for w in by_prefix[prefix] if not (prefix and w.name.startswith(skipped))]
        return {w.name.removeprefix(f"{prefix}." if prefix else ""): listed.stored(w) for w in own}

    layers = []
    blocks = [(f"layers.{number}", kind) for number, kind in enumerate(config.layer_kinds)]
    for prefix, kind in [*blocks, *([(names.MTP, config.mtp_kind)] if mtp else [])]:
        tensors = read(prefix)
        layers.append(_layer(tensors, listed, prefix, kind, precision, experts, keys, backend))
        done += sum(checkpoint.entry(n).nbytes for w in by_prefix[prefix] for n in listed.parts(w))
        if progress is not None:
            progress(done, listed.nbytes, prefix)
    block = (
        MtpBlock(layers.pop(), _collapse(tensors, config, backend), tensors, config, precision, backend)
        if mtp
        else None
    )
    top, layout = read(""), Layout(places, capacity)
    given = top["embed.weight"], top["head.weight"], _collapse(top, config, backend), angles(config, capacity), layout
    return Transformer(config, layers, *given, keys, block, backend)


def _collapse(tensors: dict[str, Stored], config: ModelConfig, backend: str) -> MhcSite:
    parts = (tensors[f"hc_head_{name}"] for name in ("fn", "scale", "base"))
    return MhcSite(Site(*parts, tensors["norm.weight"]), config, backend)


def _layer(
    tensors: dict[str, Stored],
    listed: Listed,
    prefix: str,
    kind: LayerKind,
    precision: str,
    experts: str | None,
    keys: str,
    backend: str,
) -> DecoderLayer:
    config = listed.config
    own = {name.removeprefix("attn."): t for name, t in tensors.items() if name.startswith("attn.")}
    attention = Attention(config, kind, own, precision=precision, keys=keys, backend=backend)
    modes = {"precision": experts, "shared_precision": "bf16" if experts == "bf16" else None}
    moe = moe_layer(listed.checkpoint, prefix, config, **modes, backend=backend)
    return DecoderLayer(attention, moe, tensors, config, backend)


def angles(config: ModelConfig, positions: int) -> dict[LayerKind, tuple[torch.Tensor, torch.Tensor]]:
    """Cosines and sines fp32 [positions, 32] by kind of layer."""
    at, rope = torch.arange(positions), backends.oracle("rope")
    return {kind: rope.cos_sin(at, rope.layer_freqs(config, kind), torch.float32) for kind in LayerKind}
