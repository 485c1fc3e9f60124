"""The SM100 kernel of `mla_decode`: numbers, schedules, splits, pages, persistence, budget, faults, hard values."""

import math

import pytest
import torch

from dsv4lib.emulator.errors import MemoryFault
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.ops.fmha.combine import Combine
from dsv4lib.ops.mla_decode.arguments import fake_args
from dsv4lib.ops.mla_decode.faults import CAUGHT_BY, FAULTS, MaximumForTheSum
from dsv4lib.ops.mla_decode.inputs import NOWHERE, case
from dsv4lib.ops.mla_decode.op import BF16, E4M3, FP16, SM_SCALE, mla_decode
from dsv4lib.ops.mla_decode.sm100 import MlaDecode
from dsv4lib.ops.mla_decode.splits import mla_workspace_size
from tests.budget import built, small
from tests.cases import cases
from tests.ops.mla_decode.blackwell import ARCH, LSE_ERROR, attend

OF_LIMBS = "HighLimbOfP", "ScaleOfHeads"
OF_PAIRS = "HastyValues", "OwnTokens"
OF_SPLITS = "SplitsOfTokens", "MaximumForTheSum"
SCHEDULES = ("oldest_first", "newest_first", "adversarial", "random")
SHAPES = {  # lengths, heads, page size, dtype, splits
    "padded rows": ([100, 0, -1, 300], 16, 16, BF16, 1),
    "128 heads": ([129, 0, 190], 128, 128, BF16, 1),
    "splits": ([70, 300], 5, 16, BF16, 3),
    "fp16": ([333], 40, 32, FP16, 1),
    "fp8": ([200, 1], 16, 32, E4M3, 1),
    "fp8 pair": ([200, 64], 70, 16, E4M3, 1),
    "fp8 splits": ([520, 64], 70, 64, E4M3, 4),
    "fp8 pair, pages of 128": ([300, -1], 128, 128, E4M3, 2),
    "fp8 pages of 128": ([190, 0], 3, 128, E4M3, 1),
    "more splits than tiles": ([300, 0, 1], 3, 64, FP16, 7),
    "a tile": ([64, 128], 64, 64, BF16, 1),
    "96 heads": ([257, 5], 96, 16, FP16, 2),
    "pair, splits": ([300, 0, 100], 65, 32, BF16, 3),
    "bf16 and fp8": ([100, 0, 300], 5, 64, "bf16 and fp8", 1),
    "bf16 and fp8, pair": ([520, 64], 70, 16, "bf16 and fp8", 2),
    "bf16 and fp8, 64 heads": ([129], 64, 128, "bf16 and fp8", 1),
}
BRIEF = "padded rows", "128 heads", "splits", "fp8", "bf16 and fp8"


def shape(name, **options):
    lengths, heads, page_size, dtype, splits = SHAPES[name]
    types = {"dtype": BF16, "kv_dtype": E4M3} if dtype == "bf16 and fp8" else {"dtype": dtype}
    return case(lengths, heads, page_size, **types, seed=3, past=NOWHERE, **options), splits


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name",
    cases(*BRIEF, full=[name for name in SHAPES if name not in BRIEF]),
)
def test_numbers(name):
    """By the table of tolerances; requests without tokens are zeros and -inf; no hazards; guard rows stay."""
    one, splits = shape(name)
    found = attend(one, splits=splits)
    assert found.record.passed, found.record.reasons
    assert found.lse_error < LSE_ERROR and not found.hazards and found.leaked == 0 and found.over_bound < 1
    empty = one.seq_lens <= 0
    assert not found.out[empty].any() and bool((found.lse[empty] == -math.inf).all())


def error_of_torch(one, want):
    """RMS error of torch's attention in the type of the queries, by request."""
    errors = []
    for b, length in enumerate(one.seq_lens.tolist()):
        page = one.kv_cache.shape[1]
        kv = one.kv_cache[one.page_table[b, : -(-length // page)].long()].flatten(0, 1)[:length]
        q = torch.cat((one.q_nope[b], one.q_pe[b]), -1)
        o = torch.nn.functional.scaled_dot_product_attention(q, kv, kv[:, :512], scale=SM_SCALE)
        errors.append((o.double() - want.out[b]).square().mean())
    return float(torch.stack(errors).mean().sqrt())


@pytest.mark.parametrize(("spread", "splits"), cases((100.0, 3), full=[(100.0, 1), (8.0, 3), (1.0, 1)]))
def test_large_queries(spread, splits):
    """Logits of hundreds: no more than twice the error of torch in bf16; the LSE to a millionth of itself."""
    one = case([300, 77], 5, 16, seed=4, spread=spread)
    found = attend(one, splits=splits)
    ours = float((found.out.double() - found.want.out).square().mean().sqrt())
    assert not found.hazards and ours <= 2 * error_of_torch(one, found.want)
    assert bool(((found.lse - found.want.lse).abs() <= 2e-6 * found.want.lse.abs() + 1e-5).all())


@pytest.mark.parametrize(("name", "q_scale"), cases(("fp8", 0.5), full=[("bf16 and fp8", 1.0)]))
def test_fp8_scales(name, q_scale):
    """The scale of queries is in the logits, that of entries in the logits and in out."""
    one, _ = shape(name)
    found = attend(one, q_scale=q_scale, kv_scale=3.0)
    assert found.record.passed and found.lse_error < LSE_ERROR and found.over_bound < 1, found.record.reasons


def test_limbs_of_hard_queries():
    """Heads of zeros, of tiny and large numbers, of one large among small ones; NaN and Inf are NaN of their head."""
    one = case([70, 40], 7, 64, dtype=BF16, kv_dtype=E4M3, seed=2)
    for x in (one.q_nope, one.q_pe):
        x[0, 1], x[0, 2], x[0, 3] = 0.0, x[0, 2] * 2.0**-130, x[0, 3] * 2.0**-20
        x[1, 1] *= 2.0**10
    one.q_nope[1, 0, 5] = 64.0
    found = attend(one)
    assert found.record.passed and not found.hazards, found.record.reasons
    assert bool(((found.lse - found.want.lse).abs() <= 2e-6 * found.want.lse.abs() + LSE_ERROR).all())
    bad = one._replace(q_nope=one.q_nope.clone(), q_pe=one.q_pe.clone())
    bad.q_nope[0, 4, 3], bad.q_pe[0, 5, 60], bad.q_pe[1, 6, 0] = math.nan, math.inf, -math.inf
    result = attend(bad)
    wrong = torch.zeros(2, 7).bool()
    wrong[0, 4:6] = wrong[1, 6] = True
    assert torch.equal(result.lse.isnan(), wrong) and torch.equal(result.out.isnan().all(-1), wrong)
    assert torch.equal(result.out[~wrong], found.out[~wrong]) and torch.equal(result.lse[~wrong], found.lse[~wrong])


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("heads", "splits"), cases((5, 3), (100, 1), full=[(5, 1), (100, 3)]))
def test_schedules(heads, splits):
    """All schedules give the same bits without hazards, also where a CTA or a pair takes several items."""
    one = case([70, 0, 200], heads, 16, seed=2)
    results = [attend(one, splits=splits), attend(one, splits=splits, ctas=1)]
    results += [attend(one, splits=splits, ctas=2, schedule=schedule) for schedule in SCHEDULES]
    for found in results:
        assert not found.hazards and found.leaked == 0
        assert torch.equal(found.out, results[0].out) and torch.equal(found.lse, results[0].lse)
    assert results[0].record.passed and results[0].lse_error < LSE_ERROR


@pytest.mark.parametrize("heads", cases(5, full=[70, 128]))
def test_persistent_ctas_of_many_splits_end(heads):
    """More splits than tiles, fewer CTAs than items: CTAs that take only empty items, first or last ones, end too."""
    one = case([200, 1, 0], heads, 16, seed=6)
    found = [attend(one, splits=4, ctas=ctas) for ctas in (5, 1)]
    assert all(not one.hazards and one.record.passed for one in found)
    assert torch.equal(found[0].out, found[1].out)


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "heads"), cases((BF16, 7), full=[(E4M3, 7), (BF16, 90), (FP16, 7)]))
def test_splits_agree(dtype, heads):
    """Splits change roundings alone: out within what one rounding of P makes, LSE within 1e-6."""
    one = case([400, 130], heads, 16, dtype=dtype, seed=5)
    whole, split = attend(one), attend(one, splits=3)
    assert float((whole.lse - split.lse).abs().max()) < 2e-6
    error = (whole.out.double() - split.out.double()).square().mean() / whole.want.out.square().mean()
    assert float(error.sqrt()) < (0.05 if dtype == E4M3 else 2**-7)


@pytest.mark.parametrize(("heads", "sizes"), cases((3, (16,)), full=[(3, (32, 64)), (70, (16, 32, 64))]))
def test_pages_of_any_size_and_order(heads, sizes):
    """Smaller pages, shuffled, give the bits of pages of 128 in order."""
    results = []
    for page_size in (128, *sizes):
        one = case([300, 65], heads, page_size, seed=8, shuffled=page_size != 128)
        results.append(attend(one))
    for found in results[1:]:
        assert torch.equal(found.out, results[0].out) and torch.equal(found.lse, results[0].lse)


def test_a_pair_and_two_ctas_agree():
    """128 heads by a pair, and as two items of 64: roundings of O differ, where row_max moves at other tokens."""
    one = case([300], 128, 16, seed=3)
    pair, alone = attend(one), attend(one, cluster=1)
    assert alone.record.passed and alone.lse_error < LSE_ERROR and not alone.hazards
    assert float((pair.lse - alone.lse).abs().max()) < 2e-6
    error = (pair.out.double() - alone.out.double()).square().mean() / pair.want.out.square().mean()
    assert float(error.sqrt()) < 2**-7


@pytest.mark.parametrize("heads", cases(4, full=[70]))
def test_rows_may_lie_apart(heads):
    """Views with other strides: queries of one tensor between heads that are NaN, pages with space between them."""
    one = case([100, 30], heads, 16, seed=9)
    wide = torch.full((2, 128, 576), math.nan).bfloat16()
    q = wide[:, 3 : 3 + heads]
    q.copy_(torch.cat((one.q_nope, one.q_pe), -1))
    pool = torch.full((2 * len(one.kv_cache), 20, 640), float("nan")).bfloat16()
    cache = pool[::2, :16, :576]
    cache.copy_(one.kv_cache)
    found = attend(one._replace(q_nope=q[..., :512], q_pe=q[..., 512:], kv_cache=cache))
    want = attend(one)
    assert torch.equal(found.out, want.out) and torch.equal(found.lse, want.lse)


def test_equal_scores_zeros_and_nan():
    """Ties are a mean; an entry of zeros counts; a NaN in q stays in its head, in an entry in its request."""
    one = case([90, 70, 90], 3, 16, seed=1)
    one.q_nope[0, 0], one.q_pe[0, 0] = 0, 0
    found = attend(one)
    held = one.kv_cache[one.page_table[0, :6].long()].flatten(0, 1)[:90, :512].double()
    torch.testing.assert_close(found.out[0, 0].double(), held.mean(0), rtol=2**-8, atol=1e-3)
    assert abs(float(found.lse[0, 0]) - math.log(90)) < 1e-5
    bad = one._replace(q_nope=one.q_nope.clone(), kv_cache=one.kv_cache.clone())
    bad.q_nope[0, 1, 3] = math.nan
    bad.kv_cache[bad.page_table[1, 4], 5, 100] = math.nan  # token 69, the last
    result = attend(bad)
    wrong = torch.zeros(3, 3).bool()
    wrong[0, 1] = wrong[1] = True
    assert torch.equal(result.lse.isnan(), wrong) and torch.equal(result.out.isnan().any(-1), wrong)
    assert torch.equal(result.out[~wrong], found.out[~wrong])


LESS_OFTEN = "EveryTokenCounts NoRescale OwnHalfMaximum AlwaysOverwrites OwnTokens HighLimbOfP NaturalExponent".split()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", cases(*(one for one in FAULTS if one not in LESS_OFTEN), full=LESS_OFTEN))
def test_faults_are_found(name):
    """Each by what `CAUGHT_BY` says."""
    kernel, entries = FAULTS[name], E4M3 if name in OF_LIMBS else BF16
    one = case([300, 70], 100 if name in OF_PAIRS else 5, 16, kv_dtype=entries, seed=3, spread=3.0)
    kinds = (MlaDecode, kernel) if kernel is MaximumForTheSum else (kernel, Combine)
    try:
        found = attend(one, kinds[0], combine_type=kinds[1], splits=3 if name in OF_SPLITS else 1).reports()
    except MemoryFault as error:
        found = {type(error).__name__}
    assert CAUGHT_BY[kernel] in found


def test_nothing_is_found_without_a_fault():
    for heads, splits, entries in ((5, 1, BF16), (5, 3, BF16), (100, 1, BF16), (5, 1, E4M3)):
        one = case([300, 70], heads, 16, kv_dtype=entries, seed=3, spread=3.0)
        assert attend(one, splits=splits).reports() == set()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("settings", "registers"),
    cases(
        ({}, 128),
        ({"page_size": 16, "cluster": 2}, 168),
        full=[
            ({"page_size": 16}, 128),
            ({"dtype": "e4m3", "page_size": 16, "partial": True}, 128),
            ({"dtype": "e4m3", "cluster": 2, "partial": True}, 168),
            ({"dtype": "e4m3", "q_dtype": "bf16", "page_size": 64}, 168),
            ({"dtype": "e4m3", "q_dtype": "bf16", "page_size": 64, "cluster": 2}, 200),
        ],
    ),
)
def test_budget(settings, registers):
    """No spills; shared memory is what the configuration says; O and S fit into tensor memory; the MMAs are these."""
    kernel, code = built(MlaDecode, fake_args, ARCH, **settings)
    rows = {row.resource: row for row in kernel.budget()}
    assert all(row.used <= row.limit for row in rows.values()) and kernel.kv_stages >= kernel.blocks
    assert code.local_bytes == 0 and code.registers <= registers and small(code)
    assert code.smem_bytes == rows["SMEM: total"].used and code.threads == rows["threads"].used
    assert rows["TMEM: O"].used + rows["TMEM: S"].used <= rows["TMEM: total"].used
    group = "mma.ws.cta_group::1" if kernel.cluster == 1 else "mma.cta_group::2"
    assert f"tcgen05.{group}.kind::{kernel.kind}" in code.ptx


def test_the_op_chooses_splits_and_takes_a_workspace():
    """By the page table's width: 3 tiles of one request are 3 splits. It writes what it needs of the workspace."""
    one = case([300], 70, 16, seed=4)
    size = mla_workspace_size(384, 1)
    assert size == 3 * 128 * 513 * 4
    space = torch.full((size + 64,), 7, dtype=torch.uint8)
    found = mla_decode(*one, workspace=space[:size], backend="emulator")
    want = attend(one, splits=3)
    assert torch.equal(found.out, want.out) and torch.equal(found.lse, want.lse)
    assert bool((space[size:] == 7).all()) and bool((space[: 4 * 513] != 7).any())
    with pytest.raises(ArgumentError, match=r"workspace\.shape"):
        mla_decode(*one, workspace=space[: size - 1], backend="emulator")


def test_options_of_the_kernel_are_checked():
    for options, name in (
        ({"dtype": "fp32"}, "dtype"),
        ({"out_dtype": "fp32"}, "out_dtype"),
        ({"dtype": "fp16", "out_dtype": "bf16"}, "out_dtype"),
        ({"page_size": 48}, "page_size"),
        ({"cluster": 4}, "cluster"),
        ({"dtype": "e4m3", "q_dtype": "fp16"}, "q_dtype"),
        ({"q_dtype": "e4m3"}, "q_dtype"),
    ):
        with pytest.raises(ConfigError, match=name):
            MlaDecode(**options)
