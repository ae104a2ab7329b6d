// Counter-based noise: a pure function of (seed, sample, position, value), the same on every machine and thread count.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace dartspec {

// One block of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
std::array<std::uint32_t, 4> philox4x32_10(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key);

// out[v] = w(x), where x is word v % 4 of the block with
//   key     = (seed low, seed high)
//   counter = (v / 4, position, sample low, sample high)
// and w(x) = (x + 0.5) * 2^-32 rounded to float32 and clamped to at most 1 - 2^-24. So 2^-33 <= w <= 1 - 2^-24:
// the Gumbel value -log(-log1p(-w)) is finite, and w is finest near 0, where that value is largest.
void philox_uniform(std::uint64_t seed, std::uint64_t sample, std::uint32_t position, std::span<float> out);

// The few values that can be the argmax over v of row[v] - log(-log1p(-w_v)), w as above: their ids, ascending, and
// their w. Found by a bound that needs no logarithm: -log(-log1p(-w)) <= -log(w), and the bits of a float read as a
// whole number are log2 from below.
// Returns how many there are; -1 where they do not fit, and where the row holds a NaN or nothing above -inf.
std::int64_t gumbel_contenders(std::uint64_t seed, std::uint64_t sample, std::uint32_t position,
                               std::span<const float> row, std::span<std::int64_t> ids, std::span<float> w);

}  // namespace dartspec
