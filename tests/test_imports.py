"""Files import each other in one direction: no circle at run time or for type checking, few inside functions."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "dsv4lib"
# Circles that close only by an import inside a function, and why. A circle that is no more must leave this list.
ALLOWED = {
    frozenset({"emulator.driver.device", "emulator.driver.dsl", "emulator.driver.host", "emulator.driver.tvm_ffi"}): (
        "entering a device installs the DSL's engine, which launches on devices; the DSL is imported only then"
    ),
    frozenset({"emulator.trace.trace", "emulator.trace.perfetto"}): "`Trace.to_perfetto` exports through its exporter",
    frozenset({"lab.run.forkserver", "lab.run.worker"}): "the fork server's child becomes a worker",
}


def modules():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        found[".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


def imports(tree, known, functions):
    """Modules that a file imports at its top or for type checking; with ``functions`` also inside of functions."""
    found, waiting = set(), list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dsv4lib"):
            stem = node.module.removeprefix("dsv4lib").lstrip(".")
            for alias in node.names:
                whole = f"{stem}.{alias.name}".lstrip(".")
                found |= {whole if whole in known else stem} & known
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("dsv4lib.") for alias in node.names} & known
        elif functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += ast.iter_child_nodes(node)
    return found


def circles(graph):
    """Groups of more than one module that reach each other (Tarjan)."""
    number, low, stack, found = {}, {}, [], []

    def visit(node):
        number[node] = low[node] = len(number)
        stack.append(node)
        for target in graph[node]:
            if target not in number:
                visit(target)
            if target in stack:
                low[node] = min(low[node], low[target])
        if low[node] == number[node]:
            place = stack.index(node)
            group = frozenset(stack[place:])
            del stack[place:]
            if len(group) > 1:
                found.append(group)

    for node in graph:
        if node not in number:
            visit(node)
    return set(found)


def graph(functions):
    known = modules()
    trees = {name: ast.parse(path.read_text()) for name, path in known.items()}
    return {name: sorted(imports(tree, set(known), functions) - {name}) for name, tree in trees.items()}


def test_circles_are_found():
    assert circles({"a": ["b"], "b": ["c"], "c": ["b", "d"], "d": []}) == {frozenset("bc")}
    text = "import dsv4lib.a\nif TYPE_CHECKING:\n    from dsv4lib.b import x\ndef f():\n    from dsv4lib import c\n"
    known = {"a", "b", "c"}
    assert imports(ast.parse(text), known, False) == {"a", "b"} and imports(ast.parse(text), known, True) == known


def test_no_circle_at_run_time_or_for_type_checking():
    assert circles(graph(functions=False)) == set()


def test_circles_inside_functions_are_argued():
    assert circles(graph(functions=True)) == set(ALLOWED)
