// Chains of blocks: where their keys stand, and which block follows which. What is rare is told to Python, which
// sees to it.
#pragma once
#include "index.hpp"
#include "rows.hpp"

#include <algorithm>
#include <optional>
#include <vector>

namespace ingest {

// A set of keys, of which it is known how many there are at most.
class KeySet {
public:
    explicit KeySet(size_t most) {
        size_t size = 16;
        while (size < 2 * most) size *= 2;
        slots_.assign(size, 0);
        shift_ = 64 - __builtin_ctzll(size);
    }
    bool has(uint64_t key) const { return key ? slots_[place(key)] == key : zero_; }
    // Returns whether it was there before.
    bool add(uint64_t key) {
        uint64_t& slot = slots_[place(key)];
        bool before = key ? slot == key : zero_;
        slot = key ? key : slot;
        zero_ |= !key;
        return before;
    }

private:
    size_t place(uint64_t key) const {
        size_t mask = slots_.size() - 1, at = (key * index_::MULTIPLIER) >> shift_;
        while (slots_[at] && slots_[at] != key) at = (at + 1) & mask;
        return at;
    }
    std::vector<uint64_t> slots_;  // 0: nothing
    int shift_;
    bool zero_ = false;  // a key
};

// find_chains(slots, key column, alive, depth, chains, salt, guesses, keys out, rows out) -> (how many keys are not
// known, for each chain whether it has a key twice, or None if none has). Of each chain its keys as on the wire, and
// the rows where the first of them may be, or None: else each key is looked for behind the one before it. Of a key
// that is not known the row is NO_ROW.
inline PyObject* find_chains(Arguments with, Py_ssize_t count) {
    expect(count, 9);
    Array<int32_t> slots(with[0]);
    Array<const uint64_t> column(with[1]);
    Array<const uint8_t> alive(with[2]);
    Array<const int32_t> depth(with[3]);
    if (!PyList_Check(with[4]) || !PyList_Check(with[6])) raise_type_error("expected lists of chains and guesses");
    uint64_t salt = PyLong_AsUnsignedLongLong(with[5]);
    if (PyErr_Occurred()) throw Raised{};
    Array<uint64_t> keys(with[7]);
    Array<int32_t> rows(with[8]);
    index_::Table table(slots);
    size_t n = keys.size(), size = std::min({column.size(), alive.size(), depth.size()}), sum = 0;
    std::vector<size_t> counts((size_t)PyList_GET_SIZE(with[4]));
    for (size_t chain = 0; chain < counts.size(); chain++) {
        PyObject* hashes = PyList_GET_ITEM(with[4], (Py_ssize_t)chain);
        if (!PyBytes_Check(hashes)) raise_type_error("hashes are bytes");
        counts[chain] = (size_t)PyBytes_GET_SIZE(hashes) / sizeof(uint64_t);
        if (counts[chain] > n - sum) raise_type_error("there is no room for keys");
        std::memcpy(keys.data() + sum, PyBytes_AS_STRING(hashes), sizeof(uint64_t) * counts[chain]);
        sum += counts[chain];
    }
    if (sum != n || (size_t)PyList_GET_SIZE(with[6]) != counts.size() || rows.size() != n)
        raise_type_error("keys, guesses and rows differ in number");
    for (uint64_t& key : keys) key ^= salt;
    std::vector<uint8_t> bad(counts.size());
    auto stands = [&](int32_t row, uint64_t key) {
        return (size_t)row < size && column[(size_t)row] == key && alive[(size_t)row];
    };
    size_t unknown = 0, twice = 0, start = 0;
    for (size_t chain = 0; chain < counts.size(); chain++) {
        size_t end = start + counts[chain], doubtful = 0, known = start;
        PyObject* guess = PyList_GET_ITEM(with[6], (Py_ssize_t)chain);
        std::optional<Array<const int32_t>> guessed;
        if (guess != Py_None) {
            guessed.emplace(guess);
            known = std::min(end, start + guessed->size());
        }
        for (size_t from = start; from < end; from += index_::AHEAD) {
            size_t to = std::min(end, from + index_::AHEAD);
            bool looked = false;
            for (size_t at = from; at < to; at++) rows[at] = at < known ? (*guessed)[at - start] : NO_ROW;
            for (size_t at = from; at < to; at++) {
                if (!looked && !stands(rows[at], keys[at])) {
                    int32_t next = at > start && rows[at - 1] >= 0 ? rows[at - 1] + 1 : NO_ROW;
                    if (stands(next, keys[at])) {
                        rows[at] = next;
                    } else {
                        index_::find_few(table, column.data(), &keys[at], to - at, &rows[at]);
                        looked = true;
                    }
                }
                unknown += rows[at] < 0;
                doubtful += rows[at] < 0 || depth[(size_t)rows[at]] != (int32_t)(at - start);
            }
        }
        // A row has one depth: whatever stands at its own depth here stands here once.
        if (doubtful) {
            KeySet seen(doubtful);
            for (size_t at = start; at < end && !bad[chain]; at++) {
                int32_t own = rows[at] < 0 ? 0 : depth[(size_t)rows[at]];
                if (rows[at] >= 0 && own == (int32_t)(at - start)) continue;
                bool elsewhere = rows[at] >= 0 && (size_t)own < end - start && rows[start + (size_t)own] == rows[at];
                bad[chain] = elsewhere || seen.add(keys[at]);
            }
            twice += bad[chain];
        }
        start = end;
    }
    PyObject* told = twice ? PyList_New((Py_ssize_t)bad.size()) : Py_NewRef(Py_None);
    for (size_t chain = 0; twice && told && chain < bad.size(); chain++)
        PyList_SET_ITEM(told, (Py_ssize_t)chain, PyBool_FromLong(bad[chain]));
    return pair_of(PyLong_FromSize_t(unknown), told);
}

// The columns that links of chains are written to.
struct Links {
    Values<int32_t> parent, depth;
    Values<uint32_t> walkers, children, shared_children, children_walks;
    Heads& heads;
    size_t size;
    explicit Links(const Blocks& blocks)
        : parent(blocks(&BlockColumns::parent)), depth(blocks(&BlockColumns::depth)),
          walkers(blocks(&BlockColumns::walkers)), children(blocks(&BlockColumns::children)),
          shared_children(blocks(&BlockColumns::shared_children)), children_walks(blocks(&BlockColumns::children_walks)),
          heads(blocks.columns().heads), size(least(parent, depth, walkers, children, shared_children, children_walks)) {}

    void link(int32_t row, int32_t above) {
        parent[(size_t)row] = above;
        if (above != row - 1) heads.note(row, above, parent);
        children[(size_t)above]++;
        if (uint32_t walked = walkers[(size_t)row]; walked >= 2) {
            shared_children[(size_t)above]++;
            children_walks[(size_t)above] += walked;
        }
    }
    void cut(int32_t row) {
        size_t above = (size_t)parent[(size_t)row];
        children[above]--;
        if (uint32_t walked = walkers[(size_t)row]; walked >= 2) {
            shared_children[above]--;
            children_walks[above] -= walked;
        }
        parent[(size_t)row] = NO_ROW;
    }

    // Set the depths of new rows (null: none is), and of those without a known place; returns whether any changed.
    // Before any is set, all are looked at.
    bool place(const int32_t* rows, const uint8_t* is_new, const int64_t* depths, size_t n) {
        changing_.clear();
        for (size_t at = 0; at < n; at++) {
            int32_t known = depth[(size_t)rows[at]];
            if (((is_new && is_new[at]) || (known >= UNPLACED && depths[at] < UNPLACED)) && known != depths[at])
                changing_.push_back(at);
        }
        for (size_t at : changing_) depth[(size_t)rows[at]] = (int32_t)std::min<int64_t>(depths[at], DEEPEST);
        return !changing_.empty();
    }

    // Give parents to rows that have none; returns how many links were cut since a chain that was
    // reported contradicts them. `unfit`: rows whose parents must become shallower first.
    size_t join(const int32_t* rows, const int32_t* parents, size_t n, bool moved, std::vector<int32_t>& unfit,
                std::vector<int32_t>& theirs) {
        size_t astray = 0;
        if (moved) {
            changing_.clear();
            for (size_t at = 0; at < n; at++) {
                int32_t above = parent[(size_t)rows[at]];
                if (above >= 0 && depth[(size_t)above] >= depth[(size_t)rows[at]]) changing_.push_back(at);
            }
            astray = changing_.size();
            for (size_t at : changing_)
                if (parent[(size_t)rows[at]] != NO_ROW) cut(rows[at]);
        }
        for (size_t at = 0; at < n; at++) {
            int32_t row = rows[at], above = parents[at];
            if (above == NO_ROW || parent[(size_t)row] != NO_ROW) continue;
            if (depth[(size_t)above] < depth[(size_t)row]) {
                link(row, above);
            } else {
                unfit.push_back(row);
                theirs.push_back(above);
            }
        }
        return astray;
    }

private:
    std::vector<size_t> changing_;
};

inline PyObject* joined(Links& links, const int32_t* rows, const std::vector<int32_t>& parents, bool moved) {
    std::vector<int32_t> unfit, theirs;
    size_t astray = links.join(rows, parents.data(), parents.size(), moved, unfit, theirs);
    if (!astray && unfit.empty()) return nothing();
    PyObject* told = Py_BuildValue("(nNN)", (Py_ssize_t)astray, packed(unfit), packed(theirs));
    if (!told) throw Raised{};
    return told;
}

// lay(blocks, rows, new or None, counts, now) -> None, or (links that were cut, rows whose parents are too deep,
// these parents)
inline PyObject* lay(Arguments with, Py_ssize_t count) {
    expect(count, 5);
    Blocks blocks(with[0]);
    Links links(blocks);
    auto attended = blocks(&BlockColumns::last_attended);
    Array<const int32_t> rows(with[1]);
    std::optional<Array<const uint8_t>> is_new;
    if (with[2] != Py_None) is_new.emplace(with[2]);
    if (!PyList_Check(with[3])) raise_type_error("expected a list of counts");
    double now = as_double(with[4]);
    size_t n = rows.size(), at = 0;
    check_rows(rows, std::min(links.size, attended.size));
    std::vector<int64_t> depths(n);
    std::vector<int32_t> parents(n);
    for (Py_ssize_t chain = 0; chain < PyList_GET_SIZE(with[3]); chain++) {
        int64_t each = as_integer(PyList_GET_ITEM(with[3], chain));
        for (int64_t within = 0; within < each && at < n; within++, at++) {
            depths[at] = within;
            parents[at] = within ? rows[at - 1] : NO_ROW;
        }
    }
    if (at != n || (is_new && is_new->size() != n)) raise_type_error("rows and counts differ in number");
    bool moved = links.place(rows.data(), is_new ? is_new->data() : nullptr, depths.data(), n);
    for (int32_t row : rows) attended[(size_t)row] = now;
    return joined(links, rows.data(), parents, moved);
}

// extend(blocks, rows, new, which have a predecessor, counts) -> as of lay. Runs of blocks, each behind its own
// predecessor, or behind nobody; the predecessors stand behind all runs.
inline PyObject* extend(Arguments with, Py_ssize_t count) {
    expect(count, 5);
    Blocks blocks(with[0]);
    Links links(blocks);
    Array<const int32_t> rows(with[1]);
    Array<const uint8_t> is_new(with[2]), follows(with[3]);
    Array<const int64_t> counts(with[4]);
    size_t n = 0, behind = 0;
    check_rows(rows, links.size);
    for (int64_t each : counts) {
        if (each < 1) raise_type_error("a run has no block");
        n += (size_t)each;
    }
    for (uint8_t each : follows) behind += each != 0;
    if (n + behind != rows.size() || is_new.size() != rows.size() || follows.size() != counts.size())
        raise_type_error("rows, counts and predecessors differ in number");
    std::vector<int32_t> before;
    for (size_t run = 0, at = n; run < counts.size(); run++) before.push_back(follows[run] ? rows[at++] : NO_ROW);
    std::vector<int32_t> parents(n);
    struct Run {
        size_t start;
        int32_t before;
    };
    std::vector<Run> runs;
    uint64_t marks[64] = {};  // which rows may be predecessors
    auto mark = [&](int32_t row) { return std::pair{((uint32_t)row >> 6) & 63, 1ull << ((uint32_t)row & 63)}; };
    size_t start = 0;
    for (size_t run = 0; run < counts.size(); run++) {
        parents[start] = before[run];
        for (size_t at = start + 1; at < start + (size_t)counts[run]; at++) parents[at] = rows[at - 1];
        // What goes on where the run before it stopped is the same run.
        if (!start || before[run] != rows[start - 1]) {
            runs.push_back({start, before[run]});
            if (before[run] >= 0) {
                auto [word, bit] = mark(before[run]);
                marks[word] |= bit;
            }
        }
        start += (size_t)counts[run];
    }
    bool in_order = false;
    for (size_t at = 0; at < n && !in_order; at++) {
        auto [word, bit] = mark(rows[at]);
        if (marks[word] & bit)
            for (const Run& run : runs) in_order |= run.before == rows[at];
    }
    std::vector<int64_t> depths(n);
    auto lay_out = [&](size_t run) {
        size_t from = runs[run].start, to = run + 1 < runs.size() ? runs[run + 1].start : n;
        int64_t base = runs[run].before < 0 ? 0 : (int64_t)links.depth[(size_t)runs[run].before] + 1;
        for (size_t at = from; at < to; at++) depths[at] = base + (int64_t)(at - from);
        return to - from;
    };
    bool moved = false;
    for (size_t run = 0; run < runs.size(); run++) {
        size_t from = runs[run].start, length = lay_out(run);
        if (in_order) moved |= links.place(rows.data() + from, is_new.data() + from, depths.data() + from, length);
    }
    if (!in_order) moved = links.place(rows.data(), is_new.data(), depths.data(), n);
    return joined(links, rows.data(), parents, moved);
}

// chain(blocks, row, length) -> the rows from its root to this one, the root first; none if they are not
// so many.
inline PyObject* chain(Arguments with, Py_ssize_t count) {
    expect(count, 3);
    Links links{Blocks(with[0])};
    size_t row = row_of(with[1], links.size);
    int64_t length = as_integer(with[2]);
    std::vector<int32_t> rows;
    // A parent is less deep than its child, so a chain is no longer than its end is deep.
    if (length < 1 || length > (int64_t)links.depth[row] + 1 || (size_t)length > links.size) return packed(rows);
    rows.resize((size_t)length);
    int32_t at = (int32_t)row;
    for (size_t left = rows.size(); left && at != NO_ROW; at = links.parent[(size_t)at]) {
        if ((size_t)at >= links.size) raise_type_error("a row is none of the table's");
        rows[--left] = at;
        if (!left && links.parent[(size_t)at] == NO_ROW) return packed(rows);
    }
    rows.clear();
    return packed(rows);
}

// to_raise(blocks, row, parent, most) -> (how many rows were looked at; the parent and its ancestors that
// are too deep for a link to this row, or None if they cannot rise: one of them is the row or has a known
// place, or they are more than `most`)
inline PyObject* to_raise(Arguments with, Py_ssize_t count) {
    expect(count, 4);
    Links links{Blocks(with[0])};
    size_t row = row_of(with[1], links.size), at = row_of(with[2], links.size);
    int64_t most = as_integer(with[3]), room = (int64_t)links.depth[row] - 1;
    int64_t least_room = room >= UNPLACED ? UNPLACED : 0;  // unknown depths stay distinct from known ones
    std::vector<int32_t> path;
    bool can_rise = true;
    int64_t looked = 0;
    for (int32_t next = (int32_t)at; next != NO_ROW && links.depth[at] > room; room--) {
        looked++;
        can_rise = at != row && links.depth[at] >= UNPLACED && room >= least_room && looked <= most;
        if (!can_rise) break;
        path.push_back(next);
        next = links.parent[at];
        if (next != NO_ROW && (size_t)next >= links.size) raise_type_error("a row is none of the table's");
        at = next == NO_ROW ? at : (size_t)next;
    }
    return pair_of(PyLong_FromLongLong(looked), can_rise ? packed(path) : nothing());
}

// unlink(blocks, which rows are about to be reused, first row, behind the last one): these rows lose their
// parents, where they or these are to be reused. Over all rows that removes every link of what is reused.
inline PyObject* unlink(Arguments with, Py_ssize_t count) {
    expect(count, 4);
    Blocks blocks(with[0]);
    Links links(blocks);
    Array<const uint8_t> gone(with[1]);
    if (gone.size() > links.size) raise_type_error("there are more marks than rows");
    size_t first = (size_t)std::max<int64_t>(0, as_integer(with[2]));
    size_t end = std::min((size_t)std::max<int64_t>(0, as_integer(with[3])), gone.size());
    for (size_t row = first; row < end; row++) {
        int32_t above = links.parent[row];
        if (above >= 0 && (gone[row] || ((size_t)above < gone.size() && gone[(size_t)above])))
            links.cut((int32_t)row);
    }
    return nothing();
}

}  // namespace ingest
