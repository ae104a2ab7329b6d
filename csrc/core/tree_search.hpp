// The beam search that turns a lattice (per position, likely tokens) into a token tree: method.md section 4,
// DART Algorithm 1 and equation (10). And the two arrays that follow from a tree's parents.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ngram_index.hpp"

namespace dartspec {

struct SearchConfig {
  int top_k = 25;              // the first columns of each row that are considered
  int beam = 20;               // paths extended at each level
  double level_exponent = 0.7;  // level l (from 0) weighs (l + 1)^-level_exponent
  double logit_decay = 0.9;     // and its log-probability logit_decay^l
  double ngram_weight = 0.5;
  double eps = 1e-10;           // inside both logarithms
  bool ngram_at_level0 = false;
  bool softmax_over_kept = true;  // probabilities renormalised over the kept columns
};

// A sequence's own n-grams (the running text, or what a process has emitted): implemented by the live counts, asked by
// the search. For a context of 1 to kMaxOrder - 1 tokens (the last is the newest): the tokens that followed it in no
// particular order, distinct, each with its count, and their sum. Both empty and 0 for an unknown context. What is
// returned stays valid until the table next changes; asking is const, allocates nothing and takes no lock.
// The search mixes it with the index: g = (1 - weight) * g_index + weight * g_text, where g_text backs off as the index
// does, longest context first, each token on its own.
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

// Holds the search's scratch: allocates while a call is larger than all before it, never after. One thread at a time.
class TreeSearch {
 public:
  explicit TreeSearch(const SearchConfig& config);

  // log_probs, tokens: (d, k) row-major, natural logs. Writes at most budget + 1 nodes (the root first, then by
  // falling score, parents before children) and returns how many. `index` may be null: no continuity term.
  //
  // The order of all scored extensions is total: score, then depth, then position among the extensions of that depth
  // (rank of the parent in the beam, then column). A path's score for this order is the lowest of its prefixes' sums,
  // with 0 for the root, so a child never comes before its parent, not even where log(p + eps) is positive.
  // A column is no candidate when its log-probability is NaN or infinite, its token negative, or its token stands in
  // the row with a higher probability (or, if equal, further left). Nothing extends an end-of-text token.
  std::int32_t run(const float* log_probs, const std::int32_t* tokens, int d, int k, std::int32_t root,
                   std::span<const std::int32_t> context, std::span<const std::int32_t> eos, int budget,
                   const NgramIndex* index, std::int32_t* out_tokens, std::int32_t* out_parents, float* out_scores);

 private:
  struct Ranked {
    double score;
    std::int32_t id;
  };
  // The best `limit` seen, best first; the earlier one wins a tie.
  struct Best {
    std::vector<Ranked> items;
    int size = 0, limit = 0;
    void reset(int new_limit);
    bool admits(double score) const { return size < limit || (limit > 0 && score > items[size - 1].score); }
    void insert(double score, std::int32_t id);
  };
  struct Path {
    double sum;   // equation (10), summed
    double rank;  // lowest sum on the path
    std::int32_t id;
    NgramState state;
  };
  struct Candidate {
    std::int32_t token, parent;
    double sum, rank;
    std::int32_t beam;  // position of the parent in the beam
  };

  int prepare_row(const float* log_probs, const std::int32_t* tokens, int k, double decay,
                  std::span<const std::int32_t> eos);
  void bind_index(const NgramIndex* index);
  const double* continuity_row(const NgramIndex& index, const NgramState& state, int n);
  void overlay(const NgramIndex& index, int level, std::uint32_t node, double* row);

  SearchConfig config_;
  double unseen_;  // ngram_weight * log(0 + eps)
  std::uint64_t bound_serial_ = 0;
  std::vector<double> code_term_;  // (order, 256): ngram_weight * log(g + eps) of each code

  // the candidates of the row at hand, in column order
  WantedTokens wanted_;
  std::vector<int> column_;
  std::vector<double> log_prob_, term_;
  std::vector<std::uint8_t> is_eos_;
  // continuity rows of this level: one a distinct state, one a distinct last token
  std::vector<double> rows_, short_rows_;
  std::vector<NgramState> row_states_;
  std::vector<std::uint32_t> short_nodes_;
  int num_rows_ = 0, num_short_ = 0;

  std::vector<Path> paths_, next_paths_;
  std::vector<Candidate> candidates_;
  std::vector<std::int32_t> slot_;
  Best level_best_, tree_best_;
};

// depths (N,) int64 and mask (N, N) bool bytes of a tree; Error when the parents are not those of a tree.
void check_parents(std::span<const std::int32_t> parents);
void tree_depths(std::span<const std::int32_t> parents, std::int64_t* depths);
void tree_ancestor_mask(std::span<const std::int32_t> parents, std::uint8_t* mask);

}  // namespace dartspec
