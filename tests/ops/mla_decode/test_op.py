"""`mla_decode` without a kernel: against attention written out, splits, workspace, page tables, bad arguments."""

import math

import pytest
import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.ops.mla_decode import splits as heuristic
from dsv4lib.ops.mla_decode.inputs import NOWHERE, case
from dsv4lib.ops.mla_decode.op import E4M3, SM_SCALE, Call, MlaOutput, mla_decode
from dsv4lib.ops.mla_decode.splits import (
    mla_workspace_size,
    num_kv_splits_by_clusters,
    num_kv_splits_by_sms,
    pad_page_table,
    steps_of,
    workspace_bytes,
)
from dsv4lib.reference import mla_decode as oracle

BF16, FP16 = torch.bfloat16, torch.float16


def attention(one, b, length, scale):
    """Torch's own attention over entries gathered token by token."""
    page = one.kv_cache.shape[1]
    kv = torch.stack([one.kv_cache[int(one.page_table[b, t // page]), t % page] for t in range(length)]).double()
    q = torch.cat((one.q_nope[b], one.q_pe[b]), -1).double()
    return torch.nn.functional.scaled_dot_product_attention(q, kv, kv[:, :512], scale=scale)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "heads", "page_size"),
    [(BF16, BF16, 5, 16), (FP16, FP16, 3, 128), (E4M3, E4M3, 2, 32), (BF16, E4M3, 7, 64)],
)
def test_the_reference_is_attention(dtype, kv_dtype, heads, page_size):
    one = case([100, 0, -1, 300], heads, page_size, dtype=dtype, kv_dtype=kv_dtype, past=NOWHERE)
    scales = {"q_scale": 0.5 if dtype == E4M3 else 1.0, "kv_scale": 2.0 if kv_dtype == E4M3 else 1.0}
    out, lse = mla_decode(*one, **scales, backend="reference")
    assert out.dtype == (BF16 if dtype == E4M3 else dtype) and out.shape == (4, heads, 512)
    for b, length in ((0, 100), (3, 300)):
        want = attention(one, b, length, SM_SCALE * math.prod(scales.values())) * scales["kv_scale"]
        torch.testing.assert_close(out[b].double(), want, rtol=2**-8, atol=1e-6)
    assert not out[1:3].any() and bool((lse[1:3] == -math.inf).all()) and bool(lse[[0, 3]].isfinite().all())


def test_the_log_sum_exp_is_of_all_tokens():
    """Of equal logits: ln of their number plus the logit."""
    one = case([37], 2, 16)
    same = one.kv_cache[one.page_table[0, 0], 0].clone()
    one.kv_cache[:] = same
    out, lse = mla_decode(*one, sm_scale=0.25, backend="reference")
    q = torch.cat((one.q_nope[0], one.q_pe[0]), -1).double()
    torch.testing.assert_close(lse[0].double(), 0.25 * (q @ same.double()) + math.log(37))
    torch.testing.assert_close(out[0], same[:512].expand(2, 512))


def test_splits_combine_to_the_whole():
    """By weights e^(lse_i - lse), also of large logits, and where a split has no tokens."""
    one = case([300, 40, 0], 3, 16, dtype=FP16, spread=100.0)
    want = oracle.mla_decode(*one, SM_SCALE)
    parts = []
    for first in (0, 128, 256):
        lengths = (one.seq_lens - first).clamp(max=128)
        table = torch.nn.functional.pad(one.page_table[:, first // 16 :], (0, 1), value=-1)
        parts.append(oracle.mla_decode(*one[:3], lengths, table, SM_SCALE))
    found = oracle.combine(*(torch.stack(x) for x in zip(*parts, strict=True)))
    assert bool(found.lse[2].isinf().all())
    torch.testing.assert_close(found.out, want.out)
    torch.testing.assert_close(found.lse, want.lse)


@pytest.mark.parametrize(
    ("sms", "batch", "tokens", "by_sms", "by_clusters"),
    [
        (132, 4, 8192, (32, 4, 2), (16, 4, 1)),
        (132, 8, 8192, (16, 8, 2), (8, 8, 1)),
        (148, 1, 131072, (147, 14, 2), (74, 14, 1)),
        (148, 2, 8192, (64, 2, 2), (32, 2, 1)),
        (148, 16, 8192, (8, 16, 2), (4, 16, 1)),
        (148, 64, 1024, (2, 8, 2), (1, 8, 1)),
        (148, 4, 131072, (37, 56, 2), (18, 57, 1)),
    ],
)
def test_splits_of_a_cluster_need_no_second_wave(sms, batch, tokens, by_sms, by_clusters):
    """(splits, steps, waves): an item is a cluster of two CTAs, so splits for as many items as SMs wait for it."""
    for choose, wanted in ((num_kv_splits_by_sms, by_sms), (num_kv_splits_by_clusters, by_clusters)):
        splits = choose(tokens, batch, sms)
        assert (splits, *steps_of(tokens, batch, sms, splits)) == wanted


def test_items_of_one_cta_are_twice_as_many():
    """Up to 64 heads an item is a CTA: 148 SMs run 148 of them."""
    assert [num_kv_splits_by_clusters(8192, 2, 148, heads=h) for h in (1, 64, 65, 128)] == [64, 64, 32, 32]


def test_splits_at_the_ends():
    for choose in (num_kv_splits_by_sms, num_kv_splits_by_clusters):
        assert choose(8192, 200, 148) == 1  # more requests than run at once
        assert [choose(tokens, 1, 148) for tokens in (1, 128, 129)] == [1, 1, 2]
        assert choose(0, 4, 148) == choose(-1, 4, 148) == choose(8192, 0, 148) == choose(8192, 1, 1) == 1
        assert choose(8192, 4, 148, 0) == choose(8192, 4, 148, -7) == choose(8192, 4, 148)  # below 1: chosen
        assert choose(8192, 4, 148, 1) == 1 and choose(100, 4, 148, 7) == 7 and choose(8192, 4, 148, 300) == 256
        assert choose(1 << 20, 1, 1000) <= 256
    assert [num_kv_splits_by_sms(8192, n, 132) for n in (1, 4, 8, 16)] == [64, 32, 16, 8]
    fused = [num_kv_splits_by_sms(131072, 1, 148, r, fused_reduction=True) for r in (-1, 1, 100)]
    assert fused == [74, 1, 100]


def test_workspace_size():
    """O and LSE of 128 heads of every split in fp32, whatever H is; nothing without splits."""
    assert mla_workspace_size(8192, 8, num_kv_splits=4) == 8_404_992
    assert mla_workspace_size(8192, 8, num_kv_splits=8) == 16_809_984
    assert mla_workspace_size(8192, 8, num_kv_splits=1) == mla_workspace_size(128, 8) == 0
    assert mla_workspace_size(8192, 4, 132) == 4 * 16 * 128 * 513 * 4
    for heads in (5, 64, 65, 128):  # enough for any H, though of 64 heads and less there are more splits
        for batch, tokens in ((4, 8192), (74, 4096), (100, 1 << 17), (1, 640)):
            splits = num_kv_splits_by_clusters(tokens, batch, 148, heads=heads)
            needed = workspace_bytes(batch, splits, heads)
            assert needed <= mla_workspace_size(tokens, batch, 148)
            assert needed >= 4 * 513 * splits * batch * heads or splits == 1
    assert mla_workspace_size(8192, 4) == mla_workspace_size(8192, 4, heuristic.current_sm_count())
    for name, given in (
        ("max_seq_len", (-1, 1)),
        ("num_batches", (1, -1)),
        ("sm_count", (1, 1, -1)),
        ("num_kv_splits", (1, 1, 0, 257)),
        ("num_kv_splits", (1, 1, 0, 0)),
    ):
        with pytest.raises(ArgumentError) as caught:
            mla_workspace_size(*given)
        assert caught.value.name == name


def test_page_tables_are_padded_to_whole_tiles():
    table = torch.arange(14).view(2, 7).int()
    padded = pad_page_table(table, 64)
    assert padded.shape == (2, 8) and torch.equal(padded[:, :7], table) and bool((padded[:, 7] == -1).all())
    assert pad_page_table(table, 128) is table and pad_page_table(padded, 64) is padded
    assert pad_page_table(table, 16).shape == (2, 8) and pad_page_table(table[:, :1], 16).shape == (2, 8)
    for name, given in (("table", (table.long(), 64)), ("table", (table[0], 64)), ("page_size", (table, 48))):
        with pytest.raises(ArgumentError) as caught:
            pad_page_table(*given)
        assert caught.value.name == name


def test_lengths_past_the_page_table_end_with_it():
    one = case([128, 128], 2, 64)
    found = mla_decode(*one._replace(seq_lens=torch.tensor([1000, 2**31 - 1]).int()), backend="reference")
    for a, b in zip(found, mla_decode(*one, backend="reference"), strict=True):
        assert torch.equal(a, b)


def test_nothing_to_do():
    one = case([5, 9], 4, 16)
    none = one._replace(**{name: getattr(one, name)[:0] for name in ("q_nope", "q_pe", "seq_lens", "page_table")})
    assert mla_decode(*none, backend="reference").out.shape == (0, 4, 512)
    out, lse = mla_decode(*one._replace(kv_cache=one.kv_cache[:0], seq_lens=one.seq_lens * 0), backend="reference")
    assert not out.any() and bool((lse == -math.inf).all())


def test_outputs_and_workspace_are_the_callers():
    one = case([200, 9], 4, 16)
    given = {"out": torch.zeros_like(one.q_nope), "lse": torch.zeros(2, 4)}
    found = mla_decode(*one, **given, backend="reference")
    assert found.out is given["out"] and found.lse is given["lse"] and bool(found.out.any())


def test_splits_are_laid_out_in_the_workspace():
    one = case([200, 9], 4, 16)
    space = torch.zeros(mla_workspace_size(256, 2, num_kv_splits=3) + 5, dtype=torch.uint8)
    out, lse = torch.zeros_like(one.q_nope), torch.zeros(2, 4)
    out, lse = Call(*one, out, lse, space, 1.0, 1.0, 1.0, 3, "reference").partial(3)
    assert out.shape == (3, 2, 4, 512) and lse.shape == (3, 2, 4)
    out.fill_(1.0)
    assert not lse.any()  # they do not overlap
    lse.fill_(2.0)
    assert bool((out == 1.0).all()) and out.data_ptr() == space.data_ptr()


def test_schema():
    one = case([5, 9], 2, 16)
    out = MlaOutput(torch.zeros_like(one.q_nope), torch.zeros(2, 2))
    given = *one, *out, None, 0.125, 1.0, 1.0, -1, "reference"
    torch.library.opcheck(torch.ops.dsv4.mla_decode, given, test_utils=("test_schema", "test_faketensor"))


def bad_arguments():
    """(name in the error, arguments that differ), of a call with B 2, H 4 and pages of 16."""
    one = case([5, 9], 4, 16)
    wide = torch.zeros(2, 4, 1032).bfloat16()
    q8, table = one.q_nope.to(E4M3), one.page_table
    many = torch.zeros(2, 129, 576).bfloat16()
    long = {
        "kv_cache": torch.zeros(1, 128, 576).bfloat16(),
        "page_table": torch.empty(2, (1 << 23) + 1, dtype=torch.int32),
    }
    return (
        # ---- the conditions of the published op
        ("q_nope.shape", {"q_nope": one.q_nope[0]}),
        ("q_pe.shape", {"q_pe": one.q_pe[0]}),
        ("kv_cache.shape", {"kv_cache": one.kv_cache[0]}),
        ("q_nope.shape", {"q_nope": one.q_nope[..., :504]}),
        ("q_pe.shape", {"q_pe": one.q_pe[..., :56]}),
        ("kv_cache.shape", {"kv_cache": one.kv_cache[..., :512]}),
        ("q_pe.shape", {"q_pe": one.q_pe[:1]}),
        ("q_pe.shape", {"q_pe": one.q_pe[:, :3]}),
        ("seq_lens.shape", {"seq_lens": one.seq_lens[:1]}),
        ("page_table.shape", {"page_table": table[:1]}),
        ("seq_lens", {"seq_lens": one.seq_lens.long()}),
        ("page_table", {"page_table": table.long()}),
        ("page_table.shape", {"page_table": table[:, :0]}),
        ("page_table.shape", {"page_table": table[:, :7]}),
        ("out.shape", {"out": torch.zeros(2, 3, 512).bfloat16()}),
        # ---- types, heads, pages, numbers
        ("q_nope.dtype", {"q_nope": one.q_nope.float()}),
        ("q_pe", {"q_pe": one.q_pe.half()}),
        ("kv_cache.dtype", {"kv_cache": one.kv_cache.half()}),
        ("kv_cache.dtype", {"q_nope": q8, "q_pe": one.q_pe.to(E4M3)}),
        ("q_nope.shape", {"q_nope": many[..., :512], "q_pe": many[..., 512:]}),
        ("q_nope.shape", {"q_nope": many[:, :0, :512], "q_pe": many[:, :0, 512:]}),
        ("kv_cache.shape", {"kv_cache": one.kv_cache[:, :8]}),
        ("kv_cache.shape", {"kv_cache": torch.zeros(1, 256, 576).bfloat16()}),
        ("page_table.shape", long),
        ("page_table", {"page_table": table - 100}),
        ("page_table", {"page_table": table + 100}),
        ("sm_scale", {"sm_scale": math.nan}),
        ("sm_scale", {"sm_scale": 0.0}),
        (
            "sm_scale * q_scale * kv_scale",
            {"kv_cache": one.kv_cache.to(E4M3), "sm_scale": 2.0**-90, "kv_scale": 2.0**-90},
        ),
        ("q_scale", {"q_scale": 0.5}),
        ("kv_scale", {"kv_scale": 0.5}),
        ("kv_scale", {"kv_scale": -1.0}),
        ("num_kv_splits", {"num_kv_splits": 0}),
        ("num_kv_splits", {"num_kv_splits": 257}),
        ("workspace.shape", {"num_kv_splits": 2, "workspace": torch.zeros(1000, dtype=torch.uint8)}),
        ("workspace", {"num_kv_splits": 2, "workspace": torch.zeros(1 << 20)}),
        ("out", {"out": torch.zeros(2, 4, 512)}),
        ("lse.shape", {"lse": torch.zeros(2, 5)}),
        # ---- what the kernels cannot read
        ("q_nope.stride()", {"q_nope": wide[..., :1024:2]}),
        ("q_nope.stride()", {"q_nope": torch.zeros(2, 4, 513).bfloat16()[..., :512]}),
        ("q_pe.stride()", {"q_pe": wide[..., 1:65]}),
        ("kv_cache.stride()", {"kv_cache": torch.zeros(4, 16, 577).bfloat16()[..., :576]}),
        ("out.stride()", {"out": torch.zeros(2, 4, 513).bfloat16()[..., :512]}),
        ("lse.stride()", {"lse": torch.zeros(2, 8)[:, ::2]}),
        ("seq_lens.stride()", {"seq_lens": torch.zeros(4).int()[::2]}),
        ("page_table.stride()", {"page_table": torch.zeros(2, 16).int()[:, ::2]}),
    )


@pytest.mark.parametrize("backend", ["emulator", "reference"])
def test_bad_arguments_are_named(backend):
    one = case([5, 9], 4, 16)
    for name, change in bad_arguments():
        with pytest.raises(ArgumentError) as caught:
            mla_decode(**{**one._asdict(), "backend": backend, **change})
        assert caught.value.name == name, (name, change.keys(), str(caught.value))
