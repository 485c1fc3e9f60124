"""The page on drafts: its counts and figures from small runs, each fault, and the reader's solution."""

from __future__ import annotations

import pytest
import torch

from dsv4lib.config import FLASH
from dsv4lib.pages.speculation import figures, run_case
from dsv4lib.pages.speculation.run_case import Chains, Change
from dsv4lib.viz.style import alt_text

PROMPT, COUNT = "The state of", 12


@pytest.fixture(scope="module")
def found():
    return run_case.whole.listed()


@pytest.fixture(scope="module")
def alone(found):
    return run_case.serve(found, PROMPT, COUNT, 0, "reference")


@pytest.fixture(scope="module")
def seven(found):
    return run_case.serve(found, PROMPT, COUNT, 7, "reference")


def chains():
    """Three chains: all, two and none of seven drafts accepted."""
    best = torch.arange(8).repeat(3, 1)
    drafts = best[:, :-1].clone()
    drafts[1, 2], drafts[2, 0] = 9, 9
    one = torch.tensor([[0.5, 0.25, 0.25, 0.0] * 80] * 3, dtype=torch.float64) / 80
    other = torch.tensor([[0.1, 0.65, 0.25, 0.0] * 80] * 3, dtype=torch.float64) / 80
    return Chains(drafts, best, torch.full((3, 7), 0.5, dtype=torch.float64), one, other)


def change():
    rows = {"csa_state": {15, 0, 1, 2, 3, 4, 5, 6}}
    return Change(15, 7, 1, 17, (1, 2, 3, 4, 5, 6, 7), (1, 9), rows, rows)


def test_drafts_change_neither_bytes_nor_bits(alone, seven):
    """Although all that was rejected is overwritten with NaN; each step changes rows of its positions only."""
    assert run_case.differing(alone, seven) == run_case.missing(alone, seven) == run_case.strayed(seven) == 0
    assert len(seven.changes) < len(alone.changes) and seven.rows > alone.rows
    assert any(c.drafts > c.accepted for c in seven.changes) and seven.a_step > 1.5
    assert sum(len(c.kept) for c in seven.changes) == COUNT
    written = run_case.rejecting(seven)
    for ring in ("csa_state", "hca_state"):
        assert written.rows[ring] == written.expected[ring]
    assert written.drafts - written.accepted > 3


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("fault", "red"),
    [
        ("RowsWithoutDrafts", {"missing", "strayed"}),
        ("ReadsWhatIsThere", {"missing"}),
        ("VerifiesARowLate", {"differing", "missing"}),
    ],
)
def test_a_fault_of_serving_is_seen(found, alone, fault, red):
    one = run_case.serve(found, PROMPT, COUNT, 7, "reference", fault)
    seen = {
        "differing": run_case.differing(alone, one),
        "missing": run_case.missing(alone, one),
        "strayed": run_case.strayed(one),
    }
    assert {name for name, count in seen.items() if count} == red, seen
    again = run_case.serve(found, PROMPT, 3, 1, "reference")  # what was replaced is back
    assert again.tokens == alone.tokens[:3]


def test_one_chunk_gives_the_same_tokens(found):
    one = run_case.serve(found, "The", 4, 3, "reference")
    assert run_case.differing_at_once(found, "The", one, "reference") == 0
    logits = [row + 1e-3 if i == 0 else row for i, row in enumerate(one.logits)]
    other = one._replace(tokens=[*one.tokens[:-1], 0], logits=logits)
    assert run_case.differing_at_once(found, "The", other, "reference") == 2


def test_acceptance_is_counted_by_place():
    accepted = run_case.acceptance(chains())
    assert accepted.reached.tolist() == [3, 2, 2, 1, 1, 1, 1] and accepted.accepted.tolist() == [2, 2, 1, 1, 1, 1, 1]
    torch.testing.assert_close(accepted.drawn, 0.5 ** torch.arange(1, 8).double())
    gains = run_case.a_step(accepted.greedy)
    assert gains[0] == 1 and float(gains[-1]) == pytest.approx(1 + (2 + 2 + 5) / 3)


def test_drafts_on_held_out_text(found):
    """The first draft passes mostly; one that is given the token before passes seldom."""
    good, bad = (run_case.held_out(found, 6, 2, 24, fault) for fault in ("none", run_case.TOKEN_BEFORE))
    assert good.drafts.shape == (12, 7) and good.best.shape == (12, 8)
    assert float(good.passed[:, 0].double().mean()) > 0.5 > 0.35 > float(bad.passed[:, 0].double().mean())
    assert torch.equal(good.best[:, 0], bad.best[:, 0])  # the target does not depend on drafts
    torch.testing.assert_close(good.q.sum(1), torch.ones(12, dtype=torch.float64))
    assert torch.equal(good.q.argmax(1), good.drafts[:, 0])


@pytest.mark.parametrize("fault", ["none", *run_case.FAULTS])
def test_what_comes_out_follows_the_target(fault):
    """Unless verification is faulty: the page runs whole with any other fault, too."""
    one = chains()
    p, q = (torch.softmax(x[0] * 200, -1) for x in (one.p, one.q.flip(1)))
    counts, accepted = run_case.emitted(p, q, 4000, fault)
    assert int(counts.sum()) == 4000 and (run_case.chi_square(counts, p) <= 1) == (fault not in run_case.OF_A_DRAW)
    if fault not in run_case.OF_A_DRAW:
        assert accepted == pytest.approx(float(p.minimum(q).sum()), abs=0.03)


def test_weights_of_a_step():
    once, more = run_case.weight_bytes(FLASH, 1, 0), run_case.weight_bytes(FLASH, 1, 1)
    expert = 3 * FLASH.hidden * FLASH.expert_width * run_case.EXPERT_BYTES
    dense = FLASH.active_params - FLASH.n_layers * FLASH.experts_per_token * expert / run_case.EXPERT_BYTES
    assert once == pytest.approx(dense + FLASH.n_layers * FLASH.experts_per_token * expert)
    assert once < more < 2.2 * once
    assert run_case.weight_bytes(FLASH, 4096, 0) < dense + FLASH.n_layers * FLASH.n_experts * expert * 1.0001
    gains = run_case.a_step(torch.ones(7, dtype=torch.float64))
    assert bool((run_case.relative_cost(FLASH, 64, gains).diff() < 0).all())
    assert run_case.cheapest(FLASH, 1, 0.01) == 0 and run_case.cheapest(FLASH, 64, 1.0) == run_case.MOST


def test_figures(capsys, alone, seven):
    one, accepted = chains(), run_case.acceptance(chains())
    assert "argmax (a draft)" in alt_text(figures.flow())
    words = alt_text(figures.acceptance(accepted, 3))
    assert "2 of 3, 2 of 2, 1 of 2" in words and "50.0 %" in words
    counts, _ = run_case.emitted(one.p[0], one.q[0], 2000)
    assert "overlap by" in alt_text(figures.distributions(one, 0, counts))
    words = alt_text(figures.rollback(change(), {"csa_state": 16}, 4))
    assert "positions 17 to 22" in words and "the token at 17" in words
    words = alt_text(figures.hca_rollback(change(), {"hca_state": 256}, 128))
    assert "rows 17 to 22, past the 17 rows" in words and "ring of 256 rows" in words
    kept = change()._replace(accepted=7, length=23)  # as a fault of verification leaves it
    for draw, rows in ((figures.rollback, 4), (figures.hca_rollback, 128)):
        assert "No draft was rejected" in alt_text(draw(kept, {"csa_state": 16, "hca_state": 256}, rows))
    closed = change()._replace(start=120, accepted=7, length=128)  # its last draft closes the window
    drawn = figures.hca_rollback(closed, {"hca_state": 256}, 128)
    words = " ".join(one.get_text() for one in drawn.axes[0].texts)
    assert "of no position: the window closed at 127" in words and "0 rows of its open window" in alt_text(drawn)
    crossing = change()._replace(start=126, length=128)
    assert "rows 128 to 133, past the 0 rows" in alt_text(figures.hca_rollback(crossing, {"hca_state": 256}, 128))
    assert "tokens a step over drafts K" in alt_text(figures.tokens_a_step(accepted))
    assert "1 request goes from 1" in alt_text(figures.cost(accepted))
    figures.position_table(one, 0)
    figures.overwritten(change(), {"csa_state": 16}, 4)
    figures.steps_table(seven)
    figures.runs_table({0: alone, 7: seven})
    out = capsys.readouterr().out
    assert "rows from 12 on are read" in out and "entry 4" in out and "position 1" in out
    assert "' the Union i'" in out
