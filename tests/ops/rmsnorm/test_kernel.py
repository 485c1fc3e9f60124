"""The norm kernel on both architectures against fp64, with the residual's addition and without, in place, schedules."""

from functools import cache

import pytest
import torch

from dsv4lib.emulator import launch
from dsv4lib.emulator.driver.device import make
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.ops.rmsnorm.arguments import fake_args, launch_args
from dsv4lib.ops.rmsnorm.kernel import RmsNorm
from dsv4lib.ops.rmsnorm.op import AddNorm, Norm
from dsv4lib.reference.rmsnorm import rmsnorm
from tests.budget import built, small

ARCHS = ("sm_100a", "sm_90a")
SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
EPS = 1e-6


@cache
def compiled(settings, arch):
    kernel, code = built(RmsNorm, fake_args, arch, *settings)
    assert code.local_bytes == 0 and small(code), (code.local_bytes, code.instructions)
    return kernel, code


def case(tokens, d, seed=0):
    """(x, residual, weight); rows of different scales, the last one of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x, residual = torch.randn(2, tokens, d, generator=generator) * torch.logspace(-3, 3, tokens)[:, None]
    x[-1] = residual[-1] = 0
    return x.bfloat16(), residual.bfloat16(), 1 + 0.3 * torch.randn(d, generator=generator)


def call_of(x, residual, weight, total, y):
    if residual is None:
        return Norm(x, weight, y, EPS, "emulator")
    return AddNorm(x, residual, weight, (total, y), EPS, "emulator")


def run(settings, arch, x, residual, weight, total=None, y=None, **device):
    kernel, code = compiled(settings, arch)
    if kernel.add and total is None:
        total = torch.full_like(x, float("nan"))
    y = torch.full_like(x, float("nan")) if y is None else y
    gpu = make(arch, **{"checks": "race", **device})
    launch(code, *launch_args(kernel, call_of(x, residual, weight, total, y)), gpu=gpu)
    assert not gpu.hazards, gpu.hazards[0].message
    return total, y


def close(y, h, weight):
    """Half a unit of bf16, and what fp32 sums and the reciprocal root add."""
    want = rmsnorm(h.double(), None if weight is None else weight.double(), EPS)
    assert bool(((y.double() - want).abs() <= 2.0**-8 * (1 + 2.0**-10) * want.abs()).all())


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("d", "tokens"), [(4096, 3), (7168, 2), (1032, 4), (8, 3)])
@pytest.mark.parametrize("add", [False, True])
def test_rows(arch, d, tokens, add):
    x, residual, weight = case(tokens, d, seed=d)
    total, y = run((d, add), arch, x, residual if add else None, weight)
    h = x
    if add:
        h = (x.float() + residual.float()).bfloat16()
        assert torch.equal(total, h)
    close(y, h, weight)
    assert not y[-1].any()


def test_fused_is_the_addition_and_the_norm():
    x, residual, weight = case(3, 1032)
    total, y = run((1032, True), "sm_90a", x, residual, weight)
    assert torch.equal(y, run((1032, False), "sm_90a", total, None, weight)[1])


def test_in_place_and_without_weight():
    x, residual, _ = case(3, 1032)
    fresh = run((1032, True, False), "sm_90a", x, residual, None)
    close(fresh[1], fresh[0], None)
    run((1032, True, False), "sm_90a", x, residual, None, total=residual, y=x)
    assert torch.equal(residual, fresh[0]) and torch.equal(x, fresh[1])


def test_rows_of_a_larger_matrix_and_nan_in_one():
    x, _, weight = case(3, 1032)
    wide = torch.full((3, 2048), 7.0).bfloat16()
    wide[:, :1032] = x
    wide[0, 1031] = float("nan")
    _, y = run((1032, False), "sm_100a", wide[:, :1032], None, weight)
    assert bool(y[0].isnan().all())
    close(y[1:], x[1:], weight)


@pytest.mark.parametrize("arch", ARCHS)
def test_all_schedules_give_the_same_bits(arch):
    x, residual, weight = case(3, 1032)
    found = [run((1032, True), arch, x, residual, weight, schedule=s, seed=3) for s in SCHEDULES]
    assert all(torch.equal(a, b) for one in found[1:] for a, b in zip(one, found[0], strict=True))


def test_bad_arguments_are_named():
    for d in (0, 12, 8200):
        with pytest.raises(ConfigError, match="d="):
            RmsNorm(d)
    x, residual, weight = case(3, 64)
    good = call_of(x, residual, weight, x.clone(), x.clone())
    for bad, name in (
        ({"x": x.half()}, "x"),
        ({"x": x[:, :56]}, "x.shape"),
        ({"residual": None}, "residual"),
        ({"residual": residual[1:]}, "residual"),
        ({"weight": weight.bfloat16()}, "weight"),
        ({"out": (None, x)}, r"out\[0\]"),
        ({"out": (x, x[1:])}, r"out\[1\]"),
    ):
        with pytest.raises(ArgumentError, match=name):
            launch_args(RmsNorm(64, add=True), good._replace(**bad))
