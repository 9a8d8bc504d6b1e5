// Blocks of vLLM's have slots. Their offsets are looked up by name; there is no header of vLLM's.
// References to them are borrowed from the pool's list, which the core holds.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <cstdint>
#include <vector>

namespace {

constexpr int32_t kNobody = 0;  // number of vLLM's null block, which holds no key

using Ids = std::vector<int32_t>;

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

}  // namespace
