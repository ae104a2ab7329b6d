// XXH64 with seed 0, the checksum of the index file (docs/index-format.md). Written from the published algorithm.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace dartspec {

// In pieces: stripes() any number of times with multiples of 32 bytes, then finish() with what is left.
class Xxh64 {
 public:
  void stripes(std::span<const std::byte> data) {
    for (const std::byte* at = data.data(); at < data.data() + data.size(); at += 32)
      for (int i = 0; i < 4; ++i) lane_[i] = round(lane_[i], word64(at + 8 * i));
    length_ += data.size();
  }

  std::uint64_t finish(std::span<const std::byte> data) {
    const std::size_t whole = data.size() / 32 * 32;
    stripes(data.first(whole));
    const std::byte* at = data.data() + whole;
    const std::byte* const end = data.data() + data.size();
    std::uint64_t h = p5;
    if (length_ != 0) {
      h = std::rotl(lane_[0], 1) + std::rotl(lane_[1], 7) + std::rotl(lane_[2], 12) + std::rotl(lane_[3], 18);
      for (std::uint64_t l : lane_) h = (h ^ round(0, l)) * p1 + p4;
    }
    h += length_ + static_cast<std::size_t>(end - at);
    for (; end - at >= 8; at += 8) h = std::rotl(h ^ round(0, word64(at)), 27) * p1 + p4;
    if (end - at >= 4) {
      h = std::rotl(h ^ (word32(at) * p1), 23) * p2 + p3;
      at += 4;
    }
    for (; at < end; ++at) h = std::rotl(h ^ (std::to_integer<std::uint64_t>(*at) * p5), 11) * p1;
    h = (h ^ (h >> 33)) * p2;
    h = (h ^ (h >> 29)) * p3;
    return h ^ (h >> 32);
  }

 private:
  static constexpr std::uint64_t p1 = 0x9E3779B185EBCA87, p2 = 0xC2B2AE3D27D4EB4F, p3 = 0x165667B19E3779F9,
                                 p4 = 0x85EBCA77C2B2AE63, p5 = 0x27D4EB2F165667C5;
  static std::uint64_t word64(const std::byte* p) { std::uint64_t v; std::memcpy(&v, p, 8); return v; }
  static std::uint64_t word32(const std::byte* p) { std::uint32_t v; std::memcpy(&v, p, 4); return v; }
  static std::uint64_t round(std::uint64_t acc, std::uint64_t input) { return std::rotl(acc + input * p2, 31) * p1; }

  std::uint64_t lane_[4] = {p1 + p2, p2, 0, 0 - p1};
  std::uint64_t length_ = 0;
};

inline std::uint64_t xxh64(std::span<const std::byte> data) { return Xxh64().finish(data); }

}  // namespace dartspec
