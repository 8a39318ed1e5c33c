#include "stoker/simd.hpp"

#if defined(__AVX512VNNI__) && defined(__AVX512VL__) && defined(__FMA__) && defined(__F16C__)
#include <algorithm>

#include "encode_kernels.hpp"
#include "simd_x86.inc.hpp"

namespace stoker {
namespace {

// The sums of the lanes of four vectors each.
inline void put_sums(const __m256i* sums, std::int32_t* out) {
  const __m256i all = _mm256_hadd_epi32(_mm256_hadd_epi32(sums[0], sums[1]),
                                        _mm256_hadd_epi32(sums[2], sums[3]));
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(out),
      _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
}

void dot_code4(const std::int8_t* q8, std::size_t blocks, const std::uint8_t* const* codes,
               std::size_t count, std::int32_t* out) {
  const __m256i mask = _mm256_set1_epi8(15);
  std::size_t i = 0;
  // Four at a time: the query is loaded once for all of them, and their sums are added up together.
  for (; i + 4 <= count; i += 4) {
    __m256i sums[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(),
                       _mm256_setzero_si256()};
    for (std::size_t b = 0; b < blocks; ++b) {
      const auto* q = reinterpret_cast<const __m256i*>(q8 + b * kBlockDims);
      const __m256i q_low = _mm256_loadu_si256(q);
      const __m256i q_high = _mm256_loadu_si256(q + 1);
      for (std::size_t n = 0; n < 4; ++n) {
        const __m256i c =
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes[i + n] + b * kBlockBytes));
        sums[n] = _mm256_dpbusd_epi32(sums[n], _mm256_and_si256(c, mask), q_low);
        sums[n] = _mm256_dpbusd_epi32(
            sums[n], _mm256_and_si256(_mm256_srli_epi16(c, 4), mask), q_high);
      }
    }
    put_sums(sums, out + i);
  }
  for (; i < count; ++i) {
    const std::uint8_t* code = codes[i];
    __m256i sum0 = _mm256_setzero_si256();
    __m256i sum1 = _mm256_setzero_si256();
    for (std::size_t b = 0; b < blocks; ++b) {
      const __m256i c =
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(code + b * kBlockBytes));
      const auto* q = reinterpret_cast<const __m256i*>(q8 + b * kBlockDims);
      const __m256i low = _mm256_and_si256(c, mask);
      const __m256i high = _mm256_and_si256(_mm256_srli_epi16(c, 4), mask);
      sum0 = _mm256_dpbusd_epi32(sum0, low, _mm256_loadu_si256(q));
      sum1 = _mm256_dpbusd_epi32(sum1, high, _mm256_loadu_si256(q + 1));
    }
    out[i] = sum_lanes(_mm256_add_epi32(sum0, sum1));
  }
}

void dot_code2(const std::int8_t* q8, std::size_t blocks, const std::uint8_t* const* codes,
               std::size_t count, std::int32_t* out) {
  const __m256i mask = _mm256_set1_epi8(3);
  std::size_t i = 0;
  for (; i + 4 <= count; i += 4) {
    __m256i sums[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(),
                       _mm256_setzero_si256()};
    for (std::size_t b = 0; b < blocks; ++b) {
      const auto* q = reinterpret_cast<const __m256i*>(q8 + b * kCoarseDims);
      const __m256i quarters[4] = {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1),
                                   _mm256_loadu_si256(q + 2), _mm256_loadu_si256(q + 3)};
      for (std::size_t n = 0; n < 4; ++n) {
        const __m256i c =
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes[i + n] + b * kCoarseBytes));
        const auto add = [&](int shift, const __m256i& part) {
          sums[n] = _mm256_dpbusd_epi32(
              sums[n], _mm256_and_si256(_mm256_srli_epi16(c, shift), mask), part);
        };
        add(0, quarters[0]);
        add(2, quarters[1]);
        add(4, quarters[2]);
        add(6, quarters[3]);
      }
    }
    put_sums(sums, out + i);
  }
  for (; i < count; ++i) {
    __m256i sum0 = _mm256_setzero_si256();
    __m256i sum1 = _mm256_setzero_si256();
    for (std::size_t b = 0; b < blocks; ++b) {
      const __m256i c =
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes[i] + b * kCoarseBytes));
      const auto* q = reinterpret_cast<const __m256i*>(q8 + b * kCoarseDims);
      const auto part = [&](int shift) {
        return _mm256_and_si256(_mm256_srli_epi16(c, shift), mask);
      };
      sum0 = _mm256_dpbusd_epi32(sum0, part(0), _mm256_loadu_si256(q));
      sum1 = _mm256_dpbusd_epi32(sum1, part(2), _mm256_loadu_si256(q + 1));
      sum0 = _mm256_dpbusd_epi32(sum0, part(4), _mm256_loadu_si256(q + 2));
      sum1 = _mm256_dpbusd_epi32(sum1, part(6), _mm256_loadu_si256(q + 3));
    }
    out[i] = sum_lanes(_mm256_add_epi32(sum0, sum1));
  }
}

float dot_f32(const float* a, const float* b, std::size_t dim) {
  __m512 s0 = _mm512_setzero_ps(), s1 = s0, s2 = s0, s3 = s0;
  std::size_t i = 0;
  for (; i + 64 <= dim; i += 64) {
    s0 = _mm512_fmadd_ps(_mm512_loadu_ps(a + i), _mm512_loadu_ps(b + i), s0);
    s1 = _mm512_fmadd_ps(_mm512_loadu_ps(a + i + 16), _mm512_loadu_ps(b + i + 16), s1);
    s2 = _mm512_fmadd_ps(_mm512_loadu_ps(a + i + 32), _mm512_loadu_ps(b + i + 32), s2);
    s3 = _mm512_fmadd_ps(_mm512_loadu_ps(a + i + 48), _mm512_loadu_ps(b + i + 48), s3);
  }
  const __m512 wide = _mm512_add_ps(_mm512_add_ps(s0, s1), _mm512_add_ps(s2, s3));
  const __m256 folded = _mm256_add_ps(_mm512_castps512_ps256(wide),
                                      _mm512_extractf32x8_ps(wide, 1));
  float sum = sum_lanes(folded);
  if (i < dim) sum += dot_f32_avx2(a + i, b + i, dim - i);
  return sum;
}

// Four rows at a time: the query is loaded once for all of them, and their sums added up together.
void project(const std::int16_t* q16, const std::int8_t* rows, std::size_t dim, std::size_t count,
             std::int32_t* out) {
  const auto wide = [](const std::int8_t* row) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row)));
  };
  std::size_t r = 0;
  for (; r + 4 <= count; r += 4) {
    const std::int8_t* row = rows + r * dim;
    __m512i sums[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(),
                       _mm512_setzero_si512()};
    std::size_t d = 0;
    for (; d + 32 <= dim; d += 32) {
      const __m512i q = _mm512_loadu_si512(q16 + d);
      for (std::size_t n = 0; n < 4; ++n) {
        sums[n] = _mm512_dpwssd_epi32(sums[n], wide(row + n * dim + d), q);
      }
    }
    __m256i halves[4];
    for (std::size_t n = 0; n < 4; ++n) {
      halves[n] = _mm256_add_epi32(_mm512_castsi512_si256(sums[n]),
                                   _mm512_extracti64x4_epi64(sums[n], 1));
    }
    put_sums(halves, out + r);
    for (; d < dim; ++d) {
      for (std::size_t n = 0; n < 4; ++n) out[r + n] += q16[d] * row[n * dim + d];
    }
  }
  if (r < count) portable_kernels().project(q16, rows + r * dim, dim, count - r, out + r);
}

// Four queries and four rows at a time: each is loaded once for all of the others.
void project_many(const std::int16_t* q16, std::size_t queries, const std::int8_t* rows,
                  std::size_t dim, std::size_t count, std::int32_t* out) {
  constexpr std::size_t tile = 4;
  std::size_t q = 0;
  for (; q + tile <= queries; q += tile) {
    const std::int16_t* query = q16 + q * dim;
    std::size_t r = 0;
    for (; r + tile <= count; r += tile) {
      const std::int8_t* row = rows + r * dim;
      __m512i sums[tile][tile];
      for (auto& some : sums) std::fill_n(some, tile, _mm512_setzero_si512());
      std::size_t d = 0;
      for (; d + 32 <= dim; d += 32) {
        __m512i wide[tile];
        for (std::size_t n = 0; n < tile; ++n) {
          wide[n] = _mm512_cvtepi8_epi16(
              _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + n * dim + d)));
        }
        for (std::size_t m = 0; m < tile; ++m) {
          const __m512i values = _mm512_loadu_si512(query + m * dim + d);
          for (std::size_t n = 0; n < tile; ++n) {
            sums[m][n] = _mm512_dpwssd_epi32(sums[m][n], wide[n], values);
          }
        }
      }
      for (std::size_t m = 0; m < tile; ++m) {
        __m256i halves[tile];
        for (std::size_t n = 0; n < tile; ++n) {
          halves[n] = _mm256_add_epi32(_mm512_castsi512_si256(sums[m][n]),
                                       _mm512_extracti64x4_epi64(sums[m][n], 1));
        }
        std::int32_t* const at = out + (q + m) * count + r;
        put_sums(halves, at);
        for (std::size_t rest = d; rest < dim; ++rest) {
          for (std::size_t n = 0; n < tile; ++n) {
            at[n] += query[m * dim + rest] * row[n * dim + rest];
          }
        }
      }
    }
    for (std::size_t m = 0; m < tile && r < count; ++m) {
      project(query + m * dim, rows + r * dim, dim, count - r, out + (q + m) * count + r);
    }
  }
  for (; q < queries; ++q) {
    project(q16 + q * dim, rows, dim, count, out + q * count);
  }
}

constexpr std::size_t kProjectRows = 4;
constexpr std::size_t kProjectVectors = 2;
// Vectors that meet a few rows before the next rows come: both stay in the nearest cache.
constexpr std::size_t kProjectTile = 16;

// What `dot_f16` keeps in four registers of eight lanes, here in two of sixteen.
struct Sums {
  __m512 first = _mm512_setzero_ps();
  __m512 second = _mm512_setzero_ps();

  void add(const float* a, const float* b) {
    first = _mm512_fmadd_ps(_mm512_loadu_ps(a), _mm512_loadu_ps(b), first);
    second = _mm512_fmadd_ps(_mm512_loadu_ps(a + 16), _mm512_loadu_ps(b + 16), second);
  }
  __m256 folded() const {
    const auto halves = [](__m512 v) {
      return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    };
    return _mm256_add_ps(halves(first), halves(second));
  }
};

// The sums of the lanes of four, in the order in which `sum_lanes` adds them up.
inline __m128 sum_lanes4(const Sums* sums) {
  const auto folded = [](__m256 a, __m256 b) {
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  };
  const __m256 ab = folded(sums[0].folded(), sums[1].folded());
  const __m256 cd = folded(sums[2].folded(), sums[3].folded());
  // Each lane: a0 + a2, a1 + a3, c0 + c2, c1 + c3; then b and d.
  const __m256 pairs =
      _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xEE));
  const __m256 whole = _mm256_hadd_ps(pairs, pairs);
  return _mm_unpacklo_ps(_mm256_castps256_ps128(whole), _mm256_extractf128_ps(whole, 1));
}

template <std::size_t vectors>
inline void project_few(const float* v, const float* rows, std::size_t dim, std::size_t directions,
                        float* out) {
  Sums sums[vectors][kProjectRows];
  for (std::size_t d = 0; d < dim; d += 32) {
    for (std::size_t n = 0; n < vectors; ++n) {
      for (std::size_t r = 0; r < kProjectRows; ++r) sums[n][r].add(v + n * dim + d, rows + r * dim + d);
    }
  }
  for (std::size_t n = 0; n < vectors; ++n) {
    _mm_storeu_ps(out + n * directions, sum_lanes4(sums[n]));
  }
}

void project_f32(const float* vectors, std::size_t count, const float* rows, std::size_t dim,
                 std::size_t directions, float* out) {
  if (dim % 32 != 0) {
    project_f32_avx2(vectors, count, rows, dim, directions, out);
    return;
  }
  for (std::size_t start = 0; start < count; start += kProjectTile) {
    const std::size_t stop = start + kProjectTile < count ? start + kProjectTile : count;
    std::size_t r = 0;
    for (; r + kProjectRows <= directions; r += kProjectRows) {
      std::size_t n = start;
      for (; n + kProjectVectors <= stop; n += kProjectVectors) {
        project_few<kProjectVectors>(vectors + n * dim, rows + r * dim, dim, directions,
                              out + n * directions + r);
      }
      if (n < stop) {
        project_few<1>(vectors + n * dim, rows + r * dim, dim, directions,
                       out + n * directions + r);
      }
    }
    for (; r < directions; ++r) {
      for (std::size_t n = start; n < stop; ++n) {
        Sums sums[kProjectRows];
        for (std::size_t d = 0; d < dim; d += 32) {
          sums[0].add(vectors + n * dim + d, rows + r * dim + d);
        }
        out[n * directions + r] = _mm_cvtss_f32(sum_lanes4(sums));
      }
    }
  }
}

}  // namespace

const Kernels* avx512_kernels() {
  static const Kernels table{"avx512",      dot_code4,     dot_code2,    dot_code8_avx2,
                             dot_f32,       l2_f32_avx2,   dot_f16_avx2, l2_f16_avx2,
                             hadamard_avx2, max_abs_avx2, round_query_avx2, project,
                             project_many,
                             encode_avx512::encode_planes, encode_avx512::encode_cells,
                             encode_avx512::squared_length, project_f32};
  static const bool usable =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c");
  return usable ? &table : nullptr;
}

}  // namespace stoker
#else
namespace stoker {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace stoker
#endif
