// Makes index files: from documents of token ids, from counted grams, from other indexes and from runs of other machines.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "ngram_index.hpp"
#include "ngram_sort.hpp"
#include "ngram_writer.hpp"

namespace dartspec {

class NgramBuilder {
 public:
  explicit NgramBuilder(const GramSorterOptions& options);

  // Documents lie end to end in `tokens`, each up to its place in `ends`. Of the first one only the grams from
  // tokens[first] on are counted (the others were, before an interruption); the last `tail` tokens of each are only
  // there to end grams (they begin the next piece of a long document). Each gram counts `weight` times.
  void add_documents(std::span<const std::int32_t> tokens, std::span<const std::int64_t> ends, std::uint64_t first,
                     std::uint64_t tail, std::uint64_t weight);
  // Adds passes of whole grams: `grams` is (n, order), shorter ones padded with -1 behind; each adds its count to
  // the gram and to all its prefixes, not to its suffixes.
  void add_grams(std::span<const std::int32_t> grams, std::span<const std::int64_t> counts);
  // All counts of another index, `weight` times. Those of a quantised one are estimates.
  void add_index(const NgramIndex& index, std::uint64_t weight);
  // All counts of a file of the official program (.trie), read in one pass; 24 bytes a node lie in a nameless
  // temporary file in `folder` meanwhile. Returns its nodes.
  std::uint64_t add_trie(const std::string& path, const std::string& folder);

  GramSorter& sorter() { return *sorter_; }
  std::uint64_t nodes_written() const { return nodes_written_.load(std::memory_order_relaxed); }
  std::uint64_t trie_bytes_read() const { return trie_bytes_read_.load(std::memory_order_relaxed); }

  // Drops grams counted fewer than `min_count` times. An empty `path` keeps the index in memory. The builder is spent.
  NgramIndex finish(const std::string& path, bool exact, std::uint64_t min_count, const std::string& fingerprint,
                    const std::string& name, const std::string& description);

 private:
  GramSorterOptions options_;
  std::unique_ptr<GramSorter> sorter_;
  std::uint64_t extra_tokens_ = 0;  // counted by indexes whose rare grams are gone
  std::atomic<std::uint64_t> nodes_written_{0}, trie_bytes_read_{0};
};

// The same index without the nodes counted fewer than `min_count` times, in either form; one pass, no sort.
NgramIndex prune(const NgramIndex& index, const std::string& path, bool exact, std::uint32_t min_count,
                 const std::string& description);

}  // namespace dartspec
