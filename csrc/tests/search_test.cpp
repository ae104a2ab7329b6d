// The search under the sanitizers: awkward shapes, one scratch for many sizes. Its plain twin is in tests/test_lattice.py.
#include "tree_search.hpp"

#include <cmath>
#include <cstring>
#include <random>

#include "check.hpp"
#include "toy_index.hpp"

using namespace dartspec;

int main() {
  std::mt19937 random(7);
  Ids document;
  for (int i = 0; i < 5000; ++i) document.push_back(static_cast<std::int32_t>(random() % 50));
  const NgramIndex index = toy_index({document}, 4, 50, false);
  // Token 4 with hundreds of followers, so that long child lists are searched too; damaged offsets included.
  std::vector<Ids> followers;
  for (std::int32_t t = 0; t < 2000; t += 2) followers.push_back({4, t, 4});
  const NgramIndex wide = toy_index(followers, 3, 2000, true);
  CHECK(wide.continuations(wide.state_of(std::vector<std::int32_t>{4}), 5000).size() == 1000);
  std::vector<std::byte> image(wide.image().begin(), wide.image().end());
  IndexHeader header;
  std::memcpy(&header, image.data(), sizeof header);
  for (std::size_t i = header.header_bytes; i < image.size(); ++i)
    if (random() % 3 == 0) image[i] = std::byte{static_cast<unsigned char>(random())};
  const NgramIndex damaged = NgramIndex::from_image(image);
  const NgramIndex* const indexes[] = {nullptr, &index, &wide, &damaged};
  TreeSearch search({.top_k = 20, .beam = 7});

  for (int round = 0; round < 3000; ++round) {
    const int d = static_cast<int>(random() % 6), k = static_cast<int>(random() % 26), budget = static_cast<int>(random() % 80);
    std::vector<float> log_probs(static_cast<std::size_t>(d) * k);
    std::vector<std::int32_t> tokens(log_probs.size()), out(budget + 1), parents(budget + 1);
    std::vector<float> scores(budget + 1);
    for (float& v : log_probs) {
      const unsigned kind = random() % 12;
      v = kind == 0 ? NAN : kind == 1 ? -INFINITY : kind == 2 ? INFINITY : -float(random() % 8);
    }
    for (auto& t : tokens) t = static_cast<std::int32_t>(random() % 52) - 1;
    const std::int32_t eos[] = {3, 9}, context[] = {1, 2, 4};
    SearchCase c{log_probs.data(), tokens.data(), d, k, 4, context, nullptr, budget, out.data(), parents.data(), scores.data()};
    search.run({&c, 1}, eos, indexes[round % 4]);
    const int n = c.found;
    CHECK(n >= 1 && n <= budget + 1);
    check_parents({parents.data(), static_cast<std::size_t>(n)});
    for (int i = 1; i < n; ++i) {
      CHECK(std::isfinite(scores[i]) && scores[i] <= scores[i - 1]);
      CHECK(out[i] >= 0);
      CHECK(out[parents[i]] != 3 && out[parents[i]] != 9);
      for (int j = 1; j < i; ++j) CHECK(parents[i] != parents[j] || out[i] != out[j]);
    }
    std::vector<std::int64_t> depths(n);
    std::vector<std::uint8_t> mask(static_cast<std::size_t>(n) * n);
    tree_depths({parents.data(), static_cast<std::size_t>(n)}, depths.data());
    tree_ancestor_mask({parents.data(), static_cast<std::size_t>(n)}, mask.data());
    for (int i = 0; i < n; ++i) {
      std::int64_t ancestors = 0;
      for (int j = 0; j < n; ++j) ancestors += mask[static_cast<std::size_t>(i) * n + j];
      CHECK(ancestors == depths[i] + 1 && depths[i] <= d);
    }
  }
  CHECK(contains(refused([] { TreeSearch({.beam = 0}); }), "beam is 0"));
  CHECK(contains(refused([] { TreeSearch({.eps = NAN}); }), "eps"));
}
