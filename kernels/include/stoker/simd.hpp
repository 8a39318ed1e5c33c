// Distance kernels, one table per instruction set, chosen once at run time.
//
// Codes are blocks of 64 dimensions in 32 bytes: the low nibble of byte j is dimension j of the
// block, the high nibble dimension 32 + j. Queries are laid out in dimension order. Integer
// kernels give the same bits on every instruction set; the portable table is the reference.
#pragma once

#include <cstddef>
#include <cstdint>

namespace stoker {

constexpr std::size_t kBlockDims = 64;
constexpr std::size_t kBlockBytes = 32;
// A block of 2-bit codes: bits 2i and 2i + 1 of byte j are dimension 32 * i + j of the block.
constexpr std::size_t kCoarseDims = 128;
constexpr std::size_t kCoarseBytes = 32;
// More dimensions could overflow a sum of 32 bits.
constexpr std::size_t kProjectDims = 2048;

struct Kernels {
  const char* name;

  // out[i] = sum over dimensions of q8 * nibble(codes[i]); nibbles 0 ... 15, q8 -127 ... 127.
  void (*dot_code4)(const std::int8_t* q8, std::size_t blocks, const std::uint8_t* const* codes,
                    std::size_t count, std::int32_t* out);

  // The same for 2-bit codes, 0 ... 3; q8 has `blocks` * kCoarseDims values.
  void (*dot_code2)(const std::int8_t* q8, std::size_t blocks, const std::uint8_t* const* codes,
                    std::size_t count, std::int32_t* out);

  // Sum over dimensions of q16 * value(high nibble, low nibble), |q16| <= 8191. See refine_value().
  std::int64_t (*dot_code8)(const std::int16_t* q16, std::size_t blocks, const std::uint8_t* high,
                            const std::uint8_t* low);

  float (*dot_f32)(const float* a, const float* b, std::size_t dim);
  float (*l2_f32)(const float* a, const float* b, std::size_t dim);
  // b holds IEEE 754 half floats.
  float (*dot_f16)(const float* a, const std::uint16_t* b, std::size_t dim);
  float (*l2_f16)(const float* a, const std::uint16_t* b, std::size_t dim);

  // Normalised Walsh-Hadamard transform of `span` floats in place, a power of two. The same bits
  // on every instruction set: sums of two, in one order.
  void (*hadamard)(float* v, std::size_t span);
  // The largest |v[i]|; 0 of nothing.
  float (*max_abs)(const float* v, std::size_t dim);
  // q8 = round(v * to8), q16 = round(v * to16), halves to even; returns the sum of q8. The same
  // bits everywhere.
  std::int32_t (*round_query)(const float* v, std::size_t dim, float to8, float to16,
                              std::int8_t* q8, std::int16_t* q16);
  // out[r] = sum over dimensions of q16 * rows[r * dim + d], |q16| <= 8191, |rows| <= 127, dim at
  // most kProjectDims.
  void (*project)(const std::int16_t* q16, const std::int8_t* rows, std::size_t dim,
                  std::size_t count, std::int32_t* out);
  // out[q * count + r]: the same of many queries; any dim and |q16| whose sums fit 32 bits.
  void (*project_many)(const std::int16_t* q16, std::size_t queries, const std::int8_t* rows,
                       std::size_t dim, std::size_t count, std::int32_t* out);

  // For coding vectors; but for the last, the same bits everywhere.
  // Both planes of `blocks` * kBlockDims coordinates: cells of v * inverse and what lies inside
  // them. sums: of v times the middles of the cells, and of v times refine_value().
  void (*encode_planes)(const float* v, std::size_t blocks, float inverse, std::uint8_t* high,
                        std::uint8_t* low, double* sums);
  // Cells 0 ... top of v * inverse * zoom about their middle, a byte each; zoom is a power of two.
  // Returns the sum of v times the middles of the cells over zoom times weights.
  double (*encode_cells)(const float* v, const float* inverse, const float* weights,
                         std::size_t count, float zoom, int top, std::uint8_t* cells);
  double (*squared_length)(const float* v, std::size_t dim);
  // out[n * directions + r] = dot of vector n and row r, with the bits that dot_f16 of this table
  // finds where the rows are half floats.
  void (*project_f32)(const float* vectors, std::size_t count, const float* rows, std::size_t dim,
                      std::size_t directions, float* out);
};

// The reconstruction level of a refined code, in 1/32 of the 4-bit step. The two outermost cells
// of the 4-bit code are unbounded; their sub-cells are four times as wide, so that a 4-bit step
// chosen for the bulk of the distribution does not clip its tail.
constexpr int refine_value(int high, int low) {
  if (high == 15) return 228 + 8 * low;
  if (high == 0) return -228 - 8 * low;
  return 32 * (high - 8) + 2 * low + 1;
}

const Kernels& portable_kernels();
const Kernels* avx2_kernels();     // nullptr where the build or the processor lacks it
const Kernels* avx512_kernels();
const Kernels* neon_kernels();

// The best table for this processor. STOKER_SIMD=portable|avx2|avx512|neon overrides it, and an
// unavailable name falls back to the best one.
const Kernels& kernels();

float half_to_float(std::uint16_t half);
std::uint16_t float_to_half(float value);   // round to nearest even

}  // namespace stoker
