"""Query heads and KV entries in one launch, on both architectures: the bits of the chain of its parts."""

from functools import cache

import pytest
import torch

from dsv4lib.config import FLASH, LayerKind
from dsv4lib.emulator import launch
from dsv4lib.emulator.driver.device import make
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import kv_entry
from dsv4lib.ops.qnorm_rope_kv.arguments import fake_args, launch_args
from dsv4lib.ops.qnorm_rope_kv.kernel import QnormRopeKv
from dsv4lib.ops.qnorm_rope_kv.op import Call
from dsv4lib.ops.quantize.op import Slots
from dsv4lib.ops.rmsnorm import arguments as norm_arguments
from dsv4lib.ops.rmsnorm.kernel import RmsNorm
from dsv4lib.ops.rmsnorm.op import Norm
from dsv4lib.reference import rope
from dsv4lib.reference.rmsnorm import rmsnorm
from tests.budget import built, small

ARCHS = ("sm_100a", "sm_90a")
SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
FREQS = rope.layer_freqs(FLASH, LayerKind.HCA)
LAST = (1 << 20) - 1  # the largest position
EPS = 1e-6


@cache
def compiled(settings, arch):
    kernel, code = built(QnormRopeKv, fake_args, arch, *settings)
    assert code.local_bytes == 0 and small(code), (code.local_bytes, code.instructions)
    return kernel, code


@cache
def norm_kernel(weighted, arch):
    return built(RmsNorm, norm_arguments.fake_args, arch, 512, weighted=weighted)


def normed(x, weight, arch):
    """bf16 rows of 512 by `ops.rmsnorm`."""
    kernel, code = norm_kernel(weight is not None, arch)
    y = torch.empty_like(x)
    launch(code, *norm_arguments.launch_args(kernel, Norm(x, weight, y, EPS, "emulator")), gpu=make(arch))
    return y


def case(tokens, count, seed=0):
    """(q, kv, weight, positions, indices): rows of different scales, places in disorder, the second dropped."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(-3, 3, tokens * count)[torch.randperm(tokens * count, generator=generator)]
    q = (torch.randn(tokens, count, 512, generator=generator) * scales.view(tokens, count, 1)).bfloat16()
    kv = (torch.randn(tokens, 512, generator=generator) * torch.logspace(-4, 2, tokens)[:, None]).bfloat16()
    positions = torch.cat((torch.tensor([LAST, 0, 65537]), torch.arange(tokens) * 27644))[:tokens]
    indices = torch.randperm(tokens + 5, generator=generator)[:tokens].int()
    indices[1:2] = -1
    return q, kv, 1 + 0.3 * torch.randn(512, generator=generator), positions, indices


def table(positions):
    return torch.cat(rope.cos_sin(positions, FREQS, torch.float32), -1)


def pool(page_size, entries):
    """Pages full of 0x5A, 32 bytes further apart than they must be."""
    size = kv_entry.LAYOUT.page_bytes(page_size)
    return torch.full((-(-entries // page_size), size + 32), 0x5A, dtype=torch.uint8)[:, :size]


def run(settings, arch, given, page_size=3, **device):
    """(queries, pages) of (q, kv, weight or None, positions, indices)."""
    q, kv, weight, positions, indices = given
    kernel, code = compiled((*settings, False, weight is not None), arch)
    out, pages = torch.full_like(q, float("nan")), pool(page_size, len(q) + 5)
    gpu = make(arch, **{"checks": "race", **device})
    call = Call(q, kv, weight, None, table(positions), out, Slots(pages, page_size, indices), EPS, "emulator")
    launch(code, *launch_args(kernel, call), gpu=gpu)
    assert not gpu.hazards, gpu.hazards[0].message
    return out, pages


def wanted_pages(kv, positions, indices, page_size=3):
    pages = pool(page_size, len(kv) + 5)
    kv_entry.append(pages, page_size, indices, rope.apply(kv.float(), positions, FREQS).bfloat16())
    return pages


def check_queries(found, q, positions, arch):
    """Nope dims have the bits of the norm kernel; what turns is within half a unit of bf16 of its pair, and fp32."""
    alone = normed(q.flatten(0, 1), None, arch).view(q.shape)
    assert torch.equal(found[..., :448], alone[..., :448])
    want = rope.apply(rmsnorm(q.double(), None, EPS), positions[:, None], FREQS)[..., 448:]
    cos, sin = rope.cos_sin(positions, FREQS, torch.float32)  # in fp64 the reference's angles are the same products
    assert torch.isfinite(cos).all() and torch.isfinite(sin).all()
    size = want.unflatten(-1, (-1, 2)).norm(dim=-1).repeat_interleave(2, -1)
    assert bool(((found[..., 448:].double() - want).abs() <= 2.0**-8 * want.abs() + 2.0**-20 * size).all())


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("arch", "tokens", "count", "settings", "weighted"),
    [
        ("sm_90a", 3, 5, (2, 2), True),
        ("sm_100a", 3, 5, (2, 2), True),
        ("sm_90a", 1, 1, (1, 4), False),
        ("sm_100a", 2, 64, (4, 8), False),
    ],
)
def test_the_chain_of_its_parts(arch, tokens, count, settings, weighted):
    q, kv, weight, positions, indices = case(tokens, count, seed=count)
    out, pages = run(settings, arch, (q, kv, weight if weighted else None, positions, indices))
    check_queries(out, q, positions, arch)
    assert torch.equal(pages, wanted_pages(normed(kv, weight, arch) if weighted else kv, positions, indices))


def test_more_tokens_than_warps():
    """The last CTA of KV vectors is not full; a page may have any size."""
    q, kv, _, positions, indices = case(37, 1)
    out, pages = run((1, 16), "sm_90a", (q, kv, None, positions, indices), page_size=64)
    check_queries(out, q, positions, "sm_90a")
    assert torch.equal(pages, wanted_pages(kv, positions, indices, 64))


def test_in_place_and_positions_in_a_table():
    q, kv, _, _, indices = case(5, 2)
    rows, chosen = table(torch.arange(7) * 149796), torch.tensor([3, 0, 3, 6, 1])
    kernel, code = compiled((1, 4, True, False), "sm_90a")
    out, pages = q.clone(), pool(3, 10)
    call = Call(out, kv, None, chosen, rows, out, Slots(pages, 3, indices), EPS, "emulator")
    launch(code, *launch_args(kernel, call), gpu=make("sm_90a"))
    check_queries(out, q, chosen * 149796, "sm_90a")
    assert torch.equal(pages, wanted_pages(kv, chosen * 149796, indices))


def test_every_fault_is_found():
    """What a wrong kernel would give differs from what this one gives."""
    q, kv, weight, positions, indices = case(3, 5)
    _, pages = run((2, 2), "sm_90a", (q, kv, weight, positions, indices))
    right = normed(kv, weight, "sm_90a")
    wide = right.float()
    a, b = wide[:, 448:480], wide[:, 480:]
    cos, sin = rope.cos_sin(positions, FREQS, torch.float32)
    wrong = {
        "inverse": rope.apply_inverse(wide, positions, FREQS),
        "halves, not pairs": torch.cat((wide[:, :448], a * cos - b * sin, b * cos + a * sin), -1),
        "next token's position": rope.apply(wide, positions.roll(1), FREQS),
        "norm after the rotation": rmsnorm(rope.apply(kv.float(), positions, FREQS), weight, EPS),
        "no weight": rope.apply(normed(kv, None, "sm_90a").float(), positions, FREQS),
        "not normed": rope.apply(kv.float(), positions, FREQS),
    }
    for name, value in wrong.items():
        other = pool(3, 8)
        kv_entry.append(other, 3, indices, value.bfloat16())
        assert not torch.equal(pages, other), name
    shifted = torch.where(indices < 0, indices, (indices + 1) % 8)
    assert not torch.equal(pages, wanted_pages(right, positions, shifted)), "slot"


def test_indices_outside_the_pool_and_no_numbers():
    """Entries that do not exist are dropped; a NaN stays in its head, its group, its pair."""
    q, kv, _, positions, _ = case(4, 2)
    indices = torch.tensor([9, -5, 2**31 - 1, 4], dtype=torch.int32)
    q[0, 0, 3], kv[3, 70], kv[3, 511] = float("nan"), float("nan"), float("inf")
    out, pages = run((2, 2), "sm_100a", (q, kv, None, positions, indices))
    assert bool(out[0, 0].isnan().all()) and bool(out.flatten(0, 1)[1:].isfinite().all())
    want = wanted_pages(kv, positions, torch.tensor([-1, -1, -1, 4], dtype=torch.int32))
    entries = [kv_entry.gather(p, 3, torch.tensor([4]))[0] for p in (pages, want)]
    torch.testing.assert_close(*entries, rtol=0, atol=0, equal_nan=True)
    assert int(entries[1].isnan().sum()) == 65
    for p in (pages, want):
        p[1, 576:1152] = 0  # compared as numbers: a NaN of bf16 has many forms
    assert torch.equal(pages, want)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", ARCHS)
def test_all_schedules_give_the_same_bits(arch):
    given = case(3, 5)
    found = [run((2, 2), arch, given, schedule=s, seed=3) for s in SCHEDULES]
    assert all(torch.equal(a, b) for one in found[1:] for a, b in zip(one, found[0], strict=True))


def test_bad_arguments_are_named():
    q, kv, weight, _, indices = case(3, 2)
    slots = Slots(pool(3, 8), 3, indices)
    good = Call(q, kv, None, None, torch.zeros(3, 64), q.clone(), slots, EPS, "emulator")
    for bad, name in (
        ({"q": q.half()}, "q"),
        ({"kv": kv[1:]}, r"kv\.shape"),
        ({"kv": kv.float()}, "kv"),
        ({"kv_norm": weight}, "kv_norm"),
        ({"positions": torch.zeros(3).long()}, "positions"),
        ({"out": q[1:]}, "out"),
        ({"slots": slots._replace(indices=indices[1:])}, "indices"),
        ({"slots": slots._replace(pages=pool(3, 8)[:, :-608])}, "pages"),
    ):
        with pytest.raises(ArgumentError, match=name):
            launch_args(QnormRopeKv(gathered=False), good._replace(**bad))
