"""Configure Hopper's attention of decode steps. Sizes, options, buffers and budgets; the picture is in `kernel`."""

from __future__ import annotations

import cutlass

from dsv4lib.dsl.budget import SMEM_ALIGN, SMEM_LIMIT, BudgetRow, whole_atoms
from dsv4lib.errors import ConfigError
from dsv4lib.formats import kv_entry
from dsv4lib.ops.fmha.config import CHUNK, CHUNK_BYTES, ENTRIES, TILE_M, TILE_N
from dsv4lib.ops.fmha.work import Plan

HEAD_DIM = kv_entry.HEAD_DIM
CHUNKS = HEAD_DIM // CHUNK
Q_BYTES = TILE_M * HEAD_DIM * 2
STAGE_BYTES = CHUNKS * CHUNK_BYTES
STAGES = 2
MATH_WARPS, PRODUCER_WARPS = 8, 4
WARPGROUP = 128
THREADS = 32 * (MATH_WARPS + PRODUCER_WARPS)
MATH_REGISTERS, PRODUCER_REGISTERS = 192, 120
REGISTERS = 504  # of three warpgroups at the start, 168 each: setmaxnreg gives out no more than the launch took
DIMS = HEAD_DIM // 2  # of O that a math warpgroup has
KEYS = TILE_N // PRODUCER_WARPS  # of a producer warp
Q_READY = 1  # named barrier (0 is __syncthreads)


class Config(Plan):
    """Options of the kernel and what follows from them. Which keys a CTA has is `work.Plan`'s.

    Args:
        entries: where compressed entries come from: "index", "range" or "none".
        window: there are window keys. window_index: by a list of pool rows a token, else consecutive rows.
        sink: there is a sink logit a head.
        inverse_rope: rotate the last 64 dimensions of O back.
        partial: split the keys over the grid and write fp32 O and LSE of each split.

    Raises:
        ConfigError: a value that is not one of these, or keys of no kind.
    """

    dtype, element, head_dim = "bf16", cutlass.BFloat16, HEAD_DIM
    cluster, dim_splits, groups, raw = 1, 1, False, False

    def __init__(
        self,
        entries: str = "index",
        window: bool = True,
        window_index: bool = True,
        sink: bool = True,
        inverse_rope: bool = False,
        partial: bool = False,
    ):
        if entries not in ENTRIES:
            raise ConfigError("entries", entries, "one of " + ", ".join(ENTRIES))
        if entries == "none" and not window:
            raise ConfigError("window", window, "True where entries are none: a kernel needs keys")
        if window_index and not window:
            raise ConfigError("window_index", window_index, "False without window keys")
        if partial and (sink or inverse_rope):
            raise ConfigError("partial", partial, "False with sink or inverse_rope: they belong to the union of splits")
        self.entries, self.window, self.window_index = entries, window, window_index
        self.sink, self.inverse_rope, self.partial = sink, inverse_rope, partial
        self.fp8_entries, self.fp8_window = entries != "none", window

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        names = ("window", "window_index", "sink", "inverse_rope", "partial")
        return f"{type(self).__name__}({', '.join([self.entries, *(n for n in names if vars(self)[n])])})"

    def budget(self) -> list[BudgetRow]:
        """Compute shared memory, registers and threads of one CTA."""
        sizes = {
            "Q": (Q_BYTES, f"{TILE_M} heads x {HEAD_DIM} x 2 B"),
            "keys": (STAGES * STAGE_BYTES, f"{STAGES} stages x {TILE_N} keys x {HEAD_DIM} x 2 B"),
            "control": (STAGES * (16 + TILE_N // 8), f"{STAGES} stages x (2 mbarriers, a bit a key)"),
        }
        sizes["total"] = whole_atoms(sum(size for size, _ in sizes.values())), f"up to a multiple of {SMEM_ALIGN} B"
        registers = MATH_WARPS // 4 * MATH_REGISTERS + PRODUCER_WARPS // 4 * PRODUCER_REGISTERS
        return [
            *(BudgetRow(f"SMEM: {name}", used, SMEM_LIMIT, "B", why) for name, (used, why) in sizes.items()),
            BudgetRow("registers", registers, REGISTERS, "a lane of a quarter", "2 math warpgroups, 1 producer"),
            BudgetRow("threads", THREADS, 1024, "threads", "2 math warpgroups, 1 producer"),
        ]
