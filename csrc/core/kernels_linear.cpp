#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <vector>

#include "kernels.hpp"
#include "kernels_pool.hpp"
#include "kernels_simd.hpp"

namespace dartspec {

void PackedLinear::Free::operator()(void* p) const { std::free(p); }

namespace {

constexpr std::size_t kHuge = std::size_t{2} << 20;

// Aligned for whole cache lines; large blocks on huge pages, since a step reads all of them once.
void* allocate(std::size_t bytes) {
  const std::size_t align = bytes >= kHuge / 2 ? kHuge : 64;
  void* p = std::aligned_alloc(align, (bytes + align - 1) / align * align);
  if (p == nullptr) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  if (align == kHuge) ::madvise(p, (bytes + align - 1) / align * align, MADV_HUGEPAGE);
#endif
  return p;
}

}  // namespace

#if defined(__x86_64__)

bool kernels_supported() {
  static const bool supported = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                                __builtin_cpu_supports("avx512bf16");
  return supported;
}

namespace {

using namespace simd;

constexpr int kRegisters = 2;                // of outputs, in a panel: narrow, so that 12 rows share one pass
constexpr int kWidth = 16 * kRegisters;      // outputs of a panel
constexpr std::int64_t kRowsAtOnce = 12;     // of one pass over a panel
constexpr int kFewRows = 4;                  // up to here demand alone keeps memory busy
constexpr std::int64_t kReadAhead = 4096;    // elements, 8 KiB: measured best of 2 to 32 KiB
constexpr std::int64_t kManyRows = 96;       // from here on arithmetic rules, not memory
constexpr std::int64_t kShortBlock = 128;    // pairs of a panel that all rows pass before the next are read: in L1
constexpr std::int64_t kLongBlock = 1024;    // the same for many rows: 128 KiB, in L2

// One call of apply().
struct Job {
  const bf16* weights;
  const float* bias;
  std::int64_t out, packed, pairs;
  bool gated;
  Activation activation;
  const bf16* x;
  std::int64_t rows, x_stride;
  void* y;
  std::int64_t y_stride;
  bool y_float32;
  std::int64_t num_panels, panels_per_chunk;
};

// Some neighbouring outputs.
struct Panel {
  const bf16* weights;  // of its first pair
  std::int64_t column;  // first packed column
  int nz;               // registers of outputs
};

Panel panel_at(const Job& job, std::int64_t index) {
  const int nz = static_cast<int>(std::min<std::int64_t>(kRegisters, (job.packed - index * kWidth) / 16));
  return {job.weights + index * kWidth * 2 * job.pairs, index * kWidth, nz};
}

DARTSPEC_SIMD_INLINE __m512 activate(Activation activation, __m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f), zero = _mm512_setzero_ps();
  switch (activation) {
    case Activation::kSilu:
      return _mm512_div_ps(x, _mm512_add_ps(one, exp(_mm512_sub_ps(zero, x))));
    case Activation::kGeluTanh: {  // x (1 + tanh u) / 2 = x / (1 + e^-2u), without the cancellation
      const __m512 u2 = _mm512_mul_ps(
          _mm512_set1_ps(2 * 0.79788456080286536f),
          _mm512_fmadd_ps(_mm512_mul_ps(_mm512_mul_ps(x, x), x), _mm512_set1_ps(0.044715f), x));
      return _mm512_div_ps(x, _mm512_add_ps(one, exp(_mm512_sub_ps(zero, u2))));
    }
    case Activation::kRelu:
      return _mm512_max_ps(x, zero);
    case Activation::kGelu: {
      alignas(64) float v[16];
      _mm512_store_ps(v, x);
      for (float& value : v) value = 0.5f * value * __builtin_erfcf(value * -0.70710678118654752f);
      return _mm512_load_ps(v);
    }
  }
  return x;
}

// Bias, rounding and the store of one row of one panel.
DARTSPEC_SIMD_INLINE void finish_row(const Job& job, const Panel& panel, std::int64_t row, const float* acc) {
  for (int z = 0; z < panel.nz; z += job.gated ? 2 : 1) {
    const std::int64_t packed = panel.column + 16 * z;
    __m512 value = _mm512_loadu_ps(acc + 16 * z);
    if (job.bias != nullptr) value = _mm512_add_ps(value, _mm512_loadu_ps(job.bias + packed));
    std::int64_t column = packed;
    if (job.gated) {
      __m512 up = _mm512_loadu_ps(acc + 16 * (z + 1));
      if (job.bias != nullptr) up = _mm512_add_ps(up, _mm512_loadu_ps(job.bias + packed + 16));
      value = _mm512_mul_ps(round_bf16(activate(job.activation, round_bf16(value))), round_bf16(up));
      column = packed / 2;
    }
    const __mmask16 mask = first_lanes(job.out - column);
    if (mask == 0) continue;
    if (job.y_float32) {
      _mm512_mask_storeu_ps(static_cast<float*>(job.y) + row * job.y_stride + column, mask, value);
    } else {
      store_bf16(static_cast<bf16*>(job.y) + row * job.y_stride + column, value, mask);
    }
  }
}

// All rows of one panel, a stretch of inputs at a time that stays in L1 (in L2 for many rows) while the row blocks pass.
DARTSPEC_SIMD void run_panel(const Job& job, const Panel& panel, float* scratch) {
  const std::int64_t num_blocks = (job.rows + kRowsAtOnce - 1) / kRowsAtOnce;
  const std::int64_t block = num_blocks == 1 ? job.pairs : job.rows < kManyRows ? kShortBlock : kLongBlock;
  const std::int64_t step = 32 * panel.nz, width = 16 * panel.nz;
  for (std::int64_t first = 0; first < job.pairs; first += block) {
    const std::int64_t pairs = std::min(block, job.pairs - first);
    for (std::int64_t b = 0; b < num_blocks; ++b) {
      const std::int64_t row = b * job.rows / num_blocks, end = (b + 1) * job.rows / num_blocks;
      const int rows = static_cast<int>(end - row);
      const auto dot = panel.nz == 1 ? dot_words_for<bf16, 1>(rows) : dot_words_for<bf16, 2>(rows);
      // Beside arithmetic the window of the processor is too short to keep memory busy, so a single pass of some rows
      // reads ahead in its own stream. Of several passes the second finds its weights in L1 and fetches the next stretch.
      Ahead ahead;
      if (num_blocks == 1 && rows >= kFewRows) {
        ahead = Ahead{panel.weights + first * step + kReadAhead, step, panel.nz};
      } else if (b == 1) {
        ahead = Ahead{panel.weights + (first + pairs) * step, step, panel.nz};
      }
      dot(panel.weights + first * step, step, pairs, job.x + row * job.x_stride + 2 * first, job.x_stride,
          scratch + row * width, first == 0, ahead);
    }
  }
  for (std::int64_t r = 0; r < job.rows; ++r) finish_row(job, panel, r, scratch + r * width);
}

void run_chunk(void* context, std::uint32_t chunk) {
  const Job& job = *static_cast<const Job*>(context);
  thread_local std::vector<float> scratch;
  if (scratch.size() < static_cast<std::size_t>(job.rows * kWidth)) {
    scratch.resize(static_cast<std::size_t>(job.rows * kWidth));
  }
  const std::int64_t first = chunk * job.panels_per_chunk;
  const std::int64_t end = std::min(job.num_panels, first + job.panels_per_chunk);
  for (std::int64_t index = first; index < end; ++index) run_panel(job, panel_at(job, index), scratch.data());
}

}  // namespace

PackedLinear::PackedLinear(std::span<const LinearPart> parts, std::int64_t in_features, bool gated,
                           Activation activation)
    : in_(in_features), pairs_((in_features + 1) / 2), gated_(gated), activation_(activation) {
  std::int64_t sum = 0;
  bool any_bias = false;
  for (const LinearPart& part : parts) {
    sum += part.out;
    part_sizes_.push_back(part.out);
    any_bias = any_bias || part.bias != nullptr;
  }
  if (gated && (parts.size() != 2 || parts[0].out != parts[1].out)) {
    throw std::invalid_argument("a gated pair needs two layers of equal size");
  }
  out_ = gated ? parts[0].out : sum;
  packed_ = gated ? (out_ + 15) / 16 * 32 : (out_ + 15) / 16 * 16;
  num_bytes_ = packed_ * pairs_ * 4;
  weights_.reset(static_cast<bf16*>(allocate(static_cast<std::size_t>(num_bytes_))));
  if (any_bias) bias_.reset(static_cast<float*>(allocate(static_cast<std::size_t>(packed_) * sizeof(float))));

  for (std::int64_t c = 0; c < packed_; ++c) {
    const Place at = place(c);
    const LinearPart& part = parts[static_cast<std::size_t>(at.part)];
    const bf16* source = at.row < part.out ? part.weight + at.row * part.stride : nullptr;
    std::int64_t step = 0;
    bf16* to = column(c, &step);
    for (std::int64_t p = 0; p < pairs_; ++p, to += step) {
      to[0] = source == nullptr ? bf16{0} : source[2 * p];
      to[1] = source == nullptr || 2 * p + 1 >= in_ ? bf16{0} : source[2 * p + 1];
    }
    if (any_bias) {
      const bool has = source != nullptr && part.bias != nullptr;
      bias_[static_cast<std::size_t>(c)] =
          has ? __builtin_bit_cast(float, static_cast<std::uint32_t>(part.bias[at.row]) << 16) : 0.0f;
    }
  }
}

// The part and row that a packed column holds; a gated pair alternates every 16 columns.
PackedLinear::Place PackedLinear::place(std::int64_t packed_column) const {
  if (gated_) return {packed_column / 16 % 2, packed_column / 32 * 16 + packed_column % 16};
  Place at{0, packed_column};
  const auto last = static_cast<std::int64_t>(part_sizes_.size()) - 1;
  while (at.part < last && at.row >= part_sizes_[static_cast<std::size_t>(at.part)]) {
    at.row -= part_sizes_[static_cast<std::size_t>(at.part++)];
  }
  return at;
}

// Where a packed column begins, and the elements from pair to pair.
bf16* PackedLinear::column(std::int64_t packed_column, std::int64_t* step) const {
  const std::int64_t panel = packed_column / kWidth;
  *step = 32 * std::min<std::int64_t>(kRegisters, (packed_ - panel * kWidth) / 16);
  return weights_.get() + panel * kWidth * 2 * pairs_ + 2 * (packed_column % kWidth);
}

void PackedLinear::unpack(std::int64_t part, bf16* weight) const {
  for (std::int64_t c = 0; c < packed_; ++c) {
    const Place at = place(c);
    if (at.part != part || at.row >= part_sizes_[static_cast<std::size_t>(part)]) continue;
    std::int64_t step = 0;
    const bf16* from = column(c, &step);
    for (std::int64_t i = 0; i < in_; ++i) weight[at.row * in_ + i] = from[i / 2 * step + i % 2];
  }
}

void PackedLinear::apply(const bf16* x, std::int64_t rows, std::int64_t x_stride, void* y, std::int64_t y_stride,
                         bool y_float32, int num_threads) const {
  if (rows <= 0 || out_ == 0) return;
  std::vector<bf16> padded;
  if (in_ % 2 != 0) {  // the last pair's second half must be a zero, not the neighbour's value
    padded.assign(static_cast<std::size_t>(rows * 2 * pairs_), 0);
    for (std::int64_t r = 0; r < rows; ++r) {
      std::copy_n(x + r * x_stride, in_, padded.data() + r * 2 * pairs_);
    }
    x = padded.data();
    x_stride = 2 * pairs_;
  }
  const std::int64_t num_panels = (packed_ + kWidth - 1) / kWidth;
  const std::int64_t per_chunk = std::max<std::int64_t>(1, num_panels / (8 * std::max(1, num_threads)));
  Job job{weights_.get(), bias_.get(), out_, packed_,  pairs_,    gated_,     activation_, x,
          rows,           x_stride,    y,    y_stride, y_float32, num_panels, per_chunk};
  parallel_for(num_threads, static_cast<std::uint32_t>((num_panels + per_chunk - 1) / per_chunk), &run_chunk, &job);
}

void gated_mlp(const PackedLinear& gate_up, const PackedLinear& down, const bf16* x, std::int64_t rows,
               std::int64_t x_stride, bf16* y, std::int64_t y_stride, int num_threads) {
  thread_local std::vector<bf16> hidden;
  const std::int64_t width = gate_up.out_features();
  if (hidden.size() < static_cast<std::size_t>(rows * width)) hidden.resize(static_cast<std::size_t>(rows * width));
  gate_up.apply(x, rows, x_stride, hidden.data(), width, false, num_threads);
  down.apply(hidden.data(), rows, width, y, y_stride, false, num_threads);
}

#else  // not x86-64: nobody may call these, since kernels_supported() is false

bool kernels_supported() { return false; }

PackedLinear::PackedLinear(std::span<const LinearPart>, std::int64_t in_features, bool gated, Activation activation)
    : in_(in_features), out_(0), pairs_(0), packed_(0), gated_(gated), activation_(activation) {
  throw std::runtime_error("the packed kernels need AVX512_BF16");
}

void PackedLinear::apply(const bf16*, std::int64_t, std::int64_t, void*, std::int64_t, bool, int) const {}
void PackedLinear::unpack(std::int64_t, bf16*) const {}
void gated_mlp(const PackedLinear&, const PackedLinear&, const bf16*, std::int64_t, std::int64_t, bf16*, std::int64_t,
               int) {}

#endif

PackedLinear::PackedLinear(std::span<const LinearPart> parts, std::int64_t in_features)
    : PackedLinear(parts, in_features, false, Activation::kSilu) {}

std::unique_ptr<PackedLinear> PackedLinear::gated(std::span<const LinearPart> parts, std::int64_t in_features,
                                                  Activation activation) {
  return std::unique_ptr<PackedLinear>(new PackedLinear(parts, in_features, true, activation));
}

}  // namespace dartspec
