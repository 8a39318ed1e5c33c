#include "stoker/simd.hpp"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "encode_kernels.hpp"
#include "simd_x86.inc.hpp"

namespace stoker {
namespace {

void dot_code4(const std::int8_t* q8, std::size_t blocks, const std::uint8_t* const* codes,
               std::size_t count, std::int32_t* out) {
  const __m256i mask = _mm256_set1_epi8(15);
  const __m256i ones = _mm256_set1_epi16(1);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint8_t* code = codes[i];
    __m256i sum = _mm256_setzero_si256();
    std::size_t b = 0;
    while (b < blocks) {
      // A block adds at most 2 * 2 * 15 * 127 to a 16-bit lane: four blocks fit.
      __m256i narrow = _mm256_setzero_si256();
      const std::size_t stop = b + 4 < blocks ? b + 4 : blocks;
      for (; b < stop; ++b) {
        const __m256i c =
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(code + b * kBlockBytes));
        const auto* q = reinterpret_cast<const __m256i*>(q8 + b * kBlockDims);
        const __m256i low = _mm256_and_si256(c, mask);
        const __m256i high = _mm256_and_si256(_mm256_srli_epi16(c, 4), mask);
        narrow = _mm256_add_epi16(narrow, _mm256_maddubs_epi16(low, _mm256_loadu_si256(q)));
        narrow = _mm256_add_epi16(narrow, _mm256_maddubs_epi16(high, _mm256_loadu_si256(q + 1)));
      }
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(narrow, ones));
    }
    out[i] = sum_lanes(sum);
  }
}

void dot_code2(const std::int8_t* q8, std::size_t blocks, const std::uint8_t* const* codes,
               std::size_t count, std::int32_t* out) {
  const __m256i mask = _mm256_set1_epi8(3);
  const __m256i ones = _mm256_set1_epi16(1);
  for (std::size_t i = 0; i < count; ++i) {
    __m256i sum = _mm256_setzero_si256();
    std::size_t b = 0;
    while (b < blocks) {
      // A block adds at most 4 * 2 * 3 * 127 to a 16-bit lane: eight blocks fit.
      __m256i narrow = _mm256_setzero_si256();
      const std::size_t stop = b + 8 < blocks ? b + 8 : blocks;
      for (; b < stop; ++b) {
        const __m256i c =
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes[i] + b * kCoarseBytes));
        const auto* q = reinterpret_cast<const __m256i*>(q8 + b * kCoarseDims);
        const auto add = [&](int shift, const __m256i* at) {
          const __m256i part = _mm256_and_si256(_mm256_srli_epi16(c, shift), mask);
          narrow = _mm256_add_epi16(narrow, _mm256_maddubs_epi16(part, _mm256_loadu_si256(at)));
        };
        add(0, q);
        add(2, q + 1);
        add(4, q + 2);
        add(6, q + 3);
      }
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(narrow, ones));
    }
    out[i] = sum_lanes(sum);
  }
}

void project(const std::int16_t* q16, const std::int8_t* rows, std::size_t dim, std::size_t count,
             std::int32_t* out) {
  for (std::size_t r = 0; r < count; ++r) {
    const std::int8_t* row = rows + r * dim;
    __m256i sum0 = _mm256_setzero_si256();
    __m256i sum1 = _mm256_setzero_si256();
    const auto add = [&](std::size_t d, __m256i sum) {
      const __m256i wide =
          _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + d)));
      const __m256i q = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q16 + d));
      return _mm256_add_epi32(sum, _mm256_madd_epi16(wide, q));
    };
    std::size_t d = 0;
    for (; d + 32 <= dim; d += 32) {
      sum0 = add(d, sum0);
      sum1 = add(d + 16, sum1);
    }
    if (d + 16 <= dim) {
      sum0 = add(d, sum0);
      d += 16;
    }
    std::int32_t sum = sum_lanes(_mm256_add_epi32(sum0, sum1));
    for (; d < dim; ++d) sum += q16[d] * row[d];
    out[r] = sum;
  }
}

void project_many(const std::int16_t* q16, std::size_t queries, const std::int8_t* rows,
                  std::size_t dim, std::size_t count, std::int32_t* out) {
  for (std::size_t q = 0; q < queries; ++q) {
    project(q16 + q * dim, rows, dim, count, out + q * count);
  }
}

}  // namespace

const Kernels* avx2_kernels() {
  static const Kernels table{"avx2",        dot_code4,     dot_code2,    dot_code8_avx2,
                             dot_f32_avx2,  l2_f32_avx2,   dot_f16_avx2, l2_f16_avx2,
                             hadamard_avx2, max_abs_avx2, round_query_avx2, project,
                             project_many,
                             encode_avx2::encode_planes, encode_avx2::encode_cells,
                             encode_avx2::squared_length, project_f32_avx2};
  static const bool usable = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                             __builtin_cpu_supports("f16c");
  return usable ? &table : nullptr;
}

}  // namespace stoker
#else
namespace stoker {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace stoker
#endif
