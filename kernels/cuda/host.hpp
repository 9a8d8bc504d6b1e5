// Runs the kernels on a CPU, for tests: a thread block's threads are coroutines that take turns at
// barriers, and thread blocks run one after another. An asynchronous copy happens as late as its
// wait allows, so that a kernel that forgets to wait reads poison here too.
#pragma once

#include <math.h>
#include <string.h>
#include <ucontext.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

using i64 = long long;

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct Index {
  unsigned x;
};

namespace host {

constexpr int kLanes = WARP;
constexpr size_t kStack = 64 << 10;

struct PendingCopy {
  void* to;
  const void* from;
  int size;
};

struct Barrier {
  unsigned waiting = 0, generation = 0;
};

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStack]};
  std::deque<std::vector<PendingCopy>> groups;
  std::vector<PendingCopy> open;
  bool done = false;
};

struct State {
  std::vector<Thread> threads;
  ucontext_t scheduler;
  unsigned current = 0;
  Index block{}, grid{};
  Barrier whole;
  std::vector<Barrier> warps;
  std::vector<float> lanes;
  std::vector<char> shared;
  size_t shared_bytes = 0;
  int fault = 0;
  void (*body)(void*) = nullptr;
  void* argument = nullptr;
};
inline State state;

inline Thread& self() { return state.threads[state.current]; }
inline void yield() { swapcontext(&self().context, &state.scheduler); }

inline void arrive(Barrier& barrier, unsigned count) {
  unsigned generation = barrier.generation;
  if (++barrier.waiting == count) {
    barrier.waiting = 0;
    ++barrier.generation;
  }
  while (barrier.generation == generation) yield();
}

inline void enter() {
  state.body(state.argument);
  self().done = true;
  yield();
}

inline void run_block(unsigned threads) {
  state.threads.clear();
  state.threads.resize(threads);
  state.whole = {};
  state.warps.assign((threads + kLanes - 1) / kLanes, {});
  state.lanes.assign(threads, 0.0f);
  for (auto& thread : state.threads) {
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = kStack;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, enter, 0);
  }
  for (unsigned left = threads; left;) {
    for (state.current = 0; state.current < threads; ++state.current) {
      if (self().done) continue;
      swapcontext(&state.scheduler, &self().context);
      if (state.fault) return;
      left -= self().done;
    }
  }
}

template <typename Body>
void run_grid(unsigned grid, unsigned threads, size_t shared, Body body) {
  state.body = [](void* b) { (*static_cast<Body*>(b))(); };
  state.argument = &body;
  state.grid = {grid};
  state.shared_bytes = shared;
  state.fault = 0;
  for (unsigned block = 0; block < grid && !state.fault; ++block) {
    state.block = {block};
    state.shared.assign(shared + 16, static_cast<char>(0xcd));  // poison
    run_block(threads);
  }
}

template <typename... A, size_t... I>
void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
  kernel(*static_cast<std::decay_t<A>*>(args[I])...);
}

template <typename... A>
void launch(void (*kernel)(A...), unsigned grid, unsigned threads, size_t shared, void** args) {
  run_grid(grid, threads, shared,
           [=] { call(kernel, args, std::index_sequence_for<A...>{}); });
}

inline void finish(size_t pending) {
  auto& groups = self().groups;
  for (; groups.size() > pending; groups.pop_front())
    for (auto& copy : groups.front()) memcpy(copy.to, copy.from, copy.size);
}

inline char* shared_memory() {
  auto address = reinterpret_cast<uintptr_t>(state.shared.data());
  return reinterpret_cast<char*>((address + 15) / 16 * 16);
}

// What a GPU would stop a launch at: so it ends here, in whatever state its threads are.
enum Fault { kMisaligned = 1, kBeyondShared = 2 };
[[noreturn]] inline void stop(Fault fault) {
  state.fault = fault;
  for (;;) yield();
}

}  // namespace host

// What -fsanitize=alignment calls; the library that it comes with would only print.
extern "C" __attribute__((visibility("hidden"))) void __ubsan_handle_type_mismatch_v1(void*,
                                                                                      uintptr_t) {
  host::stop(host::kMisaligned);
}

#define threadIdx (Index{host::state.current})
#define blockIdx (host::state.block)
#define gridDim (host::state.grid)
#define blockDim (Index{static_cast<unsigned>(host::state.threads.size())})
#define SHARED_BYTES(name) char* name = host::shared_memory()
#define HOST_ENTRY(kernel)                                                                   \
  extern "C" int launch_##kernel(unsigned grid, unsigned threads, size_t shared, void** args) { \
    host::launch(kernel, grid, threads, shared, args);                                      \
    return host::state.fault;                                                               \
  }

template <int Bytes>
void copy_async(void* shared, const void* global) {
  auto to = static_cast<char*>(shared) - host::shared_memory();
  if (reinterpret_cast<uintptr_t>(global) % Bytes || to % Bytes) host::stop(host::kMisaligned);
  if (to < 0 || to + Bytes > static_cast<i64>(host::state.shared_bytes))
    host::stop(host::kBeyondShared);
  host::self().open.push_back({shared, global, Bytes});
}
inline void copy_commit() {
  host::self().groups.push_back(std::move(host::self().open));
  host::self().open.clear();
}
template <int Pending>
void copy_wait() {
  host::finish(Pending);
}
inline void __syncthreads() {
  host::arrive(host::state.whole, static_cast<unsigned>(host::state.threads.size()));
}
inline void warp_barrier() {
  unsigned warp = host::state.current / host::kLanes;
  host::arrive(host::state.warps[warp], host::kLanes);
}
inline float shuffle_xor(float x, int mask) {
  unsigned me = host::state.current;
  host::state.lanes[me] = x;
  warp_barrier();
  float other = host::state.lanes[me ^ static_cast<unsigned>(mask)];
  warp_barrier();
  return other;
}
inline unsigned bits_of(float x) {
  unsigned bits;
  memcpy(&bits, &x, 4);
  return bits;
}
inline float float_of(unsigned bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
inline float half_to_float(unsigned short bits) {
  _Float16 x;
  memcpy(&x, &bits, 2);
  return static_cast<float>(x);
}
inline unsigned short float_to_half(float x) {
  _Float16 narrow = static_cast<_Float16>(x);
  unsigned short bits;
  memcpy(&bits, &narrow, 2);
  return bits;
}
