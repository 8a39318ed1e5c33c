// The true best rows of many queries, while rows stream past.
//
// Rounded to 8 bits, a row's product with a query is off by at most what rounding took off both, and
// few rows come that near to a query's best so far: only those meet it in full. What is kept is what
// products in full would have kept.
#pragma once

#include <cstddef>
#include <cstdint>

namespace stoker {

struct BestRows {
  const float* queries;   // count * dim
  std::size_t count;
  std::size_t dim;
  std::size_t k;
  bool l2;                // scores are 2 <q, x> - <x, x>, else <q, x>
  float* scores;          // count * k, falling; those of before, -infinity where there is no row yet
  std::int64_t* rows;     // count * k
};

// Meets `count` rows of best.dim floats, the first of which is called `first_row`.
void meet_rows(const BestRows& best, const float* vectors, std::size_t count,
               std::int64_t first_row);

}  // namespace stoker
