"""`template_op`: numbers on both back ends, schedules, budget, faults, schema, bad arguments."""

import pytest
import torch

from dsv4lib.emulator import launch
from dsv4lib.emulator.driver.device import make as device
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.ops.template_op.arguments import fake_args, launch_args
from dsv4lib.ops.template_op.faults import FAULTS
from dsv4lib.ops.template_op.kernel import TemplateOp
from dsv4lib.ops.template_op.op import Call, template_op
from dsv4lib.pages.template_op.run_case import run
from tests.budget import built, small

SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")


@pytest.mark.parametrize("backend", ["emulator", "reference"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (3, 1032), (7, 200)])
def test_numbers(rows, columns, backend):
    """At most twice PyTorch's error in bf16; no report of the race detector."""
    result = run(rows, columns, 1, backend)
    assert result.over_torch <= 2 and result.hazards == 0


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
def test_schedules_and_budget(arch):
    kernel, code = built(TemplateOp, fake_args, arch)
    assert code.local_bytes == 0 and code.registers <= 64 and small(code)
    gate, up = torch.randn(2, 3, 1032, generator=torch.Generator().manual_seed(2)).bfloat16()
    results = []
    for schedule in SCHEDULES:
        out = torch.full((3, 1032), 7.0).bfloat16()
        gpu = device(arch, checks="race", schedule=schedule, seed=1)
        launch(code, *launch_args(kernel, Call(gate, up, out, "emulator")), gpu=gpu)
        assert not gpu.hazards
        results.append(out)
    assert all(torch.equal(one, results[0]) for one in results)


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(name):
    assert run(3, 200, 1, "emulator", name).over_torch > 2


def test_hard_values():
    gate = torch.tensor([[0.0, -0.0, float("inf"), -100.0, float("nan"), 1e-38, 88.0, -88.0]]).bfloat16()
    up = torch.ones(1, 8).bfloat16()
    found, want = (template_op(gate, up, backend=b).float() for b in ("emulator", "reference"))
    assert torch.allclose(found, want, rtol=2**-7, atol=1e-30, equal_nan=True)


def test_schema():
    x = torch.zeros(2, 8).bfloat16()
    tests = "test_schema", "test_faketensor"
    given = x, x.clone(), x.clone(), "reference"
    torch.library.opcheck(torch.ops.dsv4.template_op, given, test_utils=tests)


@pytest.mark.parametrize("backend", ["emulator", "reference"])
def test_bad_arguments_are_named(backend):
    x = torch.zeros(2, 8).bfloat16()
    for gate, up, name in ((x.float(), x, "gate"), (x[:1], x, "gate"), (x, x[:, :7], "out"), (x, x.float(), "out")):
        with pytest.raises(ArgumentError, match=name):
            template_op(gate, up, backend=backend)
    with pytest.raises(ConfigError, match="threads"):
        TemplateOp(33)
