"""Load the MoE layer of a checkpoint. Gate, bias or table, routed and shared experts, each in its precision.

    layer = moe_layer(Checkpoint(folder), "layers.3", FLASH)
    y = layer(x)                  # the first layers have a table instead of a bias: layer(x, token_ids)

| tensor of ``{prefix}.ffn``        | what                                                            |
|-----------------------------------|-----------------------------------------------------------------|
| ``gate.weight``                   | bf16 [E, d]                                                     |
| ``gate.bias`` or ``gate.tid2eid`` | fp32 [E], for the selection; or int64 [V, k], experts by token  |
| ``experts.{e}``                   | see `experts`                                                   |
| ``shared_experts``                | see `experts`                                                   |

One checkpoint makes operands for either architecture, ``arch``: that of the GPU, unless said. What they have of routed
experts: of MXFP4, NVFP4 and FP8 on Blackwell; of MXFP4 on a Hopper, which refuses the others by name.
"""

from __future__ import annotations

import torch

from dsv4lib.config import ModelConfig
from dsv4lib.errors import ArgumentError
from dsv4lib.layers import experts as layers
from dsv4lib.layers.communicator import SINGLE, Groups
from dsv4lib.layers.dense import HOPPER, target
from dsv4lib.layers.experts import FP8_BLOCK, HOPPER_FORMS
from dsv4lib.layers.moe import Moe
from dsv4lib.loader.checkpoint import Checkpoint
from dsv4lib.loader.experts import Experts, expert_format, largest_input_scale, read_experts, read_shared, refuse
from dsv4lib.loader.operands import gemm_weights, stored_weights, tiled_weights
from dsv4lib.loader.safetensors import CheckpointError
from dsv4lib.loader.share import Share

PRECISION = {"nvfp4": "nvfp4", "mxfp4": "mxfp4", "fp8": "e4m3_expand"}  # of a format: all are exact
HOPPER_PRECISION = {"mxfp4": "mxfp4"}  # of a format of routed experts that a Hopper has a kernel for


def moe_layer(
    checkpoint: Checkpoint,
    prefix: str,
    config: ModelConfig,
    *,
    precision: str | None = None,
    shared_precision: str | None = None,
    backend: str = "auto",
    arch: str | None = None,
    share: Share | None = None,
    groups: Groups = SINGLE,
) -> Moe:
    """Read the MoE layer ``prefix`` into a module on the CPU; ``.to`` moves it.

    Args:
        checkpoint: to read.
        prefix: of the layer: ``layers.N`` or ``mtp.N``.
        config: sizes of the model.
        precision: key of `weight_modes.MODES`, of the routed experts; None: that of their format, without loss. On a
            Hopper of `layers.experts.HOPPER_FORMS`.
        shared_precision: of the shared expert, likewise; on a Hopper "fp8_block".
        backend: of every op.
        arch: whose operands to make, "sm_100a", "sm_103a" or "sm_90a"; None: that of the back end.
        share: what this rank reads; None: all of it. groups: the ranks that have the rest.

    Raises:
        CheckpointError: a tensor that is missing, or of another type or shape, or holds what it must not.
        ArgumentError: a precision that the stored format does not convert to, or that the architecture does not have.
    """
    arch = target(arch, backend)
    gate, bias, table = _gate(checkpoint, prefix, config)
    hidden, width = config.hidden, config.expert_width
    precision = _precision(expert_format(checkpoint, prefix), precision, arch)
    share = Share(config) if share is None else share
    routed = read_experts(checkpoint, prefix, share.experts.of(config.n_experts), hidden, width)
    if share.experts.count > 1 and routed.input_scales is not None:  # x is quantised for all experts alike
        routed.input_scales[:, 0] = largest_input_scale(checkpoint, prefix, config.n_experts)
    shared = read_shared(checkpoint, prefix, hidden, share.shared_width, share.shared_part)
    if shared_precision is None:
        shared_precision = FP8_BLOCK if arch == HOPPER else PRECISION[shared.format]
    elif arch == HOPPER and shared_precision != FP8_BLOCK:
        raise ArgumentError("shared_precision", shared_precision, f"{FP8_BLOCK} on {arch}")
    if precision == "nvfp4" and routed.input_scales is None:
        raise ArgumentError("precision", precision, f"another for {routed.format} experts: no input_scale is stored")
    return Moe(
        gate,
        bias,
        layer_experts(routed, precision, arch),
        precision,
        shared=layer_experts(shared, shared_precision, arch),
        shared_precision=shared_precision,
        table=table,
        k=config.experts_per_token,
        factor=config.routed_scaling,
        limit=config.swiglu_limit,
        backend=backend,
        arch=arch,
        groups=groups,
        divided=share.divides_shared,
    )


def _precision(form: str, wanted: str | None, arch: str) -> str:
    """Choose the mode of routed experts in format ``form``."""
    if arch != HOPPER:
        return PRECISION[form] if wanted is None else wanted
    if wanted is None and form not in HOPPER_PRECISION:
        raise ArgumentError("arch", arch, f"another for {form} experts: a Hopper's kernel takes mxfp4")
    if wanted is not None and wanted not in HOPPER_FORMS:
        raise ArgumentError("precision", wanted, f"one of {', '.join(HOPPER_FORMS)} on {arch}")
    return HOPPER_PRECISION[form] if wanted is None else wanted


def layer_experts(experts: Experts, precision: str, arch: str = "sm_100a") -> layers.Experts:
    """Convert stored experts to what `layers.moe.Moe` takes. They are in mode ``precision`` of ``arch``.

    Raises:
        ArgumentError: a mode that this format does not convert to, an I that is no multiple of 8.
    """
    if arch != HOPPER:
        found = gemm_weights(experts, precision)
    elif precision == FP8_BLOCK:
        found = stored_weights(experts)
    else:
        found = tiled_weights(experts, HOPPER_FORMS[precision][0])
    first, second = (
        layers.Weights(tuple((plane.codes, plane.scales) for plane in weights.planes), weights.alphas)
        for weights in found
    )
    return layers.Experts(first, second, None if arch == HOPPER else experts.input_scales)


def _gate(
    checkpoint: Checkpoint, prefix: str, config: ModelConfig
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The router: (weight, bias or None, table or None)."""
    stem, count = f"{prefix}.ffn.gate", config.n_experts
    gate = checkpoint.get(f"{stem}.weight", (torch.bfloat16,), (count, config.hidden))
    refuse(f"{stem}.weight", gate, ~gate.isfinite(), lambda value: value, "finite numbers")
    biased, hashed = (f"{stem}.{name}" in checkpoint for name in ("bias", "tid2eid"))
    if biased == hashed:
        raise CheckpointError(stem, "bias and tid2eid" if biased else "neither bias nor tid2eid", "one of both")
    if biased:
        bias = checkpoint.get(f"{stem}.bias", (torch.float32,), (count,))
        refuse(f"{stem}.bias", bias, ~bias.isfinite(), lambda value: value, "finite numbers")
        return gate, bias, None
    table = checkpoint.get(f"{stem}.tid2eid", (torch.int64,), (config.vocab, config.experts_per_token))
    refuse(f"{stem}.tid2eid", table, (table < 0) | (table >= count), lambda value: value, f"0 to {count - 1}")
    return gate, None, table
