#include "ngram_index.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <unordered_map>

#include "hash.hpp"

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
  ~Mapping() {
    if (at != MAP_FAILED) ::munmap(at, bytes);
  }
};

NgramIndex NgramIndex::open(const std::string& path) {
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
    mapping->bytes = static_cast<std::size_t>(st.st_size);
    mapping->at = ::mmap(nullptr, mapping->bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (mapping->at == MAP_FAILED) failure = errno_text();
  }
  ::close(fd);
  if (!failure.empty()) throw Error("cannot open the index " + path + ": " + failure);

  NgramIndex index;
  index.image_ = {static_cast<const std::byte*>(mapping->at), mapping->bytes};
  index.owner_ = std::move(mapping);
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
  const std::uint32_t token_bytes = h.vocab_size <= 65536 ? 2 : 4;
  if (h.token_bytes != token_bytes)
    refuse("token_bytes is " + str(h.token_bytes) + ", expected " + str(token_bytes) + " for a vocabulary of " +
           str(h.vocab_size));
  if (h.counts_form > 1) refuse("counts_form is " + str(h.counts_form) + ", expected 0 (quantised) or 1 (exact)");
  for (std::uint32_t m = 0; m < kMaxOrder; ++m) {
    if (m >= h.order && h.num_nodes[m] != 0)
      refuse("num_nodes of level " + str(m + 1) + " is " + str(h.num_nodes[m]) + ", expected 0 at order " + str(h.order));
    if (h.num_nodes[m] >= kNoNode)
      refuse("num_nodes of level " + str(m + 1) + " is " + str(h.num_nodes[m]) + ", the limit is " + str(kNoNode - 1));
  }
  const std::uint64_t expected_sections = 3ull * h.order - 1 + (h.counts_form == 0 ? 1 : 0);
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
  auto take = [&](SectionKind kind, std::uint32_t level, std::uint64_t bytes) -> const std::byte* {
    const IndexSection& s = sections_[next];
    const std::string name = "section " + str(next++) + " (kind " + str(std::uint32_t(kind)) + ", level " + str(level) + ")";
    if (s.kind != std::uint32_t(kind) || s.level != level)
      refuse(name + " is of kind " + str(s.kind) + ", level " + str(s.level));
    if (s.bytes != bytes) refuse(name + " has " + str(s.bytes) + " bytes, expected " + str(bytes));
    if (s.offset % kAlign != 0 || s.offset < free_from || s.offset > size || s.bytes > size - s.offset)
      refuse(name + " lies at " + str(s.offset) + " + " + str(s.bytes) + ", expected from " + str(free_from) +
             " on and within " + str(size) + " bytes");
    free_from = s.offset + s.bytes;
    return image_.data() + s.offset;
  };
  const std::uint64_t value_bytes = h.counts_form == 1 ? 4 : 1;
  for (std::uint32_t m = 0; m < h.order; ++m) {
    Level& level = levels_[m];
    level.n = static_cast<std::uint32_t>(h.num_nodes[m]);
    level.tokens = take(SectionKind::tokens, m + 1, h.num_nodes[m] * token_bytes);
    level.values = take(SectionKind::values, m + 1, h.num_nodes[m] * value_bytes);
    if (m + 1 < h.order)
      level.offsets = reinterpret_cast<const std::uint32_t*>(
          take(SectionKind::offsets, m + 1, (h.num_nodes[m] + 1) * sizeof(std::uint32_t)));
  }
  if (h.counts_form == 0)
    codebook_ = reinterpret_cast<const float*>(
        take(SectionKind::codebook, 0, std::uint64_t(h.order) * kCodes * sizeof(float)));

  info_.order = static_cast<int>(h.order);
  info_.vocab_size = static_cast<std::uint32_t>(h.vocab_size);
  info_.exact = h.counts_form == 1;
  info_.num_tokens = h.num_tokens;
  info_.min_count = h.min_count;
  info_.log_prob_error = h.log_prob_error;
  for (int m = 0; m < kMaxOrder; ++m) info_.num_nodes[m] = h.num_nodes[m];
  const char* text = reinterpret_cast<const char*>(image_.data() + directory_end);
  std::string* const texts[3] = {&info_.fingerprint, &info_.name, &info_.description};
  for (int i = 0; i < 3; ++i) {
    texts[i]->assign(text, h.text_bytes[i]);
    text += h.text_bytes[i];
  }
  info_token_bytes_ = static_cast<int>(token_bytes);
  serial_ = next_serial.fetch_add(1);
}

void NgramIndex::verify() const {
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
    const std::uint64_t sum = xxh64(image_.subspan(s.offset, s.bytes));
    if (sum != s.checksum) {
      char text[128];
      std::snprintf(text, sizeof text, "section %zu (kind %u, level %u) has checksum %016llx, computed %016llx", i, s.kind,
                    s.level, static_cast<unsigned long long>(s.checksum), static_cast<unsigned long long>(sum));
      refuse(std::string(text) + ": " + kRebuild);
    }
  }
  padding_is_zero(at, image_.size());

  // Checksums prove what was written; the rest proves that the writer kept the format's rules.
  auto sorted = [&](int level, std::uint32_t begin, std::uint32_t end) {
    for (std::uint32_t i = begin; i < end; ++i) {
      const std::uint32_t token = token_at(level, i);
      if (token >= info_.vocab_size)
        refuse("level " + str(level) + ", node " + str(i) + " has token " + str(token) + ", the vocabulary has " +
               str(info_.vocab_size));
      if (i > begin && token <= token_at(level, i - 1))
        refuse("level " + str(level) + ", node " + str(i) + " has token " + str(token) + " after " +
               str(token_at(level, i - 1)) + ", expected ascending");
    }
  };
  sorted(1, 0, levels_[0].n);
  for (int level = 1; level < info_.order; ++level) {
    const Level& own = levels_[level - 1];
    const Level& below = levels_[level];
    if (own.offsets[0] != 0 || own.offsets[own.n] != below.n)
      refuse("child offsets of level " + str(level) + " run from " + str(own.offsets[0]) + " to " +
             str(own.offsets[own.n]) + ", expected 0 to " + str(below.n));
    for (std::uint32_t i = 0; i < own.n; ++i) {
      const std::uint32_t begin = own.offsets[i], end = own.offsets[i + 1];
      if (begin > end || end > below.n)
        refuse("child offsets of level " + str(level) + ", node " + str(i) + " are " + str(begin) + " to " + str(end));
      sorted(level + 1, begin, end);
      if (info_.exact) {
        const auto* counts = static_cast<const std::uint32_t*>(own.values);
        const auto* child_counts = static_cast<const std::uint32_t*>(below.values);
        std::uint64_t sum = 0;
        for (std::uint32_t c = begin; c < end; ++c) sum += child_counts[c];
        if (sum > counts[i])
          refuse("level " + str(level) + ", node " + str(i) + " has count " + str(counts[i]) +
                 ", its children have " + str(sum));
      }
    }
  }
  if (!info_.exact)
    for (int i = 0; i < info_.order * kCodes; ++i)
      if (!(codebook_[i] <= 0.0f) || !std::isfinite(codebook_[i]))
        refuse("codebook entry " + str(i) + " is " + std::to_string(codebook_[i]) + ", expected a log-probability");
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

std::uint32_t NgramIndex::token_at(int level, std::uint32_t node) const {
  const void* tokens = levels_[level - 1].tokens;
  return info_token_bytes_ == 2 ? static_cast<const std::uint16_t*>(tokens)[node]
                                : static_cast<const std::uint32_t*>(tokens)[node];
}

std::uint32_t NgramIndex::find(int level, std::uint32_t begin, std::uint32_t end, std::uint32_t token) const {
  std::uint32_t lo = begin, hi = end;
  while (lo < hi) {
    const std::uint32_t mid = lo + (hi - lo) / 2;
    if (token_at(level, mid) < token) lo = mid + 1;
    else hi = mid;
  }
  return lo < end && token_at(level, lo) == token ? lo : kNoNode;
}

std::uint32_t NgramIndex::child(int level, std::uint32_t node, std::int32_t token) const {
  if (node == kNoNode || token < 0) return kNoNode;
  const auto [begin, end] = children(level, node);
  return find(level + 1, begin, end, static_cast<std::uint32_t>(token));
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
  if (token < 0) return next;
  next.nodes[0] = find(1, 0, levels_[0].n, static_cast<std::uint32_t>(token));
  for (int m = 1; m <= info_.order - 2; ++m) next.nodes[m] = child(m, state.nodes[m - 1], token);
  return next;
}

double NgramIndex::code_probability(int level, int code) const {
  return std::min(1.0, std::exp(double(codebook_[(level - 1) * kCodes + code])));
}

double NgramIndex::node_probability(int level, std::uint32_t child, std::uint32_t parent) const {
  return info_.exact ? count_ratio(level, child, parent) : code_probability(level, code(level, child));
}

double NgramIndex::probability(const NgramState& state, std::int32_t token) const {
  for (int m = info_.order - 1; m >= 1; --m) {
    const std::uint32_t parent = state.nodes[m - 1];
    const std::uint32_t found = child(m, parent, token);
    if (found != kNoNode) return node_probability(m + 1, found, parent);
  }
  return 0.0;
}

std::vector<std::pair<std::int32_t, double>> NgramIndex::continuations(const NgramState& state, std::size_t top) const {
  std::unordered_map<std::uint32_t, double> seen;
  for (int m = info_.order - 1; m >= 1; --m) {
    const std::uint32_t parent = state.nodes[m - 1];
    if (parent == kNoNode) continue;
    const auto [begin, end] = children(m, parent);
    for (std::uint32_t c = begin; c < end; ++c) seen.try_emplace(token_at(m + 1, c), node_probability(m + 1, c, parent));
  }
  std::vector<std::pair<std::int32_t, double>> ranked(seen.begin(), seen.end());
  std::sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) {
    return a.second != b.second ? a.second > b.second : a.first < b.first;
  });
  if (ranked.size() > top) ranked.resize(top);
  return ranked;
}

}  // namespace dartspec
