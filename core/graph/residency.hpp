// Which blocks an engine's pool holds.
#pragma once
#include "index.hpp"
#include "rows.hpp"

#include <algorithm>
#include <vector>

namespace ingest {

// unhold(slots, key column, tiers of an engine, keys) -> the rows, ascending, that were in its pool and
// are no longer
inline PyObject* unhold(Arguments with, Py_ssize_t count) {
    expect(count, 4);
    Array<int32_t> slots(with[0]);
    Array<const uint64_t> column(with[1]);
    Array<uint8_t> tiers(with[2]);
    Array<const uint64_t> keys(with[3]);
    index_::Table table(slots);
    size_t n = keys.size(), size = std::min(column.size(), tiers.size());
    std::vector<int32_t> gone;
    gone.reserve(n);
    int64_t last = -1, step = 1;  // blocks of a chain leave together, one way or the other
    auto leaves = [&](int64_t row, uint64_t key) {
        return row >= 0 && (size_t)row < size && column[(size_t)row] == key && (tiers[(size_t)row] & HOT);
    };
    for (size_t start = 0; start < n; start += index_::AHEAD) {
        size_t end = std::min(n, start + index_::AHEAD);
        bool fetched = false;
        for (size_t at = start; at < end; at++) {
            int64_t row = last + step;
            if (last < 0 || !leaves(row, keys[at])) {
                row = last - step;
                if (last >= 0 && leaves(row, keys[at])) {
                    step = -step;
                } else {
                    for (size_t each = at; each < end && !fetched; each++) table.fetch(keys[each]);
                    fetched = true;
                    int32_t found = table.row(column.data(), keys[at]);
                    if (!leaves(found, keys[at])) continue;
                    row = found;
                }
            }
            tiers[(size_t)row] &= (uint8_t)~HOT;
            gone.push_back((int32_t)row);
            last = row;
        }
    }
    sort_rows(gone);
    return packed(gone);
}

// hold(blocks, engine, protected layers, rows, counts, sizes, claims) -> how many of them are protected.
// Runs of blocks, each of so many tokens and stored by a session, which owns those that nobody did; of no
// session: NO_ROW.
inline PyObject* hold(Arguments with, Py_ssize_t count) {
    expect(count, 7);
    Blocks blocks(with[0]);
    auto tiers = blocks.tiers(as_integer(with[1]));
    auto tokens = blocks(&BlockColumns::tokens);
    auto sessions = blocks(&BlockColumns::session);
    auto layers = blocks(&BlockColumns::layer), stated = blocks(&BlockColumns::stated);
    Array<const uint8_t> is_protected(with[2]);
    Array<const int32_t> rows(with[3]);
    Array<const int64_t> counts(with[4]);
    Array<const uint16_t> sizes(with[5]);
    Array<const int32_t> claims(with[6]);
    check_rows(rows, least(tiers, tokens, sessions, layers, stated));
    if (sizes.size() != counts.size() || claims.size() != counts.size() || is_protected.size() != 256)
        raise_type_error("a size and a session are needed for each run, and a mark for each layer");
    size_t kept = 0, at = 0;
    for (size_t run = 0; run < counts.size(); run++)
        for (int64_t left = counts[run]; left > 0 && at < rows.size(); left--, at++) {
            size_t row = (size_t)rows[at];
            tiers[row] |= HOT;
            tokens[row] = sizes[run];
            if (sessions[row] == NO_ROW) sessions[row] = claims[run];
            kept += is_protected[layers[row]] && stated[row];
        }
    return PyLong_FromSize_t(kept);
}

// tally(blocks, protected layers, rows, number of layers) -> how many are of each, and last how many are
// protected
inline PyObject* tally(Arguments with, Py_ssize_t count) {
    expect(count, 4);
    Blocks blocks(with[0]);
    auto layers = blocks(&BlockColumns::layer), stated = blocks(&BlockColumns::stated);
    Array<const uint8_t> is_protected(with[1]);
    Array<const int32_t> rows(with[2]);
    size_t kinds = (size_t)std::clamp<int64_t>(as_integer(with[3]), 0, 256);
    check_rows(rows, least(layers, stated));
    if (is_protected.size() != 256) raise_type_error("a mark is needed for each layer");
    std::vector<int64_t> counts(kinds + 1, 0);
    for (int32_t row : rows) {
        uint8_t layer = layers[(size_t)row];
        if (layer < kinds) counts[layer]++;
        counts[kinds] += is_protected[layer] && stated[(size_t)row];
    }
    return listed(counts);
}

}  // namespace ingest
