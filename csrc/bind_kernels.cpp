// Bindings of the counter-based noise and of the CPU kernels.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>

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

}  // namespace

void bind_kernels(nb::module_& m) { bind_noise(m); }
