"""The quantising ops on a real Hopper: the bits of the oracle, in CUDA graphs, after what the stream holds."""

import pytest
import torch

from dsv4lib import backends
from dsv4lib.formats import indexer_key, kv_entry
from dsv4lib.ops.quantize import op
from dsv4lib.reference import quantize as reference

NATIVE = backends.status("native", "sm_90a")
pytestmark = [pytest.mark.sm90, pytest.mark.skipif(not NATIVE.available, reason=NATIVE.reason)]
RECIPES = ("nvfp4", "mxfp4", "mxfp8", "fp8")


def inputs(tokens, columns, seed, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-4, 4, tokens)[torch.randperm(tokens, generator=generator)]
    return (torch.randn(tokens, columns, generator=generator) * scale[:, None]).to(dtype)


def same(found, x, recipe, **options):
    """Against the oracle, to the bit."""
    codes, scales, g = reference.quantize(x, recipe, **options)
    assert torch.equal(found.codes.cpu(), codes.view(found.codes.shape))
    assert torch.equal(found.scales.cpu(), scales.view(found.scales.shape))
    assert g is None or torch.equal(found.global_scale.cpu(), g)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows(recipe, dtype):
    """A prefill of Flash, one token of Pro; every bf16 number."""
    for tokens, columns in ((1, 7168), (515, 4096)):
        x = inputs(tokens, columns, tokens, dtype)
        for swizzled in (False, True):
            same(op.quantize(x.cuda(), recipe, swizzled=swizzled, backend="native"), x, recipe, swizzled=swizzled)
    every = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(torch.bfloat16).to(dtype)
    x = torch.cat([every[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(i))] for i in range(8)])
    g = torch.tensor(0.0137) if recipe == "nvfp4" else None
    given = None if g is None else g.cuda()
    x = x.sort().values.view(-1, 1024)
    same(op.quantize(x.cuda(), recipe, global_scale=given, backend="native"), x, recipe, global_scale=g)


@pytest.mark.parametrize("recipe", RECIPES)
def test_gathered_and_deinterleaved(recipe):
    x, rows = inputs(300, 2048, 3), torch.randint(-1, 300, (1024,), generator=torch.Generator().manual_seed(4)).int()
    options = {"deinterleave": True, "swizzled": True}
    found = op.quantize(x.cuda(), recipe, rows=rows.cuda(), backend="native", **options)
    same(found, x, recipe, rows=rows, **options)


@pytest.mark.parametrize("kind", ["kv", "key"])
def test_entries(kind):
    layout, dim = (kv_entry.LAYOUT, 512) if kind == "kv" else (indexer_key.FP4_LAYOUT, 128)
    x = inputs(999, dim, 5)
    indices = torch.randperm(1100, generator=torch.Generator().manual_seed(6))[:999].int()
    indices[::7] = -1
    pages = layout.allocate(-(-1100 // 48), 48)
    fast = pages.cuda()
    (op.quantize_kv_entries if kind == "kv" else op.quantize_indexer_keys)(x.cuda(), fast, 48, indices.cuda())
    (reference.kv_entries if kind == "kv" else reference.indexer_keys)(pages, 48, indices, x)
    assert torch.equal(fast.cpu(), pages)


def test_in_a_cuda_graph():
    """Two launches with a derived scale, replayed on new numbers in the same memory."""
    first, second = inputs(77, 512, 7), inputs(77, 512, 8)
    x = first.cuda()
    op.quantize(x, "nvfp4", backend="native")  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = op.quantize(x, "nvfp4", backend="native")
    for new in (first, second):
        x.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        same(found, new, "nvfp4")
