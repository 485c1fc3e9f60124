"""The fused norm, RoPE and quantisation ops on a Hopper: the bits of the oracle, the last position, CUDA graphs."""

import pytest
import torch

from dsv4lib import backends
from dsv4lib.config import FLASH, LayerKind
from dsv4lib.formats import kv_entry
from dsv4lib.ops.embedding.op import embedding
from dsv4lib.ops.indexer_q.op import indexer_q
from dsv4lib.ops.inv_rope_quant.op import inv_rope_quant
from dsv4lib.ops.qnorm_rope_kv.op import qnorm_rope_kv
from dsv4lib.ops.quantize.op import quantize
from dsv4lib.ops.rmsnorm.op import add_rmsnorm, rmsnorm
from dsv4lib.ops.rmsnorm_quant.op import add_rmsnorm_quant, rmsnorm_quant
from dsv4lib.reference import rope

NATIVE = backends.status("native", "sm_90a")
pytestmark = [pytest.mark.sm90, pytest.mark.skipif(not NATIVE.available, reason=NATIVE.reason)]
FREQS = rope.layer_freqs(FLASH, LayerKind.CSA)
POSITIONS = 1 << 20
SIZES = [(1, 64), (3, 5), (37, 128), (515, 64)]


@pytest.fixture(scope="module")
def table():
    """Every position's row, on the GPU."""
    return torch.cat(rope.cos_sin(torch.arange(POSITIONS), FREQS, torch.float32), -1).cuda()


def rows(tokens, count, dim, seed=0):
    """(bf16 [tokens, count, dim] on the GPU, each head with a scale of its own; positions, the last one among them)."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(-4, 4, tokens * count)[torch.randperm(tokens * count, generator=generator)]
    x = (torch.randn(tokens, count, dim, generator=generator) * scales.view(tokens, count, 1)).bfloat16()
    positions = torch.randint(POSITIONS, (tokens,), generator=generator)
    positions[0] = POSITIONS - 1
    return x.cuda(), positions.cuda()


def same(found, want):
    return all(b is None or torch.equal(a.cpu(), b.cpu()) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize(("tokens", "count"), SIZES)
def test_inv_rope_quant(table, tokens, count):
    o, positions = rows(tokens, count, 512)
    want = inv_rope_quant(o, positions, table, backend="reference")
    assert same(inv_rope_quant(o, positions, table, backend="native"), want)
    assert same(inv_rope_quant(o, None, table[positions], backend="native"), want)


@pytest.mark.parametrize("variant", ["fp8", "fp4"])
@pytest.mark.parametrize(("tokens", "count"), SIZES)
def test_indexer_q(table, variant, tokens, count):
    q, positions = rows(tokens, count, 128)
    weights = torch.randn(tokens, count, device="cuda").bfloat16()
    for hadamard in (True, False):
        options = {"variant": variant, "hadamard": hadamard}
        want = indexer_q(q, weights, positions, table, **options, backend="reference")
        assert same(indexer_q(q, weights, positions, table, **options, backend="native"), want)


@pytest.mark.parametrize(("tokens", "count"), SIZES)
@pytest.mark.parametrize("weighted", [False, True])
def test_qnorm_rope_kv(table, tokens, count, weighted):
    """Queries to bf16; entries to the bit where kv came normed, nearly all where norms in fp32 and fp64 round apart."""
    q, positions = rows(tokens, count, 512)
    kv, _ = rows(tokens, 1, 512, seed=1)
    weight = 1 + 0.3 * torch.randn(512, device="cuda") if weighted else None
    indices = torch.randperm(tokens + 64)[:tokens].int().cuda()
    indices[tokens // 2] = -1
    found = []
    for backend in ("native", "reference"):
        pages = kv_entry.LAYOUT.allocate(-(-(tokens + 64) // 64), 64).cuda()
        places = positions, table, pages, 64, indices
        found.append((qnorm_rope_kv(q, kv[:, 0], *places, kv_norm=weight, backend=backend), pages))
    (out, pages), (want, wanted) = found
    size = want.float().unflatten(-1, (-1, 2)).norm(dim=-1).repeat_interleave(2, -1)
    assert bool(((out.float() - want.float()).abs() <= 2.0**-7 * want.float().abs() + 2.0**-18 * size).all())
    different = float((pages != wanted).float().mean())
    assert different < 1e-3 if weighted else different == 0


@pytest.mark.parametrize("recipe", ["fp8", "mxfp8", "mxfp4", "nvfp4"])
def test_add_rmsnorm_quant(recipe):
    """To the bit what two launches give."""
    g = torch.tensor([0.003], device="cuda") if recipe == "nvfp4" else None
    for tokens, d in ((1, 7168), (37, 4096), (515, 1152)):
        x, residual = rows(tokens, 2, d)[0].unbind(1)
        weight = 1 + 0.3 * torch.randn(d, device="cuda")
        found = add_rmsnorm_quant(x, residual, weight, recipe, global_scale=g, keep=True, backend="native")
        h, y = add_rmsnorm(x.contiguous(), residual.contiguous(), weight, backend="native")
        want = quantize(y, recipe, global_scale=g, backend="native")
        assert same((found.h, found.y, found.codes, found.scales), (h, y, want.codes, want.scales))
        image = quantize(y, recipe, global_scale=g, swizzled=True, backend="native").scales
        swizzled = add_rmsnorm_quant(x, residual, weight, recipe, global_scale=g, swizzled=True, backend="native")
        assert same((swizzled.h, swizzled.codes, swizzled.scales), (h, want.codes, image))


@pytest.mark.parametrize("recipe", ["fp8", "mxfp8", "nvfp4"])
def test_rmsnorm_quant(recipe):
    """To the bit what two launches give, of columns of a wider matrix."""
    g = torch.tensor([0.003], device="cuda") if recipe == "nvfp4" else None
    for tokens, d in ((1, 1024), (37, 1536), (515, 1152)):
        x = rows(tokens, 1, d + 512)[0][:, 0, :d]
        weight = 1 + 0.3 * torch.randn(d, device="cuda")
        y = rmsnorm(x, weight, out=x.new_empty(tokens, d), backend="native")
        for swizzled in (False, True):
            options = {"global_scale": g, "swizzled": swizzled, "backend": "native"}
            found, want = rmsnorm_quant(x, weight, recipe, **options), quantize(y, recipe, **options)
            assert same((found.codes, found.scales), (want.codes, want.scales))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_embedding(dtype):
    """Rows of the real table; ids that are negative or past the end give zeros, at once and from a CUDA graph."""
    weight = torch.randn(129280, 4096, device="cuda", dtype=torch.bfloat16)
    tokens = torch.randint(129280, (37,), device="cuda").to(dtype)
    tokens[[0, 5, 9]] = torch.tensor([-1, 129280, 129279], device="cuda").to(dtype)

    def wanted():
        inside = (tokens >= 0) & (tokens < len(weight))
        return weight[tokens.clamp(0, len(weight) - 1).long()] * inside[:, None]

    out = embedding(tokens, weight, keep=True, backend="native")
    assert torch.equal(out.rows, wanted()) and torch.equal(out.streams, wanted()[:, None].expand(-1, 4, -1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        embedding(tokens, weight, out=out, backend="native")
    tokens.copy_(tokens.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out.rows, wanted()) and torch.equal(out.streams, wanted()[:, None].expand(-1, 4, -1))


def test_in_a_cuda_graph(table):
    """The three ops captured once, replayed on new numbers in the same memory."""
    o, positions = rows(37, 64, 512)
    q, _ = rows(37, 64, 128)
    kv, weights = o[:, 0].clone(), torch.randn(37, 64, device="cuda")
    pages, indices = kv_entry.LAYOUT.allocate(2, 64).cuda(), torch.arange(37).int().cuda()

    def layer(backend, pages):
        return (
            *inv_rope_quant(o, positions, table, backend=backend),
            *indexer_q(q, weights, positions, table, backend=backend),
            qnorm_rope_kv(o, kv, positions, table, pages, 64, indices, backend=backend),
            pages,
        )

    layer("native", pages)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = layer("native", pages)
    for seed in (1, 2):
        o.copy_(rows(37, 64, 512, seed)[0])
        q.copy_(rows(37, 64, 128, seed)[0])
        kv.copy_(o[:, 1])
        graph.replay()
        torch.cuda.synchronize()
        want = layer("reference", torch.zeros_like(pages))
        torch.testing.assert_close(results[5], want[5], rtol=2.0**-6, atol=2.0**-10)
        assert same((*results[:5], results[6]), (*want[:5], want[6]))
