// Moves KV bytes between a CPU engine's paged cache and the host arena; compiled at first use.
// The arithmetic is that of reference.py, operation by operation: no fused multiply-adds
// (-ffp-contract=off), so that both give the same bits.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <type_traits>
#include <vector>

using i64 = int64_t;

// Mirrors layout.Plane; offsets in elements. scale < 0: there is none.
struct Plane {
  i64 base, dims, token_outer, token_inner, token_tile, dim_outer, dim_inner, dim_tile, scale;
  i64 token(i64 n) const { return n / token_tile * token_outer + n % token_tile * token_inner; }
  i64 dim(i64 d) const { return d / dim_tile * dim_outer + d % dim_tile * dim_inner; }
  bool dims_adjoin() const { return dim_tile == 1 && dim_outer == 1; }
  bool tokens_adjoin() const { return token_tile == 1 && token_outer == 1; }
};

// Mirrors layout.KvLayout.
struct Layout {
  i64 layers, heads, tokens, layer_stride, block_stride, head_stride;
  Plane key, value;
};

// Consecutive tokens within one block on both sides, all moved by the same Δ (row < 0: by none).
struct Run {
  i64 source, target, length, row;
};

struct Rope {
  const float *cos, *sin;  // [rows, pairs]
  i64 start, pairs, neox;
};

// Types: 0 float32, 1 float16, 2 bfloat16, 3 int8.
struct MoveArgs {
  const void* source;
  const Layout* source_layout;
  i64 source_type;
  void* target;
  const Layout* target_layout;
  i64 target_type;
  const Run* runs;
  i64 n_runs;
  const Rope* rope;
  i64 threads;
};

// n_runs of run_bytes each, at byte offsets.
struct CopyArgs {
  const char* source;
  char* target;
  const i64 *sources, *targets;
  i64 n_runs, run_bytes;
};

namespace {

constexpr i64 kTile = 32;  // tokens that are turned together

struct Bf16 {
  uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(_Float16 x) { return static_cast<float>(x); }
inline float widen(int8_t x) { return static_cast<float>(x); }
inline float widen(Bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline void narrow(float x, float& out) { out = x; }
inline void narrow(float x, _Float16& out) { out = static_cast<_Float16>(x); }
inline void narrow(float x, Bf16& out) {  // to nearest even, as torch rounds
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  out.bits = x != x ? 0x7fc0 : static_cast<uint16_t>(rounded);
}
// Rows of int8 are scaled before they come here.
inline void narrow(float x, int8_t& out) {
  float step = x >= 0 ? x + 0.5f : x - 0.5f;
  out = static_cast<int8_t>(std::min(127.0f, std::max(-128.0f, step)));
}

// Offsets of a tile's tokens where neither they nor dimensions adjoin, as in the layout for AMX: a
// division for each number would cost more than moving it.
struct Tokens {
  i64 offset[kTile];
  Tokens(const Plane& p, i64 first, i64 count) {
    for (i64 n = 0; n < count; ++n) offset[n] = p.token(first + n);
  }
};

// A tile is float[dims][kTile]: tokens adjoin, so that every loop over them is a vector.
// Returns the column in which token `first` stands: where tokens adjoin in memory whole tiles are
// read, from earlier in the block if need be, since odd lengths cost more than what they save.
template <typename T>
i64 load(const T* head, const Plane& p, i64 tokens, i64 first, i64 count, float* tile) {
  const T* at = head + p.base;
  if (p.tokens_adjoin() && tokens >= kTile) {
    i64 from = std::min(first, tokens - kTile);
    for (i64 d = 0; d < p.dims; ++d) {
      const T* row = at + p.dim(d) + from;
      for (i64 n = 0; n < kTile; ++n) tile[d * kTile + n] = widen(row[n]);
    }
    return first - from;
  }
  if (p.dims_adjoin()) {
    for (i64 n = 0; n < count; ++n) {
      const T* row = at + p.token(first + n);
      for (i64 d = 0; d < p.dims; ++d) tile[d * kTile + n] = widen(row[d]);
    }
  } else {
    const Tokens tokens_at(p, first, count);
    for (i64 d = 0; d < p.dims; ++d) {
      const T* row = at + p.dim(d);
      for (i64 n = 0; n < count; ++n) tile[d * kTile + n] = widen(row[tokens_at.offset[n]]);
    }
  }
  return 0;
}

template <typename T>
void store(T* head, const Plane& p, i64 first, i64 count, const float* tile) {
  T* at = head + p.base;
  if (p.tokens_adjoin()) {
    for (i64 d = 0; d < p.dims; ++d) {
      T row[kTile];
      for (i64 n = 0; n < kTile; ++n) narrow(tile[d * kTile + n], row[n]);
      std::memcpy(at + p.dim(d) + first, row, count * sizeof(T));
    }
  } else if (p.dims_adjoin()) {
    for (i64 n = 0; n < count; ++n) {
      T* row = at + p.token(first + n);
      for (i64 d = 0; d < p.dims; ++d) narrow(tile[d * kTile + n], row[d]);
    }
  } else {
    const Tokens tokens_at(p, first, count);
    for (i64 d = 0; d < p.dims; ++d) {
      T* row = at + p.dim(d);
      for (i64 n = 0; n < count; ++n) narrow(tile[d * kTile + n], row[tokens_at.offset[n]]);
    }
  }
}

template <typename T>
T* scale_at(T* head, const Plane& p, i64 token) {
  return head + p.scale + token * p.token_outer;
}

void rotate(float* tile, i64 row, const Rope& rope) {
  const float *cos = rope.cos + row * rope.pairs, *sin = rope.sin + row * rope.pairs;
  for (i64 i = 0; i < rope.pairs; ++i) {
    float* a = tile + (rope.start + (rope.neox ? i : 2 * i)) * kTile;
    float* b = a + (rope.neox ? rope.pairs : 1) * kTile;
    for (i64 n = 0; n < kTile; ++n) {
      float x = a[n], y = b[n];
      a[n] = x * cos[i] - y * sin[i];
      b[n] = y * cos[i] + x * sin[i];
    }
  }
}

void multiply_tokens(float* tile, const Plane& p, i64 count, const float* factor) {
  for (i64 d = 0; d < p.dims; ++d)
    for (i64 n = 0; n < count; ++n) tile[d * kTile + n] *= factor[n];
}

void dequantize(const int8_t* head, const Plane& p, i64 first, i64 count, float* tile) {
  float scale[kTile] = {};
  for (i64 n = 0; n < count; ++n) std::memcpy(&scale[n], scale_at(head, p, first + n), 4);
  multiply_tokens(tile, p, count, scale);
}

void quantize(int8_t* head, const Plane& p, i64 first, i64 count, float* tile) {
  float most[kTile] = {}, inverse[kTile] = {};
  for (i64 d = 0; d < p.dims; ++d)
    for (i64 n = 0; n < count; ++n) most[n] = std::max(most[n], std::fabs(tile[d * kTile + n]));
  for (i64 n = 0; n < count; ++n) {
    float scale = std::max(most[n] / 127.0f, 1e-6f);
    std::memcpy(scale_at(head, p, first + n), &scale, 4);
    inverse[n] = 1.0f / scale;
  }
  multiply_tokens(tile, p, count, inverse);
}

template <typename T>
void copy(const T* from, const Plane& p, i64 first, T* to, const Plane& q, i64 other, i64 count) {
  const T* source = from + p.base;
  T* target = to + q.base;
  if (p.dims_adjoin() && q.dims_adjoin()) {
    bool packed = p.token_outer == p.dims && q.token_outer == q.dims;
    i64 rows = packed ? 1 : count, size = packed ? count * p.dims : p.dims;
    for (i64 n = 0; n < rows; ++n)
      std::memcpy(target + q.token(other + n), source + p.token(first + n), size * sizeof(T));
  } else if (p.tokens_adjoin() && q.tokens_adjoin()) {
    for (i64 d = 0; d < p.dims; ++d)
      std::memcpy(target + q.dim(d) + other, source + p.dim(d) + first, count * sizeof(T));
  } else {
    for (i64 done = 0; done < count; done += kTile) {
      i64 some = std::min(kTile, count - done);
      const Tokens read(p, first + done, some), written(q, other + done, some);
      for (i64 d = 0; d < p.dims; ++d) {
        const T* in = source + p.dim(d);
        T* out = target + q.dim(d);
        for (i64 n = 0; n < some; ++n) out[written.offset[n]] = in[read.offset[n]];
      }
    }
  }
  if (p.scale >= 0)
    for (i64 n = 0; n < count; ++n)
      std::memcpy(scale_at(to, q, other + n), scale_at(from, p, first + n), 4);
}

template <typename S, typename T>
struct Move {
  const S* source;
  const Layout& from;
  T* target;
  const Layout& to;
  const Rope& rope;

  void plane(const S* in, const Plane& p, T* out, const Plane& q, const Run& run, i64 row,
             float* tile) const {
    i64 first = run.source % from.tokens, other = run.target % to.tokens;
    if constexpr (std::is_same_v<S, T>)
      if (row < 0) return copy(in, p, first, out, q, other, run.length);
    for (i64 done = 0; done < run.length; done += kTile) {
      i64 count = std::min(kTile, run.length - done);
      i64 column = load(in, p, from.tokens, first + done, count, tile);
      if constexpr (std::is_same_v<S, int8_t>) dequantize(in, p, first + done, count, tile);
      if (row >= 0) rotate(tile, row, rope);
      if constexpr (std::is_same_v<T, int8_t>) quantize(out, q, other + done, count, tile + column);
      store(out, q, other + done, count, tile + column);
    }
  }

  void layer(i64 l, const Run* runs, i64 n_runs, float* tile) const {
    for (const Run* run = runs; run < runs + n_runs; ++run) {
      const S* in = source + l * from.layer_stride + run->source / from.tokens * from.block_stride;
      T* out = target + l * to.layer_stride + run->target / to.tokens * to.block_stride;
      for (i64 h = 0; h < from.heads; ++h) {
        const S* in_head = in + h * from.head_stride;
        T* out_head = out + h * to.head_stride;
        plane(in_head, from.key, out_head, to.key, *run, run->row, tile);
        if (from.value.dims)
          plane(in_head, from.value, out_head, to.value, *run, -1, tile);
      }
    }
  }

  void layers(i64 begin, i64 end, const Run* runs, i64 n_runs) const {
    // One tile more: a store from a later column reads, and drops, what lies behind the last row.
    std::vector<float> tile((std::max(from.key.dims, from.value.dims) + 1) * kTile);
    for (i64 l = begin; l < end; ++l) layer(l, runs, n_runs, tile.data());
  }
};

template <typename Work>
void in_parallel(i64 count, i64 threads, Work work) {
  threads = std::max<i64>(1, std::min(threads, count));
  std::vector<std::thread> others;
  for (i64 t = 1; t < threads; ++t)
    others.emplace_back(work, count * t / threads, count * (t + 1) / threads);
  work(0, count / threads);
  for (auto& other : others) other.join();
}

template <typename S, typename T>
void move(const MoveArgs& a) {
  Move<S, T> op{static_cast<const S*>(a.source), *a.source_layout, static_cast<T*>(a.target),
                *a.target_layout, *a.rope};
  in_parallel(a.source_layout->layers, a.threads,
              [&](i64 begin, i64 end) { op.layers(begin, end, a.runs, a.n_runs); });
}

using MoveFn = void (*)(const MoveArgs&);

template <typename S>
constexpr MoveFn kFrom[] = {move<S, float>, move<S, _Float16>, move<S, Bf16>, move<S, int8_t>};
constexpr const MoveFn* kMoves[] = {kFrom<float>, kFrom<_Float16>, kFrom<Bf16>, kFrom<int8_t>};

}  // namespace

extern "C" {

void splice_tokens(const MoveArgs* args) { kMoves[args->source_type][args->target_type](*args); }

void copy_runs(const CopyArgs* args) {
  const CopyArgs& a = *args;
  for (i64 i = 0; i < a.n_runs; ++i)
    std::memcpy(a.target + a.targets[i], a.source + a.sources[i], a.run_bytes);
}

}  // extern "C"
