"""mHC's kernel in the emulator: against the oracle, all schedules alike, no hazards, injected faults noticed."""

import itertools
from functools import cache

import pytest
import torch

from dsv4lib.dsl.cubin import read_cubin
from dsv4lib.emulator import launch
from dsv4lib.emulator.driver.device import make
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.ops.mhc.arguments import fake_args, launch_args
from dsv4lib.ops.mhc.few_tokens import MhcFewTokens
from dsv4lib.ops.mhc.kernel import Mhc
from dsv4lib.ops.mhc.many_tokens import MhcManyTokens
from dsv4lib.ops.mhc.op import Call, Eps, Outputs, Site
from dsv4lib.ops.mhc.variants import Variant, cluster_of
from dsv4lib.reference import mhc as oracle
from dsv4lib.reference.rmsnorm import rmsnorm
from tests.budget import built, small
from tests.cases import cases

ARCHS = ("sm_100a", "sm_90a")
SCHEDULES = ("oldest_first", "newest_first", "adversarial", "random")
FULL = pytest.mark.full
VARIANTS = {"few_tokens": MhcFewTokens, "many_tokens": MhcManyTokens}
N, EPS, UNIT = 4, 1e-6, 2.0**-8  # UNIT: half of what separates two bf16
FP32 = 2.0**-24


@cache
def compiled(arch="sm_90a", variant="few_tokens", **settings):
    kernel, code = built(VARIANTS[variant], fake_args, arch, **{"d": 128, "cluster": 4, **settings})
    assert code.local_bytes == 0 and small(code), (code.local_bytes, code.instructions)
    return kernel, code


def case(tokens, d, head=False, seed=0):
    """(streams, (f, post, comb), (fn, scale, base, weight)); tokens, streams and outputs of different scales."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    sizes = torch.logspace(-2, 2, tokens)[:, None, None] * torch.tensor([1.0, 3.0, 0.5, 2.0])[:, None]
    values = N if head else N * (2 + N)
    streams = (normal(tokens, N, d) * sizes).bfloat16()
    before = (
        (normal(tokens, d) * sizes[:, 1].flip(0)).bfloat16(),
        2 * torch.sigmoid(normal(tokens, N)),
        oracle.sinkhorn(normal(tokens, N, N), 20, EPS).contiguous(),
    )
    fn = normal(values, N * d) * (N * d) ** -0.5 * (1 + torch.arange(values)[:, None] / values)
    scale = 1 + 0.3 * normal(1 if head else 3)
    return streams, before, (fn, scale, normal(values), 1 + 0.3 * normal(d))


def outputs(tokens, d, post, head, keep=True):
    """(streams, y, post, comb) full of NaN, None where the kernel has none."""
    new = torch.full((tokens, N, d), float("nan")).bfloat16() if post and keep else None
    ends = (None, None) if head else (torch.full((tokens, N), float("nan")), torch.full((tokens, N, N), float("nan")))
    return new, torch.full((tokens, d), float("nan")).bfloat16(), *ends


def call_of(kernel, streams, before, parameters, after, fp8=None, space=None):
    """The call of a site with these tensors."""
    site, out, eps = Site(*parameters), Outputs(*after), Eps(EPS, EPS)
    return Call(streams, *before, site, out, fp8, space, kernel.iters, eps, False, "emulator")


def run(given, rows, clusters, arch="sm_90a", device=None, **settings):
    if settings.get("variant", "few_tokens") == "few_tokens":
        settings = {"groups": -(-rows // 8), **settings}
    rows = min(rows, 24 if "groups" in settings else 16)  # most that a tile holds
    kernel, code = compiled(arch, **settings)
    streams, before, parameters = given
    after = outputs(streams.shape[0], kernel.d, kernel.post, kernel.head, settings.get("keep", True))
    before = before if kernel.post else (None, None, None)
    gpu = make(arch, **{"checks": "race", **(device or {})})
    space = torch.zeros(kernel.space(clusters)) if kernel.space(clusters) else None
    call = call_of(kernel, streams, before, parameters, after, space=space)
    launch(code, *launch_args(kernel, call, rows, clusters), gpu=gpu)
    assert not gpu.hazards, gpu.hazards[0].message
    assert space is None or not bool(space.view(torch.int32).any())
    return after


def check(after, given, post=True, head=False):
    """Streams to their rounding; from the kernel's own streams y to two roundings, post and comb to fp32."""
    streams, (f, post_w, comb), parameters = given
    fn, scale, base, weight = (x.double() for x in parameters)
    new, y, post_new, comb_new = after
    z = streams.double()
    if post:
        exact = oracle.post(f.double(), z, post_w.double(), comb.double())
        size = oracle.post(f.double().abs(), z.abs(), post_w.double().abs(), comb.double().abs())
        if new is None:
            z = exact.bfloat16().double()
        else:
            z = new.double()
            assert bool(((z - exact).abs() <= UNIT * exact.abs() + 8 * FP32 * size).all())
    if head:
        pre = oracle.pre_weights(scale * oracle.mixes(z, fn, EPS) + base, EPS)
    else:
        pre, post_want, comb_want = oracle.coefficients(z, fn, scale, base, iters=20, hc_eps=EPS, rms_eps=EPS)
        # A logit's error: of 4 d products, cut at each of the MMAs that a warp chains, and of hi + lo.
        logit = 2.0**-19
        assert float((post_new - post_want).abs().max()) < logit
        assert float((comb_new - comb_want).abs().max()) < logit
    x = oracle.pre(z, pre)
    want = rmsnorm(x, weight, EPS)
    size = rmsnorm(x, weight, EPS).abs() + weight.abs() * 2.0**-17 * oracle.pre(z.abs(), pre) / x.square().mean(
        -1, keepdim=True
    ).sqrt().clamp_min(EPS)
    assert bool(((y.double() - want).abs() <= 2.02 * UNIT * size).all())


SHAPES = [(1, 1, 1), (3, 2, 2), (33, 16, 2), (37, 5, 2), (41, 2, 1), (41, 21, 1)]  # tokens, rows, clusters
ON_BOTH = SHAPES[1]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("arch", "tokens", "rows", "clusters"),
    [
        pytest.param(arch, *shape, marks=() if arch == "sm_90a" or shape == ON_BOTH else FULL)
        for arch in ARCHS
        for shape in SHAPES
    ],
)
def test_boundary(arch, tokens, rows, clusters, variant):
    given = case(tokens, 128, seed=tokens)
    check(run(given, rows, clusters, arch, variant=variant), given)


def test_parts_keep_all_bits_of_fn():
    """Every other value of fn is all but the last 8 bits of its neighbour, negative: sums of what is left, enlarged."""
    streams, before, (fn, _, base, weight) = case(1, 128)
    whole = 1 + torch.randint(1 << 23, (24, 256), generator=torch.Generator().manual_seed(1)) * 2.0**-23
    first = whole.bfloat16().float()
    fn = torch.stack([whole, -first - (whole - first).bfloat16().float()], -1).flatten(1)
    assert 0 < float((fn[:, 0::2] + fn[:, 1::2]).abs().max()) <= 2.0**-17
    given = torch.ones_like(streams), before, (fn, torch.full((3,), 2.0**13), base, weight)
    check(run(given, 2, 1, variant="many_tokens", post=False), given, post=False)


def test_parts_keep_all_bits_of_comb_and_post():
    """Stream 0 times a value, less the value's first 16 bits times stream 1 (or f), which is the same: what is left."""
    streams, (f, post, comb), parameters = case(5, 128)
    whole = 1 + torch.randint(1 << 23, post.shape, generator=torch.Generator().manual_seed(1)) * 2.0**-23
    first = whole.bfloat16().float()
    first = first + (whole - first).bfloat16().float()
    assert 0 < float((whole - first).abs().max()) <= 2.0**-16
    streams[:, 1], comb[:], post[:] = streams[:, 0], 0, 0
    comb[:, 0], comb[:, 1] = whole, -first
    given = streams, (f, post, comb), parameters
    check(run(given, 5, 1, variant="many_tokens"), given)
    comb[:, 1], post[:] = 0, -first
    given = streams, (streams[:, 0].clone(), post, comb), parameters
    check(run(given, 5, 1, variant="many_tokens"), given)


LARGE = ("few_tokens", 8), ("many_tokens", 8), ("many_tokens", 16)


@pytest.mark.full
@pytest.mark.parametrize(("variant", "cluster"), [("few_tokens", 16), *(pytest.param(*x, marks=FULL) for x in LARGE)])
def test_many_warps_and_large_clusters(variant, cluster):
    """d 1024 over 16 CTAs of two workers each, or over 8 of four."""
    given = case(5, 1024)
    rows, clusters = (3, 2) if cluster == 16 else (5, 1)
    check(run(given, rows, clusters, d=1024, cluster=cluster, variant=variant), given)


@pytest.mark.parametrize("variant", cases("few_tokens", full=["many_tokens"]))
def test_first_site_and_head(variant):
    given = case(19, 128)
    check(run(given, 16, 2, variant=variant, post=False), given, post=False)
    given, settings = case(19, 256, head=True), {"variant": variant, "d": 256, "cluster": 8, "head": True}
    check(run(given, 16, 1, post=False, **settings), given, post=False, head=True)
    check(run(given, 7, 2, keep=False, **settings), given, head=True)
    check(run(given, 3, 1, **settings), given, head=True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_tokens_bits_do_not_depend_on_its_place(variant):
    given = case(21, 128)
    whole = run(given, 16, 2, variant=variant)
    streams, before, parameters = given
    part = run((streams[4:9], tuple(x[4:9] for x in before), parameters), 2, 1, variant=variant)
    assert all(torch.equal(a[4:9], b) for a, b in zip(whole, part, strict=True))


def test_streams_that_cancel():
    """The norm from products of streams: x is a hundredth of the streams, then nothing but rounding."""
    streams, before, (fn, scale, base, weight) = case(6, 128)
    base = base.clone()
    base[:N] = 0.3
    fn = fn.clone()
    fn[:N] = 0  # all pre alike
    streams[:, 1], streams[:, 2], streams[:, 3] = -streams[:, 0], streams[:, 0], (-0.98 * streams[:, 0]).bfloat16()
    given = streams, before, (fn, scale, base, weight)
    check(run(given, 6, 1, post=False, variant="many_tokens"), given, post=False)
    streams[:, 3] = -streams[:, 0]
    y = run(given, 6, 1, post=False, variant="many_tokens")[1]
    noise = 2.0**-22 * streams.float().abs().sum(1) * weight.abs()  # of x, in fp32; its norm is at least sqrt(eps)
    assert bool((y.float().abs() <= noise * EPS**-0.5).all())


@cache
def by_turns(arch, variant):
    return run(case(7, 128), 2, 2, arch, variant=variant)


# Warps of many tokens that wait for other CTAs' flags take a minute of the adversarial schedule.
DEFAULT = {("sm_90a", "adversarial", "few_tokens"), ("sm_90a", "random", "many_tokens")}
DEFAULT |= {("sm_90a", "newest_first", "many_tokens")}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("arch", "schedule", "variant"),
    [pytest.param(*one, marks=() if one in DEFAULT else FULL) for one in itertools.product(ARCHS, SCHEDULES, VARIANTS)],
)
def test_all_schedules_give_the_same_bits(arch, schedule, variant):
    found = run(case(7, 128), 2, 2, arch, {"schedule": schedule, "seed": 3}, variant=variant)
    assert all(torch.equal(a, b) for a, b in zip(found, by_turns(arch, variant), strict=True))


@pytest.mark.parametrize("variant", VARIANTS)
def test_nan_stays_in_its_token(variant):
    streams, before, parameters = case(5, 128)
    streams[2, 1, 100] = float("nan")
    after = run((streams, before, parameters), 5, 1, variant=variant)
    assert all(bool(x[2].isnan().any()) for x in after)
    rest = [0, 1, 3, 4]
    check([x[rest] for x in after], (streams[rest], tuple(x[rest] for x in before), parameters))


FAULTS = {
    "comb not transposed": ("post", lambda y, x, p, c: p.unsqueeze(-1) * y.unsqueeze(-2) + c @ x),
    "post without 2": ("post_weights", torch.sigmoid),
    "pre with an eps of 0.01": ("pre_weights", lambda logits, eps: torch.sigmoid(logits) + 0.01),
    "no norm of the streams": ("mixes", lambda z, fn, eps: z.flatten(-2) @ fn.mT),
    "3 pairs": ("sinkhorn", lambda logits, iters, eps: SINKHORN(logits, 3, eps)),
}
SINKHORN = oracle.sinkhorn


@cache
def three_tokens(variant):
    return run(case(3, 128), 3, 1, variant=variant)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_notices(fault, variant, monkeypatch):
    """The oracle with a fault is not what the kernel computes."""
    given = case(3, 128)
    after = three_tokens(variant)
    monkeypatch.setattr(oracle, *FAULTS[fault])
    with pytest.raises(AssertionError):
        check(after, given)


CASES = [(arch, d, variant, {}) for d in (4096, 7168) for variant in VARIANTS for arch in ARCHS]
CASES += [(arch, 4096, "few_tokens", {"groups": groups, "once": True}) for groups in (1, 2, 3) for arch in ARCHS]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("arch", "d", "variant", "settings"),
    [pytest.param(*one, marks=() if one[0] == "sm_90a" or one == CASES[1] else FULL) for one in CASES],
)
def test_budget(arch, d, variant, settings):
    kernel, code = compiled(arch, cluster=cluster_of(d, Variant(variant)), d=d, variant=variant, **settings)
    assert kernel.smem_bytes == -(-code.smem_bytes // 1024) * 1024
    assert code.registers * 32 * (4 * -(-code.threads // 128)) <= 65536


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("d", (4096, 7168))
def test_code_of_few_tokens_is_short(d, arch):
    """It comes from memory when a kernel starts cold: of 78 KB, one token saw 1.6 us."""
    for groups in (1, 2, 3)[: 3 if d == 4096 else 1]:
        _, code = compiled(arch, cluster=16, d=d, groups=groups, once=True)
        assert read_cubin(code.cubin).code_bytes <= 24 << 10


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=FULL)])
@pytest.mark.parametrize(
    ("groups", "tokens", "rows", "clusters"), [(1, 1, 1, 1), (1, 9, 5, 2), (2, 31, 16, 2), (3, 47, 24, 2)]
)
def test_one_tile(arch, groups, tokens, rows, clusters):
    given = case(tokens, 128, seed=tokens)
    first = run(given, rows, clusters, arch, groups=groups, once=True)
    check(first, given)
    again = run(given, rows, clusters, arch, {"schedule": "adversarial"}, groups=groups, once=True)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_bad_arguments_are_named():
    for bad, name in (
        ({"d": 96}, "d"),
        ({"cluster": 2}, "cluster"),
        ({"iters": 0}, "iters"),
        ({"d": 1 << 14}, "d"),
    ):
        with pytest.raises(ConfigError, match=name):
            Mhc(**{"d": 128, "cluster": 4, **bad})
    with pytest.raises(ConfigError, match="keep"):
        Mhc(keep=False)
    with pytest.raises(ConfigError, match="d"):
        MhcManyTokens(d=7168, cluster=16)
    kernel, kernel_of_groups = MhcFewTokens(128, 4), MhcManyTokens(128, 4)
    streams, before, parameters = case(3, 128)
    after = outputs(3, 128, True, False)
    good = call_of(kernel, streams, before, parameters, after)
    for bad, name in (
        ({"streams": streams.float()}, "streams"),
        ({"streams": streams.transpose(1, 2)}, "streams"),
        ({"f": None}, "f"),
        ({"comb": before[2][:2]}, "comb"),
        ({"site": good.site._replace(fn=parameters[0][:4])}, "fn"),
        ({"out": good.out._replace(streams=None)}, "out"),
    ):
        with pytest.raises(ArgumentError, match=name):
            launch_args(kernel, good._replace(**bad), 2, 2)
    for rows, clusters, name in ((9, 2, "rows"), (2, 3, "clusters")):
        with pytest.raises(ArgumentError, match=name):
            launch_args(kernel, good, rows, clusters)
    for space in (None, torch.zeros(kernel_of_groups.space(2) - 1)):
        with pytest.raises(ArgumentError, match="space"):
            launch_args(kernel_of_groups, good._replace(space=space), 2, 2)
