"""Move vectors of 4 fp32 between global memory and registers.

Under a predicate and in program order.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cutlass_dsl import dsl_user_op

MINUS_INF, ZERO = "0fFF800000", "0f00000000"


@dsl_user_op
def evict_first(*, loc: Any = None, ip: Any = None) -> Int64:
    """Make the L2 policy of data that is read once, as `bulk.load_bulk`.

    Make it once, as it takes instructions.
    """
    text = "createpolicy.fractional.L2::evict_first.b64 {$w0}, 1.0;"
    return cute.arch.inline_ptx(text, write_only_types=[Int64], loc=loc, ip=ip)


@dsl_user_op
def load4(
    address: Int64, wanted: Boolean, default: str, policy: Int64 | None = None, *, loc: Any = None, ip: Any = None
) -> tuple:
    """Load 4 fp32 where ``wanted``, else 4 times ``default``. policy: of L2, then nothing stays in L1."""
    moves = " ".join(f"mov.f32 t{i}, {default};" for i in range(4))
    load, hint, args = "ld.global.v4.f32", "", [address, Int32(wanted)]
    if policy is not None:
        load, hint = "ld.global.L1::no_allocate.L2::cache_hint.v4.f32", ", {$r2}"
        args.append(policy)
    text = f"""{{ .reg .pred p; .reg .f32 t<4>; setp.ne.s32 p, {{$r1}}, 0; {moves}
        @p {load} {{t0, t1, t2, t3}}, [{{$r0}}]{hint};
        mov.f32 {{$w0}}, t0; mov.f32 {{$w1}}, t1; mov.f32 {{$w2}}, t2; mov.f32 {{$w3}}, t3; }}"""
    return cute.arch.inline_ptx(text, read_only_args=args, write_only_types=[Float32] * 4, loc=loc, ip=ip)


@dsl_user_op
def store4(address: Int64, wanted: Boolean, values: list, *, loc: Any = None, ip: Any = None) -> None:
    """Store 4 fp32 to ``address`` where ``wanted``."""
    text = """{ .reg .pred p; setp.ne.s32 p, {$r1}, 0;
        @p st.global.v4.f32 [{$r0}], {{$r2}, {$r3}, {$r4}, {$r5}}; }"""
    cute.arch.inline_ptx(text, read_only_args=[address, Int32(wanted), *values], loc=loc, ip=ip)
