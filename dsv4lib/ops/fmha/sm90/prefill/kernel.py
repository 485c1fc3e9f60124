"""Attention on Hopper over 584-byte entries, tiles in pairs. 64 heads of a token at a time.

    s_j = scale * (q . kv_j)        o = sum_j e^{s_j} kv_j / (sum_j e^{s_j} + e^{sink})        j over entries and window

`DecodeFmha` computes S twice, in both warpgroups, which then share nothing: right where a few tiles decide how long a
launch takes. Here MMAs do, and S is computed once (`attend`). The bits are the same.

Tile picture (`budget` computes the numbers)

    64 keys                      registers of 8 warps            SMEM                      2 math warpgroups
    index -> 576 + 8 B --ld-->  |  9 words a lane, a tile  | -> | keys 2 x 65,536 B | ---> S 64 x 64 of one tile each
             an entry           | ahead; E4M3 -> bf16 x 2^e|    | a bit a key       |  |
                                +--------------------------+    | Q 65,536 B        | <-+   P = exp2(S - row_max)
    Q 64 x 512 -----------------cp.async--------------------->  | P 2 x 8,192 B     | <-->  exchanged, bf16
                                                                | rows 2 x 2,048 B  | <-->  row_max, row_sum
                                                                +-------------------+ ---> O 64 x 256 each, fp32

Roles (4 warpgroups, 512 threads)

    warps 0-3    math 0     S and P of the first tile of a pair; P V of both, dimensions 0 - 255 (`attend`)
    warps 4-7    math 1     the same of the second tile, dimensions 256 - 511
    warps 8-15   producer   Q of the next token, 8 keys each of tile after tile (`prefill.keys`, `sm90.keys`)

Pipelines

    keys     producer -> math, 2 stages   of each half of the dimensions. full: an arrival a producer thread; empty: one
                                          a warp of the warpgroup that multiplies P by it
    Q        producer -> math, 1 stage    full: a producer thread's copies, and one; empty: one a math warp, after its
                                          last S of the token
    P        math <-> math, two named barriers: P of tile 0 is there; P of tile 1 is, and P of tile 0 was read

CTAs are persistent: token after token, round robin, so that loads of the next token's Q and keys overlap the end of
one. A grid of CTAs x blocks of 64 heads x splits of the keys, which `ops.fmha.combine` adds up.

A pair's order hides softmax and conversions: P0 while S1 is computed, P1 while P0 V0 is, the next K0 while P1 V1 is.
What limits it is in data/bench/fmha.md: loads that the producer waits for, in the chain from one pair to the next.

Source: DSV4 paper eq. 27; PTX ISA, "wgmma", "Matrix Descriptor Format". Two warpgroups that exchange P: FlashMLA's
prefill on SM90.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, memory

from dsv4lib.dsl.budget import SMEM_ALIGN
from dsv4lib.ops.fmha.config import LOG2_E, P_BYTES, TILE_M
from dsv4lib.ops.fmha.sm90.config import (
    MATH_WARPS,
    Q_BYTES,
    STAGE_BYTES,
    STAGES,
)
from dsv4lib.ops.fmha.sm90.keys import KeySources, Ring
from dsv4lib.ops.fmha.sm90.prefill.attend import Exchange, PrefillAttend
from dsv4lib.ops.fmha.sm90.prefill.config import ROWS_BYTES, PrefillConfig
from dsv4lib.ops.fmha.sm90.prefill.keys import HALVES, Queries
from dsv4lib.ops.fmha.work import Items, KeyList, KeyLists, KeyRows, KeySplits, Outputs


class PrefillFmha(PrefillAttend, PrefillConfig):
    """Attention of many tokens over 584-byte entries on Hopper. Options as `PrefillConfig`."""

    # ------------------------------------------------------------------ host

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        entries: KeyRows,
        window: KeyRows,
        mSink: Any,
        rope: Any,
        mO: cute.Tensor,
        mLse: cute.Tensor,
        scale: Float32,
        splits: KeySplits,
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        """Host side: the launch. Arguments as of `DecodeFmha`; ctas: of each split and block of heads."""

        @cute.struct
        class Storage:
            q: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, Q_BYTES], SMEM_ALIGN]
            keys: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, STAGES * STAGE_BYTES], SMEM_ALIGN]
            p: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, STAGES * P_BYTES], SMEM_ALIGN]
            rows: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, STAGES * ROWS_BYTES], 16]
            valid: cute.struct.Align[cute.struct.MemRange[Int32, 2 * STAGES], 8]
            full: cute.struct.MemRange[cutlass.Int64, HALVES * STAGES]
            empty: cute.struct.MemRange[cutlass.Int64, HALVES * STAGES]
            q_full: cute.struct.MemRange[cutlass.Int64, 1]
            q_empty: cute.struct.MemRange[cutlass.Int64, 1]
            pairs: cute.struct.MemRange[Int32, 1]

        self.storage = Storage
        lists = KeyLists(
            None if cutlass.const_expr(self.entries == "none") else KeyList(*entries[1:]),
            None if cutlass.const_expr(not self.window) else KeyList(*window[1:]),
        )
        sources, outputs = self.key_sources(entries, window), Outputs(mSink, rope, mO, mLse)
        self.kernel(mQ, sources, lists, outputs, scale * LOG2_E, splits).launch(
            grid=(ctas, cute.ceil_div(mQ.shape[1], TILE_M), splits.splits),
            block=(self.threads, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,
        )

    # ---------------------------------------------------------------- device

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        sources: KeySources,
        lists: KeyLists,
        outputs: Outputs,
        scale_log2: Float32,
        splits: KeySplits,
    ):
        """Set-up shared by all warps, then one role each."""
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = memory.SmemAllocator().allocate(self.storage)
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
        q_full, q_empty = storage.q_full.data_ptr(), storage.q_empty.data_ptr()
        if tidx == 0:
            for i in cutlass.range_constexpr(HALVES * STAGES):
                cute.arch.mbarrier_init(full + i, 32 * self.producer_warps)
                cute.arch.mbarrier_init(empty + i, MATH_WARPS // HALVES)
            cute.arch.mbarrier_init(q_full, 32 * self.producer_warps + 1)
            cute.arch.mbarrier_init(q_empty, MATH_WARPS)
            cute.arch.mbarrier_init_fence()
        cute.arch.barrier(barrier_id=0, number_of_threads=self.threads)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        first, _, split = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        items = Items(None, splits, split, first, mQ.shape[0], step)
        valid = storage.valid.get_tensor(cute.make_layout((2, STAGES)))
        ring = Ring(storage.keys.data_ptr().toint(), valid, full, empty)
        pairs = storage.pairs.get_tensor(cute.make_layout(1))
        queries = Queries(storage.q.data_ptr().toint(), pairs, q_full, q_empty)
        exchange = Exchange(storage.p.data_ptr().toint(), storage.rows.data_ptr().toint())
        if warp >= MATH_WARPS:
            cute.arch.setmaxregister_decrease(self.registers.producer)
            self.produce_all(mQ, sources, lists, items, ring, queries)
        else:
            cute.arch.setmaxregister_increase(self.registers.math)
            sink, rope, mO, mLse = outputs
            if cutlass.const_expr(self.partial):
                mO, mLse = mO[split, None, None, None], mLse[split, None, None]
            own = Outputs(sink, rope, mO, mLse)
            self.attend_all(mQ.shape[1], items, ring, queries, exchange, own, scale_log2)
