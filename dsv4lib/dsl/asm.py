"""Write inline PTX that the compiler may move, or with early-clobbered results.

`cute.arch.inline_ptx` cannot say these.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

_LETTERS = {Float32: "f", Int64: "l"}  # of a constraint; other types are 32-bit words


@dsl_user_op
def asm(
    text: str,
    results: list,
    arguments: list,
    *,
    pure: bool = False,
    early: bool = False,
    kept: list | None = None,
    loc: Any = None,
    ip: Any = None,
) -> Any:
    """Emit PTX with $0, $1, .. for results, then ``kept`` (numbered, not named again), then arguments.

    Args:
        text: the instructions. results: types of what they write. arguments: numbers of the DSL.
        pure: equal arguments give equal results, nothing else is read or written: the compiler may move or drop it.
        early: results are written before the last argument is read: no register is shared.
        kept: numbers that the first results start as: each is in the register of its result.

    Returns:
        None, one number, or a list of them.
    """
    kept = kept or []
    values = [x.ir_value(loc=loc, ip=ip) for x in [*kept, *arguments]]
    outputs = ["=&"[: 1 + early] + _LETTERS.get(one, "r") for one in results]
    inputs = [*map(str, range(len(kept))), *(_LETTERS.get(type(x), "r") for x in arguments)]
    types = [one.mlir_type for one in results]
    made = None
    if types:
        made = types[0] if len(types) == 1 else llvm.StructType.get_literal(types)
    found = llvm.inline_asm(
        made,
        values,
        text,
        ",".join(outputs + inputs),
        has_side_effects=not pure,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    if not types:
        return None
    if len(types) == 1:
        return results[0](found)
    parts = [llvm.extractvalue(one, found, [i], loc=loc, ip=ip) for i, one in enumerate(types)]
    return [kind(part) for kind, part in zip(results, parts, strict=True)]
