"""Find the cells of a notebook that some metrics depend on.

A backward slice over names that cells bind, change and read.

An injected fault must turn a gate red. What the notebook does beside the computation of that gate's metric, other
experiments, figures and other metrics, says nothing about it, so a run of the fault may leave it out (`Options.slices`
of the runner). Cells are kept or left out whole and run as they are written; only the call of `lab.verdict` in the
last cell is reduced to the one metric. A fault that must turn several gates red needs the cells of all their metrics.

Working backwards from the metric's value, a cell is needed if it binds a name that is needed, or may change the object
that one names: it stores to an item or an attribute, calls a method for its effect, or hands the object to a call whose
result it drops. Always needed are the parameters, the cell with the card (imports, settings) and a cell in which a
parameter of the fault meets such an effect: it may be what injects it. Names that a function reads count where the
function is named. What cannot be read statically (magics, a verdict without a literal) means that nothing is left out.

Not seen are changes of an object through a second name for it, or by a call whose result is kept. A slice that misses
one reports another value than the whole notebook; `./dsv4 run --negatives` and the nightlies run whole notebooks.

Source: M. Weiser, "Program Slicing", 1981.
"""

from __future__ import annotations

import ast
import builtins
import copy
import json
import symtable
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv4lib.lab.stage import Negative

# Calls that only draw or print: by the last part of their name, or by the module that they come from.
DRAWING = ("show", "show_table", "print", "display", "explore", "show_microscope")
DRAWING_MODULES = ("viz", "views")
CARD, VERDICT = "lab.card", "lab.verdict"
LEFT_OUT = "skip-execution"  # nbclient's tag of cells that it does not execute
ONLY = "DSV4_ONLY_METRIC"  # environment variable: the metrics, by commas, that `lab.verdict` asks for; empty for all


@dataclass(frozen=True)
class Slice:
    """What a run of some metrics needs.

    Attributes:
        left_out: numbers of the cells that are not executed.
        verdict: number of the cell with the verdict; source: what it executes instead.
    """

    left_out: tuple[int, ...]
    verdict: int
    source: str


def of_notebook(path: Path, fault: Negative) -> Slice | None:
    """Slice the notebook at ``path`` for an injected fault's gates. None if the whole notebook has to run."""
    cells = json.loads(path.read_text())["cells"]
    sources = ["".join(cell["source"]) if cell["cell_type"] == "code" else None for cell in cells]
    switches = [name for name, value in fault.parameters.items() if isinstance(value, str | bool)]  # no sizes
    return slice_for(sources, fault.metrics, switches)


def apply(cells: Sequence[Any], part: Slice) -> None:
    """Mark what ``part`` leaves out in a notebook's cells, and reduce its verdict."""
    for number in part.left_out:
        tags = cells[number].metadata.setdefault("tags", [])
        tags.append(LEFT_OUT)
    cells[part.verdict].source = part.source


@dataclass
class _Unit:
    """A cell, or a statement of the cell with the verdict. Modules count as changed only where an attribute is set.

    Attributes:
        binds: names it may bind; always: those it binds whatever happens, before it reads them.
        changes: names whose objects it may change.
        reads: names it reads; acts: it calls something for its effect.
    """

    binds: set[str] = field(default_factory=set)
    always: set[str] = field(default_factory=set)
    changes: set[str] = field(default_factory=set)
    reads: set[str] = field(default_factory=set)
    acts: bool = False


def slice_for(cells: Sequence[str | None], metrics: Sequence[str], changed: Collection[str]) -> Slice | None:
    """Slice for ``metrics``; None if the whole notebook has to run.

    Args:
        cells: source of each code cell, None for any other cell.
        metrics: whose gates are judged.
        changed: parameters that switch the fault on; a cell that reads one and acts may inject it.
    """
    try:
        trees = {number: ast.parse(source) for number, source in enumerate(cells) if source is not None}
    except SyntaxError:
        return None
    last = max((number for number, tree in trees.items() if _verdict_of(tree) is not None), default=None)
    if last is None:
        return None
    call, before = _verdict_of(trees[last]), trees[last].body[:-1]
    if call is None or not _only(call, metrics):
        return None
    needed = _names(call)
    if isinstance(value := _metrics(call).value, ast.Name) and _by_item(trees, value.id):
        needed |= {_item(value.id, metric) for metric in metrics}
    imported, late = _imported(trees.values()), _late(trees.values())
    needed = late.reads(needed)
    kept: list[ast.stmt] = [ast.Expr(call)]
    for statement in reversed(before):
        needed, taken = _step(_unit([statement], imported, late), needed, changed)
        kept[:0] = [statement] if taken else []
    left_out = []
    for number in sorted((n for n in trees if n < last), reverse=True):
        unit = _unit(trees[number].body, imported, late)
        fixed = number in _first(trees) or _calls(trees[number], CARD)
        needed, taken = _step(unit, needed, changed, fixed)
        left_out += [] if taken else [number]
    left_out += [number for number in trees if number > last]
    source = ast.unparse(ast.fix_missing_locations(ast.Module(kept, [])))
    return Slice(tuple(sorted(left_out)), last, source)


def needed_by(cells: Sequence[str | None], number: int, source: str) -> tuple[int, ...]:
    """List the code cells before cell ``number`` that ``source`` in its place needs; all, if one cannot be read.

    Args:
        cells: source of each code cell, None for any other cell.
        number: of the cell; source: what it executes.
    """
    before = [n for n in range(number) if cells[n] is not None]
    try:
        trees = {n: ast.parse(cells[n]) for n in before} | {number: ast.parse(source)}
    except SyntaxError:
        return tuple(before)
    imported, late = _imported(trees.values()), _late(trees.values())
    own = _unit(trees[number].body, imported, late)
    needed, kept = own.reads | own.changes, []
    for n in reversed(before):
        fixed = n in _first(trees) or _calls(trees[n], CARD)
        needed, taken = _step(_unit(trees[n].body, imported, late), needed, (), fixed)
        kept[:0] = [n] if taken else []
    return tuple(kept)


def _step(unit: _Unit, needed: set[str], changed: Collection[str], fixed: bool = False) -> tuple[set[str], bool]:
    """Names needed before ``unit``, and whether it is needed itself."""
    injects = unit.acts and not unit.reads.isdisjoint(changed)
    if not (fixed or injects or needed & (unit.binds | unit.changes)):
        return needed, False
    return (needed - unit.always) | unit.reads | unit.changes, True


def _first(trees: dict[int, ast.Module]) -> tuple[int, ...]:
    """The cell of the parameters: the first."""
    return tuple(sorted(trees)[:1])


def _verdict_of(tree: ast.Module) -> ast.Call | None:
    """The call of `lab.verdict` that ends a cell (a copy), if one does."""
    end = tree.body[-1] if tree.body else None
    if isinstance(end, ast.Expr) and isinstance(end.value, ast.Call) and ast.unparse(end.value.func) == VERDICT:
        return copy.deepcopy(end.value)
    return None


def _metrics(call: ast.Call) -> ast.keyword:
    return next((k for k in call.keywords if k.arg == "metrics"), ast.keyword(None, ast.Constant(None)))


def _only(call: ast.Call, metrics: Sequence[str]) -> bool:
    """Reduce the verdict to ``metrics``; False where their values cannot be separated from the others'."""
    given = _metrics(call)
    if isinstance(given.value, ast.Name):
        return True  # a dict filled on the way; only items with a literal key can be separated
    if not isinstance(given.value, ast.Dict):
        return False
    pairs = list(zip(given.value.keys, given.value.values, strict=True))
    if any(key is not None and not isinstance(key, ast.Constant) for key, _ in pairs):
        return False
    named = {key.value: (key, value) for key, value in pairs if isinstance(key, ast.Constant) and key.value in metrics}
    rest = [] if named.keys() >= set(metrics) else [(key, value) for key, value in pairs if key is None]
    chosen = [*named.values(), *rest]
    given.value = ast.Dict([key for key, _ in chosen], [value for _, value in chosen])
    return bool(rest) or named.keys() >= set(metrics)


def _unit(body: Sequence[ast.stmt], imported: dict[str, bool], late: _Late) -> _Unit:
    unit, tree = _Unit(), ast.Module(list(body), [])
    outside = {"", *imported, *dir(builtins)}
    unit.binds = _names(tree, bound=True)
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(ctx=ast.Store() | ast.Del()) | ast.Attribute(ctx=ast.Store() | ast.Del()):
                unit.changes |= {_root(node)} - {""}
            case ast.Expr(value=ast.Call() as call) if not _draws(call, imported):
                unit.acts = True
                given = (call.func, *call.args, *(k.value for k in call.keywords))
                unit.changes |= {_root(part) for part in given} - outside
            case ast.Call(func=ast.Attribute(attr=attr, value=value)) if attr.endswith("_") and not attr.endswith("__"):
                unit.changes |= {_root(value)} - outside  # PyTorch's name for "in place"
    unit.changes &= _names(tree) | unit.binds  # a function's own variables are private
    unit.changes |= late.changes(_names(tree))
    unit.reads, unit.always = _flow(body, set(), late)
    return unit


def _flow(body: Sequence[ast.stmt], bound: set[str], late: _Late) -> tuple[set[str], set[str]]:
    """(names that ``body`` reads as others left them, names bound for certain after it); ``bound``: those before."""
    reads, bound = set(), set(bound)
    for statement in body:
        inner: list[tuple[Sequence[ast.stmt], set[str]]] = []
        match statement:
            case ast.For(target=target, iter=head, body=first, orelse=second):
                inner, outer = [(first, bound | _targets(target)), (second, bound)], [head]
            case ast.If(test=head, body=first, orelse=second):
                inner, outer = [(first, bound), (second, bound)], [head]
            case ast.With(items=items, body=first):
                outer = [item.context_expr for item in items]
                bound |= set().union(*(_targets(item.optional_vars) for item in items if item.optional_vars))
                inner = [(first, bound)]
            case _:
                outer = [statement]
        reads |= set().union(*(late.reads(_names(part)) for part in outer)) - bound
        flows = [_flow(part, before, late) for part, before in inner]
        reads |= set().union(*(found for found, _ in flows))
        bound |= flows[0][1] if isinstance(statement, ast.With) else _certain(statement)
    return reads, bound


def _certain(statement: ast.stmt) -> set[str]:
    """Names that a simple statement binds if it is executed at all."""
    sure = ast.Assign | ast.AnnAssign | ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
    return _names(statement, bound=True) if isinstance(statement, sure) else set()


def _targets(node: ast.AST) -> set[str]:
    """Variables among the targets of a loop or a `with`."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _names(tree: ast.AST, bound: bool = False) -> set[str]:
    """Variables of the notebook that ``tree`` reads, or those that it binds; functions have variables of their own."""
    scopes = [symtable.symtable(ast.unparse(tree), "cell", "exec")]
    found = set()
    for scope in scopes:
        for name in scope.get_symbols():
            used = name.is_assigned() or name.is_imported() if bound else name.is_referenced()
            if used and (scope is scopes[0] or name.is_global()):
                found.add(name.get_name())
        scopes += scope.get_children()
    if not bound:
        found |= {_root(node.target) for node in ast.walk(tree) if isinstance(node, ast.AugAssign)} - {""}
    return found


@dataclass
class _Late:
    """What functions, classes and variables with a lambda read and change when they are called, by name."""

    read: dict[str, set[str]] = field(default_factory=dict)
    changed: dict[str, set[str]] = field(default_factory=dict)

    def reads(self, names: set[str]) -> set[str]:
        """``names`` and what those among them that are functions read, functions again included."""
        found, new = set(names), set(names)
        while new:
            new = set().union(*(self.read.get(name, set()) for name in new)) - found
            found |= new
        return found

    def changes(self, names: set[str]) -> set[str]:
        """List the notebook's variables whose objects the functions among ``names`` may change."""
        return set().union(*(self.changed.get(name, set()) for name in self.reads(names)))


def _late(trees: Collection[ast.Module]) -> _Late:
    late, imported = _Late(), _imported(trees)
    for statement in (s for tree in trees for s in tree.body):
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            names, body = {statement.name}, statement.body
        elif isinstance(statement, ast.Assign) and any(isinstance(n, ast.Lambda) for n in ast.walk(statement)):
            names, body = _certain(statement), [statement]
        else:
            continue
        outer = _names(statement) | (_names(statement, bound=True) - names)  # not what is a function's own
        for name in names:
            late.read.setdefault(name, set()).update(_names(statement))
            unit = _unit(body, imported, _Late())
            late.changed.setdefault(name, set()).update((unit.changes | unit.binds - names) & outer)
    return late


def _by_item(trees: dict[int, ast.Module], name: str) -> bool:
    """Make a variable of each item of the dict ``name`` that is used by a literal key, if nothing reads it whole.

    The verdict reads it whole, as do stores under computed keys, which therefore are changes of all.
    """
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    items = [n for n in nodes if isinstance(n, ast.Subscript) and isinstance(n.value, ast.Name) and n.value.id == name]
    single = [n for n in items if isinstance(n.slice, ast.Constant) and str(n.slice.value).isidentifier()]
    stores = [n for n in items if not isinstance(n.ctx, ast.Load)]
    whole = [n for n in nodes if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)]
    if len(whole) > 1 + len({id(n) for n in (*single, *stores)}):
        return False
    replace = _Items(name)
    for number in trees:
        trees[number] = replace.visit(trees[number])
    return True


class _Items(ast.NodeTransformer):
    """``d["x"]`` -> one variable."""

    def __init__(self, name: str):
        self.name = name

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """See the class."""
        self.generic_visit(node)
        match node:
            case ast.Subscript(ast.Name(self.name), ast.Constant(str(key)), context) if key.isidentifier():
                return ast.copy_location(ast.Name(_item(self.name, key), context), node)
        return node


def _item(name: str, key: str) -> str:
    return f"{name}__{key}"


def _imported(trees: Collection[ast.Module]) -> dict[str, bool]:
    """Names that the notebook imports -> whether they come from a module that only draws."""
    found = {}
    for node in (n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)):
        folder = (getattr(node, "module", None) or "").split(".")
        for alias in node.names:
            parts = [*folder, *alias.name.split(".")]
            drawn = any(part.endswith(DRAWING_MODULES) for part in parts)
            found[alias.asname or alias.name.partition(".")[0]] = drawn
    return found


def _draws(call: ast.Call, imported: dict[str, bool]) -> bool:
    return ast.unparse(call.func).rpartition(".")[2] in DRAWING or imported.get(_root(call.func), False)


def _calls(tree: ast.Module, name: str) -> bool:
    return any(isinstance(node, ast.Call) and ast.unparse(node.func) == name for node in ast.walk(tree))


def _root(node: ast.AST) -> str:
    """The variable that an expression of items, attributes and calls starts from; "" if there is none."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Starred | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
