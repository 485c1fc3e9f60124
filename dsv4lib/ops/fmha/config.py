"""Configure the attention kernel: sizes, options, buffers and budgets. The picture is in `fmha.sm100`."""

from __future__ import annotations

import math

import cutlass

from dsv4lib.dsl import umma
from dsv4lib.dsl.budget import SMEM_LIMIT, TMEM_COLUMNS, BudgetRow, whole_atoms
from dsv4lib.errors import ConfigError
from dsv4lib.formats import kv_entry

HEAD_DIMS = (64, 128, 256, 512)
TILE_M, TILE_N = 64, 64  # heads and keys of a tile
HALF_N = TILE_N // 2  # keys a softmax thread weighs
REGION = 4  # keys: the window starts on a multiple of it; a gather of 4 rows has one tensor map
CHUNK = 64  # head dimensions in one 128-byte swizzle row
CHUNK_BYTES = TILE_N * CHUNK * 2
P_BYTES = TILE_M * TILE_N * 2
X_BYTES = 128 * HALF_N * 4  # exchange of partial scores
ROW_BYTES = 3 * 128 * 4  # exchange of tile maxima, and row_sum and row_max of an item for the epilogue
S_STAGES, P_STAGES, MAX_KV_STAGES = 2, 2, 6
MAX_LOAD_WARPS = 3  # from LOAD_WARP on: those that have no other role
SOFTMAX_WARPS, MMA_WARP, LOAD_WARP = (0, 1, 2, 3), 4, 5
DEQUANT_WARPS = EPILOGUE_WARPS = (8, 9, 10, 11)  # either these or those
SOFTMAX_THREADS = 32 * len(SOFTMAX_WARPS)
# Named barriers; PAIR and PAIR + 1: the two warps that share 32 heads
TMEM_READY, TMEM_DONE, PAIR = 1, 2, 3
LOG2_E = math.log2(math.e)
RESCALE_LOG2 = 4.0  # O is rescaled only when the maximum grew by more than 2^4; module docstring of `sm100`
ENTRIES = ("none", "index", "range")
OPTIONS = ("window", "sink", "inverse_rope", "partial", "fp8_entries", "fp8_window", "groups", "raw", "window_index")


def count_tiles(entries: int, window: int) -> int:
    """Count the tiles that a token's or group's keys take.

    `work.Plan.places` does the same on the device.

    The first window keys fill the last tile of entries where that saves a tile.

    >>> count_tiles(32, 129), count_tiles(60, 129), count_tiles(61, 129), count_tiles(100, 128), count_tiles(512, 128)
    (3, 3, 4, 4, 10)
    """
    apart = -(-entries // TILE_N) + -(-window // TILE_N)
    return min(apart, -(-(-(-entries // REGION) * REGION + window) // TILE_N))


class Config:
    """Hold the kernel's options and what follows from them.

    Args:
        head_dim: D, one of `HEAD_DIMS`; the model's is 512.
        dtype: "bf16" or "fp16", the type of Q, the keys and (normalised) O.
        entries: where compressed entries come from: "index" (a list of pool rows a token, -1 skipped), "range"
            (consecutive pool rows, first row and count a token) or "none".
        window: there are window keys. window_index: by a list of pool rows a token, else consecutive rows.
        sink: there is a sink logit a head.
        inverse_rope: rotate the last 64 dimensions of O back (cos, sin a token).
        partial: split the keys over the grid (`work.KeySplits`) and write fp32 O and LSE of each split (`combine` adds
            them up; sink and rotation belong to the union, so they are not allowed here).
        fp8_entries, fp8_window: these keys are 584-byte entries in pages (`formats.kv_entry`) and not rows of
            ``dtype``; bf16 and D 512 only.
        cluster: CTAs that share the tiles of a token or group, 64 rows each: 1, or 2, a pair (from D 128 on).
        groups: adjacent tokens share tiles, as many as fit into 64 rows a CTA; the call brings the groups (see
            `window.token_groups`). Not with entries by index: there neighbours select different entries.
        raw: of ``partial``: O is not normalised, and instead of the LSE come row_max and row_sum.
        dim_splits: CTAs (or pairs) that share the dimensions of O, 1 or (D 512) 2: each weighs all keys and multiplies,
            keeps and stores half of the dimensions. For launches that leave SMs idle; the bits are the same.

    Raises:
        ConfigError: a value that is not one of these, or keys of no kind.
    """

    # of the row exchange; not the slot of the maxima, which the partner may still read
    sum_slot, row_max_slot = 1, 2

    def __init__(
        self,
        head_dim: int = 512,
        dtype: str = "bf16",
        entries: str = "index",
        window: bool = True,
        sink: bool = True,
        inverse_rope: bool = False,
        partial: bool = False,
        fp8_entries: bool = False,
        fp8_window: bool = False,
        cluster: int = 1,
        groups: bool = False,
        raw: bool = False,
        dim_splits: int = 1,
        window_index: bool = False,
    ):
        if head_dim not in HEAD_DIMS:
            raise ConfigError("head_dim", head_dim, "one of " + ", ".join(map(str, HEAD_DIMS)))
        if dtype not in ("bf16", "fp16"):
            raise ConfigError("dtype", dtype, "bf16 or fp16")
        if entries not in ENTRIES:
            raise ConfigError("entries", entries, "one of " + ", ".join(ENTRIES))
        if entries == "none" and not window:
            raise ConfigError("window", window, "True where entries are none: a kernel needs keys")
        if partial and (sink or inverse_rope):
            raise ConfigError("partial", partial, "False with sink or inverse_rope: they belong to the union of splits")
        if (fp8_entries or fp8_window) and (head_dim, dtype) != (kv_entry.HEAD_DIM, "bf16"):
            raise ConfigError("fp8_entries, fp8_window", (head_dim, dtype), "D 512 in bf16: an entry is 512 dims")
        for name, fp8, keys in (("fp8_entries", fp8_entries, entries != "none"), ("fp8_window", fp8_window, window)):
            if fp8 and not keys:
                raise ConfigError(name, fp8, "False where there are no such keys")
        if cluster not in (1, 2):
            raise ConfigError("cluster", cluster, "1 or 2")
        if cluster > 1 and head_dim < 2 * CHUNK:
            raise ConfigError("cluster", cluster, f"1 with head_dim {head_dim}: a CTA of a pair takes whole 64s of it")
        if groups and entries == "index":
            raise ConfigError("groups", groups, "False with entries by index: tokens of a group read the same keys")
        if window_index and (groups or not window):
            raise ConfigError("window_index", window_index, "False with groups, or without window keys")
        if raw and not partial:
            raise ConfigError("raw", raw, "False unless partial")
        if dim_splits not in (1, 2) or head_dim // min(256, head_dim) % dim_splits:
            raise ConfigError("dim_splits", dim_splits, "1, or 2 with head_dim 512: of O's blocks of 256")
        self.dtype, self.element = dtype, cutlass.BFloat16 if dtype == "bf16" else cutlass.Float16
        self.entries, self.window, self.sink = entries, window, sink
        self.inverse_rope, self.partial, self.raw = inverse_rope, partial, raw
        self.cluster, self.groups = cluster, groups
        self.fp8_entries, self.fp8_window, self.window_index = fp8_entries, fp8_window, window_index
        self.box_entries = entries == "range" and not fp8_entries  # by TMA, and of consecutive rows
        self.box_window = window and not fp8_window and not window_index
        self.head_dim = head_dim
        # ---- instructions ----
        self.pv_n = min(256, head_dim)  # dimensions of O an MMA writes: a block
        self.dim_splits = dim_splits
        self.o_blocks = head_dim // self.pv_n // dim_splits  # that a CTA (or pair) has
        self.qk_instruction = umma.instruction_descriptor(TILE_M * cluster, 2 * TILE_N, dtype)
        self.pv_instruction = umma.instruction_descriptor(TILE_M * cluster, self.pv_n, dtype, b_mn_major=True)
        self.variant = {"ws": True} if cluster == 1 else {"ctas": cluster}  # of both MMAs
        self.k_descriptor = umma.matrix_descriptor(0, umma.SWIZZLE_ATOM)  # 8 keys to the next 8
        self.v_descriptor = umma.matrix_descriptor(CHUNK_BYTES, umma.SWIZZLE_ATOM)  # chunk to chunk, 8 keys to 8 keys
        # ---- shared memory ----
        self.chunks = max(2, head_dim // CHUNK)  # they come in pairs: at D 64 the second is past the row, zeros
        self.dequant_warps = DEQUANT_WARPS if fp8_entries or fp8_window else ()
        # Stages of a tile: one for each block of O, which P V of that block frees while the next is multiplied: half a
        # tile more is under way. In a pair stages are small already; dequantising warps bring all of a key.
        self.tile_stages = head_dim // self.pv_n if cluster == 1 and not self.dequant_warps else 1
        self.stage_chunks = self.chunks // (cluster * self.tile_stages)  # that a CTA keeps
        self.key_bytes = self.stage_chunks * CHUNK_BYTES  # of a stage of keys
        self.stage_bytes = max(2, self.stage_chunks) * CHUNK_BYTES  # Q comes in pairs of chunks, see `q_order`
        # Q goes through the same ring, before the tiles of a token. A pair of chunks goes to the same columns, the
        # first to lanes 0-63, the second to 64-127: even and odd ones, in a pair of CTAs the two halves.
        self.q_stages = self.chunks * CHUNK_BYTES // self.stage_bytes
        half = self.chunks // 2
        self.q_order = (
            tuple(range(self.chunks)) if cluster == 1 else tuple(x for i in range(half) for x in (i, half + i))
        )
        self.kv_stages = max(n for n in range(1, MAX_KV_STAGES + 1) if self._smem_bytes(n) <= SMEM_LIMIT)
        # Warps that send copies, each a share of every stage: a warp sends one of 4 rows in 25 to 30 clocks (an H200),
        # and a tile has 128, 64 a CTA of a pair. There two are enough, 960 clocks while the tensor core needs 1,024;
        # not where it has half of O to do, nor for groups, whose Q is gathered, nor where keys are dequantised: there
        # TMA brings a window in 16 bits, or Q alone.
        most = 2 if cluster > 1 and dim_splits == 1 and not groups else MAX_LOAD_WARPS
        if self.dequant_warps:
            most = MAX_LOAD_WARPS if fp8_entries != fp8_window and entries != "none" and window else 1
        # Each brings a share of every stage: a warp that brings nothing could come to a barrier a phase late.
        self.load_warps = min(most, self.stage_chunks)
        # ---- warps that bring keys, each with an arrival at a stage's full barrier ----
        # Beside dequantising warps load warps need not bring bytes of every tile: all but the first arrive, too.
        self.follows = bool(self.dequant_warps) and self.load_warps * cluster > 1
        followers = self.load_warps * cluster - 1 if self.follows else 0
        self.producers = 1 + len(self.dequant_warps) * cluster + followers
        # ---- warps that store O: of their own, a warpgroup for the lanes of tensor memory.
        # Beside dequantising warps there are no registers for them: the softmax warps do it.
        self.epilogue_warps = () if self.dequant_warps else EPILOGUE_WARPS
        self.threads = 32 * (1 + max((LOAD_WARP, *self.dequant_warps, *self.epilogue_warps)))
        self.tmem_threads = 32 * len(SOFTMAX_WARPS + self.epilogue_warps)  # that load and store there
        # The next item's Q and first S go out before the last P V. Alone there is no room: these two and the last tile
        # would fill the ring.
        self.q_ahead = cluster > 1 and bool(self.epilogue_warps)
        # Lines of O, 32 columns, that an epilogue thread holds before it stores them. In a pair a block, which goes
        # back to the tensor core at once; of fp32 splits there would be too many registers.
        self.lines_at_once = self.pv_n // 64 if self.q_ahead and not partial else 1
        # CTAs of an SM, as a hint for the compiler. With 0 it saves registers (78, not 112) and works out addresses
        # anew in every tile; with 1, warps that dequantise whole keys would spill.
        self.min_blocks = 0 if self.dequant_warps and cluster == 1 else 1
        # ---- tensor memory ----
        self.q_column = self.o_blocks * self.pv_n // 2  # O is at column 0
        self.s_column = self.q_column + self.chunks * CHUNK // 4
        self.tmem_columns = 1 << (self.s_column + S_STAGES * TILE_N - 1).bit_length()

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        parts = [
            str(self.head_dim),
            self.dtype,
            self.entries,
            *(n for n in OPTIONS if vars(self)[n]),
            *(n for n in ("cluster", "dim_splits") if vars(self)[n] > 1),
        ]
        return f"{type(self).__name__}({', '.join(parts)})"

    def buffers(self, kv_stages: int | None = None) -> list[tuple[str, int]]:
        """Return (name, bytes) of what is in SMEM before the mbarriers, in order."""
        stages = self.kv_stages if kv_stages is None else kv_stages
        return [
            *((f"kv {i}", self.stage_bytes) for i in range(stages)),
            *((f"P {i}", P_BYTES) for i in range(P_STAGES)),
            ("score exchange", X_BYTES),
            ("row exchange", ROW_BYTES),
        ]

    def barriers(self, kv_stages: int | None = None) -> list[str]:
        """Names of the mbarriers (8 bytes each), in order."""
        stages = self.kv_stages if kv_stages is None else kv_stages
        pipelines = (("kv", stages), ("S", S_STAGES), ("P", P_STAGES), ("O", self.o_blocks), ("sums", 1))
        rings = [f"{name} {what} {i}" for name, n in pipelines for what in ("full", "empty") for i in range(n)]
        return rings + ["TMEM free"] * (self.cluster - 1)

    def _smem_bytes(self, kv_stages: int) -> int:
        control = 8 * len(self.barriers(kv_stages)) + 4  # and the TMEM address
        return whole_atoms(sum(size for _, size in self.buffers(kv_stages)) + control)

    def budget(self) -> list[BudgetRow]:
        """Compute shared memory, tensor memory and threads of one CTA."""
        n, control = self.kv_stages, 8 * len(self.barriers()) + 4
        sizes = {
            "kv ring": (n * self.stage_bytes, f"{n} stages x {TILE_N} keys x {self.stage_bytes // (2 * TILE_N)} x 2 B"),
            "P": (P_STAGES * P_BYTES, f"{P_STAGES} stages x {TILE_M} heads x {TILE_N} keys x 2 B"),
            "exchange": (X_BYTES + ROW_BYTES, "32 scores, a tile max, row_sum, row_max of 128 threads, fp32"),
            "control": (control, f"{len(self.barriers())} mbarriers + TMEM address"),
            "total": (self._smem_bytes(n), "sum, up to a multiple of 1024 B"),
        }
        columns = {
            "O": (self.q_column, f"{TILE_M} heads x {2 * self.q_column}, fp32, two half rows to a column"),
            "Q": (self.s_column - self.q_column, f"{TILE_M} heads x {self.chunks * CHUNK}, 16 bit, two half rows"),
            "S": (S_STAGES * TILE_N, f"{S_STAGES} tiles x {TILE_N} keys, two partial sums to a column"),
            "total": (self.tmem_columns, "sum, up to a power of two"),
        }
        others = "dequantising" if self.dequant_warps else "epilogue"
        warps = f"4 softmax + 4 {others} + 1 MMA + {self.load_warps} load"
        return [
            *(BudgetRow(f"SMEM: {name}", *(used, SMEM_LIMIT, "B", why)) for name, (used, why) in sizes.items()),
            *(
                BudgetRow(f"TMEM: {name}", *(used, TMEM_COLUMNS, "columns", why))
                for name, (used, why) in columns.items()
            ),
            BudgetRow("threads", self.threads, 1024, "threads", warps + " warps"),
        ]
