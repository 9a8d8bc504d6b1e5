// Copies of blocks in memory: which blocks have one, and in which order they go.
//
// Does for hundreds of hashes in one call what ``CopyDirectory`` does, which is the reference. All
// with the GIL, from the scheduler's thread; the client's may read. Whatever may run other code,
// as making a list may, comes before or after a change, and not between its halves.

#ifndef KVGRAPH_COPIES_HPP
#define KVGRAPH_COPIES_HPP

#include "keys.hpp"

#include <structmember.h>

#include <new>
#include <vector>

namespace copies {

enum Place : char { kNowhere, kOnce, kTwice };  // not found; its block left the pool, or is in use

struct Copy {
  PyObject_HEAD
  int64_t id, era, pins;  // see ``hooks.tiers.directory.Copy``
  PyObject* block_hash;   // owned
  char may_demote;
  bool is_chosen;  // in ``victims`` alone
  Place place;
  Copy *before, *after;  // in the order in which they go
};

// Copies in the order in which they go.
struct Line {
  Copy *first = nullptr, *last = nullptr;
  Py_ssize_t size = 0;

  void append(Copy* copy) {
    copy->before = last;
    copy->after = nullptr;
    (last == nullptr ? first : last->after) = copy;
    last = copy;
    ++size;
  }

  void remove(Copy* copy) {
    (copy->before == nullptr ? first : copy->before->after) = copy->after;
    (copy->after == nullptr ? last : copy->after->before) = copy->before;
    --size;
  }
};

// Those that are found; a reference of each is the table's. Of two hashes with one key only the
// first has a copy.
struct Table {
  explicit Table(bool is_plain) : by_key(0), plain(is_plain) {}

  KeyMap<Copy*, nullptr> by_key;
  Line once, twice;
  bool plain;  // the order is by use alone

  Line& line(Place place) { return place == kTwice ? twice : once; }

  void move(Copy* copy, Place to) {
    line(copy->place).remove(copy);
    copy->place = to;
    line(to).append(copy);
  }
};

struct Copies {
  PyObject_HEAD
  Table* table;
};

inline PyTypeObject copy_type = {PyVarObject_HEAD_INIT(nullptr, 0)};
inline PyTypeObject copies_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

// The objects of an argument, kept meanwhile.
class Items {
 public:
  explicit Items(PyObject* given) : list_(PySequence_Fast(given, "expected a sequence")) {}
  Items(const Items&) = delete;
  Items& operator=(const Items&) = delete;
  ~Items() { Py_XDECREF(list_); }

  explicit operator bool() const { return list_ != nullptr; }
  Py_ssize_t size() const { return PySequence_Fast_GET_SIZE(list_); }
  PyObject* operator[](Py_ssize_t at) const { return PySequence_Fast_GET_ITEM(list_, at); }

  bool are_copies() const {
    for (Py_ssize_t at = 0; at < size(); ++at) {
      if (Py_TYPE((*this)[at]) == &copy_type) continue;
      PyErr_SetString(PyExc_TypeError, "expected copies");
      return false;
    }
    return true;
  }

  Copy* copy(Py_ssize_t at) const { return reinterpret_cast<Copy*>((*this)[at]); }

 private:
  PyObject* list_;
};

inline bool is_same(PyObject* one, PyObject* other, int behind) {
  const Py_ssize_t size = PyBytes_GET_SIZE(one);
  return PyBytes_GET_SIZE(other) == size + behind &&
         std::memcmp(PyBytes_AS_STRING(one), PyBytes_AS_STRING(other), size) == 0;
}

// Copies of hashes that end with ``behind`` bytes of something else; null where there is none.
// Memory is asked for before it is looked at: nothing of this is in a cache.
inline void find_some(Table& table, PyObject* const* hashes, size_t count, int behind, Copy** out) {
  for (size_t at = 0; at < count; ++at) {
    __builtin_prefetch(reinterpret_cast<char*>(hashes[at]) + kHashEnd);
  }
  for (size_t at = 0; at < count; ++at) {
    if (is_hash(hashes[at], behind)) table.by_key.prefetch_slot(key_of(hashes[at], behind));
  }
  for (size_t at = 0; at < count; ++at) {
    Copy** found = nullptr;
    if (is_hash(hashes[at], behind)) found = table.by_key.find(key_of(hashes[at], behind));
    out[at] = found == nullptr ? nullptr : *found;
    if (out[at] != nullptr) __builtin_prefetch(out[at]);
  }
  for (size_t at = 0; at < count; ++at) {
    if (out[at] != nullptr) {
      __builtin_prefetch(reinterpret_cast<char*>(out[at]->block_hash) + kHashEnd);
    }
  }
  for (size_t at = 0; at < count; ++at) {
    if (out[at] != nullptr && !is_same(out[at]->block_hash, hashes[at], behind)) out[at] = nullptr;
  }
}

constexpr Py_ssize_t kAtOnce = 64;  // hashes

// The same of all of ``hashes``.
inline std::vector<Copy*> find_all(Table& table, const Items& hashes, int behind = 0) {
  std::vector<Copy*> found(static_cast<size_t>(hashes.size()));
  PyObject* some[kAtOnce];
  for (Py_ssize_t at = 0; at < hashes.size(); at += kAtOnce) {
    const Py_ssize_t count = std::min(kAtOnce, hashes.size() - at);
    for (Py_ssize_t each = 0; each < count; ++each) some[each] = hashes[at + each];
    find_some(table, some, static_cast<size_t>(count), behind, &found[static_cast<size_t>(at)]);
  }
  return found;
}

inline Copy* find_one(Table& table, PyObject* hash) {
  Copy* found;
  find_some(table, &hash, 1, 0, &found);
  return found;
}

inline PyObject* list_of(const std::vector<Copy*>& found) {
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(found.size()));
  for (size_t at = 0; list != nullptr && at < found.size(); ++at) {
    auto* each = found[at] == nullptr ? Py_None : reinterpret_cast<PyObject*>(found[at]);
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(at), Py_NewRef(each));
  }
  return list;
}

// Takes ``item``; false with an error.
inline bool append(PyObject* list, PyObject* item) {
  const bool done = item != nullptr && PyList_Append(list, item) == 0;
  Py_XDECREF(item);
  return done;
}

// Looking ----------------------------------------------------------------------------------------

inline PyObject* find(Table& table, PyObject* hash) {
  Copy* found = find_one(table, hash);
  return Py_NewRef(found == nullptr ? Py_None : reinterpret_cast<PyObject*>(found));
}

inline PyObject* find_each(Table& table, PyObject* given) {
  const Items hashes(given);
  return hashes ? list_of(find_all(table, hashes)) : nullptr;
}

inline PyObject* pinned(Table& table, PyObject* given) {
  const Items hashes(given);
  if (!hashes) return nullptr;
  const std::vector<Copy*> found = find_all(table, hashes);
  PyObject* list = list_of(found);
  for (Copy* each : found) {
    if (list != nullptr && each != nullptr) ++each->pins;
  }
  return list;
}

inline PyObject* run(Table& table, PyObject* given) {
  const Items hashes(given);
  if (!hashes) return nullptr;
  PyObject* some[kAtOnce];
  Copy* found[kAtOnce];
  for (Py_ssize_t at = 0; at < hashes.size(); at += kAtOnce) {
    const Py_ssize_t count = std::min(kAtOnce, hashes.size() - at);
    for (Py_ssize_t each = 0; each < count; ++each) some[each] = hashes[at + each];
    find_some(table, some, static_cast<size_t>(count), 0, found);
    for (Py_ssize_t each = 0; each < count; ++each) {
      if (found[each] == nullptr) return PyLong_FromSsize_t(at + each);
    }
  }
  return PyLong_FromSsize_t(hashes.size());
}

inline PyObject* hashes_of(Table& table, PyObject* given) {
  const Items keys(given);
  PyObject* list = keys ? PyList_New(keys.size()) : nullptr;
  std::vector<uint64_t> key(list == nullptr ? 0 : static_cast<size_t>(keys.size()));
  for (size_t at = 0; at < key.size(); ++at) {
    key[at] = PyLong_AsUnsignedLongLong(keys[static_cast<Py_ssize_t>(at)]);
    if (key[at] == UINT64_MAX && PyErr_Occurred()) {
      Py_DECREF(list);
      return nullptr;
    }
    table.by_key.prefetch_slot(key[at]);
  }
  std::vector<Copy*> found(key.size());
  for (size_t at = 0; at < key.size(); ++at) {
    Copy** copy = table.by_key.find(key[at]);
    found[at] = copy == nullptr ? nullptr : *copy;
    if (found[at] != nullptr) __builtin_prefetch(&found[at]->block_hash);
  }
  for (Copy* each : found) {
    if (each != nullptr) __builtin_prefetch(each->block_hash, 1);
  }
  for (size_t at = 0; at < key.size(); ++at) {
    PyObject* hash = found[at] == nullptr ? Py_None : found[at]->block_hash;
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(at), Py_NewRef(hash));
  }
  return list;
}

inline PyObject* order(Table& table, PyObject*) {
  PyObject* list = PyList_New(0);
  for (const Line* line : {&table.twice, &table.once}) {
    for (Copy* each = line->first; list != nullptr && each != nullptr; each = each->after) {
      if (PyList_Append(list, each->block_hash) != 0) Py_CLEAR(list);
    }
  }
  return list;
}

inline PyObject* holds_twice(Table& table, PyObject*) {
  return PyBool_FromLong(table.twice.size != 0);
}

inline PyObject* stands_twice(Table& table, PyObject* hash) {
  const Copy* found = find_one(table, hash);
  return PyBool_FromLong(found != nullptr && found->place == kTwice);
}

// The order --------------------------------------------------------------------------------------

inline PyObject* used(Table& table, PyObject* given) {
  const Items hashes(given);
  if (!hashes) return nullptr;
  const std::vector<Copy*> found = find_all(table, hashes);
  for (size_t at = found.size(); at-- > 0;) {
    if (found[at] != nullptr) table.move(found[at], table.plain ? kOnce : kTwice);
  }
  Py_RETURN_NONE;
}

inline PyObject* leave(Table& table, PyObject* given, int behind) {
  const Items hashes(given);
  if (!hashes) return nullptr;
  for (Copy* each : find_all(table, hashes, behind)) {
    if (each != nullptr) table.move(each, kOnce);
  }
  Py_RETURN_NONE;
}

inline PyObject* all_leave(Table& table, PyObject* hashes) { return leave(table, hashes, 0); }

inline PyObject* all_leave_pool(Table& table, PyObject* hashes) {
  if (table.twice.size == 0) Py_RETURN_NONE;
  return leave(table, hashes, kGroupBytes);
}

// Blocks without a copy --------------------------------------------------------------------------

// What advice says of copies, as ``Marks`` in ``hooks.tiers.directory``.
class Marks {
 public:
  explicit Marks(PyObject* said) {
    if (said == Py_None) return;
    if (!PyTuple_Check(said) || PyTuple_GET_SIZE(said) != 4) {
      PyErr_SetString(PyExc_TypeError, "expected marks, or None");
      return;
    }
    if (PyObject_GetBuffer(PyTuple_GET_ITEM(said, 0), &worth_, PyBUF_SIMPLE) != 0 ||
        PyObject_GetBuffer(PyTuple_GET_ITEM(said, 1), &passed_, PyBUF_WRITABLE) != 0) {
      return;
    }
    for (int each : {0, 1}) {
      PyObject* keys = PyTuple_GET_ITEM(said, 2 + each);
      const Py_ssize_t size = PyObject_Size(keys);
      if (size < 0) return;
      others_[each] = size == 0 ? nullptr : keys;
    }
    advised_ = true;
  }
  Marks(const Marks&) = delete;
  Marks& operator=(const Marks&) = delete;
  ~Marks() {
    if (worth_.obj != nullptr) PyBuffer_Release(&worth_);
    if (passed_.obj != nullptr) PyBuffer_Release(&passed_);
  }

  // Whether a block that holds ``key`` is worth a copy; -1 with an error.
  int are_for(int64_t id, uint64_t key) {
    if (!advised_) return 1;
    const auto blocks = static_cast<Py_ssize_t>(worth_.len / sizeof(uint64_t));
    if (id < 0 || id >= std::min(blocks, passed_.len)) {
      PyErr_SetString(PyExc_IndexError, "there is no such block");
      return -1;
    }
    int found = static_cast<const uint64_t*>(worth_.buf)[id] == key;
    if (found == 0 && (others_[0] != nullptr || others_[1] != nullptr)) found = is_other(key);
    if (found >= 0) static_cast<char*>(passed_.buf)[id] = found == 0;
    return found;
  }

 private:
  int is_other(uint64_t key) const {
    PyObject* number = PyLong_FromUnsignedLongLong(key);
    int found = number == nullptr ? -1 : 0;
    for (PyObject* keys : others_) {
      if (found == 0 && keys != nullptr) found = PySequence_Contains(keys, number);
    }
    Py_XDECREF(number);
    return found;
  }

  bool advised_ = false;
  Py_buffer worth_{}, passed_{};              // uint64 and bool, by block
  PyObject* others_[2] = {nullptr, nullptr};  // containers of keys; null where empty
};

// Notes the block at place ``at``, which holds ``key``, if it lacks a copy; false with an error.
inline bool note_lacking(PyObject* under_way, uint64_t key, Py_ssize_t at, int64_t place,
                         PyObject* places, PyObject* keys) {
  PyObject* number = PyLong_FromUnsignedLongLong(key);
  const int begun = number == nullptr ? -1 : PyDict_Contains(under_way, number);
  bool done = false;
  if (begun > 0) {
    PyObject* now = PyLong_FromLongLong(place);
    done = now != nullptr && PyDict_SetItem(under_way, number, now) == 0;
    Py_XDECREF(now);
  } else if (begun == 0) {
    done = PyList_Append(keys, number) == 0 && append(places, PyLong_FromSsize_t(at));
  }
  Py_XDECREF(number);
  return done;
}

// lacking(full_hashes, ids, marks, under_way, first) -> (places, keys) of blocks about to leave.
inline PyObject* lacking(Table& table, PyObject* const* args, Py_ssize_t count) {
  if (count != 5 || !PyDict_Check(args[3])) {
    PyErr_SetString(PyExc_TypeError, "lacking(full_hashes, ids, marks, under_way: dict, first)");
    return nullptr;
  }
  const Items hashes(args[0]);
  Marks marks(args[2]);
  const int64_t first = PyLong_AsLongLong(args[4]);
  Py_buffer ids{};
  if (!hashes || PyErr_Occurred() || PyObject_GetBuffer(args[1], &ids, PyBUF_SIMPLE) != 0) {
    return nullptr;
  }
  const auto* id = static_cast<const int64_t*>(ids.buf);
  for (Py_ssize_t at = 0; at < hashes.size(); ++at) {
    __builtin_prefetch(hashes[at]);
    __builtin_prefetch(reinterpret_cast<char*>(hashes[at]) + kHashEnd);
  }
  bool done = ids.len == hashes.size() * static_cast<Py_ssize_t>(sizeof(int64_t));
  for (Py_ssize_t at = 0; done && at < hashes.size(); ++at) {
    done = is_hash(hashes[at], kGroupBytes);
  }
  if (!done) PyErr_SetString(PyExc_TypeError, "lacking: of each block a hash and an int64 number");
  PyObject *places = PyList_New(0), *keys = PyList_New(0);
  done = done && places != nullptr && keys != nullptr;
  try {
    if (done && table.twice.size != 0) {
      for (Copy* each : find_all(table, hashes, kGroupBytes)) {
        if (each != nullptr) table.move(each, kOnce);
      }
    }
    for (Py_ssize_t at = 0; done && at < hashes.size(); ++at) {
      if (at + 8 < hashes.size()) table.by_key.prefetch_slot(key_of(hashes[at + 8], kGroupBytes));
      const uint64_t key = key_of(hashes[at], kGroupBytes);
      const int worth = marks.are_for(id[at], key);
      done = worth == 0 || (worth > 0 && (table.by_key.find(key) != nullptr ||
                                          note_lacking(args[3], key, at, first + at, places, keys)));
    }
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
    done = false;
  }
  PyBuffer_Release(&ids);
  PyObject* answer = done ? PyTuple_Pack(2, places, keys) : nullptr;
  Py_XDECREF(places);
  Py_XDECREF(keys);
  return answer;
}

// Changes ----------------------------------------------------------------------------------------

// make(hashes, first, era, may_demote): begins copies, numbered from ``first`` on.
inline PyObject* make(Table&, PyObject* const* args, Py_ssize_t count) {
  if (count != 4) {
    PyErr_SetString(PyExc_TypeError, "make(hashes, first, era, may_demote)");
    return nullptr;
  }
  const Items hashes(args[0]), demote(args[3]);
  const long long first = PyLong_AsLongLong(args[1]), era = PyLong_AsLongLong(args[2]);
  if (!hashes || !demote || PyErr_Occurred()) return nullptr;
  if (demote.size() != hashes.size() && demote.size() != 1) {
    PyErr_SetString(PyExc_ValueError, "make: may_demote is one for all, or one for each");
    return nullptr;
  }
  PyObject* list = PyList_New(hashes.size());
  for (Py_ssize_t at = 0; list != nullptr && at < hashes.size(); ++at) {
    Copy* made = is_hash(hashes[at], 0) ? PyObject_New(Copy, &copy_type) : nullptr;
    if (made == nullptr) {
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "make: hashes are bytes, 8 at least");
      Py_DECREF(list);
      return nullptr;
    }
    made->id = first + at;
    made->era = era;
    made->pins = 1;
    made->block_hash = Py_NewRef(hashes[at]);
    made->may_demote = demote[demote.size() == 1 ? 0 : at] == Py_True;
    made->is_chosen = false;
    made->place = kNowhere;
    made->before = made->after = nullptr;
    PyList_SET_ITEM(list, at, reinterpret_cast<PyObject*>(made));
  }
  return list;
}

// complete(copies, era) -> (hashes that are found from now on, copies that are not)
inline PyObject* complete(Table& table, PyObject* const* args, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "complete(copies, era)");
    return nullptr;
  }
  const Items given(args[0]);
  const long long era = PyLong_AsLongLong(args[1]);
  if (!given || PyErr_Occurred() || !given.are_copies()) return nullptr;
  PyObject *hashes = PyList_New(0), *refused = PyList_New(0);
  PyObject* answer = hashes != nullptr && refused != nullptr ? PyTuple_Pack(2, hashes, refused)
                                                             : nullptr;
  Py_XDECREF(hashes);
  Py_XDECREF(refused);
  for (Py_ssize_t at = 0; answer != nullptr && at < given.size(); ++at) {
    Copy* copy = given.copy(at);
    const uint64_t key = key_of(copy->block_hash, 0);
    --copy->pins;
    bool done;
    if (copy->era != era || copy->place != kNowhere || table.by_key.find(key) != nullptr) {
      done = PyList_Append(refused, given[at]) == 0;
    } else {
      table.by_key.add(key, copy);
      copy->place = kOnce;
      table.once.append(copy);
      Py_INCREF(copy);
      done = PyList_Append(hashes, copy->block_hash) == 0;
    }
    if (!done) Py_CLEAR(answer);
  }
  return answer;
}

// Notes the next that may go, until there are ``most``.
inline bool choose(std::vector<Copy*>& chosen, Copy* copy, size_t most) {
  if (copy != nullptr && copy->pins == 0 && !copy->is_chosen) {
    copy->is_chosen = true;
    chosen.push_back(copy);
  }
  return chosen.size() < most;
}

// victims(count, advised) -> the copies that go next, none of which is pinned
inline PyObject* victims(Table& table, PyObject* const* args, Py_ssize_t count) {
  const Py_ssize_t most = count == 2 ? PyLong_AsSsize_t(args[0]) : -1;
  if (count != 2) PyErr_SetString(PyExc_TypeError, "victims(count, advised)");
  if (PyErr_Occurred()) return nullptr;
  const Items advised(args[1]);
  if (!advised) return nullptr;
  std::vector<Copy*> chosen, next;
  if (!table.plain && most > 0) next = find_all(table, advised);
  const size_t enough = most > 0 ? static_cast<size_t>(most) : 0;
  chosen.reserve(std::min(enough, table.by_key.size()));  // so that nothing fails from here on
  bool more = most > 0;
  for (Copy* each = table.twice.first; more && each != nullptr; each = each->after) {
    more = choose(chosen, each, enough);
  }
  for (size_t at = 0; more && at < next.size(); ++at) more = choose(chosen, next[at], enough);
  for (Copy* each = table.once.first; more && each != nullptr; each = each->after) {
    more = choose(chosen, each, enough);
  }
  for (Copy* each : chosen) each->is_chosen = false;
  return list_of(chosen);
}

// drop(copies) -> (their hashes, the numbers of those that no job uses): found no more
inline PyObject* drop(Table& table, PyObject* given) {
  const Items dropped(given);
  if (!dropped || !dropped.are_copies()) return nullptr;
  for (Py_ssize_t at = 0; at < dropped.size(); ++at) {
    Copy** found = table.by_key.find(key_of(dropped.copy(at)->block_hash, 0));
    if (found != nullptr && *found == dropped.copy(at)) continue;
    PyErr_SetObject(PyExc_KeyError, dropped.copy(at)->block_hash);
    return nullptr;
  }
  PyObject *hashes = PyList_New(0), *unused = PyList_New(0);
  PyObject* answer =
      hashes != nullptr && unused != nullptr ? PyTuple_Pack(2, hashes, unused) : nullptr;
  Py_XDECREF(hashes);
  Py_XDECREF(unused);
  for (Py_ssize_t at = 0; answer != nullptr && at < dropped.size(); ++at) {
    Copy* copy = dropped.copy(at);
    if (copy->place == kNowhere) continue;  // it is named twice
    table.by_key.erase(key_of(copy->block_hash, 0));
    table.line(copy->place).remove(copy);
    copy->place = kNowhere;
    bool done = PyList_Append(hashes, copy->block_hash) == 0;
    if (done && copy->pins == 0) done = append(unused, PyLong_FromLongLong(copy->id));
    Py_DECREF(copy);  // ``dropped`` has it still
    if (!done) Py_CLEAR(answer);
  }
  return answer;
}

// unpin(copies) -> the numbers of those that no job uses any more, and that are not found
inline PyObject* unpin(Table&, PyObject* given) {
  const Items done(given);
  if (!done || !done.are_copies()) return nullptr;
  PyObject* unused = PyList_New(0);
  for (Py_ssize_t at = 0; unused != nullptr && at < done.size(); ++at) {
    Copy* copy = done.copy(at);
    if (--copy->pins != 0 || copy->place != kNowhere) continue;
    if (!append(unused, PyLong_FromLongLong(copy->id))) Py_CLEAR(unused);
  }
  return unused;
}

// The types --------------------------------------------------------------------------------------

template <PyObject* (*Do)(Table&, PyObject*)>
PyObject* one(Copies* self, PyObject* argument) {
  try {
    return Do(*self->table, argument);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

template <PyObject* (*Do)(Table&, PyObject* const*, Py_ssize_t)>
PyObject* several(Copies* self, PyObject* const* arguments, Py_ssize_t count) {
  try {
    return Do(*self->table, arguments, count);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

template <typename Function>
PyCFunction method(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

inline PyMethodDef copies_methods[] = {
    {"find", method(one<find>), METH_O, nullptr},
    {"find_all", method(one<find_each>), METH_O, nullptr},
    {"pinned", method(one<pinned>), METH_O, nullptr},
    {"run", method(one<run>), METH_O, nullptr},
    {"hashes_of", method(one<hashes_of>), METH_O, nullptr},
    {"order", method(one<order>), METH_NOARGS, nullptr},
    {"holds_twice", method(one<holds_twice>), METH_NOARGS, nullptr},
    {"stands_twice", method(one<stands_twice>), METH_O, nullptr},
    {"used", method(one<used>), METH_O, nullptr},
    {"all_leave", method(one<all_leave>), METH_O, nullptr},
    {"all_leave_pool", method(one<all_leave_pool>), METH_O, nullptr},
    {"lacking", method(several<lacking>), METH_FASTCALL, nullptr},
    {"make", method(several<make>), METH_FASTCALL, nullptr},
    {"complete", method(several<complete>), METH_FASTCALL, nullptr},
    {"victims", method(several<victims>), METH_FASTCALL, nullptr},
    {"drop", method(one<drop>), METH_O, nullptr},
    {"unpin", method(one<unpin>), METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr}};

inline Py_ssize_t copies_length(Copies* self) {
  return static_cast<Py_ssize_t>(self->table->by_key.size());
}

inline int copies_contains(Copies* self, PyObject* hash) {
  return find_one(*self->table, hash) != nullptr;
}

inline PyObject* copies_new(PyTypeObject* type, PyObject* args, PyObject*) {
  int plain;
  if (!PyArg_ParseTuple(args, "p", &plain)) return nullptr;
  auto* self = reinterpret_cast<Copies*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  try {
    self->table = new Table(plain != 0);
  } catch (const std::bad_alloc&) {
    Py_DECREF(self);
    return PyErr_NoMemory();
  }
  return reinterpret_cast<PyObject*>(self);
}

inline void copies_dealloc(Copies* self) {
  if (self->table != nullptr) {
    for (const Line* line : {&self->table->once, &self->table->twice}) {
      for (Copy* each = line->first; each != nullptr;) {
        Copy* next = each->after;
        each->place = kNowhere;
        Py_DECREF(each);
        each = next;
      }
    }
    delete self->table;
  }
  Py_TYPE(self)->tp_free(reinterpret_cast<PyObject*>(self));
}

inline void copy_dealloc(Copy* self) {
  Py_DECREF(self->block_hash);
  PyObject_Free(self);
}

inline PyMemberDef copy_members[] = {
    {"id", T_LONGLONG, offsetof(Copy, id), READONLY, nullptr},
    {"block_hash", T_OBJECT_EX, offsetof(Copy, block_hash), READONLY, nullptr},
    {"era", T_LONGLONG, offsetof(Copy, era), READONLY, nullptr},
    {"may_demote", T_BOOL, offsetof(Copy, may_demote), 0, nullptr},
    {"pins", T_LONGLONG, offsetof(Copy, pins), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

inline PySequenceMethods copies_sequence = {};

// Adds the types to a module; false with an error.
inline bool add_types(PyObject* module) {
  copy_type.tp_name = "kvgraph._engine.Copy";
  copy_type.tp_doc = "One block's copy in every worker's memory.";
  copy_type.tp_basicsize = sizeof(Copy);
  copy_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION;
  copy_type.tp_dealloc = reinterpret_cast<destructor>(copy_dealloc);
  copy_type.tp_members = copy_members;
  copies_sequence.sq_length = reinterpret_cast<lenfunc>(copies_length);
  copies_sequence.sq_contains = reinterpret_cast<objobjproc>(copies_contains);
  copies_type.tp_name = "kvgraph._engine.Copies";
  copies_type.tp_doc = "Copies in memory; see kvgraph._engine's stub.";
  copies_type.tp_basicsize = sizeof(Copies);
  copies_type.tp_flags = Py_TPFLAGS_DEFAULT;
  copies_type.tp_new = copies_new;
  copies_type.tp_dealloc = reinterpret_cast<destructor>(copies_dealloc);
  copies_type.tp_methods = copies_methods;
  copies_type.tp_as_sequence = &copies_sequence;
  return PyType_Ready(&copy_type) == 0 && PyType_Ready(&copies_type) == 0 &&
         PyModule_AddObjectRef(module, "Copy", reinterpret_cast<PyObject*>(&copy_type)) == 0 &&
         PyModule_AddObjectRef(module, "Copies", reinterpret_cast<PyObject*>(&copies_type)) == 0;
}

}  // namespace copies

#endif
