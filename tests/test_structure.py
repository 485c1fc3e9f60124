"""Test the rules of the tree: which folder imports which, sizes, docstrings, what is never committed."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.structure_rules import cpp_rules, rules, runs_kernels

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dsv4lib"
LEAVES = {
    "errors",
    "config",
    "env",
    "backends",
    "folders",
    "nvrtc",
}  # modules of the package's top level, importable from everywhere

# What each part may import of the package, besides itself and the leaves. `backends` looks back ends up by name.
MAY_IMPORT = {
    "formats": set(),
    "reference": {"formats"},
    "dsl": {"formats"},
    "cache": {"formats"},
    "ops": {"formats", "dsl", "cache"},
    "layers": {"formats", "ops"},
    "model": {"formats", "layers", "ops", "cache"},
    "loader": {"formats", "ops", "layers", "model"},
    "parallel": {"cache", "layers", "loader", "model"},
    "nano": {"formats", "reference", "loader"},  # trained without kernels, judged through the reference
    "emulator": set(),
    "check": set(),
    "viz": set(),
    "predict": {"dsl", "ops", "emulator"},
    # what is wrong is not timed, and whole layers are timed, too
    "bench": set("formats dsl ops layers loader model emulator reference check predict".split()),
    "pages": set(
        "formats reference dsl cache ops layers model loader parallel nano check viz predict bench emulator".split()
    ),
    # bench and emulator are commands of the lab; whatever runs a kernel goes through `backends`
    "lab": set("check viz predict bench emulator pages".split()),
}
# These know nothing of DSV4: they could be packages of their own.
GENERAL = {"emulator", "viz", "check"}

# Folders of ops whose functions still take a bare `tuple`; `common` passes arguments on whose kinds it does not know.
STILL_TUPLES = {"common", "indexer_q", "mhc", "qnorm_rope_kv"}

# A file may be longer than 600 lines only with a reason in its first lines; so far none needs to be.
MAX_FILE, MAX_FUNCTION = 600, 150


def tracked(*patterns):
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def sources():
    return sorted(PACKAGE.rglob("*.py"))


def imported(path):
    """Top-level parts of dsv4lib that a file imports, at module level or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "dsv4lib":
            parts = node.module.split(".")[1:]
            found |= {parts[0]} if parts else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("dsv4lib.")}
    return found


def is_bench(path):
    """An op's bench rows and peers lie beside it and belong to `bench`."""
    room, *rest = path.relative_to(PACKAGE).parts
    return room == "ops" and path.name.startswith(("bench", "peers")) and len(rest) == 2


def test_no_op_imports_bench_rows():
    uses = re.compile(r"from dsv4lib\.ops\.\w+(?:\.| import )(bench|peers)")
    hits = [p.relative_to(ROOT) for p in sources() if PACKAGE / "ops" in p.parents and not is_bench(p)]
    assert [str(p) for p in hits if uses.search((ROOT / p).read_text())] == []


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_dependencies_point_one_way(path):
    part = "bench" if is_bench(path) else path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    wanted = imported(path) - {part}
    if part in LEAVES or part == "__init__":
        assert wanted <= LEAVES
        return
    allowed = MAY_IMPORT[part] | (LEAVES if part not in GENERAL else {"errors", "folders", "nvrtc"})
    assert wanted <= allowed, f"{part} may import {sorted(allowed)}, but {path.name} imports {sorted(wanted - allowed)}"


def test_oracles_are_looked_up_by_ops_alone():
    """`backends.oracle` imports the reference by name: what is no op, nor times one, would evade the rule above."""
    uses = [p for p in sources() if re.search(r"backends\.oracle\(|import oracle", p.read_text())]
    assert {p.relative_to(PACKAGE).parts[0] for p in uses} <= {"ops", "bench"}


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_every_file_has_a_reason_and_a_readable_size(path):
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "a module says in its first line why it exists"
    assert text.count("\n") <= MAX_FILE
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < MAX_FUNCTION, f"{node.name} is too long"


def test_public_functions_are_annotated():
    bare = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                arguments = [a for a in node.args.args + node.args.kwonlyargs if a.arg not in ("self", "cls")]
                bare += [f"{path.name}:{node.name}({a.arg})" for a in arguments if a.annotation is None]
    assert bare == []


def bare_tuples(path):
    """Parameters of a file's functions that are a `tuple` without members."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                if one.annotation is not None and "tuple" in ast.unparse(one.annotation).split(" | "):
                    yield f"{path.relative_to(ROOT)}:{one.lineno} {node.name}({one.arg})"


def test_kernels_take_records_and_no_bare_tuples():
    """A NamedTuple says what its members are; `tuple[Int32, ...]` says at least their kind."""
    files = [path for part in ("ops", "dsl") for path in sorted((PACKAGE / part).rglob("*.py"))]
    found = [one for path in files if path.parent.name not in STILL_TUPLES for one in bare_tuples(path)]
    assert not found, "\n".join(found)


def test_ops_are_registered_from_records_alone():
    """`schema.op` is the one way to torch: each op.py has a record, its name is used once, nothing else registers."""
    names, others = [], []
    for path in sorted((PACKAGE / "ops").rglob("*.py")):
        text, tree = path.read_text(), ast.parse(path.read_text())
        calls = [
            one.args[0].value
            for node in tree.body
            if isinstance(node, ast.ClassDef)
            for one in node.decorator_list
            if isinstance(one, ast.Call) and getattr(one.func, "id", None) == "op"
        ]
        names += calls
        if path.name == "op.py":
            assert calls, f"{path.relative_to(PACKAGE)} has no record with @op"
        if path != PACKAGE / "ops" / "common" / "schema.py" and re.search(r"torch\.library|custom_op|\bOp\(\w", text):
            others.append(str(path.relative_to(PACKAGE)))
    assert others == []
    assert names and len(set(names)) == len(names)


def test_style():
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--check", "dsv4lib", "tests"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_notebooks_are_committed_stripped():
    notebooks = tracked("*.ipynb")
    assert notebooks
    flags = shlex.split((ROOT / ".nbstripout").read_text())
    command = [sys.executable, "-m", "nbstripout", "--verify", *flags, *map(str, notebooks)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_executes_what_it_reads():
    """No pickle, no eval of text, no remote code: checkpoints are safetensors, configuration is data."""
    banned = re.compile(
        r"\bpickle\b|\btorch\.load\b|trust_remote_code=True|(?<![.\w])eval\(|(?<![.\w])exec\(|yaml\.load\("
    )
    files = [*sources(), *tracked("*.ipynb", "dsv4", ".ci/run")]
    hits = [f"{p.relative_to(ROOT)}: {m[0]}" for p in files for m in banned.finditer(p.read_text())]
    assert hits == []


def test_no_private_paths_or_big_files():
    private = re.compile(r"/home/\w|/root/|/Users/\w|BEGIN [A-Z ]*PRIVATE KEY|(?:ghp|hf)_[A-Za-z0-9]{20}")
    hits = []
    for path in tracked():
        size = path.stat().st_size
        if path.suffix == ".safetensors":  # the trained checkpoint: data, no text
            assert size <= 10_000_000, f"{path.name} has {size} bytes"
            continue
        assert size <= 1 << 20, f"{path.name} has {size} bytes"
        # Tests inject such paths on purpose: reports and lints must find them.
        if "tests" not in path.parts and private.search(path.read_text(errors="replace")):
            hits.append(str(path.relative_to(ROOT)))
    assert hits == []


# Ops that lack something, and why. What an op has come to have must leave this list.
LACKING = {
    "indexer_logits": (["bench"], "timed in the decode step"),
    "moe_combine": (["tests", "matrix", "budget"], "tested beside moe_dispatch"),
    "gemm_tile": (["bench"], "a page's first GEMM, not an op of the model"),
}


def test_a_kernel_has_tests_a_budget_bench_rows_and_a_stage():
    folders = [path for path in sorted((PACKAGE / "ops").iterdir()) if path.is_dir() and path.name != "common"]
    found = {path.name: lacking for path in folders if (lacking := rules(path, ROOT))}
    assert found == {name: what for name, (what, _) in LACKING.items()}


CUDA_SOURCES = sorted(path for kind in ("*.cu", "*.cuh") for path in PACKAGE.rglob(kind))


def test_a_kernel_in_cuda_cpp_has_a_host_side_faults_and_tests(tmp_path):
    sources = [path for path in CUDA_SOURCES if path.suffix == ".cu"]
    assert len(sources) >= 6
    assert {str(path.relative_to(PACKAGE)): lacking for path in sources if (lacking := cpp_rules(path, ROOT))} == {}
    (tmp_path / "kernel.cu").write_text("extern")
    assert cpp_rules(tmp_path / "kernel.cu", ROOT) == "host faults tests matrix budget schedules comment".split()


@pytest.mark.parametrize("path", CUDA_SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_cuda_sources_have_a_readable_size(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= MAX_FILE and max(map(len, lines)) <= 120 and not any(line != line.rstrip() for line in lines)


# Stages that import ops and yet run under any back end, and why.
ANY_BACK_END = {
    "hopper": "reads recordings; its one launch is of the emulator whatever the back end",
    "mhc": "its kernels always run in the emulator, which its parameter says",
    "router_norms": "its kernels always run in the emulator, which its parameter says",
    "start_here": "compiles a kernel and runs none",
}


def test_a_stage_that_runs_kernels_says_so():
    stages = sorted((ROOT / "stages").glob("*/stage.toml"))
    found = {path.parent.name for path in stages if "\nkernel = false" in path.read_text() and runs_kernels(path, ROOT)}
    assert found == set(ANY_BACK_END)
