"""Caches of the packages: what was compiled for the emulator never reaches a file, nor a call outside of the device.

Builds made for the emulator check devices differently and are bound to its runtime. Each package runs with its caches
switched on by the user and imported before the device is there, in a process with a home of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import run_case
from test_corpus import HERE, missing

SCRIPT = """
import importlib, json, sys, warnings
import torch
sys.path.insert(0, {here!r})
import run_case
case = next(c for c in run_case.all_cases() if c.name == {name!r})
importlib.import_module({package!r})
row = run_case.run(case)
try:
    case.run()
    outside = "ran"
except Exception as error:
    outside = type(error).__name__ + ": " + str(error)
print(json.dumps({{"failures": row["failures"], "outside": outside}}))
"""
CASES = {
    "quack_softmax": "quack.softmax",
    "fa4_decode": "flash_attn.cute.interface",
    "flashinfer_grouped_gemm": "flashinfer.gemm",
    "cudnn_compressor_4": "cudnn.csa.compressor.api",
}
ON = {
    "QUACK_CACHE_ENABLED": "1",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
    "FLASHINFER_CUTE_DSL_DISABLE_CACHE": "0",
    "CUTE_DSL_DISABLE_FILE_CACHING": "0",
    "TORCHDYNAMO_DISABLE": "1",
}
BINARIES = (b"\x7fELF", b"\x50\xed\x55\xba", b"BC\xc0\xde")  # objects, fat binaries, LLVM bitcode


@pytest.mark.parametrize("name", CASES)
def test_nothing_compiled_here_is_kept(name: str, tmp_path: Path) -> None:
    case = next(c for c in run_case.all_cases() if c.name == name)
    if absent := missing(case):
        pytest.skip(f"{absent} is not installed: ./dsv4 test --corpus installs and runs this")
    script = SCRIPT.format(here=str(HERE), name=name, package=CASES[name])
    folders = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "TMPDIR", "FLASHINFER_WORKSPACE_BASE"), str(tmp_path))
    folders |= {"QUACK_CACHE_DIR": str(tmp_path / "q"), "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(tmp_path / "f")}
    path = os.pathsep.join([str(HERE.parent.parent), *(p for p in sys.path if p)])
    keep = os.environ.get("DSV4_CACHE", str(Path.home() / ".cache" / "dsv4"))  # the emulator's own
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env={**os.environ, **ON, **folders, "PYTHONPATH": path, "DSV4_CACHE": keep, "CUTE_DSL_ARCH": case.arch},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    row = json.loads(done.stdout.splitlines()[-1])
    assert row["failures"] == []
    assert row["outside"] != "ran"
    kept = [p for p in tmp_path.rglob("*") if p.is_file() and (_is_binary(p) or p.suffix in (".ptx", ".cubin", ".o"))]
    assert kept == []


def _is_binary(path: Path) -> bool:
    return path.read_bytes()[:4] in BINARIES
