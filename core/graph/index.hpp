// The hash map from keys to rows: slots hold rows only, keys stand in the owner's column. Slots come in groups of
// eight, and a byte of each one's hash stands behind all slots: what is not there is seen so without a look at
// slots or keys. Open addressing, from group to group with double hashing.
#pragma once
#include "arrays.hpp"

#include <algorithm>

namespace index_ {

constexpr int32_t EMPTY = -1, TOMBSTONE = -2, CLAIM = -3;
constexpr uint64_t MULTIPLIER = 0x9E3779B97F4A7C15ull;  // Fibonacci hashing
constexpr size_t GROUP = 8;                             // slots; their bytes are looked at as one number
constexpr size_t AHEAD = 16;  // keys whose slots are fetched before they are looked at
constexpr uint64_t EACH = 0x0101010101010101ull;

// The highest bit of each byte that is zero; perhaps also of bytes above the first of them.
inline uint64_t zeros(uint64_t bytes) { return (bytes - EACH) & ~bytes & (EACH << 7); }
inline size_t first_of(uint64_t bits) { return (size_t)__builtin_ctzll(bits) / 8; }

// Slots, and bytes behind them: 0 where nothing stands.
struct Table {
    int32_t* slots;
    uint8_t* bytes;
    uint64_t mask;
    int shift;
    explicit Table(const Array<int32_t>& array) : slots(array.data()) {
        size_t count = array.size() / 5 * 4;
        if (count < 2 * GROUP || (count & (count - 1)) || count + count / 4 != array.size())
            raise_type_error("slots must be a power of two, with a byte for each behind them");
        bytes = (uint8_t*)(slots + count);
        mask = count / GROUP - 1;
        shift = 64 - __builtin_ctzll(count / GROUP);
    }

    struct Probe {
        uint64_t group, step, mask;
        uint8_t byte;
        void onward() { group = (group + step) & mask; }
    };
    Probe probe(uint64_t key) const {
        uint64_t mixed = key * MULTIPLIER;
        uint8_t byte = (uint8_t)(mixed >> 24);
        return {mixed >> shift, ((mixed ^ (mixed >> 29)) & mask) | 1, mask, (uint8_t)(byte + !byte)};
    }
    uint64_t group(uint64_t number) const {
        uint64_t eight;
        std::memcpy(&eight, bytes + GROUP * number, GROUP);
        return eight;
    }
    void fetch(uint64_t key) const { __builtin_prefetch(&bytes[GROUP * ((key * MULTIPLIER) >> shift)], 1); }
    // Fetch the slot where a key is likely to stand, or to come.
    void fetch_slot(uint64_t key) const {
        Probe way = probe(key);
        uint64_t eight = group(way.group), like = zeros(eight ^ (EACH * way.byte));
        if (!like) like = zeros(eight);
        if (like) __builtin_prefetch(&slots[GROUP * way.group + first_of(like)], 1);
    }
    void put(size_t slot, uint8_t byte, int32_t row) const {
        bytes[slot] = byte;
        slots[slot] = row;
    }

    // The first slot on a key's way that is empty, or one where a row stands that fits.
    template <class Fits>
    size_t slot(Probe probe, Fits fits) const {
        for (;; probe.onward()) {
            uint64_t eight = group(probe.group);
            for (uint64_t like = zeros(eight ^ (EACH * probe.byte)); like; like &= like - 1) {
                size_t at = GROUP * probe.group + first_of(like);
                if (fits(slots[at])) return at;
            }
            if (uint64_t none = zeros(eight)) return GROUP * probe.group + first_of(none);
        }
    }
    // The row of a key; EMPTY where there is none.
    int32_t row(const uint64_t* column, uint64_t key) const {
        size_t at = slot(probe(key), [&](int32_t row) { return row >= 0 && column[(size_t)row] == key; });
        return bytes[at] ? slots[at] : EMPTY;
    }
};

// The row of each of `n` keys, AHEAD at most; EMPTY where there is none. All of them are looked at in turns: the
// memory that the next ones stand in comes meanwhile.
inline void find_few(const Table& table, const uint64_t* column, const uint64_t* keys, size_t n, int32_t* rows) {
    size_t likely[AHEAD], count = 0;
    for (size_t at = 0; at < n; at++) table.fetch(keys[at]);
    for (size_t at = 0; at < n; at++) {
        auto probe = table.probe(keys[at]);
        if (uint64_t like = zeros(table.group(probe.group) ^ (EACH * probe.byte))) {
            likely[count] = GROUP * probe.group + first_of(like);
            __builtin_prefetch(&table.slots[likely[count++]], 1);
        }
    }
    for (size_t each = 0; each < count; each++)
        if (int32_t row = table.slots[likely[each]]; row >= 0) __builtin_prefetch(&column[(size_t)row]);
    for (size_t at = 0; at < n; at++) rows[at] = table.row(column, keys[at]);
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
        for (size_t at = start; at < end && looked; at++)
            if (rows[at] < 0) table.fetch_slot(keys[at]);
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
            auto probe = table.probe(keys[at]);
            size_t slot = table.slot(probe, [&](int32_t row) {
                return row >= 0 ? column[(size_t)row] == keys[at] : row <= CLAIM && keys[(size_t)(CLAIM - row)] == keys[at];
            });
            if (!table.bytes[slot]) {
                table.put(slot, probe.byte, CLAIM - (int32_t)at);
                first[fresh] = (int64_t)at;
                taken[fresh++] = (int64_t)slot;
            }
            rows[at] = table.slots[slot];
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
        if (at + 2 * AHEAD < rows.size()) table.fetch(keys[at + 2 * AHEAD]);
        if (at + AHEAD < rows.size()) table.fetch_slot(keys[at + AHEAD]);
        auto probe = table.probe(keys[at]);
        table.put(table.slot(probe, [](int32_t) { return false; }), probe.byte, rows[at]);
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
        if (row + 2 * AHEAD < end) table.fetch(column[row + 2 * AHEAD]);
        if (row + AHEAD < end) table.fetch_slot(column[row + AHEAD]);
        if (!alive[row]) continue;
        auto probe = table.probe(column[row]);
        table.put(table.slot(probe, [](int32_t) { return false; }), probe.byte, (int32_t)row);
    }
    return nothing();
}

// remove(slots, key column, rows) -> how many slots stay taken: rows that are there. A key is looked for beyond a
// group only where that is full, so a slot of any other is empty again.
inline PyObject* remove(Arguments with, Py_ssize_t count) {
    expect(count, 3);
    Array<int32_t> slots(with[0]);
    Array<const uint64_t> column(with[1]);
    Array<const int32_t> rows(with[2]);
    Table table(slots);
    size_t taken = 0;
    for (size_t at = 0; at < rows.size(); at++) {
        if (at + 2 * AHEAD < rows.size()) table.fetch(column[(size_t)rows[at + 2 * AHEAD]]);
        if (at + AHEAD < rows.size()) table.fetch_slot(column[(size_t)rows[at + AHEAD]]);
        size_t slot = table.slot(table.probe(column[(size_t)rows[at]]), [&](int32_t row) { return row == rows[at]; });
        if (!table.bytes[slot]) {
            PyErr_Format(PyExc_KeyError, "row %d is not in the index", rows[at]);
            throw Raised{};
        }
        bool full = !zeros(table.group(slot / GROUP));
        table.put(slot, full ? table.bytes[slot] : 0, TOMBSTONE);
        taken += full;
    }
    return PyLong_FromSize_t(taken);
}

}  // namespace index_
