#include <algorithm>
#include <vector>

#include "kernels.hpp"
#include "kernels_simd.hpp"

namespace dartspec {

#if defined(__x86_64__)

namespace {

using namespace simd;

// y = bf16(a + b); y may be a or b.
DARTSPEC_SIMD void add(const bf16* a, const bf16* b, std::int64_t size, bf16* y) {
  for (std::int64_t i = 0; i < size; i += 16) {
    const __mmask16 lanes = first_lanes(size - i);
    store_bf16(y + i, _mm512_add_ps(load_bf16(a + i, lanes), load_bf16(b + i, lanes)), lanes);
  }
}

bf16* buffer(std::vector<bf16>& memory, std::int64_t size) {
  if (memory.size() < static_cast<std::size_t>(size)) memory.resize(static_cast<std::size_t>(size));
  return memory.data();
}

}  // namespace

void DecoderLayer::begin(const bf16* x, std::int64_t rows, const bf16* cos, const bf16* sin, std::int64_t cos_rows,
                         std::int64_t rotary, bf16* heads_out, int num_threads) const {
  thread_local std::vector<bf16> memory;
  const std::int64_t hidden = qkv->in_features(), width = qkv->out_features();
  bf16* normed = buffer(memory, rows * hidden);
  rms_norm(x, rows, hidden, hidden, first.weight, first.eps, first.kind, normed, hidden);
  qkv->apply(normed, rows, hidden, heads_out, width, false, num_threads);
  prepare_heads({heads_out, rows, width, heads, kv_heads, dim, rotary, cos, sin, cos_rows, q_norm, k_norm, head_eps,
                 head_kind});
}

void DecoderLayer::finish(const bf16* x, const bf16* heads_in, AttentionArgs args, bf16* y) const {
  thread_local std::vector<bf16> attended_memory, normed_memory;
  const std::int64_t rows = args.batch * args.rows, hidden = out->out_features(), inner = heads * dim;
  const std::int64_t width = qkv->out_features();
  bf16* attended = buffer(attended_memory, rows * inner);
  bf16* normed = buffer(normed_memory, rows * hidden);
  args.q = heads_in;
  args.out = attended;
  args.heads = heads;
  args.kv_heads = kv_heads;
  args.dim = args.value_dim = dim;
  args.q_stride = {args.rows * width, dim, width};
  args.out_stride = {args.rows * inner, dim, inner};
  args.is_float32 = false;
  attention(args);
  out->apply(attended, rows, inner, y, hidden, false, args.num_threads);
  add(x, y, rows * hidden, y);
  rms_norm(y, rows, hidden, hidden, second.weight, second.eps, second.kind, normed, hidden);
  gated_mlp(*gate_up, *down, normed, rows, hidden, normed, hidden, args.num_threads);
  add(y, normed, rows * hidden, y);
}

void run_layers(std::span<const DecoderLayer* const> layers, const bf16* x, const bf16* cos, const bf16* sin,
                std::int64_t cos_rows, std::int64_t rotary, const CacheArgs& cache, AttentionArgs args, bf16* y) {
  thread_local std::vector<bf16> memory;
  const std::int64_t rows = args.batch * args.rows;
  args.k_stride = args.v_stride = cache.stride;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const DecoderLayer& layer = *layers[i];
    const std::int64_t width = layer.qkv->out_features(), dim = layer.dim;
    const std::int64_t key_at = layer.heads * dim, value_at = (layer.heads + layer.kv_heads) * dim;
    bf16* heads = buffer(memory, rows * width);
    layer.begin(x, rows, cos, sin, cos_rows, rotary, heads, args.num_threads);
    for (std::int64_t b = 0; b < args.batch; ++b) {
      for (std::int64_t n = 0; n < args.rows; ++n) {
        const bf16* row = heads + (b * args.rows + n) * width;
        const std::int64_t at = cache.starts[static_cast<std::size_t>(b)] + n;
        for (std::int64_t h = 0; h < layer.kv_heads; ++h) {
          const std::int64_t to = b * cache.stride[0] + h * cache.stride[1] + at * cache.stride[2];
          std::copy_n(row + key_at + h * dim, dim, cache.keys[i] + to);
          std::copy_n(row + value_at + h * dim, dim, cache.values[i] + to);
        }
      }
    }
    args.k = cache.keys[i];
    args.v = cache.values[i];
    const std::int64_t hidden = layer.out->out_features();
    layer.finish(x, heads, args, y);
    x = y;
    y += rows * hidden;
  }
}

#else

void run_layers(std::span<const DecoderLayer* const>, const bf16*, const bf16*, const bf16*, std::int64_t,
                std::int64_t, const CacheArgs&, AttentionArgs, bf16*) {}
void DecoderLayer::begin(const bf16*, std::int64_t, const bf16*, const bf16*, std::int64_t, std::int64_t, bf16*,
                         int) const {}
void DecoderLayer::finish(const bf16*, const bf16*, AttentionArgs, bf16*) const {}

#endif

}  // namespace dartspec
