#include "stoker/quantizer.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "stoker/errors.hpp"
#include "stoker/simd.hpp"

namespace stoker {
namespace {

constexpr std::size_t kRounds = 4;
// Vectors that are coded together.
constexpr std::size_t kEncodeTile = 64;
// Half the width of the 16 cells, in standard deviations of a coordinate. Near the optimum of a
// uniform 16-level quantiser of a normal distribution; recall is flat between 2.4 and 3.0.
constexpr float kClip = 2.7f;
// Width of the four coarse cells in the same units: the optimum of a uniform 4-level quantiser of
// a normal distribution (Max, IRE Transactions on Information Theory 6, 1960, table I).
constexpr float kCoarseStep = 0.9957f;

// A query whose largest coordinate is smaller is coded as zero.
constexpr float kLargestMin = 1e-34f;
// Squared lengths of rows are less, where all have about one.
constexpr double kLength2Max = 1e30;

// In doubles, and in one order on every processor, since what it decides is rounded to codes.
double product(const float* a, const float* b, std::size_t dim) {
  constexpr std::size_t kLanes = 8;
  double sums[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    for (std::size_t j = 0; j < kLanes; ++j) {
      sums[j] += static_cast<double>(a[i + j]) * static_cast<double>(b[i + j]);
    }
  }
  for (std::size_t j = 0; i < dim; ++i, ++j) {
    sums[j] += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  }
  return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

std::uint64_t splitmix64(std::uint64_t& state) {
  state += 0x9E3779B97F4A7C15ull;
  std::uint64_t z = state;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// The cells of blocks of 2-bit codes, a byte each in the order of dimensions, as they are stored;
// and of 4-bit codes.
void pack_narrow(const std::uint8_t* cells, std::size_t blocks, std::uint8_t* codes) {
  for (std::size_t b = 0; b < blocks; ++b, cells += kCoarseDims, codes += kCoarseBytes) {
    for (std::size_t j = 0; j < kCoarseBytes; ++j) {
      codes[j] = static_cast<std::uint8_t>(cells[j] | (cells[32 + j] << 2) | (cells[64 + j] << 4) |
                                           (cells[96 + j] << 6));
    }
  }
}

void pack_wide(const std::uint8_t* cells, std::size_t blocks, std::uint8_t* codes) {
  for (std::size_t b = 0; b < blocks; ++b, cells += kBlockDims, codes += kBlockBytes) {
    for (std::size_t j = 0; j < kBlockBytes; ++j) {
      codes[j] = static_cast<std::uint8_t>(cells[j] | (cells[kBlockBytes + j] << 4));
    }
  }
}

// The two numbers of a record: what makes its estimates unbiased, and the squared length as it is
// stated.
void put_numbers(std::uint8_t* at, double with_code, double squared, float length2) {
  // Rounded first, as codes always were.
  const double rounded = static_cast<float>(squared);
  const float correction = with_code > 0 ? static_cast<float>(rounded / with_code) : 0.0f;
  std::memcpy(at, &correction, 4);
  std::memcpy(at + 4, &length2, 4);
}

// What coding one vector after the other needs room for.
struct Scratch {
  std::vector<float> inverse;         // one over the width of each coarse cell
  std::vector<std::uint8_t> cells;    // of coarse codes, by direction
  std::vector<std::uint8_t> placed;   // the same by where a code has them
};

// `x`: the rotated vector. `ones`: dim of them.
void encode_plain(const float* x, std::size_t dim, const float* ones, const CodeShape& shape,
                  float sigma, double squared, float length2, Scratch& scratch,
                  std::uint8_t* record) {
  const float inverse = sigma > 0 ? 1.0f / (kCoarseStep * sigma) : 0.0f;
  scratch.inverse.assign(dim, inverse);
  scratch.placed.resize(shape.coarse_blocks * kCoarseDims);
  const double with_code = kernels().encode_cells(x, scratch.inverse.data(), ones, dim, 1.0f, 3,
                                                  scratch.placed.data());
  pack_narrow(scratch.placed.data(), shape.coarse_blocks, record);
  put_numbers(record + shape.coarse_bytes, with_code, squared, length2);
}

// `y`: the vector's coordinates in the basis, each of which has cells of its own width.
void encode_in_basis(const float* y, const Quantizer& quantizer, float sigma, double squared,
                     float length2, Scratch& scratch, std::uint8_t* record) {
  const CoarseBasis& basis = quantizer.basis();
  const auto& places = quantizer.places();
  const std::size_t wide = basis.wide_blocks * kBlockDims;
  const std::size_t narrow_blocks = quantizer.shape().coarse_blocks - basis.wide_blocks;
  const float* const steps = basis.steps.data();
  scratch.inverse.resize(basis.directions);
  for (std::size_t i = 0; i < basis.directions; ++i) {
    scratch.inverse[i] = sigma > 0 ? 1.0f / (steps[i] * sigma) : 0.0f;
  }
  // The directions that have 4 bits and more come first.
  const std::size_t wide_end = static_cast<std::size_t>(
      std::partition_point(places.begin(), places.end(),
                           [wide](std::size_t place) { return place < wide; }) -
      places.begin());
  scratch.cells.resize(basis.directions);
  double with_code = 0;
  const auto code = [&](std::size_t from, std::size_t to, float zoom, int top) {
    with_code += kernels().encode_cells(y + from, scratch.inverse.data() + from, steps + from,
                                        to - from, zoom, top, scratch.cells.data() + from);
  };
  code(0, basis.fine, 4.0f, 63);
  code(basis.fine, wide_end, 1.0f, 15);
  code(wide_end, basis.directions, 1.0f, 3);
  scratch.placed.assign(wide + narrow_blocks * kCoarseDims, 0);
  std::uint8_t* const placed = scratch.placed.data();
  for (std::size_t i = 0; i < basis.fine; ++i) {
    placed[places[i]] = static_cast<std::uint8_t>(scratch.cells[i] >> 2);
    placed[quantizer.fine_places()[i]] = static_cast<std::uint8_t>(scratch.cells[i] & 3);
  }
  for (std::size_t i = basis.fine; i < basis.directions; ++i) placed[places[i]] = scratch.cells[i];
  pack_wide(placed, basis.wide_blocks, record);
  pack_narrow(placed + wide, narrow_blocks, record + basis.wide_blocks * kBlockBytes);
  put_numbers(record + quantizer.shape().coarse_bytes, with_code, squared, length2);
}

// The places of a code's blocks that hold cells, in order: the last block may end with the numbers.
std::vector<std::uint16_t> usable_places(const CoarseBasis& basis, std::size_t blocks) {
  std::vector<std::uint16_t> places;
  std::size_t at = 0;
  for (std::size_t block = 0; block < blocks; ++block) {
    const std::size_t dims = block < basis.wide_blocks ? kBlockDims : kCoarseDims;
    const bool shared = basis.blocks > 0 && block + 1 == blocks;
    for (std::size_t i = 0; i < dims; ++i, ++at) {
      if (shared && i % kBlockBytes >= kBlockBytes - CodeShape::kNumberBytes) continue;
      places.push_back(static_cast<std::uint16_t>(at));
    }
  }
  return places;
}

std::size_t usable_in_wide(const CoarseBasis& basis, std::size_t blocks) {
  const bool shared = basis.blocks > 0 && basis.wide_blocks == blocks;
  return basis.wide_blocks * kBlockDims - (shared ? 2 * CodeShape::kNumberBytes : 0);
}

CoarseBasis check_basis(CoarseBasis basis, std::size_t dim) {
  if (!basis.used()) return {};
  const auto need = [](bool holds, const char* what) {
    if (!holds) throw CorruptData(std::string("coarse basis: ") + what);
  };
  need(dim <= kProjectDims, "too many dimensions");
  need(basis.blocks <= CodeShape(dim).blocks, "more blocks than finer codes have");
  const std::size_t blocks = CodeShape(dim, basis).coarse_blocks;
  need(basis.wide_blocks <= blocks, "more blocks than a code has");
  const std::size_t room = usable_places(basis, blocks).size();
  const std::size_t wide = usable_in_wide(basis, blocks);
  need(basis.directions >= 1 && basis.directions <= dim, "too many directions");
  need(basis.fine <= std::min({wide, room - wide, basis.directions}) &&
           basis.directions + basis.fine <= room,
       "its directions do not fit a code");
  need(basis.rows.size() == basis.directions * dim, "its size");
  need(basis.steps.size() == basis.directions, "how many widths of cells it has");
  for (const float step : basis.steps) need(step > 1e-6f && step < 1e6f, "a width of cells");
  for (const std::uint16_t value : basis.rows) {
    need((value & 0x7C00u) != 0x7C00u, "a number that is not finite");
  }
  return basis;
}

// Rounds coordinates in a basis, each times its cells' width, to 8 bits.
void round_coarse(const Quantizer& quantizer, const float* centred, PreparedQuery& out) {
  const CoarseBasis& basis = quantizer.basis();
  const Kernels& k = kernels();
  const std::size_t dim = quantizer.dim();
  const std::size_t wide = basis.wide_blocks * kBlockDims;
  const std::size_t narrow_blocks = quantizer.shape().coarse_blocks - basis.wide_blocks;
  const std::size_t padded = wide + narrow_blocks * kCoarseDims;
  out.rounded8.resize(dim);
  out.rounded16.resize(dim);
  const float largest_of = k.max_abs(centred, dim);
  const float to16 = largest_of >= kLargestMin ? 8191.0f / largest_of : 0.0f;
  k.round_query(centred, dim, 0, to16, out.rounded8.data(), out.rounded16.data());
  out.sums.resize(basis.directions);
  out.along.resize(basis.directions);
  quantizer.project_rounded(out.rounded16.data(), largest_of / 8191.0f, out.sums.data(),
                            out.along.data());
  out.placed.assign(padded, 0.0f);
  for (std::size_t i = 0; i < basis.directions; ++i) {
    out.placed[quantizer.places()[i]] = out.along[i] * basis.steps[i];
  }
  for (std::size_t i = 0; i < basis.fine; ++i) {
    out.placed[quantizer.fine_places()[i]] = out.along[i] * basis.steps[i] * 0.25f;
  }
  const float largest = k.max_abs(out.placed.data(), padded);
  out.coarse8.resize(padded);
  out.coarse16.resize(padded);
  const float to8 = largest >= kLargestMin ? 127.0f / largest : 0.0f;
  out.coarse_scale8 = largest / 127.0f;
  const std::int32_t sum_wide =
      k.round_query(out.placed.data(), wide, to8, 0, out.coarse8.data(), out.coarse16.data());
  const std::int32_t sum_narrow =
      k.round_query(out.placed.data() + wide, padded - wide, to8, 0, out.coarse8.data() + wide,
                    out.coarse16.data());
  out.coarse_offset = 7.5f * static_cast<float>(sum_wide) + 1.5f * static_cast<float>(sum_narrow);
}

}  // namespace

Rotation::Rotation(std::size_t dim, std::uint64_t seed) : dim_(dim), span_(1) {
  while (span_ * 2 <= dim_) span_ *= 2;
  signs_.resize(kRounds * dim_);
  std::uint64_t state = seed;
  for (float& sign : signs_) sign = (splitmix64(state) >> 63) != 0 ? -1.0f : 1.0f;
}

void Rotation::apply(float* vector) const noexcept {
  const Kernels& k = kernels();
  for (std::size_t round = 0; round < kRounds; ++round) {
    const float* signs = signs_.data() + round * dim_;
    for (std::size_t i = 0; i < dim_; ++i) vector[i] *= signs[i];
    k.hadamard(vector, span_);
    if (span_ != dim_) k.hadamard(vector + (dim_ - span_), span_);
  }
}

Quantizer::Quantizer(std::size_t dim, std::uint64_t seed, const float* centre, CoarseBasis basis,
                     double row_length2)
    : dim_(dim), centre_(centre, centre + dim), row_length2_(row_length2), rotation_(dim, seed),
      basis_(check_basis(std::move(basis), dim)), shape_(dim, basis_) {
  centre_length2_ = product(centre, centre, dim);
  if (row_length2_ != 0 &&
      !(row_length2_ > 0 && row_length2_ < kLength2Max && centre_length2_ > 0)) {
    throw CorruptData("a length of rows, squared: " + std::to_string(row_length2_));
  }
  if (!basis_.used()) return;
  const std::vector<std::uint16_t> places = usable_places(basis_, shape_.coarse_blocks);
  const std::size_t wide = usable_in_wide(basis_, shape_.coarse_blocks);
  for (std::size_t i = 0; i < basis_.fine; ++i) fine_places_.push_back(places[wide + i]);
  for (std::size_t i = 0; i < basis_.directions; ++i) {
    places_.push_back(places[i < wide ? i : i + basis_.fine]);
  }
  rows8_.reserve(basis_.rows.size());
  row_scales_.reserve(basis_.directions);
  for (std::size_t i = 0; i < basis_.directions; ++i) {
    const std::uint16_t* row = basis_.rows.data() + i * dim_;
    float largest = 0;
    for (std::size_t d = 0; d < dim_; ++d) {
      largest = std::max(largest, std::fabs(half_to_float(row[d])));
    }
    const float to8 = largest > 0 ? 127.0f / largest : 0.0f;
    for (std::size_t d = 0; d < dim_; ++d) {
      rows8_.push_back(static_cast<std::int8_t>(std::lrintf(half_to_float(row[d]) * to8)));
    }
    row_scales_.push_back(largest / 127.0f);
  }
}

void Quantizer::project_rounded(const std::int16_t* vector, float scale, std::int32_t* sums,
                                float* out) const noexcept {
  kernels().project(vector, rows8_.data(), dim_, basis_.directions, sums);
  for (std::size_t i = 0; i < basis_.directions; ++i) {
    out[i] = static_cast<float>(sums[i]) * (row_scales_[i] * scale);
  }
}

void Quantizer::encode(const float* vectors, std::size_t count, std::uint8_t* codes,
                       std::uint8_t* refines, std::uint8_t* coarse) const {
  const Kernels& k = kernels();
  const bool in_basis = coarse != nullptr && basis_.used();
  // Cells of padding dimensions meet zeros of the query, so any value serves.
  const std::size_t padded = shape_.blocks * kBlockDims;
  std::vector<float> x(padded, 0.0f);
  std::vector<float> centred(kEncodeTile * dim_);
  std::vector<float> along(kEncodeTile * basis_.directions);
  const std::vector<float> ones(coarse != nullptr && !in_basis ? dim_ : 0, 1.0f);
  const std::vector<float> rows = in_basis ? wide_rows() : std::vector<float>();
  Scratch scratch;
  for (std::size_t start = 0; start < count; start += kEncodeTile) {
    const std::size_t here = std::min(kEncodeTile, count - start);
    const float* source = vectors + start * dim_;
    for (std::size_t n = 0; n < here; ++n, source += dim_) {
      for (std::size_t i = 0; i < dim_; ++i) centred[n * dim_ + i] = source[i] - centre_[i];
    }
    if (in_basis) {
      k.project_f32(centred.data(), here, rows.data(), dim_, basis_.directions, along.data());
    }
    for (std::size_t n = 0; n < here; ++n) {
      const std::size_t row = start + n;
      std::copy_n(centred.data() + n * dim_, dim_, x.data());
      rotation_.apply(x.data());
      const double squared = k.squared_length(x.data(), dim_);
      double stated = squared;
      if (row_length2_ > 0) {
        const float* whole = vectors + row * dim_;
        stated += row_length2_ - product(whole, whole, dim_);
      }
      const auto length2 = static_cast<float>(stated);
      const float sigma = static_cast<float>(std::sqrt(squared / static_cast<double>(dim_)));
      const float step = 2.0f * kClip / 16.0f * sigma;
      if (coarse != nullptr) {
        std::uint8_t* const record = coarse + row * shape_.coarse_record_bytes;
        if (in_basis) {
          encode_in_basis(along.data() + n * basis_.directions, *this, sigma, squared, length2,
                          scratch, record);
        } else {
          encode_plain(x.data(), dim_, ones.data(), shape_, sigma, squared, length2, scratch,
                       record);
        }
      }
      std::uint8_t* const code = codes + row * shape_.code_record_bytes;
      std::uint8_t* const refine = refines + row * shape_.refine_record_bytes;
      double sums[2];   // with the first plane's values, and with those of both
      k.encode_planes(x.data(), shape_.blocks, step > 0 ? 1.0f / step : 0.0f, code, refine, sums);
      const float correction = sums[0] > 0 ? static_cast<float>(squared / sums[0]) : 0.0f;
      const float refined = sums[1] > 0 ? static_cast<float>(squared / sums[1]) : 0.0f;
      std::memcpy(code + shape_.code_bytes, &correction, 4);
      std::memcpy(code + shape_.code_bytes + 4, &length2, 4);
      std::memcpy(refine + shape_.code_bytes, &refined, 4);
    }
  }
}

std::vector<float> Quantizer::wide_rows() const {
  std::vector<float> rows(basis_.rows.size());
  std::transform(basis_.rows.begin(), basis_.rows.end(), rows.begin(), half_to_float);
  return rows;
}

void prepare_query(const Quantizer& quantizer, const float* query, bool l2, PreparedQuery& out,
                   bool coarse) {
  const std::size_t dim = quantizer.dim();
  const CodeShape& shape = quantizer.shape();
  const std::size_t padded = std::max(shape.blocks * kBlockDims, shape.coarse_blocks * kCoarseDims);
  const float* centre = quantizer.centre().data();
  const Kernels& k = kernels();
  out.original.assign(query, query + dim);
  out.rotated.assign(query, query + dim);
  out.product_factor = l2 ? -2.0f : -1.0f;
  out.length_factor = l2 ? 1.0f : 0.0f;
  out.shift = l2 ? 1.0 : 0.0;
  out.unrelated = 0;
  const bool of_one_length = !l2 && quantizer.row_length2() > 0;
  if (l2) {
    for (std::size_t i = 0; i < dim; ++i) out.rotated[i] -= centre[i];
    double sum = 0;
    for (const float v : out.rotated) sum += static_cast<double>(v) * v;
    out.constant = static_cast<float>(sum);
  } else if (of_one_length) {
    const double along = product(query, centre, dim);
    out.unrelated = static_cast<float>(std::max(along, 0.0));
    out.shift = along / quantizer.centre_length2();
    for (std::size_t i = 0; i < dim; ++i) {
      out.rotated[i] = static_cast<float>(query[i] - out.shift * centre[i]);
    }
    out.length_factor = static_cast<float>(0.5 * out.shift);
    out.constant = static_cast<float>(
        along + 0.5 * out.shift * (quantizer.row_length2() - quantizer.centre_length2()));
  } else {
    out.constant = k.dot_f32(query, centre, dim);
  }
  if (coarse && quantizer.basis().used()) round_coarse(quantizer, out.rotated.data(), out);
  quantizer.rotation().apply(out.rotated.data());
  const float* rotated = out.rotated.data();
  const float largest = k.max_abs(rotated, dim);
  const float squared = k.dot_f32(rotated, rotated, dim);
  if (!(squared > 1e-30f && squared < 1e30f)) {   // near the ends of what a float can square
    double wide = 0;
    for (const float v : out.rotated) wide += static_cast<double>(v) * v;
    out.length = static_cast<float>(std::sqrt(wide));
  } else {
    out.length = std::sqrt(squared);
  }
  if (of_one_length) {
    const double whole = std::sqrt(product(query, query, dim));
    out.whole_length = static_cast<float>(whole);
    out.ideal = static_cast<float>(whole * std::sqrt(quantizer.row_length2()));
  } else {
    out.whole_length = out.ideal = out.length;
  }
  out.q8.resize(padded);
  out.q16.resize(padded);
  std::fill(out.q8.begin() + static_cast<std::ptrdiff_t>(dim), out.q8.end(), std::int8_t{0});
  std::fill(out.q16.begin() + static_cast<std::ptrdiff_t>(dim), out.q16.end(), std::int16_t{0});
  out.scale8 = largest / 127.0f;
  out.scale16 = largest / 8191.0f;
  // Below it the factors would not be finite, and what is rounded differ between instruction sets.
  const bool rounds = largest >= kLargestMin;
  const float to8 = rounds ? 127.0f / largest : 0.0f;
  const float to16 = rounds ? 8191.0f / largest : 0.0f;
  out.sum8 = k.round_query(rotated, dim, to8, to16, out.q8.data(), out.q16.data());
}

}  // namespace stoker
