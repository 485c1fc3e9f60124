"""FlashInfer (flashinfer-python on PyPI): its CuTeDSL kernels, DeepSeek-V4's compressed attention among them.

What they exercise: gathering copies (tile::gather4), paged keys, tensor maps encoded at run time, A from tensor memory
in three layouts, fp8 P, FP8 + FP4 caches dequantised in registers, block-scaled grouped GEMM, quantising norms.
"""

from __future__ import annotations

import math

import torch
from corpus import (
    BF16,
    FP8,
    U_BF16,
    U_E4M3,
    Case,
    Check,
    attention,
    attention_check,
    decode_e2m1,
    normal,
    rounded,
    unswizzle_scales,
)

MODULE = "flashinfer"

# What these kernels are known to show; see data/emulator/findings.md.
LANES = frozenset({"tmem_lane_quarter"})
COMPLETION = frozenset({"race_through_completion"})
SAME_VALUE = frozenset({"race_global_same_value"})
ROW_MAXIMA = frozenset({"race_shared"})  # as NVIDIA's mla_decode examples, from which they derive
CORRECTION = frozenset({"race_tensor"})
WORKSPACE = 64 << 20


def rmsnorm() -> list[Check]:
    from flashinfer.norm.kernels import rmsnorm_cute

    x, w = normal(8, 1024), (torch.rand(1024) + 0.5).to(BF16)
    out, xf = torch.empty_like(x), x.float()
    rmsnorm_cute(x, w, out)
    return [rounded("y", out, xf * torch.rsqrt(xf.square().mean(-1, keepdim=True) + 1e-6) * w.float())]


def _fp4_check(values: torch.Tensor, want: torch.Tensor, block: int) -> Check:
    """Round trip through e2m1 with one scale a block.

    The step of e2m1 next to its largest value 6 is 2, so half of it is amax/6 when the scale is amax/6 exactly; an
    e4m3 scale is off by 1/16 more, a power-of-two scale is up to twice as large.
    """
    amax = want.reshape(*want.shape[:-1], -1, block).abs().amax(-1).repeat_interleave(block, -1)
    half_step = amax / (6 if block == 16 else 3)
    reason = f"half a step of e2m1 at {block} numbers a scale"
    return Check("dequantised", values, want, 0.2, 0.0, 1.1 * half_step + 1e-3, reason)


def rmsnorm_fp4(block: int, add: bool = False) -> list[Check]:
    """Norm and quantisation to nvfp4 (16 a scale, e4m3) or mxfp4 (32, ue8m0), optionally with a residual."""
    from flashinfer.cute_dsl import add_rmsnorm_fp4quant, rmsnorm_fp4quant

    x, w = normal(8, 1024), (torch.rand(1024) + 0.5).to(BF16)
    xf = x.float()
    if add:
        residual = normal(8, 1024)
        xf = (xf + residual.float()).to(BF16).float()
        packed, scales = add_rmsnorm_fp4quant(x, residual, w, block_size=block)[:2]
    else:
        packed, scales = rmsnorm_fp4quant(x, w, block_size=block)[:2]
    want = xf * torch.rsqrt(xf.square().mean(-1, keepdim=True) + 1e-6) * w.float()
    factor = scales.float() if scales.dtype != torch.uint8 else torch.exp2(scales.float() - 127)
    return [_fp4_check(decode_e2m1(packed) * factor.repeat_interleave(block, 1), want, block)]


def quantize_nvfp4() -> list[Check]:
    from flashinfer.quantization.kernels import nvfp4_quantize_cute_dsl

    x = normal(128, 256)
    scale = torch.tensor([448 * 6 / float(x.float().abs().max())])
    packed, stored = nvfp4_quantize_cute_dsl(x, scale)
    factor = unswizzle_scales(stored.view(FP8), 128, 16).float() / scale
    return [_fp4_check(decode_e2m1(packed).reshape(128, 256) * factor.repeat_interleave(16, 1), x.float(), 16)]


def quantize_mxfp8() -> list[Check]:
    from flashinfer.quantization.kernels import mxfp8_quantize_cute_dsl

    x = normal(128, 256)
    packed, stored = mxfp8_quantize_cute_dsl(x)
    factor = torch.exp2(unswizzle_scales(stored.view(torch.uint8), 128, 8).float() - 127)
    got = packed.float().reshape(128, 256) * factor.repeat_interleave(32, 1)
    u = U_E4M3
    return [Check("dequantised", got, x.float(), u, u, 1e-3, "one rounding to e4m3, scales are powers of two")]


def prefill(queries: int = 256, keys: int = 256, causal: bool = True) -> list[Check]:
    from flashinfer.cute_dsl.attention.wrappers.batch_prefill import BatchPrefillCuteDSLWrapper

    d = 128
    wrapper = BatchPrefillCuteDSLWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    starts = (torch.tensor([0, n], dtype=torch.int32) for n in (queries, keys))
    wrapper.plan(*starts, 1, 1, d, causal=causal, q_data_type=BF16, kv_data_type=BF16)
    q, k, v = (normal(n, 1, d) for n in (queries, keys, keys))
    out = wrapper.run(q, k, v)
    want, _ = attention(q[None], k[None], v[None], 1 / math.sqrt(d), causal)
    return [attention_check("out", out, want[0], v, U_BF16)]


def mla(form: str = "monolithic", dtype: torch.dtype = BF16, keys: int = 256, page: int = 64) -> list[Check]:
    """MLA decode over a paged cache of 512 latent + 64 rope numbers; pages in random order."""
    from flashinfer.cute_dsl.attention.mla_dispatch import cute_dsl_mla_decode

    pages = -(-keys // page)
    q, cache = normal(1, 1, 128, 576).to(dtype), normal(pages + 2, page, 576).to(dtype)
    table = torch.randperm(pages + 2)[:pages].reshape(1, pages).to(torch.int32)
    scale = 1 / math.sqrt(576)
    workspace = torch.zeros(WORKSPACE, dtype=torch.int8)
    lengths = torch.full((1,), keys, dtype=torch.int32)
    out = cute_dsl_mla_decode(q, cache, workspace, 512, 64, table, lengths, keys, scale, cute_dsl_impl=form)
    kv = cache[table[0].long()].reshape(1, -1, 1, 576)[:, :keys].float()
    want, _ = attention(q, kv, kv[..., :512], scale)
    return [attention_check("out", out, want, kv[..., :512], U_E4M3 if dtype == FP8 else U_BF16)]


def hca(compressed: int = 128, window: int = 128, topk: int | None = None, heads: int = 128) -> list[Check]:
    """DeepSeek-V4's attention over 128 window entries and the compressed entries, with sinks, all in fp8.

    ``window``: valid window entries; ``topk``: entries used in all, counting 128 of the window.
    """
    from flashinfer.cute_dsl.attention.wrappers.batch_hca import cute_dsl_hca_decode

    page, d = 128, 512
    pages = -(-compressed // page)
    q, recent, old = (normal(*s).to(FP8) for s in ((1, 1, heads, d), (512, d), (pages + 1, page, d)))
    chosen = torch.randperm(512)[:128][None].to(torch.int32)
    table = torch.randperm(pages + 1)[:pages][None].to(torch.int32)
    total = 128 + compressed
    lengths, used, valid = (torch.full((1,), n, dtype=torch.int32) for n in (total, topk or total, window))
    scale, sinks = 1 / math.sqrt(d), torch.randn(heads)
    workspace = torch.zeros(WORKSPACE, dtype=torch.int8)
    out = cute_dsl_hca_decode(q, recent, old, workspace, chosen, table, lengths, used, valid, scale, 1.0, sinks)
    entries = old.float()[table[0].long()].reshape(-1, d)[: (topk or total) - 128]
    kv = torch.cat([recent.float()[chosen[0].long()][:window], entries])[None, :, None]
    want, _ = attention(q, kv, kv, scale, sink=sinks)
    return [attention_check("out", out.reshape(want.shape), want, kv, U_E4M3)]


def v41_decode(entries: int = 128, batch: int = 1) -> list[Check]:
    """V4.1's decode: 128 window entries in fp8 (a ue8m0 scale per 32), compressed ones in e2m1 (an e4m3 per 16)."""
    from flashinfer.deepseek_v41 import deepseek_v41_decode

    heads, d, page, window_pages, old_pages = 64, 512, 64, 4, 10
    data, exponents = normal(window_pages, page, d).to(FP8), torch.randint(125, 128, (window_pages, page, d // 32))
    window = torch.cat([data.view(torch.uint8).flatten(1), exponents.to(torch.uint8).flatten(1)], 1)
    factor = torch.exp2(exponents.float() - 127).repeat_interleave(32, -1)
    window_values = (data.float() * factor).reshape(-1, d)
    packed = torch.randint(0, 256, (old_pages, page, d // 2)).to(torch.uint8)
    scales = (torch.rand(old_pages, page, d // 16) * 0.5 + 0.25).to(FP8)
    old = torch.cat([packed.flatten(1), scales.view(torch.uint8).flatten(1)], 1)
    old_values = (decode_e2m1(packed) * scales.float().repeat_interleave(16, -1)).reshape(-1, d)

    q, sink = normal(batch, 1, heads, d), torch.randn(heads)
    recent = torch.stack([torch.randperm(window_pages * page)[:128] for _ in range(batch)]).to(torch.int32)[:, None]
    chosen = torch.stack([torch.randperm(old_pages * page)[:entries] for _ in range(batch)]).to(torch.int32)[:, None]
    recent[:, :, 100:110] = -1  # masked
    chosen[:, :, -5:] = -1
    caches = window.reshape(window_pages, page, 1, 528).contiguous(), old.reshape(old_pages, page, 1, 288).contiguous()
    out = deepseek_v41_decode(q, *caches, recent, chosen, sink)[0]
    rows = []
    for b in range(batch):
        near, far = (i[b, 0][i[b, 0] >= 0].long() for i in (recent, chosen))
        kv = torch.cat([window_values[near], old_values[far]])[None, :, None]
        rows.append(attention(q[b : b + 1], kv, kv, d**-0.5, sink=sink)[0])
    return [attention_check("out", out.reshape(batch, 1, heads, d), torch.cat(rows), old_values, U_BF16)]


def grouped_gemm_nvfp4() -> list[Check]:
    """Two groups of 128 x 256 x 256 with 128 and 77 valid rows; scales in the 128x4 tile order."""
    from flashinfer.gemm import grouped_gemm_nt_masked

    groups, m, n, k, block = 2, 128, 256, 256, 16
    rows = torch.tensor([128, 77], dtype=torch.int32)

    def operand(size: int) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        packed = torch.randint(0, 256, (groups, size, k // 2)).to(torch.uint8)
        scales = torch.randint(1, 3, (groups, size, k // block)).to(FP8)
        tiles = scales.view(torch.uint8).reshape(groups, size // 128, 4, 32, k // block // 4, 4)
        stored = tiles.permute(0, 1, 4, 3, 2, 5).contiguous().view(FP8).permute(3, 4, 1, 5, 2, 0)
        return (packed.permute(1, 2, 0), stored), decode_e2m1(packed) * scales.float().repeat_interleave(block, -1)

    (a, a_values), (b, b_values) = operand(m), operand(n)
    out = torch.zeros(groups, m, n, dtype=BF16)
    grouped_gemm_nt_masked(
        a,
        b,
        out.permute(1, 2, 0),
        rows,
        ab_dtype="float4_e2m1fn",
        sf_dtype="float8_e4m3fn",
        c_dtype="bfloat16",
        sf_vec_size=block,
    )
    want = a_values @ b_values.transpose(1, 2)
    return [rounded(f"group {i}", out[i, :r], want[i, :r]) for i, r in enumerate(rows.tolist())]


CASES = [
    Case("flashinfer_rmsnorm", MODULE, rmsnorm),
    Case("flashinfer_rmsnorm_nvfp4", MODULE, lambda: rmsnorm_fp4(16)),
    Case("flashinfer_rmsnorm_mxfp4", MODULE, lambda: rmsnorm_fp4(32)),
    Case("flashinfer_add_rmsnorm_nvfp4", MODULE, lambda: rmsnorm_fp4(16, add=True)),
    Case("flashinfer_quantize_nvfp4", MODULE, quantize_nvfp4),
    Case("flashinfer_quantize_mxfp8", MODULE, quantize_mxfp8),
    Case("flashinfer_prefill_causal", MODULE, prefill),
    Case("flashinfer_prefill", MODULE, lambda: prefill(keys=1024, causal=False)),
    Case("flashinfer_mla", MODULE, mla, lints=SAME_VALUE, errors=ROW_MAXIMA),
    Case("flashinfer_mla_modular", MODULE, lambda: mla("modular"), lints=SAME_VALUE, errors=ROW_MAXIMA),
    Case("flashinfer_mla_fp8", MODULE, lambda: mla(dtype=FP8), lints=LANES | SAME_VALUE, errors=CORRECTION),
    Case("flashinfer_mla_fp8_modular", MODULE, lambda: mla("modular", FP8), lints=SAME_VALUE, errors=ROW_MAXIMA),
    Case("flashinfer_hca", MODULE, hca, lints=LANES | SAME_VALUE, errors=CORRECTION),
    Case(
        "flashinfer_hca_masked",
        MODULE,
        lambda: hca(compressed=256, window=77, topk=128 + 200),
        lints=LANES | SAME_VALUE,
        errors=CORRECTION,
    ),
    Case("flashinfer_hca_64_heads", MODULE, lambda: hca(heads=64), lints=LANES | SAME_VALUE, errors=CORRECTION),
    Case("flashinfer_v41", MODULE, v41_decode, lints=LANES | COMPLETION),
    Case("flashinfer_v41_512", MODULE, lambda: v41_decode(512), slow=True, lints=LANES | COMPLETION),
    Case("flashinfer_grouped_gemm", MODULE, grouped_gemm_nvfp4),
]
