// Faults of whole patterns: rings of buffers, grid barriers, work split over blocks, reductions by a cluster.
#include "common.cuh"
#include <cuda_pipeline_primitives.h>

#define CTA blockIdx.x
#define FLAG (x + 100)

extern "C" {

// --- rings of buffers: warp 0 fills, warp 1 empties

// kind: race_shared|Deadlock
__global__ void a_ring_that_counts_phases_wrongly(int *x, int *out) {
  __shared__ int s[2][32];
  __shared__ Barrier full[2], empty[2];
  if (T == 0)
    for (int i = 0; i < 2; i++) {
      init(full + i, 32);
      init(empty + i, 32);
    }
  __syncthreads();
  for (int i = 0; i < 6; i++) {
    int stage = i % 2, phase = i / 2 % 2;
    if (WARP == 0) {
      wait(empty + stage, phase ^ 1);  //!
      s[stage][LANE] = x[32 * i + LANE];  //!
      arrive(full + stage);
    } else {
      wait(full + stage, FAULT(i % 2) FIX(phase));  //!
      out[32 * i + LANE] = s[stage][LANE ^ 1];  //!
      arrive(empty + stage);
    }
  }
}

// kind: race_shared
__global__ void a_ring_whose_buffer_is_released_before_the_read(int *x, int *out) {
  __shared__ alignas(128) int s[2][32];
  __shared__ Barrier full[2], empty[2];
  if (T == 0)
    for (int i = 0; i < 2; i++) {
      init(full + i, 1);
      init(empty + i, 32);
    }
  __syncthreads();
  for (int i = 0; i < 6; i++) {
    int stage = i % 2, phase = i / 2 % 2;
    if (WARP == 0) {
      if (LANE == 0) {
        wait(empty + stage, phase ^ 1);
        expect(full + stage, 128);
        fetch(s[stage], x + 32 * i, 128, full + stage);  //!
      }
    } else {
      wait(full + stage, phase);
      FAULT(arrive(empty + stage);)
      out[32 * i + LANE] = s[stage][LANE];  //!
      FIX(arrive(empty + stage);)
    }
  }
}

// kind: race_shared|mbarrier_phase_lapped|Deadlock; threads 96
__global__ void a_ring_that_forgets_one_of_two_consumers(int *x, int *out) {
  __shared__ alignas(128) int s[2][32];
  __shared__ Barrier full[2], empty[2];
  if (T == 0)
    for (int i = 0; i < 2; i++) {
      init(full + i, 1);
      init(empty + i, FAULT(1) FIX(2));
    }
  __syncthreads();
  for (int i = 0; i < 6; i++) {
    int stage = i % 2, phase = i / 2 % 2;
    if (WARP == 0) {
      if (LANE == 0) {
        wait(empty + stage, phase ^ 1);
        expect(full + stage, 128);
        fetch(s[stage], x + 32 * i, 128, full + stage);  //!
      }
    } else {
      wait(full + stage, phase);  //!
      out[256 * WARP + 32 * i + LANE] = s[stage][LANE];  //!
      __syncwarp();
      if (LANE == 0 FAULT(&& WARP == 1)) arrive(empty + stage);
    }
  }
}

// kind: missing_warp_sync
__global__ void a_ring_without_syncwarp_before_the_release(int *x, int *out) {
  __shared__ alignas(128) int s[2][32];
  __shared__ Barrier full[2], empty[2];
  if (T == 0)
    for (int i = 0; i < 2; i++) {
      init(full + i, 1);
      init(empty + i, 1);
    }
  __syncthreads();
  for (int i = 0; i < 6; i++) {
    int stage = i % 2, phase = i / 2 % 2;
    if (WARP == 0) {
      if (LANE == 0) {
        wait(empty + stage, phase ^ 1);
        expect(full + stage, 128);
        fetch(s[stage], x + 32 * i, 128, full + stage);  //!
      }
    } else {
      wait(full + stage, phase);
      out[32 * i + LANE] = s[stage][LANE];  //!
      FIX(__syncwarp();)
      if (LANE == 0) arrive(empty + stage);
    }
  }
}

// kind: Deadlock
__global__ void a_ring_whose_producer_waits_for_the_first_buffer(int *x, int *out) {
  __shared__ int s[2][32];
  __shared__ Barrier full[2], empty[2];
  if (T == 0)
    for (int i = 0; i < 2; i++) {
      init(full + i, 32);
      init(empty + i, 32);
    }
  __syncthreads();
  for (int i = 0; i < 4; i++) {
    int stage = i % 2, phase = i / 2 % 2;
    if (WARP == 0) {
      wait(empty + stage, phase FIX(^ 1));  //!
      s[stage][LANE] = x[32 * i + LANE];
      arrive(full + stage);
    } else {
      wait(full + stage, phase);  //!
      out[32 * i + LANE] = s[stage][LANE ^ 1];
      arrive(empty + stage);
    }
  }
}

// --- cp.async

// kind: missing_cp_async_wait|async_write_after_exit
__global__ void cp_async_that_is_never_committed(int *x, int *out) {
  __shared__ int s[64];
  __pipeline_memcpy_async(s + T, x + T, 4);  //!
  FIX(__pipeline_commit();)
  __pipeline_wait_prior(0);
  out[T] = s[T];  //!
}

// kind: missing_cp_async_wait
__global__ void a_loop_of_cp_async_without_its_last_commits(int *x, int *out) {
  __shared__ int s[3][64];
  for (int i = 0; i < 2; i++) {
    __pipeline_memcpy_async(&s[i][T], x + 64 * i + T, 4);  //!
    __pipeline_commit();
  }
  for (int i = 0; i < 4; i++) {
    if (i + 2 < 4) __pipeline_memcpy_async(&s[(i + 2) % 3][T], x + 64 * (i + 2) + T, 4);  //!
    FIX(__pipeline_commit();)
    FAULT(if (i + 2 < 4) __pipeline_commit();)
    __pipeline_wait_prior(2);
    out[64 * i + T] = s[i % 3][T];  //!
  }
  __pipeline_wait_prior(0);
}

// kind: missing_cp_async_wait; threads 32
__global__ void ldmatrix_after_cp_async(int *x, int *out) {
  __shared__ alignas(128) int s[128];
  __pipeline_memcpy_async(s + 4 * T, x + 4 * T, 16);  //!
  __pipeline_commit();
  FIX(__pipeline_wait_prior(0);)
  FIX(__syncwarp();)
  unsigned r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r) : "r"(at(s + 4 * (T % 8))) : "memory");  //!
  out[T] = r;
  __pipeline_wait_prior(0);
}

// kind: missing_warp_sync; threads 32
__global__ void cp_async_of_another_lane_without_syncwarp(int *x, int *out) {
  __shared__ alignas(128) int s[128];
  __pipeline_memcpy_async(s + 4 * T, x + 4 * T, 16);  //!
  __pipeline_commit();
  __pipeline_wait_prior(0);
  FIX(__syncwarp();)
  out[T] = s[4 * (T ^ 1)];  //!
}

// --- stmatrix and a tensor store

// kind: missing_proxy_fence; threads 32; map
__global__ void stmatrix_without_a_proxy_fence_before_a_tensor_store(int *x, int *out, __grid_constant__ const Map map) {
  __shared__ alignas(128) int s[64];
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(at(s + 4 * (T % 16))), "r"(T), "r"(T)  //!
               : "memory");
  FIX(fence_async();)
  __syncwarp();
  if (T == 0) {
    send_box(&map, 0, 0, s);  //!
    wait_sent<0>();
  }
}

// --- cluster

// --- work split over blocks

// kind: race_global; grid 2
__global__ void a_split_of_k_without_a_fence(int *x, int *out) {
  if (CTA == 0) {
    out[T] = x[T];  //!
    __syncthreads();
    if (T == 0) {
      FIX(__threadfence();)
      atomicExch(FLAG, 1);
    }
  } else {
    if (T == 0) {
      while (*(volatile int *)FLAG == 0) {}
      __threadfence();
    }
    __syncthreads();
    out[64 + T] = out[T] + x[T];  //!
  }
}

// kind: race_global; grid 2
__global__ void a_split_of_k_without_a_barrier(int *x, int *out) {
  if (CTA == 0) {
    out[T] = x[T];  //!
    __threadfence();
    FIX(__syncthreads();)
    if (T == 0) atomicExch(FLAG, 1);
  } else {
    if (T == 0) {
      while (*(volatile int *)FLAG == 0) {}
      __threadfence();
    }
    __syncthreads();
    out[64 + T] = out[T ^ 32] + x[T];  //!
  }
}

// kind: race_shared|race_global; grid 2
__global__ void the_last_block_before_it_is_known(int *x, int *out) {
  __shared__ bool last;
  out[64 * CTA + T] = x[T];  //!
  __threadfence();
  __syncthreads();
  if (T == 0) last = atomicAdd(FLAG, 1) == 1;  //!
  FIX(__syncthreads();)
  if (last) {  //!
    __threadfence();
    out[128 + T] = out[T] + out[64 + T];  //!
  }
}

// kind: race_global; grid 2
__global__ void the_last_block_sums_words_that_are_not_volatile(int *x, int *out) {
  __shared__ bool last;
  volatile int *sums = out;
  int sum = __reduce_add_sync(~0u, x[T]);
  FAULT(if (T == 0) out[CTA] = sum;)  //!
  FIX(if (T == 0) sums[CTA] = sum;)
  if (T == 0) {
    FIX(__threadfence();)
    last = atomicInc((unsigned *)FLAG, 2) == 1;
  }
  __syncthreads();
  if (last && T == 0) {
    FAULT(out[2] = out[0] + out[1];)  //!
    FIX(out[2] = sums[0] + sums[1];)
  }
}

// kind: race_global; grid 2
__global__ void a_grid_barrier_of_the_first_thread_alone(int *x, int *out) {
  out[64 * CTA + T] = x[T];  //!
  FIX(__syncthreads();)
  if (T == 0) {
    __threadfence();
    atomicAdd(FLAG, 1);
    while (*(volatile int *)FLAG < 2) {}
    __threadfence();
  }
  __syncthreads();
  out[128 + 64 * CTA + T] = out[64 * (CTA ^ 1) + (T ^ 32)];  //!
}

// kind: race_global; grid 2
__global__ void a_grid_barrier_whose_counter_is_never_reset(int *x, int *out) {
  for (int i = 0; i < 2; i++) {
    out[64 * CTA + T] = x[T] + i;  //!
    __syncthreads();
    if (T == 0) {
      __threadfence();
      atomicAdd(FLAG, 1);
      while (*(volatile int *)FLAG < 2 FIX(* (2 * i + 1))) {}
      __threadfence();
    }
    __syncthreads();
    out[128 + 64 * CTA + T] += out[64 * (CTA ^ 1) + T];  //!
    __syncthreads();
    if (T == 0) {
      __threadfence();
      atomicAdd(FLAG, 1);
      while (*(volatile int *)FLAG < 2 FIX(* (2 * i + 2))) {}
      __threadfence();
    }
    __syncthreads();
  }
}

// kind: race_global; grid 2
__global__ void a_value_that_the_first_block_makes_without_fences(int *x, int *out) {
  if (T == 0) {
    if (atomicCAS(FLAG, 0, 1) == 0) {
      out[0] = 42;  //!
      FIX(__threadfence();)
      *(volatile int *)FLAG = 2;
    } else {
      while (*(volatile int *)FLAG != 2) {}
      FIX(__threadfence();)
      out[1 + CTA] = out[0];  //!
    }
  }
}

// kind: race_global; grid 2
__global__ void a_lock_without_fences(int *x, int *out) {
  if (T % 32 == 0) {
    while (atomicCAS(FLAG, 0, 1) != 0) {}
    FIX(__threadfence();)
    out[0] += x[T];  //!
    FIX(__threadfence();)
    atomicExch(FLAG, 0);
  }
}

// --- loops over one buffer

// kind: race_shared
__global__ void a_tile_loop_with_one_barrier(int *x, int *out) {
  __shared__ int s[64];
  int sum = 0;
  for (int i = 0; i < 3; i++) {
    s[T] = x[64 * i + T];  //!
    __syncthreads();
    for (int j = 0; j < 8; j++) sum += s[(T + 8 * j) % 64];  //!
    FIX(__syncthreads();)
  }
  out[T] = sum;
}

// kind: race_shared
__global__ void a_block_reduction_called_twice(int *x, int *out) {
  __shared__ int s[2];
  for (int i = 0; i < 2; i++) {
    int v = __reduce_add_sync(~0u, x[64 * i + T]);
    FIX(__syncthreads();)
    if (LANE == 0) s[WARP] = v;  //!
    __syncthreads();
    out[64 * i + T] = s[0] + s[1];  //!
  }
}

// --- lanes

// kind: diverged_sync|Deadlock
__global__ void a_loop_whose_lanes_leave_one_by_one(int *x, int *out) {
  int n = 0;
  for (int i = LANE; FAULT(i) FIX((i & ~31)) < 48; i += 32) n += __popc(__ballot_sync(~0u, x[i] & 1));  //!
  out[T] = n + __popc(__ballot_sync(~0u, n > 9));  //!
}

// kind: missing_warp_sync
__global__ void a_warp_scan_in_shared_memory(int *x, int *out) {
  __shared__ int s[64];
  s[T] = x[T];
  __syncwarp();
  for (int i = 1; i < 32; i *= 2) {
    int v = LANE >= i ? s[T - i] : 0;  //!
    FIX(__syncwarp();)
    s[T] += v;  //!
    __syncwarp();
  }
  out[T] = s[T];
}

// --- counters that one thread sets and all add to

// kind: race_shared
__global__ void a_counter_zeroed_without_a_barrier(int *x, int *out) {
  __shared__ int n;
  if (T == 0) n = 0;  //!
  FIX(__syncthreads();)
  atomicAdd(&n, x[T]);  //!
  __syncthreads();
  out[T] = n;
}

// kind: race_global; grid 2
__global__ void a_global_counter_zeroed_without_order(int *x, int *out) {
  if (FAULT(blockIdx.x == 0 && T == 0) FIX(false)) out[0] = 0;  //!
  __syncthreads();
  atomicAdd(out, x[T]);  //!
}

// kind: race_shared
__global__ void a_histogram_zeroed_without_a_barrier(int *x, int *out) {
  __shared__ int n[32];
  if (T < 32) n[T] = 0;  //!
  FIX(__syncthreads();)
  atomicAdd(&n[x[T] % 32], 1);  //!
  __syncthreads();
  if (T < 32) out[T] = n[T];
}

// kind: race_shared
__global__ void a_maximum_set_without_a_barrier(int *x, int *out) {
  __shared__ int n;
  if (T == 63) n = -1;  //!
  FIX(__syncthreads();)
  atomicMax(&n, x[T]);  //!
  __syncthreads();
  out[T] = n;
}

// --- relaxed arrivals and waits

// kind: race_shared
__global__ void a_relaxed_arrival_after_the_store(int *x, int *out) {
  __shared__ int s[64];
  __shared__ Barrier b;
  if (T == 0) init(&b, 64);
  __syncthreads();
  s[T] = x[T];  //!
  FAULT(asm volatile("mbarrier.arrive.relaxed.cta.shared.b64 _, [%0];" ::"r"(at(&b)) : "memory");)
  FIX(arrive(&b);)
  wait(&b, 0);
  out[T] = s[T ^ 32];  //!
}

// kind: race_shared
__global__ void a_relaxed_wait_without_a_fence(int *x, int *out) {
  __shared__ int s[64];
  __shared__ Barrier b;
  if (T == 0) init(&b, 64);
  __syncthreads();
  s[T] = x[T];  //!
  arrive(&b);
  asm volatile("{ .reg .pred p; L: mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64 p, [%0], 0;\n"
               "@!p bra L; }" ::"r"(at(&b)) : "memory");
  FIX(__threadfence_block();)
  out[T] = s[T ^ 32];  //!
}

// kind: race_shared; threads 32; grid 2; cluster 2
__global__ void an_arrival_whose_scope_leaves_the_peer_out(int *x, int *out) {
  __shared__ int s[32];
  __shared__ Barrier b;
  if (T == 0) init(&b, 32);
  fence_init();
  cluster_sync();
  put(peer(s + T), T);  //!
  FAULT(asm volatile("mbarrier.arrive.release.cta.shared::cluster.b64 _, [%0];" ::"r"(peer(&b)) : "memory");)
  FIX(arrive_at_peer(peer(&b));)
  asm volatile("{ .reg .pred p; L: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], 0;\n"
               "@!p bra L; }" ::"r"(at(&b)) : "memory");
  out[T + 32 * rank()] = s[T];  //!
  cluster_sync();
}

// --- waits with barriers

// kind: Deadlock; grid 2; schedules round_robin
__global__ void a_block_that_asks_with_barriers(int *x, int *out) {
  __shared__ int answer;
  if (CTA == 1) {
    FIX(if (T == 0) atomicExch(FLAG, 1);)
    return;
  }
  do {
    __syncthreads();
    if (T == 0) answer = atomicAdd(FLAG, 0);  //!
    __syncthreads();
  } while (answer != 1);  //!
  out[T] = 1;
}

}
