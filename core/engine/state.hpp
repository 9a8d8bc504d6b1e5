// The state of a core: what each thread of an engine reads and writes of it.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cmath>
#include <cstdint>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "blocks.hpp"
#include "changes.hpp"
#include "keys.hpp"
#include "pace.hpp"
#include "victims.hpp"

namespace {

constexpr size_t kSpares = 256;  // changes kept for reuse

struct Batch;

struct Further {  // of a key that several blocks hold
  size_t count = 0;  // beside the first
  Ids ids;           // all that ever held it since it was held twice, in order
};

struct State {
  explicit State(size_t blocks) : index(blocks), places(blocks, 0), stamps(blocks, 0),
                                  victims(blocks) {}

  // Of the pool; owned.
  PyObject* blocks = nullptr;    // its list
  PyObject* head = nullptr;      // the free queue's fake head
  PyObject* original = nullptr;  // its own ``cache_full_blocks``
  PyObject* stored = nullptr;    // classes of events
  PyObject* removed = nullptr;
  PyObject* cleared = nullptr;
  PyObject* block_size = nullptr;
  PyObject* catch_up = nullptr;  // notes all that changed; called before events are made
  PyTypeObject* type = nullptr;  // of a block
  Slots at{};
  Py_ssize_t arguments[5] = {0, 1, 2, 3, 5};  // places of those that are read
  long group = 0;
  Py_buffer freed{};  // seconds at which a request gave each block back
  bool has_failed = false;
  char keeps_hashes = 0;  // of what is evicted

  // Written by the step's thread alone.
  Changes* now = nullptr;
  std::deque<Changes*> sealed;  // before a reset
  std::vector<Changes*> spares;
  std::vector<Batch*> spare_batches;

  std::mutex inbox_lock;  // held for a swap
  std::deque<Changes*> inbox;  // an owner of each; not in the index yet
  std::mutex work_lock;      // who notes; in order
  std::mutex index_lock;     // guards what follows
  KeyMap<int32_t, -1> index;  // numbers of blocks
  std::unordered_map<uint64_t, Further> further;
  std::vector<uint32_t> places, stamps;  // of a ranking's keys, by block
  uint32_t stamp = 0;

  // The window; the step's thread's alone.
  Py_buffer order{}, found{};  // a ranking's keys, and their blocks' numbers
  size_t next = 0;
  Victims victims;
  std::unordered_set<uint64_t> kept;  // keys that are no victims whatever a ranking says

  // A step's pace; the step's thread's alone. See ``core_step``.
  Demand demand;
  Meter meter;
  Pace pace;
  int64_t groups_take = 1;
  size_t cached = 0, tell_at = SIZE_MAX;  // blocks; when news of them is pressing
  double max_stale_s = 0.0, ranked_at = 0.0, rested_at = -HUGE_VAL;
  bool has_changed = true;  // who runs, perhaps, since the last step
  bool must_take = false;   // an error waits there
  bool is_settled = false;  // the window, under the ranking that is rested on
  bool guards = false;      // protected blocks from a step that would take more than the window
  // Owned: what a step reads, and by what it knows that nothing happened.
  PyObject *clock = nullptr, *running = nullptr, *sessions = nullptr, *emit = nullptr;
  PyObject *mailbox = nullptr, *holding = nullptr;
  PyObject *witness = nullptr;    // the newest request that ran in the last step
  PyObject *ranking = nullptr;    // the latest that was seen
  PyObject *rests_on = nullptr;   // the ranking by which the queue is arranged
  PyObject *far_blank = nullptr;  // while it is blank, no step takes any other
  PyObject *admission = nullptr;  // the latest advice that was seen

  PyObject* block(size_t id) const { return PyList_GET_ITEM(blocks, id); }
  size_t count() const { return static_cast<size_t>(PyList_GET_SIZE(blocks)); }
};

struct Core {
  PyObject_HEAD
  State* state;
};

struct Batch {
  PyObject_HEAD
  Core* core;  // owned
  Changes* changes;
};

extern PyTypeObject batch_type;  // below
PyObject *zero = nullptr, *s_hashes = nullptr, *s_request_id = nullptr;
PyObject *s_lora = nullptr, *s_reversed = nullptr, *s_ranking = nullptr, *s_ts = nullptr;
PyObject *s_admission = nullptr, *s_rests = nullptr, *s_media = nullptr;
PyObject* s_arguments[5];
const char* const kArguments[5] = {"request", "blocks", "num_cached_blocks", "num_full_blocks",
                                   "kv_cache_group_id"};

Changes* fresh(State& s) {
  if (s.spares.empty()) return new Changes();
  Changes* made = s.spares.back();
  s.spares.pop_back();
  made->owners = 1;
  return made;
}

void give_back(State& s, Changes* changes) {  // an owner less
  if (--changes->owners > 0) return;
  changes->reset();
  if (s.spares.size() < kSpares) {
    s.spares.push_back(changes);
  } else {
    delete changes;
  }
}

}  // namespace
