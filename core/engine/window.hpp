// The window: a ranking's next victims, laid at the head of vLLM's free queue.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <new>
#include <string>

#include "holders.hpp"

namespace {

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

}  // namespace
