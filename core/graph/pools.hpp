// What engines' pools would hold under other orders: exact LRU at several sizes, and pools that
// rankings evict from. Rows are the graph's; here each that is known has a place of its own, so
// that room is taken for what one engine uses, whatever the graph holds.
#pragma once
#include "arrays.hpp"
#include "chains.hpp"
#include "index.hpp"

#include <algorithm>

namespace pools {

constexpr int32_t NO_PLACE = -1;

// From rows to places, which are reused.
class Places {
public:
    Places() { rebuild(64); }

    int32_t find(int32_t row) const {
        for (size_t slot = first(row);; slot = (slot + 1) & mask_) {
            int32_t place = slots_[slot];
            if (place == NO_PLACE || rows_[(size_t)place] == row) return place;
        }
    }

    bool has(int32_t row, int32_t place) const { return (uint32_t)place < rows_.size() && rows_[(size_t)place] == row; }

    // A place for a row that has none.
    int32_t add(int32_t row) {
        int32_t place;
        if (2 * (used_ + 1) > slots_.size()) rebuild(2 * slots_.size());
        if (free_.empty()) {
            place = (int32_t)rows_.size();
            rows_.push_back(row);
        } else {
            place = free_.back();
            free_.pop_back();
            rows_[(size_t)place] = row;
        }
        put(row, place);
        used_++;
        return place;
    }

    // Forget the rows at all places but those of which `kept` is true.
    template <class Kept>
    void keep(Kept kept) {
        size_t gone = 0;
        for (size_t place = 0; place < rows_.size(); place++) gone += rows_[place] >= 0 && !kept(place);
        bool few = 4 * gone < used_;  // of more, all others are put anew sooner than each is taken out
        for (size_t place = 0; place < rows_.size(); place++) {
            if (rows_[place] < 0 || kept(place)) continue;
            if (few) take_out((int32_t)place);
            rows_[place] = -1;
            free_.push_back((int32_t)place);
        }
        used_ -= gone;
        if (!few) rebuild(slots_.size());
    }

    size_t size() const { return rows_.size(); }  // places ever used
    size_t used() const { return used_; }
    int32_t row(size_t place) const { return rows_[place]; }
    size_t bytes() const { return 4 * (slots_.capacity() + rows_.capacity() + free_.capacity()); }

private:
    size_t first(int32_t row) const { return ((uint64_t)(uint32_t)row * index_::MULTIPLIER) >> shift_; }
    void put(int32_t row, int32_t place) {
        size_t slot = first(row);
        while (slots_[slot] != NO_PLACE) slot = (slot + 1) & mask_;
        slots_[slot] = place;
    }
    void take_out(int32_t place) {
        size_t hole = first(rows_[(size_t)place]);
        while (slots_[hole] != place) hole = (hole + 1) & mask_;
        for (size_t slot = (hole + 1) & mask_; slots_[slot] != NO_PLACE; slot = (slot + 1) & mask_) {
            size_t from_home = (slot - first(rows_[(size_t)slots_[slot]])) & mask_;
            if (from_home < ((slot - hole) & mask_)) continue;  // it would stand before its first slot
            slots_[hole] = slots_[slot];
            hole = slot;
        }
        slots_[hole] = NO_PLACE;
    }
    void rebuild(size_t slots) {
        slots_.assign(slots, NO_PLACE);
        mask_ = slots - 1;
        shift_ = 64 - __builtin_ctzll(slots);
        for (size_t place = 0; place < rows_.size(); place++)
            if (rows_[place] >= 0) put(rows_[place], (int32_t)place);
    }

    std::vector<int32_t> slots_, rows_, free_;
    size_t mask_ = 0, used_ = 0;
    int shift_ = 0;
};

// Looks for rows one after the other: the places of a chain's blocks mostly stand side by side, one way or
// the other.
class Search {
public:
    explicit Search(const Places& places) : places_(places) {}

    int32_t find(int32_t row) {
        int32_t place = last_ + step_;
        if (!places_.has(row, place)) {
            place = last_ - step_;
            if (places_.has(row, place)) step_ = -step_;
            else place = places_.find(row);
        }
        if (place != NO_PLACE) last_ = place;
        return place;
    }
    void added(int32_t place) { last_ = place; }

private:
    const Places& places_;
    int32_t last_ = INT32_MIN / 2, step_ = 1;
};

// Numbered uses, in the order in which blocks were used: a bit for each says whether its block was
// not used again since.
class Uses {
public:
    size_t size() const { return size_; }
    bool stands(size_t use) const { return words_[use / 64] >> (use % 64) & 1; }
    void falls(size_t use) { words_[use / 64] &= ~(1ull << (use % 64)); }

    void add(size_t n) {
        words_.resize((size_ + n + 63) / 64, 0);
        for (size_t end = size_ + n; size_ < end;) {
            size_t bit = size_ % 64, more = std::min(end - size_, 64 - bit);
            words_[size_ / 64] |= (more == 64 ? ~0ull : (1ull << more) - 1) << bit;
            size_ += more;
        }
    }

    // Number those that stand anew, from `first` on: `now(use)` is a use's next number.
    void renumber(size_t first) {
        for (size_t word = 0; word < first / 64; word++) words_[word] = 0;
        if (first % 64) words_[first / 64] &= ~0ull << (first % 64);
        before_.assign(words_.size() + 1, 0);
        for (size_t word = 0; word < words_.size(); word++)
            before_[word + 1] = before_[word] + (uint32_t)__builtin_popcountll(words_[word]);
    }
    size_t now(size_t use) const {
        size_t word = use / 64;
        if (word == words_.size()) return before_[word];
        return before_[word] + (size_t)__builtin_popcountll(words_[word] & ((1ull << (use % 64)) - 1));
    }
    void renumbered() {
        size_t left = before_.back();
        words_.clear();
        size_ = 0;
        add(left);
    }

    size_t bytes() const { return 8 * words_.capacity() + 4 * before_.capacity(); }

private:
    std::vector<uint64_t> words_;
    std::vector<uint32_t> before_;  // by word: how many stand before it
    size_t size_ = 0;
};

// Pools of several sizes under LRU (Mattson et al., 1970): when each block was used, and where each
// pool's cut is. See advisor/policies/shadow.py.
class Stack {
public:
    explicit Stack(const std::vector<int64_t>& capacities) {
        for (int64_t capacity : capacities) {
            cuts_.push_back({capacity, 0, 0});
            most_ = std::max(most_, capacity);
        }
    }

    std::vector<int64_t> found(const int32_t* rows, const uint64_t* keys, size_t n) {
        std::vector<int64_t> uses;
        uses.reserve(n);
        Search search(places_);
        for (size_t at = 0; at < n; at++) {
            int32_t place = search.find(rows[at]);
            if (place == NO_PLACE || key_[(size_t)place] != keys[at]) break;
            uses.push_back(used_[(size_t)place]);
        }
        std::vector<int64_t> counts;
        for (Cut& cut : cuts_) {
            if (cut.held > cut.capacity) evict(cut);
            size_t count = 0;
            while (count < uses.size() && uses[count] >= cut.at) count++;
            counts.push_back((int64_t)count);
        }
        return counts;
    }

    void use(const int32_t* rows, const uint64_t* keys, size_t n) {
        uses_.add(n);
        Search search(places_);
        int64_t next = (int64_t)uses_.size() - (int64_t)n;
        int64_t latest = NEVER + 1;  // what was used from here on is in every pool
        for (const Cut& cut : cuts_) latest = std::max(latest, cut.at);
        for (size_t at = n; at-- > 0;) {  // its tail is the oldest of them
            int32_t place = search.find(rows[at]);
            int64_t before = NEVER;
            if (place != NO_PLACE) {
                before = used_[(size_t)place];
            } else {
                search.added(place = places_.add(rows[at]));
                if ((size_t)place >= used_.size()) {
                    used_.resize(places_.size() + places_.size() / 4, NEVER);
                    key_.resize(used_.size());
                }
            }
            if (before != NEVER) uses_.falls((size_t)before);
            if (before < latest)
                for (Cut& cut : cuts_) cut.held += before < cut.at || before == NEVER;
            used_[(size_t)place] = next++;
            key_[(size_t)place] = keys[at];
        }
        for (Cut& cut : cuts_)
            if (cut.held > cut.capacity + cut.capacity / 64) evict(cut);
        if (uses_.size() > 8 * (size_t)most_ + 4096) shorten();
    }

    size_t pools() const { return cuts_.size(); }
    size_t bytes() const { return places_.bytes() + 8 * (used_.capacity() + key_.capacity()) + uses_.bytes(); }

private:
    struct Cut {
        int64_t capacity, at, held;  // what was used before `at` is out
    };
    static constexpr int64_t NEVER = -1;

    void evict(Cut& cut) {
        int64_t excess = cut.held - cut.capacity;
        cut.held = cut.capacity;
        while (excess > 0) excess -= uses_.stands((size_t)cut.at++);
    }

    // Number the uses that still stand anew, and forget what is in no pool: so the log stays as
    // long as the pools are large, however often few blocks are used.
    void shorten() {
        for (Cut& cut : cuts_)
            if (cut.held > cut.capacity) evict(cut);
        int64_t first = (int64_t)uses_.size();
        for (const Cut& cut : cuts_) first = std::min(first, cut.at);
        uses_.renumber((size_t)first);
        places_.keep([&](size_t place) { return used_[place] >= first; });
        for (size_t place = 0; place < places_.size(); place++)
            if (places_.row(place) >= 0) used_[place] = (int64_t)uses_.now((size_t)used_[place]);
        for (Cut& cut : cuts_) cut.at = (int64_t)uses_.now((size_t)cut.at);
        uses_.renumbered();
    }

    std::vector<Cut> cuts_;
    Places places_;
    std::vector<int64_t> used_;  // by place: when it was last used
    std::vector<uint64_t> key_;  // by place: the block that it was then
    Uses uses_;
    int64_t most_ = 0;
};

// Pools that follow the same requests, and evict by rankings; see advisor/policies/shadow.py.
class Ranked {
public:
    static constexpr int MOST = 16;

    int join(int64_t capacity) {
        int number = 0;
        while (number < MOST && joined_ >> number & 1) number++;
        if (number == MOST) return -1;
        joined_ |= 1u << number;
        order_.push_back(number);
        pools_[number] = Pool{};
        pools_[number].capacity = capacity;
        return number;
    }

    void leave(int number) {
        joined_ &= ~(1u << number);
        order_.erase(std::remove(order_.begin(), order_.end(), number), order_.end());
        for (uint16_t& held : held_by_) held &= (uint16_t)~(1u << number);
        pools_[number] = Pool{};
    }

    bool is_in(int number) const { return number >= 0 && number < MOST && (joined_ >> number & 1); }
    void resize(int number, int64_t capacity) { pools_[number].capacity = capacity; }

    // How many of these blocks each pool holds, from the first on without a gap.
    std::vector<int64_t> found(const int32_t* rows, const uint64_t* keys, size_t n) const {
        std::vector<int64_t> counts(MOST, 0);
        uint16_t whole = (uint16_t)joined_;
        Search search(places_);
        for (size_t at = 0; at < n && whole; at++) {
            int32_t place = search.find(rows[at]);
            if (place == NO_PLACE || key_[(size_t)place] != keys[at]) break;
            whole &= held_by_[(size_t)place];
            for (int number : order_) counts[(size_t)number] += whole >> number & 1;
        }
        return counts;
    }

    void use(const int32_t* rows, const uint64_t* keys, size_t n) {
        Search search(places_);
        for (size_t at = 0; at < n; at++) {
            size_t place = ensure(search, rows[at]).first;
            uint16_t lacking = (uint16_t)(joined_ & ~held_by_[place]);
            if (lacking) {
                for (int number : order_) pools_[number].held += lacking >> number & 1;
                held_by_[place] = (uint16_t)joined_;
            }
            key_[place] = keys[at];
            used_[place] = count_ + (int64_t)(n - at);
        }
        count_ += (int64_t)n;
        for (int number : order_)
            if (pools_[number].held > pools_[number].capacity) evict_surplus(number);
        forget_some();
    }

    // One pool holds these; those of which no use is known count as used before all others.
    void seed(int number, const Array<const int32_t>& rows, const Array<const uint64_t>& keys) {
        int64_t unknown = 0;
        Search search(places_);
        for (size_t at = 0; at < rows.size(); at++) {
            auto [place, fresh] = ensure(search, rows[at]);
            if (fresh || key_[place] != keys[at]) {
                for (int each : order_) pools_[each].held -= held_by_[place] >> each & 1;
                held_by_[place] = 0;
                key_[place] = keys[at];
                used_[place] = -++unknown;
            }
            if (!(held_by_[place] >> number & 1)) {
                held_by_[place] |= (uint16_t)(1u << number);
                pools_[number].held++;
            }
        }
        if (pools_[number].held > pools_[number].capacity) evict_surplus(number);
    }

    // Rows of the blocks that a pool holds and the table still has, ascending.
    void rows(int number, const Array<const uint64_t>& now, std::vector<int32_t>& found) const {
        std::vector<uint64_t> marks(now.size() / 64 + 1, 0);  // a bit for each row
        for (size_t place = 0; place < places_.size(); place++) {
            int32_t row = places_.row(place);
            if (row >= 0 && (held_by_[place] >> number & 1) && (size_t)row < now.size() && now[(size_t)row] == key_[place])
                marks[(size_t)row / 64] |= 1ull << ((size_t)row % 64);
        }
        found.reserve((size_t)std::max<int64_t>(0, pools_[number].held));
        for (size_t word = 0; word < marks.size(); word++)
            for (uint64_t left = marks[word]; left; left &= left - 1)
                found.push_back((int32_t)(64 * word) + (int32_t)__builtin_ctzll(left));
    }

    // Runs of so many consecutive rows; without lengths, single ones.
    void adopt(int number, const Array<const int32_t>& firsts, const Array<const double>& scores, const int64_t* lengths) {
        Pool& pool = pools_[number];
        pool.firsts.assign(firsts.begin(), firsts.end());
        pool.order.begin(firsts.size());
        for (size_t at = 0; at < firsts.size(); at++) pool.order.add(scores[at], lengths ? lengths[at] : 1);
        pool.as_of = count_;
    }

    void use_up(int number) {
        pools_[number].order.clear();
        pools_[number].firsts.clear();
    }

    int64_t held(int number) const { return pools_[number].held; }
    int64_t used(int32_t row) const {
        int32_t place = places_.find(row);
        return place == NO_PLACE ? 0 : used_[(size_t)place];
    }
    size_t bytes() const {
        size_t rankings = 0;
        for (const Pool& pool : pools_) rankings += pool.order.bytes() + 4 * pool.firsts.capacity();
        return places_.bytes() + 8 * (key_.capacity() + used_.capacity()) + 2 * held_by_.capacity() + rankings;
    }

private:
    static constexpr size_t LEAST_KNOWN = 1 << 14;  // blocks that are known at least; chosen
    static constexpr int64_t PARTS = 512;  // of a full pool, one is emptied ahead; see shadow.py

    struct Pool {
        int64_t capacity = 0, held = 0;
        int64_t as_of = 0;            // the uses that the ranking knew
        std::vector<int32_t> firsts;  // of runs that are ranked: each one's first row
        chains::InOrder order;
    };

    // The place of a row, and whether it is new.
    std::pair<size_t, bool> ensure(Search& search, int32_t row) {
        int32_t place = search.find(row);
        bool fresh = place == NO_PLACE;
        if (fresh) search.added(place = places_.add(row));
        if ((size_t)place >= key_.size()) {
            size_t room = places_.size() + places_.size() / 4;
            key_.resize(room);
            used_.resize(room);
            held_by_.resize(room);
        }
        if (fresh) {
            key_[(size_t)place] = 0;
            used_[(size_t)place] = 0;
            held_by_[(size_t)place] = 0;
        }
        return {(size_t)place, fresh};
    }

    void evict_surplus(int number) {
        Pool& pool = pools_[number];
        int64_t kept = pool.capacity - pool.capacity / PARTS, excess = pool.held - kept;
        pool.held = kept;
        chains::InOrder::Block victim;
        while (excess > 0) {
            if (!pool.order.next(victim)) {  // the longest unused goes
                rank_by_age(number);
                if (pool.order.empty()) return;
                continue;
            }
            int32_t place = places_.find(pool.firsts[victim.run] + (int32_t)victim.offset);
            if (place == NO_PLACE || !(held_by_[(size_t)place] >> number & 1) || used_[(size_t)place] > pool.as_of) continue;
            held_by_[(size_t)place] &= (uint16_t)~(1u << number);
            excess--;
        }
    }

    void rank_by_age(int number) {
        Pool& pool = pools_[number];
        pool.firsts.clear();
        pool.order.begin(0, &pool.firsts);
        for (size_t place = 0; place < places_.size(); place++) {
            if (places_.row(place) < 0 || !(held_by_[place] >> number & 1)) continue;
            pool.firsts.push_back(places_.row(place));
            pool.order.add(-(double)used_[place], 1);
        }
        pool.as_of = count_;
    }

    // What no pool holds is remembered for a while: it may be held again by a pool that begins.
    void forget_some() {
        if (places_.used() <= std::max(LEAST_KNOWN, most_)) return;
        places_.keep([&](size_t place) { return held_by_[place] != 0; });
        most_ = 2 * places_.used();
    }

    Places places_;
    std::vector<uint64_t> key_;      // by place
    std::vector<int64_t> used_;      // by place: which use was its last
    std::vector<uint16_t> held_by_;  // by place: a bit for each pool
    Pool pools_[MOST];
    std::vector<int> order_;  // pools, as they joined
    uint32_t joined_ = 0;
    int64_t count_ = 0;
    size_t most_ = 0;
};

}  // namespace pools
