// Walks of requests down their chains: what they read, who owns it, and what they miss.
#pragma once
#include "rows.hpp"

#include <algorithm>
#include <vector>

namespace ingest {

// walk(blocks, rows, hits, block size, now): one more request walked these rows, no row twice, and found
// the first `hits`.
inline PyObject* walk(Arguments with, Py_ssize_t count) {
    expect(count, 5);
    Blocks blocks(with[0]);
    auto parent = blocks(&BlockColumns::parent);
    auto walkers = blocks(&BlockColumns::walkers);
    auto shared_children = blocks(&BlockColumns::shared_children);
    auto children_walks = blocks(&BlockColumns::children_walks);
    auto tokens = blocks(&BlockColumns::tokens);
    auto hit_count = blocks(&BlockColumns::hit_count);
    auto last_hit = blocks(&BlockColumns::last_hit);
    Array<const int32_t> rows(with[1]);
    size_t hits = std::min((size_t)std::max<int64_t>(0, as_integer(with[2])), rows.size());
    uint16_t size = (uint16_t)as_integer(with[3]);
    double now = as_double(with[4]);
    check_rows(rows, least(parent, walkers, shared_children, children_walks, tokens, hit_count, last_hit));
    for (int32_t row : rows) {
        tokens[(size_t)row] = size;
        uint32_t walked = ++walkers[(size_t)row];
        int32_t above = parent[(size_t)row];
        if (walked < 2 || above < 0) continue;
        children_walks[(size_t)above] += walked == 2 ? 2 : 1;  // the walk before it counts from now on, too
        shared_children[(size_t)above] += walked == 2;
    }
    for (size_t at = 0; at < hits; at++) {
        hit_count[(size_t)rows[at]]++;
        last_hit[(size_t)rows[at]] = now;
    }
    return nothing();
}

// A session walked these rows; those that another did before are shared from now on.
inline void own_rows(const Blocks& blocks, const Array<const int32_t>& rows, int32_t session) {
    auto sessions = blocks(&BlockColumns::session);
    auto flags = blocks(&BlockColumns::flags);
    check_rows(rows, least(sessions, flags));
    for (int32_t row : rows) {
        int32_t before = sessions[(size_t)row];
        if (before == session) continue;
        if (before != NO_ROW) flags[(size_t)row] |= SHARED;
        sessions[(size_t)row] = session;
    }
}

// Whether a prompt is beside its session's last turn: it shares no block with it, and is at most half as long. So are
// questions for a title, and subagents, which have their session's name.
inline bool is_beside(const Blocks& blocks, const Sessions& table, const Array<const int32_t>& rows, size_t own) {
    auto parent = blocks(&BlockColumns::parent);
    int32_t root = table(&SessionColumns::tip)[own];
    if (root < 0 || !rows.size() || 2 * (int64_t)rows.size() > table(&SessionColumns::reach)[own]) return false;
    for (size_t left = parent.size; left && (size_t)root < parent.size && parent[(size_t)root] >= 0; left--)
        root = parent[(size_t)root];
    return root != rows[0];
}

// How many blocks of its last turn a session abandoned with this one, whose chain `rows` is: none if it is `beside`
// that, or while another request of it runs, which is a sibling then.
inline size_t supersede_rows(const Blocks& blocks, const Sessions& table, const Array<const int32_t>& rows, size_t own,
                             bool beside) {
    auto parent = blocks(&BlockColumns::parent), depth = blocks(&BlockColumns::depth);
    auto sessions = blocks(&BlockColumns::session);
    auto flags = blocks(&BlockColumns::flags);
    auto salt = blocks(&BlockColumns::salt);
    auto running = table(&SessionColumns::running), tips = table(&SessionColumns::tip);
    int32_t session = (int32_t)own, tip = beside || running[own] > 0 ? NO_ROW : tips[own];
    size_t size = least(parent, depth, sessions, flags, salt), n = rows.size();
    check_rows(rows, size);
    for (int32_t row : rows) flags[(size_t)row] &= (uint8_t)~SUPERSEDED;
    if (tip >= 0 && (size_t)tip < size && n && salt[(size_t)tip] != salt[(size_t)rows[0]])
        return 0;  // a session's turns with another model are a chain of their own
    size_t left = 0;
    for (int32_t row = tip; row >= 0 && (size_t)row < size; row = parent[(size_t)row]) {
        size_t at = (size_t)depth[(size_t)row];
        if (at < n && rows[at] == row) break;
        if (sessions[(size_t)row] != session || (flags[(size_t)row] & SHARED)) continue;
        flags[(size_t)row] |= SUPERSEDED;
        left++;
    }
    return left;
}

// In which tiers an engine has a block, in which of theirs any other has, how many walked it, when it was created.
struct Facts {
    int own, others;
    unsigned walkers;
    double created;
    Facts(const Blocks& blocks, int64_t engine, size_t row)
        : own(blocks.tiers(engine)[row]), others(0), walkers(blocks(&BlockColumns::walkers)[row]),
          created(blocks(&BlockColumns::created)[row]) {
        for (size_t each = 0; each < blocks.engines(); each++)
            if ((int64_t)each != engine) others |= blocks.tiers((int64_t)each)[row];
    }
    static size_t rows(const Blocks& blocks, int64_t engine) {
        return least(blocks(&BlockColumns::walkers), blocks(&BlockColumns::created), blocks.tiers(engine));
    }
    PyObject* told() const { return Py_BuildValue("(iiId)", own, others, walkers, created); }
};

// block(blocks, engine, row) -> its facts
inline PyObject* block(Arguments with, Py_ssize_t count) {
    expect(count, 3);
    Blocks blocks(with[0]);
    int64_t engine = as_integer(with[1]);
    return Facts(blocks, engine, row_of(with[2], Facts::rows(blocks, engine))).told();
}

// marked(marks, blocks, engine, rows, found, first, reach, of a block that was prefetched, of how one left, of
// one that is computed) -> (how many of those that were found were prefetched, which are no longer, the rows that
// are computed again, the marks of the first of those that are computed before they said so, its facts). If none
// is computed: no marks, and None.
inline PyObject* marked(Arguments with, Py_ssize_t count) {
    expect(count, 10);
    Array<uint8_t> marks(with[0]);
    Blocks blocks(with[1]);
    int64_t engine = as_integer(with[2]);
    Array<const int32_t> rows(with[3]);
    size_t n = rows.size();
    auto place = [&](PyObject* number) { return std::min((size_t)std::max<int64_t>(0, as_integer(number)), n); };
    size_t found = place(with[4]), first = place(with[5]), reach = place(with[6]);
    uint8_t prefetched = (uint8_t)as_integer(with[7]), left = (uint8_t)as_integer(with[8]),
            computing = (uint8_t)as_integer(with[9]);
    check_rows(rows, std::min(marks.size(), Facts::rows(blocks, engine)));
    size_t brought = 0;
    for (size_t at = 0; at < found; at++) {
        uint8_t& mark = marks[(size_t)rows[at]];
        brought += (mark & prefetched) != 0;
        mark &= (uint8_t)~prefetched;
    }
    std::vector<int32_t> again;
    for (size_t at = first; at < reach; at++)
        if (marks[(size_t)rows[at]] & left) again.push_back(rows[at]);
    int before = first < n ? marks[(size_t)rows[first]] : 0;
    for (size_t at = first; at < n; at++) marks[(size_t)rows[at]] |= computing;
    PyObject* facts = first < n ? Facts(blocks, engine, (size_t)rows[first]).told() : nothing();
    return Py_BuildValue("(nNiN)", (Py_ssize_t)brought, packed(again), before, facts);
}

// unmark(marks, blocks, engine, rows, bit) -> those that had the bit, and are not in the engine's pool
inline PyObject* unmark(Arguments with, Py_ssize_t count) {
    expect(count, 5);
    Array<uint8_t> marks(with[0]);
    Blocks blocks(with[1]);
    auto tiers = blocks.tiers(as_integer(with[2]));
    Array<const int32_t> rows(with[3]);
    uint8_t bit = (uint8_t)as_integer(with[4]);
    check_rows(rows, std::min(marks.size(), tiers.size));
    std::vector<int32_t> open;
    for (int32_t row : rows) {
        if ((marks[(size_t)row] & bit) && !(tiers[(size_t)row] & HOT)) open.push_back(row);
        marks[(size_t)row] &= (uint8_t)~bit;
    }
    return packed(open);
}

// written(blocks, rows, prompt tokens, layer, importance) -> rows for which Python has to decide: the
// blocks behind a prompt were written by a model, and where no request walked them yet, they are of that
// layer, unless somebody stated another. Blocks are of the size of the first one.
inline PyObject* written(Arguments with, Py_ssize_t count) {
    expect(count, 5);
    Blocks blocks(with[0]);
    auto tokens = blocks(&BlockColumns::tokens);
    auto walkers = blocks(&BlockColumns::walkers);
    auto layers = blocks(&BlockColumns::layer), stated = blocks(&BlockColumns::stated);
    auto raised_by = blocks(&BlockColumns::raised_by);
    auto importance = blocks(&BlockColumns::importance);
    Array<const int32_t> rows(with[1]);
    int64_t prompt = as_integer(with[2]);
    uint8_t layer = (uint8_t)as_integer(with[3]);
    float worth = (float)as_double(with[4]);
    check_rows(rows, least(tokens, walkers, layers, stated, raised_by, importance));
    uint16_t size = rows.size() ? tokens[(size_t)rows[0]] : 0;
    size_t first = size ? std::min<size_t>((size_t)(prompt / size), rows.size()) : 0;
    std::vector<int32_t> doubtful;
    for (size_t each = first; each < rows.size(); each++) {
        size_t at = (size_t)rows[each];
        tokens[at] = size;
        if (walkers[at] || layers[at] == layer) continue;
        if (raised_by[at] != NO_ROW) doubtful.push_back(rows[each]);
        else if (!stated[at]) layers[at] = layer, importance[at] = worth;
    }
    return packed(doubtful);
}

constexpr size_t MOST_CHILDREN = 1024;  // looked at: what all users share has one for each; chosen

// The rows that follow a parent, ascending; of more than MOST_CHILDREN, those that were linked last. Where not
// all of them were noted when they were linked, all rows are looked at, and they are noted.
inline std::vector<int32_t> children_of(const Blocks& blocks, size_t parent, size_t size) {
    auto parents = blocks(&BlockColumns::parent);
    size_t wanted = std::min<size_t>(blocks(&BlockColumns::children)[parent], MOST_CHILDREN);
    Heads& heads = blocks.columns().heads;
    std::vector<int32_t> found;
    auto follows = [&](size_t row) { return row < size && parents[row] == (int32_t)parent; };
    if (follows(parent + 1)) found.push_back((int32_t)parent + 1);
    heads.latest_of((int32_t)parent, [&](int32_t row) {
        if ((size_t)row != parent + 1 && follows((size_t)row)) found.push_back(row);
        return found.size() < 2 * MOST_CHILDREN;  // some were noted twice, perhaps
    });
    sort_rows(found);
    found.erase(std::unique(found.begin(), found.end()), found.end());
    if (found.size() >= wanted) return found;
    found.clear();
    for (size_t row = 0; row < size; row++) {
        if (!follows(row)) continue;
        found.push_back((int32_t)row);
        if (row != parent + 1) heads.note((int32_t)row, (int32_t)parent, parents);
    }
    return found;
}

// sibling(blocks, how many rows are in use, row, parent, session, now) -> the session of another row that
// follows the parent and was known before now or walked since: this one if any is its, else that of the one
// that was read last. None without such a row, or if the parent was not known before now.
inline PyObject* sibling(Arguments with, Py_ssize_t count) {
    expect(count, 6);
    Blocks blocks(with[0]);
    auto created = blocks(&BlockColumns::created), attended = blocks(&BlockColumns::last_attended);
    auto walkers = blocks(&BlockColumns::walkers), children = blocks(&BlockColumns::children);
    auto parents = blocks(&BlockColumns::parent), sessions = blocks(&BlockColumns::session);
    size_t size = std::min((size_t)std::max<int64_t>(0, as_integer(with[1])),
                           least(parents, created, attended, walkers, children, sessions));
    size_t row = row_of(with[2], size), parent = row_of(with[3], size);
    int32_t session = (int32_t)as_integer(with[4]);
    double now = as_double(with[5]);
    if (!(created[parent] < now) && walkers[parent] <= 1) return nothing();
    if (children[parent] <= (size_t)(parents[row] == (int32_t)parent)) return nothing();
    const int32_t* latest = nullptr;
    std::vector<int32_t> found = children_of(blocks, parent, size);
    for (const int32_t& each : found) {
        size_t at = (size_t)each;
        if (at == row || !(created[at] < now || walkers[at])) continue;
        if (session != NO_ROW && sessions[at] == session) return PyLong_FromLong(session);
        if (!latest || attended[at] > attended[(size_t)*latest]) latest = &each;
    }
    return latest ? PyLong_FromLong(sessions[(size_t)*latest]) : nothing();
}

// heads_nbytes(blocks) -> how much room it takes to know which blocks follow a parent elsewhere
inline PyObject* heads_nbytes(Arguments with, Py_ssize_t count) {
    expect(count, 1);
    return PyLong_FromSize_t(Blocks(with[0]).columns().heads.bytes());
}

constexpr int32_t GROWS = 2;
// After this many turns, each longer than the one before, another longer prompt continues its session
// even without a block more. Of four texts of random lengths, one sequence in 24 rises like that. Chosen.

// Full blocks of a session's last prompt, if the next prompt, of so many blocks and tokens, extends it
// here; 0 otherwise. Only lengths are compared, so this is asked before the turn begins. The same engine
// must have served the session, and the prompt must have a block more. If a turn adds less than one block,
// more tokens are enough when the session's earlier turns grew as well: lengths of separate questions
// about one text rise and fall, and a prompt that is merely repeated does not grow.
inline size_t goes_on_from(const Sessions& sessions, size_t session, int64_t engine, size_t blocks, int64_t tokens) {
    int64_t before = sessions(&SessionColumns::turns)[session] ? sessions(&SessionColumns::reach)[session] : 0;
    if (sessions(&SessionColumns::engine)[session] != engine || before <= 0 || before > (int64_t)blocks) return 0;
    bool grew = !sessions(&SessionColumns::running)[session] && sessions(&SessionColumns::longer)[session] >= GROWS;
    bool more = (int64_t)blocks > before || (grew && tokens > sessions(&SessionColumns::asked)[session]);
    return more ? (size_t)before : 0;
}

// again(blocks, sessions, engine, session, rows, tokens, first that is computed, tiers of copies, now) ->
// how many blocks a request of the session computes again, and which have no copy, if it continues it
inline PyObject* again(Arguments with, Py_ssize_t count) {
    expect(count, 9);
    Blocks blocks(with[0]);
    Sessions sessions(with[1]);
    int64_t engine = as_integer(with[2]);
    size_t session = row_of(with[3], sessions(&SessionColumns::turns).size);
    Array<const int32_t> rows(with[4]);
    int64_t tokens = as_integer(with[5]), first = as_integer(with[6]);
    uint8_t copies = (uint8_t)as_integer(with[7]);
    double now = as_double(with[8]);
    auto tiers = blocks.tiers(engine);
    auto created = blocks(&BlockColumns::created);
    check_rows(rows, least(tiers, created));
    size_t before = goes_on_from(sessions, session, engine, rows.size(), tokens), found = 0;
    if (!before || !(created[(size_t)rows[before - 1]] < now)) return PyLong_FromLong(0);
    for (size_t at = (size_t)std::max<int64_t>(0, first); at < rows.size(); at++)
        found += !(tiers[(size_t)rows[at]] & copies) && created[(size_t)rows[at]] < now;
    return PyLong_FromSize_t(found);
}

// reached(blocks, rows, first depth of unknown chains, out): how many blocks of a chain stand up to the deepest
// of these rows that is each session's, by session; of blocks whose chain's start is not known, how many
// stand from where it is known.
inline PyObject* reached(Arguments with, Py_ssize_t count) {
    expect(count, 4);
    Blocks blocks(with[0]);
    auto sessions = blocks(&BlockColumns::session), depths = blocks(&BlockColumns::depth);
    Array<const int32_t> rows(with[1]);
    int32_t known = (int32_t)as_integer(with[2]);
    Array<int32_t> out(with[3]);
    check_rows(rows, least(sessions, depths));
    for (int32_t row : rows) {
        int32_t session = sessions[(size_t)row], depth = depths[(size_t)row];
        if (session < 0) continue;
        if ((size_t)session >= out.size()) raise_type_error("a session is none of the table's");
        if (depth >= UNPLACED) depth = std::max(0, depth - known);
        out[(size_t)session] = std::max(out[(size_t)session], depth + 1);
    }
    return nothing();
}

}  // namespace ingest
