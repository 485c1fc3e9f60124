"""Make the kernel's arguments: fake tensors to compile, checked ones to launch.

The kernels trust what they are given; everything that can be wrong with a tensor is caught here, by name.
"""

from __future__ import annotations

import math
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import torch

from dsv4lib.dsl import kv_entry
from dsv4lib.dsl.rope import Tables
from dsv4lib.dsl.tensors import Fakes, wrap
from dsv4lib.errors import ArgumentError
from dsv4lib.formats.kv_entry import LAYOUT
from dsv4lib.ops.fmha.combine import Combine
from dsv4lib.ops.fmha.ladder import Ladder
from dsv4lib.ops.fmha.sm100 import Fmha
from dsv4lib.ops.fmha.work import KeyRows, KeySplits, PagedPool

ROPE_PAIRS = 32
ANY_NUMBER = (1 << 31) - 1  # of SMs


class _Fake(Fakes):
    """Rows of D elements and pages of B or Y bytes start on 16 bytes."""

    def __call__(self, dtype: Any, extents: str) -> Any:
        return super().__call__(dtype, extents, 16 if len(extents) > 1 and extents[-1] in "DBY" else 0)


def fake_args(kernel: Fmha | Combine | Ladder) -> tuple:
    """Arguments for `compile_for`: symbolic extents and strides, no memory."""
    fake, fp32, i32 = _Fake(), cutlass.Float32, cutlass.Int32
    if isinstance(kernel, Ladder):
        out = fake(fp32, "MN") if kernel.stage == "a" else fake(kernel.element, "MD")
        lse = fake(fp32, "M") if kernel.stage == "c" else None
        return fake(kernel.element, "MD"), fake(kernel.element, "ND"), out, lse, fp32(1.0)
    rope = Tables(fake(fp32, "TP"), fake(fp32, "TP")) if kernel.inverse_rope else None
    sink = fake(fp32, "H") if kernel.sink else None
    if isinstance(kernel, Combine):
        partial = fake(fp32, "STHD"), fake(fp32, "STH")
        return *partial, sink, rope, fake(kernel.element, "THD"), fake(fp32, "TH"), cuda.CUstream(0)
    entries = window = None
    if kernel.entries != "none":
        index = fake(i32, "TK") if kernel.entries == "index" else None
        first = fake(i32, "T") if kernel.entries == "range" else None
        rows = _fake_pool(fake(cutlass.Uint8, "EB")) if kernel.fp8_entries else fake(kernel.element, "RD")
        entries = KeyRows(rows, index, first, fake(i32, "T"))
    if kernel.window:
        rows = _fake_pool(fake(cutlass.Uint8, "VY")) if kernel.fp8_window else fake(kernel.element, "WD")
        index = fake(i32, "TU") if kernel.window_index else None
        first = None if kernel.window_index else fake(i32, "T")
        window = KeyRows(rows, index, first, fake(i32, "T"))
    o = fake(fp32, "STHD") if kernel.partial else fake(kernel.element, "THD")
    lse = fake(fp32, ("STH" if kernel.partial else "TH") + ("Z" if kernel.raw else ""))
    groups = fake(i32, "GZ") if kernel.groups else None
    numbers = fp32(1.0), KeySplits(i32(1), i32(0), i32(0)), i32(1), cutlass.Int64(8), cuda.CUstream(0)
    return fake(kernel.element, "THD"), entries, window, groups, sink, rope, o, lse, *numbers


def _fake_pool(pages: Any) -> PagedPool:
    return PagedPool(pages, cutlass.Int32(1), cutlass.Uint32(1), cutlass.Int32(1))


def _wrap_pool(name: str, pool: tuple[torch.Tensor, int]) -> PagedPool:
    """Wrap (pages uint8 [P, S], page size)."""
    if not isinstance(pool, tuple) or len(pool) != 2:
        raise ArgumentError(name, type(pool).__name__, "(pages, page size)")
    pages, page_size = pool
    multiplier, shift = kv_entry.page_divisor(page_size)
    wrapped = wrap(f"{name}.pages", pages, cutlass.Uint8, (None, None), 16)
    needed = page_size * LAYOUT.entry_bytes
    if pages.shape[1] < needed:
        raise ArgumentError(f"{name}.pages.shape", tuple(pages.shape), f"at least {needed} bytes a page of {page_size}")
    if pages.shape[0] * page_size >= 1 << 31 or not 0 <= pages.stride(0) < 1 << 32:
        allowed = "fewer than 2^31 entries, pages less than 2^32 bytes apart"
        raise ArgumentError(f"{name}.pages", (tuple(pages.shape), pages.stride()), allowed)
    return PagedPool(wrapped, cutlass.Int32(page_size), cutlass.Uint32(multiplier), cutlass.Int32(shift))


def launch_args(
    kernel: Fmha,
    q: torch.Tensor,
    entries: KeyRows | None,
    window: KeyRows | None,
    sink: torch.Tensor | None,
    rope: tuple[torch.Tensor, torch.Tensor] | None,
    o: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    splits: int = 1,
    stream: int = 0,
    groups: torch.Tensor | None = None,
    sms: int | None = None,
    tail: tuple[int, int] = (0, 0),
) -> tuple:
    """Make arguments of `Fmha` of torch tensors.

    Args:
        kernel: which says what is needed.
        q: [T, H, D].
        entries: of torch tensors, or None. Dense: pool [T, K, D] without index and first, each token with its own rows.
        window: likewise, by index with ``window_index``, else consecutive. Where the kernel has ``fp8_entries`` or
            ``fp8_window``, the pool is one of `formats.kv_entry`: (pages uint8 [P, S], page size), S and the stride at
            least the page's bytes, pages on 16 bytes; row = page * size + slot.
        sink: fp32 [H] or None.
        rope: (cos, sin) fp32 [T, 32] or None.
        o, lse: outputs as in `Fmha.__call__`.
        scale: of the dot products.
        splits: of the keys; only a partial kernel takes more than 1.
        stream: handle of a CUDA stream; 0: the default one.
        groups: int32 [G, 2] or None, see `window.token_groups`.
        sms: of the GPU; None: a CTA for every item.
        tail: (items at a time, 1024ths of the tiles) of a last split that differs from the others, see
            `work.KeySplits`; (0, 0): it does not.

    Raises:
        ArgumentError: a tensor that is missing, not wanted, or of the wrong type, shape or stride.
    """
    if not isinstance(q, torch.Tensor) or q.dim() != 3 or q.shape[2] != kernel.head_dim:
        raise ArgumentError("q", getattr(q, "shape", type(q).__name__), f"[T, H, {kernel.head_dim}]")
    if splits < 1 or (splits > 1 and not kernel.partial):
        raise ArgumentError("splits", splits, "1, or more for a partial kernel")
    if sms is not None and sms < 1:
        raise ArgumentError("sms", sms, "at least 1, or None")
    if tail != (0, 0) and (splits < 2 or tail[0] < 1 or not 1 <= tail[1] <= 1024):
        raise ArgumentError("tail", tail, "(0, 0), or with at least 2 splits (1 or more, 1 to 1024)")
    wanted = {
        "entries": (entries, kernel.entries != "none"),
        "window": (window, kernel.window),
        "groups": (groups, kernel.groups),
        "sink": (sink, kernel.sink),
        "rope": (rope, kernel.inverse_rope),
    }
    for name, (value, needed) in wanted.items():
        if (value is not None) != needed:
            raise ArgumentError(name, "given" if value is not None else None, "needed" if needed else "None")
    (t, h, d), e, fp32, i32 = q.shape, kernel.element, cutlass.Float32, cutlass.Int32
    if entries is not None:
        rows, index, first, count = entries
        if kernel.entries == "range" and not kernel.fp8_entries and first is None:
            rows, first = _dense(rows, t)
        entries = KeyRows(
            _wrap_pool("entries.rows", rows) if kernel.fp8_entries else wrap("entries.rows", rows, e, (None, d), 16),
            wrap("entries.index", index, i32, (t, None)) if kernel.entries == "index" else None,
            wrap("entries.first", first, i32, (t,)) if kernel.entries == "range" else None,
            wrap("entries.count", count, i32, (t,)),
        )
    if window is not None:
        rows, index, first, count = window
        window = KeyRows(
            _wrap_pool("window.rows", rows) if kernel.fp8_window else wrap("window.rows", rows, e, (None, d), 16),
            wrap("window.index", index, i32, (t, None)) if kernel.window_index else None,
            None if kernel.window_index else wrap("window.first", first, i32, (t,)),
            wrap("window.count", count, i32, (t,)),
        )
    lead = (splits,) if kernel.partial else ()
    return (
        wrap("q", q, e, (t, h, d), 16),
        entries,
        window,
        None if groups is None else wrap("groups", groups, i32, (None, 2)),
        None if sink is None else wrap("sink", sink, fp32, (h,)),
        None if rope is None else Tables(*(wrap("rope", x, fp32, (t, ROPE_PAIRS)) for x in rope)),
        wrap("o", o, fp32 if kernel.partial else e, (*lead, t, h, d), 16),
        wrap("lse", lse, fp32, (*lead, t, h, *((2,) if kernel.raw else ()))),
        fp32(scale),
        KeySplits(*(i32(n) for n in (splits, *tail))),
        i32(ANY_NUMBER if sms is None else sms),
        cutlass.Int64(q_pitch(q)),
        cuda.CUstream(stream),
    )


def q_pitch(q: torch.Tensor) -> int:
    """Return the elements from row to row of Q [T, H, D] as a matrix for TMA. Every head of every token starts a row.

    D where tokens and heads are packed; where they are not, the largest divisor of both strides, and rows overlap.
    """
    strides = [stride for stride, extent in zip(q.stride()[:2], q.shape[:2], strict=True) if extent > 1]
    return math.gcd(*strides) or q.shape[2]


def _dense(rows: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows [T, K, D] of each token's own as (one matrix, first row of each token)."""
    if not isinstance(rows, torch.Tensor) or rows.dim() != 3 or rows.shape[0] != tokens:
        raise ArgumentError("entries.rows", tuple(getattr(rows, "shape", ())), f"[{tokens}, K, D] where first is None")
    width = rows.shape[1]
    if tokens > 1 and width > 1 and rows.stride(0) != width * rows.stride(1):
        raise ArgumentError("entries.rows.stride()", rows.stride(), "each token's rows after those of the last")
    first = torch.arange(0, tokens * width, width, dtype=torch.int32, device=rows.device)
    return rows.flatten(0, 1), first


def combine_args(
    kernel: Combine,
    o_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    sink: torch.Tensor | None,
    rope: tuple[torch.Tensor, torch.Tensor] | None,
    o: torch.Tensor,
    lse: torch.Tensor,
    stream: int = 0,
) -> tuple:
    """Make arguments of `Combine` of torch tensors. Shapes as in `Combine.__call__`, ``stream`` a handle.

    Raises:
        ArgumentError: a tensor that is missing, not wanted, or of the wrong type, shape or stride.
    """
    for name, value, needed in (("sink", sink, kernel.sink), ("rope", rope, kernel.inverse_rope)):
        if (value is not None) != needed:
            raise ArgumentError(name, "given" if value is not None else None, "needed" if needed else "None")
    fp32 = cutlass.Float32
    wrapped = wrap("o_partial", o_partial, fp32, (None, None, None, kernel.head_dim), 16)
    s, t, h, d = o_partial.shape
    return (
        wrapped,
        wrap("lse_partial", lse_partial, fp32, (s, t, h)),
        None if sink is None else wrap("sink", sink, fp32, (h,)),
        None if rope is None else Tables(*(wrap("rope", x, fp32, (t, ROPE_PAIRS)) for x in rope)),
        wrap("o", o, kernel.element, (t, h, d), 16),
        wrap("lse", lse, fp32, (t, h)),
        cuda.CUstream(stream),
    )


def ladder_args(
    kernel: Ladder, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, scale: float
) -> tuple:
    """Make arguments of `Ladder` of torch tensors: shapes as in `Ladder.__call__`.

    Raises:
        ArgumentError: a tensor that is missing, not wanted, or of the wrong type, shape or stride.
    """
    if (lse is not None) != (kernel.stage == "c"):
        raise ArgumentError("lse", None if lse is None else "given", "needed in stage c, None before")
    d, fp32 = kernel.head_dim, cutlass.Float32
    wrapped = wrap("q", q, kernel.element, (None, d), 16), wrap("kv", kv, kernel.element, (None, d), 16)
    m, n = q.shape[0], kv.shape[0]
    target = (fp32, (m, n)) if kernel.stage == "a" else (kernel.element, (m, d))
    return (
        *wrapped,
        wrap("out", out, *target, 16 if kernel.stage != "a" else 0),
        None if lse is None else wrap("lse", lse, fp32, (m,)),
        fp32(scale),
    )
