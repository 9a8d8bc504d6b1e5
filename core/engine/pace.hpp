// What an engine's steps take of its pool, and how fast they compute prompts: numbers that a step
// brings up to date, and that Python decides by.

#ifndef KVGRAPH_PACE_HPP
#define KVGRAPH_PACE_HPP

#include <algorithm>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

// Prompts that vLLM looked up and has not computed yet; as Python's ``PromptDemand``.
class Demand {
 public:
  int64_t prompts = 0;  // blocks that they still need
  int64_t loaded = 0;   // of them, those that loads can fill

  bool empty() const { return known_.empty(); }

  void looked_up(const std::string& request, int64_t needs, int64_t has, int64_t loads) {
    finished(request);
    known_[request] = {needs, has, loads};
    prompts += needs - has;
    loaded += loads;
  }

  void computed(const std::string& request, int64_t end) {
    auto found = known_.find(request);
    if (found == known_.end()) return;
    Prompt& prompt = found->second;
    if (end >= prompt.needs - 1) {
      forget(found);
    } else {
      prompts -= end - prompt.has;
      prompt.has = end;
    }
  }

  void finished(const std::string& request) {
    auto found = known_.find(request);
    if (found != known_.end()) forget(found);
  }

 private:
  struct Prompt {
    int64_t needs, has, loads;
  };
  using Known = std::unordered_map<std::string, Prompt>;

  void forget(Known::iterator found) {
    prompts -= found->second.needs - found->second.has;
    loaded -= found->second.loads;
    known_.erase(found);
  }

  Known known_;
};

// How fast prompts are computed, told from when steps are scheduled; as ``PrefillMeter``.
struct Meter {
  double tokens_per_s = 0.0;
  double at = 0.0;               // when the last step was scheduled
  std::vector<int64_t> tokens{0};  // of the steps under way, the oldest first
  int64_t least = 64;            // steps with fewer say little
  double share = 0.2;            // weight of the newest sample
  double longest_s = 10.0;       // what lies longer apart is no step

  // ``goes_on``: whether a request that ran in the last step still runs.
  void stepped(int64_t now_tokens, bool goes_on, double now) {
    const double took = now - at;
    if (!goes_on) {
      std::fill(tokens.begin(), tokens.end(), 0);
    } else if (tokens[0] >= least && took > 0 && took < longest_s) {
      const double sample = static_cast<double>(tokens[0]) / took;
      tokens_per_s = tokens_per_s != 0.0 ? tokens_per_s + share * (sample - tokens_per_s) : sample;
    }
    std::rotate(tokens.begin(), tokens.begin() + 1, tokens.end());
    tokens.back() = now_tokens;
    at = now;
  }
};

// How many blocks a step takes; as ``Window`` counts it.
struct Pace {
  int64_t reach = 0;    // that the next step can take at most
  int64_t prompts = 0;  // of them, those of prompts
  int64_t most = 0;     // that any step can take, but for loads
  int64_t apart = 1;    // a difference of so many is none
  double largest = 0;   // step of late
  double fade = 1;      // what that counts one step later
  int64_t taken = 0;    // blocks that the last step evicted
  int64_t ahead = 0;    // steps for which victims are laid beforehand; 0: for the next alone
  int64_t most_ahead = 0, least_ahead = 0;  // victims

  bool expect(int64_t decoding, int64_t for_prompts, int64_t loads) {
    const int64_t wanted = (1 + (decoding + for_prompts) / apart) * apart;  // never none
    const int64_t next = std::min(most, wanted) + loads;
    const bool grown = next > reach;
    if (grown || next < reach - apart) reach = next;
    prompts = std::min(for_prompts, next);
    return grown;
  }

  // Victims that must be left so that no more are due.
  int64_t enough() const {
    if (ahead == 0) return reach;
    const int64_t of_late = static_cast<int64_t>(static_cast<double>(ahead) * largest);
    const int64_t size = std::min(most_ahead, std::max({least_ahead, of_late, prompts}));
    return std::max({reach, size / 2, prompts});
  }

  void step_ended(int64_t evicted) {
    taken = evicted;
    const double faded = fade * largest;
    largest = faded > static_cast<double>(evicted) ? faded : static_cast<double>(evicted);
  }
};

#endif
