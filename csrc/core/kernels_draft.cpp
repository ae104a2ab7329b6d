#include "kernels_draft.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <new>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "kernels_pool.hpp"
#include "kernels_simd.hpp"

namespace dartspec {

void Int8Linear::Free::operator()(void* p) const { std::free(p); }

std::int64_t Int8Linear::num_bytes() const {
  return panels_ * groups_ * 128 + out_ * static_cast<std::int64_t>(sizeof(float) + sizeof(std::int32_t));
}

#if defined(__x86_64__)

#define DARTSPEC_VNNI [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx2,fma")]]

bool draft_kernels_supported() {
  static const bool supported = kernels_supported() && __builtin_cpu_supports("avx512vnni");
  return supported;
}

namespace {

constexpr int kRows = 12;             // of one pass over a panel
constexpr std::int64_t kAhead = 8192;  // bytes read ahead of the products
constexpr std::int64_t kBlock = 64;   // entries that share a maximum

float widen(bf16 value) { return __builtin_bit_cast(float, static_cast<std::uint32_t>(value) << 16); }

// acc[r][z] = sum over groups of x[r][group] . w[group][z], u8 by s8.
template <int R>
DARTSPEC_VNNI void dot_groups(const std::int8_t* w, std::int64_t groups, const std::uint8_t* x, std::int64_t x_stride,
                              std::int32_t* out) {
  __m512i acc[R][2];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm512_setzero_si512();
  for (std::int64_t g = 0; g < groups; ++g, w += 128) {
    _mm_prefetch(w + kAhead, _MM_HINT_T1);
    _mm_prefetch(w + kAhead + 64, _MM_HINT_T1);
    const __m512i low = _mm512_loadu_si512(w), high = _mm512_loadu_si512(w + 64);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      int word;
      std::memcpy(&word, x + r * x_stride + 4 * g, sizeof word);
      const __m512i value = _mm512_set1_epi32(word);
      acc[r][0] = _mm512_dpbusd_epi32(acc[r][0], value, low);
      acc[r][1] = _mm512_dpbusd_epi32(acc[r][1], value, high);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    _mm512_storeu_si512(out + 32 * r, acc[r][0]);
    _mm512_storeu_si512(out + 32 * r + 16, acc[r][1]);
  }
}

using DotGroups = void (*)(const std::int8_t*, std::int64_t, const std::uint8_t*, std::int64_t, std::int32_t*);

template <int... R>
constexpr std::array<DotGroups, sizeof...(R)> dots(std::integer_sequence<int, R...>) {
  return {&dot_groups<R + 1>...};
}

struct Job {
  const std::int8_t* weights;
  const float* scale;
  const std::int32_t* sum;
  std::int64_t out, groups, panels, per_chunk, rows, x_stride;
  const std::uint8_t* x;
  const float* x_scale;
  float* y;
};

void run_chunk(void* context, std::uint32_t chunk) {
  static constexpr auto kernels = dots(std::make_integer_sequence<int, kRows>{});
  const Job& job = *static_cast<const Job*>(context);
  const std::int64_t first = chunk * job.per_chunk, end = std::min(job.panels, first + job.per_chunk);
  std::array<std::int32_t, 32 * kRows> acc;
  for (std::int64_t panel = first; panel < end; ++panel) {
    const std::int64_t column = 32 * panel, columns = std::min<std::int64_t>(32, job.out - column);
    for (std::int64_t row = 0; row < job.rows; row += kRows) {
      const std::int64_t rows = std::min<std::int64_t>(kRows, job.rows - row);
      kernels[static_cast<std::size_t>(rows - 1)](job.weights + panel * job.groups * 128, job.groups,
                                                  job.x + row * job.x_stride, job.x_stride, acc.data());
      for (std::int64_t r = 0; r < rows; ++r) {
        float* y = job.y + (row + r) * job.out + column;
        const float x_scale = job.x_scale[row + r];
        const std::int32_t* a = acc.data() + 32 * r;
        for (std::int64_t c = 0; c < columns; ++c) {
          y[c] = static_cast<float>(a[c] - 128 * job.sum[column + c]) * (job.scale[column + c] * x_scale);
        }
      }
    }
  }
}

// Whole numbers -127..127 plus 128; the scale is NaN where an entry is not finite.
DARTSPEC_VNNI float quantise_row(const bf16* x, std::int64_t size, std::uint8_t* to) {
  float most = 0;
  bool finite = true;
  for (std::int64_t i = 0; i < size; ++i) {
    const float value = std::abs(widen(x[i]));
    finite = finite && value <= std::numeric_limits<float>::max();
    most = std::max(most, value);
  }
  if (!finite) return std::numeric_limits<float>::quiet_NaN();
  const float inverse = most > 0 ? 127.0f / most : 0.0f;
  for (std::int64_t i = 0; i < size; ++i) {
    to[i] = static_cast<std::uint8_t>(static_cast<int>(std::nearbyint(widen(x[i]) * inverse)) + 128);
  }
  return most / 127.0f;
}

}  // namespace

Int8Linear::Int8Linear(const bf16* weight, std::int64_t out, std::int64_t in)
    : out_(out), in_(in), groups_((in + 3) / 4), panels_((out + 31) / 32), scale_(static_cast<std::size_t>(out)),
      sum_(static_cast<std::size_t>(out)) {
  constexpr std::size_t huge = std::size_t{2} << 20;
  const std::size_t bytes = (static_cast<std::size_t>(panels_ * groups_ * 128) + huge - 1) / huge * huge;
  weights_.reset(static_cast<std::int8_t*>(std::aligned_alloc(huge, bytes)));
  if (weights_ == nullptr) throw std::bad_alloc();
  std::fill_n(weights_.get(), bytes, std::int8_t{0});
  for (std::int64_t o = 0; o < out; ++o) {
    const bf16* row = weight + o * in;
    float most = 0;
    for (std::int64_t i = 0; i < in; ++i) most = std::max(most, std::abs(widen(row[i])));
    const float inverse = most > 0 ? 127.0f / most : 0.0f;
    std::int8_t* panel = weights_.get() + o / 32 * groups_ * 128 + o % 32 * 4;
    std::int32_t sum = 0;
    for (std::int64_t i = 0; i < in; ++i) {
      const auto value = static_cast<std::int8_t>(std::nearbyint(widen(row[i]) * inverse));
      panel[i / 4 * 128 + i % 4] = value;
      sum += value;
    }
    scale_[static_cast<std::size_t>(o)] = most / 127.0f;
    sum_[static_cast<std::size_t>(o)] = sum;
  }
}

void Int8Linear::apply(const bf16* x, std::int64_t rows, std::int64_t x_stride, float* y, int num_threads) const {
  if (rows <= 0 || out_ == 0) return;
  thread_local std::vector<std::uint8_t> quantised;
  thread_local std::vector<float> scales;
  const std::int64_t width = 4 * groups_;
  quantised.assign(static_cast<std::size_t>(rows * width), 128);
  scales.resize(static_cast<std::size_t>(rows));
  for (std::int64_t r = 0; r < rows; ++r) {
    scales[static_cast<std::size_t>(r)] = quantise_row(x + r * x_stride, in_, quantised.data() + r * width);
  }
  const std::int64_t per_chunk = std::max<std::int64_t>(1, panels_ / (8 * std::max(1, num_threads)));
  Job job{weights_.get(), scale_.data(), sum_.data(), out_,          groups_, panels_, per_chunk,
          rows,           width,         quantised.data(), scales.data(), y};
  parallel_for(num_threads, static_cast<std::uint32_t>((panels_ + per_chunk - 1) / per_chunk), &run_chunk, &job);
}

namespace {

// exp(row - top) summed; and the largest entry of every kBlock, NaN where one is NaN.
DARTSPEC_SIMD float block_maxima(const float* row, std::int64_t size, std::vector<float>& maxima) {
  __m512 all = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  __mmask16 nan = 0;
  maxima.clear();
  for (std::int64_t first = 0; first < size; first += kBlock) {
    __m512 block = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    for (std::int64_t i = first; i < std::min(size, first + kBlock); i += 16) {
      const __m512 v = _mm512_mask_loadu_ps(block, simd::first_lanes(size - i), row + i);
      nan |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
      block = _mm512_max_ps(block, v);
    }
    all = _mm512_max_ps(all, block);
    maxima.push_back(_mm512_reduce_max_ps(block));
  }
  return nan != 0 ? std::numeric_limits<float>::quiet_NaN() : _mm512_reduce_max_ps(all);
}

DARTSPEC_SIMD float sum_exp(const float* row, std::int64_t size, float top) {
  const __m512 shift = _mm512_set1_ps(top);
  __m512 sum = _mm512_setzero_ps();
  for (std::int64_t i = 0; i < size; i += 16) {
    const __mmask16 lanes = simd::first_lanes(size - i);
    const __m512 v = _mm512_sub_ps(_mm512_maskz_loadu_ps(lanes, row + i), shift);
    sum = _mm512_mask_add_ps(sum, lanes, sum, simd::exp(v));
  }
  return _mm512_reduce_add_ps(sum);
}

DARTSPEC_SIMD void at_least(const float* row, std::int64_t size, float threshold, std::vector<std::int32_t>& found) {
  const __m512 low = _mm512_set1_ps(threshold);
  for (std::int64_t i = 0; i < size; i += 16) {
    unsigned mask = _mm512_mask_cmp_ps_mask(simd::first_lanes(size - i),
                                            _mm512_maskz_loadu_ps(simd::first_lanes(size - i), row + i), low,
                                            _CMP_GE_OQ);
    for (; mask != 0; mask &= mask - 1) found.push_back(static_cast<std::int32_t>(i + __builtin_ctz(mask)));
  }
}

}  // namespace

void top_log_probs(const float* logits, std::int64_t rows, std::int64_t size, std::int64_t k, float* log_probs,
                   std::int32_t* index) {
  thread_local std::vector<float> maxima;
  thread_local std::vector<std::int32_t> found;
  for (std::int64_t r = 0; r < rows; ++r, logits += size, log_probs += k, index += k) {
    const float top = block_maxima(logits, size, maxima);
    if (!std::isfinite(top)) {
      std::fill_n(log_probs, k, -std::numeric_limits<float>::infinity());
      std::iota(index, index + k, 0);
      continue;
    }
    // each of the k best blocks holds an entry as large as the k-th best block's maximum: no smaller one is wanted
    float threshold = -std::numeric_limits<float>::infinity();
    if (k <= static_cast<std::int64_t>(maxima.size())) {
      std::nth_element(maxima.begin(), maxima.begin() + (k - 1), maxima.end(), std::greater<>());
      threshold = maxima[static_cast<std::size_t>(k - 1)];
    }
    found.clear();
    at_least(logits, size, threshold, found);
    std::partial_sort(found.begin(), found.begin() + k, found.end(), [&](std::int32_t a, std::int32_t b) {
      return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
    });
    const float shift = top + std::log(sum_exp(logits, size, top));
    for (std::int64_t i = 0; i < k; ++i) {
      index[i] = found[static_cast<std::size_t>(i)];
      log_probs[i] = logits[index[i]] - shift;
    }
  }
}

namespace {

bf16 narrow(float value) {  // to the nearest, ties to even, as the processor does
  const auto bits = __builtin_bit_cast(std::uint32_t, value);
  if (value != value) return static_cast<bf16>(bits >> 16 | 0x40);
  return static_cast<bf16>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// (dim) values in place: halves rotated against each other, every product and sum in float32, rounded once.
void rotate(bf16* x, std::int64_t dim, const float* cos, const float* sin) {
  const std::int64_t half = dim / 2;
  for (std::int64_t i = 0; i < half; ++i) {
    const float low = widen(x[i]), high = widen(x[i + half]);
    x[i] = narrow(low * cos[i] + -high * sin[i]);
    x[i + half] = narrow(high * cos[i + half] + low * sin[i + half]);
  }
}

void add(const bf16* a, const bf16* b, std::int64_t size, bf16* y) {
  for (std::int64_t i = 0; i < size; ++i) y[i] = narrow(widen(a[i]) + widen(b[i]));
}

void norm(const Norm& n, const bf16* x, std::int64_t rows, std::int64_t size, bf16* y, std::int64_t y_stride) {
  rms_norm(x, rows, size, size, n.weight, n.eps, n.kind, y, y_stride);
}

}  // namespace

void DraftLayer::run(const bf16* features, const bf16* embeddings, std::int64_t rows, const float* cos,
                     const float* sin, bf16* keys, bf16* values, std::int64_t head_stride, std::int64_t at, bf16* y,
                     int num_threads) const {
  thread_local std::vector<bf16> memory;
  const std::int64_t hidden = fc->out_features(), width = qkv->out_features(), inner = heads * dim;
  const std::int64_t all = rows + masks, d = masks + 1;
  memory.resize(static_cast<std::size_t>(rows * 3 * hidden + all * width + d * (inner + 2 * hidden)));
  bf16* residual = memory.data();           // (rows, hidden)
  bf16* x = residual + rows * hidden;       // (rows, 2 hidden)
  bf16* ready = x + rows * 2 * hidden;      // (all, width)
  bf16* attended = ready + all * width;     // (d, inner)
  bf16* h = attended + d * inner;           // (d, hidden)
  bf16* normed = h + d * hidden;            // (d, hidden)

  fc->apply(features, rows, fc->in_features(), residual, hidden, false, num_threads);
  norm(embedding, embeddings, rows, hidden, x, 2 * hidden);
  norm(feature, residual, rows, hidden, x + hidden, 2 * hidden);
  qkv->apply(x, rows, 2 * hidden, ready, width, false, num_threads);
  for (std::int64_t r = 0; r < all; ++r) {
    bf16* row = ready + r * width;
    if (r >= rows) std::copy_n(mask_qkv, width, row);
    for (std::int64_t i = 0; i < heads + kv_heads; ++i) rotate(row + i * dim, dim, cos + (at + r) * dim, sin + (at + r) * dim);
    for (std::int64_t i = 0; i < kv_heads; ++i) {
      const std::int64_t to = i * head_stride + (at + r) * dim;
      std::copy_n(row + inner + i * dim, dim, keys + to);
      std::copy_n(row + inner + (kv_heads + i) * dim, dim, values + to);
    }
  }
  AttentionArgs args{};
  args.q = ready + (rows - 1) * width;
  args.k = keys;
  args.v = values;
  args.out = attended;
  args.batch = 1;
  args.heads = heads;
  args.kv_heads = kv_heads;
  args.rows = d;
  args.keys = at + all;
  args.dim = args.value_dim = dim;
  args.q_stride = {0, dim, width};
  args.k_stride = args.v_stride = {0, head_stride, dim};
  args.out_stride = {0, dim, inner};
  args.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim)));
  args.causal = true;
  args.num_threads = num_threads;
  attention(args);
  out->apply(attended, d, inner, h, hidden, false, num_threads);
  add(residual + (rows - 1) * hidden, h, hidden, h);
  for (std::int64_t m = 1; m < d; ++m) add(mask_residual, h + m * hidden, hidden, h + m * hidden);
  norm(second, h, d, hidden, normed, hidden);
  gated_mlp(*gate_up, *down, normed, d, hidden, normed, hidden, num_threads);
  add(h, normed, d * hidden, h);
  norm(last, h, d, hidden, last_twice ? normed : y, hidden);
  if (last_twice) norm(last, normed, d, hidden, y, hidden);
}

#else  // not x86-64: nobody may call these, since draft_kernels_supported() is false

bool draft_kernels_supported() { return false; }

Int8Linear::Int8Linear(const bf16*, std::int64_t, std::int64_t) : out_(0), in_(0), groups_(0), panels_(0) {
  throw std::runtime_error("weights of 8 bits need AVX512_VNNI");
}

void Int8Linear::apply(const bf16*, std::int64_t, std::int64_t, float*, int) const {}
void top_log_probs(const float*, std::int64_t, std::int64_t, std::int64_t, float*, std::int32_t*) {}
void DraftLayer::run(const bf16*, const bf16*, std::int64_t, const float*, const float*, bf16*, bf16*, std::int64_t,
                     std::int64_t, bf16*, int) const {}

#endif

}  // namespace dartspec
