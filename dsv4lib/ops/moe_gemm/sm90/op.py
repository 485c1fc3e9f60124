"""Run `moe_gemm` for weights that `tile_weights` has tiled: a Hopper's kernel.

    w = Operand(tile_weights(codes, scales, "w4a8"))
    h = moe_gemm(x, w, offsets, counts, mode="w4a8", swiglu=True, out_format="mxfp8", ...)

The tiled operand chooses this kernel; `moe_gemm` has the arguments. What it does not have is refused by name: modes
other than "w4a8", "w4a8_row" and "w4a16" (bf16 activations), NVFP4 output, more than 512 experts. Mode "w4a8" takes
bf16 x without scales, too, if no scale of w is above byte 148: for many tokens an expert that is faster (`many`). A
scale of x of 2^-127 (byte 0, which `quantize` does not make) counts as 0.

Mode "w4a8_row" has weights that E4M3 holds with their scales, beside one of the row. Where an expert gets more than a
few tokens, they have a scale a 128 of K (`scale_block`), as `quantize` makes with recipe "fp8" and ``swizzled``, and so
has a result in "mxfp8". A few tokens may have MXFP8's, and their result has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import mxfp4, scale_swizzle
from dsv4lib.ops.common import compile_cache, launching
from dsv4lib.ops.common.schema import op
from dsv4lib.ops.common.splits import SM_COUNT
from dsv4lib.ops.moe_gemm.operands import Operand, check_devices, check_groups, finished, new_output, numbers
from dsv4lib.ops.moe_gemm.sm90 import arguments
from dsv4lib.ops.moe_gemm.sm90.config import MODES, OUTPUTS, ROW_STEP, TILES_N
from dsv4lib.ops.moe_gemm.sm90.kernel import TiledMoeGemm
from dsv4lib.ops.moe_gemm.sm90.layout import BLOCK, CHUNK_K, TILE_M, step_of, tiled_shape, untile_weights
from dsv4lib.ops.moe_gemm.sm90.wide.config import E4M3_TILES_N
from dsv4lib.ops.moe_gemm.sm90.wide.config import TILES_N as WIDE_TILES_N
from dsv4lib.ops.moe_gemm.sm90.wide.e4m3 import WideE4m3MoeGemm
from dsv4lib.ops.moe_gemm.sm90.wide.kernel import WideMoeGemm

ARCHS = ("sm_90a",)
TYPES = {"w4a16": (torch.bfloat16,), "w4a8_row": (torch.uint8,)}  # of x; else either
EXPECTED = (1, 8, 16, 32, 96)  # tokens of a group, one for each tile


def multiply(
    x: Operand,
    w: Operand,
    offsets: Tensor,
    counts: Tensor,
    *,
    mode: str,
    alpha: Tensor | None,
    alpha_up: Tensor | None,
    routing: Tensor | None,
    swiglu: bool,
    out_format: str,
    out_global: Tensor | None,
    limit: float,
    expected: int,
    groups_ready: bool,
    rows: Tensor | None,
    out: Operand | None,
    backend: str,
) -> Operand:
    """Call the op; arguments as of `moe_gemm`, w tiled and without scales of its own.

    Raises:
        ArgumentError: see `moe_gemm`.
    """
    for name, value, allowed in (("mode", mode, MODES), ("out_format", out_format, OUTPUTS)):
        if value not in allowed:
            raise ArgumentError(name, value, f"one of {', '.join(allowed)}, where w is tiled")
    for name, value in (("w.scales", w.scales), ("out_global", out_global)):
        if value is not None:
            raise ArgumentError(name, "given", "None, where w is tiled")
    if out is None:
        features, _, _ = tiled_shape(tuple(w.codes.shape), mode)
        width, like = features // (2 if swiglu else 1), x.codes if rows is None else rows[:, None]
        out = new_output(like, width, out_format, cleared=False)
    if rows is not None and not gathers(expected, mode, x.codes.dtype == torch.bfloat16):
        raise ArgumentError("rows", "given", f"None for {expected} tokens a group in mode {mode}")
    tensors = (
        x.codes,
        w.codes,
        out.codes,
        x.scales,
        alpha,
        alpha_up,
        out.scales,
        routing,
        offsets,
        counts,
        rows,
    )
    Call.op(*tensors, limit, mode, out_format, swiglu, expected, groups_ready, backend)
    return out


def held(expected: int) -> float:
    """Count the tokens that 98 or more of 100 groups of ``expected`` tokens on average have at most."""
    return min(2 * expected, expected + 2.5 * math.sqrt(expected))


def many(expected: int) -> bool:
    """Tell whether MXFP8 tokens need more than one tile a group, where bf16 ones have tiles of up to 128.

    At 96 tokens an expert they take half the time (data/bench/moe_gemm.md); where the two cross was not measured.
    """
    return held(expected) > TILES_N["w4a8"][-1]


def tile_of(expected: int, mode: str, bf16: bool) -> int:
    """Choose tokens of a tile for groups of ``expected`` tokens on average, of tokens in bf16 or not.

    The smallest that holds what `held` says; the weights of larger groups come once more from L2.
    """
    few = TILES_N[mode] if bf16 == (mode == "w4a16") else ()
    wide = WIDE_TILES_N[mode] if bf16 else E4M3_TILES_N.get(mode, ())
    tiles = (*few, *(n for n in wide if n > max(few, default=0)))
    return next((n for n in tiles if held(expected) <= n), tiles[-1])


def scale_block(expected: int, mode: str) -> int:
    """Return the K that a scale of tokens is for, and of a result in "mxfp8".

    It is 32, or 128 where groups of ``expected`` tokens have E4M3 MMAs with sums of 128 of K, in mode "w4a8_row".
    """
    return CHUNK_K if mode == "w4a8_row" and tile_of(expected, mode, False) not in TILES_N[mode] else BLOCK


def gathers(expected: int, mode: str, bf16: bool) -> bool:
    """Tell whether groups of ``expected`` tokens on average, in bf16 or not, may be a list of rows: few tokens are."""
    return bf16 == (mode == "w4a16") and tile_of(expected, mode, bf16) in TILES_N[mode]


def kernel_of(settings: dict[str, Any]) -> tuple[type, dict[str, Any]]:
    """Choose the kernel of options with ``tile_n`` and ``bf16``, and its own options."""
    own = {name: value for name, value in settings.items() if name != "bf16"}
    if settings["bf16"] == (own["mode"] == "w4a16") and own["tile_n"] in TILES_N[own["mode"]]:
        return TiledMoeGemm, own
    return WideE4m3MoeGemm if own["mode"] == "w4a8_row" else WideMoeGemm, {
        name: value for name, value in own.items() if name not in ("early", "gather")
    }


def warm_up(wanted: Iterable[dict[str, Any]], expected: Iterable[int] = EXPECTED) -> dict[str, float]:
    """Compile (or read from disk) and load what calls will need.

    Args:
        wanted: of each kind of call K, mode, out_format, and what it has of swiglu, routed, alpha: bool, as far as they
            are not 4096, "w4a8", "bf16", False, False, True, "early": what calls name ``groups_ready``,
            "gather": ``rows``, and "bf16": tokens in bf16, as they are in mode "w4a16".
        expected: tokens of a group, as `moe_gemm` takes them; each chooses a tile.

    Returns:
        seconds by kernel.
    """
    needed = []
    for options in wanted:
        given = {"K": 4096, "mode": "w4a8", "out_format": "bf16", **options}
        settings = {"step_k": step_of(given.pop("K")), "out": given.pop("out_format"), **given}
        settings.setdefault("bf16", given["mode"] == "w4a16")
        for tile_n in sorted({tile_of(n, given["mode"], settings["bf16"]) for n in expected}):
            needed.append((*kernel_of({**settings, "tile_n": tile_n}), arguments.fake_args))
    return compile_cache.default().warm_up(needed, launching.arch("auto", ARCHS))


@op("moe_gemm_tiled", mutates=("out", "out_scales"), names={"formats": "mode"}, archs=ARCHS)
@dataclass(kw_only=True)
class Call:
    """A call of `moe_gemm` with tiled weights."""

    x: Tensor
    w: Tensor
    out: Tensor
    x_scales: Tensor | None
    alpha: Tensor | None
    alpha_up: Tensor | None
    out_scales: Tensor | None
    routing: Tensor | None
    offsets: Tensor
    counts: Tensor
    rows: Tensor | None
    limit: float
    formats: str
    out_format: str
    swiglu: bool
    expected: int
    groups_ready: bool
    backend: str

    out_global = None  # of NVFP4 output, which there is none of

    def check(self) -> None:
        """Check devices and the type of x; `arguments.launch_args` checks the rest."""
        check_devices(vars(self))
        types = TYPES.get(self.formats, (torch.uint8, torch.bfloat16))
        if self.x.dtype not in types:
            raise ArgumentError("x", self.x.dtype, " or ".join(map(str, types)) + f" in mode {self.formats}")

    def settings(self) -> dict[str, Any]:
        """Make options of the kernel."""
        _, _, step = tiled_shape(tuple(self.w.shape), self.formats)
        bf16 = self.x.dtype == torch.bfloat16
        return {
            "mode": self.formats,
            "bf16": bf16,
            "tile_n": tile_of(self.expected, self.formats, bf16),
            "step_k": step,
            "swiglu": self.swiglu,
            "out": self.out_format,
            "routed": self.swiglu and self.routing is not None,
            "alpha": self.alpha is not None,
            "early": self.groups_ready,
            "gather": self.rows is not None,
        }

    def check_values(self) -> None:
        """Check that groups start where tiles may, and lie apart."""
        check_groups(self.offsets, self.counts, len(self.x if self.rows is None else self.rows), ROW_STEP)
        if self.x_scales is not None and self.block > BLOCK:
            scales = scale_swizzle.unswizzle(self.x_scales, len(self.x), self.x.shape[1] // BLOCK)
            groups = zip(self.offsets.tolist(), self.counts.tolist(), strict=True)
            rows = [row for first, count in groups for row in range(first, first + count)]
            words = scales[rows].unflatten(1, (-1, self.block // BLOCK))
            if bool((words != words[..., :1]).any()):
                raise ArgumentError("x.scales", "differ in 128 of K", f"alike for {self.expected} tokens a group")

    @property
    def block(self) -> int:
        """K that a scale of tokens, and of a result in MXFP8's image, is for."""
        return scale_block(self.expected, self.formats)

    def run(self, backend: str) -> None:
        """Launch the kernel, or ask the oracle."""
        kind, settings = kernel_of(self.settings())
        plan = kind(**settings)
        if not self.x.shape[0]:
            return
        if backend == "reference":
            arguments.launch_args(plan, self, 1)  # checks: what one back end takes all take
            _reference(self)
            return
        if backend == "native":
            grid = launching.sm_count(self.x.device)
        else:
            grid = max(1, min(self.w.shape[1] * int((-(-self.counts // plan.tile_n)).sum()), SM_COUNT))
        given = arguments.launch_args(plan, self, grid, launching.stream(backend, self.x))  # refused: not compiled
        _, code = compile_cache.default().get(kind, settings, arguments.fake_args, launching.arch(backend, ARCHS))
        launching.enqueue(backend, code, given)


def weights(tiled: Tensor, mode: str) -> Tensor:
    """Decode tiled weights to fp64 [E, N, K]."""
    return mxfp4.dequantize(mxfp4.MXFP4Tensor(*untile_weights(tiled, mode)), torch.float64)


def _reference(call: Call) -> None:
    """Ask the oracle in fp64, group by group."""
    x, w = call.x.double(), weights(call.w, call.formats)
    if call.x.dtype == torch.uint8:
        x = numbers(call.x, call.x_scales, "w4a8", False)
    if call.rows is not None:
        none = (call.rows < 0) | (call.rows >= len(x))  # read as zeros, as the kernel does
        x = x[call.rows.masked_fill(none, 0).long()].masked_fill(none[:, None], 0)
    scales = None
    if call.out_scales is not None:
        scales = scale_swizzle.unswizzle(call.out_scales, len(x), w.shape[1] // TILE_M)
    for e, (first, count) in enumerate(zip(call.offsets.tolist(), call.counts.tolist(), strict=True)):
        own = slice(first, first + count)
        routing = None if call.routing is None else call.routing[own]
        call.out[own], found = finished(x[own] @ w[e].T, call, e, routing, call.block)
        if scales is not None:
            scales[own] = found
    if scales is not None:
        call.out_scales.copy_(scale_swizzle.swizzle(scales))
