// Scores of chains: a block goes after all that stand behind it; and the highest of many scores.
#pragma once
#include "arrays.hpp"

#include <algorithm>
#include <cmath>

namespace chains {

constexpr double DEPTH_TIE = 1e-5;  // as in graph/columns/whole_chains.py

// Leaves first, whatever order the places are in.
template <class Below>
void lower_by_leaves(double* lowest, const int64_t* above, size_t n, Below below) {
    std::vector<uint32_t> children(n, 0);
    for (size_t at = 0; at < n; at++)
        if (above[at] != (int64_t)n) children[(size_t)above[at]]++;
    std::vector<size_t> next;
    next.reserve(n);
    for (size_t at = 0; at < n; at++)
        if (!children[at]) next.push_back(at);
    for (size_t done = 0; done < next.size(); done++) {
        size_t at = next[done], up = (size_t)above[at];
        if (up == n) continue;
        lowest[up] = std::min(lowest[up], lowest[at] - below(up));
        if (!--children[up]) next.push_back(up);
    }
}

template <class Below>
void lower_all(double* lowest, const int64_t* above, size_t n, Below below) {
    bool ordered = true;
    for (size_t at = 0; at < n; at++) ordered &= above[at] < (int64_t)at || above[at] == (int64_t)n;
    if (!ordered) return lower_by_leaves(lowest, above, n, below);
    for (size_t at = n; at-- > 0;)
        if (above[at] != (int64_t)n) {
            size_t up = (size_t)above[at];
            lowest[up] = std::min(lowest[up], lowest[at] - below(up));
        }
}

// lower(scores in place, place of each one's parent, with their number for nobody, lengths or None):
// of runs of so many blocks the scores are those of the first ones.
inline PyObject* lower(Arguments with, Py_ssize_t count) {
    expect(count, 3);
    Array<double> scores(with[0]);
    Array<const int64_t> above(with[1]);
    size_t n = scores.size();
    if (above.size() < n) raise_type_error("a parent is needed for each score");
    for (size_t at = 0; at < n; at++)
        if (above[at] < 0 || above[at] > (int64_t)n) raise_type_error("a parent's place is none");
    if (with[2] == Py_None) {
        {
            Unlocked unlocked(n);
            lower_all(scores.data(), above.data(), n, [](size_t) { return DEPTH_TIE; });
        }
        return nothing();
    }
    Array<const int64_t> lengths(with[2]);
    if (lengths.size() != n) raise_type_error("a length is needed for each score");
    {
        Unlocked unlocked(n);
        const int64_t* length = lengths.data();
        lower_all(scores.data(), above.data(), n, [length](size_t up) { return (double)length[up] * DEPTH_TIE; });
    }
    return nothing();
}

struct Placed {
    uint64_t falling;  // rises as the score falls
    uint32_t place;
};

inline uint64_t falling(double score) {
    score += 0.0;  // minus zero is zero
    uint64_t bits;
    std::memcpy(&bits, &score, 8);
    return (bits >> 63) ? bits : ~(bits | (1ull << 63));
}

// By radix, 11 bits a round, over the bits in which any two differ; equals stay in their order.
inline void sort_falling(std::vector<Placed>& found) {
    uint64_t all = ~0ull, any = 0;
    for (const Placed& each : found) all &= each.falling, any |= each.falling;
    std::vector<Placed> room(found.size());
    for (int shift = 0; shift < 64; shift += 11) {
        if (!(((all ^ any) >> shift) & 2047)) continue;
        uint32_t starts[2048] = {}, sum = 0;
        for (const Placed& each : found) starts[(each.falling >> shift) & 2047]++;
        for (uint32_t& start : starts) {
            uint32_t size = start;
            start = sum;
            sum += size;
        }
        for (const Placed& each : found) room[starts[(each.falling >> shift) & 2047]++] = each;
        found.swap(room);
    }
}

// highest(scores, among, places out) -> how many: of equals the first place goes first
inline PyObject* highest(Arguments with, Py_ssize_t count) {
    expect(count, 3);
    Array<const double> scores(with[0]);
    Array<const uint8_t> among(with[1]);
    Array<int64_t> places(with[2]);
    size_t n = scores.size(), limit = places.size(), number = 0;
    if (among.size() != n) raise_type_error("a mark is needed for each score");
    {
        Unlocked unlocked(n);
        std::vector<Placed> found;
        size_t total = 0;
        for (size_t at = 0; at < n; at++) total += among[at] != 0;
        limit = std::min(limit, total);
        double bar = -INFINITY;
        if (4 * limit < total) {  // a sample says about where the last one stands
            std::vector<double> sample;
            size_t step = std::max<size_t>(1, n / 4096);
            for (size_t at = 0; at < n; at += step)
                if (among[at]) sample.push_back(scores[at]);
            size_t rank = 2 * limit / step + 16;
            if (rank < sample.size()) {
                std::nth_element(sample.begin(), sample.begin() + (long)rank, sample.end(), std::greater<double>());
                bar = sample[rank];
            }
        }
        for (;; bar = -INFINITY) {
            for (size_t at = 0; at < n; at++)
                if (among[at] && scores[at] >= bar) found.push_back({falling(scores[at]), (uint32_t)at});
            if (found.size() >= limit) break;
            found.clear();
        }
        if (found.size() > 2 * limit) {
            auto before = [](const Placed& a, const Placed& b) {
                return a.falling != b.falling ? a.falling < b.falling : a.place < b.place;
            };
            if (limit) std::nth_element(found.begin(), found.begin() + (long)limit - 1, found.end(), before);
            found.resize(limit);
            std::sort(found.begin(), found.end(), [](const Placed& a, const Placed& b) { return a.place < b.place; });
        }
        sort_falling(found);
        number = std::min(limit, found.size());
        for (size_t at = 0; at < number; at++) places[at] = found[at].place;
    }
    return PyLong_FromSize_t(number);
}

// highest_of_runs(scores of first blocks, lengths, among, runs out, offsets out) -> how many blocks:
// as `highest`, where each run's next block scores a tie of depth more.
inline PyObject* highest_of_runs(Arguments with, Py_ssize_t count) {
    expect(count, 5);
    Array<const double> scores(with[0]);
    Array<const int64_t> lengths(with[1]);
    Array<const uint8_t> among(with[2]);
    Array<int64_t> runs(with[3]), offsets(with[4]);
    size_t n = scores.size(), limit = runs.size(), number = 0;
    if (lengths.size() != n || among.size() != n || offsets.size() != limit)
        raise_type_error("a length and a mark are needed for each score");
    {
        Unlocked unlocked(n);
        auto at_offset = [&](size_t run, int64_t offset) { return scores[run] + (double)offset * DEPTH_TIE; };
        std::vector<Placed> order;  // runs by their last blocks, which go first
        for (size_t run = 0; run < n; run++)
            if (among[run] && lengths[run] > 0)
                order.push_back({falling(at_offset(run, lengths[run] - 1)), (uint32_t)run});
        sort_falling(order);
        // Whatever scores less than all of the first runs that hold enough is not among the highest.
        size_t chosen = 0, blocks = 0;
        double least = INFINITY;
        for (; chosen < order.size() && blocks < limit; chosen++) {
            size_t run = order[chosen].place;
            blocks += (size_t)lengths[run];
            least = std::min(least, scores[run]);
        }
        while (chosen < order.size() && order[chosen].falling <= falling(least)) chosen++;
        order.resize(chosen);
        std::sort(order.begin(), order.end(), [](const Placed& a, const Placed& b) { return a.place < b.place; });
        std::vector<Placed> found;
        std::vector<std::pair<uint32_t, int64_t>> of;
        for (const Placed& each : order)
            for (int64_t offset = 0; offset < lengths[each.place]; offset++) {
                double score = at_offset(each.place, offset);
                if (score < least) continue;
                found.push_back({falling(score), (uint32_t)of.size()});
                of.push_back({each.place, offset});
            }
        sort_falling(found);
        number = std::min(limit, found.size());
        for (size_t at = 0; at < number; at++) {
            runs[at] = of[found[at].place].first;
            offsets[at] = of[found[at].place].second;
        }
    }
    return PyLong_FromSize_t(number);
}

}  // namespace chains
