"""Attention of decode steps on Hopper over 584-byte entries. 64 heads of a token a CTA, keys dequantised on the way.

    s_j = scale * (q . kv_j)        o = sum_j e^{s_j} kv_j / (sum_j e^{s_j} + e^{sink})        j over entries and window

Tile picture (`budget` computes the numbers)

    64 keys                      registers of 8 warps            SMEM                      2 math warpgroups
    index -> 576 + 8 B --ld-->  |  9 words a lane, a tile  | -> | keys 2 x 65,536 B | ---> S 64 x 64   (both: all heads,
             an entry           | ahead; E4M3 -> bf16 x 2^e|    | a bit a key       |  |                all dimensions)
                                +--------------------------+    | 4 mbarriers       |  |   P = exp2(S - row_max), bf16
    Q 64 x 512 -----------------cp.async--------------------->  | Q 65,536 B        | -+-> O 64 x 256 each, fp32
                                                                +-------------------+

Roles (4 warpgroups, 512 threads)

    warps 0-7    math       Q once; a tile: Q K^T, softmax, P V with 256 of the dimensions (`attend`)
    warps 8-15   producer   8 keys each; loads of the next tile go out before this one's stage is free (`keys`)

Pipeline   producer -> math, 2 stages

    full     an arrival a producer thread; math threads then fence the proxies
    empty    an arrival a math warp, after its P V

Registers. The launch names a minimum of one CTA an SM, so that ptxas heeds setmaxnreg: 128 at the start, then 192 a
math thread (128 of O, 32 of S) and 64 a producer thread (36 of raw entries).

A grid of tokens x blocks of 64 heads x splits of the keys, which `ops.fmha.combine` adds up. Tiles and splits are those
of `ops.fmha.work`. Launches overlap: a CTA makes its barriers, then waits for the kernel before. Q and the first tile's
indices are loaded together with the lengths of the lists (`Keys.guess`), not after them.

Source: DSV4 paper eq. 27; PTX ISA, "wgmma", "Matrix Descriptor Format".
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, memory

from dsv4lib.dsl.budget import SMEM_ALIGN
from dsv4lib.ops.fmha.config import LOG2_E, TILE_M
from dsv4lib.ops.fmha.sm90.attend import Attend
from dsv4lib.ops.fmha.sm90.config import (
    MATH_WARPS,
    Q_BYTES,
    STAGE_BYTES,
    STAGES,
)
from dsv4lib.ops.fmha.sm90.keys import KeySources, Ring
from dsv4lib.ops.fmha.work import Items, KeyList, KeyLists, KeyRows, KeySplits, Outputs


class DecodeFmha(Attend):
    """Attention over 584-byte entries on Hopper. Options as `Config`, a role of the module docstring a base class."""

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
        stream: cuda.CUstream,
    ):
        """Host side: the launch.

        Args:
            mQ: bf16 [T, H, 512].
            entries, window: keys in `PagedPool`, or None; a window by index with ``window_index``.
            mSink: [H] fp32 or None.
            rope: `rope.Tables` or None.
            mO: bf16 [T, H, 512]; partial: fp32 [splits, T, H, 512].
            mLse: fp32 [T, H]; partial: [splits, T, H].
            scale: of the dot products.
            splits: of the keys, equal ones; one unless partial.
            stream: where the launch is queued.
        """

        @cute.struct
        class Storage:
            q: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, Q_BYTES], SMEM_ALIGN]
            keys: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, STAGES * STAGE_BYTES], SMEM_ALIGN]
            valid: cute.struct.Align[cute.struct.MemRange[Int32, 2 * STAGES], 8]
            full: cute.struct.MemRange[cutlass.Int64, STAGES]
            empty: cute.struct.MemRange[cutlass.Int64, STAGES]

        self.storage = Storage
        lists = KeyLists(
            None if cutlass.const_expr(self.entries == "none") else KeyList(*entries[1:]),
            None if cutlass.const_expr(not self.window) else KeyList(*window[1:]),
        )
        sources, outputs = self.key_sources(entries, window), Outputs(mSink, rope, mO, mLse)
        self.kernel(mQ, sources, lists, outputs, scale * LOG2_E, splits).launch(
            grid=(mQ.shape[0], cute.ceil_div(mQ.shape[1], TILE_M), splits.splits),
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
        if tidx == 0:
            for i in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(full + i, 32 * self.producer_warps)
                cute.arch.mbarrier_init(empty + i, MATH_WARPS)
            cute.arch.mbarrier_init_fence()
        cute.arch.barrier(barrier_id=0, number_of_threads=self.threads)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        token, _, split = cute.arch.block_idx()
        items, guess = Items(None, splits, split, token, token + 1, Int32(1)), None
        sQ = storage.q.data_ptr().toint()
        if cutlass.const_expr(self.early):
            guess = self.guess(lists, items)
            if warp < MATH_WARPS:
                self.load_q(mQ, self.place(token), sQ)
        work = self.work(lists, items, token)
        valid = storage.valid.get_tensor(cute.make_layout((2, STAGES)))
        ring = Ring(storage.keys.data_ptr().toint(), valid, full, empty)
        if warp >= MATH_WARPS:
            cute.arch.setmaxregister_decrease(self.registers.producer)
            self.produce(sources, lists, work, ring, guess)
        else:
            cute.arch.setmaxregister_increase(self.registers.math)
            sink, rope, mO, mLse = outputs
            if cutlass.const_expr(self.partial):
                mO, mLse = mO[split, None, None, None], mLse[split, None, None]
            own = Outputs(sink, rope, mO, mLse)
            self.attend(mQ, work, ring, sQ, own, scale_log2)
