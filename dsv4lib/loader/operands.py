"""Convert experts to operands of the grouped GEMM, and back.

In any precision mode.

    codes    [E, N, K/2] uint8 (two E2M1, low nibble = even k), [E, N, K] E4M3, or [E, N, K] bf16
    scales   [E, bytes] uint8: one 128x4 swizzled image an expert (`formats.scale_swizzle`); none for bf16
    alphas   [E, outputs] float32: global scales of the weights, gate and up separately

Of a Hopper's kernels: `tiled_weights`, [E, N / 64, K / step, bytes] of MXFP4 without scales of their own, and
`stored_weights`, of an FP8 expert gate, then up, and scales as they are stored.

The first GEMM's rows are interleaved by 8: gate rows 0-7, up rows 0-7, gate rows 8-15, ... so that the two halves of
one SwiGLU element are 8 columns apart in the accumulator. Scales follow their rows; the swizzle comes last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import scale_swizzle, weight_modes
from dsv4lib.formats.fp8_block import FP8Tensor
from dsv4lib.formats.mxfp4 import MXFP4Tensor
from dsv4lib.formats.nvfp4 import NVFP4Tensor
from dsv4lib.formats.weight_modes import ModeWeight
from dsv4lib.loader.experts import Experts
from dsv4lib.ops.moe_gemm.sm90.layout import tile_weights

INTERLEAVE = 8


@dataclass(frozen=True)
class Operand:
    """One plane of a weight as the GEMM reads it.

    Attributes:
        codes: [E, N, K/2] uint8, [E, N, K] float8_e4m3fn or bf16.
        scales: uint8 [E, scale_swizzle.swizzled_bytes(N, K / group)]; None for bf16.
        group: elements of a row that share a scale, 16, 32 or 128; 0 for bf16.
    """

    codes: torch.Tensor
    scales: torch.Tensor | None
    group: int


@dataclass(frozen=True)
class GemmWeights:
    """The weights of one grouped GEMM.

    Attributes:
        mode: key of `weight_modes.MODES`.
        planes: operands to multiply one after the other into the same accumulator.
        alphas: float32 [E, 2] (gate, up) or [E, 1] (down): the weight's global scale. The calibrated scale of NVFP4
            activations is not in it: the quantiser (`layers.moe`) knows the scale that it used.
        interleaved: rows per run of gate and up; 0 if the rows are in the checkpoint's order.
    """

    mode: str
    planes: tuple[Operand, ...]
    alphas: torch.Tensor
    interleaved: int


def interleave(gate: torch.Tensor, up: torch.Tensor, run: int = INTERLEAVE) -> torch.Tensor:
    """Interleave two [..., I, X] to [..., 2I, X].

    ``run`` rows of gate, then ``run`` of up, and so on; ``run`` divides I.
    """
    if gate.dim() < 2 or gate.shape != up.shape or gate.dtype != up.dtype:
        found = (gate.dtype, tuple(gate.shape), up.dtype, tuple(up.shape))
        raise ArgumentError("gate, up", found, "two tensors of one dtype and shape [..., I, X]")
    if run <= 0 or gate.shape[-2] % run:
        raise ArgumentError("gate.shape", tuple(gate.shape), f"rows a multiple of run={run}")
    runs = (t.unflatten(-2, (-1, run)) for t in (gate, up))
    return torch.stack(list(runs), dim=-3).flatten(-4, -2)


def deinterleave(joined: torch.Tensor, run: int = INTERLEAVE) -> tuple[torch.Tensor, torch.Tensor]:
    """Invert `interleave`: [..., 2I, X] -> gate and up [..., I, X]."""
    if joined.dim() < 2 or run <= 0 or joined.shape[-2] % (2 * run):
        raise ArgumentError("joined.shape", tuple(joined.shape), f"[..., 2I, X], rows a multiple of {2 * run}")
    runs = joined.unflatten(-2, (-1, 2, run))
    return runs[..., 0, :, :].flatten(-3, -2), runs[..., 1, :, :].flatten(-3, -2)


def gemm_weights(experts: Experts, precision: str) -> tuple[GemmWeights, GemmWeights]:
    """Make (gate and up, down) of all experts in mode ``precision``.

    Raises:
        ArgumentError: a mode that this format does not convert to, an I that is no multiple of 8, projections that do
            not fit together.
    """
    _check(experts)
    gate, up, down = (
        [weight_modes.convert(q, precision) for q in part] for part in (experts.gate, experts.up, experts.down)
    )
    first = torch.stack([torch.stack([g.alpha, u.alpha]) for g, u in zip(gate, up, strict=True)])
    second = torch.stack([d.alpha for d in down])[:, None]
    return (
        GemmWeights(precision, _planes(gate, up), first, INTERLEAVE),
        GemmWeights(precision, _planes(down), second, 0),
    )


def tiled_weights(experts: Experts, kernel: str) -> tuple[GemmWeights, GemmWeights]:
    """Convert routed experts to operands of a Hopper's grouped GEMM. Returns (gate and up interleaved, down).

    Args:
        experts: in a format that `weight_modes.convert` makes MXFP4 of. kernel: mode of the GEMM, "w4a8" or "w4a16".

    Raises:
        ArgumentError: as of `gemm_weights`; or sizes and scales that `tile_weights` does not take.
    """
    _check(experts)
    parts = experts.gate, experts.up, experts.down
    gate, up, down = ([weight_modes.convert(q, "mxfp4") for q in part] for part in parts)
    first = torch.stack([torch.stack([g.alpha, u.alpha]) for g, u in zip(gate, up, strict=True)])
    second = torch.stack([d.alpha for d in down])[:, None]
    return tuple(
        GemmWeights("mxfp4", (Operand(tile_weights(*_rows(*weights), kernel), None, 32),), alphas, run)
        for weights, alphas, run in (((gate, up), first, INTERLEAVE), ((down,), second, 0))
    )


def stored_weights(experts: Experts) -> tuple[GemmWeights, GemmWeights]:
    """Join an FP8 expert's gate and up, gate first, with scales as they are stored. Returns (both, down).

    Raises:
        ArgumentError: experts of another format, I or d that is no multiple of 128, scales of two types.
    """
    _check(experts)
    (gate, *others), up, down = experts.gate, experts.up[0], experts.down[0]
    if others or experts.format != "fp8" or any(n % 128 for n in gate.codes.shape):
        shape = tuple(getattr(gate, "packed", getattr(gate, "codes", None)).shape)
        found = f"{len(experts.gate)} in {experts.format}, w1 {shape}"
        raise ArgumentError("experts", found, "one in fp8, I and d multiples of 128")
    if len({one.scales.dtype for one in (gate, up, down)}) != 1:
        raise ArgumentError("experts", [str(one.scales.dtype) for one in (gate, up, down)], "scales of one type")
    ones = torch.ones(1, 2)
    first = Operand(torch.cat([gate.codes, up.codes])[None], torch.cat([gate.scales, up.scales])[None], 128)
    second = Operand(down.codes[None], down.scales[None], 128)
    return GemmWeights("fp8_block", (first,), ones, 0), GemmWeights("fp8_block", (second,), ones[:, :1], 0)


def _check(experts: Experts) -> None:
    """Raise ArgumentError unless every expert has three projections, alike in format and shape."""
    if not isinstance(experts, Experts):
        raise ArgumentError("experts", type(experts).__name__, "loader.experts.Experts")
    counts = [len(part) for part in (experts.gate, experts.up, experts.down)]
    if len(set(counts)) != 1 or not counts[0]:
        raise ArgumentError("experts", counts, "as many gate, up and down projections, at least one")
    for name, part in (("gate and up", (*experts.gate, *experts.up)), ("down", experts.down)):
        found = {(type(q).__name__, tuple(getattr(q, "packed", getattr(q, "codes", None)).shape)) for q in part}
        if len(found) != 1:
            raise ArgumentError(f"experts, {name}", sorted(found), "one format and one shape")


def mode_weights(weights: GemmWeights, plane_cols: int) -> list[list[ModeWeight]]:
    """Recover [gate, up] or [down] of each expert from operands.

    In its mode, ``alpha`` as in the operand.

    Args:
        weights: from `gemm_weights`.
        plane_cols: K.
    """
    out: list[list[ModeWeight]] = []
    for expert in range(weights.alphas.shape[0]):
        parts = [_split(plane, expert, plane_cols, weights.interleaved) for plane in weights.planes]
        alphas = weights.alphas[expert]
        out.append([ModeWeight(weights.mode, tuple(p[i] for p in parts), alphas[i]) for i in range(len(alphas))])
    return out


def _rows(*parts: Sequence[ModeWeight]) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and row-major scales of all experts' first plane; two parts are interleaved."""
    raw = [[plane_bytes(weight.planes[0]) for weight in part] for part in parts]
    codes, scales = ([torch.stack([one[i] for one in part]) for part in raw] for i in range(2))
    return tuple(interleave(*one) if len(one) == 2 else one[0] for one in (codes, scales))


def _planes(*parts: Sequence[ModeWeight]) -> tuple[Operand, ...]:
    """Operands of all experts, plane by plane; two parts are interleaved."""
    planes = []
    for number in range(len(parts[0][0].planes)):
        raw = [[plane_bytes(weight.planes[number]) for weight in part] for part in parts]
        codes = [torch.stack([codes for codes, _, _ in part]) for part in raw]
        joined = interleave(*codes) if len(codes) == 2 else codes[0]
        group = raw[0][0][2]
        image = None
        if group:
            scales = [torch.stack([scales for _, scales, _ in part]) for part in raw]
            image = scale_swizzle.swizzle(interleave(*scales) if len(scales) == 2 else scales[0])
        planes.append(Operand(joined, image, group))
    return tuple(planes)


def plane_bytes(plane: weight_modes.Plane) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """(codes, row-major scale bytes, elements per scale) of one plane. Bf16 has no scales, and 0 elements share one."""
    if isinstance(plane, NVFP4Tensor):
        return plane.packed.view(torch.uint8), plane.scales.view(torch.uint8), 16
    if isinstance(plane, MXFP4Tensor):
        return plane.packed.view(torch.uint8), plane.scales.view(torch.uint8), 32
    if isinstance(plane, FP8Tensor):
        return plane.codes.view(torch.float8_e4m3fn), plane.scales.view(torch.uint8), plane.tile[1]
    return plane, None, 0


def _split(operand: Operand, expert: int, cols: int, run: int) -> list[weight_modes.Plane]:
    codes = operand.codes[expert]
    halves = deinterleave(codes, run) if run else (codes,)
    if operand.scales is None:
        return list(halves)
    scales = scale_swizzle.unswizzle(operand.scales[expert], codes.shape[0], cols // operand.group)
    scale_halves = deinterleave(scales, run) if run else (scales,)
    pairs = zip(halves, scale_halves, strict=True)
    if codes.dtype == torch.float8_e4m3fn:
        return [FP8Tensor(c, s, (1, operand.group)) for c, s in pairs]
    if operand.group == 32:
        return [MXFP4Tensor(c, s) for c, s in pairs]
    return [NVFP4Tensor(c, s, torch.ones(())) for c, s in pairs]
