"""Hold the sizes of a multi-head latent attention, checked against what its kernels are made for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dsv4lib.errors import ConfigError
from dsv4lib.ops.mla_decode.op import CACHE_DTYPES, E4M3, ENTRY, LATENT, MOST_HEADS, ROPE
from dsv4lib.ops.mla_decode.splits import PAGES, TILE, check_num_kv_splits, pack_factor

NOPE = 128  # dims of a head of q and k without RoPE, before W_UK is absorbed


class Layer(NamedTuple):
    """A layer as an engine's model hands it over.

    Attributes:
        layer_id: of its cache. tp_q_head_num: query heads of this rank.
        head_dim: of a query, 576. v_head_dim: of values as the kernel sees them, 512.
        scaling: of logits.
    """

    layer_id: int
    tp_q_head_num: int
    head_dim: int
    v_head_dim: int
    scaling: float


@dataclass(frozen=True)
class MLAConfig:
    """Sizes of a model's attention, of this rank.

    Attributes:
        num_heads: query heads of this rank, 1 to 128; see `of_rank`.
        kv_lora_rank: dims of a latent. qk_nope_head_dim, qk_rope_head_dim: of a head of q and k, without and with RoPE.
        v_head_dim: of values after absorption, so kv_lora_rank; the model's own 128 dims come back by W_UV afterwards.
        page_size: tokens of a page of the cache.
        dtype: of queries; others are cast. kv_dtype: of the cache, None: that of queries.
        q_scale, kv_scale: of FP8 queries and entries; a stored number stands for scale times itself.
        max_context_len: tokens of the longest request.
        num_kv_splits: -1: chosen from the shapes, 1: no splits, more: as many.

    Raises:
        ConfigError: a size that no kernel has, or types that do not go together.
    """

    num_heads: int = 128
    kv_lora_rank: int = LATENT
    qk_nope_head_dim: int = NOPE
    qk_rope_head_dim: int = ROPE
    v_head_dim: int = LATENT
    page_size: int = TILE
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    q_scale: float = 1.0
    kv_scale: float = 1.0
    max_context_len: int = 131072
    num_kv_splits: int = -1

    def __post_init__(self) -> None:
        if self.v_head_dim == NOPE:
            raise ConfigError("v_head_dim", NOPE, f"{LATENT}, of absorbed attention; W_UV makes {NOPE} of it later")
        for name, size in (("kv_lora_rank", LATENT), ("qk_nope_head_dim", NOPE), ("qk_rope_head_dim", ROPE)):
            if getattr(self, name) != size:
                raise ConfigError(name, getattr(self, name), f"{size}, as the kernels have it")
        if self.v_head_dim != LATENT:
            raise ConfigError("v_head_dim", self.v_head_dim, f"{LATENT}, that of a latent")
        if not 1 <= self.num_heads <= MOST_HEADS:
            raise ConfigError("num_heads", self.num_heads, f"1 to {MOST_HEADS} of a rank")
        if self.page_size not in PAGES:
            raise ConfigError("page_size", self.page_size, "one of " + ", ".join(map(str, PAGES)))
        if self.dtype not in CACHE_DTYPES:
            raise ConfigError("dtype", self.dtype, "one of " + ", ".join(map(str, CACHE_DTYPES)))
        if self.cache_dtype not in CACHE_DTYPES[self.dtype]:
            allowed = " or ".join(map(str, CACHE_DTYPES[self.dtype]))
            raise ConfigError("kv_dtype", self.cache_dtype, f"{allowed} with queries of {self.dtype}")
        for name, value, dtype in (
            ("q_scale", self.q_scale, self.dtype),
            ("kv_scale", self.kv_scale, self.cache_dtype),
        ):
            if not 2.0**-90 <= value <= 2.0**90 or (value != 1.0 and dtype != E4M3):
                raise ConfigError(name, value, "a number from 2^-90 to 2^90; 1 of what is not FP8")
        if self.max_context_len < 1:
            raise ConfigError("max_context_len", self.max_context_len, "at least 1 token")
        check_num_kv_splits(self.num_kv_splits)

    @classmethod
    def of_rank(cls, heads: int, tp_size: int, **others: object) -> MLAConfig:
        """Make the configuration of one rank of tensor parallelism: query heads are split, the cache is not.

        Raises:
            ConfigError: heads that ranks cannot share equally.
        """
        if tp_size < 1 or heads % tp_size:
            raise ConfigError("tp_size", tp_size, f"a divisor of {heads} heads")
        return cls(num_heads=heads // tp_size, **others)

    @property
    def cache_dtype(self) -> torch.dtype:
        """Type of the cache's elements."""
        return self.dtype if self.kv_dtype is None else self.kv_dtype

    @property
    def kv_cache_dim(self) -> int:
        """Elements of a token's row: latent, then the rotated key that all heads share."""
        return ENTRY

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's row in one layer."""
        return ENTRY * self.cache_dtype.itemsize

    @property
    def sm_scale(self) -> float:
        """Scale of logits: that of heads before absorption."""
        return 1 / math.sqrt(self.qk_nope_head_dim + self.qk_rope_head_dim)

    @property
    def pack(self) -> int:
        """Pages of a tile of 128 tokens; the width of a page table is a multiple of it."""
        return pack_factor(self.page_size)

    def layer(self, layer_id: int) -> Layer:
        """Make a layer of this model."""
        return Layer(layer_id, self.num_heads, ENTRY, self.v_head_dim, self.sm_scale)
