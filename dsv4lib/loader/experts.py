"""Read the experts of a checkpoint, routed and shared.

Each in the format that it is stored in.

Tensors of ``{prefix}.ffn.experts.{e}.{w1,w3,w2}`` and ``{prefix}.ffn.shared_experts.{w1,w3,w2}`` (w1 gate, w3 up, w2
down):

    DeepSeek   weight int8 [N, K/2], low nibble = even k; scale E8M0 [N, K/32]                              MXFP4
    NVIDIA     weight uint8 [N, K/2]; weight_scale E4M3 [N, K/16]; weight_scale_2, input_scale fp32 scalars  NVFP4
    shared     weight E4M3 [N, K]; scale E8M0 (in ``-Base`` checkpoints fp32) [ceil(N/128), ceil(K/128)]       FP8

The shared experts are FP8 in both checkpoints, the routed ones in ``-Base`` checkpoints. The decision is made per
module: NVIDIA's checkpoint keeps the experts of ``mtp.*`` in MXFP4. ``weight`` alone says nothing of the two FP4
formats, which share its name and packing; ``weight_scale_2`` decides, and ``moe_quant_algo`` of the configuration,
where there is one, must agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import e4m3, fp8_block, mxfp4, nvfp4, ue8m0
from dsv4lib.formats.fp8_block import FP8Tensor
from dsv4lib.formats.mxfp4 import MXFP4Tensor
from dsv4lib.formats.nvfp4 import NVFP4Tensor
from dsv4lib.loader.checkpoint import Checkpoint
from dsv4lib.loader.safetensors import CheckpointError, Cut

GATE, UP, DOWN = "w1", "w3", "w2"
Stored = NVFP4Tensor | MXFP4Tensor | FP8Tensor


@dataclass(frozen=True)
class Experts:
    """Experts of one layer, the routed or the shared ones.

    Attributes:
        format: ``nvfp4``, ``mxfp4`` or ``fp8``.
        gate, up: [I, d] each, one tensor an expert. down: [d, I].
        input_scales: float32 [E, 2]: calibrated scale of the activations that enter gate and up, and down; None for
            formats other than NVFP4, whose activations are scaled as they come.
    """

    format: str
    gate: tuple[Stored, ...]
    up: tuple[Stored, ...]
    down: tuple[Stored, ...]
    input_scales: torch.Tensor | None


def expert_format(checkpoint: Checkpoint, prefix: str, expert: int = 0) -> str:
    """Find the format (``nvfp4``, ``mxfp4``, ``fp8``) of one expert. Projections and configuration must agree.

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
            raise CheckpointError(stem, said, "one of both: NVFP4 has weight_scale_2, MXFP4 and FP8 have scale")
        fp8 = checkpoint.entry(f"{stem}.weight").dtype == torch.float8_e4m3fn
        found.add("nvfp4" if nv else "fp8" if fp8 else "mxfp4")
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
    """Read some routed experts of a layer.

    Args:
        checkpoint: to read.
        prefix: of the layer: ``layers.N`` or ``mtp.N``.
        experts: their numbers, all in one format.
        hidden: d, a multiple of 32. width: I, a multiple of 32.

    Raises:
        CheckpointError: a tensor is missing, has another dtype or shape, or a scale that is NaN, Inf, negative or,
            where one counts for a whole tile or tensor, 0; experts in two formats; w1 and w3 with different input
            scales, which one GEMM cannot serve.
    """
    _check_sizes(hidden, width)
    if not isinstance(experts, Iterable) or isinstance(experts, torch.Tensor):
        raise ArgumentError("experts", experts, "numbers of experts")
    numbers = tuple(experts)
    if not numbers or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers):
        raise ArgumentError("experts", numbers, "numbers of experts, 0 or more, at least one")
    if len(set(numbers)) != len(numbers):
        raise ArgumentError("experts", numbers, "each once")
    kinds = {expert: expert_format(checkpoint, prefix, expert) for expert in numbers}
    if len(set(kinds.values())) != 1:
        raise CheckpointError(f"{prefix}.ffn.experts", kinds, "one format for all of them")
    kind = kinds[numbers[0]]
    return _read(checkpoint, kind, [f"{prefix}.ffn.experts.{number}" for number in numbers], hidden, width)


def read_shared(checkpoint: Checkpoint, prefix: str, hidden: int, width: int, part: range | None = None) -> Experts:
    """Read the shared expert of a layer, FP8 in every public checkpoint.

    Args:
        checkpoint: to read.
        prefix: of the layer: ``layers.N`` or ``mtp.N``.
        hidden: d, a multiple of 32. width: I, a multiple of 32; of several shared experts their sum, as stored.
        part: of the width that is read; None: all of it.

    Raises:
        CheckpointError: see `read_experts`.
    """
    _check_sizes(hidden, width)
    return _read(checkpoint, "fp8", [f"{prefix}.ffn.shared_experts"], hidden, width, part)


def largest_input_scale(checkpoint: Checkpoint, prefix: str, count: int) -> torch.Tensor:
    """Find the largest calibrated scale of what enters a layer's NVFP4 experts: fp32 scalar."""
    return torch.stack(
        [_scalar(checkpoint, f"{prefix}.ffn.experts.{e}.{GATE}.input_scale") for e in range(count)]
    ).amax()


def _check_sizes(hidden: int, width: int) -> None:
    for name, size in (("hidden", hidden), ("width", width)):
        if not isinstance(size, int) or isinstance(size, bool) or size <= 0 or size % mxfp4.BLOCK:
            raise ArgumentError(name, size, f"a positive multiple of {mxfp4.BLOCK}")


def _read(
    checkpoint: Checkpoint, kind: str, stems: list[str], hidden: int, width: int, part: range | None = None
) -> Experts:
    """Experts by the beginning of their tensors' names; of the width ``part`` alone."""
    shapes = {GATE: (width, hidden), UP: (width, hidden), DOWN: (hidden, width)}
    cuts = {} if part is None else {GATE: Cut(part), UP: Cut(part), DOWN: Cut(range(hidden), part)}
    parts: dict[str, list] = {GATE: [], UP: [], DOWN: []}
    inputs = []
    for stem in stems:
        scales = {}
        for projection, shape in shapes.items():
            cut = cuts.get(projection)
            tensor, scales[projection] = read_projection(checkpoint, kind, f"{stem}.{projection}", *shape, cut)
            parts[projection].append(tensor)
        if kind == "nvfp4":
            if scales[GATE] != scales[UP]:
                raise CheckpointError(
                    f"{stem}.{UP}.input_scale", float(scales[UP]), f"that of w1, {float(scales[GATE])}"
                )
            inputs.append(torch.stack([scales[GATE], scales[DOWN]]))
    stacked = torch.stack(inputs) if inputs else None
    return Experts(kind, tuple(parts[GATE]), tuple(parts[UP]), tuple(parts[DOWN]), stacked)


def read_projection(
    checkpoint: Checkpoint, kind: str, stem: str, rows: int, cols: int, cut: Cut | None = None
) -> tuple[Stored, torch.Tensor | None]:
    """Read a quantised weight [rows, cols] of format ``kind``. Returns (weight, input scale of NVFP4 or None).

    Args:
        cut: part of an FP8 weight that is read; None: all of it.

    Raises:
        CheckpointError: see `read_experts`. ArgumentError: a part of a weight of another format.
    """
    if cut is not None:
        if kind != "fp8":
            raise ArgumentError("cut", cut, f"None for {kind}: experts are divided whole")
        return _read_fp8(checkpoint, stem, rows, cols, cut)
    read = {"nvfp4": _read_nvfp4, "mxfp4": _read_mxfp4, "fp8": _read_fp8}[kind]
    return read(checkpoint, stem, rows, cols)


def _read_mxfp4(checkpoint: Checkpoint, stem: str, rows: int, cols: int) -> tuple[MXFP4Tensor, None]:
    weight = checkpoint.get(f"{stem}.weight", (torch.int8,), (rows, cols // 2))
    scales = _e8m0(checkpoint, f"{stem}.scale", (rows, cols // mxfp4.BLOCK))
    return MXFP4Tensor(weight.view(torch.uint8), scales), None


def _read_nvfp4(checkpoint: Checkpoint, stem: str, rows: int, cols: int) -> tuple[NVFP4Tensor, torch.Tensor]:
    weight = checkpoint.get(f"{stem}.weight", (torch.uint8,), (rows, cols // 2))
    name = f"{stem}.weight_scale"
    scales = checkpoint.get(name, (torch.float8_e4m3fn,), (rows, cols // nvfp4.BLOCK)).view(torch.uint8)
    # The tensor core reads the byte as UE4M3: it has no sign, and one NaN.
    refuse(name, scales, scales >= e4m3.NAN, e4m3.decode, "0 or more, no NaN, no sign")
    global_scale, input_scale = (_scalar(checkpoint, f"{stem}.{n}") for n in ("weight_scale_2", "input_scale"))
    return NVFP4Tensor(weight, scales, global_scale), input_scale


def _read_fp8(
    checkpoint: Checkpoint, stem: str, rows: int, cols: int, cut: Cut | None = None
) -> tuple[FP8Tensor, None]:
    name, tile = f"{stem}.weight", fp8_block.WEIGHT_TILE
    codes = checkpoint.get(name, (torch.float8_e4m3fn,), (rows, cols), cut).view(torch.uint8)
    refuse(name, codes, codes & e4m3.NAN == e4m3.NAN, e4m3.decode, "no NaN")
    name, shape = f"{stem}.scale", (-(-rows // tile[0]), -(-cols // tile[1]))
    tiles = None if cut is None else Cut(_tiles(cut.rows, tile[0]), _tiles(cut.columns or range(cols), tile[1]))
    if checkpoint.entry(name).dtype != torch.float32:
        scales = _e8m0(checkpoint, name, shape, torch.float32, cut=tiles)
    else:
        scales = checkpoint.get(name, (torch.float32,), shape, tiles)
        refuse(name, scales, ~(scales.isfinite() & (scales > 0)), lambda value: value, "positive and finite")
    if cut is None:
        return FP8Tensor(codes, scales, tile), None
    rows_each, scales = _aligned(scales, 0, cut.rows, tile[0])
    cols_each, scales = _aligned(scales, 1, cut.columns or range(cols), tile[1])
    return FP8Tensor(codes, scales, (rows_each, cols_each)), None


def _tiles(part: range, each: int) -> range:
    return range(part.start // each, -(-part.stop // each))


def _aligned(scales: torch.Tensor, dim: int, part: range, each: int) -> tuple[int, torch.Tensor]:
    """Make tiles small enough that one begins where a part does: (its size, scales of the part along ``dim``)."""
    size = math.gcd(part.start, each)
    scales = scales if size == each else scales.repeat_interleave(each // size, dim)
    return size, scales.narrow(dim, part.start % each // size, -(-len(part) // size)).contiguous()


def _e8m0(
    checkpoint: Checkpoint, name: str, shape: tuple[int, ...], *also: torch.dtype, cut: Cut | None = None
) -> torch.Tensor:
    """Bytes of E8M0 scales; ``also``: what else the tensor may be, for the error's text."""
    scales = checkpoint.get(name, (torch.float8_e8m0fnu, *also), shape, cut).view(torch.uint8)
    refuse(name, scales, scales == ue8m0.NAN, ue8m0.decode, "no NaN (byte 255)")
    return scales


def refuse(
    name: str, x: torch.Tensor, wrong: torch.Tensor, value: Callable[[torch.Tensor], torch.Tensor], allowed: str
) -> None:
    """Raise CheckpointError with the first place where ``wrong``. ``value``: what the element stands for."""
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        raise CheckpointError(f"{name}[{', '.join(map(str, at))}]", value(x[at]).item(), allowed)


def _scalar(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    shape = (1,) if name in checkpoint and checkpoint.entry(name).shape == (1,) else ()  # both are written
    value = checkpoint.get(name, (torch.float32,), shape).reshape(())
    if not (bool(value.isfinite()) and float(value) > 0):
        raise CheckpointError(name, float(value), "positive and finite")
    return value
