// What events do to blocks, chain by chain: columns of the block table are read and written here,
// and what is rare is told to Python, which sees to it.
#pragma once
#include "columns.hpp"
#include "index.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <optional>
#include <unordered_map>

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

// The rows that follow a parent, ascending. Where not all of them were noted when they were linked, all rows
// are looked at, and they are noted.
inline std::vector<int32_t> children_of(const Blocks& blocks, size_t parent, size_t size) {
    auto parents = blocks(&BlockColumns::parent);
    size_t wanted = blocks(&BlockColumns::children)[parent];
    Heads& heads = blocks.columns().heads;
    std::vector<int32_t> found;
    auto follows = [&](size_t row) { return row < size && parents[row] == (int32_t)parent; };
    if (follows(parent + 1)) found.push_back((int32_t)parent + 1);
    heads.each_of((int32_t)parent, [&](int32_t row) {
        if ((size_t)row != parent + 1 && follows((size_t)row)) found.push_back(row);
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
