#include "stoker/best_rows.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "stoker/simd.hpp"

namespace stoker {
namespace {

constexpr std::size_t kRowsTogether = 64;
// A vector whose largest coordinate is smaller is not rounded: squares of what that takes off would
// vanish, and with them the bounds. It meets, and is met, in full.
constexpr float kLargestMin = 1e-12f;

// A sum in parts: one alone would have each addition wait for the last.
constexpr std::size_t kLanes = 16;
struct Lanes {
  float values[kLanes] = {};
  float sum() const {
    float all = 0;
    for (const float value : values) all += value;
    return all;
  }
};

// Vectors rounded to whole numbers, and by how much that is off.
template <typename T>
struct Rounded {
  std::vector<T> values;
  std::vector<float> scales;    // vector ~ values * scale
  std::vector<float> lengths;
  std::vector<float> errors;    // length of what was taken off

  void assign(const float* vectors, std::size_t count, std::size_t dim, float top) {
    values.resize(count * dim);
    scales.resize(count);
    lengths.resize(count);
    errors.resize(count);
    for (std::size_t n = 0; n < count; ++n) {
      const float* v = vectors + n * dim;
      T* out = values.data() + n * dim;
      const float largest = kernels().max_abs(v, dim);
      const bool rounds = largest >= kLargestMin;
      const float scale = rounds ? largest / top : 0.0f;
      const float inverse = rounds ? top / largest : 0.0f;
      Lanes off;
      Lanes squared;
      const auto round = [&](std::size_t d, std::size_t lane) {
        // Adding and taking off 1.5 * 2^23 rounds to a whole number, as quickly as it gets.
        const float whole = (v[d] * inverse + 12582912.0f) - 12582912.0f;
        out[d] = static_cast<T>(static_cast<std::int32_t>(whole));
        const float rest = v[d] - whole * scale;
        off.values[lane] += rest * rest;
        squared.values[lane] += v[d] * v[d];
      };
      std::size_t d = 0;
      for (; d + kLanes <= dim; d += kLanes) {
        for (std::size_t lane = 0; lane < kLanes; ++lane) round(d + lane, lane);
      }
      for (; d < dim; ++d) round(d, 0);
      scales[n] = scale;
      lengths[n] = std::sqrt(squared.sum());
      errors[n] = rounds ? std::sqrt(off.sum()) : std::numeric_limits<float>::infinity();
    }
  }
};

void keep(const BestRows& best, std::size_t q, float score, std::int64_t row) {
  float* scores = best.scores + q * best.k;
  std::int64_t* rows = best.rows + q * best.k;
  std::size_t at = best.k - 1;
  for (; at > 0 && scores[at - 1] < score; --at) {
    scores[at] = scores[at - 1];
    rows[at] = rows[at - 1];
  }
  scores[at] = score;
  rows[at] = row;
}

}  // namespace

void meet_rows(const BestRows& best, const float* vectors, std::size_t count,
               std::int64_t first_row) {
  const std::size_t dim = best.dim;
  if (best.count == 0 || best.k == 0 || dim == 0) return;
  const Kernels& k = kernels();
  // So much of a query that no sum overflows 32 bits.
  const float top = std::min(
      8191.0f, std::floor(2147483647.0f / (127.0f * 1.01f * static_cast<float>(dim))));
  Rounded<std::int16_t> queries;
  queries.assign(best.queries, best.count, dim, top);
  Rounded<std::int8_t> rows;
  std::vector<std::int32_t> sums(best.count * kRowsTogether);
  std::vector<float> squares(kRowsTogether), scales(kRowsTogether);
  std::vector<float> errors(kRowsTogether), lengths(kRowsTogether);
  // What sums of floats may be off themselves, of the product of the lengths.
  const float slop = static_cast<float>(dim + 8) * std::numeric_limits<float>::epsilon();
  const float factor = best.l2 ? 2.0f : 1.0f;
  for (std::size_t start = 0; start < count; start += kRowsTogether) {
    const std::size_t here = std::min(kRowsTogether, count - start);
    const float* block = vectors + start * dim;
    rows.assign(block, here, dim, 127.0f);
    for (std::size_t r = 0; r < here; ++r) {
      squares[r] = best.l2 ? k.dot_f32(block + r * dim, block + r * dim, dim) : 0.0f;
      scales[r] = factor * rows.scales[r];
      errors[r] = factor * 1.001f * (rows.errors[r] + slop * rows.lengths[r]);
      lengths[r] = factor * 1.001f * rows.lengths[r];
    }
    k.project_many(queries.values.data(), best.count, rows.values.data(), dim, here, sums.data());
    for (std::size_t q = 0; q < best.count; ++q) {
      const std::int32_t* of = sums.data() + q * here;
      const float scale = queries.scales[q];
      const float length = queries.lengths[q] + queries.errors[q];
      const float error = queries.errors[q];
      const auto most = [&](std::size_t r) {
        return static_cast<float>(of[r]) * scale * scales[r] + length * errors[r] +
               error * lengths[r] - squares[r];
      };
      const float& last = best.scores[(q + 1) * best.k - 1];
      int near = 0;
      // What is not a number is looked at too.
      for (std::size_t r = 0; r < here; ++r) near += most(r) <= last ? 0 : 1;
      if (near == 0) continue;
      for (std::size_t r = 0; r < here; ++r) {
        if (most(r) <= last) continue;
        const float score =
            factor * k.dot_f32(best.queries + q * dim, block + r * dim, dim) - squares[r];
        if (score > last) keep(best, q, score, first_row + static_cast<std::int64_t>(start + r));
      }
    }
  }
}

}  // namespace stoker
