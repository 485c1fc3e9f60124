// Faults around global memory: races, scopes, ends of tensors, dependent launches, devices. x[100] is a flag, 0.
#include "common.cuh"

#define CTA blockIdx.x
#define FLAG (x + 100)

// CTA 0 writes its words of out and raises the flag; CTA 1 waits for it and reads them.
#define WAIT_FOR(scope) while (!__nv_atomic_load_n(FLAG, __NV_ATOMIC_ACQUIRE, scope)) {}
#define RAISE(scope) __nv_atomic_store_n(FLAG, 1, __NV_ATOMIC_RELEASE, scope)

extern "C" {

// kind: race_global; grid 2
__global__ void two_blocks_write_a_word(int *x, int *out) {
  FIX(if (CTA == 0)) out[T] = CTA;  //!
}

// kind: race_global_same_value; grid 2
__global__ void two_blocks_write_the_same_value(int *x, int *out) {
  FIX(if (CTA == 0)) out[T] = 7;  //!
}

// kind: race_global
__global__ void a_word_of_another_warp(int *x, int *out) {
  out[T] = x[T];  //!
  FIX(__syncthreads();)
  out[T + 64] = out[T ^ 32];  //!
}

// kind: race_global
__global__ void halves_of_one_word(int *x, int *out) {
  if (LANE == 0) ((short *)out)[FAULT(0) FIX(WARP)] = T + 1;  //!
}

// kind: race_global; grid 2
__global__ void a_flag_that_does_not_release(int *x, int *out) {
  if (CTA == 0) {
    out[T] = T;  //!
    __syncthreads();
    if (T == 0) __nv_atomic_store_n(FLAG, 1, FAULT(__NV_ATOMIC_RELAXED) FIX(__NV_ATOMIC_RELEASE), __NV_THREAD_SCOPE_DEVICE);
  } else {
    WAIT_FOR(__NV_THREAD_SCOPE_DEVICE)
    out[T + 64] = out[T ^ 32];  //!
  }
}

// kind: race_global; grid 2
__global__ void a_flag_that_is_not_acquired(int *x, int *out) {
  if (CTA == 0) {
    out[T] = T;  //!
    __syncthreads();
    if (T == 0) RAISE(__NV_THREAD_SCOPE_DEVICE);
  } else {
    while (!__nv_atomic_load_n(FLAG, FAULT(__NV_ATOMIC_RELAXED) FIX(__NV_ATOMIC_ACQUIRE), __NV_THREAD_SCOPE_DEVICE)) {}
    out[T + 64] = out[T ^ 32];  //!
  }
}

// kind: race_global; grid 2
__global__ void a_release_whose_scope_is_the_block(int *x, int *out) {
  if (CTA == 0) {
    out[T] = T;  //!
    __syncthreads();
    if (T == 0) RAISE(FAULT(__NV_THREAD_SCOPE_BLOCK) FIX(__NV_THREAD_SCOPE_DEVICE));
  } else {
    WAIT_FOR(__NV_THREAD_SCOPE_DEVICE)
    out[T + 64] = out[T ^ 32];  //!
  }
}

// kind: race_global; grid 2
__global__ void an_acquire_whose_scope_is_the_block(int *x, int *out) {
  if (CTA == 0) {
    out[T] = T;  //!
    __syncthreads();
    if (T == 0) RAISE(__NV_THREAD_SCOPE_DEVICE);
  } else {
    WAIT_FOR(FAULT(__NV_THREAD_SCOPE_BLOCK) FIX(__NV_THREAD_SCOPE_DEVICE))
    out[T + 64] = out[T ^ 32];  //!
  }
}

// kind: race_global; grid 2
__global__ void a_thread_fence_of_the_block(int *x, int *out) {
  if (CTA == 0) {
    out[T] = T;  //!
    FAULT(__threadfence_block();)
    FIX(__threadfence();)
    __syncthreads();
    if (T == 0) atomicExch(FLAG, 1);
  } else {
    WAIT_FOR(__NV_THREAD_SCOPE_DEVICE)
    out[T + 64] = out[T ^ 32];  //!
  }
}

// kind: race_global; grid 2
__global__ void the_flag_before_the_data(int *x, int *out) {
  if (CTA == 0) {
    FAULT(if (T == 0) RAISE(__NV_THREAD_SCOPE_DEVICE);)
    out[T] = T;  //!
    FIX(__syncthreads(); if (T == 0) RAISE(__NV_THREAD_SCOPE_DEVICE);)
  } else {
    WAIT_FOR(__NV_THREAD_SCOPE_DEVICE)
    out[T + 64] = out[T ^ 32];  //!
  }
}

// kind: race_global; grid 2
__global__ void a_flag_raised_for_one_warp_alone(int *x, int *out) {
  if (CTA == 0) {
    out[T] = T;  //!
    FIX(__syncthreads();)
    if (T == 0) RAISE(__NV_THREAD_SCOPE_DEVICE);
  } else {
    WAIT_FOR(__NV_THREAD_SCOPE_DEVICE)
    out[T + 64] = out[T ^ 32];  //!
  }
}

// kind: race_global; grid 2
__global__ void one_thread_looks_at_the_flag(int *x, int *out) {
  if (CTA == 0) {
    out[T] = T;  //!
    __syncthreads();
    if (T == 0) RAISE(__NV_THREAD_SCOPE_DEVICE);
  } else {
    if (T == 0) WAIT_FOR(__NV_THREAD_SCOPE_DEVICE)
    FIX(__syncthreads();)
    out[T + 64] = out[T ^ 32];  //!
  }
}

// kind: race_global; grid 2
__global__ void the_last_block_sums_without_a_fence(int *x, int *out) {
  __shared__ bool last;
  out[64 * CTA + T] = T;  //!
  __syncthreads();
  if (T == 0) {
    FIX(__threadfence();)
    last = atomicAdd(FLAG, 1) == 1;
    FIX(__threadfence();)
  }
  __syncthreads();
  if (last) {
    out[128 + T] = out[T] + out[64 + T];  //!
  }
}

// kind: race_global; grid 2
__global__ void a_store_beside_an_atomic(int *x, int *out) {
  if (T == 0) {
    if (CTA == 0) FAULT(out[0] = 5) FIX(atomicExch(out, 5));  //!
    else atomicAdd(out, 1);  //!
  }
}

// kind: race_global; grid 2
__global__ void a_load_beside_an_atomic(int *x, int *out) {
  if (CTA == 0) atomicAdd(out, 1);  //!
  else out[64 + T] = FAULT(out[0]) FIX(__nv_atomic_load_n(out, __NV_ATOMIC_RELAXED, __NV_THREAD_SCOPE_DEVICE));  //!
}

// kind: race_global
__global__ void a_bulk_store_of_which_only_the_reading_is_complete(int *x, int *out) {
  __shared__ alignas(128) int s[64];
  s[T] = x[T];
  fence_async();
  __syncthreads();
  if (T == 0) {
    send(out, s, 256);  //!
    FAULT(wait_read<0>();)
    FIX(wait_sent<0>();)
    out[64] = out[4];  //!
    wait_sent<0>();
  }
}

// kind: race_global
__global__ void a_bulk_copy_of_what_is_being_stored(int *x, int *out) {
  __shared__ alignas(128) int s[64];
  __shared__ Barrier full;
  if (T == 0) init(&full, 1);
  __syncthreads();
  out[T] = T;  //!
  fence_async_global();
  FIX(__syncthreads();)
  if (T == 0) {
    expect(&full, 256);
    fetch(s, out, 256, &full);  //!
  }
  wait(&full, 0);
}

// kind: missing_proxy_fence_global
__global__ void a_bulk_copy_of_what_threads_wrote(int *x, int *out) {
  __shared__ alignas(128) int s[64];
  __shared__ Barrier full;
  if (T == 0) init(&full, 1);
  __syncthreads();
  out[T] = T;  //!
  FIX(fence_async_global();)
  __syncthreads();
  if (T == 0) {
    expect(&full, 256);
    fetch(s, out, 256, &full);  //!
  }
  wait(&full, 0);
}

// kind: tma_store_padding; map 13
__global__ void rows_that_do_not_end_at_16_bytes(int *x, int *out, const __grid_constant__ Map map) {
  __shared__ alignas(128) int s[64];
  s[T] = T;
  fence_async();
  __syncthreads();
  if (T == 0) {
    send_box(&map, FAULT(8) FIX(0), 0, s);  //!
    wait_sent<0>();
  }
}

// kind: missing_tensormap_fence; map
__global__ void a_map_that_is_changed_without_a_fence(int *x, int *out, const __grid_constant__ Map map) {
  __shared__ alignas(128) int s[64];
  __shared__ Barrier full;
  Map *own = (Map *)(out + 256);
  if (T == 0) {
    init(&full, 1);
    for (int i = 0; i < 16; i++) ((long long *)own)[i] = ((const long long *)&map)[i];
    asm volatile("tensormap.replace.tile.global_dim.global.b1024.b32 [%0], 1, 12;"
                 ::"l"(__cvta_generic_to_global(own)) : "memory");
    FIX(asm volatile("fence.proxy.tensormap::generic.release.gpu;" ::: "memory");
        asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(own) : "memory");)
    expect(&full, 256);
    fetch_box(s, own, 0, 0, &full);  //!
    wait(&full, 0);
  }
}

// --- the end of a tensor

// kind: global_read_past_end|MemoryFault
__global__ void a_load_past_the_end(int *x, int *out) {
  out[T] = x[T + FAULT(1024 - 32) FIX(1024 - 64)];  //!
}

// kind: MemoryFault
__global__ void a_store_past_the_end(int *x, int *out) {
  out[T + FAULT(1024 - 32) FIX(1024 - 64)] = T;  //!
}

// kind: MemoryFault
__global__ void a_vector_that_is_not_aligned(int *x, int *out) {
  reinterpret_cast<int4 *>(out)[T] = *reinterpret_cast<const int4 *>(x + FAULT(2) FIX(4));  //!
}

// kind: MemoryFault
__global__ void a_bulk_copy_past_the_end(int *x, int *out) {
  __shared__ alignas(128) int s[64];
  __shared__ Barrier full;
  if (T == 0) init(&full, 1);
  __syncthreads();
  if (T == 0) {
    expect(&full, 256);
    fetch(s, x + FAULT(1024 - 32) FIX(1024 - 64), 256, &full);  //!
  }
  wait(&full, 0);
}

// kind: uninitialised_register
__global__ void inline_ptx_that_sets_nothing(int *x, int *out) {
  int v;
  asm volatile("/* %0 */" : "=r"(v));
  FIX(v = 1;)
  out[T] = v + T;  //!
}

// --- dependent launches: NAME_after is launched behind NAME, programmatically

// kind: dependent_launch_early
__global__ void a_load_before_the_wait(int *x, int *out) { out[T] = x[T]; }  //!
__global__ void a_load_before_the_wait_after(int *x, int *out) {
  FIX(asm volatile("griddepcontrol.wait;" ::: "memory");)
  int v = out[T];  //!
  FAULT(asm volatile("griddepcontrol.wait;" ::"r"(v) : "memory");)
  out[T + 64] = v;
}

// kind: dependent_launch_early
__global__ void a_store_without_a_wait(int *x, int *out) { out[T] = x[T]; }  //!
__global__ void a_store_without_a_wait_after(int *x, int *out) {
  FIX(asm volatile("griddepcontrol.wait;" ::: "memory");)
  x[T] = T;  //!
}

// kind: dependent_launch_early
__global__ void another_warp_waits(int *x, int *out) { out[T] = x[T]; }  //!
__global__ void another_warp_waits_after(int *x, int *out) {
  if (WARP == 0) asm volatile("griddepcontrol.wait;" ::: "memory");
  FIX(__syncthreads();)
  out[T + 64] = out[T];  //!
}

// --- two devices: x and out are those of the second for both. NAME_other runs on the second.

// kind: race_between_devices; devices
__global__ void a_thread_fence_that_ends_at_the_device(int *x, int *out) {
  if (T == 0) {
    out[0] = 7;  //!
    FAULT(__threadfence();)
    FIX(__threadfence_system();)
    __nv_atomic_store_n(FLAG, 1, __NV_ATOMIC_RELAXED, __NV_THREAD_SCOPE_SYSTEM);
  }
}
__global__ void a_thread_fence_that_ends_at_the_device_other(int *x, int *out) {
  if (T == 0) {
    WAIT_FOR(__NV_THREAD_SCOPE_SYSTEM)
    out[1] = out[0];  //!
  }
}

// kind: scope_between_devices; devices
__global__ void an_atomic_that_ends_at_the_device(int *x, int *out) {
  if (T == 0) {
    out[0] = 7;
    __threadfence_system();
    FAULT(atomicAdd(FLAG, 1);)  //!
    FIX(atomicAdd_system(FLAG, 1);)
  }
}
__global__ void an_atomic_that_ends_at_the_device_other(int *x, int *out) {
  if (T == 0) {
    WAIT_FOR(__NV_THREAD_SCOPE_SYSTEM)  //!
    out[1] = out[0];
  }
}

// kind: scope_between_devices; devices
__global__ void an_acquire_that_ends_at_the_device(int *x, int *out) {
  if (T == 0) {
    out[0] = 7;
    RAISE(__NV_THREAD_SCOPE_SYSTEM);  //!
  }
}
__global__ void an_acquire_that_ends_at_the_device_other(int *x, int *out) {
  if (T == 0) {
    WAIT_FOR(FAULT(__NV_THREAD_SCOPE_DEVICE) FIX(__NV_THREAD_SCOPE_SYSTEM))  //!
    out[1] = out[0];
  }
}

}
