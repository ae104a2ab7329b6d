// Binds the n-gram index and the tree search. Arrays in, the caller's buffers out, the GIL dropped.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
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
template <class T> using In3 = nb::ndarray<const T, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
template <class T> using In4 = nb::ndarray<const T, nb::ndim<4>, nb::c_contig, nb::device::cpu>;
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

// The contexts, a block at a time, with one row of tokens for all or one each.
void score(const NgramIndex& index, const In2<std::int32_t>& contexts, const In2<std::int32_t>& tokens, double backoff,
           const Out2<double>& out) {
  if (!(backoff > 0 && backoff <= 1)) throw Error("backoff is " + std::to_string(backoff) + ", expected 0 < backoff <= 1");
  struct Local {  // kept from call to call, as the search keeps its own
    NgramQuery query;
    double backoff = 1.0;
    WantedTokens wanted;
    std::vector<double> rows;
    std::vector<NgramState> states;
  };
  thread_local Local l;
  if (l.backoff != backoff) l.query = NgramQuery(l.backoff = backoff);
  const std::size_t k = tokens.shape(1), width = contexts.shape(1), n = contexts.shape(0);
  const bool shared = tokens.shape(0) == 1;
  constexpr std::size_t kBlock = 32;
  for (std::size_t first = 0, block; first < n; first += block) {
    block = shared ? std::min(kBlock, n - first) : 1;
    const std::int32_t* const own = tokens.data() + (shared ? 0 : first * k);
    if (first == 0 || !shared) {
      l.wanted.clear(k);
      for (std::size_t j = 0; j < k; ++j)
        if (own[j] >= 0 && l.wanted.find(static_cast<std::uint32_t>(own[j])) < 0) l.wanted.add(own[j]);
    }
    if (l.rows.size() < block * k) l.rows.resize(block * k);
    l.states.resize(block);
    for (std::size_t r = 0; r < block; ++r) l.states[r] = index.state_of({contexts.data() + (first + r) * width, width});
    l.query.score(index, l.states, l.wanted, false, l.rows.data());
    for (std::size_t r = 0; r < block; ++r)
      for (std::size_t j = 0; j < k; ++j) {
        const int i = own[j] < 0 ? -1 : l.wanted.find(static_cast<std::uint32_t>(own[j]));
        out.data()[(first + r) * k + j] =
            i < 0 ? 0.0 : l.rows[r * static_cast<std::size_t>(l.wanted.n) + static_cast<std::size_t>(i)];
      }
  }
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
      .def("verify", [](const NgramIndex& index) { index.verify(); }, nb::call_guard<nb::gil_scoped_release>())
      .def("save", &NgramIndex::save, "path"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("info", &info)
      .def("continuations", [](const NgramIndex& index, In1<std::int32_t> context, std::size_t top) {
            return index.continuations(index.state_of(span_of(context)), top);
          }, "context"_a, "top"_a)
      .def("score", [](const NgramIndex& index, In2<std::int32_t> contexts, In2<std::int32_t> tokens, double backoff, Out2<double> out) {
            expect_shape("out", out.shape(0), contexts.shape(0));
            expect_shape("out", out.shape(1), tokens.shape(1));
            if (tokens.shape(0) != 1) expect_shape("tokens", tokens.shape(0), contexts.shape(0));
            nb::gil_scoped_release release;
            score(index, contexts, tokens, backoff, out);
          }, "contexts"_a, "tokens"_a, "backoff"_a, "out"_a,
          "g(token | context) into `out` (B, k) float64: contexts (B, c), tokens (B, k) or (1, k) for all.");

  nb::class_<TextCounts>(m, "TextCounts", "What a sequence's own text says; see TextCounts in csrc/core/tree_search.hpp.");

  nb::class_<TreeSearch>(m, "TreeSearch", "Beam search over lattices, with its scratch; one call at a time.")
      .def("__init__", [](TreeSearch* self, int top_k, int beam, double level_exponent, double logit_decay,
                          double ngram_weight, double eps, double backoff, double text_weight, double learned_weight,
                          bool ngram_at_level0, bool softmax_over_kept) {
            new (self) TreeSearch({top_k, beam, level_exponent, logit_decay, ngram_weight, eps, backoff, text_weight,
                                   learned_weight, ngram_at_level0, softmax_over_kept});
          }, nb::kw_only(), "top_k"_a, "beam"_a, "level_exponent"_a, "logit_decay"_a, "ngram_weight"_a, "eps"_a,
          "backoff"_a, "text_weight"_a, "learned_weight"_a, "ngram_at_level0"_a, "softmax_over_kept"_a)
      .def("run", [](TreeSearch& self, In2<float> log_probs, In2<std::int32_t> tokens, In1<std::int32_t> context,
                     In1<std::int32_t> eos, const NgramIndex* index, const TextCounts* text,
                     std::optional<In3<float>> learned, Out1<std::int32_t> out_tokens, Out1<std::int32_t> out_parents,
                     Out1<float> out_scores) {
            expect_shape("tokens", tokens.shape(0), log_probs.shape(0));
            expect_shape("tokens", tokens.shape(1), log_probs.shape(1));
            if (context.shape(0) < 1) throw Error("context is empty, expected at least the root");
            if (out_tokens.shape(0) < 1) throw Error("out_tokens has no room for the root");
            expect_shape("out_parents", out_parents.shape(0), out_tokens.shape(0));
            expect_shape("out_scores", out_scores.shape(0), out_tokens.shape(0));
            if (learned) {
              expect_shape("learned", learned->shape(0), log_probs.shape(0));
              for (std::size_t axis : {1, 2}) expect_shape("learned", learned->shape(axis), log_probs.shape(1));
            }
            nb::gil_scoped_release release;
            SearchCase c{log_probs.data(), tokens.data(), int(log_probs.shape(0)), int(log_probs.shape(1)),
                         context.data()[context.shape(0) - 1], span_of(context), text, int(out_tokens.shape(0)) - 1,
                         out_tokens.data(), out_parents.data(), out_scores.data(), 0,
                         learned ? learned->data() : nullptr};
            self.run({&c, 1}, span_of(eos), index);
            return c.found;
          }, "log_probs"_a, "tokens"_a, "context"_a, "eos"_a, "index"_a.none(), "text"_a.none(),
          "learned"_a.none(), "out_tokens"_a, "out_parents"_a, "out_scores"_a,
          "Writes at most len(out_tokens) nodes, the root (the context's last token) included; returns how many.")
      .def("run_batch", [](TreeSearch& self, In3<float> log_probs, In3<std::int32_t> tokens, In2<std::int32_t> contexts,
                           In1<std::int32_t> budgets, In1<std::int32_t> eos, const NgramIndex* index, nb::list texts,
                           std::optional<In4<float>> learned, Out2<std::int32_t> out_tokens,
                           Out2<std::int32_t> out_parents, Out2<float> out_scores, Out1<std::int32_t> out_found,
                           int threads) {
            const std::size_t n = log_probs.shape(0), width = contexts.shape(1), room = out_tokens.shape(1);
            for (std::size_t axis = 0; axis < 3; ++axis) expect_shape("tokens", tokens.shape(axis), log_probs.shape(axis));
            for (std::size_t rows : {contexts.shape(0), budgets.shape(0), out_tokens.shape(0), out_parents.shape(0),
                                     out_scores.shape(0), out_found.shape(0)})
              expect_shape("an argument", rows, n);
            expect_shape("out_parents", out_parents.shape(1), room);
            expect_shape("out_scores", out_scores.shape(1), room);
            if (texts.size() != 0) expect_shape("texts", texts.size(), n);
            if (learned) {
              for (std::size_t axis : {0, 1, 2}) expect_shape("learned", learned->shape(axis), log_probs.shape(axis));
              expect_shape("learned", learned->shape(3), log_probs.shape(2));
            }
            std::vector<SearchCase> cases(n);
            const std::size_t cells = log_probs.shape(1) * log_probs.shape(2);
            for (std::size_t i = 0; i < n; ++i) {
              std::size_t skip = 0;  // a short context has -1 in front
              while (skip < width && contexts.data()[i * width + skip] < 0) ++skip;
              if (skip == width) throw Error("context " + std::to_string(i) + " is empty, expected at least the root");
              const int budget = budgets.data()[i];
              if (budget < 0 || static_cast<std::size_t>(budget) >= room)
                throw Error("budget " + std::to_string(i) + " is " + std::to_string(budget) + ", the buffers hold " +
                            std::to_string(room) + " nodes with the root");
              const TextCounts* text = texts.size() == 0 || texts[i].is_none() ? nullptr : nb::cast<const TextCounts*>(texts[i]);
              cases[i] = {log_probs.data() + i * cells, tokens.data() + i * cells, int(log_probs.shape(1)),
                          int(log_probs.shape(2)), contexts.data()[(i + 1) * width - 1],
                          {contexts.data() + i * width + skip, width - skip}, text, budget, out_tokens.data() + i * room,
                          out_parents.data() + i * room, out_scores.data() + i * room, 0,
                          learned ? learned->data() + i * cells * learned->shape(3) : nullptr};
            }
            nb::gil_scoped_release release;
            self.run(cases, span_of(eos), index, threads);
            for (std::size_t i = 0; i < n; ++i) out_found.data()[i] = cases[i].found;
          }, "log_probs"_a, "tokens"_a, "contexts"_a, "budgets"_a, "eos"_a, "index"_a.none(), "texts"_a,
          "learned"_a.none(), "out_tokens"_a, "out_parents"_a, "out_scores"_a, "out_found"_a, "threads"_a,
          "run() for each of (B, d, k); contexts (B, c) with -1 in front of short ones, texts empty or B of them or None.");

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
