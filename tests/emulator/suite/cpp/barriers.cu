// Faults around barriers, mbarriers, and lanes of a warp.
#include "common.cuh"
#include <cuda_awbarrier_primitives.h>

extern "C" {

// kind: HazardError|Deadlock
__global__ void syncthreads_in_a_divergent_branch(int *x, int *out) {
  if (FAULT(T < 40) FIX(T < 64)) {
    __syncthreads();  //!
    out[T] = 1;
  } else {
    __syncthreads();  //!
    out[T] = 2;
  }
}

// kind: Deadlock
__global__ void syncthreads_in_a_branch_of_one_warp(int *x, int *out) {
  __shared__ Barrier never;
  if (T == 0) init(&never, 64);
  __syncthreads();
  if (WARP == 0) {
    FAULT(__syncthreads();)  //!
    arrive(&never);
  } else {
    arrive(&never);
    wait(&never, 0);  //!
  }
}

// kind: Deadlock
__global__ void a_named_barrier_that_a_warp_never_reaches(int *x, int *out) {
  FAULT(if (WARP == 0)) asm volatile("bar.sync 1, 64;" ::: "memory");  //!
}

// kind: barrier_phase_mixed; threads 128
__global__ void a_named_barrier_of_half_the_warps(int *x, int *out) {
  asm volatile("bar.sync 1, %0;" ::"n"(FAULT(64) FIX(128)) : "memory");  //!
}

// kind: barrier_double_arrive
__global__ void a_warp_arrives_twice(int *x, int *out) {
  if (WARP == 0) {
    asm volatile("bar.arrive 1, %0;" ::"n"(FAULT(96) FIX(64)) : "memory");  //!
    FAULT(asm volatile("bar.arrive 1, 96;" ::: "memory");)  //!
  } else {
    asm volatile("bar.sync 1, %0;" ::"n"(FAULT(96) FIX(64)) : "memory");
  }
}

// kind: HazardError
__global__ void warps_that_name_different_counts(int *x, int *out) {
  if (WARP == 0) asm volatile("bar.sync 1, %0;" ::"n"(FAULT(96) FIX(64)) : "memory");  //!
  else asm volatile("bar.sync 1, 64;" ::: "memory");  //!
}

// kind: cluster_double_arrive; grid 2; cluster 2
__global__ void two_arrivals_at_the_cluster_barrier(int *x, int *out) {
  cluster_arrive();
  FAULT(cluster_arrive(); cluster_wait();)  //!
  FIX(cluster_wait();)
}

// kind: HazardError; grid 2; cluster 2
__global__ void a_wait_at_the_cluster_barrier_alone(int *x, int *out) {
  FIX(cluster_arrive();)
  cluster_wait();  //!
}

// --- mbarriers by the primitives of CUDA's headers

// kind: race_shared
__global__ void an_arrival_before_the_store(int *x, int *out) {
  __shared__ int s[64];
  __shared__ __mbarrier_t ready;
  if (T == 0) __mbarrier_init(&ready, 64);
  __syncthreads();
  FAULT(auto token = __mbarrier_arrive(&ready);)
  s[T] = x[T];  //!
  FIX(auto token = __mbarrier_arrive(&ready);)
  while (!__mbarrier_test_wait(&ready, token)) {}
  out[T] = s[T ^ 32];  //!
}

// kind: mbarrier_init_unordered|HazardError|EmulatorError; schedules round_robin
__global__ void a_barrier_before_it_is_there(int *x, int *out) {
  __shared__ __mbarrier_t ready;
  if (T == 0) __mbarrier_init(&ready, 64);  //!
  FIX(__syncthreads();)
  auto token = __mbarrier_arrive(&ready);  //!
  while (!__mbarrier_test_wait(&ready, token)) {}  //!
}

// kind: Deadlock; schedules round_robin
__global__ void more_arrivals_expected_than_come(int *x, int *out) {
  __shared__ __mbarrier_t ready;
  if (T == 0) __mbarrier_init(&ready, FAULT(3) FIX(2));
  __syncthreads();
  if (LANE == 0) {
    auto token = __mbarrier_arrive(&ready);
    while (!__mbarrier_test_wait(&ready, token)) {}  //!
  }
}

// --- mbarriers by inline PTX

// kind: barrier_phase_mixed|mbarrier_over_arrival
__global__ void fewer_arrivals_expected_than_come(int *x, int *out) {
  __shared__ Barrier b;
  if (T == 0) init(&b, FAULT(1) FIX(2));
  __syncthreads();
  if (LANE == 0) arrive(&b);  //!
}

// kind: mbarrier_over_arrival
__global__ void one_arrival_too_many(int *x, int *out) {
  __shared__ Barrier b;
  if (T == 0) init(&b, 64);
  __syncthreads();
  if (T == 0) arrive(&b, FAULT(65) FIX(64));  //!
}

// kind: mbarrier_tx_leftover|Deadlock
__global__ void bytes_that_nothing_brings(int *x, int *out) {
  __shared__ alignas(128) int s[64];
  __shared__ Barrier full;
  if (T == 0) init(&full, 1);  //!
  __syncthreads();
  if (T == 0) {
    expect(&full, FAULT(260) FIX(256));
    fetch(s, x, 256, &full);
  }
  wait(&full, 0);  //!
}

// kind: mbarrier_tx_unexpected; threads 32; schedules round_robin
__global__ void a_copy_that_no_thread_expects(int *x, int *out) {
  __shared__ alignas(128) int s[128];
  __shared__ Barrier full;
  if (T == 0) init(&full, 1);  //!
  __syncthreads();
  if (T == 0) {
    expect(&full, FAULT(256) FIX(512));
    fetch(s, x + 128, 256, &full);
    fetch(s + 64, x + 128, 256, &full);
  }
  FAULT(while (!done(&full, 0) || *(volatile int *)(s + 127) == 0) {})
  FIX(wait(&full, 0);)
}

// kind: mbarrier_tx_overflow
__global__ void a_transaction_count_that_overflows(int *x, int *out) {
  __shared__ Barrier b;
  if (T == 0) {
    init(&b, 1);
    add_bytes(&b, 1048575);  //!
    add_bytes(&b, FAULT(1048575) FIX(0));  //!
    take_bytes(&b, 1048575);
    take_bytes(&b, FAULT(1048575) FIX(0));
  }
}

// kind: mbarrier_count_overflow
__global__ void a_pending_count_that_overflows(int *x, int *out) {
  __shared__ Barrier b;
  if (T == 0) init(&b, FAULT(1048575) FIX(1));  //!
  __syncthreads();
  asm volatile("cp.async.mbarrier.arrive.shared.b64 [%0];" ::"r"(at(&b)) : "memory");  //!
}

// kind: mbarrier_overwritten
__global__ void a_store_over_a_barrier(int *x, int *out) {
  __shared__ long long s[2];
  if (T == 0) init((Barrier *)s, 64);
  __syncthreads();
  if (T == 0) *(volatile long long *)(s + FAULT(0) FIX(1)) = 0;  //!
  arrive((Barrier *)s);  //!
}

// kind: mbarrier_reinit
__global__ void a_barrier_that_is_initialised_twice(int *x, int *out) {
  __shared__ Barrier b;
  if (T == 0) {
    init(&b, 64);
    FIX(inval(&b);)
    init(&b, 32);  //!
  }
}

// kind: mbarrier_inval_in_use
__global__ void inval_while_bytes_are_on_their_way(int *x, int *out) {
  __shared__ Barrier b;
  if (T == 0) {
    init(&b, 1);
    FAULT(add_bytes(&b, 16);)
    inval(&b);  //!
  }
}

// kind: mbarrier_no_complete
__global__ void no_complete_for_the_last_arrival(int *x, int *out) {
  __shared__ Barrier b;
  unsigned long long state;
  if (T == 0) {
    init(&b, FAULT(1) FIX(2));
    asm volatile("mbarrier.arrive.noComplete.shared.b64 %0, [%1], 1;" : "=l"(state) : "r"(at(&b)) : "memory");  //!
  }
}

// kind: mbarrier_parity_range
__global__ void a_phase_number_for_a_parity(int *x, int *out) {
  __shared__ Barrier b;
  if (T == 0) init(&b, 64);
  __syncthreads();
  out[T] = done(&b, FAULT(3) FIX(1));  //!
}

// kind: mbarrier_phase_unordered|mbarrier_phase_lapped|Deadlock
__global__ void the_next_phase_without_the_waiting_warp(int *x, int *out) {
  __shared__ Barrier full, seen;
  if (T == 0) {
    init(&full, 1);
    init(&seen, 32);
  }
  __syncthreads();
  if (T == 0) {
    arrive(&full);
    FIX(wait(&seen, 0);)
    arrive(&full);
  } else if (WARP == 1) {
    wait(&full, 0);  //!
    arrive(&seen);
    wait(&full, 1);
  }
}

// kind: mbarrier_init_unordered; threads 32; grid 2; cluster 2
__global__ void no_fence_before_a_peer_arrives(int *x, int *out) {
  __shared__ Barrier b;
  if (T == 0) init(&b, 1);  //!
  FIX(fence_init();)
  cluster_arrive_relaxed();
  cluster_wait();
  if (T == 0) arrive_at_peer(peer(&b));  //!
  wait(&b, 0);
}

// kind: peer_memory_after_exit; threads 32; grid 2; cluster 2
__global__ void an_arrival_at_a_peer_that_has_exited(int *x, int *out) {
  __shared__ Barrier b;
  if (T == 0) init(&b, 1);
  fence_init();
  cluster_sync();
  if (T == 0) arrive_at_peer(peer(&b));  //!
  FIX(wait(&b, 0);)
}

// kind: race_shared; threads 32; grid 2; cluster 2
__global__ void an_arrival_at_a_peer_before_the_store(int *x, int *out) {
  __shared__ int s[32];
  __shared__ Barrier b;
  if (T == 0) init(&b, 32);
  fence_init();
  cluster_sync();
  FAULT(arrive_at_peer(peer(&b));)
  put(peer(s + T), T);  //!
  FIX(arrive_at_peer(peer(&b));)
  asm volatile("{ .reg .pred p; L: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], 0;\n"
               "@!p bra L; }" ::"r"(at(&b)) : "memory");
  out[T + 32 * rank()] = s[T];  //!
  cluster_sync();
}

// --- lanes

// kind: missing_warp_sync
__global__ void a_warp_barrier_of_half_the_lanes(int *x, int *out) {
  __shared__ int s[64];
  s[T] = x[T];  //!
  __syncwarp(FAULT(LANE < 16 ? 0xffff : 0xffff0000) FIX(0xffffffff));
  out[T] = s[T ^ 16];  //!
}

// kind: missing_warp_sync
__global__ void a_sum_over_a_warp_as_of_2010(int *x, int *out) {
  __shared__ int s[64];
  s[T] = x[T];  //!
  FIX(__syncwarp();)
  if (LANE < 16) {
    int v = s[T] + s[T + 16];  //!
    FIX(__syncwarp(0xffff);)
    s[T] = v;  //!
  }
  __syncthreads();
  out[T] = s[T];
}

// kind: diverged_sync
__global__ void a_shuffle_in_a_branch(int *x, int *out) {
  if (LANE < 16) out[T] = __shfl_xor_sync(FAULT(0xffffffff) FIX(0xffff), x[T], 1);  //!
  FAULT(__syncwarp();)
}

// kind: lane_outside_mask
__global__ void a_match_outside_the_mask(int *x, int *out) {
  out[T] = __match_any_sync(FAULT(0xfffffffe) FIX(0xffffffff), x[T]);  //!
}

// kind: lane_outside_mask
__global__ void a_reduction_outside_the_mask(int *x, int *out) {
  out[T] = __reduce_add_sync(FAULT(0xffff0000) FIX(0xffffffff), x[T]);  //!
}

// kind: lane_outside_mask|HazardError
__global__ void a_warp_barrier_outside_the_mask(int *x, int *out) {
  __syncwarp(FAULT(0xffff) FIX(0xffffffff));  //!
}

// --- loops that never end

// kind: Deadlock; threads 64; schedules round_robin
__global__ void a_lock_that_is_never_given_back(int *x, int *out) {
  if (LANE == 0) {
    while (atomicCAS(x + 100, 0, 1) != 0) {}  //!
    __threadfence();
    out[0] = out[0] + 1;
    __threadfence();
    FIX(atomicExch(x + 100, 0);)
  }
}

// kind: Deadlock; threads 32; schedules round_robin
__global__ void a_flag_that_no_thread_raises(int *x, int *out) {
  while (__nv_atomic_load_n(x + 100, __NV_ATOMIC_ACQUIRE, __NV_THREAD_SCOPE_DEVICE) == FAULT(0) FIX(1)) {}  //!
}

}
