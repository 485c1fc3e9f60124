"""Hopper's attention of many tokens: fp64, the bits of the kernel of few, schedules, the op, faults, budget."""

from dataclasses import replace

import pytest
import torch

from dsv4lib import backends
from dsv4lib.formats import kv_entry
from dsv4lib.ops.common import splits as split_choice
from dsv4lib.ops.fmha.inputs import case, decode_case, paged, prefill_case
from dsv4lib.ops.fmha.op import Fp8Pages, Rows, Selected, fmha
from dsv4lib.ops.fmha.sm90.arguments import fake_args
from dsv4lib.ops.fmha.sm90.kernel import DecodeFmha
from dsv4lib.ops.fmha.sm90.launch import choose_splits
from dsv4lib.ops.fmha.sm90.prefill.faults import CAUGHT_BY, FAULTS
from dsv4lib.ops.fmha.sm90.prefill.kernel import PrefillFmha
from dsv4lib.pages.fmha import run_case
from dsv4lib.pages.fmha.run_case import bits
from tests.budget import built, small
from tests.cases import cases
from tests.ops.fmha.hopper import ARCH, PLAIN, run

TIES = case(64, [70, 9], [33, 40], seed=7)
RUNS = {  # options, case, CTAs of a block of heads
    "tokens of 0 to 5 tiles": ({"inverse_rope": True}, paged(case(37, [200, 0, 70], [33, 0, 128], seed=2), 48), 1),
    "all scores equal": ({}, paged(replace(TIES, q=torch.zeros_like(TIES.q)), 64), 2),
    "window alone, more CTAs than tokens": ({"entries": "none"}, paged(decode_case(16, [-1, 126]), 64), 3),
}
LONG = {
    "Flash CSA": ({}, paged(case(64, [70, 0], [128, 5]), 64, seed=3), 1),
    "window by index, no sink": (
        {"window_index": True, "sink": False},
        paged(case(8, [3, 65], [64, 128]), 2, 64, 16),
        1,
    ),
    "no window": ({"window": False}, paged(case(64, [130, 64], [0, 0], seed=4), 100), 1),
    "ranges": ({"entries": "range"}, paged(prefill_case(20, [0, 5000], 3), 2, 64), 2),
    "Pro": ({}, paged(case(128, [150, 60], [40, 128], seed=5), 64, seed=1), 1),
    "4 producer warps": ({"producer_warps": 4}, paged(case(37, [200, 3], [33, 70], seed=2), 48), 1),
    "nothing early": ({"early": False}, paged(case(37, [200, 3], [33, 70], seed=2), 48), 1),
    "whole lists": ({"inverse_rope": True}, paged(case(64, [512, 512], [128, 128]), 64, seed=3), 1),
    "one key takes all": ({}, paged(replace(TIES, q=TIES.q * 8), 64), 1),
}
# The tensor core cuts a sum to 23 fraction bits 32 times on the way to a score. Where one key takes all, that is the
# error of the LSE, of the size of the score; over many keys it averages out (`run_case.LSE_TOLERANCE`).
LSE_BOUNDS = {"one key takes all": 32 * 2.0**-23}
SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
pytestmark = pytest.mark.filterwarnings("error:the emulator reports")  # hazards


def right(outcome, name):
    """Whether O and LSE of a case are as near to fp64 as its sums can be."""
    done = outcome.error is None and outcome.factor.passed
    return done and outcome.lse_error <= LSE_BOUNDS.get(name, run_case.LSE_TOLERANCE)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", cases(*RUNS, full=LONG))
def test_numbers(name):
    """Against fp64 and bit for bit against the kernel of few tokens; no report, nothing past the last head."""
    options, one, ctas = (RUNS | LONG)[name]
    outcome = run(options, one, PrefillFmha, ctas=ctas)
    assert right(outcome, name) and not outcome.hazards and not outcome.guards_written, outcome.findings()
    few = run(options, one)
    assert torch.equal(outcome.output, few.output) and torch.equal(outcome.lse, few.lse)


@pytest.mark.parametrize("options", cases({"inverse_rope": True}, full=({}, {"entries": "none"}, {"entries": "range"})))
def test_budget(options):
    """Nothing is spilled, which would also have ptxas wait for every MMA by itself; sizes are as computed."""
    kernel, done = built(PrefillFmha, fake_args, ARCH, **PLAIN | options)
    assert (done.local_bytes, done.spills) == (0, 0) and small(done) and "setmaxnreg.inc" in done.ptx
    rows = {row.resource: row for row in kernel.budget()}
    assert (done.smem_bytes, done.threads) == (rows["SMEM: total"].used, rows["threads"].used)
    assert all(0 < row.used <= row.limit and row.derivation for row in rows.values())


def test_every_schedule_gives_the_same_bits():
    """Two tokens of a CTA, of three and two tiles."""
    one = paged(case(64, [140, 3], [33, 70]), 48)
    outcomes = [run({}, one, PrefillFmha, schedule=schedule) for schedule in SCHEDULES]
    assert all(outcome.clean for outcome in outcomes), [outcome.findings() for outcome in outcomes]
    assert len({bits(outcome.output) for outcome in outcomes}) == 1


def entries_of_all_codes():
    """256 entries: bytes of every number of E4M3, scales of 0 to 240 (NaN codes have scales of 255)."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.stack([torch.randperm(256, generator=generator) for _ in range(512)]).T[:, :448].contiguous()
    codes[codes % 128 == 127] = 5
    scales = torch.randint(0, 119, (256, 7), generator=generator)
    scales[::2] = torch.tensor([127, 128, 134, 135, 142, 0, 119])
    rope = torch.randn(256, 64, generator=generator).bfloat16().view(torch.uint8)
    data = torch.cat((codes.to(torch.uint8), rope), 1)
    return data, torch.nn.functional.pad(scales, (0, 1), value=255).to(torch.uint8)


@pytest.mark.full
@pytest.mark.parametrize("tokens", [5])
def test_one_key_is_its_value(tokens):
    """P is 1, so O is the entry, bit for bit: every code, scales on both sides of what one factor makes, NaN."""
    data, scales = entries_of_all_codes()
    scales[4, 3] = 255
    pages = kv_entry.LAYOUT.allocate(4, 64)
    kv_entry.LAYOUT.write(pages, 64, torch.arange(256), data, scales)
    want, _ = kv_entry.gather(pages, 64, torch.arange(tokens))
    q = torch.zeros(tokens, 1, 512).bfloat16()
    count, first = torch.ones(tokens, dtype=torch.int32), torch.arange(tokens, dtype=torch.int32)
    with backends.emulating(ARCH):
        o, lse = fmha(q, Rows(Fp8Pages(pages, 64), first, count), splits=1, backend="emulator")
    assert torch.equal(o[:4, 0], want[:4]) and not lse[:4].any()
    assert bool(want[4].isnan().any()) and bool(o[4].isnan().all())


def keys_of(one):
    entries = Selected(Fp8Pages(*one.pool_pages), one.index, one.count)
    return entries, Rows(Fp8Pages(*one.span_pages), one.window_first, one.window_count)


def test_the_op_with_padded_rows(monkeypatch):
    """On two emulated SMs; a padded row has poison for q and lists, and lengths of -1."""
    one = paged(case(64, [70, 9, 130], [33, 7, 0], seed=8), 64)
    one.q[1], one.index[1] = float("nan"), 1 << 30
    one.count[1] = one.window_count[1] = -1
    few = one.q.new_empty(one.q.shape)
    with backends.emulating(ARCH):
        given = {"sink": one.sink, "rope": (one.cos, one.sin), "splits": 1, "backend": "emulator"}
        fmha(one.q, *keys_of(one), **given, o=few)
        monkeypatch.setattr(split_choice, "HOPPER_SM_COUNT", 2)
        o, lse = fmha(one.q, *keys_of(one), **given)
    assert torch.equal(o, few) and not o[1].any() and bool((lse[1] == -torch.inf).all())


def test_what_calls_are_not_split():
    """Two tiles never are; a batch of 128 and a chunk of prefill fill the GPU."""
    assert [choose_splits(tokens, 64, 0, 128, 132) for tokens in (1, 8, 32, 128)] == [1] * 4
    assert choose_splits(128, 64, 512, 128, 132) == choose_splits(128, 128, 1024, 128, 132) == 1
    assert choose_splits(4096, 64, 512, 128, 132) == 1


@pytest.mark.full
def test_a_tile_takes_fewer_instructions_than_in_the_kernel_of_few_tokens():
    """Warp-instructions from the difference of 512 and 256 keys."""
    found = {}
    for kind in (PrefillFmha, DecodeFmha):
        runs = []
        for keys in (256, 512):
            one = case(64, [keys], [0])
            one = paged(replace(one, index=torch.arange(keys, dtype=torch.int32)[None]), 64)
            runs.append(run({"window": False}, one, kind).result.instructions)
        found[kind] = (runs[1] - runs[0]) / 4
    assert found[PrefillFmha] < 0.95 * found[DecodeFmha]


FOUND_BY_DEFAULT = "NoProxyFence", "HastyP", "OwnMaximum", "OddSplits"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", cases(*FOUND_BY_DEFAULT, full=("HastyQueries", "LastTileLost")))
def test_faults_are_found(name):
    options, one = {}, paged(case(64, [150, 3], [33, 70], seed=3), 48)
    given = {"splits": 2} if name == "OddSplits" else {}
    if given:
        options = {"sink": False, "partial": True}
    outcome = run(options, one, FAULTS[name], **given)
    kinds = {hazard.kind for hazard in outcome.hazards}
    assert CAUGHT_BY[name] in kinds | ({"wrong numbers"} if not outcome.right else set()), outcome.findings()
    assert run(options, one, PrefillFmha, **given).clean


def test_every_fault_has_its_finder():
    assert set(FAULTS) == set(CAUGHT_BY)


@pytest.mark.full
@pytest.mark.parametrize("splits", cases(3, full=(2, 7)))
def test_splits_join_to_the_whole(splits):
    """Splits of whole pairs: more than some tokens have; the first has no keys, the last's window starts in a pair."""
    one = paged(case(37, [0, 200, 330], [0, 33, 128], seed=6), 64)
    outcome = run({"sink": False, "partial": True}, one, PrefillFmha, splits=splits, ctas=2)
    assert outcome.right and outcome.hazards == [], outcome.findings()
