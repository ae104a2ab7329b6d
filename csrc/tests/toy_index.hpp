// Small indexes for tests: documents counted by a map and streamed to the writer in its order.
#pragma once

#include <map>
#include <set>
#include <vector>

#include "ngram_writer.hpp"

namespace dartspec {

using Ids = std::vector<std::int32_t>;

struct PostOrder {
  bool operator()(const std::vector<std::uint32_t>& a, const std::vector<std::uint32_t>& b) const { return post_order_less(a, b); }
};
using GramCounts = std::map<std::vector<std::uint32_t>, std::uint64_t, PostOrder>;

inline GramCounts count_grams(const std::vector<Ids>& documents, int order) {
  GramCounts counts;
  for (const Ids& d : documents)
    for (std::size_t from = 0; from < d.size(); ++from)
      for (std::size_t to = from + 1; to <= std::min(d.size(), from + static_cast<std::size_t>(order)); ++to)
        ++counts[{d.begin() + static_cast<std::ptrdiff_t>(from), d.begin() + static_cast<std::ptrdiff_t>(to)}];
  return counts;
}

inline NgramIndex toy_index(const std::vector<Ids>& documents, int order, std::uint32_t vocab, bool exact,
                            const std::string& path = "") {
  IndexWriter writer(path, order, vocab);
  IndexMeta meta{.exact = exact, .fingerprint = "f00d", .name = "toy", .description = "a toy"};
  for (const auto& [gram, count] : count_grams(documents, order)) {
    writer.add(static_cast<int>(gram.size()), gram.back(), count);
    if (gram.size() == 1) meta.num_tokens += count;
  }
  return writer.finish(meta);
}

}  // namespace dartspec
