// Experts and weights of tokens, a CTA a token:
//
//     a       = sqrt(softplus(x gate^T))             D columns; with D = 0, x holds the logits
//     experts = the K best of a + bias               equal scores: the lower number; HASHED: table[tokens[t]]
//     weights = factor a / sum of the K a
//
// A warp computes one logit after the other, all lanes along the columns. Then one warp selects: K times the best of
// the keys that its lanes hold. NaN ranks last and makes all weights of its token NaN.
#include "dsv4.cuh"

using Bf16x8 = Vector<__nv_bfloat16>;
constexpr int kWarps = THREADS / kLanes;
constexpr int kExpertsPerLane = (EXPERTS + kLanes - 1) / kLanes;

// sqrt(softplus(x)). With h = exp(-|x| / 2) and r = log1p(h^2) / h^2 nothing underflows before the result does.
__device__ float affinity(float x) {
  const float h = expf(-0.5f * fabsf(x)), e = h * h;
  const float r = e > 1e-7f ? log1pf(e) / e : 1.0f - 0.5f * e;
  return x > 0.0f ? sqrtf(fmaf(e, r, x)) : h * sqrtf(r);
}

// x . gate[expert], in every lane.
__device__ float dot(const __nv_bfloat16* x, const __nv_bfloat16* row) {
  float sum = 0.0f;
  for (int column = lane_id() * Bf16x8::kSize; column < D; column += kLanes * Bf16x8::kSize) {
    const Bf16x8 a = load(x + column), b = load(row + column);
#pragma unroll
    for (int i = 0; i < Bf16x8::kSize; ++i) sum = fmaf(__bfloat162float(a[i]), __bfloat162float(b[i]), sum);
  }
  return warp_sum(sum);
}

// The K best of the scores; pick r in lane r. `poison` becomes NaN if a score is.
__device__ int best(const float* logits, const float* bias, float* poison) {
  unsigned keys[kExpertsPerLane];
  bool bad = false;
#pragma unroll
  for (int i = 0; i < kExpertsPerLane; ++i) {
    const int expert = lane_id() + kLanes * i;
    if (expert < EXPERTS) {
      const float score = affinity(logits[expert]) + bias[expert];
      bad |= isnan(score);
      keys[i] = sort_key(score);
    } else {
      keys[i] = 0u;
    }
  }
  *poison = __any_sync(kAllLanes, bad) ? __int_as_float(0x7fffffff) : 0.0f;
  int pick = -1;
  for (int r = 0; r < K; ++r) {
    unsigned key = 0u;
    int expert = 0;
#pragma unroll
    for (int i = 0; i < kExpertsPerLane; ++i) {
      if (keys[i] > key) {
        key = keys[i];
        expert = lane_id() + kLanes * i;
      }
    }
    const unsigned top = __reduce_max_sync(kAllLanes, key);
    const int winner = __reduce_min_sync(kAllLanes, key == top ? expert : EXPERTS);
#pragma unroll
    for (int i = 0; i < kExpertsPerLane; ++i) {
      if (lane_id() + kLanes * i == winner) keys[i] = 0u;
    }
    if (lane_id() == r) pick = winner;
  }
  return pick;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    router(const void* x, const __nv_bfloat16* gate, const float* bias, const long long* table,
           const long long* tokens, int* experts, float* weights, long long x_stride, long long gate_stride,
           long long table_stride, long long experts_stride, long long weights_stride, long long vocabulary,
           float factor) {
  __shared__ float logits[EXPERTS];
  const long long token = blockIdx.x;
  wait_for_predecessor();
  launch_successor();

  auto logit_of = [&](int expert) {
    if (!D) return static_cast<const float*>(x)[token * x_stride + expert];
    return dot(static_cast<const __nv_bfloat16*>(x) + token * x_stride, gate + expert * gate_stride);
  };
  auto of_table = [&](int r) {  // -1 where there is no such token or expert
    const unsigned long long id = tokens[token];
    if (id >= vocabulary) return -1;
    const unsigned long long expert = table[id * table_stride + r];
    return expert < EXPERTS ? static_cast<int>(expert) : -1;
  };

  // Logits of all experts, or of those of the table.
  for (int i = warp_id(); i < (HASHED ? K : EXPERTS); i += kWarps) {
    const int expert = HASHED ? of_table(i) : i;
    const float logit = expert < 0 ? 0.0f : logit_of(expert);
    if (lane_id() == 0) logits[i] = logit;
  }
  __syncthreads();
  if (warp_id() != 0) return;

  float poison = 0.0f;
  const bool picks = lane_id() < K;
  const int pick = !HASHED ? best(logits, bias, &poison) : picks ? of_table(lane_id()) : -1;
  const float a = picks && pick >= 0 ? affinity(logits[HASHED ? lane_id() : pick]) : 0.0f;
  const float total = warp_sum(a) + poison;
  if (!picks) return;
  experts[token * experts_stride + lane_id()] = pick;
  weights[token * weights_stride + lane_id()] = pick < 0 ? 0.0f : factor * a / total;
}
