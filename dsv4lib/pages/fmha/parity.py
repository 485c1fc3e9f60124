"""Compare the attention op and transformers' attention with fp64. Both get what the latter was given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dsv4lib import check
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.fmha import op
from dsv4lib.reference import rope
from dsv4lib.reference.transformers_attention import AttentionCall


@dataclass(frozen=True)
class PeerOutcome:
    """The op beside the peer on the same inputs.

    Attributes:
        output: [T, H, D] bf16, the op's. truth: the peer's function in fp64 on the same rounded inputs.
        factor: the op against the truth, beside the peer's own function in bf16.
        rel_l2: of the op against the truth; peer_rel_l2: of the peer in bf16.
        unrounded_rel_l2: of the op against what the peer computed in fp32, its inputs not rounded to bf16.
    """

    output: torch.Tensor
    truth: torch.Tensor
    factor: check.FactorResult
    rel_l2: float
    peer_rel_l2: float
    unrounded_rel_l2: float


def peer_arguments(call: AttentionCall, tokens: torch.Tensor) -> dict[str, Any]:
    """Make the op's arguments for some tokens of a call.

    The mask is rows of the window and a list (CSA) or rows of entries.

    Raises:
        ArgumentError: a mask whose window is not consecutive keys: the op's contract does not cover it.
    """
    seen = call.visible[tokens]
    window, entries = seen[:, : call.window_keys], seen[:, call.window_keys :]
    pool = call.kv[call.window_keys :].bfloat16()
    given = {
        "q": call.q[tokens].bfloat16(),
        "window": op.Rows(call.kv[: call.window_keys].bfloat16(), *_consecutive("window", window)),
        "sink": call.sinks,
        "rope": (call.cos[tokens], call.sin[tokens]),
        "scale": call.scale,
    }
    if call.kind == "HCA" and len(pool):
        given["entries"] = op.Rows(pool, *_consecutive("entries", entries))
    if call.kind == "CSA" and len(pool):
        place = torch.arange(len(pool), dtype=torch.int32).expand(len(tokens), -1)
        listed = torch.where(entries, place, -1).sort(1, descending=True).values
        given["entries"] = op.Selected(pool, listed.contiguous(), entries.sum(1).int())
    return given


def _consecutive(name: str, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    count, first = seen.sum(1), seen.int().argmax(1)
    last = seen.shape[1] - 1 - seen.int().flip(1).argmax(1)
    if bool(((last - first + 1 != count) & (count > 0)).any()):
        raise ArgumentError(name, seen.shape, "consecutive keys of every query")
    return first.int(), count.int()


def run_peer(call: AttentionCall, tokens: torch.Tensor, backend: str = "emulator", **changed: Any) -> PeerOutcome:
    """Run the op on some tokens of a call, with the inverse rotation, and compare. ``changed``: its arguments."""

    def turned(o: torch.Tensor) -> torch.Tensor:
        cos, sin = (x[tokens].to(o.dtype)[:, None] for x in (call.cos, call.sin))
        return torch.cat((o[..., :-64], rope.rotate(o[..., -64:], cos, -sin)), -1)

    o, _ = op.fmha(**{**peer_arguments(call, tokens), **changed}, backend=backend)
    truth = turned(call.peer(torch.float64, torch.bfloat16)[tokens])
    peer = turned(call.peer(torch.bfloat16, torch.bfloat16)[tokens])
    whole = call.rotated[tokens].double()

    def rel(x: torch.Tensor, expected: torch.Tensor) -> float:
        return float((x.double() - expected).norm() / expected.norm())

    return PeerOutcome(o, truth, check.within_factor(o, peer, truth), rel(o, truth), rel(peer, truth), rel(o, whole))
