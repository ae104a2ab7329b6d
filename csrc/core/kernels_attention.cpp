#include <algorithm>
#include <stdexcept>
#include <vector>

#include "kernels.hpp"
#include "kernels_pool.hpp"
#include "kernels_simd.hpp"

namespace dartspec {

#if defined(__x86_64__)

namespace {

using namespace simd;

constexpr std::int64_t kBlock = kPanel;  // keys that are scored together: one panel
constexpr std::int64_t kGroup = 6;       // rows that share a load of a key or value
constexpr std::int64_t kMaxChunk = 96;   // rows that share a packed block of keys
constexpr std::int64_t kScoreBytes = std::int64_t{512} << 10;

// One thread's memory, kept between calls.
template <class T>
struct Scratch {
  std::vector<T> queries;            // (rows, padded dim)
  std::vector<T> panel;              // (words, kBlock, values per word)
  std::vector<float> scores;         // (blocks in use, rows, kBlock): scores, then weights
  std::vector<std::uint64_t> seen;   // (blocks in use, rows): bit j: the row may see key j of the block
  std::vector<std::int64_t> blocks;  // indices of the blocks in use
  std::vector<float> inverse;        // (rows): 1 / sum of weights
};

struct Job {
  AttentionArgs args;
  std::int64_t chunk_rows;  // in rows of the flattened (batch, kv head, row, head of the group)
};

// Rows [first, end) of one (batch, kv head), in the order n * group + g: heads of a group share mask and keys.
struct Segment {
  std::int64_t batch, kv_head, first, end;
};

template <class T>
DARTSPEC_SIMD_INLINE __m512 load(const T* p, __mmask16 mask) {
  if constexpr (sizeof(T) == 2) return load_bf16(p, mask);
  else return _mm512_maskz_loadu_ps(mask, p);
}

// 16 x 16 words: out[16 i] <- column i.
DARTSPEC_SIMD_INLINE void transpose(const __m512i (&r)[16], __m512i (&out)[16]) {
  __m512i t[16], u[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  // u[4 g + j]: in its 128-bit lane L, column 4 L + j of rows 4 g .. 4 g + 3
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    u[4 * g] = _mm512_unpacklo_epi64(t[4 * g], t[4 * g + 2]);
    u[4 * g + 1] = _mm512_unpackhi_epi64(t[4 * g], t[4 * g + 2]);
    u[4 * g + 2] = _mm512_unpacklo_epi64(t[4 * g + 1], t[4 * g + 3]);
    u[4 * g + 3] = _mm512_unpackhi_epi64(t[4 * g + 1], t[4 * g + 3]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i a = _mm512_shuffle_i32x4(u[j], u[4 + j], 0x44), b = _mm512_shuffle_i32x4(u[j], u[4 + j], 0xEE);
    const __m512i c = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0x44);
    const __m512i d = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0xEE);
    out[j] = _mm512_shuffle_i32x4(a, c, 0x88);
    out[4 + j] = _mm512_shuffle_i32x4(a, c, 0xDD);
    out[8 + j] = _mm512_shuffle_i32x4(b, d, 0x88);
    out[12 + j] = _mm512_shuffle_i32x4(b, d, 0xDD);
  }
}

// What will be read soon: `lines` cache lines of each key or value, `stride` elements from one to the next. A stream of
// one sequence and head is too short for the processor to run ahead in it by itself.
template <class T>
struct Soon {
  const T* at = nullptr;
  std::int64_t stride = 0;
  int lines = 0;

  DARTSPEC_SIMD_INLINE void fetch(std::int64_t j) const {
    for (int i = 0; i < lines; ++i) _mm_prefetch(reinterpret_cast<const char*>(at + j * stride) + 64 * i, _MM_HINT_T1);
  }
};

template <class T>
constexpr int lines_of(std::int64_t dim) {
  return static_cast<int>((dim * static_cast<std::int64_t>(sizeof(T)) + 63) / 64);
}

// Keys [first, first + count) as a panel: word p of key j at panel[(p * kBlock + j) * values per word]; zeros after.
template <class T>
DARTSPEC_SIMD void pack_keys(const T* k, std::int64_t stride, std::int64_t count, std::int64_t dim, T* panel,
                             Soon<T> soon) {
  constexpr int kValues = 16 * kPerWord<T>;  // of one register
  for (std::int64_t j = 0; j < count; ++j) soon.fetch(j);
  for (std::int64_t d = 0; d < dim; d += kValues) {
    const std::int64_t words = std::min<std::int64_t>(16, (dim - d + kPerWord<T> - 1) / kPerWord<T>);
    for (std::int64_t j = 0; j < kBlock; j += 16) {
      __m512i rows[16], columns[16];
      for (std::int64_t i = 0; i < 16; ++i) {
        const T* key = k + (j + i) * stride + d;
        if (j + i >= count) {
          rows[i] = _mm512_setzero_si512();
        } else if (dim - d >= kValues) {
          rows[i] = _mm512_loadu_si512(key);
        } else if constexpr (sizeof(T) == 2) {
          rows[i] = _mm512_maskz_loadu_epi16((__mmask32{1} << (dim - d)) - 1, key);
        } else {
          rows[i] = _mm512_maskz_loadu_epi32(first_lanes(dim - d), key);
        }
      }
      transpose(rows, columns);
      T* to = panel + (d / kPerWord<T> * kBlock + j) * kPerWord<T>;
      for (std::int64_t p = 0; p < words; ++p) _mm512_storeu_si512(to + p * kBlock * kPerWord<T>, columns[p]);
    }
  }
}

// Which keys of the block a row may see.
DARTSPEC_SIMD std::uint64_t seen_keys(const AttentionArgs& a, std::int64_t batch, std::int64_t head, std::int64_t row,
                                      std::int64_t first) {
  const std::int64_t count = std::min(kBlock, a.keys - first);
  const std::uint64_t exist = count == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1;
  if (a.mask != nullptr) {
    const std::uint8_t* p =
        a.mask + batch * a.mask_stride[0] + head * a.mask_stride[1] + row * a.mask_stride[2] + first;
    const __m512i bytes = _mm512_maskz_loadu_epi8(exist, p);
    return _mm512_test_epi8_mask(bytes, bytes);
  }
  if (!a.causal) return exist;
  const std::int64_t visible = a.keys - a.rows + row + 1 - first;
  return visible <= 0 ? 0 : visible >= 64 ? exist : exist & ((std::uint64_t{1} << visible) - 1);
}

// Scores of one row to weights e^(score - max), zero where unseen. The sum is taken in integers of 2^-40, so that it
// does not depend on the lanes in which the keys lie; returns 1 / sum, or 0 for a row that sees nothing.
DARTSPEC_SIMD float softmax_row(const AttentionArgs& a, float* scores, std::int64_t stride, const std::uint64_t* seen,
                                std::int64_t seen_stride, std::int64_t num_blocks) {
  const __m512 scale = _mm512_set1_ps(a.scale), cap = _mm512_set1_ps(a.softcap);
  const __m512 minus_infinity = _mm512_set1_ps(-__builtin_inff());
  __m512 top = minus_infinity;
  for (std::int64_t b = 0; b < num_blocks; ++b) {
    const std::uint64_t bits = seen[b * seen_stride];
    if (bits == 0) continue;
    for (int z = 0; z < 4; ++z) {
      float* at = scores + b * stride + 16 * z;
      __m512 s = _mm512_mul_ps(_mm512_loadu_ps(at), scale);
      if (a.softcap != 0.0f) s = _mm512_mul_ps(cap, tanh(_mm512_div_ps(s, cap)));
      s = _mm512_mask_mov_ps(minus_infinity, static_cast<__mmask16>(bits >> (16 * z)), s);
      top = _mm512_max_ps(top, s);
      _mm512_storeu_ps(at, s);
    }
  }
  const float most = _mm512_reduce_max_ps(top);
  if (most == -__builtin_inff()) return 0.0f;
  const __m512 highest = _mm512_set1_ps(most), unit = _mm512_set1_ps(0x1p40f);
  __m512i sum = _mm512_setzero_si512();
  for (std::int64_t b = 0; b < num_blocks; ++b) {
    if (seen[b * seen_stride] == 0) continue;
    for (int z = 0; z < 4; ++z) {
      float* at = scores + b * stride + 16 * z;
      const __m512 p = exp(_mm512_sub_ps(_mm512_loadu_ps(at), highest));  // unseen: e^-inf = 0
      _mm512_storeu_ps(at, p);
      const __m512 fixed = _mm512_mul_ps(p, unit);
      sum = _mm512_add_epi64(sum, _mm512_cvtps_epi64(_mm512_castps512_ps256(fixed)));
      sum = _mm512_add_epi64(sum, _mm512_cvtps_epi64(_mm512_extractf32x8_ps(fixed, 1)));
    }
  }
  return static_cast<float>(0x1p40 / static_cast<double>(_mm512_reduce_add_epi64(sum)));
}

// One block of keys onto R rows' outputs: acc[r] += weight[r][j] * v[j] for each seen key j in ascending order.
template <class T, int R, int NZ>
DARTSPEC_SIMD_INLINE void add_values(__m512 (&acc)[R][NZ], const float* weights, const std::uint64_t* seen, const T* v,
                                     std::int64_t stride, const __mmask16 (&lanes)[NZ], Soon<T> soon) {
  std::uint64_t all = ~std::uint64_t{0}, any = 0;
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) all &= seen[r], any |= seen[r];
  for (; any != 0; any &= any - 1) {
    const int j = __builtin_ctzll(any);
    soon.fetch(j);
    __m512 value[NZ];
#pragma GCC unroll 4
    for (int z = 0; z < NZ; ++z) value[z] = load(v + j * stride + 16 * z, lanes[z]);
    if (all >> j & 1) {
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const __m512 weight = _mm512_set1_ps(weights[r * kBlock + j]);
#pragma GCC unroll 4
        for (int z = 0; z < NZ; ++z) acc[r][z] = _mm512_fmadd_ps(weight, value[z], acc[r][z]);
      }
    } else {  // an unseen key adds nothing, not even a zero times something
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        if ((seen[r] >> j & 1) == 0) continue;
        const __m512 weight = _mm512_set1_ps(weights[r * kBlock + j]);
#pragma GCC unroll 4
        for (int z = 0; z < NZ; ++z) acc[r][z] = _mm512_fmadd_ps(weight, value[z], acc[r][z]);
      }
    }
  }
}

// Columns [d, d + 16 NZ) of R rows' outputs.
template <class T, int R, int NZ>
DARTSPEC_SIMD void output_rows(const Job& job, const Segment& segment, Scratch<T>& s, std::int64_t row,
                               std::int64_t d, Soon<T> soon) {
  const AttentionArgs& a = job.args;
  const std::int64_t num_rows = segment.end - segment.first, group = a.heads / a.kv_heads;
  const T* v = static_cast<const T*>(a.v) + segment.batch * a.v_stride[0] + segment.kv_head * a.v_stride[1] + d;
  __mmask16 lanes[NZ];
  __m512 acc[R][NZ];
#pragma GCC unroll 4
  for (int z = 0; z < NZ; ++z) {
    lanes[z] = first_lanes(a.value_dim - d - 16 * z);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) acc[r][z] = _mm512_setzero_ps();
  }
  for (std::size_t b = 0; b < s.blocks.size(); ++b) {
    const std::size_t at = b * static_cast<std::size_t>(num_rows) + static_cast<std::size_t>(row);
    add_values<T, R, NZ>(acc, s.scores.data() + at * kBlock, s.seen.data() + at,
                         v + s.blocks[b] * kBlock * a.v_stride[2], a.v_stride[2], lanes,
                         {soon.at + s.blocks[b] * kBlock * soon.stride, soon.stride, soon.lines});
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    const std::int64_t index = segment.first + row + r, n = index / group;
    const std::int64_t head = segment.kv_head * group + index % group;
    T* out = static_cast<T*>(a.out) + segment.batch * a.out_stride[0] + head * a.out_stride[1];
    out += n * a.out_stride[2] + d;
    const __m512 inverse = _mm512_set1_ps(s.inverse[static_cast<std::size_t>(row + r)]);
#pragma GCC unroll 4
    for (int z = 0; z < NZ; ++z) {
      const __m512 value = _mm512_mul_ps(acc[r][z], inverse);
      if constexpr (sizeof(T) == 2) store_bf16(out + 16 * z, value, lanes[z]);
      else _mm512_mask_storeu_ps(out + 16 * z, lanes[z], value);
    }
  }
}

template <class T, int NZ>
void output_group(const Job& job, const Segment& segment, Scratch<T>& s, std::int64_t row, std::int64_t count,
                  std::int64_t d, Soon<T> soon) {
  using Output = void (*)(const Job&, const Segment&, Scratch<T>&, std::int64_t, std::int64_t, Soon<T>);
  static constexpr Output outputs[kGroup] = {&output_rows<T, 1, NZ>, &output_rows<T, 2, NZ>, &output_rows<T, 3, NZ>,
                                             &output_rows<T, 4, NZ>, &output_rows<T, 5, NZ>, &output_rows<T, 6, NZ>};
  outputs[count - 1](job, segment, s, row, d, soon);
}

template <class T>
void run_segment(const Job& job, const Segment& segment, Scratch<T>& s) {
  const AttentionArgs& a = job.args;
  const std::int64_t num_rows = segment.end - segment.first, group = a.heads / a.kv_heads;
  const std::int64_t words = (a.dim + kPerWord<T> - 1) / kPerWord<T>, padded = words * kPerWord<T>;
  const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };

  s.queries.assign(size(num_rows * padded), T{});
  for (std::int64_t r = 0; r < num_rows; ++r) {
    const std::int64_t n = (segment.first + r) / group, head = segment.kv_head * group + (segment.first + r) % group;
    const T* q = static_cast<const T*>(a.q) + segment.batch * a.q_stride[0] + head * a.q_stride[1] + n * a.q_stride[2];
    std::copy_n(q, a.dim, s.queries.data() + r * padded);
  }

  s.panel.resize(size((words + 15) / 16 * 16 * kBlock * kPerWord<T>));
  s.blocks.clear();
  s.seen.clear();
  for (std::int64_t block = 0; block * kBlock < a.keys; ++block) {
    const std::size_t at = s.seen.size();
    s.seen.resize(at + size(num_rows));
    std::uint64_t any = 0;
    for (std::int64_t r = 0; r < num_rows; ++r) {
      const std::int64_t index = segment.first + r;
      // Heads of a group follow one another: without a mask by head they see the same.
      const bool same = r > 0 && index % group != 0 && (a.mask == nullptr || a.mask_stride[1] == 0);
      s.seen[at + size(r)] = same ? s.seen[at + size(r) - 1]
                                  : seen_keys(a, segment.batch, segment.kv_head * group + index % group, index / group,
                                              block * kBlock);
      any |= s.seen[at + size(r)];
    }
    if (any == 0) s.seen.resize(at);
    else s.blocks.push_back(block);
  }

  const std::int64_t num_blocks = static_cast<std::int64_t>(s.blocks.size());
  if (s.scores.size() < size(num_blocks * num_rows * kBlock)) s.scores.resize(size(num_blocks * num_rows * kBlock));
  const T* k = static_cast<const T*>(a.k) + segment.batch * a.k_stride[0] + segment.kv_head * a.k_stride[1];
  const T* v = static_cast<const T*>(a.v) + segment.batch * a.v_stride[0] + segment.kv_head * a.v_stride[1];
  const std::int64_t num_groups = (num_rows + kGroup - 1) / kGroup;
  for (std::int64_t b = 0; b < num_blocks; ++b) {
    const std::int64_t first = s.blocks[size(b)] * kBlock;
    pack_keys(k + first * a.k_stride[2], a.k_stride[2], std::min(kBlock, a.keys - first), a.dim, s.panel.data(),
              {v + first * a.v_stride[2], a.v_stride[2], lines_of<T>(a.value_dim)});
    for (std::int64_t i = 0; i < num_groups; ++i) {
      const std::int64_t row = i * num_rows / num_groups, end = (i + 1) * num_rows / num_groups;
      std::uint64_t any = 0;
      for (std::int64_t r = row; r < end; ++r) any |= s.seen[size(b * num_rows + r)];
      if (any == 0) continue;
      dot_words_for<T, 4>(static_cast<int>(end - row))(s.panel.data(), kBlock * kPerWord<T>, words,
                                                       s.queries.data() + row * padded, padded,
                                                       s.scores.data() + (b * num_rows + row) * kBlock, true, Ahead{});
    }
  }

  s.inverse.resize(size(num_rows));
  for (std::int64_t r = 0; r < num_rows; ++r) {
    s.inverse[size(r)] = softmax_row(a, s.scores.data() + r * kBlock, num_rows * kBlock, s.seen.data() + r, num_rows,
                                     num_blocks);
  }

  // The keys of the head that comes next, as far as this one's reach, are fetched beside the last outputs.
  Soon<T> next_keys;
  if (segment.kv_head + 1 < a.kv_heads) {
    next_keys = {k + a.k_stride[1], a.k_stride[2], lines_of<T>(a.dim)};
  } else if (segment.batch + 1 < a.batch) {
    next_keys = {k + a.k_stride[0] - segment.kv_head * a.k_stride[1], a.k_stride[2], lines_of<T>(a.dim)};
  }
  for (std::int64_t i = 0; i < num_groups; ++i) {
    const std::int64_t row = i * num_rows / num_groups, count = (i + 1) * num_rows / num_groups - row;
    for (std::int64_t d = 0; d < a.value_dim; d += 64) {
      const Soon<T> soon = i + 1 == num_groups && d + 64 >= a.value_dim ? next_keys : Soon<T>{};
      const std::int64_t nz = std::min<std::int64_t>(4, (a.value_dim - d + 15) / 16);
      if (nz == 1) output_group<T, 1>(job, segment, s, row, count, d, soon);
      else if (nz == 2) output_group<T, 2>(job, segment, s, row, count, d, soon);
      else if (nz == 3) output_group<T, 3>(job, segment, s, row, count, d, soon);
      else output_group<T, 4>(job, segment, s, row, count, d, soon);
    }
  }
}

template <class T>
void run_attention(void* context, std::uint32_t chunk) {
  const Job& job = *static_cast<const Job*>(context);
  thread_local Scratch<T> scratch;
  const AttentionArgs& a = job.args;
  const std::int64_t per_head = a.rows * (a.heads / a.kv_heads), total = a.batch * a.kv_heads * per_head;
  const std::int64_t end = std::min(total, (chunk + 1) * job.chunk_rows);
  for (std::int64_t row = chunk * job.chunk_rows; row < end;) {
    const std::int64_t which = row / per_head, first = row % per_head;
    const Segment segment{which / a.kv_heads, which % a.kv_heads, first, std::min(per_head, first + end - row)};
    run_segment<T>(job, segment, scratch);
    row += segment.end - segment.first;
  }
}

}  // namespace

void attention(const AttentionArgs& args) {
  const std::int64_t total = args.batch * args.heads * args.rows;
  if (total == 0) return;
  const std::int64_t fit = std::clamp<std::int64_t>(
      kScoreBytes / std::max<std::int64_t>(1, 4 * args.keys), 2 * kGroup, kMaxChunk);
  const std::int64_t threads = std::max(1, args.num_threads);
  // Equal chunks, a multiple of the threads.
  const std::int64_t rounds = (total + fit * threads - 1) / (fit * threads);
  Job job{args, (total + rounds * threads - 1) / (rounds * threads)};
  const auto chunks = static_cast<std::uint32_t>((total + job.chunk_rows - 1) / job.chunk_rows);
  parallel_for(args.num_threads, chunks, args.is_float32 ? &run_attention<float> : &run_attention<bf16>, &job);
}

#else

void attention(const AttentionArgs&) { throw std::runtime_error("the attention kernel needs AVX512_BF16"); }

#endif

}  // namespace dartspec
