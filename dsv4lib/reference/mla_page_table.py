"""Say which page each run of tokens of a request is in, and which tokens are not where attention looks for them."""

from __future__ import annotations

import torch
from torch import Tensor


def mla_page_table(
    req_to_token: Tensor,
    requests: Tensor,
    lengths: Tensor,
    page_size: int,
    starts: Tensor | None,
    out: Tensor,
    misaligned: Tensor | None = None,
) -> None:
    """Write page tables in place, request by request.

    Args:
        req_to_token: int32 [R, W], slots of tokens. requests, lengths: int32 [B].
        page_size: tokens of a page. starts: int32 [B], first tokens, or None: 0.
        out: int32 [B, N]; of a row its pages are written, and no others.
        misaligned: int32 [B, 2]: tokens that are not at table[t // page] * page + t % page, and the first of them.
    """
    width = req_to_token.shape[1]
    for row, (request, length) in enumerate(zip(requests.tolist(), lengths.tolist(), strict=True)):
        start = 0 if starts is None else int(starts[row])
        if not 0 <= request < len(req_to_token) or not 0 <= start < width or length <= 0:
            continue
        slots = req_to_token[request, start : start + length]
        firsts = slots[::page_size][: out.shape[1]]
        pages = torch.where(firsts < 0, -1, firsts // page_size)
        out[row, : len(pages)] = pages
        if misaligned is not None:
            slots = slots[: page_size * out.shape[1]]
            offset = torch.arange(len(slots), device=slots.device)
            wrong = (slots < 0) | (slots != pages[offset // page_size] * page_size + offset % page_size)
            misaligned[row, 0] = wrong.sum()
            if bool(wrong.any()):
                misaligned[row, 1] = start + int(wrong.nonzero()[0])
