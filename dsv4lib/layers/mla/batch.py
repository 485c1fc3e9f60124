"""Describe a step as a serving engine does, and say which attention serves it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from torch import Tensor

from dsv4lib.errors import ArgumentError


class ForwardMode(StrEnum):
    """What a step does.

    DECODE: a token a request. IDLE: nothing, on a rank without requests. EXTEND: prefill, in chunks. MIXED: prefill and
    decode. TARGET_VERIFY, DRAFT_EXTEND: speculative decoding.
    """

    DECODE = "decode"
    IDLE = "idle"
    EXTEND = "extend"
    MIXED = "mixed"
    TARGET_VERIFY = "target_verify"
    DRAFT_EXTEND = "draft_extend"


class Route(StrEnum):
    """Who serves a step: the decode kernel, or the back end for everything else."""

    OURS = "decode kernel"
    OTHER = "delegate"


ROUTES = MappingProxyType(
    {mode: Route.OURS if mode in (ForwardMode.DECODE, ForwardMode.IDLE) else Route.OTHER for mode in ForwardMode}
)


def route(mode: ForwardMode, spec_info: Any = None) -> Route:
    """Choose who serves a step; whatever has speculative information goes to the delegate."""
    return Route.OTHER if spec_info is not None else ROUTES[mode]


@dataclass(frozen=True)
class ForwardBatch:
    """A step.

    Attributes:
        forward_mode: what it does. batch_size: requests.
        req_pool_indices: int [B], rows of the map of token slots. seq_lens: int [B], tokens with this step's.
        out_cache_loc: int [T], slots of this step's tokens; negative: stored nowhere.
        seq_lens_cpu: the lengths, where the host knows them; None: it reads them, and waits.
        spec_info: of speculative decoding, None otherwise.
        extend_prefix_lens, extend_seq_lens: of prefill: tokens before this step's, and how many are this step's.

    Raises:
        ArgumentError: numbers of rows that contradict each other.
    """

    forward_mode: ForwardMode
    batch_size: int
    req_pool_indices: Tensor
    seq_lens: Tensor
    out_cache_loc: Tensor
    seq_lens_cpu: Sequence[int] | None = None
    spec_info: Any = None
    extend_prefix_lens: Sequence[int] = ()
    extend_seq_lens: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name in ("req_pool_indices", "seq_lens"):
            if tuple(getattr(self, name).shape) != (self.batch_size,):
                raise ArgumentError(f"{name}.shape", tuple(getattr(self, name).shape), f"[{self.batch_size}]")
        if len(self.extend_prefix_lens) != len(self.extend_seq_lens):
            raise ArgumentError("extend_prefix_lens", self.extend_prefix_lens, "as many as extend_seq_lens")

    @property
    def route(self) -> Route:
        """Who serves it."""
        return route(self.forward_mode, self.spec_info)

    def most_tokens(self) -> int:
        """Return the length of the longest request, from the host's copy if there is one."""
        lengths = self.seq_lens.tolist() if self.seq_lens_cpu is None else list(map(int, self.seq_lens_cpu))
        return max(lengths, default=0)
