// Faults around tensor memory and tcgen05.mma. One product: 128 x N x 16, f16 to f32, operands zeros in shared memory.
#include "common.cuh"

constexpr int kColumns = 256;

INLINE unsigned allocate(unsigned *slot) {  // by warp 0; the address is that of the first lane
  if (WARP == 0)
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 256;" ::"r"(at(slot)) : "memory");
  __syncthreads();
  return *(volatile unsigned *)slot;
}
INLINE void deallocate(unsigned address) {
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 256;" ::"r"(address) : "memory");
}
INLINE void release(unsigned address) {
  __syncthreads();
  if (WARP == 0) deallocate(address);
}
INLINE unsigned quarter(unsigned address) { return address + (WARP % 4 << 21); }
INLINE void store(unsigned address, int v) {
  asm volatile("tcgen05.st.sync.aligned.32x32b.x1.b32 [%0], {%1};" ::"r"(address), "r"(v) : "memory");
}
INLINE int load(unsigned address) {
  int v;
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%0}, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
INLINE int load_16(unsigned address) {
  int v[16];
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x16.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, "
               "%15}, [%16];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]), "=r"(v[4]), "=r"(v[5]), "=r"(v[6]), "=r"(v[7]),
                 "=r"(v[8]), "=r"(v[9]), "=r"(v[10]), "=r"(v[11]), "=r"(v[12]), "=r"(v[13]), "=r"(v[14]), "=r"(v[15])
               : "r"(address) : "memory");
  return v[0];
}
INLINE void wait_store() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }
INLINE void wait_load() { asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }
INLINE void multiply(unsigned address, unsigned long long operand, int columns, bool accumulate) {
  unsigned instruction = 1 << 4 | columns / 8 << 17 | 8 << 24;
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0;\n"
               "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %1, %2, p; }"
               ::"r"(address), "l"(operand), "r"(instruction), "r"((unsigned)accumulate) : "memory");
}
INLINE void commit(Barrier *b) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(at(b)) : "memory");
}
INLINE bool is_cancelled(long long low, long long high) {
  unsigned is;
  asm volatile("{ .reg .b128 h; .reg .pred p; mov.b128 h, {%1, %2};\n"
               "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, h; selp.u32 %0, 1, 0, p; }"
               : "=r"(is) : "l"(low), "l"(high));
  return is;
}
INLINE unsigned first_block(long long low, long long high) {
  unsigned block;
  asm volatile("{ .reg .b128 h; mov.b128 h, {%1, %2};\n"
               "clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %0, h; }"
               : "=r"(block) : "l"(low), "l"(high));
  return block;
}
INLINE void meet(int n) { asm volatile("bar.sync 1, %0;" ::"r"(n) : "memory"); }

#define TMEM             \
  __shared__ unsigned slot; \
  unsigned d = allocate(&slot)
#define ZEROS                                                        \
  __shared__ alignas(1024) int4 s[256];                              \
  __shared__ Barrier done1, done2;                                   \
  s[2 * T] = s[2 * T + 1] = int4{0, 0, 0, 0};                        \
  fence_async();                                                     \
  if (T == 0) {                                                      \
    init(&done1, 1);                                                 \
    init(&done2, 1);                                                 \
  }                                                                  \
  __syncthreads();                                                   \
  unsigned long long operand = (at(s) >> 4) | 0x0000401000080000ull

extern "C" {

// kind: uninitialised_tmem
__global__ void tensor_memory_that_nothing_wrote(int *x, int *out) {
  TMEM;
  FIX(store(quarter(d), T); wait_store();)
  int v = load(quarter(d));  //!
  wait_load();
  out[T] = v;
  release(d);
}

// kind: uninitialised_tmem; threads 128
__global__ void accumulation_from_the_first_product_on(int *x, int *out) {
  TMEM;
  ZEROS;
  if (T == 0) {
    multiply(d, operand, 64, FAULT(true) FIX(false));  //!
    commit(&done1);
  }
  wait(&done1, 0);
  release(d);
}

// kind: tmem_outside_allocation
__global__ void a_store_outside_the_allocation(int *x, int *out) {
  TMEM;
  store(quarter(d) + FAULT(256) FIX(255), T);  //!
  wait_store();
  release(d);
}

// kind: tmem_outside_allocation; threads 128
__global__ void a_product_outside_the_allocation(int *x, int *out) {
  TMEM;
  ZEROS;
  if (T == 0) {
    multiply(d + FAULT(224) FIX(192), operand, 64, false);  //!
    commit(&done1);
  }
  wait(&done1, 0);
  release(d);
}

// kind: tmem_after_free
__global__ void a_load_after_dealloc(int *x, int *out) {
  TMEM;
  store(quarter(d), T);
  wait_store();
  FAULT(release(d); __syncthreads();)
  int v = load(quarter(d));  //!
  wait_load();
  out[T] = v;
  FIX(release(d);)
}

// kind: race_tensor|tmem_after_free
__global__ void a_dealloc_while_others_load(int *x, int *out) {
  TMEM;
  store(quarter(d), T);
  wait_store();
  int v = load(quarter(d));  //!
  wait_load();
  out[T] = v;
  FIX(__syncthreads();)
  if (WARP == 0) deallocate(d);  //!
}

// kind: tmem_lane_quarter
__global__ void a_quarter_of_another_warp(int *x, int *out) {
  TMEM;
  store(FAULT(d) FIX(quarter(d)), T);  //!
  wait_store();
  release(d);
}

// kind: tmem_leak
__global__ void no_dealloc(int *x, int *out) {
  TMEM;
  FIX(release(d);)
  out[T] = d;
}  //!

// kind: missing_tcgen05_wait
__global__ void no_wait_for_a_store_before_a_load(int *x, int *out) {
  TMEM;
  store(quarter(d), T);  //!
  FIX(wait_store();)
  int v = load(quarter(d));  //!
  wait_load();
  out[T] = v;
  wait_store();
  release(d);
}

// kind: missing_tcgen05_wait|race_tensor; threads 160; schedules round_robin
__global__ void no_wait_for_a_store_before_the_hand_over(int *x, int *out) {
  TMEM;
  if (WARP < 4) {
    store(quarter(d), T);  //!
    FIX(wait_store();)
    meet(160);
    FAULT(wait_store();)
  } else {
    meet(160);
    int v = load(quarter(d));  //!
    wait_load();
    out[T] = v;
  }
  release(d);
}

// kind: tcgen05_ld_used_early
__global__ void no_wait_for_a_load_before_its_use(int *x, int *out) {
  TMEM;
  store(quarter(d), T);
  wait_store();
  int v = load(quarter(d));  //!
  FIX(wait_load();)
  out[T] = v + 1;  //!
  FAULT(wait_load();)
  release(d);
}

// kind: race_tensor; threads 160
__global__ void two_warps_of_a_quarter(int *x, int *out) {
  TMEM;
  if (WARP < 4) {
    store(quarter(d), T);  //!
    wait_store();
    FIX(meet(160);)
  } else {
    FIX(meet(160);)
    int v = load(quarter(d));  //!
    wait_load();
    out[T] = v;
  }
  release(d);
}

// kind: race_tensor; threads 128; schedules oldest_first
__global__ void a_load_before_the_product_is_done(int *x, int *out) {
  TMEM;
  ZEROS;
  if (T == 0) {
    multiply(d, operand, 64, false);  //!
    commit(&done1);
  }
  FIX(wait(&done1, 0);)
  int v = load(quarter(d));  //!
  wait_load();
  out[T] = v;
  wait(&done1, 0);
  release(d);
}

// kind: race_tensor; threads 128
__global__ void a_product_over_what_is_still_read(int *x, int *out) {
  TMEM;
  ZEROS;
  if (T == 0) {
    multiply(d, operand, 64, false);
    commit(&done1);
  }
  wait(&done1, 0);
  int v = load(quarter(d));  //!
  wait_load();
  out[T] = v;
  FIX(__syncthreads();)
  if (T == 0) {
    multiply(d, operand, 64, false);  //!
    commit(&done2);
  }
  wait(&done2, 0);
  release(d);
}

// kind: race_shared; threads 128
__global__ void operands_that_are_overwritten_early(int *x, int *out) {
  TMEM;
  ZEROS;
  if (T == 0) {
    multiply(d, operand, 64, false);  //!
    commit(&done1);
  }
  FIX(wait(&done1, 0);)
  s[T].x = 1;  //!
  wait(&done1, 0);
  release(d);
}

// kind: missing_proxy_fence; threads 128
__global__ void operands_without_a_proxy_fence(int *x, int *out) {
  TMEM;
  __shared__ alignas(1024) int4 s[256];
  __shared__ Barrier done1;
  s[2 * T] = int4{0, 0, 0, 0};  //!
  s[2 * T + 1] = int4{0, 0, 0, 0};  //!
  FIX(fence_async();)
  if (T == 0) init(&done1, 1);
  __syncthreads();
  if (T == 0) {
    multiply(d, (at(s) >> 4) | 0x0000401000080000ull, 64, false);  //!
    commit(&done1);
  }
  wait(&done1, 0);
  release(d);
}

// kind: tmem_product_overlap; threads 128
__global__ void two_products_that_overlap(int *x, int *out) {
  TMEM;
  ZEROS;
  if (T == 0) {
    multiply(d, operand, 64, false);  //!
    multiply(d + FAULT(56) FIX(64), operand, 64, false);  //!
    commit(&done1);
  }
  wait(&done1, 0);
  int v = load_16(quarter(d) + 48);  //!
  wait_load();
  out[T] = v;
  release(d);
}

// kind: clc_failed_response
__global__ void a_failed_request_whose_block_is_used(int *x, int *out) {
  __shared__ alignas(16) int4 answer;
  __shared__ Barrier full;
  if (T == 0) init(&full, 1);
  __syncthreads();
  if (T == 0) {
    expect(&full, 16);
    asm volatile("clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%0], [%1];"
                 ::"r"(at(&answer)), "r"(at(&full)) : "memory");
  }
  wait(&full, 0);
  long long low = ((long long *)&answer)[0], high = ((long long *)&answer)[1];
  FIX(if (!is_cancelled(low, high)) return;)
  out[T] = first_block(low, high);  //!
}

}
