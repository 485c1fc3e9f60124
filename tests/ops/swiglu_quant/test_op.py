"""`swiglu_quant`: numbers on both back ends, schedules, budget, faults, schema, hard values, bad arguments."""

import pytest
import torch

from dsv4lib.emulator import launch
from dsv4lib.emulator.driver.device import make as device
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.ops.swiglu_quant.arguments import fake_args, launch_args
from dsv4lib.ops.swiglu_quant.faults import FAULTS
from dsv4lib.ops.swiglu_quant.kernel import SwigluQuant
from dsv4lib.ops.swiglu_quant.op import Call, swiglu_quant
from dsv4lib.pages.swiglu_quant.run_case import rows_of, run
from dsv4lib.reference import swiglu_quant as oracle
from tests.budget import built, small

SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
ARCHS = ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.full)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["emulator", "reference"])
@pytest.mark.parametrize(("rows", "width"), [(1, 128), (3, 1280), (7, 384)])
def test_numbers(rows, width, backend, dtype):
    """The oracle's error, and its codes but for ties; no report of the race detector."""
    result = run(rows, width, 1, backend, dtype=dtype)
    assert result.over_oracle <= 1.0001 and result.differing <= 1e-3 and result.hazards == 0


@pytest.mark.parametrize("arch", ARCHS)
def test_schedules_and_budget(arch):
    """Nothing else is written; rows of x may be parts of longer ones."""
    kernel, code = built(SwigluQuant, fake_args, arch)
    assert code.local_bytes == 0 and code.registers <= 64 and small(code)
    x, results = rows_of(3, 1032, 2)[:, :2048], []
    for schedule in SCHEDULES:
        codes, scales = torch.full((5, 1024), 7).byte(), torch.full((5, 8), 7).byte()
        gpu = device(arch, checks="race", schedule=schedule, seed=1)
        launch(code, *launch_args(kernel, Call(x, codes[1:4], scales[1:4], 10.0, "emulator")), gpu=gpu)
        assert not gpu.hazards
        assert all(bool((t[0] == 7).all() and (t[4] == 7).all()) for t in (codes, scales))
        results.append(torch.cat((codes[1:4], scales[1:4]), 1))
    assert all(torch.equal(one, results[0]) for one in results)
    want = torch.cat(oracle.swiglu_quant(x, 10.0), 1)
    assert float((results[0] != want).double().mean()) <= 1e-3


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(name):
    assert run(3, 256, 1, "emulator", name).over_oracle > 2


def test_a_race_is_reported():
    """Scales of two warps of a row at one place; without the fault nothing is reported."""
    assert run(3, 512, 1, "emulator", "OneScaleARow").hazards and not run(3, 512, 1, "emulator").hazards


def test_hard_values():
    """Zeros, ties at the clamp, infinities, subnormals, no block of zeros alone; NaN stays in its block."""
    x = torch.zeros(2, 512)
    gate, up = x.split(256, 1)
    hard = torch.tensor([0.0, -0.0, float("inf"), -100.0, 10.0, 1e-38, 88.0, -88.0, -1e4, 3.0, 1e-45, -7.0])
    gate[0, :12], up[0, :12] = hard, torch.tensor([1.0, 2, 3, 4, float("inf"), -float("inf"), -10, 10, 5, 0, 1, -3e38])
    gate[1, :256], up[1, :128] = 1.0, float("nan")
    found, want = (swiglu_quant(x, backend=backend) for backend in ("emulator", "reference"))
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert (found.scales[1, 0], found.scales[1, 1]) == (255, want.scales[1, 1]) and (found.codes[1, 128:] == 0).all()


def test_without_a_clamp():
    x = 100 * rows_of(2, 128, 3)
    found = swiglu_quant(x, limit=float("inf"), backend="emulator")
    want = oracle.swiglu_quant(x, float("inf"))
    assert torch.equal(found.scales, want[1]) and float((found.codes != want[0]).double().mean()) <= 1e-2


def test_no_tokens():
    found = swiglu_quant(torch.zeros(0, 256), backend="emulator")
    assert found.codes.shape == (0, 128) and found.scales.shape == (0, 1)


def test_schema():
    x = torch.zeros(2, 256)
    given = x, torch.zeros(2, 128).byte(), torch.zeros(2, 1).byte(), 10.0, "reference"
    tests = "test_schema", "test_faketensor"
    torch.library.opcheck(torch.ops.dsv4.swiglu_quant, given, test_utils=tests)


@pytest.mark.parametrize("backend", ["emulator", "reference"])
def test_bad_arguments_are_named(backend):
    x, good = torch.zeros(2, 256), (torch.zeros(2, 128).byte(), torch.zeros(2, 1).byte())
    for name, given, options in (
        ("x.dtype", x.double(), {}),
        ("x.shape", x[0], {}),
        ("x.shape", x[:, :254], {}),
        ("limit", x, {"limit": 0.0}),
        ("limit", x, {"limit": float("nan")}),
        ("codes", x, {"out": (good[0].int(), good[1])}),
        ("codes.shape", x, {"out": (good[0][:1], good[1])}),
        ("scales.shape", x, {"out": (good[0], good[1][:1])}),
    ):
        with pytest.raises(ArgumentError) as caught:
            swiglu_quant(given, backend=backend, **options)
        assert caught.value.name == name
    for options, name in (({"threads": 33}, "threads"), ({"dtype": "fp16"}, "dtype")):
        with pytest.raises(ConfigError, match=name):
            SwigluQuant(**options)
