"""Access tensor memory by thread. A thread of a warpgroup owns one lane, its registers are columns.

Warp w of a warpgroup reaches lanes 32 w .. 32 w + 31 only (`tcgen05.ld/st.32x32b`), so thread t owns lane t.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, memory, pipeline
from cutlass.cute.nvgpu import tcgen05

COLUMNS = 32  # of one access


def allocator(
    address: cute.Pointer, barrier: int, threads: int, warp: int, pair: cute.Pointer | None = None
) -> memory.TmemAllocator:
    """Make the allocator of tensor memory, by one warp.

    Args:
        address: where in SMEM the address of the columns goes.
        barrier, threads: named barrier of all threads that read that address, and their number.
        warp: allocates and frees.
        pair: an mbarrier where the CTAs of a pair allocate together: each frees when the other is ready to.
    """
    return memory.TmemAllocator(
        address,
        barrier_for_retrieve=pipeline.NamedBarrier(barrier, threads),
        allocator_warp_id=warp,
        is_two_cta=pair is not None,
        two_cta_tmem_dealloc_mbar_ptr=pair,
    )


def _thread_copy(operation: Any, address: cute.Pointer, column: Int32, tidx: Int32) -> tuple:
    """Return a copy of 32 columns of a thread's lane: (tiled copy, tensor, thread slice, coordinates)."""
    layout = cute.make_layout((128, COLUMNS), stride=(1 << 16, 1))  # lane << 16 | column
    tensor = cute.make_tensor(address + column, layout)
    tiled = tcgen05.make_tmem_copy(cute.make_copy_atom(operation(tcgen05.Repetition(COLUMNS)), Float32), tensor)
    return tiled, tensor, tiled.get_slice(tidx), cute.make_identity_tensor(layout.shape)


def load(address: cute.Pointer, column: Int32, tidx: Int32, registers: cute.Tensor) -> None:
    """Load 32 columns of this thread's lane to registers.

    Valid after `cute.arch.fence_view_async_tmem_load`.
    """
    tiled, tensor, thread, coordinates = _thread_copy(tcgen05.Ld32x32bOp, address, column, tidx)
    own = cute.make_tensor(registers.iterator, thread.partition_D(coordinates).shape)
    cute.copy(tiled, thread.partition_S(tensor), own)


def store(address: cute.Pointer, column: Int32, tidx: Int32, registers: cute.Tensor) -> None:
    """Store registers to 32 columns of this thread's lane.

    There after `cute.arch.fence_view_async_tmem_store`.
    """
    tiled, tensor, thread, coordinates = _thread_copy(tcgen05.St32x32bOp, address, column, tidx)
    own = cute.make_tensor(registers.iterator, thread.partition_S(coordinates).shape)
    cute.copy(tiled, own, thread.partition_D(tensor))
