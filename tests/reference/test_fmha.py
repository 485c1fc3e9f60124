"""Attention with a sink against loops over scalars; masks, index lists and the two-branch merge against each other."""

import math

import pytest
import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.reference import fmha

B, T, H, D, S1, S2 = 2, 3, 5, 4, 6, 7


def naive(q, keys, sink, scale):
    """One query of one head over a list of keys; every number a Python float. Returns o and lse."""
    s = [scale * sum(a * b for a, b in zip(q, key, strict=True)) for key in keys]
    denominator = sum(math.exp(v) for v in s) + math.exp(sink)
    o = [sum(math.exp(v) * key[i] for v, key in zip(s, keys, strict=True)) / denominator for i in range(len(q))]
    return o, math.log(sum(math.exp(v) for v in s)) if keys else -math.inf


@pytest.fixture
def case(randn):
    window, entries = randn(B, T, S1) < 0, randn(B, T, S2) < 0
    window[0, 1], entries[0, 1] = False, False  # a row without keys
    window[1, 2], entries[1, 2] = True, True
    return randn(B, T, H, D), randn(B, S1, D), window, randn(B, S2, D), entries, randn(H)


def test_against_loops(case):
    q, window_kv, window, entries_kv, entries, sink = case
    o, lse = fmha.fmha(q, window_kv, window, entries_kv, entries, sink, scale=0.7)
    for b in range(B):
        for t in range(T):
            keys = [window_kv[b, s].tolist() for s in range(S1) if window[b, t, s]]
            keys += [entries_kv[b, s].tolist() for s in range(S2) if entries[b, t, s]]
            for h in range(H):
                want, want_lse = naive(q[b, t, h].tolist(), keys, sink[h].item(), 0.7)
                assert o[b, t, h].tolist() == pytest.approx(want, abs=1e-13)
                assert lse[b, t, h].item() == pytest.approx(want_lse, abs=1e-12)


def test_without_entries_the_sink_still_counts(case):
    q, kv, _, _, _, sink = case
    seen = torch.ones(T, S1, dtype=torch.bool)
    o, lse = fmha.fmha(q, kv, seen, None, None, sink, scale=0.7)
    plain, plain_lse = fmha.fmha(q, kv, seen, None, None, None, scale=0.7)
    torch.testing.assert_close(o, plain / (1 + torch.exp(sink - lse)).unsqueeze(-1))
    assert torch.equal(lse, plain_lse)
    assert (o - plain).abs().max() > 0.1


def test_no_sink_is_torch_softmax(case):
    q, kv, *_ = case
    o, _ = fmha.attend(q, kv, torch.ones(T, S1, dtype=torch.bool), None, 0.5)
    k = kv[:, None].expand(B, H, S1, D)
    want = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k, k, scale=0.5).transpose(1, 2)
    torch.testing.assert_close(o, want)


def test_infinite_sinks_and_empty_rows(case):
    q, window_kv, window, entries_kv, entries, _ = case
    sink = torch.tensor([math.inf, -math.inf, 1000.0, -1000.0, 0.0], dtype=torch.float64)
    o, lse = fmha.fmha(q, window_kv, window, entries_kv, entries, sink, scale=0.7)
    plain, _ = fmha.fmha(q, window_kv, window, entries_kv, entries, None, scale=0.7)
    assert (o[:, :, [0, 2]] == 0).all()  # a large sink takes all the mass
    torch.testing.assert_close(o[:, :, [1, 3]], plain[:, :, [1, 3]])
    assert (o[0, 1] == 0).all() and (lse[0, 1] == -math.inf).all()
    assert (plain[0, 1] == 0).all() and torch.isfinite(plain).all()


def test_large_scores_do_not_overflow():
    q, kv = torch.tensor([[[[300.0, 0.0]]]]), torch.tensor([[[300.0, 1.0], [299.0, 2.0]]])
    o, lse = fmha.attend(q, kv, torch.ones(1, 2, dtype=torch.bool), torch.zeros(1), 1.0)
    assert o[0, 0, 0].tolist() == [300.0, 1.0] and lse.item() == 90000.0


def test_merge_equals_the_union(case):
    q, window_kv, window, entries_kv, entries, sink = case
    whole, _ = fmha.fmha(q, window_kv, window, entries_kv, entries, sink, scale=0.7)
    one = fmha.attend(q, window_kv, window, None, 0.7)
    two = fmha.attend(q, entries_kv, entries, None, 0.7)
    torch.testing.assert_close(fmha.merge(*one, *two, sink), whole)
    # Putting the sink into one branch first is another function.
    wrong = fmha.attend(q, window_kv, window, sink, 0.7)
    assert (fmha.merge(*wrong, *two) - whole)[1, 2].abs().max() > 1e-2


def test_slices_of_the_head_dimension_do_not_merge(case):
    """Halves of a dot product have softmaxes of their own, which no log-sum-exp joins to that of the whole."""
    q, window_kv, window, *_ = case
    whole, lse = fmha.attend(q, window_kv, window, None, 0.7)
    half = q.shape[-1] // 2
    slices = slice(None, half), slice(half, None)
    parts = [fmha.attend(q[..., s], window_kv[..., s], window, None, 0.7) for s in slices]
    joined = torch.cat([o for o, _ in parts], -1)
    assert (joined - whole).norm() / whole.norm() > 0.05
    assert (torch.logaddexp(parts[0][1], parts[1][1]) - lse)[0, 0].abs().min() > 0.05


def test_index_lists_equal_masks(case, randn):
    q, kv, *_ = case
    indices = torch.tensor([[5, -1, 0], [-1, -1, -1], [2, 1, 3]]).expand(B, T, 3)
    sink = randn(H)
    got = fmha.sparse(q, kv, indices, sink, 0.7)
    want = fmha.attend(q, kv, fmha.visible_from_indices(indices, S1), sink, 0.7)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_window_includes_the_query_itself():
    seen = fmha.window_visible(torch.arange(4, 9), torch.arange(0, 10), window=3)
    for row, t in zip(seen.tolist(), range(4, 9), strict=True):
        assert [s for s, v in enumerate(row) if v] == [t - 2, t - 1, t]


def test_masks_from_limits_and_indices():
    assert fmha.visible_from_limit(torch.tensor([0, 2]), 3).tolist() == [[False] * 3, [True, True, False]]
    assert fmha.visible_from_indices(torch.tensor([[-1, 2], [-1, -1]]), 3).tolist() == [
        [False, False, True],
        [False] * 3,
    ]
    assert fmha.visible_from_indices(torch.tensor([[-1]]), 0).shape == (1, 0)


def test_gradients(case):
    q, window_kv, window, entries_kv, entries, sink = case

    def f(q, window_kv, entries_kv, sink):
        o, lse = fmha.fmha(q, window_kv, window, entries_kv, entries, sink, scale=0.7)
        return o, lse[torch.isfinite(lse)]

    assert torch.autograd.gradcheck(f, [t.clone().requires_grad_() for t in (q, window_kv, entries_kv, sink)])


def test_refusals(case):
    q, kv, *_ = case
    seen = torch.ones(T, S1, dtype=torch.bool)
    with pytest.raises(ArgumentError, match="kv.shape"):
        fmha.attend(q, kv[..., :3], seen, None, 1.0)
    with pytest.raises(ArgumentError, match="sink.shape"):
        fmha.attend(q, kv, seen, torch.zeros(1), 1.0)
    with pytest.raises(ArgumentError, match="indices=6"):
        fmha.sparse(q, kv, torch.full((B, T, 2), 6), None, 1.0)
    with pytest.raises(ArgumentError, match="indices=3"):
        fmha.visible_from_indices(torch.tensor([[3]]), 3)
