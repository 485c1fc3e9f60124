"""Sizes of the decode kernel, checked: how heads, dims and tokens are shared between warps, and what SMEM holds."""

from __future__ import annotations

from cutlass import Int32

from dsv4lib.errors import ConfigError
from dsv4lib.ops.turbo4_decode import dequant
from dsv4lib.ops.turbo4_encode.kernel import ELEMENTS, HEAD_DIMS

WARP, WARPS = 32, 4
TILE = 32  # tokens of a warp at a time
BLOCK = 8  # tokens of an MMA of Q K^T; neighbouring tokens that one lane loads
BLOCKS = TILE // BLOCK
ROWS = 16  # heads of an MMA
SLICE = 128  # dims of a warp at most
TABLES = ("registers", "shared")
MMA_TYPE = "f16"
PAD = 4  # floats between rows of O in SMEM, against bank conflicts
MOST_GROUP = 128
SMEM_OF_SM, SMEM_OF_CTA = 228 << 10, 1 << 10  # bytes; what the hardware keeps of each CTA


class Config:
    """Sizes of a kernel.

    Args:
        dtype: of q and O, "bf16" or "fp16". head_dim: D. group: query heads that share a KV head, 1 to 128.
        page_size: entries of a page, a multiple of 8. split: O is partial, rotated, with an LSE of base 2.
        table: where centroids are looked up, "registers" or "shared".
        ctas: whose registers an SM must have, 1 to 4.

    Raises:
        ConfigError: a value that is not allowed.
    """

    def __init__(
        self,
        dtype: str = "bf16",
        head_dim: int = 128,
        group: int = 4,
        page_size: int = 64,
        split: bool = False,
        table: str = "registers",
        ctas: int = 2,
    ):
        for name, value, allowed in (
            ("dtype", dtype, tuple(ELEMENTS)),
            ("head_dim", head_dim, HEAD_DIMS),
            ("table", table, TABLES),
            ("ctas", ctas, (1, 2, 3, 4)),
        ):
            if value not in allowed:
                raise ConfigError(name, value, "one of " + ", ".join(map(str, allowed)))
        if not 1 <= group <= MOST_GROUP:
            raise ConfigError("group", group, f"1 to {MOST_GROUP}")
        if page_size % BLOCK or page_size < BLOCK:
            raise ConfigError("page_size", page_size, f"a multiple of {BLOCK}")
        self.dtype, self.element = dtype, ELEMENTS[dtype]
        self.head_dim, self.group, self.page_size = head_dim, group, page_size
        self.split, self.table, self.ctas = split, table, ctas
        # ---- warps: dim_warps share a tile, token_groups take tiles in turns
        self.slice = min(head_dim, SLICE)
        self.dim_warps = head_dim // self.slice
        self.token_groups = WARPS // self.dim_warps
        # ---- heads
        self.head_blocks = -(-group // ROWS)  # CTAs of a KV head
        self.halves = 2 if group > ROWS // 2 else 1  # of the rows of an MMA that are used
        # ---- words of a lane, of a token: of K, and of V
        self.k_words, self.v_words = self.slice // 32, self.slice // 64
        self.m_blocks = self.slice // 16  # of 16 dims of O
        self.run = head_dim // WARP  # dims of a lane, of a row of q and O
        # ---- table
        self.levels = dequant.levels()
        self.words = dequant.table_of(self.levels)
        # ---- SMEM: O of all token groups, and before it the table
        self.o_stride = head_dim + PAD
        self.o_floats = self.token_groups * ROWS * self.o_stride
        self.floats = max(self.o_floats, dequant.TABLE_BYTES // 4 if table == "shared" else 0)
        self.q_rows, self.q_stride = 2 * 8 * self.halves, head_dim + 8
        stats = 2 * self.token_groups * ROWS + ROWS
        self.exchange = 2 * WARPS * WARP * 8 * self.halves if self.dim_warps > 1 else 4  # floats
        self.smem_bytes = 4 * (self.floats + self.exchange + stats) + 2 * (self.q_rows * self.q_stride - 8)
        self.carveout = min(100, -(-100 * self.ctas * (self.smem_bytes + SMEM_OF_CTA) // SMEM_OF_SM))  # percent

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        flags = [self.dtype, self.head_dim, self.group, self.page_size, self.split, self.table, self.ctas]
        return f"{type(self).__name__}({', '.join(map(str, flags))})"

    def query_row(self, head: Int32, low: int) -> Int32:
        """Return the row of q' in SMEM of a head's high (0) or ``low`` (1) part; 16 rows are an MMA's."""
        if self.halves == 1:
            return head + 8 * low
        return head + 16 * low

    # ---- what a fault may change

    def value_norm(self, norm: object) -> object:
        """Return the factor of P of a token, given its norm."""
        return norm

    def key_norm(self, norm: object) -> object:
        """Return the factor of the logits of a token, given its norm."""
        return norm

    def page_column(self, token: Int32) -> Int32:
        """Return where the block table has the page of a token."""
        return token // self.page_size

    def left(self, stop: Int32, first: Int32) -> Int32:
        """Return how many tokens count from ``first`` on."""
        return stop - first
