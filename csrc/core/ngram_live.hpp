// Counts of a running text, or of all that a process has written: what the tree search asks beside the index.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "tree_search.hpp"

namespace dartspec {

// Not for several threads at once. The same additions give the same counts on every machine.
class LiveCounts final : public TextCounts {
 public:
  // Grams of 2 to `order` tokens; none holds an excluded token. With more than `max_grams` of them (0: no limit) all
  // counts are halved, and those that reach 0 forgotten: first the grams whose context was not met since the last time.
  LiveCounts(int order, std::size_t max_grams, std::span<const std::int32_t> exclude);

  // Counts the grams that end in tokens[first] or behind it; what lies before is context only.
  void add(std::span<const std::int32_t> tokens, std::size_t first);
  // Takes the same grams off again, as far as ageing has left them.
  void remove(std::span<const std::int32_t> tokens, std::size_t first);

  int order() const override { return order_; }
  Followers after(std::span<const std::int32_t> context) const override;

  std::size_t num_grams() const { return num_grams_; }
  std::uint64_t num_halvings() const { return num_halvings_; }
  // (n, order) grams padded with -1 and (n,) counts as NgramBuilder::add_grams takes them, sorted.
  void passes(std::vector<std::int32_t>& grams, std::vector<std::int64_t>& counts) const;

 private:
  using Key = unsigned __int128;  // tokens + 1, 24 bits each, the newest lowest
  struct Hash {
    std::size_t operator()(Key key) const {
      std::uint64_t h = (static_cast<std::uint64_t>(key >> 64) * 0x9E3779B185EBCA87u) ^ static_cast<std::uint64_t>(key);
      h = (h ^ (h >> 32)) * 0xC2B2AE3D27D4EB4Fu;
      return static_cast<std::size_t>(h ^ (h >> 29));
    }
  };
  struct Context {
    std::vector<Follower> list;
    std::uint64_t total = 0;
    std::uint64_t met = 0;  // halvings there had been when it was last added to
  };
  static Key key_of(std::span<const std::int32_t> context);
  template <class Use> void each_gram(std::span<const std::int32_t> tokens, std::size_t first, Use&& use);
  bool allowed(std::int32_t token) const;
  void halve();

  int order_;
  std::size_t max_grams_, num_grams_ = 0;
  std::uint64_t num_halvings_ = 0;
  std::vector<std::int32_t> exclude_;  // sorted
  std::unordered_map<Key, Context, Hash> contexts_;
};

}  // namespace dartspec
