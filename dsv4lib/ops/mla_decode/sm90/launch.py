"""Run `mla_decode` on a Hopper: one launch, or the splits and their combination."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4lib.ops.common import compile_cache, launching
from dsv4lib.ops.common import splits as split_choice
from dsv4lib.ops.fmha import arguments as fmha_arguments
from dsv4lib.ops.fmha.combine import Combine, loads_at_once
from dsv4lib.ops.mla_decode.sm90 import arguments
from dsv4lib.ops.mla_decode.sm90.config import TILE_M, TILE_N, V_DIM
from dsv4lib.ops.mla_decode.sm90.kernel import MlaDecode
from dsv4lib.ops.mla_decode.splits import MOST_SPLITS

ARCHS = ("sm_90a",)
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
TILE = split_choice.Tile(1.9, 1.9, 0.0)  # microseconds of 64 tokens, assumed


def choose_splits(batch: int, heads: int, capacity: int, sms: int) -> int:
    """Choose splits of the tokens by shapes alone, as `ops.common.splits` does.

    An item is a CTA, not a cluster of two as on Blackwell, and a CTA has 64 heads.

    Args:
        batch, heads: B, H. capacity: tokens that a row of the page table can name. sms: of the GPU.
    """
    units = batch * -(-heads // TILE_M)
    return min(split_choice.choose(units, -(-capacity // TILE_N), sms, tile=TILE).keys, MOST_SPLITS)


def splits_of(call: Any, sms: int) -> int:
    """Return the splits of a call. Those that it names, else as many as suit and as its workspace holds."""
    if call.num_kv_splits >= 1:
        return call.num_kv_splits
    batch, heads, _ = call.q_nope.shape
    return held_splits(choose_splits(batch, heads, call.capacity, sms), call.workspace, batch, heads)


def held_splits(splits: int, workspace: Tensor | None, batch: int, heads: int) -> int:
    """Return as many of the splits as a workspace has room for, at least one; all without a workspace."""
    if workspace is None:
        return splits
    return max(1, min(splits, workspace.nbytes // (4 * batch * heads * (V_DIM + 1))))


def settings_of(call: Any) -> dict[str, Any]:
    """Make options of the kernel, unsplit. FP8 queries are multiplied in fp16, which holds them exactly."""
    fp8 = call.kv_cache.dtype not in DTYPES
    settings = {"dtype": DTYPES.get(call.q_nope.dtype, "fp16"), "page": call.page_size}
    if fp8:
        settings["cache"] = "fp8"
    if call.q_nope.dtype not in DTYPES:
        settings |= {"queries": "fp8", "out": DTYPES[call.out.dtype]}
    return settings


def launch(name: str, call: Any) -> None:
    """Launch once, or the splits and their combination.

    Args:
        name: of the back end. call: of `mla_decode`, checked.
    """
    (batch, heads, _), stream = call.q_nope.shape, launching.stream(name, call.q_nope)
    sms = launching.sm_count(call.q_nope.device) if name == "native" else split_choice.HOPPER_SM_COUNT
    splits, settings = splits_of(call, sms), settings_of(call)
    o, lse = (call.out, call.lse) if splits == 1 else call.partial(splits)
    kernel, code = _code(name, MlaDecode, settings | {"partial": splits > 1}, arguments.fake_args)
    launching.enqueue(name, code, arguments.launch_args(kernel, call, o, lse, splits, stream))
    if splits > 1:
        ends = combining(DTYPES[call.out.dtype], loads_at_once(splits, batch * heads))
        kernel, code = _code(name, Combine, ends, fmha_arguments.fake_args)
        given = fmha_arguments.combine_args(kernel, o, lse, None, None, call.out, call.lse, stream=stream)
        launching.enqueue(name, code, given)


def combining(dtype: str, at_once: int) -> dict[str, Any]:
    """Make options of the kernel that adds splits up."""
    return {"head_dim": V_DIM, "dtype": dtype, "sink": False, "inverse_rope": False, "at_once": at_once}


def _code(name: str, kernel_type: type, settings: dict[str, Any], fake_args: Any) -> tuple[Any, Any]:
    return compile_cache.default().get(kernel_type, settings, fake_args, launching.arch(name, ARCHS))
