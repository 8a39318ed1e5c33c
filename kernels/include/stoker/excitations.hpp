// What has been asked for, and what it makes likelier: rows of excitations that fade, and bounded
// counts of what goes with a key. Forecasts are sums over such rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace stoker {

// Row-major, `terms` columns a row, and the sum of each column. Borrowed.
struct Excitations {
  double* values = nullptr;
  double* sums = nullptr;
  std::size_t rows = 0;
  std::size_t terms = 0;
};

// Amounts for some rows: a column of the rows takes the amount `groups[column]`, none where that
// is below 0. `amounts` is row-major, of `count` rows of `width`.
struct Amounts {
  const std::int64_t* rows = nullptr;
  std::size_t count = 0;
  const double* amounts = nullptr;
  std::size_t width = 0;
  const std::int64_t* groups = nullptr;  // one a term, below `width`
};

// Adds amounts times the growth of each column; rows may repeat. Throws BadInput where a row or a
// group is out of range; then nothing was changed.
void add_excitations(const Excitations& table, const Amounts& added, const double* grown);

// Takes amounts back, times the growth that each column had when they came; nothing falls below 0.
// Throws as `add_excitations`.
void withdraw_excitations(const Excitations& table, const Amounts& added, const double* grown);

// Writes the weighted sum of each row, plus `base`, to `out`. As float32: sums that are equal but
// for the order in which they came about are then equal, so that rounding decides nothing.
void weighted_rows(const double* values, std::size_t rows, std::size_t terms,
                   const double* weights, double base, float* out);

// Adds to `out`, one a term, what part of each of these rows' weighted sums plus `base` (> 0) the
// term has. Throws BadInput where a row is out of range; then nothing was changed.
void add_shares(const double* values, std::size_t rows, std::size_t terms,
                const std::int64_t* picked, std::size_t count, const double* weights, double base,
                double* out);

// Rows that a renewal of a content took out and brought in; each in the order of its kind.
struct Renewal {
  std::vector<std::int64_t> left, came;
};

// Renews which rows are inside, by their rates: first the least leave until no more than `capacity`
// are there; then up to `swaps` of the best outside come, into free room, and after that for the
// least inside while worth more than `gain` (>= 1) times those. Of equal rates, the lower row leaves
// first and comes first.
Renewal renew_rows(const float* rates, bool* inside, std::size_t rows, std::size_t capacity,
                   std::size_t swaps, float gain);

// What part of what goes with some keys fell to whom, in the order of their first mention.
struct Spread {
  std::vector<std::int64_t> keys;
  std::vector<double> amounts;  // row-major, one row a key
};

// How often a key was seen, and with what. A row that grows beyond twice the degree is cut to its
// `degree` strongest; of equals, those that came first stay. One thread at a time.
class LinkCounts {
 public:
  explicit LinkCounts(std::size_t degree);

  // Counts each key as seen once, together with all of `others` but itself. Throws BadInput on a
  // number that is no key (below 0, or 2^31 and more); then nothing was changed.
  void add(const std::int64_t* keys, std::size_t count, const std::int64_t* others,
           std::size_t others_count);

  // Gives each companion of each key its share of the key's amounts (row-major, `width` a key):
  // its count over how often the key was seen, plus `prior`. A key that was never seen gives none.
  Spread spread(const std::int64_t* keys, std::size_t count, const double* amounts,
                std::size_t width, double prior) const;

  // Gives keys new numbers; below 0 a key is forgotten. Throws BadInput where a known key has no
  // entry; then nothing was changed.
  void renumber(const std::int64_t* numbers, std::size_t count);

  // Bytes held.
  std::size_t bytes() const;

 private:
  struct Row {
    double seen = 0.0;
    std::vector<std::int32_t> others;
    std::vector<std::uint32_t> counts;
  };

  void cut(Row& row) const;

  std::size_t degree_;
  std::vector<Row> rows_;
  // Where a key stands in the spread that is being made, plus 1; all 0 between two.
  mutable std::vector<std::uint32_t> places_;
};

}  // namespace stoker
