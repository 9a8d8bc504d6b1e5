// Moves tokens between two paged memories in one pass: read (host memory included) through a ring
// in shared memory, dequantise, rotate K in fp32, quantise or round, store.
//
// A warp takes one cell (layer, token, head) at a time; while it works on one, the next STAGES - 1
// are on their way, so that few thread blocks keep the bus full. Chosen at compile time: SOURCE_T,
// TARGET_T (float, Half, Bf16, Int8); SOURCE_BYTES, TARGET_BYTES (4, 8, 16), the widest access that
// the alignment allows; EACH, the values that a lane reads or writes at once; of a rotated row
// TURN_EACH, likewise, PAIRS_EACH, the pairs that a lane turns at once, and TURNS, how often a warp
// does so for one row; STAGES.
#include "common.cuh"

constexpr int kStages = STAGES;
constexpr int kEach = EACH;
constexpr int kTurnEach = TURN_EACH;
constexpr int kPairs = PAIRS_EACH;
constexpr int kTurns = TURNS;

// The rotation of a row. A lane's cosines and sines stay in registers from cell to cell, as long as
// these move by the same Δ.
struct Turn {
  int start, pairs;
  bool neox;
  i64 row;  // of the tables, whose values these are; -1: of none yet
  float cos[kTurns][kPairs], sin[kTurns][kPairs];

  __device__ __forceinline__ int pair(int turn, int lane) const {
    return (turn * kWarp + lane) * kPairs;
  }
  __device__ __forceinline__ void take(i64 wanted, const float* all_cos, const float* all_sin,
                                       int lane) {
    if (wanted == row) return;
    row = wanted;
    for (int t = 0; t < kTurns; ++t) {
      if (pair(t, lane) >= pairs) continue;
      const i64 at = row * pairs + pair(t, lane);
      read_values<(kPairs < 4 ? kPairs * 4 : 16)>(all_cos + at, cos[t]);
      read_values<(kPairs < 4 ? kPairs * 4 : 16)>(all_sin + at, sin[t]);
    }
  }
  __device__ __forceinline__ void apply(int turn, int i, float& first, float& second) const {
    float x = first, y = second;
    first = x * cos[turn][i] - y * sin[turn][i];
    second = y * cos[turn][i] + x * sin[turn][i];
  }
};

// One row of K or V in shared memory.
struct Row {
  const SOURCE_T* values;
  float scale;

  template <int Each, int Count>
  __device__ __forceinline__ void read(int d, float (&out)[Count]) const {
    read_values<Each * static_cast<int>(sizeof(SOURCE_T))>(values + d, out);
    if (kSame<SOURCE_T, Int8>)
      for (int i = 0; i < Count; ++i) out[i] *= scale;
  }
  // Calls `use` with a lane's values outside of [from, end), `Each` at a time.
  template <int Each, typename Use>
  __device__ __forceinline__ void plain(int dims, int from, int end, int lane, Use& use) const {
    for (int d = lane * Each; d < dims; d += kWarp * Each) {
      if (d >= from && d < end) continue;
      float out[Each];
      read<Each>(d, out);
      use(d, out);
    }
  }
  // Calls `use` with a lane's rotated values.
  template <typename Use>
  __device__ __forceinline__ void turned(const Turn& turn, int lane, Use& use) const {
    for (int t = 0; t < kTurns; ++t) {
      const int pair = turn.pair(t, lane);
      if (pair >= turn.pairs) continue;
      if (turn.neox) {
        float first[kPairs], second[kPairs];
        read<kTurnEach>(turn.start + pair, first);
        read<kTurnEach>(turn.start + turn.pairs + pair, second);
        for (int i = 0; i < kPairs; ++i) turn.apply(t, i, first[i], second[i]);
        use(turn.start + pair, first);
        use(turn.start + turn.pairs + pair, second);
      } else {
        float both[2 * kPairs];
        read<kTurnEach>(turn.start + 2 * pair, both);
        for (int i = 0; i < kPairs; ++i) turn.apply(t, i, both[2 * i], both[2 * i + 1]);
        use(turn.start + 2 * pair, both);
      }
    }
  }
  // Calls `use` with all of a lane's values, rotated or as they are.
  template <typename Use>
  __device__ __forceinline__ void all(bool rotated, const Turn& turn, int dims, int lane,
                                      Use& use) const {
    if (!rotated) {
      plain<kEach>(dims, 0, 0, lane, use);
      return;
    }
    turned(turn, lane, use);
    plain<kTurnEach>(dims, turn.start, turn.start + 2 * turn.pairs, lane, use);
  }
};

__device__ __forceinline__ void copy_bytes(const char* from, char* to, i64 size, int lane) {
  using Word = Words<(SOURCE_BYTES < TARGET_BYTES ? SOURCE_BYTES : TARGET_BYTES)>;
  for (i64 at = lane * static_cast<int>(sizeof(Word)); at < size; at += kWarp * sizeof(Word))
    *reinterpret_cast<Word*>(to + at) = *reinterpret_cast<const Word*>(from + at);
}

// The largest magnitude of the values that it is called with.
struct Most {
  float value;

  template <int Count>
  __device__ __forceinline__ void operator()(int, float (&values)[Count]) {
    for (int i = 0; i < Count; ++i) {
      float x = values[i] < 0 ? -values[i] : values[i];
      value = x > value ? x : value;
    }
  }
};

// Stores what it is called with, quantised or rounded.
struct Store {
  TARGET_T* to;
  float factor;
  bool rotated;

  template <int Count>
  __device__ __forceinline__ void operator()(int d, float (&values)[Count]) {
    if (kSame<TARGET_T, Int8>)
      for (int i = 0; i < Count; ++i) values[i] *= factor;
    constexpr int kSize = static_cast<int>(sizeof(TARGET_T));
    if (rotated)
      write_values<kTurnEach * kSize>(values, to + d);
    else
      write_values<kEach * kSize>(values, to + d);
  }
};

__device__ __forceinline__ void store_row(const Row& row, bool rotated, const Turn& turn, char* to,
                                         int dims, i64 scale_at, int lane) {
  float factor = 1.0f;
  if (kSame<TARGET_T, Int8>) {
    Most most{0.0f};
    row.all(rotated, turn, dims, lane, most);
    float scale = warp_max(most.value) / 127.0f;
    scale = scale > 1e-6f ? scale : 1e-6f;
    factor = 1.0f / scale;
    if (lane == 0) *reinterpret_cast<float*>(to + scale_at) = scale;
  }
  Store store{reinterpret_cast<TARGET_T*>(to), factor, rotated};
  row.all(rotated, turn, dims, lane, store);
}

__device__ __forceinline__ float scale_of(const char* cell, i64 at) {
  return kSame<SOURCE_T, Int8> ? *reinterpret_cast<const float*>(cell + at) : 1.0f;
}

// `cell` is in shared memory, `to` in global.
__device__ __forceinline__ void move_cell(const char* cell, const Layout& from, char* to,
                                          const Layout& into, bool rotated, const Turn& turn,
                                          int lane) {
  constexpr bool kAlike = kSame<SOURCE_T, TARGET_T>;
  if (kAlike && !rotated) {
    copy_bytes(cell, to, from.cell_bytes, lane);
    return;
  }
  Row key{reinterpret_cast<const SOURCE_T*>(cell), scale_of(cell, from.key_scale)};
  store_row(key, rotated, turn, to, static_cast<int>(from.key_dims), into.key_scale, lane);
  if (!from.value_dims) return;
  const char* value = cell + from.value_base;
  if (kAlike) {
    copy_bytes(value, to + into.value_base, from.cell_bytes - from.value_base, lane);
    return;
  }
  Row row{reinterpret_cast<const SOURCE_T*>(value), scale_of(cell, from.value_scale)};
  store_row(row, false, turn, to + into.value_base, static_cast<int>(from.value_dims),
            into.value_scale - into.value_base, lane);
}

// source_slots, target_slots: [tokens], a negative one skips the pair; rows: [tokens], a row of
// cos and sin [*, pairs], negative for a move by nothing. Shared memory: warps × kStages × slot_bytes.
extern "C" __global__ void __launch_bounds__(MOST_THREADS, 1)
    splice_tokens(const char* source, char* target, const Layout* source_layout,
            const Layout* target_layout, const i64* source_slots, const i64* target_slots,
            const i64* rows, const float* cos, const float* sin, i64 tokens, i64 start, i64 pairs,
            i64 neox, i64 slot_bytes) {
  SHARED_BYTES(shared);
  const Layout from = *source_layout, into = *target_layout;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  // Counts and slots fit 32 bits, the host sees to it.
  const unsigned warps = gridDim.x * (blockDim.x / kWarp);
  const unsigned me = blockIdx.x * (blockDim.x / kWarp) + warp;
  const unsigned heads = static_cast<unsigned>(from.heads), count = static_cast<unsigned>(tokens);
  const unsigned cells = static_cast<unsigned>(from.layers) * count * heads;
  const Ring<kStages, SOURCE_BYTES> ring{shared + warp * kStages * slot_bytes,
                                         static_cast<int>(slot_bytes)};
  Turn turn;
  turn.start = static_cast<int>(start), turn.pairs = static_cast<int>(pairs);
  turn.neox = neox != 0, turn.row = -1;
  auto skipped = [&](unsigned token) { return source_slots[token] < 0 || target_slots[token] < 0; };
  auto fetch = [&](unsigned step) {
    unsigned cell = me + step * warps, row = cell / heads, token = row % count;
    if (cell < cells && !skipped(token))
      ring.fetch(step,
                 source + from.cell(row / count, static_cast<unsigned>(source_slots[token]),
                                    cell - row * heads),
                 static_cast<int>(from.cell_bytes), lane);
    copy_commit();  // an empty group too: steps and groups must count alike
  };
  for (unsigned step = 0; step < kStages - 1; ++step) fetch(step);
  for (unsigned step = 0; me + step * warps < cells; ++step) {
    fetch(step + kStages - 1);
    copy_wait<kStages - 1>();
    warp_barrier();  // every lane's part of this cell has arrived
    unsigned cell = me + step * warps, row = cell / heads, token = row % count;
    if (!skipped(token)) {
      const i64 by = rows[token];
      if (by >= 0) turn.take(by, cos, sin, lane);
      char* to = target + into.cell(row / count, static_cast<unsigned>(target_slots[token]),
                                    cell - row * heads);
      move_cell(ring.slot(step), from, to, into, by >= 0, turn, lane);
    }
    warp_barrier();  // nobody reads this slot any more: the next fetch may fill it
  }
  copy_wait<0>();
}
HOST_ENTRY(splice_tokens)
