// Faults around shared memory: races, copies, proxies, clusters.
#include "common.cuh"
#include <cuda_pipeline_primitives.h>

extern "C" {

// kind: race_shared
__global__ void two_writers(int *x, int *out) {
  __shared__ int s[64];
  if (LANE == 0) s[FAULT(0) FIX(WARP)] = WARP + 1;  //!
  __syncthreads();
  if (LANE == 0) out[WARP] = s[FAULT(0) FIX(WARP)];
}

// kind: race_shared_same_value
__global__ void two_writers_of_one_value(int *x, int *out) {
  __shared__ int s[64];
  if (LANE == 0) s[FAULT(0) FIX(WARP)] = x[6];  //!
  __syncthreads();
  if (LANE == 0) out[WARP] = s[FAULT(0) FIX(WARP)];
}

// kind: race_shared
__global__ void bytes_of_two_warps_overlap(int *x, int *out) {
  __shared__ unsigned short s[65];
  s[LANE * 2 + FIX(WARP) FAULT(0)] = T;  //!
  __syncthreads();
  out[T] = s[LANE * 2 + FIX(WARP) FAULT(0)];
}

INLINE int4 load_matrix(const int *row) {
  int4 r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(at(row)) : "memory");
  return r;
}
INLINE int through_generic(const int *p) { return *(const volatile int *)p; }

// kind: race_shared
__global__ void reads_through_a_generic_pointer(int *x, int *out) {
  __shared__ int s[64];
  const int *p = x[T] < 0 ? x : s + (T ^ 32);
  s[T] = x[T];  //!
  FIX(__syncthreads();)
  out[T] = through_generic(p);  //!
}

// kind: race_shared
__global__ void reads_a_vector_of_four(int *x, int *out) {
  __shared__ alignas(16) int s[64];
  s[T] = x[T];  //!
  FIX(__syncthreads();)
  int4 v = reinterpret_cast<int4 *>(s)[(T % 16) ^ 8];  //!
  out[T] = v.x + v.w;
}

// kind: race_shared; threads 96
__global__ void a_named_barrier_without_one_reader(int *x, int *out) {
  __shared__ int s[96];
  s[T] = x[T];  //!
  FAULT(if (WARP < 2) asm volatile("bar.sync 1, 64;" ::: "memory");)
  FIX(asm volatile("bar.sync 1, 96;" ::: "memory");)
  out[T] = s[0];  //!
}

// kind: race_shared
__global__ void a_flag_in_shared_memory_without_a_fence(int *x, int *out) {
  __shared__ int s[2];
  __shared__ int flag;
  if (T == 0) flag = 0;
  __syncthreads();
  if (T == 0) {
    s[x[0] & 1] = x[1];  //!
    FIX(__threadfence_block();)
    *(volatile int *)&flag = 1;
  }
  if (T == 32) {
    while (*(volatile int *)&flag == 0) {}
    FIX(__threadfence_block();)
    out[0] = s[x[0] & 1];  //!
  }
}

// kind: race_shared
__global__ void an_atomic_flag_that_does_not_release(int *x, int *out) {
  __shared__ int s[32];
  __shared__ int flag;
  if (T == 0) flag = 0;
  __syncthreads();
  if (WARP == 0) {
    s[LANE] = LANE;  //!
    __syncwarp();
    if (T == 0)
      __nv_atomic_store_n(&flag, 1, FAULT(__NV_ATOMIC_RELAXED) FIX(__NV_ATOMIC_RELEASE), __NV_THREAD_SCOPE_BLOCK);
  } else {
    while (!__nv_atomic_load_n(&flag, __NV_ATOMIC_ACQUIRE, __NV_THREAD_SCOPE_BLOCK)) {}
    out[T] = s[LANE];  //!
  }
}

// kind: race_shared
__global__ void dynamic_memory_is_read_early(int *x, int *out) {
  extern __shared__ int dynamic[];
  dynamic[T] = x[T];  //!
  FIX(__syncthreads();)
  out[T] = dynamic[63 - T];  //!
}

// kind: race_shared
__global__ void floats_are_added_without_a_barrier(int *x, int *out) {
  __shared__ float sum;
  if (T == 0) sum = 0;
  __syncthreads();
  atomicAdd(&sum, 1.0f);  //!
  FIX(__syncthreads();)
  out[T] = sum;  //!
}

// kind: race_shared
__global__ void ldmatrix_of_what_another_warp_stores(int *x, int *out) {
  __shared__ alignas(16) int s[256];
  int4 v = {x[T], 0, 0, 0}, r;
  reinterpret_cast<int4 *>(s)[T] = v;  //!
  FIX(__syncthreads();)
  r = load_matrix(s + 4 * (T ^ 32));  //!
  out[T] = r.x + r.w;
}

// kind: uninitialised_smem
__global__ void counts_in_a_word_that_nothing_set(int *x, int *out) {
  __shared__ int n;
  FIX(if (T == 0) n = 0; __syncthreads();)
  out[T] = atomicAdd(&n, 1);  //!
}

// kind: missing_cp_async_wait
__global__ void one_stage_too_many_of_a_pipeline(int *x, int *out) {
  __shared__ int s[2][64];
  for (int i = 0; i < 2; i++) {
    __pipeline_memcpy_async(&s[i][T], x + 64 * i + T, 4);  //!
    __pipeline_commit();
  }
  __pipeline_wait_prior(FAULT(1) FIX(0));
  out[T] = s[1][T];  //!
  __pipeline_wait_prior(0);
}

// kind: race_shared|missing_cp_async_wait
__global__ void cp_async_of_another_warp(int *x, int *out) {
  __shared__ int s[64];
  __pipeline_memcpy_async(s + T, x + T, 4);  //!
  __pipeline_commit();
  __pipeline_wait_prior(0);
  FIX(__syncthreads();)
  out[T] = s[T ^ 32];  //!
}

// kind: race_shared
__global__ void a_bulk_copy_that_is_not_waited_for(int *x, int *out) {
  __shared__ alignas(128) int s[64];
  __shared__ Barrier full;
  if (T == 0) init(&full, 1);
  __syncthreads();
  if (T == 0) {
    expect(&full, 256);
    fetch(s, x, 256, &full);  //!
  }
  FIX(wait(&full, 0);)
  out[T] = s[T];  //!
  wait(&full, 0);
}

// kind: race_shared
__global__ void a_wait_for_the_phase_before(int *x, int *out) {
  __shared__ alignas(128) int s[64];
  __shared__ Barrier full;
  if (T == 0) init(&full, 1);
  __syncthreads();
  if (T == 0) {
    expect(&full, 256);
    fetch(s, x, 256, &full);  //!
  }
  wait(&full, FAULT(1) FIX(0));
  out[T] = s[T];  //!
  wait(&full, 0);
}

// kind: race_shared; schedules round_robin
__global__ void a_buffer_is_filled_while_it_is_read(int *x, int *out) {
  __shared__ alignas(128) int s[64];
  __shared__ Barrier full, empty;
  if (T == 0) {
    init(&full, 1);
    init(&empty, 64);
  }
  __syncthreads();
  int sum = 0;
  for (int i = 0; i < 2; i++) {
    if (T == 0) {
      FIX(wait(&empty, i ^ 1);)
      expect(&full, 256);
      fetch(s, x + 64 * i, 256, &full);  //!
    }
    wait(&full, i);
    sum += s[T ^ 32];  //!
    arrive(&empty);
  }
  out[T] = sum;
}

// kind: race_shared; map
__global__ void a_tensor_copy_that_is_not_waited_for(int *x, int *out, const __grid_constant__ Map map) {
  __shared__ alignas(128) int s[64];
  __shared__ Barrier full;
  if (T == 0) init(&full, 1);
  __syncthreads();
  if (T == 0) {
    expect(&full, 256);
    fetch_box(s, &map, 0, 0, &full);  //!
  }
  FIX(wait(&full, 0);)
  out[T] = s[T];  //!
  wait(&full, 0);
}

// kind: missing_bulk_wait
__global__ void a_bulk_store_still_reads(int *x, int *out) {
  __shared__ alignas(128) int s[64];
  s[T] = x[T];
  fence_async();
  __syncthreads();
  if (T == 0) {
    send(out, s, 256);  //!
    FIX(wait_read<0>();)
    s[0] = 5;  //!
    wait_sent<0>();
  }
}

// kind: missing_bulk_wait
__global__ void one_bulk_store_too_many_may_be_pending(int *x, int *out) {
  __shared__ alignas(128) int s[64];
  s[T] = x[T];
  fence_async();
  __syncthreads();
  if (T == 0) {
    send(out, s, 128);
    send(out + 32, s + 32, 128);  //!
    wait_read<FAULT(1) FIX(0)>();
    s[32] = 5;  //!
    wait_sent<0>();
  }
}

// kind: missing_proxy_fence
__global__ void no_proxy_fence_before_a_bulk_store(int *x, int *out) {
  __shared__ alignas(128) int s[64];
  s[T] = x[T];  //!
  FIX(fence_async();)
  __syncthreads();
  if (T == 0) {
    send(out, s, 256);  //!
    wait_sent<0>();
  }
}

// kind: missing_proxy_fence
__global__ void a_proxy_fence_before_the_store(int *x, int *out) {
  __shared__ alignas(128) int s[64];
  FAULT(fence_async();)
  s[T] = x[T];  //!
  FIX(fence_async();)
  __syncthreads();
  if (T == 0) {
    send(out, s, 256);  //!
    wait_sent<0>();
  }
}

// kind: missing_proxy_fence
__global__ void a_thread_fence_where_a_proxy_fence_is_needed(int *x, int *out) {
  __shared__ alignas(128) int s[64];
  s[T] = x[T];  //!
  FAULT(__threadfence_block();)
  FIX(fence_async();)
  __syncthreads();
  if (T == 0) {
    send(out, s, 256);  //!
    wait_sent<0>();
  }
}

// kind: missing_proxy_fence
__global__ void no_proxy_fence_before_a_bulk_reduction(int *x, int *out) {
  __shared__ alignas(128) int s[64];
  s[T] = x[T];  //!
  FIX(fence_async();)
  __syncthreads();
  if (T == 0) {
    add_to(out, s, 256);  //!
    wait_sent<0>();
  }
}

// kind: missing_proxy_fence; map
__global__ void no_proxy_fence_before_a_tensor_store(int *x, int *out, const __grid_constant__ Map map) {
  __shared__ alignas(128) int s[64];
  s[T] = x[T];  //!
  FIX(fence_async();)
  __syncthreads();
  if (T == 0) {
    send_box(&map, 0, 0, s);  //!
    wait_sent<0>();
  }
}

// kind: missing_proxy_fence_cp_async
__global__ void no_proxy_fence_after_cp_async(int *x, int *out) {
  __shared__ alignas(128) int s[64];
  __pipeline_memcpy_async(s + T, x + T, 4);  //!
  __pipeline_commit();
  __pipeline_wait_prior(0);
  FIX(fence_async();)
  __syncthreads();
  if (T == 0) {
    send(out, s, 256);  //!
    wait_sent<0>();
  }
}

// kind: async_write_after_exit
__global__ void an_exit_while_a_copy_is_on_its_way(int *x, int *out) {
  __shared__ alignas(128) int s[64];
  __shared__ Barrier full;
  if (T == 0) init(&full, 1);
  __syncthreads();
  if (T == 0) {
    expect(&full, 256);
    fetch(s, x, 256, &full);  //!
    FIX(wait(&full, 0);)
  }
}

// kind: async_read_after_exit; schedules adversarial
__global__ void an_exit_while_a_bulk_store_reads(int *x, int *out) {
  __shared__ alignas(128) int s[64];
  s[T] = x[T];
  fence_async();
  __syncthreads();
  if (T == 0) {
    send(out, s, 256);  //!
    FIX(wait_read<0>();)
  }
}

// kind: race_through_completion
__global__ void data_ordered_by_a_copy_alone(int *x, int *out) {
  __shared__ alignas(128) int s[64];
  __shared__ int n[2];
  __shared__ Barrier full;
  if (T == 0) init(&full, 1);
  __syncthreads();
  if (T == 32) expect(&full, 256);
  if (T == 0) {
    n[x[0] & 1] = x[1];  //!
    fetch(s, x, 256, &full);
  }
  wait(&full, 0);
  FIX(__syncthreads();)
  if (T == 32) out[0] = n[x[0] & 1];  //!
}

// --- clusters

// kind: race_shared; threads 32; grid 2; cluster 2
__global__ void a_store_to_a_peer_before_the_cluster_barrier(int *x, int *out) {
  __shared__ int s[32];
  cluster_sync();
  put(peer(s + T), T);  //!
  FIX(cluster_sync();)
  out[T + 32 * rank()] = s[T];  //!
  cluster_sync();
}

// kind: race_shared; threads 32; grid 2; cluster 2
__global__ void a_load_from_a_peer_before_the_cluster_barrier(int *x, int *out) {
  __shared__ int s[32];
  s[T] = x[T];  //!
  FIX(cluster_sync();)
  FAULT(__syncthreads();)
  out[T + 32 * rank()] = take(peer(s + T));  //!
  cluster_sync();
}

// kind: race_shared; threads 32; grid 2; cluster 2
__global__ void a_cluster_barrier_that_does_not_release(int *x, int *out) {
  __shared__ int s[32];
  s[T] = x[T];  //!
  FAULT(cluster_arrive_relaxed();)
  FIX(cluster_arrive();)
  cluster_wait();
  out[T + 32 * rank()] = take(peer(s + T));  //!
  cluster_sync();
}

// kind: race_shared; threads 32; grid 2; cluster 2
__global__ void st_async_that_is_not_waited_for(int *x, int *out) {
  __shared__ int s;
  __shared__ Barrier full;
  if (T == 0) init(&full, 1);
  cluster_sync();
  if (T == 0) {
    expect(&full, 4);
    put_async(peer(&s), x[0], peer(&full));  //!
  }
  FIX(wait(&full, 0);)
  out[T + 32 * rank()] = s;  //!
  wait(&full, 0);
  cluster_sync();
}

// kind: peer_memory_after_exit; threads 32; grid 2; cluster 2
__global__ void a_load_from_a_peer_that_has_exited(int *x, int *out) {
  __shared__ int s[32];
  s[T] = x[T];
  cluster_sync();
  out[T + 32 * rank()] = take(peer(s + T));  //!
  FIX(cluster_sync();)
}

// kind: peer_memory_after_exit; threads 32; grid 2; cluster 2
__global__ void a_store_to_a_peer_that_has_exited(int *x, int *out) {
  __shared__ int s[32];
  cluster_sync();
  put(peer(s + T), T);  //!
  FIX(cluster_sync();)
}

// kind: missing_proxy_fence; threads 32; grid 2; cluster 2
__global__ void no_proxy_fence_before_a_copy_to_a_peer(int *x, int *out) {
  __shared__ alignas(128) int s[64];
  __shared__ Barrier full;
  if (T == 0) init(&full, 1);
  s[T] = x[T];  //!
  FIX(fence_async();)
  fence_init();
  cluster_sync();
  if (T == 0) {
    expect(&full, 128);
    copy_to_peer(peer(s + 32), s, 128, peer(&full));  //!
  }
  wait(&full, 0);
  cluster_sync();
}

}
