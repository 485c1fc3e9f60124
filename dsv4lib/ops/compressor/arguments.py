"""Make the kernel's arguments: fake tensors to compile, checked ones to launch."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32

from dsv4lib.dsl.tensors import Fakes, divisor, wrap
from dsv4lib.dsl.words import as_words
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.compressor.config import ROPE
from dsv4lib.ops.compressor.kernel import Compressor, Ends, Rows
from dsv4lib.ops.compressor.pack import Pages

WIDE, PAIR = 16, 8
GRID_Y = 65_535  # CTAs along the second axis of a grid


def page_align(kernel: Compressor) -> int:
    """Return the bytes on which pages start: what one thread stores at most."""
    return PAIR if kernel.form == "kv" else 4


def fake_args(kernel: Compressor) -> tuple:
    """Arguments for `compile_for`: symbolic extents and strides, no memory."""
    fake = Fakes()
    kv, gate, k, z, ape = (fake(Float32, extents, WIDE) for extents in ("TW", "TW", "SRW", "SRW", "MW"))
    rows = Rows(kv, gate, k, None if kernel.running else z, ape)
    cos, sin = (fake(Float32, "NF", PAIR) for _ in range(2))
    ends = Ends(fake(Float32, "D", WIDE), cos, sin, fake(Int32, "BC", WIDE), fake(Int32, "T"))
    if kernel.layout is None:
        out = Pages(fake(cutlass.BFloat16, "OD", PAIR) if kernel.form == "bf16" else fake(Float32, "OD", WIDE), None)
    else:
        out = Pages(fake(Int32, "PI", page_align(kernel)), fake(cutlass.Uint8, "PJ"))
    return rows, ends, out, divisor(1), Float32(1.0), Int32(1), cuda.CUstream(0)


def launch_args(kernel: Compressor, call: Any, stream: int = 0) -> tuple:
    """Check a call and wrap its tensors for the compiled kernel.

    Args:
        kernel: what was compiled. call: its tensors and numbers by name, as `op.Call` has them. stream: CUDA stream.

    Raises:
        ArgumentError: a tensor of a wrong type, shape or stride, or pages that are too short or too many.
    """
    kv, weights, batch, state = call.kv, call.weights, call.batch, call.state
    tokens = len(kv)
    if kernel.single and len(batch.requests) != tokens:
        raise ArgumentError("requests.shape", tuple(batch.requests.shape), f"[{tokens}, 4]: one row a request")
    k, z = (state.parts, None) if kernel.running else state
    name, kept = ("state.parts", 3) if kernel.running else ("state.k", kernel.rows)
    rows = Rows(
        wrap("kv", kv, Float32, (None, kernel.width), WIDE),
        wrap("gate", call.gate, Float32, (tokens, kernel.width), WIDE),
        wrap(name, k, Float32, (None, kept, kernel.width), WIDE),
        None if kernel.running else wrap("state.z", z, Float32, tuple(k.shape), WIDE),
        wrap("weights.ape", weights.ape, Float32, (kernel.rate, kernel.width), WIDE),
    )
    closing = -(-len(weights.cos) // kernel.rate)
    ends = Ends(
        wrap("weights.norm", weights.norm, Float32, (kernel.dim,), WIDE),
        wrap("weights.cos", weights.cos[:: kernel.rate], Float32, (None, ROPE // 2), PAIR),
        wrap("weights.sin", weights.sin[:: kernel.rate], Float32, (closing, ROPE // 2), PAIR),
        wrap("requests", batch.requests, Int32, (None, 4), WIDE),
        wrap("slots", batch.slots, Int32, (tokens,)),
    )
    items = len(batch.requests) if kernel.single else tokens // kernel.rate + len(batch.requests)
    if items > GRID_Y * kernel.items:
        allowed = f"at most {GRID_Y * kernel.items} entries in a call: T / {kernel.rate} + B, or B in a decode step"
        raise ArgumentError("requests.shape", tuple(batch.requests.shape), f"{allowed}, not {items}")
    out = _out(kernel, call.out)
    return rows, ends, out, divisor(call.out.page_size), Float32(call.eps), Int32(items), cuda.CUstream(stream)


def _out(kernel: Compressor, out: Any) -> Pages:
    """Wrap where entries go: rows, or pages as words and as bytes."""
    if kernel.layout is None:
        element, align = (cutlass.BFloat16, PAIR) if kernel.form == "bf16" else (Float32, WIDE)
        return Pages(wrap("out.data", out.data, element, (None, kernel.dim), align), None)
    pages, needed = out.data, out.page_size * kernel.layout.entry_bytes
    if pages.dim() != 2 or pages.shape[1] < needed:
        raise ArgumentError("out.data.shape", tuple(pages.shape), f"at least {needed} bytes a page of {out.page_size}")
    used = pages[:, :needed]
    wrap("out.data", used, cutlass.Uint8, (None, None), page_align(kernel))
    words = wrap("out.data", as_words("out.data", used), Int32, (None, None), page_align(kernel))
    return Pages(words, wrap("out.data", used, cutlass.Uint8, (None, None)))
