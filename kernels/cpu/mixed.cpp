// One decode query of each head against tokens stored in parts, some of them in int8; compiled at
// first use. What mixed_attention.py defines, to rounding: sums run in another order.

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <thread>
#include <type_traits>
#include <vector>

using i64 = int64_t;

// Consecutive tokens; strides in elements, dims adjoin. scale: [batch, kv heads, dims], or null.
struct Part {
  const void *keys, *values;
  const float *key_scale, *value_scale;
  i64 tokens, batch_stride, head_stride, token_stride, is_int8;
};

struct MixedArgs {
  const float* queries;  // [batch, heads, dims]
  const Part* parts;
  const uint8_t* visible;  // [batch, tokens], or null
  float* output;           // [batch, heads, dims]
  float* mass;             // [batch, kv heads, tokens]: summed over the heads of a group
  i64 n_parts, batch, heads, kv_heads, dims, tokens, threads;
  double scale;
};

namespace {

// e^x for x <= 0: 2^n times a polynomial of the rest; its relative error is below 2e-7.
inline float exp_of(float x) {
  x = std::max(x, -87.0f);
  float n = std::nearbyintf(x * 1.44269504f);
  float r = x - n * 0.693359375f - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return p * power;
}

struct Scratch {
  std::vector<float> query, logits;
};

#ifdef __AVX512F__
constexpr i64 LANES = 16;
#else
constexpr i64 LANES = 8;
#endif
using Floats = float __attribute__((vector_size(4 * LANES)));
using Cells = int8_t __attribute__((vector_size(LANES)));
using Ints = int32_t __attribute__((vector_size(4 * LANES)));

inline Floats widened(const float* from) {
  Floats found;
  std::memcpy(&found, from, sizeof found);
  return found;
}

// g++ 12 makes some thirty instructions of what the hardware does in two.
inline Floats widened(const int8_t* from) {
#if defined(__AVX512F__)
  const __m128i found = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(found));
#elif defined(__AVX2__)
  const __m128i found = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(found));
#else
  Cells found;
  std::memcpy(&found, from, sizeof found);
  return __builtin_convertvector(__builtin_convertvector(found, Ints), Floats);
#endif
}

inline float total(Floats of) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps(of);
#else
  float each[LANES];
  std::memcpy(each, &of, sizeof each);
  for (i64 half = LANES / 2; half; half /= 2)
    for (i64 lane = 0; lane < half; ++lane) each[lane] += each[lane + half];
  return each[0];
#endif
}

// Logits of G heads for the tokens of a part; V vectors of dims, 0: as many as there are. What
// is left of the dims is added one by one.
template <typename T, i64 G, i64 V>
void look_at(const T* keys, i64 stride, i64 tokens, i64 dims, const float* query, float* logits,
             i64 row) {
  const i64 vectors = V ? V : dims / LANES;
  for (i64 t = 0; t < tokens; ++t) {
    const T* key = keys + t * stride;
    Floats sum[G] = {};
    for (i64 v = 0; v < vectors; ++v) {
      const Floats wide = widened(key + v * LANES);
      for (i64 g = 0; g < G; ++g) sum[g] += widened(query + g * dims + v * LANES) * wide;
    }
    for (i64 g = 0; g < G; ++g) {
      float rest = 0;
      for (i64 d = vectors * LANES; d < dims; ++d)
        rest += query[g * dims + d] * static_cast<float>(key[d]);
      logits[g * row + t] = total(sum[g]) + rest;
    }
  }
}

// Adds what G heads read of a part's values, times its scale, to their output.
template <typename T, i64 G, i64 V>
void read_from(const T* values, i64 stride, i64 tokens, i64 dims, const float* weights, i64 row,
               const float* scale, float* out) {
  constexpr i64 width = V ? V : 1;
  const i64 vectors = dims / LANES;
  for (i64 v = 0; v < vectors; v += width) {
    Floats sum[G][width] = {};
    for (i64 t = 0; t < tokens; ++t)
      for (i64 n = 0; n < width; ++n) {
        const Floats wide = widened(values + t * stride + (v + n) * LANES);
        for (i64 g = 0; g < G; ++g) sum[g][n] += weights[g * row + t] * wide;
      }
    for (i64 g = 0; g < G; ++g)
      for (i64 n = 0; n < width; ++n)
        for (i64 lane = 0, d = (v + n) * LANES; lane < LANES; ++lane, ++d)
          out[g * dims + d] += sum[g][n][lane] * (scale ? scale[d] : 1.0f);
  }
  for (i64 g = 0; g < G; ++g)
    for (i64 d = vectors * LANES; d < dims; ++d) {
      float sum = 0;
      for (i64 t = 0; t < tokens; ++t)
        sum += weights[g * row + t] * static_cast<float>(values[t * stride + d]);
      out[g * dims + d] += sum * (scale ? scale[d] : 1.0f);
    }
}

template <typename T, i64 G>
void look_for(const T* keys, i64 stride, i64 tokens, i64 dims, const float* query, float* logits,
              i64 row) {
  switch (dims % LANES ? 0 : dims / LANES) {
    case 2: return look_at<T, G, 2>(keys, stride, tokens, dims, query, logits, row);
    case 4: return look_at<T, G, 4>(keys, stride, tokens, dims, query, logits, row);
    case 8: return look_at<T, G, 8>(keys, stride, tokens, dims, query, logits, row);
    default: return look_at<T, G, 0>(keys, stride, tokens, dims, query, logits, row);
  }
}

template <typename T, i64 G>
void read_for(const T* values, i64 stride, i64 tokens, i64 dims, const float* weights, i64 row,
              const float* scale, float* out) {
  if (dims % (4 * LANES) == 0)
    return read_from<T, G, 4>(values, stride, tokens, dims, weights, row, scale, out);
  if (dims % (2 * LANES) == 0)
    return read_from<T, G, 2>(values, stride, tokens, dims, weights, row, scale, out);
  read_from<T, G, 0>(values, stride, tokens, dims, weights, row, scale, out);
}

// Heads of a group share what is read of a token, by fours, by twos and one by one.
template <typename Act>
void by_heads(i64 group, Act act) {
  i64 g = 0;
  for (; g + 4 <= group; g += 4) act(g, std::integral_constant<i64, 4>());
  for (; g + 2 <= group; g += 2) act(g, std::integral_constant<i64, 2>());
  for (; g < group; ++g) act(g, std::integral_constant<i64, 1>());
}

template <typename T>
void look(const MixedArgs& a, const Part& part, i64 b, i64 h, i64 first, Scratch& s) {
  const i64 group = a.heads / a.kv_heads, dims = a.dims;
  const T* keys = static_cast<const T*>(part.keys) + b * part.batch_stride + h * part.head_stride;
  const float* asked = a.queries + (b * a.heads + h * group) * dims;
  const float* scale = part.key_scale ? part.key_scale + (b * a.kv_heads + h) * dims : nullptr;
  for (i64 g = 0; g < group; ++g)
    for (i64 d = 0; d < dims; ++d)
      s.query[g * dims + d] =
          asked[g * dims + d] * static_cast<float>(a.scale) * (scale ? scale[d] : 1.0f);
  by_heads(group, [&](i64 g, auto heads) {
    look_for<T, heads>(keys, part.token_stride, part.tokens, dims, s.query.data() + g * dims,
                       s.logits.data() + g * a.tokens + first, a.tokens);
  });
}

template <typename T>
void read(const MixedArgs& a, const Part& part, i64 b, i64 h, i64 first, Scratch& s) {
  const i64 group = a.heads / a.kv_heads, dims = a.dims;
  const T* values =
      static_cast<const T*>(part.values) + b * part.batch_stride + h * part.head_stride;
  const float* scale = part.value_scale ? part.value_scale + (b * a.kv_heads + h) * dims : nullptr;
  float* out = a.output + (b * a.heads + h * group) * dims;
  by_heads(group, [&](i64 g, auto heads) {
    read_for<T, heads>(values, part.token_stride, part.tokens, dims,
                       s.logits.data() + g * a.tokens + first, a.tokens, scale, out + g * dims);
  });
}

// Logits become weights that sum to 1, or to 0 where nothing is visible.
void weigh(const MixedArgs& a, i64 b, float* logits) {
  const uint8_t* visible = a.visible ? a.visible + b * a.tokens : nullptr;
  float most = -std::numeric_limits<float>::infinity(), sum = 0;
  if (visible) {
    for (i64 t = 0; t < a.tokens; ++t)
      if (visible[t]) most = std::max(most, logits[t]);
    for (i64 t = 0; t < a.tokens; ++t) logits[t] = visible[t] ? exp_of(logits[t] - most) : 0.0f;
  } else {
#pragma omp simd reduction(max : most)
    for (i64 t = 0; t < a.tokens; ++t) most = std::max(most, logits[t]);
#pragma omp simd
    for (i64 t = 0; t < a.tokens; ++t) logits[t] = exp_of(logits[t] - most);
  }
#pragma omp simd reduction(+ : sum)
  for (i64 t = 0; t < a.tokens; ++t) sum += logits[t];
  const float share = sum > 0 ? 1.0f / sum : 0.0f;
#pragma omp simd
  for (i64 t = 0; t < a.tokens; ++t) logits[t] *= share;
}

void attend(const MixedArgs& a, i64 b, i64 h, Scratch& s) {
  const i64 group = a.heads / a.kv_heads;
  i64 first = 0;
  for (i64 n = 0; n < a.n_parts; first += a.parts[n++].tokens)
    a.parts[n].is_int8 ? look<int8_t>(a, a.parts[n], b, h, first, s)
                       : look<float>(a, a.parts[n], b, h, first, s);
  float* mass = a.mass + (b * a.kv_heads + h) * a.tokens;
  std::fill_n(mass, a.tokens, 0.0f);
  for (i64 g = 0; g < group; ++g) {
    float* logits = s.logits.data() + g * a.tokens;
    weigh(a, b, logits);
#pragma omp simd
    for (i64 t = 0; t < a.tokens; ++t) mass[t] += logits[t];
  }
  std::fill_n(a.output + (b * a.heads + h * group) * a.dims, group * a.dims, 0.0f);
  first = 0;
  for (i64 n = 0; n < a.n_parts; first += a.parts[n++].tokens)
    a.parts[n].is_int8 ? read<int8_t>(a, a.parts[n], b, h, first, s)
                       : read<float>(a, a.parts[n], b, h, first, s);
}

void attend_some(const MixedArgs& a, i64 from, i64 to) {
  const i64 group = a.heads / a.kv_heads;
  Scratch s;
  s.query.resize(group * a.dims);
  s.logits.resize(group * a.tokens);
  for (i64 n = from; n < to; ++n) attend(a, n / a.kv_heads, n % a.kv_heads, s);
}

}  // namespace

extern "C" void mixed_attention(const MixedArgs* a) {
  const i64 all = a->batch * a->kv_heads, threads = std::max<i64>(1, std::min(a->threads, all));
  std::vector<std::thread> others;
  for (i64 n = 1; n < threads; ++n)
    others.emplace_back(attend_some, std::cref(*a), all * n / threads, all * (n + 1) / threads);
  attend_some(*a, 0, all / threads);
  for (std::thread& other : others) other.join();
}
