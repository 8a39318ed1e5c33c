#include "stoker/simd.hpp"

#if defined(__aarch64__)
#include <arm_neon.h>

namespace stoker {
namespace {

void dot_code4(const std::int8_t* q8, std::size_t blocks, const std::uint8_t* const* codes,
               std::size_t count, std::int32_t* out) {
  const uint8x16_t mask = vdupq_n_u8(15);
  for (std::size_t i = 0; i < count; ++i) {
    int32x4_t sum = vdupq_n_s32(0);
    for (std::size_t b = 0; b < blocks; ++b) {
      for (std::size_t half = 0; half < 2; ++half) {
        const uint8x16_t c = vld1q_u8(codes[i] + b * kBlockBytes + half * 16);
        const int8x16_t low = vreinterpretq_s8_u8(vandq_u8(c, mask));
        const int8x16_t high = vreinterpretq_s8_u8(vshrq_n_u8(c, 4));
        const std::int8_t* q = q8 + b * kBlockDims + half * 16;
        const int8x16_t ql = vld1q_s8(q);
        const int8x16_t qh = vld1q_s8(q + 32);
        sum = vpadalq_s16(sum, vmull_s8(vget_low_s8(low), vget_low_s8(ql)));
        sum = vpadalq_s16(sum, vmull_s8(vget_high_s8(low), vget_high_s8(ql)));
        sum = vpadalq_s16(sum, vmull_s8(vget_low_s8(high), vget_low_s8(qh)));
        sum = vpadalq_s16(sum, vmull_s8(vget_high_s8(high), vget_high_s8(qh)));
      }
    }
    out[i] = vaddvq_s32(sum);
  }
}

void dot_code2(const std::int8_t* q8, std::size_t blocks, const std::uint8_t* const* codes,
               std::size_t count, std::int32_t* out) {
  const uint8x16_t mask = vdupq_n_u8(3);
  for (std::size_t i = 0; i < count; ++i) {
    int32x4_t sum = vdupq_n_s32(0);
    for (std::size_t b = 0; b < blocks; ++b) {
      for (std::size_t half = 0; half < 2; ++half) {
        const uint8x16_t c = vld1q_u8(codes[i] + b * kCoarseBytes + half * 16);
        const std::int8_t* q = q8 + b * kCoarseDims + half * 16;
        const uint8x16_t parts[4] = {vandq_u8(c, mask), vandq_u8(vshrq_n_u8(c, 2), mask),
                                     vandq_u8(vshrq_n_u8(c, 4), mask), vshrq_n_u8(c, 6)};
        for (std::size_t part = 0; part < 4; ++part) {
          const int8x16_t code = vreinterpretq_s8_u8(parts[part]);
          const int8x16_t value = vld1q_s8(q + part * 32);
          sum = vpadalq_s16(sum, vmull_s8(vget_low_s8(code), vget_low_s8(value)));
          sum = vpadalq_s16(sum, vmull_s8(vget_high_s8(code), vget_high_s8(value)));
        }
      }
    }
    out[i] = vaddvq_s32(sum);
  }
}

float dot_f32(const float* a, const float* b, std::size_t dim) {
  float32x4_t s0 = vdupq_n_f32(0), s1 = s0;
  std::size_t i = 0;
  for (; i + 8 <= dim; i += 8) {
    s0 = vfmaq_f32(s0, vld1q_f32(a + i), vld1q_f32(b + i));
    s1 = vfmaq_f32(s1, vld1q_f32(a + i + 4), vld1q_f32(b + i + 4));
  }
  float sum = vaddvq_f32(vaddq_f32(s0, s1));
  for (; i < dim; ++i) sum += a[i] * b[i];
  return sum;
}

float l2_f32(const float* a, const float* b, std::size_t dim) {
  float32x4_t s0 = vdupq_n_f32(0), s1 = s0;
  std::size_t i = 0;
  for (; i + 8 <= dim; i += 8) {
    const float32x4_t d0 = vsubq_f32(vld1q_f32(a + i), vld1q_f32(b + i));
    const float32x4_t d1 = vsubq_f32(vld1q_f32(a + i + 4), vld1q_f32(b + i + 4));
    s0 = vfmaq_f32(s0, d0, d0);
    s1 = vfmaq_f32(s1, d1, d1);
  }
  float sum = vaddvq_f32(vaddq_f32(s0, s1));
  for (; i < dim; ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return sum;
}

}  // namespace

const Kernels* neon_kernels() {
  // The rest has no NEON form yet; compilers vectorise the portable loops well enough there.
  static const Kernels table{"neon",
                             dot_code4,
                             dot_code2,
                             portable_kernels().dot_code8,
                             dot_f32,
                             l2_f32,
                             portable_kernels().dot_f16,
                             portable_kernels().l2_f16,
                             portable_kernels().hadamard,
                             portable_kernels().max_abs,
                             portable_kernels().round_query,
                             portable_kernels().project,
                             portable_kernels().project_many,
                             portable_kernels().encode_planes,
                             portable_kernels().encode_cells,
                             portable_kernels().squared_length,
                             portable_kernels().project_f32};
  return &table;
}

}  // namespace stoker
#else
namespace stoker {
const Kernels* neon_kernels() { return nullptr; }
}  // namespace stoker
#endif
