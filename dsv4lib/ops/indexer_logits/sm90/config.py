"""Configure the Hopper kernel of the indexer's scores: sizes, buffers and budgets."""

from __future__ import annotations

from dsv4lib.dsl.budget import SMEM_LIMIT, BudgetRow
from dsv4lib.errors import ConfigError

DIM = 128  # of a query head and of a key, bytes of a row
TILE_KEYS = 64  # keys of a tile: M of a wgmma
COLUMNS = 64  # heads of a wgmma: N
THREADS = 128
SCALE_BYTES = 4  # of a key
PIECE = 16  # bytes of a load
HEADS = (64, 128)
STAGE_BYTES = TILE_KEYS * (DIM + SCALE_BYTES)
STAGES = {64: 3, 128: 6}  # of the ring, by heads; 64: measured (data/bench/indexer_logits.md)
CTAS_OF_AN_SM = {64: 5, 128: 3}


class Config:
    """Options of the kernel and what follows from them.

    Args:
        heads: of a query, 64 or 128. page_size: keys of a page, 32, 64 or a multiple of 128.

    Raises:
        ConfigError: a value that is not one of these.
    """

    def __init__(self, heads: int = 64, page_size: int = 64):
        if heads not in HEADS:
            raise ConfigError("heads", heads, "64 or 128")
        if page_size not in (32, 64) and (page_size < 1 or page_size % 128):
            raise ConfigError("page_size", page_size, "32, 64 or a multiple of 128")
        self.heads, self.page_size, self.passes = heads, page_size, heads // COLUMNS
        self.stages, self.part = STAGES[heads], min(TILE_KEYS, page_size)  # keys that lie in a row
        self.query_bytes = heads * DIM

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        return f"{type(self).__name__}({self.heads}, {self.page_size})"

    def budget(self) -> list[BudgetRow]:
        """Shared memory and threads of one CTA."""
        return [
            BudgetRow("SMEM: queries", self.query_bytes, SMEM_LIMIT, "B", f"{self.heads} heads x {DIM} B"),
            BudgetRow("SMEM: keys", self.stages * STAGE_BYTES, SMEM_LIMIT, "B", f"{self.stages} x {STAGE_BYTES} B"),
            BudgetRow("SMEM: barriers", 16 * self.stages, SMEM_LIMIT, "B", f"2 x {self.stages} mbarriers x 8 B"),
            BudgetRow("threads", THREADS, 1024, "threads", "one warpgroup"),
        ]


def splits_of(tokens: int, length: int, sms: int, heads: int = 64) -> int:
    """Choose how many CTAs share the keys of a token. No more than fill the GPU, or than there are tiles."""
    return max(1, min(sms * CTAS_OF_AN_SM[heads] // tokens, -(-length // TILE_KEYS)))
