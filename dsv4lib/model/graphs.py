"""Capture padded decode steps as CUDA graphs and replay them.

    graph = DecodeGraph(model, caches, 8)
    hidden = graph.run(batch)                           bf16 [8, d], of at most 8 requests, a token each

A graph is a whole step: row numbers and angles from the tables on, then every layer. All that changes between replays
is in the tables, which `Tables.fill` writes to one address; lengths of contexts are among them, and shapes depend on
the padded size alone. It is captured on a step of padding, which writes nothing: a running softmax must not run twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4lib.cache.request import Step as Batch
from dsv4lib.errors import BackendUnavailable
from dsv4lib.layers.communicator import SINGLE
from dsv4lib.model.paged import PagedCaches
from dsv4lib.model.transformer import Transformer
from dsv4lib.ops.common.graph_capture import capture


def on_cuda(model: Transformer) -> bool:
    """Say whether a model is on a CUDA device."""
    return model.device.type == "cuda"


class DecodeGraph:
    """One captured decode step.

    Args:
        model: runs it. caches: of it, without a step under way. size: requests that it is padded to.

    Raises:
        BackendUnavailable: the model is on no CUDA device, or divided between ranks.
    """

    @torch.no_grad()
    def __init__(self, model: Transformer, caches: PagedCaches, size: int) -> None:
        if not on_cuda(model):
            raise BackendUnavailable(f"CUDA graphs need a model on a CUDA device; this one is on {model.device}")
        if model.groups != SINGLE:
            raise BackendUnavailable(
                "CUDA graphs need a model of one rank: counts of tokens for experts go over the host"
            )
        self.caches = caches
        caches.fill(Batch([]))
        self.captured = capture(lambda: model.hidden(caches.decode_arrays(size))[0])

    def run(self, batch: Batch) -> Tensor:
        """Run a step of one token a request.

        Returns hidden values, which the next run overwrites.
        """
        self.caches.fill(batch)
        self.captured.replay()
        return self.captured.out
