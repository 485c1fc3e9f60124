// The exact top-k of rows of fp32 scores, a CTA a row:
//
//     picks = indices of the k best of the first `length` scores, then -1; ascending, or the best first if BY_SCORE
//
// Higher scores first (0 is -0), of equal ones the lower index, NaN after -inf. Radix select: a float becomes an
// unsigned key of the same order, and four histograms of 8 bits, the highest first, find the key of the k-th best. A
// fifth pass takes what is above it, and of what is equal as many as are missing, in the order of the indices.
// A row is read five times, from the L2 cache after the first.
#include "dsv4.cuh"

constexpr int kWarps = THREADS / kLanes;
constexpr int kDigitBits = 8, kBins = 1 << kDigitBits, kBinsPerLane = kBins / kLanes;

struct Count {
  int above, equal;
};

// Sum of the values of lower lanes.
__device__ int sum_before(int value) {
  int sum = value;
#pragma unroll
  for (int offset = 1; offset < kLanes; offset *= 2) {
    const int other = __shfl_up_sync(kAllLanes, sum, offset);
    if (lane_id() >= offset) sum += other;
  }
  return sum - value;
}

// The digit of the `missing`-th best key of a histogram, and how many of its bin are missing. By one warp; a lane owns
// kBinsPerLane bins, lane 0 the best ones.
__device__ void find_bin(const int* histogram, int missing, int* digit, int* missing_of_bin) {
  const int best = kBins - 1 - kBinsPerLane * lane_id();
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kBinsPerLane; ++i) sum += histogram[best - i];
  int before = sum_before(sum);
  if (before >= missing || before + sum < missing) return;
  int bin = best;
  while (before + histogram[bin] < missing) before += histogram[bin--];
  *digit = bin;
  *missing_of_bin = missing - before;
}

// The counts of all threads before this one, and the CTA's in `total`.
__device__ Count count_before(bool above, bool equal, Count* total) {
  __shared__ Count warps[kWarps];
  const unsigned lower = (1u << lane_id()) - 1;
  const unsigned all_above = __ballot_sync(kAllLanes, above), all_equal = __ballot_sync(kAllLanes, equal);
  if (lane_id() == 0) warps[warp_id()] = {__popc(all_above), __popc(all_equal)};
  __syncthreads();  // counts of all warps are there
  Count before = {__popc(all_above & lower), __popc(all_equal & lower)};
  *total = {0, 0};
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp_id()) before = {before.above + warps[w].above, before.equal + warps[w].equal};
    *total = {total->above + warps[w].above, total->equal + warps[w].equal};
  }
  __syncthreads();
  return before;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    topk(const float* scores, const int* lengths, int* picks, const int* table, const int* requests,
         long long scores_stride, long long picks_stride, long long table_stride, int size, int k, int table_width) {
  __shared__ int histogram[kBins], digit, missing_of_bin;
  __shared__ unsigned picked_key[BY_SCORE ? MAX_K : 1];
  __shared__ int picked_index[BY_SCORE ? MAX_K : 1];
  const long long row = blockIdx.x;
  scores += row * scores_stride;
  picks += row * picks_stride;
  wait_for_predecessor();
  launch_successor();
  const int length = lengths ? max(0, min(lengths[row], size)) : size;
  const int count = min(k, length);

  // The key of the last pick: bits that are known so far, and how many picks share them.
  unsigned last = 0, known = 0;
  int missing = count;
  for (int shift = 32 - kDigitBits; shift >= 0 && count; shift -= kDigitBits) {
    for (int bin = threadIdx.x; bin < kBins; bin += THREADS) histogram[bin] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < length; i += THREADS) {
      const unsigned key = sort_key(scores[i]);
      if ((key & known) == last) atomicAdd(&histogram[key >> shift & (kBins - 1)], 1);
    }
    __syncthreads();
    if (warp_id() == 0) find_bin(histogram, missing, &digit, &missing_of_bin);
    __syncthreads();
    last |= static_cast<unsigned>(digit) << shift;
    known |= (kBins - 1u) << shift;
    missing = missing_of_bin;
  }

  const int request = PAGE ? requests[row] : 0;
  auto put = [&](int place, int index) {  // a pick, or what stands for it in its pages
    if (PAGE && index >= 0) {
      const int column = index / PAGE;
      const int page = request >= 0 && column < table_width ? table[request * table_stride + column] : -1;
      index = page < 0 ? -1 : page * PAGE + index % PAGE;
    }
    picks[place] = index;
  };

  Count done = {0, 0};
  for (int first = 0; first < length && count; first += THREADS) {
    const int i = first + threadIdx.x;
    const unsigned key = i < length ? sort_key(scores[i]) : 0u;
    const bool above = i < length && key > last, equal = i < length && key == last;
    Count total;
    const Count before = count_before(above, equal, &total);
    const int ties = done.equal + before.equal;
    if (above || (equal && ties < missing)) {
      const int place = done.above + before.above + min(ties, missing);
      if (BY_SCORE) {
        picked_key[place] = key;
        picked_index[place] = i;
      } else {
        put(place, i);
      }
    }
    done = {done.above + total.above, done.equal + total.equal};
  }
  for (int place = count + threadIdx.x; place < k; place += THREADS) picks[place] = -1;
  if (!BY_SCORE) return;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += THREADS) {
    int rank = 0;
    for (int j = 0; j < count; ++j) rank += picked_key[j] > picked_key[i] || (picked_key[j] == picked_key[i] && j < i);
    put(rank, picked_index[i]);
  }
}
