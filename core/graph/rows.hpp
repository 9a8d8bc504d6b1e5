// Rows of the block table: how they are named, made fresh for new blocks, and found when nobody holds them.
#pragma once
#include "columns.hpp"

#include <algorithm>
#include <vector>

namespace ingest {

constexpr int32_t NO_ROW = -1;
constexpr int32_t UNPLACED = 1 << 20;  // as in graph/tables/blocks.py
constexpr int32_t DEEPEST = INT32_MAX;
constexpr uint8_t SUPERSEDED = 1, SHARED = 2;  // types.BlockFlag
constexpr uint8_t HOT = 1, WARM = 2, COLD = 4;  // types.Tier

inline void check_rows(const Array<const int32_t>& rows, size_t table) {
    bool all = true;
    for (int32_t row : rows) all &= (uint32_t)row < table;
    if (!all) raise_type_error("a row is none of the table's");
}

// A row that Python names.
inline size_t row_of(PyObject* number, size_t table) {
    int64_t row = as_integer(number);
    if (row < 0 || (size_t)row >= table) raise_type_error("a row is none of the table's");
    return (size_t)row;
}

// How many rows all of these columns have.
template <class... Each>
size_t least(const Each&... columns) {
    return std::min({columns.size...});
}

template <class T>
PyObject* bytes_of_values(const std::vector<T>& values) {
    PyObject* bytes = PyBytes_FromStringAndSize((const char*)values.data(), (Py_ssize_t)(sizeof(T) * values.size()));
    if (!bytes) throw Raised{};
    return bytes;
}

inline PyObject* packed(const std::vector<int32_t>& rows) { return bytes_of_values(rows); }

inline PyObject* pair_of(PyObject* first, PyObject* second) {
    PyObject* both = first && second ? PyTuple_Pack(2, first, second) : nullptr;
    Py_XDECREF(first);
    Py_XDECREF(second);
    if (!both) throw Raised{};
    return both;
}

// unheld(blocks, first row, behind the last one, tiers) -> (those of these rows, ascending, that are in use
// and that no engine has in any of these tiers; when each was used last)
inline PyObject* unheld(Arguments with, Py_ssize_t count) {
    expect(count, 4);
    Blocks blocks(with[0]);
    auto alive = blocks(&BlockColumns::alive);
    auto attended = blocks(&BlockColumns::last_attended), hit = blocks(&BlockColumns::last_hit);
    size_t first = (size_t)std::max<int64_t>(0, as_integer(with[1]));
    size_t end = std::min((size_t)std::max<int64_t>(0, as_integer(with[2])), least(alive, attended, hit));
    uint8_t tiers = (uint8_t)as_integer(with[3]);
    std::vector<uint8_t> held(end > first ? end - first : 0, 0);
    for (size_t engine = 0; engine < blocks.engines(); engine++) {
        auto own = blocks.tiers((int64_t)engine);
        if (own.size < end) raise_type_error("an engine's tiers are too few");
        for (size_t at = 0; at < held.size(); at++) held[at] |= own[first + at];
    }
    std::vector<int32_t> rows;
    std::vector<double> used;
    rows.reserve(held.size());
    used.reserve(held.size());
    for (size_t at = 0; at < held.size(); at++) {
        size_t row = first + at;
        if (!alive[row] || (held[at] & tiers)) continue;
        rows.push_back((int32_t)row);
        used.push_back(std::max(attended[row], hit[row]));
    }
    return pair_of(packed(rows), bytes_of_values(used));
}

// refresh(columns, their fresh values as bytes, rows, matrix of bytes by engine and row, or None): whatever
// the columns' types; of the matrix, zeros.
inline PyObject* refresh(Arguments with, Py_ssize_t count) {
    expect(count, 4);
    Array<const int32_t> rows(with[2]);
    if (!PyList_Check(with[0]) || !PyList_Check(with[1]) || PyList_GET_SIZE(with[0]) != PyList_GET_SIZE(with[1]))
        raise_type_error("expected two lists of one length");
    size_t n = rows.size();
    int32_t least = 0, most = -1;
    bool consecutive = n > 0;
    for (size_t at = 0; at < n; at++) {
        least = std::min(least, rows[at]);
        most = std::max(most, rows[at]);
        consecutive &= rows[at] == rows[0] + (int32_t)at;
    }
    if (least < 0) raise_type_error("a row is none of the table's");
    for (Py_ssize_t each = 0; each < PyList_GET_SIZE(with[0]); each++) {
        Py_buffer column{};
        PyObject* value = PyList_GET_ITEM(with[1], each);
        if (PyObject_GetBuffer(PyList_GET_ITEM(with[0], each), &column, PyBUF_ND | PyBUF_WRITABLE) < 0) throw Raised{};
        bool fits = column.ndim == 1 && column.shape[0] > most && PyBytes_Check(value) &&
                    PyBytes_GET_SIZE(value) == column.itemsize;
        auto fill = [&](auto fresh) {
            using T = decltype(fresh);
            std::memcpy(&fresh, PyBytes_AS_STRING(value), sizeof(T));
            T* values = (T*)column.buf;
            if (consecutive) {
                std::fill(values + rows[0], values + rows[0] + n, fresh);
            } else {
                for (size_t at = 0; at < n; at++) values[rows[at]] = fresh;
            }
        };
        if (fits) switch (column.itemsize) {
            case 1: fill(uint8_t{}); break;
            case 2: fill(uint16_t{}); break;
            case 4: fill(uint32_t{}); break;
            case 8: fill(uint64_t{}); break;
            default: fits = false;
        }
        PyBuffer_Release(&column);
        if (!fits) raise_type_error("a column and its fresh value do not fit each other, or the rows");
    }
    if (with[3] == Py_None) return nothing();
    Py_buffer matrix{};
    if (PyObject_GetBuffer(with[3], &matrix, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0) throw Raised{};
    bool fits = matrix.ndim == 2 && matrix.itemsize == 1 && matrix.shape[1] > most;
    for (Py_ssize_t each = 0; fits && each < matrix.shape[0]; each++) {
        uint8_t* values = (uint8_t*)matrix.buf + each * matrix.shape[1];
        if (consecutive) std::memset(values + rows[0], 0, n);
        else
            for (int32_t row : rows) values[row] = 0;
    }
    PyBuffer_Release(&matrix);
    if (!fits) raise_type_error("expected a matrix of bytes with a column for each row");
    return nothing();
}

}  // namespace ingest
