// Counts grams in bounded memory: packed into integers, sorted in buffers, spilled as sorted runs, merged as one stream.
// Knows token ids; knows no index format. The stream is the same whatever the memory, the threads or the interruptions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "error.hpp"

namespace dartspec {

// A gram as one integer: tokens + 1 from the top digit down, 0 behind a short one, so that integer order is trie order.
// The lowest bits are free; in a buffer or a run they hold a small count.
struct GramLayout {
  int order, bits;  // bits a token: bit_width(vocab_size)
  GramLayout(int order, std::uint32_t vocab_size);
  int key_bits() const { return order * bits; }
  bool wide() const { return key_bits() > 60; }  // two machine words; at least 4 bits are left for counts either way
};

template <class Word>
struct GramEntry {
  Word key;  // its lowest bits zero
  std::uint64_t count;
};

// Grams in strictly ascending order of their keys.
template <class Word>
class GramStream {
 public:
  virtual ~GramStream() = default;
  // Fills the front of `out` and returns how much of it; 0 at the end.
  virtual std::size_t read(std::span<GramEntry<Word>> out) = 0;
};

// Receives the nodes of the trie: every gram after all grams that extend it, siblings by ascending token.
class NodeSink {
 public:
  virtual ~NodeSink() = default;
  virtual void node(int level, std::uint32_t token, std::uint64_t count) = 0;  // level from 1
};

// How far a folder of runs has come: whole documents, then starting positions of the next one.
struct GramProgress {
  std::uint64_t documents = 0, offset = 0, positions = 0;
};

struct GramSorterOptions {
  int order = 3;
  std::uint32_t vocab_size = 0;
  std::vector<std::int32_t> exclude;        // a document is cut at each of these tokens
  std::uint64_t memory_bytes = 256u << 20;  // for buffers while counting, for read buffers while merging
  int threads = 1;
  std::string folder;    // runs are kept there and taken up again; empty: they stay in memory, beside the buffers
  std::string identity;  // of what is counted; runs of another identity are refused
};

class GramSorter {
 public:
  // Takes up the runs that lie in the folder, if any.
  static std::unique_ptr<GramSorter> make(const GramSorterOptions& options);
  virtual ~GramSorter() = default;

  virtual GramProgress progress() const = 0;  // of what was added, or taken up
  // Counts every gram that starts at tokens[first] up to, not including, tokens[last], `weight` times; what lies behind
  // `last` ends these grams. A document with a token outside the vocabulary is refused and leaves no trace.
  virtual void add_document(std::span<const std::int32_t> tokens, std::uint64_t first, std::uint64_t last,
                            std::uint64_t weight) = 0;
  void add_document(std::span<const std::int32_t> tokens, std::uint64_t first, std::uint64_t weight) {
    add_document(tokens, first, tokens.size(), weight);
  }
  virtual void add_gram(std::span<const std::int32_t> gram, std::uint64_t count) = 0;  // to it and to its prefixes
  virtual void spill() = 0;  // what was added lies in the folder when this returns
  // All that was added, as one file for another sorter's add_run(): counted `weight` times there. The identity says
  // what must agree between the two: tokenizer, excluded tokens.
  virtual void write_run(const std::string& path, const std::string& identity) = 0;
  virtual void add_run(const std::string& path, const std::string& identity, std::uint64_t weight) = 0;
  // All that was added, as a trie without nodes counted fewer than `min_count` times. Returns the tokens counted, those
  // of the left-out nodes too.
  virtual std::uint64_t merge(std::uint64_t min_count, NodeSink& sink) = 0;
  virtual std::uint64_t entries_merged() const = 0;  // grows while merge() runs; may be read by another thread
  virtual std::uint64_t entries_spilled() const = 0;  // of all runs: what merge() will read
  virtual std::uint64_t bytes_spilled() const = 0;
  virtual void remove_files() = 0;  // the folder's runs, once what they say is safe elsewhere
};

}  // namespace dartspec
