// The index from keys to the blocks that hold them: kept by the client's thread.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <new>
#include <string>
#include <unordered_map>

#include "taps.hpp"

namespace {

constexpr size_t kFoundAtOnce = 1024;  // keys, between two chances for others to use the index

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

}  // namespace
