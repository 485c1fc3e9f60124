"""The 584-byte KV entry of DSV4. 448 nope dims in FP8, 64 rope dims in bf16, one power-of-two scale per 64 nope dims.

    byte   0..447   E4M3 nope dims 0..447
    byte 448..575   bf16 rope dims 448..511, little endian            } 576 data bytes
    scale bytes 0..6  UE8M0, one per 64 nope dims; byte 7 is padding  }   8 scale bytes, elsewhere in the page

A page of n entries is n * 576 data bytes, then n * 8 scale bytes, its stride padded to a multiple of 576 (so that the
data of all pages is one TMA tensor of 576-byte rows). The same entry serves the window and both compressed caches.
Scale = 2^ceil(log2(max(amax, 1e-4) / 448)). Source: FlashMLA's DSV4 layout; DSV4 released inference code.

The vector is K and V at once. A NaN or Inf in a group of 64 makes that group NaN; rope dims keep theirs, bf16 has both.
"""

from __future__ import annotations

import torch

from dsv4lib.formats import _checks, fp8_block
from dsv4lib.formats.paged import PageLayout

HEAD_DIM = 512
NOPE = 448
ROPE = 64
GROUP = 64
GROUPS = NOPE // GROUP
LAYOUT = PageLayout(data_bytes=NOPE + 2 * ROPE, scale_bytes=8, stride_multiple=576)


def encode(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise entries.

    Args:
        kv: bf16, fp16, fp32 or fp64 [..., 512], RoPE already applied to the last 64 dims.

    Returns:
        data uint8 [..., 576] and scales uint8 [..., 8] (the last one zero).
    """
    work = _checks.working_copy("kv", kv)
    _checks.last_dim("kv", work, equal_to=HEAD_DIM)
    nope = fp8_block.quantize_activation(work[..., :NOPE], GROUP)
    rope = work[..., NOPE:].to(torch.bfloat16).contiguous().view(torch.uint8)
    return torch.cat([nope.codes, rope], -1), torch.nn.functional.pad(nope.scales, (0, LAYOUT.scale_bytes - GROUPS))


def decode(data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Invert ``encode`` up to its rounding: [..., 512]. Exact in bf16: 4 significant bits and a power of two.

    Args:
        data: uint8 [..., 576].
        scales: uint8 [..., 8]; the padding byte is ignored.
        dtype: bf16, fp32 or fp64.
    """
    data, scales = _checks.as_bytes("data", data), _checks.as_bytes("scales", scales)
    _checks.last_dim("data", data, equal_to=LAYOUT.data_bytes)
    _checks.shape("scales", scales, (*data.shape[:-1], LAYOUT.scale_bytes))
    nope = fp8_block.dequantize(fp8_block.FP8Tensor(data[..., :NOPE], scales[..., :GROUPS], (1, GROUP)), dtype)
    # clone: a view as bf16 needs 2-byte alignment, which a slice of someone's bytes need not have.
    rope = data[..., NOPE:].clone(memory_format=torch.contiguous_format).view(torch.bfloat16)
    return torch.cat([nope, rope.to(dtype)], -1)


def append(pages: torch.Tensor, page_size: int, indices: torch.Tensor, kv: torch.Tensor) -> None:
    """Quantise kv [T, 512] and store the entries in pages.

    Entry i goes to ``indices[i]`` = page * page_size + slot; -1 drops it.

    ``pages`` (uint8 [P, LAYOUT.page_bytes(page_size)]) is changed in place; an index must not come twice.
    """
    LAYOUT.write(pages, page_size, indices, *encode(kv))


def gather(
    pages: torch.Tensor, page_size: int, indices: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fetch and dequantise entries.

    Args:
        pages: uint8 [P, LAYOUT.page_bytes(page_size)].
        page_size: entries per page.
        indices: int32 or int64, any shape (a top-k list, padded with -1).
        dtype: bf16, fp32 or fp64.

    Returns:
        kv [..., 512] (zero rows at -1) and valid, bool [...]: attention must mask what is not valid.
    """
    data, scales, valid = LAYOUT.read(pages, page_size, indices)
    return decode(data, scales, dtype).masked_fill(~valid[..., None], 0.0), valid


def fake_quantize(kv: torch.Tensor) -> torch.Tensor:
    """Quantise and dequantise kv [..., 512] as the cache does. The dtype stays that of ``kv`` (bf16, fp32, fp64)."""
    return decode(*encode(kv), dtype=kv.dtype)
