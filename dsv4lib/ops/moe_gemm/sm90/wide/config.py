"""Configure the Hopper kernel of many tokens: sizes, buffers and budgets; the picture is in `wide.kernel`."""

from __future__ import annotations

from dsv4lib.dsl.budget import SMEM_ALIGN, SMEM_LIMIT, BudgetRow
from dsv4lib.ops.moe_gemm.sm90.config import MAX_EXPERTS, MAX_STAGES, MODES, PITCH, Config
from dsv4lib.ops.moe_gemm.sm90.layout import BLOCK, CHUNK_K, FORMS, TILE_M
from dsv4lib.ops.moe_gemm.sm90.mma import CHUNK_BYTES

TILES_N = {mode: (32, 64, 128) for mode in MODES if mode != "w4a8_row"}  # of tokens in bf16
E4M3_TILES_N = {"w4a8_row": (32, 64, 112)}
COLUMNS = {32: (32,), 64: (32, 48, 64), 112: (72, 96, 112), 128: (80, 104, 128)}  # of MMAs: the fewest that hold a tile
GROUPS = 2  # warpgroups that multiply
BLOCKS = 2  # of 64 rows that each has
TILE_BLOCKS = GROUPS * BLOCKS
LOAD_WARPS = 4
FIRST_LOAD_WARP = 4 * GROUPS
THREADS = 128 * GROUPS + 32 * LOAD_WARPS  # more: 128 registers a thread at launch, and ptxas waits for every MMA
LAUNCH_REGISTERS = 168  # 504 a lane of a quarter of an SM
CODES_PITCH = 144  # bytes from one token's codes to the next: 128, and 16 that spread bytes of a warp over banks
TOKENS = 16  # of a tile that are finished together


class WideConfig(Config):
    """Options of the kernel: those of `Config`, more tokens a tile, in bf16; ``mode`` is how weights are tiled."""

    tiles_n = TILES_N
    threads = THREADS
    consumer_registers, load_registers = 232, 40
    arrivals = 1 + 32 * LOAD_WARPS  # at a full barrier: the bulk copies' bytes, and a lane each

    def __init__(
        self,
        mode: str = "w4a16",
        tile_n: int = 128,
        step_k: int = 512,
        swiglu: bool = False,
        out: str = "bf16",
        routed: bool = False,
        alpha: bool = True,
    ):
        super().__init__(mode, tile_n, step_k, swiglu, out, routed, alpha)

    def lay_out(self) -> None:
        """Choose the buffers."""
        self.kind = "bf16"  # of the MMAs, in both modes
        self.row_bytes = CHUNK_K * 2
        self.scaled, self.sums_factor = False, FORMS["w4a16"].sums_factor
        self.scale_bytes = TILE_M * self.blocks  # of a tile of weights: those of all its K
        self.sfx_bytes, self.block_mmas, self.sum_slots = 0, BLOCK // 16, GROUPS
        self.finish_layout()

    def finish_layout(self) -> None:
        """Choose what follows from the sizes of a row."""
        self.x_bytes = self.tile_n * self.row_bytes
        self.block_bytes = CHUNK_BYTES + self.scale_bytes
        self.w_bytes = TILE_BLOCKS * self.block_bytes
        self.columns = COLUMNS[self.tile_n]
        self.stages = next(n for n in range(MAX_STAGES, 1, -1) if self._smem_bytes(n, 1) <= SMEM_LIMIT)

    def _sizes(self, stages: int, buffers: int) -> dict[str, tuple[int, str]]:
        n = self.tile_n
        return {
            "tokens": (stages * self.x_bytes, f"{stages} stages x {n} tokens x {self.row_bytes} B"),
            "weights": (
                stages * self.w_bytes,
                f"{stages} stages x {TILE_BLOCKS} x ({CHUNK_BYTES} B + {self.scale_bytes} B of scales)",
            ),
            "tokens' scales": (stages * self.sfx_bytes, f"{stages} stages x {n} tokens x 4 B"),
            "sums": (4 * self.sum_slots * TOKENS * PITCH, f"{self.sum_slots} x {TOKENS} x {PITCH} fp32, or codes"),
            "groups": (4 * (3 * MAX_EXPERTS + 32), f"first tile, offset, count of {MAX_EXPERTS} experts"),
            "control": (16 * stages, f"2 x {stages} mbarriers x 8 B"),
        }

    def budget(self) -> list[BudgetRow]:
        """Compute shared memory, registers and threads of one CTA."""
        sizes = self._sizes(self.stages, 1)
        sizes["total"] = self._smem_bytes(self.stages, 1), f"sum, up to a multiple of {SMEM_ALIGN} B"
        smem = [BudgetRow(f"SMEM: {name}", used, SMEM_LIMIT, "B", why) for name, (used, why) in sizes.items() if used]
        registers = GROUPS * self.consumer_registers + self.load_registers
        why = f"{GROUPS} consumers, 1 load warpgroup"
        return [
            *smem,
            BudgetRow("registers", registers, LAUNCH_REGISTERS * (GROUPS + 1), "a lane of a quarter", why),
            BudgetRow("threads", THREADS, 1024, "threads", f"{GROUPS} consumer warpgroups + 1 of the load warps"),
        ]


class WideE4m3Config(WideConfig):
    """Options of the kernel of E4M3 tokens: those of `WideConfig`, mode "w4a8_row", whose mxfp8 has blocks of 128."""

    tiles_n = E4M3_TILES_N
    consumer_registers, load_registers = 240, 24
    arrivals = 1 + 32 * LOAD_WARPS + LOAD_WARPS  # and one a load warp for scales

    def __init__(
        self,
        mode: str = "w4a8_row",
        tile_n: int = 112,
        step_k: int = 512,
        swiglu: bool = False,
        out: str = "bf16",
        routed: bool = False,
        alpha: bool = True,
    ):
        super().__init__(mode, tile_n, step_k, swiglu, out, routed, alpha)

    def lay_out(self) -> None:
        """Choose the buffers."""
        self.kind, self.row_bytes, self.scaled, self.sums_factor = "e4m3", CHUNK_K, True, 1.0
        self.scale_bytes = TILE_M * self.blocks + TILE_M  # and the largest of each row
        self.sfx_bytes, self.block_mmas = 4 * self.tile_n, 1
        self.sum_slots = GROUPS
        if self.quantised:  # codes, and of every token an fp32 and one of each warp
            self.sum_slots = -(-self.tile_n * (CODES_PITCH + 4 + 16 * GROUPS) // (4 * TOKENS * PITCH))
        self.finish_layout()
