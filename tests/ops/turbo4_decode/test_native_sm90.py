"""`turbo4_decode` on a Hopper: numbers at full sizes, both tables, splits, what fp64 says of it, CUDA graphs."""

import math

import pytest
import torch

from dsv4lib import backends
from dsv4lib.check import compare
from dsv4lib.ops.turbo4_decode.op import Attention, turbo4_decode
from dsv4lib.ops.turbo4_encode.op import turbo4_encode
from dsv4lib.pages.turbo4.run_case import attend, case, error_over_torch, vectors

NATIVE = backends.status("native", "sm_90a")
pytestmark = [pytest.mark.sm90, pytest.mark.skipif(not NATIVE.available, reason=NATIVE.reason)]
SHAPES = {  # lengths, query heads, KV heads, dim, page size
    "GQA": ([1, 37, 0, 4096, 700, -5], 32, 8, 128, 64),
    "small": ([513, 64], 6, 2, 64, 16),
    "d256": ([1000], 10, 2, 256, 32),
    "latent": ([333, 90], 64, 1, 512, 64),
    "many heads": ([120, 9], 128, 1, 128, 24),
}


@pytest.mark.parametrize("lookup", ["registers", "shared"])
@pytest.mark.parametrize("splits", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_numbers(name, dtype, splits, lookup):
    """Beside fp64, and nearer to it than torch's attention over the decoded cache in the same dtype.

    In fp16 single elements of rows whose values cancel are further off than two roundings: P and centroids are fp16.
    """
    lengths, heads, kv_heads, dim, page_size = SHAPES[name]
    one = case(lengths, heads, kv_heads, dim, page_size=page_size, dtype=dtype, seed=3)
    result = attend(one, "native", 3, splits=splits, lookup=lookup)
    assert dtype == torch.float16 or result.record.passed, result.record.reasons
    assert error_over_torch(one, result, 3) < 0.8  # 0.43 to 0.63 in the emulator
    assert result.lse_error < 2e-3


def test_the_same_bits_every_time():
    lengths, heads, kv_heads, dim, page_size = SHAPES["GQA"]
    one = case(lengths, heads, kv_heads, dim, page_size=page_size, seed=3)
    first = attend(one, "native", 3, splits=3)
    for _ in range(20):
        again = attend(one, "native", 3, splits=3)
        assert torch.equal(again.o, first.o) and torch.equal(again.lse, first.lse)


def test_encode_and_attend_in_a_cuda_graph():
    """A step appends a token to each request and attends; captured once, replayed with other tokens and lengths."""
    batch, heads, kv_heads, dim, page_size, width = 4, 8, 2, 128, 16, 5
    one = case([70] * batch, heads, kv_heads, dim, page_size=page_size, seed=1, width=width)
    pages, table = one.pages.cuda(), one.block_table.cuda()
    x = vectors(batch, 2 * kv_heads, dim, 9).cuda()
    q, lengths = one.q.cuda(), one.lengths.cuda()
    indices = torch.zeros(batch, dtype=torch.int32, device="cuda")
    out = Attention(torch.empty_like(q), torch.empty(batch, heads, device="cuda"))

    def step():
        turbo4_encode(x, pages, page_size, indices, seed=1, backend="native")
        turbo4_decode(q, *pages.chunk(2, 1), page_size, table, lengths, seed=1, splits=2, out=out, backend="native")

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for at in (33, 17):
        new = vectors(batch, 2 * kv_heads, dim, at)
        where = one.block_table[:, at // page_size] * page_size + at % page_size
        x.copy_(new)
        indices.copy_(where)
        lengths.copy_(torch.tensor([at + 1, 0, at, -1]))
        pages.copy_(one.pages)
        graph.replay()
        torch.cuda.synchronize()
        moved = one.pages.clone()
        turbo4_encode(new, moved, page_size, where.int(), seed=1, backend="reference")
        assert torch.equal(pages.cpu(), moved)
        want = attend(one._replace(pages=moved, lengths=lengths.cpu()), "reference", 1).want
        assert compare(out.o.cpu(), want.o).passed
        assert torch.allclose(out.lse[[0, 2]].cpu().double(), want.lse[[0, 2]], atol=2e-3)
        assert bool((out.lse[[1, 3]] == -math.inf).all()) and not out.o[[1, 3]].any()
