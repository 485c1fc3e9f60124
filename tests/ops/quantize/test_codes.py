"""The arithmetic of the quantising kernels alone, in numbers chosen to be hard: ties, an ulp beside them, both ends."""

from functools import lru_cache

import cutlass.cute as cute
import pytest
import torch
from cutlass import Float32, Int32

from dsv4lib.dsl.compile import compile_for
from dsv4lib.emulator.driver.device import make
from dsv4lib.emulator.driver.host import launch
from dsv4lib.formats import e2m1, e4m3, nvfp4
from dsv4lib.ops.quantize import codes
from dsv4lib.ops.quantize.config import has_fp4_conversion

ARCHS = ("sm_90a", "sm_100a")
THREADS = 256
TIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
SCALES = e4m3.decode(torch.arange(0x7F, dtype=torch.uint8), torch.float64)  # 0 .. 448


class Probe:
    """A thread a case: the scale of an amax, the codes of 8 values under it and a global scale, a global scale."""

    def __init__(self, convert: bool):
        self.convert = convert

    def __repr__(self) -> str:
        return f"Probe({self.convert})"

    @cute.jit
    def __call__(self, mAmax: cute.Tensor, mGlobal: cute.Tensor, mX: cute.Tensor, mOut: cute.Tensor):
        self.kernel(mAmax, mGlobal, mX, mOut).launch(
            grid=(cute.ceil_div(mAmax.shape[0], THREADS), 1, 1), block=(THREADS, 1, 1)
        )

    @cute.kernel
    def kernel(self, mAmax: cute.Tensor, mGlobal: cute.Tensor, mX: cute.Tensor, mOut: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        case = cute.arch.block_idx()[0] * THREADS + thread
        if case < mAmax.shape[0]:
            g = mGlobal[case]
            code, scale = codes.e4m3_scale(mAmax[case], codes.scale_factors(g))
            x = [mX[case, i] for i in range(codes.PIECE)]
            mOut[case, 0] = code
            mOut[case, 1] = codes.e2m1_of_quotient(x, code, scale, g, self.convert)
            mOut[case, 2] = codes.global_scale(mAmax[case]).bitcast(Int32)


@lru_cache
def compiled(arch):
    n, wide = cute.sym_int32(symbol="N"), cute.sym_int64()
    fake = cute.runtime.make_fake_tensor
    args = (
        fake(Int32, (n,), (1,)),
        fake(Float32, (n,), (1,)),
        fake(Float32, (n, 8), (wide, 1)),
        fake(Int32, (n, 3), (3, 1)),
    )
    return compile_for(Probe(has_fp4_conversion(arch)), args, arch)


def probe(arch, amax, g, x):
    """(scale codes uint8 [N], E2M1 codes uint8 [N, 8], global scales fp32 [N]) of amax, g [N] and x [N, 8]."""
    out = torch.zeros(len(amax), 3, dtype=torch.int32)
    given = [t.to(torch.float32).contiguous() for t in (amax.abs(), g, x)]
    wrapped = [cute.runtime.from_dlpack(t) for t in (given[0].view(torch.int32), *given[1:], out)]
    dynamic = [t.mark_layout_dynamic(leading_dim=len(t.shape) - 1) for t in wrapped[:3]]
    launch(compiled(arch), *dynamic, wrapped[3].mark_compact_shape_dynamic(mode=0), gpu=make(arch))
    word = out[:, 1:2] >> (4 * torch.arange(8)) & 15
    return out[:, 0].to(torch.uint8), word.to(torch.uint8), out[:, 2].view(torch.float32)


def expected(amax, g, x):
    """What `formats.nvfp4` says, for a global scale a case."""
    wide = torch.float64
    amax, g, x = amax.abs().to(wide), g.to(wide), x.to(wide)
    scale = e4m3.encode(torch.where(amax.isfinite(), amax / (6 * g), torch.nan))
    step = (e4m3.decode(scale, wide) * g)[:, None]
    fallback = torch.where(step.isnan(), 0.0, torch.copysign(torch.zeros_like(x), x))
    return scale, e2m1.encode(torch.where(step > 0, x / torch.where(step > 0, step, 1.0), fallback))


def fp32(low_exponent, high_exponent, count, seed):
    """Positive fp32 numbers, their exponents uniform."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.rand(count, generator=generator, dtype=torch.float64) * (high_exponent - low_exponent)
    return (2.0 ** (low_exponent + exponent)).to(torch.float32)


def beside(x):
    """x and its fp32 neighbours on both sides, stacked in the last dimension."""
    inf = torch.tensor(float("inf"))
    return torch.stack((torch.nextafter(x, -inf), x, torch.nextafter(x, inf)), -1)


@pytest.fixture(scope="module", params=ARCHS)
def arch(request):
    return request.param


def agree(arch, amax, g, x):
    scale, word, _ = probe(arch, amax, g, x)
    want_scale, want_word = expected(amax, g, x)
    wrong = (scale != want_scale) | (word != want_word).any(1)
    assert not wrong.any(), (
        int(wrong.sum()),
        amax[wrong][0],
        g[wrong][0],
        x[wrong][0],
        scale[wrong][0],
        word[wrong][0],
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("ends", [(-100, 100), (-149, -110), (110, 127.99)], ids=str)
def test_ties_of_elements_and_their_neighbours(arch, ends):
    """Every threshold under every scale: the fp32 number next to t x scale x g and both of its neighbours.

    Where g is a power of two, the middle one is a tie; elsewhere the tie is no fp32 number, and these are its closest.
    """
    count = len(SCALES)
    g = torch.cat((fp32(*ends, 40, 1), 2.0 ** torch.linspace(*ends, 40).floor()))
    g = g.repeat_interleave(count)
    scale = SCALES.repeat(80)
    amax = (6 * scale * g.double()).to(torch.float32)
    for first in (0, 4):
        ties = (TIES[first : first + 4] * (scale * g.double())[:, None]).to(torch.float32)
        around = beside(ties).flatten(1).clamp(max=torch.finfo(torch.float32).max)
        for part in (slice(0, 8), slice(around.shape[1] - 8, None)):
            sign = torch.tensor([1, -1, 1, 1, -1, 1, -1, -1])
            agree(arch, amax, g, around[:, part] * sign)


def test_ties_of_bf16_numbers(arch):
    """bf16 x and a g such that t x scale x g is x, or an ulp of g beside it: what a reciprocal would get wrong."""
    mantissas = torch.arange(128, 256, 3, dtype=torch.float64) / 128
    x = mantissas[:, None, None].expand(-1, 7, 126)
    g = (x / (TIES[None, :, None] * SCALES[1:])).to(torch.float32)
    g = beside(g).flatten()
    x = x[..., None].expand(-1, -1, -1, 3).reshape(-1)
    amax = (6 * SCALES[1:].repeat_interleave(3).repeat(len(mantissas) * 7) * g.double()).bfloat16().float()
    agree(arch, amax, g, torch.stack([x * f for f in (1, -1, 2, 0.5, 3, 0.25, 1.5, 0)], 1))


def test_ties_of_scales_and_their_neighbours(arch):
    """amax half way between 6 g x two neighbouring E4M3 numbers, to the next fp32 number, and its neighbours."""
    between = 3 * (SCALES[1:] + SCALES[:-1])
    for ends in ((-100, 100), (-149, -100), (100, 127.99)):
        g = torch.cat((fp32(*ends, 60, 2), 2.0 ** torch.linspace(*ends, 60).floor())).repeat_interleave(len(between))
        amax = (between.repeat(120) * g.double()).to(torch.float32)
        around = beside(amax).clamp(max=torch.finfo(torch.float32).max)
        for i in range(3):
            agree(arch, around[:, i], g, amax[:, None] * torch.linspace(-1, 1, 8))


def test_numbers_that_are_none(arch):
    """amax of 0, Inf and NaN; global scales that are zero, negative, Inf and NaN: scale NaN, codes 0."""
    amax = torch.tensor([0.0, float("inf"), float("nan"), 1.0, 1.0, 1.0, 1.0])
    g = torch.tensor([1.0, 1.0, 1.0, 0.0, -1.0, float("inf"), float("nan")])
    x = torch.tensor([-0.0, 0.0, -1.0, 1.0, -6.0, 6.0, 0.5, -0.5]).repeat(7, 1)
    x[0] *= 0
    scale, word, _ = probe(arch, amax, g, x)
    assert scale.tolist() == [0] + [0x7F] * 6
    assert word[0].tolist() == [8 * int(s) for s in torch.signbit(x[0])] and not word[1:].any()


def test_global_scale(arch):
    """max(amax / 2688, 2^-126) in one rounding: all bf16 numbers, many of fp32, both ends, what is no number."""
    bf16 = torch.arange(1 << 15).to(torch.int16).view(torch.bfloat16).float()
    near = torch.linspace(-117, -113, 1000).exp2()
    amax = torch.cat((bf16, near, fp32(-149, 127.99, 100_000, 3), 2688 * fp32(-120, 100, 20_000, 4)))
    _, _, found = probe(arch, amax, torch.ones_like(amax), torch.zeros(len(amax), 8))
    quotient = torch.where(amax.isfinite(), amax.double() / nvfp4.RANGE, torch.nan)
    want = quotient.clamp(min=nvfp4.MIN_GLOBAL_SCALE).float()
    assert torch.equal(found.isnan(), want.isnan()) and torch.equal(found[~want.isnan()], want[~want.isnan()])


def test_only_the_sm100_family_converts(arch):
    text = compiled(arch).ptx
    assert ("cvt.rn.satfinite.e2m1x2.f32" in text) == (arch == "sm_100a")
    assert compiled(arch).local_bytes == 0
