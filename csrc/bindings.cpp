// The one file that knows both the core and Python. Arrays in, the caller's buffers out, the GIL dropped.
#include <nanobind/nanobind.h>

#include "mapped.hpp"

namespace nb = nanobind;

void bind_ngram(nb::module_& m);    // csrc/bind_ngram.cpp: n-gram index and tree search
void bind_builder(nb::module_& m);  // csrc/bind_builder.cpp: what makes an index
void bind_kernels(nb::module_& m);  // csrc/bind_kernels.cpp: CPU kernels and counter-based noise

NB_MODULE(_core, m) {
  m.doc() = "dartspec's C++ core";
  bind_ngram(m);
  bind_builder(m);
  bind_kernels(m);
  m.def("num_lost_pages", &dartspec::num_lost_pages,
        "Pages of indexes that were lost because another program cut off a file that is open here.");
}
