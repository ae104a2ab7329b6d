// Scores a few candidate tokens after many contexts at once: what the tree search asks at every level.
// Memory accesses of all contexts are begun together, so that their latencies overlap.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "ngram_index.hpp"

namespace dartspec {

// g = backoff^(tokens of the longest context that are not used) * freq(context + token) / freq(context), longest
// context first; backoff 1 is the official program's rule, below 1 it is "stupid back-off" (Brants et al. 2007).
// Holds scratch: allocates while a call is larger than all before it, never after. One thread at a time.
class NgramQuery {
 public:
  explicit NgramQuery(double backoff = 1.0, double weight = 1.0, double eps = 0.0)
      : backoff_(backoff), weight_(weight), eps_(eps) {}

  // rows: (states, wanted.n), g of each candidate after each state, 0 where it was never seen; or, with `terms`,
  // weight * log(g + eps). Also remembers which nodes the candidates are, for next().
  void score(const NgramIndex& index, std::span<const NgramState> states, const WantedTokens& wanted, bool terms,
             double* rows);
  // The state after states[row] and candidate `i` of the last call of score(), without a search.
  NgramState next(int row, int i) const;

 private:
  void bind(const NgramIndex& index);
  void fill(const NgramIndex& index, int level, std::uint32_t node, NgramIndex::Range range, const WantedTokens& wanted,
            bool terms, double* row, std::uint32_t* kids) const;

  double backoff_, weight_, eps_;
  std::uint64_t serial_ = 0;
  int order_ = 0, n_ = 0;
  std::array<double, kMaxOrder + 1> factor_{};  // by length of the context
  std::vector<double> code_value_, code_term_;  // (level, code): g, and its term
  std::vector<std::uint32_t> unigram_;          // (n): the candidates' own nodes of level 1
  std::vector<double> short_rows_;              // one a distinct last token
  std::vector<std::uint32_t> short_nodes_, short_kids_, short_of_, kids_;
  std::vector<NgramIndex::Range> ranges_;
  int num_short_ = 0;
};

// v[i] = weight * log(v[i] + eps), the same bits on every machine.
void log_terms(double* v, std::size_t n, double weight, double eps);

}  // namespace dartspec
