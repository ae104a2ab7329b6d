#include "ngram_writer.hpp"

#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <set>
#include <vector>

#include "exact_math.hpp"
#include "hash.hpp"

namespace dartspec {

namespace {

std::string str(std::uint64_t v) { return std::to_string(v); }

[[noreturn]] void fail(const std::string& path) { throw Error("cannot write the index " + path + ": " + std::strerror(errno)); }

// An open file that is closed, and removed when it has a name to remove.
struct File {
  int fd = -1;
  std::string remove;
  File() = default;
  File(const File&) = delete;
  ~File() {
    if (fd >= 0) ::close(fd);
    if (!remove.empty()) ::unlink(remove.c_str());
  }
};

void write_at(int fd, const std::uint8_t* data, std::size_t bytes, std::uint64_t offset, const std::string& path) {
  while (bytes > 0) {
    const ssize_t n = ::pwrite(fd, data, bytes, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail(path);
    data += n;
    bytes -= static_cast<std::size_t>(n);
    offset += static_cast<std::uint64_t>(n);
  }
}

constexpr std::size_t kChunk = 1 << 20;

// Bytes that are appended, then read from the start any number of times. Beyond a chunk they go to a file that has
// lost its name, unless there is no path.
class Spool {
 public:
  explicit Spool(const std::string& path) : path_(path) {}

  void put(std::uint8_t byte) { buffer_.push_back(byte); }
  void put_number(std::uint64_t v) {
    for (; v >= 128; v >>= 7) put(static_cast<std::uint8_t>(v | 128));
    put(static_cast<std::uint8_t>(v));
  }
  void end_of_entry() {
    if (buffer_.size() >= kChunk && !path_.empty()) spill();
  }

  class Reader {
   public:
    explicit Reader(const Spool& spool) : spool_(&spool) {
      if (spool.spilled_ == 0) {
        at_ = spool.buffer_.data();
        end_ = at_ + spool.buffer_.size();
      } else {
        chunk_.resize(kChunk);
      }
    }
    std::uint8_t byte() {
      if (at_ == end_) refill();
      return *at_++;
    }
    std::uint64_t number() {
      std::uint64_t v = 0;
      for (int shift = 0;; shift += 7) {
        const std::uint64_t b = byte();
        v |= (b & 127) << shift;
        if (b < 128) return v;
      }
    }

   private:
    void refill() {
      if (done_ == spool_->spilled_) {
        at_ = spool_->buffer_.data();
        end_ = at_ + spool_->buffer_.size();
        return;
      }
      ssize_t n;
      do n = ::pread(spool_->file_.fd, chunk_.data(), std::min<std::uint64_t>(kChunk, spool_->spilled_ - done_), static_cast<off_t>(done_));
      while (n < 0 && errno == EINTR);
      if (n <= 0) fail(spool_->path_);
      done_ += static_cast<std::uint64_t>(n);
      at_ = chunk_.data();
      end_ = at_ + n;
    }
    const Spool* spool_;
    const std::uint8_t *at_ = nullptr, *end_ = nullptr;
    std::vector<std::uint8_t> chunk_;
    std::uint64_t done_ = 0;
  };

 private:
  void spill() {
    if (file_.fd < 0) {
      const std::string name = path_ + ".level" + str(static_cast<std::uint64_t>(::getpid()));
      file_.fd = ::open(name.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
      if (file_.fd < 0) fail(name);
      ::unlink(name.c_str());
    }
    write_at(file_.fd, buffer_.data(), buffer_.size(), spilled_, path_);
    spilled_ += buffer_.size();
    buffer_.clear();
  }

  std::string path_;
  std::vector<std::uint8_t> buffer_;
  File file_;
  std::uint64_t spilled_ = 0;
};

// Where the image goes: a file or memory.
struct Target {
  int fd = -1;
  std::vector<std::byte> image;
  std::string path;

  void write(const void* data, std::size_t bytes, std::uint64_t offset) {
    if (bytes == 0) return;
    if (fd >= 0) write_at(fd, static_cast<const std::uint8_t*>(data), bytes, offset, path);
    else std::memcpy(image.data() + offset, data, bytes);
  }
};

// One section, written front to back as fields of any width up to 57 bits, with its checksum.
class Section {
 public:
  Section(Target& target, SectionKind kind, int level, std::uint64_t& offset, std::uint64_t bytes) : target_(&target) {
    offset = (offset + kAlign - 1) / kAlign * kAlign;
    entry = {std::uint32_t(kind), static_cast<std::uint32_t>(level), offset, bytes, 0};
    at_ = offset;
    offset += bytes;
  }
  void add(std::uint64_t value, std::uint64_t bits) {
    word_ |= value << used_;
    used_ += bits;
    if (used_ < 64) return;
    put(word_);
    used_ -= 64;
    word_ = used_ == 0 ? 0 : value >> (bits - used_);
  }
  void zeros(std::uint64_t n) {
    for (; n > 32; n -= 32) add(0, 32);
    add(0, n);
  }
  IndexSection finish() {
    if (used_ > 0) put(word_);
    while (at_ + buffer_.size() * 8 < entry.offset + entry.bytes) put(0);
    entry.checksum = flush(true);
    return entry;
  }

  IndexSection entry;

 private:
  void put(std::uint64_t word) {
    buffer_.push_back(word);
    if (buffer_.size() == kChunk / 8) flush(false);
  }
  std::uint64_t flush(bool last) {
    const auto bytes = std::as_bytes(std::span<const std::uint64_t>(buffer_));
    target_->write(bytes.data(), bytes.size(), at_);
    at_ += bytes.size();
    std::uint64_t sum = 0;
    if (last) sum = hash_.finish(bytes);
    else hash_.stripes(bytes);
    buffer_.clear();
    return sum;
  }

  Target* target_;
  std::uint64_t at_ = 0, word_ = 0, used_ = 0;
  std::vector<std::uint64_t> buffer_;
  Xxh64 hash_;
};

// log of counts; small ones from a table.
class Logs {
 public:
  Logs() : small_(1 << 14) {
    for (std::size_t c = 1; c < small_.size(); ++c) small_[c] = exact_log(double(c));
  }
  double operator()(std::uint64_t count) const { return count < small_.size() ? small_[count] : exact_log(double(count)); }

 private:
  std::vector<double> small_;
};

// Chooses 256 log-probabilities for a level so that the largest error is as small as it can be. Costs are -log p.
class Codebook {
 public:
  void see(double cost) {
    if (cost == last_) return;
    last_ = cost;
    if (bins_.empty()) {
      distinct_.insert(cost);
      if (distinct_.size() <= kCodes) return;
      bins_.resize(static_cast<std::size_t>(45 * kBinsPerUnit));  // log 2^64 is below 45
      for (double seen : distinct_) bins_[place(seen)].add(seen);
      distinct_.clear();
    }
    bins_[place(cost)].add(cost);
  }

  void choose() {
    few_.assign(distinct_.begin(), distinct_.end());
    for (double cost : few_) book_.push_back(static_cast<float>(0.0 - cost));
    if (!bins_.empty()) {
      std::vector<Bin*> used;
      for (Bin& bin : bins_)
        if (bin.high >= 0) used.push_back(&bin);
      double narrow = 0.0, wide = 64.0;
      for (int i = 0; i < 30; ++i) {
        const double width = (narrow + wide) / 2;
        (cover(used, width, false) <= kCodes ? wide : narrow) = width;
      }
      cover(used, wide, true);
    }
    book_.resize(kCodes, book_.empty() ? 0.0f : book_.back());
  }

  std::uint32_t code(double cost) {
    const std::uint32_t code = bins_.empty()
        ? static_cast<std::uint32_t>(std::lower_bound(few_.begin(), few_.end(), cost) - few_.begin())
        : bins_[place(cost)].code;
    error_ = std::max(error_, std::abs(cost + double(book_[code])));
    return code;
  }

  const std::vector<float>& book() const { return book_; }
  double error() const { return error_; }

 private:
  struct Bin {
    double low = 1e9, high = -1.0;
    std::uint8_t code = 0;
    void add(double cost) {
      low = std::min(low, cost);
      high = std::max(high, cost);
    }
  };
  static constexpr double kBinsPerUnit = 4096;
  static std::size_t place(double cost) { return static_cast<std::size_t>(cost * kBinsPerUnit); }

  // Intervals of at most `width` (or one bin) that hold every bin; how many.
  int cover(const std::vector<Bin*>& used, double width, bool keep) {
    int n = 0;
    double low = used.front()->low, high = low;
    auto close = [&] {
      if (keep) book_.push_back(static_cast<float>(0.0 - (low + high) / 2));
      ++n;
    };
    for (Bin* bin : used) {
      if (bin->high - low > width && bin != used.front()) {
        close();
        low = bin->low;
      }
      high = bin->high;
      if (keep) bin->code = static_cast<std::uint8_t>(n);
    }
    close();
    return n;
  }

  std::vector<Bin> bins_;
  std::set<double> distinct_;
  double last_ = -1;
  std::vector<double> few_;
  std::vector<float> book_;
  double error_ = 0;
};

// The distinct counts of a level.
class CountTable {
 public:
  void see(std::uint64_t count) {
    if (count < kSmall) seen_[count] = true;
    else large_.insert(count);
  }
  void choose() {
    place_.resize(kSmall);
    for (std::uint64_t c = 0; c < kSmall; ++c)
      if (seen_[c]) {
        place_[c] = static_cast<std::uint32_t>(table_.size());
        table_.push_back(c);
      }
    table_.insert(table_.end(), large_.begin(), large_.end());
    if (table_.empty()) table_.push_back(0);
  }
  std::uint32_t code(std::uint64_t count) const {
    return count < kSmall ? place_[count]
                          : static_cast<std::uint32_t>(std::lower_bound(table_.begin(), table_.end(), count) - table_.begin());
  }
  const std::vector<std::uint64_t>& table() const { return table_; }

 private:
  static constexpr std::uint64_t kSmall = 1 << 16;
  std::vector<bool> seen_ = std::vector<bool>(kSmall, false);
  std::set<std::uint64_t> large_;
  std::vector<std::uint32_t> place_;
  std::vector<std::uint64_t> table_;
};

}  // namespace

struct IndexWriter::Impl {
  struct Level {
    explicit Level(const std::string& path) : spool(path) {}
    Spool spool;
    std::uint64_t n = 0;
    // since the parent level's last node
    std::int64_t last_token = -1;
    std::uint64_t open = 0, open_sum = 0;
  };
  struct Node {
    std::uint32_t token;
    std::uint64_t count, children;
  };

  Impl(std::string target, int order, std::uint32_t vocab_size) : path(std::move(target)), order(order), vocab_size(vocab_size) {
    for (int m = 0; m <= order; ++m) levels.push_back(std::make_unique<Level>(path));  // one below the top stays empty
  }

  Node read(int m, Spool::Reader& reader) const {
    Node node{};
    for (int i = 0; i < 3; ++i) node.token |= std::uint32_t(reader.byte()) << (8 * i);
    node.count = reader.number();
    if (m + 1 < order) node.children = reader.number();
    return node;
  }

  // use(node, parent's count) for every node of a level.
  template <class Use>
  void each(int m, std::uint64_t num_tokens, Use&& use) const {
    Spool::Reader own(levels[m]->spool);
    if (m == 0) {
      for (std::uint64_t i = 0; i < levels[0]->n; ++i) use(read(0, own), num_tokens);
      return;
    }
    Spool::Reader above(levels[m - 1]->spool);
    for (std::uint64_t p = 0; p < levels[m - 1]->n; ++p) {
      const Node parent = read(m - 1, above);
      for (std::uint64_t c = 0; c < parent.children; ++c) use(read(m, own), parent.count);
    }
  }

  std::string path;
  int order;
  std::uint32_t vocab_size;
  std::vector<std::unique_ptr<Level>> levels;
  bool finished = false;
};

IndexWriter::IndexWriter(std::string path, int order, std::uint32_t vocab_size) {
  if (order < kMinOrder || order > kMaxOrder)
    throw Error("order is " + std::to_string(order) + ", expected " + str(kMinOrder) + " to " + str(kMaxOrder));
  if (vocab_size < 1 || vocab_size > kMaxVocab)
    throw Error("vocab_size is " + str(vocab_size) + ", expected 1 to " + str(kMaxVocab));
  impl_ = std::make_unique<Impl>(std::move(path), order, vocab_size);
}

IndexWriter::~IndexWriter() = default;
IndexWriter::IndexWriter(IndexWriter&&) noexcept = default;

void IndexWriter::add(int level, std::uint32_t token, std::uint64_t count) {
  Impl& w = *impl_;
  auto refuse = [&](const std::string& what) {
    throw Error("node of level " + std::to_string(level) + ", token " + str(token) + ", count " + str(count) + ": " + what);
  };
  if (level < 1 || level > w.order) refuse("the order is " + str(static_cast<std::uint64_t>(w.order)));
  if (token >= w.vocab_size) refuse("the vocabulary has " + str(w.vocab_size));
  Impl::Level& own = *w.levels[level - 1];
  Impl::Level& below = *w.levels[level];
  if (own.last_token >= std::int64_t(token)) refuse("it follows token " + str(static_cast<std::uint64_t>(own.last_token)) + ", expected ascending tokens");
  if (count < 1 || count < below.open_sum) refuse("expected at least 1 and its children's " + str(below.open_sum));
  if (level + 1 < w.order && w.levels[level + 1]->open != 0) refuse("a node two levels below has no parent");
  if (own.n == kNoNode - 1) refuse("a level has at most 2^32 - 2 nodes: raise min_count");
  for (int i = 0; i < 3; ++i) own.spool.put(static_cast<std::uint8_t>(token >> (8 * i)));
  own.spool.put_number(count);
  if (level < w.order) own.spool.put_number(below.open);
  own.spool.end_of_entry();
  below.open = below.open_sum = 0;
  below.last_token = -1;
  own.last_token = token;
  own.open_sum += count;
  ++own.open;
  ++own.n;
}

NgramIndex IndexWriter::finish(const IndexMeta& meta) {
  Impl& w = *impl_;
  if (std::exchange(w.finished, true)) throw Error("the index was finished before");
  for (const std::string* text : {&meta.fingerprint, &meta.name, &meta.description})
    if (text->size() > (1u << 20))
      throw Error("a header text has " + str(text->size()) + " bytes, the limit is " + str(1u << 20));
  for (int m = 1; m < w.order; ++m)
    if (w.levels[m]->open != 0) throw Error("the last node of level " + str(static_cast<std::uint64_t>(m) + 1) + " has no parent");

  IndexHeader header{};
  std::memcpy(header.magic, kIndexMagic, sizeof kIndexMagic);
  header.version = kIndexVersion;
  header.byte_order = kByteOrder;
  header.order = static_cast<std::uint32_t>(w.order);
  header.token_bits = token_bits_of(w.vocab_size);
  header.counts_form = meta.exact ? 1 : 0;
  header.vocab_size = w.vocab_size;
  header.num_tokens = meta.num_tokens;
  header.min_count = meta.min_count;
  for (int m = 0; m < w.order; ++m) header.num_nodes[m] = w.levels[m]->n;

  // --- which values there are
  const Logs logs;
  std::vector<Codebook> books(meta.exact ? 0 : w.order);
  std::vector<CountTable> tables(meta.exact ? w.order : 0);
  for (int m = 0; m < w.order; ++m) {
    w.each(m, meta.num_tokens, [&](const Impl::Node& node, std::uint64_t parent) {
      if (node.count > parent)
        throw Error("num_tokens is " + str(meta.num_tokens) + ", token " + str(node.token) + " alone has " + str(node.count));
      if (meta.exact) tables[m].see(node.count);
      else books[m].see(logs(parent) - logs(node.count));
    });
    if (meta.exact) tables[m].choose();
    else books[m].choose();
    header.value_bits[m] = meta.exact ? static_cast<std::uint32_t>(std::bit_width(tables[m].table().size() - 1)) : kCodeBits;
  }

  // --- the sections
  header.num_sections = 5 * header.order - 2;
  const std::string text = meta.fingerprint + meta.name + meta.description;
  header.text_bytes[0] = static_cast<std::uint32_t>(meta.fingerprint.size());
  header.text_bytes[1] = static_cast<std::uint32_t>(meta.name.size());
  header.text_bytes[2] = static_cast<std::uint32_t>(meta.description.size());
  const std::uint64_t directory_bytes = header.num_sections * sizeof(IndexSection);
  header.header_bytes = static_cast<std::uint32_t>((sizeof header + directory_bytes + text.size() + kAlign - 1) / kAlign * kAlign);

  std::vector<std::vector<Section>> sections(w.order);
  Target target;
  target.path = w.path;
  std::uint64_t end = header.header_bytes;
  for (int m = 0; m < w.order; ++m) {
    const std::uint64_t n = header.num_nodes[m];
    auto open = [&](SectionKind kind, std::uint64_t bytes) { sections[m].emplace_back(target, kind, m + 1, end, bytes); };
    if (m == 0) open(SectionKind::tokens, presence_bytes(w.vocab_size));
    open(m == 0 ? SectionKind::values : SectionKind::records,
         packed_bytes(n, header.value_bits[m] + (m == 0 ? 0 : header.token_bits)));
    if (m + 1 < w.order) {
      const std::uint64_t limit = header.num_nodes[m + 1];
      open(SectionKind::offsets_low, packed_bytes(n + 1, offset_low_bits(n, limit)));
      open(SectionKind::offsets_high, offset_high_words(n, limit) * 8);
      open(SectionKind::offsets_select, offset_select_bytes(n));
    }
    open(SectionKind::table, meta.exact ? tables[m].table().size() * 8 : kCodes * sizeof(float));
  }
  header.file_bytes = end;

  File aside;
  if (w.path.empty()) {
    target.image.resize(end);
  } else {
    aside.remove = w.path + ".part" + std::to_string(::getpid());
    target.path = aside.remove;
    aside.fd = target.fd = ::open(aside.remove.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (target.fd < 0 || ::ftruncate(target.fd, static_cast<off_t>(end)) != 0) fail(aside.remove);
  }

  std::vector<IndexSection> directory;
  for (int m = 0; m < w.order; ++m) {
    std::vector<Section>& part = sections[m];
    Section& records = part[m == 0 ? 1 : 0];
    Section* const low = m + 1 < w.order ? &records + 1 : nullptr;
    Section* const high = low == nullptr ? nullptr : low + 1;
    Section* const select = low == nullptr ? nullptr : low + 2;
    const std::uint64_t low_bits = low == nullptr ? 0 : offset_low_bits(header.num_nodes[m], header.num_nodes[m + 1]);
    std::uint64_t number = 0, offset = 0, unary = 0;
    auto add_offset = [&] {
      const std::uint64_t upper = offset >> low_bits;
      low->add(offset & ((std::uint64_t{1} << low_bits) - 1), low_bits);
      high->zeros(upper - unary);
      high->add(1, 1);
      unary = upper;
      if (number % kSelectStep == 0) select->add(upper, 32);
    };
    std::vector<std::uint64_t> presence(m == 0 ? presence_words(w.vocab_size) : 0);
    w.each(m, meta.num_tokens, [&](const Impl::Node& node, std::uint64_t parent) {
      const std::uint32_t value = meta.exact ? tables[m].code(node.count) : books[m].code(logs(parent) - logs(node.count));
      if (m == 0) presence[node.token / 64] |= std::uint64_t{1} << (node.token % 64);
      else records.add(node.token, header.token_bits);
      records.add(value, header.value_bits[m]);
      if (low != nullptr) add_offset();
      offset += node.children;
      ++number;
    });
    if (low != nullptr) add_offset();
    if (m == 0) {
      for (std::uint64_t word : presence) {
        part[0].add(word & UINT32_MAX, 32);
        part[0].add(word >> 32, 32);
      }
      std::uint64_t rank = 0;
      for (std::uint64_t word : presence) {
        part[0].add(rank, 32);
        rank += static_cast<std::uint64_t>(std::popcount(word));
      }
    }
    if (meta.exact) {
      for (std::uint64_t count : tables[m].table()) {
        part.back().add(count & UINT32_MAX, 32);
        part.back().add(count >> 32, 32);
      }
    } else {
      for (float value : books[m].book()) part.back().add(std::bit_cast<std::uint32_t>(value), 32);
      header.log_prob_error = std::max(header.log_prob_error, static_cast<float>(books[m].error()));
    }
    for (Section& section : part) directory.push_back(section.finish());
  }

  // --- the header
  std::vector<std::byte> head(header.header_bytes);
  std::memcpy(head.data() + sizeof header, directory.data(), directory_bytes);
  std::memcpy(head.data() + sizeof header + directory_bytes, text.data(), text.size());
  std::memcpy(head.data(), &header, sizeof header);
  header.checksum = xxh64(head);
  std::memcpy(head.data(), &header, sizeof header);
  target.write(head.data(), head.size(), 0);
  if (w.path.empty()) {
    NgramIndex index = NgramIndex::from_image(std::move(target.image));
    index.verify();
    return index;
  }
  NgramIndex index = NgramIndex::open(aside.remove);
  index.verify(true);
  if (::fsync(aside.fd) != 0 || ::rename(aside.remove.c_str(), w.path.c_str()) != 0) fail(w.path);
  aside.remove.clear();
  return index;
}

// --- walking -----------------------------------------------------------------------------------------------------------

IndexWalker::IndexWalker(const NgramIndex& index) : index_(&index) {
  open_[1].end = index.num_nodes(1);
  word_ = index.presence()[0];
}

bool IndexWalker::emit(int level) {
  Open& own = open_[level];
  level_ = level;
  count_ = own.count;
  own.walked += own.count;
  ++own.at;
  return true;
}

bool IndexWalker::next() {
  const IndexInfo& info = index_->info();
  for (;;) {
    Open& own = open_[depth_];
    if (own.at == own.end) {
      if (depth_ == 1) return false;
      --depth_;
      if (!info.exact) open_[depth_].count = std::max(open_[depth_].count, own.walked);
      return emit(depth_);
    }
    if (depth_ == 1) {
      const std::uint64_t words = presence_words(info.vocab_size);
      while (word_ == 0) {
        if (++word_at_ == words) throw Error("index is damaged: level 1 marks fewer tokens than num_nodes");
        word_ = index_->presence()[word_at_];
      }
      gram_[0] = word_at_ * 64 + static_cast<std::uint32_t>(std::countr_zero(word_));
      word_ &= word_ - 1;
    } else {
      gram_[depth_ - 1] = index_->token_at(depth_, own.at);
    }
    const std::uint32_t value = index_->value_at(depth_, own.at);
    if (info.exact) {
      own.count = index_->count_of(depth_, value);
    } else {
      const double parent = double(depth_ == 1 ? info.num_tokens : open_[depth_ - 1].count);
      own.count = std::max<std::uint64_t>(1, static_cast<std::uint64_t>(std::min(parent * index_->code_probability(depth_, value) + 0.5, 0x1p62)));
    }
    const NgramIndex::Range range = index_->children(depth_, own.at);
    if (range.size() == 0) return emit(depth_);
    open_[++depth_] = {range.begin, range.end, 0, 0};
  }
}

bool post_order_less(std::span<const std::uint32_t> a, std::span<const std::uint32_t> b) {
  const std::size_t common = std::min(a.size(), b.size());
  for (std::size_t i = 0; i < common; ++i)
    if (a[i] != b[i]) return a[i] < b[i];
  return a.size() > b.size();
}

}  // namespace dartspec
