// Writes the fuzzer's first inputs: one small index of each order and form.   fuzz_seeds csrc/tests/fuzz_corpus
#include "toy_index.hpp"

int main(int argc, char** argv) {
  if (argc != 2) return 1;
  const std::vector<dartspec::Ids> documents = {{1, 2, 1, 2, 0, 5, 1, 2, 3}, {2, 1, 3, 1, 2, 1, 5}, {4, 4, 4, 4, 1, 2}};
  for (int order = 2; order <= 5; ++order)
    for (bool exact : {false, true}) {
      std::vector<dartspec::Ids> longer = documents;
      if (order == 3)  // a list that is searched, not scanned
        for (std::int32_t t = 0; t < 200; ++t) longer.push_back({1, t % 64, t});
      dartspec::toy_index(longer, order, order == 3 ? 200 : 8, exact,
                          std::string(argv[1]) + "/order" + std::to_string(order) + (exact ? "_exact" : "_coded"));
    }
}
