"""Norm and quantisation in one launch, with an addition and without: the norm's bits, then the format's."""

from functools import cache

import pytest
import torch

from dsv4lib.emulator import launch
from dsv4lib.emulator.driver.device import make
from dsv4lib.emulator.ptx.dependent import ahead_of_wait
from dsv4lib.emulator.ptx.parse import parse
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.formats import scale_swizzle
from dsv4lib.ops.quantize.config import has_fp4_conversion
from dsv4lib.ops.rmsnorm import arguments as norm_arguments
from dsv4lib.ops.rmsnorm import op as norm_op
from dsv4lib.ops.rmsnorm.kernel import RmsNorm
from dsv4lib.ops.rmsnorm_quant.arguments import fake_args, launch_args
from dsv4lib.ops.rmsnorm_quant.kernel import RmsnormQuant
from dsv4lib.ops.rmsnorm_quant.op import AddNorm, AddNormed, Norm, Normed
from dsv4lib.reference.quantize import quantize
from tests.budget import built, small

SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
EPS = 1e-6


@cache
def compiled(settings, arch, add=True):
    *settings, swizzled = settings if settings[-1] == "swizzled" else (*settings, "")
    kernel, code = built(
        RmsnormQuant,
        fake_args,
        arch,
        *settings,
        fp4_conversion=has_fp4_conversion(arch),
        swizzled=bool(swizzled),
        add=add,
    )
    assert code.local_bytes == 0 and small(code), (code.local_bytes, code.instructions)
    return kernel, code


@cache
def norm_kernel(d, add, weighted, arch):
    return built(RmsNorm, norm_arguments.fake_args, arch, d, add, weighted)


def normed(x, residual, weight, arch):
    """(h or None, y) by the kernel of `rmsnorm`."""
    kernel, code = norm_kernel(x.shape[1], residual is not None, weight is not None, arch)
    h, y = None if residual is None else torch.empty_like(x), torch.empty_like(x)
    call = norm_op.Norm(x, weight, y, EPS, "emulator")
    if residual is not None:
        call = norm_op.AddNorm(x, residual, weight, (h, y), EPS, "emulator")
    launch(code, *norm_arguments.launch_args(kernel, call), gpu=make(arch))
    return h, y


def case(tokens, d, seed=0):
    """(x, residual, weight, global scale); rows of different scales, columns too, the last row of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x, residual = torch.randn(2, tokens, d, generator=generator) * torch.logspace(-3, 3, tokens)[:, None]
    columns = torch.logspace(-4, 1, d)[torch.randperm(d, generator=generator)]
    x[-1] = residual[-1] = 0
    weight = 1 + 0.3 * torch.randn(d, generator=generator)
    return (x * columns).bfloat16(), (residual * columns).bfloat16(), weight, torch.tensor([0.0041])


def call_of(x, residual, weight, g, total, out):
    """`launch_args` takes recipe and layout from the kernel: what they are here is not looked at."""
    if residual is None:
        return Norm(x, weight, g, out, "fp8", EPS, False, "emulator")
    return AddNorm(x, residual, weight, g, AddNormed(total, *out), "fp8", EPS, False, "emulator")


def run(settings, arch, x, residual, weight, g, total=None, **device):
    """(h, codes, scales, y or None); without a residual h is None."""
    kernel, code = compiled(settings, arch, residual is not None)
    if kernel.add and total is None:
        total = torch.full_like(x, float("nan"))
    y = torch.full_like(x, float("nan")) if kernel.keep else None
    codes = torch.full((len(x), x.shape[1] * kernel.format.bits // 8), 0x5A, dtype=torch.uint8)
    shape = len(x), x.shape[1] // kernel.format.block
    if kernel.swizzled:
        shape = (scale_swizzle.swizzled_bytes(shape[0], shape[1] * kernel.format.repeats),)
    scales = torch.full(shape, 0x5A, dtype=torch.uint8)
    g = g if kernel.recipe == "nvfp4" else None
    gpu = make(arch, **{"checks": "race", **device})
    call = call_of(x, residual, weight, g, total, Normed(codes, scales, y))
    launch(code, *launch_args(kernel, call), gpu=gpu)
    assert not gpu.hazards, gpu.hazards[0].message
    return total, codes, scales, y


def check(found, x, residual, weight, g, recipe, arch):
    h, y = normed(x, residual, weight, arch)
    codes, scales, _ = quantize(y, recipe, global_scale=g if recipe == "nvfp4" else None)
    assert h is None or torch.equal(found[0], h)
    assert torch.equal(found[1], codes[0]) and torch.equal(found[2], scales[0])
    assert found[3] is None or torch.equal(found[3], y)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("arch", "recipe", "d", "tokens", "weighted", "keep"),
    [
        ("sm_90a", "fp8", 7168, 2, True, False),
        ("sm_100a", "fp8", 4096, 3, True, True),
        ("sm_90a", "mxfp8", 1056, 3, False, False),
        ("sm_100a", "mxfp4", 4128, 2, True, False),
        ("sm_90a", "nvfp4", 1040, 3, True, False),
        ("sm_100a", "nvfp4", 4096, 3, True, True),
    ],
)
def test_the_norm_and_then_the_format(arch, recipe, d, tokens, weighted, keep):
    x, residual, weight, g = case(tokens, d, seed=d)
    given = x, residual, weight if weighted else None, g
    check(run((recipe, d, weighted, keep), arch, *given), *given, recipe, arch)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(
    ("recipe", "d", "tokens", "keep"),
    [("fp8", 1536, 3, False), ("fp8", 1024, 2, True), ("mxfp8", 1056, 3, False), ("nvfp4", 1040, 2, True)],
)
def test_without_an_addition(arch, recipe, d, tokens, keep):
    """What a query's norm hands on: columns of a wider matrix, image and row-major scales, every schedule."""
    x, _, weight, g = case(tokens, d, seed=d)
    wide = torch.full((tokens, d + 512), 7.0).bfloat16()
    wide[:, :d] = x
    found = run((recipe, d, True, keep), arch, wide[:, :d], None, weight, g)
    check(found, x, None, weight, g, recipe, arch)
    repeats = 4 if recipe == "fp8" else 1
    for schedule in SCHEDULES:
        image = run((recipe, d, True, keep, "swizzled"), arch, x, None, weight, g, schedule=schedule, seed=3)
        assert torch.equal(image[1], found[1])
        assert torch.equal(image[2], scale_swizzle.swizzle(found[2].repeat_interleave(repeats, -1)))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(
    ("recipe", "d", "tokens"),
    [
        ("fp8", 1152, 3),
        ("fp8", 128, 130),
        ("mxfp8", 1056, 1),
        ("mxfp4", 4128, 2),
        ("nvfp4", 1040, 5),
        ("nvfp4", 64, 128),
    ],
)
def test_scales_in_128x4_blocks(arch, recipe, d, tokens):
    """The image of the format, byte by byte: zeros past the last row and the last block. The rest as is."""
    given = case(tokens, d, seed=d)
    plain, found = (run((recipe, d, *extra), arch, *given) for extra in ((), ("swizzled",)))
    assert torch.equal(found[0], plain[0]) and torch.equal(found[1], plain[1])
    want = plain[2].repeat_interleave(4 if recipe == "fp8" else 1, -1)  # 1x32 of 1x128
    assert bool(want.any()) and torch.equal(found[2], scale_swizzle.swizzle(want))


def test_swizzled_in_place_under_every_schedule():
    """The residual is overwritten while CTAs of the padding run beside."""
    x, residual, weight, g = case(3, 1152)
    want = run(("mxfp8", 1152, "swizzled"), "sm_100a", x, residual, weight, g)
    for schedule in SCHEDULES:
        total = residual.clone()
        found = run(("mxfp8", 1152, "swizzled"), "sm_100a", x, total, weight, g, total=total, schedule=schedule)
        assert all(torch.equal(a, b) for a, b in zip(found[:3], want[:3], strict=True))


def test_in_place_and_rows_of_a_larger_matrix():
    x, residual, weight, g = case(3, 256)
    wide = torch.full((3, 512), 7.0).bfloat16()
    wide[:, :256] = residual
    total = wide[:, :256]
    found = run(("fp8", 256), "sm_90a", x, total, weight, g, total=total)
    check(found, x, residual, weight, g, "fp8", "sm_90a")
    assert bool((wide[:, 256:] == 7).all())


def test_nan_and_inf_stay_in_their_row():
    x, residual, weight, g = case(4, 256)
    x[0, 3], residual[2, 200] = float("nan"), float("inf")
    h, codes, scales, _ = run(("fp8", 256), "sm_100a", x, residual, weight, g)
    clean = torch.tensor([1, 3])
    assert bool((scales[0] == 255).all()) and bool((codes[0] == 127).all())
    assert int(scales[2, 1]) == 255  # Inf x 0 is no number; the other block is zeros
    want = run(("fp8", 256), "sm_100a", x[clean], residual[clean], weight, g)
    assert all(torch.equal(a[clean], b) for a, b in zip((h, codes, scales), want, strict=False))


def test_every_fault_is_found():
    """What a wrong kernel would give differs from what this one gives."""
    x, residual, weight, g = case(3, 1024)
    found = run(("mxfp8", 1024), "sm_90a", x, residual, weight, g)
    h, y = normed(x, residual, weight, "sm_90a")
    wide = h.float()
    exact = weight * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    wrong = {
        "y not rounded": exact,
        "no norm": h,
        "no weight": normed(x, residual, None, "sm_90a")[1],
        "no residual": normed(x, residual * 0, weight, "sm_90a")[1],
    }
    for name, value in wrong.items():
        assert not torch.equal(found[1], quantize(value, "mxfp8")[0][0]), name
    assert not torch.equal(found[2], quantize(y, "mxfp8")[1][0].roll(1, -1)), "scale from the wrong block"


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("arch", "recipe"), [("sm_90a", "fp8"), ("sm_100a", "nvfp4")])
def test_all_schedules_give_the_same_bits(arch, recipe):
    given = case(3, 1152)
    found = [run((recipe, 1152), arch, *given, schedule=s, seed=3) for s in SCHEDULES]
    assert all(torch.equal(a, b) for one in found[1:] for a, b in zip(one[:3], found[0][:3], strict=True))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("recipe", ["fp8", "mxfp8", "nvfp4"])
def test_only_weights_are_read_before_the_kernel_before_is_done(recipe):
    """That kernel may have written everything else, the global scale too."""

    def early(weighted):
        _, code = compiled((recipe, 4096, weighted, False), "sm_100a")
        (kernel,) = parse(code.ptx).kernels.values()
        return [instr.text for instr in ahead_of_wait(kernel)]

    assert not early(False)
    assert early(True) and all(text.startswith("ld.global.v") for text in early(True))


def test_padding_waits_for_the_kernel_before_too():
    """CTAs of padding alone write scales that it may still read: ahead of the wait there are the weight's loads."""
    _, code = compiled(("mxfp8", 1152, "swizzled"), "sm_100a")
    (kernel,) = parse(code.ptx).kernels.values()
    early = [instr.text for instr in ahead_of_wait(kernel)]
    assert early and all(text.startswith("ld.global.v") for text in early)


def test_bad_arguments_are_named():
    for bad, name in ((("fp6", 128), "recipe"), (("fp8", 192), "d="), (("nvfp4", 8208), "d=")):
        with pytest.raises(ConfigError, match=name):
            RmsnormQuant(*bad)
    x, residual, weight, g = case(3, 256)
    codes, scales = torch.zeros(3, 256).byte(), torch.zeros(3, 2).byte()
    good = call_of(x, residual, weight, None, x.clone(), Normed(codes, scales))
    for bad, name in (
        ({"x": x.half()}, "x"),
        ({"residual": residual[1:]}, "residual"),
        ({"weight": None}, "weight"),
        ({"global_scale": g}, "global_scale"),
        ({"out": good.out._replace(y=x.clone())}, "y"),
        ({"out": good.out._replace(codes=codes[:, :128])}, r"codes\.shape"),
        ({"out": good.out._replace(scales=scales[:, :1])}, r"scales\.shape"),
    ):
        with pytest.raises(ArgumentError, match=name):
            launch_args(RmsnormQuant("fp8", 256, add=True), good._replace(**bad))
    with pytest.raises(ArgumentError, match="residual"):
        launch_args(RmsnormQuant("fp8", 256), good)
