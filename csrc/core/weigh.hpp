// How likely are a tree's nodes to be accepted? The controller's arithmetic, a few microseconds a round.
#pragma once

#include <cstdint>
#include <span>

namespace dartspec {

// Counts of what became of drafted tokens, by depth (1, 2, ... ; the last row holds all deeper ones) and by the step of
// the score from the parent's (num_steps ascending edges, num_steps + 1 cells a row).
struct Cells {
  std::span<const float> steps;
  std::span<const float> log_odds;  // depths * (num_steps + 1)

  std::int64_t num_depths() const { return static_cast<std::int64_t>(log_odds.size() / (steps.size() + 1)); }
};

// Per node: its cell, its chance to be picked where its parent is (log-odds of the cell plus `own`), and its chance to
// be accepted, the product along its path. Node 0: cell 0, both 1. order: the nodes but 0 by falling chance to be
// accepted, ties to the lowest index, so that parents come first.
// parents, scores: n nodes; cells, chance, value: n; order: n - 1.
void weigh_tree(const Cells& table, std::span<const std::int32_t> parents, std::span<const float> scores, float own,
                std::int32_t* cells, float* chance, float* value, std::int32_t* order);

// What one verified tree teaches. kept: which of the weighed nodes it has, ascending, node 0 first; path: the accepted
// ones, as indices into `kept`. Of nodes whose parent is on the path, adds 1 to trials and, if it is on the path too, to
// hits (both depths * (num_steps + 1), or null). bins (num_bins, 3), or null: by chance to be accepted, nodes, accepted,
// sum of the chances. Returns the labels' surplus over the chances, and their variance.
struct Lesson {
  double surprise, spread;
};
Lesson learn_tree(std::span<const std::int32_t> parents, const std::int32_t* cells, const float* chance,
                  const float* value, std::span<const std::int32_t> kept, std::span<const std::int32_t> path,
                  double* hits, double* trials, double* bins, std::int64_t num_bins);

}  // namespace dartspec
