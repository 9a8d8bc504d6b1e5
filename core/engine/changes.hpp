// What a step changed: the blocks that it cached, and the keys that it evicted.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <string>
#include <vector>

#include "blocks.hpp"

namespace {

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

}  // namespace
