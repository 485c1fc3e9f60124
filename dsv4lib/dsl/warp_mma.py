"""Warp-level MMAs and the instructions that load and store their fragments.

Fragments of m16n8: lane = 4 group + member. A: rows group and group + 8; B: column group; sums: rows group (values 0,
1) and group + 8 (2, 3), columns 2 member and the next.

Source: PTX ISA, "mma.m16n8k8", "mma.m16n8k16", "ldmatrix", "stmatrix".
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cutlass_dsl import dsl_user_op


def mma(a: list, b: list, rC: cute.Tensor, dtype: str = "bf16") -> None:
    """rC += A B of one m16n8, fp32 sums.

    Args:
        a: words of A, twice as many as of B.
        b: words of B: 2 are k = 16 of "bf16" and "f16" or k = 8 of "tf32"; 1 is k = 8 of "bf16" and "f16".
        rC: [4] fp32.
        dtype: of A and B, "bf16", "f16" or "tf32" (the low 13 bits of a word are ignored).
    """
    k = (4 if dtype == "tf32" else 8) * len(b)
    given = [*a, *b, *(rC[r] for r in range(4))]
    words = [f"{{$r{i}}}" for i in range(len(given))]
    at_b, at_c = len(a), len(a) + len(b)
    operands = ", ".join(f"{{{', '.join(part)}}}" for part in (words[:at_b], words[at_b:at_c], words[at_c:]))
    text = f"mma.sync.aligned.m16n8k{k}.row.col.f32.{dtype}.{dtype}.f32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, "
    sums = cute.arch.inline_ptx(f"{text}{operands};", write_only_types=[Float32] * 4, read_only_args=given)
    for r in range(4):
        rC[r] = sums[r]


@dsl_user_op
def ldmatrix(address: Int32, transpose: bool = False, *, loc: Any = None, ip: Any = None) -> list:
    """Load four 8 x 8 matrices of 16 bits from shared memory.

    Lanes 8 k and up have the row addresses of matrix k.
    """
    kind = "ldmatrix.sync.aligned.m8n8.x4" + ".trans" * transpose
    text = kind + ".shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
    return list(cute.arch.inline_ptx(text, write_only_types=[Uint32] * 4, read_only_args=[address], loc=loc, ip=ip))


@dsl_user_op
def stmatrix(address: Int32, words: list, *, loc: Any = None, ip: Any = None) -> None:
    """Store four 8 x 8 matrices of 16 bits transposed into shared memory.

    Row addresses as in `ldmatrix`.
    """
    text = "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"
    cute.arch.inline_ptx(text, read_only_args=[address, *words], loc=loc, ip=ip)
