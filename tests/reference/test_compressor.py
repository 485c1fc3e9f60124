"""The compressor against loops over tokens and channels, in one piece and in every kind of chunk."""

import math

import pytest
import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.reference import compressor, rmsnorm, rope

B, HIDDEN, D, ROPE, EPS = 2, 5, 6, 4, 1e-6
FREQS = rope.base_freqs(ROPE, 50.0)
KINDS = pytest.mark.parametrize(("rate", "overlap"), [(4, True), (8, False), (3, True), (1, True)])


@pytest.fixture
def make(randn):
    def weights(rate, overlap):
        width = 2 * D if overlap else D
        return compressor.Weights(randn(width, HIDDEN), randn(width, HIDDEN), randn(rate, width), randn(D))

    return weights


def empty(w, rate, overlap):
    return compressor.new_state(B, rate, w.ape.shape[1], overlap, torch.float64, torch.device("cpu"))


def naive_entry(x, w, entry, rate, overlap):
    """One pooled entry of one request, from scalars: a list of D numbers before norm and rope."""

    def row(matrix, channel, t):
        return sum(matrix[channel, i].item() * x[t, i].item() for i in range(HIDDEN))

    pooled = []
    for channel in range(D):
        slots = []  # (token, row of the weights that this slot reads)
        if overlap:
            slots += [(t, channel) for t in range((entry - 1) * rate, entry * rate) if t >= 0]
            slots += [(t, D + channel) for t in range(entry * rate, (entry + 1) * rate)]
        else:
            slots += [(t, channel) for t in range(entry * rate, (entry + 1) * rate)]
        gates = [math.exp(row(w.wgate, r, t) + w.ape[t % rate, r].item()) for t, r in slots]
        values = [row(w.wkv, r, t) for t, r in slots]
        pooled.append(sum(g * v for g, v in zip(gates, values, strict=True)) / sum(gates))
    return pooled


@KINDS
def test_against_loops(randn, make, rate, overlap):
    w, length = make(rate, overlap), 3 * rate + rate // 2
    x = randn(B, length, HIDDEN)
    got, _ = compressor.compress(x, empty(w, rate, overlap), 0, w, FREQS, EPS, overlap=overlap)
    assert got.shape == (B, length // rate, D)
    for b in range(B):
        for entry in range(length // rate):
            pooled = torch.tensor(naive_entry(x[b], w, entry, rate, overlap), dtype=torch.float64)
            want = w.norm * pooled / (pooled.square().mean() + EPS).sqrt()
            want = rope.apply(want[None], torch.tensor([entry * rate]), FREQS)[0]
            torch.testing.assert_close(got[b, entry], want, rtol=1e-11, atol=1e-11)


@KINDS
@pytest.mark.parametrize("chunks", [[1] * 21, [7, 1, 13], [2, 3, 16], [20, 1], [3, 0, 18]], ids=str)
def test_chunks_equal_one_piece(randn, make, rate, overlap, chunks):
    w, x = make(rate, overlap), randn(B, 21, HIDDEN)
    whole, final = compressor.compress(x, empty(w, rate, overlap), 0, w, FREQS, EPS, overlap=overlap)
    state, pieces, start = empty(w, rate, overlap), [], 0
    for size in chunks:
        entries, state = compressor.compress(x[:, start : start + size], state, start, w, FREQS, EPS, overlap=overlap)
        start += size
        assert sum(p.shape[1] for p in pieces) + entries.shape[1] == start // rate  # each as soon as it is complete
        pieces.append(entries)
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=1e-13)
    for got, want in zip(state, final, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


@KINDS
def test_state_has_the_real_size(make, rate, overlap):
    w = make(rate, overlap)
    state = empty(w, rate, overlap)
    assert state.k.shape == state.z.shape == (B, 2 * rate if overlap else rate, 2 * D if overlap else D)
    assert (state.k == 0).all() and (state.z == -math.inf).all()


def test_state_rows_are_where_the_position_says(randn, make):
    w, x = make(4, True), randn(B, 11, HIDDEN)
    _, state = compressor.compress(x, empty(w, 4, True), 0, w, FREQS, EPS, overlap=True)
    for t in range(3, 11):  # the newest 8 of 11 rows
        torch.testing.assert_close(state.k[:, t % 8], x[:, t] @ w.wkv.mT)
        torch.testing.assert_close(state.z[:, t % 8], x[:, t] @ w.wgate.mT + w.ape[t % 4])


def test_bias_follows_the_position_not_the_chunk(randn, make):
    w, x = make(4, True), randn(B, 2, HIDDEN)
    _, z = compressor.project(x, torch.tensor([6, 7]), w)
    torch.testing.assert_close(z - x @ w.wgate.mT, w.ape[2:].expand(B, 2, -1))


def test_softmax_is_per_channel():
    k = torch.tensor([[1.0, 10.0], [2.0, 20.0]], dtype=torch.float64)
    z = torch.tensor([[0.0, -math.inf], [0.0, 3.0]], dtype=torch.float64)
    assert compressor.pool(k, z).tolist() == [1.5, 20.0]


def test_overlap_takes_ca_of_the_previous_and_cb_of_the_current():
    previous, current = torch.zeros(1, 1, 4, 6), torch.ones(1, 1, 4, 6)
    previous[..., :3] = 7
    current[..., 3:] = 9
    slots = compressor.overlap_slots(previous, current)
    assert slots[0, 0, :, 0].tolist() == [7] * 4 + [9] * 4
    assert slots.unique().tolist() == [7, 9]


@pytest.mark.parametrize("rate", [1, 4, 128])
def test_visibility_is_that_of_complete_windows(rate):
    """Entry s holds tokens up to (s + 1) * rate - 1 and is visible from that token on."""
    positions = torch.arange(3 * rate + 1)
    counts = compressor.visible_count(positions, rate)
    for t, count in enumerate(counts.tolist()):
        assert count == sum((s + 1) * rate - 1 <= t for s in range(5))


def test_entry_stands_at_its_first_token():
    assert compressor.entry_positions(torch.arange(4), 128).tolist() == [0, 128, 256, 384]


def test_codec_sees_the_finished_entry(randn, make):
    w, x = make(4, True), randn(B, 9, HIDDEN)
    plain, _ = compressor.compress(x, empty(w, 4, True), 0, w, FREQS, EPS, overlap=True)
    seen = []

    def codec(entries):
        seen.append(entries)
        return entries.round()

    got, _ = compressor.compress(x, empty(w, 4, True), 0, w, FREQS, EPS, overlap=True, codec=codec)
    assert torch.equal(seen[0], plain) and torch.equal(got, plain.round())


@KINDS
def test_gradients(randn, make, rate, overlap):
    w = make(rate, overlap)
    x = randn(1, 2 * rate + 1, HIDDEN)
    state = compressor.new_state(1, rate, w.ape.shape[1], overlap, torch.float64, torch.device("cpu"))

    def f(x, *weights):
        w, cut = compressor.Weights(*weights), rate + 1  # through the state as well
        first, mid = compressor.compress(x[:, :cut], state, 0, w, FREQS, EPS, overlap=overlap)
        second, _ = compressor.compress(x[:, cut:], mid, cut, w, FREQS, EPS, overlap=overlap)
        return torch.cat((first, second), dim=1)

    inputs = [t.clone().requires_grad_() for t in (x, *w)]
    assert torch.autograd.gradcheck(f, inputs)


def test_finish_norms_then_rotates(randn):
    pooled, norm, index = randn(B, 3, D), randn(D), torch.tensor([2, 3, 4])
    want = rope.apply(rmsnorm.rmsnorm(pooled, norm, EPS), torch.tensor([8, 12, 16]), FREQS)
    assert torch.equal(compressor.finish(pooled, index, norm, 4, FREQS, EPS), want)


def test_refusals(randn):
    with pytest.raises(ArgumentError, match=r"rows_k.shape=\(2, 7, 6\)"):
        compressor.pool_windows(randn(B, 7, D), randn(B, 7, D), 4, False)
    with pytest.raises(ArgumentError, match="rows_k.shape"):
        compressor.pool_windows(randn(B, 8, D), randn(B, 4, D), 4, False)


@pytest.mark.parametrize("cuts", [(200,), (3, 1, 60, 136), (128, 72)])
def test_a_running_state_pools_what_the_rows_pool(cuts):
    """Requests of 200 rows in chunks: entries of the rows' state, and the parts of the rows that stay open."""
    generator = torch.Generator().manual_seed(0)
    rate, dim, total = 32, 64, sum(cuts)
    k, gate, ape = (torch.randn(n, dim, generator=generator).double() for n in (total, total, rate))
    cos, sin = (torch.randn(total, 8, generator=generator).double() for _ in range(2))
    state = compressor.new_state(1, rate, dim, False, torch.float64, torch.device("cpu"))
    parts, found, first = torch.full((1, 3, dim), float("nan"), dtype=torch.float64), [[], []], 0
    for count in cuts:
        plan, rows = torch.tensor([[0, count, first, 0]]), slice(first, first + count)
        weights = ape, torch.ones(dim).double(), cos, sin
        batch = compressor.Packed(k[rows], gate[rows], *weights, plan, torch.arange(count))
        entries, _, state = compressor.compress_packed(batch, state, EPS)
        others, _, parts = compressor.compress_running(batch, parts, EPS)
        found = [[*found[0], entries], [*found[1], others]]
        first += count
    entries, others = (torch.cat(one) for one in found)
    assert len(entries) == total // rate
    torch.testing.assert_close(others, entries, rtol=1e-12, atol=1e-12)
    tail = total % rate
    torch.testing.assert_close(parts[0], compressor.running_part(state.k[0, :tail], state.z[0, :tail]))
