#include "ngram_builder.hpp"

#include <algorithm>
#include <bit>

#include "ngram_writer.hpp"

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

void write(const std::vector<BuildLevel>& levels, std::size_t m, std::size_t i, IndexWriter& writer) {
  const BuildLevel& level = levels[m];
  if (m + 1 < levels.size()) {
    const std::size_t end = i + 1 < level.tokens.size() ? level.first_child[i + 1] : levels[m + 1].tokens.size();
    for (std::size_t c = level.first_child[i]; c < end; ++c) write(levels, m + 1, c, writer);
  }
  writer.add(static_cast<int>(m) + 1, level.tokens[i], level.counts[i]);
}

}  // namespace

NgramIndex NgramBuilder::finish(bool exact, std::uint32_t min_count, const std::string& fingerprint,
                                const std::string& name, const std::string& description) {
  if (min_count < 1) throw Error("min_count is 0, expected at least 1");
  std::vector<BuildLevel> levels(order_);
  counter_->levels(levels);
  std::uint64_t num_tokens = 0;
  for (std::uint64_t c : levels[0].counts) num_tokens += c;
  if (min_count > 1) prune(levels, min_count);
  IndexWriter writer("", order_, vocab_size_);
  for (std::size_t i = 0; i < levels[0].tokens.size(); ++i) write(levels, 0, i, writer);
  return writer.finish({exact, num_tokens, min_count, fingerprint, name, description});
}

}  // namespace dartspec
