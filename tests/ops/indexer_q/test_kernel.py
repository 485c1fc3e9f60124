"""The indexer's queries on both architectures: the oracle's bits in both formats, however spread over lanes."""

from functools import cache

import pytest
import torch

from dsv4lib.config import FLASH, LayerKind
from dsv4lib.emulator import launch
from dsv4lib.emulator.driver.device import make
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.formats import fp8_block, hadamard, mxfp4, ue8m0
from dsv4lib.ops.indexer_q.arguments import fake_args, launch_args
from dsv4lib.ops.indexer_q.kernel import IndexerQ
from dsv4lib.ops.indexer_q.op import Call, IndexerQueries
from dsv4lib.ops.quantize.config import has_fp4_conversion
from dsv4lib.reference import rope
from tests.budget import built, small

SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
FREQS = rope.layer_freqs(FLASH, LayerKind.CSA)
LAST = (1 << 20) - 1  # the largest position


@cache
def compiled(settings, arch):
    kernel, code = built(IndexerQ, fake_args, arch, *settings, fp4_conversion=has_fp4_conversion(arch))
    assert code.local_bytes == 0 and small(code), (code.local_bytes, code.instructions)
    return kernel, code


def case(tokens, count, seed=0):
    """(q, weights, positions); each head has a scale of its own, weights have both signs."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(-4, 4, tokens * count)[torch.randperm(tokens * count, generator=generator)]
    q = (torch.randn(tokens, count, 128, generator=generator) * scales.view(tokens, count, 1)).bfloat16()
    positions = torch.cat((torch.tensor([LAST, 0, 65537]), torch.arange(tokens) * 27644))[:tokens]
    return q, torch.randn(tokens, count, generator=generator), positions


def stored(x):
    """As bf16 holds it."""
    return x.bfloat16().float()


def rotated(x):
    """By the Hadamard matrix, stored in bf16."""
    return stored(hadamard.transform(x))


def turned(q, positions):
    return stored(rope.apply(q.float(), positions[:, None], FREQS))


def quantised(x, weights, variant):
    """(codes, scales or None, weights) of x before quantisation."""
    scaled = weights.float() * (128 * x.shape[1]) ** -0.5
    if variant == "fp4":
        q = mxfp4.quantize(x)
        return q.packed, q.scales, scaled
    q = fp8_block.quantize_activation(x)
    return q.codes, None, scaled * ue8m0.decode(q.scales[..., 0])


def run(settings, arch, q, weights, rows, positions=None, **device):
    """(codes, scales or None, weights); settings as far as warps or rounds."""
    kind, rounds = {torch.bfloat16: "bf16", torch.float32: "fp32"}[weights.dtype], (*settings, 1)[5]
    kernel, code = compiled((*settings[:5], rounds, positions is not None, kind), arch)
    lead, fp4 = q.shape[:2], settings[0] == "fp4"
    codes = torch.full((*lead, 64 if fp4 else 128), 0x5A, dtype=torch.uint8)
    scales = torch.full((*lead, 4), 0x5A, dtype=torch.uint8) if fp4 else None
    out = IndexerQueries(codes, scales, torch.full(lead, float("nan")))
    gpu = make(arch, **{"checks": "race", **device})
    call = Call(q, weights, positions, rows, out, *settings[:2], "emulator")
    launch(code, *launch_args(kernel, call), gpu=gpu)
    assert not gpu.hazards, gpu.hazards[0].message
    return out


def table(positions):
    return torch.cat(rope.cos_sin(positions, FREQS, torch.float32), -1)


def same(found, want):
    return all(b is None or torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("arch", "settings", "tokens", "count", "kind"),
    [
        ("sm_90a", ("fp8", True, 4, 2, 2), 3, 5, torch.bfloat16),
        ("sm_100a", ("fp8", True, 8, 2, 2, 4), 1, 64, torch.float32),
        ("sm_90a", ("fp8", False, 16, 1, 4), 2, 1, torch.float32),
        ("sm_90a", ("fp4", True, 4, 1, 1), 3, 5, torch.float32),
        ("sm_100a", ("fp4", True, 8, 2, 1, 2), 3, 37, torch.bfloat16),
        ("sm_100a", ("fp4", False, 16, 4, 1), 1, 128, torch.float32),
    ],
)
def test_bits_of_the_oracle(arch, settings, tokens, count, kind):
    q, weights, positions = case(tokens, count, seed=count)
    x = turned(q, positions)
    want = quantised(rotated(x) if settings[1] else x, weights.to(kind), settings[0])
    assert same(run(settings, arch, q, weights.to(kind), table(positions)), want)


def test_positions_choose_rows_of_the_table():
    q, weights, _ = case(5, 2)
    chosen = torch.tensor([3, 0, 3, 6, 1])
    want = quantised(rotated(turned(q, chosen * 149796)), weights, "fp8")
    settings = ("fp8", True, 8, 1, 4)
    rows = table(torch.arange(7) * 149796)
    assert same(run(settings, "sm_90a", q, weights, rows, chosen), want)
    codes, _, out = run(settings, "sm_90a", q, weights, rows, torch.tensor([3, 7, 3, -1, 1]))
    assert bool((codes[1] == 127).all()) and bool(out[1].isnan().all())
    assert torch.equal(codes[[0, 2, 4]], want[0][[0, 2, 4]])
    still = quantised(rotated(q.float()), weights, "fp8")  # a negative position is padding: no rotation
    assert torch.equal(codes[3], still[0][3])


def test_every_fault_is_found():
    """What a wrong kernel would give differs from what this one gives."""
    q, weights, positions = case(3, 5)
    found = run(("fp4", True, 8, 2, 2), "sm_90a", q, weights, table(positions))
    wide, right = q.float(), turned(q, positions)
    exact = rope.apply(wide, positions[:, None], FREQS)
    a, b = wide[..., 64:96], wide[..., 96:]
    cos, sin = (x[:, None] for x in rope.cos_sin(positions, FREQS, torch.float32))
    wrong = {
        "inverse": rope.apply_inverse(wide, positions[:, None], FREQS),
        "halves, not pairs": torch.cat((wide[..., :64], a * cos - b * sin, b * cos + a * sin), -1),
        "next token's position": rope.apply(wide, positions.roll(1)[:, None], FREQS),
        "first 64 dims": rope.apply(wide.roll(64, -1), positions[:, None], FREQS).roll(64, -1),
    }
    wrong = {name: rotated(stored(x)) for name, x in wrong.items()} | {
        "no Hadamard": right,
        "Hadamard first": stored(rope.apply(rotated(wide), positions[:, None], FREQS)),
        "no 128^-0.5": rotated(right) * 128**0.5,
        "fp32 after RoPE": rotated(exact),
        "fp32 after Hadamard": hadamard.transform(right),
        "fp32 throughout": hadamard.transform(exact),
    }
    for name, x in wrong.items():
        assert not same(found, quantised(x, weights, "fp4")), name


def test_sums_in_the_order_of_the_oracle():
    """Two large numbers that cancel, after small ones were rounded into them: what is left depends on the order."""
    q = torch.randn(1, 64, 128, generator=torch.Generator().manual_seed(4)).sign().bfloat16()
    for row, stride in enumerate((1, 2, 4, 8, 16, 32, 64)):
        q[0, row::7, 0] = q[0, row::7, stride] = 2.0**24
    weights, zero = torch.ones(1, 64), torch.zeros(1)
    want = quantised(rotated(q.float()), weights, "fp8")
    for lanes in (4, 8, 16):
        assert same(run(("fp8", True, lanes, 1, 4), "sm_90a", q, weights, table(zero)), want)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("variant", ["fp8", "fp4"])
def test_what_is_no_number(variant):
    """A NaN or Inf reaches all of a rotated head; zeros; sums that leave fp32; subnormals."""
    q, weights, positions = case(1, 8)
    q[0, 0, 3], q[0, 1, 127], q[0, 2], q[0, 3], q[0, 4], q[0, 5] = float("nan"), -float("inf"), 3e38, 0, -0.0, 2.0**-133
    want = quantised(rotated(turned(q, positions)), weights, variant)
    found = run((variant, True, 8, 1, 2), "sm_100a", q, weights, table(positions))
    assert same(found[:2], want[:2])
    torch.testing.assert_close(found[2], want[2], rtol=0, atol=0, equal_nan=True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("arch", "variant"), [("sm_90a", "fp8"), ("sm_100a", "fp4")])
def test_all_schedules_give_the_same_bits(arch, variant):
    q, weights, positions = case(3, 5)
    want = quantised(rotated(turned(q, positions)), weights, variant)
    for schedule in SCHEDULES:
        settings = (variant, True, 8, 1, 1)
        assert same(run(settings, arch, q, weights, table(positions), schedule=schedule, seed=3), want), schedule


def test_bad_arguments_are_named():
    for bad, name in ((("fp6",), "variant"), (("fp8", True, 32), "lanes"), (("fp8", True, 4, 3), "passes")):
        with pytest.raises(ConfigError, match=name):
            IndexerQ(*bad)
    q, weights, _ = case(2, 3)
    out = IndexerQueries(torch.zeros(2, 3, 128).byte(), None, weights.clone())
    good = Call(q, weights.bfloat16(), None, torch.zeros(2, 64), out, "fp8", True, "emulator")
    for bad, name in (
        ({"q": q.float()}, "q"),
        ({"weights": weights}, "weights"),
        ({"positions": torch.zeros(2).long()}, "positions"),
        ({"cos_sin": torch.zeros(2, 62)}, r"cos_sin\.shape"),
        ({"out": out._replace(codes=torch.zeros(2, 3, 64).byte())}, r"codes\.shape"),
        ({"out": out._replace(scales=torch.zeros(2, 3, 4).byte())}, "scales"),
        ({"out": out._replace(weights=weights[1:])}, "out"),
    ):
        with pytest.raises(ArgumentError, match=name):
            launch_args(IndexerQ(gathered=False), good._replace(**bad))
