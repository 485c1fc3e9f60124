"""Number the formats of a KV cache, and count the bytes of a vector and of a token in each.

0 to 3 are the numbers that serving engines give to "auto", FP8 and turbo4; this lab's own follow.
"""

from __future__ import annotations

import enum

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import kv_entry, nvfp4, turbo4

ALIGN = 16  # bytes that an entry of nibbles, scales and bf16 is padded to


class KVDtype(enum.IntEnum):
    """What a KV cache holds.

    Attributes:
        AUTO: the dtype of the model, 16 bits. FP8_E4M3, FP8_E5M2: a byte an element, a scale a tensor.
        TURBO4: 4-bit centroids and an fp16 norm a vector. NVFP4: E2M1 and an E4M3 scale per 16 elements.
        FP8_DSV4: the 584-byte entry of DSV4, for 512 dims that are K and V at once.
    """

    AUTO = 0
    FP8_E4M3 = 1
    FP8_E5M2 = 2
    TURBO4 = 3
    NVFP4 = 4
    FP8_DSV4 = 5

    @classmethod
    def of(cls, name: str) -> KVDtype:
        """Look a format up by its name in lower case, as "turbo4".

        Raises:
            ArgumentError: there is none of that name.
        """
        found = {one.name.lower(): one for one in cls}.get(name)
        if found is None:
            raise ArgumentError("kv_cache_dtype", name, "one of " + ", ".join(one.name.lower() for one in cls))
        return found


def vector_bytes(kind: KVDtype, dim: int) -> int:
    """Bytes of one vector of ``dim`` elements, without padding.

    Raises:
        ArgumentError: the format has no vectors of that size.
    """
    if kind is KVDtype.TURBO4:
        return turbo4.record_bytes(dim)
    if not isinstance(dim, int) or dim < 1:
        raise ArgumentError("dim", dim, "an integer of at least 1")
    if kind is KVDtype.FP8_DSV4:
        if dim != kv_entry.HEAD_DIM:
            raise ArgumentError("dim", dim, f"{kv_entry.HEAD_DIM} for {kind.name.lower()}")
        return kv_entry.LAYOUT.entry_bytes
    if kind is KVDtype.NVFP4:
        if dim % nvfp4.BLOCK:
            raise ArgumentError("dim", dim, f"a multiple of {nvfp4.BLOCK} for nvfp4")
        return dim // 2 + dim // nvfp4.BLOCK
    return dim * (2 if kind is KVDtype.AUTO else 1)


def token_bytes(kind: KVDtype, dim: int, heads: int) -> int:
    """Bytes of the keys and values of a token of one layer, ``heads`` KV heads of ``dim`` elements each."""
    if not isinstance(heads, int) or heads < 1:
        raise ArgumentError("heads", heads, "an integer of at least 1")
    return 2 * heads * vector_bytes(kind, dim)


def latent_bytes() -> dict[str, int]:
    """Bytes of an entry of DSV4, 448 nope and 64 rope dims that are K and V at once, by format."""
    nvfp4_mixed = vector_bytes(KVDtype.NVFP4, kv_entry.NOPE) + 2 * kv_entry.ROPE
    return {
        "bf16": vector_bytes(KVDtype.AUTO, kv_entry.HEAD_DIM),
        "fp8_dsv4": vector_bytes(KVDtype.FP8_DSV4, kv_entry.HEAD_DIM),
        "nvfp4, rope in bf16": -(-nvfp4_mixed // ALIGN) * ALIGN,
        "turbo4, rope in bf16": turbo4.LATENT_LAYOUTS[turbo4.Latent.MIXED].entry_bytes,
        "turbo4, all rotated": turbo4.LATENT_LAYOUTS[turbo4.Latent.ROTATED].entry_bytes,
    }
