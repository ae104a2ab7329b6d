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

#else

void DecoderLayer::begin(const bf16*, std::int64_t, const bf16*, const bf16*, std::int64_t, std::int64_t, bf16*,
                         int) const {}
void DecoderLayer::finish(const bf16*, const bf16*, AttentionArgs, bf16*) const {}

#endif

}  // namespace dartspec
