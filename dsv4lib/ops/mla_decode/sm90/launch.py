"""Run `mla_decode` on a Hopper. `mla_decode` has the arguments; FP8 is refused by name."""

from __future__ import annotations

from typing import Any

import torch

from dsv4lib.errors import ArgumentError
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


def check(call: Any) -> None:
    """Refuse what the kernel does not have.

    Raises:
        ArgumentError: FP8.
    """
    for name, x in (("q_nope", call.q_nope), ("kv_cache", call.kv_cache)):
        if x.dtype not in DTYPES:
            raise ArgumentError(f"{name}.dtype", x.dtype, f"bfloat16 or float16 on {ARCHS[0]}")


def splits_of(call: Any, sms: int) -> int:
    """Return the splits of a call: those that it names, else as many as suit and as its workspace holds."""
    if call.num_kv_splits >= 1:
        return call.num_kv_splits
    batch, heads, _ = call.q_nope.shape
    splits = choose_splits(batch, heads, call.capacity, sms)
    if call.workspace is not None:
        splits = max(1, min(splits, call.workspace.numel() // (4 * batch * heads * (V_DIM + 1))))
    return splits


def settings_of(call: Any) -> dict[str, Any]:
    """Make options of the kernel, unsplit."""
    return {"dtype": DTYPES[call.q_nope.dtype], "page": call.page_size, "cluster": 1 + (call.q_nope.shape[1] > TILE_M)}


def launch(name: str, call: Any) -> None:
    """Launch once, or the splits and their combination.

    Args:
        name: of the back end. call: of `mla_decode`, checked.
    """
    check(call)
    (batch, heads, _), stream = call.q_nope.shape, launching.stream(name, call.q_nope)
    sms = launching.sm_count(call.q_nope.device) if name == "native" else split_choice.HOPPER_SM_COUNT
    splits, settings = splits_of(call, sms), settings_of(call)
    o, lse = (call.out, call.lse) if splits == 1 else call.partial(splits)
    kernel, code = _code(name, MlaDecode, settings | {"partial": splits > 1}, arguments.fake_args)
    launching.enqueue(name, code, arguments.launch_args(kernel, call, o, lse, splits, stream))
    if splits > 1:
        ends = combining(settings["dtype"], loads_at_once(splits, batch * heads))
        kernel, code = _code(name, Combine, ends, fmha_arguments.fake_args)
        given = fmha_arguments.combine_args(kernel, o, lse, None, None, call.out, call.lse, stream=stream)
        launching.enqueue(name, code, given)


def combining(dtype: str, at_once: int) -> dict[str, Any]:
    """Make options of the kernel that adds splits up."""
    return {"head_dim": V_DIM, "dtype": dtype, "sink": False, "inverse_rope": False, "at_once": at_once}


def _code(name: str, kernel_type: type, settings: dict[str, Any], fake_args: Any) -> tuple[Any, Any]:
    return compile_cache.default().get(kernel_type, settings, fake_args, launching.arch(name, ARCHS))
