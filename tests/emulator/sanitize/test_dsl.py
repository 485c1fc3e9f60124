"""PTX that the CuTe DSL made, launched by a description: tensor maps, structs and tensor memory by TOML alone."""

import json
import re

import numpy as np
import pytest

pytest.importorskip("cutlass.cute")

from dsv4lib.emulator import gpu
from dsv4lib.emulator.sanitize import command, skeleton
from dsv4lib.emulator.sanitize.command import Wish
from tests.emulator.checks.gemm import compiled, sub
from tests.emulator.checks.test_gemm_traps import FULL, PASS
from tests.emulator.sanitize.test_findings import check_sarif

M, N, K = 150, 136, 456  # two tiles by two, more stages of K than the ring holds

DESCRIPTION = f"""source = "gemm.ptx"
[tensors.a]
shape = [{M}, {K}]
dtype = "bf16"
fill = "integers"
seed = 1
[tensors.b]
shape = [{N}, {K}]
dtype = "bf16"
fill = "integers"
seed = 2
[tensors.c]
shape = [{M}, {N}]
fill = "nan"
expect = {{file = "c.npy"}}
[maps.a_map]
tensor = "a"
box = [64, 128]
swizzle = 128
[maps.b_map]
tensor = "b"
box = [64, 128]
swizzle = 128
[[launch]]
grid = [2, 2]
block = 192
shared = 132096
args = [
  {{fields = []}},
  "a_map",
  {{fields = [{{at = 0, value = {M}, dtype = "u32"}}, {{at = 4, value = {K}, dtype = "u32"}}]}},
  "b_map",
  {{fields = [{{at = 0, value = {N}, dtype = "u32"}}, {{at = 4, value = {K}, dtype = "u32"}}]}},
  {{fields = [{{at = 0, tensor = "c"}}, {{at = 8, value = {M}, dtype = "u32"}}, {{at = 12, value = {N}, dtype = "u32"}},
             {{at = 16, value = {N}, dtype = "u64"}}]}},
]
""".replace("\n             {", " {")


@pytest.fixture(scope="module")
def ptx():
    return compiled()[1].__ptx__


@pytest.fixture
def path(tmp_path):
    (tmp_path / "gemm.toml").write_text(DESCRIPTION)
    made = {}
    for name, seed, rows in (("a", 1, M), ("b", 2, N)):
        made[name] = np.random.default_rng(seed).integers(-4, 4, rows * K, endpoint=True).reshape(rows, K)
    np.save(tmp_path / "c.npy", (made["a"] @ made["b"].T).astype(np.float32))  # sums of integers: exact
    return tmp_path / "gemm.ptx"


def test_a_gemm_of_the_dsl_by_its_description(ptx, path):
    path.write_text(ptx)
    assert command.run(Wish("dsv4 sanitize", str(path), [], "auto", {"checks": "race"})) == 0


def test_its_twin_that_does_not_wait_for_its_operands(ptx, path, capfd):
    path.write_text(sub(FULL, PASS)(ptx))
    assert command.run(Wish("dsv4 sanitize", str(path), [], "auto", {"checks": "race"}, form="json")) == 90
    found = json.loads(capfd.readouterr().out)
    races = [one for one in found["findings"] if one["kind"] == "race_shared"]
    assert any("tcgen05.mma" in one["place"]["ptx"] + one["against"]["ptx"] for one in races)
    assert all(one["place"]["file"].endswith(".py") and one["place"]["text"] for one in races)


def test_a_skeleton_finds_maps_and_the_struct(ptx, tmp_path):
    text = skeleton.describe(gpu.load(ptx), "gemm.ptx")
    assert text.count("[maps.") == 2 and re.search(r"at = 0, tensor = .param_5_at_0", text)


SCRIPT = """
import torch
import cutlass.cute as cute
from cutlass.cute.runtime import from_dlpack

@cute.kernel
def kernel(x: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    x[63 - thread] = x[thread] + 1.0

@cute.jit
def host(x: cute.Tensor):
    kernel(x).launch(grid=[1, 1, 1], block=[64, 1, 1])

x = torch.zeros({}, device="cuda")
host(from_dlpack(x))
"""


@pytest.mark.parametrize(("size", "code"), [(64, 90), pytest.param(8, 91, marks=pytest.mark.full)])
def test_a_script_with_a_report_in_sarif(tmp_path, capfd, size, code):
    """Each thread writes what a thread of another warp reads; of 8 elements most are not there at all."""
    script, report = tmp_path / "given.py", tmp_path / "report.sarif"
    script.write_text(SCRIPT.format(size))
    wish = Wish("dsv4 sanitize", str(script), [], "sm_100a", {"checks": "race"}, form="sarif", output=report)
    assert command.run(wish) == code
    log = json.loads(report.read_text())
    check_sarif(log)
    first = log["runs"][0]["results"][0]
    assert first["ruleId"] == {90: "race_global", 91: "memory_fault"}[code]
    place = first["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == script.as_uri()
    assert place["region"]["snippet"]["text"] == "x[63 - thread] = x[thread] + 1.0"
