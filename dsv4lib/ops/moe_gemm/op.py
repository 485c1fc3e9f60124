"""Multiply ragged groups of tokens with the quantised weights of experts.

    y[r] = alpha_e * (x[r] @ W_e^T)                                   rows r of group e
    h[r] = silu(min(g, limit)) * clip(u, -limit, limit) * routing_r   swiglu: g, u = alpha_e, alpha_up_e * gate, up sums

`moe_gemm` makes outputs and calls `torch.ops.dsv4.moe_gemm`, which writes them in place. On a GPU the op reads no value
of a tensor and waits for nothing: it can be captured in a CUDA graph after a first call has compiled its kernel, and
sizes of groups may change between replays. A single group of all rows is `dsv4lib.ops.linear`.

Weights say which kernel runs: [E, N, K] that of Blackwell, tiled ones (`sm90.tile_weights`) that of Hopper.

Source: DSV4's released code; the oracle is `dsv4lib.reference.moe_gemm`, the kernels `dsv4lib.ops.moe_gemm.sm100` and
`dsv4lib.ops.moe_gemm.sm90.kernel` and `sm90.wide.kernel`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import nvfp4, scale_swizzle
from dsv4lib.ops.common import compile_cache, launching
from dsv4lib.ops.common.schema import op
from dsv4lib.ops.common.splits import SM_COUNT
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.moe_gemm import arguments
from dsv4lib.ops.moe_gemm.config import MODES, OUTPUTS, TILE_M
from dsv4lib.ops.moe_gemm.operands import (
    Operand,
    Pair,
    check_devices,
    check_global,
    check_groups,
    finished,
    new_output,
    numbers,
)
from dsv4lib.ops.moe_gemm.sm90 import op as hopper
from dsv4lib.ops.moe_gemm.sm100 import MoeGemm

ARCHS = ("sm_100a", "sm_103a")
TILES = (64, 128, 192)  # those with two accumulators: a tile's epilogue overlaps the next one's MMAs
PAIR_TOKENS = 128  # a tile of which a pair of CTAs takes
EXPECTED = (1, 64, 128)  # tokens of a group, one for each tile


@typed
def moe_gemm(
    x: Operand | Pair,
    w: Operand | Pair,
    offsets: Tensor,
    counts: Tensor,
    *,
    mode: str = "nvfp4",
    alpha: Tensor | None = None,
    alpha_up: Tensor | None = None,
    routing: Tensor | None = None,
    swiglu: bool = False,
    out_format: str = "bf16",
    out_global: Tensor | None = None,
    limit: float = 10.0,
    expected: int | None = None,
    groups_ready: bool = False,
    rows: Tensor | None = None,
    out: Operand | Pair | None = None,
    backend: str = "auto",
) -> Operand:
    """Multiply groups of rows with the weights of their experts.

    Args:
        x: [R, K], rows sorted by group.
        w: [E, N, K]; with ``swiglu`` rows of gate and up, 8 of each alternating. Scales [E, bytes]. For a Hopper: what
            `sm90.tile_weights` makes of such weights in MXFP4, without scales.
        offsets: int32 [E], first row of each group, a multiple of 128, of 8 where w is tiled.
        counts: int32 [E], its rows, 0 or more.
        mode: formats of w and x: "nvfp4", "w4a8", "mxfp8" or "bf16"; tiled: "w4a16" (bf16 x), "w4a8", whose x is
            MXFP8, or bf16 without scales, or "w4a8_row" (`sm90.op`).
        alpha: fp32 [E], product of the global scales of x and w; with ``swiglu`` of gate. alpha_up: of up.
        routing: fp32 [R], with ``swiglu``: weight of each row.
        out_format: "bf16", "fp32", or with ``swiglu`` "nvfp4" or "mxfp8".
        out_global: fp32 [E], of an NVFP4 output.
        limit: of the SwiGLU clamp.
        expected: tokens of a group on average, a number of the host that chooses the tile: T k / E, up; None: R / E.
        groups_ready: offsets, counts and factors were written before the launch that comes just before this one, so
            that a kernel of tiled weights may read them, and weights, while that one ends.
        rows: int32 [R], where w is tiled and tokens of a group are few (`sm90.op.gathers`): row r of the groups is row
            ``rows[r]`` of x [T, K]; None: x has the rows of the groups.
        out: written; None: new, rows without a token are not initialised.
        backend: "auto", "native", "emulator" or "reference".

    Returns:
        [R, N], or [R, N / 2] with ``swiglu``, in ``out_format``.

    Raises:
        ArgumentError: an argument that is missing, not wanted, or of a wrong type, shape or value.
        BackendUnavailable: see `backends.resolve`.
    """
    x, w, out = Operand(*x), Operand(*w), None if out is None else Operand(*out)
    tiled = w.codes.dim() == 4
    if not tiled:
        check_formats(mode, out_format)
    if x.codes.dim() != 2 or w.codes.dim() not in (3, 4):
        raise ArgumentError("x, w", (tuple(x.codes.shape), tuple(w.codes.shape)), "[R, K], [E, N, K] or tiled")
    if rows is not None and (rows.dim() != 1 or rows.dtype != torch.int32):
        raise ArgumentError("rows", f"{rows.dtype}{list(rows.shape)}", "torch.int32[R]")
    if expected is None:
        expected = -(-len(x.codes if rows is None else rows) // max(1, w.codes.shape[0]))
    elif not 0 <= expected < 2**31:
        raise ArgumentError("expected", expected, "a number of tokens, 0 or more, below 2^31")
    if tiled:
        factors = {"alpha": alpha, "alpha_up": alpha_up, "routing": routing, "out_global": out_global, "limit": limit}
        rest = {"mode": mode, "swiglu": swiglu, "out_format": out_format, "expected": expected}
        rest |= {"groups_ready": groups_ready, "rows": rows, "backend": backend}
        return hopper.multiply(x, w, offsets, counts, out=out, **factors, **rest)
    if rows is not None:
        raise ArgumentError("rows", "given", "None, where w is not tiled")
    if out is None:
        out = new_output(x.codes, w.codes.shape[1] // (2 if swiglu else 1), out_format)
    tensors = x.codes, w.codes, out.codes, x.scales, w.scales, alpha, alpha_up, out.scales, out_global, limit, routing
    Call.op(*tensors, offsets, counts, mode, out_format, swiglu, expected, backend)
    return out


def largest(expected: int) -> int:
    """Estimate the largest of groups of ``expected`` tokens: three deviations more."""
    return expected + math.ceil(3 * math.sqrt(expected))


def tile_of(tokens: int, features: int) -> tuple[int, int]:
    """Choose (tokens of a tile, CTAs that share it) for groups of ``tokens`` or fewer.

    A tile that is too small brings weights from L2 once more; one that is larger than the group costs nothing. A pair
    of CTAs brings tokens once for 256 features. What `predict.moe_tiles` says of other choices:

        choice instead                       groups of       time
        the next smaller tile                any             up to 1.7 times
        one CTA with tiles of 128 and 192    any             up to 1.5 times
        a pair with a tile of 64             64 or fewer     3 % less at most
        a tile of 256, one accumulator       192 to 240      up to a fifth less; others take longer
        a tile of 128                        256             1 % less
    """
    tile = next((n for n in TILES if n >= tokens), TILES[-1])
    return tile, 2 if tile >= PAIR_TOKENS and features >= 2 * TILE_M else 1


def warm_up(
    wanted: Iterable[dict[str, Any]], expected: Iterable[int] = EXPECTED, kernel_type: type = MoeGemm
) -> dict[str, float]:
    """Compile (or read from disk) and load what calls will need.

    Args:
        wanted: of each kind of call mode, out_format, and what it has of swiglu, routed, alpha: bool, and N (features
            of the weights), as far as they are not "nvfp4", "bf16", False, False, True and many.
        expected: tokens of a group, as `moe_gemm` takes them; each chooses a tile.
        kernel_type: `MoeGemm`, or `Linear` for the op of that name, whose groups all have just that many.

    Returns:
        seconds by kernel.
    """
    base = {"mode": "nvfp4", "swiglu": False, "alpha": True}
    needed = []
    for options in wanted:
        given = {**base, **options}
        out, features = given.pop("out_format", "bf16"), given.pop("features", 2 * TILE_M)
        most = expected if kernel_type.batched else map(largest, expected)
        for tile_n, ctas in sorted({tile_of(n, features) for n in most}):
            needed.append((kernel_type, {**given, "out": out, "tile_n": tile_n, "ctas": ctas}, arguments.fake_args))
    return compile_cache.default().warm_up(needed, launching.arch("auto", ARCHS))


def check_formats(mode: str, out_format: str) -> None:
    """Check that there are such formats.

    Raises:
        ArgumentError: there are not.
    """
    if mode not in MODES:
        raise ArgumentError("mode", mode, "one of " + ", ".join(MODES))
    if out_format not in OUTPUTS:
        raise ArgumentError("out_format", out_format, "one of " + ", ".join(OUTPUTS))


# ------------------------------------------------------------------- the op


@op("moe_gemm", mutates=("out", "out_scales"), names={"formats": "mode"}, archs=ARCHS)
@dataclass(kw_only=True)
class Call(arguments.Call):
    """A call of `moe_gemm`."""

    offsets: Tensor
    counts: Tensor
    formats: str  # `mode`: torch.compile has an argument of that name
    out_format: str
    swiglu: bool
    expected: int
    backend: str

    def check(self) -> None:
        """Check devices; `arguments.launch_args` checks the rest."""
        check_devices(vars(self))

    def settings(self) -> dict[str, Any]:
        """Make options of the kernel."""
        tile_n, ctas = tile_of(largest(self.expected), self.w.shape[1])
        flags = {
            "swiglu": self.swiglu,
            "routed": self.swiglu and self.routing is not None,
            "alpha": self.alpha is not None,
        }
        return {"mode": self.formats, "tile_n": tile_n, "ctas": ctas, "out": self.out_format, **flags}

    def check_values(self) -> None:
        """Check that groups start at blocks of scales and lie apart; check out_global."""
        check_global(self.out_global)
        check_groups(self.offsets, self.counts, len(self.x))

    def run(self, backend: str) -> None:
        """Launch the kernel, or ask the oracle."""
        settings = self.settings()
        plan = MoeGemm(**settings)
        if not self.x.shape[0]:
            return
        if backend == "reference":
            arguments.launch_args(plan, self, 1)  # checks: what one back end takes all take
            _reference(self)
            return
        features = -(-self.w.shape[1] // plan.pair_m)
        if backend == "native":
            grid = max(1, launching.sm_count(self.x.device) // plan.ctas)
        else:
            tiles = features * int((-(-self.counts // plan.tile_n)).sum())
            grid = max(1, min(tiles, SM_COUNT // plan.ctas))
        given = arguments.launch_args(plan, self, grid, launching.stream(backend, self.x))  # refused: not compiled
        arch = launching.arch(backend, ARCHS)
        _, code = compile_cache.default().get(MoeGemm, settings, arguments.fake_args, arch)
        launching.enqueue(backend, code, given)


# ---------------------------------------------------------------- reference


def _reference(call: Call) -> None:
    """Ask the oracle in fp64, group by group."""
    x, w = numbers(call.x, call.x_scales, call.formats, False), numbers(call.w, call.w_scales, call.formats, True)
    scales = None
    if call.out_scales is not None:
        block = nvfp4.BLOCK if call.out_format == "nvfp4" else 32
        scales = scale_swizzle.unswizzle(call.out_scales, len(x), w.shape[1] // 2 // block)
    for e, (first, count) in enumerate(zip(call.offsets.tolist(), call.counts.tolist(), strict=True)):
        own = slice(first, first + count)
        routing = None if call.routing is None else call.routing[own]
        call.out[own], found = finished(x[own] @ w[e].T, call, e, routing)
        if scales is not None:
            scales[own] = found
    if scales is not None:
        call.out_scales.copy_(scale_swizzle.swizzle(scales))
