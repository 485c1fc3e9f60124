"""Query, KV and output paths against loops over heads."""

import math

import pytest
import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.reference import lm_head, output_proj, qnorm_rope_kv, rope

EPS, FREQS = 1e-2, rope.base_freqs(4, 50.0)


def normed(row, weight):
    rms = math.sqrt(sum(v * v for v in row) / len(row) + EPS)
    return [w * v / rms for v, w in zip(row, weight, strict=True)]


def turned(row, position):
    return rope.apply(torch.tensor([row], dtype=torch.float64), torch.tensor([position]), FREQS)[0].tolist()


def test_queries_and_kv_against_loops(randn):
    x, wq_a, q_norm, wq_b = randn(2, 3, 7), randn(5, 7), randn(5), randn(2 * 6, 5)
    wkv, kv_norm, positions = randn(6, 7), randn(6), torch.tensor([9, 10, 11])
    qr = qnorm_rope_kv.q_latent(x, wq_a, q_norm, EPS)
    q, kv = qnorm_rope_kv.qnorm_rope_kv(
        qnorm_rope_kv.split_heads(qr @ wq_b.mT, 2), x @ wkv.mT, kv_norm, positions, FREQS, EPS
    )
    for b in range(2):
        for t in range(3):
            latent = normed((wq_a @ x[b, t]).tolist(), q_norm.tolist())
            assert qr[b, t].tolist() == pytest.approx(latent, abs=1e-12)
            heads = (wq_b @ torch.tensor(latent, dtype=torch.float64)).tolist()
            for h in range(2):
                want = turned(normed(heads[6 * h : 6 * h + 6], [1] * 6), 9 + t)
                assert q[b, t, h].tolist() == pytest.approx(want, abs=1e-12)
            want = turned(normed((wkv @ x[b, t]).tolist(), kv_norm.tolist()), 9 + t)
            assert kv[b, t].tolist() == pytest.approx(want, abs=1e-12)


def test_codec_rounds_the_rotated_vector(randn):
    kv, norm, positions = randn(2, 3, 6), randn(6), torch.tensor([9, 10, 11])
    plain = qnorm_rope_kv.kv_vector(kv, norm, positions, FREQS, EPS)
    assert torch.equal(qnorm_rope_kv.kv_vector(kv, norm, positions, FREQS, EPS, torch.round), plain.round())


def test_output_against_loops(randn):
    heads, d, groups, rank = 4, 6, 2, 3
    o, wo_a, wo_b = randn(2, 3, heads, d), randn(groups * rank, 2 * d), randn(7, groups * rank)
    positions = torch.tensor([9, 10, 11])
    got = output_proj.output_proj(o, positions, FREQS, wo_a, wo_b, groups)
    for b in range(2):
        for t in range(3):
            u = []
            for g in range(groups):
                row = []
                for h in (2 * g, 2 * g + 1):  # consecutive heads form a group
                    row += rope.apply_inverse(o[b, t, h][None], positions[t, None], FREQS)[0].tolist()
                for r in range(rank):
                    u.append(sum(w * v for w, v in zip(wo_a[g * rank + r].tolist(), row, strict=True)))
            want = [sum(w * v for w, v in zip(line, u, strict=True)) for line in wo_b.tolist()]
            assert got[b, t].tolist() == pytest.approx(want, abs=1e-12)


def test_inverse_rope_gives_values_relative_to_the_query(randn):
    """A value roped at s and turned back at t is the bare value roped by s - t: the output knows only the distance."""
    value, freqs = randn(1, 1, 1, 6), FREQS
    roped = rope.apply(value, torch.tensor([[40]]), freqs)
    back = rope.apply_inverse(roped, torch.tensor([[43]]), freqs)
    want = rope.apply(value, torch.tensor([[-3]]), freqs)
    torch.testing.assert_close(back, want, rtol=0, atol=1e-5)


def test_lm_head(randn):
    h, weight = randn(2, 3, 5), randn(11, 5)
    assert lm_head.lm_head(h, weight)[1, 2, 4].item() == pytest.approx(sum((h[1, 2] * weight[4]).tolist()))


def test_refusals(randn):
    with pytest.raises(ArgumentError, match="n_heads=5"):
        qnorm_rope_kv.split_heads(randn(1, 1, 12), 5)
    with pytest.raises(ArgumentError, match="groups=3"):
        output_proj.group_heads(randn(1, 1, 4, 6), 3)
