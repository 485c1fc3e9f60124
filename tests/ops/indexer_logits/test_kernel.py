"""The indexer's scores on SM100: numbers against fp64, runs and splits, schedules, hard rows, budgets, faults."""

from functools import cache

import pytest
import torch

from dsv4lib.emulator import launch
from dsv4lib.emulator.driver.device import make as device
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.ops.indexer_logits.arguments import fake_args, launch_args
from dsv4lib.ops.indexer_logits.config import DIM, Config, most_tokens
from dsv4lib.ops.indexer_logits.faults import FAULTS
from dsv4lib.ops.indexer_logits.inputs import case
from dsv4lib.ops.indexer_logits.op import Call
from dsv4lib.ops.indexer_logits.sm100 import IndexerLogits
from tests.budget import built, small

SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
EMPTY = 7.0  # in scores that are not to be written
RUNS = {  # variant, heads, tokens a tile, page size, splits; request and length of each token
    "decode": ("fp8", 64, 1, 64, 3, [0, 1, 2], [300, 0, 129]),
    "decode fp4": ("fp4", 64, 1, 64, 2, [2, 0, 1], [65, 257, -1]),
    "prefill": ("fp8", 64, 4, 128, 1, [0] * 5 + [1] * 2, [254, 254, 255, 255, 256, 1, 1]),
    "prefill fp4": ("fp4", 64, 3, 64, 2, [0] * 4 + [1] * 4, [130, 130, 131, 131, 2, 2, 3, 3]),
    "mixed runs": ("fp8", 64, 4, 32, 2, [0, 1, 0, -1, -1, 2], [33, 140, 20, 50, 0, 64]),
    "many heads": ("fp4", 128, 1, 256, 1, [1, 0], [270, 31]),
    "wide pages": ("fp8", 128, 2, 384, 2, [0, 0, 1], [500, 501, 129]),
}


@cache
def compiled(kernel_type=IndexerLogits, *settings):
    return built(kernel_type, fake_args, "sm_100a", *settings)


def call_of(made, out):
    return Call(made.queries, made.keys, made.visible, out, "emulator")


def run(made, kernel, code, splits=1, columns=None, **options):
    """(scores with `EMPTY` where nothing was written, GPU)."""
    out = torch.full((len(made.visible.requests), columns or made.keys_of.shape[1] + 3), EMPTY)
    gpu = device("sm_100a", checks="race", **options)
    launch(code, *launch_args(kernel, call_of(made, out), splits), gpu=gpu)
    return out, gpu


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", RUNS)
def test_numbers(name):
    variant, heads, tokens, page_size, splits, *rows = RUNS[name]
    kernel, code = compiled(IndexerLogits, variant, heads, tokens, page_size)
    made = case(variant, *rows, heads=heads, page_size=page_size)
    found, gpu = run(made, kernel, code, splits)
    assert not gpu.hazards, gpu.hazards
    written = made.written(found.shape[1])
    assert (found[~written] == EMPTY).all() and made.error(found) <= 2 * made.torch_error()
    assert (code.local_bytes, code.spills) == (0, 0) and small(code)
    rows = {row.resource: row for row in kernel.budget()}
    assert all(0 < row.used <= row.limit and row.derivation for row in rows.values())
    assert code.smem_bytes == rows["SMEM: total"].used and code.threads == rows["threads"].used


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["prefill", "prefill fp4"])
def test_every_schedule_gives_the_same_bits(name):
    variant, heads, tokens, page_size, splits, *rows = RUNS[name]
    kernel, code = compiled(IndexerLogits, variant, heads, tokens, page_size)
    made, results = case(variant, *rows, heads=heads, page_size=page_size), []
    for schedule in SCHEDULES:
        found, gpu = run(made, kernel, code, splits, schedule=schedule, seed=3)
        assert not gpu.hazards
        results.append(found)
    assert all(torch.equal(one, results[0]) for one in results)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("variant", ["fp8", "fp4"])
def test_a_score_depends_on_its_token_and_key_alone(variant):
    """Tiles of one token or several, one split or three, pages of 32 or 64 keys: the same bits."""
    requests, lengths, results = [0, 0, 1, 1, 1], [255, 256, 90, 90, 91], []
    keys = torch.randn(2, 256, DIM, generator=torch.Generator().manual_seed(5))
    for tokens, splits, page_size in ((1, 3, 64), (3, 1, 32), (2, 2, 64)):
        kernel, code = compiled(IndexerLogits, variant, 64, tokens, page_size)
        made = case(variant, requests, lengths, page_size=page_size, keys=keys)
        results.append(run(made, kernel, code, splits, 256)[0])
    assert all(torch.equal(one, results[0]) for one in results)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("variant", ["fp8", "fp4"])
def test_hard_keys(variant):
    """Equal keys score equally, keys of zeros score 0, and a NaN stays with its own key."""
    keys = torch.randn(1, 1, DIM, generator=torch.Generator().manual_seed(1)).repeat(1, 140, 1)
    keys[0, 40:70] = 0.0
    keys[0, 90, 3] = float("nan")
    kernel, code = compiled(IndexerLogits, variant, 64, 1, 64)
    made = case(variant, [0], [140], keys=keys)
    row = run(made, kernel, code)[0][0, :140]
    others = torch.cat((row[:40], row[70:90], row[91:]))
    assert (others == others[0]).all() and others[0] != 0 and not row[40:70].any()
    assert row[90].isnan() and row.isnan().sum() == 1


def test_pages_past_a_length_may_be_anything():
    kernel, code = compiled(IndexerLogits, "fp8", 64, 1, 64)
    made = case("fp8", [0, 1], [64, 200])
    want, _ = run(made, kernel, code)
    made.visible.table[0, 1:] = torch.tensor([-5, 2**31 - 1, 1 << 20], dtype=torch.int32)
    found, gpu = run(made, kernel, code)
    assert not gpu.hazards and torch.equal(found, want)


SHOWS = {  # fault: run of `RUNS` that shows it, or a long one
    "NoRelu": "decode",
    "PagesInOrder": "decode fp4",
    "RunsShareKeys": "mixed runs",
    "OneScoreTooMany": "prefill",
    "KeyScalesInRows": "prefill fp4",
    "ScalesReleasedUnread": "long",
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(name):
    """By numbers, by what is written, or by the race detector; the right kernel passes the same checks."""
    long = ("fp8", 64, 1, 64, 1, [0], [1100])
    variant, heads, tokens, page_size, splits, *rows = RUNS.get(SHOWS[name], long)
    made = case(variant, *rows, heads=heads, page_size=page_size)

    def clean(kernel_type):
        kernel, code = compiled(kernel_type, variant, heads, tokens, page_size)
        found, gpu = run(made, kernel, code, splits)
        written = made.written(found.shape[1])
        right = made.error(found) <= 2 * made.torch_error() and bool((found[~written] == EMPTY).all())
        return right and not gpu.hazards

    assert clean(IndexerLogits) and not clean(FAULTS[name])


def test_bad_settings_are_named():
    for settings, name in (
        (("bf16",), "variant"),
        (("fp8", 48), "heads"),
        (("fp8", 64, 5), "tokens"),
        (("fp4", 64, 4), "tokens"),
        (("fp8", 64, 0), "tokens"),
        (("fp8", 64, 1, 16), "page_size"),
        (("fp8", 64, 1, 192), "page_size"),
    ):
        with pytest.raises(ConfigError, match=name):
            Config(*settings)
    for variant in ("fp8", "fp4"):
        for heads in (64, 128):
            Config(variant, heads, most_tokens(variant, heads))


def test_bad_arguments_are_named():
    kernel, _ = compiled(IndexerLogits, "fp8", 64, 1, 64)
    made = case("fp8", [0], [64])
    good = call_of(made, torch.empty(1, 64))
    for bad, splits, name in (
        ({"queries": made.queries._replace(codes=made.queries.codes[:, :32])}, 1, "codes"),
        ({"keys": made.keys._replace(pages=made.keys.pages[:, :99])}, 1, "pages"),
        ({}, 0, "splits"),
    ):
        with pytest.raises(ArgumentError, match=name):
            launch_args(kernel, good._replace(**bad), splits)
