"""The MTP block: its input against loops, its layer against a one-layer model, prefill against decode."""

import math
from dataclasses import replace

import pytest
import torch

from dsv4lib.config import TINY
from dsv4lib.errors import ArgumentError
from dsv4lib.reference import mtp
from dsv4lib.reference.model import ReferenceModel

EPS = 1e-6


@pytest.fixture(scope="module")
def model():
    return ReferenceModel(TINY, torch.float64).randomize_(1).requires_grad_(False)


@pytest.fixture(scope="module")
def streams_and_next(model):
    tokens = torch.randint(0, TINY.vocab, (2, 38), generator=torch.Generator().manual_seed(0))
    capture = {}
    model(tokens[:, :-1], capture=capture)
    return capture["layers.5.streams"], tokens[:, 1:]


def test_combine_against_loops(randn):
    d, n = 5, 4
    streams, embedding = randn(2, 3, n, d), randn(2, 3, d)
    hnorm, enorm, h_proj, e_proj = randn(d), randn(d), randn(d, d), randn(d, d)
    got = mtp.combine(streams, embedding, hnorm, enorm, h_proj, e_proj, EPS)

    def projected(row, weight, matrix):
        rms = math.sqrt(sum(v * v for v in row) / d + EPS)
        normed = [w * v / rms for v, w in zip(row, weight.tolist(), strict=True)]
        return [sum(m * v for m, v in zip(line, normed, strict=True)) for line in matrix.tolist()]

    for b in range(2):
        for t in range(3):
            e = projected(embedding[b, t].tolist(), enorm, e_proj)
            for i in range(n):
                h = projected(streams[b, t, i].tolist(), hnorm, h_proj)
                want = [x + y for x, y in zip(h, e, strict=True)]
                assert got[b, t, i].tolist() == pytest.approx(want, abs=1e-12)


def test_block_is_a_plain_swa_layer(model, streams_and_next):
    """With h_proj = 0 the block is a one-layer SWA model whose embedding is e_proj RMSNorm(embedding)."""
    streams, following = streams_and_next
    ours = ReferenceModel(TINY, torch.float64).randomize_(1).requires_grad_(False)
    ours.mtp[0].h_proj.weight.zero_()
    state = ours.state_dict()
    block = {name.removeprefix("mtp.0."): t for name, t in state.items() if name.startswith("mtp.0.")}
    own = {"norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale"}
    single = {name: block[name] for name in own} | {"head.weight": state["head.weight"]}
    single |= {f"layers.0.{name}": t for name, t in block.items() if name not in own}
    table = state["embed.weight"]
    table = table * torch.rsqrt(table.square().mean(-1, keepdim=True) + EPS) * block["enorm.weight"]
    single["embed.weight"] = table @ block["e_proj.weight"].mT
    config = replace(TINY, n_layers=1, n_hash_layers=0, compress_ratios=(0, 0))
    plain = ReferenceModel(config, torch.float64)
    missing, extra = plain.load_state_dict(single, strict=False)
    assert all(name.startswith("mtp.") for name in missing)
    assert set(extra) == {f"layers.0.{name}.weight" for name in ("e_proj", "h_proj", "enorm", "hnorm")}
    torch.testing.assert_close(ours.mtp_logits(streams, following), plain(following), rtol=0, atol=1e-12)
    assert (model.mtp_logits(streams, following) - plain(following)).abs().max() > 0.1


@pytest.mark.parametrize("chunks", [[1] * 37, [19] + [1] * 18, [7, 1, 13, 16]], ids=str)
def test_prefill_equals_decode(model, streams_and_next, chunks):
    streams, following = streams_and_next
    whole = model.mtp_logits(streams, following)
    cache, pieces, start = model.new_cache(2), [], 0
    for size in chunks:
        at = slice(start, start + size)
        pieces.append(model.mtp_logits(streams[:, at], following[:, at], cache))
        start += size
    assert (cache.mtp_position, cache.position) == (37, 0)
    assert (torch.cat(pieces, dim=1) - whole).abs().max() <= 1e-10


def test_forward_runs_it_over_the_same_cache(model, streams_and_next):
    _, following = streams_and_next
    tokens = torch.cat((torch.tensor([[3], [4]]), following), dim=1)
    capture = {}
    model(tokens[:, :-1], capture=capture, mtp=tokens[:, 1:])
    want, cache, pieces = capture["mtp_logits"], model.new_cache(2), []
    for t in range(0, 37, 5):
        chunk = {}
        end = min(t + 5, 37)
        model(tokens[:, t:end], cache, chunk, mtp=tokens[:, t + 1 : end + 1])
        pieces.append(chunk["mtp_logits"])
    assert (cache.mtp_position, cache.position) == (37, 37)
    assert (torch.cat(pieces, dim=1) - want).abs().max() <= 1e-10


def test_second_draft_step_takes_the_blocks_own_streams(model, streams_and_next):
    streams, following = streams_and_next
    cache, capture = model.new_cache(2), {}
    first = model.mtp_logits(streams, following, cache, capture)
    drafted = first[:, -1:].argmax(-1)
    second = model.mtp_logits(capture["mtp.0.streams"][:, -1:], drafted, cache)
    assert second.shape == (2, 1, TINY.vocab) and torch.isfinite(second).all()
    assert cache.mtp_position == 38


def test_refusals(model, streams_and_next):
    streams, following = streams_and_next
    with pytest.raises(ArgumentError, match=r"streams.shape=\(2, 37, 4, 64\)"):
        model.mtp_logits(streams, following[:, :-1])
    with pytest.raises(ArgumentError, match="next_tokens=320"):
        model.mtp_logits(streams, torch.full_like(following, 320))
    with pytest.raises(ArgumentError, match="capture=None"):
        model(following, mtp=following)
    with pytest.raises(ArgumentError, match="mtp.shape"):
        model(following, capture={}, mtp=following[:, 1:])
    cache = model.new_cache(2)
    model(following, cache)
    with pytest.raises(ArgumentError, match="cache.mtp_position=0"):
        model(following, cache, {}, mtp=following)
    with pytest.raises(ArgumentError, match="next_embedding.shape"):
        mtp.combine(streams, streams[:, :, 0, :3], *[torch.ones(64).double()] * 2, *[torch.eye(64).double()] * 2, EPS)
