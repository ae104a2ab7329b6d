// Included by the kernels' sources only: the target attribute and the micro-kernel that products and scores share.
#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "kernels.hpp"

#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own headers, bug 105593
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wignored-attributes"

#define DARTSPEC_SIMD [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma")]]
#define DARTSPEC_SIMD_INLINE \
  [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma"), gnu::always_inline]] inline

namespace dartspec::simd {

constexpr int kPanel = 64;  // keys of a panel: 4 registers of 16

DARTSPEC_SIMD_INLINE __m512 load_bf16(const bf16* p, __mmask16 mask) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p)), 16));
}

DARTSPEC_SIMD_INLINE void store_bf16(bf16* p, __m512 value, __mmask16 mask) {
  _mm256_mask_storeu_epi16(p, mask, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(value)));
}

// Rounded to bf16 and back.
DARTSPEC_SIMD_INLINE __m512 round_bf16(__m512 value) {
  const __m256i bits = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(value));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

DARTSPEC_SIMD_INLINE __mmask16 first_lanes(std::int64_t n) {
  return n >= 16 ? __mmask16(0xFFFF) : n <= 0 ? __mmask16(0) : static_cast<__mmask16>((1u << n) - 1);
}

// e^x, relative error below 2e-7: range reduction by ln 2 in two parts, degree-6 polynomial. 0 below -87.3; NaN stays.
DARTSPEC_SIMD_INLINE __m512 exp(__m512 x) {
  const __m512 low = _mm512_set1_ps(-87.33654f), high = _mm512_set1_ps(88.72283f);
  const __mmask16 tiny = _mm512_cmp_ps_mask(x, low, _CMP_LT_OQ), huge = _mm512_cmp_ps_mask(x, high, _CMP_GT_OQ);
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.0f / 720);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  const __m512 result = _mm512_scalef_ps(p, n);
  return _mm512_mask_mov_ps(_mm512_mask_mov_ps(result, tiny, _mm512_setzero_ps()), huge,
                            _mm512_set1_ps(__builtin_inff()));
}

// tanh(x) = 1 - 2 / (e^2x + 1); absolute error below 2e-7.
DARTSPEC_SIMD_INLINE __m512 tanh(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(exp(_mm512_add_ps(x, x)), one)));
}

// What one pass reads ahead: at each pair `lines` cache lines, `step` elements from pair to pair.
struct Ahead {
  const bf16* at = nullptr;
  std::int64_t step = 0;
  int lines = 0;
};

// Words of 32 bits hold a pair of bf16 inputs, or one float32 input.
template <class T>
constexpr int kPerWord = 4 / sizeof(T);

// out[r][16 z + lane] (+)= sum over words p, ascending, of x[r][word p] . w[p][z][lane].
// w: `step` elements from word to word; x: R rows; out: R rows of 16 NZ floats, read first unless `fresh`.
template <class T, int R, int NZ>
DARTSPEC_SIMD void dot_words(const T* w, std::int64_t step, std::int64_t words, const T* x, std::int64_t x_stride,
                             float* out, bool fresh, Ahead ahead) {
  __m512 acc[R][NZ];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int z = 0; z < NZ; ++z) acc[r][z] = fresh ? _mm512_setzero_ps() : _mm512_loadu_ps(out + 16 * (r * NZ + z));
  }
  for (std::int64_t p = 0; p < words; ++p, w += step, ahead.at += ahead.step) {
    for (int i = 0; i < ahead.lines; ++i) _mm_prefetch(ahead.at + 32 * i, _MM_HINT_T1);
    __m512i weight[NZ];
#pragma GCC unroll 4
    for (int z = 0; z < NZ; ++z) weight[z] = _mm512_loadu_si512(w + 16 * kPerWord<T> * z);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      int word;
      std::memcpy(&word, x + r * x_stride + kPerWord<T> * p, sizeof word);
      const __m512i value = _mm512_set1_epi32(word);
#pragma GCC unroll 4
      for (int z = 0; z < NZ; ++z) {
        if constexpr (sizeof(T) == 2) {
          acc[r][z] = _mm512_dpbf16_ps(acc[r][z], reinterpret_cast<__m512bh>(weight[z]),
                                       reinterpret_cast<__m512bh>(value));
        } else {
          acc[r][z] = _mm512_fmadd_ps(_mm512_castsi512_ps(weight[z]), _mm512_castsi512_ps(value), acc[r][z]);
        }
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int z = 0; z < NZ; ++z) _mm512_storeu_ps(out + 16 * (r * NZ + z), acc[r][z]);
  }
}

template <class T>
using DotWords = void (*)(const T*, std::int64_t, std::int64_t, const T*, std::int64_t, float*, bool, Ahead);

constexpr int max_rows(int nz) { return nz <= 2 ? 12 : nz == 3 ? 8 : 6; }

template <class T, int NZ, int... R>
constexpr std::array<DotWords<T>, sizeof...(R)> row_kernels(std::integer_sequence<int, R...>) {
  return {&dot_words<T, R + 1, NZ>...};
}

// The micro-kernel for 1..max_rows(NZ) rows.
template <class T, int NZ>
DotWords<T> dot_words_for(int rows) {
  static constexpr auto kernels = row_kernels<T, NZ>(std::make_integer_sequence<int, max_rows(NZ)>{});
  return kernels[static_cast<std::size_t>(rows - 1)];
}

}  // namespace dartspec::simd

#endif
