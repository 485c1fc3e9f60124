"""Show a method of a kernel as one configuration compiles it, and what changed since another one.

A kernel's methods branch on its configuration with `cutlass.const_expr`, which the compiler decides. A reader wants
the lines that are compiled: branches are decided by the kernel object, and only the taken one is shown.
"""

from __future__ import annotations

import ast
import difflib
import html
import inspect
import operator
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsv4lib.errors import ArgumentError
from dsv4lib.viz.style import INK, MUTED

STATIC = "cutlass.const_expr"
_COMPARE = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
_LOOK = {"+": f"background:#dcefe3;color:{INK}", "-": f"background:#f7e1dc;color:{MUTED}", " ": f"color:{INK}"}


def specialised(function: Callable[..., Any], kernel: Any = None) -> list[str]:
    """Return a function's lines, without decorators and annotations of its arguments, branches decided by ``kernel``.

    Args:
        function: one that is written with def. kernel: what `self` is; None: no branch is decided.

    Raises:
        ArgumentError: it is not.
    """
    lines = textwrap.dedent(inspect.getsource(inspect.unwrap(function))).splitlines()
    definition = ast.parse("\n".join(lines)).body[0]
    if not isinstance(definition, ast.FunctionDef):
        raise ArgumentError("function", function, "a function written with def")
    names = ", ".join(argument.arg for argument in (*definition.args.posonlyargs, *definition.args.args))
    head = f"def {definition.name}({names}):"
    return [head, *_decided(definition.body, definition.body[0].lineno, definition.end_lineno, lines, kernel)]


def _decided(body: list[ast.stmt], first: int, last: int, lines: list[str], kernel: Any) -> list[str]:
    """Lines ``first`` to ``last``, counted from 1, of statements; each decided branch instead of its statement."""
    found, at = [], first
    nodes = (node for statement in body for node in ast.walk(statement) if isinstance(node, ast.If))
    for node in sorted(nodes, key=lambda node: node.lineno):
        if node.lineno < at or _value(node, kernel) is None:  # inside one that is done, or not decided
            continue
        taken = _branch(node, lines, kernel)
        found += lines[at - 1 : node.lineno - 1] + taken
        at = node.end_lineno + 1
        if node in body and taken and taken[-1].lstrip().startswith("return"):
            return found  # what follows is never reached
    return found + lines[at - 1 : last]


def _branch(node: ast.If, lines: list[str], kernel: Any) -> list[str]:
    """The taken branch of a decided if, moved to its column."""
    value = _value(node, kernel)
    if value is None:  # an elif that is not decided
        return [lines[node.lineno - 1].replace("elif ", "if ", 1), *lines[node.lineno : node.end_lineno]]
    if value:
        inside = _decided(node.body, node.test.end_lineno + 1, node.body[-1].end_lineno, lines, kernel)
    elif not node.orelse:
        return []
    elif lines[node.orelse[0].lineno - 1].lstrip().startswith("elif "):
        return _branch(node.orelse[0], lines, kernel)
    else:
        after = node.body[-1].end_lineno
        start = next(n for n in range(after, len(lines)) if lines[n].strip() == "else:") + 2
        inside = _decided(node.orelse, start, node.orelse[-1].end_lineno, lines, kernel)
    return [line.removeprefix("    ") for line in inside]


def _value(node: ast.If, kernel: Any) -> bool | None:
    """The value of a test that the compiler decides, None if it is not one or ``kernel`` does not say."""
    test = node.test
    if kernel is None or not (isinstance(test, ast.Call) and ast.unparse(test.func) == STATIC):
        return None
    try:
        return bool(_evaluated(test.args[0], kernel))
    except (LookupError, AttributeError):
        return None


def _evaluated(node: ast.expr, kernel: Any) -> Any:
    """The value of an expression of constants and of what `self` has.

    Raises:
        LookupError: there is something else in it.
    """
    match node:
        case ast.Constant(value):
            return value
        case ast.Name("self"):
            return kernel
        case ast.Attribute(value, name):
            return getattr(_evaluated(value, kernel), name)
        case ast.UnaryOp(ast.Not(), operand):
            return not _evaluated(operand, kernel)
        case ast.BoolOp(ast.And(), values):
            return all(_evaluated(value, kernel) for value in values)
        case ast.BoolOp(ast.Or(), values):
            return any(_evaluated(value, kernel) for value in values)
        case ast.Compare(left, [kind], [right]) if type(kind) in _COMPARE:
            return _COMPARE[type(kind)](_evaluated(left, kernel), _evaluated(right, kernel))
        case ast.Tuple(items):
            return tuple(_evaluated(item, kernel) for item in items)
    raise LookupError(ast.unparse(node))


def changes(now: list[str], before: list[str]) -> list[tuple[str, str]]:
    """Compare lines: ("+", new), ("-", gone) or (" ", as before), in order."""
    return [(line[0], line[2:]) for line in difflib.ndiff(before, now) if line[0] in "+- "]


def show_method(
    function: Callable[..., Any], kernel: Any = None, before: Any = None, was: Callable[..., Any] | None = None
) -> None:
    """Display a method's source as ``kernel`` compiles it.

    Args:
        function: the method, or a function.
        kernel: the object whose configuration decides branches; None: all are shown.
        before: another kernel object: lines that its method of the same name has not, or alone has, are marked.
        was: the method of ``before`` that this one replaces, where it has another name.

    Raises:
        ArgumentError: ``before`` has no method of that name.
    """
    from IPython.display import display

    lines = specialised(function, kernel)
    marked = [(" ", line) for line in lines]
    if before is not None:
        name = inspect.unwrap(was or function).__name__
        if not hasattr(type(before), name):
            raise ArgumentError("before", repr(before), f"a kernel with a method {name}; `was` names another one")
        marked = changes(lines, specialised(getattr(type(before), name), before))
    plain = inspect.unwrap(function)
    source, first = inspect.getsourcelines(plain)
    first += next(n for n, line in enumerate(source) if line.lstrip().startswith("def "))
    where = f"{Path(inspect.getsourcefile(plain)).name}, line {first}"
    since = f"{before!r}{'' if was is None else f', {name}'}"
    title = f"{where}{'' if before is None else f'; + new, - gone since {since}'}"
    text = "\n".join([title, *(f"{mark} {line}".rstrip() for mark, line in marked)])
    body = "".join(f'<div style="{_LOOK[mark]}">{html.escape(f"{mark} {line}") or " "}</div>' for mark, line in marked)
    head = f'<div style="color:{MUTED}">{html.escape(title)}</div>'
    page = f'{head}<pre style="line-height:1.35;white-space:pre;width:max-content;min-width:100%">{body}</pre>'
    display({"text/html": page, "text/plain": text}, raw=True)
