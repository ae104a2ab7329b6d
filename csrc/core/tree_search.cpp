#include "tree_search.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "exact_math.hpp"
#include "kernels_pool.hpp"

namespace dartspec {

namespace {

template <class T>
void at_least(std::vector<T>& v, std::size_t n) {
  if (v.size() < n) v.resize(n);
}

constexpr int kMostContext = kMaxOrder - 1;

struct Ranked {
  double score;
  std::int32_t id;
};

// The best `limit` seen, best first; the earlier one wins a tie.
struct Best {
  std::vector<Ranked> items;
  int size = 0, limit = 0;

  void reset(int new_limit) {
    at_least(items, static_cast<std::size_t>(new_limit) + 1);
    limit = new_limit;
    size = 0;
  }
  // What a score must exceed to enter.
  double bar() const { return size < limit ? -INFINITY : limit > 0 ? items[limit - 1].score : INFINITY; }
  void insert(double score, std::int32_t id) {
    int at = size < limit ? size++ : size - 1;
    for (; at > 0 && items[at - 1].score < score; --at) items[at] = items[at - 1];
    items[at] = {score, id};
  }
};

struct Path {
  double sum;   // equation (10), summed
  double rank;  // lowest sum on the path
  std::int32_t id;
  int row;                                        // of the continuity rows
  int column = 0;                                 // of its last token in its row of the lattice
  std::array<std::int32_t, kMostContext> tail{};  // its last tokens, the newest last; kept for a text only
  int tail_size = 0;
};

struct Candidate {
  std::int32_t token, parent;
};

}  // namespace

class TreeSearch::Scratch {
 public:
  explicit Scratch(const SearchConfig& config)
      : config_(config), query_(config.backoff, config.ngram_weight, config.eps) {}

  void run(SearchCase& c, std::span<const std::int32_t> eos, const NgramIndex* index);

 private:
  int prepare_row(const float* log_probs, const std::int32_t* tokens, int k, int level, std::span<const std::int32_t> eos);
  void mix_text(const TextCounts& text, const Path& path, bool alone, int n, double* row);
  void mix_learned(const float* learned, bool alone, int n, double* row);

  SearchConfig config_;
  NgramQuery query_;
  std::vector<double> weights_, decays_;  // by level
  // the candidates of the row at hand, in column order
  WantedTokens wanted_;
  std::vector<int> column_;
  std::vector<double> log_prob_, term_, sums_;
  std::vector<std::uint8_t> is_eos_;
  std::vector<double> rows_;  // continuity of this level: one a distinct state, or one a path where there is a text
  std::vector<NgramState> states_, next_states_;
  std::vector<double> text_row_;
  std::vector<Path> paths_, next_paths_;
  std::vector<Candidate> candidates_;
  std::vector<std::int32_t> beam_of_, slot_;  // by candidate: its parent's place in the beam; its node
  std::vector<std::int32_t> column_of_;
  Best level_best_, tree_best_;
};

TreeSearch::TreeSearch(const SearchConfig& config) : config_(config) {
  auto number = [](double v) { return std::to_string(v); };
  if (config.top_k < 1) throw Error("top_k is " + std::to_string(config.top_k) + ", expected at least 1");
  if (config.beam < 1) throw Error("beam is " + std::to_string(config.beam) + ", expected at least 1");
  if (!(config.eps >= 1e-300 && config.eps <= 1)) throw Error("eps is " + number(config.eps) + ", expected 1e-300 <= eps <= 1");
  if (!(config.logit_decay > 0 && config.logit_decay <= 1))
    throw Error("logit_decay is " + number(config.logit_decay) + ", expected 0 < logit_decay <= 1");
  if (!(config.backoff > 0 && config.backoff <= 1))
    throw Error("backoff is " + number(config.backoff) + ", expected 0 < backoff <= 1");
  if (!(config.text_weight >= 0 && config.text_weight <= 1))
    throw Error("text_weight is " + number(config.text_weight) + ", expected 0 to 1");
  if (!(config.learned_weight >= 0 && config.learned_weight <= 1))
    throw Error("learned_weight is " + number(config.learned_weight) + ", expected 0 to 1");
  for (double v : {config.level_exponent, config.ngram_weight})
    if (!(v >= 0 && std::isfinite(v)))
      throw Error("level_exponent and ngram_weight are " + number(config.level_exponent) + " and " +
                  number(config.ngram_weight) + ", expected finite and not negative");
}

TreeSearch::~TreeSearch() = default;

void TreeSearch::run(std::span<SearchCase> cases, std::span<const std::int32_t> eos, const NgramIndex* index, int threads) {
  const std::size_t parts = std::min(cases.size(), static_cast<std::size_t>(std::max(threads, 1)));
  while (scratch_.size() < std::max<std::size_t>(parts, 1)) scratch_.push_back(std::make_unique<Scratch>(config_));
  struct Job {
    TreeSearch* self;
    std::span<SearchCase> cases;
    std::span<const std::int32_t> eos;
    const NgramIndex* index;
    std::size_t parts;
  } job{this, cases, eos, index, parts};
  parallel_for(threads, static_cast<std::uint32_t>(parts), [](void* context, std::uint32_t part) {
    const Job& j = *static_cast<Job*>(context);
    for (std::size_t i = part; i < j.cases.size(); i += j.parts) j.self->scratch_[part]->run(j.cases[i], j.eos, j.index);
  }, &job);
}

// Fills the row's arrays; returns how many candidates it has.
int TreeSearch::Scratch::prepare_row(const float* log_probs, const std::int32_t* tokens, int k, int level,
                                     std::span<const std::int32_t> eos) {
  // Of equal tokens the likelier column stays, then the one further left.
  wanted_.clear(static_cast<std::size_t>(k));
  bool replaced = false;
  for (int j = 0; j < k; ++j) {
    if (!std::isfinite(log_probs[j]) || tokens[j] < 0) continue;
    const int held = wanted_.find(static_cast<std::uint32_t>(tokens[j]));
    if (held < 0) {
      column_[wanted_.n] = j;
      wanted_.add(tokens[j]);
    } else if (log_probs[j] > log_probs[column_[held]]) {
      column_[held] = j;
      replaced = true;
    }
  }
  const int n = wanted_.n;
  if (replaced) {  // a replaced column has left its place
    std::sort(column_.begin(), column_.begin() + n);
    wanted_.clear(static_cast<std::size_t>(k));
    for (int i = 0; i < n; ++i) wanted_.add(tokens[column_[i]]);
  }
  float highest = -INFINITY;
  for (int i = 0; i < n; ++i) {
    const int j = column_[i];
    log_prob_[i] = log_probs[j];
    is_eos_[i] = std::find(eos.begin(), eos.end(), tokens[j]) != eos.end();
    highest = std::max(highest, log_probs[j]);
  }
  double total = 1.0;
  if (config_.softmax_over_kept) {
    total = 0.0;
    for (int j = 0; j < n; ++j) total += log_prob_[j] = exact_exp(log_prob_[j] - double(highest));
  } else {
    for (int j = 0; j < n; ++j) log_prob_[j] = exact_exp(std::min(log_prob_[j], 0.0));
  }
  for (int j = 0; j < n; ++j) term_[j] = log_prob_[j] / total;
  log_terms(term_.data(), static_cast<std::size_t>(n), decays_[level], config_.eps);
  return n;
}

// row[i] = (1 - w) * row[i] + w * g of the text; `alone`: no index.
void TreeSearch::Scratch::mix_text(const TextCounts& text, const Path& path, bool alone, int n, double* row) {
  at_least(text_row_, static_cast<std::size_t>(n));
  std::fill_n(text_row_.data(), n, 0.0);
  const int most = std::min(text.order() - 1, kMostContext);
  // shortest context first, longer ones overwrite
  for (int length = 1; length <= std::min(most, path.tail_size); ++length) {
    double g_factor = 1.0;
    for (int m = length; m < most; ++m) g_factor *= config_.backoff;
    const auto [list, total] = text.after({path.tail.data() + kMostContext - length, static_cast<std::size_t>(length)});
    for (const Follower& f : list) {
      const int i = f.token < 0 ? -1 : wanted_.find(static_cast<std::uint32_t>(f.token));
      if (i >= 0 && total > 0) text_row_[i] = g_factor * (double(f.count) / double(total));
    }
  }
  const double w = alone ? 1.0 : config_.text_weight;
  for (int i = 0; i < n; ++i) row[i] = (1.0 - w) * row[i] + w * text_row_[i];
}

// row[i] = (1 - w) * row[i] + w * learned[column of i]; `alone`: neither index nor text. What is no probability is none.
void TreeSearch::Scratch::mix_learned(const float* learned, bool alone, int n, double* row) {
  const double w = alone ? 1.0 : config_.learned_weight;
  for (int i = 0; i < n; ++i) {
    const double g = learned[column_[i]];
    row[i] = (1.0 - w) * row[i] + w * (g > 0 ? std::min(g, 1.0) : 0.0);
  }
}

void TreeSearch::Scratch::run(SearchCase& c, std::span<const std::int32_t> eos, const NgramIndex* index) {
  c.out_tokens[0] = c.root;
  c.out_parents[0] = -1;
  c.out_scores[0] = 0.0f;
  c.found = 1;
  const int d = c.d, k = std::min(c.k, config_.top_k);
  if (d < 1 || k < 1 || c.budget < 1 || std::find(eos.begin(), eos.end(), c.root) != eos.end()) return;

  const auto width = static_cast<std::size_t>(config_.beam), columns = static_cast<std::size_t>(k);
  const std::size_t most = columns + (static_cast<std::size_t>(d) - 1) * width * columns;
  at_least(column_, columns);
  for (auto* v : {&log_prob_, &term_, &sums_}) at_least(*v, columns);
  at_least(is_eos_, columns);
  at_least(rows_, width * columns);
  for (auto* v : {&states_, &next_states_}) at_least(*v, width);
  for (auto* v : {&paths_, &next_paths_}) at_least(*v, width);
  at_least(candidates_, most);
  for (auto* v : {&beam_of_, &column_of_, &slot_}) at_least(*v, most);
  for (int level = static_cast<int>(weights_.size()); level < d; ++level) {
    weights_.push_back(exact_pow(level + 1.0, -config_.level_exponent));
    decays_.push_back(level == 0 ? 1.0 : decays_.back() * config_.logit_decay);
  }
  tree_best_.reset(static_cast<int>(std::min<std::size_t>(most, static_cast<std::size_t>(c.budget))));

  int num_paths = 1, num_states = 1;
  paths_[0] = {0.0, 0.0, -1, 0};
  const bool own_rows = c.text != nullptr || c.learned != nullptr;  // two paths that meet in the index may not in these
  if (index != nullptr) states_[0] = index->state_of(c.context);
  if (c.text != nullptr) {
    paths_[0].tail_size = static_cast<int>(std::min<std::size_t>(c.context.size(), kMostContext));
    std::copy(c.context.end() - paths_[0].tail_size, c.context.end(), paths_[0].tail.end() - paths_[0].tail_size);
  }
  std::int32_t num_candidates = 0;

  for (int level = 0; level < d && num_paths > 0; ++level) {
    const double weight = weights_[level];
    const int n = prepare_row(c.log_probs + std::size_t(level) * c.k, c.tokens + std::size_t(level) * c.k, k, level, eos);
    const bool last = level + 1 == d;
    const bool continuity = (index != nullptr || own_rows) && (level > 0 || config_.ngram_at_level0);
    if (index != nullptr && (continuity || !last))  // the states of the next level follow from it too
      query_.score(*index, {states_.data(), static_cast<std::size_t>(num_states)}, wanted_, !own_rows, rows_.data());
    if (continuity && own_rows) {
      for (int b = 0; b < num_paths; ++b) {
        double* const row = rows_.data() + std::size_t(paths_[b].row) * n;
        if (index == nullptr) std::fill_n(row, n, 0.0);
        if (c.text != nullptr) mix_text(*c.text, paths_[b], index == nullptr, n, row);
        if (c.learned != nullptr)
          mix_learned(c.learned + (std::size_t(level) * c.k + paths_[b].column) * c.k, index == nullptr && c.text == nullptr, n, row);
      }
      log_terms(rows_.data(), std::size_t(num_paths) * n, config_.ngram_weight, config_.eps);
    }
    level_best_.reset(last ? 0 : config_.beam);
    double tree_bar = tree_best_.bar(), beam_bar = level_best_.bar();
    for (int b = 0; b < num_paths; ++b) {
      const Path& path = paths_[b];
      if (continuity) {
        const double* const row = rows_.data() + std::size_t(path.row) * n;
        for (int j = 0; j < n; ++j) sums_[j] = path.sum + (term_[j] + row[j]) * weight;
      } else {
        for (int j = 0; j < n; ++j) sums_[j] = path.sum + term_[j] * weight;
      }
      for (int j = 0; j < n; ++j) {
        const double sum = sums_[j], rank = std::min(path.rank, sum);
        const bool in_tree = rank > tree_bar, in_beam = sum > beam_bar && !is_eos_[j];
        if (!in_tree && !in_beam) continue;
        const std::int32_t id = num_candidates++;
        candidates_[id] = {wanted_.tokens[j], path.id};
        if (in_tree) {
          tree_best_.insert(rank, id);
          tree_bar = tree_best_.bar();
        }
        if (in_beam) {
          beam_of_[id] = b;
          column_of_[id] = j;
          level_best_.insert(sum, id);
          beam_bar = level_best_.bar();
        }
      }
    }
    num_states = 0;
    for (int b = 0; b < level_best_.size; ++b) {
      const auto [sum, id] = level_best_.items[b];
      const Path& parent = paths_[beam_of_[id]];
      Path& path = next_paths_[b];
      path = {sum, std::min(parent.rank, sum), id, b, column_[column_of_[id]], parent.tail, parent.tail_size};
      if (c.text != nullptr) {
        std::copy(path.tail.begin() + 1, path.tail.end(), path.tail.begin());
        path.tail.back() = candidates_[id].token;
        path.tail_size = std::min(path.tail_size + 1, kMostContext);
      }
      if (index == nullptr) continue;
      const NgramState state = query_.next(parent.row, column_of_[id]);
      int r = 0;
      if (own_rows) r = b;
      else while (r < num_states && next_states_[r] != state) ++r;
      if (r >= num_states) next_states_[num_states++] = state;
      path.row = r;
    }
    num_paths = level_best_.size;
    std::swap(paths_, next_paths_);
    std::swap(states_, next_states_);
  }

  for (int i = 0; i < tree_best_.size; ++i) {
    const auto [score, id] = tree_best_.items[i];
    slot_[id] = i + 1;
    c.out_tokens[i + 1] = candidates_[id].token;
    c.out_parents[i + 1] = candidates_[id].parent < 0 ? 0 : slot_[candidates_[id].parent];
    c.out_scores[i + 1] = static_cast<float>(score);
  }
  c.found = tree_best_.size + 1;
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
