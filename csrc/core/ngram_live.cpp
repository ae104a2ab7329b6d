#include "ngram_live.hpp"

#include <algorithm>
#include <string>
#include <utility>

namespace dartspec {

LiveCounts::LiveCounts(int order, std::size_t max_grams, std::span<const std::int32_t> exclude)
    : order_(order), max_grams_(max_grams), exclude_(exclude.begin(), exclude.end()) {
  if (order < kMinOrder || order > kMaxOrder)
    throw Error("order is " + std::to_string(order) + ", expected " + std::to_string(kMinOrder) + " to " +
                std::to_string(kMaxOrder));
  std::sort(exclude_.begin(), exclude_.end());
}

LiveCounts::Key LiveCounts::key_of(std::span<const std::int32_t> context) {
  Key key = 0;
  for (std::int32_t token : context) key = key << 24 | static_cast<Key>(static_cast<std::uint32_t>(token) + 1);
  return key;
}

bool LiveCounts::allowed(std::int32_t token) const {
  return token >= 0 && static_cast<std::uint32_t>(token) < kMaxVocab && !std::binary_search(exclude_.begin(), exclude_.end(), token);
}

template <class Use>
void LiveCounts::each_gram(std::span<const std::int32_t> tokens, std::size_t first, Use&& use) {
  std::size_t known = 0;  // tokens before `at` that a gram may hold
  for (std::size_t at = first; at > 0 && known + 1 < static_cast<std::size_t>(order_) && allowed(tokens[at - 1]); --at) ++known;
  for (std::size_t at = first; at < tokens.size(); ++at) {
    if (!allowed(tokens[at])) {
      known = 0;
      continue;
    }
    for (std::size_t n = 1; n <= known; ++n) use(key_of(tokens.subspan(at - n, n)), tokens[at]);
    known = std::min(known + 1, static_cast<std::size_t>(order_) - 1);
  }
}

void LiveCounts::add(std::span<const std::int32_t> tokens, std::size_t first) {
  if (first > tokens.size()) throw Error("first is " + std::to_string(first) + ", there are " + std::to_string(tokens.size()) + " tokens");
  each_gram(tokens, first, [&](Key key, std::int32_t token) {
    Context& context = contexts_[key];
    auto at = std::find_if(context.list.begin(), context.list.end(), [&](const Follower& f) { return f.token == token; });
    if (at == context.list.end()) {
      context.list.push_back({token, 0});
      at = context.list.end() - 1;
      ++num_grams_;
    }
    if (at->count == UINT32_MAX) return;
    ++at->count;
    ++context.total;
    context.met = num_halvings_;
    if (at != context.list.begin() && (at - 1)->count < at->count) std::iter_swap(at, at - 1);  // the frequent are found first
  });
  while (max_grams_ != 0 && num_grams_ > max_grams_) halve();
}

void LiveCounts::remove(std::span<const std::int32_t> tokens, std::size_t first) {
  if (first > tokens.size()) throw Error("first is " + std::to_string(first) + ", there are " + std::to_string(tokens.size()) + " tokens");
  each_gram(tokens, first, [&](Key key, std::int32_t token) {
    const auto found = contexts_.find(key);
    if (found == contexts_.end()) return;
    Context& context = found->second;
    const auto at = std::find_if(context.list.begin(), context.list.end(), [&](const Follower& f) { return f.token == token; });
    if (at == context.list.end()) return;
    --context.total;
    if (--at->count > 0) return;
    context.list.erase(at);
    --num_grams_;
    if (context.list.empty()) contexts_.erase(found);
  });
}

void LiveCounts::halve() {
  num_grams_ = 0;
  for (auto it = contexts_.begin(); it != contexts_.end();) {
    Context& context = it->second;
    const std::uint32_t kept = context.met == num_halvings_ ? 1 : 0;  // a single count survives where the context is in use
    context.total = 0;
    for (Follower& f : context.list) context.total += f.count = f.count / 2 + (f.count & kept);
    std::erase_if(context.list, [](const Follower& f) { return f.count == 0; });
    context.list.shrink_to_fit();
    num_grams_ += context.list.size();
    it = context.list.empty() ? contexts_.erase(it) : std::next(it);
  }
  ++num_halvings_;
}

TextCounts::Followers LiveCounts::after(std::span<const std::int32_t> context) const {
  if (context.empty() || context.size() >= static_cast<std::size_t>(order_)) return {};
  for (std::int32_t token : context)
    if (!allowed(token)) return {};
  const auto found = contexts_.find(key_of(context));
  return found == contexts_.end() ? Followers{} : Followers{found->second.list, found->second.total};
}

void LiveCounts::passes(std::vector<std::int32_t>& grams, std::vector<std::int64_t>& counts) const {
  std::vector<std::pair<std::vector<std::int32_t>, std::int64_t>> found;
  for (const auto& [key, context] : contexts_) {
    std::vector<std::int32_t> gram;
    for (Key rest = key; rest != 0; rest >>= 24) gram.insert(gram.begin(), static_cast<std::int32_t>(rest & 0xFFFFFF) - 1);
    for (const Follower& f : context.list) {
      gram.push_back(f.token);
      auto ending = static_cast<std::int64_t>(f.count);  // of a shorter gram: what no longer one says too
      if (gram.size() < static_cast<std::size_t>(order_)) ending -= static_cast<std::int64_t>(after(gram).total);
      if (ending > 0) found.emplace_back(gram, ending);
      gram.pop_back();
    }
  }
  std::sort(found.begin(), found.end());
  for (auto& [gram, count] : found) {
    gram.resize(static_cast<std::size_t>(order_), -1);
    grams.insert(grams.end(), gram.begin(), gram.end());
    counts.push_back(count);
  }
}

}  // namespace dartspec
