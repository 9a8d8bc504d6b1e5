// How sure a model is: normalised entropy, log-probability margin and top mass of rows of logits.
// One thread block a row, two passes over it. SOURCE_T: float, Half or Bf16.
#include "common.cuh"

__device__ void keep_two(float x, float& first, float& second) {
  if (x > first) {
    second = first;
    first = x;
  } else if (x > second) {
    second = x;
  }
}

// logits: [rows, stride], of which `vocabulary` count; out: [rows, 3].
extern "C" __global__ void __launch_bounds__(MOST_THREADS)
    confidence(const SOURCE_T* logits, i64 stride, i64 vocabulary, float* out) {
  SHARED_BYTES(shared);  // two floats a thread
  float* pairs = reinterpret_cast<float*>(shared);
  const SOURCE_T* row = logits + blockIdx.x * stride;
  const int threads = blockDim.x, me = threadIdx.x;

  float first = -INFINITY, second = -INFINITY;
  for (i64 i = me; i < vocabulary; i += threads) keep_two(widen(row[i]), first, second);
  pairs[2 * me] = first, pairs[2 * me + 1] = second;
  __syncthreads();
  for (int half = threads / 2; half; half /= 2) {
    if (me < half) {
      keep_two(pairs[2 * (me + half)], pairs[2 * me], pairs[2 * me + 1]);
      keep_two(pairs[2 * (me + half) + 1], pairs[2 * me], pairs[2 * me + 1]);
    }
    __syncthreads();
  }
  first = pairs[0], second = pairs[1];
  __syncthreads();

  float total = 0.0f, weighted = 0.0f;  // Σ e^(x - first), and the same times (x - first)
  for (i64 i = me; i < vocabulary; i += threads) {
    float below = widen(row[i]) - first, share = expf(below);
    total += share;
    weighted += share > 0.0f ? share * below : 0.0f;
  }
  pairs[2 * me] = total, pairs[2 * me + 1] = weighted;
  __syncthreads();
  for (int half = threads / 2; half; half /= 2) {
    if (me < half) {
      pairs[2 * me] += pairs[2 * (me + half)];
      pairs[2 * me + 1] += pairs[2 * (me + half) + 1];
    }
    __syncthreads();
  }
  if (me == 0) {
    total = pairs[0];
    out[3 * blockIdx.x] = (logf(total) - pairs[1] / total) / logf(static_cast<float>(vocabulary));
    out[3 * blockIdx.x + 1] = first - second;
    out[3 * blockIdx.x + 2] = 1.0f / total;
  }
}
HOST_ENTRY(confidence)
