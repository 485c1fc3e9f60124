"""Make rows of a decode step that the ops' bench modules do not have. They are of DSV4-Flash, in released formats.

| row              | ours                             | others       | check                            |
|------------------|----------------------------------|--------------|----------------------------------|
| `linear_bf16`    | `linear`, mode bf16              | cuBLAS       | fp64 of the operands             |
| `cast`           | `quantize`, fp8                  | those of its | the bits of the oracle           |
| `routed_moe`     | dispatch, `ExpertStack`, combine | see `peers`  | fp64, activations as they come   |
| `shared_expert`  | `Fp8Expert`                      | none         | fp64, activations as they come   |
| `fmha`           | `fmha`                           | see `peers`  | the op's oracle                  |
| `indexer_logits` | `indexer_logits`, fp8 or fp4     | DeepGEMM fp8 | the op's oracle                  |

An op without a kernel for this GPU is absent by its own words. Weights are random bits without NaN, scales small powers
of two. Bytes are those of the floors: weights of the experts that random routing is expected to reach, entries and
queries once, results once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dsv4lib.bench.decode_step import peers as step_peers
from dsv4lib.bench.ops import inputs, peers, providers
from dsv4lib.bench.ops.case import Absent, Call, Given, Provider, Row
from dsv4lib.bench.ops.results import OURS
from dsv4lib.config import FLASH, LayerKind
from dsv4lib.errors import BackendUnavailable
from dsv4lib.formats import fp8_block, indexer_key, kv_entry, mxfp4
from dsv4lib.layers.experts import Experts, ExpertStack, Fp8Expert, Weights
from dsv4lib.ops.fmha.op import Fp8Pages, Selected, fmha
from dsv4lib.ops.indexer_logits.op import LAYOUTS, KeyPages, Visible, indexer_logits
from dsv4lib.ops.indexer_q.op import IndexerQueries
from dsv4lib.ops.linear.op import linear
from dsv4lib.ops.moe_combine.op import moe_combine
from dsv4lib.ops.moe_dispatch.op import moe_dispatch
from dsv4lib.ops.moe_gemm.op import Operand
from dsv4lib.ops.moe_gemm.sm90.layout import BLOCK, FORMS, TILE_M, step_of, tile_bytes, untile_weights
from dsv4lib.ops.quantize import peers as quantize_peers
from dsv4lib.ops.quantize.bench import CLOSE, blocks_of
from dsv4lib.ops.quantize.op import Quantized, output_shapes, quantize
from dsv4lib.reference import quantize as quantize_oracle
from dsv4lib.reference.moe_gemm import swiglu

ARCH, BACKEND = "sm_90a", "native"
PAGE = 64  # entries
FILLED = 64  # pages of random entries, which a pool repeats
CHECKED = 2  # tokens of `routed_moe`
BF16_ERROR = 2.0**-7  # RMS of a token's error beside its size: P, or sums, rounded to bf16
FP8_ERROR = 0.08  # likewise: activations rounded to E4M3 twice
EXPONENTS = 118, 121  # E8M0 bytes of MXFP4 weights: 2^-9 to 2^-7
FP8_EXPONENTS = 115, 117  # of FP8 ones, whose codes are larger
TILE = 128
Outputs = Mapping[str, Tensor]


def _refused_is_absent(provider: Provider) -> Provider:
    """Say of an op that has no kernel for this GPU that it is absent."""

    def bind(given: Given) -> tuple[Call, Outputs]:
        call, out = provider.bind(given)

        def run() -> None:
            try:
                call()
            except BackendUnavailable as error:
                raise Absent(str(error)) from None

        return run, out

    return Provider(OURS, bind)


def _near(found: Tensor, truth: Tensor, bound: float) -> None:
    """Compare rows: RMS of the error beside the size.

    Raises:
        AssertionError: a row is off by more than ``bound``.
    """
    error, size = (found.double() - truth).square().mean(-1).sqrt(), truth.square().mean(-1).sqrt().clamp(min=1e-30)
    worst = float((error / size).nan_to_num(float("inf")).max())
    assert worst <= bound, f"a row is off by {worst:.3g} of its size"


# ------------------------------------------------------------------- GEMMs


def linear_bf16(name: str, n: int, k: int, tokens: int) -> Row:
    """Multiply x [T, K] by bf16 weights [N, K]."""

    def given(generator: torch.Generator) -> Given:
        w = torch.randn(n, k, generator=generator, device=generator.device).bfloat16()
        return {"x": inputs.normals(generator, tokens, k), "w": w}

    def new(given: Given) -> Outputs:
        return {"y": given["x"].new_empty(tokens, n)}

    def ours(given: Given, out: Outputs) -> None:
        linear((given["x"], None), (given["w"], None), mode="bf16", out=(out["y"], None), backend=BACKEND)

    def cublas(given: Given, out: Outputs) -> None:
        torch.mm(given["x"], given["w"].T, out=out["y"])

    def check(given: Given, out: Outputs) -> None:
        _near(out["y"], given["x"].double() @ given["w"].double().T, BF16_ERROR)

    return Row(
        "linear_bf16",
        f"Flash {name} T {tokens}",
        bytes=2 * (n * k + tokens * (k + n)),
        flops=2 * tokens * n * k,
        given=given,
        check=check,
        providers=(_refused_is_absent(providers.in_place(OURS, new, ours)), providers.in_place("cuBLAS", new, cublas)),
    )


def cast(width: int, tokens: int) -> Row:
    """Quantise rows of bf16 to FP8, 1 x 128."""

    def bind(given: Given) -> tuple[Call, Outputs]:
        x = given["x"]
        codes, scales = (x.new_empty(shape, dtype=torch.uint8) for shape in output_shapes("fp8", *x.shape))
        out = Quantized(codes, scales, None)
        return lambda: quantize(x, "fp8", out=out, backend=BACKEND), {"codes": codes, "scales": scales}

    def plain(x: Tensor) -> dict[str, Tensor]:
        return dict(zip(("codes", "scales"), blocks_of(x, "fp8"), strict=True))

    def check(given: Given, out: Outputs) -> None:
        codes, scales, _ = quantize_oracle.quantize(given["x"], "fp8")
        inputs.same_bytes(out, {"codes": codes[0], "scales": scales[0]}, CLOSE)

    return Row(
        "cast",
        f"fp8 {width} wide T {tokens}",
        bytes=tokens * (3 * width + width // TILE),
        flops=0,
        given=lambda generator: {"x": inputs.normals(generator, tokens, width), "recipe": "fp8"},
        check=check,
        providers=(Provider(OURS, bind), providers.compiled(plain, "x"), *quantize_peers.providers()),
    )


# -------------------------------------------------------------------- MoE


def active(experts: int, k: int, tokens: int) -> float:
    """Count the experts that random routing is expected to reach."""
    return experts * (1 - (1 - k / experts) ** tokens)


def tiles(experts: int, n: int, k: int, generator: torch.Generator) -> Tensor:
    """Draw tiled MXFP4 weights of mode "w4a8": random bits, scales of `EXPONENTS`."""
    step, device = step_of(k), generator.device
    shape, start = (experts, n // TILE_M, k // step), TILE_M * step // 2
    draw = {"generator": generator, "device": device, "dtype": torch.uint8}
    w = torch.randint(0, 256, (*shape, tile_bytes("w4a8", step)), **draw)
    low, high = (byte + FORMS["w4a8"].bias for byte in EXPONENTS)
    w[..., start:] = torch.randint(low, high, (*shape, TILE_M * step // BLOCK), **draw)
    return w


def routed_moe(tokens: int) -> Row:
    """Dispatch, quantise, two GEMMs, combine: the routed experts of a layer."""
    d, width, count, k = FLASH.hidden, FLASH.expert_width, FLASH.n_experts, FLASH.experts_per_token
    weights, routes = 3 * d * width, tokens * k

    def given(generator: torch.Generator) -> Given:
        device = generator.device
        picks = torch.rand(tokens, count, generator=generator, device=device).topk(k).indices.int()
        scores = torch.rand(tokens, k, generator=generator, device=device) + 0.1
        ones = torch.ones(count, 2, device=device)
        first = Weights(((tiles(count, 2 * width, d, generator), None),), ones)
        second = Weights(((tiles(count, d, width, generator), None),), ones[:, :1].contiguous())
        x, shared = (torch.randn(tokens, d, generator=generator, device=device).bfloat16() for _ in range(2))
        stack = ExpertStack("experts", Experts(first, second), "mxfp4", d, ARCH)
        shared *= 2.0**-6  # smaller than the routed sum, which it must not round away
        return {"x": x, "picks": picks, "scores": scores, "shared": shared, "experts": stack}

    def ours(given: Given) -> Outputs:
        common = {"backend": BACKEND}
        routed = moe_dispatch(given["picks"], given["scores"], count=count, align=given["experts"].align, **common)
        groups = routed.offsets[:-1], routed.counts
        options = {"count": routes, "limit": FLASH.swiglu_limit, **common}
        y = given["experts"](given["x"], routed.rows, groups, routed.row_weight, **options)
        return {"y": moe_combine(y, routed.row_of, None, given["shared"], **common)}

    def check(given: Given, out: Outputs) -> None:
        truth = torch.stack([_token(given, token) for token in range(min(CHECKED, tokens))])
        _near(out["y"][: len(truth)].double() - given["shared"][: len(truth)].double(), truth, FP8_ERROR)

    return Row(
        "routed_moe",
        f"Flash MXFP4 T {tokens}",
        bytes=round(active(count, k, tokens) * weights * (0.5 + 1 / BLOCK)),
        flops=2 * routes * weights,
        given=given,
        check=check,
        providers=(_refused_is_absent(providers.functional(OURS, ours)), step_peers.experts()),
    )


def _token(given: Given, token: int) -> Tensor:
    """The routed experts' sum of one token, fp64 [d]."""
    stack, x = given["experts"], given["x"][token].double()
    total = torch.zeros_like(x)
    for expert, score in zip(given["picks"][token].tolist(), given["scores"][token].double(), strict=True):
        own = (stack.first_codes, stack.second_codes)
        first, second = (_decoded(codes[expert : expert + 1], x.device) for codes in own)
        gate, up = (first @ x).unflatten(0, (-1, 2, 8)).unbind(1)
        total += second @ (score * swiglu(gate, up, FLASH.swiglu_limit).flatten())
    return total


def _decoded(codes: Tensor, device: torch.device) -> Tensor:
    return mxfp4.dequantize(mxfp4.MXFP4Tensor(*untile_weights(codes, "w4a8")), torch.float64)[0].to(device)


def fp8_weights(n: int, k: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw FP8 weights [1, N, K] and E8M0 bytes of 128 x 128."""
    draw = {"generator": generator, "device": generator.device, "dtype": torch.uint8}
    w = torch.randint(0, 256, (1, n, k), **draw)
    w.masked_fill_(w & 0x7F == 0x7F, 0x38)  # no NaN
    return w, torch.randint(*FP8_EXPONENTS, (1, n // TILE, k // TILE), **draw)


def shared_expert(tokens: int) -> Row:
    """Time two FP8 linears with SwiGLU and requantisation between them. x comes quantised, from mHC."""
    d, width = FLASH.hidden, FLASH.expert_width
    weights = 3 * d * width

    def given(generator: torch.Generator) -> Given:
        q = fp8_block.quantize_activation(inputs.normals(generator, tokens, d))
        ones = torch.ones(1, 2, device=generator.device)
        first = Weights((fp8_weights(2 * width, d, generator),), ones)
        second = Weights((fp8_weights(d, width, generator),), ones[:, :1])
        expert = Fp8Expert("shared", Experts(first, second), d, BACKEND)
        return {"x": q.codes, "x_scales": q.scales, "first": first.planes[0], "second": second.planes[0], "e": expert}

    def ours(given: Given) -> Outputs:
        given_x = Operand(given["x"].view(torch.uint8), given["x_scales"].view(torch.uint8))
        options = {"limit": FLASH.swiglu_limit, "backend": BACKEND}
        return {"y": given["e"](given_x.codes, quantised=given_x, **options)}

    def check(given: Given, out: Outputs) -> None:
        x = fp8_block.dequantize(fp8_block.FP8Tensor(given["x"], given["x_scales"], (1, TILE)), torch.float64)
        first, second = (
            fp8_block.dequantize(fp8_block.FP8Tensor(w[0], s[0], (TILE, TILE)), torch.float64)
            for w, s in (given["first"], given["second"])
        )
        gate, up = (x @ first.T).chunk(2, 1)
        _near(out["y"], swiglu(gate, up, FLASH.swiglu_limit) @ second.T, FP8_ERROR)

    blocks = weights // TILE**2 + tokens * (d + width) // TILE
    return Row(
        "shared_expert",
        f"Flash FP8 T {tokens}",
        bytes=weights + blocks + tokens * (d + width + 2 * (2 * width + d)),
        flops=2 * tokens * weights,
        given=given,
        check=check,
        providers=(_refused_is_absent(providers.functional(OURS, ours)),),
    )


# --------------------------------------------------------------- attention


def entries_of(kind: LayerKind, context: int) -> tuple[int, int]:
    """Count the compressed entries of a request, and those that a token attends to."""
    if kind is LayerKind.SWA:
        return 0, 0
    there = context // FLASH.rate(kind)
    return there, min(there, FLASH.index_topk) if kind is LayerKind.CSA else there


def _pool(pages: int, append: Callable[..., None], layout: Any, width: int, generator: torch.Generator) -> Tensor:
    """Fill pages with random entries; few different ones, since only how many bytes there are counts."""
    device = generator.device
    some = layout.allocate(FILLED, PAGE).to(device)
    values = torch.randn(FILLED * PAGE, width, generator=generator, device=device).bfloat16()
    append(some, PAGE, torch.arange(FILLED * PAGE, device=device), values)
    return some[torch.randint(FILLED, (pages,), generator=generator, device=device)]


def attention(kind: LayerKind, context: int, tokens: int) -> Row:
    """Attend to entries and window, one token a request, FP8 entries in pages of 64."""
    heads, dim, window = FLASH.n_heads, FLASH.head_dim, FLASH.window
    there, seen = entries_of(kind, context)

    def given(generator: torch.Generator) -> Given:
        device, layout = generator.device, (kv_entry.append, kv_entry.LAYOUT, dim, generator)
        request = torch.arange(tokens, device=device)[:, None]
        found = {"q": torch.randn(tokens, heads, dim, generator=generator, device=device).bfloat16()}
        found["sink"] = torch.randn(heads, generator=generator, device=device)
        found["window"] = _pool(tokens * window // PAGE, *layout)
        found["window_rows"] = (request * window + torch.arange(window, device=device)).int()
        if there:
            pages = -(-there // PAGE)
            order = torch.rand(tokens, there, generator=generator, device=device).topk(seen).indices
            picks = order if kind is LayerKind.CSA else torch.arange(there, device=device).expand(tokens, -1)
            found["entries"], found["rows"] = _pool(tokens * pages, *layout), (request * pages * PAGE + picks).int()
        return found

    def run(given: Given, out: Outputs, backend: str) -> None:
        window_keys = Selected(Fp8Pages(given["window"], PAGE), given["window_rows"])
        entries = Selected(Fp8Pages(given["entries"], PAGE), given["rows"]) if there else None
        options = {"sink": given["sink"], "scale": dim**-0.5, "o": out["o"], "backend": backend}
        fmha(given["q"], entries, window_keys, **options)

    def new(given: Given) -> Outputs:
        return {"o": torch.empty_like(given["q"])}

    def check(given: Given, out: Outputs) -> None:
        want = new(given)
        run(given, want, "reference")
        _near(out["o"], want["o"].double(), BF16_ERROR)

    ours = providers.in_place(OURS, new, lambda given, out: run(given, out, BACKEND))
    keys = seen + window
    return Row(
        "fmha",
        f"Flash {kind} {context >> 10}K T {tokens}",
        bytes=tokens * (keys * kv_entry.LAYOUT.entry_bytes + 4 * heads * dim),
        flops=4 * tokens * heads * keys * dim,
        given=given,
        check=check,
        providers=(_refused_is_absent(ours), step_peers.attention()),
    )


def logits(context: int, tokens: int, variant: str = "fp8") -> Row:
    """Score all keys of a CSA layer's indexer, one token a request; "fp4" is what no peer has on a Hopper."""
    heads, dim, length = FLASH.index_heads, FLASH.index_dim, context // FLASH.csa_rate
    pages, layout = -(-length // PAGE), LAYOUTS[variant]

    def given(generator: torch.Generator) -> Given:
        device = generator.device
        q = torch.randn(tokens, heads, dim, generator=generator, device=device)
        if variant == "fp8":
            found = {"q": q.to(torch.float8_e4m3fn).view(torch.uint8)}
        else:
            codes = mxfp4.quantize(q)
            found = {"q": codes.packed, "q_scales": codes.scales}
        found["weights"] = torch.randn(tokens, heads, generator=generator, device=device)

        def append(pool: Tensor, page: int, indices: Tensor, keys: Tensor) -> None:
            indexer_key.append(pool, page, indices, keys, variant)

        found["keys"] = _pool(tokens * pages, append, layout, dim, generator)
        found["table"] = torch.arange(tokens * pages, device=device).int().view(tokens, pages)
        found["requests"] = torch.arange(tokens, device=device).int()
        found["lengths"] = torch.full((tokens,), length, device=device).int()
        return found

    def run(given: Given, out: Outputs, backend: str) -> None:
        queries = IndexerQueries(given["q"], given.get("q_scales"), given["weights"])
        visible = Visible(given["table"], given["requests"], given["lengths"])
        indexer_logits(queries, KeyPages(given["keys"], PAGE), visible, out=out["scores"], backend=backend)

    def new(given: Given) -> Outputs:
        return {"scores": given["weights"].new_zeros(tokens, pages * PAGE)}

    def check(given: Given, out: Outputs) -> None:
        want = new(given)
        run(given, want, "reference")
        _near(out["scores"][:, :length], want["scores"][:, :length].double(), 2.0**-10)

    def deep_gemm(given: Given) -> peers.Bound:
        module = peers.load("vllm.third_party.deep_gemm")
        q, keys = given["q"].view(torch.float8_e4m3fn)[:, None], given["keys"].view(-1, PAGE, 1, dim + 4)
        seen = given["lengths"][:, None]
        schedule = module.get_paged_mqa_logits_metadata(seen, PAGE, module.get_num_sms())  # once a step, for all layers
        arguments = (q, None), keys, given["weights"], seen, given["table"], schedule, pages * PAGE
        return peers.bound(lambda: module.fp8_fp4_paged_mqa_logits(*arguments), scores=lambda out: out)

    ours = providers.in_place(OURS, new, lambda given, out: run(given, out, BACKEND))
    return Row(
        "indexer_logits",
        f"Flash {variant} {context >> 10}K T {tokens}",
        bytes=tokens * length * (layout.entry_bytes + 4),
        flops=2 * tokens * heads * length * dim,
        given=given,
        check=check,
        providers=(_refused_is_absent(ours), *([Provider("DeepGEMM", deep_gemm)] if variant == "fp8" else [])),
    )
