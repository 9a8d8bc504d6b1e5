// Batches: what a step changed, until it is told as events.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <string>

#include "state.hpp"

namespace {

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

}  // namespace
