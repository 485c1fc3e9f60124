"""Make groups of tokens and experts that show a wrong Hopper GEMM.

They are those of `moe_gemm.inputs`, weights tiled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4lib.formats import e4m3, fp8_block, mxfp4, scale_swizzle, ue8m0
from dsv4lib.ops.moe_gemm import arguments, inputs
from dsv4lib.ops.moe_gemm.sm90.config import Config
from dsv4lib.ops.moe_gemm.sm90.layout import BLOCK, CHUNK_K, tile_weights
from dsv4lib.ops.moe_gemm.sm90.wide.config import WideE4m3Config


@dataclass
class Call(arguments.Call):
    """Tensors of a call of a kernel of tiled weights."""

    rows: torch.Tensor | None = None


def case(kernel: Config, counts: list[int], features: int, k: int, seed: int = 0) -> inputs.Case:
    """Make groups of ``counts`` tokens, ``features`` = N of the weights, ``k`` = K.

    See `moe_gemm.inputs.case`. ``rows`` are in another order.
    """
    made = inputs.case(kernel, counts, features, k, seed)
    call = made.call = Call(**vars(made.call))
    if call.w_scales is not None:
        scales = scale_swizzle.unswizzle(call.w_scales, features, k // BLOCK)
        codes = call.w
    else:
        q = mxfp4.quantize(made.w)
        codes, scales, made.w = q.packed, q.scales, mxfp4.dequantize(q, torch.float64)
    if not kernel.scaled:
        made.x = made.x.bfloat16().double()
        call.x, call.x_scales = made.x.bfloat16(), None
    if isinstance(kernel, WideE4m3Config):
        q = fp8_block.quantize_activation(made.x, CHUNK_K)
        factors = ue8m0.decode(q.scales, torch.float64).repeat_interleave(CHUNK_K, -1)
        made.x = e4m3.decode(q.codes, torch.float64) * factors
        call.x, call.x_scales = q.codes, scale_swizzle.swizzle(q.scales.repeat_interleave(CHUNK_K // BLOCK, -1))
    call.w, call.w_scales = tile_weights(codes, scales, kernel.mode_name), None
    if kernel.gather:
        _shuffle(call, seed)
    made.step = BLOCK
    return made


def _shuffle(call: Call, seed: int) -> None:
    """Have tokens in another order than the rows of groups, and one more before them."""
    count = len(call.x)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    call.rows = (order.argsort() + 1).int()
    spare = order[:1]
    call.x = torch.cat((call.x[spare], call.x[order]))
    if call.x_scales is not None:
        scales = scale_swizzle.unswizzle(call.x_scales, count, call.x.shape[1] // BLOCK)
        call.x_scales = scale_swizzle.swizzle(torch.cat((scales[spare], scales[order])))
