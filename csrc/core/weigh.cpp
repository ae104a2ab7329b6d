#include "weigh.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace dartspec {

void weigh_tree(const Cells& table, std::span<const std::int32_t> parents, std::span<const float> scores, float own,
                std::int32_t* cells, float* chance, float* value, std::int32_t* order) {
  thread_local std::vector<std::int32_t> depth;
  const auto n = parents.size();
  const auto width = static_cast<std::int32_t>(table.steps.size() + 1);
  const auto deepest = static_cast<std::int32_t>(table.num_depths());
  depth.assign(n, 0);
  cells[0] = 0;
  chance[0] = value[0] = 1.0f;
  for (std::size_t i = 1; i < n; ++i) {
    const auto p = static_cast<std::size_t>(parents[i]);
    depth[i] = depth[p] + 1;
    const float step = p == 0 ? scores[i] : scores[i] - scores[p];
    const auto at = std::upper_bound(table.steps.begin(), table.steps.end(), step) - table.steps.begin();
    cells[i] = (std::min(depth[i], deepest) - 1) * width + static_cast<std::int32_t>(at);
    chance[i] = 1.0f / (1.0f + std::exp(-table.log_odds[static_cast<std::size_t>(cells[i])] - own));
    value[i] = value[p] * chance[i];
  }
  std::iota(order, order + (n - 1), 1);
  std::stable_sort(order, order + (n - 1), [&](std::int32_t a, std::int32_t b) { return value[a] > value[b]; });
}

Lesson learn_tree(std::span<const std::int32_t> parents, const std::int32_t* cells, const float* chance,
                  const float* value, std::span<const std::int32_t> kept, std::span<const std::int32_t> path,
                  double* hits, double* trials, double* bins, std::int64_t num_bins) {
  thread_local std::vector<char> accepted;
  accepted.assign(parents.size(), 0);
  for (const std::int32_t i : path) accepted[static_cast<std::size_t>(kept[static_cast<std::size_t>(i)])] = 1;
  Lesson lesson{0, 0};
  for (const std::int32_t node : kept.subspan(1)) {
    const auto i = static_cast<std::size_t>(node);
    const double hit = accepted[i], p = chance[i];
    if (bins != nullptr) {
      double* bin = bins + 3 * std::min<std::int64_t>(num_bins - 1, static_cast<std::int64_t>(value[i] * num_bins));
      bin[0] += 1;
      bin[1] += hit;
      bin[2] += value[i];
    }
    if (!accepted[static_cast<std::size_t>(parents[i])]) continue;
    lesson.surprise += hit - p;
    lesson.spread += p * (1 - p);
    if (trials != nullptr) {
      trials[cells[i]] += 1;
      hits[cells[i]] += hit;
    }
  }
  return lesson;
}

}  // namespace dartspec
