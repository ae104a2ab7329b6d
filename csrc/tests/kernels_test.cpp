// The kernels on buffers of exactly the right size (address sanitizer watches the edges), against double arithmetic,
// and their promise: the same bits for any number of rows and threads, wherever the seen keys lie.
#include "kernels.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "kernels_pool.hpp"

using namespace dartspec;

#define CHECK(condition)                                                \
  do {                                                                  \
    if (!(condition)) {                                                 \
      std::printf("%s:%d: %s\n", __FILE__, __LINE__, #condition);       \
      std::exit(1);                                                     \
    }                                                                   \
  } while (false)

namespace {

std::mt19937 engine(7);

float to_float(bf16 value) { return __builtin_bit_cast(float, static_cast<std::uint32_t>(value) << 16); }

bf16 to_bf16(float value) {
  const auto bits = __builtin_bit_cast(std::uint32_t, value);
  return static_cast<bf16>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

std::vector<bf16> random(std::int64_t size) {
  std::normal_distribution<float> normal;
  std::vector<bf16> values(static_cast<std::size_t>(size));
  for (bf16& value : values) value = to_bf16(normal(engine));
  return values;
}

bool close(double got, double expected, double scale) { return std::abs(got - expected) <= scale; }

void test_pool() {
  for (int threads : {1, 2, 4}) {
    for (std::uint32_t chunks : {0u, 1u, 3u, 1000u}) {
      std::vector<std::atomic<int>> runs(chunks);
      parallel_for(threads, chunks, [](void* p, std::uint32_t i) { ++(*static_cast<decltype(runs)*>(p))[i]; }, &runs);
      for (const auto& count : runs) CHECK(count == 1);
    }
  }
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([] {
      for (int job = 0; job < 300; ++job) {
        std::vector<std::atomic<int>> runs(17);
        parallel_for(3, 17, [](void* p, std::uint32_t i) { ++(*static_cast<decltype(runs)*>(p))[i]; }, &runs);
        for (const auto& count : runs) CHECK(count == 1);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

void test_linear() {
  for (std::int64_t in : {1, 2, 7, 64, 2111}) {
    for (std::int64_t out : {1, 16, 31, 64, 65, 150}) {
      const auto first = random(out * in), second = random(3 * in), bias = random(out);
      const LinearPart parts[] = {{first.data(), out, in, bias.data()}, {second.data(), 3, in, nullptr}};
      const PackedLinear packed(parts, in);
      CHECK(packed.out_features() == out + 3);
      std::vector<bf16> back(first.size());
      packed.unpack(0, back.data());
      CHECK(back == first);
      back.resize(second.size());
      packed.unpack(1, back.data());
      CHECK(back == second);

      const std::int64_t rows = 27, width = out + 3;
      const auto x = random(rows * in);
      std::vector<float> all(static_cast<std::size_t>(rows * width));
      packed.apply(x.data(), rows, in, all.data(), width, true, 3);
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t c = 0; c < width; ++c) {
          double sum = c < out ? to_float(bias[static_cast<std::size_t>(c)]) : 0, scale = 1;
          for (std::int64_t i = 0; i < in; ++i) {
            const double product = static_cast<double>(to_float(x[static_cast<std::size_t>(r * in + i)])) *
                                   to_float(c < out ? first[static_cast<std::size_t>(c * in + i)]
                                                    : second[static_cast<std::size_t>((c - out) * in + i)]);
            sum += product;
            scale += std::abs(product);
          }
          CHECK(close(all[static_cast<std::size_t>(r * width + c)], sum, 1e-6 * scale));
        }
        std::vector<float> one(static_cast<std::size_t>(width));
        packed.apply(x.data() + r * in, 1, in, one.data(), width, true, 1);
        CHECK(std::memcmp(one.data(), all.data() + r * width, one.size() * sizeof(float)) == 0);
      }
      std::vector<bf16> rounded(all.size());
      packed.apply(x.data(), rows, in, rounded.data(), width, false, 2);
      for (std::size_t i = 0; i < all.size(); ++i) CHECK(rounded[i] == to_bf16(all[i]));
    }
  }
}

void test_gated() {
  for (std::int64_t in : {3, 64}) {
    for (std::int64_t out : {1, 16, 33, 70}) {
      const auto gate = random(out * in), up = random(out * in), down = random(in * out), x = random(9 * in);
      const LinearPart parts[] = {{gate.data(), out, in, nullptr}, {up.data(), out, in, nullptr}};
      const LinearPart last{down.data(), in, out, nullptr};
      const auto packed = PackedLinear::gated(parts, in, Activation::kRelu);
      const PackedLinear packed_gate({&parts[0], 1}, in), packed_up({&parts[1], 1}, in), packed_down({&last, 1}, out);
      std::vector<bf16> back(up.size());
      packed->unpack(1, back.data());
      CHECK(back == up);
      std::vector<bf16> got(static_cast<std::size_t>(9 * in)), g(static_cast<std::size_t>(9 * out)), u(g.size());
      gated_mlp(*packed, packed_down, x.data(), 9, in, got.data(), in, 2);
      packed_gate.apply(x.data(), 9, in, g.data(), out, false, 1);
      packed_up.apply(x.data(), 9, in, u.data(), out, false, 1);
      for (std::size_t i = 0; i < g.size(); ++i) g[i] = to_bf16(std::max(0.0f, to_float(g[i])) * to_float(u[i]));
      std::vector<bf16> expected(got.size());
      packed_down.apply(g.data(), 9, out, expected.data(), in, false, 1);
      for (std::size_t i = 0; i < got.size(); ++i) CHECK(to_float(got[i]) == to_float(expected[i]));  // -0 is 0
    }
  }
}

void test_norm_and_rotary() {
  for (std::int64_t size : {1, 16, 33, 576}) {
    const auto x = random(3 * size), w = random(size);
    std::vector<bf16> y(x.size());
    rms_norm(x.data(), 3, size, size, w.data(), 1e-5f, NormKind::kScaleOnce, y.data(), size);
    for (std::int64_t r = 0; r < 3; ++r) {
      double sum = 0;
      for (std::int64_t i = 0; i < size; ++i) sum += std::pow(to_float(x[static_cast<std::size_t>(r * size + i)]), 2);
      for (std::int64_t i = 0; i < size; ++i) {
        const auto at = static_cast<std::size_t>(r * size + i);
        const double expected = to_float(x[at]) / std::sqrt(sum / static_cast<double>(size) + 1e-5) *
                                to_float(w[static_cast<std::size_t>(i)]);
        CHECK(close(to_float(y[at]), expected, std::abs(expected) / 250 + 1e-6));
      }
    }
  }
  // 2 rows of 2 query heads, 1 key head and 1 value head of 10, of which 6 are rotated
  const auto before = random(2 * 40), cos = random(6), sin = random(6);
  auto heads = before;
  prepare_heads({heads.data(), 2, 40, 2, 1, 10, 6, cos.data(), sin.data(), 1, nullptr, nullptr, 0, NormKind::kScaleOnce});
  for (std::size_t i = 0; i < heads.size(); ++i) {
    const std::size_t within = i % 10, head = i % 40 / 10;
    float expected = to_float(before[i]);
    if (head < 3 && within < 6) {
      const float other = within < 3 ? -to_float(before[i + 3]) : to_float(before[i - 3]);
      expected = to_float(to_bf16(expected * to_float(cos[within]))) + to_float(to_bf16(other * to_float(sin[within])));
    }
    CHECK(heads[i] == to_bf16(expected));
  }
}

void test_attention() {
  const std::int64_t heads = 4, kv = 2, rows = 13;
  for (std::int64_t dim : {1, 16, 40, 64, 130}) {
    for (std::int64_t keys : {13, 64, 65, 200}) {
      auto q = random(heads * rows * dim), k = random(kv * keys * dim), v = random(kv * keys * dim);
      std::vector<std::uint8_t> mask(static_cast<std::size_t>(rows * keys));
      for (auto& bit : mask) bit = engine() % 3 == 0;
      for (std::int64_t r = 0; r < rows; ++r) mask[static_cast<std::size_t>(r * keys + r)] = 1;
      std::vector<bool> used(static_cast<std::size_t>(keys));
      for (std::size_t i = 0; i < mask.size(); ++i) used[i % used.size()] = used[i % used.size()] || mask[i] != 0;
      for (std::int64_t h = 0; h < kv; ++h) {
        for (std::int64_t j = 0; j < keys; ++j) {
          if (used[static_cast<std::size_t>(j)]) continue;
          std::fill_n(v.begin() + (h * keys + j) * dim, dim, bf16{0x7FC0});  // not a number where nobody looks
        }
      }
      std::vector<bf16> out(q.size());
      AttentionArgs args{};
      args.q = q.data(), args.k = k.data(), args.v = v.data(), args.mask = mask.data(), args.out = out.data();
      args.batch = 1, args.heads = heads, args.kv_heads = kv, args.rows = rows, args.keys = keys;
      args.dim = args.value_dim = dim;
      args.q_stride = args.out_stride = {0, rows * dim, dim};
      args.k_stride = args.v_stride = {0, keys * dim, dim};
      args.mask_stride = {0, 0, keys};
      args.scale = 0.3f;
      args.num_threads = 3;
      attention(args);
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t r = 0; r < rows; ++r) {
          const bf16* query = q.data() + (h * rows + r) * dim;
          // The seen keys moved together: the row alone must give the same bits.
          std::vector<bf16> some_k, some_v;
          std::vector<double> weights, expected(static_cast<std::size_t>(dim));
          double most = -1e300, sum = 0;
          for (std::int64_t j = 0; j < keys; ++j) {
            if (mask[static_cast<std::size_t>(r * keys + j)] == 0) continue;
            const auto at = (h / 2 * keys + j) * dim;
            some_k.insert(some_k.end(), k.begin() + at, k.begin() + at + dim);
            some_v.insert(some_v.end(), v.begin() + at, v.begin() + at + dim);
            double score = 0;
            for (std::int64_t d = 0; d < dim; ++d) {
              score += 0.3 * to_float(query[d]) * to_float(k[static_cast<std::size_t>(at + d)]);
            }
            weights.push_back(score);
            most = std::max(most, score);
          }
          for (std::size_t j = 0; j < weights.size(); ++j) {
            const double weight = std::exp(weights[j] - most);
            sum += weight;
            for (std::size_t d = 0; d < expected.size(); ++d) {
              expected[d] += weight * to_float(some_v[j * expected.size() + d]);
            }
          }
          AttentionArgs alone = args;
          std::vector<bf16> result(static_cast<std::size_t>(dim));
          alone.q = query, alone.k = some_k.data(), alone.v = some_v.data(), alone.mask = nullptr;
          alone.out = result.data(), alone.heads = alone.kv_heads = alone.rows = 1;
          alone.keys = static_cast<std::int64_t>(weights.size());
          alone.num_threads = 1;
          attention(alone);
          for (std::int64_t d = 0; d < dim; ++d) {
            const bf16 got = out[static_cast<std::size_t>((h * rows + r) * dim + d)];
            CHECK(got == result[static_cast<std::size_t>(d)]);
            CHECK(close(to_float(got), expected[static_cast<std::size_t>(d)] / sum, 2e-2));
          }
        }
      }
    }
  }
}

}  // namespace

int main() {
  test_pool();
  if (!kernels_supported()) {
    std::printf("skipped: this CPU has no AVX512_BF16\n");
    return 0;
  }
  test_linear();
  test_gated();
  test_norm_and_rotary();
  test_attention();
  return 0;
}
