#include "noise.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own headers, bug 105593
#endif

namespace dartspec {
namespace {

constexpr std::uint32_t kMul0 = 0xD2511F53u, kMul1 = 0xCD9E8D57u;  // multipliers and Weyl constants of the paper
constexpr std::uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
constexpr int kRounds = 10;
constexpr std::size_t kLanes = 16;  // blocks side by side

struct Args {
  std::uint32_t key0, key1, position, sample_low, sample_high;
};

// kLanes blocks from `first` on; integers and one exact double product, so every instruction set gives the same bits.
[[gnu::always_inline]] inline void lanes(const Args& a, std::uint32_t first, float* out) {
  alignas(64) std::uint32_t c0[kLanes], c1[kLanes], c2[kLanes], c3[kLanes];
  for (std::size_t i = 0; i < kLanes; ++i) {
    c0[i] = first + static_cast<std::uint32_t>(i);
    c1[i] = a.position;
    c2[i] = a.sample_low;
    c3[i] = a.sample_high;
  }
  std::uint32_t k0 = a.key0, k1 = a.key1;
#pragma GCC unroll 10
  for (int round = 0; round < kRounds; ++round) {
    for (std::size_t i = 0; i < kLanes; ++i) {
      const std::uint64_t p0 = std::uint64_t{kMul0} * c0[i], p1 = std::uint64_t{kMul1} * c2[i];
      c0[i] = static_cast<std::uint32_t>(p1 >> 32) ^ c1[i] ^ k0;
      c2[i] = static_cast<std::uint32_t>(p0 >> 32) ^ c3[i] ^ k1;
      c1[i] = static_cast<std::uint32_t>(p1);
      c3[i] = static_cast<std::uint32_t>(p0);
    }
    k0 += kWeyl0;
    k1 += kWeyl1;
  }
  alignas(64) float w[4][kLanes];
  std::uint32_t* words[4] = {c0, c1, c2, c3};
  for (int j = 0; j < 4; ++j) {
    for (std::size_t i = 0; i < kLanes; ++i) {
      const float value = static_cast<float>((static_cast<double>(words[j][i]) + 0.5) * 0x1p-32);
      w[j][i] = std::min(value, 1.0f - 0x1p-24f);
    }
  }
  for (std::size_t i = 0; i < kLanes; ++i) {
    for (std::size_t j = 0; j < 4; ++j) out[4 * i + j] = w[j][i];
  }
}

[[gnu::always_inline]] inline void fill(const Args& a, std::span<float> out) {
  std::size_t v = 0;
  for (; v + 4 * kLanes <= out.size(); v += 4 * kLanes) lanes(a, static_cast<std::uint32_t>(v / 4), out.data() + v);
  if (v < out.size()) {
    float tail[4 * kLanes];
    lanes(a, static_cast<std::uint32_t>(v / 4), tail);
    std::copy_n(tail, out.size() - v, out.data() + v);
  }
}

void fill_default(const Args& a, std::span<float> out) { fill(a, out); }
#if defined(__x86_64__)
[[gnu::target("avx2")]] void fill_avx2(const Args& a, std::span<float> out) { fill(a, out); }

// High and low words of m * c, 16 lanes: the even lanes' products and the odd lanes' side by side.
[[gnu::target("avx512f"), gnu::always_inline]] inline void multiply(__m512i m, __m512i c, __m512i& high, __m512i& low) {
  const __m512i even = _mm512_mul_epu32(m, c), odd = _mm512_mul_epu32(m, _mm512_srli_epi64(c, 32));
  high = _mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
  low = _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
}

[[gnu::target("avx512f"), gnu::always_inline]] inline __m512 to_unit(__m512i x) {
  const __m512d half = _mm512_set1_pd(0.5), scale = _mm512_set1_pd(0x1p-32);
  const __m512d a = _mm512_mul_pd(_mm512_add_pd(_mm512_cvtepu32_pd(_mm512_castsi512_si256(x)), half), scale);
  const __m512d b = _mm512_mul_pd(_mm512_add_pd(_mm512_cvtepu32_pd(_mm512_extracti64x4_epi64(x, 1)), half), scale);
  const __m512d w = _mm512_insertf64x4(_mm512_castpd256_pd512(_mm256_castps_pd(_mm512_cvtpd_ps(a))),
                                       _mm256_castps_pd(_mm512_cvtpd_ps(b)), 1);
  return _mm512_min_ps(_mm512_castpd_ps(w), _mm512_set1_ps(1.0f - 0x1p-24f));
}

[[gnu::target("avx512f")]] void fill_avx512(const Args& a, std::span<float> out) {
  const __m512i m0 = _mm512_set1_epi32(static_cast<int>(kMul0)), m1 = _mm512_set1_epi32(static_cast<int>(kMul1));
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  for (std::size_t v = 0; v < out.size(); v += 4 * kLanes) {
    __m512i c0 = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(v / 4)), lane);
    __m512i c1 = _mm512_set1_epi32(static_cast<int>(a.position));
    __m512i c2 = _mm512_set1_epi32(static_cast<int>(a.sample_low));
    __m512i c3 = _mm512_set1_epi32(static_cast<int>(a.sample_high));
    std::uint32_t k0 = a.key0, k1 = a.key1;
    for (int round = 0; round < kRounds; ++round, k0 += kWeyl0, k1 += kWeyl1) {
      __m512i high0, low0, high1, low1;
      multiply(m0, c0, high0, low0);
      multiply(m1, c2, high1, low1);
      c0 = _mm512_ternarylogic_epi32(high1, c1, _mm512_set1_epi32(static_cast<int>(k0)), 0x96);  // a ^ b ^ c
      c2 = _mm512_ternarylogic_epi32(high0, c3, _mm512_set1_epi32(static_cast<int>(k1)), 0x96);
      c1 = low1;
      c3 = low0;
    }
    // 16 x 4 words, lane by lane: two rounds of interleaving, then the four 128-bit quarters in order.
    const __m512 w0 = to_unit(c0), w1 = to_unit(c1), w2 = to_unit(c2), w3 = to_unit(c3);
    const __m512 a01 = _mm512_unpacklo_ps(w0, w1), b01 = _mm512_unpackhi_ps(w0, w1);
    const __m512 a23 = _mm512_unpacklo_ps(w2, w3), b23 = _mm512_unpackhi_ps(w2, w3);
    const __m512d q[4] = {
        _mm512_unpacklo_pd(_mm512_castps_pd(a01), _mm512_castps_pd(a23)),  // blocks 0, 4, 8, 12
        _mm512_unpackhi_pd(_mm512_castps_pd(a01), _mm512_castps_pd(a23)),  // blocks 1, 5, 9, 13
        _mm512_unpacklo_pd(_mm512_castps_pd(b01), _mm512_castps_pd(b23)),
        _mm512_unpackhi_pd(_mm512_castps_pd(b01), _mm512_castps_pd(b23))};
    const __m512d r0 = _mm512_shuffle_f64x2(q[0], q[1], 0x44), r1 = _mm512_shuffle_f64x2(q[2], q[3], 0x44);
    const __m512d r2 = _mm512_shuffle_f64x2(q[0], q[1], 0xEE), r3 = _mm512_shuffle_f64x2(q[2], q[3], 0xEE);
    const __m512d result[4] = {_mm512_shuffle_f64x2(r0, r1, 0x88), _mm512_shuffle_f64x2(r0, r1, 0xDD),
                               _mm512_shuffle_f64x2(r2, r3, 0x88), _mm512_shuffle_f64x2(r2, r3, 0xDD)};
    const std::size_t left = out.size() - v;
    for (std::size_t j = 0; j < 4 && 16 * j < left; ++j) {
      const std::size_t count = std::min<std::size_t>(16, left - 16 * j);
      _mm512_mask_storeu_ps(out.data() + v + 16 * j, static_cast<__mmask16>((1u << count) - 1),
                            _mm512_castpd_ps(result[j]));
    }
  }
}
#endif

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// row - log(w) from above, but for rounding.
[[gnu::always_inline]] inline float bound(float row, float w) {
  const auto bits = static_cast<float>(std::bit_cast<std::int32_t>(w));
  return row + 0.69314718f * (127.0f - bits * 0x1p-23f);
}

// The highest bound, or NaN where a value is NaN.
[[gnu::always_inline]] inline float highest_bound(std::span<const float> row, const float* w) {
  float top[kLanes];
  std::fill_n(top, kLanes, -kInfinity);
  std::uint32_t bad[kLanes] = {};
  std::size_t v = 0;
  for (; v + kLanes <= row.size(); v += kLanes) {
    for (std::size_t i = 0; i < kLanes; ++i) {
      const float x = bound(row[v + i], w[v + i]);
      top[i] = x > top[i] ? x : top[i];
      bad[i] |= row[v + i] == row[v + i] ? 0u : 1u;
    }
  }
  for (std::size_t i = 0; v < row.size(); ++v, ++i) {
    top[i] = std::max(top[i], bound(row[v], w[v]));
    bad[i] |= row[v] == row[v] ? 0u : 1u;
  }
  return *std::max_element(bad, bad + kLanes) ? -std::numeric_limits<float>::quiet_NaN()
                                              : *std::max_element(top, top + kLanes);
}

// Whether any of kLanes bounds is at least `least`.
[[gnu::always_inline]] inline bool any_above(const float* row, const float* w, float least) {
  std::uint32_t any = 0;
  for (std::size_t i = 0; i < kLanes; ++i) any |= bound(row[i], w[i]) >= least ? 1u : 0u;
  return any != 0;
}

[[gnu::always_inline]] inline std::int64_t contenders(std::span<const float> row, const float* w,
                                                      std::span<std::int64_t> ids, std::span<float> chosen) {
  const float top = highest_bound(row, w);
  if (!(top > -kInfinity)) return -1;
  // The value that has the highest bound is not far below it: nothing that is bound lower can win.
  std::size_t first = 0;
  while (first + kLanes <= row.size() && !any_above(&row[first], w + first, top)) first += kLanes;
  while (bound(row[first], w[first]) < top) ++first;
  const double reached = row[first] - std::log(-std::log1p(-static_cast<double>(w[first])));
  const auto least = static_cast<float>(reached - 1e-3 - 1e-5 * std::abs(reached));  // far more than rounding
  std::size_t count = 0;
  for (std::size_t v = 0; v < row.size(); v += kLanes) {
    if (v + kLanes <= row.size() && !any_above(&row[v], w + v, least)) continue;
    for (std::size_t i = v; i < std::min(v + kLanes, row.size()); ++i) {
      if (!(bound(row[i], w[i]) >= least)) continue;
      if (count == ids.size()) return -1;
      ids[count] = static_cast<std::int64_t>(i);
      chosen[count++] = w[i];
    }
  }
  return static_cast<std::int64_t>(count);
}

std::int64_t contenders_default(std::span<const float> row, const float* w, std::span<std::int64_t> ids,
                                std::span<float> chosen) {
  return contenders(row, w, ids, chosen);
}
#if defined(__x86_64__)
[[gnu::target("avx2")]] std::int64_t contenders_avx2(std::span<const float> row, const float* w,
                                                     std::span<std::int64_t> ids, std::span<float> chosen) {
  return contenders(row, w, ids, chosen);
}
[[gnu::target("avx512f,prefer-vector-width=512")]] std::int64_t contenders_avx512(std::span<const float> row,
                                                                                 const float* w,
                                                                                 std::span<std::int64_t> ids,
                                                                                 std::span<float> chosen) {
  return contenders(row, w, ids, chosen);
}
#endif

}  // namespace

std::array<std::uint32_t, 4> philox4x32_10(std::array<std::uint32_t, 4> c, std::array<std::uint32_t, 2> k) {
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t p0 = std::uint64_t{kMul0} * c[0], p1 = std::uint64_t{kMul1} * c[2];
    c = {static_cast<std::uint32_t>(p1 >> 32) ^ c[1] ^ k[0], static_cast<std::uint32_t>(p1),
         static_cast<std::uint32_t>(p0 >> 32) ^ c[3] ^ k[1], static_cast<std::uint32_t>(p0)};
    k[0] += kWeyl0;
    k[1] += kWeyl1;
  }
  return c;
}

void philox_uniform(std::uint64_t seed, std::uint64_t sample, std::uint32_t position, std::span<float> out) {
  const Args a{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32), position,
               static_cast<std::uint32_t>(sample), static_cast<std::uint32_t>(sample >> 32)};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return fill_avx512(a, out);
  if (__builtin_cpu_supports("avx2")) return fill_avx2(a, out);
#endif
  fill_default(a, out);
}

std::int64_t gumbel_contenders(std::uint64_t seed, std::uint64_t sample, std::uint32_t position,
                               std::span<const float> row, std::span<std::int64_t> ids, std::span<float> w) {
  thread_local std::vector<float> all;
  if (all.size() < row.size()) all.resize(row.size());
  philox_uniform(seed, sample, position, {all.data(), row.size()});
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return contenders_avx512(row, all.data(), ids, w);
  if (__builtin_cpu_supports("avx2")) return contenders_avx2(row, all.data(), ids, w);
#endif
  return contenders_default(row, all.data(), ids, w);
}

}  // namespace dartspec
