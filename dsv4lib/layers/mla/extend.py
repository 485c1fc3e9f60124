"""Serve prefill and chains of drafts with the decode kernel, a row a token.

Token i of a request's new ones attends to all before it and itself: a row of decode of length prefix + i + 1 on the
request's pages. So causal attention over any chunk is exact with a kernel that knows one query a row. The cache is read
once a token, where a prefill kernel reads it once a tile: right, and slow. Engines give a prefill back end instead.

A tree of drafts is no chain: which drafts a token sees does not follow from its length. Such steps are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4lib.errors import ArgumentError, BackendUnavailable
from dsv4lib.layers.mla.batch import ForwardBatch


class RowsOfDecode:
    """Prefill as rows of decode.

    Args:
        backend: the `MLABackend` whose pool, map and kernel are used.
    """

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Make a row of each new token; the tokens' keys must be stored before they are attended to.

        Raises:
            BackendUnavailable: a tree of drafts. ArgumentError: no lengths of the new tokens.
        """
        if batch.spec_info is not None:
            raise BackendUnavailable(
                f"{batch.forward_mode} with spec_info: rows of decode know no tree of drafts; give a delegate that does"
            )
        if len(batch.extend_seq_lens) != batch.batch_size:
            raise ArgumentError("extend_seq_lens", tuple(batch.extend_seq_lens), f"{batch.batch_size} numbers")
        pairs = zip(batch.extend_prefix_lens, batch.extend_seq_lens, strict=True)
        lengths = [prefix + i + 1 for prefix, count in pairs for i in range(count)]
        device = batch.req_pool_indices.device
        counts = torch.tensor(list(batch.extend_seq_lens), device=device)
        ids = batch.req_pool_indices.repeat_interleave(counts, output_size=len(lengths))
        self.backend.fill_metadata(
            ids, torch.tensor(lengths, dtype=torch.int32, device=device), max(lengths, default=0)
        )

    def init_forward_metadata_capture_cuda_graph(self, *given: Any) -> None:
        """Refuse a capture: how many rows a step of prefill has differs from step to step.

        Raises:
            BackendUnavailable: always.
        """
        raise BackendUnavailable("prefill and speculation as rows of decode are not captured; give a delegate that is")

    def init_forward_metadata_replay_cuda_graph(self, *given: Any) -> None:
        """Refuse a replay, as there is no capture.

        Raises:
            BackendUnavailable: always.
        """
        self.init_forward_metadata_capture_cuda_graph(*given)

    def forward_extend(self, *given: Any, **options: Any) -> Tensor:
        """Store keys and attend; arguments are those of `MLABackend.forward_decode`."""
        return self.backend.attend(*given, **options)
