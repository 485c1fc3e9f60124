"""Check rules for stages and notebooks, so that a reader need not. Each finding names its stage and rule.

The order rule reads the cells as one program: a name must be defined before the cell that uses it, so that a notebook
that only works after cells were run out of order is found without running it.
"""

from __future__ import annotations

import ast
import builtins
import io
import re
import subprocess
import symtable
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4lib.lab.notebook import glossary, turns
from dsv4lib.lab.run.quick_nbformat import nbformat
from dsv4lib.lab.stage import NEEDED_SETS, Gate, Stage, StageError, discover, workspace
from dsv4lib.lab.upkeep import words

LOOSEST = 4.0  # a bound may be this many times looser than the value last seen
CELL_LINES = 25
PROSE_WORDS = 120  # of a markdown cell
NOT_PROSE = re.compile(r"^ *```.*?^ *```|^ *\|.*?$|<details>.*?</details>", re.MULTILINE | re.DOTALL)
KNOWN_NAMES = set(dir(builtins)) | {"display", "get_ipython", "__name__"}
ABSOLUTE = re.compile(r"(?<![\w.:/~])(?:/(?:home|root|Users|tmp|work|mnt|opt|usr|var|data|workspace)/|[A-Za-z]:\\\\)")


@dataclass(frozen=True)
class Problem:
    """One finding."""

    stage: str
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.stage}: {self.rule}: {self.message}"


@dataclass(frozen=True)
class Report:
    """One kind of check. It has findings, a line that says what was checked, and how many findings are problems."""

    lines: list[str]
    summary: str
    problems: int


def reports(root: Path | None = None) -> Iterator[Report]:
    """Run every check: ruff's rules, ruff's format, stages, gates, words."""
    root = root or workspace()
    yield _ruff("check", ["check", "--output-format", "concise", "."], root)
    yield _ruff("format", ["format", "--check", "."], root)
    found = [str(problem) for problem in lint_all(root)]
    count = len(list((root / "stages").glob("*/stage.toml")))
    yield Report(found, f"stages: {count} contracts and their notebooks, {_counted(found, 'problem')}", len(found))
    silent, total = unproven(root)
    gates = f"gates: {total}, {_counted(silent, 'warning')}"
    yield Report([f"{one}: no negative turns it red, and no_fault does not say why" for one in silent], gates, 0)
    paths = list(words.files(root))
    hits = words.in_tree(root, paths)
    yield Report([str(hit) for hit in hits], f"words: {len(paths)} files, {_counted(hits, 'warning')}", 0)


def _ruff(name: str, arguments: list[str], root: Path) -> Report:
    """What ruff finds; a ruff that cannot run is a problem."""
    done = subprocess.run([sys.executable, "-m", "ruff", *arguments], cwd=root, capture_output=True, text=True)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    said = lines[-1] if lines else f"exit code {done.returncode}"
    return Report(lines[:-1], f"ruff {name}: {said}", int(done.returncode != 0))


def _counted(found: list, what: str) -> str:
    return f"{len(found)} {what}{'' if len(found) == 1 else 's'}"


def lint_all(root: Path | None = None) -> list[Problem]:
    """List the problems of every stage; a contract that cannot be read is one too."""
    try:
        stages = discover(root)
    except StageError as error:
        return [Problem("stages", "contract", str(error))]
    return [problem for stage in stages for problem in lint(stage)]


def unproven(root: Path | None = None) -> tuple[list[str], int]:
    """List gates that no negative turns red and that do not say why, as stage.metric; also count all gates."""
    try:
        stages = discover(root)
    except StageError:
        return [], 0
    said = {(stage.name, gate.metric) for stage in stages for gate in stage.gates if gate.no_fault}
    silent = [f"{s.name}.{metric}" for s in stages for metric in s.never_red() if (s.name, metric) not in said]
    return silent, sum(len(stage.gates) for stage in stages)


def lint(stage: Stage) -> list[Problem]:
    """List the problems of one stage: its contract first, then its notebook."""
    found = [Problem(stage.name, rule, message) for rule, message in _contract(stage)]
    try:
        notebook = nbformat.read(stage.notebook_path, as_version=4)
        nbformat.validate(notebook)
    except FileNotFoundError:
        return [*found, Problem(stage.name, "notebook", f"there is no {stage.notebook}")]
    except (ValueError, nbformat.ValidationError, nbformat.reader.NotJSONError) as error:
        return [
            *found,
            Problem(stage.name, "notebook", f"{stage.notebook} cannot be read: {str(error).splitlines()[0]}"),
        ]
    for rules in (_parameters, _form, _content, _order):
        found += [Problem(stage.name, rule, message) for rule, message in rules(stage, notebook)]
    return found + [Problem(stage.name, "link", message) for message in glossary.problems(stage.notebook_path)]


def _contract(stage: Stage) -> Iterator[tuple[str, str]]:
    for name in NEEDED_SETS:
        if name not in stage.sets:
            yield "sets", f"there is no parameter set {name}"
    if not stage.negatives:
        yield "negatives", "there is no negative set: nothing shows that a gate can fail"
    for gate in stage.gates:
        if gate.no_fault and gate.metric not in stage.never_red():
            yield "gate", f"{gate.metric}: no_fault says that no negative turns it red, and one does"
        bound, seen = f"{gate.op} {gate.bound:g}", f"the value last seen, {gate.last_seen:g}"
        if not gate.passes(gate.last_seen):
            yield "gate", f"{gate.metric}: {seen}, does not pass {bound}"
        elif looser(gate):
            yield "gate", f"{gate.metric} {bound} is more than {LOOSEST:g} times looser than {seen}"


def looser(gate: Gate) -> bool:
    """Tell whether the bound is over four times looser than the value last seen. A bound around 0 must be 0."""
    if gate.op == "==":
        return False
    sign = 1 if gate.op in ("<", "<=") else -1
    bound, seen = sign * gate.bound, sign * gate.last_seen
    return bound > (seen * LOOSEST if seen > 0 else seen / LOOSEST)


def _parameters(stage: Stage, notebook: Any) -> Iterator[tuple[str, str]]:
    """The parameters cell and the contract say the same."""
    tagged = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        yield "parameters", f"{len(tagged)} cells are tagged `parameters`; there must be one"
        return
    found: dict[str, Any] = {}
    for line in tagged[0].source.splitlines():
        if not line.strip():
            continue
        match = re.fullmatch(r"([A-Za-z_]\w*): (int|float|bool|str) = (.+?)  # (\S.*)", line)
        if match is None:
            yield "parameters", f"line {line!r} is not of the form `name: type = default  # help`"
            continue
        name, kind, text, _ = match.groups()
        try:
            found[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            yield "parameters", f"the default of {name} is not a literal: {text}"
            continue
        declared = stage.parameters[name].type if name in stage.parameters else kind
        if {"path": "str"}.get(declared, declared) != kind:
            yield "parameters", f"{name} is a {kind} in the notebook and a {declared} in stage.toml"
    for name in stage.parameters.keys() - found.keys():
        yield "parameters", f"{name} is in stage.toml and not in the notebook"
    for name in found.keys() - stage.parameters.keys():
        yield "parameters", f"{name} is in the notebook and not in stage.toml"
    for name in found.keys() & stage.parameters.keys():
        default = stage.parameters[name].default
        if found[name] != default or isinstance(found[name], bool) != isinstance(default, bool):
            yield "parameters", f"the default of {name} is {found[name]!r} in the notebook, {default!r} in stage.toml"


def _form(stage: Stage, notebook: Any) -> Iterator[tuple[str, str]]:
    """Stripped, portable, short cells, prose first, verdict last."""
    kernel = notebook.metadata.get("kernelspec", {}).get("name")
    if kernel != "python3":
        yield "kernelspec", f"the kernel is {kernel!r}, not 'python3': no other name exists on every machine"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if any(cell.get("outputs") or cell.get("execution_count") for cell in code):
        yield "stripped", "the notebook carries outputs or execution counts; strip it with nbstripout"
    if "papermill" in notebook.metadata or "widgets" in notebook.metadata:
        yield "stripped", "the notebook carries metadata of an execution; strip it with nbstripout"
    for number, cell in enumerate(notebook.cells, 1):
        lines = len(cell.source.splitlines())
        if cell.cell_type == "code" and lines > CELL_LINES:
            yield "length", f"cell {number} has {lines} lines; at most {CELL_LINES}"
        if cell.cell_type == "markdown" and (count := prose_words(cell.source)) > PROSE_WORDS:
            yield "words", f"cell {number} ({cell.get('id', 'no id')}) has {count} words; at most {PROSE_WORDS}"
    for problem in turns.problems([(cell.cell_type, cell.source) for cell in notebook.cells]):
        yield "turn", problem
    if not notebook.cells or notebook.cells[0].cell_type != "markdown":
        yield "prose", "the notebook does not start with prose"
    if not any("lab.card(" in cell.source for cell in code):
        yield "card", "no cell calls lab.card: a reader cannot see where the numbers come from"
    if not code or not _calls_verdict(code[-1].source, stage.name) or notebook.cells[-1] is not code[-1]:
        yield "verdict", f'the last cell does not call lab.verdict("{stage.name}", ...)'


def prose_words(source: str) -> int:
    """Count the words of a markdown cell's running text.

    A word holds a letter or a digit and stands between blanks. Fenced code, rows of tables and folded solutions
    (``<details>``) are left out: they are looked up or opened, not read in passing. Indented code counts.
    """
    return sum(bool(re.search(r"\w", word)) for word in NOT_PROSE.sub(" ", source).split())


def _calls_verdict(source: str, name: str) -> bool:
    """True if ``source`` calls lab.verdict with ``name``, or with a variable, as the stage."""
    for node in ast.walk(_parse(source) or ast.Module([], [])):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "lab.verdict":
            given = [*node.args[:1], *(k.value for k in node.keywords if k.arg == "stage")]
            return bool(given) and (not isinstance(given[0], ast.Constant) or given[0].value == name)
    return False


def _content(stage: Stage, notebook: Any) -> Iterator[tuple[str, str]]:
    """No absolute path, nothing that installs."""
    for number, cell in enumerate(notebook.cells, 1):
        for line in cell.source.splitlines():
            if ABSOLUTE.search(line) or (cell.cell_type == "code" and _absolute_string(line)):
                yield "path", f"cell {number} has an absolute path: {line.strip()[:80]}"
            if cell.cell_type == "code" and re.match(r"\s*[!%]+\s*(pip|conda|uv|mamba)\b", line):
                yield "install", f"cell {number} installs something: {line.strip()[:80]}"


def _absolute_string(line: str) -> bool:
    """True if a string literal in ``line`` is a path from the root or the home folder."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(line.strip()).readline))
    except (tokenize.TokenError, IndentationError, SyntaxError):
        return False
    texts = [token.string.lstrip("rRbBuUfF").strip("\"'") for token in tokens if token.type == tokenize.STRING]
    return any(re.match(r"(/[\w.+-]+){2,}/?$|~/", text) for text in texts)


def _parse(source: str) -> ast.Module | None:
    """The cell's program without IPython's magic lines; None if it is not Python."""
    lines = ["pass" if re.match(r"\s*[!%]", line) else line for line in source.splitlines()]
    try:
        return ast.parse("\n".join(lines))
    except SyntaxError:
        return None


def _order(stage: Stage, notebook: Any) -> Iterator[tuple[str, str]]:
    """No name is used before it is defined."""
    defined = set(KNOWN_NAMES)
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type != "code":
            continue
        tree = _parse(cell.source)
        if tree is None:
            yield "syntax", f"cell {number} is not valid Python"
            continue
        reader = _Reader(defined)
        reader.block(tree.body)
        later = {name for name in reader.inside if name not in reader.defined}
        for name in sorted(reader.unknown | later):
            yield "order", f"cell {number} uses {name} before it is defined"
        if reader.star:
            yield "order", f"cell {number} imports *: which names that defines is not visible"
        defined = reader.defined


class _Reader:
    """Follows the statements of a cell: what they define, and what they use that nothing has defined yet.

    Names used inside functions, lambdas and comprehensions (``inside``) are looked up when those run, so they are
    checked against everything defined by the end of the cell.
    """

    def __init__(self, defined: set[str]):
        self.defined, self.unknown, self.inside, self.star = set(defined), set[str](), set[str](), False

    def block(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self._names_inside(node)
            for part in node.decorator_list:
                self.use(part)
            self.defined.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            self.star |= any(alias.name == "*" for alias in node.names)
            self.defined |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.For | ast.AsyncFor):
            self.use(node.iter)
            self.bind(node.target)
            self.block(node.body + node.orelse)
        elif isinstance(node, ast.While | ast.If):
            self.use(node.test)
            self.block(node.body + node.orelse)
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                self.use(item.context_expr)
                if item.optional_vars is not None:
                    self.bind(item.optional_vars)
            self.block(node.body)
        elif isinstance(node, ast.Try):
            self._try(node)
        elif isinstance(node, ast.Match):
            self.use(node.subject)
            for case in node.cases:
                bound = [getattr(part, "name", None) or getattr(part, "rest", None) for part in ast.walk(case.pattern)]
                self.defined |= {name for name in bound if name}
                self.block(case.body)
        else:
            self._simple(node)

    def _try(self, node: ast.Try) -> None:
        self.block(node.body)
        for handler in node.handlers:
            if handler.type is not None:
                self.use(handler.type)
            if handler.name:
                self.defined.add(handler.name)
            self.block(handler.body)
        self.block(node.orelse + node.finalbody)

    def _simple(self, node: ast.stmt) -> None:
        if isinstance(node, ast.AugAssign):
            self.use(node.value)
            self.use(ast.parse(ast.unparse(node.target), mode="eval").body)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            if node.value is not None:
                self.use(node.value)
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self.bind(target)
        else:
            for part in ast.iter_child_nodes(node):
                self.use(part)

    def bind(self, target: ast.AST) -> None:
        for part in ast.walk(target):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                self.defined.add(part.id)
            elif isinstance(part, ast.Name):
                self._used(part.id)

    def use(self, node: ast.AST) -> None:
        """Names that evaluating ``node`` looks up at once; those of inner scopes go to ``inside``."""
        if isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            self._names_inside(ast.Expr(node))
            return
        if isinstance(node, ast.NamedExpr):
            self.use(node.value)
            self.defined.add(node.target.id)
            return
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            self._used(node.id)
        for part in ast.iter_child_nodes(node):
            self.use(part)

    def _used(self, name: str) -> None:
        if name not in self.defined:
            self.unknown.add(name)

    def _names_inside(self, node: ast.stmt) -> None:
        tables = [symtable.symtable(ast.unparse(node), "cell", "exec")]
        while tables:
            table = tables.pop()
            for symbol in table.get_symbols():
                inner = table.get_type() != "module"
                if symbol.is_referenced() and (symbol.is_global() if inner else not symbol.is_assigned()):
                    self.inside.add(symbol.get_name())
            tables += table.get_children()
