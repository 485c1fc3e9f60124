"""The join of attention parts alone: any number of parts, empty ones, NaN that must not vanish."""

import pytest
import torch

from dsv4lib import backends
from dsv4lib.errors import ConfigError
from dsv4lib.ops.fmha.arguments import combine_args
from dsv4lib.ops.fmha.combine import AT_ONCE, Combine, loads_at_once
from dsv4lib.ops.fmha.inputs import TYPES
from dsv4lib.pages.fmha.run_case import compiled
from dsv4lib.reference import fmha as reference
from tests.budget import small

TOKENS, HEADS = 3, 5
# One part, part of a batch of loads, a batch and more, more than the lanes of a warp.
CASES = [
    *((64, "fp16", 1, 4), (128, "bf16", 3, 4), (256, "bf16", 9, 4), (512, "fp16", 33, 4)),
    *((512, "bf16", 7, 8), (256, "fp16", 16, 8), (512, "fp16", 41, 8), (512, "bf16", 65, 8)),
]


@pytest.fixture(params=CASES, ids=str)
def case(request):
    """(kernel, code, parts, lses, o, lse); token 1 has no keys, and of many parts of token 0 one is empty."""
    depth, dtype, splits, at_once = request.param
    kernel, code = compiled(Combine, (depth, dtype, False, False, at_once))
    generator = torch.Generator().manual_seed(splits)
    parts = torch.randn(splits, TOKENS, HEADS, depth, generator=generator)
    lses = 3 * torch.randn(splits, TOKENS, HEADS, generator=generator)
    lses[:, 1] = -float("inf")
    lses[splits // 2, 0] = -float("inf")
    parts[lses.isinf()] = 0
    o = torch.full((TOKENS, HEADS, depth), float("nan"), dtype=TYPES[dtype])
    return kernel, code, parts, lses, o, torch.full((TOKENS, HEADS), float("nan"))


def run(kernel, code, parts, lses, o, lse):
    return backends.launch("emulator", code, *combine_args(kernel, parts, lses, None, None, o, lse))


@pytest.mark.one_in(2)
def test_numbers(case):
    kernel, code, parts, lses, o, lse = case
    gpu = run(*case)
    assert not gpu.launches[-1].result.hazards
    assert (code.local_bytes, code.threads) == (0, kernel.threads) and small(code)
    weights = reference.sink_softmax(lses.double().movedim(0, -1), None).movedim(-1, 0)
    want = (weights[..., None] * parts.double()).sum(0)
    unit = torch.finfo(o.dtype).eps
    assert bool(((o.double() - want).abs() <= unit * want.abs() + 1e-6).all())
    true_lse = lses.double().logsumexp(0)
    assert bool((lse[1] == -float("inf")).all()) and bool((o[1] == 0).all())
    some = true_lse.isfinite()
    assert torch.equal(lse.isfinite(), some)
    assert bool(((lse[some] - true_lse[some]).abs() < 2e-6).all())


def test_nan_stays(case):
    """In the LSE of a part it reaches the whole head, in one dimension of a part that dimension."""
    _, _, parts, lses, o, lse = case
    lses[0, 2, 3], lses[0, 0, 0], parts[0, 0, 0, 7] = float("nan"), 0.5, float("nan")
    run(*case)
    assert bool(o[2, 3].isnan().all()) and bool(lse[2, 3].isnan())
    assert bool(o[0, 0, 7].isnan()) and int(o.isnan().sum()) == o.shape[2] + 1 and int(lse.isnan().sum()) == 1


@pytest.mark.one_in(4)
def test_how_many_loads_are_in_flight_does_not_change_a_bit(case):
    _, _, parts, lses, o, lse = case
    found = []
    for at_once in AT_ONCE:
        settings = (o.shape[2], "bf16" if o.dtype == torch.bfloat16 else "fp16", False, False, at_once)
        run(*compiled(Combine, settings), parts, lses, o, lse)
        found.append((o.clone(), lse.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_op_takes_eight_for_many_parts_of_few_heads():
    assert [loads_at_once(n, 64) for n in (2, 4, 5, 8, 44)] == [4, 4, 8, 8, 8]
    assert [loads_at_once(n, 512) for n in (4, 8, 15, 16)] == [4, 4, 4, 8]
    with pytest.raises(ConfigError, match="at_once"):
        Combine(at_once=6)
