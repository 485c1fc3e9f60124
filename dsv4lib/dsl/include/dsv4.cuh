// What the lab's kernels in CUDA C++ share: vectors of 16 bytes, reductions, sort keys, scales.
#pragma once

#include <cuda_bf16.h>

constexpr int kLanes = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Largest numbers of formats, and the least that a block's maximum counts as, by their bits.
constexpr unsigned kE4m3Max = 0x43e00000u, kE4m3Floor = 0x38d1b717u;  // 448, 1e-4
constexpr unsigned kE2m1Max = 0x40c00000u, kE2m1Floor = 0x01c00000u;  // 6, 6 x 2^-126

// N values that one load or store of 16 bytes moves.
template <typename T>
struct alignas(16) Vector {
  static constexpr int kSize = 16 / sizeof(T);
  T values[kSize];

  __device__ T& operator[](int i) { return values[i]; }
  __device__ const T& operator[](int i) const { return values[i]; }
};

template <typename T>
__device__ Vector<T> load(const T* place) {
  return *reinterpret_cast<const Vector<T>*>(place);
}

template <typename T>
__device__ void store(T* place, const Vector<T>& value) {
  *reinterpret_cast<Vector<T>*>(place) = value;
}

__device__ inline int lane_id() { return threadIdx.x % kLanes; }
__device__ inline int warp_id() { return threadIdx.x / kLanes; }

// The sum over a warp, in every lane. The order is that of a butterfly, so that all lanes have the same bits.
__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int offset = kLanes / 2; offset; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

// An integer that orders as the number does: -0 as 0, NaN below every number; never 0.
__device__ inline unsigned sort_key(float score) {
  if (isnan(score)) return 1u;
  const unsigned bits = __float_as_uint(score + 0.0f);  // -0 becomes 0
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The E8M0 byte of the smallest power of two that is not below amax / largest, 255 of Inf and NaN. Numbers by their
// bits: those of positive floats order as the floats do, NaN above all.
__device__ inline unsigned ue8m0(unsigned amax, unsigned largest) {
  constexpr unsigned kMantissa = 0x007fffffu;
  if (amax >= 0x7f800000u) return 255u;
  return ((amax + kMantissa - (largest & kMantissa)) >> 23) - (largest >> 23) + 127u;
}

// 1 / the scale of an E8M0 byte; NaN of 255.
__device__ inline float inverse_of(unsigned byte) {
  return __uint_as_float(byte == 255u ? 0x7fc00000u : (254u - byte) << 23);
}

// Wait for the kernel before this one, whose results may be read from here on. Before Hopper none overlaps another.
__device__ inline void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Let the next kernel start. It still waits for this one's end before it reads.
__device__ inline void launch_successor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
