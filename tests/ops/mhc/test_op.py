"""The mHC ops: back ends, schemas, fakes, bad arguments."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4lib.errors import ArgumentError
from dsv4lib.ops.mhc import bench
from dsv4lib.ops.mhc.op import Fp8, Site, mhc_head, mhc_post_pre, mhc_pre, new_fp8, plan, run, writes_fp8
from dsv4lib.ops.mhc.variants import Variant, tile_of, variant_of, variants
from dsv4lib.ops.quantize.op import quantize
from tests.cases import cases

GIVEN = bench.make(5, 128, torch.Generator().manual_seed(0))
SITE = Site(*(GIVEN[name] for name in ("fn", "scale", "base", "weight")))
HEAD = Site(SITE.fn[:4], SITE.scale[:1], SITE.base[:4], SITE.weight)
BEFORE = {name: GIVEN[name] for name in ("f", "post", "comb")}
STREAMS = GIVEN["streams"]


def same(found, want):
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2.0**-6 if a.dtype == torch.bfloat16 else 2e-6, atol=2e-6)


def test_back_ends_agree():
    calls = (
        lambda b: mhc_post_pre(STREAMS, **BEFORE, site=SITE, backend=b),
        lambda b: mhc_pre(STREAMS, SITE, backend=b),
        lambda b: (mhc_head(STREAMS, HEAD, backend=b), mhc_head(STREAMS, HEAD, **BEFORE, backend=b)),
    )
    for call in calls:
        same(call("emulator"), call("reference"))
    names = "streams", "y", "post", "comb"
    bench.check(GIVEN, dict(zip(names, calls[0]("emulator"), strict=True)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("variant", "recipe"),
    cases(
        (Variant.FEW_TOKENS, "fp8"),
        (Variant.MANY_TOKENS, "fp8"),
        full=[(Variant.FEW_TOKENS, "mxfp8"), (Variant.MANY_TOKENS, "mxfp8")],
    ),
)
def test_y_as_fp8(variant, recipe):
    """The bits of `quantize` of y, from the kernel (d 128: a CTA has 32 columns) or from a second launch."""
    assert writes_fp8(128, recipe, plan(5, 128, variant=variant)) == (
        variant is Variant.FEW_TOKENS or recipe == "mxfp8"
    )
    for swizzled in (False, True):
        out = {name: torch.zeros_like(GIVEN["f" if name == "y" else name]) for name in ("streams", "y", "post", "comb")}
        call, fp8 = bench.call_of(GIVEN, out, "emulator"), new_fp8(STREAMS, recipe, swizzled)
        run(call._replace(fp8=fp8), variant)
        want = quantize(out["y"], recipe, swizzled=swizzled, backend="reference")
        assert torch.equal(fp8.codes, want.codes) and torch.equal(fp8.scales, want.scales)
        bare = new_fp8(STREAMS, recipe, swizzled)
        run(call._replace(out=call.out._replace(y=None), fp8=bare), variant)
        assert torch.equal(fp8.codes, bare.codes) and torch.equal(fp8.scales, bare.scales)


def test_fp8_of_the_oracle():
    fp8 = new_fp8(STREAMS)
    _, y, *_ = mhc_post_pre(STREAMS, **BEFORE, site=SITE, fp8=fp8, backend="reference")
    want = quantize(y, "fp8", swizzled=True, backend="reference")
    assert torch.equal(fp8.codes, want.codes) and torch.equal(fp8.scales, want.scales)
    bare = new_fp8(STREAMS)
    assert mhc_post_pre(STREAMS, **BEFORE, site=SITE, fp8=bare, keep=False, backend="reference")[1] is None
    assert torch.equal(fp8.codes, bare.codes)


def test_pro_writes_fp8_itself_where_few_tokens_do():
    for d, recipe, first in ((4096, "fp8", None), (7168, "fp8", 57), (7168, "mxfp8", None)):
        twice = [t for t in (1, 56, 57, 4096) if not writes_fp8(d, recipe, plan(t, d))]
        assert twice == [t for t in (1, 56, 57, 4096) if first and t >= first]


def test_forms_agree():
    """Streams to the bit (`MANY_TOKENS`: to a rounding), post and comb to fp32, y to a rounding; right by the bench."""
    names, found = ("streams", "y", "post", "comb"), {}
    for variant in variants(128):
        out = {name: torch.full_like(GIVEN["f" if name == "y" else name], float("nan")) for name in names}
        run(bench.call_of(GIVEN, out, "emulator"), variant)
        bench.check(GIVEN, out)
        found[variant] = out
    assert list(found) == list(Variant)
    for variant in variants(128):
        want = found[Variant.FEW_TOKENS]
        if (
            variant is Variant.MANY_TOKENS
        ):  # whose tensor cores add up in another order: some streams round to the other side
            want = want | bench.after_mhc(GIVEN, found[variant]["streams"], "emulator")
        for name in names:
            same([found[variant][name]], [want[name]])


@pytest.mark.parametrize("post", cases(True, full=[False]))
def test_tokens_have_the_bits_that_they_have_alone(post):
    """With so many tokens the op chooses another variant than for a few, unless they shall be batch-invariant."""
    tokens, few = 113, 9
    assert variant_of(tokens, 128) != variant_of(few, 128)
    given = bench.make(tokens, 128, torch.Generator().manual_seed(1))

    def boundary(rows, batch_invariant):
        streams, *before = (given[name][rows].contiguous() for name in ("streams", "f", "post", "comb"))
        fp8 = new_fp8(streams, swizzled=False)
        options = {"fp8": fp8, "batch_invariant": batch_invariant, "backend": "emulator"}
        made = mhc_post_pre(streams, *before, SITE, **options) if post else mhc_pre(streams, SITE, **options)
        return *made, fp8.codes, fp8.scales

    def differences(batch_invariant):
        whole = boundary(slice(None), batch_invariant)
        places = slice(50, 50 + few)
        return [int((a[places] != b).sum()) for a, b in zip(whole, boundary(places, batch_invariant), strict=True)]

    assert not any(differences(True))
    assert any(differences(False))  # what it is for


def test_forms_that_fit():
    assert variants(4096) == list(Variant) == variants(7168) and variants(7680) == []
    assert all(variant_of(tokens, d) in variants(d) for tokens in (1, 32, 128, 4096) for d in (128, 4096, 5120, 7168))
    chosen = {tokens: variant_of(tokens, 4096) for tokens in (1, 112, 113, 128, 129, 168, 169, 4096)}
    assert [tokens for tokens, variant in chosen.items() if variant == Variant.FEW_TOKENS] == [1, 112, 129, 168]
    assert (
        variant_of(56, 7168) == Variant.FEW_TOKENS
        and variant_of(57, 7168) == variant_of(4096, 7168) == Variant.MANY_TOKENS
    )
    for row in bench.rows():
        model, _, tokens = row.shape.split()
        d = dict(bench.MODELS)[model]
        others = [variant for variant in variants(d) if variant is not variant_of(int(tokens), d)]
        assert [one.name for one in row.providers[1 : len(variants(d))]] == [
            f"ours, {variant.value}" for variant in others
        ]


def test_outputs_of_the_caller_and_no_tokens():
    out = torch.zeros_like(STREAMS), torch.zeros(5, 128).bfloat16()
    y = mhc_head(STREAMS, HEAD, **BEFORE, out=out, backend="reference")
    assert y is out[1] and bool(out[0].any())
    none = mhc_post_pre(STREAMS[:0], **{name: x[:0] for name, x in BEFORE.items()}, site=SITE, backend="emulator")
    assert none[0].shape == (0, 4, 128) and none[3].shape == (0, 4, 4)


def test_plans_share_a_call_out():
    for tokens in (1, 3, 8, 129, 4096):
        for d in (4096, 7168, 128):
            for variant in variants(d):
                cluster, rows, clusters, chosen = plan(tokens, d, variant=variant)
                assert chosen == variant and d % cluster == 0
                assert 1 <= rows <= tile_of(variant, d) and 1 <= clusters <= -(-tokens // rows)
    assert plan(129, 4096).variant == variant_of(129, 4096)
    assert plan(4096, 4096)[:3] == (16, 16, 8) and plan(4096, 7168)[:3] == (32, 16, 4)  # 128 SMs
    assert plan(160, 4096)[1:3] == (23, 7) and plan(50, 7168)[1:3] == (8, 7)  # not one tile of 24 and one of a few
    assert plan(128, 4096)[:3] == (16, 16, 8)


def test_schemas_and_fakes():
    out = [torch.zeros_like(STREAMS), torch.zeros(5, 128).bfloat16(), torch.zeros(5, 4), torch.zeros(5, 4, 4)]
    with torch.no_grad():
        for before, new in ((tuple(BEFORE.values()), out[0]), ((None,) * 3, None)):
            given = STREAMS, *before, *SITE, new, *out[1:], *(None,) * 4, None, 20, 1e-6, 1e-6, False, "reference"
            result = torch.library.opcheck(torch.ops.dsv4.mhc_site.default, given)
            assert set(result.values()) == {"SUCCESS"}, result
            given = *given[:9], None, *given[10:12], *new_fp8(STREAMS), *given[16:]
            result = torch.library.opcheck(torch.ops.dsv4.mhc_site.default, given)
            assert set(result.values()) == {"SUCCESS"}, result
    with FakeTensorMode():
        streams = torch.empty(1 << 20, 4, 7168, dtype=torch.bfloat16)
        site = Site(torch.empty(24, 28672), torch.empty(3), torch.empty(24), torch.empty(7168))
        y, post, comb = mhc_pre(streams, site)
        assert y.shape == (1 << 20, 7168) and post.dtype == torch.float32 and comb.shape[1:] == (4, 4)
        fp8 = new_fp8(streams[:130])
        assert mhc_pre(streams[:130], site, fp8=fp8, keep=False)[0] is None and fp8.scales.shape == (256 * 224,)


def test_bad_arguments_are_named():
    for call, name in (
        (lambda: mhc_pre(STREAMS[:, :3], SITE), "streams.shape"),
        (lambda: mhc_pre(STREAMS[..., :96], SITE), "streams.shape"),
        (lambda: mhc_pre(STREAMS.float(), SITE), "streams"),
        (lambda: mhc_pre(STREAMS, HEAD), "site.fn"),
        (lambda: mhc_pre(STREAMS, SITE._replace(weight=SITE.weight.bfloat16())), "site.weight"),
        (lambda: mhc_pre(STREAMS, SITE, iters=0), "iters"),
        (lambda: mhc_head(STREAMS, HEAD, f=BEFORE["f"]), "f, post, comb"),
        (lambda: mhc_head(STREAMS, HEAD, out=(STREAMS.clone(), BEFORE["f"].clone())), r"out\[0\]"),
        (lambda: mhc_post_pre(STREAMS, **{**BEFORE, "post": BEFORE["post"][1:]}, site=SITE), "post"),
        (lambda: mhc_pre(STREAMS, SITE, keep=False), "out: y"),
        (lambda: mhc_pre(STREAMS, SITE, fp8=Fp8(*new_fp8(STREAMS)[:2], "nvfp4")), r"fp8\.recipe"),
        (lambda: mhc_pre(STREAMS, SITE, fp8=new_fp8(STREAMS[1:], swizzled=False)), r"fp8\.codes"),
        (lambda: mhc_pre(STREAMS, SITE, fp8=new_fp8(STREAMS)._replace(swizzled=False)), r"fp8\.scales"),
        (lambda: new_fp8(STREAMS, "fp6"), "recipe"),
        (lambda: new_fp8(STREAMS[0]), "streams.shape"),
    ):
        with pytest.raises(ArgumentError, match=name):
            call()
