// What every kernel here shares: number types, the layout as kernels read it, and the few things
// that only hardware has. The last sit behind inline functions that host.hpp provides on a CPU.
// Given as macros, since the host computes with them too (gpu/calls.py): WARP, MOST_THREADS of a
// thread block, STAGES and PIECE.
#pragma once

#ifdef KVGRAPH_HOST
#include "host.hpp"
#else
using i64 = long long;
#define SHARED_BYTES(name) extern __shared__ __align__(16) char name[]
#define HOST_ENTRY(kernel)
#define INFINITY __int_as_float(0x7f800000)

// Copies 4, 8 or 16 bytes to shared memory without waiting (sm_80 and later).
template <int Bytes>
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
  unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  if constexpr (Bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(Bytes)
                 : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `Pending` of this thread's groups are still on their way.
template <int Pending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}
__device__ __forceinline__ void warp_barrier() { __syncwarp(); }
__device__ __forceinline__ float shuffle_xor(float x, int mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}
__device__ __forceinline__ unsigned bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float float_of(unsigned bits) { return __uint_as_float(bits); }
__device__ __forceinline__ float half_to_float(unsigned short bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
__device__ __forceinline__ unsigned short float_to_half(float x) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
#endif

constexpr int kWarp = WARP;

struct Half {
  unsigned short bits;
};
struct Bf16 {
  unsigned short bits;
};
using Int8 = signed char;

template <typename A, typename B>
constexpr bool kSame = false;
template <typename A>
constexpr bool kSame<A, A> = true;

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(Half x) { return half_to_float(x.bits); }
__device__ __forceinline__ float widen(Bf16 x) {
  return float_of(static_cast<unsigned>(x.bits) << 16);
}
__device__ __forceinline__ float widen(Int8 x) { return static_cast<float>(x); }

__device__ __forceinline__ void narrow(float x, float& out) { out = x; }
__device__ __forceinline__ void narrow(float x, Half& out) { out.bits = float_to_half(x); }
__device__ __forceinline__ void narrow(float x, Bf16& out) {  // to nearest even, as torch rounds
  unsigned bits = bits_of(x);
  unsigned rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  out.bits = x != x ? 0x7fc0 : static_cast<unsigned short>(rounded);
}
__device__ __forceinline__ void narrow(float x, Int8& out) {  // half away from zero, as vLLM rounds
  float step = x >= 0 ? x + 0.5f : x - 0.5f;
  step = step < -128.0f ? -128.0f : (step > 127.0f ? 127.0f : step);
  out = static_cast<Int8>(static_cast<int>(step));
}

// What one access moves: 1, 2, 4, 8 or 16 bytes, aligned to their number.
template <int Bytes>
struct alignas(Bytes) Words {
  unsigned words[Bytes / 4];
};
template <>
struct alignas(2) Words<2> {
  unsigned short words[1];
};
template <>
struct alignas(1) Words<1> {
  unsigned char words[1];
};

// The values that one access brought, as floats.
template <typename T, int Bytes>
__device__ __forceinline__ void unpack(const Words<Bytes>& packed, float* values) {
  constexpr int kCount = Bytes / static_cast<int>(sizeof(T));
  union {
    Words<Bytes> words;
    T each[kCount];
  } all;
  all.words = packed;
  for (int i = 0; i < kCount; ++i) values[i] = widen(all.each[i]);
}

// `Count` values from an address that is aligned to `Bytes`, or to all of them if they are less.
template <int Bytes, typename T, int Count>
__device__ __forceinline__ void read_values(const T* from, float (&values)[Count]) {
  constexpr int kAll = Count * static_cast<int>(sizeof(T)), kBytes = Bytes < kAll ? Bytes : kAll;
  constexpr int kEach = kBytes / static_cast<int>(sizeof(T));
  for (int i = 0; i < Count / kEach; ++i)
    unpack<T>(reinterpret_cast<const Words<kBytes>*>(from)[i], values + i * kEach);
}

template <int Bytes, typename T, int Count>
__device__ __forceinline__ void write_values(const float (&values)[Count], T* to) {
  constexpr int kAll = Count * static_cast<int>(sizeof(T)), kBytes = Bytes < kAll ? Bytes : kAll;
  constexpr int kEach = kBytes / static_cast<int>(sizeof(T));
  union {
    Words<kBytes> words;
    T each[kEach];
  } out;
  for (int i = 0; i < Count / kEach; ++i) {
    for (int j = 0; j < kEach; ++j) narrow(values[i * kEach + j], out.each[j]);
    reinterpret_cast<Words<kBytes>*>(to)[i] = out.words;
  }
}

// A layout whose cells are runs, as all of the GPU's are; strides and offsets in bytes.
// A scale of -1: there is none.
struct Layout {
  i64 layers, heads, tokens;
  i64 layer_stride, block_stride, head_stride, token_stride;
  i64 key_dims, value_dims, value_base, key_scale, value_scale;
  i64 cell_bytes;

  // In 32 bits: a 64-bit division costs a hundred instructions.
  __device__ i64 cell(unsigned layer, unsigned slot, unsigned head) const {
    unsigned each = static_cast<unsigned>(tokens);
    return layer * layer_stride + slot / each * block_stride + head * head_stride +
           slot % each * token_stride;
  }
};

__device__ __forceinline__ float warp_max(float x) {
  for (int mask = kWarp / 2; mask; mask /= 2) {
    float other = shuffle_xor(x, mask);
    x = other > x ? other : x;
  }
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
  for (int mask = kWarp / 2; mask; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}

// A warp's ring of cells on their way through shared memory: `Stages` cells, one commit group each.
template <int Stages, int Bytes>
struct Ring {
  char* base;     // this warp's part of shared memory
  int slot_bytes; // of one cell, a multiple of 16

  __device__ char* slot(unsigned step) const { return base + step % Stages * slot_bytes; }
  __device__ void fetch(unsigned step, const char* from, int size, int lane) const {
    for (int at = lane * Bytes; at < size; at += kWarp * Bytes)
      copy_async<Bytes>(slot(step) + at, from + at);
  }
};
