// The index image: golden bytes, back-off, damage. The plain twins and file tests are in tests/test_ngram_index.py.
#include "ngram_index.hpp"

#include <cmath>
#include <cstring>
#include <random>

#include "check.hpp"
#include "hash.hpp"
#include "toy_index.hpp"

using namespace dartspec;

static std::vector<std::byte> bytes_of(const NgramIndex& index) { return {index.image().begin(), index.image().end()}; }

static void sign_header(std::vector<std::byte>& image) {
  IndexHeader h;
  std::memcpy(&h, image.data(), sizeof h);
  h.checksum = 0;
  std::memcpy(image.data(), &h, sizeof h);
  h.checksum = xxh64(std::span<const std::byte>(image).first(h.header_bytes));
  std::memcpy(image.data(), &h, sizeof h);
}

// Reads what a reader may read of an index whose sections are untrusted.
static void query(const NgramIndex& index) {
  for (std::int32_t a = -1; a < 34; ++a)
    for (std::int32_t b = 0; b < 33; b += 3) {
      const NgramState state = index.state_of(Ids{b, a, b});
      for (std::int32_t t = -1; t < 34; ++t) {
        const double p = index.probability(state, t);
        CHECK(p >= 0.0 && p <= 1.0);
      }
      index.continuations(state, 5);
    }
}

int main() {
  {  // golden bytes: a change of the format must change this test and the version
    const NgramIndex index = toy_index({{1, 2, 1}, {2}}, 2, 4, true);
    const auto image = index.image();
    const auto* at = reinterpret_cast<const std::uint8_t*>(image.data());
    CHECK(std::memcmp(at, "DARTNGRM\2\0\0\0\4\3\2\1", 16) == 0);
    IndexHeader h;
    std::memcpy(&h, at, sizeof h);
    CHECK(h.header_bytes == 448 && h.order == 2 && h.token_bits == 2 && h.counts_form == 1 && h.vocab_size == 4);
    CHECK(h.num_nodes[0] == 2 && h.num_nodes[1] == 2 && h.value_bits[0] == 0 && h.value_bits[1] == 0);
    CHECK(h.file_bytes == 904 && image.size() == 904 && h.num_tokens == 4 && h.num_sections == 8);
    auto bytes_at = [&](std::size_t offset, std::vector<std::uint8_t> expected) {
      return std::memcmp(at + offset, expected.data(), expected.size()) == 0;
    };
    CHECK(bytes_at(448, {0b110, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}));  // tokens 1 and 2; rank 0
    CHECK(bytes_at(512, {0, 0, 0, 0, 0, 0, 0, 0}));                             // counts: both the same
    CHECK(bytes_at(576, {0, 0, 0, 0, 0, 0, 0, 0}));                             // offsets 0 1 2: no low bits,
    CHECK(bytes_at(640, {0b10101, 0, 0, 0, 0, 0, 0, 0}));                       // high parts in unary
    CHECK(bytes_at(704, {0, 0, 0, 0, 0, 0, 0, 0}));
    CHECK(bytes_at(768, {2, 0, 0, 0, 0, 0, 0, 0}));      // the one count of level 1
    CHECK(bytes_at(832, {0b0110, 0, 0, 0, 0, 0, 0, 0}));  // 1 -> 2, 2 -> 1
    CHECK(bytes_at(896, {1, 0, 0, 0, 0, 0, 0, 0}));
    CHECK(xxh64(image) == 0x11d3a93a0f679458);
  }
  {  // longest context first; freq(child) / freq(context), passes that end there included
    const NgramIndex index = toy_index({{0, 1, 2}, {0, 1, 3}, {5, 1, 3}, {1}}, 3, 8, true);
    const NgramState state = index.state_of(Ids{0, 1});
    CHECK(index.probability(state, 2) == 1.0 / 2);
    CHECK(index.probability(state, 3) == 1.0 / 2);
    CHECK(index.probability(index.state_of(Ids{7, 1}), 3) == 2.0 / 4);
    CHECK(index.probability(state, 4) == 0.0);
    CHECK(index.state_of(Ids{4, 4, 0, 1}) == state);
    CHECK(index.extend(index.state_of(Ids{0}), 1) == state);
  }
  {  // all widths of key and token
    for (int order = 2; order <= 5; ++order)
      for (std::uint32_t vocab : {4u, 65536u, 65537u, kMaxVocab}) {
        const auto last = static_cast<std::int32_t>(vocab - 1);
        const NgramIndex index = toy_index({{last, 0, last, last, 0}, {last}}, order, vocab, false);
        index.verify();
        const double p = index.probability(index.state_of(Ids{last, last}), 0);
        CHECK(std::abs(p - (order == 2 ? 0.5 : 1.0)) < 1e-6);
        CHECK(index.probability(index.state_of(Ids{0}), 2) == 0.0);
        CHECK(index.info().num_nodes[order - 1] > 0);
      }
  }
  {  // a count that no integer holds (found by the fuzzer)
    std::vector<std::byte> image = bytes_of(toy_index({{1, 2, 1}}, 2, 4, false));
    IndexHeader h;
    std::memcpy(&h, image.data(), sizeof h);
    h.num_tokens = UINT64_MAX;
    std::memcpy(image.data(), &h, sizeof h);
    sign_header(image);
    const NgramIndex index = NgramIndex::from_image(image);
    for (IndexWalker at(index); at.next();) CHECK(at.count() >= 1);
  }
  std::mt19937 random(1);
  std::vector<Ids> documents(8);
  for (Ids& d : documents)
    for (int i = 0; i < 80; ++i) d.push_back(static_cast<std::int32_t>(random() % 32));
  for (bool exact : {false, true}) {
    for (std::uint32_t vocab : {32u, 70000u}) {
      const std::vector<std::byte> image = bytes_of(toy_index(documents, 3, vocab, exact));
      IndexHeader h;
      std::memcpy(&h, image.data(), sizeof h);
      for (std::size_t cut = 0; cut < image.size(); ++cut)  // every truncation
        refused([&] { NgramIndex::from_image({image.begin(), image.begin() + static_cast<std::ptrdiff_t>(cut)}); });
      for (int round = 0; round < 3000; ++round) {  // up to four flipped bits after the header: open, query, verify
        auto damaged = image;
        for (unsigned flips = 1 + random() % 4; flips > 0; --flips)
          damaged[h.header_bytes + random() % (image.size() - h.header_bytes)] ^= std::byte{static_cast<unsigned char>(1u << random() % 8)};
        const NgramIndex index = NgramIndex::from_image(damaged);
        if (round % 100 == 0) query(index);
        else index.probability(index.state_of(documents[0]), 1);
        if (damaged != image) refused([&] { index.verify(); });
      }
      for (int round = 0; round < 3000; ++round) {  // a header that lies and signs itself: refused, or read in bounds
        auto damaged = image;
        const std::size_t at = random() % h.header_bytes;
        damaged[at] = std::byte{static_cast<unsigned char>(random())};
        if (random() % 2) damaged[random() % h.header_bytes] = std::byte{static_cast<unsigned char>(random())};
        std::uint32_t header_bytes;
        std::memcpy(&header_bytes, damaged.data() + offsetof(IndexHeader, header_bytes), 4);
        if (header_bytes > damaged.size()) continue;
        sign_header(damaged);
        try {
          query(NgramIndex::from_image(damaged));
        } catch (const Error&) {
        }
      }
    }
  }
}
