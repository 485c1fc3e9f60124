"""What a command imports before it does its work, by names and number of modules: seconds vary from run to run."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulator.sanitize.kernels import write

ROOT = Path(__file__).resolve().parents[2]
# Prints at its end what the process has imported: of a command line, or as a script.
AT_EXIT = "import atexit, json, sys; atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))"
CLI = AT_EXIT + "; from dsv4lib.lab import cli; sys.argv = ['dsv4', *sys.argv[1:]]; cli.main()"
FIGURES = {"matplotlib", "pandas", "plotly", "scipy", "IPython", "nbformat", "papermill"}
COMPILERS = {"torch", "cutlass", "triton", "transformers"}


def imported(*arguments):
    """Modules of each process of a command line that tells them, in the order in which they end."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CLI, *map(str, arguments)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stderr.splitlines() if line.startswith('["')]


def judge(modules, most, none_of):
    """Check the number of modules, and that none belongs to the packages (or is one of the modules) ``none_of``."""
    dotted = {name for name in modules if any(name == one or name.startswith(one + ".") for one in none_of)}
    assert dotted == set()
    assert len(modules) <= most, len(modules)


def test_help_imports_no_package_that_computes():
    (modules,) = imported("--help")
    judge(modules, 400, FIGURES | COMPILERS | {"numpy", "llvmlite", "dsv4lib.emulator", "dsv4lib.ops"})


def test_ptx_is_sanitized_without_torch_and_compiler(tmp_path):
    (modules,) = imported("sanitize", write(tmp_path, barrier=True))
    judge(modules, 670, FIGURES | COMPILERS | {"dsv4lib.ops", "dsv4lib.pages", "dsv4lib.bench"})


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="a script needs the CuTe DSL")
def test_a_script_is_started_without_torch_and_finds_only_what_it_needs(tmp_path):
    (tmp_path / "names.py").write_text(AT_EXIT)
    of_script, of_command = imported("emulate", tmp_path / "names.py")
    judge(of_command, 670, FIGURES | COMPILERS)
    heavy = {"torch._dynamo", "torch._inductor", "sympy", "dsv4lib.lab", "dsv4lib.ops", "dsv4lib.pages"}
    judge(of_script, 1800, FIGURES | heavy)
