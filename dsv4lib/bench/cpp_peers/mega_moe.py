"""DeepGEMM's fused MoE (SM100, FP8 tokens, FP4 weights): dispatch, GEMMs, SwiGLU and combine, on one or two devices.

Tile sizes, buffers, tensor maps and launch are those of `csrc/apis/mega.hpp` and `csrc/jit_kernels` there, for
at most 8.5 tokens an expert. Weights go through our transform into DeepGEMM's layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from dsv4lib.bench.cpp_peers.build import Entry
from dsv4lib.bench.cpp_peers.cases import Case, Output, library
from dsv4lib.bench.cpp_peers.deep_gemm import CHECKOUT, Map
from dsv4lib.emulator.driver.symbols import RUNTIME
from dsv4lib.formats import e4m3, fp8_block, mxfp4, ue8m0
from dsv4lib.loader.mega_moe import pack_sf, transform_weights_for_mega_moe

EXPERTS, TOPK, HIDDEN, WIDTH, LIMIT, SMS = 4, 2, 512, 512, 3.0, 4
MAX_TOKENS = 384  # a multiple of all tile heights that it may choose
BLOCK_M, BLOCK_N, BLOCK_K, STORE_M, SF_BLOCK = 16, 128, 256, 8, 128
DISPATCH, OTHERS, EPILOGUE = 128, 128, 256  # threads
WAVE = 2  # experts at a time
U8, I32, FP4 = 0, 3, 14  # CUtensorMapDataType
SMEM = 232448
ROUNDINGS = "outputs of experts rounded to bf16, their sum once more; codes of h that fp32 moves over a tie"

_MAPS = ("l1_acts l1_acts_sf l1_weights l1_weights_sf l1_output l2_acts l2_acts_sf l2_weights l2_weights_sf").split()
_FIELDS = ("bytes", "y", "stats", "tokens", "smem", "rank", "base0", "base1", *_MAPS)


@dataclass(frozen=True)
class Sizes:
    """Of one call: tokens of each rank."""

    counts: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """How many devices."""
        return len(self.counts)

    @property
    def ring(self) -> int:
        """Rows of the buffers between the phases: every token at every expert of a rank."""
        return MAX_TOKENS * self.ranks * (EXPERTS // self.ranks)

    @property
    def sf_ring(self) -> int:
        """Words of a column of scales: of the smallest tile, 8 rows of which take 128 words."""
        return self.ring // 8 * 128


def _align(size: int, to: int) -> int:
    return -(-size // to) * to


def _stages() -> tuple[int, int]:
    """Stages of the ring in shared memory, and its bytes in all."""
    warps = EPILOGUE // 32
    fixed = _align(EXPERTS * 4, 1024) + _align(HIDDEN * (DISPATCH // 32), 1024)
    outputs = max(warps // 4 * STORE_M * (BLOCK_N // 2) * 2, warps // 4 * STORE_M * BLOCK_N * 2)
    fixed += _align(outputs, 1024) + STORE_M * warps * 4 + (DISPATCH // 32 + 4 + 2 * warps) * 8 + 4
    stage = BLOCK_M // 2 * BLOCK_K + BLOCK_N * BLOCK_K + 2 * SF_BLOCK * (BLOCK_K // 32) + 16
    count = (SMEM - fixed) // stage
    return count, fixed + count * stage


def entry(sizes: Sizes) -> Entry:
    """The kernel for so many ranks; with ``bytes`` it writes there the size of the workspace instead."""
    ranks = sizes.ranks
    record = "struct Call { " + " ".join(f"unsigned long long {name};" for name in _FIELDS) + " };"
    template = (
        f"{MAX_TOKENS}, {HIDDEN}, {WIDTH}, {EXPERTS}, {TOPK}, {WAVE}, {BLOCK_M}, {BLOCK_N}, {BLOCK_K}, {STORE_M}, "
        f"{SF_BLOCK}, {SF_BLOCK}, {sizes.ring}, {sizes.sf_ring}, {_stages()[0]}, {HIDDEN}, {DISPATCH}, {OTHERS}, "
        f"{EPILOGUE}, {SMS}, {ranks}, {LIMIT}f, true"
    )
    workspace = f"layout::Workspace(nullptr, {ranks}, {EXPERTS}, {MAX_TOKENS}, {TOPK}, {sizes.ring}).get_num_bytes()"
    bases = ", ".join(f"(int64_t)p.base{rank}" for rank in range(ranks))
    maps = ", ".join(f"*(const cute::TmaDescriptor*)p.{name}" for name in _MAPS)
    launch = f"""inline void launch(const Call& p) {{
    if (p.bytes) {{ *(unsigned long long*)p.bytes = {workspace}; return; }}
    auto kernel = &sm100_fp8_fp4_mega_moe_impl<{template}>;
    cudaLaunchAttribute cluster[1];
    cluster[0].id = cudaLaunchAttributeClusterDimension;
    cluster[0].val.clusterDim = {{2, 1, 1}};
    const cudaLaunchConfig_t config = {{dim3({SMS}), dim3({DISPATCH + OTHERS + EPILOGUE}), p.smem, 0, cluster, 1}};
    const layout::SymBuffer<{ranks}> buffer(std::vector<int64_t>{{{bases}}}, p.rank);
    cudaLaunchKernelEx(&config, kernel, (void*)p.y, (int*)p.stats, (uint32_t)p.tokens, buffer, {maps});
}}"""
    headers = ("vector", "cuda_bf16.h", "cuda_fp8.h", "deep_gemm/impls/sm100_fp8_fp4_mega_moe.cuh")
    uses = f"{record}\nusing namespace deep_gemm;\n{launch}"
    return Entry(CHECKOUT, "sm_100a", headers, "Call", _FIELDS, "launch(p)", uses)


def _parts(sizes: Sizes, workspace: int) -> tuple[dict[str, tuple[int, int]], int]:
    """Offset and bytes of each part of a rank's symmetric buffer, and its size."""
    ring, sf_ring = sizes.ring, sizes.sf_ring
    given = {
        "x": MAX_TOKENS * HIDDEN,
        "x_sf": MAX_TOKENS * HIDDEN // 32,
        "ids": MAX_TOKENS * TOPK * 8,
        "weights": MAX_TOKENS * TOPK * 4,
        "l1_acts": ring * HIDDEN,
        "l1_acts_sf": sf_ring * HIDDEN // 32,
        "l1_weights": ring * 4,
        "l2_acts": ring * WIDTH,
        "l2_acts_sf": sf_ring * WIDTH // 32,
        "combine": MAX_TOKENS * TOPK * HIDDEN * 2,
    }
    at, found = workspace, {}
    for name, size in given.items():
        found[name] = at, size
        at += size
    return found, at


def _maps(sizes: Sizes, memory: torch.Tensor, parts: dict, weights: list) -> dict[str, Map]:
    """The nine tensor maps of a rank."""
    (codes1, scales1), (codes2, scales2) = weights
    experts, rows, words = EXPERTS // sizes.ranks, BLOCK_M // 2, BLOCK_K // 128

    def part(name: str) -> torch.Tensor:
        return memory[parts[name][0] : sum(parts[name])]

    def acts(name: str, width: int, box: tuple[int, int], swizzle: int = 128) -> Map:
        return Map(part(name), U8, (width, sizes.ring), (width,), box, swizzle)

    def factors(name: str, width: int) -> Map:
        size = sizes.sf_ring
        return Map(part(name), I32, (size, width // 128), (size * 4,), (SF_BLOCK, words))

    def matrix(codes: torch.Tensor, n: int, k: int) -> Map:
        return Map(codes, FP4, (k, experts * n), (k // 2,), (128, BLOCK_N), 128)

    def matrix_factors(scales: torch.Tensor, n: int, k: int) -> Map:
        return Map(scales, I32, (n, k // 128 * experts), (n * 4,), (SF_BLOCK, words))

    return {
        "l1_acts": acts("l1_acts", HIDDEN, (128, rows)),
        "l1_acts_sf": factors("l1_acts_sf", HIDDEN),
        "l1_weights": matrix(codes1, 2 * WIDTH, HIDDEN),
        "l1_weights_sf": matrix_factors(scales1, 2 * WIDTH, HIDDEN),
        "l1_output": acts("l2_acts", WIDTH, (BLOCK_N // 2, STORE_M), 64),
        "l2_acts": acts("l2_acts", WIDTH, (128, rows)),
        "l2_acts_sf": factors("l2_acts_sf", WIDTH),
        "l2_weights": matrix(codes2, HIDDEN, WIDTH),
        "l2_weights_sf": matrix_factors(scales2, HIDDEN, WIDTH),
    }


class Tokens(NamedTuple):
    """A rank's tokens: codes with scales, experts (-1: left out) and weights."""

    q: fp8_block.FP8Tensor
    ids: torch.Tensor
    factors: torch.Tensor


def _tokens(count: int) -> Tokens:
    """Random ones, 15 % of the routes left out."""
    ids = torch.rand(count, EXPERTS).topk(TOPK).indices
    ids[torch.rand(ids.shape) < 0.15] = -1
    q = fp8_block.quantize_activation(torch.randn(count, HIDDEN) * 2, 32)
    return Tokens(q, ids, torch.rand(count, TOPK) + 0.1)


def _want(given: Tokens, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """fp64, with what the kernel rounds: gate and up to bf16, h to E4M3 by 32; down's products stay exact."""
    x = e4m3.decode(given.q.codes, torch.float64) * ue8m0.decode(given.q.scales, torch.float64).repeat_interleave(
        32, -1
    )
    out = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for token, choice in (given.ids >= 0).nonzero().tolist():
        expert = int(given.ids[token, choice])
        g, u = ((one[expert] @ x[token]).bfloat16().double() for one in (gate, up))
        g, u = g.clamp(max=LIMIT), u.clamp(-LIMIT, LIMIT)
        h = fp8_block.quantize_activation((g * g.sigmoid() * u * given.factors[token, choice])[None], 32)
        out[token] += down[expert] @ fp8_block.dequantize(h, torch.float64)[0]
    return out


def run(sizes: Sizes) -> list[Output]:
    """Two calls one after the other over the same memory, by ranks in lockstep."""
    group, ranks, call = RUNTIME.device().group, sizes.ranks, library(entry(sizes))
    spread = torch.tensor([0.5, 1.0, 2.0, 4.0])[:, None, None]
    joined = mxfp4.quantize(torch.randn(EXPERTS, 2 * WIDTH, HIDDEN) * spread * 2 / HIDDEN**0.5)
    down = mxfp4.quantize(torch.randn(EXPERTS, HIDDEN, WIDTH) * 2 / WIDTH**0.5)
    size = torch.zeros(1, dtype=torch.int64)
    call({**dict.fromkeys(_FIELDS, 0), "bytes": size})
    parts, total = _parts(sizes, int(size))
    if group is None:
        memories = [torch.zeros(total, dtype=torch.uint8)]
    else:
        shared = group.symmetric(total, torch.uint8)
        memories = [shared.tensor(rank) for rank in range(ranks)]
    bases = [one.data_ptr() for one in memories]
    outputs, received, kept, want_counts = [], [], [], []
    for rank, (memory, count) in enumerate(zip(memories, sizes.counts, strict=True)):
        own = slice(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks)
        layers = [(one.packed[own].view(torch.int8), pack_sf(one.scales[own])) for one in (joined, down)]
        weights = transform_weights_for_mega_moe(*layers)
        stats = torch.zeros(EXPERTS // ranks, dtype=torch.int32)
        maps = {name: one.bytes(sm100=True) for name, one in _maps(sizes, memory, parts, weights).items()}
        kept.append((count, stats, weights, maps, memory))
        received.append(stats)
    wants = []
    for _ in range(2):
        given = [_tokens(count) for count in sizes.counts]
        for rank, (count, stats, weights, maps, memory) in enumerate(kept):
            q, ids, factors = given[rank]
            chosen = torch.full((MAX_TOKENS, TOPK), -1, dtype=torch.int64)
            chosen[:count] = ids
            for name, values in (("x", q.codes), ("x_sf", pack_sf(q.scales)), ("ids", chosen), ("weights", factors)):
                raw = values.contiguous().view(torch.uint8).flatten()
                memory[parts[name][0] : parts[name][0] + len(raw)] = raw
            y = torch.full((count, HIDDEN), torch.nan).bfloat16()
            outputs.append(y)
            values = {"bytes": 0, "y": y, "stats": stats, "tokens": count, "smem": _stages()[1], "rank": rank, **maps}
            values |= {"base0": bases[0], "base1": bases[-1]}
            also = [memory, *(tensor for layer in weights for tensor in layer)]
            if group is None:
                call(values, also=also)
            else:
                with group.on(rank):
                    call(values, also=also)
        if group is not None:
            group.synchronize()
        gate, up = mxfp4.dequantize(joined, torch.float64).chunk(2, 1)
        wants += [_want(one, gate, up, mxfp4.dequantize(down, torch.float64)) for one in given]
        want_counts.append(torch.cat([i[i >= 0] for _, i, _ in given]).bincount(minlength=EXPERTS))
    counted = torch.cat(received)
    return [
        Output("y", torch.cat(outputs), torch.cat(wants), 2**-8, ROUNDINGS),
        Output("received", counted, sum(want_counts), 0.0, "whole numbers"),
    ]


# What the kernel is known to show; see data/emulator/findings.md.
ERRORS = frozenset({"race_shared"})
LINTS = frozenset({"missing_proxy_fence_global", "tmem_lane_quarter", "async_read_after_exit"})

CASES = [
    Case(
        f"deep_gemm_mega_moe_{len(counts)}",
        CHECKOUT,
        "sm_100a",
        f"{' and '.join(map(str, counts))} tokens of {len(counts)} rank(s), twice, {EXPERTS} experts, top-{TOPK}, "
        f"hidden {HIDDEN}, width {WIDTH}",
        partial(run, Sizes(counts)),
        (entry(Sizes(counts)),),
        sm_count=SMS,
        ranks=len(counts),
        errors=ERRORS if len(counts) == 1 else ERRORS | {"race_global"},
        lints=LINTS,
        slow=True,
    )
    for counts in ((17,), (5, 11))
]
