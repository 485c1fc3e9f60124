"""mHC on a Hopper: against the oracle, the same bits again and at any place of a batch, y as FP8, CUDA graphs."""

import pytest
import torch

from dsv4lib import backends
from dsv4lib.ops.mhc import bench
from dsv4lib.ops.mhc.op import Site, mhc_head, mhc_post_pre, new_fp8, run
from dsv4lib.ops.mhc.variants import Variant, variants
from dsv4lib.ops.quantize.op import quantize

NATIVE = backends.status("native", "sm_90a")
pytestmark = [pytest.mark.sm90, pytest.mark.skipif(not NATIVE.available, reason=NATIVE.reason)]
NAMES = "streams", "y", "post", "comb"


def case(tokens, d, seed=0):
    given = bench.make(tokens, d, torch.Generator("cuda").manual_seed(seed))
    return given, Site(*(given[name] for name in ("fn", "scale", "base", "weight")))


def call(given, site, part=slice(None)):
    before = [given[name][part] for name in ("streams", "f", "post", "comb")]
    return mhc_post_pre(*before, site, backend="native")


def as_variant(given, variant, part=slice(None)):
    given = {**given, **{name: given[name][part] for name in ("streams", "f", "post", "comb")}}
    out = {name: torch.full_like(given["f" if name == "y" else name], float("nan")) for name in NAMES}
    run(bench.call_of(given, out), variant)
    return out


@pytest.mark.parametrize(
    ("variant", "d"),
    [(variant, d) for d in (4096, 7168) for variant in variants(d) if variant is not Variant.FEW_TOKENS],
)
@pytest.mark.parametrize("tokens", [1, 3, 33, 129, 1000, 4096])
def test_streams(tokens, variant, d):
    """Right, the same bits in 20 calls and at another place of a batch; post and comb as few_tokens' of the same
    streams, some of which round to the other side."""
    given, _ = case(tokens, d)
    found = as_variant(given, variant)
    bench.check(given, found)
    for _ in range(20):
        again = as_variant(given, variant)
        assert all(torch.equal(found[name], again[name]) for name in NAMES)
    part = slice(tokens // 2, tokens)
    again = as_variant(given, variant, part)
    assert all(torch.equal(found[name][part], again[name]) for name in NAMES)
    plain = bench.after_mhc(given, found["streams"])
    torch.testing.assert_close(found["post"], plain["post"], rtol=0, atol=2.0**-18)
    torch.testing.assert_close(found["comb"], plain["comb"], rtol=0, atol=2.0**-18)


@pytest.mark.parametrize("d", [4096, 7168])
@pytest.mark.parametrize("tokens", [1, 3, 33, 129, 1000])
def test_boundary(tokens, d):
    given, site = case(tokens, d)
    found = call(given, site)
    bench.check(given, dict(zip(NAMES, found, strict=True)))
    assert all(torch.equal(a, b) for a, b in zip(found, call(given, site), strict=True))
    part = slice(tokens // 2, tokens)
    assert all(torch.equal(a[part], b) for a, b in zip(found, call(given, site, part), strict=True))


def test_head():
    given, site = case(37, 4096)
    head = Site(site.fn[:4].contiguous(), site.scale[:1], site.base[:4], site.weight)
    before = {name: given[name] for name in ("f", "post", "comb")}
    found = mhc_head(given["streams"], head, **before, backend="native")
    want = mhc_head(given["streams"], head, **before, backend="reference")
    torch.testing.assert_close(found, want, rtol=2.0**-6, atol=1e-2)


def test_in_a_cuda_graph():
    given, site = case(16, 4096)
    call(given, site)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call(given, site)
    for seed in (1, 2):
        fresh, _ = case(16, 4096, seed)
        for name in ("streams", "f", "post", "comb"):
            given[name].copy_(fresh[name])
        graph.replay()
        torch.cuda.synchronize()
        bench.check(given, dict(zip(NAMES, found, strict=True)))


@pytest.mark.parametrize("recipe", ["fp8", "mxfp8"])
@pytest.mark.parametrize("d", [4096, 7168])
@pytest.mark.parametrize("tokens", [1, 3, 33, 129, 1000])
def test_y_as_fp8(tokens, d, recipe):
    """The bits of `quantize` of y, padding of the image included; y, streams and coefficients as without it."""
    given, site = case(tokens, d)
    before = [given[name] for name in ("streams", "f", "post", "comb")]
    plain = call(given, site)
    for swizzled in (False, True):
        want = quantize(plain[1], recipe, swizzled=swizzled, backend="native")
        for keep in (False, True):
            fp8 = new_fp8(given["streams"], recipe, swizzled)
            for one in fp8[:2]:
                one.fill_(0x5A)
            found = mhc_post_pre(*before, site, fp8=fp8, keep=keep, backend="native")
            assert torch.equal(fp8.codes, want.codes) and torch.equal(fp8.scales, want.scales)
            assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True) if a is not None)
            assert (found[1] is None) == (not keep)


def test_fp8_in_a_cuda_graph():
    """One launch for few tokens; two, with memory between them, for many of Pro."""
    for tokens, d in ((16, 4096), (200, 7168)):
        given, site = case(tokens, d)
        fp8, before = new_fp8(given["streams"]), [given[name] for name in ("streams", "f", "post", "comb")]

        def step(before=before, site=site, fp8=fp8):
            return mhc_post_pre(*before, site, fp8=fp8, backend="native")

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        fresh, _ = case(tokens, d, 1)
        for name in ("streams", "f", "post", "comb"):
            given[name].copy_(fresh[name])
        graph.replay()
        torch.cuda.synchronize()
        want = quantize(found[1], "fp8", swizzled=True, backend="native")
        assert torch.equal(fp8.codes, want.codes) and torch.equal(fp8.scales, want.scales)
