"""Tiles that several share: the CTAs of a pair, tokens of a group; parts that are not normalised; dense rows."""

from dataclasses import replace

import pytest
import torch

from dsv4lib.dsl.gather import AT_ONCE
from dsv4lib.emulator.driver.device import make
from dsv4lib.emulator.driver.host import launch
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.ops.fmha.arguments import launch_args
from dsv4lib.ops.fmha.inputs import case, decode_case, paged, prefill_case
from dsv4lib.ops.fmha.sm100 import Fmha
from dsv4lib.ops.fmha.window import token_groups
from dsv4lib.pages.fmha.run_case import bits, compiled, oracle, parts, run_fmha, run_split
from dsv4lib.reference import fmha as reference
from dsv4lib.viz import ptx
from tests.budget import small

SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
FULL = pytest.mark.full
STARTS = [0, 1, 127, 128, 5000]


def settings(entries, cluster=1, groups=False, window=True, sink=True, inverse_rope=True):
    return (512, "bf16", entries, window, sink, inverse_rope, False, False, False, cluster, groups)


def counts(one, *which):
    """(warp-instructions, bytes read from L2, bytes into SMEM, MMAs) of a launch without checks."""
    outcome = run_fmha(Fmha, settings(*which), one, checks="off")
    assert outcome.right, outcome.findings()
    stats = outcome.result.stats
    return outcome.result.instructions, stats["tma_read_bytes"], stats["tma_load_bytes"], stats["mma"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("heads", [1, 65, 127, *(pytest.param(n, marks=FULL) for n in (37, 64, 100, 128))])
def test_a_pair_takes_any_number_of_heads(heads):
    """Up to 128 rows over two CTAs; pad rows never leak, also where the second CTA has no head at all."""
    outcome = run_fmha(Fmha, settings("index", 2), case(heads, [150, 0], [33, 0], seed=heads))
    assert outcome.clean, outcome.findings()
    assert not outcome.output[1].any() and bool((outcome.lse[1] == -float("inf")).all())


@pytest.mark.parametrize("entries", ["index", *(pytest.param(e, marks=FULL) for e in ("range", "none"))])
def test_a_pair_gives_the_bits_of_two_ctas(entries):
    """Scores are sums over other halves of the dimensions; where sums are exact, all bits are those of a CTA alone."""
    one = case(100, [200, 77], [128, 50])
    one = replace(one, q=(one.q * 2).round() / 2, pool=(one.pool * 2).round() / 2, span=(one.span * 2).round() / 2)
    pair, alone = (run_fmha(Fmha, settings(entries, c), one) for c in (2, 1))
    assert pair.clean and alone.clean, pair.findings() + alone.findings()
    assert bits(pair.output) == bits(alone.output) and bits(pair.lse) == bits(alone.lse)


@pytest.mark.full
@pytest.mark.parametrize("head_dim", [128, pytest.param(256, marks=FULL)])
def test_head_dimensions_of_a_pair(head_dim):
    which = (head_dim, "fp16", "index", True, True, True, False, False, False, 2)
    outcome = run_fmha(Fmha, which, case(100, [200, 77], [128, 50], head_dim=head_dim, dtype="fp16"))
    assert outcome.clean, outcome.findings()


@pytest.mark.parametrize("heads", [130, pytest.param(200, marks=FULL)])
def test_two_pairs_for_more_heads(heads):
    outcome = run_fmha(Fmha, settings("index", 2), case(heads, [150], [33]))
    assert outcome.clean, outcome.findings()


@FULL
def test_pro_decode():
    """Four tokens of DeepSeek-V4-Pro: 128 heads, 1,024 selected entries and the window, a pair a token."""
    outcome = run_fmha(Fmha, settings("index", 2), case(128, [1024] * 4, [128] * 4))
    assert outcome.clean, outcome.findings()


@pytest.mark.full
@pytest.mark.parametrize(
    ("which", "one"),
    [
        (settings("index", 2), case(128, [150, 70], [128, 33])),
        pytest.param(settings("range", 2, True), prefill_case(50, [127, 300], 3), marks=FULL),
    ],
)
def test_every_schedule_gives_the_same_bits(which, one):
    outcomes = [run_fmha(Fmha, which, one, schedule=s) for s in SCHEDULES]
    assert all(outcome.clean for outcome in outcomes), [outcome.findings() for outcome in outcomes]
    assert len({bits(outcome.output) for outcome in outcomes}) == 1
    assert len({outcome.result.schedule_hash for outcome in outcomes}) >= 4


def test_a_pair_reads_each_key_once():
    """Per 128 keys, 128 heads, entries without holes: what 512 keys more cost, after the same 512 keys.

    The first keys must be the same: how often O is rescaled depends on the numbers, most of all on the first.
    """

    def cost(heads, cluster):
        one = case(heads, [1024], [0])
        one = replace(one, index=one.index.clamp_min(0))
        both = [replace(one, count=one.count.clamp_max(n)) for n in (512, 1024)]
        both = [counts(cut, "index", cluster, False, False, False, False) for cut in both]
        return [(b - a) / 4 for a, b in zip(*both, strict=True)]

    instructions, *rest = cost(128, 2)
    assert instructions <= 8000 and rest == [128 << 10, 128 << 10, 48]
    instructions, *rest = cost(64, 1)
    assert instructions <= 5300 and rest == [128 << 10, 128 << 10, 48]  # 6,000 asked for


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("heads", "cluster"),
    [(3, 2), (20, 1), (100, 2), *(pytest.param(*x, marks=FULL) for x in ((1, 1), (20, 2), (33, 2), (64, 2)))],
)
def test_tokens_of_a_chunk_share_tiles(heads, cluster):
    """Chunks at all starts in one launch, seven tokens each: rings have wrapped, groups are not all full, rows are
    left over, and every token sees its own window and its own entries."""
    outcome = run_fmha(Fmha, settings("range", cluster, True), prefill_case(heads, STARTS, 7))
    assert outcome.clean, outcome.findings()


@pytest.mark.parametrize("cluster", [2, pytest.param(1, marks=FULL)])
def test_tokens_without_keys_in_a_group(cluster):
    """A group whose first tokens have no keys, and one that has none at all: zeros and -inf."""
    one = replace(prefill_case(20, [0, 128], 4), chunks=(4, 4))
    one.window_count[:2], one.window_first[:2] = 0, 10**6
    one.count[4:], one.window_count[4:] = 0, 0
    outcome = run_fmha(Fmha, settings("range", cluster, True), one)
    assert outcome.clean, outcome.findings()
    for nothing in (slice(0, 2), slice(4, 8)):
        assert not outcome.output[nothing].any() and bool((outcome.lse[nothing] == -float("inf")).all())


@pytest.mark.full
def test_tokens_share_tiles_of_fp8_entries():
    which = (*settings("range")[:7], True, True, 1, True)
    outcome = run_fmha(Fmha, which, paged(prefill_case(20, [127, 5000], 5), 2, 64))
    assert outcome.clean, outcome.findings()


def test_single_tokens_are_groups():
    """Requests in decode share nothing: groups of one, rings of every fill, the bits of the kernel without groups."""
    one = decode_case(20, [-1, 0, 49, 127, 5000])
    grouped, alone = (run_fmha(Fmha, settings("none", 1, g), one) for g in (True, False))
    assert grouped.clean, grouped.findings()
    assert bits(grouped.output) == bits(alone.output)


@pytest.mark.full
def test_what_sharing_saves():
    """A chunk of 24 tokens of SWA: the union of three windows instead of three windows."""
    one = prefill_case(20, [250], 24)
    shared, alone = (counts(one, "none", 1, groups) for groups in (True, False))
    tile = 64 * 1024  # of keys, or of Q; 130 rows are three tiles
    assert alone[1] == 24 * (1 + 2) * tile and shared[1] == 8 * (1 + 3) * tile
    assert shared[0] < 0.6 * alone[0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("cluster", "groups"), [(2, True), *(pytest.param(*x, marks=FULL) for x in ((2, False), (1, True)))]
)
def test_parts_join_to_the_whole(cluster, groups):
    """More splits than tiles leave parts empty."""
    one = prefill_case(40, [300, 0], 3)
    outcome = run_split(one, "range", True, 5, sharing=(cluster, groups))
    assert outcome.clean, outcome.findings()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("splits", [1, 9, pytest.param(3, marks=FULL)])
def test_raw_parts_join_to_the_whole(splits):
    """Not normalised: O, the reference of the exponents and the sum of the weights, joined by their formula."""
    one = case(70, [200, 0, 20], [128, 0, 0])
    o, state, hazards = parts(one, "index", True, splits, (1, False, True))
    assert not hazards and not o.isnan().any() and not state.isnan().any()
    joined, lse = reference.merge_raw(o.double(), *state.double().unbind(-1), one.sink.double())
    truth, true_lse = oracle(one, "index", True, True)
    assert float((joined - truth).norm() / truth.norm()) < 2e-3  # P is rounded to bf16
    assert torch.equal(lse.isinf(), true_lse.isinf())
    assert float((lse - true_lse)[true_lse.isfinite()].abs().max()) < 1e-5
    if splits == 1:  # not normalised indeed: sums of weights are no ones
        assert float(state[..., 1].max()) > 2 and float((o[0] - truth)[0].norm() / truth[0].norm()) > 0.5


@pytest.mark.parametrize("cluster", [2, pytest.param(1, marks=FULL)])
def test_dense_rows(cluster):
    """Entries gathered before, [T, K, D]: each token has its own, of which it takes the first ``count``."""
    one = case(100, [90, 70, 0], [0, 0, 0])
    width = 90
    dense = one.pool.new_full((3, width, 512), float("nan"))
    for token, count in enumerate([90, 70, 0]):
        dense[token, :count] = one.pool[:count] * (token + 1)
    kernel, code = compiled(Fmha, (512, "bf16", "range", False, False, False, False, False, False, cluster))
    ranged = replace(one, pool=dense.flatten(0, 1), first=(torch.arange(3) * width).int())
    outcome = run_fmha(Fmha, (512, "bf16", "range", False, False, False, False, False, False, cluster), ranged)
    assert outcome.clean, outcome.findings()
    o, lse = one.outputs()
    args = {"q": one.q, "window": None, "sink": None, "rope": None, "o": o, "lse": lse, "scale": one.scale}
    launch(code, *launch_args(kernel, entries=(dense, None, None, one.count), **args), gpu=make("sm_100a"))
    assert bits(o) == bits(outcome.output) and bits(lse) == bits(outcome.lse)
    for rows in (dense[:2], dense[:, 0], dense[:, :80]):
        with pytest.raises(ArgumentError, match="entries.rows"):
            launch_args(kernel, entries=(rows, None, None, one.count), **args)


def test_groups_of_chunks():
    groups = token_groups([5, 1, 2], 20)
    assert groups.dtype == torch.int32 and groups.tolist() == [[0, 3], [3, 2], [5, 1], [6, 2]]
    assert token_groups([3], 64, 2).tolist() == [[0, 2], [2, 1]]
    for call, name in (
        (lambda: token_groups([3], 65), "heads"),
        (lambda: token_groups([3], 0), "heads"),
        (lambda: token_groups([3, 0], 64), "lengths"),
        (lambda: token_groups([], 64), "lengths"),
    ):
        with pytest.raises(ArgumentError, match=name):
            call()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("which", [settings("index", 2), settings("range", 2, True)])
def test_what_the_compiler_says(which):
    kernel, code = compiled(Fmha, which)
    assert (code.local_bytes, code.spills) == (0, 0)
    assert code.registers * code.threads <= 65_536
    budget = {row.resource: row for row in kernel.budget()}
    assert code.smem_bytes == budget["SMEM: total"].used and code.threads == budget["threads"].used
    assert small(code)
    assert ptx.count(code.ptx, "tcgen05.mma.cta_group::2") == kernel.chunks * 2 + 8
    gathered = 2 * kernel.stage_chunks + kernel.chunks * kernel.groups  # entries, window, Q; by 4 groups of 4 rows or 1
    assert code.ptx.count("gather4.mbarrier::complete_tx::bytes.cta_group::2") == (AT_ONCE + 1) * gathered


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cluster", {"cluster": 4}),
        ("cluster", {"cluster": 2, "head_dim": 64}),
        ("groups", {"groups": True}),
        ("raw", {"raw": True, "sink": False}),
    ],
)
def test_bad_configurations_are_named(name, options):
    with pytest.raises(ConfigError, match=name):
        Fmha(**options)


def test_bad_groups_are_named():
    kernel, one = Fmha(*settings("none", 1, True)), prefill_case(20, [5], 4)
    o, lse = one.outputs()
    window, rope = (one.span, None, one.window_first, one.window_count), (one.cos, one.sin)
    good = one.groups(1)
    launch_args(kernel, one.q, None, window, one.sink, rope, o, lse, 1.0, groups=good)
    for groups in (None, good.long(), good[:, :1], good[0]):
        with pytest.raises(ArgumentError, match="groups"):
            launch_args(kernel, one.q, None, window, one.sink, rope, o, lse, 1.0, groups=groups)
    with pytest.raises(ArgumentError, match="groups"):
        alone = Fmha(*settings("none"))
        launch_args(alone, one.q, None, window, one.sink, rope, o, lse, 1.0, groups=good)
