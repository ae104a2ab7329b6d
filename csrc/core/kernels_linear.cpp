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

constexpr std::int64_t kPairBlock = 1024;  // pairs of one panel kept in L2 while the row blocks pass: 256 KiB

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
  bool halves;  // a unit is half a panel: where panels are few, so that threads end together
  std::int64_t num_units, units_per_chunk;
  int num_threads;
};

// Some neighbouring outputs: a panel or half of one.
struct Unit {
  const bf16* weights;  // of its first pair
  std::int64_t step;    // elements from pair to pair
  std::int64_t column;  // first packed column
  int nz;               // registers of outputs; 0: nothing here
};

Unit unit_at(const Job& job, std::int64_t index) {
  if (index >= job.num_units) return {nullptr, 0, 0, 0};
  const std::int64_t panel = job.halves ? index / 2 : index;
  const int panel_nz = static_cast<int>(std::min<std::int64_t>(4, (job.packed - panel * kPanel) / 16));
  const int first = job.halves ? 2 * static_cast<int>(index % 2) : 0;
  const int nz = std::max(0, std::min(job.halves ? 2 : 4, panel_nz - first));
  return {job.weights + panel * kPanel * 2 * job.pairs + 32 * first, 32 * panel_nz, panel * kPanel + 16 * first, nz};
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

// Bias, rounding and the store of one row of one unit.
DARTSPEC_SIMD_INLINE void finish_row(const Job& job, const Unit& unit, std::int64_t row, const float* acc) {
  for (int z = 0; z < unit.nz; z += job.gated ? 2 : 1) {
    const std::int64_t packed = unit.column + 16 * z;
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

DotWords<bf16> dot_words_for_unit(int rows, int nz) {
  return nz == 1   ? dot_words_for<bf16, 1>(rows)
         : nz == 2 ? dot_words_for<bf16, 2>(rows)
         : nz == 3 ? dot_words_for<bf16, 3>(rows)
                   : dot_words_for<bf16, 4>(rows);
}

// All rows of one unit; `next` is read ahead meanwhile, spread over the row blocks.
DARTSPEC_SIMD void run_unit(const Job& job, const Unit& unit, const Unit& next, float* scratch) {
  const std::int64_t most = max_rows(unit.nz), num_blocks = (job.rows + most - 1) / most;
  const std::int64_t block = num_blocks == 1 ? job.pairs : kPairBlock;
  const bool one_pass = job.pairs <= block;
  alignas(64) float local[kMaxRows * kPanel];
  for (std::int64_t first = 0; first == 0 || first < job.pairs; first += block) {
    const std::int64_t pairs = std::min(block, job.pairs - first);
    const bool last = first + pairs >= job.pairs;
    const Unit ahead = last ? next : Unit{unit.weights + (first + pairs) * unit.step, unit.step, 0, unit.nz};
    for (std::int64_t b = 0; b < num_blocks; ++b) {
      const std::int64_t row = b * job.rows / num_blocks, end = (b + 1) * job.rows / num_blocks;
      const int line = static_cast<int>(b * ahead.nz / num_blocks);
      const int lines = static_cast<int>((b + 1) * ahead.nz / num_blocks) - line;
      float* acc = one_pass ? local : scratch + row * kPanel;
      dot_words_for_unit(static_cast<int>(end - row), unit.nz)(
          unit.weights + first * unit.step, unit.step, pairs, job.x + row * job.x_stride + 2 * first, job.x_stride, acc,
          first == 0, lines == 0 ? Ahead{} : Ahead{ahead.weights + 32 * line, ahead.step, lines});
      if (!last) continue;
      for (std::int64_t r = row; r < end; ++r) finish_row(job, unit, r, acc + (r - row) * kPanel);
    }
  }
}

void run_chunk(void* context, std::uint32_t chunk) {
  const Job& job = *static_cast<const Job*>(context);
  thread_local std::vector<float> scratch;
  float* rows = nullptr;
  if (job.pairs > kPairBlock && job.rows > max_rows(4)) {
    scratch.resize(static_cast<std::size_t>(job.rows * kPanel));
    rows = scratch.data();
  }
  const std::int64_t first = chunk * job.units_per_chunk;
  const std::int64_t end = std::min(job.num_units, first + job.units_per_chunk);
  for (std::int64_t index = first; index < end; ++index) {
    const Unit unit = unit_at(job, index);
    if (unit.nz == 0) continue;
    // After its last unit a thread most likely takes the chunk that lies num_threads further on.
    run_unit(job, unit, unit_at(job, index + 1 < end ? index + 1 : first + job.num_threads * job.units_per_chunk), rows);
  }
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
  const std::int64_t panel = packed_column / kPanel;
  *step = 32 * std::min<std::int64_t>(4, (packed_ - panel * kPanel) / 16);
  return weights_.get() + panel * kPanel * 2 * pairs_ + 2 * (packed_column % kPanel);
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
  const std::int64_t num_panels = (packed_ + kPanel - 1) / kPanel;
  const bool halves = num_threads > 1 && num_panels < 16 * num_threads;
  const std::int64_t num_units = num_panels * (halves ? 2 : 1);
  const std::int64_t per_chunk = std::max<std::int64_t>(1, num_units / (16 * std::max(1, num_threads)));
  Job job{weights_.get(), bias_.get(), out_,      packed_,   pairs_, gated_,    activation_, x,          rows,
          x_stride,       y,           y_stride,  y_float32, halves, num_units, per_chunk,   num_threads};
  parallel_for(num_threads, static_cast<std::uint32_t>((num_units + per_chunk - 1) / per_chunk), &run_chunk, &job);
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
