// Writes an index file from one sorted stream of nodes, in bounded memory. Format: docs/index-format.md.
// Knows counts and the format; knows not where the counts come from (ngram_builder, a merge of files, an import).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "ngram_index.hpp"

namespace dartspec {

struct IndexMeta {
  bool exact = false;            // counts as ranks in a table of distinct values; else 8-bit log-probabilities
  std::uint64_t num_tokens = 0;  // tokens counted, weights included: the denominator of level 1
  std::uint32_t min_count = 1;   // for the header only: the caller has left out what is rarer
  std::string fingerprint, name, description;
};

// Nodes come in POST-ORDER: a node's children, ascending by token, come before the node itself, and the nodes of level
// 1 ascend by token. That is the order in which a scan over sorted grams can close them: a gram's count is known when
// the scan leaves it. Within each level it is the order of the file.
//
//   IndexWriter writer("x.ngram", 2, 100);      // grams (1 2) x 3, (1 5) x 1, and 1 once at a document's end
//   writer.add(2, 2, 3); writer.add(2, 5, 1); writer.add(1, 1, 5);
//   NgramIndex index = writer.finish({.num_tokens = 5, ...});
//
// Each level is appended to a nameless temporary file beside the target (4 to 6 bytes a node); small ones stay in
// memory. finish() reads them twice: once to choose codebook or table, once to write. Nothing is left behind when the
// writer is destroyed unfinished or the process is killed, but possibly `<path>.part<pid>`.
class IndexWriter {
 public:
  // An empty `path` keeps everything in memory.
  IndexWriter(std::string path, int order, std::uint32_t vocab_size);
  ~IndexWriter();
  IndexWriter(IndexWriter&&) noexcept;

  // level from 1 to the order; count from 1 up, at least the sum of its children's. Throws Error for a token outside
  // the vocabulary, tokens that do not ascend, a level that skips (a child without a parent is found by the next
  // add at a shallower level, or by finish), or a level beyond 2^32 - 2 nodes.
  void add(int level, std::uint32_t token, std::uint64_t count);

  // Quantises, codes the offsets, writes aside, checksums, verifies, syncs and renames; the opened file. Once.
  NgramIndex finish(const IndexMeta& meta);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Walks an index in the writer's order, so that files can be merged, pruned and compared as streams:
//
//   for (IndexWalker at(index); at.next();) use(at.gram(), at.count());
//
// In post-order a gram comes after all its extensions: compare two walkers token by token, and where one gram is a
// prefix of the other the longer one comes first (`post_order_less`). In the quantised form counts are estimated: the
// nearest whole number to the parent's count times the probability (level 1: num_tokens times), at least 1 and at
// least the children's sum, so that what is walked can be written.
class IndexWalker {
 public:
  explicit IndexWalker(const NgramIndex& index);  // the index must outlive the walker
  bool next();
  std::span<const std::uint32_t> gram() const { return {gram_.data(), static_cast<std::size_t>(level_)}; }
  int level() const { return level_; }
  std::uint32_t token() const { return gram_[static_cast<std::size_t>(level_) - 1]; }
  std::uint64_t count() const { return count_; }

 private:
  struct Open {  // the nodes of one level that are still to be walked, below the parent at hand
    std::uint32_t at = 0, end = 0;
    std::uint64_t count = 0;   // of the node `at`
    std::uint64_t walked = 0;  // sum over the nodes before it
  };
  bool emit(int level);

  const NgramIndex* index_;
  std::array<Open, kMaxOrder + 1> open_{};  // by level; 0 is unused
  std::array<std::uint32_t, kMaxOrder> gram_{};
  int depth_ = 1, level_ = 0;
  std::uint64_t count_ = 0, word_ = 0;  // word_: tokens of level 1 that are still to come, of 64
  std::uint32_t word_at_ = 0;
};

// Whether gram a comes before gram b in the writer's order.
bool post_order_less(std::span<const std::uint32_t> a, std::span<const std::uint32_t> b);

}  // namespace dartspec
