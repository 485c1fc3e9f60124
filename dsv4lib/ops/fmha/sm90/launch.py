"""Run `fmha` on a Hopper: over 584-byte entries.

`fmha` has the arguments. One kernel is for calls whose keys are split, and one, of tiles in pairs, for all others: of
two tiles, or of tokens that fill the GPU. Unsplit, both give the same bits. What they do not have is refused by name:
keys that are no `Fp8Pages`, D other than 512, fp16, ``groups``, outputs that are not normalised.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common import compile_cache, launching
from dsv4lib.ops.common import splits as split_choice
from dsv4lib.ops.fmha import arguments as both
from dsv4lib.ops.fmha.combine import AT_ONCE, Combine, loads_at_once
from dsv4lib.ops.fmha.config import TILE_M, count_tiles
from dsv4lib.ops.fmha.sm90 import arguments
from dsv4lib.ops.fmha.sm90.config import HEAD_DIM
from dsv4lib.ops.fmha.sm90.kernel import DecodeFmha
from dsv4lib.ops.fmha.sm90.prefill.kernel import PrefillFmha
from dsv4lib.ops.fmha.work import KeyRows

ARCHS = ("sm_90a",)
TILE = split_choice.Tile(2.2, 2.2, 0.0)  # microseconds of 64 keys, assumed
PAIR = 2  # tiles that `PrefillFmha` works on at once: sooner than two CTAs and their combination (data/bench/fmha.md)


def choose_splits(tokens: int, heads: int, most: int, window_most: int, sms: int) -> int:
    """Choose splits of the keys by shapes alone, as `ops.common.splits` does.

    Args:
        tokens, heads: T, H. most, window_most: entries and window keys of the longest list. sms: of the GPU.
    """
    blocks, tiles = -(-heads // TILE_M), count_tiles(most, window_most)
    if tiles <= PAIR:
        return 1
    return split_choice.choose(tokens * blocks, tiles, sms, tile=TILE).keys


def check(call: Any) -> None:
    """Refuse what the kernels do not have.

    Raises:
        ArgumentError: see the module.
    """
    if call.q.dtype != torch.bfloat16 or call.q.shape[2] != HEAD_DIM:
        raise ArgumentError("q", f"{call.q.dtype}{list(call.q.shape)}", f"bf16 [T, H, {HEAD_DIM}] on {ARCHS[0]}")
    for name, keys in call.sources.items():
        if not keys.page:
            raise ArgumentError(f"{name}.pool", f"rows of {keys.pool.dtype}", f"Fp8Pages on {ARCHS[0]}")
    if call.groups is not None:
        raise ArgumentError("groups", "given", f"None on {ARCHS[0]}")
    if not call.normalise:
        raise ArgumentError("normalise", False, f"True on {ARCHS[0]}")


def settings_of(call: Any) -> dict[str, Any]:
    """Make options of the kernel, unsplit."""
    return {
        "entries": "none" if call.entries is None else "range" if call.index is None else "index",
        "window": call.window is not None,
        "window_index": call.window_index is not None,
        "sink": call.sink is not None,
        "inverse_rope": call.rope is not None,
    }


def parts(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return options of a split's kernel, and of the one that adds splits up. The latter lack `at_once`."""
    ends = {"head_dim": HEAD_DIM, "dtype": "bf16", **{name: settings[name] for name in ("sink", "inverse_rope")}}
    return {**settings, "sink": False, "inverse_rope": False, "partial": True}, ends


def launch(name: str, call: Any, partial: Any) -> None:
    """Launch once, or the splits and their combination.

    Args:
        name: of the back end. call: of `fmha`, checked. partial: makes (o, lse) of so many splits.
    """
    check(call)
    (tokens, heads, _), stream = call.q.shape, launching.stream(name, call.q)
    most = [0 if keys is None else keys.most for keys in (call.entries, call.window)]
    sms = launching.sm_count(call.q.device) if name == "native" else split_choice.HOPPER_SM_COUNT
    splits = call.splits or choose_splits(tokens, heads, *most, sms)
    keys = []
    for one, index in ((call.entries, call.index), (call.window, call.window_index)):
        keys.append(None if one is None else KeyRows((one.pool, one.page), index, one.first, one.count))
    settings = settings_of(call)

    kind, ctas = DecodeFmha, 1
    if splits == 1:
        kind, ctas = PrefillFmha, min(tokens, max(1, sms // -(-heads // TILE_M)))

    def attend(options: dict[str, Any], sink: Tensor | None, rope: Any, o: Tensor, lse: Tensor) -> None:
        kernel, code = _code(name, kind, options, arguments.fake_args)
        given = arguments.launch_args(kernel, call.q, *keys, sink, rope, o, lse, call.scale, splits, stream, ctas)
        launching.enqueue(name, code, given)

    if splits == 1:
        attend(settings, call.sink, call.rope, call.o, call.lse)
        return
    of_split, ends = parts(settings)
    found = partial(call, splits)
    attend(of_split, None, None, *found)
    at_once = loads_at_once(splits, tokens * heads)
    kernel, code = _code(name, Combine, {**ends, "at_once": at_once}, both.fake_args)
    given = both.combine_args(kernel, *found, call.sink, call.rope, call.o, call.lse, stream=stream)
    launching.enqueue(name, code, given)


def needed(options: dict[str, Any]) -> list[tuple]:
    """List what calls with such options of `fmha.warm_up` need. Each is (kernel, settings, fake arguments)."""
    if options.get("groups"):
        raise ArgumentError("groups", True, f"False on {ARCHS[0]}")
    defaults = {"entries": "index", "window": True, "window_index": False, "sink": True, "inverse_rope": False}
    settings = {name: options.get(name, value) for name, value in defaults.items()}
    of_split, ends = parts(settings)
    chosen = (PrefillFmha, settings), (DecodeFmha, of_split)
    kernels = [(*one, arguments.fake_args) for one in chosen]
    return kernels + [(Combine, {**ends, "at_once": n}, both.fake_args) for n in AT_ONCE]


def _code(name: str, kernel_type: type, settings: dict[str, Any], fake_args: Any) -> tuple[Any, Any]:
    return compile_cache.default().get(kernel_type, settings, fake_args, launching.arch(name, ARCHS))
