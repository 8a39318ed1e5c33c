#include "stoker/quantizer.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

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

void encode_coarse(const float* x, std::size_t dim, const CodeShape& shape, float sigma,
                   float length2, std::uint8_t* record) {
  const float inverse = sigma > 0 ? 1.0f / (kCoarseStep * sigma) : 0.0f;
  std::memset(record, 0, shape.coarse_bytes);
  double with_code = 0;
  for (std::size_t i = 0; i < dim; ++i) {
    const std::uint8_t cell = clamp_cell(x[i] * inverse + 2.0f, 3);
    with_code += static_cast<double>(x[i]) * (static_cast<double>(cell) - 1.5);
    const std::size_t within = i % kCoarseDims;
    std::uint8_t& byte = record[i / kCoarseDims * kCoarseBytes + within % 32];
    byte = static_cast<std::uint8_t>(byte | (cell << (2 * (within / 32))));
  }
  const float correction =
      with_code > 0 ? static_cast<float>(static_cast<double>(length2) / with_code) : 0.0f;
  std::memcpy(record + shape.coarse_bytes, &correction, 4);
  std::memcpy(record + shape.coarse_bytes + 4, &length2, 4);
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

Quantizer::Quantizer(std::size_t dim, std::uint64_t seed, const float* centre)
    : dim_(dim), shape_(dim), centre_(centre, centre + dim), rotation_(dim, seed) {}

void Quantizer::encode(const float* vectors, std::size_t count, std::uint8_t* codes,
                       std::uint8_t* refines, std::uint8_t* coarse) const {
  std::vector<float> x(dim_);
  const std::size_t padded = shape_.blocks * kBlockDims;
  std::vector<std::uint8_t> high(padded);
  std::vector<std::uint8_t> low(padded);
  for (std::size_t row = 0; row < count; ++row) {
    const float* source = vectors + row * dim_;
    for (std::size_t i = 0; i < dim_; ++i) x[i] = source[i] - centre_[i];
    rotation_.apply(x.data());
    double squared = 0;
    for (const float v : x) squared += static_cast<double>(v) * v;
    const float sigma = static_cast<float>(std::sqrt(squared / static_cast<double>(dim_)));
    const float step = 2.0f * kClip / 16.0f * sigma;
    const float inverse = step > 0 ? 1.0f / step : 0.0f;
    if (coarse != nullptr) {
      encode_coarse(x.data(), dim_, shape_, sigma, static_cast<float>(squared),
                    coarse + row * shape_.coarse_record_bytes);
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
                   PreparedQuery& out) {
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
