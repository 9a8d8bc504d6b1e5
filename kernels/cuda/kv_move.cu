// Moves tokens between two paged memories in one pass: read (host memory included) through a ring
// in shared memory, dequantise, rotate K in fp32, quantise or round, store.
//
// A warp takes one cell (layer, token, head) at a time; while it works on one, the next STAGES - 1
// are on their way, so that few thread blocks keep the bus full. Chosen at compile time: SOURCE_T,
// TARGET_T (float, Half, Bf16, Int8), SOURCE_BYTES, TARGET_BYTES (4, 8, 16), the widest access that
// the alignment allows, and STAGES.
#include "common.cuh"

constexpr int kStages = STAGES;

struct Rope {
  const float *cos, *sin;  // one row: [pairs]
  int start, pairs, neox;
};

// One row of K or V in shared memory; at(d) is its d-th value, dequantised and rotated.
struct Row {
  const SOURCE_T* values;
  float scale;
  Rope rope;  // cos == nullptr: not rotated

  __device__ float raw(int d) const {
    float x = widen(values[d]);
    return kSame<SOURCE_T, Int8> ? x * scale : x;
  }
  __device__ float at(int d) const {
    int r = d - rope.start;
    if (!rope.cos || r < 0 || r >= 2 * rope.pairs) return raw(d);
    bool first = rope.neox ? r < rope.pairs : r % 2 == 0;
    int pair = rope.neox ? (first ? r : r - rope.pairs) : r / 2;
    int step = rope.neox ? rope.pairs : 1;
    float x = raw(d), y = raw(first ? d + step : d - step);
    return first ? x * rope.cos[pair] - y * rope.sin[pair]
                 : x * rope.cos[pair] + y * rope.sin[pair];
  }
};

template <int Bytes>
struct alignas(Bytes) Words {
  char bytes[Bytes];
};

__device__ void copy_bytes(const char* from, char* to, i64 size, int lane) {
  using Word = Words<(SOURCE_BYTES < TARGET_BYTES ? SOURCE_BYTES : TARGET_BYTES)>;
  for (i64 at = lane * static_cast<int>(sizeof(Word)); at < size; at += kWarp * sizeof(Word))
    *reinterpret_cast<Word*>(to + at) = *reinterpret_cast<const Word*>(from + at);
}

__device__ void store_row(const Row& row, char* to, int dims, i64 scale_at, int lane) {
  constexpr int kEach = TARGET_BYTES / sizeof(TARGET_T);
  float factor = 1.0f;
  if (kSame<TARGET_T, Int8>) {
    float most = 0.0f;
    for (int d = lane; d < dims; d += kWarp) {
      float x = row.at(d);
      x = x < 0 ? -x : x;
      most = x > most ? x : most;
    }
    float scale = warp_max(most) / 127.0f;
    scale = scale > 1e-6f ? scale : 1e-6f;
    factor = 1.0f / scale;
    if (lane == 0) *reinterpret_cast<float*>(to + scale_at) = scale;
  }
  for (int d = lane * kEach; d < dims; d += kWarp * kEach) {
    union {
      Words<TARGET_BYTES> words;
      TARGET_T values[kEach];
    } out;
    for (int i = 0; i < kEach; ++i) {
      float x = row.at(d + i);
      narrow(kSame<TARGET_T, Int8> ? x * factor : x, out.values[i]);
    }
    *reinterpret_cast<Words<TARGET_BYTES>*>(to + d * sizeof(TARGET_T)) = out.words;
  }
}

__device__ float scale_of(const char* cell, i64 at) {
  return kSame<SOURCE_T, Int8> ? *reinterpret_cast<const float*>(cell + at) : 1.0f;
}

// `cell` is in shared memory, `to` in global.
__device__ void move_cell(const char* cell, const Layout& from, char* to, const Layout& into,
                          const Rope& rope, bool keys_only, int lane) {
  bool alike = kSame<SOURCE_T, TARGET_T>;
  if (alike && !rope.cos) {
    if (!keys_only) copy_bytes(cell, to, from.cell_bytes, lane);
    return;
  }
  Row key{reinterpret_cast<const SOURCE_T*>(cell), scale_of(cell, from.key_scale), rope};
  store_row(key, to, static_cast<int>(from.key_dims), into.key_scale, lane);
  if (keys_only || !from.value_dims) return;
  const char* value = cell + from.value_base;
  if (alike) {
    copy_bytes(value, to + into.value_base, from.cell_bytes - from.value_base, lane);
    return;
  }
  Row row{reinterpret_cast<const SOURCE_T*>(value), scale_of(cell, from.value_scale),
          Rope{nullptr, nullptr, 0, 0, 0}};
  store_row(row, to + into.value_base, static_cast<int>(from.value_dims),
            into.value_scale - into.value_base, lane);
}

// source_slots, target_slots: [tokens], a negative one skips the pair; rows: [tokens], a row of
// cos and sin [*, pairs], negative for a move by nothing. Shared memory: warps × kStages × slot_bytes.
extern "C" __global__ void __launch_bounds__(MOST_THREADS, 1)
    kv_move(const char* source, char* target, const Layout* source_layout,
            const Layout* target_layout, const i64* source_slots, const i64* target_slots,
            const i64* rows, const float* cos, const float* sin, i64 tokens, i64 start, i64 pairs,
            i64 neox, i64 keys_only, i64 slot_bytes) {
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
      i64 turn = rows[token];
      Rope rope{turn < 0 ? nullptr : cos + turn * pairs, turn < 0 ? nullptr : sin + turn * pairs,
                static_cast<int>(start), static_cast<int>(pairs), static_cast<int>(neox)};
      char* to = target + into.cell(row / count, static_cast<unsigned>(target_slots[token]),
                                    cell - row * heads);
      move_cell(ring.slot(step), from, to, into, rope, keys_only, lane);
    }
    warp_barrier();  // nobody reads this slot any more: the next fetch may fill it
  }
  copy_wait<0>();
}
HOST_ENTRY(kv_move)
