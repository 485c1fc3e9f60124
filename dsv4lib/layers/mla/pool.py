"""Keep the cache of latents: a row of 576 elements a token and layer, in pages, written by slot.

    row of a token | latent, 512 | rotated key, 64 |         one row a token, shared by all heads

A slot is page * page_size + offset. The row after the last page takes what has no slot (padded rows of a batch), so a
write has one shape whatever is padded, and can be captured in a CUDA graph. It is not part of the cache that is read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4lib.errors import ArgumentError
from dsv4lib.layers.mla.config import MLAConfig
from dsv4lib.ops.mla_decode.op import E4M3, ENTRY, LATENT, ROPE

MOST_E4M3 = 448.0


class MLAPool:
    """Caches of all layers of a rank.

    Args:
        config: page size, type and scale. pages: of each layer. layers: how many. device: of the caches.

    Raises:
        ArgumentError: no pages, or no layers.
    """

    def __init__(self, config: MLAConfig, pages: int, layers: int = 1, device: str | torch.device = "cpu") -> None:
        if pages < 1 or layers < 1:
            raise ArgumentError("pages, layers", (pages, layers), "at least 1 of each")
        self.config, self.pages, self.tokens = config, pages, pages * config.page_size
        shape = self.tokens + 1, ENTRY
        self.rows = [torch.zeros(shape, dtype=config.cache_dtype, device=device) for _ in range(layers)]

    def __repr__(self) -> str:
        size = f"{len(self.rows)} layers of {self.pages} pages of {self.config.page_size} tokens"
        return f"MLAPool({size}, {self.config.cache_dtype}, {self.bytes:,} bytes)"

    @property
    def bytes(self) -> int:
        """Bytes of all caches."""
        return sum(rows.nbytes for rows in self.rows)

    def get_key_buffer(self, layer_id: int) -> Tensor:
        """Return a layer's rows, [tokens, 576]."""
        return self.rows[layer_id][: self.tokens]

    def get_value_buffer(self, layer_id: int) -> Tensor:
        """Return a layer's latents, [tokens, 512]: a view of its rows."""
        return self.get_key_buffer(layer_id)[:, :LATENT]

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """Return rows and latents of a layer."""
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def cache(self, layer_id: int) -> Tensor:
        """Return a layer's pages as attention reads them, [pages, page_size, 576]: a view."""
        return self.get_key_buffer(layer_id).view(self.pages, self.config.page_size, ENTRY)

    def set_mla_kv_buffer(self, layer: Any, loc: Tensor, cache_k_nope: Tensor, cache_k_rope: Tensor) -> None:
        """Store latents and rotated keys, two scattered copies.

        Args:
            layer: with a ``layer_id``. loc: [T], slot of each token; negative: stored nowhere.
            cache_k_nope: [T, 512] or [T, 1, 512]. cache_k_rope: [T, 64] or [T, 1, 64].

        Raises:
            ArgumentError: not one row a token (keys are shared by all heads), or on the CPU a slot past the pool.
        """
        where, rows = self._where(loc), self.rows[layer.layer_id]
        self._store(rows[:, :LATENT], where, self._flat("cache_k_nope", cache_k_nope, len(loc), LATENT))
        self._store(rows[:, LATENT:], where, self._flat("cache_k_rope", cache_k_rope, len(loc), ROPE))

    def set_kv_buffer(self, layer: Any, loc: Tensor, cache_k: Tensor, cache_v: Tensor | None = None) -> None:
        """Store whole rows of 576, as attention without separate rotated keys hands them over.

        Args:
            layer: with a ``layer_id``. loc: as above. cache_k: [T, 576] or [T, 1, 576].
            cache_v: not stored: values are the first 512 elements of keys.
        """
        where = self._where(loc)
        self._store(self.rows[layer.layer_id], where, self._flat("cache_k", cache_k, len(loc), ENTRY))

    def _where(self, loc: Tensor) -> Tensor:
        """Return rows of slots; of a negative one, and on a GPU of one past the pool, the row that no kernel reads."""
        if loc.device.type == "cpu" and bool((loc >= self.tokens).any()):
            raise ArgumentError("loc", loc[loc >= self.tokens].tolist()[:8], f"negative or 0..{self.tokens - 1}")
        loc = loc.long()
        return torch.where((loc < 0) | (loc >= self.tokens), self.tokens, loc)

    def _flat(self, name: str, x: Tensor, tokens: int, dim: int) -> Tensor:
        """Check that there is one row a token; return them in the cache's type."""
        if x.shape not in ((tokens, dim), (tokens, 1, dim)):
            raise ArgumentError(f"{name}.shape", tuple(x.shape), f"[{tokens}, {dim}]: one row a token, not one a head")
        x = x.reshape(tokens, dim)
        if self.config.cache_dtype != E4M3 or x.dtype == E4M3:
            return x.to(self.config.cache_dtype)
        return (x.float() / self.config.kv_scale).clamp(-MOST_E4M3, MOST_E4M3).to(E4M3)

    @staticmethod
    def _store(rows: Tensor, where: Tensor, x: Tensor) -> None:
        """Copy rows by number; of FP8 as bytes, which torch can scatter everywhere."""
        if x.dtype == E4M3:
            rows, x = rows.view(torch.uint8), x.contiguous().view(torch.uint8)
        rows[where] = x
