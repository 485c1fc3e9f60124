"""Peers of `topk`: the two selections that vLLM's indexer chooses between."""

from __future__ import annotations

from functools import partial

import torch

from dsv4lib.bench.ops import peers
from dsv4lib.bench.ops.case import Absent, Given, Provider

PICKS = 512, 1024, 2048  # that they are compiled for
COOPERATIVE_ROWS = 32  # above it vLLM takes the other
WORKSPACE = 1 << 20  # bytes; what vLLM gives them


def providers() -> tuple[Provider, ...]:
    """vLLM's for few rows, and for many."""
    return tuple(Provider(f"vLLM {name}", partial(_bind, f"{name}_topk")) for name in ("cooperative", "persistent"))


def _bind(name: str, given: Given) -> peers.Bound:
    operator = getattr(peers.vllm_operators("_C_stable_libtorch", "_C"), name)
    scores, lengths, k = given["scores"], given["lengths"], given["k"]
    if k not in PICKS:
        raise Absent(f"k {k}: vLLM has {', '.join(map(str, PICKS))}")
    if name == "cooperative_topk" and (len(scores) > COOPERATIVE_ROWS or scores.stride(0) % 4):
        raise Absent(f"more than {COOPERATIVE_ROWS} rows, or rows that are not multiples of 16 bytes apart")
    indices = peers.new(scores, len(scores), k, dtype=torch.int32)
    space = torch.zeros(WORKSPACE, dtype=torch.uint8, device=scores.device)
    return peers.bound(lambda: operator(scores, lengths, indices, space, k, scores.shape[1]), indices=lambda _: indices)
