// Scores of chains: a block goes after all that stand behind it; and the highest of many scores.
#pragma once
#include "arrays.hpp"

#include <algorithm>
#include <cmath>

namespace chains {

constexpr double DEPTH_TIE = 1e-5;  // as in graph/tables/blocks.py
constexpr double MOST_TOLD_APART = 1e10;  // of scores: here one differs from itself and a tie still

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
    if (found.size() < 512) {
        auto before = [](const Placed& a, const Placed& b) { return a.falling < b.falling; };
        std::stable_sort(found.begin(), found.end(), before);
        return;
    }
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
        std::vector<Placed> found;
        std::vector<std::pair<uint32_t, int64_t>> of;
        for (size_t from = 0, to; from < order.size() && number < limit; from = to) {
            // Runs that lie among each other are put in order together; few do, as a session's score
            // is far from another's beside what blocks of one chain differ by.
            double least = scores[order[from].place];
            for (to = from + 1; to < order.size() && order[to].falling <= falling(least); to++)
                least = std::min(least, scores[order[to].place]);
            if (to == from + 1 && std::fabs(least) < MOST_TOLD_APART) {
                size_t run = order[from].place;
                for (int64_t offset = lengths[run]; offset-- > 0 && number < limit; number++) {
                    runs[number] = (int64_t)run;
                    offsets[number] = offset;
                }
                continue;
            }
            std::sort(order.begin() + (long)from, order.begin() + (long)to,
                      [](const Placed& a, const Placed& b) { return a.place < b.place; });
            found.clear();
            of.clear();
            for (size_t each = from; each < to; each++)
                for (int64_t offset = 0; offset < lengths[order[each].place]; offset++) {
                    found.push_back({falling(at_offset(order[each].place, offset)), (uint32_t)of.size()});
                    of.push_back({order[each].place, offset});
                }
            sort_falling(found);
            for (size_t at = 0; at < found.size() && number < limit; at++, number++) {
                runs[number] = of[found[at].place].first;
                offsets[number] = of[found[at].place].second;
            }
        }
    }
    return PyLong_FromSize_t(number);
}

}  // namespace chains
