// Excitations added, withdrawn and weighed; counts of companions against a plain model.
#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "check.hpp"
#include "stoker/errors.hpp"
#include "stoker/excitations.hpp"

namespace {

using namespace stoker;

void test_add_and_withdraw() {
  std::vector<double> values(9, 1.0);  // three rows of three terms
  std::vector<double> sums(3, 3.0);
  const Excitations table{values.data(), sums.data(), 3, 3};
  const std::int64_t rows[] = {2, 0, 2};
  const double amounts[] = {1.0, 5.0, 2.0, 6.0, 3.0, 7.0};
  const std::int64_t groups[] = {1, -1, 0};
  const double grown[] = {1.0, 9.0, 10.0};
  add_excitations(table, {rows, 3, amounts, 2, groups}, grown);
  CHECK(values == (std::vector<double>{7.0, 1.0, 21.0, 1.0, 1.0, 1.0, 13.0, 1.0, 41.0}));
  CHECK(sums == (std::vector<double>{21.0, 3.0, 63.0}));
  withdraw_excitations(table, {rows, 3, amounts, 2, groups}, grown);
  CHECK(values == std::vector<double>(9, 1.0));
  CHECK(sums == std::vector<double>(3, 3.0));
  withdraw_excitations(table, {rows, 1, amounts, 2, groups}, grown);  // more than there is
  CHECK_EQ(values[6], 0.0);
  CHECK(sums == (std::vector<double>{2.0, 3.0, 2.0}));
  const std::int64_t outside[] = {0, 3, 1};
  const std::int64_t below[] = {0, 1, -1};
  const std::int64_t wide[] = {0, 2, 1};
  const std::vector<double> before = values;
  CHECK_THROWS(add_excitations(table, {outside, 3, amounts, 2, groups}, grown), BadInput,
               "row 3 of 3");
  CHECK_THROWS(withdraw_excitations(table, {below, 3, amounts, 2, groups}, grown), BadInput,
               "row -1 of 3");
  CHECK_THROWS(add_excitations(table, {rows, 3, amounts, 2, wide}, grown), BadInput,
               "amount 2 of 2");
  CHECK(values == before);
}

void test_weighted_rows() {
  const double values[] = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0};
  const double weights[] = {1.0, 10.0, 100.0};
  std::vector<float> out(2);
  weighted_rows(values, 2, 3, weights, 0.5, out.data());
  CHECK(out == (std::vector<float>{321.5f, 654.5f}));
}

void test_shares() {
  const double values[] = {1.0, 2.0, 3.0, 1.0};  // two rows of two terms
  const double weights[] = {1.0, 0.5};
  std::vector<double> out{10.0, 20.0};
  const std::int64_t rows[] = {1, 0};
  add_shares(values, 2, 2, rows, 2, weights, 0.5, out.data());
  CHECK(out == (std::vector<double>{10.0 + 3.0 / 4.0 + 1.0 / 2.5, 20.0 + 0.5 / 4.0 + 1.0 / 2.5}));
  const std::int64_t outside[] = {0, 2};
  const std::vector<double> before = out;
  CHECK_THROWS(add_shares(values, 2, 2, outside, 2, weights, 0.5, out.data()), BadInput,
               "row 2 of 2");
  CHECK(out == before);
}

void test_renewal() {
  using Rows = std::vector<std::int64_t>;
  const float rates[] = {5.0f, 1.0f, 1.0f, 9.0f, 4.0f, 9.0f};
  bool inside[] = {true, true, true, false, true, false};
  Renewal out = renew_rows(rates, inside, 6, 2, 0, 1.5f);  // too many: the least leave
  CHECK(out.left == (Rows{1, 2}));
  CHECK(out.came.empty());
  out = renew_rows(rates, inside, 6, 2, 8, 1.5f);  // 9 for 4, and 9 for 5
  CHECK(out.left == (Rows{4, 0}));
  CHECK(out.came == (Rows{3, 5}));
  out = renew_rows(rates, inside, 6, 4, 1, 1.5f);  // one may come, into free room
  CHECK(out.left.empty());
  CHECK(out.came == Rows{0});
  out = renew_rows(rates, inside, 6, 4, 3, 1.0f);  // one more is free, nothing else pays
  CHECK(out.left.empty());
  CHECK(out.came == Rows{4});
  out = renew_rows(rates, inside, 6, 0, 3, 1.0f);  // no room at all
  CHECK(out.left == (Rows{4, 0, 3, 5}));
  CHECK(out.came.empty());
  CHECK(std::none_of(inside, inside + 6, [](bool in) { return in; }));
  CHECK(renew_rows(rates, inside, 0, 2, 3, 1.0f).came.empty());
}

// The slow and obvious way.
struct Model {
  struct Row {
    double seen = 0.0;
    std::vector<std::pair<std::int64_t, double>> counts;
  };
  std::size_t degree;
  std::map<std::int64_t, Row> rows;

  void add(const std::vector<std::int64_t>& keys, const std::vector<std::int64_t>& others) {
    for (const std::int64_t key : keys) {
      Row& row = rows[key];
      row.seen += 1.0;
      for (const std::int64_t other : others) {
        if (other == key) continue;
        auto found = std::find_if(row.counts.begin(), row.counts.end(),
                                  [other](const auto& have) { return have.first == other; });
        if (found == row.counts.end()) found = row.counts.insert(found, {other, 0.0});
        found->second += 1.0;
      }
      if (row.counts.size() > 2 * degree) {
        std::stable_sort(row.counts.begin(), row.counts.end(),
                         [](const auto& a, const auto& b) { return a.second > b.second; });
        row.counts.resize(degree);
      }
    }
  }

  std::map<std::int64_t, double> spread(const std::vector<std::int64_t>& keys,
                                        const std::vector<double>& amounts, double prior) const {
    std::map<std::int64_t, double> out;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const auto found = rows.find(keys[i]);
      if (found == rows.end()) continue;
      for (const auto& [other, count] : found->second.counts) {
        out[other] += amounts[i] / (found->second.seen + prior) * count;
      }
    }
    return out;
  }

  void renumber(const std::vector<std::int64_t>& numbers) {
    std::map<std::int64_t, Row> moved;
    for (const auto& [key, row] : rows) {
      if (numbers[static_cast<std::size_t>(key)] < 0) continue;
      Row& to = moved[numbers[static_cast<std::size_t>(key)]];
      to.seen = row.seen;
      for (const auto& [other, count] : row.counts) {
        const std::int64_t number = numbers[static_cast<std::size_t>(other)];
        if (number >= 0) to.counts.push_back({number, count});
      }
    }
    rows = std::move(moved);
  }
};

void test_counts_against_the_model() {
  std::mt19937 random(7);
  LinkCounts counts(4);
  Model model{4, {}};
  std::int64_t total = 40;
  for (int step = 0; step < 3000; ++step) {
    std::vector<std::int64_t> all(static_cast<std::size_t>(total));
    std::iota(all.begin(), all.end(), std::int64_t{0});
    std::shuffle(all.begin(), all.end(), random);
    const std::vector<std::int64_t> keys(all.begin(), all.begin() + 3);
    const std::vector<std::int64_t> others(all.begin() + 1, all.begin() + 6);
    counts.add(keys.data(), keys.size(), others.data(), others.size());
    model.add(keys, others);
    if (step % 500 == 499) {  // a third is forgotten, the rest turned around
      std::vector<std::int64_t> numbers(static_cast<std::size_t>(total));
      for (std::int64_t key = 0; key < total; ++key) {
        numbers[static_cast<std::size_t>(key)] = key % 3 == 0 ? -1 : total - 1 - key;
      }
      counts.renumber(numbers.data(), numbers.size());
      model.renumber(numbers);
    }
    const std::vector<double> amounts{1.0, 0.5, 0.25};
    const std::vector<double> wide{1.0, 2.0, 0.5, 1.0, 0.25, 0.5};
    const auto expected = model.spread(keys, amounts, 3.0);
    const Spread one = counts.spread(keys.data(), keys.size(), amounts.data(), 1, 3.0);
    const Spread two = counts.spread(keys.data(), keys.size(), wide.data(), 2, 3.0);
    CHECK_EQ(one.keys.size(), expected.size());
    CHECK(one.keys == two.keys);
    for (std::size_t i = 0; i < one.keys.size(); ++i) {
      CHECK_EQ(one.amounts[i], expected.at(one.keys[i]));
      CHECK_EQ(two.amounts[2 * i], one.amounts[i]);
      CHECK_EQ(two.amounts[2 * i + 1], 2.0 * one.amounts[i]);
    }
  }
  CHECK(counts.bytes() > 0);
}

void test_bad_numbers() {
  LinkCounts counts(2);
  const std::int64_t good[] = {0, 1};
  const std::int64_t bad[] = {0, -1};
  const std::int64_t huge[] = {0, std::int64_t{1} << 31};
  const double amounts[] = {1.0, 1.0};
  CHECK_THROWS(LinkCounts(0), BadInput, "at least one");
  CHECK_THROWS(counts.add(bad, 2, good, 2), BadInput, "key -1");
  CHECK_THROWS(counts.add(good, 2, huge, 2), BadInput, "is no number");
  CHECK(counts.spread(good, 2, amounts, 1, 3.0).keys.empty());
  counts.add(good, 2, good, 2);
  CHECK_THROWS(counts.spread(bad, 2, amounts, 1, 3.0), BadInput, "key -1");
  CHECK_EQ(counts.spread(good, 2, amounts, 1, 3.0).keys.size(), 2u);  // nothing was left behind
  CHECK_THROWS(counts.renumber(good, 1), BadInput, "no new number");
  CHECK_EQ(counts.spread(good, 2, amounts, 1, 3.0).keys.size(), 2u);
}

}  // namespace

int main() {
  RUN(test_add_and_withdraw);
  RUN(test_weighted_rows);
  RUN(test_shares);
  RUN(test_renewal);
  RUN(test_counts_against_the_model);
  RUN(test_bad_numbers);
  return 0;
}
