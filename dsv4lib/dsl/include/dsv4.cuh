// What the lab's kernels in CUDA C++ share: vectors of 16 bytes, reductions, sort keys, programmatic dependent launch.
#pragma once

#include <cuda_bf16.h>

constexpr int kLanes = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

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
