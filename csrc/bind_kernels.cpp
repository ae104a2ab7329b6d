// Bindings of the counter-based noise and of the CPU kernels.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <utility>
#include <vector>

#include "kernels.hpp"
#include "kernels_draft.hpp"
#include "noise.hpp"
#include "weigh.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using FloatVector = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IdVector = nb::ndarray<std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void bind_noise(nb::module_& m) {
  m.def("philox4x32_10", &dartspec::philox4x32_10, "counter"_a, "key"_a,
        "One block of Philox4x32-10: four counter words and two key words to four random words.");
  m.def(
      "philox_uniform",
      [](std::uint64_t seed, std::uint64_t sample, std::uint32_t position, FloatVector out) {
        nb::gil_scoped_release release;
        dartspec::philox_uniform(seed, sample, position, {out.data(), out.size()});
      },
      "seed"_a, "sample"_a, "position"_a, "out"_a.noconvert(),
      "Fill `out` (V,) float32, C-contiguous, with uniform numbers that depend on the arguments and the index only.\n\n"
      "out[v] comes from word v % 4 of the Philox4x32-10 block with key (seed low, seed high) and counter\n"
      "(v // 4, position, sample low, sample high), each a 32-bit word: w = (word + 0.5) * 2**-32 rounded to float32\n"
      "and clamped to at most 1 - 2**-24. So 2**-33 <= w < 1, and the Gumbel value -log(-log1p(-w)) is finite.");
  m.def(
      "gumbel_contenders",
      [](std::uint64_t seed, std::uint64_t sample, std::uint32_t position, FloatVector row, IdVector ids, FloatVector w) {
        nb::gil_scoped_release release;
        return dartspec::gumbel_contenders(seed, sample, position, {row.data(), row.size()}, {ids.data(), ids.size()},
                                           {w.data(), std::min(w.size(), ids.size())});
      },
      "seed"_a, "sample"_a, "position"_a, "row"_a.noconvert(), "ids"_a.noconvert(), "w"_a.noconvert(),
      "The few v that can be the argmax of `row` (V,) float32 plus its Gumbel noise: their ids, ascending, into `ids`\n"
      "(n,) int64, and their `philox_uniform` numbers into `w` (n,) float32, of equal length.\n\n"
      "Returns how many there are. 0 or less: they did not fit, or the row holds a NaN, an infinity or nothing to pick.");
}

using Address = std::uintptr_t;  // tensor.data_ptr()
using Part = std::tuple<Address, std::int64_t, std::int64_t, Address>;  // weight, out features, row stride, bias or 0

std::vector<dartspec::LinearPart> to_parts(const std::vector<Part>& parts) {
  if (!dartspec::kernels_supported()) throw std::runtime_error("the packed kernels need a CPU with AVX512_BF16");
  std::vector<dartspec::LinearPart> result;
  for (const auto& [weight, out, stride, bias] : parts) {
    result.push_back({reinterpret_cast<const dartspec::bf16*>(weight), out, stride,
                      reinterpret_cast<const dartspec::bf16*>(bias)});
  }
  return result;
}

void bind_linear(nb::module_& m) {
  using dartspec::PackedLinear;
  m.def("kernels_supported", &dartspec::kernels_supported,
        "Whether this processor has AVX512_BF16, which every kernel below needs.");
  nb::class_<PackedLinear>(m, "PackedLinear",
                           "bf16 weights of one or several linear layers with one input, repacked for row-invariant\n"
                           "products. All addresses are `tensor.data_ptr()` of CPU memory; strides count elements.")
      .def(
          "__init__",
          [](PackedLinear* self, const std::vector<Part>& parts, std::int64_t in_features) {
            const auto list = to_parts(parts);
            nb::gil_scoped_release release;
            new (self) PackedLinear(list, in_features);
          },
          "parts"_a, "in_features"_a,
          "parts: (weight address, out features, row stride, bias address or 0) each, bf16; outputs side by side.")
      .def_static(
          "gated",
          [](const std::vector<Part>& parts, std::int64_t in_features, int activation) {
            const auto list = to_parts(parts);
            nb::gil_scoped_release release;
            return PackedLinear::gated(list, in_features, static_cast<dartspec::Activation>(activation));
          },
          "parts"_a, "in_features"_a, "activation"_a,
          "act(gate) * up of a gated MLP. parts: gate, up. activation: 0 silu, 1 tanh gelu, 2 gelu, 3 relu.")
      .def_prop_ro("in_features", &PackedLinear::in_features)
      .def_prop_ro("out_features", &PackedLinear::out_features)
      .def_prop_ro("num_bytes", &PackedLinear::num_bytes)
      .def(
          "apply",
          [](const PackedLinear& self, Address x, std::int64_t rows, std::int64_t x_stride, Address y,
             std::int64_t y_stride, bool y_float32, int num_threads) {
            nb::gil_scoped_release release;
            self.apply(reinterpret_cast<const dartspec::bf16*>(x), rows, x_stride, reinterpret_cast<void*>(y), y_stride,
                       y_float32, num_threads);
          },
          "x"_a, "rows"_a, "x_stride"_a, "y"_a, "y_stride"_a, "y_float32"_a, "num_threads"_a,
          "y = x W^T + b: x (rows, in) bf16, y (rows, out_features) bf16 or float32. A row's result does not depend on\n"
          "the other rows or the threads.")
      .def(
          "unpack",
          [](const PackedLinear& self, std::int64_t part, Address weight) {
            nb::gil_scoped_release release;
            self.unpack(part, reinterpret_cast<dartspec::bf16*>(weight));
          },
          "part"_a, "weight"_a, "Write the part's weight back as (out, in) bf16, contiguous.");
  m.def(
      "gated_mlp",
      [](const PackedLinear& gate_up, const PackedLinear& down, Address x, std::int64_t rows, std::int64_t x_stride,
         Address y, std::int64_t y_stride, int num_threads) {
        nb::gil_scoped_release release;
        dartspec::gated_mlp(gate_up, down, reinterpret_cast<const dartspec::bf16*>(x), rows, x_stride,
                            reinterpret_cast<dartspec::bf16*>(y), y_stride, num_threads);
      },
      "gate_up"_a, "down"_a, "x"_a, "rows"_a, "x_stride"_a, "y"_a, "y_stride"_a, "num_threads"_a,
      "y = down(act(gate(x)) * up(x)), all bf16; gate_up is a `PackedLinear.gated`.");
  m.def(
      "rms_norm",
      [](Address x, std::int64_t rows, std::int64_t x_stride, std::int64_t size, Address weight, float eps, int kind,
         Address y, std::int64_t y_stride) {
        if (!dartspec::kernels_supported()) throw std::runtime_error("the norm kernel needs AVX512_BF16");
        nb::gil_scoped_release release;
        dartspec::rms_norm(reinterpret_cast<const dartspec::bf16*>(x), rows, x_stride, size,
                           reinterpret_cast<const dartspec::bf16*>(weight), eps, static_cast<dartspec::NormKind>(kind),
                           reinterpret_cast<dartspec::bf16*>(y), y_stride);
      },
      "x"_a, "rows"_a, "x_stride"_a, "size"_a, "weight"_a, "eps"_a, "kind"_a, "y"_a, "y_stride"_a,
      "RMSNorm of bf16 rows. kind: 0 round, then scale (Llama), 1 scale, then round (OLMo 2), 2 scale by 1 + w (Gemma).");
  m.def(
      "prepare_heads",
      [](Address heads, std::array<std::int64_t, 6> sizes, Address cos, Address sin, std::int64_t cos_rows,
         Address q_norm, Address k_norm, float eps, int kind) {
        if (!dartspec::kernels_supported()) throw std::runtime_error("the head kernel needs AVX512_BF16");
        nb::gil_scoped_release release;
        using dartspec::bf16;
        const auto [rows, stride, q_heads, k_heads, dim, rotary] = sizes;
        dartspec::prepare_heads({reinterpret_cast<bf16*>(heads), rows, stride, q_heads, k_heads, dim, rotary,
                                 reinterpret_cast<const bf16*>(cos), reinterpret_cast<const bf16*>(sin), cos_rows,
                                 reinterpret_cast<const bf16*>(q_norm), reinterpret_cast<const bf16*>(k_norm), eps,
                                 static_cast<dartspec::NormKind>(kind)});
      },
      "heads"_a, "sizes"_a, "cos"_a, "sin"_a, "cos_rows"_a, "q_norm"_a, "k_norm"_a, "eps"_a, "kind"_a,
      "In place on bf16 rows that begin with (q_heads + k_heads) * dim values: optional RMSNorm of each head (weight\n"
      "addresses or 0), then rotary embedding by halves. sizes = (rows, stride, q_heads, k_heads, dim, rotary); cos and\n"
      "sin (cos_rows, rotary) bf16, row r takes r % cos_rows.");
}

using Strides = std::array<std::int64_t, 3>;

void bind_attention(nb::module_& m) {
  m.def(
      "attention",
      [](Address q, Address k, Address v, Address mask, Address out, std::array<std::int64_t, 7> sizes,
         Strides q_stride, Strides k_stride, Strides v_stride, Strides mask_stride, Strides out_stride, float scale,
         float softcap, bool causal, bool is_float32, int num_threads) {
        if (!dartspec::kernels_supported()) throw std::runtime_error("the attention kernel needs AVX512_BF16");
        nb::gil_scoped_release release;
        const auto [batch, heads, kv_heads, rows, keys, dim, value_dim] = sizes;
        dartspec::attention({reinterpret_cast<const void*>(q), reinterpret_cast<const void*>(k),
                             reinterpret_cast<const void*>(v), reinterpret_cast<const std::uint8_t*>(mask),
                             reinterpret_cast<void*>(out), batch, heads, kv_heads, rows, keys, dim, value_dim, q_stride,
                             k_stride, v_stride, mask_stride, out_stride, scale, softcap, causal, is_float32,
                             num_threads});
      },
      "q"_a, "k"_a, "v"_a, "mask"_a, "out"_a, "sizes"_a, "q_stride"_a, "k_stride"_a, "v_stride"_a, "mask_stride"_a,
      "out_stride"_a, "scale"_a, "softcap"_a, "causal"_a, "is_float32"_a, "num_threads"_a,
      "softmax(scale q k^T) v over the keys that the mask allows; a row's bits depend on their sequence only.\n\n"
      "q (B, H, N, D), k (B, Hkv, K, D), v (B, Hkv, K, Dv), out (B, H, N, Dv): addresses, bf16 or float32; mask\n"
      "(B, H, N, K) bool address or 0. sizes = (B, H, Hkv, N, K, D, Dv); strides by batch, head and row or key, in\n"
      "elements (0 broadcasts); the last dimension is contiguous. softcap 0: none. causal: without a mask, row n sees\n"
      "the keys up to K - N + n.");
}

using NormTuple = std::tuple<Address, float, int>;  // weight, eps, kind

void bind_layer(nb::module_& m) {
  using dartspec::bf16;
  using dartspec::DecoderLayer;
  using dartspec::PackedLinear;
  nb::class_<DecoderLayer>(m, "DecoderLayer",
                           "One decoder layer, h = x + out(attention(norm(x))), y = h + mlp(norm(h)), in two calls with\n"
                           "the cache's update between them. Rows are contiguous; addresses are of bf16 CPU memory.")
      .def(
          "__init__",
          [](DecoderLayer* self, const PackedLinear& qkv, const PackedLinear& out, const PackedLinear& gate_up,
             const PackedLinear& down, NormTuple first, NormTuple second, Address q_norm, Address k_norm,
             float head_eps, int head_kind, std::array<std::int64_t, 3> heads) {
            const auto norm = [](const NormTuple& t) {
              return dartspec::Norm{reinterpret_cast<const bf16*>(std::get<0>(t)), std::get<1>(t),
                                    static_cast<dartspec::NormKind>(std::get<2>(t))};
            };
            new (self) DecoderLayer{&qkv,
                                    &out,
                                    &gate_up,
                                    &down,
                                    norm(first),
                                    norm(second),
                                    reinterpret_cast<const bf16*>(q_norm),
                                    reinterpret_cast<const bf16*>(k_norm),
                                    head_eps,
                                    static_cast<dartspec::NormKind>(head_kind),
                                    heads[0],
                                    heads[1],
                                    heads[2]};
          },
          "qkv"_a, "out"_a, "gate_up"_a, "down"_a, "first"_a, "second"_a, "q_norm"_a, "k_norm"_a, "head_eps"_a,
          "head_kind"_a, "heads"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
          nb::keep_alive<1, 5>(),
          "first, second: (weight address, eps, kind) of the norms before attention and MLP; q_norm, k_norm: weight\n"
          "addresses or 0; heads = (query heads, key heads, head dimension).")
      .def(
          "begin",
          [](const DecoderLayer& self, Address x, std::int64_t rows, Address cos, Address sin, std::int64_t cos_rows,
             std::int64_t rotary, Address qkv, int num_threads) {
            nb::gil_scoped_release release;
            self.begin(reinterpret_cast<const bf16*>(x), rows, reinterpret_cast<const bf16*>(cos),
                       reinterpret_cast<const bf16*>(sin), cos_rows, rotary, reinterpret_cast<bf16*>(qkv), num_threads);
          },
          "x"_a, "rows"_a, "cos"_a, "sin"_a, "cos_rows"_a, "rotary"_a, "qkv"_a, "num_threads"_a,
          "x (rows, hidden) to qkv (rows, (H + 2 Hkv) D): norm, projections, rotary embedding.")
      .def(
          "finish",
          [](const DecoderLayer& self, Address x, Address qkv, Address k, Address v, Address mask, Address y,
             std::array<std::int64_t, 3> sizes, Strides k_stride, Strides v_stride, Strides mask_stride, float scale,
             float softcap, bool causal, int num_threads) {
            nb::gil_scoped_release release;
            dartspec::AttentionArgs args{};
            args.batch = sizes[0];
            args.rows = sizes[1];
            args.keys = sizes[2];
            args.k = reinterpret_cast<const void*>(k);
            args.v = reinterpret_cast<const void*>(v);
            args.mask = reinterpret_cast<const std::uint8_t*>(mask);
            args.k_stride = k_stride;
            args.v_stride = v_stride;
            args.mask_stride = mask_stride;
            args.scale = scale;
            args.softcap = softcap;
            args.causal = causal;
            args.num_threads = num_threads;
            self.finish(reinterpret_cast<const bf16*>(x), reinterpret_cast<const bf16*>(qkv), args,
                        reinterpret_cast<bf16*>(y));
          },
          "x"_a, "qkv"_a, "k"_a, "v"_a, "mask"_a, "y"_a, "sizes"_a, "k_stride"_a, "v_stride"_a, "mask_stride"_a,
          "scale"_a, "softcap"_a, "causal"_a, "num_threads"_a,
          "Attention and all that follows it, to y (rows, hidden). sizes = (B, N, K); k, v, mask, strides and flags as in\n"
          "`attention`.");
}

template <class T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T>
std::span<T> span_of(const Vector<T>& v) {
  return {v.data(), v.size()};
}

void bind_weigh(nb::module_& m) {
  m.def(
      "weigh_tree",
      [](Vector<const float> steps, Vector<const float> log_odds, Vector<const std::int32_t> parents,
         Vector<const float> scores, float own, Vector<std::int32_t> cells, Vector<float> chance, Vector<float> value,
         Vector<std::int32_t> order) {
        const std::size_t n = parents.size();
        if (n == 0 || scores.size() != n || cells.size() != n || chance.size() != n || value.size() != n ||
            order.size() != n - 1 || log_odds.size() == 0 || log_odds.size() % (steps.size() + 1) != 0) {
          throw std::invalid_argument("weigh_tree: the arrays' sizes do not fit one another");
        }
        for (std::size_t i = 1; i < n; ++i) {
          if (parents.data()[i] < 0 || static_cast<std::size_t>(parents.data()[i]) >= i) {
            throw std::invalid_argument("weigh_tree: a parent must come before its child");
          }
        }
        dartspec::weigh_tree({span_of(steps), span_of(log_odds)}, span_of(parents), span_of(scores), own, cells.data(),
                             chance.data(), value.data(), order.data());
      },
      "steps"_a, "log_odds"_a, "parents"_a, "scores"_a, "own"_a, "cells"_a.noconvert(), "chance"_a.noconvert(),
      "value"_a.noconvert(), "order"_a.noconvert(),
      "Each node's cell of the calibration, its chance to be picked where its parent is, its chance to be accepted, and\n"
      "the n - 1 nodes but the root by falling chance. steps (S,) ascending float32; log_odds (D * (S + 1),) float32;\n"
      "parents (n,) int32, scores (n,) float32.");
  m.def(
      "learn_tree",
      [](Vector<const std::int32_t> parents, Vector<const std::int32_t> cells, Vector<const float> chance,
         Vector<const float> value, const std::vector<std::int32_t>& kept, const std::vector<std::int32_t>& path,
         Vector<double> hits, Vector<double> trials, Vector<double> bins, bool shared) {
        const auto n = static_cast<std::int32_t>(parents.size());
        bool good = cells.size() == parents.size() && chance.size() == parents.size() &&
                    value.size() == parents.size() && hits.size() == trials.size() && bins.size() % 3 == 0 &&
                    !kept.empty() && kept[0] == 0;
        for (const std::int32_t i : kept) good = good && 0 <= i && i < n;
        for (const std::int32_t i : path) good = good && 0 <= i && static_cast<std::size_t>(i) < kept.size();
        for (std::size_t i = 0; good && i < cells.size(); ++i) {
          good = 0 <= cells.data()[i] && static_cast<std::size_t>(cells.data()[i]) < hits.size();
        }
        if (!good) throw std::invalid_argument("learn_tree: the arrays do not fit one another");
        const auto lesson = dartspec::learn_tree(
            span_of(parents), cells.data(), chance.data(), value.data(), kept, path, shared ? hits.data() : nullptr,
            shared ? trials.data() : nullptr, shared ? bins.data() : nullptr,
            static_cast<std::int64_t>(bins.size() / 3));
        return std::pair(lesson.surprise, lesson.spread);
      },
      "parents"_a, "cells"_a, "chance"_a, "value"_a, "kept"_a, "path"_a, "hits"_a.noconvert(), "trials"_a.noconvert(),
      "bins"_a.noconvert(), "shared"_a,
      "What a verified tree teaches. The first four as weigh_tree made them; kept: the nodes verified, 0 first; path:\n"
      "the accepted ones, as places in `kept`. With `shared`, labels are added to hits and trials (by cell) and to bins\n"
      "(num_bins * 3: nodes, accepted, sum of chances). Returns (labels less chances, their variance), summed.");
}

void bind_stack(nb::module_& m) {
  using dartspec::bf16;
  using dartspec::DecoderLayer;
  m.def(
      "run_layers",
      [](const std::vector<const DecoderLayer*>& layers, Address x, Address cos, Address sin, std::int64_t cos_rows,
         std::int64_t rotary, const std::vector<Address>& keys, const std::vector<Address>& values, Strides stride,
         const std::vector<std::int64_t>& starts, Address mask, Strides mask_stride,
         std::array<std::int64_t, 2> sizes, float scale, float softcap, Address y, int num_threads) {
        if (keys.size() != layers.size() || values.size() != layers.size()) {
          throw std::invalid_argument("one address of keys and one of values is needed a layer");
        }
        nb::gil_scoped_release release;
        dartspec::AttentionArgs args{};
        args.batch = static_cast<std::int64_t>(starts.size());
        args.rows = sizes[0];
        args.keys = sizes[1];
        args.mask = reinterpret_cast<const std::uint8_t*>(mask);
        args.mask_stride = mask_stride;
        args.scale = scale;
        args.softcap = softcap;
        args.num_threads = num_threads;
        static_assert(sizeof(Address) == sizeof(bf16*));
        dartspec::run_layers(layers, reinterpret_cast<const bf16*>(x), reinterpret_cast<const bf16*>(cos),
                             reinterpret_cast<const bf16*>(sin), cos_rows, rotary,
                             {{reinterpret_cast<bf16* const*>(keys.data()), keys.size()},
                              {reinterpret_cast<bf16* const*>(values.data()), values.size()},
                              stride,
                              starts},
                             args, reinterpret_cast<bf16*>(y));
      },
      "layers"_a, "x"_a, "cos"_a, "sin"_a, "cos_rows"_a, "rotary"_a, "keys"_a, "values"_a, "stride"_a, "starts"_a,
      "mask"_a, "mask_stride"_a, "sizes"_a, "scale"_a, "softcap"_a, "y"_a, "num_threads"_a,
      "Decoder layers one after the other, new keys and values written into the cache: what `DecoderLayer` and the\n"
      "cache's update give, bit for bit. x (B * N, hidden); keys, values: one address a layer, of the first sequence's;\n"
      "stride by sequence, head and position; starts: B first new positions; mask as in `attention`, not 0;\n"
      "sizes = (N, K); y (layers, B * N, hidden).");
}

void bind_draft(nb::module_& m) {
  using dartspec::Int8Linear;
  m.def("draft_kernels_supported", &dartspec::draft_kernels_supported,
        "Whether this processor has AVX512_BF16 and AVX512_VNNI, which `Int8Linear` and `top_log_probs` need.");
  nb::class_<Int8Linear>(m, "Int8Linear",
                         "One linear layer with weights of 8 bits, a scale each output and row: for drafters, whose\n"
                         "rounding changes no text. Addresses are `tensor.data_ptr()` of CPU memory.")
      .def(
          "__init__",
          [](Int8Linear* self, Address weight, std::int64_t out, std::int64_t in) {
            if (!dartspec::draft_kernels_supported()) throw std::runtime_error("weights of 8 bits need AVX512_VNNI");
            nb::gil_scoped_release release;
            new (self) Int8Linear(reinterpret_cast<const dartspec::bf16*>(weight), out, in);
          },
          "weight"_a, "out_features"_a, "in_features"_a, "weight: (out, in) bf16, contiguous; copied.")
      .def_prop_ro("num_bytes", &Int8Linear::num_bytes)
      .def(
          "apply",
          [](const Int8Linear& self, Address x, std::int64_t rows, std::int64_t x_stride, Address y, int num_threads) {
            nb::gil_scoped_release release;
            self.apply(reinterpret_cast<const dartspec::bf16*>(x), rows, x_stride, reinterpret_cast<float*>(y),
                       num_threads);
          },
          "x"_a, "rows"_a, "x_stride"_a, "y"_a, "num_threads"_a,
          "y = x W^T: x (rows, in) bf16, y (rows, out) float32. A row that is not finite gives NaN.");
  using dartspec::bf16;
  using dartspec::DraftLayer;
  using dartspec::PackedLinear;
  nb::class_<DraftLayer>(m, "DraftLayer",
                         "One round of a drafter of DART's form for one sequence, in one call. Addresses are of bf16 CPU\n"
                         "memory that outlives it.")
      .def(
          "__init__",
          [](DraftLayer* self, const PackedLinear& fc, const PackedLinear& qkv, const PackedLinear& out,
             const PackedLinear& gate_up, const PackedLinear& down, std::array<NormTuple, 4> norms,
             std::array<std::int64_t, 4> sizes, bool last_twice, Address mask_residual, Address mask_qkv) {
            const auto norm = [](const NormTuple& t) {
              return dartspec::Norm{reinterpret_cast<const bf16*>(std::get<0>(t)), std::get<1>(t),
                                    static_cast<dartspec::NormKind>(std::get<2>(t))};
            };
            new (self) DraftLayer{&fc, &qkv, &out, &gate_up, &down, norm(norms[0]), norm(norms[1]), norm(norms[2]),
                                  norm(norms[3]), sizes[0], sizes[1], sizes[2], sizes[3], last_twice,
                                  reinterpret_cast<const bf16*>(mask_residual),
                                  reinterpret_cast<const bf16*>(mask_qkv)};
          },
          "fc"_a, "qkv"_a, "out"_a, "gate_up"_a, "down"_a, "norms"_a, "sizes"_a, "last_twice"_a, "mask_residual"_a,
          "mask_qkv"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(),
          nb::keep_alive<1, 6>(),
          "norms: of embeddings, of features, before the MLP, the last one; (weight address, eps, kind) each. sizes =\n"
          "(query heads, key heads, head dimension, masks).")
      .def(
          "run",
          [](const DraftLayer& self, Address features, Address embeddings, std::int64_t rows, Address cos, Address sin,
             Address keys, Address values, std::int64_t head_stride, std::int64_t at, Address y, int num_threads) {
            if (rows < 1 || at < 0) throw std::invalid_argument("at least one clean row is needed");
            nb::gil_scoped_release release;
            self.run(reinterpret_cast<const bf16*>(features), reinterpret_cast<const bf16*>(embeddings), rows,
                     reinterpret_cast<const float*>(cos), reinterpret_cast<const float*>(sin),
                     reinterpret_cast<bf16*>(keys), reinterpret_cast<bf16*>(values), head_stride, at,
                     reinterpret_cast<bf16*>(y), num_threads);
          },
          "features"_a, "embeddings"_a, "rows"_a, "cos"_a, "sin"_a, "keys"_a, "values"_a, "head_stride"_a, "at"_a,
          "y"_a, "num_threads"_a,
          "features (rows, n_taps * H) and embeddings (rows, H) contiguous; cos, sin (positions, dim) float32; keys and\n"
          "values (key heads, capacity, dim), positions [at, at + rows + masks) are written; y (masks + 1, H).");
  m.def(
      "top_log_probs",
      [](Address logits, std::int64_t rows, std::int64_t size, std::int64_t k, Address log_probs, Address index) {
        if (!dartspec::draft_kernels_supported()) throw std::runtime_error("this needs AVX512_BF16");
        if (k < 1 || k > size) throw std::invalid_argument("k must be from 1 to the row's size");
        nb::gil_scoped_release release;
        dartspec::top_log_probs(reinterpret_cast<const float*>(logits), rows, size, k,
                                reinterpret_cast<float*>(log_probs), reinterpret_cast<std::int32_t*>(index));
      },
      "logits"_a, "rows"_a, "size"_a, "k"_a, "log_probs"_a, "index"_a,
      "The k likeliest entries of each row of logits (rows, size) float32, best first, ties to the lowest index, to\n"
      "log_probs (rows, k) float32 (log-softmax over the row) and index (rows, k) int32. A row with a NaN, or whose\n"
      "largest entry is not finite, gives -inf.");
}

}  // namespace

void bind_kernels(nb::module_& m) {
  bind_noise(m);
  bind_linear(m);
  bind_attention(m);
  bind_layer(m);
  bind_weigh(m);
  bind_stack(m);
  bind_draft(m);
}
