"""Make page tables of requests from a map of token slots: the torch op `dsv4::mla_page_table`.

What a serving engine does before paged MLA attention. Its allocator keeps a slot for each token of each request; the
kernel wants a page for each run of ``page_size`` tokens. One launch, written in place, nothing read by the host, so it
can be captured in a CUDA graph. The oracle is `dsv4lib.reference.mla_page_table`.

In debug mode (``check=True``) the host waits and reads whether every token is where attention will look for it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common import launching
from dsv4lib.ops.common.schema import op
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.mla_page_table import arguments
from dsv4lib.ops.mla_page_table.kernel import MlaPageTable

MOST_PAGE = 1 << 16  # tokens
MOST_REQUESTS = 65535  # of a grid's y
NONE = (1 << 31) - 1  # the first misaligned token of a row without one


class MisalignedPage(ArgumentError):
    """A request's tokens do not fill pages in order: attention would read other slots.

    Attributes:
        row: of the batch. request: its row of the map. token: the first that is elsewhere.
        slot: where it is. count: how many of the row's tokens are elsewhere.
    """

    def __init__(self, row: int, request: int, token: int, slot: int, count: int, page_size: int, start: int = 0):
        self.row, self.request, self.token, self.slot, self.count = row, request, token, slot, count
        where = f"slot % {page_size} == {(token - start) % page_size}, after the slots of its page's earlier tokens"
        super().__init__(f"req_to_token[{request}, {token}]", slot, f"{where} ({count} such tokens in row {row})")


@typed
def mla_page_table(
    req_to_token: Tensor,
    requests: Tensor,
    lengths: Tensor,
    page_size: int,
    *,
    starts: Tensor | None = None,
    out: Tensor | None = None,
    misaligned: Tensor | None = None,
    check: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Look up the page of every ``page_size`` tokens of each request.

    Args:
        req_to_token: int32 ``[R, W]``: the slot of token t of request r, page * page_size + offset.
        requests: int32 ``[B]``, rows of the map; negative: padding, nothing is read or written.
        lengths: int32 ``[B]``, tokens; 0 or negative: padding.
        page_size: tokens of a page, 1 to 65536.
        starts: int32 ``[B]``, the first token of each row (SGLang's ``kv_start_idx``), a slot at the start of a page;
            None: 0. Negative: padding.
        out: int32 ``[B, N]`` to write into, rows any distance apart; None: a new one of -1, W tokens wide. What lies
            past the pages of a row keeps its value.
        misaligned: int32 ``[B, 2]``, overwritten by the number of tokens that attention would not find, and the first
            of them (2^31 - 1: none); None: they are not looked for unless ``check``.
        check: read ``misaligned`` on the host, which waits for the device: for debugging, not inside a CUDA graph.
        backend: "native", "emulator", "reference", or "auto": native, else emulator.

    Returns:
        out.

    Raises:
        ArgumentError: an argument of the wrong type, shape, stride, device or (on the CPU) value: a request, token or
            page outside of its tensor. A GPU clips rows to the map and to ``out``.
        MisalignedPage: with ``check``, a token that attention would not find.
        BackendUnavailable: the back end cannot run here.
    """
    if page_size < 1:
        raise ArgumentError("page_size", page_size, f"1 to {MOST_PAGE}")
    if out is None and requests.dim() == 1 and req_to_token.dim() == 2:
        size = len(requests), -(-req_to_token.shape[1] // page_size)
        out = torch.full(size, -1, dtype=torch.int32, device=req_to_token.device)
    elif out is None:
        raise ArgumentError("req_to_token.shape", tuple(req_to_token.shape), "[R, W], and requests [B]")
    if check and misaligned is None:
        misaligned = torch.empty(len(requests), 2, dtype=torch.int32, device=req_to_token.device)
    Call.op(req_to_token, requests, lengths, starts, out, misaligned, page_size, backend)
    if check:
        _raise_misaligned(req_to_token, requests, starts, misaligned, page_size)
    return out


def _raise_misaligned(
    req_to_token: Tensor, requests: Tensor, starts: Tensor | None, misaligned: Tensor, page_size: int
) -> None:
    """Wait for the counts; raise for the first row that has any."""
    for row, (count, token) in enumerate(misaligned.tolist()):
        if count:
            request, start = int(requests[row]), 0 if starts is None else int(starts[row])
            raise MisalignedPage(row, request, token, int(req_to_token[request, token]), count, page_size, start)


@op("mla_page_table", mutates=("out", "misaligned"))
class Call(NamedTuple):
    """A call of `mla_page_table`."""

    req_to_token: Tensor
    requests: Tensor
    lengths: Tensor
    starts: Tensor | None
    out: Tensor
    misaligned: Tensor | None
    page_size: int
    backend: str

    def check(self) -> None:
        """Check types, shapes and devices."""
        batch = (self.requests.shape[0] if self.requests.dim() == 1 else None,)
        launching.check(
            {
                "req_to_token": (self.req_to_token, torch.int32, (None, None)),
                "requests": (self.requests, torch.int32, batch),
                "lengths": (self.lengths, torch.int32, batch),
                "starts": (self.starts, torch.int32, batch),
                "out": (self.out, torch.int32, (*batch, None)),
                "misaligned": (self.misaligned, torch.int32, (*batch, 2)),
            }
        )
        if len(self.requests) > MOST_REQUESTS:
            allowed = f"[B], B at most {MOST_REQUESTS}"
            raise ArgumentError("requests.shape", tuple(self.requests.shape), allowed)
        if not 1 <= self.page_size <= MOST_PAGE:
            raise ArgumentError("page_size", self.page_size, f"1 to {MOST_PAGE}")
        for name, x in (("req_to_token", self.req_to_token), ("out", self.out)):
            if x.shape[1] > 1 and x.stride(1) != 1:
                raise ArgumentError(f"{name}.stride()", x.stride(), "stride 1 in the last dimension")

    def check_values(self) -> None:
        """Check that real rows are in the map and in the table."""
        starts = torch.zeros_like(self.lengths) if self.starts is None else self.starts
        real = (self.requests >= 0) & (self.lengths > 0) & (starts >= 0)
        last = torch.where(real, starts.long() + self.lengths, 0)
        pages = torch.where(real, -(-self.lengths.long() // self.page_size), 0)
        count, width = self.req_to_token.shape
        for name, given, wrong, allowed in (
            ("requests", self.requests, real & (self.requests >= count), f"negative or 0..{count - 1}"),
            ("lengths", self.lengths, last > width, f"tokens of the map, of which a request has {width}"),
            ("lengths", self.lengths, pages > self.out.shape[1], f"at most {self.out.shape[1]} pages, as out has"),
        ):
            if bool(wrong.any()):
                raise ArgumentError(name, given[wrong].tolist()[:8], allowed)

    def run(self, backend: str) -> None:
        """Launch the kernel, or ask the oracle."""
        if self.misaligned is not None:
            self.misaligned[:, 0].fill_(0)
            self.misaligned[:, 1].fill_(NONE)
        if not (self.out.numel() and self.req_to_token.numel()):
            return
        if backend == "reference":
            given = self.req_to_token, self.requests, self.lengths, self.page_size, self.starts
            backends.oracle("mla_page_table").mla_page_table(*given, self.out, self.misaligned)
            return
        settings = {"started": self.starts is not None, "checked": self.misaligned is not None}
        launching.launch(backend, MlaPageTable, settings, arguments.fake_args, arguments.launch_args, self)
