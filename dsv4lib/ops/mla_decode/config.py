"""Configure the SM100 kernel: sizes, shared memory and tensor memory of a CTA."""

from __future__ import annotations

import math

import cutlass
import torch

from dsv4lib.dsl import umma
from dsv4lib.dsl.budget import SMEM_LIMIT, TMEM_COLUMNS, BudgetRow, whole_atoms
from dsv4lib.errors import ConfigError
from dsv4lib.ops.mla_decode.splits import PAGES

LATENT, ROPE = 512, 64  # dims of an entry: values, and rotated dims of keys
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "e4m3"}
HEADS = 64  # of a CTA
TILE = 64  # tokens of which a CTA has keys
COLUMNS = 32  # of an access to tensor memory
ROW = 128  # bytes of a swizzled row: a chunk of dims
PIECE = 16  # of a store to shared memory
CHUNK_BYTES = TILE * ROW
S_STAGES, P_STAGES, PE_STAGES, MAX_KV_STAGES = 2, 1, 2, 8
SOFTMAX_WARPS, MMA_WARP, LOAD_WARP = (0, 1, 2, 3), 4, 5
THREADS = 32 * (LOAD_WARP + 1)
SOFTMAX_THREADS = 32 * len(SOFTMAX_WARPS)
SUM_SLOT, Q_SLOT = 2, 3  # of the row exchange, after two for the maxima of even and odd tiles
TMEM_READY, TMEM_DONE, PAIR = 1, 2, 3  # named barriers; PAIR and PAIR + 1: the two warps that share 32 heads
LOG2_E = math.log2(math.e)
RESCALE_LOG2 = 4.0  # O is rescaled only when the maximum grew by more than 2^4
ELEMENTS = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "e4m3": cutlass.Float8E4M3FN}
# P of FP8 lies below 2^(4 + 4): its smallest subnormal is 2^-9, and rows of many tokens have many small P.
P_SHIFT = {"bf16": 0.0, "fp16": 0.0, "e4m3": 4.0}


class Config:
    """Hold the kernel's options and what follows from them.

    Args:
        dtype: "bf16", "fp16" or "e4m3", of queries and entries.
        out_dtype: "bf16" or "fp16", of out.
        page_size: tokens of a page, one of `splits.PAGES`.
        cluster: CTAs of an item, 64 heads each: 1, or 2, a pair.
        q_dtype: of queries: None, ``dtype``; or "bf16" with "e4m3" entries: queries and P are sums of two E4M3.
        partial: tokens are split, and fp32 out and LSE of each split are written.

    Raises:
        ConfigError: a value that is not one of these.
    """

    def __init__(
        self,
        dtype: str = "bf16",
        out_dtype: str = "bf16",
        page_size: int = 128,
        partial: bool = False,
        cluster: int = 1,
        q_dtype: str | None = None,
    ):
        if dtype not in ELEMENTS:
            raise ConfigError("dtype", dtype, " or ".join(ELEMENTS))
        if out_dtype not in ("bf16", "fp16") or dtype not in ("e4m3", out_dtype):
            raise ConfigError("out_dtype", out_dtype, "bf16 or fp16, and that of queries in 16 bits")
        if page_size not in PAGES:
            raise ConfigError("page_size", page_size, "one of " + ", ".join(map(str, PAGES)))
        if cluster not in (1, 2):
            raise ConfigError("cluster", cluster, "1 or 2")
        self.dtype, self.out_dtype, self.page_size, self.partial = dtype, out_dtype, page_size, partial
        if q_dtype is not None and q_dtype != dtype and (q_dtype, dtype, out_dtype) != ("bf16", "e4m3", "bf16"):
            raise ConfigError("q_dtype", q_dtype, "None, that of entries, or bf16 with e4m3 entries and bf16 out")
        self.cluster, self.q_dtype = cluster, q_dtype or dtype
        self.limbs = 1 if self.q_dtype == dtype else 2  # of queries and P
        self.element, self.q_element = ELEMENTS[dtype], ELEMENTS[self.q_dtype]
        self.out_element = cutlass.Float32 if partial else ELEMENTS[out_dtype]
        size = self.element.width // 8
        self.p_shift = P_SHIFT[dtype]
        # ---- a tile ----
        self.tile = TILE * cluster  # tokens
        self.half = self.tile // 2  # that a softmax thread weighs
        self.box_tokens = min(page_size, TILE)  # of one copy
        self.boxes = TILE // self.box_tokens  # of the keys of a CTA, for each chunk of dims
        # ---- shared memory ----
        self.chunk = ROW // size  # dims of a row
        self.latent_chunks = LATENT // self.chunk
        # Dims of O that an MMA writes. A pair has a chunk of them in each CTA, in stages of their own.
        self.block = 2 * self.chunk if cluster == 2 else 256
        self.blocks = LATENT // self.block
        self.stage_chunks = self.latent_chunks // self.blocks
        self.stage_bytes = self.stage_chunks * CHUNK_BYTES  # of keys; of values of a pair, 128 tokens x a chunk
        self.pe_row = ROPE * size  # bytes
        self.pe_bytes = TILE * self.pe_row
        self.q_limb = HEADS * (LATENT + ROPE) * size
        self.q_bytes = self.limbs * self.q_limb
        self.p_row = min(ROW, self.tile * size)
        self.p_limb = HEADS * self.tile * size
        self.p_bytes = self.limbs * self.p_limb
        self.row_slots = 3 if self.limbs == 1 else 4
        self.kv_stages = max(n for n in range(1, MAX_KV_STAGES + 1) if self._smem_bytes(n) <= SMEM_LIMIT)
        # ---- instructions ----
        self.kind = "f8f6f4" if dtype == "e4m3" else "f16"
        self.qk_instruction = umma.instruction_descriptor(HEADS * cluster, self.tile, dtype)
        self.pv_instruction = umma.instruction_descriptor(HEADS * cluster, self.block, dtype, b_mn_major=True)
        self.variant = {"kind": self.kind, **({"ws": True} if cluster == 1 else {"ctas": cluster})}
        self.row_descriptor = umma.matrix_descriptor(0, 8 * ROW)  # 8 rows to the next 8
        self.pe_descriptor = umma.matrix_descriptor(0, 8 * self.pe_row, self.pe_row)
        self.p_descriptor = umma.matrix_descriptor(0, 8 * self.p_row, self.p_row)
        self.v_descriptor = umma.matrix_descriptor(self.tile * ROW, 8 * ROW)  # chunk to chunk, 8 tokens to 8 tokens
        self.v_step = 32 // size * ROW  # bytes from the tokens of an MMA to the next ones'
        # ---- tensor memory ----
        self.s_column = LATENT // 2  # O is at column 0
        self.tmem_columns = 1 << (self.s_column + S_STAGES * self.half - 1).bit_length()

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        options = [n for n, there in (("partial", self.partial), ("pair", self.cluster == 2)) if there]
        options += [f"Q {self.q_dtype}"] * (self.limbs > 1)
        names = self.dtype, self.out_dtype, str(self.page_size), *options
        return f"{type(self).__name__}({', '.join(names)})"

    def buffers(self, kv_stages: int | None = None) -> dict[str, int]:
        """Return bytes of what is in SMEM before the mbarriers, in order."""
        stages = self.kv_stages if kv_stages is None else kv_stages
        return {
            "Q": self.q_bytes,
            "latents": stages * self.stage_bytes,
            "rotated keys": PE_STAGES * self.pe_bytes,
            "P": P_STAGES * self.p_bytes,
            "row exchange": SOFTMAX_THREADS * self.row_slots * 4,
        }

    def _barriers(self, kv_stages: int) -> int:
        return 2 * (1 + kv_stages + PE_STAGES + S_STAGES + P_STAGES + self.blocks) + self.cluster - 1

    def _smem_bytes(self, kv_stages: int) -> int:
        control = 8 * self._barriers(kv_stages) + 4  # and the TMEM address
        return whole_atoms(sum(self.buffers(kv_stages).values()) + control)

    def budget(self) -> list[BudgetRow]:
        """Compute shared memory, tensor memory and threads of one CTA."""
        n, sizes = self.kv_stages, self.buffers()
        why = {
            "Q": f"{HEADS} heads x {LATENT + ROPE} dims x {self.limbs} limbs",
            "latents": f"{n} stages x {TILE} tokens x {self.stage_chunks * self.chunk} dims",
            "rotated keys": f"{PE_STAGES} stages x {TILE} tokens x {ROPE} dims",
            "P": f"{HEADS} heads x {self.tile} tokens x {self.limbs} limbs",
            "row exchange": f"two tile maxima, a row_sum, a scale for limbs: {self.row_slots} x 128 threads, fp32",
        }
        columns = {
            "O": (self.s_column, f"{HEADS} heads x {LATENT}, fp32, two half rows to a column"),
            "S": (S_STAGES * self.half, f"{S_STAGES} tiles x {self.tile} tokens, two half rows to a column"),
            "total": (self.tmem_columns, "sum, up to a power of two"),
        }
        total = self._smem_bytes(n)
        return [
            *(BudgetRow(f"SMEM: {name}", sizes[name], SMEM_LIMIT, "B", reason) for name, reason in why.items()),
            BudgetRow("SMEM: total", total, SMEM_LIMIT, "B", f"with {self._barriers(n)} mbarriers, in units of 1024 B"),
            *(
                BudgetRow(f"TMEM: {name}", used, TMEM_COLUMNS, "columns", text)
                for name, (used, text) in columns.items()
            ),
            BudgetRow("threads", THREADS, 1024, "threads", "4 softmax + 1 MMA + 1 load warps"),
        ]
