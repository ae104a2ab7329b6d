// CPU kernels for bfloat16 models, for processors with AVX512_BF16.
//
// The one promise: **a row's result does not depend on the rows computed beside it**, nor on the number of threads.
// Every sum over input features or keys is one chain in ascending order whatever the blocking; lanes are outputs.
// bfloat16 values are passed as their 16 bits. Strides count elements. Nothing here allocates the caller's buffers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace dartspec {

using bf16 = std::uint16_t;

// Whether this processor and this build can run the kernels below; calling them where it is false is undefined.
bool kernels_supported();

enum class Activation : int { kSilu = 0, kGeluTanh = 1, kGelu = 2, kRelu = 3 };

// One nn.Linear: weight (out, in) with `stride` elements from row to row, bias (out) or null.
struct LinearPart {
  const bf16* weight;
  std::int64_t out;
  std::int64_t stride;
  const bf16* bias;
};

// Weights of one or several linear layers with the same input, copied once into panels of 32 outputs x pairs of
// inputs, in the order in which they are read. y = x W^T + b with float32 accumulation, pairs of inputs in ascending
// order, rounded once.
class PackedLinear {
 public:
  PackedLinear(std::span<const LinearPart> parts, std::int64_t in_features);

  // The two halves of a gated MLP, interleaved, so that act(gate) * up is formed where both are at hand.
  // parts[0] is the gate, parts[1] the up projection, of equal size.
  static std::unique_ptr<PackedLinear> gated(std::span<const LinearPart> parts, std::int64_t in_features,
                                             Activation activation);

  std::int64_t in_features() const { return in_; }
  // Columns of y: the sum over the parts, or the gate's alone for a gated pair.
  std::int64_t out_features() const { return out_; }
  std::int64_t num_bytes() const { return num_bytes_; }

  // Writes the weight of the part as it was given: (out, in) bf16, contiguous.
  void unpack(std::int64_t part, bf16* weight) const;

  // x (rows, in) bf16; y (rows, out_features) bf16, or float32 when `y_float32`. A gated pair rounds gate, up,
  // act(gate) and the product to bf16 each, as separate operations would.
  void apply(const bf16* x, std::int64_t rows, std::int64_t x_stride, void* y, std::int64_t y_stride, bool y_float32,
             int num_threads) const;

 private:
  PackedLinear(std::span<const LinearPart> parts, std::int64_t in_features, bool gated, Activation activation);

  struct Place {
    std::int64_t part, row;  // row may lie beyond the part: padding
  };
  Place place(std::int64_t packed_column) const;
  bf16* column(std::int64_t packed_column, std::int64_t* step) const;

  struct Free {
    void operator()(void* p) const;
  };
  std::int64_t in_, out_, pairs_;
  std::int64_t packed_;  // columns in packed order, a multiple of 16
  std::int64_t num_bytes_ = 0;
  std::vector<std::int64_t> part_sizes_;
  bool gated_;
  Activation activation_;
  std::unique_ptr<bf16[], Free> weights_;
  std::unique_ptr<float[], Free> bias_;  // in packed column order, or null
};

// down(act(gate(x)) * up(x)): x (rows, gate_up.in_features) to y (rows, down.out_features), bf16.
void gated_mlp(const PackedLinear& gate_up, const PackedLinear& down, const bf16* x, std::int64_t rows,
               std::int64_t x_stride, bf16* y, std::int64_t y_stride, int num_threads);

// How a model's RMSNorm rounds; all take the mean of squares in float32.
enum class NormKind : int {
  kRoundThenScale = 0,  // bf16(bf16(x / rms) * w): Llama
  kScaleOnce = 1,       // bf16(x / rms * w): OLMo 2
  kScaleOnePlus = 2,    // bf16(x / rms * (1 + w)): Gemma
};

// Rows of x (rows, size) to y, bf16; the sum of squares in one fixed order of lanes.
void rms_norm(const bf16* x, std::int64_t rows, std::int64_t x_stride, std::int64_t size, const bf16* weight, float eps,
              NormKind kind, bf16* y, std::int64_t y_stride);

// Queries and keys made ready in place: optional RMSNorm over each head (null: none), then rotary embedding of the first
// `rotary` of `dim` values, halves rotated against each other, every product and sum rounded to bf16 as separate
// operations would. heads: the row's first (q_heads + k_heads) * dim values; what follows (values) is left alone.
// cos, sin: (cos_rows, rotary) bf16, row r takes r % cos_rows.
struct HeadArgs {
  bf16* heads;
  std::int64_t rows, stride, q_heads, k_heads, dim, rotary;
  const bf16 *cos, *sin;
  std::int64_t cos_rows;
  const bf16 *q_norm, *k_norm;
  float eps;
  NormKind kind;
};
void prepare_heads(const HeadArgs& args);

// Attention over a cache. Tensors may be strided in all dimensions but the last, which is contiguous.
struct AttentionArgs {
  const void* q;              // (batch, heads, rows, dim)
  const void* k;              // (batch, kv_heads, keys, dim)
  const void* v;              // (batch, kv_heads, keys, value_dim)
  const std::uint8_t* mask;   // (batch, heads, rows, keys), nonzero = may be seen; strides of 0 broadcast; or null
  void* out;                  // (batch, heads, rows, value_dim)
  std::int64_t batch, heads, kv_heads, rows, keys, dim, value_dim;
  std::array<std::int64_t, 3> q_stride, k_stride, v_stride, mask_stride, out_stride;  // batch, head, row or key
  float scale;
  float softcap;  // scores become softcap * tanh(score / softcap); 0: none
  bool causal;    // without a mask: row n sees the keys up to keys - rows + n
  bool is_float32;
  int num_threads;
};

// out = softmax(scale q k^T over the keys that a row may see) v, float32 inside, rounded once.
// A row's result depends on its query and on the *sequence* of the keys and values that it may see, in ascending order:
// not on where they lie, nor on the other rows, nor on the unseen keys' contents. A row that sees nothing gives zeros.
void attention(const AttentionArgs& args);

// One decoder layer of the form  h = x + out(attention(norm(x))),  y = h + mlp(norm(h)),  in two calls with the cache's
// own update between them. What it computes is what the functions above compute one by one, bit for bit.
struct Norm {
  const bf16* weight;
  float eps;
  NormKind kind;
};

class DecoderLayer {
 public:
  const PackedLinear *qkv, *out, *gate_up, *down;
  Norm first, second;             // before attention, before the MLP
  const bf16 *q_norm, *k_norm;    // over each head, or null
  float head_eps;
  NormKind head_kind;
  std::int64_t heads, kv_heads, dim;

  // x (rows, hidden) contiguous to qkv (rows, (heads + 2 kv_heads) dim) contiguous: normed, projected, rotated.
  void begin(const bf16* x, std::int64_t rows, const bf16* cos, const bf16* sin, std::int64_t cos_rows,
             std::int64_t rotary, bf16* heads_out, int num_threads) const;

  // The rest: `args` says where keys, values and mask are (out and the sizes that the layer knows are set here);
  // x as in begin, y (rows, hidden) contiguous.
  void finish(const bf16* x, const bf16* heads_in, AttentionArgs args, bf16* y) const;
};

// Where a cache keeps one layer's keys or values: element (sequence, head, position) begins at
// data + sequence * stride[0] + head * stride[1] + position * stride[2].
struct CacheArgs {
  std::span<bf16* const> keys, values;  // one a layer
  std::array<std::int64_t, 3> stride;   // of keys and of values
  std::span<const std::int64_t> starts;  // each sequence's first new position
};

// All decoder layers of a model in one call, their new keys and values written into the cache between the two halves of
// each. What comes out is what the layers give one by one, bit for bit.
// x (rows, hidden), y (layers, rows, hidden): every layer's output. args: as in `finish`, without k and v.
void run_layers(std::span<const DecoderLayer* const> layers, const bf16* x, const bf16* cos, const bf16* sin,
                std::int64_t cos_rows, std::int64_t rotary, const CacheArgs& cache, AttentionArgs args, bf16* y);

}  // namespace dartspec
