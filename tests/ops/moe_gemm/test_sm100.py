"""The experts' GEMM: formats, ragged groups, epilogues, pairs, schedules, budgets, bad arguments."""

import dataclasses
import re

import pytest
import torch

from dsv4lib.dsl.compile import compile_for
from dsv4lib.emulator.units.tcgen05_core import Mma
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.ops.moe_gemm.arguments import fake_args, launch_args
from dsv4lib.ops.moe_gemm.config import MODES, OUTPUTS, TILES_N
from dsv4lib.ops.moe_gemm.inputs import case
from dsv4lib.ops.moe_gemm.sm100 import MoeGemm
from dsv4lib.pages.moe_gemm.run_case import run_moe_gemm
from dsv4lib.predict.moe import tiles
from tests.budget import small

SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
L1 = {"swiglu": True, "routed": True}
RUNS = {  # options, counts, N, K
    "dense": ({"out": "fp32", "tile_n": 128, "alpha": False}, [100], 144, 320),
    "ragged": ({}, [5, 0, 70, 1], 208, 576),
    "w4a8": ({"mode": "w4a8", "out": "fp32"}, [0, 65, 1], 144, 384),
    "mxfp8": ({"mode": "mxfp8", "out": "fp32"}, [9, 40], 80, 352),
    "bf16": ({"mode": "bf16", "out": "fp32"}, [9, 40], 80, 200),
    "two row blocks": ({"tile_n": 192, "out": "fp32"}, [300, 1], 80, 320),
    "nvfp4 to nvfp4": ({**L1, "out": "nvfp4"}, [70, 0, 3], 192, 320),
    "w4a8 to mxfp8": ({**L1, "out": "mxfp8", "mode": "w4a8"}, [50, 0, 3], 192, 256),
    "pair": ({**L1, "out": "nvfp4", "ctas": 2, "tile_n": 64}, [70, 0, 3], 320, 320),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", RUNS)
def test_numbers(name):
    """Against fp64: errors beside an fp32 product in the same order, or codes; no report, nothing else written."""
    options, *sizes = RUNS[name]
    kernel = MoeGemm(**options)
    made = case(kernel, *sizes)
    outcome = run_moe_gemm(MoeGemm, options, made)
    assert outcome.clean, outcome.findings()
    if kernel.quantised:
        assert len(made.call.out[made.rows()].unique()) > 100  # not all zero, not all saturated
    done = outcome.compiled
    assert (done.local_bytes, done.spills) == (0, 0)
    assert small(done)
    assert set(re.findall(r"tcgen05\.mma\.cta_group::\d\.kind::([\w.:]+) ", done.ptx)) == {kernel.mode.kind}
    rows = {row.resource: row for row in kernel.budget()}
    assert all(0 < row.used <= row.limit and row.derivation for row in rows.values())
    assert done.smem_bytes == rows["SMEM: total"].used
    assert done.threads == rows["threads"].used


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("ctas", "tile_n", "counts"), [(1, 64, [65, 0, 1]), (2, 192, [200, 0, 1])])
def test_every_schedule_gives_the_same_bits(ctas, tile_n, counts):
    """Alone and as a pair, with two tiles of tokens."""
    options = {**L1, "out": "nvfp4", "ctas": ctas, "tile_n": tile_n}
    made = case(MoeGemm(**options), counts, 128 * ctas, 320)
    outputs, hashes = set(), set()
    for schedule in SCHEDULES:
        outcome = run_moe_gemm(MoeGemm, options, made, schedule=schedule)
        assert outcome.clean, outcome.findings()
        outputs.add(made.call.out.numpy().tobytes() + made.call.out_scales.numpy().tobytes())
        hashes.add(outcome.result.schedule_hash)
    assert len(outputs) == 1 and len(hashes) >= 4


def test_masked_layout_and_no_tokens():
    """Groups at multiples of max_m, most rows empty; and a call whose groups are all empty writes nothing."""
    for counts in ([3, 0, 130], [0, 0]):
        outcome = run_moe_gemm(MoeGemm, {}, made := case(MoeGemm(), counts, 48, 64, max_rows=256))
        assert made.call.offsets.tolist() == [256 * i for i in range(len(counts))]
        assert not outcome.hazards and not outcome.stray and outcome.error is None
        assert outcome.right or not sum(counts)


def test_more_experts_than_a_window():
    """The walk over the experts goes by windows of 32."""
    counts = [0] * 30 + [1, 2, 0, 0, 3] + [0] * 35 + [4]
    outcome = run_moe_gemm(MoeGemm, {}, case(MoeGemm(), counts, 16, 64), grid=3)
    assert outcome.clean, outcome.findings()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mode", {"mode": "fp4"}),
        ("tile_n", {"tile_n": 32}),
        ("tile_n", {"tile_n": 96}),
        ("out", {"out": "fp16"}),
        ("swiglu", {"out": "nvfp4"}),
        ("swiglu", {"routed": True}),
        ("ctas", {"ctas": 3}),
    ],
)
def test_configurations_that_do_not_exist(name, options):
    with pytest.raises(ConfigError) as caught:
        MoeGemm(**options)
    assert caught.value.name == name


def test_every_configuration_fits():
    for mode in MODES:
        for tile_n in TILES_N:
            for ctas in (1, 2):
                for out in OUTPUTS:
                    kernel = MoeGemm(mode=mode, tile_n=tile_n, ctas=ctas, out=out, swiglu=True)
                    assert kernel.stages >= 3 and kernel.tmem_columns <= 512


def test_tiles_cover_a_group_and_stay_within_their_blocks_of_scales():
    """No rows twice or never, none empty, as few tiles as hold them, blocks of 128 rows as many as are loaded."""
    for tile_n in TILES_N:
        blocks = MoeGemm(tile_n=tile_n).token_blocks
        for count in range(1, 2000):
            found = [tile[2:] for tile in tiles([count], 128, tile_n, 128)]
            assert len(found) == -(-count // tile_n) and min(rows for _, rows in found) > 0
            assert [row for first, rows in found for row in (first, first + rows)][1:-1:2] == [f for f, _ in found[1:]]
            assert sum(found[-1]) == count and max(rows for _, rows in found) <= tile_n
            assert all(first % 64 == 0 and first % 128 + rows <= 128 * blocks for first, rows in found)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("tile_n", "ctas", "counts"), [(64, 1, [200, 0, 70]), (192, 2, [300])])
def test_scales_in_tensor_memory_start_where_cutlass_starts_them(monkeypatch, tile_n, ctas, counts):
    """Every MMA of the compiled kernel: scales of weights at the start of a block, of tokens there or 2 columns on."""
    options = {"tile_n": tile_n, "ctas": ctas}
    kernel, starts = MoeGemm(**options), {"A": set(), "B": set()}
    read = Mma._scales

    def recorded(self, cta, address, rows, data_id, what, groups=1):
        starts[what].add(address & 0xFFFF)
        return read(self, cta, address, rows, data_id, what, groups)

    monkeypatch.setattr(Mma, "_scales", recorded)
    outcome = run_moe_gemm(MoeGemm, options, case(kernel, counts, 128 * ctas, 64))
    assert outcome.clean, outcome.findings()
    assert starts == {"A": {kernel.sfw_column}, "B": {kernel.sfx_column, kernel.sfx_column + 2}}


def wrong_calls():
    good = case(MoeGemm(**L1, out="nvfp4"), [5, 3], 64, 128).call
    yield "x, w", {"x": good.x[:, :32]}
    yield "x, w", {"x": good.x[:, :56].contiguous(), "w": good.w[..., :56].contiguous()}  # K 112
    yield "w.shape", {"w": good.w[:, :48].contiguous()}
    yield "x", {"x": good.x.float()}
    yield "x_scales", {"x_scales": None}
    yield "w_scales", {"w_scales": good.w_scales[:, :512]}
    yield "counts", {"counts": good.counts.long()}
    yield "offsets.shape", {"offsets": good.offsets[:1]}
    yield "alpha_up", {"alpha_up": None}
    yield "routing.shape", {"routing": good.routing[:5]}
    yield "out.shape", {"out": good.out[:, :8]}
    yield "out_global", {"out_global": None}


@pytest.mark.parametrize(("name", "change"), list(wrong_calls()), ids=lambda v: v if isinstance(v, str) else "")
def test_calls_that_are_refused(name, change):
    kernel = MoeGemm(**L1, out="nvfp4")
    good = case(kernel, [5, 3], 64, 128).call
    with pytest.raises(ArgumentError) as caught:
        launch_args(kernel, dataclasses.replace(good, **change), 1)
    assert caught.value.name == name


def test_what_an_option_does_not_use_is_refused():
    call = dataclasses.replace(case(MoeGemm(), [5], 16, 64).call, routing=torch.ones(128))
    with pytest.raises(ArgumentError) as caught:
        launch_args(MoeGemm(), call, 1)
    assert caught.value.name == "routing"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("arch", ["sm_100f", "sm_103a"])
@pytest.mark.parametrize(("mode", "ctas"), [("nvfp4", 1), ("w4a8", 2)])
def test_other_targets(arch, mode, ctas):
    """The block sizes are spelled so that the family target takes them, too; `.scale_vec` it refuses."""
    kernel = MoeGemm(mode=mode, ctas=ctas)
    done = compile_for(kernel, fake_args(kernel), arch)
    assert f"::{kernel.mode.kind} " in done.ptx and "scale_vec" not in done.ptx and done.spills == 0
