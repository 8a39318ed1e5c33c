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
  // Not-a-number cannot come here: vectors are checked before they are sealed.
  if (value <= 0) return 0;
  const int cell = static_cast<int>(value);
  return static_cast<std::uint8_t>(cell > top ? top : cell);
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

// `x`: the rotated vector, or, with a basis, its coordinates there, of which each kind of block has
// cells of its own width.
void encode_coarse(const float* x, std::size_t dim, const CodeShape& shape,
                   const CoarseBasis& basis, float sigma, float length2, std::uint8_t* record) {
  std::memset(record, 0, shape.coarse_bytes);
  double with_code = 0;
  std::size_t wide = 0;
  std::uint8_t* narrow = record;
  float step = kCoarseStep;
  if (basis.used()) {
    wide = std::min(basis.wide_blocks * kBlockDims, basis.directions);
    narrow = record + basis.wide_blocks * kBlockBytes;
    dim = basis.directions;
    step = basis.narrow_step;
    const float inverse = sigma > 0 ? 1.0f / (basis.wide_step * sigma) : 0.0f;
    for (std::size_t i = 0; i < wide; ++i) {
      const std::uint8_t cell = clamp_cell(x[i] * inverse + 8.0f, 15);
      with_code += static_cast<double>(x[i]) * (static_cast<double>(cell) - 7.5) *
                   static_cast<double>(basis.wide_step);
      put_wide(record, i, cell);
    }
  }
  const float inverse = sigma > 0 ? 1.0f / (step * sigma) : 0.0f;
  const double unit = basis.used() ? static_cast<double>(step) : 1.0;
  for (std::size_t i = wide; i < dim; ++i) {
    const std::uint8_t cell = clamp_cell(x[i] * inverse + 2.0f, 3);
    with_code += static_cast<double>(x[i]) * (static_cast<double>(cell) - 1.5) * unit;
    put_narrow(narrow, i - wide, cell);
  }
  const float correction =
      with_code > 0 ? static_cast<float>(static_cast<double>(length2) / with_code) : 0.0f;
  std::memcpy(record + shape.coarse_bytes, &correction, 4);
  std::memcpy(record + shape.coarse_bytes + 4, &length2, 4);
}

CoarseBasis check_basis(CoarseBasis basis, std::size_t dim, const CodeShape& shape) {
  if (!basis.used()) return basis;
  const auto need = [](bool holds, const char* what) {
    if (!holds) throw CorruptData(std::string("coarse basis: ") + what);
  };
  need(basis.wide_blocks <= shape.coarse_blocks, "more blocks than a code has");
  const std::size_t room = basis.wide_blocks * kBlockDims +
                           (shape.coarse_blocks - basis.wide_blocks) * kCoarseDims;
  need(basis.directions >= 1 && basis.directions <= std::min(room, dim), "too many directions");
  need(basis.rows.size() == basis.directions * dim, "its size");
  for (const float step : {basis.wide_step, basis.narrow_step}) {
    need(step > 1e-6f && step < 1e6f, "a width of cells");
  }
  for (const std::uint16_t value : basis.rows) {
    need((value & 0x7C00u) != 0x7C00u, "a number that is not finite");
  }
  return basis;
}

// Rounds coordinates in a basis, each times its cells' width, to 8 bits.
void round_coarse(const Quantizer& quantizer, const float* centred, PreparedQuery& out) {
  const CoarseBasis& basis = quantizer.basis();
  const Kernels& k = kernels();
  const std::size_t wide = basis.wide_blocks * kBlockDims;
  const std::size_t narrow_blocks = quantizer.shape().coarse_blocks - basis.wide_blocks;
  const std::size_t padded = wide + narrow_blocks * kCoarseDims;
  out.along.assign(padded, 0.0f);
  quantizer.project(centred, out.along.data());
  for (std::size_t i = 0; i < padded; ++i) {
    out.along[i] *= i < wide ? basis.wide_step : basis.narrow_step;
  }
  const float largest = k.max_abs(out.along.data(), padded);
  out.coarse8.resize(padded);
  out.coarse16.resize(padded);
  const float to8 = largest >= kLargestMin ? 127.0f / largest : 0.0f;
  out.coarse_scale8 = largest / 127.0f;
  const std::int32_t sum_wide =
      k.round_query(out.along.data(), wide, to8, 0, out.coarse8.data(), out.coarse16.data());
  const std::int32_t sum_narrow =
      k.round_query(out.along.data() + wide, padded - wide, to8, 0, out.coarse8.data() + wide,
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
    : dim_(dim), shape_(dim), centre_(centre, centre + dim), rotation_(dim, seed),
      basis_(check_basis(std::move(basis), dim, shape_)) {}

void Quantizer::project(const float* vector, float* out) const noexcept {
  const Kernels& k = kernels();
  for (std::size_t i = 0; i < basis_.directions; ++i) {
    out[i] = k.dot_f16(vector, basis_.rows.data() + i * dim_, dim_);
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
      encode_coarse(basis_.used() ? along.data() : x.data(), dim_, shape_, basis_, sigma,
                    static_cast<float>(squared), coarse + row * shape_.coarse_record_bytes);
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
