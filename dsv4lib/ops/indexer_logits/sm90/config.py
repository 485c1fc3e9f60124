"""Configure the Hopper kernel of the indexer's scores: sizes, buffers and budgets."""

from __future__ import annotations

from dsv4lib.dsl.budget import SMEM_LIMIT, BudgetRow
from dsv4lib.errors import ConfigError

DIM = 128  # of a query head and of a key
TILE_KEYS = 64  # keys of a tile: M of a wgmma
COLUMNS = 64  # heads of a wgmma: N
THREADS = 128
SCALE_BYTES = 4  # of a key
BLOCK = 32  # of K with one of FP4's scales
PIECE = 16  # bytes of a load
HEADS = (64, 128)
STAGES = {"fp8": {64: 3, 128: 6}, "fp4": {64: 9, 128: 9}}  # of the ring, by heads (data/bench/indexer_logits.md)
CTAS_OF_AN_SM = {"fp8": {64: 5, 128: 3}, "fp4": {64: 4, 128: 3}}


class Config:
    """Options of the kernel and what follows from them.

    Args:
        heads: of a query, 64 or 128. page_size: keys of a page, 32, 64 or a multiple of 128.

    Raises:
        ConfigError: a value that is not one of these.
    """

    variant = "fp8"  # of queries and keys
    key_bytes = DIM  # of a key in a page, without its scale
    query_row = DIM  # bytes of a head as it is given
    operand_row = DIM  # bytes of a head in shared memory

    def __init__(self, heads: int = 64, page_size: int = 64):
        if heads not in HEADS:
            raise ConfigError("heads", heads, "64 or 128")
        if page_size not in (32, 64) and (page_size < 1 or page_size % 128):
            raise ConfigError("page_size", page_size, "32, 64 or a multiple of 128")
        self.heads, self.page_size, self.passes = heads, page_size, heads // COLUMNS
        self.stages, self.part = STAGES[self.variant][heads], min(TILE_KEYS, page_size)  # keys that lie in a row
        self.query_bytes = heads * self.operand_row
        self.stage_bytes = TILE_KEYS * (self.key_bytes + SCALE_BYTES)

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        return f"{type(self).__name__}({self.heads}, {self.page_size})"

    def budget(self) -> list[BudgetRow]:
        """Shared memory and threads of one CTA."""
        return [
            BudgetRow("SMEM: queries", self.query_bytes, SMEM_LIMIT, "B", f"{self.heads} heads x {self.operand_row} B"),
            BudgetRow(
                "SMEM: keys", self.stages * self.stage_bytes, SMEM_LIMIT, "B", f"{self.stages} x {self.stage_bytes} B"
            ),
            BudgetRow("SMEM: barriers", 16 * self.stages, SMEM_LIMIT, "B", f"2 x {self.stages} mbarriers x 8 B"),
            BudgetRow("threads", THREADS, 1024, "threads", "one warpgroup"),
        ]


def splits_of(tokens: int, length: int, sms: int, heads: int = 64, variant: str = "fp8") -> int:
    """Choose how many CTAs share the keys of a token. No more than fill the GPU, or than there are tiles."""
    return max(1, min(sms * CTAS_OF_AN_SM[variant][heads] // tokens, -(-length // TILE_KEYS)))
