"""mHC against explicit loops over streams, plus the properties that make it what it is."""

import math

import pytest
import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.reference import embedding, mhc

N, D, EPS, RMS_EPS = 4, 7, 1e-6, 1e-6


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def naive_mixes(x, fn):
    """x: list of N lists of D numbers."""
    z = [value for stream in x for value in stream]
    norm = 1 / math.sqrt(sum(v * v for v in z) / len(z) + RMS_EPS)
    return [sum(f * v for f, v in zip(row, z, strict=True)) * norm for row in fn]


def naive_sinkhorn(logits, iters):
    c = []
    for row in logits:
        top = max(row)
        e = [math.exp(v - top) for v in row]
        c.append([v / sum(e) + EPS for v in e])
    for i in range(2 * iters - 1):  # the softmax was the first row step; now columns, rows, columns, ...
        if i % 2 == 0:
            sums = [sum(c[r][k] for r in range(N)) + EPS for k in range(N)]
            c = [[c[r][k] / sums[k] for k in range(N)] for r in range(N)]
        else:
            c = [[v / (sum(row) + EPS) for v in row] for row in c]
    return c


def naive_site(x, fn, scale, base, y):
    m = naive_mixes(x, fn)
    pre = [sigmoid(scale[0] * m[i] + base[i]) + EPS for i in range(N)]
    post = [2 * sigmoid(scale[1] * m[N + i] + base[N + i]) for i in range(N)]
    at = [[2 * N + N * r + c for c in range(N)] for r in range(N)]
    comb = naive_sinkhorn([[scale[2] * m[k] + base[k] for k in row] for row in at], 20)
    collapsed = [sum(pre[i] * x[i][d] for i in range(N)) for d in range(D)]
    out = [[post[j] * y[d] + sum(comb[i][j] * x[i][d] for i in range(N)) for d in range(D)] for j in range(N)]
    return collapsed, post, comb, out


@pytest.fixture
def site(randn):
    """fn, scale, base of one site; none of them near zero or symmetric."""
    return randn(24, N * D), torch.tensor([0.7, -1.3, 0.9], dtype=torch.float64), randn(24)


def test_site_against_loops(randn, site):
    streams, y = 3 * randn(2, 3, N, D), randn(2, 3, D)
    pre_w, post_w, comb = mhc.coefficients(streams, *site, iters=20, hc_eps=EPS, rms_eps=RMS_EPS)
    x, out = mhc.pre(streams, pre_w), mhc.post(y, streams, post_w, comb)
    for b in range(2):
        for t in range(3):
            want = naive_site(streams[b, t].tolist(), *(w.tolist() for w in site), y[b, t].tolist())
            for got, expected in zip((x, post_w, comb, out), want, strict=True):
                expected = torch.tensor(expected, dtype=torch.float64)
                torch.testing.assert_close(got[b, t], expected, rtol=1e-12, atol=1e-12)


def test_sinkhorn_is_doubly_stochastic_and_ends_with_columns(randn):
    c = mhc.sinkhorn(3 * randn(50, N, N), 20, EPS)
    assert (c > 0).all()
    # The last step divides columns by their sum + eps, so columns are exact up to eps and rows are not.
    torch.testing.assert_close(c.sum(-2), torch.ones(50, N).double(), rtol=0, atol=1.1 * EPS)
    assert (c.sum(-1) - 1).abs().max() > 10 * EPS
    few = mhc.sinkhorn(3 * randn(50, N, N), 2, EPS)
    assert (c.sum(-1) - 1).abs().mean() < 0.1 * (few.sum(-1) - 1).abs().mean()


def test_neutral_site_passes_through(randn):
    """Logits 0: pre = 1/2, post = 1, comb = 1/4 everywhere."""
    streams = randn(3, N, D)
    zero = torch.zeros(24, dtype=torch.float64)
    pre_w, post_w, comb = mhc.coefficients(
        streams, torch.zeros(24, N * D).double(), zero[:3], zero, iters=20, hc_eps=EPS, rms_eps=RMS_EPS
    )
    assert (pre_w == 0.5 + EPS).all()
    assert (post_w == 1).all()
    torch.testing.assert_close(comb, torch.full((3, N, N), 0.25).double(), rtol=0, atol=EPS)


def test_head_collapse_against_loops(randn):
    streams, fn, base = randn(5, N, D), randn(N, N * D), randn(N)
    got = mhc.head_collapse(streams, fn, torch.tensor([1.7]).double(), base, hc_eps=EPS, rms_eps=RMS_EPS)
    for t in range(5):
        x = streams[t].tolist()
        m = naive_mixes(x, fn.tolist())
        w = [sigmoid(float(torch.tensor(1.7)) * m[i] + base[i].item()) + EPS for i in range(N)]
        want = [sum(w[i] * x[i][d] for i in range(N)) for d in range(D)]
        torch.testing.assert_close(got[t], torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_streams_start_as_copies(randn):
    h = randn(2, 3, D)
    streams = embedding.init_streams(h, N)
    assert streams.shape == (2, 3, N, D)
    assert all(torch.equal(streams[..., i, :], h) for i in range(N))


def test_embedding_looks_up_rows(randn):
    weight = randn(11, D)
    assert torch.equal(embedding.embedding(torch.tensor([[3, 0, 10]]), weight)[0], weight[[3, 0, 10]])


def test_gradients(randn, site):
    streams, y = randn(2, N, D), randn(2, D)

    def f(streams, y, fn, scale, base):
        pre_w, post_w, comb = mhc.coefficients(streams, fn, scale, base, iters=3, hc_eps=EPS, rms_eps=RMS_EPS)
        return mhc.pre(streams, pre_w), mhc.post(y, streams, post_w, comb)

    inputs = [t.clone().requires_grad_() for t in (streams, y, *site)]
    assert torch.autograd.gradcheck(f, inputs)


def test_refusals(randn):
    with pytest.raises(ArgumentError, match=r"fn.shape=\(24, 27\)"):
        mhc.mixes(randn(2, N, D), randn(24, 27), RMS_EPS)
    with pytest.raises(ArgumentError, match=r"n \* \(2 \+ n\) = 24"):
        mhc.split(randn(2, 23), N)
