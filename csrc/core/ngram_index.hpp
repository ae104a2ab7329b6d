// The n-gram index: a trie of sorted levels in one read-only image (a mapped file or bytes in memory).
// Knows token ids and counts; knows no text and no tokenizer beyond its fingerprint. Format: docs/index-format.md.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "error.hpp"

namespace dartspec {

inline constexpr int kMinOrder = 2;
inline constexpr int kMaxOrder = 5;
inline constexpr std::uint32_t kMaxVocab = 1u << 24;
inline constexpr std::uint32_t kNoNode = UINT32_MAX;

// On-disk structures: little-endian, naturally aligned, no hidden padding.
struct IndexHeader {
  char magic[8];
  std::uint32_t version;
  std::uint32_t byte_order;
  std::uint32_t header_bytes;
  std::uint32_t order;
  std::uint32_t token_bits;
  std::uint32_t counts_form;  // 0 quantised, 1 exact
  std::uint64_t vocab_size;
  std::uint64_t file_bytes;
  std::uint64_t num_tokens;
  std::uint32_t min_count;
  float log_prob_error;  // largest |stored - true| natural log-probability; 0 when exact
  std::uint64_t num_nodes[kMaxOrder];
  std::uint32_t value_bits[kMaxOrder];
  std::uint32_t num_sections;
  std::uint32_t text_bytes[3];  // fingerprint, tokenizer name, corpus description
  std::uint32_t reserved;       // zero
  std::uint64_t checksum;       // XXH64 of the header with this field zero
};
static_assert(sizeof(IndexHeader) == 152);

enum class SectionKind : std::uint32_t {
  tokens = 1,         // level 1: a bit per token of the vocabulary, and ranks
  values = 2,         // level 1: a value per node
  records = 3,        // levels above: token and value per node
  offsets_low = 4,    // child offsets, Elias-Fano: low bits,
  offsets_high = 5,   //   high parts in unary,
  offsets_select = 6, //   and the high part of every 64th
  table = 7,          // distinct counts (u64), or log-probabilities (f32) of the codes
};

struct IndexSection {
  std::uint32_t kind;
  std::uint32_t level;  // 1-based
  std::uint64_t offset;
  std::uint64_t bytes;
  std::uint64_t checksum;
};
static_assert(sizeof(IndexSection) == 32);

inline constexpr char kIndexMagic[8] = {'D', 'A', 'R', 'T', 'N', 'G', 'R', 'M'};
inline constexpr std::uint32_t kIndexVersion = 2;
inline constexpr std::uint32_t kByteOrder = 0x01020304;
inline constexpr std::uint64_t kAlign = 64;
inline constexpr int kCodes = 256;
inline constexpr std::uint32_t kCodeBits = 8;
inline constexpr std::uint32_t kSelectStep = 64;

// --- sizes that follow from the header; writer and reader share them ------------------------------------------------

inline std::uint32_t token_bits_of(std::uint64_t vocab_size) {
  return vocab_size <= 2 ? 1u : static_cast<std::uint32_t>(std::bit_width(vocab_size - 1));
}
// `n` fields of `bits`, then at least 7 bytes more, so that 8 bytes can be loaded at any field.
inline std::uint64_t packed_bytes(std::uint64_t n, std::uint64_t bits) { return ((n * bits + 7) / 8 + 7 + 7) / 8 * 8; }
inline std::uint64_t presence_words(std::uint64_t vocab_size) { return (vocab_size + 63) / 64; }
inline std::uint64_t presence_bytes(std::uint64_t vocab_size) {
  return presence_words(vocab_size) * 8 + (presence_words(vocab_size) * 4 + 7) / 8 * 8;
}
// Elias-Fano of n + 1 offsets up to `limit`.
inline std::uint32_t offset_low_bits(std::uint64_t n, std::uint64_t limit) {
  return limit / (n + 1) == 0 ? 0u : static_cast<std::uint32_t>(std::bit_width(limit / (n + 1)) - 1);
}
inline std::uint64_t offset_high_words(std::uint64_t n, std::uint64_t limit) {
  return (n + 1 + (limit >> offset_low_bits(n, limit)) + 63) / 64;
}
inline std::uint64_t offset_select_bytes(std::uint64_t n) { return ((n + kSelectStep) / kSelectStep * 4 + 7) / 8 * 8; }

struct IndexInfo {
  int order = 3;
  std::uint32_t vocab_size = 0;
  bool exact = false;
  std::uint64_t num_tokens = 0;  // counted tokens, weights included
  std::uint32_t min_count = 1;
  float log_prob_error = 0;
  std::string fingerprint, name, description;
  std::array<std::uint64_t, kMaxOrder> num_nodes{};
  std::array<std::uint32_t, kMaxOrder> value_bits{};
};

// How a file is brought into memory. Without any, pages come as they are first read.
struct OpenOptions {
  bool preload = false;     // read all of it now
  bool huge_pages = false;  // a private copy in huge pages where the system gives them; not shared with other processes
  bool interleave = false;  // spread the pages that this opening brings in over all NUMA nodes
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
    for (int i = 0; i < n; ++i) head[static_cast<std::uint32_t>(tokens[i]) % kSlots] = -1;
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
  static NgramIndex open(const std::string& path, const OpenOptions& options = {});
  static NgramIndex from_image(std::vector<std::byte> image);

  // Reads everything: checksums, padding, order of tokens, offsets. Throws Error at the first fault. `release` gives
  // the pages of a mapped file back as it goes, so that resident memory stays small.
  void verify(bool release = false) const;
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

  // --- node by node: for the search, the walker and verify; any argument is safe, on a damaged file too -----------
  struct Range {
    std::uint32_t begin, end;
    std::uint32_t size() const { return end - begin; }
  };
  std::uint32_t num_nodes(int level) const { return levels_[level - 1].n; }
  std::uint32_t unigram(std::int32_t token) const {  // the node of level 1, or kNoNode
    if (token < 0 || static_cast<std::uint32_t>(token) >= info_.vocab_size) return kNoNode;
    const std::uint64_t word = presence_[token >> 6], bit = std::uint64_t{1} << (token & 63);
    if ((word & bit) == 0) return kNoNode;
    const std::uint32_t node = ranks_[token >> 6] + static_cast<std::uint32_t>(std::popcount(word & (bit - 1)));
    return node < levels_[0].n ? node : kNoNode;
  }
  std::uint32_t token_at(int level, std::uint32_t node) const {  // level 2 and above
    const Level& l = levels_[level - 1];
    return static_cast<std::uint32_t>(load(l.records, std::uint64_t(node) * l.record_bits) & token_mask_);
  }
  std::uint32_t value_at(int level, std::uint32_t node) const {  // a code, or a place in the table of counts
    const Level& l = levels_[level - 1];
    return static_cast<std::uint32_t>(load(l.records, std::uint64_t(node) * l.record_bits) >> l.value_shift & l.value_mask);
  }
  // Children of a node that is no kNoNode, one level down; none at the top level.
  Range children(int level, std::uint32_t node) const {
    if (level >= info_.order) return {0, 0};
    const Level& l = levels_[level - 1];
    if (node >= l.n) return {0, 0};
    const std::uint32_t step = node / kSelectStep;
    const std::uint64_t high = l.select[step];
    std::uint64_t at = (high + std::uint64_t(step) * kSelectStep) >> 6;
    if (at >= l.high_words) return {0, 0};
    // the unary part: a one for each offset, after as many zeros as the high part has grown
    std::uint32_t skip = node % kSelectStep;
    std::uint64_t word = l.high[at] & (~std::uint64_t{0} << ((high + std::uint64_t(step) * kSelectStep) & 63));
    for (int ones; skip >= static_cast<std::uint32_t>(ones = std::popcount(word)); word = l.high[at]) {
      skip -= static_cast<std::uint32_t>(ones);
      if (++at == l.high_words) return {0, 0};
    }
    for (; skip > 0; --skip) word &= word - 1;
    const std::uint64_t first = (at << 6) + static_cast<std::uint64_t>(std::countr_zero(word)) - node;
    word &= word - 1;
    while (word == 0) {
      if (++at == l.high_words) return {0, 0};
      word = l.high[at];
    }
    const std::uint64_t second = (at << 6) + static_cast<std::uint64_t>(std::countr_zero(word)) - node - 1;
    const std::uint64_t low = load(l.low, std::uint64_t(node) * l.low_bits) & l.low_mask;
    const std::uint64_t next = load(l.low, std::uint64_t(node + 1) * l.low_bits) & l.low_mask;
    // clamped, so that a damaged file cannot lead outside its own sections
    const std::uint64_t limit = levels_[level].n;
    const std::uint64_t end = std::min(second << l.low_bits | next, limit);
    return {static_cast<std::uint32_t>(std::min(first << l.low_bits | low, end)), static_cast<std::uint32_t>(end)};
  }
  void prefetch_offsets(int level, std::uint32_t node) const {
    const Level& l = levels_[level - 1];
    __builtin_prefetch(l.select + node / kSelectStep);
    __builtin_prefetch(l.low + std::uint64_t(node) * l.low_bits / 8);
  }
  // After prefetch_offsets had time: the line of the unary part too.
  void prefetch_high(int level, std::uint32_t node) const {
    const Level& l = levels_[level - 1];
    const std::uint64_t at = (std::uint64_t(l.select[node / kSelectStep]) + node) >> 6;
    __builtin_prefetch(l.high + std::min(at, l.high_words - 1));
  }
  void prefetch_record(int level, std::uint32_t node) const {
    const Level& l = levels_[level - 1];
    __builtin_prefetch(l.records + std::uint64_t(node) * l.record_bits / 8);
  }
  double code_probability(int level, std::uint32_t code) const;  // quantised form only
  // freq(child) / freq(parent), exact form only: the values are places in the two levels' tables.
  double count_ratio(int child_level, std::uint32_t child_value, std::uint32_t parent_value) const {
    const double ratio = double(count_of(child_level, child_value)) / double(count_of(child_level - 1, parent_value));
    return ratio <= 1.0 ? ratio : (ratio > 1.0 ? 1.0 : 0.0);  // a flipped bit (0 / 0 too) cannot leave [0, 1]
  }
  std::uint64_t count_of(int level, std::uint32_t value) const {  // exact form only
    const Level& l = levels_[level - 1];
    return l.counts[std::min(value, l.table_size - 1)];
  }
  float code_log_prob(int level, std::uint32_t code) const { return levels_[level - 1].book[code % kCodes]; }
  const std::uint64_t* presence() const { return presence_; }

  // Calls hit(i, child, value) for each wanted.tokens[i] among `range` of `level`.
  template <class Hit>
  void match(int level, Range range, const WantedTokens& wanted, Hit&& hit) const {
    const Level& l = levels_[level - 1];
    const std::uint8_t* const records = l.records;
    const std::uint64_t step = l.record_bits, mask = token_mask_;
    const std::uint32_t n = range.size();
    if (n <= static_cast<std::uint32_t>(wanted.n) * static_cast<std::uint32_t>(std::bit_width(n))) {
      // few children: ask each whether it is wanted
      std::uint64_t bit = std::uint64_t(range.begin) * step;
      for (std::uint32_t at = range.begin; at < range.end; ++at, bit += step) {
        const std::uint64_t record = load(records, bit);
        const int i = wanted.find(static_cast<std::uint32_t>(record & mask));
        if (i >= 0) hit(i, at, static_cast<std::uint32_t>(record >> l.value_shift & l.value_mask));
      }
      return;
    }
    // Many: look each wanted token up. The last tokens of 15 equal parts, loaded once for all, save each its first
    // four steps; then binary searches in step hide each other's latency.
    constexpr int kLanes = 32, kParts = 16;
    const std::uint8_t* const base = records + (std::uint64_t(range.begin) * step >> 3);
    const std::uint64_t base_bit = std::uint64_t(range.begin) * step & 7;
    const std::uint64_t part = n < 64 ? 0 : n / kParts;
    std::int32_t pivots[kParts];
    for (std::uint64_t j = 0; j < kParts; ++j)
      pivots[j] = part == 0 || j == kParts - 1
                      ? INT32_MAX
                      : static_cast<std::int32_t>(load(base, base_bit + ((j + 1) * part - 1) * step) & mask);
    for (int first = 0; first < wanted.n; first += kLanes) {
      const int lanes = std::min(kLanes, wanted.n - first);
      const std::int32_t* const want = wanted.tokens.data() + first;
      std::uint64_t at[kLanes];  // in bits behind base
      for (int i = 0; i < lanes; ++i) {
        std::int32_t below = 0;
        for (int j = 0; j < kParts; ++j) below += static_cast<std::int32_t>(pivots[j] < want[i]);
        at[i] = base_bit + static_cast<std::uint64_t>(below) * part * step;
      }
      for (std::uint64_t size = n - (kParts - 1) * part; size > 1; size -= size / 2) {
        const std::uint64_t half = size / 2 * step, probe = half - step;
        for (int i = 0; i < lanes; ++i)
          at[i] += (load(base, at[i] + probe) & mask) < static_cast<std::uint32_t>(want[i]) ? half : 0;
      }
      for (int i = 0; i < lanes; ++i) {
        std::uint64_t record = load(base, at[i]);
        if (static_cast<std::int32_t>(record & mask) < want[i]) {
          at[i] += step;
          if (at[i] == base_bit + n * step) continue;
          record = load(base, at[i]);
        }
        if (static_cast<std::int32_t>(record & mask) != want[i]) continue;
        const auto found = static_cast<std::uint32_t>((at[i] - base_bit) / step);
        hit(first + i, range.begin + found, static_cast<std::uint32_t>(record >> l.value_shift & l.value_mask));
      }
    }
  }

 private:
  struct Level {
    const std::uint8_t* records = nullptr;
    std::uint64_t record_bits = 0;
    std::uint64_t value_mask = 0;
    std::uint32_t value_shift = 0;
    std::uint32_t n = 0;
    const std::uint8_t* low = nullptr;
    std::uint64_t low_bits = 0, low_mask = 0;
    const std::uint64_t* high = nullptr;
    std::uint64_t high_words = 0;
    const std::uint32_t* select = nullptr;
    const std::uint64_t* counts = nullptr;  // exact
    std::uint32_t table_size = 0;
    const float* book = nullptr;  // quantised
  };

  static std::uint64_t load(const std::uint8_t* base, std::uint64_t bit) {
    std::uint64_t word;
    std::memcpy(&word, base + (bit >> 3), 8);
    return word >> (bit & 7);
  }

  struct Mapping;

  NgramIndex() = default;
  void parse(const std::string& where);
  std::uint32_t child(int level, std::uint32_t node, std::int32_t token) const;
  double child_probability(int child_level, std::uint32_t child, std::uint32_t parent) const;

  std::shared_ptr<const void> owner_;
  bool mapped_ = false;  // the image is the file itself: what is given back is read again
  std::span<const std::byte> image_;
  std::vector<IndexSection> sections_;
  std::array<Level, kMaxOrder> levels_{};
  const std::uint64_t* presence_ = nullptr;
  const std::uint32_t* ranks_ = nullptr;
  std::uint64_t token_mask_ = 0;
  IndexInfo info_;
  std::uint64_t serial_ = 0;
};

}  // namespace dartspec
