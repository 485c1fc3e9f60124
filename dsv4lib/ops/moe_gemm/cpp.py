"""Expand FP4 weights to E4M3 by the kernel in CUDA C++ (`kernel.cu`). It is mode "e4m3_expand" of the weights.

The oracle is `dsv4lib.formats.weight_modes.convert`; all codes agree. What the DSL's GEMMs do in registers, tile by
tile, this does once in memory. `FAULTS` are texts to inject, by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib.dsl.cpp import CppKernel, Edit, Int64
from dsv4lib.dsl.tensors import starts_on
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import mxfp4, nvfp4
from dsv4lib.formats.fp8_block import FP8Tensor
from dsv4lib.formats.mxfp4 import MXFP4Tensor
from dsv4lib.formats.nvfp4 import NVFP4Tensor
from dsv4lib.ops.common import cpp, launching

SOURCE = Path(__file__).with_name("kernel.cu")
THREADS, BLOCK = 128, 32
FAULTS = {
    "sign_lost": Edit("(codes & 0x800u) << 12 | ", ""),
    "table_wrong": Edit("0x4c484440u", "0x4c484640u"),
    "nibbles_swapped": Edit(">> 16 * (i % 2)", ">> 16 * (1 - i % 2)"),
    "end_unchecked": Edit("  if (block >= blocks) return;\n", ""),
}
FAULTS_OF_NVFP4 = {
    "scale_of_512": Edit("ue8m0(amax, kE4m3Max)", "ue8m0(amax, 0x44000000u)"),
    "one_group_for_both": Edit(" + i / GROUP]", "]"),
    "nan_hidden": Edit(
        "max(amax, __float_as_uint(fabsf(values[i])))",
        "__float_as_uint(fmaxf(__uint_as_float(amax), fabsf(values[i])))",
    ),
}


class Arguments(NamedTuple):
    """Parameters of the kernel. blocks: of 32 weights."""

    packed: Tensor
    scales: Tensor
    codes: Tensor
    new_scales: Tensor
    blocks: Int64


def kernel(group: int, *edits: Edit) -> CppKernel:
    """Return the kernel for scales that 16 (NVFP4) or 32 weights (MXFP4) share."""
    return CppKernel(SOURCE, "expand_fp4", Arguments, THREADS, defines=(("GROUP", group),), edits=edits)


def expand(q: MXFP4Tensor | NVFP4Tensor, backend: str = "auto", *edits: Edit) -> FP8Tensor:
    """Expand weights [..., N, K] to E4M3 codes with an E8M0 scale for 32 of K.

    Args:
        q: MXFP4, or NVFP4, whose global scale stays apart; K a multiple of 32, contiguous, on 16 bytes.
        backend: "native", "emulator", or "auto": native, else emulator. edits: faults to inject.

    Returns:
        codes uint8 [..., N, K], scales uint8 [..., N, K / 32].

    Raises:
        ArgumentError: a tensor of the wrong type, shape or stride.
        BackendUnavailable: the back end cannot run here.
    """
    if not isinstance(q, MXFP4Tensor | NVFP4Tensor):
        raise ArgumentError("q", type(q).__name__, "an MXFP4Tensor or an NVFP4Tensor")
    group = mxfp4.BLOCK if isinstance(q, MXFP4Tensor) else nvfp4.BLOCK
    packed, scales = (x.view(torch.uint8) if x.element_size() == 1 else x for x in (q.packed, q.scales))
    *lead, half = packed.shape or (0,)
    if not packed.dim() or half % (BLOCK // 2) or not packed.is_contiguous() or not starts_on(packed, 16):
        raise ArgumentError("q.packed", tuple(packed.shape), "contiguous [..., K / 2] on 16 bytes, K a multiple of 32")
    launching.check(
        {
            "q.packed": (packed, torch.uint8, tuple(packed.shape)),
            "q.scales": (scales, torch.uint8, (*lead, 2 * half // group)),
        }
    )
    if not scales.is_contiguous():
        raise ArgumentError("q.scales.stride()", scales.stride(), "a contiguous tensor")
    found = cpp.resolve(backend, "q.packed", packed)
    codes = packed.new_empty(*lead, 2 * half)
    new_scales = packed.new_empty(*lead, 2 * half // BLOCK)
    blocks = new_scales.numel()
    if blocks:
        grid = cpp.Grid(-(-blocks // THREADS))
        cpp.launch(found, kernel(group, *edits), grid, Arguments(packed, scales, codes, new_scales, blocks))
    return FP8Tensor(codes, new_scales, (1, BLOCK))
