"""Store keys of the lightning indexer, 128 dims. FP8 with one fp32 scale (132 bytes) or FP4 with four scales (68).

| variant | data               | scales                                        | bytes |
|---------|--------------------|-----------------------------------------------|-------|
| FP8     | 128 E4M3           | one fp32 (a power of two), little endian      | 132   |
| FP4     | 64 (128 E2M1)      | four E8M0, one per 32 dims                    | 68    |

A page of n keys is all data, then all scales, without padding. FP4 is what the model was trained for; engines also
offer FP8. Both expect keys after RoPE and the Hadamard rotation (``hadamard.transform``), and queries treated alike.
FP8 scale = 2^ceil(log2(max(amax, 1e-4) / 448)), decoding accepts any fp32 scale; FP4 is ``mxfp4``.
A NaN or Inf makes all dims that share its scale NaN.
"""

from __future__ import annotations

import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import _checks, e4m3, fp8_block, mxfp4, ue8m0
from dsv4lib.formats.paged import PageLayout

DIM = 128
FP8_LAYOUT = PageLayout(data_bytes=DIM, scale_bytes=4)
FP4_LAYOUT = PageLayout(data_bytes=DIM // 2, scale_bytes=DIM // mxfp4.BLOCK)


def encode_fp8(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode indexer keys as FP8.

    Keys [..., 128] become data uint8 [..., 128] (E4M3) and scale bytes uint8 [..., 4] (one fp32).
    """
    _checks.last_dim("keys", _checks.working_copy("keys", keys), equal_to=DIM)
    q = fp8_block.quantize_activation(keys, DIM)
    return q.codes, ue8m0.decode(q.scales, torch.float32).view(torch.uint8)


def decode_fp8(data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Invert ``encode_fp8`` up to its rounding.

    Returns code value * fp32 scale, rounded once to ``dtype``; [..., 128].
    """
    data, scales = _parts(data, scales, FP8_LAYOUT)
    # clone: a view as fp32 needs 4-byte alignment, which a slice of someone's bytes need not have.
    scale = scales.clone(memory_format=torch.contiguous_format).view(torch.float32)
    work = torch.promote_types(_checks.output_dtype(dtype), torch.float32)
    return (e4m3.decode(data, work) * scale.to(work)).to(dtype)


def encode_fp4(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode indexer keys as FP4.

    Keys [..., 128] become data uint8 [..., 64] (E2M1 pairs) and scales uint8 [..., 4] (E8M0).
    """
    _checks.last_dim("keys", _checks.working_copy("keys", keys), equal_to=DIM)
    q = mxfp4.quantize(keys)
    return q.packed, q.scales


def decode_fp4(data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Invert ``encode_fp4`` up to its rounding, [..., 128]. Exact in bf16, fp32 and fp64."""
    return mxfp4.dequantize(mxfp4.MXFP4Tensor(*_parts(data, scales, FP4_LAYOUT)), dtype)


_VARIANTS = {"fp8": (FP8_LAYOUT, encode_fp8, decode_fp8), "fp4": (FP4_LAYOUT, encode_fp4, decode_fp4)}


def append(pages: torch.Tensor, page_size: int, indices: torch.Tensor, keys: torch.Tensor, variant: str) -> None:
    """Quantise keys [T, 128] and store them in pages.

    Key i goes to ``indices[i]`` = page * page_size + slot; -1 drops it.

    Args:
        pages: uint8 [P, page bytes of the variant's layout], changed in place.
        page_size: keys per page.
        indices: int32 or int64 [T], none twice.
        keys: bf16, fp16, fp32 or fp64 [T, 128].
        variant: "fp8" or "fp4".
    """
    layout, encode, _ = _variant(variant)
    layout.write(pages, page_size, indices, *encode(keys))


def gather(
    pages: torch.Tensor, page_size: int, indices: torch.Tensor, variant: str, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fetch and dequantise keys: [..., 128] (zero rows at -1) and valid, bool [...]. Arguments as in ``append``."""
    layout, _, decode = _variant(variant)
    data, scales, valid = layout.read(pages, page_size, indices)
    return decode(data, scales, dtype).masked_fill(~valid[..., None], 0.0), valid


def _variant(variant: str) -> tuple:
    if variant not in _VARIANTS:
        raise ArgumentError("variant", variant, f"one of {list(_VARIANTS)}")
    return _VARIANTS[variant]


def _parts(data: torch.Tensor, scales: torch.Tensor, layout: PageLayout) -> tuple[torch.Tensor, torch.Tensor]:
    data, scales = _checks.as_bytes("data", data), _checks.as_bytes("scales", scales)
    _checks.last_dim("data", data, equal_to=layout.data_bytes)
    _checks.shape("scales", scales, (*data.shape[:-1], layout.scale_bytes))
    return data, scales
