"""Attend to a paged cache of latents on SM100 (MLA decode, absorbed).

    s_t = scale * (q_nope . c_t + q_pe . r_t)      t over the request's tokens; entry t: latent c_t (512), key r_t (64)
    out = sum_t softmax(s)_t c_t                   lse = ln sum_t e^{s_t}; -inf and out = 0 without tokens

It is MQA whose keys are 576 dims and whose values are the first 512 of the same entries.

Up to 64 heads: one CTA. A tile of 64 tokens is loaded once and serves both products: read with its tokens as N it is K,
read with its dims as N it is V.

    SMEM (16 bits)                  byte         TMEM: 128 lanes x 512 columns
  +------------------------------+ 0                 0         128        256   288   320
  | Q  9 chunks x 64 heads x 128 B|               0 +---------+----------+-----+-----+
  +------------------------------+ 73,728         | | O       | O        | S 0 | S 1 |   lane = head
  | latents  4 stages x 32,768 B |             63 | | 0-127   | 256-383  | 0-31| 0-31|
  |  a stage: 64 tokens, 256 dims|             64 +-+---------+----------+-----+-----+
  |  = 4 chunks of 64 x 128 B    |                | | O       | O        | S 0 | S 1 |   lane = 64 + head
  +------------------------------+ 204,800    127 | | 128-255 | 384-511  |32-63|32-63|   S: tokens of the tile
  | rotated keys  2 x 8,192 B    |                +-+---------+----------+-----+-----+
  +------------------------------+ 221,184
  | P  64 heads x 128 B          |
  +------------------------------+ 229,376
  | row exchange 3 x 512 B, mbarriers, TMEM address
  +------------------------------+ 231,108

Why M 64 in the weight-stationary MMA (`tcgen05.mma.ws`): the fp32 O of 128 heads x 512 dims would fill tensor memory.
With 64 rows the left half of N lies in lanes 0-63 and the right half in 64-127, so O takes 256 columns, and each score
has one thread. A tile is two stages, each a block of O: P V of the first block frees its half of a tile while the
second is multiplied.

65 to 128 heads: a pair of CTAs (`cta_group::2`, M 128), 64 heads each, tiles of 128 tokens, as in CUTLASS. The tensor
core takes half of N from each CTA, and leaves it in 64 lanes of both: S of tokens 0-63 and 64-127, O of two chunks of
dims. So CTA r brings as keys all dims of 64 tokens, and as values its chunk of dims of all 128: values are loaded a
second time, from L2. S takes 2 x 64 columns, 384 of 512 with O.

    SMEM of a CTA (16 bits)         byte
  +------------------------------+ 0            a stage is 64 tokens x 128 dims of keys, or 128 tokens x 64 dims of
  | Q  as above                  |              values; they come as they are multiplied:
  +------------------------------+ 73,728
  | latents  7 stages x 16,384 B |                  K 0 | K 1 | V 0 | K 2 | V 1 | ..     4 stages each
  +------------------------------+ 188,416
  | rotated keys  2 x 8,192 B    |
  +------------------------------+ 204,800
  | P  2 chunks x 64 x 128 B     |
  +------------------------------+ 221,184
  | row exchange, mbarriers, TMEM address
  +------------------------------+ 222,972

FP8 (E4M3 queries and entries, `kind::f8f6f4`): a chunk is 128 dims, rotated dims (alone P, too) are rows of 64 bytes
with the 64-byte swizzle. P is relative to a row_max that is 2^4 below the maximum, so that it uses E4M3's range; its 4
significant bits make an error of 2.6 % RMS.

FP8 entries and bf16 queries: Q and P are sums of two E4M3 numbers (`queries`), so the error is that of bf16. Q takes as
much of SMEM as in bf16, and there are twice the MMAs of FP8, as many clocks as of bf16. The softmax warps make Q once
an item, and the pipeline `q` begins with an arrival of each.

Roles (6 warps, 192 threads)

    warps 0-3   softmax   allocate TMEM; a tile: S -> registers, P -> SMEM, rescale O if needed; then out and LSE
    warp  4     mma       a tile: 36 MMAs 64 x 64 x 16 (S), 8 MMAs 64 x 256 x 16 (O); S of tile j + 1 before P V of j;
                          of a pair CTA 0's alone: 36 MMAs 128 x 128 x 16, 32 MMAs 128 x 128 x 16
    warp  5     load      an item: 9 boxes of 64 heads (Q); a tile: 9 boxes a page, by the lane that has the page; in a
                          pair 9 for each page of its 64 tokens, 4 for each of the 128

Pipelines

    q    TMA -> UMMA       1 stage    full: 73,728 bytes                   empty: commit after the item's last Q K^T
    pe   TMA -> UMMA       2 stages   full: 8,192 bytes                    empty: commit after Q K^T
    kv   TMA -> UMMA       4 stages   full: 32,768 bytes                   empty: commit after P V of its block
         a pair            7 stages   full: 16,384 bytes of each CTA       empty: commit after its MMAs
    s    UMMA -> softmax   2 stages   full: commit after Q K^T, and an     empty: one arrival a softmax warp
                                      arrival: values have landed
    p    softmax -> UMMA   1 stage    full: one arrival a softmax warp     empty: commit after P V (O is up to date)
    o    UMMA -> softmax   a block    full: commit after the last P V      empty: not waited for, P of the next item's
                                                                           first tile comes after O has been read

Of a pair, what the MMA warp waits for is counted in CTA 0; its commits go to both. The arrival at `s` lets softmax
warps write zeros over values past a request's end. In a pair these are values of the last tile, so that arrival comes
once they have landed, after P V of the tile before.

Heads that are not there are zeros of TMA (H 5: 59 of 64 rows) and are not stored: rows of an MMA are independent, so
nothing leaks. They cost as much as others: H 1 takes the time of H 64, H 65 that of H 128.

What limits it, modelled, not measured: clocks of a CTA for 128 tokens in bf16, 148 SMs at 1.9 GHz

                                                        64 heads   128 heads     128 heads
                                                        one CTA    two such CTAs  a pair
    bytes from DRAM at 8 TB/s, 28 B a clock of an SM    5,270      2,630          2,630
    bytes from L2, 48 B a clock                         3,070      3,070          2,900
    operands from SMEM, 128 B a clock                   3,580      3,580          2,180
    multiply-adds, 4,096 a clock                        2,180      2,180          2,180

So up to 64 heads are bound by DRAM; 128 by L2, a tenth above DRAM. A ring of 64 KiB is on its way while as much is
multiplied: what latency that hides is not modelled.

Items of a persistent launch (fewer CTAs than items) follow each other in a CTA: the next one's Q waits for the last
Q K^T, its softmax for the epilogue, which the same warps do.

Launches overlap as in `ops.fmha`: all roles wait for the kernel before, and successors may start as soon as tensor
memory is allocated.

Source: DeepSeek-V2, 2.1.2 and C (absorbed); CUTLASS, examples/77_blackwell_fmha (MLA) for the pair's split of operands.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, memory, pipeline

from dsv4lib.dsl import pipelines, tmem, umma
from dsv4lib.ops.mla_decode.config import (
    HEADS,
    LOAD_WARP,
    LOG2_E,
    MMA_WARP,
    P_STAGES,
    PE_STAGES,
    S_STAGES,
    SOFTMAX_THREADS,
    SOFTMAX_WARPS,
    THREADS,
    TMEM_READY,
)
from dsv4lib.ops.mla_decode.load import Addresses, Load, Sources
from dsv4lib.ops.mla_decode.mma import Mma, MmaRings
from dsv4lib.ops.mla_decode.queries import QueryTensors
from dsv4lib.ops.mla_decode.softmax import Softmax, SoftmaxRings
from dsv4lib.ops.mla_decode.work import Outputs, Requests


class MlaDecode(Load, Mma, Softmax):
    """MLA decode with 64 heads of a request at a time a CTA. Options as `Config`; a base class for each role."""

    # ------------------------------------------------------------------ host

    @cute.jit
    def __call__(
        self,
        mQNope: cute.Tensor,
        mQPe: cute.Tensor,
        mCache: cute.Tensor,
        requests: Requests,
        outputs: Outputs,
        scale: Float32,
        num_splits: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        """Host side: TMA descriptors and the launch.

        Args:
            mQNope: [B, H, 512]. mQPe: [B, H, 64]. mCache: [P, page, 576].
            requests: lengths and page table. outputs: what is written.
            scale: of dot products of stored numbers. num_splits: of the tokens; 1 unless partial.
            ctas: at most so many (a pair: 2 at least); each takes as many items as it must.
            stream: where the launch is queued.
        """

        @cute.struct
        class Storage:
            sQ: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.q_bytes], umma.SWIZZLE_ATOM]
            sKV: cute.struct.Align[
                cute.struct.MemRange[cutlass.Uint8, self.kv_stages * self.stage_bytes], umma.SWIZZLE_ATOM
            ]
            sPe: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, PE_STAGES * self.pe_bytes], umma.SWIZZLE_ATOM]
            sP: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, P_STAGES * self.p_bytes], umma.SWIZZLE_ATOM]
            sRow: cute.struct.MemRange[Float32, SOFTMAX_THREADS * self.row_slots]
            q_barriers: cute.struct.MemRange[cutlass.Int64, 2]
            kv_barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.kv_stages]
            pe_barriers: cute.struct.MemRange[cutlass.Int64, 2 * PE_STAGES]
            s_barriers: cute.struct.MemRange[cutlass.Int64, 2 * S_STAGES]
            p_barriers: cute.struct.MemRange[cutlass.Int64, 2 * P_STAGES]
            o_barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.blocks]
            free_barrier: cute.struct.MemRange[cutlass.Int64, self.cluster - 1]
            tmem_address: cutlass.Int32

        self.storage = Storage
        batch, heads, _ = mQNope.shape
        items = batch * num_splits * cute.ceil_div(heads, HEADS * self.cluster)
        sources = self.sources(mQNope, mQPe, mCache)
        queries = QueryTensors(mQNope, mQPe) if cutlass.const_expr(self.limbs > 1) else None
        self.kernel(heads, queries, sources, requests, outputs, self.exponent_scale(scale), num_splits).launch(
            grid=(cutlass.min(items, cutlass.max(ctas // self.cluster, 1)), self.cluster, 1),
            block=(THREADS, 1, 1),
            cluster=(1, self.cluster, 1) if self.cluster > 1 else None,
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    def exponent_scale(self, scale: Float32) -> Float32:
        """Return the scale of powers of two, which softmax takes in place of powers of e."""
        return scale * LOG2_E

    # ---------------------------------------------------------------- device

    @cute.kernel
    def kernel(
        self,
        heads: Int32,
        queries: Any,
        sources: Sources,
        requests: Requests,
        outputs: Outputs,
        scale_log2: Float32,
        num_splits: Int32,
    ):
        """Set up with all warps, then run one role in each.

        Set-up overlaps the end of the kernel before; roles wait for it.
        """
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOAD_WARP:
            self.prefetch_maps(sources)
        storage: Any = memory.SmemAllocator().allocate(self.storage)
        starts = (storage.q_barriers, storage.kv_barriers, storage.pe_barriers)
        load = self.load_rings(*(barriers.data_ptr() for barriers in starts))
        softmax_warps = len(SOFTMAX_WARPS)
        s_barriers, p_barriers = storage.s_barriers.data_ptr(), storage.p_barriers.data_ptr()
        s = pipelines.umma_to_warps(S_STAGES, softmax_warps, s_barriers, self.cluster, arrivals=2)
        p = pipelines.warps_to_umma(P_STAGES, softmax_warps, p_barriers, self.cluster)
        o = pipelines.umma_to_warps(self.blocks, softmax_warps, storage.o_barriers.data_ptr(), self.cluster)
        free = storage.free_barrier.data_ptr() if self.cluster > 1 else None
        users = SOFTMAX_THREADS + 32
        allocator = tmem.allocator(storage.tmem_address.ptr, TMEM_READY, users, SOFTMAX_WARPS[0], free)
        cluster = pipelines.cluster_layout(self.cluster)
        pipeline.pipeline_init_arrive(cluster, is_relaxed=True)
        pipeline.pipeline_init_wait(cluster)

        items = self.items(heads, requests, num_splits)
        buffers = (storage.sQ, storage.sKV, storage.sPe, storage.sP)
        shared = Addresses(*(buffer.data_ptr().toint() for buffer in buffers))
        if warp < MMA_WARP:
            sRow = storage.sRow.get_tensor(cute.make_layout((SOFTMAX_THREADS, self.row_slots)))
            rings = SoftmaxRings(load.q, s, p, o)
            self.softmax(heads, queries, requests, items, outputs, shared, sRow, allocator, rings, scale_log2)
        elif warp == MMA_WARP:
            self.mma(requests, items, shared, allocator, MmaRings(load, s, p, o))
        else:
            self.load(requests, items, sources, shared, load)
