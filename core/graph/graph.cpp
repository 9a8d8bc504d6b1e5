// kvgraph._graph: the loops of the graph, of shadows and of the lab that pay to be compiled. Python
// decides; what is here moves numbers in arrays that Python owns, and calls nothing back.
#include "chains.hpp"
#include "columns.hpp"
#include "departures.hpp"
#include "events.hpp"
#include "held.hpp"
#include "index.hpp"
#include "lab.hpp"
#include "links.hpp"
#include "networks.hpp"
#include "pools.hpp"
#include "residency.hpp"
#include "returns.hpp"
#include "rows.hpp"
#include "scores.hpp"
#include "sessions.hpp"
#include "walks.hpp"

namespace {

template <class T>
T& held(PyObject* self) {
    T* object = reinterpret_cast<Held<T>*>(self)->held;
    if (!object) {
        PyErr_SetString(PyExc_ValueError, "it was never begun");
        throw Raised{};
    }
    return *object;
}

template <class T>
void freed(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    delete reinterpret_cast<Held<T>*>(self)->held;
    type->tp_free(self);
    Py_DECREF(type);
}

template <PyObject* (*body)(PyObject*, Arguments, Py_ssize_t)>
PyObject* method(PyObject* self, Arguments arguments, Py_ssize_t count) {
    try {
        return body(self, arguments, count);
    } catch (const Raised&) {
        return nullptr;
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    }
}

#define METHOD(name, body) \
    {name, (PyCFunction)(void (*)(void))method<body>, METH_FASTCALL, nullptr}

// LruStack(capacities)

int begin_stack(PyObject* self, PyObject* with, PyObject*) {
    PyObject* given;
    if (!PyArg_ParseTuple(with, "O", &given)) return -1;
    PyObject* capacities = PySequence_Fast(given, "expected the capacities of pools");
    if (!capacities) return -1;
    std::vector<int64_t> sizes;
    for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(capacities); at++)
        sizes.push_back(PyLong_AsLongLong(PySequence_Fast_GET_ITEM(capacities, at)));
    Py_DECREF(capacities);
    if (PyErr_Occurred()) return -1;
    try {
        auto* object = new pools::Stack(sizes);
        delete reinterpret_cast<Held<pools::Stack>*>(self)->held;
        reinterpret_cast<Held<pools::Stack>*>(self)->held = object;
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

PyObject* stack_found(PyObject* self, Arguments with, Py_ssize_t count) {
    expect(count, 2);
    Array<const int32_t> rows(with[0]);
    Array<const uint64_t> keys(with[1]);
    if (rows.size() != keys.size()) raise_type_error("expected a key for each row");
    return listed(held<pools::Stack>(self).found(rows.data(), keys.data(), rows.size()));
}

PyObject* stack_use(PyObject* self, Arguments with, Py_ssize_t count) {
    expect(count, 2);
    Array<const int32_t> rows(with[0]);
    Array<const uint64_t> keys(with[1]);
    if (rows.size() != keys.size()) raise_type_error("expected a key for each row");
    held<pools::Stack>(self).use(rows.data(), keys.data(), rows.size());
    return nothing();
}

// The walks of requests, one after the other: of each that began, how many of its blocks, up to its reach
// and without a gap, a pool held; of one that ended, -1.
template <class Pools>
PyObject* followed(Pools& pools, Arguments with, size_t pool) {
    static PyObject *rows_name = interned("rows"), *reach_name = interned("reach"), *found_name = interned("found");
    ingest::Owned walks(PySequence_Fast(with[0], "expected walks"));
    Array<const uint64_t> column(with[1]);
    std::vector<uint64_t> keys;
    std::vector<int64_t> counts;
    for (Py_ssize_t each = 0; each < PySequence_Fast_GET_SIZE(*walks); each++) {
        PyObject* walk = PySequence_Fast_GET_ITEM(*walks, each);
        ingest::Field chain(walk, rows_name), reach(walk, reach_name), found(walk, found_name);
        Array<const int32_t> rows(*chain);
        ingest::check_rows(rows, column.size());
        keys.resize(rows.size());
        for (size_t at = 0; at < rows.size(); at++) keys[at] = column[(size_t)rows[at]];
        size_t most = std::min((size_t)std::max<int64_t>(0, as_integer(*reach)), rows.size());
        bool began = as_integer(*found) >= 0;
        counts.push_back(began ? pools.found(rows.data(), keys.data(), most)[pool] : -1);
        pools.use(rows.data(), keys.data(), rows.size());
    }
    return listed(counts);
}

// follow(walks, keys by row) -> of each, how many blocks the first pool held; see `followed`
PyObject* stack_follow(PyObject* self, Arguments with, Py_ssize_t count) {
    expect(count, 2);
    auto& stack = held<pools::Stack>(self);
    if (!stack.pools()) raise_type_error("there is no pool");
    return followed(stack, with, 0);
}

template <class T>
PyObject* bytes_of(PyObject* self, Arguments, Py_ssize_t count) {
    expect(count, 0);
    return PyLong_FromSize_t(held<T>(self).bytes());
}

PyMethodDef stack_methods[] = {
    METHOD("found", stack_found),
    METHOD("use", stack_use),
    METHOD("follow", stack_follow),
    METHOD("nbytes", bytes_of<pools::Stack>),
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot stack_slots[] = {
    {Py_tp_new, (void*)PyType_GenericNew},
    {Py_tp_init, (void*)begin_stack},
    {Py_tp_dealloc, (void*)freed<pools::Stack>},
    {Py_tp_methods, stack_methods},
    {0, nullptr},
};
PyType_Spec stack_spec = {"kvgraph._graph.LruStack", sizeof(Held<pools::Stack>), 0, Py_TPFLAGS_DEFAULT, stack_slots};

// RankedPools()

int begin_ranked(PyObject* self, PyObject* with, PyObject*) {
    if (!PyArg_ParseTuple(with, "")) return -1;
    try {
        auto* object = new pools::Ranked();
        delete reinterpret_cast<Held<pools::Ranked>*>(self)->held;
        reinterpret_cast<Held<pools::Ranked>*>(self)->held = object;
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

pools::Ranked& ranked(PyObject* self) { return held<pools::Ranked>(self); }

int pool_of(PyObject* self, PyObject* number) {
    int64_t pool = as_integer(number);
    if (pool < 0 || pool >= pools::Ranked::MOST || !ranked(self).is_in((int)pool)) {
        PyErr_Format(PyExc_ValueError, "pool %lld follows nothing", (long long)pool);
        throw Raised{};
    }
    return (int)pool;
}

PyObject* ranked_join(PyObject* self, Arguments with, Py_ssize_t count) {
    expect(count, 1);
    int number = ranked(self).join(as_integer(with[0]));
    if (number < 0) {
        PyErr_Format(PyExc_ValueError, "at most %d pools follow the same requests", pools::Ranked::MOST);
        throw Raised{};
    }
    return PyLong_FromLong(number);
}

PyObject* ranked_leave(PyObject* self, Arguments with, Py_ssize_t count) {
    expect(count, 1);
    ranked(self).leave(pool_of(self, with[0]));
    return nothing();
}

PyObject* ranked_resize(PyObject* self, Arguments with, Py_ssize_t count) {
    expect(count, 2);
    ranked(self).resize(pool_of(self, with[0]), as_integer(with[1]));
    return nothing();
}

PyObject* ranked_found(PyObject* self, Arguments with, Py_ssize_t count) {
    expect(count, 2);
    Array<const int32_t> rows(with[0]);
    Array<const uint64_t> keys(with[1]);
    if (rows.size() != keys.size()) raise_type_error("expected a key for each row");
    return listed(ranked(self).found(rows.data(), keys.data(), rows.size()));
}

PyObject* ranked_use(PyObject* self, Arguments with, Py_ssize_t count) {
    expect(count, 2);
    Array<const int32_t> rows(with[0]);
    Array<const uint64_t> keys(with[1]);
    if (rows.size() != keys.size()) raise_type_error("expected a key for each row");
    ranked(self).use(rows.data(), keys.data(), rows.size());
    return nothing();
}

// follow(walks, keys by row, pool) -> as of a stack's
PyObject* ranked_follow(PyObject* self, Arguments with, Py_ssize_t count) {
    expect(count, 3);
    return followed(ranked(self), with, (size_t)pool_of(self, with[2]));
}

PyObject* ranked_seed(PyObject* self, Arguments with, Py_ssize_t count) {
    expect(count, 3);
    int number = pool_of(self, with[0]);
    Array<const int32_t> rows(with[1]);
    Array<const uint64_t> keys(with[2]);
    if (rows.size() != keys.size()) raise_type_error("expected a key for each row");
    ranked(self).seed(number, rows, keys);
    return nothing();
}

// rows(pool, keys by row now) -> bytes of int32, ascending
PyObject* ranked_rows(PyObject* self, Arguments with, Py_ssize_t count) {
    expect(count, 2);
    int number = pool_of(self, with[0]);
    Array<const uint64_t> now(with[1]);
    std::vector<int32_t> found;
    ranked(self).rows(number, now, found);
    return PyBytes_FromStringAndSize((const char*)found.data(), (Py_ssize_t)(4 * found.size()));
}

// adopt(pool, first rows, scores, lengths or None)
PyObject* ranked_adopt(PyObject* self, Arguments with, Py_ssize_t count) {
    expect(count, 4);
    int number = pool_of(self, with[0]);
    Array<const int32_t> firsts(with[1]);
    Array<const double> scores(with[2]);
    if (firsts.size() != scores.size()) raise_type_error("expected a score for each row");
    if (with[3] == Py_None) {
        ranked(self).adopt(number, firsts, scores, nullptr);
        return nothing();
    }
    Array<const int64_t> lengths(with[3]);
    if (lengths.size() != scores.size()) raise_type_error("expected a length for each row");
    ranked(self).adopt(number, firsts, scores, lengths.data());
    return nothing();
}

PyObject* ranked_use_up(PyObject* self, Arguments with, Py_ssize_t count) {
    expect(count, 1);
    ranked(self).use_up(pool_of(self, with[0]));
    return nothing();
}

PyObject* ranked_held(PyObject* self, Arguments with, Py_ssize_t count) {
    expect(count, 1);
    int64_t number = as_integer(with[0]);
    bool follows = number >= 0 && number < pools::Ranked::MOST && ranked(self).is_in((int)number);
    return PyLong_FromLongLong(follows ? ranked(self).held((int)number) : 0);
}

// used(rows, uses out)
PyObject* ranked_used(PyObject* self, Arguments with, Py_ssize_t count) {
    expect(count, 2);
    Array<const int32_t> rows(with[0]);
    Array<int64_t> uses(with[1]);
    if (rows.size() != uses.size()) raise_type_error("expected a place for each row");
    for (size_t at = 0; at < rows.size(); at++) uses[at] = ranked(self).used(rows[at]);
    return nothing();
}

PyMethodDef ranked_methods[] = {
    METHOD("join", ranked_join),     METHOD("leave", ranked_leave),   METHOD("resize", ranked_resize),
    METHOD("found", ranked_found),   METHOD("use", ranked_use),       METHOD("seed", ranked_seed),
    METHOD("rows", ranked_rows),     METHOD("adopt", ranked_adopt),   METHOD("use_up", ranked_use_up),
    METHOD("held", ranked_held),     METHOD("used", ranked_used),     METHOD("follow", ranked_follow),
    METHOD("nbytes", bytes_of<pools::Ranked>),
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot ranked_slots[] = {
    {Py_tp_new, (void*)PyType_GenericNew},
    {Py_tp_init, (void*)begin_ranked},
    {Py_tp_dealloc, (void*)freed<pools::Ranked>},
    {Py_tp_methods, ranked_methods},
    {0, nullptr},
};
PyType_Spec ranked_spec = {"kvgraph._graph.RankedPools", sizeof(Held<pools::Ranked>), 0, Py_TPFLAGS_DEFAULT,
                           ranked_slots};

// BlockColumns() and SessionColumns(): where the columns of a table are, for whoever is given the table

template <class T>
int begin_columns(PyObject* self, PyObject* with, PyObject*) {
    if (!PyArg_ParseTuple(with, "")) return -1;
    T*& columns = reinterpret_cast<Held<T>*>(self)->held;
    if (columns) return 0;
    columns = new (std::nothrow) T();
    if (!columns) PyErr_NoMemory();
    return columns ? 0 : -1;
}

template <class T>
PyType_Slot columns_slots[] = {
    {Py_tp_new, (void*)PyType_GenericNew},
    {Py_tp_init, (void*)begin_columns<T>},
    {Py_tp_dealloc, (void*)freed<T>},
    {0, nullptr},
};
PyType_Spec blocks_spec = {"kvgraph._graph.BlockColumns", sizeof(Held<BlockColumns>), 0, Py_TPFLAGS_DEFAULT,
                           columns_slots<BlockColumns>};
PyType_Spec sessions_spec = {"kvgraph._graph.SessionColumns", sizeof(Held<SessionColumns>), 0, Py_TPFLAGS_DEFAULT,
                             columns_slots<SessionColumns>};

#define FUNCTION(name, body) \
    {name, (PyCFunction)(void (*)(void))called<body>, METH_FASTCALL, nullptr}

PyMethodDef functions[] = {
    FUNCTION("find", index_::find),
    FUNCTION("claim", index_::claim),
    FUNCTION("settle", index_::settle),
    FUNCTION("place", index_::place),
    FUNCTION("place_all", index_::place_all),
    FUNCTION("remove", index_::remove),
    FUNCTION("find_chains", ingest::find_chains),
    FUNCTION("lay", ingest::lay),
    FUNCTION("extend", ingest::extend),
    FUNCTION("refresh", ingest::refresh),
    FUNCTION("chain", ingest::chain),
    FUNCTION("to_raise", ingest::to_raise),
    FUNCTION("unlink", ingest::unlink),
    FUNCTION("unheld", ingest::unheld),
    FUNCTION("walk", ingest::walk),
    FUNCTION("marked", ingest::marked),
    FUNCTION("unmark", ingest::unmark),
    FUNCTION("written", ingest::written),
    FUNCTION("block", ingest::block),
    FUNCTION("sibling", ingest::sibling),
    FUNCTION("heads_nbytes", ingest::heads_nbytes),
    FUNCTION("again", ingest::again),
    FUNCTION("reached", ingest::reached),
    FUNCTION("overlap", ingest::overlap),
    FUNCTION("note_held", held::note),
    FUNCTION("held_rows", held::rows),
    FUNCTION("unhold", ingest::unhold),
    FUNCTION("hold", ingest::hold),
    FUNCTION("churn", ingest::churn),
    FUNCTION("churn_parts", ingest::churn_parts),
    FUNCTION("tally", ingest::tally),
    FUNCTION("run_end", ingest::run_end),
    FUNCTION("departed", ingest::departed),
    FUNCTION("depart", ingest::depart),
    FUNCTION("begin_walk", sessions::begin_walk),
    FUNCTION("end_walk", sessions::end_walk),
    FUNCTION("begin_turn", sessions::begin_turn),
    FUNCTION("end_turn", sessions::end_turn),
    FUNCTION("lower", chains::lower),
    FUNCTION("highest", chains::highest),
    FUNCTION("highest_of_runs", chains::highest_of_runs),
    FUNCTION("gather", scores::gather),
    FUNCTION("runs", scores::runs),
    FUNCTION("is_any", scores::is_any),
    FUNCTION("keys_of_runs", scores::keys_of_runs),
    FUNCTION("parents", scores::parents),
    FUNCTION("by_session", scores::by_session),
    FUNCTION("chain_worth", scores::chain_worth),
    FUNCTION("gittins", returns::gittins),
    FUNCTION("credit", returns::credit),
    FUNCTION("features", returns::features),
    FUNCTION("inputs", networks::inputs),
    FUNCTION("biased", networks::biased),
    FUNCTION("swish", networks::swish),
    FUNCTION("exposure", networks::exposure),
    FUNCTION("blame", networks::blame),
    FUNCTION("back", networks::back),
    FUNCTION("moments", networks::moments),
    FUNCTION("descend", networks::descend),
    FUNCTION("lru", lab::lru),
    FUNCTION("belady", lab::belady),
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_graph", "The graph's compiled loops; see core/.", -1, functions,
    nullptr, nullptr, nullptr, nullptr,
};

bool add_type(PyObject* module, const char* name, PyType_Spec* spec, PyTypeObject** kept = nullptr) {
    PyObject* type = PyType_FromSpec(spec);
    if (!type) return false;
    if (kept) *kept = (PyTypeObject*)Py_NewRef(type);
    bool added = PyModule_AddObjectRef(module, name, type) == 0;
    Py_DECREF(type);
    return added;
}

}  // namespace

PyMODINIT_FUNC PyInit__graph() {
    PyObject* module = PyModule_Create(&definition);
    if (!module) return nullptr;
    if (!add_type(module, "LruStack", &stack_spec) || !add_type(module, "RankedPools", &ranked_spec) ||
        !add_type(module, "BlockColumns", &blocks_spec, &BlockColumns::type) ||
        !add_type(module, "SessionColumns", &sessions_spec, &SessionColumns::type)) {
        Py_DECREF(module);
        return nullptr;
    }
    return module;
}
