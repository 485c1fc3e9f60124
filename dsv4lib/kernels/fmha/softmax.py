"""What a softmax thread of the attention kernel does with its row: scores, maximum, weights, rescaling.

Thread t of 128 owns lane t of tensor memory: head t % 64, and half t / 64 of the 64 keys of a tile.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, pipeline

from dsv4lib.kernels.common import tmem, umma

TILE_M, TILE_N = 64, 64  # heads and keys of a tile
HALF_N = TILE_N // 2  # keys a thread weighs


@cute.jit
def row_scores(
    address: cute.Pointer, column: Int32, tidx: Int32, half: Int32, sX: cute.Tensor, pair: pipeline.NamedBarrier
):
    """This thread's 32 scores: its own sum over half the dimensions plus that of the thread 64 lanes away."""
    umma.fence_after_thread_sync()
    rOther = cute.make_rmem_tensor((4, HALF_N // 4), Float32)
    rS = cute.make_rmem_tensor((4, HALF_N // 4), Float32)
    tmem.load(address, column + (1 - half) * HALF_N, tidx, rOther)
    tmem.load(address, column + half * HALF_N, tidx, rS)
    cute.arch.fence_view_async_tmem_load()
    umma.fence_before_thread_sync()
    cute.autovec_copy(rOther, sX[None, tidx, None])
    pair.arrive_and_wait()
    cute.autovec_copy(sX[None, tidx ^ TILE_M, None], rOther)
    rS.store(rS.load() + rOther.load())
    return rS


@cute.jit
def row_maximum(rS: cute.Tensor, valid: Int32, sRow: cute.Tensor, tidx: Int32, pair: pipeline.NamedBarrier):
    """The largest score of a row over both halves of the tile; keys that are not there become -inf."""
    if valid != -1:
        for j in cutlass.range_constexpr(HALF_N):
            rS[j] = cutlass.select_((valid >> j) & 1 == 1, rS[j], -Float32.inf)
    largest = rS.load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
    sRow[tidx, 0] = largest
    pair.arrive_and_wait()
    return cute.arch.fmax(largest, sRow[tidx ^ TILE_M, 0])


@cute.jit
def store_weights(
    rS: cute.Tensor,
    scale_log2: Float32,
    reference: Float32,
    sP: cute.Tensor,
    row: Int32,
    half: Int32,
    slot: Int32,
):
    """P = 2^(scaled score - reference) to SMEM, the A operand of P V; returns the sum of this thread's weights."""
    shift = Float32(0.0)  # a row that has seen no key yet: every score is -inf, every weight 0
    if reference > -Float32.inf:
        shift = reference
    rP = cute.make_rmem_tensor((8, HALF_N // 8), sP.element_type)
    weights = cute.math.exp2(rS.load() * scale_log2 - shift, fastmath=True)
    rP.store(weights.reshape((8, HALF_N // 8)).to(sP.element_type))
    sP_row = cute.local_tile(sP[row, None, slot], (HALF_N,), (half,))
    cute.autovec_copy(rP, cute.logical_divide(sP_row, (8,)))
    cute.arch.fence_view_async_shared()
    umma.fence_before_thread_sync()
    cute.arch.sync_warp()
    return weights.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)


@cute.jit
def rescale(address: cute.Pointer, columns: cutlass.Constexpr, tidx: Int32, factor: Float32):
    """O *= factor: half a head's dimensions a thread."""
    rO = cute.make_rmem_tensor(32, Float32)
    for column in cutlass.range(0, columns, 32, unroll=1):
        tmem.load(address, column, tidx, rO)
        cute.arch.fence_view_async_tmem_load()
        rO.store(rO.load() * factor)
        tmem.store(address, column, tidx, rO)
    cute.arch.fence_view_async_tmem_store()
