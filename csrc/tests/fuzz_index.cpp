// libFuzzer target: whatever a file holds, opening, verifying, asking, searching and walking it stays within bounds.
// A header that does not sign itself would hide all the rest, so half of the inputs are signed here.
//
//   cmake -S . -B build/fuzz -DDARTSPEC_PYTHON=OFF -DDARTSPEC_FUZZ=ON -DCMAKE_CXX_COMPILER=clang++
//   build/fuzz/fuzz_index -runs=10000000 build/fuzz/corpus csrc/tests/fuzz_corpus
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "hash.hpp"
#include "ngram_writer.hpp"
#include "tree_search.hpp"

using namespace dartspec;

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

void use(const NgramIndex& index) {
  static TreeSearch search({.top_k = 6, .beam = 4, .ngram_at_level0 = true});
  static NgramQuery query(0.4);
  static WantedTokens wanted;
  const std::int32_t tokens[18] = {0, 1, 2, 3, 4, 5, 6, 7, -1, 9, 12, 30, 1, 63, 64, 2, 3, 70000};
  wanted.clear(18);
  for (std::int32_t t : tokens)
    if (t >= 0 && wanted.find(static_cast<std::uint32_t>(t)) < 0) wanted.add(t);
  std::vector<NgramState> states;
  for (std::int32_t a = -1; a < 4; ++a) states.push_back(index.state_of(std::vector<std::int32_t>{2, 1, a, 1}));
  if (index.info().exact) {  // the other form prepares tables, which the search does too
    std::vector<double> rows(states.size() * static_cast<std::size_t>(wanted.n));
    query.score(index, states, wanted, false, rows.data());
    for (double g : rows) require(g >= 0.0 && g <= 1.0);
  }
  for (const NgramState& state : states)
    for (std::int32_t t : {-1, 0, 1, 2, 40}) {
      const double p = index.probability(state, t);
      require(p >= 0.0 && p <= 1.0);
    }
  index.continuations(states.back(), 3);
  float log_probs[18], scores[10];
  for (int i = 0; i < 18; ++i) log_probs[i] = -float(i % 6);
  std::int32_t out[10], parents[10];
  const std::int32_t context[] = {2, 1}, eos[] = {3};
  SearchCase c{log_probs, tokens, 3, 6, 1, context, nullptr, 9, out, parents, scores};
  search.run({&c, 1}, eos, &index);
  check_parents({parents, static_cast<std::size_t>(c.found)});
  for (int i = 0; i < c.found; ++i) require(std::isfinite(scores[i]));
  IndexWalker at(index);
  for (int i = 0; i < 200 && at.next(); ++i) require(at.level() >= 1 && at.level() <= index.info().order);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::vector<std::byte> image(size);
  if (size > 0) std::memcpy(image.data(), data, size);
  IndexHeader h;
  if (size >= sizeof h && data[offsetof(IndexHeader, reserved)] % 2 == 0) {
    std::memcpy(&h, data, sizeof h);
    h.file_bytes = size;
    h.checksum = 0;
    std::memcpy(image.data(), &h, sizeof h);
    if (h.header_bytes <= size) h.checksum = xxh64(std::span<const std::byte>(image).first(h.header_bytes));
    std::memcpy(image.data(), &h, sizeof h);
  }
  try {
    const NgramIndex index = NgramIndex::from_image(std::move(image));
    use(index);
    index.verify();
  } catch (const Error&) {
  }
  return 0;
}
