// The lab's orders that need no graph: vLLM's own, and Belady's.
#pragma once
#include "arrays.hpp"

#include <algorithm>
#include <queue>

namespace lab {

struct Chains {
    Array<const int64_t> starts;
    Array<const int32_t> blocks, limits;
    int64_t known;  // blocks are below this
    Chains(PyObject* starts, PyObject* blocks, PyObject* limits, PyObject* known)
        : starts(starts), blocks(blocks), limits(limits), known(as_integer(known)) {
        size_t requests = this->limits.size();
        bool fits = this->starts.size() == requests + 1 && this->starts[0] >= 0 &&
                    this->starts[requests] <= (int64_t)this->blocks.size();
        for (size_t at = 0; fits && at < requests; at++) fits = this->starts[at] <= this->starts[at + 1];
        for (int32_t block : this->blocks) fits &= block >= 0 && block < this->known;
        if (!fits) raise_type_error("chains are not whole, or of blocks that are not known");
    }
};

// lru(starts, blocks, limits, blocks known, capacity, hits out); see advisor/replay/fast/lru.py
inline PyObject* lru(Arguments with, Py_ssize_t count) {
    expect(count, 6);
    Chains chains(with[0], with[1], with[2], with[3]);
    int64_t room = as_integer(with[4]), capacity = room;
    Array<int32_t> hits(with[5]);
    if (hits.size() != chains.limits.size()) raise_type_error("a place is needed for each request");
    {
        Unlocked unlocked(chains.blocks.size());
        // A ring of blocks, the longest unused first; `end` is between its last and its first.
        int32_t end = (int32_t)chains.known, none = -1;
        std::vector<int32_t> before((size_t)end + 1, none), after((size_t)end + 1, none);
        before[(size_t)end] = after[(size_t)end] = end;
        auto leave = [&](int32_t block) {
            if (after[(size_t)block] == none) return;  // it stands twice in its chain
            int32_t a = before[(size_t)block], b = after[(size_t)block];
            after[(size_t)a] = b;
            before[(size_t)b] = a;
            after[(size_t)block] = none;
        };
        auto join = [&](int32_t block) {
            int32_t last = before[(size_t)end];
            after[(size_t)last] = block;
            before[(size_t)block] = last;
            after[(size_t)block] = end;
            before[(size_t)end] = block;
        };
        for (size_t request = 0; request < chains.limits.size(); request++) {
            const int32_t* chain = chains.blocks.data() + chains.starts[request];
            int64_t length = chains.starts[request + 1] - chains.starts[request], there = 0;
            while (there < length && after[(size_t)chain[there]] != none) there++;
            hits[request] = length > capacity ? 0 : (int32_t)std::min<int64_t>(there, chains.limits[request]);
            if (length > capacity) continue;  // vLLM refuses what can never fit
            for (int64_t at = 0; at < there; at++) leave(chain[at]);
            room -= length - there;
            for (; room < 0 && after[(size_t)end] != end; room++) leave(after[(size_t)end]);
            for (int64_t at = length; at-- > 0;)
                if (after[(size_t)chain[at]] == none) join(chain[at]);
        }
    }
    return nothing();
}

// belady(starts, blocks, limits, blocks known, capacity, prompts, depths, hits out): a block's next
// use is that by the next request whose prompt has it. See advisor/replay/fast/bounds.py.
inline PyObject* belady(Arguments with, Py_ssize_t count) {
    expect(count, 8);
    Chains chains(with[0], with[1], with[2], with[3]);
    const int64_t capacity = std::max<int64_t>(0, as_integer(with[4])), never = INT64_MAX;
    Array<const int32_t> prompts(with[5]), depths(with[6]);
    Array<int32_t> hits(with[7]);
    size_t requests = chains.limits.size();
    if (hits.size() != requests || prompts.size() != requests || (int64_t)depths.size() < chains.known)
        raise_type_error("prompts, depths or places differ in length from the chains");
    {
        Unlocked unlocked(chains.blocks.size());
        struct Use {
            int64_t coming;
            int32_t depth, block;
            bool operator<(const Use& other) const {
                if (coming != other.coming) return coming < other.coming;
                return depth != other.depth ? depth < other.depth : block > other.block;
            }
        };
        std::vector<int64_t> coming((size_t)chains.known, never), uses(chains.blocks.size());
        for (size_t request = requests; request-- > 0;) {
            size_t start = (size_t)chains.starts[request], end = (size_t)chains.starts[request + 1];
            for (size_t at = start; at < end; at++) uses[at] = coming[(size_t)chains.blocks[at]];
            for (size_t at = start; at < std::min(end, start + (size_t)std::max(prompts[request], 0)); at++)
                coming[(size_t)chains.blocks[at]] = (int64_t)request;
        }
        std::priority_queue<Use> heap;
        std::vector<int64_t> due((size_t)chains.known, -1);
        int64_t held = 0;
        for (size_t request = 0; request < requests; request++) {
            size_t start = (size_t)chains.starts[request], end = (size_t)chains.starts[request + 1];
            size_t most = start + std::min<size_t>(end - start, (size_t)std::max(chains.limits[request], 0));
            size_t at = start;
            while (at < most && due[(size_t)chains.blocks[at]] >= 0) at++;
            hits[request] = (int32_t)(at - start);
            for (at = start; at < end; at++) {
                int64_t& own = due[(size_t)chains.blocks[at]];
                if (uses[at] == never) {
                    held -= own >= 0;
                    own = -1;
                } else {
                    held += own < 0;
                    own = uses[at];
                    heap.push({uses[at], depths[(size_t)chains.blocks[at]], chains.blocks[at]});
                }
            }
            while (held > capacity) {
                Use farthest = heap.top();
                heap.pop();
                if (due[(size_t)farthest.block] == farthest.coming) {
                    due[(size_t)farthest.block] = -1;
                    held--;
                }
            }
        }
    }
    return nothing();
}

}  // namespace lab
