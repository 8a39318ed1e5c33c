// Kernels that the AVX2 and AVX-512 tables share; included by one file per instruction set, each
// compiled with its own flags, so everything here has internal linkage.
#pragma once

#include <immintrin.h>

#include <cmath>

#include "stoker/simd.hpp"

namespace {

inline float sum_lanes(__m256 v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  s = _mm_add_ss(s, _mm_shuffle_ps(s, s, 1));
  return _mm_cvtss_f32(s);
}

inline std::int32_t sum_lanes(__m256i v) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1));
  return _mm_cvtsi128_si32(s);
}

inline std::int64_t sum_lanes_wide(__m256i v) {
  alignas(32) std::int32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), v);
  std::int64_t sum = 0;
  for (const std::int32_t lane : lanes) sum += lane;
  return sum;
}

// Sixteen refined values as 16-bit integers; see stoker::refine_value().
inline __m256i refine_values(__m128i high8, __m128i low8) {
  const __m256i high = _mm256_cvtepu8_epi16(high8);
  const __m256i low = _mm256_cvtepu8_epi16(low8);
  const __m256i inner = _mm256_sub_epi16(
      _mm256_add_epi16(_mm256_slli_epi16(high, 5), _mm256_slli_epi16(low, 1)),
      _mm256_set1_epi16(255));
  const __m256i edge = _mm256_add_epi16(_mm256_slli_epi16(low, 3), _mm256_set1_epi16(228));
  const __m256i is_top = _mm256_cmpeq_epi16(high, _mm256_set1_epi16(15));
  const __m256i is_bottom = _mm256_cmpeq_epi16(high, _mm256_setzero_si256());
  const __m256i with_top = _mm256_blendv_epi8(inner, edge, is_top);
  return _mm256_blendv_epi8(with_top, _mm256_sub_epi16(_mm256_setzero_si256(), edge), is_bottom);
}

inline std::int64_t dot_code8_avx2(const std::int16_t* q16, std::size_t blocks,
                                   const std::uint8_t* high, const std::uint8_t* low) {
  const __m128i mask = _mm_set1_epi8(15);
  __m256i sum0 = _mm256_setzero_si256();
  __m256i sum1 = _mm256_setzero_si256();
  for (std::size_t b = 0; b < blocks; ++b) {
    const std::int16_t* q = q16 + b * stoker::kBlockDims;
    for (std::size_t half = 0; half < 2; ++half) {
      const std::size_t at = b * stoker::kBlockBytes + half * 16;
      const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(high + at));
      const __m128i l = _mm_loadu_si128(reinterpret_cast<const __m128i*>(low + at));
      const __m256i first = refine_values(_mm_and_si128(h, mask), _mm_and_si128(l, mask));
      const __m256i second = refine_values(_mm_and_si128(_mm_srli_epi16(h, 4), mask),
                                           _mm_and_si128(_mm_srli_epi16(l, 4), mask));
      const auto* q_first = reinterpret_cast<const __m256i*>(q + half * 16);
      const auto* q_second = reinterpret_cast<const __m256i*>(q + 32 + half * 16);
      sum0 = _mm256_add_epi32(sum0, _mm256_madd_epi16(first, _mm256_loadu_si256(q_first)));
      sum1 = _mm256_add_epi32(sum1, _mm256_madd_epi16(second, _mm256_loadu_si256(q_second)));
    }
  }
  return sum_lanes_wide(sum0) + sum_lanes_wide(sum1);
}

struct LoadF32 {
  static __m256 load(const float* p) { return _mm256_loadu_ps(p); }
  static float one(const float* p) { return *p; }
};

struct LoadF16 {
  static __m256 load(const std::uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static float one(const std::uint16_t* p) { return stoker::half_to_float(*p); }
};

template <typename Loader, typename T>
inline float dot_avx2(const float* a, const T* b, std::size_t dim) {
  __m256 s0 = _mm256_setzero_ps(), s1 = s0, s2 = s0, s3 = s0;
  std::size_t i = 0;
  for (; i + 32 <= dim; i += 32) {
    s0 = _mm256_fmadd_ps(_mm256_loadu_ps(a + i), Loader::load(b + i), s0);
    s1 = _mm256_fmadd_ps(_mm256_loadu_ps(a + i + 8), Loader::load(b + i + 8), s1);
    s2 = _mm256_fmadd_ps(_mm256_loadu_ps(a + i + 16), Loader::load(b + i + 16), s2);
    s3 = _mm256_fmadd_ps(_mm256_loadu_ps(a + i + 24), Loader::load(b + i + 24), s3);
  }
  for (; i + 8 <= dim; i += 8) {
    s0 = _mm256_fmadd_ps(_mm256_loadu_ps(a + i), Loader::load(b + i), s0);
  }
  float sum = sum_lanes(_mm256_add_ps(_mm256_add_ps(s0, s1), _mm256_add_ps(s2, s3)));
  for (; i < dim; ++i) sum = __builtin_fmaf(a[i], Loader::one(b + i), sum);
  return sum;
}

template <typename Loader, typename T>
inline float l2_avx2(const float* a, const T* b, std::size_t dim) {
  __m256 s0 = _mm256_setzero_ps(), s1 = s0;
  std::size_t i = 0;
  for (; i + 16 <= dim; i += 16) {
    const __m256 d0 = _mm256_sub_ps(_mm256_loadu_ps(a + i), Loader::load(b + i));
    const __m256 d1 = _mm256_sub_ps(_mm256_loadu_ps(a + i + 8), Loader::load(b + i + 8));
    s0 = _mm256_fmadd_ps(d0, d0, s0);
    s1 = _mm256_fmadd_ps(d1, d1, s1);
  }
  for (; i + 8 <= dim; i += 8) {
    const __m256 d = _mm256_sub_ps(_mm256_loadu_ps(a + i), Loader::load(b + i));
    s0 = _mm256_fmadd_ps(d, d, s0);
  }
  float sum = sum_lanes(_mm256_add_ps(s0, s1));
  for (; i < dim; ++i) {
    const float d = a[i] - Loader::one(b + i);
    sum += d * d;
  }
  return sum;
}

inline float dot_f32_avx2(const float* a, const float* b, std::size_t dim) {
  return dot_avx2<LoadF32>(a, b, dim);
}
inline float l2_f32_avx2(const float* a, const float* b, std::size_t dim) {
  return l2_avx2<LoadF32>(a, b, dim);
}
inline float dot_f16_avx2(const float* a, const std::uint16_t* b, std::size_t dim) {
  return dot_avx2<LoadF16>(a, b, dim);
}
inline float l2_f16_avx2(const float* a, const std::uint16_t* b, std::size_t dim) {
  return l2_avx2<LoadF16>(a, b, dim);
}

// Rows one by one, each with all vectors of a few that stay in the nearest cache.
inline void project_f32_avx2(const float* vectors, std::size_t count, const float* rows,
                             std::size_t dim, std::size_t directions, float* out) {
  constexpr std::size_t tile = 16;
  for (std::size_t start = 0; start < count; start += tile) {
    const std::size_t stop = start + tile < count ? start + tile : count;
    for (std::size_t r = 0; r < directions; ++r) {
      for (std::size_t n = start; n < stop; ++n) {
        out[n * directions + r] = dot_f32_avx2(vectors + n * dim, rows + r * dim, dim);
      }
    }
  }
}

// Sums of `x` and a copy with its lanes swapped, differences where `odd` says: one stage of the
// transform inside a register.
template <int odd>
inline __m256 butterfly(__m256 x, __m256 swapped) {
  return _mm256_blend_ps(_mm256_add_ps(x, swapped), _mm256_sub_ps(swapped, x), odd);
}

inline void hadamard_avx2(float* v, std::size_t span) {
  if (span < 16) {
    stoker::portable_kernels().hadamard(v, span);
    return;
  }
  for (std::size_t i = 0; i < span; i += 8) {
    __m256 x = _mm256_loadu_ps(v + i);
    x = butterfly<0xAA>(x, _mm256_permute_ps(x, 0xB1));
    x = butterfly<0xCC>(x, _mm256_permute_ps(x, 0x4E));
    x = butterfly<0xF0>(x, _mm256_permute2f128_ps(x, x, 1));
    _mm256_storeu_ps(v + i, x);
  }
  std::size_t half = 8;
  for (; half * 2 < span; half *= 2) {
    for (std::size_t start = 0; start < span; start += 2 * half) {
      for (std::size_t i = start; i < start + half; i += 8) {
        const __m256 x = _mm256_loadu_ps(v + i);
        const __m256 y = _mm256_loadu_ps(v + i + half);
        _mm256_storeu_ps(v + i, _mm256_add_ps(x, y));
        _mm256_storeu_ps(v + i + half, _mm256_sub_ps(x, y));
      }
    }
  }
  const __m256 norm = _mm256_set1_ps(1.0f / std::sqrt(static_cast<float>(span)));
  for (std::size_t i = 0; i < half; i += 8) {
    const __m256 x = _mm256_loadu_ps(v + i);
    const __m256 y = _mm256_loadu_ps(v + i + half);
    _mm256_storeu_ps(v + i, _mm256_mul_ps(_mm256_add_ps(x, y), norm));
    _mm256_storeu_ps(v + i + half, _mm256_mul_ps(_mm256_sub_ps(x, y), norm));
  }
}

inline float max_abs_avx2(const float* v, std::size_t dim) {
  const __m256 no_sign = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
  __m256 largest = _mm256_setzero_ps();
  std::size_t i = 0;
  for (; i + 8 <= dim; i += 8) {
    largest = _mm256_max_ps(largest, _mm256_and_ps(_mm256_loadu_ps(v + i), no_sign));
  }
  alignas(32) float lanes[8];
  _mm256_store_ps(lanes, largest);
  float best = stoker::portable_kernels().max_abs(v + i, dim - i);
  for (const float lane : lanes) best = lane > best ? lane : best;
  return best;
}

inline std::int32_t round_query_avx2(const float* v, std::size_t dim, float to8, float to16,
                                     std::int8_t* q8, std::int16_t* q16) {
  const __m256 scale8 = _mm256_set1_ps(to8);
  const __m256 scale16 = _mm256_set1_ps(to16);
  const auto rounded = [](__m256 a, __m256 b, __m256 scale) {
    const __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(a, scale)),
                                              _mm256_cvtps_epi32(_mm256_mul_ps(b, scale)));
    return _mm256_permute4x64_epi64(packed, 0xD8);
  };
  __m256i sum = _mm256_setzero_si256();
  std::size_t i = 0;
  for (; i + 16 <= dim; i += 16) {
    const __m256 a = _mm256_loadu_ps(v + i);
    const __m256 b = _mm256_loadu_ps(v + i + 8);
    const __m256i narrow = rounded(a, b, scale8);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(narrow, _mm256_set1_epi16(1)));
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(q8 + i),
        _mm_packs_epi16(_mm256_castsi256_si128(narrow), _mm256_extracti128_si256(narrow, 1)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q16 + i), rounded(a, b, scale16));
  }
  return sum_lanes(sum) +
         stoker::portable_kernels().round_query(v + i, dim - i, to8, to16, q8 + i, q16 + i);
}

}  // namespace
