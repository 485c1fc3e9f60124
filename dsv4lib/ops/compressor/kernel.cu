// A decode step of the compressor, a CTA a request: store its one row, and where it closes a window, pool and store the
// window's entry. All fp32, but entries of a quantised form are rounded to bf16 where the released code stores them.
//
//     z(t)  = gate(t) + ape[t mod RATE]
//     e     = sum_t softmax_t(z(t)) kv(t)              per channel, over POOLED rows: RATE, with OVERLAP twice as many
//     entry = packed(hadamard(rope(norm e / sqrt(mean(e^2) + eps))))
//
// A thread owns 4 channels, so that it alone reads and writes its columns of the state, in program order:
//
//     RUNNING = 0   a ring of ROWS rows (k, z); with OVERLAP the window before is pooled through the first DIM columns
//     RUNNING = 1   the softmax of the open window: maximum, sum of exponentials, weighted sum
#include <cuda_fp4.h>
#include <cuda_fp8.h>
#include <math_constants.h>

#include "dsv4.cuh"

using Floats = Vector<float>;
constexpr int kChannels = Floats::kSize, kRope = 64;
constexpr int kWarps = THREADS / kLanes;
enum Form { kFp32, kBf16, kKv, kFp8, kFp4 };

struct Request {
  int row, count, start, place;
};

struct State {  // of one request
  float *k, *z;
  long long k_row, z_row;
};

// A softmax over rows so far: exponentials are relative to `most`.
struct Softmax {
  Floats most, sum, weighted;

  __device__ void add(const Floats& z, const Floats& k) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      const float next = fmaxf(most[c], z[c]);
      const float base = next == -CUDART_INF_F ? 0.0f : next;
      const float keep = expf(most[c] - base), p = expf(z[c] - base);
      most[c] = next;
      sum[c] = fmaf(sum[c], keep, p);
      weighted[c] = fmaf(weighted[c], keep, p * k[c]);
    }
  }
};

__device__ Softmax no_rows() {
  Softmax none;
#pragma unroll
  for (int c = 0; c < kChannels; ++c) none.most[c] = -CUDART_INF_F, none.sum[c] = none.weighted[c] = 0.0f;
  return none;
}

__device__ Floats operator+(Floats a, const Floats& b) {
#pragma unroll
  for (int c = 0; c < kChannels; ++c) a[c] += b[c];
  return a;
}

// To bf16 and back, of quantised forms.
__device__ Floats rounded(Floats x) {
#pragma unroll
  for (int c = 0; FORM >= kKv && c < kChannels; ++c) x[c] = __bfloat162float(__float2bfloat16_rn(x[c]));
  return x;
}

__device__ float sum_of_squares(const Floats& x) {
  __shared__ float sums[kWarps];
  float sum = 0.0f;
#pragma unroll
  for (int c = 0; c < kChannels; ++c) sum = fmaf(x[c], x[c], sum);
  sum = warp_sum(sum);
  if (kWarps == 1) return sum;
  if (lane_id() == 0) sums[warp_id()] = sum;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += sums[w];
  return total;
}

// The Hadamard rotation of 128 dims, 4 a lane.
__device__ Floats rotate(Floats x) {
  x = {x[0] + x[1], x[0] - x[1], x[2] + x[3], x[2] - x[3]};
  x = {x[0] + x[2], x[1] + x[3], x[0] - x[2], x[1] - x[3]};
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    const float sign = lane_id() & step ? -1.0f : 1.0f;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) x[c] = x[c] * sign + __shfl_xor_sync(kAllLanes, x[c], step);
  }
#pragma unroll
  for (int c = 0; c < kChannels; ++c) x[c] *= 0.08838834764831845f;  // 128^-0.5
  return x;
}

// The largest magnitude of LANES neighbouring lanes, by its bits.
template <int LANES>
__device__ unsigned amax_of(const Floats& x) {
  unsigned amax = 0u;
#pragma unroll
  for (int c = 0; c < kChannels; ++c) amax = max(amax, __float_as_uint(fabsf(x[c])));
#pragma unroll
  for (int step = 1; step < LANES; step *= 2) amax = max(amax, __shfl_xor_sync(kAllLanes, amax, step));
  return amax;
}

__device__ uchar4 to_e4m3(const Floats& x, float inverse) {
  uchar4 codes;
  codes.x = __nv_cvt_float_to_fp8(x[0] * inverse, __NV_SATFINITE, __NV_E4M3);
  codes.y = __nv_cvt_float_to_fp8(x[1] * inverse, __NV_SATFINITE, __NV_E4M3);
  codes.z = __nv_cvt_float_to_fp8(x[2] * inverse, __NV_SATFINITE, __NV_E4M3);
  codes.w = __nv_cvt_float_to_fp8(x[3] * inverse, __NV_SATFINITE, __NV_E4M3);
  return codes;
}

__device__ uint2 to_bf16(const Floats& x) {
  const __nv_bfloat162 low = __floats2bfloat162_rn(x[0], x[1]), high = __floats2bfloat162_rn(x[2], x[3]);
  return {reinterpret_cast<const unsigned&>(low), reinterpret_cast<const unsigned&>(high)};
}

// Store an entry to its place: `slot` of dense rows, or in a page: all data of its entries, then all scales.
__device__ void pack(char* out, long long stride, int page_size, int slot, bool kept, int channel, const Floats& x) {
  char* page = out + (FORM < kKv ? slot : slot / page_size) * stride;
  const int at = slot % page_size;
  if (FORM == kFp32) {
    if (kept) store(reinterpret_cast<float*>(page) + channel, x);
  } else if (FORM == kBf16) {
    if (kept) *reinterpret_cast<uint2*>(page + 2 * channel) = to_bf16(x);
  } else if (FORM == kKv) {  // 448 E4M3 and 64 bf16; a scale for 64 channels, the eighth is 0
    const unsigned scale = ue8m0(max(amax_of<16>(x), kE4m3Floor), kE4m3Max);
    char* data = page + at * 576;
    const bool rope = channel >= DIM - kRope;
    if (!kept) return;
    if (rope) *reinterpret_cast<uint2*>(data + 448 + 2 * (channel - 448)) = to_bf16(x);
    if (!rope) *reinterpret_cast<uchar4*>(data + channel) = to_e4m3(x, inverse_of(scale));
    if (channel % 64 == 0) page[page_size * 576 + at * 8 + channel / 64] = rope ? 0 : scale;
  } else if (FORM == kFp8) {  // 128 E4M3, the scale an fp32
    const unsigned scale = ue8m0(max(amax_of<32>(x), kE4m3Floor), kE4m3Max);
    if (!kept) return;
    *reinterpret_cast<uchar4*>(page + at * 128 + channel) = to_e4m3(x, inverse_of(scale));
    const float value = __uint_as_float(scale == 255u ? 0x7fc00000u : scale << 23);
    if (channel == 0) *reinterpret_cast<float*>(page + page_size * 128 + at * 4) = value;
  } else {  // 128 E2M1, two a byte; a scale for 32
    const unsigned scale = ue8m0(max(amax_of<8>(x), kE2m1Floor), kE2m1Max);
    const float inverse = inverse_of(scale);
    const float2 low = {x[0] * inverse, x[1] * inverse}, high = {x[2] * inverse, x[3] * inverse};
    const unsigned codes = __nv_cvt_float2_to_fp4x2(low, __NV_E2M1, cudaRoundNearest) |
                           __nv_cvt_float2_to_fp4x2(high, __NV_E2M1, cudaRoundNearest) << 8;
    if (!kept) return;
    *reinterpret_cast<unsigned short*>(page + at * 64 + channel / 2) = scale == 255u ? 0u : codes;
    if (channel % 32 == 0) page[page_size * 64 + at * 4 + channel / 32] = scale;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    compress(const float* kv, const float* gate, const float* ape, const float* norm, const float* cosines,
             const float* sines, const Request* requests, const int* slots, float* state_k, float* state_z, char* out,
             long long kv_stride, long long gate_stride, long long ape_stride, long long cos_stride,
             long long sin_stride, long long k_stride, long long z_stride, long long k_row, long long z_row,
             long long out_stride, int page_size, int entries, float eps) {
  constexpr int kHalves = 1 + OVERLAP, kPooled = RATE * kHalves;
  const int channel = threadIdx.x * kChannels;
  wait_for_predecessor();
  launch_successor();
  const Request request = requests[blockIdx.x];
  if (request.count <= 0 || request.start < 0 || request.place < 0) return;
  const int position = request.start, window = position / RATE;
  const bool closes = position % RATE == RATE - 1;
  const State state = {state_k + request.place * k_stride, state_z + request.place * z_stride, k_row, z_row};

  // The row of this step.
  Floats new_k[kHalves], new_z[kHalves];
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const int column = channel + half * DIM;
    new_k[half] = load(kv + request.row * kv_stride + column);
    new_z[half] = load(gate + request.row * gate_stride + column) + load(ape + position % RATE * ape_stride + column);
  }

  Softmax softmax = no_rows();
  if (RUNNING) {
    float* parts = state.k + channel;
    if (position % RATE != 0) softmax = {load(parts), load(parts + k_row), load(parts + 2 * k_row)};
    softmax.add(new_z[0], new_k[0]);
    if (!closes) {
      store(parts, softmax.most);
      store(parts + k_row, softmax.sum);
      store(parts + 2 * k_row, softmax.weighted);
    }
  } else {
    const int slot = position % ROWS;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      store(state.k + slot * state.k_row + channel + half * DIM, new_k[half]);
      store(state.z + slot * state.z_row + channel + half * DIM, new_z[half]);
    }
    if (closes) {
#pragma unroll 4
      for (int j = 0; j < kPooled - 1; ++j) {  // the last one is the new row
        const int old = (window + 1) * RATE - kPooled + j;
        if (old < 0) continue;
        const int ring = old % ROWS, column = channel + (OVERLAP && j >= RATE ? DIM : 0);
        softmax.add(load(state.z + ring * state.z_row + column), load(state.k + ring * state.k_row + column));
      }
      softmax.add(new_z[kHalves - 1], new_k[kHalves - 1]);
    }
  }
  if (!closes) return;

  Floats x;
#pragma unroll
  for (int c = 0; c < kChannels; ++c) x[c] = softmax.weighted[c] / softmax.sum[c];
  x = rounded(x);
  const float scale = rsqrtf(sum_of_squares(x) * (1.0f / DIM) + eps);
  const Floats factor = load(norm + channel);
#pragma unroll
  for (int c = 0; c < kChannels; ++c) x[c] = x[c] * scale * factor[c];
  x = rounded(x);
  const int pair = (channel - (DIM - kRope)) / 2;
  if (pair >= 0) {  // angles of the window's first position
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float cosine = cosines[window * cos_stride + pair + i], sine = sines[window * sin_stride + pair + i];
      const float even = x[2 * i], odd = x[2 * i + 1];
      x[2 * i] = even * cosine - odd * sine;
      x[2 * i + 1] = even * sine + odd * cosine;
    }
  }
  x = rounded(x);
  if (ROTATE) x = rounded(rotate(x));
  const int slot = slots[request.row];
  pack(out, out_stride, page_size, max(slot, 0), slot >= 0 && slot < entries, channel, x);
}
