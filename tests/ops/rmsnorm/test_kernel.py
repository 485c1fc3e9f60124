"""The norm kernels of both languages and architectures against fp64, fused and not, in place, under all schedules."""

from functools import cache

import pytest
import torch

from dsv4lib.emulator import launch
from dsv4lib.emulator.driver.device import make
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.ops.common import cpp as cpp_cache
from dsv4lib.ops.rmsnorm import cpp
from dsv4lib.ops.rmsnorm.arguments import fake_args, launch_args
from dsv4lib.ops.rmsnorm.kernel import RmsNorm
from dsv4lib.ops.rmsnorm.op import AddNorm, Norm
from dsv4lib.reference.rmsnorm import rmsnorm
from tests.budget import built, small
from tests.emulated import emulated, observed

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


def dsl(settings, arch, x, residual, weight, total=None, y=None, **device):
    kernel, code = compiled(settings, arch)
    if kernel.add and total is None:
        total = torch.full_like(x, float("nan"))
    y = torch.full_like(x, float("nan")) if y is None else y
    gpu = make(arch, **{"checks": "race", **device})
    launch(code, *launch_args(kernel, call_of(x, residual, weight, total, y)), gpu=gpu)
    assert not gpu.hazards, gpu.hazards[0].message
    return total, y


def in_cpp(settings, arch, x, residual, weight, total=None, y=None, **device):
    like = RmsNorm(*settings)
    code = cpp_cache.compiled(cpp.kernel(like), arch)
    assert code.local_bytes == 0 and small(code) and code.registers <= 64, code
    if like.add and total is None:
        total = torch.full_like(x, float("nan"))
    y = torch.full_like(x, float("nan")) if y is None else y
    with emulated(arch, **device):
        cpp.run(call_of(x, residual, weight, total, y))
    return total, y


LANGUAGES = {"dsl": dsl, "cpp": in_cpp}
languages = pytest.mark.parametrize("run", LANGUAGES.values(), ids=LANGUAGES)


def close(y, h, weight):
    """Half a unit of bf16, and what fp32 sums and the reciprocal root add."""
    want = rmsnorm(h.double(), None if weight is None else weight.double(), EPS)
    assert bool(((y.double() - want).abs() <= 2.0**-8 * (1 + 2.0**-10) * want.abs()).all())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("d", "tokens"), [(4096, 3), (7168, 2), (1032, 4), (8, 3)])
@pytest.mark.parametrize("add", [False, True])
@languages
def test_rows(run, arch, d, tokens, add):
    x, residual, weight = case(tokens, d, seed=d)
    total, y = run((d, add), arch, x, residual if add else None, weight)
    h = x
    if add:
        h = (x.float() + residual.float()).bfloat16()
        assert torch.equal(total, h)
    close(y, h, weight)
    assert not y[-1].any()


@languages
def test_fused_is_the_addition_and_the_norm(run):
    x, residual, weight = case(3, 1032)
    total, y = run((1032, True), "sm_90a", x, residual, weight)
    assert torch.equal(y, run((1032, False), "sm_90a", total, None, weight)[1])


@languages
def test_in_place_and_without_weight(run):
    x, residual, _ = case(3, 1032)
    fresh = run((1032, True, False), "sm_90a", x, residual, None)
    close(fresh[1], fresh[0], None)
    run((1032, True, False), "sm_90a", x, residual, None, total=residual, y=x)
    assert torch.equal(residual, fresh[0]) and torch.equal(x, fresh[1])


@languages
def test_rows_of_a_larger_matrix_and_nan_in_one(run):
    x, _, weight = case(3, 1032)
    wide = torch.full((3, 2048), 7.0).bfloat16()
    wide[:, :1032] = x
    wide[0, 1031] = float("nan")
    _, y = run((1032, False), "sm_100a", wide[:, :1032], None, weight)
    assert bool(y[0].isnan().all())
    close(y[1:], x[1:], weight)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", ARCHS)
@languages
def test_all_schedules_give_the_same_bits(run, arch):
    x, residual, weight = case(3, 1032)
    found = [run((1032, True), arch, x, residual, weight, schedule=s, seed=3) for s in SCHEDULES]
    assert all(torch.equal(a, b) for one in found[1:] for a, b in zip(one, found[0], strict=True))


@pytest.mark.parametrize("add", [False, True])
def test_both_languages_give_the_same_bits(add):
    x, residual, weight = case(3, 1032)
    found = [run((1032, add), "sm_90a", x, residual if add else None, weight) for run in LANGUAGES.values()]
    assert torch.equal(found[0][1], found[1][1]) and (not add or torch.equal(found[0][0], found[1][0]))


SEEN = {  # by the checks; the others by the numbers
    "no_barrier": {"race_shared", "uninitialised_smem"},
    "tail_counted": {"MemoryFault"},
    "read_early": {"dependent_launch_early"},
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fault", cpp.FAULTS)
def test_faults_of_cpp_are_found(fault):
    """By a check, or by the numbers; x is what the launch before has written."""
    x, residual, weight = case(3, 1032)
    h, y = torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))
    ones = torch.ones_like(x) * (x != 0)
    with observed("sm_100a") as seen:
        cpp.run(call_of(ones, torch.zeros_like(x), weight, torch.empty_like(x), x))
        cpp.run(call_of(x, residual, weight, h, y), cpp.FAULTS[fault])
    assert seen == SEEN.get(fault, set())
    if not seen:
        with pytest.raises(AssertionError):
            close(y, (x.float() + residual.float()).bfloat16(), weight)


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
