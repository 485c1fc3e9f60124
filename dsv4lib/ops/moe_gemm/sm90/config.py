"""Configure the Hopper kernel: formats, sizes, buffers and budgets. The picture is in `sm90.kernel`."""

from __future__ import annotations

from dsv4lib.dsl.budget import SMEM_ALIGN, SMEM_LIMIT, BudgetRow, whole_atoms
from dsv4lib.errors import ConfigError
from dsv4lib.ops.moe_gemm.config import MODES as BLACKWELL
from dsv4lib.ops.moe_gemm.config import PLAIN, Mode
from dsv4lib.ops.moe_gemm.sm90.layout import BLOCK, CHUNK_K, FORMS, STEPS_K, TILE_M, tile_bytes

MODES = {  # block: of the activations
    "w4a8": BLACKWELL["w4a8"],
    "w4a8_row": BLACKWELL["w4a8"],
    "w4a16": Mode("wgmma bf16", 5, 0, 4, 16, 16, 0),
}
OUTPUTS = (*PLAIN, "mxfp8")
TILES_N = {"w4a8": (8, 16, 32), "w4a8_row": (8, 16), "w4a16": (8, 16)}  # tokens of a tile: what registers hold
ROW_STEP = 8  # a tile starts at a multiple: the swizzle repeats after 8 rows
CONSUMERS = 4  # warpgroups that take stages round robin
CONSUMER_THREADS = 128 * CONSUMERS
CONSUMER_WARPS = 4 * CONSUMERS
LOAD_WARP = CONSUMER_WARPS  # first of the last warpgroup
FINISH_WARPS = 3  # the others of it
THREADS = CONSUMER_THREADS + 128
CONSUMER_REGISTERS, LOAD_REGISTERS = 104, 56  # of 480 that a lane of a quarter of an SM has at launch
LAUNCH_REGISTERS = 96  # of a thread: 65,536 / 640, in units of 8
MAX_STAGES = 8
MAX_EXPERTS = 512  # of the table that finds tiles
EXPERTS_A_LANE = MAX_EXPERTS // 32
REDUCE = 1  # named barrier of the consumers
SUM_BUFFERS = 2  # at most
PITCH = TILE_M + 4  # fp32 from one token's sums to the next: stores of a warp fall into 32 banks
ROW_BYTES = 128  # of the swizzle
HALF = TILE_M // 2  # rows g of all warps come first in the sums, then rows g + 8


class Config:
    """Options of a kernel and what follows from them.

    Args:
        mode: "w4a8", "w4a8_row" (MXFP4 weights, MXFP8 activations) or "w4a16" (MXFP4 weights, bf16 activations).
        tile_n: tokens of a tile, one of `TILES_N`.
        step_k: K of a stage, 128, 256 or 512: as the weights were tiled.
        swiglu: the first GEMM: rows of the weights are gate and up, alternating by 8, and silu(gate) * up is written.
        out: "bf16", "fp32", or with swiglu "mxfp8" with its scales.
        routed: (with swiglu) the result is multiplied by a weight per row.
        alpha: sums are multiplied by a factor per expert, gate and up by one each.
        early: groups are read, and the first weights asked for, before the launch before has ended.
        gather: rows of the groups are a list of tokens.

    Raises:
        ConfigError: a value that is not one of these, or that does not go with the others.
    """

    tiles_n = TILES_N
    threads = THREADS

    def __init__(
        self,
        mode: str = "w4a8",
        tile_n: int = 8,
        step_k: int = 512,
        swiglu: bool = False,
        out: str = "bf16",
        routed: bool = False,
        alpha: bool = True,
        early: bool = False,
        gather: bool = False,
    ):
        for name, value, allowed in (
            ("mode", mode, tuple(self.tiles_n)),
            ("tile_n", tile_n, self.tiles_n.get(mode)),
            ("step_k", step_k, STEPS_K),
            ("out", out, OUTPUTS),
        ):
            if value not in allowed:
                raise ConfigError(name, value, "one of " + ", ".join(map(str, allowed)))
        if not swiglu and (out not in PLAIN or routed):
            raise ConfigError("swiglu", swiglu, "True for mxfp8 output and routing weights: they are of the first GEMM")
        self.mode_name, self.tile_n, self.step_k, self.out = mode, tile_n, step_k, out
        self.swiglu, self.routed, self.alpha = swiglu, routed, alpha
        self.early, self.gather = early, gather
        self.mode = MODES[mode]
        self.quantised = out not in PLAIN
        self.scaled = bool(self.mode.block)  # activations have scales
        self.sums_factor = FORMS[mode].sums_factor  # what the sums of the MMAs lack
        self.blocks = step_k // BLOCK
        self.lay_out()

    def lay_out(self) -> None:
        """Choose the buffers."""
        step_k, tile_n, mode = self.step_k, self.tile_n, self.mode_name
        # ---- a stage ----
        self.chunks = step_k // CHUNK_K
        self.w_bytes = tile_bytes(mode, step_k)
        self.row_bytes = step_k * self.mode.x_bits // 8  # of one token
        self.row_chunks = self.row_bytes // ROW_BYTES
        self.x_bytes = tile_n * self.row_bytes
        self.sfx_bytes = 4 * tile_n * self.chunks if self.scaled else 0  # a word of 4 scales a token and chunk
        # ---- MMAs: two groups are in flight, each with 16 or fewer sums a thread ----
        self.kind = "e4m3" if self.scaled else "bf16"
        self.block_mmas = BLOCK * self.mode.x_bits // 8 // 32
        self.group = max(1, 16 // tile_n)  # blocks of 32 K that one commit covers
        # ---- shared memory ----
        choices = [(stages, buffers) for stages in (MAX_STAGES, MAX_STAGES // 2) for buffers in (SUM_BUFFERS, 1)]
        self.stages, self.sum_buffers = next(one for one in choices if self._smem_bytes(*one) <= SMEM_LIMIT)
        self.sum_words = CONSUMERS * tile_n * PITCH  # of a buffer

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        parts = [self.mode_name, str(self.tile_n), str(self.step_k), self.out]
        parts += [name for name in ("swiglu", "routed", "alpha", "early", "gather") if vars(self)[name]]
        return f"{type(self).__name__}({', '.join(parts)})"

    def _sizes(self, stages: int, buffers: int) -> dict[str, tuple[int, str]]:
        """Return (bytes, why) of everything in shared memory, in order."""
        n = self.tile_n
        return {
            "tokens": (stages * self.x_bytes, f"{stages} stages x {n} tokens x {self.row_bytes} B"),
            "weights": (stages * self.w_bytes, f"{stages} stages x {self.w_bytes} B"),
            "tokens' scales": (stages * self.sfx_bytes, f"{stages} stages x {n} tokens x {self.chunks} x 4 B"),
            "sums": (4 * buffers * CONSUMERS * n * PITCH, f"{buffers} x {CONSUMERS} x {n} tokens x {PITCH} fp32"),
            "groups": (4 * (3 * MAX_EXPERTS + 32), f"first tile, offset, count of {MAX_EXPERTS} experts"),
            "control": (16 * (stages + SUM_BUFFERS), f"2 x ({stages} + {SUM_BUFFERS}) mbarriers x 8 B"),
        }

    def _smem_bytes(self, stages: int, buffers: int) -> int:
        return whole_atoms(sum(size for size, _ in self._sizes(stages, buffers).values()))

    def budget(self) -> list[BudgetRow]:
        """Compute shared memory, registers and threads of one CTA."""
        sizes = self._sizes(self.stages, self.sum_buffers)
        sizes["total"] = self._smem_bytes(self.stages, self.sum_buffers), f"sum, up to a multiple of {SMEM_ALIGN} B"
        smem = [BudgetRow(f"SMEM: {name}", used, SMEM_LIMIT, "B", why) for name, (used, why) in sizes.items() if used]
        registers = CONSUMERS * CONSUMER_REGISTERS + LOAD_REGISTERS
        return [
            *smem,
            BudgetRow(
                "registers",
                registers,
                LAUNCH_REGISTERS * (CONSUMERS + 1),
                "a lane of a quarter",
                f"{CONSUMERS} consumers, 1 load warpgroup",
            ),
            BudgetRow("threads", THREADS, 1024, "threads", f"{CONSUMERS} consumer warpgroups + 1 of the load warp"),
        ]
