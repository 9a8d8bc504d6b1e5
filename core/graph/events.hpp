// What events carry: fields of Python's objects, and runs of events that are applied together.
#pragma once
#include "links.hpp"

#include <algorithm>
#include <unordered_map>
#include <vector>

namespace ingest {

// An attribute of an event, owned.
class Field {
public:
    Field(PyObject* event, PyObject* name) : value_(PyObject_GetAttr(event, name)) {
        if (!value_) throw Raised{};
    }
    Field(Field&& other) noexcept : value_(other.value_) { other.value_ = nullptr; }
    Field(const Field&) = delete;
    ~Field() { Py_XDECREF(value_); }
    PyObject* operator*() const { return value_; }
    const char* bytes() const { return PyBytes_AS_STRING(value_); }
    size_t size() const { return (size_t)PyBytes_GET_SIZE(value_); }

private:
    PyObject* value_;
};

inline Field hashes_of(PyObject* event) {
    static PyObject* name = interned("hashes");
    Field hashes(event, name);
    if (!PyBytes_Check(*hashes)) raise_type_error("hashes are bytes");
    return hashes;
}

inline PyObject* bytes_of_all(const std::vector<Field>& parts, const std::vector<uint64_t>& behind = {}) {
    size_t size = sizeof(uint64_t) * behind.size();
    for (const Field& part : parts) size += part.size();
    PyObject* all = PyBytes_FromStringAndSize(nullptr, (Py_ssize_t)size);
    if (!all) throw Raised{};
    char* to = PyBytes_AS_STRING(all);
    for (const Field& part : parts) {
        std::memcpy(to, part.bytes(), part.size());
        to += part.size();
    }
    if (!behind.empty()) std::memcpy(to, behind.data(), sizeof(uint64_t) * behind.size());
    return all;
}

// A reference that is given up unless somebody takes it.
class Owned {
public:
    explicit Owned(PyObject* object) : object_(object) {
        if (!object) throw Raised{};
    }
    Owned(const Owned&) = delete;
    ~Owned() { Py_XDECREF(object_); }
    PyObject* operator*() const { return object_; }
    PyObject* taken() {
        PyObject* object = object_;
        object_ = nullptr;
        return object;
    }

private:
    PyObject* object_;
};

// churn(events, type of stored blocks) -> (keys that were stored, and behind them those before the events that have
// one; how many were stored; of each event: how many, whether there is a key before them, tokens of a block, its
// session; keys that were removed, how many events are malformed). Without any session, None stands for all of them.
inline PyObject* churn(Arguments with, Py_ssize_t count) {
    expect(count, 2);
    static PyObject *parent_name = interned("parent"), *size_name = interned("block_size"),
                    *session_name = interned("session");
    Owned events(PySequence_Fast(with[0], "expected events"));
    std::vector<Field> stored, removed, sessions;
    std::vector<int64_t> counts;
    std::vector<uint64_t> parents;
    std::vector<uint8_t> parented;
    std::vector<uint16_t> sizes;
    size_t malformed = 0, blocks = 0;
    bool named = false;
    for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(*events); at++) {
        PyObject* event = PySequence_Fast_GET_ITEM(*events, at);
        Field hashes = hashes_of(event);
        if (hashes.size() % 8) {
            malformed++;
        } else if ((PyObject*)Py_TYPE(event) != with[1]) {
            removed.push_back(std::move(hashes));
        } else if (hashes.size()) {
            Field parent(event, parent_name), size(event, size_name);
            counts.push_back((int64_t)hashes.size() / 8);
            blocks += (size_t)counts.back();
            parented.push_back(*parent != Py_None);
            if (parented.back()) {
                parents.push_back(PyLong_AsUnsignedLongLong(*parent));
                if (parents.back() == UINT64_MAX && PyErr_Occurred()) throw Raised{};
            }
            sizes.push_back((uint16_t)as_integer(*size));
            sessions.emplace_back(event, session_name);
            named |= *sessions.back() != Py_None;
            stored.push_back(std::move(hashes));
        }
    }
    Owned keys(bytes_of_all(stored, parents)), gone(bytes_of_all(removed)), each(bytes_of_values(counts)),
        there(bytes_of_values(parented)), tokens(bytes_of_values(sizes)),
        names(named ? PyList_New((Py_ssize_t)sessions.size()) : Py_NewRef(Py_None));
    if (named)
        for (size_t at = 0; at < sessions.size(); at++)
            PyList_SET_ITEM(*names, (Py_ssize_t)at, Py_NewRef(*sessions[at]));
    return Py_BuildValue("(NnNNNNNn)", keys.taken(), (Py_ssize_t)blocks, each.taken(), there.taken(), tokens.taken(),
                         names.taken(), gone.taken(), (Py_ssize_t)malformed);
}

// churn_parts(events, type of stored blocks) -> where each part ends: in one, no block is removed before
// it is stored.
inline PyObject* churn_parts(Arguments with, Py_ssize_t count) {
    expect(count, 2);
    Owned events(PySequence_Fast(with[0], "expected events"));
    std::unordered_map<uint64_t, size_t> removed_in;  // by key: the last part in which it was
    std::vector<int64_t> ends;
    Py_ssize_t size = PySequence_Fast_GET_SIZE(*events);
    for (Py_ssize_t at = 0; at < size; at++) {
        PyObject* event = PySequence_Fast_GET_ITEM(*events, at);
        Field hashes = hashes_of(event);
        if (hashes.size() % 8) continue;
        bool stores = (PyObject*)Py_TYPE(event) == with[1];
        for (size_t from = 0; from < hashes.size(); from += 8) {
            uint64_t key;
            std::memcpy(&key, hashes.bytes() + from, 8);
            if (!stores) {
                removed_in[key] = ends.size();
            } else if (auto found = removed_in.find(key); found != removed_in.end() && found->second == ends.size()) {
                ends.push_back(at);
            }
        }
    }
    ends.push_back(size);
    return listed(ends);
}

// run_end(events, first, two types, bytes, least) -> (behind the last of them that are of these types, one
// after the other, with so many bytes of keys at most, told or skipped; how many they have). Each counts as
// `least` bytes at least.
inline PyObject* run_end(Arguments with, Py_ssize_t count) {
    expect(count, 5);
    static PyObject* skipped_name = interned("skipped");
    Owned events(PySequence_Fast(with[0], "expected events"));
    if (!PyTuple_Check(with[2]) || PyTuple_GET_SIZE(with[2]) != 2) raise_type_error("expected two types");
    PyObject *one = PyTuple_GET_ITEM(with[2], 0), *other = PyTuple_GET_ITEM(with[2], 1);
    Py_ssize_t at = (Py_ssize_t)std::max<int64_t>(0, as_integer(with[1]));
    int64_t most = as_integer(with[3]), least = as_integer(with[4]), size = 0;
    bool skip = PyObject_HasAttr(one, skipped_name) == 1;
    for (; at < PySequence_Fast_GET_SIZE(*events); at++) {
        PyObject *event = PySequence_Fast_GET_ITEM(*events, at), *type = (PyObject*)Py_TYPE(event);
        if (type != one && type != other) break;
        int64_t own = (int64_t)hashes_of(event).size();
        if (skip) {
            Field skipped(event, skipped_name);
            own += 8 * as_integer(*skipped);
        }
        own = std::max(own, least);
        if (size + own > most) break;
        size += own;
    }
    return pair_of(PyLong_FromSsize_t(at), PyLong_FromLongLong(size));
}

// overlap(keys, others) -> whether any of them is one of the others
inline PyObject* overlap(Arguments with, Py_ssize_t count) {
    expect(count, 2);
    Array<const uint64_t> keys(with[0]), others(with[1]);
    uint64_t marks[1024] = {};  // most of the others meet none of these bits
    auto bit = [](uint64_t key) { return (key * index_::MULTIPLIER) >> 48; };
    for (uint64_t key : keys) marks[bit(key) / 64] |= 1ull << (bit(key) % 64);
    std::vector<uint64_t> doubtful;
    for (uint64_t key : others)
        if (marks[bit(key) / 64] >> (bit(key) % 64) & 1) doubtful.push_back(key);
    if (doubtful.empty()) Py_RETURN_FALSE;
    KeySet set(doubtful.size());
    for (uint64_t key : doubtful) set.add(key);
    for (uint64_t key : keys)
        if (set.has(key)) Py_RETURN_TRUE;
    Py_RETURN_FALSE;
}

}  // namespace ingest
