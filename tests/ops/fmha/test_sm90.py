"""Hopper's attention over 584-byte entries: fp64, every kind of keys, splits, schedules, the op, faults, budget."""

from dataclasses import replace

import pytest
import torch

from dsv4lib import backends
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.ops.fmha.inputs import case, decode_case, paged, prefill_case
from dsv4lib.ops.fmha.op import Fp8Pages, Rows, Selected, fmha
from dsv4lib.ops.fmha.sm90.arguments import fake_args
from dsv4lib.ops.fmha.sm90.faults import CAUGHT_BY, FAULTS
from dsv4lib.ops.fmha.sm90.kernel import DecodeFmha
from dsv4lib.ops.fmha.sm90.launch import choose_splits
from dsv4lib.pages.fmha.run_case import bits
from tests.budget import built, small
from tests.cases import cases
from tests.ops.fmha.hopper import ARCH, PLAIN, run

RUNS = {  # options, case
    "Flash CSA, one head block": ({}, paged(case(64, [70, 0], [128, 5]), 64, seed=3)),
    "odd heads, rotated": ({"inverse_rope": True}, paged(case(37, [200], [33], seed=2), 48)),
    "window by index, no sink": ({"window_index": True, "sink": False}, paged(case(8, [3, 65], [64, 128]), 2, 64, 16)),
    "window alone": ({"entries": "none"}, paged(decode_case(16, [-1, 0, 126, 5000]), 64)),
    "no window": ({"window": False}, paged(case(64, [130], [0], seed=4), 100)),
    "ranges": ({"entries": "range"}, paged(prefill_case(20, [5000], 2), 2, 64)),
    "lists shorter than a tile": ({}, paged(case(20, [9, 3], [33, 128], seed=9), 64)),
    "Pro": ({}, paged(case(128, [150], [40], seed=5), 64, seed=1)),
}
LONG = {
    "one head": ({}, paged(case(1, [70, 0, 3], [3, 0, 128]), 2, 64)),
    "Flash, whole lists": ({"inverse_rope": True}, paged(case(64, [512, 512], [128, 128]), 64, seed=3)),
    "4 producer warps": ({"producer_warps": 4}, paged(case(37, [200, 3], [33, 70], seed=2), 48)),
    "nothing early": ({"early": False}, paged(case(37, [200, 3], [33, 70], seed=2), 48)),
    "ranges, ends of chunks": ({"entries": "range"}, paged(prefill_case(64, [0, 127, 5000], 2), 2, 64)),
}
SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
pytestmark = pytest.mark.filterwarnings("error:the emulator reports")  # hazards


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", cases(*RUNS, full=LONG))
def test_numbers(name):
    """Against fp64; no report, nothing written past the last head, nothing spilled, sizes as budgeted."""
    outcome = run(*(RUNS | LONG)[name])
    assert outcome.clean, outcome.findings()
    done, rows = outcome.compiled, {row.resource: row for row in outcome.kernel.budget()}
    assert (done.local_bytes, done.spills) == (0, 0) and small(done)
    assert (done.smem_bytes, done.threads) == (rows["SMEM: total"].used, rows["threads"].used)
    assert all(0 < row.used <= row.limit and row.derivation for row in rows.values())


@pytest.mark.parametrize("splits", cases(3, full=(2, 7)))
def test_splits_join_to_the_whole(splits):
    """More splits than some tokens have tiles; the first has no keys."""
    one = paged(case(64, [0, 200], [0, 33], seed=6), 64)
    outcome = run({"sink": False, "partial": True}, one, splits=splits)
    assert outcome.right and outcome.hazards == [], outcome.findings()


@pytest.mark.full
def test_what_is_asked_for_early_is_not_asked_for_twice():
    """Lists as long as they can be: every early index is one that is needed, and a thread without keys loads none."""
    one = paged(case(64, [256], [128], top_k=256), 64)
    options = {"sink": False, "partial": True}
    early, late = (
        run({**options, "early": given}, one, splits=3, checks="race,counters").result.stats["global_sectors"]
        for given in (True, False)
    )
    assert early == late > 0


def test_every_schedule_gives_the_same_bits():
    one = paged(case(64, [140], [33]), 48)
    outcomes = [run({}, one, schedule=schedule) for schedule in SCHEDULES]
    assert all(outcome.clean for outcome in outcomes), [outcome.findings() for outcome in outcomes]
    assert len({bits(outcome.output) for outcome in outcomes}) == 1


def test_nothing_is_read_that_is_not_selected():
    """A list of holes with two entries, past which the pool is NaN."""
    one = paged(case(64, [130], [0], top_k=130), 48)
    kept = one.index[0, one.index[0] >= 0][:2]
    index = torch.full_like(one.index, -1)
    index[0, 5], index[0, 129] = kept
    outcome = run({"window": False}, replace(one, index=index))
    assert outcome.clean, outcome.findings()


def keys_of(one, counts=None):
    entries = Selected(Fp8Pages(*one.pool_pages), one.index, one.count)
    window = Rows(Fp8Pages(*one.span_pages), one.window_first, one.window_count if counts is None else counts)
    return entries, window


@pytest.mark.one_in(2)
@pytest.mark.parametrize("splits", [1, None])
def test_the_op_with_padded_rows(splits):
    """Alone and with as many splits as it chooses; a padded row has poison for q and lists, and lengths of -1."""
    one = paged(case(64, [70, 9, 130], [33, 7, 0], seed=8), 64)
    one.q[1], one.index[1] = float("nan"), 1 << 30
    one.count[1] = one.window_count[1] = -1
    found = {}
    for backend in ("reference", "emulator"):
        with backends.emulating(ARCH):
            rope = one.cos, one.sin
            found[backend] = fmha(one.q, *keys_of(one), sink=one.sink, rope=rope, splits=splits, backend=backend)
    (o, lse), (want, want_lse) = found["emulator"], found["reference"]
    assert torch.equal(o[1], torch.zeros_like(o[1])) and bool((lse[1] == -torch.inf).all())
    there = [0, 2]
    assert torch.allclose(lse[there], want_lse[there], rtol=1e-5, atol=1e-5)
    wrong = o[there].double() - want[there].double()
    assert float(wrong.norm() / want[there].double().norm()) < 2.7e-3  # as beside transformers (tests/parity)


def test_what_a_hopper_lacks_is_refused_by_name():
    one = paged(case(16, [9], [5]), 64)
    entries, window = keys_of(one)
    rows = Rows(one.span, one.window_first, one.window_count)
    groups = torch.tensor([[0, 1]], dtype=torch.int32)
    ranges = Rows(Fp8Pages(*one.pool_pages), one.first, one.count)
    with backends.emulating(ARCH):
        for name, given, options in (
            ("window.pool", (entries, rows), {}),
            ("groups", (ranges, window), {"groups": groups}),
            ("normalise", (entries, window), {"normalise": False}),
        ):
            with pytest.raises(ArgumentError, match=f"{name}.* on {ARCH}"):
                fmha(one.q, *given, backend="emulator", **options)
        with pytest.raises(ArgumentError, match=f"q.* on {ARCH}"):
            small_keys = Rows(torch.zeros(9, 64).bfloat16(), one.first, one.count)
            fmha(torch.zeros(1, 2, 64).bfloat16(), small_keys, backend="emulator")


def test_splits_follow_from_shapes():
    """One token of Flash fills as many SMs as it has tiles; 128 tokens are not split."""
    assert choose_splits(1, 64, 512, 128, 132) == 10
    assert choose_splits(128, 64, 512, 128, 132) == 1
    assert choose_splits(8, 64, 0, 128, 132) <= 2


def test_a_tile_takes_so_many_instructions():
    """Warp-instructions from the difference of 1,024 and 512 keys; FlashMLA's kernel has 9,390 for 64."""
    runs = []
    for keys in (512, 1024):
        one = case(64, [keys], [0])
        one = paged(replace(one, index=torch.arange(keys, dtype=torch.int32)[None]), 64)
        runs.append(run({"window": False}, one).result.instructions)
    assert (runs[1] - runs[0]) / 8 < 9_390


FOUND_BY_DEFAULT = "NoProxyFence", "EveryKeyCounts", "HastyEnd", "BlindGuess"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", cases(*FOUND_BY_DEFAULT, full=("OwnSum", "FirstAngles")))
def test_faults_are_found(name):
    options, one = {"inverse_rope": True}, paged(case(64, [70, 3], [33, 20]), 48)
    outcome = run(options, one, FAULTS[name])
    kinds = {hazard.kind for hazard in outcome.hazards}
    assert CAUGHT_BY[name] in kinds | ({"wrong numbers"} if not outcome.right else set()), outcome.findings()
    assert run(options, one).clean


def test_every_fault_has_its_finder():
    assert set(FAULTS) == set(CAUGHT_BY)


@pytest.mark.parametrize("options", cases({}, full=({"partial": True, "sink": False}, {"entries": "none"})))
def test_nothing_is_spilled(options):
    """A spill would also have ptxas wait for every MMA by itself."""
    _, done = built(DecodeFmha, fake_args, ARCH, **PLAIN | options)
    assert (done.local_bytes, done.spills) == (0, 0) and "setmaxnreg.inc" in done.ptx


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"entries": "all"}, "entries"),
        ({"entries": "none", "window": False, "window_index": False}, "window"),
        ({"window": False, "window_index": True}, "window_index"),
        ({"partial": True, "sink": True}, "partial"),
    ],
)
def test_options_that_do_not_exist(options, name):
    with pytest.raises(ConfigError) as error:
        DecodeFmha(**options)
    assert error.value.name == name
