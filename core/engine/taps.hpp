// The taps: what vLLM's block pool caches and evicts is noted, and taken by the step.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <mutex>
#include <new>
#include <string>

#include "state.hpp"

namespace {

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
int are_special(const State& s, const Changes& changes) {
  PyObject* const names[] = {s_lora, s_media};
  const int count = s.keeps_hashes ? 2 : 1;  // without tiers, nobody asks for media
  for (const Call& call : changes.calls) {
    for (int at = 0; at < count; ++at) {
      PyObject* named = PyObject_GetAttr(call.request, names[at]);
      if (named == nullptr) return -1;
      const int has_some = PyObject_IsTrue(named);
      Py_DECREF(named);
      if (has_some) return has_some;
    }
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
  if (!special) special = are_special(s, *taken);
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

}  // namespace
