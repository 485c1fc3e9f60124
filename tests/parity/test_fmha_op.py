"""The attention op against transformers' attention function, inside layers of the released attention dimensions."""

from functools import cache

import pytest
import torch

from dsv4lib.config import LayerKind
from dsv4lib.errors import ArgumentError
from dsv4lib.pages.fmha.parity import _consecutive, run_peer
from dsv4lib.reference import rope
from dsv4lib.reference.transformers_attention import SCHEDULE, attention_calls, real_attention

CALLS = ("prefill", "chunk", "decode")
# Of a prefill: the first queries, those around the end of the first window and of the first HCA entry, the last.
TOKENS = {"prefill": (0, 1, 5, 127, 128, 255, 290), "chunk": (0, 4), "decode": (0,)}


@cache
def calls():
    return dict(zip(CALLS, attention_calls(real_attention(), (291, 5, 1)), strict=True))


def call_of(name: str, kind: LayerKind):
    return calls()[name][SCHEDULE.index(kind)]


def test_the_peer_attends_as_the_model_says():
    """What the comparison rests on: 64 heads of 512, the window of 128, selections that leave entries out."""
    for name in CALLS:
        swa, csa, hca = calls()[name]
        assert swa.q.shape[1:] == (64, 512) and int(swa.visible[-1].sum()) == 128
        assert int(csa.visible[-1].sum()) == 128 + 48 < csa.kv.shape[0]
        assert int(hca.visible[-1].sum()) == 128 + 2
        for call in (swa, csa, hca):
            again = call.peer(torch.float32, torch.float32)
            torch.testing.assert_close(again, call.output, atol=0, rtol=0)
            cos, sin = call.cos[:, None], call.sin[:, None]
            turned = torch.cat((again[..., :-64], rope.rotate(again[..., -64:], cos, -sin)), -1)
            torch.testing.assert_close(turned, call.rotated, atol=1e-6, rtol=1e-6)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", SCHEDULE)
@pytest.mark.parametrize("name", CALLS)
def test_the_op_agrees_with_transformers(name, kind):
    """Error against fp64 below that of the peer's own bf16, and its fp32 output within the rounding of q and kv."""
    outcome = run_peer(call_of(name, kind), torch.tensor(TOKENS[name]))
    assert outcome.factor.passed, outcome.factor
    assert outcome.rel_l2 < min(2.7e-3, outcome.peer_rel_l2)
    assert outcome.unrounded_rel_l2 < 6e-3


@pytest.mark.full
def test_128_heads_and_parts():
    """A decode step with Pro's heads, split over its keys."""
    call = attention_calls(real_attention(heads=128), (200, 1), seed=1)[1][SCHEDULE.index(LayerKind.CSA)]
    for splits in (None, 3):
        outcome = run_peer(call, torch.tensor([0]), splits=splits)
        assert call.q.shape[1] == 128 and outcome.factor.passed, outcome.factor


@pytest.mark.parametrize("wrong", ["sink", "scale", "rope"])
def test_a_wrong_argument_is_seen(wrong):
    """The comparison can fail: no sink, a scale that is off by 2 %, no rotation."""
    given = {"sink": None, "scale": 1 / 23, "rope": None}
    outcome = run_peer(call_of("decode", LayerKind.CSA), torch.tensor([0]), **{wrong: given[wrong]})
    assert not outcome.factor.passed


def test_masks_with_holes_in_the_window_are_refused():
    with pytest.raises(ArgumentError, match="window"):
        _consecutive("window", torch.tensor([[True, False, True]]))
