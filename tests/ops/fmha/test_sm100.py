"""The attention kernel at the model's sizes and around them: numbers, checks, schedules, budgets, bad arguments."""

from dataclasses import replace

import pytest
import torch

from dsv4lib.dsl.gather import AT_ONCE
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.ops.fmha.arguments import launch_args
from dsv4lib.ops.fmha.inputs import case
from dsv4lib.ops.fmha.sm100 import Fmha
from dsv4lib.pages.fmha.run_case import bits, compiled, run_fmha, run_split
from dsv4lib.viz import ptx
from tests.budget import small
from tests.cases import cases

SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
FULL = (512, "bf16", "index", True, True, True)  # all that a CSA layer needs


@pytest.mark.parametrize(
    "settings", [FULL, (512, "bf16", "range", True, True, False), (512, "fp16", "index", False, False)]
)
def test_kinds_of_keys(settings):
    """Two tokens with lists of different length that share some rows; windows of one tile and of two."""
    outcome = run_fmha(Fmha, settings, case(64, [200, 77], [128, 50], dtype=settings[1]))
    assert outcome.clean, outcome.findings()


def test_window_only():
    """Mixed fills in one launch, none among them: zeros and -inf."""
    outcome = run_fmha(Fmha, (512, "bf16", "none", True, True), case(64, [0] * 5, [0, 1, 50, 127, 128]))
    assert outcome.clean, outcome.findings()
    assert not outcome.output[0].any() and bool((outcome.lse[0] == -float("inf")).all())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("heads", [1, 16, 37, 100, 128])
def test_any_number_of_heads(heads):
    outcome = run_fmha(Fmha, FULL, case(heads, [70], [3], seed=heads))
    assert outcome.clean, outcome.findings()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("top_k", [0, 1, 63, 64, 65, 513])
def test_any_number_of_entries(top_k):
    outcome = run_fmha(Fmha, FULL, case(64, [top_k], [5], seed=top_k))
    assert outcome.clean, outcome.findings()


@pytest.mark.full
@pytest.mark.parametrize("head_dim", cases(128, full=[64, 256]))
def test_head_dimensions(head_dim):
    outcome = run_fmha(Fmha, (head_dim, *FULL[1:]), case(64, [200, 77], [128, 50], head_dim=head_dim))
    assert outcome.clean, outcome.findings()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("keys", [128, 256, 1024, 4096])
def test_nothing_is_lost_from_tile_to_tile(keys):
    outcome = run_fmha(Fmha, (512, "bf16", "range", False, False), case(64, [keys], [0]))
    assert outcome.clean, outcome.findings()
    assert outcome.rel_l2 < 2.7e-3  # bf16 of P and O: 1.7e-3 each rounding


def test_neighbours_with_disjoint_selections_get_their_own_keys():
    one = case(64, [64, 64], [1, 1])
    half = torch.arange(one.pool.shape[0] - 8)
    one.index[0], one.index[1] = half[:32].repeat(2), half[-32:].repeat(2)
    outcome = run_fmha(Fmha, FULL, one)
    assert outcome.clean, outcome.findings()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sink", [float("-inf"), 80.0, 1e4, float("inf")])
def test_sinks_at_the_ends(sink):
    """-inf is no sink, a large one takes everything: 0, never NaN."""
    one = case(64, [70], [30])
    one.sink[::2] = sink
    outcome = run_fmha(Fmha, FULL, one)
    assert outcome.clean, outcome.findings()


def apart(q, how):
    """The same Q with its rows elsewhere, NaN between them."""
    tokens, heads, depth = q.shape
    if how == "one head of each token in turn":
        return q.transpose(0, 1).contiguous().transpose(0, 1)
    after, between = {"fused with other projections": (64, 0), "every other row": (0, depth)}[how]
    room = q.new_full((tokens, heads * (depth + between) + after), float("nan"))
    rows = room[:, : heads * (depth + between)].unflatten(1, (heads, -1))[..., :depth]
    return rows.copy_(q)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("how", ["fused with other projections", "every other row", "one head of each token in turn"])
@pytest.mark.parametrize("cluster", [1, 2])
def test_q_is_read_where_it_lies(how, cluster):
    """Q comes by TMA as rows of one matrix, whatever the strides of tokens and heads are."""
    one = case(37, [70, 64, 9], [33, 0, 3])
    one = replace(one, q=apart(one.q, how))
    assert not one.q.is_contiguous()
    outcome = run_fmha(Fmha, (*FULL, False, False, False, cluster), one)
    assert outcome.clean, outcome.findings()


def test_a_rising_maximum_rescales():
    """Later keys with much larger scores: every tile moves the reference, O is rescaled each time."""
    one = case(64, [320], [0], top_k=320)
    one.pool[:-1] *= torch.linspace(0.01, 8, one.pool.shape[0] - 1)[:, None]
    one.index[0] = torch.arange(320)
    outcome = run_fmha(Fmha, FULL, one)
    assert outcome.clean, outcome.findings()


@pytest.mark.full
def test_pro_decode():
    """Four tokens of DeepSeek-V4-Pro: 128 heads, 1,024 selected entries and the window."""
    outcome = run_fmha(Fmha, FULL, case(128, [1024] * 4, [128] * 4))
    assert outcome.clean, outcome.findings()


@pytest.mark.full
def test_flash_prefill():
    """64 tokens of DeepSeek-V4-Flash: 64 heads, 512 selected entries, windows that fill up from the first token on."""
    outcome = run_fmha(Fmha, FULL, case(64, [512] * 64, [min(t + 100, 128) for t in range(64)]), checks="default")
    assert outcome.clean, outcome.findings()


def test_every_schedule_gives_the_same_bits():
    outcomes = [run_fmha(Fmha, FULL, case(64, [150, 70], [128, 33]), schedule=s) for s in SCHEDULES]
    assert all(outcome.clean for outcome in outcomes), [outcome.findings() for outcome in outcomes]
    assert len({bits(outcome.output) for outcome in outcomes}) == 1
    assert len({outcome.result.schedule_hash for outcome in outcomes}) >= 4


def test_a_token_does_not_depend_on_its_batch():
    """Alone or beside others: the same bits."""
    both = case(64, [150, 70], [128, 33])
    rows = {name: getattr(both, name)[1:] for name in ("q", "index", "first", "count", "window_first", "window_count")}
    alone = type(both)(**{**vars(both), **rows, "cos": both.cos[1:], "sin": both.sin[1:]})
    together = run_fmha(Fmha, FULL, both)
    single = run_fmha(Fmha, FULL, alone)
    assert bits(single.output[0]) == bits(together.output[1])


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("entries", "splits"), [("index", 1), ("index", 3), ("range", 7)])
def test_parts_join_to_the_whole(entries, splits):
    """More splits than tiles leave parts empty."""
    outcome = run_split(case(64, [300, 0, 20], [128, 90, 0]), entries, True, splits)
    assert outcome.clean, outcome.findings()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("head_dim", [64, 256, 512])
def test_what_the_compiler_says(head_dim):
    kernel, code = compiled(Fmha, (head_dim, *FULL[1:]))
    assert (code.local_bytes, code.spills) == (0, 0)
    assert code.registers * code.threads <= 65_536
    budget = {row.resource: row for row in kernel.budget()}
    assert code.smem_bytes == budget["SMEM: total"].used and code.threads == budget["threads"].used
    assert all(0 < row.used <= row.limit and row.derivation for row in budget.values())
    assert small(code)
    counts = {
        "tcgen05.mma.ws": kernel.chunks * 2 + 4 * (head_dim // kernel.pv_n),
        "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4": 2 * (AT_ONCE + 1) * kernel.chunks,
        "cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier": kernel.chunks,  # Q
        "ld.local": 0,
        "st.local": 0,
    }
    assert {name: ptx.count(code.ptx, name) for name in counts} == counts


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("head_dim", {"head_dim": 96}),
        ("dtype", {"dtype": "fp32"}),
        ("entries", {"entries": "list"}),
        ("window", {"entries": "none", "window": False}),
        ("partial", {"partial": True}),
    ],
)
def test_bad_configurations_are_named(name, settings):
    with pytest.raises(ConfigError, match=name):
        Fmha(**settings)


def test_bad_arguments_are_named():
    kernel, one = Fmha(*FULL), case(5, [9], [3])
    good = {
        "q": one.q,
        "entries": (one.pool, one.index, None, one.count),
        "window": (one.span, None, one.window_first, one.window_count),
        "sink": one.sink,
        "rope": (one.cos, one.sin),
        "o": one.outputs()[0],
        "lse": one.outputs()[1],
    }
    launch_args(kernel, **good, scale=1.0)
    bad = {
        "q": [one.q[0], one.q.float(), one.q[..., :256], one.q[:, :0]],
        "entries": [None, (one.pool.float(), *good["entries"][1:]), (one.pool, one.index.long(), None, one.count)],
        "window": [None, (one.span, None, one.window_first[:0], one.window_count)],
        "sink": [None, one.sink[:-1], one.sink.double()],
        "rope": [None, (one.cos, one.sin[:, :-1])],
        "o": [good["o"].float(), good["o"][:, :-1]],
        "lse": [good["lse"][:, :-1]],
    }
    for name, values in bad.items():
        for value in values:
            with pytest.raises(ArgumentError, match=name):
                launch_args(kernel, **{**good, name: value}, scale=1.0)
    with pytest.raises(ArgumentError, match="splits"):
        launch_args(kernel, **good, scale=1.0, splits=2)


def test_nan_stays_where_it_belongs():
    """A NaN in Q reaches its head, a NaN in a key every head of the tokens that read it; LSE says so as well."""
    one = case(64, [70, 66], [40, 128], seed=5)
    alone = run_fmha(Fmha, FULL, one)
    bad = one.to("cpu")
    bad.q[0, 3, 100] = float("nan")
    bad.span[int(bad.window_first[1]) + int(bad.window_count[1]) - 1, 7] = float("nan")
    outcome = run_fmha(Fmha, FULL, bad)
    assert outcome.error is None and not outcome.hazards
    assert bool(outcome.output[0, 3].isnan().all()) and bool(outcome.lse[0, 3].isnan())
    assert bool(outcome.output[1].isnan().any(-1).all()) and bool(outcome.lse[1].isnan().all())
    others = [head for head in range(64) if head != 3]
    assert torch.equal(outcome.output[0, others], alone.output[0, others])
    assert torch.equal(outcome.lse[0, others], alone.lse[0, others])
