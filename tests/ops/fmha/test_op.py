"""The attention op through the emulator: every form of keys against fp64, and what must not change a token's bits."""

import dataclasses

import pytest
import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.ops.fmha import op
from dsv4lib.ops.fmha.inputs import case, decode_case, paged, prefill_case
from dsv4lib.ops.fmha.window import token_groups
from dsv4lib.pages.fmha.run_case import bits
from dsv4lib.pages.fmha.run_op import op_arguments, run_fmha_op
from dsv4lib.reference import fmha as reference
from tests.cases import cases

SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")


def run(one, **changed):
    """(o, lse) of the op in the emulator, with entries by index, window, sink and rotation."""
    return op.fmha(**{**op_arguments(one, "index", True, rope=True), **changed}, backend="emulator")


def rows_of(one, tokens):
    """The case of some of its tokens."""
    per_token = ("q", "index", "first", "count", "window_first", "window_count", "cos", "sin")
    return dataclasses.replace(one, **{name: getattr(one, name)[tokens] for name in per_token})


@pytest.mark.parametrize("splits", cases(3, full=[1]))
@pytest.mark.parametrize("entries", ["index", "range", "none"])
def test_kinds_of_keys(entries, splits):
    """Lists of different length, an empty one among them; windows of no tile, one and two."""
    outcome = run_fmha_op(case(64, [200, 0, 77], [128, 0, 50]), entries, True, rope=True, splits=splits)
    assert outcome.clean, outcome.findings()
    assert not outcome.output[1].any() and bool((outcome.lse[1] == -float("inf")).all())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_without_window_sink_and_rotation(dtype):
    outcome = run_fmha_op(case(64, [100, 20], [0, 0], dtype=dtype), "index", False, sink=False)
    assert outcome.clean, outcome.findings()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("heads", "tokens"), [(1, 5), (5, 2), (37, 1), (100, 1), (128, 3)])
def test_heads_and_tokens(heads, tokens):
    outcome = run_fmha_op(case(heads, [70 - 3 * t for t in range(tokens)], [3] * tokens, seed=heads), "index", True)
    assert outcome.clean, outcome.findings()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("top_k", cases(0, 1, 63, 65, 513, full=[64, 2048]))
def test_any_number_of_entries(top_k):
    outcome = run_fmha_op(case(64, [top_k], [5], seed=top_k), "index", True)
    assert outcome.clean, outcome.findings()


@pytest.mark.full  # test_sm100.py has it without splits
def test_pro_decode():
    """Four tokens of DeepSeek-V4-Pro: 128 heads, 1,024 selected entries and the window, split as the op chooses."""
    assert op.choose_splits(4, 128, 1024, 128).keys > 1
    outcome = run_fmha_op(case(128, [1024] * 4, [128] * 4), "index", True, rope=True)
    assert outcome.clean, outcome.findings()


@pytest.mark.full
def test_flash_prefill():
    """64 tokens of DeepSeek-V4-Flash: 64 heads, 512 selected entries, windows that fill up."""
    one = case(64, [512] * 64, [min(t + 100, 128) for t in range(64)])
    outcome = run_fmha_op(one, "index", True, rope=True, device={"checks": "default"})
    assert outcome.clean, outcome.findings()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("splits", [1, 2])
def test_rings_of_requests_in_any_order(splits):
    """A ring a request, tokens in another order than the rings; fills of 1, 128 and a wrapped one."""
    one = decode_case(64, [0, 127, 300, 49])
    order = torch.tensor([2, 0, 3, 1])
    ring = op.Ring(one.span.view(4, 128, 512), order.int(), one.window_count)
    moved = dataclasses.replace(one, window_first=one.window_first[order], window_count=one.window_count[order])
    outcome = run_fmha_op(moved, "none", True, window=ring, splits=splits)
    assert outcome.clean, outcome.findings()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("starts", [[0, 127], [1, 128, 5000]])
def test_chunks_of_a_prefill(starts):
    outcome = run_fmha_op(prefill_case(64, starts, 3), "range", True)
    assert outcome.clean, outcome.findings()


@pytest.mark.full
def test_gathered_entries_are_the_same_bits_as_a_list():
    one = case(64, [150, 33], [20, 100])
    index = torch.where(one.index < 0, 3, one.index)
    counted = torch.where(torch.arange(index.shape[1]) < one.count[:, None], index, 0)
    listed = run(one, entries=op.Selected(one.pool, index, one.count))
    kv = one.pool[counted.long()]
    assert [bits(x) for x in run(one, entries=op.Gathered(kv, one.count))] == [bits(x) for x in listed]
    full = kv[:, :33].contiguous()
    short = run(one, entries=op.Selected(one.pool, index[:, :33].contiguous()))
    assert [bits(x) for x in run(one, entries=op.Gathered(full))] == [bits(x) for x in short]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("page", [1, 7, 64])
def test_pages_may_lie_anywhere(page):
    """Entries on pages of any size, pages in any order: the same bits."""
    one = case(64, [150, 33], [20, 100])
    pages = -(-len(one.pool) // page)
    pool = torch.full((pages, page, 512), float("nan"), dtype=one.pool.dtype)
    pool.flatten(0, 1)[: len(one.pool)] = one.pool
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(1))
    place = torch.empty_like(order)
    place[order] = torch.arange(pages)
    index = torch.where(one.index < 0, -1, place[one.index // page] * page + one.index % page).int()
    flat = run(one)
    assert [bits(x) for x in run(one, entries=op.Selected(pool, one.index, one.count))] == [bits(x) for x in flat]
    moved = run(one, entries=op.Selected(pool[order].contiguous(), index, one.count))
    assert [bits(x) for x in moved] == [bits(x) for x in flat]


def test_the_order_of_keys_does_not_matter():
    """Sums in another order round otherwise, no more."""
    one = case(64, [150, 33], [20, 100])
    mixed = one.index.clone()
    for row, count in zip(mixed, one.count, strict=True):
        row[:count] = row[:count][torch.randperm(int(count), generator=torch.Generator().manual_seed(2))]
    other = dataclasses.replace(one, index=mixed)
    outcomes = [run_fmha_op(x, "index", True, rope=True) for x in (one, other)]
    assert all(outcome.clean for outcome in outcomes)
    assert outcomes[0].rel_l2 < 2.7e-3
    assert (outcomes[0].output.double() - outcomes[1].output.double()).norm() <= 2.7e-3 * outcomes[0].truth.norm()
    assert bits(outcomes[0].output) != bits(outcomes[1].output)  # the test sees that something changed


@pytest.mark.full
def test_the_number_of_parts_does_not_matter():
    one = case(64, [300, 0, 20], [128, 90, 0])
    outcomes = {n: run_fmha_op(one, "index", True, rope=True, splits=n) for n in (1, 2, 4, 7, 16, None)}
    for n, outcome in outcomes.items():
        assert outcome.clean, (n, outcome.findings())
        assert outcome.rel_l2 < 2.7e-3
    assert len({bits(outcome.output) for outcome in outcomes.values()}) > 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize("splits", [1, 3])
def test_a_token_does_not_depend_on_its_batch(splits):
    """Alone, first, last, beside other tokens: the same bits."""
    one = case(64, [150, 70, 33, 9], [128, 33, 1, 0])
    o, lse = run(one, splits=splits)
    for tokens in ([2], [3, 2], [2, 0, 1]):
        part_o, part_lse = run(rows_of(one, tokens), splits=splits)
        where = tokens.index(2)
        assert bits(part_o[where]) == bits(o[2]) and bits(part_lse[where]) == bits(lse[2])


def test_what_other_tokens_hold_never_matters():
    """With the op's own choice of parts, too: it follows from shapes."""
    one = case(64, [150, 70], [128, 33])
    other = rows_of(one, [0, 1])
    other.q[1], other.count[1], other.index[1] = 3.0, 2, 5
    assert bits(run(one)[0][0]) == bits(run(other)[0][0])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("splits", [1, 3])
def test_parts_of_the_dimensions_never_change_a_bit(splits, monkeypatch):
    """On a larger GPU a token may have more CTAs; its bits stay."""
    one = case(64, [150, 70], [128, 33])
    chosen = [op.choose_splits(2, 64, 150, 128, sms, splits=splits).dims for sms in (148, 3)]
    assert chosen == [2, 1]
    o, lse = run(one, splits=splits)
    monkeypatch.setattr(op.split_choice, "SM_COUNT", 3)
    whole, whole_lse = run(one, splits=splits)
    assert bits(o) == bits(whole) and bits(lse) == bits(whole_lse)


def test_a_last_part_of_another_length(monkeypatch):
    """Long lists of three tokens on four SMs: the fourth takes a share of each; in any order the same bits."""
    monkeypatch.setattr(op.split_choice, "SM_COUNT", 4)
    assert op.choose_splits(3, 64, 2048, 128, 4).tail[0] == 1
    one = case(64, [2048, 300, 2000], [128, 33, 128])
    outcome = run_fmha_op(one, "index", True, rope=True)
    assert outcome.clean, outcome.findings()
    o, lse = run(rows_of(one, [2, 0, 1]))
    assert bits(o) == bits(outcome.output[[2, 0, 1]]) and bits(lse) == bits(outcome.lse[[2, 0, 1]])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("sink", [float("-inf"), 80.0, 1e4, float("inf")])
def test_sinks_at_the_ends(sink, splits):
    one = case(64, [70, 0], [30, 0])
    one.sink[::2] = sink
    outcome = run_fmha_op(one, "index", True, splits=splits)
    assert outcome.clean, outcome.findings()


def test_neighbours_with_disjoint_selections():
    one = case(64, [64, 64], [0, 0])
    rows = torch.arange(len(one.pool) - 8)
    one.index[0], one.index[1] = rows[:32].repeat(2), rows[-32:].repeat(2)
    outcome = run_fmha_op(one, "index", False)
    assert outcome.clean, outcome.findings()
    alone = [run_fmha_op(rows_of(one, [t]), "index", False) for t in (0, 1)]
    assert [bits(x.output[0]) for x in alone] == [bits(x) for x in outcome.output]
    assert bits(outcome.output[0]) != bits(outcome.output[1])


@pytest.mark.full
@pytest.mark.parametrize("splits", cases(3, full=[1]))
def test_every_schedule_gives_the_same_bits(splits):
    one = case(64, [150, 70], [128, 33])
    outcomes = [run_fmha_op(one, "index", True, rope=True, splits=splits, device={"schedule": s}) for s in SCHEDULES]
    assert all(outcome.clean for outcome in outcomes), [outcome.findings() for outcome in outcomes]
    assert len({bits(outcome.output) for outcome in outcomes}) == 1
    assert len({outcome.result.schedule_hash for outcome in outcomes}) >= 4 - 2 * (splits > 1)


def test_nothing_to_attend_to():
    """No tokens, no kinds of keys, lists of width 0: no launch, zeros and -inf."""
    one = case(5, [9, 3], [3, 0])
    o, lse = run(rows_of(one, []))
    assert o.shape == (0, 5, 512) and lse.shape == (0, 5)
    empty = op.Selected(one.pool, one.index[:, :0])
    for entries in (None, empty):
        o, lse = run(one, entries=entries, window=None)
        assert not o.any() and bool((lse == -float("inf")).all())
    o, lse = run(one, entries=empty)
    assert bits(o) == bits(run(one, entries=None)[0]) and not o[1].any()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("splits", cases(3, full=[1]))
@pytest.mark.parametrize("kind", ["index", "range"])
def test_entries_of_584_bytes(kind, splits):
    """Pages of an odd size, out of order where entries are read by index, gaps between them, window pages too."""
    one = paged(case(64, [150, 33], [20, 100]), 7, 5, padding=48, seed=3 if kind == "index" else None)
    outcome = run_fmha_op(one, kind, True, rope=True, splits=splits)
    assert outcome.clean, outcome.findings()
    o, _ = op.fmha(**op_arguments(one, kind, True, rope=True), backend="reference")
    assert (o.double() - outcome.truth).norm() <= 2e-3 * outcome.truth.norm()


@pytest.mark.full
def test_entries_of_584_bytes_for_128_heads():
    """Two CTAs, each of which brings half of a tile's keys, in parts."""
    one = paged(case(128, [150], [20]), 64, 64, seed=1)
    outcome = run_fmha_op(one, "index", True, rope=True, splits=2)
    assert outcome.clean, outcome.findings()


@pytest.mark.full
def test_rings_of_584_bytes():
    """A page a request."""
    one = paged(decode_case(64, [0, 127, 300]), 1, 128)
    ring = op.Ring(op.Fp8Pages(*one.span_pages), torch.arange(3).int(), one.window_count)
    outcome = run_fmha_op(one, "none", True, window=ring)
    assert outcome.clean, outcome.findings()


def scattered(one, quantised):
    """(case, its window by index in rows, or pages, that lie anywhere); numbers past the count are rows of NaN."""
    place, pages = torch.randperm(len(one.span), generator=torch.Generator().manual_seed(2)), None
    if quantised:
        one = paged(one, 64, 16, padding=32)
        data, size = one.span_pages
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(3))
        mixed = torch.full_like(data, 0xFF)
        mixed[order] = data
        pages, place = op.Fp8Pages(mixed, size), (order[:, None] * size + torch.arange(size)).flatten()
    rows = torch.full((len(one.span) + 1, 512), float("nan"), dtype=one.q.dtype)
    if not quantised:
        rows[place] = one.span
    listed = one.window_first[:, None] + torch.arange(130)
    inside = torch.arange(130) < one.window_count[:, None]
    index = torch.where(inside, place[listed.clamp(max=len(one.span) - 1)], -1 if quantised else len(one.span))
    return one, op.Selected(pages or rows, index.int(), one.window_count)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("heads", "entries", "quantised", "splits"),
    cases((64, "none", True, 1), (5, "range", True, 1), full=[(64, "index", False, 1), (128, "index", True, 2)]),
)
def test_windows_in_pages_anywhere(heads, entries, quantised, splits):
    """The bits of consecutive rows, for windows of no key, part of a tile and two tiles."""
    one, window = scattered(case(heads, [200, 9, 77], [128, 0, 50]), quantised)
    outcome = run_fmha_op(one, entries, True, rope=True, splits=splits, window=window)
    assert outcome.clean, outcome.findings()
    rows = run_fmha_op(one, entries, True, rope=True, splits=splits)
    assert bits(outcome.output) == bits(rows.output) and torch.equal(outcome.lse, rows.lse)
    found = op.fmha(**{**op_arguments(one, entries, True, rope=True), "window": window}, backend="reference")[0]
    want = op.fmha(**op_arguments(one, entries, True, rope=True), backend="reference")[0]
    assert torch.equal(found, want)


@pytest.mark.parametrize(("number", "said"), [(-1, "window.index"), (10_000, "window.index"), (None, "groups")])
def test_bad_lists_of_window_rows_are_named(number, said):
    one, window = scattered(case(64, [5, 5], [3, 2]), False)
    given = {"groups": token_groups((2,), 64, 2)} if number is None else {}
    if number is not None:
        window.index[1, 0] = number
    kinds = "index" if number is not None else "range"
    with pytest.raises(ArgumentError, match=said):
        op.fmha(**{**op_arguments(one, kinds, True), "window": window, **given}, backend="emulator")


@pytest.mark.full
@pytest.mark.parametrize("splits", [1, 2])
def test_two_ctas_give_the_bits_of_one(splits):
    """128 heads, whose CTAs multiply together, against two calls of 64: other sums, so all are exact here.

    A pair adds a score's halves of other dimensions, and the order in which an MMA adds is not documented. Queries of
    -1/2, 0 and 1/2 keep P of a row so close together that P V adds up without rounding, too.
    """
    one = case(128, [150, 33], [20, 100])
    halves = {name: (getattr(one, name) * 2).round() / 2 for name in ("q", "pool", "span")}
    one = dataclasses.replace(one, **{**halves, "q": halves["q"].clamp(-0.5, 0.5)})
    outcome = run_fmha_op(one, "index", True, rope=True, splits=splits)
    assert outcome.clean, outcome.findings()
    for half in (slice(0, 64), slice(64, 128)):
        o, lse = run(dataclasses.replace(one, q=one.q[:, half], sink=one.sink[half]), splits=splits)
        assert bits(o) == bits(outcome.output[:, half]) and bits(lse) == bits(outcome.lse[:, half])


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("heads", "splits"), cases((16, 2), (5, 1), full=[(16, 1), (50, 1), (64, 1)]))
def test_tokens_that_share_tiles(heads, splits):
    """Chunks of a prefill; no group reaches over the end of a chunk. Fewer CTAs than tokens."""
    one = prefill_case(heads, [0, 300], 7)
    groups = token_groups([7, 7], heads, op.cluster_of(heads, groups=True))
    assert len(groups) == 2 * -(-7 // min(7, 128 // heads))
    for kind in ("range", "none"):
        outcome = run_fmha_op(one, kind, True, rope=True, splits=splits, groups=groups)
        assert outcome.clean, outcome.findings()


@pytest.mark.full
def test_parts_that_are_not_normalised():
    """Entries here, window there, joined in fp64 with the sink: what the op gives for both at once."""
    one = case(64, [100, 0, 20], [30, 0, 0])
    given = {"q": one.q, "scale": one.scale, "normalise": False, "backend": "emulator"}
    parts = [
        op.fmha(entries=op.Selected(one.pool, one.index, one.count), **given),
        op.fmha(window=op.Rows(one.span, one.window_first, one.window_count), **given),
    ]
    o, stats = (torch.stack(x).double() for x in zip(*parts, strict=True))
    joined, lse = reference.merge_raw(o, stats[..., 0], stats[..., 1], one.sink.double())
    outcome = run_fmha_op(one, "index", True)
    assert outcome.clean and (joined - outcome.truth).norm() < 1.5e-3 * outcome.truth.norm()
    torch.testing.assert_close(lse.float(), outcome.lse, atol=3e-6, rtol=1e-6)
    assert not joined[1].any() and bool((lse[1] == -float("inf")).all())
    empty = op.fmha(one.q, normalise=False, backend="emulator")
    assert not empty[0].any() and bool((empty[1][..., 0] == -float("inf")).all()) and not empty[1][..., 1].any()


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("groups", {"groups": torch.tensor([[0, 1]], dtype=torch.int32)}),
        ("groups", {"groups": torch.tensor([[1, 1], [0, 1]], dtype=torch.int32)}),
        ("groups", {"groups": torch.tensor([[0, 2]], dtype=torch.int32), "q": torch.zeros(2, 70, 512).bfloat16()}),
        ("groups", {"groups": torch.tensor([0, 2], dtype=torch.int32)}),
        ("sink", {"normalise": False, "sink": torch.zeros(5)}),
        ("rope", {"normalise": False, "rope": (torch.zeros(2, 32), torch.zeros(2, 32))}),
        ("splits", {"normalise": False, "splits": 2}),
        ("o", {"normalise": False, "o": torch.zeros(2, 5, 512).bfloat16()}),
        (r"window\.pool\.pages", {"window": op.Rows(op.Fp8Pages(torch.zeros(3, 584), 1), *[torch.ones(2).int()] * 2)}),
        (
            r"window\.pool\.page=",
            {"window": op.Rows(op.Fp8Pages(torch.zeros(3, 584).byte(), 0), *[torch.ones(2).int()] * 2)},
        ),
    ],
)
def test_bad_options_are_named(name, bad):
    one = case(5, [9, 3], [3, 1])
    given = {"q": one.q, "window": op.Rows(one.span, one.window_first, one.window_count)}
    with pytest.raises(ArgumentError, match=rf"^{name}"):
        op.fmha(**{**given, **bad}, backend="emulator")
    with pytest.raises(ArgumentError, match="groups"):
        op.fmha(**op_arguments(one, "index", True), groups=token_groups([1, 1], 5), backend="emulator")
