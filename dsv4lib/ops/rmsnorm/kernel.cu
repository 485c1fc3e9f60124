// RMSNorm of bf16 rows, after a residual's addition if ADD:
//
//     h = bf16(x + residual)                        written to `sum`
//     y = bf16(weight * h / sqrt(mean(h^2) + eps))
//
// A CTA owns a row of D columns, THREADS its threads. A thread holds PIECES vectors of 8 columns in registers between
// the sum and the scaling, so every byte moves once. The sum of squares: a thread's columns in order, lanes by a
// butterfly, warps in order; it depends on nothing but the row.
#include "dsv4.cuh"

using Bf16x8 = Vector<__nv_bfloat16>;
constexpr int kColumns = Bf16x8::kSize;
constexpr int kWarps = THREADS / kLanes;

__device__ float sum_over_cta(float value) {
  __shared__ float sums[kWarps];
  value = warp_sum(value);
  if (lane_id() == 0) sums[warp_id()] = value;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += sums[w];
  return total;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    rmsnorm(const __nv_bfloat16* x, const __nv_bfloat16* residual, const float* weight,
            __nv_bfloat16* sum, __nv_bfloat16* y, long long x_stride, long long residual_stride,
            long long sum_stride, long long y_stride, float eps) {
  const long long row = blockIdx.x;
  x += row * x_stride;
  y += row * y_stride;
  wait_for_predecessor();
  launch_successor();

  Bf16x8 h[PIECES];
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    const int column = (threadIdx.x + THREADS * i) * kColumns;
    if (column >= D) continue;
    h[i] = load(x + column);
    if (ADD) {
      const Bf16x8 other = load(residual + row * residual_stride + column);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        h[i][j] = __float2bfloat16_rn(__bfloat162float(h[i][j]) + __bfloat162float(other[j]));
      }
      store(sum + row * sum_stride + column, h[i]);
    }
#pragma unroll
    for (int j = 0; j < kColumns; ++j) squares = fmaf(__bfloat162float(h[i][j]), __bfloat162float(h[i][j]), squares);
  }

  const float scale = rsqrtf(sum_over_cta(squares) * (1.0f / D) + eps);
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    const int column = (threadIdx.x + THREADS * i) * kColumns;
    if (column >= D) continue;
    Bf16x8 out;
#pragma unroll
    for (int j = 0; j < kColumns; j += 4) {
      Vector<float> factors = {1.0f, 1.0f, 1.0f, 1.0f};
      if (WEIGHTED) factors = load(weight + column + j);
#pragma unroll
      for (int k = 0; k < 4; ++k) out[j + k] = __float2bfloat16_rn(__bfloat162float(h[i][j + k]) * scale * factors[k]);
    }
    store(y + column, out);
  }
}
