// Share of one layer's attention that each block of a sequence gets. One thread block per (sample,
// query head); a warp takes one KV block at a time, and has all keys of kAhead rounds on their way
// before it uses the first. SOURCE_T: float, Half, Bf16 or Int8; BYTES is the widest access that
// keys allow, VECTORS how many of those a key has.
#include "common.cuh"

__device__ constexpr int group_of(int vectors) {
  int lanes = 1;
  while (lanes < vectors && lanes < kWarp) lanes *= 2;
  return lanes;
}
constexpr int kEach = BYTES / static_cast<int>(sizeof(SOURCE_T));
constexpr int kGroup = group_of(VECTORS);               // lanes that share a key
constexpr int kHeld = (VECTORS + kGroup - 1) / kGroup;  // accesses of a lane per key
constexpr int kKeys = kWarp / kGroup;                   // keys of a round
constexpr int kAhead = kHeld < 8 ? 8 / kHeld : 1;       // rounds on their way

// A maximum and Σ e^(x - top), of some logits.
struct Peak {
  float top, sum;

  __device__ void add(float other_top, float other_sum) {
    float higher = other_top > top ? other_top : top;
    if (higher == -INFINITY) return;
    sum = sum * expf(top - higher) + other_sum * expf(other_top - higher);
    top = higher;
  }
};

// This lane's part of a query, in registers.
struct Query {
  float values[kHeld][kEach];

  __device__ Query(const float* query, int lane) {
    for (int h = 0; h < kHeld; ++h) {
      int vector = h * kGroup + lane % kGroup;
      for (int i = 0; i < kEach; ++i)
        values[h][i] = vector < VECTORS ? query[vector * kEach + i] : 0.0f;
    }
  }
  __device__ float dot(const Words<BYTES> (&key)[kHeld]) const {
    float sum = 0.0f;
    for (int h = 0; h < kHeld; ++h) {
      float part[kEach];
      unpack<SOURCE_T>(key[h], part);
      for (int i = 0; i < kEach; ++i) sum += values[h][i] * part[i];
    }
    for (int mask = kGroup / 2; mask; mask /= 2) sum += shuffle_xor(sum, mask);
    return sum;
  }
};

// Some keys of a block on their way to registers.
struct Keys {
  Words<BYTES> words[kAhead][kHeld];
  float scales[kAhead];

  __device__ void fetch(const char* keys, i64 token_stride, i64 scale_at, int from, int end,
                        int lane) {
    for (int a = 0; a < kAhead; ++a) {
      int token = from + a * kKeys + lane / kGroup;
      const char* key = keys + (token < end ? token : from) * token_stride;
      for (int h = 0; h < kHeld; ++h) {
        int vector = h * kGroup + lane % kGroup;  // beyond the last, the query is 0
        words[a][h] =
            reinterpret_cast<const Words<BYTES>*>(key)[vector < VECTORS ? vector : 0];
      }
      scales[a] = kSame<SOURCE_T, Int8> ? *reinterpret_cast<const float*>(key + scale_at) : 1.0f;
    }
  }
};

// queries: [samples, query heads, dims]; table: [samples, width]; lengths: [samples];
// mass, peaks: [samples, query heads, width], the second is scratch.
extern "C" __global__ void __launch_bounds__(MOST_THREADS, 1)
    attention_mass(const char* memory, const Layout* paged, i64 layer, const float* queries,
                   const i64* table, const i64* lengths, float scale, i64 query_heads, i64 width,
                   float* mass, float* peaks) {
  SHARED_BYTES(shared);  // one float a warp
  float* per_warp = reinterpret_cast<float*>(shared);
  const Layout layout = *paged;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const i64 sample = blockIdx.x / query_heads, head = blockIdx.x % query_heads;
  const i64 kv_head = head / (query_heads / layout.heads);
  const char* heads = memory + layer * layout.layer_stride + kv_head * layout.head_stride;
  const Query query(queries + blockIdx.x * layout.key_dims, lane);
  const i64 row = blockIdx.x * width, length = lengths[sample];
  const i64 blocks = (length + layout.tokens - 1) / layout.tokens;

  float peak = -INFINITY;
  for (i64 block = warp; block < blocks && block < width; block += warps) {
    const i64 left = length - block * layout.tokens;
    const int end = static_cast<int>(left < layout.tokens ? left : layout.tokens);
    const char* keys = heads + table[sample * width + block] * layout.block_stride;
    Peak found{-INFINITY, 0.0f};
    for (int from = 0; from < end; from += kAhead * kKeys) {
      Keys ahead;
      ahead.fetch(keys, layout.token_stride, layout.key_scale, from, end, lane);
      for (int a = 0; a < kAhead; ++a) {
        float logit = query.dot(ahead.words[a]) * ahead.scales[a] * scale;
        if (from + a * kKeys + lane / kGroup < end) found.add(logit, 1.0f);
      }
    }
    for (int mask = kGroup; mask < kWarp; mask *= 2) {
      float other_top = shuffle_xor(found.top, mask), other_sum = shuffle_xor(found.sum, mask);
      found.add(other_top, other_sum);
    }
    peak = found.top > peak ? found.top : peak;
    if (lane == 0) mass[row + block] = found.sum, peaks[row + block] = found.top;
  }
  if (lane == 0) per_warp[warp] = peak;
  __syncthreads();
  for (int w = 0; w < warps; ++w) peak = per_warp[w] > peak ? per_warp[w] : peak;
  __syncthreads();
  float total = 0.0f;
  for (i64 block = threadIdx.x; block < blocks; block += blockDim.x)
    total += mass[row + block] * expf(peaks[row + block] - peak);
  total = warp_sum(total);
  if (lane == 0) per_warp[warp] = total;
  __syncthreads();
  total = 0.0f;
  for (int w = 0; w < warps; ++w) total += per_warp[w];
  for (i64 block = threadIdx.x; block < width; block += blockDim.x)
    mass[row + block] =
        block < blocks ? mass[row + block] * expf(peaks[row + block] - peak) / total : 0.0f;
}
HOST_ENTRY(attention_mass)
