"""The sampler: greedy ties, the nucleus, the distribution it draws from, seeds, refusals."""

import math

import pytest
import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.reference import sampler


def test_greedy_takes_the_lowest_of_equals():
    assert sampler.greedy(torch.tensor([[0.0, 3.0, 3.0], [1.0, 0.0, 1.0]])).tolist() == [1, 0]
    assert sampler.sample(torch.tensor([[0.0, 3.0, 3.0]]), temperature=0.0).tolist() == [1]


def test_temperature_is_a_softmax_of_scaled_logits():
    logits = [0.3, -1.0, 2.0]
    e = [math.exp(v / 0.7) for v in logits]
    want = [v / sum(e) for v in e]
    assert sampler.probabilities(torch.tensor(logits).double(), 0.7).tolist() == pytest.approx(want, abs=1e-7)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1.0, "1302"), (0.95, "1302"), (0.93, "130"), (0.82, "130"), (0.81, "13"), (0.51, "13"), (0.49, "1"), (1e-9, "1")],
)
def test_nucleus_is_the_smallest_set(top_p, kept):
    p = torch.tensor([0.125, 0.5, 0.0625, 0.3125], dtype=torch.float64)  # sums in order: 0.5, 0.8125, 0.9375, 1
    ids = [int(c) for c in kept]
    total = sum(p[i].item() for i in ids)
    want = [p[i].item() / total if i in ids else 0 for i in range(4)]
    assert sampler.probabilities(p.log(), 1.0, top_p).tolist() == pytest.approx(want, abs=1e-12)


def test_nucleus_keeps_the_lower_id_of_equals():
    assert sampler.probabilities(torch.zeros(4), 1.0, 0.5).tolist() == [0.5, 0.5, 0, 0]


def test_draws_follow_the_probabilities():
    """200,000 draws: chi-square over 5 tokens below the 1e-6 quantile of 4 degrees of freedom (33.4)."""
    p = torch.tensor([0.02, 0.4, 0.08, 0.3, 0.2], dtype=torch.float64)
    draws = 200_000
    for temperature in (1.0, 2.0):
        generator = torch.Generator().manual_seed(7)
        logits = (temperature * p.log()).expand(draws, 5)
        counts = torch.bincount(sampler.sample(logits, temperature, generator=generator), minlength=5)
        chi_square = ((counts - draws * p).square() / (draws * p)).sum().item()
        assert chi_square < 33.4


def test_seed_fixes_the_draw():
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(1))

    def draw(seed):
        return sampler.sample(logits, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(draw(3), draw(3))
    assert not torch.equal(draw(3), draw(4))


def test_tokens_outside_the_nucleus_are_never_drawn():
    p = torch.tensor([0.1, 0.6, 0.3]).expand(5000, 3)
    tokens = sampler.sample(p.log(), top_p=0.8, generator=torch.Generator().manual_seed(0))
    assert tokens.unique().tolist() == [1, 2]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("logits", torch.tensor([math.nan])),
    ],
)
def test_refusals(name, value):
    with pytest.raises(ArgumentError) as error:
        sampler.sample(**({"logits": torch.zeros(3)} | {name: value}))
    assert error.value.name == name
    if name != "temperature":
        with pytest.raises(ArgumentError):  # greedy must not hide a wrong argument
            sampler.sample(**({"logits": torch.zeros(3), "temperature": 0.0} | {name: value}))
