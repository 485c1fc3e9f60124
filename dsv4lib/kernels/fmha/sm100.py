"""Attention of DeepSeek-V4 on SM100: the heads of a token against selected entries and window keys, in one launch.

    s_j = scale * (q . kv_j)                       j over {selected compressed entries} u {window keys}
    o   = sum_j e^{s_j} kv_j / (sum_j e^{s_j} + e^{sink})          K and V are the same vectors of 512
    lse = ln sum_j e^{s_j}                         without the sink; -inf and o = 0 where a token has no keys

Source: DSV4 paper eq. 27 (sink in the denominator); the oracle is `dsv4lib.reference.fmha`. One kernel serves the three
kinds of layers: CSA (entries by index list), HCA (entries by index list or as a range of rows) and SWA (window only).

Tile picture (D 512). A CTA owns 64 heads of one token (M 64) and walks over its keys in tiles of 64: the entries, then
the window. A tile is fetched once, row by row (TMA gather4), and serves both products: read with the keys as N it is K,
read with the head dimensions as N it is V.

    SMEM                            byte         TMEM: 128 lanes x 512 columns
  +------------------------------+ 0                 0             256        384     448     511
  | KV ring  3 stages x 65,536 B |                 0 +--------------+----------+-------+-------+
  |  a stage: 8 chunks of 64 dims|              |    | O 0-127 | O  | Q even   | S 0   | S 1   |  lane = head
  |  chunk: 64 keys x 128 B      |             63    | 256-383 |    | chunks   | even  | even  |
  +------------------------------+ 196,608    64 +--------------+----------+-------+-------+
  | P  2 stages x 64 x 128 B     |              |    | O 128-255 |  | Q odd    | S 0   | S 1   |  lane = 64 + head
  +------------------------------+ 212,992   127    | 384-511 |    | chunks   | odd   | odd   |
  | score exchange 128 x 128 B   |                   +--------------+----------+-------+-------+
  +------------------------------+ 229,376
  | row exchange 2 x 512 B, mbarriers, TMEM address
  +------------------------------+ 230,528

Why M 64 in the weight-stationary form (`tcgen05.mma.ws`). The fp32 O of 128 rows would fill all 512 columns and leave
none for S. With 64 rows, `.ws` puts the left half of N in lanes 0-63 and the right half in lanes 64-127, so O takes 256
columns and all lanes work. Q is the A operand in TMEM: each half of the lanes multiplies its own A, so Q takes only 128
columns for 64 rows x 512 dims, and a S tile is computed as two sums over half the dimensions (chunks 0, 2, 4, 6 in
the upper lanes, 1, 3, 5, 7 in the lower) which the softmax warps add. Q leaves no trace in SMEM, which buys the third
KV stage.

Roles (6 warps, 192 threads)

    warps 0-3   softmax   allocate TMEM, stage Q; a tile: S -> registers, P -> SMEM, rescale O if needed; store O, LSE
    warp  4     mma       a tile: 16 MMAs 64 x 128 x 16 (S), 8 MMAs 64 x 256 x 16 (O); S of tile j + 1 before P V of j
    warp  5     load      a tile: lane l < 16 issues 8 gather4 of rows 4 l .. 4 l + 3

Pipelines

    kv   TMA -> UMMA       3 stages   full: 65,536 bytes have landed       empty: commit after P V
    s    UMMA -> softmax   2 stages   full: commit after Q K^T             empty: one arrival a softmax warp
    p    softmax -> UMMA   2 stages   full: one arrival a softmax warp     empty: commit after P V (O is up to date)

Online softmax. Exponents are relative to a reference that follows the row maximum only when that grew by more than
2^8: the weights stay below 2^8, their sum in fp32, and O is rescaled in TMEM rarely. The result is the exact formula.

What limits it. A tile costs 64 KiB of L2 reads and 2 x 64 x 64 x 512 multiply-adds; see `bench` for the model.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, memory, pipeline

from dsv4lib.errors import ConfigError
from dsv4lib.kernels.common import gather, tmem, umma
from dsv4lib.kernels.common.budget import SMEM_LIMIT, TMEM_COLUMNS, BudgetRow, whole_atoms
from dsv4lib.kernels.common.rope import rotate_back
from dsv4lib.kernels.fmha import softmax
from dsv4lib.kernels.fmha.softmax import HALF_N, TILE_M, TILE_N

HEAD_DIMS = (64, 128, 256, 512)
CHUNK = 64  # head dimensions in one 128-byte swizzle row
CHUNK_BYTES = TILE_N * CHUNK * 2
P_BYTES = TILE_M * TILE_N * 2
X_BYTES = 128 * HALF_N * 4  # exchange of partial scores
ROW_BYTES = 2 * 128 * 4  # exchange of maxima and sums
S_STAGES, P_STAGES, MAX_KV_STAGES = 2, 2, 6
SOFTMAX_WARPS, MMA_WARP, LOAD_WARP = (0, 1, 2, 3), 4, 5
SOFTMAX_THREADS = 32 * len(SOFTMAX_WARPS)
THREADS = SOFTMAX_THREADS + 64
# Named barriers; PAIR and PAIR + 1: the two warps that share 32 heads
TMEM_READY, Q_READY, TMEM_DONE, PAIR = 1, 2, 3, 4
LOG2_E = math.log2(math.e)
RESCALE_LOG2 = 8.0  # O is rescaled only when a row maximum grew by more than 2^8
ENTRIES = ("none", "index", "range")


class Fmha:
    """Attention with 64 heads of a token a CTA; see the module docstring for the picture.

    Args:
        head_dim: D, one of `HEAD_DIMS`; the model's is 512.
        dtype: "bf16" or "fp16", the type of Q, the keys and (normalised) O.
        entries: where compressed entries come from: "index" (a list of pool rows a token, -1 skipped), "range"
            (consecutive pool rows, first row and count a token) or "none".
        window: there are window keys.
        sink: there is a sink logit a head.
        inverse_rope: rotate the last 64 dimensions of O back (cos, sin a token).
        partial: split the keys over the grid's third axis and write fp32 O and LSE of each part (`combine` joins them;
            sink and rotation belong to the union, so they are not allowed here).

    Raises:
        ConfigError: a value that is not one of these, or keys of no kind.
    """

    sum_slot = 1  # of the row exchange; not the slot of the maxima, which the partner may still read

    def __init__(
        self,
        head_dim: int = 512,
        dtype: str = "bf16",
        entries: str = "index",
        window: bool = True,
        sink: bool = True,
        inverse_rope: bool = False,
        partial: bool = False,
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
            raise ConfigError("partial", partial, "False with sink or inverse_rope: they belong to the union of parts")
        self.dtype, self.element = dtype, cutlass.BFloat16 if dtype == "bf16" else cutlass.Float16
        self.entries, self.window, self.sink = entries, window, sink
        self.inverse_rope, self.partial = inverse_rope, partial
        self.head_dim = head_dim
        # ---- instructions ----
        self.pv_n = min(256, head_dim)  # dimensions of O an MMA writes
        self.qk_instruction = umma.instruction_descriptor(TILE_M, 2 * TILE_N, dtype)
        self.pv_instruction = umma.instruction_descriptor(TILE_M, self.pv_n, dtype, b_mn_major=True)
        self.k_descriptor = umma.matrix_descriptor(0, umma.SWIZZLE_ATOM)  # 8 keys to the next 8
        self.v_descriptor = umma.matrix_descriptor(CHUNK_BYTES, umma.SWIZZLE_ATOM)  # chunk to chunk, 8 keys to 8 keys
        # ---- shared memory ----
        self.chunks = max(2, head_dim // CHUNK)  # they come in pairs: at D 64 the second is behind the row, zeros
        self.stage_bytes = self.chunks * CHUNK_BYTES
        self.kv_stages = max(n for n in range(1, MAX_KV_STAGES + 1) if self._smem_bytes(n) <= SMEM_LIMIT)
        # ---- tensor memory ----
        self.q_column = head_dim // 2  # O is at column 0
        self.s_column = self.q_column + self.chunks * CHUNK // 4
        self.tmem_columns = 1 << (self.s_column + S_STAGES * TILE_N - 1).bit_length()

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        parts = [
            str(self.head_dim),
            self.dtype,
            self.entries,
            *(n for n in ("window", "sink", "inverse_rope", "partial") if vars(self)[n]),
        ]
        return f"Fmha({', '.join(parts)})"

    def buffers(self, kv_stages: int | None = None) -> list[tuple[str, int]]:
        """(name, bytes) of what is in shared memory, in order, before the mbarriers."""
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
        pipelines = (("kv", stages), ("S", S_STAGES), ("P", P_STAGES))
        return [f"{name} {what} {i}" for name, n in pipelines for what in ("full", "empty") for i in range(n)]

    def _smem_bytes(self, kv_stages: int) -> int:
        control = 8 * len(self.barriers(kv_stages)) + 4  # and the TMEM address
        return whole_atoms(sum(size for _, size in self.buffers(kv_stages)) + control)

    def budget(self) -> list[BudgetRow]:
        """Shared memory, tensor memory and threads of one CTA, computed from the configuration."""
        d, n, control = self.head_dim, self.kv_stages, 8 * len(self.barriers()) + 4
        sizes = {
            "kv ring": (n * self.stage_bytes, f"{n} stages x {TILE_N} keys x {self.chunks * CHUNK} x 2 B"),
            "P": (P_STAGES * P_BYTES, f"{P_STAGES} stages x {TILE_M} heads x {TILE_N} keys x 2 B"),
            "exchange": (X_BYTES + ROW_BYTES, "32 scores, a maximum and a sum of 128 threads, fp32"),
            "control": (control, f"{len(self.barriers())} mbarriers + TMEM address"),
            "total": (self._smem_bytes(n), "sum, up to a multiple of 1024 B"),
        }
        columns = {
            "O": (d // 2, f"{TILE_M} heads x {d}, fp32, two half rows to a column"),
            "Q": (self.s_column - self.q_column, f"{TILE_M} heads x {self.chunks * CHUNK}, 16 bit, two half rows"),
            "S": (S_STAGES * TILE_N, f"{S_STAGES} tiles x {TILE_N} keys, two partial sums to a column"),
            "total": (self.tmem_columns, "sum, up to a power of two"),
        }
        return [
            *(BudgetRow(f"SMEM: {name}", *(used, SMEM_LIMIT, "B", why)) for name, (used, why) in sizes.items()),
            *(
                BudgetRow(f"TMEM: {name}", *(used, TMEM_COLUMNS, "columns", why))
                for name, (used, why) in columns.items()
            ),
            BudgetRow("threads", THREADS, 1024, "threads", "4 softmax + 1 MMA + 1 load warp"),
        ]

    # ------------------------------------------------------------------ host

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        entries: tuple,
        window: tuple,
        mSink: Any,
        rope: Any,
        mO: cute.Tensor,
        mLse: cute.Tensor,
        scale: Float32,
        splits: Int32,
    ):
        """Host side: TMA descriptors of both pools and the launch.

        Args:
            mQ: [T, H, D].
            entries: (rows [R, D], index [T, K] int32 or None, first [T] int32 or None, count [T] int32), or None.
            window: (rows [R, D], first [T] int32, count [T] int32), or None.
            mSink: [H] fp32 or None.
            rope: (cos [T, 32], sin [T, 32]) fp32 or None.
            mO: [T, H, D] in ``dtype``; partial: [splits, T, H, D] fp32.
            mLse: [T, H] fp32; partial: [splits, T, H].
            scale: of the dot products.
            splits: parts the keys are split into; 1 unless partial.
        """
        atoms = (None, None)
        if cutlass.const_expr(self.entries != "none"):
            atoms = (gather.row_atom(entries[0]), None)
        if cutlass.const_expr(self.window):
            atoms = (atoms[0], gather.row_atom(window[0]))

        @cute.struct
        class Storage:
            sKV: cute.struct.Align[
                cute.struct.MemRange[cutlass.Uint8, self.kv_stages * self.stage_bytes], umma.SWIZZLE_ATOM
            ]
            sP: cute.struct.Align[cute.struct.MemRange[self.element, P_STAGES * TILE_M * TILE_N], umma.SWIZZLE_ATOM]
            sX: cute.struct.Align[cute.struct.MemRange[Float32, SOFTMAX_THREADS * HALF_N], 16]
            sRow: cute.struct.MemRange[Float32, 2 * SOFTMAX_THREADS]
            kv_barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.kv_stages]
            s_barriers: cute.struct.MemRange[cutlass.Int64, 2 * S_STAGES]
            p_barriers: cute.struct.MemRange[cutlass.Int64, 2 * P_STAGES]
            tmem_address: cutlass.Int32

        self.storage = Storage
        grid = (mQ.shape[0], cute.ceil_div(mQ.shape[1], TILE_M), splits)
        lists = (
            None if cutlass.const_expr(self.entries == "none") else entries[1:],
            None if cutlass.const_expr(not self.window) else window[1:],
        )
        self.kernel(mQ, atoms, lists, mSink, rope, mO, mLse, scale * LOG2_E, splits).launch(
            grid=grid, block=(THREADS, 1, 1)
        )

    # ---------------------------------------------------------------- device

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        atoms: tuple,
        lists: tuple,
        mSink: Any,
        rope: Any,
        mO: cute.Tensor,
        mLse: cute.Tensor,
        scale_log2: Float32,
        splits: Int32,
    ):
        """Set-up shared by all warps, then one role each."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = memory.SmemAllocator().allocate(self.storage)
        one = pipeline.CooperativeGroup(pipeline.Agent.Thread)
        warps = pipeline.CooperativeGroup(pipeline.Agent.Thread, len(SOFTMAX_WARPS))
        kv = pipeline.PipelineTmaUmma.create(
            num_stages=self.kv_stages,
            producer_group=one,
            consumer_group=one,
            tx_count=self.stage_bytes,
            barrier_storage=storage.kv_barriers.data_ptr(),
            defer_sync=True,
        )
        s = pipeline.PipelineUmmaAsync.create(
            num_stages=S_STAGES,
            producer_group=one,
            consumer_group=warps,
            barrier_storage=storage.s_barriers.data_ptr(),
            defer_sync=True,
        )
        p = pipeline.PipelineAsyncUmma.create(
            num_stages=P_STAGES,
            producer_group=warps,
            consumer_group=one,
            barrier_storage=storage.p_barriers.data_ptr(),
            defer_sync=True,
        )
        allocator = memory.TmemAllocator(
            storage.tmem_address.ptr,
            barrier_for_retrieve=pipeline.NamedBarrier(TMEM_READY, SOFTMAX_THREADS + 32),
            allocator_warp_id=SOFTMAX_WARPS[0],
        )
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()

        work = self.work(lists, splits)
        sKV = storage.sKV.data_ptr().toint()
        if warp == LOAD_WARP:
            self.load(atoms, lists, work, sKV, kv)
        elif warp == MMA_WARP:
            self.mma(sKV, storage.sP.data_ptr().toint(), allocator, kv, s, p, work[3] - work[2])
        else:
            sP = storage.sP.get_tensor(
                cute.make_layout((TILE_M, TILE_N, P_STAGES), stride=(TILE_N, 1, TILE_M * TILE_N)),
                swizzle=cute.make_swizzle(3, 4, 3),
            )
            sX = storage.sX.get_tensor(cute.make_layout((4, SOFTMAX_THREADS, HALF_N // 4), stride=(1, 4, 512)))
            sRow = storage.sRow.get_tensor(cute.make_layout((SOFTMAX_THREADS, 2)))
            self.softmax(mQ, lists, mSink, rope, mO, mLse, work, (sP, sX, sRow), allocator, s, p, scale_log2)

    @cute.jit
    def work(self, lists: tuple, splits: Int32):
        """(entries, window keys, first tile, end tile, tiles of entries) of this CTA."""
        token, _, split = cute.arch.block_idx()
        entries, window = Int32(0), Int32(0)
        if cutlass.const_expr(self.entries != "none"):
            entries = lists[0][2][token]
        if cutlass.const_expr(self.window):
            window = lists[1][1][token]
        entry_tiles = cute.ceil_div(entries, TILE_N)
        tiles = entry_tiles + cute.ceil_div(window, TILE_N)
        first, end = Int32(0), tiles
        if cutlass.const_expr(self.partial):
            share = cute.ceil_div(tiles, splits)
            first = cutlass.min(split * share, tiles)
            end = cutlass.min(first + share, tiles)
        return entries, window, first, end, entry_tiles

    @cute.jit
    def load(self, atoms: tuple, lists: tuple, work: tuple, sKV: Int32, kv: pipeline.PipelineTmaUmma):
        """Load warp: lane l < 16 gathers rows 4 l .. 4 l + 3 of every KV tile, one 128-byte column chunk at a time."""
        token, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        entries, window, first, end, entry_tiles = work
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.kv_stages)
        for tile in cutlass.range(first, end, unroll=1):
            kv.producer_acquire(state)
            barrier = kv.producer_get_barrier(state)
            stage = sKV + state.index * self.stage_bytes
            if cutlass.const_expr(self.entries != "none"):
                if tile < entry_tiles:
                    rows = self.rows(lists[0][0], lists[0][1], token, tile * TILE_N + 4 * lane, entries)
                    gather.gather_tile(atoms[0], rows, TILE_N, self.chunks, stage, barrier)
            if cutlass.const_expr(self.window):
                if tile >= entry_tiles:
                    position = (tile - entry_tiles) * TILE_N + 4 * lane
                    rows = self.rows(None, lists[1][0], token, position, window)
                    gather.gather_tile(atoms[1], rows, TILE_N, self.chunks, stage, barrier)
            state.advance()
        kv.producer_tail(state)

    @cute.jit
    def rows(self, mIndex: Any, mFirst: Any, token: Int32, position: Int32, count: Int32):
        """Pool rows of four keys of a list; -1, which TMA fills with zeros, behind its end."""
        rows = []
        for i in cutlass.range_constexpr(4):
            row = Int32(-1)
            if position + i < count:
                if cutlass.const_expr(mIndex is not None):
                    row = mIndex[token, position + i]
                else:
                    row = mFirst[token] + position + i
            rows.append(row)
        return tuple(rows)

    @cute.jit
    def mma(
        self,
        sKV: Int32,
        sP: Int32,
        allocator: memory.TmemAllocator,
        kv: pipeline.PipelineTmaUmma,
        s: pipeline.PipelineUmmaAsync,
        p: pipeline.PipelineAsyncUmma,
        tiles: Int32,
    ):
        """MMA warp: S of tile j + 1 goes out before P V of tile j, so that the softmax of a tile hides behind MMAs."""
        allocator.wait_for_alloc()
        base = allocator.retrieve_ptr(Float32).toint()
        pipeline.NamedBarrier(Q_READY, SOFTMAX_THREADS + 32).arrive_and_wait()
        umma.fence_after_thread_sync()
        full = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.kv_stages)
        used = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.kv_stages)
        scores = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, S_STAGES)
        weights = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, P_STAGES)
        for tile in cutlass.range(tiles + 1, unroll=1):
            if tile < tiles:
                kv.consumer_wait(full)
                s.producer_acquire(scores)
                umma.fence_after_thread_sync()
                self.mma_qk(base, scores.index, sKV + full.index * self.stage_bytes)
                s.producer_commit(scores)
                full.advance()
                scores.advance()
            if tile > 0:
                p.consumer_wait(weights)
                umma.fence_after_thread_sync()
                self.mma_pv(base, sP + weights.index * P_BYTES, sKV + used.index * self.stage_bytes, tile > 1)
                kv.consumer_release(used)
                p.consumer_release(weights)
                used.advance()
                weights.advance()

    @cute.jit
    def mma_qk(self, base: Int32, slot: Int32, stage: Int32):
        """S = Q K^T as two sums over half the head dimensions: even chunks in lanes 0-63, odd chunks in 64-127.

        N is 128: the 64 keys of an even chunk and, one chunk further in SMEM, the same keys of the odd one.
        """
        with cute.arch.elect_one():
            d = base + self.s_column + slot * TILE_N
            for pair in cutlass.range_constexpr(self.chunks // 2):
                for k in cutlass.range_constexpr(CHUNK // 16):
                    a = base + self.q_column + pair * (CHUNK // 2) + k * 8
                    b = umma.at(self.k_descriptor, stage + pair * (2 * CHUNK_BYTES) + k * 32)
                    umma.mma_ws_ts(d, a, b, self.qk_instruction, pair + k > 0)

    @cute.jit
    def mma_pv(self, base: Int32, weights: Int32, stage: Int32, accumulate: cutlass.Boolean):
        """O += P V: the KV tile again, read with the head dimension as N."""
        with cute.arch.elect_one():
            for part in cutlass.range_constexpr(self.head_dim // self.pv_n):
                for k in cutlass.range_constexpr(TILE_N // 16):
                    a = umma.at(self.k_descriptor, weights + k * 32)
                    b = umma.at(self.v_descriptor, stage + part * (self.pv_n // CHUNK * CHUNK_BYTES) + k * (16 * 128))
                    add = accumulate if k == 0 else cutlass.Boolean(True)
                    umma.mma_ws_ss(base + part * (self.pv_n // 2), a, b, self.pv_instruction, add)

    @cute.jit
    def softmax(
        self,
        mQ: cute.Tensor,
        lists: tuple,
        mSink: Any,
        rope: Any,
        mO: cute.Tensor,
        mLse: cute.Tensor,
        work: tuple,
        shared: tuple,
        allocator: memory.TmemAllocator,
        s: pipeline.PipelineUmmaAsync,
        p: pipeline.PipelineAsyncUmma,
        scale_log2: Float32,
    ):
        """Softmax warps: thread t owns head t % 64 and half t / 64 of the keys of a tile."""
        allocator.allocate(self.tmem_columns)
        allocator.relinquish_alloc_permit()
        allocator.wait_for_alloc()
        address = allocator.retrieve_ptr(Float32)
        tidx, _, _ = cute.arch.thread_idx()
        _, head_block, _ = cute.arch.block_idx()
        row, half = tidx % TILE_M, tidx // TILE_M
        head = head_block * TILE_M + row
        self.stage_q(mQ, address, head, half, tidx)

        sP, sX, sRow = shared
        pair = pipeline.NamedBarrier(PAIR + (tidx // 32) % 2, 64)
        scores = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, S_STAGES)
        weights = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, P_STAGES)
        reference, total = -Float32.inf, Float32(0.0)  # what exponents are relative to (log2), and this half's sum
        for tile in cutlass.range(work[2], work[3], unroll=1):
            valid = self.valid_keys(lists, work, tile, half)
            s.consumer_wait(scores)
            rS = softmax.row_scores(address, self.s_column + scores.index * TILE_N, tidx, half, sX, pair)
            with cute.arch.elect_one():
                s.consumer_release(scores)
            scores.advance()
            largest = softmax.row_maximum(rS, valid, sRow, tidx, pair) * scale_log2

            p.producer_acquire(weights)
            target = reference
            if largest > reference + RESCALE_LOG2:
                target = largest
            if cute.arch.vote_any_sync(target != reference):
                factor = Float32(1.0)
                if target != reference:
                    factor = cute.math.exp2(reference - target, fastmath=True)
                total *= factor
                if tile > work[2]:
                    self.wait_for_o(p, weights)
                    softmax.rescale(address, self.head_dim // 2, tidx, factor)
                reference = target
            total += softmax.store_weights(rS, scale_log2, reference, sP, row, half, weights.index)
            with cute.arch.elect_one():
                p.producer_commit(weights)
            weights.advance()

        sRow[tidx, self.sum_slot] = total
        pair.arrive_and_wait()
        total += sRow[tidx ^ TILE_M, self.sum_slot]
        if work[3] > work[2]:
            self.wait_for_o(p, weights)
        self.epilogue(mSink, rope, mO, mLse, address, head, half, tidx, reference, total, work[3] > work[2])
        pipeline.NamedBarrier(TMEM_DONE, SOFTMAX_THREADS).arrive_and_wait()
        allocator.free(address)

    @cute.jit
    def stage_q(self, mQ: cute.Tensor, address: cute.Pointer, head: Int32, half: Int32, tidx: Int32):
        """Q from global to tensor memory: lanes 0-63 take the even 64-wide chunks of a head, 64-127 the odd."""
        token, _, _ = cute.arch.block_idx()
        for pair in cutlass.range_constexpr(self.chunks // 2):
            rQ = cute.make_rmem_tensor((8, CHUNK // 8), self.element)
            rQ.fill(0.0)
            if head < mQ.shape[1] and 2 * pair + half < self.head_dim // CHUNK:
                gQ = cute.local_tile(mQ[token, head, None], (CHUNK,), (2 * pair + half,))
                cute.autovec_copy(cute.logical_divide(gQ, (8,)), rQ)
            column = self.q_column + pair * (CHUNK // 2)
            tmem.store(address, column, tidx, cute.recast_tensor(rQ, Float32))
        cute.arch.fence_view_async_tmem_store()
        umma.fence_before_thread_sync()
        pipeline.NamedBarrier(Q_READY, SOFTMAX_THREADS + 32).arrive()

    @cute.jit
    def valid_keys(self, lists: tuple, work: tuple, tile: Int32, half: Int32):
        """One bit for each of this thread's 32 keys of a tile: 1 where there is a key."""
        token, _, _ = cute.arch.block_idx()
        entries, window, _, _, entry_tiles = work
        position = tile * TILE_N + half * HALF_N + cute.arch.lane_idx()
        there = cutlass.Boolean(False)
        if tile < entry_tiles:
            there = position < entries
            if cutlass.const_expr(self.entries == "index"):
                if there:
                    there = lists[0][0][token, position] >= 0
        else:
            there = position - entry_tiles * TILE_N < window
        return cute.arch.vote_ballot_sync(there)

    @cute.jit
    def wait_for_o(self, p: pipeline.PipelineAsyncUmma, weights: pipeline.PipelineState):
        """Wait until P V of the tile before ``weights`` is done: its slot of P is free again."""
        before = weights.clone()
        before.advance()
        p.producer_acquire(before)
        umma.fence_after_thread_sync()

    @cute.jit
    def epilogue(
        self,
        mSink: Any,
        rope: Any,
        mO: cute.Tensor,
        mLse: cute.Tensor,
        address: cute.Pointer,
        head: Int32,
        half: Int32,
        tidx: Int32,
        reference: Float32,
        total: Float32,
        any_tile: cutlass.Boolean,
    ):
        """Normalise O by the sum and the sink, rotate, convert and store; the first half's thread writes the LSE."""
        token, _, split = cute.arch.block_idx()
        if cutlass.const_expr(self.partial):
            mO, mLse = mO[split, None, None, None], mLse[split, None, None]
        inside = head < mO.shape[1]
        denominator = total
        if cutlass.const_expr(self.sink):
            if inside:
                denominator = total + cute.math.exp2(mSink[head] * LOG2_E - reference, fastmath=True)
        inverse = cutlass.select_(total > 0.0, cute.arch.rcp_approx(denominator), Float32(0.0))
        rO = cute.make_rmem_tensor(32, Float32)
        lines = self.pv_n // 64  # 32-column lines of a lane a P V instruction writes
        for i in cutlass.range(self.head_dim // 64, unroll=1):
            rO.fill(0.0)
            if any_tile:
                tmem.load(address, 32 * i, tidx, rO)
                cute.arch.fence_view_async_tmem_load()
            rO.store(rO.load() * inverse)
            block = (2 * (i // lines) + half) * lines + i % lines  # of 32 dimensions
            if cutlass.const_expr(self.inverse_rope):
                if block >= self.head_dim // 32 - 2:
                    rotate_back(rO, rope, token, (block + 2 - self.head_dim // 32) * 16)
            if inside:
                gO = cute.logical_divide(cute.local_tile(mO[token, head, None], (32,), (block,)), (8,))
                rOut = cute.make_rmem_tensor((8, 4), mO.element_type)
                rOut.store(rO.load().reshape((8, 4)).to(mO.element_type))
                cute.autovec_copy(rOut, gO)
            cute.arch.sync_warp()
        if inside and half == 0:
            lse = -Float32.inf
            if total > 0.0:
                lse = (reference + cute.math.log2(total)) * math.log(2.0)
            mLse[token, head] = lse
