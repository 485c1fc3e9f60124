"""Spell instructions that the DSL has no form for. They are bf16 pairs, copies, stores to other CTAs.

Source: PTX ISA, "cvt", "cp.async", "mapa", "st.async".
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def unpack_bits(word: Uint32, *, loc: Any = None, ip: Any = None) -> tuple:
    """Unpack both bf16 of a pair as bits of fp32.

    Opaque to the compiler, which would keep them, not the pair.
    """
    text = "{ shl.b32 {$w0}, {$r0}, 16; and.b32 {$w1}, {$r0}, 0xFFFF0000; }"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32] * 2, read_only_args=[word], loc=loc, ip=ip)


def unpack(word: Uint32) -> list:
    """Unpack both bf16 of a pair as fp32."""
    return [bits.bitcast(Float32) for bits in unpack_bits(word)]


@dsl_user_op
def pack(low: Float32, high: Float32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Round two values to a pair of bf16."""
    text = "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[low, high], loc=loc, ip=ip)


@dsl_user_op
def send_to_cta(
    target: cute.Pointer, cta: Int32, values: list, barrier: cute.Pointer, *, loc: Any = None, ip: Any = None
) -> None:
    """Store four floats at ``target`` in SMEM of the cluster's CTA ``cta``.

    That CTA's ``barrier`` counts the bytes: a cluster-wide barrier would also wait for global loads and stores.
    """

    def mapped(pointer: cute.Pointer) -> Int32:
        text, args = "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", [pointer.toint(loc=loc, ip=ip), cta]
        return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=args, loc=loc, ip=ip)

    text = (
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [{$r0}], {{$r2}, {$r3}, {$r4}, {$r5}}, [{$r1}];"
    )
    args = [mapped(target), mapped(barrier), *(value.bitcast(Uint32) for value in values)]
    cute.arch.inline_ptx(text, read_only_args=args, loc=loc, ip=ip)


@dsl_user_op
def load_four(address: Int32, *, loc: Any = None, ip: Any = None) -> list:
    """Load four words from shared memory."""
    text = "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
    return list(cute.arch.inline_ptx(text, write_only_types=[Uint32] * 4, read_only_args=[address], loc=loc, ip=ip))


@dsl_user_op
def copy_16_bytes(target: Int32, source: cute.Pointer, *, loc: Any = None, ip: Any = None) -> None:
    """Copy 16 bytes from global to shared memory, asynchronously.

    In the thread's next group of copies.
    """
    text = "cp.async.cg.shared.global [{$r0}], [{$r1}], 16;"
    cute.arch.inline_ptx(text, read_only_args=[target, source], loc=loc, ip=ip)
