// The beam search that turns a lattice (per position, likely tokens) into a token tree: method.md section 4,
// DART Algorithm 1 and equation (10). And the two arrays that follow from a tree's parents.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ngram_index.hpp"
#include "ngram_query.hpp"

namespace dartspec {

struct SearchConfig {
  int top_k = 25;              // the first columns of each row that are considered
  int beam = 20;               // paths extended at each level
  double level_exponent = 0.7;  // level l (from 0) weighs (l + 1)^-level_exponent
  double logit_decay = 0.9;     // and its log-probability logit_decay^l
  double ngram_weight = 0.5;
  double eps = 1e-10;           // inside both logarithms
  double backoff = 1.0;         // factor of g for each token of the context that is not used
  double text_weight = 0.5;     // of the text's own counts in g, where a text is given
  double learned_weight = 0.5;  // of the learned continuity in g, where there is one
  bool ngram_at_level0 = false;
  bool softmax_over_kept = true;  // probabilities renormalised over the kept columns
};

// A sequence's own n-grams (the running text, or what a process has emitted): implemented by the live counts, asked by
// the search. For a context of 1 to kMaxOrder - 1 tokens (the last is the newest): the tokens that followed it in no
// particular order, distinct, each with its count, and their sum. Both empty and 0 for an unknown context. What is
// returned stays valid until the table next changes; asking is const, allocates nothing and takes no lock.
// The search mixes it with the index: g = (1 - text_weight) * g_index + text_weight * g_text, where g_text backs off as
// the index does, longest context first, each token on its own; without an index g = g_text.
struct Follower {
  std::int32_t token;
  std::uint32_t count;
};
class TextCounts {
 public:
  struct Followers {
    std::span<const Follower> list;
    std::uint64_t total = 0;
  };
  virtual ~TextCounts() = default;
  virtual int order() const = 0;  // contexts of up to order() - 1 tokens are known
  virtual Followers after(std::span<const std::int32_t> context) const = 0;
};

// One sequence's question and where its answer goes.
struct SearchCase {
  const float* log_probs = nullptr;      // (d, k) row-major, natural logarithms
  const std::int32_t* tokens = nullptr;  // (d, k)
  int d = 0, k = 0;
  std::int32_t root = 0;
  std::span<const std::int32_t> context;  // committed tokens, the root included and last
  const TextCounts* text = nullptr;
  int budget = 0;                         // the caller's buffers hold budget + 1 nodes
  std::int32_t* out_tokens = nullptr;
  std::int32_t* out_parents = nullptr;
  float* out_scores = nullptr;
  std::int32_t found = 0;  // set by the search: nodes written, the root included
  // (d, k, k) or null: [l, i, j] is a drafter's own g of column j of row l after column i of row l - 1; at level 0
  // after the root, i = 0. g = (1 - learned_weight) * g of index and text + learned_weight * it; alone where they are not.
  const float* learned = nullptr;
};

// Holds scratch, one for each thread: allocates while a call is larger than all before it, never after. One call at a
// time. Results depend on nothing but the case: not on the number of threads, the machine, or what was searched before.
class TreeSearch {
 public:
  explicit TreeSearch(const SearchConfig& config);
  ~TreeSearch();
  TreeSearch(const TreeSearch&) = delete;

  // Writes at most budget + 1 nodes of each case: the root first, then by falling score, parents before children.
  // `index` may be null: no continuity term, unless a case has a text.
  //
  // The order of all scored extensions is total: score, then depth, then position among the extensions of that depth
  // (rank of the parent in the beam, then column). A path's score for this order is the lowest of its prefixes' sums,
  // with 0 for the root, so a child never comes before its parent, not even where log(p + eps) is positive.
  // A column is no candidate when its log-probability is NaN or infinite, its token negative, or its token stands in
  // the row with a higher probability (or, if equal, further left). Nothing extends an end-of-text token.
  void run(std::span<SearchCase> cases, std::span<const std::int32_t> eos, const NgramIndex* index, int threads = 1);

 private:
  class Scratch;
  SearchConfig config_;
  std::vector<std::unique_ptr<Scratch>> scratch_;
};

// depths (N,) int64 and mask (N, N) bool bytes of a tree; Error when the parents are not those of a tree.
void check_parents(std::span<const std::int32_t> parents);
void tree_depths(std::span<const std::int32_t> parents, std::int64_t* depths);
void tree_ancestor_mask(std::span<const std::int32_t> parents, std::uint8_t* mask);

}  // namespace dartspec
