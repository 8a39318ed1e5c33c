// Every instruction set against the portable table, on random and extreme codes.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "check.hpp"
#include "stoker/simd.hpp"

using namespace stoker;

namespace {

constexpr std::size_t kCodes = 11;

void compare(const Kernels& table, std::mt19937& rng) {
  const Kernels& reference = portable_kernels();
  for (const std::size_t blocks : {1u, 2u, 3u, 4u, 5u, 6u, 9u, 18u, 34u, 64u}) {
    std::vector<std::int8_t> q8(blocks * kBlockDims);
    std::vector<std::int16_t> q16(blocks * kBlockDims);
    std::vector<std::uint8_t> high(kCodes * blocks * kBlockBytes);
    std::vector<std::uint8_t> low(high.size());
    for (const bool extreme : {false, true}) {
      for (auto& v : q8) v = static_cast<std::int8_t>(extreme ? 127 : static_cast<int>(rng() % 255) - 127);
      for (auto& v : q16) v = static_cast<std::int16_t>(extreme ? 8191 : static_cast<int>(rng() % 16383) - 8191);
      for (auto& v : high) v = static_cast<std::uint8_t>(extreme ? 0xFF : rng());
      for (auto& v : low) v = static_cast<std::uint8_t>(extreme ? 0xFF : rng());
      std::vector<const std::uint8_t*> pointers;
      for (std::size_t i = 0; i < kCodes; ++i) {
        pointers.push_back(high.data() + i * blocks * kBlockBytes);
      }
      for (std::size_t count = 0; count <= kCodes; ++count) {   // one at a time, and in groups
        std::vector<std::int32_t> expected(kCodes, -1);
        std::vector<std::int32_t> found(kCodes, -1);
        reference.dot_code4(q8.data(), blocks, pointers.data(), count, expected.data());
        table.dot_code4(q8.data(), blocks, pointers.data(), count, found.data());
        CHECK(expected == found);
        if (blocks % 2 != 0) continue;
        reference.dot_code2(q8.data(), blocks / 2, pointers.data(), count, expected.data());
        table.dot_code2(q8.data(), blocks / 2, pointers.data(), count, found.data());
        CHECK(expected == found);
      }
      CHECK(reference.dot_code8(q16.data(), blocks, high.data(), low.data()) ==
            table.dot_code8(q16.data(), blocks, high.data(), low.data()));
    }
  }
  for (const std::size_t dim : {1u, 15u, 16u, 31u, 32u, 48u, 63u, 100u, 384u, 2047u, 2048u}) {
    constexpr std::size_t kRows = 9;
    std::vector<std::int16_t> q16(dim);
    std::vector<std::int8_t> rows(kRows * dim);
    for (const bool extreme : {false, true}) {
      for (auto& v : q16) v = static_cast<std::int16_t>(extreme ? 8191 : static_cast<int>(rng() % 16383) - 8191);
      for (auto& v : rows) v = static_cast<std::int8_t>(extreme ? 127 : static_cast<int>(rng() % 255) - 127);
      for (std::size_t count = 0; count <= kRows; ++count) {
        std::vector<std::int32_t> expected(kRows, -1), found(kRows, -1);
        reference.project(q16.data(), rows.data(), dim, count, expected.data());
        table.project(q16.data(), rows.data(), dim, count, found.data());
        CHECK(expected == found);
      }
      for (std::size_t queries = 0; queries <= 6; ++queries) {
        std::vector<std::int16_t> many(queries * dim);
        for (std::size_t i = 0; i < many.size(); ++i) {
          many[i] = static_cast<std::int16_t>(i < dim ? q16[i] : -q16[i % dim] / static_cast<int>(1 + i / dim));
        }
        std::vector<std::int32_t> expected(queries * kRows, -1), found(queries * kRows, -1);
        reference.project_many(many.data(), queries, rows.data(), dim, kRows, expected.data());
        table.project_many(many.data(), queries, rows.data(), dim, kRows, found.data());
        CHECK(expected == found);
      }
    }
  }
  for (std::size_t dim = 1; dim <= 200; ++dim) {
    std::vector<float> a(dim);
    std::vector<float> b(dim);
    std::vector<std::uint16_t> h(dim);
    std::normal_distribution<float> normal;
    double dot = 0, l2 = 0, dot16 = 0, l216 = 0, size = 0;
    for (std::size_t i = 0; i < dim; ++i) {
      a[i] = normal(rng);
      b[i] = normal(rng);
      h[i] = float_to_half(b[i]);
      const double y = half_to_float(h[i]);
      dot += static_cast<double>(a[i]) * b[i];
      l2 += (static_cast<double>(a[i]) - b[i]) * (static_cast<double>(a[i]) - b[i]);
      dot16 += a[i] * y;
      l216 += (a[i] - y) * (a[i] - y);
      size += std::fabs(static_cast<double>(a[i]) * b[i]);
    }
    const double tolerance = 1e-5 * (1 + size + l2);
    CHECK(std::fabs(table.dot_f32(a.data(), b.data(), dim) - dot) < tolerance);
    CHECK(std::fabs(table.l2_f32(a.data(), b.data(), dim) - l2) < tolerance);
    CHECK(std::fabs(table.dot_f16(a.data(), h.data(), dim) - dot16) < tolerance);
    CHECK(std::fabs(table.l2_f16(a.data(), h.data(), dim) - l216) < tolerance);
  }
}
// What prepares a query gives the same bits everywhere.
void compare_preparation(const Kernels& table, std::mt19937& rng) {
  const Kernels& reference = portable_kernels();
  std::normal_distribution<float> normal;
  for (std::size_t span = 1; span <= 4096; span *= 2) {
    std::vector<float> expected(span);
    for (float& v : expected) v = normal(rng);
    std::vector<float> found = expected;
    reference.hadamard(expected.data(), span);
    table.hadamard(found.data(), span);
    CHECK(expected == found);
  }
  for (std::size_t dim = 0; dim <= 200; ++dim) {
    std::vector<float> v(dim);
    for (float& x : v) x = normal(rng);
    // Halves, which round to even.
    for (std::size_t i = 0; i < dim; i += 3) v[i] = static_cast<float>(i % 7) * 0.5f - 1.5f;
    const float largest = reference.max_abs(v.data(), dim);
    CHECK(largest == table.max_abs(v.data(), dim));
    for (const float to8 : {1.0f, largest > 0 ? 127.0f / largest : 0.0f}) {
      const float to16 = 64.0f * to8;
      std::vector<std::int8_t> q8(dim), q8_found(dim);
      std::vector<std::int16_t> q16(dim), q16_found(dim);
      CHECK(reference.round_query(v.data(), dim, to8, to16, q8.data(), q16.data()) ==
            table.round_query(v.data(), dim, to8, to16, q8_found.data(), q16_found.data()));
      CHECK(q8 == q8_found);
      CHECK(q16 == q16_found);
    }
  }
}

// What codes vectors gives the same bits everywhere, and projections those of single products.
void compare_coding(const Kernels& table, std::mt19937& rng) {
  const Kernels& reference = portable_kernels();
  std::normal_distribution<float> normal;
  constexpr float kInfinite = std::numeric_limits<float>::infinity();
  for (const std::size_t blocks : {1u, 2u, 6u, 17u}) {
    std::vector<float> v(blocks * kBlockDims);
    for (float& x : v) x = normal(rng);
    for (std::size_t i = 0; i < v.size(); i += 5) v[i] = static_cast<float>(i % 11) - 5.0f;
    v[7] = 0.0f;
    // Cells' widths down to ones that are beyond floats: 0 * inf is not a number.
    for (const float inverse : {0.0f, 1.0f, 3.1f, 1e30f, kInfinite}) {
      std::vector<std::uint8_t> high(blocks * kBlockBytes), high_found(high.size());
      std::vector<std::uint8_t> low(high.size()), low_found(high.size());
      double sums[2], found[2];
      reference.encode_planes(v.data(), blocks, inverse, high.data(), low.data(), sums);
      table.encode_planes(v.data(), blocks, inverse, high_found.data(), low_found.data(), found);
      CHECK(high == high_found && low == low_found);
      CHECK(std::memcmp(sums, found, sizeof sums) == 0);
    }
  }
  for (std::size_t count = 0; count <= 100; ++count) {
    std::vector<float> v(count), inverse(count), weights(count);
    for (float& x : v) x = normal(rng);
    for (float& x : inverse) x = 0.1f + std::fabs(normal(rng));
    for (float& x : weights) x = std::fabs(normal(rng));
    if (count > 3) inverse[3] = kInfinite;
    for (const auto& [zoom, top] : {std::pair{4.0f, 63}, {1.0f, 15}, {1.0f, 3}}) {
      std::vector<std::uint8_t> cells(count), found(count);
      const double sum = reference.encode_cells(v.data(), inverse.data(), weights.data(), count,
                                                zoom, top, cells.data());
      CHECK(sum == table.encode_cells(v.data(), inverse.data(), weights.data(), count, zoom, top,
                                      found.data()));
      CHECK(cells == found);
      double plain = 0, size = 0;
      for (std::size_t i = 0; i < count; ++i) {
        CHECK(cells[i] <= top);
        const double at = static_cast<double>(v[i]) * inverse[i] * zoom + 0.5 * (top + 1);
        if (std::isfinite(at)) CHECK(std::fabs(std::clamp(at, 0.0, top + 1.0) - 0.5 - cells[i]) < 0.501);
        const double value = (cells[i] - 0.5 * top) / zoom * v[i] * weights[i];
        plain += value;
        size += std::fabs(value);
      }
      CHECK(std::fabs(plain - sum) <= 1e-12 * size);
    }
    CHECK(reference.squared_length(v.data(), count) == table.squared_length(v.data(), count));
  }
  for (const std::size_t dim : {1u, 8u, 31u, 32u, 96u, 100u, 384u}) {
    constexpr std::size_t kDirections = 11;
    constexpr std::size_t kCount = 37;
    std::vector<float> vectors(kCount * dim), rows(kDirections * dim), out(kCount * kDirections);
    std::vector<std::uint16_t> halves(rows.size());
    for (float& x : vectors) x = normal(rng);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      halves[i] = float_to_half(normal(rng));
      rows[i] = half_to_float(halves[i]);
    }
    table.project_f32(vectors.data(), kCount, rows.data(), dim, kDirections, out.data());
    for (std::size_t n = 0; n < kCount; ++n) {
      for (std::size_t r = 0; r < kDirections; ++r) {
        CHECK(out[n * kDirections + r] ==
              table.dot_f16(vectors.data() + n * dim, halves.data() + r * dim, dim));
      }
    }
  }
}

void halves_round_trip() {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const float value = half_to_float(half);
    if (std::isnan(value)) {
      CHECK(std::isnan(half_to_float(float_to_half(value))));
    } else {
      CHECK(float_to_half(value) == half);
    }
  }
}

}  // namespace

int main() {
  const unsigned seed = 20260101;
  std::printf("seed %u, best table %s\n", seed, kernels().name);
  std::mt19937 rng(seed);
  compare(portable_kernels(), rng);
  for (const Kernels* table : {avx2_kernels(), avx512_kernels(), neon_kernels()}) {
    if (table == nullptr) continue;
    std::printf("comparing %s\n", table->name);
    compare(*table, rng);
    compare_preparation(*table, rng);
    compare_coding(*table, rng);
  }
  compare_coding(portable_kernels(), rng);
  halves_round_trip();
  return 0;
}
