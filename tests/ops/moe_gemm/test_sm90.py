"""The Hopper GEMM: layout of weights, numbers, ragged groups, schedules, budgets, faults, bad arguments."""

import dataclasses

import pytest
import torch

from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.formats import e2m1, mxfp4
from dsv4lib.ops.moe_gemm.sm90 import layout
from dsv4lib.ops.moe_gemm.sm90.arguments import fake_args, launch_args
from dsv4lib.ops.moe_gemm.sm90.config import MODES, OUTPUTS, TILES_N
from dsv4lib.ops.moe_gemm.sm90.faults import CAUGHT_BY, FAULTS
from dsv4lib.ops.moe_gemm.sm90.inputs import case
from dsv4lib.ops.moe_gemm.sm90.kernel import TiledMoeGemm
from dsv4lib.ops.moe_gemm.sm90.layout import STEPS_K, tile_weights, untile_weights
from tests.budget import built, small
from tests.cases import cases
from tests.ops.moe_gemm.hopper import run

SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
L1 = {"swiglu": True, "routed": True}
NARROW = {"step_k": 128}
RUNS = {  # options, counts, N, K
    "one token": ({"out": "fp32", "alpha": False}, [1], 64, 512),
    "ragged, two slots": ({"out": "fp32", **NARROW}, [3, 0, 1, 9], 128, 640),
    "16 tokens": ({"tile_n": 16, "step_k": 256}, [0, 17, 13], 64, 768),
    "32 tokens": ({"tile_n": 32, "step_k": 256, "out": "fp32"}, [33, 5], 64, 1280),
    "to mxfp8": ({**L1, "out": "mxfp8"}, [3, 0, 9], 192, 1024),
    "to mxfp8, 16 tokens": ({**L1, "out": "mxfp8", "tile_n": 16, **NARROW}, [18, 2], 128, 384),
    "to mxfp8, early": ({**L1, "out": "mxfp8", "early": True}, [3, 0, 9], 192, 1024),
    "early, fewer steps than stages": ({"out": "fp32", "early": True, **NARROW}, [3, 0, 1, 9], 128, 640),
    "early, nothing for most": ({"early": True}, [2], 64, 512),
    "swiglu": ({"swiglu": True, **NARROW}, [7], 64, 384),
    "a list of rows": ({**L1, "out": "mxfp8", "gather": True, "early": True}, [3, 0, 9], 192, 1024),
    "bf16, a list of rows": ({"mode": "w4a16", "out": "fp32", "gather": True, **NARROW}, [3, 0, 9], 64, 384),
    "bf16": ({"mode": "w4a16", "out": "fp32"}, [3, 0, 9], 64, 1536),
    "bf16, swiglu": ({**L1, "mode": "w4a16", "tile_n": 16, **NARROW}, [1, 0, 17], 128, 384),
}


def random_weights(experts, rows, k, seed=0):
    """Codes and scales in all values that both modes take."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (experts, rows, k // 2), dtype=torch.uint8, generator=generator)
    return codes, torch.randint(24, 149, (experts, rows, k // 32), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("experts", "rows", "k"), [(2, 128, 1024), (1, 192, 256), (3, 64, 384)])
def test_tiles_have_an_exact_inverse(mode, experts, rows, k):
    codes, scales = random_weights(experts, rows, k)
    if mode == "w4a8_row":
        scales = 120 + scales % (layout.SPAN + 1)
    tiled = tile_weights(codes, scales, mode)
    assert layout.tiled_shape(tuple(tiled.shape), mode) == (rows, k, layout.step_of(k))
    found = untile_weights(tiled, mode)
    assert torch.equal(found[0], codes) and torch.equal(found[1], scales)


@pytest.mark.parametrize("mode", MODES)
def test_every_bit_of_a_word_is_a_weights(mode):
    assert sorted(bit for field in layout.FORMS[mode].fields for bit in field) == list(range(32))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("codes.shape", lambda c, s: (c[:, :40], s[:, :40])),
        ("K", lambda c, s: (c[..., :96], s[..., :6])),
        ("scales.shape", lambda c, s: (c, s[..., :4])),
        ("scales", lambda c, s: (c, torch.full_like(s, 249))),
        ("codes", lambda c, s: (c.int(), s)),
    ],
)
def test_weights_that_are_refused(name, change):
    with pytest.raises(ArgumentError) as caught:
        tile_weights(*change(*random_weights(1, 64, 256)))
    assert caught.value.name == name


def test_scales_that_bf16_cannot_hold_are_refused():
    codes, scales = random_weights(1, 64, 256)
    for byte in (23, 149):
        scales[0, 5, 1] = byte
        assert tile_weights(codes, scales).numel()
        with pytest.raises(ArgumentError, match="24 to 148"):
            tile_weights(codes, scales, "w4a16")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", RUNS)
def test_numbers(name):
    """Against fp64 of the operands; no report, nothing else written, nothing spilled, sizes as budgeted."""
    options, *sizes = RUNS[name]
    kernel = TiledMoeGemm(**options)
    made = case(kernel, *sizes)
    outcome = run(options, made)
    assert outcome.findings() == set(), (outcome.findings(), outcome.error, outcome.codes, outcome.scales)
    if kernel.quantised:
        assert len(made.call.out[made.rows()].unique()) > 50  # not all zero, not all saturated
    done = outcome.compiled
    assert (done.local_bytes, done.spills) == (0, 0)
    assert small(done)
    assert "setmaxnreg.inc" in done.ptx and ".minnctapersm 1" in done.ptx  # without it ptxas ignores the other
    rows = {row.resource: row for row in kernel.budget()}
    assert all(0 < row.used <= row.limit and row.derivation for row in rows.values())
    assert (done.smem_bytes, done.threads) == (rows["SMEM: total"].used, rows["threads"].used)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("first", [{}, {**L1, "out": "mxfp8"}], ids=["down", "gate/up"])
@pytest.mark.parametrize(("mode", "tile_n"), [(mode, n) for mode in MODES for n in TILES_N[mode]])
def test_nothing_is_spilled(mode, tile_n, first):
    """With the stages of all model shapes: a spill would also have ptxas wait for every MMA by itself."""
    if first and mode == "w4a16":
        first = {**first, "out": "bf16"}
    kernel, done = built(TiledMoeGemm, fake_args, "sm_90a", mode=mode, tile_n=tile_n, alpha=False, **first)
    assert kernel.step_k == 512 and done.local_bytes == 0


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mode", MODES)
def test_small_integers_are_exact(mode):
    """Ties, zeros and narrow data: sums that fp32 and the tensor core hold; scales of all kinds of blocks."""
    options = {"mode": mode, "out": "fp32", "alpha": False, **NARROW}
    kernel = TiledMoeGemm(**options)
    made = case(kernel, [5, 0, 9], 64, 384)
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-2, 3, made.x.shape, generator=generator)
    x[0], x[128], x[129] = 0, 1, -1  # a row of zeros, rows of one value; those after them are [5, 9) of the groups
    w = torch.randint(0, 16, made.w.shape, dtype=torch.uint8, generator=generator)
    w[0, 3], w[2, 4] = 8, 7  # a row of -0, one of the largest
    scales = torch.randint(124, 131, (*w.shape[:2], 12), dtype=torch.uint8, generator=generator)
    packed = e2m1.pack(w)
    made.x, made.w = x.double(), mxfp4.dequantize(mxfp4.MXFP4Tensor(packed, scales), torch.float64)
    made.call.w = tile_weights(packed, scales, mode)
    if mode != "w4a16":
        made.call.x = x.to(torch.float8_e4m3fn).view(torch.uint8)
        made.call.x_scales = torch.full_like(made.call.x_scales, 127)
    else:
        made.call.x = x.bfloat16()
    outcome = run(options, made)
    assert outcome.findings() == set()
    assert outcome.error == 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("byte", [0, 1, 121, 248])
def test_any_scale_of_weights(byte):
    """From 2^-127 on: the factor that E4M3 lacks keeps the exponent normal."""
    options = {"out": "fp32", "alpha": False, **NARROW}
    made = case(TiledMoeGemm(**options), [2], 64, 128)
    codes, _ = random_weights(1, 64, 128)
    scales = torch.full((1, 64, 4), byte, dtype=torch.uint8)
    made.call.w = tile_weights(codes, scales)
    made.w = mxfp4.dequantize(mxfp4.MXFP4Tensor(codes, scales), torch.float64)
    made.call.x_scales = torch.full_like(made.call.x_scales, 254 - byte)
    made.x = made.call.x.view(torch.float8_e4m3fn).double() * 2.0 ** (127 - byte)
    assert run(options, made).findings() == set()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [{**L1, "out": "mxfp8", **NARROW}, {"tile_n": 16}], ids=str)
def test_every_schedule_gives_the_same_bits(options):
    """And no check finds anything. 9 or 2 steps, by turns of 4 warpgroups; the second has one buffer of sums."""
    kernel = TiledMoeGemm(**options)
    made = case(kernel, [9, 0, 17], 128, 1152 if options.get("step_k") else 1024)
    outputs, hashes = set(), set()
    for schedule in SCHEDULES:
        outcome = run(options, made, schedule=schedule, checks="race,counters")
        assert outcome.findings() == set(), (schedule, outcome.findings())
        scales = b"" if made.call.out_scales is None else made.call.out_scales.numpy().tobytes()
        outputs.add(made.call.out.view(torch.uint8).numpy().tobytes() + scales)
        hashes.add(outcome.result.schedule_hash)
    assert len(outputs) == 1 and len(hashes) >= 4


def test_bits_do_not_depend_on_who_has_a_tile():
    """Another number of CTAs gives warpgroups other steps of K; the order of the sum is that of the steps."""
    options = {"out": "fp32", "alpha": False, **NARROW}
    made = case(TiledMoeGemm(**options), [3, 9], 128, 1152)
    codes, scales = random_weights(2, 128, 1152)
    scales = 115 + scales % 24  # so far apart that fp32 rounds their sums
    made.call.w, made.w = tile_weights(codes, scales), mxfp4.dequantize(mxfp4.MXFP4Tensor(codes, scales), torch.float64)
    found = []
    for grid in (1, 4, 7):
        assert run(options, made, grid=grid).findings() == set()
        found.append(made.call.out[made.rows()].view(torch.int32))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.full
def test_tiles_of_tokens_give_the_same_bits():
    """Sums of a token are in the order of K, whatever tile it is in."""
    found = []
    for tile_n in TILES_N["w4a8"]:
        options = {"out": "fp32", "tile_n": tile_n, **NARROW}
        made = case(TiledMoeGemm(**options), [11], 64, 384)
        assert run(options, made).findings() == set()
        found.append(made.call.out[:11].clone())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("options", [{"tile_n": 8}, {"tile_n": 16}, {"tile_n": 32}, {"mode": "w4a16"}], ids=str)
def test_a_list_of_rows_changes_no_bit(options):
    """And rows that are no token count as zeros."""
    options, found = {"out": "fp32", **options, **NARROW}, []
    for gather in (False, True):
        made = case(TiledMoeGemm(**options, gather=gather), [3, 0, 34], 128, 384)
        assert run({**options, "gather": gather}, made).findings() == set()
        found.append(made.call.out[made.rows()].clone())
    assert torch.equal(*found) and found[0].any()
    for row, number in ((1, -1), (129, len(made.call.x)), (130, 2**31 - 1)):
        made.call.rows[row] = number
        made.x[row] = 0
    assert run({**options, "gather": True}, made).findings() == set()
    assert not made.call.out[[1, 129, 130]].any() and made.call.out[131].any()


def test_memory_ends_with_the_last_token():
    """Columns of the MMA past it read none."""
    options = {"out": "fp32", **NARROW}
    made = case(TiledMoeGemm(**options), [3], 64, 128)
    made.x, made.call.x = made.x[:3], made.call.x[:3].clone()
    assert run(options, made).findings() == set()


def test_no_tokens_and_many_experts():
    """Empty groups write nothing; tiles are found among experts that are mostly empty, up to the last of 512."""
    options = {"out": "fp32", **NARROW}
    made = case(TiledMoeGemm(**options), [0, 0], 64, 128)
    outcome = run(options, made)
    assert not outcome.hazards and not outcome.stray and outcome.stopped is None
    counts = [0] * 512
    for e, count in ((0, 1), (31, 2), (32, 9), (500, 1), (511, 3)):
        counts[e] = count
    assert run(options, case(TiledMoeGemm(**options), counts, 64, 128), grid=3).findings() == set()


SHOWN = "OddRing", "NoProxyFence", "HastySums", "FullBuffer"  # by default: the ring, its proxy, both barriers of sums


@pytest.mark.parametrize("name", cases(*SHOWN, full=[one for one in CAUGHT_BY if one not in SHOWN]))
def test_faults_are_found(name):
    options = {**L1, "out": "mxfp8", **NARROW}
    made = case(TiledMoeGemm(**options), [3, 0, 1, 9], 128, 1152)
    assert (
        CAUGHT_BY[name] in run(options, made, FAULTS[name], schedule="adversarial", checks="race,counters").findings()
    )


def test_default_checks_know_whose_copies_a_fence_covers():
    """An mbarrier that `cp.async` arrives at orders them before the consumer's fence; without one they are reported."""
    made = case(TiledMoeGemm(**NARROW), [3], 64, 384)
    assert run(NARROW, made, checks="default").findings() == set()
    found = run(NARROW, made, FAULTS["NoProxyFence"], checks="default").findings()
    assert found == {"missing_proxy_fence_cp_async"}


def test_every_configuration_fits():
    for mode in MODES:
        for tile_n in TILES_N[mode]:
            for step in STEPS_K:
                for out in OUTPUTS:
                    kernel = TiledMoeGemm(mode=mode, tile_n=tile_n, step_k=step, out=out, swiglu=True)
                    assert kernel.stages in (4, 8) and kernel.sum_buffers in (1, 2)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mode", {"mode": "nvfp4"}),
        ("tile_n", {"tile_n": 64}),
        ("tile_n", {"tile_n": 32, "mode": "w4a16"}),
        ("step_k", {"step_k": 64}),
        ("out", {"out": "nvfp4"}),
        ("swiglu", {"out": "mxfp8"}),
        ("swiglu", {"routed": True}),
    ],
)
def test_configurations_that_do_not_exist(name, options):
    with pytest.raises(ConfigError) as caught:
        TiledMoeGemm(**options)
    assert caught.value.name == name


def wrong_calls():
    good = case(TiledMoeGemm(**L1, out="mxfp8", **NARROW), [5, 3], 64, 128).call
    yield "x", {"x": good.x[:, :64]}
    yield "x", {"x": good.x.float()}
    yield "x_scales", {"x_scales": None}
    yield "x_scales", {"x_scales": good.x_scales[:512]}
    yield "w", {"w": good.w[..., :4000]}
    yield "w", {"w": tile_weights(*random_weights(2, 64, 128), "w4a16")}
    yield "w", {"w": tile_weights(*random_weights(2, 64, 512))}
    yield "w_scales", {"w_scales": good.x_scales}
    yield "counts", {"counts": good.counts.long()}
    yield "alpha_up", {"alpha_up": None}
    yield "routing.shape", {"routing": good.routing[:5]}
    yield "out.shape", {"out": good.out[:, :16]}
    yield "out_global", {"out_global": good.alpha}
    yield "limit", {"limit": 0.0}


@pytest.mark.parametrize(("name", "change"), list(wrong_calls()), ids=lambda v: v if isinstance(v, str) else "")
def test_calls_that_are_refused(name, change):
    kernel = TiledMoeGemm(**L1, out="mxfp8", **NARROW)
    good = case(kernel, [5, 3], 64, 128).call
    with pytest.raises(ArgumentError) as caught:
        launch_args(kernel, dataclasses.replace(good, **change), 1)
    assert caught.value.name == name
