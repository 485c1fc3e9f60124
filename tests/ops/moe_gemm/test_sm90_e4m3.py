"""The Hopper GEMM of many tokens an expert in E4M3: numbers, exact sums, schedules, budgets, faults, weights' spans."""

import pytest
import torch

from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.formats import e2m1, e4m3, mxfp4, scale_swizzle
from dsv4lib.ops.moe_gemm.sm90.arguments import fake_args
from dsv4lib.ops.moe_gemm.sm90.faults import E4M3_CAUGHT_BY, E4M3_FAULTS
from dsv4lib.ops.moe_gemm.sm90.inputs import case
from dsv4lib.ops.moe_gemm.sm90.kernel import TiledMoeGemm
from dsv4lib.ops.moe_gemm.sm90.layout import SPAN, tile_weights, untile_weights
from dsv4lib.ops.moe_gemm.sm90.wide.e4m3 import WideE4m3MoeGemm
from tests.budget import built, small
from tests.cases import cases
from tests.ops.moe_gemm.hopper import run

SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
L1 = {"swiglu": True, "routed": True}
RUNS = {  # options, counts, N, K
    "32 tokens, two tiles": ({"tile_n": 32, "out": "fp32", "alpha": False, "step_k": 128}, [33, 0, 5], 64, 384),
    "112 tokens to mxfp8, odd tiles": ({**L1, "out": "mxfp8"}, [100, 3, 84], 320, 512),
    "64 tokens to bf16, odd tiles": ({"tile_n": 64, "out": "bf16", "step_k": 256}, [65, 0, 37], 320, 768),
}
MORE = {
    "64 tokens, fewer rows than a tile": ({"tile_n": 64, "out": "fp32"}, [65, 0, 40], 320, 512),
    "112 tokens, swiglu": ({**L1, "step_k": 256}, [100, 3, 84], 128, 256),
    "32 tokens to mxfp8": ({**L1, "tile_n": 32, "out": "mxfp8", "step_k": 256}, [17, 0, 9], 192, 256),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", cases(*RUNS, full=MORE))
def test_numbers(name):
    """Against fp64 of the operands; no report, nothing else written, nothing spilled, sizes as budgeted."""
    options, *sizes = (RUNS | MORE)[name]
    kernel, made = WideE4m3MoeGemm(**options), case(WideE4m3MoeGemm(**options), *sizes)
    outcome = run(options, made, WideE4m3MoeGemm)
    assert outcome.findings() == set(), (outcome.findings(), outcome.error, outcome.codes, outcome.scales)
    done = outcome.compiled
    assert (done.local_bytes, done.spills) == (0, 0)
    assert small(done)
    rows = {row.resource: row for row in kernel.budget()}
    assert all(0 < row.used <= row.limit and row.derivation for row in rows.values())
    assert (done.smem_bytes, done.threads) == (rows["SMEM: total"].used, rows["threads"].used)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rows", cases(72, 73, full=(96, 97, 112, 113)))
def test_numbers_of_columns(rows):
    """Each number of columns that MMAs of 112 tokens have, at its last row and one more."""
    options = {"tile_n": 112, "out": "fp32", "alpha": False, "step_k": 128}
    assert run(options, case(WideE4m3MoeGemm(**options), [rows], 64, 384), WideE4m3MoeGemm).findings() == set()


@pytest.mark.parametrize(("out", "tile_n"), cases(("mxfp8", 112), full=[("bf16", 112), ("mxfp8", 64), ("bf16", 32)]))
def test_nothing_is_spilled(out, tile_n):
    """With the stages of all model shapes, and more registers at launch than ptxas needs to leave MMAs in flight."""
    _, done = built(WideE4m3MoeGemm, fake_args, "sm_90a", tile_n=tile_n, alpha=False, out=out, **L1)
    assert done.local_bytes == 0 and done.registers > 128


def whole_numbers(kernel, span):
    """A case of ties, zeros, narrow data and scales that differ by up to 2^span in every row."""
    made = case(kernel, [35, 0, 9], 64, 384)
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-1, 2, made.x.shape, generator=generator)
    x[0], x[1], x[2] = 0, 1, -1
    w = torch.randint(0, 16, made.w.shape, dtype=torch.uint8, generator=generator)
    w[0, 3] = 8  # a row of -0
    w[2, 4] = torch.randint(1, 4, (384,), dtype=torch.uint8, generator=generator)  # one of a sign
    w[1, :, 128:] = 0
    scales = torch.randint(130 - span, 131, (*w.shape[:2], 12), dtype=torch.uint8, generator=generator)
    scales[..., 0], scales[..., 1] = 130, 130 - span
    scales[1, :, 4:] = 250  # of zeros: any
    packed = e2m1.pack(w)
    made.x, made.w = x.double(), mxfp4.dequantize(mxfp4.MXFP4Tensor(packed, scales), torch.float64)
    made.call.w, made.call.x = tile_weights(packed, scales, "w4a8_row"), e4m3.encode(x.double())
    made.call.x_scales = scale_swizzle.swizzle(torch.full((len(x), 12), 127, dtype=torch.uint8))
    return made, packed, scales


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", [WideE4m3MoeGemm, TiledMoeGemm])
def test_small_integers_are_exact(kind):
    """The same weights in both kernels, which both untile to what they were."""
    tile_n = 32 if kind is WideE4m3MoeGemm else 16
    options = {"mode": "w4a8_row", "tile_n": tile_n, "out": "fp32", "alpha": False, "step_k": 128}
    made, packed, scales = whole_numbers(kind(**options), 1)
    outcome = run(options, made, kind)
    assert outcome.findings() == set() and outcome.error == 0
    codes, kept = untile_weights(made.call.w, "w4a8_row")
    assert torch.equal(codes, packed) and torch.equal(kept[2], scales[2])
    assert torch.equal(mxfp4.dequantize(mxfp4.MXFP4Tensor(codes, kept), torch.float64), made.w)


def test_rows_of_all_scales_cost_bits():
    """The tensor core cuts addends to 13 bits below the largest: up to 2^-11 of a sum, where MXFP8's is exact."""
    found = {}
    for kind, tile_n in ((WideE4m3MoeGemm, 32), (TiledMoeGemm, 16)):
        options = {"mode": "w4a8_row", "tile_n": tile_n, "out": "fp32", "alpha": False, "step_k": 128}
        outcome = run(options, whole_numbers(kind(**options), SPAN)[0], kind)
        assert outcome.findings() <= {"wrong numbers"}
        found[kind] = outcome.error
    assert found[TiledMoeGemm] < 2.0**-13 < found[WideE4m3MoeGemm] < 2.0**-11


def test_one_product_is_exact():
    """K with one number other than 0: every magnitude at every scale that a row may have."""
    options = {"mode": "w4a8_row", "tile_n": 32, "out": "fp32", "alpha": False, "step_k": 128}
    made = case(WideE4m3MoeGemm(**options), [4], 64, 128)
    w = torch.zeros(1, 64, 128, dtype=torch.uint8)
    scales = torch.full((1, 64, 4), 127, dtype=torch.uint8)
    for row in range(64):
        w[0, row, 5], w[0, row, 40] = 7, row % 16  # the first gives the row's largest scale, and is multiplied by 0
        scales[0, row, 1] = 127 - row % (SPAN + 1)
    x = torch.zeros(made.x.shape).double()
    x[:4, 40] = torch.tensor([1.0, -448.0, 2.0**-9, 3.5])
    packed = e2m1.pack(w)
    made.x, made.w = x, mxfp4.dequantize(mxfp4.MXFP4Tensor(packed, scales), torch.float64)
    made.call.w, made.call.x = tile_weights(packed, scales, "w4a8_row"), e4m3.encode(x)
    made.call.x_scales = scale_swizzle.swizzle(torch.full((len(x), 4), 127, dtype=torch.uint8))
    outcome = run(options, made, WideE4m3MoeGemm)
    assert outcome.findings() == set() and outcome.error == 0


def test_every_schedule_gives_the_same_bits():
    """And no check finds anything."""
    options = {"tile_n": 32, "step_k": 256, "out": "mxfp8", **L1}
    made = case(WideE4m3MoeGemm(**options), [33, 0, 7], 128, 1280)  # more stages than the ring has
    outputs, hashes = set(), set()
    for schedule in SCHEDULES:
        outcome = run(options, made, WideE4m3MoeGemm, schedule=schedule, checks="race,counters")
        assert outcome.findings() == set(), (schedule, outcome.findings())
        outputs.add(made.call.out.view(torch.uint8).numpy().tobytes())
        hashes.add(outcome.result.schedule_hash)
    assert len(outputs) == 1 and len(hashes) >= 4


@pytest.mark.full
def test_tiles_give_the_same_bits():
    """A token's sums are in the order of K, whatever tile it is in and whichever CTA has it."""
    found = []
    for tile_n, grid in ((32, 1), (64, 3)):
        options = {"out": "fp32", "tile_n": tile_n, "step_k": 128}
        made = case(WideE4m3MoeGemm(**options), [41], 64, 384)
        assert run(options, made, WideE4m3MoeGemm, grid=grid).findings() == set()
        found.append(made.call.out[:41].clone())
    assert torch.equal(*found)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", E4M3_CAUGHT_BY)
def test_faults_are_found(name):
    options = {"tile_n": 32, "out": "mxfp8", **L1}
    made = case(WideE4m3MoeGemm(**options), [32, 0, 1], 256, 512)
    found = run(options, made, E4M3_FAULTS[name], schedule="adversarial", checks="race,counters").findings()
    assert E4M3_CAUGHT_BY[name] in found


def test_rows_that_span_too_much_are_refused():
    """Blocks of zeros do not count."""
    codes = torch.full((1, 64, 64), 0x11, dtype=torch.uint8)
    scales = torch.full((1, 64, 4), 127, dtype=torch.uint8)
    scales[0, 9, 2] = 127 - SPAN - 1
    with pytest.raises(ArgumentError, match=f"2\\^{SPAN + 1} apart in a row"):
        tile_weights(codes, scales, "w4a8_row")
    codes[0, 9, 32:48] = 0x80
    kept = untile_weights(tile_weights(codes, scales, "w4a8_row"), "w4a8_row")
    assert torch.equal(kept[0], codes) and int(kept[1][0, 9, 2]) == 127 - SPAN


@pytest.mark.parametrize(
    ("name", "options"),
    [("mode", {"mode": "w4a8"}), ("tile_n", {"tile_n": 16}), ("step_k", {"step_k": 64}), ("swiglu", {"routed": True})],
)
def test_options_that_do_not_exist(name, options):
    with pytest.raises(ConfigError) as caught:
        WideE4m3MoeGemm(**options)
    assert caught.value.name == name
