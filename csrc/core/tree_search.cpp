#include "tree_search.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace dartspec {

namespace {

template <class T>
void at_least(std::vector<T>& v, std::size_t n) {
  if (v.size() < n) v.resize(n);
}

}  // namespace

TreeSearch::TreeSearch(const SearchConfig& config) : config_(config) {
  auto number = [](double v) { return std::to_string(v); };
  if (config.top_k < 1) throw Error("top_k is " + std::to_string(config.top_k) + ", expected at least 1");
  if (config.beam < 1) throw Error("beam is " + std::to_string(config.beam) + ", expected at least 1");
  if (!(config.eps > 0 && config.eps <= 1)) throw Error("eps is " + number(config.eps) + ", expected 0 < eps <= 1");
  if (!(config.logit_decay > 0 && config.logit_decay <= 1))
    throw Error("logit_decay is " + number(config.logit_decay) + ", expected 0 < logit_decay <= 1");
  for (double v : {config.level_exponent, config.ngram_weight})
    if (!(v >= 0 && std::isfinite(v)))
      throw Error("level_exponent and ngram_weight are " + number(config.level_exponent) + " and " +
                  number(config.ngram_weight) + ", expected finite and not negative");
  unseen_ = config_.ngram_weight * std::log(0.0 + config_.eps);
}

void TreeSearch::Best::reset(int new_limit) {
  at_least(items, static_cast<std::size_t>(new_limit) + 1);
  limit = new_limit;
  size = 0;
}

void TreeSearch::Best::insert(double score, std::int32_t id) {
  int at = size < limit ? size++ : size - 1;
  for (; at > 0 && items[at - 1].score < score; --at) items[at] = items[at - 1];
  items[at] = {score, id};
}

// Fills the row's arrays; returns how many candidates it has.
int TreeSearch::prepare_row(const float* log_probs, const std::int32_t* tokens, int k, double decay,
                            std::span<const std::int32_t> eos) {
  // Of equal tokens the likelier column stays, then the one further left.
  wanted_.clear(static_cast<std::size_t>(k));
  for (int j = 0; j < k; ++j) {
    if (!std::isfinite(log_probs[j]) || tokens[j] < 0) continue;
    const int held = wanted_.find(static_cast<std::uint32_t>(tokens[j]));
    if (held < 0) {
      column_[wanted_.n] = j;
      wanted_.add(tokens[j]);
    } else if (log_probs[j] > log_probs[column_[held]]) {
      column_[held] = j;
    }
  }
  const int n = wanted_.n;
  float highest = -INFINITY;
  std::sort(column_.begin(), column_.begin() + n);  // a replaced column may have left its place
  wanted_.clear(static_cast<std::size_t>(k));
  for (int i = 0; i < n; ++i) {
    const int j = column_[i];
    wanted_.add(tokens[j]);
    log_prob_[i] = log_probs[j];
    is_eos_[i] = std::find(eos.begin(), eos.end(), tokens[j]) != eos.end();
    highest = std::max(highest, log_probs[j]);
  }
  double total = 1.0;
  if (config_.softmax_over_kept) {
    total = 0.0;
    for (int j = 0; j < n; ++j) total += log_prob_[j] = std::exp(log_prob_[j] - double(highest));
  } else {
    for (int j = 0; j < n; ++j) log_prob_[j] = std::exp(std::min(log_prob_[j], 0.0));
  }
  for (int j = 0; j < n; ++j) term_[j] = decay * std::log(log_prob_[j] / total + config_.eps);
  return n;
}

void TreeSearch::bind_index(const NgramIndex* index) {
  if (index == nullptr || index->serial() == bound_serial_) return;
  bound_serial_ = index->serial();
  if (index->info().exact) return;
  const int order = index->info().order;
  at_least(code_term_, static_cast<std::size_t>(kMaxOrder) * kCodes);
  for (int level = 1; level <= order; ++level)
    for (int code = 0; code < kCodes; ++code)
      code_term_[(level - 1) * kCodes + code] =
          config_.ngram_weight * std::log(index->code_probability(level, code) + config_.eps);
}

// Overwrites the terms of the candidates that follow this context.
void TreeSearch::overlay(const NgramIndex& index, int level, std::uint32_t node, double* row) {
  if (node == kNoNode) return;
  const NgramIndex::Range range = index.children(level, node);
  if (index.info().exact) {
    const std::uint32_t parent = index.value_at(level, node);
    index.match(level + 1, range, wanted_, [&](int i, std::uint32_t, std::uint32_t value) {
      row[i] = config_.ngram_weight * std::log(index.count_ratio(level + 1, value, parent) + config_.eps);
    });
  } else {
    index.match(level + 1, range, wanted_, [&](int i, std::uint32_t, std::uint32_t value) {
      row[i] = code_term_[level * kCodes + static_cast<int>(value)];
    });
  }
}

// ngram_weight * log(g + eps) of every candidate after the state. Shortest context first, longer ones overwrite: the
// same as asking the longest first. Paths that meet in one state share a row, those that end in one token its part.
const double* TreeSearch::continuity_row(const NgramIndex& index, const NgramState& state, int n) {
  for (int r = 0; r < num_rows_; ++r)
    if (row_states_[r] == state) return rows_.data() + std::size_t(r) * n;
  int s = 0;
  while (s < num_short_ && short_nodes_[s] != state.nodes[0]) ++s;
  double* brief = short_rows_.data() + std::size_t(s) * n;
  if (s == num_short_) {
    short_nodes_[num_short_++] = state.nodes[0];
    std::fill_n(brief, n, unseen_);
    overlay(index, 1, state.nodes[0], brief);
  }
  row_states_[num_rows_] = state;
  double* row = rows_.data() + std::size_t(num_rows_++) * n;
  std::copy_n(brief, n, row);
  for (int level = 2; level < index.info().order; ++level) overlay(index, level, state.nodes[level - 1], row);
  return row;
}

std::int32_t TreeSearch::run(const float* log_probs, const std::int32_t* tokens, int d, int k, std::int32_t root,
                             std::span<const std::int32_t> context, std::span<const std::int32_t> eos, int budget,
                             const NgramIndex* index, std::int32_t* out_tokens, std::int32_t* out_parents,
                             float* out_scores) {
  out_tokens[0] = root;
  out_parents[0] = -1;
  out_scores[0] = 0.0f;
  const int stride = k;
  k = std::min(k, config_.top_k);
  if (d < 1 || k < 1 || budget < 1 || std::find(eos.begin(), eos.end(), root) != eos.end()) return 1;

  const auto width = static_cast<std::size_t>(config_.beam), columns = static_cast<std::size_t>(k);
  const std::size_t most = columns + (static_cast<std::size_t>(d) - 1) * width * columns;
  at_least(column_, columns);
  for (auto* v : {&log_prob_, &term_}) at_least(*v, columns);
  at_least(is_eos_, columns);
  at_least(rows_, width * columns);
  at_least(short_rows_, width * columns);
  at_least(row_states_, width);
  at_least(short_nodes_, width);
  at_least(paths_, width);
  at_least(next_paths_, width);
  at_least(candidates_, most);
  at_least(slot_, most);
  tree_best_.reset(static_cast<int>(std::min<std::size_t>(most, static_cast<std::size_t>(budget))));
  bind_index(index);

  int num_paths = 1;
  paths_[0] = {0.0, 0.0, -1, {}};
  if (index != nullptr) paths_[0].state = index->state_of(context);
  std::int32_t num_candidates = 0;

  for (int level = 0; level < d && num_paths > 0; ++level) {
    const double decay = std::pow(config_.logit_decay, level);
    const double weight = std::pow(level + 1.0, -config_.level_exponent);
    const int n = prepare_row(log_probs + std::size_t(level) * stride, tokens + std::size_t(level) * stride, k, decay, eos);
    const bool continuity = index != nullptr && (level > 0 || config_.ngram_at_level0);
    num_rows_ = num_short_ = 0;
    level_best_.reset(level + 1 < d ? config_.beam : 0);
    for (int b = 0; b < num_paths; ++b) {
      const Path& path = paths_[b];
      const double* row = continuity ? continuity_row(*index, path.state, n) : nullptr;
      for (int j = 0; j < n; ++j) {
        const double sum = path.sum + (row != nullptr ? term_[j] + row[j] : term_[j]) * weight;
        const double rank = std::min(path.rank, sum);
        const std::int32_t id = num_candidates++;
        const bool in_tree = tree_best_.admits(rank);
        const bool in_beam = !is_eos_[j] && level_best_.admits(sum);
        if (!in_tree && !in_beam) continue;
        candidates_[id] = {wanted_.tokens[j], path.id, sum, rank, b};
        if (in_tree) tree_best_.insert(rank, id);
        if (in_beam) level_best_.insert(sum, id);
      }
    }
    for (int b = 0; b < level_best_.size; ++b) {
      const std::int32_t id = level_best_.items[b].id;
      const Candidate& c = candidates_[id];
      next_paths_[b] = {c.sum, c.rank, id, {}};
      if (index != nullptr) next_paths_[b].state = index->extend(paths_[c.beam].state, c.token);
    }
    num_paths = level_best_.size;
    std::swap(paths_, next_paths_);
  }

  for (int i = 0; i < tree_best_.size; ++i) {
    const auto [score, id] = tree_best_.items[i];
    const Candidate& c = candidates_[id];
    slot_[id] = i + 1;
    out_tokens[i + 1] = c.token;
    out_parents[i + 1] = c.parent < 0 ? 0 : slot_[c.parent];
    out_scores[i + 1] = static_cast<float>(score);
  }
  return tree_best_.size + 1;
}

void check_parents(std::span<const std::int32_t> parents) {
  if (parents.empty()) throw Error("the tree has no node, expected at least the root");
  if (parents[0] != -1) throw Error("the root's parent is " + std::to_string(parents[0]) + ", expected -1");
  for (std::size_t i = 1; i < parents.size(); ++i)
    if (parents[i] < 0 || static_cast<std::size_t>(parents[i]) >= i)
      throw Error("node " + std::to_string(i) + " has parent " + std::to_string(parents[i]) + ", expected 0 to " +
                  std::to_string(i - 1) + ": parents come before their children");
}

void tree_depths(std::span<const std::int32_t> parents, std::int64_t* depths) {
  check_parents(parents);
  depths[0] = 0;
  for (std::size_t i = 1; i < parents.size(); ++i) depths[i] = depths[parents[i]] + 1;
}

void tree_ancestor_mask(std::span<const std::int32_t> parents, std::uint8_t* mask) {
  check_parents(parents);
  const std::size_t n = parents.size();
  std::memset(mask, 0, n * n);
  mask[0] = 1;
  for (std::size_t i = 1; i < n; ++i) {
    const auto parent = static_cast<std::size_t>(parents[i]);
    std::memcpy(mask + i * n, mask + parent * n, i);  // a parent's ancestors all come before it
    mask[i * n + i] = 1;
  }
}

}  // namespace dartspec
