#include "ngram_sort.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>

#include "hash.hpp"

namespace dartspec {

GramLayout::GramLayout(int order, std::uint32_t vocab_size) : order(order), bits(std::bit_width(vocab_size)) {}

namespace {

namespace fs = std::filesystem;

constexpr std::size_t kBlock = 1 << 14;           // entries that pass from stream to stream at once
constexpr std::size_t kWriteBytes = 1 << 20;      // a run is written in pieces of this size
constexpr std::size_t kMostRuns = 256;            // files read at once; more are joined in groups first
constexpr std::size_t kMostBytes = 64 << 20;      // of a buffer: a larger one sorts more slowly than it saves merging
constexpr char kRunMagic[8] = {'D', 'A', 'R', 'T', 'R', 'U', 'N', 'S'};
constexpr std::uint32_t kRunVersion = 1;
constexpr const char* kRunSuffix = ".run";

std::string str(std::uint64_t v) { return std::to_string(v); }

// The head of a run: entries follow, each a word of key and count, or of key alone and then a word of count.
struct RunHeader {
  char magic[8];
  std::uint32_t version, order, bits, word_bytes;
  std::uint64_t identity;                             // XXH64 of the identity text
  std::uint64_t begin, end, documents, offset;        // positions [begin, end), and the progress at their end
  std::uint64_t num_entries, num_words, words_checksum;
  std::uint64_t checksum;                             // XXH64 of the header with this field zero
};
static_assert(sizeof(RunHeader) == 96);

std::uint64_t header_checksum(RunHeader header) {
  header.checksum = 0;
  return xxh64(std::as_bytes(std::span(&header, 1)));
}

// Order-dependent and one multiplication a word: damage is found, at the speed of the merge.
template <class Word>
void checksum_words(std::uint64_t& sum, const Word* words, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    sum = std::rotl(sum ^ static_cast<std::uint64_t>(words[i]), 27) * 0x9E3779B185EBCA87u;
    if constexpr (sizeof(Word) == 16) sum ^= static_cast<std::uint64_t>(words[i] >> 64) * 0xC2B2AE3D27D4EB4Fu;
  }
}

class File {
 public:
  File(const std::string& path, int flags) : path_(path), fd_(::open(path.c_str(), flags | O_CLOEXEC, 0644)) {
    if (fd_ < 0) fail("open");
  }
  ~File() { ::close(fd_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  void write(const void* data, std::size_t bytes, std::uint64_t at) {
    for (const char* from = static_cast<const char*>(data); bytes > 0;) {
      const ssize_t n = ::pwrite(fd_, from, bytes, static_cast<off_t>(at));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail("write");
      from += n, at += static_cast<std::uint64_t>(n), bytes -= static_cast<std::size_t>(n);
    }
  }
  std::size_t read(void* data, std::size_t bytes, std::uint64_t at) {  // fewer only at the end of the file
    std::size_t done = 0;
    while (done < bytes) {
      const ssize_t n = ::pread(fd_, static_cast<char*>(data) + done, bytes - done, static_cast<off_t>(at + done));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail("read");
      if (n == 0) break;
      done += static_cast<std::size_t>(n);
    }
    return done;
  }

 private:
  [[noreturn]] void fail(const char* what) const {
    throw Error(std::string("cannot ") + what + " " + path_ + ": " + std::strerror(errno));
  }
  std::string path_;
  int fd_;
};

// A large array whose pages cost nothing until they are written, and are given back at once.
template <class Word>
class Pages {
 public:
  Pages() = default;
  explicit Pages(std::size_t n) : n_(n) {
    at_ = ::mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at_ == MAP_FAILED) throw Error("no memory for a buffer of " + str(bytes()) + " bytes: give a lower --memory");
    ::madvise(at_, bytes(), MADV_HUGEPAGE);
  }
  Pages(Pages&& other) noexcept : at_(std::exchange(other.at_, nullptr)), n_(std::exchange(other.n_, 0)) {}
  Pages& operator=(Pages&& other) noexcept {
    std::swap(at_, other.at_);
    std::swap(n_, other.n_);
    return *this;
  }
  ~Pages() {
    if (at_ != nullptr) ::munmap(at_, bytes());
  }
  Word* data() { return static_cast<Word*>(at_); }
  std::size_t size() const { return n_; }

 private:
  std::size_t bytes() const { return std::max<std::size_t>(n_, 1) * sizeof(Word); }
  void* at_ = nullptr;
  std::size_t n_ = 0;
};

// Sorts by the bits from `low` to `high`, least significant digit first; stable. Returns where the result lies.
template <class Word>
Word* radix_sort(Word* from, Word* to, std::size_t n, int low, int high) {
  constexpr int kDigit = 8;
  const int passes = (high - low + kDigit - 1) / kDigit;
  std::vector<std::array<std::size_t, 1 << kDigit>> counts(static_cast<std::size_t>(passes));
  for (auto& c : counts) c.fill(0);
  for (std::size_t i = 0; i < n; ++i) {
    Word rest = from[i] >> low;
    for (int p = 0; p < passes; ++p, rest >>= kDigit) ++counts[p][static_cast<std::size_t>(rest) & 255];
  }
  for (int p = 0; p < passes; ++p) {
    auto& c = counts[p];
    const int shift = low + p * kDigit;
    if (n == 0 || c[static_cast<std::size_t>(from[0] >> shift) & 255] == n) continue;  // one digit: nothing to do
    std::size_t at = 0;
    for (std::size_t& v : c) at += std::exchange(v, at);
    for (std::size_t i = 0; i < n; ++i) to[c[static_cast<std::size_t>(from[i] >> shift) & 255]++] = from[i];
    std::swap(from, to);
  }
  return from;
}

template <class Word> using Entries = std::vector<GramEntry<Word>>;

// --- streams --------------------------------------------------------------------------------------------------------

template <class Word>
class RunReader final : public GramStream<Word> {
 public:
  RunReader(const std::string& path, const RunHeader& header, Word count_mask, std::size_t buffer_bytes)
      : path_(path), file_(path, O_RDONLY), left_(header.num_words), expected_(header.words_checksum), mask_(count_mask),
        words_(std::max<std::size_t>(2, buffer_bytes / sizeof(Word))) {}

  std::size_t read(std::span<GramEntry<Word>> out) override {
    std::size_t n = 0;
    while (n < out.size()) {
      if (at_ == end_ && !refill()) break;
      const Word word = words_[at_++];
      std::uint64_t count = static_cast<std::uint64_t>(word & mask_);
      if (count == 0) {
        if (at_ == end_ && !refill()) break;
        count = static_cast<std::uint64_t>(words_[at_++]);
      }
      out[n++] = {word & ~mask_, count};
    }
    return n;
  }

 private:
  bool refill() {
    at_ = end_ = 0;
    if (left_ == 0) return false;
    const auto want = static_cast<std::size_t>(std::min<std::uint64_t>(left_, words_.size()));
    const std::size_t got = file_.read(words_.data(), want * sizeof(Word), offset_);
    checksum_words(sum_, words_.data(), got / sizeof(Word));
    left_ -= want;
    offset_ += got;
    if (got != want * sizeof(Word) || (left_ == 0 && sum_ != expected_))
      throw Error("the run " + path_ + " is damaged or cut off: delete its folder and build again");
    end_ = want;
    return true;
  }

  std::string path_;
  File file_;
  std::uint64_t left_, expected_, sum_ = 0, offset_ = sizeof(RunHeader);
  Word mask_;
  std::vector<Word> words_;
  std::size_t at_ = 0, end_ = 0;
};

template <class Word>
class MemoryReader final : public GramStream<Word> {
 public:
  MemoryReader(std::shared_ptr<const std::vector<Word>> words, Word count_mask) : words_(std::move(words)), mask_(count_mask) {}
  std::size_t read(std::span<GramEntry<Word>> out) override {
    std::size_t n = 0;
    while (n < out.size() && at_ < words_->size()) {
      const Word word = (*words_)[at_++];
      auto count = static_cast<std::uint64_t>(word & mask_);
      if (count == 0) count = static_cast<std::uint64_t>((*words_)[at_++]);
      out[n++] = {word & ~mask_, count};
    }
    return n;
  }

 private:
  std::shared_ptr<const std::vector<Word>> words_;
  Word mask_;
  std::size_t at_ = 0;
};

template <class Word>
struct Weighted {
  std::unique_ptr<GramStream<Word>> stream;
  std::uint64_t weight = 1;
};

// Many streams as one, by a tree of losers: each step costs log2(streams) comparisons.
template <class Word>
class Merged final : public GramStream<Word> {
 public:
  // `read_entries` counts what came in, for a progress bar.
  Merged(std::vector<Weighted<Word>> sources, std::atomic<std::uint64_t>* read_entries) : read_entries_(read_entries) {
    k_ = std::bit_ceil(std::max<std::size_t>(1, sources.size()));
    heads_.resize(k_);
    keys_.assign(k_, kEnd);
    losers_.assign(k_, 0);
    for (std::size_t i = 0; i < sources.size(); ++i) {
      heads_[i].source = std::move(sources[i]);
      heads_[i].block.resize(kBlock);
      load(i);
    }
    std::vector<std::uint32_t> winners(2 * k_);
    for (std::size_t i = 0; i < k_; ++i) winners[k_ + i] = static_cast<std::uint32_t>(i);
    for (std::size_t i = k_ - 1; i >= 1; --i) {
      std::uint32_t a = winners[2 * i], b = winners[2 * i + 1];
      if (keys_[b] < keys_[a]) std::swap(a, b);
      winners[i] = a;
      losers_[i] = b;
    }
    winner_ = k_ == 1 ? 0 : winners[1];
  }

  std::size_t read(std::span<GramEntry<Word>> out) override {
    std::size_t n = 0;
    while (n < out.size() && keys_[winner_] != kEnd) {
      const Word key = keys_[winner_];
      std::uint64_t count = 0;
      do {
        Head& head = heads_[winner_];
        count += head.block[head.at].count * head.source.weight;
        advance(winner_);
      } while (keys_[winner_] == key);
      out[n++] = {key, count};
    }
    return n;
  }

 private:
  static constexpr Word kEnd = ~Word{0};  // no key: the lowest bits of keys are zero
  struct Head {
    Weighted<Word> source;
    Entries<Word> block;
    std::size_t at = 0, end = 0;
  };

  void load(std::size_t i) {
    Head& head = heads_[i];
    head.at = 0;
    head.end = head.source.stream->read(head.block);
    if (read_entries_ != nullptr) read_entries_->fetch_add(head.end, std::memory_order_relaxed);
    keys_[i] = head.end == 0 ? kEnd : head.block[0].key;
  }

  void advance(std::uint32_t i) {
    Head& head = heads_[i];
    if (++head.at == head.end) load(i);
    else keys_[i] = head.block[head.at].key;
    Word key = keys_[i];
    for (std::size_t node = (k_ + i) / 2; node >= 1; node /= 2) {
      const std::uint32_t other = losers_[node];
      const Word other_key = keys_[other];
      const bool lost = other_key < key;
      losers_[node] = lost ? i : other;
      i = lost ? other : i;
      key = lost ? other_key : key;
    }
    winner_ = i;
  }

  std::atomic<std::uint64_t>* read_entries_;
  std::size_t k_;
  std::vector<Head> heads_;
  std::vector<Word> keys_;
  std::vector<std::uint32_t> losers_;
  std::uint32_t winner_ = 0;
};

// Another stream, read ahead by a thread of its own.
template <class Word>
class ReadAhead final : public GramStream<Word> {
 public:
  explicit ReadAhead(std::unique_ptr<GramStream<Word>> inner) : inner_(std::move(inner)), thread_([this] { produce(); }) {}
  ~ReadAhead() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  std::size_t read(std::span<GramEntry<Word>> out) override {
    if (at_ == block_.size()) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !ready_.empty() || done_; });
      if (ready_.empty()) {
        if (error_) std::rethrow_exception(error_);
        return 0;
      }
      block_ = std::move(ready_.front());
      ready_.pop_front();
      at_ = 0;
      lock.unlock();
      changed_.notify_all();
    }
    const std::size_t n = std::min(out.size(), block_.size() - at_);
    std::copy_n(block_.begin() + static_cast<std::ptrdiff_t>(at_), n, out.begin());
    at_ += n;
    return n;
  }

 private:
  void produce() {
    try {
      while (true) {
        Entries<Word> block(kBlock);
        block.resize(inner_->read(block));
        const bool last = block.empty();
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return ready_.size() < 4 || stop_; });
        if (stop_) return;
        if (last) done_ = true;
        else ready_.push_back(std::move(block));
        lock.unlock();
        changed_.notify_all();
        if (last) return;
      }
    } catch (...) {
      std::lock_guard lock(mutex_);
      error_ = std::current_exception();
      done_ = true;
    }
    changed_.notify_all();
  }

  std::unique_ptr<GramStream<Word>> inner_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entries<Word>> ready_;
  Entries<Word> block_;
  std::size_t at_ = 0;
  bool done_ = false, stop_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

// Sorted grams -> nodes. A node is closed when a gram comes that does not begin with it; then all its passes are known.
// Returns the tokens counted.
template <class Word>
std::uint64_t close_grams(GramStream<Word>& stream, const GramLayout& layout, std::uint64_t min_count, NodeSink& sink) {
  const int order = layout.order, bits = layout.bits, top = int(sizeof(Word)) * 8;
  const int free_bits = top - layout.key_bits();
  std::array<std::uint64_t, 8> counts{};
  std::uint64_t total = 0;
  Word previous = 0;
  bool first = true;
  auto digit = [&](Word key, int level) {  // level from 1
    return static_cast<std::uint32_t>(key >> (free_bits + bits * (order - level))) & ((1u << bits) - 1);
  };
  auto close_to = [&](int shared) {  // closes the nodes of `previous` deeper than `shared`
    for (int level = order; level > shared; --level) {
      const std::uint32_t token = digit(previous, level);
      if (token == 0) continue;  // the gram is shorter
      if (counts[level] >= min_count) sink.node(level, token - 1, counts[level]);
      (level > 1 ? counts[level - 1] : total) += counts[level];
      counts[level] = 0;
    }
  };
  Entries<Word> block(kBlock);
  while (const std::size_t n = stream.read(block)) {
    for (std::size_t i = 0; i < n; ++i) {
      const Word key = block[i].key;
      if (!first) {
        int shared = 0;
        while (shared < order && digit(key, shared + 1) == digit(previous, shared + 1)) ++shared;
        close_to(shared);
      }
      first = false;
      previous = key;
      int length = order;
      while (digit(key, length) == 0) --length;
      counts[length] += block[i].count;
    }
  }
  if (!first) close_to(0);
  return total;
}

// --- the sorter -----------------------------------------------------------------------------------------------------

template <class Word>
class Sorter final : public GramSorter {
 public:
  explicit Sorter(const GramSorterOptions& options)
      : options_(options), layout_(options.order, options.vocab_size), free_bits_(int(sizeof(Word)) * 8 - layout_.key_bits()),
        mask_((Word{1} << free_bits_) - 1), excluded_(options.vocab_size / 64 + 1, 0), threads_(std::max(1, options.threads)),
        identity_(hash_of(options.identity)) {
    for (std::int32_t token : options.exclude) {
      check(token);
      excluded_[static_cast<std::uint32_t>(token) / 64] |= 1ull << (token % 64);
    }
    const std::size_t buffers = threads_ == 1 ? 2 : 2 * static_cast<std::size_t>(threads_) + 1;
    capacity_ = std::clamp<std::size_t>(options_.memory_bytes / buffers * 15 / 16, 8192, kMostBytes) / sizeof(Word);
    if (!options_.folder.empty()) take_up();
  }

  ~Sorter() override { wait_for_workers(); }

  GramProgress progress() const override { return at_; }
  std::uint64_t entries_merged() const override { return entries_merged_.load(std::memory_order_relaxed); }
  std::uint64_t entries_spilled() const override {
    std::lock_guard lock(mutex_);
    std::uint64_t n = 0;
    for (const Run& run : runs_) n += run.header.num_entries;
    return n;
  }
  std::uint64_t bytes_spilled() const override {
    std::lock_guard lock(mutex_);
    std::uint64_t n = 0;
    for (const Run& run : runs_)
      if (run.words == nullptr) n += sizeof(RunHeader) + run.header.num_words * sizeof(Word);
    return n;
  }

  void add_document(std::span<const std::int32_t> tokens, std::uint64_t first, std::uint64_t last,
                    std::uint64_t weight) override {
    if (weight == 0) throw Error("weight is 0, expected at least 1");
    std::uint32_t highest = 0;
    for (std::int32_t token : tokens) highest = std::max(highest, static_cast<std::uint32_t>(token));
    if (highest >= options_.vocab_size)
      for (std::int32_t token : tokens) check(token);
    const bool in_line = weight <= static_cast<std::uint64_t>(std::min<Word>(mask_, UINT32_MAX));
    const std::size_t n = tokens.size(), order = static_cast<std::size_t>(layout_.order);
    last = std::min<std::uint64_t>(last, n);
    for (std::size_t i = std::min<std::size_t>(first, last); i < last;) {
      // a weight too large for a word's free bits goes into entries, which take more room
      const std::size_t end = std::min<std::size_t>(last, i + (in_line ? room() : std::min<std::size_t>(room(), big_room())));
      Word key = 0;
      for (std::size_t p = std::min(n, end + order - 1); p-- > end;) key = longer(key, tokens[p]);
      if (in_line) {
        Word* out = buffer_.data() + used_;
        for (std::size_t p = end; p-- > i;) {
          key = longer(key, tokens[p]);
          *out = key | static_cast<Word>(weight);
          out += key != 0;  // an excluded token starts no gram
        }
        used_ = static_cast<std::size_t>(out - buffer_.data());
      } else {
        for (std::size_t p = end; p-- > i;) {
          key = longer(key, tokens[p]);
          if (key != 0) big_.push_back({key, weight});
        }
      }
      at_.positions += end - i;
      at_.offset += end - i;
      i = end;
    }
    ++at_.documents;
    at_.offset = 0;
  }

  void add_gram(std::span<const std::int32_t> gram, std::uint64_t count) override {
    Word key = 0;
    for (std::int32_t token : gram) check(token);
    for (std::size_t p = gram.size(); p-- > 0;) key = (key >> layout_.bits & ~mask_) | lead(gram[p]);
    if (count <= static_cast<std::uint64_t>(std::min<Word>(mask_, UINT32_MAX))) {
      room();
      buffer_.data()[used_++] = key | static_cast<Word>(count);
    } else {
      big_room();
      big_.push_back({key, count});
    }
    ++at_.positions;
  }

  void add_run(const std::string& path, const std::string& identity, std::uint64_t weight) override {
    Run run;
    run.path = path;
    run.header = read_header(path, hash_of(identity));
    run.weight = weight;
    run.chained = run.ours = false;
    std::lock_guard lock(mutex_);
    runs_.push_back(std::move(run));
  }

  void spill() override {
    seal();
    wait_for_workers();
    rethrow();
  }

  void write_run(const std::string& path, const std::string& identity) override {
    prepare();
    write(path, *merged(), {}, at_, hash_of(identity));
  }

  std::uint64_t merge(std::uint64_t min_count, NodeSink& sink) override {
    prepare();
    return close_grams(*merged(), layout_, min_count, sink);
  }

  void remove_files() override {
    std::lock_guard lock(mutex_);
    for (const Run& run : runs_)
      if (run.words == nullptr && run.ours) fs::remove(run.path);
    runs_.clear();
  }

 private:
  struct Run {
    std::string path;
    RunHeader header{};
    std::uint64_t weight = 1;
    bool chained = true;  // one of the folder's chain of positions
    bool ours = true;     // removed with the folder
    std::shared_ptr<const std::vector<Word>> words;  // in memory, then without a path
  };
  struct Job {
    Pages<Word> buffer;
    std::size_t used = 0;
    Entries<Word> big;
    GramProgress begin, end;
  };

  void check(std::int32_t token) const {
    if (token < 0 || static_cast<std::uint32_t>(token) >= options_.vocab_size)
      throw Error("token " + std::to_string(token) + " (document " + str(at_.documents) + ") is outside the vocabulary of " +
                  str(options_.vocab_size) + ": give the vocabulary size of the tokenizer that made the ids");
  }
  Word lead(std::int32_t token) const { return (static_cast<Word>(token) + 1) << (free_bits_ + layout_.bits * (layout_.order - 1)); }
  // The gram that starts one position earlier, with `token`.
  Word longer(Word key, std::int32_t token) const {
    const auto t = static_cast<std::uint32_t>(token);
    if (excluded_[t / 64] >> (t % 64) & 1) return 0;
    return ((key >> layout_.bits) & ~mask_) | lead(token);
  }

  // Words that fit into the buffer, at least one.
  std::size_t room() {
    if (buffer_.size() == 0) buffer_ = new_buffer();
    if (used_ == buffer_.size()) {
      seal();
      buffer_ = new_buffer();
    }
    return buffer_.size() - used_;
  }
  std::size_t big_room() {
    const std::size_t limit = std::max<std::size_t>(1, capacity_ / 4);
    if (big_.size() >= limit) seal();
    return limit - big_.size();
  }
  Pages<Word> new_buffer() {
    std::unique_lock lock(mutex_);
    // as many buffers as the memory allows: threads_ at work and one to fill
    changed_.wait(lock, [&] { return working_ < static_cast<std::size_t>(threads_); });
    rethrow();
    if (!free_.empty()) {
      Pages<Word> buffer = std::move(free_.back());
      free_.pop_back();
      return buffer;
    }
    return Pages<Word>(capacity_);
  }

  Job take_job() {
    Job job{std::move(buffer_), used_, std::move(big_), sealed_, at_};
    buffer_ = {};
    used_ = 0;
    big_ = {};
    sealed_ = at_;
    return job;
  }

  // All that was added, in runs: of disk, or in memory where it never left the first buffer.
  void prepare() {
    if (runs_.empty() && working_ == 0 && used_ + big_.size() > 0) {
      Run run = sorted_run(take_job(), true);
      runs_.push_back(std::move(run));
    } else {
      spill();
    }
    buffer_ = Pages<Word>();
    scratch_.clear();
    free_.clear();
  }

  void seal() {
    if (used_ == 0 && big_.empty()) return;
    Job job = take_job();
    if (threads_ == 1) {
      Run run = sorted_run(std::move(job), options_.folder.empty());
      runs_.push_back(std::move(run));
      return;
    }
    std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
    ++working_;
    if (workers_.size() < static_cast<std::size_t>(threads_)) workers_.emplace_back([this] { work(); });
    changed_.notify_all();
  }

  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return !jobs_.empty() || stop_; });
      if (jobs_.empty()) return;
      Job job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      Run run;
      std::exception_ptr error;
      try {
        run = sorted_run(std::move(job), options_.folder.empty());
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      if (error) error_ = error;
      else runs_.push_back(std::move(run));
      --working_;
      changed_.notify_all();
    }
  }

  void wait_for_workers() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
      changed_.notify_all();
    }
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
    stop_ = false;
  }

  void rethrow() {
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

  // The grams of a sorted buffer and sorted entries, equal ones added up.
  class Buffered final : public GramStream<Word> {
   public:
    Buffered(const Word* words, std::size_t n, const Entries<Word>& big, Word mask)
        : at_(words), end_(words + n), big_(big.data()), big_end_(big.data() + big.size()), mask_(mask) {}
    std::size_t read(std::span<GramEntry<Word>> out) override {
      std::size_t n = 0;
      while (n < out.size() && (at_ < end_ || big_ < big_end_)) {
        const Word key = big_ == big_end_ || (at_ < end_ && (*at_ & ~mask_) < big_->key) ? *at_ & ~mask_ : big_->key;
        std::uint64_t count = 0;
        for (; at_ < end_ && (*at_ & ~mask_) == key; ++at_) count += static_cast<std::uint64_t>(*at_ & mask_);
        for (; big_ < big_end_ && big_->key == key; ++big_) count += big_->count;
        out[n++] = {key, count};
      }
      return n;
    }

   private:
    const Word *at_, *end_;
    const GramEntry<Word>*big_, *big_end_;
    Word mask_;
  };

  Run sorted_run(Job job, bool in_memory) {
    Pages<Word> scratch = take_scratch();
    Word* sorted = radix_sort(job.buffer.data(), scratch.data(), job.used, free_bits_, int(sizeof(Word)) * 8);
    std::sort(job.big.begin(), job.big.end(), [](const auto& a, const auto& b) { return a.key < b.key; });
    Buffered stream(sorted, job.used, job.big, mask_);
    Run run;
    if (in_memory) {
      auto words = std::make_shared<std::vector<Word>>();
      Entries<Word> block(std::min(kBlock, job.used + job.big.size() + 1));
      while (const std::size_t n = stream.read(block)) {
        run.header.num_entries += n;
        for (std::size_t i = 0; i < n; ++i) encode(block[i], [&](Word word) { words->push_back(word); });
      }
      words->shrink_to_fit();
      run.words = std::move(words);
    } else {
      run.path = run_path(job.begin, job.end);
      run.header = write(run.path, stream, job.begin, job.end, identity_);
    }
    std::lock_guard lock(mutex_);
    free_.push_back(std::move(job.buffer));
    scratch_.push_back(std::move(scratch));
    return run;
  }

  Pages<Word> take_scratch() {
    std::lock_guard lock(mutex_);
    if (scratch_.empty()) return Pages<Word>(capacity_);
    Pages<Word> scratch = std::move(scratch_.back());
    scratch_.pop_back();
    return scratch;
  }

  template <class Put>
  void encode(const GramEntry<Word>& entry, Put&& put) const {
    if (entry.count <= static_cast<std::uint64_t>(std::min<Word>(mask_, UINT32_MAX))) {
      put(entry.key | static_cast<Word>(entry.count));
    } else {
      put(entry.key);
      put(static_cast<Word>(entry.count));
    }
  }

  RunHeader write(const std::string& path, GramStream<Word>& stream, const GramProgress& begin, const GramProgress& end,
                  std::uint64_t identity) const {
    const std::string aside = path + ".part";
    RunHeader header{};
    std::memcpy(header.magic, kRunMagic, sizeof kRunMagic);
    header.version = kRunVersion;
    header.order = static_cast<std::uint32_t>(layout_.order);
    header.bits = static_cast<std::uint32_t>(layout_.bits);
    header.word_bytes = sizeof(Word);
    header.identity = identity;
    header.begin = begin.positions;
    header.end = end.positions;
    header.documents = end.documents;
    header.offset = end.offset;
    {
      File file(aside, O_RDWR | O_CREAT | O_TRUNC);
      std::uint64_t at = sizeof header;
      std::vector<Word> words;
      words.reserve(kWriteBytes / sizeof(Word) + 2 * kBlock);
      auto flush = [&] {
        checksum_words(header.words_checksum, words.data(), words.size());
        file.write(words.data(), words.size() * sizeof(Word), at);
        at += words.size() * sizeof(Word);
        header.num_words += words.size();
        words.clear();
      };
      Entries<Word> block(kBlock);
      while (const std::size_t n = stream.read(block)) {
        header.num_entries += n;
        for (std::size_t i = 0; i < n; ++i) encode(block[i], [&](Word word) { words.push_back(word); });
        if (words.size() * sizeof(Word) >= kWriteBytes) flush();
      }
      flush();
      header.checksum = header_checksum(header);
      file.write(&header, sizeof header, 0);
    }
    fs::rename(aside, path);
    return header;
  }

  RunHeader read_header(const std::string& path, std::uint64_t identity) const {
    RunHeader header{};
    const std::size_t got = File(path, O_RDONLY).read(&header, sizeof header, 0);
    if (got != sizeof header || std::memcmp(header.magic, kRunMagic, sizeof kRunMagic) != 0 ||
        header.checksum != header_checksum(header) || header.version != kRunVersion)
      throw Error(path + " is no file of counted grams of this version, or damaged: delete it and count again");
    if (header.order != static_cast<std::uint32_t>(layout_.order) || header.bits != static_cast<std::uint32_t>(layout_.bits))
      throw Error(path + " holds grams of order " + str(header.order) + " with " + str(header.bits) + " bits a token, expected " +
                  str(static_cast<std::uint64_t>(layout_.order)) + " and " + str(static_cast<std::uint64_t>(layout_.bits)) +
                  ": count it again with these options");
    if (header.identity != identity)
      throw Error(path + " was counted from other text, options or tokenizer: delete its folder, or name another one");
    return header;
  }

  // The longest chain of runs from position 0; what does not fit is of an interrupted moment and is counted again.
  void take_up() {
    fs::create_directories(options_.folder);
    std::map<std::uint64_t, Run> by_begin;
    std::vector<fs::path> files;
    for (const auto& entry : fs::directory_iterator(options_.folder)) files.push_back(entry.path());
    std::vector<fs::path> leftovers;
    for (const fs::path& file : files) {
      if (file.extension() == ".joined" || (file.extension() == ".part" && file.stem().extension() == kRunSuffix))
        leftovers.push_back(file);
      if (file.extension() != kRunSuffix) continue;
      Run run;
      run.path = file.string();
      run.header = read_header(run.path, identity_);
      auto [held, fresh] = by_begin.try_emplace(run.header.begin, run);
      if (fresh) continue;
      if (held->second.header.end < run.header.end) std::swap(held->second, run);
      leftovers.push_back(run.path);
    }
    while (true) {
      const auto next = by_begin.find(at_.positions);
      if (next == by_begin.end() || next->second.header.end == at_.positions) break;
      const RunHeader& header = next->second.header;
      at_ = {header.documents, header.offset, header.end};
      runs_.push_back(std::move(next->second));
      by_begin.erase(next);
    }
    for (const auto& [begin, run] : by_begin) leftovers.push_back(run.path);
    for (const fs::path& file : leftovers) fs::remove(file);
    sealed_ = at_;
  }

  std::unique_ptr<GramStream<Word>> open(const Run& run, std::size_t buffer_bytes) const {
    if (run.words != nullptr) return std::make_unique<MemoryReader<Word>>(run.words, mask_);
    return std::make_unique<RunReader<Word>>(run.path, run.header, mask_, buffer_bytes);
  }

  std::unique_ptr<GramStream<Word>> joined(std::span<const Run> runs, std::size_t buffer_bytes) {
    std::vector<Weighted<Word>> sources;
    for (const Run& run : runs) sources.push_back({open(run, buffer_bytes), run.weight});
    return std::make_unique<Merged<Word>>(std::move(sources), &entries_merged_);
  }

  std::unique_ptr<GramStream<Word>> merged() {
    std::sort(runs_.begin(), runs_.end(), [](const Run& a, const Run& b) { return a.header.begin < b.header.begin; });
    while (!options_.folder.empty() && runs_.size() > kMostRuns) join_some();
    entries_merged_ = 0;
    const std::size_t buffer = std::clamp<std::size_t>(options_.memory_bytes / 2 / std::max<std::size_t>(1, runs_.size()), 1 << 16, 4 << 20);
    const std::span<const Run> all(runs_);
    const std::size_t groups = std::min<std::size_t>(static_cast<std::size_t>(threads_) - 1, (all.size() + 1) / 2);
    if (groups == 0) return joined(all, buffer);
    std::vector<Weighted<Word>> sources;
    for (std::size_t g = 0; g < groups; ++g) {
      const std::size_t from = all.size() * g / groups, to = all.size() * (g + 1) / groups;
      sources.push_back({std::make_unique<ReadAhead<Word>>(joined(all.subspan(from, to - from), buffer)), 1});
    }
    return std::make_unique<Merged<Word>>(std::move(sources), nullptr);
  }

  // Fewer runs: neighbours in the chain become one, so that the folder is a chain whenever this is interrupted.
  void join_some() {
    std::vector<Run> chained, others, fewer;
    for (Run& run : runs_) (run.chained ? chained : others).push_back(std::move(run));
    for (std::vector<Run>* kind : {&chained, &others})
      for (std::size_t i = 0; i < kind->size(); i += kMostRuns) {
        const std::span<Run> group(kind->data() + i, std::min(kMostRuns, kind->size() - i));
        if (group.size() == 1) {
          fewer.push_back(std::move(group[0]));
          continue;
        }
        const bool in_chain = kind == &chained;
        const GramProgress begin{0, 0, group.front().header.begin};
        const GramProgress end{group.back().header.documents, group.back().header.offset, group.back().header.end};
        Run run;
        run.path = in_chain ? run_path(begin, end) : (fs::path(options_.folder) / (str(num_joined_++) + ".joined")).string();
        run.chained = in_chain;
        run.header = write(run.path, *joined(group, std::max<std::size_t>(1 << 16, options_.memory_bytes / 2 / kMostRuns)),
                           begin, end, identity_);
        for (const Run& old : group)
          if (old.ours) fs::remove(old.path);
        fewer.push_back(std::move(run));
      }
    runs_ = std::move(fewer);
  }

  std::string run_path(const GramProgress& begin, const GramProgress& end) const {
    return (fs::path(options_.folder) / ("grams-" + str(begin.positions) + "-" + str(end.positions) + kRunSuffix)).string();
  }
  static std::uint64_t hash_of(const std::string& text) { return xxh64(std::as_bytes(std::span(text))); }

  GramSorterOptions options_;
  GramLayout layout_;
  int free_bits_;
  Word mask_;
  std::vector<std::uint64_t> excluded_;
  int threads_;
  std::uint64_t identity_;
  std::size_t capacity_ = 0;
  std::uint64_t num_joined_ = 0;

  Pages<Word> buffer_;
  std::size_t used_ = 0;
  Entries<Word> big_;
  GramProgress at_, sealed_;
  std::atomic<std::uint64_t> entries_merged_{0};

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  std::vector<Pages<Word>> free_, scratch_;
  std::size_t working_ = 0;
  bool stop_ = false;
  std::exception_ptr error_;
  std::vector<std::thread> workers_;
  std::vector<Run> runs_;
};

}  // namespace

std::unique_ptr<GramSorter> GramSorter::make(const GramSorterOptions& options) {
  if (GramLayout(options.order, options.vocab_size).wide()) return std::make_unique<Sorter<unsigned __int128>>(options);
  return std::make_unique<Sorter<std::uint64_t>>(options);
}

}  // namespace dartspec
