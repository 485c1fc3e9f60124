// Faults between threads of a block, as they are written every day.
#include "common.cuh"
extern "C" {

// kind: race_shared
__global__ void reads_before_the_barrier(int *x, int *out) {
  __shared__ int s[64];
  s[T] = x[T];  //!
  FIX(__syncthreads();)
  out[T] = s[T ^ 32];  //!
}

// kind: race_shared
__global__ void exchanges_twice_without_a_second_barrier(int *x, int *out) {
  __shared__ int s[64];
  int v = x[T];
  for (int i = 0; i < 3; i++) {
    s[T] = v;  //!
    __syncthreads();
    v += s[T ^ 32];  //!
    FIX(__syncthreads();)
  }
  out[T] = v;
}

// kind: race_shared
__global__ void sums_by_a_tree_with_one_barrier_too_few(int *x, int *out) {
  __shared__ int s[64];
  s[T] = x[T];  //!
  __syncthreads();
  for (int n = 32; n > 0; n >>= 1) {
    if (T < n) s[T] += s[T + n];  //!
    FIX(__syncthreads();)
    FAULT(if (n > 32) __syncthreads();)
  }
  out[T] = s[0];  //!
}

// kind: missing_warp_sync
__global__ void exchanges_in_a_warp_without_syncwarp(int *x, int *out) {
  __shared__ int s[64];
  s[T] = x[T];  //!
  FIX(__syncwarp();)
  out[T] = s[T ^ 1];  //!
}

// kind: missing_warp_sync
__global__ void overwrites_what_the_next_lane_reads(int *x, int *out) {
  __shared__ int s[64];
  s[T] = x[T];
  __syncwarp();
  int v = s[T ^ 1];  //!
  FIX(__syncwarp();)
  s[T] = v + 1;  //!
  __syncwarp();
  out[T] = s[T];
}

// kind: lane_outside_mask
__global__ void shuffles_outside_the_mask(int *x, int *out) {
  out[T] = __shfl_xor_sync(FAULT(0xffff) FIX(0xffffffff), x[T], 1);  //!
}

// kind: diverged_sync
__global__ void votes_without_half_of_the_warp(int *x, int *out) {
  if (T % 32 < 16)
    out[T] = __ballot_sync(FAULT(0xffffffff) FIX(0xffff), x[T] > 5);  //!
  __syncwarp();
}

// kind: uninitialised_smem
__global__ void reads_what_nothing_wrote(int *x, int *out) {
  __shared__ int s[64];
  FIX(s[T] = 0; __syncthreads();)
  FAULT(if (T < 32) s[T] = 0; __syncthreads();)
  out[T] = s[T ^ 32];  //!
}

// kind: race_global
__global__ void writes_one_word_from_two_warps(int *x, int *out) {
  if (T % 32 == 0) out[FIX(T) FAULT(0)] = T;  //!
}

// kind: race_global
__global__ void raises_a_flag_without_a_fence(int *x, int *out) {
  volatile int *flag = x + 100;
  if (T == 0) {
    out[0] = 7;  //!
    FIX(__threadfence();)
    *flag = 1;
  }
  if (T == 32) {
    while (*flag == 0) {}
    FIX(__threadfence();)
    out[1] = out[0];  //!
  }
}

// kind: race_shared
__global__ void reads_a_counter_without_a_barrier(int *x, int *out) {
  __shared__ int n;
  if (T == 0) n = 0;
  __syncthreads();
  atomicAdd(&n, x[T]);  //!
  FIX(__syncthreads();)
  out[T] = n;  //!
}

// kind: missing_cp_async_wait
__global__ void reads_what_cp_async_brings(int *x, int *out) {
  __shared__ int s[64];
  unsigned to = __cvta_generic_to_shared(s + T);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(x + T) : "memory");  //!
  asm volatile("cp.async.commit_group;" ::: "memory");
  FIX(asm volatile("cp.async.wait_group 0;" ::: "memory");)
  out[T] = s[T];  //!
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// kind: Deadlock
__global__ void waits_for_a_flag_and_counts(int *x, int *out) {
  volatile int *flag = x + 100;
  if (T >= 32) return;
  while (*flag == FAULT(0) FIX(1)) out[T] += 1;  //!
}

}
