// The n-gram index: a trie of sorted levels in one read-only image (a mapped file or bytes in memory).
// Knows token ids and counts; knows no text and no tokenizer beyond its fingerprint. Format: docs/index-format.md.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "error.hpp"

namespace dartspec {

inline constexpr int kMinOrder = 2;
inline constexpr int kMaxOrder = 5;
inline constexpr std::uint32_t kMaxVocab = (1u << 24) - 1;
inline constexpr std::uint32_t kNoNode = UINT32_MAX;

// On-disk structures: little-endian, naturally aligned, no hidden padding.
struct IndexHeader {
  char magic[8];
  std::uint32_t version;
  std::uint32_t byte_order;
  std::uint32_t header_bytes;
  std::uint32_t order;
  std::uint32_t token_bytes;
  std::uint32_t counts_form;  // 0 quantised, 1 exact
  std::uint64_t vocab_size;
  std::uint64_t file_bytes;
  std::uint64_t num_tokens;
  std::uint32_t min_count;
  float log_prob_error;  // largest |stored - true| natural log-probability; 0 when exact
  std::uint64_t num_nodes[kMaxOrder];
  std::uint32_t num_sections;
  std::uint32_t text_bytes[3];  // fingerprint, tokenizer name, corpus description
  std::uint64_t checksum;       // XXH64 of the header with this field zero
};
static_assert(sizeof(IndexHeader) == 128);

enum class SectionKind : std::uint32_t { tokens = 1, values = 2, offsets = 3, codebook = 4 };

struct IndexSection {
  std::uint32_t kind;
  std::uint32_t level;  // 1-based; 0 for the codebook
  std::uint64_t offset;
  std::uint64_t bytes;
  std::uint64_t checksum;
};
static_assert(sizeof(IndexSection) == 32);

inline constexpr char kIndexMagic[8] = {'D', 'A', 'R', 'T', 'N', 'G', 'R', 'M'};
inline constexpr std::uint32_t kIndexVersion = 1;
inline constexpr std::uint32_t kByteOrder = 0x01020304;
inline constexpr std::uint64_t kAlign = 64;
inline constexpr int kCodes = 256;

struct IndexInfo {
  int order = 3;
  std::uint32_t vocab_size = 0;
  bool exact = false;
  std::uint64_t num_tokens = 0;  // counted tokens, weights included
  std::uint32_t min_count = 1;
  float log_prob_error = 0;
  std::string fingerprint, name, description;
  std::array<std::uint64_t, kMaxOrder> num_nodes{};
};

// The contexts that a path has reached: nodes[m] is the node of the last m + 1 tokens, or kNoNode.
struct NgramState {
  std::array<std::uint32_t, kMaxOrder - 1> nodes;
  bool operator==(const NgramState&) const = default;
};

// A few distinct tokens, each with a number, and a small hash table that finds it.
struct WantedTokens {
  static constexpr std::uint32_t kSlots = 1024;
  std::vector<std::int32_t> tokens, next;  // next: the following number in the same slot, or -1
  std::vector<std::int32_t> head = std::vector<std::int32_t>(kSlots, -1);
  int n = 0;

  void clear(std::size_t capacity) {
    if (tokens.size() < capacity) {
      tokens.resize(capacity);
      next.resize(capacity);
    }
    std::fill(head.begin(), head.end(), -1);
    n = 0;
  }
  int find(std::uint32_t token) const {
    int i = head[token % kSlots];
    while (i >= 0 && static_cast<std::uint32_t>(tokens[i]) != token) i = next[i];
    return i;
  }
  void add(std::int32_t token) {  // not yet there, not negative, within the capacity
    std::int32_t& slot = head[static_cast<std::uint32_t>(token) % kSlots];
    tokens[n] = token;
    next[n] = slot;
    slot = n++;
  }
};

class NgramIndex {
 public:
  // Maps the file read-only and checks header and directory; the sections are checked by verify().
  static NgramIndex open(const std::string& path);
  static NgramIndex from_image(std::vector<std::byte> image);

  // Reads everything: checksums, padding, order of tokens, offsets. Throws Error at the first fault.
  void verify() const;
  // Writes aside, syncs and renames.
  void save(const std::string& path) const;

  const IndexInfo& info() const { return info_; }
  std::span<const std::byte> image() const { return image_; }
  std::uint64_t serial() const { return serial_; }  // differs between any two indexes of this process

  NgramState state_of(std::span<const std::int32_t> context) const;
  NgramState extend(const NgramState& state, std::int32_t token) const;
  // Longest context first, freq(child) / freq(context); the unigram level is never asked; 0 when unseen.
  double probability(const NgramState& state, std::int32_t token) const;
  // Every token seen after the state's contexts with the probability above, likeliest first, then lowest id.
  std::vector<std::pair<std::int32_t, double>> continuations(const NgramState& state, std::size_t top) const;

  // --- the search's view -------------------------------------------------------------------------------------
  // Calls hit(i, child, child_level) for each wanted.tokens[i] that follows `node` of `level` (1-based).
  template <class Hit>
  void match(int level, std::uint32_t node, const WantedTokens& wanted, Hit&& hit) const {
    if (info_token_bytes_ == 2) match_as<std::uint16_t>(level, node, wanted, hit);
    else match_as<std::uint32_t>(level, node, wanted, hit);
  }
  std::uint8_t code(int level, std::uint32_t node) const {
    return static_cast<const std::uint8_t*>(levels_[level - 1].values)[node];
  }
  double code_probability(int level, int code) const;  // quantised form only
  double count_ratio(int level, std::uint32_t child, std::uint32_t parent) const {  // exact form only
    const auto* above = static_cast<const std::uint32_t*>(levels_[level - 2].values);
    const auto* own = static_cast<const std::uint32_t*>(levels_[level - 1].values);
    const double ratio = double(own[child]) / double(above[parent]);
    return ratio <= 1.0 ? ratio : (ratio > 1.0 ? 1.0 : 0.0);  // a flipped bit (0 / 0 too) cannot leave [0, 1]
  }

 private:
  struct Level {
    const void* tokens = nullptr;
    const void* values = nullptr;  // u8 codes or u32 counts
    const std::uint32_t* offsets = nullptr;
    std::uint32_t n = 0;
  };
  struct Mapping;

  NgramIndex() = default;
  void parse(const std::string& where);
  std::pair<std::uint32_t, std::uint32_t> children(int level, std::uint32_t node) const {
    if (level >= info_.order) return {0, 0};
    const Level& own = levels_[level - 1];
    const std::uint32_t limit = levels_[level].n;
    if (node >= own.n) return {0, 0};
    // Clamped, so that a damaged file cannot lead outside its own sections.
    const std::uint32_t end = std::min(own.offsets[node + 1], limit);
    return {std::min(own.offsets[node], end), end};
  }
  std::uint32_t token_at(int level, std::uint32_t node) const;
  std::uint32_t find(int level, std::uint32_t begin, std::uint32_t end, std::uint32_t token) const;
  std::uint32_t child(int level, std::uint32_t node, std::int32_t token) const;
  double node_probability(int level, std::uint32_t child, std::uint32_t parent) const;

  template <class Token, class Hit>
  void match_as(int level, std::uint32_t node, const WantedTokens& wanted, Hit&& hit) const {
    const auto [begin, end] = children(level, node);
    const Token* tokens = static_cast<const Token*>(levels_[level].tokens);
    constexpr std::uint32_t kScan = 256;
    if (end - begin <= kScan) {  // few children: ask each whether it is wanted
      for (std::uint32_t at = begin; at < end; ++at) {
        const int i = wanted.find(tokens[at]);
        if (i >= 0) hit(i, at, level + 1);
      }
      return;
    }
    // Many: look each wanted token up. Four binary searches in step hide each other's latency.
    constexpr int kLanes = 4;
    const Token* const from = tokens + begin;
    for (int first = 0; first < wanted.n; first += kLanes) {
      const int lanes = std::min(kLanes, wanted.n - first);
      std::uint32_t want[kLanes];
      for (int i = 0; i < kLanes; ++i) want[i] = static_cast<std::uint32_t>(wanted.tokens[first + std::min(i, lanes - 1)]);
      const Token *a = from, *b = from, *c = from, *d = from;
      for (std::size_t size = end - begin; size > 1; size -= size / 2) {
        const std::size_t half = size / 2;
        a += std::size_t(a[half - 1] < want[0]) * half;
        b += std::size_t(b[half - 1] < want[1]) * half;
        c += std::size_t(c[half - 1] < want[2]) * half;
        d += std::size_t(d[half - 1] < want[3]) * half;
      }
      const Token* const last[kLanes] = {a, b, c, d};
      for (int i = 0; i < lanes; ++i) {
        const auto at = static_cast<std::uint32_t>(last[i] - tokens) + (*last[i] < want[i]);
        if (at < end && tokens[at] == want[i]) hit(first + i, at, level + 1);
      }
    }
  }

  std::shared_ptr<const void> owner_;
  std::span<const std::byte> image_;
  std::vector<IndexSection> sections_;
  std::array<Level, kMaxOrder> levels_{};
  const float* codebook_ = nullptr;
  IndexInfo info_;
  int info_token_bytes_ = 2;
  std::uint64_t serial_ = 0;
};

}  // namespace dartspec
