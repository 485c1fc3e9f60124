// Faults around wgmma. One instruction: 64 x 8 x 16, f16 to f32, both operands zeros in shared memory.
#include "common.cuh"

#define ZEROS                                                                 \
  __shared__ alignas(128) int4 s[128];                                        \
  s[T] = int4{0, 0, 0, 0};                                                    \
  fence_async();                                                              \
  __syncthreads();                                                            \
  float d[4] = {0, 0, 0, 0};                                                  \
  unsigned long long operand = (at(s) >> 4) | 0x0000001000080000ull;          \
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory")

INLINE void multiply(float *d, unsigned long long operand) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %4, 1, 1, 1, 0, 0;"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(operand) : "memory");
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N>
INLINE void wait_product() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

extern "C" {

// kind: missing_wgmma_wait; threads 128
__global__ void sums_that_a_product_still_writes(int *x, int *out) {
  ZEROS;
  multiply(d, operand);
  FIX(wait_product<0>();)
  out[T] = d[0] + d[3];  //!
  wait_product<0>();
}

// kind: missing_wgmma_wait; threads 128
__global__ void a_group_of_products_that_may_be_pending(int *x, int *out) {
  ZEROS;
  multiply(d, operand);
  wait_product<FAULT(1) FIX(0)>();
  out[T] = d[0];  //!
  wait_product<0>();
}

// kind: missing_proxy_fence; threads 128
__global__ void operands_of_a_product_without_a_proxy_fence(int *x, int *out) {
  __shared__ alignas(128) int4 s[128];
  s[T] = int4{0, 0, 0, 0};  //!
  FIX(fence_async();)
  __syncthreads();
  float d[4] = {0, 0, 0, 0};
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  multiply(d, (at(s) >> 4) | 0x0000001000080000ull);  //!
  wait_product<0>();
  out[T] = d[0];
}

// kind: race_shared|missing_proxy_fence; threads 128
__global__ void operands_that_are_overwritten_early(int *x, int *out) {
  ZEROS;
  multiply(d, operand);  //!
  FIX(wait_product<0>(); __syncthreads();)
  s[T].x = x[T];  //!
  wait_product<0>();
  out[T] = d[0];
}

}
