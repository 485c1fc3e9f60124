"""The routed experts of a checkpoint, each projection in the format that the checkpoint stores it in.

Tensors of ``{prefix}.ffn.experts.{e}.{w1,w3,w2}`` (w1 gate, w3 up, w2 down):

    DeepSeek   weight int8 [N, K/2], low nibble = even k; scale E8M0 [N, K/32]                              MXFP4
    NVIDIA     weight uint8 [N, K/2]; weight_scale E4M3 [N, K/16]; weight_scale_2, input_scale fp32 scalars  NVFP4

The decision is made per module: NVIDIA's checkpoint keeps the experts of ``mtp.*`` in MXFP4. ``weight`` alone says
nothing, both formats share its name and packing; ``weight_scale_2`` decides, and ``moe_quant_algo`` of the
configuration, where there is one, must agree.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import mxfp4, nvfp4
from dsv4lib.formats.mxfp4 import MXFP4Tensor
from dsv4lib.formats.nvfp4 import NVFP4Tensor
from dsv4lib.loader.checkpoint import Checkpoint
from dsv4lib.loader.safetensors import CheckpointError

GATE, UP, DOWN = "w1", "w3", "w2"


@dataclass(frozen=True)
class Experts:
    """Routed experts of one layer.

    Attributes:
        format: ``nvfp4`` or ``mxfp4``.
        gate, up: [I, d] each, one tensor an expert. down: [d, I].
        input_scales: float32 [E, 2]: calibrated scale of the activations that enter gate and up, and down; None for
            MXFP4, whose activations are scaled as they come.
    """

    format: str
    gate: tuple[NVFP4Tensor | MXFP4Tensor, ...]
    up: tuple[NVFP4Tensor | MXFP4Tensor, ...]
    down: tuple[NVFP4Tensor | MXFP4Tensor, ...]
    input_scales: torch.Tensor | None


def expert_format(checkpoint: Checkpoint, prefix: str, expert: int = 0) -> str:
    """``nvfp4`` or ``mxfp4``, from the tensors of one expert; all three projections and the configuration must agree.

    Args:
        checkpoint: to look into.
        prefix: of the layer: ``layers.N`` or ``mtp.N``.
        expert: whose tensors decide.
    """
    found = set()
    for projection in (GATE, UP, DOWN):
        stem = f"{prefix}.ffn.experts.{expert}.{projection}"
        checkpoint.entry(f"{stem}.weight")
        nv, mx = (f"{stem}.{name}" in checkpoint for name in ("weight_scale_2", "scale"))
        if nv == mx:
            said = "weight_scale_2 and scale" if nv else "neither weight_scale_2 nor scale"
            raise CheckpointError(stem, said, "one of both: NVFP4 has weight_scale_2, MXFP4 has scale")
        found.add("nvfp4" if nv else "mxfp4")
    if len(found) != 1:
        raise CheckpointError(f"{prefix}.ffn.experts.{expert}", "projections in two formats", "one format an expert")
    (kind,) = found
    settings = checkpoint.config.get("quantization_config")
    algorithm = settings.get("moe_quant_algo") if isinstance(settings, dict) else None
    wanted = "nvfp4" if algorithm == "NVFP4" and not prefix.startswith("mtp.") else "mxfp4"
    if algorithm is not None and kind != wanted:
        said = f"{kind} tensors under moe_quant_algo {algorithm!r}"
        raise CheckpointError(f"{prefix}.ffn.experts.{expert}", said, wanted)
    return kind


def read_experts(checkpoint: Checkpoint, prefix: str, experts: Iterable[int], hidden: int, width: int) -> Experts:
    """Some routed experts of a layer.

    Args:
        checkpoint: to read.
        prefix: of the layer: ``layers.N`` or ``mtp.N``.
        experts: their numbers, all in one format.
        hidden: d, a multiple of 32. width: I, a multiple of 32.

    Raises:
        CheckpointError: a tensor is missing, has another dtype or shape, or a scale that is not positive and finite;
            experts in two formats; w1 and w3 with different input scales, which one GEMM cannot serve.
    """
    for name, size in (("hidden", hidden), ("width", width)):
        if size <= 0 or size % mxfp4.BLOCK:
            raise ArgumentError(name, size, f"a positive multiple of {mxfp4.BLOCK}")
    numbers = tuple(experts)
    if not numbers:
        raise ArgumentError("experts", numbers, "at least one")
    kinds = {expert: expert_format(checkpoint, prefix, expert) for expert in numbers}
    if len(set(kinds.values())) != 1:
        raise CheckpointError(f"{prefix}.ffn.experts", kinds, "one format for all of them")
    kind = kinds[numbers[0]]
    shapes = {GATE: (width, hidden), UP: (width, hidden), DOWN: (hidden, width)}
    read = _read_nvfp4 if kind == "nvfp4" else _read_mxfp4
    parts: dict[str, list] = {GATE: [], UP: [], DOWN: []}
    inputs = []
    for expert in numbers:
        scales = {}
        for projection, shape in shapes.items():
            stem = f"{prefix}.ffn.experts.{expert}.{projection}"
            tensor, scales[projection] = read(checkpoint, stem, *shape)
            parts[projection].append(tensor)
        if kind == "nvfp4":
            if scales[GATE] != scales[UP]:
                stem = f"{prefix}.ffn.experts.{expert}"
                raise CheckpointError(
                    f"{stem}.{UP}.input_scale", float(scales[UP]), f"that of w1, {float(scales[GATE])}"
                )
            inputs.append(torch.stack([scales[GATE], scales[DOWN]]))
    stacked = torch.stack(inputs) if inputs else None
    return Experts(kind, tuple(parts[GATE]), tuple(parts[UP]), tuple(parts[DOWN]), stacked)


def _read_mxfp4(checkpoint: Checkpoint, stem: str, rows: int, cols: int) -> tuple[MXFP4Tensor, None]:
    weight = checkpoint.get(f"{stem}.weight", (torch.int8,), (rows, cols // 2))
    scales = checkpoint.get(f"{stem}.scale", (torch.float8_e8m0fnu,), (rows, cols // mxfp4.BLOCK))
    return MXFP4Tensor(weight.view(torch.uint8), scales.view(torch.uint8)), None


def _read_nvfp4(checkpoint: Checkpoint, stem: str, rows: int, cols: int) -> tuple[NVFP4Tensor, torch.Tensor]:
    weight = checkpoint.get(f"{stem}.weight", (torch.uint8,), (rows, cols // 2))
    scales = checkpoint.get(f"{stem}.weight_scale", (torch.float8_e4m3fn,), (rows, cols // nvfp4.BLOCK))
    global_scale, input_scale = (_scalar(checkpoint, f"{stem}.{n}") for n in ("weight_scale_2", "input_scale"))
    return NVFP4Tensor(weight, scales.view(torch.uint8), global_scale), input_scale


def _scalar(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    shape = (1,) if name in checkpoint and checkpoint.entry(name).shape == (1,) else ()  # both are written
    value = checkpoint.get(name, (torch.float32,), shape).reshape(())
    if not (bool(value.isfinite()) and float(value) > 0):
        raise CheckpointError(name, float(value), "positive and finite")
    return value
