// Stage A of the attention ladder: one tile of scores a CTA on the tensor core.
//
//     S = scale Q K^T        Q [M, D], K [N, D] of a 16-bit type; S [M, N] fp32
//
// A CTA owns 128 rows of Q and 128 of K. Threads copy both to shared memory as the tensor core wants to read them:
// chunks of 64 dimensions, a row of 128 bytes, its pieces of 16 bytes permuted by the row (the 128-byte swizzle). Rows
// past the end are zeros. One thread issues D / 16 MMAs of 128 x 128 x 16 to tensor memory, whose lanes are rows of S:
// thread t then reads row t.
//
//     SMEM   Q: D / 64 chunks of 16 KiB, K likewise, mbarrier, address in tensor memory        TMEM   128 columns
#include "dsv4.cuh"

using Halves = Vector<unsigned short>;  // 8 elements of 16 bits
constexpr int kTile = 128, kChunk = 64, kChunks = D / kChunk, kInstruction = 16;
constexpr int kRowBytes = 128, kChunkBytes = kTile * kRowBytes, kTileBytes = kChunks * kChunkBytes;
constexpr int kColumns = 16;  // of tensor memory that a load takes

// fp32 accumulator; both operands bf16 (1) or fp16 (0), K-major; N / 8 and M / 16.
constexpr unsigned kInstructionDescriptor = 1u << 4 | BF16 << 7 | BF16 << 10 | kTile / 8 << 17 | kTile / 16 << 24;

__device__ unsigned shared_address(const void* place) { return static_cast<unsigned>(__cvta_generic_to_shared(place)); }

// A matrix in shared memory: 1024 bytes from 8 rows to the next 8, in the 128-byte swizzle.
__device__ unsigned long long matrix_descriptor(unsigned address) {
  return (address & 0x3ffffu) >> 4 | 1024ull >> 4 << 32 | 1ull << 46 | 2ull << 61;
}

// Copy rows first .. first + 127 of a matrix; thread t copies row t.
__device__ void copy_tile(char* tile, const unsigned short* matrix, long long stride, int first, int rows) {
  const int row = threadIdx.x;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    char* line = tile + chunk * kChunkBytes + row * kRowBytes;
#pragma unroll
    for (int piece = 0; piece < kChunk / Halves::kSize; ++piece) {
      Halves values = {};
      if (first + row < rows) {
        values = load(matrix + (first + row) * stride + chunk * kChunk + piece * Halves::kSize);
      }
      store(reinterpret_cast<unsigned short*>(line + (piece ^ row % 8) * 16), values);
    }
  }
}

// D (+)= A B^T of 128 x 128 x 16, by one thread.
__device__ void multiply(unsigned d, unsigned a, unsigned b, bool accumulate) {
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %4, 0;\n"
      "  tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p; }" ::"r"(d), "l"(matrix_descriptor(a)),
      "l"(matrix_descriptor(b)), "r"(kInstructionDescriptor), "r"(static_cast<unsigned>(accumulate))
      : "memory");
}

__device__ void wait(unsigned barrier, unsigned phase) {
  asm volatile(
      "{ .reg .pred done;\n"
      "  again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "  @!done bra again; }" ::"r"(barrier), "r"(phase)
      : "memory");
}

// Columns of this thread's lane of tensor memory; all lanes of a warp come here.
__device__ void load_columns(unsigned address, float (&x)[kColumns]) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x16.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "[%16];\n"
      "tcgen05.wait::ld.sync.aligned;"
      : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]), "=f"(x[4]), "=f"(x[5]), "=f"(x[6]), "=f"(x[7]), "=f"(x[8]),
        "=f"(x[9]), "=f"(x[10]), "=f"(x[11]), "=f"(x[12]), "=f"(x[13]), "=f"(x[14]), "=f"(x[15])
      : "r"(address)
      : "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS)
    qk_tile(const unsigned short* q, const unsigned short* kv, float* s, long long q_stride, long long kv_stride,
            long long s_stride, int m, int n, float scale) {
  extern __shared__ __align__(1024) char memory[];  // on which the swizzle counts its rows
  char *tile_q = memory, *tile_k = memory + kTileBytes, *control = memory + 2 * kTileBytes;
  const unsigned barrier = shared_address(control), tmem_place = shared_address(control + 8);
  const int first_q = blockIdx.y * kTile, first_k = blockIdx.x * kTile;
  wait_for_predecessor();
  launch_successor();

  if (warp_id() == 0) {
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(tmem_place), "n"(kTile)
                 : "memory");
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
    if (lane_id() == 0) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
  }
  copy_tile(tile_q, q, q_stride, first_q, m);
  copy_tile(tile_k, kv, kv_stride, first_k, n);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the tensor core reads what threads wrote
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  __syncthreads();
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  const unsigned tmem = *reinterpret_cast<volatile unsigned*>(control + 8);

  if (threadIdx.x == 0) {
    // S = Q @ K^T
    for (int k = 0; k < D / kInstruction; ++k) {
      const unsigned offset = k * kInstruction / kChunk * kChunkBytes + k * kInstruction % kChunk * 2;
      multiply(tmem, shared_address(tile_q) + offset, shared_address(tile_k) + offset, k > 0);
    }
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier)
                 : "memory");
  }
  wait(barrier, 0);
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");

  const int row = first_q + threadIdx.x;
  for (int column = 0; column < kTile; column += kColumns) {
    float x[kColumns];
    load_columns(tmem + (warp_id() * kLanes << 16) + column, x);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (row < m && first_k + column + i < n) s[row * s_stride + first_k + column + i] = scale * x[i];
    }
  }
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  __syncthreads();  // all have read
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  if (warp_id() == 0) {
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(tmem), "n"(kTile));
  }
}
