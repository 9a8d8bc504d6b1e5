// What policies' scores are made of, block by block, over columns of the blocks that are ranked.
#pragma once
#include "arrays.hpp"
#include "chains.hpp"

namespace scores {

// gather(columns, rows, columns out, place): the rows' values, whatever their type, from this place on.
inline PyObject* gather(Arguments with, Py_ssize_t count) {
    expect(count, 4);
    size_t place = (size_t)std::max<int64_t>(0, as_integer(with[3]));
    Array<const int32_t> rows(with[1]);
    Py_ssize_t columns = PySequence_Size(with[0]);
    if (columns < 0 || !PyList_Check(with[0]) || !PyList_Check(with[2]) || PyList_GET_SIZE(with[2]) != columns)
        raise_type_error("expected two lists of as many columns");
    struct Pair {
        Py_buffer from{}, to{};
        ~Pair() {
            if (from.obj) PyBuffer_Release(&from);
            if (to.obj) PyBuffer_Release(&to);
        }
    };
    std::vector<Pair> pairs((size_t)columns);
    size_t n = rows.size(), least = SIZE_MAX;
    for (Py_ssize_t at = 0; at < columns; at++) {
        Pair& pair = pairs[(size_t)at];
        if (PyObject_GetBuffer(PyList_GET_ITEM(with[0], at), &pair.from, PyBUF_ND) < 0) throw Raised{};
        if (PyObject_GetBuffer(PyList_GET_ITEM(with[2], at), &pair.to, PyBUF_ND | PyBUF_WRITABLE) < 0) throw Raised{};
        if (pair.from.ndim != 1 || pair.to.ndim != 1 || pair.from.itemsize != pair.to.itemsize ||
            (size_t)pair.to.shape[0] < place || (size_t)pair.to.shape[0] - place < n)
            raise_type_error("a column and the room for it do not fit each other");
        least = std::min(least, (size_t)pair.from.shape[0]);
    }
    for (int32_t row : rows)
        if (row < 0 || (size_t)row >= least) raise_type_error("a row is none of the table's");
    auto copy = [&](auto sample, const Pair& pair) {
        using T = decltype(sample);
        const T* from = (const T*)pair.from.buf;
        T* to = (T*)pair.to.buf + place;
        for (size_t at = 0; at < n; at++) to[at] = from[rows[at]];
    };
    for (const Pair& pair : pairs) {
        switch (pair.from.itemsize) {
            case 1: copy(uint8_t{}, pair); break;
            case 2: copy(uint16_t{}, pair); break;
            case 4: copy(uint32_t{}, pair); break;
            case 8: copy(uint64_t{}, pair); break;
            default: raise_type_error("a column's values have 1, 2, 4 or 8 bytes");
        }
    }
    return nothing();
}

// Clears the mark of each place from the second on at which `differs` is not zero. Few places differ:
// many are looked at together, in a loop that compilers turn into vectors.
template <size_t TOGETHER, class Differs>
void unmark(uint8_t* marks, size_t length, Differs differs) {
    size_t at = 1;
    for (; at + TOGETHER <= length; at += TOGETHER) {
        decltype(differs(at)) any = 0;
        for (size_t each = at; each < at + TOGETHER; each++) any |= differs(each);
        if (!any) continue;
        for (size_t each = at; each < at + TOGETHER; each++) marks[each] &= !differs(each);
    }
    for (; at < length; at++) marks[at] &= !differs(at);
}

// runs(parent, depth, children, rows ascending, columns, begins, starts out) -> how many: where a block
// begins that does not go on from the one before it. In a run each block is the parent of the next,
// and its only one there, and all of them are equal in all columns. Rows that are marked in
// ``begins`` begin a run in any case; with none of them, it is empty.
inline PyObject* runs(Arguments with, Py_ssize_t count) {
    expect(count, 7);
    Array<const int32_t> parent(with[0]), depth(with[1]);
    Array<const uint32_t> children(with[2]);
    Array<const int32_t> rows(with[3]);
    Array<const uint8_t> begins(with[5]);
    Array<int64_t> starts(with[6]);
    size_t n = rows.size(), table = std::min({parent.size(), depth.size(), children.size()});
    if (starts.size() < n || !PyList_Check(with[4])) raise_type_error("expected a list, and a place for each row");
    if (begins.size() && begins.size() != n) raise_type_error("expected a mark for each row, or none at all");
    std::vector<uint8_t> marks(n + 8, 1);  // whether a block goes on from the one before it
    std::vector<size_t> stretches;         // where rows stop being consecutive
    for (size_t at = 0, end; at < n; at = end) {
        auto reaches = [&](size_t to) { return to < n && (int64_t)rows[to] - rows[at] == (int64_t)(to - at); };
        size_t step = 1;
        for (end = at; reaches(end + step); step *= 2) end += step;  // rows ascend: between them, too
        for (; step; step /= 2)
            if (reaches(end + step)) end += step;
        if (rows[at] < 0 || (at && rows[at] <= rows[at - 1]) || (size_t)rows[end] >= table)
            raise_type_error("rows are none of the table's, or do not ascend");
        stretches.push_back(at);
        marks[at] = 0;
        end++;
    }
    stretches.push_back(n);
    auto each_stretch = [&](auto&& look) {
        for (size_t each = 0; each + 1 < stretches.size(); each++) {
            size_t start = stretches[each];
            look(marks.data() + start, (size_t)rows[start], stretches[each + 1] - start);
        }
    };
    each_stretch([&](uint8_t* own, size_t row, size_t length) {
        const int32_t *up = parent.data() + row, *deep = depth.data() + row;
        const uint32_t* below = children.data() + row;
        unmark<32>(own, length, [=](size_t at) {
            uint32_t other = (uint32_t)up[at] ^ (uint32_t)(row + at - 1), first = (uint32_t)(up[at - 1] < 0);
            uint32_t deeper = (uint32_t)deep[at] - (uint32_t)deep[at - 1] - 1;
            return other | first | deeper | (below[at - 1] ^ 1) | (below[at] ^ 1);
        });
    });
    auto compare = [&](auto sample, const void* values) {
        using T = decltype(sample);
        each_stretch([&](uint8_t* own, size_t row, size_t length) {
            const T* column = (const T*)values + row;
            unmark<128 / sizeof(T)>(own, length, [=](size_t at) { return (T)(column[at] ^ column[at - 1]); });
        });
    };
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(with[4]); at++) {
        Py_buffer column{};
        if (PyObject_GetBuffer(PyList_GET_ITEM(with[4], at), &column, PyBUF_ND) < 0) throw Raised{};
        bool fits = column.ndim == 1 && n == 0;
        if (column.ndim == 1 && n) fits = column.shape[0] > rows[n - 1];
        if (fits) switch (column.itemsize) {
            case 1: compare(uint8_t{}, column.buf); break;
            case 2: compare(uint16_t{}, column.buf); break;
            case 4: compare(uint32_t{}, column.buf); break;
            case 8: compare(uint64_t{}, column.buf); break;
            default: fits = false;
        }
        PyBuffer_Release(&column);
        if (!fits) raise_type_error("a column is none of the table's");
    }
    for (size_t at = 0; at < begins.size(); at++) marks[at] &= !begins[at];
    size_t found = 0;
    for (size_t at = 0; at < n; at += 8) {
        uint64_t eight;
        std::memcpy(&eight, marks.data() + at, 8);
        if (eight == 0x0101010101010101ull) continue;
        for (size_t each = at; each < std::min(at + 8, n); each++)
            if (!marks[each]) starts[found++] = (int64_t)each;
    }
    return PyLong_FromSize_t(found);
}

// is_any(marks by value, values, rows ascending) -> whether the value of any of the rows is marked
inline PyObject* is_any(Arguments with, Py_ssize_t count) {
    expect(count, 3);
    Array<const uint8_t> marks(with[0]), values(with[1]);
    Array<const int32_t> rows(with[2]);
    if (marks.size() != 256) raise_type_error("a mark is needed for each value of a byte");
    size_t n = rows.size(), at = 0;
    bool found = false;
    uint64_t before = 0;  // eight values of which none is marked, once some were looked at
    bool known = false;
    while (at < n && !found) {
        int32_t row = rows[at];
        if ((uint32_t)row >= values.size()) raise_type_error("a row is none of the table's");
        // Most rows are consecutive, and most blocks are of few layers.
        if (at + 8 <= n && rows[at + 7] - row == 7 && (size_t)row + 8 <= values.size()) {
            uint64_t eight;
            std::memcpy(&eight, values.data() + row, 8);
            for (size_t each = 0; (!known || eight != before) && each < 8; each++) found |= marks[values[(size_t)row + each]] != 0;
            before = eight;
            known = true;
            at += 8;
        } else {
            found = marks[values[(size_t)row]] != 0;
            at++;
        }
    }
    return PyBool_FromLong(found);
}

// keys_of_runs(first row of each run, when it was created, runs, offsets, created column, key column,
// salt, marks by run, keys out, marked keys out) -> how many of each: the keys of the blocks at these
// places in runs, of those that are there still.
inline PyObject* keys_of_runs(Arguments with, Py_ssize_t count) {
    expect(count, 10);
    Array<const int32_t> firsts(with[0]);
    Array<const double> then(with[1]);
    Array<const int64_t> runs(with[2]), offsets(with[3]);
    Array<const double> created(with[4]);
    Array<const uint64_t> column(with[5]);
    uint64_t salt = PyLong_AsUnsignedLongLong(with[6]);
    if (PyErr_Occurred()) throw Raised{};
    Array<const uint8_t> marks(with[7]);
    Array<uint64_t> keys(with[8]), marked(with[9]);
    size_t n = runs.size(), table = std::min(created.size(), column.size()), found = 0, of_marked = 0;
    if (offsets.size() != n || keys.size() < n || marked.size() < n || then.size() != firsts.size() ||
        marks.size() != firsts.size())
        raise_type_error("columns of runs, or of places in them, differ in length");
    for (size_t at = 0; at < n; at++) {
        if (runs[at] < 0 || (size_t)runs[at] >= firsts.size()) raise_type_error("a run is none of these");
        size_t run = (size_t)runs[at], row = (size_t)(firsts[run] + offsets[at]);
        if (row >= table) raise_type_error("a row is none of the table's");
        if (created[row] != then[run]) continue;  // another block's by now
        uint64_t key = column[row] ^ salt;
        keys[found++] = key;
        if (marks[run]) marked[of_marked++] = key;
    }
    return Py_BuildValue("nn", (Py_ssize_t)found, (Py_ssize_t)of_marked);
}

// parents(rows ascending, parents of them, places out): each parent's place among the rows; their
// number, where it is not among them
inline PyObject* parents(Arguments with, Py_ssize_t count) {
    expect(count, 3);
    Array<const int32_t> rows(with[0]), parent(with[1]);
    Array<int64_t> places(with[2]);
    size_t n = rows.size();
    if (parent.size() != n || places.size() != n + 1) raise_type_error("expected n rows, n parents, n + 1 places");
    {
        Unlocked unlocked(n);
        const int32_t* all = rows.data();
        for (size_t at = 0; at < n; at++) {
            int32_t wanted = parent[at];
            if (wanted < 0) {
                places[at] = (int64_t)n;
            } else if (at && all[at - 1] == wanted) {  // most blocks of a chain came together
                places[at] = (int64_t)at - 1;
            } else {
                const int32_t* found = std::lower_bound(all, all + n, wanted);
                places[at] = found != all + n && *found == wanted ? found - all : (int64_t)n;
            }
        }
        places[n] = (int64_t)n;
    }
    return nothing();
}

// by_session(depth, session, last attended, claims, ends, begins, scores out, off the chain out)
// The last of claims, ends and begins are those of blocks of no session.
inline PyObject* by_session(Arguments with, Py_ssize_t count) {
    expect(count, 8);
    Array<const int32_t> depth(with[0]), session(with[1]);
    Array<const double> attended(with[2]), claims(with[3]);
    Array<const int32_t> ends(with[4]);
    Array<const double> begins(with[5]);
    Array<double> scores(with[6]);
    Array<uint8_t> off(with[7]);
    size_t n = depth.size(), nobody = claims.size() - 1;
    if (!claims.size() || ends.size() != claims.size() || begins.size() != claims.size() || session.size() != n ||
        attended.size() != n || scores.size() != n || off.size() != n)
        raise_type_error("columns of blocks, or of sessions, differ in length");
    for (int32_t each : session)
        if (each >= (int32_t)nobody) raise_type_error("a session is none of the table's");
    {
        Unlocked unlocked(n);
        for (size_t at = 0; at < n; at++) {
            size_t own = session[at] < 0 ? nobody : (size_t)session[at];
            scores[at] = (double)depth[at] * chains::DEPTH_TIE - claims[own];
            off[at] = !(depth[at] <= ends[own] && attended[at] >= begins[own]);
        }
    }
    return nothing();
}

// chain_worth(parent, depth, walkers, children, shared children, their walks, importance, weights,
// worth in place): what the links of chains and importance are worth. Weights are of the degree of
// PREFIX_SHARE and TEMPORAL, of their weights, and of importance.
inline PyObject* chain_worth(Arguments with, Py_ssize_t count) {
    expect(count, 9);
    Array<const int32_t> parent(with[0]), depth(with[1]);
    Array<const uint32_t> walkers(with[2]), children(with[3]), shared(with[4]), walks(with[5]);
    Array<const float> importance(with[6]);
    Array<const double> weights(with[7]);
    Array<double> worth(with[8]);
    size_t n = parent.size();
    if (weights.size() != 5 || depth.size() != n || walkers.size() != n || children.size() != n ||
        shared.size() != n || walks.size() != n || importance.size() != n || worth.size() != n)
        raise_type_error("columns of blocks differ in length, or weights are not five");
    {
        Unlocked unlocked(n);
        const double share_degree = weights[0], next_degree = weights[1];
        const float share_weight = (float)weights[2], next_weight = (float)weights[3], own = (float)weights[4];
        for (size_t at = 0; at < n; at++) {
            bool linked = parent[at] >= 0, walked = (linked | (depth[at] == 0)) & (walkers[at] >= 2);
            uint32_t next = children[at] + linked, sharing = shared[at] + walked;
            uint32_t together = (walked ? walkers[at] : 0) + walks[at];
            double sum = worth[at];
            sum -= share_degree * (double)sharing;
            sum -= next_degree * (double)next;
            sum -= (double)(share_weight * (float)together);
            sum -= (double)(next_weight * (float)next);
            worth[at] = sum - (double)(own * importance[at]);
        }
    }
    return nothing();
}

}  // namespace scores
