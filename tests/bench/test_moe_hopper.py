"""The MoE GEMMs of a Hopper by bytes and MMAs alone, beside what an H200 took for every row of the bench."""

import json

import pytest

from dsv4lib.bench.ops import results
from dsv4lib.lab.day_one import reading
from dsv4lib.lab.day_one.archive import Archive
from dsv4lib.ops.moe_gemm import bench
from dsv4lib.predict.moe_hopper import Product, mma_clocks, modelled_us
from dsv4lib.predict.rates import gpu


def measured() -> dict[str, float]:
    found = {one.shape: one.named(results.OURS) for one in results.load(results.FOLDER) if one.op == "moe_gemm"}
    return {shape: one.us for shape, one in found.items()}


def test_every_row_has_a_prediction_that_its_time_on_an_h200_stays_above() -> None:
    """Decode of MXFP8 tokens is bytes; expansion for bf16 tokens, and prefill, take up to 2.7 times as long."""
    predicted = {shape: us for (op, shape), us in reading.predictions("sm_90a").items() if op == "moe_gemm"}
    assert set(predicted) == {row.shape for row in bench.rows()} == set(measured())
    ratio = {shape: us / predicted[shape] for shape, us in measured().items()}
    assert all(1 < one < 2.7 for one in ratio.values())
    decode = [one for shape, one in ratio.items() if " w4a8 " in shape and not shape.endswith("T 4096")]
    assert len(decode) == 16 and max(decode) < 1.35 and sorted(decode)[8] < 1.2


def test_decode_is_bytes_and_prefill_is_mmas() -> None:
    card = gpu("H200")
    few, many = Product("Pro", True, "w4a8", 32, False, 3.6e9), Product("Flash", True, "w4a16", 4096, True, 2.6e9)
    for product, memory, tensor in ((few, True, False), (many, False, True)):
        before = modelled_us(product, card)
        fixed = modelled_us(product._replace(nbytes=0.0), card.changed(wgmma_flops=1e12))
        assert fixed == pytest.approx(0.55 + 6850 / 1830, rel=1e-3)
        for rate, limits in (("hbm_bytes_s", memory), ("wgmma_flops", tensor)):
            after = modelled_us(product, card.changed(**{rate: card[rate] * 1.25}))
            assert (before - fixed) / (after - fixed) == pytest.approx(1.25 if limits else 1.0, rel=1e-4)


@pytest.mark.parametrize(
    ("mode", "bf16", "rate"),
    # One token for each of 6 experts: 384 tiles of 64 x 8 x 4096 on 132 SMs, three for the busiest.
    [("w4a8", False, 8192), ("w4a16", True, 4096)],
)
def test_mmas_of_the_busiest_sm(mode: str, bf16: bool, rate: int) -> None:
    assert mma_clocks(Product("Flash", True, mode, 1, bf16, 0.0), gpu("H200")) == 3 * 2 * 64 * 8 * 4096 / rate


def test_a_day_one_of_an_h200_shows_times_beside_the_model() -> None:
    head = "op,shape,floor_us,provider,state,us"
    lines = ("moe_gemm,Pro down w4a8 T 8,111,ours,timed,139.5", "router,Pro T 8,1,ours,timed,5")
    files = {"time.moe_gemm": {"rows.csv": "\n".join((head, *lines)).encode(), "result.json": json.dumps({}).encode()}}
    gemm, router = reading.times(Archive({"arch": "sm_90a"}, {}, {}, files))
    assert 1.1 < gemm.us / gemm.modelled_us < 1.3 and 1 < router.us / router.modelled_us < 4
    assert [one.modelled_us for one in reading.times(Archive({"arch": "sm_80"}, {}, {}, files))] == [None, None]
