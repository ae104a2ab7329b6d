// Counting in bounded memory: equal to a plain twin whatever the memory, the threads, the weights or the interruptions.
#include "ngram_sort.hpp"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>

#include "check.hpp"

using namespace dartspec;
namespace fs = std::filesystem;
using Ids = std::vector<std::int32_t>;
using Counts = std::map<Ids, std::uint64_t>;

namespace {

const std::string kFolder = (fs::temp_directory_path() / ("builder_test" + std::to_string(::getpid()))).string();

// Rebuilds grams from nodes, and checks that they come in post-order.
struct Collect final : NodeSink {
  Counts counts;
  std::vector<std::pair<Ids, std::uint64_t>> open[8];  // by level: closed nodes that wait for their parent
  void node(int level, std::uint32_t token, std::uint64_t count) override {
    const auto t = static_cast<std::int32_t>(token);
    auto& own = open[level];
    own.push_back({{t}, count});
    for (auto& [gram, below] : open[level + 1]) {
      gram.insert(gram.begin(), t);
      own.push_back({gram, below});
    }
    open[level + 1].clear();
    if (level == 1) {
      for (auto& [gram, n] : own) CHECK(counts.emplace(gram, n).second);
      own.clear();
    }
    for (int deeper = level + 2; deeper < 8; ++deeper) CHECK(open[deeper].empty());
  }
};

Counts twin(const std::vector<Ids>& documents, const std::vector<std::uint64_t>& weights, int order, std::int32_t excluded,
            std::uint64_t min_count) {
  Counts counts;
  for (std::size_t d = 0; d < documents.size(); ++d)
    for (std::size_t i = 0; i < documents[d].size(); ++i) {
      Ids gram;
      for (std::size_t p = i; p < documents[d].size() && p < i + static_cast<std::size_t>(order); ++p) {
        if (documents[d][p] == excluded) break;
        gram.push_back(documents[d][p]);
        counts[gram] += weights[d];
      }
    }
  std::erase_if(counts, [&](const auto& entry) { return entry.second < min_count; });
  return counts;
}

GramSorterOptions options_of(int order, std::uint32_t vocab, std::int32_t excluded, int threads, bool in_folder) {
  GramSorterOptions options;
  options.order = order;
  options.vocab_size = vocab;
  options.exclude = {excluded};
  options.memory_bytes = 1;  // as little as there is: buffers of 1024 grams
  options.threads = threads;
  if (in_folder) options.folder = kFolder;
  options.identity = "a test";
  return options;
}

}  // namespace

int main() {
  fs::remove_all(kFolder);
  std::mt19937 random(1);
  for (int order = 2; order <= 5; ++order)
    for (std::uint32_t vocab : {40u, 65536u, 300000u, (1u << 24) - 1}) {
      // ids from both ends of the vocabulary, documents of 0 to 3000 tokens
      std::vector<Ids> documents(8);
      std::vector<std::uint64_t> weights;
      for (Ids& d : documents) {
        d.resize(random() % 10 == 0 ? 0 : random() % 2000);
        for (auto& t : d) t = static_cast<std::int32_t>(random() % 2 ? random() % 12 : vocab - 1 - random() % 12);
        weights.push_back(random() % 3 == 0 ? 1000000007ull : 1 + random() % 3);
      }
      const std::int32_t excluded = 5;
      for (std::uint64_t min_count : {1 + 2 * (vocab % 2)}) {
        const Counts expected = twin(documents, weights, order, excluded, min_count);
        for (int threads : {1, 3})
          for (bool in_folder : {false, true}) {
            auto sorter = GramSorter::make(options_of(order, vocab, excluded, threads, in_folder));
            for (std::size_t d = 0; d < documents.size(); ++d) sorter->add_document(documents[d], 0, weights[d]);
            CHECK(sorter->progress().documents == documents.size());
            Collect found;
            sorter->merge(min_count, found);
            CHECK(found.counts == expected);
            CHECK(sorter->entries_merged() > 0);
            sorter->remove_files();
            CHECK(!in_folder || fs::is_empty(kFolder));
          }
      }
    }

  std::vector<Ids> documents(40);
  for (Ids& d : documents)
    for (int i = 0; i < 997; ++i) d.push_back(static_cast<std::int32_t>(random() % 50));
  std::ptrdiff_t fives = 0;
  for (const Ids& d : documents) fives += std::count(d.begin(), d.end(), 5);
  const std::vector<std::uint64_t> ones(documents.size(), 1);
  const Counts expected = twin(documents, ones, 3, 5, 1);
  for (int threads : {1, 2}) {  // interrupted anywhere and taken up again
    const GramSorterOptions options = options_of(3, 50, 5, threads, true);
    for (std::size_t stop = 3;; stop += 7) {
      auto sorter = GramSorter::make(options);
      const GramProgress at = sorter->progress();
      CHECK(stop == 3 ? at.positions == 0 : at.positions >= 1024);
      for (std::size_t d = at.documents; d < std::min(stop, documents.size()); ++d)
        sorter->add_document(documents[d], d == at.documents ? at.offset : 0, 1);
      std::ofstream(kFolder + "/grams-1-2.run.part") << "what a kill leaves";
      if (stop < documents.size()) continue;  // dropped without spill()
      CHECK(sorter->bytes_spilled() > 0);
      Collect found;
      sorter->merge(1, found);
      CHECK(found.counts == expected);
      sorter->spill();
      break;
    }
    {  // a hole in the chain: what lies behind it is counted again
      for (const auto& entry : fs::directory_iterator(kFolder))
        if (entry.path().filename().string().starts_with("grams-1")) fs::remove(entry.path());
      auto sorter = GramSorter::make(options);
      const GramProgress at = sorter->progress();
      CHECK(at.positions >= 1024 && at.positions < 40 * 997);
      for (std::size_t d = at.documents; d < documents.size(); ++d)
        sorter->add_document(documents[d], d == at.documents ? at.offset : 0, 1);
      Collect found;
      sorter->merge(1, found);
      CHECK(found.counts == expected);
    }
    {
      GramSorterOptions other = options;
      other.identity = "another test";
      CHECK(contains(refused([&] { GramSorter::make(other); }), "other text, options or tokenizer"));
      other = options;
      other.order = 4;
      CHECK(contains(refused([&] { GramSorter::make(other); }), "order 3"));
      const std::string run = fs::directory_iterator(kFolder)->path().string();
      std::fstream(run, std::ios::in | std::ios::out | std::ios::binary).seekp(200).put('x');
      Collect found;
      CHECK(contains(refused([&] { GramSorter::make(options)->merge(1, found); }), "damaged"));
      fs::resize_file(run, 300);
      CHECK(contains(refused([&] { GramSorter::make(options)->merge(1, found); }), "damaged"));
      fs::resize_file(run, 50);
      CHECK(contains(refused([&] { GramSorter::make(options); }), "no file of counted grams"));
    }
    fs::remove_all(kFolder);
  }

  {  // shards counted apart and joined with weights; more runs than are read at once
    GramSorterOptions options = options_of(3, 50, 5, 1, true);
    fs::create_directories(kFolder);
    std::vector<std::string> shards;
    for (std::size_t d = 0; d < 4; ++d) {
      GramSorterOptions apart = options;
      apart.folder.clear();
      auto sorter = GramSorter::make(apart);
      for (std::size_t i = d; i < documents.size(); i += 4) sorter->add_document(documents[i], 0, 1);
      shards.push_back(kFolder + "/shard" + std::to_string(d));
      sorter->write_run(shards.back(), "shards");
    }
    auto sorter = GramSorter::make(options);
    for (int i = 0; i < 7; ++i)
      for (const Ids& d : documents) sorter->add_document(d, 0, 1);
    for (const std::string& shard : shards)
      for (std::uint64_t w = 1; w <= 65; ++w) sorter->add_run(shard, "shards", w);
    Collect found;
    const std::vector<std::uint64_t> weights(documents.size(), 7 + 65 * 66 / 2);
    CHECK(sorter->merge(2200, found) == weights[0] * (documents.size() * 997 - std::size_t(fives)));
    CHECK(found.counts == twin(documents, weights, 3, 5, 2200));
    sorter->remove_files();
    CHECK(std::distance(fs::directory_iterator(kFolder), {}) == 4);
    CHECK(contains(refused([&] { sorter->add_run(shards[0], "not shards", 1); }), "other text"));
    fs::remove_all(kFolder);
  }

  {  // a long document in pieces, each with the beginning of the next behind it
    auto sorter = GramSorter::make(options_of(3, 50, 5, 1, false));
    const Ids& d = documents[0];
    for (std::size_t at = 0; at < d.size(); at += 100) {
      const std::size_t size = std::min<std::size_t>(102, d.size() - at);
      sorter->add_document(std::span(d).subspan(at, size), 0, 100, 1);
    }
    Collect found;
    sorter->merge(1, found);
    CHECK(found.counts == twin({d}, {1}, 3, 5, 1));
    CHECK(sorter->progress().positions == d.size());
  }
  {  // grams counted elsewhere; refusals leave no trace
    auto sorter = GramSorter::make(options_of(3, 50, 5, 1, false));
    sorter->add_gram(Ids{1, 2, 3}, 4);
    sorter->add_gram(Ids{1, 2}, 1ull << 40);
    CHECK(contains(refused([&] { sorter->add_document(Ids{1, 50}, 0, 1); }), "token 50 (document 0) is outside the vocabulary of 50"));
    CHECK(contains(refused([&] { sorter->add_document(Ids{1, -1}, 0, 1); }), "token -1"));
    CHECK(contains(refused([&] { sorter->add_document(Ids{1}, 0, 0); }), "weight is 0"));
    Collect found;
    sorter->merge(1, found);
    CHECK((found.counts == Counts{{{1}, 4 + (1ull << 40)}, {{1, 2}, 4 + (1ull << 40)}, {{1, 2, 3}, 4}}));
  }
}
