// The rotation keeps lengths and angles; the estimates are unbiased and get better by plane.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "../src/walk.hpp"
#include "check.hpp"
#include "stoker/errors.hpp"
#include "stoker/quantizer.hpp"
#include "stoker/simd.hpp"

using namespace stoker;

namespace {

void rotation_is_orthonormal(std::size_t dim, std::mt19937& rng) {
  std::normal_distribution<float> normal;
  const Rotation rotation(dim, 42);
  std::vector<float> a(dim), b(dim);
  for (float& v : a) v = normal(rng);
  for (float& v : b) v = normal(rng);
  double aa = 0, ab = 0, scale = 0;
  for (std::size_t i = 0; i < dim; ++i) {
    aa += static_cast<double>(a[i]) * a[i];
    ab += static_cast<double>(a[i]) * b[i];
    scale += std::fabs(static_cast<double>(a[i]) * b[i]);
  }
  rotation.apply(a.data());
  rotation.apply(b.data());
  double raa = 0, rab = 0;
  for (std::size_t i = 0; i < dim; ++i) {
    raa += static_cast<double>(a[i]) * a[i];
    rab += static_cast<double>(a[i]) * b[i];
  }
  CHECK(std::fabs(raa - aa) <= 1e-4 * (1 + aa));
  CHECK(std::fabs(rab - ab) <= 1e-4 * (1 + aa + scale));
}

struct Errors {
  double coarse = 0;
  double code = 0;
  double refine = 0;
};

Errors estimate(std::size_t dim, std::mt19937& rng) {
  std::normal_distribution<float> normal;
  constexpr std::size_t kCount = 200;
  std::vector<float> vectors(kCount * dim), centre(dim), query(dim);
  for (float& v : vectors) v = normal(rng);
  for (float& v : centre) v = 0.3f * normal(rng);
  for (float& v : query) v = normal(rng);
  const Quantizer quantizer(dim, 7, centre.data());
  const CodeShape& shape = quantizer.shape();
  std::vector<std::uint8_t> codes(kCount * shape.code_record_bytes);
  std::vector<std::uint8_t> refines(kCount * shape.refine_record_bytes);
  std::vector<std::uint8_t> coarse(kCount * shape.coarse_record_bytes);
  quantizer.encode(vectors.data(), kCount, codes.data(), refines.data(), coarse.data());
  PreparedQuery prepared;
  prepare_query(quantizer, query.data(), false, prepared);
  Errors errors;
  for (std::size_t i = 0; i < kCount; ++i) {
    const std::uint8_t* code = codes.data() + i * shape.code_record_bytes;
    const std::uint8_t* refine = refines.data() + i * shape.refine_record_bytes;
    double product = 0, length2 = 0;
    for (std::size_t d = 0; d < dim; ++d) {
      const double x = vectors[i * dim + d] - static_cast<double>(centre[d]);
      product += query[d] * x;
      length2 += x * x;
    }
    float correction, stored_length2, refined;
    std::memcpy(&correction, code + shape.code_bytes, 4);
    std::memcpy(&stored_length2, code + shape.code_bytes + 4, 4);
    std::memcpy(&refined, refine + shape.code_bytes, 4);
    CHECK(std::fabs(stored_length2 - length2) < 1e-3 * (1 + length2));
    std::int32_t dot4;
    kernels().dot_code4(prepared.q8.data(), shape.blocks, &code, 1, &dot4);
    const double by_code =
        (dot4 - 7.5 * prepared.sum8) * static_cast<double>(prepared.scale8) * correction;
    const double by_both =
        static_cast<double>(kernels().dot_code8(prepared.q16.data(), shape.blocks, code, refine)) *
        static_cast<double>(prepared.scale16) * refined;
    const double scale = prepared.length * std::sqrt(length2);
    const std::uint8_t* two = coarse.data() + i * shape.coarse_record_bytes;
    float coarse_correction;
    std::memcpy(&coarse_correction, two + shape.coarse_bytes, 4);
    std::memcpy(&stored_length2, two + shape.coarse_bytes + 4, 4);
    CHECK(std::fabs(stored_length2 - length2) < 1e-3 * (1 + length2));
    std::int32_t dot2;
    kernels().dot_code2(prepared.q8.data(), shape.coarse_blocks, &two, 1, &dot2);
    const double by_coarse =
        (dot2 - 1.5 * prepared.sum8) * static_cast<double>(prepared.scale8) * coarse_correction;
    errors.coarse += std::pow((by_coarse - product) / scale, 2);
    errors.code += std::pow((by_code - product) / scale, 2);
    errors.refine += std::pow((by_both - product) / scale, 2);
  }
  errors.coarse = std::sqrt(errors.coarse / kCount);
  errors.code = std::sqrt(errors.code / kCount);
  errors.refine = std::sqrt(errors.refine / kCount);
  return errors;
}

// A basis of the first `directions` coordinates, which vary the most.
CoarseBasis leading(std::size_t dim, std::size_t wide_blocks, std::size_t directions,
                    const std::vector<float>& spread, std::size_t blocks = 0,
                    std::size_t fine = 0) {
  CoarseBasis basis;
  basis.blocks = blocks;
  basis.fine = fine;
  basis.wide_blocks = wide_blocks;
  basis.directions = directions;
  basis.rows.assign(directions * dim, 0);
  double all = 0;
  for (const float s : spread) all += static_cast<double>(s) * s;
  const std::size_t taken = blocks > 0 && blocks == wide_blocks ? 16 : 0;
  const std::size_t wide = std::min(wide_blocks * kBlockDims - taken, directions);
  struct Group {
    std::size_t start, stop;
    double step;
  };
  // Turned inside each group, so that its coordinates look alike.
  for (const auto& [start, stop, step] :
       {Group{0, fine, 4 * 0.1041}, Group{fine, wide, 0.3352}, Group{wide, directions, 0.9957}}) {
    if (start == stop) continue;
    double sum = 0;
    for (std::size_t i = start; i < stop; ++i) sum += static_cast<double>(spread[i]) * spread[i];
    const double deviation =
        std::sqrt(sum / static_cast<double>(stop - start) * static_cast<double>(dim) / all);
    basis.steps.resize(stop, static_cast<float>(step * deviation));
    const Rotation rotation(stop - start, 11);
    for (std::size_t d = start; d < stop; ++d) {
      std::vector<float> turned(stop - start, 0.0f);
      turned[d - start] = 1;
      rotation.apply(turned.data());
      for (std::size_t i = start; i < stop; ++i) {
        basis.rows[i * dim + d] = float_to_half(turned[i - start]);
      }
    }
  }
  return basis;
}

// Where some directions vary much more than others, a basis of the strong ones errs less than plain
// codes, on every instruction set by the same sums. Returns its share of their error.
double a_basis_errs_less(std::size_t dim, std::size_t wide_blocks, std::size_t directions, bool l2,
                         std::mt19937& rng, std::size_t blocks = 0, std::size_t fine = 0) {
  std::normal_distribution<float> normal;
  constexpr std::size_t kCount = 300;
  std::vector<float> spread(dim), vectors(kCount * dim), centre(dim), query(dim);
  for (std::size_t d = 0; d < dim; ++d) {
    spread[d] = std::exp(-6.0f * static_cast<float>(d) / static_cast<float>(dim));
  }
  for (std::size_t i = 0; i < kCount; ++i) {
    for (std::size_t d = 0; d < dim; ++d) vectors[i * dim + d] = spread[d] * normal(rng);
  }
  for (float& v : centre) v = 0.01f * normal(rng);
  for (std::size_t d = 0; d < dim; ++d) query[d] = spread[d] * normal(rng);
  const Quantizer plain(dim, 7, centre.data());
  const Quantizer based(dim, 7, centre.data(), leading(dim, wide_blocks, directions, spread, blocks, fine));
  double errors[2] = {0, 0};
  for (const Quantizer* quantizer : {&plain, &based}) {
    const bool with = quantizer == &based;
    const CodeShape& shape = quantizer->shape();
    if (with && blocks > 0) CHECK(shape.coarse_record_bytes == 32 * blocks);
    std::vector<std::uint8_t> codes(kCount * shape.code_record_bytes);
    std::vector<std::uint8_t> refines(kCount * shape.refine_record_bytes);
    std::vector<std::uint8_t> coarse(kCount * shape.coarse_record_bytes);
    quantizer->encode(vectors.data(), kCount, codes.data(), refines.data(), coarse.data());
    PreparedQuery prepared;
    prepare_query(*quantizer, query.data(), l2, prepared);
    SegmentLayout layout;
    layout.walk_coarse = true;
    const WalkCodes walk(layout, *quantizer, kernels());
    const WalkCodes reference(layout, *quantizer, portable_kernels());
    std::vector<std::int32_t> more;
    for (std::size_t i = 0; i < kCount; ++i) {
      const std::uint8_t* record = coarse.data() + i * shape.coarse_record_bytes;
      const std::uint8_t* code = record;
      std::int32_t dot, again;
      walk.dots(prepared, &code, 1, &dot, more);
      CHECK(code == record);
      reference.dots(prepared, &code, 1, &again, more);
      CHECK(dot == again);
      float numbers[2];
      std::memcpy(numbers, record + shape.coarse_bytes, 8);
      double product = 0, length2 = 0;
      for (std::size_t d = 0; d < dim; ++d) {
        const double x = vectors[i * dim + d] - static_cast<double>(centre[d]);
        product += (query[d] - (l2 ? static_cast<double>(centre[d]) : 0.0)) * x;
        length2 += x * x;
      }
      CHECK(std::fabs(numbers[1] - length2) < 1e-3 * (1 + length2));
      const double cells = static_cast<double>(dot) - static_cast<double>(walk.offset(prepared));
      const double estimate =
          cells * static_cast<double>(walk.scale(prepared)) * static_cast<double>(numbers[0]);
      errors[with] += (estimate - product) * (estimate - product);
    }
  }
  const double share = std::sqrt(errors[1] / errors[0]);
  std::printf("dim %zu, %zu wide blocks, %zu directions, %zu of them fine: error %.3f of plain codes'\n",
              dim, wide_blocks, directions, fine, share);
  CHECK(share < 0.8);
  return share;
}

void hostile_bases_are_refused() {
  constexpr std::size_t kDim = 200;
  const std::vector<float> centre(kDim, 0.0f), spread(kDim, 1.0f);
  const auto refuses = [&](auto change) {
    CoarseBasis basis = leading(kDim, 1, 192, spread);
    change(basis);
    try {
      const Quantizer quantizer(kDim, 7, centre.data(), basis);
    } catch (const CorruptData&) {
      return true;
    }
    return false;
  };
  CHECK(!refuses([](CoarseBasis&) {}));
  CHECK(refuses([](CoarseBasis& b) { b.wide_blocks = 3; }));
  CHECK(refuses([](CoarseBasis& b) { b.wide_blocks = ~std::size_t{0}; }));
  CHECK(refuses([](CoarseBasis& b) { b.directions = 193; }));
  CHECK(refuses([](CoarseBasis& b) { b.directions = 0; }));
  CHECK(refuses([](CoarseBasis& b) { b.rows.pop_back(); }));
  CHECK(refuses([](CoarseBasis& b) { b.rows[5] = 0x7C00; }));
  CHECK(refuses([](CoarseBasis& b) { b.steps[0] = 0; }));
  CHECK(refuses([](CoarseBasis& b) { b.steps[190] = std::nanf(""); }));
  CHECK(refuses([](CoarseBasis& b) { b.steps.pop_back(); }));
  CHECK(refuses([](CoarseBasis& b) { b.fine = 1; }));          // no place left
  CHECK(!refuses([](CoarseBasis& b) { b.blocks = 3; }));
  CHECK(!refuses([](CoarseBasis& b) { b.blocks = 3, b.fine = 64; }));
  CHECK(refuses([](CoarseBasis& b) { b.blocks = 3, b.fine = 65; }));
  CHECK(refuses([](CoarseBasis& b) { b.blocks = 2; }));        // 32 places fewer
  CHECK(refuses([](CoarseBasis& b) { b.blocks = 3, b.fine = ~std::size_t{0}; }));
  CHECK(refuses([](CoarseBasis& b) { b.blocks = 5; }));
  CHECK(refuses([](CoarseBasis& b) { b.blocks = ~std::size_t{0}; }));
  CHECK(refuses([](CoarseBasis& b) { b.blocks = 3, b.wide_blocks = 4; }));
}

// Vectors so near the centre that one over a cell's width is beyond floats, one way and the other:
// what lies beyond the last cell takes that one, so that a code still points as its vector does.
void near_the_centre_cells_saturate(std::size_t dim, const CoarseBasis& basis) {
  const std::vector<float> centre(dim, 0.0f);
  const Quantizer quantizer(dim, 7, centre.data(), basis);
  const CodeShape& shape = quantizer.shape();
  for (const float tiny : {1e-35f, 1e-36f, 1e-40f}) {
    for (const std::size_t used : {std::size_t{1}, dim / 2, dim}) {
      std::vector<float> vectors(2 * dim, 0.0f);   // one, and its opposite
      std::fill_n(vectors.begin(), used, tiny);
      std::fill_n(vectors.begin() + static_cast<std::ptrdiff_t>(dim), used, -tiny);
      std::vector<std::uint8_t> codes(2 * shape.code_record_bytes);
      std::vector<std::uint8_t> refines(2 * shape.refine_record_bytes);
      std::vector<std::uint8_t> coarse(2 * shape.coarse_record_bytes);
      quantizer.encode(vectors.data(), 2, codes.data(), refines.data(), coarse.data());
      for (std::size_t i = 0; i < 2; ++i) {
        const std::uint8_t* const record = coarse.data() + i * shape.coarse_record_bytes;
        float corrections[3];
        std::memcpy(corrections, codes.data() + i * shape.code_record_bytes + shape.code_bytes, 4);
        std::memcpy(corrections + 1,
                    refines.data() + i * shape.refine_record_bytes + shape.code_bytes, 4);
        std::memcpy(corrections + 2, record + shape.coarse_bytes, 4);
        for (const float c : corrections) CHECK(std::isfinite(c));
        CHECK(corrections[0] > 0 && corrections[1] > 0);
      }
      CHECK(std::memcmp(coarse.data(), coarse.data() + shape.coarse_record_bytes,
                        shape.coarse_bytes) != 0);
    }
  }
}

void degenerate_vectors_are_finite() {
  for (const std::size_t dim : {1u, 2u, 63u, 64u, 65u, 384u}) {
    std::vector<float> vectors(3 * dim, 0.0f), centre(dim, 0.0f);
    for (std::size_t d = 0; d < dim; ++d) vectors[dim + d] = 1e-20f;
    vectors[2 * dim] = 1e18f;   // one-hot and huge
    const Quantizer quantizer(dim, 7, centre.data());
    const CodeShape& shape = quantizer.shape();
    std::vector<std::uint8_t> codes(3 * shape.code_record_bytes);
    std::vector<std::uint8_t> refines(3 * shape.refine_record_bytes);
    std::vector<std::uint8_t> coarse(3 * shape.coarse_record_bytes);
    quantizer.encode(vectors.data(), 3, codes.data(), refines.data(), coarse.data());
    for (std::size_t i = 0; i < 3; ++i) {
      float values[5];
      std::memcpy(values, codes.data() + i * shape.code_record_bytes + shape.code_bytes, 8);
      std::memcpy(values + 2, refines.data() + i * shape.refine_record_bytes + shape.code_bytes, 4);
      std::memcpy(values + 3, coarse.data() + i * shape.coarse_record_bytes + shape.coarse_bytes, 8);
      for (const float v : values) CHECK(std::isfinite(v));
    }
    PreparedQuery prepared;
    prepare_query(quantizer, vectors.data(), false, prepared);   // a zero query
    CHECK(prepared.length == 0.0f && prepared.scale8 == 0.0f && prepared.sum8 == 0);
    for (const float tiny : {1e-30f, 1e-34f, 1e-36f, 1e-40f}) {   // what is stored is what is summed
      std::fill(vectors.begin(), vectors.begin() + static_cast<std::ptrdiff_t>(dim), tiny);
      prepare_query(quantizer, vectors.data(), false, prepared);
      std::int32_t sum = 0;
      for (const std::int8_t q : prepared.q8) sum += q;
      CHECK(sum == prepared.sum8);
      for (const std::int16_t q : prepared.q16) CHECK(std::abs(q) <= 8191);
    }
  }
  near_the_centre_cells_saturate(96, {});
  CoarseBasis basis = leading(384, 3, 256, std::vector<float>(384, 1.0f), 4, 32);
  for (float& step : basis.steps) step = 4e-4f;
  near_the_centre_cells_saturate(384, basis);
}

// Rows of about one length: what they have along the centre is known without their codes, so that
// scores err by what the centre leaves of the query alone. A row may be shorter, or zero.
void what_lies_along_the_centre_is_known(std::size_t dim, double length, std::mt19937& rng) {
  std::normal_distribution<float> normal;
  constexpr std::size_t kCount = 100;
  std::vector<float> vectors(kCount * dim), centre(dim);
  for (float& v : centre) v = normal(rng);
  for (std::size_t i = 0; i < kCount; ++i) {
    float* x = vectors.data() + i * dim;
    double squared = 0;
    for (std::size_t d = 0; d < dim; ++d) {
      x[d] = 2.0f * centre[d] + normal(rng);
      squared += static_cast<double>(x[d]) * x[d];
    }
    const double share = i == 0 ? 0.0 : i == 1 ? 0.9 : 1.0;
    for (std::size_t d = 0; d < dim; ++d) {
      x[d] = static_cast<float>(x[d] * (share * length / std::sqrt(squared)));
    }
  }
  double centre2 = 0;
  for (std::size_t d = 0; d < dim; ++d) {
    double sum = 0;
    for (std::size_t i = 0; i < kCount; ++i) sum += static_cast<double>(vectors[i * dim + d]);
    centre[d] = static_cast<float>(sum / kCount);
    centre2 += static_cast<double>(centre[d]) * centre[d];
  }
  const Quantizer quantizer(dim, 7, centre.data(), {}, length * length);
  const CodeShape& shape = quantizer.shape();
  std::vector<std::uint8_t> codes(kCount * shape.code_record_bytes);
  std::vector<std::uint8_t> refines(kCount * shape.refine_record_bytes);
  std::vector<std::uint8_t> coarse(kCount * shape.coarse_record_bytes);
  quantizer.encode(vectors.data(), kCount, codes.data(), refines.data(), coarse.data());
  const double bound[2] = {0.8 / std::sqrt(static_cast<double>(dim)),
                           2.5 / std::sqrt(static_cast<double>(dim))};
  std::vector<float> query(dim);
  for (const double along : {1.0, -3.0, 0.0, 0.5}) {
    double query2 = 0;
    for (std::size_t d = 0; d < dim; ++d) {
      const float aside = along == 0.0 || along == 0.5 ? normal(rng) : 0.0f;
      query[d] = static_cast<float>(along) * centre[d] + aside;
      query2 += static_cast<double>(query[d]) * query[d];
    }
    PreparedQuery prepared;
    prepare_query(quantizer, query.data(), false, prepared);
    const double whole = std::sqrt(query2);
    CHECK(std::fabs(prepared.whole_length - whole) <= 1e-5 * whole);
    CHECK(std::fabs(prepared.ideal - whole * length) <= 1e-5 * whole * length);
    CHECK(prepared.length <= 1.00001 * whole);
    for (const bool two : {false, true}) {
      SegmentLayout layout;
      layout.walk_coarse = two;
      const WalkCodes walk(layout, quantizer, kernels());
      const WalkCodes reference(layout, quantizer, portable_kernels());
      std::vector<std::int32_t> more;
      for (std::size_t i = 0; i < kCount; ++i) {
        const std::uint8_t* record = two ? coarse.data() + i * shape.coarse_record_bytes
                                         : codes.data() + i * shape.code_record_bytes;
        std::int32_t dot, again;
        walk.dots(prepared, &record, 1, &dot, more);
        reference.dots(prepared, &record, 1, &again, more);
        CHECK(dot == again);
        float numbers[2];
        std::memcpy(numbers, record + walk.bytes, 8);
        double exact = 0, away2 = 0, row2 = 0;
        for (std::size_t d = 0; d < dim; ++d) {
          const double x = vectors[i * dim + d];
          exact += query[d] * x;
          row2 += x * x;
          away2 += (x - static_cast<double>(centre[d])) * (x - static_cast<double>(centre[d]));
        }
        const double stated = away2 + length * length - row2;
        CHECK(std::fabs(numbers[1] - stated) <= 1e-5 * length * length);
        const float product =
            (static_cast<float>(dot) - walk.offset(prepared)) * walk.scale(prepared) * numbers[0];
        const float score = prepared.constant - (prepared.product_factor * product +
                                                 prepared.length_factor * numbers[1]);
        // Along the centre nothing is left to estimate.
        const double error = bound[two] * static_cast<double>(prepared.length) * std::sqrt(stated);
        CHECK(std::fabs(static_cast<double>(score) - exact) <= error + 2e-6 * whole * length);
        if (along == 1.0 || along == -3.0) CHECK(prepared.length <= 1e-5 * whole);
      }
    }
  }
}

void hostile_lengths_are_refused() {
  const std::vector<float> centre = {1.0f, 0.0f}, none = {0.0f, 0.0f};
  constexpr double kInf = std::numeric_limits<double>::infinity();
  for (const double length2 : {-1.0, std::nan(""), kInf, 1e31}) {
    CHECK_THROWS(Quantizer(2, 7, centre.data(), {}, length2), CorruptData, "length");
  }
  CHECK_THROWS(Quantizer(2, 7, none.data(), {}, 1.0), CorruptData, "length");
}

}  // namespace

int main() {
  const unsigned seed = 20260102;
  std::printf("seed %u\n", seed);
  std::mt19937 rng(seed);
  for (const std::size_t dim : {1u, 2u, 3u, 7u, 64u, 100u, 128u, 384u, 768u, 1000u, 4096u}) {
    rotation_is_orthonormal(dim, rng);
  }
  for (const std::size_t dim : {64u, 100u, 384u, 768u}) {
    const Errors errors = estimate(dim, rng);
    std::printf("dim %zu: coarse %.5f, first plane %.5f, both %.5f of |q||x|\n", dim,
                errors.coarse, errors.code, errors.refine);
    CHECK(errors.coarse < 0.5 / std::sqrt(static_cast<double>(dim)));
    CHECK(errors.code < errors.coarse / 2);
    // An error per coordinate of about a tenth of its spread, averaged over dim of them.
    CHECK(errors.code < 0.2 / std::sqrt(static_cast<double>(dim)));
    CHECK(errors.refine < errors.code / 4);
  }
  for (const bool l2 : {false, true}) {
    a_basis_errs_less(384, 2, 256, l2, rng);
    a_basis_errs_less(384, 3, 192, l2, rng);   // no block of 2 bits
    a_basis_errs_less(130, 1, 130, l2, rng);   // narrow block not full
    a_basis_errs_less(96, 1, 64, l2, rng);
    // Records that end with their numbers: with finer cells of some, with no block of 2 bits.
    CHECK(a_basis_errs_less(384, 3, 256, l2, rng, 4, 32) < 0.4);
    a_basis_errs_less(384, 2, 384 - 32, l2, rng, 4);
    a_basis_errs_less(384, 4, 240, l2, rng, 4);
    a_basis_errs_less(200, 2, 160, l2, rng, 3, 64);
  }
  for (const std::size_t dim : {64u, 130u, 384u}) {
    for (const double length : {1.0, 1e-6, 1e6}) {
      what_lies_along_the_centre_is_known(dim, length, rng);
    }
  }
  hostile_bases_are_refused();
  hostile_lengths_are_refused();
  degenerate_vectors_are_finite();
  return 0;
}
