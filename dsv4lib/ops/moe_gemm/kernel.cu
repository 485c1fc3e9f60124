// Expand FP4 weights to E4M3 with an E8M0 scale for 32: what an FP8 GEMM reads. A thread owns 32 weights of a row.
//
//     GROUP 32, MXFP4:  code = the E4M3 number that the E2M1 number is; scales stay. Exact.
//     GROUP 16, NVFP4:  code = E4M3(c s / scale), scale = 2^ceil(log2(max(amax(c s), 1e-4) / 448)), c s exact in fp32
//
// A table of eight bytes in two registers: `prmt` looks four codes up at a time.
#include <cuda_fp8.h>

#include "dsv4.cuh"

using Bytes = Vector<unsigned char>;
using Words = Vector<unsigned>;
constexpr int kBlock = 32;  // weights of an E8M0 scale

// E4M3 codes of four E2M1 codes, the first in the lowest nibble. Magnitudes 0, 0.5, 1, 1.5 and 2, 3, 4, 6.
__device__ unsigned expand(unsigned codes) {
  const unsigned magnitudes = __byte_perm(0x3c383000u, 0x4c484440u, codes & 0x7777u);
  const unsigned signs = (codes & 0x8u) << 4 | (codes & 0x80u) << 8 | (codes & 0x800u) << 12 | (codes & 0x8000u) << 16;
  return magnitudes | signs;
}

__device__ float from_e4m3(unsigned code) {
  const __half_raw half = __nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(code), __NV_E4M3);
  return __half2float(__half(half));
}

extern "C" __global__ void __launch_bounds__(THREADS)
    expand_fp4(const unsigned char* packed, const unsigned char* scales, unsigned char* codes,
               unsigned char* new_scales, long long blocks) {
  const long long block = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
  wait_for_predecessor();
  launch_successor();
  if (block >= blocks) return;

  const Bytes given = load(packed + block * (kBlock / 2));
  const Words words = reinterpret_cast<const Words&>(given);
  unsigned out[kBlock / 4];  // four codes a word
#pragma unroll
  for (int i = 0; i < kBlock / 4; ++i) out[i] = expand(words[i / 2] >> 16 * (i % 2) & 0xffffu);

  if (GROUP == kBlock) {
    new_scales[block] = scales[block];
  } else {
    float values[kBlock];
    unsigned amax = kE4m3Floor;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const float factor = from_e4m3(scales[block * (kBlock / GROUP) + i / GROUP]);
      values[i] = from_e4m3(out[i / 4] >> 8 * (i % 4) & 0xffu) * factor;
      amax = max(amax, __float_as_uint(fabsf(values[i])));
    }
    const unsigned scale = ue8m0(amax, kE4m3Max);
    const float inverse = inverse_of(scale);
#pragma unroll
    for (int i = 0; i < kBlock / 4; ++i) {
      out[i] = 0u;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float value = values[4 * i + j] * inverse;
        out[i] |= static_cast<unsigned>(__nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3)) << 8 * j;
      }
    }
    new_scales[block] = scale;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Words half = {out[4 * i], out[4 * i + 1], out[4 * i + 2], out[4 * i + 3]};
    store(reinterpret_cast<unsigned*>(codes + block * kBlock) + 4 * i, half);
  }
}
