#include "ngram_builder.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <vector>

namespace dartspec {

namespace {

std::string str(std::uint64_t v) { return std::to_string(v); }

const GramSorterOptions& checked(const GramSorterOptions& options) {
  if (options.order < kMinOrder || options.order > kMaxOrder)
    throw Error("order is " + std::to_string(options.order) + ", expected " + std::to_string(kMinOrder) + " to " +
                std::to_string(kMaxOrder));
  if (options.vocab_size < 1 || options.vocab_size > kMaxVocab)
    throw Error("vocab_size is " + str(options.vocab_size) + ", expected 1 to " + str(kMaxVocab));
  return options;
}

}  // namespace

NgramBuilder::NgramBuilder(const GramSorterOptions& options)
    : options_(checked(options)), sorter_(GramSorter::make(options)) {}

void NgramBuilder::add_documents(std::span<const std::int32_t> tokens, std::span<const std::int64_t> ends,
                                 std::uint64_t first, std::uint64_t tail, std::uint64_t weight) {
  std::int64_t begin = 0;
  for (std::int64_t end : ends) {
    if (end < begin || static_cast<std::uint64_t>(end) > tokens.size())
      throw Error("a document ends at " + std::to_string(end) + ", expected " + std::to_string(begin) + " to " +
                  str(tokens.size()) + ": ends must ascend within the ids");
    const auto size = static_cast<std::size_t>(end - begin);
    sorter_->add_document(tokens.subspan(static_cast<std::size_t>(begin), size), first, size - std::min(size, static_cast<std::size_t>(tail)), weight);
    begin = end;
    first = 0;
  }
}

void NgramBuilder::add_grams(std::span<const std::int32_t> grams, std::span<const std::int64_t> counts) {
  const auto order = static_cast<std::size_t>(options_.order);
  if (grams.size() != counts.size() * order)
    throw Error("grams hold " + str(grams.size()) + " tokens, expected " + str(counts.size()) + " x " + str(order));
  for (std::size_t n = 0; n < counts.size(); ++n) {
    const auto gram = grams.subspan(n * order, order);
    std::size_t length = 0;
    while (length < gram.size() && gram[length] >= 0) ++length;
    if (length == 0 || std::any_of(gram.begin() + static_cast<std::ptrdiff_t>(length), gram.end(), [](std::int32_t t) { return t != -1; }))
      throw Error("gram " + str(n) + " has a gap or no token: expected tokens first, then -1");
    if (counts[n] < 1) throw Error("gram " + str(n) + " has count " + std::to_string(counts[n]) + ", expected at least 1");
    sorter_->add_gram(gram.first(length), static_cast<std::uint64_t>(counts[n]));
  }
}

void NgramBuilder::add_index(const NgramIndex& index, std::uint64_t weight) {
  const IndexInfo& info = index.info();
  if (info.order != options_.order || info.vocab_size != options_.vocab_size)
    throw Error("an index of order " + std::to_string(info.order) + " and vocabulary " + str(info.vocab_size) +
                " cannot be joined to order " + std::to_string(options_.order) + " and vocabulary " + str(options_.vocab_size));
  std::array<std::uint64_t, kMaxOrder + 2> below{};  // by level: sum of the counts of the closed children
  std::uint64_t counted = 0;
  std::vector<std::int32_t> gram;
  for (IndexWalker at(index); at.next();) {
    const auto level = static_cast<std::size_t>(at.level());
    const std::uint64_t children = std::exchange(below[level + 1], 0);
    gram.assign(at.gram().begin(), at.gram().end());
    if (at.count() > children) sorter_->add_gram(gram, (at.count() - children) * weight);
    below[level] += std::max(at.count(), children);
    if (level == 1) counted += std::max(at.count(), children);
  }
  if (info.num_tokens > counted) extra_tokens_ += (info.num_tokens - counted) * weight;
}

namespace {

// A growing array in a nameless file: the kernel may write its pages out, and resident memory stays small.
class Scratch {
 public:
  struct Node {
    std::int64_t ending;  // passes that end here
    std::uint64_t parent;
    std::int32_t token;
    std::uint32_t depth;
  };
  Scratch(const std::string& folder, std::uint64_t n) : bytes_(std::max<std::uint64_t>(1, n) * sizeof(Node)) {
    std::string name = (std::filesystem::path(folder) / "trieXXXXXX").string();
    const int fd = ::mkostemp(name.data(), O_CLOEXEC);
    if (fd >= 0) {
      ::unlink(name.c_str());
      if (::ftruncate(fd, static_cast<off_t>(bytes_)) == 0) at_ = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      ::close(fd);
    }
    if (at_ == MAP_FAILED) throw Error("cannot make a temporary file in " + folder + ": " + std::strerror(errno));
  }
  ~Scratch() { ::munmap(at_, bytes_); }
  Scratch(const Scratch&) = delete;
  Node& operator[](std::uint64_t i) { return static_cast<Node*>(at_)[i]; }
  void forget() { ::madvise(at_, bytes_, MADV_DONTNEED); }  // the file keeps what was written

 private:
  std::uint64_t bytes_;
  void* at_ = MAP_FAILED;
};

class Input {
 public:
  explicit Input(const std::string& path) : path_(path), file_(std::fopen(path.c_str(), "rb")) {
    if (file_ == nullptr) throw Error("cannot open the trie " + path + ": " + std::strerror(errno));
    std::setvbuf(file_, nullptr, _IOFBF, 1 << 20);
  }
  ~Input() { std::fclose(file_); }
  Input(const Input&) = delete;
  bool take(void* to, std::size_t n) {
    offset_ += n;
    return std::fread(to, 1, n, file_) == n;
  }
  std::uint64_t offset() const { return offset_; }

 private:
  std::string path_;
  std::FILE* file_;
  std::uint64_t offset_ = 0;
};

}  // namespace

std::uint64_t NgramBuilder::add_trie(const std::string& path, const std::string& folder) {
  constexpr std::uint64_t kNodeBytes = 24, kChildBytes = 12, kForget = 1 << 21;
  Input in(path);
  std::error_code error;
  const std::uint64_t bytes = std::filesystem::file_size(path, error);
  std::uint64_t head[2];
  if (error || !in.take(head, sizeof head))
    throw Error("trie " + path + " has " + str(bytes) + " bytes, expected at least 16: it is no trie");
  const auto [order, num_nodes] = std::pair(head[0], head[1]);
  if (order < kMinOrder || order > kMaxOrder)
    throw Error("trie " + path + " has order " + str(order) + ", expected " + str(kMinOrder) + " to " + str(kMaxOrder) +
                ": it is no trie, or too long");
  if (order != static_cast<std::uint64_t>(options_.order))
    throw Error("trie " + path + " has order " + str(order) + ", the index that is built " + str(static_cast<std::uint64_t>(options_.order)));
  if (num_nodes < 1 || num_nodes > (bytes - 16) / kNodeBytes)
    throw Error("trie " + path + " announces " + str(num_nodes) + " nodes in " + str(bytes) + " bytes: cut off or no trie");

  Scratch nodes(folder, num_nodes);
  std::vector<char> children;
  for (std::uint64_t i = 0; i < num_nodes; ++i) {
    char record[kNodeBytes];
    std::uint64_t num_children = 0;
    bool whole = in.take(record, sizeof record);
    if (whole) {
      std::memcpy(&num_children, record + 16, 8);
      whole = num_children <= (bytes - in.offset()) / kChildBytes;
    }
    if (whole) {  // the table repeats what the parents say
      children.resize(num_children * kChildBytes);
      whole = children.empty() || in.take(children.data(), children.size());
    }
    if (!whole) throw Error("trie " + path + " ends in node " + str(i) + " of " + str(num_nodes) + ": it was cut off");
    Scratch::Node& node = nodes[i];
    std::int32_t count = 0;
    std::memcpy(&node.token, record, 4);
    std::memcpy(&node.parent, record + 4, 8);
    std::memcpy(&count, record + 12, 4);
    node.ending = count;
    node.depth = 0;
    if (i == 0) continue;
    const bool inside = node.parent < i && nodes[node.parent].depth < order;
    if (!inside || node.token < 0 || count < 1)
      throw Error("trie " + path + ", node " + str(i) + ": token " + std::to_string(node.token) + ", parent " + str(node.parent) +
                  " and frequency " + std::to_string(count) + " are no trie of order " + str(order));
    node.depth = nodes[node.parent].depth + 1;
    nodes[node.parent].ending -= count;
    trie_bytes_read_ = in.offset();
    if (i % kForget == 0) nodes.forget();
  }
  if (in.offset() != bytes)
    throw Error("trie " + path + " has " + str(bytes) + " bytes, its " + str(num_nodes) + " nodes take " + str(in.offset()) +
                ": cut off or damaged");
  for (std::uint64_t i = 1; i < num_nodes; ++i) {
    const Scratch::Node& node = nodes[i];
    if (node.ending < 0) throw Error("trie " + path + ", node " + str(i) + ": its children are counted more often than itself");
    if (node.ending == 0) continue;
    std::array<std::int32_t, kMaxOrder> gram;
    std::uint64_t up = i;
    for (std::uint32_t d = node.depth; d > 0; --d) {
      gram[d - 1] = nodes[up].token;
      up = nodes[up].parent;
    }
    sorter_->add_gram(std::span(gram).first(node.depth), static_cast<std::uint64_t>(node.ending));
    if (i % kForget == 0) nodes.forget();
  }
  return num_nodes;
}

NgramIndex NgramBuilder::finish(const std::string& path, bool exact, std::uint64_t min_count, const std::string& fingerprint,
                                const std::string& name, const std::string& description) {
  if (min_count < 1 || min_count > UINT32_MAX) throw Error("min_count is " + str(min_count) + ", expected 1 to 2^32 - 1");
  struct Sink final : NodeSink {
    IndexWriter writer;
    std::atomic<std::uint64_t>& written;
    Sink(const std::string& path, const GramSorterOptions& options, std::atomic<std::uint64_t>& written)
        : writer(path, options.order, options.vocab_size), written(written) {}
    void node(int level, std::uint32_t token, std::uint64_t count) override {
      writer.add(level, token, count);
      written.store(written.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    }
  };
  Sink sink(path, options_, nodes_written_);
  IndexMeta meta;
  meta.exact = exact;
  meta.num_tokens = sorter_->merge(min_count, sink) + extra_tokens_;
  meta.min_count = static_cast<std::uint32_t>(min_count);
  meta.fingerprint = fingerprint;
  meta.name = name;
  meta.description = description;
  return sink.writer.finish(meta);
}

NgramIndex prune(const NgramIndex& index, const std::string& path, bool exact, std::uint32_t min_count,
                 const std::string& description) {
  const IndexInfo& info = index.info();
  IndexWriter writer(path, info.order, info.vocab_size);
  for (IndexWalker at(index); at.next();)
    if (at.count() >= min_count) writer.add(at.level(), at.token(), at.count());
  IndexMeta meta;
  meta.exact = exact;
  meta.num_tokens = info.num_tokens;
  meta.min_count = std::max(min_count, info.min_count);
  meta.fingerprint = info.fingerprint;
  meta.name = info.name;
  meta.description = description;
  return writer.finish(meta);
}

}  // namespace dartspec
