"""The indexer's scores on SM90: numbers against fp64, splits, schedules, hard rows, budgets, faults; the op there."""

from types import SimpleNamespace

import pytest
import torch

from dsv4lib import backends
from dsv4lib.dsl.compile import compile_for
from dsv4lib.emulator import launch
from dsv4lib.emulator.driver.device import make as device
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.formats import e4m3, mxfp4
from dsv4lib.ops.indexer_logits.inputs import DIM, case
from dsv4lib.ops.indexer_logits.op import indexer_logits
from dsv4lib.ops.indexer_logits.sm90.arguments import fake_args, launch_args
from dsv4lib.ops.indexer_logits.sm90.config import splits_of
from dsv4lib.ops.indexer_logits.sm90.faults import CAUGHT_BY, FAULTS, FP4_FAULTS
from dsv4lib.ops.indexer_logits.sm90.fp4 import HopperLogitsFp4
from dsv4lib.ops.indexer_logits.sm90.kernel import HopperLogits
from tests.budget import built, small
from tests.cases import cases

ARCH = "sm_90a"
KERNELS = {"fp8": HopperLogits, "fp4": HopperLogitsFp4}
# Of the sum of magnitudes. FP8: the tensor core keeps 13 bits below the largest product of a step; FP4: fp32.
BOUNDS = {"fp8": 2.0**-11, "fp4": 2.0**-21}
SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
EMPTY = 7.0  # in scores that are not to be written
RUNS = {  # heads, page size, splits; request and length of each token
    "decode": (64, 64, 3, [0, 1, 2], [300, 0, 129]),
    "prefill": (64, 128, 1, [0] * 5 + [1] * 2, [254, 254, 255, 255, 256, 1, 1]),
    "mixed runs": (64, 32, 2, [0, 1, 0, -1, -1, 2], [33, 140, 20, 50, 0, 64]),
    "more tiles than stages": (64, 64, 1, [0], [700]),
    "many heads": (128, 256, 2, [1, 0, 0], [1000, 31, -1]),
}


def run(made, kernel, code, splits=1, columns=None, **options):
    """(scores with `EMPTY` where nothing was written, GPU)."""
    out = torch.full((len(made.visible.requests), columns or made.keys_of.shape[1] + 3), EMPTY)
    gpu = device(ARCH, checks="race", **options)
    launch(code, *launch_args(kernel, call_of(made, out), splits), gpu=gpu)
    return out, gpu


def call_of(made, out):
    return SimpleNamespace(queries=made.queries, keys=made.keys, visible=made.visible, out=out)


def kernel_of(name, variant="fp8"):
    heads, page_size, splits, *rows = RUNS[name]
    kernel, code = built(KERNELS[variant], fake_args, ARCH, heads=heads, page_size=page_size)
    return kernel, code, splits, case(variant, *rows, heads=heads, page_size=page_size)


FP4 = [("mixed runs", "fp4"), ("many heads", "fp4")]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "variant"),
    cases(*((name, "fp8") for name in RUNS), *FP4, full=[one for name in RUNS if (one := (name, "fp4")) not in FP4]),
)
def test_numbers(name, variant):
    kernel, code, splits, made = kernel_of(name, variant)
    found, gpu = run(made, kernel, code, splits)
    assert not gpu.hazards, gpu.hazards
    written = made.written(found.shape[1])
    assert (found[~written] == EMPTY).all() and made.error(found) <= BOUNDS[variant]
    assert (code.local_bytes, code.spills) == (0, 0) and code.registers <= 168 and small(code)
    rows = {row.resource: row for row in kernel.budget()}
    assert all(0 < row.used <= row.limit and row.derivation for row in rows.values())
    assert code.smem_bytes >= sum(row.used for name, row in rows.items() if name.startswith("SMEM"))
    assert code.threads == rows["threads"].used


@pytest.mark.one_in(2)
@pytest.mark.parametrize("variant", KERNELS)
def test_every_schedule_gives_the_same_bits(variant):
    kernel, code, splits, made = kernel_of("mixed runs", variant)
    results = []
    for schedule in SCHEDULES:
        found, gpu = run(made, kernel, code, splits, schedule=schedule, seed=3)
        assert not gpu.hazards
        results.append(found)
    assert all(torch.equal(one, results[0]) for one in results)


def test_a_score_depends_on_its_token_and_key_alone():
    """One split or three, pages of 32 or 64 keys: the same bits."""
    requests, lengths, results = [0, 0, 1, 1, 1], [255, 256, 90, 90, 91], []
    keys = torch.randn(2, 256, DIM, generator=torch.Generator().manual_seed(5))
    for splits, page_size in ((3, 64), (1, 32), (2, 64)):
        kernel, code = built(HopperLogits, fake_args, ARCH, heads=64, page_size=page_size)
        made = case("fp8", requests, lengths, page_size=page_size, keys=keys)
        results.append(run(made, kernel, code, splits, 256)[0])
    assert all(torch.equal(one, results[0]) for one in results)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("variant", KERNELS)
def test_hard_keys(variant):
    """Equal keys score equally, keys of zeros score 0, and a NaN stays with its own key."""
    keys = torch.randn(1, 1, DIM, generator=torch.Generator().manual_seed(1)).repeat(1, 140, 1)
    keys[0, 40:70] = 0.0
    keys[0, 90, 3] = float("nan")
    kernel, code = built(KERNELS[variant], fake_args, ARCH, heads=64, page_size=64)
    row = run(case(variant, [0], [140], keys=keys), kernel, code)[0][0, :140]
    others = torch.cat((row[:40], row[70:90], row[91:]))
    assert (others == others[0]).all() and others[0] != 0 and not row[40:70].any()
    assert row[90].isnan() and row.isnan().sum() == 1


def test_small_integers_are_exact():
    """The order of K: every dimension counts once, with its own weight."""
    generator = torch.Generator().manual_seed(2)
    made = case("fp8", [0, 0], [70, 70], keys=torch.randint(-3, 4, (1, 128, DIM), generator=generator).float())
    made.queries.codes.copy_(torch.tensor([0, 0x38, 0x40, 0xB8], dtype=torch.uint8)[
        torch.randint(4, made.queries.codes.shape, generator=generator)])  # fmt: skip
    made.queries.weights.copy_(torch.randint(-2, 3, made.queries.weights.shape, generator=generator))
    made = made._replace(values=e4m3.decode(made.queries.codes, torch.float64))
    kernel, code = built(HopperLogits, fake_args, ARCH, heads=64, page_size=64)
    found, want = run(made, kernel, code)[0], made.wanted()[0]
    assert torch.equal(found[:, :70].double(), want[:, :70])


def test_codes_and_scales_of_fp4_are_exact():
    """All codes of queries and keys; scales of a key's blocks that differ by up to 2^254, and of a query's heads."""
    generator = torch.Generator().manual_seed(4)
    made = case("fp4", [0], [64 * 3])
    codes = made.queries.codes
    codes.copy_(torch.randint(256, codes.shape, generator=generator))
    made.queries.scales.copy_(torch.randint(100, 150, (64, 1), generator=generator).expand(1, 64, 4))
    made.queries.weights.copy_(torch.randn(1, 64, generator=generator))
    pages, page_size = made.keys
    row = torch.tensor([[127, 127, 127, 127], [0, 0, 0, 0], [0, 254, 1, 2], [90, 215, 89, 91], [3, 1, 0, 2]])
    pages.random_(256, generator=generator)
    scales = pages[:, 64 * page_size :].view(len(pages), page_size, 4)
    scales.copy_(row.repeat(13, 1)[:page_size])
    stored = pages[made.visible.table.long()[0]]
    packed, e8m0 = stored[:, : 64 * page_size].reshape(-1, 64), stored[:, 64 * page_size :].reshape(-1, 4)
    keys = mxfp4.dequantize(mxfp4.MXFP4Tensor(packed, e8m0), torch.float64)[None]
    values = mxfp4.dequantize(mxfp4.MXFP4Tensor(codes, made.queries.scales), torch.float64)
    made = made._replace(values=values, keys_of=keys)
    kernel, code = built(HopperLogitsFp4, fake_args, ARCH, heads=64, page_size=64)
    found = run(made, kernel, code)[0]
    fits = made.wanted()[1][0] < 2.0**120  # the others are infinite in fp32
    want, size = (one[0, fits] for one in made.wanted())
    assert (
        fits.sum() > 150 and ((found[0, : len(fits)][fits].double() - want).abs() <= 2.0**-21 * size + 2.0**-140).all()
    )


def test_pages_past_a_length_may_be_anything():
    kernel, code = built(HopperLogits, fake_args, ARCH, heads=64, page_size=64)
    made = case("fp8", [0, 1], [64, 200])
    want, _ = run(made, kernel, code)
    made.visible.table[0, 1:] = torch.tensor([-5, 2**31 - 1, 1 << 20], dtype=torch.int32)
    found, gpu = run(made, kernel, code)
    assert not gpu.hazards and torch.equal(found, want)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "variant"), [*((name, "fp8") for name in FAULTS), *((name, "fp4") for name in FP4_FAULTS)]
)
def test_faults_are_found(name, variant):
    right, code, splits, made = kernel_of("many heads", variant)

    def findings(kernel, code):
        found, gpu = run(made, kernel, code, splits)
        kinds = {hazard.kind for hazard in gpu.hazards}
        return kinds if made.error(found) <= BOUNDS[variant] else kinds | {"wrong numbers"}

    wrong = (FAULTS | FP4_FAULTS)[name](heads=128, page_size=256)
    assert CAUGHT_BY[name] in findings(wrong, compile_for(wrong, fake_args(wrong), ARCH))
    assert findings(right, code) == set()


@pytest.mark.parametrize("variant", KERNELS)
def test_the_op_on_an_emulated_hopper(variant):
    made = case(variant, [0, 1, 2], [70, 0, 130])
    out = torch.full((3, made.keys_of.shape[1]), EMPTY)
    with backends.emulating(ARCH):
        assert indexer_logits(*made[:3], out=out, backend="emulator") is out
        assert (out[~made.written(out.shape[1])] == EMPTY).all() and made.error(out) <= BOUNDS[variant]


def test_splits_fill_the_gpu():
    assert splits_of(1, 64 * 5000, 132) == 660
    assert splits_of(1, 64 * 5000, 132, 128) == 396
    assert splits_of(1, 64 * 5000, 132, 64, "fp4") == 528
    assert splits_of(1, 300, 132) == 5
    assert splits_of(1000, 1 << 18, 132) == 1


def test_bad_settings_and_arguments_are_named():
    for settings, name in (((48,), "heads"), ((64, 16), "page_size"), ((64, 192), "page_size")):
        with pytest.raises(ConfigError, match=name):
            HopperLogits(*settings)
    kernel, made = HopperLogits(), case("fp8", [0], [64])
    good = call_of(made, torch.empty(1, 64))
    for change, splits, name in (
        ({"queries": made.queries._replace(codes=made.queries.codes[:, :32])}, 1, "codes"),
        ({"keys": made.keys._replace(pages=made.keys.pages[:, :99])}, 1, "pages"),
        ({}, 0, "splits"),
    ):
        with pytest.raises(ArgumentError, match=name):
            launch_args(kernel, SimpleNamespace(**vars(good) | change), splits)
