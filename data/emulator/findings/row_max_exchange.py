"""Exchange row maxima between two warps with one barrier a tile, as `row_max_exchange.ptx`, in the CuTe DSL.

``./dsv4 sanitize data/emulator/findings/row_max_exchange.py``; with ``repaired`` as its argument it is silent.
"""

import sys

import cutlass
import cutlass.cute as cute
import cutlass.memory
import torch
from cutlass.cute.runtime import from_dlpack

TILES, THREADS = 4, 64
REPAIRED = sys.argv[1:] == ["repaired"]


@cute.kernel
def kernel(out: cute.Tensor):
    """Sum the maxima of the other warp over all tiles; tile i has the maximum i + 1."""
    thread, _, _ = cute.arch.thread_idx()
    row_max = cutlass.memory.SmemAllocator().allocate_tensor(cutlass.Int32, cute.make_layout(THREADS))
    total = cutlass.Int32(0)
    for tile in cutlass.range(TILES, unroll=1):
        row_max[thread] = tile + 1  # reported
        cute.arch.barrier(barrier_id=1, number_of_threads=THREADS)
        total += row_max[thread ^ 32]  # reported: the partner may be a tile ahead
        if cutlass.const_expr(REPAIRED):
            cute.arch.barrier(barrier_id=2, number_of_threads=THREADS)
    out[thread] = total


@cute.jit
def launch(out: cute.Tensor):
    """Launch one CTA of two warps."""
    kernel(out).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])


out = torch.zeros(THREADS, dtype=torch.int32, device="cuda")
launch(from_dlpack(out))
wrong = int((out != sum(range(TILES + 1))).sum())
print(f"{wrong} of {THREADS} sums are wrong")
