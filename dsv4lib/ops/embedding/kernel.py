"""Load an embedding row once and store it to every output.

What the outputs are is in `op`.

A thread has 8 columns of a row (16 bytes): it loads them once and stores them to every output. A CTA of 128 threads has
1,024 columns of a token. Bytes of a token: 2 d read, 2 d for each copy written. One token: the chain of id, row, store.

Source: DeepSeek-V4's released inference code.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64

from dsv4lib.errors import ConfigError

COLUMNS = 8  # of a thread
THREADS = 128
MAX_COPIES = 8


class Embedding:
    """Look up rows; see the module docstring.

    Args:
        copies: streams of a token, 0 to 8; 0: there are none.
        keep: rows are written by themselves, too; needed without ``copies``.
        wide: ids are int64; else int32.

    Raises:
        ConfigError: a value that is not allowed.
    """

    def __init__(self, copies: int = 4, keep: bool = False, wide: bool = True):
        if not 0 <= copies <= MAX_COPIES:
            raise ConfigError("copies", copies, f"0 to {MAX_COPIES}")
        if not (copies or keep):
            raise ConfigError("keep", keep, "True without copies")
        self.copies, self.keep, self.wide = copies, keep, wide

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        flags = [name for name in ("keep", "wide") if vars(self)[name]]
        return f"Embedding({', '.join([str(self.copies), *flags])})"

    @cute.jit
    def __call__(self, mTokens: cute.Tensor, mWeight: cute.Tensor, mStreams: Any, mRows: Any, stream: cuda.CUstream):
        """Launch a CTA for 1,024 columns of a token.

        Args:
            mTokens: [T] int64, or int32 unless ``wide``.
            mWeight: [V, d] bf16, d a multiple of 8.
            mStreams: [T, copies, d] bf16, or None without ``copies``.
            mRows: [T, d] bf16, or None unless ``keep``.
            stream: where the launch is queued.
        """
        grid = (mTokens.shape[0], cute.ceil_div(mWeight.shape[1], THREADS * COLUMNS), 1)
        self.kernel(mTokens, mWeight, mStreams, mRows).launch(
            grid=grid, block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, mTokens: cute.Tensor, mWeight: cute.Tensor, mStreams: Any, mRows: Any):
        """Load eight columns of the row, store them to every output."""
        token, part, _ = cute.arch.block_idx()
        tidx, _, _ = cute.arch.thread_idx()
        place = part * THREADS + tidx
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()  # after the wait: this kernel ends after the one before
        if place * COLUMNS < mWeight.shape[1]:
            rRow = cute.make_rmem_tensor(COLUMNS, BFloat16)
            rRow.fill(0.0)
            row = self.row_of(mTokens[token], mWeight.shape[0])
            if row >= 0:
                cute.autovec_copy(cute.local_tile(mWeight[row, None], (COLUMNS,), (place,)), rRow)
            for i in cutlass.range_constexpr(self.copies):
                cute.autovec_copy(rRow, cute.local_tile(mStreams[token, i, None], (COLUMNS,), (place,)))
            if cutlass.const_expr(self.keep):
                cute.autovec_copy(rRow, cute.local_tile(mRows[token, None], (COLUMNS,), (place,)))

    def row_of(self, number: Any, rows: Int32) -> Int32:
        """Return the row of an id, or -1 where there is none."""
        there = (number >= 0) & (Int64(number) < Int64(rows))
        return Int32(cutlass.select_(there, Int32(number), Int32(-1)))
