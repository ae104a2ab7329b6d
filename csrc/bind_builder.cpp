// Binds what makes an index: the builder, and pruning; and what a person asks of one. Arrays in, the GIL dropped.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "ngram_builder.hpp"
#include "ngram_live.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace dartspec;

namespace {

template <class T> using In1 = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T> using In2 = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <class T>
std::span<const T> span_of(const In1<T>& a) { return {a.data(), a.shape(0)}; }

}  // namespace

void bind_builder(nb::module_& m) {
  using Released = nb::call_guard<nb::gil_scoped_release>;

  nb::class_<NgramBuilder>(m, "NgramBuilder", "Counts n-grams and writes index files; see dartspec.ngram.build.")
      .def("__init__", [](NgramBuilder* self, int order, std::uint32_t vocab_size, In1<std::int32_t> exclude,
                          std::uint64_t memory_bytes, int threads, std::string folder, std::string identity) {
            const auto excluded = span_of(exclude);
            new (self) NgramBuilder({order, vocab_size, {excluded.begin(), excluded.end()}, memory_bytes, threads,
                                     std::move(folder), std::move(identity)});
          }, "order"_a, "vocab_size"_a, "exclude"_a, nb::kw_only(), "memory_bytes"_a = 256u << 20, "threads"_a = 1,
          "folder"_a = "", "identity"_a = "",
          "Sorted runs go to `folder`, and those that lie there are taken up; without one they stay in memory.")
      .def("add_documents", [](NgramBuilder& b, In1<std::int32_t> tokens, In1<std::int64_t> ends, std::uint64_t first,
                               std::uint64_t tail, std::uint64_t weight) {
            nb::gil_scoped_release release;
            b.add_documents(span_of(tokens), span_of(ends), first, tail, weight);
          }, "tokens"_a, "ends"_a, "first"_a = 0, "tail"_a = 0, "weight"_a = 1)
      .def("add_document", [](NgramBuilder& b, In1<std::int32_t> tokens, std::uint64_t weight) {
            nb::gil_scoped_release release;
            b.sorter().add_document(span_of(tokens), 0, weight);
          }, "tokens"_a, "weight"_a = 1)
      .def("add_grams", [](NgramBuilder& b, In2<std::int32_t> grams, In1<std::int64_t> counts) {
            nb::gil_scoped_release release;
            b.add_grams({grams.data(), grams.shape(0) * grams.shape(1)}, span_of(counts));
          }, "grams"_a, "counts"_a)
      .def("add_index", &NgramBuilder::add_index, "index"_a, "weight"_a = 1, Released())
      .def("add_trie", &NgramBuilder::add_trie, "path"_a, "folder"_a, Released(), "Returns the number of its nodes.")
      .def("add_run", [](NgramBuilder& b, const std::string& path, const std::string& identity, std::uint64_t weight) {
            b.sorter().add_run(path, identity, weight);
          }, "path"_a, "identity"_a, "weight"_a = 1, Released())
      .def("write_run", [](NgramBuilder& b, const std::string& path, const std::string& identity) {
            b.sorter().write_run(path, identity);
          }, "path"_a, "identity"_a, Released(), "All that was added, as one file for add_run() of another builder.")
      .def("spill", [](NgramBuilder& b) { b.sorter().spill(); }, Released(), "All that was added lies in the folder then.")
      .def("progress", [](NgramBuilder& b) {
            const GramProgress p = b.sorter().progress();
            return std::tuple(p.documents, p.offset, p.positions);
          }, "Whole documents added, positions of the next one, positions altogether; those taken up included.")
      .def("merged", [](NgramBuilder& b) {
            return std::tuple(b.sorter().entries_merged(), b.sorter().entries_spilled(), b.nodes_written());
          }, "Entries read by finish() so far, entries of all runs, nodes written.")
      .def("trie_bytes_read", &NgramBuilder::trie_bytes_read)
      .def("spilled_bytes", [](NgramBuilder& b) { return b.sorter().bytes_spilled(); })
      .def("remove_files", [](NgramBuilder& b) { b.sorter().remove_files(); })
      .def("finish", [](NgramBuilder& b, bool exact, std::uint64_t min_count, const std::string& fingerprint,
                        const std::string& name, const std::string& description, const std::string& path) {
            return b.finish(path, exact, min_count, fingerprint, name, description);
          }, "exact"_a, "min_count"_a, "fingerprint"_a, "name"_a, "description"_a, "path"_a = "", Released());

  nb::class_<LiveCounts, TextCounts>(m, "LiveCounts", "Counts of a running text, or of all that a process has written.")
      .def("__init__", [](LiveCounts* self, int order, std::size_t max_grams, In1<std::int32_t> exclude) {
            new (self) LiveCounts(order, max_grams, span_of(exclude));
          }, "order"_a, "max_grams"_a, "exclude"_a)
      .def("add", [](LiveCounts& live, In1<std::int32_t> tokens, std::size_t first) { live.add(span_of(tokens), first); },
           "tokens"_a, "first"_a = 0, "Counts the grams that end in tokens[first] or behind it.")
      .def("remove", [](LiveCounts& live, In1<std::int32_t> tokens, std::size_t first) { live.remove(span_of(tokens), first); },
           "tokens"_a, "first"_a = 0, "Takes the same grams off again.")
      .def("num_grams", &LiveCounts::num_grams)
      .def("num_halvings", &LiveCounts::num_halvings)
      .def("after", [](const LiveCounts& live, In1<std::int32_t> context) {
            std::vector<std::pair<std::int32_t, std::uint32_t>> out;
            for (const Follower& f : live.after(span_of(context)).list) out.emplace_back(f.token, f.count);
            return out;
          }, "context"_a, "Tokens that followed, each with its count.")
      .def("passes", [](const LiveCounts& live) {
            std::vector<std::int32_t> grams;
            std::vector<std::int64_t> counts;
            live.passes(grams, counts);
            return std::pair(std::move(grams), std::move(counts));
          }, "Grams padded with -1, one behind the other, and counts, as NgramBuilder.add_grams takes them.");
  m.def("context_lengths", [](const NgramIndex& index, In1<std::int32_t> context, In1<std::int32_t> tokens) {
          const NgramState state = index.state_of(span_of(context));
          std::vector<int> lengths;
          for (std::int32_t token : span_of(tokens)) {
            std::size_t length = static_cast<std::size_t>(index.info().order) - 1;
            for (; length > 0; --length) {  // a state that knows one context alone has nowhere to back off to
              NgramState only;
              only.nodes.fill(kNoNode);
              only.nodes[length - 1] = state.nodes[length - 1];
              if (index.probability(only, token) > 0.0) break;
            }
            lengths.push_back(static_cast<int>(length));
          }
          return lengths;
        }, "index"_a, "context"_a, "tokens"_a, "How many tokens of context each token's probability rests on; 0 when unseen.");
  m.def("prune_index", &prune, "index"_a, "path"_a, "exact"_a, "min_count"_a, "description"_a, Released());
}
