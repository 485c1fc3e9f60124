"""y of mHC as FP8: the bits of `quantize` of y, in every sharing of blocks, padded images, schedules, faults."""

import pytest
import torch

from dsv4lib.dsl.cubin import read_cubin
from dsv4lib.emulator import launch
from dsv4lib.emulator.driver.device import make
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.formats import scale_swizzle
from dsv4lib.ops.mhc.arguments import launch_args
from dsv4lib.ops.mhc.few_tokens import MhcFewTokens
from dsv4lib.ops.mhc.many_tokens import MhcManyTokens
from dsv4lib.ops.mhc.op import Fp8
from dsv4lib.ops.mhc.variants import Variant, cluster_of
from dsv4lib.reference.quantize import quantize
from tests.cases import cases
from tests.ops.mhc.test_kernel import ARCHS, FULL, SCHEDULES, call_of, case, compiled, outputs
from tests.ops.mhc.test_kernel import run as run_bf16

BLOCK = {"fp8": 128, "mxfp8": 32}


def run(given, rows, clusters, arch="sm_90a", device=None, **settings):
    """(streams, y or None, post, comb, codes, scales) of a launch; codes and scales begin as 0x5A."""
    if settings.get("variant", "few_tokens") == "few_tokens":
        settings = {"groups": -(-rows // 8), **settings}
    kernel, code = compiled(arch, **settings)
    streams, before, parameters = given
    tokens = len(streams)
    after = outputs(tokens, kernel.d, kernel.post, False)
    if not kernel.keep_y:
        after = after[0], None, *after[2:]
    blocks = kernel.d // BLOCK[kernel.recipe]
    size = (scale_swizzle.swizzled_bytes(tokens, kernel.d // 32),) if kernel.swizzled else (tokens, blocks)
    fp8 = torch.full((tokens, kernel.d), 0x5A, dtype=torch.uint8), torch.full(size, 0x5A, dtype=torch.uint8)
    gpu = make(arch, **{"checks": "race", **(device or {})})
    space = torch.zeros(kernel.space(clusters)) if kernel.space(clusters) else None
    before = before if kernel.post else (None, None, None)
    fp8 = Fp8(*fp8, kernel.recipe, kernel.swizzled)
    call = call_of(kernel, streams, before, parameters, after, fp8, space)
    launch(code, *launch_args(kernel, call, rows, clusters), gpu=gpu)
    assert not gpu.hazards, gpu.hazards[0].message
    return *after, *fp8[:2]


def check(found, recipe, swizzled=True):
    """Codes and scales of y, byte by byte, padding of the image included."""
    y, codes, scales = found[1], *found[4:]
    want, wanted, _ = quantize(y, recipe, swizzled=swizzled)
    assert torch.equal(codes, want[0]) and torch.equal(scales, wanted[0]) and bool(scales.any())


def hard(tokens, d, seed=0):
    """A case whose columns differ in scale by 2^20, with blocks of zeros and a token of zeros."""
    streams, (f, post, comb), (fn, scale, base, weight) = case(tokens, d, seed=seed)
    columns = torch.logspace(-4, 2, d)[torch.randperm(d, generator=torch.Generator().manual_seed(seed))]
    columns[: d // 2 : 7] = 0
    columns[96:] *= torch.logspace(0, -3, d - 96)
    weight = weight * columns
    streams[-1], f[-1] = 0, 0
    return streams, (f, post, comb), (fn, scale, base, weight)


# (variant, d, cluster, recipe): a CTA has a quarter of a block of 128, a half, 3/4, one, 1 1/2 or 2
SHARINGS = [
    ("few_tokens", 256, 8, "fp8"),
    ("few_tokens", 384, 4, "fp8"),
    ("few_tokens", 768, 4, "fp8"),
    ("few_tokens", 1024, 4, "fp8"),
    ("few_tokens", 256, 8, "mxfp8"),
    ("many_tokens", 1024, 4, "fp8"),
    ("many_tokens", 384, 4, "mxfp8"),
    ("few_tokens", 128, 4, "fp8"),
    ("few_tokens", 256, 4, "fp8"),
    ("few_tokens", 512, 4, "fp8"),
    ("many_tokens", 512, 4, "fp8"),
]
DEFAULT, OTHER = SHARINGS[:7], SHARINGS[1:8:6]  # on sm_90a, on sm_100a


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("arch", "variant", "d", "cluster", "recipe"),
    [
        pytest.param(arch, *one, marks=() if one in (DEFAULT if arch == "sm_90a" else OTHER) else FULL)
        for arch in ARCHS
        for one in SHARINGS
    ],
)
def test_codes_of_y(arch, variant, d, cluster, recipe):
    check(run(hard(5, d, seed=d), 3, 2, arch, variant=variant, d=d, cluster=cluster, recipe=recipe), recipe)


@pytest.mark.full
@pytest.mark.parametrize("one", cases(SHARINGS[0], full=[(SHARINGS[6],)]), ids=["few_tokens", "many_tokens"])
def test_without_y_and_row_major(one):
    """The same codes and the same y, streams and coefficients as a kernel without them."""
    variant, d, cluster, recipe = one
    given, settings = hard(5, d, seed=d), {"variant": variant, "d": d, "cluster": cluster}
    found = run(given, 3, 2, **settings, recipe=recipe)
    bare = run(given, 3, 2, **settings, recipe=recipe, keep_y=False, swizzled=False)
    assert bare[1] is None and torch.equal(bare[4], found[4])
    check((*found[:4], *bare[4:]), recipe, False)
    without = run_bf16(given, 3, 2, **settings)
    assert all(torch.equal(found[i], without[i]) for i in range(4))
    assert all(torch.equal(bare[i], without[i]) for i in (0, 2, 3))


@pytest.mark.full
@pytest.mark.parametrize("variant", cases("few_tokens", full=["many_tokens"]))
def test_tokens_and_tiles(variant):
    """Tokens past a block of 128 rows, several tiles a group of CTAs, groups of warps, one tile; the same bits."""
    d, tokens = {"few_tokens": (384, 131), "many_tokens": (512, 37)}[variant]
    settings, given = {"variant": variant, "d": d, "cluster": 4, "recipe": "fp8"}, hard(tokens, d)
    found = run(given, 16, 3 if tokens > 100 else 2, **settings)
    check(found, "fp8")
    streams, before, parameters = given
    some = streams[:21], tuple(x[:21] for x in before), parameters
    for rows, clusters in ((7, 3), (16, 1), (11, 2)):
        again = run(some, rows, clusters, **settings)
        check(again, "fp8")
        assert all(torch.equal(a[:21], b) for a, b in zip(found[:5], again[:5], strict=True))
    if variant == "few_tokens":
        once = run(some, 24, 1, **settings, once=True)
        assert all(torch.equal(a, b) for a, b in zip(once[:5], again[:5], strict=True))


@pytest.mark.parametrize(
    ("arch", "variant", "d", "cluster", "recipe"),
    [
        pytest.param(arch, *one, marks=() if (arch, *one) == ("sm_90a", *SHARINGS[0]) else FULL)
        for arch in ARCHS
        for one in (SHARINGS[0], SHARINGS[4], SHARINGS[10], SHARINGS[6])
    ],
)
@pytest.mark.parametrize("schedule", cases("adversarial", full=[s for s in SCHEDULES if s != "adversarial"]))
def test_all_schedules_give_the_same_bits(arch, variant, d, cluster, recipe, schedule):
    given, settings = hard(7, d), {"variant": variant, "d": d, "cluster": cluster, "recipe": recipe}
    want = run(given, 2, 2, arch, **settings)
    check(want, recipe)
    found = run(given, 2, 2, arch, {"schedule": schedule, "seed": 3}, **settings)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("one", [SHARINGS[0], SHARINGS[10]], ids=["few_tokens", "many_tokens"])
def test_nan_stays_in_its_token(one):
    variant, d, cluster, recipe = one
    streams, before, parameters = hard(5, d)
    settings = {"variant": variant, "d": d, "cluster": cluster, "recipe": recipe}
    want = run((streams.clone(), before, parameters), 5, 1, **settings)
    streams[2, 1, 100], streams[3, 0, 7] = float("nan"), float("inf")
    found = run((streams, before, parameters), 5, 1, **settings)
    scales, wanted = (scale_swizzle.unswizzle(x[5], 5, d // 32) for x in (found, want))
    assert bool((scales[2:4] == 255).all()) and bool((found[4][2:4] == 0x7F).all())
    rest = [0, 1, 4]
    assert torch.equal(scales[rest], wanted[rest]) and torch.equal(found[4][rest], want[4][rest])


def test_every_fault_is_found():
    """What a wrong kernel would give differs from what this one gives."""
    found = run(hard(5, 256), 5, 1, d=256, cluster=8, recipe="fp8", swizzled=False)
    y, codes, scales = found[1], *found[4:]
    wide = y.float().unflatten(-1, (-1, 32))
    alone = quantize(wide[..., :1, :].flatten(-2).repeat_interleave(4, -1), "fp8")[1][0]
    wrong = {
        "maxima of this CTA alone": alone,
        "scales of the next token": scales.roll(1, 0),
        "scales of the block beside": scales.roll(1, 1),
    }
    for name, value in wrong.items():
        assert not torch.equal(scales, value), name
    assert not torch.equal(codes, quantize(y, "mxfp8")[0][0])


ONCE = {"once": True}
BUDGETS = [(4096, "few_tokens", "fp8", {}), (4096, "few_tokens", "fp8", {"groups": 3, **ONCE})]
BUDGETS += [(7168, "few_tokens", "fp8", {}), (4096, "many_tokens", "fp8", {}), (7168, "many_tokens", "mxfp8", {})]
MORE = [(4096, "few_tokens", "fp8", {"groups": 2, **ONCE}), (7168, "few_tokens", "fp8", ONCE)]
MORE += [(4096, "few_tokens", "mxfp8", {"groups": 3, **ONCE}), (4096, "few_tokens", "fp8", {"keep_y": False, **ONCE})]
MORE += [(4096, "many_tokens", "fp8", {"keep_y": False}), (4096, "many_tokens", "mxfp8", {})]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("arch", "d", "variant", "recipe", "settings"),
    [
        pytest.param(arch, *one, marks=() if arch == "sm_90a" and one in BUDGETS else FULL)
        for arch in ARCHS
        for one in (*BUDGETS, *MORE)
    ],
)
def test_budget(arch, d, variant, recipe, settings):
    """No spills, shared memory as planned, registers for all warps; shorter code for one tile than for a loop."""
    given = {"cluster": cluster_of(d, Variant(variant)), "d": d, "variant": variant, "recipe": recipe}
    kernel, code = compiled(arch, **given, **settings)
    if settings.get("once"):
        loop = compiled(arch, **given, keep_y=settings.get("keep_y", True))[1]
        assert read_cubin(code.cubin).code_bytes <= read_cubin(loop.cubin).code_bytes - 1024
    assert kernel.smem_bytes == -(-code.smem_bytes // 1024) * 1024
    assert code.registers * 32 * (4 * -(-code.threads // 128)) <= 65536


def test_bad_arguments_are_named():
    for bad, name in (
        ({"recipe": "nvfp4"}, "recipe"),
        ({"recipe": "fp8", "head": True}, "recipe"),
        ({"keep_y": False}, "keep_y"),
    ):
        with pytest.raises(ConfigError, match=name):
            MhcFewTokens(**{"d": 128, "cluster": 4, **bad})
    with pytest.raises(ConfigError, match="recipe"):
        MhcManyTokens(d=7168, cluster=32, recipe="fp8")
    kernel, (streams, before, parameters) = MhcFewTokens(128, 4, recipe="fp8"), case(3, 128)
    codes, scales = torch.zeros(3, 128).byte(), torch.zeros(512).byte()
    call = call_of(kernel, streams, before, parameters, outputs(3, 128, True, False))
    for fp8, name in (
        ((None, None), "fp8.codes"),
        ((codes, None), "fp8.scales"),
        ((codes[:, :64], scales), "fp8.codes"),
        ((codes, scales[:256]), "fp8.scales"),
        ((codes.float(), scales), "fp8.codes"),
    ):
        with pytest.raises(ArgumentError, match=name):
            launch_args(kernel, call._replace(fp8=Fp8(*fp8, "fp8")), 2, 2)
    with pytest.raises(ArgumentError, match="fp8.codes"):
        launch_args(MhcFewTokens(128, 4), call._replace(fp8=Fp8(codes, scales, "fp8")), 2, 2)
