#include "ngram_query.hpp"

#include <algorithm>

#include "exact_math.hpp"

namespace dartspec {

namespace {

template <class T>
void at_least(std::vector<T>& v, std::size_t n) {
  if (v.size() < n) v.resize(n);
}

[[gnu::always_inline]] inline void log_terms_of(double* v, std::size_t n, double weight, double eps) {
  for (std::size_t i = 0; i < n; ++i) v[i] = weight * exact_log(v[i] + eps);
}

void log_terms_plain(double* v, std::size_t n, double weight, double eps) { log_terms_of(v, n, weight, eps); }

#if defined(__x86_64__)
// The same operations on more lanes.
[[gnu::target("avx2")]] void log_terms_avx2(double* v, std::size_t n, double weight, double eps) {
  log_terms_of(v, n, weight, eps);
}
#if defined(__clang__)
[[gnu::target("avx512f,avx512dq,avx512vl")]]
#else
[[gnu::target("avx512f,avx512dq,avx512vl,prefer-vector-width=512")]]
#endif
void log_terms_avx512(double* v, std::size_t n, double weight, double eps) {
  log_terms_of(v, n, weight, eps);
}
#endif

using LogTerms = void (*)(double*, std::size_t, double, double);

LogTerms fastest() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return log_terms_avx512;
  if (__builtin_cpu_supports("avx2")) return log_terms_avx2;
#endif
  return log_terms_plain;
}

}  // namespace

void log_terms(double* v, std::size_t n, double weight, double eps) {
  static const LogTerms chosen = fastest();
  chosen(v, n, weight, eps);
}

void NgramQuery::bind(const NgramIndex& index) {
  if (index.serial() == serial_) return;
  serial_ = index.serial();
  order_ = index.info().order;
  for (int m = order_ - 1; m >= 1; --m) factor_[m] = m == order_ - 1 ? 1.0 : factor_[m + 1] * backoff_;
  if (index.info().exact) return;
  code_value_.resize(static_cast<std::size_t>(order_ + 1) * kCodes);
  for (int level = 2; level <= order_; ++level)
    for (int code = 0; code < kCodes; ++code)
      code_value_[level * kCodes + code] = factor_[level - 1] * index.code_probability(level, static_cast<std::uint32_t>(code));
  code_term_ = code_value_;
  log_terms(code_term_.data(), code_term_.size(), weight_, eps_);
}

// Overwrites the values of the candidates that follow this context of `level` tokens.
void NgramQuery::fill(const NgramIndex& index, int level, std::uint32_t node, NgramIndex::Range range,
                      const WantedTokens& wanted, bool terms, double* row, std::uint32_t* kids) const {
  if (range.size() == 0) return;
  if (index.info().exact) {
    const std::uint32_t parent = index.value_at(level, node);
    index.match(level + 1, range, wanted, [&](int i, std::uint32_t child, std::uint32_t value) {
      row[i] = factor_[level] * index.count_ratio(level + 1, value, parent);
      kids[i] = child;
    });
  } else {
    const double* const values = (terms ? code_term_ : code_value_).data() + (level + 1) * kCodes;
    index.match(level + 1, range, wanted, [&](int i, std::uint32_t child, std::uint32_t value) {
      row[i] = values[value];
      kids[i] = child;
    });
  }
}

void NgramQuery::score(const NgramIndex& index, std::span<const NgramState> states, const WantedTokens& wanted,
                       bool terms, double* rows) {
  bind(index);
  const std::size_t n = n_ = wanted.n, num = states.size(), deep = order_ - 1;
  const bool direct = terms && !index.info().exact;  // codes give terms at once
  at_least(unigram_, n);
  at_least(short_rows_, num * n);
  at_least(short_kids_, num * n);
  at_least(short_nodes_, num);
  at_least(short_of_, num);
  at_least(kids_, num * deep * n);
  at_least(ranges_, num * (deep + 1));

  num_short_ = 0;
  for (std::size_t r = 0; r < num; ++r) {
    int s = 0;
    while (s < num_short_ && short_nodes_[s] != states[r].nodes[0]) ++s;
    if (s == num_short_) short_nodes_[num_short_++] = states[r].nodes[0];
    short_of_[r] = static_cast<std::uint32_t>(s);
  }
  // for_each(level, node, place of its range)
  auto for_each = [&](auto&& use) {
    for (int s = 0; s < num_short_; ++s)
      if (short_nodes_[s] != kNoNode) use(1, short_nodes_[s], ranges_[static_cast<std::size_t>(s) * (deep + 1)]);
    for (std::size_t r = 0; r < num; ++r)
      for (std::size_t level = 2; level <= deep; ++level)
        if (states[r].nodes[level - 1] != kNoNode)
          use(static_cast<int>(level), states[r].nodes[level - 1], ranges_[r * (deep + 1) + level]);
  };
  for_each([&](int level, std::uint32_t node, NgramIndex::Range&) { index.prefetch_offsets(level, node); });
  for (std::size_t i = 0; i < n; ++i) unigram_[i] = index.unigram(wanted.tokens[i]);
  for_each([&](int level, std::uint32_t node, NgramIndex::Range&) { index.prefetch_high(level, node); });
  for_each([&](int level, std::uint32_t node, NgramIndex::Range& range) {
    range = index.children(level, node);
    if (range.size() == 0) return;
    index.prefetch_record(level + 1, range.begin);
    index.prefetch_record(level + 1, range.begin + range.size() / 2);
    index.prefetch_record(level + 1, range.end - 1);
  });

  // Shortest context first, longer ones overwrite: the same as asking the longest first.
  double unseen = 0.0;
  if (direct) log_terms(&unseen, 1, weight_, eps_);
  for (int s = 0; s < num_short_; ++s) {
    double* const row = short_rows_.data() + static_cast<std::size_t>(s) * n;
    std::uint32_t* const kids = short_kids_.data() + static_cast<std::size_t>(s) * n;
    std::fill_n(row, n, unseen);
    std::fill_n(kids, n, kNoNode);
    if (short_nodes_[s] != kNoNode)
      fill(index, 1, short_nodes_[s], ranges_[static_cast<std::size_t>(s) * (deep + 1)], wanted, direct, row, kids);
  }
  for (std::size_t r = 0; r < num; ++r) {
    double* const row = rows + r * n;
    std::copy_n(short_rows_.data() + short_of_[r] * n, n, row);
    for (std::size_t level = 2; level <= deep; ++level) {
      std::uint32_t* const kids = kids_.data() + (r * deep + level - 1) * n;
      std::fill_n(kids, n, kNoNode);
      const std::uint32_t node = states[r].nodes[level - 1];
      if (node != kNoNode)
        fill(index, static_cast<int>(level), node, ranges_[r * (deep + 1) + level], wanted, direct, row, kids);
    }
  }
  if (terms && !direct) log_terms(rows, num * n, weight_, eps_);
}

NgramState NgramQuery::next(int row, int i) const {
  NgramState state;
  state.nodes.fill(kNoNode);
  state.nodes[0] = unigram_[i];
  if (order_ > 2) state.nodes[1] = short_kids_[short_of_[row] * static_cast<std::size_t>(n_) + i];
  for (int m = 2; m <= order_ - 2; ++m)
    state.nodes[m] = kids_[(static_cast<std::size_t>(row) * (order_ - 1) + m - 1) * n_ + i];
  return state;
}

}  // namespace dartspec
