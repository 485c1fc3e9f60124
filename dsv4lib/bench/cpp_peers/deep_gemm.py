"""DeepGEMM's kernels: the indexer's logits over pages of FP8 keys (SM90), with the schedule that its own kernel makes.

DeepGEMM's host code is bound to a CUDA build of torch, so the host side is ours here: tile sizes, tensor maps and the
launch, as `csrc/jit_kernels` of the checkout chooses them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from dsv4lib.bench.cpp_peers.build import Checkout, Entry
from dsv4lib.bench.cpp_peers.cases import Case, Output, library
from dsv4lib.emulator.units import tensormap

CHECKOUT = Checkout("DeepGEMM", "DSV4_DEEPGEMM", ("deep_gemm/include",))
HEADS, DIM, PAGE, SPLIT, STAGES, SMS = 64, 128, 64, 256, 3, 3
THREADS, WARPGROUP = 128, 128
U8, F32 = 0, 7  # CUtensorMapDataType
L2_256B = 3
ENTRY_BYTES = DIM + 4  # E4M3 codes and an fp32 scale; a page has all codes, then all scales
FP8_SUMS = "Hopper's tensor cores add FP8 products with fewer bits than fp32: about 2^-13 of the largest"


@dataclass(frozen=True)
class Map:
    """A tensor map by description: sizes and strides as the driver takes them, dimension 0 first.

    Attributes:
        kind: element type. sizes, strides, box: of the tensor in elements, of dimensions 1 and up in bytes, of a copy.
        swizzle: bytes, 0 none.
    """

    tensor: torch.Tensor
    kind: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0

    def bytes(self, sm100: bool) -> torch.Tensor:
        """Encode it, 128 bytes."""
        mode = {0: 0, 32: 1, 64: 2, 128: 3}[self.swizzle]
        steps = (1,) * len(self.sizes)
        raw = tensormap.encode_tiled(
            self.kind,
            self.tensor.data_ptr(),
            self.sizes,
            self.strides,
            self.box,
            steps,
            0,
            mode,
            L2_256B,
            0,
            sm100=sm100,
        )
        return torch.frombuffer(bytearray(bytes(raw)), dtype=torch.uint8).clone()


_SCHEDULE = "batch_size next_n context_lens schedule smem"
_LOGITS = (
    "batch_size logits_stride block_table_stride context_lens logits block_table schedule map_q map_kv map_scales "
    "map_weights smem"
)


def _record(fields: str) -> str:
    """A struct of 64-bit words; addresses are cast where they are used."""
    return "struct Call { " + " ".join(f"unsigned long long {name};" for name in fields.split()) + " };"


def _entry(include: str, fields: str, call: str) -> Entry:
    uses = _record(fields) + "\nusing namespace deep_gemm;"
    headers = ("cuda_bf16.h", "cuda_fp8.h", include)  # the package counts on them being there
    return Entry(CHECKOUT, "sm_90a", headers, "Call", tuple(fields.split()), call, uses)


SCHEDULE = _entry(
    "deep_gemm/scheduler/sm90_paged_mqa_logits.cuh",
    _SCHEDULE,
    f"sched::sm90_paged_mqa_logits_metadata<32, {SPLIT}, {SMS}, false><<<1, 32, p.smem>>>(p.batch_size, p.next_n,"
    " false, (const uint32_t*)p.context_lens, nullptr, (uint32_t*)p.schedule)",
)


def logits_entry(next_n: int) -> Entry:
    """The logits kernel for ``next_n`` tokens a request."""
    threads = THREADS + SPLIT // 64 * WARPGROUP
    arguments = (
        f"{next_n}, {HEADS}, {DIM}, {PAGE}, false, false, {STAGES}, {STAGES}, {SPLIT}, {THREADS}, "
        f"{SPLIT // 64 * WARPGROUP}, float"
    )
    maps = ", ".join(f"*(const cute::TmaDescriptor*)p.{name}" for name in _LOGITS.split() if name.startswith("map"))
    call = (
        f"auto kernel = &sm90_fp8_paged_mqa_logits<{arguments}>; kernel<<<{SMS}, {threads}, p.smem>>>(p.batch_size, "
        "p.logits_stride, p.block_table_stride, (const uint32_t*)p.context_lens, (float*)p.logits, "
        f"(const uint32_t*)p.block_table, nullptr, (const uint32_t*)p.schedule, {maps})"
    )
    return _entry("deep_gemm/impls/sm90_fp8_paged_mqa_logits.cuh", _LOGITS, call)


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to


def _smem(next_n: int) -> int:
    """Dynamic shared memory of the logits kernel: rings of queries, of keys by warpgroup, barriers."""
    align, groups = DIM * 8, SPLIT // 64
    barriers = _aligned(STAGES * 8 * 2, align)
    queries = STAGES * (next_n * HEADS * DIM + _aligned(next_n * HEADS * 4, align)) + barriers
    keys = STAGES * (PAGE * DIM + _aligned(PAGE * 4, align)) + barriers
    return queries + groups * keys + groups * 2 * 8 + 4


def paged_logits(next_n: int, lengths: tuple[int, ...]) -> list[Output]:
    """Scores of every key of each request: sum over heads of weight * relu(q . k), scaled by the key's factor."""
    batch, columns = len(lengths), _aligned(max(lengths), SPLIT)
    pages_each = columns // PAGE
    pages = torch.zeros(batch * pages_each + 2, PAGE * ENTRY_BYTES, dtype=torch.uint8)
    order = torch.randperm(len(pages))[: batch * pages_each].reshape(batch, pages_each).int()
    codes = (torch.randn(len(pages), PAGE, DIM) * 64).to(torch.float8_e4m3fn)
    scales = torch.rand(len(pages), PAGE) * 0.02 + 0.001
    pages[:, : PAGE * DIM] = codes.view(torch.uint8).flatten(1)
    pages[:, PAGE * DIM :] = scales.view(torch.uint8)
    q = torch.randn(batch, next_n, HEADS, DIM).to(torch.float8_e4m3fn)
    weights = torch.randn(batch * next_n, HEADS)
    context = torch.tensor(lengths, dtype=torch.int32)
    schedule = torch.full((SMS + 1, 2), -1, dtype=torch.int32)
    library(SCHEDULE)(
        {"batch_size": batch, "next_n": next_n, "context_lens": context, "schedule": schedule, "smem": 128}
    )
    logits = torch.full((batch * next_n, columns), torch.nan)
    stride = pages.stride(0)
    factors = pages.view(torch.float32)[:, PAGE * DIM // 4 :]
    maps = {
        "map_q": Map(q, U8, (DIM, batch * next_n * HEADS), (DIM,), (DIM, next_n * HEADS), DIM),
        "map_kv": Map(pages, U8, (DIM, PAGE, len(pages)), (DIM, stride), (DIM, PAGE, 1), DIM),
        "map_scales": Map(factors, F32, (PAGE, len(pages)), (stride,), (PAGE, 1)),
        "map_weights": Map(weights, F32, (HEADS, batch * next_n), (HEADS * 4,), (HEADS, next_n)),
    }
    library(logits_entry(next_n))(
        {
            "batch_size": batch,
            "logits_stride": columns,
            "block_table_stride": order.stride(0),
            "context_lens": context,
            "logits": logits,
            "block_table": order,
            "schedule": schedule,
            **{name: one.bytes(sm100=False) for name, one in maps.items()},
            "smem": _smem(next_n),
        },
        also=[q, pages, weights],
    )
    got, want = [], []
    for b, length in enumerate(lengths):
        keys = codes[order[b].long()].double().flatten(0, 1)
        dots = torch.einsum("thd,kd->thk", q[b].double(), keys).relu()
        rows = slice(b * next_n, (b + 1) * next_n)
        scores = torch.einsum("th,thk->tk", weights[rows].double(), dots)
        scores = scores * scales[order[b].long()].double().flatten()
        for token in range(next_n):  # a token sees the keys up to its own
            seen = max(length - next_n + 1 + token, 0)
            got.append(logits[b * next_n + token, :seen])
            want.append(scores[token, :seen])
    return [Output("logits", torch.cat(got), torch.cat(want), 2**-12, FP8_SUMS)]


CASES = [
    Case(
        f"deep_gemm_paged_logits_{next_n}",
        CHECKOUT,
        "sm_90a",
        f"{next_n} token(s) of 3 requests with 300, 520 and 64 keys, 64 heads, pages of 64 FP8 keys",
        partial(paged_logits, next_n, (300, 520, 64)),
        (SCHEDULE, logits_entry(next_n)),
        sm_count=SMS,
    )
    for next_n in (1, 2)
]
