"""Scores by the kernel in CUDA C++, with tcgen05: fp64's numbers, the bits of the DSL's stage A, faults, schedules."""

import pytest
import torch

from dsv4lib import check
from dsv4lib.errors import ArgumentError, BackendUnavailable
from dsv4lib.ops.common import cpp as cpp_cache
from dsv4lib.ops.fmha import cpp
from dsv4lib.ops.fmha.ladder import Ladder
from dsv4lib.pages.fmha.run_case import run_ladder
from tests.budget import small
from tests.cases import cases
from tests.emulated import emulated, observed

SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
SHAPES = [(1, 130), (128, 128), (130, 333), (300, 129)]


def operands(m, n, d=128, dtype=torch.bfloat16, seed=0):
    """Rows of Q of many sizes, so that none can stand in for another."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(-5, 5, m, base=2.0)[torch.arange(m) * 37 % m, None]
    q = (torch.randn(m, d, generator=generator) * scales).to(dtype)
    return q, torch.randn(n, d, generator=generator).to(dtype)


def judged(q, kv, scale, s):
    truth, peer = scale * (q.double() @ kv.double().T), scale * (q.float() @ kv.float().T)
    return check.within_factor(s, peer, truth)


def run(q, kv, scale=0.25, **device):
    """Scores in the middle of a larger matrix, whose rest must stay."""
    (m, _), n = q.shape, len(kv)
    memory = torch.full((m, n + 3), 7.0)
    with emulated("sm_100a", **device):
        cpp.qk_tile(q, kv, scale, out=memory[:, 1 : 1 + n], backend="emulator")
    assert bool((memory[:, 0] == 7).all()) and bool((memory[:, 1 + n :] == 7).all())
    return memory[:, 1 : 1 + n].contiguous()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_numbers(shape):
    q, kv = operands(*shape)
    found = judged(q, kv, 0.25, run(q, kv))
    assert found.passed, found


@pytest.mark.parametrize(
    ("d", "dtype"), cases((192, torch.float16), full=[(64, torch.bfloat16), (256, torch.bfloat16)])
)
def test_head_dimensions_and_types(d, dtype):
    q, kv = operands(130, 140, d, dtype)
    wide = torch.full((130, d + 8), torch.nan, dtype=dtype)
    wide[:, :d] = q
    found = judged(q, kv, 0.25, run(wide[:, :d], kv))
    assert found.passed, found


def test_both_languages_give_the_same_bits():
    outcome = run_ladder(Ladder, ("a", 128, "bf16"), 130, 200)
    q, kv = outcome.inputs
    assert torch.equal(run(q, kv, 128**-0.5), outcome.output)


def test_all_schedules_give_the_same_bits():
    q, kv = operands(130, 140, 64)
    found = [run(q, kv, schedule=s, seed=3) for s in SCHEDULES]
    assert all(torch.equal(one, found[0]) for one in found[1:])


@pytest.mark.parametrize("arch", cpp.ARCHS)
@pytest.mark.parametrize("d", [64, 256])
def test_budget(arch, d):
    code = cpp_cache.compiled(cpp.kernel(d, torch.bfloat16), arch)
    assert code.local_bytes == 0 and small(code) and code.registers <= 64, code
    assert code.smem_bytes == 2 * d // 64 * 16384 + 16 and code.threads == 128
    assert "tcgen05.mma.cta_group::1.kind::f16" in code.ptx


SEEN = {  # by the checks; the others by the numbers
    "proxy_unfenced": {"missing_proxy_fence"},
    "first_accumulates": {"uninitialised_tmem"},
    "product_unawaited": {"race_tensor", "uninitialised_tmem", "tmem_after_free"},
    "rows_past_the_end": {"MemoryFault"},
    "freed_while_read": {"race_tensor", "tmem_after_free"},
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("fault", cpp.FAULTS)
def test_faults_are_found(fault):
    q, kv = operands(100, 130)
    s = torch.full((100, 130), 7.0)
    with observed("sm_100a") as seen:
        cpp.run(q, kv, 0.25, s, "emulator", cpp.FAULTS[fault])
    assert seen == SEEN.get(fault, set())
    assert seen or not judged(q, kv, 0.25, s).passed


def test_what_is_refused():
    q, kv = operands(5, 7)
    shared = torch.zeros(5, 64)
    assert cpp.qk_tile(q[:0], kv, backend="emulator").shape == (0, 7)
    for call, name in (
        (lambda: cpp.qk_tile(q.float(), kv), "q"),
        (lambda: cpp.qk_tile(q[:, :96], kv[:, :96]), "q"),
        (lambda: cpp.qk_tile(q, kv.half()), "kv"),
        (lambda: cpp.qk_tile(q, kv[0]), "kv"),
        (lambda: cpp.qk_tile(q, kv, out=torch.zeros(5, 6)), "out"),
        (lambda: cpp.qk_tile(q, kv, out=torch.zeros(7, 5).T), "out.stride"),
        (lambda: cpp.qk_tile(q.repeat(1, 2)[:, 1:129], kv), "q.stride"),
        (lambda: cpp.qk_tile(q, kv, backend="reference"), "backend"),
        (lambda: cpp.qk_tile(shared.view(torch.bfloat16), kv, out=shared[:, 9:16]), "out='memory of q'"),
        (lambda: cpp.qk_tile(q, kv, out=torch.zeros(40).as_strided((5, 7), (4, 1))), "out.stride"),
        (lambda: cpp.qk_tile(q, kv.clone().requires_grad_()), "kv.requires_grad"),
    ):
        with pytest.raises(ArgumentError, match=name):
            call()
    with pytest.raises(BackendUnavailable):
        cpp.qk_tile(q, kv, backend="native")
