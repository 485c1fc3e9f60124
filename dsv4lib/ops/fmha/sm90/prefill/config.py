"""Configure Hopper's attention of many tokens: buffers and budgets; the picture is in `prefill.kernel`."""

from __future__ import annotations

from dsv4lib.dsl.budget import SMEM_ALIGN, SMEM_LIMIT, BudgetRow, whole_atoms
from dsv4lib.ops.fmha.config import P_BYTES, TILE_M, TILE_N
from dsv4lib.ops.fmha.sm90.config import (
    HEAD_DIM,
    MATH_WARPS,
    Q_BYTES,
    REGISTERS,
    STAGE_BYTES,
    STAGES,
    WARPGROUP,
    Config,
)

ROWS_BYTES = 16 * WARPGROUP  # row_max and row_sum of two rows of a thread
P_READY = 2  # named barriers: P of tile 0 of a pair, then of tile 1


class PrefillConfig(Config):
    """Options of the kernel: those of `Config`."""

    def budget(self) -> list[BudgetRow]:
        """Compute shared memory, registers and threads of one CTA."""
        sizes = {
            "Q": (Q_BYTES, f"{TILE_M} heads x {HEAD_DIM} x 2 B"),
            "keys": (STAGES * STAGE_BYTES, f"{STAGES} stages x {TILE_N} keys x {HEAD_DIM} x 2 B"),
            "P": (STAGES * P_BYTES, f"{STAGES} tiles x {TILE_M} heads x {TILE_N} keys x 2 B"),
            "rows": (STAGES * ROWS_BYTES, f"{STAGES} tiles x {WARPGROUP} threads x 2 (row_max, row_sum)"),
            "control": (STAGES * (32 + TILE_N // 8) + 24, f"{STAGES} stages x (4 mbarriers, a bit a key); of Q"),
        }
        sizes["total"] = whole_atoms(sum(size for size, _ in sizes.values())), f"up to a multiple of {SMEM_ALIGN} B"
        warpgroups = MATH_WARPS // 4, self.producer_warps // 4
        registers = sum(n * each for n, each in zip(warpgroups, self.registers, strict=True))
        roles = f"{warpgroups[0]} math warpgroups, {warpgroups[1]} of producers"
        return [
            *(BudgetRow(f"SMEM: {name}", used, SMEM_LIMIT, "B", why) for name, (used, why) in sizes.items()),
            BudgetRow("registers", registers, REGISTERS[self.producer_warps], "a lane of a quarter", roles),
            BudgetRow("threads", self.threads, 1024, "threads", roles),
        ]
