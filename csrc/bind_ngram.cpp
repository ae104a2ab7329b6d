// Binds the n-gram index and the tree search. Arrays in, the caller's buffers out, the GIL dropped.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "ngram_index.hpp"
#include "tree_search.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace dartspec;

namespace {

template <class T> using In1 = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T> using In2 = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T> using Out1 = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T> using Out2 = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <class T>
std::span<const T> span_of(const In1<T>& a) { return {a.data(), a.shape(0)}; }

void expect_shape(const char* what, std::size_t found, std::size_t expected) {
  if (found != expected)
    throw Error(std::string(what) + " has " + std::to_string(found) + " rows or columns, expected " + std::to_string(expected));
}

// The package's own exception where the package is there (the stub generator loads this module alone).
void translate(const std::exception_ptr& p, void*) {
  try {
    std::rethrow_exception(p);
  } catch (const Error& e) {
    nb::object type;
    try {
      type = nb::module_::import_("dartspec.errors").attr("DartspecError");
    } catch (nb::python_error& missing) {
      missing.discard_as_unraisable("dartspec.errors");
      type = nb::borrow(PyExc_ValueError);
    }
    PyErr_SetString(type.ptr(), e.what());
  }
}

nb::typed<nb::dict, nb::str, nb::any> info(const NgramIndex& index) {
  const IndexInfo& i = index.info();
  nb::dict out;
  nb::list nodes;
  std::uint64_t total = 0;
  for (int m = 0; m < i.order; ++m) {
    nodes.append(i.num_nodes[m]);
    total += i.num_nodes[m];
  }
  out["version"] = kIndexVersion;
  out["order"] = i.order;
  out["vocab_size"] = i.vocab_size;
  out["token_bits"] = token_bits_of(i.vocab_size);
  out["counts"] = i.exact ? "exact" : "quantised";
  out["log_prob_error"] = double(i.log_prob_error);
  out["num_tokens"] = i.num_tokens;
  out["min_count"] = i.min_count;
  out["num_nodes_by_level"] = nodes;
  out["num_nodes"] = total;
  out["index_bytes"] = index.image().size();
  out["bytes_per_node"] = total == 0 ? 0.0 : double(index.image().size()) / double(total);
  out["fingerprint"] = i.fingerprint;
  out["name"] = i.name;
  out["description"] = i.description;
  return out;
}

}  // namespace

void bind_ngram(nb::module_& m) {
  nb::set_leak_warnings(false);  // an index kept by a module until the interpreter ends is no fault
  nb::register_exception_translator(translate);

  nb::class_<NgramIndex>(m, "NgramIndex", "A mapped or in-memory n-gram index; see dartspec.ngram.NgramIndex.")
      .def_static("open", [](const std::string& path, bool preload, bool huge_pages, bool interleave) {
            return NgramIndex::open(path, {preload, huge_pages, interleave});
          }, "path"_a, nb::kw_only(), "preload"_a = false, "huge_pages"_a = false, "interleave"_a = false,
          nb::call_guard<nb::gil_scoped_release>())
      .def_static("from_bytes", [](nb::bytes data) {
            const auto* at = static_cast<const std::byte*>(data.data());
            return NgramIndex::from_image(std::vector<std::byte>(at, at + data.size()));
          }, "data"_a)
      .def("verify", &NgramIndex::verify, nb::call_guard<nb::gil_scoped_release>())
      .def("save", &NgramIndex::save, "path"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("info", &info)
      .def("continuations", [](const NgramIndex& index, In1<std::int32_t> context, std::size_t top) {
            return index.continuations(index.state_of(span_of(context)), top);
          }, "context"_a, "top"_a)
      .def("probabilities", [](const NgramIndex& index, In1<std::int32_t> context, In1<std::int32_t> tokens, Out1<double> out) {
            expect_shape("out", out.shape(0), tokens.shape(0));
            nb::gil_scoped_release release;
            const NgramState state = index.state_of(span_of(context));
            for (std::size_t i = 0; i < tokens.shape(0); ++i) out.data()[i] = index.probability(state, tokens.data()[i]);
          }, "context"_a, "tokens"_a, "out"_a, "g(token | context) of each token, into `out` (n,) float64.");

  nb::class_<TreeSearch>(m, "TreeSearch", "Beam search over a lattice, with its scratch; one thread at a time.")
      .def("__init__", [](TreeSearch* self, int top_k, int beam, double level_exponent, double logit_decay,
                          double ngram_weight, double eps, bool ngram_at_level0, bool softmax_over_kept) {
            new (self) TreeSearch({top_k, beam, level_exponent, logit_decay, ngram_weight, eps, ngram_at_level0, softmax_over_kept});
          }, nb::kw_only(), "top_k"_a, "beam"_a, "level_exponent"_a, "logit_decay"_a, "ngram_weight"_a, "eps"_a,
          "ngram_at_level0"_a, "softmax_over_kept"_a)
      .def("run", [](TreeSearch& self, In2<float> log_probs, In2<std::int32_t> tokens, std::int32_t root,
                     In1<std::int32_t> context, In1<std::int32_t> eos, const NgramIndex* index,
                     Out1<std::int32_t> out_tokens, Out1<std::int32_t> out_parents, Out1<float> out_scores) {
            expect_shape("tokens", tokens.shape(0), log_probs.shape(0));
            expect_shape("tokens", tokens.shape(1), log_probs.shape(1));
            if (out_tokens.shape(0) < 1) throw Error("out_tokens has no room for the root");
            expect_shape("out_parents", out_parents.shape(0), out_tokens.shape(0));
            expect_shape("out_scores", out_scores.shape(0), out_tokens.shape(0));
            nb::gil_scoped_release release;
            return self.run(log_probs.data(), tokens.data(), int(log_probs.shape(0)), int(log_probs.shape(1)), root,
                            span_of(context), span_of(eos), int(out_tokens.shape(0)) - 1, index, out_tokens.data(),
                            out_parents.data(), out_scores.data());
          }, "log_probs"_a, "tokens"_a, "root"_a, "context"_a, "eos"_a, "index"_a.none(), "out_tokens"_a, "out_parents"_a,
          "out_scores"_a, "Writes at most len(out_tokens) nodes, the root included; returns how many.");

  m.def("check_parents", [](In1<std::int32_t> parents) { check_parents(span_of(parents)); }, "parents"_a);
  m.def("tree_depths", [](In1<std::int32_t> parents, Out1<std::int64_t> out) {
          expect_shape("out", out.shape(0), parents.shape(0));
          tree_depths(span_of(parents), out.data());
        }, "parents"_a, "out"_a);
  m.def("tree_ancestor_mask", [](In1<std::int32_t> parents, Out2<bool> out) {
          expect_shape("out", out.shape(0), parents.shape(0));
          expect_shape("out", out.shape(1), parents.shape(0));
          tree_ancestor_mask(span_of(parents), reinterpret_cast<std::uint8_t*>(out.data()));
        }, "parents"_a, "out"_a);
}
