"""Bulk copies of neighbouring bytes between global and shared memory.

Source: PTX ISA, "cp.async.bulk".
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def load_bulk(
    smem: cute.Pointer,
    source: cute.Pointer | Int64,
    size: Int32,
    barrier: cute.Pointer,
    once: bool = False,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """Copy ``size`` bytes to shared memory, counted by the mbarrier.

    ``size`` is a multiple of 16.

    once; they are not read again soon: L2 gives their room away first, rather than what others left there.
    """
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];"
    if once:
        policy = "{ .reg .b64 p; createpolicy.fractional.L2::evict_first.b64 p, 1.0; "
        text = policy + text.replace("bytes ", "bytes.L2::cache_hint ").replace("];", "], p; }")
    args = [smem.toint(loc=loc, ip=ip), source, size, barrier.toint(loc=loc, ip=ip)]
    cute.arch.inline_ptx(text, read_only_args=args, loc=loc, ip=ip)


@dsl_user_op
def store_bulk(target: Int64, smem: Int32, size: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Copy ``size`` bytes, a multiple of 16, from shared to global memory.

    It is part of the bulk group that is open.
    """
    text = "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};"
    cute.arch.inline_ptx(text, read_only_args=[target, smem, size], loc=loc, ip=ip)
