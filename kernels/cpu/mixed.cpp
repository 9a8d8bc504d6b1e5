// One decode query of each head against tokens stored in parts, some of them in int8; compiled at
// first use. What mixed_attention.py defines, to rounding: sums run in another order.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <thread>
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
  std::vector<float> query, logits, read, sum;
};

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
  for (i64 t = 0; t < part.tokens; ++t) {
    const T* key = keys + t * part.token_stride;
    for (i64 g = 0; g < group; ++g) {
      const float* query = s.query.data() + g * dims;
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (i64 d = 0; d < dims; ++d) sum += query[d] * static_cast<float>(key[d]);
      s.logits[g * a.tokens + first + t] = sum;
    }
  }
}

template <typename T>
void read(const MixedArgs& a, const Part& part, i64 b, i64 h, i64 first, Scratch& s) {
  const i64 group = a.heads / a.kv_heads, dims = a.dims;
  const T* values =
      static_cast<const T*>(part.values) + b * part.batch_stride + h * part.head_stride;
  std::fill(s.read.begin(), s.read.end(), 0.0f);
  for (i64 t = 0; t < part.tokens; ++t) {
    const T* value = values + t * part.token_stride;
    for (i64 g = 0; g < group; ++g) {
      const float weight = s.logits[g * a.tokens + first + t];
      float* sum = s.read.data() + g * dims;
#pragma omp simd
      for (i64 d = 0; d < dims; ++d) sum[d] += weight * static_cast<float>(value[d]);
    }
  }
  const float* scale = part.value_scale ? part.value_scale + (b * a.kv_heads + h) * dims : nullptr;
  float* out = a.output + (b * a.heads + h * group) * dims;
  for (i64 g = 0; g < group; ++g)
    for (i64 d = 0; d < dims; ++d)
      out[g * dims + d] += s.read[g * dims + d] * (scale ? scale[d] : 1.0f);
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
  s.read.resize(group * a.dims);
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
