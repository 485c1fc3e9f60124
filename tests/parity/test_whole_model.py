"""The whole model on ops against transformers: rounding of logits by schedule and length, greedy tokens, the table."""

from functools import cache

import pytest

from dsv4lib.config import LayerKind
from dsv4lib.errors import ArgumentError
from dsv4lib.pages.common import peers as peer_pages
from dsv4lib.pages.full_model import parity, run_case
from dsv4lib.predict import table
from dsv4lib.reference.transformers_parity import LOGITS_BOUND
from tests.model.test_transformer import ids

DEFAULT = "flash 132 tokens, ring", "pro 132 tokens, ring"
FULL = pytest.mark.full


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Gives transformers' model of a schedule and its checkpoint."""
    return cache(lambda kind: parity.pair_of(kind, tmp_path_factory.mktemp("parity")))


@cache
def recorded():
    return {row.case: row for row in table.recorded(parity.Row, parity.TABLE)}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in DEFAULT else FULL) for n in parity.CASES])
def test_rounding_is_that_of_bf16(pair, name):
    """At most 1.5 times the error of transformers in bf16, and what the table says."""
    row = parity.measure(name, pair(parity.CASES[name].schedule))
    print(row)
    assert row.ok, row
    old = recorded()[name]
    advice = f"python -m dsv4lib.pages.full_model.parity --only '{name}' measures it anew"
    assert (row.tokens, row.bound) == (old.tokens, old.bound), advice
    assert row.median == pytest.approx(old.median, rel=0.15) and row.rms == pytest.approx(old.rms, rel=0.25), advice
    assert abs(row.judged - old.judged) <= 0.03 * row.tokens + 1, advice


@pytest.mark.parametrize("fault", ["SinkForgotten", pytest.param("ExpertsOfTheNext", marks=FULL)])
def test_a_fault_is_not_rounding(pair, fault, monkeypatch):
    right = parity.transformer

    def wrong(*given, **options):
        model = right(*given, **options)
        run_case.FAULTS[fault](model)
        return model

    monkeypatch.setattr(parity, "transformer", wrong)
    assert not parity.measure("pro 5 tokens", pair("pro")).ok


def test_storage_is_part_of_what_is_compared(pair):
    """transformers reads KV as our caches store it only inside the comparison."""
    row = parity.measure("pro 1 token", pair("pro"))
    assert row.ok and row.unstored > 1.5 > row.median


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", parity.FIRST)
def test_greedy_tokens_are_those_of_transformers(pair, kind):
    """64 tokens across the end of a window; no choice is so close that rounding could make it."""
    theirs, ours, gap = parity.greedy(pair(kind), ids(100, 11), 64)
    print(f"smallest gap of two logits: {gap:.1e}")
    assert gap > 2 * LOGITS_BOUND
    assert ours == theirs and len(theirs) == 64 and len(set(theirs)) > 16


def test_the_table_is_complete_and_shown():
    assert list(recorded()) == list(parity.CASES) and all(row.ok for row in recorded().values())
    advice = "python -m dsv4lib.pages.full_model.parity"
    assert peer_pages.written(parity.README, parity.MODULE) == parity.readme(list(recorded().values())), advice


def test_cases_cover_what_they_say():
    for kind, first in (("flash", LayerKind.SWA), ("pro", LayerKind.HCA)):
        config = parity.config_of(kind)
        assert config.layer_kinds == (first, first, LayerKind.CSA, LayerKind.HCA)
        assert config.is_hash_layer(0) and not config.is_hash_layer(1) and config.head_dim == 512
    lengths = {case.tokens for case in parity.CASES.values()}
    assert (min(lengths), max(lengths)) == (1, 700)
    with pytest.raises(ArgumentError, match="schedule"):
        parity.config_of("lite")
    with pytest.raises(ArgumentError, match="name"):
        parity.measure("flash", None)
