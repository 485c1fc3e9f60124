"""The router in CUDA C++: fp64's experts and weights, by the checks that the DSL's kernels pass."""

import pytest
import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common import cpp as cpp_cache
from dsv4lib.ops.router import cpp
from dsv4lib.ops.router.op import Hashed, router
from tests.budget import small
from tests.emulated import emulated, observed
from tests.ops.router.test_kernel import (
    FACTOR,
    SCHEDULES,
    ULPS,
    call_of,
    case,
    close,
    expected,
    operands,
    outputs,
)

ARCHS = ("sm_100a", "sm_90a")


def run(arch, inputs, chosen, k, **device):
    """(experts, weights) of a launch without hazards; inputs: logits, or (x, weight)."""
    x, weight = inputs if isinstance(inputs, tuple) else (inputs, None)
    out = outputs(x.shape[0], k)
    with emulated(arch, **device):
        cpp.run(call_of(x, weight, chosen, out))
    return out


@pytest.mark.one_in(3)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("d", "hashed"), [(0, False), (4096, False), (4096, True)])
def test_budget(arch, d, hashed):
    code = cpp_cache.compiled(cpp.kernel(384, 6, d, hashed), arch)
    assert code.local_bytes == 0 and small(code) and code.registers <= 96, code


@pytest.mark.one_in(3)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("experts", "k", "tokens"), [(256, 6, 11), (384, 6, 1), (250, 16, 3), (512, 8, 2), (5, 1, 9)])
def test_from_logits(arch, experts, k, tokens):
    logits, bias = case(tokens, experts, seed=k)
    want = expected(logits, k, bias)
    assert want[2] > 4e-6  # else fp32 may order two scores otherwise
    close(run(arch, logits, bias, k), want)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("arch", "experts", "k", "tokens", "d"),
    [("sm_90a", 42, 5, 3, 2112), ("sm_100a", 60, 7, 5, 1024), ("sm_100a", 33, 16, 7, 64)],
)
def test_from_x(arch, experts, k, tokens, d):
    x, weight = operands(tokens, experts, d, seed=k)
    bias = 0.3 * torch.randn(experts, generator=torch.Generator().manual_seed(1))
    want = expected(x.double() @ weight.double().T, k, bias)
    assert want[2] > 2e-6
    close(run(arch, (x, weight), bias, k), want)


@pytest.mark.parametrize("arch", ARCHS)
def test_ties_go_to_the_lower_number(arch):
    """Equal scores across lanes and within one, among them 0 of either sign and rows of one value."""
    logits, bias = torch.full((4, 256), -2.0), torch.zeros(256)
    logits[1, [200, 3, 7, 129, 128, 131, 4, 255]] = 1.5
    logits[2, 77] = 3
    logits[3] = -float("inf")  # affinity 0: scores are the bias, here 0, -0 and one above
    bias[10:20], bias[254] = -0.0, 1e-30
    experts, weights = run(arch, logits, bias, 6)
    assert torch.equal(experts.long(), expected(logits, 6, bias)[0])
    assert experts.tolist()[1:] == [[3, 4, 7, 128, 129, 131], [77, 0, 1, 2, 3, 4], [254, 0, 1, 2, 3, 4]]
    assert bool(weights[3].isnan().all())  # 0 / 0, as in the oracle


@pytest.mark.parametrize("arch", ARCHS)
def test_affinities_from_end_to_end(arch):
    """Weights of two experts whose logits are far from, and at, the places where formulas change."""
    logits = torch.cat((torch.linspace(-170, 90, 41), torch.tensor([-1e-6, 0, 1e-6, 1e4, -17, 17, -16.1, 16.1])))
    rows = torch.stack((logits, logits.roll(1)), 1).float()
    want, found = expected(rows, 2, torch.zeros(2)), run(arch, rows, torch.zeros(2), 2)
    assert torch.equal(found[0].long(), want[0])
    big = want[1] > 1e-36  # smaller ones are near the end of fp32
    assert float(((found[1] - want[1]) / want[1])[big].abs().max()) < ULPS and int((~big).sum()) < 6


def test_nan_poisons_its_row_and_no_other():
    logits, bias = case(4, 32)
    clean = run("sm_100a", logits, bias, 6)
    logits[1, 9], logits[2] = float("nan"), float("nan")
    experts, weights = run("sm_100a", logits, bias, 6)
    assert bool(weights[1:3].isnan().all()) and 9 not in experts[1] and experts[2].tolist() == [0, 1, 2, 3, 4, 5]
    assert all(torch.equal(a[[0, 3]], b[[0, 3]]) for a, b in zip((experts, weights), clean, strict=True))


@pytest.mark.parametrize("with_x", [False, True])
def test_experts_by_table_and_padded_rows(with_x):
    """A padded row's id is none of the table's; its x is NaN."""
    x, weight = operands(9, 24, 128)
    table, tokens = torch.arange(24).view(4, 6).flip(0), torch.tensor([3, 0, 1, -1, 2, 4, 0, 3, 1])
    logits = x.double() @ weight.double().T
    there = (tokens >= 0) & (tokens < 4)
    picks, weights, _ = expected(logits[there], 6, picks=table[tokens[there]])
    x[~there] = float("nan")
    inputs = (x, weight) if with_x else torch.where(there[:, None], logits, torch.nan).float()
    found = run("sm_90a", inputs, (table, tokens), 6)
    assert bool((found[0][~there] == -1).all()) and not found[1][~there].any()
    close((found[0][there], found[1][there]), (picks, weights))


def test_all_schedules_give_the_same_bits():
    x, weight = operands(3, 40, 128)
    found = [run("sm_100a", (x, weight), torch.zeros(40), 6, schedule=s, seed=3) for s in SCHEDULES]
    assert all(torch.equal(a, b) for one in found[1:] for a, b in zip(one, found[0], strict=True))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fault", cpp.FAULTS)
def test_faults_are_found(fault):
    x, weight = operands(4, 40, 128)
    weight[:, 64:] = 0
    weight[11] = weight[3]
    x[2] = 0
    x[2, :32], weight[:, :32] = 16.0, (weight[:, :32].float() - 0.3).bfloat16()  # far below: e^x underflows
    x[3] = 0
    bias = 0.1 * torch.randn(40, generator=torch.Generator().manual_seed(1))
    bias[3] = bias[11] = 1.0
    want = expected(x.double() @ weight.double().T, 6, bias)
    for faults in ((), (cpp.FAULTS[fault],)):
        out = outputs(4, 6)
        poisoned = bias.clone()
        poisoned[0] = float("nan") if fault == "nan_unseen" else bias[0]
        with observed("sm_100a") as seen:
            cpp.run(call_of(x, weight, poisoned, out), *faults)
        if fault == "nan_unseen":
            assert bool(out[1].isnan().all()) == (not faults)
            continue
        assert bool(seen) == (bool(faults) and fault == "no_barrier"), seen
        error = ((out[1].double() - want[1]) / want[1]).abs().max()
        wrong = not torch.equal(out[0].long(), want[0]) or not bool(error < ULPS)
        assert (wrong or bool(seen)) == bool(faults), (fault, faults, error)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("fault", cpp.FAULTS_OF_TABLES)
def test_faults_of_tables_are_found(fault):
    logits = case(3, 24)[0]
    table, tokens = torch.arange(24).view(4, 6), torch.tensor([3, -1, 1])
    out = outputs(3, 6)
    with emulated("sm_100a"):
        cpp.run(call_of(logits, None, (table, tokens), out), cpp.FAULTS_OF_TABLES[fault])
    want = expected(logits, 6, picks=table[tokens])[1]
    if fault == "padded_row_routed":
        assert not bool((out[0][1] == -1).all())
    else:
        assert float(((out[1] - want) / want)[[0, 2]].abs().max()) > 0.1


def test_as_the_op_has_it():
    x, weight = operands(3, 64, 192)
    bias = 0.3 * torch.randn(64, generator=torch.Generator().manual_seed(1))
    found = cpp.router(x, weight, bias=bias, factor=FACTOR, backend="emulator")
    want = router(x, weight, bias=bias, factor=FACTOR, backend="reference")
    assert torch.equal(found[0], want[0])
    torch.testing.assert_close(found[1], want[1], rtol=ULPS, atol=0)
    assert cpp.router(x[:0], weight, bias=bias, backend="emulator")[0].shape == (0, 6)
    table, tokens = torch.arange(12).view(2, 6), torch.tensor([1, 0, 1])
    found = cpp.router(x, weight, hashed=Hashed(table, tokens), backend="emulator")
    assert torch.equal(found[0], table[tokens].int())


def test_bad_arguments_are_named():
    (x, weight), bias = operands(3, 64, 128), torch.zeros(64)
    for call, name in (
        (lambda: cpp.router(x, weight, k=17, bias=bias), "k"),
        (lambda: cpp.router(x, weight, bias=bias, backend="reference"), "backend"),
        (lambda: cpp.router(x[0], weight, bias=bias), "x.shape"),
        (lambda: cpp.router(x, weight), "bias"),
        (lambda: cpp.router(x, weight, bias=bias[1:]), "bias"),
        (lambda: cpp.router(x, weight, bias=bias, factor=float("inf")), "factor"),
        (lambda: cpp.router(x * float("nan"), weight, bias=bias), "x"),
        (lambda: cpp.router(x, weight, hashed=Hashed(torch.full((2, 6), 64), torch.zeros(3).long())), "hashed.table"),
        (lambda: cpp.router(x, weight, bias=bias, out=(torch.zeros(3, 6).int(), torch.zeros(2, 6))), r"out\[1\]"),
    ):
        with pytest.raises(ArgumentError, match=name):
            call()
