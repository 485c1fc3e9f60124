"""Make the page table of a batch from a map of token slots: one entry a page, in one launch.

    table[b, p] = req_to_token[requests[b], starts[b] + p * page] // page         p < ceil(lengths[b] / page)

Attention then takes token t of a request from slot table[b, t // page] * page + t % page. That is the token's slot only
if tokens fill pages in order: slot(t) % page == t % page, and slots of a page are consecutive. Nothing else of the map
is read, so a map without this property gives a table of other tokens' slots. ``checked`` reads all tokens of a page:

    misaligned[b] = (how many tokens attention would not find, the first of them)

**Threads.** Unchecked, a thread has a page: one load, one division by a constant, one store; pages past the length
write nothing. Checked, a warp has a page and its lanes the tokens; a warp adds its count and lowers the first token by
one atomic each, and only where something is wrong. Integers: no order of atomics is in the result.

**Limit.** A sector of 32 bytes is read for each entry of 4, as tokens of a page are neighbours in the map. At 128K
tokens in pages of 128 that is 32 KiB a request; a launch costs more.

A request below 0 or outside of the map, a length of 0 or less and a start below 0 write nothing. Of a length that
passes the end of the map, what is in it counts. A slot below 0 becomes page -1.

Source: SGLang, `create_flashmla_kv_indices_triton` (interface). The oracle is `dsv4lib.reference.mla_page_table`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsv4lib.dsl.tensors import Divisor
from dsv4lib.errors import ConfigError
from dsv4lib.ops.quantize.kernel import divide

WARP = 32


class Span(NamedTuple):
    """Tokens of a row of the batch: row of the map, first token, number of tokens; 0 tokens: padding."""

    request: Int32
    start: Int32
    length: Int32


class MlaPageTable:
    """Look the first token of each page up; see the module docstring.

    Args:
        started: the first token of each row is given; otherwise it is 0.
        checked: count tokens that are not where attention looks for them.
        threads: of a CTA, a multiple of 32 up to 1024.

    Raises:
        ConfigError: a value that is not allowed.
    """

    def __init__(self, started: bool = False, checked: bool = False, threads: int = 128):
        if threads % WARP or not WARP <= threads <= 1024:
            raise ConfigError("threads", threads, "a multiple of 32 from 32 to 1024")
        self.started, self.checked, self.threads = started, checked, threads
        # ---- what follows
        self.lanes = WARP if checked else 1  # that share a page
        self.pages = threads // self.lanes  # of a CTA

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        return f"MlaPageTable({int(self.started)}, {int(self.checked)}, {self.threads})"

    @cute.jit
    def __call__(
        self,
        mSlots: cute.Tensor,
        mRequests: cute.Tensor,
        mLengths: cute.Tensor,
        mStarts: Any,
        mTable: cute.Tensor,
        mMisaligned: Any,
        page: Divisor,
        stream: cuda.CUstream,
    ):
        """Launch a row of CTAs for each request.

        Args:
            mSlots: int32 [R, W], the slot of each token. mRequests, mLengths: int32 [B].
            mStarts: int32 [B], or None. mTable: int32 [B, N], written.
            mMisaligned: int32 [B, 2], (0, 2^31 - 1) before, or None.
            page: tokens of a page. stream: where the launch is queued.
        """
        self.kernel(mSlots, mRequests, mLengths, mStarts, mTable, mMisaligned, page).launch(
            grid=(cute.ceil_div(mTable.shape[1], self.pages), mTable.shape[0], 1),
            block=(self.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        mSlots: cute.Tensor,
        mRequests: cute.Tensor,
        mLengths: cute.Tensor,
        mStarts: Any,
        mTable: cute.Tensor,
        mMisaligned: Any,
        page: Divisor,
    ):
        """Find this thread's page, look its first token up, store; checked, look at all of its tokens."""
        cta, row, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        number, lane = cta * self.pages + thread // self.lanes, thread % self.lanes
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()  # after the wait: this kernel ends after the one before
        span = self.span_of(mSlots, mRequests, mLengths, mStarts, row)
        if (number < mTable.shape[1]) & (number < self.pages_of(span.length, page)):
            token = self.token_of(span, number, page)
            slot = mSlots[span.request, token]
            if lane == 0:
                mTable[row, number] = self.page_of(slot, page)
            if cutlass.const_expr(self.checked):
                left = cutlass.min(page.number, span.length - number * page.number)
                self.check(mSlots, mMisaligned, row, span.request, token, left, lane, page)

    @cute.jit
    def span_of(self, mSlots: cute.Tensor, mRequests: cute.Tensor, mLengths: cute.Tensor, mStarts: Any, row: Int32):
        """Return the `Span` of a row; of padding, and of what is not in the map, it has no tokens."""
        request, length, start = self.request_of(mRequests, row), mLengths[row], Int32(0)
        if cutlass.const_expr(self.started):
            start = mStarts[row]
        known = (request >= 0) & (request < mSlots.shape[0]) & (start >= 0) & (start < mSlots.shape[1])
        length = cutlass.min(length, mSlots.shape[1] - cutlass.max(start, 0))
        return Span(request, start, Int32(cutlass.select_(known, length, Int32(0))))

    def request_of(self, mRequests: cute.Tensor, row: Int32) -> Int32:
        """Return the row of the map that a row of the batch stands for."""
        return mRequests[row]

    @cute.jit
    def pages_of(self, length: Int32, page: Divisor):
        """Return how many pages so many tokens take, 0 for none or fewer."""
        full, rest = divide(cutlass.max(length, 0), page)
        return full + cutlass.select_(rest > 0, Int32(1), Int32(0))

    def token_of(self, span: Span, number: Int32, page: Divisor) -> Int32:
        """Return the first token of a page of a row."""
        return span.start + number * page.number

    @cute.jit
    def page_of(self, slot: Int32, page: Divisor):
        """Return the page that a slot is in, -1 of a slot below 0."""
        where, _ = divide(cutlass.max(slot, 0), page)
        return cutlass.select_(slot < 0, Int32(-1), where)

    @cute.jit
    def is_wrong(self, slot: Int32, first: Int32, offset: Int32, page: Divisor):
        """Tell whether the slot of a page's token is not where attention looks, given its first token's page."""
        return slot != first * page.number + offset

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
        """Compare the slots of a page's ``count`` tokens from ``token`` on; a warp has the page."""
        first = self.page_of(mSlots[request, token], page)
        found, earliest = Int32(0), Int32(2**31 - 1)
        for offset in cutlass.range(lane, count, WARP, unroll=1):
            slot = mSlots[request, token + offset]
            if (slot < 0) | self.is_wrong(slot, first, offset, page):
                found += 1
                earliest = cutlass.min(earliest, token + offset)
        found = cute.arch.warp_redux_sync(found, "add")
        earliest = cute.arch.warp_redux_sync(earliest, "min")
        if (lane == 0) & (found > 0):
            cells = mMisaligned[row, None].iterator
            cute.arch.atomic_add(cells, found, scope="gpu")
            cute.arch.atomic_min(cells + 1, earliest, scope="gpu")
