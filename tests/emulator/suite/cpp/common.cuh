// What the faulty kernels in CUDA C++ share. FIX(...) is there only in the repaired twin, FAULT(...) only in the faulty
// one. "//!" marks the lines that a report names; "// kind:" says what it is called, and how the kernel is launched.
#pragma once

#ifdef REPAIRED
#define FIX(...) __VA_ARGS__
#define FAULT(...)
#else
#define FIX(...)
#define FAULT(...) __VA_ARGS__
#endif
#define T threadIdx.x
#define WARP (threadIdx.x / 32)
#define LANE (threadIdx.x % 32)
#define INLINE __device__ __forceinline__

struct alignas(64) Map {  // a tensor map
  char bytes[128];
};
typedef unsigned long long Barrier;  // an mbarrier

INLINE unsigned at(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

// --- mbarriers
INLINE void init(Barrier *b, unsigned count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at(b)), "r"(count) : "memory");
}
INLINE void inval(Barrier *b) { asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(at(b)) : "memory"); }
INLINE void arrive(Barrier *b, unsigned count = 1) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0], %1;" ::"r"(at(b)), "r"(count) : "memory");
}
INLINE void arrive_at_peer(unsigned b) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(b) : "memory");
}
INLINE void expect(Barrier *b, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(at(b)), "r"(bytes) : "memory");
}
INLINE void add_bytes(Barrier *b, unsigned bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(at(b)), "r"(bytes) : "memory");
}
INLINE void take_bytes(Barrier *b, unsigned bytes) {
  asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(at(b)), "r"(bytes) : "memory");
}
INLINE bool done(Barrier *b, unsigned parity) {
  unsigned is;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(is) : "r"(at(b)), "r"(parity) : "memory");
  return is;
}
INLINE void wait(Barrier *b, unsigned parity) {
  unsigned is;
  do {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(is) : "r"(at(b)), "r"(parity) : "memory");
  } while (!is);
}
INLINE void fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// --- copies
INLINE void fetch(void *to, const void *from, unsigned bytes, Barrier *b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(at(to)), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(at(b)) : "memory");
}
INLINE void send(void *to, const void *from, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               ::"l"(__cvta_generic_to_global(to)), "r"(at(from)), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
INLINE void add_to(void *to, const void *from, unsigned bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%0], [%1], %2;"
               ::"l"(__cvta_generic_to_global(to)), "r"(at(from)), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
INLINE void fetch_box(void *to, const Map *map, int column, int row, Barrier *b) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
               "[%4];" ::"r"(at(to)), "l"(map), "r"(column), "r"(row), "r"(at(b)) : "memory");
}
INLINE void send_box(const Map *map, int column, int row, const void *from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
               ::"l"(map), "r"(column), "r"(row), "r"(at(from)) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int N>
INLINE void wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory"); }
template <int N>
INLINE void wait_sent() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory"); }
INLINE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
INLINE void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// --- clusters
INLINE unsigned rank() {
  unsigned r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
INLINE unsigned peer(const void *p) {  // the same place of the other CTA of a pair
  unsigned a;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"(at(p)), "r"(rank() ^ 1));
  return a;
}
INLINE int take(unsigned from) {
  int v;
  asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}
INLINE void put(unsigned to, int v) {
  asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}
INLINE void put_async(unsigned to, int v, unsigned barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
               ::"r"(to), "r"(v), "r"(barrier) : "memory");
}
INLINE void copy_to_peer(unsigned to, const void *from, unsigned bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "r"(at(from)), "r"(bytes), "r"(barrier) : "memory");
}
INLINE void cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
INLINE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
INLINE void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
INLINE void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}
