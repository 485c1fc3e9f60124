"""KV rows of a packed batch into rings of bf16 rows, for the attention window.

    ring[place of the request][p mod window] = kv[row of position p]         the last ``window`` rows of a request

A warp has a row: it finds the row's request by a ballot over a lane a request (`common.requests`), loads the row (1024
bytes, two vectors of 16 bytes a lane) at the same time and stores it, unless a newer row of the call goes to the same
slot: no two rows are written to one place, in any order of CTAs.

Bytes: 2 x 1024 a row; a decode step is the latency of two loads and a store.

Source: `dsv4lib.reference.cache.append_window`.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16

from dsv4lib.errors import ConfigError
from dsv4lib.kernels.common.requests import LANES, find_request

DIM, PIECE = 512, 8  # of a row; elements of a vector
VECTORS = DIM // PIECE // LANES  # of a lane


class KvAppend:
    """Append; see the module docstring.

    Args:
        window: rows of a ring.
        warps: rows of a CTA, 1 to 16.

    Raises:
        ConfigError: a value that is not allowed.
    """

    def __init__(self, window: int = 128, warps: int = 4):
        if window < 1:
            raise ConfigError("window", window, "at least 1")
        if not 1 <= warps <= 16:
            raise ConfigError("warps", warps, "1 to 16")
        self.window, self.warps = window, warps

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        return f"KvAppend({self.window}, {self.warps})"

    @cute.jit
    def __call__(self, mKV: cute.Tensor, mRing: cute.Tensor, mRequests: cute.Tensor, stream: cuda.CUstream):
        """Launch a warp a row.

        Args:
            mKV: [T, 512] bf16. mRing: [S, window, 512] bf16. mRequests: int32 [B, 4].
            stream: where the launch is queued.
        """
        ctas = cute.ceil_div(mKV.shape[0], self.warps)
        self.kernel(mKV, mRing, mRequests).launch(
            grid=(ctas, 1, 1), block=(LANES * self.warps, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, mKV: cute.Tensor, mRing: cute.Tensor, mRequests: cute.Tensor):
        """Load the row, find its place, store."""
        cta, _, _ = cute.arch.block_idx()
        lane, number = cute.arch.lane_idx(), cta * self.warps + cute.arch.warp_idx()
        cute.arch.griddepcontrol_wait()
        rRow = cute.make_rmem_tensor((PIECE, VECTORS), BFloat16)
        rRow.fill(0.0)
        if number < mKV.shape[0]:
            for i in cutlass.range_constexpr(VECTORS):
                cute.autovec_copy(cute.local_tile(mKV[number, None], (PIECE,), (lane + LANES * i,)), rRow[None, i])
            row, count, start, place, _ = find_request(mRequests, number, 1, 0)
            behind = row + count - number  # rows of the request from this one on
            if behind > 0 and behind <= self.window and start >= 0:
                slot = (start + number - row) % self.window
                for i in cutlass.range_constexpr(VECTORS):
                    target = cute.local_tile(mRing[place, slot, None], (PIECE,), (lane + LANES * i,))
                    cute.autovec_copy(rRow[None, i], target)
