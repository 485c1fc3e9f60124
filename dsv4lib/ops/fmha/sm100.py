"""Attend as DeepSeek-V4 does on SM100. Heads of tokens read selected entries and window keys, in one launch.

    s_j = scale * (q . kv_j)                       j over {selected compressed entries} u {window keys}
    o   = sum_j e^{s_j} kv_j / (sum_j e^{s_j} + e^{sink})          K and V are the same vectors of 512
    lse = ln sum_j e^{s_j}                         without the sink; -inf and o = 0 where a token has no keys

Source: DSV4 paper eq. 27 (sink in the denominator); the oracle is `dsv4lib.reference.fmha`. One kernel serves the three
kinds of layers: CSA (entries by index list), HCA (entries by index list or as a range of rows) and SWA (window only).

Tile picture (D 512). A CTA has 64 heads of a token (M 64) and walks over its keys in tiles of 64: the entries, then
the window, in one tile where they meet if that saves one (`work`). A tile is fetched once, row by row (TMA gather4) or
in boxes of 64 rows where its keys are 64 consecutive ones, and serves both products: read with the keys as N it is K,
read with the head dimensions as N it is V. Q of a token is fetched in boxes of 64 heads, ahead of its keys and through
the same ring, and copied to tensor memory (`tcgen05.cp`).

    SMEM                            byte         TMEM: 128 lanes x 512 columns
  +------------------------------+ 0                 0             256        384     448     511
  | KV ring  6 stages x 32,768 B |                 0 +--------------+----------+-------+-------+
  |  a stage: 4 chunks of 64 dims|              |    | O 0-127 | O  | Q even   | S 0   | S 1   |  lane = head
  |  chunk: 64 keys x 128 B      |             63    | 256-383 |    | chunks   | even  | even  |
  +------------------------------+ 196,608    64 +--------------+----------+-------+-------+
  | P  2 stages x 64 x 128 B     |              |    | O 128-255 |  | Q odd    | S 0   | S 1   |  lane = 64 + head
  +------------------------------+ 212,992   127    | 384-511 |    | chunks   | odd   | odd   |
  | score exchange 128 x 128 B   |                   +--------------+----------+-------+-------+
  +------------------------------+ 229,376
  | row exchange 3 x 512 B, mbarriers, TMEM address
  +------------------------------+ 231,124

Why M 64 in the weight-stationary MMA (`tcgen05.mma.ws`). The fp32 O of 128 rows would fill all 512 columns and leave
none for S. With 64 rows, `.ws` puts the left half of N in lanes 0-63 and the right half in lanes 64-127, so O takes 256
columns and all lanes work. Q is the A operand in TMEM: each half of the lanes multiplies its own A, so Q takes only 128
columns for 64 rows x 512 dims, and a S tile is computed as two sums over half the dimensions (chunks 0, 2, 4, 6 in
the upper lanes, 1, 3, 5, 7 in the lower) which the softmax warps add. Q stays in SMEM only until it is
copied, which buys a third tile of keys.

Why a tile is two stages, dimensions 0-255 and 256-511, each a block of O: P V of the first block frees its half of the
tile while the second is multiplied, so that loads are half a tile further ahead; Q K^T begins with the half that is
there. Modelled, a tile takes 1,571 clocks so and 1,860 with three whole stages.

128 heads: `cluster` 2, a pair of CTAs that multiply together (`cta_group::2`, M 128), 64 rows each. Every CTA keeps its
half of the dimensions, 256, of all keys; nothing is loaded twice. A share of N comes from each CTA, and 64 lanes
of both hold it (accumulator layout B): S again as two sums over half the dimensions, one a CTA's, O in two halves.

    SMEM of CTA c                   byte         TMEM of each CTA, its 64 heads
  +------------------------------+ 0                 0             256        384     448     511
  | KV ring  6 stages x 32,768 B |                 0 +--------------+----------+-------+-------+
  |  a stage: 4 chunks, dims     |              |    | O 0-255      | Q 0-255  | S 0   | S 1   |  lane = head
  |  256 c .. 256 c + 255        |             63    |              |          | 0-255 | 0-255 |
  |  chunk: 64 keys x 128 B      |             64    +--------------+----------+-------+-------+
  +------------------------------+ 196,608      |    | O 256-511    | Q 256-   | S 0   | S 1   |  lane = 64 + head
  | P, exchanges as above        |            127    |              | 511      | 256-  | 256-  |
  +------------------------------+ 230,912           +--------------+----------+-------+-------+

Why so, for 128 heads and 128 keys on one SM: MMAs take 2,048 clocks, as many as the multiply-adds need. Two CTAs as
above, also with every tile multicast, read 368 KiB of SMEM, 2,944 clocks; a pair that loads its 64 keys and
its 256 dims of V, as `cta_group::2` wants two tiles, gets 128 KiB from L2, 2,731 clocks. Here it is 240 KiB and
64 KiB: only the MMAs remain. (128 B a clock from SMEM, 48 from L2.) And a stage is half as large: 6 of 32 KiB.

What Q in TMEM rests on. The ISA shows for M 128 of a pair two groups of 64 lanes, each with all rows of its CTA and
half of N; that each group multiplies the A of its own lanes it does not say. CUTLASS stores such an A twice, in both
groups (`TmemAllocMode::Duplicated`), which is needed only if each reads its own; DeepSeek's FlashMLA (SM100, 128
heads, small top-k) puts different dimensions into them as here. The emulator follows; no B200 has confirmed it.

Several tokens in a tile: `groups`. Rows are heads of adjacent tokens that read nearly the same keys (SWA inside a
chunk, HCA under the limit per query), 64 // H of them, or 128 // H over a cluster. A CTA walks over the union of their
ranges; a row masks what its own token does not see. Never for index lists: in CSA each token selects its own entries.

CTAs are persistent. The grid has as many CTAs as run at once; each keeps its heads and its split of the keys and takes
every n-th token (or group), one after the other, without a pause in its pipelines: tiles of the next token are loaded
while this one's are multiplied, and the transition from token to token runs under both. In a pair (alone, Q' and S 0'
come after P V n-1: the ring has no room for two tiles and Q'):

    tensor core   .. S n-1 | P V n-2 | Q' -> TMEM | S 0' | P V n-1 | S 1' | P V 0'    | S 2' ..
    softmax       .. n-2 ..| ........ n-1 .........      | ....... 0' ....| ..... 1' .....
    epilogue                                                   | read, store | read, store |       blocks of O
    loads         .. Q'    0'    1'    2' ..  (as far ahead as there are stages)

Q' may go to TMEM when Q K^T of tile n - 1 is done: the MMA warp waits for that, as the ISA orders a copy before later
MMAs, but not after earlier ones. P V of 0' may overwrite a block of O when all epilogue warps have read it. Softmax
warps hand over row_sum and row_max and go on. Every role computes the next token by itself; there is no scheduler warp.
A token without keys takes nothing: no Q, no stage.

Roles (12 warps, 384 threads: a warpgroup for the epilogue, or with FP8 keys to dequantise)

    warps 0-3   softmax   allocate TMEM; a tile: S -> registers, P -> SMEM, rescale O if needed
    warp  4     mma       a token: 16 copies of 128 x 32 B (Q); a tile: 16 MMAs 64 x 128 x 16 (S), 8 MMAs 64 x 256 x 16
                          (O); S of tile j + 1 before P V of j
    warps 5-7   load      a tile of 16-bit rows: 8 boxes of 64 rows, else 128 gather4 of 4 rows, a third each (warp 5
                          alone where TMA brings no keys); Q: 8 boxes of 64 heads, of groups 128 gather4; a pair: of
                          keys 4 or 64 a CTA, by two warps if all of O is its own, and only CTA 0's MMA warp works: 16
                          MMAs 128 x 128 x 16, 8 of 128 x 256 x 16
    warps 8-11  epilogue  a token: O -> registers, normalised, rotated, converted -> global memory; LSE
    warps 8-11  dequant   a tile of 584-byte entries: 16 keys a warp, registers -> stage, loads of the next tile;
                          beside them no registers are left for epilogue warps: warps 0-3 do that too

FP8 keys (`fp8_entries`, `fp8_window`) come in pages of any size and stride, see `dsl.kv_entry`; P V and Q K^T see
the same bf16 tile as with TMA, bit for bit:

    page                                              4 warps, registers                   KV stage
  +------------------------------------------+     +-----------------------------+     +---------------------+
  | n x 576 B: 448 E4M3 | 64 bf16 (RoPE)     | --> | 16 B of every 64 B, 4 lanes | --> | chunk 0-6: x scale  |
  | n x   8 B: 7 scales 2^e | -              | --> | a key; a tile ahead: 36 KiB | cvt | chunk 7: RoPE dims  |
  | padding                                  |     +-----------------------------+     +---------------------+
  +------------------------------------------+       zeros for -1 and past the last key

Why three load warps. A copy takes its operands from uniform registers, so one lane sends all copies of a warp, four
rows moved once for 8 copies (`bench.probes.issue_probe`, an H200; boxes of 4 rows, as it has no gather4):

    clocks     lanes that each issue   one lane   a tile: 1 warp   2 warps   4 warps   8 boxes of 64 rows
               42.5 a copy             25.5       3,270            1,830     990       620, bound by bytes

Boxes serve the window and entries by range, but for the tiles at their ends, where rows past the last key must arrive
as zeros.

Pipelines

    kv   TMA -> UMMA       6 stages   full: 32,768 bytes have landed       empty: commit after P V of its block, or
                                      (Q takes 2 of them)                    after the copies of Q
         dequant -> UMMA   3 stages   full: one arrival a dequant warp, after a proxy fence, and one a load warp,
                                      whose TMA brings Q and 16-bit keys; a stage is a whole tile, or Q
    s    UMMA -> softmax   2 stages   full: commit after Q K^T; of groups  empty: one arrival a softmax warp
                                      an arrival: the keys have landed
    p    softmax -> UMMA   2 stages   full: one arrival a softmax warp     empty: commit after P V (O is up to date)
    o    UMMA -> epilogue  a block    full: commit after the last P V      empty: one arrival an epilogue warp, once the
                           of O each                                       block is in registers or stored
    sums softmax -> epi.   1 stage    full: one arrival a softmax warp     empty: one arrival an epilogue warp

Of a pair, what the MMA warp waits for is counted in CTA 0: the bytes of both (`.cta_group::2` of TMA), the arrivals of
the softmax and epilogue warps of both; its commits go to both (multicast).

Online softmax. Exponents are relative to a row_max that follows the maximum only when that grew by more than 2^4: P
stays below 2^4, row_sum in fp32, and O is rescaled in TMEM rarely. The result is the exact formula. Lazy rescaling
costs accuracy: P is rounded to bf16 while row_sum is fp32, so the largest entry of P is no longer exactly 1. A warp
rescales when one of its 32 rows has to. On the numbers of `bench.peers` (64 heads):

    threshold   error     warp-instructions per 128 keys
    2^2         1.97e-3   4,318
    2^4         2.04e-3   3,222
    2^8         2.11e-3   3,050

Launches overlap (`griddepcontrol`): barriers and tensor memory are made and tensor maps fetched while the kernel before
ends. Each role waits for that kernel before it touches global memory, to read or to write. Successors may start as soon
as tensor memory is allocated, and wait themselves. Completion of this kernel implies completion of its predecessors,
because it ends only after its own griddepcontrol.wait.

Few tokens leave SMs idle. Splits of the keys (`partial`) run beside each other and are added up by `combine`; a last
split may be of another length, for as many CTAs as whole splits leave idle (`work.KeySplits`). Splits of the dimensions
(`dim_splits`) need no combine: two CTAs (or pairs) weigh the same keys, and each has its blocks of O.

A pair's CTAs leave together: each frees its tensor memory when the other is ready to, after its last arrival; commits
from CTA 0 are all waited for, the last ones by CTA 1's load warp.

What limits it. A tile costs 64 KiB of L2 reads (a CTA, or a pair) and 2 x 64 x 64 x 512 multiply-adds a CTA; see
`bench` for the model.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, memory, pipeline

from dsv4lib.dsl import pipelines, tmem, umma
from dsv4lib.ops.fmha.config import (
    HALF_N,
    LOAD_WARP,
    LOG2_E,
    MMA_WARP,
    P_STAGES,
    ROW_BYTES,
    S_STAGES,
    SOFTMAX_THREADS,
    SOFTMAX_WARPS,
    TILE_M,
    TILE_N,
    TMEM_READY,
)
from dsv4lib.ops.fmha.dequant import Dequant
from dsv4lib.ops.fmha.epilogue import Epilogue, EpilogueRings
from dsv4lib.ops.fmha.load import KeySources, QSource
from dsv4lib.ops.fmha.mma import Mma, MmaRings
from dsv4lib.ops.fmha.softmax import SharedMemory, Softmax, SoftmaxRings
from dsv4lib.ops.fmha.work import KeyList, KeyLists, KeyRows, KeySplits, Outputs


class Fmha(Dequant, Mma, Softmax, Epilogue):
    """Attention with 64 heads of a token at a time a CTA. Options as `Config`, a role of the docstring a base class."""

    # ------------------------------------------------------------------ host

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        entries: KeyRows,
        window: KeyRows,
        mGroups: Any,
        mSink: Any,
        rope: Any,
        mO: cute.Tensor,
        mLse: cute.Tensor,
        scale: Float32,
        splits: KeySplits,
        sms: Int32,
        q_pitch: Int64,
        stream: cuda.CUstream,
    ):
        """Host side: TMA descriptors of both pools and the launch.

        Args:
            mQ: [T, H, D].
            entries, window: keys, or None; a window by index with ``window_index``.
            mGroups: [G, 2] int32, first token and number of tokens of each group, or None. A group's tokens are at most
                64 ``cluster`` / H, and the ranges of those that have keys form one interval.
            mSink: [H] fp32 or None.
            rope: `rope.Tables` or None.
            mO: [T, H, D] in ``dtype``; partial: [splits, T, H, D] fp32.
            mLse: [T, H] fp32; partial: [splits, T, H]; raw: [splits, T, H, 2], row_max and row_sum.
            scale: of the dot products.
            splits: how the keys are split; one split unless partial.
            sms: CTAs that the GPU runs at once; each takes as many tokens or groups as it must.
            q_pitch: a divisor of both of Q's strides: rows of this pitch are Q as a matrix, see `arguments.q_pitch`.
            stream: where the launch is queued.
        """
        sources, queries = self.key_sources(entries, window), self.q_source(mQ, q_pitch)

        @cute.struct
        class Storage:
            sKV: cute.struct.Align[
                cute.struct.MemRange[cutlass.Uint8, self.kv_stages * self.stage_bytes], umma.SWIZZLE_ATOM
            ]
            sP: cute.struct.Align[cute.struct.MemRange[self.element, P_STAGES * TILE_M * TILE_N], umma.SWIZZLE_ATOM]
            sX: cute.struct.Align[cute.struct.MemRange[Float32, SOFTMAX_THREADS * HALF_N], 16]
            sRow: cute.struct.MemRange[Float32, ROW_BYTES // 4]
            kv_barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.kv_stages]
            s_barriers: cute.struct.MemRange[cutlass.Int64, 2 * S_STAGES]
            p_barriers: cute.struct.MemRange[cutlass.Int64, 2 * P_STAGES]
            o_barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.o_blocks]
            sum_barriers: cute.struct.MemRange[cutlass.Int64, 2]
            free_barrier: cute.struct.MemRange[cutlass.Int64, self.cluster - 1]
            tmem_address: cutlass.Int32

        self.storage = Storage
        blocks = mQ.shape[0] if cutlass.const_expr(not self.groups) else mGroups.shape[0]
        head_blocks = cute.ceil_div(mQ.shape[1], TILE_M * self.cluster)
        ctas = head_blocks * (self.cluster * self.dim_splits)  # of an item
        n, last, _ = splits
        per_split = cutlass.min(blocks, cutlass.max(sms // (ctas * n), 1))
        grid = (per_split, ctas, n)
        if cutlass.const_expr(self.partial):
            if last > 0:
                per_split = cutlass.min(blocks, cutlass.max((sms // ctas - last) // (n - 1), 1))
                grid = (per_split * (n - 1) + last, ctas, Int32(1))
        lists = KeyLists(
            None if cutlass.const_expr(self.entries == "none") else KeyList(*entries[1:]),
            None if cutlass.const_expr(not self.window) else KeyList(*window[1:]),
        )
        outputs = Outputs(mSink, rope, mO, mLse)
        self.kernel(mQ, queries, sources, lists, mGroups, outputs, scale * LOG2_E, splits, per_split).launch(
            grid=grid,
            block=(self.threads, 1, 1),
            min_blocks_per_mp=self.min_blocks,
            cluster=(1, self.cluster, 1) if self.cluster > 1 else None,
            stream=stream,
            use_pdl=True,
        )

    # ---------------------------------------------------------------- device

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        queries: QSource,
        sources: KeySources,
        lists: KeyLists,
        mGroups: Any,
        outputs: Outputs,
        scale_log2: Float32,
        splits: KeySplits,
        per_split: Int32,
    ):
        """Set up with all warps, then run one role in each.

        Set-up overlaps the end of the kernel before; roles wait for it.
        """
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOAD_WARP:
            self.prefetch_maps(queries, sources)
        storage = memory.SmemAllocator().allocate(self.storage)
        kv = self.kv_pipeline(storage.kv_barriers.data_ptr())
        s_barriers, arrivals = storage.s_barriers.data_ptr(), 1 + self.groups
        s = pipelines.umma_to_warps(S_STAGES, len(SOFTMAX_WARPS), s_barriers, self.cluster, arrivals)
        p = pipelines.warps_to_umma(P_STAGES, len(SOFTMAX_WARPS), storage.p_barriers.data_ptr(), self.cluster)
        o = pipelines.umma_to_warps(self.o_blocks, len(SOFTMAX_WARPS), storage.o_barriers.data_ptr(), self.cluster)
        sums = pipelines.warps_to_warps(1, len(SOFTMAX_WARPS), len(SOFTMAX_WARPS), storage.sum_barriers.data_ptr())
        free = storage.free_barrier.data_ptr() if self.cluster > 1 else None
        users = self.tmem_threads + 32
        allocator = tmem.allocator(storage.tmem_address.ptr, TMEM_READY, users, SOFTMAX_WARPS[0], free)
        cluster = pipelines.cluster_layout(self.cluster)
        pipeline.pipeline_init_arrive(cluster, is_relaxed=True)
        pipeline.pipeline_init_wait(cluster)

        items = self.items(mQ, mGroups, splits, per_split)
        outputs = self.of_split(outputs, items)
        sKV = storage.sKV.data_ptr().toint()
        sP, sRow = storage.sP.data_ptr().toint(), storage.sRow.get_tensor(cute.make_layout((SOFTMAX_THREADS, 3)))
        if warp < MMA_WARP:
            sX = storage.sX.get_tensor(cute.make_layout((4, SOFTMAX_THREADS, HALF_N // 4), stride=(1, 4, 512)))
            shared = SharedMemory(sP, sX, sRow, sKV)
            self.softmax(mQ, lists, items, outputs, shared, allocator, SoftmaxRings(s, p, o, sums), scale_log2)
        elif warp == MMA_WARP:
            self.mma(lists, items, sKV, sP, allocator, MmaRings(kv, s, p, o))
        elif warp < LOAD_WARP + self.load_warps:
            self.load(mQ, queries, sources, lists, items, sKV, kv, warp - LOAD_WARP)
        else:
            if cutlass.const_expr(self.epilogue_warps):
                if warp >= self.epilogue_warps[0]:
                    self.epilogue(mQ, lists, items, outputs, sRow, allocator, EpilogueRings(o, sums))
            if cutlass.const_expr(self.dequant_warps):
                if warp >= self.dequant_warps[0]:
                    self.dequantise(sources, lists, items, sKV, kv)
