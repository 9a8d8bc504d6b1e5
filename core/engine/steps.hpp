// A step: what happened since the last one, in one call, and how many blocks the next ones take.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <new>
#include <string>

#include "window.hpp"

namespace {

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
  if (s.next >= s.order.len / sizeof(uint64_t)) {  // the ranking names no others
    return !s.guards || static_cast<int64_t>(drop_taken(s)) >= s.pace.reach;
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
  const int special = are_special(s, *s.now);
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

// rest_on(ranking | None, far_blank | None, is_settled, guards): by what nothing is to be arranged;
// with ``guards``, protected blocks may stand behind the window.
PyObject* core_rest_on(Core* self, PyObject* const* args, Py_ssize_t count) {
  State& s = *self->state;
  if (count != 4 || (args[1] != Py_None && Py_TYPE(args[1]) != s.type)) {
    PyErr_SetString(PyExc_TypeError,
                    "rest_on(ranking, far_blank: a block or None, is_settled, guards)");
    return nullptr;
  }
  set(s.rests_on, args[0] == Py_None ? nullptr : args[0]);
  set(s.far_blank, args[1] == Py_None ? nullptr : args[1]);
  s.is_settled = args[2] == Py_True;
  s.guards = args[3] == Py_True;
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

}  // namespace
