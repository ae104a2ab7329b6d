// XXH64 against the published algorithm's known answers, so that a file can be checked with any implementation.
#include "check.hpp"
#include "hash.hpp"

using dartspec::xxh64;

static std::uint64_t of(const std::string& s) { return xxh64(std::as_bytes(std::span(s.data(), s.size()))); }

int main() {
  CHECK(of("") == 0xEF46DB3751D8E999);
  CHECK(of("a") == 0xD24EC4F1A98C6E5B);
  CHECK(of("abc") == 0x44BC2CF5AD770999);
  CHECK(of("Nobody inspects the spammish repetition") == 0xFBCEA83C8A378BF1);
  // every length up to 100: no two prefixes of one text meet, and one changed bit changes the value
  std::string text;
  for (int i = 0; i < 100; ++i) {
    const std::uint64_t before = of(text);
    text += char('a' + i % 26);
    CHECK(of(text) != before);
    std::string flipped = text;
    flipped[i / 2] ^= 1;
    CHECK(of(flipped) != of(text));
  }
}
