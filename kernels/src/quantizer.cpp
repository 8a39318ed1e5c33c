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
// Half the width of the 16 cells, in standard deviations of a coordinate. Near the optimum of a
// uniform 16-level quantiser of a normal distribution; recall is flat between 2.4 and 3.0.
constexpr float kClip = 2.7f;
// Width of the four coarse cells in the same units: the optimum of a uniform 4-level quantiser of
// a normal distribution (Max, IRE Transactions on Information Theory 6, 1960, table I).
constexpr float kCoarseStep = 0.9957f;

// A query whose largest coordinate is smaller is coded as zero.
constexpr float kLargestMin = 1e-34f;

std::uint64_t splitmix64(std::uint64_t& state) {
  state += 0x9E3779B97F4A7C15ull;
  std::uint64_t z = state;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

std::uint8_t clamp_cell(float value, int top) {
  // Vectors are checked before they are sealed, but one over a cell's width is beyond floats where
  // a vector all but lies on the centre. A coordinate times that is infinite, or, where it is zero,
  // not a number: no integer holds either.
  if (!(value > 0)) return 0;
  if (value >= static_cast<float>(top)) return static_cast<std::uint8_t>(top);
  return static_cast<std::uint8_t>(value);
}

// The cells of one coordinate of a block of 2-bit codes, and of one of 4-bit codes.
void put_narrow(std::uint8_t* codes, std::size_t i, std::uint8_t cell) {
  const std::size_t within = i % kCoarseDims;
  std::uint8_t& byte = codes[i / kCoarseDims * kCoarseBytes + within % 32];
  byte = static_cast<std::uint8_t>(byte | (cell << (2 * (within / 32))));
}

void put_wide(std::uint8_t* codes, std::size_t i, std::uint8_t cell) {
  const std::size_t within = i % kBlockDims;
  std::uint8_t& byte = codes[i / kBlockDims * kBlockBytes + within % kBlockBytes];
  byte = static_cast<std::uint8_t>(byte | (cell << (4 * (within / kBlockBytes))));
}

// The two numbers of a record: what makes its estimates unbiased, and the squared length.
void put_numbers(std::uint8_t* at, double with_code, float length2) {
  const float correction =
      with_code > 0 ? static_cast<float>(static_cast<double>(length2) / with_code) : 0.0f;
  std::memcpy(at, &correction, 4);
  std::memcpy(at + 4, &length2, 4);
}

// `x`: the rotated vector.
void encode_plain(const float* x, std::size_t dim, const CodeShape& shape, float sigma,
                  float length2, std::uint8_t* record) {
  std::memset(record, 0, shape.coarse_bytes);
  double with_code = 0;
  const float inverse = sigma > 0 ? 1.0f / (kCoarseStep * sigma) : 0.0f;
  for (std::size_t i = 0; i < dim; ++i) {
    const std::uint8_t cell = clamp_cell(x[i] * inverse + 2.0f, 3);
    with_code += static_cast<double>(x[i]) * (static_cast<double>(cell) - 1.5);
    put_narrow(record, i, cell);
  }
  put_numbers(record + shape.coarse_bytes, with_code, length2);
}

// `y`: the vector's coordinates in the basis, each of which has cells of its own width.
void encode_in_basis(const float* y, const Quantizer& quantizer, float sigma, float length2,
                     std::uint8_t* record) {
  const CoarseBasis& basis = quantizer.basis();
  const std::size_t wide = basis.wide_blocks * kBlockDims;
  std::uint8_t* const narrow = record + basis.wide_blocks * kBlockBytes;
  std::memset(record, 0, quantizer.shape().coarse_record_bytes);
  double with_code = 0;
  for (std::size_t i = 0; i < basis.directions; ++i) {
    const std::size_t place = quantizer.places()[i];
    const float cells = y[i] * (sigma > 0 ? 1.0f / (basis.steps[i] * sigma) : 0.0f);
    double value;
    if (i < basis.fine) {
      const std::uint8_t cell = clamp_cell(cells * 4.0f + 32.0f, 63);
      value = (static_cast<double>(cell) - 31.5) / 4;
      put_wide(record, place, static_cast<std::uint8_t>(cell >> 2));
      put_narrow(narrow, quantizer.fine_places()[i] - wide, static_cast<std::uint8_t>(cell & 3));
    } else if (place < wide) {
      const std::uint8_t cell = clamp_cell(cells + 8.0f, 15);
      value = static_cast<double>(cell) - 7.5;
      put_wide(record, place, cell);
    } else {
      const std::uint8_t cell = clamp_cell(cells + 2.0f, 3);
      value = static_cast<double>(cell) - 1.5;
      put_narrow(narrow, place - wide, cell);
    }
    with_code += static_cast<double>(y[i]) * value * static_cast<double>(basis.steps[i]);
  }
  put_numbers(record + quantizer.shape().coarse_bytes, with_code, length2);
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

Quantizer::Quantizer(std::size_t dim, std::uint64_t seed, const float* centre, CoarseBasis basis)
    : dim_(dim), centre_(centre, centre + dim), rotation_(dim, seed),
      basis_(check_basis(std::move(basis), dim)), shape_(dim, basis_) {
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

void Quantizer::project(const float* vector, float* out) const noexcept {
  const Kernels& k = kernels();
  for (std::size_t i = 0; i < basis_.directions; ++i) {
    out[i] = k.dot_f16(vector, basis_.rows.data() + i * dim_, dim_);
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
  std::vector<float> x(dim_);
  std::vector<float> along(basis_.directions);
  const std::size_t padded = shape_.blocks * kBlockDims;
  std::vector<std::uint8_t> high(padded);
  std::vector<std::uint8_t> low(padded);
  for (std::size_t row = 0; row < count; ++row) {
    const float* source = vectors + row * dim_;
    for (std::size_t i = 0; i < dim_; ++i) x[i] = source[i] - centre_[i];
    if (coarse != nullptr && basis_.used()) project(x.data(), along.data());
    rotation_.apply(x.data());
    double squared = 0;
    for (const float v : x) squared += static_cast<double>(v) * v;
    const float sigma = static_cast<float>(std::sqrt(squared / static_cast<double>(dim_)));
    const float step = 2.0f * kClip / 16.0f * sigma;
    const float inverse = step > 0 ? 1.0f / step : 0.0f;
    if (coarse != nullptr) {
      std::uint8_t* const record = coarse + row * shape_.coarse_record_bytes;
      if (basis_.used()) {
        encode_in_basis(along.data(), *this, sigma, static_cast<float>(squared), record);
      } else {
        encode_plain(x.data(), dim_, shape_, sigma, static_cast<float>(squared), record);
      }
    }
    // Cells of padding dimensions meet zeros of the query, so any value serves.
    std::fill(high.begin(), high.end(), std::uint8_t{8});
    std::fill(low.begin(), low.end(), std::uint8_t{0});
    double with_code = 0;
    double with_value = 0;
    for (std::size_t i = 0; i < dim_; ++i) {
      const float u = x[i] * inverse;
      const std::uint8_t h = clamp_cell(u + 8.0f, 15);
      std::uint8_t l;
      if (h == 15) {
        l = clamp_cell((u - 7.0f) * 4.0f, 15);
      } else if (h == 0) {
        l = clamp_cell((-7.0f - u) * 4.0f, 15);
      } else {
        l = clamp_cell((u + 8.0f - static_cast<float>(h)) * 16.0f, 15);
      }
      high[i] = h;
      low[i] = l;
      with_code += static_cast<double>(x[i]) * (static_cast<double>(h) - 7.5);
      with_value += static_cast<double>(x[i]) * refine_value(h, l);
    }
    std::uint8_t* code = codes + row * shape_.code_record_bytes;
    std::uint8_t* refine = refines + row * shape_.refine_record_bytes;
    for (std::size_t b = 0; b < shape_.blocks; ++b) {
      for (std::size_t j = 0; j < kBlockBytes; ++j) {
        const std::size_t first = b * kBlockDims + j;
        const std::size_t second = first + kBlockBytes;
        code[b * kBlockBytes + j] = static_cast<std::uint8_t>(high[first] | (high[second] << 4));
        refine[b * kBlockBytes + j] = static_cast<std::uint8_t>(low[first] | (low[second] << 4));
      }
    }
    const float correction = with_code > 0 ? static_cast<float>(squared / with_code) : 0.0f;
    const float refined = with_value > 0 ? static_cast<float>(squared / with_value) : 0.0f;
    const float length2 = static_cast<float>(squared);
    std::memcpy(code + shape_.code_bytes, &correction, 4);
    std::memcpy(code + shape_.code_bytes + 4, &length2, 4);
    std::memcpy(refine + shape_.code_bytes, &refined, 4);
  }
}

void prepare_query(const Quantizer& quantizer, const float* query, bool centred,
                   PreparedQuery& out, bool coarse) {
  const std::size_t dim = quantizer.dim();
  const CodeShape& shape = quantizer.shape();
  const std::size_t padded = std::max(shape.blocks * kBlockDims, shape.coarse_blocks * kCoarseDims);
  const float* centre = quantizer.centre().data();
  const Kernels& k = kernels();
  out.original.assign(query, query + dim);
  out.rotated.assign(query, query + dim);
  if (centred) {
    for (std::size_t i = 0; i < dim; ++i) out.rotated[i] -= centre[i];
    double sum = 0;
    for (const float v : out.rotated) sum += static_cast<double>(v) * v;
    out.constant = static_cast<float>(sum);
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
