"""Sampling: filters and penalties against transformers' processors, draws by chi-square, rows and batches."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.generation import logits_process as hf

from dsv4lib.errors import ArgumentError, DSV4Error
from dsv4lib.model import noise
from dsv4lib.model.sampler import History, SamplingParams, Settings, logprobs_of, probabilities, process, sample

VOCAB = 53
ROWS = [
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(temperature=1.3, top_k=7, seed=2),
    SamplingParams(temperature=1.0, top_p=0.6, seed=3),
    SamplingParams(temperature=2.0, min_p=0.2, seed=4),
    SamplingParams(temperature=0.9, top_k=11, top_p=0.8, min_p=0.05, seed=5),
    SamplingParams(temperature=0.0, seed=6),
    SamplingParams(temperature=1.5, top_k=1, seed=7),
]


def logits_of(rows, seed=0, vocab=VOCAB):
    scale = torch.logspace(-0.5, 1, rows, dtype=torch.float64)[:, None]
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def by_transformers(row, x):
    if row.temperature == 0:
        return torch.nn.functional.one_hot(x.argmax(-1), x.shape[-1]).to(x.dtype)
    steps = [hf.TemperatureLogitsWarper(float(row.temperature))]
    steps += [hf.TopKLogitsWarper(row.top_k)] if row.top_k else []
    steps += [hf.TopPLogitsWarper(row.top_p)] if row.top_p < 1 else []
    steps += [hf.MinPLogitsWarper(row.min_p)] if row.min_p else []
    return torch.softmax(hf.LogitsProcessorList(steps)(None, x), -1)


def test_filters_are_those_of_transformers():
    x = logits_of(len(ROWS))
    p = probabilities(x, Settings.of(ROWS, VOCAB))
    wanted = torch.cat([by_transformers(row, x[i : i + 1]) for i, row in enumerate(ROWS)])
    assert torch.equal(p > 0, wanted > 0)
    torch.testing.assert_close(p, wanted, rtol=1e-6, atol=1e-12)  # settings are float32
    assert [int(n) for n in (p > 0).sum(-1)[[1, 5, 6]]] == [7, 1, 1]


def test_penalties_and_bias_are_the_formulas():
    rows = [
        SamplingParams(repetition=1.5, seed=0),
        SamplingParams(frequency=0.25, presence=0.5, seed=0),
        SamplingParams(repetition=0.5, frequency=-0.75, presence=-0.125, bias={3: 2.0, 9: -math.inf}, seed=0),
    ]
    x, history = logits_of(3, 1), History.empty(3, VOCAB)
    prompt, output = [4, 9, 9, 30], [9, 3, 3, 50, 3]
    for row in range(3):
        history.start(row, torch.tensor(prompt))
    for token in output:
        history.add(torch.full((3,), token))
    found = process(x, Settings.of(rows, VOCAB), history)
    for i, row in enumerate(rows):
        start = x[i].clone()
        for token, value in row.bias.items():
            start[token] += value
        ids = torch.tensor([prompt + output])
        wanted = hf.RepetitionPenaltyLogitsProcessor(float(row.repetition))(ids, start[None])[0]
        for token in range(VOCAB):
            count = output.count(token)
            wanted[token] -= row.frequency * count + row.presence * (count > 0)
        torch.testing.assert_close(found[i], wanted, rtol=0, atol=1e-12)
    history.start(1, torch.tensor([2]))
    assert history.prompt[1].nonzero().flatten().tolist() == [2] and not history.output[1].any()
    history.add(torch.tensor([-1, 5, -1]))
    assert history.output[0].sum() == len(output) and history.output[1, 5] == 1


def test_of_equal_logits_the_lower_id_ranks_first():
    x = torch.zeros(3, 8)
    rows = [SamplingParams(top_k=3), SamplingParams(temperature=0.0), SamplingParams(top_p=0.3)]
    p = probabilities(x, Settings.of(rows, 8))
    assert [row.nonzero().flatten().tolist() for row in p] == [[0, 1, 2], [0], [0, 1, 2]]


def test_draws_follow_the_distribution():
    vocab, draws = 7, 40_000
    x = logits_of(1, 3, vocab).float()
    settings = Settings.of([SamplingParams(temperature=1.2, top_k=6, seed=9)], vocab)
    p = probabilities(x, settings)[0].double()
    e = noise.exponential(settings.seed.expand(draws), torch.arange(draws), "token", vocab)
    counts = torch.bincount((p / e).argmax(-1), minlength=vocab).double()
    assert counts[p == 0].sum() == 0
    chi2 = ((counts - draws * p)[p > 0] ** 2 / (draws * p[p > 0])).sum()
    assert chi2 < 20.5  # 5 degrees of freedom: 99.9 %
    # by position instead of as one tensor
    some = [int(sample(x, settings, torch.tensor([i])).tokens) for i in range(20)]
    assert some == (p / e)[:20].argmax(-1).tolist()


def test_noise_is_uniform_and_streams_differ():
    seed, place = torch.arange(4)[:, None].expand(4, 500), torch.arange(500).expand(4, 500)
    token, accept = (noise.uniform(seed, place, purpose) for purpose in ("token", "accept"))
    for u in (token, accept):
        assert 0 <= u.min() and u.max() < 1 and u.unique().numel() == u.numel()
        counts = torch.histc(u, 20, 0, 1)
        assert ((counts - 100) ** 2 / 100).sum() < 43.8  # 19 degrees of freedom: 99.9 %
    assert abs(torch.corrcoef(torch.stack((token.flatten(), accept.flatten())))[0, 1]) < 0.08
    with pytest.raises(ArgumentError, match="purpose"):
        noise.uniform(seed, place, "other")


def test_a_row_does_not_know_its_batch():
    x, places = logits_of(len(ROWS), 5).float(), torch.arange(len(ROWS)) * 7
    together = sample(x, Settings.of(ROWS, VOCAB), places).tokens
    alone = [sample(x[i : i + 1], Settings.of([r], VOCAB), places[i : i + 1]).tokens[0] for i, r in enumerate(ROWS)]
    assert together.tolist() == [int(t) for t in alone]
    padded = Settings.of([None, *ROWS, None], VOCAB)
    nan = torch.full((1, VOCAB), math.nan)
    found = sample(torch.cat((nan, x, nan)), padded, torch.cat((places[:1], places, places[:1]))).check()
    assert found.tokens.tolist() == [0, *together.tolist(), 0]


def test_logprobs_are_of_the_raw_logits():
    x = logits_of(3, 8)
    rows = [SamplingParams(temperature=0.0, logprobs=2), SamplingParams(logprobs=4, seed=1), SamplingParams(seed=2)]
    found = sample(x, Settings.of(rows, VOCAB), torch.arange(3))
    wanted = torch.log_softmax(x, -1)
    picked = wanted.gather(1, found.tokens[:, None])[:, 0]
    torch.testing.assert_close(found.logprobs.token, picked)
    assert torch.equal(found.logprobs.top, wanted.topk(4).values)
    assert torch.equal(wanted.gather(1, found.logprobs.top_ids), found.logprobs.top)
    assert found.logprobs.rank.tolist() == [int((w > p).sum()) for w, p in zip(wanted, picked, strict=True)]
    assert sample(x[2:], Settings.of(rows[2:], VOCAB), torch.arange(1)).logprobs is None
    assert logprobs_of(x, found.tokens, 0).top.shape == (3, 0)


@pytest.mark.parametrize("fill", [math.nan, math.inf, -math.inf])
def test_a_row_without_a_distribution_is_named(fill):
    x = logits_of(3, 2)
    x[1] = fill
    found = sample(x, Settings.of(ROWS[:3], VOCAB), torch.arange(3))
    assert found.broken.tolist() == [False, True, False] and found.tokens[1] == 0
    with pytest.raises(DSV4Error, match=r"rows \[1\]"):
        found.check()


@pytest.mark.parametrize(
    "name, value",
    [
        ("temperature", -1), ("temperature", math.nan), ("top_p", 0), ("top_p", 1.1), ("top_k", -1), ("top_k", 1.5),
        ("min_p", -0.1), ("min_p", 2), ("repetition", 0), ("presence", math.inf), ("frequency", "1"), ("seed", -1),
        ("seed", 2**63), ("logprobs", 65), ("bias", {-1: 0.0}), ("bias", {1: math.nan}), ("bias", [1]),
    ],
)  # fmt: skip
def test_bad_settings_are_named(name, value):
    with pytest.raises(ArgumentError, match=name):
        SamplingParams(**{name: value})


def test_bad_batches_are_named():
    with pytest.raises(ArgumentError, match="rows"):
        Settings.of([], VOCAB)
    with pytest.raises(ArgumentError, match="bias"):
        Settings.of([SamplingParams(bias={VOCAB: 1.0})], VOCAB)
    settings = Settings.of(ROWS[:2], VOCAB)
    with pytest.raises(ArgumentError, match=r"logits.shape"):
        process(torch.zeros(3, VOCAB), settings)
    with pytest.raises(ArgumentError, match="history"):
        process(torch.zeros(2, VOCAB), settings, History.empty(2, VOCAB + 1))
