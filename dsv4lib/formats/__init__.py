"""Number formats of DSV4 as reference codecs in plain PyTorch. Readable, vectorised, exact to the bit.

| module          | format                                             | element     | scale                          |
|-----------------|----------------------------------------------------|-------------|--------------------------------|
| `floatcodec`    | any minifloat; E2M1, E2M3, E3M2, E4M3, E5M2        |             |                                |
| `e2m1`          | FP4, packed two per byte                           | 4 bit       |                                |
| `e4m3`          | FP8, largest 448                                   | 8 bit       |                                |
| `e5m2`          | FP8, largest 57344, has Inf                        | 8 bit       |                                |
| `ue8m0`         | power-of-two scale, rounded up                     | 8 bit       |                                |
| `fp8_block`     | weights 128x128; activations 1x128; 1x64; MXFP8    | E4M3        | E8M0 or fp32 per tile          |
| `mxfp4`         | routed experts; indexer FP4; conversion to FP8     | E2M1        | E8M0 per 32                    |
| `nvfp4`         | routed experts of the NVFP4 checkpoints            | E2M1        | E4M3 per 16, fp32 per tensor   |
| `kv_entry`      | KV cache entry, 584 bytes, paged                   | E4M3 + bf16 | 7 UE8M0                        |
| `turbo4`        | 4-bit KV cache: rotation, Lloyd-Max centroids      | 4 bit       | fp16 norm per vector           |
| `kv_dtype`      | numbers and bytes of KV cache formats              | any of them |                                |
| `indexer_key`   | indexer key, 132 or 68 bytes, paged                | E4M3 / E2M1 | fp32 / 4 E8M0                  |
| `paged`         | page layout: all data, then all scales             |             |                                |
| `scale_swizzle` | 128x4 scale-factor layout of block-scaled MMAs     |             |                                |
| `hadamard`      | orthonormal 128-point rotation before indexer FP4  |             |                                |
| `weight_modes`  | what expert weights become before a GEMM           | any of them |                                |

Common rules. Codes and scale bytes are uint8 tensors (torch's float8 and float4 dtypes are accepted where they mean
the same bits). Rounding is to nearest, ties to even; too large a value saturates. Element formats keep NaN where they
have a code for it; in block formats a NaN or Inf makes every value that shares its scale NaN. Inputs may be bf16, fp16,
fp32 or fp64 (no fp64 value is rounded twice), outputs bf16, fp32 or fp64. Wrong input raises ArgumentError.
"""

from dsv4lib.formats import (
    e2m1,
    e4m3,
    e5m2,
    floatcodec,
    fp8_block,
    hadamard,
    indexer_key,
    kv_dtype,
    kv_entry,
    mxfp4,
    nvfp4,
    paged,
    scale_swizzle,
    turbo4,
    ue8m0,
    weight_modes,
)

__all__ = [
    "e2m1",
    "e4m3",
    "e5m2",
    "floatcodec",
    "fp8_block",
    "hadamard",
    "indexer_key",
    "kv_dtype",
    "kv_entry",
    "mxfp4",
    "nvfp4",
    "paged",
    "scale_swizzle",
    "turbo4",
    "ue8m0",
    "weight_modes",
]
