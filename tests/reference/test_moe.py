"""Router and experts against loops over tokens and experts."""

import math

import pytest
import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.reference import moe_gemm, router

E, K, D, WIDTH, LIMIT, FACTOR = 7, 3, 5, 6, 0.8, 2.5


def naive_affinity(row, weight):
    return [math.sqrt(math.log1p(math.exp(sum(a * b for a, b in zip(row, w, strict=True))))) for w in weight]


def test_score_routing_against_loops(randn):
    x, weight, bias = randn(2, 9, D), randn(E, D), randn(E)
    experts, weights = router.score_route(x, weight, bias, K, FACTOR)
    changed = 0
    for b in range(2):
        for t in range(9):
            a = naive_affinity(x[b, t].tolist(), weight.tolist())
            want = sorted(range(E), key=lambda e: -(a[e] + bias[e].item()))[:K]
            changed += set(want) != set(sorted(range(E), key=lambda e: -a[e])[:K])
            assert experts[b, t].tolist() == want
            total = sum(a[e] for e in want)
            assert weights[b, t].tolist() == pytest.approx([a[e] / total * FACTOR for e in want], abs=1e-12)
    assert changed > 5  # the bias decides, but is not in the weights


def test_hash_routing_takes_experts_from_the_table_and_weights_from_the_gate(randn):
    x, weight = randn(1, 4, D), randn(E, D)
    table = torch.tensor([[0, 1, 2], [6, 3, 1], [2, 5, 4]])
    tokens = torch.tensor([[2, 0, 1, 1]])
    experts, weights = router.hash_route(x, weight, table, tokens, FACTOR)
    assert experts[0].tolist() == [[2, 5, 4], [0, 1, 2], [6, 3, 1], [6, 3, 1]]
    for t in range(4):
        a = naive_affinity(x[0, t].tolist(), weight.tolist())
        chosen = [a[e] for e in experts[0, t].tolist()]
        assert weights[0, t].tolist() == pytest.approx([v / sum(chosen) * FACTOR for v in chosen], abs=1e-12)


def test_equal_scores_go_to_the_lower_expert():
    a = torch.full((2, E), 0.5)
    assert router.select_by_score(a, torch.zeros(E), K).tolist() == [[0, 1, 2]] * 2


def naive_expert(row, w1, w2, w3, weight):
    def dot(w):
        return sum(a * b for a, b in zip(row, w, strict=True))

    hidden = []
    for gate_row, up_row in zip(w1, w3, strict=True):
        gate, up = min(dot(gate_row), LIMIT), max(min(dot(up_row), LIMIT), -LIMIT)
        hidden.append(gate / (1 + math.exp(-gate)) * up * weight)
    return [sum(a * b for a, b in zip(hidden, line, strict=True)) for line in w2]


def test_experts_against_loops(randn):
    x, experts = randn(8, D), randn(8, E).argsort(-1)[:, :K]
    experts[experts == 4] = 5  # expert 4 gets no token; expert 5 counts twice where it was chosen already
    weights = randn(8, K)
    w1, w2, w3 = ([randn(*shape) for _ in range(E)] for shape in ((WIDTH, D), (D, WIDTH), (WIDTH, D)))
    got = moe_gemm.moe_gemm(x, experts, weights, w1, w2, w3, LIMIT)
    for n in range(8):
        want = [0.0] * D
        for e, weight in zip(experts[n].tolist(), weights[n].tolist(), strict=True):
            y = naive_expert(x[n].tolist(), w1[e].tolist(), w2[e].tolist(), w3[e].tolist(), weight)
            want = [a + b for a, b in zip(want, y, strict=True)]
        assert got[n].tolist() == pytest.approx(want, abs=1e-12)


def test_shared_expert_is_clamped_too(randn):
    x, w1, w2, w3 = 3 * randn(4, D), randn(WIDTH, D), randn(D, WIDTH), randn(WIDTH, D)
    got = moe_gemm.expert(x, w1, w2, w3, LIMIT)
    for n in range(4):
        want = naive_expert(x[n].tolist(), w1.tolist(), w2.tolist(), w3.tolist(), 1.0)
        assert got[n].tolist() == pytest.approx(want, abs=1e-12)
    assert (got - moe_gemm.expert(x, w1, w2, w3, 1e9)).abs().max() > 1


def test_clamp_is_one_sided_on_the_gate():
    values = torch.tensor([-5.0, 5.0], dtype=torch.float64)
    one = torch.ones(2, dtype=torch.float64)
    silu = [v / (1 + math.exp(-v)) for v in (-5.0, 2.0)]
    assert moe_gemm.swiglu(values, one, 2.0).tolist() == pytest.approx(silu)
    assert moe_gemm.swiglu(one, values, 2.0).tolist() == pytest.approx(
        [-2 / (1 + math.exp(-1)), 2 / (1 + math.exp(-1))]
    )


def test_no_token_no_output(randn):
    w = [randn(WIDTH, D)], [randn(D, WIDTH)], [randn(WIDTH, D)]
    empty = moe_gemm.moe_gemm(randn(0, D), torch.zeros(0, 1, dtype=torch.int64), randn(0, 1), *w, LIMIT)
    assert empty.shape == (0, D)


def test_gradients_reach_weights_router_and_input(randn):
    w1, w2, w3 = (randn(E, *shape).requires_grad_() for shape in ((WIDTH, D), (D, WIDTH), (WIDTH, D)))
    x, gate, bias = randn(3, D).requires_grad_(), randn(E, D).requires_grad_(), randn(E)

    def f(x, gate, w1, w2, w3):
        experts, weights = router.score_route(x, gate, bias, K, FACTOR)
        return moe_gemm.moe_gemm(x, experts, weights, w1, w2, w3, LIMIT)

    assert torch.autograd.gradcheck(f, (x, gate, w1, w2, w3))


def test_refusals(randn):
    w = [randn(WIDTH, D)], [randn(D, WIDTH)], [randn(WIDTH, D)]
    with pytest.raises(ArgumentError, match="k=8"):
        router.select_by_score(randn(2, E), randn(E), 8)
    with pytest.raises(ArgumentError, match="experts='-1..-1'"):
        moe_gemm.moe_gemm(randn(1, D), torch.tensor([[-1]]), randn(1, 1), *w, LIMIT)
    with pytest.raises(ArgumentError, match="experts='1..1'"):
        moe_gemm.moe_gemm(randn(1, D), torch.tensor([[1]]), randn(1, 1), *w, LIMIT)
    with pytest.raises(ArgumentError, match="experts.shape"):
        moe_gemm.moe_gemm(randn(2, D), torch.tensor([[0]]), randn(1, 1), *w, LIMIT)
