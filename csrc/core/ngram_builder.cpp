#include "ngram_builder.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <set>

#include "hash.hpp"

namespace dartspec {

namespace {

std::string str(std::uint64_t v) { return std::to_string(v); }

// One level of the trie while it is built. Children of node i are [first_child[i], first_child[i + 1]) one level down.
struct BuildLevel {
  std::vector<std::uint32_t> tokens;
  std::vector<std::uint64_t> counts;
  std::vector<std::uint64_t> first_child;
};

}  // namespace

// Receives grams of up to `order` tokens, hands them back sorted with their counts summed.
struct NgramBuilder::Counter {
  virtual ~Counter() = default;
  // The gram at the front of `tokens`, at most `order` of them.
  virtual void add(std::span<const std::int32_t> tokens, std::uint64_t count) = 0;
  virtual void levels(std::vector<BuildLevel>& out) = 0;
};

// A gram is one integer: tokens + 1 from the top digit down, 0 behind a short one, so that integer order is trie order.
template <class Key>
struct NgramBuilder::CounterOf final : Counter {
  struct Entry {
    Key key;
    std::uint64_t count;
  };
  static constexpr std::size_t kBuffer = 4u << 20;

  CounterOf(int order, int bits) : order(order), bits(bits) {}

  void add(std::span<const std::int32_t> tokens, std::uint64_t count) override {
    Key key = 0;
    for (int i = 0; i < order; ++i) {
      key <<= bits;
      if (i < static_cast<int>(tokens.size())) key |= static_cast<Key>(tokens[i]) + 1;
    }
    buffer.push_back({key, count});
    if (buffer.size() >= kBuffer) flush();
  }

  void flush() {
    if (buffer.empty()) return;
    std::sort(buffer.begin(), buffer.end(), [](const Entry& a, const Entry& b) { return a.key < b.key; });
    std::vector<Entry> run;
    for (const Entry& e : buffer) {
      if (!run.empty() && run.back().key == e.key) run.back().count += e.count;
      else run.push_back(e);
    }
    buffer.clear();
    // Runs are joined like the digits of a binary counter: each entry is copied log(runs) times.
    while (!runs.empty() && runs.back().size() <= 2 * run.size()) {
      run = merged(runs.back(), run);
      runs.pop_back();
    }
    runs.push_back(std::move(run));
  }

  static std::vector<Entry> merged(const std::vector<Entry>& a, const std::vector<Entry>& b) {
    std::vector<Entry> out;
    out.reserve(a.size() + b.size());
    for (std::size_t i = 0, j = 0; i < a.size() || j < b.size();) {
      if (j == b.size() || (i < a.size() && a[i].key < b[j].key)) out.push_back(a[i++]);
      else if (i == a.size() || b[j].key < a[i].key) out.push_back(b[j++]);
      else {
        out.push_back({a[i].key, a[i].count + b[j].count});
        ++i, ++j;
      }
    }
    return out;
  }

  void levels(std::vector<BuildLevel>& out) override {
    flush();
    while (runs.size() > 1) {
      std::vector<Entry> last = merged(runs[runs.size() - 2], runs.back());
      runs.pop_back();
      runs.back() = std::move(last);
    }
    const Key mask = (Key{1} << bits) - 1;
    std::vector<std::uint32_t> previous(order, 0);
    if (runs.empty()) return;
    for (const Entry& e : runs.back()) {
      bool fresh = false;
      for (int m = 0; m < order; ++m) {
        const auto digit = static_cast<std::uint32_t>((e.key >> (bits * (order - 1 - m))) & mask);
        if (digit == 0) {
          std::fill(previous.begin() + m, previous.end(), 0);
          break;
        }
        fresh = fresh || digit != previous[m];
        previous[m] = digit;
        if (fresh) {
          out[m].tokens.push_back(digit - 1);
          out[m].counts.push_back(0);
          if (m + 1 < order) out[m].first_child.push_back(out[m + 1].tokens.size());
        }
        out[m].counts.back() += e.count;
      }
    }
    runs.clear();
  }

  int order, bits;
  std::vector<Entry> buffer;
  std::vector<std::vector<Entry>> runs;
};

NgramBuilder::NgramBuilder(int order, std::uint32_t vocab_size, std::span<const std::int32_t> exclude)
    : order_(order), vocab_size_(vocab_size) {
  if (order < kMinOrder || order > kMaxOrder)
    throw Error("order is " + std::to_string(order) + ", expected " + str(kMinOrder) + " to " + str(kMaxOrder));
  if (vocab_size < 1 || vocab_size > kMaxVocab)
    throw Error("vocab_size is " + str(vocab_size) + ", expected 1 to " + str(kMaxVocab));
  excluded_.resize(vocab_size, false);
  for (std::int32_t token : exclude) excluded_[checked(token)] = true;
  const int bits = std::bit_width(vocab_size);
  if (bits * order <= 64) counter_ = std::make_unique<CounterOf<std::uint64_t>>(order, bits);
  else counter_ = std::make_unique<CounterOf<unsigned __int128>>(order, bits);
}

NgramBuilder::~NgramBuilder() = default;

std::int32_t NgramBuilder::checked(std::int32_t token) const {
  if (token < 0 || static_cast<std::uint32_t>(token) >= vocab_size_)
    throw Error("token " + std::to_string(token) + " (document " + str(num_documents_) + ") is outside the vocabulary of " +
                str(vocab_size_) + ": give the vocabulary size of the tokenizer that made the ids");
  return token;
}

void NgramBuilder::add_document(std::span<const std::int32_t> tokens, std::uint32_t weight) {
  if (weight == 0) throw Error("weight is 0, expected at least 1");
  for (std::int32_t token : tokens) checked(token);  // before anything is counted: a refused document leaves no trace
  std::size_t begin = 0;
  while (begin < tokens.size()) {
    std::size_t end = begin;
    while (end < tokens.size() && !excluded_[tokens[end]]) ++end;
    for (std::size_t i = begin; i < end; ++i)
      counter_->add(tokens.subspan(i, std::min<std::size_t>(order_, end - i)), weight);
    begin = end + 1;
  }
  ++num_documents_;
}

void NgramBuilder::add_grams(std::span<const std::int32_t> grams, std::span<const std::int64_t> counts) {
  if (grams.size() != counts.size() * order_)
    throw Error("grams hold " + str(grams.size()) + " tokens, expected " + str(counts.size()) + " x " +
                std::to_string(order_));
  for (std::size_t n = 0; n < counts.size(); ++n) {
    const auto gram = grams.subspan(n * order_, order_);
    std::size_t length = 0;
    while (length < gram.size() && gram[length] >= 0) checked(gram[length++]);
    if (length == 0 || std::any_of(gram.begin() + length, gram.end(), [](std::int32_t t) { return t != -1; }))
      throw Error("gram " + str(n) + " has a gap or no token: expected tokens first, then -1");
    if (counts[n] < 1) throw Error("gram " + str(n) + " has count " + std::to_string(counts[n]) + ", expected at least 1");
    counter_->add(gram.first(length), static_cast<std::uint64_t>(counts[n]));
  }
}

namespace {

// A child is counted at most as often as its parent, so what is left is still a trie.
void prune(std::vector<BuildLevel>& levels, std::uint64_t min_count) {
  for (std::size_t m = 0; m < levels.size(); ++m) {
    BuildLevel& level = levels[m];
    BuildLevel kept;
    const bool top = m + 1 == levels.size();
    std::vector<bool> child_lives(top ? 0 : levels[m + 1].tokens.size(), false);
    for (std::size_t i = 0; i < level.tokens.size(); ++i) {
      if (level.counts[i] < min_count) continue;
      kept.tokens.push_back(level.tokens[i]);
      kept.counts.push_back(level.counts[i]);
      if (top) continue;
      BuildLevel& below = levels[m + 1];
      kept.first_child.push_back(level.first_child[i]);
      const std::size_t end = i + 1 < level.tokens.size() ? level.first_child[i + 1] : below.tokens.size();
      for (std::size_t c = level.first_child[i]; c < end; ++c) child_lives[c] = below.counts[c] >= min_count;
    }
    if (!top) {  // first_child counts the surviving children before it
      std::vector<std::uint64_t> rank(child_lives.size() + 1, 0);
      for (std::size_t c = 0; c < child_lives.size(); ++c) rank[c + 1] = rank[c] + (child_lives[c] ? 1 : 0);
      for (std::uint64_t& first : kept.first_child) first = rank[first];
    }
    level = std::move(kept);
  }
}

struct Coded {
  std::vector<std::uint8_t> codes;
  std::vector<float> book = std::vector<float>(kCodes, 0.0f);
  double error = 0.0;
};

// 8-bit log-probabilities: the distinct values themselves where there are few, else an even grid from 0 to the lowest.
Coded quantise(const std::vector<double>& log_probs) {
  Coded out;
  out.codes.reserve(log_probs.size());
  std::set<double> distinct;
  double lowest = 0.0;
  for (double v : log_probs) {
    lowest = std::min(lowest, v);
    if (distinct.size() <= kCodes) distinct.insert(v);
  }
  const bool few = distinct.size() <= kCodes;
  std::vector<double> values(distinct.rbegin(), distinct.rend());
  const double step = few || lowest == 0.0 ? 1.0 : -lowest / (kCodes - 1);
  for (int c = 0; c < kCodes; ++c)
    out.book[c] = static_cast<float>(few ? (c < static_cast<int>(values.size()) ? values[c] : values.empty() ? 0.0 : values.back())
                                         : -step * c);
  for (double v : log_probs) {
    const auto code = few ? std::lower_bound(values.begin(), values.end(), v, std::greater<>()) - values.begin()
                          : static_cast<std::ptrdiff_t>(std::min(double(kCodes - 1), std::nearbyint(-v / step)));
    out.codes.push_back(static_cast<std::uint8_t>(code));
    out.error = std::max(out.error, std::abs(v - double(out.book[code])));
  }
  return out;
}

class ImageWriter {
 public:
  ImageWriter(IndexHeader header, const std::string (&texts)[3], std::size_t num_sections) : header_(header) {
    std::uint64_t end = sizeof(IndexHeader) + num_sections * sizeof(IndexSection);
    for (int i = 0; i < 3; ++i) {
      header_.text_bytes[i] = static_cast<std::uint32_t>(texts[i].size());
      text_ += texts[i];
    }
    end += text_.size();
    header_.header_bytes = static_cast<std::uint32_t>((end + kAlign - 1) / kAlign * kAlign);
    header_.num_sections = static_cast<std::uint32_t>(num_sections);
    image_.resize(header_.header_bytes);
  }

  template <class T>
  void section(SectionKind kind, std::uint32_t level, const std::vector<T>& data) {
    image_.resize((image_.size() + kAlign - 1) / kAlign * kAlign);
    const auto bytes = std::as_bytes(std::span<const T>(data));
    sections_.push_back({std::uint32_t(kind), level, image_.size(), bytes.size(), xxh64(bytes)});
    image_.insert(image_.end(), bytes.begin(), bytes.end());
  }

  std::vector<std::byte> finish() {
    header_.file_bytes = image_.size();
    std::memcpy(image_.data() + sizeof header_, sections_.data(), sections_.size() * sizeof(IndexSection));
    std::memcpy(image_.data() + sizeof header_ + sections_.size() * sizeof(IndexSection), text_.data(), text_.size());
    header_.checksum = 0;
    std::memcpy(image_.data(), &header_, sizeof header_);
    header_.checksum = xxh64(std::span<const std::byte>(image_).first(header_.header_bytes));
    std::memcpy(image_.data(), &header_, sizeof header_);
    return std::move(image_);
  }

 private:
  IndexHeader header_;
  std::string text_;
  std::vector<IndexSection> sections_;
  std::vector<std::byte> image_;
};

}  // namespace

NgramIndex NgramBuilder::finish(bool exact, std::uint32_t min_count, const std::string& fingerprint,
                                const std::string& name, const std::string& description) {
  if (min_count < 1) throw Error("min_count is 0, expected at least 1");
  for (const std::string* text : {&fingerprint, &name, &description})
    if (text->size() > (1u << 20))
      throw Error("a header text has " + str(text->size()) + " bytes, the limit is " + str(1u << 20));
  std::vector<BuildLevel> levels(order_);
  counter_->levels(levels);
  std::uint64_t num_tokens = 0;
  for (std::uint64_t c : levels[0].counts) num_tokens += c;
  if (min_count > 1) prune(levels, min_count);
  for (const BuildLevel& level : levels) {
    if (level.tokens.size() >= kNoNode) throw Error("a level has " + str(level.tokens.size()) + " nodes, the limit is 2^32 - 2: raise min_count");
    for (std::uint64_t c : level.counts)
      if (exact && c > UINT32_MAX)
        throw Error("a gram is counted " + str(c) + " times, the exact form holds up to 2^32 - 1: build the quantised form");
  }

  std::vector<std::vector<std::uint32_t>> offsets(order_);
  std::vector<Coded> coded(order_);
  double error = 0.0;
  for (int m = 0; m < order_; ++m) {
    BuildLevel& level = levels[m];
    if (m + 1 < order_) {
      offsets[m].assign(level.first_child.begin(), level.first_child.end());
      offsets[m].push_back(static_cast<std::uint32_t>(levels[m + 1].tokens.size()));
    }
    if (exact) continue;
    std::vector<double> log_probs(level.tokens.size());
    if (m == 0) {
      for (std::size_t i = 0; i < log_probs.size(); ++i)
        log_probs[i] = std::log(double(level.counts[i]) / double(num_tokens));
    } else {
      for (std::size_t parent = 0; parent < levels[m - 1].tokens.size(); ++parent)
        for (std::uint32_t c = offsets[m - 1][parent]; c < offsets[m - 1][parent + 1]; ++c)
          log_probs[c] = std::log(double(level.counts[c]) / double(levels[m - 1].counts[parent]));
    }
    coded[m] = quantise(log_probs);
    error = std::max(error, coded[m].error);
  }

  IndexHeader header{};
  std::memcpy(header.magic, kIndexMagic, sizeof kIndexMagic);
  header.version = kIndexVersion;
  header.byte_order = kByteOrder;
  header.order = static_cast<std::uint32_t>(order_);
  header.token_bytes = vocab_size_ <= 65536 ? 2 : 4;
  header.counts_form = exact ? 1 : 0;
  header.vocab_size = vocab_size_;
  header.num_tokens = num_tokens;
  header.min_count = min_count;
  header.log_prob_error = static_cast<float>(error);
  for (int m = 0; m < order_; ++m) header.num_nodes[m] = levels[m].tokens.size();

  ImageWriter writer(header, {fingerprint, name, description}, 3 * order_ - 1 + (exact ? 0 : 1));
  std::vector<float> codebook;
  for (int m = 0; m < order_; ++m) {
    const auto level = static_cast<std::uint32_t>(m + 1);
    if (header.token_bytes == 2)
      writer.section(SectionKind::tokens, level, std::vector<std::uint16_t>(levels[m].tokens.begin(), levels[m].tokens.end()));
    else
      writer.section(SectionKind::tokens, level, levels[m].tokens);
    if (exact)
      writer.section(SectionKind::values, level, std::vector<std::uint32_t>(levels[m].counts.begin(), levels[m].counts.end()));
    else
      writer.section(SectionKind::values, level, coded[m].codes);
    if (m + 1 < order_) writer.section(SectionKind::offsets, level, offsets[m]);
    codebook.insert(codebook.end(), coded[m].book.begin(), coded[m].book.end());
  }
  if (!exact) writer.section(SectionKind::codebook, 0, codebook);
  NgramIndex index = NgramIndex::from_image(writer.finish());
  index.verify();
  return index;
}

}  // namespace dartspec
