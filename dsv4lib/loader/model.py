"""A whole checkpoint as a model on ops, one tensor after the other.

model = transformer(Listed.of(Checkpoint(folder)), places=1, capacity=512, backend="emulator")
"""

from __future__ import annotations

import math

from dsv4lib.config import LayerKind, ModelConfig
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import rotary, scale_swizzle
from dsv4lib.layers.attention import Attention
from dsv4lib.layers.decoder_layer import DecoderLayer, MhcSite
from dsv4lib.layers.dense import BLOCK, HOPPER, TILE, target
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
    keys: str | None = None,
    mtp: bool = False,
    backend: str = "auto",
    arch: str | None = None,
    batch_invariant: bool | None = None,
    progress: Progress | None = None,
) -> Transformer:
    """Read a checkpoint into a model on the CPU; ``.to`` moves it.

    Args:
        listed: the checkpoint. places, capacity: requests at a time, and tokens of each.
        precision: of linear layers stored in FP8, see `layers.dense`.
        experts: mode of routed experts, see `loader.moe`; None: that of their format, without loss. Shared experts are
            never rounded: bf16 with bf16, else the mode of their format.
        keys: format of indexer keys, "fp4" or "fp8"; None: that which the architecture has a kernel for, FP4 first.
        mtp: read the draft block, too. backend: of every op. progress: called after each layer.
        arch: whose operands to make, "sm_100a", "sm_103a" or "sm_90a"; None: that of the back end. What an op has no
            kernel for on it is refused when it runs.
        batch_invariant: the bits of a token do not depend on how many are in its step, see `batch_invariance`; False:
            kernels are the fastest for each step; None: True where the architecture can.

    Raises:
        CheckpointError: a tensor that cannot be read. ArgumentError: a size that the kernels do not take, or
            ``batch_invariant`` where the architecture cannot.
    """
    config, checkpoint, done = listed.config, listed.checkpoint, 0
    arch = target(arch, backend)
    keys, fixed = keys or key_format(arch), batch_invariance(batch_invariant, arch)
    by_prefix: dict[str, list[names.Weight]] = {}
    for weight in names.weights(config):
        by_prefix.setdefault(_prefix(weight), []).append(weight)

    def read(prefix: str) -> dict[str, Stored]:
        skipped = (f"{prefix}.ffn.experts.", f"{prefix}.ffn.shared_experts.", f"{prefix}.ffn.gate.")
        own = [w for w in by_prefix[prefix] if not (prefix and w.name.startswith(skipped))]
        return {w.name.removeprefix(f"{prefix}." if prefix else ""): listed.stored(w) for w in own}

    layers = []
    blocks = [(f"layers.{number}", kind) for number, kind in enumerate(config.layer_kinds)]
    for prefix, kind in [*blocks, *([(names.MTP, config.mtp_kind)] if mtp else [])]:
        tensors = read(prefix)
        layers.append(_layer(tensors, listed, prefix, kind, precision, experts, keys, backend, arch, fixed))
        done += sum(checkpoint.entry(n).nbytes for w in by_prefix[prefix] for n in listed.parts(w))
        if progress is not None:
            progress(done, listed.nbytes, prefix)
    block = (
        MtpBlock(layers.pop(), _collapse(tensors, config, backend, fixed), tensors, config, precision, backend, arch)
        if mtp
        else None
    )
    top, layout = read(""), Layout(places, capacity)
    collapse, angles = _collapse(top, config, backend, fixed), rotary.tables(config, capacity)
    given = top["embed.weight"], top["head.weight"], collapse, angles
    return Transformer(config, layers, *given, layout, keys, block, backend, arch)


def key_format(arch: str) -> str:
    """Choose the format of indexer keys that ``arch`` has a kernel for: FP4, on a Hopper FP8."""
    return "fp8" if arch == HOPPER else "fp4"


def batch_invariance(wanted: bool | None, arch: str) -> bool:
    """Choose whether the bits of a token may depend on how many are in its step. None: they do not where it can be.

    On Blackwell two ops choose kernels by the number of tokens that add in other orders: mHC has two variants, and
    attention splits its keys. Both can be fixed. On a Hopper linear layers split K by the number of tokens, too.

    Raises:
        ArgumentError: True on a Hopper.
    """
    if wanted and arch == HOPPER:
        raise ArgumentError("batch_invariant", wanted, f"False or None on {HOPPER}: linear splits K by tokens")
    return arch != HOPPER if wanted is None else wanted


def model_bytes(listed: Listed, capacity: int, mtp: bool = False, arch: str = "sm_100a") -> int:
    """Count bytes of the model that `transformer` makes for ``arch`` in default modes.

    From headers alone.
    """
    tables = 2 * 4 * len(LayerKind) * capacity * (listed.config.rope_dim // 2)
    return tables + sum(_operand_bytes(w, listed.form, arch) for w in _weights(listed.config, mtp))


def reading_bytes(listed: Listed, mtp: bool = False) -> int:
    """Count the bytes of the largest layer as it is stored.

    They are in memory beside the model while it is read.
    """
    layers: dict[str, int] = {}
    for weight in _weights(listed.config, mtp):
        stored = sum(listed.checkpoint.entry(name).nbytes for name in listed.parts(weight))
        prefix = _prefix(weight)
        layers[prefix] = layers.get(prefix, 0) + stored
    return max(layers.values())


def _weights(config: ModelConfig, mtp: bool) -> list[names.Weight]:
    return [w for w in names.weights(config) if mtp or not w.name.startswith(names.MTP)]


def _prefix(weight: names.Weight) -> str:
    """Stem of a weight's layer; nothing for those of no layer."""
    stem = weight.name.split(".")[:2]
    return ".".join(stem) if stem[0] in ("layers", "mtp") else ""


def _operand_bytes(weight: names.Weight, form: str, arch: str) -> int:
    """Count the bytes of a weight as its op reads it: fp32 vectors, scales of 32 or 16 elements, or bf16."""
    stored, size = names.stored_as(weight, form), math.prod(weight.shape)
    if stored in ("fp32", "int64") or len(weight.shape) == 1:
        return size * (8 if stored == "int64" else 4)
    columns = weight.shape[1]
    if stored == "bf16" or (weight.role == "linear" and "shared_experts" not in weight.name and columns % 128):
        return 2 * size
    if arch == HOPPER:  # scales beside tiles of weights, or as they are stored
        return size + math.prod(-(-n // TILE) for n in weight.shape) if stored == "fp8" else size // 2 + size // BLOCK
    block, share = {"fp8": (32, 1), "mxfp4": (32, 2), "nvfp4": (16, 2)}[stored]
    return size // share + scale_swizzle.swizzled_bytes(weight.shape[0], columns // block)


def _collapse(tensors: dict[str, Stored], config: ModelConfig, backend: str, batch_invariant: bool) -> MhcSite:
    parts = (tensors[f"hc_head_{name}"] for name in ("fn", "scale", "base"))
    return MhcSite(Site(*parts, tensors["norm.weight"]), config, backend, batch_invariant=batch_invariant)


def _layer(
    tensors: dict[str, Stored],
    listed: Listed,
    prefix: str,
    kind: LayerKind,
    precision: str,
    experts: str | None,
    keys: str,
    backend: str,
    arch: str,
    batch_invariant: bool,
) -> DecoderLayer:
    config = listed.config
    own = {name.removeprefix("attn."): t for name, t in tensors.items() if name.startswith("attn.")}
    common = {"backend": backend, "arch": arch}
    attention = Attention(config, kind, own, precision=precision, keys=keys, **common, batch_invariant=batch_invariant)
    modes = {"precision": experts, "shared_precision": "bf16" if experts == "bf16" else None}
    moe = moe_layer(listed.checkpoint, prefix, config, **modes, **common)
    return DecoderLayer(attention, moe, tensors, config, backend, batch_invariant)
