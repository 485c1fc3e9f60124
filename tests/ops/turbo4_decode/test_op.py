"""`turbo4_decode`: against fp64, schedules, splits, budget, faults, hard values, schema, bad arguments."""

import math

import pytest
import torch

from dsv4lib.check import compare
from dsv4lib.emulator import launch
from dsv4lib.emulator.driver.device import make as device
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.formats import turbo4
from dsv4lib.ops.turbo4_decode import bench, dequant
from dsv4lib.ops.turbo4_decode.arguments import combine_args, fake_args, fake_combine_args, launch_args
from dsv4lib.ops.turbo4_decode.config import TILE
from dsv4lib.ops.turbo4_decode.faults import FAULTS, RACES
from dsv4lib.ops.turbo4_decode.kernel import Turbo4Decode
from dsv4lib.ops.turbo4_decode.op import (
    CTAS_AN_SM,
    Attention,
    Call,
    choose_splits,
    choose_table,
    step_of,
    turbo4_decode,
)
from dsv4lib.ops.turbo4_decode.output import Turbo4Combine
from dsv4lib.pages.turbo4.run_case import attend, case, error_over_torch
from tests.budget import built, small
from tests.cases import cases

SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
ARCHS = cases("sm_90a", full=["sm_100a"])
BF16, FP16 = torch.bfloat16, torch.float16
LSE_ERROR = 2e-3
SHAPES = {  # lengths, query heads, KV heads, dim, page size, splits
    "two requests": ([37, 100], 4, 1, 128, 16, 1),
    "no tokens": ([0, 77, -1], 6, 2, 64, 8, 1),
    "splits": ([3, 177], 6, 2, 128, 32, 3),
    "16 heads and 4": ([150], 20, 1, 128, 64, 1),
    "latent": ([45], 12, 1, 512, 64, 1),
    "d 256": ([70, 9], 3, 1, 256, 24, 2),
    "one head": ([1, 33], 1, 1, 64, 40, 2),
    "128 heads": ([33], 128, 1, 64, 16, 1),
}


def run(name, dtype, backend="emulator", **options):
    lengths, heads, kv_heads, dim, page_size, splits = SHAPES[name]
    one = case(lengths, heads, kv_heads, dim, page_size=page_size, dtype=dtype, seed=3)
    return attend(one, backend, 3, splits=splits, **options)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("name", "dtype"),
    cases(
        ("two requests", FP16),
        ("no tokens", BF16),
        ("splits", BF16),
        ("16 heads and 4", BF16),
        ("latent", BF16),
        full=[(name, dtype) for name in ("d 256", "one head", "128 heads") for dtype in (BF16, FP16)]
        + [("latent", FP16), ("splits", FP16)],
    ),
)
def test_numbers(name, dtype, arch):
    """By the table of tolerances; requests without tokens are zeros and -inf; no report of the race detector."""
    result = run(name, dtype, arch=arch)
    assert result.record.passed, result.record.reasons
    assert result.lse_error < LSE_ERROR and result.hazards == 0
    empty = torch.tensor(SHAPES[name][0]) <= 0
    assert not result.o[empty].any() and bool((result.lse[empty] == -math.inf).all())


def test_the_reference_is_the_oracle():
    result = run("two requests", BF16, "reference")
    assert torch.equal(result.o, result.want.o.bfloat16()) and torch.equal(result.lse, result.want.lse.float())


def test_the_table_follows_the_measured_rows():
    """Requests and tokens of each by row of data/bench/turbo4.md, dims, the faster table there."""
    rows = [(1, 8192, 128, "registers"), (1, 65536, 128, "shared"), (8, 8192, 128, "shared")]
    rows += [(32, 1024, 128, "registers"), (32, 8192, 128, "shared"), (128, 2048, 128, "shared")]
    rows += [(32, 8192, 64, "registers"), (32, 4096, 512, "registers")]
    assert [choose_table(dim, batch * tokens) for batch, tokens, dim, _ in rows] == [table for *_, table in rows]


@pytest.mark.parametrize("name", cases("two requests", full=["latent", "one head"]))
def test_both_tables_give_the_same_bits(name):
    found = [run(name, BF16, lookup=lookup) for lookup in ("registers", "shared")]
    assert torch.equal(found[0].o, found[1].o) and torch.equal(found[0].lse, found[1].lse)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("dim", "splits"), cases((128, 2), full=[(64, 1), (256, 1), (512, 2)]))
def test_schedules(dim, splits, arch):
    """All schedules give the same bits without hazards, also in rows that lie apart; nothing else is written."""
    one, results = case([50, 0, 81], 5, 1, dim, page_size=24, seed=2), []
    settings = {"head_dim": dim, "group": 5, "page_size": 24, "split": splits > 1}
    kernel, code = built(Turbo4Decode, fake_args, arch, **settings)
    combine, combine_code = built(Turbo4Combine, fake_combine_args, arch, head_dim=dim)
    wide = torch.full((3, 7, dim), 7.0).bfloat16()
    for schedule in SCHEDULES:
        o, lse = wide.clone(), torch.full((3, 7), 7.0)
        q, out = one.q.clone(), Attention(o[:, 1:6], lse[:, 1:6])
        call = Call(
            q, *one.caches, 24, one.block_table, one.lengths, dim**-0.5, 2, splits, "registers", out, "emulator"
        )
        gpu = device(arch, checks="race", schedule=schedule, seed=1)
        parts = out
        if splits > 1:
            parts = Attention(torch.full((splits, 3, 5, dim), math.nan), torch.full((splits, 3, 5), math.nan))
        launch(code, *launch_args(kernel, call, *parts, splits), gpu=gpu)
        if splits > 1:
            launch(combine_code, *combine_args(combine, parts, *out, 2), gpu=gpu)
        assert not gpu.hazards and bool((o[:, [0, 6]] == 7).all() and (lse[:, [0, 6]] == 7).all())
        results.append((o[:, 1:6].clone(), lse[:, 1:6].clone()))
    assert all(torch.equal(a, b) for found in results[1:] for a, b in zip(found, results[0], strict=True))
    want = attend(one, "reference", 2)
    assert float((results[0][0].double() - want.want.o).abs().max()) < 0.02 * float(want.want.o.abs().max())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("settings", "registers"),
    cases(
        ({}, 255),
        ({"head_dim": 512, "group": 64}, 255),
        full=[
            ({"table": "shared"}, 255),
            ({"head_dim": 64}, 168),
            ({"group": 16, "split": True}, 255),
            ({"head_dim": 256, "group": 8}, 255),
        ],
    ),
)
def test_budget(settings, registers, arch):
    """No spills; SMEM of two CTAs fits; K and V of a lane are loaded by 16 and 8 bytes."""
    kernel, code = built(Turbo4Decode, fake_args, arch, **settings)
    assert code.local_bytes == 0 and code.registers <= registers and small(code)
    assert kernel.smem_bytes <= code.smem_bytes < kernel.smem_bytes + 1024 and kernel.ctas * code.smem_bytes < 226 << 10
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in code.ptx and "prmt.b32" in code.ptx
    combine, code = built(Turbo4Combine, fake_combine_args, arch, head_dim=kernel.head_dim)
    assert code.local_bytes == 0 and code.registers <= 128 and small(code)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(name, arch):
    result = attend(case([37, 100], 4, 2, 64, seed=3), "emulator", 3, fault=name, arch=arch)
    assert not result.record.passed


@pytest.mark.parametrize("name", RACES)
def test_races_are_reported(name):
    """Also where the numbers come out right."""
    one = case([37, 100], 4, 2, 64, seed=3)
    assert attend(one, "emulator", 3, fault=name).hazards and not attend(one, "emulator", 3).hazards


@pytest.mark.parametrize(("seed", "spread"), [(1, 8.0), (2, 60.0)])
def test_large_logits(seed, spread):
    """Softmax of few tokens: no worse than torch in bf16, which rounds keys and values; 1 % for the last rounding."""
    one = case([90], 4, 1, 64, page_size=8, seed=seed, spread=spread)
    result = attend(one, "emulator", seed)
    assert error_over_torch(one, result, seed) <= 1.01


def test_hard_values():
    """Norms of zero, NaN in entries past the end, queries and caches of zeros, scales from 2^-10 to 2^10."""
    one = case([90, 5], 4, 1, 64, page_size=8, seed=1)
    norms = one.pages.view(FP16)[..., 8 * 16 : 8 * 16 + 8]
    norms[::3] = 0.0
    column = one.block_table[1, 0]
    norms[column, :, 5:] = math.nan  # length 5
    one.pages[column, :, 5 * 32 : 8 * 32] = 0xFF
    result = attend(one, "emulator", 1)
    assert result.record.passed, result.record.reasons
    for of_values, of_queries in ((2.0**-10, 2.0**20), (2.0**10, 2.0**-20)):
        one = case([45], 4, 1, 64, page_size=8, seed=1)
        one.pages.view(FP16)[:, 1, 8 * 16 : 8 * 16 + 8] *= of_values
        one.pages.view(FP16)[:, 0, 8 * 16 : 8 * 16 + 8] *= 2.0**-10
        one.q.mul_(of_queries * 2.0**-10)
        result = attend(one, "emulator", 1)
        assert result.record.passed, result.record.reasons
    nothing = case([9], 2, 1, 64, page_size=16)
    nothing.q.zero_()
    nothing.pages.zero_()
    result = attend(nothing, "emulator")
    assert not result.o.any() and torch.allclose(result.lse, torch.full((1, 2), math.log(9.0)))


@pytest.mark.parametrize("splits", [1, 2])
def test_nan_is_seen(splits):
    """A NaN in q makes its head NaN, one in a norm every head that reads it, in whichever split; others stay."""
    one = case([40] * 3, 4, 2, 64, page_size=32)
    clean = attend(one, "emulator", splits=splits)
    one.q[0, 1, 3] = math.nan
    norms = one.pages.view(FP16)[..., 32 * 16 :]
    norms[one.block_table[1, 0], 3, 7] = math.nan  # value head 1 of request 1, a token of the first split
    norms[one.block_table[2, 1], 0, 5] = math.nan  # key head 0 of request 2, a token of the last split
    found = attend(one, "emulator", splits=splits)
    bad = torch.tensor([[0, 1, 0, 0], [0, 0, 1, 1], [1, 1, 0, 0]]).bool()
    assert torch.equal(found.o.isnan().all(-1), bad) and torch.equal(found.o.isnan().any(-1), bad)
    assert torch.equal(found.o[~bad], clean.o[~bad])
    bad[1] = False  # the norm of a value is not in the logits
    assert torch.equal(found.lse.isnan(), bad) and torch.equal(found.lse[~bad], clean.lse[~bad])


def test_keys_that_are_values():
    """One latent cache for both, in any order of pages, and lengths past the end of the table."""
    one = case([64], 8, 1, 128, page_size=16, seed=5)
    pages = one.pages[:, :1]
    given = one.q, pages, pages, 16, one.block_table
    o, lse = turbo4_decode(*given, torch.tensor([1000]).int(), seed=5, backend="emulator")
    want = turbo4_decode(*given, one.lengths, seed=5, backend="reference")
    assert compare(o, want.o).passed and torch.allclose(lse, want.lse, atol=LSE_ERROR)
    order = torch.randperm(len(pages))
    moved = torch.empty_like(pages)
    moved[order] = pages
    again = turbo4_decode(one.q, moved, moved, 16, order[one.block_table.long()].int(), one.lengths, seed=5)
    assert torch.equal(again.o, o)


def test_levels():
    """fp16 magnitudes with the best gain lose a quarter of what rounding can, 2^-11."""
    gain, bits = dequant.levels()
    rounded = torch.tensor(bits, dtype=torch.int16).view(FP16).double() / gain
    exact = torch.tensor(turbo4.levels(), dtype=torch.float64)
    assert float(((rounded - exact) / exact).abs().max()) < 1.5e-4
    low0, low1, high0, high1 = (one.to_bytes(4, "little") for one in dequant.table_of(dequant.levels()))
    assert [a + 256 * b for a, b in zip(low0 + low1, high0 + high1, strict=True)] == list(bits)


@pytest.mark.parametrize(
    ("units", "steps", "wanted"),
    [(256, 64, 1), (1, 1, 1), (8, 64, 32), (4096, 64, 1), (200, 64, 5), (1, 100_000, 122), (265, 64, 13)],
)
def test_splits(units, steps, wanted):
    """Of 264 CTAs at once: one split where they fill the GPU, more where most of it would wait."""
    assert choose_splits(units, steps, 264) == wanted


def test_steps():
    assert [step_of(dim) for dim in (64, 128, 256, 512)] == [128, 128, 64, 32]
    for dim in (64, 256, 512):
        config = Turbo4Decode(head_dim=dim)
        assert step_of(dim) == TILE * config.token_groups and config.ctas == CTAS_AN_SM


def test_bench_rows_take_their_providers_and_refuse_a_wrong_head(monkeypatch):
    """A row small enough for a CPU: ours and torch's attention over what the cache holds; one head negated is seen."""
    monkeypatch.setitem(bench.SIZES, "small", (bench.Shape(4, 2, 64), ((2, 70),)))
    (row,) = (one for one in bench.rows() if one.shape == "small S 70 T 2")
    given = row.given(torch.Generator().manual_seed(1))
    for provider in (row.providers[0], row.providers[-1]):
        call, outputs = provider.bind(given)
        call()
        row.check(given, outputs)
        bad = {"o": outputs["o"].clone()}
        bad["o"][1, 2] *= -1
        with pytest.raises(AssertionError, match="o: error"):
            row.check(given, bad)


def test_nothing_to_do():
    empty = torch.zeros(0, 4, 64).bfloat16()
    pages, none = torch.zeros(1, 1, turbo4.layout(64).page_bytes(8)).byte(), torch.zeros(0).int()
    assert turbo4_decode(empty, pages, pages, 8, none.view(0, 3), none, backend="emulator").o.shape == (0, 4, 64)
    q, lengths = torch.ones(2, 4, 64).bfloat16(), torch.tensor([3, 4]).int()
    o, lse = turbo4_decode(q, pages, pages, 8, torch.zeros(2, 0).int(), lengths, backend="emulator")
    assert not o.any() and bool((lse == -math.inf).all())


def test_schema():
    one = case([5, 9], 4, 2, 64, page_size=8)
    out = torch.zeros_like(one.q), torch.zeros(2, 4)
    given = one.q, *one.caches, 8, one.block_table, one.lengths, 0.125, 0, 0, "registers", *out, "reference"
    torch.library.opcheck(torch.ops.dsv4.turbo4_decode, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("backend", ["emulator", "reference"])
def test_bad_arguments_are_named(backend):
    one = case([5, 9], 4, 2, 64, page_size=8)
    (k, v), out = one.caches, Attention(torch.zeros(2, 4, 64).bfloat16(), torch.zeros(2, 4))
    wide = torch.zeros(2, 4, 129).bfloat16()
    by_2, by_8 = (torch.zeros(k.numel() + n, dtype=torch.uint8)[n:].view(k.shape) for n in (2, 8))
    size = turbo4.layout(64).page_bytes(1 << 16)
    pages = torch.zeros(size + 2 * 16 * (1 << 15), dtype=torch.uint8).as_strided((1 << 15, 2, size), (32, 16, 1))
    long = torch.zeros(2, 1 << 15).int()
    for name, change in (
        ("q.dtype", {"q": one.q.float()}),
        ("q.shape", {"q": one.q[0]}),
        ("q.shape", {"q": one.q[..., :48]}),
        ("k_pages.shape", {"q": one.q[:, :3]}),
        ("k_pages.shape", {"k_pages": k[..., :-16]}),
        ("v_pages.shape", {"v_pages": v[:, :1]}),
        ("k_pages", {"k_pages": k.int()}),
        ("page_size", {"page_size": 12}),
        ("page_size", {"page_size": 0}),
        ("block_table", {"block_table": one.block_table.long()}),
        ("block_table", {"block_table": one.block_table - 100}),
        ("block_table.shape", {"block_table": one.block_table[:1]}),
        ("lengths.shape", {"lengths": one.lengths[:1]}),
        ("scale", {"scale": math.nan}),
        ("seed", {"seed": -1}),
        ("splits", {"splits": 129}),
        ("lookup", {"lookup": "constant"}),
        ("out.o.shape", {"out": out._replace(o=one.q[:1])}),
        ("out.lse.shape", {"out": out._replace(lse=out.lse[:1])}),
        ("out", {"out": tuple(out)}),
        # ---- what the kernels cannot read
        ("q.stride()", {"q": wide[..., :128:2]}),
        ("q.stride()", {"q": wide[..., :64]}),
        ("out.o.stride()", {"out": out._replace(o=wide[..., :64])}),
        ("out.lse.stride()", {"out": out._replace(lse=torch.zeros(2, 8)[:, ::2])}),
        ("lengths.stride()", {"lengths": torch.zeros(4).int()[::2]}),
        ("k_pages", {"k_pages": by_2}),
        ("v_pages", {"v_pages": by_8}),
        # ---- what they cannot count
        ("q.shape", {"q": one.q[:1].expand(1 << 16, 4, 64)}),
        ("q.shape", {"q": one.q[:, :1].expand(2, 1 << 16, 64)}),
        ("k_pages.shape", {"k_pages": pages, "v_pages": pages, "page_size": 1 << 16}),
        ("block_table.shape", {"k_pages": pages[:1], "v_pages": pages[:1], "page_size": 1 << 16, "block_table": long}),
    ):
        given = {"q": one.q, "k_pages": k, "v_pages": v, "page_size": 8, "block_table": one.block_table}
        given |= {"lengths": one.lengths, "backend": backend} | change
        with pytest.raises(ArgumentError) as caught:
            turbo4_decode(**given)
        assert caught.value.name == name
    for options, name in (
        ({"dtype": "fp32"}, "dtype"),
        ({"head_dim": 96}, "head_dim"),
        ({"group": 129}, "group"),
        ({"page_size": 12}, "page_size"),
        ({"table": "constant"}, "table"),
        ({"ctas": 5}, "ctas"),
    ):
        with pytest.raises(ConfigError, match=name):
            Turbo4Decode(**options)
    with pytest.raises(ConfigError, match="head_dim"):
        Turbo4Combine(head_dim=96)
