// Live counts: equal to a plain twin while nothing ages; bounded and deterministic when it does; taken off again.
#include "ngram_live.hpp"

#include <map>
#include <random>

#include "check.hpp"

using namespace dartspec;
using Ids = std::vector<std::int32_t>;
using Counts = std::map<Ids, std::map<std::int32_t, std::uint32_t>>;

static Counts twin(const Ids& text, int order, std::int32_t excluded) {
  Counts counts;
  for (std::size_t at = 0; at < text.size(); ++at)
    for (std::size_t n = 1; n < static_cast<std::size_t>(order) && n <= at; ++n) {
      const Ids context(text.begin() + static_cast<std::ptrdiff_t>(at - n), text.begin() + static_cast<std::ptrdiff_t>(at));
      if (text[at] != excluded && std::find(context.begin(), context.end(), excluded) == context.end()) ++counts[context][text[at]];
    }
  return counts;
}

static void equal(const LiveCounts& live, const Counts& expected) {
  std::size_t grams = 0;
  for (const auto& [context, followers] : expected) {
    const auto found = live.after(context);
    CHECK(found.list.size() == followers.size());
    std::uint64_t total = 0;
    for (const Follower& f : found.list) {
      CHECK(followers.at(f.token) == f.count);
      total += f.count;
    }
    CHECK(total == found.total);
    grams += followers.size();
  }
  CHECK(live.num_grams() == grams);
}

int main() {
  std::mt19937 random(1);
  for (int order = 2; order <= 5; ++order) {
    Ids text;
    for (int i = 0; i < 2000; ++i) text.push_back(static_cast<std::int32_t>(random() % 3 ? random() % 9 : (1 << 24) - 9 + random() % 8));
    const Ids excluded{4};
    LiveCounts live(order, 0, excluded);
    std::size_t done = 0;
    while (done < text.size()) {  // in pieces, with the context before each
      const std::size_t to = std::min(text.size(), done + 1 + random() % 40), from = done - std::min<std::size_t>(done, 4);
      live.add(std::span(text).subspan(from, to - from), done - from);
      done = to;
    }
    equal(live, twin(text, order, 4));
    CHECK(live.after(Ids{}).list.empty());
    CHECK(live.after(Ids{4}).list.empty());
    CHECK(live.after(Ids{-1}).list.empty());
    CHECK(live.after(Ids(static_cast<std::size_t>(order), 1)).list.empty());
    Ids grams;
    std::vector<std::int64_t> counts;
    live.passes(grams, counts);
    CHECK(grams.size() == counts.size() * static_cast<std::size_t>(order));
    Counts summed;  // passes give every gram's count back
    for (std::size_t n = 0; n < counts.size(); ++n)
      for (int length = 2; length <= order; ++length) {
        const auto* gram = grams.data() + n * static_cast<std::size_t>(order);
        if (gram[length - 1] < 0) break;
        summed[Ids(gram, gram + length - 1)][gram[length - 1]] += static_cast<std::uint32_t>(counts[n]);
      }
    for (const auto& [context, followers] : twin(text, order, 4))
      if (context.size() == 1 || context.size() + 1 == static_cast<std::size_t>(order))
        for (const auto& [token, count] : followers) CHECK(summed[context][token] >= count);
    live.remove(text, 0);
    CHECK(live.num_grams() == 0);
    live.remove(text, 0);
    CHECK(live.num_grams() == 0);
  }
  {  // bounded; the recent and the frequent stay; the same twice
    LiveCounts a(3, 300, {}), b(3, 300, {});
    for (int i = 0; i < 4000; ++i) {
      const Ids text{1, 2, static_cast<std::int32_t>(random() % 5000), static_cast<std::int32_t>(random() % 5000), 1, 2, 3};
      for (LiveCounts* live : {&a, &b}) {
        live->add(text, 0);
        CHECK(live->num_grams() <= 300);
      }
    }
    CHECK(a.num_halvings() > 10 && a.num_halvings() == b.num_halvings());
    const auto after = a.after(Ids{1, 2});
    CHECK(after.list[0].token == 3 && after.list[0].count > after.total / 4);
    std::vector<std::int32_t> grams[2];
    std::vector<std::int64_t> counts[2];
    a.passes(grams[0], counts[0]);
    b.passes(grams[1], counts[1]);
    CHECK(grams[0] == grams[1] && counts[0] == counts[1]);
  }
  CHECK(contains(refused([] { LiveCounts(1, 0, {}); }), "order is 1, expected 2 to 5"));
  CHECK(contains(refused([] { LiveCounts(3, 0, {}).add(Ids{1}, 2); }), "first is 2"));
}
