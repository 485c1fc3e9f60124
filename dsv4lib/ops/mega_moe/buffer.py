"""Hold a rank's memory for the fused MoE: its symmetric buffer, the addresses of its peers' and its workspace.

The caller makes the symmetric memory: `torch.distributed._symmetric_memory` on GPUs, `emulator.devices(n).symmetric`
in the emulator, an ordinary tensor for one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib.errors import ArgumentError
from dsv4lib.ops.mega_moe.layout import ALIGN, Layout


class Workspace(NamedTuple):
    """Rows between the phases; shapes as in `Layout.workspace`.

    Attributes:
        x_rows, x_row_scales, h_rows, h_row_scales: uint8, codes and swizzled scales of both GEMMs' inputs.
        sources: int32, rank * M k + route of each row. row_weights: fp32, weight of each row.
    """

    x_rows: Tensor
    x_row_scales: Tensor
    h_rows: Tensor
    h_row_scales: Tensor
    sources: Tensor
    row_weights: Tensor


@dataclass(frozen=True)
class SymmetricBuffer:
    """What a rank keeps from call to call.

    Attributes:
        layout: the same on all ranks. rank: of this device.
        storage: uint8 [layout.bytes], this rank's symmetric buffer, zeros before the first call.
        peers: int64 [W], addresses of all ranks' buffers as this device sees them.
        state: int32, counters and the epoch, zeros before the first call. workspace: see there.
    """

    layout: Layout
    rank: int
    storage: Tensor
    peers: Tensor
    state: Tensor
    workspace: Workspace

    @classmethod
    def over(cls, layout: Layout, rank: int, storage: Tensor, addresses: Sequence[int]) -> SymmetricBuffer:
        """Make one over symmetric memory, whose bytes must be 0 on all ranks before any of them calls.

        Args:
            storage: this rank's, uint8, at least layout.bytes. addresses: of all ranks' storages, this one's too.

        Raises:
            ArgumentError: a rank that is none of W, memory of another size or type, an address of another place.
        """
        if not 0 <= rank < layout.world:
            raise ArgumentError("rank", rank, f"0 to {layout.world - 1}")
        if storage.dtype != torch.uint8 or storage.dim() != 1 or len(storage) < layout.bytes:
            raise ArgumentError("storage", f"{storage.dtype}{list(storage.shape)}", f"uint8 [{layout.bytes}] or more")
        if len(addresses) != layout.world or addresses[rank] != storage.data_ptr():
            allowed = f"{layout.world} addresses, that of rank {rank} {storage.data_ptr()}"
            raise ArgumentError("addresses", list(addresses), allowed)
        if any(address % ALIGN for address in addresses):
            raise ArgumentError("addresses", list(addresses), f"multiples of {ALIGN}")
        place = storage.device
        kinds = {"sources": torch.int32, "row_weights": torch.float32}
        shapes = layout.workspace()
        space = {
            name: torch.zeros(shape, dtype=kinds.get(name, torch.uint8), device=place) for name, shape in shapes.items()
        }
        return cls(
            layout,
            rank,
            storage[: layout.bytes],
            torch.tensor(list(addresses), dtype=torch.int64, device=place),
            torch.zeros(layout.state_words, dtype=torch.int32, device=place),
            Workspace(**space),
        )

    @classmethod
    def alone(cls, layout: Layout, device: str = "cpu") -> SymmetricBuffer:
        """Make one for a single rank, over ordinary memory.

        Raises:
            ArgumentError: a layout of several ranks.
        """
        if layout.world != 1:
            raise ArgumentError("layout.world", layout.world, "1: several ranks need symmetric memory, see `over`")
        whole = torch.zeros(layout.bytes + ALIGN, dtype=torch.uint8, device=device)
        start = -whole.data_ptr() % ALIGN
        storage = whole[start : start + layout.bytes]
        return cls.over(layout, 0, storage, [storage.data_ptr()])

    def _region(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        start, size = self.layout.offsets()[name], self.layout.regions()[name]
        return self.storage[start : start + size].view(dtype).view(shape)

    @property
    def x(self) -> Tensor:
        """View the codes of this rank's tokens, uint8 [M, H], of NVFP4 [M, H / 2]."""
        return self._region("x", torch.uint8, self.layout.max_tokens, self.layout.code_bytes(self.layout.hidden))

    @property
    def x_scales(self) -> Tensor:
        """View their scales, uint8 [M, H / 32], of NVFP4 [M, H / 16]."""
        whole = self._region("x_scales", torch.uint8, self.layout.max_tokens, self.layout.pitch)
        return whole[:, : self.layout.scales(self.layout.hidden)]

    @property
    def topk_idx(self) -> Tensor:
        """View the experts of tokens, int64 [M, k]."""
        return self._region("topk_idx", torch.int64, self.layout.max_tokens, self.layout.topk)

    @property
    def topk_weights(self) -> Tensor:
        """View the weights of tokens' experts, fp32 [M, k]."""
        return self._region("topk_weights", torch.float32, self.layout.max_tokens, self.layout.topk)

    @property
    def combine(self) -> Tensor:
        """View the results of experts, bf16 [k, M, H]."""
        one = self.layout
        return self._region("combine", torch.bfloat16, one.topk, one.max_tokens, one.hidden)

    @property
    def lost(self) -> Tensor:
        """View the number of routes that found no room, int32 [], over all calls. Calls with such wrote NaN."""
        return self.state[self.layout.lost]

    @property
    def received(self) -> Tensor:
        """View the routes that each of this rank's experts got from all ranks, int32 [E / W], summed over all calls.

        They may be set to 0 between calls, and must be before an expert's sum passes 2^31 - 1, where it wraps.
        """
        return self.state[self.layout.received :]

    def stage(self, x: Tensor, x_scale: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> int:
        """Copy this rank's tokens to where peers read them; what is there already is not copied.

        Returns:
            T, their number.

        Raises:
            ArgumentError: a tensor of a wrong type or shape, or more tokens than the buffer has room for.
        """
        given = {"x": x, "x_scale": x_scale, "topk_idx": topk_idx, "topk_weights": topk_weights}
        views = self.x, self.x_scales, self.topk_idx, self.topk_weights
        tokens = len(x) if x.dim() else 0
        if tokens > self.layout.max_tokens:
            raise ArgumentError("x.shape", tuple(x.shape), f"at most {self.layout.max_tokens} tokens")
        for (name, source), view in zip(given.items(), views, strict=True):
            if tuple(source.shape) != (tokens, view.shape[1]):
                raise ArgumentError(f"{name}.shape", tuple(source.shape), str((tokens, view.shape[1])))
            if source.dtype != view.dtype and not (name == "topk_idx" and source.dtype == torch.int32):
                raise ArgumentError(f"{name}.dtype", source.dtype, str(view.dtype))
            if source.data_ptr() != view.data_ptr():
                view[:tokens].copy_(source)
        return tokens
