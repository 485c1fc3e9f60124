"""Store KV rows of a packed batch into rings of bf16 rows.

The attention window reads them.

    ring[place of the request][p mod window] = kv[row of position p]         the last ``window`` rows of a request

**A warp a row** (decode, short chunks): it finds the row's request by a ballot over a lane a request
(`dsl.requests`), loads the row (1024 bytes, two vectors of 16 bytes a lane) at the same time and stores it, unless a
newer row of the call goes to the same slot: no two rows are written to one place, in any order of CTAs.

**A warp a slot** (``by_slot``; more rows than the rings have slots): warp w mod window of a request has that many rows
after its own, so rows that no ring keeps are not loaded; the row waits for its request.

A place outside the rings is skipped: nothing is stored.

Bytes: 2 x 1024 a stored row; a decode step is the latency of two loads and a store.

Source: `dsv4lib.reference.cache.append_window`.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Int32

from dsv4lib.dsl.requests import LANES, Request, fetch_request, find_request
from dsv4lib.errors import ConfigError

DIM, PIECE = 512, 8  # of a row; elements of a vector
VECTORS = DIM // PIECE // LANES  # of a lane


class KvAppend:
    """Append; see the module docstring.

    Args:
        window: rows of a ring.
        by_slot: a warp has a slot of a request, not a row of the batch.
        warps: of a CTA, 1 to 16.

    Raises:
        ConfigError: a value that is not allowed.
    """

    def __init__(self, window: int = 128, by_slot: bool = False, warps: int = 4):
        if window < 1:
            raise ConfigError("window", window, "at least 1")
        if not 1 <= warps <= 16:
            raise ConfigError("warps", warps, "1 to 16")
        self.window, self.by_slot, self.warps = window, by_slot, warps

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        return f"KvAppend({self.window}, {self.by_slot}, {self.warps})"

    def kept(self, left: Int32) -> Boolean:
        """Return whether a row is stored.

        Of its request so many are left, itself among them.
        """
        return (left > 0) & (left <= self.window)

    def slot_of(self, start: Int32, number: Int32) -> Int32:
        """Slot of row ``number`` of a request whose first row has position ``start``."""
        return (start + number) % self.window

    @cute.jit
    def __call__(self, mKV: cute.Tensor, mRing: cute.Tensor, mRequests: cute.Tensor, stream: cuda.CUstream):
        """Launch a warp a row, or a slot.

        Args:
            mKV: [T, 512] bf16. mRing: [S, window, 512] bf16. mRequests: int32 [B, 4].
            stream: where the launch is queued.
        """
        count = mRequests.shape[0] * self.window if cutlass.const_expr(self.by_slot) else mKV.shape[0]
        self.kernel(mKV, mRing, mRequests).launch(
            grid=(cute.ceil_div(count, self.warps), 1, 1),
            block=(LANES * self.warps, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, mKV: cute.Tensor, mRing: cute.Tensor, mRequests: cute.Tensor):
        """Load the row, find its place, store."""
        cta, _, _ = cute.arch.block_idx()
        number = cta * self.warps + cute.arch.warp_idx()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()  # after the wait: this kernel ends after the one before
        rRow = cute.make_rmem_tensor((PIECE, VECTORS), BFloat16)
        rRow.fill(0.0)
        if cutlass.const_expr(self.by_slot):
            row, count, start, place = fetch_request(mRequests, number // self.window)
            number = row + count - 1 - number % self.window
            if (row >= 0) & (number >= row) & (number < mKV.shape[0]):
                self.load(mKV, number, rRow)
                self.store(mRing, Request(row, count, start, place), number, rRow)
        elif number < mKV.shape[0]:
            self.load(mKV, number, rRow)
            row, count, start, place, _ = find_request(mRequests, number, 1, 0)
            self.store(mRing, Request(row, count, start, place), number, rRow)

    @cute.jit
    def load(self, mKV: cute.Tensor, number: Int32, rRow: cute.Tensor):
        """Start the loads of a row."""
        for i in cutlass.range_constexpr(VECTORS):
            piece = cute.arch.lane_idx() + LANES * i
            cute.autovec_copy(cute.local_tile(mKV[number, None], (PIECE,), (piece,)), rRow[None, i])

    @cute.jit
    def store(self, mRing: cute.Tensor, request: Request, number: Int32, rRow: cute.Tensor):
        """Store row ``number`` of the batch, if its request keeps it."""
        row, count, start, place = request
        there = (start >= 0) & (place >= 0) & (place < mRing.shape[0])
        if there & self.kept(row + count - number):
            slot = self.slot_of(start, number - row)
            for i in cutlass.range_constexpr(VECTORS):
                piece = cute.arch.lane_idx() + LANES * i
                cute.autovec_copy(rRow[None, i], cute.local_tile(mRing[place, slot, None], (PIECE,), (piece,)))
