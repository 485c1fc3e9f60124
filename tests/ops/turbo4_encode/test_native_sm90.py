"""`turbo4_encode` on a Hopper: the oracle's bytes at full sizes, indices outside the pool, CUDA graphs."""

import pytest
import torch

from dsv4lib import backends
from dsv4lib.formats import turbo4
from dsv4lib.ops.turbo4_encode.op import turbo4_encode
from dsv4lib.pages.turbo4.run_case import vectors

NATIVE = backends.status("native", "sm_90a")
pytestmark = [pytest.mark.sm90, pytest.mark.skipif(not NATIVE.available, reason=NATIVE.reason)]
PAGE = 64


def pages_of(tokens, heads, dim):
    size = turbo4.layout(dim).page_bytes(PAGE)
    return torch.full((-(-(tokens + 9) // PAGE), heads, size), 0xA5, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 16, 128), (37, 3, 64), (513, 5, 256), (4096, 1, 512)])
def test_bytes(tokens, heads, dim, dtype):
    x, indices = vectors(tokens, heads, dim, 1, dtype), torch.randperm(tokens + 9)[:tokens].int()
    indices[tokens // 2] = -1
    want = pages_of(tokens, heads, dim)
    found = want.cuda()
    turbo4_encode(x, want, PAGE, indices, seed=5, backend="reference")
    turbo4_encode(x.cuda(), found, PAGE, indices.cuda(), seed=5, backend="native")
    assert torch.equal(found.cpu(), want)


def test_indices_outside_the_pool_store_nothing():
    x, pages = vectors(3, 2, 128, 1).cuda(), pages_of(3, 2, 128).cuda()
    indices = torch.tensor([len(pages) * PAGE, 2**31 - 1, -(2**31)]).int().cuda()
    turbo4_encode(x, pages, PAGE, indices, backend="native")
    assert bool((pages == 0xA5).all())


def test_cuda_graph():
    """Captured once, replayed on new vectors and indices."""
    x, pages, indices = (
        vectors(64, 16, 128, 0).cuda(),
        pages_of(64, 16, 128).cuda(),
        torch.randperm(73)[:64].int().cuda(),
    )
    turbo4_encode(x, pages, PAGE, indices, backend="native")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        turbo4_encode(x, pages, PAGE, indices, backend="native")
    for seed in (1, 2):
        new, order = vectors(64, 16, 128, seed), torch.randperm(73, generator=torch.Generator().manual_seed(seed))[:64]
        x.copy_(new)
        indices.copy_(order)
        pages.fill_(0xA5)
        graph.replay()
        torch.cuda.synchronize()
        want = pages_of(64, 16, 128)
        turbo4_encode(new, want, PAGE, order.int(), backend="reference")
        assert torch.equal(pages.cpu(), want)
