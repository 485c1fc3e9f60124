"""DeepGEMM's matrix products: FP8 with scales of 1 x 128 and 128 x 128, bf16, by groups of rows or of K; SM90, SM100.

Tile sizes are candidates of `csrc/jit_kernels/heuristics` of the checkout, with its stages and its shared memory;
which of them a GPU of 132 CTAs would get is not asked. Here each shape has edges in every dimension that may have them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from dsv4lib import backends
from dsv4lib.bench.cpp_peers.build import Entry
from dsv4lib.bench.cpp_peers.cases import Case, Output, library
from dsv4lib.bench.cpp_peers.deep_gemm import CHECKOUT, F32, FP8_SUMS, U8, Map
from dsv4lib.bench.cpp_peers.flash_mla import LATE_STORE

I32, BF16 = 3, 9  # CUtensorMapDataType
SMS, SMEM = 2, 232448
ALIGNMENT = 128  # rows of a group in the contiguous layout
TO_BF16 = "the result rounded to bf16, 2^-9"
UNWRITTEN = "tiles past a group's count keep what was there"
SUMS = "fp32 sums in another order"
_TYPES = {torch.float32: ("float", F32), torch.bfloat16: ("cutlass::bfloat16_t", BF16)}


class Shape(NamedTuple):
    """M, N and K of a product, of each group where there are several."""

    m: int
    n: int
    k: int


@dataclass(frozen=True)
class Kernel:
    """One instance of a kernel.

    Attributes:
        name: without `_impl`. kind: of its `GemmType`. shape: see `Shape`. groups: how many.
        block_m, block_n: of the tile. pair: CTAs of a cluster that share B, by multicast or by one MMA.
        swap: of the SM100 kernels: A and B exchange their places in the MMA.
    """

    name: str
    kind: str
    shape: Shape
    block_m: int
    block_n: int
    groups: int = 1
    pair: int = 1
    swap: bool = False

    @property
    def sm100(self) -> bool:
        """Whether it is for Blackwell."""
        return self.name.startswith("sm100")

    @property
    def bf16(self) -> bool:
        """Whether operands are bf16; else they are E4M3."""
        return "bf16" in self.name

    @property
    def block_k(self) -> int:
        """Elements of 128 bytes."""
        return 64 if self.bf16 else 128

    @property
    def out(self) -> torch.dtype:
        """Of D: SM90's 1D1D adds to fp32."""
        return torch.float32 if self.name == "sm90_fp8_gemm_1d1d" else torch.bfloat16

    @property
    def swizzle(self) -> int:
        """Of D in shared memory, bytes."""
        if self.out == torch.float32:
            return 0
        return next(mode for mode in (128, 64, 32, 16) if self.block_n * 2 % mode == 0)

    @property
    def store_m(self) -> int:
        """Rows of a store."""
        if self.sm100:
            return 16 if self.swap else min(128, self.block_m)
        return 64 if self.out == torch.float32 else self.block_m

    @property
    def loads(self) -> tuple[int, int]:
        """Rows of A and of B that a CTA of SM100 loads; of SM90 it loads a part of what it shares."""
        if not self.sm100 or self.pair == 1:
            return self.block_m, self.block_n
        return (self.block_m // 2, self.block_n) if self.swap else (self.block_m, self.block_n // 2)

    def memory(self) -> tuple[int, int]:
        """Stages, and bytes of shared memory."""
        width = 2 if self.bf16 else 1
        stage = sum(self.loads) * self.block_k * width
        if self.sm100:
            rows = self.store_m * self.block_n * 2 if self.swap else self.store_m * self.swizzle
            fixed, limit = 2 * rows + 32 * 8 * 3 + 2 * 8 * 2 + 8 + 4, 32
            stage += 0 if self.bf16 else 4 * (_aligned(self.block_m, 128) + _aligned(self.block_n, 128))
        else:
            limit = 16
            fixed = _aligned(self.block_m * self.block_n * self.out.itemsize, 1024) + limit * 8 * 2
            if self.name.endswith("1d2d"):
                factors = -(-self.shape.k // 128) * 4 * (1 if 128 % self.block_n == 0 else 2)
                fixed, stage = fixed + _aligned(factors, 8), stage + _aligned(self.block_m * 4, 128)
            elif self.name.endswith("1d1d"):
                stage += _aligned(self.block_m * 4, 128) + _aligned(self.block_n * 4, 128)
                fixed += 4 * 128 if self.kind == "KGroupedContiguous" else 0
        stages = min((SMEM - fixed) // stage, limit)
        return stages, fixed + stages * stage

    def template(self) -> str:
        """Arguments of the template."""
        k_major = "cute::UMMA::Major::K"
        blocks = f"{self.block_m}, {self.block_n}, {self.block_k}"
        sizes = f"0, {self.shape.n}, {0 if self.kind == 'KGroupedContiguous' else self.shape.k}"
        kind, stages, type_d = f"GemmType::{self.kind}", self.memory()[0], _TYPES[self.out][0]
        threads = "128, 128" if self.sm100 or self.block_m <= 64 else "128, 256"
        shared = f"{self.pair}, {'true' if self.swap and self.pair > 1 else 'false'}, {SMS}"
        swap = "true" if self.swap else "false"
        identity = "epilogue::transform::EpilogueIdentity"
        tail = {
            "sm90_fp8_gemm_1d2d": f"128, 128, {self.swizzle}, {stages}, {threads}, {shared}, {kind}, {type_d}",
            "sm90_fp8_gemm_1d1d": f"128, 128, {stages}, {threads}, {shared}, {kind}, {type_d}",
            "sm90_bf16_gemm": f"128, 128, {self.swizzle}, {stages}, {threads}, {shared}, {kind}, false, {type_d}",
            "sm100_fp8_fp4_gemm_1d1d": f"128, 128, {self.swizzle}, {stages}, {threads}, {shared}, {swap}, true, {kind},"
            f" false, cutlass::float_e4m3_t, cutlass::float_e4m3_t, {type_d}, {identity}",
            "sm100_bf16_gemm": f"128, 128, {self.swizzle}, {stages}, {threads}, {shared}, {ALIGNMENT}, {swap}, true,"
            f" {kind}, false, {type_d}, 100",
        }[self.name]
        return {
            "sm90_fp8_gemm_1d2d": f"{k_major}, {sizes}, {self.groups}, {blocks}, {tail}, {identity}",
            "sm90_fp8_gemm_1d1d": f"{sizes}, {self.groups}, {blocks}, {tail}",
            "sm90_bf16_gemm": f"{k_major}, {k_major}, {sizes}, {self.groups}, {blocks}, {tail}",
            "sm100_fp8_fp4_gemm_1d1d": f"{k_major}, {k_major}, 128, 128, 128, {sizes}, {blocks}, {self.groups}, {tail}",
            "sm100_bf16_gemm": f"{k_major}, {k_major}, {sizes}, {blocks}, {self.groups}, {tail}",
        }[self.name]

    def parameters(self) -> tuple[list[str], list[str]]:
        """Pointers before the sizes, as C++, and names of the tensor maps after them."""
        before, maps = ["(int*)p.layout"], ["map_a", "map_b"]
        if self.name == "sm90_fp8_gemm_1d2d":
            return ["(float*)p.factors", *before], [*maps, "map_d", "map_sfa"]
        if self.name == "sm90_fp8_gemm_1d1d":
            codes = ["(__nv_fp8_e4m3*)p.a", "(__nv_fp8_e4m3*)p.b"]
            return [*codes, *before, "(cute::TmaDescriptor*)p.buffer"], [*maps, "map_sfa", "map_sfb", "map_d"]
        return before, [*maps, "map_d"] if self.bf16 else [*maps, "map_sfa", "map_sfb", "map_d"]

    def entry(self) -> Entry:
        """What to compile."""
        before, maps = self.parameters()
        names = [one.split("p.")[1] for one in before]
        fields = (*names, "m", "n", "k", *maps, "smem")
        threads = 256 if self.sm100 or self.block_m <= 64 else 384
        arguments = ", ".join(
            [
                *before,
                *(f"(uint32_t)p.{size}" for size in "mnk"),
                *(f"*(const cute::TmaDescriptor*)p.{m}" for m in maps),
            ]
        )
        record = "struct Call { " + " ".join(f"unsigned long long {field};" for field in fields) + " };"
        launch = f"""inline void launch(const Call& p) {{
    auto kernel = &{self.name}_impl<{self.template()}>;
    cudaLaunchAttribute cluster[1];
    cluster[0].id = cudaLaunchAttributeClusterDimension;
    cluster[0].val.clusterDim = {{{self.pair}, 1, 1}};
    const cudaLaunchConfig_t config = {{dim3({SMS}), dim3({threads}), p.smem, 0, cluster, 1}};
    if (cudaLaunchKernelEx(&config, kernel, {arguments}) != cudaSuccess) throw std::runtime_error("not launched");
}}"""
        headers = ("cuda_bf16.h", "cuda_fp8.h", f"deep_gemm/impls/{self.name}.cuh")
        uses = f"{record}\nusing namespace deep_gemm;\n{launch}"
        return Entry(CHECKOUT, "sm_100a" if self.sm100 else "sm_90a", headers, "Call", fields, "launch(p)", uses)


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to


def _codes(rows: int, k: int, bf16: bool) -> torch.Tensor:
    """Random operands, rows of sizes that differ."""
    values = torch.randn(rows, k) * torch.exp2(torch.randint(-3, 4, (rows, 1)).float())
    return values.bfloat16() if bf16 else (values * 4).to(torch.float8_e4m3fn)


class Factors(NamedTuple):
    """Scales of an operand: as the kernel takes them, and one for each element of K of each row, fp64."""

    given: torch.Tensor
    of: torch.Tensor


def _row_factors(groups: int, rows: int, k: int, packed: bool) -> Factors:
    """One a row and 128 of K, of each group K outermost; ``packed``: exponents, four of K a word."""
    blocks, wide = -(-k // 128), _aligned(rows, 4)
    if packed:
        exponents = torch.randint(120, 133, (groups, wide, _aligned(blocks, 4)), dtype=torch.uint8)
        given = exponents.view(torch.int32).mT.contiguous()
        factors = torch.exp2(exponents[:, :rows, :blocks].double() - 127)
    else:
        given = torch.rand(groups, blocks, wide) + 0.05
        factors = given.mT[:, :rows].double()
    return Factors(given.flatten(0, 1), factors.flatten(0, 1).repeat_interleave(128, 1)[:, :k])


def _block_factors(groups: int, n: int, k: int) -> Factors:
    """One for 128 rows and 128 of K, [G, N / 128, K / 128] fp32; ``of`` is [G * N, K]."""
    given = torch.rand(groups, -(-n // 128), -(-k // 128)) + 0.05
    every = given.double().repeat_interleave(128, 1)[:, :n].repeat_interleave(128, 2)[:, :, :k]
    return Factors(given, every.flatten(0, 1))


class Given(NamedTuple):
    """Operands of a product.

    Attributes:
        a, b: [rows, K], rows of all groups one after the other. fa, fb: their scales, None in bf16.
        layout: of groups, None without. group: of each row of A, -1 a row of none.
    """

    a: torch.Tensor
    b: torch.Tensor
    fa: Factors | None
    fb: Factors | None
    layout: torch.Tensor | None
    group: torch.Tensor


def operands(kernel: Kernel, counts: tuple[int, ...]) -> Given:
    """Make operands; ``counts`` is the number of rows of each group."""
    m, n, k = kernel.shape
    rows, layout, group = m, None, torch.zeros(m, dtype=torch.int32)
    if kernel.kind == "MGroupedContiguous":
        tiles = [(g, count) for g, count in enumerate(counts) if count]
        parts = [torch.full((_aligned(count, ALIGNMENT),), -1, dtype=torch.int32) for _, count in tiles]
        for part, (g, count) in zip(parts, tiles, strict=True):
            part[:count] = g
        group = layout = torch.cat(parts)
        rows = len(group)
    elif kernel.kind == "MGroupedMasked":
        rows, layout = m * kernel.groups, torch.tensor(counts, dtype=torch.int32)
        inside = torch.arange(m) < layout[:, None]
        group = torch.where(inside, torch.arange(kernel.groups, dtype=torch.int32)[:, None], -1).flatten()
    a, b = _codes(rows, k, kernel.bf16), _codes(n * kernel.groups, k, kernel.bf16)
    if kernel.bf16:
        return Given(a, b, None, None, layout, group)
    masked = kernel.kind == "MGroupedMasked"
    fa = _row_factors(kernel.groups if masked else 1, m if masked else rows, k, kernel.sm100)
    by_rows = kernel.sm100 or kernel.name.endswith("1d1d")
    fb = _row_factors(kernel.groups, n, k, kernel.sm100) if by_rows else _block_factors(kernel.groups, n, k)
    return Given(a, b, fa, fb, layout, group)


def _want(given: Given, groups: int) -> torch.Tensor:
    """fp64, rows that belong to no group are 0."""
    a, b = given.a.double(), given.b.double()
    a, b = (a * given.fa.of, b * given.fb.of) if given.fa and given.fb else (a, b)
    out = torch.zeros(len(a), len(b) // groups, dtype=torch.float64)
    for g, one in enumerate(b.chunk(groups)):
        rows = given.group == g
        out[rows] = a[rows] @ one.T
    return out


def _maps(kernel: Kernel, given: Given, d: torch.Tensor) -> dict[str, Map]:
    """Tensor maps, as `runtime_utils.hpp` makes them."""
    n, k, width = kernel.shape.n, kernel.shape.k, 2 if kernel.bf16 else 1
    load_m, load_n = kernel.loads
    kind, inner = BF16 if kernel.bf16 else U8, kernel.block_k
    kind_d = _TYPES[kernel.out][1]
    tile = kernel.swizzle // kernel.out.itemsize if kernel.swizzle else kernel.block_n
    swizzle = 0 if kernel.swizzle == 16 else kernel.swizzle
    maps = {
        "map_a": Map(given.a, kind, (k, len(given.a)), (k * width,), (inner, load_m), 128),
        "map_b": Map(given.b, kind, (k, len(given.b)), (k * width,), (inner, load_n), 128),
        "map_d": Map(d, kind_d, (n, len(d)), (d.stride(0) * d.element_size(),), (tile, kernel.store_m), swizzle),
    }
    for name, factors, block in (("map_sfa", given.fa, kernel.block_m), ("map_sfb", given.fb, kernel.block_n)):
        if factors is not None and name in kernel.parameters()[1]:
            words = factors.given
            kind = I32 if kernel.sm100 else F32
            maps[name] = Map(words, kind, tuple(reversed(words.shape)), (words.stride(0) * 4,), (block, 1))
    return maps


def _past(kernel: Kernel, counts: tuple[int, ...]) -> torch.Tensor:
    """Mark rows of D in whole tiles past the count of their group; no tile of a group is one of the next."""
    if kernel.kind != "MGroupedMasked":
        return torch.zeros(0, dtype=torch.bool)
    ends = torch.tensor([_aligned(count, kernel.block_m) for count in counts])
    return (torch.arange(kernel.shape.m) >= ends[:, None]).flatten()


def product(kernel: Kernel, counts: tuple[int, ...] = ()) -> list[Output]:
    """D = A @ B^T with scales; of 1D1D on SM90, D += A @ B^T."""
    given = operands(kernel, counts)
    adds = kernel.out == torch.float32
    start = torch.randn(len(given.a), kernel.shape.n) if adds else torch.full((len(given.a), kernel.shape.n), torch.nan)
    d = start.clone().to(kernel.out)
    maps = _maps(kernel, given, d)
    values = {
        "layout": given.layout,
        "factors": None if given.fb is None else given.fb.given,
        "a": None,
        "b": None,
        "buffer": None,
        **dict(
            zip("mnk", (kernel.shape.m if kernel.kind == "MGroupedMasked" else len(d), *kernel.shape[1:]), strict=True)
        ),
        **{name: one.bytes(sm100=kernel.sm100) for name, one in maps.items()},
        "smem": kernel.memory()[1],
    }
    entry = kernel.entry()
    library(entry)(
        {name: values[name] for name in entry.fields},
        also=[d, given.a, given.b, *(one.tensor for one in maps.values())],
    )
    rows = given.group >= 0
    want = _want(given, kernel.groups)[rows] + (start[rows].double() if adds else 0)
    bound, reason = (2**-11, FP8_SUMS) if adds else (2**-9, TO_BF16)
    out = [Output("d", d[rows], want, bound, reason)]
    past = _past(kernel, counts)
    if past.any():
        out.append(
            Output("past", d[past].isnan().double(), torch.ones_like(d[past], dtype=torch.float64), 0, UNWRITTEN)
        )
    return out


def product_by_k(kernel: Kernel, ks: tuple[int, ...]) -> list[Output]:
    """D[g] += A_g @ B_g^T, groups of K; codes of a group are [M, K_g], its tensor map is made by the kernel."""
    m, n, _ = kernel.shape
    codes = [(_codes(m, k, False), _codes(n, k, False)) for k in ks]
    a, b = (torch.cat([pair[side].flatten() for pair in codes]) for side in (0, 1))
    factors = [(_row_factors(1, m, k, False), _row_factors(1, n, k, False)) for k in ks]
    start = torch.randn(len(ks) * m, n)
    d = start.clone()
    fa, fb = (torch.cat([pair[side].given for pair in factors]) for side in (0, 1))
    first = next(k for k in ks if k)
    maps = {
        "map_a": Map(a, U8, (first, m), (first,), (128, kernel.block_m), 128),
        "map_b": Map(b, U8, (first, n), (first,), (128, kernel.block_n), 128),
        "map_d": Map(d, F32, (n, len(d)), (n * 4,), (kernel.block_n, kernel.store_m)),
        "map_sfa": Map(fa, F32, tuple(reversed(fa.shape)), (fa.stride(0) * 4,), (kernel.block_m, 1)),
        "map_sfb": Map(fb, F32, tuple(reversed(fb.shape)), (fb.stride(0) * 4,), (kernel.block_n, 1)),
    }
    values = {
        "layout": torch.tensor(ks, dtype=torch.int32),
        "a": a,
        "b": b,
        "buffer": torch.zeros(SMS * 2 * 128, dtype=torch.uint8),
        **dict(zip("mnk", (m, n, sum(ks)), strict=True)),
        **{name: one.bytes(sm100=False) for name, one in maps.items()},
        "smem": kernel.memory()[1],
    }
    entry = kernel.entry()
    library(entry)({name: values[name] for name in entry.fields}, also=[d, fa, fb])
    want = start.double()
    for g, (pair, scales) in enumerate(zip(codes, factors, strict=True)):
        left, right = (one.double() * scale.of for one, scale in zip(pair, scales, strict=True))
        want[g * m : (g + 1) * m] += left @ right.T
    return [Output("d", d, want, 2**-11, FP8_SUMS)]


def ours(kernel: Kernel) -> list[Output]:
    """Our `linear` on the same operands."""
    from dsv4lib.ops.linear.op import linear

    given = operands(kernel, ())
    with backends.emulating("sm_100a" if kernel.sm100 else "sm_90a"):
        if kernel.bf16:
            out = linear((given.a, None), (given.b, None), mode="bf16", backend="emulator")
        else:
            pairs = (given.a, given.fa.given.T[: len(given.a)].contiguous()), (given.b, given.fb.given[0])
            out = linear(*pairs, mode="fp8_block", backend="emulator")
    return [Output("d", out.codes, _want(given, 1), 2**-9, TO_BF16)]


_1D2D, _1D1D, _SM100 = "sm90_fp8_gemm_1d2d", "sm90_fp8_gemm_1d1d", "sm100_fp8_fp4_gemm_1d1d"
_PLAIN = Shape(150, 200, 384)
_KS = (256, 0, 128)
_WHAT = {
    "deep_gemm_fp8": (Kernel(_1D2D, "Normal", _PLAIN, 128, 96, pair=2), ()),
    "deep_gemm_fp8_contiguous": (Kernel(_1D2D, "MGroupedContiguous", Shape(0, 136, 256), 128, 112, 3), (100, 0, 130)),
    "deep_gemm_fp8_masked": (Kernel(_1D2D, "MGroupedMasked", Shape(128, 136, 256), 64, 80, 3), (70, 0, 3)),
    "deep_gemm_fp8_add": (Kernel(_1D1D, "Normal", _PLAIN, 128, 56, pair=2), ()),
    "deep_gemm_fp8_k_groups": (Kernel(_1D1D, "KGroupedContiguous", Shape(150, 200, 0), 64, 56, 3), _KS),
    "deep_gemm_bf16": (Kernel("sm90_bf16_gemm", "Normal", _PLAIN, 128, 96, pair=2), ()),
    "deep_gemm_fp8_sm100": (Kernel(_SM100, "Normal", _PLAIN, 128, 96, pair=2), ()),
    "deep_gemm_fp8_masked_sm100": (
        Kernel(_SM100, "MGroupedMasked", Shape(96, 200, 384), 32, 128, 3, pair=2, swap=True),
        (70, 0, 3),
    ),
    "deep_gemm_bf16_sm100": (Kernel("sm100_bf16_gemm", "Normal", _PLAIN, 48, 128, swap=True), ()),
}
_KINDS = {
    "Normal": "M = {m}, N = {n}, K = {k}",
    "MGroupedContiguous": "groups of {counts} rows, each from a multiple of 128, N = {n}, K = {k}",
    "MGroupedMasked": "groups of {counts} rows of {m}, N = {n}, K = {k}",
    "KGroupedContiguous": "M = {m}, N = {n}, groups of {counts} of K",
}
# What the kernels are known to show; see data/emulator/findings.md.
_PAIRS = frozenset({"race_shared", "race_tensor", "uninitialised_smem"})
_ERRORS = {
    "deep_gemm_fp8": frozenset({"barrier_phase_mixed"}),
    "deep_gemm_fp8_contiguous": frozenset({"uninitialised_smem"}),
    "deep_gemm_fp8_masked": frozenset({"uninitialised_smem"}),
    "deep_gemm_fp8_add": frozenset({"barrier_phase_mixed"}),
    "deep_gemm_fp8_k_groups": frozenset({"descriptor_modified"}),
    "deep_gemm_bf16": frozenset({"barrier_phase_mixed"}),
    "deep_gemm_fp8_sm100": _PAIRS,
    "deep_gemm_fp8_masked_sm100": _PAIRS,
}
_LINTS = {  # beside LATE_STORE, which all have
    "deep_gemm_fp8": frozenset({"uninitialised_smem_unused"}),
    "deep_gemm_fp8_sm100": frozenset({"tmem_lane_quarter"}),
    "deep_gemm_fp8_masked_sm100": frozenset({"tmem_lane_quarter"}),
    "deep_gemm_bf16_sm100": frozenset({"tmem_lane_quarter"}),
}
_OURS = ("deep_gemm_fp8", "deep_gemm_bf16")


def _case(name: str) -> Case:
    kernel, counts = _WHAT[name]
    m, n, k = kernel.shape
    operands_text = _KINDS[kernel.kind].format(m=m, n=n, k=k, counts=", ".join(str(count) for count in counts))
    entry = kernel.entry()
    call = product_by_k if kernel.kind == "KGroupedContiguous" else product
    return Case(
        name,
        CHECKOUT,
        entry.arch,
        f"{operands_text}, tiles of {kernel.block_m} x {kernel.block_n}" + (" on pairs of CTAs" * (kernel.pair - 1)),
        partial(call, kernel, counts),
        (entry,),
        sm_count=SMS,
        errors=_ERRORS.get(name, frozenset()),
        lints=LATE_STORE | _LINTS.get(name, frozenset()),
        ours=partial(ours, kernel) if name in _OURS else None,
    )


CASES = [_case(name) for name in _WHAT]
