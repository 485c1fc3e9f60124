"""Pick all of rows that have no more than k scores, in the order of their indices.

    picks[b, i] = i before the row's length, -1 from there on

No score is read. A CTA has 1,024 places of a row, a thread four of them.

Bytes: B k 4 out and B 4 in; what it costs is a launch and, with lengths, one way to memory.
Source: `dsv4lib.reference.topk`.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsv4lib.ops.topk.paged import picks_of, place

THREADS, QUAD = 256, 4


class TakeAll:
    """Indices of all; see the module docstring.

    Args:
        wide: rows of picks start on 16 bytes and k is a multiple of 4.
        ragged: rows have lengths; otherwise every score counts.
        page: picks are rows of pages of so many; 0: indices.
    """

    def __init__(self, wide: bool = True, ragged: bool = True, page: int = 0):
        self.wide, self.ragged, self.page = wide, ragged, page

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        options = ["wide" if self.wide else "narrow", "ragged" if self.ragged else "full"]
        return f"TakeAll({', '.join(options + [f'page {self.page}'] * (self.page > 0))})"

    @cute.jit
    def __call__(self, size: Int32, mLengths: Any, mPicks: cute.Tensor, pages: Any, stream: cuda.CUstream):
        """Launch.

        Args:
            size: L, scores of a row, at most k.
            mLengths: [B] int32, scores that count in each row; None unless ``ragged``.
            mPicks: [B, k] int32.
            pages: `Pages` that picks are looked up in; None where ``page`` is 0.
            stream: where the launch is queued.
        """
        grid = (mPicks.shape[0], cute.ceil_div(mPicks.shape[1], THREADS * QUAD), 1)  # y has 65,535 at most
        launched = self.kernel(size, mLengths, mPicks, pages)
        launched.launch(grid=grid, block=(THREADS, 1, 1), stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, size: Int32, mLengths: Any, mPicks: cute.Tensor, pages: Any):
        """Four places a thread."""
        tidx, _, _ = cute.arch.thread_idx()
        row, part, _ = cute.arch.block_idx()
        quad = part * THREADS + tidx
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()  # after the wait: this kernel ends after the one before
        length = size
        if cutlass.const_expr(self.ragged):
            length = cutlass.min(mLengths[row], size)
        picks = picks_of(mPicks, pages, row)
        mOut = picks.out
        rPick = cute.make_rmem_tensor(QUAD, Int32)
        for j in cutlass.range_constexpr(QUAD):
            at = quad * QUAD + j
            rPick[j] = -1
            if at < length:
                rPick[j] = place(picks, at, self.page)
            if cutlass.const_expr(not self.wide):
                if at < mOut.shape[0]:
                    mOut[at] = rPick[j]
        if cutlass.const_expr(self.wide):
            if quad * QUAD < mOut.shape[0]:
                cute.autovec_copy(rPick, cute.local_tile(mOut, (QUAD,), (quad,)))
