// Bindings of the counter-based noise and of the CPU kernels.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <utility>
#include <vector>

#include "kernels.hpp"
#include "noise.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using FloatVector = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

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
          "the other rows or the threads.");
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

}  // namespace

void bind_kernels(nb::module_& m) {
  bind_noise(m);
  bind_linear(m);
  bind_attention(m);
}
