// The hash map from keys to rows: slots hold rows only, keys stand in the owner's column.
// Open addressing with double hashing; see graph/columns/slots.py, which lays the slots out.
#pragma once
#include "arrays.hpp"

#include <algorithm>

namespace index_ {

constexpr int32_t EMPTY = -1, TOMBSTONE = -2, CLAIM = -3;
constexpr uint64_t MULTIPLIER = 0x9E3779B97F4A7C15ull;  // Fibonacci hashing
constexpr size_t AHEAD = 16;  // keys whose slots are fetched before they are looked at

struct Probe {
    uint64_t mask, position, step;
    Probe(uint64_t key, uint64_t mask, int shift) : mask(mask) {
        uint64_t mixed = key * MULTIPLIER;
        position = mixed >> shift;
        step = ((mixed ^ (mixed >> 29)) & mask) | 1;
    }
    void onward() { position = (position + step) & mask; }
};

struct Table {
    int32_t* slots;
    uint64_t mask;
    int shift;
    explicit Table(const Array<int32_t>& array)
        : slots(array.data()), mask(array.size() - 1), shift(64 - __builtin_ctzll(array.size())) {
        if (array.size() < 2 || (array.size() & mask)) raise_type_error("slots must be a power of two");
    }
    void fetch(uint64_t key) const { __builtin_prefetch(&slots[(key * MULTIPLIER) >> shift], 1); }
};

// The row of each of `n` keys, AHEAD at most; EMPTY where there is none. All of them are looked at in turns, a
// slot each: the memory that the next ones stand in comes meanwhile.
inline void find_few(const Table& table, const uint64_t* column, const uint64_t* keys, size_t n, int32_t* rows) {
    uint64_t positions[AHEAD], steps[AHEAD];
    uint8_t left[AHEAD];
    size_t count = n;
    for (size_t at = 0; at < n; at++) {
        Probe probe(keys[at], table.mask, table.shift);
        positions[at] = probe.position;
        steps[at] = probe.step;
        left[at] = (uint8_t)at;
        __builtin_prefetch(&table.slots[probe.position], 1);
    }
    while (count) {
        for (size_t each = 0; each < count; each++) {
            size_t at = left[each];
            rows[at] = table.slots[positions[at]];
            if (rows[at] >= 0) __builtin_prefetch(&column[(size_t)rows[at]]);
        }
        size_t kept = 0;
        for (size_t each = 0; each < count; each++) {
            size_t at = left[each];
            if (rows[at] == EMPTY || (rows[at] >= 0 && column[(size_t)rows[at]] == keys[at])) continue;
            positions[at] = (positions[at] + steps[at]) & table.mask;
            __builtin_prefetch(&table.slots[positions[at]], 1);
            left[kept++] = (uint8_t)at;
        }
        count = kept;
    }
}

// The same of any number.
inline void find_all(const Table& table, const uint64_t* column, const uint64_t* keys, size_t n, int32_t* rows) {
    for (size_t start = 0; start < n; start += AHEAD)
        find_few(table, column, keys + start, n - start < AHEAD ? n - start : AHEAD, rows + start);
}

// find(slots, key column, keys, rows out)
inline PyObject* find(Arguments with, Py_ssize_t count) {
    expect(count, 4);
    Array<int32_t> slots(with[0]);
    Array<const uint64_t> column(with[1]), keys(with[2]);
    Array<int32_t> rows(with[3]);
    if (rows.size() != keys.size()) raise_type_error("expected room for a row of each key");
    find_all(Table(slots), column.data(), keys.data(), keys.size(), rows.data());
    return nothing();
}

// claim(slots, key column, rows in use, keys, rows in and out, first places out, their slots out, whether those
// without a row were looked for) -> how many are new. A row that is given is known; where none is, a new key's row
// is CLAIM less the place where it first appears, in its slot and in `rows`. A key is looked for behind the row of
// the one before it first: what was stored together stands together.
inline PyObject* claim(Arguments with, Py_ssize_t count) {
    expect(count, 8);
    Array<int32_t> slots(with[0]);
    Array<const uint64_t> column(with[1]);
    Array<const uint8_t> alive(with[2]);
    Array<const uint64_t> keys(with[3]);
    Array<int32_t> rows(with[4]);
    Array<int64_t> first(with[5]), taken(with[6]);
    bool looked_for = PyObject_IsTrue(with[7]) == 1;
    Table table(slots);
    size_t n = keys.size(), fresh = 0, most = 0, size = column.size() < alive.size() ? column.size() : alive.size();
    if (rows.size() != n) raise_type_error("expected room for a row of each key");
    for (int32_t row : rows) most += row < 0;
    if (most > first.size() || most > taken.size()) raise_type_error("there is no room for claims");
    for (size_t start = 0; start < n; start += AHEAD) {
        size_t end = start + AHEAD < n ? start + AHEAD : n;
        bool looked = looked_for;
        for (size_t at = start; at < end; at++) {
            if (rows[at] >= 0) continue;
            size_t next = at && rows[at - 1] >= 0 ? (size_t)rows[at - 1] + 1 : size;
            if (next < size && column[next] == keys[at] && alive[next]) {
                rows[at] = (int32_t)next;
                continue;
            }
            if (!looked) {
                find_few(table, column.data(), &keys[at], end - at, &rows[at]);
                looked = true;
                if (rows[at] >= 0) continue;
            }
            Probe probe(keys[at], table.mask, table.shift);
            for (;; probe.onward()) {
                int32_t row = table.slots[probe.position];
                if (row == EMPTY) {
                    row = table.slots[probe.position] = CLAIM - (int32_t)at;
                    first[fresh] = (int64_t)at;
                    taken[fresh++] = (int64_t)probe.position;
                } else if (row == TOMBSTONE || (row >= 0 ? column[(size_t)row] : keys[(size_t)(CLAIM - row)]) != keys[at]) {
                    continue;
                }
                rows[at] = row;
                break;
            }
        }
    }
    return PyLong_FromSize_t(fresh);
}

// settle(slots, key column, keys, rows, first places, their slots, rows out, new out): the keys that were
// claimed get these rows; `new` says which of all keys are theirs
inline PyObject* settle(Arguments with, Py_ssize_t count) {
    expect(count, 8);
    Array<int32_t> slots(with[0]);
    Array<uint64_t> column(with[1]);
    Array<const uint64_t> keys(with[2]);
    Array<const int32_t> rows(with[3]);
    Array<const int64_t> first(with[4]), taken(with[5]);
    Array<int32_t> found(with[6]);
    Array<uint8_t> is_new(with[7]);
    size_t n = keys.size();
    if (first.size() < rows.size() || taken.size() < rows.size() || found.size() != n || is_new.size() != n)
        raise_type_error("keys, claims and rows differ in number");
    for (size_t at = 0; at < n; at++) is_new[at] = found[at] <= CLAIM;
    for (size_t each = 0; each < rows.size(); each++) {
        size_t at = (size_t)first[each], row = (size_t)rows[each];
        if (at >= n || row >= column.size() || (size_t)taken[each] >= slots.size())
            raise_type_error("a row is none of the table's");
        column[row] = keys[at];
        slots[(size_t)taken[each]] = found[at] = rows[each];
    }
    for (size_t at = 0; at < n; at++)  // a key that was claimed before it in this batch
        if (found[at] <= CLAIM) found[at] = found[(size_t)(CLAIM - found[at])];
    return nothing();
}

// place(slots, rows, keys): rows that are not there yet
inline PyObject* place(Arguments with, Py_ssize_t count) {
    expect(count, 3);
    Array<int32_t> slots(with[0]);
    Array<const int32_t> rows(with[1]);
    Array<const uint64_t> keys(with[2]);
    Table table(slots);
    for (size_t at = 0; at < rows.size(); at++) {
        if (at + AHEAD < rows.size()) table.fetch(keys[at + AHEAD]);
        Probe probe(keys[at], table.mask, table.shift);
        while (table.slots[probe.position] >= 0) probe.onward();
        table.slots[probe.position] = rows[at];
    }
    return nothing();
}

// place_all(key column, rows in use, first row, behind the last one, slots): those of these rows that are in use,
// and not there yet. They are read in order, which is what makes this fast.
inline PyObject* place_all(Arguments with, Py_ssize_t count) {
    expect(count, 5);
    Array<const uint64_t> column(with[0]);
    Array<const uint8_t> alive(with[1]);
    Array<int32_t> slots(with[4]);
    size_t first = (size_t)std::max<int64_t>(0, as_integer(with[2]));
    size_t end = std::min({(size_t)std::max<int64_t>(0, as_integer(with[3])), column.size(), alive.size()});
    Table table(slots);
    for (size_t row = first; row < end; row++) {
        if (row + AHEAD < end) table.fetch(column[row + AHEAD]);
        if (!alive[row]) continue;
        Probe probe(column[row], table.mask, table.shift);
        while (table.slots[probe.position] >= 0) probe.onward();
        table.slots[probe.position] = (int32_t)row;
    }
    return nothing();
}

// remove(slots, key column, rows): rows that are there
inline PyObject* remove(Arguments with, Py_ssize_t count) {
    expect(count, 3);
    Array<int32_t> slots(with[0]);
    Array<const uint64_t> column(with[1]);
    Array<const int32_t> rows(with[2]);
    Table table(slots);
    for (size_t at = 0; at < rows.size(); at++) {
        if (at + AHEAD < rows.size()) table.fetch(column[(size_t)rows[at + AHEAD]]);
        Probe probe(column[(size_t)rows[at]], table.mask, table.shift);
        int32_t row;
        while ((row = table.slots[probe.position]) != rows[at]) {
            if (row == EMPTY) {
                PyErr_Format(PyExc_KeyError, "row %d is not in the index", rows[at]);
                throw Raised{};
            }
            probe.onward();
        }
        table.slots[probe.position] = TOMBSTONE;
    }
    return nothing();
}

}  // namespace index_
