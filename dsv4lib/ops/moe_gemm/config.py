"""Configure the expert GEMM: formats, sizes, buffers and budgets. The picture is in `moe_gemm.sm100`."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4lib.dsl import umma
from dsv4lib.dsl.budget import SMEM_LIMIT, TMEM_COLUMNS, BudgetRow, whole_atoms
from dsv4lib.errors import ConfigError

TILE_M = 128  # features of a CTA's tile: lanes of the accumulator
ROW_BYTES = 128  # of a K step: one row of the 128-byte swizzle, 4 MMAs of 32 bytes
MMAS = 4
W_BYTES = TILE_M * ROW_BYTES
TILES_N = (64, 128, 192, 256)  # tokens of a tile
ROW_STEP = 64  # a tile starts at a multiple: its scales then start 0 or 2 columns into a block, as in CUTLASS
MAX_STAGES = 8
N_STEP = 16  # N of an instruction is a multiple: what the epilogue reads at once, and what a pair or bf16 needs
BOXES = 8  # at most, of a tile's tokens: lanes that issue one each
EPILOGUE_WARPS, MMA_WARP, LOAD_WARP = (0, 1, 2, 3), 4, 5
EPILOGUE_THREADS = 32 * len(EPILOGUE_WARPS)
THREADS = EPILOGUE_THREADS + 64
TMEM_READY, EXCHANGE = 1, 2  # named barriers
OUT_VALUES = 16  # consecutive features of one token that a thread converts and stores
PLAIN = ("bf16", "fp32")  # outputs that are not quantised
OUTPUTS = (*PLAIN, "nvfp4", "mxfp8")


@dataclass(frozen=True)
class Mode:
    """A pair of formats and the MMA that multiplies them.

    Attributes:
        kind: of the MMA.
        a, b: type codes of weights and activations in its instruction descriptor.
        w_bits, x_bits: bits of a weight and of an activation in global memory.
        k: of the MMA.
        block: elements that share a scale; 0: there are none.
    """

    kind: str
    a: int
    b: int
    w_bits: int
    x_bits: int
    k: int
    block: int


MODES = {
    "nvfp4": Mode("mxf4nvf4.block_scale.block16", 1, 1, 4, 4, 64, 16),
    "w4a8": Mode("mxf8f6f4.block_scale.block32", 5, 0, 4, 8, 32, 32),
    "mxfp8": Mode("mxf8f6f4.block_scale.block32", 0, 0, 8, 8, 32, 32),
    "bf16": Mode("f16", 1, 1, 16, 16, 16, 0),
}


class Config:
    """Options of the kernel and what follows from them.

    Args:
        mode: formats of weights and activations: "nvfp4" (both NVFP4), "w4a8" (MXFP4 weights, MXFP8 activations),
            "mxfp8" (both) or "bf16".
        tile_n: tokens of a tile, one of `TILES_N`.
        swiglu: the first GEMM: rows of the weights are gate and up, alternating by 8, and silu(gate) * up is written.
        out: "bf16", "fp32", or (with swiglu) "nvfp4" or "mxfp8" with their scales.
        routed: (with swiglu) the result is multiplied by a weight per row.
        alpha: sums are multiplied by a factor per expert, gate and up by one each.
        ctas: CTAs that multiply together: 1, or 2, a pair, which takes 256 features.

    Raises:
        ConfigError: a value that is not one of these, or that does not go with the others.
    """

    batched = False  # whether tokens and outputs have a dimension of groups, [E, R, ..], instead of sorted rows [R, ..]

    def __init__(
        self,
        mode: str = "nvfp4",
        tile_n: int = 64,
        swiglu: bool = False,
        out: str = "bf16",
        routed: bool = False,
        alpha: bool = True,
        ctas: int = 1,
    ):
        if mode not in MODES:
            raise ConfigError("mode", mode, "one of " + ", ".join(MODES))
        if tile_n not in TILES_N:
            raise ConfigError("tile_n", tile_n, "one of " + ", ".join(map(str, TILES_N)))
        if out not in OUTPUTS:
            raise ConfigError("out", out, "one of " + ", ".join(OUTPUTS))
        if not swiglu and (out not in PLAIN or routed):
            raise ConfigError(
                "swiglu", swiglu, "True for quantised output and routing weights: they are of the first GEMM"
            )
        if ctas not in (1, 2):
            raise ConfigError("ctas", ctas, "1 or 2")
        self.mode_name, self.tile_n, self.swiglu, self.out = mode, tile_n, swiglu, out
        self.routed, self.alpha, self.ctas = routed, alpha, ctas
        self.mode = m = MODES[mode]
        self.quantised = out not in PLAIN
        # ---- K ----
        self.step_k = ROW_BYTES * 8 // m.x_bits  # elements of a K step
        self.w_row = ROW_BYTES if m.w_bits == m.x_bits else self.step_k * m.w_bits // 8  # bytes TMA reads of a row
        self.k_multiple = 128 if mode == "w4a8" else m.k if m.block == 16 else max(m.block, 8)
        # ---- features and tokens ----
        self.pair_m = TILE_M * ctas
        self.box_rows = max(8, tile_n // ctas // BOXES)
        if (tile_n // ctas) % self.box_rows:
            raise ConfigError("tile_n", tile_n, f"whole boxes of {self.box_rows} rows in each of {ctas} CTAs")
        # ---- scales: blocks of 128 rows x 4 scales ----
        self.scale_blocks = self.step_k // (4 * m.block) if m.block else 0  # of a K step
        self.token_blocks = (1 if 128 % tile_n == 0 else 2) if m.block else 0  # of 128 rows that a tile may touch
        self.sfw_bytes = self.scale_blocks * umma.SCALE_BLOCK
        self.sfx_bytes = self.token_blocks * self.sfw_bytes
        # ---- tensor memory ----
        self.sfw_columns = self.scale_blocks * umma.SCALE_COLUMNS
        self.sfx_columns = self.token_blocks * self.sfw_columns
        scales = self.sfw_columns + self.sfx_columns
        self.acc_stages = 2 if 2 * tile_n + scales <= TMEM_COLUMNS else 1
        self.sfw_column = self.acc_stages * tile_n
        self.sfx_column = self.sfw_column + self.sfw_columns
        self.tmem_columns = max(32, 1 << (self.sfx_column + self.sfx_columns - 1).bit_length())
        # ---- epilogue: what its warps exchange at a time ----
        self.out_features = TILE_M // 2 if swiglu else TILE_M  # of a tile
        self.chunk = OUT_VALUES * EPILOGUE_THREADS // self.out_features  # tokens
        self.exchange_words = self.chunk * self.out_features  # of each of two buffers
        self.exchange_bytes = 2 * 4 * self.exchange_words
        # ---- shared memory ----
        self.x_bytes = tile_n // ctas * ROW_BYTES
        self.stage_bytes = W_BYTES + self.x_bytes + self.sfw_bytes + self.sfx_bytes
        self.stages = max(n for n in range(1, MAX_STAGES + 1) if self._smem_bytes(n) <= SMEM_LIMIT)
        # ---- instructions: all but N ----
        self.instructions = [self._instruction(i) for i in range(MMAS)]
        self.operand = umma.matrix_descriptor(0, umma.SWIZZLE_ATOM)  # 8 rows to the next 8

    def _instruction(self, i: int) -> int:
        """Return the descriptor of MMA ``i`` of a K step; with one scale a row and MMA the 4 of a word alternate."""
        m = self.mode
        if not m.block:
            return umma.instruction_descriptor(self.pair_m, 0, self.mode_name)
        return umma.scaled_instruction_descriptor(self.pair_m, m.a, m.b, m.block == 32, i if m.block == 32 else 0)

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        parts = [self.mode_name, str(self.tile_n), self.out]
        parts += [name for name in ("swiglu", "routed", "alpha") if vars(self)[name]]
        return f"{type(self).__name__}({', '.join(parts + ['pair'] * (self.ctas > 1))})"

    def buffers(self, stages: int | None = None) -> list[tuple[str, int]]:
        """Return (name, bytes) of what is in SMEM before the mbarriers, in order."""
        n = self.stages if stages is None else stages
        rings = ("W", W_BYTES), ("X", self.x_bytes), ("W scales", self.sfw_bytes), ("X scales", self.sfx_bytes)
        return [
            *((f"{name} {i}", size) for name, size in rings if size for i in range(n)),
            ("exchange", self.exchange_bytes),
        ]

    def barriers(self, stages: int | None = None) -> list[str]:
        """Names of the mbarriers (8 bytes each), in order."""
        n = self.stages if stages is None else stages
        rings = ("ab", n), ("acc", self.acc_stages)
        names = [f"{name} {what} {i}" for name, count in rings for what in ("full", "empty") for i in range(count)]
        return names + ["TMEM free"] * (self.ctas - 1)

    def _smem_bytes(self, stages: int) -> int:
        control = 8 * len(self.barriers(stages)) + 4  # and the TMEM address
        return whole_atoms(sum(size for _, size in self.buffers(stages)) + control)

    def budget(self) -> list[BudgetRow]:
        """Compute shared memory, tensor memory and threads of one CTA."""
        n, control = self.stages, 8 * len(self.barriers()) + 4
        of_tokens = f"{self.tile_n // self.ctas} tokens x {ROW_BYTES} B"
        blocks = f"blocks of {umma.SCALE_BLOCK} B"
        sizes = {
            "weights": (n * W_BYTES, f"{n} stages x {TILE_M} features x {ROW_BYTES} B"),
            "tokens": (n * self.x_bytes, f"{n} stages x {of_tokens}"),
            "weights' scales": (n * self.sfw_bytes, f"{n} stages x {self.scale_blocks} {blocks}"),
            "tokens' scales": (n * self.sfx_bytes, f"{n} stages x {self.token_blocks} x {self.scale_blocks} {blocks}"),
            "exchange": (self.exchange_bytes, f"2 x {self.chunk} tokens x {self.out_features} fp32"),
            "control": (control, f"{len(self.barriers())} mbarriers + TMEM address"),
            "total": (self._smem_bytes(n), "sum, up to a multiple of 1024 B"),
        }
        columns = {
            "accumulators": (self.acc_stages * self.tile_n, f"{self.acc_stages} x {self.tile_n} tokens, fp32"),
            "scales": (self.sfw_columns + self.sfx_columns, f"4 a block of 128 rows: {self.scale_blocks} K blocks"),
            "total": (self.tmem_columns, "sum, up to a power of two"),
        }
        smem = [BudgetRow(f"SMEM: {name}", u, SMEM_LIMIT, "B", why) for name, (u, why) in sizes.items() if u]
        tmem = [BudgetRow(f"TMEM: {name}", u, TMEM_COLUMNS, "columns", why) for name, (u, why) in columns.items() if u]
        return [*smem, *tmem, BudgetRow("threads", THREADS, 1024, "threads", "4 epilogue + 1 MMA + 1 load warp")]
