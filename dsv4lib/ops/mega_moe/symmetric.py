"""Access memory of other devices and flags in it, by inline PTX: addresses are numbers, scopes are spelled out.

Peers' memory is mapped into the address space of the device, so a peer's address is its base plus an offset. What
another device waits for is released and acquired at .sys scope; .gpu scope orders threads of one device alone.

Source: PTX ISA, "Memory Consistency Model", "Scope", "cp.async.bulk".
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def store_word(address: Int64, value: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Store 32 bits, weakly."""
    cute.arch.inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[address, value], loc=loc, ip=ip)


@dsl_user_op
def load_word(address: Int64, *, loc: Any = None, ip: Any = None) -> Int32:
    """Load 32 bits, weakly."""
    text = "ld.global.b32 {$w0}, [{$r0}];"
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[address], loc=loc, ip=ip)


@dsl_user_op
def load_float(address: Int64, *, loc: Any = None, ip: Any = None) -> Float32:
    """Load an fp32, weakly."""
    text = "ld.global.f32 {$w0}, [{$r0}];"
    return cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[address], loc=loc, ip=ip)


@dsl_user_op
def load_long(address: Int64, *, loc: Any = None, ip: Any = None) -> Int64:
    """Load 64 bits, weakly."""
    text = "ld.global.b64 {$w0}, [{$r0}];"
    return cute.arch.inline_ptx(text, write_only_types=[Int64], read_only_args=[address], loc=loc, ip=ip)


@dsl_user_op
def store_flag(
    address: Int64, low: Int32, high: Int32, how: str = "release.sys", *, loc: Any = None, ip: Any = None
) -> None:
    """Store two words as one 64-bit flag; by default it releases to other devices."""
    text = f"{{ .reg .b64 pair; mov.b64 pair, {{{{$r1}}, {{$r2}}}}; st.{how}.global.b64 [{{$r0}}], pair; }}"
    cute.arch.inline_ptx(text, read_only_args=[address, low, high], loc=loc, ip=ip)


@dsl_user_op
def load_flag(address: Int64, how: str = "acquire.sys", *, loc: Any = None, ip: Any = None) -> tuple[Int32, Int32]:
    """Load the two words of a 64-bit flag; by default it acquires from other devices."""
    text = f"{{ .reg .b64 pair; ld.{how}.global.b64 pair, [{{$r0}}]; mov.b64 {{{{$w0}}, {{$w1}}}}, pair; }}"
    return cute.arch.inline_ptx(text, write_only_types=[Int32, Int32], read_only_args=[address], loc=loc, ip=ip)


@dsl_user_op
def add(address: Int64, value: Int32, how: str, *, loc: Any = None, ip: Any = None) -> None:
    """Add to a counter; ``how``: semantics and scope."""
    text = f"red.{how}.global.add.u32 [{{$r0}}], {{$r1}};"
    cute.arch.inline_ptx(text, read_only_args=[address, value], loc=loc, ip=ip)


@dsl_user_op
def add_and_get(address: Int64, value: Int32, how: str, *, loc: Any = None, ip: Any = None) -> Int32:
    """Add to a counter and return what it was; ``how``: semantics and scope."""
    text = f"atom.{how}.global.add.u32 {{$w0}}, [{{$r0}}], {{$r1}};"
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[address, value], loc=loc, ip=ip)


@dsl_user_op
def load_counter(address: Int64, how: str, *, loc: Any = None, ip: Any = None) -> Int32:
    """Load a counter; ``how``: semantics and scope."""
    text = f"ld.{how}.global.b32 {{$w0}}, [{{$r0}}];"
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[address], loc=loc, ip=ip)


@dsl_user_op
def pause(*, loc: Any = None, ip: Any = None) -> None:
    """Leave the issue slots, and the word that others write, to those that have work."""
    cute.arch.inline_ptx("nanosleep.u32 32;", loc=loc, ip=ip)


@cute.jit
def wait_counter(address: Int64, wanted: Int32, how: str):
    """Load a counter until it is ``wanted``."""
    found = load_counter(address, how)
    while found != wanted:
        pause()
        found = load_counter(address, how)


@cute.jit
def wait_flag(address: Int64, epoch: Int32, how: str):
    """Load a flag until its upper word is ``epoch``; returns the lower one."""
    low, high = load_flag(address, how)
    while high != epoch:
        pause()
        low, high = load_flag(address, how)
    return low


@dsl_user_op
def proxy_fence(*, loc: Any = None, ip: Any = None) -> None:
    """Order global memory as threads have written it before what TMA reads of it."""
    cute.arch.inline_ptx("fence.proxy.async.global;", loc=loc, ip=ip)


@dsl_user_op
def commit_bulk(*, loc: Any = None, ip: Any = None) -> None:
    """Close this thread's group of bulk stores."""
    cute.arch.inline_ptx("cp.async.bulk.commit_group;", loc=loc, ip=ip)


@dsl_user_op
def wait_bulk(read_alone: bool = False, *, loc: Any = None, ip: Any = None) -> None:
    """Wait until this thread's bulk stores are visible; ``read_alone``: until they have read their source."""
    text = f"cp.async.bulk.wait_group{'.read' * read_alone} 0;"
    cute.arch.inline_ptx(text, loc=loc, ip=ip)
