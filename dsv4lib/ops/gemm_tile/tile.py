"""Share what GEMMs of one tile a CTA have in common. Types, the A/B ring, the arguments of a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass
import cutlass.cute as cute

from dsv4lib.dsl.budget import SMEM_ALIGN, SMEM_LIMIT, BudgetRow, whole_atoms
from dsv4lib.errors import ArgumentError, ConfigError

TILE_M = 128  # rows of a CTA's tile
TILE_K_BYTES = 128  # one row of the 128-byte swizzle atom
GRID_Y = 65_535  # blocks along the second axis of a grid
DTYPES = {
    "fp16": cutlass.Float16,
    "bf16": cutlass.BFloat16,
    "fp32": cutlass.Float32,
    "e4m3": cutlass.Float8E4M3FN,
}


class TileGemm:
    """Configuration and host side of C = A @ B^T with one 128 x tile_n tile a CTA.

    A subclass sets ``outputs`` (input type -> types of C), ``columns`` (step and limit of tile_n) and ``columns_why``,
    and says by `_extra_bytes` what lies in shared memory after the ring.
    """

    outputs: Mapping[str, tuple[str, ...]]
    columns: tuple[int, int]  # tile_n is a multiple of the first, up to the second
    columns_why: str

    def __init__(self, in_dtype: str, out_dtype: str, tile_n: int, stages: int):
        # ---- types ----
        if in_dtype not in self.outputs:
            raise ConfigError("in_dtype", in_dtype, " or ".join(self.outputs))
        if out_dtype not in self.outputs[in_dtype]:
            raise ConfigError("out_dtype", out_dtype, f"{' or '.join(self.outputs[in_dtype])} for {in_dtype} inputs")
        self.in_dtype, self.out_dtype = in_dtype, out_dtype
        self.ab_type, self.c_type, self.acc_type = DTYPES[in_dtype], DTYPES[out_dtype], cutlass.Float32

        # ---- tile ----
        step, most = self.columns
        if type(tile_n) is not int or not step <= tile_n <= most or tile_n % step:
            raise ConfigError("tile_n", tile_n, f"a multiple of {step} in {step}..{most} ({self.columns_why})")
        self.tile_n, self.tile_k = tile_n, TILE_K_BYTES * 8 // self.ab_type.width
        self.tile_mnk = (TILE_M, tile_n, self.tile_k)

        # ---- shared memory ----
        self.a_stage_bytes = TILE_M * TILE_K_BYTES
        self.b_stage_bytes = tile_n * TILE_K_BYTES
        fit = max((s for s in range(1, 16) if self._smem_bytes(s) <= SMEM_LIMIT), default=0)
        if type(stages) is not int or not 1 <= stages <= fit:
            beside = f"what fits {SMEM_LIMIT} B of SMEM at tile_n {tile_n}, C as {out_dtype}"
            raise ConfigError("stages", stages, f"1..{fit} ({beside})")
        self.stages = stages
        self.smem_bytes = self._smem_bytes(stages)

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        return f"GemmTile({self.in_dtype}, {self.out_dtype}, {self.tile_n}, {self.stages})"

    def _extra_bytes(self, stages: int) -> int:
        """Count the bytes of shared memory after the operand ring."""
        raise NotImplementedError

    def _smem_bytes(self, stages: int) -> int:
        """Return the bytes of the whole SMEM block, in whole units of its alignment."""
        return whole_atoms(stages * (self.a_stage_bytes + self.b_stage_bytes) + self._extra_bytes(stages))

    def _budget(self, smem: list[BudgetRow], rest: list[BudgetRow]) -> list[BudgetRow]:
        """Return the budget table: the operand ring, ``smem``, the sum, then ``rest``."""
        s, width = self.stages, f"rows x {TILE_K_BYTES} B"
        a, b = s * self.a_stage_bytes, s * self.b_stage_bytes
        return [
            BudgetRow("SMEM: A ring", a, SMEM_LIMIT, "B", f"{s} stages x {TILE_M} {width}"),
            BudgetRow("SMEM: B ring", b, SMEM_LIMIT, "B", f"{s} stages x {self.tile_n} {width}"),
            *smem,
            BudgetRow("SMEM: total", self.smem_bytes, SMEM_LIMIT, "B", f"sum, up to a multiple of {SMEM_ALIGN} B"),
            *rest,
        ]

    def fake_args(self) -> tuple:
        """Make arguments for `compile_for`, no memory.

        A, B, C have free M, N, K and row strides of whole 16-byte units.
        """
        m, n, k = (cute.sym_int32(symbol=name) for name in "MNK")

        def matrix(rows: Any, cols: Any, dtype: Any, name: str) -> Any:
            stride = cute.sym_int64(divisibility=128 // dtype.width, symbol=f"ld{name}")
            return cute.runtime.make_fake_tensor(dtype, (rows, cols), (stride, 1), assumed_align=16)

        return matrix(m, k, self.ab_type, "a"), matrix(n, k, self.ab_type, "b"), matrix(m, n, self.c_type, "c")

    def launch_args(self, a: Any, b: Any, c: Any) -> tuple:
        """Check torch tensors and wrap them for a call of the compiled kernel.

        Args:
            a: [M, K], ``in_dtype``.
            b: [N, K], ``in_dtype``.
            c: [M, N], ``out_dtype``, written.

        Raises:
            ArgumentError: wrong type, rank or extent, an empty dimension, or rows that do not start on 16 bytes.
        """
        import torch

        types = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "e4m3": torch.float8_e4m3fn}
        for name, x, dtype in (("a", a, self.in_dtype), ("b", b, self.in_dtype), ("c", c, self.out_dtype)):
            if x.dtype != types[dtype] or x.dim() != 2 or 0 in x.shape:
                raise ArgumentError(name, (x.dtype, tuple(x.shape)), f"a matrix of {dtype}, no extent 0")
            if x.stride(1) != 1 and x.shape[1] > 1 or x.stride(0) * x.element_size() % 16 or x.data_ptr() % 16:
                raise ArgumentError(name, x.stride(), "stride (whole 16-byte units, 1) and a 16-byte aligned start")
        if a.shape[1] != b.shape[1] or tuple(c.shape) != (a.shape[0], b.shape[0]):
            shapes = tuple(a.shape), tuple(b.shape), tuple(c.shape)
            raise ArgumentError("a, b, c", shapes, "[M, K], [N, K], [M, N]")
        if b.shape[0] > GRID_Y * self.tile_n:
            raise ArgumentError("b", tuple(b.shape), f"at most {GRID_Y} column tiles of {self.tile_n} (grid limit)")

        def wrap(x: Any, dtype: Any) -> Any:
            bytewise = x.view(torch.uint8) if dtype.width == 8 else x  # fp8 has no DLPack code
            tensor = cute.runtime.from_dlpack(bytewise, assumed_align=16).mark_layout_dynamic(leading_dim=1)
            tensor.element_type = dtype
            return tensor

        return wrap(a, self.ab_type), wrap(b, self.ab_type), wrap(c, self.c_type)
