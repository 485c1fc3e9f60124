"""Exchange fp32 values between CTAs in global memory, the flag in the data.

Cross-CTA reduction with the flag in the data, as NCCL's LL protocol: a slot is empty when its bits are 0; a value 0.0
is sent as -0.0; the consumer resets the slot.

    producer    `send`: relaxed stores; no value has the bits of an empty slot
    consumer    `receive`: relaxed loads, repeated for the slots still empty; then `reset`

A value takes one way to L2 and one way back: no counter, fence or atomic. Each 32-bit slot is its own flag, so relaxed
accesses at GPU scope suffice; they order nothing else. Slots are 0 before a launch and after it. A consumer spins:
either all CTAs of the launch are resident, or producers precede consumers in the grid and never wait.

Source: PTX ISA, "Memory Consistency Model"; NCCL's LL protocol.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

FOUR = 4  # slots of a 16-byte access


def send(address: Any, values: Iterable, offset: int = 0) -> None:
    """Store 2 or 4 values into neighbouring slots, 0.0 as -0.0.

    Slots start ``offset`` bytes after ``address``.
    """
    _store(address, [nonzero(value) for value in values], offset)


def nonzero(value: Float32) -> Float32:
    """Return the same number, -0.0 for 0.0."""
    return cutlass.select_(value == 0.0, Float32(-0.0), value)


def _store(address: Any, values: list, offset: int = 0) -> None:
    place = f"{{$r0}}+{offset}" if offset else "{$r0}"
    words = ", ".join(f"{{$r{1 + i}}}" for i in range(len(values)))
    text = f"st.relaxed.gpu.global.v{len(values)}.f32 [{place}], {{{words}}};"
    cute.arch.inline_ptx(text, read_only_args=[address, *values])


@cute.jit
def receive(first: Int64, stride: int | Int64, wanted: cutlass.Boolean, rFours: cute.Tensor):
    """Load fours of slots until none of them is empty.

    All lanes of the warp call it.

    Args:
        first: address of this lane's first four. stride: bytes from one four to the next.
        wanted: whether this lane has any; else its values are 0.
        rFours: [4, fours] fp32, overwritten.
    """
    count = rFours.shape[1]
    rEmpty = cute.make_rmem_tensor(count, Int32)
    rEmpty.fill(cutlass.select_(wanted, Int32(1), Int32(0)))
    rFours.fill(0.0)
    missing = wanted
    while cute.arch.vote_any_sync(missing):
        for k in cutlass.range_constexpr(count):
            if rEmpty[k] != 0:
                text = "ld.relaxed.gpu.global.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
                four = cute.arch.inline_ptx(
                    text, write_only_types=[Float32] * FOUR, read_only_args=[first + Int64(stride * k)]
                )
                for v in cutlass.range_constexpr(FOUR):
                    rFours[v, k] = four[v]
        any_empty = Int32(0)
        for k in cutlass.range_constexpr(count):
            empty = Int32(0)
            for v in cutlass.range_constexpr(FOUR):
                empty = cutlass.select_(rFours[v, k].bitcast(Int32) == 0, Int32(1), empty)
            rEmpty[k] = cutlass.select_(wanted, empty, Int32(0))
            any_empty = any_empty | rEmpty[k]
        missing = any_empty != 0


@cute.jit
def reset(first: Int64, stride: int | Int64, wanted: cutlass.Boolean, count: cutlass.Constexpr):
    """Empty ``count`` of the fours of slots that this lane received, if ``wanted``."""
    if wanted:
        for k in cutlass.range_constexpr(count):
            _store(first + Int64(stride * k), [Float32(0.0)] * FOUR)


@cute.jit
def wait(slot: Any, wanted: cutlass.Boolean):
    """Load one slot until it is not empty, if ``wanted``; the slot keeps its value."""
    word = cutlass.select_(wanted, Int32(0), Int32(1))
    while word == 0:
        text = "ld.relaxed.gpu.global.u32 {$w0}, [{$r0}];"
        word = cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[slot])
