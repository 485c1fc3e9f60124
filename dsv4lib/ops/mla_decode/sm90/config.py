"""Configure Hopper's MLA decode. Sizes, options, buffers and budgets; the picture is in `kernel`."""

from __future__ import annotations

import cutlass

from dsv4lib.dsl.budget import SMEM_ALIGN, SMEM_LIMIT, BudgetRow, whole_atoms
from dsv4lib.errors import ConfigError

V_DIM, ROPE_DIM = 512, 64
HEAD_DIM = V_DIM + ROPE_DIM  # of Q K^T
TILE_M, TILE_N = 64, 64  # heads and tokens of a tile
CHUNK = 64  # dimensions in one row of the 128-byte swizzle
ROW_BYTES = 2 * CHUNK
CHUNK_BYTES = TILE_N * ROW_BYTES
CHUNKS = HEAD_DIM // CHUNK
ROPE_CHUNK = V_DIM // CHUNK
STAGES = 2  # as many as math warpgroups: tile t has stage t % 2 and its S is of warpgroup t % 2
STAGE_BYTES = CHUNKS * CHUNK_BYTES
Q_BYTES = CHUNKS * TILE_M * ROW_BYTES
WARPGROUP = 128
MATH_WARPS = 8
THREADS = 3 * WARPGROUP
REGISTERS = 504  # of three warpgroups at the start, 168 each: setmaxnreg gives out no more than the launch took
DIMS = V_DIM // 2  # of O that a math warpgroup has
HALF_CHUNKS = DIMS // CHUNK
KINDS, OUTPUTS = ("same", "fp8"), ("same", "bf16", "fp16")
PAGES = (16, 32, 64, 128)
ELEMENTS = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}
BARRIERS = STAGES * (CHUNKS + 2 + 1) + 1  # full of chunks, empty of halves, P of a stage; Q
MATH_READY, GROUP_READY = 1, 2  # named barriers, the latter one of each warpgroup (0 is __syncthreads)


class Config:
    """Options of the kernel and what follows from them.

    Args:
        dtype: of MMAs, "bf16" or "fp16": that of Q and cache, unless they are FP8.
        page: tokens of a page, one of `PAGES`.
        partial: split the tokens over the grid and write fp32 O and LSE of each split.

        cache, queries: "same" or "fp8". FP8 queries have an FP8 cache.
        out: of O, "same" as the MMAs, "bf16" or "fp16"; partial: fp32.

    Raises:
        ConfigError: a value that is not one of these.
    """

    def __init__(
        self,
        dtype: str = "bf16",
        page: int = 64,
        partial: bool = False,
        cache: str = "same",
        queries: str = "same",
        out: str = "same",
    ):
        if dtype not in ELEMENTS:
            raise ConfigError("dtype", dtype, "one of " + ", ".join(ELEMENTS))
        if page not in PAGES:
            raise ConfigError("page", page, "one of " + ", ".join(map(str, PAGES)))
        self.dtype, self.element, self.page, self.partial = dtype, ELEMENTS[dtype], page, partial
        self._check_fp8(cache, queries, out)
        self.fp8_cache, self.fp8_queries = cache == "fp8", queries == "fp8"
        self.out_element = cutlass.Float32 if partial else ELEMENTS[dtype if out == "same" else out]
        self.out = "bf16" if self.out_element is cutlass.BFloat16 else "fp16"
        self.math_registers, self.producer_registers = (200, 104) if self.fp8_cache else (232, 40)
        self.producers = WARPGROUP if self.fp8_cache else 1  # arrivals at a full barrier
        self.q_producers = WARPGROUP if self.fp8_queries else 1
        self.box = min(page, TILE_N)  # tokens of a TMA box
        self.boxes = TILE_N // self.box  # of a chunk

    def _check_fp8(self, cache: str, queries: str, out: str) -> None:
        for name, value, allowed in (("cache", cache, KINDS), ("queries", queries, KINDS), ("out", out, OUTPUTS)):
            if value not in allowed:
                raise ConfigError(name, value, "one of " + ", ".join(allowed))
        if queries == "fp8" and cache != "fp8":
            raise ConfigError("queries", queries, "same, or fp8 with a cache of fp8")

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        options = [self.dtype, self.page, self.out_element.__name__]
        options += ["fp8 cache"] * self.fp8_cache + ["fp8 queries"] * self.fp8_queries
        return f"{type(self).__name__}({', '.join(map(str, options))})"

    def budget(self) -> list[BudgetRow]:
        """Compute shared memory, registers and threads of one CTA."""
        sizes = {
            "Q": (Q_BYTES, f"{TILE_M} heads x {HEAD_DIM} x 2 B"),
            "cache": (STAGES * STAGE_BYTES, f"{STAGES} stages x {TILE_N} tokens x {HEAD_DIM} x 2 B"),
            "control": (8 * BARRIERS + 8 * TILE_M, f"{BARRIERS} mbarriers, 2 x {TILE_M} fp32"),
        }
        sizes["total"] = whole_atoms(sum(size for size, _ in sizes.values())), f"up to a multiple of {SMEM_ALIGN} B"
        registers = 2 * self.math_registers + self.producer_registers
        return [
            *(BudgetRow(f"SMEM: {name}", used, SMEM_LIMIT, "B", why) for name, (used, why) in sizes.items()),
            BudgetRow("registers", registers, REGISTERS, "a lane of a quarter", "2 math warpgroups, 1 producer"),
            BudgetRow("threads", THREADS, 1024, "threads", "2 math warpgroups, 1 producer"),
        ]
