#include "ngram_index.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <optional>
#include <unordered_map>

#include "exact_math.hpp"
#include "hash.hpp"
#include "mapped.hpp"

namespace dartspec {

static_assert(std::endian::native == std::endian::little, "the index file is little-endian and mapped as it is");

namespace {

std::string str(std::uint64_t v) { return std::to_string(v); }

std::string errno_text() { return std::strerror(errno); }

const char* kRebuild = "rebuild it with `dartspec ngram build`";

std::uint64_t header_checksum(std::span<const std::byte> header) {
  std::vector<std::byte> copy(header.begin(), header.end());
  std::memset(copy.data() + offsetof(IndexHeader, checksum), 0, sizeof(std::uint64_t));
  return xxh64(copy);
}

std::atomic<std::uint64_t> next_serial{1};

}  // namespace

struct NgramIndex::Mapping {
  void* at = MAP_FAILED;
  std::size_t bytes = 0;
  std::optional<Watched> watched;  // where the pages are the file's own
  ~Mapping() {
    watched.reset();
    if (at != MAP_FAILED) ::munmap(at, bytes);
  }
};

namespace {

// Spreads what this thread brings into memory over all NUMA nodes, until it goes out of scope. Where the system has
// one node or no such call, nothing happens.
class Interleaved {
 public:
  explicit Interleaved(bool wanted) {
#if defined(__linux__) && defined(SYS_set_mempolicy)
    constexpr int kInterleave = 3;
    if (wanted) {
      // the nodes that this process may use; the kernel leaves out those that do not exist
      unsigned long nodes[16] = {};
      int mode = 0;
      constexpr unsigned long kBits = sizeof nodes * 8, kMemsAllowed = 4;
      if (::syscall(SYS_get_mempolicy, &mode, nodes, kBits, nullptr, kMemsAllowed) == 0)
        active_ = ::syscall(SYS_set_mempolicy, kInterleave, nodes, kBits) == 0;
    }
#else
    static_cast<void>(wanted);
#endif
  }
  ~Interleaved() {
#if defined(__linux__) && defined(SYS_set_mempolicy)
    if (active_) ::syscall(SYS_set_mempolicy, 0, nullptr, 0);
#endif
  }
  Interleaved(const Interleaved&) = delete;

 private:
  bool active_ = false;
};

void* map_file(int fd, std::size_t bytes, const OpenOptions& options) {
  int flags = MAP_SHARED;
#ifdef MAP_POPULATE
  if (options.preload && !options.huge_pages) flags |= MAP_POPULATE;
#endif
  void* const file = ::mmap(nullptr, bytes, PROT_READ, flags, fd, 0);
  if (file == MAP_FAILED) return file;
  if (!options.huge_pages) return file;
  void* const copy = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (copy != MAP_FAILED) {
#ifdef MADV_HUGEPAGE
    ::madvise(copy, bytes, MADV_HUGEPAGE);
#endif
    ::madvise(file, bytes, MADV_SEQUENTIAL);
    std::memcpy(copy, file, bytes);
    ::mprotect(copy, bytes, PROT_READ);
  }
  ::munmap(file, bytes);
  return copy;
}

}  // namespace

NgramIndex NgramIndex::open(const std::string& path, const OpenOptions& options) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) throw Error("cannot open the index " + path + ": " + errno_text());
  struct stat st {};
  auto mapping = std::make_shared<Mapping>();
  std::string failure;
  if (::fstat(fd, &st) != 0) {
    failure = errno_text();
  } else if (!S_ISREG(st.st_mode)) {
    failure = "it is not a regular file";
  } else if (static_cast<std::uint64_t>(st.st_size) < sizeof(IndexHeader)) {
    failure = "it has " + str(static_cast<std::uint64_t>(st.st_size)) + " bytes, an index has at least " +
              str(sizeof(IndexHeader)) + ": it is no index, or was cut off";
  } else {
    const Interleaved spread(options.interleave);
    mapping->bytes = static_cast<std::size_t>(st.st_size);
    mapping->at = map_file(fd, mapping->bytes, options);
    if (mapping->at == MAP_FAILED) {
      failure = errno_text();
    } else if (!options.huge_pages) {
      mapping->watched.emplace(mapping->at, mapping->bytes);
    }
  }
  ::close(fd);
  if (!failure.empty()) throw Error("cannot open the index " + path + ": " + failure);

  NgramIndex index;
  index.image_ = {static_cast<const std::byte*>(mapping->at), mapping->bytes};
  index.owner_ = std::move(mapping);
  index.mapped_ = !options.huge_pages;
  index.parse(path);
  return index;
}

NgramIndex NgramIndex::from_image(std::vector<std::byte> image) {
  auto owned = std::make_shared<const std::vector<std::byte>>(std::move(image));
  NgramIndex index;
  index.image_ = {owned->data(), owned->size()};
  index.owner_ = owned;
  index.parse("(in memory)");
  return index;
}

void NgramIndex::parse(const std::string& where) {
  auto refuse = [&](const std::string& what) { throw Error("index " + where + ": " + what); };
  const std::uint64_t size = image_.size();
  if (size < sizeof(IndexHeader))
    refuse("it has " + str(size) + " bytes, an index has at least " + str(sizeof(IndexHeader)));
  IndexHeader h;
  std::memcpy(&h, image_.data(), sizeof h);
  if (std::memcmp(h.magic, kIndexMagic, sizeof kIndexMagic) != 0) {
    std::string found;
    for (char c : h.magic) found += (c >= 32 && c < 127) ? c : '.';
    refuse("magic is \"" + found + "\", expected \"DARTNGRM\": this is not an index of dartspec");
  }
  if (h.byte_order != kByteOrder) {
    char text[80];
    std::snprintf(text, sizeof text, "byte_order is 0x%08x, expected 0x%08x: ", h.byte_order, kByteOrder);
    refuse(std::string(text) + "written big-endian or damaged, " + kRebuild);
  }
  if (h.version != kIndexVersion)
    refuse("version is " + str(h.version) + ", this program reads " + str(kIndexVersion) + ": " + kRebuild);
  if (h.header_bytes < sizeof(IndexHeader) || h.header_bytes % kAlign != 0 || h.header_bytes > size)
    refuse("header_bytes is " + str(h.header_bytes) + ", expected a multiple of " + str(kAlign) + " from " +
           str(sizeof(IndexHeader)) + " to the file's " + str(size) + ": cut off or damaged");
  const std::uint64_t sum = header_checksum(image_.first(h.header_bytes));
  if (sum != h.checksum) {
    char text[96];
    std::snprintf(text, sizeof text, "header checksum is %016llx, computed %016llx: ",
                  static_cast<unsigned long long>(h.checksum), static_cast<unsigned long long>(sum));
    refuse(std::string(text) + "damaged, " + kRebuild);
  }
  if (h.file_bytes != size)
    refuse("file_bytes is " + str(h.file_bytes) + ", the file has " + str(size) + ": cut off or appended to");
  // From here on the header is what some writer meant; still, nothing below trusts it for a read.
  if (h.order < kMinOrder || h.order > kMaxOrder)
    refuse("order is " + str(h.order) + ", expected " + str(kMinOrder) + " to " + str(kMaxOrder));
  if (h.vocab_size < 1 || h.vocab_size > kMaxVocab)
    refuse("vocab_size is " + str(h.vocab_size) + ", expected 1 to " + str(kMaxVocab));
  if (h.token_bits != token_bits_of(h.vocab_size))
    refuse("token_bits is " + str(h.token_bits) + ", expected " + str(token_bits_of(h.vocab_size)) +
           " for a vocabulary of " + str(h.vocab_size));
  if (h.counts_form > 1) refuse("counts_form is " + str(h.counts_form) + ", expected 0 (quantised) or 1 (exact)");
  for (std::uint32_t m = 0; m < kMaxOrder; ++m) {
    const std::string level = " of level " + str(m + 1) + " is ";
    if (m >= h.order && (h.num_nodes[m] != 0 || h.value_bits[m] != 0))
      refuse("num_nodes" + level + str(h.num_nodes[m]) + ", expected 0 at order " + str(h.order));
    const std::uint64_t most = m == 0 ? h.vocab_size : kNoNode - 1;
    if (h.num_nodes[m] > most) refuse("num_nodes" + level + str(h.num_nodes[m]) + ", the limit is " + str(most));
    if (m < h.order && (h.counts_form == 0 ? h.value_bits[m] != kCodeBits : h.value_bits[m] > 32))
      refuse("value_bits" + level + str(h.value_bits[m]) + ", expected " + (h.counts_form == 0 ? "8" : "at most 32"));
  }
  const std::uint64_t expected_sections = 5ull * h.order - 2;
  if (h.num_sections != expected_sections)
    refuse("num_sections is " + str(h.num_sections) + ", expected " + str(expected_sections));
  const std::uint64_t directory_end = sizeof(IndexHeader) + h.num_sections * sizeof(IndexSection);
  const std::uint64_t text_end =
      directory_end + std::uint64_t(h.text_bytes[0]) + h.text_bytes[1] + h.text_bytes[2];
  if (text_end > h.header_bytes)
    refuse("header needs " + str(text_end) + " bytes, header_bytes is " + str(h.header_bytes));

  sections_.resize(h.num_sections);
  std::memcpy(sections_.data(), image_.data() + sizeof(IndexHeader), h.num_sections * sizeof(IndexSection));
  std::size_t next = 0;
  std::uint64_t free_from = h.header_bytes;
  auto take = [&](SectionKind kind, std::uint32_t level, std::uint64_t bytes) -> const std::uint8_t* {
    const IndexSection& s = sections_[next];
    const std::string name = "section " + str(next++) + " (kind " + str(std::uint32_t(kind)) + ", level " + str(level) + ")";
    if (s.kind != std::uint32_t(kind) || s.level != level)
      refuse(name + " is of kind " + str(s.kind) + ", level " + str(s.level));
    if (s.bytes != bytes) refuse(name + " has " + str(s.bytes) + " bytes, expected " + str(bytes));
    if (s.offset % kAlign != 0 || s.offset < free_from || s.offset > size || s.bytes > size - s.offset)
      refuse(name + " lies at " + str(s.offset) + " + " + str(s.bytes) + ", expected from " + str(free_from) +
             " on and within " + str(size) + " bytes");
    free_from = s.offset + s.bytes;
    return reinterpret_cast<const std::uint8_t*>(image_.data() + s.offset);
  };
  for (std::uint32_t m = 0; m < h.order; ++m) {
    Level& level = levels_[m];
    const std::uint64_t n = h.num_nodes[m];
    level.n = static_cast<std::uint32_t>(n);
    level.value_shift = m == 0 ? 0 : h.token_bits;
    level.value_mask = (std::uint64_t{1} << h.value_bits[m]) - 1;
    level.record_bits = level.value_shift + h.value_bits[m];
    if (m == 0) {
      const std::uint8_t* at = take(SectionKind::tokens, 1, presence_bytes(h.vocab_size));
      presence_ = reinterpret_cast<const std::uint64_t*>(at);
      ranks_ = reinterpret_cast<const std::uint32_t*>(at + presence_words(h.vocab_size) * 8);
    }
    level.records = take(m == 0 ? SectionKind::values : SectionKind::records, m + 1, packed_bytes(n, level.record_bits));
    if (m + 1 < h.order) {
      const std::uint64_t limit = h.num_nodes[m + 1];
      level.low_bits = offset_low_bits(n, limit);
      level.low_mask = (std::uint64_t{1} << level.low_bits) - 1;
      level.high_words = offset_high_words(n, limit);
      level.low = take(SectionKind::offsets_low, m + 1, packed_bytes(n + 1, level.low_bits));
      level.high = reinterpret_cast<const std::uint64_t*>(take(SectionKind::offsets_high, m + 1, level.high_words * 8));
      level.select = reinterpret_cast<const std::uint32_t*>(take(SectionKind::offsets_select, m + 1, offset_select_bytes(n)));
    }
    if (h.counts_form == 0) {
      level.book = reinterpret_cast<const float*>(take(SectionKind::table, m + 1, kCodes * sizeof(float)));
    } else {
      const std::uint64_t bytes = sections_[next].bytes, entries = bytes / 8;
      if (entries < 1 || entries > std::max<std::uint64_t>(n, 1) || bytes % 8 != 0 ||
          h.value_bits[m] != static_cast<std::uint32_t>(std::bit_width(entries - 1)))
        refuse("table of level " + str(m + 1) + " has " + str(bytes) + " bytes, expected 8 for each of 1 to " + str(n) +
               " counts that " + str(h.value_bits[m]) + " bits tell apart");
      level.counts = reinterpret_cast<const std::uint64_t*>(take(SectionKind::table, m + 1, bytes));
      level.table_size = static_cast<std::uint32_t>(entries);
    }
  }

  info_.order = static_cast<int>(h.order);
  info_.vocab_size = static_cast<std::uint32_t>(h.vocab_size);
  info_.exact = h.counts_form == 1;
  info_.num_tokens = h.num_tokens;
  info_.min_count = h.min_count;
  info_.log_prob_error = h.log_prob_error;
  for (int m = 0; m < kMaxOrder; ++m) {
    info_.num_nodes[m] = h.num_nodes[m];
    info_.value_bits[m] = h.value_bits[m];
  }
  const char* text = reinterpret_cast<const char*>(image_.data() + directory_end);
  std::string* const texts[3] = {&info_.fingerprint, &info_.name, &info_.description};
  for (int i = 0; i < 3; ++i) {
    texts[i]->assign(text, h.text_bytes[i]);
    text += h.text_bytes[i];
  }
  token_mask_ = (std::uint64_t{1} << h.token_bits) - 1;
  serial_ = next_serial.fetch_add(1);
}

void NgramIndex::verify(bool release) const {
  constexpr std::size_t kPiece = std::size_t{1} << 24;
  auto give_back = [&] {
    if (release && mapped_) ::madvise(const_cast<std::byte*>(image_.data()), image_.size(), MADV_DONTNEED);
  };
  auto refuse = [&](const std::string& what) { throw Error("index is damaged: " + what); };
  std::uint64_t at = 0;
  auto padding_is_zero = [&](std::uint64_t from, std::uint64_t to) {
    for (; from < to; ++from)
      if (image_[from] != std::byte{0}) refuse("padding byte at " + str(from) + " is not zero");
  };
  IndexHeader h;
  std::memcpy(&h, image_.data(), sizeof h);
  at = h.header_bytes;
  for (std::size_t i = 0; i < sections_.size(); ++i) {
    const IndexSection& s = sections_[i];
    padding_is_zero(at, s.offset);
    at = s.offset + s.bytes;
    Xxh64 hash;
    auto left = image_.subspan(s.offset, s.bytes);
    for (; left.size() > kPiece; left = left.subspan(kPiece)) {
      hash.stripes(left.first(kPiece));
      give_back();
    }
    const std::uint64_t sum = hash.finish(left);
    if (sum != s.checksum) {
      char text[128];
      std::snprintf(text, sizeof text, "section %zu (kind %u, level %u) has checksum %016llx, computed %016llx", i, s.kind,
                    s.level, static_cast<unsigned long long>(s.checksum), static_cast<unsigned long long>(sum));
      refuse(std::string(text) + ": " + kRebuild);
    }
  }
  padding_is_zero(at, image_.size());

  // Checksums prove what was written; the rest proves that the writer kept the format's rules.
  std::uint64_t seen = 0;
  const std::uint64_t words = presence_words(info_.vocab_size);
  for (std::uint64_t w = 0; w < words; ++w) {
    if (ranks_[w] != seen) refuse("rank " + str(w) + " of level 1 is " + str(ranks_[w]) + ", expected " + str(seen));
    seen += static_cast<std::uint64_t>(std::popcount(presence_[w]));
  }
  if (seen != levels_[0].n) refuse("level 1 marks " + str(seen) + " tokens, num_nodes is " + str(levels_[0].n));
  if (info_.vocab_size % 64 != 0 && presence_[words - 1] >> (info_.vocab_size % 64) != 0)
    refuse("level 1 marks a token beyond the vocabulary of " + str(info_.vocab_size));
  for (int level = 1; level <= info_.order; ++level) {
    const Level& own = levels_[level - 1];
    const std::string at_level = " of level " + str(level) + " ";
    if (info_.exact) {
      for (std::uint32_t i = 0; i < own.table_size; ++i)
        if (own.counts[i] == 0 ? own.n != 0 : i > 0 && own.counts[i] <= own.counts[i - 1])
          refuse("count " + str(i) + at_level + "is " + str(own.counts[i]) + ", expected ascending from 1");
      for (std::uint32_t i = 0; i < own.n; ++i)
        if (value_at(level, i) >= own.table_size)
          refuse("node " + str(i) + at_level + "has count number " + str(value_at(level, i)) + " of " + str(own.table_size));
    } else {
      for (int i = 0; i < kCodes; ++i)
        if (!(own.book[i] <= 0.0f) || !std::isfinite(own.book[i]))
          refuse("code " + str(i) + at_level + "is " + std::to_string(own.book[i]) + ", expected a log-probability");
    }
    if (level == info_.order) break;
    const std::uint32_t limit = levels_[level].n;
    std::uint32_t end = 0;
    for (std::uint32_t i = 0; i < own.n; ++i) {
      const Range range = children(level, i);
      if (range.begin != end || range.end < range.begin)
        refuse("children of node " + str(i) + at_level + "begin at " + str(range.begin) + ", expected " + str(end));
      end = range.end;
      if (i % (kPiece / 16) == 0) give_back();
      std::uint64_t sum = 0;
      for (std::uint32_t c = range.begin; c < end; ++c) {
        const std::uint32_t token = token_at(level + 1, c);
        if (token >= info_.vocab_size)
          refuse("level " + str(level + 1) + ", node " + str(c) + " has token " + str(token) + ", the vocabulary has " +
                 str(info_.vocab_size));
        if (c > range.begin && token <= token_at(level + 1, c - 1))
          refuse("level " + str(level + 1) + ", node " + str(c) + " has token " + str(token) + " after " +
                 str(token_at(level + 1, c - 1)) + ", expected ascending");
        if (info_.exact) sum += count_of(level + 1, value_at(level + 1, c));
      }
      if (info_.exact && sum > count_of(level, value_at(level, i)))
        refuse("level " + str(level) + ", node " + str(i) + " has count " + str(count_of(level, value_at(level, i))) +
               ", its children have " + str(sum));
    }
    if (end != limit) refuse("children" + at_level + "end at " + str(end) + ", expected " + str(limit));
  }
}

void NgramIndex::save(const std::string& path) const {
  const std::string aside = path + ".part" + std::to_string(::getpid());
  const int fd = ::open(aside.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) throw Error("cannot write the index " + aside + ": " + errno_text());
  std::string failure;
  for (std::size_t done = 0; done < image_.size() && failure.empty();) {
    const ssize_t n = ::write(fd, image_.data() + done, image_.size() - done);
    if (n >= 0) done += static_cast<std::size_t>(n);
    else if (errno != EINTR) failure = errno_text();
  }
  if (failure.empty() && ::fsync(fd) != 0) failure = errno_text();
  if (::close(fd) != 0 && failure.empty()) failure = errno_text();
  if (failure.empty() && ::rename(aside.c_str(), path.c_str()) != 0) failure = errno_text();
  if (!failure.empty()) {
    ::unlink(aside.c_str());
    throw Error("cannot write the index " + path + ": " + failure);
  }
}

std::uint32_t NgramIndex::child(int level, std::uint32_t node, std::int32_t token) const {
  if (node == kNoNode || token < 0) return kNoNode;
  const Range range = children(level, node);
  std::uint32_t lo = range.begin, hi = range.end;
  while (lo < hi) {
    const std::uint32_t mid = lo + (hi - lo) / 2;
    if (token_at(level + 1, mid) < static_cast<std::uint32_t>(token)) lo = mid + 1;
    else hi = mid;
  }
  return lo < range.end && token_at(level + 1, lo) == static_cast<std::uint32_t>(token) ? lo : kNoNode;
}

NgramState NgramIndex::state_of(std::span<const std::int32_t> context) const {
  NgramState state;
  state.nodes.fill(kNoNode);
  const std::size_t keep = std::min<std::size_t>(context.size(), static_cast<std::size_t>(info_.order - 1));
  for (std::int32_t token : context.last(keep)) state = extend(state, token);
  return state;
}

NgramState NgramIndex::extend(const NgramState& state, std::int32_t token) const {
  NgramState next;
  next.nodes.fill(kNoNode);
  next.nodes[0] = unigram(token);
  for (int m = 1; m <= info_.order - 2; ++m) next.nodes[m] = child(m, state.nodes[m - 1], token);
  return next;
}

double NgramIndex::code_probability(int level, std::uint32_t code) const {
  return std::min(1.0, exact_exp(std::min(double(code_log_prob(level, code)), 0.0)));  // a NaN gives 0
}

double NgramIndex::child_probability(int child_level, std::uint32_t child, std::uint32_t parent) const {
  const std::uint32_t value = value_at(child_level, child);
  return info_.exact ? count_ratio(child_level, value, value_at(child_level - 1, parent))
                     : code_probability(child_level, value);
}

double NgramIndex::probability(const NgramState& state, std::int32_t token) const {
  for (int m = info_.order - 1; m >= 1; --m) {
    const std::uint32_t parent = state.nodes[m - 1];
    const std::uint32_t found = child(m, parent, token);
    if (found != kNoNode) return child_probability(m + 1, found, parent);
  }
  return 0.0;
}

std::vector<std::pair<std::int32_t, double>> NgramIndex::continuations(const NgramState& state, std::size_t top) const {
  std::unordered_map<std::uint32_t, double> seen;
  for (int m = info_.order - 1; m >= 1; --m) {
    const std::uint32_t parent = state.nodes[m - 1];
    if (parent == kNoNode) continue;
    const Range range = children(m, parent);
    for (std::uint32_t c = range.begin; c < range.end; ++c)
      seen.try_emplace(token_at(m + 1, c), child_probability(m + 1, c, parent));
  }
  std::vector<std::pair<std::int32_t, double>> ranked(seen.begin(), seen.end());
  std::sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) {
    return a.second != b.second ? a.second > b.second : a.first < b.first;
  });
  if (ranked.size() > top) ranked.resize(top);
  return ranked;
}

}  // namespace dartspec
