"""Make arguments of the compressor: fake tensors to compile with, torch tensors checked and wrapped to launch."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import torch
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


def launch_args(
    kernel: Compressor,
    kv: torch.Tensor,
    gate: torch.Tensor,
    ape: torch.Tensor,
    norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    requests: torch.Tensor,
    slots: torch.Tensor,
    state_k: torch.Tensor,
    state_z: torch.Tensor | None,
    pages: torch.Tensor,
    page_size: int,
    eps: float,
    stream: int = 0,
) -> tuple:
    """Arguments of `Compressor` from torch tensors.

    Args:
        kernel: which says what is needed.
        kv, gate: fp32 [T, width]. ape: fp32 [rate, width]. norm: fp32 [dim].
        cos, sin: fp32 [P, 32] by position.
        requests: int32 [B, 4]. slots: int32 [T].
        state_k, state_z: fp32 [S, rows, width]; running: [S, 3, dim] and None.
        pages: uint8 [P, bytes], or rows [N, dim] of bf16 or fp32.
        page_size: entries of a page; of dense rows anything.
        eps: added to the mean of squares.
        stream: handle of a CUDA stream; 0: the default one.

    Raises:
        ArgumentError: a tensor of the wrong type, shape or stride, or pages that are too short or too many.
    """
    tokens = len(kv)
    if kernel.single and len(requests) != tokens:
        raise ArgumentError("requests.shape", tuple(requests.shape), f"[{tokens}, 4]: one row a request")
    state, kept = ("state.parts", 3) if kernel.running else ("state.k", kernel.rows)
    rows = Rows(
        wrap("kv", kv, Float32, (None, kernel.width), WIDE),
        wrap("gate", gate, Float32, (tokens, kernel.width), WIDE),
        wrap(state, state_k, Float32, (None, kept, kernel.width), WIDE),
        None if kernel.running else wrap("state.z", state_z, Float32, tuple(state_k.shape), WIDE),
        wrap("weights.ape", ape, Float32, (kernel.rate, kernel.width), WIDE),
    )
    ends = Ends(
        wrap("weights.norm", norm, Float32, (kernel.dim,), WIDE),
        wrap("weights.cos", cos[:: kernel.rate], Float32, (None, ROPE // 2), PAIR),
        wrap("weights.sin", sin[:: kernel.rate], Float32, (-(-len(cos) // kernel.rate), ROPE // 2), PAIR),
        wrap("requests", requests, Int32, (None, 4), WIDE),
        wrap("slots", slots, Int32, (tokens,)),
    )
    if kernel.layout is None:
        element = cutlass.BFloat16 if kernel.form == "bf16" else Float32
        out = Pages(wrap("out.data", pages, element, (None, kernel.dim), PAIR if kernel.form == "bf16" else WIDE), None)
    else:
        needed = page_size * kernel.layout.entry_bytes
        if pages.dim() != 2 or pages.shape[1] < needed:
            raise ArgumentError("out.data.shape", tuple(pages.shape), f"at least {needed} bytes a page of {page_size}")
        used = pages[:, :needed]
        wrap("out.data", used, cutlass.Uint8, (None, None), page_align(kernel))
        out = Pages(
            wrap("out.data", as_words("out.data", used), Int32, (None, None), page_align(kernel)),
            wrap("out.data", used, cutlass.Uint8, (None, None)),
        )
    items = len(requests) if kernel.single else tokens // kernel.rate + len(requests)
    if items > GRID_Y * kernel.items:
        allowed = f"at most {GRID_Y * kernel.items} entries in a call: T / {kernel.rate} + B, or B in a decode step"
        raise ArgumentError("requests.shape", tuple(requests.shape), f"{allowed}, not {items}")
    return rows, ends, out, divisor(page_size), Float32(eps), Int32(items), cuda.CUstream(stream)
