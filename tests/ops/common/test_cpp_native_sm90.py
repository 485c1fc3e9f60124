"""Kernels in CUDA C++ on a real Hopper: numbers of the oracles, alone, in a CUDA graph, and one after the other."""

import pytest
import torch

from dsv4lib import backends
from dsv4lib.formats.nvfp4 import NVFP4Tensor
from dsv4lib.formats.weight_modes import convert
from dsv4lib.ops.compressor import cpp as compressor
from dsv4lib.ops.compressor.op import Pages, Ring
from dsv4lib.ops.moe_gemm import cpp as moe_gemm
from dsv4lib.ops.rmsnorm import cpp as rmsnorm
from dsv4lib.ops.rmsnorm.op import rmsnorm as norm
from dsv4lib.ops.router import cpp as router
from dsv4lib.ops.router.op import router as route
from dsv4lib.ops.topk import cpp as topk
from dsv4lib.reference.topk import topk as best
from tests.ops.compressor import cases

NATIVE = backends.status("native", "sm_90a")
pytestmark = [pytest.mark.sm90, pytest.mark.skipif(not NATIVE.available, reason=NATIVE.reason)]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_norm_alone_and_in_a_graph():
    x, weight = normal(37, 7168).bfloat16().cuda(), (1 + 0.3 * normal(7168, seed=1)).cuda()
    want, y = norm(x.cpu(), weight.cpu(), backend="reference"), torch.empty_like(x)
    torch.testing.assert_close(rmsnorm.rmsnorm(x, weight).cpu(), want, rtol=2.0**-7, atol=0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rmsnorm.rmsnorm(x, weight, out=y)
    y.zero_()
    graph.replay()
    torch.testing.assert_close(y.cpu(), want, rtol=2.0**-7, atol=0)


def test_each_launch_sees_what_the_one_before_wrote():
    """Launches overlap: a chain of a hundred norms in place has the bits of a chain with waits in between."""
    found, want = (normal(300, 4096).bfloat16().cuda() for _ in range(2))
    for _ in range(100):
        rmsnorm.rmsnorm(found, out=found)
    for _ in range(100):
        rmsnorm.rmsnorm(want, out=want)
        torch.cuda.synchronize()
    assert torch.equal(found, want)


def test_top_k():
    scores = (normal(9, 30_001) * 20).round()
    lengths = torch.tensor([0, 5, 511, 512, 513, 9000, 30_000, 30_001, -1], dtype=torch.int32)
    found = topk.topk(scores.cuda(), 512, lengths.cuda(), by_score=True)
    assert torch.equal(found.cpu().long(), best(scores, 512, lengths.long().clamp_min(0)))


def test_router():
    x, weight, bias = normal(8, 4096).bfloat16(), (normal(256, 4096, seed=1) / 64).bfloat16(), 0.3 * normal(256, seed=2)
    found = router.router(x.cuda(), weight.cuda(), bias=bias.cuda(), factor=1.5)
    want = route(x, weight, bias=bias, factor=1.5, backend="reference")
    assert torch.equal(found[0].cpu(), want[0])
    torch.testing.assert_close(found[1].cpu(), want[1], rtol=1e-6, atol=0)


def test_expansion():
    generator = torch.Generator().manual_seed(0)
    packed, scales = (torch.randint(256, (3, 130, n), generator=generator).to(torch.uint8) for n in (96, 12))
    want = convert(NVFP4Tensor(packed, scales, torch.ones(())), "e4m3_expand").planes[0]
    found = moe_gemm.expand(NVFP4Tensor(packed.cuda(), scales.cuda(), torch.ones(()).cuda()))
    assert torch.equal(found.codes.cpu(), want.codes) and torch.equal(found.scales.cpu(), want.scales)


def test_compressor():
    case = cases.make(4, [1] * 5, [0, 3, 4, 1_048_571, -1], single=True)
    there = case.to("cuda")

    def run(form):
        pages = cases.blank(form, int(case.batch.slots.max()) + 1, case.dim).cuda()
        state = Ring(*(x.clone() for x in there.state))
        compressor.compressor(*there[:4], state, Pages(pages, cases.PAGE, form), eps=cases.EPS)
        return pages, state

    cases.verify(case, run)
    cases.verify_stored(case, "kv", run("kv")[0])
