"""Inject faults into the index kernel, one at a time: each class replaces one thing. `FAULTS` holds them by name."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsv4lib.dsl.tensors import Divisor
from dsv4lib.ops.mla_page_table import kernel as page_table_kernel
from dsv4lib.ops.quantize.kernel import divide


class RowOfTheBatch(page_table_kernel.MlaPageTable):
    """Takes row b of the map for row b of the batch: right until requests come and go."""

    def request_of(self, mRequests: cute.Tensor, row: Int32) -> Int32:
        """Forget the ids."""
        return Int32(row)


class WholePagesAlone(page_table_kernel.MlaPageTable):
    """Rounds the number of pages down: the page that is being filled has no entry."""

    @cute.jit
    def pages_of(self, length: Int32, page: Divisor):
        """Forget the rest."""
        full, _ = divide(cutlass.max(length, 0), page)
        return full


class StartForgotten(page_table_kernel.MlaPageTable):
    """Counts tokens from the first of the request, whatever start a row has."""

    def token_of(self, span: page_table_kernel.Span, number: Int32, page: Divisor) -> Int32:
        """Leave the start out."""
        return number * page.number


class SlotIsThePage(page_table_kernel.MlaPageTable):
    """Stores the slot of the first token, not its page."""

    @cute.jit
    def page_of(self, slot: Int32, page: Divisor):
        """Leave the division out."""
        return slot


class NeighboursAlone(page_table_kernel.MlaPageTable):
    """Checks that slots of a page are consecutive, and not that the first is at the start of its page."""

    @cute.jit
    def check(
        self,
        mSlots: cute.Tensor,
        mMisaligned: cute.Tensor,
        row: Int32,
        request: Int32,
        token: Int32,
        count: Int32,
        lane: Int32,
        page: Divisor,
    ):
        """Count tokens whose slot is not the one after the token before."""
        found = Int32(0)
        for offset in cutlass.range(lane, count, page_table_kernel.WARP, unroll=1):
            if mSlots[request, token + offset] != mSlots[request, token] + offset:
                found += 1
        found = cute.arch.warp_redux_sync(found, "add")
        if (lane == 0) & (found > 0):
            cute.arch.atomic_add(mMisaligned[row, None].iterator, found, scope="gpu")


FAULTS = {
    kernel.__name__: kernel
    for kernel in (RowOfTheBatch, WholePagesAlone, StartForgotten, SlotIsThePage, NeighboursAlone)
}
