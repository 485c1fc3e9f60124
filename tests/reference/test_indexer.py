"""Indexer scores against loops, and the defined order of top-k against Python's sort."""

import math
import random

import pytest
import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.reference import indexer, rope, topk


def test_scores_against_loops(randn):
    iq, ik, w = randn(2, 3, 5, 4), randn(2, 6, 4), randn(2, 3, 5)
    got = indexer.scores(iq, ik, w)
    for b in range(2):
        for t in range(3):
            for s in range(6):
                want = 0.0
                for h in range(5):
                    dot = sum(iq[b, t, h, i].item() * ik[b, s, i].item() for i in range(4))
                    want += w[b, t, h].item() * max(dot, 0.0)
                assert got[b, t, s].item() == pytest.approx(want, abs=1e-12)


def test_queries_have_no_norm_and_rotate_their_last_dims(randn):
    qr, wq_b, freqs = randn(2, 3, 7), randn(4 * 6, 7), rope.base_freqs(4, 50.0)
    positions = torch.tensor([5, 6, 7])
    got = indexer.queries(qr, wq_b, 4, positions, freqs)
    plain = (qr @ wq_b.mT).reshape(2, 3, 4, 6)
    assert torch.equal(got[..., :2], plain[..., :2])
    torch.testing.assert_close(got.norm(dim=-1), plain.norm(dim=-1))
    for t in range(3):
        want = rope.apply(plain[:, t], positions[t, None], freqs)
        torch.testing.assert_close(got[:, t], want)


def test_head_weights_are_scaled(randn):
    x, proj = randn(2, 3, 7), randn(64, 7)
    torch.testing.assert_close(indexer.head_weights(x, proj, 128), x @ proj.mT / math.sqrt(64 * 128))


def test_an_orthogonal_codec_on_both_sides_changes_nothing(randn):
    iq, ik, w = randn(2, 3, 5, 4), randn(2, 6, 4), randn(2, 3, 5)
    turn = torch.linalg.qr(randn(4, 4))[0]
    torch.testing.assert_close(indexer.scores(iq @ turn, ik @ turn, w), indexer.scores(iq, ik, w))
    assert (indexer.scores(iq @ turn, ik, w) - indexer.scores(iq, ik, w)).abs().max() > 0.1


def test_select_sees_only_complete_windows(randn):
    positions = torch.arange(13)
    picks = indexer.select(randn(2, 13, 3), positions, rate=4, k=2)
    for t in range(13):
        complete = (t + 1) // 4
        for row in picks[:, t].tolist():
            real = [s for s in row if s >= 0]
            assert len(real) == min(2, complete) and all(s < complete for s in real)
            assert row[len(real) :] == [-1] * (2 - len(real))


def test_topk_against_sort():
    rng = random.Random(3)
    for _ in range(300):
        size, k = rng.randint(0, 9), rng.randint(1, 11)
        limit = rng.randint(0, size)
        # Few distinct values: most rows have ties, signed zeros and infinities among them.
        row = [rng.choice([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf]) for _ in range(size)]
        want = sorted(range(limit), key=lambda i: (-row[i], i))[:k]
        got = topk.topk(torch.tensor([row]), k, torch.tensor([limit]))
        assert got.tolist() == [want + [-1] * (k - len(want))]
        assert got.dtype == torch.int64


def test_topk_limits_broadcast_over_requests(randn):
    scores = randn(2, 3, 5)
    got = topk.topk(scores, 5, torch.tensor([0, 2, 5]))
    assert (got >= 0).sum(-1).tolist() == [[0, 2, 5]] * 2
    assert torch.equal(got[:, 2], scores[:, 2].argsort(-1, descending=True))
    assert torch.equal(topk.topk(scores, 5)[:, 0], scores[:, 0].argsort(-1, descending=True))


def test_refusals(randn):
    with pytest.raises(ArgumentError, match="k=0"):
        topk.topk(randn(2, 3), 0)
    with pytest.raises(ArgumentError, match="NaN"):
        topk.topk(torch.tensor([[0.0, math.nan]]), 1)
    with pytest.raises(ArgumentError, match="ik.shape"):
        indexer.scores(randn(1, 2, 3, 4), randn(1, 5, 6), randn(1, 2, 3))
