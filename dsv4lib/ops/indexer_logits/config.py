"""Configure the kernel of the indexer's scores. Formats, sizes, buffers and budgets."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4lib.dsl import umma
from dsv4lib.dsl.budget import SMEM_LIMIT, TMEM_COLUMNS, BudgetRow, whole_atoms
from dsv4lib.errors import ConfigError

DIM = 128  # of a query head and of a key
TILE_KEYS = 128  # keys of a tile: lanes of the accumulator
GROUPS = 2  # warpgroups of the epilogue, and accumulators
GROUP_THREADS = 128
MMA_WARP, LOAD_WARP = 8, 9
THREADS = GROUPS * GROUP_THREADS + 64
MAX_STAGES = 6
MAX_COLUMNS = 256  # N of an MMA
HEAD_STEP = 32  # heads that a thread reads from tensor memory at once
SCALE_WORD = 4  # bytes of a key's scales, of either format
TMEM_READY, TMEM_READ = 1, 2  # named barriers


@dataclass(frozen=True)
class Variant:
    """A format of queries and keys, and the MMA that multiplies them.

    Attributes:
        bits: of an element.
        kind: of the MMA, with the size of its scales' blocks.
        scaled: the MMA multiplies by a scale for each 32 elements; else the epilogue does, by one of the key.
    """

    bits: int
    kind: str
    scaled: bool

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a head or key, a row of the swizzle."""
        return DIM * self.bits // 8

    @property
    def mmas(self) -> int:
        """MMAs of a tile: each takes 32 bytes of a row."""
        return self.row_bytes // 32


VARIANTS = {"fp8": Variant(8, "f8f6f4", False), "fp4": Variant(4, "mxf4.block_scale.block32", True)}


class Config:
    """Options of the kernel and what follows from them.

    Args:
        variant: "fp8" or "fp4".
        heads: of a query, 64 or 128.
        tokens: consecutive tokens of a tile, 1 to 4.
        page_size: keys of a page: 32, 64 or a multiple of 128.

    Raises:
        ConfigError: a value that is not one of these, or that does not go with the others.
    """

    def __init__(self, variant: str = "fp8", heads: int = 64, tokens: int = 1, page_size: int = 64):
        if variant not in VARIANTS:
            raise ConfigError("variant", variant, "one of " + ", ".join(VARIANTS))
        if heads not in (64, 128):
            raise ConfigError("heads", heads, "64 or 128")
        if page_size not in (32, 64) and (page_size < 1 or page_size % TILE_KEYS):
            raise ConfigError("page_size", page_size, "32, 64 or a multiple of 128")
        self.variant_name, self.heads, self.tokens, self.page_size = variant, heads, tokens, page_size
        self.variant = VARIANTS[variant]
        self.columns = heads * tokens
        # ---- scales of an MMA: blocks of 128 rows x 4 ----
        scaled = self.variant.scaled
        self.query_blocks = -(-self.columns // 128) if scaled else 0
        # ---- tensor memory ----
        self.key_column = GROUPS * self.columns
        self.query_column = self.key_column + umma.SCALE_COLUMNS * scaled
        used = self.query_column + umma.SCALE_COLUMNS * self.query_blocks
        if tokens < 1 or self.columns > MAX_COLUMNS or used > TMEM_COLUMNS:
            raise ConfigError("tokens", tokens, f"1 to {most_tokens(variant, heads)} with {heads} heads in {variant}")
        self.tmem_columns = max(32, 1 << (used - 1).bit_length())
        # ---- boxes of TMA: a page's part of a tile ----
        self.box_keys = min(page_size, TILE_KEYS)
        self.boxes = TILE_KEYS // self.box_keys
        # ---- shared memory ----
        self.key_bytes = TILE_KEYS * self.variant.row_bytes
        self.scale_bytes = TILE_KEYS * SCALE_WORD
        self.stage_bytes = self.key_bytes + self.scale_bytes
        self.query_bytes = self.columns * self.variant.row_bytes
        self.stages = max(n for n in range(1, MAX_STAGES + 1) if self._smem_bytes(n) <= SMEM_LIMIT)
        # ---- instructions and operands ----
        self.operand = umma.matrix_descriptor(
            0, 8 * self.variant.row_bytes, self.variant.row_bytes
        )  # 8 rows to the next 8
        self.instructions = [self._instruction(i) for i in range(self.variant.mmas)]

    def _instruction(self, i: int) -> int:
        """Return the descriptor of MMA ``i`` of a tile; of the 4 scales in a word it takes two."""
        if not self.variant.scaled:
            return umma.instruction_descriptor(TILE_KEYS, self.columns, "e4m3")
        return umma.scaled_instruction_descriptor(TILE_KEYS, 1, 1, True, 2 * i) | (self.columns >> 3) << 17

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        return f"{type(self).__name__}({self.variant_name}, {self.heads}, {self.tokens}, {self.page_size})"

    def buffers(self, stages: int | None = None) -> list[tuple[str, int]]:
        """Return (name, bytes) of what is in SMEM before the mbarriers, in order."""
        n = self.stages if stages is None else stages
        return [
            *((f"keys {i}", self.key_bytes) for i in range(n)),
            ("queries", self.query_bytes),
            *((f"scales {i}", self.scale_bytes) for i in range(n)),
            ("scales of queries", self.query_blocks * umma.SCALE_BLOCK),
            ("weights", 4 * self.columns),
            ("runs", 16 * self.tokens),
        ]

    def barriers(self, stages: int | None = None) -> list[str]:
        """Names of the mbarriers (8 bytes each), in order."""
        rings = ("keys", self.stages if stages is None else stages), ("acc", GROUPS), ("queries", 1)
        return [f"{name} {what} {i}" for name, count in rings for what in ("full", "empty") for i in range(count)]

    def _smem_bytes(self, stages: int) -> int:
        control = 8 * len(self.barriers(stages)) + 4  # and the TMEM address
        return whole_atoms(sum(size for _, size in self.buffers(stages)) + control)

    def budget(self) -> list[BudgetRow]:
        """Compute shared memory, tensor memory and threads of one CTA."""
        n, row, control = self.stages, self.variant.row_bytes, 8 * len(self.barriers()) + 4
        sizes = {
            "keys": (n * self.key_bytes, f"{n} stages x {TILE_KEYS} keys x {row} B"),
            "queries": (self.query_bytes, f"{self.tokens} tokens x {self.heads} heads x {row} B"),
            "scales of keys": (n * self.scale_bytes, f"{n} stages x {TILE_KEYS} keys x {SCALE_WORD} B"),
            "scales of queries": (self.query_blocks * umma.SCALE_BLOCK, f"blocks of {umma.SCALE_BLOCK} B"),
            "weights": (4 * self.columns, f"{self.columns} fp32"),
            "runs": (16 * self.tokens, f"4 words x {self.tokens} tokens"),
            "control": (control, f"{len(self.barriers())} mbarriers + TMEM address"),
            "total": (self._smem_bytes(n), "sum, up to a multiple of 1024 B"),
        }
        scales = umma.SCALE_COLUMNS * (self.variant.scaled + self.query_blocks)
        columns = {
            "accumulators": (self.key_column, f"{GROUPS} x {self.columns} heads, fp32"),
            "scales": (scales, "4 a block of 128 rows"),
            "total": (self.tmem_columns, "sum, up to a power of two"),
        }
        smem = [BudgetRow(f"SMEM: {name}", u, SMEM_LIMIT, "B", why) for name, (u, why) in sizes.items() if u]
        tmem = [BudgetRow(f"TMEM: {name}", u, TMEM_COLUMNS, "columns", why) for name, (u, why) in columns.items() if u]
        return [*smem, *tmem, BudgetRow("threads", THREADS, 1024, "threads", "8 epilogue + 1 MMA + 1 load warp")]


def most_tokens(variant: str, heads: int) -> int:
    """Count the tokens that a tile can take at most."""
    scales = 3 * umma.SCALE_COLUMNS if VARIANTS[variant].scaled else 0
    return min(4, MAX_COLUMNS // heads, (TMEM_COLUMNS - scales) // GROUPS // heads)
