#include <algorithm>
#include <cmath>

#include "encode_kernels.hpp"
#include "stoker/simd.hpp"

namespace stoker {
namespace {

void dot_code4(const std::int8_t* q8, std::size_t blocks, const std::uint8_t* const* codes,
               std::size_t count, std::int32_t* out) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint8_t* code = codes[i];
    std::int32_t sum = 0;
    for (std::size_t b = 0; b < blocks; ++b) {
      const std::int8_t* q = q8 + b * kBlockDims;
      const std::uint8_t* c = code + b * kBlockBytes;
      for (std::size_t j = 0; j < kBlockBytes; ++j) {
        sum += q[j] * (c[j] & 15) + q[kBlockBytes + j] * (c[j] >> 4);
      }
    }
    out[i] = sum;
  }
}

void dot_code2(const std::int8_t* q8, std::size_t blocks, const std::uint8_t* const* codes,
               std::size_t count, std::int32_t* out) {
  for (std::size_t i = 0; i < count; ++i) {
    std::int32_t sum = 0;
    for (std::size_t b = 0; b < blocks; ++b) {
      const std::int8_t* q = q8 + b * kCoarseDims;
      const std::uint8_t* c = codes[i] + b * kCoarseBytes;
      for (std::size_t j = 0; j < kCoarseBytes; ++j) {
        sum += q[j] * (c[j] & 3) + q[32 + j] * ((c[j] >> 2) & 3) + q[64 + j] * ((c[j] >> 4) & 3) +
               q[96 + j] * (c[j] >> 6);
      }
    }
    out[i] = sum;
  }
}

std::int64_t dot_code8(const std::int16_t* q16, std::size_t blocks, const std::uint8_t* high,
                       const std::uint8_t* low) {
  std::int64_t sum = 0;
  for (std::size_t b = 0; b < blocks; ++b) {
    const std::int16_t* q = q16 + b * kBlockDims;
    const std::uint8_t* h = high + b * kBlockBytes;
    const std::uint8_t* l = low + b * kBlockBytes;
    for (std::size_t j = 0; j < kBlockBytes; ++j) {
      sum += static_cast<std::int64_t>(q[j]) * refine_value(h[j] & 15, l[j] & 15);
      sum += static_cast<std::int64_t>(q[kBlockBytes + j]) * refine_value(h[j] >> 4, l[j] >> 4);
    }
  }
  return sum;
}

float dot_f32(const float* a, const float* b, std::size_t dim) {
  float lanes[8] = {};
  std::size_t i = 0;
  for (; i + 8 <= dim; i += 8) {
    for (std::size_t j = 0; j < 8; ++j) lanes[j] += a[i + j] * b[i + j];
  }
  for (std::size_t j = 0; i < dim; ++i, ++j) lanes[j] += a[i] * b[i];
  return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) +
         ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
}

float l2_f32(const float* a, const float* b, std::size_t dim) {
  float lanes[8] = {};
  std::size_t i = 0;
  for (; i + 8 <= dim; i += 8) {
    for (std::size_t j = 0; j < 8; ++j) {
      const float d = a[i + j] - b[i + j];
      lanes[j] += d * d;
    }
  }
  for (std::size_t j = 0; i < dim; ++i, ++j) {
    const float d = a[i] - b[i];
    lanes[j] += d * d;
  }
  return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) +
         ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
}

float dot_f16(const float* a, const std::uint16_t* b, std::size_t dim) {
  float sum = 0;
  for (std::size_t i = 0; i < dim; ++i) sum += a[i] * half_to_float(b[i]);
  return sum;
}

float l2_f16(const float* a, const std::uint16_t* b, std::size_t dim) {
  float sum = 0;
  for (std::size_t i = 0; i < dim; ++i) {
    const float d = a[i] - half_to_float(b[i]);
    sum += d * d;
  }
  return sum;
}

void hadamard(float* v, std::size_t span) {
  for (std::size_t half = 1; half < span; half *= 2) {
    for (std::size_t start = 0; start < span; start += 2 * half) {
      float* a = v + start;
      float* b = a + half;
      for (std::size_t i = 0; i < half; ++i) {
        const float x = a[i];
        const float y = b[i];
        a[i] = x + y;
        b[i] = x - y;
      }
    }
  }
  const float norm = 1.0f / std::sqrt(static_cast<float>(span));
  for (std::size_t i = 0; i < span; ++i) v[i] *= norm;
}

float max_abs(const float* v, std::size_t dim) {
  float largest = 0;
  for (std::size_t i = 0; i < dim; ++i) largest = std::max(largest, std::fabs(v[i]));
  return largest;
}

std::int32_t round_query(const float* v, std::size_t dim, float to8, float to16, std::int8_t* q8,
                         std::int16_t* q16) {
  std::int32_t sum = 0;
  for (std::size_t i = 0; i < dim; ++i) {
    q8[i] = static_cast<std::int8_t>(std::lrintf(v[i] * to8));
    q16[i] = static_cast<std::int16_t>(std::lrintf(v[i] * to16));
    sum += q8[i];
  }
  return sum;
}

void project(const std::int16_t* q16, const std::int8_t* rows, std::size_t dim, std::size_t count,
             std::int32_t* out) {
  for (std::size_t r = 0; r < count; ++r) {
    const std::int8_t* row = rows + r * dim;
    std::int32_t sum = 0;
    for (std::size_t d = 0; d < dim; ++d) sum += q16[d] * row[d];
    out[r] = sum;
  }
}

void project_many(const std::int16_t* q16, std::size_t queries, const std::int8_t* rows,
                  std::size_t dim, std::size_t count, std::int32_t* out) {
  for (std::size_t q = 0; q < queries; ++q) {
    project(q16 + q * dim, rows, dim, count, out + q * count);
  }
}

void project_f32(const float* vectors, std::size_t count, const float* rows, std::size_t dim,
                 std::size_t directions, float* out) {
  for (std::size_t n = 0; n < count; ++n) {
    const float* v = vectors + n * dim;
    for (std::size_t r = 0; r < directions; ++r) {
      float sum = 0;
      for (std::size_t d = 0; d < dim; ++d) sum += v[d] * rows[r * dim + d];
      out[n * directions + r] = sum;
    }
  }
}

}  // namespace

const Kernels& portable_kernels() {
  static const Kernels table{"portable", dot_code4, dot_code2, dot_code8, dot_f32,    l2_f32,
                             dot_f16,    l2_f16,    hadamard,  max_abs,   round_query,
                             project,
                             project_many,
                             encode_portable::encode_planes,
                             encode_portable::encode_cells,
                             encode_portable::squared_length,
                             project_f32};
  return table;
}

}  // namespace stoker
