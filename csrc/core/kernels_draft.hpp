// CPU kernels for drafters alone: they may round as they like, since the target decides. For processors with AVX512_BF16
// and AVX512_VNNI.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.hpp"

namespace dartspec {

// Whether this processor and this build can run what follows; calling it where it is false is undefined.
bool draft_kernels_supported();

// One nn.Linear with weights of 8 bits: half the memory to read of bfloat16, which is what a product of few rows costs.
// Each output has a scale of its own (largest weight = 127), each row of x another; sums are whole numbers, exact.
class Int8Linear {
 public:
  // weight (out, in) bf16, contiguous.
  Int8Linear(const bf16* weight, std::int64_t out, std::int64_t in);

  std::int64_t in_features() const { return in_; }
  std::int64_t out_features() const { return out_; }
  std::int64_t num_bytes() const;

  // x (rows, in) bf16, `x_stride` elements apart; y (rows, out) float32, contiguous. A row that holds a number which is
  // not finite gives NaN.
  void apply(const bf16* x, std::int64_t rows, std::int64_t x_stride, float* y, int num_threads) const;

 private:
  std::int64_t out_, in_, groups_, panels_;
  std::vector<float> scale_;
  std::vector<std::int32_t> sum_;  // of an output's weights, for the activations' offset
  struct Free {
    void operator()(void* p) const;
  };
  std::unique_ptr<std::int8_t[], Free> weights_;  // panels of 32 outputs, groups of 4 inputs
};

// Per row of logits (rows, size) float32: the k likeliest entries, best first, ties to the lowest index, and the log of
// their softmax over the row. A row whose largest entry is not finite, or that holds a NaN, gives -inf throughout.
// log_probs (rows, k) float32; index (rows, k) int32; 1 <= k <= size.
void top_log_probs(const float* logits, std::int64_t rows, std::int64_t size, std::int64_t k, float* log_probs,
                   std::int32_t* index);

// One round of a drafter of DART's form for one sequence (`drafters/dart.py`): the layer over `rows` new clean rows and the
// masks behind them. What it computes is what the kernels of kernels.hpp compute one by one, bit for bit.
class DraftLayer {
 public:
  const PackedLinear *fc, *qkv, *out, *gate_up, *down;
  Norm embedding, feature, second, last;
  std::int64_t heads, kv_heads, dim, masks;
  bool last_twice;
  const bf16 *mask_residual, *mask_qkv;  // (hidden), ((heads + 2 kv_heads) dim): all masks are alike

  // features (rows, fc.in), embeddings (rows, hidden); cos, sin: (>= at + rows + masks, dim) float32; keys, values:
  // (kv_heads, capacity, dim), `head_stride` elements from head to head, the first `at` positions filled: the clean rows'
  // follow, and the masks' behind them. y (masks + 1, hidden): the last clean row and the masks, final norm applied.
  void run(const bf16* features, const bf16* embeddings, std::int64_t rows, const float* cos, const float* sin,
           bf16* keys, bf16* values, std::int64_t head_stride, std::int64_t at, bf16* y, int num_threads) const;
};

}  // namespace dartspec
