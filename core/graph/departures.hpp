// How blocks left an engine's pool, as the log of evictions has it.
#pragma once
#include "rows.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

namespace ingest {

// departed(blocks, sessions, state of those that are over, protected layers, rows, places in the ranking,
// [lru, policy, superseded, session over, unranked] as bytes, whether LRU ranked, rules out, last uses out)
// -> whether any was protected
inline PyObject* departed(Arguments with, Py_ssize_t count) {
    expect(count, 10);
    Blocks blocks(with[0]);
    auto sessions = blocks(&BlockColumns::session);
    auto flags = blocks(&BlockColumns::flags), layers = blocks(&BlockColumns::layer),
         stated = blocks(&BlockColumns::stated);
    auto attended = blocks(&BlockColumns::last_attended), hit = blocks(&BlockColumns::last_hit);
    Sessions table(with[1]);
    auto states = table(&SessionColumns::state);
    uint8_t over = (uint8_t)as_integer(with[2]);
    Array<const uint8_t> is_protected(with[3]);
    Array<const int32_t> rows(with[4]);
    Array<const uint16_t> places(with[5]);
    Array<const uint8_t> codes(with[6]);
    bool is_lru = PyObject_IsTrue(with[7]) == 1;
    Array<uint8_t> rules(with[8]);
    Array<double> used(with[9]);
    size_t n = rows.size();
    check_rows(rows, least(sessions, flags, layers, stated, attended, hit));
    if (places.size() != n || rules.size() != n || used.size() != n || is_protected.size() != 256 || codes.size() != 5)
        raise_type_error("a place and room are needed for each row");
    constexpr uint16_t UNNAMED = 65535;
    bool any = false;
    for (size_t at = 0; at < n; at++) {
        size_t row = (size_t)rows[at];
        used[at] = std::max(attended[row], hit[row]);
        int32_t owner = sessions[row];
        bool ended = owner >= 0 && (size_t)owner < states.size && states[(size_t)owner] == over && !(flags[row] & SHARED);
        any |= is_protected[layers[row]] && stated[row] && !ended;
        if (is_lru) rules[at] = codes[0];
        else if (places[at] == UNNAMED) rules[at] = codes[4];
        else if (flags[row] & SUPERSEDED) rules[at] = codes[2];
        else rules[at] = codes[ended ? 3 : 1];
    }
    return PyBool_FromLong(any);
}

#pragma pack(push, 1)
struct Departure {  // as in graph/logs/evictions.py
    uint64_t key;
    uint32_t at;
    uint16_t place;
    uint8_t why, worth, hits, state, idle, wanted;
};
#pragma pack(pop)
static_assert(sizeof(Departure) == 20);

// A duration on a logarithmic scale, as in graph/logs/requests.py.
inline uint8_t as_byte(double seconds) {
    double steps = 1 + 12.0 * std::log2(1.0 + std::max(seconds, 0.0) / 0.1);
    return (uint8_t)std::min(std::nearbyint(steps), 255.0);
}

// depart(ring, slot of each row, marks, key column, blocks, engine, sessions, rows, places, rules, last
// uses, how many left by each rule, in and out, id of the first, most records, ticks, mark of who left, state of
// no session, now)
inline PyObject* depart(Arguments with, Py_ssize_t count) {
    expect(count, 18);
    Array<uint8_t> ring(with[0]);
    Array<uint16_t> slots(with[1]);
    Array<uint8_t> marks(with[2]);
    Array<const uint64_t> keys(with[3]);
    Blocks blocks(with[4]);
    auto sessions = blocks(&BlockColumns::session);
    auto flags = blocks(&BlockColumns::flags), layers = blocks(&BlockColumns::layer);
    auto importance = blocks(&BlockColumns::importance);
    auto hits = blocks(&BlockColumns::hit_count);
    auto tiers = blocks.tiers(as_integer(with[5]));
    Sessions table(with[6]);
    auto states = table(&SessionColumns::state);
    Array<const int32_t> rows(with[7]);
    Array<const uint16_t> places(with[8]);
    Array<const uint8_t> rules(with[9]);
    Array<const double> used(with[10]);
    Array<int64_t> by_rule(with[11]);
    size_t first = (size_t)as_integer(with[12]), most = (size_t)as_integer(with[13]);
    uint32_t ticks = (uint32_t)as_integer(with[14]);
    uint8_t gone = (uint8_t)as_integer(with[15]), unowned = (uint8_t)as_integer(with[16]);
    double now = as_double(with[17]);
    size_t n = rows.size();
    check_rows(rows, std::min({slots.size(), marks.size(), keys.size(), least(sessions, flags, layers, importance, hits, tiers)}));
    if (places.size() != n || rules.size() != n || used.size() != n)
        raise_type_error("a place, a rule and a time are needed for each row");
    for (uint8_t rule : rules)
        if (rule >= by_rule.size()) raise_type_error("a rule is none of those that are counted");
    size_t room = ring.size() / sizeof(Departure);
    auto* records = (Departure*)ring.data();
    size_t skipped = n > most ? n - most : 0;
    double last = NAN;  // blocks of a chain were used together
    uint8_t idle = 0;
    if (!most || (room < most && room < first + n)) raise_type_error("the ring has no room");
    for (size_t at = 0; at < n; at++) {
        size_t row = (size_t)rows[at], slot = (first + at) % most;
        marks[row] = gone;
        by_rule[rules[at]]++;
        if (at < skipped) continue;
        if (used[at] != last) idle = as_byte(now - (last = used[at]));
        int32_t owner = sessions[row];
        bool owned = owner >= 0 && (size_t)owner < states.size;
        uint8_t state = owned ? states[(size_t)owner] : unowned;
        uint8_t shared = (flags[row] & SHARED) != 0, copies = (tiers[row] & (WARM | COLD)) >> 1;
        records[slot] = {
            keys[row], ticks, places[at], (uint8_t)(rules[at] << 4 | layers[row]),
            (uint8_t)std::nearbyint(importance[row] * 255.0f), (uint8_t)std::min<uint32_t>(hits[row], 255),
            (uint8_t)(copies | state << 2 | shared << 5), idle, 0};
        slots[row] = (uint16_t)slot;
    }
    return nothing();
}

}  // namespace ingest
