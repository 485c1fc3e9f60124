"""Reduce a maximum and then a sum in one array of shared memory, as `sum_over_unread_maximum.ptx`, in the CuTe DSL.

``./dsv4 sanitize data/emulator/findings/sum_over_unread_maximum.py``; with ``repaired`` as its argument it is silent. A
number as the last argument is the number of CTAs, for a GPU: which warp comes late is chance there.
"""

import sys

import cutlass
import cutlass.cute as cute
import cutlass.memory
import torch
from cutlass.cute.runtime import from_dlpack

WARPS = 4
THREADS = 32 * WARPS
REPAIRED = "repaired" in sys.argv[1:]
CTAS = int(sys.argv[-1]) if sys.argv[-1].isdigit() else 1


@cute.kernel
def kernel(out: cute.Tensor):
    """Store what each thread takes for the maximum, WARPS; the sum that follows is 100 a warp."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    warp, lane = thread // 32, thread % 32
    slots = cutlass.memory.SmemAllocator().allocate_tensor(cutlass.Int32, cute.make_layout(WARPS))
    if lane == 0:
        slots[warp] = warp + 1
    cute.arch.sync_threads()
    if thread == 0:
        highest = slots[0]
        for i in cutlass.range_constexpr(1, WARPS):
            highest = cutlass.max(highest, slots[i])
        slots[0] = highest
    cute.arch.sync_threads()
    maximum = slots[0]  # reported
    if cutlass.const_expr(REPAIRED):
        cute.arch.sync_threads()
    if lane == 0:
        slots[warp] = 100  # reported: a warp that is late loads it
    out[cta * THREADS + thread] = maximum


@cute.jit
def launch(out: cute.Tensor):
    """Launch the CTAs, four warps each."""
    kernel(out).launch(grid=[CTAS, 1, 1], block=[THREADS, 1, 1])


out = torch.zeros(CTAS * THREADS, dtype=torch.int32, device="cuda")
launch(from_dlpack(out))
wrong = int((out != WARPS).sum())
print(f"{wrong} of {CTAS * THREADS} maxima are wrong")
