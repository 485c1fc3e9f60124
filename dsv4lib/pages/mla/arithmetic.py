"""Count bytes, operations and times of paged MLA decode, from shapes and the rates that a GPU is sold with."""

from __future__ import annotations

from typing import NamedTuple

from dsv4lib.layers.mla.config import NOPE
from dsv4lib.ops.mla_decode.op import ENTRY, LATENT, ROPE

HEADS = 128  # of DeepSeek-V3
BF16 = 2  # bytes


class Rates(NamedTuple):
    """What a GPU is sold with. bytes_s: of its memory. flops_s: dense, bf16. sms: streaming multiprocessors."""

    bytes_s: float
    flops_s: float
    sms: int


GPUS = {"H100": Rates(3.35e12, 0.99e15, 132), "H200": Rates(4.8e12, 0.99e15, 132), "B200": Rates(8e12, 2.25e15, 148)}


class Work(NamedTuple):
    """Bytes that must move and operations of a launch."""

    bytes: int
    flops: int

    def floor_us(self, rates: Rates) -> float:
        """Return the time below which a GPU cannot be, in microseconds."""
        return 1e6 * max(self.bytes / rates.bytes_s, self.flops / rates.flops_s)

    def memory_us(self, rates: Rates) -> float:
        """Return the time of the bytes alone."""
        return 1e6 * self.bytes / rates.bytes_s

    def compute_us(self, rates: Rates) -> float:
        """Return the time of the operations alone."""
        return 1e6 * self.flops / rates.flops_s


def work(batch: int, tokens: int, heads: int = HEADS) -> Work:
    """Count a launch: the cache once, queries and output once; 576 products a logit, 512 an output."""
    moved = batch * tokens * ENTRY * BF16 + batch * heads * (ENTRY + LATENT) * BF16
    return Work(moved, 2 * batch * heads * tokens * (ENTRY + LATENT))


def token_bytes(heads: int = HEADS) -> dict[str, int]:
    """Count the bytes of a token in one layer's cache."""
    return {
        "keys and values of 128 heads": heads * (NOPE + ROPE + NOPE) * BF16,
        "the same without RoPE's dims": heads * 2 * NOPE * BF16,
        "latent and rotated key, bf16": ENTRY * BF16,
        "latent and rotated key, FP8": ENTRY,
    }


def roles_of(word: int) -> list[int]:
    """Decode CUTLASS's word of warp roles: warp i has nibble i, the lowest first."""
    return [word >> 4 * i & 0xF for i in range(8)]


ROLES = {0: "none", 1: "MMA", 2: "load", 3: "compute", 4: "page table"}
