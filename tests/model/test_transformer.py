"""The model on ops at places: against the oracle and transformers' rounding, chunks, batches, padding, back ends."""

import copy

import pytest
import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import rotary
from dsv4lib.layers.step import Layout, make_step
from dsv4lib.loader.model import transformer
from dsv4lib.model.sampler import SamplingParams
from dsv4lib.pages.full_model.run_case import oracle
from tests.whole_model import SMALL, listed, peer  # noqa: F401  fixtures

GREEDY = SamplingParams(temperature=0.0, seed=0)


def ids(count, seed=0):
    return torch.randint(SMALL.vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def model(listed, backend="reference", **options):  # noqa: F811
    return transformer(listed, **{"places": 3, "capacity": 384, "backend": backend, **options})


def token_error(found, want):
    """Median over tokens of the root mean square error: one flipped choice of a random router moves its token alone."""
    return float((found - want).square().mean(-1).sqrt().median())


@torch.no_grad()
def test_rounding_is_that_of_bf16(listed, peer):  # noqa: F811
    """Without quantised activations, at most 1.5 times the error of transformers in bf16 on such weights."""
    tokens = torch.tensor([ids(150)])
    exact = peer.model(input_ids=tokens, use_cache=False).logits[0]
    rounded = copy.deepcopy(peer.model).bfloat16()(input_ids=tokens, use_cache=False).logits[0].float()
    theirs = token_error(rounded, exact)
    want = oracle(listed)(tokens)[0]
    given = tokens.tolist(), [0], [0]
    ours = model(listed, precision="bf16", experts="bf16")(*given, all_logits=True)[:, : SMALL.vocab]
    assert 0.5 < float(want.std()) < 2 and token_error(ours, want) <= 1.5 * theirs
    released = model(listed)(*given, all_logits=True)[:, : SMALL.vocab]
    assert token_error(released, want) < 0.12  # FP8 activations: 8 times the rounding of bf16


@torch.no_grad()
def test_streams_stay_apart(listed):  # noqa: F811
    """What tells the four streams from each other is small beside what they share: judged by itself."""
    tokens, capture = ids(30, 10), {}
    oracle(listed)(torch.tensor([tokens]), capture=capture)
    one = model(listed, precision="bf16", experts="bf16")
    _, streams = one.hidden(one.step([tokens], [0], [0]), keep_streams=True)
    want = capture[f"layers.{SMALL.n_layers - 1}.streams"][0]
    ours, theirs = (x - x.mean(1, keepdim=True) for x in (streams.float(), want))
    assert token_error(ours.flatten(1), theirs.flatten(1)) < 0.1 * float(theirs.square().mean().sqrt())


def test_chunks_of_any_size_give_the_same_bits(listed):  # noqa: F811
    """Chunks that end inside and at windows of 4 and 128, and one token at a time across the window's end."""
    tokens = ids(270, 1)
    whole = model(listed)([tokens], [1], [0], all_logits=True)
    cuts, parts, chunked = [0, 1, 3, 4, 9, 127, 128, 129, 130, 255, 270], [], model(listed)
    for start, end in zip(cuts, cuts[1:], strict=False):
        parts.append(chunked([tokens[start:end]], [2], [start], all_logits=True))
    assert torch.equal(torch.cat(parts), whole)


def test_requests_do_not_see_each_other(listed):  # noqa: F811
    """Prefill beside decode, a request without tokens and padded rows: the logits of each alone."""
    texts = [ids(140, 2), ids(9, 3), ids(33, 4)]
    alone = [model(listed)([text], [0], [0])[0] for text in texts]
    together = model(listed)
    together([texts[0][:139], [], texts[2][:20]], [2, 0, 1], [0, 0, 0], rows=170)
    found = together([texts[0][139:], texts[1], texts[2][20:]], [2, 0, 1], [139, 0, 20], rows=40)
    assert all(torch.equal(one, row) for one, row in zip(alone, found, strict=True))


def test_padding_is_without_effect(listed):  # noqa: F811
    """Padded requests and rows write nothing and get zeros."""
    text, found = ids(12, 5), model(listed)
    found([text], [1], [0])
    before = [[t.data.clone() for t in (c.window, c.entries) if t is not None] for c in found.caches]
    logits = found([[], [7], []], [0, 1, -1], [3, 12, 0], rows=5)
    assert not logits[0].any() and not logits[2].any() and logits[1].any()
    for caches, (window, *_) in zip(found.caches, before, strict=True):
        now, each = caches.window.data, len(window) // 3
        assert torch.equal(now[:each], window[:each]) and torch.equal(now[2 * each :], window[2 * each :])


@torch.no_grad()
def test_kernels_round_as_their_oracles(listed):  # noqa: F811
    """Every kernel of SM100 in a chunk, then in a decode step beside a prefill: as far from fp32 as the oracles are."""
    texts, errors = [ids(7, 6), ids(3, 7)], {}
    want = [oracle(listed)(torch.tensor([text]))[0] for text in texts]
    for backend in ("emulator", "reference"):
        one = model(listed, backend)
        first = one([texts[0][:6]], [0], [0], all_logits=True)
        second = one([texts[0][6:], texts[1]], [0, 2], [6, 0], all_logits=True)
        found = torch.cat((first, second))[:, : SMALL.vocab]
        errors[backend] = token_error(found, torch.cat(want))
    assert errors["emulator"] <= 1.2 * errors["reference"] < 0.15, errors


@torch.no_grad()
def test_drafts_are_those_of_the_oracle(listed):  # noqa: F811
    tokens, found = torch.tensor([ids(21, 9)]), model(listed, mtp=True, precision="bf16", experts="bf16")
    capture = {}
    oracle(listed)(tokens[:, :-1], capture=capture, mtp=tokens[:, 1:])
    _, streams = found.hidden(found.step(tokens[:, :-1].tolist(), [0], [0]), keep_streams=True)
    hidden, _ = found.draft(streams, found.step(tokens[:, 1:].tolist(), [0], [0]))
    logits, want = found.head(hidden)[0][:, : SMALL.vocab], capture["mtp_logits"][0]
    assert token_error(logits, want) < 0.05 * float(want.std())


def test_steps_are_checked():
    layout, tables = Layout(2, 64), rotary.tables(SMALL, 64)
    for wrong, name in (
        (([[1]], [2], [0]), "places"),
        (([[1], [2]], [1, 1], [0, 0]), "places"),
        (([[1] * 9], [0], [60]), "starts"),
        (([[1]], [0], [-1]), "starts"),
    ):
        with pytest.raises(ArgumentError, match=name):
            make_step(SMALL, layout, tables, *wrong)
    with pytest.raises(ArgumentError, match="rows"):
        make_step(SMALL, layout, tables, [[1, 2]], [0], [0], rows=1)


def test_calls_are_checked(listed):  # noqa: F811
    with pytest.raises(ArgumentError, match="tokens"):
        model(listed)([[SMALL.vocab]], [0], [0])
    with pytest.raises(ArgumentError, match="capacity"):
        model(listed, capacity=1 << 20)
