// Bounded rows of weighted edges, and the links that a run of rows of keys makes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace stoker {

// Row-major, `degree` slots a row; an empty slot has target -1 and weight 0. Borrowed.
struct EdgeRows {
  std::int32_t* targets = nullptr;
  double* weights = nullptr;
  std::size_t rows = 0;
  std::size_t degree = 0;
};

// Strengthens tail -> head by `weights[i]`; loops are left out. Equal pairs are summed in the order
// given; then known edges grow, and then each row's new edges replace its weakest slots, the
// strongest new one first (ties: the smaller head, the lower slot), as many as the row has slots.
// Throws BadInput where a key is out of range; then nothing was changed.
void add_edges(const EdgeRows& table, const std::int64_t* tails, const std::int64_t* heads,
               const double* weights, std::size_t count);

// Adds to `values`, of `parts` rows of `keys` columns, each run's growth (`grown`, of `parts` rows
// of `runs` columns) times the amount, for each of the run's keys in their order. Throws BadInput
// where a key or a size is out of range; then nothing was changed.
void add_runs(double* values, std::size_t parts, std::size_t keys, const std::int64_t* numbers,
              std::size_t count, const std::int64_t* sizes, const double* grown, std::size_t runs,
              const double* amounts);

struct Links {
  std::vector<std::int64_t> tails, heads, rows;
};

// Links each key of a row with the `window` keys after it, both ways, where `linked[row]`; then
// adds the row's own `followed` links. By rising row; keys below 0 link nothing.
// `followed` must be ordered by its rows.
Links links_of(const std::vector<std::int64_t>& sizes, const std::vector<std::int64_t>& numbers,
               const std::uint8_t* linked, std::size_t window, const Links& followed);

}  // namespace stoker
