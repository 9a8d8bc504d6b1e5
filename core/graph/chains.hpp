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

// Runs of blocks, each of which scores a tie of depth more than the one before it in its run: the blocks
// by their scores, the highest first, of equals the first; only as far as somebody asks.
class InOrder {
public:
    struct Block {
        uint32_t run;
        int64_t offset;
    };

    // Of equals, blocks of the first run that is added go first; with ties, of that with the least.
    void begin(size_t runs, const std::vector<int32_t>* ties = nullptr) {
        clear();
        runs_.reserve(runs);
        ties_ = ties;
    }
    void add(double score, int64_t length) { runs_.push_back({score, length}); }
    void clear() {
        runs_.clear();
        order_.clear();
        found_.clear();
        from_ = sorted_ = at_ = 0;
        left_ = 0;
    }
    bool empty() const { return runs_.empty(); }
    size_t bytes() const {
        return runs_.capacity() * sizeof(Run) + order_.capacity() * sizeof(Placed) + found_.capacity() * sizeof(Block);
    }

    // The next one; false at the end.
    bool next(Block& block) {
        while (at_ == found_.size() && !left_)
            if (!open()) return false;
        block = left_ ? Block{run_, --left_} : found_[at_++];
        return true;
    }

private:
    struct Run {
        double score;  // of its first block
        int64_t length;
    };
    static constexpr size_t FEW = 8;          // runs, of which the next block is found one by one; chosen
    static constexpr size_t SOME = 1 << 15;  // runs: so many are put in order at once; chosen

    uint32_t tie(const Placed& each) const { return ties_ ? (uint32_t)(*ties_)[each.place] : each.place; }
    double score(size_t run, int64_t offset) const { return runs_[run].score + (double)offset * DEPTH_TIE; }

    // Takes the next run, and those that lie among it; false without one.
    bool open() {
        found_.clear();
        at_ = 0;
        if (order_.empty())  // runs by their last blocks, which go first
            for (size_t run = 0; run < runs_.size(); run++)
                if (runs_[run].length > 0) order_.push_back({falling(score(run, runs_[run].length - 1)), (uint32_t)run});
        if (from_ == order_.size()) return false;
        if (!sorted_ && !ties_ && order_.size() < SOME) {
            sort_falling(order_);
            sorted_ = order_.size();
        }
        // Few do: a session's score is far from another's beside what blocks of one chain differ by.
        size_t to = from_ + 1;
        double least = runs_[placed(from_).place].score;
        for (; to < order_.size() && placed(to).falling <= falling(least); to++)
            least = std::min(least, runs_[order_[to].place].score);
        // Where a tie of depth is lost in a score, blocks of a run are equals too.
        double most = runs_[order_[from_].place].score;
        bool told_apart = std::fabs(least) < MOST_TOLD_APART && std::fabs(most) < MOST_TOLD_APART;
        if (told_apart && to == from_ + 1) {
            run_ = order_[from_].place;
            left_ = runs_[run_].length;
        } else if (told_apart && to - from_ <= FEW) {
            merge(to);
        } else {
            together(to);
        }
        from_ = to;
        return true;
    }

    void by_tie(size_t to) {
        auto before = [this](const Placed& a, const Placed& b) { return tie(a) < tie(b); };
        std::sort(order_.begin() + (long)from_, order_.begin() + (long)to, before);
    }

    // Puts the blocks of a few runs in order, each of which is in order from its last block on.
    void merge(size_t to) {
        by_tie(to);
        Placed* heads = order_.data() + from_;  // by the highest of what is left of each
        size_t count = to - from_;
        int64_t left[FEW];
        auto look = [&](size_t each) { heads[each].falling = falling(score(heads[each].place, left[each] - 1)); };
        for (size_t each = 0; each < count; each++) {
            left[each] = runs_[heads[each].place].length;
            look(each);
        }
        while (count) {
            size_t best = 0;
            for (size_t each = 1; each < count; each++)
                if (heads[each].falling < heads[best].falling) best = each;
            found_.push_back({heads[best].place, --left[best]});
            if (left[best]) {
                look(best);
                continue;
            }
            count--;
            std::copy(heads + best + 1, heads + count + 1, heads + best);
            std::copy(left + best + 1, left + count + 1, left + best);
        }
    }

    // Puts the blocks of several runs in order.
    void together(size_t to) {
        by_tie(to);
        std::vector<Placed> placed;
        std::vector<Block> blocks;
        for (size_t each = from_; each < to; each++) {
            uint32_t run = order_[each].place;
            for (int64_t offset = 0; offset < runs_[run].length; offset++) {
                placed.push_back({falling(score(run, offset)), (uint32_t)blocks.size()});
                blocks.push_back({run, offset});
            }
        }
        sort_falling(placed);
        for (const Placed& each : placed) found_.push_back(blocks[each.place]);
    }

    // One of `order_`, of which as much is in order as was asked for.
    const Placed& placed(size_t at) {
        while (at >= sorted_) {
            auto before = [this](const Placed& a, const Placed& b) {
                return a.falling != b.falling ? a.falling < b.falling : tie(a) < tie(b);
            };
            size_t left = order_.size() - sorted_, part = std::max<size_t>(1024, order_.size() / 16);
            auto start = order_.begin() + (long)sorted_;
            if (left > 2 * part) {
                std::nth_element(start, start + (long)part, order_.end(), before);
                left = part;
            }
            std::sort(start, start + (long)left, before);
            sorted_ += left;
        }
        return order_[at];
    }

    std::vector<Run> runs_;
    const std::vector<int32_t>* ties_ = nullptr;
    std::vector<Placed> order_;
    size_t from_ = 0, sorted_ = 0;  // how many of them were taken, and are in order
    std::vector<Block> found_;      // blocks of runs that lie among each other
    size_t at_ = 0;                 // how many of these were taken
    uint32_t run_ = 0;              // else the run that lies alone, …
    int64_t left_ = 0;              // … and how many of its blocks are left
};

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
        InOrder order;
        order.begin(n);
        for (size_t run = 0; run < n; run++) order.add(scores[run], among[run] ? lengths[run] : 0);
        InOrder::Block block;
        for (; number < limit && order.next(block); number++) {
            runs[number] = block.run;
            offsets[number] = block.offset;
        }
    }
    return PyLong_FromSize_t(number);
}

}  // namespace chains
