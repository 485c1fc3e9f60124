"""The KV cache with the structure a serving system has, in plain tensors.

Per layer: a ring of the last ``window`` KV vectors (slot = position mod window); for CSA and HCA the compressor state
and the finished entries; for CSA also the indexer's state and keys. Ring and state have a fixed size per request,
entries and keys grow by one per ``rate`` tokens. All requests of a batch are at the same position.

Tensors are replaced, never written in place, so a gradient can flow through a chunked forward, and :meth:`Cache.fork`
costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dsv4lib.config import LayerKind, ModelConfig
from dsv4lib.errors import ArgumentError
from dsv4lib.reference import compressor


@dataclass
class LayerCache:
    """One layer's cache; the fields a kind does not have are None.

    window ``[B, window, D]``, entries ``[B, n, D]``, index_keys ``[B, n, DI]``; the states are ``compressor.State``.
    """

    kind: LayerKind
    window: torch.Tensor
    state: compressor.State | None = None
    entries: torch.Tensor | None = None
    index_state: compressor.State | None = None
    index_keys: torch.Tensor | None = None

    def part_bytes(self) -> dict[str, int]:
        """Bytes held per part, in the dtype of this cache."""
        parts = {
            "window": (self.window,),
            "state": self.state or (),
            "entries": () if self.entries is None else (self.entries,),
            "index_state": self.index_state or (),
            "index_keys": () if self.index_keys is None else (self.index_keys,),
        }
        return {name: sum(t.numel() * t.element_size() for t in tensors) for name, tensors in parts.items()}


@dataclass
class Cache:
    """Caches of all layers, and how many tokens each side has seen.

    ``position``: tokens the backbone has consumed, the position of the next one; ``mtp_position``: the same for the MTP
    block, which has one layer cache of its own.
    """

    config: ModelConfig
    batch: int
    layers: list[LayerCache]
    mtp: LayerCache
    position: int = 0
    mtp_position: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of every tensor held."""
        return self.mtp.window.dtype

    def memory_report(self) -> dict[str, dict[str, int]]:
        """Count the bytes held per layer and part.

        Under ``layers.N`` and ``mtp.0``; see :meth:`LayerCache.part_bytes`.
        """
        report = {f"layers.{i}": layer.part_bytes() for i, layer in enumerate(self.layers)}
        return report | {"mtp.0": self.mtp.part_bytes()}

    def fork(self) -> Cache:
        """Continue a second time from here. Tensors are shared; moving one cache on leaves the other as it is.

        This is how a prefix is shared, and how a speculative step is rolled back: fork before it, keep the fork.
        """
        return replace(self, layers=[replace(layer) for layer in self.layers], mtp=replace(self.mtp))

    def adopt(self, fork: Cache) -> None:
        """Move on to where a fork of this cache got."""
        self.layers, self.mtp = fork.layers, fork.mtp
        self.position, self.mtp_position = fork.position, fork.mtp_position

    def total_bytes(self) -> int:
        """Bytes held by all layers."""
        return sum(sum(parts.values()) for parts in self.memory_report().values())


def new_layer_cache(
    config: ModelConfig, kind: LayerKind, batch: int, dtype: torch.dtype, device: torch.device
) -> LayerCache:
    """Empty cache of one layer."""
    window = torch.zeros(batch, config.window, config.head_dim, dtype=dtype, device=device)
    layer = LayerCache(kind, window)
    if kind is LayerKind.SWA:
        return layer
    overlap = kind is LayerKind.CSA
    width = config.head_dim * (2 if overlap else 1)
    layer.state = compressor.new_state(batch, config.rate(kind), width, overlap, dtype, device)
    layer.entries = window.new_zeros(batch, 0, config.head_dim)
    if kind is LayerKind.CSA:
        layer.index_state = compressor.new_state(batch, config.csa_rate, 2 * config.index_dim, True, dtype, device)
        layer.index_keys = window.new_zeros(batch, 0, config.index_dim)
    return layer


def new_cache(config: ModelConfig, batch: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Cache:
    """Empty cache at position 0 for ``batch`` requests."""
    if batch < 1:
        raise ArgumentError("batch", batch, "an integer >= 1")
    device = torch.device(device)
    layers = [new_layer_cache(config, kind, batch, dtype, device) for kind in config.layer_kinds]
    return Cache(config, batch, layers, new_layer_cache(config, config.mtp_kind, batch, dtype, device))


def append_window(ring: torch.Tensor, kv: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Put the KV vectors of positions ``start ..`` after those the ring still holds.

    Args:
        ring: ``[B, window, D]``, slot of position t is t mod window.
        kv: ``[B, T, D]``.
        start: position of ``kv[:, 0]``.

    Returns:
        keys ``[B, S, D]`` that the T queries may need, oldest first, their positions ``[S]``, and the new ring.
    """
    window, end = ring.shape[1], start + kv.shape[1]
    # The query at ``start`` looks back over window - 1 older positions.
    old = torch.arange(max(0, start - window + 1), start, device=ring.device)
    new = torch.arange(start, end, device=ring.device)
    keep = new[-window:]
    after = ring.index_copy(1, keep % window, kv[:, kv.shape[1] - keep.shape[0] :])
    return torch.cat((ring[:, old % window], kv), dim=1), torch.cat((old, new)), after
