// Published vectors, and the filler against single blocks at every length (address sanitizer watches the tail).
#include "noise.hpp"

#include <algorithm>
#include <cstdio>
#include <vector>

#define CHECK(condition) \
  do { \
    if (!(condition)) { \
      std::printf("%s:%d: %s\n", __FILE__, __LINE__, #condition);    \
      return 1; \
    } \
  } while (false)

int main() {
  using Words = std::array<std::uint32_t, 4>;
  const std::uint32_t ones = 0xffffffffu;
  CHECK((dartspec::philox4x32_10({0, 0, 0, 0}, {0, 0}) == Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  CHECK((dartspec::philox4x32_10({ones, ones, ones, ones}, {ones, ones}) ==
         Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  CHECK((dartspec::philox4x32_10({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
         Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
  const std::uint64_t seed = 0x123456789abcdef0u, sample = 0xfedcba9876543210u;
  for (std::size_t size = 0; size < 200; ++size) {
    std::vector<float> out(size);
    dartspec::philox_uniform(seed, sample, 77, out);
    for (std::size_t v = 0; v < size; ++v) {
      const Words block = dartspec::philox4x32_10({static_cast<std::uint32_t>(v / 4), 77, 0x76543210u, 0xfedcba98u},
                                                  {0x9abcdef0u, 0x12345678u});
      const float w = static_cast<float>((block[v % 4] + 0.5) * 0x1p-32);
      CHECK(out[v] == std::min(w, 1.0f - 0x1p-24f));
    }
  }
  return 0;
}
