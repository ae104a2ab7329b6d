// The one file that knows both the core and Python. Arrays in, the caller's buffers out, the GIL dropped.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_ngram(nb::module_& m);    // csrc/bind_ngram.cpp: n-gram index and tree search
void bind_builder(nb::module_& m);  // csrc/bind_builder.cpp: what makes an index
void bind_kernels(nb::module_& m);  // csrc/bind_kernels.cpp: CPU kernels and counter-based noise

NB_MODULE(_core, m) {
  m.doc() = "dartspec's C++ core";
  bind_ngram(m);
  bind_builder(m);
  bind_kernels(m);
}
