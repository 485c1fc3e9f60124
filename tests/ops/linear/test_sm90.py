"""The Hopper kernel of linears: numbers, ragged sizes, clusters, schedules, budgets, faults, what is refused."""

import pytest
import torch

from dsv4lib.config import FLASH, PRO
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.formats import e4m3, fp8_block
from dsv4lib.ops.linear import bench
from dsv4lib.ops.linear.sm90.arguments import fake_args, launch_args
from dsv4lib.ops.linear.sm90.config import SPLITS, STEPS_K, TILES_N, plan
from dsv4lib.ops.linear.sm90.faults import CAUGHT_BY, FAULTS
from dsv4lib.ops.linear.sm90.kernel import HopperLinear
from dsv4lib.ops.linear.sm90.op import Grouped
from tests.budget import built, small
from tests.cases import cases
from tests.ops.linear.hopper import Case, Plain, case, plain, run

SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
RUNS = {  # options, (groups, tokens, N, K), CTAs
    "one token": ({"out": "fp32"}, (1, 1, 200, 528), 3),
    "7 tokens, ragged": ({}, (1, 7, 75, 1040), 2),
    "9 tokens in two tiles, 3 groups": ({"out": "fp32", "step_k": 128}, (3, 9, 72, 400), 4),
    "16 tokens, long steps": ({"tile_n": 16, "step_k": 512, "out": "fp32"}, (1, 13, 130, 2192), 1),
    "two warpgroups": ({"groups_m": 2, "out": "fp32"}, (2, 5, 300, 784), 2),
    "32 tokens, two CTAs a cluster": ({"tile_n": 32, "split": 2, "out": "fp32"}, (1, 31, 200, 912), 4),
    "64 tokens": ({"tile_n": 64, "groups_m": 2, "out": "fp32"}, (1, 64, 136, 656), 2),
    "128 tokens in two tiles": ({"tile_n": 64, "groups_m": 2, "split": 2}, (1, 128, 200, 528), 2),
    "four CTAs, fewer blocks than registers": ({"split": 4, "out": "fp32"}, (2, 3, 100, 1040), 4),
    "eight CTAs": ({"split": 8, "groups_m": 2, "out": "fp32"}, (1, 6, 200, 2064), 8),
    "eight CTAs, four warps": ({"split": 8, "step_k": 128, "out": "fp32"}, (1, 8, 136, 1152), 8),
}
BF16 = {"operands": "bf16"}
RUNS |= {
    "bf16, one token": ({"out": "fp32"} | BF16, (1, 1, 200, 264), 3),
    "bf16, 7 tokens, ragged": (BF16, (1, 7, 75, 520), 2),
    "bf16, 9 tokens in two tiles, 3 groups": ({"out": "fp32", "step_k": 128} | BF16, (3, 9, 72, 200), 4),
    "bf16, 13 tokens, long steps": ({"tile_n": 16, "step_k": 512, "out": "fp32"} | BF16, (1, 13, 130, 1096), 1),
    "bf16, four CTAs a cluster": ({"tile_n": 32, "split": 4, "out": "fp32"} | BF16, (2, 31, 100, 520), 4),
    "bf16, 128 tokens in two tiles": ({"tile_n": 64, "groups_m": 2, "split": 2} | BF16, (1, 128, 200, 264), 2),
}


def made_for(options, sizes):
    return (plain if options.get("operands") == "bf16" else case)(*sizes)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", RUNS)
def test_numbers(name):
    """Against fp64 of the operands; no report, nothing else written, nothing spilled, sizes as budgeted."""
    options, sizes, grid = RUNS[name]
    kernel = HopperLinear(**options)
    outcome = run(options, made_for(options, sizes), grid=grid)
    assert outcome.findings() == set(), (outcome.findings(), outcome.error)
    done = outcome.compiled
    assert (done.local_bytes, done.spills) == (0, 0)
    assert small(done)
    rows = {row.resource: row for row in kernel.budget()}
    assert all(0 < row.used <= row.limit and row.derivation for row in rows.values())
    assert (done.smem_bytes, done.threads) == (rows["SMEM: total"].used, rows["threads"].used)
    assert ("setmaxnreg.inc" in done.ptx) == ("registers" in rows)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("scales", [("fp32", "fp32"), ("e8m0", "fp32"), ("fp32", "e8m0")], ids=str)
def test_fp32_scales(scales):
    mixed = {name: case(2, 5, 136, 400, scales=name) for name in ("fp32", "e8m0")}
    made = Case(mixed[scales[0]].x, mixed[scales[1]].w)
    options = {"x_scales": scales[0], "w_scales": scales[1], "out": "fp32"}
    assert run(options, made).findings() == set()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("groups_m", cases(2, full=[1]))
@pytest.mark.parametrize("tile_n", TILES_N)
def test_nothing_is_spilled(tile_n, groups_m):
    """A spill would also have ptxas wait for every MMA by itself."""
    for split, operands in ((1, "e4m3"), (4, "e4m3"), (4, "bf16")):
        options = {"tile_n": tile_n, "groups_m": groups_m, "split": split, "operands": operands}
        kernel, done = built(HopperLinear, fake_args, "sm_90a", **options)
        assert done.local_bytes == 0 and kernel.stages >= 4


def test_small_integers_are_exact():
    """Zeros, ties, -0, one value, the largest: sums that the tensor core and fp32 hold."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-2, 3, (1, 11, 400), generator=generator).float()
    x[0, 0], x[0, 3], x[0, 4] = 0, 1, -1
    w = torch.randint(-3, 4, (1, 136, 400), generator=generator).float()
    w[0, 3], w[0, 130], w[0, 7] = -0.0, 2, torch.arange(400) % 4
    scales = [torch.randint(124, 131, size, dtype=torch.uint8, generator=generator) for size in ((1, 11, 4), (1, 2, 4))]
    made = Case(fp8_block.FP8Tensor(e4m3.encode(x), scales[0], (1, 128)), None)
    made.w = fp8_block.FP8Tensor(e4m3.encode(w), scales[1], (128, 128))
    for options, grid in (({}, 2), ({"split": 2, "step_k": 128}, 2)):
        outcome = run({"out": "fp32", **options}, made, grid=grid)
        assert outcome.findings() == set() and outcome.error == 0


def test_small_integers_of_bf16_are_exact():
    """Zeros, ties, -0, one value, 2^100 beside 2^-100: sums that fp32 holds."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-2, 3, (1, 11, 400), generator=generator).float()
    x[0, 0], x[0, 3], x[0, 4], x[0, 5] = 0, 1, -1, 2.0**100
    w = torch.randint(-3, 4, (1, 136, 400), generator=generator).float()
    w[0, 3], w[0, 130], w[0, 7] = -0.0, 2.0**-100, torch.arange(400) % 4
    made = Plain(x.bfloat16(), w.bfloat16())
    for options, grid in ((BF16, 2), ({"split": 2, "step_k": 128} | BF16, 2)):
        outcome = run({"out": "fp32", **options}, made, grid=grid)
        assert outcome.findings() == set() and outcome.error == 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("where", ["token", "weight"])
def test_nan_of_bf16_stays_in_its_row(where):
    made, options = plain(1, 9, 72, 200), {"out": "fp32", "tile_n": 16} | BF16
    clean = run(options, made).out.clone()
    (made.x[0, 4] if where == "token" else made.w[0, 70])[199] = float("nan")
    found = run(options, made).out
    wrong = torch.zeros_like(found, dtype=torch.bool)
    wrong[(0, 4) if where == "token" else (0, slice(None), 70)] = True
    assert torch.equal(found.isnan(), wrong)
    assert torch.equal(found[~wrong], clean[~wrong])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("byte", [0, 1, 100, 254])
def test_any_scale(byte):
    """From 2^-127 on: what the product of both leaves in fp32."""
    made = case(1, 3, 72, 144)
    made.w.scales.fill_(byte)
    made.x.scales.fill_(max(0, 250 - byte))
    assert run({"out": "fp32"}, made).findings() == set()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("where", ["token", "token's scale", "weight"])
def test_nan_stays_in_its_row(where):
    made = case(1, 9, 72, 400)
    clean = run({"out": "fp32", "tile_n": 16}, made).out.clone()
    if where == "token":
        made.x.codes[0, 4, 130] = 0x7F
    elif where == "token's scale":
        made.x.scales[0, 4, 1] = 255
    else:
        made.w.codes[0, 70, 399] = 0xFF
    found = run({"out": "fp32", "tile_n": 16}, made).out
    wrong = torch.zeros_like(found, dtype=torch.bool)
    wrong[(0, slice(None), 70) if where == "weight" else (0, 4)] = True
    assert torch.equal(found.isnan(), wrong)
    assert torch.equal(found[~wrong], clean[~wrong])


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "options",
    cases({"split": 4, "step_k": 128, "groups_m": 2}, {"split": 2, "step_k": 128} | BF16, full=[{"step_k": 128}]),
    ids=str,
)
def test_every_schedule_gives_the_same_bits(options):
    """And no check finds anything: more steps than stages, several tiles a cluster."""
    options = {"out": "fp32", **options}
    made = made_for(options, (1, 5, 330, (13 * 128 + 16) // (2 if "operands" in options else 1)))
    outputs, hashes = set(), set()
    for schedule in SCHEDULES:
        outcome = run(options, made, grid=options.get("split", 1), schedule=schedule, checks="race,counters")
        assert outcome.findings() == set(), (schedule, outcome.findings())
        outputs.add(outcome.out.contiguous().numpy().tobytes())
        hashes.add(outcome.result.schedule_hash)
    assert len(outputs) == 1 and len(hashes) >= 4


@pytest.mark.full
def test_bits_of_a_token_do_not_depend_on_tiles():
    """Sums are in the order of K, whatever the tile, the stage, the warpgroups and the number of CTAs."""
    made = case(1, 11, 136, 1040)
    found = []
    for n in TILES_N:
        for step_k, groups_m, grid in ((128, 1, 1), (256, 2, 3)):
            options = {"out": "fp32", "tile_n": n, "step_k": step_k, "groups_m": groups_m}
            found.append(run(options, made, grid=grid).out.clone())
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CAUGHT_BY)
def test_faults_are_found(name):
    options = {"out": "fp32", "split": 2, "step_k": 256}
    outcome = run(options, case(1, 5, 330, 1040), FAULTS[name], schedule="adversarial", checks="race,counters")
    assert CAUGHT_BY[name] in outcome.findings()


def test_nothing_is_found_without_a_fault():
    options = {"out": "fp32", "split": 2, "step_k": 256}
    made = case(1, 5, 330, 1040)
    assert run(options, made, schedule="adversarial", checks="race,counters").findings() == set()


def test_every_configuration_fits():
    for tile_n in TILES_N:
        for groups_m in (1, 2):
            for split in SPLITS:
                for step_k in STEPS_K:
                    kernel = HopperLinear(tile_n=tile_n, groups_m=groups_m, split=split, step_k=step_k)
                    assert kernel.stages >= 2 and kernel.ahead >= 1


@pytest.mark.parametrize("config", [FLASH, PRO], ids=["Flash", "Pro"])
def test_plans_keep_a_hopper_busy(config):
    """64 or more of 132 SMs work, in whole clusters; no range of K is without a step."""
    for shape in bench.shapes(config):
        for tokens in (1, 8, 16, 32, 64, 128, 300):
            found = plan(shape.groups, tokens, shape.n, shape.k, 132)
            assert found.grid <= 132 and found.grid % found.split == 0
            assert found.split <= -(-shape.k // found.step_k)
            assert found.grid >= 64


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tile_n", {"tile_n": 128}),
        ("groups_m", {"groups_m": 3}),
        ("split", {"split": 3}),
        ("step_k", {"step_k": 64}),
        ("out", {"out": "mxfp8"}),
        ("operands", {"operands": "fp16"}),
        ("x_scales", {"x_scales": "bf16"}),
        ("w_scales", {"w_scales": "bf16"}),
    ],
)
def test_configurations_that_do_not_exist(name, options):
    with pytest.raises(ConfigError) as caught:
        HopperLinear(**options)
    assert caught.value.name == name


def wrong_calls():
    made = case(2, 3, 72, 400)
    good = {"x": made.x.codes, "x_scales": made.x.scales, "w": made.w.codes, "w_scales": made.w.scales}
    good["out"] = torch.zeros(2, 3, 72)
    yield "x, w", {**good, "x": good["x"][..., :392]}
    yield "x, w", {**good, "w": good["w"][:1]}
    yield "x", {**good, "x": good["x"].float()}
    yield "x_scales.shape", {**good, "x_scales": good["x_scales"][..., :3]}
    yield "w_scales", {**good, "w_scales": good["w_scales"].float()}
    yield "out", {**good, "out": good["out"].bfloat16()}
    yield "out.shape", {**good, "out": good["out"][..., :70]}
    yield "grid", {**good, "grid": 3}


@pytest.mark.parametrize(("name", "call"), list(wrong_calls()), ids=lambda v: v if isinstance(v, str) else "")
def test_calls_that_are_refused(name, call):
    kernel, grid = HopperLinear(split=2, out="fp32"), call.pop("grid", 2)
    with pytest.raises(ArgumentError) as caught:
        launch_args(kernel, Grouped(**call), grid)
    assert caught.value.name == name
