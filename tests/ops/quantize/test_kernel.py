"""Rows to block formats: every bf16 number, ragged sizes, gathered rows, gate and up apart, both layouts of scales."""

from functools import cache

import pytest
import torch

from dsv4lib.emulator.driver.device import make
from dsv4lib.emulator.driver.host import launch
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.ops.quantize.amax import MOST_CTAS, Amax
from dsv4lib.ops.quantize.arguments import amax_args, fake_args, launch_args
from dsv4lib.ops.quantize.config import RECIPES, ROW_RECIPES, has_fp4_conversion
from dsv4lib.ops.quantize.kernel import Quantize
from dsv4lib.ops.quantize.op import Call, Quantized
from dsv4lib.reference import quantize as reference
from dsv4lib.viz import ptx
from tests.budget import built, small

ARCHS = ("sm_90a", "sm_100a")
SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
STALE = 0xA5  # what outputs hold before


@cache
def compiled(arch, kernel_type, *settings):
    kernel, code = built(kernel_type, fake_args, arch, *settings)
    assert code.local_bytes == 0 and small(code), (code.local_bytes, code.instructions)
    return kernel, code


def call_of(x, out=(None, None), rows=None, given=None, derived=None, workspace=None):
    """`launch_args` takes recipe and layout from the kernel: what they are here is not looked at."""
    return Call(x, rows, given, Quantized(*out, derived), workspace, "nvfp4", False, False, "emulator")


def partials_of(x, arch, **device):
    """Maxima of the CTAs of `Amax`."""
    kernel, code = compiled(arch, Amax, DTYPES[x.dtype])
    partials = torch.full((Amax.ctas(x.numel() // 8),), -1, dtype=torch.int32)
    gpu = make(arch, **device)
    launch(code, *amax_args(kernel, call_of(x, workspace=partials)), gpu=gpu)
    assert not gpu.hazards
    return partials


def quantised(x, recipe, arch, global_scale=None, rows=None, deinterleave=False, swizzled=False, **device):
    """(codes, scales, global scale) of the kernels, and of the oracle; shapes as in `reference.quantize`."""
    options = {"rows": rows, "deinterleave": deinterleave, "swizzled": swizzled}
    want = reference.quantize(x, recipe, global_scale=global_scale, **options)
    scale = partials = g = None
    if recipe == "nvfp4":
        scale = "derived" if global_scale is None else "given"
        g = torch.full((1,), -1.0) if global_scale is None else global_scale.reshape(1)
        partials = partials_of(x, arch, **device) if global_scale is None else None
    conversion = RECIPES[recipe].bits == 4 and has_fp4_conversion(arch)
    settings = recipe, DTYPES[x.dtype], scale, rows is not None, deinterleave, swizzled, conversion
    kernel, code = compiled(arch, Quantize, *settings)
    codes, scales = (torch.full_like(t, STALE) for t in want[:2])
    out = (codes, scales) if deinterleave else (codes[0], scales[0])
    factor = {"derived": g} if scale == "derived" else {"given": g}
    gpu = make(arch, **device)
    launch(code, *launch_args(kernel, call_of(x, out, rows, workspace=partials, **factor)), gpu=gpu)
    assert not gpu.hazards
    return (codes, scales, g), want


def check(*args, **options):
    found, want = quantised(*args, **options)
    for name, a, b in zip(("codes", "scales"), found, want, strict=False):
        assert torch.equal(a, b), (name, int((a != b).sum()), (a != b).nonzero()[0].tolist())
    if want[2] is not None:
        assert torch.equal(found[2].isnan(), want[2].reshape(1).isnan())
        assert torch.equal(found[2].nan_to_num(0), want[2].reshape(1).nan_to_num(0))
    return found


def rows_of(tokens, columns, dtype=torch.bfloat16, seed=0):
    """Normals, rows of very different scale."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-4, 4, tokens)[torch.randperm(tokens, generator=generator)]
    return (torch.randn(tokens, columns, generator=generator) * scale[:, None]).to(dtype)


def anchored(values, fill, block):
    """Blocks that begin with each of ``values``, as rows of 64 blocks; ``fill`` [n, block - 1] is the rest."""
    blocks = torch.cat((values[:, None], fill), 1)
    return torch.nn.functional.pad(blocks, (0, 0, 0, -len(blocks) % 64)).view(-1, 64 * block)


@pytest.fixture(params=ARCHS)
def arch(request):
    return request.param


# ------------------------------------------------------------------- numbers

UE8M0 = [("mxfp4", "sm_90a"), ("mxfp4", "sm_100a"), ("mxfp8", "sm_100a"), ("fp8", "sm_90a")]  # E4M3 differs in nothing


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("recipe", "arch"), UE8M0)
def test_every_number_as_the_largest_of_its_block(recipe, arch):
    """All 2^15 magnitudes of bf16: zeros, subnormals, Inf, every NaN; its block holds parts of it and a -0."""
    block = RECIPES[recipe].block
    values = torch.arange(1 << 15).to(torch.int16).view(torch.bfloat16)
    parts = torch.linspace(-1, 1, block - 2)[torch.randperm(block - 2, generator=torch.Generator().manual_seed(1))]
    fill = torch.cat((values.float()[:, None] * parts, torch.full((len(values), 1), -0.0)), 1).bfloat16()
    codes, scales, _ = check(anchored(values, fill, block), recipe, arch)
    assert scales.unique().numel() > 100 and (scales == 255).sum() == 128  # Inf and the NaNs


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("recipe", "arch"), UE8M0)
def test_every_element_under_a_scale(recipe, arch):
    """All 2^16 numbers that are not above the anchor, for anchors at both ends, at a floor, beside a power of two."""
    block = RECIPES[recipe].block
    every = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()]
    for anchor in (2.0**-133, 6 * 2.0**-126, 1e-4, 1.5 + 2.0**-7, 448.0, 3.3e38):
        value = torch.tensor(anchor).bfloat16()
        near = every[(every.abs() <= value) & (every.abs() >= value * 2.0**-21)]
        near = torch.cat((near, near.new_zeros(-len(near) % (block - 1))))
        fill = near.view(-1, block - 1)
        check(anchored(value.expand(len(fill)), fill, block), recipe, arch)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("exponent", [-149, -126, 0, 127])
def test_nvfp4_every_number_as_the_largest_of_its_block(exponent, arch):
    """All 2^15 magnitudes under global scales at both ends of fp32; ties at a power of two, none at 1.37 times it."""
    values = torch.arange(1 << 15).to(torch.int16).view(torch.bfloat16)
    fill = (
        values.float()[:, None] * torch.tensor([0.5, -0.25, 0.75, 1 / 3, -1.0, 1 / 24, 0.0] * 2 + [-0.0])
    ).bfloat16()
    for factor in (1.0, 1.37)[: 1 + (exponent > -149)]:
        check(anchored(values, fill, 16), "nvfp4", arch, global_scale=torch.tensor(factor * 2.0**exponent))


def test_nvfp4_derived_scale(arch):
    """From x as a whole; a NaN anywhere spoils everything; nothing but zeros."""
    x = rows_of(37, 96)
    given = check(x, "nvfp4", arch)[2]
    assert given == x.float().abs().max() / 2688
    check(torch.zeros_like(x), "nvfp4", arch)
    x[30, 5] = float("nan")
    codes, scales, _ = check(x, "nvfp4", arch)
    assert not codes.any() and (scales == 0x7F).all()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("recipe", "arch"), [("nvfp4", "sm_90a"), ("nvfp4", "sm_100a"), ("mxfp8", "sm_90a")])
def test_fp32(recipe, arch):
    """24 bits of significand: what bf16 would round away decides codes."""
    x, g = rows_of(29, 384, torch.float32, 5), torch.tensor(0.02)
    codes, _, _ = check(x, recipe, arch, global_scale=g)
    narrow = check(x.bfloat16(), recipe, arch, global_scale=g)
    assert (codes != narrow[0]).sum() > 20


# -------------------------------------------------------------------- layouts


@pytest.mark.one_in(2)
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize(("recipe", "arch"), [("nvfp4", "sm_100a"), ("fp8", "sm_90a")])
def test_sizes(recipe, arch, swizzled):
    """Padding in rows, columns, both, none; rows further apart than they must be."""
    block = RECIPES[recipe].block
    for tokens, blocks in ((1, 1), (1, 57), (3, 6), (129, 5), (70, 28), (128, 8)):
        wide = rows_of(tokens, blocks * block + 8, seed=blocks)[:, : blocks * block]
        check(wide, recipe, arch, global_scale=torch.tensor(0.37), swizzled=swizzled)


LAYOUTS = [  # recipe, architecture, deinterleave, swizzled; rows are gathered
    ("nvfp4", "sm_100a", False, True),
    ("nvfp4", "sm_90a", True, True),
    ("mxfp4", "sm_100a", True, False),
    ("mxfp8", "sm_90a", False, False),
    ("mxfp8", "sm_100a", True, True),
    ("fp8", "sm_90a", True, False),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("recipe", "arch", "deinterleave", "swizzled"), LAYOUTS)
def test_rows_gathered_and_padded(recipe, arch, deinterleave, swizzled):
    """Any order, rows twice, padding in the middle and at the end; a row that is padding looks at nothing."""
    x = rows_of(45, 2 * 3 * RECIPES[recipe].block)
    rows = torch.randint(0, 45, (200,), generator=torch.Generator().manual_seed(2)).int()
    rows[[0, 7, 99]], rows[130:] = -1, -1
    options = {"rows": rows, "swizzled": swizzled, "deinterleave": deinterleave}
    codes, scales, _ = check(x, recipe, arch, global_scale=torch.tensor(0.37), **options)
    assert not codes[:, rows < 0].any() and codes[:, rows >= 0].any(2).all()
    if not swizzled:
        assert not scales[:, rows < 0].any()


def test_tokens_by_expert():
    """The contiguous layout: experts start at multiples of 128 rows, so that no block of scales belongs to two."""
    x, experts = rows_of(40, 96), torch.randint(0, 5, (40, 2), generator=torch.Generator().manual_seed(3))
    parts = []
    for expert in range(5):
        tokens = (experts == expert).any(1).nonzero()[:, 0]
        parts.append(torch.nn.functional.pad(tokens, (0, -len(tokens) % 128), value=-1).int())
    options = {"arch": "sm_100a", "global_scale": x.float().abs().max() / 2688, "swizzled": True}
    scales, start = check(x, "nvfp4", rows=torch.cat(parts), **options)[1], 0
    for part in parts:
        alone = check(x, "nvfp4", rows=part, **options)[1]
        assert torch.equal(scales[0, start : start + alone.shape[1]], alone[0])
        start += alone.shape[1]


def test_gate_and_up():
    """Row-major; and 8 columns of ones are gate, the next 8, of minus ones, up."""
    check(rows_of(19, 2 * 96), "mxfp4", "sm_90a", deinterleave=True)
    marked = torch.cat((torch.ones(1, 8), -torch.ones(1, 8)), 1).repeat(1, 4).bfloat16()
    codes = check(marked, "mxfp4", "sm_90a", deinterleave=True)[0]
    assert not (codes[0] & 0x88).any() and ((codes[1] & 0x88) == 0x88).all()


def test_out_of_range_rows_are_padding():
    """The kernel looks at no row that is not there, whatever the list says."""
    x, rows = rows_of(5, 64), torch.tensor([4, 5, 2**31 - 1, -7, -(2**31), 0], dtype=torch.int32)
    kernel, code = compiled("sm_90a", Quantize, "mxfp8", "bf16", None, True, False, False, False)
    codes, scales = torch.full((1, 6, 64), STALE, dtype=torch.uint8), torch.full((1, 6, 2), STALE, dtype=torch.uint8)
    launch(code, *launch_args(kernel, call_of(x, (codes[0], scales[0]), rows)), gpu=make("sm_90a"))
    want = reference.quantize(x, "mxfp8", rows=torch.tensor([4, -1, -1, -1, -1, 0]))
    assert torch.equal(codes, want[0]) and torch.equal(scales, want[1])


# -------------------------------------------------- schedules, code, bad settings


@pytest.mark.one_in(2)
def test_every_schedule_gives_the_same_bits(arch):
    """With the race detector; `Amax` of several CTAs, each of several turns."""
    x = rows_of(40, 1024, seed=9)
    for schedule in SCHEDULES:
        device = {"schedule": schedule, "checks": "race"}
        partials = partials_of(x, arch, **device)
        assert len(partials) == 3 and partials.max().view(torch.float32) == x.float().abs().max()
        check(x[:7], "nvfp4", arch, **device)


def test_amax_takes_several_turns(arch):
    """More pieces than all CTAs take at once; the largest in the last row, a NaN above it."""
    assert Amax.ctas(1 << 30) == MOST_CTAS
    kernel, code = compiled(arch, Amax, "bf16")
    x, partials = rows_of(300, 272), torch.full((2,), -1, dtype=torch.int32)
    for last in (1e30, float("nan")):
        x[299, 271] = last
        launch(code, *amax_args(kernel, call_of(x, workspace=partials)), gpu=make(arch, checks="race"))
        assert partials.max() == x[299, 271].float().view(torch.int32)
    assert partials.min() > 0


@pytest.mark.parametrize("recipe", ROW_RECIPES)
def test_instructions_follow_from_the_recipe(recipe, arch):
    """A load of 16 bytes and one store of codes a piece; two of each conversion where both sides count."""
    fp4, scale = RECIPES[recipe].bits == 4, "given" if recipe == "nvfp4" else None
    convert = fp4 and has_fp4_conversion(arch)
    kernel, code = compiled(arch, Quantize, recipe, "bf16", scale, False, False, False, convert)
    pieces = kernel.at_once
    counts = {
        "ld.global.v4": pieces,
        "st.global.v2": 0 if fp4 else pieces,
        "st.global.b32": pieces if fp4 else 0,
        "st.global.b8": pieces,
        "cvt.rn.satfinite.e2m1x2.f32": convert * 4 * pieces * (1 + (recipe == "nvfp4")),
        "cvt.rn.satfinite.e4m3x2.f32": pieces * (1 if recipe == "nvfp4" else 0 if fp4 else 4),
        "shfl.sync.bfly": pieces * (RECIPES[recipe].block // 8).bit_length() - pieces,
        "bar.sync": 0,
        "div.": 0,
    }
    assert {name: ptx.count(code.ptx, name) for name in counts} == counts
    assert code.registers <= 128 and code.smem_bytes == 0


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("recipe", {"recipe": "int8"}),
        ("recipe", {"recipe": "kv"}),
        ("dtype", {"recipe": "fp8", "dtype": "fp16"}),
        ("scale", {"recipe": "nvfp4"}),
        ("scale", {"recipe": "mxfp4", "scale": "given"}),
        ("bytes_at_once", {"recipe": "fp8", "bytes_at_once": 48}),
        ("bytes_at_once", {"recipe": "fp8", "dtype": "fp32", "bytes_at_once": 16}),
        ("bytes_at_once", {"recipe": "fp8", "deinterleave": True, "bytes_at_once": 16}),
    ],
)
def test_settings_that_are_none(name, settings):
    with pytest.raises(ConfigError) as caught:
        Quantize(**settings)
    assert caught.value.name == name
    with pytest.raises(ConfigError, match="dtype"):
        Amax("fp16")


def test_tensors_that_vectors_cannot_serve():
    kernel = Quantize("mxfp8")
    x = rows_of(4, 72)
    out = torch.empty(4, 64, dtype=torch.uint8), torch.empty(4, 2, dtype=torch.uint8)
    for bad in (x[:, 1:65], x.t().contiguous().t()[:, :64], rows_of(4, 68)[:, :64]):
        with pytest.raises(ArgumentError, match=r"x\.stride"):
            launch_args(kernel, call_of(bad, out))
    huge = torch.empty(1, 64, dtype=torch.bfloat16).expand(1 << 28, 64)
    codes = torch.empty(1, 64, dtype=torch.uint8).expand(1 << 28, 64)
    with pytest.raises(ArgumentError, match=r"x\.shape"):
        launch_args(kernel, call_of(huge, (codes, out[1])))
