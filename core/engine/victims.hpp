// The blocks laid at the head of the free queue, which vLLM evicts next.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "blocks.hpp"

namespace {

class Victims {
 public:
  explicit Victims(size_t blocks) : followed_(blocks, 0) {}
  ~Victims() { keep(0); }

  size_t size() const { return ids_.size() - front_; }
  int32_t id(size_t at) const { return ids_[front_ + at]; }
  PyObject* hash(size_t at) const { return hashes_[front_ + at]; }
  bool follows(int32_t id) const { return followed_[id] != 0; }

  void add(int32_t id, PyObject* hash) {
    Py_INCREF(hash);
    ids_.push_back(id);
    hashes_.push_back(hash);
    followed_[id] = 1;
  }

  void drop_front(size_t count) {
    for (size_t at = front_; at < front_ + count; ++at) {
      if (at + kAhead < ids_.size()) warm(at + kAhead);
      unfollow(at);
    }
    front_ += count;
    looked -= std::min(looked, count);
    if (front_ > 1024 && 2 * front_ > ids_.size()) {
      ids_.erase(ids_.begin(), ids_.begin() + front_);
      hashes_.erase(hashes_.begin(), hashes_.begin() + front_);
      front_ = 0;
    }
  }

  void keep(size_t count) {
    while (size() > count) {
      if (ids_.size() > kAhead) warm(ids_.size() - 1 - kAhead);
      unfollow(ids_.size() - 1);
      ids_.pop_back();
      hashes_.pop_back();
    }
    looked = std::min(looked, size());
  }

  // Forget those that are no longer marked in ``followed``; whoever asks has unmarked them.
  void drop_unmarked() {
    size_t kept = front_, looked_left = 0;
    for (size_t at = front_; at < ids_.size(); ++at) {
      if (!followed_[ids_[at]]) {
        Py_DECREF(hashes_[at]);
        continue;
      }
      looked_left += at - front_ < looked;
      ids_[kept] = ids_[at];
      hashes_[kept++] = hashes_[at];
    }
    ids_.resize(kept);
    hashes_.resize(kept);
    looked = looked_left;
  }

  bool unmark(int32_t id) {
    const bool was = followed_[id] != 0;
    followed_[id] = 0;
    return was;
  }

  size_t looked = 0;

 private:
  static constexpr size_t kAhead = 8;

  void warm(size_t at) const {
    prefetch(hashes_[at]);
    prefetch(&followed_[ids_[at]]);
  }

  void unfollow(size_t at) {
    followed_[ids_[at]] = 0;
    Py_DECREF(hashes_[at]);
  }

  std::vector<uint8_t> followed_;
  Ids ids_;
  std::vector<PyObject*> hashes_;
  size_t front_ = 0;
};

}  // namespace
