"""The Hopper GEMM of many tokens an expert: numbers, ragged groups, schedules, budgets, faults, bad options."""

import pytest
import torch

from dsv4lib.errors import ConfigError
from dsv4lib.formats import e2m1, mxfp4
from dsv4lib.ops.moe_gemm.sm90 import op
from dsv4lib.ops.moe_gemm.sm90.arguments import fake_args
from dsv4lib.ops.moe_gemm.sm90.faults import WIDE_CAUGHT_BY, WIDE_FAULTS
from dsv4lib.ops.moe_gemm.sm90.inputs import case
from dsv4lib.ops.moe_gemm.sm90.layout import tile_weights
from dsv4lib.ops.moe_gemm.sm90.wide.config import COLUMNS, TILES_N
from dsv4lib.ops.moe_gemm.sm90.wide.kernel import WideMoeGemm
from tests.budget import built, small
from tests.cases import cases
from tests.ops.moe_gemm.hopper import run

SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
L1 = {"swiglu": True, "routed": True}
W4A8 = {"mode": "w4a8", "tile_n": 64}
RUNS = {  # options, counts, N, K
    "32 tokens, two tiles": ({"tile_n": 32, "out": "fp32", "alpha": False, "step_k": 128}, [33, 0, 5], 64, 384),
    "64 tokens, fewer rows than a tile": ({"tile_n": 64, "out": "fp32"}, [65, 0, 40], 320, 512),
    "128 tokens, swiglu": ({**L1, "step_k": 256}, [100, 3, 84], 128, 256),
    "w4a8": ({**W4A8, "out": "fp32", "alpha": False, "step_k": 128}, [65, 0, 5], 64, 384),
    "w4a8, 128 tokens": ({**L1, "mode": "w4a8"}, [129, 0, 3], 192, 512),
    "to mxfp8": ({**L1, "tile_n": 32, "out": "mxfp8", "step_k": 256}, [17, 0, 9], 192, 256),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", RUNS)
def test_numbers(name):
    """Against fp64 of the operands; no report, nothing else written, nothing spilled, sizes as budgeted."""
    options, *sizes = RUNS[name]
    kernel, made = WideMoeGemm(**options), case(WideMoeGemm(**options), *sizes)
    outcome = run(options, made, WideMoeGemm)
    assert outcome.findings() == set(), (outcome.findings(), outcome.error, outcome.codes, outcome.scales)
    done = outcome.compiled
    assert (done.local_bytes, done.spills) == (0, 0)
    assert small(done)
    rows = {row.resource: row for row in kernel.budget()}
    assert all(0 < row.used <= row.limit and row.derivation for row in rows.values())
    assert (done.smem_bytes, done.threads) == (rows["SMEM: total"].used, rows["threads"].used)


@pytest.mark.parametrize(
    ("mode", "tile_n"), cases(("w4a8", 128), full=[("w4a16", 128), ("w4a8", 64), ("w4a16", 32), ("w4a16", 64)])
)
def test_nothing_is_spilled(mode, tile_n):
    """With the stages of all model shapes, and more registers at launch than ptxas needs to leave MMAs in flight."""
    kernel, done = built(WideMoeGemm, fake_args, "sm_90a", mode=mode, tile_n=tile_n, alpha=False, **L1)
    assert kernel.step_k == 512 and done.local_bytes == 0 and done.registers > 128


@pytest.mark.full
def test_every_number_of_rows():
    """Each number of columns that MMAs have, at its last row and one more, in groups of one launch."""
    options = {"tile_n": 64, "out": "fp32", "alpha": False, "step_k": 128}
    counts = [rows + more for rows in COLUMNS[64] for more in (0, 1)]
    assert run(options, case(WideMoeGemm(**options), counts, 64, 128), WideMoeGemm).findings() == set()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", TILES_N)
def test_small_integers_are_exact(mode):
    """Ties, zeros and narrow data: sums that fp32 holds; scales of all kinds of blocks."""
    options = {"mode": mode, "tile_n": TILES_N[mode][0], "out": "fp32", "alpha": False, "step_k": 128}
    made = case(WideMoeGemm(**options), [35, 0, 9], 64, 384)
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-2, 3, made.x.shape, generator=generator)
    x[0], x[1], x[2] = 0, 1, -1
    w = torch.randint(0, 16, made.w.shape, dtype=torch.uint8, generator=generator)
    w[0, 3], w[2, 4] = 8, 7  # a row of -0, one of the largest
    scales = torch.randint(124, 131, (*w.shape[:2], 12), dtype=torch.uint8, generator=generator)
    packed = e2m1.pack(w)
    made.x, made.w = x.double(), mxfp4.dequantize(mxfp4.MXFP4Tensor(packed, scales), torch.float64)
    made.call.w, made.call.x = tile_weights(packed, scales, mode), x.bfloat16()
    outcome = run(options, made, WideMoeGemm)
    assert outcome.findings() == set() and outcome.error == 0


def test_every_schedule_gives_the_same_bits():
    """And no check finds anything."""
    options = {"tile_n": 32, "step_k": 256, **L1}
    made = case(WideMoeGemm(**options), [33, 0, 7], 128, 1280)  # more stages than the ring has
    outputs, hashes = set(), set()
    for schedule in SCHEDULES:
        outcome = run(options, made, WideMoeGemm, schedule=schedule, checks="race,counters")
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
        made = case(WideMoeGemm(**options), [41], 64, 384)
        assert run(options, made, WideMoeGemm, grid=grid).findings() == set()
        found.append(made.call.out[:41].clone())
    assert torch.equal(*found)


def test_memory_ends_with_the_last_token_and_the_last_expert_of_512():
    """Columns of the MMA past it read none."""
    options = {"out": "fp32", "tile_n": 32, "step_k": 128}
    counts = [0] * 512
    counts[383], counts[384], counts[511] = 1, 2, 3  # either side of what the threads find first
    made = case(WideMoeGemm(**options), counts, 64, 128)
    last = made.rows()[-1] + 1
    made.x, made.call.x = made.x[:last], made.call.x[:last].clone()
    assert run(options, made, WideMoeGemm, grid=3).findings() == set()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", WIDE_CAUGHT_BY)
def test_faults_are_found(name):
    options = {"tile_n": 32, **L1}
    made = case(WideMoeGemm(**options), [32, 0, 1], 128, 512)
    found = run(options, made, WIDE_FAULTS[name], schedule="adversarial", checks="race,counters").findings()
    assert WIDE_CAUGHT_BY[name] in found


def test_tokens_of_a_group_choose_the_kernel():
    chosen = {n: op.tile_of(n, "w4a16", True) for n in (1, 4, 8, 9, 20, 33, 96, 500)}
    assert chosen == {1: 8, 4: 8, 8: 16, 9: 32, 20: 32, 33: 64, 96: 128, 500: 128}
    for expected, tile_n in chosen.items():
        settings = {"mode": "w4a16", "bf16": True, "tile_n": tile_n, "step_k": 128, "early": True}
        kind, options = op.kernel_of(settings)
        assert (kind is WideMoeGemm) == (expected > 8) and kind(**options).tile_n == tile_n
    assert [op.tile_of(n, "w4a8", True) for n in (1, 20, 33, 500)] == [32, 32, 64, 128]
    assert [op.tile_of(n, "w4a8", False) for n in (1, 20, 500)] == [8, 32, 32]
    assert op.kernel_of({"mode": "w4a8", "bf16": True, "tile_n": 32, "step_k": 128})[0] is WideMoeGemm
    assert [op.many(n) for n in (16, 20, 21, 96)] == [False, False, True, True]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("byte", [24, 148, 149])
def test_scales_of_weights_at_both_ends(byte):
    """What bf16 holds is exact; what it does not, of the scales that "w4a8" may have, gives no finite number."""
    options = {**W4A8, "out": "fp32", "alpha": False, "step_k": 128}
    made = case(WideMoeGemm(**options), [2], 64, 128)
    codes = torch.randint(1, 7, (1, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scales = torch.full((1, 64, 4), byte, dtype=torch.uint8)
    made.call.w = tile_weights(codes, scales)
    made.w = mxfp4.dequantize(mxfp4.MXFP4Tensor(codes, scales), torch.float64)
    made.x = torch.ones_like(made.x) * 2.0 ** (127 - byte)
    made.call.x = made.x.bfloat16()
    findings = run(options, made, WideMoeGemm).findings()
    assert findings == ({"wrong numbers"} if byte > 148 else set())
    assert not (byte > 148 and made.call.out[:2].isfinite().any())


def test_every_configuration_fits():
    for mode, tiles in TILES_N.items():
        for tile_n in tiles:
            for step in (128, 256, 512):
                kernel = WideMoeGemm(mode=mode, tile_n=tile_n, step_k=step, swiglu=True)
                assert kernel.stages >= 4 and all(row.used <= row.limit for row in kernel.budget())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mode", {"mode": "nvfp4"}),
        ("tile_n", {"tile_n": 16}),
        ("tile_n", {"mode": "w4a8", "tile_n": 8}),
        ("step_k", {"step_k": 64}),
        ("out", {"out": "nvfp4"}),
        ("swiglu", {"routed": True}),
    ],
)
def test_options_that_do_not_exist(name, options):
    with pytest.raises(ConfigError) as caught:
        WideMoeGemm(**options)
    assert caught.value.name == name
