"""The page on the lightning indexer: its inputs, counts and figures without a kernel, every fault with one."""

from __future__ import annotations

import pytest
import torch

from dsv4lib import backends
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common import launching
from dsv4lib.ops.indexer_q import faults as indexer_q_faults
from dsv4lib.ops.topk import faults as topk_faults
from dsv4lib.pages.common import faults as injected
from dsv4lib.pages.indexer import figures, run_case
from dsv4lib.pages.indexer.run_case import HARD, RATE
from dsv4lib.pages.indexer.scoring import Stored, scored
from dsv4lib.reference.topk import topk
from dsv4lib.viz.style import alt_text

# The checks that see a fault, and those that do not although they look at the same numbers.
SEEN = {
    "TurnsBackwards": ({"codes_wrong", "score_error"}, {"picks_wrong"}),
    "RotatesFirst": ({"codes_wrong", "score_error", "lost"}, {"picks_wrong"}),
    "ScaleLeftOut": ({"weights_wrong", "folded_error"}, {"codes_wrong", "score_error"}),
    "WeightsAsTheyCome": ({"weights_wrong", "score_error"}, {"codes_wrong", "lost", "picks_wrong"}),
    "NoRowBarrier": ({"hazards"}, {"codes_wrong"}),
    "TiesAnyhow": ({"hard_wrong"}, {"picks_wrong", "padding_wrong"}),
    "DropsItsBound": ({"hard_wrong"}, {"picks_wrong", "hazards"}),
    "OneEntryTooMany": ({"unseen_picked", "picks_wrong"}, {"hard_wrong"}),
    "ReadsTwice": (set(), {"hard_wrong", "picks_wrong", "hazards"}),  # right picks: its traffic gives it away
    "PaddedWithZero": ({"padding_wrong"}, {"hard_wrong"}),
    "NoRelu": ({"logits_over_torch"}, {"logits_stray", "picks_wrong"}),
    "PagesInOrder": ({"logits_over_torch"}, {"logits_stray", "picks_wrong"}),
    "OneScoreTooMany": ({"logits_stray"}, {"logits_over_torch", "picks_wrong"}),
    "KeyScalesInRows": ({"logits_over_torch"}, {"logits_stray", "picks_wrong"}),
    "KeysNotRotated": ({"score_error", "lost"}, {"codes_wrong", "picks_wrong"}),
}
ALWAYS = ("none", "TiesAnyhow")  # the stage has each fault, too
ENTRIES, K = 640, 100


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:the emulator reports")  # of a race, which is one of the faults
@pytest.mark.parametrize(
    "fault", [*ALWAYS, *(pytest.param(f, marks=pytest.mark.full) for f in SEEN if f not in ALWAYS)]
)
def test_a_fault_is_seen_by_its_checks_alone(fault):
    seen, blind = SEEN.get(fault, (set(), set()))
    found = run_case.judged(run_case.kernels_of(fault), ENTRIES, K, 0, "emulator")
    red = {check for check, value in found.items() if value > figures.ALLOWED.get(check, 0)}
    assert seen <= red and not blind & red and bool(red) == bool(seen), found


@pytest.mark.parametrize("fault", run_case.SCORE_FAULTS)
def test_faults_of_the_scores_are_refused_on_a_hopper(fault):
    """By name, before anything is launched: the kernel that they replace is not the one that would run."""
    given = None, torch.zeros(1, 64, 128), Stored(None, None, torch.zeros(1, 128)), None
    kernel = run_case.kernels_of(fault).scores
    with backends.emulating("sm_90a"), pytest.raises(ArgumentError, match=f"fault='{fault}'.*Hopper"):
        scored(*given, "emulator", kernel)
    with backends.recorded("sm_90a"), pytest.raises(ArgumentError, match=f"fault='{fault}'.*Hopper"):
        launching._native_arch.cache_clear()
        scored(*given, "native", kernel)
    launching._native_arch.cache_clear()


def test_every_fault_is_among_them():
    injected = {name for module in (indexer_q_faults, topk_faults) for name in module.FAULTS}
    assert injected | {"KeysNotRotated", *run_case.SCORE_FAULTS} == set(SEEN) == set(run_case.FAULTS)


def test_what_a_query_sees():
    one = run_case.step(ENTRIES, K, 3)
    assert one.visible.tolist() == [0, 0, 1, 50, 100, 101, 320, 639, 640]
    assert len(one.table) == RATE * ENTRIES and bool((one.table[0, :32] == 1).all())
    turned = run_case.turned(one)
    assert torch.equal(turned[..., :64], one.q[..., :64].double())
    torch.testing.assert_close(turned.norm(dim=-1), one.q.double().norm(dim=-1), rtol=1e-6, atol=0)  # angles are fp32


def test_counts_of_picks():
    visible = torch.tensor([2, 5])
    right = torch.tensor([[0, 1, -1], [0, 2, 4]]).int()
    assert run_case.unseen_picked(right, visible) == run_case.padding_wrong(right, visible) == 0
    wrong = torch.tensor([[0, 2, 0], [1, 2, 5]]).int()
    assert run_case.unseen_picked(wrong, visible) == 2 and run_case.padding_wrong(wrong, visible) == 1
    torch.testing.assert_close(run_case.recall(wrong, right), torch.tensor([0.5, 1 / 3]))
    assert len(run_case.recall(right[:1] * 0 - 1, right[:1] * 0 - 1)) == 0  # nothing to find


def test_bins_keep_the_order_of_scores():
    """The bin of the k-th best is where the sorted row has it, zeros and infinities included."""
    for row in run_case.hard_rows(1).values():
        place, best = run_case.bins_of(row), row.sort(descending=True).values
        assert int(place.min()) >= 0 and int(place.max()) < 1024
        assert bool((run_case.bins_of(best)[1:] >= run_case.bins_of(best)[:-1]).all())
        counts = torch.bincount(place, minlength=1024)
        bound = int((counts.cumsum(0) < 75).sum())
        assert bound == int(run_case.bins_of(best)[74])


def test_hard_rows_are_what_they_say():
    rows = run_case.hard_rows(0)
    assert all(len(row) == HARD for row in rows.values())
    assert len(rows["three values"].unique()) == 3 and len(rows["all equal"].unique()) == 1
    assert rows["0 and -0"].signbit().any() and not rows["0 and -0"].any()
    assert bool((rows["denormal"].abs() < 2.0**-126).all()) and bool(rows["infinite"].isinf().any())
    want = run_case.wanted_picks(rows["all equal"][None], torch.tensor([HARD]), 75)
    assert want.tolist() == [list(range(75))]
    assert torch.equal(run_case.ascending(topk(rows["falling"][None], 4)), torch.tensor([[0, 1, 2, 3]]).int())


def test_rounding_on_one_side_is_noise():
    one = run_case.step(ENTRIES, K, 0)
    exact = run_case.exact_scores(one)
    found, _ = run_case.queries(one, "fp4", "reference")
    keys = [run_case.stored_keys(one, "reference", rotate).values for rotate in (True, False)]
    good, bad = (run_case.scores(run_case.values(found), stored, found.weights) for stored in keys)
    assert run_case.score_error(good, exact) < 0.2 < 1 < run_case.score_error(bad, exact)
    assert run_case.folded_error(one, run_case.queries(one, "fp8", "reference")[0], keys[0]) < 6e-8


def test_figures(capsys):
    one = run_case.step(ENTRIES, K, 0)
    exact = run_case.exact_scores(one)
    right = run_case.wanted_picks(exact, one.visible, K)
    assert "Hadamard" in alt_text(figures.flow())
    assert "what FP4 costs" in alt_text(figures.rotation(one))
    found = {variant: run_case.queries(one, variant, "reference")[0] for variant in ("fp4", "fp8")}
    words = alt_text(figures.code_error(one, found))
    assert "fp4: median" in words and "fp8: median" in words
    assert "score over rank: FP4 codes goes from" in alt_text(figures.score_lines(exact, {"FP4 codes": exact}, K))
    swapped = right.clone()
    swapped[-1, 0] = next(i for i in range(ENTRIES) if i not in right[-1].tolist())
    words = alt_text(figures.pick_map(one, swapped, right))
    assert "1 picked instead" in words and "1 lost by rounding" in words
    assert "scores over bin, the best first" in alt_text(figures.counted(exact[-1], K))
    launches = {"one": injected.Traffic(1024, 2048, 2), "two": injected.Traffic(100, 101, 1)}
    assert "over the floor: two has least, 1.01" in alt_text(injected.traffic(launches, "score"))
    figures.hard_table({"one CTA": {"normal": 0, "rising": 3}})
    figures.seen_table(one, right)
    figures.sizes(one)
    figures.sides(one, K, "reference")
    out = capsys.readouterr().out
    assert "(3 + 1) // 4 = 1" in out and "rising" in out and "68" in out and "as they are" in out
