"""Make groups of tokens and experts that show a wrong Hopper GEMM.

They are those of `moe_gemm.inputs`, weights tiled.
"""

from __future__ import annotations

import torch

from dsv4lib.formats import mxfp4, scale_swizzle
from dsv4lib.ops.moe_gemm import inputs
from dsv4lib.ops.moe_gemm.sm90.config import Config
from dsv4lib.ops.moe_gemm.sm90.layout import BLOCK, tile_weights


def case(kernel: Config, counts: list[int], features: int, k: int, seed: int = 0) -> inputs.Case:
    """Make groups of ``counts`` tokens, ``features`` = N of the weights, ``k`` = K.

    See `moe_gemm.inputs.case`.
    """
    made = inputs.case(kernel, counts, features, k, seed)
    call = made.call
    if call.w_scales is not None:
        scales = scale_swizzle.unswizzle(call.w_scales, features, k // BLOCK)
        codes = call.w
    else:
        q = mxfp4.quantize(made.w)
        codes, scales, made.w = q.packed, q.scales, mxfp4.dequantize(q, torch.float64)
    if not kernel.scaled:
        made.x = made.x.bfloat16().double()
        call.x, call.x_scales = made.x.bfloat16(), None
    call.w, call.w_scales = tile_weights(codes, scales, kernel.mode_name), None
    made.step = BLOCK
    return made
