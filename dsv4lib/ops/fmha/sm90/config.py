"""Configure Hopper's attention of decode steps. Sizes, options, buffers and budgets; the picture is in `kernel`."""

from __future__ import annotations

from typing import NamedTuple

import cutlass

from dsv4lib.dsl.budget import SMEM_ALIGN, SMEM_LIMIT, BudgetRow, whole_atoms
from dsv4lib.errors import ConfigError
from dsv4lib.formats import kv_entry
from dsv4lib.ops.fmha.config import CHUNK, CHUNK_BYTES, ENTRIES, TILE_M, TILE_N
from dsv4lib.ops.fmha.work import Plan


class Registers(NamedTuple):
    """Registers of a thread of either role."""

    math: int
    producer: int


HEAD_DIM = kv_entry.HEAD_DIM
CHUNKS = HEAD_DIM // CHUNK
Q_BYTES = TILE_M * HEAD_DIM * 2
STAGE_BYTES = CHUNKS * CHUNK_BYTES
STAGES = 2
MATH_WARPS = 8
PRODUCER_WARPS = 4, 8  # to choose from
WARPGROUP = 128
ROLE_REGISTERS = {4: Registers(192, 120), 8: Registers(192, 64)}  # by producer warps
# of a lane of all warpgroups at the start, 168 or 128 each: setmaxnreg gives out no more than the launch took
REGISTERS = {4: 504, 8: 512}
DIMS = HEAD_DIM // 2  # of O that a math warpgroup has
Q_READY = 1  # named barrier (0 is __syncthreads)


class Config(Plan):
    """Options of the kernel and what follows from them. Which keys a CTA has is `work.Plan`'s.

    Args:
        entries: where compressed entries come from: "index", "range" or "none".
        window: there are window keys. window_index: by a list of pool rows a token, else consecutive rows.
        sink: there is a sink logit a head.
        inverse_rope: rotate the last 64 dimensions of O back.
        partial: split the keys over the grid and write fp32 O and LSE of each split.
        producer_warps: 4 or 8: how many convert entries.
        early: ask for Q and the first tile's entries before it is known how many keys there are.

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
        producer_warps: int = 8,
        early: bool = True,
    ):
        if entries not in ENTRIES:
            raise ConfigError("entries", entries, "one of " + ", ".join(ENTRIES))
        if entries == "none" and not window:
            raise ConfigError("window", window, "True where entries are none: a kernel needs keys")
        if window_index and not window:
            raise ConfigError("window_index", window_index, "False without window keys")
        if partial and (sink or inverse_rope):
            raise ConfigError("partial", partial, "False with sink or inverse_rope: they belong to the union of splits")
        if producer_warps not in PRODUCER_WARPS:
            raise ConfigError("producer_warps", producer_warps, " or ".join(map(str, PRODUCER_WARPS)))
        self.producer_warps, self.threads = producer_warps, 32 * (MATH_WARPS + producer_warps)
        self.keys = TILE_N // producer_warps  # of a producer warp
        self.registers = ROLE_REGISTERS[producer_warps]
        self.early = early
        self.entries, self.window, self.window_index = entries, window, window_index
        self.sink, self.inverse_rope, self.partial = sink, inverse_rope, partial
        self.fp8_entries, self.fp8_window = entries != "none", window

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        names = ("window", "window_index", "sink", "inverse_rope", "partial", "early")
        given = [self.entries, str(self.producer_warps), *(n for n in names if vars(self)[n])]
        return f"{type(self).__name__}({', '.join(given)})"

    def budget(self) -> list[BudgetRow]:
        """Compute shared memory, registers and threads of one CTA."""
        sizes = {
            "Q": (Q_BYTES, f"{TILE_M} heads x {HEAD_DIM} x 2 B"),
            "keys": (STAGES * STAGE_BYTES, f"{STAGES} stages x {TILE_N} keys x {HEAD_DIM} x 2 B"),
            "control": (STAGES * (16 + TILE_N // 8), f"{STAGES} stages x (2 mbarriers, a bit a key)"),
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
