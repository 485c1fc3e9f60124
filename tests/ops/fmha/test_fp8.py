"""Attention straight from pages of 584-byte entries: the same bits as from their dequantised rows, and fp64 agrees."""

from dataclasses import replace

import pytest
import torch

from dsv4lib.dsl.gather import AT_ONCE
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.ops.fmha.arguments import launch_args
from dsv4lib.ops.fmha.inputs import case, decode_case, paged, prefill_case
from dsv4lib.ops.fmha.sm100 import Fmha
from dsv4lib.pages.fmha.run_case import bits, compiled, run_fmha, run_split
from dsv4lib.viz import ptx
from tests.budget import small
from tests.cases import cases

SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
ALL = (512, "bf16", "index", True, True, True, False)  # before the two switches
BOTH = (*ALL, True, True)
SWITCHES = cases((True, True), (False, True), full=[((True, False),)])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("cluster", cases(2, full=[1]))
@pytest.mark.parametrize("switches", SWITCHES)
def test_the_bits_of_the_dequantised_rows(switches, cluster):
    """FP8 entries, window or both, in one CTA or two: dequantisation is exact, so nothing may differ from the 16-bit
    kernel."""
    one = paged(case(100, [200, 77, 0], [128, 50, 0]), 48)
    outcome, plain = (run_fmha(Fmha, (*ALL, *fp8, cluster), one) for fp8 in (switches, (False, False)))
    assert outcome.clean, outcome.findings()
    assert bits(outcome.output) == bits(plain.output) and bits(outcome.lse) == bits(plain.lse)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("page_size", "padding"), [(1, 0), (2, 16), (32, 0), (48, 1024 + 16), (64, 0), (100, 64)])
def test_any_page_and_stride(page_size, padding):
    one = paged(case(64, [150, 70], [33, 90]), page_size, 7, padding)
    outcome = run_fmha(Fmha, BOTH, one)
    assert outcome.clean, outcome.findings()


def test_pages_in_any_order_give_the_same_bits():
    """Only the numbers of the pages change, and with them the index lists."""
    outcomes = [run_fmha(Fmha, BOTH, paged(case(64, [150, 70], [33, 90]), 32, seed=seed)) for seed in (None, 1, 2)]
    assert all(outcome.clean for outcome in outcomes), [outcome.findings() for outcome in outcomes]
    assert len({bits(outcome.output) for outcome in outcomes}) == 1
    assert len({bits(outcome.inputs[0].index) for outcome in outcomes}) == 3


@pytest.mark.parametrize("top_k", [0, 1, 63, 64, 65, 513, 2048])
def test_any_number_of_entries(top_k):
    outcome = run_fmha(Fmha, BOTH, paged(case(64, [top_k], [5], seed=top_k), 64))
    assert outcome.clean, outcome.findings()


@pytest.mark.parametrize("heads", [1, 16, 37, 100, 128])
def test_any_number_of_heads(heads):
    outcome = run_fmha(Fmha, BOTH, paged(case(heads, [70, 0, 3], [3, 0, 128], seed=heads), 2, 64))
    assert outcome.clean, outcome.findings()


@pytest.mark.full
def test_rings_and_spans_of_entries():
    """The window alone in decode (rings of 128 slots, some never written) and with ranges of entries in prefill."""
    rings = paged(decode_case(64, [-1, 0, 49, 126, 127, 5000]), 64)
    outcome = run_fmha(Fmha, (512, "bf16", "none", True, True, False, False, False, True), rings)
    assert outcome.clean, outcome.findings()
    chunks = paged(prefill_case(64, [0, 127, 5000], 2), 2, 64)
    outcome = run_fmha(Fmha, (512, "bf16", "range", True, True, False, False, True, True), chunks)
    assert outcome.clean, outcome.findings()


def test_nothing_is_read_that_is_not_selected():
    """A list of holes with one entry, past which the pool is NaN; stale registers of the entry are no keys."""
    one = paged(case(64, [130], [0], top_k=130), 48)
    kept = one.index[0, one.index[0] >= 0][:2]
    index = torch.full_like(one.index, -1)
    index[0, 5], index[0, 129] = kept
    outcome = run_fmha(Fmha, (*ALL[:3], False, False, False, False, True), replace(one, index=index))
    assert outcome.clean, outcome.findings()


@pytest.mark.full
@pytest.mark.parametrize(("splits", "cluster"), cases((3, 2), full=[(1, 1), (7, 1)]))
def test_parts_join_to_the_whole(splits, cluster):
    one = paged(case(64, [300, 0, 20], [128, 90, 0]), 48)
    outcome = run_split(one, "index", True, splits, sharing=(cluster,))
    assert outcome.clean, outcome.findings()


@pytest.mark.full  # test_sharing.py has FP8 entries, too
def test_tokens_of_a_chunk_share_tiles_of_entries():
    """Rows of several tokens in a tile, over two CTAs: 16 heads, 8 tokens."""
    chunks = paged(prefill_case(16, [0, 120, 5000], 10), 2, 64)
    outcome = run_fmha(Fmha, (512, "bf16", "range", True, True, False, False, True, True, 2, True), chunks)
    assert outcome.clean, outcome.findings()


@pytest.mark.parametrize("cluster", [1, 2])
def test_every_schedule_gives_the_same_bits(cluster):
    one = paged(case(100, [230, 70], [128, 33]), 48)
    outcomes = [run_fmha(Fmha, (*BOTH, cluster), one, schedule=s) for s in SCHEDULES]
    assert all(outcome.clean for outcome in outcomes), [outcome.findings() for outcome in outcomes]
    assert len({bits(outcome.output) for outcome in outcomes}) == 1
    assert len({outcome.result.schedule_hash for outcome in outcomes}) >= 4


@pytest.mark.full
@pytest.mark.parametrize("cluster", cases(2, full=[1]))
def test_what_128_keys_cost(cluster):
    """Warp-instructions from the difference of 1,024 and 512 keys without holes, beside the 16-bit kernel's.

    16 parts of 8 keys at 81 (conversions, loads, stores) make 1,296 of the difference, once for both CTAs of a pair;
    of 64 heads the load warps, which have nothing to send, save up to 500.
    """
    cost = {}
    for fp8 in (False, True):
        settings = (*ALL[:3], False, False, False, False, fp8, False, cluster)
        runs = []
        for keys in (512, 1024):
            one = case(64 * cluster, [keys], [0])
            one = paged(replace(one, index=torch.arange(keys, dtype=torch.int32)[None]), 64)
            runs.append(run_fmha(Fmha, settings, one).result.instructions)
        cost[fp8] = (runs[1] - runs[0]) / 4
    more = cost[True] - cost[False]
    if cluster == 1:
        assert cost[True] < 6_000 and 796 < more < 2_200
    else:
        assert cost[True] < 9_972 and 1_296 < more < 2_700  # 128 heads; FlashInfer's FP8 kernel: 9,972


@pytest.mark.one_in(2)
@pytest.mark.parametrize("switches", SWITCHES)
def test_what_the_compiler_says(switches):
    kernel, code = compiled(Fmha, (*ALL, *switches))
    assert (code.local_bytes, code.spills) == (0, 0)
    assert code.registers * code.threads <= 65_536
    budget = {row.resource: row for row in kernel.budget()}
    assert code.smem_bytes == budget["SMEM: total"].used and code.threads == budget["threads"].used
    alone = Fmha(*ALL)
    assert kernel.kv_stages * kernel.stage_bytes == alone.kv_stages * alone.stage_bytes  # raw bytes take no SMEM
    assert small(code)
    counts = {
        "cvt.rn.scaled::n2::ue8m0.bf16x2.e4m3x2": 2 * 7 * 8,  # 2 parts x 7 groups x 16 dims
        "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4": (AT_ONCE + 1) * 8 * (2 - sum(switches)),
        "ld.local": 0,
        "st.local": 0,
    }
    assert {name: ptx.count(code.ptx, name) for name in counts} == counts


@pytest.mark.one_in(2)
@pytest.mark.parametrize("cluster", cases(2, full=[1]))
@pytest.mark.parametrize(
    ("keys", "ends"),
    cases(
        (("index", False, True, False), False),
        (("range", True, False, True), True),
        full=[
            (("index", False, True, False), True),
            (("range", True, False, True), False),
            (("index", True, True, False), False),
            (("index", True, True, False), True),
            (("none", True, False, True), False),
            (("none", True, False, True), True),
        ],
    ),
)
def test_no_local_memory(keys, ends, cluster):
    entries, window, *fp8 = keys
    _, code = compiled(Fmha, (512, "bf16", entries, window, ends, ends, not ends, *fp8, cluster))
    assert (code.local_bytes, code.spills) == (0, 0) and code.registers * code.threads <= 65_536


@pytest.mark.parametrize(
    "settings",
    [
        {"head_dim": 256, "fp8_entries": True},
        {"dtype": "fp16", "fp8_window": True},
        {"entries": "none", "fp8_entries": True},
        {"window": False, "fp8_window": True},
    ],
)
def test_bad_configurations_are_named(settings):
    with pytest.raises(ConfigError, match="fp8_"):
        Fmha(**settings)


def test_bad_pools_are_named():
    kernel, one = Fmha(*BOTH), paged(case(5, [9], [3]), 48)
    o, lse = one.outputs()
    pages, size = one.pool_pages

    def args(entries, window):
        rest = (one.sink, (one.cos, one.sin), o, lse, 1.0)
        keys = (entries, one.index, None, one.count), (window, None, one.window_first, one.window_count)
        return launch_args(kernel, one.q, *keys, *rest)

    args(one.pool_pages, one.span_pages)
    shifted = torch.zeros(pages.numel() + 16, dtype=torch.uint8)[8 : 8 + pages.numel()].view_as(pages)
    odd = torch.zeros(pages.shape[0], pages.shape[1] + 8, dtype=torch.uint8)[:, :-8]
    bad = [one.pool, pages, (pages.char(), size), (pages[0], size), (pages, 0), (pages, 1.0), (pages, size + 2)]
    for pool in [*bad, (shifted, size), (odd, size), (pages[:, ::2], size // 2), (pages[:0], size)]:
        with pytest.raises(ArgumentError, match=r"entries\.rows|page_size"):
            args(pool, one.span_pages)
        with pytest.raises(ArgumentError, match=r"window\.rows|page_size"):
            args(one.pool_pages, pool)
