"""Inline device functions (``.func``). A call becomes the function's body, in a scope of its own.

PTX ISA, "Abstracting the ABI": arguments and results are variables of the ``.param`` space that the caller declares.
In the body the names of the formal parameters mean those variables, so nothing has to be copied; ``ret`` becomes a
branch to after the call. A call of an address becomes a chain: of every function whose address the file takes and whose
parameters are like those that are passed, a comparison and its body. Parameters in registers (PTX before version 2) are
refused. A function that calls itself, or one that calls it, is inlined up to a depth (`too_deep`); a deeper call stops
the launch when it is made.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence

from dsv4lib.emulator.ptx.ir import Function, Module, Operand, Symbol, Vector
from dsv4lib.emulator.ptx.lexer import Source
from dsv4lib.emulator.ptx.operands import OperandError
from dsv4lib.emulator.ptx.variables import parameters

NOWHERE = "(no function)"  # the callee of an address that is no function's
DEEPER = "(recursion)"  # the callee of a recursion that is deeper than it is inlined
MAX_DEPTH = 64  # of a function in itself
MAX_COPIES = 512  # of bodies that calls within a recursion multiply
CODE_BYTES = 16  # from one function's address to the next
_FUNCTION = re.compile(
    r"\.func\b\s*(?:\.attribute\s*\([^)]*\)\s*)?(?:\(([^()]*)\)\s*)?([%$_A-Za-z][\w$]*)\s*(?:\(([^()]*)\))?[^{;]*\{"
)

_CALL = re.compile(r"\bcall(?:\.uni)?\b")
_ADDRESS_OF = re.compile(r"\bmov\.\w+\s+[%$_A-Za-z][\w$]*\s*,\s*([%$_A-Za-z][\w$]*)\s*;")


def functions(source: Source) -> dict[str, Function]:
    """Find every device function with a body."""
    found = enumerate(_FUNCTION.finditer(source.text), 1)
    return {m[2]: Function(m[2], m[1] or "", m[3] or "", m.end(), CODE_BYTES * i) for i, m in found}


def pointed(source: Source, module: Module) -> list[Function]:
    """Find functions whose address the file takes, in a ``mov`` or in an initialiser."""
    names = {pointer.name for variable in module.variables for pointer in variable.pointers}
    names |= set(_ADDRESS_OF.findall(source.text))
    return [function for name, function in module.functions.items() if name in names]


def too_deep(source: Source, function: Function, active: Sequence[Function]) -> bool:
    """Tell whether a recursion is as deep as it is inlined, the innermost of the ``active`` calls being the last.

    The bodies of functions that call each other multiply, so all calls from the first recursive function on count.
    """
    stack = [*active, function]
    if function not in active:
        return False
    first = next(i for i, one in enumerate(stack) if one in stack[i + 1 :])
    copies = math.prod(_calls(source.text, one.body) for one in active[first:])
    return active.count(function) >= MAX_DEPTH or copies >= MAX_COPIES


@functools.lru_cache(256)
def _calls(text: str, start: int) -> int:
    """Count the calls of a body, at least 1. Which of them lead back to it is not looked at."""
    level, at = 1, start
    while level and at < len(text):
        level += (text[at] == "{") - (text[at] == "}")
        at += 1
    return max(1, len(_CALL.findall(text, start, at)))


def sizes(function: Function) -> list[int]:
    """Count the bytes of its results and parameters."""
    return [p.size for text in (function.results, function.params) for p in parameters(text)]


def bind(function: Function, operands: Sequence[Operand]) -> dict[str, str]:
    """Map each parameter's name to the caller's variable that it is.

    Args:
        function: the callee.
        operands: of the call: ``(result), name, (arguments)``, results and arguments only where there are some.

    Raises:
        OperandError: numbers of arguments differ, or one is not a variable of the .param space.
    """
    given: list[str] = []
    for operand in operands:
        if isinstance(operand, Vector):
            if not all(isinstance(item, Symbol) for item in operand.items):
                raise OperandError(f"call of {function.name}: only variables of the .param space can be passed")
            given += [item.name for item in operand.items if isinstance(item, Symbol)]
    formal = [p.name for text in (function.results, function.params) for p in parameters(text)]
    if len(formal) != len(given):
        raise OperandError(f"call of {function.name}: {len(given)} results and arguments, it has {len(formal)}")
    return dict(zip(formal, given, strict=True))
