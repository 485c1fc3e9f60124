"""Score the tests by mutation. `./dsv4 test --mutants N` breaks the sources N times and says what no test noticed.

Each mutant is one change in a temporary copy of the tree, never in the working tree. It meets the test files nearest to
its module: those that import it, else those that import what imports it. Verdicts:

    killed         a test failed
    timeout        the tests used several times the CPU time that they use without the mutant; counts as killed
    survived       the tests passed; printed as a diff
    not executed   the tests pass even if the changed statement raises: they never reach it; not in the score
    no baseline    the tests fail without a mutant; not in the score

The choice follows from the seed. Results are kept beside the runs, so that the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dsv4lib import env

PACKAGE = "dsv4lib"
FILES = 3  # test files that a mutant meets
SPARE_CPU_S = 60.0  # allowed beside four times the CPU time of the tests without a mutant
SYNC = ("fence", "commit", "arrive", "wait", "sync", "acquire", "release", "tail")
SWAPPED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
OTHER = {ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.LShift: ">>", ast.RShift: "<<"}
COPIED = ("dsv4", "dsv4lib", "tests", "stages", "notebooks", "data", "README.md", "pyproject.toml", ".ci")
COPIED += (".gitattributes",)


@dataclass(frozen=True)
class Mutant:
    """One change: ``old`` becomes ``new`` at a place of a file. line from 1, column from 0, in UTF-8 bytes.

    Attributes:
        statement: first and last line of the innermost statement around it, and its column.
    """

    path: str
    operator: str
    line: int
    column: int
    old: str
    new: str
    statement: tuple[int, int, int]

    def applied(self, source: str) -> str:
        """Return ``source`` with the change."""
        start = _offset(source, self.line, self.column)
        raw = source.encode()
        assert raw[start : start + len(self.old.encode())] == self.old.encode()
        return (raw[:start] + self.new.encode() + raw[start + len(self.old.encode()) :]).decode()

    def raising(self, source: str) -> str:
        """Return ``source`` in which the statement raises instead."""
        first, last, column = self.statement
        lines = source.splitlines()
        lines[first - 1 : last] = [" " * column + 'raise SystemError("the place of a mutant was reached")']
        return "\n".join(lines) + "\n"


def mutants_of(path: str, source: str) -> list[Mutant]:
    """List every mutant of one file."""
    tree, found = ast.parse(source), []
    for statement in (n for n in ast.walk(tree) if isinstance(n, ast.stmt)):
        for operator, node, new in _changes(statement):
            old = ast.get_source_segment(source, node)
            if old is None or old == new:
                continue
            one = Mutant(
                path, operator, node.lineno, node.col_offset, old, new,
                (statement.lineno, statement.end_lineno or statement.lineno, statement.col_offset),
            )  # fmt: skip
            try:
                ast.parse(one.applied(source))
            except SyntaxError:
                continue
            found.append(one)
    return found


def _changes(statement: ast.stmt) -> Iterator[tuple[str, ast.AST, str]]:
    """(operator, node, its new text) for a statement without those inside it."""
    match statement:
        case ast.Expr(value=ast.Call() as call):
            name = ast.unparse(call.func).rpartition(".")[2]
            yield "drop synchronisation" if any(word in name for word in SYNC) else "drop call", statement, "pass"
        case ast.AugAssign():
            yield "drop update", statement, "pass"
        case ast.If(test=test, body=[ast.Raise()], orelse=[]):
            yield "drop check", test, "False"
        case ast.If(test=test) | ast.While(test=test):
            yield "negate condition", test, f"not ({ast.unparse(test)})"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "return nothing", value, "None"
    for node in _expressions(statement):
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                yield "swap comparison", node, f"{ast.unparse(left)} {SWAPPED[type(op)]} {ast.unparse(right)}"
            case ast.BinOp(left=left, op=ast.BitXor(), right=ast.Constant(value=1)):
                yield "keep phase", node, f"({ast.unparse(left)})"
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OTHER:
                yield "swap operator", node, f"({ast.unparse(left)} {OTHER[type(op)]} {ast.unparse(right)})"
            case ast.BoolOp(op=op, values=values):
                word = " or " if isinstance(op, ast.And) else " and "
                yield "swap and, or", node, f"({word.join(f'({ast.unparse(v)})' for v in values)})"
            case ast.Call(func=ast.Name(id="min" | "max" as name) as function):
                yield "swap min, max", function, "max" if name == "min" else "min"
            case ast.Constant(value=bool() as value):
                yield "flip constant", node, str(not value)
            case ast.Constant(value=int() as value):
                yield "off by one", node, str(value + 1)


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Expressions of a statement, not of statements inside it, nor annotations and texts."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.AnnAssign | ast.ImportFrom):
        return
    waiting = [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.expr)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.JoinedStr):
            continue
        yield node
        waiting += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]


def _offset(source: str, line: int, column: int) -> int:
    return sum(len(text.encode()) for text in source.splitlines(keepends=True)[: line - 1]) + column


def chosen(root: Path, number: int, seed: int, only: str = "") -> list[Mutant]:
    """Choose ``number`` mutants of the package. A random file, weighted by lines, then an operator, then a place."""
    randomly = random.Random(seed)
    paths = sorted(p for p in (root / PACKAGE).rglob("*.py") if only in str(p.relative_to(root)))
    sources = {str(p.relative_to(root)): p.read_text() for p in paths}
    weights, found = [source.count("\n") + 1 for source in sources.values()], []
    for _ in range(100 * number):
        if len(found) == number or not sources:
            break
        (path,) = randomly.choices(list(sources), weights)
        by_operator: dict[str, list[Mutant]] = {}
        for one in mutants_of(path, sources[path]):
            by_operator.setdefault(one.operator, []).append(one)
        if by_operator:
            one = randomly.choice(by_operator[randomly.choice(sorted(by_operator))])
            found += [one] if one not in found else []
    return found


def imports(path: Path, modules: set[str]) -> set[str]:
    """Find modules among ``modules`` that a file imports anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & modules


class Tests:
    """Which test files are nearest to a module."""

    def __init__(self, root: Path):
        self.root = root
        paths = {_module(p, root): p for p in (root / PACKAGE).rglob("*.py")}
        helpers = {_module(p, root): p for p in (root / "tests").rglob("*.py")}
        names = {*paths, *helpers}
        self.importers: dict[str, set[str]] = {}
        for name, path in {**paths, **helpers}.items():
            for imported in imports(path, names):
                self.importers.setdefault(imported, set()).add(name)
        self.tests = {name: path for name, path in helpers.items() if path.name.startswith("test_")}

    def near(self, path: str) -> list[str]:
        """Find up to `FILES` test files, nearest first. Of those as near, first one that is named like the module."""
        module = _module(self.root / path, self.root)
        level, seen, found = {module}, {module}, []
        while level and len(found) < FILES:
            level = set().union(*(self.importers.get(name, set()) for name in level)) - seen
            seen |= level
            nearest = [self.tests[name] for name in level if name in self.tests]
            stem = Path(path).stem
            nearest.sort(key=lambda p: (stem not in p.stem and Path(path).parent.name not in p.parts, p.stat().st_size))
            found += [str(p.relative_to(self.root)) for p in nearest]
        return found[:FILES]


def _module(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def run_tests(root: Path, files: Sequence[str], cpu_s: float | None = None) -> tuple[str, float]:
    """Run test files in the tree ``root``. Returns ("passed", "failed" or "timeout", CPU seconds)."""
    environment = {
        **os.environ, "PYTHONPATH": str(root), "DSV4_CACHE": str(root / ".cache"), "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1", "DSV4_WORKSPACE": str(root),
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *files]

    def limit() -> None:
        if cpu_s is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s), int(cpu_s) + 5))

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(
        command, cwd=root, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True, preexec_fn=limit,
    )  # fmt: skip
    try:
        code = process.wait(None if cpu_s is None else 20 * cpu_s)  # one that sleeps uses no CPU time
    except subprocess.TimeoutExpired:
        code = -signal.SIGXCPU
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return "timeout", used
    return ("passed" if code == 0 else "failed"), used


def _fingerprint(root: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(p for folder in (PACKAGE, "tests") for p in (root / folder).rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


class Score:
    """Mutants of one seed and one state of the sources, with what is known of them."""

    def __init__(self, root: Path, record: Path):
        self.root, self.record = root, record
        self.known: dict[str, str] = {}
        if record.is_file():
            for line in record.read_text().splitlines():
                stored = json.loads(line)
                self.known[stored["mutant"]] = stored["verdict"]
        self.tests = Tests(root)
        self.baselines: dict[tuple[str, ...], tuple[str, float]] = {}

    def judge(self, one: Mutant, copy: Path) -> str:
        """Judge a mutant, from the record or by running its tests. They run in ``copy``, a copy of the tree."""
        name = json.dumps(asdict(one))
        if name in self.known:
            return self.known[name]
        self.known[name] = verdict = self._judge(one, copy)
        self.record.parent.mkdir(parents=True, exist_ok=True)
        with self.record.open("a") as file:
            file.write(json.dumps({"mutant": name, "verdict": verdict}) + "\n")
        return verdict

    def _judge(self, one: Mutant, copy: Path) -> str:
        files = tuple(self.tests.near(one.path))
        if not files:
            return "not executed"
        if files not in self.baselines:
            self.baselines[files] = run_tests(copy, files)
        state, seconds = self.baselines[files]
        if state != "passed":
            return "no baseline"
        target, source = copy / one.path, (self.root / one.path).read_text()
        try:
            target.write_text(one.applied(source))
            found, _ = run_tests(copy, files, 4 * seconds + SPARE_CPU_S)
            if found != "passed":
                return {"failed": "killed"}.get(found, found)
            target.write_text(one.raising(source))
            reached, _ = run_tests(copy, files, 4 * seconds + SPARE_CPU_S)
            return "not executed" if reached == "passed" else "survived"
        finally:
            target.write_text(source)


def difference(root: Path, one: Mutant) -> str:
    """Show a mutant as a diff."""
    source = (root / one.path).read_text()
    lines = source.splitlines(), one.applied(source).splitlines()
    return "\n".join(difflib.unified_diff(*lines, one.path, f"{one.path} ({one.operator})", n=2, lineterm=""))


def command(arguments: Sequence[str], root: Path | None = None) -> int:
    """Run `./dsv4 test --mutants N`: exit code 0 if none survived, else 1."""
    parser = argparse.ArgumentParser("dsv4 test --mutants", allow_abbrev=False)
    parser.add_argument("--mutants", type=int, required=True, metavar="N", help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of their choice")
    parser.add_argument("--minutes", type=float, default=60.0, help="no mutant starts later")
    parser.add_argument("--only", default="", help="of files whose path contains this")
    asked, root = parser.parse_args(arguments), root or env.root()
    wanted = chosen(root, asked.mutants, asked.seed, asked.only)
    record = root / "data" / "runs" / f"mutants-{asked.seed}-{_fingerprint(root)}.jsonl"
    score, counts, end = Score(root, record), Counter(), time.monotonic() + 60 * asked.minutes
    with tempfile.TemporaryDirectory(prefix="dsv4-mutants-") as folder:
        copy = Path(folder) / "tree"
        copy.mkdir()
        for name in COPIED:
            if (root / name).is_dir():
                shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns("runs", "__pycache__"))
            elif (root / name).exists():
                shutil.copy(root / name, copy / name)
        for number, one in enumerate(wanted, 1):
            if time.monotonic() > end:
                print(f"stopped after {number - 1} of {len(wanted)}: the same command goes on from here")
                break
            verdict = score.judge(one, copy)
            counts[verdict] += 1
            print(f"[{number}/{len(wanted)}] {verdict:<12} {one.operator:<20} {one.path}:{one.line}", flush=True)
            if verdict == "survived":
                print(difference(root, one), flush=True)
    killed = counts["killed"] + counts["timeout"]
    print(
        f"killed {killed} of {killed + counts['survived']} ({counts['timeout']} by their CPU time); apart from these, "
        f"{counts['not executed']} were not executed and {counts['no baseline']} had no passing tests to meet"
    )
    return 1 if counts["survived"] else 0
