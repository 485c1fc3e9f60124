"""The indexer's scores on SM90: numbers against fp64, splits, schedules, hard rows, budgets, faults; the op there."""

from types import SimpleNamespace

import pytest
import torch

from dsv4lib import backends
from dsv4lib.dsl.compile import compile_for
from dsv4lib.emulator import launch
from dsv4lib.emulator.driver.device import make as device
from dsv4lib.errors import ArgumentError, BackendUnavailable, ConfigError
from dsv4lib.formats import e4m3
from dsv4lib.ops.indexer_logits.inputs import DIM, case
from dsv4lib.ops.indexer_logits.op import indexer_logits
from dsv4lib.ops.indexer_logits.sm90.arguments import fake_args, launch_args
from dsv4lib.ops.indexer_logits.sm90.config import splits_of
from dsv4lib.ops.indexer_logits.sm90.faults import CAUGHT_BY, FAULTS
from dsv4lib.ops.indexer_logits.sm90.kernel import HopperLogits
from tests.budget import built, small

ARCH = "sm_90a"
BOUND = 2.0**-11  # of the sum of magnitudes: the tensor core keeps 13 bits below the largest product of a step
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


def kernel_of(name):
    heads, page_size, splits, *rows = RUNS[name]
    kernel, code = built(HopperLogits, fake_args, ARCH, heads=heads, page_size=page_size)
    return kernel, code, splits, case("fp8", *rows, heads=heads, page_size=page_size)


@pytest.mark.parametrize("name", RUNS)
def test_numbers(name):
    kernel, code, splits, made = kernel_of(name)
    found, gpu = run(made, kernel, code, splits)
    assert not gpu.hazards, gpu.hazards
    written = made.written(found.shape[1])
    assert (found[~written] == EMPTY).all() and made.error(found) <= BOUND
    assert (code.local_bytes, code.spills) == (0, 0) and code.registers <= 168 and small(code)
    rows = {row.resource: row for row in kernel.budget()}
    assert all(0 < row.used <= row.limit and row.derivation for row in rows.values())
    assert code.smem_bytes >= sum(row.used for name, row in rows.items() if name.startswith("SMEM"))
    assert code.threads == rows["threads"].used


def test_every_schedule_gives_the_same_bits():
    kernel, code, splits, made = kernel_of("mixed runs")
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


def test_hard_keys():
    """Equal keys score equally, keys of zeros score 0, and a NaN stays with its own key."""
    keys = torch.randn(1, 1, DIM, generator=torch.Generator().manual_seed(1)).repeat(1, 140, 1)
    keys[0, 40:70] = 0.0
    keys[0, 90, 3] = float("nan")
    kernel, code = built(HopperLogits, fake_args, ARCH, heads=64, page_size=64)
    row = run(case("fp8", [0], [140], keys=keys), kernel, code)[0][0, :140]
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


def test_pages_past_a_length_may_be_anything():
    kernel, code = built(HopperLogits, fake_args, ARCH, heads=64, page_size=64)
    made = case("fp8", [0, 1], [64, 200])
    want, _ = run(made, kernel, code)
    made.visible.table[0, 1:] = torch.tensor([-5, 2**31 - 1, 1 << 20], dtype=torch.int32)
    found, gpu = run(made, kernel, code)
    assert not gpu.hazards and torch.equal(found, want)


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name):
    right, code, splits, made = kernel_of("many heads")

    def findings(kernel, code):
        found, gpu = run(made, kernel, code, splits)
        kinds = {hazard.kind for hazard in gpu.hazards}
        return kinds if made.error(found) <= BOUND else kinds | {"wrong numbers"}

    wrong = FAULTS[name](heads=128, page_size=256)
    assert CAUGHT_BY[name] in findings(wrong, compile_for(wrong, fake_args(wrong), ARCH))
    assert findings(right, code) == set()


def test_the_op_on_an_emulated_hopper():
    made = case("fp8", [0, 1, 2], [70, 0, 130])
    out = torch.full((3, made.keys_of.shape[1]), EMPTY)
    with backends.emulating(ARCH):
        assert indexer_logits(*made[:3], out=out, backend="emulator") is out
        assert (out[~made.written(out.shape[1])] == EMPTY).all() and made.error(out) <= BOUND
        with pytest.raises(BackendUnavailable, match="FP4 has no kernel of sm_90a"):
            indexer_logits(*case("fp4", [0], [5])[:3], backend="emulator")


def test_splits_fill_the_gpu():
    assert splits_of(1, 64 * 5000, 132) == 660
    assert splits_of(1, 64 * 5000, 132, 128) == 396
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
