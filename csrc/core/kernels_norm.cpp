#include "kernels.hpp"
#include "kernels_simd.hpp"

namespace dartspec {

#if defined(__x86_64__)

namespace {

using namespace simd;

DARTSPEC_SIMD void norm_row(const bf16* x, std::int64_t size, const bf16* weight, float eps, NormKind kind, bf16* y) {
  __m512 sum[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
  for (std::int64_t i = 0, z = 0; i < size; i += 16, z = (z + 1) % 4) {
    const __m512 value = load_bf16(x + i, first_lanes(size - i));
    sum[z] = _mm512_fmadd_ps(value, value, sum[z]);
  }
  const float total = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3])));
  const __m512 inverse = _mm512_set1_ps(1.0f / __builtin_sqrtf(total / static_cast<float>(size) + eps));
  for (std::int64_t i = 0; i < size; i += 16) {
    const __mmask16 lanes = first_lanes(size - i);
    __m512 value = _mm512_mul_ps(load_bf16(x + i, lanes), inverse), w = load_bf16(weight + i, lanes);
    if (kind == NormKind::kRoundThenScale) value = round_bf16(value);
    if (kind == NormKind::kScaleOnePlus) w = _mm512_add_ps(w, _mm512_set1_ps(1.0f));
    store_bf16(y + i, _mm512_mul_ps(value, w), lanes);
  }
}

DARTSPEC_SIMD void rotate(bf16* x, std::int64_t rotary, const bf16* cos, const bf16* sin) {
  const std::int64_t half = rotary / 2;
  for (std::int64_t i = 0; i < half; i += 16) {
    const __mmask16 lanes = first_lanes(half - i);
    const __m512 a = load_bf16(x + i, lanes), b = load_bf16(x + half + i, lanes);
    const __m512 ac = round_bf16(_mm512_mul_ps(a, load_bf16(cos + i, lanes)));
    const __m512 bs = round_bf16(_mm512_mul_ps(b, load_bf16(sin + i, lanes)));
    const __m512 bc = round_bf16(_mm512_mul_ps(b, load_bf16(cos + half + i, lanes)));
    const __m512 as = round_bf16(_mm512_mul_ps(a, load_bf16(sin + half + i, lanes)));
    store_bf16(x + i, _mm512_sub_ps(ac, bs), lanes);
    store_bf16(x + half + i, _mm512_add_ps(bc, as), lanes);
  }
}

}  // namespace

void prepare_heads(const HeadArgs& a) {
  for (std::int64_t r = 0; r < a.rows; ++r) {
    const bf16 *cos = a.cos + r % a.cos_rows * a.rotary, *sin = a.sin + r % a.cos_rows * a.rotary;
    for (std::int64_t h = 0; h < a.q_heads + a.k_heads; ++h) {
      bf16* head = a.heads + r * a.stride + h * a.dim;
      const bf16* weight = h < a.q_heads ? a.q_norm : a.k_norm;
      if (weight != nullptr) norm_row(head, a.dim, weight, a.eps, a.kind, head);
      rotate(head, a.rotary, cos, sin);
    }
  }
}

void rms_norm(const bf16* x, std::int64_t rows, std::int64_t x_stride, std::int64_t size, const bf16* weight, float eps,
              NormKind kind, bf16* y, std::int64_t y_stride) {
  for (std::int64_t r = 0; r < rows; ++r) norm_row(x + r * x_stride, size, weight, eps, kind, y + r * y_stride);
}

#else

void prepare_heads(const HeadArgs&) {}

void rms_norm(const bf16*, std::int64_t, std::int64_t, std::int64_t, const bf16*, float, NormKind, bf16*,
              std::int64_t) {}

#endif

}  // namespace dartspec
