"""What the model of hidden communication says, by hand and at its ends; nothing of it is measured."""

import pytest

from dsv4lib.errors import ArgumentError
from dsv4lib.predict import overlap
from dsv4lib.predict.moe import Model
from dsv4lib.predict.overlap import PUBLISHED, predict
from dsv4lib.predict.rates import gpu


def test_bytes_by_hand():
    assert overlap.dispatch_bytes(7168) == 7168 + 224 + 4
    assert overlap.dispatch_bytes(7168, "nvfp4") == 3584 + 448 + 4
    assert overlap.dispatch_bytes(7168, "bf16") == 14336 + 4
    assert overlap.combine_bytes(7168) == 14336
    with pytest.raises(ArgumentError, match="activations='fp8'"):
        overlap.dispatch_bytes(7168, "fp8")


def test_a_chain_of_two_experts_by_hand():
    """Pull 3, GEMMs 2 and 4, return 1: rows of the second come at 6, so GEMM 1 waits 3 + 1."""
    found = overlap._chain(2, 3.0, 1.0, 2.0, 4.0)
    assert found == (12.0, 6.0, 2.0, 4.0, 1.0) and found.total == 17.0 and found.one_after_the_other == 20.0
    assert found.hidden == pytest.approx(3 / 8)
    slow = overlap._chain(2, 0.0, 5.0, 2.0, 4.0)  # the first result waits for nothing, the last one for the link
    assert (slow.exposed_dispatch, slow.exposed_combine) == (0.0, 6.0)


def test_one_rank_sends_nothing():
    found = predict("Flash", 512, ranks=1)
    assert (
        found[1:] == pytest.approx((0, 0, 0, 0), abs=1e-9) and found.hidden == 1.0 and found.total == found.compute > 0
    )


@pytest.mark.parametrize("model", ["Flash", "Pro"])
def test_more_tokens_and_a_slower_link(model):
    times = [predict(model, tokens).total for tokens in (1, 64, 512, 4096, 32768)]
    assert times == sorted(times)
    slow = gpu("B200").changed(nvlink_bytes_s=9e10)
    assert predict(model, 4096, card=slow).hidden < predict(model, 4096).hidden
    assert predict(model, 4096, activations="nvfp4").dispatch < predict(model, 4096).dispatch / 1.8


def test_four_bits_by_hand():
    """Many tokens: MMAs at four times the rate of bf16; one token: weights of 4.5 bits instead of 4.25."""
    flops = gpu("B200")["mma_flops"] * gpu("B200")["sms"] * gpu("B200")["clock"] * 1e3
    many = {kind: predict("Flash", 32768, activations=kind).compute for kind in overlap.PRODUCTS}
    assert many["nvfp4"] == pytest.approx(32768 * 6 * 3 * 2 * 4096 * 2048 / (4 * flops))
    assert many["mxfp8"] == pytest.approx(2 * many["nvfp4"]) and many["bf16"] == pytest.approx(4 * many["nvfp4"])
    few = {kind: predict("Flash", 1, activations=kind).compute for kind in overlap.PRODUCTS}
    assert few["nvfp4"] == pytest.approx(few["mxfp8"] * 4.5 / 4.25) and few["bf16"] == pytest.approx(
        few["nvfp4"] * 16 / 4.5
    )
    with pytest.raises(ArgumentError, match="activations='fp8'"):
        predict("Flash", 1, activations="fp8")


def test_it_is_a_best_case_beside_what_is_published():
    """Without latencies, tiles and imbalance the model must be below every published time, at large sizes not far."""
    ratios = {key: us / predict(*key).total for key, us in PUBLISHED.items()}
    assert all(ratio > 1 for ratio in ratios.values())
    assert all(ratio < 2.6 for (_, tokens), ratio in ratios.items() if tokens >= 8192), ratios


def test_few_tokens_reach_few_experts():
    """One token of 6 experts on 8 ranks: 48 routes, six experts of each rank, a row each."""
    found = predict(Model(256, 4096, 2048), 1)
    assert found.dispatch == pytest.approx(6 * (7 / 8) * (4096 + 128 + 4) / 9e5)


@pytest.mark.parametrize(("change", "message"), [({"tokens": 0}, "tokens=0"), ({"ranks": 3}, "ranks=3")])
def test_bad_sizes(change, message):
    with pytest.raises(ArgumentError, match=message):
        predict("Flash", **{"tokens": 8, **change})
