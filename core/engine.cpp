// kvgraph._engine: what an engine's step pays for being observed and arranged, in C++17.
//
// Python decides, the core moves. It notes what vLLM's block pool caches and evicts, keeps the
// index from keys to blocks, makes the events, finds a ranking's blocks and lays its victims at the
// head of vLLM's free queue. The Python path beside it does the same and is the reference; a proof
// compares both on a scratch pool before an engine gets a core (hooks/vllm/core/proof.py).
//
// Threads. The scheduler's thread calls everything with the GIL. The client's thread calls ``work``
// and ``holders``, which give the GIL back for what takes long. No mutex is held by a thread that
// waits for the GIL. Within a step nothing calls back into Python but vLLM's own methods that are
// followed, and nothing is allocated on its heap but one small object, from a free list.
//
// Blocks of vLLM's have slots. Their offsets are looked up by name; there is no header of vLLM's.
// References to them are borrowed from the pool's list, which the core holds.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <new>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "copies.hpp"
#include "keys.hpp"
#include "pace.hpp"

namespace {

constexpr int32_t kNobody = 0;       // number of vLLM's null block, which holds no key
constexpr size_t kFoundAtOnce = 1024;  // keys, between two chances for others to use the index
constexpr size_t kSpares = 256;      // changes kept for reuse

// Blocks -----------------------------------------------------------------------------------------

struct Slots {  // offsets in a block
  Py_ssize_t id, users, hash, prev, next;
};

inline PyObject*& slot(PyObject* object, Py_ssize_t offset) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
}

inline void prefetch(const void* place) { __builtin_prefetch(place); }

// Offset of the slot ``name`` in objects of ``type``; -1 with a TypeError if there is none.
Py_ssize_t slot_offset(PyTypeObject* type, const char* name) {
  PyObject* found = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), name);
  if (found == nullptr) return -1;
  Py_ssize_t offset = -1;
  if (Py_TYPE(found) == &PyMemberDescr_Type) {
    PyMemberDef* member = reinterpret_cast<PyMemberDescrObject*>(found)->d_member;
    if (member->type == T_OBJECT_EX) offset = member->offset;
  }
  Py_DECREF(found);
  if (offset < 0) PyErr_Format(PyExc_TypeError, "%s has no slot %s", type->tp_name, name);
  return offset;
}

// The index --------------------------------------------------------------------------------------

using Ids = std::vector<int32_t>;

struct Further {  // of a key that several blocks hold
  size_t count = 0;  // beside the first
  Ids ids;           // all that ever held it since it was held twice, in order
};

// What a step changed ----------------------------------------------------------------------------

struct Run {  // blocks that follow one another: keys [first, end) of the changes
  size_t first, end;
  uint64_t parent;
  bool has_parent;
  PyObject* session;  // owned; null without one
};

struct Call {  // a call that cached blocks; owned until the step's end
  PyObject *request, *blocks;
  Py_ssize_t first, end;
  size_t run;
};

struct Changes {
  std::vector<uint64_t> keys;  // cached, in order
  Ids ids;
  std::vector<Run> runs;
  std::vector<uint64_t> evicted;
  std::string evicted_hashes;  // end to end, where they are asked for
  std::vector<Call> calls;
  bool then_reset = false;
  bool is_noted = false;
  int owners = 1;  // with the GIL
  std::vector<uint64_t> gone;  // of the evicted; known once it is noted
  std::vector<Run> back;       // evicted and cached again at once

  bool empty() const { return keys.empty() && evicted.empty() && !then_reset; }

  void drop_calls() {
    for (Call& each : calls) {
      Py_DECREF(each.request);
      Py_DECREF(each.blocks);
    }
    calls.clear();
  }

  void reset() {  // with the GIL
    drop_calls();
    for (Run& each : runs) Py_XDECREF(each.session);
    keys.clear();
    ids.clear();
    runs.clear();
    evicted.clear();
    evicted_hashes.clear();
    gone.clear();
    back.clear();
    then_reset = is_noted = false;
  }
};

// The victims at the queue's head ----------------------------------------------------------------

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

// The core ---------------------------------------------------------------------------------------

struct Batch;

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
PyObject *s_admission = nullptr, *s_rests = nullptr;
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

// Taps -------------------------------------------------------------------------------------------

// Notes blocks [first, end) of a request, which entered the prefix cache; false with an error.
bool note_cached(State& s, PyObject* const* given) {
  const long group = PyLong_AsLong(given[4]);
  const Py_ssize_t first = PyLong_AsSsize_t(given[2]), end = PyLong_AsSsize_t(given[3]);
  if (PyErr_Occurred()) return false;
  if (group != s.group || first >= end) return true;
  PyObject *request = given[0], *blocks = given[1];
  PyObject* hashes = PyObject_GetAttr(request, s_hashes);
  if (hashes == nullptr) return false;
  bool fits = PyList_Check(hashes) && (PyList_Check(blocks) || PyTuple_Check(blocks)) &&
              first >= 0 && end <= PyList_GET_SIZE(hashes) &&
              end <= PySequence_Fast_GET_SIZE(blocks);
  Changes& now = *s.now;
  Run run{now.keys.size(), 0, 0, first > 0, nullptr};
  for (Py_ssize_t at = first - (first > 0); fits && at < end; ++at) {
    PyObject* hash = PyList_GET_ITEM(hashes, at);
    if (!(fits = is_hash(hash, 0))) break;
    if (at + 8 < end) prefetch(PyList_GET_ITEM(hashes, at + 8));
    if (at < first) {
      run.parent = key_of(hash, 0);
      continue;
    }
    PyObject* block = PySequence_Fast_GET_ITEM(blocks, at);
    if (!(fits = Py_TYPE(block) == s.type)) break;
    const long id = PyLong_AsLong(slot(block, s.at.id));
    if (!(fits = id >= 0 && static_cast<size_t>(id) < s.count())) break;
    now.keys.push_back(key_of(hash, 0));
    now.ids.push_back(static_cast<int32_t>(id));
  }
  Py_DECREF(hashes);
  if (!fits) {
    PyErr_Clear();
    PyErr_SetString(PyExc_TypeError, "cache_full_blocks: blocks or hashes are not as we know them");
    return false;
  }
  run.end = now.keys.size();
  Py_INCREF(request);
  Py_INCREF(blocks);
  now.calls.push_back({request, blocks, first, end, now.runs.size()});
  now.runs.push_back(run);
  return true;
}

PyObject* core_cache_full_blocks(Core* self, PyObject* const* args, Py_ssize_t count,
                                 PyObject* names) {
  State& s = *self->state;
  PyObject* result = PyObject_Vectorcall(s.original, args, count, names);
  if (result == nullptr) return nullptr;  // vLLM's own error
  try {
    PyObject* given[5];
    for (int which = 0; which < 5; ++which) {
      const Py_ssize_t place = s.arguments[which];
      given[which] = place < count ? args[place] : nullptr;
      const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
      for (Py_ssize_t at = 0; given[which] == nullptr && at < named; ++at) {
        PyObject* name = PyTuple_GET_ITEM(names, at);
        if (name == s_arguments[which] ||
            PyUnicode_CompareWithASCIIString(name, kArguments[which]) == 0) {
          given[which] = args[count + at];
        }
      }
      if (given[which] == nullptr) s.has_failed = true;
    }
    if (!s.has_failed && !note_cached(s, given)) s.has_failed = true;
  } catch (const std::bad_alloc&) {
    s.has_failed = true;
  }
  if (PyErr_Occurred()) PyErr_Clear();  // ``take`` tells, outside of vLLM's allocation
  return result;
}

PyObject* core_removed(Core* self, PyObject* hashes) {
  State& s = *self->state;
  try {
    if (PyList_Check(hashes)) {
      for (Py_ssize_t at = 0; at < PyList_GET_SIZE(hashes); ++at) {
        PyObject* hash = PyList_GET_ITEM(hashes, at);
        if (is_hash(hash, kGroupBytes)) {
          s.now->evicted.push_back(key_of(hash, kGroupBytes));
          if (s.keeps_hashes) {
            s.now->evicted_hashes.append(PyBytes_AS_STRING(hash), PyBytes_GET_SIZE(hash));
          }
        } else {
          s.has_failed = true;
        }
      }
    } else {
      s.has_failed = true;
    }
  } catch (const std::bad_alloc&) {
    s.has_failed = true;
  }
  Py_RETURN_NONE;
}

// evicts(keys...) -> whether any block that was evicted, and is not taken yet, holds one of these.
PyObject* core_evicts(Core* self, PyObject* const* args, Py_ssize_t count) {
  for (const uint64_t key : self->state->now->evicted) {
    PyObject* number = PyLong_FromUnsignedLongLong(key);
    int found = number == nullptr ? -1 : 0;
    for (Py_ssize_t at = 0; found == 0 && at < count; ++at) {
      found = PySet_Contains(args[at], number);
    }
    Py_XDECREF(number);
    if (found != 0) return found < 0 ? nullptr : Py_NewRef(Py_True);
  }
  Py_RETURN_FALSE;
}

// The prefix cache was reset: what was noted until now came before.
PyObject* core_was_reset(Core* self, PyObject*) {
  State& s = *self->state;
  Changes* next = fresh(s);
  s.now->then_reset = true;
  s.sealed.push_back(s.now);
  s.now = next;
  Py_RETURN_NONE;
}

PyObject* core_forget_notes(Core* self, PyObject*) {
  State& s = *self->state;
  s.now->reset();
  for (Changes* each : s.sealed) give_back(s, each);
  s.sealed.clear();
  Py_RETURN_NONE;
}

// A request's id, as the core keeps it; empty with an error.
std::string id_of(PyObject* name) {
  Py_ssize_t length = 0;
  const char* text = PyUnicode_Check(name) ? PyUnicode_AsUTF8AndSize(name, &length) : nullptr;
  if (text == nullptr && !PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "ids are strings");
  return text == nullptr ? std::string() : std::string(text, static_cast<size_t>(length));
}

// Whether somebody in the step itself must see these calls; -1 with an error.
int are_special(const Changes& changes) {
  for (const Call& call : changes.calls) {
    PyObject* adapter = PyObject_GetAttr(call.request, s_lora);
    if (adapter == nullptr) return -1;
    const bool has_one = adapter != Py_None;
    Py_DECREF(adapter);
    if (has_one) return 1;
  }
  return 0;
}

// Notes whose blocks were cached: their sessions' names, and what prompts need still.
bool look_at_requests(State& s, Changes& changes, PyObject* sessions) {
  if (PyDict_GET_SIZE(sessions) == 0 && s.demand.empty()) return true;
  for (const Call& call : changes.calls) {
    PyObject* name = PyObject_GetAttr(call.request, s_request_id);
    if (name == nullptr) return false;
    PyObject* session = PyDict_GetItemWithError(sessions, name);
    if (session != nullptr) changes.runs[call.run].session = Py_NewRef(session);
    if (!s.demand.empty() && !PyErr_Occurred()) s.demand.computed(id_of(name), call.end);
    Py_DECREF(name);
    if (PyErr_Occurred()) return false;
  }
  return true;
}

// What changed, up to a reset or until now, as a batch; null with an error.
Batch* take_changes(Core* self, PyObject* sessions, int special) {
  State& s = *self->state;
  Changes* taken = s.now;
  if (s.sealed.empty()) {
    s.now = fresh(s);
  } else {
    taken = s.sealed.front();
    s.sealed.pop_front();
  }
  if (!special) special = are_special(*taken);
  if (special < 0 || !look_at_requests(s, *taken, sessions)) {
    give_back(s, taken);
    return nullptr;
  }
  if (!special) taken->drop_calls();
  Batch* batch;
  if (s.spare_batches.empty()) {
    batch = PyObject_GC_New(Batch, &batch_type);
    if (batch == nullptr) {
      give_back(s, taken);
      return nullptr;
    }
  } else {
    batch = s.spare_batches.back();
    s.spare_batches.pop_back();
    PyObject_Init(reinterpret_cast<PyObject*>(batch), &batch_type);
  }
  batch->core = reinterpret_cast<Core*>(Py_NewRef(reinterpret_cast<PyObject*>(self)));
  batch->changes = taken;
  ++taken->owners;
  s.cached += taken->keys.size();
  PyObject_GC_Track(batch);
  const std::lock_guard<std::mutex> locked(s.inbox_lock);
  s.inbox.push_back(taken);
  return batch;
}

bool has_failed(const State& s) {
  if (s.has_failed) {
    PyErr_SetString(PyExc_RuntimeError, "the core could not read what the pool did");
  }
  return s.has_failed;
}

// take(sessions, whole) -> Batch | None: what changed, up to a reset or until now.
PyObject* core_take(Core* self, PyObject* const* args, Py_ssize_t count) {
  State& s = *self->state;
  if (has_failed(s)) return nullptr;
  if (s.sealed.empty() && s.now->empty()) Py_RETURN_NONE;
  if (count != 2 || !PyDict_Check(args[0])) {
    PyErr_SetString(PyExc_TypeError, "take(sessions: dict, whole: bool)");
    return nullptr;
  }
  try {
    return reinterpret_cast<PyObject*>(take_changes(self, args[0], args[1] == Py_True));
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

// Noting -----------------------------------------------------------------------------------------

void note_holder(State& s, uint64_t key, int32_t id) {
  int32_t* known = s.index.find(key);
  if (known == nullptr) {
    s.index.add(key, id);
    return;
  }
  Further& more = s.further[key];
  if (more.ids.empty()) more.ids.push_back(*known);
  // One that is there already was evicted since, and comes behind the others.
  more.ids.erase(std::remove(more.ids.begin(), more.ids.end(), id), more.ids.end());
  more.ids.push_back(id);
  ++more.count;
  *known = id;
}

using Doubtful = std::vector<std::pair<uint64_t, Ids>>;  // keys of which a holder less is left

void note_evicted(State& s, Changes& changes, Doubtful& doubtful) {
  for (uint64_t key : changes.evicted) {
    if (!s.further.empty()) {
      auto more = s.further.find(key);
      if (more != s.further.end()) {
        doubtful.emplace_back(key, more->second.ids);
        if (--more->second.count == 0) s.further.erase(more);
        continue;
      }
    }
    s.index.erase(key);
    changes.gone.push_back(key);
  }
}

// Which of the evicted are there again, as they were cached last.
void find_back(Changes& changes) {
  if (changes.gone.size() == changes.evicted.size()) return;
  std::unordered_set<uint64_t> back(changes.evicted.begin(), changes.evicted.end());
  for (uint64_t key : changes.gone) back.erase(key);
  for (size_t which = changes.runs.size(); which-- > 0 && !back.empty();) {
    const Run run = changes.runs[which];
    for (size_t at = run.first; at < run.end; ++at) {
      if (back.erase(changes.keys[at]) == 0) continue;
      if (!changes.back.empty() && changes.back.back().end == at && at > run.first) {
        ++changes.back.back().end;
        continue;
      }
      Run found{at, at + 1, run.parent, run.has_parent, nullptr};
      if (at > run.first) {
        found.parent = changes.keys[at - 1];
        found.has_parent = true;
      }
      changes.back.push_back(found);
    }
  }
}

void note(State& s, Changes& changes, Doubtful& doubtful) {
  const size_t count = changes.keys.size();
  for (size_t at = 0; at < count; ++at) {
    if (at + 8 < count) s.index.prefetch_slot(changes.keys[at + 8]);
    note_holder(s, changes.keys[at], changes.ids[at]);
  }
  note_evicted(s, changes, doubtful);
  find_back(changes);
  if (changes.then_reset) {
    s.index.clear();
    s.further.clear();
  }
  changes.is_noted = true;
}

bool holds(const State& s, int32_t id, uint64_t key) {
  PyObject* hash = slot(s.block(id), s.at.hash);
  return is_hash(hash, kGroupBytes) && key_of(hash, kGroupBytes) == key;
}

// With the GIL: of keys that lost a holder, the first of those that are left is found from now on.
void settle(State& s, const Doubtful& doubtful) {
  const std::lock_guard<std::mutex> locked(s.index_lock);
  for (const auto& [key, ids] : doubtful) {
    int32_t* known = s.index.find(key);
    if (known == nullptr) continue;
    for (int32_t id : ids) {
      if (holds(s, id, key)) {
        *known = id;
        break;
      }
    }
  }
  if (s.index.size() > 2 * s.count()) {  // of blocks that were skipped: their end is never told
    s.index.keep([&s](uint64_t key, int32_t id) { return holds(s, id, key); });
    for (auto each = s.further.begin(); each != s.further.end();) {
      each = s.index.find(each->first) == nullptr ? s.further.erase(each) : std::next(each);
    }
  }
}

// work(wait) -> bytes | None: notes all that changed until now; keys that are gone, packed.
PyObject* core_work(Core* self, PyObject* wait) {
  State& s = *self->state;
  std::deque<Changes*> taken;
  Doubtful doubtful;
  bool out_of_memory = false;
  const auto work = [&] {
    {
      const std::lock_guard<std::mutex> locked(s.inbox_lock);
      taken.swap(s.inbox);
    }
    try {
      for (Changes* each : taken) {
        const std::lock_guard<std::mutex> locked(s.index_lock);
        note(s, *each, doubtful);
      }
    } catch (const std::bad_alloc&) {
      out_of_memory = true;
    }
  };
  if (wait == Py_True) {
    Py_BEGIN_ALLOW_THREADS;
    {  // no lock is held when the GIL is taken again
      const std::lock_guard<std::mutex> locked(s.work_lock);
      work();
    }
    Py_END_ALLOW_THREADS;
  } else {  // the engine's thread: a little, and left to whoever is at it
    const std::unique_lock<std::mutex> locked(s.work_lock, std::try_to_lock);
    if (!locked.owns_lock()) Py_RETURN_NONE;
    work();
  }
  settle(s, doubtful);
  std::string gone;
  for (Changes* each : taken) {
    const std::vector<uint64_t>& keys = each->gone;
    if (!keys.empty()) {
      gone.append(reinterpret_cast<const char*>(keys.data()), keys.size() * sizeof(uint64_t));
    }
    give_back(s, each);
  }
  if (out_of_memory) return PyErr_NoMemory();
  if (gone.empty()) Py_RETURN_NONE;
  return PyBytes_FromStringAndSize(gone.data(), static_cast<Py_ssize_t>(gone.size()));
}

// note(keys, ids): these blocks hold these keys too, of which nobody is told.
PyObject* core_note(Core* self, PyObject* const* args, Py_ssize_t count) {
  State& s = *self->state;
  Py_buffer keys{}, ids{};
  if (count != 2 || PyObject_GetBuffer(args[0], &keys, PyBUF_SIMPLE) != 0) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "note(keys: uint64, ids: int64)");
    return nullptr;
  }
  if (PyObject_GetBuffer(args[1], &ids, PyBUF_SIMPLE) != 0) {
    PyBuffer_Release(&keys);
    return nullptr;
  }
  const size_t length = std::min(keys.len, ids.len) / sizeof(uint64_t);
  const auto* key = static_cast<const uint64_t*>(keys.buf);
  const auto* id = static_cast<const int64_t*>(ids.buf);
  Changes* changes = fresh(s);
  for (size_t at = 0; at < length; ++at) {
    if (id[at] < 0 || static_cast<size_t>(id[at]) >= s.count()) continue;
    changes->keys.push_back(key[at]);
    changes->ids.push_back(static_cast<int32_t>(id[at]));
  }
  PyBuffer_Release(&keys);
  PyBuffer_Release(&ids);
  const std::lock_guard<std::mutex> locked(s.inbox_lock);
  s.inbox.push_back(changes);
  Py_RETURN_NONE;
}

// forget_keys(keys) -> bytes: a block of each was evicted; those that are gone by that, packed.
PyObject* core_forget_keys(Core* self, PyObject* keys) {
  State& s = *self->state;
  Py_buffer given{};
  if (PyObject_GetBuffer(keys, &given, PyBUF_SIMPLE) != 0) return nullptr;
  const auto* key = static_cast<const uint64_t*>(given.buf);
  Changes changes;
  Doubtful doubtful;
  try {
    changes.evicted.assign(key, key + given.len / sizeof(uint64_t));
    const std::lock_guard<std::mutex> locked(s.index_lock);
    note_evicted(s, changes, doubtful);
  } catch (const std::bad_alloc&) {
    PyBuffer_Release(&given);
    return PyErr_NoMemory();
  }
  PyBuffer_Release(&given);
  settle(s, doubtful);
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(changes.gone.data()),
                                   static_cast<Py_ssize_t>(changes.gone.size() * kKeyBytes));
}

PyObject* core_clear(Core* self, PyObject*) {
  const std::lock_guard<std::mutex> locked(self->state->index_lock);
  self->state->index.clear();
  self->state->further.clear();
  Py_RETURN_NONE;
}

PyObject* core_find(Core* self, PyObject* key) {
  const uint64_t wanted = PyLong_AsUnsignedLongLong(key);
  if (PyErr_Occurred()) return nullptr;
  const std::lock_guard<std::mutex> locked(self->state->index_lock);
  const int32_t* found = self->state->index.find(wanted);
  return PyLong_FromLong(found == nullptr ? kNobody : *found);
}

void find_holders(State& s, const uint64_t* key, int64_t* id, size_t length) {
  const std::lock_guard<std::mutex> in_turn(s.work_lock);  // the marks are one asker's
  ++s.stamp;
  for (size_t start = 0; start < length; start += kFoundAtOnce) {
    const std::lock_guard<std::mutex> locked(s.index_lock);
    for (size_t at = start; at < std::min(length, start + kFoundAtOnce); ++at) {
      if (at + 12 < length) s.index.prefetch_slot(key[at + 12]);
      const int32_t* found = s.index.find(key[at]);
      int32_t holder = found == nullptr ? kNobody : *found;
      if (holder != kNobody && s.stamps[holder] == s.stamp && key[s.places[holder]] == key[at]) {
        holder = kNobody;
      } else if (holder != kNobody) {
        s.stamps[holder] = s.stamp;
        s.places[holder] = static_cast<uint32_t>(at);
      }
      id[at] = holder;
    }
  }
}

// holders(keys, out): numbers of the blocks that hold keys; 0 for none, or where a key comes again.
PyObject* core_holders(Core* self, PyObject* const* args, Py_ssize_t count) {
  State& s = *self->state;
  Py_buffer keys{}, out{};
  if (count != 2 || PyObject_GetBuffer(args[0], &keys, PyBUF_SIMPLE) != 0) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "holders(keys: uint64, out: int64)");
    return nullptr;
  }
  if (PyObject_GetBuffer(args[1], &out, PyBUF_WRITABLE) != 0) {
    PyBuffer_Release(&keys);
    return nullptr;
  }
  const size_t length = std::min(keys.len, out.len) / sizeof(uint64_t);
  const auto* key = static_cast<const uint64_t*>(keys.buf);
  auto* id = static_cast<int64_t*>(out.buf);
  Py_BEGIN_ALLOW_THREADS;
  find_holders(s, key, id, length);
  Py_END_ALLOW_THREADS;
  PyBuffer_Release(&keys);
  PyBuffer_Release(&out);
  Py_RETURN_NONE;
}

// Window -----------------------------------------------------------------------------------------

// follow(keys | None, ids | None): whose victims are laid from now on.
PyObject* core_follow(Core* self, PyObject* const* args, Py_ssize_t count) {
  State& s = *self->state;
  if (s.order.obj != nullptr) PyBuffer_Release(&s.order);
  if (s.found.obj != nullptr) PyBuffer_Release(&s.found);
  s.order = s.found = Py_buffer{};
  s.next = 0;
  if (count != 2 || args[0] == Py_None) Py_RETURN_NONE;
  if (PyObject_GetBuffer(args[0], &s.order, PyBUF_SIMPLE) != 0) return nullptr;
  if (PyObject_GetBuffer(args[1], &s.found, PyBUF_SIMPLE) != 0) {
    PyBuffer_Release(&s.order);
    s.order = Py_buffer{};
    return nullptr;
  }
  if (s.order.len != s.found.len) {
    PyErr_SetString(PyExc_ValueError, "follow: as many numbers of blocks as keys are wanted");
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* core_keep(Core* self, PyObject* keys) {
  State& s = *self->state;
  Py_buffer given{};
  if (PyObject_GetBuffer(keys, &given, PyBUF_SIMPLE) != 0) return nullptr;
  const auto* key = static_cast<const uint64_t*>(given.buf);
  s.kept.clear();
  s.kept.insert(key, key + given.len / sizeof(uint64_t));
  PyBuffer_Release(&given);
  Py_RETURN_NONE;
}

void warm(const State& s, const int64_t* ids, size_t at, size_t end) {
  const auto known = [&](size_t place) {
    return place < end && ids[place] > 0 && static_cast<size_t>(ids[place]) < s.count();
  };
  if (known(at + 12)) prefetch(&reinterpret_cast<PyListObject*>(s.blocks)->ob_item[ids[at + 12]]);
  if (known(at + 6)) {
    const char* block = reinterpret_cast<const char*>(s.block(ids[at + 6]));
    prefetch(block);
    prefetch(block + 64);
  }
  if (known(at + 3)) {
    PyObject* block = s.block(ids[at + 3]);
    if (PyObject* hash = slot(block, s.at.hash)) {
      prefetch(hash);  // its count of references
      prefetch(reinterpret_cast<char*>(hash) + kHashEnd);
    }
    if (PyObject* prev = slot(block, s.at.prev)) prefetch(&slot(prev, s.at.next));
    if (PyObject* next = slot(block, s.at.next)) prefetch(&slot(next, s.at.prev));
  }
}

bool is_in_queue(const State& s, PyObject* block) {
  PyObject *prev = slot(block, s.at.prev), *next = slot(block, s.at.next);
  return slot(block, s.at.users) == zero && prev != nullptr && next != nullptr &&
         Py_TYPE(prev) == s.type && Py_TYPE(next) == s.type;
}

// The same six references, permuted among six slots: no count changes.
void move_behind(const State& s, PyObject* place, PyObject* block) {
  PyObject *prev = slot(block, s.at.prev), *next = slot(block, s.at.next);
  if (prev == place) return;
  PyObject* behind = slot(place, s.at.next);
  slot(prev, s.at.next) = next;
  slot(next, s.at.prev) = prev;
  slot(block, s.at.prev) = place;
  slot(block, s.at.next) = behind;
  slot(place, s.at.next) = block;
  slot(behind, s.at.prev) = block;
}

// lay(place, count, most, since) -> looked at: moves the next victims to behind a block.
PyObject* core_lay(Core* self, PyObject* const* args, Py_ssize_t count) {
  State& s = *self->state;
  if (count != 4 || Py_TYPE(args[0]) != s.type || slot(args[0], s.at.next) == nullptr ||
      Py_TYPE(slot(args[0], s.at.next)) != s.type) {
    PyErr_SetString(PyExc_TypeError, "lay(place: a block of the queue, count, most, since)");
    return nullptr;
  }
  const Py_ssize_t wanted = PyLong_AsSsize_t(args[1]), most = PyLong_AsSsize_t(args[2]);
  const double since = PyFloat_AsDouble(args[3]);
  if (PyErr_Occurred()) return nullptr;
  const auto* key = static_cast<const uint64_t*>(s.order.buf);
  const auto* ids = static_cast<const int64_t*>(s.found.buf);
  const auto* freed = static_cast<const double*>(s.freed.buf);
  const size_t end = s.order.len / sizeof(uint64_t);
  PyObject* place = args[0];
  Py_ssize_t laid = 0, looked = 0;
  try {
    for (; s.next < end && laid < wanted && looked < most; ++s.next) {
      warm(s, ids, s.next, end);
      const int64_t id = ids[s.next];
      if (id > 0 && static_cast<size_t>(id) < s.count() && s.victims.follows(id)) continue;
      ++looked;
      if (id <= 0 || static_cast<size_t>(id) >= s.count() || !(freed[id] <= since)) continue;
      PyObject* block = s.block(id);
      PyObject* hash = slot(block, s.at.hash);
      if (!is_hash(hash, kGroupBytes) || key_of(hash, kGroupBytes) != key[s.next]) continue;
      if (!is_in_queue(s, block) || (!s.kept.empty() && s.kept.count(key[s.next]) != 0)) continue;
      if (block == place) continue;
      s.victims.add(static_cast<int32_t>(id), hash);
      move_behind(s, place, block);
      place = block;
      ++laid;
    }
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
  return PyLong_FromSsize_t(looked);
}

// add(ids, hashes): follow blocks that somebody laid behind the last victim.
PyObject* core_add(Core* self, PyObject* const* args, Py_ssize_t count) {
  State& s = *self->state;
  if (count != 2 || !PyList_Check(args[0]) || !PyList_Check(args[1]) ||
      PyList_GET_SIZE(args[0]) != PyList_GET_SIZE(args[1])) {
    PyErr_SetString(PyExc_TypeError, "add(ids: list, hashes: list of as many)");
    return nullptr;
  }
  try {
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(args[0]); ++at) {
      const long id = PyLong_AsLong(PyList_GET_ITEM(args[0], at));
      if (id < 0 || static_cast<size_t>(id) >= s.count()) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "add: no such block");
        return nullptr;
      }
      s.victims.add(static_cast<int32_t>(id), PyList_GET_ITEM(args[1], at));
    }
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
  Py_RETURN_NONE;
}

bool stands(const State& s, size_t at) {
  PyObject* block = s.block(s.victims.id(at));
  PyObject* next = slot(block, s.at.next);
  return slot(block, s.at.hash) == s.victims.hash(at) && next != nullptr && next != Py_None;
}

// Forgets the victims at the front that are gone; returns how many are left.
size_t drop_taken(State& s) {
  Victims& victims = s.victims;
  size_t gone = 0;
  while (gone < victims.size() &&
         slot(s.block(victims.id(gone)), s.at.hash) != victims.hash(gone)) {
    ++gone;
  }
  if (gone) victims.drop_front(gone);
  return victims.size();
}

PyObject* core_drop_taken(Core* self, PyObject*) {
  return PyLong_FromSize_t(drop_taken(*self->state));
}

PyObject* core_keep_first(Core* self, PyObject* most) {
  Victims& victims = self->state->victims;
  const Py_ssize_t count = PyLong_AsSsize_t(most);
  if (PyErr_Occurred()) return nullptr;
  const auto size = static_cast<Py_ssize_t>(victims.size());
  victims.keep(std::max<Py_ssize_t>(0, std::min(size, count < 0 ? size + count : count)));
  Py_RETURN_NONE;
}

// forget(ids) -> how many of these were followed.
PyObject* core_forget(Core* self, PyObject* ids) {
  State& s = *self->state;
  if (!PyList_Check(ids) && !PyTuple_Check(ids)) {
    PyErr_SetString(PyExc_TypeError, "forget(ids: list)");
    return nullptr;
  }
  size_t gone = 0;
  for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(ids); ++at) {
    const long id = PyLong_AsLong(PySequence_Fast_GET_ITEM(ids, at));
    if (id < 0 || static_cast<size_t>(id) >= s.count()) {
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "forget: no such block");
      return nullptr;
    }
    gone += s.victims.unmark(static_cast<int32_t>(id));
  }
  if (gone) s.victims.drop_unmarked();
  return PyLong_FromSize_t(gone);
}

// anchor(since) -> the last victim that stands where a ranking of that time left it, or None.
PyObject* core_anchor(Core* self, PyObject* since) {
  State& s = *self->state;
  const double known_of = PyFloat_AsDouble(since);
  if (PyErr_Occurred()) return nullptr;
  const auto* freed = static_cast<const double*>(s.freed.buf);
  for (size_t left = s.victims.size(); left > 0; --left) {
    const int32_t id = s.victims.id(left - 1);
    if (stands(s, left - 1) && freed[id] <= known_of) return Py_NewRef(s.block(id));
    s.victims.keep(left - 1);
  }
  Py_RETURN_NONE;
}

PyObject* core_last(Core* self, void*) {
  State& s = *self->state;
  const size_t size = s.victims.size();
  if (size == 0 || !stands(s, size - 1)) Py_RETURN_NONE;
  return Py_NewRef(s.block(s.victims.id(size - 1)));
}

// look(most) -> (blocks, hashes, ids): the next victims that were not looked at.
PyObject* core_look(Core* self, PyObject* most) {
  State& s = *self->state;
  const Py_ssize_t wanted = PyLong_AsSsize_t(most);
  if (PyErr_Occurred()) return nullptr;
  const size_t first = s.victims.looked;
  const size_t count = std::min<size_t>(std::max<Py_ssize_t>(0, wanted), s.victims.size() - first);
  PyObject *blocks = PyList_New(count), *hashes = PyList_New(count);
  PyObject* ids = PyBytes_FromStringAndSize(nullptr, count * sizeof(int64_t));
  if (blocks == nullptr || hashes == nullptr || ids == nullptr) {
    Py_XDECREF(blocks);
    Py_XDECREF(hashes);
    Py_XDECREF(ids);
    return nullptr;
  }
  for (size_t at = 0; at < count; ++at) {
    const int64_t id = s.victims.id(first + at);
    PyList_SET_ITEM(blocks, at, Py_NewRef(s.block(id)));
    PyList_SET_ITEM(hashes, at, Py_NewRef(s.victims.hash(first + at)));
    std::memcpy(PyBytes_AS_STRING(ids) + at * sizeof(id), &id, sizeof(id));
  }
  s.victims.looked = first + count;
  return Py_BuildValue("(NNN)", blocks, hashes, ids);
}

// The queue's block behind ``at``; null where its end is reached.
inline PyObject* following(const State& s, PyObject* at) {
  at = slot(at, s.at.next);
  if (at == nullptr || Py_TYPE(at) != s.type) return nullptr;
  PyObject* next = slot(at, s.at.next);
  if (next == nullptr || Py_TYPE(next) != s.type) return nullptr;  // the queue's fake tail
  prefetch(next);
  prefetch(reinterpret_cast<char*>(next) + 64);
  return at;
}

// scan(behind, count, blanks) -> (blocks, hashes, ids, last): the next cached blocks of the queue.
PyObject* core_scan(Core* self, PyObject* const* args, Py_ssize_t given) {
  State& s = *self->state;
  PyObject* at = given == 3 && args[0] != Py_None ? args[0] : s.head;
  if (given != 3 || Py_TYPE(at) != s.type) {
    PyErr_SetString(PyExc_TypeError, "scan(behind: a block or None, count, blanks)");
    return nullptr;
  }
  const Py_ssize_t count = PyLong_AsSsize_t(args[1]);
  Py_ssize_t blanks = PyLong_AsSsize_t(args[2]);
  if (PyErr_Occurred()) return nullptr;
  PyObject *blocks = PyList_New(0), *hashes = PyList_New(0), *last = args[0];
  std::string ids;
  bool done = blocks != nullptr && hashes != nullptr;
  try {
    while (done && PyList_GET_SIZE(blocks) < count && blanks > 0) {
      at = following(s, at);
      if (at == nullptr) break;
      last = at;
      PyObject* hash = slot(at, s.at.hash);
      if (hash == nullptr || hash == Py_None) {
        --blanks;
        continue;
      }
      const int64_t id = PyLong_AsLongLong(slot(at, s.at.id));
      ids.append(reinterpret_cast<const char*>(&id), sizeof(id));
      done = !PyErr_Occurred() && PyList_Append(blocks, at) == 0 &&
             PyList_Append(hashes, hash) == 0;
    }
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
    done = false;
  }
  PyObject* numbers =
      done ? PyBytes_FromStringAndSize(ids.data(), static_cast<Py_ssize_t>(ids.size())) : nullptr;
  if (numbers == nullptr) {
    Py_XDECREF(blocks);
    Py_XDECREF(hashes);
    return nullptr;
  }
  return Py_BuildValue("(NNNO)", blocks, hashes, numbers, last);
}

// head(count) -> (blocks, hashes): what stands at the queue's head, and what each holds, or None.
PyObject* core_head(Core* self, PyObject* most) {
  State& s = *self->state;
  const Py_ssize_t count = PyLong_AsSsize_t(most);
  if (count == -1 && PyErr_Occurred()) return nullptr;
  PyObject *found = PyList_New(0), *hashes = PyList_New(0), *at = s.head;
  bool done = found != nullptr && hashes != nullptr;
  while (done && PyList_GET_SIZE(found) < count) {
    at = following(s, at);
    if (at == nullptr) break;
    PyObject* hash = slot(at, s.at.hash);
    done = PyList_Append(found, at) == 0 &&
           PyList_Append(hashes, hash == nullptr ? Py_None : hash) == 0;
  }
  if (!done) {
    Py_XDECREF(found);
    Py_XDECREF(hashes);
    return nullptr;
  }
  return Py_BuildValue("(NN)", found, hashes);
}

// freed(ids, count, now): a request gives these blocks back now.
PyObject* core_freed(Core* self, PyObject* const* args, Py_ssize_t given) {
  State& s = *self->state;
  if (given != 3 || !(PyList_Check(args[0]) || PyTuple_Check(args[0]))) {
    PyErr_SetString(PyExc_TypeError, "freed(ids: list, count, now)");
    return nullptr;
  }
  const Py_ssize_t count = PyLong_AsSsize_t(args[1]);
  const double now = PyFloat_AsDouble(args[2]);
  if (PyErr_Occurred()) return nullptr;
  auto* freed = static_cast<double*>(s.freed.buf);
  for (Py_ssize_t at = 0; at < std::min(count, PySequence_Fast_GET_SIZE(args[0])); ++at) {
    const long id = PyLong_AsLong(PySequence_Fast_GET_ITEM(args[0], at));
    if (id >= 0 && static_cast<size_t>(id) < s.count()) freed[id] = now;
  }
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}

// pack(hashes, first, end) -> bytes: keys of a request's hashes, little endian.
PyObject* module_pack(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 3 || !PyList_Check(args[0])) {
    PyErr_SetString(PyExc_TypeError, "pack(hashes: list, first, end)");
    return nullptr;
  }
  const Py_ssize_t first = PyLong_AsSsize_t(args[1]);
  const Py_ssize_t end = std::min(PyLong_AsSsize_t(args[2]), PyList_GET_SIZE(args[0]));
  if (PyErr_Occurred()) return nullptr;
  const Py_ssize_t length = std::max<Py_ssize_t>(0, end - first);
  PyObject* packed = PyBytes_FromStringAndSize(nullptr, kKeyBytes * length);
  for (Py_ssize_t at = 0; packed != nullptr && at < length; ++at) {
    if (at + 8 < length) prefetch(PyList_GET_ITEM(args[0], first + at + 8));
    PyObject* hash = PyList_GET_ITEM(args[0], first + at);
    if (!is_hash(hash, 0)) {
      Py_DECREF(packed);
      PyErr_SetString(PyExc_TypeError, "pack: hashes are bytes, 8 at least");
      return nullptr;
    }
    const uint64_t key = key_of(hash, 0);
    std::memcpy(PyBytes_AS_STRING(packed) + kKeyBytes * at, &key, kKeyBytes);
  }
  return packed;
}

// Steps ------------------------------------------------------------------------------------------

enum Due { kTake = 1, kTell = 2, kBehind = 4, kArrange = 8, kHold = 16 };

constexpr size_t kMostBehind = 128;  // steps, as in ``LateNotes``

void set(PyObject*& held, PyObject* value) {
  PyObject* before = held;
  held = Py_XNewRef(value);
  Py_XDECREF(before);
}

// pace(clock, running, sessions, emit, mailbox, max_stale_s, behind, least, share, longest_s,
// groups_take): what a step reads from now on.
PyObject* core_pace(Core* self, PyObject* args) {
  State& s = *self->state;
  PyObject *clock, *running, *sessions, *emit, *mailbox;
  double max_stale, share, longest;
  Py_ssize_t behind, least, groups_take;
  if (!PyArg_ParseTuple(args, "OO!O!OOdnnddn", &clock, &PyDict_Type, &running, &PyDict_Type,
                        &sessions, &emit, &mailbox, &max_stale, &behind, &least, &share, &longest,
                        &groups_take)) {
    return nullptr;
  }
  set(s.clock, clock);
  set(s.running, running);
  set(s.sessions, sessions);
  set(s.emit, emit);
  set(s.mailbox, mailbox);
  s.max_stale_s = max_stale;
  s.meter.tokens.assign(static_cast<size_t>(behind) + 1, 0);
  s.meter.least = least;
  s.meter.share = share;
  s.meter.longest_s = longest;
  s.groups_take = groups_take;
  Py_RETURN_NONE;
}

// Seconds; NAN with an error.
double seconds_of(PyObject* number) {
  if (number == nullptr) return NAN;
  const double seconds = PyFloat_AsDouble(number);
  Py_DECREF(number);
  return seconds;
}

// Brings the meter up to date; false with an error.
bool meter_step(State& s, int64_t tokens, double now) {
  const int goes_on = s.witness == nullptr ? 0 : PyDict_Contains(s.running, s.witness);
  if (goes_on < 0) return false;
  s.meter.stepped(tokens, goes_on != 0, now);
  if (goes_on && !s.has_changed) return true;
  s.has_changed = false;
  PyObject* newest = nullptr;
  if (PyDict_GET_SIZE(s.running) != 0) {
    PyObject* backwards = PyObject_CallMethodNoArgs(s.running, s_reversed);
    if (backwards == nullptr) return false;
    newest = PyIter_Next(backwards);
    Py_DECREF(backwards);
    if (newest == nullptr) return false;
  }
  set(s.witness, newest);
  Py_XDECREF(newest);
  return true;
}

// Whether the ranking that the queue is arranged by is the latest, and what it laid suffices; -1
// with an error.
int rests(State& s, double now) {
  PyObject* latest = PyObject_GetAttr(s.mailbox, s_ranking);
  if (latest == nullptr) return -1;
  const bool is_new = latest != s.ranking;
  if (is_new) {
    set(s.ranking, latest);
    s.ranked_at = latest == Py_None ? NAN : seconds_of(PyObject_GetAttr(latest, s_ts));
  }
  Py_DECREF(latest);
  if (is_new && PyErr_Occurred()) return -1;
  if (s.rests_on == nullptr || s.ranking != s.rests_on) return 0;
  if (!(now - s.ranked_at <= s.max_stale_s)) return 0;
  if (s.far_blank != nullptr) {
    PyObject* hash = slot(s.far_blank, s.at.hash);
    return s.pace.reach <= s.pace.most && slot(s.far_blank, s.at.users) == zero &&
           (hash == nullptr || hash == Py_None);
  }
  return s.is_settled && static_cast<int64_t>(drop_taken(s)) >= s.pace.enough();
}

// Whether nobody is held and nobody need be, as in the last step; -1 with an error.
int holds_nobody(State& s) {
  if (s.holding == nullptr) return 1;
  PyObject* advice = PyObject_GetAttr(s.mailbox, s_admission);
  if (advice == nullptr) return -1;
  const bool same = advice == s.admission;
  set(s.admission, advice);
  Py_DECREF(advice);
  if (!same) return 0;
  PyObject* rests = PyObject_GetAttr(s.holding, s_rests);
  if (rests == nullptr) return -1;
  Py_DECREF(rests);
  return rests == Py_True;
}

// Whether what changed can be queued here, and nobody else need see it; -1 with an error.
int is_plain(const State& s) {
  if (s.must_take || !s.sealed.empty()) return 0;
  const int special = are_special(*s.now);
  return special < 0 ? -1 : !special;
}

size_t behind(State& s) {  // steps whose changes are not in the index yet
  const std::lock_guard<std::mutex> locked(s.inbox_lock);
  return s.inbox.size();
}

// Queues what changed; returns how many blocks were evicted, -1 with an error.
int64_t queue_changes(Core* self) {
  State& s = *self->state;
  if (s.now->empty()) return 0;
  const auto evicted = static_cast<int64_t>(s.now->evicted.size());
  Batch* batch = take_changes(self, s.sessions, 0);
  if (batch == nullptr) return -1;
  PyObject* done = PyObject_CallOneArg(s.emit, reinterpret_cast<PyObject*>(batch));
  Py_DECREF(batch);
  if (done == nullptr) return -1;
  Py_DECREF(done);
  return evicted;
}

// step(tokens, fetched, taken) -> what is due beyond what was done, as bits of ``Due``; 0 in nearly all.
PyObject* core_step(Core* self, PyObject* const* args, Py_ssize_t count) {
  State& s = *self->state;
  if (count != 3) {
    PyErr_SetString(PyExc_TypeError, "step(tokens, fetched, taken)");
    return nullptr;
  }
  const int64_t tokens = PyLong_AsLongLong(args[0]), fetched = PyLong_AsLongLong(args[1]);
  const int64_t taken = PyLong_AsLongLong(args[2]);
  if (PyErr_Occurred() || has_failed(s)) return nullptr;
  if (s.clock == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "step: what a step reads was not said");
    return nullptr;
  }
  const double now = seconds_of(PyObject_CallNoArgs(s.clock));
  if (PyErr_Occurred() || !meter_step(s, tokens, now)) return nullptr;
  int due = 0;
  const int nobody = holds_nobody(s), plain = is_plain(s);
  if (nobody < 0 || plain < 0) return nullptr;
  if (nobody) {
    s.rested_at = now;
  } else {
    due |= kHold;
  }
  if (!plain) return PyLong_FromLong(due | kTake);
  try {
    const int64_t evicted = queue_changes(self);
    if (evicted < 0) return nullptr;
    s.pace.step_ended(evicted + taken);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
  if (s.cached >= s.tell_at) due |= kTell;
  if (behind(s) > kMostBehind) due |= kBehind;
  const int64_t take = s.groups_take;
  s.pace.expect(take * PyDict_GET_SIZE(s.running), take * s.demand.prompts,
                take * (fetched + s.demand.loaded));
  const int rest = rests(s, now);
  if (rest < 0) return nullptr;
  return PyLong_FromLong(rest ? due : due | kArrange);
}

// rest_on(ranking | None, far_blank | None, is_settled): by what nothing is to be arranged.
PyObject* core_rest_on(Core* self, PyObject* const* args, Py_ssize_t count) {
  State& s = *self->state;
  if (count != 3 || (args[1] != Py_None && Py_TYPE(args[1]) != s.type)) {
    PyErr_SetString(PyExc_TypeError, "rest_on(ranking, far_blank: a block or None, is_settled)");
    return nullptr;
  }
  set(s.rests_on, args[0] == Py_None ? nullptr : args[0]);
  set(s.far_blank, args[1] == Py_None ? nullptr : args[1]);
  s.is_settled = args[2] == Py_True;
  Py_RETURN_NONE;
}

PyObject* core_watch_holding(Core* self, PyObject* holding) {
  set(self->state->holding, holding);
  Py_RETURN_NONE;
}

PyObject* core_disturb(Core* self, PyObject*) {
  set(self->state->rests_on, nullptr);
  Py_RETURN_NONE;
}

PyObject* core_wait_for_take(Core* self, PyObject*) {
  self->state->must_take = true;
  Py_RETURN_NONE;
}

// sized(reach, most, apart, largest, fade): how many blocks steps take.
PyObject* core_sized(Core* self, PyObject* args) {
  Pace& pace = self->state->pace;
  long long reach, most, apart;
  if (!PyArg_ParseTuple(args, "LLLdd", &reach, &most, &apart, &pace.largest, &pace.fade)) {
    return nullptr;
  }
  pace.reach = reach;
  pace.most = most;
  pace.apart = std::max(1LL, apart);
  Py_RETURN_NONE;
}

// look_ahead(steps, most, least): for how many steps victims are laid, and how many of them.
PyObject* core_look_ahead(Core* self, PyObject* args) {
  Pace& pace = self->state->pace;
  long long ahead, most, least;
  if (!PyArg_ParseTuple(args, "LLL", &ahead, &most, &least)) return nullptr;
  pace.ahead = ahead;
  pace.most_ahead = most;
  pace.least_ahead = least;
  Py_RETURN_NONE;
}

// expect(decoding, prompts, loads) -> whether the next step can take more than was known.
PyObject* core_expect(Core* self, PyObject* const* args, Py_ssize_t count) {
  if (count != 3) {
    PyErr_SetString(PyExc_TypeError, "expect(decoding, prompts, loads)");
    return nullptr;
  }
  const int64_t decoding = PyLong_AsLongLong(args[0]), prompts = PyLong_AsLongLong(args[1]);
  const int64_t loads = PyLong_AsLongLong(args[2]);
  if (PyErr_Occurred()) return nullptr;
  return PyBool_FromLong(self->state->pace.expect(decoding, prompts, loads));
}

PyObject* core_step_ended(Core* self, PyObject* evicted) {
  const int64_t count = PyLong_AsLongLong(evicted);
  if (PyErr_Occurred()) return nullptr;
  self->state->pace.step_ended(count);
  Py_RETURN_NONE;
}

// looked_up(request_id, needs, has, loads): a prompt of which a step may take so many blocks.
PyObject* core_looked_up(Core* self, PyObject* const* args, Py_ssize_t count) {
  State& s = *self->state;
  if (count != 4) {
    PyErr_SetString(PyExc_TypeError, "looked_up(request_id, needs, has, loads)");
    return nullptr;
  }
  try {
    const std::string name = id_of(args[0]);
    const int64_t needs = PyLong_AsLongLong(args[1]), has = PyLong_AsLongLong(args[2]);
    const int64_t loads = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred()) return nullptr;
    s.demand.looked_up(name, needs, has, loads);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
  s.has_changed = true;
  Py_RETURN_NONE;
}

PyObject* core_finished(Core* self, PyObject* request_id) {
  State& s = *self->state;
  const std::string name = id_of(request_id);
  if (PyErr_Occurred()) return nullptr;
  s.demand.finished(name);
  s.has_changed = true;
  Py_RETURN_NONE;
}

PyObject* core_stored(Core* self, void*) { return PyLong_FromSize_t(self->state->cached); }
PyObject* core_tell_at(Core* self, void*) { return PyLong_FromSize_t(self->state->tell_at); }

int core_set_tell_at(Core* self, PyObject* value, void*) {
  const size_t blocks = value == nullptr ? SIZE_MAX : PyLong_AsSize_t(value);
  if (PyErr_Occurred()) return -1;
  self->state->tell_at = blocks;
  return 0;
}

PyObject* core_prompts(Core* self, void*) {
  return PyLong_FromLongLong(self->state->demand.prompts);
}
PyObject* core_loaded(Core* self, void*) { return PyLong_FromLongLong(self->state->demand.loaded); }
PyObject* core_taken(Core* self, void*) { return PyLong_FromLongLong(self->state->pace.taken); }
PyObject* core_reach(Core* self, void*) { return PyLong_FromLongLong(self->state->pace.reach); }
PyObject* core_reach_of_prompts(Core* self, void*) {
  return PyLong_FromLongLong(self->state->pace.prompts);
}
PyObject* core_largest_step(Core* self, void*) {
  return PyFloat_FromDouble(self->state->pace.largest);
}
PyObject* core_tokens_per_s(Core* self, void*) {
  return PyFloat_FromDouble(self->state->meter.tokens_per_s);
}
PyObject* core_rested_at(Core* self, void*) {
  return PyFloat_FromDouble(self->state->rested_at);
}

// keys(hashes, behind) -> list[int]: keys of hashes that end with ``behind`` bytes of something else.
PyObject* module_keys(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !PyList_Check(args[0])) {
    PyErr_SetString(PyExc_TypeError, "keys(hashes: list, behind)");
    return nullptr;
  }
  const long behind = PyLong_AsLong(args[1]);
  if (behind < 0) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "keys: behind is not negative");
    return nullptr;
  }
  const Py_ssize_t length = PyList_GET_SIZE(args[0]);
  PyObject* keys = PyList_New(length);
  for (Py_ssize_t at = 0; keys != nullptr && at < length; ++at) {
    if (at + 8 < length) {
      prefetch(reinterpret_cast<char*>(PyList_GET_ITEM(args[0], at + 8)) + kHashEnd);
    }
    PyObject* hash = PyList_GET_ITEM(args[0], at);
    if (!is_hash(hash, static_cast<int>(behind))) {
      PyErr_SetString(PyExc_TypeError, "keys: hashes are bytes, 8 at least");
      Py_CLEAR(keys);
      break;
    }
    PyObject* key = PyLong_FromUnsignedLongLong(key_of(hash, static_cast<int>(behind)));
    if (key == nullptr) {
      Py_CLEAR(keys);
      break;
    }
    PyList_SET_ITEM(keys, at, key);
  }
  return keys;
}

// Batches ----------------------------------------------------------------------------------------

int batch_traverse(Batch* self, visitproc visit, void* arg) {
  Py_VISIT(self->core);
  for (const Call& each : self->changes->calls) {
    Py_VISIT(each.request);
    Py_VISIT(each.blocks);
  }
  return 0;
}

void batch_dealloc(Batch* self) {
  PyObject_GC_UnTrack(self);
  Core* core = self->core;
  State& s = *core->state;
  give_back(s, self->changes);
  if (s.spare_batches.size() < kSpares) {
    s.spare_batches.push_back(self);
  } else {
    PyObject_GC_Del(self);
  }
  Py_DECREF(core);  // last: it frees those that are kept
}

PyObject* stored_event(const State& s, const Changes& changes, const Run& run) {
  const char* first = reinterpret_cast<const char*>(changes.keys.data() + run.first);
  PyObject* keys = PyBytes_FromStringAndSize(first, kKeyBytes * (run.end - run.first));
  PyObject* parent =
      run.has_parent ? PyLong_FromUnsignedLongLong(run.parent) : Py_NewRef(Py_None);
  PyObject* event = nullptr;
  if (keys != nullptr && parent != nullptr) {
    PyObject* session = run.session == nullptr ? Py_None : run.session;
    PyObject* given[] = {keys, parent, s.block_size, session};
    event = PyObject_Vectorcall(s.stored, given, 4, nullptr);
  }
  Py_XDECREF(keys);
  Py_XDECREF(parent);
  return event;
}

PyObject* removed_event(const State& s, const Changes& changes) {
  std::string keys(reinterpret_cast<const char*>(changes.gone.data()),
                   changes.gone.size() * kKeyBytes);
  for (const Run& run : changes.back) {
    keys.append(reinterpret_cast<const char*>(changes.keys.data() + run.first),
                kKeyBytes * (run.end - run.first));
  }
  return PyObject_CallFunction(s.removed, "y#", keys.data(), static_cast<Py_ssize_t>(keys.size()));
}

bool append(PyObject* list, PyObject* event) {  // takes ``event``
  if (event == nullptr) return false;
  const int failed = PyList_Append(list, event);
  Py_DECREF(event);
  return failed == 0;
}

// events() -> what is told of the changes, which are in the index from then on.
PyObject* batch_events(Batch* self, PyObject*) {
  const State& s = *self->core->state;
  PyObject* done = PyObject_CallNoArgs(s.catch_up);  // in order, also where older ones are not told
  if (done == nullptr) return nullptr;
  Py_DECREF(done);
  const Changes& changes = *self->changes;
  if (!changes.is_noted) {
    PyErr_SetString(PyExc_RuntimeError, "changes could not be noted");
    return nullptr;
  }
  PyObject* events = PyList_New(0);
  bool good = events != nullptr;
  for (size_t at = 0; good && at < changes.runs.size(); ++at) {
    good = append(events, stored_event(s, changes, changes.runs[at]));
  }
  if (good && !(changes.gone.empty() && changes.back.empty())) {
    good = append(events, removed_event(s, changes));
  }
  for (size_t at = 0; good && at < changes.back.size(); ++at) {
    good = append(events, stored_event(s, changes, changes.back[at]));
  }
  if (good && changes.then_reset) good = append(events, PyObject_CallNoArgs(s.cleared));
  if (!good) Py_CLEAR(events);
  return events;
}

// cached() -> [(request, blocks, first, end)] where somebody in the step asks, else []; once.
PyObject* batch_cached(Batch* self, PyObject*) {
  PyObject* list = PyList_New(0);
  for (const Call& call : self->changes->calls) {
    if (list == nullptr) break;
    if (!append(list, Py_BuildValue("(OOnn)", call.request, call.blocks, call.first, call.end))) {
      Py_CLEAR(list);
    }
  }
  self->changes->drop_calls();
  return list;
}

PyObject* batch_evicted(Batch* self, void*) {
  return PyLong_FromSize_t(self->changes->evicted.size());
}

PyObject* batch_stored(Batch* self, void*) {
  return PyLong_FromSize_t(self->changes->keys.size());
}

PyObject* batch_then_reset(Batch* self, void*) {
  return PyBool_FromLong(self->changes->then_reset);
}

PyObject* batch_is_special(Batch* self, void*) {
  return PyBool_FromLong(!self->changes->calls.empty());
}

PyObject* batch_evicted_hashes(Batch* self, void*) {
  const std::string& hashes = self->changes->evicted_hashes;
  return PyBytes_FromStringAndSize(hashes.data(), static_cast<Py_ssize_t>(hashes.size()));
}

PyMethodDef batch_methods[] = {
    {"events", reinterpret_cast<PyCFunction>(batch_events), METH_NOARGS, nullptr},
    {"cached", reinterpret_cast<PyCFunction>(batch_cached), METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef batch_getters[] = {
    {"evicted", reinterpret_cast<getter>(batch_evicted), nullptr, nullptr, nullptr},
    {"stored", reinterpret_cast<getter>(batch_stored), nullptr, nullptr, nullptr},
    {"then_reset", reinterpret_cast<getter>(batch_then_reset), nullptr, nullptr, nullptr},
    {"is_special", reinterpret_cast<getter>(batch_is_special), nullptr, nullptr, nullptr},
    {"evicted_hashes", reinterpret_cast<getter>(batch_evicted_hashes), nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyTypeObject batch_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

// The module -------------------------------------------------------------------------------------

PyObject* core_known(Core* self, void*) {
  const std::lock_guard<std::mutex> locked(self->state->index_lock);
  return PyLong_FromSize_t(self->state->index.size());
}

PyObject* core_behind(Core* self, void*) { return PyLong_FromSize_t(behind(*self->state)); }

PyObject* core_victims(Core* self, void*) {
  return PyLong_FromSize_t(self->state->victims.size());
}

PyObject* core_looked(Core* self, void*) {
  return PyLong_FromSize_t(self->state->victims.looked);
}

int core_set_looked(Core* self, PyObject* value, void*) {
  const Py_ssize_t looked = value == nullptr ? -1 : PyLong_AsSsize_t(value);
  if (PyErr_Occurred()) return -1;
  Victims& victims = self->state->victims;
  victims.looked = std::min<size_t>(victims.size(), std::max<Py_ssize_t>(0, looked));
  return 0;
}

PyObject* core_keep_hashes(Core* self, PyObject*) {
  self->state->keeps_hashes = 1;
  Py_RETURN_NONE;
}

PyObject* core_place(Core* self, void*) { return PyLong_FromSize_t(self->state->next); }

int core_init(Core* self, PyObject* args, PyObject*) {
  PyObject *pool, *freed, *stored, *removed, *cleared, *block_size, *catch_up;
  long group;
  Py_ssize_t places[5];
  if (!PyArg_ParseTuple(args, "OlO(nnnnn)OOOOO", &pool, &group, &freed, &places[0], &places[1],
                        &places[2], &places[3], &places[4], &stored, &removed, &cleared,
                        &block_size, &catch_up)) {
    return -1;
  }
  if (self->state != nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "a core is made once");
    return -1;
  }
  PyObject* blocks = PyObject_GetAttrString(pool, "blocks");
  if (blocks == nullptr || !PyList_Check(blocks) || PyList_GET_SIZE(blocks) == 0) {
    Py_XDECREF(blocks);
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "the pool's blocks are no list");
    return -1;
  }
  State* state = self->state = new (std::nothrow) State(PyList_GET_SIZE(blocks));
  if (state == nullptr) {
    Py_DECREF(blocks);
    PyErr_NoMemory();
    return -1;
  }
  State& s = *state;
  s.blocks = blocks;
  s.now = new Changes();
  s.group = group;
  std::copy(places, places + 5, s.arguments);
  s.stored = Py_NewRef(stored);
  s.removed = Py_NewRef(removed);
  s.cleared = Py_NewRef(cleared);
  s.block_size = Py_NewRef(block_size);
  s.catch_up = Py_NewRef(catch_up);
  s.type = reinterpret_cast<PyTypeObject*>(
      Py_NewRef(reinterpret_cast<PyObject*>(Py_TYPE(PyList_GET_ITEM(blocks, 0)))));
  for (size_t at = 0; at < s.count(); ++at) {
    if (Py_TYPE(s.block(at)) != s.type) {
      PyErr_SetString(PyExc_TypeError, "the pool's blocks are of several types");
      return -1;
    }
  }
  if ((s.at.id = slot_offset(s.type, "block_id")) < 0 ||
      (s.at.users = slot_offset(s.type, "ref_cnt")) < 0 ||
      (s.at.hash = slot_offset(s.type, "_block_hash")) < 0 ||
      (s.at.prev = slot_offset(s.type, "prev_free_block")) < 0 ||
      (s.at.next = slot_offset(s.type, "next_free_block")) < 0) {
    return -1;
  }
  PyObject* queue = PyObject_GetAttrString(pool, "free_block_queue");
  s.head = queue == nullptr ? nullptr : PyObject_GetAttrString(queue, "fake_free_list_head");
  Py_XDECREF(queue);
  s.original = PyObject_GetAttrString(pool, "cache_full_blocks");
  if (s.head == nullptr || s.original == nullptr) return -1;
  if (PyObject_GetBuffer(freed, &s.freed, PyBUF_WRITABLE) != 0) return -1;
  if (Py_TYPE(s.head) != s.type ||
      s.freed.len != static_cast<Py_ssize_t>(s.count() * sizeof(double))) {
    PyErr_SetString(PyExc_TypeError, "the queue's head is no block, or freed no float64 [blocks]");
    return -1;
  }
  return 0;
}

int core_traverse(Core* self, visitproc visit, void* arg) {
  if (self->state == nullptr) return 0;
  const State& s = *self->state;
  Py_VISIT(s.blocks);
  Py_VISIT(s.head);
  Py_VISIT(s.original);
  Py_VISIT(s.stored);
  Py_VISIT(s.removed);
  Py_VISIT(s.cleared);
  Py_VISIT(s.catch_up);
  for (PyObject* each : {s.clock, s.running, s.sessions, s.emit, s.mailbox, s.holding, s.ranking,
                         s.rests_on, s.admission}) {
    Py_VISIT(each);
  }
  if (s.now == nullptr) return 0;
  for (const Call& each : s.now->calls) {
    Py_VISIT(each.request);
    Py_VISIT(each.blocks);
  }
  return 0;
}

int core_clear_references(Core* self) {
  if (self->state == nullptr) return 0;
  State& s = *self->state;
  if (s.now != nullptr) s.now->reset();
  Py_CLEAR(s.original);
  Py_CLEAR(s.catch_up);
  for (PyObject** each : {&s.clock, &s.running, &s.sessions, &s.emit, &s.mailbox, &s.holding,
                          &s.witness, &s.ranking, &s.rests_on, &s.far_blank, &s.admission}) {
    Py_CLEAR(*each);
  }
  return 0;
}

void core_dealloc(Core* self) {
  PyObject_GC_UnTrack(self);
  if (State* s = self->state) {
    core_clear_references(self);
    for (Changes* each : s->sealed) give_back(*s, each);
    for (Changes* each : s->inbox) give_back(*s, each);
    for (Changes* each : s->spares) delete each;
    for (Batch* each : s->spare_batches) PyObject_GC_Del(each);
    delete s->now;
    if (s->order.obj != nullptr) PyBuffer_Release(&s->order);
    if (s->found.obj != nullptr) PyBuffer_Release(&s->found);
    if (s->freed.obj != nullptr) PyBuffer_Release(&s->freed);
    for (PyObject* each : {s->blocks, s->head, s->stored, s->removed, s->cleared, s->block_size,
                           reinterpret_cast<PyObject*>(s->type)}) {
      Py_XDECREF(each);
    }
    delete s;
  }
  Py_TYPE(self)->tp_free(reinterpret_cast<PyObject*>(self));
}

template <typename Function>
PyCFunction c_function(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

PyMethodDef core_methods[] = {
    {"cache_full_blocks", c_function(core_cache_full_blocks), METH_FASTCALL | METH_KEYWORDS,
     nullptr},
    {"removed", c_function(core_removed), METH_O, nullptr},
    {"keep_hashes", c_function(core_keep_hashes), METH_NOARGS, nullptr},
    {"evicts", c_function(core_evicts), METH_FASTCALL, nullptr},
    {"was_reset", c_function(core_was_reset), METH_NOARGS, nullptr},
    {"forget_notes", c_function(core_forget_notes), METH_NOARGS, nullptr},
    {"take", c_function(core_take), METH_FASTCALL, nullptr},
    {"work", c_function(core_work), METH_O, nullptr},
    {"note", c_function(core_note), METH_FASTCALL, nullptr},
    {"clear", c_function(core_clear), METH_NOARGS, nullptr},
    {"find", c_function(core_find), METH_O, nullptr},
    {"holders", c_function(core_holders), METH_FASTCALL, nullptr},
    {"follow", c_function(core_follow), METH_FASTCALL, nullptr},
    {"keep", c_function(core_keep), METH_O, nullptr},
    {"lay", c_function(core_lay), METH_FASTCALL, nullptr},
    {"drop_taken", c_function(core_drop_taken), METH_NOARGS, nullptr},
    {"keep_first", c_function(core_keep_first), METH_O, nullptr},
    {"add", c_function(core_add), METH_FASTCALL, nullptr},
    {"forget", c_function(core_forget), METH_O, nullptr},
    {"forget_keys", c_function(core_forget_keys), METH_O, nullptr},
    {"anchor", c_function(core_anchor), METH_O, nullptr},
    {"look", c_function(core_look), METH_O, nullptr},
    {"scan", c_function(core_scan), METH_FASTCALL, nullptr},
    {"head", c_function(core_head), METH_O, nullptr},
    {"freed", c_function(core_freed), METH_FASTCALL, nullptr},
    {"pace", c_function(core_pace), METH_VARARGS, nullptr},
    {"step", c_function(core_step), METH_FASTCALL, nullptr},
    {"look_ahead", c_function(core_look_ahead), METH_VARARGS, nullptr},
    {"rest_on", c_function(core_rest_on), METH_FASTCALL, nullptr},
    {"disturb", c_function(core_disturb), METH_NOARGS, nullptr},
    {"watch_holding", c_function(core_watch_holding), METH_O, nullptr},
    {"wait_for_take", c_function(core_wait_for_take), METH_NOARGS, nullptr},
    {"sized", c_function(core_sized), METH_VARARGS, nullptr},
    {"expect", c_function(core_expect), METH_FASTCALL, nullptr},
    {"step_ended", c_function(core_step_ended), METH_O, nullptr},
    {"looked_up", c_function(core_looked_up), METH_FASTCALL, nullptr},
    {"finished", c_function(core_finished), METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef core_getters[] = {
    {"known", reinterpret_cast<getter>(core_known), nullptr, nullptr, nullptr},
    {"behind", reinterpret_cast<getter>(core_behind), nullptr, nullptr, nullptr},
    {"victims", reinterpret_cast<getter>(core_victims), nullptr, nullptr, nullptr},
    {"last", reinterpret_cast<getter>(core_last), nullptr, nullptr, nullptr},
    {"looked", reinterpret_cast<getter>(core_looked), reinterpret_cast<setter>(core_set_looked),
     nullptr, nullptr},
    {"place", reinterpret_cast<getter>(core_place), nullptr, nullptr, nullptr},
    {"stored", reinterpret_cast<getter>(core_stored), nullptr, nullptr, nullptr},
    {"tell_at", reinterpret_cast<getter>(core_tell_at), reinterpret_cast<setter>(core_set_tell_at),
     nullptr, nullptr},
    {"taken", reinterpret_cast<getter>(core_taken), nullptr, nullptr, nullptr},
    {"prompts", reinterpret_cast<getter>(core_prompts), nullptr, nullptr, nullptr},
    {"loaded", reinterpret_cast<getter>(core_loaded), nullptr, nullptr, nullptr},
    {"reach", reinterpret_cast<getter>(core_reach), nullptr, nullptr, nullptr},
    {"reach_of_prompts", reinterpret_cast<getter>(core_reach_of_prompts), nullptr, nullptr, nullptr},
    {"largest_step", reinterpret_cast<getter>(core_largest_step), nullptr, nullptr, nullptr},
    {"tokens_per_s", reinterpret_cast<getter>(core_tokens_per_s), nullptr, nullptr, nullptr},
    {"rested_at", reinterpret_cast<getter>(core_rested_at), nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyTypeObject core_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

PyMethodDef module_methods[] = {{"pack", c_function(module_pack), METH_FASTCALL, nullptr},
                                {"keys", c_function(module_keys), METH_FASTCALL, nullptr},
                                {nullptr, nullptr, 0, nullptr}};

PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "kvgraph._engine", "The compiled engine core.", -1, module_methods,
    nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__engine(void) {
#ifdef Py_GIL_DISABLED
  PyErr_SetString(PyExc_ImportError,
                  "kvgraph._engine needs a Python with the GIL: it writes blocks' slots directly; "
                  "a free-threaded build runs the Python path");
  return nullptr;
#else
  batch_type.tp_name = "kvgraph._engine.Batch";
  batch_type.tp_doc = "What a step cached and evicted, until it is told.";
  batch_type.tp_basicsize = sizeof(Batch);
  batch_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
  batch_type.tp_traverse = reinterpret_cast<traverseproc>(batch_traverse);
  batch_type.tp_dealloc = reinterpret_cast<destructor>(batch_dealloc);
  batch_type.tp_methods = batch_methods;
  batch_type.tp_getset = batch_getters;
  core_type.tp_name = "kvgraph._engine.Core";
  core_type.tp_doc = "Follows one block pool; see kvgraph._engine's stub.";
  core_type.tp_basicsize = sizeof(Core);
  core_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
  core_type.tp_new = PyType_GenericNew;
  core_type.tp_init = reinterpret_cast<initproc>(core_init);
  core_type.tp_dealloc = reinterpret_cast<destructor>(core_dealloc);
  core_type.tp_traverse = reinterpret_cast<traverseproc>(core_traverse);
  core_type.tp_clear = reinterpret_cast<inquiry>(core_clear_references);
  core_type.tp_methods = core_methods;
  core_type.tp_getset = core_getters;
  if (PyType_Ready(&batch_type) < 0 || PyType_Ready(&core_type) < 0) return nullptr;
  zero = PyLong_FromLong(0);
  s_hashes = PyUnicode_InternFromString("block_hashes");
  s_request_id = PyUnicode_InternFromString("request_id");
  s_lora = PyUnicode_InternFromString("lora_request");
  s_reversed = PyUnicode_InternFromString("__reversed__");
  s_ranking = PyUnicode_InternFromString("_ranking");
  s_ts = PyUnicode_InternFromString("ts");
  s_admission = PyUnicode_InternFromString("_admission");
  s_rests = PyUnicode_InternFromString("rests");
  for (int at = 0; at < 5; ++at) s_arguments[at] = PyUnicode_InternFromString(kArguments[at]);
  PyObject* module = PyModule_Create(&module_definition);
  if (module == nullptr) return nullptr;
  if (PyModule_AddObjectRef(module, "Core", reinterpret_cast<PyObject*>(&core_type)) < 0 ||
      PyModule_AddObjectRef(module, "Batch", reinterpret_cast<PyObject*>(&batch_type)) < 0 ||
      !copies::add_types(module)) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
#endif
}
