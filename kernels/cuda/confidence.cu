// How sure a model is: normalised entropy, log-probability margin and top mass of rows of logits.
// One thread block a row, one pass over it; each thread has kAhead accesses on their way. SOURCE_T:
// float, Half or Bf16; BYTES is the widest access that the rows' alignment allows.
#include "common.cuh"

constexpr int kAhead = 4;
constexpr int kEach = BYTES / static_cast<int>(sizeof(SOURCE_T));

// What is known of some of a row's logits.
struct Seen {
  float first, second;    // the two largest
  float total, weighted;  // Σ e^(x - first), and the same times (x - first)

  __device__ void raise(float top, float next) {
    float lower = top < first ? top : first;  // of the two firsts
    float higher = top > first ? top : first;
    second = second > next ? second : next;
    second = second > lower ? second : lower;
    if (total > 0.0f) {
      float down = first - higher, share = expf(down);
      weighted = share > 0.0f ? (weighted + down * total) * share : 0.0f;
      total *= share;
    }
    first = higher;
  }
  template <int Count>
  __device__ void add(const float (&logits)[Count]) {
    float top = -INFINITY, next = -INFINITY;
    for (int i = 0; i < Count; ++i) {
      float lower = logits[i] < top ? logits[i] : top;
      top = logits[i] > top ? logits[i] : top;
      next = lower > next ? lower : next;
    }
    raise(top, next);
    if (first == -INFINITY) return;
    for (int i = 0; i < Count; ++i) {
      float below = logits[i] - first, share = expf(below);
      total += share;
      weighted += share > 0.0f ? share * below : 0.0f;
    }
  }
  __device__ void merge(Seen other) {
    raise(other.first, other.second);
    other.raise(first, -INFINITY);
    total += other.total;
    weighted += other.weighted;
  }
};

// logits: [rows, stride], of which `vocabulary` count; out: [rows, 3].
extern "C" __global__ void __launch_bounds__(MOST_THREADS)
    confidence(const SOURCE_T* logits, i64 stride, i64 vocabulary, float* out) {
  SHARED_BYTES(shared);  // a Seen a thread
  Seen* seen = reinterpret_cast<Seen*>(shared);
  const SOURCE_T* row = logits + blockIdx.x * stride;
  const int threads = blockDim.x, me = threadIdx.x;
  const i64 whole = vocabulary / kEach * kEach;

  Seen mine{-INFINITY, -INFINITY, 0.0f, 0.0f};
  for (i64 at = static_cast<i64>(me) * kEach; at < whole; at += threads * kAhead * kEach) {
    Words<BYTES> packed[kAhead];
    for (int a = 0; a < kAhead; ++a) {
      i64 next = at + static_cast<i64>(a) * threads * kEach;
      packed[a] = *reinterpret_cast<const Words<BYTES>*>(row + (next < whole ? next : at));
    }
    for (int a = 0; a < kAhead; ++a) {
      float values[kEach];
      unpack<SOURCE_T>(packed[a], values);
      if (at + static_cast<i64>(a) * threads * kEach < whole) mine.add(values);
    }
  }
  for (i64 at = whole + me; at < vocabulary; at += threads) {
    float value[1] = {widen(row[at])};
    mine.add(value);
  }
  seen[me] = mine;
  __syncthreads();
  for (int half = threads / 2; half; half /= 2) {
    if (me < half) seen[me].merge(seen[me + half]);
    __syncthreads();
  }
  if (me == 0) {
    Seen all = seen[0];
    out[3 * blockIdx.x] =
        (logf(all.total) - all.weighted / all.total) / logf(static_cast<float>(vocabulary));
    out[3 * blockIdx.x + 1] = all.first - all.second;
    out[3 * blockIdx.x + 2] = 1.0f / all.total;
  }
}
HOST_ENTRY(confidence)
