"""The norm ops: back ends, schemas, fakes, bad arguments."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4lib import emulator
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.rmsnorm import cpp
from dsv4lib.ops.rmsnorm.op import add_rmsnorm, rmsnorm

X, RESIDUAL = torch.randn(2, 3, 72, generator=torch.Generator().manual_seed(0)).bfloat16()
WEIGHT = 1 + 0.3 * torch.randn(72, generator=torch.Generator().manual_seed(1))
UNIT = 2.0**-7  # two neighbours in bf16: the emulator's fp32 and the oracle's fp64 may round apart


@pytest.mark.parametrize("weight", [WEIGHT, None], ids=["weight", "ones"])
def test_back_ends_agree(weight):
    torch.testing.assert_close(
        rmsnorm(X, weight, backend="emulator"), rmsnorm(X, weight, backend="reference"), rtol=UNIT, atol=0
    )
    found, want = (add_rmsnorm(X, RESIDUAL, weight, backend=b) for b in ("emulator", "reference"))
    assert torch.equal(found[0], want[0]) and torch.equal(found[0], X + RESIDUAL)
    torch.testing.assert_close(found[1], want[1], rtol=UNIT, atol=0)
    assert torch.equal(found[1], rmsnorm(X + RESIDUAL, weight, backend="emulator"))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("between", ["nothing", "a launch", "a synchronisation"])
def test_weights_that_the_launch_before_wrote_are_reported(between):
    """They are read ahead of the wait for it."""
    with emulator.device("sm_100a", checks="race", shims=False) as gpu:
        written = rmsnorm(torch.ones(1, 144).bfloat16(), backend="emulator")
        if between == "a launch":
            rmsnorm(X, WEIGHT, backend="emulator")
        if between == "a synchronisation":
            gpu.synchronize()
        rmsnorm(X, written.view(torch.float32)[0], backend="emulator")
    assert {h.kind for h in gpu.hazards} == ({"dependent_launch_early"} if between == "nothing" else set())
    assert all("rmsnorm/kernel.py" in h.place.python and "rmsnorm/kernel.py" in h.owner.python for h in gpu.hazards)


def test_outputs_of_the_caller_and_no_tokens():
    out = torch.zeros_like(X), torch.zeros_like(X)
    back = add_rmsnorm(X, RESIDUAL, WEIGHT, out=out, backend="emulator")
    assert back[0] is out[0] and back[1] is out[1] and bool(out[1].any())
    assert rmsnorm(X[:0], WEIGHT, backend="emulator").shape == (0, 72)


def test_cpp_is_asked_for_by_name_and_checks_as_the_op_does():
    x, weight = X.clone(), WEIGHT
    assert torch.equal(cpp.rmsnorm(x, weight, backend="emulator"), rmsnorm(x, weight, backend="emulator"))
    h, y = cpp.add_rmsnorm(x, RESIDUAL, weight, backend="emulator")
    want = add_rmsnorm(x, RESIDUAL, weight, backend="emulator")
    assert torch.equal(h, want[0]) and torch.equal(y, want[1])
    assert cpp.rmsnorm(X[:0], WEIGHT, backend="emulator").shape == (0, 72)
    for call, name in (
        (lambda: cpp.rmsnorm(X, backend="reference"), "backend"),
        (lambda: cpp.rmsnorm(X[0]), "x.shape"),
        (lambda: cpp.rmsnorm(X, WEIGHT[1:]), "weight"),
        (lambda: cpp.rmsnorm(X, weight=3), "weight"),
        (lambda: cpp.rmsnorm(X, eps=-1.0), "eps"),
        (lambda: cpp.rmsnorm(X.clone().requires_grad_()), "x.requires_grad"),
        (lambda: cpp.add_rmsnorm(X, RESIDUAL, out=(x, x)), "out"),
        (lambda: cpp.rmsnorm(X.repeat(1, 2)[:, 1:65], backend="emulator"), "x.stride"),
    ):
        with pytest.raises(ArgumentError, match=name):
            call()


def test_schemas_and_fakes():
    with torch.no_grad():
        for op, given in (
            (torch.ops.dsv4.rmsnorm, (X, WEIGHT, torch.zeros_like(X))),
            (torch.ops.dsv4.add_rmsnorm, (X, RESIDUAL, None, torch.zeros_like(X), torch.zeros_like(X))),
        ):
            result = torch.library.opcheck(op.default, (*given, 1e-6, "reference"))
            assert set(result.values()) == {"SUCCESS"}, (op, result)
    with FakeTensorMode():
        x = torch.empty(1 << 20, 7168, dtype=torch.bfloat16)
        assert rmsnorm(x).shape == x.shape and add_rmsnorm(x, x)[1].dtype == torch.bfloat16


def test_bad_arguments_are_named():
    for call, name in (
        (lambda: rmsnorm(X[0]), "x.shape"),
        (lambda: rmsnorm(X[:, :70]), "x.shape"),
        (lambda: rmsnorm(X.float()), "x"),
        (lambda: rmsnorm(X, WEIGHT[1:]), "weight"),
        (lambda: rmsnorm(X, WEIGHT, out=X[1:]), "out"),
        (lambda: add_rmsnorm(X, RESIDUAL[1:]), "residual"),
        (lambda: add_rmsnorm(X, RESIDUAL, out=(X.float(), X.clone())), r"out\[0\]"),
    ):
        with pytest.raises(ArgumentError, match=name):
            call()
