// kvgraph._engine: what an engine's step pays for being observed and arranged, in C++17.
//
// Python decides, the core moves. It notes what vLLM's block pool caches and evicts, keeps the
// index from keys to blocks, makes the events, finds a ranking's blocks and lays its victims at the
// head of vLLM's free queue. The Python path beside it does the same and is the reference; a proof
// compares both on a scratch pool before an engine gets a core (hooks/vllm/core_choice.py).
//
// Threads. The scheduler's thread calls everything with the GIL. The client's thread calls ``work``
// and ``holders``, which give the GIL back for what takes long. No mutex is held by a thread that
// waits for the GIL. Within a step nothing calls back into Python but vLLM's own methods that are
// followed, and nothing is allocated on its heap but one small object, from a free list.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>

#include "batches.hpp"
#include "copies.hpp"
#include "holders.hpp"
#include "keys.hpp"
#include "state.hpp"
#include "steps.hpp"
#include "taps.hpp"
#include "window.hpp"

namespace {

// Keys of hashes ---------------------------------------------------------------------------------

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
  s_media = PyUnicode_InternFromString("mm_features");
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
