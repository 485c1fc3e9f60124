"""FP4 weights expanded in CUDA C++: the oracle's bytes for every code under every scale."""

import pytest
import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.formats.mxfp4 import MXFP4Tensor
from dsv4lib.formats.nvfp4 import NVFP4Tensor
from dsv4lib.formats.weight_modes import convert
from dsv4lib.ops.common import cpp as cpp_cache
from dsv4lib.ops.moe_gemm import cpp
from tests.budget import small
from tests.emulated import emulated, observed

ARCHS = ("sm_100a", "sm_90a")
SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
ONE = torch.ones(())


def every_code(group):
    """All pairs of codes in turn, under all scales: [256, 64 codes] weights and their scale bytes."""
    pairs = torch.arange(256).repeat(32).view(256, 32)
    scales = torch.arange(256)[:, None].repeat(1, 64 // group)
    if group == 16:  # neighbours differ
        scales[:, 1::2] = scales[:, 1::2].flip(0)
        scales[:, 3] = (scales[:, 3] * 37) % 256
    return weights(pairs.to(torch.uint8), scales.to(torch.uint8), group)


def weights(packed, scales, group):
    return MXFP4Tensor(packed, scales) if group == 32 else NVFP4Tensor(packed, scales, ONE)


def random(group, rows=5, k=96, seed=0):
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(256, (2, rows, k // 2), generator=generator).to(torch.uint8)
    scales = torch.randint(20, 120, (2, rows, k // group), generator=generator).to(torch.uint8)
    return weights(packed, scales, group)


def run(arch, q, *edits, **device):
    with emulated(arch, **device):
        return cpp.expand(q, "emulator", *edits)


def same(found, q):
    want = convert(q, "e4m3_expand").planes[0]
    return torch.equal(found.codes, want.codes) and torch.equal(found.scales, want.scales)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("group", [16, 32])
def test_budget(arch, group):
    code = cpp_cache.compiled(cpp.kernel(group), arch)
    assert code.local_bytes == 0 and small(code) and code.registers <= 96, code
    assert "prmt.b32" in code.ptx


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("group", [16, 32])
def test_every_code_under_every_scale(arch, group):
    q = every_code(group)
    found, want = run(arch, q), convert(q, "e4m3_expand").planes[0]
    assert torch.equal(found.scales, want.scales)
    wrong = (found.codes != want.codes).nonzero().tolist()
    assert not wrong, (wrong[:5], found.codes[tuple(wrong[0])], want.codes[tuple(wrong[0])])


@pytest.mark.parametrize("group", [16, 32])
def test_several_experts_and_no_weights(group):
    q = random(group)
    found = run("sm_100a", q)
    assert same(found, q) and found.codes.shape == (2, 5, 96) and found.tile == (1, 32)
    assert run("sm_100a", weights(q.packed[:0], q.scales[:0], group)).codes.shape == (0, 5, 96)
    other = q.packed.view(torch.int8) if group == 32 else q.packed
    assert same(run("sm_90a", weights(other, q.scales, group)), q)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("group", [16, 32])
def test_all_schedules_give_the_same_bits(group):
    q = random(group, seed=1)
    assert all(same(run("sm_90a", q, schedule=s, seed=3), q) for s in SCHEDULES)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("group", "fault"),
    [(group, name) for group in (16, 32) for name in cpp.FAULTS] + [(16, n) for n in cpp.FAULTS_OF_NVFP4],
)
def test_faults_are_found(group, fault):
    q = random(group, rows=4)
    q.scales[0, 0, 0] = 0x7F if group == 16 else 255
    assert same(run("sm_100a", q), q)
    found = None
    with observed("sm_100a") as seen:
        found = cpp.expand(q, "emulator", (cpp.FAULTS | cpp.FAULTS_OF_NVFP4)[fault])
    assert seen == ({"MemoryFault"} if fault == "end_unchecked" else set())
    assert seen or not same(found, q)


def test_bad_arguments_are_named():
    q = random(32)
    for bad, name in (
        (q.packed, "q="),
        (MXFP4Tensor(q.packed[..., :8], q.scales), "q.packed"),
        (MXFP4Tensor(q.packed[0, 0, 0], q.scales), "q.packed"),
        (MXFP4Tensor(q.packed, q.scales[..., :1]), "q.scales"),
        (MXFP4Tensor(q.packed.int(), q.scales), "q.packed"),
        (MXFP4Tensor(q.packed.transpose(0, 1), q.scales), "q.packed"),
        (MXFP4Tensor(q.packed, q.scales.repeat(1, 1, 2)[..., ::2]), "q.scales.stride"),
    ):
        with pytest.raises(ArgumentError, match=name):
            cpp.expand(bad, "emulator")
    with pytest.raises(ArgumentError, match="backend"):
        cpp.expand(q, "reference")
