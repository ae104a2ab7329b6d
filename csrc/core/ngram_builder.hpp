// Counts n-grams of token-id documents and writes them as one index image.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ngram_index.hpp"

namespace dartspec {

class NgramBuilder {
 public:
  // `exclude`: tokens that never enter; a document is cut at each of them, so no gram crosses one.
  NgramBuilder(int order, std::uint32_t vocab_size, std::span<const std::int32_t> exclude);
  ~NgramBuilder();

  // Counts every gram of the document `weight` times.
  void add_document(std::span<const std::int32_t> tokens, std::uint32_t weight);
  // Adds passes of whole grams: `grams` is (n, order), shorter ones padded with -1 behind; each adds its count to
  // the gram and to all its prefixes, not to its suffixes.
  void add_grams(std::span<const std::int32_t> grams, std::span<const std::int64_t> counts);

  // Drops grams counted fewer than `min_count` times. The builder is empty afterwards.
  NgramIndex finish(bool exact, std::uint32_t min_count, const std::string& fingerprint, const std::string& name,
                    const std::string& description);

 private:
  struct Counter;
  template <class Key> struct CounterOf;
  std::int32_t checked(std::int32_t token) const;

  int order_;
  std::uint32_t vocab_size_;
  std::vector<bool> excluded_;
  std::uint64_t num_documents_ = 0;
  std::unique_ptr<Counter> counter_;
};

}  // namespace dartspec
