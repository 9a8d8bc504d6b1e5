// Hashes of blocks, their 64-bit keys, and tables of these.

#ifndef KVGRAPH_KEYS_HPP
#define KVGRAPH_KEYS_HPP

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

constexpr int kKeyBytes = 8;    // of a hash: the last ones
constexpr int kGroupBytes = 4;  // that the prefix cache appends to a hash
constexpr int kHashEnd = 48;    // bytes from an object's start to the end of a usual hash

// The key of a hash whose last bytes but ``behind`` are the key's, big endian.
inline uint64_t key_of(PyObject* hash, int behind) {
  uint64_t key;
  const char* end = PyBytes_AS_STRING(hash) + PyBytes_GET_SIZE(hash) - behind;
  std::memcpy(&key, end - kKeyBytes, kKeyBytes);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  key = __builtin_bswap64(key);
#endif
  return key;
}

inline bool is_hash(PyObject* object, int behind) {
  return object != nullptr && PyBytes_Check(object) &&
         PyBytes_GET_SIZE(object) >= kKeyBytes + behind;
}

// From keys to values other than ``kNone``, with linear probing; at most half full.
template <typename Value, Value kNone>
class KeyMap {
 public:
  explicit KeyMap(size_t keys) { make(keys); }

  size_t size() const { return size_; }

  void prefetch_slot(uint64_t key) const { __builtin_prefetch(&slots_[home(key)]); }

  // The value under ``key``; null if there is none.
  Value* find(uint64_t key) {
    for (size_t at = home(key); slots_[at].value != kNone; at = next(at)) {
      if (slots_[at].key == key) return &slots_[at].value;
    }
    return nullptr;
  }

  void add(uint64_t key, Value value) {  // not there yet
    if (2 * (size_ + 1) > slots_.size()) grow();
    size_t at = home(key);
    while (slots_[at].value != kNone) at = next(at);
    slots_[at] = {key, value};
    ++size_;
  }

  void erase(uint64_t key) {
    size_t hole = home(key);
    while (slots_[hole].value != kNone && slots_[hole].key != key) hole = next(hole);
    if (slots_[hole].value == kNone) return;
    --size_;
    for (size_t at = next(hole); slots_[at].value != kNone; at = next(at)) {
      const size_t from_home = (at - home(slots_[at].key)) & mask_;
      if (from_home >= ((at - hole) & mask_)) {  // it may stand in the hole
        slots_[hole] = slots_[at];
        hole = at;
      }
    }
    slots_[hole].value = kNone;
  }

  void clear() {
    std::fill(slots_.begin(), slots_.end(), Slot{0, kNone});
    size_ = 0;
  }

  template <typename Keeps>
  void keep(Keeps keeps) {
    std::vector<Slot> before;
    before.swap(slots_);
    make(size_);
    for (const Slot& each : before) {
      if (each.value != kNone && keeps(each.key, each.value)) add(each.key, each.value);
    }
  }

 private:
  struct Slot {
    uint64_t key;
    Value value;
  };

  size_t home(uint64_t key) const { return (key * 0x9E3779B97F4A7C15ull >> 20) & mask_; }
  size_t next(size_t at) const { return (at + 1) & mask_; }

  void make(size_t keys) {
    size_t capacity = 1024;
    while (capacity < 2 * keys) capacity *= 2;
    slots_.assign(capacity, Slot{0, kNone});
    mask_ = capacity - 1;
    size_ = 0;
  }

  void grow() {  // or leave all as it was, with an error
    KeyMap larger(slots_.size());
    for (const Slot& each : slots_) {
      if (each.value != kNone) larger.add(each.key, each.value);
    }
    std::swap(*this, larger);
  }

  std::vector<Slot> slots_;
  size_t mask_ = 0, size_ = 0;
};

#endif
