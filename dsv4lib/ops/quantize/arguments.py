"""Make the kernel's arguments: fake tensors to compile, checked ones to launch.

The op (`dsv4lib.ops.quantize`) has checked types, shapes and devices; what only the kernels need is checked here.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import torch
from cutlass import Int32

from dsv4lib.dsl.tensors import Fakes, divisor, wrap
from dsv4lib.dsl.words import WORD, as_words
from dsv4lib.errors import ArgumentError
from dsv4lib.formats.paged import PageLayout
from dsv4lib.ops.quantize.amax import Amax
from dsv4lib.ops.quantize.codes import PIECE
from dsv4lib.ops.quantize.entries import Entries
from dsv4lib.ops.quantize.kernel import MOST_CTA_PIECES, Counts, Quantize


def fake_args(kernel: Quantize | Amax | Entries) -> tuple:
    """Arguments for `compile_for`: symbolic extents and strides, no memory."""
    fake, stream = Fakes(), cuda.CUstream(0)
    if isinstance(kernel, Amax):
        return fake(kernel.element, "TK", 16), fake(Int32, "G"), Int32(1), divisor(1), stream
    if isinstance(kernel, Entries):
        pages = fake(Int32, "PW", page_align(kernel.layout)), fake(cutlass.Uint8, "PS")
        return fake(kernel.element, "TK", 16), fake(Int32, "T"), *pages, divisor(1), stream
    return (
        fake(kernel.element, "TK", 16),
        fake(Int32, "R") if kernel.gather else None,
        fake(Int32, "G") if kernel.scale == "derived" else None,
        fake(cutlass.Float32, "O") if kernel.scale else None,
        fake(Int32, "HRW", 4 * kernel.words),
        image_of(kernel, fake, "HS") if kernel.swizzled else fake(cutlass.Uint8, "HRC"),
        Counts(Int32(1), Int32(1), divisor(1)),
        stream,
    )


def launch_args(kernel: Quantize, call: Any, stream: int = 0) -> tuple:
    """Check a call and wrap its tensors for the compiled kernel.

    Args:
        kernel: what was compiled. call: its tensors by name, as `op.Call` has them; workspace: int32 partials of `Amax`
            where the global scale is derived.
        stream: CUDA stream.

    Raises:
        ArgumentError: a tensor that does not start where vectors can, or too many elements for one launch.
    """
    out, derived = call.out, kernel.scale == "derived"
    codes, scales = (x if kernel.halves == 2 else x[None] for x in (out.codes, out.scales))
    columns = call.x.shape[1] // kernel.halves
    rows_padded, pieces = kernel.padded(codes.shape[1], columns)
    if rows_padded * pieces + MOST_CTA_PIECES >= 1 << 31:
        raise ArgumentError("x.shape", tuple(call.x.shape), f"fewer than {PIECE} x 2^31 elements, gathered and padded")
    words = as_words("out.codes", codes)
    if kernel.swizzled:
        scales = wrap_image(kernel, scales, (kernel.halves, None))
    else:
        scales = wrap("out.scales", scales, cutlass.Uint8, (kernel.halves, None, None))
    scale = out.global_scale if derived else call.global_scale
    return (
        wrap("x", call.x, kernel.element, (None, None), 16),
        wrap("rows", call.rows, Int32, (None,)) if kernel.gather else None,
        wrap("partials", call.workspace, Int32, (None,)) if derived else None,
        wrap("global_scale", scale.reshape(1), cutlass.Float32, (1,)) if kernel.scale else None,
        wrap("out.codes", words, Int32, (kernel.halves, None, None), 4 * kernel.words),
        scales,
        Counts(Int32(rows_padded * pieces), Int32(columns // PIECE), divisor(pieces)),
        cuda.CUstream(stream),
    )


def image_of(kernel: Any, fake: Fakes, extents: str) -> Any:
    """Make a fake swizzled image. It has bytes, or words of a recipe whose scales are repeated."""
    return fake(Int32 if kernel.format.repeats > 1 else cutlass.Uint8, extents)


def wrap_image(kernel: Any, scales: torch.Tensor, shape: tuple[int | None, ...]) -> Any:
    """Wrap the swizzled image; ``shape`` in bytes. Errors as in `launch_args`."""
    name, (*lead, size) = "out.scales", shape
    if kernel.format.repeats == 1:
        return wrap(name, scales, cutlass.Uint8, shape)
    return wrap(name, as_words(name, scales), Int32, (*lead, None if size is None else size // WORD))


def amax_args(kernel: Amax, call: Any, stream: int = 0) -> tuple:
    """Make arguments of `Amax` of x and workspace, int32 [`Amax.ctas`]. Errors as in `launch_args`."""
    x, pieces = call.x, call.x.shape[1] // PIECE
    if len(x) * pieces + (1 << 20) >= 1 << 31:
        raise ArgumentError("x.shape", tuple(x.shape), f"fewer than {PIECE} x 2^31 elements")
    given = wrap("x", x, kernel.element, (None, None), 16), wrap("partials", call.workspace, Int32, (None,))
    return *given, Int32(len(x) * pieces), divisor(pieces), cuda.CUstream(stream)


def page_align(layout: PageLayout) -> int:
    """Return the bytes on which pages start: what one lane stores at most."""
    return 16 if layout.data_bytes % 16 == 0 and layout.stride_multiple % 16 == 0 else 4


def entry_args(kernel: Entries, x: torch.Tensor, slots: Any, stream: int = 0) -> tuple:
    """Make arguments of `KvEntries` and `IndexerKeys` of torch tensors.

    Args:
        kernel: what was compiled.
        x: [T, dim]. slots: as `op.Slots` has them, of pages with room for more. stream: CUDA stream.

    Raises:
        ArgumentError: pages or rows that do not start where vectors can, or too many entries.
    """
    pages, page_size, indices = slots
    align, needed = page_align(kernel.layout), page_size * kernel.layout.entry_bytes
    if pages.shape[1] < needed:
        raise ArgumentError("pages.shape", tuple(pages.shape), f"at least {needed} bytes a page of {page_size}")
    if len(pages) * page_size >= 1 << 31 or len(x) * kernel.dim >= 1 << 33:
        raise ArgumentError("pages.shape", tuple(pages.shape), "fewer than 2^31 entries and pieces of rows")
    used = pages[:, :needed]
    wrap("pages", used, cutlass.Uint8, (None, None), align)
    return (
        wrap(kernel.given, x, kernel.element, (None, kernel.dim), 16),
        wrap("indices", indices, Int32, (len(x),)),
        wrap("pages", as_words("pages", used), Int32, (None, None), align),
        wrap("pages", used, cutlass.Uint8, (None, None)),
        divisor(page_size),
        cuda.CUstream(stream),
    )
