"""Verification of drafts: the output's distribution is the target's, exactly by enumeration and by chi-square."""

from __future__ import annotations

import itertools

import pytest
import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.model.sampler import History, SamplingParams, Settings, probabilities, sample
from dsv4lib.model.verify import acceptance, residual, target_probabilities, verify


def draw(*shape, seed, zeros=False):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(1.5).exp()
    if zeros:
        x[..., seed % shape[-1]] = 0
    return x / x.sum(-1, keepdim=True)


@pytest.mark.parametrize("zeros", [False, True])
def test_two_drafts_enumerated_give_the_target(zeros):
    """Sum over all drafts of (what verification emits) equals p1(a) p2(b | a) p3(c | a, b), to 1e-15."""
    v = 4
    p = [draw(v, seed=1, zeros=zeros), draw(v, v, seed=2), draw(v, v, v, seed=3)]  # conditional on what came before
    q = [draw(v, seed=4), draw(v, v, seed=5, zeros=zeros)]
    first, second = torch.zeros(v, dtype=torch.float64), torch.zeros(v, v, dtype=torch.float64)
    third = torch.zeros(v, v, v, dtype=torch.float64)
    for a, b in itertools.product(range(v), repeat=2):
        made = q[0][a] * q[1][a, b]
        pass_a, pass_b = acceptance(p[0], q[0])[a], acceptance(p[1][a], q[1][a])[b]
        first += made * (1 - pass_a) * residual(p[0], q[0])
        first[a] += made * pass_a
        second[a] += made * pass_a * (1 - pass_b) * residual(p[1][a], q[1][a])
        second[a, b] += made * pass_a * pass_b
        third[a, b] += made * pass_a * pass_b * p[2][a, b]
    torch.testing.assert_close(first, p[0], rtol=0, atol=1e-15)
    reach = (q[0] * acceptance(p[0], q[0]))[:, None]  # a second token is emitted only after an accepted first one
    torch.testing.assert_close(second, reach * p[1], rtol=0, atol=1e-15)
    reach = (reach * q[1] * torch.stack([acceptance(p[1][a], q[1][a]) for a in range(v)]))[..., None]
    torch.testing.assert_close(third, reach * p[2], rtol=0, atol=1e-15)


@pytest.mark.parametrize("greedy_draft", [False, True])
def test_emitted_tokens_follow_the_target(greedy_draft):
    """The first token, and the second among rows that reach it, by chi-square over many positions of one seed."""
    v, n = 6, 30_000
    p, q = draw(3, v, seed=11), draw(2, v, seed=12)
    settings = Settings.of([SamplingParams(seed=5)] * n, v)
    generator = torch.Generator().manual_seed(0)
    drafts = torch.stack([torch.multinomial(row, n, True, generator=generator) for row in q], dim=1)
    if greedy_draft:
        drafts = q.argmax(-1).expand(n, 2).contiguous()
    draft = None if greedy_draft else q.expand(n, 2, v)
    found = verify(drafts, p.expand(n, 3, v), settings, torch.arange(n) * 3, draft)
    assert not found.broken.any()
    for place in range(3):
        got = found.tokens[found.accepted >= place, place]
        counts = torch.bincount(got, minlength=v).double()
        expected = len(got) * p[place]
        assert ((counts - expected) ** 2 / expected).sum() < 20.5, place  # 5 degrees of freedom: 99.9 %
    overlap = p[0, drafts[0, 0]] if greedy_draft else torch.minimum(p[0], q[0]).sum()
    assert abs((found.accepted > 0).double().mean() - overlap) < 0.01


def test_greedy_is_the_matching_prefix_and_the_argmax():
    v, k = 9, 3
    x = torch.randn(5, k + 1, v, generator=torch.Generator().manual_seed(3))
    best = x.argmax(-1)
    drafts = best[:, :k].clone()
    drafts[1, 2] = (drafts[1, 2] + 1) % v
    drafts[2, 0] = (drafts[2, 0] + 1) % v
    drafts[3, 1:] = -1  # one draft only
    settings = Settings.of([SamplingParams(temperature=0.0)] * 4 + [None], v)
    target = target_probabilities(x, drafts, settings)
    for draft in (None, torch.softmax(torch.randn(5, k, v), -1)):
        found = verify(drafts, target, settings, torch.arange(5), draft)
        assert found.accepted.tolist() == [3, 2, 0, 1, 0]
        for row, count in enumerate([3, 2, 0, 1]):
            assert found.tokens[row].tolist() == best[row, : count + 1].tolist() + [-1] * (k - count)
        assert found.tokens[4].tolist() == [-1] * (k + 1)


def test_without_drafts_it_is_sample():
    v = 17
    rows = [SamplingParams(seed=s, temperature=0.5 * s) for s in range(4)]
    x, places = torch.randn(4, v, generator=torch.Generator().manual_seed(1)), torch.arange(4) + 90
    settings = Settings.of(rows, v)
    none = torch.full((4, 2), -1)
    found = verify(none, probabilities(x, settings)[:, None].expand(-1, 3, -1), settings, places)
    assert found.tokens[:, 0].tolist() == sample(x, settings, places).tokens.tolist()
    assert (found.tokens[:, 1:] == -1).all() and not found.accepted.any()


def test_penalties_count_the_drafts_before_a_position():
    v = 8
    settings = Settings.of([SamplingParams(temperature=1.0, frequency=1.0, presence=0.5, seed=0)], v)
    x, drafts, history = torch.randn(1, 3, v), torch.tensor([[2, 2]]), History.empty(1, v)
    history.add(torch.tensor([2]))
    found = target_probabilities(x, drafts, settings, history)
    for place in range(3):
        wanted = x[:, place].clone()
        wanted[0, 2] -= 1.0 * (place + 1) + 0.5
        torch.testing.assert_close(found[:, place], torch.softmax(wanted, -1))
    assert history.output[0, 2] == 1


def test_a_needed_nan_is_marked_and_shapes_are_named():
    v = 5
    settings = Settings.of([SamplingParams(seed=0)] * 2, v)
    target = draw(2, 2, v, seed=0)
    target[1, 0, 0] = float("nan")
    found = verify(torch.tensor([[1], [1]]), target, settings, torch.arange(2))
    assert found.broken.tolist() == [False, True]
    with pytest.raises(ArgumentError, match="target.shape"):
        verify(torch.tensor([[1], [1]]), target[:, :1], settings, torch.arange(2))
    with pytest.raises(ArgumentError, match="draft.shape"):
        verify(torch.tensor([[1], [1]]), target, settings, torch.arange(2), target)
    with pytest.raises(ArgumentError, match="drafts.shape"):
        target_probabilities(target, torch.zeros(2, 2, dtype=torch.int64), settings)
