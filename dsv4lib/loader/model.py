"""A whole checkpoint as a model on ops, one tensor after the other.

model = transformer(Listed.of(Checkpoint(folder)), places=1, capacity=512, backend="emulator")

A rank of several reads its share alone (`loader.share`); `dsv4lib.parallel` makes shares and groups from a plan.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from dsv4lib.config import LayerKind, ModelConfig
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import rotary, scale_swizzle
from dsv4lib.layers.attention import Attention
from dsv4lib.layers.communicator import SINGLE, Groups
from dsv4lib.layers.decoder_layer import DecoderLayer, MhcSite
from dsv4lib.layers.dense import BLOCK, HOPPER, TILE, target
from dsv4lib.layers.step import Layout
from dsv4lib.loader import names
from dsv4lib.loader.moe import moe_layer
from dsv4lib.loader.share import Share
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
    share: Share | None = None,
    groups: Groups = SINGLE,
) -> Transformer:
    """Read a checkpoint into a model on the CPU; ``.to`` moves it.

    Args:
        listed: the checkpoint. places, capacity: requests at a time, and tokens of each.
        precision: of linear layers stored in FP8, see `layers.dense`.
        experts: mode of routed experts, see `loader.moe`; None: that of their format, without loss. Shared experts are
            never rounded: bf16 with bf16, else the mode of their format.
        keys: format of indexer keys, "fp4" or "fp8"; None: FP4, on a Hopper FP8 (`key_format`).
        mtp: read the draft block, too. backend: of every op. progress: called after each layer.
        arch: whose operands to make, "sm_100a", "sm_103a" or "sm_90a"; None: that of the back end. What an op has no
            kernel for on it is refused when it runs.
        batch_invariant: the bits of a token do not depend on how many are in its step, see `batch_invariance`; False:
            kernels are the fastest for each step; None: True where the architecture can.
        share: what this rank reads; None: everything. groups: the ranks that have the rest.

    Raises:
        CheckpointError: a tensor that cannot be read. ArgumentError: a size that the kernels do not take, or
            ``batch_invariant`` where the architecture cannot.
    """
    config, done = listed.config, 0
    arch, share = target(arch, backend), Share(listed.config) if share is None else share
    keys, fixed = keys or key_format(arch), batch_invariance(batch_invariant, arch)
    by_prefix: dict[str, list[names.Weight]] = {}
    for weight in names.weights(config):
        by_prefix.setdefault(_prefix(weight), []).append(weight)

    def read(prefix: str) -> dict[str, Stored]:
        skipped = (f"{prefix}.ffn.experts.", f"{prefix}.ffn.shared_experts.", f"{prefix}.ffn.gate.")
        own = [w for w in by_prefix[prefix] if not (prefix and w.name.startswith(skipped))]
        return {w.name.removeprefix(f"{prefix}." if prefix else ""): listed.stored(w, share.cut(w)) for w in own}

    total = sum(share.stored_bytes(w, listed.specs(w)) for w in names.weights(config))
    build = _Build(listed, precision, experts, keys, backend, arch, share, groups, fixed)
    layers = []
    blocks = [(f"layers.{number}", kind) for number, kind in enumerate(config.layer_kinds)]
    for prefix, kind in [*blocks, *([(names.MTP, config.mtp_kind)] if mtp else [])]:
        tensors = read(prefix)
        layers.append(_layer(tensors, prefix, kind, build))
        done += sum(share.stored_bytes(w, listed.specs(w)) for w in by_prefix[prefix])
        if progress is not None:
            progress(done, total, prefix)
    block = (
        MtpBlock(layers.pop(), _collapse(tensors, config, backend, fixed), tensors, config, precision, backend, arch)
        if mtp
        else None
    )
    top, layout = read(""), Layout(places, capacity)
    collapse, angles = _collapse(top, config, backend, fixed), rotary.tables(config, capacity)
    given = top["embed.weight"], top["head.weight"], collapse, angles
    return Transformer(config, layers, *given, layout, keys, block, backend, arch, groups)


def key_format(arch: str) -> str:
    """Choose the format of indexer keys: FP4, as the model was trained; on a Hopper, which has no FP4 MMA, FP8."""
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


def model_bytes(
    listed: Listed, capacity: int, mtp: bool = False, arch: str = "sm_100a", share: Share | None = None
) -> int:
    """Count bytes of the model that `transformer` makes for ``arch`` in default modes.

    From headers alone.
    """
    tables = 2 * 4 * len(LayerKind) * capacity * (listed.config.rope_dim // 2)
    share = Share(listed.config) if share is None else share
    held = (share.part(w) for w in _weights(listed.config, mtp) if share.holds(w))
    return tables + sum(_operand_bytes(w, listed.form, arch) for w in held)


def reading_bytes(listed: Listed, mtp: bool = False, share: Share | None = None) -> int:
    """Count the bytes of the largest layer as it is stored.

    They are in memory beside the model while it is read.
    """
    layers: dict[str, int] = {}
    share = Share(listed.config) if share is None else share
    for weight in _weights(listed.config, mtp):
        prefix = _prefix(weight)
        layers[prefix] = layers.get(prefix, 0) + share.stored_bytes(weight, listed.specs(weight))
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


class _Build(NamedTuple):
    """What all layers are made with: see `transformer`."""

    listed: Listed
    precision: str
    experts: str | None
    keys: str
    backend: str
    arch: str
    share: Share
    groups: Groups
    batch_invariant: bool


def _layer(tensors: dict[str, Stored], prefix: str, kind: LayerKind, build: _Build) -> DecoderLayer:
    config, backend = build.listed.config, build.backend
    given = {"backend": backend, "arch": build.arch}
    own = {name.removeprefix("attn."): t for name, t in tensors.items() if name.startswith("attn.")}
    how = {"precision": build.precision, "keys": build.keys, "batch_invariant": build.batch_invariant}
    attention = Attention(build.share.local, kind, own, **how, **given, group=build.groups.tensor)
    modes = {"precision": build.experts, "shared_precision": "bf16" if build.experts == "bf16" else None}
    parts = {"share": build.share, "groups": build.groups}
    moe = moe_layer(build.listed.checkpoint, prefix, config, **modes, **given, **parts)
    return DecoderLayer(attention, moe, tensors, config, backend, build.batch_invariant)
