// Share of one layer's attention that each block of a sequence gets. One thread block per (sample,
// query head); a warp takes one KV block at a time. SOURCE_T: float, Half, Bf16 or Int8.
#include "common.cuh"

__device__ float dot(const float* query, const char* cell, const Layout& layout, int lane) {
  const SOURCE_T* key = reinterpret_cast<const SOURCE_T*>(cell);
  float sum = 0.0f;
  for (int d = lane; d < layout.key_dims; d += kWarp) sum += query[d] * widen(key[d]);
  sum = warp_sum(sum);
  return kSame<SOURCE_T, Int8> ? sum * *reinterpret_cast<const float*>(cell + layout.key_scale)
                               : sum;
}

// queries: [samples, query heads, dims]; table: [samples, width]; lengths: [samples];
// mass, peaks: [samples, query heads, width], the second is scratch.
extern "C" __global__ void __launch_bounds__(MOST_THREADS)
    attention_mass(const char* memory, const Layout* paged, i64 layer, const float* queries,
                   const i64* table, const i64* lengths, float scale, i64 query_heads, i64 width,
                   float* mass, float* peaks) {
  SHARED_BYTES(shared);  // one float a warp
  float* per_warp = reinterpret_cast<float*>(shared);
  const Layout layout = *paged;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const i64 sample = blockIdx.x / query_heads, head = blockIdx.x % query_heads;
  const i64 kv_head = head / (query_heads / layout.heads);
  const float* query = queries + blockIdx.x * layout.key_dims;
  const i64 row = blockIdx.x * width, length = lengths[sample];
  const i64 blocks = (length + layout.tokens - 1) / layout.tokens;

  float peak = -INFINITY;
  for (i64 block = warp; block < width; block += warps) {
    float top = -INFINITY, sum = 0.0f;
    for (i64 n = 0; n < layout.tokens && block * layout.tokens + n < length; ++n) {
      i64 slot = table[sample * width + block] * layout.tokens + n;
      float logit = dot(query, memory + layout.cell(layer, slot, kv_head), layout, lane) * scale;
      float higher = logit > top ? logit : top;
      sum = sum * expf(top - higher) + expf(logit - higher);
      top = higher;
    }
    peak = top > peak ? top : peak;
    if (lane == 0) mass[row + block] = sum, peaks[row + block] = top;
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
