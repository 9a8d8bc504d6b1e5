// Columns of a table, which its Python object holds by name.
#pragma once
#include "arrays.hpp"

#include <algorithm>
#include <memory>

// A Python object with a C++ one in it.
template <class T>
struct Held {
    PyObject_HEAD
    T* held;
};

// An array as loops use it.
template <class T>
struct Values {
    T* data;
    size_t size;
    T& operator[](size_t at) const { return data[at]; }
};

inline PyObject* interned(const char* name) {
    PyObject* string = PyUnicode_InternFromString(name);
    if (!string) throw Raised{};
    return string;
}

// What an object holds under a name. An array is asked for its memory once, and then only when
// another one has taken the name: asking costs more than most loops over a request's blocks.
class Name {
public:
    explicit Name(const char* name) : name_(name) {}
    Name(const Name&) = delete;
    ~Name() { Py_XDECREF(object_); }

protected:
    // Whether another object has the name now.
    bool changed(PyObject* names) {
        if (!key_) key_ = interned(name_);
        PyObject* now = PyDict_GetItemWithError(names, key_);
        if (!now) {
            if (!PyErr_Occurred()) PyErr_Format(PyExc_AttributeError, "the table has no column '%s'", name_);
            throw Raised{};
        }
        if (now == object_) return false;
        PyObject* before = object_;
        object_ = Py_NewRef(now);
        Py_XDECREF(before);
        return true;
    }
    void forget() { Py_CLEAR(object_); }

    PyObject* object_ = nullptr;

private:
    const char* name_;
    PyObject* key_ = nullptr;  // interned, for as long as the process lives
};

// A column.
template <class T>
class Column : Name {
public:
    using Name::Name;
    Values<T> in(PyObject* names) {
        if (changed(names)) {
            view_.reset();
            try {
                view_ = std::make_unique<Array<T>>(object_);
            } catch (...) {
                forget();
                throw;
            }
        }
        return {view_->data(), view_->size()};
    }

private:
    std::unique_ptr<Array<T>> view_;
};

// Bytes, one row of them for each engine: what a loop gets is one engine's row, or all.
class Matrix : Name {
public:
    using Name::Name;
    ~Matrix() { release(); }
    Values<uint8_t> row(PyObject* names, int64_t at) {
        look(names);
        if (at < 0 || at >= view_.shape[0]) raise_type_error("an engine has no column");
        return {(uint8_t*)view_.buf + at * view_.shape[1], (size_t)view_.shape[1]};
    }
    size_t rows(PyObject* names) {
        look(names);
        return (size_t)view_.shape[0];
    }

private:
    void look(PyObject* names) {
        if (!changed(names)) return;
        release();
        int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | PyBUF_WRITABLE;
        bool seen = PyObject_GetBuffer(object_, &view_, flags) == 0;
        if (seen && view_.ndim == 2 && view_.itemsize == 1) return;
        if (seen) release();
        forget();
        if (!seen) throw Raised{};
        raise_type_error("expected a two-dimensional array of bytes");
    }
    void release() {
        if (view_.obj) PyBuffer_Release(&view_);
    }
    Py_buffer view_{};
};

// Ascending, by radix: blocks of a chain mostly stand in order already.
inline void sort_rows(std::vector<int32_t>& rows) {
    if (std::is_sorted(rows.begin(), rows.end())) return;
    int32_t most = *std::max_element(rows.begin(), rows.end());
    std::vector<int32_t> room(rows.size());
    for (int shift = 0; shift < 31 && most >> shift; shift += 11) {
        uint32_t starts[2048] = {}, sum = 0;
        for (int32_t row : rows) starts[(row >> shift) & 2047]++;
        for (uint32_t& start : starts) {
            uint32_t size = start;
            start = sum;
            sum += size;
        }
        for (int32_t row : rows) room[starts[(row >> shift) & 2047]++] = row;
        rows.swap(room);
    }
}

// Blocks that do not stand in the row behind their parent's, by parent: few, since blocks of a chain mostly
// come together. What is noted may be out of date: whoever asks looks at the columns again.
class Heads {
public:
    void note(int32_t row, int32_t parent, const Values<int32_t>& parents) {
        if (rows_.size() >= most_) tidy(parents);
        rows_.push_back(row);
        parents_.push_back(parent);
    }
    // Calls with each row that may follow a parent, those that were noted last first, until told false.
    template <class With>
    void latest_of(int32_t parent, With with) const {
        constexpr size_t PART = 256;
        for (size_t end = parents_.size(); end > 0;) {
            size_t start = end - std::min(end, PART);
            uint32_t any = 0;
            for (size_t at = start; at < end; at++) any |= parents_[at] == parent;
            for (size_t at = end; any && at-- > start;)
                if (parents_[at] == parent && !with(rows_[at])) return;
            end = start;
        }
    }
    size_t bytes() const { return 4 * (rows_.capacity() + parents_.capacity()); }

private:
    // Forget what is no longer so, and what was noted twice.
    void tidy(const Values<int32_t>& parents) {
        sort_rows(rows_);
        rows_.erase(std::unique(rows_.begin(), rows_.end()), rows_.end());
        size_t kept = 0;
        for (int32_t row : rows_)
            if ((size_t)row < parents.size && parents[(size_t)row] >= 0) rows_[kept++] = row;
        rows_.resize(kept);
        parents_.resize(kept);
        for (size_t at = 0; at < kept; at++) parents_[at] = parents[(size_t)rows_[at]];
        most_ = std::max<size_t>(4096, 2 * kept);
    }

    std::vector<int32_t> rows_, parents_;
    size_t most_ = 4096;
};

// The columns of the block table that ingest touches; see graph/tables/blocks.py.
struct BlockColumns {
    static inline PyTypeObject* type = nullptr;
    Column<int32_t> parent{"parent"}, depth{"depth"}, raised_by{"raised_by"}, session{"session"};
    Column<uint8_t> alive{"alive"}, layer{"layer"}, flags{"flags"}, stated{"stated"};
    Column<uint16_t> tokens{"tokens"};
    Column<float> importance{"importance"};
    Column<double> created{"created"}, last_attended{"last_attended"}, last_hit{"last_hit"};
    Column<uint32_t> hit_count{"hit_count"}, walkers{"walkers"}, children{"children"},
        shared_children{"shared_children"}, children_walks{"children_walks"};
    Column<uint64_t> salt{"salt"};
    Matrix tiers{"tiers"};
    Heads heads;
};

// The columns of the session table that ingest touches; see graph/tables/returns.py.
struct SessionColumns {
    static inline PyTypeObject* type = nullptr;
    Column<uint8_t> state{"state"}, stop{"stop"};
    Column<int8_t> engine{"engine"};
    Column<int32_t> turns{"turns"}, running{"running"}, tokens{"tokens"}, grown{"grown"}, asked{"asked"},
        longer{"longer"}, written{"written"}, tip{"tip"}, first_reach{"first_reach"}, reach{"reach"}, tool{"tool"};
    Column<double> last_seen{"last_seen"}, started{"started"}, expected_return{"expected_return"};
    Column<float> gap{"gap"}, last_pause{"last_pause"}, second_pause{"second_pause"}, third_pause{"third_pause"},
        mean_pause{"mean_pause"}, recent_pause{"recent_pause"}, longest_pause{"longest_pause"},
        tool_pause{"tool_pause"}, other_pause{"other_pause"}, mean_written{"mean_written"};
};

// A table as Python gives it: what is under `bound` in it remembers where its columns are.
template <class Columns>
class Table {
public:
    explicit Table(PyObject* table) : names_(PyObject_GenericGetDict(table, nullptr)) {
        static PyObject* key = interned("bound");
        if (!names_) throw Raised{};
        PyObject* bound = PyDict_GetItemWithError(names_, key);
        if (!bound || Py_TYPE(bound) != Columns::type || !reinterpret_cast<Held<Columns>*>(bound)->held) {
            Py_CLEAR(names_);
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "expected a table whose columns are bound");
            throw Raised{};
        }
        columns_ = reinterpret_cast<Held<Columns>*>(bound)->held;
    }
    Table(const Table&) = delete;
    ~Table() { Py_XDECREF(names_); }

    template <class T>
    Values<T> operator()(Column<T> Columns::*column) const {
        return (columns_->*column).in(names_);
    }
    Columns& columns() const { return *columns_; }
    // The bits of an engine's own tiers.
    Values<uint8_t> tiers(int64_t engine) const { return columns_->tiers.row(names_, engine); }
    size_t engines() const { return columns_->tiers.rows(names_); }

private:
    PyObject* names_;
    Columns* columns_;
};

using Blocks = Table<BlockColumns>;
using Sessions = Table<SessionColumns>;
