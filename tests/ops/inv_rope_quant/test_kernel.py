"""Inverse RoPE and FP8 on both architectures: the oracle's bits; the faults one makes here are found."""

from functools import cache

import pytest
import torch

from dsv4lib.config import FLASH, LayerKind
from dsv4lib.emulator import launch
from dsv4lib.emulator.driver.device import make
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.formats import fp8_block, scale_swizzle, ue8m0
from dsv4lib.ops.inv_rope_quant.arguments import fake_args, launch_args
from dsv4lib.ops.inv_rope_quant.kernel import InvRopeQuant
from dsv4lib.ops.inv_rope_quant.op import Call
from dsv4lib.reference import rope
from tests.budget import built, small

ARCHS = ("sm_100a", "sm_90a")
SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
FREQS = rope.layer_freqs(FLASH, LayerKind.CSA)
LAST = (1 << 20) - 1  # the largest position


@cache
def compiled(settings, arch):
    kernel, code = built(InvRopeQuant, fake_args, arch, *settings)
    assert code.local_bytes == 0 and small(code), (code.local_bytes, code.instructions)
    return kernel, code


def heads(tokens, count, seed=0):
    """o; each head has a scale of its own."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(-4, 4, tokens * count)[torch.randperm(tokens * count, generator=generator)]
    return (torch.randn(tokens, count, 512, generator=generator) * scales.view(tokens, count, 1)).bfloat16()


def table(positions):
    """Rows of these positions."""
    return torch.cat(rope.cos_sin(positions, FREQS, torch.float32), -1)


def positions_of(tokens):
    return torch.cat((torch.tensor([LAST, 0, 65537]), torch.arange(tokens) * 27644))[:tokens]


def oracle(o, positions, rotate=rope.apply_inverse):
    return fp8_block.quantize_activation(rotate(o.float(), positions[:, None], FREQS))


def call_of(kernel, o, rows, codes, scales, positions=None):
    return Call(o, positions, rows, (codes, scales), kernel.layout, "emulator")


def run(settings, arch, o, rows, positions=None, **device):
    """(codes, scales); 255 where the kernel writes nothing."""
    kernel, code = compiled(settings, arch)
    codes, scales = (torch.full((*o.shape[:2], n), 255, dtype=torch.uint8) for n in (512, 4))
    gpu = make(arch, **{"checks": "race", **device})
    launch(code, *launch_args(kernel, call_of(kernel, o, rows, codes, scales, positions)), gpu=gpu)
    assert not gpu.hazards, gpu.hazards[0].message
    return codes, scales


def same(found, want):
    return torch.equal(found[0], want.codes) and torch.equal(found[1], want.scales)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("tokens", "count", "settings"), [(3, 5, (4, 2)), (1, 1, (1, 4)), (2, 128, (8, 2))])
def test_bits_of_the_oracle(arch, tokens, count, settings):
    o, positions = heads(tokens, count, seed=count), positions_of(tokens)
    assert same(run((*settings, False), arch, o, table(positions)), oracle(o, positions))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("arch", "tokens"), [("sm_100a", 3), ("sm_90a", 129)])
def test_images_under_every_schedule(arch, tokens):
    """Every byte of an image is written by one thread of one launch, the padding too."""
    o, positions = heads(tokens, 4), torch.arange(tokens) * 7
    kernel, code = compiled((2, 1, False, "swizzled"), arch)
    want = oracle(o, positions).scales.unflatten(1, (2, 2)).transpose(0, 1).flatten(2).repeat_interleave(4, -1)
    for schedule in SCHEDULES if tokens == 3 else SCHEDULES[:1]:
        codes, image = (
            torch.empty(tokens, 4, 512).byte(),
            torch.full((2, scale_swizzle.swizzled_bytes(tokens, 32)), 255),
        )
        image = image.byte()
        gpu = make(arch, checks="race", schedule=schedule, seed=1)
        launch(code, *launch_args(kernel, call_of(kernel, o, table(positions), codes, image)), gpu=gpu)
        assert not gpu.hazards, gpu.hazards[0].message
        assert torch.equal(image, scale_swizzle.swizzle(want))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", ["colmajor", "colmajor_ue8m0"])
def test_columns_of_scales(layout):
    """Two heads a warp, five of them, in memory with room between the columns."""
    o, positions = heads(3, 5), positions_of(3)
    kernel, code = compiled((2, 2, False, layout), "sm_90a")
    want = oracle(o, positions).scales
    if layout == "colmajor":
        scales, want = torch.zeros(5, 4, 8)[..., :3].permute(2, 0, 1), ue8m0.decode(want)
    else:
        scales, want = torch.zeros(5, 8).int()[:, :3].t(), want.view(torch.int32)[..., 0]
    gpu = make("sm_90a", checks="race")
    call = call_of(kernel, o, table(positions), torch.empty(3, 5, 512).byte(), scales)
    launch(code, *launch_args(kernel, call), gpu=gpu)
    assert not gpu.hazards and torch.equal(scales, want)


def test_positions_choose_rows_of_the_table():
    """In any order, in a table that has more; one past its end gives NaN, only among what rotates."""
    o, positions = heads(5, 2), torch.tensor([3, 0, 3, 6, 1])
    rows = table(torch.arange(7) * 149796)
    want = oracle(o, positions * 149796)
    assert same(run((1, 4, True), "sm_90a", o, rows, positions), want)
    codes, scales = run((1, 4, True), "sm_90a", o, rows, torch.tensor([3, 7, 3, -1, 1]))
    assert bool((scales[1, :, 3] == 255).all()) and torch.equal(scales[..., :3], want.scales[..., :3])
    assert torch.equal(codes[[0, 2, 4]], want.codes[[0, 2, 4]])
    still = oracle(o, torch.zeros(5, dtype=torch.int64))  # a negative position is padding: no rotation
    assert torch.equal(codes[3], still.codes[3]) and torch.equal(scales[3], still.scales[3])


def test_every_fault_is_found():
    """What a wrong kernel would give differs from what this one gives."""
    o, positions = heads(3, 5), positions_of(3)
    found = run((4, 2, False), "sm_90a", o, table(positions))
    wide = o.float()
    cos, sin = (x[:, None] for x in rope.cos_sin(positions, FREQS, torch.float32))
    first = torch.cat((rope.rotate(wide[..., :64], cos, -sin), wide[..., 64:]), -1)
    a, b = wide[..., 448:480], wide[..., 480:]
    split = torch.cat((wide[..., :448], a * cos + b * sin, b * cos - a * sin), -1)
    for name, wrong in {
        "forward": rope.apply(wide, positions[:, None], FREQS),
        "first 64 dims": first,
        "halves, not pairs": split,
        "next token's position": rope.apply_inverse(wide, positions.roll(1)[:, None], FREQS),
        "bf16 in between": rope.apply_inverse(wide, positions[:, None], FREQS).bfloat16(),
        "not at all": wide,
    }.items():
        assert not same(found, fp8_block.quantize_activation(wrong)), name
    want = oracle(o, positions)
    assert not torch.equal(found[1], want.scales.roll(1, -1)), "scale from the wrong block"


def test_what_is_no_number():
    """NaN or Inf spoils its group, and its rotated partner's; zeros; a head larger than E4M3 by far."""
    o, positions = heads(1, 6), positions_of(1)
    o[0, 0, 130], o[0, 1, 511], o[0, 2, 448] = float("nan"), float("inf"), -float("inf")
    o[0, 3], o[0, 4], o[0, 5] = 0, -0.0, 3e38
    assert same(run((2, 1, False), "sm_100a", o, table(positions)), oracle(o, positions))


def test_ties_and_ends_of_bf16():
    """Every bf16 magnitude as the largest of a group; ties of E4M3 below it."""
    values = torch.arange(0, 1 << 15, 7).to(torch.int16).view(torch.bfloat16)
    values = values[: len(values) // 4 * 4].view(-1, 4, 1)
    parts = torch.cat((torch.ones(1), torch.linspace(-1, 1, 63), (torch.arange(64) - 32) / 32 * 17 / 16))
    o = (values.float() * parts).bfloat16().flatten(-2).view(1, -1, 512)[:, :1024]
    assert same(run((8, 4, False), "sm_90a", o, table(torch.zeros(1))), oracle(o, torch.zeros(1)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", ARCHS)
def test_all_schedules_give_the_same_bits(arch):
    o, positions = heads(3, 5), positions_of(3)
    for schedule in SCHEDULES:
        found = run((2, 2, False), arch, o, table(positions), schedule=schedule, seed=3)
        assert same(found, oracle(o, positions)), schedule


def test_heads_of_a_larger_matrix():
    wide = torch.full((2, 3, 1024), 7.0).bfloat16()
    o, positions = heads(2, 3), positions_of(2)
    wide[..., :512] = o
    assert same(run((1, 4, False), "sm_90a", wide[..., :512], table(positions)), oracle(o, positions))


def test_bad_arguments_are_named():
    for bad, name in (((3, 4), "heads"), ((1, 17), "warps")):
        with pytest.raises(ConfigError, match=name):
            InvRopeQuant(*bad)
    o, codes, scales = heads(2, 3), torch.zeros(2, 3, 512).byte(), torch.zeros(2, 3, 4).byte()
    kernel = InvRopeQuant()
    good = call_of(kernel, o, torch.zeros(9, 64), codes, scales, torch.zeros(2).long())
    for bad, name in (
        ({"o": o.half()}, "o"),
        ({"o": o[..., :508]}, r"o\.shape"),
        ({"positions": torch.zeros(2).int()}, "positions"),
        ({"cos_sin": torch.zeros(9, 32)}, r"cos_sin\.shape"),
        ({"out": (codes[1:], scales)}, r"out\[0\]\.shape"),
        ({"out": (codes, scales[..., :3])}, r"out\[1\]\.shape"),
    ):
        with pytest.raises(ArgumentError, match=name):
            launch_args(kernel, good._replace(**bad))
